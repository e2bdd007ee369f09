"""``taut plan``: what it says, how wide, and with which exit code."""

from __future__ import annotations

import io
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.helpers.chat_runs import chats, save_model, write_rows
from tests.helpers.online_runs import questions
from tests.helpers.tiny_models import tiny_config

from taut.commands import plan as command
from taut.commands.plan import Planned, memory, plan, show
from taut.commands.settings import Plan
from taut.config import from_mapping
from taut.errors import AttentionError, ConfigError, ModelError, TautError
from taut.io.console import warn_if_slow
from taut.models.precision import no_bf16
from taut.plan import tracing
from taut.plan.rates import GPUS, find_gpu


def config_of(model: Path, **keys: Any) -> Plan:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    return from_mapping(Plan, {"model": str(model), "device": "cpu", **dotted})


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory with a configuration and no weights."""
    tiny_config("qwen2", num_hidden_layers=1).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def plan_of(*words: str) -> Planned:
    """The plan that the command prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run", plan)
        found: Any = command.main(None, words)
    assert isinstance(found, Planned)
    return found


def text_of(config: Plan) -> str:
    return shown(plan(config), 100)


def shown(planned: Planned, width: int) -> str:
    out = io.StringIO()
    show(planned, Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("141 GB", 141 * 10**9), ("512mib", 2**29), ("1.5TB", 1.5e12)],
)
def test_amounts_of_memory(text: str, size: float) -> None:
    assert memory(text, "gpu_memory") == size


@pytest.mark.parametrize("text", ["80", "80G", "eighty", "-1GiB", "", "0GiB"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory=.*expected a number and a unit"):
        memory(text, "gpu_memory")


def test_no_gpus_and_unknown_gpus_are_refused(bare: Path) -> None:
    with pytest.raises(TautError, match="gpus"):
        config_of(bare, gpus=0)
    says = "gpu=H1000 is not in the table; did you mean H100 or H200?.*gpu_memory=24GiB"
    with pytest.raises(ConfigError, match=says):
        plan(config_of(bare, gpu="H1000"))


@pytest.mark.parametrize(
    ("name", "known", "gib"),
    [
        ("4090", "RTX4090", 24),
        ("RTX 3090", "RTX3090", 24),
        ("NVIDIA GeForce RTX 5090", "RTX5090", 32),
        ("rtx_a6000", "A6000", 48),
        ("pro 6000", "RTX-PRO-6000", 96),
        ("a10", "A10", 24),
        ("l40s", "L40S", 48),
        ("H200", "H200", 141),
        ("AMD Instinct MI300X", "MI300X", 192),
    ],
)
def test_a_part_of_a_name_is_enough(name: str, known: str, gib: int) -> None:
    assert (find_gpu(name), GPUS[find_gpu(name)].gib) == (known, gib)


@pytest.mark.parametrize(
    ("name", "near"),
    [("A100", ["A100-40GB", "A100-80GB"]), ("6000", ["A6000", "RTX6000-Ada", "RTX-PRO-6000"])],
)
def test_what_several_gpus_are_called_is_asked_back(name: str, near: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {' or '.join(near)}\\?") as refused:
        find_gpu(name)
    assert refused.value.code == "invalid-value"


@pytest.mark.parametrize("gpu", ["T4", "V100-16GB"])
def test_a_gpu_without_bf16_computes_in_float32(gpu: str, bare: Path) -> None:
    """As the run does there. bfloat16 is refused by both with one code, float16 where the keys are read."""
    keys: dict[str, Any] = {"gpu": gpu, "alternatives": False}
    planned = plan(config_of(bare, **keys))
    assert planned.machine.kernels.dtype == torch.float32
    assert planned.machine.memory == 16 * 2**30
    assert ("dtype", "float32") in [(one.name, one.value) for one in planned.decisions]
    with pytest.raises(ModelError, match="set dtype=float32") as refused:
        plan(config_of(bare, dtype="bfloat16", **keys))
    assert refused.value.code == no_bf16(gpu).code == "no-bf16"
    with pytest.raises(AttentionError, match="attention=varlen cannot run"):
        plan(config_of(bare, attention="varlen", **keys))
    with pytest.raises(ConfigError, match="float32 where the hardware has no bfloat16"):
        config_of(bare, dtype="float16", **keys)


def test_a_plan_needs_neither_weights_nor_data(bare: Path) -> None:
    text = text_of(config_of(bare, gpus=2, gpu="H100"))
    assert "fits: " in text
    assert "on 2 x H100 of 80.00 GiB, of which 72.00 may be used" in text
    assert "no data given" in text
    assert "optim.learning_rate: 2e-05, the default of taut sft where all weights train" in text
    assert "40% of its peak and 5 us an operator are assumed, not measured" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_asked_comes_first_and_each_way_has_its_keys(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And 80 columns are enough for all of it: no line is longer, no word and no number is cut. A plan that takes long
    says what it does.
    """
    monkeypatch.setattr(command, "warn_if_slow", partial(warn_if_slow, after=0.0))
    asked = {"activation_checkpointing": True, "lora__rank": 4}
    planned = plan(config_of(bare, gpu="L4", gpu_memory="1GiB", **asked))
    said = capsys.readouterr().err.splitlines()
    assert "taut: counting the bytes of all weights" in said
    assert "taut: counting the bytes of LoRA, rank 4, checkpointing" in said
    wide, narrow = shown(planned, 400), shown(planned, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted(narrow.split()) == sorted(wide.split())
    assert [(way.name, way.keys) for way in planned.ways] == [
        ("LoRA, rank 4, checkpointing", ()),
        ("all weights", ("lora.rank=0", "activation_checkpointing=false")),
        ("all weights, checkpointing", ("lora.rank=0",)),
        ("LoRA, rank 4", ("activation_checkpointing=false",)),
        ("LoRA, rank 4, nf4", ("quantize=nf4", "activation_checkpointing=false")),
        ("LoRA, rank 4, nf4, checkpointing", ("quantize=nf4",)),
    ]


@pytest.mark.slow
def test_exit_codes_and_the_budget_that_fits(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys: dict[str, Any] = {"headroom": 0.0, "checkpoint__every": 0, "measure": False}
    keys |= {"dtype": "float32", "data__max_length": 100, "batch__tokens_per_microbatch": 1000}
    whole = plan(config_of(bare, gpu_memory="1GiB", **keys))
    assert whole.fits
    half = f"{whole.ways[0].footprint.peak / 2e6}MB"
    assert command.run(config_of(bare, gpu_memory=half, **keys)) == 1
    found = re.search(
        r"does not fit: .*; set batch.tokens_per_microbatch=(\d+)", capsys.readouterr().out
    )
    assert found is not None
    keys["batch__tokens_per_microbatch"] = int(found[1])
    assert 100 <= int(found[1]) < 1000
    assert command.run(config_of(bare, gpu_memory=half, **keys)) == 0
    assert "fits: " in capsys.readouterr().out


def test_where_nothing_fits_it_says_so_and_a_rate_that_is_set_needs_no_explanation(
    bare: Path,
) -> None:
    text = text_of(config_of(bare, gpu="L4", gpu_memory="100KB", optim__learning_rate=1e-4))
    assert "nor does any way below" in text
    assert "learning_rate" not in text


def test_a_plan_of_data_on_this_processor_is_measured(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    train = write_rows(tmp_path / "train.jsonl", chats(10))
    keys: dict[str, Any] = {"data__train": str(train), "batch__samples_per_step": 6}
    found = plan(config_of(model, steps=5, data__max_length=200, **keys))
    seconds = found.ways[0].seconds
    assert seconds is not None
    assert 0 < seconds.total < 30
    assert "measured here" in seconds.source
    assert found.work.source == "the first 5 steps of 10 samples"
    assert found.ways[0].now.peak <= found.ways[0].footprint.peak


@pytest.mark.slow
def test_the_plan_of_another_method_is_of_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    rows = [{"prompt": "why?", "chosen": f" a cat {n}", "rejected": " a dog"} for n in range(6)]
    words = [
        f"model={model}",
        f"data.train={write_rows(tmp_path / 'pairs.jsonl', rows)}",
        "device=cpu",
        "gpus=2",
        "measure=false",
        "method=dpo",
        "dpo.beta=0.2",
    ]
    assert command.main(None, words) == 0
    assert "  reference " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="dpo"):
        command.main(None, [*words[:-2], "dpo.beta=0.2"])


LENGTH = 256
"""Tokens of the context of a tiny model."""


@pytest.mark.parametrize(
    ("method", "samples"),
    [("kto", 1), ("dpo", 2), ("reward", 2), ("grpo", 8), ("online_dpo", 2)],
)
def test_rows_of_other_methods_are_assumed_where_there_are_none(
    method: str, samples: int, bare: Path
) -> None:
    """No weights, no tokenizer, no data, and no rewards: what does not change memory is not asked for."""
    words = ("gpu=L4", "alternatives=false", "steps=1", "batch.samples_per_step=8")
    planned = plan_of(f"model={bare}", f"method={method}", *words)
    trees = planned.work.supply.trees
    assert planned.fits
    assert f"rows of {LENGTH} tokens are assumed" in planned.work.source
    assert (len(trees), {len(tree.samples) for tree in trees}) == (8, {samples})
    assert {sample.num_tokens for tree in trees for sample in tree.samples} == {LENGTH}


@pytest.mark.parametrize(("method", "samples"), [("dpo", 12), ("grpo", 6)])
def test_a_plan_of_data_needs_no_weights(method: str, samples: int, tmp_path: Path) -> None:
    """And reads no data where there is no tokenizer, which it says."""
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    (model / "model.safetensors").unlink()
    rows = [{"prompt": "why?", "chosen": f" a cat {n}", "rejected": " a dog"} for n in range(6)]
    data = write_rows(tmp_path / "rows.jsonl", rows if method == "dpo" else questions(6))
    words = [f"data.train={data}", f"method={method}", "gpu=L4", "alternatives=false", "steps=2"]
    planned = plan_of(f"model={model}", *words)
    assert planned.fits
    assert planned.work.source.startswith(f"the first 2 steps of {samples} samples")
    for file in model.iterdir():
        if file.name != "config.json":
            file.unlink()
    planned = plan_of(f"model={model}", *words)
    assert planned.fits
    assert "no tokenizer, so data.train is not read" in planned.work.source


def test_recomputation_is_decided_by_what_fits_and_a_set_value_is_in_force(bare: Path) -> None:
    keys: dict[str, Any] = {"gpu": "L4", "headroom": 0.0, "checkpoint__every": 0}
    kept, again = (
        plan(config_of(bare, activation_checkpointing=how, alternatives=False, **keys))
        for how in (False, True)
    )
    assert kept.ways[0].footprint.step > again.ways[0].footprint.step
    for size, how in ((0, True), (1, False)):
        memory = f"{(kept.ways[0].footprint.step - 1 + size) / 1e3}KB"
        planned = plan(config_of(bare, gpu_memory=memory, **keys))
        assert ("activation_checkpointing", str(how).lower()) in [
            (one.name, one.value) for one in planned.decisions
        ]
        same = again if how else kept
        assert planned.fits
        assert planned.ways[0].footprint == same.ways[0].footprint
        assert planned.ways[0].keys == ()
        forced = plan(config_of(bare, gpu_memory=memory, activation_checkpointing=not how, **keys))
        assert forced.ways[0].footprint == (kept if how else again).ways[0].footprint
        assert forced.fits != how


def test_every_setting_is_tried_before_more_gpus_are_advised(bare: Path) -> None:
    """A sample that fits with checkpointing alone, of a run that has it off and asks for no alternatives."""
    keys: dict[str, Any] = {"gpu": "L4", "headroom": 0.0, "checkpoint__every": 0}
    keys |= {"batch__tokens_per_microbatch": LENGTH, "alternatives": False}
    kept, again = (
        plan(config_of(bare, activation_checkpointing=how, **keys)).ways[0].footprint.peak
        for how in (False, True)
    )
    assert again < kept
    small = plan(
        config_of(bare, gpu_memory=f"{again / 1e3}KB", activation_checkpointing=False, **keys)
    )
    (way,) = small.ways
    assert (small.fits, way.most_tokens) == (False, 0)
    text = shown(small, 400)
    assert "activation_checkpointing=true" in text and "fits" in small.advice
    assert "any way below" not in text and "take larger" not in text


def test_a_second_plan_traces_nothing_and_says_the_same(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it changes that no trace depends on: the card, if it has as much memory, the learning rate."""
    keys: dict[str, Any] = {"gpu": "L4", "lora__rank": 2}
    first = plan(config_of(bare, **keys))
    trace, count = tracing._history, list[int]()

    def counted(*given: Any, **keywords: Any) -> Any:
        count.append(1)
        return trace(*given, **keywords)

    monkeypatch.setattr(tracing, "_history", counted)
    second = plan(config_of(bare, **keys))
    other = plan(config_of(bare, **{**keys, "gpu": "RTX4090"}, optim__learning_rate=1e-3))
    assert first.ways == second.ways
    assert [way.footprint for way in other.ways] == [way.footprint for way in first.ways]
    assert not count
    # a file that is damaged is as none, and another rank another trace
    for file in (Path(os.environ["TAUT_CACHE"]) / "traces").iterdir():
        file.write_text("{")
    assert plan(config_of(bare, **keys)).ways == first.ways
    again = len(count)
    assert again > 0
    plan(config_of(bare, gpu="L4", lora__rank=3))
    assert len(count) > again
