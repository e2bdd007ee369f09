"""Adapters loaded and unloaded where answers are lost or late, as vLLM has it, and the keys that messages name."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.helpers.fake_vllm import CONFIG, Body, FakeServer, Fault, _send, opened, prompt
from tests.helpers.fake_weight_sync import WeightServer, change, tiny, trained
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import replace
from taut.errors import ConfigError, EngineError, TautError
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass
class Losing(WeightServer):
    """Does what it is asked the first time, and its answer is lost. Refuses a name it has loaded already, as vLLM."""

    has: tuple[str, ...] = ("adapter",)
    loses: set[str] = field(default_factory=lambda: {LOAD, UNLOAD})
    refuses: bool = False
    """Whether it refuses every adapter."""

    def handle(self, handler: Any, body: Body | None) -> None:
        name = (body or {}).get("lora_name")
        if handler.path == LOAD and (name in self.adapters or (name and self.refuses)):
            message = f"The lora adapter '{name}' has already been loaded."
            _send(handler, 400, json.dumps({"error": {"message": message}}))
        elif name is not None and handler.path in self.loses:
            self.loses.discard(handler.path)
            self._adapter(handler.path, body or {})
            handler.close_connection = True
        else:
            super().handle(handler, body)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Set when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def pushing(server: FakeServer, **keys: Any) -> ServerEngine:
    """An engine whose server follows an adapter."""
    model = apply_lora(tiny(), LoraConfig(rank=2, train_token_rows="never"))
    change(model)
    config = replace(CONFIG, keys)
    engine = ServerEngine.open(server.url, config, tiny_tokenizer(), [7], 64)
    return engine.follow(trained(model))


def test_an_adapter_whose_answers_were_lost_is_loaded_and_unloaded() -> None:
    with Losing() as server:
        engine = pushing(server)
        engine.update(0)
        engine.update(1)
        assert list(server.adapters) == [engine.pool.servers[0].serving.model]
        assert server.loses == set()
        engine.close()


def test_an_adapter_that_is_refused_ends_the_push() -> None:
    with Losing(loses=set(), refuses=True) as server:
        engine = pushing(server)
        with pytest.raises(EngineError, match=r"step 0: .*HTTP 400 .*already been loaded"):
            engine.update(0)
        engine.close()


def test_an_adapter_that_stays_though_it_was_unloaded_ends_the_push() -> None:
    with Losing(loses=set()) as server:
        engine = pushing(server)
        engine.update(0)
        server.has = ()
        (it,) = engine.pool.servers
        with pytest.raises(EngineError, match=r"HTTP 404 from .*unload_lora_adapter"):
            it.vllm.unload_adapter(it.serving.model)
        engine.close()


def test_an_adapter_has_the_time_of_weights_to_load(held: threading.Event) -> None:
    class Slow(Losing):
        def handle(self, handler: Any, body: Body | None) -> None:
            if handler.path == LOAD and body:
                held.wait()
            super().handle(handler, body)

    found = r"no answer within 0\.05 s .*\(2 attempts\).*set rollout\.server\.sync\.timeout, then"
    with Slow(loses=set()) as server:
        engine = pushing(server, **{"sync.timeout": 0.05})
        with pytest.raises(EngineError, match=found):
            engine.update(0)
        engine.close()


@pytest.mark.parametrize("section", ["", "rollout."])
def test_messages_name_the_keys_of_the_run_that_meets_them(section: str) -> None:
    def said(server: FakeServer, kind: type[TautError], **keys: Any) -> str:
        with pytest.raises(kind) as e, opened(server, replace(CONFIG, keys), section=section):
            pytest.fail("opened")
        return str(e.value)

    assert f"set {section}server.name" in said(FakeServer(names=("x", "y")), EngineError)
    assert f"expected {section}server.name=z;" in said(FakeServer(), EngineError, name="z")
    assert f"; set {section}server.api_key_env to" in said(FakeServer(key="secret"), EngineError)
    missing = said(FakeServer(), ConfigError, api_key_env="TAUT_TEST_NONE")
    assert (
        missing.startswith(f"{section}server.api_key_env=")
        and f"remove {section}server.api_key_env" in missing
    )
    gone = said(FakeServer(faults=lambda body, count: Fault(hangs_up=True)), EngineError)
    assert f"set {section}server.timeout or {section}server.retries, then" in gone
    with opened(FakeServer(max_model_len=9), section=section) as engine:
        assert engine.decisions[0][0] == f"{section}server.name"
        with pytest.raises(EngineError, match=f"set {section or 'sampling.'}max_new_tokens"):
            engine.generate([prompt("a", 1, 20)], Sampling(max_new_tokens=8))
    with pytest.raises(ConfigError, match=f"^{section}urls=x: "):
        ServerEngine.open("x", CONFIG, tiny_tokenizer(), [7], 64, section=section)
