"""``taut completion``: what the last word may become, and the scripts in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from taut.cli import main
from taut.commands.completion import SCRIPTS, complete


def offered(*words: str) -> list[str]:
    return complete(words)


def test_commands_keys_and_values() -> None:
    assert offered("s") == ["sft", "simpo", "show", "schema", "sandbox", "score", "serve-reward"]
    assert {"optim.", "model=", "data."} <= set(offered("sft", ""))
    assert offered("sft", "opt") == ["optim."]
    assert offered("sft", "optim.sch") == ["optim.schedule="]
    assert offered("sft", "optim.schedule=") == [
        f"optim.schedule={name}" for name in ("constant", "linear", "cosine")
    ]
    assert offered("sft", "log.console=t") == ["log.console=true"]
    assert offered("sft", "--optim.sch") == ["--optim.schedule="]
    assert offered("sft", "--optim.schedule=co") == [
        "--optim.schedule=constant",
        "--optim.schedule=cosine",
    ]
    assert offered("sft", "--optim.schedule", "l") == ["linear"]
    assert offered("eval", "answers") == []
    assert offered("sft", "steps=") == ["steps=none"]
    assert offered("completion", "") == ["bash", "zsh", "fish", "shell="]
    assert offered("check", "method=dis") == ["method=distill"]


def test_groups_of_the_help() -> None:
    assert offered("sft", "--he") == ["--help"]
    assert {"general", "optim", "all"} <= set(offered("sft", "--help", ""))
    assert offered("sft", "--help", "opt") == ["optim"]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("rows one.jsonl", "run.toml", "runs/b", ".hidden"):
        (tmp_path / name).touch()
    assert offered("sft", "data.train=r") == [
        f"data.train={name}" for name in ("rows one.jsonl", "run.toml", "runs/")
    ]
    assert offered("sft", "data.train=runs/") == ["data.train=runs/b"]
    assert offered("sft", "run") == ["run.toml", "runs/"]
    assert offered("generate", "ru") == ["run.toml", "runs/"]
    assert offered("resume", "ru") == ["run.toml", "runs/"]
    assert offered("sft", "data.train=no/") == []
    assert all(".hidden" not in word for word in offered("sft", ""))


def test_it_needs_neither_torch_nor_any_command() -> None:
    code = (
        "import sys; from taut.cli import main; main(['--complete', 'grpo', 'grpo.']);"
        "print([m for m in ('torch', 'transformers', 'rich.table') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "grpo.kl_coef=" in lines and lines[-1] == "[]"


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment with ``taut`` on the path, in a folder with files."""
    program = tmp_path / "bin" / "taut"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m taut "$@"\n')
    program.chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "rows.jsonl").touch()
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def asked(name: str, program: str, environment: dict[str, str]) -> list[str]:
    """The lines that a program prints in a shell that has read the script."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    place = Path(environment["HOME"]) / "work"
    script = place.parent / "script"
    script.write_text(SCRIPTS[name].lstrip("\n"))
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
    done = subprocess.run(
        [name, *flags, "-c", program.replace("SCRIPT", str(script))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=place,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("taut sft optim.sch", ["optim.schedule="]),
        ("taut sft optim.schedule=co", ["constant", "cosine"]),  # = ends a word
        ("taut sft model=m data.train=ro", ["rows.jsonl"]),
        ("taut sft log.sinks=s3://x:o", []),
        ("taut comp", ["completion"]),
    ],
)
def test_bash(line: str, expected: list[str], shell: dict[str, str]) -> None:
    program = (
        f"source SCRIPT; complete -p taut; COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _taut; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    first, *found = asked("bash", program, shell)
    assert first == "complete -F _taut taut"
    assert [word for word in found if word] == expected


@pytest.mark.parametrize(
    "name", ["a;b", "a$(touch x)", "a`id`", "a b", "a'b", 'a"b', "a&&b", "a*", "a>b"]
)
def test_bash_quotes_what_it_would_run(name: str, shell: dict[str, str]) -> None:
    place = Path(shell["HOME"]) / "work"
    (place / name).touch()
    (place / "a\nb").touch()  # a name of two lines is left out
    program = (
        "source SCRIPT; COMP_LINE='taut sft data.train=a'; COMP_POINT=${#COMP_LINE}; _taut; "
        'for word in "${COMPREPLY[@]}"; do eval "shown=$word"; printf "%s\\n" "$shown"; done'
    )
    assert asked("bash", program, shell) == [name]
    assert sorted(path.name for path in place.iterdir()) == sorted([name, "a\nb", "rows.jsonl"])


def test_zsh(shell: dict[str, str]) -> None:
    program = (
        'compdef() { print -r -- "$@" }; compadd() { print -r -- "$@" }; source SCRIPT; '
        "words=(taut sft optim.schedule=co); CURRENT=3; _taut; words=(taut sft opt); _taut"
    )
    assert asked("zsh", program, shell) == [
        "_taut taut",
        "-S  --",
        "-- optim.schedule=constant optim.schedule=cosine",
        "-S  -- optim.",
        "--",
    ]


def test_fish(shell: dict[str, str]) -> None:
    program = "source SCRIPT; complete -C 'taut sft optim.schedule=co'; complete -C 'taut sft '"
    found = asked("fish", program, shell)
    assert found[:2] == ["optim.schedule=constant", "optim.schedule=cosine"]
    assert "optim." in found and "rows.jsonl" in found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_prints_the_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", name]) == 0
    assert capsys.readouterr().out == SCRIPTS[name].lstrip("\n")
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
