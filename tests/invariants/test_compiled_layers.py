"""Compiled layers compute what the same layers compute without torch's compiler, to float64 rounding.

The logprobs and every gradient of micro-batches of many sizes, and whole runs. Graphs are made for the first of them
and never again: torch raises in these tests where one would be. The compiler behind the graphs is ``aot_eager``, which
takes seconds; inductor itself, which has the same graphs, is in the slow tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import judged_runs, online_runs
from tests.helpers.chat_runs import (
    PLAIN,
    QUIET,
    chats,
    column,
    decisions,
    save_model,
    weights,
    write_rows,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, tiny_model
from tests.helpers.tiny_samples import nested_family, sample
from torch import Tensor, nn

import taut
from taut.data.packing import PackPolicy, pack
from taut.models import compiled_layers
from taut.models.compiled_layers import compile_layers, eagerly, graphs_made
from taut.models.lora.adapters import apply_lora
from taut.models.precision import compute_context
from taut.models.recompute import recompute_activations
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.types import Packed

LIMIT = 1e-9
WIDE = torch.float64
GRAPHS = {"gemma4_text": 6, "gpt_oss": 4, "qwen3_moe": 3, "qwen2_moe": 3}
"""Two for layers of one kind; more where layers differ or a part besides attention is eager. Three at most for others.
"""

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")


@pytest.fixture(autouse=True)
def compiles_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def micro_batches(vocabulary: int) -> Iterator[Packed]:
    """Of different sizes, with prefixes shared."""
    draw = np.random.default_rng(0)
    for index in range(4):
        lengths = draw.integers(8, 40, 3 + index)
        alone = [
            sample(f"s{j}", draw.integers(0, vocabulary, int(length)).tolist(), 2, j)
            for j, length in enumerate(lengths)
        ]
        yield pack([*alone, *nested_family(vocabulary, index)], PackPolicy(True, 1))


def measure(scorer: Scorer, packed: Packed) -> dict[str, Tensor]:
    """The logprobs, and every gradient of their weighted sum."""
    scorer.zero_grad()
    with compute_context(WIDE, torch.device("cpu")):
        logp_N = scorer(packed).logp_N
        (logp_N * torch.linspace(-1, 2, len(logp_N), dtype=WIDE)).sum().backward()
    gradients = {
        name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None
    }
    return {"logprobs": logp_N.detach(), **gradients}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - value).norm() / value.norm().clamp_min(1e-30))
        for name, value in expected.items()
    )


def plain(name: str) -> nn.Module:
    return tiny_model(name, attention="taut_reference")


def recomputed(name: str) -> nn.Module:
    model = plain(name)
    recompute_activations(model, how=True)
    return model


def adapted(name: str) -> nn.Module:
    """Adapters that change something, and recomputation, which loses their gradient where it is wrong."""
    model = apply_lora(recomputed(name), LoraConfig(rank=3, targets=["q_proj", "down_proj"]), 0, {})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=draw)
    return model


CASES = [
    *((name, plain) for name in (*CARRIED, "lfm2", "qwen3_next")),
    ("llama", adapted),
    ("gemma2", recomputed),
    ("granite", adapted),
]


def require_same(model: nn.Module) -> int:
    """Compiled equals eager on every micro-batch, and no graph is made after the first; returns their number."""
    names = list(model.state_dict())
    compile_layers(model, WIDE)
    assert list(model.state_dict()) == names
    scorer = Scorer(model.train())
    batches = list(micro_batches(64))
    with eagerly():
        expected = [measure(scorer, packed) for packed in batches]
    before, number = graphs_made(), 0
    for index, packed in enumerate(batches):
        assert largest_error(measure(scorer, packed), expected[index]) < LIMIT
        made = graphs_made().since(before)
        number = number or made.graphs
        assert (made.graphs, made.recompiled) == (number, 0)
    return number


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), CASES)
def test_compiled_layers_equal_eager_ones(name: str, make: Callable[[str], nn.Module]) -> None:
    number = require_same(make(name))
    assert 2 <= number <= GRAPHS.get(name, 4 if make is adapted else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_compiled_by_inductor_equal_eager_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    require_same(plain(name))


def test_a_graph_too_many_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "MOST_GRAPHS", 1)
    model = plain("llama")
    compile_layers(model, WIDE)
    (packed, *_) = micro_batches(64)
    with compute_context(WIDE, torch.device("cpu")):
        Scorer(model.train())(packed)
        with pytest.raises(taut.ModelError, match="cannot compile LlamaDecoderLayer"):
            Scorer(model.eval())(packed)


# Runs


def keys_of(method: str, place: Path) -> dict[str, Any]:
    if method in online_runs.METHODS_KEYS:
        return online_runs.keys_of(method, online_runs.save_models(place), place)
    model = save_model(place / "model", "llama")
    if method in judged_runs.METHODS:
        return judged_runs.keys_of(method, model, place / "rows")
    train = str(write_rows(place / "train.jsonl", chats(24)))
    return {"method": method, "model": str(model), "data.train": train, **QUIET}


@pytest.mark.parametrize("method", slow_except(["sft"], ["sft", "dpo", "grpo"]))
def test_a_compiled_run_is_the_run(method: str, tmp_path: Path) -> None:
    keys = keys_of(method, tmp_path) | {key.replace("__", "."): v for key, v in PLAIN.items()}
    runs = []
    for is_compiled in (False, True):
        out = str(tmp_path / f"out {is_compiled}")
        train = getattr(taut, method)
        runs.append(train(**keys | {"out": out, "steps": 3, "compile": is_compiled}).out)
    eager, compiled = runs
    assert column(compiled, "loss") == pytest.approx(column(eager, "loss"), rel=LIMIT, abs=LIMIT)
    left, right = (weights(out / "model") for out in runs)
    assert left.keys() == right.keys()
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < LIMIT
    assert "compile" not in decisions(eager)
    value, reason = decisions(compiled)["compile"]
    assert value.startswith("2 ")
    assert "attention" in reason
