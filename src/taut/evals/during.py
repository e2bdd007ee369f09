"""Evaluation while a model trains: which measurements are due after which step, and answers among them.

Answers come from the engine on the very weights that train, with random streams of its own: a run with evaluations and
one without take the same steps, bit for bit. Under several ranks all of them generate, the writer judges, and the
others take its word.

May import what evals may. run names its configuration, api wires it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from taut import durable
from taut.config import configclass, to_dict
from taut.data.dataset import DataConfig, sources
from taut.data.groups import Rows
from taut.data.length import Incident
from taut.data.preferences import Kind
from taut.data.prompts import PromptRow, load_prompts
from taut.data.render import Renderer
from taut.data.sources import Source
from taut.errors import ConfigError, DataError
from taut.evals.answers import EvalSampling, answer, prompts_of, require_scorable
from taut.evals.best import Best
from taut.evals.heldout import HeldOut
from taut.evals.report import STOPPED, Answer, Report, build_report, pass_ks, spaced
from taut.loop import Job
from taut.memory import require_room
from taut.printing import counted
from taut.rewards import Panel, RewardSpec, files_of, open_panel
from taut.rewards.registry import read_parts
from taut.rollout.engine import Engine, require_usable
from taut.rollout.local import LocalConfig, LocalEngine
from taut.rollout.rated import open_rater

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
    job: Job
    left_out: Sequence[Incident] = ()
    """Prompts whose pictures cannot be had."""

    def __call__(self, step: int) -> dict[str, float]:
        """name -> value of every metric that may be trusted, on all ranks."""
        job, names = self.job, self.names
        devices = [job.ranks.device] if job.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # a reward may draw
            ask = partial(answer, self.engine, self.rows, self.config.sampling, self.panel)
            answers = require_room(ask, f"answers after step {step}", ROOMIER)
        mine = build_report(answers, names) if job.ranks.is_writer else None
        report: Report | None = job.ranks.gather(mine)[0]
        assert report is not None
        values = report.values()
        job.emit("eval", step=step, **event_fields(report, answers))
        for metric in report.metrics:
            if metric.error_share <= self.config.max_errors:
                continue
            detail = (
                f"{len(metric.errors)} scores of {metric.name} are errors, the first: {metric.errors[0]}; "
                "it is not taken as the best"
            )
            job.emit("warning", step=step, name=metric.name, detail=detail)
            for name in metric_names(metric.name, self.config):
                values.pop(name, None)
        return values

    @property
    def decisions(self) -> list[tuple[str, str, str]]:
        """(name, value, reason) of what was chosen for the user."""
        found = [] if self.panel is None else list(self.panel.decisions)
        if self.left_out:
            first = self.left_out[0]
            value = f"without {len(self.left_out):,} of the prompts"
            found.append(("eval.answers", value, f"{first.place}: {first.reason}"))
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
        code = [durable.read_text(path) for path in files_of(self.config.rewards)]
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
    job: Job,
    kind: Kind = "sft",
) -> Answering | None:
    """The evaluation a run asks for, refused now where it could not be made; None where it asks for none.

    ``kind``: what rows of ``data.eval`` are.
    """
    if not config.rewards:
        return None
    parts = read_parts(config.rewards, RESERVED)
    panel = None
    if job.ranks.is_writer:
        panel = open_panel(config.rewards, reserved=RESERVED, open_rater=open_rater)
    needs_reference = any(part.verifier.needs_reference for part in parts)
    rows, left_out = _load_rows(config, data, renderer, needs_reference, kind)
    if panel is not None:
        require_scorable(rows, panel, config.max_errors)
    engine = make_engine(config=config.local)
    require_usable(prompts_of(rows), engine.context)
    return Answering(config, rows, [part.label for part in parts], panel, engine, job, left_out)


def held_out(rows: Rows, every: int, job: Job) -> Evaluation:
    """The loss, and what it tells beside it, on held-out rows."""
    measured = rows.data.fingerprint[:16]
    names = ["loss", *job.method.loss.best_by]
    return Evaluation("eval.every", every, names, measured, HeldOut(rows, job))


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
    """The metrics that may come of a reward."""
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


def sample_fields(one: Answer) -> dict[str, Any]:
    """An answer for people to look at."""
    return {
        "place": one.place,
        "references": list(one.row.references),
        "text": one.completion.text,
        "finish_reason": one.completion.finish_reason,
        "scores": {name: score.value for name, score in one.scores.items()},
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
