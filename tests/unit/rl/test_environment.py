"""Environments: token in, token out; what fails is an error with its reason, never a reward of 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_tokenizers import QWEN25, tiny_tokenizer

from taut.config import from_mapping
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.prompts import PromptRow
from taut.data.rows.tool_calls import ToolCall
from taut.errors import CheckFailed, ConfigError, DataError, RenderError, UserCodeError
from taut.inference.engine import OnDone
from taut.inference.settings import Sampling
from taut.rl.environment import (
    EnvironmentPool,
    Outcome,
    Step,
    ToolEnvironment,
    open_environments,
)
from taut.rl.environments.tools import load_tool
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import EnvironmentConfig
from taut.types import Completion, FinishReason, Prompt

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
TOOLS = EnvironmentConfig(name="tools", tools=["calculator"])
FILE = """
from taut.rl.environment import Step

class Count:
    def reset(self, row):
        self.left = row["turns"]
        return [{"role": "user", "content": "Count down from " + str(self.left)}]

    def step(self, text, calls):
        self.left -= 1
        if self.left == 0:
            return Step(done=True, reward={"steps": 1, "end": 2.5})
        return Step(messages=[{"role": "user", "content": str(self.left)}], reward={"steps": 1})
"""


@dataclass
class Scripted:
    """Says what the script has for each turn, a token for each character, and ends with the template's end."""

    renderer: Renderer
    script: Callable[[str, int, int], str]
    """(prompt's id, which begins with the row's; sample; turn) -> text"""
    finish: FinishReason = "stop"
    most: int | None = None
    """Tokens a turn may have."""
    asked: list[list[Prompt]] = field(default_factory=list)
    drawn: list[Completion] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        self.asked.append(list(prompts))
        turn = len(self.asked) - 1
        found = [self._one(p, i, turn) for p in prompts for i in range(sampling.n)]
        self.drawn += found
        return found

    def _one(self, prompt: Prompt, index: int, turn: int) -> Completion:
        text = self.script(prompt.id, int(prompt.id.partition("#")[2].partition("@")[0]), turn)
        ids = [i for c in text for i in self.renderer.tokenizer(c)["input_ids"]]
        if self.finish == "stop":
            ids += self.renderer.stop_ids
        most = min((n for n in (self.most, prompt.max_new_tokens) if n is not None), default=None)
        reason: FinishReason = self.finish if most is None or len(ids) <= most else "length"
        ids_N = np.array(ids[:most])
        logp_N = -np.arange(1.0, ids_N.size + 1)
        return Completion(prompt.id, index, ids_N, logp_N, None, reason, text, version=3)


def renderer_of(name: str = "qwen3") -> Renderer:
    return Renderer(tiny_tokenizer(name))


def world_of(config: EnvironmentConfig, renderer: Renderer, **options: Any) -> EnvironmentPool:
    environments = open_environments(config, renderer, derive_stop_set(renderer).ids, **options)
    assert environments is not None
    return environments


def row_of(renderer: Renderer, name: str = "a", **columns: Any) -> PromptRow:
    messages = ({"role": "user", "content": "What is 2 plus 3?"},)
    return PromptRow(name, name, renderer.prompt_ids(messages), messages, ("5",), "answer", columns)


def own(step: Callable[[str, list[ToolCall]], Any], **options: Any) -> EnvironmentPool:
    """A environments whose environment does nothing but ``step``."""
    renderer = renderer_of()
    made = world_of(EnvironmentConfig(name="tools", tools=["calculator"], **options), renderer)
    environment = type("Own", (), {"step": lambda self, text, calls: step(text, calls)})
    return EnvironmentPool(
        made.config, environment, made.bridge, made.calls, (), made.context, None
    )


def played(
    environments: EnvironmentPool,
    script: Callable[[str, int, int], str],
    n: int = 1,
    row: PromptRow | None = None,
) -> list[Trajectory]:
    renderer = environments.bridge.renderer
    return sample_trajectories(
        Scripted(renderer, script), [row or row_of(renderer)], Sampling(n=n), environments
    )


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_tools_answer_until_a_turn_has_no_call(name: str) -> None:
    renderer = renderer_of(name)
    engine = Scripted(
        renderer, lambda name, index, turn: f"I add.{CALL}" if turn == 0 else "It is 5."
    )
    environments = world_of(TOOLS, renderer)
    (found,) = sample_trajectories(engine, [row_of(renderer)], Sampling(), environments)
    assert (found.finish_reason, found.num_turns, found.num_calls, found.text) == (
        "stop",
        2,
        1,
        "It is 5.",
    )
    asked, answer, said = found.messages
    assert asked["content"] == "I add."
    assert asked["tool_calls"][0]["function"] == {
        "name": "calculator",
        "arguments": {"expression": "2 + 3"},
    }
    assert answer == {
        "role": "tool",
        "tool_call_id": "call00000",
        "name": "calculator",
        "content": "5",
    }
    assert said == {"role": "assistant", "content": "It is 5."}
    sampled = np.concatenate([completion.ids_N for completion in engine.drawn])
    assert found.ids_T[found.sampled_at_N].tolist() == sampled.tolist()
    assert found.logp_N.tolist() == [
        x for c in engine.drawn for x in (c.logp_N if c.logp_N is not None else [])
    ]
    assert set(found.version_N.tolist()) == {3}
    (first,), (second,) = engine.asked
    assert found.ids_T[: second.ids_T.size].tolist() == second.ids_T.tolist()
    between = renderer.template.decode(
        second.ids_T[first.ids_T.size + engine.drawn[0].ids_N.size :].tolist()
    )
    assert between == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "calculator" in renderer.template.decode(first.ids_T.tolist())


def test_each_turn_of_each_path_has_a_stream_of_its_own() -> None:
    environments = own(
        lambda text, calls: Step([{"role": "user", "content": "And?"}], done=text == "end")
    )
    engine = Scripted(
        environments.bridge.renderer,
        lambda name, index, turn: "end" if turn == 2 or (turn, index) == (0, 1) else f"{turn}",
    )
    rows = [row_of(environments.bridge.renderer, name) for name in "ab"]
    found = sample_trajectories(engine, rows, Sampling(n=2), environments)
    assert [[prompt.id for prompt in prompts] for prompts in engine.asked] == [
        ["a#0@0", "a#1@0", "b#0@0", "b#1@0"],
        ["a#0@1", "b#0@1"],
        ["a#0@2", "b#0@2"],
    ]
    assert [(e.row.id, e.index, e.num_turns) for e in found] == [
        ("a", 0, 3),
        ("a", 1, 1),
        ("b", 0, 3),
        ("b", 1, 1),
    ]


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(FILE)
    renderer = renderer_of("chatml")
    environments = world_of(EnvironmentConfig(name=f"{file}:Count"), renderer)
    engine = Scripted(renderer, lambda name, index, turn: f"turn {turn}")
    long, short = sample_trajectories(
        engine,
        [row_of(renderer, "a", turns=3), row_of(renderer, "b", turns=1)],
        Sampling(),
        environments,
    )
    assert (long.rewards, long.num_turns) == ({"steps": 3.0, "end": 2.5}, 3)
    assert (short.rewards, short.num_turns) == ({"steps": 1.0, "end": 2.5}, 1)
    ends = (np.cumsum([engine.drawn[i].ids_N.size for i in (0, 2, 3)]) - 1).tolist()
    assert long.turn_rewards == tuple(zip(ends, [1.0, 1.0, 3.5], strict=True))
    assert short.turn_rewards == ((short.sampled_at_N.size - 1, 3.5),)
    assert renderer.template.decode(long.ids_T.tolist()) == (
        "<|im_start|>user\nCount down from 3<|im_end|>\n<|im_start|>assistant\nturn 0<|im_end|>\n"
        "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\nturn 1<|im_end|>\n"
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nturn 2<|im_end|>"
    )
    assert {name: value for name, value, _ in environments.decisions}[
        "tool calls"
    ] == "none are read"


def test_a_malformed_call_is_told_and_counted() -> None:
    renderer = renderer_of()
    script = ["<tool_call>{add}</tool_call>", CALL.replace("calculator", "abacus"), "Five."]
    engine = Scripted(renderer, lambda name, index, turn: script[turn])
    (found,) = sample_trajectories(
        engine, [row_of(renderer)], Sampling(), world_of(TOOLS, renderer)
    )
    assert (found.num_calls, found.num_malformed_calls, found.num_turns) == (2, 1, 3)
    assert found.messages[0] == {"role": "assistant", "content": script[0]}
    told = [message["content"] for message in found.messages if message["role"] == "tool"]
    assert told[0].startswith("Error: the call is not JSON")
    assert told[1] == "Error: there is no tool abacus; there are calculator"


def test_an_environment_that_raises_hangs_or_has_nothing_to_say_is_an_error() -> None:
    def step(text: str, calls: list[ToolCall]) -> Any:
        if text == "raise":
            raise KeyError("lost")
        if text == "exit":
            raise SystemExit(1)
        if text == "hang":
            Event().wait(600)
        return {"nan": Step(done=True, reward=float("nan")), "nothing": Step()}.get(
            text, Step(done=True)
        )

    words = ["raise", "hang", "nan", "nothing", "exit", "fine"]
    environments = own(step, timeout=0.2)
    began = time.monotonic()
    found = played(environments, lambda name, index, turn: words[index], n=len(words))
    assert time.monotonic() - began < 120
    reasons = [trajectory.error for trajectory in found]
    assert reasons[:2] == [
        "the environment's step raised KeyError: 'lost'",
        "the environment's step did not return within 0.2 s",
    ]
    assert "expected a finite number" in str(reasons[2])
    assert "no messages and is not done" in str(reasons[3])
    assert "SystemExit" in str(reasons[4])
    assert [e.finish_reason for e in found] == ["error"] * 5 + ["stop"]
    assert not any(e.rewards for e in found)


def test_true_and_false_are_rewards_of_1_and_0() -> None:
    """Also numpy's, and its numbers; an environment that says ``reward=True`` keeps its successes."""
    rewards: list[Any] = [True, False, np.True_, np.float32(0.5), np.int64(2), {"right": True}]

    def step(text: str, calls: list[ToolCall]) -> Step:
        return Step(done=True, reward=rewards[int(text)])

    found = played(own(step), lambda name, index, turn: str(index), n=len(rewards))
    assert [trajectory.error for trajectory in found] == [None] * len(rewards)
    assert [sum(trajectory.rewards.values()) for trajectory in found] == [
        1.0,
        0.0,
        1.0,
        0.5,
        2.0,
        1.0,
    ]


class Junk:
    def __repr__(self) -> str:
        return "junk"


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (Step(done=True, reward="1"), r"'environment' .*returned '1' of type str; expected a num"),  # type: ignore[arg-type]
        (Step(done=True, reward={"won": torch.tensor(1.0)}), r"'won' .*of type Tensor; expected"),  # type: ignore[dict-item]
        (Step(done=True, reward={1: 1.0}), r"a reward by the name 1; expected a text"),  # type: ignore[dict-item]
        (Step(done=True, reward=np.array([1.0])), r"of type ndarray; expected a number"),  # type: ignore[arg-type]
        (Junk(), r"step returned junk of type Junk; expected a Step"),
        (None, r"step returned .* of type NoneType; expected a Step"),
        (Step("Hi"), r"step returned .*of type str as messages; expected a list"),  # type: ignore[arg-type]
        (Step(["Hi"]), r"of type list as messages; expected a list of objects"),  # type: ignore[list-item]
    ],
)
def test_a_value_of_the_wrong_type_stops_the_run_at_the_first(returned: Any, error: str) -> None:
    """It is a bug that hits some answers and not others, so no share of it is tolerated."""

    def step(text: str, calls: list[ToolCall]) -> Any:
        return returned if text == "0" else Step(done=True, reward=1.0)

    with pytest.raises(UserCodeError, match=f"^a: .*{error}"):
        played(own(step), lambda name, index, turn: str(index), n=50)


def test_a_cut_of_the_wrong_type_stops_the_run() -> None:
    environments = own(lambda text, calls: Step([{"role": "user", "content": "?"}]), max_turns=1)
    environments.make.cut = lambda self: "lost"  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError, match="returned 'lost' of type str"):
        played(environments, lambda *_: "yes")


def test_a_reset_of_the_wrong_type_stops_the_run() -> None:
    environments = own(lambda text, calls: Step(done=True))
    environments.make.reset = lambda self, row: 7  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError, match=r"^a: reset returned 7 of type int as messages"):
        played(environments, lambda *_: "x")


@pytest.mark.parametrize(
    ("reset", "error"),
    [
        (lambda row: 1 / 0, "raised ZeroDivisionError"),
        (lambda row: "Hi", "is text but not JSON"),
        (lambda row: [{"role": "assistant", "content": "Hi"}], "expected a user or tool message"),
        (lambda row: [{"role": "user", "text": "Hi"}], "unknown key 'text'"),
    ],
)
def test_a_reset_that_fails_is_an_error(reset: Callable[[Any], Any], error: str) -> None:
    environments = own(lambda text, calls: Step(done=True))
    environments.make.reset = lambda self, row: reset(row)  # type: ignore[attr-defined]
    (found,) = played(environments, lambda *_: "x")
    assert (found.finish_reason, found.sampled_at_N.size) == ("error", 0)
    assert error in str(found.error)


def test_a_path_draws_the_same_whatever_becomes_of_others() -> None:
    environments = own(lambda text, calls: Step(done=True))

    def reset(row: dict[str, Any]) -> None:
        if row.get("is_bad"):
            raise RuntimeError("no")

    environments.make.reset = lambda self, row: reset(row)  # type: ignore[attr-defined]
    renderer = environments.bridge.renderer
    asked = []
    for is_bad in (False, True):
        engine = Scripted(renderer, lambda *_: "x")
        rows = [row_of(renderer), row_of(renderer, "b", is_bad=is_bad)]
        sample_trajectories(engine, rows, Sampling(n=2), environments)
        asked.append([prompt.id for prompt in engine.asked[0] if prompt.id.startswith("a")])
    assert asked[0] == asked[1]


def test_too_many_calls_that_hang_stop_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taut.rl.environment.MOST_LATE", 2)
    begun, ended = [], Event()

    def hang(text: str, calls: list[ToolCall]) -> None:
        begun.append(text)
        ended.wait(60)

    environments = own(hang, timeout=0.01, workers=1)
    with pytest.raises(CheckFailed, match="2 calls of the environment"):
        environments.each({number: partial(hang, "x", []) for number in range(8)})
    assert len(begun) <= 2
    ended.set()


def test_limits_of_turns_and_tokens_cut_a_path() -> None:
    more = Step([{"role": "user", "content": "And?"}], reward=1)
    (turns,) = played(own(lambda text, calls: more, max_turns=2), lambda *_: "yes")
    assert (turns.finish_reason, turns.num_turns, turns.rewards) == (
        "length",
        2,
        {"environment": 2.0},
    )
    (tokens,) = played(own(lambda text, calls: more, max_tokens=30), lambda *_: "yes")
    assert tokens.finish_reason == "length"
    assert tokens.sampled_at_N[-1] == tokens.ids_T.size - 1  # nothing after the last sampled token
    prompt = row_of(renderer_of()).ids_T.size
    assert tokens.ids_T.size <= prompt + 30
    (cut,) = played(own(lambda text, calls: more, max_tokens=3), lambda *_: "too long")
    assert (cut.finish_reason, cut.num_turns, cut.ids_T.size) == ("length", 1, prompt + 3)
    assert not cut.rewards


def test_an_environment_says_what_a_cut_path_is_worth() -> None:
    environments = own(lambda text, calls: Step([{"role": "user", "content": "And?"}]), max_turns=1)
    environments.make.cut = lambda self: -1.0  # type: ignore[attr-defined]
    (found,) = played(environments, lambda *_: "yes")
    assert (found.finish_reason, found.rewards) == ("length", {"environment": -1.0})
    assert found.turn_rewards == (), "it is of the path, not of its last turn"


def test_a_prompt_beyond_the_context_is_an_error_of_its_path() -> None:
    renderer = renderer_of()
    environments = world_of(TOOLS, renderer, context=20)
    engine = Scripted(renderer, lambda *_: "x")
    (found,) = sample_trajectories(engine, [row_of(renderer)], Sampling(), environments)
    assert found.error is not None
    assert "the context is 20" in found.error
    assert not engine.asked


def test_a_text_is_refused() -> None:
    renderer = renderer_of()
    row = PromptRow("f:1", "f:1", np.array([1]), "Once upon", (), None, {})
    with pytest.raises(DataError, match="speaks in messages"):
        sample_trajectories(
            Scripted(renderer, lambda *_: "x"), [row], Sampling(), world_of(TOOLS, renderer)
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Game", "there is no file"),
        ("tool", "is tool; expected tools, FILE.py:class, gym:ENV_ID, verifiers:ENV_ID or agent:"),
        ("FILE:Missing", "has no class 'Missing'"),
        ("FILE:Step", "no class with a method step"),
    ],
)
def test_an_environment_that_cannot_be_had_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    file = tmp_path / "game.py"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=message):
        world_of(EnvironmentConfig(name=name.replace("FILE", str(file))), renderer_of())


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name=tools: .*; expected tools=calculator; set it"):
        EnvironmentConfig(name="tools")
    with pytest.raises(ValueError, match="expected name=tools"):
        EnvironmentConfig(tools=["calculator"])
    for key in ("max_turns", "max_tokens", "timeout", "workers"):
        with pytest.raises(
            ValueError,
            match=f"{key}=2: nothing reads it; expected name; set it, or leave {key} out",
        ):
            from_mapping(EnvironmentConfig, {key: 2})
    with pytest.raises(
        ValueError, match=r"timeout=16 with tools=.*python.*expected 17 or more; raise timeout"
    ):
        EnvironmentConfig(name="tools", tools=["python"], timeout=16)
    EnvironmentConfig(name="tools", tools=["python"], timeout=17)
    assert open_environments(EnvironmentConfig(), renderer_of(), ()) is None


def test_tools_need_a_template_that_writes_them(tmp_path: Path) -> None:
    renderer = renderer_of("chatml")
    with pytest.raises(RenderError, match="writes no tool calls"):
        world_of(TOOLS, renderer)
    file = tmp_path / "game.py"
    file.write_text(FILE)
    rows = [
        row_of(renderer),
        replace(row_of(renderer, "b"), tools=(load_tool("calculator").schema,)),
    ]
    with pytest.raises(RenderError, match=r"^b: the chat template writes no tool calls"):
        world_of(EnvironmentConfig(name=f"{file}:Count"), renderer, rows=rows)


def test_a_template_that_leaves_out_what_tools_say_is_refused() -> None:
    deaf = QWEN25.replace("\\n' + message.content + '\\n</tool_response>", "\\n</tool_response>")
    with pytest.raises(RenderError, match="not write what a message of role tool says"):
        world_of(TOOLS, Renderer(tiny_tokenizer(), deaf))


def test_a_stop_string_that_cuts_calls_is_refused() -> None:
    for text in ("</tool_call>", "}\n"):
        with pytest.raises(ConfigError, match=r"rollout\.stop has .* no call would be whole"):
            world_of(TOOLS, renderer_of(), stop=["Bye", text])
    world_of(TOOLS, renderer_of(), stop=["Bye"])


def test_the_row_s_tools_are_those_the_template_was_given() -> None:
    environments, schema = own(lambda text, calls: Step(done=True)), load_tool("calculator").schema
    row = row_of(environments.bridge.renderer, tools="of another kind")
    seen: list[Any] = []

    def read(self: Any, text: str, tools: Any, first: int) -> tuple[str, list[ToolCall]]:
        seen.append(tools)
        return "", []

    calls: Any = type("Calls", (), {"read": read})
    environments = replace(environments, calls=calls())
    played(environments, lambda *_: "x", row=replace(row, tools=(schema,)))
    assert seen == [(schema,)]


def test_what_an_environment_does_to_a_call_is_not_in_the_conversation() -> None:
    def step(text: str, calls: list[ToolCall]) -> Step:
        calls[0].arguments.clear()
        return Step(done=True)

    (found,) = played(own(step), lambda *_: CALL)
    (call,) = found.messages[0]["tool_calls"]
    assert call["function"]["arguments"] == {"expression": "2 + 3"}


def test_a_history_of_calls_without_ids_plays() -> None:
    renderer = renderer_of()
    call = {
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": "1"}},
    }
    messages = (
        {"role": "user", "content": "What is 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "user", "content": "And 2 + 3?"},
    )
    row = replace(row_of(renderer), prompt=messages, ids_T=renderer.prompt_ids(messages))
    said = [CALL, "5"]
    (found,) = played(world_of(TOOLS, renderer), lambda *it: said[it[2]], row=row)
    assert (found.error, found.num_turns, found.first_messages) == (None, 2, messages)


def test_an_episode_says_what_it_began_with() -> None:
    environments = own(lambda text, calls: Step(done=True))
    first = [{"role": "user", "content": "Guess."}]
    environments.make.reset = lambda self, row: first  # type: ignore[attr-defined]
    (found,) = played(environments, lambda *_: "x")
    assert found.first_messages == tuple(first)


@dataclass(frozen=True)
class TwoRanks:
    """The first of two, whose other has ``theirs``."""

    theirs: dict[int, Outcome]
    rank: int = 0
    size: int = 2

    def gather(self, mine: dict[int, Outcome]) -> list[dict[int, Outcome]]:
        return [mine, self.theirs]


def test_each_rank_steps_the_environments_it_has() -> None:
    ranks: Any = TwoRanks({1: Outcome("theirs")})
    environments = replace(world_of(TOOLS, renderer_of()), ranks=ranks)
    called: list[int] = []
    jobs = {number: partial(called.append, number) for number in range(3)}
    assert environments.each(jobs) == {0: Outcome(), 1: Outcome("theirs"), 2: Outcome()}
    assert sorted(called) == [0, 2]


def test_calls_that_come_late_in_a_turn_are_not_made() -> None:
    kit = {"calculator": load_tool("calculator")}
    step = ToolEnvironment(kit, seconds=-1.0).step(
        "", [ToolCall("call00000", "calculator", {"expression": "1"})]
    )
    assert (
        step.messages[0]["content"] == "Error: the time of this turn is up; the call was not made"
    )
