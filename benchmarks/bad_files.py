"""What taut and TRL do with five bad training files: ``python benchmarks/bad_files.py``.

Each file has 64 chats and one mistake that real files have. Both fine-tune the same tiny random model on it for two
steps, with ``max_length=1024`` and everything else at its default: ``taut sft`` from the command line, TRL's SFTTrainer
on ``load_dataset("json")``. The page shows the exit code of taut and its line, and what TRL trained on, decoded.

Not a measure of speed: what counts is whether a run says that its file is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from peers.environments import python_of

PEERS = Path(__file__).parent / "peers"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = ["red", "blue", "green", "one", "two", "three", "river", "stone", "paper", "cloud"]
MAX_LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "taut")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL")
    options = parser.parse_args()
    trl = options.trl_python or python_of("trl", options.cache)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(folder / "model")
        for name, (mistake, write) in FILES.items():
            path = folder / f"{name}.jsonl"
            path.write_text(write(), encoding="utf-8")
            print(f"\n{name}: {mistake}")
            print(f"  taut  {run_taut(folder / 'model', path)}")
            print(f"  TRL   {run_trl(trl, folder / 'model', path)}")


def arguments(model: Path, path: Path) -> list[str]:
    """The command line of taut for a file, in the file's folder."""
    keys = [f"model={model}", f"data.train={path.name}", "out=out", "overwrite=true"]
    return ["sft", *keys, "steps=2", f"data.max_length={MAX_LENGTH}"]


def run_taut(model: Path, path: Path) -> str:
    """Exit code and last line of a run."""
    command = [sys.executable, "-m", "taut", *arguments(model, path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, check=False)
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
    return f"exit {done.returncode}: {last}"


def run_trl(python: Path, model: Path, path: Path) -> str:
    """What the worker reports."""
    command = [str(python), str(PEERS / "bad_files_trl.py"), str(model), str(path), str(MAX_LENGTH)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(path.parent / "datasets")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1]}"
    return done.stdout.strip().splitlines()[-1]


def chats() -> list[list[dict[str, Any]]]:
    """64 chats of random words."""
    drawn = random.Random(0)

    def text(count: int) -> str:
        return " ".join(drawn.choices(WORDS, k=count))

    return [
        [{"role": "user", "content": text(9)}, {"role": "assistant", "content": text(9)}]
        for _ in range(64)
    ]


def lines(rows: list[list[dict[str, Any]]]) -> list[str]:
    return [json.dumps({"messages": messages}) for messages in rows]


def misspelled_role() -> str:
    rows = chats()
    rows[40][1]["role"] = "asistant"
    return "\n".join(lines(rows)) + "\n"


def missing_answer() -> str:
    rows = chats()
    rows[40][1]["content"] = None
    return "\n".join(lines(rows)) + "\n"


def key_twice() -> str:
    rows = lines(chats())
    rows[40] = (
        rows[40][:-1]
        + ', "messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "no"}]}'
    )
    return "\n".join(rows) + "\n"


def turns_in_an_answer() -> str:
    rows = chats()
    rows[40][1]["content"] += (
        "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nno"
    )
    return "\n".join(lines(rows)) + "\n"


def long_answers() -> str:
    rows = chats()
    for messages in rows:
        messages[1]["content"] = " ".join(WORDS * 30)
    return "\n".join(lines(rows)) + "\n"


FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "misspelled_role": ("line 41 has the role asistant", misspelled_role),
    "missing_answer": ("the answer in line 41 is null", missing_answer),
    "key_twice": ("line 41 has messages twice", key_twice),
    "turns_in_an_answer": (
        "the answer in line 41 holds two more turns, written with the template's own tokens",
        turns_in_an_answer,
    ),
    "long_answers": (
        "every answer is longer than max_length, so that its end is cut off",
        long_answers,
    ),
}


def save_model(folder: Path) -> None:
    """A random Qwen2 of two layers, and a tokenizer of bytes with ChatML."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(
        BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(specials)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=ends[2],
        pad_token_id=ends[0],
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
