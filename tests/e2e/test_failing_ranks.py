"""Several ranks of which one fails: it alone says why, the others end quietly with its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.chat_runs import QUIET, save_model, words_of
from tests.helpers.forked_processes import LIMIT, start, worlds
from torch.distributed import TCPStore

PROGRAM = """\
import os, sys
import taut.data.dataset
from taut.cli import main

def broken(*_, **__):
    raise KeyError("a mistake of the program")

if os.environ["RANK"] == "0" and os.environ.get("BREAKS"):
    taut.data.dataset.load_dataset = broken
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
            "TORCHELASTIC_ERROR_FILE": str(place / "attempt_0" / world["RANK"] / "error.json"),
        }
        (place / "attempt_0" / world["RANK"]).mkdir(parents=True)
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
    told = json.loads((tmp_path / "attempt_0/0/error.json").read_text())["message"]
    assert told["message"] == said.rstrip("\n")
    assert not (tmp_path / "attempt_0/1/error.json").exists()


def test_a_mistake_of_ours_has_one_traceback(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKS", "yes")
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 1}
    (code, said), other = ranks(["sft", *words_of(keys)], tmp_path, monkeypatch)
    assert (code, said.count("Traceback")) == (1, 1)
    assert "a mistake of the program" in said
    assert other == (1, "")


BAD: dict[str, tuple[dict[str, object], str]] = {
    "a key": ({"parallel.replica": 2}, "did you mean 'parallel.replicas'"),
    "no file": ({"data.train": "nowhere.jsonl"}, "nowhere.jsonl"),
    "no model": ({"model": "./nowhere"}, "nowhere"),
    "ranks that do not divide": (
        {"parallel.replicas": 3},
        "parallel.replicas=3, and there are 2 ranks",
    ),
    "no GPU": ({"device": "cuda"}, "no CUDA device is available"),
    "offload without a GPU": ({"parallel.cpu_offload": True}, "parallel.cpu_offload=true on a CPU"),
    "halving": ({"batch.halve_when_out_of_memory": True}, "and 2 ranks"),
    "muon with adapters": ({"optim.name": "muon", "lora.rank": 4}, "muon"),
}
"""What a user may ask of two ranks -> keys, and a part of the line."""


@pytest.mark.parallel
@pytest.mark.parametrize("name", BAD)
def test_a_users_mistake_is_one_line(
    name: str, model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, part = BAD[name]
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 1}
    codes, said = zip(
        *ranks(["sft", *words_of({**keys, **wrong})], tmp_path, monkeypatch), strict=True
    )
    assert codes == (2, 2)
    (line,) = "".join(said).splitlines()
    assert line.startswith("taut: error: ") and part in line


@pytest.mark.parallel
def test_a_missing_shard_is_one_line(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads its own slices; the file that one lacks all of them lack."""
    place = save_model(tmp_path / "model", dtype=torch.float32)
    weights = load_file(place / "model.safetensors")
    halves = {
        f"model-0000{half + 1}-of-00002.safetensors": sorted(weights)[half::2] for half in (0, 1)
    }
    for name, names in halves.items():
        save_file({key: weights[key] for key in names}, place / name, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {key: name for name, some in halves.items() for key in some},
    }
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model.safetensors").unlink()
    (place / next(iter(halves))).unlink()
    keys = {**QUIET, "model": place, "data.train": train, "out": tmp_path / "out", "steps": 1}
    codes, said = zip(*ranks(["sft", *words_of(keys)], tmp_path, monkeypatch), strict=True)
    assert codes == (2, 2)
    (line,) = "".join(said).splitlines()
    assert line.startswith("taut: error: ") and "model-00001-of-00002.safetensors" in line


@pytest.mark.slow
def test_under_torchrun_the_line_comes_first_and_is_the_root_cause(tmp_path: Path) -> None:
    """Its own traceback and table come after it; nobody can keep them back from inside a rank."""
    words = ["-m", "taut", "sft", "sed=1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    ours = [line for line in done.stderr.splitlines() if "taut: error: " in line]
    assert ours[0].startswith("taut: error: ") and "did you mean 'seed'" in ours[0]
    assert ours[1].strip() == f"traceback : {ours[0]}"
    assert done.stderr.count("Traceback") == 1, "torchrun's own"


def test_a_mistake_in_the_configuration_is_told_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, said = zip(*ranks(["sft", "sed=1"], tmp_path, monkeypatch), strict=True)
    assert codes == (2, 2)
    quiet, told = sorted(said)  # the first to ask reports, whichever it is
    assert quiet == ""
    assert told.count("\n") == 1
