"""A run with a learning rate that is far too high is stopped and saves no model; an honest twin finishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import online_runs as online
from tests.helpers.chat_runs import chats, column, events, save_model, sft, words_of, write_rows

import taut
from taut import cli
from taut.run import setup

LAST_GOOD = 5
"""The step whose update is the last one with a sound learning rate, where ``spoil`` is used."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that begins at a uniform distribution, and chats."""
    place = tmp_path_factory.mktemp("divergence")
    save_model(place / "model", "qwen3", dtype=torch.float32, initializer_range=0.02)
    write_rows(place / "train.jsonl", chats(20))
    return place


def go(place: Path, out: Path, **keys: Any) -> taut.Result:
    given = {"steps": 30, "dtype": "float32", "check": "off", **keys}
    return sft(place / "model", place / "train.jsonl", out, **given)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``LAST_GOOD`` steps the learning rate is 10."""
    real = setup.learning_rate

    def rate(step: int, **settings: Any) -> float:
        return real(step, **settings) if step <= LAST_GOOD else 10.0

    monkeypatch.setattr(setup, "learning_rate", rate)


@pytest.mark.parametrize(
    ("rate", "sign"),
    [(10.0, "the loss was above"), (1e4, "the gradient was exactly zero in the last 5 steps")],
)
def test_a_rate_that_is_far_too_high_stops_the_run(
    rate: float, sign: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    keys = {
        "model": str(place / "model"),
        "data.train": str(place / "train.jsonl"),
        "out": str(out),
        "steps": 30,
        "device": "cpu",
        "dtype": "float32",
        "check": "off",
        "log.console": False,
        "optim.schedule": "constant",
        "batch.samples_per_step": 6,
        "optim.learning_rate": rate,
    }
    assert cli.main(["sft", *words_of(keys)]) == 1
    told = capsys.readouterr().err
    assert "training has diverged: " + sign in told
    assert "lower optim.learning_rate" in told
    assert "there is no checkpoint yet" in told
    assert [event["name"] for event in events(out, "warning")] == ["divergence"]
    (end,) = events(out, "end")
    assert (end["outcome"], end["reason"]) == (
        "stopped",
        told.strip().removeprefix("taut: error: "),
    )
    assert len(column(out, "loss")) < 15
    assert not (out / "model").exists()


def test_an_honest_run_is_left_alone(place: Path, tmp_path: Path) -> None:
    result = go(place, tmp_path / "out", optim__learning_rate=1e-2, checkpoint__every=10)
    assert not events(tmp_path / "out", "warning")
    assert (result.divergence, result.warning) == (None, None)
    assert result.loss < 0.7 * column(tmp_path / "out", "loss")[0]
    assert events(tmp_path / "out", "end")[0]["divergence"] is None


def test_the_last_good_checkpoint_is_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    with pytest.raises(taut.DivergenceError, match=r"the newest checkpoint is .*step-000005"):
        go(place, tmp_path / "out", checkpoint__every=1, checkpoint__keep=3)
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names[1:] == ["latest", "step-000004", "step-000005"]
    assert names[0].startswith("damaged-step-000006-"), "its loss was seen to be high at step 7"
    monkeypatch.undo()
    resumed = go(place, tmp_path / "out", checkpoint__every=1, checkpoint__keep=3, resume=True)
    assert resumed.steps == 30
    assert column(tmp_path / "out", "loss")[-1] < column(tmp_path / "out", "loss")[0]


def test_a_run_that_generates_does_not_save_what_diverged(tmp_path: Path) -> None:
    """Another failed check saves the last whole step of such a run, since engine or rewards may be at fault."""
    model = save_model(tmp_path / "policy", dtype=torch.float32)
    keys = online.keys_of("best_of_n", model, tmp_path / "data", steps=12, dtype="float32")
    keys |= {"optim.learning_rate": 10, "checkpoint.every": 1, "out": str(tmp_path / "out")}
    with pytest.raises(taut.DivergenceError, match="gradient was exactly zero in the last 5 steps"):
        online.train(keys)
    norms = column(tmp_path / "out", "grad_norm")
    names = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()]
    saved = [int(name[5:]) for name in names if name.startswith("step-")]
    assert max(saved, default=0) <= norms.index(0.0), "the steps without a gradient"


def test_the_end_says_that_the_loss_was_still_high(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch)
    result = go(place, tmp_path / "out", steps=11, log__console=True)
    assert result.divergence is not None
    assert "in 5 of the last 11 steps" in result.divergence
    assert result.warning == f"training may have diverged: {result.divergence}"
    assert events(tmp_path / "out", "end")[0]["divergence"] == result.divergence
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("divergence  may have diverged: the loss was") for line in shown)
