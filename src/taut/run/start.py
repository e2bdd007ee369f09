"""Where a run begins: at step 1, at the checkpoint that it resumes from, or at its end if it is finished.

``look`` only reads. ``begin`` restores the checkpoint once ``out`` is claimed, and logs how the resumed run differs
from the one that wrote it. Which differences a resume may have is defined in fingerprint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pydantic
from pydantic import Field
from typing_extensions import TypedDict

from taut.config import first_problem, to_dict
from taut.data.order import Cursor
from taut.errors import ConfigError, OutputError
from taut.methods.inputs import Inputs, Plan
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.run import fingerprint
from taut.run.setup import Built, use_cpu_matmul
from taut.train import checkpoint
from taut.train.checkpoint import Checkpoints, Saved
from taut.train.distributed import Ranks
from taut.train.log import all_events
from taut.train.log.events import newest_first
from taut.train.run_dir import ADAPTER, CHECKPOINTS, EVENTS, FINISHED, MARK, MODEL
from taut.train.trainer import restore_progress, use_budget


class Finish(TypedDict):
    """Fields of the event with which a run finishes, as far as they are read back."""

    step: Annotated[int, Field(ge=0)]
    cursor: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
    loss: float
    metrics: dict[str, Any]
    learned_nothing: NotRequired[str]
    ended_early: NotRequired[str]


@dataclass(frozen=True)
class Start:
    """The start of a run. A finished run is recognized by its last event, so that it needs no intact checkpoint."""

    plan: Plan
    identity: Mapping[str, Any]
    saved: Saved | None = None
    """The checkpoint to resume from; None: step 1."""
    rounding: list[str] = field(default_factory=list)
    """Differences that change numbers by rounding only."""
    schedule: list[str] = field(default_factory=list)
    """Differences that change the learning rate of the coming steps."""
    moved: list[str] = field(default_factory=list)
    """Reward servers whose address has changed."""
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that are damaged."""
    finished: Finish | None = None
    """The last event of a finished run."""
    num_steps_before: int | None = None
    """Number of steps when the run was last started or resumed."""

    @property
    def from_step(self) -> int:
        return 0 if self.saved is None else self.saved.step


def look(
    run: RunConfig, out: Path, before: Mapping[str, Any] | None, inputs: Inputs, ranks: Ranks
) -> Start:
    """Find where ``run`` begins. Raises TautError where it does not fit the run in ``out``; writes nothing.

    ``before``: resolved.json of the run to resume; None where there is none.
    """
    # a new run
    if before is None:
        _choose_cpu_matmul(run, ranks, {})
        return Start(run.plan(inputs.train), fingerprint.identity_of(run, inputs, ranks))

    # a finished run, unless it is given more steps, or ended early for a reason that no longer holds
    end = _finish(out, run.save.result)
    if end is not None:
        plan = _plan(run, inputs, Cursor(*end["cursor"]), out)
        now, then = to_dict(run), before.get("config", {})
        is_alike = all(then.get(key) == now[key] for key in ("eval", "hooks"))
        if plan.num_steps == end["step"] or ("ended_early" in end and is_alike):
            if "identity" not in before:
                raise OutputError(
                    f"{out / MARK} has no 'identity'; expected what the run wrote; bring it back from a copy"
                )
            mine = fingerprint.identity_of(run, inputs, ranks)
            was = fingerprint.with_tokenized(before["identity"], inputs)
            changed = fingerprint.require_same(was, mine, out).schedule
            if changed:
                raise ConfigError(
                    f"resume=true: {out} is finished after step {end['step']}, and {'; '.join(changed)} changes "
                    f"nothing; expected more steps or epochs; raise them, or train {out / run.save.result} in a new run"
                )
            return Start(plan, mine, finished=end)

    # the newest checkpoint
    saved, damaged = checkpoint.find_newest(
        out / CHECKPOINTS, ranks, skip_damaged=run.checkpoint.skip_damaged
    )
    problem = ""
    if end is not None and saved is None:
        problem = (
            f"after step {end['step']}, without a checkpoint to train on from; expected steps={end['step']}; train "
            f"{out / run.save.result} in a new run, with checkpoint.every set"
        )
    elif saved is None and run.save.merged and _finish(out, ADAPTER) is not None:
        problem = (
            f"with {out / ADAPTER} but no {MODEL} and no checkpoint; expected save.merged=false; to get the model: "
            f"taut merge {run.model} adapter={out / ADAPTER} out=DIR"
        )
    if problem:
        raise ConfigError(f"resume=true: {out} is finished {problem}")

    # what differs from the run that wrote it
    num_steps = before.get("num_steps")
    identity = {} if saved is None else saved.meta.identity.model_dump()
    _choose_cpu_matmul(run, ranks, identity)
    mine = fingerprint.identity_of(run, inputs, ranks)
    if saved is None:
        plan = run.plan(inputs.train)
        return Start(plan, mine, damaged=damaged, num_steps_before=num_steps)
    was = fingerprint.with_tokenized(identity, inputs)
    _, rounding, schedule = fingerprint.require_same(was, mine, saved.path)
    return Start(
        plan=_plan(run, inputs, Cursor(*saved.meta.cursor), saved.path),
        identity=mine,
        saved=saved,
        rounding=rounding,
        schedule=schedule,
        moved=fingerprint.moved_servers(identity, mine),
        damaged=damaged,
        num_steps_before=num_steps,
    )


def _choose_cpu_matmul(run: RunConfig, ranks: Ranks, identity: Mapping[str, Any]) -> None:
    """Choose the library of float32 matrix products: that of the checkpoint to resume from, whose ``identity`` this is,
    or of the run whose rollouts are replayed, or a new choice. ``identity`` is empty without a checkpoint.
    """
    stored, whose = fingerprint.cpu_matmul_in(identity), "the checkpoint"
    recording = run.recording if stored is None and isinstance(run, OnlineMethod) else None
    if recording is not None:
        stored = fingerprint.cpu_matmul_in(recording.resolved.get("identity", {}))
        whose = str(recording.out)
    use_cpu_matmul(run, ranks, stored, whose)


def _finish(out: Path, result: str) -> Finish | None:
    """The event with which the run finished, if it is the last one and ``result`` exists."""
    path = out / EVENTS
    last = next(newest_first(path), None) if path.is_file() and (out / result).is_dir() else None
    if last is None or last["kind"] != "end" or last.get("outcome") not in FINISHED:
        return None
    try:
        return pydantic.TypeAdapter(Finish).validate_python(last, strict=True)
    except pydantic.ValidationError as error:
        raise OutputError(
            f"{path}: its last event: {first_problem(error)}; expected what the run wrote; bring the file back from a "
            "copy, or remove that line to go on from the newest checkpoint"
        ) from error


def _plan(run: RunConfig, inputs: Inputs, cursor: Cursor, where: Path) -> Plan:
    """Plan a run that has reached ``cursor``. Raises ConfigError if the run ends before ``cursor``."""
    plan = run.plan(inputs.train, cursor)
    step = cursor.step
    if step > plan.num_steps or plan.source.cursor(step).samples < cursor.samples:
        raise ConfigError(
            f"resume=true: {where} is beyond the end of this run, step {plan.num_steps}; "
            f"expected steps={step} or more; raise steps or epochs"
        )
    return plan


def begin(built: Built, start: Start, out: Path, checkpoints: Checkpoints) -> None:
    """Make room for checkpoints; in a resumed run restore its state, and log how it differs from the run before."""
    trainer, saved, from_step = built.trainer, start.saved, start.from_step
    if not built.run.resume:
        checkpoints.prepare()
        return

    # weights, optimizer, monitors and generators, as after the last step of the checkpoint
    if trainer.ranks.is_writer:
        checkpoint.set_aside(out / CHECKPOINTS, from_step)
    checkpoints.prepare()
    is_measured = True
    if saved is not None:
        checkpoints.resume(saved)
        is_measured = saved.meta.is_measured
        restore_progress(trainer, from_step, saved.meta.loss, is_measured=is_measured)

    # the token budget, cut at the steps at which the run before cut it
    written = all_events(out / EVENTS) if trainer.ranks.is_writer else []
    cuts = [event for event in written if event["kind"] == "budget"]
    trainer.fit.replay(trainer.ranks.gather(cuts)[0])
    use_budget(trainer, from_step, is_reported=True)

    # the log: from here on the events of later steps are revoked
    is_at_end = checkpoints.is_end(from_step)  # what is measured there comes after its checkpoint
    trainer.emit("resume", from_step=from_step, is_measured=is_measured and not is_at_end)
    for text in start.damaged:
        trainer.emit(
            "warning",
            name="checkpoint",
            detail=f"{text}; going on from an earlier one, this one is kept as damaged-step-*",
        )
    if start.schedule:
        detail = f"{'; '.join(start.schedule)}: active from step {from_step + 1} on"
        trainer.emit("warning", name="schedule", detail=detail)
    if sources := fingerprint.moved_sources(built.run):
        trainer.emit("warning", name="data", detail="; ".join(sources))
    if start.moved:
        detail = f"{'; '.join(start.moved)}: asked there from step {from_step + 1} on"
        trainer.emit("warning", name="address", detail=detail)
    if start.rounding:
        limit = fingerprint.TOLERANCE[str(start.identity["dtype"])]
        detail = (
            f"{'; '.join(start.rounding)}: losses will be those of the uninterrupted run to {limit:g} of their value, "
            "not bit for bit"
        )
        trainer.emit("warning", name="exactness", detail=detail, tolerance=limit)
