"""The routers' load-balancing loss: of one batch the library's, and of any cut of a step the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import judged_runs, online_runs
from tests.helpers.chat_runs import (
    QUIET,
    chats,
    column,
    largest_difference,
    save_model,
    weights,
    write_rows,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_samples import nested_family, sample
from tests.helpers.tiny_trainers import make
from tests.invariants.test_ranks import by_ranks
from torch import Tensor, nn

import taut
from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ModelError
from taut.losses.router import slopes
from taut.models.experts import RouterRecorder, widen_routers
from taut.models.precision import compute_context
from taut.models.recompute import recompute_activations
from taut.models.scorer import Scorer
from taut.models.settings import RouterConfig
from taut.train.trainer import StepReport, Trainer, add_gradients
from taut.types import Packed, Tree, Wants

COEF = 0.3
MODELS = ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "gpt_oss", "qwen3_next")
LIMIT = 1e-9


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def furthest(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest distance of two gradients of a tensor, in parts of the largest gradient."""
    assert left.keys() == right.keys()
    scale = max(float(value.norm()) for value in right.values())
    return max(float((left[name] - right[name]).norm()) for name in right) / scale


def router_loss(scorer: Scorer, packed: Packed, kind: Any = "pooled") -> Tensor:
    """The routers' loss of one micro-batch that is the whole step."""
    assert scorer.routers is not None
    with compute_context(torch.float64, torch.device("cpu")):
        scores = scorer(packed, wants=Wants(logp=False, routers=True))
    num_tokens, top_k = packed.num_tokens_unshared, scorer.routers.top_k
    slope_LE = slopes(scores.router_count_LE, num_tokens, top_k, kind, COEF)
    return (slope_LE * scores.router_prob_LE).sum()


@pytest.mark.parametrize("name", slow_except(MODELS[:2], MODELS))
def test_of_one_batch_without_padding_it_is_the_librarys(name: str) -> None:
    """Value and gradient of three sequences of one length; the library sums in float32."""
    ids = np.random.default_rng(0).integers(3, 97, (3, 21))
    theirs = tiny_model(name)
    batch = torch.from_numpy(ids)
    output = theirs(input_ids=batch, output_router_logits=True, use_cache=False)
    (COEF * output.aux_loss).backward()
    ours = tiny_model(name, attention="taut_reference")
    scorer = Scorer(ours, routers=RouterRecorder(ours, COEF))
    one_by_one = name == "qwen3_next"  # its recurrent layers take one sequence at a time
    samples = [sample(str(row), ids[row].tolist()) for row in range(1 if one_by_one else 3)]
    if one_by_one:
        theirs.zero_grad()
        output = theirs(input_ids=batch[:1], output_router_logits=True, use_cache=False)
        (COEF * output.aux_loss).backward()
    loss = router_loss(scorer, pack(samples, ALONE))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(COEF * output.aux_loss.item(), rel=1e-6)
    assert furthest(gradients(ours), gradients(theirs)) < 1e-6


def test_per_layer_is_the_sum_of_each_layers_own() -> None:
    """E/k sum_e f_le P_le of each router, from the library's own logits."""
    ids = np.random.default_rng(0).integers(3, 97, (1, 21))
    theirs = tiny_model("mixtral")
    output = theirs(input_ids=torch.from_numpy(ids), output_router_logits=True, use_cache=False)
    expected = 0.0
    for logits in output.router_logits:
        prob_TE = logits.softmax(-1)
        chosen = torch.zeros_like(prob_TE).scatter(1, prob_TE.topk(2).indices, 1.0)
        expected += 4 / 2 * (chosen.mean(0) * prob_TE.mean(0)).sum().item()
    ours = tiny_model("mixtral", attention="taut_reference")
    scorer = Scorer(ours, routers=RouterRecorder(ours, COEF))
    loss = router_loss(scorer, pack([sample("a", ids[0].tolist())], ALONE), "per_layer")
    assert float(loss.detach()) == pytest.approx(COEF * expected, rel=1e-6)


def taken(trainer: Trainer, trees: list[Tree]) -> tuple[StepReport, dict[str, Tensor]]:
    report = add_gradients(trainer, trees, 1)
    return report, gradients(trainer.scorer)


@pytest.mark.parametrize("kind", ["pooled", "per_layer"])
def test_no_cut_of_a_step_changes_it(kind: Any, tmp_path: Path) -> None:
    """Whole, in small micro-batches, each sample alone, prefixes shared or repeated, layers computed again."""
    keys: Any = {"router__aux_loss_coef": COEF, "router__aux_loss": kind}
    built, _ = make(tmp_path, "qwen3_moe", **keys)
    trainer = built.trainer
    trees = [Tree((one,)) for one in nested_family(97)]
    repeated = replace(trainer, policy=ALONE)
    expected, slope = taken(repeated, trees)
    assert expected.router_loss == pytest.approx(COEF * expected.metrics["router_aux_loss"])
    without, plain = taken(replace(trainer, router=RouterConfig()), trees)
    assert expected.method_loss == pytest.approx(without.loss, rel=LIMIT)
    assert without.router_loss == 0.0 and expected.router_loss > 0.0
    assert furthest(slope, plain) > 1e-3, "the routers' loss has a gradient"
    share = PackPolicy(share_prefixes=True, min_saved_tokens=1)
    cuts = {
        "shared": replace(trainer, policy=share),
        "small": replace(repeated, budget=trainer.budget._replace(tokens_per_microbatch=40)),
        "small and shared": replace(
            trainer, policy=share, budget=trainer.budget._replace(tokens_per_microbatch=40)
        ),
        "alone": replace(repeated, budget=trainer.budget._replace(one_sample=True)),
    }
    for name, cut in cuts.items():
        report, found = taken(cut, trees)
        assert report.loss == pytest.approx(expected.loss, rel=LIMIT), name
        assert report.router_loss == pytest.approx(expected.router_loss, rel=LIMIT), name
        assert furthest(found, slope) < LIMIT, name
    for how in (True, "selective"):
        recompute_activations(built.scorer.model, how)  # type: ignore[arg-type]
        report, found = taken(cuts["small"], trees)
        assert report.router_loss == pytest.approx(expected.router_loss, rel=LIMIT), how
        assert furthest(found, slope) < LIMIT, how


def test_two_ranks_are_one(tmp_path: Path) -> None:
    """Uneven shares; a rank without samples too, in the last of these runs."""
    model = save_model(tmp_path / "moe", "qwen3_moe", dtype=torch.float64)
    train = write_rows(tmp_path / "train.jsonl", chats(11))
    fixed = {
        **QUIET,
        "method": "sft",
        "model": str(model),
        "data.train": str(train),
        "check": "off",
        "contract.prompts": 0,
        "steps": 2,
        "router.aux_loss_coef": COEF,
        "batch.tokens_per_microbatch": 90,
    }
    todo = []
    for size in (5, 1):
        keys = {**fixed, "batch.samples_per_step": size, "out": str(tmp_path / f"one{size}")}
        taut.sft(**{key: value for key, value in keys.items() if key != "method"})
        todo.append({**keys, "out": str(tmp_path / f"two{size}")})
    by_ranks(tmp_path, todo)
    for size in (5, 1):
        one, two = tmp_path / f"one{size}", tmp_path / f"two{size}"
        for field in ("loss", "grad_norm", "router_aux_loss"):
            assert column(two, field) == pytest.approx(column(one, field), rel=LIMIT)
        assert largest_difference(weights(two / "model"), weights(one / "model")) < LIMIT


def test_a_token_of_a_shared_prefix_counts_for_each_sample() -> None:
    samples = nested_family(97)
    packed = pack(samples, PackPolicy(share_prefixes=True, min_saved_tokens=1))
    num_samples_T = packed.num_samples_T
    assert packed.num_tokens < packed.num_tokens_unshared == int(num_samples_T.sum())
    assert int(num_samples_T.max()) == 5, "the prompt of five of the six"
    alone = pack(samples, ALONE)
    assert bool((alone.num_samples_T == 1).all())


def test_choices_are_counted_before_they_are_narrowed() -> None:
    """Routers of a bfloat16 run give bfloat16, and compute in float32: two logits that differ in float32 only."""
    model = tiny_model("qwen3_moe", dtype=torch.float32, num_hidden_layers=1)
    widen_routers(model)
    recorder = RouterRecorder(model, COEF)
    (router,) = recorder.routers
    weight: Any = router.weight
    with torch.no_grad():
        weight.zero_()
        weight[:, 0] = torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 2**-11, 0.0])
    hidden = torch.zeros(1, 32, dtype=torch.bfloat16)
    hidden[0, 0] = 1.0
    with recorder.recording(torch.ones(1, dtype=torch.int64)):
        logits, *_ = router(hidden)
    assert logits.dtype == torch.bfloat16 and logits[0, 1] == logits[0, 0]
    prob_LE, count_LE = recorder.sums()
    assert count_LE.tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert prob_LE.dtype == torch.float32 and prob_LE[0, 2] > prob_LE[0, 0]


@pytest.mark.parametrize(
    ("name", "why"),
    [("llama", "has no routers"), ("llama4_text", "transformers has no load-balancing loss")],
)
def test_a_model_without_such_a_loss_is_refused(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"router.aux_loss_coef=0.3: found .*{why}"):
        RouterRecorder(tiny_model(name), COEF)


@pytest.mark.parametrize("method", slow_except(["dpo"], ["dpo", "kto", "reward", "grpo", "ppo"]))
def test_every_method_has_it(method: str, tmp_path: Path) -> None:
    """Two steps in micro-batches of two sizes: a pair, another's answer, a scalar head, rollouts, a critic."""
    model = save_model(tmp_path / "moe", "qwen3_moe", dtype=torch.float64)
    runs = online_runs if method in online_runs.METHODS_KEYS else judged_runs
    keys = runs.keys_of(method, model, tmp_path / "data") | {
        "check": "off",
        "steps": 2,
        "contract.prompts": 0,
        "router.aux_loss_coef": COEF,
    }
    for size in (90, 2000):
        runs.train(keys | {"out": str(tmp_path / str(size)), "batch.tokens_per_microbatch": size})
    small, large = tmp_path / "90", tmp_path / "2000"
    for field in ("loss", "grad_norm", "router_aux_loss"):
        assert column(small, field) == pytest.approx(column(large, field), rel=LIMIT, abs=LIMIT)
    assert min(column(small, "router_aux_loss")) > 0
    assert largest_difference(weights(small / "model"), weights(large / "model")) < LIMIT
