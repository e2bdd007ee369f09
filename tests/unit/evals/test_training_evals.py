"""What is opened for evaluation while training, and on which ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.helpers import counted_pictures as tiled
from tests.helpers.chat_runs import write_rows

from taut.data.settings import DataConfig
from taut.errors import DataError
from taut.evals import training_evals
from taut.evals.settings import AnswersConfig
from taut.evals.training_evals import Answering, build_answering
from taut.train.distributed import Ranks
from taut.vision.settings import ImagesConfig


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_judges_opens_the_rewards(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_evals, "_load_rows", lambda *_: ([], []))
    config = AnswersConfig(rewards=["exact_match", "contains"])
    ranks = Ranks(rank, 2, torch.device("cpu"))
    asked: Any = (SimpleNamespace(), lambda **_: SimpleNamespace(context=None))
    trainer = cast(Any, SimpleNamespace(ranks=ranks))
    answering = build_answering(config, DataConfig(train="none"), *asked, trainer)
    assert isinstance(answering, Answering)
    assert (answering.reward_set is None) == (rank == 1)
    assert list(answering.names) == ["exact_match", "contains"]
    assert answering.decisions == []


def test_prompts_whose_pictures_cannot_be_had_may_be_left_out(tmp_path: Path) -> None:
    ref = tiled.picture(tmp_path, "red")["image"]
    names = [ref.value, "gone.png"]
    content = [[{"type": "image", "image": name}, tiled.text("what?")] for name in names]
    rows = [{"messages": [{"role": "user", "content": it}], "answer": "red"} for it in content]
    trainer = cast(Any, SimpleNamespace(ranks=Ranks(0, 1, torch.device("cpu"))))

    def built(*given: dict[str, Any]) -> Answering:
        config = AnswersConfig(
            rewards="exact_match", data=str(write_rows(tmp_path / "d.jsonl", given))
        )
        data = DataConfig(train="none", images=ImagesConfig(bad="drop"))
        engine: Any = lambda **_: SimpleNamespace(context=None)  # noqa: E731
        found = build_answering(config, data, tiled.renderer(tmp_path), engine, trainer)
        assert found is not None
        return found

    found = built(*rows)
    assert [row.references for row in found.rows] == [("red",)]
    ((name, value, reason),) = found.decisions
    assert (name, value) == ("eval.answers", "without 1 of the prompts")
    assert "gone.png" in reason
    with pytest.raises(DataError, match=r"all of eval\.answers \(1 prompt\) is left out"):
        built(rows[1])
