"""A tokenizer and its chat template: messages to text, text to ids, and the token that ends an
assistant turn.

A template is given content as it takes it: text as a string, or as a list of parts where it writes
no strings; pictures as parts with nothing in them (``pictures.py`` does the rest). Special tokens
are never added to a rendering: the template writes them. Templates run in a process of their own
(``taut.io.processes``, ``chat_text.py``); a tokenizer whose class comes with the model, and renders in its own way,
does so here. Whatever a
template raises on messages it does not take becomes a RenderError that names the row; one that exceeds its limits is a
ModelError. Knows nothing of rows and targets. Imported by ``render.py`` and ``stops.py``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2

from taut.data.images import Pictures, Placed
from taut.data.messages import Message, Tool, images_of
from taut.errors import ModelError, RenderError
from taut.io import processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import Album

Ids: TypeAlias = list[int]
CODE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a tokenizer's own code raises on messages that it does not expect."""
SET_DAY = (
    "{%- macro strftime_now(format) -%}{%- set now = namespace(text=format) -%}"
    "{%- for code, value in CODES -%}{%- set now.text = now.text.replace(code, value) -%}{%- endfor -%}"
    "{{- now.text -}}{%- endmacro -%}"
)
"""A chat template's first words, which make it the day they name."""
CODES = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcdjmyYHIMSpUuVwWxXZ"] + ["%%"]
"""What a format of strftime may ask for."""
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
)
ASKED, ANSWERED = "vicuna", "guanaco"
"""Words that no template writes of itself."""


@dataclass(frozen=True, slots=True)
class Text:
    """To be tokenised: a rendering as it is, or raw text with the tokenizer's specials."""

    text: str
    is_rendering: bool
    pictures: tuple[Placed, ...] = field(default=(), compare=False)
    """What the words for pictures in it stand for, in order; equal texts have equal ids whatever they are."""


class Template:
    """One tokenizer with its own chat template or another; the processor's, if it has one, goes before the
    tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        key: str = "data.template",
        album: Album | None = None,
    ) -> None:
        """``key``: the setting that gives another template, for messages. ``album``: where pictures are had from."""
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer is a {type(tokenizer).__name__} without tokenizer.json; expected "
                "a fast tokenizer; "
                "save it once with transformers' fast class"
            )
        self.tokenizer = tokenizer
        self.key = key
        self.pictures = Pictures(album, tokenizer)
        beside = album.processor.template if album is not None else None
        own = tokenizer.chat_template if beside is None else beside
        self.template = own if template is None else template
        if self.template is not None:
            processes.start()
        self._is_own = template is None
        self.day: datetime.date | None = None
        """The day that a template which asks for it is told; None: today."""

    @property
    def asks_for_the_day(self) -> bool:
        """Whether the day can be told: one template of several, by name, is told today's."""
        return isinstance(self.template, str) and "strftime_now" in self.template

    def _dated(self) -> str:
        """The template, its ``strftime_now`` being that of ``day``: the library lets no function be handed in."""
        if self.day is None or not self.asks_for_the_day:
            return str(self.template)
        codes = [(code, self.day.strftime(code)) for code in CODES]
        return SET_DAY.replace("CODES", repr(codes)) + str(self.template)

    def apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        place: str,
        *,
        is_prompt: bool = False,
        placed: Sequence[Placed] | None = None,
    ) -> Text:
        """The text of these messages, with the generation prompt if ``is_prompt``. ``placed``: the pictures of the
        row that they are the beginning of; None: they are the whole.
        """
        if self.template is None:
            raise RenderError(
                f"{place}: messages to render, and the tokenizer has no chat template; "
                f"expected one; give it with {self.key}=FILE"
            )
        if placed is None:
            placed = self.pictures.place(messages, tools, place)
        given = [self._given(message, self.takes_strings) for message in messages]
        try:
            text = self.write(given, tools, is_prompt=is_prompt, place=place)
        except processes.FunctionFailed as error:
            roles = " ".join(message["role"] for message in messages)
            raise RenderError(
                f"{place}: the chat template does not take these messages ({roles[:80]}): "
                f"{str(error)[:200]}; "
                "expected messages it accepts; change the row or give another template with "
                f"{self.key}=FILE"
            ) from None
        own = tuple(placed[: len(images_of(messages))])
        text = self.pictures.write(text, own, place)
        return replace(checked(text, place, is_rendering=True), pictures=own)

    def plain(self, text: str, place: str) -> Text:
        """Text that no template has seen."""
        self.pictures.require_plain(text, f"{place}: the text")
        return checked(text, place, is_rendering=False)

    @cached_property
    def takes_strings(self) -> bool:
        """Whether it writes content that is a string; else lists of parts."""
        roles = zip(("user", "assistant"), (ASKED, ANSWERED), strict=True)
        probe = [{"role": role, "content": word} for role, word in roles]
        return self._says(probe) or not self._says([self._given(it, False) for it in probe])

    def _says(self, probe: Sequence[Message]) -> bool:
        try:
            text = self.write(probe, (), is_prompt=False, place="two short messages")
        except processes.FunctionFailed:
            return False
        return ASKED in text and ANSWERED in text

    def _given(self, message: Message, takes_strings: bool) -> Message:
        """A message as the template takes it."""
        content = message.get("content")
        if isinstance(content, list):
            parts = [part if part["type"] == "text" else {"type": "image"} for part in content]
            return {**message, "content": parts}
        if takes_strings:
            return message
        return {**message, "content": [{"type": "text", "text": content or ""}]}

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        is_prompt: bool,
        place: str,
        **switches: bool,
    ) -> str:
        """What the template makes of these messages, as it is. ``switches``: variables of the template's own.

        Raises bounded.FunctionFailed with what the template raises.
        """
        named = self._dated() if isinstance(self.template, str) else None
        try:
            template = self.tokenizer.get_chat_template(named, list(tools) or None)
        except ValueError as error:  # several templates, none of which is the default
            raise processes.FunctionFailed(str(error)) from None
        given = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        if self._has_own_rendering:
            return self._write_by_its_code(given, tools, named, is_prompt, switches)
        variables = {**self.tokenizer.special_tokens_map, **switches}
        try:
            text: str = processes.call(
                "taut.data.chat_text:render",
                template,
                given,
                list(tools) or None,
                is_prompt,
                variables,
            )
        except processes.LimitExceeded as error:
            raise ModelError(
                f"{place}: the chat template ({self._source}) {error}; expected one that renders a row at once; "
                f"give another template with {self.key}=FILE"
            ) from None
        return text

    @cached_property
    def _has_own_rendering(self) -> bool:
        """Whether the tokenizer's class, which may come with the model, renders in a way of its own."""
        from transformers import PreTrainedTokenizerBase as Library

        return type(self.tokenizer).apply_chat_template is not Library.apply_chat_template

    def _write_by_its_code(
        self,
        messages: list[Message],
        tools: Sequence[Tool],
        template: str | None,
        is_prompt: bool,
        switches: Mapping[str, Any],
    ) -> str:
        """``write`` where the tokenizer renders in its own way. trust_remote_code let its code run here."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **switches,
            )
        except CODE_FAILURES as error:
            raise processes.FunctionFailed(
                (str(error).splitlines() or [""])[0] or type(error).__name__
            ) from None
        return str(text)

    @property
    def _source(self) -> str:
        """Where the template was found, for messages."""
        if not self._is_own:
            return f"the file that {self.key} names"
        directory = Path(self.tokenizer.name_or_path)
        names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
        found = next((name for name in names if (directory / name).is_file()), None)
        return str(directory / found) if found else f"of {directory}"

    def encode(self, texts: Iterable[Text]) -> dict[Text, Ids]:
        """The ids of each text; one call of the tokenizer for each kind of text."""
        unique = list(dict.fromkeys(texts))
        ids_of: dict[Text, Ids] = {}
        for is_rendering in (True, False):
            group = [text for text in unique if text.is_rendering == is_rendering]
            if not group:
                continue
            with self._panics_as_model_errors():
                encoded = self.tokenizer(
                    [text.text for text in group],
                    add_special_tokens=not is_rendering,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    verbose=False,
                )
            ids_of.update(zip(group, encoded["input_ids"], strict=True))
        return ids_of

    def spans(self, text: Text) -> list[tuple[int, int]]:
        """Where each of a text's tokens lies in it: [start, stop); empty for tokens that are added."""
        with self._panics_as_model_errors():
            encoded = self.tokenizer(
                text.text,
                add_special_tokens=not text.is_rendering,
                return_offsets_mapping=True,
                verbose=False,
            )
        return [(int(start), int(stop)) for start, stop in encoded["offset_mapping"]]

    @contextmanager
    def _panics_as_model_errors(self) -> Iterator[None]:
        """The tokenizers library panics where a regular expression of tokenizer.json backtracks past its limit."""
        try:
            yield
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise ModelError(
                f"{self.tokenizer.name_or_path}/tokenizer.json: the tokenizer fails: {error}; expected one whose "
                "regular expressions (normalizer, pre_tokenizer) match any text; use the tokenizer of the base model"
            ) from None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The token that ends an assistant turn as rendered; without a template, the eos."""
        if self.template is None:
            eos = self.tokenizer.eos_token_id
            return () if eos is None else (int(eos),)
        place = "the chat template"
        prompt = self.apply(PROBE[:1], (), place, is_prompt=True)
        row = self.apply(PROBE, (), place)
        ids_of = self.encode([prompt, row])
        start = common_length(ids_of[prompt], ids_of[row])
        added = {*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids}
        end = self._last_end(ids_of[row], start, added)
        if end is None:
            raise RenderError(
                "the chat template ends an assistant turn with no special token (it writes "
                f"{self.quoted(ids_of[row][start:])}), so a model could never learn to stop; "
                "expected one such as eos "
                f"after the content; give a template that writes it with {self.key}=FILE, or "
                "add the token"
            )
        return (ids_of[row][end],)

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens that may end a turn: special ones, and the one seen to end turns."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {index for index, token in added if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.stop_ids}

    def end_of_turn(self, ids: Ids, start: int, place: str) -> int:
        """Where the last token that ends the turn begun at ``start`` lies."""
        end = self._last_end(ids, start, self.end_ids)
        if end is None:
            raise RenderError(
                f"{place}: the chat template writes no token that ends this turn "
                f"({self.quoted(ids[start:][-8:])}); "
                f"expected {self.quoted(self.stop_ids)}; correct it or give one with "
                f"{self.key}=FILE"
            )
        return end

    def _last_end(self, ids: Ids, start: int, ends: set[int]) -> int | None:
        """The last of ``ends`` after ``start``, if nothing but white space follows it."""
        for at in range(len(ids) - 1, start - 1, -1):
            if ids[at] in ends:
                return None if self.decode(ids[at + 1 :]).strip() else at
        return None

    def context_length(self, prompt: Ids, ids: Ids, place: str) -> int:
        """len(prompt), proven to be a prefix of ``ids``."""
        if ids[: len(prompt)] == prompt:
            return len(prompt)
        at = common_length(prompt, ids)
        raise RenderError(
            f"{place}: the prompt is not a token prefix of the row: after "
            f"{self.quoted(ids[max(at - 4, 0) : at])}, token "
            f"{at} is {self.quoted(prompt[at : at + 1])} in the prompt and "
            f"{self.quoted(ids[at : at + 1])} in the row; "
            "expected equal tokens, or the model would be taught on text it never sees when it "
            "answers; let the answer, not the prompt, have the white space where they meet (plain text without any "
            "there needs some), or give a template whose generation prompt fits with "
            f"{self.key}=FILE"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids)))

    def quoted(self, ids: Sequence[int]) -> str:
        """The same in quotes, for messages."""
        return repr(self.decode(ids)) if ids else "nothing"

    def identity(self) -> str:
        """Changes whenever the ids of some text could: with ``content``, or with the libraries' versions."""
        versions = [f"{name} {version(name)}" for name in ("transformers", "tokenizers", "jinja2")]
        return hashlib.sha256("\0".join([self.content(), *versions]).encode()).hexdigest()

    def content(self) -> str:
        """A hash of tokenizer and template.

        A template that asks for the date gives other ids each day: then the day is part of it.
        """
        backend = self.tokenizer.backend_tokenizer.to_str()
        backend = backend[
            backend.index('"added_tokens"') :
        ]  # after what the last call left: padding
        template = json.dumps(self.template, sort_keys=True)
        special = {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()}
        parts = [
            backend,
            json.dumps(special, sort_keys=True),
            str(getattr(self.tokenizer, "split_special_tokens", False)),
            template,
        ]
        if self.asks_for_the_day and self.day is not None:
            parts.append(str(self.day))
        elif "strftime_now" in template:
            parts.append(str(datetime.date.today()))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def common_length(left: Ids, right: Ids) -> int:
    """How many leading ids are equal."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def checked(text: str, place: str, *, is_rendering: bool) -> Text:
    """Text that can be written as UTF-8, as tokenizers need it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError(
            f"{place}: character {error.start + 1} of the text is half of a surrogate pair; "
            "expected Unicode text; "
            "correct it"
        ) from None
    return Text(text, is_rendering)
