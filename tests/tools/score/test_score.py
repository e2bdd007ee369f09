"""A file of answers -> a file of numbers, in the order of the rows, each as the library gives it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import save_model, write_rows
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from taut.config import from_mapping
from taut.errors import DataError, ModelError, OutputError
from taut.models.attention_backends import PREFIX
from taut.models.load import quiet_library
from taut.models.precision import Wide
from taut.models.reward_model import load_reward_model
from taut.models.save import saving
from taut.models.settings import NewHead
from taut_tools.score import score as command
from taut_tools.score.score import Scored, score
from taut_tools.score.settings import Score

CPU = torch.device("cpu")
END = "<|im_end|>"


def save_reward(directory: Path, head: NewHead, name: str = "qwen2") -> Path:
    """A tiny reward model that was never trained, with a ChatML template."""
    base = save_model(directory / "base", name, dtype=torch.float64)
    model = load_reward_model(
        str(base), head, dtype=torch.float64, device=CPU, attention=PREFIX + "reference"
    )
    tokenizer = tiny_tokenizer()
    stop = tokenizer.convert_tokens_to_ids(END)
    with saving(
        model,
        tokenizer,
        directory / "model",
        stop_ids=[stop],
        template=tokenizer.chat_template,
        dtype=torch.float64,
    ):
        pass
    return directory / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(tmp_path_factory.mktemp("sequence"), NewHead(seed=3))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(tmp_path_factory.mktemp("process"), NewHead("process", seed=3))


def scored(model: Path, tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> Scored:
    given = {
        "model": model,
        "data": write_rows(tmp_path / "rows.jsonl", rows),
        "out": tmp_path / "scores.jsonl",
        "dtype": "float64",
    }
    return score(from_mapping(Score, {**given, **keys}))


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]


def theirs(model: Path, texts: list[str], auto: Any = AutoModelForSequenceClassification) -> Any:
    """The library's logits of each text alone."""
    with quiet_library():
        loaded = auto.from_pretrained(model, dtype=torch.float64).double().eval()
    tokenizer = tiny_tokenizer()
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad(), Wide():
            found.append(loaded(input_ids=ids, use_cache=False).logits[0])
    return found


def chat(question: str, answer: str) -> str:
    return f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n{answer}{END}"


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_an_answer_gets_the_number_that_the_library_gives_it(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": messages("What is 2 plus 3?", "2 plus 3 is 5."), "id": "sum"},
        {"messages": messages("Who sat on the mat?", "the cat")},
    ]
    result = scored(model, tmp_path, rows)
    texts = [chat("What is 2 plus 3?", "2 plus 3 is 5."), chat("Who sat on the mat?", "the cat")]
    wanted = [float(logits) for logits in theirs(model, texts)]
    assert [row.scores[0] for row in result.rows] == pytest.approx(wanted, abs=1e-9)
    found = lines(tmp_path)
    assert [line["id"] for line in found] == ["sum", f"{tmp_path / 'rows.jsonl'}:2"]
    assert [line["score"] for line in found] == pytest.approx(wanted, abs=1e-6)
    assert found[0]["num_tokens"] == len(tiny_tokenizer()(texts[0])["input_ids"])
    assert (result.mean, result.num_scores) == (pytest.approx(np.mean(wanted)), 2)
    assert result.accuracy is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "the cat", "completion": " sat on the mat"},
        {"text": "the cat sat on the mat"},
    ],
)
def test_a_text_ends_with_eos(model: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    result = scored(model, tmp_path, [row])
    (wanted,) = theirs(model, ["the cat sat on the mat" + tiny_tokenizer().eos_token])
    assert result.rows[0].scores[0] == pytest.approx(float(wanted), abs=1e-9)


def test_answers_to_one_prompt_and_their_accuracy(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": messages("Who sat?", "")[:1], "chosen": a, "rejected": b}
        for a, b in (("the cat", "a dog"), ("I am fine", "Paris"), ("a dog", "the cat"))
    ]
    result = scored(model, tmp_path, rows)
    found = lines(tmp_path)
    gaps = [line["chosen"] - line["rejected"] for line in found]
    assert gaps[0] == pytest.approx(-gaps[2], abs=1e-6)
    assert found[0]["chosen"] == pytest.approx(found[2]["rejected"], abs=1e-6)
    assert found[0]["num_tokens"].keys() == {"chosen", "rejected"}
    assert result.num_judged == 3
    assert result.accuracy == pytest.approx(sum(gap > 0 for gap in gaps) / 3)
    assert result.calibration is not None
    predicted = [1 / (1 + math.exp(-abs(gap))) for gap in gaps]
    weighted = sum(each.count * (each.predicted or 0) for each in result.calibration.bins)
    assert weighted == pytest.approx(sum(predicted), abs=1e-5)
    alone = theirs(model, [chat("Who sat?", "the cat")])
    assert found[0]["chosen"] == pytest.approx(float(alone[0]), abs=1e-6)


def test_a_list_of_answers_with_and_without_scores(model: Path, tmp_path: Path) -> None:
    row = {"prompt": "the", "answers": [" cat", " dog", " bird"]}
    plain = scored(model, tmp_path, [row])
    assert (len(lines(tmp_path)[0]["scores"]), plain.num_judged) == (3, 0)
    judged = scored(model, tmp_path, [{**row, "scores": [3, 2, 2]}], overwrite=True)
    assert judged.num_judged == 2, "of equals none is the better"
    assert judged.rows[0].scores == pytest.approx(plain.rows[0].scores, abs=1e-12)
    mapped = scored(
        model,
        tmp_path,
        [{"prompt": "the", "samples": row["answers"]}],
        overwrite=True,
        columns={"answers": "samples"},
    )
    assert mapped.rows[0].scores == pytest.approx(plain.rows[0].scores, abs=1e-12)


@pytest.mark.parametrize("is_labeled", [True, False])
def test_steps_are_read_where_each_ends(steps: Path, tmp_path: Path, is_labeled: bool) -> None:
    row: dict[str, Any] = {"prompt": "What is 2 plus 3?", "completions": ["2 plus", "3 is 5."]}
    if is_labeled:
        row["labels"] = [True, False]
    result = scored(steps, tmp_path, [row])
    text = "What is 2 plus 3?\n2 plus\n3 is 5."
    (logits,) = theirs(steps, [text + tiny_tokenizer().eos_token], AutoModelForTokenClassification)
    first = len(tiny_tokenizer()("What is 2 plus 3?\n2 plus")["input_ids"]) - 1
    wanted = [float(logits[first, 0]), float(logits[-2, 0])]
    assert result.rows[0].scores == pytest.approx(wanted, abs=1e-9)
    right = [wanted[0] > 0, wanted[1] < 0]
    assert result.accuracy == (np.mean(right) if is_labeled else None)


def test_what_a_row_is_scored_with_changes_nothing(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": messages(f"What is {a} plus {b}?", "It is " + "1" * (a * b))}
        for a in range(4)
        for b in range(3)
    ]
    together = scored(model, tmp_path, rows)
    small = scored(model, tmp_path, rows, tokens_per_batch=1, overwrite=True)
    other = scored(model, tmp_path, rows[::-1], tokens_per_batch=60, overwrite=True)
    one = [row.scores[0] for row in together.rows]
    assert [row.scores[0] for row in small.rows] == pytest.approx(one, abs=1e-9)
    assert [row.scores[0] for row in other.rows][::-1] == pytest.approx(one, abs=1e-9)


def test_chunks_are_in_the_order_of_the_rows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "the cat " * number, "id": number} for number in range(7, 0, -1)]
    whole = scored(model, tmp_path, rows, limit=6)
    monkeypatch.setattr(command, "CHUNK_ROWS", 2)
    assert scored(model, tmp_path, rows, limit=6, overwrite=True).mean == pytest.approx(whole.mean)
    assert [line["id"] for line in lines(tmp_path)] == ["7", "6", "5", "4", "3", "2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": messages("a", "b")[:1]}, "the last message is the user's"),
        ({"question": "a"}, r"rows\.jsonl:2: the row is"),
        ({"text": "the cat " * 400}, "expected at most 256, what the model was made for"),
    ],
)
def test_a_bad_row_is_one_line_and_leaves_no_file(
    model: Path, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        scored(model, tmp_path, [{"text": "the cat"}, row])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_steps_need_a_process_model(model: Path, tmp_path: Path) -> None:
    row = {"prompt": "a", "completions": ["b"], "labels": [1]}
    with pytest.raises(ModelError, match="expected a process reward model"):
        scored(model, tmp_path, [row])


def test_a_language_model_scores_nothing(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    with pytest.raises(ModelError, match="has no scalar head"):
        scored(base, tmp_path, [{"text": "a"}])


def test_a_file_that_is_there_is_kept(model: Path, tmp_path: Path) -> None:
    (tmp_path / "scores.jsonl").write_text("mine")
    with pytest.raises(OutputError, match="set overwrite=true"):
        scored(model, tmp_path, [{"text": "a"}])
    with pytest.raises(OutputError, match="is the file of answers"):
        scored(model, tmp_path, [{"text": "a"}], out=tmp_path / "rows.jsonl", overwrite=True)
    assert (tmp_path / "scores.jsonl").read_text() == "mine"


def test_the_summary_tells_what_came_of_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "the", "chosen": " cat", "rejected": " dog"}]
    )
    config = from_mapping(Score, {"model": model, "data": data, "dtype": "float64"})
    assert command.run(config) == 0
    said = capsys.readouterr().out
    assert "1 row, 2 scores: mean" in said
    assert "of 1 pairs (95%:" in said
    table = score(config)._repr_html_()
    assert "<td" in table and "1 row, 2 scores" in table
    as_json = from_mapping(Score, {"model": model, "data": data, "dtype": "float64", "json": True})
    assert command.run(as_json) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["num_judged"], found["out"]) == (1, 1, None)
    assert len(found["calibration"]["bins"]) == 10
