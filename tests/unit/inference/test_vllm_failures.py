"""The server engine in trouble: what passes is waited for, what stays is an error, what is done is kept."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest
from tests.helpers.broken_servers import answers, repeats, serving
from tests.helpers.fake_vllm import (
    CONFIG,
    GREEDY,
    PROBED,
    FakeServer,
    Fault,
    after_probe,
    one,
    opened,
    prompt,
)
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import replace
from taut.errors import ConfigError, EngineError
from taut.inference import vllm_client
from taut.inference.vllm import ServerEngine
from taut.io.http import Answer, Unanswered

# Trouble


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500, text="{}"),
        Fault(status=503, text="busy"),
        Fault(status=429, text="{}", headers={"retry-after": "0"}),
        Fault(hangs_up=True),
    ],
)
def test_trouble_that_passes_is_waited_for(fault: Fault) -> None:
    server = FakeServer(faults=after_probe(lambda body, count: fault if count < 2 else None))
    assert one(server).finish_reason == "stop"
    assert len(server.requests) == PROBED + 3


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (
            Fault(status=500, text=json.dumps({"error": {"message": "engine\ndead"}})),
            r"HTTP 500 \(engine dead\) from http.+/completions \(3 attempts\)",
        ),
        (Fault(status=503, text="<html>"), r"HTTP 503 \(<html>\)"),
        (Fault(hangs_up=True), r"no answer \(\w+: .+\(3 attempts\)"),
        (Fault(status=302, text="x", headers={"location": "/y"}), "HTTP 302"),
        (Fault(status=404, text='{"detail": "Not Found"}'), "HTTP 404 .+Not Found"),
        (Fault(text="<html>hello"), "answered '<html>hello'; expected JSON"),
        (Fault(text='{"choices": []}'), "choices in an answer is not as it should be"),
        (Fault(text='{"choices": [{"token_ids": ["a"]}]}'), "choices.0.token_ids.0"),
        (Fault(text="[1]"), "the answer"),
        (Fault(text="[" * 99_999), "expected JSON"),
        (
            Fault(text="{}", headers={"content-encoding": "br"}),
            "in the content encoding 'br'; expe",
        ),
    ],
)
def test_trouble_that_stays_is_an_error(fault: Fault, found: str) -> None:
    with pytest.raises(EngineError, match=found) as caught:
        one(FakeServer(faults=after_probe(lambda body, count: fault)))
    assert "\n" not in str(caught.value)


def test_an_answer_that_inflates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "MAX_BYTES", 10**6)
    body = gzip.compress(bytes(10**8))
    with serving() as server:
        server.paths["/v1/models"] = answers(body, b"Content-Encoding: gzip")
        url, found = (
            f"{server.url}/v1",
            "more than 1,000,000 bytes; expected .+; set rollout.urls to",
        )
        tracemalloc.start()
        with pytest.raises(EngineError, match=found):
            ServerEngine.open(url, CONFIG, tiny_tokenizer(), [7], 64)
        assert tracemalloc.get_traced_memory()[1] < 10**7
        tracemalloc.stop()
        assert len(server.requests) == 1


def test_an_answer_that_drips_is_told_of() -> None:
    with serving() as server:
        server.paths["/v1/models"] = repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02)
        config = replace(CONFIG, {"timeout": 0.3, "retries": 1})
        with pytest.raises(EngineError, match=r"no answer within 0.3 s .+\(2 attempts\)"):
            ServerEngine.open(f"{server.url}/v1", config, tiny_tokenizer(), [7], 64)


def test_a_server_that_asks_for_more_patience_than_we_have_is_given_up() -> None:
    fault = Fault(status=429, text="{}", headers={"retry-after": "3600"})
    with pytest.raises(EngineError, match=r"HTTP 429 .+\(1 attempts\)"):
        one(FakeServer(faults=after_probe(lambda body, count: fault)))


def test_retry_after_is_waited_out() -> None:
    fault = Fault(status=429, text="{}", headers={"retry-after": "1"})
    server = FakeServer(faults=after_probe(lambda body, count: None if count else fault))
    begin = time.monotonic()
    one(server)
    assert time.monotonic() - begin >= 1


def test_retry_after_may_be_a_date() -> None:
    def _retry_after(value: str | None) -> float:
        headers = {} if value is None else {"retry-after": value}
        return Unanswered("busy", Answer(503, headers, b"")).retry_after

    assert _retry_after("17") == 17
    assert _retry_after(None) == _retry_after("soon") == 0
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 +99999999999999") == 0
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert _retry_after(format_datetime(datetime(2999, 1, 1, tzinfo=UTC), usegmt=True)) > 0


def test_a_slow_server_is_told_of() -> None:
    server = FakeServer(faults=after_probe(lambda body, count: Fault(slow=2.0)))
    config = replace(CONFIG, {"timeout": 0.3, "retries": 1})
    found = r"no answer within 0.3 s .+\(2 attempts\)"
    with opened(server, config) as engine, pytest.raises(EngineError, match=found):
        engine.generate([prompt("a", 1, 20)], GREEDY)


def test_a_dead_server_is_told_of() -> None:
    with FakeServer() as server:
        url = server.url
    with pytest.raises(EngineError, match=r"no answer \(ConnectError.+/models \(3 attempts\)"):
        ServerEngine.open(url, CONFIG, tiny_tokenizer(), [7], 64)


def test_what_is_done_is_kept_when_the_server_dies() -> None:
    server = FakeServer(
        faults=after_probe(lambda body, count: Fault(status=500, text="x") if count >= 5 else None)
    )
    kept: list[str] = []
    prompts = [prompt(f"{i}", 1, 20) for i in range(9)]
    config = replace(CONFIG, {"concurrency": 1})
    with opened(server, config) as engine, pytest.raises(EngineError, match="HTTP 500"):
        engine.generate(prompts, GREEDY, lambda c: kept.append(c.prompt_id))
    assert kept == ["0", "1", "2", "3", "4"]


def test_a_request_refused_leaves_the_others_alone() -> None:
    def refuse(body: dict[str, Any], count: int) -> Fault | None:
        text = json.dumps({"error": {"message": "Token id 60000 is out of vocabulary"}})
        return Fault(status=400, text=text) if body["prompt"] == [1, 30] else None

    prompts = [prompt("a", 1, 20), prompt("b", 1, 30), prompt("c", 1, 40)]
    with opened(FakeServer(faults=after_probe(refuse))) as engine:
        done = engine.generate(prompts, GREEDY)
    assert [c.finish_reason for c in done] == ["stop", "error", "stop"]
    assert done[1].ids_N.size == 0 and done[1].logp_N is None
    assert done[1].error is not None and "HTTP 400" in done[1].error
    assert "out of vocabulary" in done[1].error


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_works_at_once() -> None:
    server = FakeServer(faults=after_probe(lambda body, count: Fault(slow=20.0)))
    with opened(server) as engine:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt(f"{i}", 1, 20) for i in range(9)], GREEDY)
        engine.close()
        assert time.monotonic() - begin < 15


def test_closing_ends_what_is_under_way() -> None:
    server = FakeServer(faults=after_probe(lambda body, count: Fault(slow=20.0)))
    with opened(server) as engine:
        future = engine.pool.servers[0].vllm.openai.start("completions", {})
        begin = time.monotonic()
        engine.close()
        assert time.monotonic() - begin < 15
    assert future.done()


# The endpoint


def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, {"api_key_env": "TAUT_TEST_KEY"})
    monkeypatch.setenv("TAUT_TEST_KEY", "s3cret")
    with caplog.at_level(logging.DEBUG):
        with opened(FakeServer(key="s3cret"), config) as engine:
            assert engine.generate([prompt("a", 1, 20)], GREEDY)[0].finish_reason == "stop"
            assert "s3cret" not in repr(engine)
        monkeypatch.setenv("TAUT_TEST_KEY", "wr0ng")
        with (
            pytest.raises(EngineError, match=r"HTTP 401 .+Incorrect.+server.api_key_env") as caught,
            opened(FakeServer(key="s3cret"), config),
        ):
            pytest.fail("opened")
    assert "wr0ng" not in str(caught.value) and "***" in str(caught.value)
    assert "s3cret" not in caplog.text and "wr0ng" not in caplog.text


def test_a_key_that_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAUT_TEST_KEY", raising=False)
    config = replace(CONFIG, {"api_key_env": "TAUT_TEST_KEY"})
    found = r"server\.api_key_env=TAUT_TEST_KEY: no environment variable"
    with pytest.raises(ConfigError, match=found), opened(FakeServer(), config):
        pytest.fail("opened")


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "ftp://x/v1", "http:///v1", ""])
def test_a_url_is_one(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL"):
        ServerEngine.open(url, CONFIG, tiny_tokenizer(), [7], 64)


def test_a_key_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"server\.api_key_env") as caught:
        ServerEngine.open("http://me:s3cret@x/v1", CONFIG, tiny_tokenizer(), [7], 64)
    assert "s3cret" not in str(caught.value)


def test_a_url_without_v1_says_what_is_expected() -> None:
    with FakeServer() as server, pytest.raises(EngineError, match=r"HTTP 404 .+as in http.+/v1"):
        ServerEngine.open(server.url.removesuffix("/v1"), CONFIG, tiny_tokenizer(), [7], 64)


def test_render_is_what_the_server_makes_of_a_chat() -> None:
    server = FakeServer()
    with opened(server) as engine:
        assert engine.render([{"role": "user", "content": "hi"}]) == [1, 2, 3]
        server.rendered = None
        with pytest.raises(EngineError, match="prompt_token_ids for a chat"):
            engine.render([{"role": "user", "content": "hi"}])
