"""One process: no process group, and the same answers a group of one would give."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.helpers.forked_processes import run
from tests.helpers.tiny_models import tiny_config
from torch import nn

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.methods.method import RunConfig
from taut.run.setup import storage_for
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.train.settings import ParallelConfig

ONE = Ranks(0, 1, torch.device("cpu"))


def test_one_process_joins_no_group() -> None:
    ranks = distributed.start("cpu")
    assert (ranks.rank, ranks.size, ranks.device.type) == (0, 1, "cpu")
    assert ranks.is_writer
    assert not dist.is_initialized()
    distributed.stop(ranks)


def test_collectives_of_one_are_the_values() -> None:
    assert ONE.sum([1.5, 2.0]) == [1.5, 2.0]
    assert ONE.max([3.0]) == [3.0]
    assert ONE.gather({"a"}) == [{"a"}]
    ONE.barrier()
    model = nn.Linear(2, 2)
    distributed.shard(model, ONE, torch.float32)
    assert distributed.layer_sharding(ONE, torch.float32) is None
    assert type(model) is nn.Linear
    with distributed.whole_tensors(model, ONE) as whole:
        assert whole is not None
        assert [name for name, _ in whole(["bias"])] == ["bias"]


def test_muon_and_quantized_bases_are_not_offloaded() -> None:
    keys = {"model": "m", "data.train": "x", "parallel.cpu_offload": True}
    with pytest.raises(ConfigError, match=r"cpu_offload=true with optim\.name=muon"):
        from_mapping(RunConfig, {**keys, "optim.name": "muon"})
    run = from_mapping(RunConfig, {**keys, "quantize": "nf4", "lora.rank": 2})
    with pytest.raises(ConfigError, match="cpu_offload=true with a quantized base"):
        storage_for(run, tiny_config("llama"), torch.bfloat16, torch.device("cpu"))


def test_a_cpu_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match="cpu_offload=true on a CPU: weights are in the host's"):
        distributed.start("cpu", ParallelConfig(cpu_offload=True))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device=cuda was asked for and no CUDA device is available; set device=cpu"),
        ("cuda:3", "device=cuda:3 was asked for and no CUDA"),
        ("gpu", "device=gpu is not known; expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        distributed.start(device)
    assert distributed.start("auto").device.type == "cpu"


@pytest.mark.parametrize(
    ("device", "ranks", "message"),
    [
        ("cudax", "1", "device=cudax is not known"),
        ("cuda:1", "2", "device=cuda:1 is one device for 2 ranks; .*set device=cuda"),
        ("cuda:2", "1", "device cuda:2 is wanted and there are 2 CUDA devices"),
    ],
)
def test_a_device_that_would_not_be_used_is_refused(
    device: str, ranks: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ConfigError, match=message):
        distributed.start(device)


@pytest.mark.parametrize(
    ("device", "group", "named"),
    [("cpu", "gloo", {}), ("cuda", "cpu:gloo,cuda:nccl", {"device_id": torch.device("cuda", 0)})],
)
def test_ranks_join_with_a_time_out_of_minutes(
    device: str, group: str, named: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank does for all takes longer: the others wait for it in the store."""
    joined: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **how: joined.append((backend, how))
    )
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: "store")
    monkeypatch.setattr(distributed, "Watch", lambda *_: None)
    distributed._join(0, 2, torch.device(device, 0) if device == "cuda" else torch.device(device))
    assert joined == [(group, {"timeout": timedelta(minutes=10), **named})]


@pytest.mark.parametrize(("ranks", "found"), [(1, "there is 1 rank"), (4, "there are 4 ranks")])
def test_replicas_divide_the_ranks(ranks: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError, match=f"parallel.replicas=3, and {found}; expected a divisor"):
        distributed.start("cpu", ParallelConfig(replicas=3))


def parameters(scale: float) -> list[nn.Parameter]:
    found = [
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(1)),
    ]
    found[0].grad, found[1].grad = torch.full((3,), 2.0) * scale, torch.full((2, 2), 1.0) * scale
    return found


def test_the_norm_is_of_all_gradients_and_bounds_them() -> None:
    some = parameters(1.0)
    assert distributed.clip_gradients(some, None) == pytest.approx(4.0)
    assert some[0].grad is not None
    assert some[0].grad.tolist() == [2.0] * 3
    assert distributed.clip_gradients(some, 8.0) == pytest.approx(4.0)
    assert some[0].grad.tolist() == [2.0] * 3
    assert distributed.clip_gradients(some, 1.0) == pytest.approx(4.0), "the norm before clipping"
    assert some[0].grad.tolist() == pytest.approx([0.5] * 3, rel=1e-5)


def test_gradients_that_are_not_finite_are_left_as_they_are() -> None:
    some = parameters(torch.inf)
    assert distributed.clip_gradients(some, 1.0) == torch.inf
    assert some[1].grad is not None
    assert torch.isinf(some[1].grad).all()


def test_a_gradient_that_no_rank_has_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in its place would decay weights and moments that one process leaves alone."""
    flats: list[torch.Tensor] = []

    def all_reduce(flat: torch.Tensor, group: None) -> None:
        flats.append(flat.clone())
        flat += sum(flats[:-1])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    of_ranks = []
    for rank, has_gradient in ((1, (True, True, False, False)), (0, (True, False, True, False))):
        some = [nn.Parameter(torch.zeros(2)) for _ in has_gradient]
        some[1].grad = torch.ones(2)  # of an earlier block
        with distributed.summing_gradients(some, Ranks(rank, 2, torch.device("cpu"))):
            for parameter, is_given in zip(some, has_gradient, strict=True):
                if is_given:
                    parameter.grad = torch.full((2,), 3.0 + rank)
        of_ranks.append([None if p.grad is None else p.grad.tolist() for p in some])
    assert of_ranks[1] == [[7.0, 7.0], [5.0, 5.0], [3.0, 3.0], None]


def test_without_ranks_met_rank_zero_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert distributed.is_first_to_fail(2, "why")
    monkeypatch.setenv("RANK", "1")
    assert not distributed.is_first_to_fail(2, "why")


def test_the_first_ranks_error_is_raised_on_every_rank() -> None:
    class Two(Ranks):
        def gather(self, value: object) -> list[object]:
            return [ConfigError("of the first"), value]

        def from_writer(self, value: object) -> object:  # type: ignore[override]
            return self.gather(value)[0]

    def fail() -> int:
        raise ConfigError("of the second")

    two = Two(1, 2, torch.device("cpu"))
    for act in (fail, lambda: 1):
        with pytest.raises(ConfigError, match="of the first"):
            two.run_everywhere(act)
        with pytest.raises(ConfigError, match="of the first"):
            two.run_on_writer(act)
    assert ONE.run_everywhere(lambda: 1) == [ONE.run_on_writer(lambda: 1)] == [1]
    with pytest.raises(ConfigError, match="of the second"):
        ONE.run_on_writer(fail)


RUNS = """
from torch import nn
from taut.errors import OutputError
from taut.train import distributed

ranks = distributed.start("cpu")

def fail_on(rank):
    if ranks.rank == rank:
        raise OutputError(f"no room for {ranks.rank}")
    return ranks.rank

def fail_with(whole):
    raise OutputError(f"no {' '.join(name for name, _ in whole({'bias'}))} here")

for act in (
    lambda: ranks.run_everywhere(lambda: 10 * ranks.rank),
    lambda: ranks.run_on_writer(lambda: ranks.rank),
    lambda: distributed.run_with_whole_tensors(
        nn.Linear(1, 1), ranks, lambda whole: [name for name, _ in whole({"weight"})]
    ),
    lambda: ranks.run_everywhere(lambda: fail_on(1)),
    lambda: ranks.run_on_writer(lambda: fail_on(0)),
    lambda: distributed.run_with_whole_tensors(nn.Linear(1, 1), ranks, fail_with),
):
    try:
        print(act())
    except OutputError as error:
        print(f"{error} ({'; '.join(error.__notes__)})")
distributed.stop(ranks)
"""


def test_two_processes_have_all_results_and_raise_one_error(tmp_path: Path) -> None:
    """An act that fails on one rank, or is run on the writer alone, ends alike on both: neither waits for the other."""
    (tmp_path / "program.py").write_text(RUNS)
    done = run(tmp_path / "program.py", num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == 2 * [
        "[0, 10]",
        "0",
        "['weight']",
        "no room for 1 (the error of rank 1, raised on all 2 ranks)",
        "no room for 0 (the error of rank 0, raised on all 2 ranks)",
        "no bias here (the error of rank 0, raised on all 2 ranks)",
    ]
