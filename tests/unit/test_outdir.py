"""The output directory is refused or claimed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from taut.errors import OutputError
from taut.outdir import MARK, claim, require_usable


def usable(out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    require_usable(out, resume=resume, overwrite=overwrite)


def run_in(out: Path) -> Path:
    """``out`` as a finished run leaves it."""
    claim(out, {"seed": 1}, overwrite=False)
    (out / "model").mkdir()
    (out / "model" / "weights").write_text("old")
    return out


def test_a_new_or_an_empty_directory_is_usable_and_looking_writes_nothing(tmp_path: Path) -> None:
    usable(tmp_path / "a" / "b" / "c")
    (tmp_path / "empty").mkdir()
    usable(tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_run_is_refused_unless_told(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    with pytest.raises(
        OutputError, match=r"exists and is not empty; .*resume=true .*overwrite=true"
    ):
        usable(out)
    usable(out, resume=True)
    usable(out, overwrite=True)
    with pytest.raises(OutputError, match="contradict each other"):
        usable(out, resume=True, overwrite=True)


def test_only_runs_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=f"not a taut run \\(no {re.escape(MARK)}\\)"):
        usable(tmp_path, overwrite=True)


def test_what_the_run_reads_is_not_overwritten(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    (tmp_path / "link").symlink_to(out)
    for read in (out / "model", out, tmp_path / "link" / "model", out / "old.jsonl"):
        with pytest.raises(OutputError, match=r"would delete .*; name another out"):
            require_usable(out, resume=False, overwrite=True, inputs=["org/name", str(read)])
    beside = [str(tmp_path / "run2" / "model"), "org/name"]
    require_usable(out, resume=False, overwrite=True, inputs=beside)
    require_usable(out, resume=True, overwrite=False, inputs=[str(out / "model")])


@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_a_file_in_the_way_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"out=.*/file.* is a file"):
        usable(Path(f"{tmp_path}/file{below}"))


def test_a_place_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(
        OutputError, match=f"no permission in {re.escape(str(tmp_path))}; name another"
    ):
        usable(tmp_path / "run")


def test_claiming_writes_the_configuration_and_nothing_half(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    claim(out, {"seed": 1}, overwrite=False)
    assert json.loads((out / MARK).read_text()) == {"seed": 1}
    assert [path.name for path in out.iterdir()] == [MARK]


def test_claiming_keeps_what_is_resumed_and_empties_what_is_overwritten(tmp_path: Path) -> None:
    out = run_in(tmp_path / "run")
    claim(out, {"seed": 2}, overwrite=False)
    assert (out / "model" / "weights").read_text() == "old"
    assert json.loads((out / MARK).read_text()) == {"seed": 2}
    claim(out, {"seed": 3}, overwrite=True)
    assert [path.name for path in out.iterdir()] == [MARK]


def test_what_cannot_be_claimed_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"out=.* cannot be written: .*; name another"):
        claim(tmp_path / "file" / "run", {}, overwrite=False)
