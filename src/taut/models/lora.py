"""Low-rank adapters through peft: LoRA (arXiv:2106.09685), rsLoRA (2312.03732), DoRA (2402.09353).

``apply_lora`` wraps a loaded model in place and refuses settings that would not take effect. Of a vision-language
model, ``all-linear`` means the language model's layers, as in other frameworks; its other parts are adapted where
``targets`` names them. Rows of the embedding and the head that have to train (new tokens, end tokens that were never
trained) train on their own next to the frozen tables, through peft's trainable tokens: peft saves, loads and merges
them. A reward model's scalar head trains whole. The output head takes no adapter: it is scored in chunks, not called.

``plain_model`` returns a model of the library with the adapter merged, separate from the one in training, for saving.
``load_adapter`` loads a LoRA adapter in peft's format, made by taut or elsewhere, with the modules and rows that it
trained whole and the rows by which it enlarged the vocabulary. An adapter whose tensors are not those that its settings
call for is refused.

peft is imported in this file only, and only when an adapter is used.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from taut.config import configclass, fields_of
from taut.errors import ConfigError, ModelError
from taut.io import files
from taut.models import architecture, products
from taut.models.adapter_patterns import require_bounded_patterns
from taut.models.frozen import looking_wide, wide_state, widen_trained
from taut.models.heads import scalar_head
from taut.models.load import require_file_itself
from taut.models.quantised import Quantise, quiet_import
from taut.models.tokens import add_tokens

ALL: Literal["all-linear"] = "all-linear"
WEIGHTS, BASE = "adapter_model.safetensors", "taut_base.json"
COMPLETE = (
    "expected each tensor that adapter_config.json calls for, and no other; copy the adapter's files again, and set "
    "model to the base it was made for"
)
TABLES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "embed_in.weight",
    "embed_out.weight",
)
"""Names of the tables in adapters that train them whole."""
_TARGETS, _SAVED = "lora.targets", "lora.modules_to_save"


@configclass
class LoraConfig:
    """Low-rank adapters; off while ``rank`` is 0 and ``adapter`` is not set."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters. 0 trains the model itself."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale: alpha / rank (alpha / sqrt(rank) with rslora). Default: twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, keyed per sample. Above 0 it disables prefix sharing."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Linear modules to adapt: by the end of their names (q_proj, mlp.up_proj), wherever they are; by a glob over whole
    names or a /regular expression/; by a part (vision_tower, projector, language_model). all-linear: every one but the
    head; in a vision-language model every one of its language model.
    """
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rank-stabilised LoRA)."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained whole next to the adapters, by the end of their names: embed_tokens, lm_head; in a
    vision-language model also projector, whatever its family calls it.
    """
    train_token_rows: Literal["auto", "always", "never"] = "auto"
    """Rows of frozen tables that train on their own. auto: those of added tokens, and of end-of-turn tokens that were
    never trained; always: those of end-of-turn tokens in any case; never: none, and a run that needs one is refused.
    """
    adapter: str | None = None
    """Directory of an adapter to continue training; its own settings apply."""

    def __post_init__(self) -> None:
        changed = [
            name
            for name, info in fields_of(type(self)).items()
            if name not in ("rank", "adapter")
            and getattr(self, name) != info.get_default(call_default_factory=True)
        ]
        if changed and (not self.is_on or self.adapter):
            why = "the adapter's own settings apply" if self.adapter else "lora.rank is 0"
            raise ConfigError(f"lora.{changed[0]} is set and would be ignored: {why}; remove it")
        if self.adapter and self.rank:
            raise ConfigError(
                f"lora.rank={self.rank} and lora.adapter are both set; remove lora.rank, "
                "the adapter has its own"
            )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or self.adapter is not None


class Adapted(NamedTuple):
    """A model with an adapter."""

    model: nn.Module
    new_ids: list[int]
    """The rows by which its vocabulary's tables grew."""
    num_tensors: int
    """Tensors of the adapter."""


# -- put adapters on a model -----------------------------------------------------------------------


def apply_lora(
    model: PreTrainedModel,
    config: LoraConfig,
    seed: int = 0,
    rows: Mapping[str, list[int]] | None = None,
) -> nn.Module:
    """Wrap ``model`` in a peft model in which only adapters, modules_to_save and ``rows`` (from ``choose_rows``) train;
    the model itself where LoRA is off.

    The adapters' first matrices are drawn from ``seed``, so that all ranks draw the same.
    """
    if not config.is_on:
        return model
    quiet_import()
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    sharded = {id(p) for p in model.parameters() if hasattr(p, "full_tensor")}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _as_if_whole():
        warnings.simplefilter("ignore")  # what peft warns of is refused here, or handled
        torch.manual_seed(seed)
        if config.adapter is not None:
            wrapped: Any = _load_trained(model, config.adapter)
        else:
            task = task_of(model)
            saved = _saved_names(model, config.modules_to_save)
            table = architecture.table_names(model)[0]
            saves_embedding = any(ends_with(table, name) for name in saved)
            scalar = [] if task == "CAUSAL_LM" else ["score"]
            settings = PeftLoraConfig(
                task_type=task,  # peft takes its name
                r=config.rank,
                lora_alpha=config.alpha if config.alpha is not None else 2 * config.rank,  # type: ignore[arg-type]
                lora_dropout=config.dropout,
                target_modules=_target_names(model, config.targets),
                use_rslora=config.rslora,
                use_dora=config.dora,
                modules_to_save=list(dict.fromkeys([*saved, *scalar])) or None,
                trainable_token_indices=dict(rows or {}) or None,
                ensure_weight_tying=saves_embedding and architecture.is_tied(model),
            )
            copied = [*saved, *(rows or ())]

            def is_copied(name: str) -> bool:
                around = accumulate(name.split("."), lambda outer, part: f"{outer}.{part}")
                return any(ends_with(full, kept) for full in around for kept in copied)

            try:
                with looking_wide(model, is_copied):
                    wrapped = get_peft_model(model, settings)
            except ValueError as error:
                raise ModelError(
                    f"peft puts no such adapters on {type(model).__name__}: {' '.join(str(error).split())}; expected "
                    "settings that each module takes; change lora.dropout, lora.dora or lora.targets"
                ) from error
    _make_copies_whole(wrapped, sharded)
    products.install(wrapped)
    _prepare_tables(wrapped)
    widen_trained(wrapped)
    for parameter in wrapped.parameters():
        is_wide = parameter.dtype in (torch.float32, torch.float64)
        assert is_wide or not parameter.requires_grad, "adapters are trained in full precision"
    assert isinstance(wrapped, nn.Module)
    return wrapped


def adapter_settings(adapter: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter."""
    settings = _read_settings(adapter, "adapter")
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"adapter={adapter} is a {kind} adapter; expected LoRA, which can be merged"
        )
    return settings


def write_base(directory: Path, model: str, quantise: str | None) -> None:
    """Write next to an adapter which base it was trained on, and how that was quantised."""
    record = {"model": model, "quantise": quantise}
    (directory / BASE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def quantisation_of(adapter: Path) -> Quantise | None:
    """How the base was quantised that an adapter was trained on; None: it was not, or taut did not make the adapter."""
    if not (adapter / BASE).is_file():
        return None
    try:
        how = files.read_json(adapter / BASE)["quantise"]
        if how not in (None, *get_args(Quantise)):
            raise ValueError(f"found quantise={how}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{adapter / BASE} cannot be read ({error}); expected the base and its quantisation, as taut wrote them; "
            "copy the adapter's files again"
        ) from error
    found: Quantise | None = how
    return found


def load_adapter(model: PreTrainedModel, adapter: Path, settings: dict[str, Any]) -> Adapted:
    """Put an adapter with these settings on a model loaded in full precision."""
    table = architecture.stored_table(architecture.embedding(model))
    assert table is not None, "an embedding has a weight"
    num_rows = int(table.shape[0])
    needed = [num_rows]
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        names = list(file.keys())
        needed += [
            int(file.get_slice(name).get_shape()[0]) for name in names if name.endswith(TABLES)
        ]
    indices = settings.get("trainable_token_indices") or {}
    for ids in indices.values() if isinstance(indices, dict) else [indices]:
        needed.append(max(ids, default=-1) + 1)
    new_ids = list(range(num_rows, max(needed)))
    add_tokens(model, new_ids)
    return Adapted(apply_lora(model, LoraConfig(adapter=str(adapter))), new_ids, len(names))


def choose_rows(
    model: PreTrainedModel, config: LoraConfig, needed: Collection[int], ends: Collection[int]
) -> dict[str, list[int]]:
    """The rows that train on their own: module name -> ids. ``needed`` have to train, ``ends`` end a turn."""
    if config.rank == 0 or config.train_token_rows == "never":
        return {}
    ids = sorted({*needed, *(ends if config.train_token_rows == "always" else ())})
    names = [
        name
        for name in architecture.table_names(model)
        if not any(ends_with(name, saved) for saved in config.modules_to_save)
    ]
    has_head = architecture.has_head(model)
    if ids and names and has_head and architecture.head(model).bias is not None:
        raise ModelError(
            f"lora.train_token_rows: the rows {ids[:4]} have to train, and a head with a bias cannot be trained "
            f"by rows; set lora.modules_to_save={architecture.table_names(model)}"
        )
    return dict.fromkeys(names, ids) if ids else {}


def describe_targets(model: nn.Module, config: LoraConfig) -> tuple[str, str]:
    """How many modules of each part of a vision-language model have adapters, and why."""
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    reason = "named by lora.targets"
    if config.adapter is not None:
        reason = "the settings of lora.adapter"
    elif config.targets == ALL:
        reason = f"{ALL}: the language model's; name vision_tower or projector in lora.targets to adapt them too"
    return architecture.count_by_part(adapted), reason


def task_of(model: nn.Module) -> str:
    """peft's name for the task of a model's head."""
    if architecture.has_head(model):
        return "CAUSAL_LM"
    is_token = type(architecture.unwrap(model)).__name__.endswith("ForTokenClassification")
    return "TOKEN_CLS" if is_token else "SEQ_CLS"


def is_adapted(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    return hasattr(model, "peft_config")


def _load_trained(model: PreTrainedModel, adapter: str) -> Any:
    """A peft model with the adapter in a directory, ready to train.

    The file must have each tensor that the adapter's settings call for, and no other: peft leaves missing ones at their
    initial values, and ignores others. Only the tables of embedding and head may be tensors of the base: peft saves
    them with a larger vocabulary.
    """
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    directory = Path(adapter)
    settings, task = _read_settings(directory, "lora.adapter"), task_of(model)
    require_file_itself(directory / WEIGHTS)
    if settings.get("task_type") not in (task, None):
        raise ModelError(
            f"lora.adapter={adapter} is an adapter for {settings['task_type']}; expected one for {task}, the model's "
            "head; name an adapter that was trained with this head"
        )
    names = [name for name, _ in model.named_modules()]
    require_bounded_patterns(f"lora.adapter={adapter}", settings, names)
    try:
        wrapped: Any = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    except KeyError as error:  # of a module that is trained whole, or of trained rows
        raise ModelError(
            f"lora.adapter={adapter}: {WEIGHTS} lacks {error.args[0]}; {COMPLETE}"
        ) from error
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"lora.adapter={adapter} does not fit this model: {reason}") from error
    # loaded a second time, since from_pretrained does not return peft's report
    base = architecture.unwrap(wrapped)
    renamed = getattr(base, "_checkpoint_conversion_mapping", None)
    weights = load_peft_weights(adapter, device="cpu", key_mapping=renamed)
    report: Any = set_peft_model_state_dict(wrapped, weights)
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    loaded = parameters.keys() - set(report.missing_keys)
    loaded_ids = {id(parameters[name]) for name in loaded}  # of tied ones, by either name
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    missing = {name for name in trained if id(parameters[name]) not in loaded_ids}
    tables = {id(architecture.stored_table(table)) for table in architecture.tables(base).values()}
    of_base = {name for name in loaded - trained if id(parameters[name]) not in tables}
    problems = [
        f"{what}: {len(names)} of {total}, {min(names).replace('.default', '')} the first"
        for what, names, total in (
            ("lacks tensors for the model", missing, len(trained)),
            ("has tensors that the model has no place for", report.unexpected_keys, len(weights)),
            ("has tensors of the base model", of_base, len(weights)),
        )
        if names
    ]
    if problems:
        raise ModelError(f"lora.adapter={adapter}: {WEIGHTS} {' and '.join(problems)}; {COMPLETE}")
    return wrapped


def _read_settings(directory: Path, key: str) -> dict[str, Any]:
    """adapter_config.json of an adapter that has weights."""
    try:
        settings = files.read_json(directory / "adapter_config.json")
        if not isinstance(settings, dict):
            raise ValueError(f"found a {type(settings).__name__}")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}={directory} has no adapter_config.json that can be read ({error}); expected the directory of a "
            "saved adapter"
        ) from error
    if not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"{key}={directory} has no {WEIGHTS}; expected an adapter saved as safetensors"
        )
    return settings


@contextmanager
def _as_if_whole() -> Iterator[None]:
    """peft makes adapters of sharded modules as of whole ones inside the block, since FSDP gathers the weights before
    they are used. By itself peft would take a mesh with names it does not know for tensor parallelism, and give
    adapters the sizes of shards; and DoRA's magnitudes are norms of whole weights.
    """
    from peft.tuners import tuners_utils
    from peft.tuners.lora import dora

    sizes: Any = tuners_utils
    magnitudes: Any = dora
    knows_shards, weight_of = sizes._torch_supports_distributed, magnitudes.dequantize_module_weight

    def whole_weight_of(module: nn.Module) -> Tensor:
        weight: Tensor = weight_of(module)
        whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return whole

    sizes._torch_supports_distributed = False
    magnitudes.dequantize_module_weight = whole_weight_of
    try:
        yield
    finally:
        sizes._torch_supports_distributed = knows_shards
        magnitudes.dequantize_module_weight = weight_of


def _make_copies_whole(model: nn.Module, sharded: Collection[int]) -> None:
    """Make whole what peft copied from the layers' shards (``sharded``, by id): like adapters, every rank trains all of
    it. All ranks call it.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if hasattr(parameter, "full_tensor") and id(parameter) not in sharded:
                assert parameter is not None
                copy = parameter.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor
                module._parameters[name] = nn.Parameter(copy, parameter.requires_grad)


def _prepare_tables(model: nn.Module) -> None:
    """Refuse adapters of the embedding or the head that the chunked head would not see, or merging would lose; and make
    the embedding look up the rows that train on their own. peft copies the whole table in every forward to insert them,
    and has a gradient of that size; the numbers are the same.
    """
    tables: dict[str, Any] = {**architecture.tables(model)}
    for kind, module in tables.items():
        if hasattr(module, "lora_A"):
            raise ModelError(
                f"the adapter adapts the {kind}, which taut trains whole, by rows or not at all; "
                "merge it into the model first, and train from the merged model"
            )
    embedding, head = _row_adapters(model)
    is_one = embedding is not None and head is not None and head.tied_adapter is embedding
    is_none = embedding is None and head is None
    if architecture.is_tied(model) and not is_one and not is_none:
        raise ModelError(
            "the adapter trains rows of the embedding and of the head apart, and the two are one table; "
            "expected them trained as one; merge it into the model first, and train from the merged model"
        )
    if head is not None and getattr(head.base_layer, "bias", None) is not None:
        raise ModelError(
            "the adapter trains rows of a head that has a bias, which peft leaves out; expected "
            "a head trained whole; train again with lora.modules_to_save"
        )
    if head is not None:
        _join_rows(head, tables["head"])
    if embedding is None:
        return
    forward_with_copy = embedding.forward_adapters

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = architecture.trained_rows(tables["embedding"])
        if rows is None:
            return forward_with_copy(ids, *args, **kwargs)
        is_row = ids.unsqueeze(-1) == rows.index_R
        scale = embedding._get_embed_scale()
        trained = nn.functional.embedding(is_row.int().argmax(-1), rows.weight_RD)
        trained = trained if scale is None else trained * scale.to(trained.dtype)
        return torch.where(is_row.any(-1, keepdim=True), trained, embedding.base_layer(ids))

    embedding.forward_adapters = forward


def _join_rows(adapter: Any, head: nn.Module) -> None:
    """Let the head compute the columns of rows that train on their own by themselves, as ``models/scorer.py`` does: the
    rest of the table may be stored in another dtype than they are.
    """
    forward_with_copy = adapter.forward_adapters

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = architecture.trained_rows(head)
        if rows is None:
            return forward_with_copy(hidden, *args, **kwargs)
        logits = adapter.base_layer(hidden)
        trained = nn.functional.linear(hidden, rows.weight_RD).to(logits.dtype)
        return logits.index_copy(-1, rows.index_R, trained)

    adapter.forward_adapters = forward


# -- names of modules: the user's -> peft's --------------------------------------------------------


def ends_with(full_name: str, name: str) -> bool:
    """Whether a pattern's parts are the last of a module's name, by which peft matches names."""
    return full_name == name or full_name.endswith(f".{name}")


def _target_names(
    model: PreTrainedModel, targets: Sequence[str]
) -> list[str] | Literal["all-linear"]:
    """lora.targets for peft: the ends of names as they are; patterns and parts as the whole names that they match."""
    if targets == ALL:
        if not architecture.has_parts(model):
            return ALL
        targets = ["language_model"]
    head = _head(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    names: dict[str, None] = {}
    for target in targets:
        is_part = target in architecture.PARTS
        is_end = not is_part and not any(sign in target for sign in "*?[/")
        if is_end:
            matches = [name for name in linear if ends_with(name, target)]
        else:
            matches = architecture.match_pattern(model, target, list(linear), _TARGETS)
        if is_part:
            matches = [name for name in matches if linear[name] is not head]
        if not matches:
            remedy = architecture.suggest(target, list(linear))
            if is_part:
                remedy = f"train it whole ({_SAVED}), or leave it out"
            raise ModelError(f"{_TARGETS}: {target!r} matches no linear module; {remedy}")
        if any(linear[name] is head for name in matches):
            raise ModelError(
                f"{_TARGETS}: {target!r} is the output head, which is scored in chunks and takes no adapter; "
                + (
                    f"train it whole with {_SAVED}, or "
                    if architecture.has_head(model)
                    else "it trains whole: "
                )
                + "leave it out"
            )
        names |= dict.fromkeys([target] if is_end else matches)
    return list(names)


def _saved_names(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """lora.modules_to_save for peft: the ends of names as they are; for ``projector`` the modules it consists of."""
    head, modules = _head(model), dict(model.named_modules())
    saved: list[str] = []
    for name in names:
        matches = [full for full in modules if ends_with(full, name)]
        if name == "projector" and not matches:  # the outermost modules, lists aside
            parameters = [parameter for parameter, _ in model.named_parameters()]
            inside = set(architecture.match_pattern(model, name, parameters, _SAVED))
            outermost: list[str] = []
            for full, module in modules.items():
                weights = {f"{full}.{rest}" for rest, _ in module.named_parameters()}
                is_covered = any(full.startswith(f"{outer}.") for outer in outermost)
                is_list = isinstance(module, nn.ModuleList)
                if weights and weights <= inside and not is_covered and not is_list:
                    outermost.append(full)
            saved += outermost
            continue
        if not matches:
            raise ModelError(
                f"{_SAVED}: {name!r} matches no module; {architecture.suggest(name, list(modules))}"
            )
        if any(modules[full] is head for full in matches) and architecture.is_tied(model):
            raise ModelError(
                f"{_SAVED}: {name!r} is tied to the embedding; "
                f"name the embedding instead ({architecture.table_names(model)[0]}): both are then "
                "trained as one"
            )
        saved.append(name)
    return saved


def _head(model: PreTrainedModel) -> nn.Module:
    """The output head, or the scalar one."""
    module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return module if isinstance(module, nn.Module) else scalar_head(model)


# -- models without adapters -----------------------------------------------------------------------


def plain_model(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """The library's model with ``model``'s weights and any adapter merged, sharing storage where nothing changed.

    ``state_dict``: the full weights under ``model``'s names, where ``model`` holds shards. The result has no buffers
    that are not saved: it is for saving, not for running. ``model`` itself stays as it is.
    """
    weights = wide_state(model, model.state_dict() if state_dict is None else state_dict)
    base = architecture.unwrap(model)
    kind = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
    config = copy.deepcopy(base.config)
    config._attn_implementation = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are what the quantised ones stand for
    if architecture.has_head(model):
        config.tie_word_embeddings = architecture.is_tied(model)  # an adapter can separate the two
    with torch.device("meta"):
        plain: Any = kind(config)
    if is_adapted(model):
        from peft import get_peft_model

        wrapper: Any = model
        settings = copy.deepcopy(wrapper.peft_config[wrapper.active_adapter])
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            wrapped: Any = get_peft_model(plain, settings, adapter_name=wrapper.active_adapter)
        _assign(wrapped, weights)
        embedding, head = _row_adapters(wrapped)
        if embedding is not None and head is not None and head.tied_adapter is embedding:
            head.base_layer.weight = embedding.base_layer.weight  # else they would merge separately
        plain = wrapped.merge_and_unload(safe_merge=True)
    else:
        _assign(plain, weights)
    plain.tie_weights()
    if hasattr(base, "generation_config"):  # reward models have none
        plain.generation_config = copy.deepcopy(base.generation_config)
    for name in ("_weight_conversions", "_auto_class"):
        if hasattr(base, name):
            setattr(plain, name, getattr(base, name))
    assert isinstance(plain, PreTrainedModel)
    return plain


def save_adapter(
    model: nn.Module, directory: Path, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapter (and modules_to_save) in peft's format, safetensors."""
    inner: Any = model
    for config in inner.peft_config.values():
        if isinstance(config.target_modules, set):  # its order differs between processes
            config.target_modules = sorted(config.target_modules)
        if config.modules_to_save:  # peft itself names the head again
            config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # embeddings are saved only where they were trained
        inner.save_pretrained(str(directory), state_dict=state_dict, save_embedding_layers=False)


def _assign(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put ``weights`` into a module on the meta device. A missing weight is an error."""
    detached = {name: tensor.detach() for name, tensor in weights.items()}
    missing, unexpected = module.load_state_dict(detached, strict=False, assign=True)
    assert not missing, f"weights missing: {missing[:3]}"
    assert not unexpected, f"weights unexpected: {unexpected[:3]}"


def _row_adapters(model: nn.Module) -> tuple[Any, Any]:
    """peft's adapters for rows of the embedding and of the head; None where there is none."""
    tables = architecture.tables(model)
    embedding, head = (
        getattr(tables.get(name), "token_adapter", None) for name in ("embedding", "head")
    )
    return embedding, head
