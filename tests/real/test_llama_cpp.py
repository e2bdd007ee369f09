"""What llama.cpp itself makes of exported files: ids, chat prompt, logits, continuation, and that it stops.

TAUT_LLAMA_CPP names a Python that has llama-cpp-python; it is built from source and is no dependency of taut.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import sft, write_rows
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import CORPUS, MARKERS, SPECIALS, TEMPLATES, tiny_tokenizer
from tests.tools.export.test_export import LLAMA3
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from taut.data.store.cache import default_directory
from taut_tools.demo import fetch
from taut_tools.export.export import run
from taut_tools.export.gguf import PRE_TOKENIZERS
from taut_tools.export.settings import Export

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        "TAUT_LLAMA_CPP" not in os.environ,
        reason="TAUT_LLAMA_CPP names no Python with llama-cpp-python",
    ),
]

PROBE = """
import json, sys
import llama_cpp
asked = json.load(sys.stdin)
F32 = 0  # of the K/V cache, which is float16 by default
llm = llama_cpp.Llama(asked["model"], n_ctx=256, n_threads=1, logits_all=True, verbose=False, type_k=F32, type_v=F32)
found = {"ids": [llm.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]}
found["with_bos"] = llm.tokenize(b"a", add_bos=True, special=True)
llm.eval(asked["prompt"])
found["logits"] = llm.scores[: len(asked["prompt"])].tolist()
llm.reset()
done = llm.create_chat_completion(asked["messages"], max_tokens=asked["tokens"], temperature=0.0, repeat_penalty=1.0)
found["text"] = done["choices"][0]["message"]["content"]
found["finish"] = done["choices"][0]["finish_reason"]
found["prompt_tokens"] = done["usage"]["prompt_tokens"]
json.dump(found, sys.stdout)
"""
TEXTS = (
    "Hello, world!",
    "  two  spaces\n\n\nand lines\t\ttabs ",
    "I'm, WE'LL, don't 'Re",
    "1234567 3.14 12 345",
    "naïve 東京 🚀🦙 Български ქართული",
    "def f(x):\n    return x**2  # c\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "a<|im_end|>b",
    "",
    "   ",
    "....!!!??? ``` '''",
    "x" * 50 + " \r\n y\r\r\n",
    "<think>\n</think>\n\n<tool_call>",
    "a'LL a'S 'K",
)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Compared:
    """An exported model here and in llama.cpp."""

    tokenizer: Any
    own_text: str
    ended: bool
    found: dict[str, Any]
    largest: float
    """Difference of a logprob."""


def compare(model: Path, out: Path, messages: Any = MESSAGES, **keys: Any) -> Compared:
    """Export, ask both, and require the same ids and prompt."""
    assert run(Export(model=str(model), out=str(out), **keys)) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, tokenize=True
    )
    found = ask(out, TEXTS, prompt, messages)
    for text, ids in zip(TEXTS, found["ids"], strict=True):
        assert ids == tokenizer.encode(text, add_special_tokens=False), text
    assert found["with_bos"] == tokenizer.encode("a")
    assert found["prompt_tokens"] == len(prompt)
    with torch.no_grad():
        ids = torch.tensor([prompt])
        logits = own(ids).logits[0]
        answer = own.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
    there = torch.tensor(found["logits"])
    largest = (logits.log_softmax(-1) - there.log_softmax(-1)).abs().max()
    new = answer[0, len(prompt) :].tolist()
    ended = new[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Compared(tokenizer, text, ended, found, float(largest))


def ask(out: Path, texts: Sequence[str], prompt: Sequence[int], messages: Any) -> dict[str, Any]:
    asked = {
        "model": str(out),
        "texts": texts,
        "prompt": prompt,
        "messages": messages,
        "tokens": 24,
    }
    done = subprocess.run(
        [os.environ["TAUT_LLAMA_CPP"], "-c", PROBE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not (default_directory() / "wheels" / fetch.MODEL_WHEEL.file).exists(),
    reason="the demo's model is not in the cache; run make demo once",
)
def test_the_real_model_answers_and_stops_as_here(tmp_path: Path) -> None:
    found = compare(fetch.get_model(default_directory()), tmp_path / "m.gguf")
    print("largest difference of a logprob:", found.largest)
    assert found.largest < 1e-3
    assert found.found["text"] == found.own_text == "The capital of France is Paris."
    assert found.ended
    assert found.found["finish"] == "stop"


def test_a_tuned_model_answers_and_stops_as_here(tmp_path: Path) -> None:
    model = save_tiny("qwen2", tmp_path / "m", tiny_tokenizer())
    turn = {"role": "assistant", "content": "Paris is the capital of France."}
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": [*MESSAGES, turn]}] * 6)
    sft(model, rows, tmp_path / "run", steps=60, optim__learning_rate=5e-3)
    found = compare(tmp_path / "run" / "model", tmp_path / "m.gguf", dtype="f32")
    assert found.largest < 1e-3
    assert found.found["text"] == found.own_text == turn["content"]
    assert found.ended
    assert found.found["finish"] == "stop"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3, "head_dim": 32, "max_position_embeddings": 256}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_each_architecture_gives_the_same_logits(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = save_tiny(name, tmp_path / "m", tiny_tokenizer(), **changes)
    found = compare(model, tmp_path / "m.gguf")
    print(name, changes, found.largest)
    assert found.largest < 1e-3


@pytest.mark.parametrize(("steps", "ignore_merges"), PRE_TOKENIZERS)
def test_each_cut_of_the_table_gives_the_same_ids(
    steps: tuple[str, ...], ignore_merges: bool, tmp_path: Path
) -> None:
    tokenizer = trained_with(steps, ignore_merges)
    model = save_tiny("llama", tmp_path / "m", tokenizer)
    read = json.loads(AutoTokenizer.from_pretrained(model).backend_tokenizer.to_str())
    wanted = json.loads(tokenizer.backend_tokenizer.to_str())
    assert read["pre_tokenizer"] == wanted["pre_tokenizer"], "the class put its own in place"
    found = compare(model, tmp_path / "m.gguf")
    assert found.found["with_bos"][0] == tokenizer.bos_token_id


def trained_with(steps: tuple[str, ...], ignore_merges: bool) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges go as far as the cut lets them, so that another cut gives other ids."""
    parts = {
        "digits": lambda: pre_tokenizers.Digits(individual_digits=True),
        "words": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    }
    cut = [
        parts[step]() if step in parts else pre_tokenizers.Split(Regex(step), "isolated")
        for step in steps
    ]
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*CORPUS, *TEXTS] * 3, trainer)
    backend.add_special_tokens(list(SPECIALS))
    backend.add_tokens(list(MARKERS))
    bos = "<|begin_of_text|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token="<|eot_id|>"
    )
    tokenizer.chat_template = TEMPLATES["llama3"]
    return tokenizer
