"""Every method whose rows are judged: it trains, its model is what was trained, and it is gone on with to the last bit.

What the numbers mean is tested with the losses; two ranks in tests/invariants/test_ranks_preference_and_reward.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import (
    column,
    decisions,
    events,
    largest_difference,
    save_model,
    weights,
)
from tests.helpers.judged_runs import keys_of, make, train
from tests.helpers.run_directories import is_same, read_checkpoint
from tests.helpers.slow_cases import slow_except
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import taut
from taut.data.packing import PackPolicy
from taut.methods.reference import Start
from taut.run import lifecycle
from taut.train.trainer import add_gradients

AUTO: dict[str, Any] = {
    "reward": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "process": AutoModelForTokenClassification,
}
BEST = {
    "dpo": "rewards/margin",
    "kto": "rewards/accuracy",
    "orpo": "rewards/accuracy",
    "simpo": "loss",
    "cpo": "rewards/margin",
    "reward": "score/margin",
    "regression": "loss",
    "process": "accuracy",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="module", params=slow_except(["dpo", "kto", "reward", "process"], BEST))
def done(request: pytest.FixtureRequest, model: Path, place: Path) -> dict[str, Any]:
    """The keys of a finished run of each method."""
    best = BEST[request.param]
    keys = keys_of(request.param, model, place, eval__best=best, eval__every=2, checkpoint__every=3)
    train(keys)
    return keys


def mean_of_first_and_last(values: list[float]) -> tuple[float, float]:
    return sum(values[:2]) / 2, sum(values[-2:]) / 2


def test_it_learns_and_keeps_the_best(done: dict[str, Any]) -> None:
    out = Path(done["out"])
    first, last = mean_of_first_and_last(column(out, "loss"))
    assert last < 0.95 * first
    measured = {event["step"]: event[done["eval.best"]] for event in events(out, "eval")}
    assert list(measured) == [2, 4, 6]
    best = json.loads((out / "best" / "best.json").read_text())
    wanted = min if done["eval.best"] == "loss" else max
    assert best["value"] == wanted(measured.values()) == measured[best["step"]]


def test_transformers_reads_the_same_numbers(done: dict[str, Any]) -> None:
    """What the library's own classes say of the held-out rows is what the model in memory said at the end."""
    out = Path(done["out"])
    held_out = make({**done, "model": str(out / "model"), "out": None}).inputs.eval
    assert held_out is not None
    auto = AUTO.get(out.name, AutoModelForCausalLM)
    model = auto.from_pretrained(out / "model", dtype=torch.float64).eval()
    said = []
    for sample in held_out:
        with torch.no_grad():
            ids_T = torch.from_numpy(sample.ids_T)
            logits = model(input_ids=ids_T[None], use_cache=False).logits[0]
        at = sample.target_at_N
        if out.name == "process":
            said += logits[sample.read_at_R, 0].tolist()
        elif out.name in AUTO:
            said += logits.tolist()
        elif 1.0 in (sample.values.get("preference"), sample.values.get("label")):
            said.append(float(logits.log_softmax(-1)[at - 1, ids_T[at]].sum()))
    wanted = events(out, "eval")[-1]["score/mean" if out.name in AUTO else "logps/chosen"]
    assert sum(said) / len(said) == pytest.approx(wanted, rel=1e-6)


def test_show_takes_the_run_and_resume_goes_on(
    done: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(done["out"])
    taut.show(**done)
    assert done["method"] in capsys.readouterr().out
    longer = taut.resume(out, steps=8)
    assert longer.steps == 8
    assert column(out, "step") == list(range(1, 9))
    assert events(out, "resume")[-1]["from_step"] == 6


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("dpo", {}),
    "lora": ("dpo", {"lora.rank": 4}),
    "pissa": ("dpo", {"lora.rank": 4, "lora.init": "pissa"}),
}


@pytest.fixture(scope="module")
def wholes(model: Path, place: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (method, given) in RESUMED.items():
        out = str(place / "whole" / name)
        keys = keys_of(method, model, place, checkpoint__every=3, **given) | {"out": out}
        found[name] = keys | {"checkpoint.keep": 3, "optim.schedule": "constant"}
        train(found[name])
    return found


@pytest.mark.parametrize("name", RESUMED)
def test_three_and_three_steps_are_six(
    name: str, wholes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    keys, whole = wholes[name], Path(wholes[name]["out"])
    parts = {**keys, "out": str(tmp_path / "parts")}
    train({**parts, "steps": 3})
    out = train({**parts, "resume": True}).out
    assert column(out, "loss") == column(whole, "loss")
    assert largest_difference(weights(out / "model"), weights(whole / "model")) == 0.0
    mine, theirs = (read_checkpoint(p / "checkpoints" / "step-000006") for p in (out, whole))
    assert [key for key in theirs if not is_same(mine.get(key), theirs[key])] == []


def test_the_reference_of_pissa_is_the_base(
    wholes: dict[str, dict[str, Any]], tmp_path: Path, model: Path
) -> None:
    """At the start the two agree to the last bit, and throughout with the base as another model."""
    keys, whole = wholes["pissa"], Path(wholes["pissa"]["out"])
    assert column(whole, "rewards/margin")[0] == 0.0 != column(whole, "rewards/margin")[-1]
    beside = {"out": str(tmp_path / "beside"), "reference.model": str(model), "steps": 3}
    out = train({**keys, **beside}).out
    assert column(out, "loss") == pytest.approx(column(whole, "loss")[:3], abs=1e-9)


def test_a_reference_taken_from_the_trained_weights_is_seen(
    wholes: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is planted: what a checkpoint restores is copied into the reference."""
    keys, whole = wholes["full"], Path(wholes["full"]["out"])
    parts = {**keys, "out": str(tmp_path / "parts")}
    train({**parts, "steps": 3})
    real = lifecycle.begin

    def begin(built: Any, *rest: Any) -> None:
        real(built, *rest)
        (start,) = built.trainer.roles
        assert isinstance(start, Start)
        for number, parameter in enumerate(start._trained):
            start.get_buffer(f"tensor_{number}").copy_(parameter.detach())

    monkeypatch.setattr(lifecycle, "begin", begin)
    out = train({**parts, "resume": True}).out
    assert column(out, "loss")[:3] == column(whole, "loss")[:3]
    assert column(out, "loss")[3] != column(whole, "loss")[3]
    assert column(out, "rewards/margin")[3] == 0.0


def test_another_reference_is_refused_on_resume(model: Path, tmp_path: Path) -> None:
    beside = save_model(tmp_path / "beside", seed=1, dtype=torch.float64)
    keys = keys_of("dpo", model, tmp_path, reference__model=str(beside), steps=2)
    out = train({**keys, "checkpoint.every": 2}).out
    save_model(beside, seed=2, dtype=torch.float64)
    again = {**keys, "checkpoint.every": 2, "resume": True, "steps": 4}
    with pytest.raises(taut.ConfigError, match=r"reference model\.safetensors: other content"):
        train(again)
    save_model(beside, seed=1, dtype=torch.float64)
    kept = {**again, "reference.file": str(tmp_path / "kept")}
    train(kept)
    assert column(out, "step") == [1, 2, 3, 4]
    (warning,) = [e for e in events(out, "warning") if e["name"] == "exactness"]
    assert "reference.file: False then, True now" in warning["detail"]
    assert decisions(out)["reference"][1] == "named by reference.model"


SETTINGS = [
    (8192, PackPolicy()),
    (60, PackPolicy()),
    (150, PackPolicy(False)),
    (9, PackPolicy(True, 4)),
]


@pytest.mark.parametrize(
    ("name", "given"),
    [("lists", {"dpo.loss": ["aot", "bco"], "dpo.sft_weight": 0.5}), ("kto", {}), ("reward", {})],
)
def test_any_layout_gives_the_same_step(
    name: str, given: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """One optimizer step away from the start, so that policy and reference differ."""
    trainer = make(keys_of(name, model, tmp_path, **given)).trainer
    trainer.source, found = replace(trainer.source), []  # type: ignore[type-var]
    with torch.no_grad():
        for parameter in trainer.trained:
            parameter.mul_(1.01)
    for tokens, policy in SETTINGS:
        trainer.policy = policy
        trainer.budget = trainer.budget._replace(
            tokens_per_microbatch=tokens, min_saved_tokens=policy.min_saved_tokens
        )
        trainer.optimizer.zero_grad()
        report = add_gradients(trainer, trainer.source.prepare(1), 1, trainer.source.observed(1))
        gradient = {
            str(n): p.grad.clone() for n, p in enumerate(trainer.trained) if p.grad is not None
        }
        found.append((report, gradient))
    first, wanted = found[0]
    assert len(first.scored) < len(found[1][0].scored)
    size = max(float(value.abs().max()) for value in wanted.values())
    for report, gradient in found[1:]:
        assert report.loss == pytest.approx(first.loss, rel=1e-9)
        assert report.metrics == pytest.approx(first.metrics, rel=1e-7, abs=1e-9)
        assert largest_difference(gradient, wanted) < 1e-7 * size
