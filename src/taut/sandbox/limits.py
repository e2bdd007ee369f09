"""Limits of a program, its trials, and the results of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from taut.config import configclass, fields_of

_Positive = Annotated[int, Field(gt=0, le=10**9)]
_Seconds = Annotated[float, Field(gt=0, le=1e6)]

Outcome = Literal["ok", "error", "time", "cpu", "memory", "output", "crash", "not_run"]
"""ok: it ended by itself, in order (a call or a check: its end was reached). error: an exception, another exit code
than 0, or an exit before the check. time, cpu, memory, output: what ran out. crash: a signal ended it. not_run: the
whole program's time was up, or a test before it failed where that is enough."""


@configclass
class Limits:
    """Limits on a program's resources. Memory is limited per process: together they may use ``processes`` times as
    much."""

    cpu_seconds: _Positive = 5
    """Processor time of a test in seconds, for each process."""
    wall_seconds: _Seconds = 10.0
    """Time of a test in seconds."""
    total_seconds: _Seconds = 30.0
    """Time of all of a program's tests in seconds; the remaining tests are not run."""
    memory_mb: _Positive = 1024
    """Address space of a process in MiB."""
    processes: _Positive = 16
    """Processes and threads at a time."""
    open_files: _Positive = 64
    """Open files of a process."""
    scratch_mb: _Positive = 64
    """Size of the scratch folder, and of a file in it, in MiB."""
    scratch_files: _Positive = 1000
    """Files and folders in the scratch folder."""
    output_kb: _Positive = 256
    """Output of a test in KiB, standard output and error together; all tests of a program may print 16 times as
    much."""

    def as_mapping(self) -> dict[str, Any]:
        """As a plain dict, for the process in the jail."""
        return {name: getattr(self, name) for name in fields_of(type(self))}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a program: as a script that reads ``stdin``, or imported for a call or for a check."""

    stdin: str = ""
    call: str = ""
    """The function to call, of the program or of its class ``Solution``."""
    arguments: str = "[]"
    """The call's arguments: a JSON list."""
    check: str = ""
    """Code that is run in the program's names: asserts."""


class Ran(NamedTuple):
    """The result of one trial."""

    stdout: str
    stderr: str
    outcome: Outcome
    seconds: float
    value: str | None = None
    """What the call returned, as JSON."""
