"""The local engine on the device against itself on the CPU and against the scorer, and weights pushed to a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.gpu.needs import MODELS, needs

needs(*MODELS)

# ruff: noqa: E402  # what the packages are needed for

from safetensors.torch import load_file
from tests.helpers.fake_vllm import CONFIG, GREEDY, prompt
from tests.helpers.fake_weight_sync import WeightServer, change, tiny
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.invariants.test_generation import prompts

from taut.config import replace
from taut.data.packing import ALONE, pack
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine
from taut.inference.weight_sync import TrainingModel, checkpoint_tensors, write
from taut.models.attention_backends import select
from taut.models.load import set_attention
from taut.models.lora.adapters import apply_lora
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.train.distributed import Ranks
from taut.types import Completion, Prompt, Sample

LIMIT = 5e-3
"""The largest difference of a logprob in float32, where products of flex attention may be TF32."""
MEAN = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""The largest mean difference; of models whose weights are random and large. In 16 bit single tokens differ more: one
may take another expert.
"""
DRAWN = Sampling(n=3, max_new_tokens=12, temperature=1.0, seed=5)


def scorer_on(device: torch.device, dtype: torch.dtype, name: str = "llama") -> Scorer:
    model = tiny_model(name, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    set_attention(model, select("auto", device, dtype, model.config).implementation)
    return Scorer(model.to(device))


def generate(
    scorer: Scorer, dtype: torch.dtype, sampling: Sampling, asked: list[Prompt]
) -> list[Completion]:
    compute = partial(compute_context, dtype, scorer.device)
    engine = LocalEngine(scorer, tiny_tokenizer(), (2,), context=200, compute=compute)
    return engine.generate(asked, sampling)


@pytest.mark.parametrize("dtype", slow_except([torch.float32], list(MEAN)), ids=str)
@pytest.mark.parametrize("name", CARRIED)
def test_logprobs_of_the_engine_are_the_scorers(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """On the device itself; a model's decoding takes other kernels than its training."""
    scorer, asked = scorer_on(device, dtype, name), prompts(7)
    by_id = {prompt.id: prompt for prompt in asked}
    gaps: list[np.ndarray] = []
    for completion in generate(scorer, dtype, DRAWN, asked):
        ids_T = np.concatenate([by_id[completion.prompt_id].ids_T, completion.ids_N])
        at_N = np.arange(ids_T.size - completion.ids_N.size, ids_T.size)
        sample = Sample("alone", ids_T, at_N, np.ones(at_N.size))
        with torch.no_grad(), compute_context(dtype, device):
            wanted = scorer(pack([sample], ALONE)).logp_N.float().cpu().numpy()
        gaps.append(np.abs(completion.logp_N - wanted))
    gap = np.concatenate(gaps)
    assert gap.mean() < MEAN[dtype]
    if dtype == torch.float32:
        assert gap.max() < LIMIT


def test_the_same_ids_as_on_the_cpu(device: torch.device) -> None:
    greedy = replace(DRAWN, {"n": 1, "temperature": 0.0})
    cpu = torch.device("cpu")
    expected = generate(scorer_on(cpu, torch.float64), torch.float64, greedy, prompts(7))
    found = generate(scorer_on(device, torch.float32), torch.float32, greedy, prompts(7))
    assert [c.ids_N.tolist() for c in found] == [c.ids_N.tolist() for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.logp_one_N - other.logp_one_N).max() < LIMIT


def test_files_of_weights_are_those_of_the_cpu(device: torch.device, tmp_path: Path) -> None:
    model = tiny()
    expected = {name: value.clone() for name, value in checkpoint_tensors(model)}
    write(checkpoint_tensors(model.to(device)), torch.bfloat16, tmp_path)
    found = {n: value for file in tmp_path.iterdir() for n, value in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


@contextmanager
def following(device: torch.device, model: torch.nn.Module, folder: Path) -> Iterator[ServerEngine]:
    """An engine whose server follows a model that trains on the device."""
    with WeightServer() as server:
        config = replace(CONFIG, {"sync.folder": str(folder)})
        engine = ServerEngine.open(server.url, config, tiny_tokenizer(), [7], 64)
        try:
            attention = select("auto", device, torch.float32, tiny().config).implementation
            model.set_attn_implementation(attention)
            trained = TrainingModel(Scorer(model.to(device)), Ranks(0, 1, device), torch.float32)
            engine = engine.follow(trained)
            yield engine
        finally:
            engine.close()


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_a_push_is_proven_by_log_probs(device: torch.device, is_lora: bool, tmp_path: Path) -> None:
    model = tiny()
    if is_lora:
        model = apply_lora(model, LoraConfig(rank=2, train_token_rows="never"))
    with following(device, model, tmp_path / "weights") as engine:
        engine.update(0)
        change(model.cpu())
        model.to(device)
        engine.update(3)
        assert engine.sync is not None
        (proof,) = engine.sync.proofs
        (completion,) = engine.generate([prompt("a", 1, 20)], GREEDY)
    assert proof.unread == () and proof.version == 3
    assert proof.largest_change > 0.1 and proof.largest_error < LIMIT
    assert completion.version == 3
