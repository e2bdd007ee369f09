"""The output directory is refused or claimed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from taut.errors import OutputError
from taut.io import files
from taut.train import run_dir
from taut.train.run_dir import MARK, Lock, claim, complete, owner, require_usable


def usable(out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    require_usable(out, resume=resume, overwrite=overwrite)


def run_in(out: Path) -> Path:
    """``out`` as a finished run leaves it."""
    claim(out, {"seed": 1}, overwrite=False)
    (out / "model").mkdir()
    (out / "model" / "weights").write_text("old")
    return out


def test_a_new_or_an_empty_directory_is_usable_and_looking_writes_nothing(tmp_path: Path) -> None:
    usable(tmp_path / "a" / "b" / "c")
    (tmp_path / "empty").mkdir()
    usable(tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_run_is_refused_unless_told(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    with pytest.raises(
        OutputError, match=r"exists and is not empty; .*resume=true .*overwrite=true"
    ):
        usable(out)
    usable(out, resume=True)
    usable(out, overwrite=True)
    with pytest.raises(OutputError, match="contradict each other"):
        usable(out, resume=True, overwrite=True)


def test_only_runs_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=f"not a taut run \\(no {re.escape(MARK)}\\)"):
        usable(tmp_path, overwrite=True)


def test_what_the_run_reads_is_not_overwritten(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    (tmp_path / "link").symlink_to(out)
    for read in (out / "model", out, tmp_path / "link" / "model", out / "best" / "old.jsonl"):
        with pytest.raises(OutputError, match=r"would delete .*; name another out"):
            require_usable(out, resume=False, overwrite=True, inputs=["org/name", str(read)])
    beside = [str(tmp_path / "run2" / "model"), "org/name", str(out / "notes.jsonl")]
    require_usable(out, resume=False, overwrite=True, inputs=beside)
    require_usable(out, resume=True, overwrite=False, inputs=[str(out / "model")])


@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_a_file_in_the_way_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"out=.*/file.* is a file"):
        usable(Path(f"{tmp_path}/file{below}"))


def test_a_place_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(
        OutputError, match=f"no permission in {re.escape(str(tmp_path))}; name another"
    ):
        usable(tmp_path / "run")


def test_claiming_writes_the_configuration_and_nothing_half(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    claim(out, {"seed": 1}, overwrite=False)
    assert json.loads((out / MARK).read_text()) == {"seed": 1}
    assert [path.name for path in out.iterdir()] == [MARK]


def test_claiming_keeps_what_is_resumed_and_empties_what_is_overwritten(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    claim(out, {"seed": 2}, overwrite=False)
    assert (out / "model" / "weights").read_text() == "old"
    assert json.loads((out / MARK).read_text()) == {"seed": 2}
    (out / "notes.txt").write_text("mine")
    claim(out, {"seed": 3}, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", MARK]


def test_a_directory_that_a_run_killed_at_its_start_left_is_as_good_as_empty(
    tmp_path: Path,
) -> None:
    (tmp_path / ".lock").write_text("process 1 on host")
    (tmp_path / f".{MARK}.partial").write_text("{")
    usable(tmp_path, resume=True)
    usable(tmp_path)
    claim(tmp_path, {}, overwrite=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", MARK]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match="resume=true goes on with only runs"):
        usable(tmp_path / "other", resume=True)


def test_claiming_puts_back_what_was_about_to_be_replaced(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    (out / "model").rename(out / ".model.old")
    (out / ".model.partial").mkdir()
    claim(out, {}, overwrite=False)
    assert (out / "model" / "weights").read_text() == "old"
    assert sorted(path.name for path in out.iterdir()) == ["model", MARK]


NAMES = (
    *("checkpoints", "checkpoints/step-000002", "checkpoints/latest", "model", "model/x.json"),
    *("adapter", "best", "critic", "events.jsonl", "tokens", "tokens/rank-00000", "rollouts"),
    *("rollouts/000001.arrows", "report_id", "tensorboard", "wandb"),
)


@pytest.mark.parametrize("is_there", [True, False], ids=["to a place", "to nothing"])
@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_a_run_is_refused_and_not_followed(
    name: str, is_there: bool, tmp_path: Path
) -> None:
    out, secret = run_in(tmp_path / "run"), tmp_path / "elsewhere"
    if is_there:
        (secret / "deep").mkdir(parents=True)
        (secret / "deep" / "key").write_text("mine")
    (out / name).parent.mkdir(exist_ok=True)
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).symlink_to(secret)
    with pytest.raises(OutputError, match=r"is a link to .*elsewhere, outside of .*; expected"):
        usable(out, resume=True)
    usable(out, overwrite=True)
    claim(out, {}, overwrite=True)  # the link goes, what it leads to stays
    assert not os.path.lexists(out / name)
    assert secret.exists() == is_there
    assert not is_there or (secret / "deep" / "key").read_text() == "mine"


def test_a_link_within_a_run_and_one_to_the_run_are_taken(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    (out / "wandb").mkdir()
    (out / "wandb" / "latest").symlink_to("run-1")
    (out / "data").symlink_to(tmp_path)  # no file of the run's
    (tmp_path / "latest").symlink_to(out)
    usable(tmp_path / "latest", resume=True)


@pytest.mark.parametrize("end", ["old", "partial", "gone.partial"])
@pytest.mark.parametrize("name", ["checkpoints", "model", "rollouts"])
def test_what_a_killed_writer_left_is_no_link(name: str, end: str, tmp_path: Path) -> None:
    out, secret = run_in(tmp_path / "run"), tmp_path / "elsewhere"
    secret.mkdir()
    (secret / "key").write_text("mine")
    shutil.rmtree(out / name, ignore_errors=True)
    (out / f".{name}.{end}").symlink_to(secret)
    claim(out, {}, overwrite=False)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        {"model", MARK} - ({"model"} if name == "model" else set())
    )
    (out / f".{name}.{end}").symlink_to(secret)  # planted while the run goes on
    with files.replacing_directory(out / name) as partial:
        (partial / "file").write_text("new")
    files.remove_directory(out / name)
    assert [path.name for path in secret.iterdir()] == ["key"]


HOLDER = """
import sys
from pathlib import Path
from taut.train.run_dir import Lock
with Lock(Path(sys.argv[1])) as lock:
    lock.take()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_keeps_others_out_until_its_process_is_gone_however_it_goes(tmp_path: Path) -> None:
    assert owner(tmp_path) is None
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert owner(tmp_path) == f"process {holder.pid} on {socket.gethostname()}"
        with (
            Lock(tmp_path) as lock,
            pytest.raises(OutputError, match=rf"is being written by process {holder.pid} on"),
        ):
            lock.take()
    finally:
        holder.kill()
        holder.communicate()
    assert owner(tmp_path) is None
    with Lock(tmp_path) as lock:
        lock.take()
        lock.take()
        assert owner(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
    assert (tmp_path / ".lock").read_text() == ""


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with Lock(tmp_path) as lock:
        lock.take()
        assert lock.trouble is not None
        assert "cannot be locked (No locks available)" in lock.trouble


def test_complete_checkpoints_are_those_with_a_name_and_their_notes(tmp_path: Path) -> None:
    names = ["step-000200", "step-999999", "step-1000000"]
    for name in [*reversed(names), "damaged-step-000300-1", ".step-000400.partial", "step-x"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text("{}")
    (tmp_path / "step-000500").mkdir()
    assert [path.name for path in complete(tmp_path)] == names


def test_what_cannot_be_claimed_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OutputError, match=r"out=.* cannot be written: .*; see to that, or name another"
    ):
        claim(tmp_path / "file" / "run", {}, overwrite=False)


@pytest.mark.parametrize("number", range(4))
def test_a_run_half_overwritten_can_be_overwritten(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run_in(tmp_path / "run")
    (out / "events.jsonl").write_text("")
    (out / "checkpoints" / "step-000002").mkdir(parents=True)
    real, calls = run_dir._remove, []

    def remove(path: Path) -> None:
        if path.exists():
            calls.append(path.name)
        if len(calls) > number:
            raise SystemExit
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(run_dir, "_remove", remove)
        with pytest.raises(SystemExit):
            claim(out, {"seed": 2}, overwrite=True)
    assert len(calls) == number + 1
    usable(out, overwrite=True)
    usable(out, resume=True)
    claim(out, {"seed": 3}, overwrite=True)
    assert [path.name for path in out.iterdir()] == [MARK]


@pytest.mark.parametrize("kind", ["a symbolic link", "not a regular file"])
def test_a_lock_that_is_no_file_is_neither_followed_nor_waited_for(
    kind: str, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    out = tmp_path / "out"
    out.mkdir()
    if kind == "a symbolic link":
        (out / ".lock").symlink_to(precious)
    else:
        os.mkfifo(out / ".lock")
    assert owner(out) is None
    with Lock(out) as lock, pytest.raises(OutputError, match=rf"\.lock: it is {kind}; see to that"):
        lock.take()
    assert precious.read_text() == "text"
