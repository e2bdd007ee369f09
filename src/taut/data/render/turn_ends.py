"""Where an assistant's turn ends, for any chat template and tokenizer: found by rendering and comparing.

A known answer is rendered as the last message (``alone``) and with the next message after it (``followed``). What the
template writes after the answer's words, as tokens, is

    alone       <|im_end|> \\n                     <end_of_turn> \\n     <|return|>             (nothing)
    followed    <|im_end|> \\n <|im_start|> ...    <end_of_turn> ...     <|end|> <|start|> ...  <|user|> ...

The end is, in this order,

1. of the tokens with which both begin: one that eos or generation_config names, else the last
2. a token of ``alone`` (gpt-oss writes the end of an answer in another way once it is history)
3. the first token of the next header, ``followed`` (GLM closes no turn: a model stops by writing ``<|user|>``, or
   ``<|observation|>`` after a call); it is the end of the last turn of a row too (``closing``)

Special tokens come before tokens that were merely added, tokens that open messages count in the third case alone, and
white space is never an end: Gemma's tokenizer has "\\n" among its added tokens.

A call may end with another token than an answer (``<|call|>``, ``<|eom_id|>``). It is looked for in the same way, and
the tokens that end answers come first, for markers of calls may be special tokens too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from taut.errors import RenderError

if TYPE_CHECKING:
    from taut.data.render.chat_template import Template

ASKED, ANSWERED, HEARD, SAID = "vicuna", "guanaco", "alpaca", "llama"
"""Words that no template writes by itself."""
CALLED = "find_weather"
CALL_ID = "call00001"
"""Nine letters and digits, as Mistral's templates want them."""
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": "Find the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
PLACE = "the chat template"


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The ends of the assistant's turns in a template."""

    plain: tuple[int, ...] = ()
    """The tokens that end an answer in words."""
    calls: tuple[int, ...] = ()
    """The tokens that end a turn with calls; empty for a template that writes none."""
    tails: tuple[tuple[int, ...], ...] = ()
    """Each end with the tokens that the template writes after it at the end of a row, longest first."""
    closing: Mapping[str, str] = field(default_factory=dict)
    """Role of the next message -> the text after a turn up to the token that ends it, where that is the header's."""

    def position(self, ids: Sequence[int]) -> int | None:
        """The position of the end in the ids of a row; None where the row ends in no known way."""
        for tail in self.tails:
            if tuple(ids[-len(tail) :]) == tail:
                return len(ids) - len(tail)
        return None


def derive_turn_ends(template: Template, named: Collection[int]) -> TurnEnds:
    """Derive the ends of turns. ``named``: the tokens that eos, config and generation_config name.

    Raises RenderError for a template that does not take a question with its answer.
    """
    return _Probes(template, frozenset(named)).turn_ends()


class _Probes:
    def __init__(self, template: Template, named: frozenset[int]) -> None:
        self.template, self.named = template, named
        added = template.tokenizer.added_tokens_decoder
        marks = {*added, *template.tokenizer.all_special_ids}
        self.marks = {index for index in marks if template.decode([index]).strip()}
        self.special = {index for index in self.marks if index not in added or added[index].special}
        self.plain: list[int] = []
        self.calls: list[int] = []
        self.tails: set[tuple[int, ...]] = set()
        self.closing: dict[str, str] = {}

    def turn_ends(self) -> TurnEnds:
        question, answer = _said("user", ASKED), _said("assistant", ANSWERED)
        self.template.apply([question, answer], (), PLACE)  # raises the template's own error
        self.opening = self._opening()
        lines = _said("assistant", f"{SAID}\n{SAID} {ANSWERED}")
        history = (question, _said("assistant", SAID), question)
        for before, said in (((question,), answer), ((question,), lines), (history, answer)):
            self._compare([*before, said], [], self.plain, "user", self.named)
        function = {"name": CALLED, "arguments": {"city": ANSWERED}}
        call = {"id": CALL_ID, "type": "function", "function": function}
        calling = {**_said("assistant", ""), "tool_calls": [call]}
        self._compare([question, calling], [TOOL], self.calls, "tool", {*self.plain, *self.named})
        tails = sorted(self.tails, key=lambda tail: (-len(tail), tail))
        return TurnEnds(tuple(self.plain), tuple(self.calls), tuple(tails), self.closing)

    def _compare(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        ends: list[int],
        role: str,
        expected: Collection[int],
    ) -> None:
        """Add the end of the last message, after which comes one of ``role``, to ``ends``."""
        # What the template writes after the words, alone and followed by the next message. Of a template that changes
        # case, the words are found in lower case.
        text = self._written(messages, tools)
        if text is None or ANSWERED not in text.lower():
            return
        reply = {**_said(role, HEARD), "tool_call_id": CALL_ID, "name": CALLED}
        longer = self._written([*messages, reply if role == "tool" else _said(role, HEARD)], tools)
        alone = text[text.lower().rfind(ANSWERED) + len(ANSWERED) :]
        followed = None
        if longer is not None and HEARD in longer.lower():
            longer = longer[: longer.lower().rfind(HEARD)]
            followed = longer[longer.lower().rfind(ANSWERED) + len(ANSWERED) :]
        ids = self._ids(alone)
        others = ids if followed is None else self._ids(followed)
        common = ids[: common_length(ids, others)]
        # The end: of what both begin with, of what is written alone, or the first token of the next header.
        is_call = role == "tool"
        end = self._best(common, expected, takes_last=True, must=is_call)
        if end is None:
            end = self._best(ids, expected, takes_last=False, must=is_call)
        if end is not None:
            at = ids.index(end)
            self.tails.add(tuple(ids[at:]))
        elif followed is not None and followed.startswith(alone):
            header = [index for index in self._ids(followed[len(alone) :]) if index in self.marks]
            if header[:1] and header[0] in self.begun:
                header = []  # it opens the model's own turns, too
            if header and (not is_call or self.closing or header[0] in self.named):
                end = header[0]
                token = str(self.template.tokenizer.convert_ids_to_tokens(end))
                at = followed.find(token, len(alone))
                self.closing[role] = followed[len(alone) : at + len(token)]
                self.tails.add((end,))
        if end is None and is_call:
            end = self._best(common or ids, (), takes_last=True, must=False)
            if end is not None:
                self.tails.add(tuple(ids[ids.index(end) :]))
        if end is not None and end not in ends:
            ends.append(end)

    def _best(
        self, ids: Sequence[int], expected: Collection[int], *, takes_last: bool, must: bool
    ) -> int | None:
        """The end among these tokens. ``must``: it has to be an expected one."""
        for group in (self.special, self.marks):
            found = [index for index in ids if index in group and index not in self.opening]
            if known := [index for index in found if index in expected]:
                return known[0]
            if found and not must:
                return found[-1] if takes_last else found[0]
        return None

    def _opening(self) -> set[int]:
        """The tokens that open a message."""
        question = _said("user", ASKED)
        system = self._written([_said("system", SAID), question], [])
        head = system.partition(SAID)[0] if system is not None and SAID in system else None
        history = self._written([question], []) or ""
        prompt = self._written([question], [], is_prompt=True) or ""
        if head is None:
            head = history.partition(ASKED)[0]
        before, begun = self._ids(history), self._ids(prompt)
        begun = begun[common_length(before, begun) :]
        self.begun = {*begun} - self.named
        opening = {*self._ids(head), *begun}
        if not begun:  # the template opens the next turn whether or not it is asked to
            answered = self._written([question, _said("assistant", ANSWERED)], []) or ""
            between = answered.partition(ASKED)[2].partition(ANSWERED)[0]
            opening.update([index for index in self._ids(between) if index in self.marks][-1:])
        return opening - self.named

    def _written(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], is_prompt: bool = False
    ) -> str | None:
        """The template's text; None where it does not take the messages."""
        try:
            return self.template.apply(messages, tools, PLACE, is_prompt=is_prompt).text
        except RenderError:
            return None

    def _ids(self, text: str) -> list[int]:
        return self.template.ids_of_part(text)


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of leading ids or characters that are equal."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
