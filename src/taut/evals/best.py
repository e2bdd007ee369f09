"""The best model so far, by one metric, in ``out/best``: a model directory like ``model/``, with ``best.json``.

    {"step": 40, "metric": "exact_match", "value": 0.61, "measured": "..."}

``measured`` is the fingerprint of what the metric is measured on and how. A resumed run goes on from what ``best.json``
says; where that was measured otherwise, values cannot be compared and the run is refused. Of equal values the earlier
stays. The directory takes its place whole, so a killed run leaves the best before or the best after.

Does not measure and does not know models: ``save`` writes one. May import errors and loop; api imports it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut.errors import ConfigError, OutputError
from taut.loop import Job

BEST = "best"
"""The folder in ``out``."""
FILE = "best.json"

SMALLER_IS_BETTER = ("loss",)
"""Metrics of which the smallest value is the best; of all others it is the largest."""

Save = Callable[[Path, Callable[[Path], None]], None]
"""``save(directory, finish)``: every rank calls it; ``finish`` completes the directory before it takes its place."""


@dataclass
class Best:
    """Keeps the model whose ``metric`` is the best so far."""

    metric: str
    measured: str
    directory: Path
    save: Save
    job: Job
    value: float | None = None
    """The best value so far."""

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the model of ``step`` if it is better than all before; every rank calls this.

        A metric without a value that may be trusted (nothing scored, too many errors, NaN) is told; nothing is saved.
        """
        value = self.job.ranks.gather(metrics.get(self.metric))[0]
        if value is None or math.isnan(value):
            detail = f"eval.best: {self.metric} has no value at this step; nothing is kept of it"
            self.job.emit("warning", step=step, name="best", detail=detail)
            return
        if not self._is_better(value):
            return
        note = {
            "step": step,
            "metric": self.metric,
            "value": value,
            "measured": self.measured,
        }
        self.save(
            self.directory,
            lambda folder: _write(folder / FILE, note),
        )
        self.value = value
        self.job.emit("best", step=step, name=self.metric, value=value, path=str(self.directory))

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.metric in SMALLER_IS_BETTER else value > self.value


def read_best(directory: Path, metric: str, measured: str) -> float | None:
    """The value a run left in ``directory``; None where it left none. Raises ConfigError for one of another measure."""
    note = _read(directory / FILE)
    if note is None:
        return None
    if note["metric"] != metric or note["measured"] != measured:
        found = (
            f"{note['metric']}"
            if note["metric"] != metric
            else f"{metric} on other data or in another way"
        )
        raise ConfigError(
            f"{directory} is the best model by {found}, and eval.best={metric} cannot be compared with it; "
            f"expected the same evaluation as before the resume; set it back, or remove {directory}"
        )
    return float(note["value"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{path} cannot be read: {error}; expected what a run wrote; remove {path.parent}"
        ) from error
    assert isinstance(note, dict)
    return note


def _write(path: Path, note: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(note) + "\n", encoding="utf-8")
