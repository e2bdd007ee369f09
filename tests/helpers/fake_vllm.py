"""An endpoint on the loopback that speaks vLLM's protocol, answers what it is told to, and fails as it is told to.

    with FakeServer() as server:
        ServerEngine.open(server.url, ...)

It "samples" by a rule: token i of an answer to a prompt is the prompt's last id plus one plus i, ending with the first
id of ``ends``. Its logprobs are -2 for the model's own and, where ``mode`` is processed, what top_k=1 or
temperature makes of them. ``faults`` is asked for each request to /completions: None, or what to send instead. A prompt
that is a text is no such request: it is answered with its ids, by ``spell``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import numpy as np
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine
from taut.types import Completion, Prompt

Body = dict[str, Any]
BEST = -2.0
"""The most likely token's logprob, at every place."""


@dataclass
class Fault:
    """What is sent in place of a completion."""

    status: int = 200
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    hangs_up: bool = False
    slow: float = 0.0
    """Seconds before anything is sent; then the usual answer, if nothing else is asked for."""
    changes: Callable[[Body], None] | None = None
    """Changes the usual answer's only choice."""


@dataclass
class FakeServer:
    """Serves ``names``; ``requests`` has every body sent to /completions, in order of arrival."""

    names: tuple[str, ...] = ("model",)
    max_model_len: int | None = 64
    owner: str = "vllm"
    """Whose server it says it is."""
    mode: str = "raw"
    ends: tuple[int, ...] = (7,)
    """Ids at which the server stops by itself: generation_config's."""
    length: int = 4
    """An answer's tokens, the one that ends it included."""
    rendered: list[int] | None = field(default_factory=lambda: [1, 2, 3])
    spell: Callable[[str], list[int] | None] = lambda text: tiny_tokenizer()(
        text, add_special_tokens=False
    )["input_ids"]
    """The ids of a text; None: they are not told."""
    key: str | None = None
    faults: Callable[[Body, int], Fault | None] = lambda body, count: None
    """Given a request and how many came before it."""
    address: tuple[str, int] = ("127.0.0.1", 0)
    """Where it listens; port 0: any."""
    requests: list[Body] = field(default_factory=list)
    most: int = 0
    """Most requests that were under way at a time."""

    def __enter__(self) -> Self:
        server = self
        self.under_way, self.lock = 0, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body go out together

            def do_GET(self) -> None:
                server.handle(self, None)

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                if len(raw := self.rfile.read(size)) < size:
                    self.close_connection = True  # the client has gone
                else:
                    server.handle(self, json.loads(raw))

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._http = _Http(self.address, Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://{self.address[0]}:{self._http.server_port}/v1"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def handle(self, handler: BaseHTTPRequestHandler, body: Body | None) -> None:
        if self.key is not None and handler.headers["authorization"] != f"Bearer {self.key}":
            said = f"Incorrect API key {handler.headers['authorization']}"
            _send(handler, 401, json.dumps({"error": {"message": said}}))
        elif handler.path == "/v1/models":
            card = {"max_model_len": self.max_model_len, "owned_by": self.owner}
            cards = [{"id": name, **card} for name in self.names]
            _send(handler, 200, json.dumps({"object": "list", "data": cards}))
        elif handler.path == "/health":
            _send(handler, 200, "")
        elif handler.path == "/v1/chat/completions":
            _send(handler, 200, json.dumps({"prompt_token_ids": self.rendered, "choices": []}))
        elif handler.path == "/v1/completions" and body is not None:
            self._complete(handler, body)
        else:
            _send(handler, 404, json.dumps({"detail": "Not Found"}))

    def _complete(self, handler: BaseHTTPRequestHandler, body: Body) -> None:
        if isinstance(body["prompt"], str) and "prompt_logprobs" not in body:
            told = {"prompt_token_ids": self.spell(body["prompt"]), "token_ids": [1]}
            _send(handler, 200, json.dumps({"choices": [told]}))
            return
        with self.lock:
            count = len(self.requests)
            self.requests.append(body)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        fault = self.faults(body, count) or Fault()
        time.sleep(fault.slow)
        is_usual = not (fault.hangs_up or fault.status != 200 or fault.text)
        choice = self.choice(body) if is_usual else {}
        with self.lock:
            self.under_way -= 1
        if fault.hangs_up:
            handler.close_connection = True
        elif not is_usual:
            _send(handler, fault.status, fault.text, fault.headers)
        else:
            if fault.changes is not None:
                fault.changes(choice)
            _send(handler, 200, json.dumps({"choices": [choice]}))

    def choice(self, body: Body) -> Body:
        """What vLLM would answer, had it this model."""
        first = body["prompt"][-1] + 1
        ids = [*range(first, first + self.length - 1), self.ends[0]]
        ends = {*self.ends, *body["stop_token_ids"]}
        stops = next((at for at, index in enumerate(ids) if index in ends), len(ids))
        reason = "stop" if stops < body["max_tokens"] else "length"
        ids = ids[: min(stops + 1, body["max_tokens"])]
        value = self._value(body)
        return {
            "index": 0,
            "text": "not to be read",
            "finish_reason": reason,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {
                "token_logprobs": [value] * len(ids),
                "top_logprobs": [{"a": value, "b": value - 1}] * len(ids),
            },
        }

    def _value(self, body: Body) -> float:
        if self.mode == "raw":
            return BEST
        return 0.0 if body["top_k"] == 1 else BEST / (body["temperature"] or 1)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    is_closed = False

    def server_close(self) -> None:
        self.is_closed = True
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what some tests are about; anything else is a fault of this file. What is given up
        when the server has closed says nothing: another test would read it.
        """
        if not self.is_closed and not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _send(
    handler: BaseHTTPRequestHandler, status: int, text: str, headers: dict[str, str] | None = None
) -> None:
    raw = text.encode()
    handler.send_response(status)
    for name, value in {**(headers or {}), "content-length": str(len(raw))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(raw)


CONFIG = ServerConfig(timeout=5.0, retries=2, backoff=0.001, concurrency=4)
PROBED = 2
"""Requests that opening makes."""
GREEDY = Sampling(temperature=0, max_new_tokens=8)


def prompt(name: str, *ids: int, max_new_tokens: int | None = None) -> Prompt:
    return Prompt(name, np.array(ids, dtype=np.int64), max_new_tokens)


def after_probe(fault: Callable[[dict[str, Any], int], Fault | None]) -> Any:
    """The fault, once the engine is open."""
    return lambda body, count: fault(body, count - PROBED) if count >= PROBED else None


def changing(**values: Any) -> Any:
    return after_probe(lambda body, count: Fault(changes=lambda choice: choice.update(values)))


@contextmanager
def opened(
    server: FakeServer,
    config: ServerConfig = CONFIG,
    context: int | None = 64,
    section: str = "",
) -> Iterator[ServerEngine]:
    with server:
        engine = ServerEngine.open(
            server.url, config, tiny_tokenizer(), [7], context, section=section
        )
        try:
            yield engine
        finally:
            engine.close()


def one(server: FakeServer, sampling: Sampling = GREEDY) -> Completion:
    with opened(server) as engine:
        (completion,) = engine.generate([prompt("a", 1, 20)], sampling)
    return completion
