"""An optimizer with an update rule for each parameter group: Muon, and AdamW with moments in fewer bits.

    muon     B = momentum B + (1 - momentum) G;  O = orthogonalized(momentum B + (1 - momentum) G)
             W = (1 - rate decay) W - rate 0.2 sqrt(max(rows, columns)) O
    adamw    arXiv:1711.05101

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) is PyTorch's Newton-Schulz iteration, in bf16. The
factor of the rate (arXiv:2502.16982) gives its update the root mean square of AdamW's, so that one learning rate and
one weight decay serve both. A sharded matrix is gathered for the iteration, which every rank computes whole: the result
does not depend on the number of ranks.

Between steps the moments are stored in one of three formats (``StateFormat``); the update itself is in the parameter's
dtype, a slice of rows at a time. Every stored tensor is a plain tensor, sharded as its parameter is.

    float32    the parameter's dtype
    bf16       rounded stochastically: the mean of the stored value is the value, where rounding to nearest would lose
               each change of less than 1/256. The noise is a function of step and parameter: a resumed run repeats it
    int8       8-bit dynamic quantization (arXiv:2110.02861): the nearest of 256 values times the largest magnitude of
               a block, at most 0.73% of that magnitude away, less for small values. A mean of squares that is not zero
               is never stored as zero, by which the next update would divide. Blocks divide rows, so they do not
               depend on how rows are sharded. Small tensors keep the parameter's dtype (``block_size``)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)
from torch.optim.adamw import adamw

from taut.train import distributed
from taut.train.distributed import local

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 32
"""Elements that share a scale in int8; fewer would save little."""
FEWEST = 4096
"""Elements of the smallest tensor whose moments are int8, as in bitsandbytes."""
DROPPED_BITS = 12
NUM_CELLS = 2 ** (32 - DROPPED_BITS)
"""Number of intervals of float32 whose numbers get one code: they share the leading bits, 11 of the fraction."""
SLICE = 2**22
"""Elements that are updated at a time, to bound the memory of unpacked moments."""


class GroupedOptimizer(torch.optim.AdamW):
    """AdamW and Muon by group. A group has AdamW's settings, ``rule`` (adamw or muon), ``state`` (StateFormat), and for
    Muon ``momentum`` and ``ns_steps``.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a step takes the gradients as they are"
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(new_state(parameter, group))
                state["step"] += 1
                noise = torch.Generator(parameter.device)
                noise.manual_seed(int(state["step"]) * 1_000_003 + number)
                (_muon if group["rule"] == "muon" else _adamw)(parameter, state, group, noise)


def new_state(parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    state = {"step": torch.zeros(())}
    names = ("momentum",) if group["rule"] == "muon" else ("exp_avg", "exp_avg_sq")
    block = block_size(parameter) if group["state"] == "int8" else None
    for name in names:
        if block is not None:
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
            part = local(parameter)
            scale = part.new_zeros(*part.shape[:-1], part.shape[-1] // block, dtype=torch.float32)
            whole = (*parameter.shape[:-1], parameter.shape[-1] // block)
            state[f"{name}_scale"] = distributed.sharded_like(parameter, scale.detach(), whole)
        else:
            dtype = torch.bfloat16 if group["state"] == "bf16" else parameter.dtype
            state[name] = torch.zeros_like(parameter, dtype=dtype)
    return state


def block_size(parameter: Tensor) -> int | None:
    """Number of elements of a row that share a scale: the largest divisor of its length within the limits. None for a
    tensor without such a divisor, for a small one, and for one without rows.
    """
    if parameter.ndim < 2 or parameter.numel() < FEWEST:
        return None
    sizes = range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1)
    return next((size for size in sizes if parameter.shape[-1] % size == 0), None)


def _adamw(
    parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any], noise: torch.Generator
) -> None:
    assert parameter.grad is not None
    weight, gradient = local(parameter), local(parameter.grad)
    # Which adamw advances; filled on the device, since a copy would wait for it.
    before = torch.full((), float(state["step"]) - 1, device=weight.device)
    for rows in _slices(weight):
        mean, square = (
            _load(state, name, rows, weight.dtype) for name in ("exp_avg", "exp_avg_sq")
        )
        adamw(
            [weight[rows]], [gradient[rows]], [mean], [square], [], [before.clone()],
            fused=group["fused"], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        _store(state, "exp_avg", rows, mean, noise)
        _store(state, "exp_avg_sq", rows, square, noise)


def _muon(
    parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any], noise: torch.Generator
) -> None:
    assert parameter.grad is not None
    weight, gradient = local(parameter), local(parameter.grad)
    rate, momentum, everything = group["lr"], group["momentum"], slice(None)
    mean = _load(state, "momentum", everything, weight.dtype).lerp_(gradient, 1 - momentum)
    update = distributed.whole_of(parameter, gradient.lerp(mean, momentum))
    _store(state, "momentum", everything, mean, noise)
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    update = _zeropower_via_newtonschulz(update, coefficients, group["ns_steps"], EPS)
    weight.mul_(1 - rate * group["weight_decay"])
    factor = _adjust_lr(rate, "match_rms_adamw", parameter.shape)
    weight.add_(distributed.part_of(parameter, update), alpha=-factor)


def _slices(weight: Tensor) -> Iterator[slice]:
    """Slices of the first dimension with about ``SLICE`` elements each."""
    count = max(1, SLICE // max(1, math.prod(weight.shape[1:])))
    for start in range(0, weight.shape[0], count):
        yield slice(start, start + count)


def _load(state: dict[str, Tensor], name: str, rows: slice, dtype: torch.dtype) -> Tensor:
    """Unpack a moment to ``dtype``; one that is stored in this dtype is not copied."""
    stored = local(state[name])[rows]
    if stored.dtype != torch.uint8:
        return stored.to(dtype)
    scale = local(state[f"{name}_scale"])[rows]
    table = values_of_codes(name != "exp_avg_sq", stored.device)
    blocks = table.index_select(0, stored.flatten().int()).reshape(_in_blocks(stored, scale))
    return blocks.mul_(scale.unsqueeze(-1)).reshape(stored.shape).to(dtype)


def _store(
    state: dict[str, Tensor], name: str, rows: slice, value: Tensor, noise: torch.Generator
) -> None:
    stored = local(state[name])[rows]
    if stored.dtype == torch.uint8:
        scale = local(state[f"{name}_scale"])[rows]
        blocks = value.float().reshape(_in_blocks(stored, scale))
        largest = blocks.abs().amax(-1)
        scale.copy_(largest)
        relative = blocks / largest.unsqueeze(-1).clamp_min(torch.finfo(torch.float32).tiny)
        cells = (relative.flatten().view(torch.int32) >> DROPPED_BITS).bitwise_and_(NUM_CELLS - 1)
        codes = codes_of_cells(name != "exp_avg_sq", stored.device).index_select(0, cells)
        stored.copy_(codes.reshape(stored.shape))
    elif stored.dtype == value.dtype:
        assert stored.data_ptr() == value.data_ptr(), "the moment was updated in place"
    else:
        stored.copy_(rounded_stochastically(value.float(), noise))


def _in_blocks(stored: Tensor, scale: Tensor) -> tuple[int, ...]:
    """The shape of a moment divided into blocks; a rank may have no rows."""
    return *scale.shape, stored.shape[-1] // scale.shape[-1]


def rounded_stochastically(value: Tensor, noise: torch.Generator) -> Tensor:
    """Round float32 to one of the two neighbors in bf16, with probabilities that keep the mean."""
    bits = value.contiguous().view(torch.int32)
    drawn = torch.randint(
        2**16, bits.shape, generator=noise, dtype=torch.int32, device=value.device
    )
    return (bits + drawn).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


@cache
def values_of_codes(is_signed: bool, device: torch.device) -> Tensor:
    """The 256 values of a code, from -1 (unsigned: 0) to 1: the dynamic tree of arXiv:2110.02861, as in bitsandbytes
    and torchao. Seven decades, each with half as many values as the next; a value is the middle of an interval between
    0.1 and 1, times the decade. 0 and 1 are values too.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + (0 if is_signed else 1))
        edges = torch.linspace(0.1, 1, count + 1)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10 ** (decade - 6)).tolist()
        values += middles + ([-middle for middle in middles] if is_signed else [])
    return torch.tensor(sorted(values), device=device)


@cache
def codes_of_cells(is_signed: bool, device: torch.device) -> Tensor:
    """Leading bits of a float32 -> code of the value nearest to the middle of their interval. On a CPU a look-up is 17
    times as fast as a search of the 256 values.
    """
    table = values_of_codes(is_signed, torch.device("cpu"))
    between = (table[1:] + table[:-1]) / 2
    if not is_signed:
        between[0] = 0.0
    cells = torch.arange(NUM_CELLS) << DROPPED_BITS
    middles = (cells + 2 ** (DROPPED_BITS - 1)).to(torch.int32).view(torch.float32)
    codes = torch.bucketize(middles, between)
    codes[[0, NUM_CELLS // 2]] = int((table == 0).nonzero())  # the cells of 0 and -0
    return codes.to(torch.uint8).to(device)
