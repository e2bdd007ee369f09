"""The critic: V(s), the expected return of the state in which a token is chosen (PPO, arXiv 1707.06347).

    shared   V(s) = w . h(s) + b, h(s) the policy's own hidden state; detached: no gradient reaches the policy's trunk
    own      the same with the hidden state of another model, run over the same micro-batch, prefixes shared as there

A state is a read of the micro-batch (``Packed.read_R``): the token that predicts the one chosen. Rows that share a
prefix read its tokens once each, from one computation. The product is taken in at least float32.

A critic is a part of the scorer (``Scorer.critic``), so that checkpoints, the optimizer and sharding hold it; the
policy that is saved (``Scorer.model``) does not contain it. ``rl/critic.py`` builds and saves it; returns and
advantages are computed elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from taut.models import architecture
from taut.models.architecture import run_backbone
from taut.models.heads import scalar, scalar_head
from taut.types import Packed

PART = "critic"
"""The critic's name in the scorer."""


class SharedCritic(nn.Module):
    """A head on the policy's hidden states. It starts at V = 0."""

    def __init__(self, policy: nn.Module, *, detach: bool = False) -> None:
        super().__init__()
        table = architecture.stored_table(architecture.embedding(policy))
        assert table is not None, "an embedding has a weight"
        size = architecture.text_config(policy).hidden_size
        head = nn.Linear(size, 1, device="meta", dtype=table.dtype)  # draws no random number
        self.score = head.to_empty(device=table.device)
        initialise_at_zero(self.score)
        self.detach = detach

    @property
    def shards(self) -> list[nn.Module]:
        """Modules that are sharded separately: none, it is sharded with the root."""
        return []

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """V [R] at the policy's hidden states."""
        return scalar(hidden_RD.detach() if self.detach else hidden_RD, self.score)


class OwnCritic(nn.Module):
    """Another model with a scalar head, loaded by ``models/reward_model.py``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def shards(self) -> list[nn.Module]:
        """Modules that are sharded separately, inner ones first, so that engines on the policy need not gather them."""
        return [*architecture.layers(self.model), self]

    def forward(self, packed: Packed) -> Tensor:
        """V [R] of a micro-batch."""
        packed, hidden_TD = run_backbone(self.model, packed)
        return scalar(hidden_TD.index_select(0, packed.read_R), scalar_head(self.model))


Critic = SharedCritic | OwnCritic


@torch.no_grad()
def initialise_at_zero(head: nn.Linear) -> None:
    """Set V = 0 everywhere: the first advantages are the returns themselves, without noise."""
    head.weight.zero_()
    if head.bias is not None:
        head.bias.zero_()
