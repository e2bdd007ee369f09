"""Low-rank adapters through peft: LoRA (arXiv:2106.09685), rsLoRA (2312.03732), DoRA (2402.09353); PiSSA and OLoRA
(``models.lora.adapter_start``).

``apply_lora`` wraps a loaded model in place and refuses settings that would not take effect. Of a vision-language
model, ``all-linear`` means the language model's layers, as in other frameworks; its other parts are adapted where
``targets`` names them. Rows of the embedding and the head that have to train (new tokens, end tokens that were never
trained) train on their own next to the frozen tables, through peft's trainable tokens: peft saves, loads and merges
them. A reward model's scalar head trains whole. The output head takes no adapter: it is scored in chunks, not called.

``load_adapter`` loads a LoRA adapter in peft's format, made by taut or elsewhere, with the modules and rows that it
trained whole and the rows by which it enlarged the vocabulary. An adapter whose tensors are not those that its settings
call for is refused.

peft is imported here and in merge.py, and only when an adapter is used.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from taut.config import Decision
from taut.errors import ModelError
from taut.io import capabilities, files
from taut.io.replaced import replaced
from taut.models import architecture, tensor_parallel
from taut.models.cpu import cpu_matmul
from taut.models.heads import scalar_head
from taut.models.load import require_file_itself
from taut.models.lora import adapter_start
from taut.models.lora.patterns import require_bounded_patterns
from taut.models.quantized.frozen_storage import NARROW, looking_wide
from taut.models.quantized.quantized_layers import quiet_import
from taut.models.quantized.quantized_storage import experts_as_numbers
from taut.models.settings import LoraConfig, Quantize
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
_CARRIED = re.compile(
    r"(peft_(type|version)|task_type|base_model_name_or_path|revision|inference_mode|auto_mapping|runtime_config|"
    r"r|lora_(alpha|dropout|bias)|use_(rslora|dora|qalora)|qalora_group_size|(rank|alpha)_pattern|fan_in_fan_out|bias|"
    r"target_(modules|parameters)|exclude_modules|layers_(to_transform|pattern)|modules_to_save|ensure_weight_tying|"
    r"trainable_token_indices|init_lora_weights|(eva|corda|loftq|lora_ga)_config|megatron_core)\Z"
)
"""Settings of adapter_config.json that are in force here as in peft, or say how the adapter began or was stored."""
_MERGE = "merge it with peft (merge_and_unload), save the result and set model to it"
_ANEW = "it cannot be merged either: begin a new adapter with lora.rank"
_NOT_CARRIED = {
    "alora_invocation_tokens": ("the adapter acts behind these tokens alone", _ANEW),
    "arrow_config": ("each token takes another one of several adapters", _ANEW),
    "kasa_config": ("the smallest singular values of the base are taken away", _MERGE),
    "layer_replication": ("layers of the base occur several times", _MERGE),
    "monteclora_config": ("its matrices are drawn anew in each forward", _MERGE),
    "velora_config": ("its gradients depend on packing", "take it out of adapter_config.json"),
    "use_bdlora": ("its matrices consist of blocks", _MERGE),
}
"""Setting that taut refuses -> (its meaning, the remedy)."""
_TARGETS, _SAVED = "lora.targets", "lora.modules_to_save"


class Base(NamedTuple):
    """The base that an adapter was trained on."""

    model: str
    quantize: Quantize | None


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
    _adapt_stored_experts(wrapped)
    # Adapters compute in the dtype of the layer they adapt, which is bfloat16 in a sharded model that computes in it:
    # peft would widen their input to float32, the dtype of their weights, and keep it for the backward pass.
    for module in wrapped.modules():
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False
    cpu_matmul.install(wrapped)
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


def require_frozen_base(model: nn.Module, adapter: str) -> None:
    """Raise ModelError where the adapter that a run continues trains biases of the base: without adapters, the model
    would not be the base, which is the reference of other methods.
    """
    wrapped: Any = model
    (settings,) = wrapped.peft_config.values()
    for name, parameter in model.named_parameters() if settings.bias != "none" else ():
        if parameter.requires_grad and "lora_" not in name and ".modules_to_save." not in name:
            raise ModelError(
                f"lora.adapter={adapter} has bias={settings.bias}: {name.removeprefix('base_model.model.')} of the "
                "base trains; expected bias=none; merge it (taut merge MODEL adapter=DIR out=NEW) and begin anew there"
            )


def write_base(directory: Path, model: str, quantize: str | None) -> None:
    """Write next to an adapter which base it was trained on, and how that was quantized."""
    record = {"model": model, "quantize": quantize}
    (directory / BASE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def base_of(adapter: Path) -> Base | None:
    """The base that an adapter was trained on; None where taut did not make the adapter."""
    if not (adapter / BASE).is_file():
        return None
    try:
        record = files.read_json(adapter / BASE)
        model, how = record["model"], record["quantize"]
        if not isinstance(model, str) or how not in (None, *get_args(Quantize)):
            raise ValueError(f"found model={model} and quantize={how}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{adapter / BASE} cannot be read ({error}); expected the base and its quantization, as taut wrote them; "
            "copy the adapter's files again"
        ) from error
    return Base(model, how)


def base_decisions(config: LoraConfig, model: str, quantize: Quantize | None) -> list[Decision]:
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
    if base.quantize != quantize:
        was = "as it is" if base.quantize is None else f"in {base.quantize}"
        now = "as it is" if quantize is None else f"in {quantize}"
        remedy = "take quantize out" if base.quantize is None else f"set quantize={base.quantize}"
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

    # settings of this task, with patterns that end, and an adapter that peft can load
    directory = Path(adapter)
    settings, task = adapter_settings(directory, "lora.adapter"), task_of(model)
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
    for name, module in wrapped.named_modules():
        layer: Any = module
        if any(getattr(layer, "lora_bias", {}).values()) and layer.get_base_layer().bias is None:
            raise ModelError(
                f"lora.adapter={adapter} has lora_bias=true, and {name.removeprefix('base_model.model.')} has no bias "
                "into which it could be merged; expected an adapter without it; begin a new one with lora.rank"
            )
    # the file has each tensor that trains, no other, and none of the base
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


def adapter_settings(directory: Path, key: str = "adapter") -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter that has weights. ``key`` names it: ``lora.adapter`` goes on with it."""
    try:
        settings = files.read_json(directory / "adapter_config.json")
        if not isinstance(settings, dict):
            raise ValueError(f"found a {type(settings).__name__}")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}={directory} has no adapter_config.json that can be read ({error}); expected the directory of a "
            "saved adapter"
        ) from error
    harmless = ("velora_config",) if key == "adapter" else ()  # of its training alone
    refused = [
        name
        for name, value in settings.items()
        if value and not _CARRIED.match(name) and name not in harmless
    ]
    init = str(settings.get("init_lora_weights", True)).lower()
    problem = ""
    if not (directory / WEIGHTS).is_file():
        problem = f"has no {WEIGHTS}; expected an adapter saved as safetensors"
    elif (kind := settings.get("peft_type")) != "LORA":
        problem = (
            f"is a {kind} adapter; expected LoRA; {_MERGE}, or begin a new adapter with lora.rank"
        )
    elif refused:
        name = refused[0]
        does, remedy = _NOT_CARRIED.get(
            name, ("taut does not know it", f"{_MERGE}, or take it out where it has no effect")
        )
        value = json.dumps(settings[name])
        problem = f"has {name}={value:.60}: {does}; expected an adapter without it; {remedy}"
    elif init.startswith(_OF_A_RESIDUAL):
        problem = (
            f"was trained with init_lora_weights={init} on a base less its start; expected an adapter of the base "
            "itself; convert it with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if problem:
        raise ModelError(f"{key}={directory} {problem}")
    return settings


@contextmanager
def _as_if_whole() -> Iterator[None]:
    """peft makes adapters of sharded modules as of whole ones inside the block, since FSDP gathers the weights before
    they are used. By itself peft would take a mesh with names it does not know for tensor parallelism, and give
    adapters the sizes of shards; and DoRA's magnitudes are norms of whole weights.
    """
    from peft.tuners import tuners_utils
    from peft.tuners.lora import dora

    magnitudes: Any = dora
    weight_of = magnitudes.dequantize_module_weight

    def whole_weight_of(module: nn.Module) -> Tensor:
        weight: Tensor = weight_of(module)
        whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return whole

    whole_weights = replaced(magnitudes, dequantize_module_weight=whole_weight_of)
    with replaced(tuners_utils, _torch_supports_distributed=False), whole_weights:
        yield


def _adapt_stored_experts(model: nn.Module) -> None:
    """Let an adapter of quantized or narrow experts be added to the numbers of their weights; peft would add them to
    codes, or round the sum.
    """
    for module in model.modules():
        wrapper: Any = module
        if not hasattr(module, "lora_A") or not hasattr(_base_layer(wrapper), "factors"):
            continue
        capabilities.require("an adapter of quantized experts", "lora.rank with quantize")
        (adapter,) = wrapper.lora_A
        wrapper.get_param = partial(getattr, wrapper.lora_A[adapter], "weight")  # for its dtype
        wrapper._activate_lora = partial(_adding, wrapper)


@contextmanager
def _adding(wrapper: Any, active: Collection[str]) -> Iterator[None]:
    """peft's ``ParamWrapper._activate_lora`` for experts that are not in float32."""
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
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in NARROW:
            parameter.data = parameter.data.float()


def _prepare_tables(model: nn.Module) -> None:
    """Refuse adapters of the embedding or the head that the chunked head would not see, or merging would lose; and make
    the embedding look up the rows that train on their own. peft copies the whole table in every forward to insert them,
    and has a gradient of that size; the numbers are the same.
    """
    tables: dict[str, Any] = {**architecture.tables(model)}
    adapted = [kind for kind, module in tables.items() if hasattr(module, "lora_A")]
    embedding, head = (
        getattr(tables.get(name), "token_adapter", None) for name in ("embedding", "head")
    )
    is_one = embedding is not None and head is not None and head.tied_adapter is embedding
    is_none = embedding is None and head is None
    is_tied = architecture.is_tied(model)
    problem = ""
    if adapted:
        apart = " after the head was given a copy of its own: the two are one table"
        problem = (
            f"adapts the {adapted[0]}, which taut trains whole, by rows or not at all; expected adapters of other "
            f"layers; {_MERGE}{apart if is_tied else ''}"
        )
    elif is_tied and not is_one and not is_none:
        problem = (
            "trains rows of the embedding and of the head apart, which are one table; expected them trained as one; "
            "merge it into the model first, and train from the merged model"
        )
    elif head is not None and getattr(head.base_layer, "bias", None) is not None:
        problem = (
            "trains rows of a head that has a bias, which peft leaves out; expected a head trained whole; train again "
            "with lora.modules_to_save"
        )
    if problem:
        raise ModelError(f"the adapter {problem}")
    # rows that train on their own: the head's columns, and the embedding's look-up
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
        problem = ""
        if not matches and is_part:
            problem = f"matches no linear module; train it whole ({_SAVED}), or leave it out"
        elif not matches:
            problem = f"matches no linear module; {architecture.suggest(target, list(linear))}"
        elif any(linear[name] is head for name in matches):
            is_output = architecture.has_head(model)
            remedy = f"train it whole with {_SAVED}, or " if is_output else "it trains whole: "
            problem = f"is the output head, which is scored in chunks and takes no adapter; {remedy}leave it out"
        if problem:
            raise ModelError(f"{_TARGETS}: {target!r} {problem}")
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
        problem = ""
        if not matches:
            problem = f"matches no module; {architecture.suggest(name, list(modules))}"
        elif any(modules[full] is head for full in matches) and architecture.is_tied(model):
            table = architecture.table_names(model)[0]
            problem = f"is tied to the embedding; name the embedding instead ({table}): both are then trained as one"
        if problem:
            raise ModelError(f"{_SAVED}: {name!r} {problem}")
        saved.append(name)
    return saved


def _head(model: PreTrainedModel) -> nn.Module:
    """The output head, or the scalar one."""
    module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return module if isinstance(module, nn.Module) else scalar_head(model)
