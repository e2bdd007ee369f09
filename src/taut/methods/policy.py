"""What a user says of policy optimisation, and the loss it makes. Wiring, no maths: the formulas and their papers are
in losses/{policy,surrogates,advantages,kl,correction,value}.py.

``[grpo]`` compares the answers to a prompt with each other; ``[ppo]`` compares each token with what a critic expected
(``[critic]``). What both say of ratio, divergence, entropy and the engine is ``PolicyConfig``. A key that nothing would
read is refused.

May import losses, config and errors. run.py names these sections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.losses.advantages import ESTIMATORS, Estimator, pass_at_k
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

PolicyLoss: TypeAlias = Literal["clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce"]
"""The names of losses.surrogates.SURROGATES; a test holds them to it."""
Advantage: TypeAlias = Literal[
    "group", "mean", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "pass_at_k"
]
"""The names of losses.advantages.ESTIMATORS; a test holds them to it."""
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


CORRECTING = ("correction_level", "correction_cap", "correction_floor")


class RollOut(NamedTuple):
    """What a loss is to know of how its roll-outs come about."""

    temperature: float
    """What tokens are sampled at."""
    limit: int
    """Tokens an answer may have."""
    is_fresh: bool
    """Whether each is the policy's own and trained on once; else ``old_logp_N`` is there."""
    has_engine_logp: bool
    """Whether the engine says log-probabilities."""
    is_apart: bool = False
    """Whether the engine computes otherwise than the trainer does: another program, another precision."""


class _Defaults(NamedTuple):
    """What a loss's own paper sets."""

    average: Average
    low: float = 0.2
    high: float = 0.28


_DEFAULTS: dict[PolicyLoss, _Defaults] = {
    "clip": _Defaults("token"),
    "gspo": _Defaults("sequence", 3e-4, 4e-4),
    "gspo_token": _Defaults("sequence", 3e-4, 4e-4),
    "cispo": _Defaults("token", 1.0, 4.0),
    "sapo": _Defaults("sequence"),
    "gmpo": _Defaults("sequence", 0.4, 0.4),
    "reinforce": _Defaults("token"),
}


class _Key(NamedTuple):
    """A key, and whether anything reads it."""

    name: str
    is_read: bool
    wanted: str
    """What would read it."""


@configclass
class PolicyConfig:
    """What GRPO and PPO have in common."""

    section: ClassVar[str]

    loss: PolicyLoss = "clip"
    """clip (PPO, GRPO, DAPO), gspo or gspo_token (one ratio a sample), cispo, sapo, gmpo, or reinforce (no ratio). They
    differ where a roll-out is trained on more than once, or is stale."""
    average: Average | None = None
    """token (DAPO: every token counts alike), sequence (GRPO: every answer), constant (Dr. GRPO: sums, divided by a
    length). None: as the loss's paper has it: token for clip, cispo and reinforce, else sequence."""
    constant_length: Annotated[int, Field(gt=0)] | None = None
    """Of average=constant; None: the most an answer may have: rollout.max_new_tokens, or of an environment
    rollout.environment.max_tokens."""
    clip_low: Positive | None = None
    """How far a ratio may fall below 1 before a token counts no more; None: 0.2, gspo 0.0003, cispo 1 (no bound), gmpo
    0.4 (of log-ratios)."""
    clip_high: Positive | None = None
    """How far it may rise above 1; None: 0.28 (DAPO), gspo 0.0004, cispo 4 (ScaleRL), gmpo 0.4. TRL's epsilon_high; of
    cispo its epsilon_high - 1."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The largest ratio that counts against a bad token, above 1 + clip_high; 3 is usual. None: there is no bound."""
    sapo_positive: Positive | None = None
    """Of loss=sapo: how sharply ratios are damped where the advantage is positive; 1 where not given."""
    sapo_negative: Positive | None = None
    """The same elsewhere; 1.05 where not given."""
    kl_coef: NotNegative = 0.0
    """What a nat of divergence from the reference costs; 0: there is no reference. 0.001 to 0.05 are usual."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a separate loss term, token by token. reward: a penalty. PPO and advantage=reinforce_pp charge each token
    for its own divergence and that of later tokens. Other advantages charge each answer for the sum of its tokens,
    compared within the group; advantage=group does not divide it by the deviation of the rewards."""
    kl_value: KlValue | None = None
    """Of kl_in=loss: the estimator that is reported; k3 where not given. (Of kl_in=reward k1 and k3 are.)"""
    kl_gradient: KlGradient | None = None
    """Of kl_in=loss: the estimator whose gradient is taken. k2, which has the gradient of the divergence, where not
    given; k3 is GRPO's and TRL's, biased where policy and reference are far apart. (k1 has a mean gradient of 0.)"""
    kl_target: Positive | None = None
    """Of kl_in=reward: change kl_coef after each roll-out so that a token diverges by so many nats (1909.08593)."""
    entropy_coef: NotNegative = 0.0
    """What a nat of entropy per token is worth."""
    entropy: bool = False
    """Report the entropy, which costs a pass over the logits; entropy_estimate is reported in any case."""
    correction: Literal["auto"] | CorrectionKind = "auto"
    """How tokens are weighted whose engine and trainer differ: truncated (TIS), masked (MIS), none; auto: truncated
    where the engine is another program, else none."""
    correction_level: CorrectionLevel | None = None
    """What a weight is: a token's ratio of trainer to engine (token), the product of an answer's ratios (sequence), or
    their geometric mean (geometric). The product fades with the answer's length; the geometric mean does not. None:
    token with correction=truncated, geometric with correction=masked or loss=gmpo. With correction=auto this key and
    the next two are read with a server only."""
    correction_cap: Annotated[float, Field(ge=1)] | None = None
    """The largest weight; with correction=masked larger weights become 0. None: 2, or 1.1 for geometric, which is 0.1
    nats a token."""
    correction_floor: Share | None = None
    """The smallest weight; with correction=masked smaller weights become 0. None: 0, or 0.9 for geometric."""

    def __post_init__(self) -> None:
        for key in self._keys():
            value = getattr(self, key.name)
            if not key.is_read and value != _default(self, key.name):
                raise ConfigError(
                    f"found {self.section}.{key.name}={_shown(value)}, which nothing reads; expected {key.wanted}; set "
                    f"that, or leave {key.name} out"
                )
        for is_fresh in (True, False):
            self._require_meant(RollOut(1.0, 1, is_fresh, has_engine_logp=True, is_apart=True))

    def make_loss(self, roll_out: RollOut) -> PolicyGradient:
        """The loss. Raises ConfigError for what has no meaning."""
        defaults, average = _DEFAULTS[self.loss], self.average or _DEFAULTS[self.loss].average
        length = None
        if average == "constant":
            length = self.constant_length or roll_out.limit
        return PolicyGradient(
            surrogate=self.loss,
            bounds=Bounds(
                self.clip_low or defaults.low,
                self.clip_high or defaults.high,
                self.dual_clip,
                self.sapo_positive or 1.0,
                self.sapo_negative or 1.05,
            ),
            average=average,
            constant_length=length,
            is_fresh=roll_out.is_fresh,
            has_engine_logp=roll_out.has_engine_logp,
            correction=self._correction(roll_out),
            kl=self._kl,
            entropy_coef=self.entropy_coef,
            entropy=self.entropy,
            critic=self.critic_term,
            temperature=roll_out.temperature,
        )

    @property
    def penalty_coef(self) -> float:
        """What a nat costs in the reward, to begin with."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    @property
    def critic_term(self) -> Critic | None:
        """The critic's term, where there is a critic."""
        return None

    @property
    def _kl(self) -> Kl | None:
        if self.kl_in == "reward" or self.kl_coef == 0:
            return None
        return Kl(self.kl_coef, self.kl_gradient or "k2", self.kl_value or "k3")

    def _correction(self, roll_out: RollOut) -> Correction:
        kind = self.correction
        if kind == "auto":
            kind = "truncated" if roll_out.is_apart and roll_out.has_engine_logp else "none"
        if kind == "none":
            return Correction()
        is_geometric = kind == "masked" or self.loss == "gmpo"
        level = self.correction_level or ("geometric" if is_geometric else "token")
        floor, cap = (0.9, 1.1) if level == "geometric" else (0.0, 2.0)
        return Correction(
            kind,
            level,
            cap if self.correction_cap is None else self.correction_cap,
            floor if self.correction_floor is None else self.correction_floor,
        )

    def decisions(self, how: Correction) -> list[tuple[str, str, str]]:
        """(key, value, reason) of what was chosen for the user about the correction in force."""
        found: list[tuple[str, str, str]] = []
        if how.kind == "none":
            return found
        if self.correction == "auto":
            found.append((f"{self.section}.correction", how.kind, "the engine is another program"))
        if self.correction_level is None:
            reason = "each token is weighted for itself"
            if how.level == "geometric":
                reason = (
                    "the product over an answer fades with its length, the geometric mean does not"
                )
            found.append((f"{self.section}.correction_level", how.level, reason))
        return found

    def require_no_auto(self) -> None:
        """Raise ConfigError for settings of a correction that ``auto`` leaves out: the engine is in this process."""
        for name in CORRECTING if self.correction == "auto" else ():
            if getattr(self, name) != _default(self, name):
                raise ConfigError(
                    f"found {self.section}.{name}={_shown(getattr(self, name))}, which nothing reads: with the engine "
                    f"in this process {self.section}.correction=auto is none; expected truncated or masked; set that, "
                    f"or leave {name} out"
                )

    def _keys(self) -> Iterator[_Key]:
        """Keys that are read only beside others."""
        made, has_kl = SURROGATES[self.loss], self.kl_coef > 0
        held = _losses(lambda name: SURROGATES[name].is_held)
        yield _Key("clip_low", made.is_held, held)
        yield _Key("clip_high", made.is_held, held)
        yield _Key("dual_clip", made.is_dual, _losses(lambda name: SURROGATES[name].is_dual))
        yield _Key("sapo_positive", self.loss == "sapo", "loss=sapo")
        yield _Key("sapo_negative", self.loss == "sapo", "loss=sapo")
        is_constant = self.average == "constant"
        yield _Key("constant_length", is_constant, "average=constant")
        yield _Key("kl_in", has_kl, "kl_coef above 0")
        in_loss = has_kl and self.kl_in == "loss"
        yield _Key("kl_value", in_loss, "kl_coef above 0 and kl_in=loss")
        yield _Key("kl_gradient", in_loss, "kl_coef above 0 and kl_in=loss")
        yield _Key("kl_target", has_kl and not in_loss, "kl_coef above 0 and kl_in=reward")
        for name in CORRECTING:
            yield _Key(name, self.correction != "none", "correction=truncated or masked")

    def _require_meant(self, roll_out: RollOut) -> None:
        """Refuse what the loss refuses, and say in which section it was found."""
        try:
            self.make_loss(roll_out)
        except ConfigError as error:
            raise ConfigError(f"{self.section}: {error}") from error


@configclass
class GrpoConfig(PolicyConfig):
    """GRPO and its family: the answers to a prompt are compared with each other, there is no critic."""

    section: ClassVar[str] = "grpo"

    advantage: Advantage = "group"
    """group (GRPO), mean (Dr. GRPO), rloo, reinforce_pp, reinforce_pp_baseline, maxrl, or pass_at_k."""
    pass_k: Annotated[int, Field(ge=1)] | None = None
    """Of advantage=pass_at_k: the best of how many is to be raised, at most the size of a group; 4 where not given."""

    @property
    def estimator(self) -> Estimator:
        """How rewards become advantages."""
        found = ESTIMATORS[self.advantage]
        if self.pass_k is not None:
            return replace(found, compare=partial(pass_at_k, k=self.pass_k))
        return found

    def _keys(self) -> Iterator[_Key]:
        yield from PolicyConfig._keys(self)
        yield _Key("pass_k", self.advantage == "pass_at_k", "advantage=pass_at_k")


@configclass
class PpoConfig(PolicyConfig):
    """PPO: each token is compared with what a critic expected."""

    section: ClassVar[str] = "ppo"

    gamma: Share = 1.0
    """What a reward is worth one token earlier."""
    lam: Share = 0.95
    """GAE's lambda: 1 trusts what came of it, 0 the critic's next word."""
    whiten_advantages: bool = True
    """Bring the advantages of a roll-out's tokens to mean 0 and spread 1."""
    bootstrap_cut: bool = False
    """Replace the reward of a cut answer by the critic's value of the state in which it was cut, as if the answer went
    on. false: a cut answer gets its reward like any other. Penalties per token (ppo.kl_in=reward) and rewards of an
    environment's turns stay."""
    value_coef: Positive = 0.1
    """Weight of half the critic's squared error."""
    value_clip: Positive | None = 0.2
    """How far a value may go from what it was when the roll-out was made before it counts no more."""

    @property
    def critic_term(self) -> Critic:
        """The critic's term."""
        return Critic(self.value_coef, self.value_clip)


def _losses(is_one: Any) -> str:
    return f"loss={' or '.join(name for name in SURROGATES if is_one(name))}"


def _default(config: PolicyConfig, name: str) -> Any:
    return next(field.default for field in fields(config) if field.name == name)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
