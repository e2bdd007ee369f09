"""What all engines share."""

from __future__ import annotations

import pytest

from taut.config import replace
from taut.errors import ConfigError
from taut.inference.engine import stream_seed
from taut.inference.settings import COLDEST, Sampling


def test_a_stream_seed_is_the_same_on_every_machine() -> None:
    assert stream_seed(0, "train.jsonl:17", 0) == 7_921_743_104_698_777_662
    assert 0 <= stream_seed(2**63, "x", 10) < 2**63


def test_every_part_chooses_the_stream() -> None:
    parts = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (1, "0/a", 0), (1, "a", 10)]
    assert len({stream_seed(*part) for part in parts}) == len(parts)


def test_a_temperature_that_float32_cannot_divide_by_is_refused() -> None:
    assert Sampling(temperature=COLDEST).temperature == COLDEST
    with pytest.raises(ConfigError, match=r"temperature=1e-42: it is too low.* or 0 for the most"):
        replace(Sampling(), {"temperature": 1e-42})
