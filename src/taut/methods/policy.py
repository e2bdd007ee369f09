"""The common part of GRPO and PPO: policy gradients with a ratio, a KL divergence from the reference, an entropy bonus,
and a correction for differences between engine and trainer. Keys without an effect are refused.

The formulas and their papers are in losses/{policy,advantages}.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from taut.config import Decision, NotNegative, Positive, Share, changed, configclass, home_path
from taut.errors import ConfigError
from taut.losses import Loss
from taut.losses.advantages import Estimator
from taut.losses.policy import (
    SURROGATES,
    Average,
    Bounds,
    Correction,
    CorrectionKind,
    CorrectionLevel,
    Critic,
    Kl,
    KlGradient,
    KlValue,
    PolicyGradient,
)
from taut.methods.aux_models import AuxModels
from taut.methods.online import OnlineMethod, require_live_reference
from taut.methods.preference import require_valid_loss
from taut.methods.reference import ReferenceConfig
from taut.rewards.registry import listed
from taut.rl.advantages import EntropyTarget, Gae, KlPenalty, PolicyCredit, ShapingConfig
from taut.rl.own_code import OwnCode, is_own, load_loss, read_own, reports_engine

PolicyLoss: TypeAlias = Literal["clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce"]
"""The names of losses.policy.SURROGATES; a test holds them to it."""


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
"""Keys that a loss of the user's own has no part in."""
GUARD = 0.1
"""Nats: the largest rollout_monitor.max_logprob_difference that guards old_logprobs=engine."""


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


class Key(NamedTuple):
    """A key that has an effect only together with others."""

    name: str
    is_read: bool
    wanted: str
    """The setting with which it has an effect."""


@configclass
class PolicyConfig:
    """The keys that GRPO and PPO share."""

    section: ClassVar[str]

    loss: PolicyLoss | OwnCode = "clip"
    """clip (PPO, GRPO, DAPO), gspo or gspo_token (one ratio per sample), cispo, sapo, gmpo, or reinforce (no ratio).
    They differ only if a rollout is trained on more than once, or is stale. With taut grpo also FILE.py:Class, a loss
    of your own."""
    loss_aggregation: Average | None = None
    """How the loss is averaged: token (DAPO: over tokens), sequence (GRPO: over answers), constant (Dr. GRPO: sums
    divided by a constant length). None: as in the loss's paper, token for clip, cispo and reinforce, else sequence."""
    constant_length: Annotated[int, Field(gt=0)] | None = None
    """For loss_aggregation=constant: the length. None: the limit of an answer, rollout.max_new_tokens, or with an
    environment
    rollout.environment.max_tokens."""
    clip_low: Positive | None = None
    """Lower clip range: ratios below 1 - clip_low are clipped. None: 0.2, gspo 0.0003, cispo 1 (no bound), gmpo 0.4 (of
    log-ratios)."""
    clip_high: Positive | None = None
    """Upper clip range: ratios above 1 + clip_high are clipped. None: 0.28 (DAPO), gspo 0.0004, cispo 4 (ScaleRL), gmpo
    0.4. TRL's epsilon_high; for cispo its epsilon_high - 1."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: upper bound of the ratio where the advantage is negative, above 1 + clip_high; 3 is common. None: no
    bound."""
    sapo_tau_positive: Positive | None = None
    """For loss=sapo: temperature of the gate on ratios where the advantage is positive; 1 if not set."""
    sapo_tau_negative: Positive | None = None
    """The same for the other advantages; 1.05 if not set."""
    kl_coef: NotNegative = 0.0
    """KL coefficient. 0 disables the reference model. 0.001 to 0.05 are common."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence enters. loss: as a separate loss term per token. reward: as a penalty in the reward. With
    PPO and advantage=reinforce_pp the penalty of a token includes those of later tokens. With other advantages an
    answer gets the sum over its tokens, compared within the group; advantage=group does not divide it by the deviation
    of rewards."""
    kl_estimator: KlValue | None = None
    """For kl_in=loss: the KL estimator that is logged; k3 if not set. (With kl_in=reward k1 and k3 are logged.)"""
    kl_gradient: KlGradient | None = None
    """For kl_in=loss: the KL estimator whose gradient is used. If not set k2, which has the gradient of the divergence;
    k3 is GRPO's and TRL's, biased where policy and reference are far apart. (The gradient of k1 is 0 on average.)"""
    kl_target: Positive | None = None
    """For kl_in=reward: adapt kl_coef after each rollout to reach this KL per token, in nats (arXiv 1909.08593)."""
    entropy_coef: NotNegative = 0.0
    """Entropy bonus coefficient; with entropy_target the one at first."""
    entropy_target: Positive | None = None
    """Adapt the entropy coefficient after each rollout so that the entropy does not fall below this, in nats per token
    (arXiv 2505.22312). The bonus is on in rollouts at or below the target."""
    entropy_step: Positive = 0.005
    """For entropy_target: how much the coefficient rises after a rollout below the target, and falls after others."""
    log_entropy: bool = False
    """Log the entropy, which costs one more pass over the logits; entropy_estimate is always logged."""
    rollout_correction: Literal["auto"] | CorrectionKind = "auto"
    """Importance weights that correct for differences between the inference engine and the trainer: truncated (TIS),
    masked (MIS) or none. auto: truncated with a server, else none."""
    rollout_correction_level: CorrectionLevel | None = None
    """The importance weight: a token's ratio of trainer to engine (token), the product of an answer's ratios
    (sequence), or their geometric mean (geometric). The product vanishes with the answer's length; the geometric mean
    does not. None: token with rollout_correction=truncated, geometric with rollout_correction=masked or loss=gmpo. With
    rollout_correction=auto this key and the next two are read only with a server."""
    rollout_correction_cap: Annotated[float, Field(ge=1)] | None = None
    """Upper bound of the weight; with rollout_correction=masked larger weights become 0. None: 2, or 1.1 for geometric,
    which
    is 0.1 nats per token."""
    rollout_correction_floor: Share | None = None
    """Lower bound of the weight; with rollout_correction=masked smaller weights become 0. None: 0, or 0.9 for
    geometric."""
    rollout_correction_veto: Share = 0.0
    """Answers with a token whose ratio of trainer to engine is below this get the weight 0; 1e-4 is common. 0: none."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The denominator of the ratio. trainer: the policy's logprobs at the start of the rollout, by a separate forward
    where a rollout is trained on more than once. engine: those that the engine sampled by, without that forward
    (bypass); it takes for granted that the two agree, and needs rollout_monitor.max_logprob_difference of at most 0.1
    nats, which stops the run before an update where they do not."""

    def __post_init__(self) -> None:
        for key in self._keys():
            if not key.is_read and changed(self, [key.name]):
                raise ConfigError(
                    f"found {self.section}.{key.name}={_shown(getattr(self, key.name))}, which nothing reads; expected "
                    f"{key.wanted}; set that, or leave {key.name} out"
                )
        if is_own(self.loss):
            return
        for is_fresh in (True, False):
            make = partial(
                self.make_loss, temperature=1.0, limit=1, is_fresh=is_fresh, is_apart=True
            )
            require_valid_loss(self.section, make)

    def make_loss(
        self,
        *,
        temperature: float,
        limit: int,
        is_fresh: bool,
        has_engine_logp: bool = True,
        is_apart: bool = False,
    ) -> PolicyGradient:
        """The loss. Raises ConfigError for settings without a meaning.

        ``temperature``: of sampling. ``limit``: tokens of the longest answer. ``is_fresh``: each rollout is sampled
        from the current policy and trained on once; otherwise samples have ``old_logp_N``. ``is_apart``: the engine is
        another program or has another precision than the trainer.
        """
        defaults = _DEFAULTS[self.loss]
        average = self.loss_aggregation or defaults.average
        kl = None
        if self.kl_in == "loss" and self.kl_coef > 0:
            kl = Kl(self.kl_coef, self.kl_gradient or "k2", self.kl_estimator or "k3")
        kind, correction = self.rollout_correction, Correction()
        if kind == "auto":
            is_corrected = is_apart and has_engine_logp and self.old_logprobs == "trainer"
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
        """The initial KL coefficient of the reward; 0 where the KL divergence is not part of the reward."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    @property
    def critic_term(self) -> Critic | None:
        """The critic's term of the loss, if there is a critic."""
        return None

    def decisions(
        self, how: Correction, why: str = "the engine is another program"
    ) -> list[Decision]:
        """The settings of the correction that were chosen automatically, with reasons. ``why``: of a correction."""
        decisions: list[Decision] = []
        if how.kind == "none":
            return decisions
        if self.rollout_correction == "auto":
            decisions.append(Decision(f"{self.section}.rollout_correction", how.kind, why))
        if self.rollout_correction_level is None:
            reason = "each token is weighted for itself"
            if how.level == "geometric":
                reason = (
                    "the product over an answer fades with its length, the geometric mean does not"
                )
            decisions.append(
                Decision(f"{self.section}.rollout_correction_level", how.level, reason)
            )
        return decisions

    def require_no_auto(self) -> None:
        """Raise ConfigError for settings of a correction that ``auto`` leaves out: the engine is in this process."""
        for name in changed(self, CORRECTING) if self.rollout_correction == "auto" else ():
            raise ConfigError(
                f"found {self.section}.{name}={_shown(getattr(self, name))}, which nothing reads: with the engine "
                f"in this process {self.section}.rollout_correction=auto is none; expected truncated or "
                f"masked; set that, or leave {name} out"
            )

    def _keys(self) -> Iterator[Key]:
        """Keys that only have an effect together with others."""
        if is_own(self.loss):
            for name in OF_SURROGATES:
                yield Key(name, False, "a loss of taut's")
            yield Key("kl_coef", self.kl_in == "reward", "kl_in=reward, or a loss of taut's")
            yield Key("kl_in", self.kl_coef > 0, "kl_coef above 0")
            yield Key("kl_target", self.kl_coef > 0, "kl_coef above 0")
            return
        surrogate, has_kl = SURROGATES[self.loss], self.kl_coef > 0
        clipped = " or ".join(name for name in SURROGATES if SURROGATES[name].is_held)
        dual = " or ".join(name for name in SURROGATES if SURROGATES[name].is_dual)
        yield Key("clip_low", surrogate.is_held, f"loss={clipped}")
        yield Key("clip_high", surrogate.is_held, f"loss={clipped}")
        yield Key("dual_clip", surrogate.is_dual, f"loss={dual}")
        yield Key("sapo_tau_positive", self.loss == "sapo", "loss=sapo")
        yield Key("sapo_tau_negative", self.loss == "sapo", "loss=sapo")
        is_constant = self.loss_aggregation == "constant"
        yield Key("constant_length", is_constant, "loss_aggregation=constant")
        yield Key("kl_in", has_kl, "kl_coef above 0")
        in_loss = has_kl and self.kl_in == "loss"
        yield Key("kl_estimator", in_loss, "kl_coef above 0 and kl_in=loss")
        yield Key("kl_gradient", in_loss, "kl_coef above 0 and kl_in=loss")
        yield Key("kl_target", has_kl and not in_loss, "kl_coef above 0 and kl_in=reward")
        yield Key("entropy_step", self.entropy_target is not None, "entropy_target")
        for name in CORRECTING:
            yield Key(
                name, self.rollout_correction != "none", "rollout_correction=truncated or masked"
            )


@configclass
class PolicyMethod(OnlineMethod):
    """A method that learns by policy gradients."""

    unread_monitor_keys: ClassVar[Sequence[str]] = ()
    corrects_rollouts: ClassVar[bool] = True

    shaping: ShapingConfig = ShapingConfig()
    reference: ReferenceConfig = ReferenceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shaping.require_room(self.rollout.grows)
        policy = self.policy
        without = f"{policy.section}.kl_coef=0"
        may_read = policy.kl_coef > 0 or is_own(policy.loss)
        require_live_reference(self.reference, without, is_read=may_read)
        if self.rollout.dtype is not None and policy.rollout_correction == "none":
            raise ConfigError(
                f"rollout.dtype={self.rollout.dtype} with {policy.section}.rollout_correction=none: rollouts would be "
                "trained on as if the policy had sampled them; expected a correction; take "
                f"{policy.section}.rollout_correction out, or rollout.dtype"
            )
        if self.rollout.lag and policy.rollout_correction == "none":
            raise ConfigError(
                f"rollout.lag={self.rollout.lag} with {policy.section}.rollout_correction=none: answers of older "
                "weights would be trained on as if those that train had sampled them; expected a correction by the "
                f"engine's logprobs; take {policy.section}.rollout_correction out, or rollout.lag"
            )
        if not self._is_apart:
            policy.require_no_auto()
        if policy.old_logprobs == "engine":
            self._require_guard()

    def _require_guard(self) -> None:
        """Raise ConfigError where nothing holds the engine's logprobs, as the old policy's, to the trainer's."""
        key, rollout = f"{self.policy.section}.old_logprobs=engine", self.rollout
        limit = self.rollout_monitor.max_logprob_difference
        older = {
            f"rollout.lag={rollout.lag}": bool(rollout.lag),
            f"rollout.replay_groups={rollout.replay_groups}": bool(rollout.replay_groups),
            f"rollout.replay_from={rollout.replay_from}": self.is_replayed,
            f"rollout.dtype={rollout.dtype}": rollout.dtype is not None,
        }
        for other, is_set in older.items():
            if is_set:
                raise ConfigError(
                    f"{key} with {other}: the engine's logprobs are of other weights or another precision than the "
                    "trainer's, and nothing can tell that from an engine that is wrong; expected one of the two; take "
                    "one out"
                )
        if limit > GUARD:
            raise ConfigError(
                f"{key} takes the engine's logprobs for the trainer's, and rollout_monitor.max_logprob_difference="
                f"{limit:g} lets them differ by more than {GUARD:g} nats a token; expected at most {GUARD:g}; set "
                f"rollout_monitor.max_logprob_difference={GUARD:g}"
            )

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
        """Whether turns are charged with the rewards of an environment's steps, which then have to be there."""
        return False

    @property
    def _is_apart(self) -> bool:
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
            is_apart=self._is_apart,
        )

    def _own_loss(self) -> Loss:
        """The user's. Raises ConfigError where it cannot be trained with these settings."""
        rollout, key = self.rollout, f"{self.policy.section}.loss"
        loss = load_loss(read_own(self.policy.loss, key, "Class"), rollout.temperature)
        apart = [f"rollout.dtype={rollout.dtype}"] if rollout.dtype else []
        apart += [f"rollout.lag={rollout.lag}"] if rollout.lag else []
        if apart and "engine_logp_N" not in loss.needs:
            raise ConfigError(
                f"{key}={self.policy.loss} with {apart[0]}: rollouts are of another policy than trains, and the loss "
                "does not read the engine's logprobs; expected engine_logp_N among its needs; read it, or take the "
                "other out"
            )
        if self.policy.kl_coef and "ref_logp_N" in loss.needs:
            raise ConfigError(
                f"{key}={self.policy.loss} with {self.policy.section}.kl_in=reward: the loss reads the reference "
                "itself, and it is a part of the reward too; expected one of the two; set "
                f"{self.policy.section}.kl_coef=0"
            )
        return loss

    @property
    def _correction(self) -> Correction:
        loss = self.loss()
        return loss.correction if isinstance(loss, PolicyGradient) else Correction()

    @property
    def _has_reference(self) -> bool:
        is_in_loss = is_own(self.policy.loss) and "ref_logp_N" in self.loss().needs
        return self.policy.kl_coef > 0 or is_in_loss

    def loss_decisions(self) -> list[Decision]:
        correction, dtype = self._correction, self.rollout.dtype
        if is_own(self.policy.loss) and not reports_engine(self.loss()):
            reason = f"{self.policy.section}.loss gives no metric engine/difference"
            return [Decision("rollout_monitor.max_logprob_difference", "not compared", reason)]
        if dtype is None:
            return self.policy.decisions(correction)
        return self.policy.decisions(correction, f"rollouts are of {dtype}")

    def models(self) -> AuxModels:
        return AuxModels(self.reference if self._has_reference else None)

    def user_code(self) -> list[Path]:
        return [*super().user_code(), *self._own_files]

    def input_files(self) -> list[str]:
        return [*super().input_files(), *map(str, self._own_files)]

    @property
    def _own_files(self) -> list[Path]:
        """Files with an advantage or a loss of the user's own."""
        named = [self.policy.loss, getattr(self.policy, "advantage", "")]
        return [home_path(name.rpartition(":")[0]) for name in named if is_own(name)]

    def make_credit(self) -> PolicyCredit:
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
        """The coefficient of what teachers add to the advantages; 0: there are none."""
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
        """The settings, with the bounds of the correction, whose defaults depend on other keys."""
        settings, correction = super().resolved(), self._correction
        section = settings[self.policy.section]
        if is_own(self.policy.loss):
            return settings
        section |= {
            "rollout_correction_cap": correction.cap,
            "rollout_correction_floor": correction.floor,
        }
        return settings


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
