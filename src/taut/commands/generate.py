"""``taut generate MODEL prompts=FILE out=FILE``: completions of a file of prompts, one JSON object per line.

    {"id", "index", "ids", "logp", "logp_one", "finish_reason", "text"}    and, where present, "error",
                                                                           "references", "prompt_ids", "images"
    and with ``rewards``                                                   "reward", "scores", "reward_error"

With ``rewards`` every completion is judged once all are finished, and the file is written again with the weighted sum
(null if one reward is an error, or none applies) and each reward's score. With ``out=DIR/`` the completions are in
``DIR.completions.jsonl``, and become a data set folder of rows that ``taut sft`` reads, all of them or the best of each
prompt:

    {"id", "index", "prompt", "completion", "finish_reason", "reward", "scores", "tools"}

A line is written as soon as its completion is finished, so lines are in order of completion; ``id`` and ``index``
identify them; ``images`` are path and SHA-256 of the prompt's pictures. After a crash, an interrupt or errors, the same
command with ``resume=true`` keeps the finished lines, generates the rest, and retries errors. ``FILE.meta.json`` next
to the output holds the settings of the completions; a command with other settings does not add to them.

``taut eval`` reports rewards with intervals (evaluate.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import TypedDict

from taut.commands.reading import print_decisions, read_prompts, require_free, write_errors
from taut.commands.settings import Generate
from taut.config import Decision, home_path, to_dict
from taut.data.read.folder import (
    ROWS,
    Card,
    beside,
    is_folder,
    require_new,
    write_card,
    writing_folder,
)
from taut.data.rows.prompts import PromptRow
from taut.errors import DataError, EngineError, OutputError, redacted_in
from taut.evals.answers import to_reward_input
from taut.inference.engine import require_text, require_usable
from taut.inference.factory import open_engine, open_renderer
from taut.inference.reward_model import open_rater
from taut.io import files
from taut.io.console import counted
from taut.io.notebook import html_table
from taut.io.terminal import Terminal
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.types import Completion, FloatArray

COMPLETIONS = "completions.jsonl"
"""Suffix of the completions file beside a data set folder."""
CHUNK_LINES = 1024
"""Completions judged at a time."""
MAX_ERRORS = 3
"""Errors listed in the summary."""
MAX_EXAMPLES = 5
"""Completions of the file shown in a notebook."""
FINISH = "are written; the same command with resume=true finishes the rest"
PARTS = 10
"""Progress lines without a terminal."""
DECIMALS = 7
"""Decimals of a logprob in the file."""

Key = tuple[str, int]
"""A completion: its prompt's id and its index."""


class _Line(TypedDict):
    """The fields of a line of ``out`` that are read back."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    id: str
    index: int
    ids: list[int]
    finish_reason: str
    text: str


class Judged(NamedTuple):
    """Results of the rewards on the completions of a file."""

    num_scored: int
    mean: float | None
    """Mean reward of the completions that have one."""
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Generated:
    """The result; counts cover this run, without an earlier run's completions."""

    out: Path
    num_prompts: int
    num_completions: int
    """Completions in the file, without errors."""
    num_kept: int
    """Number of these that are from an earlier run."""
    finished: Mapping[str, int]
    """finish_reason -> completions."""
    num_tokens: int
    seconds: float
    errors: tuple[str, ...]
    """Errors of this run's failed completions."""
    decisions: tuple[Decision, ...]
    judged: Judged | None = None
    """Results of the rewards, once all completions are finished."""
    num_rows: int | None = None
    """Rows of the data set folder, if there is one."""

    def __repr__(self) -> str:
        return f"Generated({self.out}: {summary(self).splitlines()[0]})"

    def _repr_html_(self) -> str:
        """The summary, and the first completions of the file if it exists."""
        rows = []
        if self.out.is_file():
            with files.open_text(self.out) as file:
                rows = [json.loads(line) for line in islice(file, MAX_EXAMPLES)]
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
    """Write the completions that are not in ``config.out`` yet. ``console``: receives decisions and progress.
    ``afterwards``: message about the finished ones if not all could be finished.
    """
    out = home_path(config.out)
    if is_folder(config.out):
        require_new(out)
        out = beside(config.out, COMPLETIONS)
    do = "set resume=true to finish what it lacks, or name another"
    require_free(out, config.prompts, "prompts", may_exist=config.resume, do=do)
    with ExitStack() as stack:
        reward_set = None
        if config.rewards is not None:
            reward_set = stack.enter_context(open_rewards(config.rewards, open_rater=open_rater))
            print_decisions(console, reward_set.decisions)
        rows, generated = _complete(config, out, reward_set, console, afterwards)
        if generated.errors or not (reward_set or is_folder(config.out)):
            return generated
        judged = None if reward_set is None else _judge(out, rows, reward_set)
        if is_folder(config.out):
            folder = home_path(config.out)
            num_rows = _write_folder(config, folder, out, rows)
            return replace(generated, judged=judged, out=folder, num_rows=num_rows)
        return replace(generated, judged=judged)


def _complete(
    config: Generate,
    out: Path,
    reward_set: RewardSet | None,
    console: Terminal | None,
    afterwards: str,
) -> tuple[list[PromptRow], Generated]:
    """Write the completions that are not in ``out`` yet."""
    rendering = open_renderer(config)
    rows = read_prompts(
        config,
        config.images,
        config.prompts,
        rendering.renderer,
        console,
        reference=config.reference,
        needs_reference=reward_set is not None
        and any(part.verifier.needs_reference for part in reward_set.parts),
    )
    if is_folder(config.out) and (with_media := next((row for row in rows if row.media), None)):
        raise DataError(
            f"{with_media.place}: the prompt has pictures, which the rows of out={config.out} have no place for; "
            "expected text; name a file, out=FILE.jsonl"
        )
    # what is there already, and what is missing
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
        # start the file with what is kept
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
    generated = Generated(
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
    return rows, generated


def _judge(out: Path, rows: Sequence[PromptRow], reward_set: RewardSet) -> Judged:
    """Write the completions again, with their rewards."""
    by_id = {row.id: row for row in rows}
    rewards: list[float] = []
    errors: list[str] = []
    with write_errors(out), files.open_text(out) as lines, files.writing(out) as file:
        while texts := list(islice(lines, CHUNK_LINES)):
            chunk = [json.loads(text) for text in texts]
            # a chunk of lines at a time: a file may be larger than memory
            reward_results = reward_set.grade(
                [
                    to_reward_input(
                        by_id[line["id"]],
                        line["text"],
                        num_tokens=len(line["ids"]),
                        finish_reason=line["finish_reason"],
                    )
                    for line in chunk
                ]
            )
            for line, reward_result in zip(chunk, reward_results, strict=True):
                line["reward"] = reward_result.total
                line["scores"] = {name: score.value for name, score in reward_result.parts.items()}
                line.pop("reward_error", None)
                if reward_result.total is not None:
                    rewards.append(reward_result.total)
                if reward_result.error is not None:
                    line["reward_error"] = reward_result.error
                    errors.append(f"{line['id']}: {reward_result.error}")
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    mean = sum(rewards) / len(rewards) if rewards else None
    return Judged(len(rewards), mean, tuple(errors))


def _write_folder(
    config: Generate, folder: Path, completions: Path, rows: Sequence[PromptRow]
) -> int:
    """Write the data set folder of completions. Returns the number of its rows."""
    # in the order of the prompts
    order = {row.id: number for number, row in enumerate(rows)}
    with files.open_text(completions) as file:
        lines = [json.loads(text) for text in file]
    lines.sort(key=lambda line: (order[line["id"]], line["index"]))
    if config.keep == "best":
        best: dict[str, dict[str, Any]] = {}
        for line in lines:
            before = best.get(line["id"])
            if line["reward"] is not None and (before is None or line["reward"] > before["reward"]):
                best[line["id"]] = line
        lines = list(best.values())
    if not lines:
        raise DataError(
            f"{completions}: no completion has a reward; expected one at least; see reward_error in the file"
        )
    # the card says where the rows are from
    settings = redacted_in(to_dict(config))
    digest = files.digest(completions)
    about = (
        f"{len(lines):,} completions ({config.keep} of each prompt) of {len(rows):,} prompts of "
        f"`{settings['prompts']}`, by `taut generate`.\n\n- model: `{settings['model']}`\n"
        f"- sampling: `{json.dumps(settings['sampling'])}`\n- rewards: `{json.dumps(settings['rewards'])}`\n"
        f"- all completions: SHA-256 `{digest}`"
    )
    with write_errors(folder), writing_folder(folder) as partial:
        with (partial / ROWS).open("x", encoding="utf-8") as file:
            for line in lines:
                row = _training_row(line, rows[order[line["id"]]])
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        write_card(partial, Card(folder.name, about, config.license))
    return len(lines)


def _training_row(line: Mapping[str, Any], row: PromptRow) -> dict[str, Any]:
    """A completion as a row of SFT."""
    is_text = isinstance(row.prompt, str)
    whole = row.beginning + line["text"]
    answer = whole if is_text else [{"role": "assistant", "content": whole}]
    names = ("finish_reason", "reward", "scores")
    return {
        "id": line["id"],
        "index": line["index"],
        "prompt": row.prompt if is_text else list(row.asked),
        "completion": answer,
        **{name: line[name] for name in names if name in line},
        **({"tools": list(row.tools)} if row.tools else {}),
    }


def summary(result: Generated) -> str:
    """The summary as text."""
    # this run's completions, and earlier ones
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
    if result.judged is not None:
        mean = "none" if result.judged.mean is None else f"{result.judged.mean:.4g}"
        lines.append(
            f"mean reward {mean} of {counted(result.judged.num_scored, 'completions')}, "
            f"{len(result.judged.errors):,} errors"
        )
        lines += [f"error of a reward: {error}" for error in result.judged.errors[:MAX_ERRORS]]
    if result.num_rows is not None:
        lines.append(f"{counted(result.num_rows, 'rows')} in the data set")
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
        # a line at every tenth, where there is no bar
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
    fault = ""
    if not isinstance(earlier, dict):
        fault = f"{_meta(out).name} next to out={out} cannot be read; expected the completions' settings; restore it"
    elif changed := [name for name, value in identity.items() if earlier.get(name) != value]:
        settings = ", ".join(changed)
        fault = (
            f"out={out} was drawn with other settings ({settings}); expected the same; restore them"
        )
    if fault:
        raise OutputError(f"{fault}, or name another out")
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
