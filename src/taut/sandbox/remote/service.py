"""What a service is to the executor: it gives machines, and a machine runs ``script.py`` on a job.

Imports its neighbours. The services and the executor import it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from taut.sandbox.limits import Limits, Outcome
from taut.sandbox.remote.client import Client
from taut.sandbox.remote.script import BOOTSTRAP

START = 2.0
"""Seconds that starting Python on the machine may take beside a trial's own."""
WAIT = 15.0
"""Seconds that a service may take to answer beside a trial's own: its queue and its network."""
SMALL = 2**20
"""Bytes of an answer that holds no output."""

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
    """What a machine printed for a job."""

    text: str
    ending: Outcome | None = None
    """How the service ended it, where it did and says so."""


class Machine(Protocol):
    """A machine on which nothing has run."""

    async def run(self, job: bytes, seconds: float) -> Printed:
        """Run the job within ``seconds`` of its own. Raises Passing or SandboxError."""
        ...


class Service(Protocol):
    """Somebody's machines."""

    @property
    def address(self) -> str:
        """Where they are, for people."""
        ...

    def machine(self, client: Client, limits: Limits) -> AbstractAsyncContextManager[Machine]:
        """A machine for one program, ended afterwards."""
        ...


def most_printed(limits: Limits) -> int:
    """Bytes of an answer with output: base64 of it, twice (Piston repeats it), and what is around it."""
    return 4 * limits.output_kb * 1024 + SMALL
