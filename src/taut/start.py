"""What a run begins with: nothing, a checkpoint to go on from, or an end that was reached already.

Only looks; refuses what does not fit. A finished run is known by its last event, so that a damaged checkpoint is no
obstacle where none is needed.

May import identity, run, checkpoint and what is below them. lifecycle and api import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field
from typing_extensions import TypedDict

from taut import checkpoint
from taut.checkpoint import Saved
from taut.data.plan import Cursor
from taut.errors import ConfigError, OutputError
from taut.explain import first_problem
from taut.identity import identity_of, moved_servers, require_same
from taut.methods.inputs import Inputs, Plan
from taut.methods.method import RunConfig
from taut.outdir import ADAPTER, CHECKPOINTS, EVENTS, MARK, MODEL, read_resolved
from taut.parallel import Ranks
from taut.runlog.events import newest_first


class Finish(TypedDict):
    """The event with which a run finishes, as far as it is read back."""

    step: Annotated[int, Field(ge=0)]
    cursor: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
    loss: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Where a run begins, or goes on."""

    plan: Plan
    identity: Mapping[str, Any]
    saved: Saved | None = None
    """The checkpoint to go on from; None: step 1."""
    rounding: list[str] = field(default_factory=list)
    """What is not as it was, so that numbers are equal to rounding only."""
    schedule: list[str] = field(default_factory=list)
    """What gives the steps to come another learning rate than they had."""
    moved: list[str] = field(default_factory=list)
    """Servers of rewards that are asked at another address than before."""
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that cannot be used."""
    finished: Finish | None = None
    """The last event, where the run is finished and nothing is left to do."""
    num_steps_before: int | None = None
    """As the run was last begun or gone on with."""

    @property
    def from_step(self) -> int:
        return 0 if self.saved is None else self.saved.step


def first_day(run: RunConfig, out: Path) -> date | None:
    """The day on which the run that is gone on with began; None where none is."""
    if not run.resume or not (out / MARK).is_file():
        return None
    day = read_resolved(out).get("day")
    return None if day is None else date.fromisoformat(day)


def look(run: RunConfig, out: Path, inputs: Inputs, ranks: Ranks) -> Start:
    """What there is to go on from. Raises TautError where it does not fit; writes nothing."""
    mine = identity_of(run, inputs, ranks)
    if not run.resume or not (out / MARK).is_file():
        return Start(run.plan(inputs.train), mine)
    before = read_resolved(out)
    end = _finish(out, run.save.result)
    if end is not None:
        plan = _plan(run, inputs, Cursor(*end["cursor"]), out)
        if plan.num_steps == end["step"]:
            if "identity" not in before:
                raise OutputError(
                    f"{out / MARK} has no 'identity'; expected what the run wrote; bring it back from a copy"
                )
            changed = require_same(before["identity"], mine, out).schedule
            if changed:
                raise ConfigError(
                    f"resume=true: {out} is finished after step {end['step']}, so that {'; '.join(changed)} would "
                    "change nothing; expected more steps or epochs beside it; raise them, or begin a new run from "
                    f"{out / run.save.result}"
                )
            return Start(plan, mine, finished=end)
    skip_damaged = run.checkpoint.skip_damaged
    saved, damaged = checkpoint.find(out / CHECKPOINTS, ranks, skip_damaged=skip_damaged)
    if end is not None and saved is None:
        raise ConfigError(
            f"resume=true: {out} is finished after step {end['step']} and has no checkpoint to train on from; expected "
            f"steps={end['step']}; begin a new run from {out / run.save.result}, with checkpoint.every set"
        )
    if saved is None and run.save.merged and _finish(out, ADAPTER) is not None:
        raise ConfigError(
            f"resume=true: {out} is finished, with {out / ADAPTER} but no {MODEL} and no checkpoint to write one from; "
            f"expected save.merged=false; to get the model: taut merge {run.model} adapter={out / ADAPTER} out=DIR"
        )
    num_steps = before.get("num_steps")
    if saved is None:
        plan = run.plan(inputs.train)
        return Start(plan, mine, damaged=damaged, num_steps_before=num_steps)
    identity = saved.meta.identity.model_dump()
    _, rounding, schedule = require_same(identity, mine, saved.path)
    return Start(
        plan=_plan(run, inputs, Cursor(*saved.meta.cursor), saved.path),
        identity=mine,
        saved=saved,
        rounding=rounding,
        schedule=schedule,
        moved=moved_servers(identity, mine),
        damaged=damaged,
        num_steps_before=num_steps,
    )


def _finish(out: Path, result: str) -> Finish | None:
    """The event with which the run finished, where nothing has happened since and its ``result`` is there."""
    path = out / EVENTS
    last = next(newest_first(path), None) if path.is_file() and (out / result).is_dir() else None
    if last is None or last["kind"] != "end" or last.get("outcome") != "finished":
        return None
    try:
        return pydantic.TypeAdapter(Finish).validate_python(last, strict=True)
    except pydantic.ValidationError as error:
        raise OutputError(
            f"{path}: its last event: {first_problem(error)}; expected what the run wrote; bring the file back from a "
            "copy, or remove that line to go on from the newest checkpoint"
        ) from error


def _plan(run: RunConfig, inputs: Inputs, cursor: Cursor, where: Path) -> Plan:
    """The steps of a run that has come so far; refused where that is beyond its end."""
    plan = run.plan(inputs.train, cursor)
    step = cursor.step
    if step > plan.num_steps or plan.method.cursor(step).samples < cursor.samples:
        raise ConfigError(
            f"resume=true: {where} is beyond the end of this run, step {plan.num_steps}; "
            f"expected steps={step} or more; raise steps or epochs"
        )
    return plan
