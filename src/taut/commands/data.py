"""``taut data TOOL IN ... out=FILE.jsonl|DIR/``: look at data sets, and take out of them what should not be trained on.

    taut data stats a.jsonl b.parquet                       rows, forms, turns, lengths, exact duplicates
    taut data dedup a.jsonl out=b.jsonl                     without exact and near duplicates
    taut data decontaminate a.jsonl out=b.jsonl against=[gsm8k.jsonl]    without questions of evaluations
    taut data filter a.jsonl out=b.jsonl max_tokens=4096    only the rows that keep the conditions

Rows are read as training reads them, and written unchanged. What is written besides: curate/output.py. New rows are
made by ``taut generate``. This file has what the tools share, and those that need no model; filter: data_filter.py.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from taut.commands.reading import RowSettings, columns_of, source_of
from taut.config import configclass, fields_of, home_path, to_dict, written
from taut.curate import output, stats
from taut.curate.dedup import MOST, Deduplicator
from taut.curate.output import Tally, require_writable
from taut.curate.overlap import Questions
from taut.curate.rows import Part, RowSet, Verdict, chunks
from taut.data.folder import Card, is_folder
from taut.data.render import render_any
from taut.data.schema import Columns
from taut.data.sources import Source, folder_of
from taut.errors import ConfigError, DataError, redacted, redacted_in
from taut.inference.open import ModelUse, open_renderer
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.vision.content import ImagesConfig

CHUNK_ROWS = 512
"""Rows that are rendered at a time."""


@configclass
class DataSettings(RowSettings):
    """The rows that a tool reads."""

    data: list[str | Source]
    """Files and data sets, as data.train takes them: a file, a pattern, a directory, an address or owner/name; or
    tables with path, share, limit and what else an entry of data.train has, without weight."""
    kind: Literal["auto", "sft", "preference", "unpaired", "scored", "stepwise", "prompt"] = "auto"
    """Content of the rows, as the commands that train take them; auto recognises it by the columns of the first row of
    each file: rows of SFT, else preferences or steps, else prompts."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data is empty; expected files or data sets; name one")


@configclass
class WritesRows(DataSettings):
    """Where a tool writes the rows that stay."""

    out: str
    """FILE.jsonl, with .removed.jsonl and .report.json next to it; or DIR/, a data set folder with a card. Nothing is
    overwritten."""
    license: str | None = None
    """Licence of the rows for the card of DIR/, as the Hugging Face hub names it: apache-2.0, cc-by-4.0, ..."""


@configclass
class Stats(DataSettings):
    """What a data set holds."""

    out: str | None = None
    """A JSON file for the numbers; it must not exist."""
    model: str | None = None
    """Directory or hub name of a model, whose tokenizer and template count tokens and targets."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


@configclass
class Dedup(WritesRows):
    """Remove rows that say the same as an earlier one."""

    on: Part = "row"
    """What is compared: the whole row, or its prompt only, so that the first of several answers stays."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = 0.7
    """Jaccard similarity of the word n-grams from which two rows are near duplicates; none: only exact ones are
    removed."""
    ngram: Annotated[int, Field(ge=1)] = 3
    """Words of an n-gram."""


@configclass
class Decontaminate(WritesRows):
    """Remove rows that hold a question of an evaluation."""

    against: list[str | Source]
    """Files and data sets with the questions, as data."""
    against_columns: dict[str, str] = field(default_factory=dict)
    """As columns, for the questions: {prompt = "problem"}."""
    on: Part = "row"
    """Where a question is looked for: in the whole row, or in its prompt only."""
    ngram: Annotated[int, Field(ge=1)] = 8
    """Words of the runs that are compared."""


@dataclass(frozen=True)
class Curated:
    """The result of a tool."""

    out: Path
    tally: Tally
    lines: tuple[str, ...]
    """The summary."""


# -- tools


def run_stats(config: Stats) -> int:
    """Print what a data set holds."""
    Terminal(soft_wrap=True).lines(stats.lines_of(measure(config)))
    return 0


def measure(config: Stats) -> dict[str, Any]:
    """The numbers, written to ``config.out`` if there is one."""
    out = None if config.out is None else home_path(config.out)
    if out is not None:
        output.require_new_file(out)
    if config.model is None and config.template is not None:
        raise ConfigError("template is set and model is not; expected a model; set model=DIR")
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
    report = {**found.as_dict(), "sources": rows.described()}
    if out is not None:
        output.write_report(out, report)
    return report


def run_dedup(config: Dedup) -> int:
    """Remove duplicates and print a summary."""
    return show(dedup(config))


def dedup(config: Dedup) -> Curated:
    """Write the rows without duplicates."""
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
    """Write the rows without questions of evaluations."""
    if not config.against:
        raise ConfigError("against is empty; expected the questions of evaluations; name a file")
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


# -- what the tools share


def open_rows(config: DataSettings) -> RowSet:
    """The rows that a tool reads."""
    columns = columns_of(
        config,
        ImagesConfig(),
        Source(path=""),
        kind="sft" if config.kind == "auto" else config.kind,
    )
    sources = [_with_columns(source, columns) for source in config.data]
    return RowSet(sources, config.limit, is_auto=config.kind == "auto")


def _with_columns(source: str | Source, columns: Columns) -> tuple[Source, Columns]:
    """A source and how its rows are read: what it sets itself in place of what holds for all."""
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
    """The rows, once it is known that ``out`` can be written."""
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
    """Write each row where it belongs. ``more``: what the report has besides, once all rows are judged."""
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
    """The command line that gives this configuration."""
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
