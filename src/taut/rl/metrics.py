"""The `rollout` log event: generation statistics, rewards, and sample completions token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from taut.data.messages import named
from taut.inference.engine import Engine
from taut.inference.vllm import ServerEngine
from taut.rl.advantages import TrainSample
from taut.rl.rollout import Rollout, RolloutConfig
from taut.rl.sampler import Trajectory

DIGITS = 4


def fields(
    rollout: Rollout,
    samples: Sequence[TrainSample],
    metrics: Mapping[str, float],
    version: int,
    config: RolloutConfig,
    *,
    is_judged: bool,
) -> dict[str, Any]:
    """The event's fields; groups that were left out count. ``samples``: what is trained on. ``metrics``: of the credit.
    ``version``: of the weights that are trained.
    """
    trajectories = [one for group in rollout.all_groups for one in group.trajectories]
    whole = [trajectory for trajectory in trajectories if trajectory.error is None]
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure]
    event: dict[str, Any] = {}
    if is_judged:
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.has_reward]
        if rewards:
            event |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
            event |= {"reward_min": min(rewards), "reward_max": max(rewards)}
        event |= _parts(trajectories)
        event["groups_with_signal"] = sum(sample.has_signal for sample in samples)
        event["left_out"] = len(rollout.left_out)
        event["without_reward"] = len(trajectories) - len(rewards) - len(failures)
        event["rewarded"] = len(rewards)
    event["groups"] = len(rollout.all_groups)
    event["completions"] = len(trajectories)
    event["errors"] = len(failures)
    event["seconds_generating"] = rollout.seconds_generating
    event["seconds_judging"] = rollout.seconds_judging
    event |= metrics
    if whole:
        lengths = [int(trajectory.sampled_at_N.size) for trajectory in whole]
        event["stopped"] = fmean(trajectory.finish_reason == "stop" for trajectory in whole)
        event["tokens_mean"], event["tokens_max"] = fmean(lengths), max(lengths)
    staleness = [version - int(v) for trajectory in whole for v in trajectory.version_N[:1]]
    if staleness:
        event["staleness_mean"], event["staleness_max"] = fmean(staleness), max(staleness)
    if config.environment.is_on and whole:
        event["turns_mean"] = fmean(trajectory.num_turns for trajectory in whole)
        event["calls"] = sum(trajectory.num_calls for trajectory in whole)
        event["malformed_calls"] = sum(trajectory.num_malformed_calls for trajectory in whole)
    if failures:
        event["first_error"] = failures[0]
    event["samples"] = [shown(trajectory, samples) for trajectory in best_and_worst(rollout)]
    return event


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each part of the reward where it applies; and how many answers it could not judge, if any."""
    values: dict[str, list[float]] = {}
    num_unjudged: Counter[str] = Counter()
    for trajectory in trajectories:
        for name, score in trajectory.verdict.parts.items():
            if score.value is not None:
                values.setdefault(name, []).append(score.value)
            if score.unjudged is not None:
                num_unjudged[name] += 1
    means = {f"reward/{name}": fmean(of_part) for name, of_part in values.items()}
    return means | {f"reward/{name}_unjudged": float(n) for name, n in num_unjudged.items()}


def best_and_worst(rollout: Rollout) -> list[Trajectory]:
    """The best and the worst trajectory of the group whose rewards differ most; none where none has a reward."""
    by_reward = [sorted(g.trajectories, key=lambda t: -t.reward) for g in rollout.rewarded]
    if not by_reward:
        return []
    chosen = max(by_reward, key=lambda group: group[0].reward - group[-1].reward)
    return [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen


def shown(trajectory: Trajectory, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """A trajectory as a field of the event, token by token, with its advantages in ``samples``."""
    streams = {s.id: s.streams for train_sample in samples for s in train_sample.tree.samples}
    advantage_N = streams.get(trajectory.name, {}).get("advantage_N")
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
