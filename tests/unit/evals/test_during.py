"""What is opened for evaluation while training, and on which ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from taut.data.dataset import DataConfig
from taut.evals import during
from taut.evals.during import Answering, AnswersConfig, build_answering
from taut.parallel import Ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_judges_opens_the_rewards(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(during, "_load_rows", lambda *_: [])
    config = AnswersConfig(rewards=["exact_match", "contains"])
    ranks = Ranks(rank, 2, torch.device("cpu"))
    asked: Any = (SimpleNamespace(), lambda **_: SimpleNamespace(context=None))
    job = cast(Any, SimpleNamespace(ranks=ranks))
    answering = build_answering(config, DataConfig(train="none"), *asked, job)
    assert isinstance(answering, Answering)
    assert (answering.panel is None) == (rank == 1)
    assert list(answering.names) == ["exact_match", "contains"]
    assert answering.decisions == []
