"""An OpenAI-compatible endpoint on the loopback, in front of whatever answers: the agents' side of a rollout.

    endpoint = ChatEndpoint()
    session = endpoint.open()               its key, for one agent; the address is the same for all
    session.inbox.get()                     Pending: what the agent asks, or whatever else was put there
    pending.answer(ChatAnswer(...))         or pending.refuse(400, "...")
    session.close()                         what still comes with its key is refused

    POST /v1/chat/completions               with tools; also as a stream, whose text comes in one piece
    GET  /v1/models                         the one model, ``MODEL``

A key is random and belongs to one session; a request without one is refused, as is one for another model. With
``is_checked`` a key is accepted only from a process that descends from its session's ``owner``: the kernel is asked for
the connection (sock_diag), and /proc for who holds it. What a request asks for is in force or refused: ``IGNORED``
names the exceptions, which the run decides for all requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from taut.data.read.json_io import did_you_mean, read_json, shown
from taut.data.rows.messages import Message, Tool, read_conversation
from taut.errors import DataError
from taut.inference.http_server import Guard, Refused, listen, serve_aside
from taut.inference.settings import HttpLimits
from taut.io.keeper import tree

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MODEL = "policy"
"""The name of the model."""
IGNORED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "user", "metadata", "store", "service_tier", "parallel_tool_calls"),
    *("reasoning_effort", "stream_options", "safety_identifier", "prompt_cache_key"),
)
"""Keys of a request that change nothing: sampling is the run's, since what is trained on is the run's distribution."""
ONLY: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "tool_choice": ("auto",),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "stop": ([],),
}
"""Keys of a request that may have these values only."""
READ = ("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream")
NOT_READ = ("refusal", "annotations", "audio", "function_call")
"""Keys of messages that clients send back, without a meaning for the template."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an agent."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    """The request's own limit of its answer."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to an agent."""

    message: Message
    """As a chat template reads it: arguments of calls are objects."""
    is_cut: bool
    num_prompt: int
    """Tokens of the prompt."""
    num_answer: int


@dataclass(eq=False, slots=True)
class Pending:
    """A request that waits for its answer."""

    asked: Asked
    _loop: asyncio.AbstractEventLoop
    _future: asyncio.Future[ChatAnswer]
    is_gone: bool = False
    """Whether the agent no longer waits."""

    def answer(self, answer: ChatAnswer) -> None:
        self._settle(answer)

    def refuse(self, status: int, message: str) -> None:
        self._settle(Refused(status, message))

    def _settle(self, result: ChatAnswer | Refused) -> None:
        def settle() -> None:
            if self._future.done():
                return
            if isinstance(result, Refused):
                self._future.set_exception(result)
            else:
                self._future.set_result(result)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)


@dataclass(eq=False, slots=True)
class Session:
    """The endpoint for one agent."""

    endpoint: ChatEndpoint
    key: str
    inbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Pending requests, in the order in which they came."""
    is_closed: bool = False
    refused: str = ""
    """Why its newest request was refused; empty where it was not."""
    owner: int = field(default_factory=os.getpid)
    """The process from which all descend that may use the key."""
    sockets: set[str] = field(default_factory=set)
    """Connections that are known to be theirs."""

    def is_own(self, port: int, endpoint_port: int) -> bool:
        """Whether one of them holds the connection that comes from ``port``."""
        name = _socket(port, endpoint_port)
        if name in self.sockets:
            return True
        if _holds(self.owner, name) or any(_holds(process, name) for process in tree(self.owner)):
            self.sockets.add(name)
        return name in self.sockets

    def close(self) -> None:
        """Refuse what waits, and what comes."""
        self.is_closed = True
        self.endpoint.sessions.pop(_digest(self.key), None)
        while not self.inbox.empty():
            if isinstance(left := self.inbox.get(), Pending):
                left.refuse(410, OVER)


OVER = "this trajectory is over; expected no further request; end the agent"


class ChatEndpoint:
    """The server. It ends with ``close``, or with the process."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        """By the digests of their keys: what is compared says nothing of a key."""
        self.is_checked = True
        """Whether a key is accepted from the processes alone that it belongs to."""
        limits = HttpLimits(max_connections=4096, max_bytes_in_flight=2**28)
        listener = listen("127.0.0.1", 0, backlog=512)
        self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self._stop = serve_aside(Guard(self._app(), limits, "127.0.0.1"), limits, listener)

    def open(self) -> Session:
        """A session with a key of its own."""
        session = Session(self, secrets.token_urlsafe(32))
        self.sessions[_digest(session.key)] = session
        return session

    def close(self) -> None:
        for session in list(self.sessions.values()):
            session.close()
        self._stop()

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        def session_of(request: Request) -> Session:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            session = self.sessions.get(_digest(key.strip()))
            if scheme.lower() != "bearer" or session is None:
                raise Refused(
                    401,
                    "Authorization: found no key of a trajectory that goes on; expected Bearer and the value of "
                    "OPENAI_API_KEY as the agent was given it; send it",
                )
            assert request.client is not None
            if self.is_checked and not session.is_own(request.client.port, self._port):
                raise Refused(
                    403,
                    "found the key of a trajectory in a process that its agent did not start; expected its own; "
                    "for a container or a service set rollout.environment.agent.callers=any",
                )
            return session

        async def models(request: Request) -> Response:
            session_of(request)
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "taut"}
            return JSONResponse({"object": "list", "data": [card]})

        async def complete(request: Request) -> Response:
            session = session_of(request)
            loop = asyncio.get_running_loop()
            try:
                body = _object(await request.body())
                asked = read_request(body)
            except DataError as error:
                session.refused = str(error)
                raise
            session.refused = ""
            pending = Pending(asked, loop, loop.create_future())
            session.inbox.put(pending)
            if session.is_closed:  # meanwhile
                raise Refused(410, OVER)
            try:
                answer = await pending._future
            except asyncio.CancelledError:  # the agent no longer waits
                pending.is_gone = True
                raise
            made = _completion(answer)
            if not body.get("stream"):
                return JSONResponse(made)
            has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(made, has_usage)]
            return Response("".join([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")

        async def refused(_: Request, error: Exception) -> Response:
            assert isinstance(error, Refused)
            return Response(error.body, error.status, error.headers)

        async def wrong(request: Request, error: Exception) -> Response:
            return await refused(request, Refused(400, str(error)))

        async def unknown(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            target = f"{request.method} {request.url.path}"
            message = f"{target}: expected POST /v1/chat/completions or GET /v1/models"
            return await refused(request, Refused(error.status_code, message))

        return Starlette(
            routes=[
                Route("/v1/chat/completions", complete, methods=["POST"]),
                Route("/v1/models", models, methods=["GET"]),
            ],
            exception_handlers={Refused: refused, DataError: wrong, HTTPException: unknown},
        )


def read_request(body: Mapping[str, Any]) -> Asked:
    """Read a request. Raises DataError where it asks for a feature that is not offered."""
    if body.get("model") != MODEL:
        raise DataError(
            f"model: found {shown(body.get('model'))}; expected {MODEL!r}, which is trained; set it, or the value of "
            "OPENAI_MODEL"
        )
    for key, value in body.items():
        if key in ONLY and value is not None and value not in ONLY[key]:
            raise DataError(
                f"{key}: found {shown(value)}; expected {shown(ONLY[key][0])}; take it out"
            )
        if key not in (*READ, *IGNORED, *ONLY):
            hint = did_you_mean(key, (*READ, *IGNORED, *ONLY))
            raise DataError(f"found the key {shown(key)}; expected {', '.join(READ)}{hint}")
    # a limit of the answer
    limits = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key)]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise DataError(f"max_tokens: found {shown(limits[0])}; expected a whole number above 0")
    # messages, as a template takes them
    messages = body.get("messages")
    said = [dict(m) if isinstance(m, Mapping) else m for m in messages] if messages else []
    silent: list[int] = []
    for number, message in enumerate(said):
        if isinstance(message, dict):
            if message.get("role") == "developer":
                message["role"] = "system"
            has_content = message.get("content") or message.get("tool_calls")
            if message.get("role") == "assistant" and not has_content:
                silent.append(number)  # an empty answer, sent back
                message["content"] = "(nothing)"
    conversation = read_conversation(said, "messages", body.get("tools"), ignore=NOT_READ)
    for number in silent:
        conversation.messages[number]["content"] = ""
    return Asked(conversation.messages, conversation.tools, min(limits, default=None))


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = read_json(body.decode())
    except ValueError as error:
        raise DataError(f"the body is no JSON: {error}; expected an object") from None
    if not isinstance(value, dict):
        raise DataError(f"the body is {shown(value)}; expected an object")
    return value


def _holds(process: int, name: str) -> bool:
    """Whether one of a process's descriptors has this name."""
    with suppress(OSError):  # it has ended meanwhile
        for number in os.listdir(f"/proc/{process}/fd"):  # noqa: PTH208 (there are many)
            with suppress(OSError):
                if os.readlink(f"/proc/{process}/fd/{number}") == name:  # noqa: PTH115
                    return True
    return False


def _socket(port: int, endpoint_port: int) -> str:
    """The name that /proc has for the client's end of a connection; empty: it is not known."""
    loopback = bytes((127, 0, 0, 1)) + bytes(12)
    ends = struct.pack(">HH", port, endpoint_port) + 2 * loopback + bytes(4) + b"\xff" * 8
    of_tcp = socket.AF_INET, socket.IPPROTO_TCP
    request = struct.pack("=IHHIIBBBBI", 72, 20, 1, 0, 0, *of_tcp, 0, 0, -1 % 2**32)
    with (
        suppress(OSError, AttributeError),  # sock_diag(7); the table in /proc/net is slow
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel,
    ):
        kernel.settimeout(1.0)
        kernel.send(request + ends)
        answer = kernel.recv(4096)
        if struct.unpack_from("=H", answer, 4)[0] == 20:
            return f"socket:[{struct.unpack_from('=I', answer, 84)[0]}]"
    return ""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _completion(answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer."""
    message = {"role": "assistant", "content": answer.message["content"]}
    if calls := answer.message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
    reason = "length" if answer.is_cut else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.num_prompt,
            "completion_tokens": answer.num_answer,
            "total_tokens": answer.num_prompt + answer.num_answer,
        },
    }


def _chunks(completion: Mapping[str, Any], has_usage: bool) -> list[dict[str, Any]]:
    """Return the answer as the events of a stream."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    head = {key: completion[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [end]},
    ]
    if has_usage:
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    return chunks
