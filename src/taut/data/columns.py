"""Which columns of a record mean what: recognition of formats, column mapping, and the alpaca and
sharegpt presets.

    messages      messages; tools, system            (a list of role/content, or of from/value)
    sharegpt      conversations; tools, system       (the same, under its usual name)
    completion    prompt, completion; tools          (both texts, or both lists of messages)
    alpaca        instruction, output; input, system, history
    text          text

The same columns without the answer make a prompt (``read_prompt``). A record that fits none, or more
than one, is an error that names the columns found. A mapping names taut's column and the one in the
data: ``data.columns = {messages = "dialog"}``; formats whose columns are mapped take precedence.
Pictures and videos have columns beside messages: ``placing.py``. Rows whose answers are judged
(``kind``) have columns of their own: ``judged.py``. Imported by it, ``dataset.py`` and
``prompts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from taut.data.formats import (
    Completion,
    Conversation,
    Document,
    Message,
    Row,
    did_you_mean,
    read_conversation,
    read_text,
    shown,
)
from taut.data.media import HERE, PICTURES, VIDEOS, Finding
from taut.data.placing import placed, refuse_beside_text, usable
from taut.data.preferences import Kind
from taut.data.presets import after_system, alpaca_prompt, turns_of
from taut.errors import ConfigError, DataError
from taut.vision.picture import ImagesConfig

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
