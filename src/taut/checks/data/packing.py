"""The plan of the first epoch and of the first steps, made as training makes it, and compared with what it should be.

An epoch has each sample as often as its weight says. Of a run that generates, prompts are counted, and a rehearsal is
laid out. A step's micro-batches have exactly its samples: ids, positions,
targets, weights and what is said of them, read back along what each token sees; answers that are compared are in one
micro-batch; and none has more tokens than the budget, but for one sample, or answers that are compared, alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.batching import START, Order, StepPlan, lay_out, samples_of, step_plan
from taut.methods.offline import Offline
from taut.rl.online import Online
from taut.types import Packed, Sample, Tree
from taut.vision.placeholders import positions_of

STEPS = 5
"""Steps that are laid out."""
TOKENS = 100_000
"""Tokens of steps that are laid out, the first whole."""
ORDERED = 2_000
"""Steps whose samples are counted."""
SHOWN = 4


def ask(session: Session) -> Finding:
    """Is every sample seen once an epoch, and all of it, with nothing else?"""
    method, last = session.job.method, session.job.num_steps
    assert isinstance(method, Offline | Online)
    wrong = list(_miscounted(session, method.order))
    begun = method.order.origin.step if isinstance(method, Offline) else 0
    plans: list[StepPlan] = []
    for step in range(begun + 1, min(begun + STEPS, last) + 1):
        trees = method.prepare(step) if isinstance(method, Offline) else session.trees
        packs = lay_out(trees, session.job.budget, session.job.policy)
        wrong += [*_misplaced(samples_of(trees), packs), *_parted(trees, packs)]
        wrong += _over(session, trees, packs)
        plans.append(step_plan(step, trees, packs))
        if (
            wrong
            or not isinstance(method, Offline)
            or sum(plan.unshared for plan in plans) > TOKENS
        ):
            break
    if wrong:
        return failed(
            f"the plan is wrong: {wrong[0]}",
            number=len(wrong),
            unit="differences",
            evidence=wrong[:SHOWN],
            remedy="please report this, with the data if they may be shown; batch.share_prefixes=false and "
            "batch.group_prefixes=false may avoid it",
        )
    return passed(_said(plans), sum(plan.computed for plan in plans), "tokens", _notes(plans))


def _miscounted(session: Session, order: Order) -> Iterator[str]:
    """Samples that the first epoch has too often or too rarely."""
    order = replace(order, origin=START)
    whole = order.epoch(0)
    num_steps = min(ORDERED, order.num_steps(1.0))
    stepped = [i for step in range(1, num_steps + 1) for i in order.step(step, 1.0)]
    is_whole = len(stepped) >= order.epoch_size or num_steps < ORDERED
    for indices, least in ((whole, 1), (np.asarray(stepped), int(is_whole))):
        times = np.bincount(indices, minlength=order.weights.size)
        is_wrong = (times > np.ceil(order.weights)) | (times < least * np.floor(order.weights))
        for index in np.flatnonzero(is_wrong)[:SHOWN]:
            first = session.train.rows[index] if session.run.objective.are_compared else index
            name = session.train.sample_id(int(first))
            yield f"{name} is seen {times[index]} times an epoch, its weight is {order.weights[index]:g}"


def _misplaced(samples: Sequence[Sample], packs: Sequence[Packed]) -> Iterator[str]:
    """What is not in a step's micro-batches as it should be."""
    by_id = {sample.id: sample for sample in samples}
    asked = Counter(sample.id for sample in samples)
    found = Counter(name for packed in packs for name in packed.sample_ids)
    for name in sorted((asked - found) | (found - asked)):
        yield f"{name} is {found[name]} times in a step that has it {asked[name]} times"
    for packed in packs:
        for row, name in enumerate(packed.sample_ids):
            if name in by_id:
                yield from _differences(by_id[name], packed, row)


def _differences(sample: Sample, packed: Packed, row: int) -> Iterator[str]:
    """One sample, read back from a micro-batch."""
    reads = packed.read_R[packed.row_R == row]
    read = reads[-1]
    path = (packed.reach_T[: read + 1] > read).nonzero()[:, 0]
    own = packed.row_N == row
    at_R = [sample.num_tokens - 1] if sample.read_at_R is None else sample.read_at_R
    size = int(at_R[-1]) + 1  # what is after the last read says nothing
    numbered = positions_of(sample.num_tokens, sample.media)
    laid_out = packed.position_ids[..., path]
    positions = np.arange(size) if numbered is None else numbered[:, :size]
    parts = {
        "tokens": (packed.ids_T[path], sample.ids_T[:size]),
        "positions": (laid_out, np.broadcast_to(positions, laid_out.shape)),
        "targets": (packed.target_N[own], sample.ids_T[sample.target_at_N]),
        "weights": (packed.weight_N[own], sample.weight_N),
    }
    for part, (found_there, expected) in parts.items():
        if not np.array_equal(found_there.numpy(), expected):
            yield f"{sample.id} has other {part} in its micro-batch"
            return
    pictures = {one.start: one.picture.digest for one in packed.media}
    its = [(int(path[one.start]), one.picture.digest) for one in sample.media if one.start < size]
    if any(pictures.get(start) != digest for start, digest in its):
        yield f"{sample.id} has another picture in its micro-batch"
    if not np.array_equal(packed.predictor_N[own].numpy(), path.numpy()[sample.target_at_N - 1]):
        yield f"{sample.id}: a target is not predicted by the token before it"
    if not np.array_equal(reads.numpy(), path.numpy()[at_R]):
        yield f"{sample.id} is not read at its {'last token' if sample.read_at_R is None else 'steps'}"
    for name, value in sample.values.items():
        found = float(packed.values[name][row])
        if found != value:
            yield f"{sample.id}: its {name} is {found:g} in its micro-batch, {value:g} in the data"
    for name, value_R in sample.read_values.items():
        if not np.array_equal(packed.read_values[name][packed.row_R == row].numpy(), value_R):
            yield f"{sample.id}: its steps have another {name} in its micro-batch"


def _parted(trees: Sequence[Tree], packs: Sequence[Packed]) -> Iterator[str]:
    """Answers that are compared and are not together, as often as they should be."""
    for tree in trees:
        names = {sample.id for sample in tree.samples}
        held = [packed for packed in packs if names & set(packed.sample_ids)]
        if tree.is_atom and any(not names <= set(packed.sample_ids) for packed in held):
            yield f"{tree.samples[0].id} is not in one micro-batch with what it is compared with"
    num_pairs = sum(_num_pairs(tree) for tree in trees)
    found = sum(packed.num_pairs for packed in packs)
    if found != num_pairs:
        yield f"{found} pairs are compared in a step that has {num_pairs}"


def _num_pairs(tree: Tree) -> int:
    """Pairs of a tree's samples of which one is preferred."""
    order = [sample.values.get("preference", 0.0) for sample in tree.samples if sample.group >= 0]
    return sum(left != right for left, right in combinations(order, 2))


def _over(session: Session, trees: Sequence[Tree], packs: Sequence[Packed]) -> Iterator[str]:
    """Micro-batches with more tokens than allowed."""
    atoms = [sorted(sample.id for sample in tree.samples) for tree in trees if tree.is_atom]
    most, one_sample = session.job.budget.tokens_per_microbatch, session.job.budget.one_sample
    for packed in packs:
        if packed.num_samples == 1 or sorted(packed.sample_ids) in atoms:
            continue
        if packed.num_tokens > most or one_sample:
            allowed = "one sample" if one_sample else f"{most:,} tokens"
            yield f"a micro-batch of {packed.num_samples} samples has {packed.num_tokens:,} tokens, of {allowed}"


def _said(plans: Sequence[StepPlan]) -> str:
    batches = sum(plan.num_microbatches for plan in plans)
    return f"computed in {batches:,} micro-batches of the first {len(plans)} steps"


def _notes(plans: Sequence[StepPlan]) -> list[str]:
    padded, unshared, computed = (
        sum(getattr(plan, name) for plan in plans) for name in ("padded", "unshared", "computed")
    )
    if not plans:
        return []
    return [
        f"{padded:,} tokens if padded, {unshared:,} packed, {computed:,} with prefixes shared: "
        f"{1 - computed / padded:.0%} saved"
    ]
