"""The micro-batches of a step as training makes them, and what they save: tokens, before anything is computed.

Imported by ``taut.preview`` and by checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taut.data.pack import PackPolicy
from taut.data.plan import Budget, assign, layouts, samples_of
from taut.types import Packed, Tree


@dataclass(frozen=True)
class StepPlan:
    """What a step would compute, over all ranks."""

    step: int
    num_samples: int
    num_targets: int
    padded: int
    """Tokens, were every sample padded to the longest of the step."""
    unshared: int
    """Tokens the samples have."""
    computed: int
    """Tokens computed, prefixes shared where the policy says so."""
    num_microbatches: int


def lay_out(trees: Sequence[Tree], budget: Budget, policy: PackPolicy) -> list[Packed]:
    """The micro-batches of a step's trees, over all ranks."""
    return [
        packed
        for rank in assign(trees, budget)
        for planned in rank
        for packed in layouts(planned, policy, budget.tokens_per_microbatch)
    ]


def step_plan(step: int, trees: Sequence[Tree], packs: Sequence[Packed]) -> StepPlan:
    """The numbers of a step that was laid out."""
    lengths = [sample.num_tokens for sample in samples_of(trees)]
    return StepPlan(
        step=step,
        num_samples=len(lengths),
        num_targets=sum(packed.num_targets for packed in packs),
        padded=len(lengths) * max(lengths),
        unshared=sum(lengths),
        computed=sum(packed.num_tokens for packed in packs),
        num_microbatches=len(packs),
    )
