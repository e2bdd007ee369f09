"""Flat tokens through a model's backbone: the way the scorer, an engine and a critic of its own run theirs.

May import types, attention, vision.towers and models.anatomy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from taut.attention.decode import Decoding
from taut.attention.layout import Layout
from taut.models.anatomy import decoder
from taut.types import Media, Packed
from taut.vision import towers


def hidden_of(model: nn.Module, packed: Packed) -> tuple[Packed, Tensor]:
    """The micro-batch on the model's device, and the backbone's last hidden states [T, D]."""
    device = next(model.parameters()).device
    last_T = None if packed.last_T is None else packed.last_T.numpy()
    layout = Layout(packed.reach_T.numpy(), last_T, device)
    packed = packed.to(device)
    return packed, hidden_states(model, packed.ids_T, packed.position_ids, layout, packed.media)


def hidden_states(
    model: nn.Module,
    ids_T: Tensor,
    position_ids: Tensor,
    layout: Layout | Decoding,
    media: Sequence[Media] = (),
) -> Tensor:
    """The backbone's last hidden states [T, D], after the final norm, of tokens on the model's device. ``media``: the
    pictures among them.
    """
    backbone = decoder(model)
    states: Tensor = backbone(
        input_ids=ids_T.unsqueeze(0),
        position_ids=position_ids.unsqueeze(-2),
        use_cache=False,
        taut_layout=layout,
        **towers.encode(backbone, media, ids_T),
    ).last_hidden_state
    return towers.keep_step(backbone, states.squeeze(0), media)
