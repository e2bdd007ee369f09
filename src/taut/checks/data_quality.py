"""Contents of the rows: repeats, lengths, leaks between prompt and answer and between train and eval, the words of
answers, and labels of judged answers.

Judged data: of more than two compared answers the best and the worst are the pair, and a bounded number of rows, spread
evenly, is looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taut.checks.chat_template import quoted, short_place
from taut.checks.data import (
    HASH,
    Exchange,
    Flat,
    Hashes,
    exchanges,
    first_rows,
    flat,
    flat_train,
    hash_with_pictures,
    texts,
)
from taut.checks.registry import Finding, check, failed, passed, skip_if, warned
from taut.checks.session import GENERATED, Session, once
from taut.data.dataset import Dataset
from taut.data.label_noise import Lengths, PairIds, PairReport, examine_pairs
from taut.data.packing import ids_with_pictures
from taut.data.rows.messages import Conversation
from taut.data.store.shards import VALUE, LengthCounts
from taut.evals.statistics import wilson_interval
from taut.methods.method import RunConfig
from taut.models.load import context_length
from taut.types import FloatArray, IntArray, Sample

# -- repeats and lengths

OFTEN = 10
"""Number of occurrences of one row that is a warning."""


@check("data.repeats", after=["data.rows"])
def few_rows_repeat_others(session: Session) -> Finding:
    """Are rows different from one another, in more than case, white space and punctuation?

    A few repeats are in most data sets and pass, with examples. A warning is what changes the run: more than one row in
    a hundred, or one row ten times.
    """
    number, parts, looked_at = 0, list[str](), dict[str, None]()
    few, many = list[str](), list[str]()  # examples
    for split, rows in texts(session).items():
        # groups of rows that are equal but for case, white space and punctuation
        _, first_G, group_S, count_G = np.unique(
            rows.normal_S, return_index=True, return_inverse=True, return_counts=True
        )
        num_rows, num_repeats = len(rows.places), rows.normal_S.size - first_G.size
        num_near = num_repeats - (rows.exact_S.size - np.unique(rows.exact_S).size)
        most = int(count_G.max(initial=0))
        is_warning = num_repeats > 0.01 * num_rows or most >= OFTEN
        # the largest groups first
        for group in np.lexsort((first_G, -count_G))[:4]:
            if count_G[group] < 2:
                break
            first, second = np.flatnonzero(group_S == group)[:2]
            times = "twice" if count_G[group] == 2 else f"{count_G[group]:,} times"
            again = rows.places[second].rpartition("/")[2]
            line = f"{short_place(rows.places[first])} is there {times}, again in {again}"
            (many if is_warning else few).append(line)
        number += num_repeats
        looked_at[rows.looked_at] = None
        if num_repeats:
            says = f"{split}: {num_repeats:,} of {num_rows:,} rows repeat another"
            if num_near:
                says += f", {num_near:,} of them with other case, white space or punctuation"
            parts.append(says + (f", one is there {most:,} times" if most >= OFTEN else ""))
    says = (", ".join(parts) or "no row repeats another") + "".join(looked_at)
    unit = f"of {sum(len(rows.places) for rows in texts(session).values()):,} rows"
    if not many:
        return passed(says, number, unit, few)
    return warned(
        says,
        measured=(number, unit),
        evidence=many,
        remedy="take the repeated rows out: each counts as often as it is there; to weigh rows on purpose, give their "
        "file a weight",
    )


@check("data.lengths", after=["data.rows"])
def the_longest_sample_has_positions(session: Session) -> Finding:
    """Does the model have positions for the longest sample?

    Also the samples that have more tokens than a micro-batch may have.
    """
    context = context_length(session.language.config)
    for name, data in session.data:
        beyond = data.longer_than(context or np.inf, 4)
        if num_too_long := data.lengths.num_over(context or np.inf):
            return failed(
                f"{num_too_long:,} samples of {name} are longer than the model's {context:,} positions",
                measured=(data.lengths.longest, f"tokens of {context:,}"),
                evidence=[f"{data.sample_id(it)}: {data.length(it):,} tokens" for it in beyond],
                remedy=f"set data.max_length={context}, or write max_position_embeddings (and rope scaling) into the "
                "model's config.json if it was made for more",
            )
    # what fits the model may still exceed a micro-batch
    longest = max(data.lengths.longest for _, data in session.data)
    lengths, budget = session.train.lengths, session.run.batch.tokens_per_microbatch
    notes = [length_histogram(lengths)]
    if num_over := lengths.num_over(budget):
        notes.append(
            f"{num_over:,} longer than batch.tokens_per_microbatch={budget}: computed alone"
        )
    positions = f"the model has {context:,} positions" if context else "the model names no context"
    return passed(f"tokens of the longest sample; {positions}", longest, "tokens", notes)


def length_histogram(lengths: LengthCounts) -> str:
    """Counts of samples with up to 32, 64, ... tokens, on one line."""
    bin_L = np.maximum(4, np.ceil(np.log2(lengths.size_L))).astype(int)
    shares = []
    for exponent in np.unique(bin_L):
        share = int(lengths.count_L[bin_L == exponent].sum()) / int(lengths.count_L.sum())
        shares.append(f"to {2**exponent:,} {f'{share:.0%}' if share >= 0.01 else '<1%'}")
    return "samples by tokens: " + ", ".join(shares)


# -- leaks


@check("data.leak", after=["data.rows"])
def prompts_do_not_give_the_answer_away(session: Session) -> Finding:
    """Do prompts not give the answer away?

    A prompt has the very answer that is to be learned at its end, or after the same words in every row, as if the
    answer's column was made part of it. An answer somewhere in the prompt is what extractive tasks are made of, and a
    prompt that is nothing but an instruction and the answer is a task of copying: both pass.
    """
    pairs = exchanges(session)
    skip_if(not pairs, "no row has a prompt with a right answer")
    number, unit = len(pairs), f"of {len(pairs):,} rows"
    enough = max(4, 0.8 * number)
    # the prompt ends with the answer, or has it after the same words in every row
    at_end = [pair for pair in pairs if ends_with_answer(pair)]
    pairs_after: dict[str, list[Exchange]] = {}  # words -> pairs with the answer after them
    for pair in pairs:
        before, answer, after = pair.prompt.partition(pair.answer.strip())
        # 20 characters are not a whole line of the prompt by accident, nor are the 10 before them
        if len(answer) >= 20 and (not after or after.startswith("\n")):
            pairs_after.setdefault(before[-10:], []).append(pair)
    words, named = max(pairs_after.items(), key=lambda item: len(item[1]), default=("", []))
    after_words = f"the prompt has the whole answer after {words!r}"
    for what, some in ("the prompt ends with the whole answer", at_end), (after_words, named):
        if len(some) >= enough and not is_copying(some):
            shown = [f"{p.place}: ...{p.prompt[-60:]!r} -> {p.answer[:40]!r}" for p in some]
            return failed(
                f"in {len(some):,} of {number:,} rows {what}",
                measured=(shown, unit),
                remedy="the model would learn to repeat what it is never shown again; take the answer out of the "
                "prompt (its system message, data.columns)",
            )
    # anywhere else it is only counted
    somewhere = sum(pair.answer.strip() in pair.prompt for pair in pairs)
    says = f"{somewhere / number:.0%} of answers occur somewhere in their prompt"
    return passed(says, len(at_end), f"of {number:,} prompts end with it")


def ends_with_answer(pair: Exchange) -> bool:
    """Whether the prompt ends with the answer, as words of its own."""
    prompt, answer = pair.prompt.rstrip(), pair.answer.strip()
    before = prompt[: -len(answer)][-1:] if answer else ""
    return bool(answer) and prompt.endswith(answer) and not before.isalnum()


def is_copying(pairs: list[Exchange]) -> bool:
    """One answer for all, or one instruction for all around the answers."""
    answers = {pair.answer.strip() for pair in pairs}
    rest = Counter(
        "".join(pair.prompt.rpartition(pair.answer.strip())[::2]).strip() for pair in pairs
    )
    return len(answers) == 1 or 2 * rest.most_common(1)[0][1] > len(pairs)


GRAM = 13
COMPARED = 48
"""Samples for which the nearest one is looked for."""


@check("data.overlap", after=["data.rows"])
def eval_is_not_trained_on(session: Session) -> Finding:
    """Is held-out data that chooses the model not trained on?

    Equal samples, and those most of whose 13-grams of tokens occur in the training data. Equal is also what differs in
    case, white space and punctuation alone. Equal tokens are looked for in all of the training data, 13-grams in a
    bounded part. Grams that many training samples have (a system prompt, what the template writes) say nothing and
    are left out.

    Some equal samples are a warning: what is measured on them is not what unseen data would give. Similar ones are
    counted: questions about one passage are similar by nature. A warning is also that many are nearer to a training
    sample than training samples are to each other, as rows with other dates or in another order of words.
    """
    skip_if(session.eval is None, "there is no data.eval")
    look = flat(session.data[1][1], tokens=200_000, samples=2_000)
    train, held_out = texts(session)["train"], texts(session)["eval"]
    # equal as text, or equal as ids
    is_known = np.isin(held_out.normal_S, train.normal_S)
    known_places = {held_out.places[number] for number in np.flatnonzero(is_known)}
    is_equal_row = [look.data.row_place(int(index)) in known_places for index in look.index_S]
    is_equal = equal_samples(session.train, look) | np.array(is_equal_row)
    num_equal, unit = int(is_equal.sum()), f"of {look.num_samples:,} eval samples"
    names = list(map(look.name, np.flatnonzero(is_equal).tolist()))
    equal = f"{num_equal:,} {unit} are in data.train"
    metric = metric_on_eval(session.run)
    if metric and 2 * num_equal > look.num_samples:
        return failed(
            f"{equal}, and {metric} of them chooses the model to keep",
            measured=(names, unit),
            remedy="hold out rows that are not trained on, or unset eval.best",
        )
    # most of whose 13-grams are trained on
    is_similar = is_equal | similar_samples(flat_train(session), look)
    num_similar = int(is_similar.sum())
    some = "; of data.train the shards at hand looked at" if session.train.is_remote else ""
    says = f"{num_equal:,} equal, {num_similar:,} mostly in data.train{look.looked_at}{some}"
    if num_equal > 0.01 * look.num_samples:
        return warned(
            f"{equal}{look.looked_at}{some}",
            measured=(names, unit),
            remedy="hold out rows that are not trained on: what is measured on these says nothing of new ones",
            notes=[says],
        )
    near_S, usual_S = nearness(flat_train(session), look), nearness(flat_train(session))
    far = max(0.6, float(np.quantile([*usual_S.values()], 0.95)))
    copies = [name for name, near in near_S.items() if near > far]
    if len(copies) > max(2, 0.3 * len(near_S)):
        return warned(
            f"{len(copies)} of {len(near_S)} eval samples are nearer to one of data.train than those are to each other",
            measured=(copies, f"of {len(near_S)}"),
            remedy="hold out rows of their own: these seem to be made of training rows (other dates, names, order)",
            notes=[says],
        )
    return passed(says, float(num_similar), unit)


def nearness(train: Flat, look: Flat | None = None) -> dict[str, float]:
    """For some samples of ``look``, or of ``train``, the part of their tokens that the nearest other one of ``train``
    has: the sum over common tokens / the larger of both sums, a token counting as log(samples / samples that have it).
    """
    of, size = look or train, int(max(train.ids_T.max(), (look or train).ids_T.max())) + 1
    sample_D, token_D = np.divmod(np.unique(train.sample_T * size + train.ids_T), size)
    worth_V = np.log((train.num_samples + 1) / (np.bincount(token_D, minlength=size) + 1))
    total_S = np.bincount(sample_D, worth_V[token_D], train.num_samples)
    nearest = {}
    for number in np.unique(np.linspace(0, of.num_samples - 1, COMPARED).astype(np.int64)):
        own_V = np.zeros(size)
        own_T = of.ids_T[of.start_S[number] : of.start_S[number + 1]]
        own_V[own_T] = worth_V[own_T]
        common_S = np.bincount(sample_D, own_V[token_D], train.num_samples)
        common_S[number if look is None else []] = 0.0
        nearest[of.name(number)] = float((common_S / np.maximum(total_S, own_V.sum() + 1e-9)).max())
    return nearest


def metric_on_eval(run: RunConfig) -> str | None:
    """The metric on data.eval that selects the model to keep; None if there is none, or other data are measured."""
    best = run.eval.best
    return best if best == "loss" or run.eval.answers.data is None else None


def equal_samples(train: Dataset, look: Flat) -> NDArray[np.bool_]:
    """Mask of the samples that occur in ``train``, id for id, with the same pictures."""
    # few training samples have the lengths and eight tokens of one of these
    lengths_S = np.diff(look.start_S)
    keys_S = _sample_keys(look.ids_T, look.start_S[:-1], lengths_S)
    wanted: dict[bytes, list[int]] = {}
    for number, (start, stop) in enumerate(zip(look.start_S, look.start_S[1:], strict=False)):
        wanted.setdefault(look.seen_T[start:stop].tobytes(), []).append(number)
    candidates: list[int] = []  # training samples of the same lengths, equal in a few tokens
    for own, shard in train.local_shards():
        offsets = np.asarray(shard.arrays["offsets"])
        shard_lengths = np.diff(offsets)
        chosen = np.flatnonzero(np.isin(shard_lengths, np.unique(lengths_S)))
        keys = _sample_keys(shard.arrays["ids"], offsets[:-1][chosen], shard_lengths[chosen])
        candidates += (chosen[np.isin(keys, np.unique(keys_S))] + own.start).tolist()
    # those few are compared in full
    is_equal = np.zeros(lengths_S.size, dtype=bool)
    for index in candidates[:20_000]:
        sample = train[index]
        shown = [(media.start, int(media.picture.content[:16], 16)) for media in sample.media]
        seen_T = hash_with_pictures(sample.ids_T, shown)
        is_equal[wanted.pop(seen_T.tobytes(), [])] = True
        if not wanted:
            break
    return is_equal


def _sample_keys(ids_T: NDArray[np.int32], starts: IntArray, lengths: IntArray) -> Hashes:
    """A number for each sample, from its length and eight of its tokens."""
    key = lengths.astype(np.uint64)
    for part in range(8):
        key = key * HASH + np.asarray(ids_T[starts + (lengths - 1) * part // 7]).astype(np.uint64)
    return key


def similar_samples(train: Flat, look: Flat) -> NDArray[np.bool_]:
    """Samples of whose grams at least half occur in ``train``."""
    (hash_G, sample_G), (train_hashes, train_sample) = _grams(look), _grams(train)
    # in how many training samples each gram occurs
    known, inverse_G = np.unique(hash_G, return_inverse=True)
    if not known.size or not train_hashes.size:
        return np.zeros(look.num_samples, dtype=bool)
    is_known = np.isin(train_hashes, known)
    at = np.searchsorted(known, train_hashes[is_known])
    hits = np.unique(np.stack([at, train_sample[is_known]]), axis=1)
    times = np.bincount(hits[0], minlength=known.size)
    is_common = times > max(3, 0.05 * train.num_samples)  # all samples begin with these
    # of the other grams, at least half occur in training
    is_own_G = ~is_common[inverse_G]
    num_own = np.bincount(sample_G[is_own_G], minlength=look.num_samples)
    is_in_train_G = is_own_G & (times[inverse_G] > 0)
    num_in_train = np.bincount(sample_G[is_in_train_G], minlength=look.num_samples)
    return (num_own > 0) & (2 * num_in_train >= num_own)


def _grams(look: Flat) -> tuple[Hashes, IntArray]:
    """A hash of every run of GRAM tokens inside a sample, and the sample's number."""
    size = max(0, look.ids_T.size - GRAM + 1)
    hashes = np.zeros(size, dtype=np.uint64)
    for offset in range(GRAM):
        hashes *= HASH
        hashes += look.seen_T[offset : offset + size]
    sample_T = look.sample_T
    is_inside = sample_T[:size] == sample_T[GRAM - 1 :]
    return hashes[is_inside] * HASH, sample_T[:size][is_inside]


# -- answers by their words

MANY = 0.05
"""Share of answers from which on a fault is a warning."""
MARKS = re.compile(
    r"<\|\w{2,30}\|>|<\uff5c[^<>\s]{2,40}\uff5c>|</?s>|<(?:eos|start_of_turn|end_of_turn)>|\[/?INST\]|<</?SYS>>"
    r"|</?tool_call>|<function[=_s]|\[TOOL_CALLS\]|\n(?:### ?)?(?:Human|User|Assistant|Instruction|Response): "
)
"""Marks by which templates and transcripts end turns, write roles and calls."""
CALL = re.compile(r'\s*(?:```json\s*)?\{"name": ?"[\w.-]+", ?"(?:arguments|parameters)": ?\{')
"""A call as text."""
UNENDED = re.compile(r"(?:[^\W\d_]|[,-])$")
"""A letter or a comma: a sentence, a list of code, a table or a number ends otherwise."""


@check("data.answers", after=["data.rows"])
def answers_look_like_answers(session: Session) -> Finding:
    """Do the answers look like answers: whole, said once, without the question, in this model's own marks?

    Also whether one row has most of the tokens.
    """
    skip_if(session.is_generated, GENERATED)
    pairs, train, lengths = exchanges(session), session.train, session.train.lengths
    share = lengths.longest / int((lengths.size_L * lengths.count_L).sum())
    if share > 0.5 and len(train) >= 10:
        (index,) = train.longer_than(lengths.longest - 1, 1)
        says = f"one of {len(train):,} samples has {share:.0%} of all tokens"
        remedy = "see whether it is what it should be (a file pasted into a cell), or set data.max_length"
        return warned(says, evidence=[train.sample_id(index)], remedy=remedy)
    skip_if(not pairs, "documents have no answers")
    found = {
        "stop in the middle of a sentence, at one length": _cut_off(session, pairs),
        "say the same several times": [pair for pair in pairs if _is_said_again(pair.answer)],
        "begin or end with the question": [pair for pair in pairs if _has_question(pair)],
        "have another model's marks, or calls as text": _with_marks(session, pairs),
        "come with calls of functions that their row has not": _of_other_tools(session, pairs),
    }
    unit = f"of {len(pairs):,} answers"
    what, worst = max(found.items(), key=lambda item: len(item[1]))
    lines = [f"{short_place(pair.place)}: {quoted(pair.answer)}" for pair in worst]
    if len(worst) < max(2, MANY * len(pairs)):
        notes = [f"{len(worst)} {what}: {line}" for line in lines[:1]]
        return passed("they do", len(pairs), "answers", notes)
    remedy = "the model learns to write so; correct these rows, or take them out"
    return warned(f"{len(worst):,} {unit} {what}", measured=(lines, unit), remedy=remedy)


def _cut_off(session: Session, pairs: Sequence[Exchange]) -> list[Exchange]:
    """Answers that end with a letter and have the largest length of all, in characters, words or tokens, as many others
    do; or long ones of which most end so, where short ones do not.
    """
    few, encode = max(2, MANY * len(pairs)), session.tokenizer.encode
    unended = [UNENDED.search(pair.answer.rstrip()) is not None for pair in pairs]
    measures: list[tuple[Callable[[str], Sized], int]] = [(str, 80), (str.split, 20), (encode, 32)]
    for split, least in measures if sum(unended) > few else ():
        sizes = [len(split(pair.answer.strip())) for pair in pairs]
        at_most = [size >= max(least, max(sizes) - 1) for size in sizes]
        cut = [pair for pair, *is_both in zip(pairs, unended, at_most, strict=True) if all(is_both)]
        if len(cut) > max(few, 0.8 * sum(at_most)):
            return cut
    # cut at a length that is not known, as that of another tokenizer
    is_long = [len(pair.answer) >= 200 for pair in pairs]
    cut = [pair for pair, *is_both in zip(pairs, unended, is_long, strict=True) if all(is_both)]
    num_long, num_other = sum(is_long), sum(unended) - len(cut)
    is_cut = num_long >= 8 and 2 * len(cut) > num_long
    return cut if is_cut and num_other < 0.2 * (len(pairs) - num_long) else []


def _is_said_again(answer: str) -> bool:
    """Whether about half of its runs of four words, or more, were there before; or so of its last 24 words."""
    words = answer.split()
    texts = [words, words[-24:]] if len(words) >= 12 else []
    runs = [[*zip(some, some[1:], some[2:], some[3:], strict=False)] for some in texts]
    return any(len({*some}) <= 0.55 * len(some) for some in runs)


def _has_question(pair: Exchange) -> bool:
    """Whether an answer and more has the last line of the prompt at its beginning or end, or after a word there."""
    question = pair.prompt.rstrip().rpartition("\n")[2].strip()
    answer, size = pair.answer.strip(), len(question)
    is_there = question in answer[: size + 12] or question in answer[-size - 12 :]
    return size >= 12 and is_there and len(answer) > size + 1


def _with_marks(session: Session, pairs: Sequence[Exchange]) -> list[Exchange]:
    """Answers with marks that neither this template writes nor this tokenizer takes for its own (template.markup), or
    that are calls, where no row has any.
    """
    template = session.language.renderer.template
    own, written = template.control_tokens.of_turns, template.template
    rows = [row for row in first_rows(session) if isinstance(row, Conversation)]
    has_calls = any("tool_calls" in message for row in rows for message in row.messages)
    return [
        pair
        for pair in pairs
        if any(mark not in written and not own.search(mark) for mark in MARKS.findall(pair.answer))
        or (not has_calls and CALL.match(pair.answer))
    ]


def _of_other_tools(session: Session, pairs: Sequence[Exchange]) -> list[Exchange]:
    """Answers of rows that have tools, and call others."""
    places = set()
    for row in first_rows(session):
        if isinstance(row, Conversation) and row.tools:
            calls = [call for message in row.messages for call in message.get("tool_calls", ())]
            own = {tool["function"]["name"] for tool in row.tools}
            places |= {row.place for call in calls if call["function"]["name"] not in own}
    return [pair for pair in pairs if pair.place in places]


# -- labels of judged answers


@once
def pair_report(session: Session) -> PairReport:
    """Contradictions and biases among the labels of the training data."""
    num_rows = session.train.num_groups
    chosen = np.unique(np.linspace(0, num_rows - 1, min(num_rows, 10_000)).astype(np.int64))
    pairs = []
    for index in chosen.tolist():
        worse, *_, better = session.answers(index)
        begin, other = int(better.target_at_N[0]), int(worse.target_at_N[0])
        prompt_T = ids_with_pictures(better)[:begin]
        place = better.id.partition("#")[0]
        pairs.append(PairIds(place, prompt_T, better.ids_T[begin:], worse.ids_T[other:]))
    return examine_pairs(pairs, session.run.seed)


def _values(session: Session, name: str) -> FloatArray:
    """A value of every training sample, in their order."""
    skip_if(session.train.is_remote, "it would fetch every shard")
    shards = [entry for part in session.train.parts for entry in part.shards]
    return np.concatenate([entry.arrays[VALUE + name] for entry in shards]).astype(np.float64)


@check("data.pairs", after=["data.rows"])
def pairs_do_not_contradict_each_other(session: Session) -> Finding:
    """Do the answers of a pair differ, and no two pairs contradict each other?

    The same two answers with the opposite label; and how the lengths of answers go with the labels. Rows whose answers
    are the same are refused, or dropped if that is asked for; here those are counted. A preference for longer answers
    may be meant, so a bias is a warning, with its interval, and no failure.
    """
    skip_if(session.run.row_kind != "preference", "the rows are no comparisons")
    report, loaded = pair_report(session), session.train.report
    # the same answer twice in one row
    same = [row for row in loaded.dropped if "are the same, token for token" in row.reason]
    if same and 2 * len(same) > loaded.num_rows:
        return failed(
            f"{len(same):,} of {loaded.num_rows:,} rows have the same answer twice",
            measured=([row.place for row in same], "rows"),
            remedy="name the right columns in data.columns: chosen and rejected are to differ",
        )
    unit = f"of {report.num_pairs:,} pairs"
    # the same two answers with the opposite label
    number = len(report.contradictions)
    places = [f"{pair.place} and {pair.earlier}" for pair in report.contradictions]
    if report.is_many(number):
        return failed(
            f"{number:,} of {report.num_pairs:,} pairs contradict another: the same answers, the other way round",
            measured=(places, unit),
            remedy="keep one of each: pairs that contradict each other teach nothing, and labels like these were mixed "
            "up (were sides swapped while the data were joined?)",
        )
    if fault := _ties(session):
        return fault
    notes = []
    if same:
        notes.append(f"{len(same):,} rows with the same answer twice were dropped")
    if places:
        notes.append(f"{number:,} contradict another: {places[0]}")
    if report.repeats:
        notes.append(f"{len(report.repeats):,} {unit} repeat another")
    # how the lengths of answers go with the labels
    lengths = report.lengths
    if lengths.num_unequal and is_biased(lengths):
        side = "longer" if lengths.num_longer > lengths.num_unequal / 2 else "shorter"
        return warned(
            length_bias(lengths),
            measured=(lengths.accuracy, "of labels by length"),
            remedy=f"if that is not what makes an answer better, add pairs whose chosen answer is not the {side} one: "
            "length is the easiest thing to learn from these",
            notes=notes,
        )
    if lengths.num_unequal:
        notes.append(length_bias(lengths))
    return passed("answers differ, and labels agree", number, unit, notes)


def _ties(session: Session) -> Finding | None:
    """Many pairs whose answers have one score, or differ in case, white space and punctuation alone."""
    train = session.train

    def words(sample: Sample) -> str:
        answer = sample.ids_T[int(sample.target_at_N[0]) :].tolist()
        text = str(session.tokenizer.decode(answer, skip_special_tokens=True))
        return "".join(filter(str.isalnum, text.casefold()))

    chosen = np.unique(np.linspace(0, train.num_groups - 1, 200).astype(np.int64))
    rows = [session.answers(int(row)) for row in chosen]
    alike = [row[0].id for row in rows if words(row[0]) == words(row[1])]
    scores = [[sample.values.get("margin", 0.0) for sample in row] for row in rows]
    tied = [row[0].id for row, own in zip(rows, scores, strict=True) if not any(own)]
    tied = [] if len(tied) == len(rows) else tied  # no row has scores
    found = {"differ in punctuation alone": alike, "have the same score": tied}
    what, worst = max(found.items(), key=lambda item: len(item[1]))
    if len(worst) <= max(1, 0.1 * len(rows)):
        return None
    return warned(
        f"the answers of {len(worst)} of {len(rows)} pairs {what}",
        measured=([name.partition("#")[0] for name in worst], f"of {len(rows)} pairs"),
        remedy="take ties out: they have nothing to prefer",
    )


def is_biased(lengths: Lengths) -> bool:
    """Whether length alone predicts clearly more than half of the labels: 60% at the low end of the interval."""
    low, high = wilson_interval(lengths.num_longer, lengths.num_unequal)
    return max(low, 1 - high) > 0.6


def length_bias(lengths: Lengths) -> str:
    """Relation of length and label, with a 95% interval."""
    share = lengths.num_longer / lengths.num_unequal
    low, high = wilson_interval(lengths.num_longer, lengths.num_unequal)
    says = f"chosen is the longer in {share:.0%} of pairs ({low:.0%} to {high:.0%})"
    if is_biased(lengths):
        side = "longer" if share > 0.5 else "shorter"
        says += f": length alone tells {lengths.accuracy:.0%} of labels, and {side} answers may be what is learned"
    return says


@check("data.flips", after=["data.pairs"])
def few_labels_look_flipped(session: Session) -> Finding:
    """Do the labels of pairs follow one rule, without many that look flipped?

    A small model learns from most pairs which answers are preferred and is asked about the others.
    docs/preference.md says what it can see, and how often it was right. Exceptions to a rule look like flips, and
    published sets have up to 11% of them: those are a warning. A failure is a rate that no set was seen to have by
    nature.
    """
    skip_if(session.run.row_kind != "preference", "the rows are no comparisons")
    flips = pair_report(session).flips
    if flips.rate is None:
        return passed(f"cannot tell: {flips.reason}")
    interval, unit = f"{flips.low:.0%} to {flips.high:.0%}", f"of {flips.num_pairs:,} pairs"
    suspects = [f"{pair.place}: flipped with {pair.confidence:.0%}" for pair in flips.suspects]
    says = f"other pairs agree with {flips.accuracy:.0%} of labels; flipped: {interval}"
    if not flips.is_notable:
        return passed(says, flips.rate, unit)
    return (failed if flips.is_alarming else warned)(
        f"{flips.rate:.0%} of the labels, {len(flips.suspects):,} in number, look flipped; {says}",
        measured=(flips.rate, unit),
        evidence=suspects,
        remedy="look at these pairs: were chosen and rejected swapped in a part of the data? Turn them round, or leave "
        "them out; exceptions to a rule look like this too",
    )


@check("data.labels", after=["data.rows"])
def good_and_bad_answers_are_balanced(session: Session) -> Finding:
    """Are there good answers and bad ones?

        ratio = weight of the good * number of the good / (weight of the others * number of the others)

    KTO's paper (arXiv 2402.01306) advises 1 to 4/3. Another one is a warning: it may be meant.
    """
    skip_if(session.run.row_kind != "unpaired", "the rows are not labeled good or bad")
    is_good_S = _values(session, "label") > 0.5
    number = int(is_good_S.sum())
    others, unit = is_good_S.size - number, f"of {is_good_S.size:,} are good"
    if not number or not others:
        kind = "true" if number else "false"
        return failed(
            f"all {is_good_S.size:,} answers are labeled {kind}",
            measured=(number, unit),
            evidence=[session.train.sample_id(0)],
            remedy="one kind alone teaches no difference; add rows with the other label, or name the right column in "
            "data.columns",
        )
    loss: Any = session.run.loss()
    ratio = loss.desirable_weight * number / (loss.undesirable_weight * others)
    if 1 - 0.005 <= ratio <= 4 / 3 + 0.005:
        return passed("both kinds are there", number, unit)
    key, weight = ("desirable", others / number)  # a ratio of 1, the other weight left at 1
    if number >= others:
        key, weight = "undesirable", number / others
    return warned(
        f"weight times number is {ratio:.2f} : 1, and KTO's paper advises 1 to 1.33",
        measured=(number, unit),
        remedy=f"set kto.{key}_weight={weight:.3g}, unless one kind is to count more",
    )


@check("data.margins", after=["data.rows"])
def rows_have_the_margins_of_the_loss(session: Session) -> Finding:
    """Do the data have the margins that the loss reads?

    Without them every pair would have a margin of 0.
    """
    loss: Any = session.run.loss()
    skip_if("margin" not in loss.needs_values, "the loss reads no margins")
    margins_S = _values(session, "margin")
    nonzero = margins_S[margins_S != 0]
    key = f"{session.run.method}.margin"
    if not nonzero.size:
        return failed(
            f"{key}={loss.margin:g}, and no row has a margin",
            measured=(0, f"of {margins_S.size:,} answers"),
            evidence=[f"first: {session.train.sample_id(0)}"],
            remedy=f"name the column with data.columns (margin, or scores of both answers), or take {key} out",
        )
    return passed("rows have margins", float(np.abs(nonzero).mean()), "on average")
