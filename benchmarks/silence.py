"""The longest time without a sign of ten commands in a terminal: ``python -m benchmarks.silence``.

    python -m benchmarks.silence --rows 3000
    python -m benchmarks.silence sft grpo --log gaps/      # two of them, with the time of every output in gaps/sft.txt

Each command runs on a tiny random model and generated rows in a pseudo-terminal, as a user would type it, with a cache
of its own. Noted is when it writes anything, and how many seconds of a processor it has used by then: on a machine on
which others work, the seconds that pass say little. A gap is the time between two outputs, or from the start to the
first; its processor time is that of the command and of the helpers that have ended.

The target: no gap of more than 2 s, and a first character of ``taut sft`` within 1 s of a processor. The exit status is
1 where a command fails, or one misses the target in both seconds and processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

LONGEST, FIRST = 2.0, 1.0
"""Seconds of the longest gap, and of a processor until the first character."""
STEPS = ("steps=10", "device=cpu")
COMMANDS: dict[str, Sequence[str]] = {
    "tokenize": ("tokenize", "model={model}", "data={chats}", "method=sft"),
    "check": ("check", "method=sft", "model={model}", "data={chats}", "device=cpu"),
    "show": ("show", "method=sft", "model={model}", "data={chats}", "device=cpu"),
    "plan": ("plan", "method=sft", "model={model}", "data={chats}", "gpu=A100-80GB"),
    "sft": ("sft", "model={model}", "data={chats}", "out={place}/sft", *STEPS),
    "dpo": ("dpo", "model={model}", "data={pairs}", "out={place}/dpo", *STEPS),
    "grpo": (
        *("grpo", "model={model}", "data={prompts}", "out={place}/grpo", "rewards=exact_match"),
        *("rollout.n=4", "rollout.max_new_tokens=32", "batch.samples_per_step=4", "steps=3"),
        "loss_monitor.nothing_learned=warn",
    ),
    "eval": ("eval", "{place}/sft/model", "data={few}", "sampling.max_new_tokens=32"),
    "generate": (
        *("generate", "{place}/sft/model", "prompts={few}", "out={place}/answers.jsonl"),
        "sampling.max_new_tokens=32",
    ),
    "verify": ("verify", "{place}/sft/model"),
}
"""In an order in which what a command needs is there."""
TICKS = os.sysconf("SC_CLK_TCK")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Output(NamedTuple):
    """What a command wrote at once."""

    seconds: float
    """Since the start."""
    processor: float
    """Processor seconds of the command by then."""
    text: str


class Gap(NamedTuple):
    """The time before an output."""

    seconds: float
    processor: float
    after: str
    """The last line before it."""


def recorded(words: Sequence[str], environment: dict[str, str]) -> tuple[list[Output], int]:
    """The outputs of a command in a terminal, and its exit status."""
    began, outputs, used = time.monotonic(), list[Output](), 0.0
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(words[0], [*words], environment)
    while True:
        try:
            text = os.read(terminal, 2**16).decode(errors="replace")
        except OSError:  # Linux says so at the end of a terminal
            break
        if not text:
            break
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        used = max(used, sum(map(int, fields[11:15])) / TICKS)
        outputs.append(Output(time.monotonic() - began, used, text))
    _, status, usage = os.wait4(process, 0)
    os.close(terminal)
    outputs.append(Output(time.monotonic() - began, max(used, usage.ru_utime + usage.ru_stime), ""))
    return outputs, os.waitstatus_to_exitcode(status)


def gaps(outputs: Sequence[Output]) -> list[Gap]:
    """The time before each output."""
    found, last, shown = [], Output(0.0, 0.0, ""), "the start"
    for output in outputs:
        seconds, processor = output.seconds - last.seconds, output.processor - last.processor
        found.append(Gap(seconds, processor, shown))
        lines = [line.strip() for line in re.split(r"[\r\n]", ESCAPES.sub("", output.text))]
        last, shown = output, next((line for line in reversed(lines) if line), shown)
    return found


def write_rows(place: Path, num_rows: int) -> dict[str, Path]:
    """Chats, pairs, prompts, and the first prompts."""
    draw = random.Random(0)
    words = [
        "the",
        "cat",
        "dog",
        "ran",
        "over",
        "a",
        "big",
        "red",
        "house",
        "and",
        "then",
        "saw",
        "birds",
        "sky",
    ]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(4, most)))

    rows: dict[str, list[dict[str, object]]] = {"chats": [], "pairs": [], "prompts": []}
    for _ in range(num_rows):
        asked = {"role": "user", "content": text(60)}
        good, bad = ({"role": "assistant", "content": text(80)} for _ in range(2))
        rows["chats"].append({"messages": [asked, good]})
        rows["pairs"].append({"prompt": [asked], "chosen": [good], "rejected": [bad]})
        rows["prompts"].append({"prompt": [asked], "answer": text(4)})
    rows["few"] = rows["prompts"][:200]
    paths = {name: place / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commands", nargs="*", default=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--log", type=Path, help="folder for the time of every output")
    asked = parser.parse_args()
    is_missed = False
    place = Path(tempfile.mkdtemp(prefix="silence-"))
    try:
        model = save_tiny("llama", place / "model", tiny_tokenizer(), max_position_embeddings=1024)
        names = {"model": model, "place": place, **write_rows(place, asked.rows)}
        environment = {key: value for key, value in os.environ.items() if key != "TAUT_PROGRESS"}
        environment |= {"TAUT_CACHE": str(place / "cache"), "TERM": "xterm", "COLUMNS": "120"}
        print(
            "command    seconds  processor   first sign (processor)   longest gap (processor)  after"
        )
        needed = {*asked.commands} | (
            {"sft"} if {"eval", "generate", "verify"} & {*asked.commands} else set()
        )
        for name in [name for name in COMMANDS if name in needed]:
            shutil.rmtree(place / "cache", ignore_errors=True)
            words = [word.format(**names) for word in COMMANDS[name]]
            outputs, status = recorded([sys.executable, "-m", "taut", *words], environment)
            found, end = gaps(outputs), outputs[-1]
            longest, first = max(found), found[0]
            print(
                f"{name:9} {end.seconds:8.1f} {end.processor:10.1f}   {first.seconds:10.2f} ({first.processor:9.2f})   "
                f"{longest.seconds:11.2f} ({longest.processor:9.2f})  {longest.after[:60]}"
                + (
                    f"  exit status {status}: {end.text or outputs[-2].text.strip()[-300:]}"
                    if status
                    else ""
                ),
                flush=True,
            )
            is_missed |= status != 0 or min(longest[:2]) > LONGEST
            is_missed |= name == "sft" and first.processor > FIRST
            if asked.log is not None:
                asked.log.mkdir(parents=True, exist_ok=True)
                lines = [f"{it.seconds:9.3f} {it.processor:8.2f} {it.text!r}\n" for it in outputs]
                (asked.log / f"{name}.txt").write_text("".join(lines))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
