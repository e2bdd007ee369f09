"""A stream beside the same rows from files, and its memory over many files: ``python benchmarks/stream.py``.

steps     chats, 4 layers of 256, a vocabulary of 8,192, 8 samples a step, as ``record.py`` has them: seconds a step,
          from a cached file and from a stream, in turns, each in a process of its own; the median of the steps, and
          their mean, in which the windows are that are tokenized next to training
memory    1,600 rows a file, without a model: memory of the process (RssAnon), and bytes of the record, after so many
          files; what a run has passed is removed as training does
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from data import SMALL, chat_rows, write_model, write_rows
from taut.commands.train import train
from taut.config import from_mapping
from taut.data.stream import StreamDataset
from taut.methods import METHODS
from taut.methods.method import RunConfig
from taut.run.inputs import load_language
from taut.train import distributed
from taut.train.log import read_events

OFF = {"check": "off", "stop_check.prompts": 0, "contract.prompts": 0, "checkpoint.every": 0}
COMMON = {"dtype": "float32", "device": "cpu", "log.console": False, **OFF}
STEPS, ROWS, WINDOW = 120, 1600, 256
STREAM = {"data.streaming": True, "data.streaming_settle": 0.0, "data.streaming_window": WINDOW}
FILES = (10, 100, 400)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["steps", "memory"])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    if "steps" in asked.cases:
        for number in range(asked.rounds):
            for name in ("file", "stream"):
                with ProcessPoolExecutor(1, mp_context=context) as process:
                    seconds = process.submit(seconds_of_steps, name).result()
                each = f"median {1000 * median(seconds):.1f} ms, mean {1000 * mean(seconds):.1f} ms"
                print(f"round {number + 1}, {name}: {each} a step", flush=True)
    if "memory" in asked.cases:
        for num_files in FILES:
            with ProcessPoolExecutor(1, mp_context=context) as process:
                memory, disk, rows = process.submit(memory_over, num_files).result()
            print(
                f"{num_files} files, {rows:,} samples: {memory:.0f} MiB of memory, {disk / 2**20:.2f} MiB recorded",
                flush=True,
            )
    return 0


def place(folder: Path) -> tuple[Path, Path]:
    """A model, and a directory with one file of rows."""
    model, incoming = folder / "model", folder / "incoming"
    write_model(SMALL, model)
    write_rows(chat_rows(ROWS, SMALL.vocab), folder / "data")
    incoming.mkdir()
    (folder / "data" / "messages.jsonl").rename(incoming / "000000.jsonl")
    return model, incoming


def seconds_of_steps(name: str) -> list[float]:
    """Of all steps but the first ten."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.environ["TAUT_CACHE"] = str(folder / "cache")
        model, incoming = place(folder)
        keys: dict[str, Any] = {
            **COMMON,
            **(STREAM if name == "stream" else {}),
            "model": str(model),
            "data.train": str(incoming),
            "out": str(folder / "out"),
            "steps": STEPS,
            "batch.samples_per_step": 8,
        }
        train(from_mapping(METHODS["sft"], keys))
        events = read_events(folder / "out" / "events.jsonl")
        return [event["seconds"] for event in events if event["kind"] == "step"][10:]


def memory_over(num_files: int) -> tuple[float, int, int]:
    """MiB of memory and bytes on disk after all files, and their samples."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.environ["TAUT_CACHE"] = str(folder / "cache")
        model, incoming = place(folder)
        first = incoming / "000000.jsonl"
        for number in range(1, num_files):
            (incoming / f"{number:06d}.jsonl").hardlink_to(first)
        keys = {**STREAM, "model": str(model), "data.train": str(incoming), "steps": 1}
        run = from_mapping(RunConfig, {**keys, "out": str(folder / "out")})
        language = load_language(run)
        data = run.load_data("train", language.renderer, language, ranks=distributed.start("cpu"))
        assert isinstance(data, StreamDataset)
        stream, size = data.stream, 8
        total = num_files * ROWS // WINDOW * WINDOW
        for start in range(0, total, size):
            stream.require(start + size, "the benchmark", "", lambda seconds: None)
            samples, indices = stream.at(start, start + size, 0)
            for index in indices:
                samples.sample(index)
            stream.leave(start, start)
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        record = folder / "cache" / "streams"
        disk = sum(path.stat().st_size for path in record.rglob("*") if path.is_file())
        stream.reader.close()
        return int(status["RssAnon"].split()[0]) / 1024, disk, total


if __name__ == "__main__":
    sys.exit(main())
