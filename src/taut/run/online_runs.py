"""The commands that learn from what the model generates: each a run with a section of its own, and what it learns.

    taut grpo        GrpoRun          taut ppo         PpoRun
    taut online-dpo  OnlineDpoRun     taut best-of-n   BestOfNRun        taut gkd   GkdRun

They share one path (taut/online): prompts are rolled out, judged, scored and made into trees. What differs is the
credit that a path is given, and the loss.

May import run, methods, losses and online. training lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.losses.advantages import Estimator
from taut.losses.supervised import CrossEntropy
from taut.methods.distill import DistillConfig
from taut.methods.policy import GrpoConfig, PolicyConfig, PpoConfig, RollOut
from taut.methods.preference import DpoConfig
from taut.methods.reference import STREAM, ReferenceConfig
from taut.rewards.panel import PanelConfig
from taut.rewards.registry import RewardSpec, listed
from taut.rl.advantages import (
    All,
    Best,
    BestOfNConfig,
    Credit,
    Gae,
    KlPenalty,
    Pairs,
    PolicyCredit,
    ShapingConfig,
    Ways,
)
from taut.rl.critic import LEARNING_RATES as CRITIC_RATES
from taut.rl.critic import CriticConfig
from taut.rl.monitors import GuardConfig
from taut.rl.recipe import Recipe
from taut.rl.rollout import RolloutConfig
from taut.run.config import Comparing, Decision, Method, Objective, command_of
from taut.train.optim import DefaultRates

AT_A_CUT = ("stop", "length_overlong")
"""Rewards that are meant for answers that were cut."""

REWARD_ENDS = "add the reward stop to rewards, or lower optim.learning_rate"
"""What to do where a method has no setting against cut answers."""


@configclass
class OnlineRun(Comparing):
    """What runs have in common that learn from what the model generates."""

    UNWATCHED: ClassVar[Sequence[str]] = (
        "warn_difference",
        "max_difference",
        "warn_effective",
        "max_silent",
        "warn_kl",
        "warn_clipped",
        "warn_entropy",
        "warn_dropped",
        "warn_values",
    )
    """Keys of guard that nothing would read: of what policy gradients learn from."""

    rollout: RolloutConfig = RolloutConfig()
    rewards: str | list[str | RewardSpec] = field(default_factory=list)
    """What judges completions: names of docs/rewards.md, FILE.py:function, or tables with a weight and options. May be
    empty where an environment rewards."""
    grading: PanelConfig = PanelConfig()
    guard: GuardConfig = GuardConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval.every:
            raise ConfigError(
                f"eval.every={self.eval.every} measures a held-out loss, and what is learned here is generated; "
                "expected held-out answers; set eval.answers.every"
            )
        if self.rollout.refills and self.rollout.n == 1:
            raise ConfigError(
                f"rollout.refills={self.rollout.refills} with rollout.n=1: a single answer has none that its reward "
                "could differ from; expected rollout.n of 2 or more; raise it, or take rollout.refills out"
            )
        for name in self.UNWATCHED:
            if getattr(self.guard, name) != getattr(GuardConfig, name):
                raise ConfigError(
                    f"guard.{name}={getattr(self.guard, name):g} watches policy gradients, and "
                    f"{command_of(self.METHOD)} reads neither advantages nor the engine's log-probs; taut grpo and ppo "
                    "do; take it out"
                )
        if not self.rewards and self.is_judged and self.rollout.environment.name in (None, "tools"):
            raise ConfigError(
                f"rewards is not set, and {command_of(self.METHOD)} learns from what completions are worth; expected a "
                "reward, or an environment that gives one; set rewards=exact_match"
            )

    @property
    def is_judged(self) -> bool:
        """Whether rewards are what is learned from."""
        return True

    @property
    def has_rewards(self) -> bool:
        return self.is_judged and not self.rollout.environment.is_on

    def recipe(
        self, make_credit: Callable[[], Credit], critic: CriticConfig | None = None
    ) -> Recipe:
        """What a run that generates is made of."""
        return Recipe(
            make_credit=make_credit,
            rollout=self.rollout,
            rewards=self.rewards,
            panel=self.grading,
            guard=self.guard,
            critic=critic,
            is_judged=self.is_judged,
            ends_remedy=self.ends_remedy,
        )

    @property
    def ends_remedy(self) -> str:
        """What to do where the policy ends fewer of its answers, in keys that this method has."""
        return REWARD_ENDS


@configclass
class PolicyRun(OnlineRun):
    """What GRPO and PPO have in common."""

    UNWATCHED: ClassVar[Sequence[str]] = ()

    shaping: ShapingConfig = ShapingConfig()
    reference: ReferenceConfig = ReferenceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shaping.require_room(self.rollout.grows)
        config: PolicyConfig = getattr(self, self.METHOD)  # its section has the method's name
        _require_meant(self.reference, f"{self.METHOD}.kl_coef=0", is_read=config.kl_coef > 0)
        if self.rollout.engine == "local":
            config.require_no_auto()

    @property
    def ends_remedy(self) -> str:
        return f"{'raise' if self.shaping.missing_stop else 'set'} shaping.missing_stop"

    def policy(
        self, config: PolicyConfig, estimate: Estimator | Gae, critic: CriticConfig | None = None
    ) -> Objective:
        """The objective of policy gradients."""
        rollout = self.rollout
        is_fresh = rollout.updates == 1 and not rollout.ahead and not rollout.replay
        loss = config.make_loss(
            RollOut(
                temperature=rollout.temperature,
                limit=rollout.grows,
                is_fresh=is_fresh,
                has_engine_logp=True,
                is_apart=rollout.engine == "server",
            )
        )
        decisions = config.decisions(loss.correction)
        has_penalty = config.penalty_coef > 0
        ways = Ways(
            estimate=estimate,
            shaping=self.shaping,
            limit=rollout.grows,
            temperature=rollout.temperature,
            has_old=not is_fresh,
            penalty=KlPenalty(config.penalty_coef, config.kl_target) if has_penalty else None,
        )
        recipe = self.recipe(partial(PolicyCredit, loss, ways), critic)
        is_first = has_penalty or (config.kl_coef > 0 and not is_fresh)
        return Objective(
            loss,
            "prompt",
            reference=self.reference if config.kl_coef > 0 else None,
            online=recipe._replace(is_reference_asked_first=is_first, decisions=decisions),
        )


def _require_meant(reference: ReferenceConfig, without: str, *, is_read: bool) -> None:
    """Refuse a reference that nothing reads, or that cannot be. ``without``: what makes it unread."""
    if reference.file is not None:
        raise ConfigError(
            f"reference.file={reference.file} cannot hold log-probs of completions that are yet to be generated; "
            "expected a live reference; take reference.file out"
        )
    if not is_read and reference != ReferenceConfig():
        raise ConfigError(
            f"settings of reference with {without}, where nothing is compared with it; expected none; take them "
            "out, or correct the other"
        )


@configclass
class PpoRollout(RolloutConfig):
    """How completions are drawn, and how long they are trained on."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions of each prompt."""
    minibatches: Annotated[int, Field(ge=1)] = 4
    """Optimizer steps that one pass over a roll-out makes; it has so many times batch.samples_per_step prompts."""


@configclass
class PairsRollout(RolloutConfig):
    """How completions are drawn, and how long they are trained on."""

    n: Annotated[int, Field(ge=2)] = 2
    """Completions of each prompt; the best and the worst of them are a pair."""


@configclass
class GkdRollout(RolloutConfig):
    """How completions are drawn, and how long they are trained on."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions of each prompt."""


@configclass
class GkdConfig(DistillConfig):
    """On-policy distillation."""

    divergence: Literal["forward", "reverse", "js"] = "reverse"
    """reverse: KL(student || teacher), which keeps to what the teacher does most; forward: KL(teacher || student); js:
    both, to their mixture."""

    def __post_init__(self) -> None:
        for key in ("top_logprobs", "eval_top_logprobs", "tail"):
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"distill.{key}={getattr(self, key)}: a file knows nothing of completions that are yet to be "
                    "generated; expected a teacher alone; set distill.teacher=DIR, and leave it out"
                )
        if self.sft_weight:
            raise ConfigError(
                f"distill.sft_weight={self.sft_weight:g} weighs the data's own answers, and taut gkd learns on the "
                "student's, whose log-prob has a mean gradient of 0; expected none; leave it out"
            )
        super().__post_init__()


@configclass
class GrpoRun(PolicyRun):
    """A run of ``taut grpo``."""

    METHOD: ClassVar[Method] = "grpo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL, verl and OpenRLHF; tinker-cookbook with LoRA: 1e-5 to 4e-5"
    )

    method: Method = "grpo"
    grpo: GrpoConfig = GrpoConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout.n == 1 and self.grpo.advantage != "reinforce_pp":
            raise ConfigError(
                f"rollout.n=1 with grpo.advantage={self.grpo.advantage}: an answer is compared with the others to its "
                "prompt, and there are none; expected 2 or more; raise rollout.n, or set grpo.advantage=reinforce_pp"
            )
        penalties = ("missing_stop", "soft_overlong", "length_cost")
        lowering = [f"shaping.{name}" for name in penalties if getattr(self.shaping, name)]
        if self.grpo.advantage == "maxrl" and lowering:
            raise ConfigError(
                f"grpo.advantage=maxrl divides by a group's mean reward, and {lowering[0]} may take that below 0; "
                "expected rewards of at least 0; name another advantage, or take it out"
            )
        if self.guard.warn_values != GuardConfig.warn_values:
            raise ConfigError(
                f"guard.warn_values={self.guard.warn_values:g} watches a critic, and taut grpo has none; taut ppo "
                "has one; take it out"
            )
        if (self.grpo.pass_k or 0) > self.rollout.n:
            raise ConfigError(
                f"grpo.pass_k={self.grpo.pass_k} and rollout.n={self.rollout.n}: the best of more than there "
                "are; expected at most rollout.n; lower pass_k, or raise rollout.n"
            )

    @property
    def objective(self) -> Objective:
        return self.policy(self.grpo, self.grpo.estimator)

    @property
    def ends_remedy(self) -> str:
        # maxrl refuses what may take a reward below 0
        return REWARD_ENDS if self.grpo.advantage == "maxrl" else super().ends_remedy


@configclass
class PpoRun(PolicyRun):
    """A run of ``taut ppo``."""

    METHOD: ClassVar[Method] = "ppo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "verl and OpenRLHF; TRL: 3e-6"
    )

    method: Method = "ppo"
    rollout: PpoRollout = PpoRollout()
    ppo: PpoConfig = PpoConfig()
    critic: CriticConfig = CriticConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ppo.bootstrap_cut:
            return
        at_a_cut = [
            f"shaping.{name}={getattr(self.shaping, name):g}"
            for name in ("missing_stop", "soft_overlong")
            if getattr(self.shaping, name)
        ]
        named = [spec.name for spec in listed(self.rewards) if spec.weight]
        at_a_cut += [f"the reward {name}" for name in named if name in AT_A_CUT]
        if at_a_cut:
            raise ConfigError(
                f"ppo.bootstrap_cut=true replaces the reward of a cut answer by the critic's value, and {at_a_cut[0]} "
                "is meant for cut answers, where it would be lost; expected one of the two; take one out"
            )
        if self.shaping.overlong == "drop":
            raise ConfigError(
                "ppo.bootstrap_cut=true with shaping.overlong=drop, which leaves cut answers out of training: there is "
                "nothing to replace; expected one of the two; take one out"
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
    def objective(self) -> Objective:
        config = self.ppo
        gae = Gae(config.gamma, config.lam, config.whiten_advantages, config.bootstrap_cut)
        return self.policy(config, gae, self.critic)

    @property
    def ends_remedy(self) -> str:
        return "set ppo.bootstrap_cut=false" if self.ppo.bootstrap_cut else super().ends_remedy


@configclass
class OnlineDpoRun(OnlineRun):
    """A run of ``taut online-dpo``."""

    METHOD: ClassVar[Method] = "online_dpo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(5e-7, 5e-6, "TRL; open-instruct: 8e-7")

    method: Method = "online_dpo"
    rollout: PairsRollout = PairsRollout()
    dpo: DpoConfig = DpoConfig()
    reference: ReferenceConfig = ReferenceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        is_read = STREAM in self.dpo.make_loss().needs
        _require_meant(self.reference, "dpo.reference_free=true", is_read=is_read)

    @property
    def objective(self) -> Objective:
        loss = self.dpo.make_loss()
        needed = self.reference if STREAM in loss.needs else None
        online = self.recipe(partial(Pairs, loss))._replace(is_coupled=True)
        return Objective(loss, "prompt", reference=needed, online=online)


@configclass
class BestOfNRun(OnlineRun):
    """A run of ``taut best-of-n``."""

    METHOD: ClassVar[Method] = "best_of_n"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "as taut sft, whose loss it is"
    )

    method: Method = "best_of_n"
    best_of_n: BestOfNConfig = BestOfNConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of_n.keep > self.rollout.n:
            raise ConfigError(
                f"best_of_n.keep={self.best_of_n.keep} and rollout.n={self.rollout.n}; expected to keep at most as "
                "many as there are; raise rollout.n"
            )
        config = self.best_of_n
        if self.rollout.refills and config.at_least is None and config.overlong == "keep":
            raise ConfigError(
                f"rollout.refills={self.rollout.refills} replaces prompts without an answer that may be learned, and "
                "with best_of_n.overlong=keep and no best_of_n.at_least every answer may; set that, or take "
                "rollout.refills out"
            )

    @property
    def objective(self) -> Objective:
        config, loss = self.best_of_n, CrossEntropy()
        online = self.recipe(partial(Best, loss, config))
        return Objective(loss, "prompt", online=online)


@configclass
class GkdRun(OnlineRun):
    """A run of ``taut gkd``."""

    METHOD: ClassVar[Method] = "gkd"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-5, 1e-4, "tinker-cookbook with LoRA: 1e-4; TRL: 2e-5"
    )

    method: Method = "gkd"
    rollout: GkdRollout = GkdRollout()
    distill: GkdConfig = GkdConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill.teacher is None:
            raise ConfigError(
                "distill.teacher is not set; expected a model directory; set distill.teacher=DIR"
            )
        self.distill.require_teacher(self.model, has_eval=False)
        for key in ("refills", "replay"):
            if getattr(self.rollout, key):
                raise ConfigError(
                    f"rollout.{key}={getattr(self.rollout, key)} chooses completions by their rewards, and taut gkd "
                    f"learns from every one; expected 0; take rollout.{key} out"
                )
        if self.rewards:
            raise ConfigError(
                "rewards is set, and taut gkd learns from its teacher alone; expected none; take rewards out, or set "
                "eval.answers.rewards to judge held-out answers"
            )
        if self.grading != PanelConfig():
            raise ConfigError(
                "grading is set, and taut gkd has no rewards whose work it could share out; expected none; take "
                "grading out"
            )

    @property
    def is_judged(self) -> bool:
        return False

    @property
    def ends_remedy(self) -> str:
        return "take a distill.teacher that ends its answers, or lower optim.learning_rate"

    @property
    def objective(self) -> Objective:
        loss = self.distill.make_loss()
        return Objective(
            loss, "prompt", teacher=self.distill, online=self.recipe(partial(All, loss))
        )
