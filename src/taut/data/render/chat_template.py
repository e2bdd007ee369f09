"""A tokenizer and its chat template: messages to text, text to ids, and the token that ends an assistant turn.

A template gets content in the form it takes: text as a string, or as a list of parts if it writes no strings; images as
empty parts (``images.py`` writes their words). Special tokens are never added to a rendering, since the template writes
them. Templates run in a separate process (``taut.io.limited_call``, ``chat_text.py``), except that a tokenizer whose
class comes with the model, and renders in its own way, runs here. An error of a template on messages that it does not
take is a RenderError that names the row; a template that exceeds its limits is a ModelError. Knows nothing of rows and
targets.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jinja2

from taut.data.read.json_io import did_you_mean
from taut.data.render.images import Pictures, Placed
from taut.data.render.tokens import MARK, ControlTokens
from taut.data.render.turn_ends import ANSWERED, ASKED, TurnEnds, derive_turn_ends
from taut.data.render.turn_ends import common_length as common_length
from taut.data.rows.messages import THOUGHTS, Conversation, Message, Tool, images_of
from taut.data.settings import ReadAs
from taut.errors import ConfigError, ModelError, RenderError
from taut.io import limited_call

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
RENDER = "taut.data.render.chat_text:render"
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates open a thought in the prompt, or do not."""
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables of a template that are not settings: each rendering has its own."""
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
)


@dataclass(frozen=True, slots=True)
class Text:
    """Text to tokenize: a rendering, or plain text to which the tokenizer adds its special tokens."""

    text: str
    """The text, with a mark after each control token that is text (``tokens.py``)."""
    is_rendering: bool
    pictures: tuple[Placed, ...] = field(default=(), compare=False)
    """The images that words in it stand for, in order. They do not change the ids."""

    @property
    def words(self) -> str:
        """The text without marks."""
        return self.text.replace(MARK, "")

    @property
    def has_marks(self) -> bool:
        return self.is_rendering and MARK in self.text


class _Cut(NamedTuple):
    """The ids of a text, cut from those of a longer one that begins with it: up to its last special token they are the
    same, whatever follows.
    """

    mark: int
    """The id of that token."""
    number: int
    """Number of its occurrences in the text."""
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
    """Key of a text: the identities of all it is written from, which are held as long as the texts are."""
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
        control_tokens: ReadAs = "as_control",
    ) -> None:
        """``key``: the setting that names another template, for messages. ``image_store``: the store of images.
        ``variables``: values of the template's own variables, which become its defaults. ``control_tokens``: how those
        in what a row says are read.
        """
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer is a {type(tokenizer).__name__} without tokenizer.json; expected a fast tokenizer; "
                "save it once with transformers' fast class"
            )
        # The template, with the values of its variables as their defaults.
        self.tokenizer = tokenizer
        self.key = key
        self.pictures = Pictures(image_store, tokenizer)
        of_processor = image_store.processor.template if image_store is not None else None
        own_template = tokenizer.chat_template if of_processor is None else of_processor
        self.template = own_template if template is None else template
        if self.template is not None:
            limited_call.start()
        self._is_own = template is None
        self._can_vary: dict[str, None] = {}
        """Variables that the template was seen to read."""
        self.set_variables = frozenset(variables or ())
        if variables:
            self.require_variables(variables, self.key_of_variables)
            self.template = with_defaults(str(self.template), variables)
        # How control tokens in what a row says are read.
        is_split = bool(getattr(tokenizer, "split_special_tokens", False))  # all are text then
        self.is_as_text = control_tokens == "as_text" and not is_split
        if self.is_as_text and not self._is_backend_alone:
            raise ConfigError(
                f"{self.key.removesuffix('template')}control_tokens=as_text, and {type(tokenizer).__name__} encodes "
                "text with code of its own; expected a tokenizer that is its tokenizer.json alone; take the key out"
            )
        self._blank: dict[tuple[int, ...], bool] = {}
        """Tokens after the end of a turn -> whether they are white space; most turns have the same."""
        self._ends: dict[str, Ids] = {}
        """Special tokens with the text after them that ends a prompt -> their ids."""
        self._ahead: dict[_Key, str] = {}
        """Texts that ``writing_ahead`` had written."""
        self._named_ends: set[int] = set()
        self.day: datetime.date | None = None
        """The date for templates that write it; by default today."""

    @property
    def key_of_variables(self) -> str:
        return f"{self.key.removesuffix('template')}chat_template_kwargs"

    def require_variables(
        self, variables: Mapping[str, Any], where: str, *, is_of_row: bool = False
    ) -> None:
        """Raise ConfigError, with ``where``, for variables that the template does not read or that are no settings. A
        row may set a variable that is not read to true, false or null.
        """
        if variables.keys() <= self._can_vary.keys():
            return
        fault = ""
        if not isinstance(self.template, str):
            has = "no chat template" if self.template is None else "several chat templates"
            fault = f"the tokenizer has {has}; expected one template that reads them; give it with {self.key}=FILE"
        elif self._renders_itself:
            fault = (
                f"{type(self.tokenizer).__name__} renders messages with code of its own; expected a tokenizer that "
                "uses its chat template; take them out"
            )
        if fault:
            raise ConfigError(f"{where}: found {', '.join(variables)}, and {fault}")
        known, passing = self._settable, (bool, type(None)) if is_of_row else ()
        for name, value in variables.items():
            if name not in known and not isinstance(value, passing):
                reads = ", ".join(known) or "none"
                raise ConfigError(
                    f"{where}: the chat template reads no variable {name!r}; expected one of {reads}"
                    f"{did_you_mean(name, known)}; correct it or take it out (of rows: "
                    'data.ignore_keys=["chat_template_kwargs"])'
                )
        self._can_vary |= dict.fromkeys(name for name in variables if name in known)

    @cached_property
    def _settable(self) -> list[str]:
        """The variables of the template that can be set."""
        try:
            names: list[str] = limited_call.call(
                "taut.data.render.chat_text:variables", self.template
            )
        except (limited_call.FunctionFailed, limited_call.LimitExceeded) as error:
            raise ModelError(
                f"the chat template ({self._source}) cannot be read: {str(error)[:200]}; expected a Jinja template; "
                f"give another one with {self.key}=FILE"
            ) from None
        special = self.tokenizer.special_tokens_map
        return [name for name in names if name not in GIVEN and name not in special]

    def unread(self, variables: Mapping[str, Any]) -> list[str]:
        """The variables of a row that the template does not read."""
        return [name for name in variables if name not in self._settable]

    @property
    def thinking_switch(self) -> str | None:
        """The variable that decides whether the template's prompt opens a thought, if there is one."""
        if not isinstance(self.template, str) or self._renders_itself:
            return None
        return next((name for name in SWITCHES if name in self._settable), None)

    @property
    def _renders_itself(self) -> bool:
        """Whether the tokenizer comes with its own way of rendering."""
        from transformers import PreTrainedTokenizerBase as Library

        return type(self.tokenizer).apply_chat_template is not Library.apply_chat_template

    @property
    def asks_for_the_day(self) -> bool:
        """Whether the template writes a date that ``day`` can set; one of several templates always writes today's."""
        return isinstance(self.template, str) and "strftime_now" in self.template

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
        # The text that the template writes, ahead or now.
        variables = {} if variables is None else variables
        self.require_variables(variables, place, is_of_row=True)
        text = self._ahead.get(_key_of(messages, tools, variables, is_prompt=is_prompt))
        try:
            if text is None:
                adapted = self.adapted(messages)
                text = self.write(adapted, tools, is_prompt=is_prompt, place=place, **variables)
            if self.is_as_text:
                text = self._with_marks(text, (messages, tools, variables, is_prompt), place)
        except limited_call.FunctionFailed as error:
            roles = " ".join(message["role"] for message in messages)
            raise RenderError(
                f"{place}: the chat template does not take these messages ({roles[:80]}): {str(error)[:200]}; expected "
                f"others; change the row or give another template with {self.key}=FILE"
            ) from None
        # With the words that stand for the images.
        images = tuple(placed[: len(images_of(messages))]) if placed else ()
        text = self.pictures.write(text, images, place)
        rendering = checked(text, place, is_rendering=True)
        return replace(rendering, pictures=images) if images else rendering

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens of the tokenizer and the template."""
        try:
            asked = self.adapted(PROBE[:1])
            prompt = self.write(asked, (), is_prompt=True, place="a question")
        except limited_call.FunctionFailed:
            prompt = ""
        return ControlTokens(self.tokenizer, str(self.template), prompt)

    def own(self, text: str) -> str:
        """A text of an assistant with the marks that the texts of ``apply`` have."""
        control = self.control_tokens
        return str(control.mark(text, control.of_turns)) if self.is_as_text else text

    def _with_marks(self, text: str, wanted: Wanted, place: str) -> str:
        """``text``, as the template writes it, with marks after the control tokens that it does not write."""
        messages, tools, variables, is_prompt = wanted
        control = self.control_tokens
        said, functions = control.mark_messages(self.adapted(messages)), control.mark([*tools])
        values = control.mark(variables)
        if MARK not in json.dumps([said, functions, values], ensure_ascii=False):
            return text
        written = self.write(said, functions, is_prompt=is_prompt, place=place, **values)
        if written.replace(MARK, "") == text:
            return written
        raise RenderError(
            f"{place}: the chat template does not write a control token of the row as it is; expected it unchanged; "
            f"remove it from the row, or set {self.key.removesuffix('template')}control_tokens=as_control"
        )

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
        # Ask for all texts at once; an error is raised where ``apply`` asks for the text again.
        try:
            settings: dict[tuple[bool, int], tuple[str, dict[str, Any]]] = {}
            requests = []
            for messages, tools, variables, is_prompt in named.values():
                key = bool(tools), id(variables) if variables else 0
                if key not in settings:
                    settings[key] = self._settings(tools, variables)
                adapted = self.adapted(messages)
                requests.append(_request(adapted, tools, *settings[key], is_prompt=is_prompt))
            outcomes = limited_call.call_each(RENDER, requests)
        except (limited_call.FunctionFailed, limited_call.LimitExceeded):
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
        in_parts = [self._adapted(message, False) for message in probe]
        return self._writes(probe, ASKED, ANSWERED) or not self._writes(in_parts, ASKED, ANSWERED)

    @cached_property
    def takes_thought_parts(self) -> bool:
        """Whether the template writes a thought only as a part of the content, as Mistral's do."""
        question, answer = (self._adapted(message, self.takes_strings) for message in PROBE)
        keyed = {**answer, **dict.fromkeys(THOUGHTS, ANSWERED)}
        # of any other type, where the template writes a list as it is
        part, other = (
            {**answer, "content": [{"type": kind, kind: ANSWERED}]} for kind in ("thinking", ASKED)
        )
        return self._writes([question, part], ANSWERED) and not any(
            self._writes([question, it], ANSWERED) for it in (keyed, other)
        )

    def _writes(self, messages: Sequence[Message], *words: str) -> bool:
        try:
            text = self.write(messages, (), is_prompt=False, place="two short messages")
        except limited_call.FunctionFailed:
            return False
        return all(word in text for word in words)

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form that the template takes; a thought is there under every name that templates know."""
        return [self._adapted(message, self.takes_strings) for message in messages]

    def _adapted(self, message: Message, takes_strings: bool) -> Message:
        thought = next((message[key] for key in THOUGHTS if message.get(key)), None)
        if thought is not None:
            message = {**message, **dict.fromkeys(THOUGHTS, thought)}
        content = message.get("content")
        if thought is not None and self.takes_thought_parts:
            parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}]
            return {**message, "content": parts if content else parts[:1]}
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

        Raises limited_call.FunctionFailed with the template's error.
        """
        template, variables = self._settings(tools, switches)
        request = _request(messages, tools, template, variables, is_prompt=is_prompt)
        # Code that comes with the tokenizer, which trust_remote_code allows to run here.
        if self._renders_itself:
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
                raise limited_call.FunctionFailed(reason) from None
        # Any other template in a process of its own, within limits.
        try:
            text: str = limited_call.call(RENDER, *request)
        except limited_call.LimitExceeded as error:
            raise ModelError(
                f"{place}: the chat template ({self._source}) {error}; expected one that renders a row at once; "
                f"give another template with {self.key}=FILE"
            ) from None
        return text

    @property
    def _named(self) -> str | None:
        """The template, with ``day`` as its date; None where there are several."""
        if not isinstance(self.template, str):
            return None
        if self.day is None or not self.asks_for_the_day:
            return self.template
        # set by a macro: the library takes no function as an argument
        codes = [(code, self.day.strftime(code)) for code in CODES]
        return SET_DAY.replace("CODES", repr(codes)) + self.template

    def _settings(
        self, tools: Sequence[Tool], switches: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """The template and all its variables. Raises limited_call.FunctionFailed where no template fits."""
        try:
            template = self.tokenizer.get_chat_template(self._named, list(tools) or None)
        except ValueError as error:  # several templates, none of which is the default
            raise limited_call.FunctionFailed(str(error)) from None
        read = {
            name: value for name, value in switches.items() if name not in self.unread(switches)
        }
        return template, {**self.tokenizer.special_tokens_map, **read}

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
        marked = [text for text in unique if self.is_as_text and text.has_marks]
        if marked:
            with self._panics_as_model_errors():
                encoded = self.control_tokens.encode([text.text for text in marked])
            ids_of.update(zip(marked, encoded, strict=True))
        # Renderings and plain texts, each in one call. A text with which another begins is cut from that.
        for is_rendering in (True, False):
            group, whole = list[Text](), None
            for text in unique:
                if text.is_rendering != is_rendering or text in ids_of:
                    continue
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
        """The cut of a longer text's ids that gives the ids of ``text``, with which it begins; None if it is not known.

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
        """The ids of texts of one kind. The backend of the library's tokenizers is called directly, without the offsets
        and masks that the library asks for.
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
        """The span [start, stop) of each token in the text's words; empty for added tokens."""
        if self.is_as_text and text.has_marks:
            return self.control_tokens.spans(text.text)
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

    def name_ends(self, named: Collection[int]) -> None:
        """Let these tokens, which the model's files name as ends, decide where the template leaves a choice."""
        if {*named} != self._named_ends:
            self._named_ends = {*named}
            for derived in ("turn_ends", "end_ids"):
                self.__dict__.pop(derived, None)

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """The ends of the assistant's turns. Raises RenderError where no token ends a turn."""
        eos = self.tokenizer.eos_token_id
        named = self._named_ends if eos is None else {*self._named_ends, int(eos)}
        ends = derive_turn_ends(self, named)
        if not ends.plain:
            row = self.apply(PROBE, (), "the chat template").text
            fault = "does not write what an assistant says; expected its content"
            if PROBE[1]["content"] in row:
                fault = (
                    f"ends an assistant turn with no special token (it writes {row[-40:]!r}), so a model could never "
                    "learn to stop; expected one such as eos after the content"
                )
            raise RenderError(
                f"the chat template {fault}; give another template with {self.key}=FILE"
            )
        return ends

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token that ends an assistant turn as rendered; without a template, the eos."""
        if self.template is None:
            eos = self.tokenizer.eos_token_id
            return () if eos is None else (int(eos),)
        return self.turn_ends.plain

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens that may end a turn: the special ones, and those that end turns of the template."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {index for index, token in added if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.stop_ids, *self.turn_ends.calls}

    def closed(self, text: Text, turn: Message, role: str | None = None) -> Text:
        """The text of a row that ends with ``turn``, up to the token that ends it, where that is the first of the next
        header. ``role``: that of the next message; by default tool after calls, else user.
        """
        closing = self.turn_ends.closing
        if turn.get("tool_calls") and ("tool" in closing or self.turn_ends.calls):
            role = "tool"
        elif role is None or role not in closing:
            role = "user"
        return replace(text, text=text.text + closing[role]) if role in closing else text

    def end_of_turn(self, ids: Ids, start: int, place: str) -> int:
        """The position of the token that ends the turn begun at ``start``, which is the last of the row."""
        end = self.turn_ends.position(ids)
        if end is None or end < start:
            # Else the last token that may be an end, if only white space follows it.
            last = (at for at in range(len(ids) - 1, start - 1, -1) if ids[at] in self.end_ids)
            end = next(last, None)
            if end is not None:
                after = tuple(ids[end + 1 :])
                if after not in self._blank:
                    self._blank = {} if len(self._blank) > 1000 else self._blank
                    self._blank[after] = not self.decode(after).strip()
                end = end if self._blank[after] else None
        if end is None:
            raise RenderError(
                f"{place}: the chat template writes no token that ends this turn ({self.quoted(ids[start:][-8:])}); "
                f"expected {self.quoted(self.stop_ids)}; correct it or give one with {self.key}=FILE"
            )
        return end

    def ids_of_part(self, text: str) -> Ids:
        """The ids of a part of a rendering."""
        part = Text(text, is_rendering=True)
        return self.encode([part])[part]

    def probe(self, answer: Message, tools: Sequence[Tool]) -> Probe | None:
        """``answer`` to PROBE's question; None where the template does not take it."""
        try:
            prompt = self.apply(PROBE[:1], tools, "the probe", is_prompt=True)
            row = self.closed(self.apply((*PROBE[:1], answer), tools, "the probe"), answer)
            ids_of = self.encode([prompt, row])
            start = common_length(ids_of[prompt], ids_of[row])
            end = self.end_of_turn(ids_of[row], start, "the probe")
        except RenderError:
            return None
        return Probe(prompt, row, ids_of[row], start, end)

    def meeting(self, prompt: Text, text: Text, ids_of: Mapping[Text, Ids]) -> Ids | None:
        """The ids of a text with a token that reaches over the end of its prompt: the prompt's own, then the answer's
        part of that token encoded apart, as a model has to write it. None where that reads back as another text.
        """
        if not text.text.startswith(prompt.text):
            return None
        whole, begin = ids_of[text], len(prompt.words)
        spans = self.spans(text)
        over = next((at for at, (first, stop) in enumerate(spans) if first < begin < stop), None)
        if over is None:
            return None
        part = self.ids_of_part(text.words[begin : spans[over][1]])
        ids = [*ids_of[prompt], *part, *whole[over + 1 :]]
        return ids if self.decode(ids) == self.decode(whole) else None

    def context_length(self, prompt: Ids, ids: Ids, place: str) -> int:
        """len(prompt), if it is a prefix of ``ids``; else a RenderError."""
        if ids[: len(prompt)] == prompt:
            return len(prompt)
        at = common_length(prompt, ids)
        raise RenderError(
            f"{place}: the prompt is not a token prefix of the row: after {self.quoted(ids[max(at - 4, 0) : at])}, "
            f"token {at} is {self.quoted(prompt[at : at + 1])} in the prompt and {self.quoted(ids[at : at + 1])} in "
            "the row; expected equal ones; move the white space between them to the answer, or set "
            f"{self.key}=FILE"
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
        if self.is_as_text:
            parts.append("as_text")
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def continuing(self, row: Conversation) -> Text:
        """The text of a row up to the end of its last message's content, an assistant's, which an answer goes on with:
        where a word after the content would stand. White space at its end stays where the template keeps it.

        Raises RenderError unless the text, and its ids, are the beginning of the rendering of the row.
        """
        # A word that the row does not have marks the place after the content.
        *before, last = row.messages
        word = ANSWERED
        while word in str([row.messages, row.tools]):
            word += "x"
        marked = [*before, {**last, "content": f"{last['content']}{word} "}]
        whole = self.apply_to(row, row.messages)
        text, is_written, after = self.apply_to(row, marked).text.rpartition(word)
        text = text if after.startswith(" ") else text.rstrip()
        begun = replace(whole, text=text)
        ids_of = self.encode([begun, whole])
        is_same = ids_of[whole][: len(ids_of[begun])] == ids_of[begun]
        is_whole = text.rstrip().endswith(self.own(last["content"].strip()))
        if not (is_written and is_same and is_whole):
            raise RenderError(
                f"{row.place}: the chat template does not write the beginning of an answer unchanged "
                f"({whole.text[-80:]!r}); expected it last; set {self.key}=FILE, or take the message out of the prompt"
            )
        return begun


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
