"""Several ranks of which one fails: it alone says why, the others end quietly with its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.chat_runs import QUIET, words_of
from tests.forked_processes import LIMIT, start, worlds
from torch.distributed import TCPStore

PROGRAM = """\
import os, sys
import taut.methods.method
from taut.cli import main

def broken(*_, **__):
    raise KeyError("a mistake of the program")

if os.environ["RANK"] == "0" and os.environ.get("BREAKS"):
    taut.methods.method.load_dataset = broken
sys.exit(main())
"""


def ranks(words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The exit code of each rank, and what it prints on stderr. None is told to end, as torchrun would.

    The ranks meet in a store that outlives them, as torchrun's does.
    """
    (place / "program.py").write_text(PROGRAM)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    started = []
    for world in worlds(2):
        told = {
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_ERROR_FILE": f"{place}/{world['RANK']}.json",
        }
        for key, value in {**world, **told}.items():
            monkeypatch.setenv(key, value)
        started.append(start(place, place / "program.py", *words))
    for process in started:
        process.join(LIMIT)
    return [
        (int(process.exitcode or 0), (place / f"{rank}.err").read_text())
        for rank, process in enumerate(started)
    ]


def test_one_rank_says_what_the_user_can_put_right(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads the rows while the other one waits for it in a collective."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text(train.read_text() + '{"messages": [}\n')
    keys = {**QUIET, "model": model, "data.train": bad, "out": tmp_path / "out", "steps": 1}
    (code, said), other = ranks(["sft", *words_of(keys)], tmp_path, monkeypatch)
    assert code == 2
    assert said.startswith("taut: error: ") and "bad.jsonl:24: broken JSON" in said
    assert said.count("\n") == 1
    assert other == (2, "")
    told = json.loads((tmp_path / "0.json").read_text())["message"]
    assert told["message"] == said.rstrip("\n")
    assert not (tmp_path / "1.json").exists()


def test_a_mistake_of_ours_has_one_traceback(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKS", "yes")
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 1}
    (code, said), other = ranks(["sft", *words_of(keys)], tmp_path, monkeypatch)
    assert (code, said.count("Traceback")) == (1, 1)
    assert "a mistake of the program" in said
    assert other == (1, "")


def test_a_mistake_in_the_configuration_is_told_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, said = zip(*ranks(["sft", "sed=1"], tmp_path, monkeypatch), strict=True)
    assert codes == (2, 2)
    quiet, told = sorted(said)  # the first to ask reports, whichever it is
    assert quiet == ""
    assert told.count("\n") == 1
