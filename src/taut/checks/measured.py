"""What only the model can say of the rows, from one forward on some of them that all these checks share.

Each row is a tree, of which the prompt is computed once; prompts are cut to their end, answers to their beginning:

    prompt, its own answer            every token but the first is a target
            another row's answer
            the rejected answer       of a pair

    gain of a row = mean logprob of the answer's tokens - that after another row's prompt (or of the rejected answer)

Prompts have their pictures and tools. Before a run no more rows are taken than FLOPS allow; if these are too few,
nothing is computed for these checks, and ``model.language`` reads the logprobs of the session's pair. What is found is
a judgement, so a warning. Weights that were never trained say nothing about rows, and are told by their statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from taut.checks.chat_template import quoted, short_place
from taut.checks.data import flat_train
from taut.checks.registry import MAX_EXAMPLES, Finding, check, passed, skip_if, warned
from taut.checks.session import GENERATED, NUM_ROWS, Session, cut_out, is_text, once
from taut.data.batching import lay_out
from taut.data.packing import ALONE, ids_with_pictures, pack
from taut.models import architecture
from taut.models.scorer import Scorer
from taut.models.teacher import ModelTeacher
from taut.train import distributed
from taut.types import FloatArray, Packed, Sample, Tree

FLOPS = {"cpu": 1e11, "cuda": 1e14}
"""Operations that a forward may take before a run: less than a second."""
PROMPT, ANSWER = 96, 32
"""Maximum tokens of a prompt and of an answer."""
FEWEST = 16
"""Fewest rows, or words, from which something is concluded."""
LITTLE = 0.25
"""A gain that answers have which belong to no prompt."""
UNIT = "nats a token"
UNKNOWING = "the model has random weights, or does not know the rows' language"


class Row(NamedTuple):
    """A row, with the logprobs of the tokens of its answer."""

    sample: Sample
    begin: int
    """Index of the first token of its answer."""
    own_N: FloatArray
    """Logprob of each target of the sample: all its text but the first token."""
    other: float = math.nan
    """Mean logprob of the answer after another row's prompt; nan where it is not compared."""
    rejected: float = math.nan
    """Mean logprob of the rejected answer; nan where there is none."""

    @property
    def answer(self) -> float:
        """Mean logprob of the answer after its own prompt."""
        return float(self.own_N[self.sample.target_at_N >= self.begin].mean())


@once
def measured(session: Session) -> tuple[list[Row], Sequence[Packed]]:
    """The rows, and the micro-batches of the forward; none of these if the rows are the session's pair."""
    skip_if(session.is_scalar, "a reward model has no logprobs")
    # rows spread evenly over the data; of answers that are compared the best one is last
    train, index_S = session.train, flat_train(session).index_S
    chosen = index_S[np.linspace(0, index_S.size - 1, NUM_ROWS).astype(np.int64)]
    rows = dict.fromkeys(train.row_of(int(index)) for index in chosen)
    samples = [train[train.row(row).start : train.row(row).stop] for row in rows]
    compares = session.run.compares_answers
    if compares:
        samples = [sorted(some, key=lambda one: one.values["preference"]) for some in samples]
    cuts = [_cut(replace(it[-1], id=f"{at} {it[-1].id}")) for at, it in enumerate(samples)]
    # each with answers that are not its own, for as many tokens as there is time for
    left = math.inf
    if session.part == "quick":
        most = FLOPS.get(session.ranks.device.type, FLOPS["cuda"])
        left = most / (2.0 * architecture.num_weights(session.model))
    trees: list[Tree] = []
    for number, (own, begin) in enumerate(cuts):
        other, start = cuts[(number + 7) % len(cuts)]  # the next row is often about the same
        tree = [own]
        if _differ(own, begin, other, start):
            tree.append(_joined(own, begin, other, start, f"{other.id} elsewhere"))
        if compares:
            tree.append(_joined(own, begin, *_cut(samples[number][0]), f"{own.id} rejected"))
        left -= begin + sum(sample.num_tokens - begin for sample in tree)
        if left < 0:
            break
        trees.append(Tree(tuple(tree)))
    if left < 0 and len(trees) < FEWEST:
        alone = session.alone
        return [Row(it, it.num_tokens, alone[it.id].double().numpy()) for it in session.pair], ()
    packs = lay_out(trees, session.trainer.budget, session.trainer.policy)
    logps, found = logprobs(session, session.scorer, packs), []
    for own, begin in cuts[: len(trees)]:
        names = f"{own.id} elsewhere", f"{own.id} rejected"
        means = [float(logps[name].mean()) if name in logps else math.nan for name in names]
        found.append(Row(own, begin, logps[own.id], *means))
    return found, packs


def logprobs(session: Session, scorer: Scorer, packs: Sequence[Packed]) -> dict[str, FloatArray]:
    """Sample id -> the logprobs of its targets, by the policy or another model."""
    found = {}
    for packed in packs:
        with session.inference():
            logp_N = scorer(packed).logp_N.double().cpu()
        for row, name in enumerate(packed.sample_ids):
            found[name] = logp_N[packed.row_N == row].numpy()
    return found


def _cut(sample: Sample) -> tuple[Sample, int]:
    """The last answer of a sample, cut, after the end of its prompt; and where it begins."""
    begin = stop = sample.num_tokens
    if sample.target_at_N.size:
        answers = np.split(sample.target_at_N, np.flatnonzero(np.diff(sample.target_at_N) > 1) + 1)
        begin = int(answers[-1][0])
        stop = min(int(answers[-1][-1]) + 1, begin + ANSWER)
    ids_T, media = cut_out(sample, begin - PROMPT, stop)
    cut = Sample(sample.id, ids_T, np.empty(0, dtype=np.int64), np.empty(0), media)
    at_N = np.flatnonzero(is_text(cut)[1:]) + 1
    return replace(cut, target_at_N=at_N, weight_N=np.ones(at_N.size)), ids_T.size - (stop - begin)


def _joined(own: Sample, begin: int, other: Sample, start: int, name: str) -> Sample:
    """A prompt with another answer, whose tokens are the targets."""
    ids_T = np.concatenate([own.ids_T[:begin], other.ids_T[start:]])
    return Sample(name, ids_T, np.arange(begin, ids_T.size), np.ones(ids_T.size - begin), own.media)


def _differ(own: Sample, begin: int, other: Sample, start: int) -> bool:
    """Whether two rows differ in prompt and in answer, and have more than a few tokens of each."""
    mine, theirs = ids_with_pictures(own), ids_with_pictures(other)
    pairs = (mine[:begin], theirs[:start]), (mine[begin:], theirs[start:])
    return all(min(a.size, b.size) >= 4 and not np.array_equal(a, b) for a, b in pairs)


# -- what the model knows of the words alone


def interval(values: Sequence[float] | FloatArray) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    return float(np.mean(values)), 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


@once
def words(session: Session) -> tuple[FloatArray, FloatArray]:
    """Loss of the words of the rows, special tokens left out: the model's, and that of counting:

    p(token) = its share of the other rows' tokens, with half of one taken off each for all that are unseen
    """
    size = session.language.num_rows
    is_word_V = np.ones(size, dtype=bool)
    is_word_V[[index for index in session.tokenizer.added_tokens_decoder if index < size]] = False
    count_V = np.bincount(flat_train(session).ids_T, minlength=size) * is_word_V
    losses, counted = [], []
    for row in measured(session)[0]:
        others_V = (count_V - np.bincount(row.sample.ids_T, minlength=size)).clip(min=0) * is_word_V
        left = 0.5 * np.count_nonzero(others_V) or 1.0
        share_V = ((others_V - 0.5).clip(min=0) + left / size) / max(others_V.sum(), 1)
        target_N = row.sample.ids_T[row.sample.target_at_N]
        losses.append(-row.own_N[is_word_V[target_N]])
        counted.append(-np.log(share_V[target_N[is_word_V[target_N]]]))
    skip_if(sum(map(len, losses)) < FEWEST, "the rows have too few words")
    return np.concatenate(losses), np.concatenate(counted)


@once
def is_untrained(session: Session) -> bool:
    """Whether the weights are as they were drawn: the model is no better than counting, and in most matrices rows and
    columns are alike but for chance. Squared norms of n independent entries with kurtosis k vary by sqrt((k - 1) / n)
    of their mean; training makes some many times as large.
    """
    surplus, half = interval(np.subtract(*words(session)))
    ratios = []
    for parameter in architecture.layers(session.model)[-1].parameters():
        part = distributed.local(parameter).detach()
        is_matrix = part.ndim > 1 and part.is_floating_point() and min(part.shape[-2:]) >= 8
        if is_matrix and part.any():  # a new adapter's second matrix is 0
            squares = part.flatten(0, -2)[:4096].double().square()
            spread = float(squares.square().mean() / squares.mean().square()) - 1
            for axis in (0, 1):
                norms, size = squares.mean(axis), squares.shape[axis]
                ratios.append(float(norms.var() / norms.mean().square()) * size / spread)
    return surplus > -half and bool(ratios) and sorted(ratios)[len(ratios) // 2] < 2.0


@once
def is_lost(session: Session) -> bool:
    """Whether the model is worse than counting, and not far from taking all tokens for equally likely, or worse."""
    loss, uniform = float(words(session)[0].mean()), math.log(session.language.num_rows)
    surplus, half = interval(np.subtract(*words(session)))
    return loss > uniform or (loss > 0.6 * uniform and surplus > half)


# -- checks


@check("model.language", after=["attention.shared"])
def the_model_knows_the_language_of_the_rows(session: Session) -> Finding:
    """Does the model know the rows' language: are they likelier to it than by counting their tokens?

    Of prompts and answers, without special tokens, which a base may not know. A model that is worse than counting, and
    not far from taking all tokens for equally likely, is broken, or its tokenizer is another model's.
    """
    loss, by_counting = (float(loss_N.mean()) for loss_N in words(session))
    uniform = math.log(session.language.num_rows)
    numbers = (
        f"counting tokens gives {by_counting:.2f}, taking all for equally likely {uniform:.2f}"
    )
    if is_untrained(session):
        return passed(f"random weights, nothing was trained yet; {numbers}", loss, UNIT)
    if not is_lost(session):
        return passed(f"known; {numbers}", loss, UNIT)
    rows = measured(session)[0][:MAX_EXAMPLES]
    return warned(
        f"the model does not know these texts: {loss:.2f} nats a token; {numbers}",
        measured=(loss, UNIT),
        evidence=[_shown(session, row, float(row.own_N.mean())) for row in rows],
        remedy="see whether tokenizer and weights belong together, and whether the checkpoint is whole",
    )


@check("data.prompts", after=["model.language"])
def answers_belong_to_their_prompts(session: Session) -> Finding:
    """Do answers belong to their prompts: are they likelier after their own than after another row's?

    Not told of answers of a few tokens, or that are all much alike.
    """
    skip_if(session.is_generated, GENERATED)
    rows = _compared(session, "other")
    bags = [{*row.sample.ids_T[row.begin :].tolist()} for row in rows]
    alike = [len(a & b) / len(a | b) for a, b in zip(bags, [*bags[1:], bags[0]], strict=True)]
    skip_if(np.mean(alike) > 0.5, "the answers are much alike")
    what = "answers after their own prompts, less after another row's"
    remedy = (
        "see that each stands beside its own: columns sorted or joined apart, an offset of one row"
    )
    gains = [(row.answer - row.other, row) for row in rows]
    return _told(session, gains, what, lambda gain, half: gain < min(LITTLE, half), remedy)


@check("data.preferred", after=["model.language"])
def chosen_answers_are_no_less_like_text(session: Session) -> Finding:
    """Are chosen answers about as likely to the model, token by token, as the rejected ones?"""
    skip_if(not session.run.compares_answers, "the rows are no comparisons")
    gains = [(row.answer - row.rejected, row) for row in _compared(session, "rejected")]
    what = "chosen answers, less rejected ones"
    remedy = "chosen answers are far less like text: are their words whole, in order, in the right column?"
    return _told(session, gains, what, lambda gain, half: gain + half < -1.0, remedy)


@check("teacher.knows", after=["model.language"])
def the_teacher_knows_more_than_the_student(session: Session) -> Finding:
    """Is the teacher another model than the student, and are the rows likelier to it?"""
    teacher, teachers = session.scorer.teacher, dict(session.built.models.teachers)
    if isinstance(teacher, ModelTeacher):
        teachers = {"distill.teacher": teacher.scorer}
    skip_if(not teachers, "no teacher is a model in this process")
    rows, packs = measured(session)
    packs = packs or [pack(list(session.pair), ALONE)]
    scored = {name: logprobs(session, scorer, packs) for name, scorer in teachers.items()}
    for name, theirs in scored.items():
        what = f"the teacher {name}, less the student"
        gains = [(float((theirs[row.sample.id] - row.own_N).mean()), row) for row in rows]
        if all(abs(gain) < session.exact for gain, _ in gains):
            remedy = "a copy of the student has nothing to teach: name another model"
            return warned(f"{what}: the same logprobs", measured=(0.0, UNIT), remedy=remedy)
        skip_if(is_untrained(session) or is_lost(session), UNKNOWING)
        remedy = (
            "are teacher and student mixed up? One that knows more would be taught to know less"
        )
        finding = _told(session, gains, what, lambda gain, half: gain + half < -0.1, remedy)
        if finding.outcome == "warning":
            break
    return finding


def _compared(session: Session, value: str) -> list[Row]:
    """The rows that have this value. Skips the check if they are too few to conclude anything."""
    rows, packs = measured(session)
    skip_if(not packs, "it takes more than a second; taut check --full asks it")
    skip_if(is_untrained(session) or is_lost(session), UNKNOWING)
    rows = [row for row in rows if math.isfinite(getattr(row, value))]
    skip_if(len(rows) < FEWEST, "too few rows have a prompt and an answer that others have not")
    return rows


def _told(
    session: Session,
    gains: Sequence[tuple[float, Row]],
    what: str,
    is_wrong: Callable[[float, float], bool],
    remedy: str,
) -> Finding:
    """The finding about the mean of the rows' gains; of a warning those with the lowest are shown."""
    gain, half = interval([gain for gain, _ in gains])
    says = f"{what}: {gain:+.2f} +- {half:.2f} nats a token, of {len(gains)} rows"
    if not is_wrong(gain, half):
        return passed(says, gain, UNIT)
    worst = sorted(gains, key=lambda pair: pair[0])[:MAX_EXAMPLES]
    shown = [_shown(session, row, gain) for gain, row in worst]
    return warned(says, measured=(gain, UNIT), evidence=shown, remedy=remedy)


def _shown(session: Session, row: Row, number: float) -> str:
    """A row in a line of evidence."""
    parts = row.sample.ids_T[: row.begin].tolist(), row.sample.ids_T[row.begin :].tolist()
    texts = [str(session.tokenizer.decode(ids, skip_special_tokens=True)) for ids in parts]
    prompt, answer = (quoted(text.strip()[-80:]) for text in texts)
    return f"{short_place(row.sample.id.rpartition(' ')[2])}: {number:+.2f}: {prompt} -> {answer}"
