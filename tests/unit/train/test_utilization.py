"""How busy the machine is: what is read, what becomes of it over ranks, and that it cannot disturb a run."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import PLAIN, chats, events, save_model, sft, write_rows

from taut.train import utilization
from taut.train.log import read_events
from taut.train.log.events import scalars
from taut.train.utilization import Meter, Used, _between, used

CUDA = torch.device("cuda", 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_what_is_used_is_that_of_a_process_and_its_children() -> None:
    before = used(os.getpid())
    program = "x = bytearray(2**26)\nwhile sum(__import__('os').times()[:2]) < 0.3: pass\nprint(1, flush=True)\ninput()"
    child = subprocess.Popen(
        ["python3", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "1\n"
    with_child, alone = used(os.getpid()), used(child.pid)
    assert alone.cpu_seconds >= 0.29 and alone.rss_bytes is not None and alone.rss_bytes > 2**26
    assert with_child.cpu_seconds - before.cpu_seconds >= 0.29
    assert with_child.rss_bytes is not None and before.rss_bytes is not None
    assert with_child.rss_bytes - before.rss_bytes > 2**25
    child.communicate("")
    after = used(os.getpid())
    assert after.cpu_seconds >= with_child.cpu_seconds, "what has ended counts on"


def test_a_reading_is_what_was_used_between_two_looks() -> None:
    before, now = Used(10.0, 5.0, 100, 1000), Used(14.0, 11.0, 80, 5000)
    assert _between(before, now) == {
        "cpu_percent": 150.0,
        "rss_bytes": 80.0,
        "disk_write_bytes_per_second": 1000.0,
    }
    assert _between(now, before._replace(at=15.0))["cpu_percent"] == 0.0
    assert _between(Used(1.0, 1.0, None, None), Used(2.0, 1.5, None, None)) == {"cpu_percent": 50.0}


def test_without_a_list_of_processes_processor_time_is_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utilization, "PROC", tmp_path)
    found = used(os.getpid())
    assert found.cpu_seconds > 0 and found.rss_bytes is None and found.written_bytes is None


def test_readings_between_two_steps_are_one_and_ranks_of_a_host_are_added_up() -> None:
    meter = Meter()
    assert meter.sample() is None and meter.combine([None]) is None
    meter._readings.extend(
        [{"cpu_percent": 100.0, "rss_bytes": 5.0}, {"cpu_percent": 300.0, "rss_bytes": 4.0}]
    )
    mine = meter.sample()
    assert mine is not None and mine["values"] == {"cpu_percent": 200.0, "rss_bytes": 5.0}
    assert meter.sample() is None

    def told(host: str, **values: float) -> dict[str, Any]:
        return {"host": host, "values": values, "missing": {}}

    one = told("a", cpu_percent=50.0, gpu_percent=90.0, gpu_memory_bytes=7.0)
    other = told("a", cpu_percent=70.0, gpu_percent=10.0, gpu_memory_bytes=9.0)
    far = told("b", cpu_percent=1.0, gpu_percent=50.0, gpu_memory_bytes=8.0)
    event = meter.combine([one, other, far])
    assert event is not None
    assert event["cpu_percent"] == 121.0 and event["gpu_percent"] == 50.0
    assert event["gpu_memory_bytes"] == 9.0
    here, there = event["hosts"]
    assert here["host"] == "a" and here["cpu_percent"] == 120.0 and here["gpu_percent"] == 50.0
    assert here["gpus"][1] == {"rank": 1, "gpu_percent": 10.0, "gpu_memory_bytes": 9.0}
    assert there["gpus"] == [{"rank": 2, "gpu_percent": 50.0, "gpu_memory_bytes": 8.0}]
    assert meter.combine([None, other, far]) is None, "the first rank sets the pace"
    again = meter.combine([told("a", cpu_percent=60.0), None, None])
    assert again is not None and again["cpu_percent"] == 60.0 + 70.0 + 1.0


def test_a_number_that_a_driver_does_not_tell_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def silent(device: torch.device) -> float:
        asked.append(device)
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(
        utilization, "GPU", {"gpu_percent": silent, "gpu_reserved_bytes": lambda device: 3}
    )
    meter = Meter(device=CUDA)
    for _ in range(2):
        meter._readings.append(meter._of_gpu())
    first = meter.sample()
    assert first is not None and first["values"] == {"gpu_reserved_bytes": 3.0}
    event = meter.combine([first])
    assert event is not None and "nvidia-ml-py" in event["missing"]["gpu_percent"]
    meter._readings.append(meter._of_gpu())
    assert "missing" not in (meter.combine([meter.sample()]) or {}) and asked == [CUDA]


def test_the_thread_reads_and_ends_with_the_run() -> None:
    meter = Meter(seconds=0.01)
    with meter.running():
        deadline = time.monotonic() + 60
        while not meter._readings and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "taut-utilization" in [thread.name for thread in threading.enumerate()]
    assert "taut-utilization" not in [thread.name for thread in threading.enumerate()]
    assert meter._readings[0]["cpu_percent"] >= 0
    with Meter(seconds=0).running():
        assert "taut-utilization" not in [thread.name for thread in threading.enumerate()]


def test_a_run_has_curves_of_it_which_a_resume_does_not_take_back(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", chats(8))
    keys = {"log.utilization_seconds": 0.005, "log.tokens.samples": 0}
    sft(model, rows, tmp_path / "out", steps=4, **PLAIN, **keys)
    read = events(tmp_path / "out", "utilization")
    assert read and [event["step"] for event in read] == sorted(event["step"] for event in read)
    assert {"system/cpu_percent", "system/rss_bytes"} <= scalars(read[0]).keys()
    assert read[0]["hosts"][0]["gpus"] == []
    with (tmp_path / "out/events.jsonl").open("a") as file:
        file.write('{"kind": "resume", "time": 0, "from_step": 0}\n')
    kinds = [event["kind"] for event in read_events(tmp_path / "out/events.jsonl")]
    assert kinds.count("utilization") == len(read) and "step" not in kinds
