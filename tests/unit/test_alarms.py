"""Each alarm passes on a sound run and fires on a planted fault."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.jobs import make
from tests.models import parameters_of
from torch import Tensor, nn

from taut.alarms import PATIENCE, TOLERANCE, FirstStep, Spikes, Untouched, ids_to_compare
from taut.attention import select
from taut.attention.call import Call
from taut.attention.layout import Layout
from taut.errors import CheckFailed
from taut.loop import StepReport, train_step
from taut.parallel import Ranks


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def leaking(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=call.scale, enable_gqa=True
    )


def test_first_step_passes_once_on_a_sound_run(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    for step in (1, 2):
        train_step(built.job, step)
    (check,) = of_kind(events, "check")
    assert (check["name"], check["outcome"]) == ("first_step", "passed")
    assert check["value"] < 1e-9
    assert "6 samples" in check["detail"]


def test_first_step_fails_on_a_planted_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel changes after the proofs at load."""
    built, events = make(tmp_path)
    monkeypatch.setitem(select.BACKENDS, "reference", leaking)
    before = parameters_of(built.scorer)
    with pytest.raises(CheckFailed, match=r"step 1: the log-probs of .*train\.jsonl:\d+ differ by"):
        train_step(built.job, 1)
    assert [check["outcome"] for check in of_kind(events, "check")] == ["failed"]
    assert all(torch.equal(value, before[n]) for n, value in parameters_of(built.scorer).items())


def test_first_step_does_not_pass_on_what_is_no_number(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    first = built.job.alarms[0]
    assert isinstance(first, FirstStep)
    names = list(first.alone)
    first.alone = {**first.alone, names[0]: first.alone[names[0]] * torch.nan}
    with pytest.raises(CheckFailed, match="differ by inf"):
        train_step(built.job, 1)


@pytest.mark.parametrize(("num_targets", "is_sound"), [(2, True), (8, True), (32, False)])
def test_first_step_bears_rounding_of_short_answers(num_targets: int, is_sound: bool) -> None:
    """In bfloat16 two targets of a sound run may differ by 0.2 on average; over many that is a fault."""
    alarm = FirstStep({"a": torch.zeros(num_targets)}, TOLERANCE[torch.bfloat16])
    packed = SimpleNamespace(sample_ids=["a"], row_N=torch.zeros(num_targets, dtype=torch.long))
    scores = SimpleNamespace(logp_N=torch.full((num_targets,), 0.2))
    report: Any = SimpleNamespace(step=1, scored=[(packed, scores)])
    events: list[dict[str, Any]] = []
    job: Any = SimpleNamespace(
        ranks=Ranks(0, 1, torch.device("cpu")),
        emit=lambda kind, **fields: events.append({"kind": kind, **fields}),
    )
    with nullcontext() if is_sound else pytest.raises(CheckFailed, match=r"differ by 0\.2 nats"):
        alarm(report, job)
    assert [event["outcome"] for event in events] == ["passed" if is_sound else "failed"]


def test_first_step_leaves_later_steps_alone(tmp_path: Path) -> None:
    """A resumed run has other weights than the ones the comparison was made with."""
    built, events = make(tmp_path)
    with torch.no_grad():
        for parameter in built.job.trained:
            parameter.mul_(1.1)
    train_step(built.job, 2)
    assert not of_kind(events, "check")


def test_untouched_stops_at_a_tensor_outside_the_graph(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    stray = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    built.scorer.register_parameter("stray", stray)
    built.job.alarms = [Untouched.watching(built.scorer)]
    before = parameters_of(built.scorer)
    with pytest.raises(CheckFailed, match=r"step 1: 1 trainable tensors get no gradient \(stray\)"):
        train_step(built.job, 1)
    assert all(torch.equal(value, before[n]) for n, value in parameters_of(built.scorer).items())


def test_untouched_reports_a_gradient_that_is_always_zero(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    name, parameter = next(
        (n, p) for n, p in built.scorer.named_parameters() if "q_proj.weight" in n
    )
    parameter.register_hook(torch.zeros_like)
    for step in range(1, PATIENCE + 3):
        train_step(built.job, step)
    (warning,) = of_kind(events, "warning")
    assert (warning["name"], warning["tensors"]) == ("zero_gradient", [name])
    assert warning["step"] == PATIENCE


def test_untouched_does_not_count_steps_without_an_advantage(tmp_path: Path) -> None:
    """Where all rewards are equal no tensor has a gradient; steps with a signal say which never has."""
    built, events = make(tmp_path)
    name, parameter = next(
        (n, p) for n, p in built.scorer.named_parameters() if "q_proj.weight" in n
    )
    parameter.register_hook(torch.zeros_like)
    alarm, num_equal = Untouched.watching(built.scorer), 2 * PATIENCE

    def look(report: StepReport, job: Any) -> None:
        is_equal = report.step <= num_equal
        for trained in job.trained if is_equal else ():
            trained.grad.zero_()
        alarm(replace(report, metrics={"advantage/size": 0.0 if is_equal else 0.5}), job)

    built.job.alarms = [look]
    for step in range(1, num_equal + PATIENCE + 1):
        train_step(built.job, step)
    (warning,) = of_kind(events, "warning")
    assert (warning["tensors"], warning["step"]) == ([name], num_equal + PATIENCE)


def test_untouched_has_patience_with_adapters(tmp_path: Path) -> None:
    """LoRA's A has a gradient of exactly zero at step 1, because B is zero."""
    built, events = make(tmp_path, lora__rank=2)
    zeros = []
    real = built.job.alarms

    def look(report: StepReport, job: Any) -> None:
        zeros.append(sum(not p.grad.any() for p in job.trained))
        for alarm in real:
            alarm(report, job)

    built.job.alarms = [look]
    for step in range(1, PATIENCE + 2):
        train_step(built.job, step)
    assert zeros[0] > 0
    assert zeros[1] == 0
    assert not of_kind(events, "warning")


def report_of(norm: float) -> StepReport:
    return StepReport(1, 1.0, {}, 1, 1, 1, ["a.jsonl:3"], [], norm)


def test_spikes_reports_a_norm_far_above_the_recent_median(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    spikes = Spikes()
    spikes(report_of(500.0), built.job)  # the first norms have nothing to be compared with
    for norm in [1.0, 2.0, 1.5] * 4:
        spikes(report_of(norm), built.job)
    assert not of_kind(events, "warning")
    spikes(report_of(30.0), built.job)
    (warning,) = of_kind(events, "warning")
    assert (warning["name"], warning["sample_ids"]) == ("grad_norm_spike", ["a.jsonl:3"])
    assert "20 times" in warning["detail"]


def test_the_shortest_samples_are_compared_up_to_a_budget() -> None:
    sizes = [("long", 900), ("a", 10), ("b", 30), ("c", 20)]
    assert ids_to_compare(sizes, 60) == ["a", "c", "b"]
    assert ids_to_compare(sizes, 35) == ["a", "c"]
    assert ids_to_compare(sizes, 1) == ["a"]
