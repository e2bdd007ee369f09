"""Label noise in preference data: contradictions, repeats, lengths, and labels that look flipped.

Contradictions (a pair, and the same pair with the opposite label), repeats and pairs of equal answers are exact, on
token ids, over all pairs; so are the lengths. Flips are estimated on at most 10,000 distinct pairs, sampled by the
seed; that takes about two seconds of one core. Nothing here decides what a run may do: the check does, by
``PairReport.is_many`` and ``Flips.is_alarming``.

To find flips, a small linear model learns from most of the pairs which answers are preferred, and judges the others;
no pair is judged by a model that saw its prompt. It reads differences (chosen minus rejected) of log(1 + count) of the
most common ids and pairs of neighboring ids, of log length, of the share of distinct ids and of the share that stand
in the prompt, and is fitted by componentwise L2 boosting (Buehlmann and Yu 2003), which is sparse and needs no more
than the Gram matrix. The margins m of pairs it did not see agree with the label or contradict it. Where a rule is
learnable and labels are flipped at a rate r that does not depend on the pair, surer margins are wrong less often, but
never less often than r:

    P(label agrees | m) = r + (1 - 2 r) sigmoid(b |m|)

a lapse rate, in terms of psychophysics. r and b are fitted by maximum likelihood; the interval of r is the
profile likelihood's, at 99%. The probability that a pair's label is flipped follows by Bayes' rule, with the low end of
that interval. Judging each label by a model that did not see it is from confident learning (arXiv:1911.00068).

Limits: where no rule is learnable from ids (arithmetic, facts), the rate is unknown, and the result says so. Flips are
only known as exceptions to a rule that the other pairs follow: pairs that another rule governs look the same. More than
half flipped is the opposite rule with the rest flipped: nothing in the data distinguishes the two.

Needs numpy only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taut.types import FloatArray, IntArray

NUM_FOLDS = 5
LEAST_PAIRS = 100
MOST_TOKENS = 256
"""Number of tokens read of an answer."""
MOST_PROMPT = 1024
"""Number of tokens read of a prompt, its last ones."""
MOST_COLUMNS = 512
"""Largest number of features: ids, and as many pairs of neighboring ids."""
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of boosting steps that are tried; one is chosen on pairs that the model did not see."""
AS_LIKELY = 2.0
"""Nats. Models whose margins are all alike fit as well as others, and leave the rate open."""
STEP_SIZE = 0.2
SURE = 4.0
"""Standard errors by which the share of agreeing labels exceeds one half where a rule was learned."""
LIKELIHOOD_DROP = 6.635 / 2
"""chi-square of one degree of freedom at 99%."""
WIDEST = 0.3
"""An interval of the rate wider than this is no result."""
CONFIDENT = 0.8
"""Smallest probability from which on a pair is suspected."""
NOTABLE, ALARMING, LEAST_SUSPECTS = 0.05, 0.15, 20
"""Thresholds of the rate's low end, and of the number of suspects. Published sets whose rule is a matter of style have
up to 11% of exceptions to it, which look like flips (docs/preference.md): worth a note, no reason to stop."""

Matrix = NDArray[np.float32]


class PairIds(NamedTuple):
    """A pair as token ids."""

    place: str
    """File and line, for people: ``train.jsonl:17``."""
    prompt: IntArray
    chosen: IntArray
    rejected: IntArray


class Suspect(NamedTuple):
    """A pair whose label the other pairs contradict."""

    place: str
    confidence: float
    """The estimated probability that its label is flipped, at the low end of the rate's interval."""


@dataclass(frozen=True, slots=True)
class Flips:
    """The estimate of flipped labels, and the pairs whose labels look flipped."""

    num_pairs: int
    """Number of pairs judged."""
    accuracy: float
    """The share of labels that agree with the model that did not see them; 0.5 where there are too few pairs."""
    rate: float | None
    """The estimated share of flipped labels; None if unknown, for ``reason``."""
    low: float = 0.0
    """The 99% interval of ``rate``."""
    high: float = 0.5
    suspects: tuple[Suspect, ...] = ()
    """The surest first; none where the interval of the rate reaches 0."""
    reason: str = ""

    @property
    def is_notable(self) -> bool:
        """Whether some labels are flipped, or some pairs follow another rule."""
        return self.rate is not None and self.low >= NOTABLE

    @property
    def is_alarming(self) -> bool:
        """Whether more labels are flipped than published sets have exceptions to a rule."""
        return (
            self.rate is not None and self.low >= ALARMING and len(self.suspects) >= LEAST_SUSPECTS
        )


class _Lapse(NamedTuple):
    """The fit of agreement to margins."""

    rate: float
    low: float
    high: float
    slope: float
    """At ``low``, so that the confidence of a pair is a cautious one."""
    log_likelihood: float


def find_flips(pairs: Sequence[PairIds], seed: int = 0) -> Flips:
    """Judge each pair by a model of the others. The answers of a pair differ, and no pair occurs twice.

    Among the models about as likely as the likeliest, the one with the narrowest interval of the rate is used.
    """
    num = len(pairs)
    if num < LEAST_PAIRS:
        return Flips(num, 0.5, None, reason=f"{num} pairs are fewer than {LEAST_PAIRS}")
    # Margins of the pairs, [P, len(STEPS)], by models that did not see their prompts; above 0: agrees with the label.
    difference = _differences(pairs)
    fold = _folds(pairs, seed)
    parts = [difference[fold == index] for index in range(NUM_FOLDS)]
    grams = [(part.T @ part).astype(np.float64) for part in parts]
    sums = [part.sum(0, dtype=np.float64) for part in parts]
    gram, total = np.sum(grams, axis=0), np.sum(sums, axis=0)
    margins = np.zeros((num, len(STEPS)))
    for index, part in enumerate(parts):
        weights = _boost(gram - grams[index], total - sums[index])
        margins[fold == index] = part @ weights.T.astype(np.float32)
    # Of the models that are about as likely as the likeliest, the one that knows the rate best.
    fits = [_fit_lapse(margin) for margin in margins.T]
    enough = max(fit.log_likelihood for fit in fits) - AS_LIKELY
    likely = [index for index, fit in enumerate(fits) if fit.log_likelihood >= enough]
    best = min(likely, key=lambda index: fits[index].high - fits[index].low)
    margin, fit = margins[:, best], fits[best]
    accuracy = float(((margin > 0) + 0.5 * (margin == 0)).mean())
    if (accuracy - 0.5) * 2 * math.sqrt(num) < SURE:
        reason = f"no rule could be learned: labels agree with predictions in {accuracy:.0%}"
        return Flips(num, accuracy, None, reason=reason)
    if fit.high - fit.low > WIDEST:
        reason = f"the rate may be anything from {fit.low:.0%} to {fit.high:.0%}"
        return Flips(num, accuracy, None, fit.low, fit.high, reason=reason)
    if fit.low <= 0:
        return Flips(num, accuracy, fit.rate, fit.low, fit.high)
    # The probability that each label is flipped, by Bayes' rule.
    right = _sigmoid(fit.slope * margin)
    flipped = fit.low * (1 - right)
    confidence = flipped / (flipped + (1 - fit.low) * right)
    suspects = tuple(
        Suspect(pairs[at].place, float(confidence[at]))
        for at in np.argsort(-confidence, kind="stable").tolist()
        if confidence[at] >= CONFIDENT
    )
    return Flips(num, accuracy, fit.rate, fit.low, fit.high, suspects)


def _folds(pairs: Sequence[PairIds], seed: int) -> IntArray:
    """The fold of each pair: pairs of one prompt share it; where one prompt has more than a fold holds, pairs of the
    same answers do.
    """
    keys: list[object] = [pair.prompt.tobytes() for pair in pairs]
    if max(Counter(keys).values()) > len(pairs) / NUM_FOLDS:
        keys = [frozenset((pair.chosen.tobytes(), pair.rejected.tobytes())) for pair in pairs]
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    shuffled = np.random.default_rng(seed).permutation(len(number))
    return shuffled[[number[key] for key in keys]] % NUM_FOLDS


def _boost(gram: FloatArray, total: FloatArray) -> FloatArray:
    """Least squares of 1 by boosting, one column a step: the weights after each of ``STEPS``."""
    square = np.diag(gram)
    inverse = np.divide(1.0, square, out=np.zeros_like(square), where=square > 1e-3)
    weight, left = np.zeros_like(total), total.copy()
    kept = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            kept.append(weight.copy())
        column = int(np.argmax(left * left * inverse))
        change = STEP_SIZE * left[column] * inverse[column]
        weight[column] += change
        left -= change * gram[column]
    return np.array(kept)


def _fit_lapse(margin: FloatArray) -> _Lapse:
    """Fit r and b by maximum likelihood on a grid."""
    sure = np.abs(margin)
    agrees = margin[sure > 0] > 0
    sure = sure[sure > 0]
    if not sure.size:
        return _Lapse(0.0, 0.0, 0.5, 0.0, margin.size * math.log(0.5))
    # Pairs of about equal margins are counted together.
    scale = float(np.median(sure))
    bins = np.array_split(np.argsort(sure), min(50, sure.size))
    level = np.array([sure[bin_].mean() for bin_ in bins]) / scale
    size = np.array([bin_.size for bin_ in bins])
    hits = np.array([np.count_nonzero(agrees[bin_]) for bin_ in bins])
    rates, slopes = np.linspace(0, 0.495, 100), np.geomspace(0.05, 100, 40)
    right = _sigmoid(slopes[:, None] * level)
    chance = rates[:, None, None] + (1 - 2 * rates[:, None, None]) * right
    chance = np.clip(chance, 1e-4, 1 - 1e-4)
    fits = (hits * np.log(chance) + (size - hits) * np.log1p(-chance)).sum(-1)
    # The interval of r: where the likelihood, with the best b for each r, is close to its maximum.
    profile = fits.max(1)
    best = int(profile.argmax())
    inside = profile >= profile[best] - LIKELIHOOD_DROP
    undecided = (margin.size - sure.size) * math.log(0.5)
    lowest = int(np.flatnonzero(inside)[0])
    return _Lapse(
        float(rates[best]),
        float(rates[lowest]),
        float(rates[inside].max()),
        float(slopes[fits[lowest].argmax()]) / scale,
        float(profile[best]) + undecided,
    )


def _sigmoid(x: FloatArray) -> FloatArray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _differences(pairs: Sequence[PairIds]) -> Matrix:
    """Features of the pairs, [P, columns]: chosen minus rejected."""
    answers = [answer[:MOST_TOKENS] for pair in pairs for answer in (pair.chosen, pair.rejected)]
    # Of each answer its length, its share of distinct ids, and the share of these that the prompt has.
    scalars = np.zeros((len(answers), 3))
    for index, pair in enumerate(pairs):
        in_prompt = set(pair.prompt[-MOST_PROMPT:].tolist())
        for at, answer in ((2 * index, pair.chosen), (2 * index + 1, pair.rejected)):
            if size := answers[at].size:
                distinct = set(answers[at].tolist())
                shared = len(distinct & in_prompt) / len(distinct)
                scalars[at] = math.log1p(answer.size), len(distinct) / size, shared
    # Its most common ids and pairs of neighboring ids.
    row = np.repeat(np.arange(len(answers)), [answer.size for answer in answers])
    column = _columns(np.concatenate(answers), least=1)
    neighbors, neighbors_row = _neighbors(column, row)
    tables = (
        scalars,
        _log_counts(row, column, len(answers)),
        _log_counts(neighbors_row, _columns(neighbors, least=2), len(answers)),
    )
    differences = [(table[0::2] - table[1::2]).astype(np.float32) for table in tables]
    return np.concatenate(differences, axis=1)


def _columns(codes: IntArray, least: int) -> IntArray:
    """The column of each code: the most common codes have one each, the others -1."""
    count = np.bincount(codes)
    common = np.argsort(-count, kind="stable")[:MOST_COLUMNS]
    common = common[count[common] >= least]
    column = np.full(count.size, -1)
    column[common] = np.arange(common.size)
    return column[codes]


def _neighbors(column: IntArray, row: IntArray) -> tuple[IntArray, IntArray]:
    """A code for each two neighboring columns of an answer, its edges included, and the answer."""
    edge, base = MOST_COLUMNS, MOST_COLUMNS + 1
    is_first = np.diff(row, prepend=-1) > 0
    is_last = np.append(is_first[1:], True)
    before = np.where(is_first, edge, np.roll(column, 1))
    left = np.concatenate([before, column[is_last]])
    right = np.concatenate([column, np.full(np.count_nonzero(is_last), edge)])
    rows = np.concatenate([row, row[is_last]])
    known = (left >= 0) & (right >= 0)
    return left[known] * base + right[known], rows[known]


def _log_counts(row: IntArray, column: IntArray, num_rows: int) -> Matrix:
    """[num_rows, columns]: log(1 + how often)."""
    num = int(column.max(initial=-1)) + 1
    known = column >= 0
    count = np.bincount(row[known] * num + column[known], minlength=num_rows * num)
    return np.log1p(count.reshape(num_rows, num), dtype=np.float32)


# -- contradictions, repeats, lengths

MOST_PAIRS = 10_000


class Earlier(NamedTuple):
    """A pair, and the first one that it repeats or contradicts."""

    place: str
    earlier: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the answers, in tokens, by label."""

    num_longer: int
    """Pairs whose chosen answer is the longer one."""
    num_shorter: int
    mean_difference: float
    """Chosen minus rejected."""
    correlation: float
    """Correlation of the difference of lengths with the label, each pair in both orders; 0 where no lengths differ."""

    @property
    def num_unequal(self) -> int:
        """Pairs whose answers differ in length: the trials of which ``num_longer`` are hits."""
        return self.num_longer + self.num_shorter

    @property
    def accuracy(self) -> float:
        """Accuracy with which length alone predicts the label of a pair of unequal lengths, in the better direction."""
        return max(self.num_longer, self.num_shorter) / max(1, self.num_unequal)


@dataclass(frozen=True, slots=True)
class PairReport:
    """Findings about the labels of preference data, from the data alone."""

    num_pairs: int
    identical: tuple[str, ...]
    """Places where chosen and rejected are the same ids; these pairs do not count below."""
    repeats: tuple[Earlier, ...]
    """Pairs whose prompt, answers and label were there before."""
    contradictions: tuple[Earlier, ...]
    """Pairs whose prompt and answers were there before, with the opposite label."""
    lengths: Lengths
    flips: Flips

    def is_many(self, count: int) -> bool:
        """Whether so many contradictions, or pairs of equal answers, are a mistake rather than an accident."""
        return count >= 5 and count >= 0.01 * self.num_pairs


def examine_pairs(pairs: Sequence[PairIds], seed: int = 0) -> PairReport:
    """Examine the labels of ``pairs``; each pair is read at most twice."""
    first: dict[tuple[bytes, bytes, bytes], str] = {}
    identical: list[str] = []
    repeats: list[Earlier] = []
    contradictions: list[Earlier] = []
    distinct: list[int] = []
    differences: list[int] = []
    # Compare each pair with the first one of the same prompt and answers.
    for index, pair in enumerate(pairs):
        prompt, chosen, rejected = (
            blake2b(ids.tobytes(), digest_size=16).digest() for ids in pair[1:]
        )
        if chosen == rejected:
            identical.append(pair.place)
            continue
        differences.append(pair.chosen.size - pair.rejected.size)
        if (prompt, rejected, chosen) in first:
            contradictions.append(Earlier(pair.place, first[prompt, rejected, chosen]))
        if (prompt, chosen, rejected) in first:
            repeats.append(Earlier(pair.place, first[prompt, chosen, rejected]))
            continue
        first[prompt, chosen, rejected] = pair.place
        distinct.append(index)
    if len(distinct) > MOST_PAIRS:
        drawn = np.random.default_rng(seed).choice(distinct, MOST_PAIRS, replace=False)
        distinct = sorted(drawn.tolist())
    # Which answers are longer, and how closely that follows the label.
    difference = np.array(differences, dtype=np.int64)
    longer, shorter = int((difference > 0).sum()), int((difference < 0).sum())
    lengths = Lengths(0, 0, 0.0, 0.0)
    if longer + shorter:
        mean = float(difference.mean())
        spread = float(np.sqrt(np.square(difference, dtype=np.float64).mean()))
        lengths = Lengths(longer, shorter, mean, mean / spread)
    return PairReport(
        len(pairs),
        tuple(identical),
        tuple(repeats),
        tuple(contradictions),
        lengths,
        find_flips([pairs[index] for index in distinct], seed),
    )
