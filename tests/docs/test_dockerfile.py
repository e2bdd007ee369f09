"""The Dockerfile's text: each instruction is known, installs what the Makefile installs, and leaves root behind.

No container is built here; the shell checks the syntax of what would be run.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


class Instruction(NamedTuple):
    """A line of the Dockerfile, continued lines joined."""

    name: str
    text: str


def read_dockerfile() -> list[Instruction]:
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.splitlines() if line]
    return [Instruction(name, text) for name, _, text in parts]


DOCKERFILE = read_dockerfile()
ARGUMENTS = {
    name: shlex.split(default)[0]
    for name, _, default in (i.text.partition("=") for i in DOCKERFILE if i.name == "ARG")
}


def texts(name: str) -> list[str]:
    return [instruction.text for instruction in DOCKERFILE if instruction.name == name]


def test_every_instruction_is_known_and_every_argument_used() -> None:
    assert {instruction.name for instruction in DOCKERFILE} == KNOWN
    used = set(re.findall(r"\$\{(\w+)\}", " ".join(instruction.text for instruction in DOCKERFILE)))
    assert used == ARGUMENTS.keys()
    for name in ("ENTRYPOINT", "CMD"):
        (text,) = texts(name)
        assert all(isinstance(word, str) for word in json.loads(text))


@pytest.mark.parametrize("command", texts("RUN"))
def test_every_command_is_one_for_the_shell(command: str) -> None:
    subprocess.run(["sh", "-n", "-c", command], check=True)


def test_every_image_has_a_version() -> None:
    for image in texts("FROM"):
        assert re.fullmatch(r"python:\$\{PYTHON\}-slim-bookworm( AS wheel)?", image)
    assert f"Programming Language :: Python :: {ARGUMENTS['PYTHON']}" in PROJECT["classifiers"]


def test_torch_is_the_one_of_the_makefile_on_each_device() -> None:
    makefile = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile is not None
    pinned = makefile[1]
    assert re.fullmatch(r"torch==[\d.]+", pinned)
    cpu = shlex.split(ARGUMENTS["TORCH"])
    assert cpu == [pinned, "--index-url", "https://download.pytorch.org/whl/cpu"]
    said = "\n".join((ROOT / name).read_text() for name in ("Dockerfile", "docs/install.md"))
    cuda = re.findall(r"docker build --tag taut --build-arg TORCH=(\S+) \.", said)
    assert cuda == [pinned] * 2
    assert set(re.findall(r"\btorch==[\d.]*\d", said)) == {pinned}


def test_pip_installs_torch_first_and_then_what_was_tested_together() -> None:
    wheel, torch, taut = (command for command in texts("RUN") if command.startswith("pip "))
    assert wheel.startswith("pip wheel") and "--no-deps" in wheel
    assert torch.endswith("pip install --no-cache-dir ${TORCH}")
    assert "--constraint /wheel/constraints.txt" in taut and "[${EXTRAS}]" in taut
    extras = {*PROJECT["optional-dependencies"]} - {
        *("dev", "docs", "page-tests", "wandb", "trackio", "verifiers", "gs", "modelscope")
    }
    assert set(ARGUMENTS["EXTRAS"].split(",")) == extras


def test_what_is_copied_is_there_and_is_all_the_wheel_is_made_of() -> None:
    """.dockerignore lets nothing through but what is named: no run, model, key or environment."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    named = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert named == {
        "constraints.txt",
        "pyproject.toml",
        "src",
        PROJECT["readme"],
        *PROJECT["license-files"],
    }
    assert all((ROOT / name).exists() for name in named)
    assert any(fnmatch("src/taut/__pycache__", rule) for rule in rules if rule.startswith("**"))
    sources = [text.split()[-2] for text in texts("COPY") if not text.startswith("--from")]
    assert set(sources) <= {".", *named}


def test_it_runs_without_root_and_holds_no_secret() -> None:
    after_user = [i.name for i in DOCKERFILE[DOCKERFILE.index(Instruction("USER", "taut")) :]]
    assert after_user == ["USER", "WORKDIR", "ENTRYPOINT", "CMD"]
    assert any(command.startswith("useradd ") for command in texts("RUN"))
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"(?i)token|password|secret|api_?key|credential|\bhttps?://[^/\s]*@", text)


def test_the_page_builds_and_runs_what_there_is() -> None:
    page = (ROOT / "docs/install.md").read_text()
    section = page[page.index("## Docker") :]
    assert set(re.findall(r"--build-arg (\w+)=", section)) <= ARGUMENTS.keys()
    (home,) = (text for text in texts("ENV") if text.startswith("HOME="))
    (folder,) = texts("WORKDIR")
    cache = f"{shlex.split(home)[0].removeprefix('HOME=')}/.cache"
    assert f"taut-cache:{cache}" in section
    assert any(f"mkdir --mode=1777 {cache} " in command for command in texts("RUN"))  # its volume
    assert f'"$PWD":{folder}' in section
