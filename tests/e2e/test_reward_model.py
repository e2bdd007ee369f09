"""``taut reward`` to ``taut score``: what was trained is what is saved, scored, and read by the library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import QUIET, events, save_model, write_rows
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import taut
from taut.errors import ModelError
from taut.models.load import quiet_library
from taut.models.precision import Wide

SENTENCE = "dog ran over a big red house then saw some birds in the blue sky"
WORDS = SENTENCE.split()
END = "<|im_end|>"


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """The better answer has a cat in it."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        words = draw.choices(WORDS, k=4)
        better = [*words]
        better[draw.randrange(4)] = "cat"
        prompt = [{"role": "user", "content": " ".join(draw.choices(WORDS, k=6))}]
        found.append({"prompt": prompt, "chosen": " ".join(better), "rejected": " ".join(words)})
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reward")
    save_model(place / "base", "qwen2", dtype=torch.float64)
    write_rows(place / "train.jsonl", pairs(48, 1))
    write_rows(place / "eval.jsonl", pairs(24, 2))
    return place


def reward(place: Path, out: Path, **keys: Any) -> taut.Result:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    given = {
        **QUIET,
        "model": str(place / "base"),
        "data.train": str(place / "train.jsonl"),
        "data.eval": str(place / "eval.jsonl"),
        "out": str(out),
        "steps": 3,
    }
    return taut.reward(**{**given, **dotted})


def score(out: Path, data: Path, keys: dict[str, Any] | None = None) -> Any:
    how = {"dtype": "float64", "device": "cpu", **(keys or {})}
    return taut.score(model=str(out / "model"), data=str(data), **how)


def logits(out: Path, auto: Any, texts: list[str]) -> list[torch.Tensor]:
    with quiet_library():
        model = auto.from_pretrained(out / "model", dtype=torch.float64).double().eval()
    tokenizer = tiny_tokenizer()
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad(), Wide():
            found.append(model(input_ids=ids, use_cache=False).logits[0])
    return found


def text_of(row: dict[str, Any], answer: str) -> str:
    question = row["prompt"][0]["content"]
    return f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n{row[answer]}{END}"


def test_a_rule_is_learned_and_held_out_pairs_are_told_apart(place: Path, tmp_path: Path) -> None:
    keys = {"optim__learning_rate": 1e-2, "batch__samples_per_step": 16}
    reward(place, tmp_path / "out", steps=25, **keys)
    file = {"out": str(tmp_path / "scores.jsonl")}
    found = score(tmp_path / "out", place / "eval.jsonl", file)
    assert found.accuracy > 0.95
    (last,) = events(tmp_path / "out", "eval")
    assert last["accuracy"] == pytest.approx(found.accuracy)
    assert last["score/mean"] == pytest.approx(found.mean, abs=1e-6)
    assert last["calibration_error"] == pytest.approx(found.calibration.error, abs=1e-6)
    rows = pairs(24, 2)
    texts = [text_of(row, name) for row in rows[:3] for name in ("chosen", "rejected")]
    theirs = [float(x) for x in logits(tmp_path / "out", AutoModelForSequenceClassification, texts)]
    ours = [score for row in found.rows[:3] for score in row.scores]
    assert ours == pytest.approx(theirs, abs=1e-5), "saved in the float32 of the base's config"
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["chosen"] == pytest.approx(ours[0], abs=1e-6)


@pytest.mark.parametrize("is_lora", [False, True])
def test_scores_and_a_bias(place: Path, tmp_path: Path, is_lora: bool) -> None:
    rows = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row[name]}], "score": value}
        for row in pairs(9, 3)
        for name, value in (("chosen", 4.0), ("rejected", 2.0))
    ]
    data = write_rows(tmp_path / "train.jsonl", rows)
    keys: dict[str, Any] = {"lora__rank": 2} if is_lora else {}
    reward(
        place,
        tmp_path / "out",
        data__train=str(data),
        data__eval=None,
        reward__loss="regression",
        reward__bias=True,
        **keys,
    )
    ours = [row.scores[0] for row in score(tmp_path / "out", data).rows]
    texts = [text_of(row, name) for row in pairs(9, 3) for name in ("chosen", "rejected")]
    every = logits(tmp_path / "out", AutoModelForTokenClassification, texts)
    assert ours == pytest.approx([float(each[-1, 0]) for each in every], abs=1e-6)
    assert len(set(ours)) == len(ours)


def test_steps_and_going_on_from_a_reward_model(place: Path, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "what did the cat do"}],
            "completions": [f"the cat ran {word}", "and then", "it saw birds"],
            "labels": [True, number % 2 == 0, False],
        }
        for number, word in enumerate(WORDS)
    ]
    data = str(write_rows(tmp_path / "train.jsonl", rows))
    keys = {"data__train": data, "data__eval": None, "reward__loss": "process"}
    reward(place, tmp_path / "one", **keys)
    reward(place, tmp_path / "two", **keys, model=str(tmp_path / "one" / "model"))
    one, two = (score(tmp_path / name, Path(data)) for name in ("one", "two"))
    assert [len(row.scores) for row in one.rows] == [3] * len(rows)
    assert one.num_judged == two.num_judged == 3 * len(rows)
    (first, *_), (again, *_) = events(tmp_path / "one", "step"), events(tmp_path / "two", "step")
    assert again["loss"] < first["loss"], "its head is kept"


def test_what_a_reward_model_cannot_be_is_refused(place: Path, tmp_path: Path) -> None:
    with refused(ErrorCode("reward.bias/reward.centering_coef")):
        reward(place, tmp_path / "a", reward__bias=True)
    with refused(ErrorCode("reward.centering_coef/reward.loss")):
        reward(place, tmp_path / "b", reward__loss="regression", reward__centering_coef=0.1)
    reward(place, tmp_path / "c", steps=1)
    with pytest.raises(ModelError, match="is a reward model"):
        taut.sft(
            **QUIET,
            model=str(tmp_path / "c" / "model"),
            out=str(tmp_path / "d"),
            data={"train": str(write_rows(tmp_path / "t.jsonl", [{"text": "the cat"}]))},
            steps=1,
        )
