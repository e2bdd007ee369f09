"""An agent's conversations: every sampled token is a target once, on the ids that it was sampled after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.unit.rl.test_environment import CALL, renderer_of

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.messages import Message, read_conversation, read_tools
from taut.data.rows.tool_calls import derive_call_format
from taut.errors import DataError, RenderError
from taut.rl.conversations import Answer, Conversations, Path
from taut.rl.environments.tools import load_tool
from taut.rl.turns import Bridge
from taut.types import Completion

SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}
TOOLS = read_tools([load_tool("calculator").schema], "tools")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Asked(Conversations):
    """Conversations in which a text is sampled one token for each character, each with logprob -its number."""

    def __init__(self, name: str = "qwen2.5") -> None:
        renderer = renderer_of(name)
        bridge = Bridge(renderer, derive_stop_set(renderer).ids)
        super().__init__(bridge, derive_call_format(renderer.template))
        self.num_sampled = 0

    def say(self, text: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Answer:
        question = self.ask(messages, tools)
        ids = [i for c in text for i in self.bridge.renderer.tokenizer(c)["input_ids"]]
        ids_N = np.array([*ids, *self.bridge.renderer.stop_ids])
        logp_N = -np.arange(self.num_sampled, self.num_sampled + ids_N.size, dtype=np.float64)
        self.num_sampled += ids_N.size
        version = len(self.answers)
        completion = Completion("p", 0, ids_N, logp_N, None, "stop", text, version=version)
        return self.answer(question, completion)

    def texts(self) -> list[str]:
        """The paths, as the model sees them."""
        return [self.bridge.template.decode(path.ids_T.tolist()) for path in self.paths()]

    def require_each_token_once(self) -> list[Path]:
        """Every sampled token is the target of one path, at its own place, with its own logprob."""
        paths = self.paths()
        sampled = {
            -float(logp): int(token)
            for answer in self.answers
            for token, logp in zip(answer.completion.ids_N, answer.completion.logp_N, strict=True)
        }
        found = [
            (-float(logp), int(path.ids_T[at]))
            for path in paths
            for at, logp in zip(path.sampled_at_N, path.logp_N, strict=True)
        ]
        assert len(found) == len(sampled) == self.num_sampled
        assert dict(found) == sampled
        assert all((np.diff(path.sampled_at_N) > 0).all() for path in paths)
        return paths


def test_a_conversation_goes_on_from_its_own_ids() -> None:
    """One path; ``Paris`` stays in the five pieces in which it was sampled."""
    asked = Asked()
    first = asked.say("Paris", [SYSTEM, user("Where?")])
    second = asked.say("Yes.", [SYSTEM, user("Where?"), assistant(" Paris\n"), user("Sure?")])
    assert second.question.parent is first
    ids = [*first.question.ids, *first.completion.ids_N.tolist()]
    assert second.question.ids[: len(ids)] == ids
    assert asked.bridge.template.decode(second.question.ids[len(ids) :]) == (
        "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    (path,) = asked.require_each_token_once()
    assert path.version_N.tolist() == [0] * 6 + [1] * 5
    assert (asked.num_roots, asked.num_edited) == (1, 0)


def test_a_request_that_goes_on_from_an_earlier_answer_is_a_branch() -> None:
    """The newest answer's path is the first and has the shared turn; the other has its own turn alone."""
    asked = Asked()
    begin = [user("Where?"), assistant("Paris")]
    asked.say("Paris", begin[:1])
    one = asked.say("One.", [*begin, user("First?")])
    two = asked.say("Two.", [*begin, user("Second?")])
    assert one.question.parent is two.question.parent is not None
    newest, other = asked.require_each_token_once()
    assert (newest.sampled_at_N.size, other.sampled_at_N.size) == (6 + 5, 5)
    shared = len(asked.answers[0].question.ids) + 6
    assert newest.ids_T[:shared].tolist() == other.ids_T[:shared].tolist()
    assert other.sampled_at_N[0] > shared
    assert (asked.num_roots, asked.num_edited) == (1, 0)


def test_one_request_asked_twice_has_two_answers() -> None:
    """The same words sampled twice are two answers; what follows goes on from the newest."""
    asked = Asked()
    asked.say("Yes.", [user("Where?")])
    second = asked.say("Yes.", [user("Where?")])
    third = asked.say("No.", [user("Where?"), assistant("Yes."), user("Sure?")])
    assert third.question.parent is second
    assert [path.sampled_at_N.size for path in asked.require_each_token_once()] == [9, 5]
    assert asked.num_roots == 1


@pytest.mark.parametrize(
    "edited",
    [
        [user("Where?"), assistant("London"), user("Sure?")],
        [user("Where?"), user("A summary."), assistant("Paris"), user("Sure?")],
    ],
    ids=["another answer", "another place"],
)
def test_an_edited_history_is_a_conversation_of_its_own(edited: list[Message]) -> None:
    """Its assistant messages are context, rendered by the template, and no targets."""
    asked = Asked()
    asked.say("Paris", [user("Where?")])
    answer = asked.say("Yes.", edited)
    assert answer.question.parent is None
    assert answer.question.ids == asked.bridge.prompt(edited, ())
    newest, _ = asked.require_each_token_once()
    assert newest.sampled_at_N.size == 5
    assert (asked.num_roots, asked.num_edited) == (2, 1)


def test_another_question_is_another_conversation_and_no_edit() -> None:
    asked = Asked()
    asked.say("Paris", [SYSTEM, user("Where?")])
    asked.say("Noon", [SYSTEM, user("When?")])
    assert (asked.num_roots, asked.num_edited) == (2, 0)
    assert len(asked.require_each_token_once()) == 2


def test_calls_come_back_as_they_are_echoed() -> None:
    """Arguments as JSON text, another order of keys, no id: the conversation goes on. Other tools begin another."""
    asked = Asked()
    answer = asked.say(f"I add.{CALL}", [user("2 + 3?")], TOOLS)
    (call,) = answer.message["tool_calls"]
    assert (answer.message["content"], call["function"]["name"]) == ("I add.", "calculator")
    echo = {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {
                "id": call["id"],
                "function": {"name": "calculator", "arguments": '{"expression":"2 + 3"}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    messages = read_conversation([user("2 + 3?"), echo, result], "request").messages
    last = asked.say("It is 5.", messages, TOOLS)
    assert last.question.parent is answer
    assert asked.say("It is 5.", messages, ()).question.parent is None
    assert (asked.num_calls, asked.num_malformed, asked.num_edited) == (1, 0, 0)
    assert "<tool_response>\n5\n</tool_response>" in asked.texts()[1]


def test_a_call_that_cannot_be_read_stays_in_the_text() -> None:
    asked = Asked()
    text = "<tool_call>\n{oh no\n</tool_call>"
    answer = asked.say(text, [user("2 + 3?")], TOOLS)
    assert answer.message == assistant(text)
    assert (asked.num_calls, asked.num_malformed) == (1, 1)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user("Where?"), assistant("Paris")], "the last has the role assistant"),
        ([{"role": "user", "content": [{"type": "image"}]}], "found a picture"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    messages: list[Message], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taut.rl.conversations.images_of", lambda m: "image" in str(m))
    with pytest.raises(DataError, match=message):
        Asked().ask(messages, ())


WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    bridge = Bridge(renderer_of("chatml"), ())
    conversations = Conversations(bridge, None)
    question = [user("Does the calculator know?")]
    with pytest.raises(RenderError, match=r"tools: the chat template writes no tool calls.*hermes"):
        conversations.ask(question, TOOLS)
    assert conversations.ask(question, ()).ids
    tokenizer = tiny_tokenizer("qwen2.5")
    tokenizer.chat_template = WITHOUT_TOOLS
    renderer = Renderer(tokenizer)
    calling = Conversations(Bridge(renderer, ()), derive_call_format(renderer.template))
    for _ in range(2):  # also where the question has the tool's name
        with pytest.raises(RenderError, match=r"does not write the tool 'calculator'"):
            calling.ask(question, TOOLS)
    assert calling.ask(question, ()).ids


def test_a_call_in_a_thought_is_none_under_a_template_without_thoughts() -> None:
    asked = Asked("qwen2.5")
    thought = f"<think>Perhaps {CALL}</think>No."
    answer = asked.say(thought, [user("Where?")], TOOLS)
    assert (answer.message["content"], answer.num_calls) == (thought, 0)
    assert asked.say(f"<think>Hm.</think>{CALL}", [user("What?")], TOOLS).num_calls == 1
