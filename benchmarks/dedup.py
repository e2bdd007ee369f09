"""Duplicates of 200,000 generated rows with planted ones: ``python benchmarks/dedup.py``.

Every tenth row is a copy of an earlier one: exact, in other case, with other white space, or with 5 % of the words of
its answer replaced. Every tenth only looks like an earlier one: a long question with another short answer, or 15 % of
the words of the answer replaced. ``taut data dedup`` runs from the command line; next to it the way of datasketch's own
documentation, MinHash and MinHashLSH over the same word n-grams at the same threshold, removing what the index answers
without looking at the sets. The page shows how many rows of each kind were removed, the seconds of the processor, and
the peak of the memory. ``--peer-path``: a folder with datasketch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

COPIES = ("exact", "case", "white space", "5% of words")
LOOKALIKES = ("another answer", "15% of words")
THRESHOLD, NGRAM, HASHES = 0.7, 3, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--peer-path", type=Path, help="a folder with datasketch")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        print(json.dumps(datasketch_removed(options.peer)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path, out = Path(scratch) / "rows.jsonl", Path(scratch) / "out.jsonl"
        kind_of = write_rows(path, options.rows)
        command = [sys.executable, "-m", "taut", "data", "dedup", str(path), f"out={out}"]
        seconds, memory, _ = timed([*command, f"threshold={THRESHOLD}", f"ngram={NGRAM}"])
        removed = Path(f"{out}.removed.jsonl").read_text(encoding="utf-8").splitlines()
        numbers = {int(json.loads(line)["id"].rpartition(":")[2]) - 1 for line in removed}
        show("taut data dedup", kind_of, numbers, seconds, memory, options.rows)
        if options.peer_path is not None:
            sys.path.append(str(options.peer_path))
            code = [sys.executable, __file__, "--peer", str(path)]
            seconds, memory, printed = timed(code, {"PYTHONPATH": str(options.peer_path)})
            show("datasketch", kind_of, set(json.loads(printed)), seconds, memory, options.rows)


def write_rows(path: Path, num_rows: int) -> dict[int, str]:
    """Rows of 30 to 300 words; returns the kinds of those that are copies, or look so, by number."""
    draw = random.Random(0)
    words = [f"{draw.choice('bcdfghklmnprstvw')}{draw.choice('aeiou')}{n:x}" for n in range(30_000)]
    kind_of: dict[int, str] = {}
    originals: list[tuple[str, str]] = []
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            if number % 10 in (4, 9) and number > 10:
                kinds = COPIES if number % 10 == 9 else LOOKALIKES
                kind = kinds[number // 10 % len(kinds)]
                question, answer = copied(draw.choice(originals), kind, draw, words)
                kind_of[number] = kind
            else:
                question = " ".join(draw.choices(words, k=draw.randint(10, 60)))
                answer = " ".join(draw.choices(words, k=draw.randint(20, 240)))
                originals.append((question, answer))
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return kind_of


def copied(
    row: tuple[str, str], kind: str, draw: random.Random, words: list[str]
) -> tuple[str, str]:
    """A copy of a row, or one that looks like it."""
    question, answer = row
    if kind == "another answer":
        return question, " ".join(draw.choices(words, k=3))
    if kind == "case":
        return question.title(), answer.upper()
    if kind == "white space":
        return f" {question}\n", answer.replace(" ", "  ", 7).replace(" ", "\t", 3)
    if kind.endswith("of words"):
        said = answer.split()
        share = float(kind.partition("%")[0]) / 100
        for at in draw.sample(range(len(said)), max(1, int(share * len(said)))):
            said[at] = draw.choice(words)
        return question, " ".join(said)
    return row


def timed(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, int, str]:
    """Seconds of the processor, peak of the memory in bytes, and output of a program."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[1:4]} failed")
    scale = 1 if sys.platform == "darwin" else 1024
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale, printed


def datasketch_removed(path: Path) -> list[int]:
    """The rows for which datasketch's index has an earlier one."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=THRESHOLD, num_perm=HASHES)
    removed = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        messages = json.loads(line)["messages"]
        words = " ".join(message["content"] for message in messages).casefold().split()
        grams = {" ".join(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)}
        signature = MinHash(num_perm=HASHES)
        signature.update_batch([gram.encode() for gram in grams])
        if index.query(signature):
            removed.append(number)
        else:
            index.insert(number, signature)
    return removed


def show(
    name: str, kind_of: dict[int, str], removed: set[int], seconds: float, memory: int, rows: int
) -> None:
    """Print what a program found."""
    planted, found = Counter(kind_of.values()), Counter(kind_of[n] for n in removed & {*kind_of})
    print(
        f"{name}: {rows:,} rows, {seconds:.0f} s of one processor, {memory / 2**20:,.0f} MiB at the peak"
    )
    for kind in COPIES:
        print(
            f"  {kind:<15} {found[kind]:,} of {planted[kind]:,} removed ({found[kind] / planted[kind]:.2%})"
        )
    for kind in LOOKALIKES:
        print(f"  {kind:<15} {found[kind]:,} of {planted[kind]:,} removed, and no copy")
    print(f"  others removed: {len(removed - {*kind_of}):,}")


if __name__ == "__main__":
    main()
