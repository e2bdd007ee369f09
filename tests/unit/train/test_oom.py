"""Memory that runs out: recognized, named, let go of; half the budget, once for each time, and again on resume."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import parameters_of
from tests.helpers.tiny_samples import nested_family
from tests.helpers.tiny_trainers import Fixed, make, singles
from torch import Tensor

from taut.config import from_mapping
from taut.data.packing import PackPolicy, pack
from taut.data.settings import BatchConfig
from taut.errors import ConfigError, OutOfMemory
from taut.evals.training_evals import HeldOut
from taut.train import trainer as loop
from taut.train.distributed import Ranks
from taut.train.oom import Fit, build_fit, is_out_of_memory
from taut.train.trainer import Trainer, run_steps
from taut.types import Sample, Tree

IMPOSSIBLE = 1 << 50
SAMPLES = nested_family(97)
TREES = [Tree((s,)) for s in SAMPLES]
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139 GiB."


class NoRoom(torch.autograd.Function):
    """The identity, and a backward that wants more memory than there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty(IMPOSSIBLE)


def in_backward() -> None:
    x: Any = NoRoom.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
    x.sum().backward()


def raised(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


OUT: dict[str, Callable[[], Any]] = {
    "torch on the CPU": lambda: torch.empty(IMPOSSIBLE),
    "torch in a backward": in_backward,
    "numpy": lambda: np.empty(IMPOSSIBLE),
    "Python": lambda: bytearray(1 << 60),
    "CUDA": raised(torch.OutOfMemoryError(CUDA)),
    "CUDA itself": raised(RuntimeError("CUDA error: out of memory")),
    "cuBLAS": raised(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    ),
    "C++": raised(RuntimeError("std::bad_alloc")),
}


def attempt(
    fit: Fit, act: Callable[[], Any], samples: list[Sample] = SAMPLES, *, atom: bool = False
) -> Any:
    packed = pack(samples, PackPolicy(False, 16))
    trees = [Tree(tuple(samples), is_atom=True)] if atom else [Tree((s,)) for s in samples]
    return fit.attempt(act, packed, trees, "step 7")


def failure(fit: Fit, **keys: Any) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        attempt(fit, raised(torch.OutOfMemoryError(CUDA)), **keys)
    return caught.value


@pytest.mark.parametrize("name", OUT)
def test_however_it_is_said_it_is_recognized(name: str) -> None:
    with pytest.raises(OutOfMemory, match="step 7: out of memory"):
        attempt(Fit(8192), OUT[name])


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught:
        attempt(Fit(8192), raised(RuntimeError("shapes do not fit")))
    assert not is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("bad_alloc"))


def test_the_message_names_samples_tokens_budget_and_what_would_fit() -> None:
    fit = Fit(8192)
    size = sum(s.num_tokens for s in SAMPLES)
    assert str(failure(fit)) == (
        f"step 7: out of memory (wanting 20.00 MiB more) in a micro-batch of {size} tokens (budget 8,192) of samples "
        "a, b, c, alone, d, inner; expected it to fit; "
        f"set batch.tokens_per_microbatch={size // 2}, or activation_checkpointing=true"
    )
    assert attempt(fit, lambda: 5, SAMPLES[:5]) == 5
    fits = sum(s.num_tokens for s in SAMPLES[:5])
    assert f"the largest that fit had {fits})" in str(failure(fit))
    assert f"set batch.tokens_per_microbatch={fits}, or" in str(failure(fit))


def test_many_samples_are_not_all_named() -> None:
    many = [replace(SAMPLES[0], id=f"s{number}") for number in range(20)]
    assert "s6, s7 and 12 more;" in str(failure(Fit(8192), samples=many))


@pytest.mark.parametrize(("num", "atom"), [(1, False), (2, True)])
def test_what_no_budget_divides_has_another_remedy(num: int, atom: bool) -> None:
    error = failure(Fit(8192, may_halve=True), samples=SAMPLES[:num], atom=atom)
    assert error.half is None
    size = sum(s.num_tokens for s in SAMPLES[:num])
    assert "activation_checkpointing=true, or data.max_length" in str(error)
    assert f"data.max_length below {size} in a new run" in str(error)
    recomputing = Fit(8192, recomputes=True)
    assert "activation_checkpointing" not in str(failure(recomputing, samples=SAMPLES[:num]))


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_nothing_of_the_attempt_is_kept(is_cyclic: bool) -> None:
    """Neither by the exception's frames, even where these name the exception itself."""
    kept: list[weakref.ref[Any]] = []

    def act() -> None:
        activation = torch.ones(1000, requires_grad=True) * 2
        kept.append(weakref.ref(activation))
        try:
            in_backward()
        except RuntimeError as error:
            again = error if is_cyclic else None
            raise again or error from None

    gc.disable()
    try:
        with pytest.raises(OutOfMemory) as caught:
            attempt(Fit(8192), act)
        assert [ref() for ref in kept] == [None]
        assert caught.value.__context__ is None
    finally:
        gc.enable()


def test_evaluations_do_not_say_what_a_step_has_room_for() -> None:
    fit = Fit(8192)
    with torch.no_grad():
        attempt(fit, lambda: None)
    assert fit.largest == 0


def test_half_is_half_of_the_smaller_of_budget_and_microbatch() -> None:
    size = sum(s.num_tokens for s in SAMPLES)
    assert failure(Fit(8192)).half == size // 2
    assert failure(Fit(size - 9)).half == (size - 9) // 2


def test_a_cut_is_in_force_from_its_step_on_and_told_once() -> None:
    fit = Fit(8192, may_halve=True)
    assert fit.begin(7) == []
    assert fit.halve(7, failure(fit))
    (cut,) = fit.begin(7)
    size = sum(s.num_tokens for s in SAMPLES)
    assert (cut.step, cut.tokens, cut.tokens_before, cut.configured) == (7, size // 2, 8192, 8192)
    assert cut.reason.startswith("out of memory")
    assert list(cut.sample_ids) == [s.id for s in SAMPLES]
    assert fit.begin(8) == []
    assert fit.tokens == size // 2


def test_without_leave_nothing_is_cut() -> None:
    fit = Fit(8192)
    assert not fit.halve(7, failure(fit))
    assert fit.begin(7) == []
    assert fit.tokens == 8192


def event(step: int, tokens: int, before: int, configured: int = 8192) -> dict[str, Any]:
    return {
        "kind": "budget",
        "step": step,
        "tokens": tokens,
        "tokens_before": before,
        "configured": configured,
        "reason": "",
        "sample_ids": ["a"],
    }


def test_cuts_are_made_again_at_their_steps() -> None:
    fit = Fit(8192)
    again = [event(9, 1000, 2000), event(5, 4000, 8192), event(9, 2000, 4000), event(5, 4000, 8192)]
    fit.replay([*again, event(3, 7, 100, configured=100)])
    found = []
    for step in range(3, 11):
        new = fit.begin(step)
        found.append((fit.tokens, [(cut.tokens_before, cut.tokens) for cut in new]))
    first, both = [(8192, 4000)], [(4000, 2000), (2000, 1000)]
    assert found == [
        (8192, []),
        (8192, []),
        (4000, first),
        *[(4000, [])] * 3,
        (1000, both),
        (1000, []),
    ]


def test_a_larger_cut_ahead_does_not_raise_a_smaller_budget() -> None:
    fit = Fit(8192, may_halve=True)
    fit.replay([event(9, 4000, 8192)])
    fit.halve(5, failure(fit))
    assert len(fit.begin(5)) == 1
    assert fit.begin(9) == []
    assert fit.tokens < 4000


@pytest.mark.parametrize(
    ("ranks", "one_sample", "message"),
    [(2, None, "2 ranks: "), (1, "has state", r"\(has state\): ")],
)
def test_halving_that_cannot_be_honored_is_refused(
    ranks: int, one_sample: str | None, message: str
) -> None:
    config = from_mapping(BatchConfig, {"halve_when_out_of_memory": True})
    many = Ranks(0, ranks, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=rf"^batch\.halve_when_out_of_memory=true and .*{message}"
    ):
        build_fit(config, many, one_sample=one_sample, recomputes=False)
    fit = build_fit(BatchConfig(), many, one_sample=one_sample, recomputes=False)
    assert (fit.tokens, fit.may_halve) == (8192, False)


def limited(monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[tuple[int, int]]:
    """Backwards of micro-batches of more tokens want what is not there; the (step, tokens) of all."""
    seen: list[tuple[int, int]] = []
    backward = loop.backward

    def act(trainer: Trainer, packed: Any, scales: Any, step: int, *rest: Any) -> Any:
        seen.append((step, packed.num_tokens))
        scores = backward(trainer, packed, scales, step, *rest)
        if packed.num_tokens > tokens:
            torch.empty(IMPOSSIBLE)
        return scores

    monkeypatch.setattr(loop, "backward", act)
    return seen


def trained(place: Path, **keys: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    built, events = make(place, **{"steps": 2, "batch__share_prefixes": False, **keys})
    built.trainer.source, built.trainer.monitors = Fixed(TREES), ()
    return built.trainer, events


def test_the_step_is_begun_again_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, told = trained(tmp_path / "whole")
    run_steps(whole)
    seen = limited(monkeypatch, 60)
    trainer, events = trained(tmp_path / "cut", batch__halve_when_out_of_memory=True)
    run_steps(trainer)
    cuts = [e for e in events if e["kind"] == "budget"]
    budgets = [8192, *(e["tokens"] for e in cuts)]
    failed = [tokens for step, tokens in seen if step == 1 and tokens > 60]
    assert [(e["step"], e["tokens_before"]) for e in cuts] == [(1, b) for b in budgets[:-1]]
    assert budgets[1:] == [min(b, f) // 2 for b, f in zip(budgets[:-1], failed, strict=True)]
    assert max(tokens for step, tokens in seen if step == 2) <= 60
    assert trainer.budget.tokens_per_microbatch == cuts[-1]["tokens"]
    steps = [[e for e in some if e["kind"] == "step"] for some in (told, events)]
    for left, right in zip(*steps, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-12)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-9)
        assert left["num_targets"] == right["num_targets"]
    for name, value in parameters_of(trainer.scorer).items():
        torch.testing.assert_close(value, parameters_of(whole.scorer)[name], rtol=0, atol=1e-8)


def test_a_sample_too_large_ends_it_with_the_gradients_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, events = trained(tmp_path, batch__halve_when_out_of_memory=True)
    limited(monkeypatch, 20)
    before = parameters_of(trainer.scorer)
    with pytest.raises(
        OutOfMemory, match=r"of the sample \w+; .* no token budget makes it smaller"
    ):
        run_steps(trainer)
    assert all(parameter.grad is None for parameter in trainer.trained)
    assert all(torch.equal(value, before[n]) for n, value in parameters_of(trainer.scorer).items())
    assert [e["kind"] for e in events] == ["budget"] * len(events)


def test_generators_stand_where_the_step_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model's own code draws is drawn again."""
    drawn: list[tuple[int, float]] = []
    limited(monkeypatch, 60)
    backward = loop.backward

    def drawing(trainer: Trainer, packed: Any, scales: Any, step: int, *rest: Any) -> Any:
        drawn.append((step, float(torch.rand(()))))
        return backward(trainer, packed, scales, step, *rest)

    monkeypatch.setattr(loop, "backward", drawing)
    trainer, events = trained(tmp_path, batch__halve_when_out_of_memory=True)
    run_steps(trainer)
    first = [value for step, value in drawn if step == 1]
    assert first.count(first[0]) == 1 + sum(e["kind"] == "budget" for e in events) > 1


def test_held_out_loss_that_does_not_fit_names_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained(tmp_path)
    monkeypatch.setattr(type(trainer.scorer), "forward", lambda *_, **__: torch.empty(IMPOSSIBLE))
    with pytest.raises(
        OutOfMemory, match=r"^held-out loss after step 4: out of memory .* samples \w+, "
    ):
        HeldOut(singles(SAMPLES), trainer)(4)
