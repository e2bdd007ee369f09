"""What only the model can say of the rows, from one forward on some of them that all these checks share.

Each row is a tree, of which the prompt is computed once; all answers are cut to ANSWER tokens:

    the end of its prompt, its own answer         every token but the first is a target
                           another row's answer   of rows with pictures: its own after the other row's pictures
                           the rejected answer    of a pair

    gain of a row = mean logprob of its answer's tokens after its own prompt
                  - the same after another row's prompt

Before a run no more rows are taken than FLOPS allow; if they are too few, nothing is computed for these checks, and
``model.language`` reads those of the session's pair. What is found is a judgement, so a warning. Weights that were
never trained say nothing about rows, and are told apart by their own statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
from torch import Tensor

from taut.checks.chat_template import quoted, short_place
from taut.checks.data import flat_train
from taut.checks.registry import MAX_EXAMPLES, Finding, check, passed, skip_if, warned
from taut.checks.session import GENERATED, NUM_ROWS, Session, cut_out, is_text, once
from taut.data.batching import lay_out
from taut.data.packing import ALONE, pack
from taut.models import architecture
from taut.models.scorer import Scorer
from taut.models.teacher import ModelTeacher
from taut.train import distributed
from taut.types import FloatArray, IntArray, Packed, Sample, Tree

FLOPS = {"cpu": 1e11, "cuda": 1e14}
"""Operations that a forward may take before a run: less than a second."""
PROMPT, ANSWER = 96, 32
"""Maximum tokens of a prompt and of an answer."""
FEWEST = 16
"""Fewest rows from which something is concluded."""


class Likelihood(NamedTuple):
    """A row and its logprobs."""

    sample: Sample
    begin: int
    """The first token of its answer; the number of tokens where it has none."""
    own_N: FloatArray
    """Logprob of each target of the sample: all its text but the first token."""
    other: float = math.nan
    """Mean logprob of the answer's tokens after another row's prompt; nan where it is not compared."""
    rejected: float = math.nan
    """Mean logprob of the rejected answer's tokens; nan where there is none."""

    @property
    def answer(self) -> float:
        """Mean logprob of the answer's tokens after its own prompt."""
        return float(self.own_N[self.sample.target_at_N >= self.begin].mean())


class Measured(NamedTuple):
    """The rows that were measured."""

    rows: list[Likelihood]
    packs: Sequence[Packed]
    """Their micro-batches; empty if they are the session's pair, measured by others and with nothing else."""


@once
def measured(session: Session) -> Measured:
    """Run the forward. Skips the check if the model gives no logprobs."""
    skip_if(session.is_scalar, "a reward model has no logprobs")
    # how many tokens there is time for
    left = math.inf
    if session.part == "quick":
        most = FLOPS.get(session.ranks.device.type, FLOPS["cuda"])
        left = most / (2.0 * architecture.num_weights(session.model))
    # each row, and its answer elsewhere
    cuts, trees = list(_cuts(session)), list[Tree]()
    for number, (own, begin, rejected) in enumerate(cuts):
        other, start, _ = cuts[(number + 7) % len(cuts)]  # the next row is often about the same
        samples = [own]
        if own.media and len(own.media) == len(other.media):
            samples.append(_with_pictures_of(other, own, begin))
        elif _differ(own, begin, other, start):
            samples.append(_joined(own, begin, other.ids_T[start:], f"{other.id} elsewhere"))
        if rejected is not None:
            samples.append(_joined(own, begin, rejected, f"{own.id} rejected"))
        left -= sum(sample.num_tokens - begin for sample in samples) + begin
        if left < 0:
            break
        trees.append(Tree(tuple(samples)))
    if left < 0 and len(trees) < FEWEST:
        rows = [
            Likelihood(sample, sample.num_tokens, session.alone[sample.id].double().numpy())
            for sample in session.pair
        ]
        return Measured(rows, ())
    packs = lay_out(trees, session.trainer.budget, session.trainer.policy)
    logps, rows = logprobs(session, session.scorer, packs), []
    for own, begin, _ in cuts[: len(trees)]:
        names = f"{own.id} elsewhere", f"{own.id} rejected"
        means = [float(logps[name].mean()) if name in logps else math.nan for name in names]
        rows.append(Likelihood(own, begin, logps[own.id], *means))
    return Measured(rows, packs)


def logprobs(session: Session, scorer: Scorer, packs: Sequence[Packed]) -> dict[str, FloatArray]:
    """Sample id -> the logprobs of its targets, by the policy or another model."""
    found = {}
    for packed in packs:
        with session.inference():
            logp_N: Tensor = scorer(packed).logp_N.double().cpu()
        for row, name in enumerate(packed.sample_ids):
            found[name] = logp_N[packed.row_N == row].numpy()
    return found


def _cuts(session: Session) -> Iterator[tuple[Sample, int, IntArray | None]]:
    """Rows spread evenly over the data: the end of the prompt with the beginning of the last answer, the best one if
    answers are compared; where the answer begins; and the beginning of the worst answer.
    """
    train, index_S = session.train, flat_train(session).index_S
    chosen = index_S[np.linspace(0, index_S.size - 1, NUM_ROWS).astype(np.int64)]
    for row in dict.fromkeys(train.row_of(int(index)) for index in chosen):
        samples, rejected = train[train.row(row).start : train.row(row).stop], None
        if session.run.compares_answers:
            samples = sorted(samples, key=lambda sample: sample.values["preference"])
            worst, start = _cut(samples[0])
            rejected = worst.ids_T[start:]
        yield *_cut(samples[-1]), rejected


def _cut(sample: Sample) -> tuple[Sample, int]:
    """The last answer of a sample, cut, after the end of its prompt; and the place where it begins."""
    begin = stop = sample.num_tokens
    if sample.target_at_N.size:
        answers = np.split(sample.target_at_N, np.flatnonzero(np.diff(sample.target_at_N) > 1) + 1)
        begin = int(answers[-1][0])
        stop = min(int(answers[-1][-1]) + 1, begin + ANSWER)
    ids_T, media = cut_out(sample, begin - PROMPT, stop)
    cut = Sample(sample.id, ids_T, np.empty(0, dtype=np.int64), np.empty(0), media)
    at_N = np.flatnonzero(is_text(cut)[1:]) + 1
    cut = replace(cut, target_at_N=at_N, weight_N=np.ones(at_N.size))
    return cut, ids_T.size - (stop - begin)


def _joined(prompt: Sample, begin: int, answer: IntArray, name: str) -> Sample:
    """A prompt with another answer, whose tokens are the targets."""
    ids_T = np.concatenate([prompt.ids_T[:begin], answer])
    return Sample(name, ids_T, np.arange(begin, ids_T.size), np.ones(answer.size), prompt.media)


def _with_pictures_of(other: Sample, own: Sample, begin: int) -> Sample:
    """A sample with another one's pictures, as many, in the place of its own."""
    parts, media, at = list[IntArray](), [], 0
    for mine, theirs in zip(own.media, other.media, strict=True):
        parts += [own.ids_T[at : mine.start], other.ids_T[theirs.start : theirs.stop]]
        stop = sum(part.size for part in parts)
        media.append(replace(theirs, start=stop - parts[-1].size, stop=stop))
        at = mine.stop
    prompt = np.concatenate([*parts, own.ids_T[at:begin]])
    shown = Sample(own.id, prompt, np.empty(0, dtype=np.int64), np.empty(0), tuple(media))
    return _joined(shown, prompt.size, own.ids_T[begin:], f"{own.id} elsewhere")


def _differ(own: Sample, begin: int, other: Sample, start: int) -> bool:
    """Whether two rows differ in prompt and in answer, and have more than a few tokens of each."""
    prompts, answers = (
        (own.ids_T[:begin], other.ids_T[:start]),
        (own.ids_T[begin:], other.ids_T[start:]),
    )
    is_short = min(part.size for part in (*prompts, *answers)) < 4
    return not (is_short or np.array_equal(*prompts) or np.array_equal(*answers))


# -- what the model knows of the words alone

UNIT = "nats a token"
LITTLE = 0.25
"""A gain, in nats a token, that answers have which belong to no prompt."""


def interval(values: Sequence[float] | FloatArray) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    return float(np.mean(values)), 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


class Words(NamedTuple):
    """The loss on the words of the rows, special tokens left out."""

    loss_N: FloatArray
    counted_N: FloatArray
    """The loss of counting:

    p(token) = its share of the other rows' tokens, with half of one taken off each for all that are unseen.
    """
    lines: list[str]
    """Loss of each row."""

    @property
    def surplus(self) -> tuple[float, float]:
        """By how much the model is worse than counting, with its interval."""
        return interval(self.loss_N - self.counted_N)


@once
def words(session: Session) -> Words:
    """Compare the model with counting. Skips the check if there are too few words."""
    size = session.language.num_rows
    is_word_V = np.ones(size, dtype=bool)
    is_word_V[[index for index in session.tokenizer.added_tokens_decoder if index < size]] = False
    count_V = np.bincount(flat_train(session).ids_T, minlength=size) * is_word_V
    losses, counted, lines = [], [], []
    for row in measured(session).rows:
        own_V = np.bincount(row.sample.ids_T, minlength=size)
        others_V = (count_V - own_V).clip(min=0) * is_word_V
        left = 0.5 * np.count_nonzero(others_V) or 1.0
        share_V = ((others_V - 0.5).clip(min=0) + left / size) / max(others_V.sum(), 1)
        target_N = row.sample.ids_T[row.sample.target_at_N]
        is_word_N = is_word_V[target_N]
        losses.append(-row.own_N[is_word_N])
        counted.append(-np.log(share_V[target_N[is_word_N]]))
        if is_word_N.any():
            lines.append(f"{short_place(row.sample.id)}: {losses[-1].mean():.2f} nats a token")
    loss_N, counted_N = np.concatenate(losses), np.concatenate(counted)
    skip_if(loss_N.size < FEWEST, "the rows have too few words")
    return Words(loss_N, counted_N, lines)


@once
def is_untrained(session: Session) -> bool:
    """Whether the weights are as they were drawn: the model is no better than counting, and in most matrices rows and
    columns are alike but for chance. Squared norms of n independent entries with kurtosis k vary by sqrt((k - 1) / n)
    of their mean; training makes some rows many times as large.
    """
    surplus, half = words(session).surplus
    if surplus < -half:
        return False
    ratios = []
    layers = architecture.layers(session.model)
    for parameter in (*layers[0].parameters(), *layers[-1].parameters()):
        part = distributed.local(parameter).detach()
        if part.ndim < 2 or not part.is_floating_point() or min(part.shape[-2:]) < 8:
            continue
        squares = part.flatten(0, -2)[:4096].double().square()
        spread = float(squares.square().mean() / squares.mean().square()) - 1
        for axis in (0, 1):
            norms, size = squares.mean(axis), squares.shape[axis]
            ratios.append(float(norms.var() / norms.mean().square()) * size / spread)
    return bool(ratios) and sorted(ratios)[len(ratios) // 2] < 2.0


# -- checks


@check("model.language", after=["attention.shared"])
def the_model_knows_the_language_of_the_rows(session: Session) -> Finding:
    """Does the model know the rows' language: are they likelier to it than by counting their tokens?

    Of prompts and answers, without special tokens, which a base may not know. A model that is worse than counting, and
    not far from taking all tokens for equally likely, is broken, or its tokenizer is another model's.
    """
    of_words, uniform = words(session), math.log(session.language.num_rows)
    loss, by_counting = float(of_words.loss_N.mean()), float(of_words.counted_N.mean())
    numbers = (
        f"counting tokens gives {by_counting:.2f}, taking all for equally likely {uniform:.2f}"
    )
    if is_untrained(session):
        return passed(f"random weights, nothing was trained yet; {numbers}", loss, UNIT)
    surplus, half = of_words.surplus
    if loss > uniform or (loss > 0.6 * uniform and surplus > half):
        return warned(
            f"the model does not know these texts: {loss:.2f} nats a token; {numbers}",
            measured=(loss, UNIT),
            evidence=of_words.lines[:MAX_EXAMPLES],
            remedy="see whether tokenizer and weights belong together (ids of another tokenizer of the same size), "
            "whether the checkpoint is whole, and whether the model was made for this language",
        )
    return passed(f"known; {numbers}", loss, UNIT)


@check("data.prompts", after=["model.language"])
def answers_belong_to_their_prompts(session: Session) -> Finding:
    """Do answers belong to their prompts: are they likelier after their own than after another row's?

    Not told of answers of a few tokens, or that are all much alike.
    """
    rows, packs = measured(session).rows, measured(session).packs
    skip_if(session.is_generated, GENERATED)
    skip_if(not packs, "it takes more than a second; taut check --full asks it")
    skip_if(is_untrained(session), "the model has random weights")
    compared = [row for row in rows if math.isfinite(row.other)]
    skip_if(len(compared) < FEWEST, "too few rows have a prompt and an answer that no other has")
    answers = [{*row.sample.ids_T[row.begin :].tolist()} for row in compared]
    pairs = zip(answers, [*answers[1:], answers[0]], strict=True)
    skip_if(fmean(len(a & b) / len(a | b) for a, b in pairs) > 0.5, "answers are much alike")
    gains = {row.sample.id: row.answer - row.other for row in compared}
    gain, half = interval([*gains.values()])
    what = "pictures" if any(row.sample.media for row in compared) else "prompts"
    says = f"after their own {what} answers gain {gain:+.2f} +- {half:.2f} nats a token"
    if gain < LITTLE and gain - half <= 0:
        worst = sorted(compared, key=lambda row: gains[row.sample.id])[:MAX_EXAMPLES]
        return warned(
            f"answers are no likelier after their own {what} than after another row's: {gain:+.2f} +- {half:.2f} nats "
            "a token",
            measured=(gain, UNIT),
            evidence=[_shown(session, row, gains[row.sample.id]) for row in worst],
            remedy=f"see that answers stand beside their own {what} (columns that were sorted or joined apart, an "
            "offset of one); if they need not follow from them, go on",
        )
    return passed(f"{says}, of {len(compared)} rows", gain, UNIT)


def _shown(session: Session, row: Likelihood, gain: float) -> str:
    """A row in a line of evidence."""
    ids = row.sample.ids_T.tolist()
    prompt, answer = (
        str(session.tokenizer.decode(some, skip_special_tokens=True)).strip()
        for some in (ids[: row.begin], ids[row.begin :])
    )
    return f"{short_place(row.sample.id)}: {gain:+.2f}: {quoted(prompt[-80:])} -> {quoted(answer)}"


@check("data.preferred", after=["model.language"])
def chosen_answers_are_no_less_like_text(session: Session) -> Finding:
    """Are chosen answers about as likely to the model, token by token, as the rejected ones?"""
    rows = [row for row in measured(session).rows if math.isfinite(row.rejected)]
    skip_if(not session.run.compares_answers, "the rows are no comparisons")
    skip_if(not measured(session).packs, "it takes more than a second; taut check --full asks it")
    skip_if(is_untrained(session), "the model has random weights")
    skip_if(len(rows) < FEWEST, "too few rows")
    gains = {row.sample.id: row.answer - row.rejected for row in rows}
    gain, half = interval([*gains.values()])
    if gain + half < -1.0:
        worst = sorted(rows, key=lambda row: gains[row.sample.id])[:MAX_EXAMPLES]
        return warned(
            f"chosen answers are far less like text than rejected ones: {gain:+.2f} +- {half:.2f} nats a token",
            measured=(gain, UNIT),
            evidence=[_shown(session, row, gains[row.sample.id]) for row in worst],
            remedy="look at the chosen answers: are their words in order, whole, and in the right column?",
        )
    return passed(f"chosen against rejected, +- {half:.2f} of {len(rows)} pairs", gain, UNIT)


@check("teacher.knows", after=["model.language"])
def the_teacher_knows_more_than_the_student(session: Session) -> Finding:
    """Is the teacher another model than the student, and are the rows likelier to it?"""
    teacher, run = session.scorer.teacher, measured(session)
    teachers = dict(session.built.models.teachers)
    if isinstance(teacher, ModelTeacher):
        teachers = {"distill.teacher": teacher.scorer}
    skip_if(not teachers, "no teacher is a model in this process")
    packs, lines = run.packs or [pack(list(session.pair), ALONE)], []
    for name, scorer in teachers.items():
        theirs = logprobs(session, scorer, packs)
        gain_N = np.concatenate([theirs[row.sample.id] - row.own_N for row in run.rows])
        gain, half = interval(gain_N)
        lines.append(f"{name}: {gain:+.3f} +- {half:.3f} nats a token")
        if float(np.abs(gain_N).mean()) < session.exact:
            return warned(
                f"the teacher {name} gives the student's own logprobs",
                measured=(gain, UNIT),
                evidence=lines[-1:],
                remedy="a copy of the student has nothing to teach; name another model",
            )
        if not is_untrained(session) and gain + half < -0.1:
            return warned(
                f"the rows are less likely to the teacher {name} than to the student",
                measured=(gain, UNIT),
                evidence=lines[-1:],
                remedy="see whether teacher and student are mixed up, or whether the teacher is the model that was "
                "meant; a student that knows the rows better learns to know them less well",
            )
    return passed("; ".join(lines), gain, UNIT)
