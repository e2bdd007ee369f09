"""E2B (https://e2b.dev): a virtual machine for each program, from a template with E2B's code interpreter.

``POST API/v2/sandboxes`` starts a machine, without access to the internet; ``POST https://49999-ID.DOMAIN/execute``
runs a cell of Python there, whose messages come back as lines of JSON; ``DELETE API/sandboxes/ID`` ends it. These
are the requests of E2B's own package (e2b-code-interpreter 2.11, e2b 2.63), whose retries and deadlines are its own.

Imports its neighbours. The executor imports it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from taut.errors import SandboxError
from taut.sandbox.limits import Limits
from taut.sandbox.remote.client import BROKEN, Client, Passing, field, parsed
from taut.sandbox.remote.service import RUN, SMALL, START, WAIT, Printed, most_printed

_PORT = 49999
"""Of the code interpreter on its machine."""
_START_SECONDS = 30.0
_HOST = re.compile(r"[A-Za-z0-9.-]{1,200}")


class E2B:
    """E2B's machines. ``machines``: one address for all of them. ``spare``: seconds a machine may be there beside its
    program's."""

    def __init__(
        self,
        url: str,
        machines: str | None,
        domain: str,
        template: str,
        secret: str,
        spare: float,
    ) -> None:
        self.address = url
        self._machines, self._domain, self._template = machines, domain, template
        self._secret, self._spare = secret, spare

    @asynccontextmanager
    async def machine(self, client: Client, limits: Limits) -> AsyncIterator[_Machine]:
        """A new one; E2B ends it by itself where we cannot."""
        keys = {"X-API-KEY": self._secret}
        body = await client.ask(
            "POST",
            f"{self.address}/v2/sandboxes",
            seconds=_START_SECONDS,
            most=SMALL,
            body={
                "templateID": self._template,
                "timeout": math.ceil(limits.total_seconds + self._spare),
                "allow_internet_access": False,
            },
            headers=keys,
        )
        made = parsed(body, self.address)
        number = field(made, "sandboxID", str, self.address)
        domain = made.get("domain") or self._domain
        if not (_HOST.fullmatch(number) and isinstance(domain, str) and _HOST.fullmatch(domain)):
            raise Passing(f"{self.address} named a machine that cannot be addressed", BROKEN)
        headers = {"E2b-Sandbox-Id": number, "E2b-Sandbox-Port": str(_PORT)}
        for name, header in (
            ("envdAccessToken", "X-Access-Token"),
            ("trafficAccessToken", "E2B-Traffic-Access-Token"),
        ):
            if isinstance(made.get(name), str):
                headers[header] = made[name]
        url = self._machines or f"https://{_PORT}-{number}.{domain}"
        try:
            yield _Machine(client, limits, f"{url}/execute", headers)
        finally:
            with anyio.CancelScope(shield=True), suppress(Passing, SandboxError):
                # Else E2B ends the machine at its timeout.
                await client.ask(
                    "DELETE",
                    f"{self.address}/sandboxes/{number}",
                    seconds=5,
                    most=SMALL,
                    headers=keys,
                )


class _Machine:
    def __init__(self, client: Client, limits: Limits, url: str, headers: dict[str, str]) -> None:
        self._client, self._limits, self._url, self._headers = client, limits, url, headers

    async def run(self, job: bytes, seconds: float) -> Printed:
        body = await self._client.ask(
            "POST",
            self._url,
            seconds=seconds + START + WAIT,
            most=most_printed(self._limits),
            body={
                "code": RUN % base64.b64encode(job).decode(),
                "context_id": None,
                "language": "python",
                "env_vars": None,
            },
            headers=self._headers,
            may_be_gone=(404, 409, 410),
        )
        messages = [parsed(line, self._url) for line in body.splitlines() if line.strip()]
        texts = [
            field(it, "text", str, self._url)
            for it in messages
            if isinstance(it, dict) and it.get("type") == "stdout"
        ]
        return Printed("".join(texts))
