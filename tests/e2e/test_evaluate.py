"""``taut eval``: a tiny model and files of questions; what is written, what is refused, what is finished later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import chats, write_rows
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.scripted_engines import FakeEngine

import taut
from taut import cli
from taut.commands import evaluate as command
from taut.commands import generate
from taut.commands.evaluate import Evaluated
from taut.commands.settings import Evaluate
from taut.config import from_mapping
from taut.errors import SandboxError
from taut.types import Completion, FinishReason
from taut_tools.sandbox.shared import shared


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "questions.jsonl", chats(6, seed=3))


def configured(model: Path, data: Path, **keys: Any) -> Evaluate:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    fixed = {"model": str(model), "data": str(data), "device": "cpu", "dtype": "float32"}
    return from_mapping(Evaluate, {**fixed, "sampling.max_new_tokens": 5, **dotted})


def evaluate(model: Path, data: Path, **keys: Any) -> Evaluated:
    return command.evaluate(configured(model, data, **keys))


def words(model: Path, data: Path, *more: str) -> list[str]:
    return ["eval", str(model), f"data={data}", "device=cpu", "sampling.max_new_tokens=5", *more]


def speak(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """The local engine opens as ever, and ``engine`` answers in its place."""
    genuine = generate.open_engine

    def opened(*arguments: Any) -> Any:
        found = genuine(*arguments)
        object.__setattr__(found, "engine", engine)
        return found

    monkeypatch.setattr(generate, "open_engine", opened)


def test_a_model_is_evaluated_and_all_of_it_is_written(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rewards = 'rewards=["exact_match","contains"]'
    assert cli.main(words(model, questions, f"out={out}", rewards, "limit=5")) == 0
    names = {"completions.jsonl", "completions.jsonl.meta.json", "report.json", "scores.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    report = json.loads((out / "report.json").read_text())
    assert (report["num_prompts"], report["num_completions"]) == (5, 5)
    assert [metric["name"] for metric in report["metrics"]] == ["exact_match", "contains"]
    assert report["config"]["sampling"]["temperature"] == 0.0
    lines = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"{questions}:{k}" for k in range(1, 6)]
    mean = sum(line["scores"]["contains"] for line in lines) / 5
    assert report["metrics"][1]["mean"] == mean
    printed = capsys.readouterr().out
    for expected in ("5 answers to 5 prompts", "exact_match", "stopped", "95% interval", "tokens"):
        assert expected in printed


def test_what_holds_programs_is_told_and_written(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        held = shared().mechanism
    except SandboxError:
        pytest.skip("no mechanism holds programs here")
    out = tmp_path / "out"
    assert cli.main(words(model, questions, f"out={out}", "rewards=code", "limit=1")) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["decisions"] == {"sandbox": f"{held.name} ({held.reason})"}
    assert f"sandbox: {held.name}" in capsys.readouterr().out


def test_answers_are_judged_as_they_are(
    model: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six rows the even ones get their own answer; two samples of each, the second always wrong."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    right = {f"{questions}:{k}": row["messages"][-1]["content"] for k, row in enumerate(rows, 1)}

    def say(name: str, index: int) -> str:
        return right[name] if index == 0 and int(name[-1]) % 2 == 0 else "wrong"

    speak(monkeypatch, FakeEngine(say))
    keys = {"sampling__n": 2, "sampling__temperature": 1.0}
    report = evaluate(model, questions, **keys).report
    (exact,) = report.metrics
    assert (exact.mean, exact.pass_at, exact.num_scored) == (0.25, {2: 0.5}, 12)
    assert report.stopped.mean == 1.0


def test_an_interrupt_says_whether_anything_is_kept(
    model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(name: str, index: int) -> str:
        if name.endswith("3"):
            raise KeyboardInterrupt
        return "x"

    speak(monkeypatch, FakeEngine(say))
    with pytest.raises(KeyboardInterrupt, match="are not kept; with out=DIR they are"):
        evaluate(model, questions)
    with pytest.raises(KeyboardInterrupt, match="are written; the same command with resume=true"):
        evaluate(model, questions, out=str(tmp_path / "out"))


def test_what_was_interrupted_is_finished_and_is_the_same(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    keys = {"sampling__n": 2, "sampling__temperature": 1.0}
    whole = evaluate(model, questions, out=str(tmp_path / "whole"), **keys)
    evaluate(model, questions, out=str(tmp_path / "parts"), **keys)
    path = tmp_path / "parts" / "completions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    (tmp_path / "parts" / "report.json").unlink()
    parts = evaluate(model, questions, out=str(tmp_path / "parts"), resume=True, **keys)
    assert parts.generated.num_kept == 3
    assert parts.report == whole.report
    with pytest.raises(taut.OutputError, match="drawn with other settings"):
        evaluate(model, questions, out=str(tmp_path / "parts"), resume=True)


def test_references_come_from_a_column_of_the_users(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "2 + 2 =", "gold": ["4", "four"]}, {"prompt": "1 + 1 =", "gold": ["2", 2]}]
    data = write_rows(tmp_path / "sums.jsonl", rows)
    speak(monkeypatch, FakeEngine(lambda name, index: "Four" if name.endswith("1") else "It is 2."))
    result = evaluate(model, data, reference="gold", rewards=["exact_match", "contains"])
    assert [metric.mean for metric in result.report.metrics] == [0.5, 1.0]
    assert result.answers[1].row.references == ("2", "2")


PICKY = """
def picky(text, references, row):
    if row["messages"][1]["content"] == ABSENT:
        return 1.0
"""


def test_errors_of_a_reward_above_the_bound_are_exit_code_1_with_the_first_reason(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.py"
    path.write_text(PICKY)
    out = tmp_path / "out"
    reward = f'rewards=["{path}:picky","exact_match"]'
    assert cli.main(words(model, questions, reward, f"out={out}")) == 1
    told = capsys.readouterr()
    assert "6 scores of picky are errors (100.0%), the first: " in told.err
    assert f"{questions}:1: NameError: name 'ABSENT' is not defined" in told.err
    assert "nothing scored" in told.out
    report = json.loads((out / "report.json").read_text())
    assert report["metrics"][0]["mean"] is None
    assert report["metrics"][1]["mean"] is not None
    assert cli.main(words(model, questions, reward, "max_errors=1")) == 0


def test_completions_that_failed_are_exit_code_1_and_are_tried_again(
    model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(text: str) -> FinishReason:
        return "error" if text.endswith("2") else "stop"

    asked: list[str] = []
    with monkeypatch.context() as patch:
        engine = FakeEngine(lambda name, index: f"row {name[-1]}", finish)
        speak(patch, engine)
        config = configured(model, questions, out=str(tmp_path / "out"))
        with pytest.raises(
            taut.CheckFailed, match=r"1 of 6 completions failed, the first: .*:2: the server went"
        ):
            command.run(config)
    engine = FakeEngine(lambda name, index: "better")
    speak(monkeypatch, engine)
    again = evaluate(model, questions, out=str(tmp_path / "out"), resume=True)
    asked += [prompt.id for prompt in engine.asked]
    assert asked == [f"{questions}:2"]
    assert again.report.failures == ()
    assert again.report.num_completions == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"reference": "gold"},
            r"questions\.jsonl:1: the row has no column 'gold'.*columns are messages",
        ),
        ({"rewards": ["numeric"]}, r"questions\.jsonl:1: numeric: .*6 of 6 references"),
        ({"rewards": ["exact"]}, "found the reward 'exact'; expected one of exact_match, contains"),
        ({"rewards": []}, ErrorCode("rewards")),
        ({"resume": True}, ErrorCode("resume/out")),
        ({"sampling__n": 4}, ErrorCode("sampling.temperature/sampling.n")),
        ({"data": "absent.jsonl"}, r"no file or directory absent\.jsonl"),
    ],
)
def test_bad_input_is_refused_before_anything_is_generated(
    keys: dict[str, Any],
    message: str,
    model: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(lambda name, index: "x")
    speak(monkeypatch, engine)
    with refused(message, taut.TautError):
        evaluate(model, Path(keys.pop("data", questions)), **keys)
    assert engine.asked == []


def test_an_out_with_anything_in_it_is_refused(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(taut.OutputError, match="exists and is not empty"):
        evaluate(model, questions, out=str(tmp_path / "out"))
    with pytest.raises(taut.OutputError, match="is a file; expected a directory"):
        evaluate(model, questions, out=str(tmp_path / "out" / "notes.txt"))


def test_rows_without_answers_do_for_rewards_that_need_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "open.jsonl", [{"prompt": "say"}, {"prompt": "speak"}])
    path = tmp_path / "own.py"
    path.write_text("def length(text, references, row):\n    return float(len(text))\n")
    speak(monkeypatch, FakeEngine(lambda name, index: "abc"))
    assert evaluate(model, data, rewards=[f"{path}:length"]).report.metrics[0].mean == 3.0
    with pytest.raises(taut.DataError, match=r"open\.jsonl:1: the row has no reference"):
        evaluate(model, data, rewards="contains")


def test_every_completion_is_one_of_the_engine(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    found = evaluate(model, questions, out=str(tmp_path / "out"))
    completions = [answer.completion for answer in found.answers]
    assert all(isinstance(completion, Completion) for completion in completions)
    assert {completion.finish_reason for completion in completions} <= {"stop", "length"}
    assert all(1 <= completion.ids_N.size <= 5 for completion in completions)
