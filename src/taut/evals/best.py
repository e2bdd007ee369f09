"""The best model so far, by one metric, in ``out/best``: a model directory like ``model/``, with ``best.json``.

    {"step": 40, "metric": "exact_match", "value": 0.61, "measured": "..."}

``measured`` is the fingerprint of what the metric is measured on and how; where a resumed run measures otherwise,
values cannot be compared and it is refused. A resumed run knows the best value up to its checkpoint; a later model
that is in the directory is found again at its step. Of equal values the earlier stays. The directory takes its place
whole, so a killed run leaves the best before or the best after.

Does not measure and does not know models: ``save`` writes one. May import durable, errors and loop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pydantic
from typing_extensions import TypedDict

from taut import durable
from taut.errors import ConfigError, OutputError
from taut.explain import first_problem
from taut.loop import Job

FILE = "best.json"

SMALLER_IS_BETTER = ("loss",)
"""Metrics of which the smallest value is the best; of all others it is the largest."""

Save = Callable[[Path, Callable[[Path], None]], None]
"""``save(directory, finish)``: every rank calls it; ``finish`` completes the directory before it takes its place."""


class BestState(TypedDict):
    """What Best remembers."""

    measured: str
    metric: str
    value: float | None
    step: int | None


class Note(TypedDict):
    """``best.json``."""

    measured: str
    metric: str
    value: float
    step: int


@dataclass
class Best:
    """Keeps the model whose ``metric`` is the best so far."""

    remembered: ClassVar[Any] = BestState
    metric: str
    measured: str
    directory: Path
    save: Save
    job: Job
    value: float | None = None
    """The best value so far."""
    step: int | None = None
    """Where it was measured."""

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the model of ``step`` if it is better than all before; every rank calls this.

        A metric without a value that may be trusted (nothing scored, too many errors, NaN) is told; nothing is saved.
        """
        value = self.job.ranks.gather(metrics.get(self.metric))[0]
        if value is None or math.isnan(value):
            detail = f"eval.best: {self.metric} has no value at this step; nothing is kept of it"
            self.job.emit("warning", step=step, name="best", detail=detail)
            return
        if not (
            step == self.step or self._is_better(value)
        ):  # a resumed run may measure a step again
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
        self.value, self.step = value, step
        self.job.emit("best", step=step, name=self.metric, value=value, path=str(self.directory))

    def remember(self) -> dict[str, Any]:
        return {
            "measured": self.measured,
            "metric": self.metric,
            "value": self.value,
            "step": self.step,
        }

    def recall(self, remembered: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off, unless something else was measured then or the model is gone."""
        is_same = (remembered["metric"], remembered["measured"]) == (self.metric, self.measured)
        if self.job.ranks.gather(is_same and (self.directory / FILE).is_file())[0]:
            self.value, self.step = remembered["value"], remembered["step"]

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.metric in SMALLER_IS_BETTER else value > self.value


def require_same_measure(directory: Path, metric: str, measured: str) -> None:
    """Raise ConfigError where a run left a best model by another metric, or measured otherwise, in ``directory``."""
    note = _read(directory / FILE)
    if note is None or (note["metric"], note["measured"]) == (metric, measured):
        return
    is_same = note["metric"] == metric
    found = f"{metric} on other data or in another way" if is_same else f"{note['metric']}"
    raise ConfigError(
        f"{directory} is the best model by {found}, and eval.best={metric} cannot be compared with it; "
        f"expected the same evaluation as before the resume; set it back, or remove {directory}"
    )


def drop_after(directory: Path, step: int) -> None:
    """Remove a best model of a later step: for a run whose later steps will be others."""
    note = _read(directory / FILE)
    if note is not None and note["step"] > step:
        durable.remove_directory(directory)


def _read(path: Path) -> Note | None:
    try:
        note = pydantic.TypeAdapter(Note).validate_python(durable.read_json(path), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error)
        raise OutputError(
            f"{path} cannot be read: {reason}; expected what a run wrote; remove {path.parent}"
        ) from error
    return note


def _write(path: Path, note: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(note) + "\n", encoding="utf-8")
