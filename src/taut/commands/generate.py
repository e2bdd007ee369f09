"""``taut generate MODEL prompts=FILE out=FILE``: completions of a file of prompts, one JSON object per line.

    {"id", "index", "ids", "logp", "logp_one", "finish_reason", "text"}    and, where there are any, "error",
                                                                           "references", "prompt_ids", "images"

A line is written as soon as its completion is finished, so lines are in order of completion; ``id`` and ``index``
identify them; ``images`` are path and SHA-256 of the prompt's pictures. After a crash, an interrupt or errors, the same
command with ``resume=true`` keeps what is written, generates the rest, and retries errors. ``FILE.meta.json`` next to
the output holds the settings of the completions; a run with other settings does not add to them.

Does not judge completions (evaluate.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

import pydantic
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import TypedDict

from taut.commands.reading import (
    RowSettings,
    print_decisions,
    read_prompts,
    require_free,
    write_errors,
)
from taut.config import Decision, configclass, home_path, to_dict
from taut.data.prompts import PromptRow
from taut.data.sources import Source
from taut.errors import EngineError, OutputError
from taut.inference.engine import Sampling, require_text, require_usable
from taut.inference.open import ModelUse, open_engine, open_renderer
from taut.io import files
from taut.io.console import counted
from taut.io.notebook import html_table
from taut.io.terminal import Terminal
from taut.types import Completion, FloatArray

MAX_ERRORS = 3
"""Errors listed in the summary."""
SHOWN = 5
"""Completions that a notebook shows of the file."""
FINISH = "are written; the same command with resume=true finishes the rest"
PARTS = 10
"""Progress lines without a terminal."""
DECIMALS = 7
"""Decimals of a logprob in the file."""

Key = tuple[str, int]
"""A completion: its prompt's id and its index."""


@configclass
class Generate(RowSettings, ModelUse):
    """Completions of a file of prompts."""

    prompts: str | Source
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: rows with messages, conversations,
    prompt, instruction or text."""
    out: str
    """The JSONL file to write; it must not exist, unless resume."""
    reference: str | None = None
    """Column with the right answer, copied next to each completion; by default one of the usual names, if present."""
    prompt_ids: bool = False
    """Also write each prompt's token ids."""
    resume: bool = False
    """Complete the output of an earlier run with the same settings; start new if there is none."""
    sampling: Sampling = Sampling()


class _Line(TypedDict):
    """The fields of a line of ``out`` that are read back."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    id: str
    index: int
    ids: list[int]
    finish_reason: str
    text: str


@dataclass(frozen=True)
class Generated:
    """The result; counts are of this run, without an earlier one's completions."""

    out: Path
    num_prompts: int
    num_completions: int
    """Completions in the file, without errors."""
    num_kept: int
    """Completions of an earlier run among them."""
    finished: Mapping[str, int]
    """finish_reason -> completions."""
    num_tokens: int
    seconds: float
    errors: tuple[str, ...]
    """Errors of this run's failed completions."""
    decisions: tuple[Decision, ...]

    def _repr_html_(self) -> str:
        """The summary, and the first completions of the file where it is there."""
        rows = []
        if self.out.is_file():
            with files.open_text(self.out) as file:
                rows = [json.loads(line) for line in islice(file, SHOWN)]
        columns = ("id", "index", "finish_reason", "text")
        cells = [[row.get(column) for column in columns] for row in rows]
        return html_table(summary(self), columns if rows else (), cells)


def run(config: Generate) -> int:
    """Generate and print a summary; exit code 1 if a completion failed."""
    console = Terminal(soft_wrap=True)
    result = generate(config, console)
    console.lines([summary(result)])
    return 1 if result.errors else 0


def generate(
    config: Generate, console: Terminal | None = None, afterwards: str = FINISH
) -> Generated:
    """Write the completions that are not in ``config.out`` yet. ``console``: for decisions and progress.
    ``afterwards``: the message about the finished ones where not all could be finished.
    """
    out = home_path(config.out)
    do = "set resume=true to finish what it lacks, or name another"
    require_free(out, config.prompts, "prompts", may_exist=config.resume, do=do)
    rendering = open_renderer(config)
    rows = read_prompts(
        config,
        config.images,
        config.prompts,
        rendering.renderer,
        console,
        reference=config.reference,
    )
    identity = _identity(config, rows, rendering.stops.ids)
    kept = _kept(out, identity) if config.resume else []
    done = {_key(line) for line in kept}
    samples = range(config.sampling.n)
    missing = [row for row in rows if any((row.id, index) not in done for index in samples)]
    prompts = [row.as_prompt() for row in missing]
    if config.engine == "server":
        require_text(prompts)
    with open_engine(config, rendering) as opened:
        require_usable(prompts, opened.context)
        print_decisions(console, opened.decisions)
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        with write_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            meta = json.dumps({"drawn_with": identity}, indent=1)
            files.write_text(_meta(out), meta + "\n")
            files.write_text(out, lines)
            opened_out = FileIO(out, "ab")
        progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=console is None or not console.is_terminal,
        )
        with opened_out as file, progress:
            progress.add_task("generating", total=len(missing) * len(samples))
            tally = _Tally(
                file, {row.id: row for row in rows}, done, config.prompt_ids, progress, console
            )
            try:
                if prompts:
                    opened.engine.generate(prompts, config.sampling, tally)
            except EngineError as error:
                raise EngineError(f"{error}; {tally.counted} {afterwards}") from error
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"{tally.counted} {afterwards}") from None
    return Generated(
        out=out,
        num_prompts=len(rows),
        num_completions=len(kept) + sum(tally.finished.values()) - len(tally.errors),
        num_kept=len(kept),
        finished=dict(tally.finished),
        num_tokens=tally.num_tokens,
        seconds=time.perf_counter() - tally.began,
        errors=tuple(tally.errors),
        decisions=tuple(opened.decisions),
    )


def summary(result: Generated) -> str:
    """The summary as text."""
    total = sum(result.finished.values())
    parts = [f"{total:,} completions of {result.num_prompts:,} prompts"]
    if result.num_kept:
        parts.append(f"{result.num_kept:,} were there already")
    if total:
        stopped, cut = result.finished.get("stop", 0), result.finished.get("length", 0)
        parts.append(f"{stopped / total:.1%} stopped, {cut:,} cut, {len(result.errors):,} errors")
        rate = result.num_tokens / max(result.seconds, 1e-9)
        parts.append(
            f"{counted(result.num_tokens, 'tokens')} in {result.seconds:.1f} s ({rate:,.{0 if rate >= 10 else 1}f}/s)"
        )
    lines = ["; ".join(parts)]
    lines += [f"error: {error}" for error in result.errors[:MAX_ERRORS]]
    if len(result.errors) > MAX_ERRORS:
        lines.append(f"and {len(result.errors) - MAX_ERRORS:,} more errors")
    if result.errors:
        lines.append("the same command with resume=true tries these again")
    return "\n".join([*lines, f"written: {result.out}"])


class _Tally:
    """Writes each completion as it finishes, counts, and shows progress: a bar, or without a terminal ten lines."""

    def __init__(
        self,
        file: FileIO,
        rows: Mapping[str, PromptRow],
        done: set[Key],
        has_prompt_ids: bool,
        progress: Progress,
        console: Terminal | None,
    ) -> None:
        self.file, self.rows, self.done = file, rows, done
        self.has_prompt_ids, self.progress = has_prompt_ids, progress
        self.console = console if progress.disable else None
        self.num_shown = 0
        self.finished: Counter[str] = Counter()
        self.num_tokens = 0
        self.errors: list[str] = []
        self.began = time.perf_counter()

    def __call__(self, completion: Completion) -> None:
        self.progress.advance(self.progress.task_ids[0])
        (task,) = self.progress.tasks
        share = int(task.completed * PARTS // (task.total or 1))
        if self.console is not None and share > self.num_shown:
            self.num_shown = share
            self.console.lines([f"generating: {int(task.completed):,} of {int(task.total or 0):,}"])
        if (completion.prompt_id, completion.index) in self.done:
            return
        line = self._line(completion)
        self._write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self.finished[completion.finish_reason] += 1
        self.num_tokens += int(completion.ids_N.size)
        if completion.finish_reason == "error":
            self.errors.append(f"{completion.prompt_id}: {completion.error}")

    def _write(self, line: bytes) -> None:
        """Write a line unbuffered, so that a failed write is not retried when the file is closed."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            raise OutputError(
                f"out={self.file.name} cannot be written: {error.strerror or error}; expected room; free some; "
                f"{self.counted} {FINISH}"
            ) from error

    @property
    def counted(self) -> str:
        return counted(sum(self.finished.values()), "completions")

    def _line(self, completion: Completion) -> dict[str, Any]:
        row = self.rows[completion.prompt_id]
        line: dict[str, Any] = {
            "id": row.id,
            "index": completion.index,
            "ids": completion.ids_N.tolist(),
            "logp": _rounded(completion.logp_N),
            "logp_one": _rounded(completion.logp_one_N),
            "finish_reason": completion.finish_reason,
            "text": completion.text,
        }
        if completion.error is not None:
            line["error"] = completion.error
        if row.references:
            line["references"] = list(row.references)
        if row.media:
            # identifies the picture; never its pixels
            line["images"] = [
                {"path": medium.picture.source, "sha256": medium.picture.content}
                for medium in row.media
            ]
        if self.has_prompt_ids:
            line["prompt_ids"] = row.ids_T.tolist()
        return line


def _rounded(values: FloatArray | None) -> list[float] | None:
    return None if values is None else [round(float(value), DECIMALS) for value in values]


def _meta(out: Path) -> Path:
    return out.with_name(f"{out.name}.meta.json")


def _identity(
    config: Generate, rows: Sequence[PromptRow], stop_ids: Sequence[int]
) -> dict[str, Any]:
    """The settings that all completions in one file share."""
    digest = hashlib.sha256()
    for row in rows:
        content = [row.id, row.ids_T.tolist(), row.references]
        content += [medium.picture.digest for medium in row.media]
        digest.update(json.dumps(content).encode())
    settings = to_dict(config)
    names = ("model", "adapter", "engine", "dtype", "sampling", "prompt_ids")
    return {
        **{name: settings[name] for name in names},
        "server.name": settings["server"]["name"],
        "stop_ids": list(stop_ids),
        "prompts": digest.hexdigest(),
    }


def _kept(out: Path, identity: Mapping[str, Any]) -> list[_Line]:
    """The good lines of an earlier run; its errors, and a torn last line, are generated again."""
    if not out.exists():
        return []
    try:
        earlier = files.read_json(_meta(out))["drawn_with"]
        with files.open_regular(out) as file:
            texts = file.read().split(b"\n")
    except (OSError, ValueError, LookupError, TypeError):
        earlier = None
    if not isinstance(earlier, dict):
        raise OutputError(
            f"{_meta(out).name} next to out={out} cannot be read; expected the settings of its completions; name "
            "another out"
        )
    changed = [name for name, value in identity.items() if earlier.get(name) != value]
    if changed:
        raise OutputError(
            f"out={out} was drawn with other settings ({', '.join(changed)}); expected the same to add to it; restore "
            "them, or name another out"
        )
    lines: dict[Key, _Line] = {}
    reader = pydantic.TypeAdapter(_Line)
    # after the last newline there is nothing, or a torn line
    for number, text in enumerate(texts[:-1], start=1):
        try:
            reader.validate_json(text, strict=True)
        except ValueError:
            raise OutputError(
                f"{out}:{number} is no line of taut's; expected a completion; restore the file or name another out"
            ) from None
        line: _Line = json.loads(text)  # unchanged, including the order of its keys
        key = _key(line)
        if line["finish_reason"] != "error":
            lines.setdefault(key, line)
    return list(lines.values())


def _key(line: Mapping[str, Any]) -> Key:
    return line["id"], line["index"]
