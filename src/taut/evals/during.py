"""Evaluation during training: held-out loss, measured answers, and the best model so far.

Held-out loss is the training loss's own sums and metrics, without gradient, over every row of a set. Answers come from
the engine on the weights that train, with separate random streams: a run with evaluations and one without take the same
steps, bit for bit. Under several ranks all of them generate, the writer judges, and the others receive its scores.

The best model by one metric is in ``out/best``: a model directory like ``model/``, with ``best.json``:

    {"step": 40, "metric": "exact_match", "value": 0.61, "measured": "..."}

``measured`` is the fingerprint of the rows and settings of the measurement; a resumed run in which these differ is
refused, because the values cannot be compared. A resumed run knows the best value up to its checkpoint; a later model
in the directory is recognised at its step. Of equal values the earlier one stays. The directory is replaced as a whole,
so a killed run leaves the old best or the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import pydantic
import torch
from pydantic import Field
from typing_extensions import TypedDict

from taut import losses
from taut.config import Decision, configclass, first_problem, to_dict
from taut.data.batching import Rows
from taut.data.dataset import DataConfig, sources
from taut.data.prompts import PromptRow, load_prompts
from taut.data.render import Incident, Renderer
from taut.data.schema import Kind
from taut.data.sources import Source
from taut.errors import ConfigError, DataError, OutputError
from taut.evals.answers import EvalSampling, answer, require_scorable
from taut.evals.report import STOPPED, Answer, Report, build_report, pass_ks, spaced
from taut.evals.statistics import Calibration, calibrate
from taut.inference.engine import Engine, require_usable
from taut.inference.local import LocalConfig, LocalEngine
from taut.inference.reward_model import open_rater
from taut.io import files
from taut.io.console import counted
from taut.losses import Loss
from taut.rewards import Panel, RewardSpec, files_of, open_panel
from taut.rewards.registry import read_parts
from taut.train.distributed import Ranks
from taut.train.oom import require_room
from taut.train.step_statistics import Planned, Sums
from taut.train.trainer import Trainer, prepare_microbatches
from taut.types import Packed, Scores, Tree

ROWS_AT_A_TIME = 512
"""Rows planned together; bounds what is laid out in memory. What a loss takes over a whole step it takes over so many.
"""


@dataclass
class Found:
    """What some rows gave."""

    terms: Sums = field(default_factory=Sums)
    metrics: Sums = field(default_factory=Sums)
    num_tokens: int = 0
    predictions: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Probabilities, and what they came to."""
    lowest: float = 0.0

    def add(self, loss: Loss, scores: Scores, packed: Packed) -> None:
        """Add a micro-batch."""
        sums = loss(scores, packed)
        for term, unit in loss.units.items():
            self.terms.add(term, sums.terms[term], losses.count(unit, packed))
        for name, (total, count) in sums.metrics.items():
            self.metrics.add(name, total, count)
        self.num_tokens += packed.num_tokens
        predicted = loss.predictions(scores, packed)
        if predicted is not None:
            self.predictions.append((predicted.probability.tolist(), predicted.outcome.tolist()))
            self.lowest = predicted.lowest

    def calibration(self, ranks: Ranks) -> Calibration | None:
        """How far the probabilities of all ranks can be believed; None where there are none."""
        every = [one for rank in ranks.gather(self.predictions) for one in rank]
        lowest = max(ranks.gather(self.lowest))
        probability, outcome = (
            np.array([value for some in every for value in some[part]]) for part in (0, 1)
        )
        return calibrate(probability, outcome, lowest) if probability.size else None


@dataclass(frozen=True)
class HeldOut:
    """Evaluates ``trainer.source.loss`` on ``rows`` and emits an ``eval`` event."""

    rows: Rows
    trainer: Trainer

    def __call__(self, step: int) -> dict[str, float]:
        """``loss`` (each term's sum by its count) and the loss's metrics; every row counts once, whatever the number of
        ranks.
        """
        trainer, source, found = self.trainer, self.trainer.source, Found()
        trainer.scorer.eval()
        for start in range(0, len(self.rows), ROWS_AT_A_TIME):
            indices = list(range(start, min(start + ROWS_AT_A_TIME, len(self.rows))))
            trees, observed = self.rows.trees(indices), source.observed_of(self.rows, indices)
            planned = prepare_microbatches(
                trainer, trees, observed, f"held-out loss after step {step}"
            )
            self._add(planned, trees, found, step)
        ranks = trainer.ranks
        metrics = {"loss": sum(found.terms.means(ranks).values()), **found.metrics.means(ranks)}
        fields: dict[str, Any] = {"num_tokens": int(ranks.sum([found.num_tokens])[0])}
        calibration = found.calibration(ranks)
        if calibration is not None:
            metrics["calibration_error"] = calibration.error
            fields["calibration"] = calibration.as_dict()["bins"]
        trainer.emit("eval", step=step, num_samples=len(self.rows), **fields, **metrics)
        return metrics

    def _add(self, planned: Planned, trees: Sequence[Tree], found: Found, step: int) -> None:
        """Add what counts. All ranks run equally many forwards."""
        trainer, loss = self.trainer, self.trainer.source.loss
        for packed, is_real in planned:
            with torch.no_grad(), trainer.compute():
                score = partial(trainer.scorer, packed, wants=loss.wants)
                where = f"held-out loss after step {step}"
                scores = trainer.fit.attempt(score, packed, trees, where)
            if is_real:
                found.add(loss, scores, packed.to(scores.device))


FILE = "best.json"

SMALLER_IS_BETTER = ("loss",)
"""Metrics of which the smallest value is the best; of all others it is the largest."""

Save = Callable[[Path, Callable[[Path], None]], None]
"""``save(directory, finish)``: every rank calls it; ``finish`` completes the directory before it takes its place."""


class BestState(TypedDict):
    """What Best remembers."""

    measured: str
    metric: str
    value: float | None
    step: int | None


class Note(TypedDict):
    """``best.json``."""

    measured: str
    metric: str
    value: float
    step: int


@dataclass
class Best:
    """Keeps the model whose ``metric`` is the best so far."""

    remembered: ClassVar[Any] = BestState
    metric: str
    measured: str
    directory: Path
    save: Save
    trainer: Trainer
    value: float | None = None
    """The best value so far."""
    step: int | None = None
    """Where it was measured."""

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the model of ``step`` if it is better than all before; every rank calls this.

        A metric without a value that may be trusted (nothing scored, too many errors, NaN) is told; nothing is saved.
        """
        value = self.trainer.ranks.gather(metrics.get(self.metric))[0]
        if value is None or math.isnan(value):
            detail = f"eval.best: {self.metric} has no value at this step; nothing is kept of it"
            self.trainer.emit("warning", step=step, name="best", detail=detail)
            return
        if not (
            step == self.step or self._is_better(value)
        ):  # a resumed run may measure a step again
            return
        note = {
            "step": step,
            "metric": self.metric,
            "value": value,
            "measured": self.measured,
        }
        self.save(
            self.directory,
            lambda folder: _write(folder / FILE, note),
        )
        self.value, self.step = value, step
        self.trainer.emit(
            "best", step=step, name=self.metric, value=value, path=str(self.directory)
        )

    def remember(self) -> dict[str, Any]:
        return {
            "measured": self.measured,
            "metric": self.metric,
            "value": self.value,
            "step": self.step,
        }

    def recall(self, remembered: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off, unless something else was measured then or the model is gone."""
        is_same = (remembered["metric"], remembered["measured"]) == (self.metric, self.measured)
        if self.trainer.ranks.gather(is_same and (self.directory / FILE).is_file())[0]:
            self.value, self.step = remembered["value"], remembered["step"]

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.metric in SMALLER_IS_BETTER else value > self.value


def require_same_measure(directory: Path, metric: str, measured: str) -> None:
    """Raise ConfigError where a run left a best model by another metric, or measured otherwise, in ``directory``."""
    note = _read(directory / FILE)
    if note is None or (note["metric"], note["measured"]) == (metric, measured):
        return
    is_same = note["metric"] == metric
    found = f"{metric} on other data or in another way" if is_same else f"{note['metric']}"
    raise ConfigError(
        f"{directory} is the best model by {found}, and eval.best={metric} cannot be compared with it; "
        f"expected the same evaluation as before the resume; set it back, or remove {directory}"
    )


def drop_after(directory: Path, step: int) -> None:
    """Remove a best model of a later step: for a run whose later steps will be others."""
    note = _read(directory / FILE)
    if note is not None and note["step"] > step:
        files.remove_directory(directory)


def _read(path: Path) -> Note | None:
    try:
        note = pydantic.TypeAdapter(Note).validate_python(files.read_json(path), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error)
        raise OutputError(
            f"{path} cannot be read: {reason}; expected what a run wrote; remove {path.parent}"
        ) from error
    return note


def _write(path: Path, note: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(note) + "\n", encoding="utf-8")


SAMPLES_LOGGED = 4
ROOMIER = "set a smaller eval.answers.local.sequences or eval.answers.local.prefill_tokens"
"""What to do where memory runs out."""
RESERVED = ("loss", STOPPED, "step", "kind", "time", "samples", "tokens_mean", "num_prompts")
"""Names in an ``eval`` event that no reward may bear."""


@configclass
class AnswersConfig:
    """Evaluation by generation while training: at the end, and"""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations by generation; 0: only at the end."""
    rewards: str | list[str | RewardSpec] = field(default_factory=list)
    """What judges the answers: names of docs/rewards.md, FILE.py:function, or tables of them. Empty: nothing is
    generated."""
    data: str | list[str | Source] | None = None
    """Prompts with their references, as data.eval; by default data.eval."""
    reference: str | None = None
    """The column with the right answer; by default answers, answer, ..., or the last assistant message."""
    limit: Annotated[int, Field(ge=1)] = 128
    """How many prompts are asked: the first of the data, equally many of each source."""
    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of a reward's scores that may be errors; with more there is a warning, and its value is never the best."""
    sampling: EvalSampling = EvalSampling()
    local: LocalConfig = LocalConfig()

    @property
    def is_asked_for(self) -> bool:
        """Whether anything is set that asks for answers, with or without what judges them."""
        return bool(self.rewards or self.every or self.data or self.reference)

    def require_rewards(self) -> None:
        """Raise ConfigError where answers are asked for and nothing judges them."""
        if not self.rewards and self.is_asked_for:
            raise ConfigError(
                "found settings of eval.answers without eval.answers.rewards; expected what judges the answers; "
                "set eval.answers.rewards=exact_match"
            )


class Evaluation(NamedTuple):
    """A measurement that is made after every so many steps (0: none), and at the end."""

    key: str
    """The configuration's key of ``every``."""
    every: int
    names: Sequence[str]
    """The metrics it may give."""
    measured: str
    """A fingerprint of what it measures on, and how."""
    measure: Callable[[int], Mapping[str, float]]


@dataclass(frozen=True)
class Evaluations:
    """All measurements of a run; callable after each step."""

    all: Sequence[Evaluation]
    num_steps: int
    best: Best | None

    def __call__(self, step: int) -> None:
        """What is due between steps; the end has its own."""
        if step < self.num_steps:
            self._run([e for e in self.all if e.every and step % e.every == 0], step)

    def at_end(self) -> dict[str, float]:
        """Everything, after the last step; what was measured."""
        return self._run(self.all, self.num_steps)

    def _run(self, due: Sequence[Evaluation], step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for evaluation in due:
            metrics |= evaluation.measure(step)
        best = self.best
        if best is not None and any(best.metric in evaluation.names for evaluation in due):
            best.consider(step, metrics)
        return metrics


@dataclass(frozen=True, eq=False)
class Answering:
    """Asks the model that trains, and emits an ``eval`` event."""

    config: AnswersConfig
    rows: Sequence[PromptRow]
    names: Sequence[str]
    """Of the rewards."""
    panel: Panel | None
    """The writer's: it judges for all."""
    engine: Engine
    trainer: Trainer
    left_out: Sequence[Incident] = ()
    """Prompts whose pictures cannot be had."""

    def __call__(self, step: int) -> dict[str, float]:
        """name -> value of every metric that may be trusted, on all ranks."""
        trainer, names = self.trainer, self.names
        devices = [trainer.ranks.device] if trainer.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # a reward may draw
            ask = partial(answer, self.engine, self.rows, self.config.sampling, self.panel)
            answers = require_room(ask, f"answers after step {step}", ROOMIER)
        mine = build_report(answers, names) if trainer.ranks.is_writer else None
        report: Report | None = trainer.ranks.gather(mine)[0]
        assert report is not None
        values = report.values()
        trainer.emit("eval", step=step, **event_fields(report, answers))
        for metric in report.metrics:
            if metric.error_share <= self.config.max_errors:
                continue
            detail = (
                f"{len(metric.errors)} scores of {metric.name} are errors, the first: {metric.errors[0]}; "
                "it is not taken as the best"
            )
            trainer.emit("warning", step=step, name=metric.name, detail=detail)
            for name in metric_names(metric.name, self.config):
                values.pop(name, None)
        return values

    @property
    def decisions(self) -> list[Decision]:
        """What was chosen for the user."""
        found = [] if self.panel is None else list(self.panel.decisions)
        if self.left_out:
            first = self.left_out[0]
            value = f"without {len(self.left_out):,} of the prompts"
            found.append(Decision("eval.answers", value, f"{first.place}: {first.reason}"))
        return found

    def as_evaluation(self) -> Evaluation:
        """What is due when."""
        names = [name for reward in self.names for name in metric_names(reward, self.config)]
        every = self.config.every
        return Evaluation("eval.answers.every", every, [*names, STOPPED], self.measured, self)

    @property
    def measured(self) -> str:
        """A fingerprint of the questions, how they are asked and what judges."""
        asked = [_told(row) for row in self.rows]
        config = to_dict(self.config)
        code = [files.read_text(path) for path in files_of(self.config.rewards)]
        text = json.dumps([asked, config["rewards"], code, config["sampling"]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _told(row: PromptRow) -> list[Any]:
    """What of a row its answers depend on."""
    return [row.ids_T.tolist(), row.references, *(one.picture.digest for one in row.media)]


def build_answering(
    config: AnswersConfig,
    data: DataConfig,
    renderer: Renderer,
    make_engine: Callable[..., LocalEngine],
    trainer: Trainer,
    kind: Kind = "sft",
) -> Answering | None:
    """The evaluation a run asks for, refused now where it could not be made; None where it asks for none.

    ``kind``: what rows of ``data.eval`` are.
    """
    if not config.rewards:
        return None
    parts = read_parts(config.rewards, RESERVED)
    panel = None
    if trainer.ranks.is_writer:
        panel = open_panel(config.rewards, reserved=RESERVED, open_rater=open_rater)
    needs_reference = any(part.verifier.needs_reference for part in parts)
    rows, left_out = _load_rows(config, data, renderer, needs_reference, kind)
    if panel is not None:
        require_scorable(rows, panel, config.max_errors)
    engine = make_engine(config=config.local)
    require_usable([row.as_prompt() for row in rows], engine.context)
    return Answering(config, rows, [part.label for part in parts], panel, engine, trainer, left_out)


def held_out(rows: Rows, every: int, trainer: Trainer) -> Evaluation:
    """The loss and its metrics, measured on held-out rows."""
    measured = rows.data.fingerprint[:16]
    names = ["loss", *trainer.source.loss.best_by]
    return Evaluation("eval.every", every, names, measured, HeldOut(rows, trainer))


def require_best(metric: str, evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation that gives ``metric``; ConfigError where none does, or only the one at the end."""
    for evaluation in evaluations:
        if metric in evaluation.names and not evaluation.every:
            raise ConfigError(
                f"eval.best={metric} and {evaluation.key}=0: it is measured at the end only, when the best is model/; "
                f"expected several evaluations; set {evaluation.key}"
            )
        if metric in evaluation.names:
            return evaluation
    names = [name for evaluation in evaluations for name in evaluation.names]
    raise ConfigError(
        f"found eval.best={metric}; expected one of {', '.join(names) or 'none, for nothing is evaluated'}; "
        "set data.eval for loss, eval.answers.rewards for others"
    )


def metric_names(reward: str, config: AnswersConfig) -> list[str]:
    """Names of the metrics that a reward is reported under: its mean, and pass@k for each k."""
    return [reward, *(f"{reward}_pass_{k}" for k in pass_ks(config.sampling.n))]


def event_fields(report: Report, answers: Sequence[Answer]) -> dict[str, Any]:
    """A report as fields of an ``eval`` event, with a few of the answers."""
    fields: dict[str, Any] = dict(report.values())
    for metric in report.metrics:
        fields |= {f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
        if metric.errors:
            fields[f"{metric.name}_errors"] = len(metric.errors)
    if report.lengths is not None:
        fields["tokens_mean"] = report.lengths.mean
    fields["num_prompts"] = report.num_prompts
    fields["samples"] = [sample_fields(one) for one in spaced(answers, SAMPLES_LOGGED)]
    return fields


def sample_fields(answer: Answer) -> dict[str, Any]:
    """An answer for people to look at."""
    return {
        "place": answer.place,
        "references": list(answer.row.references),
        "text": answer.completion.text,
        "finish_reason": answer.completion.finish_reason,
        "scores": {name: score.value for name, score in answer.scores.items()},
    }


def _load_rows(
    config: AnswersConfig, data: DataConfig, renderer: Renderer, needs_reference: bool, kind: Kind
) -> tuple[list[PromptRow], list[Incident]]:
    """The prompts, and those that are left out for their pictures."""
    given = data.eval if config.data is None else config.data
    if not given:
        raise ConfigError(
            "eval.answers.rewards is set and there is nothing to ask: neither eval.answers.data nor data.eval is set; "
            "set eval.answers.data=FILE.jsonl"
        )
    found = sources(replace(data, eval=given), "eval", kind if config.data is None else "sft")
    each, more = divmod(config.limit, len(found))
    rows: list[PromptRow] = []
    unread: list[Incident] = []
    left_out = unread if data.images.bad == "drop" else None
    for number, (source, columns) in enumerate(found):
        limit = each + (number < more)
        if limit:
            rows += load_prompts(
                source,
                renderer,
                columns,
                reference=config.reference,
                needs_reference=needs_reference,
                limit=limit,
                left_out=left_out,
            )
    if not rows:
        first = unread[0]
        raise DataError(
            f"{first.place}: {first.reason}; so all of eval.answers ({counted(len(unread), 'prompts')}) is left out; "
            "expected some; correct data.images.folder, or the files"
        )
    if len({row.id for row in rows}) < len(rows):  # unique in each source only
        rows = [replace(row, id=row.place) for row in rows]
    return rows, unread
