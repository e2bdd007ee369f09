"""Pictures in what is asked whether it ends, and in what a rehearsal is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.helpers.picture_names import illustrated

from taut.evals.settings import StopCheckConfig
from taut.evals.stopping import choose
from taut.rl.online import dry_run_group
from taut.rl.rollout import sample_of
from taut.types import Sample

END = 7


def answered(picture: str) -> Sample:
    """A picture, a question, an answer of two tokens and the end."""
    sample = illustrated("s", [3, (picture, (1, 2, 2)), 4, 5, 6, END])
    return replace(sample, target_at_N=np.array([6, 7, 8]), weight_N=np.ones(3))


def test_prompts_that_differ_in_their_picture_are_two() -> None:
    samples = [answered(name) for name in ("red", "blue", "red")]
    found = choose(samples, [END], StopCheckConfig(), context=None, seed=0)
    assert sorted(asked.prompt.media[0].picture.source for asked in found) == ["blue", "red"]
    for asked in found:
        assert asked.reference is not None
        assert asked.prompt.ids_T.size == 6
        assert asked.prompt.media == asked.reference.media


def test_a_rehearsal_asks_with_all_pictures_and_answers_without() -> None:
    sample = illustrated("s", [3, 4, ("red", (1, 2, 3)), 5, 6])
    group = dry_run_group(sample, 1.0)
    assert group is not None
    first, second = map(sample_of, group.trajectories)
    assert first.ids_T.tolist() == sample.ids_T.tolist()
    assert first.media == second.media == sample.media
    assert first.target_at_N.tolist() == [8, 9]
