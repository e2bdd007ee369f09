"""``taut check --cluster``: a row a question from the first rank, JSON, an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.chat_runs import QUIET, chats, save_model, words_of, write_rows
from tests.helpers.forked_processes import run

from taut.checks import OF_NODES, cluster
from taut.cli import main
from taut.commands.check import SCHEMA


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("run")
    model, data = save_model(place / "model"), write_rows(place / "a.jsonl", chats(3))
    keys = {"model": model, "data.train": data, "out": place / "out", "data.cache": place / "cache"}
    return words_of({**QUIET, **keys})


def test_alone_it_says_that_it_sees_one_process(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--cluster", *words]) == 0
    out = capsys.readouterr().out
    assert "one process, on" in out and "start it on all of them with torchrun" in " ".join(
        out.split()
    )
    assert [name for name in OF_NODES if name not in out] == []
    assert out.splitlines()[-1].startswith(
        "2 passed, 9 not asked for this run (7: there is one node"
    )


def test_a_failure_is_an_exit_code_and_json_has_all(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ROOM", 2**80)
    assert main(["check", "--cluster", "--json", *words, "checks.skip=[cluster.clocks]"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["outcome"]) == (SCHEMA, "failed")
    by_name = {one["name"]: one for one in answer["checks"]}
    assert list(by_name) == list(OF_NODES)
    assert by_name["cluster.disk"]["outcome"] == "failed"
    assert by_name["cluster.clocks"]["says"] == "left out by name (checks.skip)"


def test_two_ranks_print_one_table(words: list[str]) -> None:
    done = run("-m", "taut", "check", "--cluster", *words, num_ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("cluster.all_reduce") == 1
    assert "2 processes on 1 node" in done.stdout
    assert "all sums are exact" in done.stdout


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["run.toml"], "run.toml"),
        (["stepz=3"], "unknown key 'stepz'"),
        (["--full"], "unknown key 'full'"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], more: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--cluster", *more, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("taut: error: ") and problem in line


def test_what_the_model_is_missing_for_is_told(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone nothing is compared, so no model is needed either."""
    others = [word for word in words if not word.startswith("model=")]
    assert main(["check", "--cluster", f"model={tmp_path / 'none'}", *others]) == 0
    assert "the fullest disk has room" in capsys.readouterr().out
