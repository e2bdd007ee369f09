"""Piston (https://github.com/engineer-man/piston): a server of your own; each trial has a box of its own.

``POST ADDRESS/execute`` with the script as the only file and the job as standard input. Several servers take turns.
Piston may be run without a network for programs (PISTON_DISABLE_NETWORKING, its default), and has limits of its own,
which must not be below ours: PISTON_RUN_TIMEOUT, PISTON_RUN_CPU_TIME, PISTON_OUTPUT_MAX_SIZE.

Imports its neighbours. The executor imports it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from taut.sandbox.limits import Limits, Outcome
from taut.sandbox.remote.client import BROKEN, Client, Passing, field, parsed
from taut.sandbox.remote.script import BOOTSTRAP
from taut.sandbox.remote.service import START, WAIT, Printed, most_printed

_ENDINGS: dict[str, Outcome] = {"TO": "time", "OL": "output", "EL": "output"}
"""Statuses of a run that Piston ended."""


class Piston:
    """Piston servers."""

    def __init__(self, urls: Sequence[str], version: str, secret: str | None) -> None:
        self.address = ", ".join(urls)
        self._urls, self._version = itertools.cycle(urls), version
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    @asynccontextmanager
    async def machine(self, client: Client, limits: Limits) -> AsyncIterator[_Box]:
        """The next server: it makes a box for each request."""
        yield _Box(client, limits, f"{next(self._urls)}/execute", self._version, self._headers)


class _Box:
    def __init__(
        self, client: Client, limits: Limits, url: str, version: str, headers: dict[str, str]
    ) -> None:
        self._client, self._limits, self._url = client, limits, url
        self._version, self._headers = version, headers

    async def run(self, job: bytes, seconds: float) -> Printed:
        milliseconds = int((seconds + START) * 1000)
        body = await self._client.ask(
            "POST",
            self._url,
            seconds=seconds + START + WAIT,
            most=most_printed(self._limits),
            body={
                "language": "python",
                "version": self._version,
                "files": [{"name": "main.py", "content": BOOTSTRAP}],
                "stdin": job.decode(),
                "run_timeout": milliseconds,
                "run_cpu_time": milliseconds,
            },
            headers=self._headers,
        )
        run = field(parsed(body, self._url), "run", dict, self._url)
        text = field(run, "stdout", str, self._url)
        if run.get("status") == "XX":
            raise Passing(f"{self._url}: its sandbox failed ({run.get('message')!r:.100})", BROKEN)
        return Printed(text, _ENDINGS.get(str(run.get("status"))))
