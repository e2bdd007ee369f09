"""Proximal policy optimization (PPO, arXiv 1707.06347): each token is compared with the value that a critic predicted.

The formulas are in losses/{advantages,policy}.py; the critic is in rl/critic.py.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from taut.config import Decision, Positive, Share, configclass
from taut.methods.method import MethodName
from taut.methods.policy import PolicyConfig, PolicyMethod
from taut.rl.settings import CRITIC_RATES, CriticConfig, RolloutConfig
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.policy import Critic
    from taut.methods.aux_models import AuxModels
    from taut.rl.advantages import Gae

AT_A_CUT = ("stop", "length_overlong")
"""Rewards for truncated answers."""


@configclass
class PpoConfig(PolicyConfig):
    """PPO: each token is compared with the value that a critic predicted."""

    section: ClassVar[str] = "ppo"

    gamma: Share = 1.0
    """Discount factor per token."""
    gae_lambda: Share = 0.95
    """GAE's lambda: 1 uses only the observed returns, 0 only the critic's next value."""
    whiten_advantages: bool = True
    """Normalize the advantages of a rollout's tokens to mean 0 and standard deviation 1."""
    bootstrap_truncated: bool = False
    """Replace the reward of a truncated answer by the critic's value of its last state, as if the answer continued.
    false: a truncated answer gets its reward like any other. Penalties per token (ppo.kl_in=reward) and rewards of an
    environment's turns stay."""
    value_coef: Positive = 0.1
    """Weight of half the critic's squared error."""
    value_clip: Positive | None = 0.2
    """Clip range of the value loss: the largest change of a value since rollout time. No clipping if not set."""

    rules: ClassVar[str] = """
        loss=FILE.py:Class[has_own_loss] unread: a loss of your own has no term for the critic; expected one of taut's;
            name it, or train with taut grpo
    """

    @property
    def critic_term(self) -> Critic:
        """The critic's term."""
        from taut.losses.policy import Critic

        return Critic(self.value_coef, self.value_clip)


@configclass
class PpoRollout(RolloutConfig):
    """Sampling of completions, and the number of steps that train on a rollout."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions per prompt."""
    minibatches: Annotated[int, Field(ge=1)] = 4
    """Optimizer steps per pass over a rollout, with batch.samples_per_step prompts in each."""


@configclass
class Ppo(PolicyMethod):
    """A run of ``taut ppo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "verl and OpenRLHF; TRL: 3e-6"
    )

    method: MethodName = "ppo"
    rollout: PpoRollout = field(default_factory=PpoRollout)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)

    rules: ClassVar[str] = """
        ppo.bootstrap_truncated=true excludes shaping.missing_eos_penalty shaping.soft_overlong: the reward of a cut
            answer is replaced, and what is meant for it would be lost
        ppo.bootstrap_truncated=true excludes rewards=stop[judges_cuts]: the reward of a cut answer is replaced;
            expected `rewards` without stop and length_overlong; take these out, or leave `ppo.bootstrap_truncated` out
        ppo.bootstrap_truncated=true excludes shaping.overlong=drop: cut answers are left out
    """

    @property
    def judges_cuts(self) -> bool:
        """Whether a reward is meant for cut answers."""
        from taut.rewards.registry import listed

        return any(spec.weight and spec.name in AT_A_CUT for spec in listed(self.rewards))

    @property
    def decisions(self) -> list[Decision]:
        if self.critic.learning_rate is not None or self.optim.learning_rate is not None:
            return super().decisions
        what = "adapters train" if self.critic.lora_rank else "all of its weights train"
        reason = f"the default of a critic of which {what} ({CRITIC_RATES.sources})"
        rate = f"{self.critic.rate(self.optim):g}"
        return [*super().decisions, Decision("critic.learning_rate", rate, reason)]

    @property
    def reads_turn_rewards(self) -> bool:
        return True

    def estimate(self) -> Gae:
        from taut.rl.advantages import Gae

        config = self.ppo
        return Gae(
            config.gamma, config.gae_lambda, config.whiten_advantages, config.bootstrap_truncated
        )

    def models(self) -> AuxModels:
        return replace(super().models(), critic=self.critic)

    def resolved(self) -> dict[str, Any]:
        """The settings with the critic's learning rate, which may follow optim.learning_rate if not set."""
        settings = super().resolved()
        settings["critic"]["learning_rate"] = self.critic.rate(self.optim)
        return settings

    @property
    def ends_remedy(self) -> str:
        return (
            "set ppo.bootstrap_truncated=false"
            if self.ppo.bootstrap_truncated
            else super().ends_remedy
        )
