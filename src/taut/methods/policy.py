"""The common part of GRPO and PPO: policy gradients with a ratio, a KL divergence from the reference, an entropy bonus,
and a correction for differences between engine and trainer. Keys without an effect are refused.

The formulas and their papers are in losses/{policy,advantages}.py.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from taut.config import Decision, NotNegative, Positive, Share, configclass
from taut.conflicts import conflict
from taut.io.user_code import named_files
from taut.losses.settings import (
    Average,
    CorrectionKind,
    CorrectionLevel,
    KlGradient,
    KlValue,
)
from taut.methods.online import OnlineMethod
from taut.methods.settings import ReferenceConfig
from taut.rl.settings import OwnCode, ShapingConfig, is_own

if TYPE_CHECKING:
    from taut.losses.advantages import Estimator
    from taut.losses.loss import Loss
    from taut.losses.policy import Correction, Critic, PolicyGradient
    from taut.methods.aux_models import AuxModels
    from taut.rl.advantages import Gae, PolicyCredit

PolicyLoss: TypeAlias = Literal["clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce"]
"""The names of losses.policy.SURROGATES; a test holds them to it."""
HELD = ("clip", "gspo", "gspo_token", "cispo", "gmpo")
DUAL = ("clip", "gspo", "gspo_token")
"""The losses that keep a ratio within bounds, and those with a bound for negative advantages."""
CORRECTING = (
    "rollout_correction_level",
    "rollout_correction_cap",
    "rollout_correction_floor",
    "rollout_correction_veto",
)
OF_SURROGATES = (
    *("loss_aggregation", "constant_length", "clip_low", "clip_high", "dual_clip"),
    *("sapo_tau_positive", "sapo_tau_negative", "kl_estimator", "kl_gradient"),
    *("entropy_coef", "entropy_target", "entropy_step", "log_entropy"),
    *("rollout_correction", *CORRECTING, "old_logprobs"),
)
"""Keys that a custom loss does not use."""
GUARD = 0.1
"""Largest rollout_monitor.max_logprob_difference, in nats, that guards old_logprobs=engine."""


class _Defaults(NamedTuple):
    """The defaults of a loss, from its paper."""

    average: Average
    low: float = 0.2
    high: float = 0.28


_DEFAULTS: dict[str, _Defaults] = {
    "clip": _Defaults("token"),
    "gspo": _Defaults("sequence", 3e-4, 4e-4),
    "gspo_token": _Defaults("sequence", 3e-4, 4e-4),
    "cispo": _Defaults("token", 1.0, 4.0),
    "sapo": _Defaults("sequence"),
    "gmpo": _Defaults("sequence", 0.4, 0.4),
    "reinforce": _Defaults("token"),
}


@configclass
class PolicyConfig:
    """The keys that GRPO and PPO share."""

    section: ClassVar[str]

    loss: PolicyLoss | OwnCode = "clip"
    """Policy loss: clip (PPO, GRPO, DAPO), gspo or gspo_token (one ratio per sample), cispo, sapo, gmpo, or reinforce
    (no ratio). They differ only if a rollout is trained on more than once, or is stale. taut grpo also takes
    FILE.py:Class, a loss of your own."""
    loss_aggregation: Average | None = None
    """Averaging of the loss: token (DAPO: over tokens), sequence (GRPO: over answers), constant (Dr. GRPO: sums divided
    by a constant length). Defaults to the choice of the loss's paper: token for clip, cispo and reinforce, else
    sequence."""
    constant_length: Annotated[int, Field(gt=0)] | None = None
    """For loss_aggregation=constant: the length. Defaults to the limit of an answer: rollout.max_new_tokens, or with an
    environment rollout.environment.max_tokens."""
    clip_low: Positive | None = None
    """Lower clip range: ratios below 1 - clip_low are clipped. Defaults to 0.2; gspo 0.0003, cispo 1 (no bound), gmpo
    0.4 (of log-ratios)."""
    clip_high: Positive | None = None
    """Upper clip range: ratios above 1 + clip_high are clipped. Defaults to 0.28 (DAPO); gspo 0.0004, cispo 4
    (ScaleRL), gmpo 0.4. Equals TRL's epsilon_high; for cispo its epsilon_high - 1."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: upper bound of the ratio if the advantage is negative, above 1 + clip_high; 3 is common. No bound if
    not set."""
    sapo_tau_positive: Positive | None = None
    """For loss=sapo: temperature of the gate on ratios if the advantage is positive; 1 if not set."""
    sapo_tau_negative: Positive | None = None
    """For loss=sapo: temperature of the gate on ratios if the advantage is not positive; 1.05 if not set."""
    kl_coef: NotNegative = 0.0
    """KL coefficient. 0 disables the reference model. 0.001 to 0.05 are common."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL divergence. loss: a separate loss term per token. reward: a penalty in the reward. With PPO and
    advantage=reinforce_pp the penalty of a token includes the penalties of later tokens. With other advantages an
    answer gets the sum over its tokens, compared within the group; advantage=group does not divide it by the deviation
    of rewards."""
    kl_estimator: KlValue | None = None
    """For kl_in=loss: the KL estimator that is logged; k3 if not set. (With kl_in=reward k1 and k3 are logged.)"""
    kl_gradient: KlGradient | None = None
    """For kl_in=loss: the KL estimator whose gradient is used. Defaults to k2, which has the gradient of the
    divergence; k3 is GRPO's and TRL's, biased where policy and reference are far apart. (The gradient of k1 is 0 on
    average.)"""
    kl_target: Positive | None = None
    """For kl_in=reward: adapt kl_coef after each rollout to reach this KL per token, in nats (arXiv 1909.08593)."""
    entropy_coef: NotNegative = 0.0
    """Entropy bonus coefficient; with entropy_target its initial value."""
    entropy_target: Positive | None = None
    """Adapt the entropy coefficient after each rollout so that the entropy does not fall below this, in nats per token
    (arXiv 2505.22312). The bonus is on in rollouts at or below the target."""
    entropy_step: Positive = 0.005
    """For entropy_target: step by which the coefficient rises after a rollout below the target, and falls after
    others."""
    log_entropy: bool = False
    """Log the entropy, which costs one more pass over the logits; entropy_estimate is always logged."""
    rollout_correction: Literal["auto"] | CorrectionKind = "auto"
    """Importance weights that correct for differences between the inference engine and the trainer: truncated (TIS),
    masked (MIS) or none. auto: truncated with a server, else none."""
    rollout_correction_level: CorrectionLevel | None = None
    """Level of the importance weight: a token's ratio of trainer to engine (token), the product of an answer's ratios
    (sequence), or their geometric mean (geometric). The product vanishes as answers get longer; the geometric mean does
    not. Defaults to token with rollout_correction=truncated, and to geometric with rollout_correction=masked or
    loss=gmpo. With rollout_correction=auto this key and the next two are read only with a server."""
    rollout_correction_cap: Annotated[float, Field(ge=1)] | None = None
    """Upper bound of the weight; with rollout_correction=masked larger weights become 0. Defaults to 2, or 1.1 for
    geometric, which is 0.1 nats per token."""
    rollout_correction_floor: Share | None = None
    """Lower bound of the weight; with rollout_correction=masked smaller weights become 0. Defaults to 0, or 0.9 for
    geometric."""
    rollout_correction_veto: Share = 0.0
    """Bound of a token's ratio of trainer to engine: an answer with a token below it gets the weight 0. 1e-4 is common;
    0 turns it off."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Denominator of the ratio. trainer: the policy's logprobs at the start of the rollout, from a separate forward if
    a rollout is trained on more than once. engine: the logprobs with which the engine sampled, without that forward
    (bypass); this assumes that engine and trainer agree, and needs rollout_monitor.max_logprob_difference of at most
    0.1 nats, which stops the run before an update if they do not."""

    rules: ClassVar[str] = f"""
        {" ".join(OF_SURROGATES)} excludes loss=FILE.py:Class[has_own_loss]: a loss of your own has no part in it
        kl_coef needs kl_in=reward where loss=FILE.py:Class[has_own_loss]: a loss of your own has no term for it
        kl_in kl_target kl_estimator kl_gradient needs kl_coef>0
        kl_estimator kl_gradient needs kl_in=loss
        kl_target needs kl_in=reward
        clip_low clip_high needs loss={"|".join(HELD)}
        dual_clip needs loss={"|".join(DUAL)}
        clip_low>1 needs loss=gmpo: a ratio is not below 0; expected at most 1; lower `clip_low`
        sapo_tau_positive sapo_tau_negative needs loss=sapo
        constant_length needs loss_aggregation=constant
        entropy_step needs entropy_target
        {" ".join(CORRECTING)} excludes rollout_correction=none: no weight corrects anything
        old_logprobs=engine excludes rollout_correction=truncated|masked: its ratios are of policy to engine already;
            expected one of the two; leave one of them out
        rollout_correction_level=token excludes loss=gmpo: one token of weight 0 would make its product over an
            answer 0; expected geometric or sequence; set one, or leave `rollout_correction_level` out
    """

    @property
    def has_own_loss(self) -> bool:
        return is_own(self.loss)

    def __post_init__(self) -> None:
        if self.has_own_loss:
            return
        highest = 1 + (self.clip_high or _DEFAULTS[self.loss].high)
        if self.dual_clip is not None and self.dual_clip <= highest:
            why = f"ratios are clipped at {highest:g} already"
            remedy = "expected more, the largest ratio that counts against a bad answer; raise `dual_clip`"
            raise conflict(self, "dual_clip clip_high", why, remedy)

    def make_loss(
        self,
        *,
        temperature: float,
        limit: int,
        is_fresh: bool,
        has_engine_logp: bool = True,
        engine_differs: bool = False,
    ) -> PolicyGradient:
        """The loss. Raises ConfigError for a correction by an engine without log-probabilities.

        ``temperature``: of sampling. ``limit``: tokens of the longest answer. ``is_fresh``: each rollout is sampled
        from the current policy and trained on once; otherwise samples have ``old_logp_N``. ``engine_differs``: it is
        another program or has another precision than the trainer.
        """
        from taut.losses.policy import Bounds, Correction, Kl, PolicyGradient

        defaults = _DEFAULTS[self.loss]
        average = self.loss_aggregation or defaults.average
        kl = None
        if self.kl_in == "loss" and self.kl_coef > 0:
            kl = Kl(self.kl_coef, self.kl_gradient or "k2", self.kl_estimator or "k3")
        kind, correction = self.rollout_correction, Correction()
        if kind == "auto":
            is_corrected = engine_differs and has_engine_logp and self.old_logprobs == "trainer"
            kind = "truncated" if is_corrected else "none"
        if kind != "none":
            is_geometric = kind == "masked" or self.loss == "gmpo"
            level = self.rollout_correction_level or ("geometric" if is_geometric else "token")
            floor, cap = (0.9, 1.1) if level == "geometric" else (0.0, 2.0)
            if self.rollout_correction_cap is not None:
                cap = self.rollout_correction_cap
            if self.rollout_correction_floor is not None:
                floor = self.rollout_correction_floor
            correction = Correction(kind, level, cap, floor, self.rollout_correction_veto)
        is_bypassed = self.old_logprobs == "engine"
        return PolicyGradient(
            surrogate=self.loss,
            bounds=Bounds(
                self.clip_low or defaults.low,
                self.clip_high or defaults.high,
                self.dual_clip,
                self.sapo_tau_positive or 1.0,
                self.sapo_tau_negative or 1.05,
            ),
            average=average,
            constant_length=(self.constant_length or limit) if average == "constant" else None,
            is_fresh=is_fresh and not is_bypassed,
            has_engine_logp=has_engine_logp,
            is_bypassed=is_bypassed,
            correction=correction,
            kl=kl,
            entropy_coef=0.0 if self.entropy_target is not None else self.entropy_coef,
            adapts_entropy=self.entropy_target is not None,
            entropy=self.log_entropy,
            critic=self.critic_term,
            temperature=temperature,
        )

    @property
    def penalty_coef(self) -> float:
        """Initial KL coefficient of the reward; 0 if the KL divergence is not part of the reward."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    @property
    def critic_term(self) -> Critic | None:
        """The critic's term of the loss, if there is a critic."""
        return None

    def decisions(
        self, correction: Correction, why: str = "the engine is another program"
    ) -> list[Decision]:
        """Settings of the correction that were chosen automatically, with reasons. ``why``: reason of a correction."""
        decisions: list[Decision] = []
        if correction.kind == "none":
            return decisions
        if self.rollout_correction == "auto":
            decisions.append(Decision(f"{self.section}.rollout_correction", correction.kind, why))
        if self.rollout_correction_level is None:
            reason = "each token is weighted for itself"
            if correction.level == "geometric":
                reason = (
                    "the product over an answer fades with its length, the geometric mean does not"
                )
            decisions.append(
                Decision(f"{self.section}.rollout_correction_level", correction.level, reason)
            )
        return decisions


@configclass
class PolicyMethod(OnlineMethod):
    """A method that learns by policy gradients."""

    corrects_rollouts: ClassVar[bool] = True

    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    rules: ClassVar[str] = f"""
        reference.file unread: a file has no logprobs of completions that are yet to be generated
        reference needs <method>.kl_coef>0 <method>.loss=FILE.py:Class[has_own_loss]: nothing is compared with it
        rollout.dtype excludes <method>.rollout_correction=none: the engine's policy would count as the trainer's
        rollout.lag excludes <method>.rollout_correction=none: older weights would count as those that train
        {" ".join(f"<method>.{key}" for key in CORRECTING)} needs <method>.rollout_correction=truncated|masked
            where rollout.engine=local !rollout.dtype: auto is none with the engine in this process
        <method>.old_logprobs=engine excludes rollout.lag rollout.replay_groups rollout.replay_from rollout.dtype:
            the engine's logprobs are of another policy, and nothing can tell that from an engine that is wrong
        <method>.old_logprobs=engine excludes rollout_monitor.max_logprob_difference>{GUARD}: the engine's logprobs are
            taken for the trainer's; expected at most {GUARD}; set `rollout_monitor.max_logprob_difference`={GUARD}
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.rollout.grows
        if self.shaping.soft_overlong is not None and self.shaping.soft_overlong > limit:
            longest = (
                "environment.max_tokens" if self.rollout.environment.is_on else "max_new_tokens"
            )
            why = "the penalty grows in the last part of a completion, which is shorter"
            remedy = f"expected at most {limit}; lower `shaping.soft_overlong`"
            raise conflict(self, f"shaping.soft_overlong rollout.{longest}", why, remedy)

    @property
    def policy(self) -> PolicyConfig:
        """The method's own section, which has its name."""
        section: PolicyConfig = getattr(self, self.method)
        return section

    def estimate(self) -> Estimator | Gae:
        """The estimator of advantages."""
        raise NotImplementedError

    @property
    def charges_turns(self) -> bool:
        """Whether turns are assigned the rewards of an environment's steps, which then have to exist."""
        return False

    @property
    def _engine_differs(self) -> bool:
        """Whether the engine computes otherwise than the trainer."""
        return self.rollout.engine == "server" or self.rollout.dtype is not None

    @property
    def _is_fresh(self) -> bool:
        """Whether a rollout is sampled from the current policy and trained on once."""
        return self.rollout.updates == 1 and not self.rollout.lag and not self.rollout.replay_groups

    def loss(self) -> Loss:
        if is_own(self.policy.loss):
            return self._own_loss()
        return self.policy.make_loss(
            temperature=self.rollout.temperature,
            limit=self.rollout.grows,
            is_fresh=self._is_fresh,
            engine_differs=self._engine_differs,
        )

    def _own_loss(self) -> Loss:
        """The custom loss. Raises ConfigError if it cannot be trained with these settings."""
        from taut.rl.custom_loss import load_loss, read_own

        rollout, key = self.rollout, f"{self.policy.section}.loss"
        loss = load_loss(read_own(self.policy.loss, key, "Class"), rollout.temperature)
        section = self.policy.section
        apart = "dtype" if rollout.dtype else "lag" if rollout.lag else None
        if apart is not None and "engine_logp_N" not in loss.needs:
            why = "rollouts are of another policy than trains, and the loss does not read the engine's logprobs"
            remedy = (
                f"expected engine_logp_N among its needs; read it, or leave `rollout.{apart}` out"
            )
            raise conflict(self, f"{section}.loss rollout.{apart}", why, remedy)
        if self.policy.kl_coef and "ref_logp_N" in loss.needs:
            why = "the loss reads the reference itself, and it is a part of the reward too"
            remedy = f"expected one of the two; set `{section}.kl_coef`=0"
            raise conflict(self, f"{section}.loss {section}.kl_in {section}.kl_coef", why, remedy)
        return loss

    @property
    def _correction(self) -> Correction:
        from taut.losses.policy import Correction, PolicyGradient

        loss = self.loss()
        return loss.correction if isinstance(loss, PolicyGradient) else Correction()

    @property
    def _has_reference(self) -> bool:
        is_in_loss = is_own(self.policy.loss) and "ref_logp_N" in self.loss().needs
        return self.policy.kl_coef > 0 or is_in_loss

    def loss_decisions(self) -> list[Decision]:
        from taut.rl.custom_loss import reports_engine

        correction, dtype = self._correction, self.rollout.dtype
        if is_own(self.policy.loss) and not reports_engine(self.loss()):
            reason = f"{self.policy.section}.loss gives no metric engine/difference"
            return [Decision("rollout_monitor.max_logprob_difference", "not compared", reason)]
        if dtype is None:
            return self.policy.decisions(correction)
        return self.policy.decisions(correction, f"rollouts are of {dtype}")

    def models(self) -> AuxModels:
        from taut.methods.aux_models import AuxModels

        return AuxModels(self.reference if self._has_reference else None)

    def user_code(self) -> list[Path]:
        return [*super().user_code(), *self._own_files]

    def input_files(self) -> list[str]:
        return [*super().input_files(), *map(str, self._own_files)]

    @property
    def _own_files(self) -> list[Path]:
        """Files with a custom advantage or loss."""
        named = [self.policy.loss, getattr(self.policy, "advantage", "")]
        return named_files(named)

    def make_credit(self) -> PolicyCredit:
        from taut.rewards.registry import listed
        from taut.rl.advantages import EntropyTarget, KlPenalty, PolicyCredit

        policy, penalty, entropy = self.policy, None, None
        if policy.entropy_target is not None:
            entropy = EntropyTarget(policy.entropy_target, policy.entropy_step, policy.entropy_coef)
        if policy.penalty_coef > 0:
            penalty = KlPenalty(policy.penalty_coef, policy.kl_target)
        loss = self.loss()
        reads_old = is_own(policy.loss) and "old_logp_N" in loss.needs
        return PolicyCredit(
            loss,
            self.estimate(),
            self.shaping,
            limit=self.rollout.grows,
            temperature=self.rollout.temperature,
            has_old=reads_old or (not is_own(policy.loss) and not self._is_fresh),
            is_bypassed=policy.old_logprobs == "engine",
            penalty=penalty,
            entropy=entropy,
            reward_weights={spec.metric: spec.weight for spec in listed(self.rewards)},
            needs_turn_rewards=self.charges_turns,
            distill_coef=self.distill_coef,
        )

    @property
    def distill_coef(self) -> float:
        """Coefficient of the teachers' term in the advantages; 0 if there are no teachers."""
        return 0.0

    @property
    def scores_reference_first(self) -> bool:
        is_stale = self._has_reference and not self._is_fresh
        return self.policy.penalty_coef > 0 or is_stale

    @property
    def ends_remedy(self) -> str:
        return (
            f"{'raise' if self.shaping.missing_eos_penalty else 'set'} shaping.missing_eos_penalty"
        )

    def resolved(self) -> dict[str, Any]:
        """The settings with the bounds of the correction, whose defaults depend on other keys."""
        settings, correction = super().resolved(), self._correction
        section = settings[self.policy.section]
        if is_own(self.policy.loss):
            return settings
        section |= {
            "rollout_correction_cap": correction.cap,
            "rollout_correction_floor": correction.floor,
        }
        return settings
