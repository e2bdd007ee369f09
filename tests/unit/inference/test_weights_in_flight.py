"""Weights pushed while requests are under way: what they go on with, and what is said of it."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from tests.helpers.fake_vllm import CONFIG, prompt
from tests.helpers.fake_weight_sync import change, tiny, trained
from tests.helpers.sampling_server import SamplingServer
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import nn

from taut.config import replace
from taut.errors import EngineError
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine, Stream
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig
from taut.types import Completion, FloatArray

PATIENCE = 20.0
SAMPLING = Sampling(max_new_tokens=8, seed=3)
PROMPT = prompt("a", 1, 20)
AT = 4
"""Tokens that a completion has when the weights change."""


def logps(model: nn.Module, completion: Completion) -> FloatArray:
    """A model's logprobs of the tokens of a completion of ``PROMPT``."""
    ids = torch.tensor([[*PROMPT.ids_T.tolist(), *completion.ids_N.tolist()]])
    with torch.no_grad():
        logp = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    found: FloatArray = logp[1:-1].gather(-1, ids[0, 2:, None])[:, 0].numpy()
    return found


class Amid:
    """A server that stops before the token ``AT`` of its first completion until ``goes_on`` is set."""

    def __init__(self, *has: str, folder: Path, model: nn.Module) -> None:
        self.came, self.goes_on = threading.Event(), threading.Event()
        self.server = SamplingServer(has=has, before_token=self._wait)
        self.model, self.folder = model, folder
        self.done: SimpleQueue[int] = SimpleQueue()

    def _wait(self, ids: list[int]) -> None:
        if len(ids) == PROMPT.ids_T.size + AT and not self.came.is_set():
            self.came.set()
            assert self.goes_on.wait(PATIENCE)

    def open(self) -> ServerEngine:
        config = replace(CONFIG, {"sync.folder": str(self.folder), "timeout": PATIENCE})
        tokenizer = tiny_tokenizer()
        engine = ServerEngine.open(self.server.url, config, tokenizer, [], 64)
        return engine.follow(trained(self.model))

    def take(self, stream: Stream) -> Completion:
        return stream.take(self.done.get(timeout=PATIENCE))


def test_a_request_that_is_paused_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    """Its tokens have the logprobs of the weights that sampled each, its version is that of the first."""
    model, old = tiny(), tiny()
    amid = Amid("full", "pause", folder=tmp_path, model=model)
    with amid.server as server:
        engine = amid.open()
        engine.update(5)
        stream = Stream(engine, SAMPLING, amid.done.put)
        stream.ask(0, PROMPT)
        assert amid.came.wait(PATIENCE)
        change(model)
        server.told.clear()
        engine.update(6)
        order = [path for path in server.told if "rpc" not in path]
        assert order == [
            "/pause?mode=keep",
            "/reset_prefix_cache?reset_running_requests=true",
            "/resume",
        ]
        amid.goes_on.set()
        completion = amid.take(stream)
        stream.ask(1, prompt("b", 1, 20))
        fresh = amid.take(stream)
        engine.close()
    assert completion.logp_N is not None and completion.ids_N.size == 8
    before, after = logps(old, completion), logps(server.worker.model, completion)
    assert np.abs(completion.logp_N - before)[:AT].max() < 1e-5
    assert np.abs(completion.logp_N - after)[AT:].max() < 1e-5
    assert np.abs(before - after)[:AT].max() > 1e-3 < np.abs(before - after)[AT:].max()
    assert (completion.version, fresh.version) == (5, 6)
    (decision,) = [it for it in engine.decisions if it[0] == "requests during a push"]
    assert decision[1] == "go on with the new weights"


@pytest.mark.parametrize("has", [("full",), ("full", "pause")])
def test_a_request_at_a_server_that_cannot_pause_is_waited_for(
    tmp_path: Path, has: tuple[str, ...]
) -> None:
    """And a new one waits for the push. So it is where vLLM, on a CPU and with adapters, would end at a probe next to
    another request.
    """
    model, old = tiny(), tiny()
    amid = Amid(*has, folder=tmp_path, model=model)
    with amid.server as server:
        server.worker.model_runner.lora_config = object() if "pause" in has else None
        engine = amid.open()
        engine.update(5)
        stream = Stream(engine, SAMPLING, amid.done.put)
        stream.ask(0, PROMPT)
        assert amid.came.wait(PATIENCE)
        change(model)
        pushing = threading.Thread(target=engine.update, args=(6,))
        pushing.start()
        pushing.join(0.3)
        stream.ask(1, prompt("b", 1, 20))
        assert pushing.is_alive() and server.worker.taut_version == 5
        amid.goes_on.set()
        pushing.join(PATIENCE)
        assert not pushing.is_alive() and server.worker.taut_version == 6
        first, second = amid.take(stream), amid.take(stream)
        engine.close()
    assert (first.version, second.version) == (5, 6)
    for completion, weights in ((first, old), (second, server.worker.model)):
        assert completion.logp_N is not None
        assert np.abs(completion.logp_N - logps(weights, completion)).max() < 1e-5
    (decision,) = [it for it in engine.decisions if it[0] == "requests during a push"]
    assert decision[1] == "are waited for"
    assert ("vllm#16668" in decision[2]) == ("pause" in has)


def test_a_request_ends_under_the_adapter_that_it_began_with(tmp_path: Path) -> None:
    """The adapter is unloaded, and its files are removed, at the first push after its last request."""
    model = apply_lora(tiny(), LoraConfig(rank=2, train_token_rows="never"))
    amid = Amid("adapter", folder=tmp_path, model=model)
    with amid.server as server:
        engine = amid.open()
        change(model)
        engine.update(5)
        (first_name,) = server.adapters
        stream = Stream(engine, SAMPLING, amid.done.put)
        stream.ask(0, PROMPT)
        assert amid.came.wait(PATIENCE)
        change(model, seed=2)
        engine.update(6)
        change(model, seed=3)
        engine.update(7)
        assert first_name in server.adapters and len(server.adapters) == 2
        held = server.adapters[first_name]
        amid.goes_on.set()
        completion = amid.take(stream)
        engine.update(8)
        (last,) = server.adapters.values()
        assert first_name not in server.adapters
        assert len([path for path in tmp_path.glob("*/*") if path.is_dir()]) == 1
        engine.close()
    assert completion.version == 5 and completion.logp_N is not None
    assert np.abs(completion.logp_N - logps(held, completion)).max() < 1e-5
    assert np.abs(completion.logp_N - logps(last, completion)).max() > 1e-3


def test_a_push_that_fails_its_proof_takes_what_is_under_way_back(tmp_path: Path) -> None:
    """What was frozen would go on under weights that are not proven: it is not used."""
    model = tiny()
    amid = Amid("full", "pause", folder=tmp_path, model=model)
    with amid.server as server:
        engine = amid.open()
        engine.update(5)
        stream = Stream(engine, SAMPLING, amid.done.put)
        stream.ask(0, PROMPT)
        assert amid.came.wait(PATIENCE)
        server.is_stale = True
        change(model)
        with pytest.raises(EngineError, match=r"weights after step 6: .*it keeps the old weights"):
            engine.update(6)
        assert server.runs.is_set()
        amid.goes_on.set()
        with pytest.raises(EngineError, match="it keeps the old weights"):
            amid.take(stream)
        engine.close()


def test_a_server_is_never_left_paused(tmp_path: Path) -> None:
    model = tiny()
    amid = Amid("full", "pause", folder=tmp_path, model=model)
    with amid.server as server:
        engine = amid.open()
        engine.update(5)
        server.worker.keeps = lambda name: True
        change(model)
        with pytest.raises(EngineError, match="has checksum"):
            engine.update(6)
        assert server.runs.is_set() and server.told[-1] == "/resume"
        engine.close()


def test_a_route_that_aborts_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a vLLM whose /pause knows no mode: it would abort what is under way."""
    from tests.helpers import fake_weight_sync

    monkeypatch.setitem(fake_weight_sync.ROUTES["paths"], "/pause", {"post": {}})
    amid = Amid("full", "pause", folder=tmp_path, model=tiny())
    with amid.server as server:
        engine = amid.open()
        engine.update(5)
        assert "/pause?mode=keep" not in server.told and "/reset_prefix_cache" in server.told
        engine.close()
