"""What the checks of the template share: the first rows rendered, whole and turn by turn, on their own.

    chat.whole     the conversation rendered once
    turn.prompt    the messages before an answer, with the generation prompt: what a server feeds the model
    turn.row       the messages up to and with that answer

Nothing here refuses a row, as rendering for training does: each check says what it finds. A bounded number of rows,
turns and characters is looked at.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath

from taut.checks.session import Session
from taut.data.chat_template import Ids, Template, Text, checked
from taut.data.messages import Completion, Conversation, Document, Message, text_of
from taut.errors import RenderError

TURNS = 4
"""Learned turns of a conversation that are looked at."""
CHARACTERS = 300_000
"""Of all renderings together, but for the first row."""
SHOWN = 3
"""Lines of evidence."""
NO_CHATS = "no row is a conversation"
REASONING = ("reasoning_content", "reasoning", "thinking")
OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Turn:
    """An answer: what is before it, and what is there with it."""

    place: str
    index: int
    message: Message
    prompt: Text
    row: Text

    @property
    def written(self) -> str:
        """What the template writes after the prompt; empty where the prompt is not its beginning."""
        return self.row.text.removeprefix(self.prompt.text) if self.is_prefix else ""

    @property
    def is_prefix(self) -> bool:
        return self.row.text.startswith(self.prompt.text)


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    row: Conversation
    whole: Text
    turns: tuple[Turn, ...]

    @property
    def place(self) -> str:
        return self.row.place


@dataclass(frozen=True)
class Rendered:
    """The rows that were looked at."""

    chats: tuple[Chat, ...]
    turns: tuple[Turn, ...]
    """Of all chats; a text with its completion is one too."""
    refused: tuple[RenderError, ...]
    """Why the template does not take a conversation, one of each that it does not."""
    documents: tuple[Text, ...]
    ids_of: Mapping[Text, Ids]

    @property
    def num_conversations(self) -> int:
        return len(self.chats) + len(self.refused)


def rendered(session: Session) -> Rendered:
    """The first rows of the training data, rendered."""
    return session.once(_render)


def _render(session: Session) -> Rendered:
    template = session.language.renderer.template
    chats: list[Chat] = []
    turns: list[Turn] = []
    refused: list[RenderError] = []
    documents: list[Text] = []
    room = CHARACTERS
    for row in session.rows:
        if isinstance(row, Conversation):
            try:
                chat = _chat(row, template)
            except RenderError as error:
                refused.append(error)
                continue
            chats.append(chat)
            turns.extend(chat.turns)
            room -= len(chat.whole.text) * (1 + 2 * len(chat.turns))
        elif isinstance(row, Completion):
            turns.append(_completion(row))
            room -= 2 * len(turns[-1].row.text)
        else:
            documents.append(_document(row))
            room -= len(row.text)
        if room < 0:
            break
    texts = [
        *(chat.whole for chat in chats),
        *documents,
        *(text for turn in turns for text in (turn.prompt, turn.row)),
    ]
    ids_of = template.encode(texts)
    return Rendered(tuple(chats), tuple(turns), tuple(refused), tuple(documents), ids_of)


def _chat(row: Conversation, template: Template) -> Chat:
    whole = template.apply(row.messages, row.tools, row.place)
    turns = []
    for index in [index for index in row.learned if index][-TURNS:]:
        place = f"{short(row.place)}: messages[{index}]"
        before, seen, placed = row.messages[:index], row.messages[: index + 1], whole.pictures
        prompt = template.apply(before, row.tools, place, is_prompt=True, placed=placed)
        is_last = index + 1 == len(row.messages)
        until = whole if is_last else template.apply(seen, row.tools, row.place, placed=placed)
        turns.append(Turn(place, index, row.messages[index], prompt, until))
    return Chat(row, whole, tuple(turns))


def with_answer(session: Session, chat: Chat) -> Chat:
    """A question as it would be with an answer to it."""
    answer = {"role": "assistant", "content": "an answer"}
    messages = (*chat.row.messages, answer)
    row = replace(chat.row, messages=messages, learned=(len(messages) - 1,))
    return _chat(row, session.language.renderer.template)


def _completion(row: Completion) -> Turn:
    message = {"role": "assistant", "content": row.completion}
    prompt = checked(row.prompt, row.place, is_rendering=False)
    whole = checked(row.prompt + row.completion, row.place, is_rendering=False)
    return Turn(short(row.place), 0, message, prompt, whole)


def _document(row: Document) -> Text:
    return checked(row.text, row.place, is_rendering=False)


def is_most(found: Sequence[object], of: Sequence[object] | int) -> bool:
    """More than half: a fault of the template, where a few are faults of those rows."""
    return 2 * len(found) > (of if isinstance(of, int) else len(of))


def short(place: str) -> str:
    """A row's place without the directory."""
    return PurePath(place).name


def cut(text: str, most: int = 60) -> str:
    """A text in a line of evidence: quoted, its middle left out where it is long."""
    if len(text) > most:
        half = (most - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text)


def shared(left: str, right: str) -> int:
    """How many leading characters are equal."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def normal(text: str) -> str:
    """For comparing what a tokenizer gives back: many normalise Unicode, which loses nothing."""
    return unicodedata.normalize("NFKC", text)


def reasoning_of(message: Message) -> str:
    """What was thought before the answer, in a field of its own or between tags; empty where nothing was."""
    for key in REASONING:
        if message.get(key, "").strip():
            return str(message[key]).strip()
    before, close, _ = text_of(message["content"]).partition(CLOSE)
    return before.rpartition(OPEN)[2].strip() if close else ""


def texts_of(message: Message) -> list[str]:
    """A message's words: of one with pictures, those between them."""
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def answer_of(message: Message) -> str:
    """An assistant's words without its reasoning."""
    return text_of(message["content"]).rpartition(CLOSE)[2].strip()
