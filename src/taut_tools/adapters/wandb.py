"""Weights & Biases: curves, tables of samples, the configuration. Needs the extra ``wandb``; LogConfig checks it.

One ``out`` is one W&B run, however often it is resumed: its id is kept in ``out``, and ``resume="allow"`` makes the run
where it is not there yet, as after a kill before the first upload or in offline mode, where ``"must"`` would fail.

Steps are a metric of their own, ``step``, which all curves have as their axis. W&B's internal step only grows, and
takes no value of a step that lies behind it: those that a resumed run repeats would be lost. ``fork_from`` makes
another run, and ``resume_from`` (rewind) needs a server that offers it; neither works offline. So a step that is
repeated has two points in W&B, which are equal where the resumed run is the same run; events.jsonl has each step once.

What W&B finds out by itself (the command line, the git remote, what is printed) is switched off: it would be sent
without its secrets hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from taut.errors import OutputError
from taut.train.log.events import Event, ReportLost, scalars, to_json
from taut.train.log.samples import COLUMNS, ShownSample


class WeightsAndBiases:
    """A sink that reports to a project."""

    def __init__(self, project: str, out: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        try:
            self._run = wandb.init(
                project=project,
                name=out.name,
                id=run_id,
                resume="allow",
                dir=str(out),
                config=dict(settings),
                settings=wandb.Settings(console="off", disable_git=True, x_disable_meta=True),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise OutputError(
                f"log.wandb={project}: {reason}; expected a project that may be written; run 'wandb login', set "
                "WANDB_MODE=offline, or leave log.wandb out"
            ) from error

    def __call__(self, event: Event) -> None:
        if event["kind"] == "start":
            start = {"start": to_json(event)}
            self._send(lambda: self._run.config.update(start, allow_val_change=True))
        values = scalars(event)
        if values:
            self._send(lambda: self._run.log({"step": event["step"], **values}))

    def samples(self, step: int, rows: list[ShownSample]) -> None:
        """A table, at the step."""

        def send() -> None:
            table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
            self._run.log({"step": step, "samples": table})

        self._send(send)

    def _send(self, call: Any) -> None:
        try:
            call()
        except (wandb.Error, OSError) as error:  # its service process, or the network
            raise ReportLost(f"Weights & Biases takes no more: {error}") from error

    def close(self) -> None:
        self._run.finish()
