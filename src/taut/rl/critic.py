"""The critic of PPO: its configuration, how it is loaded, its learning rate, and how it is saved. The model is in
models/heads.py, the loss on its values in losses/policy.py.

    own      a model directory: a reward model (its head is kept, as arXiv 2203.02155 begins its value function), or a
             language model, which gets a new head; the policy's own start where none is named. It trains whole, or by
             adapters
    shared   a head on the policy's hidden states

The gradient of its own parameters is clipped apart from the policy's (``optim.clip``), so that a poor value
estimate does not shrink the policy's step; what a shared one sends into the policy's trunk is clipped with the
policy's, and ``critic.detach`` sends nothing. The key ``freeze`` and the policy's adapters have no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, configclass
from taut.errors import ConfigError, ModelError, OutputError
from taut.models import architecture
from taut.models.heads import (
    CRITIC,
    Critic,
    OwnCritic,
    SharedCritic,
    initialise,
    scalar_head,
)
from taut.models.load import ShardLayers, is_reward_config, load_config
from taut.models.lora import LoraConfig, apply_lora
from taut.models.recompute import ActivationCheckpointing, recompute_activations
from taut.models.reward_model import NewHead, load_reward_model
from taut.models.save import saving
from taut.models.self_test import one_sample_reasons
from taut.models.tokens import add_tokens
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.train.optim import DefaultRates, OptimConfig, Pace

KEY = "critic.model"
NEW_HEAD = NewHead()
"""What a language model gets: no bias, so that it is saved as most reward models and other frameworks' critics are."""

LEARNING_RATES = DefaultRates(1e-5, 1e-4, "verl 1e-5; OpenRLHF 9e-6")
"""Taken where neither ``critic.learning_rate`` nor ``optim.learning_rate`` is set."""


@configclass
class CriticConfig:
    """The critic of PPO: it predicts the return of a state."""

    kind: Literal["own", "shared"] = "own"
    """own: a separate model; shared: a head on the policy's hidden states, which costs almost nothing."""
    model: str | None = None
    """For kind=own: directory (or hub name) of a reward model, whose head is kept, or of a language model, with the
    policy's tokenizer. None: the model that the policy starts from."""
    head: Literal["zero", "normal"] | None = None
    """Initialisation of the head: 0, or N(0, 1 / (D + 1)). None: the reward model's head, else 0."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """For kind=own: rank of the critic's adapters, which train with the head. 0: all weights train."""
    detach: bool = False
    """For kind=shared: do not train the policy's weights with the critic's loss."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """The highest learning rate of the critic, on the policy's schedule. None: optim.learning_rate if that is set, else
    1e-5, or 1e-4 with lora_rank (docs/hyperparameters.md)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which only the critic learns: the policy's learning rate is 0."""

    def __post_init__(self) -> None:
        if self.kind == "own" and self.detach:
            raise ConfigError(
                "critic.detach=true has no effect with critic.kind=own, which shares no weight with the policy; "
                "expected critic.kind=shared; set that, or leave detach out"
            )
        unused = [name for name in ("model", "lora_rank") if getattr(self, name)]
        if self.kind == "shared" and unused:
            raise ConfigError(
                f"critic.{unused[0]}={getattr(self, unused[0])} has no effect with critic.kind=shared, which is a head "
                f"on the policy; expected critic.kind=own; set that, or leave {unused[0]} out"
            )

    def rate(self, optim: OptimConfig) -> float:
        """The highest learning rate of the critic."""
        default = LEARNING_RATES.lora if self.lora_rank else LEARNING_RATES.full
        return self.learning_rate or optim.learning_rate or default

    def pace(self, optim: OptimConfig, policy_rate: float) -> Pace:
        """The critic's learning rate, given the highest one of the policy, ``policy_rate``."""
        return Pace(CRITIC, self.rate(optim) / policy_rate, self.warmup_steps)


def build_critic(
    config: CriticConfig,
    policy: nn.Module,
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    longest: int,
    new_ids: Sequence[int] = (),
    one_sample: str | None = None,
    checkpointing: ActivationCheckpointing = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    shard: ShardLayers | None = None,
) -> tuple[Critic, list[Decision]]:
    """The critic of a policy, and the decisions about it. An own one is sharded before the scorer.

    ``policy``: as it trains, with its adapters and added tokens (``new_ids``), not yet sharded. ``path``: the directory
    or hub name that it was loaded from. ``attention``: the implementation, as registered with the library. ``longest``:
    tokens of the longest sample there can be. ``one_sample``: why the policy runs one sample at a time; None: it packs.
    ``checkpointing``: what its layers keep for the backward pass. ``shard``: as for ``load_model``. The
    caller checks that ``config.model`` has the policy's tokenizer and its length of context.
    """
    if config.kind == "shared":
        shared = SharedCritic(policy, detach=config.detach)
        if config.head == "normal":
            initialise(shared.score, seed)
        reason = "critic.kind=shared" + (", which does not train them" if config.detach else "")
        reason += "; checkpoints have it, and it is not saved with the model"
        name = "a head on the policy's hidden states"
        return shared, [Decision("critic", name, reason), _head(config)]
    own_path = path if config.model is None else config.model
    try:
        has_head = is_reward_config(load_config(own_path, trust_remote_code))
        model = load_reward_model(
            own_path,
            None if has_head else NEW_HEAD,
            dtype=dtype,
            device=device,
            attention=attention,
            trust_remote_code=trust_remote_code,
            shard=shard,
        )
    except ModelError as error:
        raise ModelError(f"{KEY}: {error}; or set critic.kind=shared") from error
    alone = "; ".join(one_sample_reasons(model, longest))
    if alone and not one_sample:
        raise ModelError(
            f"{KEY}={own_path} runs one sample at a time ({alone}), and model={path} does not; expected a critic "
            "that packs as it does; name another, or set critic.kind=shared"
        )
    if config.head == "normal":
        initialise(scalar_head(model), seed)
    elif config.head == "zero" or not has_head:
        initialise(scalar_head(model), seed=None)
    add_tokens(model, list(new_ids))
    adapted = apply_lora(model, LoraConfig(rank=config.lora_rank), seed)
    recompute_activations(model, checkpointing)
    named = "the policy's start" if config.model is None else "named by critic.model"
    how = f", adapters of rank {config.lora_rank}" if config.lora_rank else ""
    decisions = [Decision("critic", own_path + how, named), _head(config, has_head=has_head)]
    idle = architecture.freeze_unused(adapted)
    if idle:
        reason = "no feature of a picture depends on them"
        decisions.append(Decision("critic.frozen", f"{len(idle)} tensors", reason))
    return OwnCritic(adapted), decisions


def _head(config: CriticConfig, *, has_head: bool = False) -> Decision:
    if config.head is not None:
        return Decision("critic.head", config.head, "asked for by name")
    if has_head:
        return Decision("critic.head", "as it is", "the reward model's own")
    return Decision("critic.head", "zero", "a new head: V = 0 at the start")


def save_critic(
    critic: Critic,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    *,
    stop_ids: Sequence[int],
    template: str | None,
    dtype: torch.dtype,
) -> Path | None:
    """Write an own critic as reward models are written, adapters merged; where it is. All ranks call, and all raise
    OutputError where it cannot be written.

    A shared one means nothing without the policy it was trained with, at the step it was: it is in checkpoints only.
    """
    if not isinstance(critic, OwnCritic):
        return None
    failure = ""
    with distributed.whole_tensors(critic.model, ranks) as whole:
        try:
            if whole is not None:
                with saving(
                    critic.model,
                    tokenizer,
                    directory,
                    stop_ids=stop_ids,
                    template=template,
                    dtype=dtype,
                    whole=whole,
                ):
                    pass  # there is nothing to add
        except OutputError as error:
            failure = str(error)
    failure = ranks.gather(failure)[0]
    if failure:
        raise OutputError(failure)
    return directory
