"""taut against the official renderers that have loss masks, turn by turn.

    python -m tests.real.oracles [--only REGEX] [--show] [--json FILE]

``renderers`` (prime-rl's), ``tinker_cookbook.renderers``, ``mistral_common`` and ``openai_harmony`` go, without being
installed, into a folder of taut's cache, and run in a process of their own (``oracle_worker.py``). Each teaches the
conversations of ``conversations.py``, each turn after the messages before it, with the tokenizer that taut has beside
the model's own template. Each turn of an oracle has one outcome:

    same           the same ids, the same targets
    refused        taut alone does not take the row
    setting        taut refuses it, names ``data.chat_template_kwargs``, and takes it with thinking off
    cannot         taut refuses it, and the model's own template does not write the row, or a part of it
    prompt, ...    what differs; ``template`` says whether taut's ids and targets are those of the model's own template,
                   which decides for taut, since transformers and servers render with it
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.real import artifacts, marathon, oracle_worker, standins
from tests.real.conversations import CASES, Case
from transformers import AutoTokenizer

from taut.data.rows.schema import Columns, read_any
from taut.data.store.cache import default_directory
from taut.errors import TautError
from taut.io.temporary import TemporaryFolder

REQUIREMENTS = [
    *(
        "renderers==0.1.12",
        "tinker-cookbook==0.6.1",
        "mistral-common==1.13.1",
        "openai-harmony==0.0.8",
    ),
    # what these import, and taut's development environment lacks
    *(
        "blobfile==3.3.0",
        "chz==0.4.0",
        "distro==1.9.0",
        "h2==4.4.1",
        "hpack==4.2.0",
        "httpcore==1.0.9",
    ),
    *("httpx==0.28.1", "hyperframe==6.1.0", "jiter==0.19.0", "openai==3.57.0", "orjson==3.13.0"),
    *("prime-pydantic-config==0.4.3", "pycountry==26.2.16", "pycryptodomex==3.24.2"),
    *("pydantic-extra-types==2.11.1", "pyqwest==0.12.0", "sniffio==1.3.1", "termcolor==3.3.0"),
    *("tiktoken==0.14.0", "tinker==0.38.0", "zstandard==0.25.0", "sentencepiece"),
]


HINT = "chat_template_kwargs"


@dataclass(frozen=True)
class Pair:
    """A renderer of an oracle, and the template that the same model has."""

    oracle: str
    renderer: str
    subject: str
    """collection/template, or own/tokenizer."""


PAIRS = [
    *(
        Pair("renderers", renderer, subject)
        for renderer, subject in {
            "qwen3": "own/qwen3",
            "qwen3.5": "trl/qwen3_5_think",
            "qwen3.6": "trl/qwen3_6",
            "qwen3.8": "trl/qwen3_8",
            "gemma4": "trl/gemma4_v5",
            "glm-4.5": "trl/glm4moe",
            "gpt-oss": "own/gptoss",
            "hy3": "llama.cpp/tencent-Hy3",
            "kimi-k2": "llama.cpp/Kimi-K2-Instruct",
            "laguna-xs.2": "llama.cpp/poolside-Laguna-XS.2",
            "laguna-xs-2.1": "llama.cpp/poolside-Laguna-XS-2.1",
            "laguna-s-2.1": "llama.cpp/poolside-Laguna-S-2.1",
            "llama-3": "trl/llama3_2",
            "minimax-m2": "llama.cpp/MiniMax-M2",
            "nemotron-3": "trl/nemotron_3_nano",
            "nemotron-3-ultra": "trl/nemotron_3_ultra",
            "nemotron-3.5": "trl/nemotron_3_5_lightning",
            "deepseek-v3": "own/deepseek_v3",
            "deepseek-r1": "trl/deepseek_r1_distill",
            "deepseek-v4": "llama.cpp/deepseek-ai-DeepSeek-V4",
        }.items()
    ),
    *(
        Pair("tinker", renderer, subject)
        for renderer, subject in {
            "llama3": "own/llama3",
            "qwen3": "own/qwen3",
            "qwen3_instruct": "trl/qwen3_instruct_2507",
            "qwen3_5": "trl/qwen3_5_think",
            "qwen3_5_disable_thinking": "trl/qwen3_5_nothink",
            "qwen3_8_xhigh_reasoning": "trl/qwen3_8",
            "deepseekv3": "own/deepseek_v3",
            "deepseekv3_thinking": "llama.cpp/deepseek-ai-DeepSeek-V3.1",
            "kimi_k2": "llama.cpp/Kimi-K2-Thinking",
            "nemotron3": "trl/nemotron_3_nano",
            "nemotron3_ultra": "trl/nemotron_3_ultra",
            "gpt_oss_medium_reasoning": "own/gptoss",
        }.items()
    ),
    Pair("harmony", "gpt-oss", "own/gptoss"),
    Pair("mistral", "tekken_240718.json", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407"),
    Pair("mistral", "mistral_instruct_tokenizer_240323.model.v3", "axolotl/mistral_v2v3"),
    Pair("mistral", "tokenizer.model.v1", "axolotl/mistral_v1"),
]


@dataclass(frozen=True)
class Turn:
    """One turn of an oracle, and what taut makes of it."""

    pair: str
    case: str
    number: int
    outcome: str
    reason: str = ""
    template: str = ""
    """Of turns that differ: right, or what is wrong with taut's."""


# -- the oracles


def packages() -> Path:
    """The folder with the oracles. Raises Unavailable."""
    digest = hashlib.sha256(" ".join([*REQUIREMENTS, sys.version[:4]]).encode()).hexdigest()[:12]
    folder = default_directory() / "artifacts" / f"oracles-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("oracles", folder.parent) as scratch:
            command = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
            artifacts.run([*command, "--target", str(scratch / "packages"), *REQUIREMENTS], scratch)
            if not folder.is_dir():
                (scratch / "packages").rename(folder)
    return folder


def ask(jobs: Sequence[dict[str, Any]], encodings: Path | None = None) -> list[dict[str, Any]]:
    """The answers of ``oracle_worker.py``. ``encodings``: the folder of openai_harmony's vocabulary."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(packages())
    if encodings is not None:
        environment["TIKTOKEN_ENCODINGS_BASE"] = str(encodings)
    done = subprocess.run(
        [sys.executable, oracle_worker.__file__],
        input=json.dumps(list(jobs)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def harmony_vocabulary(folder: Path) -> Path:
    """The vocabulary of gpt-oss in the form that openai_harmony reads, from tokenizer.json."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    file = artifacts.get(artifacts.TOKENIZERS["gptoss"]) / "tokenizer.json"
    vocabulary = json.loads(file.read_text("utf-8"))["model"]["vocab"]
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    lines = [
        f"{base64.b64encode(bytes(byte_of[letter] for letter in token)).decode()} {rank}\n"
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
    ]
    (folder / "o200k_base.tiktoken").write_text("".join(lines))
    return folder


# -- the comparison


@cache
def makers() -> dict[str, Any]:
    return marathon.names_of(["own", *artifacts.TEMPLATES])


def compare(pairs: Sequence[Pair], cases: Sequence[Case]) -> Iterator[list[Turn]]:
    """The turns of each pair. The oracles of all pairs run in one process."""
    with TemporaryFolder("oracles") as folder:
        jobs, subjects = [], []
        rows = [{"messages": case.messages, "tools": case.tools} for case in cases]
        for number, pair in enumerate(pairs):
            place = folder / str(number)
            subject = (
                mistral_subject(pair, place)
                if pair.oracle == "mistral"
                else makers()[pair.subject]()
            )
            subject.tokenizer.save_pretrained(place)
            subjects.append(subject)
            job = {"oracle": pair.oracle, "renderer": pair.renderer, "tokenizer": str(place)}
            jobs.append({**job, "rows": rows})
        answers = ask(jobs, harmony_vocabulary(folder))
    for pair, subject, answer in zip(pairs, subjects, answers, strict=True):
        name = f"{pair.oracle}:{pair.renderer}"
        if "error" in answer:
            yield [Turn(name, "all", 0, "no oracle", answer["error"])]
            continue
        turns = []
        for case, theirs in zip(cases, answer["rows"], strict=True):
            turns += _compare_row(name, subject, case, theirs)
        yield turns


def _compare_row(
    name: str, subject: marathon.Subject, case: Case, theirs: Sequence[dict[str, Any]]
) -> Iterator[Turn]:
    ours: list[tuple[list[int], list[int]]] = []
    fault = subject.fault
    if not fault:
        try:
            row = read_any(case.row, "row", Columns())
            for sample in subject.renderer.render(row):  # type: ignore[arg-type]
                ids = sample.ids_T.tolist()
                spans = marathon.spans(sample.target_at_N)
                ours += [(ids[:start], ids[start:stop]) for start, stop in spans]
        except TautError as error:
            fault = str(error)
    is_named = HINT in fault and subject.takes_setting(case)
    template = ""
    if not fault:
        outcome = subject.run(case)
        template = outcome.verdict if outcome.verdict == "right" else outcome.reason
    for number, turn in enumerate(theirs):
        if "error" in turn:
            yield Turn(name, case.name, number, "not theirs", turn["error"])
        elif fault:
            lost = subject.left_out(case)
            outcome = "setting" if is_named else "cannot" if lost else "refused"
            yield Turn(name, case.name, number, outcome, fault if is_named else lost or fault)
        elif number >= len(ours):
            yield Turn(
                name, case.name, number, "turns", f"{len(ours)} stretches of targets", template
            )
        else:
            outcome, reason = difference(ours[number], (turn["prompt"], turn["target"]), subject)
            yield Turn(
                name, case.name, number, outcome, reason, "" if outcome == "same" else template
            )


def difference(
    ours: tuple[list[int], list[int]],
    theirs: tuple[list[int], list[int]],
    subject: marathon.Subject,
) -> tuple[str, str]:
    """What differs, and where it begins."""
    if ours == theirs:
        return "same", ""
    decode = subject.tokenizer.decode
    whole, other = [*ours[0], *ours[1]], [*theirs[0], *theirs[1]]
    if whole == other:
        return "boundary", f"targets begin {len(ours[0]) - len(theirs[0])} tokens later than theirs"
    at = marathon.common(whole, other)
    place = "prompt" if at < min(len(ours[0]), len(theirs[0])) else "target"
    mine, their = decode(whole[at : at + 12]), decode(other[at : at + 12])
    return place, f"after {decode(whole[:at])[-25:]!r}: {mine!r}, theirs {their!r}"


def mistral_subject(pair: Pair, folder: Path) -> marathon.Subject:
    """Mistral's own vocabulary as tokenizer.json, with the template of the model."""
    (done,) = ask(
        [{"oracle": "convert", "renderer": pair.renderer, "tokenizer": str(folder), "rows": []}]
    )
    assert "error" not in done, done
    tokenizer = AutoTokenizer.from_pretrained(folder)
    collection, _, name = pair.subject.partition("/")
    tokenizer.chat_template = artifacts.templates(collection)[name]
    generation = standins.inherited(tokenizer, (tokenizer.eos_token,))
    return marathon.Subject(pair.subject, tokenizer, generation)


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """How many turns of each outcome, and the share that taut alone refuses of those that the oracle takes and the
    template writes.
    """
    count = Counter(turn.outcome for turn in turns)
    taken = [t for t in turns if t.outcome not in ("not theirs", "no oracle")]
    writable = [t for t in taken if t.outcome != "cannot"]
    wrong = sum(bool(t.template) and t.template != "right" for t in turns)
    share = count["refused"] / max(len(writable), 1)
    return {"taken": len(taken), **count, "refused share": round(share, 3), "taut is wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="pairs whose oracle:renderer has this in it")
    parser.add_argument("--show", action="store_true", help="print each turn that is not the same")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pairs = [p for p in PAIRS if re.search(options.only, f"{p.oracle}:{p.renderer}")]
    every: list[Turn] = []
    for turns in compare(pairs, CASES):
        every += turns
        print(f"{turns[0].pair:42} {summary(turns)}")
        if options.show:
            for t in turns:
                if t.outcome not in ("same", "not theirs"):
                    print(f"    {t.outcome:8} {t.case} {t.number}: {t.reason}   [{t.template}]")
    groups: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    for t in every:
        groups[t.outcome, marathon.brief(t.reason)].append(t)
    for (outcome, reason), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        if outcome in ("refused", "cannot", "not theirs", "no oracle"):
            print(
                f"{len(members):5} {outcome:10} {reason}   [{members[0].pair}: {members[0].case}]"
            )
    for oracle in dict.fromkeys(p.oracle for p in pairs):
        print(f"{oracle:12} {summary([t for t in every if t.pair.startswith(oracle)])}")
    both = [t for t in every if t.pair.startswith(("renderers", "tinker"))]
    print(f"renderers and tinker {summary(both)}")
    if options.json:
        options.json.write_text(json.dumps([t.__dict__ for t in every], indent=1))


if __name__ == "__main__":
    main()
