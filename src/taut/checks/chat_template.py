"""The chat template: that it takes the rows, writes all of them, and gives a server the prompts that were trained on.

The first rows are rendered, whole and turn by turn, on their own:

    chat.whole     the conversation rendered once
    turn.prompt    the messages before an answer, with the generation prompt: the prompt that a server renders
    turn.row       the messages up to and with that answer

Rendering for training refuses rows; rendering here does not, because each check reports its own fault. The number of
rows, turns and characters is bounded. A fault in more than half of the rows is a fault of the template; a fault in a
few is a fault of these rows.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers.utils.hub import cached_file

from taut.checks.registry import Finding, check, failed, passed, skip_if, split_error, warned
from taut.checks.session import GENERATED, Session, once
from taut.data.render.chat_template import PROBE, Ids, Template, Text, checked, common_length
from taut.data.render.render import CLOSED, OPENED, THINKING
from taut.data.render.written import CLOSE, thought_of
from taut.data.rows.messages import (
    THOUGHTS,
    Completion,
    Conversation,
    Document,
    Message,
    RowForm,
    text_of,
)
from taut.errors import RenderError
from taut.io import hub
from taut.io.console import counted
from taut.types import Sample

ROWS = 16
"""Number of rows to decode or to render as samples."""
NO_CHATS = "no row is a conversation"


@dataclass(frozen=True)
class Turn:
    """An answer: the text before it, and the text with it."""

    place: str
    index: int
    message: Message
    prompt: Text
    row: Text

    @property
    def written(self) -> str:
        """The text that the template writes after the prompt; empty if the row does not begin with the prompt."""
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

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls of functions in its messages."""
        messages = self.row.messages
        return [call["function"] for message in messages for call in message.get("tool_calls", ())]


@dataclass(frozen=True)
class Rendered:
    """Rendered rows of the training data."""

    chats: tuple[Chat, ...]
    turns: tuple[Turn, ...]
    """The turns of all chats; a prompt with its completion is one too."""
    refused: Sequence[RenderError]
    """The template's reason for each conversation that it refuses."""
    documents: Sequence[Text]
    ids_of: Mapping[Text, Ids]
    apart: frozenset[str] = frozenset()
    """Places of turns that are learned after the prompt although it does not begin their row, or although the template
    does not write their thought (``render.py``)."""


@once
def rendered(session: Session) -> Rendered:
    """Render the first rows of the training data."""
    template = session.language.renderer.template
    chats: list[Chat] = []
    turns: list[Turn] = []
    refused: list[RenderError] = []
    documents: list[Text] = []
    room = 300_000  # characters of all renderings together, but for the first row
    for row in session.rows:
        if isinstance(row, Conversation):
            try:
                chat = _rendered_chat(row, template)
            except RenderError as error:
                refused.append(error)
                continue
            chats.append(chat)
            turns.extend(chat.turns)
            room -= len(chat.whole.text) * (1 + 2 * len(chat.turns))
        elif isinstance(row, Completion):
            message = {"role": "assistant", "content": row.completion}
            prompt = checked(row.prompt, row.place, is_rendering=False)
            whole = checked(row.prompt + row.completion, row.place, is_rendering=False)
            turns.append(Turn(short_place(row.place), 0, message, prompt, whole))
            room -= 2 * len(whole.text)
        else:
            assert isinstance(row, Document)
            documents.append(checked(row.text, row.place, is_rendering=False))
            room -= len(row.text)
        if room < 0:
            break
    # all texts in one call: ids of each, whole and in parts
    texts = [chat.whole for chat in chats] + documents
    texts += [text for turn in turns for text in (turn.prompt, turn.row)]
    ids_of = template.encode(texts)
    apart: set[str] = set()
    for chat in chats:
        # a turn is learned after its prompt if the row does not begin with it, or lacks the turn's thought
        odd = []
        for turn in chat.turns:
            prompt_ids = ids_of[turn.prompt]
            is_prefix = ids_of[turn.row][: len(prompt_ids)] == prompt_ids
            if not is_prefix or _reasoning(turn.message) not in turn.row.text:
                odd.append(turn.place)
        if odd:
            try:
                session.language.renderer.render(chat.row)
            except RenderError:
                continue
            apart.update(odd)
    return Rendered(tuple(chats), tuple(turns), refused, documents, ids_of, frozenset(apart))


def _chats(session: Session) -> tuple[Chat, ...]:
    """The rows that are conversations. Skips the check if there are none."""
    skip_if(not rendered(session).chats, NO_CHATS)
    return rendered(session).chats


def _rendered_chat(row: Conversation, template: Template) -> Chat:
    whole = template.apply_to(row, row.messages)
    turns = []
    for index in [index for index in row.learned if index][-4:]:  # turns that are looked at
        place = f"{short_place(row.place)}: messages[{index}]"
        before, with_answer = row.messages[:index], row.messages[: index + 1]
        placed = whole.pictures
        prompt = template.apply_to(row, before, place, is_prompt=True, placed=placed)
        until = whole
        if index + 1 < len(row.messages):
            until = template.apply_to(row, with_answer, placed=placed)
        turns.append(Turn(place, index, row.messages[index], _bare(prompt), _bare(until)))
    return Chat(row, _bare(whole), tuple(turns))


def _bare(text: Text) -> Text:
    """The text without marks, as a server reads it."""
    return replace(text, text=text.words)


def short_place(place: str) -> str:
    """A row's place without the directory."""
    return PurePath(place).name


def quoted(text: str, most: int = 60) -> str:
    """A text in a line of evidence, its middle left out if it is long."""
    if len(text) > most:
        half = (most - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text)


def _normal(text: str) -> str:
    """Normalize text for comparing decoded text: many tokenizers normalize Unicode, which loses nothing."""
    return unicodedata.normalize("NFKC", text)


def _reasoning(message: Message) -> str:
    """The reasoning before an answer, from a field of its own or between tags; empty if there is none."""
    return thought_of(message)[0]


def _answer(message: Message) -> str:
    """The words of an assistant's message without its reasoning."""
    return text_of(message["content"]).rpartition(CLOSE)[2].strip()


def _texts(message: Message) -> list[str]:
    """The words of a message; if it has pictures, the words between them."""
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _as_json(text: str) -> list[str]:
    """A text as JSON writes it, without quotation marks."""
    return [json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)]


# -- what the template writes of a conversation


@check("template.takes", after=["data.columns"])
def the_template_takes_the_rows(session: Session) -> Finding:
    """Does the chat template take the rows' messages?

    One row that is refused is left to ``data.rows``; most of them are not.
    """
    chats, refused = rendered(session).chats, rendered(session).refused
    template = session.language.renderer.template
    number = len(chats) + len(refused)
    skip_if(not number, NO_CHATS)
    if 2 * len(refused) > number:
        says, remedy = split_error(refused[0])
        place, _, reason = says.partition(": ")
        return failed(
            f"the template refuses {len(refused)} of {number} conversations",
            measured=(len(refused), f"of {number} rows"),
            evidence=[f"{short_place(place)}: {reason}"],
            remedy=remedy,
        )
    unread = Counter(
        name for chat in chats for name in template.unread(chat.row.template_variables)
    )
    notes = [f"not read: chat_template_kwargs.{name} of {num} rows" for name, num in unread.items()]
    return passed("the template takes them", len(chats), f"of {number} rows", notes)


MARK = re.compile(r"<\|\w+\|>|<(?:start|end)_of_turn>|\[/?INST\]")
"""Marks by which templates write roles and the ends of turns."""


@check("template.lossless", after=["template.takes"])
def the_tokenizer_keeps_the_text(session: Session) -> Finding:
    """Does the tokenizer keep the text: ids read back as what was rendered?

    Unicode normalization and a space in front are no loss. And are they the same when it is asked again?
    """
    rows = rendered(session)
    texts = [chat.whole for chat in rows.chats]
    texts += [turn.row for turn in rows.turns if not turn.row.is_rendering]
    texts = [*texts, *rows.documents][:ROWS]
    skip_if(not texts, "no row could be rendered")
    again = session.language.renderer.template.encode(texts)
    if other := [text for text in texts if again[text] != rows.ids_of[text]]:
        names = session.tokenizer.convert_ids_to_tokens
        return failed(
            f"asked twice, the tokenizer makes other ids of {len(other)} of {len(texts)} rows",
            evidence=[f"{names(ids[other[0]][:40])}" for ids in (rows.ids_of, again)],
            remedy='it draws its merges: set "dropout": null at "model" in its tokenizer.json',
        )
    added = session.tokenizer.added_tokens_decoder.values()
    swallowing = [token for token in added if token.lstrip or token.rstrip]  # in serving too

    def bare(words: str) -> str:
        for token in swallowing:
            before, after = r"\s*" * token.lstrip, r"\s*" * token.rstrip
            words = token.content.join(
                re.split(f"{before}{re.escape(token.content)}{after}", words)
            )
        return _normal(words)

    lost = []
    for text in texts:
        decoded = session.tokenizer.decode(
            rows.ids_of[text], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        before, after = bare(text.text).strip(), bare(str(decoded))
        if before not in after:
            lost.append((before, after.strip()))
    if 2 * len(lost) > len(texts):
        return failed(
            f"the ids of {len(lost)} of {len(texts)} rows read back as another text",
            measured=([_becomes(*pair) for pair in lost], f"of {len(texts)} rows"),
            remedy="the tokenizer loses what the rows say (its normalizer, or characters it has no token for); use one "
            "that keeps text, or prepare the rows as the model expects them",
        )
    notes = [f"lost in {len(lost)} rows: {_becomes(*lost[0])}"] if lost else []
    marks = dict.fromkeys(mark for text in texts for mark in MARK.findall(text.text))
    id_of = session.tokenizer.backend_tokenizer.token_to_id
    pieces = [mark for mark in marks if id_of(mark) is None]  # made for another tokenizer
    if pieces:
        notes.append(f"written in pieces, being no tokens: {' '.join(pieces[:3])}")
    return passed("ids read back as the text", len(texts) - len(lost), "rows", notes)


def _becomes(text: str, decoded: str) -> str:
    """The first words that are lost, before and after."""
    left, right = text[:4000], decoded[:4000]
    for kind, i, j, k, m in difflib.SequenceMatcher(
        None, left, right, autojunk=False
    ).get_opcodes():
        if kind in ("delete", "replace"):
            before = text[max(0, i - 8) : max(j, i + 12)]
            return f"{quoted(before)} becomes {quoted(decoded[max(0, k - 8) : max(m, k + 12)])}"
    return f"{quoted(text)} becomes {quoted(decoded)}"


@check("template.tokenizer", after=["template.lossless"])
def the_ids_are_those_of_tokenizer_json(session: Session) -> Finding:
    """Are the ids those of the model's tokenizer.json, which some servers read without the tokenizer's class?"""
    rows, added = rendered(session), session.run.tokens.add
    name, revision = hub.pinned(session.run.model)
    path = cached_file(
        name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **revision
    )
    texts = [text for text in rows.ids_of if not any(token in text.text for token in added)][:ROWS]
    skip_if(not path or not texts, "no row could be rendered, or the model has no tokenizer.json")
    file, differ = Tokenizer.from_file(str(path)), []
    # the file's own tokenizer, as servers in other languages read it
    file.no_truncation()
    file.no_padding()
    for text in texts:
        ids = rows.ids_of[text]
        others = file.encode(text.text, add_special_tokens=not text.is_rendering).ids
        if ids != others:
            at = common_length(ids, others)
            parts = ids[max(0, at - 8) : at], ids[at : at + 1], others[at : at + 1]
            words = [quoted(str(session.tokenizer.decode(part))) for part in parts]
            differ.append("after {} comes {}, and of the file {}".format(*words))
    if not differ:
        return passed("the ids of tokenizer.json", len(texts), "texts")
    return warned(
        f"{type(session.tokenizer).__name__} makes other ids of {len(differ)} of {len(texts)} than tokenizer.json",
        measured=(differ, f"of {len(texts)} texts"),
        remedy="the run trains and saves those of the class; if the model knows those of the file, set "
        "tokenizer_class=TokenizersBackend in tokenizer_config.json (qwen2 ignores it)",
    )


@check("template.markup", after=["template.takes"])
def messages_have_no_special_tokens(session: Session) -> Finding:
    """Are the messages free of control tokens, which a server takes for the template's own?

    In a conversation that was rendered before they are there twice.
    """
    chats, template = _chats(session), session.language.renderer.template
    pattern = template.control_tokens.of_turns
    wanted = () if template.is_as_text else session.run.tokens.add  # made for the messages
    tokens, places = Counter[str](), list[str]()
    for chat in chats:
        where: list[str] = []
        for index, message in enumerate(chat.row.messages):
            more = [message[key] for key in (*THOUGHTS, "tool_calls") if key in message]
            for words in (*_texts(message), json.dumps(more, ensure_ascii=False)):
                for hit in pattern.finditer(words):
                    if hit[0] not in wanted:
                        tokens[hit[0]] += 1
                        around = quoted(words[max(0, hit.start() - 20) : hit.start() + 40])
                        where.append(f"{chat.place}: messages[{index}]: {around}")
        places += where[:1]
    unit = f"of {len(chats)} rows"
    if not places:
        return passed("no special token in the messages' words", 0, unit)
    says = f"{' '.join([*tokens][:3])} in the messages of {len(places)} {unit} is trained as "
    readers = "servers that tokenize a rendering (transformers, vLLM) read it"
    if template.is_as_text:
        return warned(
            f"{says}text",
            measured=(places, unit),
            remedy=f"{readers} as a control token and serve other ids than were trained; ask through taut or with ids, "
            "or take it out",
        )
    is_rendered = 2 * len(places) > len(chats)
    remedy = f"{readers} so too, whoever writes it; take it out"
    if is_rendered:
        remedy = "the rows seem to be rendered already; give plain messages, or the rendered text in a column text"
    return (failed if is_rendered else warned)(
        f"{says}a control token",
        measured=(places, unit),
        remedy=f"{remedy}; if people say it, set data.control_tokens=as_text, which trains it as text",
    )


FIRST, AGAIN = "first words", "more words"
SYSTEM_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": AGAIN},
)


@check("template.system", after=["template.takes"])
def system_messages_are_written(session: Session) -> Finding:
    """Are the rows' system messages written?

    Also what the template writes of its own if there is none.
    """
    chats = _chats(session)
    num_with, dropped = 0, []
    for chat in chats:
        systems = [message for message in chat.row.messages if message["role"] == "system"]
        num_with += bool(systems)
        words = [text.strip() for message in systems for text in _texts(message)]
        lost = next((text for text in words if text not in chat.whole.text), None)
        if lost is not None:
            text = f"{quoted(lost)} is not in {quoted(chat.whole.text)}"
            dropped.append(f"{short_place(chat.place)}: {text}")
    # text before the first user message and not before a later one, without special tokens
    try:
        text = session.language.renderer.template.apply(SYSTEM_PROBE, (), "the probe").text
    except RenderError:
        text = ""
    tokens = [token.content for token in session.tokenizer.added_tokens_decoder.values()]
    if tokens:
        text = re.sub("|".join(map(re.escape, tokens)), "\n", text)
    head, first, rest = text.partition(FIRST)
    later = rest.partition(AGAIN)[0]
    default = head[: len(head) - common_length(head[::-1], later[::-1])]
    default = re.sub(r"^\s*(system|developer)\s*\n", "", default).strip() if first else ""
    if dropped:
        instead = [f"the template writes {quoted(default)} in every row"] if default else []
        return failed(
            f"the template leaves out the system message of {len(dropped)} of {num_with} rows",
            measured=(len(dropped), f"of {num_with} rows"),
            evidence=[*dropped[:3], *instead],
            remedy="give a template that writes system messages with data.template=FILE, or put their words into the "
            "first user message",
        )
    notes = []
    if given := session.run.data.system_messages:
        begun = [chat.row.messages[0] for chat in chats if chat.row.messages[0]["role"] == "system"]
        num_given = sum(message["content"] in given for message in begun)
        own = f"{len(begun) - num_given} rows have a system message of their own, which is kept"
        notes.append(f"{num_given} rows have the one of data.system; {own}")
    if default:
        without = len(chats) - num_with
        notes.append(f"where there is none ({without} rows), the template writes {quoted(default)}")
    return passed("written where rows have one", num_with, f"of {len(chats)} rows", notes)


@check("template.content", after=["template.lossless"])
def messages_are_written_word_for_word(session: Session) -> Finding:
    """Does the template write what users, assistants and tools say, word for word?

    Each message's words are looked for in the rendering, in their order. White space around them may go, and is noted.
    """
    chats = _chats(session)
    number, kinds, lost = 0, set(), []
    for chat in chats:
        text, at = chat.whole.text, 0
        for index, message in enumerate(chat.row.messages):
            if message["role"] == "system":  # may stand elsewhere: template.system
                continue
            number += 1
            for words in map(str.strip, _texts(message)):
                spellings = [words]
                if message["role"] == "assistant":
                    spellings = [_answer(message)]
                elif message["role"] == "tool":  # as JSON too
                    spellings += _as_json(words)
                places = [(text.find(spelling, at), len(spelling)) for spelling in spellings]
                first = min((place for place in places if place[0] >= 0), default=None)
                if first is None:
                    kinds.add(message["role"] + " with calls" * bool(message.get("tool_calls")))
                    shown = quoted(text_of(message["content"]))
                    lost.append(f"{short_place(chat.place)}: messages[{index}]: {shown}")
                    break
                at = sum(first)
    if lost:
        return failed(
            f"the template leaves out or changes words of {len(lost)} of {number} messages "
            f"({', '.join(sorted(kinds))})",
            measured=(lost, f"of {number} messages"),
            remedy="give a template that writes every message as it is with data.template=FILE, or change the rows",
        )
    # white space that the template takes off is no fault
    num_trimmed = sum(
        message["role"] == "user" and any(text not in chat.whole.text for text in _texts(message))
        for chat in chats
        for message in chat.row.messages
    )
    notes = []
    if num_trimmed:
        notes.append(f"white space around the words of {num_trimmed} messages is taken off")
    return passed("every message, word for word", number, "messages", notes)


@check("template.thinking", after=["template.content"])
def reasoning_is_written_where_rows_have_it(session: Session) -> Finding:
    """Is reasoning written where rows have it, and opened by the prompt only there?"""
    skip_if(session.is_generated, GENERATED)
    ids_of, apart = rendered(session).ids_of, rendered(session).apart
    every = [turn for chat in _chats(session) for turn in chat.turns]
    turns = [turn for turn in every if turn.place not in apart]
    reasoned = [turn for turn in turns if _reasoning(turn.message)]

    # a thought that the prompt opens is closed at once, or answered by reasoning
    openings = []
    for turn in turns:
        prompt, row = turn.prompt.text, turn.row.text
        prompt_ids, row_ids = ids_of[turn.prompt], ids_of[turn.row]
        is_prefix = row_ids[: len(prompt_ids)] == prompt_ids
        is_closed_at_once = is_prefix and _begins_with_an_empty_thought(turn)
        is_opened = OPENED.search(prompt) is not None and not _reasoning(turn.message)
        if is_opened and not is_closed_at_once:
            at = common_length(prompt, row)
            then = quoted(row[at : at + 60])
            openings.append(f"{turn.place}: {quoted(prompt[-40:])}, the row then {then}")
    thoughts = {turn.place: _reasoning(turn.message) for turn in reasoned}
    lost = [turn.place for turn in reasoned if thoughts[turn.place] not in turn.row.text]
    closed = [turn for turn in reasoned if CLOSED.search(turn.prompt.text) and not turn.is_prefix]
    switch, unit = session.language.renderer.template.thinking_switch, f"of {len(reasoned)} answers"
    if lost:
        return failed(
            f"the template leaves out the reasoning of {len(lost)} {unit}",
            measured=([f"{place}: {quoted(thoughts[place])}" for place in lost], unit),
            remedy="give a template that writes the reasoning of the answer being trained with data.template=FILE, or "
            "take it out of the rows",
        )
    if openings:
        off = f"set data.chat_template_kwargs = {{ {switch} = false }}, or " if switch else ""
        return failed(
            "the generation prompt opens a thought for answers without reasoning: "
            f"{len(openings)} of {len(turns)} answers",
            measured=(openings, f"of {len(turns)} answers"),
            remedy=f"{off}give rows with reasoning, or a template whose prompt does not open it (data.template=FILE)",
        )
    if closed:
        return failed(
            f"the generation prompt closes a thought before the reasoning of {len(closed)} {unit}",
            measured=([f"{turn.place}: {quoted(turn.prompt.text[-40:])}" for turn in closed], unit),
            remedy="give a template whose generation prompt leaves reasoning open with data.template=FILE, or take it "
            "out of the rows",
        )
    # nothing is wrong: what the rows have, and what prompts do
    reasoned = [turn for turn in every if _reasoning(turn.message)]
    says = "reasoning is written" if reasoned else "no row has reasoning"
    num_empty = sum(
        _begins_with_an_empty_thought(turn) for turn in turns if not _reasoning(turn.message)
    )
    notes = []
    if num_empty:
        notes.append(f"{num_empty} answers are taught to begin with an empty thought")
    if switch:  # what prompts become if a server switches thinking off or on
        template = session.language.renderer.template
        ways: list[dict[str, bool]] = [{}, {switch: False}, {switch: True}]
        trained, *others = (
            template.write(PROBE[:1], (), is_prompt=True, place=f"a prompt with {way}", **way)
            for way in ways
        )
        for way, served in zip(ways[1:], others, strict=True):
            if served != trained:
                value = f"{switch}={str(way[switch]).lower()}"
                notes.append(
                    f"served with {value}, prompts are not those trained on: {quoted(served[-40:])}"
                )
    return passed(says, len(reasoned), f"of {len(every)} answers", notes)


def _begins_with_an_empty_thought(turn: Turn) -> bool:
    """Whether an answer begins with a thought that is empty, or with the end of the one that its prompt opens."""
    begin = THINKING.match(turn.written)
    return begin is not None and CLOSED.search(begin[0]) is not None


@check("template.tools", after=["template.content"])
def tools_and_calls_are_written(session: Session) -> Finding:
    """Are tools and calls written, their arguments as JSON or in the template's own tags?"""
    chats = [chat for chat in rendered(session).chats if chat.row.tools or chat.calls]
    skip_if(not chats, "no row has tools")
    wrong = [(chat, *fault) for chat in chats if (fault := next(_tool_faults(chat), None))]
    if wrong:
        return failed(
            f"in {len(wrong)} of {len(chats)} rows the template {wrong[0][1]}",
            measured=(
                [f"{short_place(it.place)}: {s}" for it, _, s in wrong],
                f"of {len(chats)} rows",
            ),
            remedy="give a template that writes tools, and calls as JSON (tojson), with data.template=FILE; or take "
            "them out of the rows",
        )
    number = sum(len(chat.calls) for chat in chats)
    return passed(f"tools and calls are written in {len(chats)} rows", number, "calls")


def _tool_faults(chat: Chat) -> Iterator[tuple[str, str]]:
    """Faults of the template with tools, and the words concerned."""
    text = chat.whole.text
    for tool in chat.row.tools:
        if tool["function"]["name"] not in text:
            yield "leaves out tools", f"the tool {quoted(tool['function']['name'])}"
    for call in chat.calls:
        arguments, name = call.get("arguments", {}), call["name"]
        if name not in text:
            yield "leaves out calls", f"the call of {quoted(name)}"
        if arguments and repr(arguments) in text:
            try:
                json.loads(repr(arguments))
            except ValueError:
                yield "writes arguments as Python, not as JSON", quoted(repr(arguments))
        for key, value in arguments.items():
            if isinstance(value, str):
                spellings = [value, *_as_json(value)]
            elif isinstance(value, int | float):
                spellings = [str(value), json.dumps(value)]
            else:  # a value with parts may be written in any way
                spellings = [""]
            if key not in text or not any(words in text for words in spellings):
                yield "leaves out arguments", f"{key} of {quoted(name)}"


# -- prompts and answers as tokens


@check("template.bos", after=["template.takes"])
def rows_begin_with_one_bos(session: Session) -> Finding:
    """Does a row begin with one BOS at most?

    A tokenizer that puts BOS in front of plain text does not do so for a rendering.
    """
    texts, bos = rendered(session), session.tokenizer.bos_token_id
    rows = [(short_place(chat.place), texts.ids_of[chat.whole]) for chat in texts.chats]
    plain_turns = [turn for turn in texts.turns if not turn.row.is_rendering]
    rows += [(turn.place, texts.ids_of[turn.row]) for turn in plain_turns]
    rows += [("a text", texts.ids_of[text]) for text in texts.documents]
    skip_if(not rows, "no row could be rendered")
    if bos is None:
        return passed("the tokenizer has no BOS", 0, "a row")
    template, token = session.language.renderer.template, session.tokenizer.bos_token
    twice = []
    for place, ids in rows:
        # looked for at the beginning alone if BOS ends turns too
        after = ids[1:2] if bos == session.tokenizer.eos_token_id else ids[1:]
        if any(pair == (bos, bos) for pair in zip(ids, after, strict=False)):
            twice.append(f"{place}: {template.quoted(ids[:8])}")
    if 2 * len(twice) > len(rows):
        return failed(
            f"{token} stands twice running in {len(twice)} of {len(rows)} rows",
            measured=(twice, f"of {len(rows)} rows"),
            remedy=f"write {token} once: take it out of the template (data.template=FILE) or out of the rows' text",
        )
    number = sum(ids[:1] == [bos] for _, ids in rows)
    notes = []
    if texts.chats and number < len(rows):
        probe = Text("Hi", is_rendering=False)
        if template.encode([probe])[probe][:1] == [bos]:
            notes.append(
                f"the tokenizer puts {token} before plain text, the template writes none: chats are trained and served "
                "without it"
            )
    says = f"{token} once" if number else f"the rows begin without {token}"
    return passed(says, number, f"of {len(rows)} rows", notes)


HEADERS = 4
"""Number of conversations whose answer header is examined."""


@check("template.prompt", after=["template.markup", "template.system", "template.thinking"])
def the_served_prompt_begins_the_row(session: Session) -> Finding:
    """Is what a server feeds the model the beginning of what was trained, header included?

    As text; whether their tokens meet is ``template.boundary``.
    """
    chats = rendered(session).chats
    if session.is_generated:  # the model writes all that is learned: a stand-in for its answers
        answer = {"role": "assistant", "content": "an answer"}
        rows = [
            replace(chat.row, messages=(*chat.row.messages, answer)) for chat in chats[:HEADERS]
        ]
        rows = [replace(row, learned=(len(row.messages) - 1,)) for row in rows]
        chats = tuple(_rendered_chat(row, session.language.renderer.template) for row in rows)
    turns = [turn for chat in chats for turn in chat.turns]
    skip_if(not turns, NO_CHATS)
    apart = rendered(session).apart
    # as text, is the prompt the row's beginning?
    wrong = [turn for turn in turns if not turn.is_prefix and turn.place not in apart]
    wrong = [] if session.is_generated else wrong
    if 2 * len(wrong) > len(turns):
        evidence = []
        for turn in wrong:
            prompt, row = turn.prompt.text, turn.row.text
            at = common_length(prompt, row)
            evidence.append(
                f"{turn.place}: after {quoted(prompt[max(0, at - 20) : at])} the prompt has "
                f"{quoted(prompt[at : at + 30])}, the row {quoted(row[at : at + 30])}"
            )
        return failed(
            f"the prompt is not the beginning of the row before {len(wrong)} of {len(turns)} answers",
            measured=(evidence, f"of {len(turns)} answers"),
            remedy="the model would be asked with other words than it is taught after; give a template whose "
            "generation prompt is what it writes before answers with data.template=FILE",
        )
    # does the answer begin with a header that the generation prompt should have?
    taught = []
    for chat in (chat for chat in chats[:HEADERS] if chat.turns):
        turn = chat.turns[0]
        words = _answer(turn.message)
        header = turn.written.partition(words)[0] if words else ""
        if not header.strip() or _reasoning(turn.message):
            continue
        # is it a header like those of earlier messages?
        messages, pictures = chat.row.messages[: turn.index], chat.whole.pictures
        template = session.language.renderer.template
        before = template.apply_to(chat.row, messages, turn.place, placed=pictures).text
        begin = header.split(maxsplit=1)[0].split(">")[0]
        if before == turn.prompt.text and begin in before:
            taught.append(f"{turn.place}: the answer begins with {quoted(header)}")
    if taught:
        return failed(
            "the template has no generation prompt: the header would be part of each answer",
            measured=(taught, f"of {len(chats[:HEADERS])} rows"),
            remedy="write the answer's header where add_generation_prompt is true, in a template given with "
            "data.template=FILE",
        )
    says = "the prompt is the row's beginning"
    if session.is_generated:
        says = "the header is the prompt's"
    notes = [
        f"{len(apart)} answers are learned after the prompt that the template writes for them alone"
    ]
    return passed(says, len(turns) - len(wrong), "answers", notes if apart else [])


@check("template.boundary", after=["template.prompt"])
def no_token_spans_prompt_and_answer(session: Session) -> Finding:
    """Do prompt and answer meet between two tokens?

    A token that reaches over the boundary is one that inference never sees.
    """
    skip_if(session.is_generated, GENERATED)
    rows = rendered(session)
    turns = [turn for turn in rows.turns if turn.is_prefix or turn.place in rows.apart]
    skip_if(not turns, "no row has a prompt that is its beginning")
    template, eos = session.language.renderer.template, session.tokenizer.eos_token_id
    merged = []
    for turn in turns:
        prompt, row = rows.ids_of[turn.prompt], rows.ids_of[turn.row]
        size = len(prompt)
        if not turn.prompt.is_rendering and prompt[-1:] == [eos]:
            size -= 1  # a tokenizer that itself ends each text with eos
        if row[:size] != prompt[:size] and turn.place not in rows.apart:
            at = common_length(prompt, row)
            merged.append(
                f"{turn.place}: token {at} is {template.quoted(prompt[at : at + 1])} in the prompt and "
                f"{template.quoted(row[at : at + 1])} in the row"
            )
    if 2 * len(merged) > len(turns):
        return failed(
            f"a token reaches over the boundary of {len(merged)} of {len(turns)} answers",
            measured=(merged, f"of {len(turns)} answers"),
            remedy="take white space from where they meet: from the end of the prompt (or of the template's generation "
            "prompt) or the beginning of the answer",
        )
    return passed("no token reaches over", len(turns) - len(merged), "answers")


@check("template.parts", after=["template.markup", "template.system", "template.thinking"])
def answers_are_trained_as_first_written(session: Session) -> Finding:
    """Is every answer trained as the model writes it, whatever the template makes of it once it is history?"""
    skip_if(session.is_generated, GENERATED)
    chats = _chats(session)
    unit = f"of {len(chats)} rows"
    rewritten = []
    for chat in chats:
        for turn in chat.turns:
            if not chat.whole.text.startswith(turn.row.text.rstrip()):
                rewritten.append(f"{turn.place} is written differently once history")
                break
    if session.run.data.targets == "all" and rewritten:
        return failed(
            f"with targets=all, {len(rewritten)} of {len(chats)} rows are trained on answers rewritten as history",
            measured=(rewritten, unit),
            remedy="set data.targets=assistant, which trains each answer as it is written when it is given",
        )
    if not rewritten:
        return passed("once rendered is rendered in parts", len(chats), "rows")
    notes = ["the template rewrites answers once they are history, so each is a sample of its own"]
    return passed("rows rewritten as history become several samples", len(rewritten), unit, notes)


@check(
    "template.targets",
    after=[
        "template.tools",
        "template.bos",
        "template.boundary",
        "template.parts",
        "stop.set",
    ],
)
def targets_are_the_answers(session: Session) -> Finding:
    """Are the targets, as text, the answers and nothing of what was asked?"""
    skip_if(session.is_generated, GENERATED)
    which = session.run.data.targets
    num_rows, wrong, notes = 0, [], []
    for row in session.rows[:ROWS]:
        if not isinstance(row, Conversation | Completion):
            continue
        try:
            samples = session.renderer.render(row)
        except RenderError:
            continue  # data.rows
        num_rows += 1
        notes += [
            f"{short_place(sample.id)}: {quoted(_targets_as_text(session, [sample]))}"
            for sample in samples
        ]
        if isinstance(row, Completion):
            answers, others = [row.completion.strip()], [row.prompt]
        else:
            answers, learned = [], row.learned[-1 if which == "last" else 0 :]
            for message in (row.messages[index] for index in learned):
                names = [call["function"]["name"] for call in message.get("tool_calls", ())]
                answers += [*filter(None, (_reasoning(message), _answer(message), *names))]
            inputs = [message for message in row.messages if message["role"] != "assistant"]
            others = [words for message in inputs for words in _texts(message)]
        # every answer is among the targets; what remains has no words of what was asked
        rest, fault = _targets_as_text(session, samples), ""
        for words in map(_normal, answers):
            before, _, after = rest.partition(words)
            if words not in rest:
                fault = f"{quoted(words)} is no target: {quoted(rest)}"
                break
            rest = before + "\n" + after
        else:
            for words in (_normal(other.strip()) for other in others if which != "all"):
                # shorter words may be in an answer by chance
                if len(words) >= 8 and words in rest:
                    fault = f"{quoted(words)} is a target: {quoted(rest)}"
                    break
        if fault:
            wrong.append(f"{short_place(row.place)}: {fault}")
    skip_if(not num_rows, "no row could be rendered as question and answer")
    if wrong:
        return failed(
            f"the targets of {len(wrong)} of {num_rows} rows are not the answers",
            measured=(wrong, f"of {num_rows} rows"),
            remedy="look at `taut show`, which marks targets; give a template that writes the answer, and it alone, "
            "after its generation prompt with data.template=FILE",
        )
    return passed("targets are the answers", num_rows, "rows", notes[:3])


def _targets_as_text(session: Session, samples: Sequence[Sample]) -> str:
    """Runs of targets, one after the other."""
    runs = []
    for sample in samples:
        at_N = sample.target_at_N
        for run in np.split(at_N, np.flatnonzero(np.diff(at_N) > 1) + 1):
            ids = sample.ids_T[run].tolist()
            runs.append(str(session.tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
    return _normal("\n".join(runs))


@check("template.plain", after=["data.rows"])
def plain_prompts_go_through_the_template(session: Session) -> Finding:
    """Do plain prompts and completions of a chat model go through its template, or is it set that they do not?

    They are used as they are unless data.apply_chat_template is set. A chat server renders each question with the
    template, so a model that is trained on plain text never sees the prompts it will be asked; if data.train also has
    conversations, it learns two forms of the same thing. Documents (the column ``text``) are plain text on purpose.
    """
    skip_if(session.language.renderer.template.template is None, "there is no chat template")
    forms: dict[str, Counter[RowForm]] = {name: data.forms for name, data in session.data}
    num_plain = sum(form["completion"] for form in forms.values())
    unit = f"of {sum(form.total() for form in forms.values()):,} rows"
    # the user has decided
    is_applied = session.run.data.apply_chat_template
    if is_applied is not None:
        how = "rendered with the template" if is_applied else "used as they are"
        says = f"data.apply_chat_template is set: plain prompts and completions are {how}"
        return passed(says, num_plain, unit)
    skip_if(not num_plain, "no row is a prompt and a completion as plain text")
    counts = []
    for name, form in forms.items():
        kinds = [counted(number, f"{kind}s") for kind, number in sorted(form.items()) if number]
        counts.append(f"data.{name}: {', '.join(kinds)}")
    plain = [row for row in session.rows if isinstance(row, Completion)][:2]
    examples = [f"{short_place(row.place)}: {quoted(row.prompt + row.completion)}" for row in plain]
    train, has_chats = forms["train"], any(form["conversation"] for form in forms.values())
    # plain text alone may be what is meant
    is_mixed = train["completion"] and train["conversation"]
    says = "plain prompts and completions are used without the chat template that the tokenizer has"
    if is_mixed:
        says = (
            f"data.train has {counted(train['completion'], 'plain prompts')} with completions, used without the chat "
            f"template, and {counted(train['conversation'], 'conversations')}, rendered with it"
        )
    return (failed if is_mixed else warned)(
        says,
        measured=(num_plain, unit),
        evidence=[*(counts if has_chats else ()), *examples],
        remedy="set data.apply_chat_template=true to render them as user and assistant messages, as a chat server "
        "will; or =false if the model will be given plain text",
    )
