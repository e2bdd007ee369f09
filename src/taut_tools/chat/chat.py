"""``taut chat MODEL``: a conversation in the terminal.

The local engine's answer appears as it is sampled, a server's when it is finished. Each piped line is a message. Ctrl-C
stops the answer, not the program; the text so far stays in the conversation. Truncated answers are marked.

For each turn the whole conversation is rendered from text with the chat template, as servers do: reasoning that a
template strips from history is stripped, and pictures stay in their messages. Nothing is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from taut.config import user_path
from taut.data.rows.messages import Message
from taut.errors import DataError, EngineError, TautError
from taut.inference.engine import Texts, room
from taut.inference.factory import OpenEngine, open_engine
from taut.inference.local import LocalEngine, conversation
from taut.io.console import counted
from taut.io.temporary import TemporaryFolder
from taut.train.signals import Interrupt
from taut.types import Prompt
from taut.vision.content import ImageRef, read_file
from taut_tools.chat.settings import Chat

HELP = (
    "/reset starts a new conversation; /system TEXT sets the system message (without TEXT: none); /image PATH shows a "
    "picture with the next message (without PATH: none); /help says this; /exit leaves"
)
HALF = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of a character with missing tokens."""
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], HALF)
"""Control characters except newline and tab: a model must not control the terminal."""

Write = Callable[[str], object]


class Answer(NamedTuple):
    """An answer."""

    text: str | None
    """The text; None if there is no answer."""
    note: str
    """Reason why it ended, if not with a stop token."""


def run(config: Chat) -> int:
    """Chat until /exit or the end of input."""
    with open_engine(config) as opened:
        chat(config, opened, _lines(sys.stdin), _write)
    return 0


def chat(config: Chat, opened: OpenEngine, lines: Iterator[str], write: Write) -> None:
    """Answer every line."""
    write("\n".join(f"{name}: {value}" for name, value, _ in opened.decisions) + f"\n{HELP}\n")
    with conversation(opened.engine), TemporaryFolder("chat") as folder:
        session = Session(config, opened, write, folder)
        for line in lines:
            if line.strip() == "/exit":
                return
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    session.command(line.strip())
                else:
                    session.say(line)
            except TautError as error:
                write(f"[{error}]\n")


class Session:
    """One conversation."""

    def __init__(self, config: Chat, opened: OpenEngine, write: Write, folder: Path) -> None:
        """``folder`` receives copies of the pictures, whose files may change later."""
        self.folder, self.opened, self.sampling, self.write = folder, opened, config.sampling, write
        self.system = config.system
        self.messages: list[Message] = []
        self.pictures: list[ImageRef] = []
        """Pictures of the next message."""
        self.num_turns = 0
        self.texts = Texts(opened.tokenizer, opened.stops.ids)

    def command(self, line: str) -> None:
        """/reset, /system TEXT, /image PATH, or the help."""
        word, _, text = line.partition(" ")
        if word == "/reset":
            self.messages, self.pictures = [], []
            self.write("[a new conversation]\n")
        elif word == "/system":
            self.system = text.strip() or None
            self.write(f"[system: {self.system or 'none'}]\n")
        elif word == "/image":
            self.attach(text.strip())
        elif word == "/help":
            self.write(f"[{HELP}]\n")
        else:
            self.write(f"[{word} is no command; {HELP}]\n")

    def attach(self, path: str) -> None:
        """Attach the picture in this file to the next message; without a path, remove all."""
        if not path:
            self.pictures = []
            self.write("[no picture]\n")
            return
        image_store = self.opened.renderer.image_store
        if image_store is None or not isinstance(self.opened.engine, LocalEngine):
            who = "this model" if image_store is None else "a chat with a server"
            raise EngineError(
                f"/image: {who} takes no pictures; expected text; write it as a message"
            )
        named = str(user_path(path, "/image"))
        # a copy: the file may change later
        image_store.see(ImageRef("file", named), "/image")
        kept = self.folder / str(len(list(self.folder.iterdir())))
        kept.write_bytes(read_file(named, image_store.images.max_bytes))
        seen = image_store.see(ImageRef("file", str(kept)), "/image")
        self.pictures.append(ImageRef("file", str(kept)))
        count = f"{len(self.pictures)} with" if len(self.pictures) > 1 else "with"
        self.write(f"[{seen.width}x{seen.height} pixels, {count} the next message]\n")

    def say(self, text: Any) -> Answer:
        """Answer a message, a text or its parts; both join the conversation, unless there is no answer."""
        # the whole conversation, rendered anew
        pictures = [{"type": "image", "image": picture} for picture in self.pictures]
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        messages = [*self.messages, {"role": "user", "content": content}]
        is_set = self.system is not None and messages[0]["role"] != "system"
        system = [{"role": "system", "content": self.system}] if is_set else []
        ids_T, media = self.opened.renderer.prompt_media([*system, *messages])
        self.num_turns += 1
        prompt = Prompt(f"message {self.num_turns}", ids_T, media=media)
        answer = self._answer(prompt)
        self.write(f"\n[{answer.note}]\n" if answer.note else "\n")
        if answer.text is not None:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            self.pictures = []
        return answer

    def _answer(self, prompt: Prompt) -> Answer:
        engine = self.opened.engine
        if isinstance(engine, LocalEngine):
            return self._stream(engine, prompt)
        try:
            (completion,) = engine.generate([prompt], self.sampling)
        except Interrupt:  # a signal that ends the program, no Ctrl-C
            raise
        except KeyboardInterrupt:
            return Answer(None, "stopped; there is no answer yet")
        self.write(completion.text.translate(CONTROLS))
        if completion.finish_reason == "error":
            return Answer(None, f"failed: {completion.error}")
        is_cut = completion.finish_reason == "length"
        return Answer(completion.text, self._cut(prompt) if is_cut else "")

    def _stream(self, engine: LocalEngine, prompt: Prompt) -> Answer:
        stream = Stream(self.texts, self.sampling.stop, self.write)
        note = ""
        try:
            for index in engine.tokens(prompt, self.sampling):
                stream.add(index)
        except Interrupt:  # a signal that ends the program, no Ctrl-C
            raise
        except KeyboardInterrupt:
            note = "stopped"
        text = stream.finish()
        # it ended by itself, or it was cut
        has_ended = stream.ids[-1:] and (
            stream.ids[-1] in self.opened.stops.ids
            or self.texts.has_stop(stream.ids, self.sampling.stop)
        )
        if note:
            return Answer(text or None, note)
        return Answer(text, "" if has_ended else self._cut(prompt))

    def _cut(self, prompt: Prompt) -> str:
        if room(prompt, self.sampling, self.opened.context) < self.sampling.max_new_tokens:
            context = f"the model's context of {self.opened.context:,} tokens"
            return f"cut: {context} is full; /reset starts a new conversation"
        return f"cut after {self.sampling.max_new_tokens:,} tokens (sampling.max_new_tokens)"


class Conversation(ExitStack):
    """``taut.chat(...)``: a conversation in Python. ``close``, or the end of ``with``, frees the model.

    chat = taut.chat("runs/a/model", system="Be brief.")
    chat("What is 2 + 2?")                              the answer; both join the conversation
    chat([{"role": "user", "content": "Hello"}])        another conversation, which begins with these messages
    """

    def __init__(self, config: Chat) -> None:
        super().__init__()
        opened = self.enter_context(open_engine(config))
        self.enter_context(conversation(opened.engine))
        folder = self.enter_context(TemporaryFolder("chat"))
        self._session = Session(config, opened, lambda _: None, folder)
        self.model, self.note = config.model, ""
        """``note``: why the last answer ended before its end token; empty if it did not."""

    def __call__(self, message: str | Sequence[Message]) -> str:
        """Answer a message, or the last of a list of messages, which replaces the conversation. Raises EngineError
        where there is no answer.
        """
        if not isinstance(message, str):
            if not message or message[-1]["role"] != "user":
                raise DataError(
                    "found no message of the role user at the end; expected one; add it"
                )
            *self._session.messages, last = message
            message = last["content"]
        text, self.note = self._session.say(message)
        if text is None:
            raise EngineError(f"{self.model} gave no answer: {self.note}; expected one; ask again")
        return text

    @property
    def messages(self) -> list[Message]:
        """The messages so far, without the system message of the keys."""
        return [*self._session.messages]

    def __repr__(self) -> str:
        return f"Conversation({self.model}, {counted(len(self.messages), 'messages')})"


class Stream:
    """Writes an answer as its tokens arrive: whole characters, and no text that a stop string may still remove."""

    def __init__(self, texts: Texts, stops: list[str], write: Write) -> None:
        self.texts, self.stops, self.write = texts, stops, write
        self.ids: list[int] = []
        self._written = ""

    def add(self, index: int) -> None:
        """Add a token."""
        self.ids.append(index)
        text = self.texts.text(self.ids, self.stops).rstrip(HALF)
        # what a stop string may still remove
        held = max(
            (
                length
                for stop in self.stops
                for length in range(1, len(stop))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
        self._show(text[: len(text) - held])

    def finish(self) -> str:
        """Write the rest; returns the whole text."""
        text = self.texts.text(self.ids, self.stops)
        self._show(text)
        return text

    def _show(self, text: str) -> None:
        if len(text) > len(self._written) and text.startswith(self._written):
            self.write(text[len(self._written) :].translate(CONTROLS))
            self._written = text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines(stdin: TextIO) -> Iterator[str]:
    """Messages: typed at a prompt on a terminal, with line editing where available, or piped."""
    if not stdin.isatty():
        for line in stdin:
            yield line.removesuffix("\n")
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401 (input uses it once it is there)
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except Interrupt:  # a signal that ends the program, no Ctrl-C
            raise
        except KeyboardInterrupt:
            sys.stdout.write(f"\n[{HELP}]\n")
