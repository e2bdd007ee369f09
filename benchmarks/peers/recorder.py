"""What a peer's trainer did, step by step: seconds (clock and processor), loss, and which rows were in it.

Watches ``transformers.Trainer`` from outside (a callback, and a wrapper around ``training_step``),
so the peer's own code runs unchanged. The rows of a step are read back from the ids that the model
was given, so packing in any order is accounted for. Imported by the workers beside it; imports
nothing of taut.
"""

from __future__ import annotations

import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback

Job = dict[str, Any]


def read_rows(job: Job) -> list[dict[str, Any]]:
    lines = Path(job["data"], "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Recorder(TrainerCallback):
    """One per run. ``import_mb`` is the memory that the libraries alone take."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.import_mb = peak_mb()
        self.peak_mb = 0.0
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        self.losses: list[Tensor] = []
        self.batches: list[list[Tensor]] = []
        self.open_loss: Tensor | None = None
        self.open_batches: list[Tensor] = []
        self._wrap_training_step()

    def _wrap_training_step(self) -> None:
        original = Trainer.training_step
        recorder = self

        def training_step(
            trainer: Trainer, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Tensor:
            recorder.open_batches.append(inputs["input_ids"].clone())
            loss = original(trainer, model, inputs, *args, **kwargs)
            recorder.open_loss = loss if recorder.open_loss is None else recorder.open_loss + loss
            return loss

        Trainer.training_step = training_step

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._note_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.open_loss is not None, "a step without a training_step"
        self._note_time()
        self.losses.append(self.open_loss)
        self.batches.append(self.open_batches)
        self.open_loss, self.open_batches = None, []

    def _note_time(self) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.peak_mb = peak_mb()

    def write(self, **more: Any) -> None:
        """The result file that the job names, with what else the worker has to tell."""
        index = {tuple(row["ids"]): number for number, row in enumerate(read_rows(self.job))}
        pad, bos = self.job["pad"], self.job["bos"]
        steps = []
        for number, (loss, batches) in enumerate(zip(self.losses, self.batches, strict=True)):
            ids = [t for batch in batches for t in batch.flatten().tolist() if t != pad]
            starts = [k for k, token in enumerate(ids) if token == bos] + [len(ids)]
            rows = [index[tuple(ids[a:b])] for a, b in pairwise(starts)]
            seconds = self.ends[number + 1] - self.ends[number]
            cpu = self.cpu_ends[number + 1] - self.cpu_ends[number]
            steps.append(
                {"seconds": seconds, "cpu_seconds": cpu, "loss": float(loss), "rows": rows}
            )
        result = {"steps": steps, "peak_mb": self.peak_mb, "import_mb": self.import_mb, **more}
        Path(self.job["result"]).write_text(json.dumps(result))
