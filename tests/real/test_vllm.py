"""A real vLLM on the real model: ids, logprobs, stops and the template are those of taut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.real.vllm import needs_vllm, served

from taut.data.packing import pack
from taut.data.render.render import Renderer
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine
from taut.inference.vllm_client import TOLERANCE
from taut.models.attention_backends import select
from taut.models.load import load_config, load_model, load_tokenizer
from taut.models.scorer import Scorer
from taut.types import Completion, Prompt, Sample

QUESTIONS = ["What is the capital of France?", "Who wrote Hamlet?", "Write a sentence on the sea."]
pytestmark = [pytest.mark.real, pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def model(real_model: Path) -> Path:
    return real_model


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    with served(model, tmp_path_factory.mktemp("vllm") / "log") as url:
        tokenizer = load_tokenizer(str(model))
        stops = Renderer(tokenizer).stop_ids
        opened = ServerEngine.open(url, ServerConfig(), tokenizer, stops, 1024)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def prompts(engine: ServerEngine) -> list[Prompt]:
    renderer = Renderer(engine.texts.tokenizer)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [Prompt(f"{i}", renderer.prompt_ids(chat)) for i, chat in enumerate(chats)]


def test_the_server_renders_as_we_do(engine: ServerEngine, prompts: list[Prompt]) -> None:
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        assert engine.render([{"role": "user", "content": question}]) == prompt.ids_T.tolist()


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0, max_new_tokens=32), Sampling(max_new_tokens=32, seed=1)]
)
def test_log_probs_are_the_training_scorer_s(
    engine: ServerEngine, prompts: list[Prompt], model: Path, sampling: Sampling
) -> None:
    assert engine.kind == "raw"
    device = torch.device("cpu")
    chosen = select("auto", device, torch.float32, load_config(str(model)))
    loaded = load_model(
        str(model), dtype=torch.float32, device=device, attention=chosen.implementation
    )
    scorer = Scorer(loaded.requires_grad_(False))
    scorer.eval()
    for prompt, completion in zip(prompts, engine.generate(prompts, sampling), strict=True):
        ours = _scored(scorer, prompt, completion)
        assert completion.finish_reason in ("stop", "length"), completion.error
        assert np.abs(ours - completion.logp_one_N).max() < TOLERANCE["float32"]


def _scored(scorer: Scorer, prompt: Prompt, completion: Completion) -> np.ndarray:
    ids_T = np.concatenate([prompt.ids_T, completion.ids_N])
    at_N = np.arange(prompt.ids_T.size, ids_T.size)
    sample = Sample(prompt.id, ids_T, at_N, np.ones(at_N.size))
    return scorer(pack([sample])).logp_N.double().numpy()


def test_the_server_stops_by_itself_where_the_stop_set_says(
    engine: ServerEngine, prompts: list[Prompt]
) -> None:
    sampling = Sampling(temperature=0, max_new_tokens=32)
    told = engine.generate(prompts, sampling)
    alone = engine.unaided().generate(prompts, sampling)
    assert told[0].finish_reason == "stop"
    for mine, its in zip(told, alone, strict=True):
        assert its.finish_reason == mine.finish_reason
        assert its.ids_N.tolist() == mine.ids_N.tolist()
