"""Temporary folders go with their process, and nothing else in a shared place is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from taut.cli import main
from taut.io import temporary
from taut.io.temporary import TemporaryFolder, remove_abandoned

NAME = "taut-evaluate-abcdefgh"
"""Such a name as ``TemporaryFolder`` draws."""
HOLD = """
import sys, time
from pathlib import Path
from taut.io.temporary import TemporaryFolder
folder = TemporaryFolder("evaluate", Path(sys.argv[1]))
(folder.path / "deep").mkdir()
(folder.path / "deep" / "file").write_text("large")
print(folder.path, flush=True)
time.sleep(60)
"""


def abandoned(place: Path, name: str = NAME, mode: int = 0o700) -> Path:
    """What a killed process leaves."""
    folder = place / name
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").touch()
    (folder / "lock").touch()
    folder.chmod(mode)
    return folder


def test_a_folder_is_private_and_goes_at_the_end_of_its_block(tmp_path: Path) -> None:
    with TemporaryFolder("evaluate", tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        try:
            remove_abandoned(tmp_path)
            assert (path / "deep" / "file").exists()
        finally:
            process.send_signal(signal.SIGKILL)
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_first_folder_in_a_place_removes_what_is_abandoned_there(tmp_path: Path) -> None:
    abandoned(tmp_path)
    (tmp_path / "taut-cache-bbbbbbbb").mkdir(mode=0o700)  # killed before it had a lock
    TemporaryFolder("weights", tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["taut-evaluate", "taut-evaluate-mine", "taut-evaluate-abcdefgh.bak", "abcdefgh"]
)
def test_a_folder_of_another_name_stays(name: str, tmp_path: Path) -> None:
    folder = abandoned(tmp_path, name)
    remove_abandoned(tmp_path)
    assert (folder / "deep" / "file").exists()


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770])
def test_a_folder_that_others_may_enter_stays(mode: int, tmp_path: Path) -> None:
    folder = abandoned(tmp_path, mode=mode)
    remove_abandoned(tmp_path)
    assert (folder / "deep" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
    os.chown(folder, 12345, -1)
    remove_abandoned(tmp_path)
    assert (folder / "deep" / "file").exists()


def test_a_folder_without_a_lock_stays_unless_it_is_empty(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
    (folder / "lock").unlink()
    remove_abandoned(tmp_path)
    assert (folder / "deep" / "file").exists()


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory"])
def test_a_lock_that_is_no_file_is_neither_followed_nor_waited_for(
    kind: str, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    folder = abandoned(tmp_path)
    lock = folder / "lock"
    lock.unlink()
    if kind == "link":
        lock.symlink_to(precious)
    elif kind == "FIFO":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    remove_abandoned(tmp_path)
    assert precious.read_text() == "text"
    assert (folder / "deep" / "file").exists()


def test_links_in_an_abandoned_folder_are_removed_and_not_followed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").touch()
    folder = abandoned(tmp_path)
    (folder / "deep" / "link").symlink_to(home)
    (folder / "link").symlink_to(home)
    remove_abandoned(tmp_path)
    assert not folder.exists() and (home / "file").exists()


def test_a_folder_that_is_taken_for_abandoned_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdtemp = temporary.tempfile.mkdtemp

    def and_removed(**kwargs: object) -> str:
        path = mkdtemp(**kwargs)  # type: ignore[call-overload]
        made.append(Path(path))
        if len(made) == 1:
            remove_abandoned(tmp_path)
        return str(path)

    monkeypatch.setattr(temporary.tempfile, "mkdtemp", and_removed)
    with TemporaryFolder("evaluate", tmp_path) as folder:
        assert made[0] != folder == made[1]
        assert list(tmp_path.iterdir()) == [folder]


def test_a_command_removes_what_killed_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    abandoned(tmp_path / "tmp")
    abandoned(tmp_path / "shm", "taut-weights-abcdefgh")
    monkeypatch.setattr(temporary.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(temporary, "MEMORY", tmp_path / "shm")
    assert main(["runs", str(tmp_path)]) == 0
    assert [*(tmp_path / "tmp").iterdir(), *(tmp_path / "shm").iterdir()] == []
