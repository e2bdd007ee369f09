"""Quantised weights under adapters (QLoRA, arXiv:2305.14314), through bitsandbytes and the library's integration of it.

    nf4     4 bits a weight: the nearest of 16 values, times the largest weight of its block of 64; those maxima are
            quantised to 8 bits themselves (double quantisation): 4.13 bits in all
    int8    8 bits a weight: a multiple of 1/127 of the largest weight of its row (LLM.int8, arXiv:2208.07339)

Linear layers of the decoder are quantised; embedding, head, norms, scalar heads and vision towers are stored as
``frozen`` says. The library quantises each tensor as it reads it, so the whole model is never in memory.

A product widens its weight first (``products.linear_from_stored``), so activations are not rounded, as LLM.int8 would,
and no packed sample has a part in another's numbers. bitsandbytes' own forward is not used: on some CPUs it changes
the stored bytes as soon as a model is evaluated, and it rewrites biases.

A base that comes quantised is read as it is where bitsandbytes wrote it; other formats are refused by name.

bitsandbytes is imported in this file only, and only for a quantised base; peft imports it where it is installed.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from taut import extras
from taut.errors import ConfigError, ModelError
from taut.models import architecture
from taut.models.products import Widen, linear_from_stored

Quantise = Literal["nf4", "int8"]
BLOCK, NESTED_BLOCK = 64, 256
"""Weights under one maximum in nf4, and maxima under one of theirs."""
NF4_HALF_GAP, NESTED_LOSS = 0.155, 0.01
"""Half the largest distance of two values of nf4 (0.152), and what 8 bits take of a maximum, relative to the largest
around it."""
INT8_HALF_STEP, HALF_LOSS = 0.51 / 127, 2**-10
"""Half a step of int8, and the loss of float16, through which bitsandbytes quantises to int8."""
TRAINABLE = ("bitsandbytes",)
"""The formats in which a base may come quantised."""
_OUTSIDE = (
    r".*\b(?:visual|vision_tower|vision_model|multi_modal_projector|connector|merger)",
    r"(?!.*\.\d+\.).*",  # in no numbered layer: head, scalar head
)
"""Regular expressions for the modules that are not quantised."""


# -- before reading


def quiet_import() -> None:
    """Silence what bitsandbytes logs when it is imported: which optional kernels it lacks."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def require_package(needed_by: str) -> None:
    """Raise ConfigError where bitsandbytes is missing. ``needed_by``: the setting that asks for it."""
    extras.require("quant", needed_by)
    quiet_import()


def format_of(config: PreTrainedConfig) -> str | None:
    """The format in which a checkpoint's weights are quantised; None: they are not."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    values = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(values.get("quant_method", "unknown")).rpartition(".")[2].lower()
    if method in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "bits_and_bytes"):
        return "bitsandbytes"
    return method


def require_trainable(
    path: str, config: PreTrainedConfig, how: Quantise | None, *, adapts: bool
) -> bool:
    """Whether the checkpoint comes quantised. Raises for a format that cannot train, for one that would be quantised
    twice, and for a run without adapters.
    """
    found = format_of(config)
    if found is None:
        return False
    if found not in TRAINABLE:
        raise ModelError(
            f"model={path} comes quantised as {found}; expected weights that are not quantised, or quantised by "
            f"{' or '.join(TRAINABLE)}; start from the model it was made from, with quantise=nf4"
        )
    if how is not None:
        raise ConfigError(
            f"quantise={how} and model={path} comes quantised already; expected one of the two; take the key out"
        )
    if not adapts:
        raise ModelError(
            f"model={path} comes quantised, and rounded weights cannot be updated; expected adapters next to them: set "
            "lora.rank, or start from the model it was made from"
        )
    return True


def settings_of(how: Quantise, compute: torch.dtype, whole: Sequence[str]) -> BitsAndBytesConfig:
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


def require_dense(path: str, config: PreTrainedConfig, how: Quantise) -> None:
    """Refuse a mixture of experts: its experts are one tensor, which bitsandbytes leaves as it is."""
    if architecture.num_experts(config.get_text_config()):
        raise ModelError(
            f"quantise={how}: model={path} is a mixture of experts, whose experts bitsandbytes does not quantise; "
            "expected a dense model; take the key out: weights that do not train are stored in bfloat16"
        )


# -- after reading


def install(model: PreTrainedModel) -> None:
    """Let quantised linear layers widen their weights for each product."""
    inside = {id(module) for module in architecture.layers(model).modules()}
    for name, module in quantised_layers(model):
        if id(module) not in inside:
            raise ModelError(
                f"{name} of {type(model).__name__} was quantised; expected linear layers of the decoder only; "
                "please report the model"
            )
        module.widen = (
            _widen_4bit(module) if hasattr(module, "quant_state") else _widen_8bit(module)
        )
        module.forward = MethodType(_forward, module)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of linear layers whose weight is a code for their numbers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            yield name, module


def _forward(self: Any, x: Tensor) -> Tensor:
    return linear_from_stored(x, self.weight, self.bias, self.widen)


def _widen_4bit(module: Any) -> Widen:
    from bitsandbytes import functional

    state = module.weight.quant_state
    shape = state.shape

    def widen(weight: Tensor, dtype: torch.dtype) -> Tensor:
        # As one row: 0.50.2 gives wrong numbers on a CPU for rows that are not a multiple of a block.
        as_row = copy.copy(state)
        as_row.dtype, as_row.shape = dtype, torch.Size([shape.numel()])
        wide: Tensor = functional.dequantize_4bit(weight, as_row)
        return wide.view(shape)

    return widen


def _widen_8bit(module: Any) -> Widen:
    scale = module.weight.SCB / 127  # one a row

    def widen(weight: Tensor, dtype: torch.dtype) -> Tensor:
        wide: Tensor = weight * scale.to(weight.device).unsqueeze(1)
        return wide.to(dtype)

    return widen


def constants_of(module: Any) -> list[Tensor]:
    """The tensors of a quantised layer next to its codes."""
    if hasattr(module, "constants"):
        return [module.constants]
    state = getattr(module, "quant_state", None)
    if state is None:
        return [module.weight.SCB]
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


@torch.no_grad()
def error_of(module: Any, source: Tensor) -> float:
    """The largest error of a layer's weights, relative to the largest that its format makes of the ``source``: half the
    distance of neighbouring values of nf4, with what the block's maximum loses in 8 bits; half a step of int8.
    """
    wide = module.widen(module.weight, torch.float32).cpu()
    source = source.float()
    if wide.shape != source.shape:
        return torch.inf
    error = (wide - source).abs()
    if hasattr(module, "quant_state"):
        error, source = (_in_blocks(tensor.reshape(1, -1), BLOCK) for tensor in (error, source))
        largest = source.abs().amax(-1)
        around = _in_blocks(largest[None], NESTED_BLOCK).amax(-1, keepdim=True)
        around = around.expand(-1, NESTED_BLOCK).reshape(-1)[: len(largest)]
        allowed = (NF4_HALF_GAP * largest + NESTED_LOSS * around)[:, None]
    else:
        allowed = INT8_HALF_STEP * source.abs().amax(1, keepdim=True) + HALF_LOSS * source.abs()
    ratio = error / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    return float(ratio.max().nan_to_num(nan=torch.inf))


def _in_blocks(row: Tensor, size: int) -> Tensor:
    """[1, n] -> [blocks, size], with zeros at the end."""
    return nn.functional.pad(row, (0, -row.shape[1] % size)).view(-1, size)


def pretend(model: PreTrainedModel, how: Quantise, whole: Sequence[str]) -> None:
    """Give a model without contents (on the meta device) the sizes of a quantised one, for a plan."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in architecture.layers(model).modules():
        parts = names[id(module)].split(".")
        if type(module) is not nn.Linear or not {*parts}.isdisjoint(whole):
            continue
        rows, columns = module.weight.shape
        num_codes, num_constants = rows * columns, 4 * rows
        if how == "nf4":
            num_blocks = -(-num_codes // BLOCK)
            num_nested = -(-num_blocks // NESTED_BLOCK)
            num_constants = num_blocks + 4 * (16 + 256 + 1 + num_nested)
            num_codes = (num_codes + 1) // 2
        codes = torch.empty(num_codes, dtype=torch.uint8, device=module.weight.device)
        constants = torch.empty(num_constants, dtype=torch.uint8, device=codes.device)
        module.weight = nn.Parameter(codes, requires_grad=False)
        module.register_buffer("constants", constants, persistent=False)
        module.widen = partial(_empty, (rows, columns), how)  # type: ignore[assignment]
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _empty(shape: tuple[int, int], how: Quantise, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of widening codes."""
    if how == "int8":
        return codes.new_empty(shape, dtype=torch.float32).to(dtype)
    return codes.new_empty(shape, dtype=dtype)


def wide_weights(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``model`` in which quantised weights are the numbers that they stand for, in float32."""
    wide = dict(state)
    for name, module in quantised_layers(model):
        codes = wide.pop(f"{name}.weight")
        for key in [
            key for key in wide if key.startswith(f"{name}.weight") or key == f"{name}.SCB"
        ]:
            del wide[key]
        wide[f"{name}.weight"] = module.widen(codes, torch.float32)
    return wide
