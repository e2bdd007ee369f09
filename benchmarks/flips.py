"""How many flipped labels are found, and how many right ones suspected: ``python benchmarks/flips.py``.

Labels of preference data are flipped at random, 0%, 10% and 30% of them, and ``taut.data.label_noise`` is asked, for
many seeds. Generated sets, with ids in place of words:

    shorter   the shorter answer is better, always
    polite    the better answer has one of six ids that the other has not
    words     each id has a worth; of the sums of two answers the logistic function is the chance of being better, so
              that a perfect judge would be right in about 87%
    length    the same with the logarithm of the length, about 66%: the shorter is better, more often than not
    sums      the right sum of two numbers against a wrong one: nothing in the ids tells

``--set NAME=PATH`` adds a set of real pairs, tokenized with ``--tokenizer``. PATH is a file of JSON or JSON lines
(.gz too) or a folder of such; rows may be ``{prompt, chosen, rejected}``, LLaMA-Factory's, hh-rlhf's, annotations of
alpaca_eval, or ASDiv's questions (the wrong answer is then another question's). Real sets may hold flips of their own:
what is said of them at 0% is what a user would see. Those of the page:

    harmless  the test file of hh-rlhf's harmless-base
    asdiv     the answer to a question of arithmetic against that to another question
    davinci   an answer of text-davinci-003 against one of 40 other models, as GPT-4 judged them
              (alpaca_eval_gpt4/annotations.json of the first 40 models of alpaca_eval that have one)
    turbo     the same against GPT-4 Turbo (weighted_alpaca_eval_gpt4_turbo/annotations.json)

Prints a table in Markdown, a cell with one number for each rate; docs/preference.md has rows of 1,000 pairs.

    agree                  labels that agree with the model that did not see them
    told, noted, failed    the share of the seeds
    rate                   the mean of what is estimated, where it is told
    found                  flipped labels that are suspected, of all flipped
    wrongly suspected      the others that are suspected, of all others
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported: the seconds of one core

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from taut.data.label_noise import Flips, PairIds, find_flips

SIZES = (200, 1000, 5000)
RATES = (0.0, 0.1, 0.3)
WORDS, FIRST_WORD, POLITE = 2000, 100, np.arange(5, 11)
Draw = np.random.Generator
Answers = tuple[NDArray[np.int64], NDArray[np.int64]]
Text = tuple[str, str, str]
COLUMNS = "set|pairs|agree|told|rate|found|wrongly suspected|noted|failed|s"


class Judged(NamedTuple):
    flips: Flips
    found: float
    """The share of flipped pairs that are suspected."""
    wrong: float
    """The share of the others that are."""
    seconds: float


def some_words(draw: Draw, least: int, most: int) -> NDArray[np.int64]:
    """Ids with frequencies like words'."""
    ranks = np.exp(draw.random(draw.integers(least, most)) * np.log(WORDS))
    return FIRST_WORD + np.minimum(ranks.astype(np.int64), WORDS - 1)


def two_answers(draw: Draw) -> Answers:
    return some_words(draw, 10, 150), some_words(draw, 10, 150)


def better_first(draw: Draw, answers: Answers, advantage: float) -> Answers:
    """Bradley and Terry's model: the first is better with the chance sigmoid(advantage)."""
    first, second = answers
    return answers if draw.random() < 1 / (1 + np.exp(-advantage)) else (second, first)


def shorter(draw: Draw) -> Answers:
    first, second = two_answers(draw)
    while first.size == second.size:
        second = some_words(draw, 10, 150)
    return (first, second) if first.size < second.size else (second, first)


def polite(draw: Draw) -> Answers:
    first, second = two_answers(draw)
    return draw.permutation(np.append(first, draw.choice(POLITE))), second


def words(draw: Draw) -> Answers:
    worth = 0.35 * np.random.default_rng(0).normal(size=FIRST_WORD + WORDS)
    first, second = two_answers(draw)
    return better_first(draw, (first, second), float(worth[first].sum() - worth[second].sum()))


def length(draw: Draw) -> Answers:
    first, second = two_answers(draw)
    return better_first(draw, (first, second), float(np.log(second.size / first.size)))


def digits(number: int) -> list[int]:
    return [20 + int(digit) for digit in str(number)]


def sums(draw: Draw) -> PairIds:
    left, right = (int(number) for number in draw.integers(10, 100, 2))
    wrong = left + right + int(draw.choice([-1, 1]) * draw.integers(1, 11))
    texts = ([*digits(left), 40, *digits(right)], digits(left + right), digits(wrong))
    return PairIds("", *(np.array(text, dtype=np.int64) for text in texts))


GENERATED: dict[str, Callable[[Draw], Answers]] = {
    "shorter": shorter,
    "polite": polite,
    "words": words,
    "length": length,
}


def generate(name: str, num: int, seed: int) -> list[PairIds]:
    draw = np.random.default_rng(seed)
    if name == "sums":
        return [sums(draw) for _ in range(num)]
    return [PairIds("", some_words(draw, 5, 60), *GENERATED[name](draw)) for _ in range(num)]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = raw.decode("utf-8")
        yield from json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())


def read_texts(path: Path) -> list[Text]:
    """(prompt, chosen, rejected), shuffled, without pairs of equal answers."""
    rows = list(rows_of(path))
    texts = (
        asdiv(rows) if "passage" in rows[0] else [text for row in rows for text in texts_of(row)]
    )
    texts = [text for text in dict.fromkeys(texts) if text[1] != text[2]]
    random.Random(0).shuffle(texts)
    return texts


def texts_of(row: dict[str, Any]) -> Iterator[Text]:
    if "conversations" in row:
        prompt = "\n".join(turn["value"] for turn in row["conversations"])
        yield prompt, row["chosen"]["value"], row["rejected"]["value"]
    elif "output_1" in row:
        if row["preference"] is not None and abs(row["preference"] - 1.5) > 0.25:
            first, second = row["output_1"], row["output_2"]
            better = (second, first) if row["preference"] > 1.5 else (first, second)
            yield (row["instruction"], *better)
    elif "prompt" in row:
        yield row["prompt"], row["chosen"], row["rejected"]
    else:
        prompt, mark, chosen = row["chosen"].rpartition("\n\nAssistant:")
        yield prompt + mark, chosen, row["rejected"].rpartition(mark)[2]


def asdiv(rows: list[dict[str, Any]]) -> list[Text]:
    draw = random.Random(0)
    answers = [row["answer"] for row in rows]
    return [
        (f"{row['passage']} {row['question']}", row["answer"], draw.choice(answers)) for row in rows
    ]


def tokenize(texts: list[Text], tokenizer: Any) -> list[PairIds]:
    columns = [
        tokenizer(list(column), add_special_tokens=False)["input_ids"]
        for column in zip(*texts, strict=True)
    ]
    arrays = [[np.array(ids, dtype=np.int64) for ids in column] for column in columns]
    return [PairIds("", *parts) for parts in zip(*arrays, strict=True)]


def judge(pairs: list[PairIds], rate: float, seed: int) -> Judged:
    """Flip some labels, and ask."""
    is_flipped = np.random.default_rng([seed, 1]).random(len(pairs)) < rate
    asked = [
        pair._replace(
            place=str(at),
            chosen=pair.rejected if flip else pair.chosen,
            rejected=pair.chosen if flip else pair.rejected,
        )
        for at, (pair, flip) in enumerate(zip(pairs, is_flipped, strict=True))
    ]
    begin = time.perf_counter()
    flips = find_flips(asked, seed)
    seconds = time.perf_counter() - begin
    is_suspect = np.zeros(len(pairs), dtype=bool)
    is_suspect[[int(suspect.place) for suspect in flips.suspects]] = True
    found = is_suspect[is_flipped].mean() if is_flipped.any() else np.nan
    return Judged(flips, float(found), float(is_suspect[~is_flipped].mean()), seconds)


def line(name: str, num: int, by_rate: list[list[Judged]]) -> str:
    """A row of the table; a cell has one number for each rate."""
    columns = [summary(judged) for judged in by_rate]
    cells = [" / ".join(column) for column in zip(*columns, strict=True)]
    return f"| {name} | {num:,} | {' | '.join(cells)} |"


def summary(judged: list[Judged]) -> list[str]:
    told = [each.flips.rate for each in judged if each.flips.rate is not None]
    found = [each.found for each in judged]
    return [
        f"{np.mean([each.flips.accuracy for each in judged]):.0%}",
        f"{len(told) / len(judged):.0%}",
        f"{np.mean(told):.1%}" if told else "-",
        "-" if np.isnan(found).any() else f"{np.mean(found):.0%}",
        f"{np.mean([each.wrong for each in judged]):.1%}",
        f"{np.mean([each.flips.is_notable for each in judged]):.0%}",
        f"{np.mean([each.flips.is_alarming for each in judged]):.0%}",
        f"{np.mean([each.seconds for each in judged]):.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--only", nargs="*", default=[*GENERATED, "sums"], help="generated sets")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--tokenizer", help="a model directory; needed with --set")
    arguments = parser.parse_args()
    if arguments.set and not arguments.tokenizer:
        parser.error("--set needs --tokenizer")
    print(f"| {COLUMNS.replace('|', ' | ')} |\n{'|---' * len(COLUMNS.split('|'))}|")
    for name in arguments.only:
        for num in arguments.sizes:
            sets = [generate(name, num, seed) for seed in range(arguments.seeds)]
            table(name, num, arguments.rates, sets)
    for name, path in (each.split("=", 1) for each in arguments.set):
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        pairs = tokenize(read_texts(Path(path))[:20_000], tokenizer)
        for num in sorted({min(num, len(pairs)) for num in arguments.sizes}):
            draws = [np.random.default_rng(seed) for seed in range(arguments.seeds)]
            sets = [[pairs[at] for at in draw.permutation(len(pairs))[:num]] for draw in draws]
            table(name, num, arguments.rates, sets)
    return 0


def table(name: str, num: int, rates: list[float], sets: list[list[PairIds]]) -> None:
    by_rate = [[judge(pairs, rate, seed) for seed, pairs in enumerate(sets)] for rate in rates]
    print(line(name, num, by_rate), flush=True)


if __name__ == "__main__":
    sys.exit(main())
