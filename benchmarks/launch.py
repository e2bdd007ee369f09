"""How long a launcher takes: ``python -m benchmarks.launch``, ``taut launch ray`` beside torchrun, in one run.

Two ranks train a tiny model on this machine: under Ray on two simulated nodes that are up, one rank on each; under
torchrun as two processes. Reported, in seconds, each round by itself and the median:

    first step    from the command to the event of the first step
    next step     from a killed rank (SIGKILL while it takes steps) to the next event of a step: the death is noticed,
                  the ranks start again, and read the checkpoint

The launchers take turns. Both runs are checked: every loss is that of one process to 1e-9. Results go to a JSON file.
Exit status 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.helpers.chat_runs import QUIET, chats, column, events, save_model, words_of, write_rows
from tests.helpers.ray_clusters import nodes

import taut

STEPS, KILLED_AT, LIMIT = 400, 5, 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("launch.json"))
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # torchrun: else ranks that it starts again read from its store where those were that are gone
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    took: dict[str, list[dict[str, float]]] = {"ray": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as folder, nodes(2) as cluster:
        place = Path(folder)
        keys = _keys(place)
        taut.sft(**keys, out=str(place / "alone"), steps=KILLED_AT + 5)
        losses = column(place / "alone", "loss")
        for number in range(options.rounds):
            for name, rounds in took.items():
                out = place / f"{name}-{number}"
                words = ["resume=true", f"steps={STEPS}", f"out={out}", *words_of(keys)]
                rounds.append(_time(_command(name, words, cluster.address), out, losses))
                print(name, number, json.dumps(rounds[-1]), flush=True)
    median = {
        name: {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        for name, rounds in took.items()
    }
    options.out.write_text(json.dumps({"rounds": took, "median": median}, indent=1) + "\n")
    print(f"\n{'':10}{'first step':>12}{'next step':>12}")
    for name, row in median.items():
        print(f"{name:10}{row['first step']:>10.1f} s{row['next step']:>10.1f} s")
    differs = max(row["differs"] for rounds in took.values() for row in rounds)
    print(f"largest difference of a loss from one process: {differs:.1e} of it")
    return int(differs > 1e-9)


def _keys(place: Path) -> dict[str, Any]:
    return {
        **QUIET,
        "model": str(save_model(place / "model", dtype=torch.float64)),
        "data.train": str(write_rows(place / "train.jsonl", chats(23))),
        "check": "off",
        "contract.prompts": 0,
        "checkpoint.every": 1,
        "optim.warmup_steps": 0,  # so that no loss depends on the number of steps
    }


def _command(name: str, words: list[str], address: str) -> list[str]:
    python = sys.executable
    if name == "ray":
        return [
            *(python, "-m", "taut", "launch", "ray", *words, "method=sft"),
            *(f"address={address}", "nodes=2", "gpus_per_node=0", "restarts=1"),
        ]
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [python, *runner, "--max-restarts=1", "-m", "taut", "sft", *words]


def _time(command: list[str], out: Path, losses: list[float]) -> dict[str, float]:
    """The seconds of one launch, which is ended once the step after the kill is there."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, out, 1, 0)
        first = time.monotonic() - began
        _wait(process, out, KILLED_AT, 0)
        os.kill(_rank_of(out), signal.SIGKILL)
        killed = time.monotonic()
        _wait(process, out, 1, 1)
        resumed = time.monotonic() - killed
        return {"first step": first, "next step": resumed, "differs": _differs(out, losses)}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)


def _wait(process: subprocess.Popen[bytes], out: Path, steps: int, resumes: int) -> None:
    """Wait until the run has taken so many steps since it was resumed so often."""
    deadline = time.monotonic() + LIMIT
    while True:
        if (out / "events.jsonl").exists():
            begins = len(events(out, "resume"))
            newest = events(out, "resume")[-1]["from_step"] if begins else 0
            taken = [event for event in events(out, "step") if event["step"] > newest]
            if begins > resumes and len(taken) >= steps:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{command_of(process)} ended, or took too long")
        time.sleep(0.02)


def command_of(process: subprocess.Popen[bytes]) -> str:
    return " ".join(map(str, process.args))  # type: ignore[arg-type]


def _rank_of(out: Path) -> int:
    """The process of rank 1 of the run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        is_rank = "RANK=1" in variables and any(v.startswith("MASTER_PORT=") for v in variables)
        if is_rank and f"out={out}" in words and "launch" not in words:
            return int(folder.name)
    raise RuntimeError(f"found no process of rank 1 of {out}")


def _differs(out: Path, losses: list[float]) -> float:
    pairs = zip(column(out, "loss"), losses, strict=False)
    return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


if __name__ == "__main__":
    sys.exit(main())
