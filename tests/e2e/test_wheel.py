"""The wheel stands alone: it has every file of the package, and works where the source is not.

It is built without a network, by setuptools in this environment, from a copy of what it is made of.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.helpers.base_install import PROJECT, ROOT, install_base, run_taut

import taut

MADE_OF = ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"])
ABOUT = f"taut-{taut.__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in MADE_OF:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    ran = subprocess.run(
        [sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    (path,) = (folder / "dist").glob("taut-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """What an index reads of it."""
    with zipfile.ZipFile(wheel) as archive:
        return message_from_string(archive.read(f"{ABOUT}/METADATA").decode())


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for package in ("taut", "taut_tools")
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        "taut/py.typed",
        "taut_tools/py.typed",
        "taut_tools/migrate/table/options.json",
    } <= expected
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"{ABOUT}/entry_points.txt").decode()
    about = {name for name in names if name.startswith(f"{ABOUT}/")}
    assert names - about == expected
    assert f"{ABOUT}/licenses/LICENSE" in about
    assert "taut = taut.cli:main" in entry_points


def test_the_wheel_works_without_the_source(wheel: Path, tmp_path: Path) -> None:
    """With the base dependencies alone, and the tables of recipes out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    folder = tmp_path / "work"
    folder.mkdir()
    install_base(folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text("model_name_or_path: m\nmax_length: 512\n")
    for words, output in (
        (["--help"], "usage: taut"),
        (["check", "--recipe", "trl:recipe.yaml"], "recipe.yaml  trl sft"),
        (["demo", "--help"], "usage: taut demo"),
        (["runs"], "no runs in ."),
    ):
        ran = run_taut(folder, *words, source=tmp_path / "installed")
        assert ran.stderr == ""
        assert ran.stdout.startswith(output)


def test_what_an_index_is_told(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("taut", taut.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] and metadata["Keywords"] and metadata["Summary"]
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    base = {needs.name for needs in needed if "extra ==" not in str(needs.marker)}
    assert base == {Requirement(line).name for line in PROJECT["dependencies"]}
    assert {*metadata.get_all("Provides-Extra", [])} == {*PROJECT["optional-dependencies"]}


def test_the_readme_of_the_index_leads_nowhere_that_is_not_there(metadata: Message) -> None:
    """No link, image or file name that only a checkout could follow."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]*)\)|\b(?:src|href)=[\"']([^\"']*)|^\[[^]]+\]:\s*(\S+)", text)
    relative = [target for target in map("".join, targets) if not target.startswith("https://")]
    assert relative == []
    assert not re.search(r"\b(?:docs|examples|tests|benchmarks|src)/", text)
