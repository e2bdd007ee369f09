"""What the start event says of a run's command, code and machine; and what it must not say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers.chat_runs import PLAIN, chats, events, save_model, sft, write_rows

from taut.run import origin as module
from taut.run.origin import describe, git_state, versions

CPU = torch.device("cpu")


def test_the_commit_and_whether_the_tree_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "code").mkdir()
    assert git_state(tmp_path / "code") is None, "no repository"
    git = ["git", "-C", str(tmp_path / "code"), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_state(tmp_path / "code") is None, "no commit"
    (tmp_path / "code" / "run.toml").write_text("a = 1")
    subprocess.run([*git, "add", "run.toml"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    commit = head.stdout.strip()
    (tmp_path / "code" / "new").write_text("")
    assert git_state(tmp_path / "code") == {"commit": commit, "is_dirty": False}
    (tmp_path / "code" / "run.toml").write_text("a = 2")
    assert git_state(tmp_path / "code") == {"commit": commit, "is_dirty": True}


def test_a_git_that_hangs_or_is_missing_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIT_SECONDS", 0.2)
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
    (tmp_path / "git").unlink()
    assert git_state(tmp_path) is None


def test_a_driver_and_a_processor_are_read_where_the_system_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, processor = tmp_path / "driver", tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "DRIVER", driver)
    monkeypatch.setattr(module, "PROCESSOR", processor)
    cuda = torch.device("cuda")
    assert "driver" not in versions(cuda) and describe(CPU)["name"]
    for kind in ("Kernel Module  580.95.05", "Open Kernel Module for x86_64  580.95.05"):
        driver.write_text(f"NVRM version: NVIDIA UNIX {kind}  Release Build\nGCC version: 12")
        assert versions(cuda)["driver"] == "580.95.05"
    processor.write_text("processor\t: 0\nmodel name\t: A Chip 9\nflags\t: fpu\n")
    assert describe(CPU)["name"] == "A Chip 9" and describe(CPU)["memory_bytes"] > 2**28


def test_a_run_says_what_it_was_started_with_and_so_does_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import taut

    monkeypatch.setattr(sys, "orig_argv", ["taut", "sft", "--hf-token", "sesame", "a=b://c:d@e"])
    model = save_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", chats(4))
    sft(model, rows, tmp_path / "out", steps=1, **PLAIN, **{"checkpoint.every": 1})
    monkeypatch.setattr(module.platform, "python_version", lambda: "4.0")
    taut.resume(tmp_path / "out", steps=2)
    first, second = events(tmp_path / "out", "start")
    assert first["argv"] == ["taut", "sft", "--hf-token", "***", "a=b://***@e"]
    assert first["versions"]["torch"] == torch.__version__ and first["host"]
    assert len(first["devices"]) == first["num_ranks"] == 1
    assert first["devices"][0] == {"host": first["host"], **describe(CPU)}
    assert first["num_threads"] == torch.get_num_threads() and first["num_cpus"] > 0
    assert first["versions"]["python"] != second["versions"]["python"] == "4.0"
