"""A run's events read as they are written are those that ``read_events`` gives, wherever reading was interrupted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.page_runs import lines, resume, start, step, warning, write_run

from taut.errors import DataError
from taut.train.log.events import read_events, scalars
from taut_tools.page.curves import bucketed
from taut_tools.page.history import Column, History
from taut_tools.page.tail import EventTail


def evaluated(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "eval", "time": 100.0, "step": number, "loss": 1.0 / number, **fields}


LONG = [
    start(),
    *(step(n) for n in range(1, 6)),
    evaluated(4),
    {"kind": "utilization", "time": 1.0, "step": 5, "cpu": 0.5},
    warning(5),
    {"kind": "best", "time": 1.0, "step": 4, "name": "loss", "value": 0.25},
    evaluated(5),
    start(),
    resume(4, is_measured=False),
    {"kind": "utilization", "time": 1.0, "step": 4, "cpu": 0.25},
    *(step(n, loss=-n) for n in range(5, 8)),
    evaluated(4, loss=9.0),
    start(),
    resume(6),
    *(step(n, loss=float("nan")) for n in range(7, 10)),
    {"kind": "end", "time": 300.0, "outcome": "finished", "step": 9},
]


def require_as_read_whole(history: History) -> None:
    """What was kept is what a reader of the whole file finds."""
    events = read_events(history.out / "events.jsonl")
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, value in scalars(event).items():
            found.setdefault(name, []).append((event["step"], value))
    kept = {
        name: list(zip(column.steps.tolist(), column.values.tolist(), strict=True))
        for name in history.curves
        if (column := history.column(name)).steps.size
    }
    assert str(kept) == str({name: found[name] for name in kept})  # NaN is itself
    assert kept.keys() == found.keys()
    for kind, of_kind in history.kept.items():
        assert of_kind == [event for event in events if event["kind"] == kind], kind
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert history.last_step == max(steps, default=0)
    for number in steps:
        event = history.step_event(number)
        assert event is not None and event["step"] == number


@pytest.mark.parametrize("seed", range(6))
def test_reading_in_pieces_is_reading_at_once(tmp_path: Path, seed: int) -> None:
    out = write_run(tmp_path / "a", [])
    text, draw = lines(LONG).encode(), random.Random(seed)
    cuts = sorted(draw.randrange(len(text)) for _ in range(8))
    history = History(out)
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        with (out / "events.jsonl").open("ab") as file:
            file.write(text[begin:end])  # torn lines, too
        history.update()
        require_as_read_whole(history)
    assert history.end is not None and history.last_step == 9


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    out = write_run(tmp_path / "a", LONG)
    history = History(out)
    history.update()
    (out / "events.jsonl").unlink()
    (out / "events.jsonl").write_text(lines([start(), step(1)]))
    history.update()
    require_as_read_whole(history)
    assert history.last_step == 1 and history.end is None
    assert history.step_event(5) is None


def test_a_line_of_another_version_is_named(tmp_path: Path) -> None:
    out = write_run(tmp_path / "a", [start(), {"kind": "telepathy", "step": 1}])
    with pytest.raises(DataError, match=r"events\.jsonl:2; expected a JSON object with 'kind'"):
        History(out).update()


def column(values: dict[int, float]) -> Column:
    return Column(np.array([*values], np.int64), np.array([*values.values()], np.float64))


def test_buckets_have_the_mean_and_the_extremes_of_their_steps() -> None:
    draw = np.random.default_rng(0)
    steps = np.unique(draw.integers(1, 100_000, 5_000))
    values = draw.normal(size=steps.size)
    found = bucketed({"a": column(dict(zip(steps.tolist(), values.tolist(), strict=True)))}, 100)
    ends = found["step"]
    assert 90 <= len(ends) <= 100 and ends[-1] == steps[-1]
    for index, end in enumerate(ends):
        begin = ends[index - 1] if index else 0
        inside = values[(steps > begin) & (steps <= end)]
        series = {name: found["series"]["a"][name][index] for name in ("mean", "min", "max")}
        assert series["mean"] == pytest.approx(inside.mean(), rel=1e-8)
        assert (series["min"], series["max"]) == pytest.approx((inside.min(), inside.max()))


def test_a_short_curve_is_whole_and_a_missing_value_is_a_gap() -> None:
    nan, inf = float("nan"), float("inf")
    loss = column({1: 1.00000001, 2: nan, 3: inf})
    found = bucketed({"loss": loss, "eval": column({2: 0.5}), "none": column({})}, 10)
    assert found == {
        "step": [1, 2, 3],
        "series": {
            "loss": {"mean": [1.00000001, "nan", "inf"]},
            "eval": {"mean": [None, 0.5, None]},
            "none": {"mean": [None, None, None]},
        },
    }
    resumed = column({1: 1.0, 3: 3.0, 2: 2.0})
    assert bucketed({"a": resumed}, 9)["series"]["a"]["mean"] == [1.0, 2.0, 3.0]
    together = bucketed({"loss": loss}, 1)["series"]["loss"]
    assert together == {"mean": ["nan"], "min": [1.00000001], "max": ["inf"]}
    assert bucketed({"loss": loss}, 10, 2, 2)["step"] == [2]
    assert bucketed({}, 10) == {"step": [], "series": {}}
    json.dumps(found, allow_nan=False)


def test_long_lists_are_skipped_and_nothing_else_is(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "events.jsonl"
    signs = ['"', "]", "\\", "[", "a", ", ", "ids", '"ids": [', "sample_ids", "{", "}", '"]']

    def text() -> str:
        return "".join(draw.choices(signs, k=draw.randint(0, 6)))

    events = [
        {
            "kind": draw.choice(["step", "rollout", "warning"]),
            "step": 1,
            "sample_ids": [text() for _ in range(draw.randint(1, 3))],
            text(): text(),
            "samples": [{"text": text(), "ids": [1, 2], "logp": [0.5]}],
            "last": 2.5,
        }
        for _ in range(3000)
    ]
    path.write_text(lines(events))
    found = [event for _, event in EventTail(path).read()]
    num_short = 0
    for short, whole in zip(found, events, strict=True):
        assert (
            short.keys() == whole.keys()
            and short["samples"][0]["text"] == whole["samples"][0]["text"]
        )
        differ = {name for name in whole if short[name] != whole[name]}
        assert differ <= (set() if whole["kind"] == "warning" else {"sample_ids", "samples"})
        num_short += short["sample_ids"] == []
    assert num_short > 1500
