"""Metrics of one's own on held-out data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import (
    PLAIN,
    chats,
    column,
    events,
    sft,
    words_of,
    write_rows,
)
from tests.helpers.forked_processes import run
from tests.helpers.refusals import ErrorCode, refused

import taut

Go = Callable[..., taut.Result]

OWN = """
import random

def nats(samples):
    random.random()
    assert [s.id for s in samples] == sorted(s.id for s in samples)
    assert all(len(s.logp) == len(s.targets) == len(s.predicted) for s in samples)
    return -sum(s.logp.sum() for s in samples) / sum(len(s.targets) for s in samples)

nats.smaller_is_better = True

def right(samples):
    hits = sum((s.predicted == s.targets).sum() for s in samples)
    return hits / sum(len(s.targets) for s in samples)

def last_id(samples):
    return samples[-1].ids[-1]

def words(answers):
    return sum(len(answer.text.split()) for answer in answers) / len(answers)
"""


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "held_out.jsonl", chats(7, seed=5))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def go(model: Path, train: Path, held_out: Path, tmp_path: Path) -> Go:
    fixed = {**PLAIN, "steps": 4, "data__eval": str(held_out), "eval__every": 2}
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


def measured(out: Path, name: str) -> list[float]:
    return [event[name] for event in events(out, "eval") if name in event]


def test_tokens_are_measured(go: Go, own: Path, held_out: Path) -> None:
    names = [f"{own}:{name}" for name in ("nats", "right", "last_id")]
    result = go("out", eval__metrics=names, eval__best="nats")
    plain = go("plain")
    assert column(result.out, "loss") == column(plain.out, "loss")
    assert measured(result.out, "loss") == measured(plain.out, "loss"), "the same arithmetic"
    assert measured(result.out, "nats") == pytest.approx(measured(result.out, "loss"), rel=1e-12)
    note = json.loads((result.out / "best" / "best.json").read_text())
    assert (note["metric"], note["value"]) == ("nats", min(measured(result.out, "nats")))
    assert result.metrics["right"] == measured(result.out, "right")[-1]
    # by transformers: each answer alone
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(result.model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    hits = total = 0
    for line in held_out.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        end = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        logits = model(torch.tensor([ids])).logits[0]
        predicted = logits.argmax(-1)[len(prompt) - 1 : end - 1]
        hits += int((predicted == torch.tensor(ids[len(prompt) : end])).sum())
        total += end - len(prompt)
    assert result.metrics["right"] == pytest.approx(hits / total)


def test_answers_are_measured_without_a_reward(go: Go, own: Path) -> None:
    keys = {"eval__answers__every": 2, "eval__answers__sampling__max_new_tokens": 6}
    result = go("out", eval__metrics=[f"{own}:words"], eval__best="words", **keys)
    found = measured(result.out, "words")
    assert len(found) == 2
    assert all(0 <= value <= 6 for value in found)
    assert json.loads((result.out / "best" / "best.json").read_text())["value"] == max(found)


def test_a_best_by_other_code_is_refused(go: Go, own: Path) -> None:
    keys = {"eval__metrics": [f"{own}:right"], "eval__best": "right", "checkpoint__every": 2}
    go("out", **keys, steps=2)
    own.write_text(OWN.replace("return hits /", "return 1 + hits /"))
    with pytest.raises(taut.ConfigError, match="right on other data or in another way"):
        go("out", **keys, resume=True)
    assert go("out", **{**keys, "eval__best": "loss"}, steps=2, resume=True).notice is not None


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def own(trainer): ...", ErrorCode("eval.metrics")),
        ("def own(): ...", ErrorCode("eval.metrics")),
        ("def own(answers, samples): ...", ErrorCode("eval.metrics")),
        ("def own(samples):\n    raise LookupError('none')", r"LookupError: none \(own\.py:2\)"),
        ("def own(samples): return 'a'", "could not convert string to float"),
        ("def loss(samples): return 1", ErrorCode("eval.metrics")),
        ("def own(samples: return", "cannot be run: SyntaxError"),
    ],
)
def test_what_is_no_metric_is_refused(
    code: str, told: str, go: Go, own: Path, tmp_path: Path
) -> None:
    own.write_text(code + "\n")
    name = "loss" if "loss" in code else "own"
    with refused(told, taut.TautError):
        go("out", eval__metrics=[f"{own}:{name}"])
    assert not (tmp_path / "out").exists()


def test_answers_that_nothing_takes_are_refused(go: Go, own: Path) -> None:
    with refused(ErrorCode("eval.answers.every/eval.answers.rewards/eval.metrics")):
        go("out", eval__metrics=[f"{own}:right"], eval__answers__every=2)


def test_tokens_need_held_out_data(go: Go, own: Path) -> None:
    with refused(ErrorCode("eval.metrics/data.eval")):
        go("out", eval__metrics=[f"{own}:right"], data__eval=None, eval__every=0)


def test_a_value_that_is_not_finite_is_never_the_best(go: Go, own: Path) -> None:
    own.write_text("def own(samples):\n    return float('nan')\n")
    result = go("out", eval__metrics=[f"{own}:own"], eval__best="own")
    assert all(np.isnan(value) for value in measured(result.out, "own"))
    assert not (result.out / "best").exists()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(
    go: Go, own: Path, model: Path, train: Path, held_out: Path, tmp_path: Path
) -> None:
    one = go("one", eval__metrics=[f"{own}:right", f"{own}:last_id"])
    keys: dict[str, Any] = {"model": model, "data.train": train, "data.eval": held_out, "steps": 4}
    keys |= {"eval.metrics": [f"{own}:right", f"{own}:last_id"], "eval.every": 2, "check": "off"}
    keys |= {"stop_check.prompts": 0, "contract.prompts": 0, "data.max_length": 200}
    keys |= {"dtype": "float64", "optim.learning_rate": 1e-3, "optim.schedule": "constant"}
    keys |= {"device": "cpu", "batch.samples_per_step": 6, "checkpoint.every": 0}
    done = run("-m", "taut", "sft", *words_of(keys), f"out={tmp_path / 'two'}", num_ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("right", "last_id"):
        assert measured(tmp_path / "two", name) == pytest.approx(measured(one.out, name))
