"""The rows of out/rollouts: one for each trajectory, with all that it was trained with.

A prompt's rows lie together, in the order of ``index``. Columns whose names end in _N have an entry for each sampled
token, whose places in ``ids_T`` are ``sampled_at_N``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from taut.rl.advantages import TrainSample
from taut.rl.rollout import Rollout
from taut.rl.sampler import Trajectory
from taut.types import FloatArray

Text = TypeVar("Text", str, str | None)
NUMBERS, PLACES = pa.list_(pa.float32()), pa.list_(pa.int32())
PART = pa.struct(
    {
        "name": pa.string(),
        "value": pa.float64(),
        "error": pa.string(),
        "reason": pa.string(),  # why the answer could not be judged
        "reply": pa.string(),  # what came with the value: a judge's reply, the test that failed
    }
)
SCHEMA = pa.schema(
    {
        "step": pa.int32(),  # the first one that trains on it
        "sample_id": pa.string(),  # as in out/tokens
        "group": pa.int32(),  # of the step's groups, from 0
        "prompt_id": pa.string(),
        "place": pa.string(),  # the file and line of the prompt
        "index": pa.int32(),  # which of the prompt's samples, from 0
        "is_kept": pa.bool_(),  # false: its group has no signal, and was replaced
        "prompt": pa.string(),  # JSON: the messages before the first sampled token
        "references": pa.list_(pa.string()),
        "messages": pa.string(),  # JSON: those after it
        "text": pa.string(),  # of the last completion
        "ids_T": PLACES,
        "sampled_at_N": PLACES,
        "logp_N": NUMBERS,  # the engine's
        "advantage_N": NUMBERS,
        "version_N": PLACES,  # of the weights that sampled each token
        "finish_reason": pa.string(),
        "error": pa.string(),
        "reward": pa.float64(),
        "rewards": pa.list_(PART),
        "num_turns": pa.int32(),
        "num_calls": pa.int32(),
        "num_malformed_calls": pa.int32(),
        "seconds_generating": pa.float32(),  # of the whole rollout
        "seconds_judging": pa.float32(),
    }
)


def rollout_rows(
    step: int, rollout: Rollout, samples: Sequence[TrainSample]
) -> list[dict[str, Any]]:
    """A row for each trajectory of a rollout. ``samples``: what is trained on of it."""
    advantages = {
        sample.id: sample.streams["advantage_N"]
        for trained in samples
        for sample in trained.tree.samples
        if "advantage_N" in sample.streams
    }
    kept = len(rollout.groups)
    return [
        {
            "step": step,
            "group": number,
            "is_kept": number < kept,
            "seconds_generating": rollout.seconds_generating,
            "seconds_judging": rollout.seconds_judging,
            **_row(trajectory, advantages),
        }
        for number, group in enumerate(rollout.all_groups)
        for trajectory in group.trajectories
    ]


def _row(trajectory: Trajectory, advantages: Mapping[str, FloatArray]) -> dict[str, Any]:
    row, verdict = trajectory.row, trajectory.verdict
    first = row.prompt if trajectory.first_messages is None else trajectory.first_messages
    return {
        "sample_id": trajectory.name,
        "prompt_id": row.id,
        "place": _unicode(row.place),
        "index": trajectory.index,
        "prompt": _json(first),
        "references": [_unicode(text) for text in row.references],
        "messages": _json(trajectory.messages),
        "text": _unicode(trajectory.text),
        "ids_T": trajectory.ids_T,
        "sampled_at_N": trajectory.sampled_at_N,
        "logp_N": trajectory.logp_N,
        "advantage_N": advantages.get(trajectory.name),
        "version_N": trajectory.version_N,
        "finish_reason": trajectory.finish_reason,
        "error": _unicode(trajectory.error),
        "reward": verdict.total,
        "rewards": [
            {
                "name": name,
                "value": score.value,
                "error": _unicode(score.error),
                "reason": _unicode(score.unjudged),
                "reply": _unicode(score.reply),
            }
            for name, score in verdict.parts.items()
        ],
        "num_turns": trajectory.num_turns,
        "num_calls": trajectory.num_calls,
        "num_malformed_calls": trajectory.num_malformed_calls,
    }


def _json(messages: Any) -> str:
    """Messages as JSON; a picture by its description."""
    return _unicode(json.dumps(messages, ensure_ascii=False, default=str))


def _unicode(text: Text) -> Text:
    """The text with a question mark for half a surrogate pair, which JSON of a server or a tool may have and UTF-8 may
    not.
    """
    return None if text is None else text.encode("utf-8", "replace").decode()
