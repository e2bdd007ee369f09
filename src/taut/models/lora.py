"""Low-rank adapters through peft: LoRA (arXiv:2106.09685), rsLoRA (2312.03732), DoRA (2402.09353); PiSSA and OLoRA
(``models.adapter_start``).

``apply_lora`` wraps a loaded model in place and refuses settings that would not take effect. Of a vision-language
model, ``all-linear`` means the language model's layers, as in other frameworks; its other parts are adapted where
``targets`` names them. Rows of the embedding and the head that have to train (new tokens, end tokens that were never
trained) train on their own next to the frozen tables, through peft's trainable tokens: peft saves, loads and merges
them. A reward model's scalar head trains whole. The output head takes no adapter: it is scored in chunks, not called.

``plain_groups`` gives the tensors of the library's model with the adapter merged, a layer at a time, for saving.
``load_adapter`` loads a LoRA adapter in peft's format, made by taut or elsewhere, with the modules and rows that it
trained whole and the rows by which it enlarged the vocabulary. An adapter whose tensors are not those that its settings
call for is refused.

peft is imported in this file only, and only when an adapter is used.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from taut import capabilities
from taut.config import Decision, changed, configclass
from taut.errors import ConfigError, ModelError
from taut.io import files
from taut.models import adapter_start, architecture, products, tensor_parallel
from taut.models.adapter_patterns import require_bounded_patterns
from taut.models.byte_rows import experts_as_numbers
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
_OF_A_RESIDUAL = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Ways of peft to start an adapter that change the base."""
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
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = "kaiming"
    """How adapters start. kaiming, gaussian: A is drawn (uniform; normal, deviation 1 / rank), B is 0. pissa: at the
    largest singular values of the weights, olora: at the first rows and columns of their QR decomposition; the model
    starts as the base all the same, and what is saved is a LoRA of twice the rank on the base.
    """
    init_iterations: Annotated[int, Field(ge=1)] | None = None
    """Iterations of a randomised decomposition for init=pissa (peft's pissa_niter_N). Default: the exact one, which is
    slow for large layers.
    """
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
        unread = [name for name in changed(self) if name not in ("rank", "adapter")]
        if unread and (not self.is_on or self.adapter):
            why = "the adapter's own settings apply" if self.adapter else "lora.rank is 0"
            raise ConfigError(f"lora.{unread[0]} is set and would be ignored: {why}; remove it")
        if self.adapter and self.rank:
            raise ConfigError(
                f"lora.rank={self.rank} and lora.adapter are both set; remove lora.rank, "
                "the adapter has its own"
            )
        if self.dora and self.starts_at_weights:
            raise ConfigError(
                f"lora.init={self.init} with lora.dora=true, whose magnitudes are those of the weights and the adapter "
                "together; expected one of the two; take one out"
            )
        if self.init_iterations is not None and self.init != "pissa":
            raise ConfigError(
                f"lora.init_iterations is set and would be ignored: lora.init is {self.init}; expected pissa; remove it"
            )

    @property
    def starts_at_weights(self) -> bool:
        """Whether adapters start at a part of the weights."""
        return self.init in adapter_start.PARTS

    @property
    def saved_rank(self) -> int:
        """Rank of the adapters that are saved and pushed."""
        return self.rank * (2 if self.starts_at_weights else 1)

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or self.adapter is not None


class Base(NamedTuple):
    """The base that an adapter was trained on."""

    model: str
    quantise: Quantise | None


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
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        _as_if_whole(),
        experts_as_numbers(model),
    ):
        warnings.simplefilter("ignore")  # what peft warns of is refused here, or handled
        torch.manual_seed(seed)
        if config.adapter is not None:
            wrapped: Any = _load_trained(model, config.adapter, sharded)
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
                init_lora_weights="gaussian" if config.init == "gaussian" else True,
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
            _prepare_copies(wrapped, sharded)
    _adapt_quantised_experts(wrapped)
    _compute_in_base_dtype(wrapped)
    products.install(wrapped)
    if config.starts_at_weights:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapter_start.install(wrapped, config.init, config.init_iterations)
    tensor_parallel.divide_adapters(wrapped)
    _prepare_tables(wrapped)
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


def settings_to_continue(config: LoraConfig) -> dict[str, Any]:
    """adapter_config.json of ``lora.adapter``; empty without one."""
    return {} if config.adapter is None else _read_settings(Path(config.adapter), "lora.adapter")


def write_base(directory: Path, model: str, quantise: str | None) -> None:
    """Write next to an adapter which base it was trained on, and how that was quantised."""
    record = {"model": model, "quantise": quantise}
    (directory / BASE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def base_of(adapter: Path) -> Base | None:
    """The base that an adapter was trained on; None: taut did not make the adapter."""
    if not (adapter / BASE).is_file():
        return None
    try:
        record = files.read_json(adapter / BASE)
        model, how = record["model"], record["quantise"]
        if not isinstance(model, str) or how not in (None, *get_args(Quantise)):
            raise ValueError(f"found model={model} and quantise={how}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{adapter / BASE} cannot be read ({error}); expected the base and its quantisation, as taut wrote them; "
            "copy the adapter's files again"
        ) from error
    return Base(model, how)


def base_decisions(config: LoraConfig, model: str, quantise: Quantise | None) -> list[Decision]:
    """How the base of a run differs from the one that the adapter it continues was trained on."""
    base = None if config.adapter is None else base_of(Path(config.adapter))
    if base is None:
        return []
    decisions = []
    if base.model != model and Path(base.model).resolve() != Path(model).resolve():
        reason = (
            f"the adapter was trained on {base.model}; expected the same weights under another name"
        )
        decisions.append(Decision("lora.adapter", f"on {model}", reason))
    if base.quantise != quantise:
        was = "as it is" if base.quantise is None else f"in {base.quantise}"
        now = "as it is" if quantise is None else f"in {quantise}"
        remedy = "take quantise out" if base.quantise is None else f"set quantise={base.quantise}"
        reason = (
            f"the adapter was trained on the base {was}, of which it has learned the rounding too; {remedy} to go on "
            "where it was"
        )
        decisions.append(Decision("lora.adapter", f"on the base {now}", reason))
    return decisions


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


def _load_trained(model: PreTrainedModel, adapter: str, sharded: Collection[int]) -> Any:
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
    _prepare_copies(wrapped, sharded)
    # Loaded a second time: copies of what is stored in 16 bit are wide only now, and peft's report is returned.
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
    init = str(settings.get("init_lora_weights", True)).lower()
    if init.startswith(_OF_A_RESIDUAL):
        raise ModelError(
            f"{key}={directory} was trained with init_lora_weights={init} and belongs to a base from which its start "
            "was subtracted; expected an adapter of the base itself; convert it with peft's save_pretrained("
            "path_initial_model_for_weight_conversion=...)"
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


def _adapt_quantised_experts(model: nn.Module) -> None:
    """Let an adapter of quantised experts be added to the numbers of their weights; peft would add them to codes."""
    for module in model.modules():
        wrapper: Any = module
        if not hasattr(module, "lora_A") or not hasattr(_base_layer(wrapper), "wide_sizes"):
            continue
        capabilities.require("an adapter of quantised experts", "lora.rank with quantise")
        (adapter,) = wrapper.lora_A
        wrapper.get_param = partial(getattr, wrapper.lora_A[adapter], "weight")  # for its dtype
        wrapper._activate_lora = partial(_adding, wrapper)


@contextmanager
def _adding(wrapper: Any, active: Collection[str]) -> Iterator[None]:
    """peft's ``ParamWrapper._activate_lora`` for quantised experts."""
    factors = _base_layer(wrapper).factors
    for adapter in set(active) & set(wrapper.lora_A):
        factors[wrapper.parameter_name] = wrapper.get_delta_factors(adapter)
    try:
        yield
    finally:
        factors.pop(wrapper.parameter_name, None)


def _base_layer(module: Any) -> Any:
    """The module that an adapter's modules surround."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _prepare_copies(model: nn.Module, sharded: Collection[int]) -> None:
    """Put what trains in float32, and make whole what peft copied from the layers' shards (``sharded``, by id): like
    adapters, every rank trains all of it. All ranks call it.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if hasattr(parameter, "full_tensor") and id(parameter) not in sharded:
                assert parameter is not None
                copy = parameter.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor
                module._parameters[name] = nn.Parameter(copy, parameter.requires_grad)
    widen_trained(model)


def _compute_in_base_dtype(model: nn.Module) -> None:
    """Let adapters compute in the dtype of the layer they adapt, which is bfloat16 in a sharded model that computes in
    it: peft would widen their input to float32, the dtype of their weights, and keep it for the backward pass.
    """
    for module in model.modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            layer.cast_input_dtype_enabled = False


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


Whole = Callable[[Collection[str]], Iterable[tuple[str, Tensor]]]
"""Gives the tensors of these names whole, one after another, in the order of the model's state dict."""
_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")
"""A numbered block: a decoder layer, a layer of a vision tower."""


def plain_skeleton(model: nn.Module) -> PreTrainedModel:
    """The library's model without adapters, whose tensors ``plain_groups`` gives: on the meta device, for saving."""
    base = architecture.unwrap(model)
    plain = _made_again(model)
    plain.tie_weights()
    if hasattr(base, "generation_config"):  # reward models have none
        plain.generation_config = copy.deepcopy(base.generation_config)
    for name in ("_weight_conversions", "_auto_class"):
        if hasattr(base, name):
            setattr(plain, name, getattr(base, name))
    return plain


def _made_again(model: nn.Module) -> PreTrainedModel:
    """The library's model without adapters and contents."""
    base = architecture.unwrap(model)
    kind = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
    config = copy.deepcopy(base.config)
    config._attn_implementation = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are what the quantised ones stand for
    if architecture.has_head(model):
        config.tie_word_embeddings = architecture.is_tied(model)  # an adapter can separate the two
    make: Any = kind
    with torch.device("meta"):
        plain = make(config)
    assert isinstance(plain, PreTrainedModel)
    return plain


@torch.no_grad()
def plain_groups(model: nn.Module, whole: Whole | None = None) -> Iterator[dict[str, Tensor]]:
    """The tensors of a model without adapters: those merged, quantised weights as the numbers that they stand for,
    nothing narrower than float32; a tied tensor under its first name. A group is a numbered block, such as a decoder
    layer, or one module outside of these. No two are in memory where the caller empties each.

    ``whole``: gives the tensors of ``model``, where it holds shards. The tensors may share storage with those of
    ``model``, which stay as they are.
    """
    skeleton = plain_skeleton(model)
    wrapped: Any = skeleton
    if is_adapted(model):
        from peft import get_peft_model

        wrapper: Any = model
        settings = copy.deepcopy(wrapper.peft_config[wrapper.active_adapter])
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            if adapter_start.is_installed(model):
                settings = _twice_the_rank(settings)
            wrapped = get_peft_model(
                _made_again(model), settings, adapter_name=wrapper.active_adapter
            )
    prefix = "base_model.model." if is_adapted(model) else ""
    tied = {name for name, first in architecture.first_names(skeleton).items() if name != first}
    kept = skeleton.state_dict().keys() - tied
    modules = {name for name, _ in wrapped.named_modules()}
    adapted = {name for name, module in wrapped.named_modules() if _is_adapter(module)}
    places = {name: _place(name, modules, adapted) for name in model.state_dict()}
    needed = {
        place
        for place in {*places.values()}
        if any(name.startswith(f"{place.removeprefix(prefix)}.") for name in kept)
    }
    first = architecture.first_names(model)
    names: dict[str, list[str]] = {}  # a tensor's first name -> those under which it is needed
    left: dict[str, int] = {}  # group -> number of tensors that it waits for
    for name, place in places.items():
        if place in needed:
            names.setdefault(first.get(name, name), []).append(name)
            left[_group(place)] = left.get(_group(place), 0) + 1
    waiting: dict[str, dict[str, Tensor]] = {group: {} for group in left}
    for arrived, tensor in _own(model, names) if whole is None else whole(names):
        for name in names.get(arrived, ()):
            group = _group(places[name])
            waiting[group][name] = tensor.detach()
            left[group] -= 1
        del tensor
        for group in [group for group in waiting if not left[group]]:
            found = _merged(wrapped, wide_state(model, waiting.pop(group)), places, adapted)
            found = {name.removeprefix(prefix): found.pop(name) for name in [*found]}
            yield {name: found.pop(name) for name in [*found] if name in kept}
    assert not waiting, f"weights missing: {next(iter(waiting))}"


def _own(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """``Whole`` of a model that has its tensors whole."""
    return ((name, tensor) for name, tensor in model.state_dict().items() if name in names)


def _is_adapter(module: nn.Module) -> bool:
    """Whether peft merges this module."""
    return hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")


def _place(name: str, modules: Collection[str], adapted: Collection[str]) -> str:
    """The module that a tensor belongs to: the outermost one with an adapter, or the innermost one."""
    parts = name.split(".")
    parents = [".".join(parts[:stop]) for stop in range(1, len(parts))]
    inside = [parent for parent in parents if parent in modules]
    return next((parent for parent in inside if parent in adapted), inside[-1])


def _group(place: str) -> str:
    """The group that a module belongs to."""
    block = _BLOCK.match(place)
    return place if block is None else block[0]


def _merged(
    wrapped: nn.Module,
    tensors: dict[str, Tensor],
    places: Mapping[str, str],
    adapted: Collection[str],
) -> dict[str, Tensor]:
    """The tensors of some modules, adapters merged as peft merges them. ``tensors`` is emptied."""
    plain: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name in [*tensors]:
        if (place := places[name]) in adapted:
            parts.setdefault(place, {})[name.removeprefix(f"{place}.")] = tensors.pop(name)
        else:
            plain[name] = tensors.pop(name)
    for place in [*parts]:
        weights = parts.pop(place)
        module: Any = wrapped.get_submodule(place)
        weights = adapter_start.with_starts_joined(weights)
        missing, unexpected = module.load_state_dict(weights, strict=False, assign=True)
        assert not missing, f"{place}: weights missing: {missing[:3]}"
        assert not unexpected, f"{place}: weights unexpected: {unexpected[:3]}"
        if hasattr(module, "unload_and_optionally_merge_module"):
            result = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            module.merge(safe_merge=True)
            result = module.get_base_layer()
        plain |= {f"{place}.{name}": tensor for name, tensor in result.state_dict().items()}
        module.to("meta")  # what it was merged from goes
    return plain


def save_adapter(model: nn.Module, directory: Path, whole: Whole | None = None) -> None:
    """Write the adapter (and modules_to_save) in peft's format, safetensors. ``whole``: see ``plain_groups``."""
    inner: Any = model
    commit = getattr(inner.config, "_commit_hash", None)  # of a base from the hub
    for config in inner.peft_config.values():
        config.revision = commit or config.revision
        if isinstance(config.target_modules, set):  # its order differs between processes
            config.target_modules = sorted(config.target_modules)
        if config.modules_to_save:  # peft itself names the head again
            config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    state_dict = None
    if whole is not None:
        of_base = re.compile(
            r"\.(base_layer|original_module)\.(?!.*lora_)"
        )  # not adapters around adapters
        first = architecture.first_names(model)
        modules = dict(model.named_modules())
        adapted = {name for name, module in modules.items() if _is_adapter(module)}
        names = {
            name: first.get(name, name)
            for name in model.state_dict()
            if _place(name, modules, adapted) in adapted and not of_base.search(name)
        }
        found = dict(whole({*names.values()}))
        state_dict = {name: found[source] for name, source in names.items()}
    trained = dict(inner.peft_config)
    if adapter_start.is_installed(model):
        state_dict = adapter_start.with_starts_joined(state_dict or model.state_dict())
        inner.peft_config = {name: _twice_the_rank(config) for name, config in trained.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # embeddings are saved only where they were trained
            inner.save_pretrained(
                str(directory), state_dict=state_dict, save_embedding_layers=False
            )
    finally:
        inner.peft_config = trained


def _twice_the_rank(settings: Any) -> Any:
    """peft's settings of an adapter with twice the rank and the same scale."""
    twice = copy.deepcopy(settings)
    twice.r *= 2
    twice.lora_alpha *= math.sqrt(2) if settings.use_rslora else 2
    return twice


def _row_adapters(model: nn.Module) -> tuple[Any, Any]:
    """peft's adapters for rows of the embedding and of the head; None where there is none."""
    tables = architecture.tables(model)
    embedding, head = (
        getattr(tables.get(name), "token_adapter", None) for name in ("embedding", "head")
    )
    return embedding, head
