"""Copies of weights in the form that a library's kernel reads, for one call of an engine on a CPU.

A decode step multiplies few rows with every weight. PyTorch's libraries first copy each weight into blocks, within the
product; here it is done once for many steps:

    float32     MKL's packed form (cblas_sgemm_pack), which is for one number of rows
    bfloat16    oneDNN's blocks, for any number of rows; of a float32 weight under autocast they are its cast as well

A float32 weight is packed once the number of live completions has stayed for ``STAYS`` steps, and again where another
number stays; either dtype only where ``PAYS`` steps may follow, which the copying takes to pay. Measured at 64 rows:
packing 6 million weights takes 22 ms of processor time, and a step then 1.4 ms less; 24 million 58 and 11 ms.

The copies live as long as the call, within which weights do not change: none can be older than the last update. (A
tensor's version counter would not tell; PyTorch's fused AdamW does not advance it.) They take at most ``limit`` bytes
together; weights that come after the limit is reached stay as they are.

Which products run on copies is decided by measurement (cpu_matmul.py), which alone imports this file, but for engines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

STAYS = 8
"""Steps with one number of rows, after which float32 weights are packed for it."""
PAYS = 16
"""Steps that must be possible for weights to be packed."""
SMALLEST = 2**14
"""Elements from which a weight is packed: a smaller product's time is that of the call."""
BF16_ROWS = 64
"""oneDNN chooses its blocks for a number of rows; with those of 64 all others were as fast as with their own."""


class _Copy(NamedTuple):
    weight: Tensor
    """Kept, so that its id is no other's."""
    blocks: Tensor


class PackedWeights:
    """The copies of one call. ``limit``: bytes that they may take."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num_bytes = limit, 0
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self._is_worth = False
        self._num_rows = self._last_rows = self._num_same = 0

    def expect(self, num_steps: int, num_rows: int = 0) -> None:
        """Before each forward: the most steps that may follow, and the completions of a decode step."""
        self._is_worth = num_steps >= PAYS
        if not num_rows:
            return
        self._num_same = self._num_same + 1 if num_rows == self._last_rows else 1
        self._last_rows = num_rows
        if num_rows != self._num_rows and self._num_same > STAYS and self._is_worth:
            self._num_rows = num_rows
            wide = [key for key in self._copies if key[1] == torch.float32]
            for copy in map(self._copies.pop, wide):
                self.num_bytes -= copy.weight.nbytes

    def float32(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """x W^T + b; None without a copy."""
        if x.numel() != self._num_rows * x.shape[-1]:
            return None
        blocks = self._blocks(weight, torch.float32)
        return None if blocks is None else float32_product(x, weight, blocks, bias)

    def bf16(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """x W^T + b in bfloat16, whatever the dtypes of the operands; None without a copy."""
        blocks = self._blocks(weight, torch.bfloat16)
        if blocks is None:
            return None
        bias = None if bias is None else bias.to(torch.bfloat16)
        return bf16_product(x.to(torch.bfloat16), blocks, bias)

    def _blocks(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a weight, made where there is none; None where it is not to be copied."""
        key = id(weight), dtype
        if key in self._copies:
            return self._copies[key].blocks
        size = weight.numel() * dtype.itemsize
        # A weight that is no parameter may be made for each call.
        is_fit = type(weight) is nn.Parameter and weight.numel() >= SMALLEST
        if not is_fit or not self._is_worth or self.num_bytes + size > self.limit:
            return None
        is_narrow = dtype == torch.bfloat16
        blocks = pack_bf16(weight) if is_narrow else pack_float32(weight, self._num_rows)
        self._copies[key] = _Copy(weight, blocks)
        self.num_bytes += size
        return blocks


def has_mkl_packed() -> bool:
    """Whether this build of PyTorch has MKL's packed products."""
    return bool(torch._C.has_mkl) and hasattr(torch.ops.mkl, "_mkl_linear")


def pack_float32(weight: Tensor, num_rows: int) -> Tensor:
    blocks: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), num_rows)
    return blocks


def pack_bf16(weight: Tensor) -> Tensor:
    """Of a weight in any dtype."""
    narrow = weight.detach().to(torch.bfloat16)
    blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(narrow, BF16_ROWS)
    return blocks


def float32_product(x: Tensor, weight: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b by MKL, for the number of rows that the blocks are for."""
    num_rows = x.numel() // x.shape[-1]
    result: Tensor = torch.ops.mkl._mkl_linear(x, blocks, weight, bias, num_rows)
    return result


def bf16_product(x: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b by oneDNN."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
    return result
