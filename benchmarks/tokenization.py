"""Rows tokenized a second, by one process and by two, beside what others map: ``python benchmarks/tokenization.py``.

    python benchmarks/tokenization.py --rows 20000 --rounds 3
    python benchmarks/tokenization.py --memory 100000 3000000    # peak memory, and a warm start, of taut alone
    python benchmarks/tokenization.py --memory 100000 600000 --shard-mib 16      # the same, with more shards of less

Rows are chats of two messages in syllables, the tokenizer a byte-level BPE that is trained on them. Contenders take
turns, each in a process of its own with one thread; the best of the rounds counts. What two processes gain is stated
beside what two processes of pure arithmetic gain on this machine in the same round: others work on it too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PEER = Path(__file__).parent / "peers" / "tokenization.py"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYLLABLES = [
    "ka",
    "to",
    "ri",
    "ne",
    "mo",
    "sa",
    "lu",
    "vi",
    "pe",
    "da",
    "shi",
    "gor",
    "ment",
    "ing",
    "er",
    "ous",
]
CONTENDERS = ("taut", "trl", "llamafactory")
ARITHMETIC = "sum(i * i for i in range(20_000_000))"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Texts:
    def __init__(self) -> None:
        self.draw = random.Random(0)
        syllables = [self.draw.choices(SYLLABLES, k=self.draw.randint(1, 4)) for _ in range(20_000)]
        self.words = ["".join(word) for word in syllables]

    def text(self, num_words: int) -> str:
        at = (min(int(self.draw.expovariate(1 / 2000)), 19_999) for _ in range(num_words))
        return " ".join(self.words[index] for index in at)

    def chats(self, num_rows: int, longest: int) -> Iterator[str]:
        for _ in range(num_rows):
            roles = ("user", "assistant")
            lengths = [self.draw.randint(longest // 8, longest) for _ in roles]
            contents = [self.text(length) for length in lengths]
            pairs = zip(roles, contents, strict=True)
            yield json.dumps({"messages": [{"role": a, "content": b} for a, b in pairs]}) + "\n"


def save_tokenizer(texts: Texts, folder: Path) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([texts.text(2000) for _ in range(100)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def run(contender: str, processes: int, rows: Path, **more: Any) -> dict[str, Any]:
    job = {"contender": contender, "processes": processes, "rows": str(rows), **more}
    job["tokenizer"] = str(rows.parent / "tokenizer")
    done = subprocess.run(
        [sys.executable, str(PEER), json.dumps(job)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def arithmetic_gain() -> float:
    """How much more two processes of pure arithmetic do than one, in the same time."""

    def seconds(processes: int) -> float:
        began = time.perf_counter()
        running = [subprocess.Popen([sys.executable, "-c", ARITHMETIC]) for _ in range(processes)]
        for process in running:
            process.wait()
        return time.perf_counter() - began

    return 2 * seconds(1) / seconds(2)


def compare(folder: Path, texts: Texts, num_rows: int, rounds: int) -> None:
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        file.writelines(texts.chats(num_rows, 160))
    rates: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    costs: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    gains = []
    for _ in range(rounds):
        gains.append(arithmetic_gain())
        for contender in CONTENDERS:
            for processes in (1, 2):
                found = run(contender, processes, rows)
                rates[contender, processes].append(found["rows"] / found["seconds"])
                costs[contender, processes].append(found["cpu_seconds"])
    print(f"{num_rows:,} rows, {rows.stat().st_size / 2**20:.0f} MiB; rows/s, processor seconds")
    for contender in CONTENDERS:
        one, two = (max(rates[contender, processes]) for processes in (1, 2))
        cost, costs_two = (min(costs[contender, processes]) for processes in (1, 2))
        print(
            f"  {contender:13} 1 process {one:8,.0f} {cost:6.1f} s   2 processes {two:8,.0f} {costs_two:6.1f} s   "
            f"gain {two / one:.2f}"
        )
    print(f"  arithmetic    gain {max(gains):.2f}")


def measure_memory(folder: Path, texts: Texts, num_rows: int, shard_mib: int) -> None:
    """Tokenize short rows, then load them again from the cache."""
    rows = folder / f"short-{num_rows}.jsonl"
    with rows.open("w") as file:
        file.writelines(texts.chats(num_rows, 8))
    cache = str(folder / "cache")
    for name in ("tokenized", "from the cache"):
        found = run("taut", 1, rows, cache=cache, shard_mib=shard_mib)
        print(
            f"{num_rows:,} short rows {name}: {found['seconds']:,.1f} s, peak {found['peak_mib']:,.0f} MiB, "
            f"{len(list(Path(cache).glob('*/0*')))} shards so far",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="+", default=[], metavar="ROWS")
    parser.add_argument("--shard-mib", type=int, default=256)
    options = parser.parse_args()
    texts = Texts()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_tokenizer(texts, folder / "tokenizer")
        for num_rows in options.memory:
            measure_memory(folder, texts, num_rows, options.shard_mib)
        if not options.memory:
            compare(folder, texts, options.rows, options.rounds)


if __name__ == "__main__":
    main()
