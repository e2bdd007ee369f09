"""A roll-out without an engine: the trees a run that generates would train on if its prompts were completions.

The second half of each prompt stands for one answer, and the same tokens reversed for another; one of them gets a good
reward. The trainer's own log-probs stand for the engine's. Scores, advantages and trees are then made as in training.
Checks use it to look at what a step computes before anything is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from taut.data.prompts import PromptRow
from taut.rewards.panel import Verdict
from taut.rewards.verifier import Score
from taut.rl.advantages import Credit, judged_trajectories
from taut.rl.online import numbered
from taut.rl.rollout import POLICY, Asked, Group, scored
from taut.rl.sampler import Trajectory
from taut.train.trainer import Role, Trainer
from taut.types import IntArray, Prompt, Sample, Tree


def rehearsed(
    trainer: Trainer, credit: Credit, roles: Sequence[Role], samples: Sequence[Sample]
) -> list[Tree]:
    """The trees of these prompts. ``roles``: models whose word is taken with the roll-out."""
    groups = [
        _group(sample, credit.good) for sample in samples if _half(sample) < sample.num_tokens
    ]
    paths = judged_trajectories(groups, 0)
    trees = credit.bare(paths)
    asked = Asked(policy=True, values=False, temperature=credit.asked.temperature)
    own = scored(trainer, trees, asked, (), 1)
    paths = [replace(path, logp_N=own[path.name][POLICY]) for path in paths]
    given = credit.trees(paths, scored(trainer, trees, credit.asked, roles, 1))
    return numbered(given.trees)


def _group(sample: Sample, good: float) -> Group:
    """Two answers to the beginning of a prompt."""
    half = _half(sample)
    ends = (sample.ids_T[half:], sample.ids_T[half:][::-1])
    prompt = Prompt(sample.id, sample.ids_T[:half], media=sample.media)
    trajectories = tuple(_trajectory(prompt, end, number) for number, end in enumerate(ends))
    verdicts = tuple(Verdict({"rehearsal": Score(worth)}, worth) for worth in (good, good - 1))
    return Group(trajectories, verdicts)


def _half(sample: Sample) -> int:
    """How many of its tokens are asked: half of them, and all of its pictures."""
    return max((sample.num_tokens + 1) // 2, *(one.stop for one in sample.media), 1)


def _trajectory(prompt: Prompt, end_N: IntArray, index: int) -> Trajectory:
    name, prompt_T = prompt.id, prompt.ids_T
    nothing_N = np.zeros(end_N.size)
    return Trajectory(
        row=PromptRow(name, name, prompt_T, "", (), None, {}),
        index=index,
        ids_T=np.concatenate([prompt_T, end_N]),
        sampled_at_N=np.arange(prompt_T.size, prompt_T.size + end_N.size),
        logp_N=nothing_N,
        version_N=nothing_N.astype(np.int64),
        finish_reason="stop",
        text="",
        media=prompt.media,
    )
