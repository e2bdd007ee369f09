"""taut as its base installation has it: a folder with the packages of pyproject's ``dependencies`` and no others.

``python`` runs in a process of its own that sees the standard library, this folder and src.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import taut

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def install_base(folder: Path) -> None:
    """Link what the base dependencies need into ``folder``, and say that taut came from an index."""
    waiting, installed = [Requirement(line) for line in PROJECT["dependencies"]], set[str]()
    while waiting:
        requirement = waiting.pop()
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not is_wanted or requirement.name in installed:
            continue
        installed.add(requirement.name)
        found = metadata.distribution(requirement.name)
        waiting += [Requirement(line) for line in found.requires or ()]
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(found.locate_file(name))))
    about = folder / f"taut-{taut.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: taut\nVersion: {taut.__version__}\n"
    )
    (about / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
            for group, named in PROJECT["entry-points"].items()
        )
    )


def python(
    folder: Path, program: str, source: Path = ROOT / "src"
) -> subprocess.CompletedProcess[str]:
    """Run a program there, in a directory of its own. ``source``: the folder that holds the package taut."""
    visible = f"import sys; sys.path += [{str(source)!r}, {str(folder)!r}]\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", visible + program],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


def run_taut(
    folder: Path, *words: str, source: Path = ROOT / "src"
) -> subprocess.CompletedProcess[str]:
    """Run a command there."""
    return python(folder, f"from taut.cli import main; sys.exit(main({list(words)!r}))", source)
