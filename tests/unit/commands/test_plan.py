"""``taut plan``: what it says, how wide, and with which exit code."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.helpers.chat_runs import chats, save_model, write_rows
from tests.helpers.tiny_models import tiny_config

from taut.commands import plan as command
from taut.commands.plan import Planned, memory, plan, show
from taut.commands.settings import Plan
from taut.config import from_mapping
from taut.errors import ConfigError, TautError
from taut.io.console import warn_if_slow


def config_of(model: Path, **keys: Any) -> Plan:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    return from_mapping(Plan, {"model": str(model), "device": "cpu", **dotted})


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory with a configuration and no weights."""
    tiny_config("qwen2", num_hidden_layers=1).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


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
    with pytest.raises(ConfigError, match="gpu=H1000 is not in the table; expected one of A100"):
        plan(config_of(bare, gpu="H1000"))


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


def test_what_rows_have_in_common_is_not_guessed(bare: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data.train is not set: what the rows of taut kto share"
    ):
        command.main(None, [f"model={bare}", "method=kto"])
