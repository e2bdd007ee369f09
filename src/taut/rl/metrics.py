"""The `rollout` log event: generation statistics, rewards, and sample completions token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from taut.data.messages import named
from taut.inference.engine import Engine
from taut.inference.vllm import ServerEngine
from taut.rl.advantages import Credited
from taut.rl.rollout import Rollout, RolloutConfig
from taut.rl.sampler import Trajectory

LOGGED = 2
"""Completions of a roll-out that are shown whole: the best and the worst of the group whose rewards differ most."""
DIGITS = 4


def fields(
    rolled: Rollout,
    paths: Sequence[Trajectory],
    given: Credited,
    version: int,
    config: RolloutConfig,
) -> dict[str, Any]:
    """The event's fields."""
    groups = [*rolled.groups, *rolled.left_out]
    trajectories = [one for group in groups for one in group.trajectories]
    whole = [one for one in trajectories if one.error is None]
    lengths = [int(one.sampled_at_N.size) for one in whole]
    staleness = [version - int(v) for one in whole for v in one.version_N[:1]]
    errors = [
        f"{one.row.place}#{one.index}: {reason}"
        for group in groups
        for one, said in zip(group.trajectories, group.verdicts, strict=True)
        if (reason := one.error or said.error) is not None
    ]
    found: dict[str, Any] = {
        **(_worth(rolled, given) if rolled.is_judged else {}),
        "groups": len(groups),
        "completions": len(trajectories),
        "errors": len(errors),
        "seconds_generating": rolled.spent.generating,
        "seconds_judging": rolled.spent.judging,
        **given.metrics,
    }
    if whole:
        found["stopped"] = fmean(one.finish_reason == "stop" for one in whole)
        found["tokens_mean"], found["tokens_max"] = fmean(lengths), max(lengths)
    if staleness:
        found["staleness_mean"], found["staleness_max"] = fmean(staleness), max(staleness)
    if config.environment.is_on and whole:
        found["turns_mean"] = fmean(one.num_turns for one in whole)
        found["calls"] = sum(one.num_calls for one in whole)
        found["malformed_calls"] = sum(one.num_malformed_calls for one in whole)
    if errors:
        found["first_error"] = errors[0]
    return {**found, "samples": [sample(path, given) for path in shown(paths)]}


def push(engine: Engine) -> dict[str, float]:
    """How the weights came to a server, the last time."""
    sync = engine.sync if isinstance(engine, ServerEngine) else None
    if sync is None or sync.proof is None:
        return {}
    proof = sync.proof
    return {
        "push_seconds": proof.seconds,
        "push_bytes": proof.num_bytes,
        "push_equal": proof.num_equal,
        "push_unread": len(proof.unread),
        "push_error": proof.largest_error,
        "push_change": proof.largest_change,
        "server_restarts": sync.restarts,
    }


def _worth(rolled: Rollout, given: Credited) -> dict[str, float]:
    """What the completions are worth, those of groups that were left out included."""
    groups = [*rolled.groups, *rolled.left_out]
    rewards = [said.total for group in groups for _, said in group.judged if said.total is not None]
    said_of = [
        pair for group in groups for pair in zip(group.trajectories, group.verdicts, strict=True)
    ]
    has_none = [said.total is None and (one.error or said.error) is None for one, said in said_of]
    worth = {}
    if rewards:
        worth = {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
        worth |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    return {
        **worth,
        **_parts(rolled),
        "groups_with_signal": given.num_groups_with_signal,
        "left_out": len(rolled.left_out),
        "without_reward": sum(has_none),
        "rewarded": len(rewards),
    }


def _parts(rolled: Rollout) -> dict[str, float]:
    """The mean of each part of the reward where it applies; and how many answers it could not judge, if any."""
    values: dict[str, list[float]] = {}
    num_unjudged: Counter[str] = Counter()
    for group in chain(rolled.groups, rolled.left_out):
        for said in group.verdicts:
            for name, score in said.parts.items():
                if score.value is not None:
                    values.setdefault(name, []).append(score.value)
                if score.unjudged is not None:
                    num_unjudged[name] += 1
    unjudged = {f"reward/{name}_unjudged": float(count) for name, count in num_unjudged.items()}
    return {f"reward/{name}": fmean(some) for name, some in values.items()} | unjudged


def shown(paths: Sequence[Trajectory]) -> list[Trajectory]:
    """The best and the worst path of the group whose rewards differ most; none where no path has a reward."""
    if not paths:
        return []
    groups: dict[int, list[Trajectory]] = {}
    for path in paths:
        groups.setdefault(path.group, []).append(path)
    ordered = [sorted(some, key=lambda path: -path.reward) for some in groups.values()]
    chosen = max(ordered, key=lambda some: some[0].reward - some[-1].reward)
    return [chosen[0], chosen[-1]][: min(LOGGED, len(chosen))]


def sample(trajectory: Trajectory, given: Credited) -> dict[str, Any]:
    """A trajectory as a field of the event."""
    assert trajectory.verdict is not None
    advantage_N = given.advantages.get(trajectory.name)
    return {
        "id": trajectory.name,
        "text": trajectory.text,
        "messages": named(trajectory.messages) if trajectory.num_turns > 1 else [],
        "references": list(trajectory.row.references),
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
        "rewards": {name: score.value for name, score in trajectory.verdict.parts.items()},
        "version": int(trajectory.version_N[0]) if trajectory.version_N.size else None,
        "ids": trajectory.ids_T[trajectory.sampled_at_N].tolist(),
        "logp": np.round(trajectory.logp_N, DIGITS).tolist(),
        "advantage": None if advantage_N is None else np.round(advantage_N, DIGITS).tolist(),
    }
