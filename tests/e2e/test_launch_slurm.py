"""A job of Slurm, by programs that stand for its commands: it saves at its notice, is queued again, and goes on."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_several_nodes import SECONDS, environment, require_equal
from tests.helpers.chat_runs import PLAIN, QUIET, column, events, sft, words_of

from taut.cli import main


@pytest.mark.slow
def test_a_job_of_slurm_saves_at_its_notice_and_goes_on_when_it_is_queued_again(
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    job = environment(tmp_path / "bin")
    job |= {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    out = tmp_path / "out"
    steps: dict[str, Any] = {"steps": 60}
    keys = {"model": model, "data.train": train, "out": "out", **QUIET, **steps, "check": "off"}
    monkeypatch.setenv("PATH", job["PATH"])
    given = ["nodes=2", "gpus_per_node=0", "time=10", "notice=120"]
    assert main(["launch", "slurm", *given, *words_of(keys)]) == 0
    assert capsys.readouterr().out == (
        f"job 4711 is in the queue; its log will be {tmp_path / 'out-4711.log'}\n"
    )
    command = ["bash", str(tmp_path / "bin" / "job.sh")]

    first = subprocess.Popen(command, env=job, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while not (out / "events.jsonl").is_file() or len(column(out, "step")) < 3:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    _, text = first.communicate(timeout=SECONDS)
    assert first.returncode != 0
    assert "taut: error: interrupted by SIGUSR1: the state after step " in text
    assert (tmp_path / "bin" / "requeued").read_text() == "4711\n"
    done = column(out, "step")[-1]
    assert 3 <= done < 60
    assert (out / "checkpoints" / "latest").read_text() == f"step-{done:06d}\n"
    assert events(out, "end")[-1]["outcome"] == "interrupted"

    again = subprocess.run(
        command,
        env={**job, "SLURM_RESTART_COUNT": "1"},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "bin" / "requeued").read_text() == "4711\n"  # once
    require_equal(out, sft(model, train, tmp_path / "whole", **PLAIN, **steps))


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_that_saved_nothing_before_its_limit_is_not_queued_again(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script alone, with a torchrun that ends at the notice, with a checkpoint or without one."""
    monkeypatch.chdir(tmp_path)
    job = environment(tmp_path / "bin")
    job |= {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    saving = "mkdir -p out/checkpoints; echo step-000001 > out/checkpoints/latest;" if saves else ""
    torchrun = f"""#!/bin/bash
    echo "$@" >> torchrun.words
    trap '{saving} exit 1' USR1
    touch "started.$NODE"
    for _ in $(seq 600); do sleep 0.1; done
    """
    (tmp_path / "bin" / "torchrun").write_text(torchrun)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", job["PATH"])
    assert main(["launch", "slurm", "nodes=2", "model=m", "data.train=a.jsonl", "out=out"]) == 0
    started = subprocess.Popen(["bash", "bin/job.sh"], env=job, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("started.*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started.send_signal(signal.SIGUSR1)
    _, text = started.communicate(timeout=30)
    assert started.returncode == 1
    assert (tmp_path / "bin" / "requeued").exists() is saves
    assert ("taut: error: no step was saved before the time limit" in text) is not saves
    words = (tmp_path / "torchrun.words").read_text().splitlines()
    assert sorted("is_host=1" in line for line in words) == [False, True]
    assert all("--rdzv-endpoint 127.0.0.1:14711 " in line for line in words)
    assert all(
        line.endswith("-m taut sft model=m data.train=a.jsonl out=out resume=true")
        for line in words
    )
