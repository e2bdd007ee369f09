"""Weights & Biases curves. Needs the extra ``taut[wandb]``; LogConfig checks that it is installed.

Each start of a run, including a resume, is a separate W&B run; those of one ``out`` share a group.
"""

from __future__ import annotations

from pathlib import Path

import wandb

from taut.train.log.events import Event, ReportLost, scalars, to_json


class WeightsAndBiases:
    """A sink that reports to a project."""

    def __init__(self, project: str, out: Path) -> None:
        self._run = wandb.init(project=project, name=out.name, group=out.name, dir=str(out))

    def __call__(self, event: Event) -> None:
        try:
            if event["kind"] == "start":
                self._run.config.update(to_json(event))
            values = scalars(event)
            if values:
                self._run.log(values, step=event["step"])
        except (wandb.Error, OSError) as error:  # its service process, or the network
            raise ReportLost(f"Weights & Biases takes no more: {error}") from error

    def close(self) -> None:
        self._run.finish()
