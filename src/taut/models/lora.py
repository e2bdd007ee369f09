"""What an adapter is put on: the user's names -> peft's, or one line why not.

A target is the end of a name (q_proj, mlp.up_proj), wherever that is; a glob over whole names or a /regular
expression/; or a part of a vision-language model (``parts.WORDS``). Refused: what matches nothing, the output head as a
target (it is scored in chunks, not called), one half of a tied pair.

May import errors and models.{anatomy,heads,parts}.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from taut.config import configclass
from taut.errors import ConfigError, ModelError
from taut.io import files
from taut.models import architecture
from taut.models.adapter_patterns import require_bounded_patterns
from taut.models.heads import scalar_head
from taut.models.load import require_file_itself
from taut.models.tokens import add_tokens

ALL: Literal["all-linear"] = "all-linear"
_TARGETS, _SAVED = "lora.targets", "lora.modules_to_save"


def is_meant(full_name: str, name: str) -> bool:
    """peft's rule: a name is matched by its last parts."""
    return full_name == name or full_name.endswith(f".{name}")


def target_names(
    model: PreTrainedModel, targets: Sequence[str]
) -> list[str] | Literal["all-linear"]:
    """The ends of names as they are; what patterns and parts mean, in full."""
    if targets == ALL:
        if not architecture.has_parts(model):
            return ALL
        targets = ["language_model"]
    head, linear = _head(model), _linear(model)
    found: dict[str, None] = {}
    for target in targets:
        is_part = target in architecture.WORDS
        is_end = not is_part and not any(sign in target for sign in "*?[/")
        if is_end:
            matches = [name for name in linear if is_meant(name, target)]
        else:
            matches = architecture.matching(model, target, list(linear), _TARGETS)
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
        found |= dict.fromkeys([target] if is_end else matches)
    return list(found)


def saved_names(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The modules that train whole: ends of names as they are; for ``projector`` what it is made of."""
    head, modules = _head(model), dict(model.named_modules())
    found: list[str] = []
    for name in names:
        matches = [full for full in modules if is_meant(full, name)]
        if name == "projector" and not matches:
            found += _whole(model, name)
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
        found.append(name)
    return found


def _whole(model: PreTrainedModel, part: str) -> list[str]:
    """The outermost modules that a part is made of, none a list."""
    own = set(
        architecture.matching(model, part, [name for name, _ in model.named_parameters()], _SAVED)
    )
    found: list[str] = []
    for name, module in model.named_modules():
        whole = {f"{name}.{rest}" for rest, _ in module.named_parameters()}
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if whole and whole <= own and not is_inside and not isinstance(module, nn.ModuleList):
            found.append(name)
    return found


def _linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    every = model.named_modules()
    return {name: module for name, module in every if isinstance(module, nn.Linear | Conv1D)}


def _head(model: PreTrainedModel) -> nn.Module:
    """The output head, or the scalar one."""
    found = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found if isinstance(found, nn.Module) else scalar_head(model)


# --------------------------------------------------------------------------------------------------
# Low-rank adapters through peft: LoRA (arXiv:2106.09685), rsLoRA (2312.03732), DoRA (2402.09353).
#
# ``apply_lora`` wraps a loaded model in place; ``targets.py`` refuses what would not be honoured. Of a
# vision-language model, ``all-linear`` is the language model's, as with other frameworks; its other parts are adapted
# where ``targets`` names them. Rows of the embedding and the head that have to train (new tokens, ends that were
# never trained) train by themselves beside the frozen tables, through peft's trainable tokens: peft saves, loads and
# merges them. A reward model's scalar head trains whole beside the adapters. ``plain_model`` gives back a model of
# the library with the adapter merged, built beside the one in training, for saving.
#
# peft is imported here only, and only when an adapter is used. May import errors, config and
# models.{adapter_patterns,anatomy,parts,targets}.

WEIGHTS = "adapter_model.safetensors"
COMPLETE = (
    "expected each tensor that adapter_config.json calls for, and no other; copy the adapter's files again, and set "
    "model to the base it was made for"
)


@configclass
class LoraConfig:
    """Low-rank adapters; off while ``rank`` is 0 and ``adapter`` is not given."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters; 0: train the model itself."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale: alpha / rank (alpha / sqrt(rank) with rslora). Twice the rank if not given."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, keyed per sample; it turns prefix sharing off."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Linear modules to adapt: by the end of their names (q_proj, mlp.up_proj), wherever they are; by a glob over whole
    names or a /regular expression/; by a part (vision_tower, projector, language_model). all-linear: every one but the
    head, of a vision-language model every one of its language model.
    """
    rslora: bool = False
    """Scale by 1 / sqrt(rank)."""
    dora: bool = False
    """Weight-decomposed adapters."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained whole beside the adapters, by the end of their names: embed_tokens,
    lm_head; of a vision-language model also projector, whatever its family calls it.
    """
    train_rows: Literal["auto", "always", "never"] = "auto"
    """Rows of frozen tables that train by themselves. auto: those of added tokens, and of the tokens that end a turn
    where they were never trained; always: those that end a turn in any case; never: none, and a run that needs one
    is refused.
    """
    adapter: str | None = None
    """Directory of an adapter to go on from; its own settings hold."""

    def __post_init__(self) -> None:
        changed = [
            name
            for name, field_ in type(self).__dataclass_fields__.items()
            if name not in ("rank", "adapter") and getattr(self, name) != _default(field_)
        ]
        if changed and (not self.is_on or self.adapter):
            why = "the adapter's own settings hold" if self.adapter else "lora.rank is 0"
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


def _default(field_: Any) -> Any:
    return field_.default_factory() if callable(field_.default_factory) else field_.default


def choose_rows(
    model: PreTrainedModel, config: LoraConfig, needed: Collection[int], ends: Collection[int]
) -> dict[str, list[int]]:
    """The rows that train by themselves: module name -> ids. ``needed`` have to train, ``ends`` end a turn."""
    if config.rank == 0 or config.train_rows == "never":
        return {}
    ids = sorted({*needed, *(ends if config.train_rows == "always" else ())})
    names = [
        name
        for name in architecture.table_names(model)
        if not any(is_meant(name, saved) for saved in config.modules_to_save)
    ]
    has_head = architecture.has_head(model)
    if ids and names and has_head and architecture.head(model).bias is not None:
        raise ModelError(
            f"lora.train_rows: the rows {ids[:4]} have to train, and a head with a bias cannot be trained by rows; "
            f"set lora.modules_to_save={architecture.table_names(model)}"
        )
    return dict.fromkeys(names, ids) if ids else {}


def apply_lora(
    model: PreTrainedModel,
    config: LoraConfig,
    seed: int = 0,
    rows: Mapping[str, list[int]] | None = None,
) -> nn.Module:
    """Wrap ``model`` in a peft model in which only adapters, modules_to_save and ``rows`` (of
    ``choose_rows``) train; off: the model itself.

    The adapters' first matrices are drawn from ``seed``, so that all ranks draw the same.
    """
    if not config.is_on:
        return model
    from peft import PeftModel, get_peft_model

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # what peft warns of is refused here, or handled
        torch.manual_seed(seed)
        if config.adapter is not None:
            settings = _require_adapter(config.adapter, task_of(model))
            names = [name for name, _ in model.named_modules()]
            require_bounded_patterns(f"lora.adapter={config.adapter}", settings, names)
            try:
                wrapped: Any = PeftModel.from_pretrained(model, config.adapter, is_trainable=True)
            except KeyError as error:  # of a module that is trained whole, or of trained rows
                raise ModelError(
                    f"lora.adapter={config.adapter}: {WEIGHTS} lacks {error.args[0]}; {COMPLETE}"
                ) from error
            except (RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:300]
                raise ModelError(
                    f"lora.adapter={config.adapter} does not fit this model: {reason}"
                ) from error
            _require_all_loaded(wrapped, config.adapter)
        else:
            try:
                wrapped = get_peft_model(model, _peft_config(model, config, rows or {}))
            except ValueError as error:
                raise ModelError(
                    f"peft puts no such adapters on {type(model).__name__}: {' '.join(str(error).split())}; expected "
                    "settings that each module takes; change lora.dropout, lora.dora or lora.targets"
                ) from error
    _require_known_tables(wrapped)
    _embed_by_rows(wrapped)
    for parameter in wrapped.parameters():
        assert parameter.dtype in (torch.float32, torch.float64), (
            "adapters are trained in full precision"
        )
    assert isinstance(wrapped, nn.Module)
    return wrapped


def describe_targets(model: nn.Module, config: LoraConfig) -> tuple[str, str]:
    """What of a vision-language model carries adapters, and why."""
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    reason = "named by lora.targets"
    if config.adapter is not None:
        reason = "as lora.adapter has it"
    elif config.targets == ALL:
        reason = f"{ALL}: the language model's; name vision_tower or projector in lora.targets to adapt them too"
    return architecture.counted(adapted), reason


def task_of(model: nn.Module) -> str:
    """peft's name of what a model's head is for."""
    if architecture.has_head(model):
        return "CAUSAL_LM"
    is_token = type(architecture.unwrap(model)).__name__.endswith("ForTokenClassification")
    return "TOKEN_CLS" if is_token else "SEQ_CLS"


def is_adapted(model: nn.Module) -> bool:
    """Whether a model carries adapters."""
    return hasattr(model, "peft_config")


def plain_model(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """The library's model with ``model``'s weights and any adapter merged, sharing storage where
    nothing changed.

    ``state_dict`` holds the full weights under ``model``'s names where they are not in it
    (sharded). The result has no buffers that are not saved: it is for saving, not for running.
    ``model`` itself stays as it is.
    """
    weights = model.state_dict() if state_dict is None else state_dict
    base = architecture.unwrap(model)
    kind = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
    config = copy.deepcopy(base.config)
    config._attn_implementation = None
    if architecture.has_head(model):
        config.tie_word_embeddings = architecture.is_tied(model)  # an adapter can part the two
    with torch.device("meta"):
        plain: Any = kind(config)
    if not is_adapted(model):
        _assign(plain, weights)
    else:
        plain = _merged(model, plain, weights)
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
        if isinstance(config.target_modules, set):  # in another order in each process
            config.target_modules = sorted(config.target_modules)
        if config.modules_to_save:  # peft itself names the head again
            config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that embedding layers are not saved: only what was trained is
        inner.save_pretrained(str(directory), state_dict=state_dict, save_embedding_layers=False)


def _merged(model: Any, plain: Any, weights: Mapping[str, Tensor]) -> Any:
    """``plain`` with the adapter that ``weights`` (of the peft model) holds merged into it."""
    from peft import get_peft_model

    config = copy.deepcopy(model.peft_config[model.active_adapter])
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(plain, config, adapter_name=model.active_adapter)
    _assign(wrapped, weights)
    rows = [getattr(t, "token_adapter", None) for t in _table_modules(architecture.unwrap(wrapped))]
    if rows[0] is not None and rows[1] is not None and rows[1].tied_adapter is rows[0]:
        rows[1].base_layer.weight = rows[
            0
        ].base_layer.weight  # assigned apart, they would merge apart
    return wrapped.merge_and_unload(safe_merge=True)


def _assign(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put ``weights`` into a module on the meta device. What it lacks is an error."""
    own = {name: tensor.detach() for name, tensor in weights.items()}
    missing, unexpected = module.load_state_dict(own, strict=False, assign=True)
    assert not missing, f"weights missing: {missing[:3]}"
    assert not unexpected, f"weights unexpected: {unexpected[:3]}"


def _peft_config(model: PreTrainedModel, config: LoraConfig, rows: Mapping[str, list[int]]) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    task = task_of(model)
    scalar = [] if task == "CAUSAL_LM" else ["score"]
    asked = saved_names(model, config.modules_to_save)
    saved = list(dict.fromkeys([*asked, *scalar]))
    saves_tied = architecture.is_tied(model) and bool(asked)
    return PeftLoraConfig(
        task_type=task,  # its name will do
        r=config.rank,
        lora_alpha=config.alpha if config.alpha is not None else 2 * config.rank,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=target_names(model, config.targets),
        use_rslora=config.rslora,
        use_dora=config.dora,
        modules_to_save=saved or None,
        trainable_token_indices=dict(rows) or None,
        ensure_weight_tying=saves_tied and _names_embedding(model, asked),
    )


def _names_embedding(model: PreTrainedModel, names: list[str]) -> bool:
    return any(is_meant(architecture.table_names(model)[0], name) for name in names)


def _require_known_tables(model: nn.Module) -> None:
    """An adapter made elsewhere may adapt the embedding or the head in ways the chunked head would
    not see, or merging would not keep.
    """
    tables = _table_modules(architecture.unwrap(model))
    for kind, module in zip(("embedding", "output head"), tables, strict=True):
        if hasattr(module, "lora_A"):
            raise ModelError(
                f"the adapter adapts the {kind}, which taut trains whole, by rows or not at all; "
                "merge it into the model first, and train from the merged model"
            )
    embedding, head = (getattr(module, "token_adapter", None) for module in tables)
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
            "a head trained whole; train anew with lora.modules_to_save"
        )


def _table_modules(model: Any) -> tuple[nn.Module, nn.Module]:
    """The embedding and the output head."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _embed_by_rows(model: nn.Module) -> None:
    """peft copies the whole embedding in every forward to put its rows in, and has a gradient of that size; looking
    the rows up gives the same numbers.
    """
    table = architecture.embedding(model)
    adapter: Any = getattr(table, "token_adapter", None)
    if adapter is None:
        return
    by_copy = adapter.forward_adapters

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = architecture.trained_rows(table)
        if rows is None:
            return by_copy(ids, *args, **kwargs)
        is_row = ids.unsqueeze(-1) == rows.index_R
        scale = adapter._get_embed_scale()
        own = nn.functional.embedding(is_row.int().argmax(-1), rows.weight_RD)
        own = own if scale is None else own * scale.to(own.dtype)
        return torch.where(is_row.any(-1, keepdim=True), own, adapter.base_layer(ids))

    adapter.forward_adapters = forward


def _require_all_loaded(model: Any, adapter: str) -> None:
    """The file must have each tensor that the adapter's settings give the model, and none that has no place there:
    peft leaves the first as they were drawn, and passes over the second.

    Only the tables of embedding and head may be tensors of the base: peft saves them with a larger vocabulary.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    # a second time, since from_pretrained does not return peft's report
    renamed = getattr(architecture.unwrap(model), "_checkpoint_conversion_mapping", None)
    weights = load_peft_weights(adapter, device="cpu", key_mapping=renamed)
    report: Any = set_peft_model_state_dict(model, weights)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = parameters.keys() - set(report.missing_keys)
    loaded_ids = {
        id(parameters[name]) for name in loaded
    }  # a tied one may be loaded by its other name
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    missing = {name for name in trained if id(parameters[name]) not in loaded_ids}
    tables = {
        id(architecture.stored_table(module))
        for module in _table_modules(architecture.unwrap(model))
        if module
    }
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


def _require_adapter(path: str, task: str) -> dict[str, Any]:
    """The settings of an adapter that can be loaded."""
    directory = Path(path)
    if not (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"lora.adapter={path} has no adapter_config.json; expected the directory of a saved "
            "adapter"
        )
    if not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"lora.adapter={path} has no {WEIGHTS}; expected an adapter saved as safetensors"
        )
    require_file_itself(directory / WEIGHTS)
    settings = files.read_json(directory / "adapter_config.json")
    if settings.get("task_type") not in (task, None):
        raise ModelError(
            f"lora.adapter={path} is an adapter for {settings['task_type']}; expected one for {task}, the model's "
            "head; name an adapter that was trained with this head"
        )
    assert isinstance(settings, dict)
    return settings


# --------------------------------------------------------------------------------------------------
# A LoRA adapter in peft's format, made by taut or elsewhere -> the model it was trained as.
#
# Modules trained whole, trained rows and a vocabulary the adapter made larger come with it. Another kind of adapter is
# refused, and so is one whose tensors are not those its settings call for (``lora.py``).
#
# May import errors, anatomy, ``lora.py`` and ``tokens.py``.

TABLES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "embed_in.weight",
    "embed_out.weight",
)
"""How adapters name the tables they train whole."""


class Adapted(NamedTuple):
    """A model that carries an adapter."""

    model: nn.Module
    new_ids: list[int]
    """The rows by which its vocabulary's tables grew."""
    num_tensors: int
    """Of the adapter."""


def adapter_settings(adapter: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter."""
    file = adapter / "adapter_config.json"
    try:
        settings = files.read_json(file)
        kind = settings["peft_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"adapter={adapter} has no adapter_config.json that can be read ({error}); expected the directory of a "
            "saved LoRA adapter"
        ) from error
    if kind != "LORA":
        raise ModelError(
            f"adapter={adapter} is a {kind} adapter; expected LoRA, which can be merged"
        )
    if not (adapter / WEIGHTS).is_file():
        raise ModelError(
            f"adapter={adapter} has no {WEIGHTS}; expected an adapter saved as safetensors"
        )
    assert isinstance(settings, dict)
    return settings


def put_on(model: PreTrainedModel, adapter: Path, settings: dict[str, Any]) -> Adapted:
    """Put an adapter with these settings on a model loaded in full precision."""
    table = architecture.stored_table(architecture.embedding(model))
    assert table is not None, "an embedding has a weight"
    num_rows = int(table.shape[0])
    wanted = max([num_rows, *_rows_wanted(adapter, settings)])
    new_ids = list(range(num_rows, wanted))
    add_tokens(model, new_ids)
    adapted = apply_lora(model, LoraConfig(adapter=str(adapter)))
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        return Adapted(adapted, new_ids, len(file.keys()))


def _rows_wanted(adapter: Path, settings: dict[str, Any]) -> Iterator[int]:
    """How many rows the vocabulary's tables must have for this adapter."""
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dictionary)
            if name.endswith(TABLES):
                yield int(file.get_slice(name).get_shape()[0])
    indices = settings.get("trainable_token_indices") or {}
    for ids in indices.values() if isinstance(indices, dict) else [indices]:
        yield max(ids, default=-1) + 1
