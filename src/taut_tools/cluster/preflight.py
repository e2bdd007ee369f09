"""Check that a rank can start on a machine: the directory, the disk of ``out``, Python and taut. ``placement.py`` runs
this on every node; a problem is one line. Ranks compare packages, model and data themselves, as they start
(checks/cluster.py).
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Expected:
    """Properties of this machine that every other one has to share."""

    directory: str
    """Working directory of the ranks, to which relative paths refer."""
    folder: str
    """A folder next to the run's ``out``."""
    versions: tuple[tuple[str, str], ...]


def versions() -> tuple[tuple[str, str], ...]:
    return ("python", ".".join(map(str, sys.version_info[:2]))), ("taut", version("taut"))


def preflight(expected: Expected) -> str | None:
    """The first thing that this machine lacks, or None."""
    directory = Path(expected.directory)
    if not (directory.is_dir() and os.access(directory, os.X_OK)):
        return f"does not see {directory}, in which the command was given; expected the same directory on every node"
    if not Path(expected.folder).exists():
        return (
            f"does not see {Path(expected.folder).parent}, the directory of out; expected a shared disk: every rank "
            "reads the checkpoints"
        )
    mine = dict(versions())
    for name, wanted in expected.versions:
        if mine[name] != wanted:
            return f"has {name} {mine[name]}; expected {wanted}, as here"
    return None


def port_in_use(host: str, port: int) -> bool:
    """Whether nothing more can listen at a port; never so for port 0, which is any free one."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def free_port(host: str) -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
