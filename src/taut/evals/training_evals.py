"""Evaluation during training: held-out loss, measured answers, the user's metrics (custom_metrics.py), the best model
so far, and early stopping.

Held-out loss is the training loss's own sums and metrics, without gradient, over every row of a set. Answers come from
the engine on the weights that train, with separate random streams: a run with evaluations and one without take the same
steps, bit for bit. Under several ranks all of them generate, the writer judges, and the others receive its scores.

The best model by one metric is in ``out/best``: a model directory like ``model/``, with ``best.json``:

    {"step": 40, "metric": "exact_match", "value": 0.61, "measured": "..."}

``measured`` is the fingerprint of the rows and settings of the measurement; a resumed run in which these differ is
refused, because the values cannot be compared. A resumed run knows the best value up to its checkpoint; a later model
in the directory is recognized at its step. Evaluations since the best value are counted, for eval.stop_after, and the
count is part of a checkpoint. Of equal values the earlier one stays. The directory is replaced as a whole, so a killed
run leaves the old best or the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NotRequired

import numpy as np
import pydantic
import torch
from typing_extensions import TypedDict

from taut.config import Decision, first_problem, to_dict
from taut.data.batching import Rows, samples_of
from taut.data.dataset import sources
from taut.data.render.render import Incident, Renderer
from taut.data.rows.prompts import PromptRow, load_prompts
from taut.data.settings import DataConfig, Kind
from taut.errors import ConfigError, DataError, OutputError
from taut.evals.answers import answer, completed, require_scorable, to_reward_input
from taut.evals.custom_metrics import CustomMetric, HeldOutSample, values_of
from taut.evals.report import STOPPED, Report, build_report, pass_ks, spaced
from taut.evals.settings import AnswersConfig
from taut.evals.statistics import calibrate
from taut.inference.engine import Engine, require_usable
from taut.inference.local import LocalEngine
from taut.inference.reward_model import open_rater
from taut.io import files
from taut.io.console import counted
from taut.losses.loss import Predictions, count_units
from taut.rewards.registry import files_of, read_parts
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.train.cadence import Cadence
from taut.train.oom import require_room
from taut.train.run_dir import BEST_FILE
from taut.train.step_statistics import Sums
from taut.train.trainer import Trainer, on_device, plan_trees, prepare_microbatches
from taut.types import to_host

ROWS_AT_A_TIME = 512
"""Rows planned together, to bound memory. A loss computes its statistics of a step over this many rows."""


@dataclass(frozen=True)
class HeldOut:
    """Evaluates ``trainer.source.loss`` on ``rows`` and emits an ``eval`` event."""

    rows: Rows
    trainer: Trainer
    custom: Sequence[CustomMetric] = ()

    def __call__(self, step: int) -> dict[str, float]:
        """``loss`` (each term's sum by its count), the loss's metrics and the user's; every row counts once, whatever
        the number of ranks.
        """
        trainer, source, ranks = self.trainer, self.trainer.source, self.trainer.ranks
        loss, where = source.loss, f"held-out loss after step {step}"
        wants = loss.wants._replace(predicted=bool(self.custom))
        scored: list[HeldOutSample] = []
        terms, sums_of_metrics = Sums(), Sums()
        num_tokens = 0
        predictions: list[Predictions] = []
        trainer.scorer.eval()
        # every row, in micro-batches as in training
        for start in range(0, len(self.rows), ROWS_AT_A_TIME):
            indices = list(range(start, min(start + ROWS_AT_A_TIME, len(self.rows))))
            trees, observed = self.rows.trees(indices), source.observed_of(self.rows, indices)
            ids_of = {sample.id: sample.ids_T for sample in samples_of(trees)}
            plan = plan_trees(trainer, trees, observed)
            planned = prepare_microbatches(trainer, plan, where)
            # All ranks run equally many forwards.
            for packed, is_real in on_device(trainer, planned):
                with torch.no_grad(), trainer.compute():
                    score = partial(trainer.scorer, packed, wants=wants)
                    scores = trainer.fit.attempt(score, packed, trees, where)
                if not is_real:
                    continue
                sums = loss(scores, packed)
                for term, unit in loss.units.items():
                    terms.add(term, sums.terms[term], count_units(unit, packed.on_host))
                for name, (total, count) in sums.metrics.items():
                    sums_of_metrics.add(name, total, count)
                num_tokens += packed.num_tokens
                predicted = loss.predictions(scores, packed)
                if predicted is not None:
                    predictions.append(predicted)
                if scores.predicted_N is not None:
                    host, own = packed.on_host, to_host([scores.logp_N, scores.predicted_N])
                    for row, name in enumerate(packed.sample_ids):
                        parts = [it[host.row_N == row].numpy() for it in (host.target_N, *own)]
                        scored.append(HeldOutSample(name, ids_of[name], *parts))
        # join the ranks: means, tokens, calibration
        metrics = {"loss": sum(terms.means(ranks).values()), **sums_of_metrics.means(ranks)}
        fields: dict[str, Any] = {"num_tokens": int(ranks.sum_of_shares([num_tokens])[0])}
        read = to_host([value for some in predictions for value in some[:2]])
        probabilities, outcomes = (
            [number for value in read[kind::2] for number in value.tolist()] for kind in (0, 1)
        )
        lowest = predictions[-1].lowest if predictions else 0.0
        gathered = ranks.of_shares(ranks.gather((probabilities, outcomes, lowest)))
        if any(rank[0] for rank in gathered):
            probability = np.array([value for rank in gathered for value in rank[0]])
            outcome = np.array([value for rank in gathered for value in rank[1]])
            calibration = calibrate(probability, outcome, max(rank[2] for rank in gathered))
            metrics["calibration_error"] = calibration.error
            fields["calibration"] = calibration.as_dict()["bins"]
        if self.custom:
            scored = [one for part in ranks.of_shares(ranks.gather(scored)) for one in part]
            metrics |= values_of(self.custom, sorted(scored, key=lambda one: one.id), ranks)
        trainer.emit("eval", step=step, num_samples=len(self.rows), **fields, **metrics)
        return metrics


SMALLER_IS_BETTER: tuple[str, ...] = ("loss",)
"""Metrics of which the smallest value is the best; of all others it is the largest."""

Save = Callable[[Path, Callable[[Path], None]], None]
"""``save(directory, finish)``: every rank calls it; ``finish`` completes the directory before it takes its place."""


class BestState(TypedDict):
    """The state of Best in a checkpoint."""

    measured: str
    metric: str
    value: float | None
    step: int | None
    stale: NotRequired[int]
    last: NotRequired[int | None]


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
    smaller: Sequence[str] = SMALLER_IS_BETTER
    """Metrics of which the smallest value is the best."""
    value: float | None = None
    """The best value so far."""
    step: int | None = None
    """Where it was measured."""
    stop_after: int = 0
    """Evaluations in a row without a better value after which the run ends; 0: it does not."""
    stale: int = 0
    """Evaluations since the best value."""
    last: int | None = None
    """The step of the last evaluation."""

    @property
    def why_over(self) -> str | None:
        """Why the run ends, the same on all ranks; None if it goes on."""
        if not 0 < self.stop_after <= self.stale:
            return None
        best = f"the best is {self.value:.4g} after step {self.step}" if self.step else "none is"
        counted = f"{self.stale} evaluations in a row without a better {self.metric}"
        return f"eval.stop_after={self.stop_after}: {counted}; {best}"

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the model of ``step`` if it is better than all before; every rank calls this.

        A metric without a usable value (nothing scored, too many errors, NaN) gives a warning; nothing is saved.
        """
        # a resumed run may measure a step again, which counts once
        self.stale += step != self.last
        self.last = step
        # all ranks decide by the writer's value
        value = self.trainer.ranks.gather(metrics.get(self.metric))[0]
        if value is None or math.isnan(value):
            detail = f"eval.best: {self.metric} has no value at this step; nothing is kept of it"
            self.trainer.emit("warning", step=step, name="best", detail=detail)
            return
        if self.value is not None and step != self.step:
            is_smallest = self.metric in self.smaller
            if not (value < self.value if is_smallest else value > self.value):
                return
        note = {"step": step, "metric": self.metric, "value": value, "measured": self.measured}
        self.save(self.directory, lambda folder: _write(folder / BEST_FILE, note))
        self.value, self.step, self.stale = value, step, 0
        self.trainer.emit(
            "best", step=step, name=self.metric, value=value, path=str(self.directory)
        )

    def remember(self) -> dict[str, Any]:
        names = ("measured", "metric", "value", "step", "stale", "last")
        return {name: getattr(self, name) for name in names}

    def recall(self, remembered: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off, unless something else was measured then or the model is gone."""
        is_same = (remembered["metric"], remembered["measured"]) == (self.metric, self.measured)
        is_kept = remembered["value"] is None or (self.directory / BEST_FILE).is_file()
        if self.trainer.ranks.gather(is_same and is_kept)[0]:
            self.value, self.step = remembered["value"], remembered["step"]
            self.stale, self.last = remembered.get("stale", 0), remembered.get("last")


def require_same_measure(directory: Path, metric: str, measured: str) -> None:
    """Raise ConfigError where a run left a best model by another metric, or measured otherwise, in ``directory``."""
    note = _read(directory / BEST_FILE)
    if note is None or (note["metric"], note["measured"]) == (metric, measured):
        return
    measure = note["metric"]
    if measure == metric:
        measure = f"{metric} on other data or in another way"
    raise ConfigError(
        f"{directory} is the best model by {measure}, and eval.best={metric} cannot be compared with it; expected the "
        f"evaluation before the resume; set it back, or remove {directory}"
    )


def drop_after(directory: Path, step: int) -> None:
    """Remove a best model of a later step: for a run whose later steps will be others."""
    note = _read(directory / BEST_FILE)
    if note is not None and note["step"] > step:
        files.remove_directory(directory)


def _read(path: Path) -> Note | None:
    try:
        return pydantic.TypeAdapter(Note).validate_python(files.read_json(path), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error)
        raise OutputError(
            f"{path} cannot be read: {reason}; expected what a run wrote; remove {path.parent}"
        ) from error


def _write(path: Path, note: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(note) + "\n", encoding="utf-8")


SAMPLES_LOGGED = 4
ROOMIER = "set a smaller eval.answers.local.sequences or eval.answers.local.prefill_tokens"
"""Remedy where memory runs out."""
RESERVED = (
    *("loss", STOPPED, "step", "kind", "time", "samples", "tokens_mean", "num_prompts"),
    *("num_samples", "num_tokens", "calibration", "calibration_error", "divergence", "z0"),
)
"""Names in an ``eval`` event that no reward and no metric of the user may bear."""


class Evaluation(NamedTuple):
    """A measurement now and then, and at the end."""

    key: str
    """The configuration's key of ``cadence``."""
    cadence: Cadence
    names: Sequence[str]
    """The metrics it may return."""
    measured: str
    """A fingerprint of its data and settings."""
    measure: Callable[[int], Mapping[str, float]]
    custom: Sequence[CustomMetric] = ()
    """The user's metrics among them."""

    def best(self, metric: str, directory: Path, save: Save, trainer: Trainer) -> Best:
        """The keeper of the best model by one of the metrics."""
        measured, smaller = self.measured, SMALLER_IS_BETTER
        for own in (own for own in self.custom if own.name == metric):
            file = Path(own.code.label.rpartition(" has ")[2]).name  # or digest, of Python's object
            measured = _digest(f"{measured} {file} {own.code.source}")
            smaller = (metric,) if getattr(own.function, "smaller_is_better", False) else ()
        return Best(metric, measured, directory, save, trainer, smaller)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Evaluations:
    """All measurements of a run; callable after each step."""

    all: Sequence[Evaluation]
    num_steps: int
    best: Best | None
    _measured: dict[str, Mapping[str, float]] = field(init=False, default_factory=dict)
    """Key -> metrics, of the evaluations after the last step taken."""

    def __call__(self, step: int) -> None:
        """Run the evaluations due after ``step``; after the last step ``at_end`` does."""
        due = [evaluation for evaluation in self.all if evaluation.cadence.is_due(step)]
        self._measured = {}
        if step < self.num_steps:
            self._run(due, step)

    def at_end(self, step: int) -> dict[str, float]:
        """Run all evaluations that have not run after ``step``, the last one; the metrics of all."""
        self._run([one for one in self.all if one.key not in self._measured], step)
        return {name: value for one in self.all for name, value in self._measured[one.key].items()}

    def _run(self, due: Sequence[Evaluation], step: int) -> None:
        for one in due:
            self._measured[one.key] = one.measure(step)
        for one in due:
            if self.best is not None and self.best.metric in one.names:
                self.best.consider(step, self._measured[one.key])


@dataclass(frozen=True, eq=False)
class Answering:
    """Generates answers with the model that trains, scores them, and emits an ``eval`` event."""

    config: AnswersConfig
    rows: Sequence[PromptRow]
    names: Sequence[str]
    """Names of the rewards."""
    reward_set: RewardSet | None
    """The rewards, on the writer only: it judges for all ranks."""
    engine: Engine
    trainer: Trainer
    left_out: Sequence[Incident] = ()
    """Prompts whose pictures cannot be read."""
    custom: Sequence[CustomMetric] = ()

    def __call__(self, step: int) -> dict[str, float]:
        """name -> value of every metric with few enough errors, on all ranks."""
        trainer = self.trainer
        # all ranks answer, the writer judges
        devices = [trainer.ranks.device] if trainer.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # a reward may draw
            ask = partial(answer, self.engine, self.rows, self.config.sampling, self.reward_set)
            answers = require_room(ask, f"answers after step {step}", ROOMIER)
        mine = build_report(answers, self.names) if trainer.ranks.is_writer else None
        report: Report | None = trainer.ranks.gather(mine)[0]
        assert report is not None
        # the event has every number, the best model only those with few errors
        finished = [completed(it.row, it.completion) for it in answers if not it.has_failed]
        values = report.values() | values_of(self.custom, finished, trainer.ranks)
        fields: dict[str, Any] = dict(values)
        for metric in report.metrics:
            fields |= {f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
            if metric.errors:
                fields[f"{metric.name}_errors"] = len(metric.errors)
        if report.lengths is not None:
            fields["tokens_mean"] = report.lengths.mean
        samples = [
            {
                "place": shown.place,
                "references": list(shown.row.references),
                "text": shown.completion.text,
                "finish_reason": shown.completion.finish_reason,
                "scores": {name: score.value for name, score in shown.scores.items()},
            }
            for shown in spaced(answers, SAMPLES_LOGGED)
        ]
        trainer.emit("eval", step=step, **fields, num_prompts=report.num_prompts, samples=samples)
        for metric in report.metrics:
            if metric.error_share <= self.config.max_errors:
                continue
            detail = (
                f"{len(metric.errors)} scores of {metric.name} are errors, the first: {metric.errors[0]}; "
                "it is not taken as the best"
            )
            trainer.emit("warning", step=step, name=metric.name, detail=detail)
            for name in self._metric_names(metric.name):
                values.pop(name, None)
        return values

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of the rewards, and how many prompts are left out."""
        decisions = [] if self.reward_set is None else list(self.reward_set.decisions)
        if self.left_out:
            first = self.left_out[0]
            value = f"without {len(self.left_out):,} of the prompts"
            decisions.append(Decision("eval.answers", value, f"{first.place}: {first.reason}"))
        return decisions

    def as_evaluation(self) -> Evaluation:
        """The evaluation, with a fingerprint of the prompts, the sampling and the rewards."""
        prompts = [
            [row.ids_T.tolist(), row.references, *(medium.picture.digest for medium in row.media)]
            for row in self.rows
        ]
        config = to_dict(self.config)
        code = [files.read_text(path) for path in files_of(self.config.rewards)]
        text = json.dumps([prompts, config["rewards"], code, config["sampling"]])
        names = [name for reward in self.names for name in self._metric_names(reward)]
        return Evaluation(
            key="eval.answers.every",
            cadence=Cadence(self.config.every, self.trainer),
            names=[*names, STOPPED, *(own.name for own in self.custom)],
            measured=_digest(text),
            measure=self,
            custom=self.custom,
        )

    def _metric_names(self, reward: str) -> list[str]:
        """Names of a reward's metrics: its mean, and pass@k for each k."""
        return [reward, *(f"{reward}_pass_{k}" for k in pass_ks(self.config.sampling.n))]


def build_answering(
    config: AnswersConfig,
    data: DataConfig,
    renderer: Renderer,
    make_engine: Callable[..., LocalEngine],
    trainer: Trainer,
    kind: Kind = "sft",
    custom: Sequence[CustomMetric] = (),
) -> Answering | None:
    """The evaluation that ``config`` asks for, or None. Raises TautError where it could not be made.

    ``kind``: the kind of rows in ``data.eval``; ``custom``: the user's metrics of answers.
    """
    if not (config.rewards or custom):
        if config.is_asked_for:
            raise ConfigError(
                "eval.answers asks for answers, and neither eval.answers.rewards nor a function of eval.metrics takes "
                "them; expected one; set it, or take eval.answers out",
                code="eval.answers.every/eval.answers.rewards/eval.metrics",
            )
        return None
    # the writer has the rewards; every rank has the prompts and the engine
    parts = read_parts(config.rewards, RESERVED)
    reward_set = None
    if trainer.ranks.is_writer and parts:
        device = trainer.ranks.device if trainer.ranks.size > 1 else None
        own = partial(open_rater, device=device)
        reward_set = open_rewards(config.rewards, reserved=RESERVED, open_rater=own)
    needs_reference = any(part.verifier.needs_reference for part in parts)
    rows, left_out = _load_rows(config, data, renderer, needs_reference, kind)
    if reward_set is not None:
        require_scorable(rows, reward_set, config.max_errors)
    engine = make_engine(config=config.local)
    require_usable([row.as_prompt() for row in rows], engine.context)
    right = [to_reward_input(row, row.references[0]) for row in rows if row.references]
    if custom and right:  # tried on one, by all ranks together
        values_of(custom, right[:1], trainer.ranks)
    labels = [part.label for part in parts]
    return Answering(config, rows, labels, reward_set, engine, trainer, left_out, custom)


def held_out(
    rows: Rows, every: int | str, trainer: Trainer, custom: Sequence[CustomMetric] = ()
) -> Evaluation:
    """The loss and its metrics, measured on held-out rows. ``custom``: the user's metrics of tokens."""
    if custom:  # tried, as if every target were predicted
        sample = samples_of(rows.trees([0]))[0]
        target_N, zero_N = sample.ids_T[sample.target_at_N], np.zeros(sample.num_targets)
        tried = HeldOutSample(sample.id, sample.ids_T, target_N, zero_N, target_N)
        values_of(custom, [tried], trainer.ranks)
    names = ["loss", *trainer.source.loss.best_by, *(own.name for own in custom)]
    measured, cadence = rows.data.fingerprint[:16], Cadence(every, trainer)
    measure = HeldOut(rows, trainer, custom)
    return Evaluation("eval.every", cadence, names, measured, measure, custom)


def require_best(metric: str, evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation that measures ``metric``. Raises ConfigError where none does, or only at the end."""
    chosen = next((evaluation for evaluation in evaluations if metric in evaluation.names), None)
    if chosen is not None and chosen.cadence.recurs:
        return chosen
    names = [name for evaluation in evaluations for name in evaluation.names]
    fault = (
        f"found eval.best={metric}; expected one of {', '.join(names) or 'none, for nothing is evaluated'}; set "
        "data.eval for loss, eval.answers.rewards for others"
    )
    if chosen is not None:
        fault = (
            f"eval.best={metric} and {chosen.key}={chosen.cadence.every}: it is measured at the end only, when the "
            f"best is model/; expected several evaluations; set {chosen.key}"
        )
    raise ConfigError(fault, code=f"eval.best/{chosen.key}" if chosen is not None else "eval.best")


def _load_rows(
    config: AnswersConfig, data: DataConfig, renderer: Renderer, needs_reference: bool, kind: Kind
) -> tuple[list[PromptRow], list[Incident]]:
    """The prompts, and those left out because they are empty or their pictures cannot be read."""
    requested = data.eval if config.data is None else config.data
    if not requested:
        key = "eval.answers.rewards" if config.rewards else "eval.metrics"
        raise ConfigError(
            f"{key} is set without data to ask: neither eval.answers.data nor data.eval is set; set "
            "eval.answers.data=FILE.jsonl"
        )
    # equally many prompts of each source
    own_kind = kind if config.data is None else "sft"
    parts = sources(replace(data, eval=requested), "eval", own_kind)
    each, more = divmod(config.limit, len(parts))
    rows: list[PromptRow] = []
    unread: list[Incident] = []
    left_out = unread if data.images.bad == "drop" else None
    for number, (source, columns) in enumerate(parts):
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
                empty=unread if data.empty == "drop" else None,
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
