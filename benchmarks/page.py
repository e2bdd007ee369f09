"""What the page of a large run takes: ``python benchmarks/page.py``.

A run of 50,000 steps and 1,000,000 rollouts, as GRPO leaves one that goes on, is written by the writers that a run
has: events, rollouts, tokens (``--run`` keeps it). ``taut page`` serves it in a process of its own, twice: once asked
by chromium, once over HTTP. Each is a fresh process, which has read nothing of the run.

In the browser, with playwright; from the request until it is drawn:

    command     from the start of ``taut page`` until the first curve of the overview is drawn
    listening   the part of it until the address is printed
    opened      the overview, asked for as soon as the server listens: until the first curve is drawn
    processor   of it, and of the start before, processor time of the server
    again       the same in a new tab, once the server has read the events
    rollouts    the groups of the newest step           group     one of them with its tokens
    prompt      the same prompt over the steps          samples   a step's, and one token by token
    browser     memory of all its processes then, what several share counted once (Pss, Linux)
    tab         the largest of its processes that draw pages
    server      the most that the server has held

Over HTTP the single answers; ``appended`` is the overview after another 10 steps, with the events the server knows.

Exit status 1 if ``opened``, ``again`` or a view takes 2 s or longer, or the browser holds 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from taut.io import tables
from taut.io.tables import TableWriter
from taut.rl.records import SCHEMA
from taut.train.log.events import EventLog
from taut.train.recorder import token_schema

SECONDS, MEGABYTES = 2.0, 500.0
NUM_PROMPTS, GROUP, TOKENS = 5_000, 10, 40
"""Prompts, answers of each, and sampled tokens of an answer, after as many of the prompt."""
RECORDED_EVERY, RECORDED = 50, 8
"""Steps between two whose tokens are recorded, and samples of each."""
EVALUATED_EVERY, WARNED_EVERY = 500, 2_500
WORDS = [f" word{number}".encode() for number in range(1000)]
NUM_TEXTS = 2_000
OF_STEP = (
    *("advantage/mean", "advantage/size", "clip/high", "clip/low", "engine/difference"),
    *("engine/difference_square", "engine/far", "engine/kl", "engine/kl_k1", "engine/weight"),
    *("engine/weight_square", "engine/effective", "engine/largest", "entropy_estimate", "kl"),
    *("old/kl_k1", "ratio/mean", "ratio/max"),
)
OF_ROLLOUT = (
    *("reward_std", "reward_min", "reward_max", "reward/right", "groups_with_signal", "left_out"),
    *("without_reward", "rewarded", "groups", "completions", "errors", "seconds_generating"),
    *("seconds_judging", "stopped", "tokens_mean", "tokens_max", "staleness_mean"),
    *("staleness_max", "num_replayed", "seconds_scoring"),
)
OF_MACHINE = ("cpu", "cpu_most", "memory", "disk_read", "disk_written", "gpu", "gpu_memory")
"""Fields of the three commonest events that are numbers, besides those written out below."""
FIRST_CURVE = """
new MutationObserver((_, observer) => {
  if (window.firstCurve === undefined && document.querySelector(".chart-plot canvas")) {
    observer.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(() => { window.firstCurve = performance.now(); }));
  }
}).observe(document, { childList: true, subtree: true });
"""
"""In the tab before its page: notes when the first curve is on the screen, in ms since it was asked for."""


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
        in_browser = looked_at(out)
        over_http = asked(out, given.steps)
    for name, value in (in_browser | over_http).items():
        unit = "MB" if name in ("browser", "tab", "server") else "s"
        print(f"{name:10}", f"{value:8.0f} MB" if unit == "MB" else f"{value:8.3f} s")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"steps": given.steps, "rollouts": given.rollouts}
    given.json.write_text(json.dumps({**found, "browser": in_browser, "http": over_http}))
    views = ("opened", "again", "rollouts", "group", "prompt", "samples")
    is_slow = any(in_browser[name] >= SECONDS for name in views)
    return int(is_slow or in_browser["browser"] >= MEGABYTES)


# -- a large run


def write_run(out: Path, num_steps: int, num_rollouts: int) -> None:
    """A run as GRPO leaves one that goes on."""
    draw, a_step = np.random.default_rng(0), max(GROUP, num_rollouts // num_steps)
    (out / "tokens").mkdir(parents=True)
    config = {"method": "grpo", "model": "large", "out": str(out)}
    resolved = {"taut": "0.1.0", "method": "grpo", "config": config, "num_steps": num_steps}
    (out / "resolved.json").write_text(json.dumps({**resolved, "decisions": [], "data": "0"}))
    tables.write_column(out / "tokens/vocabulary.parquet", "bytes", WORDS)
    rollouts = TableWriter(out / "rollouts", SCHEMA)
    tokens = TableWriter(out / "tokens/rank-00000", token_schema())
    log, answers = EventLog(out / "events.jsonl"), answers_of(draw)
    log({"kind": "start", "time": 1.0, "num_steps": num_steps})
    for step in range(1, num_steps + 1):
        rows = list(rollouts_of(step, a_step, answers, draw))
        rollouts.append(rows)
        if step == 1 or step % RECORDED_EVERY == 0:
            tokens.append([tokens_of(row) for row in rows[:RECORDED]])
        for event in events_of(step, rows, draw):
            log(event)
    for writer in (rollouts, tokens, log):
        writer.close()


def answers_of(draw: np.random.Generator) -> list[dict[str, Any]]:
    """What prompts and answers are drawn from: making each anew would take most of the time."""
    found = []
    for _ in range(NUM_TEXTS):
        ids = draw.integers(0, len(WORDS), 2 * TOKENS)
        prompt, text = (
            b"".join(WORDS[i] for i in part).decode() for part in (ids[:TOKENS], ids[TOKENS:])
        )
        found.append(
            {
                "prompt": json.dumps([{"role": "user", "content": prompt}]),
                "messages": json.dumps([{"role": "assistant", "content": text}]),
                "text": text,
                "ids_T": ids.tolist(),
                "logp_N": draw.normal(-1.0, 0.3, TOKENS).tolist(),
                "reward": float(draw.random() < 0.5),
            }
        )
    return found


def rollouts_of(
    step: int, count: int, answers: list[dict[str, Any]], draw: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """The trajectories of a step."""
    for number, chosen in enumerate(draw.integers(0, len(answers), count).tolist()):
        group, index = divmod(number, GROUP)
        prompt, answer = (step * 7 + group) % NUM_PROMPTS, answers[chosen]
        yield {
            **dict.fromkeys(SCHEMA.names),
            **answer,
            "prompt": answers[prompt % len(answers)]["prompt"],
            "step": step,
            "sample_id": f"prompts.jsonl:{prompt}#{index} of rollout {step}",
            "group": group,
            "prompt_id": f"prompts.jsonl:{prompt}",
            "place": f"prompts.jsonl:{prompt}",
            "index": index,
            "is_kept": True,
            "references": ["42"],
            "sampled_at_N": list(range(TOKENS, 2 * TOKENS)),
            "advantage_N": [answer["reward"] - 0.5] * TOKENS,
            "version_N": [step - 1] * TOKENS,
            "finish_reason": "stop",
            "rewards": [{"name": "right", "value": answer["reward"]}],
            "num_turns": 1,
            "num_calls": 0,
            "num_malformed_calls": 0,
        }


def tokens_of(row: dict[str, Any]) -> dict[str, Any]:
    """A trajectory as it was trained on."""
    return {
        **dict.fromkeys(token_schema().names),
        **{name: row[name] for name in ("step", "sample_id", "ids_T", "logp_N")},
        "why": "random",
        "target_at_N": row["sampled_at_N"],
        "weight_N": [1.0] * TOKENS,
        "streams": [("advantage_N", row["advantage_N"]), ("ratio_N", [1.0] * TOKENS)],
        "values": [("reward", row["reward"])],
        "num_shared": 0,
        "shared_with": [],
        "pictures": [],
    }


def events_of(
    step: int, rows: list[dict[str, Any]], draw: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """The events of a step: its rollout with two answers token by token, what it trained on, and what comes now and
    then.
    """

    def numbers(names: tuple[str, ...]) -> dict[str, float]:
        return dict(zip(names, draw.normal(size=len(names)).tolist(), strict=True))

    shown = [
        {
            "id": row["sample_id"],
            **{name: row[name] for name in ("text", "references", "finish_reason", "reward")},
            "messages": [],
            "ids": row["ids_T"][TOKENS:],
            "logp": [round(value, 4) for value in row["logp_N"]],
            "advantage": row["advantage_N"],
        }
        for row in rows[:2]
    ]
    at = {"time": 9.0 * step, "step": step}
    reward = float(np.mean([row["reward"] for row in rows]))
    yield {"kind": "rollout", **at, "reward": reward, **numbers(OF_ROLLOUT), "samples": shown}
    counts = {"num_targets": 800, "num_tokens": 900, "num_tokens_unshared": 1600, "seconds": 9.0}
    known = {"loss": float(draw.normal()), "grad_norm": 1.0, "learning_rate": 1e-6, **counts}
    samples = {
        "sample_ids": [row["sample_id"] for row in rows],
        "sample_nll": np.round(draw.uniform(0, 3, len(rows)), 4).tolist(),
    }
    yield {"kind": "step", **at, **known, **samples, **numbers(OF_STEP)}
    if step % 5 < 3:  # every 15 s
        yield {"kind": "utilization", **at, **numbers(OF_MACHINE)}
    if step % EVALUATED_EVERY == 0:
        share = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
        yield {"kind": "eval", **at, "loss": 2.0, "num_samples": 100, **share}
    if step % WARNED_EVERY == 0:
        named = {"sample_ids": samples["sample_ids"][:2]}
        yield {"kind": "warning", **at, "name": "spike", "detail": "grad_norm is 9", **named}


def size_of(out: Path) -> int:
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


# -- a server


@contextmanager
def serving(out: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server that listens: its address, and the process."""
    command = [sys.executable, "-m", "taut", "page", str(out), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server
        finally:
            server.terminate()


def looked_at(out: Path) -> dict[str, float]:
    """What a browser sees: seconds until it is drawn, and megabytes."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    found: dict[str, float] = {}
    no_sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=no_sandbox)
        browser.new_page().close()
        begun = time.perf_counter()
        with serving(out) as (address, server):
            found["listening"] = time.perf_counter() - begun

            def opened() -> tuple[Any, float]:
                tab = browser.new_page(viewport={"width": 1280, "height": 800})
                tab.add_init_script(FIRST_CURVE)
                tab.goto(f"{address}#/run/{out.name}/overview")
                while (at := tab.evaluate("window.firstCurve")) is None:
                    tab.wait_for_timeout(10)
                return tab, at / 1000

            tab, found["opened"] = opened()
            found["command"] = time.perf_counter() - begun
            found["processor"] = processor_seconds(server.pid)
            tab.close()
            tab, found["again"] = opened()

            def timed(name: str, place: str, drawn: str) -> None:
                begun = time.perf_counter()
                tab.evaluate(f"location.hash = {json.dumps(f'#/run/{out.name}/{place}')}")
                view = place.partition("?")[0]
                tab.wait_for_selector(f"#main[aria-busy=false] .view-{view} {drawn}")
                found[name] = time.perf_counter() - begun

            run = f"answers/run/{out.name}"
            steps = ask(address, f"{run}/steps")
            newest, last = steps["rollouts"][-1], steps["steps"][-1]
            prompt = ask(address, f"{run}/rollouts?step={newest}")["groups"][0]["prompt_id"]
            listed = ask(address, f"{run}/samples?step={last}")["samples"]
            sample = quote(next(one["id"] for one in listed if one["is_recorded"]))
            timed("rollouts", "rollouts", "h1")
            timed("group", f"rollouts?step={newest}&group=0&show=tokens", ".answer .tokens")
            timed("prompt", f"prompt?id={quote(prompt)}", "h1")
            timed("samples", f"samples?step={last}&id={sample}", ".tokens")
            by_kind = memory_of_children(os.getpid())
            found["browser"] = sum(by_kind.values()) / 1e6
            found["tab"] = max(n for kind, n in by_kind.items() if "renderer" in kind) / 1e6
            found["server"] = peak_memory(server.pid) / 1e6
        browser.close()
    return found


def memory_of_children(pid: int) -> dict[str, float]:
    """Bytes of the processes of the browser below this process, what n of them share as an n-th."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended

    def is_below(one: int) -> bool:
        return one == pid or (one in parents and is_below(parents[one]))

    found = {}
    for one in filter(is_below, parents):
        words = Path(f"/proc/{one}/cmdline").read_bytes().decode().replace("\0", " ").split()
        if words and "chrom" in Path(words[0]).name:
            kind = next((word for word in words if word.startswith("--type=")), "--type=browser")
            pss = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{one}/smaps_rollup").read_text(), re.M)
            assert pss is not None
            found[f"{kind} {one}"] = float(pss[1]) * 1024
    return found


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> float:
    """The most bytes that a process has held (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return float(found[1]) * 1024


def asked(out: Path, num_steps: int) -> dict[str, float]:
    """Seconds until each answer is there."""
    found: dict[str, float] = {}
    with serving(out) as (address, _):

        def timed(name: str, question: str) -> Any:
            begun = time.perf_counter()
            answer = ask(address, f"answers/{question}")
            found[f"/{name}"] = time.perf_counter() - begun
            return answer

        run, middle = f"run/{out.name}", num_steps // 2
        overview = timed("overview", f"{run}/overview")
        timed("curves", f"{run}/curves?names={','.join(overview['headline'])}&points=1000")
        timed("steps", f"{run}/steps")
        groups = timed("rollouts", f"{run}/rollouts?step={middle}")["groups"]
        timed("group", f"{run}/group?step={middle}&group=0")
        timed("prompt", f"{run}/prompt?id={groups[0]['prompt_id']}")
        timed("samples", f"{run}/samples?step={middle}")
        draw = np.random.default_rng(1)
        log, answers = EventLog(out / "events.jsonl"), answers_of(draw)
        for step in range(overview["step"] + 1, overview["step"] + 11):
            rows = list(rollouts_of(step, GROUP, answers, draw))
            for event in events_of(step, rows, draw):
                log(event)
        log.close()
        timed("appended", f"{run}/overview")
    return found


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address}{path}") as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
