"""The dtypes in force: of what is updated, of RoPE's frequencies, and of every matrix product of a forward.

    float64, float32    parameters, products and log-probs are in it
    bfloat16            parameters, RoPE and log-probs in float32, products in bfloat16 under autocast

A product in a narrower dtype than was asked for is a cast nobody sees; it is told by the layer it happens in.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.packing import ALONE, pack

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm"}
SHOWN = 3


def ask(session: Session) -> Finding:
    """Is every tensor in the dtype it is meant to be in?"""
    wrong = _narrow_tensors(session)
    if wrong:
        return failed(
            f"{len(wrong)} tensors are narrower than {_name(session.loaded.dtype.parameters)}",
            number=len(wrong),
            unit="tensors",
            evidence=wrong[:SHOWN],
            remedy="small updates and far positions would be rounded away; load the model in float32: remove what "
            "narrows these in its code or config, and please report the model",
        )
    products, said_dtype = _products(session)
    asked = session.dtype
    narrow = [key for key in products if _is_narrower(key[1], asked)]
    if narrow or _is_narrower(said_dtype, torch.float32):
        said = [f"{where} computes in {_name(dtype)}" for where, dtype in narrow[:SHOWN]]
        return failed(
            f"{sum(products[key] for key in narrow)} of {products.total()} products are narrower than {_name(asked)}",
            number=sum(products[key] for key in narrow),
            unit=f"of {products.total()} products",
            evidence=said or [f"{session.says.many} are in {_name(said_dtype)}"],
            remedy=f"dtype={_name(asked)} is not in force there; remove the cast in the model's code, or set "
            "dtype=bfloat16 if that is what you want",
        )
    inside = sum(count for (_, dtype), count in products.items() if dtype == asked)
    if not inside:
        return failed(
            f"no product of the model is in {_name(asked)}",
            number=0,
            unit=f"of {products.total()} products",
            evidence=[
                f"{where} computes in {_name(dtype)}" for where, dtype in [*products][:SHOWN]
            ],
            remedy=f"dtype={_name(asked)} is not in force; set dtype=float32, and please report the model",
        )
    return passed(
        f"parameters {_name(session.loaded.dtype.parameters)}, {inside} of {products.total()} products in "
        f"{_name(asked)}, {session.says.many} {_name(said_dtype)}",
        products.total(),
        "products",
        _wider(products, asked),
    )


def _narrow_tensors(session: Session) -> list[str]:
    """Parameters that are not masters, and frequencies that have lost their digits, whatever dtype they are in now."""
    model, wanted = session.scorer.model, session.loaded.dtype.parameters
    found = [
        f"{name} is in {_name(parameter.dtype)}"
        for name, parameter in model.named_parameters()
        if _is_narrower(parameter.dtype, wanted)
    ]
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and _fits_bfloat16(buffer):
            found.append(f"{name} has the digits of bfloat16")
    return found


def _fits_bfloat16(frequencies: Tensor) -> bool:
    """Whether every frequency is one that bfloat16 can hold, powers of two (1 above all) left aside."""
    values = frequencies.double()
    values = values[(values > 0) & (torch.frexp(values).mantissa != 0.5)]
    return values.numel() > 1 and bool((values == values.to(torch.bfloat16)).all())


def _products(session: Session) -> tuple[Counter[tuple[str, torch.dtype]], torch.dtype]:
    """(layer, dtype) -> matrix products in a forward of one sample; and the dtype of what it gives."""
    watch = _Watch()
    hooks = []
    for name, module in session.scorer.model.named_modules():
        hooks.append(module.register_forward_pre_hook(watch.entering(name)))
        hooks.append(module.register_forward_hook(watch.leave, always_call=True))
    try:
        with session.quiet(), watch:
            values = session.said(pack([session.short], ALONE))
    finally:
        for hook in hooks:
            hook.remove()
    return watch.products, values.dtype


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """Counts matrix products by the innermost module and the dtype they are computed in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[tuple[str, torch.dtype]] = Counter()
        self.inside: list[str] = []

    def entering(self, name: str) -> Any:
        return lambda *_: self.inside.append(name)

    def leave(self, *_: Any) -> None:
        self.inside.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS and isinstance(given, Tensor):
            self.products[self.inside[-1] if self.inside else "the head", given.dtype] += 1
        return given


def _wider(products: Counter[tuple[str, torch.dtype]], asked: torch.dtype) -> list[str]:
    """Where the model asks for more than the run does: RoPE's angles, a router."""
    wider = [f"{where.rpartition('.')[2] or where}" for where, dtype in products if dtype != asked]
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(wider).most_common(SHOWN))
    return [f"in a wider dtype by the model's own choice: {kinds}"] if kinds else []


def _is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a float dtype has fewer digits."""
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(than).eps


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
