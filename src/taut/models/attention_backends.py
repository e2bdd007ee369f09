"""The choice of the attention backend, and the registration of backends with the library's attention interface.

``select`` chooses before the model is loaded; the model is loaded with the name it returns. Each backend is
registered under ``taut_<name>`` as an attention function, and the layout of a micro-batch reaches every layer as the
keyword ``taut_layout`` of the model's forward. No mask function is registered: visibility comes from the layout, and
the library then makes no mask and asks the device nothing about positions. Inside ``observe`` there is one, which
evaluates the library's mask on a grid of indices and records its kind; every layer that calls is recorded too, for
models/self_test.py.

``activate_flash_attention`` puts an installed FlashAttention 3 (Hopper) or 4 (Blackwell) in place of torch's own 2
(``torch.nn.attention.activate_flash_attention_impl``), and says why or why not; their packages are installed by hand.
The numbers are equal to rounding. The kernels are the process's: one model that they do not take brings torch's own
back for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from taut.attention import flex, reference, varlen
from taut.attention.decode import Decoding
from taut.attention.extension import Attend, Extension
from taut.attention.layout import Layout, read_call
from taut.config import Decision, did_you_mean
from taut.errors import AttentionError
from taut.models.architecture import head_sizes, layer_types, text_config
from taut.models.stateful_types import STATEFUL_TYPES

BACKENDS: dict[str, Attend] = {
    "reference": reference.attend,
    "varlen": varlen.attend,
    "flex": flex.attend,
}
"""name -> function. Every entry is held to the invariants in tests/invariants."""

AHEAD: dict[str, Callable[[Layout, int | None], object]] = {
    "varlen": varlen.kernel_calls,
    "flex": flex.mask_of,
}
"""name -> what makes the tensors that a layer with a window reads of a layout, where a backend has some on the device.
"""

PREFIX = "taut_"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The attention that will run."""

    name: str
    reason: str

    @property
    def implementation(self) -> str:
        """Its name in the library."""
        return PREFIX + self.name


def select(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    config: PreTrainedConfig,
    capability: float | None = None,
) -> Chosen:
    """The backend that runs for a model on a device with a compute dtype, and why. ``config`` is the whole model's;
    ``capability``: of a GPU that is not here.

    Raises AttentionError where ``requested`` is unknown or cannot run here.
    """
    if requested not in ("auto", *BACKENDS):
        raise AttentionError(
            f"attention={requested} is not known; expected auto, {', '.join(BACKENDS)}"
            f"{did_you_mean('attention', requested)}"
        )
    if device.type == "cuda" and capability is None:
        major, minor = torch.cuda.get_device_capability(device)
        capability = major + minor / 10
    obstacles = {name: _obstacle(name, device, capability, dtype, config) for name in BACKENDS}
    has_two_way_blocks = config.model_type == "gemma3"  # the tokens of a picture
    if obstacles["varlen"] is None and has_two_way_blocks:
        obstacles["varlen"] = "the model's pictures see themselves both ways"
    if requested != "auto":
        if obstacles[requested]:
            raise AttentionError(
                f"attention={requested} cannot run: {obstacles[requested]}; set attention=auto"
            )
        return Chosen(requested, "asked for by name")
    for name in ("varlen", "flex"):
        if obstacles[name] is None:
            passed = [
                f"{other}: {why}" for other, why in obstacles.items() if why and other != name
            ]
            return Chosen(name, "; ".join(["the fastest exact kernel here", *passed]))
    return Chosen("reference", f"varlen: {obstacles['varlen']}; flex: {obstacles['flex']}")


def select_for_proof(device: torch.device, dtype: torch.dtype, config: PreTrainedConfig) -> str:
    """The implementation with which a few short samples are compared in ``dtype``: one that compiles nothing. In
    float32 a GPU would be given flex attention, whose kernels need Triton and a C compiler and take longer to compile
    than the comparison.
    """
    chosen = select("auto", device, dtype, config)
    return PREFIX + ("reference" if chosen.name == "flex" else chosen.name)


def _obstacle(
    name: str,
    device: torch.device,
    capability: float | None,
    dtype: torch.dtype,
    config: PreTrainedConfig,
) -> str | None:
    """The reason why a backend cannot train this model here, or None."""
    config = config.get_text_config()
    if name == "reference":
        return None
    if capability is None:
        return f"the device is {device.type}; its backward needs CUDA"
    parts = [getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim")]
    sizes = set(head_sizes(config)) if None in parts else {int(size or 0) for size in parts}
    if name == "flex":
        if dtype == torch.float64:
            return "the kernel adds up in float32 and dtype is float64"
        small = min(sizes, default=16)
        return f"heads have size {small}; the kernel takes 16 or more" if small < 16 else None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes in 16 bit and dtype is {dtype}".replace("torch.", "")
    if capability < 8.0:
        return "the kernel needs compute capability 8.0 or newer"
    if getattr(config, "attn_logit_softcapping", None):
        return "the model has an attention softcap"
    if None not in parts and parts[0] != parts[1]:
        return f"queries have heads of {parts[0]}, values of {parts[1]}"
    for head_dim in sizes:
        if head_dim > 256 or head_dim % 8:
            return f"heads have size {head_dim}; the kernel takes multiples of 8 up to 256"
    if config.model_type.startswith("gpt_oss"):
        return "the model has attention sinks"
    return None


def make_ahead(model: nn.Module, layout: Layout) -> None:
    """Make the tensors that the model's layers will read of a layout, so that a forward copies none."""
    _ = layout.row_index
    config = text_config(model)
    make = AHEAD.get(config._attn_implementation.removeprefix(PREFIX))
    if make is None:
        return
    for kind in sorted(set(layer_types(model)) - STATEFUL_TYPES):
        make(layout, config.sliding_window if kind == "sliding_attention" else None)


@dataclass
class Observation:
    """Records of a model that runs inside ``observe``."""

    layers: list[nn.Module] = field(default_factory=list)
    """The attention module of each call, in order."""
    windows_called: set[int | None] = field(default_factory=set)
    """The sliding windows that the layers asked for."""
    windows_masked: set[int | None] = field(default_factory=set)
    """The windows of the masks that the library would have built; None: plain causal."""
    is_deaf: bool = False
    """Attention is replaced: each token gets its own value, and nothing of other tokens."""


_observation: Observation | None = None


@contextmanager
def observe(*, is_deaf: bool = False) -> Iterator[Observation]:
    """Record every attention call and every mask that the library requests, inside the block."""
    global _observation
    assert _observation is None, "observe does not nest"
    _observation = Observation(is_deaf=is_deaf)
    masks = dict.fromkeys((PREFIX + name for name in BACKENDS), _mask)
    for name, function in masks.items():
        AttentionMaskInterface.register(name, function)
    try:
        yield _observation
    finally:
        _observation = None
        for name in masks:
            del AttentionMaskInterface._global_mapping[name]


def _attention(
    backend: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    taut_layout: Layout | Decoding | Extension | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that the library calls in every attention layer. q [1, H, T, K] -> ([1, T, H, K], None)."""
    if taut_layout is None:
        raise AttentionError(
            f"{type(module).__name__} was called without a layout; this model was loaded for taut's forward; "
            "call it through taut, or load it again for use elsewhere"
        )
    assert attention_mask is None, "a mask reached a taut attention function"
    assert query.shape[:3:2] == (1, taut_layout.num_tokens), (
        f"a flat run is expected, got {query.shape}"
    )
    call = read_call(module, query.shape[-1], keywords)
    if _observation is not None:
        _observation.layers.append(module)
        _observation.windows_called.add(call.window)
        if _observation.is_deaf:
            repeated = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            return repeated.transpose(1, 2).contiguous(), None
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as in the library: RoPE leaves q and k in float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if isinstance(taut_layout, Decoding):
        out = taut_layout.attend(module, query, key, value, call)
    elif isinstance(taut_layout, Extension):
        out = taut_layout.attend(module, query, key, value, call, BACKENDS[backend])
    else:
        if taut_layout.kept is not None:
            taut_layout.kept[module] = (key, value)
        out = BACKENDS[backend](query, key, value, taut_layout, call)
    return out.transpose(1, 2).contiguous(), None


def _mask(**request: Any) -> None:
    """The mask function that the library calls before the layers, inside ``observe``: None, since the layout defines
    visibility.
    """
    assert _observation is not None
    config = request["config"]
    window = window_of(request["mask_function"], config)
    if window == 0 and "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return  # Qwen2-MoE builds it for sliding layers even where it has none
    _observation.windows_masked.add(window)


def window_of(mask_function: Callable[..., Any], config: Any) -> int | None:
    """The window of a library mask: None for plain causal, W for a sliding window.

    The function is evaluated on a grid of indices around powers of two and the window, so that a structure far out
    (chunks of 8,192) shows. Raises AttentionError for a mask that is neither.
    """
    window = getattr(config, "sliding_window", None)
    bounds = [2**power for power in range(20)] + ([window, 2 * window] if window else [])
    near = sorted({max(0, bound + offset) for bound in bounds for offset in (-1, 0, 1)})
    query, key = torch.meshgrid(torch.tensor(near), torch.tensor(near), indexing="ij")
    zero = torch.zeros_like(query)
    allowed = torch.as_tensor(mask_function(zero, zero, query, key)).expand_as(query)
    causal = key <= query
    if torch.equal(allowed, causal):
        return None
    if window is not None and torch.equal(allowed, causal & (query - key < window)):
        return int(window)
    wrong = (allowed != causal).nonzero()[0]
    q, k = (near[int(index)] for index in wrong)
    raise AttentionError(
        f"the attention mask of {config.model_type} is neither causal nor its sliding window: token {q} "
        f"{'sees' if allowed[tuple(wrong)] else 'does not see'} token {k}; train a model with full or sliding-window "
        "attention"
    )


def leave_out_of_graphs() -> None:
    """Keep attention out of the graphs that torch's compiler makes of a layer (models/compiled_layers.py)."""
    for name in BACKENDS:
        leave_out: Any = torch.compiler.disable  # it has no types
        function = leave_out(partial(_attention, name), reason="attention is eager")
        AttentionInterface.register(PREFIX + name, function)


for _name in BACKENDS:
    AttentionInterface.register(PREFIX + _name, partial(_attention, _name))


# -- the FlashAttention inside torch


class FlashKernels(NamedTuple):
    """A FlashAttention that torch can activate."""

    number: str
    module: str
    """Module that torch imports to activate the kernels."""
    largest_head: int


FLASH_BY_CAPABILITY = {
    9: FlashKernels("3", "flash_attn_interface", 256),
    10: FlashKernels("4", "flash_attn.cute.interface", 128),
}
"""The first number of a device's compute capability -> the kernels made for it."""
_largest_head = 0
"""Of the models of this process."""


def activate_flash_attention(
    backend: str, device: torch.device, config: PreTrainedConfig
) -> list[Decision]:
    """Put the kernels made for the device in place, before a model runs; the decision, if ``backend`` asks for them or
    this model drives them out.
    """
    global _largest_head
    if device.type != "cuda":
        return []
    _largest_head = max(_largest_head, *head_sizes(config.get_text_config()))
    kernels = FLASH_BY_CAPABILITY.get(torch.cuda.get_device_capability(device)[0])
    if kernels is None:
        reason = "torch's own; 3 is for compute capability 9, and 4 for 10"
        return [Decision("attention.flash", "2", reason)] if backend == "varlen" else []
    # why they cannot be activated, if so
    obstacle: str | None = None
    where, package = "", kernels.module.partition(".")[0]
    if f"FA{kernels.number}" not in getattr(attention, "list_flash_attention_impls", list)():
        obstacle = f"torch {torch.__version__} cannot activate it"
    elif _largest_head > kernels.largest_head:
        obstacle = f"heads have size {_largest_head}; it takes up to {kernels.largest_head}"
    elif find_spec(package) is None:
        obstacle = f"{package} is not installed"
    # the kernels in place, or torch's own again where they do not take this model
    is_active = getattr(attention, "current_flash_attention_impl", lambda: None)() is not None
    if obstacle is not None and is_active:
        attention.restore_flash_attention_impl()
        where = " from here on, for all models of this process"
    elif backend != "varlen":
        return []
    elif obstacle is None and not is_active:
        try:
            attention.activate_flash_attention_impl(f"FA{kernels.number}")
        except (ImportError, OSError, RuntimeError) as error:
            obstacle = f"{kernels.module} cannot be used: {error}"
    if obstacle is not None:
        reason = f"torch's own{where}; FlashAttention {kernels.number}: {obstacle}"
        return [Decision("attention.flash", "2", reason)]
    reason = f"made for this device; {kernels.module} is installed"
    return [Decision("attention.flash", kernels.number, reason)]
