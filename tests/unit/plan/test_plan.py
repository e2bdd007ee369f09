"""What ``taut plan`` predicts is what tensors really take, to the byte; and what ranks and rates make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import tiny_config
from tests.helpers.tiny_trainers import make
from torch import Tensor
from transformers import PreTrainedConfig

from taut.config import from_mapping, load
from taut.data.packing import ALONE, pack
from taut.losses.supervised import CrossEntropy
from taut.methods.method import RunConfig
from taut.methods.sft import Sft
from taut.models import scorer
from taut.models.cpu import cpu_matmul
from taut.models.quantized import quantized_storage
from taut.models.scorer import LinearHead
from taut.models.settings import LoraConfig
from taut.plan import tracing
from taut.plan.allocations import PARTS, Allocations, History
from taut.plan.memory import footprint, measure, measured_parts, predict, predict_steps, stages
from taut.plan.models import FUSED, Kernels, Sizes
from taut.plan.rates import GPUS, REPEATS, Rates, Work, calibrate, from_data_sheet
from taut.plan.tracing import Traced, trace
from taut.plan.workload import without_data, workload
from taut.train.settings import CheckpointConfig, ParallelConfig
from taut.types import Packed, Sample

OFFLOADED = ParallelConfig(cpu_offload=True)

REFERENCE = Kernels(torch.float32, "taut_reference")


def packed_of(*lengths: int) -> Packed:
    samples = [
        Sample(f"s{i}", np.arange(n) % 90, np.arange(1, n), np.ones(n - 1))
        for i, n in enumerate(lengths)
    ]
    return pack(samples, ALONE)


def saved(config: PreTrainedConfig, place: Path, **keys: Any) -> RunConfig:
    config.save_pretrained(place)
    return from_mapping(RunConfig, {"model": str(place), "data.train": "x", **keys})


def test_a_ledger_knows_the_fullest_moment_and_what_was_alive() -> None:
    weight = torch.zeros(10)
    with Allocations({"weights": [weight]}, vocabulary=7) as allocations:
        kept = weight + 1
        view = kept[2:]
        lost = torch.zeros(100)
        logits = torch.zeros(3, 7)
        narrow = weight.to(torch.bfloat16)
        del lost
        allocations.end_forward()
        after = torch.zeros(5)
    assert view.data_ptr() == kept.data_ptr() + 8
    assert allocations.history().peak() == {
        "weights": 40,
        "critic": 0,
        "teacher": 0,
        "reference": 0,
        "rewards": 0,
        "gradients": 0,
        "optimizer": 0,
        "casts": 20,
        "activations": 40,
        "logits": logits.nbytes,
        "temporary": 400,
    }
    assert narrow.nbytes + after.nbytes == 40


def test_shares_move_the_fullest_moment() -> None:
    rows = np.zeros((3, len(PARTS)), dtype=np.int64)
    rows[1, PARTS.index("activations")] = 60
    rows[2, PARTS.index("gradients")] = 100
    history = History(rows, phases=(2,), operators=0)
    assert history.peak()["gradients"] == 100
    assert history.peak({"gradients": 0.5})["activations"] == 60


def test_a_history_without_what_is_never_a_peak_has_the_same_peaks() -> None:
    draw = np.random.default_rng(0)
    rows = draw.integers(0, 9, (500, len(PARTS)))
    whole = History(rows, phases=(120, 120, 300), operators=7, host=5)
    thin = whole.thinned()
    assert len(thin.bytes_MP) < len(rows)
    assert (thin.operators, thin.host, len(thin.phases)) == (7, 5, 3)
    for _ in range(50):
        shares = dict(zip(PARTS, draw.random(len(PARTS)), strict=True))
        assert thin.peaks(shares) == whole.peaks(shares)
    assert thin.peak() == whole.peak()


@pytest.mark.parametrize(
    ("architecture", "is_first", "keys"),
    [
        ("qwen2", True, {"dtype": "bfloat16"}),
        pytest.param("qwen2", False, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        ("gemma2", True, {"dtype": "float32", "activation_checkpointing": True}),
        ("llama", False, {"dtype": "bfloat16", "lora__rank": 4, "activation_checkpointing": True}),
        pytest.param("qwen3_moe", True, {"dtype": "float32"}, marks=pytest.mark.slow),
        ("qwen3_moe", False, {"dtype": "float32", "router__aux_loss_coef": 0.01}),
        ("qwen3_moe", True, {"dtype": "bfloat16", "lora__rank": 2}),
        pytest.param("lfm2", False, {"dtype": "float64", "lora__rank": 2}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3",
            True,
            {"dtype": "bfloat16", "activation_checkpointing": "selective"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_predicted_bytes_are_those_of_the_live_tensors(
    architecture: str, keys: dict[str, Any], is_first: bool, tmp_path: Path
) -> None:
    built, _ = make(tmp_path, architecture, **keys)
    inputs = built.inputs
    work = workload(built.run, inputs, 1)
    kernels = Kernels(built.models.loaded.dtype.dtype, built.models.loaded.attention.implementation)
    predicted = predict(built.run, inputs.config, kernels, work.largest, is_first=is_first)
    measured = measure(built, work.largest, is_first=is_first)
    true = measured_parts(built, work.largest, is_first=is_first)
    found = predicted.footprint.parts
    small = 8192 + sum(buffer.nbytes for buffer in built.scorer.buffers())
    for part in PARTS:
        assert abs(found[part] - true[part]) <= max(small, 0.02 * true[part]), part
    assert predicted.peak == pytest.approx(sum(true.values()), rel=0.02)
    assert predicted.peak == pytest.approx(measured.bytes, rel=0.08)
    assert measured.seconds > 0


def test_a_head_that_keeps_its_logits_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = make(tmp_path, "qwen2", dtype="float32")
    work = workload(built.run, built.inputs, 1)
    before = predict(built.run, built.inputs.config, REFERENCE, work.largest, is_first=True)
    forward, kept = LinearHead.forward, []

    def hoarding(ctx: Any, hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        kept.append(hidden @ weight.T)
        return forward(ctx, hidden, weight, *rest)

    monkeypatch.setattr(LinearHead, "forward", staticmethod(hoarding))
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "of patched code"))
    after = predict(built.run, built.inputs.config, REFERENCE, work.largest, is_first=True)
    grown = after.footprint.parts["logits"] - before.footprint.parts["logits"]
    vocabulary = built.inputs.config.vocab_size
    assert grown == work.largest.num_targets * vocabulary * 4


@pytest.mark.parametrize(
    ("keys", "is_first", "depth"),
    [
        ({}, True, 3),
        pytest.param({"activation_checkpointing": True}, True, 3, marks=pytest.mark.slow),
        ({"activation_checkpointing": "offload"}, True, 4),
        pytest.param({"lora.rank": 2}, False, 3, marks=pytest.mark.slow),
    ],
)
def test_a_few_layers_tell_of_many(
    keys: dict[str, Any],
    is_first: bool,
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config("llama", num_hidden_layers=7)
    run, packed = saved(config, tmp_path, **keys), packed_of(20, 9)
    few = trace(run, config, REFERENCE, packed, is_first=is_first)
    assert few.steps == (7 - depth,)
    monkeypatch.setattr(tracing, "depths_of", lambda *_: (7,))
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "of patched code"))
    every = trace(run, config, REFERENCE, packed, is_first=is_first)
    assert not every.steps
    for shares in ({}, {"weights": 0.1, "gradients": 0.1}):
        assert few.parts(shares) == every.parts(shares)


def test_a_plan_leaves_no_fake_tensors_behind(tmp_path: Path) -> None:
    config = tiny_config("llama")
    run = saved(config, tmp_path, **{"lora.rank": 2, "quantize": "nf4"})
    quantized_storage.nested_values.cache_clear()
    trace(run, config, REFERENCE._replace(dtype=torch.float32), packed_of(12), is_first=True)
    assert type(quantized_storage.nested_values(torch.device("cpu"))) is Tensor


def test_layers_that_do_not_come_round_alike_are_all_run(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 2
    config = tiny_config("gemma2", num_hidden_layers=7, layer_types=kinds)
    traced = trace(saved(config, tmp_path), config, REFERENCE, packed_of(12), is_first=True)
    assert not traced.steps


def test_attention_repeats_no_heads_here_nor_on_an_absent_gpu(tmp_path: Path) -> None:
    config = tiny_config("llama", num_attention_heads=4, num_key_value_heads=1)
    run, packed = saved(config, tmp_path), packed_of(32)
    here, there = (
        sum(
            trace(run, config, REFERENCE._replace(attention=name), packed, is_first=True)
            .parts()
            .values()
        )
        for name in ("taut_reference", FUSED)
    )
    repeated = (
        config.num_hidden_layers * 2 * 32 * config.hidden_size * 4
    )  # keys and values of each query head
    assert abs(there - here) < repeated / 8


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 2}], ids=str)
def test_a_gpu_has_more_logits_at_a_time(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("llama")
    run, row = saved(config, tmp_path, **keys), 4 * config.vocab_size
    monkeypatch.setattr(scorer, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(scorer, "CHUNK_ELEMENTS", 8 * config.vocab_size)
    found = {}
    for rows in (None, 24):
        kernels = REFERENCE._replace(gpu_memory=rows and scorer.CHUNK_SHARE * rows * row)
        peaks = trace(run, config, kernels, packed_of(97), is_first=True).histories[0].peaks()
        found[rows] = max(peak["logits"] for peak in peaks)
    assert found[24] - found[None] == (24 - 8) * row
    assert scorer.chunk_elements(torch.device("cpu"), torch.float32) == 8 * config.vocab_size


def test_rates_are_measured_on_the_layers_of_a_run_and_on_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, linear, rows = tiny_config("llama"), cpu_matmul.linear, list[int]()

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(x.shape[1])
        return linear(x, weight, bias)

    monkeypatch.setattr(cpu_matmul, "linear", counted)
    packed = packed_of(40, 24)
    rates = calibrate(saved(config, tmp_path), config, REFERENCE, packed, torch.device("cpu"))
    assert rates.per_flop > 0 and rates.per_parameter > 0
    steps = 1 + REPEATS
    assert rows == [packed.num_tokens] * (7 * config.num_hidden_layers * steps)


def traced(tmp_path: Path) -> tuple[Traced, RunConfig]:
    config = tiny_config("llama")
    run = saved(config, tmp_path)
    return trace(run, config, REFERENCE, packed_of(16), is_first=False), run


def test_ranks_divide_what_is_sharded_and_nothing_else(tmp_path: Path) -> None:
    one, _ = traced(tmp_path)
    alone, four = footprint(one, 1), footprint(one, 4)
    sizes = one.policy.weights
    gathered = min(sizes.rest + 3 * sizes.layer, sizes.all + sizes.layer)
    assert alone.parts["optimizer"] == 4 * four.parts["optimizer"] == 2 * one.policy.trained.all
    assert four.parts["weights"] == alone.parts["weights"] // 4 + gathered
    assert four.parts["activations"] == alone.parts["activations"]
    assert (
        four.loading
        == one.policy.weights.rest + (one.policy.weights.all - one.policy.weights.rest) // 4
    )
    assert alone.loading == one.policy.weights.all


def test_adapters_are_whole_on_every_rank(tmp_path: Path) -> None:
    config = tiny_config("llama")
    run = replace(saved(config, tmp_path), lora=LoraConfig(rank=4))
    one = trace(run, config, REFERENCE, packed_of(16), is_first=False)
    alone, four = footprint(one, 1), footprint(one, 4)
    adapters = one.policy.whole.trained
    assert adapters == one.policy.trained.all > 0
    assert four.parts["optimizer"] == alone.parts["optimizer"] == 2 * adapters
    base = alone.parts["weights"] - adapters
    layers = one.policy.gathered
    gathered = min(layers.rest + 3 * layers.layer, layers.all + layers.layer)
    assert four.parts["weights"] == pytest.approx(base / 4 + adapters + gathered, abs=8)  # buffers


def test_checkpoints_are_staged_where_there_are_some(tmp_path: Path) -> None:
    one, _ = traced(tmp_path)
    assert footprint(one, 2, stages=True).staging == 3 * one.policy.trained.all // 2
    assert footprint(one, 2).staging == 0
    assert (
        footprint(one, 1, stages=True, is_host=True).parts["staging"] == 3 * one.policy.trained.all
    )
    assert stages(CheckpointConfig(every=10), 20)
    assert not stages(CheckpointConfig(every=20), 20)
    assert not stages(CheckpointConfig(every=0), 20)
    assert not stages(CheckpointConfig(every=10, background=False), 20)


def test_seconds_follow_the_equation(tmp_path: Path) -> None:
    one, _ = traced(tmp_path)
    work = Work(tokens=100, pairs=0, window_pairs=0, targets=40)
    rates = Rates(per_flop=1e-9, per_microbatch=0.5, per_target=0.01, per_parameter=1e-6)
    seconds = rates.seconds(one, [work, work], recomputes=False)
    layers = 1e-9 * 100 * one.flops.per_token
    assert seconds.compute == pytest.approx(2 * (layers + 0.5 + 0.4))
    assert seconds.update == pytest.approx(1e-6 * one.policy.num_trained)
    again = rates.seconds(one, [work, work], recomputes=True)
    assert again.compute == pytest.approx(2 * (layers * 4 / 3 + 0.5 + 0.4))


def test_a_data_sheet_gives_seconds_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    one, _ = traced(tmp_path)
    one = replace(one, num_tokens=10**9)  # no activations
    work = Work(10**9, 0, 0, 1000)
    fast = from_data_sheet("H100", one, [work], 1, recomputes=False)
    slow = from_data_sheet("A100-80GB", one, [work], 1, recomputes=False)
    assert slow.compute / fast.compute == pytest.approx(
        GPUS["H100"].tflops / GPUS["A100-80GB"].tflops
    )
    assert fast.communication == 0
    assert "not measured" in fast.source
    both = from_data_sheet("H100", one, [work], 2, recomputes=False)
    assert both.communication == pytest.approx(1.5 * one.policy.weights.all / 450e9)
    assert replace(both, communication=9.0).total == pytest.approx(9.0 + both.update)


def test_offloaded_inputs_are_on_the_host_and_take_the_bus(tmp_path: Path) -> None:
    config = tiny_config("llama")
    run, packed = saved(config, tmp_path), packed_of(64)
    kept, gone = (
        trace(replace(run, activation_checkpointing=how), config, REFERENCE, packed, is_first=True)
        for how in (True, "offload")
    )
    inputs = 4 * 64 * config.hidden_size * config.num_hidden_layers  # float32
    assert (kept.offloaded, gone.offloaded) == (0, inputs)
    assert footprint(gone, 1).offloaded == inputs
    assert kept.parts()["activations"] - gone.parts()["activations"] >= inputs // 2
    seconds = from_data_sheet("L4", gone, [Work(6400, 0, 0, 0)], 1, recomputes=1)
    assert seconds.transfer == pytest.approx(2 * 100 * inputs / 32e9)
    assert seconds.total >= seconds.transfer


def test_offloaded_weights_are_on_the_host_and_take_the_bus(tmp_path: Path) -> None:
    """A step of two micro-batches fetches all weights twice for each, and brings back the gradients."""
    one, _ = traced(tmp_path)
    policy, layer = one.policy, one.policy.weights.layer
    offloaded = footprint(one, 1, OFFLOADED)
    whole = policy.weights.all + policy.trained.all + policy.optimizer
    assert offloaded.offloaded == whole
    assert offloaded.parts["optimizer"] == 0
    gathered = min(policy.weights.rest + 3 * layer, policy.weights.all + layer)
    assert offloaded.parts["weights"] == pytest.approx(gathered, abs=8)
    assert offloaded.loading == policy.weights.rest
    assert footprint(one, 2, OFFLOADED).offloaded == pytest.approx(whole / 2, abs=8)
    assert footprint(one, 1, OFFLOADED, stages=True).staging == 3 * policy.trained.all
    seconds = from_data_sheet("H100", one, [Work(1, 0, 0, 0)] * 2, 1, OFFLOADED, recomputes=0)
    assert seconds.transfer == pytest.approx(2 * 3 * policy.weights.all / 64e9)
    assert seconds.update == pytest.approx(28 * policy.num_trained / 50e9)


def test_a_small_micro_batch_takes_as_long_as_its_kernels_and_its_weights(tmp_path: Path) -> None:
    """An H100 moves 3,350 GB/s. A billion parameters, all trained: 10 bytes of each weight and 4 of each gradient are
    14 GB, 4.179 ms. A thousand operators of 5 us are 5 ms. Next to that the products of a token are nothing.
    """
    tiny, _ = traced(tmp_path)
    history = replace(tiny.histories[0], operators=1000)
    policy = replace(
        tiny.policy,
        num_parameters=10**9,
        num_trained=10**9,
        weights=Sizes(4 * 10**9, 0, 0),
        optimizer=8 * 10**9,
    )
    one = replace(tiny, histories=(history,), models=(policy,), passes=0, num_tokens=10**9)
    work = Work(1, 1, 1, 1)
    launched = from_data_sheet("H100", one, [work, work], 1, recomputes=False)
    assert launched.compute == pytest.approx(2 * 5e-3)
    assert launched.update == pytest.approx(28e9 / 3350e9)
    few = replace(one, histories=(replace(history, operators=800),))
    moved = from_data_sheet("H100", few, [work, work], 1, recomputes=False)
    assert moved.compute == pytest.approx(2 * 14e9 / 3350e9)
    policy, history = replace(policy, num_trained=0), replace(history, operators=1)
    frozen = replace(few, models=(policy,), histories=(history,))
    once = from_data_sheet("H100", frozen, [work], 1, recomputes=False)  # there is no backward
    assert once.compute == pytest.approx(8e9 / 3350e9)
    scored = replace(one, passes=3)  # three more forwards, each a third of forward and backward
    assert from_data_sheet("H100", scored, [work], 1, recomputes=False).compute == pytest.approx(
        2 * 5e-3
    )
    assert scored.head_flops == one.head_flops
    assert replace(one, head_passes=3).head_flops == pytest.approx(
        one.head_flops + one.flops.per_target, rel=1e-12
    )


def test_the_pass_that_counts_what_routers_choose_has_no_head(tmp_path: Path) -> None:
    words = ["model=m", "data.train=a"]
    run = load(Sft, None, [*words, "router.aux_loss_coef=0.01"])
    assert (run.extra_forwards(), run.extra_head_passes()) == (1, 0)
    plain = load(Sft, None, words)
    assert (plain.extra_forwards(), plain.extra_head_passes()) == (0, 0)


def test_operators_are_counted_views_are_not_and_layers_add_alike(tmp_path: Path) -> None:
    weight = torch.zeros(10)
    with Allocations({"weights": [weight]}) as allocations:
        made = weight + 1
        made[2:].view(2, 4).mul_(2.0)
        torch.zeros(3)
    assert allocations.history().operators == 3
    config = tiny_config("llama")
    config.num_hidden_layers = 12
    run = saved(config, tmp_path / "deep")
    deep = trace(run, config, REFERENCE, packed_of(20), is_first=True)
    assert deep.steps == (9,)
    config.num_hidden_layers = 4
    whole = trace(
        saved(config, tmp_path / "whole"), config, REFERENCE, packed_of(20), is_first=True
    )
    assert not whole.steps
    per_layer = (deep.operators - whole.operators) / 8
    assert deep.histories[1].operators - deep.histories[0].operators == per_layer
    assert 50 < per_layer < 500


def test_without_data_micro_batches_are_filled(tmp_path: Path) -> None:
    config = tiny_config("llama")
    run = saved(config, tmp_path, **{"batch.tokens_per_microbatch": 100, "data.max_length": 40})
    work = without_data(run, config, 2)
    assert work.largest.num_tokens == 100
    assert [len(step) for step in work.steps] == [6]  # 16 samples of 40 on each of two ranks
    assert "no data" in work.source
    found = predict_steps(run, config, REFERENCE, work)
    assert found.num_tokens == 100
    assert CrossEntropy().linear_weights(work.largest)["cross_entropy"].sum() == -97


def test_the_first_steps_are_the_runs_own(tmp_path: Path) -> None:
    built, _ = make(tmp_path, "qwen2", batch__tokens_per_microbatch=100, data__max_length=100)
    work = workload(built.run, built.inputs, 1)
    assert work.later is not None
    assert work.fullest.num_tokens == 100
    assert sum(w.tokens for w in work.steps[0]) <= sum(
        s.num_tokens for tree in built.trainer.source.prepare(1) for s in tree.samples
    )
