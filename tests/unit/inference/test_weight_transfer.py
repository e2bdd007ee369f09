"""Weights by vLLM's own routes: what arrives, which way is chosen, and every way in which it may fail."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.fake_vllm import CONFIG, GREEDY, prompt
from tests.helpers.fake_weight_sync import CPU, PARTS, change, tiny, trained
from tests.helpers.fake_weight_transfer import UUID, FakeNccl, TransferServer, stand_in
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import nn

from taut.config import Decision, replace
from taut.errors import ConfigError, EngineError
from taut.inference import weight_transfer
from taut.inference.settings import SyncConfig
from taut.inference.vllm import ServerEngine
from taut.inference.weight_sync import WeightSync
from taut.inference.weight_transfer import ROUTES
from taut.train.distributed import Ranks

BACKENDS = ("nccl", "ipc")
GPU = {"nccl": "GPU-b", "ipc": UUID}
SOON = 30.0
"""Seconds within which a failure is seen."""


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    found = FakeNccl()
    stand_in(monkeypatch, found)
    return found


@contextmanager
def following(
    model: nn.Module, *servers: TransferServer, **sync: Any
) -> Iterator[tuple[ServerEngine, WeightSync]]:
    """An engine whose servers follow a model."""
    settings = {f"sync.{name}": value for name, value in sync.items()}
    config = replace(CONFIG, {"retries": 0, **settings})
    with ExitStack() as stack:
        urls = [stack.enter_context(server).url for server in servers]
        engine = ServerEngine.open(urls, config, tiny_tokenizer(), [7], 64)
        stack.callback(engine.close)
        followed = engine.follow(trained(model))
        stack.callback(followed.close)
        assert followed.sync is not None
        yield followed, followed.sync


def way(engine: ServerEngine) -> Decision:
    """How weights go to the servers."""
    (found,) = [decision for decision in engine.decisions if decision.name == "weight transfer"]
    return found


# What arrives


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_arrive_in_chunks_between_a_pause_and_what_proves_them(
    backend: str, nccl: FakeNccl
) -> None:
    model, server = tiny(), TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl)
    with following(model, server) as (engine, sync):
        engine.update(0)
        change(model)
        server.told.clear()
        engine.update(3)
        told = [path for path in server.told if "rpc" not in path]
        (proof,) = sync.proofs
        (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)
        decision = way(engine)
    parameters = dict(model.named_parameters())
    arrived = dict(server.worker.model.named_parameters())
    assert all(torch.equal(arrived[name], parameters[name]) for name in parameters)
    num_chunks = told.count("/update_weights")
    assert num_chunks > 2
    assert told == [
        "/pause?mode=keep",
        "/start_weight_update",
        *["/update_weights"] * num_chunks,
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ]
    assert (proof.version, proof.num_equal, proof.unread) == (3, len(parameters), ())
    assert proof.largest_error < 1e-4 and proof.largest_change > 0.1
    assert proof.num_bytes == sum(parameter.nbytes for parameter in parameters.values())
    assert completion.version == 3 and server.num_groups == 1
    assert server.worker.taut_folder == "" and decision[1:] == (
        backend,
        "every server was started with it",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_sleeps_is_woken_in_parts_around_a_transfer(
    backend: str, nccl: FakeNccl
) -> None:
    has = ("full", "pause", "sleep")
    model, server = tiny(), TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl, has=has)
    with following(model, server, sleep=True) as (engine, _):
        for version in (0, 1):
            engine.update(version)
            (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)
            assert (completion.version, server.asleep) == (version, PARTS)
            change(model)
        assert way(engine).value == backend
    told = server.told
    wakes = [told.index(f"/wake_up?tags={part}") for part in ("weights", "kv_cache")]
    assert wakes[0] < told.index("/start_weight_update")
    assert told.index("/finish_weight_update") < wakes[1]
    assert "a request while it sleeps" not in told


def test_tensors_of_several_widths_are_packed_where_their_elements_can_be_read() -> None:
    """The widest come first, so none begins at a place that its elements do not divide."""
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5, dtype=torch.float64)}
    (chunk,) = weight_transfer.chunks(tensors.items(), torch.bfloat16, torch.device("cpu"))
    assert [*chunk.tensors] == ["b", "a"] and chunk.sizes == [10, 3]
    assert chunk.described == {
        "names": ["b", "a"],
        "dtype_names": ["bfloat16", "uint8"],
        "shapes": [[5], [3]],
    }


def test_without_the_extension_log_probs_alone_prove_it_and_the_decision_says_so(
    nccl: FakeNccl,
) -> None:
    model, server = tiny(), TransferServer(backend="nccl", gpu="GPU-b", nccl=nccl, has=("pause",))
    with following(model, server, transport="nccl") as (engine, sync):
        engine.update(0)
        (proof,) = sync.proofs
        decision = way(engine)
    assert proof.num_equal == 0 and len(proof.unread) == len(list(model.parameters()))
    assert proof.largest_error < 1e-4
    assert decision.reason.startswith("as asked; logprobs alone prove it")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("has", "found"),
    [
        (("pause", "full"), r"server: model\.layers\.0\.mlp\.up_proj\.weight .* has checksum"),
        (("pause",), r"logprob .* of another model; expected"),
    ],
)
def test_a_tensor_that_does_not_arrive_is_found(
    backend: str, has: tuple[str, ...], found: str, nccl: FakeNccl
) -> None:
    model, server = tiny(), TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl, has=has)
    server.loses = lambda name: name == "model.layers.0.mlp.up_proj.weight"
    with following(model, server, transport=backend) as (engine, _):
        engine.update(0)
        change(model)
        with pytest.raises(EngineError, match=rf"^weights after step 1: .*{found}"):
            engine.update(1)


# Servers that fail


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_was_started_again_gets_a_new_group_and_the_weights(
    backend: str, nccl: FakeNccl
) -> None:
    model, server = tiny(), TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl)
    with following(model, server) as (engine, sync):
        change(model)
        engine.update(4)
        (before,) = engine.generate([prompt("a", 1, 20)], GREEDY)
        server.restart()
        (after,) = engine.generate([prompt("a", 1, 20)], GREEDY)
        assert sync.restarts == 1 and server.num_groups == 1
    assert after.version == 4 and after.ids_N.tolist() == before.ids_N.tolist()
    assert torch.equal(server.worker.model.model.norm.weight, model.model.norm.weight)


def test_a_server_that_is_back_gets_the_weights_before_the_next_rollout(nccl: FakeNccl) -> None:
    model = tiny()
    one, two = (TransferServer(backend="nccl", gpu="GPU-b", nccl=nccl) for _ in range(2))
    with following(model, one, two) as (engine, sync):
        engine.update(4)
        two.is_gone = True
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert [server.url for server in engine.pool.in_use] == [one.url]
        two.restart()
        two.is_gone = False
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert len(engine.pool.in_use) == 2 and sync.restarts == 1
    assert two.version.startswith("taut-") and two.version != one.version


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_dies_amid_a_transfer_is_left_out_and_the_others_go_on(
    backend: str, nccl: FakeNccl
) -> None:
    def die(server: TransferServer, number: int) -> None:
        server.is_gone = number == 1
        assert not server.is_gone

    model = tiny()
    one, two = (TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl) for _ in range(2))
    with following(model, one, two) as (engine, sync):
        engine.update(0)
        two.before_chunk = die
        change(model)
        began = time.monotonic()
        engine.update(1)
        assert time.monotonic() - began < SOON
        assert [server.url for server in engine.pool.in_use] == [one.url]
        (proof,) = sync.proofs
    assert (proof.version, proof.num_equal) == (1, len(list(model.parameters())))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_never_takes_a_chunk_is_waited_for_as_long_as_allowed(
    backend: str, nccl: FakeNccl
) -> None:
    """NCCL's group is aborted: what waits in it ends."""
    model, server = tiny(), TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl)
    with following(model, server, timeout=0.5) as (engine, _):
        engine.update(0)
        goes_on = threading.Event()
        server.before_chunk = lambda *_: goes_on.wait(SOON)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"rollout\.server\.sync\.timeout"):
            engine.update(1)
        assert time.monotonic() - began < SOON
        assert nccl.aborted == (backend == "nccl")
        goes_on.set()


def test_what_nccl_says_is_in_the_error(nccl: FakeNccl) -> None:
    """As where a server's NCCL has another version, or is on this GPU."""
    nccl.fails = lambda name: name == "ncclCommInitRank"
    server = TransferServer(backend="nccl", gpu="GPU-b", nccl=nccl)
    with (
        following(tiny(), server, timeout=0.5) as (engine, _),
        pytest.raises(EngineError, match=r"ncclCommInitRank: invalid usage; .*transport=files"),
    ):
        engine.update(0)


def test_another_trainer_s_weights_are_seen(nccl: FakeNccl) -> None:
    model, server = tiny(), TransferServer(nccl=nccl)
    with following(model, server, transport="ipc") as (engine, sync):
        engine.update(0)
        server.version = "step-7"
        engine.generate([prompt("a", 1, 20)], GREEDY)
        assert sync.restarts == 1 and server.version.startswith("taut-")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_send_once_and_again_together(backend: str, nccl: FakeNccl) -> None:
    """The writer alone talks to the server. A rank that came to another collective would break the barrier."""
    barrier, table = threading.Barrier(2, timeout=SOON), [None, None]

    class Together(Ranks):
        """A rank on a thread."""

        def gather(self, value: Any) -> list[Any]:
            table[self.rank] = value
            barrier.wait()
            values = [*table]
            barrier.wait()
            return values

        def from_writer(self, value: Any) -> Any:
            return self.gather(value)[0]

    server, model = TransferServer(backend=backend, gpu=GPU[backend], nccl=nccl), tiny()
    change(model)

    def run(rank: int) -> list[int]:
        config = replace(CONFIG, {"retries": 0})
        engine = ServerEngine.open(server.url, config, tiny_tokenizer(), [7], 64)
        followed = engine.follow(trained(copy.deepcopy(model), Together(rank, 2, CPU)))
        try:
            followed.update(1)
            if rank == 0:
                server.restart()
            (completion,) = followed.generate([prompt("a", 1, 20)], GREEDY)
            assert followed.sync is not None
            return [completion.version, followed.sync.restarts, followed.sync.proofs[0].num_equal]
        finally:
            followed.close()

    with server, ThreadPoolExecutor(2) as threads:
        outcomes = [*threads.map(run, (0, 1))]
    assert outcomes == [[1, 1, len(list(model.parameters()))]] * 2
    assert server.num_groups == 1 and server.told.count("/init_weight_transfer_engine") == 2


# Which way

OBSTACLES = [
    ({"routes": ROUTES[1:]}, "ipc", "has no route /init_weight_transfer_engine"),
    ({"backend": None}, "ipc", "was started without --weight-transfer-config"),
    ({"backend": "nccl", "gpu": "GPU-b"}, "ipc", "was started with the backend nccl"),
    ({"unpickles": False}, "ipc", "was started without VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
    ({"world_size": 2}, "ipc", "computes on 2 GPUs"),
    ({"gpu": "GPU-b"}, "ipc", f"computes on GPU GPU-b, this process on {UUID}"),
    ({"backend": "nccl"}, "nccl", "computes on this process's GPU"),
]


@pytest.mark.parametrize(("settings", "transport", "found"), OBSTACLES)
def test_what_is_asked_for_and_cannot_be_is_refused_with_the_command_that_starts_another(
    settings: dict[str, Any], transport: str, found: str, nccl: FakeNccl
) -> None:
    option = f"""--weight-transfer-config '{{"backend": "{transport}"}}'"""
    with (
        pytest.raises(EngineError) as refused,
        following(tiny(), TransferServer(nccl=nccl, **settings), transport=transport),
    ):
        pass
    message = str(refused.value)
    assert message.startswith(f"rollout.server.sync.transport={transport}, and http://127.0.0.1:")
    assert found in message and option in message and "\n" not in message


@pytest.mark.parametrize(
    ("settings", "found"),
    [(settings, found) for settings, _, found in OBSTACLES if "with the backend" not in found],
)
def test_auto_takes_files_where_the_server_s_own_way_is_closed(
    settings: dict[str, Any], found: str, nccl: FakeNccl, tmp_path: Path
) -> None:
    server = TransferServer(nccl=nccl, **settings)
    with following(tiny(), server, folder=str(tmp_path / "weights")) as (engine, _):
        engine.update(0)
        assert way(engine).value == "files" and found in way(engine).reason
        assert server.worker.taut_version == 0 and server.version == "default"


def test_auto_asks_nothing_where_this_process_is_on_no_gpu(tmp_path: Path) -> None:
    server = TransferServer()
    with following(tiny(), server, folder=str(tmp_path / "weights")) as (engine, _):
        assert way(engine)[1:] == ("files", "this process computes on cpu, not on a GPU")
    with (
        pytest.raises(EngineError, match=r"transport=nccl, and this process computes on cpu"),
        following(tiny(), TransferServer(backend="nccl"), transport="nccl"),
    ):
        pass


def test_auto_does_not_guess_which_gpu_a_server_is_on(nccl: FakeNccl) -> None:
    """Without the extension; asked for by name, vLLM itself says it at the first push."""
    with (
        pytest.raises(EngineError, match="takes no weights while it runs"),
        following(tiny(), TransferServer(nccl=nccl, has=("pause",))),
    ):
        pass
    with following(tiny(), TransferServer(nccl=nccl, has=("pause",)), transport="ipc") as (
        engine,
        _,
    ):
        assert way(engine).value == "ipc"


def test_no_nccl_in_this_process_is_said(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(weight_transfer, "nccl_library", missing)
    server = TransferServer(backend="nccl", gpu="GPU-b", nccl=nccl)
    with following(tiny(), server, folder=str(tmp_path / "weights")) as (engine, _):
        assert way(engine)[1:] == (
            "files",
            "this process finds no NCCL (libnccl.so.2: cannot open shared object file)",
        )


def test_an_adapter_alone_has_no_other_way() -> None:
    with pytest.raises(ConfigError, match="transport=ipc with mode=adapter: it sends every weight"):
        replace(SyncConfig(), {"transport": "ipc", "mode": "adapter"})
