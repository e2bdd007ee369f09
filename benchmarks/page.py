"""How long the page of a large run takes: ``python benchmarks/page.py``.

A run of 50,000 steps and 1,000,000 rollouts is written, with the texts, tokens and events that a GRPO run has, and
served by ``taut page`` in a process of its own. Asked over HTTP, in this order:

    start       from the start of the process until it answers
    overview    the first question, for which all events are read
    curves      the headline curves, at 1,000 points
    again       the overview, once the events are known
    steps       which steps are recorded
    rollouts    the groups of a step in the middle
    group       one of them with its tokens
    prompt      the same prompt over all steps
    samples     the samples of a step
    appended    the overview after another 10 steps
    memory      the most that the process has held

Exit status 1 if start, overview, curves, steps and rollouts take more than 2 s together.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from taut.io import tables
from taut.io.tables import TableWriter
from taut.rl.records import SCHEMA

LIMIT = 2.0
COUNTED = ("start", "overview", "curves", "steps", "rollouts")
NUM_PROMPTS, GROUP, TOKENS = 5_000, 10, 40
"""Prompts, answers of each, and sampled tokens of an answer."""
WORDS = [f" word{number}".encode() for number in range(1000)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--run", type=Path, help="where the run is written, or is already")
    parser.add_argument("--json", type=Path, default=Path(".cache/benchmarks/page.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = given.run or Path(folder) / "large"
        if not (out / "resolved.json").is_file():
            begun = time.perf_counter()
            write_run(out, given.steps, given.rollouts)
            print(f"written in {time.perf_counter() - begun:.0f} s: {size_of(out):,} bytes")
        found = measure(out, given.steps)
    for name, value in found.items():
        print(f"{name:10}", f"{value / 2**20:8.0f} MiB" if name == "memory" else f"{value:8.3f} s")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({"steps": given.steps, "rollouts": given.rollouts, **found}))
    return int(sum(found[name] for name in COUNTED) > LIMIT)


def write_run(out: Path, num_steps: int, num_rollouts: int) -> None:
    """A run as GRPO leaves one that goes on."""
    draw, a_step = np.random.default_rng(0), max(GROUP, num_rollouts // num_steps)
    (out / "tokens").mkdir(parents=True)
    config = {"method": "grpo", "model": "large", "out": str(out)}
    resolved = {"taut": "0.1.0", "method": "grpo", "config": config, "num_steps": num_steps}
    (out / "resolved.json").write_text(json.dumps({**resolved, "decisions": [], "data": "0"}))
    tables.write_column(out / "tokens/vocabulary.parquet", "bytes", WORDS)
    writer = TableWriter(out / "rollouts", SCHEMA)
    with (out / "events.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "start", "time": 1.0, "num_steps": num_steps}) + "\n")
        for step in range(1, num_steps + 1):
            rows = list(rollouts_of(step, a_step, draw))
            writer.append(rows)
            file.writelines(f"{json.dumps(event)}\n" for event in events_of(step, rows, draw))
    writer.close()


def rollouts_of(step: int, count: int, draw: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The trajectories of a step."""
    ids = draw.integers(0, len(WORDS), (count, 2 * TOKENS))
    logp = draw.normal(-1.0, 0.3, (count, TOKENS)).astype(np.float32)
    for number in range(count):
        group, index = divmod(number, GROUP)
        prompt = (step * 7 + group) % NUM_PROMPTS
        texts = [b"".join(WORDS[i] for i in part).decode() for part in np.split(ids[number], 2)]
        reward = float(logp[number].mean() > -1.0)
        yield {
            **dict.fromkeys(SCHEMA.names),
            "step": step,
            "sample_id": f"prompts.jsonl:{prompt}#{index} of rollout {step}",
            "group": group,
            "prompt_id": f"prompts.jsonl:{prompt}",
            "place": f"prompts.jsonl:{prompt}",
            "index": index,
            "is_kept": True,
            "prompt": json.dumps([{"role": "user", "content": texts[0]}]),
            "references": ["42"],
            "messages": json.dumps([{"role": "assistant", "content": texts[1]}]),
            "text": texts[1],
            "ids_T": ids[number],
            "sampled_at_N": np.arange(TOKENS, 2 * TOKENS),
            "logp_N": logp[number],
            "advantage_N": np.full(TOKENS, reward - 0.5),
            "version_N": np.full(TOKENS, step - 1),
            "finish_reason": "stop",
            "reward": reward,
            "rewards": [{"name": "right", "value": reward}],
            "num_turns": 1,
            "num_calls": 0,
            "num_malformed_calls": 0,
        }


def events_of(
    step: int, rows: list[dict[str, Any]], draw: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """The events of a step: its rollout with two answers token by token, and what it trained on."""
    numbers = {f"metric/{number}": float(draw.normal()) for number in range(20)}
    shown = [
        {
            "id": row["sample_id"],
            "text": row["text"],
            "ids": row["ids_T"][TOKENS:].tolist(),
            "logp": np.round(row["logp_N"], 4).tolist(),
            "advantage": row["advantage_N"].tolist(),
        }
        for row in rows[:2]
    ]
    reward = float(np.mean([row["reward"] for row in rows]))
    rollout = {"reward": reward, "stopped": 1.0, "tokens_mean": float(TOKENS), "samples": shown}
    ids = [row["sample_id"] for row in rows]
    nll = np.round(draw.uniform(0, 3, len(rows)), 4).tolist()
    known = {"loss": float(draw.normal()), "grad_norm": 1.0, "learning_rate": 1e-6, "seconds": 9.0}
    yield {"kind": "rollout", "time": float(step), "step": step, **rollout}
    samples = {"sample_ids": ids, "sample_nll": nll}
    yield {"kind": "step", "time": float(step), "step": step, **known, **samples, **numbers}


def size_of(out: Path) -> int:
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def measure(out: Path, num_steps: int) -> dict[str, float]:
    """Seconds until each answer is there, and bytes of memory."""
    found: dict[str, float] = {}
    begun = time.perf_counter()
    command = [sys.executable, "-m", "taut", "page", str(out), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        ask(address, "health")
        found["start"] = time.perf_counter() - begun

        def timed(name: str, question: str) -> Any:
            begun = time.perf_counter()
            answer = ask(address, f"answers/{question}")
            found[name] = time.perf_counter() - begun
            return answer

        run, middle = f"run/{out.name}", num_steps // 2
        overview = timed("overview", f"{run}/overview")
        names = ",".join(overview["headline"])
        timed("curves", f"{run}/curves?names={names}&points=1000")
        timed("again", f"{run}/overview")
        timed("steps", f"{run}/steps")
        groups = timed("rollouts", f"{run}/rollouts?step={middle}")["groups"]
        timed("group", f"{run}/group?step={middle}&group=0")
        timed("prompt", f"{run}/prompt?id={groups[0]['prompt_id']}")
        timed("samples", f"{run}/samples?step={middle}")
        draw = np.random.default_rng(1)
        with (out / "events.jsonl").open("a", encoding="utf-8") as file:
            for step in range(num_steps + 1, num_steps + 11):
                rows = list(rollouts_of(step, GROUP, draw))
                file.writelines(f"{json.dumps(event)}\n" for event in events_of(step, rows, draw))
        timed("appended", f"{run}/overview")
        found["memory"] = memory_of(server.pid)
        server.terminate()
    return found


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path) as answer:
        return json.load(answer)


def memory_of(pid: int) -> float:
    """The most bytes that a process has held (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return float(found[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
