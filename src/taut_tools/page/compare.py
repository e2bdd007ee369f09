"""Compare runs: configuration, data, model and versions; evaluations; rewards of the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from taut.io.tables import TableReader
from taut.run.states import settings_of, state_of
from taut.train.run_dir import dotted
from taut_tools.page.answers import MOST_NAMES, Answer, Run, Unknown, evaluations, listing

MOST_RUNS = 8
MOST_PROMPTS = 50
"""Maximum prompts that are compared, the ones whose last rewards differ most."""
NOT_SETTINGS = ("out", "resume", "overwrite")
"""Keys of a configuration that do not change what is trained."""


def compare(runs: Sequence[Run]) -> Answer:
    """Compare two to MOST_RUNS runs. Raises Unknown for another number."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise Unknown(
            f"found {len(runs)} runs to compare; expected 2 to {MOST_RUNS}: compare?runs=a,b"
        )
    resolved, histories = [], []
    for run in runs:
        with run.lock:
            resolved.append(run.resolved)
            histories.append(run.history)
    common = set.intersection(*(set(history.curves) for history in histories))
    return {
        "runs": [listing(run.name, state_of(run.out)) for run in runs],
        "differences": differences(resolved, [history.start for history in histories]),
        "curves": sorted(common)[:MOST_NAMES],
        "evals": _evals([evaluations(history.kept["eval"]) for history in histories]),
        "prompts": _prompts(runs),
    }


def differences(
    resolved: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[Answer]:
    """List the values that are not equal in all runs, by kind."""
    found = []
    flat = [settings_of(one) for one in resolved]
    for key in dict.fromkeys(key for one in flat for key in one):
        kind = "model" if key == "model" else "data" if key.startswith("data.") else "configuration"
        if key not in NOT_SETTINGS:
            found.append((kind, key, [one.get(key) for one in flat]))
    found.append(("data", "digest of the samples", [one.get("data") for one in resolved]))
    found.append(("model", "parameters", [start.get("num_parameters") for start in starts]))
    found.append(("model", "parameters that train", [start.get("num_trained") for start in starts]))
    # Versions of taut, its code and its libraries, and the environment that a resume compares.
    of_runs: list[dict[str, Any]] = []
    for one, start in zip(resolved, starts, strict=True):
        environment = one.get("identity", {}).get("environment", {})
        git = {f"git {key}": value for key, value in start.get("git", {}).items()}
        versions = dotted({**environment, **start.get("versions", {}), **git})
        of_runs.append({"taut": one.get("taut"), **dict(versions)})
    for key in dict.fromkeys(key for one in of_runs for key in one):
        found.append(("versions", key, [one.get(key) for one in of_runs]))
    return [
        {"kind": kind, "key": key, "values": values}
        for kind, key, values in found
        if any(value != values[0] for value in values)
    ]


def _evals(of_runs: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The last value of each metric that all runs have, and for two runs the second minus the first and an interval."""
    last = [{one["name"]: one for one in measured} for measured in of_runs]
    found = []
    for name in last[0]:
        if not all(name in of_run for of_run in last):
            continue
        ones = [of_run[name] for of_run in last]
        entry = {
            "name": name,
            "step": ones[-1]["step"],
            "steps": [one["step"] for one in ones],
            "values": [one["value"] for one in ones],
            "lows": [one["low"] for one in ones],
            "highs": [one["high"] for one in ones],
            "difference": None,
            "low": None,
            "high": None,
        }
        if len(ones) == 2:
            entry["difference"] = ones[1]["value"] - ones[0]["value"]
            entry["low"], entry["high"] = _interval(*ones) or (None, None)
        found.append(entry)
    return found


def _interval(one: Answer, other: Answer) -> tuple[float, float] | None:
    """The interval of the difference of two independent values, from the interval of each (MOVER; for proportions
    Newcombe's). Values measured on the same prompts, as most are, are not independent: the interval is then too wide.
    """
    if None in (one["low"], one["high"], other["low"], other["high"]):
        return None
    a, b = one["value"], other["value"]
    difference = b - a
    return (
        difference - math.hypot(b - other["low"], one["high"] - a),
        difference + math.hypot(other["high"] - b, a - one["low"]),
    )


def _prompts(runs: Sequence[Run]) -> list[Answer]:
    """Mean rewards by step of the prompts that all runs have sampled."""
    means = []
    for run in runs:
        with run.lock:
            means.append(_mean_rewards(run.recorded.rollout_table))
    common = [i for i in means[0] if all(i in of_run for of_run in means)]

    def spread(prompt_id: str) -> float:
        last = [list(of_run[prompt_id].values())[-1] for of_run in means]
        return min(last) - max(last)

    common.sort(key=lambda prompt_id: (spread(prompt_id), prompt_id))
    found = []
    for prompt_id in common[:MOST_PROMPTS]:
        steps = sorted({step for of_run in means for step in of_run[prompt_id]})[-MOST_PROMPTS:]
        rewards = [[of_run[prompt_id].get(step) for step in steps] for of_run in means]
        found.append({"prompt_id": prompt_id, "steps": steps, "rewards": rewards})
    return found


def _mean_rewards(table: TableReader) -> dict[str, dict[int, float]]:
    """Prompt -> step -> mean reward, for prompts with a reward."""
    columns = ["prompt_id", "step", "reward"]
    batches = [batch.select(columns) for batch in table.read(columns)]
    if not batches:
        return {}
    grouped = pa.Table.from_batches(batches).group_by(columns[:2]).aggregate([("reward", "mean")])
    kept = grouped.filter(pc.field("reward_mean").is_valid()).sort_by("step")
    means: dict[str, dict[int, float]] = {}
    for row in kept.to_pylist():
        means.setdefault(row["prompt_id"], {})[row["step"]] = row["reward_mean"]
    return means
