"""What the trainer's own models say of a roll-out, before it is trained on: log-probs of the policy as it is and of the
reference, values of the critic.

Packed, shared and dealt out to ranks as a training step is, without gradient; every rank learns all of it, by sample.

May import loop and what is below. online.method calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from taut.loop import Job, Role, microbatches_of, padded
from taut.rollout.episode import Episode
from taut.types import FloatArray, Packed, Sample, Scores, Tree, Wants

POLICY, REFERENCE, VALUE = "old_logp_N", "ref_logp_N", "value_R"
T = TypeVar("T")
Said = dict[str, dict[str, FloatArray]]
"""Sample id -> name -> what a model said, [N] or [R]."""


@dataclass(frozen=True)
class Asked:
    """What has to be known of a roll-out before it is trained on."""

    policy: bool
    """The policy's log-probs of what was sampled, as the trainer computes them."""
    values: bool
    """What the critic expects from each state in which a token was chosen."""
    temperature: float
    bootstrap: bool = False
    """Also what the critic expects after the last token of a path that was cut."""

    @property
    def wants(self) -> Wants:
        return Wants(logp=self.policy, scalar=self.values, temperature=self.temperature)


def sample_of(
    episode: Episode, name: str, *, has_reads: bool, has_bootstrap: bool = False
) -> Sample:
    """An episode as a sample: what was sampled is its targets. ``has_reads``: a critic is read before each target.
    ``has_bootstrap``: where the path was cut, also after the last one.
    """
    at_N = episode.sampled_at_N
    sample = Sample(name, episode.ids_T, at_N, np.ones(at_N.size), episode.media)
    if not has_reads:
        return sample
    is_cut = episode.finish_reason == "length"
    after = [episode.ids_T.size - 1] if has_bootstrap and is_cut else []
    return replace(sample, read_at_R=np.concatenate([at_N - 1, after]).astype(np.int64))


def scored(job: Job, trees: Sequence[Tree], asked: Asked, roles: Sequence[Role], step: int) -> Said:
    """What the policy, the critic and ``roles`` say of each sample of these trees."""
    where = f"the roll-out of step {step}"
    found: Said = {s.id: {} for tree in trees for s in tree.samples}
    if not (asked.policy or asked.values or roles):
        return found
    planned = padded(microbatches_of(trees, job), trees, job)
    if asked.policy or asked.values:
        for packed, is_real in planned:
            scores = _attempted(
                job, partial(_quiet, job, packed, asked.wants), packed, trees, where
            )
            if is_real and asked.policy:
                _keep(found, POLICY, packed, scores.logp_N, packed.row_N)
            if is_real and scores.scalar_R is not None:
                _keep(found, VALUE, packed, scores.scalar_R, packed.row_R)
    for role in roles:
        with job.interrupts.held(), role.active(), job.compute():
            for packed, is_real in planned:
                act = partial(role.streams, packed)
                said = _attempted(job, act, packed, trees, where)
                for name, value_N in said.items() if is_real else ():
                    _keep(found, name, packed, value_N, packed.row_N)
    if job.ranks.size == 1:
        return found
    everything: Said = {name: {} for name in found}
    for part in job.ranks.gather(found):
        for name, said in part.items():
            everything[name] |= said
    return everything


def _quiet(job: Job, packed: Packed, wants: Wants) -> Scores:
    """In evaluation mode."""
    was_training = job.scorer.training
    job.scorer.eval()
    try:
        with job.compute():
            scores: Scores = job.scorer(packed, wants=wants)
    finally:
        job.scorer.train(was_training)
    return scores


def _attempted(
    job: Job, act: Callable[[], T], packed: Packed, trees: Sequence[Tree], where: str
) -> T:
    if job.ranks.size == 1:
        job.interrupts.check()
    with torch.no_grad():  # outside the attempt: what fits a forward is not what fits a step
        return job.fit.attempt(act, packed, trees, where)


def _keep(found: Said, name: str, packed: Packed, value: Tensor, row: Tensor) -> None:
    values, rows = value.double().cpu().numpy(), row.numpy()
    for number, sample_id in enumerate(packed.sample_ids):
        found[sample_id][name] = values[rows == number]
