"""Proximal policy optimisation (PPO, arXiv 1707.06347): each token is compared with the value that a critic predicted.

The formulas are in losses/{advantages,policy}.py; the critic is in rl/critic.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from taut.config import Decision, Positive, Share, configclass
from taut.errors import ConfigError
from taut.losses.policy import Critic
from taut.methods.aux_models import AuxModels
from taut.methods.method import MethodName
from taut.methods.policy import PolicyConfig, PolicyMethod
from taut.rewards.registry import listed
from taut.rl.advantages import Gae
from taut.rl.critic import LEARNING_RATES as CRITIC_RATES
from taut.rl.critic import CriticConfig
from taut.rl.own_code import is_own
from taut.rl.rollout import RolloutConfig
from taut.train.optim import DefaultRates

AT_A_CUT = ("stop", "length_overlong")
"""Rewards for truncated answers."""


@configclass
class PpoConfig(PolicyConfig):
    """PPO: each token is compared with the value that a critic predicted."""

    section: ClassVar[str] = "ppo"

    gamma: Share = 1.0
    """Discount factor per token."""
    gae_lambda: Share = 0.95
    """GAE's lambda: 1 uses the observed returns alone, 0 the critic's next value alone."""
    whiten_advantages: bool = True
    """Normalise the advantages of a rollout's tokens to mean 0 and standard deviation 1."""
    bootstrap_truncated: bool = False
    """Replace the reward of a truncated answer by the critic's value of the state in which it was cut, as if the answer
    went on. false: a truncated answer gets its reward like any other. Penalties per token (ppo.kl_in=reward) and
    rewards of an environment's turns stay."""
    value_coef: Positive = 0.1
    """Weight of half the critic's squared error."""
    value_clip: Positive | None = 0.2
    """Clip range of the value loss: how far a value may move from its value at rollout time. None: no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_own(self.loss):
            raise ConfigError(
                f"found ppo.loss={self.loss}, and a loss of your own has no term for the critic; expected one of "
                "taut's; name it, or train with taut grpo"
            )

    @property
    def critic_term(self) -> Critic:
        """The critic's term."""
        return Critic(self.value_coef, self.value_clip)


@configclass
class PpoRollout(RolloutConfig):
    """How completions are sampled, and for how many steps a rollout is trained on."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions per prompt."""
    minibatches: Annotated[int, Field(ge=1)] = 4
    """Optimizer steps per pass over a rollout, which has batch.samples_per_step prompts for each of them."""


@configclass
class Ppo(PolicyMethod):
    """A run of ``taut ppo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "verl and OpenRLHF; TRL: 3e-6"
    )

    method: MethodName = "ppo"
    rollout: PpoRollout = PpoRollout()
    ppo: PpoConfig = PpoConfig()
    critic: CriticConfig = CriticConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ppo.bootstrap_truncated:
            return
        at_a_cut = [
            f"shaping.{name}={getattr(self.shaping, name):g}"
            for name in ("missing_eos_penalty", "soft_overlong")
            if getattr(self.shaping, name)
        ]
        named = [spec.name for spec in listed(self.rewards) if spec.weight]
        at_a_cut += [f"the reward {name}" for name in named if name in AT_A_CUT]
        if at_a_cut:
            raise ConfigError(
                "ppo.bootstrap_truncated=true replaces the reward of a cut answer by the critic's value, and "
                f"{at_a_cut[0]} is meant for cut answers, where it would be lost; expected one of the two; take one "
                "out"
            )
        if self.shaping.overlong == "drop":
            raise ConfigError(
                "ppo.bootstrap_truncated=true with shaping.overlong=drop, which leaves cut answers out of "
                "training: there is nothing to replace; expected one of the two; take one out"
            )

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
        config = self.ppo
        return Gae(
            config.gamma, config.gae_lambda, config.whiten_advantages, config.bootstrap_truncated
        )

    def models(self) -> AuxModels:
        return replace(super().models(), critic=self.critic)

    def resolved(self) -> dict[str, Any]:
        """With the critic's learning rate: where it is not set it may follow optim.learning_rate."""
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
