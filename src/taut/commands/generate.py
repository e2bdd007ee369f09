"""``taut generate MODEL prompts=FILE out=FILE``: completions of a file of prompts, one JSON object a line.

    {"id", "index", "ids", "logp", "logp_one", "finish_reason", "text"}    and, where there are any, "error",
                                                                           "references", "prompt_ids", "images"

A line is written as soon as its completion is finished, so lines are in the order they finished in; ``id`` and
``index`` say which is which; ``images`` are path and SHA-256 of the prompt's pictures. What is written is kept: after a
crash, an interrupt or errors, the same command with ``resume=true`` finishes what is missing and tries errors again.
``FILE.meta.json`` beside the output holds what the completions were drawn with; a run with other settings does not add
to them.

Does not judge completions (``evaluate.py``). The command line imports it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import TypedDict

from taut.commands.reading import columns_of, left_out, source_of, tell_left_out
from taut.config import Decision, configclass, home_path, to_dict
from taut.data.prompts import PromptRow, load_prompts
from taut.data.render import Renderer
from taut.data.schema import Format
from taut.data.sources import Source
from taut.errors import EngineError, OutputError
from taut.inference.engine import Engine, Sampling, require_text, require_usable
from taut.inference.open import ModelUse, Opened, open_engine, open_renderer
from taut.io import files
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.types import Completion, FloatArray, Picture, Prompt

ERRORS_SHOWN = 3
FINISH = "are written; the same command with resume=true finishes the rest"
PARTS = 10
"""How many lines tell of progress where there is no terminal."""
DECIMALS = 7
"""Of a log-prob in the file."""

Key = tuple[str, int]
"""A completion: its prompt's id and its index."""


@configclass
class Generate(ModelUse):
    """Completions of a file of prompts."""

    prompts: str | Source
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: rows with messages, conversations,
    prompt, instruction or text."""
    out: str
    """The JSONL file that is written; refused if it exists, unless resume."""
    format: Format = "auto"
    """How rows are read; auto recognises them by their columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """taut's name of a column -> its name in the data."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns of pictures or sound, that may be there and are not used."""
    apply_chat_template: bool = False
    """Render prompts that are plain text with the chat template, as a user message. By default they are used as they
    are."""
    reference: str | None = None
    """The column with the right answer, copied beside each completion; by default one of the usual names, if there."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first so many rows."""
    prompt_ids: bool = False
    """Write each prompt's token ids too."""
    resume: bool = False
    """Finish what an earlier run with the same settings left in out; begin where there is nothing."""
    sampling: Sampling = Sampling()


class _Line(TypedDict):
    """A line of ``out``, as far as it is read back."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    id: str
    index: int
    ids: list[int]
    finish_reason: str
    text: str


@dataclass(frozen=True)
class Generated:
    """What came of it; the counts are of this run, what an earlier one did left out."""

    out: Path
    num_prompts: int
    num_completions: int
    """In the file, errors left out."""
    num_kept: int
    """Of these, written by an earlier run."""
    finished: Mapping[str, int]
    """finish_reason -> completions."""
    num_tokens: int
    seconds: float
    errors: tuple[str, ...]
    """Those of this run's completions that failed."""
    decisions: tuple[Decision, ...]


def run(config: Generate) -> int:
    """Generate, and print what came of it; exit code 1 if a completion failed."""
    console = Terminal(soft_wrap=True)
    result = generate(config, console)
    console.print(summary(result), markup=False)
    return 1 if result.errors else 0


def generate(
    config: Generate, console: Console | None = None, afterwards: str = FINISH
) -> Generated:
    """Write the completions that are not in ``config.out`` yet. ``console``: where it is shown what was decided, and
    progress. ``afterwards``: what is said of the finished ones where not all could be finished."""
    out = home_path(config.out)
    _require_free(out, config)
    rendering = open_renderer(config)
    rows = _rows(config, rendering.renderer, console)
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
        if console is not None:
            _show_decisions(opened, console)
        _begin(out, identity, kept)
        with _appending(out) as file, _progress(console) as progress:
            tally = _Tally(
                file, {row.id: row for row in rows}, done, config.prompt_ids, progress, console
            )
            progress.update(progress.task_ids[0], total=len(missing) * len(samples))
            if prompts:
                _run(opened.engine, prompts, config.sampling, tally, afterwards)
    return _result(out, rows, kept, tally, opened)


def _rows(config: Generate, renderer: Renderer, console: Console | None) -> list[PromptRow]:
    source, unread = source_of(config.prompts), left_out(config.images)
    rows = load_prompts(
        source,
        renderer,
        columns_of(config, source),
        reference=config.reference,
        limit=config.limit,
        left_out=unread,
    )
    tell_left_out(unread, rows, console)
    return rows


def _run(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, tally: _Tally, afterwards: str
) -> None:
    try:
        engine.generate(prompts, sampling, tally)
    except EngineError as error:
        raise EngineError(f"{error}; {tally.counted} {afterwards}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{tally.counted} {afterwards}") from None


def _show_decisions(opened: Opened, console: Console) -> None:
    for name, value, reason in opened.decisions:
        console.print(f"{name}: {value} ({reason})", markup=False)


def summary(result: Generated) -> str:
    """The result in a few lines."""
    lines = []
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
    lines.append("; ".join(parts))
    lines += [f"error: {error}" for error in result.errors[:ERRORS_SHOWN]]
    if len(result.errors) > ERRORS_SHOWN:
        lines.append(f"and {len(result.errors) - ERRORS_SHOWN:,} more errors")
    if result.errors:
        lines.append("the same command with resume=true tries these again")
    return "\n".join([*lines, f"written: {result.out}"])


class _Tally:
    """Writes each completion as it finishes, and counts."""

    def __init__(
        self,
        file: FileIO,
        rows: Mapping[str, PromptRow],
        done: set[Key],
        has_prompt_ids: bool,
        progress: Progress,
        console: Console | None,
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
        self._show_progress()
        if (completion.prompt_id, completion.index) in self.done:
            return
        line = self._line(completion)
        self._write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self.finished[completion.finish_reason] += 1
        self.num_tokens += int(completion.ids_N.size)
        if completion.finish_reason == "error":
            self.errors.append(f"{completion.prompt_id}: {completion.error}")

    def _write(self, line: bytes) -> None:
        """Write a whole line, past any buffer: what fails is not tried again when the file is closed."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            raise OutputError(
                f"out={self.file.name} cannot be written: {error.strerror or error}; expected room; free some; "
                f"{self.counted} {FINISH}"
            ) from error

    def _show_progress(self) -> None:
        """The bar; without a terminal, a line for each tenth."""
        self.progress.advance(self.progress.task_ids[0])
        (task,) = self.progress.tasks
        share = int(task.completed * PARTS // (task.total or 1))
        if self.console is not None and share > self.num_shown:
            self.num_shown = share
            self.console.print(
                f"generating: {int(task.completed):,} of {int(task.total or 0):,}", markup=False
            )

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
            line["images"] = [_reference(one.picture) for one in row.media]
        if self.has_prompt_ids:
            line["prompt_ids"] = row.ids_T.tolist()
        return line


def _reference(picture: Picture) -> dict[str, str]:
    """Which picture it was: never its pixels."""
    return {"path": picture.source, "sha256": picture.content}


def _rounded(values: FloatArray | None) -> list[float] | None:
    return None if values is None else [round(float(value), DECIMALS) for value in values]


def _result(
    out: Path,
    rows: Sequence[PromptRow],
    kept: Sequence[Mapping[str, Any]],
    tally: _Tally,
    opened: Opened,
) -> Generated:
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


def _meta(out: Path) -> Path:
    return out.with_name(f"{out.name}.meta.json")


def _require_free(out: Path, config: Generate) -> None:
    if out.is_dir():
        raise OutputError(f"out={out} is a directory; expected a JSONL file; name one in it")
    source = source_of(config.prompts).path
    if out.exists() and out.resolve() == home_path(source).resolve():
        raise OutputError(f"out={out} is the file of prompts; expected another; rename out")
    if out.exists() and not config.resume:
        raise OutputError(
            f"out={out} exists; expected a new file; set resume=true to finish what it lacks, or name another"
        )


def _identity(
    config: Generate, rows: Sequence[PromptRow], stop_ids: Sequence[int]
) -> dict[str, Any]:
    """What completions in one file must have in common."""
    digest = hashlib.sha256()
    for row in rows:
        told = [row.id, row.ids_T.tolist(), row.references]
        digest.update(json.dumps(told + [one.picture.digest for one in row.media]).encode())
    settings = to_dict(config)
    names = ("model", "adapter", "engine", "dtype", "sampling", "prompt_ids")
    return {
        **{name: settings[name] for name in names},
        "server.name": settings["server"]["name"],
        "stop_ids": list(stop_ids),
        "prompts": digest.hexdigest(),
    }


def _kept(out: Path, identity: Mapping[str, Any]) -> list[_Line]:
    """The good lines of an earlier run; its errors, and a last line that was cut, are to be done again."""
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
            f"{_meta(out).name} beside out={out} cannot be read; expected what its completions were drawn with; name "
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
    for number, text in enumerate(
        texts[:-1], start=1
    ):  # after the last newline: nothing, or a cut line
        try:
            reader.validate_json(text, strict=True)
        except ValueError:
            raise OutputError(
                f"{out}:{number} is no line of taut's; expected a completion; restore the file or name another out"
            ) from None
        line: _Line = json.loads(text)  # as it is, the order of its keys included
        key = _key(line)
        if line["finish_reason"] != "error":
            lines.setdefault(key, line)
    return list(lines.values())


def _key(line: Mapping[str, Any]) -> Key:
    return line["id"], line["index"]


def _begin(out: Path, identity: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> None:
    """Write what is drawn with, and leave in ``out`` only what is kept."""
    meta = {"drawn_with": identity}
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(_meta(out), json.dumps(meta, indent=1) + "\n")
        files.write_text(out, lines)
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror}; expected room and permission"
        ) from error


def _appending(out: Path) -> FileIO:
    try:
        return FileIO(out, "ab")
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror}; expected room and permission"
        ) from error


@contextmanager
def _progress(console: Console | None) -> Iterator[Progress]:
    """A bar on a terminal."""
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console is not None and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        progress.add_task("generating")
        yield progress
