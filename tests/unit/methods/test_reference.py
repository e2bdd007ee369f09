"""The reference is the policy as it was: put in its place and taken out again, bit for bit, whatever happens."""

from __future__ import annotations

import math
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import chats, save_model, sft, write_rows
from tests.helpers.judged_runs import keys_of, make
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.run_directories import is_same
from torch import Tensor

from taut.config import from_mapping
from taut.errors import ModelError, OutOfMemory
from taut.evals.training_evals import HeldOut
from taut.methods.reference import Start
from taut.methods.settings import STREAM, ReferenceConfig
from taut.run.setup import Built
from taut.train import distributed, random_state
from taut.train import trainer as loop
from taut.train.signals import Interrupt, Interrupts
from taut.train.trainer import Trainer, fill_streams, plan_trees, train_step
from taut.types import Packed

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora by rows": {"lora.rank": 2, "lora.train_token_rows": "always"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reference")
    save_model(place / "model", dtype=torch.float64)
    return place


def built_of(place: Path, **keys: Any) -> tuple[Built, Start]:
    built = make(keys_of("dpo", place / "model", place / "run", **keys))
    built.trainer.monitors = ()
    return built, start_of(built)


def start_of(built: Built) -> Start:
    (start,) = built.trainer.roles
    assert isinstance(start, Start)
    return start


@pytest.fixture(scope="module")
def trained(place: Path) -> Built:
    """A run after its first step."""
    built, _ = built_of(place)
    train_step(built.trainer, 1)
    return built


def bits(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.scorer.named_parameters()}


def require_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert [name for name in wanted if not is_same(found[name], wanted[name])] == []


def logps(trainer: Trainer) -> list[Tensor]:
    """What the reference says of the first step."""
    return [
        packed.streams[STREAM]
        for packed, _ in fill_streams(
            trainer, plan_trees(trainer, trainer.source.prepare(1)), "here"
        )
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_after_updates_the_reference_is_the_start_and_the_policy_is_as_it_was(
    kind: str, place: Path
) -> None:
    built, _ = built_of(place, **KINDS[kind])
    trainer = built.trainer
    before, first = logps(trainer), bits(trainer)
    with torch.no_grad(), trainer.compute():
        (packed, _), *_ = fill_streams(
            trainer, plan_trees(trainer, trainer.source.prepare(1)), "here"
        )
        assert torch.equal(trainer.scorer.eval()(packed).logp_N, before[0]), (
            "the policy is the start"
        )
    for step in (1, 2):
        train_step(trainer, step)
    after = bits(trainer)
    assert any(not is_same(after[name], first[name]) for name in first)
    trainer.scorer.train()
    for found, wanted in zip(logps(trainer), before, strict=True):
        assert torch.equal(found, wanted)
    assert trainer.scorer.training
    require_same(bits(trainer), after)


class Failure(Exception):
    pass


def fail_inside(start: Start, trainer: Trainer) -> None:
    before = bits(trainer)
    with start.active():
        moved = [name for name, value in bits(trainer).items() if not is_same(value, before[name])]
        assert moved, "the start is in its place"
        raise Failure


def test_the_policy_is_untouched_where_the_forward_fails(trained: Built) -> None:
    after = bits(trained.trainer)
    with pytest.raises(Failure):
        fail_inside(start_of(trained), trained.trainer)
    require_same(bits(trained.trainer), after)


def test_out_of_memory_in_the_reference_names_the_samples(
    trained: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, after = trained.trainer, bits(trained.trainer)

    def full(self: Start, packed: Any) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Start, "streams", full)
    message = r"^step 2: out of memory \(wanting 2.* of samples .*pairs\.jsonl:\d+#\d.* set batch"
    with pytest.raises(OutOfMemory, match=message) as caught:
        train_step(trainer, 2)
    assert len(caught.value.sample_ids) == 12, "six pairs"
    require_same(bits(trainer), after)


def test_a_step_is_begun_again_with_less_where_the_reference_runs_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = built_of(place, batch__halve_when_out_of_memory=True)
    trainer, real, sizes = built.trainer, Start.streams, []
    wanted = loop.add_gradients(trainer, trainer.source.prepare(1), 1).loss
    trainer.optimizer.zero_grad()

    def narrow(self: Start, packed: Packed) -> dict[str, Tensor]:
        sizes.append(packed.num_tokens)
        if packed.num_tokens > 100:
            raise torch.OutOfMemoryError("out of memory")
        return real(self, packed)

    monkeypatch.setattr(Start, "streams", narrow)
    trainer.random = random_state.capture(trainer.ranks.device)
    found = loop._step_within_memory(trainer, 1).loss
    assert sizes[0] > 100 >= max(sizes[2:])
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_signal_leaves_nothing_half_exchanged(
    trained: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an evaluation a signal is raised at once, but not between two tensors, either way."""
    trainer, real, calls = trained.trainer, distributed.swap, []
    after = bits(trainer)
    assert trained.inputs.eval is not None
    measure = HeldOut(trained.run.rows_of(trained.inputs.eval), trainer)

    def swap(one: Tensor, other: Tensor) -> None:
        real(one, other)
        calls.append(one)
        if len(calls) == stops[-1]:
            trainer.interrupts.notice(signal.SIGTERM, None)

    monkeypatch.setattr(distributed, "swap", swap)
    stops = [2 * len(after) - 1, len(after) + 1, len(after), 2, 1]
    while stops:
        calls.clear()
        with (
            Interrupts.watching() as trainer.interrupts,
            pytest.raises(Interrupt),
            trainer.interrupts.at_once(trainer.ranks),
        ):
            measure(1)
        assert len(calls) == 2 * len(after)
        require_same(bits(trainer), after)
        stops.pop()
    trainer.interrupts = Interrupts()


def test_an_adapter_leaves_its_dropout_behind(place: Path) -> None:
    """Trained with dropout before, it is compared without: policy and reference begin as one."""
    rows = write_rows(place / "chats.jsonl", chats(4))
    noisy = {"lora.rank": 2, "lora.dropout": 0.5, "steps": 1, "check": "off"}
    adapter = sft(place / "model", rows, place / "noisy", **noisy).out / "adapter"
    built, _ = built_of(place, lora__adapter=str(adapter))
    assert built.trainer.noise is None
    assert train_step(built.trainer, 1).loss == pytest.approx(math.log(2), abs=1e-12)
    assert ("lora.dropout", "0") in [decision[:2] for decision in built.decisions]


def test_another_model_has_to_be_made_for_samples_as_long(place: Path) -> None:
    save_model(place / "short", max_position_embeddings=16)
    with pytest.raises(
        ModelError, match=r"reference\.model=.*short has a context of 16 tokens and"
    ):
        built_of(place, reference__model=str(place / "short"))


@pytest.mark.parametrize(("every", "mix"), [(2, 0.25), (1, 1.0)])
def test_it_follows_the_policy_as_far_and_as_often_as_asked(
    every: int, mix: float, place: Path
) -> None:
    built, start = built_of(place, reference__update_every=every, reference__update_mix=mix)
    trainer = built.trainer
    held = dict(start.named_buffers())
    assert all(f"reference.{name}" in trainer.scorer.state_dict() for name in held), (
        "checkpoints hold it"
    )
    trained = [p for p in trainer.scorer.parameters() if p.requires_grad]
    wanted = {name: value.clone() for name, value in held.items()}
    for step in (1, 2, 3):
        train_step(trainer, step)
        if step % every == 0:
            for (name, old), policy in zip(wanted.items(), trained, strict=True):
                wanted[name] = (1 - mix) * old + mix * policy.detach()
        for name, value in held.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-15)
    if mix == 1.0:
        assert all(torch.equal(a, b) for a, b in zip(held.values(), trained, strict=True))


def test_one_that_stays_is_no_part_of_a_checkpoint(trained: Built) -> None:
    assert not [name for name in trained.scorer.state_dict() if "reference" in name]
    assert start_of(trained).state_dict() == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"update_every": 2, "model": "m"}, ErrorCode("update_every/model")),
        ({"update_every": 2, "file": "f"}, ErrorCode("update_every/file")),
        ({"update_mix": 0.5}, ErrorCode("update_mix/update_every")),
    ],
)
def test_settings_that_contradict_each_other(keys: dict[str, Any], message: str) -> None:
    with refused(message):
        from_mapping(ReferenceConfig, keys)


def test_a_reference_taken_from_the_policy_is_seen(
    trained: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of these tests fails where the fault is planted."""
    before = logps(trained.trainer)
    monkeypatch.setattr(Start, "active", lambda self: nullcontext())
    assert not torch.equal(logps(trained.trainer)[0], before[0])
