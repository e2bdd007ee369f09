"""The flat example is the oracle: taut samples the same answers, judges them alike and makes the same updates.

Both run in float64 with the library's hidden casts to float32 turned into float64 (``Wide``). Answers are equal token
for token, since each token is drawn by a number of its own; what is computed from them is equal to rounding.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.chat_runs import column, events, save_model, write_rows
from tests.helpers.online_runs import keys_of, questions, train
from tests.helpers.slow_cases import slow_except
from transformers import AutoTokenizer

from taut.inference.local import LocalEngine
from taut.models.precision import Wide
from taut.types import Completion

FLAT = Path(__file__).parents[2] / "examples" / "flat" / "grpo.py"
LIMIT = 1e-9
STEPS = 4
SIZE, N = 7, 3
"""Prompts of a rollout and answers to each. Of 6 prompts: each rollout spans two epochs, and asks one again."""

SETTINGS = {
    "steps": STEPS,
    "seed": 3,
    "batch.samples_per_step": SIZE,
    "rollout.n": N,
    "rollout.max_new_tokens": 10,
    "rollout.stop": None,
    "optim.warmup_steps": 0,
}
PARITY = """
def parity(text, references):
    return float(len(text) % 2 == int(references[0]) % 2)
"""


@pytest.fixture(scope="module")
def flat() -> dict[str, Callable[..., Any]]:
    return runpy.run_path(str(FLAT))


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Completion]:
    """Every completion of taut's engine, in order."""
    found: list[Completion] = []
    generate = LocalEngine.generate

    def recorded(self: LocalEngine, *args: Any, **options: Any) -> list[Completion]:
        made = generate(self, *args, **options)
        found.extend(made)
        return made

    monkeypatch.setattr(LocalEngine, "generate", recorded)
    return found


def save_brief_model(name: str, directory: Path) -> Path:
    """A tiny model in float64 that ends some of its answers."""
    model = save_model(directory, name, dtype=torch.float64, tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    tensors["lm_head.weight"][end] *= 4
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def without_id(row: dict[str, Any]) -> dict[str, Any]:
    """Then its place is its name."""
    return {key: value for key, value in row.items() if key != "id"}


def words_of(model: Path, data: Path, out: Path, **options: object) -> list[str]:
    fixed = {
        "model": model,
        "data": data,
        "out": out,
        "steps": STEPS,
        "samples-per-step": SIZE,
        "n": N,
        "max-new-tokens": 10,
        "seed": 3,
        "device": "cpu",
    }
    return [word for key, value in (fixed | options).items() for word in (f"--{key}", str(value))]


@pytest.mark.parametrize(
    ("name", "epochs", "rate"),
    slow_except([("qwen2", 1, 1e-3)], [("qwen2", 1, 1e-3), ("mistral", 2, 3e-3)]),
)
def test_taut_and_the_flat_example_sample_and_train_alike(
    name: str,
    epochs: int,
    rate: float,
    tmp_path: Path,
    flat: dict[str, Callable[..., Any]],
    sampled: list[Completion],
) -> None:
    model = save_brief_model(name, tmp_path / "tiny")
    rows = questions(6) if epochs == 1 else [without_id(row) for row in questions(6)]
    data = write_rows(tmp_path / "prompts.jsonl", rows)
    own = tmp_path / "own.py"
    own.write_text(PARITY)
    keys = {"rollout.epochs": epochs, "optim.learning_rate": rate, "rewards": f"{own}:parity"}
    train(keys_of("grpo", model, tmp_path, data__train=str(data), **SETTINGS, **keys))

    options = {"dtype": "float64", "epochs": epochs, "learning-rate": rate}
    args = flat["settings"](words_of(model, data, tmp_path / "flat", **options))
    tokenizer = AutoTokenizer.from_pretrained(model)
    twin = flat["load"](args.model, args.dtype, args.device)
    prompts = list(flat["read"](args.data, tokenizer))
    judge = runpy.run_path(str(own))["parity"]
    with Wide():
        steps = list(flat["train"](twin, tokenizer, prompts, args, judge))

    out = tmp_path / "grpo"
    answers = [answer for step in steps[::epochs] for answer in step[2]]
    assert [answer.ids for answer in answers] == [one.ids_N.tolist() for one in sampled]
    assert len(answers) == SIZE * N * STEPS // epochs
    assert 0.2 < sum(len(answer.ids) < 10 for answer in answers) / len(answers) < 0.9
    told = events(out, "rollout")
    means = [sum(one.reward for one in step[2]) / SIZE / N for step in steps[::epochs]]
    assert means == pytest.approx([event["reward"] for event in told], rel=LIMIT)
    assert min(event["groups_with_signal"] for event in told) < SIZE

    assert [step[0] for step in steps] == pytest.approx(column(out, "loss"), rel=LIMIT, abs=LIMIT)
    assert [step[1] for step in steps] == pytest.approx(column(out, "grad_norm"), rel=LIMIT)
    if epochs > 1:
        assert max(column(out, "clip/high")) > 0 < max(column(out, "clip/low"))
    trained = load_file(out / "model" / "model.safetensors")
    start = load_file(model / "model.safetensors")
    for key, weight in twin.state_dict().items():
        assert float((trained[key] - weight).norm()) <= LIMIT * float(weight.norm()), key
    assert float((trained["lm_head.weight"] - start["lm_head.weight"]).abs().max()) > rate


def test_as_a_program_it_trains_and_saves(
    tmp_path: Path, flat: dict[str, Callable[..., Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "tiny")
    data = write_rows(tmp_path / "prompts.jsonl", questions(5))
    words = words_of(model, data, tmp_path / "flat", steps=2)
    flat["main"](words)
    assert capsys.readouterr().out.count("reward ") == 2
    assert load_file(tmp_path / "flat" / "model.safetensors").keys()
    with pytest.raises(AssertionError, match="is there already"):
        flat["main"](words)


def test_its_reward_is_the_last_number(flat: dict[str, Callable[..., Any]]) -> None:
    reward = flat["reward"]
    assert reward("2 and 3 make 5.", ["5"]) == 1.0
    assert reward("5, or 6", ["5"]) == 0.0
    assert reward("-5", ["5"]) == reward("five", ["5"]) == reward("", ["5"]) == 0.0
