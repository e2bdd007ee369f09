"""Imported recipes take the first step that their frameworks took, within 1e-5.

``recipes_beside.json`` has the losses and what was sampled, and the frameworks' releases. To record it again:
``python -m benchmarks.recipes_beside --out tests/golden/recipes_beside.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.recipes_beside import (
    EXPLAINED,
    HERE,
    TOLERANCE,
    distance,
    imported,
    losses_of,
    prepared,
    run_worker,
)

RECORD = json.loads(Path(__file__).with_name("recipes_beside.json").read_text())
Losses = dict[str, list[float]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    scratch = tmp_path_factory.mktemp("beside")
    recipes = [path for path in (HERE / "beside").iterdir() if path.stem in RECORD["cases"]]
    cases = [prepared(path, scratch) for path in recipes]
    for case in cases:
        if lines := RECORD["cases"][case.recipe.stem]["rollouts"]:
            (case.folder / "rollouts.jsonl").write_text("\n".join(lines))
    run_worker(Path(sys.executable), "beside_taut.py", [(case, imported(case)) for case in cases])
    return {case.recipe.stem: losses_of(case)[1] for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORD["cases"])
def test_the_first_loss_is_the_frameworks(name: str, losses: Losses) -> None:
    expected = RECORD["cases"][name]["losses"][0]
    if name in EXPLAINED:
        expected = EXPLAINED[name][1](expected, RECORD["means"])
    assert distance(expected, losses[name][0]) <= TOLERANCE


def test_every_recipe_is_recorded() -> None:
    assert set(RECORD["cases"]) == {path.stem for path in (HERE / "beside").iterdir()}
    assert len(RECORD["cases"]) >= 10
