"""``RemoteSandbox``: run programs on the machines of a service, with the interface of ``Sandbox``.

A program has a machine of its own; each of its trials is a job for ``script.py`` there. The script prints a report
after a random word. A failure of the service is a SandboxError, after attempts on new machines. But a program can kill
the script that watches it, and some services then fail as if they were broken. So if all attempts with a program fail
and a known program runs, the failure is the program's own: the outcome is crash, or time if no answer came. The other
trials of the program are then not run.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import anyio
import httpx2
from tenacity import RetryCallState

from taut.errors import SandboxError
from taut.io import http
from taut.rl.settings import Remote, ServiceName
from taut_tools.sandbox.limits import Limits, Outcome, Ran, Trial
from taut_tools.sandbox.remote import addresses, script
from taut_tools.sandbox.remote.services import (
    BROKEN,
    BUDGET,
    LATE,
    Client,
    Machine,
    Passing,
    Printed,
    Service,
    open_service,
)

_OUTPUTS = 16
"""Output of all trials of a program together, as a multiple of the limit of one, as in ``box.py``."""
_RETRIES = http.Retries(first_pause=0.25, longest_pause=8.0)
_SOURCE = Path(script.__file__).read_text(encoding="utf-8")
_KNOWN = "import sys\nsys.stdout.write(sys.stdin.read()[::-1])"
"""A known program, which prints its input backwards."""
_LONG = "import sys\nsys.stdout.write((sys.stdin.read() * {size})[:{size}])"
"""A known program that repeats its input up to a length."""
_PROVED_KB = 1024
"""Maximum output of ``prove``, in KiB."""


class Where(NamedTuple):
    """The service that runs programs, and its address: a decision for the run log."""

    name: ServiceName
    reason: str


class RemoteSandbox:
    """Runs programs, from any number of threads. Made by ``open_remote``."""

    def __init__(self, remote: Remote) -> None:
        """Prepare the connection, and send nothing. Raises ConfigError if the address or the key is missing."""
        assert remote.service is not None, "without one, programs run here"
        self._remote = remote
        self._key_name, self._secret = addresses.secret(remote)
        self._service = open_service(remote, self._secret)
        self.mechanism = Where(
            remote.service,
            f"remote.service asks for it; programs and tests are sent to {self._service.address}",
        )
        self._limit = anyio.Semaphore(remote.concurrency)
        self._thread = http.ClientThread()

    def run(
        self,
        program: str,
        trials: Sequence[Trial],
        limits: Limits | None = None,
        stop_early: bool = False,
    ) -> list[Ran]:
        """Run the trials of a program; their results in order.

        ``stop_early`` runs no trial after the first that is not ok. Raises SandboxError if the service fails; anything
        that the program does is in the results.
        """
        try:
            future = self._thread.start(
                self._limited, program, list(trials), limits or Limits(), stop_early
            )
        except http.Closed:
            raise SandboxError(
                "the remote sandbox is closed; expected it open; open another"
            ) from None
        try:
            return future.result()
        except http.Closed:
            raise self._error("was closed while a program was under way") from None
        finally:
            future.cancel()

    def prove(self, limits: Limits) -> None:
        """Raise SandboxError unless the service runs a known program within these limits."""
        size = min(limits.output_kb, _PROVED_KB) * 1024 - 1
        word = secrets.token_hex(4)
        (ran,) = self.run(_LONG.format(size=size), [Trial(stdin=word)], limits)
        if ran.outcome == "ok" and ran.stdout == (word * size)[:size]:
            return
        result = f"ended as {ran.outcome}: {ran.stderr.strip()[-200:]!r}"
        if ran.outcome == "ok":
            result = f"printed {len(ran.stdout)} characters"
        raise SandboxError(
            f"{self._name} was sent a known program that prints {size} characters; it {result}; expected all; raise "
            "the service's own limits (docs/environments.md), or lower limits.output_kb"
        )

    def close(self) -> None:
        """End running programs, their machines and the connections."""
        self._thread.close()

    @property
    def _name(self) -> str:
        return f"{self._remote.service} at {self._service.address}"

    def _error(self, found: str) -> SandboxError:
        return SandboxError(
            f"{self._name} {found}; expected an answer; look at the service, or raise remote.wait_seconds"
        )

    async def _limited(
        self,
        client: httpx2.AsyncClient,
        program: str,
        trials: Sequence[Trial],
        limits: Limits,
        stop_early: bool,
    ) -> list[Ran]:
        """Run the trials within the time that a program may take with all attempts, which begins when ``concurrency``
        admits it.
        """
        seconds = limits.total_seconds + self._remote.wait_seconds
        attempts = _Attempts(self._service, Client(client, self._key_name, self._secret), limits)
        try:
            async with self._limit, attempts:
                with anyio.fail_after(seconds):
                    results: list[Ran] = []
                    spent, printed, is_lost = 0.0, 0, False
                    for trial in trials:
                        left = limits.total_seconds - spent
                        is_failed = stop_early and bool(results) and results[-1].outcome != "ok"
                        is_over = left <= 0 or printed > _OUTPUTS * 1024 * limits.output_kb
                        if is_lost or is_failed or is_over:
                            results.append(Ran("", "", "not_run", 0.0))
                            continue
                        trial_seconds = min(limits.wall_seconds, left)
                        ran = await attempts.run(program, trial, trial_seconds)
                        if ran is None:
                            is_lost = True
                            ran = Ran("", "", await attempts.blame_program(), trial_seconds)
                        results.append(ran)
                        spent += ran.seconds
                        printed += len(ran.stdout) + len(ran.stderr)
                    return results
        except TimeoutError:
            last = f"; the last failure: {attempts.last}" if attempts.last else ""
            raise self._error(f"was not done with a program within {seconds:g} s{last}") from None
        except _Failed as error:
            raise self._error(f"failed: {error}") from None


class _Failed(Exception):
    """A failure of the service, and not of the program."""


class _Attempts:
    """Jobs for one program, on one machine as long as that works; a job that fails is repeated on a new one."""

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
        """Run a trial; its result, or None if every attempt failed in a way that the program may have caused. Raises
        _Failed if the service failed before it had the program.
        """
        failures: list[Passing] = []

        async def attempt() -> Ran:
            try:
                return await self._once(program, trial, seconds)
            except Passing as failure:
                self.last = failure
                failures.append(failure)
                await self._stack.aclose()
                self._machine = None
                raise

        def is_over(_: RetryCallState) -> bool:
            return sum(failure.cost for failure in failures) >= BUDGET

        try:
            return await http.retry_loop(Passing, _RETRIES, is_over)(attempt)
        except Passing as failure:
            if not failure.was_sent:
                raise _Failed(str(failure)) from None
            return None

    async def blame_program(self) -> Outcome:
        """The outcome of a program whose attempts all failed. Raises _Failed if a known program fails too."""
        failure = self.last
        assert failure is not None, "an attempt failed"
        ran = await self.run(_KNOWN, Trial(stdin="ab"), self._limits.wall_seconds)
        if ran is None or ran.outcome != "ok" or ran.stdout.strip() != "ba":
            raise _Failed(str(failure))
        return "time" if failure.cost == LATE else "crash"

    async def _once(self, program: str, trial: Trial, seconds: float) -> Ran:
        nonce = secrets.token_hex(16)
        job = {
            "source": _SOURCE,
            "nonce": nonce,
            "seconds": seconds,
            "limits": self._limits.as_mapping(),
            "program": _without_surrogates(program),
            "stdin": _without_surrogates(trial.stdin),
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
        printed = await self._machine(json.dumps(job).encode(), seconds)
        return _ran(printed, nonce, seconds, self._limits)


def _ran(printed: Printed, nonce: str, seconds: float, limits: Limits) -> Ran:
    """Read the result from the report. Raises Passing if there is none and the service does not say why."""
    lines = [line for line in printed.text.splitlines() if line.startswith(nonce)]
    if not lines:
        raise Passing("the script did not start on the machine", BROKEN, was_sent=False)
    if lines[-1] == f"{nonce} started":
        if printed.ending is None:
            raise Passing("the script ended without a report", BROKEN)
        return Ran("", "", printed.ending, seconds)
    try:
        outcome, stdout, stderr, took, value = json.loads(lines[-1][len(nonce) :])
        texts = [_decoded(text) for text in (stdout, stderr)]
        decoded = None if value is None else _decoded(value)
        took = min(max(float(took), 0.0), seconds)
    except (ValueError, TypeError, RecursionError):
        outcome = None
    if outcome not in get_args(Outcome) or sum(map(len, texts)) > limits.output_kb * 1024:
        # The service has cut the report and says so, or the program wrote over it.
        return Ran("", "", printed.ending or "crash", seconds)
    return Ran(texts[0], texts[1], cast(Outcome, outcome), took, decoded)


def _decoded(text: Any) -> str:
    return base64.b64decode(text, validate=True).decode(errors="replace")


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be written to a file."""
    return text.encode(errors="replace").decode()
