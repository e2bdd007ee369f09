"""The end of a run: its result, whether it has learned anything, and what is saved of a run that ends early.

A run that ends early saves its last whole step where the state is sound: after a signal, and where memory, an engine,
a reward or a stream is at fault. Where training has diverged, the checkpoints of diverged weights are set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from taut.errors import (
    CheckFailed,
    ConfigError,
    DataError,
    DivergenceError,
    EngineError,
    Interrupted,
    OutOfMemory,
    OutputError,
    StreamError,
    TautError,
    UserCodeError,
)
from taut.evals.stopping import Stops
from taut.io.notebook import html_table
from taut.methods.method import RunConfig
from taut.rl.monitors import RolloutMonitor
from taut.run.recorded import Recorded, frequent_reasons
from taut.run.setup import Built
from taut.run.start import Finish
from taut.train import checkpoint
from taut.train.checkpoint import Checkpoints
from taut.train.monitors import Divergence
from taut.train.run_dir import ROLLOUTS, complete
from taut.train.trainer import Trainer

EXAMINED = 8
"""Newest rollouts in which examples are searched where a run has learned nothing."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    out: Path
    model: Path
    """The trained model, in Hugging Face format; with save.merged=false the adapter."""
    steps: int
    loss: float
    """Training loss of the last step."""
    metrics: Mapping[str, float]
    """All measurements at the end: loss, stopped, and the rewards of eval.answers."""
    stops: Stops | None
    """Whether the model ends its answers; None where this was not measured."""
    divergence: str | None = None
    """A sign of divergence that was reported and still held after the last step."""
    learned_nothing: str | None = None
    """Why the run has learned nothing; None where it has learned something. Its model is saved."""
    failure: str | None = None
    """``learned_nothing`` where the command ends with exit code 1 for it (loss_monitor.nothing_learned)."""
    ended_early: str | None = None
    """Why the run ended before its last step; None where it did not."""
    notice: str | None = None
    """A message for the user: that the run was finished already."""

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss at the end, where data.eval was given."""
        return self.metrics.get("loss")

    @property
    def warning(self) -> str | None:
        """A message about a result that may not be usable."""
        warnings = []
        if self.learned_nothing is not None and self.failure is None:
            warnings.append(self.learned_nothing)
        if self.divergence is not None:
            warnings.append(f"training may have diverged: {self.divergence}")
        if self.stops is not None and not self.stops.is_enough:
            warnings.append(f"{self.model} may not stop: {self.stops}")
        return "; ".join(warnings) or None

    def judged(self, run: RunConfig, learned_nothing: str | None) -> Result:
        """The result with the reason why the run has learned nothing; a failure if the run is set to fail then."""
        failure = None
        if learned_nothing is not None and run.loss_monitor.nothing_learned == "fail":
            key = "loss_monitor.nothing_learned=warn"
            failure = f"{learned_nothing}; {self.model} is written; {key} makes it exit code 0"
        return replace(self, learned_nothing=learned_nothing, failure=failure)

    def __repr__(self) -> str:
        measured = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        told = "; see its warning" if self.failure or self.warning else ""
        return f"Result({self.model}: {self.steps:,} steps, training loss {self.loss:.4g}{measured}{told})"

    def _repr_html_(self) -> str:
        rows = [
            ("model", self.model),
            ("steps", f"{self.steps:,}"),
            ("training loss", self.loss),
            *((f"held-out {name}", value) for name, value in self.metrics.items()),
            ("stops", self.stops),
            ("ended early", self.ended_early),
            ("failure", self.failure),
            ("warning", self.warning),
            ("notice", self.notice),
        ]
        return html_table(str(self.out), (), [row for row in rows if row[1] is not None])


def result_of_finished(run: RunConfig, out: Path, end: Finish) -> Result:
    """The result of a run that was finished before, from its last event."""
    model, early = out / run.save.result, end.get("ended_early")
    notice = (
        f"{out} is finished: {end['step']} steps, the result is in {model}; nothing was changed; "
        f"{'raise steps or epochs' if early is None else f'{early}; change that'} to train on"
    )
    result = Result(out, model, end["step"], end["loss"], end["metrics"], None, notice=notice)
    result = replace(result, ended_early=early)
    return result.judged(run, end.get("learned_nothing"))


def why_nothing_learned(trainer: Trainer, out: Path) -> str | None:
    """Why the run has learned nothing, with examples from its newest rollouts; None where it has learned something."""
    # a run learns if some step has a gradient and, where it generates, the rewards of some rollout differ
    rollouts = [m for m in trainer.monitors if isinstance(m, RolloutMonitor)]
    has_signal = all(monitor.has_signal for monitor in rollouts)
    if not trainer.done or (has_signal and Divergence.of(trainer).has_learned):
        return None
    what = (
        "no step had a gradient"
        if has_signal
        else "in no rollout did the rewards of answers differ"
    )

    # examples, by the rank that records rollouts
    why = [f"the run has learned nothing: {what}"]
    trainer.recorder.sync()
    if rollouts and trainer.ranks.is_writer and (out / ROLLOUTS).is_dir():
        recorded = Recorded(out)
        rows = [
            row for step in recorded.rollout_steps[-EXAMINED:] for row in recorded.rollouts(step)
        ]
        why += frequent_reasons(rows)
    return str(trainer.ranks.gather("; ".join(why))[0])


def end_interrupted(trainer: Trainer, signal: str, checkpoints: Checkpoints) -> Interrupted:
    """Save the last whole step of an interrupted run. Returns the error that ends the run."""
    if trainer.done == 0:
        reason = f"{signal} before the first step was over; nothing was to be saved"
    else:
        reason = f"{signal}: the state after step {trainer.done}"
        try:
            reason += f" is in {_save(trainer, checkpoints)}"
        except OutputError as error:
            reason += f" could not be saved: {error}"
            trainer.emit("end", outcome="stopped", step=trainer.done, reason=reason)
            raise OutputError(f"interrupted by {reason}") from error
    trainer.emit("end", outcome="interrupted", step=trainer.done, reason=reason)
    return Interrupted(f"interrupted by {reason}; the same command with resume=true goes on")


def end_stopped(
    built: Built,
    error: TautError,
    checkpoints: Checkpoints,
    settings_that_help: Callable[[int], str],
) -> TautError:
    """Save the last whole step of a failed run where its state is sound. Returns the error that ends the run.

    ``settings_that_help``: called with the tokens of a micro-batch for which memory ran out.
    """
    trainer, ranks, kept = built.trainer, built.trainer.ranks, ""
    # diverged weights are not saved, and those that were are set aside
    if isinstance(error, DivergenceError):
        checkpoints.settle_or_warn()
        if ranks.is_writer:
            checkpoint.set_aside(checkpoints.folder, Divergence.of(trainer).sound_step)
        ranks.barrier()
        kept = _newest(checkpoints)
    elif isinstance(error, OutOfMemory):
        if error.num_tokens is not None:
            error = OutOfMemory(f"{error}; {settings_that_help(error.num_tokens)}")
        if ranks.size > 1:  # the others are in the middle of the step, and would not save
            kept = f"{_newest(checkpoints)}; resume=true goes on from there"
        elif trainer.done:
            kept = _try_to_save(trainer, checkpoints)
        else:
            kept = "nothing was to be saved: the first step was not over"
    elif (
        # outside of the model: an engine, a reward, a monitor's limit, a prompt, a hook
        isinstance(error, EngineError | CheckFailed | ConfigError | DataError | UserCodeError)
        and (built.run.generates or isinstance(error, UserCodeError))
        and ranks.size == 1
        and 0 < trainer.done < trainer.num_steps
    ):
        trainer.source.reject()
        kept = _try_to_save(trainer, checkpoints)
    elif isinstance(error, StreamError) and 0 < trainer.done < trainer.num_steps:
        kept = _try_to_save(trainer, checkpoints)
    final = type(error)(f"{error}; {kept}") if kept else error
    trainer.emit("end", outcome="stopped", step=trainer.done, reason=str(final))
    return final


def _newest(checkpoints: Checkpoints) -> str:
    paths = complete(checkpoints.folder)
    return f"the newest checkpoint is {paths[-1]}" if paths else "there is no checkpoint yet"


def _try_to_save(trainer: Trainer, checkpoints: Checkpoints) -> str:
    state = f"the state after step {trainer.done}"
    try:
        return f"{state} is in {_save(trainer, checkpoints)}; resume=true goes on from there"
    except OutputError as error:
        return f"{state} could not be saved: {error}; {_newest(checkpoints)}"


def _save(trainer: Trainer, checkpoints: Checkpoints) -> Path:
    """Save the last whole step with the generators' state before anything that followed it."""
    is_measured = trainer.followed == trainer.done
    checkpoints.settle_or_warn()  # one that failed before does not keep this one from being tried
    return checkpoints.save(trainer.done, wait=True, is_measured=is_measured, random=trainer.random)
