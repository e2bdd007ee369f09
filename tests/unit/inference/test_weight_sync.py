"""Weights pushed to a server: what shows that they arrived, and every way in which they may not have."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.fake_vllm import CONFIG, GREEDY, PROBED, FakeServer, after_probe, prompt
from tests.helpers.fake_weight_sync import CPU, PARTS, WeightServer, Worker, change, tiny, trained
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping, replace
from taut.errors import ConfigError, EngineError
from taut.inference import vllm_client, weight_sync, weight_transfer
from taut.inference.settings import ModelUse
from taut.inference.vllm import ServerEngine
from taut.inference.vllm_client import VllmServer
from taut.inference.weight_sync import Proof, TrainingModel, WeightSync, write
from taut.inference.worker import taut_worker
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig
from taut.plan.memory import peak_bytes
from taut.train.distributed import Ranks
from taut.types import Completion, FloatArray

LORA = LoraConfig(rank=2, train_token_rows="never")


@contextmanager
def following(server: FakeServer, asked: TrainingModel, **sync: Any) -> Iterator[ServerEngine]:
    """An engine whose server follows a model."""
    config = replace(CONFIG, {f"sync.{name}": value for name, value in sync.items()})
    with server:
        engine = ServerEngine.open(server.url, config, tiny_tokenizer(), [7], 64)
        try:
            engine = engine.follow(asked)
            yield engine
        finally:
            engine.close()


def sync_of(engine: ServerEngine) -> WeightSync:
    assert engine.sync is not None
    return engine.sync


def log_probs(engine: ServerEngine) -> FloatArray:
    """What the only server says of some ids."""
    server, name = serving_of(engine)
    return server.log_probs(name, np.arange(3, 12))


def proof_of(engine: ServerEngine) -> Proof:
    """The proof of the last push to the only server."""
    (proof,) = sync_of(engine).proofs
    return proof


def serving_of(engine: ServerEngine) -> tuple[VllmServer, str]:
    """The only server, and the model that its requests name."""
    (server,) = engine.pool.servers
    return server.vllm, server.serving.model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


# What arrives


def test_a_push_is_proven_by_every_tensor_and_by_log_probs(folder: str) -> None:
    model, server = tiny(), WeightServer()
    with following(server, trained(model), folder=folder) as engine:
        engine.update(0)
        first = proof_of(engine)
        change(model)
        engine.update(3)
        second = proof_of(engine)
        (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)
    assert (first.mode, first.version, first.largest_change) == ("full", 0, 0.0)
    assert first.num_equal == len(list(model.parameters())) and first.unread == ()
    assert second.largest_change > 0.1 and second.largest_error < 1e-4
    assert second.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert completion.version == 3
    assert server.told.count("/reset_prefix_cache") == 2


def test_a_server_sleeps_between_rollouts_and_wakes_in_parts_around_a_push(folder: str) -> None:
    model = tiny()
    server = WeightServer(has=("full", "pause", "sleep"), asleep=PARTS)  # as a killed run leaves it
    with following(server, trained(model), folder=folder, sleep=True) as engine:
        assert "servers between rollouts" in [decision.name for decision in engine.decisions]
        engine.update(0)
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert server.asleep == PARTS
        change(model)
        server.told.clear()
        engine.update(1)
        assert server.asleep == frozenset()
        assert proof_of(engine).largest_change > 0.1
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert [path.removeprefix("/collective_rpc ") for path in server.told] == [
            "/wake_up?tags=weights",
            *("taut_held", "taut_load"),
            *("/reset_prefix_cache?reset_running_requests=true", "taut_checksums"),
            "/wake_up?tags=kv_cache",
            *("taut_held", "taut_held"),  # before the rollout, and after the answer
            "/sleep?level=1",
        ]
        server.told.clear()
        (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)  # nothing was updated
        assert (server.told[0], server.told[-1]) == ("/wake_up", "/sleep?level=1")
        assert completion.version == 1
        engine.rest()
        assert server.told.count("/sleep?level=1") == 1
        server.restart()
        server.asleep = frozenset()
        (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)
        assert (completion.version, sync_of(engine).restarts) == (1, 1)
        assert server.asleep == PARTS


def test_an_adapter_is_loaded_by_a_server_that_wakes(folder: str) -> None:
    model, server = apply_lora(tiny(), LORA), WeightServer(has=("adapter", "sleep"))
    with following(server, trained(model), folder=folder, sleep=True) as engine:
        for version in range(2):
            engine.update(version)
            (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)
            assert (completion.version, server.asleep) == (version, PARTS)
            change(model)
    assert "a request while it sleeps" not in server.told


def test_a_server_that_cannot_sleep_is_refused(folder: str) -> None:
    with (
        pytest.raises(EngineError, match=r"cannot sleep; .* start it with .*--enable-sleep-mode, "),
        following(WeightServer(), trained(tiny()), folder=folder, sleep=True),
    ):
        pass


def test_an_adapter_goes_merged_to_a_server_that_loads_none(folder: str) -> None:
    model = apply_lora(tiny(), LORA)
    change(model)
    with following(WeightServer(), trained(model), folder=folder) as engine:
        engine.update(1)
        proof = proof_of(engine)
    assert proof.mode == "full" and proof.largest_change > 0.01


def test_an_adapter_alone_goes_under_a_name_of_its_own(folder: str) -> None:
    model = apply_lora(tiny(), LORA)
    server = WeightServer(has=("full", "adapter"))
    with following(server, trained(model), folder=folder) as engine:
        engine.update(0)
        before = serving_of(engine)[1]
        change(model)
        engine.update(1)
        after = serving_of(engine)[1]
        proof = proof_of(engine)
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert list(server.adapters) == [after] != [before]
        assert server.requests[-1]["model"] == after
    assert proof.mode == "adapter" and proof.largest_change > 0.01
    assert server.adapters == {} and server.worker.taut_version == -1


def test_what_vllm_loads_no_adapter_of_goes_whole(folder: str) -> None:
    model = apply_lora(tiny(), LoraConfig(rank=2, dora=True, train_token_rows="never"))
    with following(WeightServer(has=("full", "adapter")), trained(model), folder=folder) as engine:
        assert sync_of(engine).mode == "full"
    with (
        pytest.raises(
            EngineError,
            match=r"^rollout\.server\.sync\.mode=adapter, .*vLLM loads no adapter with DoRA",
        ),
        following(WeightServer(), trained(model), folder=folder, mode="adapter"),
    ):
        pass


def test_nothing_is_left_in_the_folder(folder: str) -> None:
    with following(WeightServer(), trained(tiny()), folder=folder) as engine:
        for version in range(3):
            engine.update(version)
        kept = [path.name for path in Path(folder).glob("*/*/*")]
    assert kept == ["weights-0000.safetensors"]
    assert list(Path(folder).iterdir()) == []


def test_the_folder_needs_room_for_one_push(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def writing(tensors: Any, dtype: torch.dtype, place: Path) -> int:
        found.append([path.name for path in place.parent.iterdir() if path.is_dir()])
        return write(tensors, dtype, place)

    monkeypatch.setattr(weight_sync, "write", writing)
    with following(WeightServer(), trained(tiny()), folder=folder) as engine:
        engine.update(0)
        engine.update(1)
    assert found == [["0-1"], ["1-2"]]


# What does not


def test_a_server_that_shows_no_checksum_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "taut_checksums", lambda worker, names: [])
    with (
        following(WeightServer(), trained(tiny()), folder=folder) as engine,
        pytest.raises(EngineError, match=r"step 0: .*a checksum of none of the \d+ tensors"),
    ):
        engine.update(0)


def test_a_plain_server_is_refused_with_the_command_that_starts_another() -> None:
    with (
        pytest.raises(
            EngineError,
            match=r"takes no weights while it runs; .*--worker-extension-cls taut_worker\.",
        ) as e,
        following(FakeServer(), trained(tiny())),
    ):
        pass
    ways = str(e.value).split("; for adapters alone ")
    assert len(ways) == 2 and all("--host 127.0.0.1" in way for way in ways)
    place = shlex.split(str(e.value).partition("PYTHONPATH=")[2])[0]
    assert (Path(place) / "taut_worker.py").exists()
    with FakeServer() as server:
        engine = ServerEngine.open(server.url, CONFIG, tiny_tokenizer(), [7], 64)
        with pytest.raises(EngineError, match="keeps the weights it was started with"):
            engine.update(1)
        engine.close()


def test_a_server_that_keeps_a_tensor_is_told_by_its_name(folder: str) -> None:
    model, server = tiny(), WeightServer()
    with following(server, trained(model), folder=folder) as engine:
        engine.update(0)
        server.worker.keeps = lambda name: name == "model.layers.1.mlp.up_proj.weight"
        change(model, size=1e-7)  # far below what logprobs show
        with pytest.raises(
            EngineError,
            match=r"weights after step 1: .*model\.layers\.1\.mlp\.up_proj\.weight \(.* has checksum",
        ):
            engine.update(1)


def test_a_server_that_answers_from_other_weights_is_found_by_its_log_probs(folder: str) -> None:
    model, server = tiny(), WeightServer(is_stale=True)
    with following(server, trained(model), folder=folder) as engine:
        engine.update(0)
        change(model)
        with pytest.raises(EngineError, match="as before the push: it keeps the old weights"):
            engine.update(1)
    with (
        following(WeightServer(model=tiny(seed=5), is_stale=True), trained(model)) as engine,
        pytest.raises(EngineError, match=r"weights after step 0: .*logprob"),
    ):
        engine.update(0)


def test_an_adapter_on_another_base_is_found(folder: str) -> None:
    model = apply_lora(tiny(), LORA)
    server = WeightServer(model=tiny(seed=5), has=("adapter",))
    with (
        following(server, trained(model), folder=folder) as engine,
        pytest.raises(EngineError, match=r"of another model; expected .* by the model in training"),
    ):
        engine.update(0)


def test_a_folder_the_server_does_not_see(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taut_worker, "_files", lambda folder: [])
    with (
        following(WeightServer(), trained(tiny()), folder=folder) as engine,
        pytest.raises(
            EngineError, match=r"it sees no file in .*; set rollout\.server\.sync\.folder"
        ),
    ):
        engine.update(0)


def test_a_cache_that_cannot_be_emptied(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "PAUSE", 0.0)
    with (
        following(WeightServer(is_busy=True), trained(tiny()), folder=folder) as engine,
        pytest.raises(EngineError, match="prefix cache cannot be emptied"),
    ):
        engine.update(0)


# What happens later


@pytest.mark.parametrize("way", ["full", "adapter"])
def test_a_server_that_was_started_again_gets_the_same_weights(folder: str, way: str) -> None:
    model = tiny() if way == "full" else apply_lora(tiny(), LORA)
    server = WeightServer(has=(way,))
    with following(server, trained(model), folder=folder) as engine:
        change(model)
        engine.update(1)
        change(model, seed=2)  # what is in training now is not what was pushed
        pushed = log_probs(engine)
        server.restart()
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert sync_of(engine).restarts == 1
        again = log_probs(engine)
        assert np.array_equal(again, pushed)
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert sync_of(engine).restarts == 1


def test_a_server_started_again_from_another_model_is_refused(folder: str) -> None:
    model = apply_lora(tiny(), LORA)
    server = WeightServer(has=("adapter",))
    with following(server, trained(model), folder=folder) as engine:
        engine.update(0)
        server.started_with = tiny(seed=5)
        server.restart()
        with pytest.raises(EngineError, match="of another model"):
            engine.generate([prompt("a", 1, 20)], GREEDY)


def test_answers_of_a_server_that_was_started_again_meanwhile_are_not_used(folder: str) -> None:
    server = WeightServer()
    with following(server, trained(tiny()), folder=folder) as engine:
        engine.update(0)
        server.faults = after_probe(lambda body, count: server.restart())
        with pytest.raises(EngineError, match="started again while it answered"):
            engine.generate([prompt("a", 1, 20)], GREEDY)


@pytest.mark.parametrize("way", ["full", "adapter"])
def test_somebody_else_s_push_of_the_same_step_is_noticed(folder: str, way: str) -> None:
    """Of every weight, over this run's own or under its adapter."""
    model = tiny() if way == "full" else apply_lora(tiny(), LORA)
    server = WeightServer(has=("full", "adapter"))
    with following(server, trained(model), folder=folder) as engine:
        engine.update(5)
        assert sync_of(engine).mode == way
        engine.generate([prompt("a", 1, 20)], GREEDY)
        before = r"5 \(.*5-1\)" if way == "full" else "it was started with"
        other = ServerEngine.open(server.url, CONFIG, tiny_tokenizer(), [7], 64)
        other = other.follow(trained(tiny(seed=5)))
        sync_of(other)._require_same = lambda *numbers: None  # type: ignore[method-assign]
        try:
            other.update(5)
        finally:
            other.close()
        found = rf"holds weights of version 5 \(.*5-1\); expected those .*{before}, which"
        with pytest.raises(EngineError, match=found):
            engine.generate([prompt("a", 1, 20)], GREEDY)


def test_a_server_that_is_gone_ends_the_push(folder: str) -> None:
    server = WeightServer()
    with following(server, trained(tiny()), folder=folder) as engine:
        engine.update(0)
        server.is_gone = True
        with pytest.raises(EngineError, match=r"weights after step 1: server: no answer"):
            engine.update(1)


def test_a_server_that_loads_for_too_long_ends_the_push(folder: str) -> None:
    server = WeightServer(slow=5.0)
    with (
        following(server, trained(tiny()), folder=folder, timeout=0.2) as engine,
        pytest.raises(EngineError, match=r"no answer within 0\.2 s .*\(2 attempts\)"),
    ):
        engine.update(0)


# Several ranks


class Second(Ranks):
    """The second of two ranks, the first of which says ``said`` each time."""

    said: Any = None

    def gather(self, value: Any) -> list[Any]:
        assert value is None
        return [type(self).said, None]

    def from_writer(self, value: Any) -> Any:
        return self.gather(value)[0]


def test_a_rank_that_does_not_write_hears_of_the_writer_s_failure() -> None:
    class Failing(Second):
        said = EngineError("server: gone")

    with (
        pytest.raises(EngineError, match="gone"),
        following(WeightServer(), trained(tiny(), Failing(1, 2, CPU))),
    ):
        pass


def test_ranks_share_the_prompts_and_have_all_answers(folder: str) -> None:
    class First(Ranks):
        """The first of two ranks, the second of which has the answers to the other prompts."""

        def gather(self, value: Any) -> list[Any]:
            if not isinstance(value, dict) or ("a", 0) not in value:
                return [value, {} if isinstance(value, dict) else None]
            return [value, {("b", 0): completion("b"), ("d", 0): completion("d")}]

        def from_writer(self, value: Any) -> Any:
            return value

    server = WeightServer()
    with following(server, trained(tiny(), First(0, 2, CPU)), folder=folder) as engine:
        engine.update(0)
        prompts = [prompt(name, 1, 20) for name in "abcd"]
        heard: list[str] = []
        found = engine.generate(prompts, GREEDY, lambda one: heard.append(one.prompt_id))
        asked = [body for body in server.requests[PROBED:] if "prompt_logprobs" not in body]
    assert [one.prompt_id for one in found] == list("abcd")
    assert sorted(heard) == ["a", "c"] and len(asked) == 2


def completion(name: str) -> Completion:
    return Completion(name, 0, np.array([7]), None, None, "stop")


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("way", ["files", "chunks"])
def test_no_more_than_a_layer_and_a_part_of_the_weights_is_held(
    way: str, adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen layers of shards, each gathered when it is its turn: a file, or a chunk, is as large as one of them."""
    model: Any = tiny_model("llama", dtype=torch.float32, num_hidden_layers=16, hidden_size=64)
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    monkeypatch.setattr(weight_sync, "FILE_BYTES", layer)
    monkeypatch.setattr(weight_transfer, "CHUNK_BYTES", layer)
    if adapts:
        model = apply_lora(model, LORA)

    def gathered(names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if name in names:
                yield name, tensor.clone()

    def push() -> None:
        tensors = weight_sync.checkpoint_tensors(model, gathered)
        if way == "files":
            write(tensors, torch.float32, tmp_path)
        else:
            for chunk in weight_transfer.chunks(tensors, torch.float32, CPU):
                del chunk

    total = sum(weight.nbytes for weight in model.parameters())
    assert peak_bytes(push, [], CPU) < 2.5 * layer < total / 6


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.mode"):
        replace(CONFIG, {"sync.mode": "half"})


def test_bfloat16_is_allowed_its_rounding() -> None:
    asked = trained(tiny())
    wide = TrainingModel(asked.scorer, asked.ranks, torch.bfloat16)
    server = WeightServer(model=tiny(), is_stale=True)
    with following(server, wide) as engine:
        change(asked.scorer, size=1e-3)
        engine.update(1)
        proof = proof_of(engine)
    assert 1e-3 < proof.largest_error < 0.5


def test_a_command_that_trains_nothing_refuses_settings_of_pushing() -> None:
    keys = {"model": "m", "engine": "server", "urls": "http://h/v1", "server.sync.mode": "full"}
    with refused(ErrorCode("server.sync")):
        from_mapping(ModelUse, keys)
