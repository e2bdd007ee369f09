"""Morph Cloud (https://cloud.morph.so): a virtual machine for each program, from a snapshot of yours with python3.

``POST API/instance?snapshot_id=`` starts a machine, which is asked until it is ready; ``POST API/instance/ID/exec``
runs a shell command there and answers with what it printed; ``DELETE API/instance/ID`` ends it. These are the requests
of Morph's own package (morphcloud 0.1.116). The job is written to a file in parts, as a command's length is limited.
The machine is on the internet, and so is the program.

Imports its neighbours. The executor imports it.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import quote

import anyio

from taut.errors import SandboxError
from taut.sandbox.limits import Limits
from taut.sandbox.remote.client import BROKEN, Client, Passing, field, parsed
from taut.sandbox.remote.script import BOOTSTRAP
from taut.sandbox.remote.service import SMALL, START, WAIT, Printed, most_printed

_PART = 60_000
"""Characters of the job in a command; the kernel allows an argument 128 KiB."""
_FILE = '"${TMPDIR:-/tmp}/taut-job"'
_READY_EVERY = 0.5
_SECONDS = 30.0
"""For a request that runs no program."""
_NUMBER = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Morph:
    """Morph's machines."""

    def __init__(self, url: str, snapshot: str, secret: str, spare: float) -> None:
        self.address = url
        self._snapshot, self._spare = snapshot, spare
        self._headers = {"Authorization": f"Bearer {secret}"}

    @asynccontextmanager
    async def machine(self, client: Client, limits: Limits) -> AsyncIterator[_Machine]:
        """A new one, when it is ready; Morph ends it by itself where we cannot."""
        url = f"{self.address}/instance"
        body = await client.ask(
            "POST",
            f"{url}?snapshot_id={quote(self._snapshot, safe='')}",
            seconds=_SECONDS,
            most=SMALL,
            body={
                "metadata": None,
                "ttl_seconds": math.ceil(limits.total_seconds + self._spare),
                "ttl_action": "stop",
            },
            headers=self._headers,
        )
        made = parsed(body, url)
        number = field(made, "id", str, url)
        if not _NUMBER.fullmatch(number):
            raise Passing(f"{url} named a machine that cannot be addressed", BROKEN)
        url = f"{url}/{number}"
        try:
            while field(made, "status", str, url) != "ready":
                if made["status"] == "error":
                    raise Passing(f"{url} did not start", BROKEN)
                await anyio.sleep(_READY_EVERY)
                body = await client.ask(
                    "GET", url, seconds=_SECONDS, most=SMALL, headers=self._headers
                )
                made = parsed(body, url)
            yield _Machine(client, limits, f"{url}/exec", self._headers)
        finally:
            with anyio.CancelScope(shield=True), suppress(Passing, SandboxError):
                # Else Morph ends the machine at its ttl.
                await client.ask("DELETE", url, seconds=5, most=SMALL, headers=self._headers)


class _Machine:
    def __init__(self, client: Client, limits: Limits, url: str, headers: dict[str, str]) -> None:
        self._client, self._limits, self._url, self._headers = client, limits, url, headers

    async def run(self, job: bytes, seconds: float) -> Printed:
        text = base64.b64encode(job).decode()
        for start in range(0, len(text), _PART):
            into = ">" if start == 0 else ">>"
            part = f"printf %s {text[start : start + _PART]} {into} {_FILE}"
            try:
                await self._command(part, _SECONDS, SMALL)
            except Passing as failure:
                raise failure.unsent() from None
        # Python has all of the job only when the file is gone, and nobody has it open: the program cannot read it.
        python = f"python3 -s -c {shlex.quote(BOOTSTRAP)}"
        return Printed(
            await self._command(
                f"{{ base64 -d {_FILE}; rm -f {_FILE}; }} | {python}",
                seconds + START + WAIT,
                most_printed(self._limits),
            )
        )

    async def _command(self, command: str, seconds: float, most: int) -> str:
        body = await self._client.ask(
            "POST",
            self._url,
            seconds=seconds,
            most=most,
            body={"command": [command]},
            headers=self._headers,
            may_be_gone=(404, 409, 410),
        )
        found: str = field(parsed(body, self._url), "stdout", str, self._url)
        return found
