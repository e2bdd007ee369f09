"""Which library computes float32 matrix products on a CPU, found by measurement.

PyTorch passes them to MKL (other builds have another BLAS). oneDNN, which is part of PyTorch too, is the faster one on
some processors and the slower one on others, and not alike for all products. ``measure`` times both on this machine
with the threads of this process, in some tenths of a second, for a few shapes:

    few rows, some rows     x W^T of an engine that decodes (few: under 16, some: under 256), no gradient
    forward                 x W^T of 256 rows and more
    input gradient          g W
    weight gradient         g^T x
    head, head gradient     logits of a chunk of rows, and its input gradient, into memory that is there

each but the head's for small and large weights; some rows for few and many inputs, since long sums may be divided
among threads. oneDNN takes the shapes in which it is clearly faster (``MARGIN``); all else is PyTorch's own. A model's
linear layers ask for their library at each call (``install``).
The rates are kept in the cache, by processor, versions, threads and the variables that steer either library.

The choice is one for the process, as the number of threads is (``use``, ``active``). It changes results by rounding:
the mean distance from float64 on rows of 576 and 1,536 numbers is 2.3e-7 and 3.9e-7 for MKL, 3.3e-7 and 7.5e-7 for
oneDNN. A checkpoint stores it, and a resumed run takes the stored one without measuring.

In training oneDNN's rows are cut into blocks of few sizes, and the rest is PyTorch's: oneDNN keeps half a megabyte for
every shape it has met, and micro-batches come in many (0.8 GB after 1,440 shapes; nothing with blocks). Its weight
gradient is timed with the transposed copies that it needs; ``aten::mkldnn_linear_backward_weights``, which takes the
operands as they are, is slower still.

Other dtypes and devices and autocast are left alone: bfloat16 products on a CPU are oneDNN's in PyTorch itself, and
there is no second library for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from typing_extensions import TypedDict

from taut.config import Decision, first_problem
from taut.data.cache import default_directory
from taut.errors import ConfigError
from taut.io import files
from taut.io.temporary import TemporaryFolder

ProductsSetting = Literal["auto", "mkl", "onednn"]

FEW, SOME, MANY = 4, 16, 256
"""Rows from which products are few, some and many. With fewer than FEW, PyTorch's matrix-vector product is used."""
LARGE = 2**19
"""Elements from which a weight is large."""
DEEP = 512
"""Inputs from which a product of some rows is deep."""
MIN_SIZE = 2**24
"""Rows times inputs times outputs: below this, oneDNN's overhead in Python exceeds its gain in training."""
BLOCKS = (4096, 2048, 1024, 512, 256)
"""Rows of oneDNN's products in training."""

LIMIT = 0.7
"""Seconds after which a measurement ends on a machine that is too busy for it; 0.3 to 0.5 are usual."""
ROUNDS = 3
"""Least number of rounds."""
SETTLED = 1.05
"""A time has settled if the second shortest is at most this times the shortest."""
TIMED_FLOPS, TIMES = 2**28, 8
"""Operations by which small products are timed several times a round, and the largest number of times."""
MARGIN = 1.1
"""oneDNN takes a product if PyTorch needs this times its time: its calls go through Python."""
FILE_LIMIT = 2**16
"""Bytes of a file of rates."""
IDENTIFYING = (
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU part",
    "CPU variant",
    "Features",
)
"""Lines of /proc/cpuinfo that tell processors apart."""
VARIABLES = ("MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_")
"""Beginnings of the names of environment variables that steer the libraries."""


class Shape(NamedTuple):
    """A product that stands for its class."""

    num_rows: int
    num_inputs: int
    num_outputs: int

    @property
    def num_flops(self) -> int:
        return 2 * self.num_rows * self.num_inputs * self.num_outputs


SHAPES = {
    "few rows small": Shape(8, 256, 768),
    "few rows large": Shape(8, 1024, 1536),
    "some rows shallow": Shape(64, 256, 768),
    "some rows deep": Shape(64, 1024, 256),
    "forward small": Shape(512, 256, 512),
    "forward large": Shape(256, 768, 768),
    "input gradient small": Shape(512, 256, 512),
    "input gradient large": Shape(256, 768, 768),
    "weight gradient small": Shape(512, 256, 512),
    "weight gradient large": Shape(256, 768, 768),
    "head": Shape(256, 256, 2048),
    "head gradient": Shape(256, 256, 2048),
}
"""The classes of products, and the shape that is measured for each."""
KINDS = ("forward", "input gradient", "weight gradient", "head", "few rows", "some rows")
"""Beginnings of the names of classes, in the order in which a decision shows them."""


# -- the choice


@dataclass(frozen=True)
class Products:
    """Which library computes which class of products."""

    name: str | None = None
    """mkl, onednn, or ``onednn for A, B``; None: there is nothing to choose for the run's dtype and device."""
    reason: str = ""

    @cached_property
    def onednn(self) -> frozenset[str]:
        """The classes that oneDNN computes; PyTorch computes the others."""
        if self.name is None or not self.name.startswith("onednn"):
            return frozenset()
        listed = self.name.removeprefix("onednn for ").split(", ")
        return frozenset(SHAPES if self.name == "onednn" else listed)

    @cached_property
    def has_layers(self) -> bool:
        """Whether oneDNN computes any class of the linear layers."""
        return any(not name.startswith("head") for name in self.onednn)

    @property
    def decisions(self) -> list[Decision]:
        if self.name is None:
            return []
        value, _, classes = self.name.partition(" for ")
        if not classes:
            return [Decision("products", value, self.reason)]
        both = f"{torch_name()}, {value}"
        return [Decision("products", both, f"{value} for {classes}: {self.reason}")]


NOTHING = Products()
_active = NOTHING
_decodes: ContextVar[bool] = ContextVar("decodes", default=False)


def use(products: Products) -> None:
    """Make it the choice of this process."""
    global _active
    _active = products


def active() -> Products:
    """The choice of this process."""
    return _active


def torch_name() -> str:
    """The library of PyTorch's own products: mkl, or torch where the build has another BLAS."""
    return "mkl" if torch._C.has_mkl else "torch"


def has_onednn() -> bool:
    return bool(torch._C._has_mkldnn)


def select(
    requested: ProductsSetting,
    device: torch.device,
    dtype: torch.dtype,
    stored: str | None = None,
) -> Products:
    """The libraries of a run, and why. ``stored``: the name in the checkpoint that is resumed.

    Raises ConfigError for one asked for by name that this build of PyTorch does not have.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return NOTHING
    own = torch_name()
    if requested != "auto":
        have = [*(["mkl"] if own == "mkl" else []), *(["onednn"] if has_onednn() else [])]
        if requested not in have:
            raise ConfigError(
                f"products={requested}: this build of PyTorch does not have it; expected "
                f"{' or '.join(['auto', *have])}; set products=auto"
            )
        return Products(requested, "asked for by name")
    lacks = ""
    if stored is not None:
        of_checkpoint = Products(stored, "that of the checkpoint")
        if stored == own or (has_onednn() and of_checkpoint.onednn and _is_known(of_checkpoint)):
            return of_checkpoint
        lacks = f"the checkpoint's {stored} is not available here; "
    if not has_onednn():
        return Products(own, f"{lacks}this build of PyTorch has no oneDNN")
    rates, how = rates_of_machine()
    return Products(_name(faster(rates)), f"{lacks}{_shown(rates)}; {how}")


def _is_known(products: Products) -> bool:
    return products.onednn <= SHAPES.keys()


def _name(onednn: frozenset[str]) -> str:
    if not onednn:
        return torch_name()
    if onednn == SHAPES.keys():
        return "onednn"
    return f"onednn for {', '.join(name for name in SHAPES if name in onednn)}"


# -- the measurement


class Rates(NamedTuple):
    """GFLOP/s of a class of products."""

    torch: float
    onednn: float
    has_settled: bool = True
    """Whether the shortest times were met twice; not if other programs were in the way."""


def faster(rates: Mapping[str, Rates]) -> frozenset[str]:
    """The classes in which oneDNN is clearly faster."""
    return frozenset(name for name, rate in rates.items() if rate.onednn > MARGIN * rate.torch)


def _shown(rates: Mapping[str, Rates]) -> str:
    """The rates of each kind of product, as text."""
    texts: list[str] = []
    for kind in KINDS:
        classes = [name for name in SHAPES if name.startswith(kind)]
        flops = sum(SHAPES[name].num_flops for name in classes)
        both = (
            flops / sum(SHAPES[name].num_flops / rates[name][library] for name in classes)
            for library in range(2)
        )
        own, other = (f"{rate:,.0f}" for rate in both)
        unit = f" GFLOP/s ({torch_name()} against onednn)" if not texts else ""
        texts.append(f"{kind} {own} against {other}{unit}" if unit else f"{kind} {own}/{other}")
    return ", ".join(texts)


def seconds_of(name: str, library: str, product: Callable[[], object]) -> float:
    """The processor seconds of a call, of all threads: on a busy machine the time on the clock says little about a
    library. ``name``, ``library``: the class of products and who computes it.
    """
    start = time.process_time()
    product()
    return time.process_time() - start


def measure(
    seconds: Callable[[str, str, Callable[[], object]], float] = seconds_of,
) -> dict[str, Rates]:
    """The rates of both libraries. They take turns, and the shortest time counts, since other programs only add to it;
    each class is timed until both libraries' shortest times were met twice, or ``LIMIT`` is over.
    """
    calls = {name: _calls(name, shape) for name, shape in SHAPES.items()}
    shortest = {name: ([float("inf")] * 2, [float("inf")] * 2) for name in SHAPES}
    pending, num_rounds, start = list(SHAPES), 0, time.perf_counter()
    with torch.no_grad():
        for both in calls.values():
            for call in both:
                call()
        while num_rounds < ROUNDS or (pending and time.perf_counter() - start < LIMIT):
            for name in pending:
                for _ in range(max(1, min(TIMES, TIMED_FLOPS // SHAPES[name].num_flops))):
                    for library, call, two in zip(
                        ("torch", "onednn"), calls[name], shortest[name], strict=True
                    ):
                        two[:] = sorted([*two, seconds(name, library, call)])[:2]
            num_rounds += 1
            if num_rounds >= ROUNDS:
                pending = [name for name in pending if not _have_settled(shortest[name])]
    rates = {}
    for name, shape in SHAPES.items():
        work = shape.num_flops * torch.get_num_threads() / 1e9
        own, other = (work / two[0] for two in shortest[name])
        rates[name] = Rates(own, other, name not in pending)
    return rates


def _have_settled(shortest: tuple[list[float], list[float]]) -> bool:
    return all(second <= SETTLED * first for first, second in shortest)


def _calls(name: str, shape: Shape) -> tuple[Callable[[], object], Callable[[], object]]:
    """The product of a class by PyTorch and by oneDNN, as they run in a model."""
    rows, inputs, outputs = shape
    x, weight, grad = (
        torch.ones(rows, inputs),
        torch.ones(outputs, inputs),
        torch.ones(rows, outputs),
    )
    if name == "head":
        z = torch.empty_like(grad)
        return lambda: torch.mm(x, weight.T, out=z), lambda: _by_blocks(x, weight, z)
    if name == "head gradient":
        into = torch.empty_like(x)
        return lambda: torch.mm(grad, weight, out=into), lambda: _by_blocks(grad, weight.T, into)
    if name.startswith("input gradient"):
        return lambda: grad @ weight, lambda: _by_blocks(grad, weight.T)
    if name.startswith("weight gradient"):
        return lambda: grad.T @ x, lambda: _weight_gradient(grad, x)
    if name.startswith("forward"):
        return lambda: functional.linear(x, weight), lambda: _by_blocks(x, weight)
    return lambda: functional.linear(x, weight), lambda: _product(x, weight)


# -- the rates of a machine, in the cache


class _Kept(TypedDict):
    """The file of a measurement."""

    machine: dict[str, str]
    rates: dict[str, tuple[_Positive, _Positive]]


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def rates_of_machine() -> tuple[dict[str, Rates], str]:
    """The rates of this machine with this process's threads, from the cache if it has them; and how they were found."""
    machine = _machine()
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    path = default_directory() / "products" / f"{key}.json"
    threads = f"{machine['threads']} thread{'' if machine['threads'] == '1' else 's'}"
    damage = ""
    if path.exists():
        try:
            kept = pydantic.TypeAdapter(_Kept).validate_python(files.read_json(path, FILE_LIMIT))
            if kept["machine"] != machine or kept["rates"].keys() != SHAPES.keys():
                raise ValueError("it is of another machine or version")
        except (OSError, ValueError) as error:
            why = first_problem(error) if isinstance(error, pydantic.ValidationError) else error
            damage = f"; {path} could not be used: {why}"
        else:
            rates = {name: Rates(*both) for name, both in kept["rates"].items()}
            return rates, f"measured before on this processor with {threads} ({path})"
    start = time.perf_counter()
    rates = measure()
    how = f"measured in {time.perf_counter() - start:.1f} s with {threads}{damage}"
    busy = sum(not rate.has_settled for rate in rates.values())
    if busy:
        how += f"; not kept, since other programs disturbed {busy} of {len(rates)} classes"
        return rates, how
    try:
        _keep(
            path, {"machine": machine, "rates": {n: (r.torch, r.onednn) for n, r in rates.items()}}
        )
    except OSError as error:
        how += f"; not kept, since {path} cannot be written: {error.strerror or error}"
    return rates, how


def _keep(path: Path, content: _Kept) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("products", path.parent) as folder:
        files.write_text(folder / path.name, json.dumps(content, indent=1))
        (folder / path.name).replace(path)


def _machine() -> dict[str, str]:
    """All that the rates depend on."""
    built = torch.__config__.show().splitlines()
    libraries = [line.strip(" -") for line in built if "Math Kernel" in line or "DNN v" in line]
    steering = {key: value for key, value in os.environ.items() if key.startswith(VARIABLES)}
    return {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "libraries": "; ".join(libraries),
        "threads": str(torch.get_num_threads()),
        **steering,
    }


def _processor() -> str:
    """The model of the processor. Virtual machines give many the same name, but not the same flags."""
    try:
        lines = files.read_text("/proc/cpuinfo").split("\n\n")[0].splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux
        return platform.processor() or platform.machine()
    known = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    told = {key: known[key] for key in IDENTIFYING if key in known}
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    return f"{known.get('model name', platform.machine())} {digest[:8]}"


# -- products by oneDNN


_PLAIN = nn.Linear.forward


def install(model: nn.Module) -> None:
    """Let the linear layers of ``model`` take their products from the libraries of ``active``, but for those whose
    forward was replaced.
    """
    for module in model.modules():
        if type(module) is nn.Linear and getattr(module.forward, "__func__", None) is _PLAIN:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, and the products of its backward pass, each by its library; where it is compiled, by PyTorch."""
    if not is_compiling() and _active.has_layers and _is_ours(x, weight):
        return (_decode if _decodes.get() else _train)(x, weight, bias)
    return functional.linear(x, weight, bias)


@contextmanager
def decoding() -> Iterator[None]:
    """The linear layers of an engine, without gradients: all but the smallest products."""
    token = _decodes.set(True)
    try:
        yield
    finally:
        _decodes.reset(token)


def product_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out = x W^T: the head's products, logits (more outputs than inputs) or their input gradient."""
    rows, inputs, outputs = *x.shape, weight.shape[0]
    name = "head" if outputs > inputs else "head gradient"
    if name in _active.onednn and rows * inputs * outputs >= MIN_SIZE and _is_ours(x, weight):
        _by_blocks(x, weight, out)
    else:
        torch.mm(x, weight.T, out=out)


def _train(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Large products and their gradients; the same bits where no gradient is wanted."""
    if x.numel() * weight.shape[0] < MIN_SIZE:
        return functional.linear(x, weight, bias)
    size = size_of(weight)
    by = By(*(f"{kind} {size}" in _active.onednn for kind in KINDS[:3]))
    if not any(by):
        return functional.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, by)  # type: ignore[no-untyped-call]
    return result


def _decode(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.numel() // x.shape[-1]
    if num_rows < SOME:
        name = f"few rows {size_of(weight)}"
    elif num_rows < MANY:
        name = "some rows deep" if x.shape[-1] >= DEEP else "some rows shallow"
    else:
        name = f"forward {size_of(weight)}"
    if num_rows >= FEW and name in _active.onednn and not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return functional.linear(x, weight, bias)


def size_of(weight: Tensor) -> str:
    return "large" if weight.numel() >= LARGE else "small"


class By(NamedTuple):
    """Which of a layer's three products are oneDNN's."""

    forward: bool
    input_gradient: bool
    weight_gradient: bool


class _Linear(torch.autograd.Function):
    """x W^T + b, each of its three products by its library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: By) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.by, ctx.shape = by, x.shape
        if not by.forward:
            return functional.linear(x, weight, bias)
        out = _by_blocks(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if weight is not None:
            by_onednn = ctx.by.input_gradient
            grad_x = (_by_blocks(grad, weight.T) if by_onednn else grad @ weight).view(ctx.shape)
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            grad_weight = _weight_gradient(grad, x) if ctx.by.weight_gradient else grad.T @ x
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """g^T x"""
    assert x.shape[0], "a product of no rows is not taken"
    total: Tensor | None = None
    for rows, is_block in _blocks(x.shape[0]):
        left, right = grad[rows].T, x[rows]
        part = _product(left, right.T) if is_block else left @ right
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _by_blocks(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T"""
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    for rows, is_block in _blocks(x.shape[0]):
        if is_block:
            out[rows] = _product(x[rows], weight)
        else:
            torch.mm(x[rows], weight.T, out=out[rows])
    return out


def _blocks(num_rows: int) -> Iterator[tuple[slice, bool]]:
    """Consecutive slices of the rows, and whether the size of each is one of ``BLOCKS``."""
    at = 0
    for size in BLOCKS:
        while num_rows - at >= size:
            yield slice(at, at + size), True
            at += size
    if at < num_rows:
        yield slice(at, num_rows), False


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b"""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
    )
