"""No false alarm: sound data on tiny models of many architectures, with the chat templates met in practice, in every
way of training. Every check is asked, the full part included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, chats, save_model, write_rows
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, STATEFUL, save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.checks.examine import Examination, examine
from taut.checks.session import Session
from taut.config import from_mapping
from taut.methods.method import RunConfig
from taut.train import distributed

PASSAGE = (
    "The cat sat on the mat and the dog ran over the hill to see what the cat would do about the bird. "
    * 3
)


def ask(model: Path, train: Path, **keys: Any) -> Examination:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    fixed = {"model": str(model), "data.train": str(train), "steps": 20}
    run = from_mapping(RunConfig, {**QUIET, **fixed, **dotted})
    return examine(Session(run, distributed.start("cpu")), "full")


def told(found: Examination) -> str:
    return "\n".join(f"{one.name}: {one.finding}" for one in found.failures)


def conversations(template: str) -> list[dict[str, Any]]:
    """Rows as users of the template have them: system prompts where it takes them, reasoning where it writes it."""
    rows = []
    for number, row in enumerate(chats(12)):
        messages = row["messages"] if number % 2 else row["messages"][1:]
        if template in ("gemma", "mistral"):
            messages = row["messages"][1:]
        if template == "qwen3" and number % 3:
            messages = [*messages[:-1], {**messages[-1], "reasoning_content": "the cat thinks"}]
        if number % 4 == 0:
            more = [
                {"role": "user", "content": "and then?"},
                {"role": "assistant", "content": "the end"},
            ]
            messages = [*messages, *more]
        rows.append({"messages": messages})
    return rows


ROUTED: list[dict[str, Any]] = [
    {"router__aux_loss_coef": 0.05, "activation_checkpointing": True},
    {"router__aux_loss_coef": 0.05, "router__aux_loss": "per_layer", "lora__rank": 4},
]


@pytest.mark.parametrize("keys", slow_except(ROUTED[:1], ROUTED), ids=str)
def test_the_routers_loss(keys: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3_moe")
    train = write_rows(tmp_path / "train.jsonl", chats(9))
    found = ask(model, train, dtype="float32", **keys)
    assert not found.failures, told(found)


TEMPLATED = [
    ("qwen2", "qwen2.5", "float32"),
    ("qwen3", "qwen3", "bfloat16"),
    ("llama", "llama3", "float32"),
    ("gemma3", "gemma", "bfloat16"),
    ("mistral", "mistral", "float32"),
]
"""Each template once."""


@pytest.mark.parametrize(
    ("architecture", "template", "dtype"),
    slow_except(
        [("llama", "llama3", "float32")],
        [
            *TEMPLATED,
            ("qwen2", "qwen2.5", "bfloat16"),
            ("qwen3", "qwen3", "float32"),
            ("llama", "llama3", "bfloat16"),
            ("gemma3", "gemma", "float32"),
            ("gemma2", "gemma", "float32"),
            ("gemma2", "gemma", "bfloat16"),
            ("mistral", "mistral", "bfloat16"),
            ("qwen3_moe", "qwen3", "float32"),
            ("qwen3_moe", "qwen3", "bfloat16"),
        ],
    ),
)
def test_real_world_templates(architecture: str, template: str, dtype: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=template in ("llama3", "gemma", "mistral"))
    model = save_tiny(architecture, tmp_path / "model", tokenizer)
    train = write_rows(tmp_path / "train.jsonl", conversations(template))
    held_out = write_rows(tmp_path / "eval.jsonl", conversations(template)[:4])
    found = ask(model, train, dtype=dtype, data__eval=str(held_out))
    assert not found.failures, told(found)


@pytest.mark.parametrize(
    "architecture",
    slow_except(["qwen3_next"], [*CARRIED, *STATEFUL]),
)
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", architecture)
    train = write_rows(tmp_path / "train.jsonl", chats(9))
    found = ask(model, train, dtype="float32")
    assert not found.failures, told(found)


@pytest.mark.parametrize(
    "keys",
    slow_except(
        [
            {"lora__rank": 4, "activation_checkpointing": True},
            {"tokens__add": ["<|note|>"]},
        ],
        [
            {"lora__rank": 4},
            {"lora__rank": 4, "activation_checkpointing": True},
            {"lora__rank": 4, "lora__dropout": 0.1},
            {"freeze": ["model.layers.0.*"]},
            {"freeze": ["*embed_tokens*"]},
            {"activation_checkpointing": True},
            {"noise__neftune_alpha": 5.0},
            {"batch__share_prefixes": False},
            {"data__targets": "all"},
            {"data__targets": "last"},
            {"tokens__add": ["<|note|>"]},
            {"tokens__add": ["cat"]},
            {"lora__rank": 4, "lora__modules_to_save": ["embed_tokens"]},
            {"epochs": 1.0, "steps": None},
            {"dtype": "float64"},
        ],
    ),
    ids=str,
)
def test_every_way_of_training(keys: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    train = write_rows(tmp_path / "train.jsonl", chats(12))
    found = ask(model, train, **{"dtype": "float32", **keys})
    assert not found.failures, told(found)


DATA: dict[str, list[dict[str, Any]]] = {
    "one row": chats(1),
    "the same row many times": chats(1) * 9,
    "documents": [{"text": f"{PASSAGE} {number}"} for number in range(6)],
    "completions": [
        {"prompt": f"{word}?", "completion": f" the {word}"} for word in PASSAGE.split()[:9]
    ],
    "one word": [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ]
    * 3,
    "one prompt, several answers": [
        {
            "messages": [
                {"role": "user", "content": "say a word"},
                {"role": "assistant", "content": word},
            ]
        }
        for word in PASSAGE.split()[:9]
    ],
    "questions on one passage, answers in it": [
        {
            "messages": [
                {"role": "user", "content": f"{PASSAGE}\nwhat is word {number}?"},
                {"role": "assistant", "content": word},
            ]
        }
        for number, word in enumerate(PASSAGE.split()[:9])
    ],
    "alpaca": [
        {"instruction": "say it", "input": word, "output": f"{word}!"}
        for word in PASSAGE.split()[:9]
    ],
}


@pytest.mark.parametrize(
    "name",
    slow_except(["one row"], DATA),
)
def test_every_shape_of_sound_data(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    train = write_rows(tmp_path / "train.jsonl", DATA[name])
    found = ask(model, train, dtype="float32")
    assert not found.failures, told(found)
    json.dumps([one.finding.as_fields() for one in found.results], allow_nan=False)


@pytest.mark.parametrize(("architecture", "kernel"), [("qwen2", "flash"), ("gemma2", "softmax")])
def test_the_kernels_of_attention_are_told_by_name(
    architecture: str, kernel: str, tmp_path: Path
) -> None:
    """Two layers each; a softcap is no kernel's, and is computed with a softmax."""
    model = save_model(tmp_path / "model", architecture)
    train = write_rows(tmp_path / "train.jsonl", chats(3))
    found = {one.name: one.finding for one in ask(model, train, dtype="float32").results}
    told_kernels = found["attention.library"].notes[0]
    assert kernel in told_kernels
    assert told_kernels.endswith("(2x)")
