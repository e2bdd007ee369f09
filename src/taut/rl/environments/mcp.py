"""MCP servers as tools: ``mcp:COMMAND`` starts a server that speaks over its standard streams, ``mcp:http://...`` asks
one by Streamable HTTP (modelcontextprotocol.io). Each is connected to once per run, and on each rank.

    server = connect("python weather.py", seconds=15)
    server.tools        -> a ToolFunction for each tool that it lists
    server.close()

A call's error, a refusal and a time limit are what the policy reads (``ToolFault``); a server that is gone is a fault
of the tool, so the trajectory is an error. A command is split as a shell does, and run without one, with the few
environment variables that the library hands on (PATH, HOME, ...): ``env NAME=value COMMAND`` adds others. The library
``mcp`` is imported here only; its calls run in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TextIO

import mcp
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from taut.errors import ConfigError
from taut.rl.environments.tools import ToolFunction

START_SECONDS = 60.0
"""Seconds in which a server has to list its tools."""
CLOSE_SECONDS = 10.0
"""Seconds in which a server may end."""


class ToolFault(ValueError):
    """A server answers a call with an error: the policy reads it."""


class McpServer:
    """A connection to a server. ``tools``: what it offers."""

    def __init__(self, spec: str, seconds: float) -> None:
        """``spec``: a command or a URL. ``seconds``: time limit of a call. Raises ConfigError without an answer."""
        self.spec, self.seconds = spec, seconds
        self._files = TemporaryDirectory(prefix="taut-mcp-")
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
        if hasattr(self, "_loop") and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_SECONDS)
        self._files.cleanup()

    async def _connected(self) -> None:
        """The connection from its beginning to its end."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            with (Path(self._files.name) / "stderr").open("w") as words:
                async with mcp.Client(self._transport(words), client_info=None) as self._client:
                    self._ready.set_result(await self._list())
                    await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 (raised again where the server is opened)
            if not self._ready.done():
                self._ready.set_exception(_first(error))

    def _transport(self, words: TextIO) -> Any:
        if self.spec.startswith(("http://", "https://")):
            return self.spec
        command, *arguments = shlex.split(self.spec)
        return stdio_client(StdioServerParameters(command=command, args=arguments), errlog=words)

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
                tools.append(ToolFunction(schema, _named(partial(self._call, tool.name))))
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def _call(self, tool: str, arguments: dict[str, Any]) -> str:
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
        path = Path(self._files.name) / "stderr"
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _named(call: Callable[[dict[str, Any]], str]) -> Callable[..., str]:
    """The call with its arguments by name, as tools are called."""
    return lambda **arguments: call(arguments)


def _first(error: BaseException) -> BaseException:
    """The error inside the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
