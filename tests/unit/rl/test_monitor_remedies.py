"""What warnings of a run that generates tell the user to set is a key that the run's method has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.online_runs import METHODS_KEYS, keys_of, make, save_models
from tests.unit.rl.test_monitors import Log, group, report, told, watched

from taut.config import describe, from_mapping
from taut.errors import CheckFailed, ConfigError
from taut.evals.stopping import Stops
from taut.methods import METHODS
from taut.methods.method import RunConfig
from taut.rl.monitors import (
    BEGINNING,
    DRIFT,
    ESTIMATE,
    HIGH,
    LOW,
    RECENT,
    WARN_SILENT,
    RolloutMonitor,
)
from taut.rl.online import Online
from taut.run.lifecycle import prepare_stop_check

KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def said_by(monitor: RolloutMonitor, method: str) -> list[str]:
    """Every message that the monitor of such a run can give."""
    log, stops = Log(), []
    for share in [1.0] * BEGINNING + [0.1] * RECENT:
        monitor.look(1, told(stopped=share, errors=1, first_error="late", rewarded=1), log)
    monitor.look(1, told(rewarded=0), log)
    tries: list[Any] = [
        lambda: monitor.require_rewards([group(None, error="late")], 1),
        lambda: monitor.require_rewards([group(None, None)], 1),
    ]
    if method in ("grpo", "ppo"):
        for _ in range(WARN_SILENT):
            monitor.look(1, told(groups_with_signal=0), log)
        tries.append(lambda: monitor.look(1, told(groups_with_signal=0), log))
        monitor.look(1, told(dropped=1.0), log)
        for entropy in [1.0] * BEGINNING + [0.0] * RECENT:
            seen = report(0.2, 0.1)
            seen.metrics.update({DRIFT: 9.0, LOW: 0.5, HIGH: 0.5, ESTIMATE: entropy})
            watched(monitor, log, seen)
        tries.append(lambda: watched(monitor, log, report(9.0)))
    if method == "ppo":
        critic = {"value_low": -9.0, "value_high": 9.0, "return_min": 0.0, "return_max": 1.0}
        for _ in range(RECENT):
            monitor.look(1, told(**critic), log)
    monitor.unrewarded, monitor.silent = (
        monitor.config.max_unrewarded,
        monitor.config.max_without_signal,
    )
    for attempt in tries:
        with pytest.raises(CheckFailed) as stopped:
            attempt()
        stops.append(str(stopped.value))
    return [detail for _, detail in log] + stops


@pytest.mark.parametrize("method", METHODS_KEYS)
def test_every_key_that_a_warning_names_is_one_of_the_method(
    method: str, model: Path, tmp_path: Path
) -> None:
    built, _ = make(keys_of(method, model, tmp_path))
    online = built.trainer.source
    assert isinstance(online, Online)
    messages = said_by(online.monitor, method)
    check = prepare_stop_check(built)
    cause = Stops(4, 0, 0, 0.9, None, (), is_taught=check.is_taught, remedy=check.remedy).cause
    assert online.monitor.ends_remedy in cause and any(
        online.monitor.ends_remedy in m for m in messages
    )
    known = {row.key for row in describe(METHODS[method])}
    named = {key for message in (*messages, cause) for key in KEY.findall(message)}
    assert named <= known, named - known
    assert {
        "rollout_monitor.max_errors",
        "rollout_monitor.max_unrewarded",
        "stop_check.max_new_tokens",
    } <= named
    watched_keys = {
        "shaping.missing_eos_penalty",
        "shaping.overlong",
        "rollout_monitor.warn_kl",
        "rollout_monitor.max_without_signal",
    }
    assert (named & watched_keys) == (watched_keys if method in ("grpo", "ppo") else set())
    assert ("critic.learning_rate" in named) == (method == "ppo")


@pytest.mark.parametrize(
    ("method", "keys", "remedy"),
    [
        ("grpo", {"shaping.missing_eos_penalty": 0.5}, "raise shaping.missing_eos_penalty"),
        ("grpo", {"grpo.advantage": "maxrl"}, "add the reward stop to rewards, or lower optim.l"),
        ("ppo", {"ppo.bootstrap_truncated": True}, "set ppo.bootstrap_truncated=false"),
    ],
)
def test_a_remedy_that_the_run_s_own_settings_refuse_is_not_told(
    method: str, keys: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    given = {"model": "m", "data.train": "a.jsonl", "rewards": "exact_match", **keys}
    assert from_mapping(METHODS[method], given).ends_remedy.startswith(remedy)
    if "missing_eos_penalty" not in remedy:
        with pytest.raises(ConfigError, match="missing_eos_penalty"):
            from_mapping(METHODS[method], {**given, "shaping.missing_eos_penalty": 0.5})


def test_a_run_that_does_not_generate_is_told_no_key_of_one_that_does() -> None:
    run = from_mapping(RunConfig, {"model": "m", "data.train": "a.jsonl"})
    assert not run.generates and run.ends_remedy == ""
    assert KEY.findall(Stops(4, 0, 0, 0.9, None, ()).cause) == ["stop_check.max_new_tokens"]
