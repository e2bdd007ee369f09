"""The scalar head: one number at a token, as reward models and critics have it.

Models of transformers' sequence and token classification call it ``score``: a linear layer with one output on the last
hidden state. Where it is read is the sample's business (its last token, or each step's), never searched for by id.

May import errors and models.anatomy.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from taut.errors import ModelError
from taut.models.anatomy import unwrap


def scalar_head(model: nn.Module) -> nn.Linear:
    """The head itself (of an adapter's copy, where peft trains one). Raises ModelError where there is none."""
    module: Any = getattr(unwrap(model), "score", None)
    copies = getattr(module, "modules_to_save", None)
    if copies is not None:
        is_off = module.disable_adapters or not module.active_adapters
        module = module.original_module if is_off else copies[module.active_adapters[0]]
    if not isinstance(module, nn.Linear) or module.weight.shape[0] != 1:
        raise ModelError(
            f"{type(unwrap(model)).__name__} has no scalar head; expected `score`, a linear layer with one output"
        )
    return module
