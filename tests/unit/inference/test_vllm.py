"""The server engine against an endpoint that speaks vLLM's protocol and fails as it is told to."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from tests.helpers.fake_vllm import (
    BEST,
    CONFIG,
    GREEDY,
    PROBED,
    FakeServer,
    Fault,
    after_probe,
    changing,
    one,
    opened,
    prompt,
)
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import replace
from taut.errors import ConfigError, DataError, EngineError
from taut.inference.engine import stream_seed
from taut.inference.settings import Sampling
from taut.types import Completion

# What is asked


def test_ids_and_log_probs_are_the_server_s() -> None:
    completion = one(FakeServer())
    assert completion.ids_N.tolist() == [21, 22, 23, 7]
    assert completion.finish_reason == "stop" and completion.error is None
    assert completion.text == tiny_tokenizer().decode([21, 22, 23])
    assert completion.logp_N is not None and completion.logp_N.tolist() == [0.0] * 4
    assert completion.logp_one_N is not None and completion.logp_one_N.tolist() == [BEST] * 4


def test_everything_that_shapes_the_policy_is_sent() -> None:
    sampling = Sampling(
        n=2, max_new_tokens=8, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1,
        repetition_penalty=1.2, stop=["xyz"], seed=3,
    )  # fmt: skip
    server = FakeServer()
    with opened(server) as engine:
        engine.generate([prompt("a", 1, 20, max_new_tokens=3)], sampling)
    bodies = sorted(server.requests[PROBED:], key=lambda body: body["seed"])
    assert [body["seed"] for body in bodies] == sorted(stream_seed(3, "a", i) for i in range(2))
    wanted = {
        "model": "model", "prompt": [1, 20], "max_tokens": 3, "temperature": 0.7, "top_k": 5,
        "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "stop": ["xyz"], "stop_token_ids": [7], "ignore_eos": False,
        "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    for body in bodies:
        assert {name: value for name, value in body.items() if name != "seed"} == wanted


def test_greedy_needs_no_seed() -> None:
    server = FakeServer()
    one(server)
    assert "seed" not in server.requests[-1]


def test_results_are_in_order_whatever_comes_first() -> None:
    arrived: list[tuple[str, int]] = []
    others = threading.Event()

    def first_is_last(body: dict[str, Any], count: int) -> Fault:
        if body["prompt"] == [1, 20]:
            others.wait(60)
        return Fault()

    def arrive(completion: Completion) -> None:
        arrived.append((completion.prompt_id, completion.index))
        if len(arrived) == 4:
            others.set()

    server = FakeServer(faults=after_probe(first_is_last))
    prompts = [prompt("a", 1, 20), prompt("b", 1, 30), prompt("c", 1, 40)]
    with opened(server) as engine:
        done = engine.generate(prompts, Sampling(n=2), arrive)
    order = [(name, index) for name in "abc" for index in range(2)]
    assert [(c.prompt_id, c.index) for c in done] == order
    assert sorted(arrived) == order and arrived[-1][0] == "a"
    assert [c.ids_N[0] for c in done] == [21, 21, 31, 31, 41, 41]


def test_requests_under_way_are_bounded() -> None:
    meet = threading.Barrier(3)

    def together(body: dict[str, Any], count: int) -> Fault:
        meet.wait(60)
        return Fault(slow=0.05)

    server = FakeServer(faults=after_probe(together))
    with opened(server, replace(CONFIG, {"concurrency": 3})) as engine:
        done = engine.generate([prompt(f"{i}", 1, 20) for i in range(12)], GREEDY)
    assert len(done) == 12 and server.most == 3


def test_nothing_asked_is_nothing_done() -> None:
    with opened(FakeServer()) as engine:
        assert engine.generate([], GREEDY) == []


# How a completion ends


def test_length_is_length() -> None:
    completion = one(FakeServer(), replace(GREEDY, {"max_new_tokens": 2}))
    assert completion.finish_reason == "length" and completion.ids_N.tolist() == [21, 22]


def test_a_stop_string_ends_the_text_and_leaves_the_ids() -> None:
    stop = tiny_tokenizer().decode([22])
    changes = changing(token_ids=[21, 22], logprobs=None)
    completion = one(FakeServer(faults=changes), replace(GREEDY, {"stop": [stop]}))
    assert completion.finish_reason == "stop"
    assert completion.ids_N.tolist() == [21, 22]
    assert completion.text == tiny_tokenizer().decode([21])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"token_ids": [21, 5], "logprobs": None}, r"stopped at token 5 \(.+\), which is not in"),
        ({"token_ids": [21, 7, 22, 7], "logprobs": None}, r"went on past token 7"),
        ({"finish_reason": "abort"}, "finish_reason=abort after 4 tokens"),
        ({"finish_reason": None}, "finish_reason=None"),
        ({"token_ids": [], "logprobs": None}, "after 0 tokens"),
        (
            {"token_ids": [21], "logprobs": None, "finish_reason": "length"},
            "cut it after 1 tokens; expected 8",
        ),
    ],
)
def test_an_end_that_is_none_is_an_error(changes: dict[str, Any], found: str) -> None:
    completion = one(FakeServer(faults=changing(**changes)))
    assert completion.finish_reason == "error"
    assert completion.error is not None
    assert re.search(found, completion.error), completion.error


def test_a_server_that_stops_elsewhere_is_seen() -> None:
    completion = one(FakeServer(ends=(5,)))
    assert completion.finish_reason == "error" and completion.ids_N.tolist() == [21, 22, 23, 5]
    assert completion.error is not None and "token 5" in completion.error


def test_unaided_a_server_stops_by_itself_or_not() -> None:
    server = FakeServer(ends=(7,))
    with opened(server) as engine:
        (knows,) = engine.unaided().generate([prompt("a", 1, 20)], GREEDY)
        assert server.requests[-1]["stop_token_ids"] == []
        server.ends = (5,)
        (other,) = engine.unaided().generate([prompt("a", 1, 20)], GREEDY)
        (aided,) = engine.generate([prompt("a", 1, 6)], GREEDY)
        (passes,) = engine.unaided().generate([prompt("a", 1, 6)], GREEDY)
    assert knows.finish_reason == "stop" and other.finish_reason == "error"
    assert aided.ids_N.tolist() == [7] and aided.finish_reason == "stop"
    assert passes.ids_N.tolist() == [7, 8, 9, 5]
    assert passes.error is not None and "went on past token 7" in passes.error


# Logprobs


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_which_log_probs_are_known(mode: str) -> None:
    cases = {
        "plain": Sampling(max_new_tokens=8),
        "warm": Sampling(max_new_tokens=8, temperature=2.0),
        "greedy": GREEDY,
    }
    with opened(FakeServer(mode=mode)) as engine:
        assert engine.kind == mode
        assert ("server logprobs", mode) in [decision[:2] for decision in engine.decisions]
        done = {
            name: engine.generate([prompt("a", 1, 20)], sampling)[0]
            for name, sampling in cases.items()
        }
    pairs = {
        name: tuple(None if x is None else x[0] for x in (c.logp_N, c.logp_one_N))
        for name, c in done.items()
    }
    if mode == "raw":
        assert pairs == {"plain": (BEST, BEST), "warm": (None, BEST), "greedy": (0.0, BEST)}
    else:
        assert pairs == {"plain": (BEST, BEST), "warm": (BEST / 2, None), "greedy": (0.0, None)}


def test_a_server_in_no_doubt_leaves_the_kind_unknown() -> None:
    def certain(choice: dict[str, Any]) -> None:
        choice["logprobs"] = {"token_logprobs": [0.0], "top_logprobs": [{"a": 0.0}]}

    server = FakeServer(faults=lambda body, count: Fault(changes=certain) if count < 6 else None)
    with opened(server) as engine:
        assert engine.kind == "unknown" and len(server.requests) == 6
        (warm,) = engine.generate([prompt("a", 1, 20)], Sampling(temperature=2.0, max_new_tokens=8))
        (plain,) = engine.generate([prompt("a", 1, 20)], Sampling(max_new_tokens=8))
    assert warm.logp_N is None and warm.logp_one_N is None
    assert plain.logp_N is not None and plain.logp_one_N is not None


def test_no_log_probs_are_none() -> None:
    server = FakeServer(
        faults=lambda body, count: Fault(changes=lambda choice: choice.pop("logprobs"))
    )
    with opened(server) as engine:
        assert engine.kind == "none"
        (plain,) = engine.generate([prompt("a", 1, 20)], Sampling(max_new_tokens=8))
    assert plain.logp_N is None and plain.logp_one_N is None


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([3.5] * 4, "returned 3.5 as a logprob"),
        ([-1.0, None, -1.0, -1.0], "returned nan"),
        ([-9999.0] * 4, "returned -9999"),
        ([-1.0], "1 logprobs for 4 tokens"),
    ],
)
def test_what_is_no_log_prob_is_refused(values: list[float | None], found: str) -> None:
    with pytest.raises(EngineError, match=found):
        one(FakeServer(faults=changing(logprobs={"token_logprobs": values})))


# What is refused


def test_a_server_without_token_ids_is_refused_at_once() -> None:
    server = FakeServer(
        faults=lambda body, count: Fault(changes=lambda choice: choice.pop("token_ids"))
    )
    with pytest.raises(EngineError, match="without token_ids; expected the ids as sampled"):
        one(server)
    assert len(server.requests) == 1


def test_another_prompt_read_is_refused() -> None:
    with pytest.raises(EngineError, match="a: the server read 3 prompt ids that differ from the 2"):
        one(FakeServer(faults=changing(prompt_token_ids=[0, 1, 20])))


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        (("x", "y"), None, r"serves 2 models \(x, y\).+set server.name"),
        (("x", "y"), "z", r"serves x, y; expected server.name=z"),
        ((), None, r"serves 0 models \(none\)"),
    ],
)
def test_the_model_is_one_that_is_served(
    names: tuple[str, ...], name: str | None, found: str
) -> None:
    with (
        pytest.raises(EngineError, match=found),
        opened(FakeServer(names=names), replace(CONFIG, {"name": name})),
    ):
        pytest.fail("opened")


def test_a_model_is_chosen_by_its_name() -> None:
    server = FakeServer(names=("x", "y"))
    with opened(server, replace(CONFIG, {"name": "y"})) as engine:
        assert engine.decisions[0] == ("server.name", "y", "as asked")
    assert server.requests[0]["model"] == "y"


def test_a_server_with_too_little_room_is_refused() -> None:
    with opened(FakeServer(max_model_len=16), context=64) as engine:
        assert engine.context == 16
        with pytest.raises(EngineError, match=r"a: .+ may take 22 tokens .+ max_model_len is 16"):
            engine.generate([prompt("a", 1, 2)], Sampling(max_new_tokens=20))
        done = engine.generate([prompt("a", 1, 2, max_new_tokens=14)], Sampling(max_new_tokens=20))
    assert len(done) == 1


def test_the_model_s_context_bounds_a_completion() -> None:
    server = FakeServer(max_model_len=None)
    with opened(server, context=10) as engine:
        engine.generate([prompt("a", *[1] * 6)], Sampling(max_new_tokens=20))
        with pytest.raises(DataError, match="b: the prompt has 10 tokens"):
            engine.generate([prompt("b", *[1] * 10)], GREEDY)
        with pytest.raises(DataError, match="c: the prompt has no token"):
            engine.generate([prompt("c")], GREEDY)
    assert server.requests[-1]["max_tokens"] == 4


def test_a_temperature_the_server_would_raise_is_refused() -> None:
    with opened(FakeServer()) as engine, pytest.raises(ConfigError, match=r"temperature=0\.001"):
        engine.generate([prompt("a", 1)], Sampling(temperature=0.001))
