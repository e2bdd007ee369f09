"""Training on the device against the same on the CPU: every loss with its gradient, every method's run, LoRA, resume.

The reference is float64 on the CPU. The bounds, for models whose weights are random and large:

    float32     losses within 2e-3 (relative), gradients within 2e-2 (norm of the difference over the norm): the
                products of flex attention may be TF32
    bfloat16    losses within 5e-2, gradients within 3e-1 (a ratio within rounding of its clip is on either side of it)

On the CPU a part of this is slow, and runs with the slow tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.needs import MODELS, needs, whole_run

needs(*MODELS)

# ruff: noqa: E402  # what the packages are needed for

from tests.helpers import judged_runs, online_runs
from tests.helpers.chat_runs import QUIET, chats, column, events, save_model, sft, write_rows
from tests.helpers.preference_rows import answers_for, groups_of, packs, ready, scales
from tests.helpers.slow_cases import slow_except
from tests.invariants.test_losses import scorer_for
from torch import Tensor

import taut
from taut.data.packing import PackPolicy
from taut.losses.loss import Loss
from taut.losses.registry import LOSSES
from taut.methods import METHODS
from taut.models import architecture, compiled_layers
from taut.models.attention_backends import select
from taut.models.load import set_attention
from taut.models.precision import backward_context, compute_context
from taut.models.scorer import Scorer
from taut.train import distributed
from taut.types import Packed, Scores

LOSS = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
GRADIENT = {torch.float32: 2e-2, torch.bfloat16: 3e-1}
CPU = torch.device("cpu")


# Losses


def step(
    scorer: Scorer, loss: Loss, packed: Packed, device: torch.device, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a micro-batch and every gradient, computed in ``dtype``."""

    def score(packed: Packed) -> Scores:
        with compute_context(dtype, device):
            scores: Scores = scorer(packed, wants=loss.wants)
            return scores

    scorer.zero_grad()
    by = scales(loss, [packed])
    (whole,) = ready(loss, [packed], lambda packed: on_host(score(packed)))
    terms = loss(score(whole), whole.to(device)).terms
    total = torch.stack([by[term] * value for term, value in terms.items()]).sum()
    with backward_context(dtype):
        total.backward()
    named = scorer.named_parameters()
    return float(total.detach()), {
        name: p.grad.double().cpu() for name, p in named if p.grad is not None
    }


def on_host(scores: Scores) -> Scores:
    """Without gradient, as statistics of the step are made of them."""
    return Scores(*(None if value is None else value.detach().cpu() for value in scores))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", slow_except([torch.float32], list(LOSS)), ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradient(device: torch.device, name: str, dtype: torch.dtype) -> None:
    loss = LOSSES[name]
    (packed,) = [packs(groups_of(answers_for(loss)), PackPolicy(min_saved_tokens=1))]
    scorer = scorer_for(loss, "qwen3")  # heads of 16, which every kernel takes
    expected, wanted = step(scorer, loss, packed, CPU, torch.float64)
    scorer = scorer.float().to(device)
    set_attention(
        architecture.unwrap(scorer.model),
        select("auto", device, dtype, scorer.model.config).implementation,
    )
    found, gradients = step(scorer, loss, packed, device, dtype)
    assert found == pytest.approx(expected, rel=LOSS[dtype], abs=LOSS[dtype])
    assert gradients.keys() == wanted.keys()
    assert difference(list(gradients.values()), list(wanted.values())) < GRADIENT[dtype]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm, of all gradients together."""
    gap = sum(float((a - b).norm()) ** 2 for a, b in zip(found, expected, strict=True))
    whole = sum(float(b.norm()) ** 2 for b in expected)
    return float((gap / whole) ** 0.5)


# Runs


FIXED: dict[str, Any] = {"check": "off", "contract.prompts": 0, "steps": 3}


FROM_ROWS = [name for name in METHODS if name not in online_runs.METHODS_KEYS]


def keys_of(method: str, place: Path, **keys: Any) -> dict[str, Any]:
    """A small run of a method; rows and models in ``place``."""
    if method in online_runs.METHODS_KEYS:
        return online_runs.keys_of(method, online_runs.save_models(place), place) | FIXED | keys
    model = save_model(place / "model", "llama", head_dim=16)
    if method in judged_runs.METHODS:
        return judged_runs.keys_of(method, model, place / "rows") | FIXED | keys
    train = str(write_rows(place / "train.jsonl", chats(24)))
    given = {"method": method, "model": str(model), "data.train": train, **QUIET, **FIXED}
    if method == "distill":
        given["distill.teacher"] = str(save_model(place / "teacher", "llama", head_dim=16, seed=1))
    return {**given, **keys}


def run(method: str, place: Path, **keys: Any) -> Path:
    """The directory of a finished run."""
    out = place / "out"
    result: taut.Result = getattr(taut, method)(**keys_of(method, place, **keys, out=str(out)))
    return result.out


@whole_run
@pytest.mark.parametrize("method", slow_except(["sft", "dpo"], FROM_ROWS))
def test_every_method_has_the_losses_of_the_cpu(
    device: torch.device, method: str, tmp_path: Path
) -> None:
    """Three steps each. The later ones show the updates: the first of AdamW follow the signs of gradients, which
    rounding to 16 bit may change, so its bound is wider.
    """
    expected = column(run(method, tmp_path / "cpu"), "loss")
    for dtype, limit in (("float32", 2e-3), ("bfloat16", 1e-1)):
        out = run(method, tmp_path / dtype, dtype=dtype, device=device.type)
        assert column(out, "loss") == pytest.approx(expected, rel=limit, abs=limit), dtype


@whole_run
@pytest.mark.parametrize("dtype", slow_except(["float32"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("method", slow_except(["grpo"], list(online_runs.METHODS_KEYS)))
def test_what_the_engine_generates_is_trained_on(
    device: torch.device, method: str, dtype: str, tmp_path: Path
) -> None:
    """The first step compares the engine's logprobs with the scorer's and stops the run where they differ."""
    out = run(method, tmp_path, dtype=dtype, device=device.type)
    assert len(column(out, "loss")) == 3
    assert len(events(out, "rollout")) == (
        2 if method == "ppo" else 3
    )  # PPO takes two steps of each


# Adapters, checkpoints


def train_rows(place: Path) -> tuple[Path, Path]:
    return save_model(place / "model", "llama", head_dim=16), write_rows(
        place / "train.jsonl", chats(24)
    )


@whole_run
@pytest.mark.parametrize(
    ("dtype", "limit"),
    slow_except([("float32", 2e-3)], [("float32", 2e-3), ("bfloat16", 5e-2)]),
)
def test_adapters_train_as_on_the_cpu(
    device: torch.device, dtype: str, limit: float, tmp_path: Path
) -> None:
    model, train = train_rows(tmp_path)
    keys: dict[str, Any] = {"check": "off", "contract__prompts": 0, "steps": 4, "lora__rank": 4}
    on_cpu = sft(model, train, tmp_path / "cpu", **keys)
    there = sft(model, train, tmp_path / "there", **keys, dtype=dtype, device=device.type)
    assert column(there.out, "loss") == pytest.approx(column(on_cpu.out, "loss"), rel=limit)


@whole_run
@pytest.mark.parametrize(
    "keys",
    slow_except([{"lora__rank": 4}], [{}, {"lora__rank": 4}, {"activation_checkpointing": True}]),
    ids=["full", "lora", "recomputed"],
)
def test_a_run_that_is_continued_is_the_run(
    device: torch.device, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Within 1e-4: kernels add in any order on a GPU. Bit for bit on a CPU."""
    model, train = train_rows(tmp_path)
    same: dict[str, Any] = {
        "dtype": "float32",
        "device": device.type,
        "check": "off",
        "contract__prompts": 0,
        "checkpoint__every": 2,
        **keys,
    }
    whole = sft(model, train, tmp_path / "whole", steps=5, **same)
    begun = sft(model, train, tmp_path / "begun", steps=3, **same)
    taut.resume(begun.out, steps=5)
    limit = 1e-4 if device.type == "cuda" else 0
    expected = column(whole.out, "loss")
    assert column(begun.out, "loss") == pytest.approx(expected, rel=limit, abs=0)


# Memory


@whole_run
@pytest.mark.parametrize("rank", slow_except([4], [0, 4]))
def test_what_is_on_the_host_trains_as_what_is_not(
    device: torch.device, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with their moments, and layers' inputs, which a CPU has nowhere to send; selective checkpointing too. The
    check ``run.in_force`` is among those that run before the first step.
    """
    ways: list[dict[str, Any]] = [{"activation_checkpointing": "selective"}]
    if device.type == "cpu":
        monkeypatch.setattr(distributed, "require_offloadable", lambda device: None)
        ways.append({"parallel.cpu_offload": True})
    else:
        ways.append({"activation_checkpointing": "offload"})
        ways.append({"activation_checkpointing": "offload", "parallel.cpu_offload": True})
    model, train = train_rows(tmp_path)
    keys: dict[str, Any] = {"contract__prompts": 0, "steps": 4, "dtype": "float32"}
    keys |= {"lora__rank": rank, "attention": "reference", "device": device.type}
    plain = sft(model, train, tmp_path / "plain", **keys, check="off")
    for number, way in enumerate(ways):
        there = sft(model, train, tmp_path / str(number), **keys, **way)
        assert column(there.out, "loss") == pytest.approx(column(plain.out, "loss"), rel=1e-4), way


# Compiled layers


@whole_run
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.slow
def test_compiled_layers_train_as_eager_ones_on_the_cpu(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check ``model.compiled`` is among those that run before the first step. On the CPU the graphs are made, and
    not compiled, which would take a minute.
    """
    torch._dynamo.reset()
    if device.type == "cpu":
        monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    model, train = train_rows(tmp_path)
    keys: dict[str, Any] = {"contract__prompts": 0, "steps": 4, "dtype": "float32"}
    eager = sft(model, train, tmp_path / "eager", **keys, check="off")
    there = sft(model, train, tmp_path / "there", **keys, device=device.type, compile=True)
    assert column(there.out, "loss") == pytest.approx(column(eager.out, "loss"), rel=2e-3)
    found = {event["name"]: event["outcome"] for event in events(there.out, "check")}
    assert found["model.compiled"] == "passed"
