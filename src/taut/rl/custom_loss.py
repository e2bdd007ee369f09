"""Custom advantages and losses, which a configuration names as ``FILE.py:name``.

    def advantages(outcomes):                   grpo.advantage = "own.py:advantages"
        mean = outcomes.reward_S.mean()
        return outcomes.reward_S - mean         [S], or a list of [N]: one number for each sampled token

    @dataclass(frozen=True)
    class Plain(Loss):                          grpo.loss = "own.py:Plain"
        ...                                     losses/loss.py says what a loss is

An advantage is a function of ``Outcomes`` (losses/advantages.py); every rank calls it, and may call it repeatedly. A
loss is made without arguments, except ``temperature`` if it has such a field, and reads the streams of ``STREAMS``.

Both are tried before a run begins: an advantage on a small rollout, a loss on small micro-batches with made-up scores
in float64 (``require_sound``). ``taut check RUN --full`` checks a loss on the run's model as it checks the losses of
taut: the step against its samples alone, packed against alone, any cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from taut.config import home_path
from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ConfigError, UserCodeError
from taut.io.user_code import UserCode, read_user_code
from taut.losses.advantages import Compare, Estimator, Outcomes, mean
from taut.losses.loss import Loss
from taut.types import LossSum, Packed, Sample, Scores

STREAMS = ("advantage_N", "engine_logp_N", "old_logp_N", "ref_logp_N")
"""Streams of each token that a custom loss may read."""
EXTREMES = (1e4, -1e4)
"""Log-ratios in nats at which a loss and its gradient are finite."""
GAP = 0.05
"""Nats between the policies of a made-up rollout."""
ROUNDING = 1e-9


def read_own(spec: str, key: str, kind: str) -> UserCode:
    """The file of ``FILE.py:name``, read and not run."""
    return read_user_code(spec, home_path(spec.rpartition(":")[0]), f"{key}={spec}", kind)


# -- advantages


@lru_cache(maxsize=8)
def load_advantage(code: UserCode) -> Estimator:
    """The estimator that calls the user's function, once it was tried. Raises ConfigError for one that is unsound."""
    function = code.load()

    def assess(_: Compare, outcomes: Outcomes) -> list[Tensor]:
        return _called(code, function, outcomes)

    estimator = Estimator(_not_compared, mean, assess=assess)
    try:
        first, again = estimator.assessed(_small_rollout()), estimator.assessed(_small_rollout())
    except UserCodeError as error:
        raise ConfigError(str(error)) from error
    if any(not torch.equal(a, b) for a, b in zip(first, again, strict=True)):
        raise ConfigError(
            f"{code.label}: two calls with the same outcomes return different advantages; expected a function of the "
            "outcomes, since every rank calls it; seed what is random in it"
        )
    return estimator


def _not_compared(reward_S: Tensor, group_S: Tensor) -> Tensor:
    raise AssertionError("the user's function compares rewards itself")


def _called(
    code: UserCode, function: Callable[[Outcomes], Any], outcomes: Outcomes
) -> list[Tensor]:
    """Return the function's advantages as [N] for each sample. Raises UserCodeError."""
    lengths = outcomes.length_S.tolist()
    value = code.call("advantages", function, outcomes)
    wanted = "expected a tensor [S], or a list with a tensor [N] for each sample; return that"
    problem = ""
    if isinstance(value, Tensor) and value.shape == (len(lengths),):
        value = [a.expand(n) for a, n in zip(value, lengths, strict=True)]
    elif isinstance(value, Tensor):
        problem = f"a tensor of shape {list(value.shape)} for {len(lengths)} samples"
    listed = value if isinstance(value, list | tuple) else [value]
    shapes = [list(a.shape) if isinstance(a, Tensor) else type(a).__name__ for a in listed]
    if not problem and shapes != [[n] for n in lengths]:
        problem = f"{str(shapes)[:80]} for samples of {str(lengths)[:80]} tokens"
    if problem:
        raise UserCodeError(f"{code.label} returned {problem}; {wanted}")
    advantages = [advantage_N.detach().to("cpu", torch.float64) for advantage_N in value]
    for number, advantage_N in enumerate(advantages):
        if not advantage_N.isfinite().all():
            raise UserCodeError(
                f"{code.label} returned {advantage_N.tolist()[0]:g} for sample {number}, whose reward is "
                f"{float(outcomes.reward_S[number]):g}; expected finite numbers; correct it"
            )
    return advantages


def _small_rollout() -> Outcomes:
    """Two groups of three samples, of two turns each, with two rewards; the rewards of the second group are equal."""
    reward_S = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.25, 0.25], dtype=torch.float64)
    length_S = torch.tensor([3, 5, 2, 4, 4, 6])
    return Outcomes(
        reward_S=reward_S,
        group_S=torch.tensor([0, 0, 0, 1, 1, 1]),
        length_S=length_S,
        parts={"first": reward_S / 2, "second": reward_S / 4},
        weights={"first": 1.0, "second": 2.0},
        turn_ends=[torch.tensor([0, n - 1]) for n in length_S.tolist()],
        turn_rewards=[torch.stack([reward / 4, reward / 4]) for reward in reward_S],
        ids=[torch.arange(3 + n) for n in length_S.tolist()],
        sampled_at=[3 + torch.arange(n) for n in length_S.tolist()],
        branches=[()] * 6,
        forks=[()] * 6,
    )


# -- losses


@lru_cache(maxsize=8)
def load_loss(code: UserCode, temperature: float) -> Loss:
    """The user's loss, once it was tried. Raises ConfigError for one that cannot be trained with."""
    made_by = code.load()
    if not (isinstance(made_by, type) and issubclass(made_by, Loss)):
        raise ConfigError(
            f"{code.label}: {code.name} is no class of losses; expected a frozen dataclass on the base of "
            "taut.losses.loss.Loss; write it so"
        )
    given = (
        {"temperature": temperature} if "temperature" in [f.name for f in fields(made_by)] else {}
    )
    try:
        loss = made_by(**given)
        require_sound(loss, code.label)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{code.label} raised {reason}{code.line_of(error)}; expected a loss of small micro-batches; correct it"
        ) from error
    if loss.wants.temperature != temperature:
        raise ConfigError(
            f"{code.label} wants scores at temperature {loss.wants.temperature:g}, and rollout.temperature is "
            f"{temperature:g}; expected that of the rollout; give the class a field temperature and its wants too"
        )
    return loss


def require_sound(loss: Loss, label: str) -> None:
    """Raise ConfigError for a loss that breaks what the loop relies on, on micro-batches with made-up scores."""
    fault = next(_faults(loss), None)
    if fault is not None:
        found, expected = fault
        raise ConfigError(f"{label}: {found}; expected {expected}; correct it")


def _faults(loss: Loss) -> Iterator[tuple[str, str]]:
    """Faults of a loss: what was found, and what is expected. Only the first counts; others may follow from it."""
    # what it declares
    unknown = [name for name in loss.needs if name not in STREAMS] + list(loss.needs_values)
    if unknown:
        yield f"it needs {unknown[0]}", f"one of {', '.join(STREAMS)}"
    if loss.wants.scalar or loss.wants.divergence or not loss.wants.logp or loss.observes:
        yield (
            "it wants a scalar head, a teacher or statistics of the step",
            "log-probabilities and entropy alone",
        )
    if not loss.units or not set(loss.units.values()) <= {"token", "sequence"}:
        yield f"its units are {dict(loss.units)}", "terms by token or by sequence"
    # its terms, and their gradient
    samples = _made_up()
    together = pack(samples, PackPolicy(share_prefixes=True, min_saved_tokens=1))
    whole = _gradients(loss, together, GAP)
    if whole.keys() != loss.units.keys():
        yield f"it returns the terms {sorted(whole)}", f"those of its units, {sorted(loss.units)}"
    slopes = {name: slope for name, (_, slope) in whole.items()}
    if not any(slope.any() for slope in slopes.values()):
        yield "no term has a gradient", "a gradient by the log-probabilities"
    # packed samples are their sum
    alone = [_gradients(loss, pack([sample], ALONE), GAP) for sample in samples]
    places = {name: number for number, name in enumerate(together.sample_ids)}
    for name, (total, slope_N) in whole.items():
        gap = abs(total - sum(terms[name][0] for terms in alone))
        for sample, terms in zip(samples, alone, strict=True):
            own_N = slope_N[together.row_N == places[sample.id]]
            gap = max(gap, float((own_N - terms[name][1]).abs().max()))
        if not gap <= ROUNDING * max(1.0, abs(total)):
            yield (
                f"its term {name} of packed samples differs from the sum over them alone by {gap:.3g}",
                "sums over targets, in which no sample has a part in another's; never a mean",
            )
    # extremes, derivatives that are known before the forward, and samples that are left out
    for extreme in EXTREMES:
        for name, (total, slope_N) in _gradients(loss, together, extreme).items():
            if not (np.isfinite(total) and slope_N.isfinite().all()):
                yield (
                    f"its term {name} or its gradient is not finite where log-ratios are {extreme:g}",
                    "finite numbers for any log-ratio (taut.losses.policy.ratio_of has a tangent)",
                )
    linear = loss.linear_weights(together)
    for name, weight_N in (linear or {}).items():
        if not torch.allclose(weight_N.double(), slopes[name], rtol=ROUNDING, atol=ROUNDING):
            yield f"linear_weights of {name} is not its derivative", "that, or None"
    zero_N = np.zeros(samples[0].num_targets)
    for advantage_N in (samples[0].streams["advantage_N"], zero_N):
        is_silent = loss.is_silent(replace(samples[0], streams={"advantage_N": advantage_N}))
        sample = replace(samples[0], streams={**samples[0].streams, "advantage_N": advantage_N})
        of_sample = _gradients(loss, pack([sample], ALONE), GAP).values()
        if is_silent and any(total or slope_N.any() for total, slope_N in of_sample):
            yield "is_silent is true of a sample with a loss", "that of samples without any"


def reports_engine(loss: Loss) -> bool:
    """Whether the loss gives the metric by which the engine is held to the trainer."""
    packed = pack(_made_up(), ALONE)
    logp_N = packed.streams["old_logp_N"].double()
    result = loss(Scores(logp_N, logp_N.abs() if loss.wants.entropy else None), packed)
    return "engine/difference" in result.metrics


def _made_up() -> list[Sample]:
    """Four answers to two prompts, of 3 to 6 tokens."""
    random = np.random.default_rng(0)
    samples = []
    for number, size in enumerate((3, 5, 4, 6)):
        prompt = np.arange(5) + 10 * (number // 2)
        old_N = -random.uniform(0.5, 3.0, size)
        streams = {name: old_N + random.normal(scale=GAP, size=size) for name in STREAMS}
        streams["advantage_N"] = random.normal(size=size)
        ids_T = np.concatenate([prompt, random.integers(50, 90, size)])
        at_N = np.arange(5, 5 + size)
        samples.append(Sample(f"made up {number}", ids_T, at_N, np.ones(size), streams=streams))
    return samples


def _gradients(loss: Loss, packed: Packed, gap: float) -> dict[str, tuple[float, Tensor]]:
    """Of each term its value, and its derivative by the log-probabilities, which are ``gap`` above the old policy's."""
    logp_N = (packed.streams["old_logp_N"].double() + gap).requires_grad_()
    entropy_N = 1.0 + packed.streams["old_logp_N"].double().abs() if loss.wants.entropy else None
    result = loss(Scores(logp_N, entropy_N), packed)
    assert isinstance(result, LossSum), "a loss returns LossSum"
    gradients = {}
    for name, total in result.terms.items():
        slope_N = torch.zeros_like(logp_N)
        if total.requires_grad:
            (slope_N,) = torch.autograd.grad(
                total, logp_N, retain_graph=True, materialize_grads=True
            )
        gradients[name] = float(total.detach()), slope_N
    return gradients
