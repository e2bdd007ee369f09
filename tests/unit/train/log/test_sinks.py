"""Reports outside of ``out``, and those of the user's own: one run across resumes, tables of samples, no secrets."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from taut.errors import ConfigError
from taut.train.log import RunLog, ShownSample, read_events
from taut.train.log.custom_sink import load_sinks
from taut.train.log.samples import CHARACTERS, ROWS, shown
from taut.train.run_dir import MARK, REPORT_ID, report_id
from taut.train.settings import LogConfig

SECRET = "hunter2hunter2"
CONFIG = {
    "model": f"https://bob:{SECRET}@host/model",
    "optim": {"learning_rate": 1e-4},
    "rewards": {"options": {"api_key": SECRET, "api_key_env": "NAME"}},
}
ROWS_SHOWN = [
    ShownSample("a.jsonl:1", "What is 2 + 2?", "4", 1.0, 0.5, -0.25),
    ShownSample("a.jsonl:2", f"<b>see</b> https://host/x?token={SECRET}", "*5*"),
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The directory of a run whose configuration has secrets."""
    out = tmp_path / "run"
    out.mkdir()
    (out / MARK).write_text(json.dumps({"config": CONFIG}))
    return out


def own(folder: Path, body: str) -> str:
    """``FILE.py:Report`` of a class with this body."""
    path = folder / "report.py"
    path.write_text("class Report:\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    return f"{path}:Report"


def report(out: Path, config: LogConfig, *, from_step: int | None = None) -> None:
    """A short run with every kind of secret in its events."""
    argv = ["taut", "sft", f"model={CONFIG['model']}", "--hf-token", SECRET, f"x.api_key={SECRET}"]
    with RunLog(custom=load_sinks(config.sinks)).open(out, config) as log:
        log.emit("start", num_steps=3, argv=argv, environment={"HF_TOKEN": SECRET})
        if from_step is not None:
            log.emit("resume", from_step=from_step)
        first = 0 if from_step is None else from_step
        for step in range(first + 1, first + 3):
            log.show(step, ROWS_SHOWN)
            log.emit("step", step=step, loss=1.0 / step, note=f"https://u:{SECRET}@host")
        log.emit("end", outcome="finished", step=first + 2)


def read_all(*folders: Path) -> bytes:
    """Every name and byte below some folders."""
    found = [path for folder in folders for path in sorted(folder.rglob("*"))]
    content = [path.read_bytes() for path in found if path.is_file() and path.name != MARK]
    return b"\n".join([*(str(path).encode() for path in found), *content])


RECORDING = """
def __init__(self, out, settings, run_id):
    self.file = (out / "report.jsonl").open("a")
    self.write(["settings", settings, run_id])
def write(self, what):
    import json
    self.file.write(json.dumps(what, default=str) + "\\n")
def __call__(self, event):
    self.write(event)
    event.clear()
def samples(self, step, rows):
    self.write(["samples", step, rows])
def close(self):
    self.write("closed")
    self.file.close()
"""


def test_a_sink_of_the_users_gets_settings_events_and_samples(out: Path, tmp_path: Path) -> None:
    report(out, LogConfig(console=False, tensorboard=True, sinks=[own(tmp_path, RECORDING)]))
    told = [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]
    assert told[0] == [
        "settings",
        {
            "model": "https://***@host/model",
            "optim.learning_rate": 1e-4,
            "rewards.options.api_key": "***",
            "rewards.options.api_key_env": "NAME",
        },
        (out / REPORT_ID).read_text().strip(),
    ]
    assert [what["kind"] for what in told if isinstance(what, dict)] == [
        "start",
        "step",
        "step",
        "end",
    ]
    name, step, rows = next(w for w in told if isinstance(w, list) and w[0] == "samples")
    assert (name, step, [row["answer"] for row in rows]) == ("samples", 1, ["4", "*5*"])
    assert rows[0]["advantage"] == 0.5
    assert told[-1] == "closed"
    events = read_events(out / "events.jsonl")  # which a sink that clears its own leaves alone
    assert [event["kind"] for event in events] == ["start", "step", "step", "end"]
    assert SECRET.encode() not in read_all(out)


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("def __init__(self):\n    raise KeyError('x')\ndef __call__(self, event): pass", "start"),
        ("def __call__(self, event):\n    1 / (event['kind'] != 'step')", "step"),
        ("def __call__(self, event): pass\ndef samples(self, step, rows):\n    exit('no')", "step"),
        ("def __call__(self, event): pass\ndef close(self):\n    raise OSError('full')", "end"),
    ],
)
def test_one_that_raises_is_ended_with_a_warning_that_says_where(
    body: str, before: str, out: Path, tmp_path: Path
) -> None:
    report(out, LogConfig(console=False, sinks=[own(tmp_path, body)]))
    kinds = [(e["kind"], e.get("detail", "")) for e in read_events(out / "events.jsonl")]
    (number,) = [i for i, (kind, _) in enumerate(kinds) if kind == "warning"]
    assert kinds[number + 1][0] == before
    assert "report.py:Report ended: " in kinds[number][1]
    assert kinds[number][1].endswith((" (report.py:3)", " (report.py:4)"))
    assert kinds[-1][0] == "end"


def test_one_that_is_closed_without_an_end_tells_stderr(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "def __call__(self, event): pass\ndef close(self):\n    raise OSError('full')"
    config = LogConfig(console=False, sinks=[own(tmp_path, body)])
    with RunLog(custom=load_sinks(config.sinks)).open(out, config) as log:
        log.emit("start")
    assert "taut: warning: the sink " in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["report.py", "report:Report", "report.py:", "a.py:1x"])
def test_a_sink_is_named_as_file_and_class(spec: str) -> None:
    with pytest.raises(ValueError, match=r"expected FILE\.py:Class"):
        LogConfig(sinks=[spec])


def test_a_sink_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_sinks([f"{tmp_path}/no.py:Report"])
    with pytest.raises(ConfigError, match="takes server; expected some of out, settings, run_id"):
        load_sinks([own(tmp_path, "def __init__(self, out, server): pass")])


def test_a_table_is_bounded() -> None:
    long = ShownSample("a", "x" * CHARACTERS + "end", "y" * (CHARACTERS + 1))
    rows = shown([long] * (ROWS + 1))
    assert len(rows) == ROWS
    assert (len(rows[0].prompt), rows[0].prompt[-3:]) == (CHARACTERS, "end")
    assert len(rows[0].answer) == CHARACTERS


def test_tensorboard_shows_samples_as_they_are(out: Path) -> None:
    report(out, LogConfig(console=False, tensorboard=True))
    curves = EventAccumulator(str(out / "tensorboard"))
    curves.Reload()
    assert curves.summary_metadata["samples"].plugin_data.plugin_name == "text"
    first, _ = curves.Tensors("samples")
    cells = [cell.decode() for cell in first.tensor_proto.string_val]
    shape = [dim.size for dim in first.tensor_proto.tensor_shape.dim]
    assert (first.step, shape) == (1, [3, 6])
    assert cells[:3] == ["sample_id", "prompt", "answer"]
    assert cells[13] == "    <b>see</b> https://host/x?token=***"  # indented: code, not markup


def test_the_id_of_reports_is_kept(out: Path) -> None:
    first = report_id(out)
    assert report_id(out) == first
    (out / REPORT_ID).write_text("../../x")
    with pytest.raises(ValueError, match="is damaged"):
        report_id(out)


def records_of(path: Path) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log after a header of 7 bytes. Blocks of 32 KiB; one record in several
    pieces is of the types 2, 3, ..., 4.
    """
    content, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        begun += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield begun
            begun = b""


@pytest.mark.slow
def test_wandb_offline_is_one_run_across_resumes(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("API_KEY", "a" * 26 + SECRET), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr(sys, "argv", ["taut", "--hf-token", SECRET])
    config = LogConfig(console=False, wandb="p")
    report(out, config)
    time.sleep(1.1)  # W&B names a directory by the second
    report(out, config, from_step=1)
    from wandb.proto import wandb_internal_pb2 as proto

    found: list[tuple[Any, ...]] = []
    for path in sorted(out.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime):
        for data in records_of(path):
            record = proto.Record.FromString(data)
            if record.HasField("run"):
                found.append(("run", record.run.run_id))
            if record.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append((items["step"], items.get("train/loss", "table")))
    name = (out / REPORT_ID).read_text().strip()
    assert {value for key, value in found if key == "run"} == {name}
    steps = [entry for entry in found if entry[0] != "run"]
    assert steps == [
        *[(1, "table"), (1, 1.0), (2, "table"), (2, 0.5)],
        *[(2, "table"), (2, 0.5), (3, "table"), (3, pytest.approx(1 / 3))],
    ]
    assert SECRET.encode() not in read_all(out)
    assert SECRET not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_trackio_is_one_run_across_resumes(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setenv("TRACKIO_DIR", str(kept))
    pytest.importorskip("trackio")
    config = LogConfig(console=False, trackio="p")
    report(out, config)
    report(out, config, from_step=1)
    (path,) = kept.glob("p*.db")
    with sqlite3.connect(path) as database:
        found = database.execute("select run_name, step, metrics from metrics").fetchall()
    rows = [(name, step, bytes(metrics)) for name, step, metrics in found]
    assert {name for name, _, _ in rows} == {f"run-{(out / REPORT_ID).read_text().strip()}"}
    assert sorted(step for _, step, text in rows if b"train/loss" in text) == [1, 2, 2, 3]
    assert sum(b"What is 2 + 2?" in text for _, _, text in rows) == 4
    assert SECRET.encode() not in read_all(out, kept)


@pytest.mark.parametrize(
    ("name", "module", "cls"),
    [("wandb", "wandb", "WeightsAndBiases"), ("trackio", "trackio", "Trackio")],
)
def test_a_report_that_cannot_be_opened_is_one_line(
    name: str, module: str, cls: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise OSError(f"no login for https://u:{SECRET}@host")

    fake = SimpleNamespace(init=init, Error=ValueError, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.delitem(sys.modules, f"taut_tools.adapters.{name}", raising=False)
    sink = getattr(importlib.import_module(f"taut_tools.adapters.{name}"), cls)
    with pytest.raises(
        ValueError, match=rf"log\.{name}=p: no login .*; expected a project"
    ) as lost:
        sink("p", out, "0" * 8, {})
    assert SECRET not in str(lost.value)


def test_the_example_for_mlflow_is_one_run_across_resumes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLflow's functions as that library documents them."""
    told: list[tuple[Any, ...]] = []
    runs: dict[str, str] = {}

    def search_runs(filter_string: str, output_format: str) -> list[Any]:
        wanted = filter_string.removeprefix("tags.`taut.run_id` = ").strip("'")
        assert output_format == "list"
        return (
            [SimpleNamespace(info=SimpleNamespace(run_id=runs[wanted]))] if wanted in runs else []
        )

    def set_tag(key: str, value: str) -> None:
        if key == "taut.run_id":
            runs[value] = "m1"
        told.append((key, value))

    fake = SimpleNamespace(
        search_runs=search_runs,
        set_tag=set_tag,
        start_run=lambda **names: told.append(("start", names)),
        log_params=lambda values: told.append(("params", values)),
        log_metrics=lambda values, step: told.append((step, values)),
        log_table=lambda data, artifact_file: told.append((artifact_file, data)),
        end_run=lambda: told.append(("ended",)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    path = Path(__file__).parents[4] / "examples" / "mlflow" / "report.py"
    config = LogConfig(console=False, sinks=[f"{path}:MLflow"])
    report(out, config)
    report(out, config, from_step=1)
    assert [e["kind"] for e in read_events(out / "events.jsonl")].count("warning") == 0
    assert [entry[1] for entry in told if entry[0] == "start"] == [
        {"run_name": "run"},
        {"run_id": "m1"},
    ]
    assert [entry[0] for entry in told if isinstance(entry[0], int)] == [1, 2, 2, 3]
    assert (1, {"train/loss": 1.0}) in told
    table = next(data for name, *data in told if name == "samples/step-000001.json")[0]
    assert table["answer"] == ["4", "*5*"]
    assert told[-1] == ("ended",)
    assert SECRET not in repr(told)
