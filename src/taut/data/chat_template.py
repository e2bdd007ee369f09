"""A tokenizer and its chat template: messages to text, text to ids, and the token that ends an assistant turn.

A template gets content in the form it takes: text as a string, or as a list of parts if it writes no strings; images as
empty parts (``images.py`` writes their words). Special tokens are never added to a rendering, since the template writes
them. Templates run in a separate process (``taut.io.processes``, ``chat_text.py``), except that a tokenizer whose class
comes with the model, and renders in its own way, runs here. An error of a template on messages that it does not take is
a RenderError that names the row; a template that exceeds its limits is a ModelError. Knows nothing of rows and targets.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jinja2

from taut.data.images import Pictures, Placed
from taut.data.json_io import did_you_mean
from taut.data.messages import Conversation, Message, Tool, images_of
from taut.errors import ConfigError, ModelError, RenderError
from taut.io import processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import ImageStore

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
"""Errors of a tokenizer's own code on messages that it does not expect."""
SET_DAY = (
    "{%- macro strftime_now(format) -%}{%- set now = namespace(text=format) -%}{%- for code, value in CODES -%}{%- set "
    "now.text = now.text.replace(code, value) -%}{%- endfor -%}{{- now.text -}}{%- endmacro -%}"
)
"""Beginning of a chat template that sets its date."""
CODES = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcdjmyYHIMSpUuVwWxXZ"] + ["%%"]
"""The codes of strftime formats."""
NEAR = 100
"""Characters at the end of a text in which its last special token is looked for."""
RENDER = "taut.data.chat_text:render"
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables of a template that are not settings: each rendering has its own."""
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
)
ASKED, ANSWERED = "vicuna", "guanaco"
"""Words that no template writes by itself."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text to be tokenised: a rendering as it is, or plain text with the tokenizer's special tokens."""

    text: str
    is_rendering: bool
    pictures: tuple[Placed, ...] = field(default=(), compare=False)
    """The images that words in it stand for, in order. They do not change the ids."""


class _Cut(NamedTuple):
    """The ids of a text, cut from those of a longer one that begins with it: up to its last special token they are the
    same, whatever follows.
    """

    mark: int
    """The id of that token."""
    number: int
    """How many of it the text has."""
    rest: Ids
    """The ids after it."""

    def of(self, ids: Ids) -> Ids:
        at = -1
        for _ in range(self.number):
            at = ids.index(self.mark, at + 1)
        return [*ids[: at + 1], *self.rest]


def _overlap(text: str, other: str) -> bool:
    """Whether one of two texts is in the other, or begins with an end of it. A text does not overlap with itself as a
    whole.
    """
    if text == other:
        return any(text.startswith(text[at:]) for at in range(1, len(text)))
    if text in other or other in text:
        return True
    sizes = range(1, min(len(text), len(other)))
    return any(text.endswith(other[:n]) or other.endswith(text[:n]) for n in sizes)


Wanted: TypeAlias = tuple[Sequence[Message], Sequence[Tool], Mapping[str, Any], bool]
"""Messages, tools and variables of a text, and whether it ends with the generation prompt."""
_Key: TypeAlias = tuple[tuple[int, ...], int, int, bool]


def _key_of(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    *,
    is_prompt: bool,
) -> _Key:
    """What a text is written from, by identity: it is held as long as the texts are."""
    return tuple(map(id, messages)), id(tools), id(variables), is_prompt


class Probe(NamedTuple):
    """An answer to PROBE's question, as a template writes it."""

    prompt: Text
    row: Text
    ids: Ids
    """The ids of ``row``."""
    start: int
    """Start of the answer in ``ids``."""
    end: int
    """Position of the token that ends it."""


class Template:
    """One tokenizer with its own chat template or another one. The processor's template, if it has one, takes
    precedence over the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        key: str = "data.template",
        image_store: ImageStore | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """``key``: the setting that names another template, for messages. ``image_store``: the store of images.
        ``variables``: values of the template's own variables, which become its defaults.
        """
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer is a {type(tokenizer).__name__} without tokenizer.json; expected a fast tokenizer; "
                "save it once with transformers' fast class"
            )
        self.tokenizer = tokenizer
        self.key = key
        self.pictures = Pictures(image_store, tokenizer)
        of_processor = image_store.processor.template if image_store is not None else None
        own_template = tokenizer.chat_template if of_processor is None else of_processor
        self.template = own_template if template is None else template
        if self.template is not None:
            processes.start()
        self._is_own = template is None
        self._can_vary: dict[str, None] = {}
        """Variables that the template was seen to read."""
        if variables:
            self.require_variables(variables, self._key_of_variables)
            self.template = with_defaults(str(self.template), variables)
        self._blank: dict[tuple[int, ...], bool] = {}
        """Tokens after the end of a turn -> whether they are white space."""
        self._ends: dict[str, Ids] = {}
        """Special tokens with the text after them that ends a prompt -> their ids."""
        self._ahead: dict[_Key, str] = {}
        """Texts that ``writing_ahead`` had written."""
        self.day: datetime.date | None = None
        """The date for templates that write it; None: today."""

    @property
    def _key_of_variables(self) -> str:
        return f"{self.key.removesuffix('template')}chat_template_kwargs"

    def require_variables(self, variables: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError, with ``where``, for variables that the template does not read or that are no settings."""
        if variables.keys() <= self._can_vary.keys():
            return
        if not isinstance(self.template, str):
            has = "no chat template" if self.template is None else "several chat templates"
            raise ConfigError(
                f"{where}: found {', '.join(variables)}, and the tokenizer has {has}; expected one template that reads "
                f"them; give it with {self.key}=FILE"
            )
        if self._renders_itself:
            raise ConfigError(
                f"{where}: found {', '.join(variables)}, and {type(self.tokenizer).__name__} renders messages with "
                "code of its own; expected a tokenizer that uses its chat template; take them out"
            )
        try:
            names: list[str] = processes.call("taut.data.chat_text:variables", self.template)
        except (processes.FunctionFailed, processes.LimitExceeded) as error:
            raise ModelError(
                f"the chat template ({self._source}) cannot be read: {str(error)[:200]}; expected a Jinja template; "
                f"give another one with {self.key}=FILE"
            ) from None
        known = [
            name
            for name in names
            if name not in GIVEN and name not in self.tokenizer.special_tokens_map
        ]
        for name in variables:
            if name not in known:
                reads = ", ".join(known) or "none"
                raise ConfigError(
                    f"{where}: the chat template reads no variable {name!r} that can be set; expected one of those it "
                    f"reads ({reads}){did_you_mean(name, known)}; correct it or take it out"
                )
        self._can_vary |= dict.fromkeys(variables)

    @property
    def _renders_itself(self) -> bool:
        """Whether the tokenizer comes with its own way of rendering."""
        from transformers import PreTrainedTokenizerBase as Library

        return type(self.tokenizer).apply_chat_template is not Library.apply_chat_template

    @property
    def asks_for_the_day(self) -> bool:
        """Whether the template writes a date that ``day`` can set; one of several templates always writes today's."""
        return isinstance(self.template, str) and "strftime_now" in self.template

    def _dated(self) -> str:
        """The template with ``day`` as its date, set by a macro: the library takes no function as an argument."""
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
        variables: Mapping[str, Any] | None = None,
    ) -> Text:
        """The text of these messages, with the generation prompt if ``is_prompt``. ``placed``: the images of the
        whole row, if the messages are only its beginning. ``variables``: the row's values of the template's own
        variables.
        """
        if self.template is None:
            raise RenderError(
                f"{place}: messages to render, and the tokenizer has no chat template; "
                f"expected one; give it with {self.key}=FILE"
            )
        if placed is None:
            placed = self.pictures.place(messages, tools, place)
        variables = {} if variables is None else variables
        self.require_variables(variables, place)
        text = self._ahead.get(_key_of(messages, tools, variables, is_prompt=is_prompt))
        try:
            if text is None:
                adapted = self._all_adapted(messages)
                text = self.write(adapted, tools, is_prompt=is_prompt, place=place, **variables)
        except processes.FunctionFailed as error:
            roles = " ".join(message["role"] for message in messages)
            raise RenderError(
                f"{place}: the chat template does not take these messages ({roles[:80]}): {str(error)[:200]}; expected "
                f"messages it accepts; change the row or give another template with {self.key}=FILE"
            ) from None
        images = tuple(placed[: len(images_of(messages))]) if placed else ()
        text = self.pictures.write(text, images, place)
        rendering = checked(text, place, is_rendering=True)
        return replace(rendering, pictures=images) if images else rendering

    def apply_to(
        self,
        row: Conversation,
        messages: Sequence[Message],
        place: str | None = None,
        *,
        is_prompt: bool = False,
        placed: Sequence[Placed] | None = None,
    ) -> Text:
        """The text of some of a row's messages, with its tools and its values of the template's variables."""
        return self.apply(
            messages,
            row.tools,
            place or row.place,
            is_prompt=is_prompt,
            placed=placed,
            variables=row.template_variables,
        )

    @contextmanager
    def writing_ahead(self, wanted: Iterable[Wanted]) -> Iterator[None]:
        """Have these texts written on one way to the template's process and back, for ``apply`` to take in the block.
        The text of what has an error, or of a template that renders elsewhere, ``apply`` has written by itself.
        """
        named = {
            _key_of(messages, tools, variables, is_prompt=is_prompt): (
                messages,
                tools,
                variables,
                is_prompt,
            )
            for messages, tools, variables, is_prompt in wanted
        }
        if self.template is None or self._renders_itself or not named:
            yield
            return
        try:
            settings: dict[tuple[bool, int], tuple[str, dict[str, Any]]] = {}
            requests = []
            for messages, tools, variables, is_prompt in named.values():
                key = bool(tools), id(variables) if variables else 0
                if key not in settings:
                    settings[key] = self._settings(tools, variables)
                adapted = self._all_adapted(messages)
                requests.append(_request(adapted, tools, *settings[key], is_prompt=is_prompt))
            outcomes = processes.call_each(RENDER, requests)
        except (processes.FunctionFailed, processes.LimitExceeded):
            outcomes = []
        texts = zip(named, outcomes, strict=False)
        self._ahead = {key: text for key, (outcome, text) in texts if outcome == "value"}
        try:
            yield
        finally:
            self._ahead = {}

    def plain(self, text: str, place: str) -> Text:
        """Plain text, without a template."""
        self.pictures.require_plain(text, f"{place}: the text")
        return checked(text, place, is_rendering=False)

    @cached_property
    def takes_strings(self) -> bool:
        """Whether the template takes content as a string; else as a list of parts."""
        roles = zip(("user", "assistant"), (ASKED, ANSWERED), strict=True)
        probe = [{"role": role, "content": word} for role, word in roles]

        def writes(messages: Sequence[Message]) -> bool:
            try:
                text = self.write(messages, (), is_prompt=False, place="two short messages")
            except processes.FunctionFailed:
                return False
            return ASKED in text and ANSWERED in text

        return writes(probe) or not writes([self._adapted(message, False) for message in probe])

    def _all_adapted(self, messages: Sequence[Message]) -> list[Message]:
        return [self._adapted(message, self.takes_strings) for message in messages]

    def _adapted(self, message: Message, takes_strings: bool) -> Message:
        """A message in the form that the template takes."""
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
        **switches: Any,
    ) -> str:
        """The template's text of these messages, unchanged. ``switches``: the template's own variables.

        Raises processes.FunctionFailed with the template's error.
        """
        template, variables = self._settings(tools, switches)
        request = _request(messages, tools, template, variables, is_prompt=is_prompt)
        if self._renders_itself:  # trust_remote_code allows its code to run here
            try:
                render: Any = self.tokenizer.apply_chat_template
                return str(
                    render(
                        request[1],
                        tools=list(tools) or None,
                        chat_template=self._named,
                        tokenize=False,
                        add_generation_prompt=is_prompt,
                        **switches,
                    )
                )
            except CODE_FAILURES as error:
                reason = (str(error).splitlines() or [""])[0] or type(error).__name__
                raise processes.FunctionFailed(reason) from None
        try:
            text: str = processes.call(RENDER, *request)
        except processes.LimitExceeded as error:
            raise ModelError(
                f"{place}: the chat template ({self._source}) {error}; expected one that renders a row at once; "
                f"give another template with {self.key}=FILE"
            ) from None
        return text

    @property
    def _named(self) -> str | None:
        """The template, where there is one alone."""
        return self._dated() if isinstance(self.template, str) else None

    def _settings(
        self, tools: Sequence[Tool], switches: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """The template and all its variables. Raises processes.FunctionFailed where no template fits."""
        try:
            template = self.tokenizer.get_chat_template(self._named, list(tools) or None)
        except ValueError as error:  # several templates, none of which is the default
            raise processes.FunctionFailed(str(error)) from None
        return template, {**self.tokenizer.special_tokens_map, **switches}

    @property
    def _source(self) -> str:
        """The file of the template, for messages."""
        if not self._is_own:
            return f"the file that {self.key} names"
        directory = Path(self.tokenizer.name_or_path)
        names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
        file = next((name for name in names if (directory / name).is_file()), None)
        return str(directory / file) if file else f"of {directory}"

    def encode(self, texts: Iterable[Text]) -> dict[Text, Ids]:
        """The ids of each text; one call of the tokenizer for each kind of text.

        A rendering with which the one before it begins, as a prompt with which its row does, is cut from that where it
        can be (``_Cut``).
        """
        unique = list(dict.fromkeys(texts))
        ids_of: dict[Text, Ids] = {}
        cuts: dict[Text, tuple[Text, _Cut]] = {}
        for is_rendering in (True, False):
            group, whole = list[Text](), None
            for text in (text for text in unique if text.is_rendering == is_rendering):
                if whole and whole.text.startswith(text.text) and (cut := self._cut(text.text)):
                    cuts[text] = whole, cut
                    continue
                group.append(text)
                whole = text if is_rendering else None
            if not group:
                continue
            with self._panics_as_model_errors():
                encoded = self._encoded([text.text for text in group], specials=not is_rendering)
            ids_of.update(zip(group, encoded, strict=True))
        ids_of |= {text: cut.of(ids_of[whole]) for text, (whole, cut) in cuts.items()}
        return ids_of

    def _cut(self, text: str) -> _Cut | None:
        """Where the ids of a longer text are cut for those of ``text``, with which it begins; None: it cannot be said.

        The backend takes special tokens out of a text before anything else, and encodes what is between them apart.
        """
        if not self._is_backend_alone or self.tokenizer.split_special_tokens:
            return None
        near, first = text[-NEAR:], max(len(text) - NEAR, 0)
        at, mark = max(((near.rfind(mark), mark) for mark in self._marks), default=(-1, ""))
        if at < 0:
            return None
        end = text[first + at :]
        if end not in self._ends:
            self._ends = {} if len(self._ends) > 1000 else self._ends
            (self._ends[end],) = self._encoded([end], specials=False)
        index, *rest = self._ends[end]
        assert index == self._marks[mark], "a special token is taken whole"
        return _Cut(index, text.count(mark), rest)

    @cached_property
    def _marks(self) -> dict[str, int]:
        """Special tokens that the template writes at which every text is taken apart, and their ids: those that take no
        white space around them along, and overlap with no other token that was added.
        """
        try:
            probe = self.apply(PROBE, (), "the chat template").text
        except RenderError:
            return {}
        added = self.tokenizer.added_tokens_decoder
        contents = [token.content for token in added.values()]
        return {
            token.content: index
            for index, token in added.items()
            if token.special
            and token.content in probe
            and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
            and not any(_overlap(token.content, other) for other in contents)
        }

    def _encoded(self, texts: list[str], *, specials: bool) -> list[Ids]:
        """The ids of texts of one kind: of the library's tokenizers those of its backend, without the offsets and masks
        that the library has it make.
        """
        if self._is_backend_alone:
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = bool(self.tokenizer.split_special_tokens)
            encodings = backend.encode_batch_fast(texts, add_special_tokens=specials)
            return [encoding.ids for encoding in encodings]
        encoded = self.tokenizer(
            texts,
            add_special_tokens=specials,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[Ids] = encoded["input_ids"]
        return ids

    @cached_property
    def _is_backend_alone(self) -> bool:
        """Whether the tokenizer's class does nothing to texts and ids but what its backend does."""
        from transformers import PreTrainedTokenizerBase, TokenizersBackend

        own: Any = type(self.tokenizer)
        return (
            own.__call__ is PreTrainedTokenizerBase.__call__
            and own._encode_plus is TokenizersBackend._encode_plus
        )

    def spans(self, text: Text) -> list[tuple[int, int]]:
        """The span [start, stop) of each token in the text; empty for added tokens."""
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
        """Raise ModelError where the tokenizers library panics: it does if a regular expression of tokenizer.json
        backtracks past its limit.
        """
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
                f"{self.quoted(ids_of[row][start:])}), so a model could never learn to stop; expected one such as eos "
                f"after the content; give a template that writes it with {self.key}=FILE, or add the token"
            )
        return (ids_of[row][end],)

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens that may end a turn: the special ones, and the one that ends turns of the template."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {index for index, token in added if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.stop_ids}

    def end_of_turn(self, ids: Ids, start: int, place: str) -> int:
        """The position of the last token that ends the turn begun at ``start``."""
        end = self._last_end(ids, start, self.end_ids)
        if end is None:
            raise RenderError(
                f"{place}: the chat template writes no token that ends this turn ({self.quoted(ids[start:][-8:])}); "
                f"expected {self.quoted(self.stop_ids)}; correct it or give one with {self.key}=FILE"
            )
        return end

    def probe(self, answer: Message, tools: Sequence[Tool]) -> Probe | None:
        """``answer`` to PROBE's question; None where the template does not take it."""
        try:
            prompt = self.apply(PROBE[:1], tools, "the probe", is_prompt=True)
            row = self.apply((*PROBE[:1], answer), tools, "the probe")
            ids_of = self.encode([prompt, row])
            start = common_length(ids_of[prompt], ids_of[row])
            end = self.end_of_turn(ids_of[row], start, "the probe")
        except RenderError:
            return None
        return Probe(prompt, row, ids_of[row], start, end)

    def _last_end(self, ids: Ids, start: int, ends: set[int]) -> int | None:
        """The position of the last of ``ends`` from ``start`` on, if only white space follows it."""
        for at in range(len(ids) - 1, start - 1, -1):
            if ids[at] in ends:
                return at if self._is_blank(tuple(ids[at + 1 :])) else None
        return None

    def _is_blank(self, ids: tuple[int, ...]) -> bool:
        """Whether the tokens after the end of a turn are white space; most turns have the same."""
        if ids not in self._blank:
            self._blank = {} if len(self._blank) > 1000 else self._blank
            self._blank[ids] = not self.decode(ids).strip()
        return self._blank[ids]

    def context_length(self, prompt: Ids, ids: Ids, place: str) -> int:
        """len(prompt), if it is a prefix of ``ids``; else a RenderError."""
        if ids[: len(prompt)] == prompt:
            return len(prompt)
        at = common_length(prompt, ids)
        raise RenderError(
            f"{place}: the prompt is not a token prefix of the row: after {self.quoted(ids[max(at - 4, 0) : at])}, "
            f"token {at} is {self.quoted(prompt[at : at + 1])} in the prompt and {self.quoted(ids[at : at + 1])} in "
            "the row; expected equal tokens, or the model would be taught on text it never sees when it answers; let "
            "the answer, not the prompt, have the white space where they meet (plain text without any there needs "
            f"some), or give a template whose generation prompt fits with {self.key}=FILE"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids)))

    def quoted(self, ids: Sequence[int]) -> str:
        """The text in quotes, for messages."""
        return repr(self.decode(ids)) if ids else "nothing"

    def identity(self) -> str:
        """A digest that changes whenever the ids of some text could: of ``content`` and the libraries' versions."""
        versions = [f"{name} {version(name)}" for name in ("transformers", "tokenizers", "jinja2")]
        return hashlib.sha256("\0".join([self.content(), *versions]).encode()).hexdigest()

    def content(self) -> str:
        """A hash of tokenizer and template, and of the date if the template writes it."""
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


def _request(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template: str,
    variables: Mapping[str, Any],
    *,
    is_prompt: bool,
) -> tuple[Any, ...]:
    """The arguments of RENDER."""
    present = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    return template, present, list(tools) or None, is_prompt, variables


def with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """The template with default values of its variables. A value given with a request still takes precedence. The line
    break after a block is no text in a chat template, so what the template writes is unchanged.
    """
    settings = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n"
        for name, value in variables.items()
    ]
    return "".join(settings) + template


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        items = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of leading ids or characters that are equal."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def checked(text: str, place: str, *, is_rendering: bool) -> Text:
    """Text that can be encoded as UTF-8, as tokenizers need it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError(
            f"{place}: character {error.start + 1} of the text is half of a surrogate pair; expected Unicode text; "
            "correct it"
        ) from None
    return Text(text, is_rendering)
