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
is ended. A process ends with all that it started, as it does where taut ends (``taut.io.programs``); a thread cannot be
ended, so its requests are refused from then on, and the run stops when ``MOST_LATE`` threads go on. Exit codes other
than 0, exceptions and time limits are errors of the trajectory. Agents are the user's own programs; nothing holds them,
but the key of one is worth nothing to another: a request counts only from a process that descends from the agent.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from queue import Empty
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Any, NamedTuple

from taut.config import Decision, changed
from taut.errors import ConfigError, UserCodeError
from taut.io.programs import KEPT, Program
from taut.rl.environments.chat_endpoint import (
    MODEL,
    Asked,
    ChatAnswer,
    ChatEndpoint,
    Pending,
    Session,
)
from taut.rl.environments.tools import awaited_value, load_own
from taut.rl.settings import AgentConfig, is_function

MOST_LATE = 32
"""Threads of functions that go on after their trajectory at which the run stops."""
GRACE = 5.0
"""Seconds that ending an agent may take."""
PROBE_SECONDS = 20.0
KEY = "rollout.environment.agent"
PROBE = """
import os, socket, sys
key = os.environ.get("OPENAI_API_KEY") or os.read(int(os.environ["OPENAI_API_KEY_FD"]), 999).decode()
port = int(os.environ["OPENAI_BASE_URL"].rpartition(":")[2].partition("/")[0])
with socket.create_connection(("127.0.0.1", port)) as asking:
    lines = "GET /v1/models HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}", "", ""
    asking.sendall("\\r\\n".join(lines).encode())
    print(asking.recv(12)[9:].decode())
"""
"""An agent whose last line is the status with which it is answered."""


class Endpoint(NamedTuple):
    """The endpoint that a function's agent asks."""

    base_url: str
    api_key: str
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an agent."""

    reward: Any = None
    """The reward that it returned; None: nothing."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not answered, with the reason."""

    reason: str


class Next(NamedTuple):
    """The next event of an agent."""

    event: Asked | Ended
    was_read: bool = True
    """Whether it was there to get the answer before."""


class Agents:
    """Starts agents. ``close`` ends all of them."""

    def __init__(
        self,
        spec: str,
        seconds: float,
        function: Callable[..., Any] | None = None,
        on_close: Callable[[], None] = lambda: None,
        config: AgentConfig = AgentConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """``spec``: a command or FILE.py:function; or the name of ``function``. ``seconds``: of an agent's own time.

        Raises ConfigError where there is nothing to start.
        """
        # the function, or the command in words
        self.spec, self.seconds, self._on_close, self.config = spec, seconds, on_close, config
        self.function = function
        self.command: list[str] = []
        key = "rollout.environment.name"
        if function is not None:
            pass
        elif is_function(spec):
            self.function = load_own(spec, key, "function", "taut.environments")
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
        self.environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
        for name in changed(config, ("key",)) if self.function is not None else ():
            raise ConfigError(
                f"{KEY}.{name} is set and {key} is {spec}, a function of this process: nothing reads it; expected a "
                f"command; take {name} out"
            )
        # the endpoint that all of them ask
        self.endpoint = ChatEndpoint()
        self.runs: set[AgentRun] = set()
        self.late: list[Thread] = []
        """Threads that go on after their trajectory."""
        self.is_apart = False
        self.decision = self._examine()

    def _examine(self) -> Decision:
        """Find out by agents that only ask what keeps agents apart on this machine."""
        faults: list[str] = []
        for is_checked, is_apart in product(
            (True, False) if self.config.callers == "own" else (False,),
            (True, False) if self.function is None and os.getuid() == 0 else (False,),
        ):
            self.endpoint.is_checked, self.is_apart = is_checked, is_apart
            if (fault := self._probe()) is None:
                break
            faults.append(fault)
        in_file = self.config.key == "descriptor"
        reasons = [f"{KEY}.key=descriptor" if in_file else "where OpenAI's clients look for it"]
        if self.config.callers == "any":
            reasons.append(f"{KEY}.callers=any")
        elif not self.endpoint.is_checked:
            reasons.append(f"found no way to tell whose a request is: {faults[0]}")
        if self.is_apart:
            reasons.append("agents do not see each other in /proc")
        elif self.function is None:
            reasons.append(f"agents see each other in /proc: {[*faults, 'taut is not root'][0]}")
        callers = "its own processes" if self.endpoint.is_checked else "any process"
        where = "in the file OPENAI_API_KEY_FD" if in_file else "in OPENAI_API_KEY"
        return Decision("an agent's key", f"{where}, accepted from {callers}", "; ".join(reasons))

    def _probe(self) -> str | None:
        """Why an agent that only asks is not answered; None: it is."""
        session = self.endpoint.open()
        try:
            program = self.run_program([sys.executable, "-I", "-S", "-c", PROBE], session)
            with suppress(subprocess.TimeoutExpired):
                program.wait(PROBE_SECONDS)
            program.end()
        except OSError as error:
            return str(error)
        finally:
            session.close()
        status = program.out.end()[-1:]
        return None if status == ["200"] else [*status, *program.err.end(), "no answer"][-1]

    def run_program(
        self, command: Sequence[str], session: Session, stdin: IO[bytes] | int = subprocess.DEVNULL
    ) -> Program:
        """Start a program with the session's key. Raises OSError where it cannot be started."""
        direct = ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY"))))
        added = {
            "OPENAI_BASE_URL": self.endpoint.url,
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": MODEL,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }
        environment = {**self.environment, **added}
        if self.config.key == "environment":
            program = Program(command, environment, stdin=stdin, is_apart=self.is_apart)
        else:
            with TemporaryFile() as file:
                file.write(environment.pop("OPENAI_API_KEY").encode())
                file.seek(0)
                environment["OPENAI_API_KEY_FD"] = str(file.fileno())
                program = Program(
                    *(command, environment),
                    stdin=stdin,
                    descriptors=[file.fileno()],
                    is_apart=self.is_apart,
                )
        if self.function is None:
            session.owner = program.pid
        return program

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
        self._program: Program | None = None
        self._thread: Thread | None = None
        self._pending: Pending | None = None

    def begin(self, row: dict[str, Any]) -> Next:
        """Start it. Raises UserCodeError where it cannot be started."""
        agents = self._agents
        agents.runs.add(self)
        self._session = agents.endpoint.open()
        if agents.function is None:
            self._program = self._open(row)
            self._thread = Thread(target=self._wait, name="agent", daemon=True)
        else:
            self._thread = Thread(target=self._call, args=[row], name="agent", daemon=True)
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
        assert self._thread is not None
        if self._program is not None:
            self._program.end()
        elif self._thread.is_alive():
            late = self._agents.late
            late[:] = {thread for thread in (*late, self._thread) if thread.is_alive()}
            if len(late) >= MOST_LATE:
                raise UserCodeError(
                    f"{len(late)} calls of the agent {self._agents.spec} go on after their trajectories; expected them "
                    "to return; correct it, raise rollout.environment.timeout, or make it a command"
                )

    def _next(self, was_read: bool = True) -> Next:
        """Return its next event, within the rest of its time."""
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
            ended = Ended(awaited_value(self._agents.function(row, endpoint)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything; it is shown)
            reason = " ".join(f"raised {type(error).__name__}: {error}".split())
            ended = Ended(error=reason[:300] + self._refused())
        self._session.inbox.put(ended)

    # -- a process

    def _open(self, row: dict[str, Any]) -> Program:
        agents = self._agents
        try:
            with TemporaryFile() as file:
                file.write(json.dumps(row, default=str).encode())
                file.seek(0)
                return agents.run_program(agents.command, self._session, file)
        except OSError as error:
            self._session.close()
            agents.runs.discard(self)
            raise UserCodeError(
                f"the agent {agents.spec} cannot be started: {error.strerror or error}; expected a program; "
                "correct rollout.environment.name"
            ) from None

    def _wait(self) -> None:
        assert self._program is not None
        code = self._program.wait()
        out, err = self._program.out.end(), self._program.err.end()
        if code:
            why = f": {err[-1]}" if err else ""
            ended = Ended(error=f"ended with exit code {code}{why}"[:300] + self._refused())
        elif self._program.out.is_cut and len(out) < 2:
            ended = Ended(
                error=f"ended with a line of output of over {KEPT:,} bytes; expected its reward alone"
            )
        else:  # the reward is in the last line that was printed
            said = None
            with suppress(ValueError):
                said = json.loads(out[-1]) if out else None
            ended = Ended(said.get("reward") if isinstance(said, Mapping) else None)
        self._session.inbox.put(ended)
