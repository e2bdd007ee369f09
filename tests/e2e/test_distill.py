"""``taut distill`` from the command's configuration to a model that is nearer its teacher, by model and by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import (
    QUIET,
    chats,
    column,
    decisions,
    events,
    largest_difference,
    save_model,
    weights,
    write_rows,
)
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_tokenizers import tiny_tokenizer

import taut
from taut.errors import ConfigError, DataError

STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a wider teacher of another architecture, and data."""
    place = tmp_path_factory.mktemp("distill")
    save_model(place / "student", "qwen2")
    save_model(place / "teacher", "gemma2", hidden_size=48, seed=3)
    write_rows(place / "train.jsonl", chats(8))
    write_rows(place / "eval.jsonl", chats(3, seed=9))
    return place


def distill(place: Path, out: Path, **keys: Any) -> taut.Result:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    given = {
        **QUIET,
        "model": str(place / "student"),
        "data.train": str(place / "train.jsonl"),
        "out": str(out),
        "steps": STEPS,
        "optim.learning_rate": 5e-3,
    }
    return taut.distill(**{**given, **dotted})


def teach(place: Path, data: str, out: Path, **keys: Any) -> str:
    given = {name: QUIET[name] for name in ("device", "dtype", "data.max_length")}
    taut.teach(
        model=str(place / "teacher"),
        student=str(place / "student"),
        out=str(out),
        **{**given, "data.train": str(place / data), **keys},
    )
    return str(out)


def test_the_student_comes_nearer(place: Path, tmp_path: Path) -> None:
    result = distill(
        place,
        tmp_path / "out",
        distill__teacher=str(place / "teacher"),
        distill__divergence="js",
        distill__temperature=2.0,
        distill__sft_weight=0.1,
        data__eval=str(place / "eval.jsonl"),
        batch__tokens_per_microbatch=150,
    )
    out = tmp_path / "out"
    seen = column(out, "divergence")
    assert len(seen) == STEPS
    assert seen[-1] < 0.9 * seen[0]
    expected = [4 * d + 0.1 * c for d, c in zip(seen, column(out, "cross_entropy"), strict=True)]
    assert column(out, "loss") == pytest.approx(expected, rel=1e-9)
    assert result.metrics["divergence"] == events(out, "eval")[-1]["divergence"]
    assert decisions(out)["distill.teacher"][0] == str(place / "teacher")


def test_neither_layout_nor_micro_batches_change_the_run(place: Path, tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [
        {},
        {"batch__share_prefixes": False, "batch__tokens_per_microbatch": 60},
    ]
    for number, keys in enumerate(runs):
        teacher = str(place / "teacher")
        distill(place, tmp_path / str(number), distill__teacher=teacher, lora__rank=4, **keys)
    left, right = (tmp_path / str(number) for number in range(2))
    assert column(left, "loss") == pytest.approx(column(right, "loss"), rel=1e-9)
    assert largest_difference(weights(left / "adapter"), weights(right / "adapter")) < 1e-9


def test_a_file_of_all_tokens_is_the_teacher(place: Path, tmp_path: Path) -> None:
    """To the rounding of what is written; the student's and the teacher's padded rows are in the bucket."""
    every = teach(place, "train.jsonl", tmp_path / "top.jsonl", top=len(tiny_tokenizer()))
    held_out = teach(place, "eval.jsonl", tmp_path / "held_out.jsonl", top=len(tiny_tokenizer()))
    keys: list[dict[str, Any]] = [
        {"distill__teacher": str(place / "teacher")},
        {"distill__top_logprobs": every, "distill__eval_top_logprobs": held_out},
    ]
    results = [
        distill(place, tmp_path / str(i), data__eval=str(place / "eval.jsonl"), **some)
        for i, some in enumerate(keys)
    ]
    losses = [column(tmp_path / str(i), "loss") for i in range(2)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)  # seven padded rows apart
    assert results[1].metrics["divergence"] == pytest.approx(
        results[0].metrics["divergence"], rel=0.05
    )


def test_a_run_by_file_goes_on_exactly(place: Path, tmp_path: Path) -> None:
    top = teach(place, "train.jsonl", tmp_path / "top.jsonl", top=8)
    keys = {"distill__top_logprobs": top, "checkpoint__every": 2}
    distill(place, tmp_path / "whole", **keys)
    distill(place, tmp_path / "parts", steps=4, **keys)
    distill(place, tmp_path / "parts", resume=True, **keys)
    whole, parts = (column(tmp_path / name, "loss") for name in ("whole", "parts"))
    assert whole == parts[:4] + parts[-2:]
    found = [weights(tmp_path / name / "model") for name in ("whole", "parts")]
    assert largest_difference(*found) == 0
    other = teach(place, "train.jsonl", tmp_path / "other.jsonl", top=4)
    with pytest.raises(ConfigError, match="top_logprobs: other content"):
        distill(
            place,
            tmp_path / "parts",
            **{**keys, "distill__top_logprobs": other, "resume": True, "steps": 8},
        )


def test_what_cannot_be_is_refused_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    top = teach(place, "train.jsonl", tmp_path / "top.jsonl", top=8)
    for keys, error, says in [
        ({}, ConfigError, ErrorCode("distill.teacher/distill.top_logprobs")),
        (
            {"distill__teacher": str(place / "student")},
            ConfigError,
            ErrorCode("distill.teacher/model"),
        ),
        (
            {"distill__top_logprobs": top, "data__train": str(place / "eval.jsonl")},
            DataError,
            f"{top}:1: ids",
        ),
    ]:
        with refused(says, error):
            distill(place, tmp_path / "out", **keys)
    assert not (tmp_path / "out").exists()
