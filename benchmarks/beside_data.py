"""Tiny models with random weights and a few rows, in the forms in which TRL, LLaMA-Factory and ms-swift read them.

The models share a tokenizer with Llama 3's template: ``tiny`` trains, ``teacher`` has other weights, ``judge`` has one
score, and ``talker`` draws no special token but the end. A data set has as many rows as a step, so that every step has
all of them, in whatever order they are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.helpers.tiny_tokenizers import SPECIALS, save_tokenizer, tiny_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

QUESTIONS = (
    "What is the capital of France?",
    "What is 2 plus 3?",
    "Who sat on the mat?",
    "Hello, how are you today?",
    "What does the fox do, and where does it do it?",
    "Where should she stop?",
    "Is the town small?",
    "Say a word.",
)
GOOD = (
    "Paris is the capital of France.",
    "2 plus 3 is 5. Thank you!",
    "The cat sat on the mat with the other cats of the town.",
    "I am fine, and how are you?",
    "The quick brown fox jumps over the lazy dog.",
    "She stops where she should stop: at the end of the answer.",
    "Yes.",
    "A word of the town.",
)
BAD = (
    "The mat.",
    "2 plus 3 is the capital of the dog, and the other way round.",
    "Once upon a time there was a small cat.",
    "Why?",
    "It thinks about the answer, writes it down and then reads the question.",
    "At the mat.",
    "No, it is not: the town is a weather assistant.",
    "You are welcome.",
)
NUM_LABELED, NUM_GOOD, NUM_PROMPTS = 6, 4, 2
Row = dict[str, Any]


def write_models(folder: Path) -> None:
    """A folder for each model."""
    tokenizer = tiny_tokenizer("llama3")
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for seed, name in enumerate(("tiny", "teacher", "judge", "talker")):
        model: Any = (
            LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))
            if name == "judge"
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
        fill(model, seed)
        if name == "talker":
            specials = tokenizer.convert_tokens_to_ids(list(SPECIALS))
            keep_to_text(model, [tokenizer.eos_token_id], specials)
        model.save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name)


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Weights that no version of a library changes."""
    random = np.random.default_rng(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.from_numpy(0.2 * random.standard_normal(weight.shape))
        weight.copy_(noise + 1 if "norm" in name else noise)


@torch.no_grad()
def keep_to_text(model: Any, ends: Sequence[int], specials: Sequence[int]) -> None:
    """Of special tokens draw only those that end. The first number of every hidden state is made the same for all
    tokens; by it the head raises or lowers a token.
    """
    model.model.embed_tokens.weight[:, 0] = 1
    model.model.norm.weight[0] = 1
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[list(specials), 0] = -20
    model.lm_head.weight[list(ends), 0] = 2
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0


def write_data(folder: Path) -> None:
    """``messages/train.jsonl`` and the others; ``dataset_info.json`` for LLaMA-Factory."""
    talks = [[user(q), assistant(a)] for q, a in zip(QUESTIONS, GOOD, strict=True)]
    texts = [f"{q} {good} {bad}" for q, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)]
    answers = [*GOOD[:NUM_GOOD], *BAD[NUM_GOOD:NUM_LABELED]]
    labeled = [
        (question, answer, at < NUM_GOOD)
        for at, (question, answer) in enumerate(zip(QUESTIONS[:NUM_LABELED], answers, strict=True))
    ]
    triples = list(zip(QUESTIONS, GOOD, BAD, strict=True))
    files: dict[str, Sequence[Row]] = {
        "messages/train.jsonl": [{"messages": talk} for talk in talks],
        "completions/train.jsonl": [{"prompt": [ask], "completion": [say]} for ask, say in talks],
        "texts/train.jsonl": [{"text": text} for text in texts],
        "pairs/train.jsonl": [
            {"prompt": [user(q)], "chosen": [assistant(good)], "rejected": [assistant(bad)]}
            for q, good, bad in triples
        ],
        "labeled/train.jsonl": [
            {"prompt": [user(q)], "completion": [assistant(a)], "label": label}
            for q, a, label in labeled
        ],
        "prompts/train.jsonl": [{"prompt": [user(q)]} for q in QUESTIONS[:NUM_PROMPTS]],
        "instructions.jsonl": [{"instruction": q, "input": "", "output": a} for q, a, _ in triples],
        "ranked.jsonl": [
            {"conversations": [human(q)], "chosen": gpt(good), "rejected": gpt(bad)}
            for q, good, bad in triples
        ],
        "labels.jsonl": [
            {"messages": [user(q), assistant(a)], "label": label} for q, a, label in labeled
        ],
        "compared.jsonl": [{"question": q, "good": good, "bad": bad} for q, good, bad in triples],
        "questions.jsonl": [{"messages": [user(q)]} for q in QUESTIONS[:NUM_PROMPTS]],
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "dataset_info.json").write_text(json.dumps(FACTORY))


def likelihoods(folder: Path) -> dict[str, float]:
    """The mean negative log-likelihood of ``GOOD`` after ``QUESTIONS`` under ``tiny``, by the library alone:

    answers    of the tokens of the answers
    rows       of the rows, of each the mean of its answer's tokens
    all        of all tokens but the first of each row
    """
    tokenizer = tiny_tokenizer("llama3")
    model = LlamaForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    every, own = [], []
    for question, answer in zip(QUESTIONS, GOOD, strict=True):
        talk = [user(question), assistant(answer)]
        encode: Any = tokenizer.apply_chat_template
        prompt_ids = encode(talk[:1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(encode(talk, return_dict=False))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        every.append(nll)
        own.append(nll[len(prompt_ids) - 1 :])
    return {
        "answers": float(torch.cat(own).mean()),
        "rows": float(torch.stack([nll.mean() for nll in own]).mean()),
        "all": float(torch.cat(every).mean()),
    }


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def human(text: str) -> Row:
    return {"from": "human", "value": text}


def gpt(text: str) -> Row:
    return {"from": "gpt", "value": text}


FACTORY: dict[str, Any] = {
    "texts": {"file_name": "texts/train.jsonl", "columns": {"prompt": "text"}},
    "instructions": {"file_name": "instructions.jsonl"},
    "pairs": {
        "file_name": "ranked.jsonl",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "labeled": {
        "file_name": "labels.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
}
"""LLaMA-Factory's ``dataset_info.json``."""
