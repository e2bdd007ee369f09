"""The tokens between two turns of the policy: what the template writes after a turn, up to where the next begins.

    next prompt = what there was, as sampled | rest of the turn's end | messages | generation prompt

Sampled text is never tokenised again. What comes after a turn does not depend on what was said in it: the conversation
is rendered with a known word in place of the turn (in its last call, where it has calls), and what comes after the
word, from the token that ends the turn on, is tokenised: a special token is one wherever it stands, and what is after
it does not know what was before. A completion that has sampled the end of its turn is followed by the rest.

Some templates write a turn differently once it is history (thinking is taken out). What was sampled stays as it is: the
policy is trained on what it saw. ``rewrites`` says which kind a template is.

May import data and errors. Rollout imports it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from taut.data.formats import Message, Tool
from taut.data.render import Renderer
from taut.data.template import PROBE, Ids, Text, common_length
from taut.errors import RenderError

WORD = "Understood"
"""What stands in place of a turn."""
PLACE = "the conversation"
THOUGHT = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Let me see.")
"""A thought, under every name that templates know."""


class Bridge:
    """Finds the tokens between turns for one renderer and stop set."""

    def __init__(self, renderer: Renderer, stop_ids: Collection[int]) -> None:
        self.renderer, self.template = renderer, renderer.template
        self.stop_ids = frozenset(stop_ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """History and generation prompt, where no turn has been sampled yet."""
        ids: Ids = self.renderer.prompt_ids(messages, tools).tolist()
        return ids

    def between(
        self, history: Sequence[Message], said: Sequence[Message], tools: Sequence[Tool], last: int
    ) -> Ids:
        """What follows the last turn of ``history``, whose last sampled token is ``last``, when ``said`` was answered.

        Raises RenderError where the template does not take these messages.
        """
        assert history[-1]["role"] == "assistant" and said
        word = _unused(WORD, said, tools)
        canonical = _canonical(history, said, word)
        whole = self.template.apply((*canonical, *said), tools, PLACE, is_prompt=True)
        after = whole.text.rfind(word) + len(word)
        if after < len(word):
            raise RenderError(
                "the chat template does not write what an assistant says; expected its content, or its calls; give "
                f"another template with {self.template.key}=FILE"
            )
        tail = Text(whole.text[after:], is_rendering=True)
        first = 0
        if "tool_calls" in canonical[-1]:
            first = self._end_of_calls(canonical[-1], tools, word, tail.text)
        spans, ids = self.template.spans(tail), self.template.encode([tail])[tail]
        end = next(
            i
            for i, span in enumerate(spans)
            if span[0] >= first and ids[i] in self.template.end_ids
        )
        return ids[end + 1 :] if last in self.stop_ids else ids[end:]

    def rewrites(self, turn: Message, said: Message, tools: Sequence[Tool]) -> str | None:
        """None where prompt, turn and what is between are, token for token, the template's own rendering of the whole;
        else what it writes in the turn's place once that is history.

        Where the generation prompt begins a thought, the turn goes on with one. Raises RenderError where what follows
        a turn depends on what was said in it.
        """
        asked = PROBE[:1]
        prompt = self.prompt(asked, tools)
        for turn in (turn, {**turn, **THOUGHT}):  # noqa: B020
            row = self.template.apply((*asked, turn), tools, PLACE)
            row_ids = self.template.encode([row])[row]
            start = common_length(prompt, row_ids)
            if start == len(prompt):
                break
        else:
            return self.template.quoted(row_ids[start:][:8])
        end = self.template.end_of_turn(row_ids, start, PLACE)
        ids = row_ids[: end + 1]
        between = self.between((*asked, turn), [said], tools, last=ids[-1])
        path, whole = [*ids, *between], self.prompt((*asked, turn, said), tools)
        if path == whole:
            return None
        same = common_length(path, whole)
        if same > end or whole[len(whole) - len(between) :] != between:
            raise RenderError(
                f"after one turn the chat template writes {self.template.quoted(between[:16])}, and after another "
                f"{self.template.quoted(whole[end + 1 :][:16])}; expected that it does not depend on what was said; "
                f"give another template with {self.template.key}=FILE"
            )
        return self.template.quoted(whole[same:][:8])

    def _end_of_calls(self, turn: Message, tools: Sequence[Tool], word: str, tail: str) -> int:
        """Where the token that ends a turn with calls begins in ``tail``, what is written after the word: markers of
        calls may be special tokens, too."""
        row = self.template.apply((*PROBE[:1], turn), tools, PLACE).text
        alone = Text(row[row.rfind(word) + len(word) :], is_rendering=True)
        end = self.template.end_of_turn(self.template.encode([alone])[alone], 0, PLACE)
        first, stop = self.template.spans(alone)[end]
        if not tail.startswith(alone.text[:stop]):
            raise RenderError(
                f"the chat template ends a turn with calls with {alone.text[:stop]!r:.80}, and once it is history with "
                f"{tail[:stop]!r:.80}; expected the same; give another template with {self.template.key}=FILE"
            )
        return first


def _canonical(history: Sequence[Message], said: Sequence[Message], word: str) -> list[Message]:
    """The conversation with every turn replaced: what was sampled may be anything, and what comes after is the same."""
    found: list[Message] = []
    everything = [*history, *said]
    for index, message in enumerate(history):
        if message["role"] != "assistant":
            found.append(message)
            continue
        calls = _calls(message, everything[index + 1 :])
        turn: Message = {"role": "assistant", "content": "" if calls else word}
        if calls:
            turn["tool_calls"] = calls
        found.append(turn)
    return _marked(found, word)


def _marked(messages: list[Message], word: str) -> list[Message]:
    """With the word in the last call of the last turn."""
    last = messages[-1]
    if "tool_calls" in last:
        *others, call = last["tool_calls"]
        call = {**call, "function": {**call["function"], "arguments": {"text": word}}}
        messages = [*messages[:-1], {**last, "tool_calls": [*others, call]}]
    return messages


def _calls(turn: Message, after: Sequence[Message]) -> list[Tool]:
    """The calls of a turn as templates want them: one for each answer of a tool, be it to a call that none could read;
    else its own."""
    own = {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", [])}
    answers = list(takewhile(lambda message: message["role"] == "tool", after))
    asked = {
        answer["tool_call_id"]: answer.get("name") or own.get(answer["tool_call_id"], "tool")
        for answer in answers
    }
    return [_call(name, index) for index, name in (asked or own).items()]


def _call(name: str, index: str) -> Tool:
    return {"id": index, "type": "function", "function": {"name": name, "arguments": {"text": "x"}}}


def _unused(word: str, said: Sequence[Message], tools: Sequence[Tool]) -> str:
    """The word, made longer until nothing has it that may come after a turn: it is looked for from the end."""
    text = str([said, tools])
    while word in text:
        word += "x"
    return word
