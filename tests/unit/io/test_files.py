"""Files are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from taut.io import files


def test_a_file_has_its_new_content_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest"
    files.write_text(path, "one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            files.write_text(path, "two")
    assert path.read_text() == "one"
    files.write_text(path, "two")
    assert path.read_text() == "two"
    assert [found.name for found in tmp_path.iterdir()] == ["latest"]


def filled(directory: Path, text: str) -> Path:
    directory.mkdir()
    (directory / "file").write_text(text)
    return directory


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    filled(tmp_path / "model", "old")
    files.replace_directory(filled(tmp_path / ".model.partial", "new"), tmp_path / "model")
    assert (tmp_path / "model" / "file").read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("killed_before", [1, 2])
def test_a_replacement_that_was_killed_leaves_one_of_the_two(
    killed_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "model", "old")
    partial = filled(tmp_path / ".model.partial", "new")
    calls: list[Path] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == killed_before:
            raise SystemExit("killed")
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(SystemExit):
            files.replace_directory(partial, tmp_path / "model")
    files.clear_leftovers(tmp_path)
    assert (tmp_path / "model" / "file").read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["model"]


def test_only_leftovers_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".events.partial").write_text("")
    filled(tmp_path / ".step-000002.partial", "")
    filled(tmp_path / ".git", "mine")
    (tmp_path / ".old").write_text("mine")
    (tmp_path / "notes.old").write_text("mine")
    files.clear_leftovers(tmp_path)
    assert sorted(found.name for found in tmp_path.iterdir()) == [".git", ".old", "notes.old"]


def test_a_directory_that_is_removed_never_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = filled(tmp_path / "step-000002", "x")
    names: list[str] = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: names.append(Path(path).name))
    files.remove_directory(target)
    assert not target.exists()
    assert names == [".step-000002.gone.partial"]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert files.digest(tmp_path / "a") == empty


def test_what_is_not_of_the_names_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".vimrc.old").write_text("mine")
    (tmp_path / ".thesis.partial").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".model.partial").symlink_to(tmp_path / "elsewhere")
    filled(tmp_path / ".best.gone.partial", "ours")
    filled(tmp_path / ".adapter.old", "ours")
    files.clear_leftovers(tmp_path, ("model", "best", "adapter"))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [".thesis.partial", ".vimrc.old", "adapter", "elsewhere"]


def test_a_file_system_that_cannot_force_a_directory_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    monkeypatch.setattr(stat, "S_ISDIR", lambda _: True)
    with pytest.raises(OSError, match="Invalid"):
        files.sync(tmp_path / "file")


@pytest.mark.parametrize("write", ["write_bytes", "writing"])
def test_a_link_planted_where_a_file_is_first_written_is_not_followed(
    write: str, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / ".scores.partial").symlink_to(precious)
    if write == "writing":
        with files.writing(tmp_path / "scores") as file:
            file.write("new")
    else:
        files.write_bytes(tmp_path / "scores", b"new")
    assert precious.read_text() == "text"
    assert (tmp_path / "scores").read_text() == "new" and not (tmp_path / "scores").is_symlink()
