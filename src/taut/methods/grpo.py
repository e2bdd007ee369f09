"""Group relative policy optimisation (GRPO, arXiv 2402.03300) and its variants: the answers to a prompt are compared
with each other, without a critic. The formulas are in losses/{advantages,policy}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import Positive, Share, configclass
from taut.errors import ConfigError
from taut.losses.advantages import ESTIMATORS, Estimator, by_turn, pass_at_k
from taut.methods.aux_models import AuxModels
from taut.methods.inputs import Inputs, Models
from taut.methods.method import MethodName
from taut.methods.online import REWARD_ENDS
from taut.methods.policy import Key, PolicyConfig, PolicyMethod
from taut.methods.rollout_teachers import RolloutTeachersConfig, open_teachers
from taut.rewards.registry import charges_steps
from taut.rl.monitors import RolloutMonitorConfig
from taut.rl.own_code import OwnCode, is_own, load_advantage, read_own
from taut.rl.teachers import Teachers
from taut.train.optim import DefaultRates

Advantage: TypeAlias = Literal[
    "group",
    "mean",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "maxrl",
    "pass_at_k",
    "gdpo",
    "tree",
]
"""The names of losses.advantages.ESTIMATORS; a test holds them to it."""
NOT_BY_TURN = ("pass_at_k", "gdpo", "tree")
"""Estimators that do not compare rewards of turns: the best of k is of whole answers, the others charge otherwise."""


@configclass
class GrpoConfig(PolicyConfig):
    """GRPO and its variants: the answers to a prompt are compared with each other, without a critic."""

    section: ClassVar[str] = "grpo"

    advantage: Advantage | OwnCode = "group"
    """Advantage estimator: group (GRPO), mean (Dr. GRPO), rloo, reinforce_pp, reinforce_pp_baseline, maxrl, pass_at_k,
    gdpo (each of several rewards is normalised by itself), or tree (answers that begin alike are charged by the
    segments in which they differ). Or FILE.py:function, of your own."""
    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """What a reward is charged to. trajectory: all tokens of an answer have the advantage of its whole reward. turn: a
    reward of an environment's step, or of a step of the answer (a reward with steps.charge), is charged to the turn or
    step that earned it and those before it, compared with the same one of the group's other answers; what judges the
    whole path is charged to all tokens."""
    turn_discount: Share = 1.0
    """For advantage_level=turn: discount factor of a reward per turn that lies between it and a turn before. 0: each
    turn has its own reward alone."""
    pass_k: Annotated[int, Field(ge=1)] | None = None
    """For advantage=pass_at_k: the k whose pass@k is maximised, at most the size of a group; 4 if not set."""

    @property
    def estimator(self) -> Estimator:
        """The estimator of advantages."""
        if is_own(self.advantage):
            return load_advantage(read_own(self.advantage, "grpo.advantage", "function"))
        estimator = ESTIMATORS[self.advantage]
        if self.advantage_level == "turn":
            return replace(estimator, assess=partial(by_turn, discount=self.turn_discount))
        if self.pass_k is not None:
            return replace(estimator, compare=partial(pass_at_k, k=self.pass_k))
        return estimator

    def _keys(self) -> Iterator[Key]:
        yield from PolicyConfig._keys(self)
        yield Key("pass_k", self.advantage == "pass_at_k", "advantage=pass_at_k")
        compared = [name for name in ESTIMATORS if name not in NOT_BY_TURN]
        wanted = f"advantage={' or '.join(compared)}"
        yield Key("advantage_level", self.advantage in compared, wanted)
        yield Key("turn_discount", self.advantage_level == "turn", "advantage_level=turn")


@configclass
class GrpoDistillConfig(RolloutTeachersConfig):
    """Teachers whose judgement of each token is added to the advantages (on-policy distillation)."""

    coef: Positive = 1.0
    """Coefficient of the teacher's logprob minus the policy's, which is added to a token's advantage."""


@configclass
class Grpo(PolicyMethod):
    """A run of ``taut grpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL, verl and OpenRLHF; tinker-cookbook with LoRA: 1e-5 to 4e-5"
    )

    method: MethodName = "grpo"
    grpo: GrpoConfig = GrpoConfig()
    distill: GrpoDistillConfig = GrpoDistillConfig()

    @property
    def allows_noise(self) -> bool:
        """Where an answer is trained on once, by the policy that gave it: its ratio is 1, whatever the noise."""
        return self._is_fresh

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_usable_teachers()
        compares = self.grpo.advantage != "reinforce_pp" and not is_own(self.grpo.advantage)
        if self.rollout.n == 1 and self.is_judged and compares:
            raise ConfigError(
                f"rollout.n=1 with grpo.advantage={self.grpo.advantage}: an answer is compared with the others to its "
                "prompt, and there are none; expected 2 or more; raise rollout.n, or set grpo.advantage=reinforce_pp"
            )
        penalties = ("missing_eos_penalty", "soft_overlong", "length_penalty")
        lowering = [f"shaping.{name}" for name in penalties if getattr(self.shaping, name)]
        if self.grpo.advantage == "maxrl" and lowering:
            raise ConfigError(
                f"grpo.advantage=maxrl divides by a group's mean reward, and {lowering[0]} may take that below 0; "
                "expected rewards of at least 0; name another advantage, or take it out"
            )
        if self.grpo.advantage == "gdpo":
            self._require_rewards_apart()
        has_steps = self.is_replayed or charges_steps(self.rewards)
        if self.grpo.advantage_level == "turn" and not has_steps:
            names = self.rollout.environment.names
            if not {*names} - {"tools"}:
                has = "tools gives no rewards" if names else "rollout.environment.name is not set"
                raise ConfigError(
                    f"grpo.advantage_level=turn charges the rewards of an environment's steps, and {has}; expected an "
                    "environment of your own whose steps have rewards, or a process reward model with "
                    "steps.charge=true; name it, or take grpo.advantage_level out"
                )
        if self.rollout_monitor.warn_values != RolloutMonitorConfig.warn_values:
            raise ConfigError(
                f"rollout_monitor.warn_values={self.rollout_monitor.warn_values:g} watches a critic, and taut "
                "grpo has none; taut ppo has one; take it out"
            )
        if (self.grpo.pass_k or 0) > self.rollout.n:
            raise ConfigError(
                f"grpo.pass_k={self.grpo.pass_k} and rollout.n={self.rollout.n}: the best of more than there "
                "are; expected at most rollout.n; lower pass_k, or raise rollout.n"
            )

    def _require_rewards_apart(self) -> None:
        """Raise ConfigError for settings that are of the sum of rewards, which gdpo does not read."""
        shaped = [
            f"shaping.{field.name}"
            for field in fields(self.shaping)
            if field.name != "overlong" and getattr(self.shaping, field.name) != field.default
        ]
        if shaped:
            raise ConfigError(
                f"grpo.advantage=gdpo normalises each reward by itself, and {shaped[0]} shapes their sum; expected "
                "rewards alone; use a reward such as stop or length_overlong, or take it out"
            )
        if self.is_replayed and not self.rewards:
            raise ConfigError(
                "grpo.advantage=gdpo with rollout.replay_from and without rewards: their weights are not recorded; "
                "expected the rewards of the recorded run; name them"
            )

    def _require_usable_teachers(self) -> None:
        """Raise ConfigError where the settings of teachers contradict others."""
        distill, default = self.distill, GrpoDistillConfig()
        if not distill.is_on and distill.coef != default.coef:
            raise ConfigError(
                f"distill.coef={distill.coef:g} is set without a teacher, and nothing reads it; expected both; set "
                "distill.teacher=DIR or distill.url=URL, or take it out"
            )
        self.require_rollouts_for(distill)
        served = [section for _, section, source in distill.sources if source.url is not None]
        if served and self.rollout.temperature != 1:
            raise ConfigError(
                f"{served[0]}url with rollout.temperature={self.rollout.temperature:g}: a server's logprobs are those "
                "of temperature 1, and the policy's those of the rollout; expected one temperature; set "
                f"rollout.temperature=1, or {served[0]}teacher=DIR"
            )
        for key in () if self.is_judged else ("dynamic_sampling_rounds", "replay_groups"):
            if getattr(self.rollout, key):
                raise ConfigError(
                    f"rollout.{key}={getattr(self.rollout, key)} chooses completions by their rewards, and there are "
                    f"none; expected 0; take rollout.{key} out, or set rewards"
                )

    @property
    def is_judged(self) -> bool:
        """Without rewards teachers alone judge."""
        has_own = self.rollout.environment.name not in (None, "tools") or self.is_replayed
        return bool(self.rewards) or has_own or not self.distill.is_on

    @property
    def distill_coef(self) -> float:
        return self.distill.coef if self.distill.is_on else 0.0

    def models(self) -> AuxModels:
        return replace(super().models(), completions=self.distill if self.distill.is_on else None)

    def teachers_opener(self, inputs: Inputs, models: Models) -> Callable[[], Teachers] | None:
        if not self.distill.is_on:
            return None
        temperature = self.rollout.temperature
        return partial(open_teachers, self.distill, inputs, models, top=0, temperature=temperature)

    def estimate(self) -> Estimator:
        return self.grpo.estimator

    @property
    def compares_trees(self) -> bool:
        return self.grpo.advantage == "tree" or is_own(self.grpo.advantage)

    @property
    def charges_turns(self) -> bool:
        return self.grpo.advantage_level == "turn"

    @property
    def reads_turn_rewards(self) -> bool:
        return self.charges_turns

    @property
    def ends_remedy(self) -> str:
        # maxrl refuses what may take a reward below 0
        return REWARD_ENDS if self.grpo.advantage == "maxrl" else super().ends_remedy
