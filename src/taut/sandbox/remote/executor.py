"""``RemoteSandbox``: runs programs on the machines of a service, with the interface of ``Sandbox``.

A program has a machine of its own; each of its trials is a job for ``script.py`` there. What the program did is in the
report that the script prints behind a random word. A failure of the service is a SandboxError, after attempts on new
machines. A program can kill the script that watches it, and some services then fail as if they were broken; so where
attempts with a program fail and a known program runs, the failure is the program's own: crash, or time where nothing
came back. Its other trials are then not run.

Imports errors and its neighbours.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
import threading
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from taut.errors import SandboxError
from taut.io import http as web
from taut.sandbox.limits import Limits, Outcome, Ran, Trial
from taut.sandbox.remote import script
from taut.sandbox.remote.client import BROKEN, BUDGET, Client, Passing
from taut.sandbox.remote.e2b import E2B
from taut.sandbox.remote.morph import Morph
from taut.sandbox.remote.piston import Piston
from taut.sandbox.remote.service import Machine, Printed, Service
from taut.sandbox.remote.settings import Remote, ServiceName, e2b_domain

_OUTPUTS = 16
"""All trials of a program together may print so many times what one may, as in ``guest.py``."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
"""Seconds between attempts."""
_SOURCE = Path(script.__file__).read_text(encoding="utf-8")
_KNOWN = "import sys\nsys.stdout.write(sys.stdin.read()[::-1])"
"""A program whose output is known: it prints its input backwards."""
_LONG = "import sys\nsys.stdout.write((sys.stdin.read() * {size})[:{size}])"
"""Another: it prints its input again and again."""
_PROVED_KB = 1024
"""The most that is printed at the start."""


class Where(NamedTuple):
    """Which service runs the programs, and where it is: a decision for the run log."""

    name: ServiceName
    reason: str


class RemoteSandbox:
    """Runs programs, any number of threads at a time. Made by ``open_remote``."""

    def __init__(self, remote: Remote) -> None:
        """Raises ConfigError where the address or the key is missing; nothing is sent yet."""
        assert remote.service is not None, "without one, programs run here"
        self._remote = remote
        self._key_name, self._secret = remote.secret()
        self._service = _service(remote, self._secret)
        self.mechanism = Where(
            remote.service,
            f"remote.service asks for it; programs and tests are sent to {self._service.address}",
        )
        self._limit = anyio.Semaphore(remote.concurrency)
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._client: Client | None = None
        self._under_way: set[anyio.CancelScope] = set()
        self._close = weakref.finalize(self, self._stack.close)
        """Also at the end of the process, which would wait for the thread."""

    def run(
        self,
        program: str,
        trials: Sequence[Trial],
        limits: Limits | None = None,
        stop_early: bool = False,
    ) -> list[Ran]:
        """What became of each trial of the program, in their order.

        ``stop_early``: the trials after the first that is not ok are not run. Raises SandboxError where the service
        failed; whatever the program does is in the results.
        """
        portal, client = self._opened()
        limits = limits or Limits()
        return portal.call(self._limited, client, program, list(trials), limits, stop_early)

    def prove(self, limits: Limits) -> None:
        """Raise SandboxError where the service does not run a known program within these limits."""
        size = min(limits.output_kb, _PROVED_KB) * 1024 - 1
        word = secrets.token_hex(4)
        (ran,) = self.run(_LONG.format(size=size), [Trial(stdin=word)], limits)
        if ran.outcome == "ok" and ran.stdout == (word * size)[:size]:
            return
        found = f"ended as {ran.outcome}: {ran.stderr.strip()[-200:]!r}"
        if ran.outcome == "ok":
            found = f"printed {len(ran.stdout)} characters"
        raise SandboxError(
            f"{self._name} was sent a known program that prints {size} characters, and it {found}; expected the "
            "output whole; raise the service's own limits (docs/sandbox.md), or lower limits.output_kb"
        )

    def close(self) -> None:
        """End programs that are under way, with their machines, and the connections."""
        self._close()

    @property
    def _name(self) -> str:
        return f"{self._remote.service} at {self._service.address}"

    def _opened(self) -> tuple[BlockingPortal, Client]:
        with self._lock:
            if not self._close.alive:
                raise SandboxError("the remote sandbox is closed; expected it open; open another")
            if self._portal is None:
                self._portal = self._stack.enter_context(start_blocking_portal())
                http = web.open_client()
                entered = self._portal.wrap_async_context_manager(http)
                self._client = Client(
                    self._stack.enter_context(entered), self._key_name, self._secret
                )
                self._stack.callback(self._portal.call, _end, self._under_way)
            assert self._client is not None, "it is made with the portal"
            return self._portal, self._client

    async def _limited(
        self,
        client: Client,
        program: str,
        trials: Sequence[Trial],
        limits: Limits,
        stop_early: bool,
    ) -> list[Ran]:
        """Within the time that a program may take with all attempts, from when it has its place."""
        seconds = limits.total_seconds + self._remote.wait_seconds
        attempts = _Attempts(self._service, client, limits)
        found = "was closed while a program was under way"
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                async with self._limit, attempts:
                    with anyio.fail_after(seconds):
                        return await _trials(attempts, program, trials, limits, stop_early)
            except TimeoutError:
                last = f"; the last failure: {attempts.last}" if attempts.last else ""
                found = f"was not done with a program within {seconds:g} s{last}"
            except _Failed as error:
                found = f"failed: {error}"
            finally:
                self._under_way.discard(scope)
        raise SandboxError(
            f"{self._name} {found}; expected an answer; look at the service, or raise remote.wait_seconds"
        )


async def _end(under_way: set[anyio.CancelScope]) -> None:
    """Cancel what is under way, and wait until its machines are ended."""
    for scope in under_way:
        scope.cancel()
    while under_way:
        await anyio.sleep(0.01)


async def _trials(
    attempts: _Attempts, program: str, trials: Sequence[Trial], limits: Limits, stop_early: bool
) -> list[Ran]:
    results: list[Ran] = []
    spent, printed, is_lost = 0.0, 0, False
    for trial in trials:
        left = limits.total_seconds - spent
        is_failed = stop_early and bool(results) and results[-1].outcome != "ok"
        if is_lost or is_failed or left <= 0 or printed > _OUTPUTS * 1024 * limits.output_kb:
            results.append(Ran("", "", "not_run", 0.0))
            continue
        seconds = min(limits.wall_seconds, left)
        ran = await attempts.run(program, trial, seconds)
        if ran is None:
            outcome = await attempts.programs_own()
            ran, is_lost = Ran("", "", outcome, seconds), True
        results.append(ran)
        spent += ran.seconds
        printed += len(ran.stdout) + len(ran.stderr)
    return results


class _Failed(Exception):
    """The service failed, whatever the program."""


class _Attempts:
    """Jobs for one program: on one machine as long as that works, each several times where it fails."""

    def __init__(self, service: Service, client: Client, limits: Limits) -> None:
        self._service, self._client, self._limits = service, client, limits
        self._stack = AsyncExitStack()
        self._machine: Machine | None = None
        self.last: Passing | None = None

    async def __aenter__(self) -> _Attempts:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, program: str, trial: Trial, seconds: float) -> Ran | None:
        """What became of the trial; None: every attempt failed in a way that the program may have caused.

        Raises _Failed where the service failed before it had the program.
        """
        budget, pause = BUDGET, _FIRST_PAUSE
        while True:
            try:
                return await self._once(program, trial, seconds)
            except Passing as failure:
                self.last = failure
            await self._stack.aclose()
            self._machine = None
            budget -= self.last.cost
            if budget <= 0 and not self.last.was_sent:
                raise _Failed(str(self.last))
            if budget <= 0:
                return None
            await anyio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def programs_own(self) -> Outcome:
        """How the program ended that made the attempts fail. Raises _Failed where a known program fails as well."""
        failure = self.last
        assert failure is not None, "an attempt failed"
        ran = await self.run(_KNOWN, Trial(stdin="ab"), self._limits.wall_seconds)
        if ran is None or ran.outcome != "ok" or ran.stdout.strip() != "ba":
            raise _Failed(str(failure))
        return "time" if failure.is_late else "crash"

    async def _once(self, program: str, trial: Trial, seconds: float) -> Ran:
        nonce = secrets.token_hex(16)
        job = {
            "source": _SOURCE,
            "nonce": nonce,
            "seconds": seconds,
            "limits": self._limits.as_mapping(),
            "program": _sound(program),
            "stdin": _sound(trial.stdin),
            "call": trial.call,
            "arguments": trial.arguments,
            "check": trial.check,
        }
        if self._machine is None:
            opened = self._service.machine(self._client, self._limits)
            try:
                self._machine = await self._stack.enter_async_context(opened)
            except Passing as failure:
                raise failure.unsent() from None
        printed = await self._machine.run(json.dumps(job).encode(), seconds)
        return _ran(printed, nonce, seconds, self._limits)


def _ran(printed: Printed, nonce: str, seconds: float, limits: Limits) -> Ran:
    """The report. Raises Passing where there is none and the service does not say why."""
    lines = [it for it in printed.text.splitlines() if it.startswith(nonce)]
    if not lines:
        raise Passing("the script did not start on the machine", BROKEN, was_sent=False)
    if lines[-1] == f"{nonce} started":
        if printed.ending is None:
            raise Passing("the script ended without a report", BROKEN)
        return Ran("", "", printed.ending, seconds)
    try:
        outcome, stdout, stderr, took, value = json.loads(lines[-1][len(nonce) :])
        texts = [_decoded(it) for it in (stdout, stderr)]
        found = None if value is None else _decoded(value)
        took = min(max(float(took), 0.0), seconds)
    except (ValueError, TypeError, RecursionError):
        outcome = None
    if outcome not in get_args(Outcome) or sum(map(len, texts)) > limits.output_kb * 1024:
        # The service cut it short and says so, or the program wrote over it.
        return Ran("", "", printed.ending or "crash", seconds)
    return Ran(texts[0], texts[1], cast(Outcome, outcome), took, found)


def _decoded(text: Any) -> str:
    return base64.b64decode(text, validate=True).decode(errors="replace")


def _sound(text: str) -> str:
    """Without lone surrogates, which cannot be written to a file."""
    return text.encode(errors="replace").decode()


def _service(remote: Remote, secret: str | None) -> Service:
    urls = remote.urls()
    if remote.service == "piston":
        return Piston(urls, remote.image or "*", secret)
    assert secret is not None, "the others have a default variable for it"
    if remote.service == "e2b":
        template = remote.image or "code-interpreter-v1"
        machines = remote.machines_url()
        return E2B(urls[0], machines, e2b_domain(), template, secret, remote.wait_seconds)
    assert remote.image is not None, "the settings ask for it"
    return Morph(urls[0], remote.image, secret, remote.wait_seconds)
