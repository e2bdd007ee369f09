"""The services that run programs on their machines: Piston, E2B and Morph.

A service gives a machine; the machine runs ``script.py`` on a job and returns its output. A failure that another
attempt may change is a ``Passing``; any other is a SandboxError. No message contains the key.

Piston (https://github.com/engineer-man/piston), a server of your own; each trial has a box of its own.
    ``POST ADDRESS/execute`` with the script as the only file and the job as standard input. Several servers take turns.
    Piston can run programs without a network (PISTON_DISABLE_NETWORKING, its default). Its own limits must not be below
    ours: PISTON_RUN_TIMEOUT, PISTON_RUN_CPU_TIME, PISTON_OUTPUT_MAX_SIZE.
E2B (https://e2b.dev), a virtual machine for each program, from a template with E2B's code interpreter.
    ``POST API/v2/sandboxes`` starts a machine without access to the internet; ``POST https://49999-ID.DOMAIN/execute``
    runs a cell of Python there, whose messages come back as lines of JSON; ``DELETE API/sandboxes/ID`` ends it. These
    are the requests of E2B's own package (e2b-code-interpreter 2.11, e2b 2.63), which has other retries and deadlines.
Morph Cloud (https://cloud.morph.so), a virtual machine for each program, from a snapshot of yours with python3.
    ``POST API/instance?snapshot_id=`` starts a machine, polled until it is ready; ``POST API/instance/ID/exec`` runs
    a shell command there and returns its output; ``DELETE API/instance/ID`` ends it. These are the requests of
    Morph's own package (morphcloud 0.1.116). The job is written to a file in parts, as the length of a command is
    limited. The machine is on the internet, and so is the program.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

import anyio
import httpx2

from taut.errors import SandboxError
from taut.io import http
from taut.rl.settings import Remote
from taut_tools.sandbox.limits import Limits, Outcome
from taut_tools.sandbox.remote import addresses
from taut_tools.sandbox.remote.script import BOOTSTRAP

BUDGET = 6
"""Total cost of failures at which a job is given up."""
BUSY, UNREACHED, BROKEN, LATE = 0, 1, 2, 3
"""Cost of a failure: a busy service (429) is tried until the deadline, an unreachable one six times, a broken one
three times, a silent one twice."""
_SHOWN = 200
"""Maximum characters of a server's own message that an error repeats."""


class Passing(Exception):
    """A failed attempt after which another may succeed. ``was_sent``: whether the service had the request, whose
    program may be the cause."""

    def __init__(self, found: str, cost: int, was_sent: bool = True) -> None:
        super().__init__(found)
        self.cost, self.was_sent = cost, was_sent

    def unsent(self) -> Passing:
        """This failure, of a request that ran no program."""
        return Passing(str(self), self.cost, was_sent=False)


class Client:
    """Sends requests to a service and classifies their failures."""

    def __init__(
        self, client: httpx2.AsyncClient, key_name: str | None, secret: str | None
    ) -> None:
        self._client, self._key_name, self._secret = client, key_name, secret

    async def send(
        self,
        method: str,
        url: str,
        *,
        seconds: float,
        most: int,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        may_be_gone: Collection[int] = (),
    ) -> bytes:
        """Send a request; the body of its answer, of at most ``most`` bytes. Statuses in ``may_be_gone`` mean that the
        machine has ended, which its program may have caused.
        """
        limits = http.Limits(seconds=seconds, max_bytes=most)
        try:
            answer = await http.request(
                self._client, method, url, limits, headers=headers, json=body
            )
        except TimeoutError:
            raise Passing(f"{url} gave no answer within {seconds:.1f} s", LATE) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            reason = _brief(str(error)) or type(error).__name__
            raise Passing(
                f"{url} cannot be reached ({reason})", UNREACHED, was_sent=False
            ) from None
        except httpx2.RequestError as error:
            raise Passing(f"{url} broke off ({type(error).__name__})", BROKEN) from None
        except http.Refused as error:
            raise Passing(f"{url} answered with {_brief(str(error))}", BROKEN) from None
        if answer.is_success:
            return answer.content
        text = answer.text.replace(self._secret, "***") if self._secret else answer.text
        message = f"{url} answered HTTP {answer.status}: {_brief(text)}"
        if answer.status == 429:
            raise Passing(message, BUSY, was_sent=False)
        if answer.status >= 500 or answer.status == 408 or answer.status in may_be_gone:
            raise Passing(message, BROKEN)
        if answer.status in (401, 403):
            remedy = (
                f"expected the key in {self._key_name} to be accepted; correct it"
                if self._key_name
                else "expected a service that needs no key; set remote.api_key_env"
            )
            raise SandboxError(f"{message}; {remedy}")
        if answer.status == 413:
            raise SandboxError(
                f"{message}; expected a program with its test to be accepted; raise the service's limit for requests"
            )
        raise SandboxError(f"{message}; expected it to be accepted; see docs/environments.md")


def parsed(body: bytes, url: str) -> Any:
    """Parse JSON from a service. Raises Passing for anything else."""
    try:
        return http.parse_json(body.decode("utf-8", "replace"))
    except ValueError:
        raise Passing(
            f"{url} answered {_brief(body[:_SHOWN].decode(errors='replace'))!r}, which is no JSON",
            BROKEN,
        ) from None


def field(value: Any, name: str, kind: type[Any], url: str) -> Any:
    """A field of an answer. Raises Passing if it is missing or has another type."""
    entry = value.get(name) if isinstance(value, dict) else None
    if not isinstance(entry, kind):
        raise Passing(f"{url} answered without {name!r}", BROKEN)
    return entry


def _brief(text: str) -> str:
    """Shorten a text to one line without control characters."""
    line = " ".join(text.split())[:_SHOWN]
    return "".join(character if character.isprintable() else "?" for character in line)


# -- services and their machines

START = 2.0
"""Seconds that starting Python on the machine may take in addition to the trial."""
WAIT = 15.0
"""Seconds that a service may take to answer in addition to the trial: its queue and its network."""
SMALL = 2**20
"""Maximum bytes of an answer without output."""

RUN = f"""
import base64, subprocess, sys
ran = subprocess.run(
    [sys.executable, "-s", "-c", {BOOTSTRAP!r}],
    input=base64.b64decode(%r), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
)
print(ran.stdout.decode(errors="replace"))
"""
"""Python that runs a job, for services that take no standard input; ``%`` fills in the job in base64."""


class Printed(NamedTuple):
    """The output of a machine for a job."""

    text: str
    ending: Outcome | None = None
    """Outcome if the service ended the job and says so, else None."""


Machine: TypeAlias = Callable[[bytes, float], Awaitable[Printed]]
"""A machine for one program: runs a job within so many seconds. Raises Passing or SandboxError."""


class Service(Protocol):
    """A service that gives machines."""

    @property
    def address(self) -> str:
        """Address of the service, for messages."""
        ...

    def machine(self, client: Client, limits: Limits) -> AbstractAsyncContextManager[Machine]:
        """Start a machine for one program, which ends with the block."""
        ...


def most_printed(limits: Limits) -> int:
    """Maximum bytes of an answer with output: base64 twice, as Piston repeats it, and the rest of the answer."""
    return 4 * limits.output_kb * 1024 + SMALL


def open_service(remote: Remote, secret: str | None) -> Service:
    """Open the service that the settings name."""
    urls = addresses.urls(remote)
    if remote.service == "piston":
        return Piston(urls, remote.image or "*", secret)
    assert secret is not None, "the others have a default variable for it"
    if remote.service == "e2b":
        template = remote.image or "code-interpreter-v1"
        machines, domain = addresses.machines_url(remote), addresses.e2b_domain()
        return E2B(urls[0], machines, domain, template, secret, remote.wait_seconds)
    assert remote.image is not None, "the settings require it"
    return Morph(urls[0], remote.image, secret, remote.wait_seconds)


# -- Piston

_PISTON_ENDINGS: dict[str, Outcome] = {"TO": "time", "OL": "output", "EL": "output"}
"""Outcomes of runs that Piston ended, by Piston's status."""


class Piston:
    """Piston servers."""

    def __init__(self, urls: Sequence[str], version: str, secret: str | None) -> None:
        self.address = ", ".join(urls)
        self._urls, self._version = itertools.cycle(urls), version
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    @asynccontextmanager
    async def machine(self, client: Client, limits: Limits) -> AsyncIterator[Machine]:
        """Take the next server, which makes a box for each request."""
        url = f"{next(self._urls)}/execute"

        async def run(job: bytes, seconds: float) -> Printed:
            milliseconds = int((seconds + START) * 1000)
            body = await client.send(
                "POST",
                url,
                seconds=seconds + START + WAIT,
                most=most_printed(limits),
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
            result = field(parsed(body, url), "run", dict, url)
            text = field(result, "stdout", str, url)
            if result.get("status") == "XX":
                raise Passing(f"{url}: its sandbox failed ({result.get('message')!r:.100})", BROKEN)
            return Printed(text, _PISTON_ENDINGS.get(str(result.get("status"))))

        yield run


# -- E2B

_E2B_PORT = 49999
"""Port of the code interpreter on its machine."""
_E2B_START_SECONDS = 30.0
_E2B_HOST = re.compile(r"[A-Za-z0-9.-]{1,200}")


class E2B:
    """E2B's machines. ``machines`` is their common address, if there is one; a machine lives ``spare`` seconds longer
    than its program may run."""

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
    async def machine(self, client: Client, limits: Limits) -> AsyncIterator[Machine]:
        """Start a new machine. E2B ends it at its timeout if the request to end it fails."""
        keys = {"X-API-KEY": self._secret}
        body = await client.send(
            "POST",
            f"{self.address}/v2/sandboxes",
            seconds=_E2B_START_SECONDS,
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
        if not (
            _E2B_HOST.fullmatch(number) and isinstance(domain, str) and _E2B_HOST.fullmatch(domain)
        ):
            raise Passing(f"{self.address} named a machine that cannot be addressed", BROKEN)
        headers = {"E2b-Sandbox-Id": number, "E2b-Sandbox-Port": str(_E2B_PORT)}
        for name, header in (
            ("envdAccessToken", "X-Access-Token"),
            ("trafficAccessToken", "E2B-Traffic-Access-Token"),
        ):
            if isinstance(made.get(name), str):
                headers[header] = made[name]
        url = f"{self._machines or f'https://{_E2B_PORT}-{number}.{domain}'}/execute"

        async def run(job: bytes, seconds: float) -> Printed:
            body = await client.send(
                "POST",
                url,
                seconds=seconds + START + WAIT,
                most=most_printed(limits),
                body={
                    "code": RUN % base64.b64encode(job).decode(),
                    "context_id": None,
                    "language": "python",
                    "env_vars": None,
                },
                headers=headers,
                may_be_gone=(404, 409, 410),
            )
            messages = [parsed(line, url) for line in body.splitlines() if line.strip()]
            texts = [
                field(message, "text", str, url)
                for message in messages
                if isinstance(message, dict) and message.get("type") == "stdout"
            ]
            return Printed("".join(texts))

        try:
            yield run
        finally:
            with anyio.CancelScope(shield=True), suppress(Passing, SandboxError):
                await client.send(
                    "DELETE",
                    f"{self.address}/sandboxes/{number}",
                    seconds=5,
                    most=SMALL,
                    headers=keys,
                )


# -- Morph

_MORPH_PART = 60_000
"""Characters of the job in a command; the kernel allows 128 KiB for an argument."""
_MORPH_JOB = '"${TMPDIR:-/tmp}/taut-job"'
_MORPH_READY_EVERY = 0.5
_MORPH_SECONDS = 30.0
"""Time limit of a request that runs no program."""
_MORPH_NUMBER = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Morph:
    """Morph's machines."""

    def __init__(self, url: str, snapshot: str, secret: str, spare: float) -> None:
        self.address = url
        self._snapshot, self._spare = snapshot, spare
        self._headers = {"Authorization": f"Bearer {secret}"}

    @asynccontextmanager
    async def machine(self, client: Client, limits: Limits) -> AsyncIterator[Machine]:
        """Start a new machine and wait for it. Morph ends it at its ttl if the request to end it fails."""
        url = f"{self.address}/instance"
        body = await client.send(
            "POST",
            f"{url}?snapshot_id={quote(self._snapshot, safe='')}",
            seconds=_MORPH_SECONDS,
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
        if not _MORPH_NUMBER.fullmatch(number):
            raise Passing(f"{url} named a machine that cannot be addressed", BROKEN)
        url = f"{url}/{number}"

        async def command(text: str, seconds: float, most: int) -> str:
            body = await client.send(
                "POST",
                f"{url}/exec",
                seconds=seconds,
                most=most,
                body={"command": [text]},
                headers=self._headers,
                may_be_gone=(404, 409, 410),
            )
            printed: str = field(parsed(body, f"{url}/exec"), "stdout", str, f"{url}/exec")
            return printed

        async def run(job: bytes, seconds: float) -> Printed:
            text = base64.b64encode(job).decode()
            for start in range(0, len(text), _MORPH_PART):
                into = ">" if start == 0 else ">>"
                part = f"printf %s {text[start : start + _MORPH_PART]} {into} {_MORPH_JOB}"
                try:
                    await command(part, _MORPH_SECONDS, SMALL)
                except Passing as failure:
                    raise failure.unsent() from None
            # Python gets the end of the job after the file is removed and closed, so the program cannot read it.
            python = f"python3 -s -c {shlex.quote(BOOTSTRAP)}"
            line = f"{{ base64 -d {_MORPH_JOB}; rm -f {_MORPH_JOB}; }} | {python}"
            return Printed(await command(line, seconds + START + WAIT, most_printed(limits)))

        try:
            while field(made, "status", str, url) != "ready":
                if made["status"] == "error":
                    raise Passing(f"{url} did not start", BROKEN)
                await anyio.sleep(_MORPH_READY_EVERY)
                body = await client.send(
                    "GET", url, seconds=_MORPH_SECONDS, most=SMALL, headers=self._headers
                )
                made = parsed(body, url)
            yield run
        finally:
            with anyio.CancelScope(shield=True), suppress(Passing, SandboxError):
                await client.send("DELETE", url, seconds=5, most=SMALL, headers=self._headers)
