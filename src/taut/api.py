"""The library: ``taut.sft(run)`` trains, ``taut.show(run)`` looks. The command line calls nothing else.

``sft`` refuses, builds, claims the output directory, trains, evaluates, saves: in that order, so that a mistake found
while building leaves nothing behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from taut import __version__, parallel
from taut.checkpoint import Checkpoints, require_resumable
from taut.config import to_dict
from taut.data.dataset import input_paths
from taut.deliver import answer_for_best, choose_goldens, save_best, save_model
from taut.errors import CheckFailed, ConfigError, TautError
from taut.evals.best import BEST, Best, read_best
from taut.evals.during import Evaluations, build_answering, held_out, require_best
from taut.evals.stopping import StopCheck, Stops, prepare
from taut.loop import train
from taut.models.load import context_length
from taut.outdir import claim, require_usable
from taut.rewards import files_of
from taut.rollout.local import LocalEngine
from taut.run import Built, Run, build
from taut.runlog import RunLog

CHECKPOINTS = "checkpoints"
"""The folder in ``out`` that holds training state."""
MODEL = "model"
"""The folder in ``out`` that holds the trained model."""


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    out: Path
    model: Path
    """The trained model, in Hugging Face format."""
    steps: int
    loss: float
    """Training loss of the last step."""
    eval_loss: float | None
    """Held-out loss at the end, where data.eval was given."""
    metrics: Mapping[str, float]
    """Everything measured at the end: loss, stopped, and the rewards of eval.answers."""
    stops: Stops | None
    """Whether the model ends its answers; None where it could not be asked, or was not to be."""

    @property
    def warning(self) -> str | None:
        """What has to be said when all is done."""
        if self.stops is None or self.stops.is_enough:
            return None
        return f"{self.model} may not stop: {self.stops}"


def sft(run: Run) -> Result:
    """Fine-tune a model on a data set; see ``taut.run.Run`` for the configuration.

    Raises TautError (what was found, what was expected, what to do) before anything is written, or CheckFailed where
    a proof or an alarm stops the run.
    """
    if run.out is None:
        raise ConfigError("out is not set; expected a directory; set out=DIR")
    out = Path(run.out).expanduser()
    ranks = parallel.start(run.device)
    require_usable(out, resume=run.resume, overwrite=run.overwrite, inputs=_inputs(run))
    built = build(run, ranks)
    if run.resume:
        require_resumable(out / CHECKPOINTS, _identity(built), built.job.num_steps)
    evaluations, stop_check = _evaluations(built, out), _stop_check(built)
    if ranks.is_writer:
        claim(out, _resolved(built), overwrite=run.overwrite)
    ranks.barrier()
    with RunLog.open(out, run.log, is_writer=ranks.is_writer) as log:
        built.job.emit = log.emit
        try:
            result = _run(built, out, log, evaluations, stop_check)
        except TautError as error:
            log.emit("end", outcome="stopped", reason=str(error))
            raise
        except KeyboardInterrupt:
            log.emit("end", outcome="stopped", reason="interrupted")
            raise KeyboardInterrupt(_left(out)) from None
    parallel.stop(ranks)
    return result


def _left(out: Path) -> str:
    """What an interrupted run leaves."""
    if (out / CHECKPOINTS).is_dir():
        return f"the same command with resume=true goes on from the newest checkpoint in {out}"
    return f"{out} has no checkpoint (checkpoint.every); overwrite=true begins it anew"


def show(run: Run) -> None:
    """Print the configuration in force, the data report and the first samples, targets coloured. Writes nothing."""
    from taut.preview import show as print_run

    print_run(run)


def _run(
    built: Built, out: Path, log: RunLog, evaluations: Evaluations, stop_check: StopCheck
) -> Result:
    """Train, evaluate and save."""
    job, run = built.job, built.run
    checkpoints = Checkpoints(
        folder=out / CHECKPOINTS,
        config=run.checkpoint,
        scorer=built.scorer,
        optimizer=job.optimizer,
        identity=_identity(built),
        ranks=job.ranks,
        emit=log.emit,
    )
    questions = choose_goldens(built)
    began = time.perf_counter()
    _emit_start(built, log)
    if run.resume:
        step = checkpoints.resume()
        job.first_step = step + 1
        log.emit("resume", from_step=step)
    job.after_step = [evaluations, checkpoints]
    report = train(job)
    metrics, stops = _asked_at_end(built, checkpoints, evaluations, stop_check)
    if run.stop.required and stops is not None and not stops.is_enough:
        state = checkpoints.save(job.num_steps)
        raise CheckFailed(
            f"{stops}; stop.required=true, so no model is written; training state: {state}"
        )
    model = save_model(built, out / MODEL, questions, checkpoints)
    if run.eval.best is not None:
        answer_for_best(built, out / BEST, questions)
    log.emit(
        "end",
        outcome="finished",
        step=job.num_steps,
        loss=report.loss if report else None,
        eval_loss=metrics.get("loss"),
        metrics=metrics,
        seconds=time.perf_counter() - began,
        model=str(model),
        stop=stops.as_fields() if stops is not None else None,
    )
    loss = report.loss if report else math.nan
    return Result(out, model, job.num_steps, loss, metrics.get("loss"), metrics, stops)


def _asked_at_end(
    built: Built, checkpoints: Checkpoints, evaluations: Evaluations, stop_check: StopCheck
) -> tuple[dict[str, float], Stops | None]:
    """The last measurements. Where they fail, the training state is kept."""
    try:
        return evaluations.at_end(), stop_check()
    except TautError as error:
        if built.job.ranks.size > 1:  # the others may not have failed, and would not save
            raise
        state = checkpoints.save(built.job.num_steps)
        raise type(error)(f"{error}; training state: {state}") from error


def _emit_start(built: Built, log: RunLog) -> None:
    data, job, proof = built.inputs.train.report, built.job, built.proof
    log.emit(
        "start",
        version=__version__,
        model=built.run.model,
        num_steps=job.num_steps,
        num_ranks=job.ranks.size,
        num_samples=data.num_samples,
        data=str(data),
        dropped=[f"{incident.place}: {incident.reason}" for incident in data.dropped],
        cut=[f"{incident.place}: {incident.reason}" for incident in data.cut],
        decisions=built.decisions,
        num_parameters=sum(p.numel() for p in built.scorer.parameters()),
        num_trained=sum(parameter.numel() for parameter in job.trained),
    )
    for name, value, detail in (
        ("attention", proof.num_attention_layers, "layers call the chosen attention, all of them"),
        (
            "neighbour",
            proof.neighbour,
            "largest change of a log-prob when a packed neighbour changes",
        ),
        ("future", proof.future, "largest change of a log-prob when a later token changes"),
        ("head", proof.head, "largest difference of log-probs from the model's own logits"),
    ):
        is_excused = name == "neighbour" and proof.one_sample is not None
        outcome = "skipped" if is_excused else "passed"
        log.emit(
            "check",
            name=name,
            outcome=outcome,
            value=value,
            detail=proof.one_sample if is_excused else detail,
        )


def _inputs(run: Run) -> list[str]:
    """What the run reads."""
    adapter = [run.lora.adapter] if run.lora.adapter else []
    asked = replace(run.data, train=None, eval=run.eval.answers.data, template=None, cache=None)
    files = map(str, files_of(run.eval.answers.rewards))
    return [run.model, *adapter, *input_paths(run.data), *input_paths(asked), *files]


def _engine_of(built: Built) -> Callable[..., LocalEngine]:
    """Makes an engine on the weights that train."""
    return partial(
        LocalEngine,
        built.scorer,
        built.inputs.tokenizer,
        built.inputs.stops.ids,
        context=context_length(built.inputs.config),
        compute=built.job.compute,
        ranks=built.job.ranks,
    )


def _stop_check(built: Built) -> StopCheck:
    """Whether the model ends its answers; asked before it is saved."""
    run, inputs = built.run, built.inputs
    data = inputs.train if inputs.eval is None else inputs.eval
    return prepare(run.stop, data, inputs.stops.ids, _engine_of(built), built.job, run.seed)


def _evaluations(built: Built, out: Path) -> Evaluations:
    """What is measured while the model trains; nothing that would fail later passes here."""
    run, inputs, job = built.run, built.inputs, built.job
    found = [] if inputs.eval is None else [held_out(inputs.eval, run.eval.every, job)]
    answers, make_engine = run.eval.answers, _engine_of(built)
    answering = build_answering(answers, run.data, inputs.renderer, make_engine, job)
    found += [] if answering is None else [answering.as_evaluation()]
    if run.eval.best is None:
        return Evaluations(found, job.num_steps, None)
    measured = require_best(run.eval.best, found).measured
    value = read_best(out / BEST, run.eval.best, measured) if run.resume else None
    save = partial(save_best, built)
    best = Best(run.eval.best, measured, out / BEST, save, job, value)
    return Evaluations(found, job.num_steps, best)


def _resolved(built: Built) -> dict[str, Any]:
    """The configuration in force and what was decided for the user."""
    return {
        "taut": __version__,
        "config": to_dict(built.run),
        "decisions": [decision._asdict() for decision in built.decisions],
        "num_steps": built.job.num_steps,
        "data": built.inputs.train.fingerprint,
    }


def _identity(built: Built) -> dict[str, Any]:
    """What a resumed run must have in common with the one it goes on from."""
    config = to_dict(built.run)
    may_change = (
        "out",
        "resume",
        "overwrite",
        "steps",
        "epochs",
        "log",
        "checkpoint",
        "contract",
        "stop",
        "eval",
        "device",
    )
    return {
        "config": {key: value for key, value in config.items() if key not in may_change},
        "data": built.inputs.train.fingerprint,
    }
