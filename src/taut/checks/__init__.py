"""The questions that ``taut check`` asks, in order: one question, one file, one function.

A check takes a session and gives a finding. ``quick`` ones are asked before each training; they take forwards on at
most 256 tokens and one backward. The question is the first line of the function's docstring. ``after`` names checks
without whose yes the answer would be the same fault once more.

A new check is a file in a group's folder, a line here, and in ``tests/checks`` a planted fault that it alone catches
and an innocent twin that it passes. A method brings its own checks in the same way (the reference is the policy at step
0); for runs of other methods they say so and are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from taut.checks.attention import (
    calls,
    future,
    library,
    neighbour,
    packed,
    positions,
    shared,
    state,
)
from taut.checks.data import (
    columns,
    flips,
    images,
    labels,
    leak,
    lengths,
    margins,
    overlap,
    packing,
    pairs,
    repeats,
    rows,
    targets,
    tokens,
    truncation,
)
from taut.checks.engine import logps as engine_logps
from taut.checks.engine import seed as engine_seed
from taut.checks.finding import Finding
from taut.checks.fit import overfit, schedule, update
from taut.checks.loss import (
    adapter_start,
    dtype,
    first,
    gradient,
    head_gradient,
    linear,
    reached,
    splits,
    tied,
)
from taut.checks.loss import packed as loss_packed
from taut.checks.memory import measured, peak
from taut.checks.model import finite, head, loads, noise, trains
from taut.checks.reference import start
from taut.checks.reward import batch
from taut.checks.reward import library as reward_library
from taut.checks.rewards import gold
from taut.checks.rollout import groups, opens, room, text, turns
from taut.checks.rollout import update as rollout_update
from taut.checks.run import in_force, output, saved, steps
from taut.checks.session import Session
from taut.checks.stop import baseline, generation
from taut.checks.stop import rows as stop_rows
from taut.checks.stop import saved as stop_saved
from taut.checks.stop import set as stop_set
from taut.checks.stop import targets as stop_targets
from taut.checks.template import (
    bos,
    boundary,
    content,
    lossless,
    markup,
    parts,
    plain,
    prompt,
    system,
    takes,
    thinking,
    tools,
)
from taut.checks.template import targets as template_targets
from taut.checks.vision import neighbour as vision_neighbour
from taut.checks.vision import placeholders, swapped
from taut.checks.vision import positions as vision_positions

Part: TypeAlias = Literal["quick", "full"]


class Check(NamedTuple):
    """A question, when it is asked, and after which others."""

    ask: Callable[[Session], Finding]
    part: Part = "quick"
    after: tuple[str, ...] = ()

    @property
    def question(self) -> str:
        return (self.ask.__doc__ or "").partition("\n")[0]


_TAKES = ("data.images", "data.columns", "template.takes")
_KEPT = (*_TAKES, "template.lossless", "template.markup", "template.system", "template.content")
_SAID = (*_KEPT, "template.thinking")
_MEETS = (*_SAID, "template.tools", "template.prompt", "template.boundary", "template.bos")
_RENDERS = (*_MEETS, "template.parts", "stop.set")
_READ = ("data.images", "data.columns", "data.rows")
_RUNS = ("model.loads", "model.trains")
_SHOWN = (*_RUNS, "data.packing", "vision.placeholders")
_SOUND = (*_SHOWN, "model.finite", "model.noise", "model.head")
_CAUSAL = (*_SOUND, "attention.calls", "attention.future")
_SEEN = ("vision.positions", "vision.swapped", "vision.neighbour")
_ALONE = (*_CAUSAL, "attention.neighbour", *_SEEN, "attention.positions")
_EXACT = (*_ALONE, "attention.packed", "attention.shared")
_TRAINS = (*_SOUND, "vision.swapped", "loss.reached", "loss.gradient")
_BEGUN = (*_EXACT, "loss.reached", "loss.gradient")
_SUMS = (*_BEGUN, "loss.linear", "loss.first")
_GRADIENT = (*_SUMS, "loss.head_gradient", "loss.packed")
_ENGINE = (*_EXACT, "loss.dtype", "loss.tied", "loss.adapter_start")
_OPENS = (*_RUNS, "rollout.opens")

CHECKS: dict[str, Check] = {
    "data.images": Check(images.ask),
    "data.columns": Check(columns.ask, after=("data.images",)),
    "template.takes": Check(takes.ask, after=("data.images", "data.columns")),
    "template.lossless": Check(lossless.ask, after=_TAKES),
    "template.markup": Check(markup.ask, after=_TAKES),
    "template.system": Check(system.ask, after=_TAKES),
    "template.content": Check(content.ask, after=(*_TAKES, "template.lossless")),
    "template.thinking": Check(thinking.ask, after=(*_TAKES, "template.content")),
    "template.tools": Check(tools.ask, after=(*_TAKES, "template.content")),
    "template.bos": Check(bos.ask, after=_TAKES),
    "template.prompt": Check(prompt.ask, after=_SAID),
    "template.boundary": Check(boundary.ask, after=(*_SAID, "template.prompt")),
    "template.parts": Check(parts.ask, after=_SAID),
    "stop.set": Check(stop_set.ask, after=_TAKES),
    "template.targets": Check(template_targets.ask, after=_RENDERS),
    "data.rows": Check(rows.ask, after=(*_RENDERS, "template.targets")),
    "template.plain": Check(plain.ask, after=_READ),
    "data.tokens": Check(tokens.ask, after=_READ),
    "data.targets": Check(targets.ask, after=_READ),
    "data.truncation": Check(truncation.ask, after=_READ),
    "stop.targets": Check(stop_targets.ask, after=(*_READ, "data.truncation")),
    "stop.saved": Check(stop_saved.ask, after=_READ),
    "data.repeats": Check(repeats.ask, after=_READ),
    "data.lengths": Check(lengths.ask, after=_READ),
    "data.leak": Check(leak.ask, after=_READ),
    "data.overlap": Check(overlap.ask, after=_READ),
    "data.pairs": Check(pairs.ask, after=_READ),
    "data.flips": Check(flips.ask, after=(*_READ, "data.pairs")),
    "data.labels": Check(labels.ask, after=_READ),
    "data.margins": Check(margins.ask, after=_READ),
    "model.loads": Check(loads.ask, after=("data.tokens",)),
    "model.trains": Check(trains.ask, after=("model.loads",)),
    "data.packing": Check(packing.ask, after=_RUNS),
    "vision.placeholders": Check(placeholders.ask, after=(*_RUNS, "data.packing")),
    "vision.positions": Check(vision_positions.ask, after=_SHOWN),
    "model.finite": Check(finite.ask, after=_SHOWN),
    "model.noise": Check(noise.ask, after=(*_SHOWN, "model.finite")),
    "model.head": Check(head.ask, after=(*_SHOWN, "model.finite")),
    "stop.generation": Check(generation.ask, after=("model.loads",)),
    "stop.rows": Check(stop_rows.ask, after=(*_RUNS, "model.finite")),
    "attention.calls": Check(calls.ask, after=_SOUND),
    "attention.future": Check(future.ask, after=(*_SOUND, "attention.calls")),
    "attention.state": Check(state.ask, after=_CAUSAL),
    "attention.neighbour": Check(neighbour.ask, after=(*_CAUSAL, "attention.state")),
    "vision.swapped": Check(swapped.ask, after=(*_CAUSAL, "attention.neighbour")),
    "vision.neighbour": Check(
        vision_neighbour.ask, after=(*_CAUSAL, "attention.neighbour", "vision.swapped")
    ),
    "attention.positions": Check(positions.ask, after=(*_CAUSAL, "attention.neighbour", *_SEEN)),
    "attention.library": Check(library.ask, "full", after=_CAUSAL),
    "attention.packed": Check(packed.ask, after=(*_ALONE, "attention.library")),
    "attention.shared": Check(shared.ask, after=(*_ALONE, "attention.packed")),
    "reward.batch": Check(batch.ask, after=_EXACT),
    "reward.library": Check(reward_library.ask, after=(*_EXACT, "reward.batch")),
    "loss.dtype": Check(dtype.ask, after=_SOUND),
    "loss.tied": Check(tied.ask, after=_RUNS),
    "loss.adapter_start": Check(adapter_start.ask, after=_SOUND),
    "loss.reached": Check(reached.ask, after=(*_SOUND, "attention.calls", "vision.swapped")),
    "loss.gradient": Check(gradient.ask, after=_TRAINS[:-1]),
    "loss.linear": Check(linear.ask, after=_RUNS),
    "reference.start": Check(start.ask, after=_BEGUN),
    "loss.first": Check(first.ask, after=(*_BEGUN, "reward.library", "reference.start")),
    "loss.head_gradient": Check(head_gradient.ask, "full", after=_TRAINS),
    "loss.packed": Check(loss_packed.ask, "full", after=(*_SUMS, "loss.head_gradient")),
    "loss.splits": Check(splits.ask, "full", after=_GRADIENT),
    "memory.peak": Check(peak.ask, after=(*_RUNS, "data.packing")),
    "memory.measured": Check(measured.ask, "full", after=(*_TRAINS, "memory.peak")),
    "fit.schedule": Check(schedule.ask, after=_RUNS),
    "fit.update": Check(update.ask, "full", after=(*_TRAINS, "fit.schedule")),
    "fit.overfit": Check(overfit.ask, "full", after=(*_GRADIENT, "loss.splits")),
    "run.in_force": Check(in_force.ask, after=(*_RUNS, "attention.calls", "loss.reached")),
    "run.steps": Check(steps.ask, after=_RUNS),
    "run.output": Check(output.ask, after=_RUNS),
    "run.saved": Check(saved.ask, "full", after=(*_ENGINE, "stop.generation", "stop.saved")),
    "stop.baseline": Check(baseline.ask, "full", after=_ENGINE),
    "rollout.opens": Check(opens.ask, after=_RUNS),
    "rollout.room": Check(room.ask, after=_OPENS),
    "rollout.turns": Check(turns.ask, after=_OPENS),
    "rewards.gold": Check(gold.ask, after=_OPENS),
    "rollout.groups": Check(groups.ask, after=(*_ENGINE, "rollout.room")),
    "rollout.text": Check(text.ask, after=(*_ENGINE, "rollout.groups")),
    "engine.logps": Check(engine_logps.ask, "full", after=_ENGINE),
    "engine.seed": Check(engine_seed.ask, "full", after=(*_ENGINE, "engine.logps")),
    "rollout.update": Check(rollout_update.ask, "full", after=(*_ENGINE, "engine.logps")),
}
