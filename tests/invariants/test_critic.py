"""However the states are laid out, and by however many ranks, a critic's values and every gradient are the same.

Policy and critic are of two architectures, in float64; one forward gives log-probabilities and values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.chat_runs import largest_difference
from tests.helpers.forked_processes import run
from tests.helpers.run_directories import read_checkpoint
from tests.helpers.tiny_critics import (
    KINDS,
    ONE,
    SHARE_ALL,
    add_gradient,
    gradients,
    judged,
    make,
    save_models,
    steps,
    values_of,
)
from tests.invariants.test_layout_invariance import relative

from taut.data.packing import ALONE, pack

LIMIT = 1e-9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("critic"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_same_values_and_gradients(kind: str, place: Path) -> None:
    samples = judged()
    layouts: dict[str, list[Any]] = {
        "alone": [pack([sample], ALONE) for sample in samples],
        "packed": [pack(samples, ALONE)],
        "shared": [pack(samples, SHARE_ALL)],
        "shared, another order": [pack(samples[::-1], SHARE_ALL)],
        "split": [pack(samples[:3], SHARE_ALL), pack(samples[3:], ALONE)],
    }
    scorer = make(place, KINDS[kind])
    found = {}
    for name, layout in layouts.items():
        scorer.zero_grad()
        loss = add_gradient(scorer, layout)
        found[name] = loss, {key: grad.clone() for key, grad in gradients(scorer).items()}
    loss, expected = found.pop("alone")
    assert expected.keys() == {name for name, _ in scorer.named_parameters()}
    assert all(bool(gradient.any()) for gradient in expected.values())
    for name, (total, grads) in found.items():
        assert total == pytest.approx(loss, rel=LIMIT), name
        assert max(relative(grads[key], expected[key]) for key in expected) < LIMIT, name


@pytest.mark.parametrize("kind", KINDS)
def test_states_on_a_shared_prefix_have_the_values_they_have_alone(kind: str, place: Path) -> None:
    scorer, samples = make(place, KINDS[kind]), judged()
    packed = pack(samples, SHARE_ALL)
    assert len(packed.read_R.unique()) < packed.num_reads
    alone = torch.cat([values_of(scorer, [sample]) for sample in samples])
    torch.testing.assert_close(values_of(scorer, samples, SHARE_ALL), alone, rtol=0, atol=LIMIT)


@pytest.fixture(scope="module")
def seen(place: Path) -> dict[str, Any]:
    """What two ranks saw, both kinds in one process group."""
    done = run("-m", "tests.helpers.tiny_critics", place, num_ranks=2)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((place / "seen.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_process(kind: str, place: Path, seen: dict[str, Any]) -> None:
    """Losses, both gradient norms, the checkpoint of the critic and of its moments, and the critic that is saved."""
    expected = steps(place, kind, ONE)
    assert [value for step in seen[kind] for value in step] == pytest.approx(
        [value for step in expected for value in step], rel=LIMIT
    )
    one, two = (read_checkpoint(place / f"{kind} of {size}" / "checkpoint") for size in (1, 2))
    assert any(name.startswith("model.critic.") for name in one)
    assert any(name.startswith("optimizer.critic.") for name in one)
    assert largest_difference(two, one) < LIMIT
    saved = [place / f"{kind} of {size}" / "critic" / "model.safetensors" for size in (1, 2)]
    assert [path.is_file() for path in saved] == [kind == "own"] * 2
    if kind == "own":
        assert largest_difference(*(load_file(path) for path in saved)) < LIMIT
