"""Tensors that a layer keeps from the forward to the backward pass (``activation_checkpointing``), and their place.

    false        everything that its operators save
    true         its inputs; the backward pass runs the layer again
    selective    its inputs, and the outputs of its matrix products and its attention: the backward pass computes the
                 rest again (norms, rotations, activation functions, sums), which takes little
    offload      as true, with the inputs in the host's memory

All four compute the same numbers. ``recompute_activations`` sets one in every layer of a model, and ``applied`` reads
it back. What was kept is counted, so that a check sees that it happened.

**Selective** is torch's selective checkpointing: a mode below autograd that takes the results of some operators from
the forward pass. It sees operators, so neither what is compiled into one kernel (``compile``, the flex backend)
nor a product that is written into a given tensor. An output that is changed in place later is refused by torch.

**Offload.** Each input is copied to pinned memory on a stream of its own while the layer computes, and its own memory
is free once that is done. When the backward pass takes a layer's input, that of the layer before it is sent on its way.
On a CPU there is nothing to gain; tests run it there, without streams and pinned memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from taut.errors import ConfigError
from taut.models import architecture
from taut.models.settings import ActivationCheckpointing

PRODUCTS = {
    "aten::mm": (0, 1, 1),
    "aten::bmm": (0, 1, 2),
    "aten::addmm": (1, 2, 1),
    "aten::baddbmm": (1, 2, 2),
    "aten::_grouped_mm": (0, 1, -1),
    "mkldnn::_linear_pointwise": (0, 1, 0),
}
"""Operator -> the arguments that are multiplied, and the second one's dimension of outputs."""
ATTENTION = {
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}
MOST_OUTPUTS = 8
"""A product with more outputs than this for each of its inputs is computed again: an adapter's second one, or scores of
attention. Its result is large for the work it takes.
"""


def require_possible(
    how: ActivationCheckpointing, device: torch.device, attention: str, *, compiles: bool
) -> None:
    """Raise ConfigError where a setting would do nothing. ``attention``: the name of the backend."""
    problem = ""
    hides = "compile=true" if compiles else "attention=flex" if attention == "flex" else None
    if how == "offload" and device.type == "cpu":
        problem = "on a CPU, whose memory is the host's; expected a GPU; set activation_checkpointing=true"
    elif how == "selective" and hides:
        problem = (
            f"with {hides}: operators inside a compiled kernel cannot be kept; expected one of the two; set "
            "activation_checkpointing=true, or take the other out"
        )
    if problem:
        raise ConfigError(f"activation_checkpointing={how} {problem}")


def recompute_activations(
    model: nn.Module, how: ActivationCheckpointing, *, is_pinned: bool = True
) -> None:
    """Set what the layers of a model keep. ``is_pinned``: whether offloaded inputs are in pinned memory, which needs a
    GPU.
    """
    if not how:
        return
    inner: Any = architecture.unwrap(model)
    method = getattr(inner, "activation_checkpointing_enable", None)
    enable = method or inner.gradient_checkpointing_enable  # its name before transformers 5.23
    enable({"use_reentrant": False})
    function = Recompute(how) if how != "offload" else Offload(how, is_pinned=is_pinned)
    if any(
        "experts" in name.split(".") and name.endswith("bias") and parameter.ndim > 1
        for name, parameter in architecture.layers(model).named_parameters()
    ):  # biases of experts, which the library adds to their products in place
        function.changed = {"aten::_grouped_mm"}
    for module in inner.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = function


def applied(layer: nn.Module) -> Recompute | None:
    """Return the recomputation set on a layer here; None where there is none, or another library set it."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    is_on = getattr(layer, "gradient_checkpointing", False) and isinstance(function, Recompute)
    return function if is_on else None


@dataclass(eq=False)
class Recompute:
    """Calls a layer such that it keeps what ``how`` says."""

    how: ActivationCheckpointing
    num_kept: int = 0
    """Results of operators (selective) or inputs in the host's memory (offload), kept since the start."""
    changed: Collection[str] = ()
    """Operators whose results the model changes in place, which cannot be kept."""

    def __call__(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        # Reentrant checkpointing loses the gradient of adapters behind inputs that need none.
        if self.how == "selective":
            contexts: Any = partial(create_selective_checkpoint_contexts, self._choose)
            return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)
        return checkpoint(layer, *inputs, use_reentrant=False)

    def _choose(
        self, context: Any, operator: Any, *arguments: Any, **keywords: Any
    ) -> CheckpointPolicy:
        # The name of an overload that writes into a given tensor ends in ".out".
        name = operator.name()
        if name in self.changed or not _is_dear(name, arguments):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.num_kept += not context.is_recompute
        return CheckpointPolicy.MUST_SAVE


def _is_dear(name: str, arguments: Sequence[Any]) -> bool:
    """Whether an operator takes long for what its result takes."""
    if name not in PRODUCTS:
        return name in ATTENTION
    left, right, dim = PRODUCTS[name]
    num_outputs, num_inputs = arguments[right].shape[dim], arguments[left].shape[-1]
    return bool(num_outputs <= MOST_OUTPUTS * num_inputs)


@dataclass(eq=False)
class OnHost:
    """An input of a layer in the host's memory."""

    content: Tensor
    device: torch.device
    before: weakref.ref[OnHost] | None
    """The input that went before it; the backward pass wants it next."""
    ahead: Tensor | None = None
    """On the device again, or on its way there, before it is wanted."""


@dataclass(eq=False)
class Offload(Recompute):
    """Keeps a layer's inputs in the host's memory."""

    is_pinned: bool = True
    _newest: weakref.ref[OnHost] | None = None
    _stream: torch.cuda.Stream | None = None
    """Of the copies; None before the first one, and on a CPU."""

    def __call__(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        with saved_tensors_hooks(self.pack, self.unpack):
            # inside the layer, checkpoint's own hooks
            return super().__call__(layer, *inputs)

    def pack(self, tensor: Tensor) -> OnHost:
        """Send an input to the host."""
        if tensor.is_cuda and self._stream is None:
            make: Any = torch.cuda.Stream  # it has no types
            self._stream = make(tensor.device)
        content = torch.empty_like(tensor, device="cpu", pin_memory=self.is_pinned)
        self._copy(content, tensor)
        kept = OnHost(content, tensor.device, self._newest)
        self._newest = weakref.ref(kept)
        self.num_kept += 1
        return kept

    def unpack(self, kept: OnHost) -> Tensor:
        """An input on its device again; the one before it is sent there."""
        wanted = self._fetch(kept)
        kept.ahead = None
        if self._stream is not None:
            torch.cuda.current_stream(kept.device).wait_stream(self._stream)
        before = None if kept.before is None else kept.before()
        if before is not None:
            before.ahead = self._fetch(before)
        return wanted

    def _fetch(self, kept: OnHost) -> Tensor:
        if kept.ahead is not None:
            return kept.ahead
        tensor = torch.empty_like(kept.content, device=kept.device, pin_memory=False)
        self._copy(tensor, kept.content)
        return tensor

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copy after all that computes now, and next to all that computes later."""
        there = target if target.is_cuda else source
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(there.device))
            there.record_stream(self._stream)  # its memory is not given away before the copy ends
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
