"""Heads: the output head proved, and the scalar head, one number at a token, as reward models and critics have it.

Models of transformers' sequence and token classification call the scalar head ``score``: a linear layer with one output
on the last hidden state. Where it is read is the sample's business (its last token, or each step's), never searched for
by id.

Both heads are proved: the model's own logits on random hidden states are compared with what ``score.py`` computes, so
that an architecture whose head does something else is refused, not guessed.

May import errors and models.anatomy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers import conversion_mapping as conversions
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from taut.errors import ModelError
from taut.models.architecture import decoder, head, text_config, unwrap
from taut.vision import tower

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative difference that is rounding; 1e-9 in float64."""


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


def scalar(hidden: Tensor, spec: nn.Linear) -> Tensor:
    """The scalar head's value at each of ``hidden`` [..., D]: its product is taken in at least float32, whatever the
    backbone's.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        value = (
            hidden.to(wide) @ spec.weight.to(wide)[0]
        )  # no view: FSDP hooks what the root returns
        return value if spec.bias is None else value + spec.bias.to(wide)


@torch.no_grad()
def prove_head(model: nn.Module) -> float:
    """The largest difference between ``anatomy.head(model)`` and the model's own logits on random hidden states.

    Raises ModelError where the two differ by more than rounding.
    """
    spec = head(model)
    hidden = _random_hidden(spec.weight)
    theirs, ours = _own_logits(model, hidden), spec.logits(hidden)
    return _require_equal(model, (theirs, ours), hidden.dtype, "softcap(scale * lm_head(hidden))")


@torch.no_grad()
def prove_scalar_head(model: nn.Module) -> float:
    """The same for the scalar head: of a sequence class the last token's number, of a token class each one's."""
    spec = scalar_head(model)
    hidden = _random_hidden(spec.weight)
    with torch.autocast(hidden.device.type, enabled=False):  # as ``scalar`` has it
        theirs, ours = _own_logits(model, hidden), scalar(hidden, spec)
    if theirs.shape[:-1] != ours.shape:
        ours = ours[:, -1]
    return _require_equal(model, (theirs.squeeze(-1), ours), hidden.dtype, "score(hidden)")


def _random_hidden(weight: Tensor) -> Tensor:
    """[1, 3, D]"""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, weight.shape[1], generator=generator, dtype=torch.float64)
    return hidden.to(weight.device, weight.dtype)


def _own_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """What the model's own forward makes of these hidden states: the backbone is replaced by them for one call, so
    neither attention nor layout takes part.
    """
    inner: Any = unwrap(model)
    backbone = decoder(model)
    pad = text_config(model).pad_token_id  # a sequence class reads the last token that is another
    ids = torch.full((1, 3), 1 if pad == 0 else 0, device=hidden.device)
    own_forward = backbone.__dict__.get("forward")
    output = MoeModelOutputWithPast(last_hidden_state=hidden)
    for name in ("image_hidden_states", "video_hidden_states", "rope_deltas", "shared_kv_states"):
        setattr(output, name, None)  # vision-language models and Gemma 4 pass them on
    backbone.forward = lambda *_, **__: output
    try:
        logits: Tensor = inner(input_ids=ids, use_cache=False).logits
    finally:
        del backbone.forward
        if own_forward is not None:
            backbone.forward = own_forward
    return logits


def _require_equal(
    model: nn.Module, pair: tuple[Tensor, Tensor], dtype: torch.dtype, formula: str
) -> float:
    theirs, ours = pair
    tolerance = TOLERANCE.get(dtype, 1e-9)
    error = float("inf") if theirs.shape != ours.shape else float((theirs - ours).abs().max())
    if not error <= tolerance * (1.0 + float(ours.abs().max())):
        raise ModelError(
            f"the logits of {type(unwrap(model)).__name__} are not {formula}: they differ by {error:.2g}; "
            "taut cannot score with this head"
        )
    return error


# --------------------------------------------------------------------------------------------------
# Models with a scalar head of families that take pictures: the classes that transformers lacks.
#
# Transformers has its classes for a sequence's and for each token's number as mixins over any family, and lists few
# families that take pictures. Here the same mixins are put over a family's own base class and listed with the
# library's automatic classes, so that loading, saving and wrapping know nothing of it:
#
#     Qwen2_5_VLForSequenceClassification    model.* as in the family's other models, and score.weight [1, D]
#
# A program that has not imported this module cannot open what is saved; one that calls ``list_with_library`` first
# can, with the library's own ``AutoModelForSequenceClassification``. May import vision.towers; models.reward does.

_MIXINS: dict[Any, tuple[type, str]] = {
    AutoModelForSequenceClassification: (
        GenericForSequenceClassification,
        "ForSequenceClassification",
    ),
    AutoModelForTokenClassification: (GenericForTokenClassification, "ForTokenClassification"),
}


def list_with_library(config: PreTrainedConfig) -> None:
    """Let the library's automatic classes know a family's models with a scalar head, where they do not."""
    if config.model_type not in tower.FAMILIES:
        return
    listed: Any = AutoModel
    backbone = listed._model_mapping[type(config)]
    base = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    for auto, (mixin, name) in _MIXINS.items():
        if type(config) not in auto._model_mapping:
            family = backbone.__name__.removesuffix("Model")
            made = type(family + name, (mixin, base), {"__module__": __name__})
            auto.register(
                type(config), made, exist_ok=True
            )  # else a config of the library's own is passed over
            library: Any = conversions
            renamed = library.get_checkpoint_conversion_mapping(f"{family}ForConditionalGeneration")
            if renamed is not None:  # weights have other names in its files
                library.register_checkpoint_conversion_mapping(
                    family + name, renamed, overwrite=True
                )
