"""The scalar head of reward models and critics, and the check that a model's head is the one taut computes.

Models of transformers' sequence and token classification call the scalar head ``score``: a linear layer with one output
on the last hidden state. The sample decides where it is read (at its last token, or at each step); no id is searched
for.

A critic is V(s), the expected return of the state in which a token is chosen (PPO, arXiv 1707.06347). A state is a read
of the micro-batch (``Packed.read_R``): the token that predicts the one chosen. Rows that share a prefix read its tokens
once each, from one computation. The product is taken in at least float32.

    shared   V(s) = w . h(s) + b, h(s) the policy's own hidden state; detached: no gradient reaches the policy's trunk
    own      the same with the hidden state of another model, run over the same micro-batch, prefixes shared as there

A critic is a part of the scorer (``Scorer.critic``), so that checkpoints, the optimizer and sharding hold it; the
policy that is saved (``Scorer.model``) does not contain it. ``rl/critic.py`` builds and saves it; returns and
advantages are computed elsewhere.

Output heads and scalar heads are verified: the model's own logits on random hidden states are compared with taut's
(``HeadSpec``, ``scalar``), so that an architecture whose head does something else is refused, not guessed.

Transformers implements the classification models as mixins over any family, and lists few families that take pictures.
``list_with_library`` applies the same mixins to a family's own base class and lists the result with the library's
automatic classes, so that loading, saving and wrapping need no special case:

    Qwen2_5_VLForSequenceClassification    model.* as in the family's other models, and score.weight [1, D]

A program can open such a model with the library's own ``AutoModelForSequenceClassification`` after it has called
``list_with_library``.
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
from taut.models import architecture
from taut.models.architecture import decoder, head, run_backbone, text_config, unwrap
from taut.types import Packed
from taut.vision import tower

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative difference that is rounding; 1e-9 in float64."""


def scalar_head(model: nn.Module) -> nn.Linear:
    """The head itself (the adapter's copy, where peft trains one). Raises ModelError where there is none."""
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
    """The scalar head's value at each of ``hidden`` [..., D], in at least float32 whatever the backbone's dtype."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        # a product, not a view: FSDP puts hooks on what the root returns
        value = hidden.to(wide) @ spec.weight.to(wide)[0]
        return value if spec.bias is None else value + spec.bias.to(wide)


@torch.no_grad()
def initialize(head: nn.Linear, seed: int | None) -> None:
    """Draw the weight from N(0, 1 / (D + 1)), the same numbers in every dtype; 0 without a seed. The bias is 0."""
    head.weight.zero_()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(head.weight.shape, generator=generator, dtype=torch.float64)
        head.weight.copy_(drawn / (head.in_features + 1) ** 0.5)
    if head.bias is not None:
        head.bias.zero_()


@torch.no_grad()
def check_head(model: nn.Module) -> float:
    """The largest difference between taut's head (``HeadSpec`` or ``scalar``) and the model's own logits on random
    hidden states. Raises ModelError where the two differ by more than rounding.
    """
    inner: Any = unwrap(model)
    is_scalar = hasattr(inner, "score")
    spec = scalar_head(model) if is_scalar else head(model)
    weight = spec.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, weight.shape[1], generator=generator, dtype=torch.float64)
    hidden = hidden.to(weight.device, weight.dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # as in ``scalar``
        theirs = _own_logits(model, hidden)
        ours = scalar(hidden, spec) if isinstance(spec, nn.Linear) else spec.logits(hidden)
    if is_scalar:
        theirs = theirs.squeeze(-1)
        if theirs.shape != ours.shape:  # a sequence class gives the last token's number
            ours = ours[:, -1]
    tolerance = TOLERANCE.get(hidden.dtype, 1e-9)
    error = float("inf") if theirs.shape != ours.shape else float((theirs - ours).abs().max())
    if not error <= tolerance * (1.0 + float(ours.abs().max())):
        formula = "score(hidden)" if is_scalar else "softcap(scale * lm_head(hidden))"
        raise ModelError(
            f"the logits of {type(inner).__name__} are not {formula}: they differ by {error:.2g}; "
            "taut cannot score with this head"
        )
    return error


def _own_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """The model's own logits of these hidden states, which replace the backbone for one call: neither attention nor
    layout takes part.
    """
    inner: Any = unwrap(model)
    backbone = decoder(model)
    pad = text_config(model).pad_token_id  # a sequence class reads the last token that is another
    ids = torch.full((1, 3), 1 if pad == 0 else 0, device=hidden.device)
    own_forward = backbone.__dict__.get("forward")
    output = MoeModelOutputWithPast(last_hidden_state=hidden)
    passed_on = (
        "image_hidden_states video_hidden_states audio_hidden_states rope_deltas shared_kv_states"
    )
    for name in passed_on.split():
        setattr(output, name, None)  # vision-language models and Gemma 4 pass them on
    backbone.forward = lambda *_, **__: output
    try:
        logits: Tensor = inner(input_ids=ids, use_cache=False).logits
    finally:
        del backbone.forward
        if own_forward is not None:
            backbone.forward = own_forward
    return logits


def list_with_library(config: PreTrainedConfig) -> None:
    """Register a family's models with a scalar head with the library's automatic classes, where they have none."""
    if config.model_type not in tower.FAMILIES:
        return
    backbones: Any = AutoModel
    backbone = backbones._model_mapping[type(config)]
    base = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    family = backbone.__name__.removesuffix("Model")
    classes: tuple[tuple[Any, type], ...] = (
        (AutoModelForSequenceClassification, GenericForSequenceClassification),
        (AutoModelForTokenClassification, GenericForTokenClassification),
    )
    for auto, mixin in classes:
        name = mixin.__name__.replace("Generic", family)
        if type(config) in auto._model_mapping:
            continue
        model_class = type(name, (mixin, base), {"__module__": __name__})
        auto.register(type(config), model_class, exist_ok=True)  # else library configs are ignored
        library: Any = conversions
        renamed = library.get_checkpoint_conversion_mapping(f"{family}ForConditionalGeneration")
        if renamed is not None:  # its files have other names for the weights
            library.register_checkpoint_conversion_mapping(name, renamed, overwrite=True)


# -- critics --------------------------------------------------------------------------------------


class SharedCritic(nn.Module):
    """A head on the policy's hidden states. It starts at V = 0."""

    def __init__(self, policy: nn.Module, *, detach: bool = False) -> None:
        super().__init__()
        table = architecture.stored_table(architecture.embedding(policy))
        assert table is not None, "an embedding has a weight"
        size = text_config(policy).hidden_size
        dtype = torch.promote_types(table.dtype, torch.float32)  # a frozen table may be narrow
        head = nn.Linear(size, 1, device="meta", dtype=dtype)  # draws no random number
        self.score = head.to_empty(device=table.device)
        initialize(self.score, seed=None)
        self.detach = detach

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """V [R] at the policy's hidden states."""
        return scalar(hidden_RD.detach() if self.detach else hidden_RD, self.score)


class OwnCritic(nn.Module):
    """Another model with a scalar head, loaded by ``models/reward_model.py``. It is sharded separately, so that engines
    on the policy need not gather it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Packed) -> Tensor:
        """V [R] of a micro-batch."""
        packed, hidden_TD = run_backbone(self.model, packed)
        return scalar(hidden_TD.index_select(0, packed.read_R), scalar_head(self.model))


Critic = SharedCritic | OwnCritic
