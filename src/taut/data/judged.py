"""Which columns of a record mean what, where answers are judged (``preferences.py``).

    preference   a prompt; chosen and rejected, or a list of answers with scores or ranks; margin, or a score of each
                 ``chosen`` and ``rejected`` whose difference it then is
    unpaired     a row as SFT takes it, and label; or a pair, of which chosen is good and rejected is not
    scored       a row as SFT takes it, and score
    stepwise     a prompt; completions (the steps) and labels

The prompt of a preference, or of steps, is ``prompt`` (text or messages), ``conversations``, or ``instruction`` with
what alpaca has beside it. A preference may have none: then the answers are whole conversations, or whole texts, and
what they have in common is the prompt. Answers to messages are messages, one message, or the text of one. Every value
is checked, and an error names file and line, as in ``columns.py``, on which this builds. Columns in
``data.ignore_keys`` are not looked at.

Does not tokenise (``answers.py``), and does not judge: equal answers are found where their ids are known. Imported by
``dataset.py`` and ``attempts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from taut.data.columns import (
    ANSWER_LISTS,
    CHOSEN_SCORES,
    GRADES,
    PAIR,
    PROMPTS,
    REJECTED_SCORES,
    Columns,
    as_message,
    of_other_kind,
    read_named,
    read_prompt,
    read_row,
    renamed,
    with_media,
)
from taut.data.formats import (
    Completion,
    Conversation,
    Document,
    Row,
    did_you_mean,
    parse_if_text,
    read_conversation,
    read_fraction,
    read_label,
    read_list,
    read_number,
    read_text,
    shown,
    text_of,
)
from taut.data.placing import placed, refuse_beside_text, unmarked
from taut.data.preferences import Answers, AnyRow, Stepwise
from taut.data.presets import after_system, alpaca_prompt, turns_of
from taut.errors import DataError


class _Prompt(NamedTuple):
    """What the answers of a row answer: messages, a text, or what they have in common."""

    column: str
    turns: list[Any] | None = None
    text: str | None = None


def read_any(record: object, place: str, columns: Columns) -> AnyRow:
    """Validate one record of a file, as the kind of data asks for."""
    if columns.kind == "sft":
        return read_row(record, place, columns)
    if columns.kind == "prompt":
        return read_prompt(record, place, columns)
    named = renamed(record, place, columns)
    unused = set(columns.ignore_keys) - set(columns.mapping)
    named = {name: value for name, value in named.items() if name not in unused}
    named = with_media(named, place, columns)
    return READERS[columns.kind](named, place, columns)


def _read_preference(named: dict[str, Any], place: str, columns: Columns) -> Answers:
    lists = [name for name in ANSWER_LISTS if name in named]
    grades = [name for name in GRADES if name in named]
    is_pair = all(name in named for name in PAIR)
    values: dict[str, tuple[float, ...]]
    if is_pair and lists and grades:
        raise DataError(
            f"{place}: the row has chosen and rejected, and {lists[0]} with {grades[0]}; expected one of them; name "
            f"the others in {columns.prefix}ignore_keys"
        )
    if is_pair:
        given = {name: named[name] for name in PAIR}
        values = {"preference": (1.0, 0.0), "margin": (_margin(named, place, columns), 0.0)}
    elif lists or grades:
        given, values = _read_list(named, place, columns, lists, grades)
    else:
        raise _without(named, place, columns, "chosen and rejected, or answers and scores", PAIR)
    return Answers(place, _read_answers(named, place, columns, given), values)


def _read_list(
    named: dict[str, Any], place: str, columns: Columns, lists: Sequence[str], grades: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """A list of answers, and what they are worth. Ranks begin with the best; of scores the highest is."""
    for found, wanted in ((lists, ANSWER_LISTS), (grades, GRADES)):
        if len(found) != 1:
            names = ", ".join(wanted)
            has = " and ".join(found) or f"none of {names}"
            raise DataError(
                f"{place}: the row has {has}; expected one of {names}; set {columns.prefix}columns"
            )
    answers = read_list(named[lists[0]], f"{place}: {lists[0]}")
    marks = read_list(named[grades[0]], f"{place}: {grades[0]}")
    worth = tuple(read_number(it, f"{place}: {grades[0]}[{i}]") for i, it in enumerate(marks))
    if len(answers) != len(worth) or len(answers) < 2:
        raise DataError(
            f"{place}: {lists[0]} has {len(answers)} and {grades[0]} {len(worth)}; expected as many of both, at least "
            "two"
        )
    given = {f"{lists[0]}[{index}]": answer for index, answer in enumerate(answers)}
    if grades[0] == "ranks":
        return given, {"preference": tuple(-rank for rank in worth), "margin": (0.0,) * len(worth)}
    return given, {"preference": worth, "margin": worth}


def _margin(named: Mapping[str, Any], place: str, columns: Columns) -> float:
    """By how much the chosen answer is better: the margin, else the difference of the scores, else 0."""
    if "margin" in named:
        return read_number(named["margin"], f"{place}: margin")
    scores = []
    for names in (CHOSEN_SCORES, REJECTED_SCORES):
        found = [name for name in names if name in named]
        if len(found) > 1:
            raise DataError(
                f"{place}: the row has {' and '.join(found)}; expected one of them; name the other in "
                f"{columns.prefix}ignore_keys"
            )
        scores += [read_number(named[name], f"{place}: {name}") for name in found]
    return scores[0] - scores[1] if len(scores) == 2 else 0.0


def _read_unpaired(named: dict[str, Any], place: str, columns: Columns) -> Answers:
    if "label" in named:
        label = read_label(named.pop("label"), f"{place}: label")
        answer = _judged_row(named, place, columns)
        if isinstance(answer, Document):
            raise DataError(
                f"{place}: the row is a text without a prompt; expected messages, or prompt and completion; set "
                f"{columns.prefix}columns"
            )
        return Answers(place, (answer,), {"label": (label,)})
    if all(name in named for name in PAIR):
        given = {name: named[name] for name in PAIR}
        answers = _read_answers(named, place, columns, given)
        return Answers(place, answers, {"label": (1.0, 0.0)})
    raise _without(named, place, columns, "a label, or chosen and rejected", ("label",))


def _read_scored(named: dict[str, Any], place: str, columns: Columns) -> Answers:
    if "score" not in named:
        raise _without(named, place, columns, "a score", ("score",))
    score = read_number(named.pop("score"), f"{place}: score")
    return Answers(place, (_judged_row(named, place, columns),), {"score": (score,)})


def _judged_row(named: dict[str, Any], place: str, columns: Columns) -> Row:
    """A row of SFT of which what follows the last user message, or the prompt, is judged."""
    row = read_named(named, place, columns)
    if not isinstance(row, Conversation):
        return row
    asked = [index for index, message in enumerate(row.messages) if message["role"] == "user"]
    return replace(row, learned=tuple(i for i in row.learned if i > max(asked, default=-1)))


def _read_stepwise(named: dict[str, Any], place: str, columns: Columns) -> Stepwise:
    missing = [name for name in ("completions", "labels") if name not in named]
    prompt = _Prompt("") if missing else _prompt(named, place, columns)
    if not prompt.column:
        missing = [*missing, "prompt"]
        raise _without(named, place, columns, "prompt, completions and labels", missing)
    items = read_list(named["completions"], f"{place}: completions")
    steps = tuple(read_text(item, f"{place}: completions[{i}]") for i, item in enumerate(items))
    marks = read_list(named["labels"], f"{place}: labels")
    labels = tuple(read_fraction(mark, f"{place}: labels[{i}]") for i, mark in enumerate(marks))
    if not steps or len(steps) != len(labels):
        raise DataError(
            f"{place}: completions has {len(steps)} steps and labels has {len(labels)}; expected one label a step, and "
            "at least one"
        )
    if prompt.text is not None and columns.apply_chat_template:
        prompt = _Prompt(prompt.column, turns=[as_message("user", prompt.text)])
    if prompt.text is None:
        joined, spans = _join(steps, "", columns.step_separator)
        answer: Row = _after(prompt, joined, "completions", named, place, columns)
    else:
        _refuse_beside_text(named, place, columns)
        gap = "" if prompt.text.endswith(columns.step_separator) else columns.step_separator
        joined, spans = _join(steps, gap, columns.step_separator)
        answer = Completion(place, prompt.text, joined)
    return Stepwise(place, answer, spans, labels)


def _join(
    steps: Sequence[str], before: str, separator: str
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of all steps, and where each lies in it."""
    spans, at = [], len(before)
    for step in steps:
        spans.append((at + len(step) - len(step.lstrip()), at + len(step.rstrip())))
        at += len(step) + len(separator)
    return before + separator.join(steps), tuple(spans)


READERS: dict[str, Callable[[dict[str, Any], str, Columns], Answers | Stepwise]] = {
    "preference": _read_preference,
    "unpaired": _read_unpaired,
    "scored": _read_scored,
    "stepwise": _read_stepwise,
}


def _prompt(named: dict[str, Any], place: str, columns: Columns) -> _Prompt:
    fitting = [name for name, column in PROMPTS.items() if column in named]
    if columns.format != "auto":
        column = PROMPTS.get(columns.format)
        if column is not None and column not in named:
            raise DataError(
                f"{place}: the row is {shown(named)}, without {column}; expected it (format {columns.format}); set "
                f"{columns.prefix}columns"
            )
        fitting = [columns.format] if column else []
    mapped = [name for name in fitting if PROMPTS[name] in columns.mapping]
    fitting = mapped or fitting
    if len(fitting) > 1:
        raise DataError(
            f"{place}: {' and '.join(PROMPTS[name] for name in fitting)} may each be the prompt; expected one; set "
            f"{columns.prefix}format"
        )
    if not fitting:
        return _Prompt("")
    column = PROMPTS[fitting[0]]
    if column == "prompt" and isinstance(named[column], str):
        return _Prompt(column, text=read_text(named[column], f"{place}: prompt"))
    if column == "instruction":
        turns: object = alpaca_prompt(named, place)
    else:
        turns = after_system(named, place, turns_of(named[column], f"{place}: {column}"))
    turns = placed(turns, named, place, needs_marks=column == "conversations")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: {column} is {shown(turns)}; expected a list of messages")
    return _Prompt(column, turns=turns)


def _read_answers(
    named: dict[str, Any], place: str, columns: Columns, given: Mapping[str, Any]
) -> tuple[Row, ...]:
    """The answers with their prompt, each with a place of its own."""
    prompt = _prompt(named, place, columns)
    if columns.format == "messages":
        given = {name: parse_if_text(value, f"{place}: {name}") for name, value in given.items()}
    rows: list[Row]
    are_texts = all(isinstance(value, str) for value in given.values())
    if columns.apply_chat_template and are_texts and prompt.turns is None:
        if prompt.text is None:
            raise DataError(
                f"{place}: {' and '.join(given)} are whole texts, of which {columns.prefix}apply_chat_template cannot "
                "tell what the user says; expected a column prompt; add it, or take the key out"
            )
        prompt = _Prompt(prompt.column, turns=[as_message("user", prompt.text)])
    if prompt.turns is not None:
        rows = [_after(prompt, it, name, named, place, columns) for name, it in given.items()]
    elif are_texts and columns.format != "messages":
        rows = list(_texts(prompt.text, named, place, columns, given))
    elif all(isinstance(value, list) for value in given.values()) and columns.format != "text":
        rows = list(_whole_conversations(prompt.text, named, place, columns, given))
    else:
        found = " and ".join(f"{name} is {shown(value)}" for name, value in given.items())
        raise DataError(f"{place}: {found}; expected texts only, or lists of messages only")
    return tuple(replace(row, place=f"{place}#{number}") for number, row in enumerate(rows, 1))


def _texts(
    prompt: str | None,
    named: dict[str, Any],
    place: str,
    columns: Columns,
    given: Mapping[str, Any],
) -> list[Completion] | list[Document]:
    """Answers to a text, or whole texts."""
    _refuse_beside_text(named, place, columns)
    texts = [read_text(value, f"{place}: {name}") for name, value in given.items()]
    if prompt is None:
        return [Document(place, text) for text in texts]
    return [Completion(place, prompt, text) for text in texts]


def _refuse_beside_text(named: Mapping[str, Any], place: str, columns: Columns) -> None:
    refuse_beside_text(named, place, columns.prefix)
    for name in ("system", "tools"):
        if named.get(name):
            raise DataError(
                f"{place}: {name} is there beside plain texts, which have no chat template; expected messages; give "
                f"the prompt as messages, or as instruction, or name {name} in {columns.prefix}ignore_keys"
            )


def _after(
    prompt: _Prompt,
    value: object,
    name: str,
    named: Mapping[str, Any],
    place: str,
    columns: Columns,
) -> Conversation:
    """The prompt's messages and an answer to them: messages, one message, or the text of one."""
    assert prompt.turns is not None, f"{place}: a prompt of messages"
    if isinstance(value, str):
        value = {"role": "assistant", "content": read_text(value, f"{place}: {name}")}
    answer = turns_of([value] if isinstance(value, dict) else value, f"{place}: {name}")
    if not isinstance(answer, list) or not answer:
        raise DataError(
            f"{place}: {name} is {shown(answer)}; expected the answer: messages, one, or its text"
        )
    first, size = answer[0], len(prompt.turns)
    role = first.get("role") if isinstance(first, dict) else None
    if role in ("user", "system"):
        raise DataError(
            f"{place}: {name} begins with a {role} message; expected what answers {prompt.column}; if it is a whole "
            f"conversation, name {prompt.column} in {columns.prefix}ignore_keys"
        )
    return read_conversation(
        [*prompt.turns, *answer],
        place,
        named.get("tools"),
        ignore=columns.ignore_keys,
        first_learned=size,
        column=f"{prompt.column}+{name}",
        finding=columns.finding,
    )


def _whole_conversations(
    prompt: str | None,
    named: dict[str, Any],
    place: str,
    columns: Columns,
    given: Mapping[str, Any],
) -> list[Conversation]:
    """Conversations whose common leading messages are the prompt. A prompt given as text too must be among them."""
    rows = [
        read_conversation(
            placed(after_system(named, place, turns_of(value, f"{place}: {name}")), named, place),
            place,
            named.get("tools"),
            ignore=columns.ignore_keys,
            column=name,
            finding=columns.finding,
        )
        for name, value in given.items()
    ]
    steps = zip(*(row.messages for row in rows), strict=False)
    size = sum(1 for _ in takewhile(lambda step: all(it == step[0] for it in step), steps))
    if all(len(row.messages) == size for row in rows):
        size = max(
            rows[0].learned, default=size
        )  # equal ones: what to do with them is not decided here
    shared = rows[0].messages[:size]
    said = [text_of(it["content"]).strip() for it in shared]
    if prompt is not None and not {prompt.strip(), unmarked(prompt).strip()} & set(said):
        raise DataError(
            f"{place}: prompt is {shown(prompt)}, and none of the messages that the answers have in common says so; "
            "expected the same; if it is what the user says, set "
            f"{columns.prefix}columns='{{instruction = \"prompt\"}}'; if it is something else, name it in "
            f"{columns.prefix}ignore_keys"
        )
    for name, row in zip(given, rows, strict=True):
        following = [message["role"] for message in row.messages[size:]]
        if not size or following[:1] != ["assistant"]:
            after = f"goes on with a message of the {following[0]}" if following else "ends there"
            raise DataError(
                f"{place}: {' and '.join(given)} have {size or 'no'} leading messages in common, and {name} {after}; "
                "expected one prompt, and an assistant message after it in each; correct the row"
            )
    return [replace(row, learned=tuple(i for i in row.learned if i >= size)) for row in rows]


def _without(
    named: Mapping[str, Any], place: str, columns: Columns, wanted: str, names: Sequence[str]
) -> DataError:
    """The error of a row that has not the columns its kind asks for."""
    missing = next(name for name in names if name not in named)
    other = of_other_kind(named, columns.kind)
    return DataError(
        f"{place}: the row is {shown(named)}; expected {wanted} ({columns.kind} data); {other}name your columns, as "
        f"in {columns.prefix}columns='{{{missing} = \"...\"}}'{did_you_mean(missing, named)}"
    )
