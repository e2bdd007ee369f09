"""A sharded model in bfloat16: gradients are those of rounded weights, and no layer outlives its forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers import sharded_bfloat16
from tests.helpers.forked_processes import run
from tests.helpers.sharded_bfloat16 import NUM_LAYERS, Seen
from tests.helpers.tiny_critics import ONE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bfloat16")
    sharded_bfloat16.prepare(place)
    return place


@pytest.fixture(scope="module")
def seen(place: Path) -> Seen:
    done = run("-m", "tests.helpers.sharded_bfloat16", place, num_ranks=2)
    assert done.returncode == 0, done.stderr
    return Seen(*torch.load(place / "seen.pt", weights_only=False))


@pytest.fixture(scope="module")
def autocast(place: Path) -> Seen:
    """One process."""
    scorer = sharded_bfloat16.load(place, ONE)
    mine = sharded_bfloat16.microbatches()[:1]
    return sharded_bfloat16.run(scorer, mine, ONE, by_weights=False)


def test_gradients_are_those_of_rounded_weights(place: Path, seen: Seen) -> None:
    """To the bit: each rank's are in bfloat16, and summed in float32."""
    scorer = sharded_bfloat16.load(place, ONE)
    sharded_bfloat16.narrow(scorer)
    one = sharded_bfloat16.run(scorer, sharded_bfloat16.microbatches(), ONE)
    assert one.gradients.keys() == seen.gradients.keys()
    for name, gradient in one.gradients.items():
        assert seen.gradients[name].dtype == torch.float32
        torch.testing.assert_close(seen.gradients[name], gradient, rtol=0, atol=0, msg=name)


def test_no_layer_outlives_its_forward(seen: Seen, autocast: Seen) -> None:
    """Autocast, for comparison, keeps what it casts."""
    assert min(seen.inside) > 0
    assert seen.after == [0] * NUM_LAYERS
    assert autocast.after == [autocast.after[0] * (1 + at) for at in range(NUM_LAYERS)]
    assert autocast.after[0] > 0


def test_experts_compute_in_bfloat16_and_routers_in_float32(seen: Seen, autocast: Seen) -> None:
    for products in (seen.products, autocast.products):
        wide = {name: n for (name, dtype), n in products.items() if dtype == torch.float32}
        narrow = {name: n for (name, dtype), n in products.items() if dtype == torch.bfloat16}
        assert sum(wide.values()) == NUM_LAYERS
        assert sum(n for name, n in narrow.items() if "grouped" in name) == 2 * NUM_LAYERS
