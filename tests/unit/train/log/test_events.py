"""events.jsonl loses no line, is strict JSON, and tells each step once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taut.config import Decision
from taut.errors import DataError, OutputError
from taut.train.log import EventLog, RunLog, read_events
from taut.train.log import events as runlog_events
from taut.train.log.events import Event, newest_first
from taut.train.settings import LogConfig


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_closed = False

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.is_closed = True


def write(path: Path, events: Sequence[dict[str, Any]]) -> None:
    with closing(EventLog(path)) as log:
        for event in events:
            log({"time": 0.0, **event})


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": number, "loss": 1 / number} for number in numbers]


def test_a_line_is_in_the_file_before_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for number in (1, 2):
        log({"kind": "step", "step": number})
        assert path.read_text().count("\n") == number
    log.close()


@pytest.mark.parametrize(
    ("kind", "times"), [("step", 0), ("checkpoint", 1), ("resume", 1), ("end", 1)]
)
def test_what_is_relied_on_is_forced_to_the_disk(
    kind: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write(tmp_path / "events.jsonl", [{"kind": kind}])
    assert len(synced) == times


def test_lines_are_strict_json_and_values_come_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event = {
        "kind": "step",
        "step": np.int64(3),
        "loss": math.nan,
        "grad_norm": np.float32("-inf"),
        "path": tmp_path,
        "decisions": [Decision("dtype", "float32", "é")],
        "more": {"a": (1, 2.5, None, True, math.inf)},
    }
    write(path, [event])
    raw = json.loads(path.read_text(), parse_constant=lambda _: pytest.fail("not strict JSON"))
    assert raw["loss"] == "nan"
    assert raw["more"] == {"a": [1, 2.5, None, True, "inf"]}
    (read,) = read_events(str(path))
    assert math.isnan(read["loss"])
    assert read["grad_norm"] == -math.inf
    assert read["step"] == 3
    assert read["path"] == str(tmp_path)
    assert read["decisions"] == [["dtype", "float32", "é"]]


def test_a_value_json_cannot_hold_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="an event cannot hold a object"):
        write(tmp_path / "events.jsonl", [{"kind": "step", "loss": object()}])


def test_half_a_surrogate_pair_does_not_end_the_run(tmp_path: Path) -> None:
    """The JSON of a server or a tool may have one, and UTF-8 may not."""
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path)) as log:
        log({"kind": "warning", "detail": "a\ud800b \U0001f600"})
    assert read_events(path)[0]["detail"] == "a?b \U0001f600"


def test_a_torn_last_line_is_skipped_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, steps(1, 2))
    whole = path.read_bytes()
    for cut in range(1, len(whole) - whole.index(b"\n") - 1):
        path.write_bytes(whole[:-cut])
        assert [event["step"] for event in read_events(path)] == [1]
    write(path, steps(3))
    assert [event["step"] for event in read_events(path)] == [1, 3]


def test_a_resume_takes_back_the_steps_after_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    evaluation = {"kind": "eval", "step": 3, "loss": 1.0}
    write(path, [{"kind": "start"}, *steps(1, 2, 3), evaluation])
    write(path, [{"kind": "start"}, {"kind": "resume", "from_step": 2}, *steps(3, 4)])
    write(path, [{"kind": "resume", "from_step": 3}, *steps(4)])
    events = read_events(path)
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4]
    assert [event["from_step"] for event in events if event["kind"] == "resume"] == [2, 3]
    assert not [event for event in events if event["kind"] == "eval"]


EVENTS = st.one_of(
    st.builds(dict, kind=st.just("step"), step=st.integers(1, 9), text=st.text(max_size=30)),
    st.builds(dict, kind=st.sampled_from(["eval", "end"]), step=st.integers(0, 9)),
    st.builds(dict, kind=st.just("resume"), from_step=st.integers(0, 9), is_measured=st.booleans()),
    st.just({"kind": "start"}),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=20), st.integers(1, 40), st.sampled_from(["", '{"kind": "st']))
def test_from_the_end_back_the_same_events_are_in_force(
    happened: list[dict[str, Any]], block: int, torn: str
) -> None:
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runlog_events, "BLOCK", block)
        path = Path(place) / "events.jsonl"
        write(path, happened)
        path.write_bytes(path.read_bytes() + torn.encode())
        assert list(newest_first(path))[::-1] == read_events(path)


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"damaged\n" * 10**5)
    write(path, steps(1))
    assert next(newest_first(path))["step"] == 1
    with pytest.raises(DataError, match=r"no event at .*, line 2 from its end"):
        list(newest_first(path))


@pytest.mark.parametrize("line", ["half", "[]", "3", '{"step": 1}', '{"kind": "x"}', "[" * 10**5])
def test_a_line_that_is_no_event_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, steps(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"events\.jsonl:2; expected a JSON object"):
        read_events(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "step", "step": "1"}', "found a step that is no integer"),
        ('{"kind": "resume", "from_step": null}', "found a step that is no integer"),
        ('{"kind": "resume"}', "found a resume without from_step"),
    ],
)
def test_a_step_that_is_none_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        read_events(path)


def test_places_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_events(tmp_path / "none")
    with pytest.raises(OutputError, match="cannot write"):
        EventLog(tmp_path / "none" / "events.jsonl")


def test_a_full_disk_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    log = EventLog(tmp_path / "events.jsonl")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        log({"kind": "end"})
    log.close()


def test_every_sink_gets_the_same_events_and_is_closed() -> None:
    first, second = Kept(), Kept()
    with RunLog([first, second]) as log:
        log.emit("step", step=1, loss=2.0)
    assert first.events == second.events
    assert first.events[0]["kind"] == "step"
    assert first.events[0]["time"] > 0
    assert first.is_closed
    assert second.is_closed
    with pytest.raises(AssertionError, match="unknown kind"):
        log.emit("stepp")  # type: ignore[arg-type]


def test_all_sinks_are_closed_whichever_fails() -> None:
    class Failing(Kept):
        def close(self) -> None:
            raise OutputError("full")

    last = Kept()
    with pytest.raises(OutputError, match="full"):
        RunLog([Failing(), last]).close()
    first = Kept()
    with pytest.raises(OutputError, match="full"):
        RunLog([first, Failing()]).close()
    assert first.is_closed
    assert last.is_closed


def test_ranks_that_do_not_write_write_nothing(tmp_path: Path) -> None:
    with RunLog().open(tmp_path, LogConfig(tensorboard=True), is_writer=False) as log:
        log.emit("step", step=1)
    assert not list(tmp_path.iterdir())


def test_a_record_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("no line of a run")
    (tmp_path / "events.jsonl").symlink_to(precious)
    with pytest.raises(OutputError, match=r"cannot write .*events\.jsonl: it is a symbolic link"):
        RunLog().open(tmp_path, LogConfig(console=False))
    assert precious.read_text() == "no line of a run"


def test_a_record_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    with pytest.raises(OutputError, match="it is not a regular file"):
        EventLog(path)
    for read in (read_events, lambda path: next(newest_first(path))):
        with pytest.raises(DataError, match="it is a FIFO; expected a regular file"):
            read(path)


@pytest.mark.parametrize("lost", ["deleted", "moved"])
def test_a_record_that_is_lost_during_the_run_is_written_again_and_told(
    lost: str, tmp_path: Path
) -> None:
    path, shown = tmp_path / "events.jsonl", Kept()
    with RunLog([shown, EventLog(path)]) as log:
        log.emit("step", step=1)
        log.emit("step", step=2)
        if lost == "deleted":
            path.unlink()
        else:
            path.rename(tmp_path / "moved.jsonl")
        log.emit("step", step=3)
        log.emit("step", step=4)
    events = read_events(path)
    assert [event.get("step") for event in events] == [1, 2, None, 3, 4]
    assert events[2]["name"] == "log"
    assert (
        "was deleted or moved during the run: written again, with the 2 lines"
        in events[2]["detail"]
    )
    assert shown.events == events


def test_a_record_that_another_file_replaces_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = RunLog([EventLog(path)])
    log.emit("step", step=1)
    (tmp_path / "edited").write_text(path.read_text())
    (tmp_path / "edited").replace(path)
    with pytest.raises(OutputError, match="was replaced by another file during the run"):
        log.emit("step", step=2)
    log.close()


def test_a_record_whose_directory_is_gone_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    log = RunLog([EventLog(out / "events.jsonl")])
    log.emit("step", step=1)
    (out / "events.jsonl").unlink()
    out.rmdir()
    with pytest.raises(OutputError, match=r"cannot write .*No such file or directory"):
        log.emit("step", step=2)
    log.close()
