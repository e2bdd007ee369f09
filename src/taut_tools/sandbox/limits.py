"""Limits of a program, its trials, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from taut.config import configclass, fields_of

_Positive = Annotated[int, Field(gt=0, le=10**9)]
_Seconds = Annotated[float, Field(gt=0, le=1e6)]

Outcome = Literal["ok", "error", "time", "cpu", "memory", "output", "crash", "not_run"]
"""The outcome of a trial.

ok: the program ended by itself with exit code 0, and a call or a check reached its end. error: an exception, another
exit code, or an exit before the end of the check. time, cpu, memory, output: this limit was reached. crash: a signal
ended the program. not_run: the time of all trials was up, or an earlier trial failed and no other was wanted.
"""


@configclass
class Limits:
    """Limits on a program's resources. Memory is limited per process: all together may use ``processes`` times the
    memory of one."""

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
        """The limits as a plain dict, for the process in the jail."""
        return {name: getattr(self, name) for name in fields_of(type(self))}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a program: as a script that reads ``stdin``, or imported for a call or for a check."""

    stdin: str = ""
    call: str = ""
    """Name of the function to call, in the program or its class ``Solution``."""
    arguments: str = "[]"
    """Arguments of the call, as a JSON list."""
    check: str = ""
    """Code with asserts that runs in the program's namespace."""


class Ran(NamedTuple):
    """The result of one trial."""

    stdout: str
    stderr: str
    outcome: Outcome
    seconds: float
    value: str | None = None
    """Value of the call, as JSON."""
