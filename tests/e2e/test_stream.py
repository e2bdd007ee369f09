"""Training on a stream: files that appear while a run trains, or an iterable.

What a step has depends on the rows, the seed and the step alone: not on when files come, on ranks or on a resume.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from tests.helpers.chat_runs import QUIET, chats, column, events, write_rows
from tests.helpers.forked_processes import run as run_program
from tests.helpers.forked_processes import start
from tests.helpers.kill_points import Operation, cache_of, point
from tests.helpers.killed_runs import kill, resume, whole
from tests.helpers.run_directories import Left, left, require_equal
from tests.helpers.slow_cases import slow_except

import taut
from taut.data import stream
from taut.errors import ConfigError, DataError, StreamError, UserCodeError
from taut.methods import sources

ROWS = chats(54)
FILES = {f"{number:02d}.jsonl": ROWS[9 * number : 9 * number + 9] for number in range(6)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))


def write(folder: Path, *names: str) -> Path:
    """The files of these names, all of them by default, as a process that is done with each would leave them."""
    folder.mkdir(exist_ok=True)
    for name in names or FILES:
        partial = folder / f"{name}.tmp"
        write_rows(partial, FILES[name]).rename(folder / name)
    return folder


def keys_of(model: Path, train: Any, **more: Any) -> dict[str, Any]:
    """A run of 7 steps of 5 samples, in windows of 8 rows."""
    streaming = {"data.streaming": True} if isinstance(train, Path) else {}
    return {
        **QUIET,
        **streaming,
        "model": str(model),
        "data.train": str(train) if isinstance(train, Path) else train,
        "data.streaming_window": 8,
        "data.streaming_settle": 0.0,
        "steps": 7,
        "batch.samples_per_step": 5,
        "batch.tokens_per_microbatch": 120,
        **more,
    }


def plain(model: Path, train: Any, **more: Any) -> dict[str, Any]:
    return {**keys_of(model, train, **more), "check": "off", "contract.prompts": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files at once."""
    return write(tmp_path_factory.mktemp("stream") / "incoming")


class Whole(NamedTuple):
    """An uninterrupted run on files that are all there."""

    keys: dict[str, Any]
    out: Path
    operations: list[Operation]
    left: Left


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: Path, folder: Path) -> Whole:
    keys = keys_of(model, folder)
    keys |= {"checkpoint.every": 3, "contract.prompts": 2, "contract.max_new_tokens": 8}
    out = tmp_path_factory.mktemp("whole") / "out"
    return Whole(keys, out, whole(out, keys), left(out))


def lines_of(out: Path) -> list[list[str]]:
    """The samples of each step, by file and line."""
    return [[Path(name).name for name in names] for names in column(out, "sample_ids")]


def test_each_step_has_the_next_rows_and_each_row_comes_once(uninterrupted: Whole) -> None:
    seen = [name for names in lines_of(uninterrupted.out) for name in names]
    rows = [f"{file}:{line}" for file in FILES for line in range(1, 10)]
    assert len(seen) == 35
    for first in range(0, 32, 8):
        window = seen[first : first + 8]
        assert sorted(window) == sorted(rows[first : first + 8]), "the rows of a window"
        assert window != rows[first : first + 8], "in another order"


def test_files_that_come_during_the_run_give_the_steps_of_files_that_were_there(
    uninterrupted: Whole, model: Path, tmp_path: Path
) -> None:
    growing = write(tmp_path / "incoming", "00.jsonl")

    def grow() -> None:
        for name in list(FILES)[1:]:
            time.sleep(0.3)
            write(growing, name)

    writer = threading.Thread(target=grow)
    writer.start()
    taut.sft(out=str(tmp_path / "out"), **plain(model, growing))
    writer.join()
    assert lines_of(tmp_path / "out") == lines_of(uninterrupted.out)
    assert column(tmp_path / "out", "loss") == column(uninterrupted.out, "loss")


@pytest.mark.parametrize(
    ("operation", "within", "share"),
    slow_except(
        [("backward", "", 0.6), ("cache", ".window.partial", 0.6)],
        [
            ("backward", "", 0.3),
            ("backward", "", 0.6),
            ("checkpoint", "step-000006", 0.8),
            ("cache", ".window.partial", 0.6),
            ("cache", ".window.partial/ids.npy", 1.0),
            ("cache", "first.jsonl", 1.0),
            ("cache", "record.json", 0.5),
            ("export", "", 0.4),
        ],
    ),
)
def test_killed_and_resumed_equals_uninterrupted(
    operation: str, within: str, share: float, uninterrupted: Whole, tmp_path: Path
) -> None:
    out, keys = tmp_path / "out", uninterrupted.keys
    kill(out, keys, point(uninterrupted.operations, operation, share, within))
    resume(out, keys)
    require_equal(out, uninterrupted.left)


PROGRAM = (
    "import json, sys; from tests.helpers.killed_runs import train; train(json.loads(sys.argv[1]))"
)


def test_killed_while_it_waits(uninterrupted: Whole, tmp_path: Path) -> None:
    """After three steps, for rows of the fourth; a file that it has read to its end is gone when it goes on."""
    out, incoming = tmp_path / "out", tmp_path / "incoming"
    write(incoming, "00.jsonl", "01.jsonl")
    keys = {**uninterrupted.keys, "data.train": str(incoming), "out": str(out), "resume": True}
    keys |= {"check": "off", "contract.prompts": 0, "checkpoint.every": 1}
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    process = start(tmp_path, script, json.dumps(keys))
    deadline = time.monotonic() + 300
    while not (out / "checkpoints" / "latest").is_file() or len(column(out, "step")) < 3:
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.1)
    time.sleep(1.0)
    assert len(column(out, "step")) == 3, "16 rows are 3 steps of 5"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    (incoming / "00.jsonl").unlink()
    write(incoming, *list(FILES)[2:])
    run_program(script, json.dumps(keys))
    assert column(out, "loss") == column(uninterrupted.out, "loss")
    assert lines_of(out) == lines_of(uninterrupted.out)


def test_a_signal_ends_a_run_that_waits(model: Path, tmp_path: Path) -> None:
    incoming = write(tmp_path / "incoming", "00.jsonl", "01.jsonl")
    keys = plain(model, incoming, out=str(tmp_path / "out"))
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    process = start(tmp_path, script, json.dumps(keys))
    deadline = time.monotonic() + 300
    while (
        not (tmp_path / "out" / "events.jsonl").is_file()
        or len(column(tmp_path / "out", "step")) < 3
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(120)
    (end,) = events(tmp_path / "out", "end")
    assert end["outcome"] == "interrupted"
    assert "the state after step 3 is in" in end["reason"]


@pytest.mark.slow
def test_two_ranks_see_the_rows_of_one(uninterrupted: Whole, tmp_path: Path) -> None:
    """Killed on two ranks, and gone on with on two."""
    out = tmp_path / "out"
    operations = whole(tmp_path / "whole", uninterrupted.keys, num_ranks=2)
    assert lines_of(tmp_path / "whole") == lines_of(uninterrupted.out)
    assert column(tmp_path / "whole", "loss") == pytest.approx(
        column(uninterrupted.out, "loss"), rel=1e-12
    )
    kill(out, uninterrupted.keys, point(operations, "backward", 0.7), num_ranks=2)
    resume(out, uninterrupted.keys, num_ranks=2)
    require_equal(out, left(tmp_path / "whole"))


def test_two_ranks_wait_together(uninterrupted: Whole, model: Path, tmp_path: Path) -> None:
    growing = write(tmp_path / "incoming", "00.jsonl")

    def grow() -> None:
        for name in list(FILES)[1:]:
            time.sleep(1.0)
            write(growing, name)

    writer = threading.Thread(target=grow)
    writer.start()
    out = tmp_path / "out"
    whole(out, plain(model, growing), num_ranks=2)
    writer.join()
    assert lines_of(out) == lines_of(uninterrupted.out)


# -- methods


def pairs(num_rows: int) -> list[dict[str, Any]]:
    answers = chats(num_rows, seed=5), chats(num_rows, seed=6)
    return [
        {
            "prompt": good["messages"][:2],
            "chosen": good["messages"][2:],
            "rejected": bad["messages"][2:],
        }
        for good, bad in zip(*answers, strict=True)
    ]


@pytest.mark.parametrize("name", slow_except(["dpo"], ["dpo", "reward", "kto", "simpo"]))
def test_preferences_come_from_a_stream(name: str, model: Path, tmp_path: Path) -> None:
    """The rows of a step are those of a run without shuffle on the same rows as files: the same losses. KTO cuts a
    prompt with another's answer at data.max_length, where from files it does at the longest sample.
    """
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    rows = pairs(24)
    for number in range(3):
        write_rows(incoming / f"{number}.jsonl", rows[8 * number : 8 * number + 8])
    common = {"batch.shuffle": False, "steps": 4, "method": name}
    keys = plain(model, incoming, **common)
    train = getattr(taut, name)
    train(out=str(tmp_path / "stream"), **keys)
    fixed = {key: value for key, value in keys.items() if not key.startswith("data.streaming")}
    train(out=str(tmp_path / "files"), **fixed)
    assert column(tmp_path / "stream", "sample_ids") == column(tmp_path / "files", "sample_ids")
    count = 2 if name == "kto" else 4  # none is cut in its first steps
    losses = [column(tmp_path / kind, "loss")[:count] for kind in ("stream", "files")]
    assert losses[0] == losses[1]


# -- iterables


class Counting:
    """Rows that count how often they are drawn."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.drawn, self.begun = rows, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        for row in self.rows:
            self.drawn += 1
            yield row


class Seekable(Counting):
    """Rows that can begin at a position."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = self.rows[state["drawn"] :]


class Skipping(Counting):
    """Rows of which the first can be left out."""

    def skip(self, count: int) -> Skipping:
        return Skipping(self.rows[count:])


def test_rows_of_an_iterable_are_those_of_files(
    uninterrupted: Whole, model: Path, tmp_path: Path
) -> None:
    taut.sft(out=str(tmp_path / "out"), **plain(model, (row for row in ROWS)))
    assert column(tmp_path / "out", "loss") == column(uninterrupted.out, "loss")
    assert column(tmp_path / "out", "sample_ids")[0][0].startswith("rows:")


@pytest.mark.parametrize(
    "kind", [Counting, Seekable, Skipping, datasets.IterableDataset], ids=lambda kind: kind.__name__
)
def test_an_iterable_goes_on_where_it_was(
    kind: Any, uninterrupted: Whole, model: Path, tmp_path: Path
) -> None:
    """Stopped at its fourth step by a row that cannot be read, and resumed with the rows as they should be."""

    def given(rows: list[Any]) -> Any:
        if kind is datasets.IterableDataset:
            return datasets.Dataset.from_list(rows).to_iterable_dataset()
        return kind(rows)

    broken = [*ROWS[:20], {"messages": []}, *ROWS[21:]]
    if kind is datasets.IterableDataset:
        broken = [*ROWS[:20], {"messages": [{"role": "user", "content": "no answer"}]}, *ROWS[21:]]
    out = str(tmp_path / "out")
    with pytest.raises(StreamError, match="rows:21") as caught:
        taut.sft(out=out, **plain(model, given(broken)))
    assert "the state after step 3 is in" in str(caught.value)
    rows = given(ROWS)
    taut.sft(out=out, resume=True, **plain(model, rows))
    assert column(tmp_path / "out", "loss") == column(uninterrupted.out, "loss")
    if kind is Counting:
        assert rows.begun == 1
        assert rows.drawn >= 35


def test_other_rows_than_those_that_were_drawn_are_refused(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(
        StreamError, match="the stream ended after 20 samples; step 5 needs 5 samples"
    ):
        taut.sft(out=out, **plain(model, iter(ROWS[:20])))
    with pytest.raises(
        DataError, match="first 20 rows of the iterable are not those that were read"
    ):
        taut.sft(out=out, resume=True, **plain(model, iter(ROWS[1:])))
    with pytest.raises(DataError, match="the iterable ends after 3 rows, and 20 were read"):
        taut.sft(out=out, resume=True, **plain(model, iter(ROWS[:3])))


def test_a_stream_that_ends_early_can_end_the_run(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(
        StreamError, match="resume=true steps=4 ends the run here; the state after step 4"
    ):
        taut.sft(out=out, **plain(model, iter(ROWS[:20])))
    keys = plain(model, iter(ROWS[:20]))
    result = taut.sft(out=out, resume=True, **{**keys, "steps": 4})
    assert (result.steps, (tmp_path / "out" / "model").is_dir()) == (4, True)


def test_an_iterable_that_raises(model: Path, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ROWS[:3]
        raise KeyError("no more")

    with pytest.raises(
        UserCodeError, match=r"rows:4 of data.train: the iterable raised KeyError: 'no more'"
    ):
        taut.sft(out=str(tmp_path / "out"), **plain(model, rows()))
    assert not (tmp_path / "out").exists()


# -- refusals


def test_a_file_without_a_column_of_the_others(model: Path, tmp_path: Path) -> None:
    """The sixth file has another schema: what comes before it is trained on, and the state is saved."""
    incoming = write(tmp_path / "incoming", *list(FILES)[:2])
    write_rows(incoming / "02.jsonl", [{"question": "how", "reply": "so"}])
    with pytest.raises(StreamError, match=r"02\.jsonl:1: .*the state after step 3 is in"):
        taut.sft(out=str(tmp_path / "out"), **plain(model, incoming))
    write(incoming, "02.jsonl", "03.jsonl", "04.jsonl")
    result = taut.sft(out=str(tmp_path / "out"), resume=True, **plain(model, incoming))
    assert result.steps == 7


def test_rows_that_changed_are_refused_on_resume(uninterrupted: Whole, tmp_path: Path) -> None:
    """With its record gone the stream is read again from the start: its rows have to be the same."""
    out = tmp_path / "out"
    kill(out, uninterrupted.keys, point(uninterrupted.operations, "update", 0.9))
    shutil.rmtree(cache_of(out))
    changed = write(tmp_path / "incoming")
    write_rows(changed / "01.jsonl", chats(9, seed=9))
    keys = {**uninterrupted.keys, "out": str(out), "resume": True}
    with pytest.raises((StreamError, ConfigError), match=r"data\.train|other"):
        taut.sft(**{**keys, "data.train": str(changed)})


def test_a_record_that_is_lost_is_made_again(uninterrupted: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill(out, uninterrupted.keys, point(uninterrupted.operations, "update", 0.9))
    shutil.rmtree(cache_of(out))
    resume(out, uninterrupted.keys)
    require_equal(out, uninterrupted.left)


def test_no_row_in_time(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before it is too long, also where the first look comes after that."""
    monkeypatch.setattr(sources, "TELL_AFTER", 0.5)
    monkeypatch.setattr(stream, "POLL", 2.0)
    incoming = write(tmp_path / "incoming", "00.jsonl", "01.jsonl")
    keys = plain(model, incoming, **{"data.streaming_timeout": 1.5})
    with pytest.raises(
        StreamError, match=r"no new row for \d+ seconds .*; step 4 needs 4 samples more"
    ):
        taut.sft(out=str(tmp_path / "out"), **keys)
    (warning,) = [
        event for event in events(tmp_path / "out", "warning") if event["name"] == "stream"
    ]
    assert "step 4 waits for rows of" in warning["detail"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"steps": None}, "data.streaming=true: .*; expected steps; set it"),
        ({"batch.group_prefixes": True}, "batch.group_prefixes=true"),
        ({"data.workers": 2}, "data.workers=2"),
        ({"data.train": ["a", "b"]}, "data.streaming=true with data.train=.* 2 sources are given"),
        ({"data.train": [{"path": "a", "weight": 2}]}, "weight is set"),
        ({"data.train": [{"path": "a", "limit": 2}]}, "limit is set"),
        ({"data.train": "s3://bucket/a"}, "a directory of this machine"),
        ({"data.train": "nowhere"}, "found no directory nowhere"),
        (
            {"data.streaming": False},
            "data.streaming_window=.*: nothing reads it; expected data.streaming=true",
        ),
    ],
)
def test_settings_that_a_stream_cannot_have(
    more: dict[str, Any], message: str, model: Path, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        taut.sft(out=str(tmp_path / "out"), **plain(model, folder, **more))
    assert not (tmp_path / "out").exists()


def test_methods_and_files_that_need_all_rows(model: Path, folder: Path, tmp_path: Path) -> None:
    keys = plain(model, folder, out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="method=grpo: all prompts are read before the first"):
        taut.grpo(**keys, rewards="length")
    with pytest.raises(
        ConfigError, match=r"reference\.file=.*: the file has the logprobs of all rows"
    ):
        taut.dpo(**keys, reference={"file": str(tmp_path / "logps")})


# -- other commands


def test_show_plan_and_check_look_at_the_first_rows(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of(model, folder)
    taut.show(**keys)
    shown = capsys.readouterr().out
    assert "8 rows" in shown
    assert "00.jsonl:1" in shown
    found = taut.check(**keys)
    assert not found.failures
    assert not (tmp_path / "cache" / "streams").exists()
    (failure,) = taut.check(**keys_of(model, iter(ROWS))).failures
    assert failure.name == "data.rows"
    assert "would be gone from it" in failure.finding.says


def test_tokenize_refuses_a_stream(model: Path, folder: Path) -> None:
    from taut.commands.tokenize import tokenize
    from taut.config import from_mapping
    from taut.methods.method import RunConfig

    with pytest.raises(ConfigError, match="which a run tokenizes as its rows come"):
        tokenize(from_mapping(RunConfig, keys_of(model, folder)))


def test_a_run_records_alone(model: Path, folder: Path, tmp_path: Path) -> None:
    """Records of runs that are gone are removed; one that another process writes is not touched."""
    streams = tmp_path / "cache" / "streams"
    taut.sft(out=str(tmp_path / "a"), **plain(model, folder))
    (first,) = streams.iterdir()
    shutil.rmtree(tmp_path / "a")
    taut.sft(out=str(tmp_path / "b"), **plain(model, folder))
    assert not first.exists()
    (second,) = streams.iterdir()
    from taut.data.store.cache import locked

    lock = locked(second)
    assert lock is not None
    with pytest.raises(taut.errors.OutputError, match="another process records the stream"):
        taut.sft(out=str(tmp_path / "b"), overwrite=True, **plain(model, folder))
    os.close(lock)
