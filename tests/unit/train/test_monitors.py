"""Each alarm passes on a sound run and fires on a planted fault."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import parameters_of
from tests.helpers.tiny_trainers import make
from torch import Tensor, nn

from taut.attention.layout import Call, Layout
from taut.errors import CheckFailed, DivergenceError
from taut.losses.loss import Loss
from taut.losses.policy import PolicyGradient
from taut.losses.preference import DpoLoss
from taut.losses.supervised import CrossEntropy
from taut.models import attention_backends
from taut.train.distributed import Ranks
from taut.train.monitors import (
    PATIENCE,
    TOLERANCE,
    Divergence,
    FirstStep,
    Spikes,
    Untouched,
    ids_to_compare,
)
from taut.train.settings import LossMonitorConfig
from taut.train.trainer import StepReport, train_step


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def leaking(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=call.scale, enable_gqa=True
    )


def test_first_step_passes_once_on_a_sound_run(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    for step in (1, 2):
        train_step(built.trainer, step)
    (check,) = of_kind(events, "check")
    assert (check["name"], check["outcome"]) == ("first_step", "passed")
    assert check["value"] < 1e-9
    assert "6 samples" in check["detail"]


def test_first_step_fails_on_a_planted_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel changes after the proofs at load."""
    built, events = make(tmp_path)
    monkeypatch.setitem(attention_backends.BACKENDS, "reference", leaking)
    before = parameters_of(built.scorer)
    with pytest.raises(CheckFailed, match=r"step 1: the logprobs of .*train\.jsonl:\d+ differ by"):
        train_step(built.trainer, 1)
    assert [check["outcome"] for check in of_kind(events, "check")] == ["failed"]
    assert all(torch.equal(value, before[n]) for n, value in parameters_of(built.scorer).items())


def test_first_step_does_not_pass_on_what_is_no_number(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    first = built.trainer.monitors[0]
    assert isinstance(first, FirstStep)
    names = list(first.alone)
    first.alone = {**first.alone, names[0]: first.alone[names[0]] * torch.nan}
    with pytest.raises(CheckFailed, match="differ by inf"):
        train_step(built.trainer, 1)


@pytest.mark.parametrize(("num_targets", "is_sound"), [(2, True), (8, True), (32, False)])
def test_first_step_bears_rounding_of_short_answers(num_targets: int, is_sound: bool) -> None:
    """In bfloat16 two targets of a sound run may differ by 0.2 on average; over many that is a fault."""
    alarm = FirstStep({"a": torch.zeros(num_targets)}, TOLERANCE[torch.bfloat16])
    packed = SimpleNamespace(sample_ids=["a"], row_N=torch.zeros(num_targets, dtype=torch.long))
    scores = SimpleNamespace(logp_N=torch.full((num_targets,), 0.2))
    report: Any = SimpleNamespace(step=1, scored=[(packed, scores)])
    events: list[dict[str, Any]] = []
    trainer: Any = SimpleNamespace(
        ranks=Ranks(0, 1, torch.device("cpu")),
        emit=lambda kind, **fields: events.append({"kind": kind, **fields}),
    )
    with nullcontext() if is_sound else pytest.raises(CheckFailed, match=r"differ by 0\.2 nats"):
        alarm(report, trainer)
    assert [event["outcome"] for event in events] == ["passed" if is_sound else "failed"]


def test_first_step_leaves_later_steps_alone(tmp_path: Path) -> None:
    """A resumed run has other weights than the ones the comparison was made with."""
    built, events = make(tmp_path)
    with torch.no_grad():
        for parameter in built.trainer.trained:
            parameter.mul_(1.1)
    train_step(built.trainer, 2)
    assert not of_kind(events, "check")


def test_untouched_stops_at_a_tensor_outside_the_graph(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    stray = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    built.scorer.register_parameter("stray", stray)
    built.trainer.monitors = [Untouched.watching(built.scorer)]
    before = parameters_of(built.scorer)
    with pytest.raises(CheckFailed, match=r"step 1: 1 trainable tensors get no gradient \(stray\)"):
        train_step(built.trainer, 1)
    assert all(torch.equal(value, before[n]) for n, value in parameters_of(built.scorer).items())


def test_untouched_reports_a_gradient_that_is_always_zero(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    name, parameter = next(
        (n, p) for n, p in built.scorer.named_parameters() if "q_proj.weight" in n
    )
    parameter.register_hook(torch.zeros_like)
    for step in range(1, PATIENCE + 3):
        train_step(built.trainer, step)
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

    def look(report: StepReport, trainer: Any) -> None:
        is_equal = report.step <= num_equal
        for trained in trainer.trained if is_equal else ():
            trained.grad.zero_()
        packed: Any = SimpleNamespace(
            streams={"advantage_N": torch.full((3,), float(not is_equal))}
        )
        source = SimpleNamespace(loss=PolicyGradient())
        seen: Any = SimpleNamespace(
            source=source,
            ranks=trainer.ranks,
            emit=trainer.emit,
            scorer=trainer.scorer,
            optimizer=trainer.optimizer,
        )
        alarm(replace(report, scored=[(packed, None)]), seen)

    built.trainer.monitors = [look]
    for step in range(1, num_equal + PATIENCE + 1):
        train_step(built.trainer, step)
    (warning,) = of_kind(events, "warning")
    assert (warning["tensors"], warning["step"]) == ([name], num_equal + PATIENCE)


def test_untouched_has_patience_with_adapters(tmp_path: Path) -> None:
    """LoRA's A has a gradient of exactly zero at step 1, because B is zero."""
    built, events = make(tmp_path, lora__rank=2)
    zeros = []
    real = built.trainer.monitors

    def look(report: StepReport, trainer: Any) -> None:
        zeros.append(sum(not p.grad.any() for p in trainer.trained))
        for alarm in real:
            alarm(report, trainer)

    built.trainer.monitors = [look]
    for step in range(1, PATIENCE + 2):
        train_step(built.trainer, step)
    assert zeros[0] > 0
    assert zeros[1] == 0
    assert not of_kind(events, "warning")


def test_untouched_does_not_count_steps_in_which_a_critic_alone_learns(tmp_path: Path) -> None:
    """The policy's B stays zero meanwhile, and with it the gradient of A."""
    built, events = make(tmp_path, lora__rank=2)
    for group in built.trainer.optimizer.param_groups:
        group["waits"] = PATIENCE + 1
    for step in range(1, 2 * PATIENCE + 3):
        train_step(built.trainer, step)
    assert not of_kind(events, "warning")


def report_of(norm: float) -> StepReport:
    return StepReport(1, 1.0, {}, 1, 1, 1, ["a.jsonl:3"], [], norm)


def test_spikes_reports_a_norm_far_above_the_recent_median(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    spikes = Spikes()
    spikes(report_of(500.0), built.trainer)  # the first norms have nothing to be compared with
    for norm in [1.0, 2.0, 1.5] * 4:
        spikes(report_of(norm), built.trainer)
    assert not of_kind(events, "warning")
    spikes(report_of(30.0), built.trainer)
    (warning,) = of_kind(events, "warning")
    assert (warning["name"], warning["sample_ids"]) == ("grad_norm_spike", ["a.jsonl:3"])
    assert "20 times" in warning["detail"]


def test_spikes_bears_a_median_of_zero() -> None:
    """Most recent gradients of a hinge may be exactly zero."""
    spikes, trainer = Spikes(), watched(CrossEntropy(), events := [])
    for norm in [0.0] * 12 + [1.0]:
        spikes(report_of(norm), trainer)
    assert not events


def watched(loss: Loss, events: list[dict[str, Any]]) -> Any:
    """As much of a trainer as an alarm looks at, with a learning rate of 10."""
    return SimpleNamespace(
        source=SimpleNamespace(loss=loss),
        ranks=Ranks(0, 1, torch.device("cpu")),
        learning_rate=lambda step: 10.0,
        emit=lambda kind, **fields: events.append({"kind": kind, **fields}),
    )


def follow(
    losses: list[float],
    norms: list[float] | None = None,
    *,
    loss: Loss = CrossEntropy(),  # noqa: B008 (frozen)
    samples: int = 8,
    advantages: float | None = None,
    **config: Any,
) -> tuple[Divergence, list[dict[str, Any]], str | None]:
    """The alarm after a curve, what it reported, and what it stopped the run with."""
    events: list[dict[str, Any]] = []
    alarm, trainer = Divergence(LossMonitorConfig(**config)), watched(loss, events)
    streams = {} if advantages is None else {"advantage_N": torch.full((3,), advantages)}
    scored: Any = [(SimpleNamespace(streams=streams), None)]
    for step, value in enumerate(losses, start=1):
        norm = 1.0 if norms is None else norms[step - 1]
        report = StepReport(step, value, {}, 1, 1, 1, ["a"] * samples, scored, norm)
        try:
            alarm(report, trainer)
        except DivergenceError as error:
            return alarm, events, str(error)
    return alarm, events, None


def test_a_loss_that_stays_high_is_reported_and_then_stops_the_run() -> None:
    _, events, stopped = follow([10.8] + [7061.0] * 30)
    (warning,) = events
    assert (warning["name"], warning["step"]) == ("divergence", 4)
    assert "above 32.4 in 3 of the last 4 steps" in warning["detail"]
    assert stopped is not None
    assert stopped.startswith("step 12: training has diverged: the loss was above 32.4 in 11 of")
    assert stopped.endswith("with loss_monitor.loss_steps=0 it only warns")
    for remedy in ("optim.learning_rate (here 10)", "optim.warmup_steps", "optim.clip_grad_norm"):
        assert remedy in warning["detail"]
        assert remedy in stopped


def test_a_loss_that_jumps_between_high_and_low_stops_the_run() -> None:
    assert follow([0.69] + [5000.0, 900.0, 800.0, 0.0] * 10)[2] is not None
    assert follow([0.69] + [5000.0, 0.1, 0.1] * 10)[2] is None


def test_what_was_reported_holds_until_it_is_over() -> None:
    curve = [1.0] + [9.0] * 4
    assert "in 4 of the last 5 steps" in (follow(curve)[0].found or "")
    assert follow([*curve, 1.0])[0].found is not None
    assert follow([*curve, 1.0])[0].is_suspected
    alarm, events, _ = follow([*curve, 1.0, 1.0, 1.0, 9.0, 9.0])
    assert alarm.found is None
    assert alarm.is_suspected
    assert len(events) == 1
    assert not follow([*curve, 1.0, 1.0, 1.0])[0].is_suspected


@pytest.mark.parametrize(
    ("losses", "samples"),
    [
        ([10.8 - 0.1 * step for step in range(60)], 8),  # it learns
        ([10.8] + [40.0, 40.0, 9.0] * 2 + [9.0] * 30, 8),  # it is worse for a while
        ([0.001] + [1.5] * 40, 8),  # a model that knew the first rows
        ([0.01, 0.02, 1.9, 0.5, 1.2, 0.3, 1.0] + [2.8, 0.4, 3.5] * 20, 1),  # samples one by one
        ([-0.2, 0.6, -0.4] * 20, 8),  # a loss that is not bounded by 0
    ],
)
def test_an_honest_loss_is_left_alone(losses: list[float], samples: int) -> None:
    _, events, stopped = follow(losses, samples=samples)
    assert (events, stopped) == ([], None)


def test_a_bad_second_step_does_not_raise_the_limit_of_a_small_batch() -> None:
    alarm, _, stopped = follow([10.8] + [7000.0] * 40, samples=1)
    assert alarm.limit == pytest.approx(3 * 3 * 10.8)
    assert stopped is not None


def test_a_gradient_of_exactly_zero_is_reported_and_then_stops_the_run() -> None:
    _, events, stopped = follow([10.8, *[6.2] * 29], [1.0, *[0.0] * 29])
    assert [event["step"] for event in events] == [3]
    assert stopped is not None
    assert stopped.startswith("step 6: training has diverged: the gradient was exactly zero in the")
    assert follow([6.2] * 30, [*[0.0] * 4, 1.0] * 6)[2] is None


@pytest.mark.parametrize(
    ("loss", "value", "advantages", "stops"),
    [
        (DpoLoss(loss="hinge"), 0.0, None, False),  # all pairs have their margin
        (DpoLoss(loss="hinge"), 0.4, None, True),
        (DpoLoss(), 0.0, None, True),  # x is above 100: a thousand nats of log-ratio
        (PolicyGradient(), 0.0, 0.0, False),  # all rewards are equal
        (PolicyGradient(), 0.0, 0.5, True),
    ],
)
def test_which_gradients_may_be_zero(
    loss: Loss, value: float, advantages: float | None, stops: bool
) -> None:
    stopped = follow([value] * 20, [0.0] * 20, loss=loss, advantages=advantages)[2]
    assert (stopped is not None) is stops


def test_an_advantage_on_another_rank_counts() -> None:
    trainer = watched(PolicyGradient(), [])
    trainer.ranks = SimpleNamespace(max=lambda values: [1.0])
    alarm = Divergence(LossMonitorConfig())
    alarm(StepReport(1, 0.0, {}, 1, 1, 1, [], [], 0.0), trainer)
    assert alarm.zero_steps == 1


@pytest.mark.parametrize(
    ("loss", "norms", "advantages", "has_learned"),
    [
        (CrossEntropy(), [0.0] * 3, None, False),
        (CrossEntropy(), [0.0, 1.0, 0.0], None, True),
        (DpoLoss(loss="hinge"), [0.0] * 3, None, False),  # satisfied from the start
        (PolicyGradient(), [0.0] * 3, 0.0, False),
        (PolicyGradient(), [1.0] * 3, 0.0, False),  # of the critic, or of a bonus for entropy
        (PolicyGradient(), [1.0] * 3, 0.5, True),
    ],
)
def test_a_run_has_learned_something_once_a_step_had_a_gradient(
    loss: Loss, norms: list[float], advantages: float | None, has_learned: bool
) -> None:
    alarm, *_ = follow([0.0] * 3, norms, loss=loss, advantages=advantages)
    assert alarm.has_learned is has_learned
    older = {name: value for name, value in alarm.remember().items() if name != "has_learned"}
    other = Divergence(LossMonitorConfig())
    other.recall(older)
    assert other.has_learned, "a checkpoint that does not say is no ground for an alarm"


def test_the_loss_of_policy_gradients_has_no_limit() -> None:
    _, events, stopped = follow([0.0] + [50.0] * 40, loss=PolicyGradient(), advantages=0.5)
    assert (events, stopped) == ([], None)


def test_divergence_may_be_made_to_warn_only() -> None:
    curve, norms = [1.0] + [90.0] * 60, [1.0] * 31 + [0.0] * 30
    alarm, events, stopped = follow(curve, norms, loss_steps=0, zero_gradient_steps=0)
    assert stopped is None
    assert len(events) == 1
    assert alarm.found == "the gradient was exactly zero in the last 30 steps (the loss is 90)"


def test_divergence_goes_on_from_what_it_remembers() -> None:
    curve = [1.0] + [90.0] * 11
    alarm, _, _ = follow(curve[:8])
    remembered = json.loads(json.dumps(alarm.remember()))
    other = Divergence(LossMonitorConfig())
    other.recall(remembered)
    assert other == alarm
    for step in range(9, 12):
        other(StepReport(step, 90.0, {}, 1, 1, 1, ["a"], [], 1.0), watched(CrossEntropy(), []))
    with pytest.raises(DivergenceError, match=r"^step 12: .* in 11 of the last 12 steps"):
        other(StepReport(12, 90.0, {}, 1, 1, 1, ["a"], [], 1.0), watched(CrossEntropy(), []))


def test_the_shortest_samples_are_compared_up_to_a_budget() -> None:
    sizes = [("long", 900), ("a", 10), ("b", 30), ("c", 20)]
    assert ids_to_compare(sizes, 60) == ["a", "c", "b"]
    assert ids_to_compare(sizes, 35) == ["a", "c"]
    assert ids_to_compare(sizes, 1) == ["a"]
