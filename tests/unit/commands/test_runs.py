"""``taut runs``: every state a run may be in, and none that spoils the list."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import taut
from taut.cli import main
from taut.commands import runs as command
from taut.train.run_dir import Lock

NOW = time.time()


def run_in(
    out: Path, *events: dict[str, Any], checkpoints: Iterable[int] = (), age: float = 1.0
) -> Path:
    """A run as its files tell of it; ``age``: how many seconds ago it wrote."""
    out.mkdir(parents=True)
    (out / "model").mkdir()
    (out / "resolved.json").write_text(json.dumps({"method": "sft", "num_steps": 9}))
    lines = [json.dumps({**event, "time": NOW - age}) + "\n" for event in events]
    (out / "events.jsonl").write_text("".join(lines))
    for step in checkpoints:
        (out / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (out / "checkpoints" / f"step-{step:06d}" / "meta.json").write_text("{}")
    return out


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": number, "loss": float(number)} for number in numbers]


def end(outcome: str, step: int, reason: str | None = None) -> dict[str, Any]:
    return {"kind": "end", "outcome": outcome, "step": step, "reason": reason}


START = {"kind": "start"}
CHECKPOINT = {"kind": "checkpoint", "step": 2}


@pytest.mark.parametrize(
    ("events", "state", "step", "reason", "resumes_after"),
    [
        ([START, *steps(1, 2), end("finished", 2)], "finished", 2, None, None),
        ([START, *steps(1, 2), end("stopped", 2, "why")], "stopped", 2, "why", 2),
        ([START, *steps(1, 2), end("stopped", 2, "why"), CHECKPOINT], "stopped", 2, "why", 2),
        (
            [START, *steps(1, 2, 3), end("interrupted", 3, "SIGTERM")],
            "interrupted",
            3,
            "SIGTERM",
            2,
        ),
        ([START, *steps(1, 2), CHECKPOINT], "died", 2, None, 2),
        ([START, *steps(1, 2, 3), {"kind": "resume", "from_step": 2}], "died", 2, None, 2),
        ([START, *steps(1, 2), {"kind": "resume", "from_step": 0}], "died", 0, None, 2),
        ([START, *steps(1, 2), end("finished", 2), START], "died", 2, None, 2),
        ([START], "died", 0, None, 2),
        ([], "died", 0, None, 2),
    ],
)
def test_what_became_of_a_run(
    events: list[dict[str, Any]],
    state: str,
    step: int,
    reason: str | None,
    resumes_after: int | None,
    tmp_path: Path,
) -> None:
    out = run_in(tmp_path / "a", *events, checkpoints=[1, 2])
    with (out / "events.jsonl").open("a") as file:
        file.write('{"kind": "end", "outcome"')
    (found,) = taut.runs(tmp_path)
    assert (found.state, found.step, found.reason) == (state, step, reason)
    assert found.loss == (step or None)
    assert found.checkpoint == out / "checkpoints" / "step-000002"
    assert found.resumes_after == resumes_after
    assert (found.num_steps, found.method) == (9, "sft")


def test_without_a_complete_checkpoint_it_is_from_step_one(tmp_path: Path) -> None:
    out = run_in(tmp_path / "a", START, *steps(1, 2))
    (out / "checkpoints" / ".step-000002.partial").mkdir(parents=True)
    (out / "checkpoints" / "step-000001").mkdir()
    (out / "events.jsonl").unlink()
    (found,) = taut.runs(tmp_path)
    assert (found.state, found.checkpoint, found.resumes_after) == ("died", None, 0)
    assert found.written == (out / "resolved.json").stat().st_mtime


def test_a_run_whose_lock_is_held_is_running_and_looking_disturbs_nobody(tmp_path: Path) -> None:
    out = run_in(tmp_path / "a", START, *steps(1), end("stopped", 1, "an earlier end"))
    with Lock(out) as lock:
        lock.take()
        for _ in range(2):
            (found,) = taut.runs(out)
            assert found.state == "running"
            assert found.reason == f"process {os.getpid()} on {socket.gethostname()}"
            assert found.resumes_after is None
    assert taut.runs(out)[0].state == "stopped"


def test_a_finished_run_whose_model_is_gone_is_not_finished(tmp_path: Path) -> None:
    out = run_in(tmp_path / "a", START, *steps(1), end("finished", 1))
    (out / "model").rmdir()
    (found,) = taut.runs(tmp_path)
    assert (found.state, found.reason) == ("stopped", "finished, but model/ is gone")


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("resolved.json", b'{"config": {', "resolved.json is damaged: it is no JSON object"),
        ("resolved.json", b"[]", "resolved.json is damaged: it is no JSON object"),
        ("resolved.json", b"\xff\xfe", "resolved.json is damaged"),
        ("events.jsonl", b"\0\0\0\0\n", "no event at .*, line 1 from its end"),
        ("events.jsonl", b'{"kind": "step", "step": []}\n', "a step that is no integer"),
        ("events.jsonl", b'{"kind": "new in 9.0"}\n', "no event"),
    ],
)
def test_a_damaged_run_is_told_and_spoils_nothing(
    name: str, content: bytes, wrong: str, tmp_path: Path
) -> None:
    run_in(tmp_path / "good", START, *steps(1), end("finished", 1))
    bad = run_in(tmp_path / "bad", START, *steps(1), checkpoints=[1])
    (bad / name).write_bytes(content)
    found = {one.out.name: one for one in taut.runs(tmp_path)}
    assert found["good"].state == "finished"
    assert (found["bad"].state, found["bad"].resumes_after) == ("damaged", None)
    assert found["bad"].checkpoint is not None
    assert re.search(wrong, found["bad"].reason or "")


def test_where_runs_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["runs/a", "runs/group/b", "runs/group/more/c", "runs/a/b/too", "runs/1/2/3/4/deep"]
    for name in [*names, "runs/.trash/d", "elsewhere/e"]:
        run_in(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    default = {str(one.out) for one in taut.runs()}
    assert default == {"runs/a", "runs/group/b", "runs/group/more/c"}
    assert [str(one.out) for one in taut.runs("runs/a", tmp_path / "runs/a")] == ["runs/a"]
    from_above = {one.out.name for one in taut.runs(tmp_path, "elsewhere")}
    assert from_above == {"a", "b", "e"}, "c is too deep, seen from there"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [str(one.out) for one in taut.runs()] == ["e"]
    for wrong in ("nowhere", "e/resolved.json", "a\0b"):
        with pytest.raises(taut.OutputError, match="no directory that can be read"):
            taut.runs("e", wrong)


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: NOW)
    run_in(Path("old"), START, *steps(1, 2), age=300.0)
    reason = "step 3: loss\nis nan"
    run_in(Path("new"), START, *steps(1, 2), end("stopped", 2, reason), checkpoints=[1])
    assert main(["runs", "new", "old"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run  method  state    step  loss    hours  checkpoint   wrote",
        "new  sft     stopped  2/9   2.0000  0.00   step-000001  1 s ago    resumes after step 1; step 3: loss is nan",
        "old  sft     died     2/9   2.0000  0.00                5 min ago  resumes from step 1",
    ]
    assert main(["runs", "new/model"]) == 0
    assert capsys.readouterr().out == "no runs in new/model: no directory with a resolved.json\n"
    assert main(["runs", "none"]) == 2
    assert "found 'none', which is no directory that can be read" in capsys.readouterr().err


def test_runs_are_compared_by_what_is_measured_and_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five learning rates, one of them the default, which stands with what it was; another method has other keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: NOW)
    for name, rate, held_out in (("a", None, 1.5), ("b", 1e-3, 1.25)):
        measured = {"kind": "eval", "step": 1, "loss": held_out}
        out = run_in(Path(name), START, *steps(1), measured, end("finished", 1))
        config = {"out": name, "seed": 0, "optim": {"learning_rate": rate, "eps": 1e-8}}
        decided = [{"name": "optim.learning_rate", "value": "2e-05", "reason": "the default"}]
        resolved = {
            "method": "sft",
            "num_steps": 1,
            "config": config,
            "decisions": decided[: rate is None],
        }
        (out / "resolved.json").write_text(json.dumps(resolved))
    (out / "best").mkdir()
    best = {"measured": "x", "metric": "loss", "value": 1.125, "step": 1}
    (out / "best" / "best.json").write_text(json.dumps(best))
    run_in(Path("c"), START, *steps(1))
    assert main(["runs", "a", "b"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run",
        "method",
        "state",
        "step",
        "loss",
        "held-out",
        "best",
        "hours",
        "differs",
        "wrote",
    ]
    by_run = {row.split()[0]: row for row in rows}
    assert "1.5000" in by_run["a"] and "learning_rate=2e-05" in by_run["a"]
    assert "1.2500" in by_run["b"] and "learning_rate=0.001" in by_run["b"]
    assert "loss 1.125 at 1" in by_run["b"] and "eps" not in by_run["a"]
    assert main(["runs", "a", "b", "--json"]) == 0
    found = {one["out"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["a"]["settings"] == {"optim.learning_rate": "2e-05"}
    assert found["b"]["best"] == {"metric": "loss", "value": 1.125, "step": 1}
    # what one run of a method has alone is no difference
    assert main(["runs", "a", "c"]) == 0
    assert "held-out" in (said := capsys.readouterr().out) and "differs" not in said


def test_a_run_that_generates_shows_the_reward_of_its_newest_rollout(tmp_path: Path) -> None:
    """One rollout is trained on for two steps; a resume revokes those after its step."""
    first, second = ({"kind": "rollout", "step": step, "reward": step / 4} for step in (1, 3))
    events = [START, first, *steps(1, 2), second, *steps(3)]
    for name, after, reward in (
        ("all", [], 0.75),
        ("revoked", [{"kind": "resume", "from_step": 2}], 0.25),
        ("no rewards", [{"kind": "rollout", "step": 4}, *steps(4)], None),
    ):
        out = run_in(tmp_path / name, *events, *after)
        assert taut.runs(out)[0].reward is None, "it does not generate: no rollout is looked for"
        resolved = {"method": "grpo", "num_steps": 9, "config": {"rollout": {"n": 4}}}
        (out / "resolved.json").write_text(json.dumps(resolved))
        assert taut.runs(out)[0].reward == reward


def test_json_is_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_in(tmp_path / "a", {"kind": "step", "step": 1, "loss": "nan"}, checkpoints=[1])
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found.pop("written") == pytest.approx(NOW - 1)
    assert found == {
        "out": str(out),
        "state": "died",
        "method": "sft",
        "step": 1,
        "num_steps": 9,
        "loss": "nan",
        "reward": None,
        "held_out": None,
        "best": None,
        "seconds": 0.0,
        "settings": {},
        "checkpoint": str(out / "checkpoints" / "step-000001"),
        "reason": None,
        "resumes_after": 1,
    }
    loss = taut.runs(tmp_path)[0].loss
    assert loss is not None
    assert math.isnan(loss)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s ago"), (0.4, "0 s ago"), (119, "119 s ago"), (121, "2 min ago"), (7201, "2 h ago")],
)
def test_how_long_ago(seconds: float, text: str) -> None:
    assert command._age(NOW - seconds, NOW) == text
    assert command._age(NOW - 86400 * 40, NOW).startswith("20")


def test_a_frame_has_a_column_for_each_setting_that_differs(tmp_path: Path) -> None:
    for name, rate, reward in (("a", 1e-4, 0.25), ("b", None, 0.5)):
        out = run_in(tmp_path / name, START, {"kind": "rollout", "reward": reward}, *steps(1, 2))
        config = {"rollout": {}, "optim": {"learning_rate": rate}, "seed": 1, "out": name}
        decisions = [{"name": "optim.learning_rate", "value": "2e-06", "reason": "default"}]
        resolved = {"method": "grpo", "num_steps": 2, "config": config, "decisions": decisions}
        (out / "resolved.json").write_text(json.dumps(resolved))
    found = taut.runs(tmp_path)
    frame = found.frame().set_index("out")
    assert frame.loc[str(tmp_path / "a"), "optim.learning_rate"] == 1e-4
    assert frame.loc[str(tmp_path / "b"), "optim.learning_rate"] == "2e-06"
    assert frame["reward"].tolist() == [one.reward for one in found]
    assert "seed" not in frame and "settings" not in frame
    # the loss of a policy gradient says nothing
    head, *rows = repr(found).splitlines()
    assert "loss" not in head and sorted(row.split()[4] for row in rows) == ["0.250", "0.500"]
    assert found._repr_html_().count("<tr>") == 3


def test_many_runs_are_listed_at_once(tmp_path: Path) -> None:
    """300 runs, some with long logs, of which the end is read only."""
    long = [START, *({**step, "sample_ids": ["a.jsonl:1"] * 30} for step in steps(*range(1, 3000)))]
    for number in range(300):
        run_in(tmp_path / f"{number}", *(long if number < 5 else steps(*range(1, 30))))
    began = time.process_time()
    found = taut.runs(tmp_path)
    assert time.process_time() - began < 5.0
    assert sorted({one.step for one in found}) == [29, 2999]
