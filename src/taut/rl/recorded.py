"""Recorded rollouts: a run trains on the rollouts of another run. ``rollout.replay_from``.

    recording = Recording.open("runs/grpo")         refused where it has no rollouts, or lacks a column
    recording.require_vocabulary(table)
    recording.require_fits(config, ...)
    RecordedRollouts(recording, ...).take(request)  the rollout of the request's number, as it was sampled and judged

The table (records.py) has prompts, tokens, the engine's logprobs, rewards, errors, and which groups were replaced.
Advantages and all that follows are computed anew. With the settings of the recorded run, if its engine ran in its
process, losses, gradients and weights are equal bit for bit.

The data and the model of the recorded run are not read: its ids are trained on unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from taut.config import Decision, user_path
from taut.errors import ConfigError, DataError, TautError
from taut.io import tables
from taut.io.console import counted
from taut.rewards.reward_set import RewardResult
from taut.rl import records
from taut.rl.rollout import Group, Rollout, RolloutRequest, RolloutSource
from taut.rl.settings import RolloutConfig
from taut.train.run_dir import ROLLOUTS, TOKENS, VOCABULARY, read_resolved
from taut.types import Picture

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

KEY = "rollout.replay_from"
SAME = ("n", "temperature", "engine", "dtype", "lag")
"""Keys of rollout that say what the recorded logprobs and groups are."""
GIB = 2**30


@dataclass(frozen=True)
class Recording:
    """The rollouts that the run in ``out`` has recorded."""

    out: Path
    resolved: Mapping[str, Any]
    """Of that run."""

    @classmethod
    def open(cls, place: str) -> Recording:
        """Raises ConfigError where there are no rollouts, or they lack what training reads."""
        out = user_path(place, KEY)
        try:
            recording = cls(out, read_resolved(out))
            first = recording.steps[:1]
        except TautError as error:
            raise ConfigError(f"{KEY}: {error}") from error
        if not first:
            raise ConfigError(
                f"{KEY}={place} has no rollouts; expected a run that learns from completions and records them "
                "(log.rollouts.max_gib); name another"
            )
        for part, schema in tables.read_schemas(recording.folder):
            lacking = [name for name in records.READ if name not in schema.names]
            if "logp_N" not in lacking and schema.field("logp_N").type.value_type != pa.float64():
                lacking.append("logp_N in float64")
            if lacking:
                raise ConfigError(
                    f"{KEY}: {part} has no column {lacking[0]}, which training reads; expected rollouts that this "
                    "version of taut has recorded; record them again, or name another run"
                )
        return recording

    @property
    def folder(self) -> Path:
        return self.out / ROLLOUTS

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps before which a rollout was sampled."""
        batches = tables.read_tables(self.folder, ["step"])
        return sorted({step for batch in batches for step in batch["step"].to_pylist()})

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout of that run."""
        rollout = self._rollout
        return int(rollout["minibatches"] * rollout["epochs"])

    @property
    def _rollout(self) -> Mapping[str, Any]:
        """The table rollout of that run's configuration."""
        found = self.resolved.get("config", {}).get("rollout")
        if not isinstance(found, Mapping) or not {*SAME, "minibatches", "epochs"} <= found.keys():
            raise ConfigError(
                f"{KEY}={self.out} is a run without the settings of its rollouts; expected one of this version of taut "
                "that learns from completions; name another"
            )
        return found

    @property
    def num_rollouts(self) -> int:
        """Rollouts from the first one on, without a gap."""
        pairs = zip(
            self.steps, range(1, 1 + len(self.steps) * self.updates, self.updates), strict=True
        )
        return next(
            (number for number, (step, due) in enumerate(pairs) if step != due), len(self.steps)
        )

    @cached_property
    def digest(self) -> str:
        """A hash of what the recorded run is, and of its first rollout."""
        text = json.dumps(self.resolved.get("identity"), sort_keys=True)
        found = hashlib.sha256(text.encode())
        for batch in tables.read_tables(self.folder, ["sample_id", "ids_T", "logp_N", "reward"], 1):
            for row in batch.to_pylist():
                found.update(repr([*row.values()]).encode(errors="backslashreplace"))
        return found.hexdigest()

    def require_vocabulary(self, table: Sequence[bytes]) -> None:
        """Raise ConfigError where that run has other tokens. ``table``: the bytes of each token of this one."""
        path = self.out / TOKENS / VOCABULARY
        theirs = tables.read_column(path, "bytes")
        if theirs == list(table):
            return
        digests = [hashlib.sha256(b"\0".join(one)).hexdigest()[:12] for one in (theirs, table)]
        raise ConfigError(
            f"{KEY}={self.out} has {len(theirs):,} tokens with the hash {digests[0]}... ({path}), and this run "
            f"{len(table):,} with {digests[1]}...; expected the same tokenizer; set the recorded run's model"
        )

    def require_fits(
        self, config: RolloutConfig, samples_per_step: int, num_steps: int, *, is_judged: bool
    ) -> None:
        """Raise ConfigError where a run with these settings cannot train on these rollouts, or has more steps.
        ``is_judged``: whether it learns from rewards.
        """
        # sampled alike, in rollouts of one size, and judged
        theirs, problem = self._rollout, ""
        other = next((name for name in SAME if theirs[name] != getattr(config, name)), None)
        recorded = self.resolved["config"]["batch"]["samples_per_step"] * theirs["minibatches"]
        asked = samples_per_step * config.minibatches
        first = tables.read_tables(self.folder, ["rewards"], self.steps[0]) if is_judged else ()
        if other is not None:
            problem = (
                f"rollout.{other}={_shown(getattr(config, other))}, and the rollouts of {KEY}={self.out} were sampled "
                f"with {_shown(theirs[other])}; expected the same; set rollout.{other}={_shown(theirs[other])}"
            )
        elif recorded != asked:
            problem = (
                f"batch.samples_per_step={samples_per_step} with rollout.minibatches={config.minibatches} makes "
                f"rollouts of {counted(asked, 'prompts')}, and {KEY}={self.out} has {recorded}; set "
                "batch.samples_per_step"
            )
        elif is_judged and not any(row for b in first for row in b["rewards"].to_pylist()):
            problem = (
                f"{KEY}={self.out} has completions without rewards (it is a run of {self.resolved.get('method')}); "
                "expected a run that judges them; name another"
            )
        if problem:
            raise ConfigError(problem)
        # as many as the steps need
        have, needed = self.num_rollouts, -(-num_steps // config.updates)
        if have >= needed:
            return
        last, limit = self.steps[-1], self.resolved["config"]["log"]["rollouts"]["max_gib"]
        missing = have * self.updates + 1
        if have < len(self.steps):
            why = f"it has none of step {missing}, though one of step {last}"
        else:
            why = f"its last is of step {last}"
        if sum(path.stat().st_size for path in self.folder.glob("*")) >= limit * GIB:
            why += f", as its table has reached log.rollouts.max_gib={limit:g}"
        most = have * config.updates
        raise ConfigError(
            f"{KEY}={self.out} has {counted(have, 'rollouts')} from its first step on ({why}), and {num_steps} steps "
            f"of this run take {needed}; expected as many; "
            + (f"set steps={most} or less, or name another run" if most else "name another run")
        )


@dataclass(frozen=True, eq=False)
class RecordedRollouts(RolloutSource):
    """The base source that reads the rollouts of a recording, in their order. Nothing is generated or judged."""

    recording: Recording
    config: RolloutConfig
    is_judged: bool
    num_rows: int
    """Ids that the model has an embedding of."""
    longest: int
    """Tokens that a trajectory may have."""
    image_store: ImageStore | None
    decisions: Sequence[Decision]
    engine: None = None

    def take(self, request: RolloutRequest) -> Rollout:
        """Return the recorded rollout of the request's number, whatever its prompts. Raises DataError where it cannot
        be trained on.
        """
        recording = self.recording
        step = request.number * recording.updates + 1
        # its tokens are as many updates behind the weights that train on them as they were
        lag = request.number * self.config.updates - (step - 1)
        batches = tables.read_tables(recording.folder, records.READ, step)
        try:
            rollout = records.read_rollout(batches, request.number, lag, self._picture)
            if not rollout.all_groups:
                raise DataError(
                    "there is no such rollout any more; expected the table as it was at the start; begin again"
                )
            self._require_room(rollout)
        except DataError as error:
            raise DataError(
                f"{KEY}: the rollout of step {step} in {recording.folder}: {error}"
            ) from error
        return rollout if self.is_judged else _unjudged(rollout)

    def _require_room(self, rollout: Rollout) -> None:
        for group in rollout.all_groups:
            for trajectory in group.trajectories:
                size, largest = trajectory.ids_T.size, int(trajectory.ids_T.max(initial=0))
                problem = ""
                if trajectory.has_reward and size > self.longest:
                    problem = (
                        f"{size:,} tokens, and a sample of this run may have {self.longest:,}; expected fewer; raise "
                        "rollout.max_new_tokens or data.max_length"
                    )
                elif largest >= self.num_rows:
                    problem = (
                        f"token {largest}, and the model has {self.num_rows:,} rows; expected the vocabulary of the "
                        "recorded model; set that model, or name another run"
                    )
                if problem:
                    raise DataError(f"{trajectory.name} has {problem}")

    def _picture(self, source: str, content: str, num_pictures: int, place: str) -> Picture:
        if self.image_store is None:
            raise DataError(
                f"{place} has the picture {source}, and the model takes none; expected a model with the recorded one's "
                "processor; set it"
            )
        return self.image_store.picture(source, content, num_pictures, place)


def _unjudged(rollout: Rollout) -> Rollout:
    """Return the rollout with equal rewards, for a method that learns from all completions alike."""

    def cleared(groups: Sequence[Group]) -> list[Group]:
        return [
            Group(
                tuple(
                    replace(t, reward_result=RewardResult({}, 0.0)) if t.error is None else t
                    for t in group.trajectories
                )
            )
            for group in groups
        ]

    return replace(rollout, groups=cleared(rollout.groups), left_out=cleared(rollout.left_out))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
