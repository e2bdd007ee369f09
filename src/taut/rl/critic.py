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

import torch
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision
from taut.errors import ModelError
from taut.models import architecture
from taut.models.heads import Critic, OwnCritic, SharedCritic, initialize, scalar_head
from taut.models.load import ShardLayers, is_reward_config, load_config
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import Whole
from taut.models.recompute import recompute_activations
from taut.models.reward_model import load_reward_model
from taut.models.save import saving
from taut.models.self_test import one_sample_reasons
from taut.models.settings import ActivationCheckpointing, LoraConfig, NewHead
from taut.models.tokens import add_tokens
from taut.rl.settings import CriticConfig
from taut.train import distributed
from taut.train.distributed import Ranks

KEY = "critic.model"
NEW_HEAD = NewHead()
"""The head of a critic that begins as a language model; without bias, as in most reward models and critics."""


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
    # a head on the policy's hidden states
    if config.kind == "shared":
        shared = SharedCritic(policy, detach=config.detach)
        if config.head == "normal":
            initialize(shared.score, seed)
        reason = "critic.kind=shared" + (", which does not train them" if config.detach else "")
        reason += "; checkpoints have it, and it is not saved with the model"
        name = "a head on the policy's hidden states"
        return shared, [Decision("critic", name, reason), _head(config)]
    # a model of its own, which packs as the policy does
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
    # its head, tokens and adapters
    if config.head == "normal":
        initialize(scalar_head(model), seed)
    elif config.head == "zero" or not has_head:
        initialize(scalar_head(model), seed=None)
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
    """Write an own critic as reward models are written, adapters merged; returns its directory. All ranks call, and
    all raise OutputError where it cannot be written.

    A shared one means nothing without the policy it was trained with, at the step it was: it is in checkpoints only.
    """
    if not isinstance(critic, OwnCritic):
        return None

    def save(whole: Whole) -> None:
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

    distributed.run_with_whole_tensors(critic.model, ranks, save)
    return directory
