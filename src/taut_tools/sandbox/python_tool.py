"""The tool ``python``: run a program of the policy in the sandbox, or at a service."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from taut.config import Decision
from taut.rl.settings import HERE, PROGRAM_SECONDS, Remote
from taut_tools.sandbox.limits import Limits
from taut_tools.sandbox.remote import open_remote
from taut_tools.sandbox.shared import run_python, shared

LIMITS = Limits(cpu_seconds=5, wall_seconds=PROGRAM_SECONDS, total_seconds=PROGRAM_SECONDS)
"""Limits of a program that the policy runs."""
ENDS = {
    "time": f"the program took more than {LIMITS.wall_seconds:g} s",
    "cpu": f"the program took more than {LIMITS.cpu_seconds} s of processor time",
    "memory": f"the program took more than {LIMITS.memory_mb} MB",
    "output": f"the program printed more than {LIMITS.output_kb} kB",
    "crash": "the program crashed",
}


def python(code: str) -> str:
    """
    Run a Python program in a sandbox and return what it prints. Nothing is kept from one program to the next.

    Args:
        code: The program. It prints what is to be returned.
    """
    return _run(code, HERE)


def _run(code: str, remote: Remote) -> str:
    ran = run_python(code, limits=LIMITS, remote=remote)
    if ran.outcome == "ok":
        return ran.stdout or "(nothing was printed)"
    what = ENDS.get(ran.outcome) or (ran.stderr.strip().splitlines() or ["the program failed"])[-1]
    return f"{ran.stdout}Error: {what}"


def open_python(remote: Remote) -> tuple[Callable[..., str], Decision]:
    """Open the tool, with the decision about its sandbox. Raises SandboxError if no mechanism works here, or the
    service does not run a known program.
    """
    if remote.service is not None:
        open_remote(remote, LIMITS).close()
    chosen = shared(remote=remote).mechanism
    return partial(_run, remote=remote), Decision("sandbox", chosen.name, chosen.reason)


python.open_tool = open_python  # type: ignore[attr-defined]  # taut.rl.environments.tools reads it
