"""What a machine has to have before ranks start on it: the directory, the files and the taut of the machine that
launches. ``ray_cluster.py`` asks every node; a problem is one line.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("taut", "torch", "transformers")


@dataclass(frozen=True)
class Expected:
    """What every machine is compared with."""

    directory: str
    """Where the ranks work: relative paths refer to it."""
    files: Sequence[str]
    """What a run reads: its TOML file, its model and its data, as far as they are paths."""
    folder: str
    """A folder next to the run's ``out``."""
    versions: tuple[tuple[str, str], ...]


def versions() -> tuple[tuple[str, str], ...]:
    """Of Python and of the packages whose numbers a run depends on."""
    return (
        ("python", ".".join(map(str, sys.version_info[:2]))),
        *((name, _version(name)) for name in PACKAGES),
    )


def look(expected: Expected) -> str | None:
    """The first thing that this machine lacks; None: nothing."""
    directory = Path(expected.directory)
    if not (directory.is_dir() and os.access(directory, os.X_OK)):
        return f"does not see {directory}, in which the command was given; expected the same directory on every node"
    for name in expected.files:
        if not (directory / name).exists():
            return f"does not see {name}; expected it there too, on a shared disk or as a copy"
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
    """Whether nothing can listen there. Port 0: whichever is free."""
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


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
