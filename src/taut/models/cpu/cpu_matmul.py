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

An engine may also copy weights into a form that is read faster (packed_weights.py). Its products are timed beside the
others on weights that are not in the cache, as a model's are not, and taken where they are clearly faster than the
library that would compute them otherwise; so are bfloat16's, where the processor has them.

The rates are kept in the cache, by processor, versions, threads and the variables that steer either library.

The choice is one for the process, as the number of threads is (``use``, ``active``). It changes results by rounding:
the mean distance from float64 on rows of 576 and 1,536 numbers is 2.3e-7 and 3.9e-7 for MKL, 3.3e-7 and 7.5e-7 for
oneDNN. A checkpoint stores it, and a resumed run takes the stored one without measuring.

In training oneDNN's rows are cut into blocks of few sizes, and the rest is PyTorch's: oneDNN keeps half a megabyte for
every shape it has met, and micro-batches come in many (0.8 GB after 1,440 shapes; nothing with blocks). Its weight
gradient is timed with the transposed copies that it needs; ``aten::mkldnn_linear_backward_weights``, which takes the
operands as they are, is slower still.

Other dtypes and devices and autocast are left alone, but for packed weights: bfloat16 products on a CPU are oneDNN's in
PyTorch itself, and there is no second library for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from types import MethodType
from typing import Annotated, Any, NamedTuple

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from typing_extensions import TypedDict

from taut.config import Decision, first_problem
from taut.data.store.cache import default_directory
from taut.errors import ConfigError
from taut.io import files
from taut.io.temporary import TemporaryFolder
from taut.models.cpu.packed_weights import (
    PackedWeights,
    bf16_product,
    float32_product,
    has_mkl_packed,
    pack_bf16,
    pack_float32,
)
from taut.models.precision import cpu_bf16
from taut.models.settings import CpuMatmulSetting

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
COLD, AT_A_TIME = 2**23, 6
"""Bytes of the weights that an engine's products are timed on, in turn, which is more than is kept near a core; and how
many of these products are timed together, as a model has one after the other."""
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
"""The classes of float32 products, and the shape that is measured for each."""
BF16_SHAPES = {
    "bf16 few rows": Shape(8, 512, 1024),
    "bf16 some rows": Shape(64, 512, 1024),
    "bf16 many rows": Shape(512, 512, 1024),
}
"""Classes of an engine's bfloat16 products, for which packed weights are the only alternative."""
EVERY = SHAPES | BF16_SHAPES
KINDS = (
    "forward",
    "input gradient",
    "weight gradient",
    "head",
    "few rows",
    "some rows",
    *BF16_SHAPES,
)
"""Beginnings of the names of classes, in the order in which a decision shows them."""


# -- the choice


@dataclass(frozen=True)
class CpuMatmul:
    """Which library computes which class of products."""

    name: str | None = None
    """mkl, onednn, or ``onednn for A, B``; then ``; packed for C, D``, which stands alone for bfloat16. None: there is
    nothing to choose for the run's dtype and device."""
    reason: str = ""

    @cached_property
    def onednn(self) -> frozenset[str]:
        """The float32 classes that oneDNN computes; PyTorch computes the others."""
        is_all = (self.name or "").partition("; ")[0] == "onednn"
        return frozenset(SHAPES) if is_all else self._classes("onednn")

    @cached_property
    def packed(self) -> frozenset[str]:
        """The classes that an engine computes with packed weights, where it has them."""
        return self._classes("packed")

    @cached_property
    def has_layers(self) -> bool:
        """Whether oneDNN computes any class of the linear layers."""
        return any(not name.startswith("head") for name in self.onednn)

    @property
    def decisions(self) -> list[Decision]:
        if self.name is None:
            return []
        parts = self.name.split("; ")
        chosen = [part.partition(" for ")[0] for part in parts]
        if chosen[0] == "packed":
            chosen.insert(0, "onednn")  # PyTorch's own for bfloat16
        elif " for " in parts[0]:
            chosen.insert(0, torch_name())
        classes = "; ".join(part for part in parts if " for " in part)
        reason = f"{classes}: {self.reason}" if classes else self.reason
        return [Decision("cpu_matmul", ", ".join(chosen), reason)]

    def _classes(self, library: str) -> frozenset[str]:
        for part in (self.name or "").split("; "):
            if part.startswith(f"{library} for "):
                return frozenset(part.removeprefix(f"{library} for ").split(", "))
        return frozenset()


NOTHING = CpuMatmul()
_active = NOTHING
_decodes: ContextVar[PackedWeights | None] = ContextVar("decodes", default=None)


def use(products: CpuMatmul) -> None:
    """Make it the choice of this process."""
    global _active
    _active = products


def active() -> CpuMatmul:
    """The choice of this process."""
    return _active


def torch_name() -> str:
    """The library of PyTorch's own products: mkl, or torch where the build has another BLAS."""
    return "mkl" if torch._C.has_mkl else "torch"


def has_onednn() -> bool:
    return bool(torch._C._has_mkldnn)


def has_bf16() -> bool:
    """Whether bfloat16 products are worth timing: oneDNN's, with the processor's own arithmetic."""
    return has_onednn() and cpu_bf16() is not None


def select(
    requested: CpuMatmulSetting,
    device: torch.device,
    dtype: torch.dtype,
    stored: str | None = None,
    whose: str = "the checkpoint",
    *,
    engine: torch.dtype | None = None,
) -> CpuMatmul:
    """The libraries of a run, and why. ``stored``: the name of ``whose`` choice, which is taken where it is available;
    ``engine``: the dtype that an engine of this process computes in.

    Raises ConfigError for one asked for by name that this build of PyTorch does not have.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return NOTHING
    own = torch_name()
    is_narrow = dtype == torch.bfloat16
    if requested != "auto":
        have = [*(["mkl"] if own == "mkl" else []), *(["onednn"] if has_onednn() else [])]
        if requested not in have:
            raise ConfigError(
                f"cpu_matmul={requested}: this build of PyTorch does not have it; expected "
                f"{' or '.join(['auto', *have])}; set cpu_matmul=auto"
            )
        return NOTHING if is_narrow else CpuMatmul(requested, "asked for by name")
    # a stored choice, if it is available
    lacks = ""
    if stored is not None:
        if _is_available(stored):
            return CpuMatmul(stored, f"that of {whose}")
        lacks = f"{whose}'s {stored} is not available here; "
    # else by measurement, of the classes that this run has
    shapes = {} if is_narrow else SHAPES
    if engine == torch.bfloat16 and has_bf16():
        shapes = shapes | BF16_SHAPES
    if not shapes:
        return NOTHING
    if not has_onednn():
        return CpuMatmul(own, f"{lacks}this build of PyTorch has no oneDNN")
    rates, how = rates_of_machine(shapes)
    name = _name(faster(rates), packed_faster(rates), is_narrow=is_narrow)
    return CpuMatmul(name, f"{lacks}{_shown(rates)}; {how}") if name else NOTHING


def _is_available(stored: str) -> bool:
    """Whether this machine can compute by the choice of a checkpoint."""
    choice, is_narrow = CpuMatmul(stored), stored.startswith("packed for ")
    if _name(choice.onednn, choice.packed, is_narrow=is_narrow) != stored:
        return False  # of another build or version
    if choice.packed & BF16_SHAPES.keys() and not has_bf16():
        return False  # oneDNN refuses to pack for a processor without the arithmetic
    if choice.packed & SHAPES.keys() and not has_mkl_packed():
        return False
    return has_onednn() or not (choice.onednn or choice.packed)


def _name(onednn: frozenset[str], packed: frozenset[str], *, is_narrow: bool = False) -> str:
    """The name of a choice; empty where everything is PyTorch's in bfloat16."""
    parts = [] if is_narrow else [torch_name()]
    if onednn == SHAPES.keys():
        parts = ["onednn"]
    elif onednn:
        parts = [f"onednn for {', '.join(name for name in SHAPES if name in onednn)}"]
    if packed:
        listed = (name for name in EVERY if name in packed and _is_engines(name))
        parts.append(f"packed for {', '.join(listed)}")
    return "; ".join(parts)


# -- the measurement


class Rates(NamedTuple):
    """GFLOP/s of a class of products; 0: it is not computed in this way."""

    torch: float
    onednn: float = 0.0
    packed: float = 0.0
    has_settled: bool = True
    """Whether the shortest times were met twice; not if other programs were in the way."""


def faster(rates: Mapping[str, Rates]) -> frozenset[str]:
    """The classes in which oneDNN is clearly faster."""
    return frozenset(name for name, rate in rates.items() if rate.onednn > MARGIN * rate.torch)


def packed_faster(rates: Mapping[str, Rates]) -> frozenset[str]:
    """The classes in which packed weights are clearly faster than the library that would take them."""
    others = faster(rates)
    return frozenset(
        name
        for name, rate in rates.items()
        if rate.packed > MARGIN * (rate.onednn if name in others else rate.torch)
    )


def _shown(rates: Mapping[str, Rates]) -> str:
    """The rates of each kind of product, as text."""
    texts: list[str] = []
    for kind in KINDS:
        found = [rate for name, rate in rates.items() if name.startswith(kind)]
        work = [EVERY[name].num_flops for name in rates if name.startswith(kind)]
        if not found:
            continue
        own, other, packed = (
            f"{sum(work) / sum(w / r for w, r in zip(work, column, strict=True)):,.0f}"
            if all(column)
            else ""
            for column in list(zip(*found, strict=True))[:3]
        )
        unit = f" GFLOP/s ({torch_name()} against onednn)" if not texts and other else ""
        both = f"{own} against {other}{unit}" if unit else "/".join(filter(None, (own, other)))
        texts.append(f"{kind} {both}" + (f", packed {packed}" if packed else ""))
    return ", ".join(texts)


def seconds_of(name: str, library: str, product: Callable[[], object]) -> float:
    """The processor seconds of a call, of all threads: on a busy machine the time on the clock says little about a
    library. ``name``, ``library``: the class of products and who computes it.
    """
    start = time.process_time()
    product()
    return time.process_time() - start


def measure(
    shapes: Mapping[str, Shape],
    seconds: Callable[[str, str, Callable[[], object]], float] = seconds_of,
) -> dict[str, Rates]:
    """The rates of both libraries. They take turns, and the shortest time counts, since other programs only add to it;
    each class is timed until both libraries' shortest times were met twice, or ``LIMIT`` is over.
    """
    # the calls, each once before it is timed
    calls = {name: _calls(name, shape) for name, shape in shapes.items()}
    shortest = {name: {way: [float("inf")] * 2 for way in ways} for name, ways in calls.items()}
    together = {name: AT_A_TIME if _is_engines(name) else 1 for name in calls}
    num_flops = {name: shape.num_flops * together[name] for name, shape in shapes.items()}
    pending, num_rounds, start = list(calls), 0, time.perf_counter()
    with torch.no_grad():
        for ways in calls.values():
            for call in ways.values():
                call()
        # rounds, in which the two shortest times of each call are kept
        while num_rounds < ROUNDS or (pending and time.perf_counter() - start < LIMIT):
            for name in pending:
                for _ in range(
                    max(1, min(TIMES // together[name], TIMED_FLOPS // num_flops[name]))
                ):
                    for way, call in calls[name].items():
                        two = shortest[name][way]
                        two[:] = sorted([*two, seconds(name, way, call)])[:2]
            num_rounds += 1
            if num_rounds >= ROUNDS:
                pending = [
                    name
                    for name in pending
                    if any(second > SETTLED * first for first, second in shortest[name].values())
                ]
    # rates of the shortest times
    rates = {}
    for name in calls:
        work = num_flops[name] * torch.get_num_threads() / 1e9
        # a profiler that has armed a timer lets processor time advance in steps, and the shortest be 0
        found = {way: work / max(two[0], 1e-9) for way, two in shortest[name].items()}
        rates[name] = Rates(**found, has_settled=name not in pending)
    return rates


def _is_engines(name: str) -> bool:
    return name.startswith(("few rows", "some rows", "bf16"))


def _calls(name: str, shape: Shape) -> dict[str, Callable[[], object]]:
    """The product of a class in each way, as it runs in a model."""
    if _is_engines(name):
        return _engine_calls(shape, is_narrow=name.startswith("bf16"))
    rows, inputs, outputs = shape
    x, weight, grad = (
        torch.ones(rows, inputs),
        torch.ones(outputs, inputs),
        torch.ones(rows, outputs),
    )
    z, into = torch.empty_like(grad), torch.empty_like(x)
    own, other = {
        "forward": (lambda: functional.linear(x, weight), lambda: _by_blocks(x, weight)),
        "input gradient": (lambda: grad @ weight, lambda: _by_blocks(grad, weight.T)),
        "weight gradient": (lambda: grad.T @ x, lambda: _weight_gradient(grad, x)),
        "head": (lambda: torch.mm(x, weight.T, out=z), lambda: _by_blocks(x, weight, z)),
        "head gradient": (
            lambda: torch.mm(grad, weight, out=into),
            lambda: _by_blocks(grad, weight.T, into),
        ),
    }[name.removesuffix(" small").removesuffix(" large")]
    return {"torch": own, "onednn": other}


def _engine_calls(shape: Shape, *, is_narrow: bool) -> dict[str, Callable[[], object]]:
    """An engine's product in each way; each call takes the next of several weights."""
    rows, inputs, outputs = shape
    dtype = torch.bfloat16 if is_narrow else torch.float32
    x = torch.ones(rows, inputs, dtype=dtype)
    number = -(-COLD // (inputs * outputs * dtype.itemsize))
    weights = [torch.ones(outputs, inputs, dtype=dtype) for _ in range(number)]
    calls: dict[str, Callable[[], object]] = {
        "torch": _in_turn(lambda weight: functional.linear(x, weight), weights)
    }
    if is_narrow:
        blocks = [pack_bf16(weight) for weight in weights]
        return calls | {"packed": _in_turn(lambda some: bf16_product(x, some, None), blocks)}
    calls["onednn"] = _in_turn(lambda weight: _product(x, weight), weights)
    if has_mkl_packed():
        both = [(weight, pack_float32(weight, rows)) for weight in weights]
        calls["packed"] = _in_turn(lambda two: float32_product(x, two[0], two[1], None), both)
    return calls


def _in_turn(product: Callable[[Any], object], weights: Sequence[Any]) -> Callable[[], None]:
    """``AT_A_TIME`` products with the next of the weights."""
    turns = cycle(weights)

    def call() -> None:
        for weight in islice(turns, AT_A_TIME):
            product(weight)

    return call


# -- the rates of a machine, in the cache


class _Kept(TypedDict):
    """The file of a measurement."""

    machine: dict[str, str]
    rates: dict[str, tuple[_Positive, _NotNegative, _NotNegative]]


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def rates_of_machine(shapes: Mapping[str, Shape]) -> tuple[dict[str, Rates], str]:
    """The rates of this machine with this process's threads, from the cache if it has them; and how they were found."""
    machine = _machine() | {"classes": ", ".join(shapes)}
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    path = default_directory() / "cpu_matmul" / f"{key}.json"
    threads = f"{machine['threads']} thread{'' if machine['threads'] == '1' else 's'}"
    # from the cache, unless the file is damaged
    damage = ""
    if path.exists():
        try:
            kept = pydantic.TypeAdapter(_Kept).validate_python(files.read_json(path, FILE_LIMIT))
            if kept["machine"] != machine or kept["rates"].keys() != shapes.keys():
                raise ValueError("it is of another machine or version")
        except (OSError, ValueError) as error:
            why = first_problem(error) if isinstance(error, pydantic.ValidationError) else error
            damage = f"; {path} could not be used: {why}"
        else:
            rates = {name: Rates(*three) for name, three in kept["rates"].items()}
            return rates, f"measured before on this processor with {threads} ({path})"
    # measured, and kept where nothing disturbed it
    start = time.perf_counter()
    rates = measure(shapes)
    how = f"measured in {time.perf_counter() - start:.1f} s with {threads}{damage}"
    busy = sum(not rate.has_settled for rate in rates.values())
    if busy:
        how += f"; not kept, since other programs disturbed {busy} of {len(rates)} classes"
        return rates, how
    try:
        found = {name: (rate.torch, rate.onednn, rate.packed) for name, rate in rates.items()}
        content: _Kept = {"machine": machine, "rates": found}
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("cpu_matmul", path.parent) as folder:
            files.write_text(folder / path.name, json.dumps(content, indent=1))
            (folder / path.name).replace(path)
    except OSError as error:
        how += f"; not kept, since {path} cannot be written: {error.strerror or error}"
    return rates, how


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


# -- products by their library


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
    """x W^T + b, and the products of its backward pass, each by its library. A frozen weight may be stored in fewer
    bits than x; an adapter on a sharded model may be in float32 where x is in bfloat16. Where it is compiled, all
    products are PyTorch's.
    """
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        is_master = torch.promote_types(weight.dtype, x.dtype) == weight.dtype
        if not is_compiling() and not is_master:
            return linear_from_stored(x, weight, bias, Tensor.to)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if is_compiling():
        return functional.linear(x, weight, bias)
    packed = _decodes.get()
    if packed is not None and _active.packed and not torch.is_grad_enabled():
        product = _by_packed(packed, x, weight, bias)
        if product is not None:
            return product
    if _active.has_layers and _is_ours(x, weight):
        return (_train if packed is None else _decode)(x, weight, bias)
    return functional.linear(x, weight, bias)


Widen = Callable[[Tensor, torch.dtype], Tensor]
"""A stored weight -> its numbers [outputs, inputs] in a dtype."""


def linear_from_stored(x: Tensor, weight: Tensor, bias: Tensor | None, widen: Widen) -> Tensor:
    """x W^T + b in the dtype of x (or autocast's) with a frozen weight that is stored otherwise. Its numbers exist in
    that dtype only during the product, and once more during the backward pass's.
    """
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    assert not (trains and torch.is_grad_enabled()), "what is stored in fewer bits does not train"
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if bias is None else bias.detach()
    result: Tensor = _FromStored.apply(x, weight.detach(), bias, widen)  # type: ignore[no-untyped-call]
    return result


class _FromStored(torch.autograd.Function):
    """``linear`` with the widened weight, to the bit; the stored weight is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, widen: Widen) -> Tensor:
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None)
        wide = widen(weight, x.dtype)
        ctx.widen, ctx.shape = widen, x.shape
        by = _libraries(x, wide) if _active.has_layers and _is_ours(x, wide) else None
        ctx.by_onednn = by is not None and by.input_gradient
        return linear(x, wide, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        if weight is None:
            return None, None, None, None
        wide, grad = ctx.widen(weight, grad.dtype), grad.reshape(-1, grad.shape[-1])
        grad_x = _by_blocks(grad, wide.T) if ctx.by_onednn else grad @ wide
        return grad_x.view(ctx.shape), None, None, None


@contextmanager
def decoding(packed: PackedWeights) -> Iterator[None]:
    """The linear layers of an engine, without gradients: all but the smallest products, and weights packed into
    ``packed``.
    """
    token = _decodes.set(packed)
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
    by = _libraries(x, weight)
    if by is None:
        return functional.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, by)  # type: ignore[no-untyped-call]
    return result


def _libraries(x: Tensor, weight: Tensor) -> By | None:
    """Libraries of a layer's three products in training; None where PyTorch computes all."""
    if x.numel() * weight.shape[0] < MIN_SIZE:
        return None
    size = size_of(weight)
    by = By(*(f"{kind} {size}" in _active.onednn for kind in KINDS[:3]))
    return by if any(by) else None


def _decode(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.numel() // x.shape[-1]
    name = _class_of(num_rows, weight)
    if num_rows >= FEW and name in _active.onednn and not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return functional.linear(x, weight, bias)


def _by_packed(
    packed: PackedWeights, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """x W^T + b with a copy of the weight; None where there is none, or it gains nothing."""
    num_rows = x.numel() // x.shape[-1]
    if _is_ours(x, weight):
        is_faster = num_rows >= FEW and _class_of(num_rows, weight) in _active.packed
        return packed.float32(x, weight, bias) if is_faster else None
    # bfloat16 on a CPU, by the operands or by autocast
    if not x.device.type == weight.device.type == "cpu" or x.dtype == torch.float64:
        return None
    is_cast = torch.is_autocast_enabled("cpu")
    dtypes = {torch.get_autocast_dtype("cpu")} if is_cast else {x.dtype, weight.dtype}
    if dtypes != {torch.bfloat16}:
        return None
    size = "few" if num_rows < SOME else "some" if num_rows < MANY else "many"
    return packed.bf16(x, weight, bias) if f"bf16 {size} rows" in _active.packed else None


def _class_of(num_rows: int, weight: Tensor) -> str:
    """The class of an engine's float32 product."""
    if num_rows < SOME:
        return f"few rows {size_of(weight)}"
    if num_rows < MANY:
        return "some rows deep" if weight.shape[1] >= DEEP else "some rows shallow"
    return f"forward {size_of(weight)}"


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
