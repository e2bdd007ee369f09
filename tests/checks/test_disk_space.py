"""What ``run.output`` says a run needs of its disk: the parts it names add up to the sum it compares."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.checks.planting import Place

from taut.checks import run as checks
from taut.checks.session import Session


def session(place: Place, **keys: Any) -> Session:
    return place.session(out=str(place.directory / "out"), checkpoint__every=5, **keys)


def total(lines: tuple[str, ...]) -> float:
    """The sum of the parts, in GB."""
    names = [line.partition(":")[0] for line in lines]
    assert names == ["checkpoints", "model", "kept free"]
    return sum(float(re.search(r"([\d.]+) GB", line)[1]) for line in lines)  # type: ignore[index]


@pytest.mark.parametrize("keys", [{}, {"lora__rank": 4}, {"lora__rank": 4, "save__merged": False}])
def test_the_parts_add_up(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = session(Place(tmp_path, monkeypatch), **keys)
    roomy = checks.the_output_fits_on_its_disk(run)
    assert roomy.outcome == "passed"
    assert total(roomy.notes) == pytest.approx(roomy.number, abs=0.002)
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    full = checks.the_output_fits_on_its_disk(run)
    assert full.outcome == "failed"
    said = re.match(r"([\d.]+) GB are needed at .*, and ([\d.]+) GB are free", full.says)
    assert said is not None
    assert total(full.evidence) == pytest.approx(float(said[1]), abs=0.002)
    assert float(said[1]) == pytest.approx(roomy.number, abs=0.001)
    assert float(said[2]) == full.number == 0.001


def test_what_is_said_of_the_model_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    run = session(place)
    (directory,) = (path.parent for path in tmp_path.rglob("model.safetensors"))
    written = (directory / "model.safetensors").stat().st_size
    assert checks.saved_model_bytes(run) == pytest.approx(written, rel=0.05)
