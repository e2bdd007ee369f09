"""``taut score MODEL data=FILE out=FILE.jsonl``: a reward model's numbers for a file of answers, one JSON object a row.

    {"id", "score", "num_tokens"}                    messages, prompt and completion, alpaca, text: the last answer's
    {"id", "chosen", "rejected", "num_tokens"}       chosen and rejected: a number each
    {"id", "scores", "num_tokens"}                   a list of answers, one each; or steps, one at the end of each

Lines are in the order of the rows; ``id`` is the row's own, or its place. Labels, ranks and grades need not be there;
where they are, the summary tells accuracy (ties count half) and how far the model's probabilities can be believed
(``evals/calibration.py``). The file is there whole or not at all.

Does not train and does no maths. The command line and ``taut.score`` import it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, permutations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TextIO

import numpy as np
from pydantic import Field
from rich.console import Console

from taut.commands.reading import columns_of, left_out, source_of, tell_left_out
from taut.config import Decision, configclass, home_path
from taut.data.render import Incident, faults_of_pictures
from taut.data.schema import (
    ANSWER_LISTS,
    GRADES,
    REQUIRED,
    Answers,
    AnyRow,
    Columns,
    Format,
    Kind,
    Stepwise,
    read_any,
)
from taut.data.sources import Source, open_source
from taut.errors import DataError, ModelError, OutputError, PictureError
from taut.evals.statistics import (
    Calibration,
    calibrate,
    calibrate_pairs,
    sigmoid,
    wilson_interval,
    wins,
)
from taut.inference.reward_model import Judge, JudgeUse, open_judge
from taut.io import files
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.types import FloatArray, Sample

PAIR = ("chosen", "rejected")
CHUNK_ROWS = 2048
"""Rows that are laid out together: what they begin with alike is computed once."""
DECIMALS = 7
"""Of a score in the file."""


@configclass
class Score(JudgeUse):
    """A reward model's numbers for a file of answers."""

    data: str | Source
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: rows with an answer, or several."""
    out: str | None = None
    """The JSONL file that is written; refused if it exists, unless overwrite. None: only the summary is printed."""
    kind: Literal["auto", "answer", "preference", "stepwise"] = "auto"
    """What rows hold: an answer, several to one prompt, or one in steps; auto asks the first row."""
    format: Format = "auto"
    """How rows are read; auto recognises them by their columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """taut's name of a column -> its name in the data."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns, that may be there and are not used."""
    apply_chat_template: bool = False
    """Render prompts that are plain text with the chat template, as a user message. By default they are used as they
    are."""
    step_separator: str = "\n"
    """What joins the steps of an answer."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first so many rows."""
    overwrite: bool = False
    """Write over a file that is there."""
    json: bool = False
    """Print the summary as JSON, and nothing else."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """A row's numbers."""

    id: str
    names: tuple[str, ...]
    """What the numbers belong to, by name: chosen and rejected, or score; empty for lists and steps."""
    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]
    """Of each answer."""
    gaps: tuple[float, ...] = ()
    """score(better) - score(worse) of each pair of its answers that is ordered."""
    labels: tuple[float, ...] = ()
    """Of the steps, where they are labelled."""

    def as_line(self) -> dict[str, Any]:
        """As it is written."""
        scores = [round(score, DECIMALS) for score in self.scores]
        if not self.names:
            sizes = list(self.num_tokens)
            return {"id": self.id, "scores": scores, "num_tokens": sizes}
        if len(self.names) == 1:
            return {"id": self.id, self.names[0]: scores[0], "num_tokens": self.num_tokens[0]}
        by_name = dict(zip(self.names, scores, strict=True))
        sizes_by_name = dict(zip(self.names, self.num_tokens, strict=True))
        return {"id": self.id, **by_name, "num_tokens": sizes_by_name}


@dataclass(frozen=True, eq=False)
class Scored:
    """What came of it."""

    rows: tuple[RowScores, ...]
    out: Path | None
    seconds: float
    """Without loading the model."""
    decisions: tuple[Decision, ...]
    mean: float
    deviation: float
    """Of all scores."""
    num_judged: int
    """Pairs, or labelled steps."""
    accuracy: float | None
    """Share of them that the model has right; None where none are judged."""
    calibration: Calibration | None

    @property
    def num_scores(self) -> int:
        return sum(len(row.scores) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(sum(row.num_tokens) for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        return {
            "out": None if self.out is None else str(self.out),
            "num_rows": len(self.rows),
            "num_scores": self.num_scores,
            "num_tokens": self.num_tokens,
            "mean": self.mean,
            "deviation": self.deviation,
            "num_judged": self.num_judged,
            "accuracy": self.accuracy,
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
            "decisions": [list(decision) for decision in self.decisions],
        }


def run(config: Score) -> int:
    """Score, and print what came of it."""
    console = Terminal(soft_wrap=True)
    result = score(config, None if config.json else console)
    if config.json:
        sys.stdout.write(json.dumps(result.as_dict(), allow_nan=False) + "\n")
    else:
        console.print(summary(result), markup=False)
    return 0


def score(config: Score, console: Console | None = None) -> Scored:
    """Score every row, and write ``config.out``. ``console``: where it is shown what was decided, and progress."""
    out = None if config.out is None else home_path(config.out)
    source = source_of(config.data)
    if out is not None:
        _require_free(out, source, config.overwrite)
    opened = open_source(source)
    records = islice(opened.records(), config.limit)
    judge = open_judge(config)
    if console is not None:
        for name, value, reason in judge.decisions:
            console.print(f"{name}: {value} ({reason})", markup=False)
    reader, began = _Reader(config, judge), time.perf_counter()
    rows: list[RowScores] = []
    with _whole(out) as file:
        while chunk := list(islice(records, CHUNK_ROWS)):
            found = reader.scores((record, f"{opened.path}:{number}") for number, record in chunk)
            if file is not None:
                file.writelines(json.dumps(r.as_line(), ensure_ascii=False) + "\n" for r in found)
            rows += found
            if console is not None and len(chunk) == CHUNK_ROWS:
                console.print(f"scored: {counted(len(rows), 'rows')}", markup=False)
        tell_left_out(reader.left_out, rows, console)
        if not rows:
            raise DataError(f"{opened.path}: no rows; expected at least one; check the path")
    return _result(rows, out, time.perf_counter() - began, judge)


class _Read(NamedTuple):
    name: str
    names: set[str]
    """taut's names of the columns that are filled."""
    row: AnyRow


class _Reader:
    """Rows as they are in the file -> their numbers."""

    def __init__(self, config: Score, judge: Judge) -> None:
        self.config, self.judge = config, judge
        self.kind: Kind | None = None
        """As ``data/preferences.py`` calls it; asked of the first row."""
        self.columns = Columns(prefix="")
        self.left_out = left_out(config.images)
        """Rows whose pictures cannot be read."""

    def scores(self, records: Iterator[tuple[Any, str]]) -> list[RowScores]:
        """The numbers of some rows, laid out together."""
        read = [it for record, place in records if (it := self._seen(record, place)) is not None]
        if self.left_out is not None:
            faults = faults_of_pictures([it.row for it in read], self.judge.renderer)
            for it, fault in zip(read, faults, strict=True):
                if fault is not None:
                    self._leave_out(it.row.place, fault)
            read = [it for it, fault in zip(read, faults, strict=True) if fault is None]
        samples = self.judge.render([it.row for it in read])
        flat = iter(self.judge.scores([sample for group in samples for sample in group]))
        found = []
        for it, group in zip(read, samples, strict=True):
            scores = [next(flat) for _ in group]
            found.append(_row_scores(it.name, it.names, it.row, group, scores))
        return found

    def _seen(self, record: Any, place: str) -> _Read | None:
        """A row; None: it is left out for a picture that cannot be read."""
        names = self._names(record)
        try:
            row = self._read(record, place, names)
        except PictureError as error:
            self._leave_out(place, error)
            return None
        own = record.get("id")
        return _Read(str(own) if isinstance(own, str | int) else place, names, row)

    def _leave_out(self, place: str, error: PictureError) -> None:
        if self.left_out is None:
            raise error
        self.left_out.append(Incident(place, "dropped", str(error).removeprefix(f"{place}: ")))

    def _read(self, record: Any, place: str, names: set[str]) -> AnyRow:
        if self.kind is None:
            self.kind = self._kind_of(names, place)
            source = source_of(self.config.data)
            separator = self.config.step_separator
            self.columns = columns_of(self.config, source, kind=self.kind, step_separator=separator)
        return read_any(self._with_judgement(record, names), place, self.columns)

    def _names(self, record: Any) -> set[str]:
        """taut's names of the columns that are filled."""
        if not isinstance(record, dict):
            return set()
        mapping = self.config.columns
        given = {key for key, value in record.items() if value is not None}
        return given - {*mapping.values()} | {k for k, theirs in mapping.items() if theirs in given}

    def _kind_of(self, names: set[str], place: str) -> Kind:
        asked = self.config.kind
        if asked == "auto":
            asked = self._recognised(names)
        if asked == "stepwise" and not self.judge.is_process:
            raise ModelError(
                f"{place}: the row is an answer in steps, and model={self.config.model} gives one number for a whole "
                "answer; expected a process reward model; name one, or give rows with one answer"
            )
        return "sft" if asked == "answer" else asked

    def _recognised(self, names: set[str]) -> Literal["answer", "preference", "stepwise"]:
        if names >= {*PAIR}:
            return "preference"
        is_graded = bool(names & {*GRADES})
        is_labelled = "labels" in names or self.judge.is_process
        if "completions" in names and not is_graded and is_labelled:
            return "stepwise"
        has_answer = any(names >= {*required} for required in REQUIRED.values())
        is_list = bool(names & {*ANSWER_LISTS}) and (is_graded or not has_answer)
        return "preference" if is_list else "answer"

    def _with_judgement(self, record: Any, names: set[str]) -> Any:
        """The record, with a label or a grade of 0 for each where there are none: they are not read then."""
        for lists, missing, wanted in (
            (ANSWER_LISTS, GRADES, "preference"),
            (("completions",), ("labels",), "stepwise"),
        ):
            theirs = [self.config.columns.get(name, name) for name in lists if name in names]
            if self.kind != wanted or names & {*missing, *PAIR} or not theirs:
                continue
            if isinstance(record[theirs[0]], list):
                return {**record, missing[0]: [0] * len(record[theirs[0]])}
        return record


def _row_scores(
    name: str,
    names: set[str],
    row: AnyRow,
    samples: Sequence[Sample],
    found: Sequence[FloatArray],
) -> RowScores:
    sizes = tuple(sample.num_tokens for sample in samples)
    scores = tuple(float(score) for score_R in found for score in score_R)
    if isinstance(row, Stepwise):
        return RowScores(name, (), scores, sizes, labels=row.labels if "labels" in names else ())
    if not isinstance(row, Answers):
        return RowScores(name, ("score",), scores, sizes)
    worth = row.values["preference"]
    gaps = tuple(
        scores[better] - scores[worse]
        for better, worse in permutations(range(len(scores)), 2)
        if worth[better] > worth[worse]
    )
    return RowScores(name, PAIR if names >= {*PAIR} else (), scores, sizes, gaps)


def _result(rows: Sequence[RowScores], out: Path | None, seconds: float, judge: Judge) -> Scored:
    every = np.array([score for row in rows for score in row.scores])
    gaps = np.array([gap for row in rows for gap in row.gaps])
    steps = [
        (s, y) for row in rows if row.labels for s, y in zip(row.scores, row.labels, strict=True)
    ]
    right, calibration = np.empty(0), None
    if gaps.size:
        right, calibration = wins(gaps), calibrate_pairs(gaps)
    elif steps:
        scores, labels = np.array(steps).T
        right, calibration = (
            wins(np.sign(labels - 0.5) * scores),
            calibrate(sigmoid(scores), labels),
        )
    return Scored(
        rows=tuple(rows),
        out=out,
        seconds=seconds,
        decisions=judge.decisions,
        mean=float(every.mean()),
        deviation=float(every.std()),
        num_judged=right.size,
        accuracy=float(right.mean()) if right.size else None,
        calibration=calibration,
    )


def summary(result: Scored) -> str:
    """The result in a few lines."""
    rate = result.num_tokens / max(result.seconds, 1e-9)
    sizes = f"{counted(len(result.rows), 'rows')}, {counted(result.num_scores, 'scores')}"
    tokens = counted(result.num_tokens, "tokens")
    lines = [
        f"{sizes}: mean {result.mean:.4g}, standard deviation {result.deviation:.4g}; "
        f"{tokens} in {result.seconds:.1f} s ({rate:,.0f}/s)"
    ]
    if result.accuracy is not None and result.calibration is not None:
        low, high = wilson_interval(result.accuracy * result.num_judged, result.num_judged)
        what = "pairs" if any(row.gaps for row in result.rows) else "steps"
        lines.append(
            f"accuracy {result.accuracy:.1%} of {result.num_judged:,} {what} (95%: {low:.1%} to {high:.1%}); "
            f"calibration error {result.calibration.error:.3f}"
        )
        lines.append(f"  predicted      seen  {what:>8}")
        lines += [
            f"  {each.predicted:9.3f} {each.seen:9.3f} {each.count:9,}"
            for each in result.calibration.bins
            if each.count
        ]
    return "\n".join([*lines, *([f"written: {result.out}"] if result.out else [])])


def _require_free(out: Path, source: Source, overwrite: bool) -> None:
    if out.is_dir():
        raise OutputError(f"out={out} is a directory; expected a JSONL file; name one in it")
    if out.exists() and out.resolve() == home_path(source.path).resolve():
        raise OutputError(f"out={out} is the file of answers; expected another; rename out")
    if out.exists() and not overwrite:
        raise OutputError(
            f"out={out} exists; expected a new file; name another, or set overwrite=true"
        )


@contextmanager
def _whole(out: Path | None) -> Iterator[TextIO | None]:
    """A file that takes its place when the block ends well, and is gone when it does not."""
    if out is None:
        yield None
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.writing(out) as file:
            yield file
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror}; expected room and permission"
        ) from error
