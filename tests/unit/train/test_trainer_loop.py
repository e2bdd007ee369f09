"""The step: one denominator per term, and nothing updated where a number is not finite."""

from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import parameters_of
from tests.helpers.tiny_samples import nested_family
from tests.helpers.tiny_trainers import Fixed, make, singles
from torch import Tensor

from taut.data.packing import pack
from taut.errors import NonFiniteError
from taut.evals.training_evals import HeldOut
from taut.losses.loss import Loss, Unit
from taut.losses.supervised import CrossEntropy
from taut.train import trainer as loop
from taut.train.distributed import Ranks
from taut.train.signals import Interrupt
from taut.train.trainer import (
    Scored,
    StepReport,
    Trainer,
    _gpu_memory,
    denominators,
    plan_microbatches,
    require_finite,
    run_steps,
    train_step,
)
from taut.types import LossSum, Packed, Sample, Scores, Tree

CPU = torch.device("cpu")
SAMPLES = nested_family(97)
TREES = [Tree((s,)) for s in SAMPLES]


@dataclass(frozen=True)
class TwoTerms(Loss):
    """Cross entropy per token, and the largest surprise of each sample per sequence; linear in neither."""

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"token": "token", "worst": "sequence"}

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        rows = range(packed.num_samples)
        worst = [(-scores.logp_N[packed.row_N == row]).max() for row in rows]
        total = -(packed.weight_N * scores.logp_N).sum()
        metrics = {"samples_seen": (torch.tensor(2.0 * len(rows)), torch.tensor(float(len(rows))))}
        return LossSum({"token": total, "worst": torch.stack(worst).sum()}, metrics)


def prepared(place: Path, **keys: Any) -> Trainer:
    """A trainer on TREES without monitors, clipping or update."""
    built, _ = make(place, **{"optim__clip_grad_norm": None, **keys})
    built.trainer.source, built.trainer.monitors = Fixed(TREES), ()
    return built.trainer


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients at the moment of the update."""
    seen: dict[str, Tensor] = {}

    def keep(report: Any, trainer: Trainer) -> None:
        seen.update(
            {n: p.grad.clone() for n, p in trainer.scorer.named_parameters() if p.grad is not None}
        )

    trainer.monitors = (keep,)
    train_step(trainer, 1)
    return seen


def test_the_loss_is_the_sum_over_all_targets_by_their_weight_sum(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    model: Any = copy.deepcopy(trainer.scorer.model)
    model.set_attn_implementation("eager")
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    with trainer.compute():
        for s in SAMPLES:
            every = (
                model(torch.from_numpy(s.ids_T)[None], use_cache=False).logits[0].log_softmax(-1)
            )
            at = torch.from_numpy(s.target_at_N)
            logp = every[at - 1, torch.from_numpy(s.ids_T)[at]]
            total = total - (torch.from_numpy(s.weight_N) * logp).sum()
            weight += float(s.weight_N.sum())
        (total / weight).backward()
    found = gradients(trainer)
    report = train_step(prepared(tmp_path / "again"), 1)
    assert report.loss == pytest.approx(float(total.detach()) / weight, rel=1e-12)
    assert report.num_targets == sum(s.num_targets for s in SAMPLES)
    assert report.num_tokens_unshared == sum(s.num_tokens for s in SAMPLES)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-9)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], p.grad, rtol=0, atol=1e-10 * float(norm))


@pytest.mark.parametrize("loss", [CrossEntropy(), TwoTerms()], ids=["linear", "two terms"])
def test_any_split_gives_the_same_step(loss: Any, tmp_path: Path) -> None:
    found = []
    for tokens in (8192, 40, 10):
        trainer = prepared(tmp_path / str(tokens), batch__tokens_per_microbatch=tokens)
        trainer.source = Fixed(TREES, loss)
        found.append((train_step(trainer, 1), parameters_of(trainer.scorer)))
    for report, after in found[1:]:
        assert len(report.scored) > len(found[0][0].scored)
        assert report.loss == pytest.approx(found[0][0].loss, rel=1e-12)
        assert report.grad_norm == pytest.approx(found[0][0].grad_norm, rel=1e-9)
        assert report.metrics == found[0][0].metrics
        for name, value in after.items():
            torch.testing.assert_close(value, found[0][1][name], rtol=0, atol=1e-8)


def test_every_term_has_its_own_denominator(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    trainer.source = Fixed(TREES, TwoTerms())
    report = train_step(trainer, 1)
    (scored,) = report.scored
    sums = TwoTerms()(scored.scores, scored.packed).terms
    weight = sum(float(s.weight_N.sum()) for s in SAMPLES)
    assert denominators(TwoTerms(), [scored.packed], trainer.ranks) == pytest.approx(
        {"token": weight, "worst": 6}
    )
    assert report.loss == pytest.approx(float(sums["token"]) / weight + float(sums["worst"]) / 6)
    assert report.metrics == {"samples_seen": 2.0}


def test_a_step_without_trees_changes_no_weight_and_no_state_of_the_optimizer(
    tmp_path: Path,
) -> None:
    trainer = prepared(tmp_path, optim__weight_decay=0.1, optim__schedule="linear")
    train_step(trainer, 1)
    before, state = (
        parameters_of(trainer.scorer),
        copy.deepcopy(trainer.optimizer.state_dict()["state"]),
    )
    trainer.source, trainer.loss = Fixed([]), 0.5
    trainer.plans.clear()  # made with the other source
    trainer.done = trainer.followed = 1
    told: list[dict[str, Any]] = []
    trainer.emit = lambda kind, **fields: told.append(fields)
    trainer.num_steps = 2
    run_steps(trainer)
    for name, value in parameters_of(trainer.scorer).items():
        assert torch.equal(value, before[name])
    for key, value in trainer.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value[name], state[key][name]) for name in value)
    assert (told[0]["skipped"], told[0]["grad_norm"], told[0]["num_targets"]) == (1.0, 0.0, 0)
    assert told[0]["learning_rate"] == trainer.learning_rate(2)
    assert (trainer.done, trainer.loss) == (2, 0.5), "the loss of the last step that has one"


def test_the_held_out_loss_of_the_same_samples_is_that_of_the_step(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, batch__tokens_per_microbatch=40)
    events: list[dict[str, Any]] = []
    trainer.emit = lambda kind, **fields: events.append(fields)
    trainer.source = Fixed(TREES, TwoTerms())
    held_out = HeldOut(singles(SAMPLES), trainer)(0)["loss"]
    assert held_out == pytest.approx(train_step(trainer, 1).loss, rel=1e-12)
    assert events[0]["num_samples"] == len(SAMPLES)


def test_steps_on_a_gpu_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 7)
    assert _gpu_memory(torch.device("cuda")) == {"memory_bytes": 7}
    assert _gpu_memory(torch.device("cpu")) == {}


def test_a_rank_with_fewer_microbatches_runs_ones_that_count_for_nothing(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    trainer.budget = trainer.budget._replace(num_ranks=2, one_sample=True)
    shares = []
    for rank in range(2):
        trainer.ranks = Ranks(rank, 2, CPU)
        shares.append(plan_microbatches(TREES[:3], trainer))
    assert sorted([is_real for _, is_real in share] for share in shares) == [
        [True, False],
        [True, True],
    ]
    (filler,) = (packed for share in shares for packed, is_real in share if not is_real)
    assert filler.num_tokens == min(s.num_tokens for s in SAMPLES[:3])


def poison(trainer: Trainer, sample: Sample) -> None:
    """A token of one sample embeds to NaN."""
    token = next(
        int(t) for t in sample.ids_T if all(t not in s.ids_T for s in SAMPLES if s is not sample)
    )
    with torch.no_grad():
        trainer.scorer.model.get_input_embeddings().weight[token] = torch.nan  # type: ignore[operator]


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_sample(
    tmp_path: Path,
) -> None:
    trainer = prepared(tmp_path, architecture="llama")
    poison(trainer, SAMPLES[3])
    before = parameters_of(trainer.scorer)
    with pytest.raises(
        NonFiniteError,
        match=r"step 1: the loss is nan; the weights are those of step 0; samples with .*: alone; ",
    ):
        train_step(trainer, 1)
    for name, value in parameters_of(trainer.scorer).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert not any(state["step"] for state in trainer.optimizer.state.values())


def test_a_divergence_that_is_not_finite_names_the_sample(tmp_path: Path) -> None:
    """A teacher's number may be the cause, where the student's are finite."""
    packed = pack(SAMPLES)
    logp_N, is_last_N = torch.zeros(packed.num_targets), packed.row_N == packed.num_samples - 1
    scores = Scores(logp_N, divergence_N=logp_N.masked_fill(is_last_N, torch.inf))
    report = StepReport(4, torch.inf, {}, 1, 1, 1, ["others"], [Scored(packed, scores)])
    with pytest.raises(NonFiniteError, match=f"not finite: {packed.sample_ids[-1]}; "):
        require_finite(report.loss, "loss", report, prepared(tmp_path))


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, optim__clip_grad_norm=1.0)
    trainer.trained[3].register_hook(lambda grad: grad * torch.inf)
    before = parameters_of(trainer.scorer)
    with pytest.raises(
        NonFiniteError, match=r"step 2: the gradient norm is (nan|inf); .*the step's samples: a, b"
    ):
        train_step(trainer, 2)
    assert all(
        torch.equal(value, before[name]) for name, value in parameters_of(trainer.scorer).items()
    )
    assert not any(state["step"] for state in trainer.optimizer.state.values())


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    free = gradients(prepared(tmp_path / "free"))
    bound = gradients(prepared(tmp_path / "bound", optim__clip_grad_norm=0.5))
    norm = torch.stack([grad.norm() for grad in free.values()]).norm()
    for name, grad in free.items():
        torch.testing.assert_close(bound[name], grad * (0.5 / norm), rtol=1e-5, atol=1e-12)


def test_train_tells_each_step_and_calls_what_follows(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    trainer = built.trainer
    trainer.done, trainer.followed, trainer.num_steps = 2, 2, 5
    called: list[int] = []
    run_steps(trainer, after_step=[called.append])
    assert called == [3, 4, 5]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == [3, 4, 5]
    assert (trainer.done, trainer.followed, trainer.loss) == (5, 5, steps[-1]["loss"])
    assert steps[0]["learning_rate"] == trainer.optimizer.param_groups[0]["lr"]


def test_an_interrupted_step_is_none_that_monitors_remember(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes after the last micro-batch: the step will be taken again."""
    trainer = prepared(tmp_path)
    seen: list[int] = []
    trainer.monitors = [lambda report, trainer: seen.append(report.step)]

    summarize = loop.summarize

    def with_signal(*given: Any) -> loop.StepReport:
        trainer.interrupts.notice(signal.SIGTERM, None)
        return summarize(*given)

    monkeypatch.setattr(loop, "summarize", with_signal)
    with pytest.raises(Interrupt):
        train_step(trainer, 1)
    assert not seen
