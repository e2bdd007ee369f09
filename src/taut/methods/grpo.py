"""Group relative policy optimization (GRPO, arXiv 2402.03300) and its variants: the answers to a prompt are compared
with each other, without a critic. The formulas are in losses/{advantages,policy}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from taut.config import Positive, Share, configclass
from taut.conflicts import conflict
from taut.methods.method import MethodName
from taut.methods.online import REWARD_ENDS
from taut.methods.policy import PolicyConfig, PolicyMethod
from taut.methods.settings import RolloutTeachersConfig
from taut.rl.settings import OwnCode, is_own
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.advantages import Estimator
    from taut.methods.aux_models import AuxModels
    from taut.methods.inputs import Inputs, Models
    from taut.rl.teachers import Teachers

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
"""Estimators that do not compare the rewards of turns: the best of k is defined for whole answers, and the others
assign rewards differently."""


@configclass
class GrpoConfig(PolicyConfig):
    """GRPO and its variants: the answers to a prompt are compared with each other, without a critic."""

    section: ClassVar[str] = "grpo"

    advantage: Advantage | OwnCode = "group"
    """Advantage estimator: group (GRPO), mean (Dr. GRPO), rloo, reinforce_pp, reinforce_pp_baseline, maxrl, pass_at_k,
    gdpo (normalizes each of several rewards by itself), or tree (answers that begin alike are compared by the segments
    in which they differ). FILE.py:function uses your own."""
    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """Tokens that a reward is assigned to. trajectory: every token of an answer gets the advantage of its whole reward.
    turn: a reward of an environment's step, or of a step of the answer (a reward with steps.charge), is assigned to the
    turn or step that earned it and the ones before it, and compared with the same turn or step of the group's other
    answers; a reward of the whole path is assigned to every token."""
    turn_discount: Share = 1.0
    """For advantage_level=turn: discount factor per turn between a reward and an earlier turn. 0 gives each turn its
    own reward alone."""
    pass_k: Annotated[int, Field(ge=1)] | None = None
    """For advantage=pass_at_k: the k whose pass@k is maximized, at most the size of a group; 4 if not set."""

    rules: ClassVar[str] = f"""
        pass_k needs advantage=pass_at_k
        advantage_level needs advantage={"|".join(name for name in get_args(Advantage) if name not in NOT_BY_TURN)}
        turn_discount needs advantage_level=turn
    """

    @property
    def estimator(self) -> Estimator:
        """The estimator of advantages."""
        from taut.losses.advantages import ESTIMATORS, by_turn, pass_at_k
        from taut.rl.custom_loss import load_advantage, read_own

        if is_own(self.advantage):
            return load_advantage(read_own(self.advantage, "grpo.advantage", "function"))
        estimator = ESTIMATORS[self.advantage]
        if self.advantage_level == "turn":
            return replace(estimator, assess=partial(by_turn, discount=self.turn_discount))
        if self.pass_k is not None:
            return replace(estimator, compare=partial(pass_at_k, k=self.pass_k))
        return estimator

    @property
    def compares_answers(self) -> bool:
        """Whether an answer is compared with the others to its prompt."""
        return self.advantage != "reinforce_pp" and not is_own(self.advantage)


@configclass
class GrpoDistillConfig(RolloutTeachersConfig):
    """Teachers whose judgment of each token is added to the advantages (on-policy distillation)."""

    coef: Positive = 1.0
    """Coefficient of the teacher's logprob minus the policy's, which is added to the advantage of a token."""


@configclass
class Grpo(PolicyMethod):
    """A run of ``taut grpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL, verl and OpenRLHF; tinker-cookbook with LoRA: 1e-5 to 4e-5"
    )

    method: MethodName = "grpo"
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    distill: GrpoDistillConfig = field(default_factory=GrpoDistillConfig)

    @property
    def allows_noise(self) -> bool:
        """Whether noise is allowed: only if each answer is trained on once, by the policy that gave it, because its
        ratio is then 1.
        """
        return self._is_fresh

    rules: ClassVar[str] = """
        distill.coef needs distill.teacher=DIR[is_on]: there is no teacher
        distill.privileged excludes rollout.environment.name[is_on]: an environment may begin a conversation by itself,
            and the prompt is what the teacher sees otherwise
        distill.url[is_served] excludes rollout.temperature!=1: a server's logprobs are of temperature 1
        rollout.dynamic_sampling_rounds rollout.replay_groups needs rewards[is_judged]: groups are chosen by rewards
        rollout.n=1 excludes grpo.advantage[compares_answers] where method[is_judged]: an answer is compared with the
            others to its prompt; expected 2 or more; raise `rollout.n`, or set `grpo.advantage`=reinforce_pp
        shaping.missing_eos_penalty shaping.soft_overlong shaping.length_penalty excludes grpo.advantage=maxrl:
            it divides by a group's mean reward, which a penalty may take below 0
        shaping.missing_eos_penalty shaping.soft_overlong shaping.length_penalty shaping.clip shaping.scale excludes
            grpo.advantage=gdpo: it normalizes each reward by itself, and this shapes their sum; expected rewards such
            as stop or length_overlong; use one, or set another `grpo.advantage`
        required rewards where grpo.advantage=gdpo rollout.replay_from: a recorded run has no weights of its rewards;
            expected the rewards of that run; set `rewards`
        grpo.advantage_level=turn needs rollout.environment.name=FILE.py:Class[asks] rewards[charges_steps]
            rollout.replay_from: it charges rewards of steps; expected an environment whose steps have rewards, or a
            reward with steps.charge=true; name it, or leave `grpo.advantage_level` out
        rollout_monitor.warn_values needs method=ppo: there is no critic to watch
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.grpo.pass_k or 0) > self.rollout.n:
            why = "the best of more answers than there are"
            remedy = "expected at most `rollout.n`; lower `grpo.pass_k`, or raise `rollout.n`"
            raise conflict(self, "grpo.pass_k rollout.n", why, remedy)

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
        from taut.methods.rollout_teachers import open_teachers

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
