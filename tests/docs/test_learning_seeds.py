"""The example of lags, a coin and distillation: its server, its statistics, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.docs.test_learning import load
from tests.helpers.chat_runs import column, events, save_model
from tests.helpers.online_runs import keys_of, train
from tests.helpers.slow_cases import slow_except
from transformers import AutoModelForCausalLM, AutoTokenizer

from taut.errors import TautError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "learning"


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    return load(EXAMPLE / "measure.py")


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return json.loads((EXAMPLE / "runs.json").read_text())


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((EXAMPLE / "expected.json").read_text())


# -- the server


@pytest.mark.parametrize("lag", slow_except([2], [0, 2]))
def test_the_server_samples_from_the_weights_that_it_was_given(lag: int, tmp_path: Path) -> None:
    """Without a lag its logprobs are the trainer's; with one they are those of weights up to two updates old, and the
    ratio that corrects them is not 1.
    """
    model = save_model(tmp_path / "model" / "llama", "llama")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    module = load(EXAMPLE / "server.py")
    module.SETTLED = 0.3
    server = module.WaveServer(
        model=loaded, mode="processed", max_model_len=64, has=("full", "pause")
    )
    server.start(AutoTokenizer.from_pretrained(model))
    keys: dict[str, Any] = {
        "dtype": "float32",
        "rollout.engine": "server",
        "rollout.n": 4,
        "rollout.lag": lag,
        "batch.samples_per_step": 2,
        "optim.learning_rate": 2e-3,
        "steps": 6,
        "log.sinks": [f"{EXAMPLE / 'settled.py'}:Settled"],
    }
    with server:
        train(made := keys_of("grpo", model, tmp_path, **keys, **{"rollout.urls": server.url}))
    out = Path(made["out"])
    ages = [event["staleness_mean"] for event in events(out, "rollout")]
    apart = column(out, "engine/difference")
    if not lag:
        assert ages == [0] * 6 and max(apart) < 1e-5
    else:
        assert ages[0] == 0 and max(ages) == 2
        assert apart[0] < 1e-5 and max(apart[2:]) > 1e-3


def test_the_server_refuses_to_be_a_teacher(tmp_path: Path) -> None:
    """In one line, before the first rollout."""
    model = save_model(tmp_path / "model" / "llama", "llama")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    server = load(EXAMPLE / "server.py").WaveServer(model=loaded, max_model_len=64)
    with server, pytest.raises(TautError, match=r"server\.py samples and is no teacher") as caught:
        train(
            keys_of("gkd", model, tmp_path, **{"distill.teacher": None, "distill.url": server.url})
        )
    assert "\n" not in str(caught.value)


# -- the statistics


def test_an_interval_is_students(measure: ModuleType) -> None:
    """1 to 5: mean 3, deviation sqrt(2.5), its error sqrt(0.5), and 2.776 of them are 1.963."""
    found = measure.interval([1, 2, 3, 4, 5])
    assert found["mean"] == 3
    assert (found["low"], found["high"]) == pytest.approx((1.037, 4.963), abs=1e-3)
    assert measure.interval([2.0]) == {"mean": 2.0}


def test_a_difference_is_taken_seed_by_seed(measure: ModuleType) -> None:
    def result(accuracy: float) -> dict[str, Any]:
        curve = [{"samples": 8, "accuracy": 0.0, "stopped": 1.0}]
        curve.append({"samples": 16, "accuracy": accuracy, "stopped": 1.0})
        return {"curve": curve, "pass_at": dict.fromkeys(measure.KS, accuracy)}

    runs = {
        "base": {"0": result(0.25)},
        "teacher": {"0": result(0.75)},
        "lag_0": {"0": result(0.5), "1": result(0.75)},
        "lag_1": {"1": result(0.5), "0": result(0.25)},
    }
    found = measure.summary(runs)
    assert found["less_lag_0"]["lag_1"]["accuracy"] == {"mean": -0.25, "low": -0.25, "high": -0.25}
    assert found["ways"]["lag_0"]["raise"]["mean"] == 0.375
    assert found["ways"]["lag_0"]["samples"] == 16


# -- what was measured


def test_what_is_expected_is_what_was_measured(
    measure: ModuleType, runs: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert expected == json.loads(json.dumps(measure.summary(runs)))
    seeds = {name: way["seeds"] for name, way in expected["ways"].items()}
    assert seeds == dict.fromkeys(measure.WAYS, 5)
    assert len({way["samples"] for way in expected["ways"].values()}) == 1


def test_the_page_shows_it(measure: ModuleType, expected: dict[str, Any]) -> None:
    page = (EXAMPLE / "README.md").read_text()
    assert "\n".join(measure.tables(expected)) in page


def test_what_the_page_concludes_is_so(expected: dict[str, Any]) -> None:
    ways, less = expected["ways"], expected["less_lag_0"]
    for name in ("lag_0", "lag_1", "lag_4"):
        assert ways[name]["raise"]["low"] > 0
    assert ways["lag_0"]["age"] == 0 and ways["lag_1"]["age"] > 0.8 and ways["lag_4"]["age"] > 2
    assert ways["lag_4"]["corrected"] > ways["lag_1"]["corrected"] > 0
    for name in ("lag_1", "lag_4"):
        assert less[name]["accuracy"]["low"] < 0 < less[name]["accuracy"]["high"]
        assert ways[name]["pass_at"]["1"]["high"] > ways["lag_0"]["pass_at"]["1"]["low"]
    assert less["lag_1"]["pass_at_1"]["high"] > 0 > less["lag_4"]["pass_at_1"]["high"]
    assert ways["coin"]["raise"]["high"] < 0
    assert less["gkd"]["accuracy"]["low"] > 0.4


@pytest.mark.slow
def test_all_of_it_is_made_by_one_command(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows and steps: what is recorded has every way, a lag and its correction."""
    make = load(ROOT / "examples" / "grpo" / "make.py")
    monkeypatch.setattr(make, "COUNTS", {"eval": 8, "warm": 64, "train": 64})
    make.make_model(tmp_path / "data" / "model")
    for name, rows in make.make_rows(measure.TASK, seed=0).items():
        made = [make.SHAPES[name](row) for row in rows]
        make.write(tmp_path / "data" / measure.TASK / f"{name}.jsonl", made)
    monkeypatch.setattr(measure, "WARM_STEPS", 2)
    monkeypatch.setattr(measure, "TEACHER_STEPS", 4)
    few = ["steps=6", "eval.answers.every=3", "check=off", "loss_monitor.nothing_learned=warn"]
    lab = measure.Lab(tmp_path, few)
    lab.prepare()
    for name in measure.WAYS:
        lab.learn(name, 0)
    runs = measure.gather(tmp_path)
    measure.record(runs, tmp_path)
    found = json.loads((tmp_path / "expected.json").read_text())
    assert set(found["ways"]) == set(measure.WAYS)
    samples = dict.fromkeys(measure.WAYS, 6 * 32 * 8) | {"gkd": 6 * 64}
    assert {name: way["samples"] for name, way in found["ways"].items()} == samples
    ages = {name: way.get("age") for name, way in found["ways"].items()}
    assert ages["lag_0"] == 0 < ages["lag_1"] <= 1 < ages["lag_4"] <= 4
    assert (tmp_path / "curves.svg").stat().st_size > 0
