"""Three real vLLM servers, of which one is killed amid a round, one is slow and one has other weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import httpx2
import numpy as np
import pytest
import torch
from tests.helpers.fake_weight_sync import CPU, change
from tests.real.test_push import LIMIT, loaded
from tests.real.vllm import needs_vllm, started

from taut.config import replace
from taut.data.packing import pack
from taut.data.render.render import Renderer
from taut.inference import worker
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine, Stream
from taut.inference.weight_sync import TrainingModel, checkpoint_tensors, write
from taut.models.load import load_tokenizer
from taut.models.scorer import Scorer
from taut.train.distributed import Ranks
from taut.types import Prompt, Sample

pytestmark = [pytest.mark.real, pytest.mark.slow, needs_vllm]

OPTIONS = (
    "--worker-extension-cls=taut_worker.TautWorker",
    "--served-model-name=smol",
    "--logprobs-mode=processed_logprobs",
)
VARIABLES = {"PYTHONPATH": str(Path(worker.__file__).parent), "VLLM_SERVER_DEV_MODE": "1"}


def test_nothing_is_lost_and_stale_weights_are_not_used(real_model: Path, tmp_path: Path) -> None:
    """Also: the server that goes on has nothing to do once what it was asked is cancelled."""
    model = loaded(real_model)
    tokenizer = load_tokenizer(str(real_model))
    renderer = Renderer(tokenizer)
    done: SimpleQueue[int] = SimpleQueue()
    old = tmp_path / "old"
    old.mkdir()
    with ExitStack() as servers:
        made = [
            servers.enter_context(started(real_model, tmp_path / f"{n}.log", OPTIONS, VARIABLES))
            for n in range(3)
        ]
        urls, (killed, slow, _) = [url for url, _ in made], [process for _, process in made]
        config = replace(ServerConfig(), {"retries": 3, "timeout": 120.0, "sync.mode": "full"})
        engine = ServerEngine.open(urls, config, tokenizer, renderer.stop_ids, 1024)
        engine = engine.follow(TrainingModel(Scorer(model), Ranks(0, 1, CPU), torch.float32))
        engine.update(0)
        write(checkpoint_tensors(model), torch.float32, old)
        change(model, size=0.002)
        engine.update(1)
        assert engine.sync is not None and len(engine.sync.proofs) == 3
        body = {"method": "taut_load", "kwargs": {"folder": str(old), "version": 0}}
        root = urls[2].removesuffix("/v1")
        httpx2.post(f"{root}/collective_rpc", json=body, timeout=60).raise_for_status()

        stream = Stream(engine, Sampling(max_new_tokens=24, seed=1), done.put)
        chats = [f"Count from {n} to 200." for n in range(9)]
        prompts = [
            Prompt(f"p{n}", renderer.prompt_ids([{"role": "user", "content": chat}]))
            for n, chat in enumerate(chats)
        ]
        os.killpg(slow.pid, signal.SIGSTOP)
        threading.Timer(3.0, os.killpg, (slow.pid, signal.SIGCONT)).start()
        for number, prompt in enumerate(prompts):
            stream.ask(number, prompt)
        time.sleep(0.5)
        os.killpg(killed.pid, signal.SIGKILL)
        completions = [stream.take(done.get(timeout=240)) for _ in prompts]
        left_out = sorted(engine.pool.take_left_out())
        long = Stream(engine, Sampling(max_new_tokens=800, seed=1), done.put)
        for number, prompt in enumerate(prompts):
            long.ask(number, prompt)
        metrics = f"{urls[1].removesuffix('/v1')}/metrics"
        assert _soon(lambda: _running(metrics) > 0)
        long.close()
        assert _soon(lambda: _running(metrics) == 0)
        engine.close()
    assert len(left_out) == 2
    assert (
        sum("holds weights of version 0" in reason and urls[2] in reason for reason in left_out)
        == 1
    )
    assert sum(urls[0].removesuffix("/v1") in reason for reason in left_out) == 1
    assert sorted(completion.prompt_id for completion in completions) == [p.id for p in prompts]
    by_id = {prompt.id: prompt for prompt in prompts}
    for completion in completions:
        assert (completion.error, completion.version) == (None, 1)
        asked = by_id[completion.prompt_id]
        ids_T = np.concatenate([asked.ids_T, completion.ids_N])
        at_N = np.arange(asked.ids_T.size, ids_T.size)
        packed = pack([Sample("a", ids_T, at_N, np.ones(at_N.size))])
        with torch.no_grad():
            logp_N = Scorer(model)(packed).logp_N.numpy()
        assert completion.logp_N is not None
        assert np.abs(logp_N - completion.logp_N).max() < LIMIT


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds within 30 seconds."""
    until = time.monotonic() + 30
    while time.monotonic() < until and not holds():
        time.sleep(0.2)
    return holds()


def _running(metrics: str) -> float:
    """Requests that a server works on."""
    lines = httpx2.get(metrics, timeout=30).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")
    )
