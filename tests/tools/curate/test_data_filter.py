"""A condition of ``taut data filter`` takes out the rows that break it; what was measured is not measured again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import save_model

from taut.cli import main
from taut_tools.curate import filter as data_filter

ROWS: list[dict[str, Any]] = [
    {"prompt": "the cat", "completion": " sat", "answer": "sat", "score": 0.2, "meta": {"n": 1}},
    {"prompt": "the dog", "completion": " ran", "answer": "sat", "score": 0.9, "meta": {"n": 2}},
    {
        "prompt": "Das ist ein ganz normaler deutscher Satz",
        "completion": " mit einer ebenso langen deutschen Antwort dahinter",
        "answer": 4,
        "score": 0.95,
        "meta": {"n": "3"},
    },
]
Run = Callable[..., tuple[int, str, list[int]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``taut data filter`` on ROWS -> exit code, what it printed, and the numbers of the rows that stay."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def call(*words: str) -> tuple[int, str, list[int]]:
        Path("b.jsonl").unlink(missing_ok=True)
        for path in Path.cwd().glob("b.jsonl.re*"):
            path.unlink()
        code = main(["data", "filter", "a.jsonl", "out=b.jsonl", *words])
        printed = capsys.readouterr()
        kept = Path("b.jsonl").read_text().splitlines() if Path("b.jsonl").exists() else []
        return code, printed.out + printed.err, [ROWS.index(json.loads(line)) for line in kept]

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def reasons() -> list[str]:
    lines = Path("b.jsonl.removed.jsonl").read_text().splitlines()
    return [json.loads(line)["reason"] for line in lines]


@pytest.mark.parametrize(
    ("words", "kept", "reason"),
    [
        (["max_characters=20"], [0, 1], "max_characters"),
        (["min_characters=20"], [2], "min_characters"),
        (["match=(?i)DOG|Satz"], [1, 2], "match"),
        (["reject=s.t"], [1, 2], "reject"),
        (["where=score >= 0.9"], [1, 2], "where"),
        (['where=["score < 0.95", "score > 0.5"]'], [1], "where"),
        (["where=answer == sat"], [0, 1], "where"),
        (["where=answer != sat"], [2], "where"),
        (["where=meta.n == 2"], [1], "where"),
        (["language=en", "min_language=0.9"], [0, 1], "min_language"),
        (["rewards=exact_match", "reference=answer", "min_reward=1"], [0], "min_reward"),
    ],
)
def test_a_condition_takes_out_what_breaks_it(
    words: list[str], kept: list[int], reason: str, run: Run
) -> None:
    code, printed, found = run(*words)
    assert (code, found) == (0, kept), printed
    assert reasons() == [reason] * (len(ROWS) - len(kept))


def test_tokens_and_loss_are_those_of_the_model(run: Run, model: Path) -> None:
    code, printed, found = run(f"model={model}", "dtype=float32", "max_tokens=40", "max_loss=100")
    assert (code, found) == (0, [0, 1]), printed
    assert reasons() == ["max_tokens"]
    _, *lines = map(json.loads, Path("b.jsonl.measured.jsonl").read_text().splitlines())
    assert [line["id"] for line in lines] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    uniform = math.log(500)
    assert all(0.5 * uniform < line["loss"] < 2 * uniform for line in lines)
    bound = sorted(line["loss"] for line in lines)[0]
    Path("b.jsonl.measured.jsonl").unlink()
    code, printed, found = run(f"model={model}", f"max_loss={bound + 1e-6}")
    assert (code, len(found)) == (0, 1)


def test_what_was_measured_is_used_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_filter, "CHUNK_ROWS", 1)
    asked: list[int] = []
    grade = data_filter.RewardSet.grade

    def count(reward_set: Any, answers: Any, *rest: Any, **keys: Any) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(answers))
        return grade(reward_set, answers, *rest, **keys)

    monkeypatch.setattr(data_filter.RewardSet, "grade", count)
    words = ["rewards=exact_match", "reference=answer"]
    assert run(*words, "min_reward=1")[0] == 130
    assert not Path("b.jsonl").exists()
    with Path("b.jsonl.measured.jsonl").open("a") as file:
        file.write('{"id": "a.jsonl:3", "rew')
    monkeypatch.setattr(data_filter.RewardSet, "grade", grade)
    code, printed, _ = run(*words, "min_reward=1")
    assert code == 2
    assert "b.jsonl.measured.jsonl exists: another run began to measure" in printed
    read: list[str] = []
    answered = data_filter._Measure._answered
    monkeypatch.setattr(
        data_filter._Measure,
        "_answered",
        lambda self, place, *rest: read.append(place) or answered(self, place, *rest),
    )
    assert run(*words, "min_reward=1", "resume=true")[2] == [0]
    assert read == ["a.jsonl:3"]
    assert run(*words, "max_reward=0.5", "resume=true")[2] == [1, 2]
    assert read == ["a.jsonl:3"]
    code, printed, _ = run("rewards=contains", "reference=answer", "min_reward=1", "resume=true")
    assert code == 2
    assert "measured with other settings (rewards)" in printed


def test_pass_rates_of_recorded_completions(run: Run) -> None:
    lines = [
        *({"id": "a.jsonl:1", "index": n, "reward": 1.0} for n in range(4)),
        *({"id": "a.jsonl:2", "index": n, "reward": float(n == 0)} for n in range(4)),
        {"id": "a.jsonl:3", "index": 0, "reward": None},
    ]
    Path("c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bounds = ["min_pass_rate=0.1", "max_pass_rate=0.9"]
    assert run("completions=c.jsonl", *bounds)[2] == [1]
    assert reasons() == ["max_pass_rate", "no_pass_rate"]
    scores = [{"id": "a.jsonl:1", "scores": {"math": 1.0}}, {"id": "a.jsonl:2", "scores": {"m": 0}}]
    Path("s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    assert run("completions=s.jsonl", "min_pass_rate=0.5")[2] == [0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no condition is set"),
        (
            ["max_tokens=3"],
            "max_tokens=3: a model counts tokens and computes losses; expected model; set it",
        ),
        (
            ["model=m"],
            "model=m: nothing reads it; expected max_tokens or min_tokens or max_loss or min_loss",
        ),
        (
            ["min_reward=0.5"],
            "min_reward=0.5: rewards judge the answer of a row; expected rewards; set it",
        ),
        (["match=("], "match='(' is no regular expression"),
        (["where=score"], "where has 'score'; expected COLUMN"),
        (["where=sco > 1"], "a.jsonl:1: the row has no column 'sco'"),
        (["where=score > high"], "a.jsonl:1: score is 0.2; expected a value"),
        (["where=meta > 1"], "a.jsonl:1: meta is "),
        (["language=xx"], "found the language 'xx'"),
        (["max_characters=1"], "no row is left of 3 rows"),
        (["completions=none.jsonl", "min_pass_rate=1"], "completions=none.jsonl cannot be read"),
        (["completions=a.jsonl", "min_pass_rate=1"], "a.jsonl:1: the line has no reward"),
        (
            ["rewards=contains", "reference=wrong", "min_reward=1"],
            "a.jsonl:1: the row has no right answer",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(words: list[str], says: str, run: Run) -> None:
    code, printed, kept = run(*words)
    assert (code, kept) == (2, [])
    assert printed.startswith("taut: error: ")
    assert says in printed
    assert printed.count("\n") == 1
