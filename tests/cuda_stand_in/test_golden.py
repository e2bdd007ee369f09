"""What the last step of a run waits for, copies and takes of memory, against golden.json: the places by function, which
stay when lines move. A new ``item()`` in the training loop fails here, with its line.

A wait costs little on a CPU and drains a GPU. Where a change adds one with reason, or removes one, write the file anew:

    python -m tests.cuda_stand_in.test_golden

Peak bytes are those of torch's allocator for these shapes, within 2%. What is sampled depends on a machine's rounding:
there only places are held.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.cuda_stand_in.cases import Case, Found
from tests.cuda_stand_in.processes import Server

GOLDEN = Path(__file__).with_name("golden.json")
ALONE: dict[str, Any] = {"beside_cpu": False, "is_saved": False}
CASES = {
    "sft": Case("sft", **ALONE),
    "sft, adapters": Case("sft", keys={"lora.rank": 4}, **ALONE),
    "sft, experts": Case("sft", "qwen3_moe", **ALONE),
    "sft, pictures": Case("sft", "qwen2_5_vl", **ALONE),
    "dpo": Case("dpo", **ALONE),
    "grpo": Case("grpo", **ALONE),
}
QUICK, SAMPLED = ("sft",), ("grpo",)
LARGE: dict[str, dict[str, Any]] = {
    "8B, adapters, 8k tokens": {"size": "8B", "is_lora": True, "tokens": 8192, "sample": 2048},
    "1.5B, 16k tokens": {"size": "1.5B", "is_lora": False, "tokens": 16384, "sample": 2048},
}
"""Steps of models of real sizes, as shapes alone: their memory is what a GPU has to hold."""


def table(found: Found) -> dict[str, Any]:
    """What is held of a run: of its last step, which has no set-up in it."""
    counts: dict[str, Counter[str]] = {"wait": Counter(), "copy": Counter()}
    for note, count in found.steps[-1].notes.items():
        counts[note.kind][f"{note.what} | {note.where}"] += count
    return {
        "waits": dict(sorted(counts["wait"].items())),
        "copies": dict(sorted(counts["copy"].items())),
        "kernels": sum(found.steps[-1].kernels.values()),
        "peak_bytes": found.steps[-1].peak,
    }


def differences(found: Found, name: str) -> list[str]:
    """What is otherwise than in golden.json, a line each, with the places in the source."""
    golden = json.loads(GOLDEN.read_text())[name]
    told, now = [], table(found)
    lines = {f"{note.what} | {note.where}": note.lines for note in found.steps[-1].notes}
    for kind in ("waits", "copies"):
        for place in sorted(now[kind].keys() | golden[kind].keys()):
            count, expected = now[kind].get(place, 0), golden[kind].get(place, 0)
            if count > expected == 0 or (count != expected and name not in SAMPLED):
                where = lines.get(place, place)
                told.append(f"{kind} a step: found {count}, expected {expected}: {place} ({where})")
    for kind in ("kernels", "peak_bytes") if name not in SAMPLED else ():
        if now[kind] != pytest.approx(golden[kind], rel=0.02):
            told.append(f"{kind}: found {now[kind]:,}, expected {golden[kind]:,}")
    return told


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.cuda_stand_in)
        for name in CASES
    ],
)
def test_a_step_waits_copies_and_takes_what_it_did(stand_in: Server, name: str) -> None:
    found: Found = stand_in.call("tests.cuda_stand_in.runs:run", CASES[name])
    assert not differences(found, name)


@pytest.mark.cuda_stand_in
@pytest.mark.parametrize("name", LARGE)
def test_a_step_of_a_real_size_takes_what_it_did(stand_in: Server, name: str) -> None:
    found: Found = stand_in.call("tests.cuda_stand_in.runs:step_of", **LARGE[name])
    assert not differences(found, name)


@pytest.mark.cuda_stand_in
def test_an_item_in_the_training_loop_is_named(stand_in: Server) -> None:
    planted = Case("sft", **ALONE, before="tests.cuda_stand_in.planted:item_in_the_loop")
    found: Found = stand_in.call("tests.cuda_stand_in.runs:run", planted)
    (told,) = differences(found, "sft")
    assert "waits a step: found 1, expected 0: item" in told
    assert "optim.clip(" in told, "the line"


def main() -> None:
    """Write golden.json."""
    server = Server()
    found = {
        name: table(server.call("tests.cuda_stand_in.runs:run", case))
        for name, case in CASES.items()
    }
    for name, step in LARGE.items():
        found[name] = table(server.call("tests.cuda_stand_in.runs:step_of", **step))
    server.close()
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
