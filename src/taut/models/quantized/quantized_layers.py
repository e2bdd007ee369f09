"""Quantized weights under adapters (QLoRA, arXiv:2305.14314), through bitsandbytes and the library's integration of it.

    nf4     4 bits a weight: the nearest of 16 values, times the largest weight of its block of 64; those maxima are
            quantized to 8 bits themselves (double quantization): 4.13 bits in all
    int8    8 bits a weight: a multiple of 1/127 of the largest weight of its row (LLM.int8, arXiv:2208.07339)

Linear layers of the decoder are quantized, and the experts that are one tensor, each by itself; embedding, head, norms,
routers, scalar heads and vision towers are stored as ``frozen`` says. Each tensor is quantized as the library reads it,
so the whole model is never in memory.

A quantized layer has one parameter, a row of bytes (quantized_storage.py). Of several ranks each reads and quantizes
some rows of the weight, and all exchange maxima and codes, so the bytes are those of one process. Of experts each reads
and quantizes its own. A weight whose blocks cross rows, or which the library makes of other tensors, is read and
quantized whole by every rank.

A base that comes quantized is read as it is where bitsandbytes wrote it; other formats do not train, and are refused by
name. Where nothing trains, those of ``WIDENED`` are read as the numbers they stand for.

bitsandbytes is imported here and in quantized_storage.py, and only for a quantized base; peft imports it where it is
there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from taut.errors import ConfigError, ModelError
from taut.io import extras
from taut.models import architecture
from taut.models.quantized.quantized_storage import (
    BLOCK,
    NESTED_BLOCK,
    Format,
    Kind,
    QuantizedLinear,
    divided_like,
    nested_values,
    num_own,
    quantize_experts,
    quantized_layers,
)
from taut.models.settings import Quantize

TRAINABLE = ("bitsandbytes",)
"""The formats in which a base may come quantized."""
DEQUANTIZED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats in which models are published that were never otherwise -> transformers' settings that widen them."""
WIDENED = (*DEQUANTIZED, "compressed-tensors")
"""Formats that transformers reads as plain weights where it is asked to."""
_OUTSIDE = (
    r".*\b(?:visual|vision_tower|vision_model|multi_modal_projector|connector|merger)",
    r"(?!.*\.\d+\.).*",  # in no numbered layer: head, scalar head
)
"""Regular expressions for the modules that are not quantized."""


# -- before reading


def quiet_import() -> None:
    """Silence what bitsandbytes logs when it is imported: which optional kernels it lacks."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _quantization(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings by which a checkpoint's weights are quantized; empty: they are not."""
    parts = (config, config.get_text_config())  # the library asks both
    settings: Any = next((s for p in parts if (s := getattr(p, "quantization_config", None))), {})
    values: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    return values


def format_of(config: PreTrainedConfig) -> str | None:
    """The format in which a checkpoint's weights are quantized, or None."""
    values = _quantization(config)
    if not values:
        return None
    method = str(values.get("quant_method", "unknown")).rpartition(".")[2].lower()
    names = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "bits_and_bytes")
    if method in names or values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    return method


def bits_of(config: PreTrainedConfig) -> int:
    """Bits of the narrowest weight of a checkpoint that comes quantized."""
    values = _quantization(config)
    match format_of(config):
        case "bitsandbytes":
            return 8 if values.get("load_in_8bit") else 4
        case "compressed-tensors":
            groups = (values.get("config_groups") or {}).values()
            weights = [group.get("weights") for group in groups if isinstance(group, dict)]
            return min((int(of["num_bits"]) for of in weights if of), default=16)
        case "fp8" | "mxfp4" as found:
            return {"fp8": 8, "mxfp4": 4}[found]
    return int(values.get("bits") or values.get("w_bit") or 4)


def ask_for_numbers(config: PreTrainedConfig, needed_by: str) -> None:
    """Let the library read a checkpoint's weights as the numbers they stand for, where it can. ``needed_by``: the
    setting that names the model.
    """
    found = format_of(config)
    if found not in WIDENED:
        return
    if found == "compressed-tensors":
        extras.require("compressed", needed_by)
    config.quantization_config = {**_quantization(config), "dequantize": True}


def require_trainable(
    path: str, config: PreTrainedConfig, how: Quantize | None, *, adapts: bool
) -> bool:
    """Whether the checkpoint comes quantized. Raises for a format that cannot train, for one that would be quantized
    twice, and for a run without adapters.
    """
    found = format_of(config)
    if found is None:
        return False
    if found not in TRAINABLE:
        remedy = "start from the model it was made from; quantize=nf4 makes that small"
        if found in DEQUANTIZED:
            make = (
                f"from_pretrained(..., quantization_config={DEQUANTIZED[found]}(dequantize=True))"
            )
            remedy = f"save it in bfloat16 first: transformers' {make}, then save_pretrained"
        raise ModelError(
            f"model={path} comes quantized as {found}, which does not train; expected weights that are not quantized, "
            f"or quantized by {' or '.join(TRAINABLE)}; {remedy}"
        )
    if how is not None:
        raise ConfigError(
            f"quantize={how} and model={path} comes quantized already; expected one of the two; take the key out"
        )
    if not adapts:
        raise ModelError(
            f"model={path} comes quantized, and rounded weights cannot be updated; expected adapters next to them: set "
            "lora.rank, or start from the model it was made from"
        )
    return True


def settings_of(how: Quantize, compute: torch.dtype, whole: Sequence[str]) -> BitsAndBytesConfig:
    """The library's settings. ``whole``: the ends of names of modules that are trained whole."""
    skipped = [*_OUTSIDE, *(rf"(?:.*\.)?{re.escape(name)}" for name in whole)]
    make: Any = BitsAndBytesConfig
    settings: BitsAndBytesConfig = make(
        load_in_4bit=how == "nf4",
        load_in_8bit=how == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=skipped,
    )
    return settings


# -- while reading


@contextmanager
def reading_rows() -> Iterator[None]:
    """Inside, the library's quantizers for bitsandbytes make layers of this file."""
    kinds: Any = AUTO_QUANTIZER_MAPPING
    before = {f"bitsandbytes_{bits}": kinds[f"bitsandbytes_{bits}"] for bits in ("4bit", "8bit")}
    problems: list[ModelError] = []
    report = problems.append  # not the list: the library copies what reads a weight
    kinds.update({name: _with_rows(quantizer, report) for name, quantizer in before.items()})
    try:
        yield
    except RuntimeError as error:  # "We encountered some issues"
        raise problems[0] if problems else error from error
    finally:
        kinds.update(before)


def _with_rows(quantizer: Any, report: Callable[[ModelError], None]) -> type:
    """A class of quantizers like ``quantizer``, for layers of this file. ``report`` takes what they refuse."""

    class WithRows(quantizer):  # type: ignore[misc]  # a class that is a value
        quantized_element_size: Any = None  # a row counts its bytes

        def _process_model_before_weight_loading(
            self, model: PreTrainedModel, **settings: Any
        ) -> None:
            super()._process_model_before_weight_loading(model, **settings)
            values: Any = self.quantization_config
            kind: Any = "int8" if values.load_in_8bit else values.bnb_4bit_quant_type
            in_routers = set() if self.pre_quantized else _in_routers(model)
            # parts of the names of tensors that the library makes of others, in the files of some models of this class
            made = {
                pattern.rpartition("\\1")[2].strip(".^$")
                for transform in get_model_conversion_mapping(model)
                if isinstance(transform, WeightConverter)
                for pattern in transform.target_patterns
            }
            # layers whose weight is a row of bytes, but for routers
            for name, module in list(model.named_modules()):
                made_of = getattr(module, "source_cls", None)  # of layers that the library replaced
                if made_of is None or not isinstance(module, nn.Linear):
                    continue
                layer: nn.Linear
                if id(module) in in_routers:
                    inputs, outputs = module.in_features, module.out_features
                    layer = nn.Linear(inputs, outputs, module.bias is not None, device="meta")
                else:
                    layer = QuantizedLinear(
                        module,
                        kind,
                        is_nested=values.bnb_4bit_use_double_quant,
                        is_transposed=made_of is Conv1D,
                    )
                    layer.is_read_in_rows = (
                        not (self.pre_quantized or layer.is_transposed)
                        and layer.format.has_blocks_in_rows
                        and not any(part in f"{name}.weight" for part in made)
                    )
                model.set_submodule(name, layer)
            if not self.pre_quantized:
                _quantize_all_experts(model, kind)

        def param_needs_quantization(
            self, model: PreTrainedModel, name: str, **settings: Any
        ) -> bool:
            place, _, key = name.rpartition(".")
            return key in getattr(model.get_submodule(place), "formats", {})

        def get_quantize_ops(self) -> ConversionOps:
            return _Quantize(report)

        def get_load_operations(self) -> dict[str, Any]:
            return {"deserialize": partial(_Repack, report)}

    return WithRows


def _in_routers(model: PreTrainedModel) -> set[int]:
    """The ids of modules that choose experts, which stay in float32."""
    layers = architecture.layers(model)
    routers = (router for layer in layers for router in architecture.routers(layer))
    return {id(module) for router in routers for module in router.modules()}


def _quantize_all_experts(model: PreTrainedModel, kind: Kind) -> None:
    """Raises ModelError where experts would stay as they are."""
    num_experts = architecture.num_experts(architecture.text_config(model))
    layers = nn.ModuleList(architecture.layers(model))
    for name, module in layers.named_modules():
        if name.split(".")[-1] == "experts":
            quantize_experts(module, kind)
    for name, parameter in layers.named_parameters():
        if num_experts and parameter.ndim == 3 and parameter.shape[0] == num_experts:
            raise ModelError(
                f"quantize={kind}: found the experts {name} in {type(model).__name__}; expected them in a module named "
                "experts; take the key out: they are stored in float32 then"
            )


def _part_of(parameter: Any, row: Tensor) -> nn.Parameter:
    """The part of a row that this rank keeps."""
    if hasattr(parameter, "full_tensor"):
        part = DtensorShardOperation(parameter).shard_tensor(row)
        assert part is not None, "what is one tensor has a slice for each rank"
        row = part.clone()  # without the memory of the rest
    return nn.Parameter(row, requires_grad=False)


class _Quantize(ConversionOps):
    """A weight, or what this rank read of it -> this rank's part of its row, or the rows of its experts."""

    def __init__(self, report: Callable[[ModelError], None]) -> None:
        self.report = report

    def convert(
        self, input_dict: dict[str, Any], *_: Any, model: Any = None, **__: Any
    ) -> dict[str, Any]:
        rows = {}
        for name, found in input_dict.items():
            place, _dot, key = name.rpartition(".")
            module = model.get_submodule(place)
            weight = found[0] if isinstance(found, list) else found
            try:
                rows[name] = _row_in(module, key, weight)
            except ModelError as error:
                self.report(error)
                raise
        return rows


def _row_in(module: Any, key: str, weight: Tensor) -> nn.Parameter:
    """The parameter that a quantized weight of a module is on this rank."""
    parameter, layout = module._parameters[key], module.formats[key]
    if not isinstance(module, QuantizedLinear):
        num = num_own(parameter)
        made = torch.empty(num, layout.num_bytes, dtype=torch.uint8, device=weight.device)
        for row, expert in zip(made, weight[:num], strict=True):
            row.copy_(layout.quantize(expert))
        return nn.Parameter(made, requires_grad=False)
    if module.is_read_in_rows and hasattr(parameter, "full_tensor"):
        return _part_of(parameter, _quantized_together(layout, weight, parameter))
    return _part_of(parameter, layout.quantize(module.in_checkpoint(weight)))


@torch.no_grad()
def _quantized_together(layout: Format, some: Tensor, parameter: Any) -> Tensor:
    """The row of a weight of which each rank has read some rows."""
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1  # the others have replicas
    length = -(-layout.shape[0] // mesh.size(axis))
    expected = len(range(layout.shape[0])[mesh.get_local_rank(axis) * length :][:length])
    if len(some) != expected:
        raise ModelError(
            f"found {len(some)} rows as this rank's part of a weight of {list(layout.shape)}; expected {expected}, as "
            "config.json says; copy the model's files again"
        )
    widths = layout.bytes_of_a_row
    found = layout.codes_of(some) if len(some) else (some, some)
    flat = (part.contiguous().view(torch.uint8) for part in found)
    own = torch.cat([part.view(len(some), n) for part, n in zip(flat, widths, strict=True)], 1)
    whole = divided_like(parameter, own, (layout.shape[0], sum(widths))).full_tensor()
    largest, codes = whole.split(widths, 1)
    return layout.row_of(largest.contiguous().view(torch.float32).view(-1), codes)


class _Repack(ConversionOps):
    """The tensors that bitsandbytes stores of a weight -> this rank's part of its row."""

    def __init__(self, report: Callable[[ModelError], None], hf_quantizer: Any) -> None:
        self.report = report
        self.hf_quantizer = hf_quantizer  # by which the library knows not to convert what it reads

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: Any = None,
        full_layer_name: str = "",
        **__: Any,
    ) -> dict[str, Any]:
        if len(input_dict) == 1:  # a weight that is not quantized
            return input_dict
        tensors = {
            name: found[0] if isinstance(found, list) else found
            for name, found in input_dict.items()
        }
        layer = model.get_submodule(full_layer_name.rpartition(".")[0])
        try:
            if layer.format.kind != "int8":
                tensors = _unpacked(tensors, layer.format, full_layer_name)
            row = layer.format.pack(tensors)
        except ModelError as error:
            self.report(error)
            raise
        return {"weight": _part_of(layer.weight, row)}


def _unpacked(tensors: Mapping[str, Tensor], expected: Format, name: str) -> dict[str, Tensor]:
    """The parts of a 4-bit weight by the names of ``Format.parts``. Raises for blocks of another size, or other values,
    than bitsandbytes writes by itself.
    """
    from bitsandbytes import functional

    codes = tensors["weight"]
    constants = {key: tensor for key, tensor in tensors.items() if key != "weight"}
    state = functional.QuantState.from_dict(constants, device=codes.device)
    found: dict[str, Any] = {
        "type": state.quant_type,
        "nested": state.nested,
        "block": state.blocksize,
    }
    wanted: dict[str, Any] = {"type": expected.kind, "nested": expected.is_nested, "block": BLOCK}
    if expected.is_nested and state.nested:
        values = nested_values(codes.device)
        is_usual = torch.equal(state.state2.code.float(), values)
        found |= {"nested block": state.state2.blocksize, "usual values": is_usual}
        wanted |= {"nested block": NESTED_BLOCK, "usual values": True}
    found["shape"], wanted["shape"] = list(state.shape), list(expected.shape)
    if found != wanted:
        raise ModelError(
            f"{name} comes quantized by bitsandbytes with {_listed(found)}; expected {_listed(wanted)}; start from the "
            "model it was made from, with quantize=nf4"
        )
    parts = {"absmax": state.absmax, "weight": codes}
    if state.nested:
        parts |= {"nested_offset": state.offset, "nested_absmax": state.state2.absmax}
    return parts


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


# -- after reading


def require_inside(model: PreTrainedModel) -> None:
    """Refuse a model of which more was quantized than linear layers of the decoder."""
    inside = {id(module) for module in architecture.layers(model).modules()}
    for name, module in quantized_layers(model):
        if id(module) not in inside:
            raise ModelError(
                f"{name} of {type(model).__name__} was quantized; expected linear layers of the decoder only; "
                "please report the model"
            )


def pretend(
    model: PreTrainedModel, how: Quantize, whole: Sequence[str], *, has_experts: bool
) -> None:
    """Give a model without contents (on the meta device) the layers of a quantized one, for a plan. ``has_experts``:
    its experts are quantized too.
    """
    names = {id(module): name for name, module in model.named_modules()}
    in_routers = _in_routers(model)
    for module in list(architecture.layers(model).modules()):
        name = names[id(module)]
        is_whole = any(f".{kept}." in f".{name}." for kept in whole)
        if type(module) is nn.Linear and not is_whole and id(module) not in in_routers:
            model.set_submodule(name, QuantizedLinear(module, how))
    if has_experts:
        _quantize_all_experts(model, how)


def pretended(config: PreTrainedConfig) -> Quantize | None:
    """How the linear layers of a checkpoint that comes quantized are stored, for a plan."""
    if format_of(config) != "bitsandbytes":
        return None
    return "nf4" if _quantization(config).get("load_in_4bit") else "int8"
