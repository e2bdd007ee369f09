"""What the runs of this folder begin with: a small random model, and rows of four tasks; the same for the same seed.

    python examples/grpo/make.py DIR

    DIR/model                a Llama of 1.1M parameters: three layers of 160
    DIR/TASK/warm.jsonl      questions with answers, for taut sft
    DIR/TASK/train.jsonl     questions for reinforcement learning; what verifies an answer stands next to them
    DIR/TASK/eval.jsonl      held-out questions; none of them is in the other two files

Three tasks are generators of reasoning-gym with their own verifiers; the questions are theirs, word for word. The
fourth, ``decimals``, asks for a decimal as a fraction in LaTeX, and the math verifier judges whether an answer equals
the right one, in lowest terms or not.

The vocabulary is bytes, and the phrases that questions are made of, so that a prompt has ten to thirty tokens.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Row = dict[str, Any]

SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|pad|>")
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "Your task is, given a list of letters, to form a valid palindrome.\n\nA palindrome is a phrase that reads the "
    "same forwards and backwards.\n\nIf there are multiple possible answers, only respond with one of them. You must "
    "use all the letters provided.\n\nYour output should be a single string, with no spaces or punctuation.\n\nNow, "
    "form a valid palindrome using the following letters: ",
    "Sort these numbers in ascending order: ",
    "Sort these numbers in descending order: ",
    "\nPlease follow the instruction below:\n## 1. Let all your answers be a list of numbers. Instead of reporting "
    "your answer as -69, -13, 1, 7, 11, 43, 59, 61, use ['-69', '-13', '1', '7', '11', '43', '59', '61'] instead\n"
    "## 2. Convert all numbers in the square brackets as strings. For example, ['-69', '-13', '1', '7', '11', '43', "
    "'59', '61']\n",
    ".0, ",
    "['",
    ".0', '",
    ".0']",
    "Write as a fraction: ",
    "\\boxed{\\frac{",
    "}{",
    "}}",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GENERATORS: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "palindrome_generation": {"min_length": 3, "max_length": 6},
    "number_sorting": {
        "min_numbers": 2,
        "max_numbers": 2,
        "max_decimals": 0,
        "min_value": 10,
        "max_value": 99,
    },
}
"""reasoning-gym's name -> its settings."""
TASKS = (*GENERATORS, "decimals")
COUNTS = {"eval": 500, "warm": 1500, "train": 1500}
LOOKED_AT = 20_000
"""Questions made to find so many different ones."""


def generated(name: str, seed: int) -> Iterator[Row]:
    """What a generator of reasoning-gym has to ask."""
    yield from reasoning_gym.create_dataset(name, seed=seed, size=LOOKED_AT, **GENERATORS[name])


def decimals(seed: int) -> Iterator[Row]:
    """Decimals to be written as fractions; of two equal answers, over ten or in lowest terms, either."""
    draw = random.Random(seed)
    for _ in range(LOOKED_AT):
        tenths = draw.randint(1, 9999)
        lowest = Fraction(tenths, 10)
        above, below = draw.choice([(tenths, 10), (lowest.numerator, lowest.denominator)])
        answer = f"\\boxed{{\\frac{{{above}}}{{{below}}}}}"
        yield {"question": f"Write as a fraction: {tenths / 10}", "answer": answer}


def make_rows(task: str, seed: int) -> dict[str, list[Row]]:
    """The rows of each file; no question comes twice."""
    made = decimals(seed) if task == "decimals" else generated(task, seed)
    rows = list({row["question"]: row for row in made}.values())
    random.Random(seed).shuffle(rows)
    found = {}
    for name, count in COUNTS.items():
        found[name], rows = rows[:count], rows[count:]
        assert len(found[name]) == count, f"{task} has not enough questions"
    return found


def asked(row: Row) -> Row:
    """A row for taut grpo and taut eval: the prompt, the answer, and what else its verifier wants."""
    return {"prompt": [{"role": "user", "content": row["question"]}], **row}


def answered(row: Row) -> Row:
    """A row for taut sft."""
    answer = {"role": "assistant", "content": row["answer"]}
    return {"messages": [{"role": "user", "content": row["question"]}, answer]}


def write(path: Path, rows: list[Row]) -> None:
    """A row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and phrases."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    end, *_, pad = SPECIALS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)
    fast.chat_template = TEMPLATE
    return fast


def make_model(directory: Path, seed: int = 0) -> None:
    """A random model with its tokenizer, as ``AutoTokenizer`` and ``AutoModelForCausalLM`` load them."""
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids(SPECIALS[0])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    AutoTokenizer.from_pretrained(directory).save_pretrained(directory)


SHAPES: dict[str, Callable[[Row], Row]] = {"warm": answered, "train": asked, "eval": asked}


def main(directory: Path) -> None:
    """Write it all."""
    make_model(directory / "model")
    for task in TASKS:
        for name, rows in make_rows(task, seed=0).items():
            write(directory / task / f"{name}.jsonl", [SHAPES[name](row) for row in rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
