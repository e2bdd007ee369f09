"""The library: ``train(run)`` trains a run of any method, ``show(run)`` looks. The command line calls nothing else.

``train`` refuses, builds, checks, claims the output directory, trains, evaluates, saves: in that order, so that a
mistake found before training leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from taut import parallel, temporary
from taut.build import Built, build, engine_of
from taut.checks.examine import before_training, require_known
from taut.config import user_path
from taut.deliver import save_best
from taut.errors import ConfigError
from taut.evals.best import Best, require_same_measure
from taut.evals.during import (
    Evaluations,
    build_answering,
    held_out,
    require_best,
)
from taut.evals.stopping import StopCheck, Stops, prepare, unasked
from taut.interrupts import Interrupts
from taut.lifecycle import Asked, execute
from taut.methods.inputs import Decision
from taut.methods.method import RunConfig
from taut.outdir import BEST, MARK, Lock, require_usable
from taut.recorded import keep_reference
from taut.rewards.in_process import require_judgeable
from taut.run import load_inputs
from taut.start import first_day, look


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    out: Path
    model: Path
    """The trained model, in Hugging Face format; with save.merged=false the adapter."""
    steps: int
    loss: float
    """Training loss of the last step."""
    metrics: Mapping[str, float]
    """Everything measured at the end: loss, stopped, and the rewards of eval.answers."""
    stops: Stops | None
    """Whether the model ends its answers; None where it could not be asked, or was not to be."""
    divergence: str | None = None
    """A sign of divergence that was reported and still held after the last step."""
    notice: str | None = None
    """What there is to know beside what the run's log says: that there was nothing to do."""

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss at the end, where data.eval was given."""
        return self.metrics.get("loss")

    @property
    def warning(self) -> str | None:
        """What has to be said when all is done."""
        said = []
        if self.divergence is not None:
            said.append(f"training may have diverged: {self.divergence}")
        if self.stops is not None and not self.stops.is_enough:
            said.append(f"{self.model} may not stop: {self.stops}")
        return "; ".join(said) or None


def train(run: RunConfig) -> Result:
    """Train a model by the method of the run (taut/methods).

    Raises TautError (what was found, what was expected, what to do) before anything is written; CheckFailed where a
    proof or an alarm stops the run; Interrupted where a signal does, the training state saved. With ``resume`` a run
    goes on from its newest checkpoint; a finished one is left as it is.
    """
    if run.out is None:
        raise ConfigError("out is not set; expected a directory; set out=DIR")
    require_known(run.checks.skip)
    temporary.clear()
    out = user_path(run.out, "out")
    with Interrupts.watching() as interrupts, ExitStack() as preparation:
        preparation.enter_context(interrupts.before_training())
        ranks = parallel.start(run.device)
        require_usable(out, resume=run.resume, overwrite=run.overwrite, inputs=run.input_files())
        with Lock(out) as lock:
            if ranks.is_writer and (out / MARK).is_file():
                lock.take()
            inputs = load_inputs(run, ranks, first_day(run, out))
            start = look(run, out, inputs, ranks)
            model = out / run.save.result
            if start.finished is None:
                built = build(run, inputs, start.plan, ranks)
                with closing(built.job.method) as method:
                    built.decisions.extend(Decision(*settled) for settled in method.open())
                    built.decisions.extend(run.held_out_decisions())
                    evaluations, stop_check = _evaluations(built, out), _stop_check(built)
                    asked = Asked(before_training(built), evaluations, stop_check)
                    keep_reference(built)
                    preparation.close()  # from here on a signal saves the state
                    ended = execute(built, start, lock, asked, interrupts)
                result = Result(out, model, *ended)
            else:
                result = _as_finished(out, model, start.finished)
        parallel.stop(ranks)
    return result


def _as_finished(out: Path, model: Path, end: Mapping[str, Any]) -> Result:
    """A run that is over, by its last event."""
    notice = (
        f"{out} is finished: {end['step']} steps, the result is in {model}; nothing was changed; "
        "raise steps or epochs to train on"
    )
    return Result(out, model, end["step"], end["loss"], end["metrics"], None, notice=notice)


def show(run: RunConfig) -> None:
    """Print the configuration in force, the data report and the first samples, targets coloured. Writes nothing."""
    from taut.preview import show as print_run

    print_run(run)


def _stop_check(built: Built) -> StopCheck:
    """Whether the model ends its answers; asked before it is saved."""
    run, inputs = built.run, built.inputs
    data = inputs.train if inputs.eval is None else inputs.eval
    if run.has_scalar_head:
        return unasked(run.stop, built.job, run.seed, "a reward model writes nothing")
    questions, engine = run.questions(data), engine_of(built)
    check = prepare(run.stop, questions, inputs.stops.ids, engine, built.job, run.seed)
    return replace(check, is_taught=run.teaches_ends, remedy=run.ends_remedy)


def _evaluations(built: Built, out: Path) -> Evaluations:
    """What is measured while the model trains; nothing that would fail later passes here."""
    run, inputs, job = built.run, built.inputs, built.job
    found = []
    if inputs.eval is not None and not run.generates:
        found.append(held_out(run.rows_of(inputs.eval), run.eval.every, job))
    if run.has_scalar_head and run.eval.answers.rewards:
        raise ConfigError(
            "eval.answers.rewards is set and a reward model writes no answers; expected none; take the key out"
        )
    answers, make_engine = run.held_out_answers, engine_of(built)
    require_judgeable(answers.rewards, job.ranks.size)
    renderer, kind = inputs.renderer, run.row_kind
    answering = build_answering(answers, run.data, renderer, make_engine, job, kind)
    if answering is not None:
        found.append(answering.as_evaluation())
        settled = [Decision(*it) for it in answering.decisions]
        built.decisions.extend(it for it in settled if it not in built.decisions)
    if run.eval.best is None:
        if run.checkpoint.keep_best:
            raise ConfigError(
                "checkpoint.keep_best=true and eval.best is not set; expected the metric that says which is the best; "
                "set eval.best"
            )
        return Evaluations(found, job.num_steps, None)
    measured = require_best(run.eval.best, found).measured
    if run.resume:
        require_same_measure(out / BEST, run.eval.best, measured)
    best = Best(run.eval.best, measured, out / BEST, partial(save_best, built), job)
    return Evaluations(found, job.num_steps, best)
