"""Which model is the best so far, and what is written of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from taut.errors import ConfigError, OutputError
from taut.evals.training_evals import Best, drop_after, require_same_measure
from taut.train.distributed import Ranks
from taut.train.trainer import Trainer


def make(directory: Path, metric: str = "exact_match", stop_after: int = 0) -> Best:
    """A keeper whose models are empty directories."""

    def save(folder: Path, finish: Callable[[Path], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        finish(folder)

    told: list[dict[str, Any]] = []
    ranks = Ranks(0, 1, torch.device("cpu"))
    trainer = SimpleNamespace(
        ranks=ranks, emit=lambda kind, **fields: told.append(fields), told=told
    )
    return Best(metric, "m", directory, save, cast(Trainer, trainer), stop_after=stop_after)


def steps_kept(best: Best, values: list[float]) -> list[int]:
    for step, value in enumerate(values, 1):
        best.consider(step, {best.metric: value, "other": 0.0})
    return [fields["step"] for fields in cast(Any, best.trainer).told if fields["name"] != "best"]


@pytest.mark.parametrize(
    ("metric", "values", "kept"),
    [
        ("exact_match", [0.0, 0.5, 0.5, 0.4, 0.6], [1, 2, 5]),
        ("loss", [2.0, 1.0, 1.0, 1.5, math.nan, 0.5], [1, 2, 6]),
        ("stopped", [math.nan, 0.1, math.nan, 0.2], [2, 4]),
    ],
)
def test_the_best_is_the_first_of_the_largest_or_of_the_smallest_loss(
    metric: str, values: list[float], kept: list[int], tmp_path: Path
) -> None:
    best = make(tmp_path / "best", metric)
    assert steps_kept(best, values) == kept
    note = json.loads((tmp_path / "best" / "best.json").read_text())
    assert (note["step"], note["value"]) == (kept[-1], values[kept[-1] - 1])
    require_same_measure(tmp_path / "best", metric, "m")


@pytest.mark.parametrize("metrics", [{"brief": 1.0}, {"brief_pass_2": math.nan}])
def test_an_evaluation_without_a_value_is_told_and_keeps_nothing(
    metrics: dict[str, float], tmp_path: Path
) -> None:
    best = make(tmp_path / "best", "brief_pass_2")
    best.consider(1, metrics)
    assert not (tmp_path / "best").exists()
    (told,) = cast(Any, best.trainer).told
    assert told["detail"].startswith("eval.best: brief_pass_2 has no value at this step")


def test_a_resumed_run_keeps_what_was_better(tmp_path: Path) -> None:
    first, again = make(tmp_path / "best"), make(tmp_path / "best")
    steps_kept(first, [0.5])
    again.recall(json.loads(json.dumps(first.remember())))
    assert again.step == 1
    again.consider(1, {"exact_match": 0.5})
    assert len(cast(Any, again.trainer).told) == 1, (
        "measured again where it was the best: told again"
    )
    for step, value in ((2, 0.4), (3, 0.5), (4, 0.7)):
        again.consider(step, {"exact_match": value})
    assert [fields["step"] for fields in cast(Any, again.trainer).told] == [1, 4]


@pytest.mark.parametrize(
    ("values", "stale"),
    [
        ([0.5, 0.5, 0.4], [0, 1, 2]),
        ([0.5, 0.4, 0.6, 0.1], [0, 1, 0, 1]),
        ([math.nan, math.nan, 0.1], [1, 2, 0]),
    ],
)
def test_evaluations_without_a_better_value_are_counted(
    values: list[float], stale: list[int], tmp_path: Path
) -> None:
    """Also by a run that is resumed after any of them, and measures that one again."""
    best, again = make(tmp_path / "one", stop_after=2), make(tmp_path / "one", stop_after=2)
    for step, (value, wanted) in enumerate(zip(values, stale, strict=True), 1):
        for one in (best, again):
            one.consider(step, {"exact_match": value})
            assert one.stale == wanted
            assert (one.why_over is not None) == (wanted == 2)
        again = make(tmp_path / "one", stop_after=2)
        again.recall(json.loads(json.dumps(best.remember())))
        again.consider(step, {"exact_match": value})
        assert (again.stale, again.why_over) == (wanted, best.why_over)


def test_what_was_measured_otherwise_is_not_recalled(tmp_path: Path) -> None:
    again = make(tmp_path / "best")
    again.recall({"metric": "exact_match", "measured": "another", "value": 0.5, "step": 3})
    assert (again.value, again.step) == (None, None)


def test_only_a_best_of_a_later_step_is_dropped(tmp_path: Path) -> None:
    steps_kept(make(tmp_path / "best"), [0.1, 0.5])
    drop_after(tmp_path / "best", 2)
    assert (tmp_path / "best").is_dir()
    drop_after(tmp_path / "best", 1)
    assert not (tmp_path / "best").exists()
    drop_after(tmp_path / "best", 1)


def test_values_of_another_measure_are_not_compared(tmp_path: Path) -> None:
    steps_kept(make(tmp_path), [0.5])
    with pytest.raises(
        ConfigError, match=r"by exact_match, and eval\.best=loss cannot be compared"
    ):
        require_same_measure(tmp_path, "loss", "m")
    with pytest.raises(ConfigError, match="by exact_match on other data or in another way"):
        require_same_measure(tmp_path, "exact_match", "another")
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(OutputError, match="cannot be read"):
        require_same_measure(tmp_path, "exact_match", "m")


def test_what_is_no_longer_there_is_not_the_best(tmp_path: Path) -> None:
    first, again = make(tmp_path / "best"), make(tmp_path / "best")
    steps_kept(first, [0.5])
    drop_after(tmp_path / "best", 0)
    again.recall(first.remember())
    assert (again.value, again.step) == (None, None)


def test_a_best_that_is_being_dropped_is_never_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise SystemExit

    steps_kept(make(tmp_path / "best"), [0.5])
    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(SystemExit):
        drop_after(tmp_path / "best", 0)
    assert not (tmp_path / "best").exists()
