"""What may be said of distillation, and which teachers are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import save_model
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.errors import ModelError
from taut.losses.supervised import DistillLoss
from taut.methods.distill import Distill as Run
from taut.methods.settings import DistillConfig
from taut.methods.teacher import load_teacher
from taut.models.teacher import ListedTeacher, ModelTeacher
from taut.train.distributed import Ranks
from taut.types import Divergence


def config(**keys: Any) -> DistillConfig:
    return from_mapping(DistillConfig, keys)


def run_of(student: str, *, has_eval: bool = True, **keys: Any) -> Run:
    """A run of ``taut distill``."""
    data = {"data.train": "a.jsonl", **({"data.eval": "b.jsonl"} if has_eval else {})}
    return from_mapping(Run, {"model": student, **data, "distill": keys})


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
        ({"beta": 0.3}, ErrorCode("beta/divergence")),
        ({"divergence": "js", "beta": 1.0}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"sft_weight": -1.0}, "sft_weight"),
        ({"teacher": "a", "top_logprobs": "b"}, ErrorCode("teacher/top_logprobs")),
        (
            {"top_logprobs": "b", "divergence": "reverse", "tail": "renormalize"},
            ErrorCode("tail/divergence"),
        ),
        (
            {"top_logprobs": "b", "temperature": 2.0},
            "temperature=2 with top_logprobs=b: .*; expected tail=renormalize; set it",
        ),
        ({"teacher": "a", "tail": "bucket"}, ErrorCode("tail/top_logprobs")),
        (
            {"teacher": "a", "eval_top_logprobs": "b"},
            ErrorCode("eval_top_logprobs/top_logprobs"),
        ),
    ],
)
def test_what_contradicts_itself_is_refused(keys: dict[str, Any], says: str) -> None:
    with refused(says):
        config(**keys)


def test_the_loss_it_makes() -> None:
    found = config(teacher="a", divergence="js", beta=0.2, temperature=2.0, sft_weight=0.5)
    loss = DistillLoss.of(found)
    assert loss == DistillLoss(divergence="js", beta=0.2, temperature=2.0, sft_weight=0.5)
    assert loss.wants.divergence == Divergence("js", 0.2, 2.0)
    listed = config(top_logprobs="b", tail="renormalize", temperature=2.0)
    how = Divergence("forward", temperature=2.0, tail="renormalize")
    loss = DistillLoss.of(listed)
    assert (loss.wants.divergence, loss.is_listed, loss.sft_weight) == (how, True, 0.0)


@pytest.mark.parametrize(
    ("keys", "has_eval", "says"),
    [
        ({}, False, ErrorCode("distill.teacher/distill.top_logprobs")),
        ({"top_logprobs": "b"}, True, ErrorCode("distill.top_logprobs/distill.eval_top_logprobs")),
        (
            {"top_logprobs": "b", "eval_top_logprobs": "c"},
            False,
            ErrorCode("distill.eval_top_logprobs/data.eval"),
        ),
        ({"teacher": "student"}, False, ErrorCode("distill.teacher/model")),
    ],
)
def test_there_is_something_to_learn_from(keys: dict[str, Any], has_eval: bool, says: str) -> None:
    with refused(says):
        run_of("student", has_eval=has_eval, **keys)


def test_a_tie_to_the_start_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    same = str(tmp_path / "b" / ".." / "a")
    (tmp_path / "b").mkdir()
    student = str(tmp_path / "a")
    assert run_of(student, teacher=same, sft_weight=1.0).distill.teacher == same
    with refused(ErrorCode("distill.teacher/model")):
        run_of(student, teacher=same)


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
