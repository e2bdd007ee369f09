"""The types of ``import taut`` are those of the code, and a type checker finds what is wrong by them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs import stub

CHECK = (
    "-m",
    "mypy",
    "--strict",
    "--follow-imports=skip",
    "--no-incremental",
    "--no-error-summary",
)
"""What results are is skipped: they are types of the package, and take a minute."""
RIGHT = """
from pathlib import Path
import taut

def reward(text: str) -> float:
    return 1.0

taut.sft("run.toml", steps=3)
taut.sft(model=Path("m"), data="a.jsonl", out="o", optim={"learning_rate": 1e-4}, dtype="bf16")
taut.dpo(model="m", data={"train": [{"prompt": "a"}], "eval": Path("b.jsonl")})
taut.grpo(model="m", rewards=[reward, "math", {"name": reward, "weight": 0.5}], log={"sinks": [print]})
taut.generate("m", prompts=[{"prompt": "a"}], out="c.jsonl", sampling={"n": 4})
taut.plan(model="m", gpus=8, gpu_memory="80GiB")
taut.resume("runs/a", steps=20)
taut.data.stats("a.jsonl", "b.jsonl")
taut.merge("BASE", "ADAPTER", out="merged")
taut.push("runs/a", "me/model", private=False)
"""
WRONG = {
    'taut.sft(modle="m")': 'Unexpected keyword argument "modle" for "sft"; did you mean "model"?',
    'taut.sft(optim={"learning_rat": 1e-4})': 'Extra key "learning_rat"',
    'taut.sft(steps="3")': 'Argument "steps" to "sft" has incompatible type "str"',
    'taut.sft(rollout={"n": 4})': 'Unexpected keyword argument "rollout"',
    "taut.sft(log={'sinks': [3]})": "has incompatible type",
    'taut.plan(gpuz=8, model="m")': 'Unexpected keyword argument "gpuz"',
    "taut.data.stats(limit='a')": 'Argument "limit" to "stats"',
    "taut.nothing()": 'has no attribute "nothing"',
}


def checked(script: str, folder: Path) -> list[str]:
    """What mypy says of a script that imports taut."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    command = [sys.executable, *CHECK, *map(str, stub.STUBS), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=stub.ROOT)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


@pytest.mark.parametrize("path", stub.STUBS, ids=stub.STUBS.values())
def test_the_types_are_those_of_the_code(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == stub.stubs()[path], "make docs writes them"


def test_a_type_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    found = checked(RIGHT + "".join(f"{line}\n" for line in WRONG), tmp_path)
    lines = [int(line.split(":")[1]) - RIGHT.count("\n") - 1 for line in found]
    assert lines == [*range(len(WRONG))], found
    for line, expected in zip(found, WRONG.values(), strict=True):
        assert expected in line
