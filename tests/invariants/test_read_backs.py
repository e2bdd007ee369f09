"""Nothing is read back from the device but what is stated here, on the meta device (tests/helpers/meta_device.py).

A training step reads its loss, metrics and gradient norm together, once, before the update; statistics of the whole
step once, where a loss needs them; a rollout's scores once; an engine the sampled ids once a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import judged_runs, online_runs
from tests.helpers.chat_runs import QUIET, chats, write_rows
from tests.helpers.meta_device import META, Watch, watched
from tests.helpers.preference_rows import answers_for, groups_of, packs, random_scores, ready
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import EIGHT, tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn

from taut.config import from_mapping
from taut.data.packing import ALONE, PackPolicy, pack
from taut.inference import local
from taut.inference.weight_sync import TrainingModel
from taut.losses.registry import LOSSES
from taut.methods import METHODS
from taut.methods.method import RunConfig
from taut.models import scorer as head
from taut.models.heads import SharedCritic
from taut.models.lora.adapters import apply_lora
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.models.teacher import ModelTeacher
from taut.plan.memory import measure
from taut.run.inputs import load_inputs
from taut.run.setup import build
from taut.train import random_state
from taut.train.distributed import Ranks
from taut.train.monitors import FirstStep, Untouched
from taut.train.trainer import train_step
from taut.types import TOP_IDS, TOP_LOGP, Divergence, Scores, Wants, to_host

SHARED = PackPolicy(share_prefixes=True, min_saved_tokens=1)
ONE_READ = {"trainer.summarize": 1}


def model_on_meta(name: str = "llama", attention: str = "taut_reference") -> nn.Module:
    has_experts = name in ("qwen3_moe", "gpt_oss")  # the library's kernel for them is in bfloat16
    dtype = torch.bfloat16 if has_experts else torch.float32
    model = tiny_model(name, dtype=dtype, attention=attention)
    model.config._experts_implementation = "grouped_mm"  # as a GPU has it
    return model.to("meta")


def reads(watch: Watch) -> Counter[str]:
    """How often each function reads."""
    found: Counter[str] = Counter()
    for place, count in watch.reads.items():
        found[place.split(":")[0]] += count
    return found


# -- the scorer and the losses


@pytest.mark.parametrize("policy", slow_except([SHARED], [ALONE, SHARED]), ids=["packed", "shared"])
@pytest.mark.parametrize("name", EIGHT)
def test_a_forward_and_a_backward_read_nothing(name: str, policy: PackPolicy) -> None:
    scorer = Scorer(model_on_meta(name))
    with watched() as watch:
        for packed in (pack(nested_family(64), policy), pack(nested_family(64), policy).to(META)):
            scorer(packed).logp_N.sum().backward()
    assert not watch.reads


PATHS: dict[str, Wants] = {
    "logprobs": Wants(),
    "entropy": Wants(entropy=True, temperature=0.7),
    "scalar": Wants(logp=False, scalar=True),
    "teacher": Wants(divergence=Divergence("js")),
}


@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("path", [*PATHS, "linear"])
def test_no_way_through_the_head_reads(
    path: str, is_adapted: bool, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 8 if is_chunked else 2**24)
    model = tiny_model("llama", dtype=torch.float32, attention="taut_reference")
    adapted = apply_lora(model, LoraConfig(rank=2), 0) if is_adapted else model
    wants = PATHS.get(path, Wants())
    critic = SharedCritic(adapted) if wants.scalar else None
    scorer = Scorer(adapted, ModelTeacher(model_on_meta()), critic).to("meta")
    packed = pack(nested_family(64), SHARED)
    with watched() as watch:
        linear_N = packed.weight_N if path == "linear" else None
        if wants.divergence is not None:
            linear_N = torch.stack([packed.weight_N] * 2)
        scores = scorer(packed.to(META), linear_N, wants)
        value = next(
            v for v in (scores.linear_sum, scores.scalar_R, scores.logp_N) if v is not None
        )
        value.sum().backward()
    assert not watch.reads


def test_the_probe_of_a_weight_push_is_read_once() -> None:
    trained = TrainingModel(Scorer(model_on_meta()), Ranks(0, 1, META), torch.float32)
    with watched() as watch:
        trained.log_probs(np.arange(9))
    assert reads(watch) == {"weight_sync.log_probs": 1}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_nothing(name: str) -> None:
    """Its sums, their gradient, its coefficients, and what it observes for the statistics of a step."""
    loss = LOSSES[name]
    listed = {TOP_IDS: 3, TOP_LOGP: 3}
    (packed,) = ready(loss, [packs(groups_of(answers_for(loss)))], random_scores)
    streams = {stream: torch.zeros(packed.num_targets, k) for stream, k in listed.items()}
    packed = replace(packed, streams={**packed.streams, **streams})
    scores = random_scores(packed)._replace(divergence_N=torch.ones(packed.num_targets))
    with watched() as watch:
        there = Scores(
            *(value if value is None else value.to("meta").requires_grad_() for value in scores)
        )
        watch.uploads.clear()
        moved = packed.to(META)
        out = loss(there, moved)
        torch.stack(list(out.terms.values())).sum().backward()
        loss.linear_weights(moved)
        loss.observe(there, moved)
    assert not watch.reads and not watch.uploads
    assert {value.device.type for value in out.terms.values()} == {"meta"}


# -- steps of every method


def step_of(run: RunConfig) -> Counter[str]:
    """What a step reads. Not asked are the monitors that look at more in the first steps of a run."""
    ranks = Ranks(0, 1, META)
    with watched() as watch:
        inputs = load_inputs(run, ranks)
        built = build(run, inputs, run.plan(inputs.train), ranks, emit=lambda kind, **fields: None)
        trainer = built.trainer
        trainer.monitors = [m for m in trainer.monitors if not isinstance(m, FirstStep | Untouched)]
        trainer.source.open()
        trainer.random = random_state.capture(torch.device("cpu"))
        watch.reads.clear()
        watch.uploads.clear()
        try:
            train_step(trainer, 1)
        finally:
            trainer.source.close()
    # This attention is the CPU's; nothing else waits for a copy.
    assert all(place.startswith(("reference.", "decode.")) for place in watch.uploads)
    return reads(watch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return online_runs.save_models(tmp_path_factory.mktemp("models"))


SMALL = {"dtype": "float32", "batch.tokens_per_microbatch": 150}


def on_chats(model: Path, place: Path, method: str, **keys: Any) -> RunConfig:
    named = {"data.train": str(write_rows(place / "t.jsonl", chats(10))), "out": str(place / "out")}
    return from_mapping(
        METHODS[method], {**QUIET, "model": str(model), **named, "steps": 9, **SMALL, **keys}
    )


@pytest.mark.parametrize(
    "keys", [{}, {"lora.rank": 2}, {"activation_checkpointing": True}], ids=str
)
def test_a_step_on_texts_reads_once(keys: dict[str, Any], model: Path, tmp_path: Path) -> None:
    found = step_of(on_chats(model, tmp_path, "sft", **keys))
    assert found == ONE_READ


def test_a_step_with_a_teacher_reads_once(model: Path, tmp_path: Path) -> None:
    teacher = {"distill.teacher": str(model.with_name("beside"))}
    found = step_of(on_chats(model, tmp_path, "distill", **teacher))
    assert found == ONE_READ


STATISTICS = {"kto": {"step_statistics.compute_statistics": 1}}
"""Losses that need numbers of the whole step before the first backward."""


@pytest.mark.parametrize("name", slow_except(["dpo", "kto", "reward"], judged_runs.METHODS))
def test_a_step_on_judged_answers_reads_once(name: str, model: Path, tmp_path: Path) -> None:
    keys = judged_runs.keys_of(name, model, tmp_path)
    found = step_of(from_mapping(METHODS[keys["method"]], {**keys, **SMALL}))
    assert found == {**ONE_READ, **STATISTICS.get(name, {})}


@pytest.mark.parametrize("name", slow_except(["grpo", "ppo"], online_runs.METHODS_KEYS))
def test_a_step_on_own_answers_reads_once_a_token(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the trainer's models say of a rollout once for each of them."""
    random = torch.Generator().manual_seed(0)

    def drawn(tensors: Sequence[Tensor]) -> list[Tensor]:
        ids_B, *logps = to_host(tensors)
        return [torch.randint(0, 90, ids_B.shape, generator=random), *logps]

    monkeypatch.setattr(local, "to_host", drawn)
    draw, num_drawn = local.LocalEngine._draw, list[int]()

    def counted(*given: Any) -> None:
        num_drawn.append(1)
        draw(*given)

    monkeypatch.setattr(local.LocalEngine, "_draw", counted)
    keys = {**online_runs.keys_of(name, model, tmp_path / name), **SMALL}
    run = from_mapping(METHODS[name], keys)
    found = step_of(run)
    scored = {"rollout.score_trees": 1} if name == "ppo" else {}  # by the critic
    assert found == {**ONE_READ, **scored, "local._draw": len(num_drawn)}


def test_a_measured_micro_batch_is_on_the_device(model: Path, tmp_path: Path) -> None:
    """Of a loss without coefficients known beforehand, which takes the micro-batch's own tensors with the scores."""
    keys = judged_runs.keys_of("dpo", model, tmp_path)
    run, ranks = from_mapping(METHODS["dpo"], {**keys, **SMALL}), Ranks(0, 1, META)
    with watched():
        inputs = load_inputs(run, ranks)
        built = build(run, inputs, run.plan(inputs.train), ranks, emit=lambda kind, **fields: None)
        (tree,) = run.rows_of(inputs.train).trees([0])
        measured = measure(built, pack(tree.samples, built.trainer.policy), is_first=False)
    assert measured.seconds > 0
