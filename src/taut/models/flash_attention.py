"""Which FlashAttention runs inside torch: the 2 that torch brings, or an installed 3 (Hopper) or 4 (Blackwell).

torch can put 3 and 4 in place of its own kernels (``torch.nn.attention.activate_flash_attention_impl``); their packages
are installed by hand. The numbers are the same to rounding. ``activate`` does so where it can, and says why or why not.
They are the process's: one model that they do not take brings torch's own back for all.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn import attention
from transformers import PreTrainedConfig

from taut.config import Decision
from taut.models.architecture import head_sizes


class Kernels(NamedTuple):
    """A FlashAttention that torch can activate."""

    number: str
    module: str
    """What torch imports to activate it."""
    largest_head: int


BY_CAPABILITY = {
    9: Kernels("3", "flash_attn_interface", 256),
    10: Kernels("4", "flash_attn.cute.interface", 128),
}
"""The first number of a device's compute capability -> the kernels made for it."""
_largest_head = 0
"""Of the models of this process."""


def activate(backend: str, device: torch.device, config: PreTrainedConfig) -> list[Decision]:
    """Put the kernels made for the device in place, before a model runs; the decision, if ``backend`` asks for them or
    this model drives them out.
    """
    global _largest_head
    if device.type != "cuda":
        return []
    _largest_head = max(_largest_head, *head_sizes(config.get_text_config()))
    kernels = BY_CAPABILITY.get(torch.cuda.get_device_capability(device)[0])
    if kernels is None:
        reason = "torch's own; 3 is for compute capability 9, and 4 for 10"
        return [_decision("2", reason)] if backend == "varlen" else []
    obstacle, where = _obstacle(kernels), ""
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
        return [_decision("2", f"torch's own{where}; FlashAttention {kernels.number}: {obstacle}")]
    return [_decision(kernels.number, f"made for this device; {kernels.module} is installed")]


def _decision(number: str, reason: str) -> Decision:
    return Decision("attention.flash", number, reason)


def _obstacle(kernels: Kernels) -> str | None:
    """The reason why these kernels cannot be activated; None: they can be tried."""
    names: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if f"FA{kernels.number}" not in names:
        return f"torch {torch.__version__} cannot activate it"
    if _largest_head > kernels.largest_head:
        return f"heads have size {_largest_head}; it takes up to {kernels.largest_head}"
    package = kernels.module.partition(".")[0]
    if find_spec(package) is None:
        return f"{package} is not installed"
    return None
