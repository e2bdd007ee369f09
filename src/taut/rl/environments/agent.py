"""An agent as a black box: a program, or a function, that asks the policy through an OpenAI-compatible endpoint.

    rollout.environment.name = "agent:COMMAND"              a process for each trajectory
                               "agent:FILE.py:function"     a thread for each
                               "verifiers:ENV_ID"           a thread for each, which calls ``verifiers.py``

A process gets the row as JSON on its standard input, and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its
environment. Its end is the end of the trajectory; where the last line of its standard output is a JSON object with the
key ``reward``, that is the reward of the trajectory. A function is called as ``function(row, endpoint)``, with the same
three as attributes of ``endpoint``, and returns the reward, or None.

    run = agents.start()
    run.begin(row)          -> Asked: the first request; or Ended
    run.reply(answer)       -> the next request, or Ended
    run.end()               ends it, whatever it does

The agent's own time, between an answer and its next request, is limited, all of it together: an agent that takes longer
is ended. A process is killed with all that it started; a thread cannot be, so its requests are refused from then on,
and the run stops when ``MOST_LATE`` threads go on. Exit codes other than 0, exceptions and time limits are errors of
the trajectory. Agents are the user's own programs; nothing holds them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from threading import Thread
from typing import Any, NamedTuple

from taut.errors import ConfigError, UserCodeError
from taut.rl.environments.chat_endpoint import MODEL, Asked, ChatAnswer, ChatEndpoint, Pending
from taut.rl.environments.tools import load_own

MOST_LATE = 32
"""Threads of functions that go on after their trajectory at which the run stops."""
GRACE = 5.0
"""Seconds that ending an agent may take."""


class Endpoint(NamedTuple):
    """Where a function's agent asks."""

    base_url: str
    api_key: str
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an agent."""

    reward: Any = None
    """What it returned; None: nothing."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not answered, with the reason."""

    reason: str


class Next(NamedTuple):
    """What an agent does next."""

    event: Asked | Ended
    was_read: bool = True
    """Whether it was there to get the answer before."""


class Agents:
    """What starts agents. ``close`` ends all of them."""

    def __init__(
        self,
        spec: str,
        seconds: float,
        function: Callable[..., Any] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``spec``: a command or FILE.py:function; or the name of ``function``. ``seconds``: of an agent's own time.

        Raises ConfigError where there is nothing to start.
        """
        self.spec, self.seconds, self._on_close = spec, seconds, on_close
        self.function = function
        self.command: list[str] = []
        key = "rollout.environment.name"
        if function is not None:
            pass
        elif is_function(spec):
            self.function = load_own(spec, key, "function")
        else:
            try:
                self.command = shlex.split(spec)
            except ValueError as error:
                raise ConfigError(
                    f"{key} is agent:{spec}, which cannot be split into words ({error}); expected a command; correct it"
                ) from None
            if not self.command:
                raise ConfigError(
                    f"{key} is agent: without a command; expected agent:COMMAND or agent:FILE.py:function; name one"
                )
        self.endpoint = ChatEndpoint()
        self.runs: set[AgentRun] = set()
        self.late: list[Thread] = []
        """Threads that go on after their trajectory."""

    def start(self) -> AgentRun:
        """A run of the agent, not yet begun."""
        return AgentRun(self)

    def close(self) -> None:
        for run in list(self.runs):
            run.end()
        self.endpoint.close()
        self._on_close()


class AgentRun:
    """The agent of one trajectory. One thread at a time uses it."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._left = agents.seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._pending: Pending | None = None

    def begin(self, row: dict[str, Any]) -> Next:
        """Start it. Raises UserCodeError where it cannot be started."""
        agents = self._agents
        agents.runs.add(self)
        self._session = agents.endpoint.open()
        target, arguments = self._call, [row]
        if agents.function is None:
            self._process, target = self._open(), self._wait
        self._thread = Thread(target=target, args=arguments, name="agent", daemon=True)
        self._thread.start()
        return self._next()

    def reply(self, answer: ChatAnswer | Refusal) -> Next:
        """Answer its request."""
        assert self._pending is not None, "nothing was asked"
        was_read = not self._pending.is_gone
        if isinstance(answer, Refusal):
            self._session.refused = answer.reason
            self._pending.refuse(400, answer.reason)
        else:
            self._pending.answer(answer)
        self._pending = None
        return self._next(was_read)

    def end(self) -> None:
        """End it, if it goes on."""
        self._agents.runs.discard(self)
        self._session.close()
        if self._pending is not None:
            self._pending.refuse(410, "this trajectory is over; end the agent")
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        assert self._thread is not None
        if self._agents.function is None:
            self._thread.join(GRACE)
        elif self._thread.is_alive():
            late = self._agents.late
            late[:] = [thread for thread in (*late, self._thread) if thread.is_alive()]
            if len(late) >= MOST_LATE:
                raise UserCodeError(
                    f"{len(late)} calls of the agent {self._agents.spec} go on after their trajectories were ended; "
                    "expected them to return; correct it, raise rollout.environment.timeout, or make it a command, "
                    "which can be ended"
                )

    def _next(self, was_read: bool = True) -> Next:
        """What it does next, within what is left of its time."""
        while True:
            began = time.monotonic()
            try:
                event = self._session.inbox.get(timeout=max(self._left, 0.0))
            except Empty:
                self.end()
                seconds = f"{self._agents.seconds:g} s of its own"
                reason = f"did not end: it has taken {seconds} (rollout.environment.timeout)"
                return Next(Ended(error=reason), was_read)
            self._left -= time.monotonic() - began
            if not isinstance(event, Pending):
                self.end()
                return Next(event, was_read)
            if not event.is_gone:
                self._pending = event
                return Next(event.asked, was_read)

    def _refused(self) -> str:
        """Why its newest request was refused, which programs seldom print."""
        reason = self._session.refused
        return f"; its last request was refused: {reason}"[:300] if reason else ""

    # -- a function

    def _call(self, row: dict[str, Any]) -> None:
        assert self._agents.function is not None
        try:
            endpoint = Endpoint(self._agents.endpoint.url, self._session.key)
            ended = Ended(self._agents.function(row, endpoint))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything; it is shown)
            reason = " ".join(f"raised {type(error).__name__}: {error}".split())
            ended = Ended(error=reason[:300] + self._refused())
        self._session.inbox.put(ended)

    # -- a process

    def _open(self) -> subprocess.Popen[bytes]:
        url, key = self._agents.endpoint.url, self._session.key
        direct = ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY"))))
        added = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }
        try:
            return subprocess.Popen(
                self._agents.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **added},
                start_new_session=True,
            )
        except OSError as error:
            self._session.close()
            self._agents.runs.discard(self)
            raise UserCodeError(
                f"the agent {self._agents.spec} cannot be started: {error.strerror or error}; expected a program; "
                "correct rollout.environment.name"
            ) from None

    def _wait(self, row: dict[str, Any]) -> None:
        assert self._process is not None
        out, err = self._process.communicate(json.dumps(row, default=str).encode())
        if code := self._process.returncode:
            lines = err.decode(errors="replace").strip().splitlines()
            why = f": {lines[-1]}" if lines else ""
            ended = Ended(error=f"ended with exit code {code}{why}"[:300] + self._refused())
        else:
            ended = Ended(_printed(out.decode(errors="replace")))
        self._session.inbox.put(ended)


def is_function(spec: str) -> bool:
    """Whether it names a function of a file, not a command."""
    file, _, name = spec.rpartition(":")
    return file.endswith(".py") and name.isidentifier() and not set(spec) & set(" \t\"'")


def _printed(text: str) -> Any:
    """The reward in the last line that was printed."""
    lines = text.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return said.get("reward") if isinstance(said, Mapping) else None
