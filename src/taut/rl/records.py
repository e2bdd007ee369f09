"""The rows of out/rollouts, one for each trajectory with all that it was trained with, and rollouts read from them.
Training on a rollout that was read is equal bit for bit.

The rows of a prompt are adjacent, in the order of ``index``. Columns whose names end in _N have an entry for each
sampled token; the places of these tokens in ``ids_T`` are ``sampled_at_N``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from taut.data.rows.prompts import PromptRow
from taut.errors import DataError, redacted_in
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.advantages import TrainSample
from taut.rl.conversations import Path
from taut.rl.rollout import Group, Rollout
from taut.rl.sampler import Trajectory
from taut.types import FloatArray, Media, Picture

NUMBERS, PLACES = pa.list_(pa.float32()), pa.list_(pa.int32())
PICTURE = pa.struct(
    {
        "source": pa.string(),
        "content": pa.string(),  # its digest
        "num_pictures": pa.int32(),
        "start": pa.int32(),
        "stop": pa.int32(),
        "grid": PLACES,
        "is_two_way": pa.bool_(),
    }
)
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
        "logp_N": pa.list_(pa.float64()),  # the engine's, as they weight tokens
        "advantage_N": NUMBERS,
        "version_N": PLACES,  # of the weights that sampled each token
        "finish_reason": pa.string(),
        "error": pa.string(),
        "reward": pa.float64(),
        "rewards": pa.list_(PART),
        # what an environment's steps gave: (n of the last token of the turn, their sum)
        "turn_rewards": pa.list_(pa.struct({"n": pa.int32(), "reward": pa.float64()})),
        # other paths of an agent's conversations, with the sampled tokens that no earlier path has
        "branches": pa.list_(
            pa.struct(
                {
                    "ids_T": PLACES,
                    "sampled_at_N": PLACES,
                    "logp_N": pa.list_(pa.float64()),
                    "version_N": PLACES,
                }
            )
        ),
        # how many tokens had been sampled at each fork of its path, and how many it has of the one it forked from
        "forks": PLACES,
        "num_inherited": pa.int32(),
        "media": pa.list_(PICTURE),
        "num_turns": pa.int32(),
        "num_calls": pa.int32(),
        "num_malformed_calls": pa.int32(),
        "num_conversations": pa.int32(),
        "num_edited": pa.int32(),
        "seconds_generating": pa.float32(),  # of the whole rollout
        "seconds_judging": pa.float32(),
    }
)


def rollout_rows(
    step: int, rollout: Rollout, samples: Sequence[TrainSample]
) -> list[dict[str, Any]]:
    """Return a row for each trajectory of a rollout. ``samples``: made of its groups."""
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
    row, reward_result = trajectory.row, trajectory.reward_result
    first = row.prompt if trajectory.first_messages is None else trajectory.first_messages
    return {
        "sample_id": trajectory.name,
        "prompt_id": row.id,
        "place": row.place,
        "index": trajectory.index,
        "prompt": _json(first),
        "references": list(row.references),
        "messages": _json(trajectory.messages),
        "text": trajectory.text,
        "ids_T": trajectory.ids_T,
        "sampled_at_N": trajectory.sampled_at_N,
        "logp_N": trajectory.logp_N,
        "advantage_N": advantages.get(trajectory.name),
        "version_N": trajectory.version_N,
        "finish_reason": trajectory.finish_reason,
        "error": redacted_in(trajectory.error),
        "reward": reward_result.total,
        "rewards": [
            {
                "name": name,
                "value": score.value,
                "error": redacted_in(score.error),
                "reason": redacted_in(score.unjudged),
                "reply": score.reply,
            }
            for name, score in reward_result.parts.items()
        ],
        "turn_rewards": [{"n": n, "reward": reward} for n, reward in trajectory.turn_rewards],
        "branches": [
            {name: getattr(branch, name) for name in ARRAYS} for branch in trajectory.branches
        ],
        "forks": list(trajectory.forks),
        "num_inherited": trajectory.num_inherited,
        "media": [
            {
                "source": media.picture.source,
                "content": media.picture.content,
                "num_pictures": media.picture.num_pictures,
                "start": media.start,
                "stop": media.stop,
                "grid": media.grid,
                "is_two_way": media.is_two_way,
            }
            for media in trajectory.media
        ],
        "num_turns": trajectory.num_turns,
        "num_calls": trajectory.num_calls,
        "num_malformed_calls": trajectory.num_malformed_calls,
        "num_conversations": trajectory.num_conversations,
        "num_edited": trajectory.num_edited,
    }


def _json(messages: Any) -> str:
    """Messages as JSON; a picture by its description."""
    return json.dumps(messages, ensure_ascii=False, default=str)


# -- and back

ARRAYS = ("ids_T", "sampled_at_N", "logp_N", "version_N")
READ = (
    *("group", "prompt_id", "place", "index", "is_kept", "prompt", "references", "messages"),
    *("text", *ARRAYS, "finish_reason", "error", "reward", "rewards", "turn_rewards", "media"),
    *("num_turns", "num_calls", "num_malformed_calls"),
    *("branches", "num_conversations", "num_edited", "forks", "num_inherited"),
)
"""The columns that ``read_rollout`` reads."""


def read_rollout(
    batches: Iterable[pa.RecordBatch],
    number: int,
    lag: int,
    picture: Callable[[str, str, int, str], Picture],
) -> Rollout:
    """Return the rollout of these rows, all of one step. ``number``: of the rollout, from 0. ``lag``: is added to the
    version of the weights of each token. ``picture``: makes a picture of its source, digest, number and sample.

    Raises DataError for a row that nothing could be learned from.
    """
    groups: dict[tuple[bool, int], list[Trajectory]] = {}
    for batch in batches:
        arrays = {name: batch.column(name) for name in ARRAYS}
        for at, row in enumerate(batch.drop_columns(list(ARRAYS)).to_pylist()):
            own = {name: column[at].values for name, column in arrays.items()}
            trajectory = _trajectory(row, own, number, lag, picture)
            groups.setdefault((row["is_kept"], row["group"]), []).append(trajectory)
    kept, left_out = (
        [Group(tuple(group)) for (is_kept, _), group in groups.items() if is_kept is which]
        for which in (True, False)
    )
    return Rollout(kept, left_out)


def _trajectory(
    row: Mapping[str, Any],
    arrays: Mapping[str, pa.Array | None],
    number: int,
    lag: int,
    picture: Callable[[str, str, int, str], Picture],
) -> Trajectory:
    ids_T, at_N, version_N = (
        _array(arrays[name]).astype(np.int64) for name in ("ids_T", "sampled_at_N", "version_N")
    )
    logp_N = _array(arrays["logp_N"]).astype(np.float64)
    name = f"{row['prompt_id']}#{row['index']}"
    branches = tuple(
        Path(
            np.array(branch["ids_T"], np.int64),
            np.array(branch["sampled_at_N"], np.int64),
            np.array(branch["logp_N"], np.float64),
            np.array(branch["version_N"], np.int64) + lag,
        )
        for branch in row["branches"]
    )
    # an entry for each sampled token, on each path
    for path in (Path(ids_T, at_N, logp_N, version_N), *branches):
        places_N, sizes = path.sampled_at_N, (path.logp_N.size, path.version_N.size)
        is_ascending = bool((np.diff(places_N, prepend=0) > 0).all())
        is_inside = places_N.size == 0 or places_N[-1] < path.ids_T.size
        if not (sizes == (places_N.size, places_N.size) and is_ascending and is_inside):
            raise DataError(
                f"{name}: {path.ids_T.size} tokens, of which {places_N.size} sampled, with {sizes[0]} logprobs and "
                f"{sizes[1]} versions; expected one of each for every sampled token, at ascending places"
            )
    media = tuple(
        Media(
            picture(part["source"], part["content"], part["num_pictures"], name),
            part["start"],
            part["stop"],
            tuple(part["grid"]) if part["grid"] else None,
            part["is_two_way"],
        )
        for part in row["media"]
    )
    first = json.loads(row["prompt"])
    prompt = PromptRow(
        place=row["place"],
        id=row["prompt_id"],
        ids_T=ids_T[: at_N[0]] if at_N.size else ids_T,
        prompt=first if isinstance(first, str) else tuple(first),
        references=tuple(row["references"]),
        reference_from=None,
        columns={},
    )
    parts = {
        part["name"]: Score(
            part["value"], part["error"], unjudged=part["reason"], reply=part.get("reply")
        )
        for part in row["rewards"]
    }
    return Trajectory(
        row=prompt,
        index=row["index"],
        ids_T=ids_T,
        sampled_at_N=at_N,
        logp_N=logp_N,
        version_N=version_N + lag,
        finish_reason=row["finish_reason"],
        text=row["text"],
        messages=tuple(json.loads(row["messages"])),
        num_turns=row["num_turns"],
        error=row["error"],
        turn_rewards=tuple((part["n"], part["reward"]) for part in row["turn_rewards"]),
        num_calls=row["num_calls"],
        num_malformed_calls=row["num_malformed_calls"],
        branches=branches,
        num_conversations=row["num_conversations"],
        num_edited=row["num_edited"],
        forks=tuple(row["forks"]),
        num_inherited=row["num_inherited"],
        media=media,
        rollout=number,
        reward_result=RewardResult(parts, row["reward"]),
    )


def _array(values: pa.Array | None) -> NDArray[Any]:
    """Return the values of a list; none of a null."""
    return np.array([]) if values is None else values.to_numpy(zero_copy_only=False)
