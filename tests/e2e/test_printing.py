"""A stdout that cannot take what is printed: the run trains, saves and ends as it would have, and its log says so."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, column, events, save_model, words_of
from tests.helpers.forked_processes import run
from tests.helpers.slow_cases import slow_except

PROGRAM = """\
import os, sys
from taut import cli

def broken_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing

kind = os.environ["STDOUT"]
if kind == "full":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
elif kind == "pipe":
    os.dup2(broken_pipe(), 1)
elif kind == "closed":
    sys.stdout.close()
elif kind == "none":
    sys.stdout = None
else:
    sys.stdout.reconfigure(encoding=kind)  # as PYTHONIOENCODING does as an interpreter starts
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose name is in Greek and Russian letters: the start of a run prints it."""
    return save_model(tmp_path_factory.mktemp("model") / "μοντέλο-модель")


def keys(model: Path, train: Path, out: Path) -> dict[str, Any]:
    return {
        **QUIET,
        "dtype": "float32",
        "log.console": True,
        "log.tensorboard": True,
        "stop_check.prompts": 2,
        "model": model,
        "data.train": train,
        "out": out,
        "steps": 2,
    }


@pytest.mark.parametrize("encoding", slow_except(["ascii"], ["latin-1", "ascii"]))
def test_letters_that_stdout_lacks_are_escaped(
    encoding: str, program: Path, model: Path, train: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run(program, "sft", *words_of(keys(model, train, out)), STDOUT=encoding)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert r"\u043c\u043e\u0434\u0435\u043b\u044c" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("outcome finished")
    assert (out / "model" / "config.json").is_file()
    assert not [event for event in events(out, "warning") if event["name"] == "log"]


FULL = "full", os.strerror(errno.ENOSPC), "No space left on device; what came after is lost\n"
CLOSED = (
    "closed",
    "it is closed",
    "stdout cannot be written: it is closed; what came after is lost\n",
)


@pytest.mark.parametrize(
    ("kind", "reason", "stderr"),
    slow_except([CLOSED], [FULL, ("pipe", os.strerror(errno.EPIPE), ""), CLOSED]),
)
def test_a_stdout_that_fails_is_noted_once_and_the_run_goes_on(
    kind: str, reason: str, stderr: str, program: Path, model: Path, train: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run(program, "sft", *words_of(keys(model, train, out)), STDOUT=kind)
    assert (done.returncode, done.stdout) == (0, "")
    said = [line for line in done.stderr.splitlines(keepends=True) if "may not stop" not in line]
    assert "".join(said).endswith(stderr)
    assert len(said) == bool(stderr)
    (warning,) = (event for event in events(out, "warning") if event["name"] == "log")
    assert warning["detail"] == f"stdout cannot be written: {reason}; nothing more is printed"
    assert column(out, "step") == [1, 2]
    assert events(out, "end")[-1]["outcome"] == "finished"
    assert (out / "model" / "config.json").is_file()


def test_a_run_whose_stdout_failed_is_finished(
    program: Path, model: Path, train: Path, tmp_path: Path
) -> None:
    """No event follows the last one: the same command with resume=true has nothing to do."""
    out = tmp_path / "out"
    asked = keys(model, train, out)
    run(program, "sft", *words_of(asked), STDOUT="pipe")
    again = run(program, "sft", *words_of({**asked, "resume": True}), STDOUT="utf-8")
    assert again.stdout.startswith(f"{out} is finished: 2 steps")


@pytest.mark.parametrize("kind", ["full", "pipe", "closed", "none", "ascii"])
@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["runs", "."], 0), (["runs", ".", "--json"], 0), (["sft", "sed=1"], 2)],
)
def test_a_command_ends_with_its_usual_code(
    words: list[str], code: int, kind: str, program: Path
) -> None:
    done = run(program, *words, STDOUT=kind)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert (f"{os.strerror(errno.ENOSPC)}" in done.stderr) == (kind == "full" and code == 0)


@pytest.mark.skipif(shutil.which("head") is None, reason="no head")
def test_a_reader_that_leaves_is_no_error() -> None:
    """The interpreter itself flushes stdout as it ends."""
    from subprocess import run as start

    line = f"{shlex.quote(sys.executable)} -m taut --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = start(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""
