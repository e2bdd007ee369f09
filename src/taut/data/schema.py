"""What a row is once validated where its answers are judged: compared with each other, good or bad, scored, or
labelled step by step.

    preference   answers to one prompt, of which some are better: ``preference`` orders them, and the difference of
                 two ``margin`` says by how much
    unpaired     an answer and whether it is a good one: ``label`` 1 or 0
    scored       an answer and its ``score``
    stepwise     an answer in steps, each with a ``label`` from 0 to 1

Every answer is a row as SFT reads it. Does not know columns (``judged.py``) or ids (``answers.py``). Imported by the
rest of ``taut.data`` and by whoever asks for rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

from taut.data.images import placed, refuse_beside_text, unmarked, usable
from taut.data.json_io import did_you_mean, shown
from taut.data.messages import (
    HERE,
    PICTURES,
    VIDEOS,
    Completion,
    Conversation,
    Document,
    Finding,
    Message,
    Row,
    parse_if_text,
    read_call,
    read_conversation,
    read_fraction,
    read_label,
    read_list,
    read_number,
    read_text,
    text_of,
)
from taut.errors import ConfigError, DataError
from taut.vision.content import ImagesConfig

Kind: TypeAlias = Literal["sft", "preference", "unpaired", "scored", "stepwise", "prompt"]
"""What a row says of its answers; sft: nothing; prompt: the model is to answer, and a reward judges."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to one prompt, each of which becomes a sample."""

    place: str
    answers: tuple[Row, ...]
    """Each with its whole prompt; of conversations only what answers it is learned. Documents: whole texts, whose
    common beginning is the prompt."""
    values: Mapping[str, tuple[float, ...]]
    """What is said of each: preference and margin, or label, or score."""

    @property
    def is_compared(self) -> bool:
        """Whether the answers only mean something together."""
        return "preference" in self.values


@dataclass(frozen=True, slots=True)
class Stepwise:
    """An answer whose steps are labelled."""

    place: str
    answer: Row
    """The prompt and all steps, joined: in the last message, or the completion."""
    steps: tuple[tuple[int, int], ...]
    """Where each lies in that text, without white space around it: [start, stop)."""
    labels: tuple[float, ...]


Judged: TypeAlias = Answers | Stepwise
AnyRow: TypeAlias = Row | Judged


def best_row(row: AnyRow) -> Row:
    """The best answer as a row of SFT; what is one already, as it is. Of equals the first."""
    if isinstance(row, Stepwise):
        return row.answer
    if not isinstance(row, Answers):
        return row
    judgement = next(iter(row.values.values()))
    return row.answers[judgement.index(max(judgement))]


# --------------------------------------------------------------------------------------------------
# The presets: conversations of from and value (sharegpt), and instructions (alpaca), as messages.
#
# Messages are not validated here (``formats.py``). Imported by ``columns.py`` and ``judged.py``.

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def turns_of(value: object, where: str) -> object:
    """Messages as they are given, those of sharegpt renamed; not validated."""
    turns = parse_if_text(value, where)
    if isinstance(turns, list):
        first = turns[0] if turns else None
        if isinstance(first, dict) and "from" in first and "role" not in first:
            turns = [_from_sharegpt(turn, f"{where}[{i}]") for i, turn in enumerate(turns)]
            turns = [turn for turn in turns if turn != {"role": "system", "content": ""}]
    return turns


def after_system(named: dict[str, Any], place: str, turns: object) -> object:
    """The same with the system column before them."""
    if not isinstance(turns, list):
        return turns
    system = _system(named, place)
    if system and turns and isinstance(turns[0], dict) and turns[0].get("role") == "system":
        raise DataError(f"{place}: a system column and a system message; expected one of them")
    return [*system, *turns]


def _from_sharegpt(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where} is {shown(turn)}; expected an object with from and value")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        hint = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
        raise DataError(
            f"{where}.from is {shown(speaker)}; expected one of {', '.join(SHAREGPT_ROLES)}{hint}"
        )
    value = turn.get("value")
    if not isinstance(value, str):
        raise DataError(f"{where}.value is {shown(value)}; expected a string")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    message: Message = {"role": SHAREGPT_ROLES[speaker], "content": value, **rest}
    if speaker == "function_call":
        calls = parse_if_text(value, f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        message["content"] = ""
        message["tool_calls"] = [read_call(call, f"{where}.value") for call in calls]
    return message


def _system(named: dict[str, Any], place: str) -> list[Message]:
    """The system column as a message; empty means none, as these data sets mean it."""
    system = named.get("system", "")
    if not isinstance(system, str):
        raise DataError(f"{place}: system is {shown(system)}; expected a string")
    return [{"role": "system", "content": system}] if system.strip() else []


def alpaca_prompt(named: dict[str, Any], place: str) -> list[Message]:
    """One user message of instruction, newline, input; earlier exchanges from ``history``."""
    messages = _system(named, place)
    history = parse_if_text(named.get("history") or [], f"{place}: history")
    if not isinstance(history, list):
        raise DataError(
            f"{place}: history is {shown(history)}; expected a list of [question, answer]"
        )
    for index, exchange in enumerate(history):
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise DataError(
                f"{place}: history[{index}] is {shown(exchange)}; expected [question, answer]"
            )
        messages.append(
            {"role": "user", "content": read_text(exchange[0], f"{place}: history[{index}][0]")}
        )
        messages.append(
            {
                "role": "assistant",
                "content": read_text(exchange[1], f"{place}: history[{index}][1]"),
            }
        )
    question = read_text(named["instruction"], f"{place}: instruction")
    extra = named.get("input", "")
    if not isinstance(extra, str):
        raise DataError(f"{place}: input is {shown(extra)}; expected a string")
    question = f"{question}\n{extra}" if extra.strip() else question
    return [*messages, {"role": "user", "content": question}]


# --------------------------------------------------------------------------------------------------
# Which columns of a record mean what: recognition of formats, column mapping, and the alpaca and
# sharegpt presets.
#
#     messages      messages; tools, system            (a list of role/content, or of from/value)
#     sharegpt      conversations; tools, system       (the same, under its usual name)
#     completion    prompt, completion; tools          (both texts, or both lists of messages)
#     alpaca        instruction, output; input, system, history
#     text          text
#
# The same columns without the answer make a prompt (``read_prompt``). A record that fits none, or more
# than one, is an error that names the columns found. A mapping names taut's column and the one in the
# data: ``data.columns = {messages = "dialog"}``; formats whose columns are mapped take precedence.
# Pictures and videos have columns beside messages: ``placing.py``. Rows whose answers are judged
# (``kind``) have columns of their own: ``judged.py``. Imported by it, ``dataset.py`` and
# ``prompts.py``.

Format: TypeAlias = Literal["auto", "messages", "sharegpt", "completion", "alpaca", "text"]

REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
PROMPT_REQUIRED = {**REQUIRED, "completion": ("prompt",), "alpaca": ("instruction",)}
"""What a row needs to be a prompt."""
COLUMNS_OF_MEDIA = (*PICTURES, *VIDEOS)
OPTIONAL = ("tools", "system", "input", "history", *COLUMNS_OF_MEDIA)
COLUMN_NAMES = (*(name for names in REQUIRED.values() for name in names), *OPTIONAL)
READS: dict[str, tuple[str, ...]] = {
    "messages": ("tools", "system", *COLUMNS_OF_MEDIA),
    "sharegpt": ("tools", "system", *COLUMNS_OF_MEDIA),
    "completion": ("tools", *COLUMNS_OF_MEDIA),
    "alpaca": ("input", "system", "history", *COLUMNS_OF_MEDIA),
    "text": (),
}
"""What each format reads where it is there. Tools go with messages, not with a text and its completion."""
CHOSEN_SCORES, REJECTED_SCORES = (
    ("chosen_score", "score_chosen"),
    ("rejected_score", "score_rejected"),
)
ANSWER_LISTS, GRADES = ("answers", "responses", "completions"), ("scores", "ranks")
PROMPTS = {"completion": "prompt", "sharegpt": "conversations", "alpaca": "instruction"}
"""The column of a preference's prompt, by format; the other formats have none."""
PAIR = ("chosen", "rejected")
JUDGED_NAMES: dict[Kind, tuple[str, ...]] = {
    "sft": (),
    "preference": (*PAIR, "margin", *CHOSEN_SCORES, *REJECTED_SCORES, *ANSWER_LISTS, *GRADES),
    "unpaired": ("label", *PAIR),
    "scored": ("score",),
    "stepwise": ("completions", "labels"),
    "prompt": (),
}
"""The columns that each kind of data has beside those above."""
TRAINED_BY: dict[Kind, str] = {
    "preference": "taut dpo, orpo, simpo, cpo or reward",
    "stepwise": "taut reward with reward.loss=process",
    "unpaired": "taut kto",
    "scored": "taut reward with reward.loss=regression",
    "sft": "taut sft",
    "prompt": "taut grpo or ppo",
}
"""What trains on rows of a kind, for those that are given rows of another."""


@dataclass(frozen=True, slots=True)
class Columns:
    """How the records of one source are to be read."""

    format: Format = "auto"
    mapping: Mapping[str, str] = field(default_factory=dict)
    """taut's column -> the data's column."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns, that may be there and are not used."""
    prefix: str = field(default="data.", repr=False)
    """What stands before these names in the configuration, for messages."""
    kind: Kind = field(default="sft", repr=False)
    """What a row says of its answers."""
    step_separator: str = field(default="\n", repr=False)
    """What joins the steps of stepwise data."""

    folder: str = field(default=HERE.folder, repr=False)
    """Where the relative paths of pictures are tried first, before the working directory."""
    fps: float = HERE.fps
    """Frames a second that are taken of a video's file."""
    max_frames: int = HERE.max_frames
    """Frames a video may have; of a file so many are taken, evenly spread."""
    images: ImagesConfig = field(default=HERE.images, repr=False)
    """Limits of videos, and of pictures in memory."""
    apply_chat_template: bool = field(default=False, repr=False)
    """Whether a prompt and its completion given as text become a user and an assistant message."""

    @property
    def finding(self) -> Finding:
        """How pictures are found."""
        return Finding(self.folder, self.fps, self.max_frames, self.prefix, self.images)

    def __post_init__(self) -> None:
        names = (*COLUMN_NAMES, *JUDGED_NAMES[self.kind])
        for name in self.mapping:
            if name not in names:
                hint = did_you_mean(name, names)
                known = ", ".join(names)
                raise ConfigError(
                    f"{self.prefix}columns names {name!r}; expected one of {known}{hint}"
                )


class Recognised(NamedTuple):
    """How a record would be read."""

    format: str
    """Where the row is one of SFT but for its judgement, that row's; else the kind of data."""
    unread: Mapping[str, Any]
    """The columns that are passed over, by taut's names, without those that data.ignore_keys names."""


def recognise(record: object, place: str, columns: Columns) -> Recognised:
    """Which format a record has, and what of it is not read. Its values are not looked at."""
    named = renamed(record, place, columns)
    judged = {*JUDGED_NAMES[columns.kind], *columns.ignore_keys}
    if columns.kind == "prompt":
        chosen = _recognise(named, place, columns, PROMPT_REQUIRED)
        answers = set(REQUIRED[chosen]) if chosen != "text" else set()
        read = {*PROMPT_REQUIRED[chosen], *answers, *READS[chosen], *judged}
        return Recognised(chosen, {name: it for name, it in named.items() if name not in read})
    is_row = columns.kind in ("sft", "scored") or (columns.kind == "unpaired" and "label" in named)
    if not is_row:
        read = {*judged, *PROMPTS.values(), *OPTIONAL}
        return Recognised(
            columns.kind, {name: it for name, it in named.items() if name not in read}
        )
    chosen = _recognise(named, place, columns, REQUIRED)
    read = {*REQUIRED[chosen], *READS[chosen], *judged}
    is_plain = chosen == "completion" and isinstance(named["prompt"], str)
    if is_plain and not columns.apply_chat_template:
        read -= {"tools", *COLUMNS_OF_MEDIA}
    return Recognised(chosen, {name: it for name, it in named.items() if name not in read})


def read_row(record: object, place: str, columns: Columns) -> Row:
    """Validate one record of a file."""
    named = with_media(renamed(record, place, columns), place, columns)
    return read_named(named, place, columns)


def read_named(named: dict[str, Any], place: str, columns: Columns) -> Row:
    """The same of a record whose columns have taut's names."""
    chosen = _recognise(named, place, columns, REQUIRED)
    if chosen == "text":
        refuse_beside_text(named, place, columns.prefix)
        return Document(place, read_text(named["text"], f"{place}: text"))
    if chosen == "completion":
        return _read_completion(named, place, columns)
    if chosen == "alpaca":
        return _read_alpaca(named, place, columns)
    column = REQUIRED[chosen][0]
    return _read_turns(named, place, column, columns)


def read_prompt(record: object, place: str, columns: Columns) -> Conversation | Document:
    """Validate one record of a file of prompts: a conversation, its last answer included where the
    row has it as a message, or a text to be continued as it is.
    """
    named = with_media(renamed(record, place, columns), place, columns)
    chosen = _recognise(named, place, columns, PROMPT_REQUIRED)
    column = PROMPT_REQUIRED[chosen][0]
    value = named[column]
    if chosen == "text" or (chosen == "completion" and isinstance(value, str)):
        text = read_text(value, f"{place}: {column}")
        if columns.apply_chat_template:
            return _read_turns(
                {**named, column: [as_message("user", text)]}, place, column, columns
            )
        refuse_beside_text(named, place, columns.prefix)
        return Document(place, text)
    if chosen == "alpaca":
        return _read_instruction(alpaca_prompt(named, place), named, place, columns)
    answer = named.get("completion")
    if chosen == "completion" and isinstance(value, list) and isinstance(answer, list):
        named = {**named, column: [*value, *answer]}
    return _read_turns(named, place, column, columns)


def renamed(record: object, place: str, columns: Columns) -> dict[str, Any]:
    """taut's names for the columns, nulls left out."""
    if not isinstance(record, dict):
        raise DataError(
            f"{place}: the row is {shown(record)}; expected an object with named columns"
        )
    taken = set(columns.mapping.values())
    named = {key: value for key, value in record.items() if key not in taken and value is not None}
    for ours, theirs in columns.mapping.items():
        if theirs not in record:
            hint = did_you_mean(theirs, record)
            found = shown(record)
            raise DataError(
                f"{place}: {columns.prefix}columns.{ours} is {theirs!r}, and the row is {found}{hint}"
            )
        if record[theirs] is not None:
            named[ours] = record[theirs]
        else:
            named.pop(ours, None)
    return named


def with_media(named: dict[str, Any], place: str, columns: Columns) -> dict[str, Any]:
    """The row without the pictures that data.ignore_keys leaves out."""
    ignored = set(columns.ignore_keys) - set(columns.mapping)
    return usable(named, place, ignored, columns.prefix)


def as_message(role: str, text: str) -> Message:
    """A plain text as the message that a chat template renders."""
    return {"role": role, "content": text}


def of_other_kind(named: Mapping[str, Any], kind: Kind) -> str:
    """What rows with these columns are for, where that is not ``kind``; empty where nothing tells."""
    is_row = any(all(key in named for key in wanted) for wanted in REQUIRED.values())
    fits: dict[Kind, bool] = {
        "preference": all(name in named for name in PAIR)
        or (any(name in named for name in ANSWER_LISTS) and any(name in named for name in GRADES)),
        "stepwise": "completions" in named and "labels" in named,
        "unpaired": is_row and "label" in named,
        "scored": is_row and "score" in named,
        "sft": is_row,
    }
    found = next((name for name, does_fit in fits.items() if does_fit), kind)
    return "" if found == kind else f"rows like these are for {TRAINED_BY[found]}; or "


def _recognise(
    named: dict[str, Any], place: str, columns: Columns, required: Mapping[str, tuple[str, ...]]
) -> str:
    wanted = required.get(columns.format)
    if wanted is not None:
        missing = [name for name in wanted if name not in named]
        if missing:
            raise DataError(
                f"{place}: the row is {shown(named)}, without {missing[0]}; expected "
                f"{' and '.join(wanted)} (format {columns.format}); set "
                f"{columns.prefix}columns"
            )
        return columns.format
    fitting = [name for name, wanted in required.items() if all(key in named for key in wanted)]
    mapped = [name for name in fitting if any(key in columns.mapping for key in required[name])]
    fitting = mapped or fitting
    if not fitting:
        *most, last = (" and ".join(required[name]) for name in required)
        example = ", ".join(f'{name} = "..."' for name in required["alpaca"])
        other = of_other_kind(named, columns.kind) if required is REQUIRED else ""
        raise DataError(
            f"{place}: the row is {shown(named)}; expected {', '.join(most)}, or {last}; {other}"
            f"name your columns, as in {columns.prefix}columns='{{{example}}}'"
        )
    if len(fitting) > 1:
        raise DataError(
            f"{place}: the columns fit the formats {' and '.join(fitting)}; expected one; set "
            f"{columns.prefix}format"
        )
    return fitting[0]


def _read_turns(named: dict[str, Any], place: str, column: str, columns: Columns) -> Conversation:
    turns = after_system(named, place, turns_of(named[column], f"{place}: {column}"))
    turns = placed(turns, named, place, needs_marks=column == "conversations")
    ignore, finding = columns.ignore_keys, columns.finding
    return read_conversation(
        turns, place, named.get("tools"), ignore=ignore, column=column, finding=finding
    )


def _read_completion(named: dict[str, Any], place: str, columns: Columns) -> Row:
    prompt, completion = named["prompt"], named["completion"]
    if columns.apply_chat_template and isinstance(prompt, str) and isinstance(completion, str):
        prompt = [as_message("user", read_text(prompt, f"{place}: prompt"))]
        completion = [as_message("assistant", read_text(completion, f"{place}: completion"))]
    if isinstance(prompt, list) and isinstance(completion, list):
        if not completion:
            raise DataError(f"{place}: completion is an empty list; expected messages")
        turns = placed([*prompt, *completion], named, place)
        tools, ignore = named.get("tools"), columns.ignore_keys
        return read_conversation(
            turns,
            place,
            tools,
            ignore=ignore,
            first_learned=len(prompt),
            column="prompt+completion",
            finding=columns.finding,
        )
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DataError(
            f"{place}: prompt is {shown(prompt)} and completion is {shown(completion)}; "
            "expected two texts or two lists of messages"
        )
    refuse_beside_text(named, place, columns.prefix)
    prompt = read_text(prompt, f"{place}: prompt")
    return Completion(place, prompt, read_text(completion, f"{place}: completion"))


def _read_alpaca(named: dict[str, Any], place: str, columns: Columns) -> Conversation:
    answer = read_text(named["output"], f"{place}: output")
    turns = [*alpaca_prompt(named, place), {"role": "assistant", "content": answer}]
    return _read_instruction(turns, named, place, columns)


def _read_instruction(
    turns: list[Message], named: dict[str, Any], place: str, columns: Columns
) -> Conversation:
    """Pictures come before the first question where it has no marks, as in other messages."""
    asked = placed(turns, named, place)
    return read_conversation(asked, place, column="alpaca", finding=columns.finding)


# --------------------------------------------------------------------------------------------------
# Which columns of a record mean what, where answers are judged (``preferences.py``).
#
#     preference   a prompt; chosen and rejected, or a list of answers with scores or ranks; margin, or a score of each
#                  ``chosen`` and ``rejected`` whose difference it then is
#     unpaired     a row as SFT takes it, and label; or a pair, of which chosen is good and rejected is not
#     scored       a row as SFT takes it, and score
#     stepwise     a prompt; completions (the steps) and labels
#
# The prompt of a preference, or of steps, is ``prompt`` (text or messages), ``conversations``, or ``instruction``
# with what alpaca has beside it. A preference may have none: then the answers are whole conversations, or whole
# texts, and what they have in common is the prompt. Answers to messages are messages, one message, or the text of
# one. Every value is checked, and an error names file and line, as in ``columns.py``, on which this builds. Columns
# in ``data.ignore_keys`` are not looked at.
#
# Does not tokenise (``answers.py``), and does not judge: equal answers are found where their ids are known. Imported
# by ``dataset.py`` and ``attempts.py``.


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
