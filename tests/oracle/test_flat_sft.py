"""The flat example is the oracle: packed, with shared prefixes, taut gives the numbers of one sample at a time.

Both run in float64 with the library's hidden casts to float32 turned into float64 (``Wide``), so that what is left is
rounding: 1e-9 relative, on the loss of every step and on every final weight.
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoTokenizer

import taut
from taut.models.precision import Wide
from taut.train.log.events import read_events

FLAT = Path(__file__).parents[2] / "examples" / "flat" / "sft.py"
LIMIT = 1e-9
WORDS = ("the", "cat", "dog", "ran", "over", "a", "big", "red", "house", "then", "saw", "birds")
STEPS = 12
"""Of 7 samples: the 40 rows are gone round twice, and steps span two epochs."""


@pytest.fixture(scope="module")
def flat() -> dict[str, Callable[..., Any]]:
    return runpy.run_path(str(FLAT))


def write_rows(path: Path) -> Path:
    """40 rows under one system prompt, of one to three turns; some turns are not to be learned."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    with path.open("w") as lines:
        for number in range(40):
            messages = [{"role": "system", "content": "you are a helpful cat and you answer well"}]
            for turn in range(1 + number % 3):
                messages.append({"role": "user", "content": words(15)})
                answer: dict[str, Any] = {"role": "assistant", "content": words(8)}
                messages.append(
                    answer | ({"train": False} if turn == 0 and number % 6 == 5 else {})
                )
            lines.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.mark.parametrize("name", slow_except(["qwen2"], ["qwen2", "gemma2"]))
def test_taut_and_the_flat_example_train_the_same_model(
    name: str, tmp_path: Path, flat: dict[str, Callable[..., Any]]
) -> None:
    model = save_tiny(name, tmp_path / "tiny", tiny_tokenizer(), dtype=torch.float64)
    data = write_rows(tmp_path / "rows.jsonl")
    taut.sft(
        model=str(model),
        data={"train": str(data)},
        out=str(tmp_path / "taut"),
        steps=STEPS,
        seed=3,
        dtype="float64",
        device="cpu",
        **{"batch.samples_per_step": 7, "optim.learning_rate": 1e-2},
    )
    steps = [e for e in read_events(tmp_path / "taut" / "events.jsonl") if e["kind"] == "step"]
    assert all(step["num_tokens"] < step["num_tokens_unshared"] for step in steps)

    words = f"--model {model} --data {data} --out {tmp_path / 'flat'} --steps {STEPS} --seed 3"
    words += " --dtype float64 --device cpu --samples-per-step 7 --learning-rate 1e-2"
    args = flat["settings"](words.split())
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = flat["read"](args.data, tokenizer, 256)
    twin = flat["load"](args.model, args.dtype, args.device)
    with Wide():
        losses = flat["train"](twin, samples, args)

    assert losses == pytest.approx([step["loss"] for step in steps], rel=LIMIT, abs=0)
    assert losses[-1] < 0.9 * losses[0], (
        "the run moves the model: agreement would be cheap otherwise"
    )
    trained = load_file(tmp_path / "taut" / "model" / "model.safetensors")
    for key, weight in twin.state_dict().items():
        if key in trained:  # tied and derived tensors are saved once or not at all
            assert trained[key].dtype == torch.float64
            assert float((trained[key] - weight).norm()) <= LIMIT * float(weight.norm()), key
    assert trained.keys() <= twin.state_dict().keys()


def test_as_a_program_it_saves_a_model_that_stops(
    tmp_path: Path, flat: dict[str, Callable[..., Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny("qwen2", tmp_path / "tiny", tiny_tokenizer())
    data = write_rows(tmp_path / "rows.jsonl")
    words = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / "flat")]
    losses = flat["main"]([*words, "--samples-per-step", "16", "--device", "cpu"])
    assert len(losses) == 3, "40 samples: steps of 16, 16 and 8"
    assert capsys.readouterr().out.count("step ") == 3
    generation = json.loads((tmp_path / "flat" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(
        "<|im_end|>"
    )
    with pytest.raises(AssertionError, match="is not empty"):
        flat["main"](words)
