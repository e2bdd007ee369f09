"""Turns one record of a file, whatever its columns, into one validated row.

A record without judgments (kind ``sft``) has one of these formats, recognized by its columns:

    messages      messages; tools, system            (a list of role/content, or of from/value)
    sharegpt      conversations; tools, system       (the same, under its usual name)
    completion    prompt, completion; tools          (both texts, or both lists of messages)
    alpaca        instruction, output; input, system, history
    text          text

The same columns without the answer make a prompt (``read_prompt``). Images and videos have columns next to these. Other
kinds of data judge their answers:

    preference    a prompt; chosen and rejected, or a list of answers with scores or ranks; margin, or a score of each
                  of ``chosen`` and ``rejected`` whose difference is the margin
    unpaired      a row as SFT takes it, and label; or a pair, of which chosen is good and rejected is not
    scored        a row as SFT takes it, and score
    stepwise      a prompt; completions (the steps) and labels

The prompt of a preference, or of steps, is ``prompt`` (text or messages), ``conversations``, or ``instruction`` with
its optional columns. A preference may have no prompt column: then its answers are whole conversations, or whole texts,
and their common beginning is the prompt. An answer to messages is a list of messages, one message, or its text.

The values of a column ``chat_template_kwargs`` are the row's own of the template's variables (TRL, SmolTalk2); tools
may be in a column ``functions`` or ``tool_defs`` next to messages. A row without a text that it needs is an EmptyError,
whichever way its file says so: an empty cell, null or NaN.

A record that fits no format, or more than one, is an error that names the columns found. A mapping names taut's column
and the one in the data, ``data.columns = {messages = "dialog"}``; formats whose columns are mapped take precedence.

Does not tokenize, and does not compare answers: ``render.py`` finds equal answers by their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from taut.data.read.json_io import did_you_mean, shown
from taut.data.rows.messages import (
    DEFAULT_MEDIA,
    MEDIA,
    PICTURES,
    SOUNDS,
    VIDEOS,
    Completion,
    Conversation,
    Document,
    MediaOptions,
    Message,
    Row,
    is_blank,
    parse_if_text,
    place_media,
    read_call,
    read_conversation,
    read_list,
    read_number,
    read_text,
    split_at_marks,
    text_of,
    typed,
)
from taut.data.settings import Format, Kind
from taut.errors import ConfigError, DataError, EmptyError
from taut.vision.settings import ImagesConfig

T = TypeVar("T")

# -- rows whose answers are judged


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to one prompt, each of which becomes a sample."""

    place: str
    answers: tuple[Row, ...]
    """Each answer with its whole prompt. In conversations only the answer is learned; documents are whole texts, whose
    common beginning is the prompt."""
    values: Mapping[str, tuple[float, ...]]
    """Name -> one value per answer. ``preference`` orders the answers, and the difference of two ``margin`` says by how
    much one is better; or ``label``, 1 (good) or 0; or ``score``."""

    @property
    def is_compared(self) -> bool:
        """Whether the answers only mean something together."""
        return "preference" in self.values


@dataclass(frozen=True, slots=True)
class Stepwise:
    """An answer whose steps are labeled."""

    place: str
    answer: Row
    """The prompt and all steps, joined in the last message or the completion."""
    steps: tuple[tuple[int, int], ...]
    """Span [start, stop) of each step in that text, without surrounding white space."""
    labels: tuple[float, ...]
    """Label of each step, from 0 to 1."""


Judged: TypeAlias = Answers | Stepwise
AnyRow: TypeAlias = Row | Judged


def best_row(row: AnyRow) -> Row:
    """The best answer as a row of SFT (the first of equals); a row of SFT is returned unchanged."""
    if isinstance(row, Stepwise):
        return row.answer
    if not isinstance(row, Answers):
        return row
    judgment = next(iter(row.values.values()))
    return row.answers[judgment.index(max(judgment))]


# -- columns and formats


REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
PROMPT_REQUIRED = {**REQUIRED, "completion": ("prompt",), "alpaca": ("instruction",)}
"""Columns that a row of prompts needs, by format."""
COLUMNS_OF_MEDIA = (*PICTURES, *VIDEOS)
VARIABLES = "chat_template_kwargs"
"""The column of a row's own values of the template's variables."""
FUNCTIONS = ("tool_defs", "functions")
"""Other names of the column tools, next to messages."""
OPTIONAL = ("tools", "system", "input", "history", VARIABLES, *COLUMNS_OF_MEDIA)
COLUMN_NAMES = (*(name for names in REQUIRED.values() for name in names), *OPTIONAL)
READS: dict[str, tuple[str, ...]] = {
    "messages": ("tools", "system", VARIABLES, *COLUMNS_OF_MEDIA),
    "sharegpt": ("tools", "system", VARIABLES, *COLUMNS_OF_MEDIA),
    "completion": ("tools", "system", VARIABLES, *COLUMNS_OF_MEDIA),
    "alpaca": ("input", "system", "history", VARIABLES, *COLUMNS_OF_MEDIA),
    "text": (),
}
"""Optional columns that each format reads; of a completion only as messages, which a text and its completion are not
without the chat template.
"""
QUESTION = ("question", "query", "problem", "prompt", "input", "user")
ANSWER = ("answer", "response", "solution", "completion", "reply", "assistant")
"""Names of other data sets for an instruction and its output."""
CHOSEN_SCORES, REJECTED_SCORES = (
    ("chosen_score", "score_chosen"),
    ("rejected_score", "score_rejected"),
)
ANSWER_LISTS, GRADES = ("answers", "responses", "completions"), ("scores", "ranks")
PROMPTS = {"completion": "prompt", "sharegpt": "conversations", "alpaca": "instruction"}
"""Format -> the prompt column of a preference; the other formats have none."""
PAIR = ("chosen", "rejected")
OTHER_ANSWER = "rejected_response"
"""A text that is worse than the last of the messages next to it: ms-swift's pair."""
JUDGED_NAMES: dict[Kind, tuple[str, ...]] = {
    "sft": (),
    "preference": (
        *PAIR,
        OTHER_ANSWER,
        "margin",
        *CHOSEN_SCORES,
        *REJECTED_SCORES,
        *ANSWER_LISTS,
        *GRADES,
    ),
    "unpaired": ("label", *PAIR, OTHER_ANSWER),
    "scored": ("score",),
    "stepwise": ("completions", "labels"),
    "prompt": (),
}
"""Additional columns of each kind of data."""
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


@dataclass(frozen=True, slots=True)
class Columns:
    """Options for reading the records of a source."""

    format: Format = "auto"
    mapping: Mapping[str, str] = field(default_factory=dict)
    """taut's column -> the data's column."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns, that may be present and are not used."""
    prefix: str = field(default="data.", repr=False)
    """Prefix of these settings in the configuration, for messages."""
    kind: Kind = field(default="sft", repr=False)
    """Kind of judgment that a row has of its answers."""
    step_separator: str = field(default="\n", repr=False)
    """Text that joins the steps of stepwise data."""

    folder: str = field(default=DEFAULT_MEDIA.folder, repr=False)
    """Folder that relative paths of images are tried in first, before the working directory."""
    images: ImagesConfig = field(default=DEFAULT_MEDIA.images, repr=False)
    """Frames of videos, and the limits of videos and of images in memory."""
    apply_chat_template: bool = field(default=False, repr=False)
    """Whether a prompt and its completion given as text become a user and an assistant message."""
    system: str | None = field(default=None, repr=False)
    """A system message for conversations without one."""
    template_variables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Values of the chat template's own variables for these rows, in place of the template's defaults."""
    empty: Literal["error", "drop"] = field(default="error", repr=False)
    """Treatment of rows without a text that they need."""

    @property
    def media(self) -> MediaOptions:
        """Options for reading images and videos."""
        return MediaOptions(self.folder, self.prefix, self.images)

    def __post_init__(self) -> None:
        names = (*COLUMN_NAMES, *JUDGED_NAMES[self.kind])
        for name in self.mapping:
            if name not in names:
                hint = did_you_mean(name, names)
                known = ", ".join(names)
                raise ConfigError(
                    f"{self.prefix}columns names {name!r}; expected one of {known}{hint}"
                )


class Recognized(NamedTuple):
    """The recognized format of a record."""

    format: str
    """The format of SFT that the row has next to its judgment; else the kind of data."""
    unread: Mapping[str, Any]
    """The columns that are not read, by taut's names, without those in data.ignore_keys."""


def recognize(record: object, place: str, columns: Columns) -> Recognized:
    """The format of a record, and the columns that it leaves unread. Values are not validated."""
    named = renamed(record, place, columns)
    has_row = columns.kind in ("sft", "scored", "prompt") or (
        columns.kind == "unpaired" and "label" in named
    )
    if has_row:
        required = PROMPT_REQUIRED if columns.kind == "prompt" else REQUIRED
        row_format = _find_format(named, record, place, columns, required)
        read = {*REQUIRED[row_format], *READS[row_format]}
        is_plain = row_format == "completion" and isinstance(named["prompt"], str)
        if is_plain and not columns.apply_chat_template:
            read -= {*READS["completion"]}
        if row_format == "text" and columns.kind == "prompt" and columns.apply_chat_template:
            read |= {*READS["completion"]}
    else:
        prompts = _prompt_formats(named, columns)
        row_format, read = columns.kind, {PROMPTS[name] for name in prompts}
        read |= {*READS["completion"]}.union(*(READS[name] for name in prompts))
        read |= {"messages"} if OTHER_ANSWER in named else set()
    # And the columns of its judgment.
    read |= {*_judgment(named, columns.kind), *columns.ignore_keys}
    return Recognized(
        row_format, {name: value for name, value in named.items() if name not in read}
    )


def _prompt_formats(named: Mapping[str, Any], columns: Columns) -> list[str]:
    """The formats whose prompt column a judged row may have; mapped columns take precedence."""
    fitting = [name for name, column in PROMPTS.items() if column in named]
    if columns.format != "auto":
        fitting = [columns.format] if columns.format in PROMPTS else []
    return [name for name in fitting if PROMPTS[name] in columns.mapping] or fitting


def _judgment(named: Mapping[str, Any], kind: Kind) -> Sequence[str]:
    """The columns of JUDGED_NAMES that are read where a row has these."""
    if kind == "unpaired":
        return ("label",) if "label" in named else (*PAIR, OTHER_ANSWER)
    if kind != "preference":
        return JUDGED_NAMES[kind]
    if not (OTHER_ANSWER in named or all(name in named for name in PAIR)):
        return (*ANSWER_LISTS, *GRADES)
    is_scored = all(named.keys() & {*names} for names in (CHOSEN_SCORES, REJECTED_SCORES))
    scores = (*CHOSEN_SCORES, *REJECTED_SCORES) if is_scored else ()
    return (*PAIR, OTHER_ANSWER, *(("margin",) if "margin" in named else scores))


def renamed(record: object, place: str, columns: Columns) -> dict[str, Any]:
    """The record under taut's names for its columns, nulls left out."""
    record = typed(record, dict, f"{place}: the row", "an object with named columns")
    taken = set(columns.mapping.values())
    named = {key: value for key, value in record.items() if key not in taken and value is not None}
    for ours, theirs in columns.mapping.items():
        if theirs not in record:
            hint = did_you_mean(theirs, record)
            raise DataError(
                f"{place}: {columns.prefix}columns.{ours} is {theirs!r}, and the row is {shown(record)}{hint}"
            )
        if record[theirs] is not None:
            named[ours] = record[theirs]
        else:
            named.pop(ours, None)
    # Tools under another name, next to messages.
    chats = ("messages", "conversations", "prompt", "chosen")
    if "tools" not in named and any(isinstance(named.get(name), list) for name in chats):
        for name in FUNCTIONS:
            value = named.get(name)
            first = value[0] if isinstance(value, list) and value else value
            is_text = isinstance(first, str) and re.match(r"\s*\[?\s*\{", first)
            if (is_text or isinstance(first, dict)) and name not in columns.ignore_keys:
                named["tools"] = named.pop(name)
                break
    return named


def _require_values(names: Sequence[str], record: Any, place: str, columns: Columns) -> None:
    """Raise EmptyError where the row has each of these columns, and null in it."""
    if names and all(record.get(columns.mapping.get(name, name), "") is None for name in names):
        raise EmptyError(f"{place}: {names[0]} is empty; expected text")


def _find_format(
    named: Mapping[str, Any],
    record: object,
    place: str,
    columns: Columns,
    required: Mapping[str, tuple[str, ...]],
) -> str:
    """The one format whose required columns the row has; mapped columns take precedence."""
    wanted = required.get(columns.format)
    if wanted is not None:
        missing = [name for name in wanted if name not in named]
        if missing:
            _require_values(missing, record, place, columns)
            raise DataError(
                f"{place}: the row is {shown(named)}, without {missing[0]}; expected {' and '.join(wanted)} (format "
                f"{columns.format}); set {columns.prefix}columns"
            )
        return columns.format
    # By its columns.
    fitting = [name for name, wanted in required.items() if all(key in named for key in wanted)]
    mapped = [name for name in fitting if any(key in columns.mapping for key in required[name])]
    fitting = mapped or fitting
    if not fitting:
        *most, last = (" and ".join(required[name]) for name in required)
        # Show how to name the columns, with those of the row that look right.
        known = {name: QUESTION if name == "instruction" else ANSWER for name in required["alpaca"]}
        theirs = {
            ours: next((n for n in named if n.lower() in its), "...") for ours, its in known.items()
        }
        example = " ".join(
            f"{columns.prefix}columns.{ours}={name}" for ours, name in theirs.items()
        )
        fault = (
            f"{place}: the row is {shown(named)}; expected {', '.join(most)}, or {last}; name your columns, as in "
            f"{example}"
        )
        error = _unfit(fault, named, columns.kind) if required is REQUIRED else DataError(fault)
        if not isinstance(error, OtherKindError):
            for wanted in required.values():
                missing = [name for name in wanted if name not in named]
                _require_values(missing, record, place, columns)
        raise error
    if len(fitting) > 1:
        raise DataError(
            f"{place}: the columns fit the formats {' and '.join(fitting)}; expected one; set {columns.prefix}format"
        )
    return fitting[0]


class OtherKindError(DataError):
    """A row has the columns of another kind of data."""

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(f"{message}; rows like these are {kind} data")
        self.kind = kind


def _unfit(fault: str, named: Mapping[str, Any], kind: Kind) -> DataError:
    """The error of a row that is not of this kind; an OtherKindError where its columns fit another kind."""
    is_row = any(all(key in named for key in wanted) for wanted in REQUIRED.values())
    fits: dict[Kind, bool] = {
        "preference": (OTHER_ANSWER in named and "messages" in named)
        or all(name in named for name in PAIR)
        or (any(name in named for name in ANSWER_LISTS) and any(name in named for name in GRADES)),
        "stepwise": "completions" in named and "labels" in named,
        "unpaired": is_row and "label" in named,
        "scored": is_row and "score" in named,
        "sft": is_row,
    }
    fitting = next((name for name, does_fit in fits.items() if does_fit), kind)
    return DataError(fault) if fitting == kind else OtherKindError(fault, fitting)


# -- reading a record


def read_any(record: object, place: str, columns: Columns) -> AnyRow:
    """Validate one record of a file as a row of the kind ``columns.kind``."""
    readers: dict[Kind, Callable[[_RecordReader], AnyRow]] = {
        "sft": _RecordReader.read_row,
        "preference": _RecordReader.read_preference,
        "unpaired": _RecordReader.read_unpaired,
        "scored": _RecordReader.read_scored,
        "stepwise": _RecordReader.read_stepwise,
        "prompt": _RecordReader.read_prompt,
    }
    return _RecordReader(record, place, columns).read(readers[columns.kind])


def read_kept(record: object, place: str, columns: Columns) -> AnyRow | None:
    """``read_any``, or None for an empty row that is left out."""
    try:
        return read_any(record, place, columns)
    except EmptyError:
        if columns.empty == "error":
            raise
        return None


def read_prompt(record: object, place: str, columns: Columns) -> Conversation | Document:
    """Validate one record of a file of prompts: a text to be continued, or a conversation. In a conversation that ends
    in an answer, the answer is ``learned``; if its prompt ends in the beginning of an answer, that is ``excluded``.
    """
    return _RecordReader(record, place, columns).read(_RecordReader.read_prompt)


class _RecordReader:
    """One record under taut's column names. Each method validates a part of it; errors name the record's place."""

    def __init__(self, record: object, place: str, columns: Columns) -> None:
        named = renamed(record, place, columns)
        ignored = set(columns.ignore_keys) - set(columns.mapping)
        if columns.kind in ("sft", "prompt"):
            ignored &= set(MEDIA)  # other names are keys of messages, or columns that are not read
        self.named = {name: value for name, value in named.items() if name not in ignored}
        self.record, self.place, self.columns = record, place, columns
        for name in SOUNDS:
            if self.named.get(name):
                raise DataError(
                    f"{place}: the row has {name}; expected text and pictures: sound is not supported; remove it, or "
                    f"name the column in {columns.prefix}ignore_keys"
                )

    def read(self, reader: Callable[[_RecordReader], T]) -> T:
        """The row. An EmptyError says how such rows are left out."""
        try:
            return reader(self)
        except EmptyError as error:
            setting = ", or set data.empty=drop" if self.columns.prefix == "data." else ""
            raise EmptyError(f"{error}; fill it in or remove the row{setting}") from None

    # rows without judgments

    def read_row(self) -> Row:
        row_format = _find_format(self.named, self.record, self.place, self.columns, REQUIRED)
        if row_format == "text":
            return self._document("text")
        if row_format == "completion":
            return self._completion()
        if row_format == "alpaca":
            answer = _message("assistant", self._text("output"))
            return self._instruction([*self._alpaca_prompt(), answer])
        column = REQUIRED[row_format][0]
        return self._conversation(self._messages_of(self.named[column], column), column)

    def read_prompt(self) -> Conversation | Document:
        row_format = _find_format(
            self.named, self.record, self.place, self.columns, PROMPT_REQUIRED
        )
        column = PROMPT_REQUIRED[row_format][0]
        value, answer = self.named[column], list[Any]()
        is_prompt = row_format == "completion"
        if row_format == "text" or (is_prompt and isinstance(value, str)):
            if not self.columns.apply_chat_template:
                return self._document(column)
            value = self._as_user(column)
        elif row_format == "alpaca":
            return replace(self._instruction(self._alpaca_prompt()), learned=())
        elif (
            is_prompt and isinstance(value, list) and isinstance(self.named.get("completion"), list)
        ):
            answer = self.named["completion"]
            value = [*value, *answer]
        # Its answer, and the beginning of one with which the prompt ends.
        row = self._conversation(self._messages_of(value, column), column)
        said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        last = len(row.messages) - 1
        learned = (last,) if last in said and (answer or not is_prompt) else ()
        begun = (last - len(answer),) if is_prompt and last - len(answer) in said else ()
        return replace(row, learned=learned, excluded=begun)

    def _document(self, column: str) -> Document:
        self._require_plain()
        return Document(self.place, self._text(column))

    def _completion(self) -> Row:
        prompt, completion = self.named["prompt"], self.named["completion"]
        are_texts = isinstance(prompt, str) and isinstance(completion, str)
        if are_texts and self.columns.apply_chat_template:
            prompt = self._as_user("prompt")
            completion = [_message("assistant", self._text("completion"))]
        if isinstance(prompt, list):
            if is_blank(completion):
                raise EmptyError(f"{self._at('completion')} is empty; expected the answer")
            one = isinstance(completion, dict) and completion
            if not isinstance(completion, list):
                completion = [one or _message("assistant", self._text("completion"))]
            messages: Any = self._messages_of([*prompt, *completion], "prompt+completion")
            first_learned = len(messages) - len(completion)
            return self._conversation(messages, "prompt+completion", first_learned)
        if isinstance(completion, list):
            raise DataError(
                f"{self.place}: prompt is {shown(prompt)} and completion is {shown(completion)}; "
                "expected two texts, or messages and messages or a text"
            )
        self._require_plain()
        return Completion(self.place, self._text("prompt"), self._text("completion"))

    def _instruction(self, messages: list[Message]) -> Conversation:
        """Validate messages made of an instruction, with the row's images in their places."""
        messages_with_media = place_media(messages, self.named, self.place)
        return self._completed(
            read_conversation(
                messages_with_media, self.place, column="alpaca", media=self.columns.media
            )
        )

    def _alpaca_prompt(self) -> list[Message]:
        """One user message of instruction, newline, input; earlier exchanges from ``history``."""
        messages = self._system()
        history = read_list(
            self.named.get("history") or [], self._at("history"), "a list of [question, answer]"
        )
        for index, exchange in enumerate(history):
            where = self._at(f"history[{index}]")
            if not isinstance(exchange, list) or len(exchange) != 2:
                raise DataError(f"{where} is {shown(exchange)}; expected [question, answer]")
            messages += [
                _message("user", read_text(exchange[0], f"{where}[0]")),
                _message("assistant", read_text(exchange[1], f"{where}[1]")),
            ]
        question = self._text("instruction")
        extra = typed(self.named.get("input", ""), str, self._at("input"), "a string")
        question = f"{question}\n{extra}" if extra.strip() else question
        return [*messages, _message("user", question)]

    # parts of a row

    def _at(self, column: str) -> str:
        return f"{self.place}: {column}"

    def _text(self, column: str) -> str:
        return read_text(self.named[column], self._at(column))

    def _as_user(self, column: str) -> list[Message]:
        """A text prompt as what the user says."""
        return [_message("user", self._text(column))]

    def _system(self) -> list[Message]:
        """The system column as a message. An empty one means none, as these data sets mean it."""
        system = typed(self.named.get("system", ""), str, self._at("system"), "a string")
        return [_message("system", system)] if system.strip() else []

    def _messages_of(self, value: object, column: str) -> object:
        """The messages of a column, not validated yet: the system column before them, and the images of the row's
        columns in their places. Conversations of from and value need a mark for each image.
        """
        if is_blank(value):
            raise EmptyError(f"{self._at(column)} is empty; expected a list of messages")
        messages = _as_messages(value, self._at(column))
        if isinstance(messages, list):
            system = self._system()
            first = messages[0] if messages and isinstance(messages[0], dict) else {}
            if system and first.get("role") in ("system", "developer"):
                if first.get("content") != system[0]["content"]:
                    raise DataError(
                        f"{self.place}: a system column and a system message; expected one of them"
                    )
                system = []
            messages = [*system, *messages]
        needs_marks = column == "conversations"
        return place_media(messages, self.named, self.place, needs_marks=needs_marks)

    def _conversation(self, messages: object, column: str, first_learned: int = 0) -> Conversation:
        return self._completed(
            read_conversation(
                messages,
                self.place,
                self.named.get("tools"),
                ignore=self.columns.ignore_keys,
                first_learned=first_learned,
                column=column,
                media=self.columns.media,
            )
        )

    def _completed(self, row: Conversation) -> Conversation:
        """The row with what the settings add to conversations: a system message where it has none, and variables of
        the template.
        """
        variables, where = self.columns.template_variables, self._at(VARIABLES)
        own = self.named.get(VARIABLES)
        if not is_blank(own) and VARIABLES not in self.columns.ignore_keys:
            values = typed(parse_if_text(own, where), dict, where, "an object or its JSON").items()
            ignored = self.columns.ignore_keys
            # what is empty says nothing, and stands where other rows have a value
            kept = {k: v for k, v in values if v != {} and not is_blank(v) and k not in ignored}
            variables = {**variables, **kept}
        row = replace(row, template_variables=variables) if variables else row
        if not self.columns.system or row.messages[0]["role"] == "system":
            return row
        return replace(
            row,
            messages=(_message("system", self.columns.system), *row.messages),
            learned=tuple(index + 1 for index in row.learned),
            excluded=tuple(index + 1 for index in row.excluded),
            weights={index + 1: weight for index, weight in row.weights.items()},
        )

    # rows whose answers are judged

    def _require_one(self, *found: str) -> None:
        """Raise DataError where the row has several columns, of which one is expected."""
        if len(found) > 1:
            raise DataError(
                f"{self.place}: the row has {' and '.join(found)}; expected one of them; name the other in "
                f"{self.columns.prefix}ignore_keys"
            )

    def _take_pair(self) -> None:
        """Messages, and a text that is worse than their last answer, as the conversations chosen and rejected."""
        if OTHER_ANSWER not in self.named or "messages" not in self.named:
            return
        answer, where = self._text(OTHER_ANSWER), self._at("messages")
        self._require_one(OTHER_ANSWER, *(name for name in PAIR if name in self.named))
        chosen = read_list(self.named.pop("messages"), where, "a list of messages")
        last = typed(chosen[-1] if chosen else None, dict, f"{where}[-1]", "an assistant message")
        if last.get("role") != "assistant":
            raise DataError(
                f"{where}[-1] is {shown(last)}; expected an assistant message, the better answer; correct the row"
            )
        self.named |= {"chosen": chosen, "rejected": [*chosen[:-1], _message("assistant", answer)]}
        del self.named[OTHER_ANSWER]

    def read_preference(self) -> Answers:
        self._take_pair()
        lists = [name for name in ANSWER_LISTS if name in self.named]
        grades = [name for name in GRADES if name in self.named]
        is_pair = all(name in self.named for name in PAIR)
        if is_pair and lists and grades:
            self._require_one("chosen with rejected", f"{lists[0]} with {grades[0]}")
        if not (is_pair or lists or grades):
            raise self._lacks_columns("chosen and rejected, or answers and scores", PAIR)
        if is_pair:
            # How much better the chosen answer is: the margin, else the difference of the scores, else 0.
            margin, scores = 0.0, []
            if "margin" in self.named:
                margin = read_number(self.named["margin"], self._at("margin"))
            else:
                for names in (CHOSEN_SCORES, REJECTED_SCORES):
                    present = [name for name in names if name in self.named]
                    self._require_one(*present)
                    scores += [read_number(self.named[name], self._at(name)) for name in present]
                margin = scores[0] - scores[1] if len(scores) == 2 else 0.0
            pair = self._answers({name: self.named[name] for name in PAIR})
            return Answers(self.place, pair, {"preference": (1.0, 0.0), "margin": (margin, 0.0)})
        # A list of answers, and one of their scores or ranks.
        for present, known in ((lists, ANSWER_LISTS), (grades, GRADES)):
            if len(present) != 1:
                expected = ", ".join(known)
                has = " and ".join(present) or f"none of {expected}"
                raise DataError(
                    f"{self.place}: the row has {has}; expected one of {expected}; set {self.columns.prefix}columns"
                )
        column, grade = lists[0], grades[0]
        answers = read_list(self.named[column], self._at(column))
        grade_items = read_list(self.named[grade], self._at(grade))
        numbers = tuple(
            read_number(item, self._at(f"{grade}[{index}]"))
            for index, item in enumerate(grade_items)
        )
        if len(answers) != len(numbers) or len(answers) < 2:
            raise DataError(
                f"{self.place}: {column} has {len(answers)} and {grade} {len(numbers)}; expected as many of both, at "
                "least two"
            )
        rows = self._answers({f"{column}[{index}]": item for index, item in enumerate(answers)})
        if grade == "scores":
            return Answers(self.place, rows, {"preference": numbers, "margin": numbers})
        preference = tuple(-rank for rank in numbers)  # the lowest rank is the best
        return Answers(
            self.place, rows, {"preference": preference, "margin": (0.0,) * len(numbers)}
        )

    def read_unpaired(self) -> Answers:
        self._take_pair()
        if "label" in self.named:
            value = self.named.pop("label")
            texts = {"true": True, "false": False}  # as CSV files have it
            label = texts.get(value.strip().lower()) if isinstance(value, str) else value
            if not isinstance(label, bool):
                raise DataError(
                    f"{self._at('label')} is {shown(value)}; expected true (a good answer) or false"
                )
            answer = self._judged_row()
            if isinstance(answer, Document):
                raise DataError(
                    f"{self.place}: the row is a text without a prompt; expected messages, or prompt and completion; "
                    f"set {self.columns.prefix}columns"
                )
            return Answers(self.place, (answer,), {"label": (float(label),)})
        if all(name in self.named for name in PAIR):
            answers = self._answers({name: self.named[name] for name in PAIR})
            return Answers(self.place, answers, {"label": (1.0, 0.0)})
        raise self._lacks_columns("a label, or chosen and rejected", ("label",))

    def read_scored(self) -> Answers:
        if "score" not in self.named:
            raise self._lacks_columns("a score", ("score",))
        score = read_number(self.named.pop("score"), self._at("score"))
        return Answers(self.place, (self._judged_row(),), {"score": (score,)})

    def _judged_row(self) -> Row:
        """A row of SFT; only what follows its last user message, or its prompt, is judged."""
        row = self.read_row()
        if not isinstance(row, Conversation):
            return row
        roles = [message["role"] for message in row.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        return replace(row, learned=tuple(i for i in row.learned if i > last_user))

    def read_stepwise(self) -> Stepwise:
        missing = [name for name in ("completions", "labels") if name not in self.named]
        column, prompt = ("", None) if missing else self._prompt()
        if prompt is None:
            raise self._lacks_columns("prompt, completions and labels", [*missing, "prompt"])
        step_items = read_list(self.named["completions"], self._at("completions"))
        steps = [read_text(s, self._at(f"completions[{i}]")) for i, s in enumerate(step_items)]
        label_items = read_list(self.named["labels"], self._at("labels"))
        labels = []
        for index, value in enumerate(label_items):
            where = self._at(f"labels[{index}]")
            label = float(value) if isinstance(value, bool) else read_number(value, where)
            if not 0 <= label <= 1:
                raise DataError(
                    f"{where} is {shown(value)}; expected true, false or a number from 0 to 1"
                )
            labels.append(label)
        if not steps or len(steps) != len(labels):
            raise DataError(
                f"{self.place}: completions has {len(steps)} steps and labels has {len(labels)}; expected one label a "
                "step, and at least one"
            )
        # Join the steps, and note where each lies.
        separator, gap = self.columns.step_separator, ""
        if isinstance(prompt, str) and self.columns.apply_chat_template:
            prompt = self._as_asked(column)
        if isinstance(prompt, str) and not prompt.endswith(separator):
            gap = separator
        spans, start = [], len(gap)
        for step in steps:
            spans.append((start + len(step) - len(step.lstrip()), start + len(step.rstrip())))
            start += len(step) + len(separator)
        joined = gap + separator.join(steps)
        if isinstance(prompt, str):
            self._refuse_columns_with_text()
            return Stepwise(
                self.place, Completion(self.place, prompt, joined), tuple(spans), tuple(labels)
            )
        answer = self._answer_to(prompt, column, joined, "completions")
        return Stepwise(self.place, answer, tuple(spans), tuple(labels))

    def _prompt(self) -> tuple[str, str | list[Any] | None]:
        """The prompt of a judged row, and its column: a text, messages, or None where there is no such column."""
        expected, fault = PROMPTS.get(self.columns.format), ""
        fitting = _prompt_formats(self.named, self.columns)
        if expected is not None and expected not in self.named:
            fault = (
                f"the row is {shown(self.named)}, without {expected}; expected it (format {self.columns.format}); set "
                f"{self.columns.prefix}columns"
            )
        elif len(fitting) > 1:
            fault = (
                f"{' and '.join(PROMPTS[name] for name in fitting)} may each be the prompt; expected one; set "
                f"{self.columns.prefix}format"
            )
        if fault:
            raise DataError(f"{self.place}: {fault}")
        if not fitting:
            return "", None
        column = PROMPTS[fitting[0]]
        if column == "prompt" and isinstance(self.named[column], str):
            return column, self._text(column)
        if column == "instruction":
            messages = place_media(self._alpaca_prompt(), self.named, self.place)
        else:
            messages = self._messages_of(self.named[column], column)
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{self._at(column)} is {shown(messages)}; expected a list of messages")
        return column, messages

    def _as_asked(self, column: str) -> list[Any]:
        """A text prompt as messages, with the row's system message and images."""
        return read_list(self._messages_of(self._as_user(column), column), column)

    def _answers(self, answers: Mapping[str, Any]) -> tuple[Row, ...]:
        """The answers (name -> value) with their prompt, each with a place of its own."""
        column, prompt = self._prompt()
        if self.columns.format == "messages":
            answers = {
                name: parse_if_text(value, self._at(name)) for name, value in answers.items()
            }
        are_texts = all(isinstance(value, str) for value in answers.values())
        if self.columns.apply_chat_template and are_texts and not isinstance(prompt, list):
            if prompt is None:
                raise DataError(
                    f"{self.place}: {' and '.join(answers)} are whole texts, of which "
                    f"{self.columns.prefix}apply_chat_template cannot tell what the user says; expected a column "
                    "prompt; add it, or take the key out"
                )
            prompt = self._as_asked(column)
        # Answers to messages, texts, or whole conversations.
        rows: Sequence[Row]
        if isinstance(prompt, list):
            rows = [self._answer_to(prompt, column, value, name) for name, value in answers.items()]
        elif are_texts and self.columns.format != "messages":
            self._refuse_columns_with_text()
            texts = [read_text(value, self._at(name)) for name, value in answers.items()]
            rows = [
                Document(self.place, text)
                if prompt is None
                else Completion(self.place, prompt, text)
                for text in texts
            ]
        elif all(isinstance(it, list) for it in answers.values()) and self.columns.format != "text":
            rows = self._whole_conversations(prompt, answers)
        else:
            values = " and ".join(f"{name} is {shown(value)}" for name, value in answers.items())
            raise DataError(
                f"{self.place}: {values}; expected texts only, or lists of messages only"
            )
        return tuple(
            replace(row, place=f"{self.place}#{number}") for number, row in enumerate(rows, 1)
        )

    def _require_plain(self) -> None:
        """Raise DataError where plain text comes with images, a system message or the template's variables, for which
        it has no place.
        """
        prefix = self.columns.prefix
        for name in COLUMNS_OF_MEDIA:
            if self.named.get(name):
                raise DataError(
                    f"{self.place}: the row has {name}; expected text only where there are no messages; give the "
                    f"prompt as messages, or name the column in {prefix}ignore_keys"
                )
        settings = {
            "system": self.columns.system,
            "chat_template_kwargs": self.columns.template_variables,
        }
        for name, value in settings.items():
            if value:
                raise DataError(
                    f"{self.place}: the row is plain text, which has no chat template, and {name} is set to "
                    f"{shown(value)}; expected messages; set {prefix}apply_chat_template=true, or take {name} out"
                )

    def _refuse_columns_with_text(self) -> None:
        """Raise DataError where plain text comes with images, a system prompt or tools, which need a chat template."""
        self._require_plain()
        for name in ("system", "tools"):
            if self.named.get(name):
                raise DataError(
                    f"{self.place}: {name} comes with plain texts, which have no chat template; expected messages; "
                    f"give the prompt as messages, or name {name} in {self.columns.prefix}ignore_keys"
                )

    def _answer_to(
        self, prompt: Sequence[Any], column: str, value: object, name: str
    ) -> Conversation:
        """The prompt's messages and an answer to them: messages, one message, or the text of one."""
        if isinstance(value, str):
            value = _message("assistant", read_text(value, self._at(name)))
        if is_blank(value):
            raise EmptyError(f"{self._at(name)} is empty; expected the answer")
        answer = _as_messages([value] if isinstance(value, dict) else value, self._at(name))
        if not isinstance(answer, list) or not answer:
            raise DataError(
                f"{self._at(name)} is {shown(answer)}; expected the answer: messages, one, or its text"
            )
        role = answer[0].get("role") if isinstance(answer[0], dict) else None
        if role in ("user", "system"):
            raise DataError(
                f"{self._at(name)} begins with a {role} message; expected what answers {column}; if it is a whole "
                f"conversation, name {column} in {self.columns.prefix}ignore_keys"
            )
        return self._conversation([*prompt, *answer], f"{column}+{name}", len(prompt))

    def _whole_conversations(
        self, prompt: str | None, answers: Mapping[str, Any]
    ) -> list[Conversation]:
        """Answers that are whole conversations: their common leading messages are the prompt. ``prompt``: its text,
        where the row has it too; it has to be one of these messages.
        """
        rows = [
            self._conversation(self._messages_of(value, name), name)
            for name, value in answers.items()
        ]
        aligned = zip(*(row.messages for row in rows), strict=False)
        size = sum(
            1 for _ in takewhile(lambda turns: all(turn == turns[0] for turn in turns), aligned)
        )
        if all(len(row.messages) == size for row in rows):  # equal conversations: refused by ids
            size = max(rows[0].learned, default=size)
        # The prompt has to be one of the common messages, and an answer to follow them.
        contents = {text_of(message["content"]).strip() for message in rows[0].messages[:size]}
        texts = {prompt.strip(), text_of(split_at_marks(prompt)).strip()} if prompt else set()
        if prompt is not None and not texts & contents:
            raise DataError(
                f"{self.place}: prompt is {shown(prompt)}, and the answers begin with other messages; expected it "
                f"there; set {self.columns.prefix}columns='{{instruction = \"prompt\"}}', or "
                f"{self.columns.prefix}ignore_keys"
            )
        for name, row in zip(answers, rows, strict=True):
            roles = [message["role"] for message in row.messages[size:]]
            if not size or roles[:1] != ["assistant"]:
                after = f"goes on with a message of the {roles[0]}" if roles else "ends there"
                raise DataError(
                    f"{self.place}: {' and '.join(answers)} have {size or 'no'} leading messages in common, and {name} "
                    f"{after}; expected one prompt, and an assistant message after it in each; correct the row"
                )
        return [replace(row, learned=tuple(i for i in row.learned if i >= size)) for row in rows]

    def _lacks_columns(self, wanted: str, names: Sequence[str]) -> DataError:
        """The error of a row without the columns that its kind needs."""
        missing = next(name for name in names if name not in self.named)
        if missing in (*PAIR, "prompt", "completions"):
            _require_values([missing], self.record, self.place, self.columns)
        fault = (
            f"{self.place}: the row is {shown(self.named)}; expected {wanted} ({self.columns.kind} data); name your "
            f"columns, as in {self.columns.prefix}columns='{{{missing} = \"...\"}}'{did_you_mean(missing, self.named)}"
        )
        return _unfit(fault, self.named, self.columns.kind)


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _as_messages(value: object, where: str) -> object:
    """Messages, also as JSON text, not validated; from and value of sharegpt become role and content."""
    messages = parse_if_text(value, where)
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(messages, list) or not isinstance(first, dict):
        return messages
    if "from" not in first or "role" in first:
        return messages
    converted: list[Message] = []
    for index, turn in enumerate(messages):
        at = f"{where}[{index}]"
        turn = typed(turn, dict, at, "an object with from and value")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            hint = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
            raise DataError(
                f"{at}.from is {shown(speaker)}; expected one of {', '.join(SHAREGPT_ROLES)}{hint}"
            )
        text = typed(turn.get("value"), str, f"{at}.value", "a string")
        rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
        message: Message = {**_message(SHAREGPT_ROLES[speaker], text), **rest}
        if speaker == "function_call":
            calls = parse_if_text(text, f"{at}.value")
            calls = calls if isinstance(calls, list) else [calls]
            message["content"] = ""
            message["tool_calls"] = [read_call(call, f"{at}.value") for call in calls]
        if message != _message("system", ""):
            converted.append(message)
    return converted
