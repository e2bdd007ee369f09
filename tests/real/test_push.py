"""Weights pushed to a real vLLM, whole and as an adapter: what it then samples has the training model's logprobs."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from tests.helpers.fake_weight_sync import CPU, change
from tests.real.vllm import needs_vllm
from torch import nn

from taut.config import replace
from taut.data.packing import pack
from taut.data.render.render import Renderer
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine, Stream
from taut.inference.vllm_client import TOLERANCE
from taut.inference.weight_sync import TrainingModel
from taut.models.attention_backends import select
from taut.models.load import load_config, load_model, load_tokenizer
from taut.models.lora.adapters import apply_lora
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.train.distributed import Ranks
from taut.types import Prompt, Sample, Wants

LIMIT = TOLERANCE["float32"]

pytestmark = [pytest.mark.real, pytest.mark.slow, needs_vllm]


def loaded(directory: Path) -> nn.Module:
    attention = select("auto", CPU, torch.float32, load_config(str(directory))).implementation
    return load_model(str(directory), dtype=torch.float32, device=CPU, attention=attention)


@pytest.mark.parametrize("mode", ["adapter", "full"])  # full changes the base under adapters
def test_what_is_sampled_after_a_push_is_the_training_model_s(
    pushed_to: str, real_model: Path, mode: str
) -> None:
    model = apply_lora(loaded(real_model), LoraConfig(rank=8, train_token_rows="never"))
    asked = TrainingModel(Scorer(model), Ranks(0, 1, CPU), torch.float32)
    tokenizer = load_tokenizer(str(real_model))
    renderer = Renderer(tokenizer)
    config = replace(ServerConfig(), {"sync.mode": mode})
    chat = [{"role": "user", "content": "Name a color."}]
    prompt = Prompt("a", renderer.prompt_ids(chat))
    sampling = Sampling(max_new_tokens=16, temperature=0.7, seed=1)
    engine = ServerEngine.open(pushed_to, config, tokenizer, renderer.stop_ids, 1024)
    try:
        engine = engine.follow(asked)
        assert engine.sync is not None
        for version in (0, 1):
            engine.update(version)
            (proof,) = engine.sync.proofs
            assert proof.mode == mode and proof.largest_error < LIMIT
            assert (proof.largest_change > 100 * LIMIT) == (version == 1)
            assert (proof.num_equal, proof.unread) == ((272, ()) if mode == "full" else (0, ()))
            (completion,) = engine.generate([prompt], sampling)
            ids_T = np.concatenate([prompt.ids_T, completion.ids_N])
            mine_N = _at(asked, ids_T, 0.7)[-completion.ids_N.size :]
            assert completion.version == version and completion.logp_N is not None
            assert np.abs(mine_N - completion.logp_N).max() < LIMIT
            change(model, size=0.01)
    finally:
        engine.close()


def test_a_server_with_adapters_goes_on_after_a_push_amid_requests(
    pushed_to: str, real_model: Path
) -> None:
    """On a CPU its engine ended where the probe was in one batch with other requests (vllm-project/vllm#16668)."""
    model, done = loaded(real_model), SimpleQueue[int]()
    tokenizer = load_tokenizer(str(real_model))
    renderer = Renderer(tokenizer)
    config = replace(ServerConfig(), {"sync.mode": "full", "retries": 0})
    engine = ServerEngine.open(pushed_to, config, tokenizer, renderer.stop_ids, 1024)
    try:
        engine = engine.follow(TrainingModel(Scorer(model), Ranks(0, 1, CPU), torch.float32))
        engine.update(0)
        stream = Stream(engine, Sampling(max_new_tokens=64, seed=1), done.put)
        for number in range(5):
            chat = [{"role": "user", "content": f"Count from {number} to 200."}]
            stream.ask(number, Prompt(f"p{number}", renderer.prompt_ids(chat)))
        change(model, size=0.002)
        engine.update(1)
        completions = [stream.take(done.get(timeout=120)) for _ in range(5)]
        assert [(it.error, it.version) for it in completions] == [(None, 0)] * 5
        assert "#16668" in {it.name: it for it in engine.decisions}["requests during a push"].reason
    finally:
        engine.close()


def _at(asked: TrainingModel, ids_T: np.ndarray, temperature: float) -> np.ndarray:
    """logprobs of all ids but the first at a temperature."""
    at_N = np.arange(1, ids_T.size)
    packed = pack([Sample("a", ids_T, at_N, np.ones(at_N.size))])
    with torch.no_grad():
        logp_N = asked.scorer.eval()(packed, wants=Wants(temperature=temperature)).logp_N
    return logp_N.double().numpy()
