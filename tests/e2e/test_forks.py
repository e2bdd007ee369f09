"""GRPO on paths that fork at a turn: recorded, killed and resumed bit for bit, and trained on again from the record."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.test_online_kills import told_of, within
from tests.helpers.chat_runs import events
from tests.helpers.killed_runs import kill, resume, whole
from tests.helpers.online_runs import keys_of, save_models, train
from tests.helpers.run_directories import differences, left, require_equal
from tests.invariants.test_rollout_ranks import TALK

from taut.errors import UserCodeError


def test_killed_between_forks_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = save_models(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    keys = keys_of(
        "grpo",
        model,
        tmp_path,
        rewards=[],
        steps=4,
        check="quick",
        grpo__advantage="tree",
        rollout__n=4,
        rollout__fork__turns=[1],
        rollout__environment__name=f"{tmp_path / 'talk.py'}:Talk",
        checkpoint__every=1,
        checkpoint__background=False,
        log__tokens__every=1,
    )
    operations = whole(tmp_path / "whole", keys)
    expected, told = left(tmp_path / "whole"), told_of(tmp_path / "whole")
    for event in events(tmp_path / "whole", "rollout"):
        assert event["completions"] == 16
        assert 0.5 < event["fork_distinct"] <= 1
        assert 0.5 < event["fork_new_tokens"] < 1
    for step in events(tmp_path / "whole", "step"):
        assert step["num_tokens"] < step["num_tokens_unshared"]
        assert step["engine/difference"] < 1e-12

    kill(tmp_path / "killed", keys, within(operations, "forward", 3, 0.5))
    resume(tmp_path / "killed", keys)
    require_equal(tmp_path / "killed", expected)
    assert told_of(tmp_path / "killed") == told

    recorded = train(
        {**keys, "out": str(tmp_path / "again"), "rollout.replay_from": str(tmp_path / "whole")}
    )
    assert not differences(left(recorded.out), expected)


def test_what_cannot_be_copied_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = save_models(tmp_path)
    (tmp_path / "talk.py").write_text(
        TALK.replace("self.said = []", "self.said, self.pages = [], (page for page in 'ab')")
    )
    keys = keys_of(
        "grpo",
        model,
        tmp_path,
        rewards=[],
        grpo__advantage="tree",
        rollout__fork__turns=[1],
        rollout__environment__name=f"{tmp_path / 'talk.py'}:Talk",
    )
    with pytest.raises(UserCodeError, match="environment Talk cannot be copied"):
        train(keys)
    assert not Path(keys["out"]).exists()
