"""A step that is begun again for want of memory finds the rollout it had drawn."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.rl.test_rollout_groups import worker

from taut.data.order import Order
from taut.errors import OutOfMemory
from taut.losses.supervised import CrossEntropy
from taut.rl import online
from taut.rl.credits import AllCredit
from taut.rl.monitors import RolloutMonitor
from taut.rl.online import Online
from taut.rl.settings import RolloutConfig, RolloutMonitorConfig
from taut.train.distributed import Ranks
from taut.train.recorder import Recorder


def test_a_step_begun_again_for_want_of_memory_finds_its_roll_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, _, _ = worker(lambda name, index: f"{name} {index}", lambda one: len(one.text))
    config = RolloutConfig(n=2)
    interrupts = SimpleNamespace(at_once=lambda ranks: nullcontext(), held=nullcontext)
    ranks = Ranks(0, 1, torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        recorder=Recorder(),
        interrupts=interrupts,
        ranks=ranks,
        num_steps=3,
        emit=lambda *_, **__: None,
    )
    order = Order((), (), 3, 2, False, None)
    monkeypatch.setattr(Order, "step", lambda self, step: [step, step + 1])
    made = Online(
        config,
        None,  # type: ignore[arg-type]
        order,
        AllCredit(CrossEntropy()),
        RolloutMonitor(RolloutMonitorConfig()),
        3,
        get_trainer=lambda: trainer,
        open_worker=lambda: drawn,
    )
    tries = iter([OutOfMemory("too little"), None, None])

    def score_trees(*_: object) -> dict[str, Any]:
        if (error := next(tries)) is not None:
            raise error
        return {}

    monkeypatch.setattr(online, "score_trees", score_trees)
    with pytest.raises(OutOfMemory):
        made.prepare(1)
    names = [sample.id for tree in made.prepare(1) for sample in tree.samples]
    assert names == [f"p:{row}#{index} of rollout 1" for row in (1, 2) for index in (0, 1)]
    names = [sample.id for tree in made.prepare(2) for sample in tree.samples]
    assert names == [f"p:{row}#{index} of rollout 2" for row in (2, 3) for index in (0, 1)]
