"""``taut data TOOL IN ... out=FILE.jsonl|DIR/``: describe data sets, and remove rows that should not be trained on.

    taut data stats a.jsonl b.parquet                       rows, forms, turns, lengths, exact duplicates
    taut data dedup a.jsonl out=b.jsonl                     without exact and near duplicates
    taut data decontaminate a.jsonl out=b.jsonl against=[gsm8k.jsonl]    without questions of evaluations
    taut data filter a.jsonl out=b.jsonl max_tokens=4096    only the rows that keep the conditions

Rows are read as training reads them, and written unchanged; curate/output.py lists the other files that are written.
``taut generate`` makes new rows. This file has the code that the tools share and the tools that need no model;
``filter`` is in filter.py.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taut.commands.reading import columns_of, source_of
from taut.config import fields_of, home_path, to_dict, written
from taut.data.read.folder import Card, is_folder
from taut.data.read.sources import folder_of
from taut.data.render.render import render_any
from taut.data.rows.schema import Columns
from taut.data.settings import Source
from taut.errors import ConfigError, DataError, redacted, redacted_in
from taut.inference.factory import open_renderer
from taut.inference.settings import ModelUse
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.vision.settings import ImagesConfig
from taut_tools.curate import output, stats
from taut_tools.curate.dedup import MOST, Deduplicator
from taut_tools.curate.output import Tally, require_writable
from taut_tools.curate.overlap import Questions
from taut_tools.curate.rows import RowSet, Verdict, chunks
from taut_tools.curate.settings import DataSettings, Decontaminate, Dedup, Stats, WritesRows

CHUNK_ROWS = 512
"""Rows rendered at a time."""


@dataclass(frozen=True)
class Curated:
    """The result of a tool."""

    out: Path
    tally: Tally
    lines: tuple[str, ...]
    """Lines of the summary."""

    def __repr__(self) -> str:
        return f"Curated({self.out}: {self.tally})"


class Measured(dict[str, Any]):
    """The numbers of data sets, as the report has them; as text a table."""

    def __repr__(self) -> str:
        return "\n".join(stats.lines_of(self))


# -- tools


def run_stats(config: Stats) -> int:
    """Print the numbers of data sets."""
    Terminal(soft_wrap=True).lines(stats.lines_of(measure(config)))
    return 0


def measure(config: Stats) -> Measured:
    """Compute the numbers, and write them to ``config.out`` if it is set."""
    out = None if config.out is None else home_path(config.out)
    if out is not None:
        output.require_new_file(out)
    renderer = None
    if config.model is not None:
        use = ModelUse(
            model=config.model,
            template=config.template,
            trust_remote_code=config.trust_remote_code,
        )
        renderer = open_renderer(use).renderer
    rows, found = open_rows(config), stats.Statistics()
    for chunk in chunks(rows.rows(), CHUNK_ROWS):
        if renderer is None:
            for place, _, row in chunk:
                found.add(place, row)
            continue
        if any(part.columns.kind == "prompt" for part in rows.parts):
            raise DataError(
                f"{chunk[0][0]}: the rows are prompts, which have no targets; expected answers; leave model out"
            )
        rendered = render_any([row for _, _, row in chunk], renderer)
        for (place, _, row), samples in zip(chunk, rendered, strict=True):
            tokens = sum(sample.num_tokens for sample in samples)
            found.add(place, row, tokens=tokens, targets=sum(s.num_targets for s in samples))
    report = Measured({**found.as_dict(), "sources": rows.described()})
    if out is not None:
        output.write_report(out, report)
    return report


def run_dedup(config: Dedup) -> int:
    """Remove duplicates and print a summary."""
    return show(dedup(config))


def dedup(config: Dedup) -> Curated:
    """Write the rows that repeat no earlier one."""
    rows = open_for(config)
    finder = Deduplicator(rows, config.on, config.threshold, config.ngram)
    result = write(config, "dedup", rows, finder.verdicts(), lambda: {"capped": finder.num_capped})
    if not finder.num_capped:
        return result
    line = (
        f"{counted(finder.num_capped, 'rows')} had more than {MOST} candidates; each was compared with the {MOST} "
        "likeliest"
    )
    return replace(result, lines=(*result.lines, line))


def run_decontaminate(config: Decontaminate) -> int:
    """Remove rows that hold questions of evaluations and print a summary."""
    return show(decontaminate(config))


def decontaminate(config: Decontaminate) -> Curated:
    """Write the rows that hold no question of an evaluation."""
    if not config.against:
        raise ConfigError("against is empty; expected the questions of evaluations; name a file")
    # Read the questions first: only they are held in memory.
    rows = open_for(config)
    columns = Columns(
        mapping=config.against_columns, ignore_keys=config.ignore_keys, prefix="against_"
    )
    sources = [_with_columns(source, columns) for source in config.against]
    asked = Questions(RowSet(sources, is_auto=True), config.ngram)
    found: Counter[str] = Counter()

    def verdicts() -> Iterator[Verdict]:
        for verdict in asked.verdicts(rows, config.on):
            if verdict.reason:
                found[verdict.details["question"]] += 1
            yield verdict

    def more() -> dict[str, Any]:
        questions = asked.rows.described()
        return {"against": questions, "short_questions": asked.num_short, "found": dict(found)}

    result = write(config, "decontaminate", rows, verdicts(), more)
    line = (
        f"{counted(asked.rows.num_rows, 'questions')}, {asked.num_short:,} of them of fewer than {config.ngram} words; "
        f"{counted(len(found), 'questions')} found"
    )
    return replace(result, lines=(*result.lines, line))


# -- shared by the tools


def open_rows(config: DataSettings) -> RowSet:
    """Open the rows that a tool reads."""
    columns = columns_of(
        config,
        ImagesConfig(),
        Source(path=""),
        kind="sft" if config.kind == "auto" else config.kind,
    )
    sources = [_with_columns(source, columns) for source in config.data]
    return RowSet(sources, config.limit, is_auto=config.kind == "auto")


def _with_columns(source: str | Source, columns: Columns) -> tuple[Source, Columns]:
    """A source with the columns of its rows: its own settings replace the common ones."""
    source = source_of(source)
    if source.weight != 1:
        raise ConfigError(
            f"{source.path} has weight={source.weight:g}; expected none: each row is read once; remove it"
        )
    return source, replace(
        columns,
        format=columns.format if source.format is None else source.format,
        mapping=columns.mapping if source.columns is None else source.columns,
        folder=folder_of(source, None, "images.folder"),
        system=columns.system if source.system is None else source.system,
        template_variables=source.chat_template_kwargs or {},
    )


def open_for(config: WritesRows) -> RowSet:
    """Open the rows, after the check that ``out`` can be written."""
    if config.license is not None and not is_folder(config.out):
        raise ConfigError(
            f"license={config.license} is for the card of a folder, and out={config.out} is a file; set out=DIR/, or "
            "remove it"
        )
    require_writable(config.out, (home_path(source_of(source).path) for source in config.data))
    return open_rows(config)


def write(
    config: WritesRows,
    tool: str,
    rows: RowSet,
    verdicts: Iterable[Verdict],
    more: Callable[[], Mapping[str, Any]],
) -> Curated:
    """Write kept and removed rows, and a report with the fields of ``more``, which is called after the last row."""
    began = time.perf_counter()
    command = command_of(config, tool)

    def describe(_: Tally) -> dict[str, Any]:
        settings = redacted_in(to_dict(config))
        seconds = round(time.perf_counter() - began, 1)
        return {"command": command, "config": settings, "seconds": seconds, **more()}

    def card(tally: Tally) -> Card:
        return Card(home_path(config.out).name, output.about(command, tally, rows), config.license)

    tally, fault = output.write(config.out, verdicts, rows, describe, card)
    lines = [str(tally), *([f"datasets cannot load {config.out}: {fault}"] if fault else [])]
    return Curated(home_path(config.out), tally, tuple(lines))


def command_of(config: DataSettings, tool: str) -> str:
    """The command line of a configuration, without its defaults."""
    words = ["taut", "data", tool]
    defaults = fields_of(type(config))
    for key, value in to_dict(config).items():
        field_of = defaults[key]
        if key == "data" and all(isinstance(source, str) for source in value):
            words[3:3] = value
        elif field_of.is_required() or getattr(config, key) != field_of.get_default(
            call_default_factory=True
        ):
            words.append(f"{key}={written(value)}")
    return shlex.join(redacted(word) for word in words)


def show(result: Curated) -> int:
    """Print the summary of a tool."""
    lines = [*result.lines, f"written: {result.out}"]
    Terminal(soft_wrap=True).lines(lines)
    return 0
