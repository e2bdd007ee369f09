"""MCP servers as tools: ``mcp:COMMAND`` starts a server that speaks over its standard streams, ``mcp:http://...`` asks
one by Streamable HTTP (modelcontextprotocol.io). Each is connected to once per run, and on each rank.

    server = connect("python weather.py", seconds=15)
    server.tools        -> a ToolFunction for each tool that it lists
    server.close()

A call's error, a refusal and a time limit are what the policy reads (``ToolFault``); a server that is gone is a fault
of the tool, so the trajectory is an error. A command is split as a shell does, and run without one, with the few
environment variables that the library hands on (PATH, HOME, ...): ``env NAME=value COMMAND`` adds others, and a value
``$NAME`` is that of taut's own variable. A server that is started ends with all that it started
(``taut.io.keeper``). A message of more than ``LONGEST`` bytes ends one that was started, and is an error of the call at
a URL. The library ``mcp`` is imported here only; its calls run in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from errno import ENOENT
from functools import partial
from threading import Thread
from typing import Any

import httpx2
import mcp
from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from taut.errors import ConfigError
from taut.io.http import PLAIN
from taut.io.keeper import kept
from taut.io.programs import Tail
from taut.rl.environments.tools import ToolFunction

START_SECONDS = 60.0
"""Seconds in which a server has to list its tools."""
CLOSE_SECONDS = 10.0
"""Seconds in which a server may end."""
LEAVING = 1.5
"""Of these, seconds that one has which was started, once its input is closed."""
LONGEST = 2**23
"""Bytes of a message."""
EVENTS = "text/event-stream"


class ToolFault(ValueError):
    """A server answers a call with an error: the policy reads it."""


class McpServer:
    """A connection to a server. ``tools``: what it offers."""

    def __init__(self, spec: str, seconds: float) -> None:
        """``spec``: a command or a URL. ``seconds``: time limit of a call. Raises ConfigError without an answer."""
        self.spec, self.seconds = spec, seconds
        self._words: Tail | None = None
        # else it logs a traceback for each line that it cannot read
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        self._ready: Future[list[ToolFunction]] = Future()
        self._thread = Thread(target=asyncio.run, args=(self._connected(),), daemon=True)
        self._thread.start()
        try:
            self.tools = self._ready.result(timeout=START_SECONDS)
        except Exception as error:  # noqa: BLE001 (whatever keeps a server from answering is shown)
            why = self._last_words() or " ".join(f"{type(error).__name__}: {error}".split())
            self.close()
            raise ConfigError(
                f"rollout.environment.tools has mcp:{spec}, which does not list its tools: {why[:300]}; expected an "
                "MCP server's command or URL; try it alone, and correct it"
            ) from None

    def close(self) -> None:
        """End the connection, and a server that was started."""
        if hasattr(self, "_loop"):
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_SECONDS)

    async def _connected(self) -> None:
        """The connection from its beginning to its end."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with mcp.Client(self._transport(), client_info=None) as self._client:
                self._ready.set_result(await self._list())
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 (raised again where the server is opened)
            first: BaseException = error  # inside the groups that task groups make
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not self._ready.done():
                self._ready.set_exception(first)

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self.spec.startswith(("http://", "https://")):
            async with create_mcp_http_client() as client:
                client.event_hooks["response"].append(_bounded(LONGEST))
                async with streamable_http_client(self.spec, http_client=client) as streams:
                    yield streams
            return
        program, *arguments = command = [_filled(word) for word in shlex.split(self.spec)]
        if shutil.which(program, path=get_default_environment().get("PATH")) is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), program)
        words, write = os.pipe()
        self._words = Tail(os.fdopen(words, "rb"))
        program, *arguments = kept(command, 0, grace=LEAVING, longest=LONGEST)
        with os.fdopen(write, "w") as errors:
            server = StdioServerParameters(command=program, args=arguments)
            async with stdio_client(server, errors) as streams:
                yield streams

    async def _list(self) -> list[ToolFunction]:
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or tool.title or tool.name,
                    "parameters": tool.input_schema,
                }
                schema = {"type": "function", "function": function}
                tools.append(ToolFunction(schema, partial(self._call, tool.name)))
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def _call(self, tool: str, /, **arguments: Any) -> str:
        """The result of a call as text. Raises ToolFault where the server answers with an error or not in time."""
        calling = asyncio.run_coroutine_threadsafe(
            self._client.call_tool(tool, arguments, read_timeout_seconds=self.seconds), self._loop
        )
        try:
            result = calling.result(timeout=self.seconds + 1)
        except TimeoutError:
            calling.cancel()
            raise ToolFault(f"{tool} did not answer within {self.seconds:g} s") from None
        except mcp.MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ConnectionError(
                    f"the MCP server {self.spec} is gone: {self._last_words() or error.message}"
                ) from None
            if error.code == REQUEST_TIMEOUT:
                raise ToolFault(f"{tool} did not answer within {self.seconds:g} s") from None
            raise ToolFault(error.message) from None
        text = "\n".join(
            part.text if part.type == "text" else f"({part.type})" for part in result.content
        )
        if result.is_error:
            raise ToolFault(text or f"{tool} failed")
        return text

    def _last_words(self) -> str:
        """The last line of what a server that was started wrote to its standard error."""
        lines = self._words.end(0.2) if self._words is not None else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _filled(word: str) -> str:
    """A word of a command; ``NAME=$OTHER`` has the value of taut's variable OTHER, so that no configuration has it."""
    name, _, variable = word.partition("=$")
    if not (name.isidentifier() and variable.isidentifier()):
        return word
    if variable not in os.environ:
        raise KeyError(f"{word} names a variable that is not set")
    return f"{name}={os.environ[variable]}"


class _Bounded(httpx2.AsyncByteStream):
    """A body that ends with an error after so many bytes."""

    def __init__(self, body: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._body, self._max_bytes = body, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_received = 0
        async for piece in self._body:
            num_received += len(piece)
            if num_received > self._max_bytes:
                raise httpx2.StreamError(f"more than {self._max_bytes:,} bytes, uncompressed")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


def _bounded(max_bytes: int) -> Callable[[httpx2.Response], Awaitable[None]]:
    """A hook for another library's client: bodies of more bytes are errors, as are compressed ones. A stream of events
    may go on; who reads it bounds an event."""

    async def bound(response: httpx2.Response) -> None:
        is_plain = response.headers.get("content-encoding", "").strip().lower() in PLAIN
        if not (is_plain and response.headers.get("content-type", "").startswith(EVENTS)):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, max_bytes if is_plain else 0)

    return bound
