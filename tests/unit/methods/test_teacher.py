"""What may be said of distillation, and which teachers are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.chat_runs import save_model
from tests.tiny_models import save_tiny
from tests.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.errors import ConfigError, ModelError
from taut.losses.supervised import Distill
from taut.methods.teacher import DistillConfig, load_teacher
from taut.models.teacher import ListedTeacher, ModelTeacher
from taut.train.distributed import Ranks
from taut.types import Divergence


def config(**keys: Any) -> DistillConfig:
    return from_mapping(DistillConfig, keys)


def setting(**changes: Any) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    return {
        "tokenizer": tokenizer,
        "num_rows": len(tokenizer) + 7,
        "longest": 60,
        "dtype": torch.float64,
        "ranks": Ranks(0, 1, torch.device("cpu")),
        "attention": "auto",
        **changes,
    }


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"beta": 0.3}, "beta=0.3 has no effect"),
        ({"divergence": "js", "beta": 1.0}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"sft_weight": -1.0}, "sft_weight"),
        ({"teacher": "a", "top_logprobs": "b"}, "both set"),
        (
            {"top_logprobs": "b", "divergence": "reverse", "tail": "renormalise"},
            "tail=renormalise with distill.divergence=reverse",
        ),
        ({"top_logprobs": "b", "temperature": 2.0}, "set tail=renormalise"),
        ({"teacher": "a", "tail": "bucket"}, "tail=bucket has no effect"),
        ({"teacher": "a", "eval_top_logprobs": "b"}, "no effect without distill.top_logprobs"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**keys)


def test_the_loss_it_makes() -> None:
    found = config(teacher="a", divergence="js", beta=0.2, temperature=2.0, sft_weight=0.5)
    assert found.make_loss() == Distill(Divergence("js", 0.2, 2.0), 0.5)
    listed = config(top_logprobs="b", tail="renormalise", temperature=2.0)
    how = Divergence("forward", temperature=2.0, tail="renormalise")
    assert listed.make_loss() == Distill(how, is_listed=True)


@pytest.mark.parametrize(
    ("keys", "has_eval", "says"),
    [
        ({}, False, "distill.teacher is not set"),
        ({"top_logprobs": "b"}, True, "eval_top_logprobs is not"),
        ({"top_logprobs": "b", "eval_top_logprobs": "c"}, False, "data.eval is not"),
        ({"teacher": "student"}, False, "is the model that trains"),
    ],
)
def test_there_is_something_to_learn_from(keys: dict[str, Any], has_eval: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**keys).require_teacher("student", has_eval=has_eval)


def test_a_tie_to_the_start_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    same = str(tmp_path / "b" / ".." / "a")
    (tmp_path / "b").mkdir()
    student = str(tmp_path / "a")
    config(teacher=same, sft_weight=1.0).require_teacher(student, has_eval=True)
    with pytest.raises(ConfigError, match="is the model that trains"):
        config(teacher=same).require_teacher(student, has_eval=True)


def test_a_teacher_of_another_architecture(tmp_path: Path) -> None:
    place = save_model(tmp_path / "teacher", "gemma2", hidden_size=24)
    teacher, decisions = load_teacher(config(teacher=str(place)), **setting())
    assert isinstance(teacher, ModelTeacher)
    assert teacher.num_rows is None
    assert not any(p.requires_grad for p in teacher.scorer.parameters())
    assert [name for name, _, _ in decisions] == ["distill.teacher"]


def test_rows_that_one_of_them_has_alone_are_told(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    place = save_tiny("llama", tmp_path / "teacher", tokenizer, vocab_size=len(tokenizer) + 1)
    teacher, decisions = load_teacher(config(teacher=str(place)), **setting())
    assert isinstance(teacher, ModelTeacher)
    assert teacher.num_rows == len(tokenizer)
    assert decisions[1][:2] == ("distill.rows", f"the tokenizer's {len(tokenizer):,}")


def test_a_file_needs_no_model() -> None:
    teacher, _ = load_teacher(config(top_logprobs="top.jsonl"), **setting())
    assert isinstance(teacher, ListedTeacher)


def test_teachers_that_cannot_teach_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    teacher = str(save_model(tmp_path / "teacher", "llama"))
    grown = tiny_tokenizer()
    grown = type(grown).from_pretrained(teacher)
    grown.add_tokens(["<|new|>"])
    stateful = str(save_model(tmp_path / "stateful", "bamba"))
    judge = str(save_model(tmp_path / "judge", "llama"))
    settings = json.loads(Path(judge, "config.json").read_text())
    settings["architectures"] = ["LlamaForSequenceClassification"]
    Path(judge, "config.json").write_text(json.dumps(settings))
    small = str(save_tiny("llama", tmp_path / "small", tokenizer, vocab_size=len(tokenizer) - 3))
    for path, changes, says in [
        (teacher, {"tokenizer": grown}, "its tokenizer has None for '<|new|>'"),
        (teacher, {"longest": 257}, "has a context of 256 tokens and the longest sample has 257"),
        (stateful, {}, "runs one sample at a time"),
        (small, {}, "expected a row for each id"),
        (judge, {}, f"distill.teacher={judge} is a reward model"),
    ]:
        with pytest.raises(ModelError, match=says.replace("|", r"\|")):
            load_teacher(config(teacher=path), **setting(**changes))
