"""Several servers: who gets which request, and that nothing is lost where one dies, is slow, or has other weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.fake_vllm import CONFIG, GREEDY, FakeServer, Fault, after_probe, prompt
from tests.helpers.fake_weight_sync import CPU, WeightServer, change, tiny, trained
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import replace
from taut.errors import ConfigError, EngineError
from taut.inference import server_pool
from taut.inference.server_pool import Server
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine, Stream
from taut.inference.weight_sync import TrainingModel
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig
from taut.train.distributed import Ranks
from taut.types import Completion

GROUPS = [prompt(f"row {number}", 1, 20 + number) for number in range(9)]
SAMPLED = Sampling(n=3, max_new_tokens=8)
PATIENCE = 20.0


@contextmanager
def several(
    servers: Sequence[FakeServer], asked: TrainingModel | None = None, **keys: Any
) -> Iterator[ServerEngine]:
    """An engine of these servers; with ``asked`` they follow a model."""
    with ExitStack() as stack:
        urls = [stack.enter_context(server).url for server in servers]
        config = replace(CONFIG, {"retries": 0, **keys})
        engine = ServerEngine.open(urls, config, tiny_tokenizer(), [7], 64)
        try:
            yield engine if asked is None else engine.follow(asked)
        finally:
            engine.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "TRIED_AGAIN", 0.05)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


def prompts_of(server: FakeServer) -> list[list[int]]:
    """The prompts of completions, without probes."""
    return [body["prompt"] for body in server.requests if len(body["prompt"]) == 2]


def until(holds: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never holds"
        time.sleep(0.01)


def as_told(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.prompt_id, c.index, c.ids_N.tolist(), c.finish_reason) for c in completions]


# Who gets which request


def test_a_group_goes_to_one_server_and_groups_are_spread() -> None:
    servers = [FakeServer() for _ in range(3)]
    with several(servers) as engine:
        completions = engine.generate(GROUPS, SAMPLED)
    with several([FakeServer()]) as engine:
        assert as_told(engine.generate(GROUPS, SAMPLED)) == as_told(completions)
    homes: dict[int, set[int]] = {}
    for number, server in enumerate(servers):
        for ids in prompts_of(server):
            homes.setdefault(ids[-1], set()).add(number)
    assert len(homes) == len(GROUPS) and all(len(found) == 1 for found in homes.values())
    assert {number for found in homes.values() for number in found} == {0, 1, 2}


def test_the_turns_of_a_path_go_to_the_server_of_its_row() -> None:
    servers = [FakeServer() for _ in range(3)]
    done: SimpleQueue[int] = SimpleQueue()
    with several(servers) as engine:
        stream = Stream(engine, GREEDY, done.put)
        for turn in range(4):
            for row in range(3):
                for sample in range(2):
                    name = f"r#{row}#{sample}@{turn}"
                    stream.ask(row, prompt(name, 1, 20 + row))
                    stream.take(done.get(timeout=PATIENCE))
        stream.ask(9, prompt("of another name", 1, 20), affinity="r#0")
        stream.take(done.get(timeout=PATIENCE))
    rows = [{ids[-1] for ids in prompts_of(server)} for server in servers]
    assert sum(map(len, rows)) == 3 and sum(len(prompts_of(server)) for server in servers) == 25


def test_a_slow_server_gets_fewer_requests() -> None:
    most_are_done = threading.Event()

    def late(body: dict[str, Any], count: int) -> Fault | None:
        most_are_done.wait(60)
        return None

    def soon(body: dict[str, Any], count: int) -> Fault | None:
        if count == 25:
            most_are_done.set()
        return None

    slow, quick = (FakeServer(faults=after_probe(fault)) for fault in (late, soon))
    prompts = [prompt(f"{number}", 1, 20 + number) for number in range(30)]
    with several([slow, quick], concurrency=2) as engine:
        assert len(engine.generate(prompts, GREEDY)) == 30
    assert len(prompts_of(slow)) < len(prompts_of(quick)) / 2
    assert slow.most <= 2 and quick.most <= 2


# Trouble


def test_a_server_killed_amid_a_round_loses_nothing() -> None:
    killed = FakeServer()
    killed.faults = after_probe(lambda body, count: Fault(hangs_up=True) if count >= 4 else None)
    servers = [FakeServer(), killed, FakeServer()]
    with several(servers) as engine:
        engine.pool.revive = lambda server: (_ for _ in ()).throw(server.failure)
        completions = engine.generate(GROUPS, SAMPLED)
        (told,) = engine.pool.take_left_out()
        assert engine.pool.take_left_out() == []
        assert [server.url for server in engine.pool.in_use] == [servers[0].url, servers[2].url]
    with several([FakeServer()]) as engine:
        assert as_told(engine.generate(GROUPS, SAMPLED)) == as_told(completions)
    assert killed.url in told and "no answer" in told
    seeds = [body["seed"] for server in servers for body in server.requests if "seed" in body]
    again = [body["seed"] for body in killed.requests[6:]]
    assert again and all(seeds.count(seed) == 2 for seed in again)


def test_where_no_server_is_left_one_line_says_so() -> None:
    def dies(body: dict[str, Any], count: int) -> Fault | None:
        return Fault(status=500, text="no memory") if count >= 2 else None

    servers = [FakeServer(faults=after_probe(dies)) for _ in range(2)]
    with several(servers) as engine, pytest.raises(EngineError) as caught:
        engine.generate(GROUPS, SAMPLED)
    assert "none of the 2 servers can be used; server: HTTP 500 (no memory) from" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_a_server_that_is_back_gets_the_last_push_before_a_request(folder: str) -> None:
    """It was started again meanwhile, with the weights it was first started with."""
    model = tiny()
    servers = [WeightServer() for _ in range(3)]
    with several(servers, trained(model), **{"sync.folder": folder}) as engine:
        engine.update(0)
        change(model)
        engine.update(1)
        servers[1].is_gone = True
        first = engine.generate(GROUPS, SAMPLED)
        assert {c.version for c in first} == {1} and len(engine.pool.in_use) == 2
        change(model, seed=2)
        assert len(engine.sync.push(2)) == 2  # type: ignore[union-attr]
        servers[1].restart()
        assert servers[1].worker.taut_version == -1
        seen = len(prompts_of(servers[1]))
        servers[1].is_gone = False
        until(lambda: len(engine.pool.in_use) == 3)
        assert servers[1].worker.taut_version == 2 and len(prompts_of(servers[1])) == seen
        again = engine.generate(GROUPS, SAMPLED)
        assert {c.version for c in again} == {2} and len(prompts_of(servers[1])) > seen
        for mine, its in zip(model.parameters(), servers[1].worker.model.parameters(), strict=True):
            assert torch.equal(mine, its)


def test_a_server_that_comes_back_amid_the_check_before_a_rollout_is_used(folder: str) -> None:
    """After the first rank has found that it is gone, and before the ranks act on that: it is not left out again."""
    back: list[Callable[[], object]] = []

    class Amid(Ranks):
        def from_writer(self, value: Any) -> Any:
            if back and any(isinstance(found, EngineError) for found in value):
                back.pop()()
            return super().from_writer(value)

    servers = [WeightServer() for _ in range(2)]
    asked = trained(tiny(), Amid(0, 1, CPU))
    with several(servers, asked, **{"sync.folder": folder}) as engine:
        engine.update(1)
        servers[0].is_gone = True
        engine.generate(GROUPS, SAMPLED)
        (_,) = engine.pool.take_left_out()

        def comes_back() -> None:
            servers[0].is_gone = False
            until(lambda: len(engine.pool.in_use) == 2)

        back.append(comes_back)
        assert engine.sync is not None
        engine.sync.hold()
        assert not back and not engine.pool.take_left_out()
        assert len(engine.pool.in_use) == 2 and engine.sync.restarts == 1


def test_a_push_waits_for_a_server_that_comes_back(folder: str) -> None:
    """Else it would be used with the weights before: those it was just given, when the push passed it over."""
    servers, fed = [WeightServer() for _ in range(2)], []
    with several(servers, trained(tiny()), **{"sync.folder": folder}) as engine:
        engine.update(1)
        revive, push = engine.pool.revive, threading.Thread(target=engine.update, args=(2,))

        def given(server: Server) -> None:
            revive(server)
            fed.append(server.serving.version)
            push.start()
            push.join(0.2)

        engine.pool.revive = given
        servers[0].is_gone = True
        engine.generate(GROUPS, SAMPLED)
        servers[0].is_gone = False
        until(lambda: push.ident is not None)
        push.join()
        assert {server.serving.version for server in engine.pool.in_use} == {2}
        assert [server.worker.taut_version for server in servers] == [2, 2]
        assert fed == [1] and len(engine.pool.take_left_out()) == 1


def test_one_killed_one_slow_one_stale(folder: str) -> None:
    """Nothing is lost, and the stale one is refused by name."""
    model = tiny()
    killed, slow, stale, sound = (WeightServer() for _ in range(4))
    servers = [killed, slow, stale, sound]
    with several(servers, trained(model), **{"sync.folder": folder}) as engine:
        engine.update(0)
        stale.is_stale = True
        change(model)
        engine.update(1)
        assert engine.sync is not None and len(engine.sync.proofs) == 3
        (told,) = engine.pool.take_left_out()
        assert stale.url in told and "as before the push: it keeps the old weights" in told
        before = len(prompts_of(stale))

        def dies(body: dict[str, Any], count: int) -> Fault | None:
            killed.is_gone = True
            return Fault(hangs_up=True)

        killed.faults = dies
        slow.faults = lambda body, count: Fault(slow=0.1)
        completions = engine.generate(GROUPS, SAMPLED)
        (told,) = engine.pool.take_left_out()
        assert killed.url in told and len(prompts_of(stale)) == before
        stale.is_stale = False
        slow.faults = lambda body, count: None
        engine.update(2)
        assert {server.url for server in engine.pool.in_use} == {slow.url, stale.url, sound.url}
    with several([FakeServer()]) as engine:
        expected = as_told(engine.generate(GROUPS, SAMPLED))
    assert as_told(completions) == expected and {c.version for c in completions} == {1}


def test_answers_of_a_server_that_was_started_again_are_asked_again(folder: str) -> None:
    """Once, amid a round: with one server, nothing is lost."""
    model, server = tiny(), WeightServer()
    with several([server], trained(model), **{"sync.folder": folder}) as engine:
        change(model)
        engine.update(1)
        restarts = iter([True])

        def fault(body: dict[str, Any], count: int) -> None:
            if body["prompt"] == [1, 24] and next(restarts, False):
                server.restart()

        server.faults = fault
        completions = engine.generate(GROUPS, SAMPLED)
        assert engine.sync is not None and engine.sync.restarts == 1
        assert server.worker.taut_version == 1
        (told,) = engine.pool.take_left_out()
        assert "started again while it answered" in told
    assert len(completions) == 27 and all(c.error is None for c in completions)
    asked = [body["seed"] for body in server.requests if body["prompt"] == [1, 24]]
    assert max(asked.count(seed) for seed in asked) == 2


def test_adapters_go_to_every_server(folder: str) -> None:
    model = apply_lora(tiny(), LoraConfig(rank=2, train_token_rows="never"))
    servers = [WeightServer(has=("full", "adapter")) for _ in range(2)]
    with several(servers, trained(model), **{"sync.folder": folder}) as engine:
        for version in range(3):
            change(model)
            engine.update(version)
            assert engine.sync is not None
            assert [(p.mode, p.version) for p in engine.sync.proofs] == [("adapter", version)] * 2
            assert [len(server.adapters) for server in servers] == [1, 1]
        servers[0].restart()
        completions = engine.generate(GROUPS, SAMPLED)
        assert {c.version for c in completions} == {2} and engine.sync.restarts == 1
        assert [len(server.adapters) for server in servers] == [1, 1]


# Bad input


def test_a_server_of_another_tokenizer_is_refused_by_name() -> None:
    other = FakeServer(spell=lambda text: [*text.encode()][:5])
    with (
        pytest.raises(EngineError, match=r"same tokenizer; .*correct rollout\.urls") as caught,
        several([FakeServer(), other]),
    ):
        pass
    assert other.url in str(caught.value)


@pytest.mark.parametrize("told", [None, "refused"])
def test_a_tokenizer_that_cannot_be_compared_is_told(told: str | None) -> None:
    class Refusing(FakeServer):
        def _complete(self, handler: Any, body: dict[str, Any]) -> None:
            if told is not None and isinstance(body["prompt"], str):
                body = {**body, "prompt": []}
                handler.send_error(400)
                return
            super()._complete(handler, body)

    with several([Refusing(spell=lambda text: None)]) as engine:
        (decision,) = [it for it in engine.decisions if it[0] == "server tokenizer"]
    assert decision[1] == "not compared"
    assert ("takes no text" if told else "does not say which ids") in decision[2]


def test_servers_must_be_started_alike() -> None:
    with (
        pytest.raises(EngineError, match=r"gives processed logprobs and .* raw ones; .*alike"),
        several([FakeServer(), FakeServer(mode="processed")]),
    ):
        pass
    other = WeightServer()
    other.worker.model_runner.model_config.dtype = torch.bfloat16
    with (
        pytest.raises(EngineError, match=r"in float32, .* in bfloat16; expected all servers"),
        several([WeightServer(), other], trained(tiny())),
    ):
        pass
    with pytest.raises(ConfigError, match="names a server twice"):
        ServerEngine.open(["http://h/v1", "http://h/v1/"], CONFIG, tiny_tokenizer(), [7], 64)


def test_a_server_that_does_not_answer_at_the_start_is_refused() -> None:
    with FakeServer() as gone:
        url = gone.url
    with FakeServer() as server, pytest.raises(EngineError, match="no answer") as caught:
        ServerEngine.open([server.url, url], CONFIG, tiny_tokenizer(), [7], 64)
    assert url in str(caught.value)


def test_servers_without_weights_to_follow_are_used_again_as_they_were() -> None:
    failing = FakeServer()
    failing.faults = after_probe(lambda body, count: Fault(hangs_up=True) if count < 1 else None)
    with several([failing, FakeServer()]) as engine:
        assert len(engine.generate(GROUPS, SAMPLED)) == 27
        until(lambda: len(engine.pool.in_use) == 2)
        failing.mode = "processed"
        failing.faults = lambda body, count: (
            Fault(hangs_up=True) if body["prompt"][0] == 1 else None
        )
        assert len(engine.generate(GROUPS, SAMPLED)) == 27
        until(lambda: "came back as another one" in str(engine.pool.servers[0].failure))
        assert len(engine.pool.in_use) == 1


def test_logprobs_of_the_probe_are_a_request_of_its_own() -> None:
    """The ids of the probe are those of its text, for every server."""
    servers = [WeightServer() for _ in range(2)]
    with several(servers, trained(tiny())) as engine:
        engine.update(0)
        assert engine.sync is not None
        for server in servers:
            probes = [body for body in server.requests if "prompt_logprobs" in body]
            assert all(np.array_equal(body["prompt"], engine.sync.probe_T) for body in probes)
            assert len(probes) == 2  # before and after
