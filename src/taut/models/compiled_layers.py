"""The decoder layers through torch's compiler, with attention outside: ``compile=true``.

A compiled layer is two graphs, before its attention and after it, each of which the compiler turns into few kernels:

    norm, query, key, value, rotation  |  attention  |  output projection, residual, norm, MLP, residual

Layers of one class share their graphs, which are compiled for any number of tokens: never again for another
micro-batch. ``MOST_GRAPHS`` holds that; beyond it torch raises, where it would go on without a graph.

What stays eager: attention (taut's own kernels, which read the layout on the host), a layer's experts (a router decides
which rows each of them sees), layers with state, and whatever is not a decoder layer. So does an engine's forward: its
layout is a ``Decoding``, or keeps keys and values. Recomputation of activations is around the graphs.

The class of a layer is replaced by one of the same name with another forward. So no name of a module or a tensor
changes, and hooks, sharding and the library's checkpointing work as before. The faster forms of
``models/cpu/faster_layers.py`` step aside inside a graph: the compiler takes the library's own code, which it fuses.

In float64 the library's casts to float32 are made casts to float64 in the graph, as ``precision.Wide`` does outside.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from taut.attention.layout import Layout
from taut.config import Decision
from taut.errors import ConfigError, ModelError
from taut.models import architecture, attention_backends
from taut.models.cpu import faster_layers
from taut.models.noise import KeyedDropout
from taut.models.precision import NARROW
from taut.models.quantized.quantized_storage import quantized_layers

BACKEND: str | Callable[..., Any] = "inductor"
"""The compiler behind the graphs."""

MOST_GRAPHS = 32
"""Versions of a graph: of layers that differ (windows, adapters, hooks), with a gradient or not, in training or not."""

_is_off = False


# -- what is needed


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError where this machine cannot compile for ``device``. A tiny function is compiled, since a compiler
    without its headers shows only then.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    missing = ""
    if device.type == "cuda" and not has_triton():
        missing = (
            "Triton does not work here, by which torch compiles for a GPU; expected the package triton and compute "
            "capability 7.0 or newer; run: pip install triton"
        )
    elif device.type != "cuda":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            missing = (
                "found no C++ compiler, by which torch compiles for a CPU; expected g++, clang++ or the one that CXX "
                "names; install one (Debian: apt-get install g++)"
            )
    if missing:
        raise ConfigError(f"compile=true: {missing}, or leave compile out")
    try:
        _probe(device)
    except Exception as error:  # whatever a tool chain of the user's raises
        raise ConfigError(
            f"compile=true: torch cannot compile x + 1 for {device}: {_in_one_line(error)}; expected a compiler that "
            "works; mend it, or leave compile out"
        ) from error


@cache
def _probe(device: torch.device) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=BACKEND)
    compiled(torch.ones(2, device=device))


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- what is compiled


def compile_layers(model: nn.Module, dtype: torch.dtype) -> list[Decision]:
    """Compile the decoder layers of ``model`` at their first forward, and say which. ``dtype``: the compute dtype.

    Raises ModelError where nothing can be compiled, or something in a layer cannot be carried.
    """
    chosen, stateful = layers_to_compile(model), architecture.stateful_layers(model)
    quantized = next(quantized_layers(model), None)
    modules = (module for layer in chosen for module in layer.modules())
    dropout = next((module for module in modules if isinstance(module, KeyedDropout)), None)
    problem = ""
    if not chosen:
        problem = (
            f": every layer carries state from token to token ({stateful[0]}), and such layers are not compiled; "
            "expected a model with attention; leave compile out"
        )
    elif quantized is not None:
        problem = (
            f" with a quantized base ({quantized[0]}): its weights are decoded by kernels that no graph holds; "
            "expected a base in float32 or bfloat16; leave compile out"
        )
    elif dropout is not None:
        problem = (
            f" with lora.dropout={dropout.p:g}: its noise is drawn sample by sample, which no graph holds; expected no "
            "dropout; set lora.dropout=0, or leave compile out"
        )
    if problem:
        raise ModelError(f"compile=true{problem}")
    # attention and experts stay out of the graphs
    attention_backends.leave_out_of_graphs()
    experts: list[str] = []
    leave_out: Any = torch.compiler.disable  # it has no types
    for layer in chosen:
        for name, module in layer.named_modules():
            if any(child == "experts" for child, _ in module.named_children()):
                module.forward = leave_out(module.forward, reason="experts are eager")
                experts.append(name)
    # compile one class for each kind of layer
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in chosen:
        kind = type(layer)
        if kind not in kinds:
            kinds[kind] = _compiled_kind(kind, dtype)
        faster_layers.restore_rotation(layer)
        layer.__class__ = kinds[kind]
    # say what is compiled, and what is not
    classes = Counter(type(layer).__name__ for layer in chosen)
    value = " and ".join(f"{number} {name}" for name, number in classes.items())
    left = [f"{len(stateful)} layers with state ({stateful[0]})"] if stateful else []
    left += [f"experts ({experts[0]})"] if experts else []
    reasons = [
        "asked for",
        "compiled at the first micro-batch, for any number of tokens",
        "faster norms, rotations, gates and products of the CPU step aside",
        f"eager: {', '.join(['attention', *left, 'all but decoder layers', 'engines'])}",
    ]
    return [Decision("compile", value, "; ".join(reasons))]


def layers_to_compile(model: nn.Module) -> list[nn.Module]:
    """The decoder layers without state."""
    stateful = {name.split(".")[1].split(" ")[0] for name in architecture.stateful_layers(model)}
    layers = architecture.layers(model)
    return [layer for index, layer in enumerate(layers) if str(index) not in stateful]


def compiled_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers that are compiled."""
    return [layer for layer in architecture.layers(model) if hasattr(layer, "taut_compiles")]


@contextmanager
def eagerly() -> Iterator[None]:
    """Compiled layers run without their graphs inside the block."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


class Graphs(NamedTuple):
    """Graphs that torch's compiler has made in this process."""

    graphs: int
    breaks: int
    recompiled: int

    def since(self, before: Graphs) -> Graphs:
        return Graphs(*map(operator.sub, self, before))


def graphs_made() -> Graphs:
    from torch._dynamo.utils import counters

    breaks, again = counters["graph_break"], counters["recompiles"]
    made = counters["stats"]["unique_graphs"]
    return Graphs(made, sum(breaks.values()), sum(again.values()))


def _compiled_kind(kind: type[nn.Module], dtype: torch.dtype) -> type[nn.Module]:
    """A subclass of a layer's class whose forward is compiled."""
    plain: Any = kind.forward
    if plain.__code__.co_name == "forward_with_checkpointing":  # of each of the library's layers
        plain = plain.__wrapped__
    compiled: Any = torch.compile(plain, backend=_backend(dtype), dynamic=True)
    settings = {
        "recompile_limit": MOST_GRAPHS,
        "fail_on_recompile_limit_hit": True,
        "specialize_float": True,
        # else the frames around attention, the layer's and its attention module's, are cut each for itself: 4 graphs
        "nested_graph_breaks": True,
    }

    patch: Any = torch._dynamo.config.patch  # it has no types

    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        layout: Any = keywords.get("taut_layout")
        # One token would be a graph of its own.
        is_engine = not isinstance(layout, Layout) or layout.kept is not None
        if _is_off or is_engine or layout.num_tokens == 1:
            return plain(self, *args, **keywords)
        try:
            with patch(settings):
                return compiled(self, *args, **keywords)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            raise ModelError(
                f"compile=true: torch {torch.__version__} cannot compile {kind.__name__}: {_in_one_line(error)}; "
                "leave compile out, and please report the model"
            ) from error

    # The library puts its checkpointing around the forward of each subclass, so it is around the graphs.
    body = {"forward": forward, "__module__": kind.__module__, "taut_compiles": True}
    return type(kind.__name__, (kind,), body)


# -- float64


def _backend(dtype: torch.dtype) -> str | Callable[..., Any]:
    """The compiler for a compute dtype: ``BACKEND``, on graphs made wide for float64."""
    if dtype != torch.float64:
        return BACKEND
    inner: Any = torch._dynamo.lookup_backend(BACKEND) if isinstance(BACKEND, str) else BACKEND

    def widened(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value

    def compile_wide(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        # every request for a narrower float dtype is one for float64
        for node in graph.graph.nodes:
            if node.op == "call_method" and node.target in ("float", "half", "bfloat16"):
                node.target = "double"
            node.args = tuple(map(widened, node.args))
            node.kwargs = {key: widened(value) for key, value in node.kwargs.items()}
        graph.recompile()
        return inner(graph, inputs)

    return compile_wide
