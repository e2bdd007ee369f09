"""What only the model can say of the rows, from one forward on some of them that all these checks share.

Each row is a tree, of which the prompt is computed once; prompts are cut to their end, answers to their beginning:

    prompt, its own answer            every token but the first is a target
            another row's answer
            the rejected answer       of a pair
    the same with other pictures, and its own answer
    tools, call                       of rows with tools, whole: with their own tools, or with another row's
    call, result, answer              with their own results of calls, or with another row's

    gain of a row = mean logprob of the answer's tokens - that after what another row has (or of the rejected answer)

Before a run no more rows are taken than FLOPS allow; if these are too few, nothing is computed for these checks, and
``model.language`` reads the logprobs of the session's pair. What is found is a judgement, so a warning. Weights that
were never trained say nothing about rows, and are told by their statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle
from typing import NamedTuple

import numpy as np
from torch import nn

from taut.checks.chat_template import quoted, short_place
from taut.checks.data import flat_train
from taut.checks.registry import Finding, check, passed, skip_if, warned
from taut.checks.session import (
    GENERATED,
    NUM_ROWS,
    Session,
    all_targets,
    cut_out,
    from_picture,
    once,
)
from taut.checks.vision import StandIn
from taut.data.batching import lay_out
from taut.data.packing import ALONE, ids_with_pictures, pack, shared_prefixes
from taut.data.rows.messages import Conversation
from taut.errors import RenderError
from taut.models import architecture
from taut.models.scorer import Scorer
from taut.models.teacher import ModelTeacher
from taut.train import distributed
from taut.types import FloatArray, IntArray, Media, Packed, Sample, Tree

FLOPS = {"cpu": 1e11, "cuda": 1e14}
"""Operations that a forward may take before a run: less than a second."""
PROMPT, ANSWER = 96, 32
"""Maximum tokens of a prompt and of an answer."""
WITH_TOOLS, TOOL_TOKENS = 24, 512
"""Maximum rows with tools, the shortest, and tokens of one, which is not cut."""
FEWEST = 16
"""Fewest rows, or words, from which something is concluded."""
COPY = 0.01
"""Largest mean difference of a row's logprobs by which a copy is told that was saved in another precision."""
LITTLE = 0.25
"""A gain that answers have which belong to no prompt."""
UNIT = "nats a token"
UNKNOWING = "the model has random weights, or does not know the rows' language"
TOO_FEW = "too few rows have a prompt and an answer that others have not"
REMEDIES = {
    "prompts": "see that each stands beside its own: columns sorted or joined apart, an offset of one row",
    "pictures": "see that each row names its own, and that they are not blank; a model that is yet to learn to see "
    "shows this too",
    "tools": "see that each row has the tools that its calls are made with",
    "results of calls": "see that each row has the results of its own calls",
}
"""What is taken from another row, and what to do where that changes nothing."""
REJECTED = "rejected"


class Row(NamedTuple):
    """A row, with the logprobs of the tokens of its answer."""

    sample: Sample
    begin: int
    """Index of the first token of its answer."""
    own_N: FloatArray
    """Logprob of each target of the sample: all its text but the first token; of rows with tools the answer alone."""
    others: Mapping[str, float] = {}
    """Mean logprob of the answer with what another row has (a key of REMEDIES), or of the rejected answer."""

    @property
    def answer(self) -> float:
        """Mean logprob of the answer after its own prompt."""
        return float(self.own_N[self.sample.target_at_N >= self.begin].mean())


@once
def measured(session: Session) -> tuple[list[Row], Sequence[Packed]]:
    """The rows, and the micro-batches of the forward; none of these if the rows are the session's pair."""
    skip_if(session.is_scalar, "a reward model has no logprobs")
    trainer, left = session.trainer, math.inf
    if session.part == "quick":
        most = FLOPS.get(session.ranks.device.type, FLOPS["cuda"])
        left = most / (2.0 * architecture.num_weights(session.model))
    trees, begins = list[tuple[Sample, ...]](), list[int]()
    for begin, tree in chain(_with_others(session), _with_other_tools(session)):
        _, shared = shared_prefixes(tree, trainer.policy)
        left -= sum(sample.num_tokens for sample in tree) - sum(shared)
        if left < 0:
            break
        trees.append(tree)
        begins.append(begin)
    if left < 0 and len(trees) < FEWEST:
        alone = session.alone
        return [Row(it, it.num_tokens, alone[it.id].double().numpy()) for it in session.pair], ()
    packs = lay_out([Tree(tree) for tree in trees], trainer.budget, trainer.policy)
    logps, rows = logprobs(session, session.scorer, packs), []
    for (own, *_), begin in zip(trees, begins, strict=True):
        others = {what: f"{own.id} {what}" for what in (*REMEDIES, REJECTED)}
        means = {what: float(logps[it].mean()) for what, it in others.items() if it in logps}
        rows.append(Row(own, begin, logps[own.id], means))
    return rows, packs


def _with_others(session: Session) -> Iterator[tuple[int, tuple[Sample, ...]]]:
    """Rows spread evenly over the data, each with answers and pictures that are not its own; and where each answer
    begins.
    """
    index_S = flat_train(session).index_S
    chosen = index_S[np.linspace(0, index_S.size - 1, NUM_ROWS).astype(np.int64)]
    numbers = dict.fromkeys(session.train.row_of(int(index)) for index in chosen)
    rows = [session.answers(number) for number in numbers]
    cuts = [_cut(replace(row[-1], id=f"{at} {row[-1].id}")) for at, row in enumerate(rows)]
    for number, (own, begin) in enumerate(cuts):
        other, start = cuts[(number + 7) % len(cuts)]  # the next row is often about the same
        prompt_T, answer_T, tree = own.ids_T[:begin], own.ids_T[begin:], [own]
        mine, theirs = ids_with_pictures(own), ids_with_pictures(other)
        pairs = (mine[:begin], theirs[:start]), (mine[begin:], theirs[start:])
        if all(min(a.size, b.size) >= 4 and not np.array_equal(a, b) for a, b in pairs):
            tree.append(_followed(prompt_T, other.ids_T[start:], own.media, f"{other.id} prompts"))
        if own.media and not np.array_equal(answer_T, other.ids_T[start:]):
            tree.append(_with_pictures_of(own, begin, other))
        if session.run.compares_answers:
            worse, at = _cut(rows[number][0])
            tree.append(_followed(prompt_T, worse.ids_T[at:], own.media, f"{own.id} {REJECTED}"))
        yield begin, tuple(tree)


def _with_other_tools(session: Session) -> Iterator[tuple[int, tuple[Sample, ...]]]:
    """Calls after their own tools and after another row's; and answers after results of calls in the same way."""
    turns: dict[str, list[Conversation]] = {"tools": [], "results of calls": []}
    for row in (row for row in session.rows if isinstance(row, Conversation)):
        for index in row.learned:
            turn = replace(row, messages=row.messages[: index + 1], learned=(index,))
            if any(message["role"] == "tool" for message in turn.messages):
                turns["results of calls"].append(turn)
            elif row.tools and "tool_calls" in row.messages[index]:
                turns["tools"].append(turn)
    for what, found in turns.items():
        own = sorted(found, key=lambda turn: len(str(turn)))[:WITH_TOOLS]
        for number, turn in enumerate(own):
            other = own[(number + 7) % len(own)]
            results = cycle(it["content"] for it in other.messages if it["role"] == "tool")
            messages = tuple(
                {**it, "content": next(results)} if it["role"] == "tool" else it
                for it in turn.messages
            )
            tools = other.tools if what == "tools" else turn.tools
            names = {call["function"]["name"] for call in turn.messages[-1].get("tool_calls", ())}
            called = [tool for tool in turn.tools if tool["function"]["name"] in names]
            pair = turn, replace(turn, messages=messages, tools=tools)
            if pair[0] == pair[1] or (what == "tools" and any(tool in tools for tool in called)):
                continue  # the other row has the same
            try:
                cuts = [_cut(session.renderer.render(it)[-1], TOOL_TOKENS) for it in pair]
            except RenderError:
                continue
            answer_T, other_T = (cut.ids_T[begin:] for cut, begin in cuts)
            is_whole = max(begin for _, begin in cuts) < TOOL_TOKENS
            if is_whole and np.array_equal(answer_T, other_T):
                name, ends = f"{what} {number} {turn.place}", ("", f" {what}")
                tree = (
                    _followed(cut.ids_T[:begin], answer_T, cut.media, name + end)
                    for (cut, begin), end in zip(cuts, ends, strict=True)
                )
                yield cuts[0][1], tuple(tree)


def logprobs(session: Session, scorer: Scorer, packs: Sequence[Packed]) -> dict[str, FloatArray]:
    """Sample id -> the logprobs of its targets, by the policy or another model."""
    found = {}
    for packed in packs:
        with session.inference():
            logp_N = scorer(packed).logp_N.double().cpu()
        for row, name in enumerate(packed.sample_ids):
            found[name] = logp_N[packed.row_N == row].numpy()
    return found


def _cut(sample: Sample, most: int = PROMPT) -> tuple[Sample, int]:
    """The last answer of a sample, cut, after the end of its prompt, with the last picture; and where it begins."""
    begin = stop = sample.num_tokens
    if sample.target_at_N.size:
        answers = np.split(sample.target_at_N, np.flatnonzero(np.diff(sample.target_at_N) > 1) + 1)
        begin = int(answers[-1][0])
        stop = min(int(answers[-1][-1]) + 1, begin + ANSWER)
    ids_T, media = cut_out(sample, from_picture(sample, max(0, begin - most), begin), stop)
    return all_targets(sample.id, ids_T, media), ids_T.size - (stop - begin)


def _followed(prompt_T: IntArray, answer_T: IntArray, media: Sequence[Media], name: str) -> Sample:
    """A prompt with an answer, whose tokens are the targets."""
    ids_T = np.concatenate([prompt_T, answer_T])
    at_N = np.arange(prompt_T.size, ids_T.size)
    return Sample(name, ids_T, at_N, np.ones(at_N.size), tuple(media))


def _with_pictures_of(own: Sample, begin: int, other: Sample) -> Sample:
    """A prompt with the pictures of another row, or with blank ones where these are the same, and its own answer."""
    parts, media, at = list[IntArray](), list[Media](), 0
    for number, shown in enumerate(own.media):
        instead, source = replace(shown, picture=StandIn(shown.picture, is_blank=True)), own
        if other.media:
            another = other.media[number % len(other.media)]
            if another.picture.content != shown.picture.content:
                instead, source = another, other
        parts += [own.ids_T[at : shown.start], source.ids_T[instead.start : instead.stop]]
        stop = sum(part.size for part in parts)
        media.append(replace(instead, start=stop - parts[-1].size, stop=stop))
        at = shown.stop
    prompt_T = np.concatenate([*parts, own.ids_T[at:begin]])
    return _followed(prompt_T, own.ids_T[begin:], media, f"{own.id} pictures")


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
    """Whether the weights of the first and the last layer are as they were drawn, and the model is no better than
    counting.
    """
    surplus, half = interval(np.subtract(*words(session)))
    layers = architecture.layers(session.model)
    return surplus > -half and all(_is_drawn(layers[at].parameters()) for at in (0, -1))


def _is_drawn(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether in most matrices rows and columns are alike but for chance. Squared norms of n independent entries with
    kurtosis k vary by sqrt((k - 1) / n) of their mean; training makes some many times as large.
    """
    ratios = []
    for parameter in parameters:
        part = distributed.local(parameter).detach()
        is_matrix = part.ndim > 1 and part.is_floating_point() and min(part.shape[-2:]) >= 8
        if is_matrix and part.any():  # a new adapter's second matrix is 0
            squares = part.flatten(0, -2)[:4096].double().square()
            spread = float(squares.square().mean() / squares.mean().square()) - 1
            for axis in (0, 1):
                norms, size = squares.mean(axis), squares.shape[axis]
                ratios.append(float(norms.var() / norms.mean().square()) * size / spread)
    return bool(ratios) and sorted(ratios)[len(ratios) // 2] < 2.0


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
    rows = measured(session)[0][:3]
    return warned(
        f"the model does not know these texts: {loss:.2f} nats a token; {numbers}",
        measured=(loss, UNIT),
        evidence=[_shown(session, row, float(row.own_N.mean())) for row in rows],
        remedy="see whether tokenizer and weights belong together, and whether the checkpoint is whole",
    )


@check("data.prompts", after=["model.language"])
def answers_belong_to_their_prompts(session: Session) -> Finding:
    """Are answers likelier with their own prompts, pictures and tools than with another row's?

    Not told of answers of a few tokens, or that are all much alike, nor of pictures while the projector has random
    weights.
    """
    skip_if(session.is_generated, GENERATED)
    findings, why_not = [], TOO_FEW
    for what, remedy in REMEDIES.items():
        rows = _compared(session, what)
        bags = [{*row.sample.ids_T[row.begin :].tolist()} for row in rows]
        alike = [len(a & b) / len(a | b) for a, b in zip(bags, [*bags[1:], *bags[:1]], strict=True)]
        if len(rows) < FEWEST:
            continue
        if what == "prompts" and np.mean(alike) > 0.5:
            why_not = "the answers are much alike"
        elif what == "pictures" and _is_drawn(
            it
            for name, it in session.model.named_parameters()
            if architecture.part_of(name) == "projector"
        ):
            why_not = "the projector has random weights"
        else:
            says = f"answers with their own {what}, less with another row's"
            gains = [(row.answer - row.others[what], row) for row in rows]
            findings.append(
                _told(session, gains, says, lambda g, half: g <= min(LITTLE, half), remedy)
            )
    skip_if(not findings, why_not)
    wrong = [finding for finding in findings if finding.outcome == "warning"]
    notes = [finding.says for finding in findings[1:]]
    return wrong[0] if wrong else replace(findings[0], notes=tuple(notes))


@check("data.preferred", after=["model.language"])
def chosen_answers_are_no_less_like_text(session: Session) -> Finding:
    """Are chosen answers about as likely to the model, token by token, as the rejected ones?"""
    skip_if(not session.run.compares_answers, "the rows are no comparisons")
    rows = _compared(session, REJECTED)
    skip_if(len(rows) < FEWEST, TOO_FEW)
    gains = [(row.answer - row.others[REJECTED], row) for row in rows]
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
        if (most := max(abs(gain) for gain, _ in gains)) < max(COPY, session.exact):
            remedy = "a copy of the student has nothing to teach: name another model"
            says = f"{what}: the same logprobs, or nearly so"
            return warned(says, measured=(most, UNIT), remedy=remedy)
        skip_if(is_untrained(session) or is_lost(session), UNKNOWING)
        remedy = (
            "are teacher and student mixed up? One that knows more would be taught to know less"
        )
        finding = _told(session, gains, what, lambda gain, half: gain + half < -0.1, remedy)
        if finding.outcome == "warning":
            break
    return finding


def _compared(session: Session, what: str) -> list[Row]:
    """The rows that are compared in this. Skips the check if the model can say nothing of them."""
    rows, packs = measured(session)
    skip_if(not packs, "it takes more than a second; taut check --full asks it")
    skip_if(is_untrained(session) or is_lost(session), UNKNOWING)
    return [row for row in rows if what in row.others]


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
    worst = sorted(gains, key=lambda pair: pair[0])[:3]
    shown = [_shown(session, row, gain) for gain, row in worst]
    return warned(says, measured=(gain, UNIT), evidence=shown, remedy=remedy)


def _shown(session: Session, row: Row, number: float) -> str:
    """A row in a line of evidence."""
    parts = row.sample.ids_T[: row.begin].tolist(), row.sample.ids_T[row.begin :].tolist()
    texts = [str(session.tokenizer.decode(ids, skip_special_tokens=True)) for ids in parts]
    prompt, answer = (quoted(text.strip()[-80:]) for text in texts)
    return f"{short_place(row.sample.id.rpartition(' ')[2])}: {number:+.2f}: {prompt} -> {answer}"
