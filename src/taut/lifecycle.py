"""A run from its first look at ``out`` to its last event: begun, gone on with, interrupted, finished.

    look at out -> data and identity -> what is there to go on from -> build -> claim out -> train -> measure -> save

Nothing is written before all that could be refused has been. A run that is gone on with takes the newest checkpoint,
verified; one that is finished is left as it is. What stops a run half-way leaves a checkpoint of its last whole step
where it can.

May import run, deliver, identity, checkpoint and what is below them. ``api`` imports it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from taut import checkpoint
from taut.alarms import ChangedSources, Divergence, Spikes, Untouched
from taut.build import Built
from taut.checkpoint import Checkpoints, Memory
from taut.checks.examine import Examination
from taut.config import to_dict
from taut.deliver import answer_for_best, choose_goldens, save_model
from taut.errors import (
    CheckFailed,
    ConfigError,
    DataError,
    DivergenceError,
    EngineError,
    Interrupted,
    OutOfMemory,
    OutputError,
    TautError,
    UserCodeError,
)
from taut.evals.best import drop_after
from taut.evals.during import Evaluations
from taut.evals.stopping import StopCheck, Stops
from taut.identity import TOLERANCE
from taut.interrupts import Interrupt, Interrupts
from taut.loop import Job, train, use_budget
from taut.outdir import (
    BEST,
    CHECKPOINTS,
    EVENTS,
    MARK,
    Lock,
    claim,
    complete,
)
from taut.runlog import RunLog, all_events
from taut.start import Start


class Ended(NamedTuple):
    """What came of a run."""

    steps: int
    loss: float
    metrics: Mapping[str, float]
    stops: Stops | None
    divergence: str | None
    """What was reported as divergence and still held after the last step."""


class Asked(NamedTuple):
    """What is measured of a run beside its loss: before it trains, meanwhile, at its end."""

    examination: Examination | None
    """What ``taut check`` found; None: it was turned off."""
    evaluations: Evaluations
    stop_check: StopCheck


def execute(built: Built, start: Start, lock: Lock, asked: Asked, interrupts: Interrupts) -> Ended:
    """Claim the directory of ``lock``, train, measure and save."""
    run, job, out = built.run, built.job, lock.out
    job.interrupts = interrupts
    if job.ranks.is_writer:
        _claim(built, start, lock)
    job.ranks.barrier()
    with RunLog.open(out, run.log, is_writer=job.ranks.is_writer) as log:
        job.emit = log.emit
        checkpoints = _checkpoints(built, out, start, asked.evaluations)
        try:
            _emit_start(built, asked.examination)
            _begin(built, start, lock, checkpoints)
            return _run(built, out, checkpoints, asked)
        except Interrupt as interrupt:
            raise _saved(built, str(interrupt), checkpoints) from None
        except OutOfMemory as error:
            raise _kept(built, error, checkpoints) from error
        except TautError as error:
            told = _rescued(built, error, checkpoints)
            job.emit("end", outcome="stopped", step=job.done, reason=str(told))
            if told is error:
                raise
            raise told from error
        finally:
            checkpoints.close()


def _claim(built: Built, start: Start, lock: Lock) -> None:
    """Take the directory, if it is as it was looked at; what the run will not come to again goes."""
    run, out = built.run, lock.out
    if not lock.is_taken:  # it was no run
        lock.take()
        if (out / MARK).is_file():
            raise OutputError(
                f"out={out}: another run began there while this one was made ready; expected no other; name another "
                "out, or give the command again, with resume=true to go on with that run"
            )
    if run.resume and start.num_steps_before != built.job.num_steps:
        drop_after(out / BEST, start.from_step)  # before the new number stands in resolved.json
    claim(out, _resolved(built, start), overwrite=run.overwrite)


def _checkpoints(built: Built, out: Path, start: Start, evaluations: Evaluations) -> Checkpoints:
    job, best = built.job, evaluations.best
    memories: dict[str, Memory] = {
        type(alarm).__name__: alarm
        for alarm in job.alarms
        if isinstance(alarm, Untouched | Spikes | Divergence)
    }
    if job.method.state is not None:
        memories["online"] = job.method.state
    return Checkpoints(
        folder=out / CHECKPOINTS,
        config=built.run.checkpoint,
        scorer=built.scorer,
        optimizer=job.optimizer,
        num_steps=job.num_steps,
        ranks=job.ranks,
        emit=job.emit,
        notes=lambda step: {
            "cursor": job.method.cursor(step),
            "loss": job.loss,
            "identity": start.identity,
        },
        memories=memories if best is None else {**memories, "best": best},
        best_step=lambda: None if best is None else best.step,
        is_sound=lambda: not _divergence(job).is_suspected,
    )


def _begin(built: Built, start: Start, lock: Lock, checkpoints: Checkpoints) -> None:
    """Say what is in force, and put back what the checkpoint holds."""
    job, saved, out = built.job, start.saved, lock.out
    if lock.trouble:
        job.emit("warning", name="lock", detail=lock.trouble)
    if not built.run.resume:
        checkpoints.prepare()
        return
    from_step = start.from_step
    if job.ranks.is_writer:
        checkpoint.set_aside(out / CHECKPOINTS, from_step)
    checkpoints.prepare()
    is_measured = True
    if saved is not None:
        checkpoints.resume(saved)
        is_measured = saved.meta.is_measured
        job.done, job.followed = from_step, from_step - (not is_measured)
        job.loss = saved.meta.loss
    written = all_events(out / EVENTS) if job.ranks.is_writer else []
    cuts = [event for event in written if event["kind"] == "budget"]
    job.fit.replay(job.ranks.gather(cuts)[0])
    use_budget(job, from_step, is_told=True)
    is_at_end = from_step == job.num_steps  # what is measured there comes after its checkpoint
    job.emit("resume", from_step=from_step, is_measured=is_measured and not is_at_end)
    for text in start.damaged:
        job.emit(
            "warning",
            name="checkpoint",
            detail=f"{text}; going on from an earlier one, this one is kept as damaged-step-*",
        )
    if start.schedule:
        detail = f"{'; '.join(start.schedule)}: in force from step {from_step + 1} on"
        job.emit("warning", name="schedule", detail=detail)
    if start.moved:
        detail = f"{'; '.join(start.moved)}: asked there from step {from_step + 1} on"
        job.emit("warning", name="address", detail=detail)
    if start.rounding:
        limit = TOLERANCE[str(start.identity["dtype"])]
        detail = (
            f"{'; '.join(start.rounding)}: losses will be those of the uninterrupted run to {limit:g} of their value, "
            "not bit for bit"
        )
        job.emit("warning", name="exactness", detail=detail, tolerance=limit)


def _run(built: Built, out: Path, checkpoints: Checkpoints, asked: Asked) -> Ended:
    job, run = built.job, built.run
    _, evaluations, stop_check = asked
    questions = choose_goldens(built)
    began = time.perf_counter()

    def measure(step: int) -> None:
        with job.interrupts.at_once(job.ranks):
            evaluations(step)

    data = [built.inputs.train, *([built.inputs.eval] if built.inputs.eval is not None else [])]
    watch = ChangedSources(data, job)
    job.after_step = [measure, watch, checkpoints]
    train(job)
    with job.interrupts.at_once(job.ranks):
        metrics, stops = _asked_at_end(job, checkpoints, evaluations, stop_check)
        job.interrupts.agree(job.ranks)
        if run.stop.required and stops is not None and not stops.is_enough:
            state = checkpoints.rescue(job.done, job.random)
            raise CheckFailed(f"{stops}; stop.required=true, so no model is written; {state}")
        model = save_model(built, out / run.save.result, questions, checkpoints)
        if run.eval.best is not None:
            answer_for_best(built, out / BEST, questions)
    checkpoints.settle()
    watch.look()
    divergence = _divergence(job).found
    job.emit(
        "end",
        outcome="finished",
        step=job.done,
        cursor=job.method.cursor(job.done),
        loss=job.loss,
        eval_loss=metrics.get("loss"),
        metrics=metrics,
        seconds=time.perf_counter() - began,
        model=str(model),
        stop=stops.as_fields() if stops is not None else None,
        divergence=divergence,
    )
    return Ended(job.done, job.loss, metrics, stops, divergence)


def _divergence(job: Job) -> Divergence:
    return next(alarm for alarm in job.alarms if isinstance(alarm, Divergence))


def _asked_at_end(
    job: Job, checkpoints: Checkpoints, evaluations: Evaluations, stop_check: StopCheck
) -> tuple[dict[str, float], Stops | None]:
    """The last measurements. Where they fail, the training state is kept."""
    try:
        return evaluations.at_end(), stop_check()
    except OutOfMemory:
        raise
    except TautError as error:
        if job.ranks.size > 1:  # the others may not have failed, and would not save
            raise
        raise type(error)(f"{error}; {checkpoints.rescue(job.done, job.random)}") from error


def _saved(built: Built, name: str, checkpoints: Checkpoints) -> Interrupted:
    """The error that ends an interrupted run, its last whole step saved."""
    job = built.job
    if job.done == 0:
        reason = f"{name} before the first step was over; nothing was to be saved"
    else:
        try:
            reason = f"{name}: the state after step {job.done} is in {_save(job, checkpoints)}"
        except OutputError as error:
            reason = f"{name}: the state after step {job.done} could not be saved: {error}"
            job.emit("end", outcome="stopped", step=job.done, reason=reason)
            raise OutputError(f"interrupted by {reason}") from error
    job.emit("end", outcome="interrupted", step=job.done, reason=reason)
    return Interrupted(f"interrupted by {reason}; the same command with resume=true goes on")


def _kept(built: Built, error: OutOfMemory, checkpoints: Checkpoints) -> OutOfMemory:
    """The error that ends a run for want of memory, its last whole step saved."""
    job, kept = built.job, "nothing was to be saved: the first step was not over"
    if job.ranks.size > 1:  # the others are in the middle of the step, and would not save
        kept = _newest(checkpoints)
    elif job.done:
        try:
            kept = f"the state after step {job.done} is in {_save(job, checkpoints)}"
        except OutputError as trouble:
            kept = f"the state after step {job.done} could not be saved: {trouble}"
    job.emit("end", outcome="stopped", step=job.done, reason=f"{error}; {kept}")
    return OutOfMemory(f"{error}; {kept}; resume=true goes on from there")


def _newest(checkpoints: Checkpoints) -> str:
    paths = complete(checkpoints.folder)
    return f"the newest checkpoint is {paths[-1]}" if paths else "there is no checkpoint yet"


def _rescued(built: Built, error: TautError, checkpoints: Checkpoints) -> TautError:
    """The error that ends a run. Where engine or rewards may be at fault, its last whole step is saved; where training
    has diverged it is not, and checkpoints of diverged weights lose their names.
    """
    job = built.job
    if isinstance(error, DivergenceError):
        checkpoints.settle_or_tell()
        if job.ranks.is_writer:
            checkpoint.set_aside(checkpoints.folder, _divergence(job).sound_step)
        job.ranks.barrier()
        return DivergenceError(f"{error}; {_newest(checkpoints)}")
    is_sound = isinstance(
        error, EngineError | CheckFailed | ConfigError | DataError | UserCodeError
    )
    if not built.run.generates or not is_sound:
        return error
    if job.ranks.size > 1 or not 0 < job.done < job.num_steps:
        return error
    job.method.reject()
    try:
        kept = f"the state after step {job.done} is in {_save(job, checkpoints)}"
    except OutputError as trouble:
        return type(error)(f"{error}; the state after step {job.done} is not saved: {trouble}")
    return type(error)(f"{error}; {kept}; resume=true goes on from there")


def _save(job: Job, checkpoints: Checkpoints) -> Path:
    """Save the last whole step, as it was before anything that follows it."""
    is_measured = job.followed == job.done
    checkpoints.settle_or_tell()  # one that failed before does not keep this one from being tried
    return checkpoints.save(job.done, wait=True, is_measured=is_measured, random=job.random)


def _resolved(built: Built, start: Start) -> dict[str, Any]:
    """The configuration in force, what was decided for the user, and what makes this run the one it is."""
    return {
        "taut": version("taut"),
        "method": built.run.method,
        "directory": str(Path.cwd()),
        "config": to_dict(built.run),
        "decisions": [decision._asdict() for decision in built.decisions],
        "num_steps": built.job.num_steps,
        "day": str(built.inputs.renderer.template.day),
        "data": built.inputs.train.fingerprint,
        "identity": start.identity,
    }


def _emit_start(built: Built, examination: Examination | None) -> None:
    data, job = built.inputs.train.report, built.job
    job.emit(
        "start",
        version=version("taut"),
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
    if examination is None:
        job.emit("check", name="all", outcome="skipped", value=None, detail="check=off")
        return
    for one in examination.answered:
        finding = one.finding
        job.emit(
            "check",
            name=one.name,
            part=examination.part,
            outcome=finding.outcome,
            value=finding.number,
            unit=finding.unit,
            detail=finding.says,
            evidence=finding.evidence,
            remedy=finding.remedy,
            notes=finding.notes,
            left_out=one.is_left_out,
            seconds=one.seconds,
        )
