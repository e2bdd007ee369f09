"""``taut score MODEL data=FILE out=FILE.jsonl``: a reward model's scores of a file of answers, one JSON object per row.

    {"id", "score", "num_tokens"}                    messages, prompt and completion, alpaca, text: the last answer
    {"id", "chosen", "rejected", "num_tokens"}       chosen and rejected: one score each
    {"id", "scores", "num_tokens"}                   a list of answers, one score each; or steps, one at the end of each

Lines are in the order of the rows; ``id`` is the row's id, or its place. Where rows have labels, ranks or grades, the
summary has accuracy (ties count half) and calibration (evals/statistics.py). The file appears complete or not at all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from taut.commands.reading import (
    columns_of,
    print_decisions,
    report_left_out,
    require_free,
    source_of,
    write_errors,
)
from taut.config import Decision, home_path
from taut.data.read.sources import open_source
from taut.data.render.render import Incident, faults_of_pictures
from taut.data.rows.schema import (
    ANSWER_LISTS,
    GRADES,
    REQUIRED,
    Answers,
    AnyRow,
    Columns,
    Stepwise,
    read_any,
)
from taut.data.settings import Kind
from taut.errors import DataError, ModelError, PictureError
from taut.evals.statistics import (
    Calibration,
    calibrate,
    wilson_interval,
)
from taut.inference.reward_model import Judge, open_judge
from taut.io import files
from taut.io.console import counted
from taut.io.notebook import html_table
from taut.io.terminal import Terminal
from taut.types import FloatArray, Sample
from taut_tools.score.settings import Score

PAIR = ("chosen", "rejected")
CHUNK_ROWS = 2048
"""Rows packed together: their shared prefixes are computed once."""
DECIMALS = 7
"""Decimals of a score in the file."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """A row's scores."""

    id: str
    names: tuple[str, ...]
    """Names of the scores: chosen and rejected, or score; empty for lists and steps."""
    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]
    """Tokens of each answer."""
    gaps: tuple[float, ...] = ()
    """score(better) - score(worse) of each ordered pair of its answers."""
    labels: tuple[float, ...] = ()
    """Labels of the steps, if any."""

    def as_line(self) -> dict[str, Any]:
        """The line of the file."""
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
    """The result."""

    rows: tuple[RowScores, ...]
    out: Path | None
    seconds: float
    """Time without loading the model."""
    decisions: tuple[Decision, ...]
    mean: float
    deviation: float
    """Standard deviation of all scores."""
    num_judged: int
    """Pairs, or labeled steps."""
    accuracy: float | None
    """Share of these that the model gets right; None if there are none."""
    calibration: Calibration | None

    @property
    def num_scores(self) -> int:
        return sum(len(row.scores) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(sum(row.num_tokens) for row in self.rows)

    def __repr__(self) -> str:
        return f"Scored({'; '.join(summary(self).splitlines()[:2])})"

    def _repr_html_(self) -> str:
        lines = (line.partition(": ") for line in summary(self).splitlines())
        return html_table("scores", (), ((name, text) for name, _, text in lines))

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
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
    """Score and print a summary."""
    console = Terminal(soft_wrap=True)
    result = score(config, None if config.json else console)
    if config.json:
        sys.stdout.write(json.dumps(result.as_dict(), allow_nan=False) + "\n")
    else:
        console.lines([summary(result)])
    return 0


def score(config: Score, console: Terminal | None = None) -> Scored:
    """Score every row and write ``config.out``. ``console``: receives decisions and progress."""
    out = None if config.out is None else home_path(config.out)
    source = source_of(config.data)
    if out is not None:
        do = "name another, or set overwrite=true"
        require_free(out, source, "answers", may_exist=config.overwrite, do=do)
    opened = open_source(source)
    records = islice(opened.read_records(), config.limit)
    judge = open_judge(config)
    print_decisions(console, judge.decisions)
    # score chunk by chunk; the file takes its place at the end
    reader, began = _Reader(config, judge), time.perf_counter()
    rows: list[RowScores] = []
    with ExitStack() as stack:
        file = None
        if out is not None:
            stack.enter_context(write_errors(out))
            out.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(files.writing(out))
        while chunk := list(islice(records, CHUNK_ROWS)):
            scored = reader.score((record, opened.place(number)) for number, record in chunk)
            if file is not None:
                lines = (json.dumps(row.as_line(), ensure_ascii=False) + "\n" for row in scored)
                file.writelines(lines)
            rows += scored
            if console is not None and len(chunk) == CHUNK_ROWS:
                console.lines([f"scored: {counted(len(rows), 'rows')}"])
        report_left_out(reader.left_out, rows, console)
        if not rows:
            raise DataError(f"{opened.path}: no rows; expected at least one; check the path")
    seconds = time.perf_counter() - began
    # the summary: accuracy and calibration on pairs, or on labeled steps
    all_scores = np.array([score for row in rows for score in row.scores])
    gaps = np.array([gap for row in rows for gap in row.gaps])
    labeled = [row for row in rows if row.labels]
    right, calibration = np.empty(0), None
    if gaps.size:
        right, calibration = wins(gaps), calibrate_pairs(gaps)
    elif labeled:
        scores = np.array([score for row in labeled for score in row.scores])
        labels = np.array([label for row in labeled for label in row.labels])
        right = wins(np.sign(labels - 0.5) * scores)
        calibration = calibrate(sigmoid(scores), labels)
    return Scored(
        rows=tuple(rows),
        out=out,
        seconds=seconds,
        decisions=judge.decisions,
        mean=float(all_scores.mean()),
        deviation=float(all_scores.std()),
        num_judged=right.size,
        accuracy=float(right.mean()) if right.size else None,
        calibration=calibration,
    )


class _Read(NamedTuple):
    name: str
    names: set[str]
    """taut's names of the nonempty columns."""
    row: AnyRow


class _Reader:
    """Rows of the file -> their scores."""

    def __init__(self, config: Score, judge: Judge) -> None:
        self.config, self.judge = config, judge
        self.kind: Kind | None = None
        """The kind of the rows (data/rows/schema.py), from the first one."""
        self.columns = Columns(prefix="")
        self.left_out: list[Incident] | None = [] if config.images.bad == "drop" else None
        """Rows whose pictures cannot be read, where they are left out."""

    def score(self, records: Iterator[tuple[Any, str]]) -> list[RowScores]:
        """Score rows that are packed together."""
        # rows whose pictures cannot be read are left out, or end it
        attempts = [self._read(record, place) for record, place in records]
        read = [row for row in attempts if row is not None]
        if self.left_out is not None:
            faults = faults_of_pictures([row.row for row in read], self.judge.renderer)
            for row, fault in zip(read, faults, strict=True):
                if fault is not None:
                    self._leave_out(row.row.place, fault)
            read = [row for row, fault in zip(read, faults, strict=True) if fault is None]
        samples = self.judge.render([row.row for row in read])
        flat = iter(self.judge.scores([sample for group in samples for sample in group]))
        return [
            _row_scores(row, group, [next(flat) for _ in group])
            for row, group in zip(read, samples, strict=True)
        ]

    def _read(self, record: Any, place: str) -> _Read | None:
        """Read a row; None if it is left out because a picture cannot be read."""
        names = self._names(record)
        if self.kind is None:  # the first row decides
            kind = self.config.kind
            if kind == "auto":
                kind = self._recognize_kind(names)
            if kind == "stepwise" and not self.judge.is_process:
                raise ModelError(
                    f"{place}: the row is an answer in steps, and model={self.config.model} scores whole answers; "
                    "expected a process reward model; name one, or give rows with one answer"
                )
            self.kind = "sft" if kind == "answer" else kind
            self.columns = columns_of(
                self.config,
                self.config.images,
                source_of(self.config.data),
                kind=self.kind,
                step_separator=self.config.step_separator,
            )
        try:
            row = read_any(self._with_judgment(record, names), place, self.columns)
        except PictureError as error:
            self._leave_out(place, error)
            return None
        row_id = record.get("id")
        return _Read(str(row_id) if isinstance(row_id, str | int) else place, names, row)

    def _leave_out(self, place: str, error: PictureError) -> None:
        if self.left_out is None:
            raise error
        self.left_out.append(Incident(place, "dropped", str(error).removeprefix(f"{place}: ")))

    def _names(self, record: Any) -> set[str]:
        """taut's names of the nonempty columns."""
        if not isinstance(record, dict):
            return set()
        mapping = self.config.columns
        filled = {key for key, value in record.items() if value is not None}
        mapped = {name for name, key in mapping.items() if key in filled}
        return filled - {*mapping.values()} | mapped

    def _recognize_kind(self, names: set[str]) -> Literal["answer", "preference", "stepwise"]:
        if names >= {*PAIR}:
            return "preference"
        is_graded = bool(names & {*GRADES})
        is_labeled = "labels" in names or self.judge.is_process
        if "completions" in names and not is_graded and is_labeled:
            return "stepwise"
        has_answer = any(names >= {*required} for required in REQUIRED.values())
        is_list = bool(names & {*ANSWER_LISTS}) and (is_graded or not has_answer)
        return "preference" if is_list else "answer"

    def _with_judgment(self, record: Any, names: set[str]) -> Any:
        """Add a label or grade of 0 for each answer to a record without any; they are ignored later."""
        for lists, missing, wanted in (
            (ANSWER_LISTS, GRADES, "preference"),
            (("completions",), ("labels",), "stepwise"),
        ):
            keys = [self.config.columns.get(name, name) for name in lists if name in names]
            if self.kind != wanted or names & {*missing, *PAIR} or not keys:
                continue
            if isinstance(record[keys[0]], list):
                return {**record, missing[0]: [0] * len(record[keys[0]])}
        return record


def _row_scores(
    read: _Read, samples: Sequence[Sample], scores_by_sample: Sequence[FloatArray]
) -> RowScores:
    name, names, row = read
    sizes = tuple(sample.num_tokens for sample in samples)
    scores = tuple(float(score) for score_R in scores_by_sample for score in score_R)
    if isinstance(row, Stepwise):
        return RowScores(name, (), scores, sizes, labels=row.labels if "labels" in names else ())
    if not isinstance(row, Answers):
        return RowScores(name, ("score",), scores, sizes)
    # each ordered pair, better before worse
    grades = row.values["preference"]
    gaps = tuple(
        scores[better] - scores[worse]
        for better, worse in permutations(range(len(scores)), 2)
        if grades[better] > grades[worse]
    )
    return RowScores(name, PAIR if names >= {*PAIR} else (), scores, sizes, gaps)


def summary(result: Scored) -> str:
    """The summary as text."""
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
            f"  {interval.predicted:9.3f} {interval.seen:9.3f} {interval.count:9,}"
            for interval in result.calibration.bins
            if interval.count
        ]
    return "\n".join([*lines, *([f"written: {result.out}"] if result.out else [])])


def calibrate_pairs(gaps: FloatArray) -> Calibration:
    """Calibration of pairs with these differences score(chosen) - score(rejected)."""
    return calibrate(sigmoid(np.abs(gaps)), wins(gaps), low=0.5)


def wins(gaps: FloatArray) -> FloatArray:
    """1 where the chosen answer has the higher score, 0.5 where both are equal."""
    return (np.sign(gaps) + 1) / 2


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x)), for any x."""
    return np.exp(-np.logaddexp(0.0, -x))
