"""The words of answers: cut off, said twice, with the question before them, or in another model's marks.

A few such answers are in most data sets and are notes; one in twenty is a warning, as the model learns to write so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from taut.checks.chat_template import quoted, short_place
from taut.checks.data import Exchange, exchanges, first_rows
from taut.checks.registry import MAX_EXAMPLES, Finding, check, passed, skip_if, warned
from taut.checks.session import GENERATED, Session
from taut.data.rows.messages import Conversation

MANY = 0.05
"""Share of answers from which on a fault is a warning."""
MARKS = re.compile(
    r"<\|\w{2,30}\|>|<\uff5c[^<>\s]{2,40}\uff5c>|</?s>|<(?:eos|start_of_turn|end_of_turn)>|\[/?INST\]|<</?SYS>>"
    r"|</?tool_call>|<function[=_s]|\[TOOL_CALLS\]"
)
"""Marks by which templates end turns, write roles and calls."""
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
    lengths = session.train.lengths
    total = int((lengths.size_L * lengths.count_L).sum())
    if 2 * lengths.longest > total and len(session.train) >= 10:
        (index,) = session.train.longer_than(lengths.longest - 1, 1)
        return warned(
            f"one of {len(session.train):,} samples has {lengths.longest / total:.0%} of all tokens",
            measured=(lengths.longest, f"of {total:,} tokens"),
            evidence=[session.train.sample_id(index)],
            remedy="see whether that row is what it should be (a file that was pasted into a cell), or set "
            "data.max_length",
        )
    pairs = exchanges(session)
    skip_if(not pairs, "documents have no answers")
    found = {
        "stop in the middle of a sentence, at one length": _cut_off(session, pairs),
        "say the same several times": [pair for pair in pairs if _is_said_again(pair.answer)],
        "begin with the question": [pair for pair in pairs if _begins_with_question(pair)],
        "have another model's marks, or calls as text": _with_marks(session, pairs),
    }
    unit = f"of {len(pairs):,} answers"
    notes = [
        f"{len(some):,} {what}: {short_place(some[0].place)}: {quoted(some[0].answer)}"
        for what, some in found.items()
        if some
    ]
    what, worst = max(found.items(), key=lambda item: len(item[1]))
    if len(worst) < max(2, MANY * len(pairs)):
        return passed("they do", len(pairs), "answers", notes)
    return warned(
        f"{len(worst):,} {unit} {what}",
        measured=(len(worst), unit),
        evidence=[f"{short_place(it.place)}: {quoted(it.answer)}" for it in worst[:MAX_EXAMPLES]],
        notes=[note for note in notes if what not in note],
        remedy="the model learns to write so; correct these rows, or take them out",
    )


def _cut_off(session: Session, pairs: Sequence[Exchange]) -> list[Exchange]:
    """Answers that end with a letter and have the largest length of all, in characters, words or tokens, as many others
    do; or long ones of which most end so, where short ones do not.
    """

    def num_tokens(text: str) -> int:
        return len(session.tokenizer.encode(text, add_special_tokens=False))

    unended = [pair for pair in pairs if UNENDED.search(pair.answer.rstrip())]
    measures: tuple[tuple[Callable[[str], int], int], ...]
    measures = ((len, 80), (lambda text: len(text.split()), 20), (num_tokens, 32))
    for measure, least in measures if len(unended) > max(2, MANY * len(pairs)) else ():
        sizes = {pair.place: measure(pair.answer.strip()) for pair in pairs}
        most = max(sizes.values())
        at_most = [pair for pair in pairs if sizes[pair.place] >= most - 1]
        cut = [pair for pair in unended if sizes[pair.place] >= most - 1]
        if most >= least and len(cut) >= max(3, MANY * len(pairs), 0.8 * len(at_most)):
            return cut
    # cut at a length that is not known, as that of another tokenizer
    long = [pair for pair in pairs if len(pair.answer) >= 200]
    cut = [pair for pair in unended if len(pair.answer) >= 200]
    num_short, num_unended = len(pairs) - len(long), len(unended) - len(cut)
    is_cut = len(long) >= 8 and 2 * len(cut) > len(long)
    return cut if is_cut and num_short >= 8 and num_unended < 0.2 * num_short else []


def _is_said_again(answer: str) -> bool:
    """Whether about half of its runs of four words, or more, were there before."""
    words = answer.split()
    runs = [*zip(words, words[1:], words[2:], words[3:], strict=False)]
    return len(words) >= 12 and len({*runs}) <= 0.55 * len(runs)


def _begins_with_question(pair: Exchange) -> bool:
    question = pair.prompt.rstrip().rpartition("\n")[2].strip()
    answer = pair.answer.strip()
    return len(question) >= 12 and answer.startswith(question) and len(answer) > len(question) + 1


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
