"""Samples as micro-batches: whether a step computes what it should, read back from what is laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from taut.checks.registry import Finding, check, failed, passed
from taut.checks.session import Session
from taut.data.batching import Budget, StepPlan, lay_out, samples_of, step_plan
from taut.data.order import START
from taut.methods.sources import Offline, Streamed
from taut.rl.online import Online
from taut.types import IntArray, Packed, Sample, Tree
from taut.vision.placeholders import positions_of


@check("data.packing", after=["model.trains"])
def every_sample_is_seen_once_and_whole(session: Session) -> Finding:
    """Is every sample seen once an epoch, and all of it, with nothing else?

    The plan of the first epoch and of the first steps, made as training makes it. If the run generates, prompts are
    counted and a dry run is laid out.

    An epoch has each sample as often as its weight says, the first window of a stream once; of data too large for an
    array over their samples, this is asked of the first steps. A step's micro-batches have exactly its samples: ids,
    positions, targets, weights and values, read back along what each token sees. Compared answers are in one
    micro-batch. None has more tokens than the budget, except for one sample, or one row of compared answers, alone.
    """
    source, last = session.trainer.source, session.trainer.num_steps
    assert isinstance(source, Offline | Online | Streamed)
    wrong: list[str] = []
    # the first epoch has each sample as often as its weight says
    counts, weights, seen = _first_epoch(source)
    ends = np.cumsum(counts)
    for indices, is_all in seen:
        # the samples among the indices, or all samples, and how often each is there
        index_S, times_S = np.unique(indices, return_counts=True)
        if is_all:
            index_S = np.arange(sum(counts))
            times_S = np.bincount(indices, minlength=index_S.size)
        weight_S = np.array(weights)[np.searchsorted(ends, index_S, side="right")]
        is_wrong_S = (times_S > np.ceil(weight_S)) | (is_all & (times_S < np.floor(weight_S)))
        for at in np.flatnonzero(is_wrong_S)[:4].tolist():
            index = int(index_S[at])
            first = session.train.row(index).start if session.run.compares_answers else index
            name = session.train.sample_id(first)
            wrong.append(
                f"{name} is seen {times_S[at]} times an epoch, its weight is {weight_S[at]:g}"
            )
    # the first steps, laid out as training lays them out
    begin = source.order.origin.step + 1 if isinstance(source, Offline) else 1
    plans: list[StepPlan] = []
    for step in range(begin, min(begin + 4, last) + 1):
        if isinstance(source, Streamed) and not source.is_known(step):
            break
        trees = session.trees if isinstance(source, Online) else source.prepare(step)
        packs = lay_out(trees, session.trainer.budget, session.trainer.policy)
        wrong += _wrong_in_step(trees, packs, session.trainer.budget)
        plans.append(step_plan(step, trees, packs))
        num_planned = sum(plan.unshared for plan in plans)
        if wrong or isinstance(source, Online) or num_planned > 100_000:
            break
    if wrong:
        return failed(
            f"the plan is wrong: {wrong[0]}",
            measured=(wrong, "differences"),
            remedy="please report this, with the data if they may be shown; batch.share_prefixes=false and "
            "batch.group_prefixes=false may avoid it",
        )
    padded, unshared, computed, num_microbatches = (
        sum(getattr(plan, name) for plan in plans)
        for name in ("padded", "unshared", "computed", "num_microbatches")
    )
    notes = []
    if plans:
        notes.append(
            f"{padded:,} tokens if padded, {unshared:,} packed, {computed:,} with prefixes shared: "
            f"{1 - computed / padded:.0%} saved"
        )
    says = f"computed in {num_microbatches:,} micro-batches of the first {len(plans)} steps"
    return passed(says, computed, "tokens", notes)


def _first_epoch(
    source: Offline | Online | Streamed,
) -> tuple[Sequence[int], Sequence[float], list[tuple[IntArray, bool]]]:
    """The samples of each source, how often an epoch has each, and the indices of the first epoch or its first steps,
    with whether they are all. The first window of a stream has each sample once.
    """
    if isinstance(source, Streamed):
        size = source.stream.windows[0]["size"]
        _, indices = source.stream.at(0, size, source.seed)
        return (size,), (1.0,), [(np.asarray(indices), True)]
    order = replace(source.order, origin=START)
    most_counted = 2_000
    num_steps = min(most_counted, order.num_steps(1.0))
    stepped = [index for step in range(1, num_steps + 1) for index in order.step(step, 1.0)]
    is_whole = len(stepped) >= order.epoch_size or num_steps < most_counted
    seen = [(np.asarray(stepped), is_whole)]
    if not order.is_large:
        seen.append((order.epoch(0), True))
    return order.counts, order.weights, seen


def _wrong_in_step(trees: Sequence[Tree], packs: Sequence[Packed], budget: Budget) -> Iterator[str]:
    """Differences between a step's micro-batches and its samples."""
    # every sample is there as often as in the step
    samples = samples_of(trees)
    by_id = {sample.id: sample for sample in samples}
    expected = Counter(sample.id for sample in samples)
    actual = Counter(name for packed in packs for name in packed.sample_ids)
    for name in sorted((expected - actual) | (actual - expected)):
        yield f"{name} is {actual[name]} times in a step that has it {expected[name]} times"
    for packed in packs:
        for row, name in enumerate(packed.sample_ids):
            if name in by_id:
                yield from _wrong_in_pack(by_id[name], packed, row)
    # what is compared is in one micro-batch, pair by pair
    num_pairs, atoms = 0, list[list[str]]()
    for tree in trees:
        names = {sample.id for sample in tree.samples}
        holders = [packed for packed in packs if names & set(packed.sample_ids)]
        if tree.is_atom and any(not names <= set(packed.sample_ids) for packed in holders):
            yield f"{tree.samples[0].id} is not in one micro-batch with what it is compared with"
        ranks = [s.values.get("preference", 0.0) for s in tree.samples if s.group >= 0]
        num_pairs += sum(left != right for left, right in combinations(ranks, 2))
        atoms += [sorted(sample.id for sample in tree.samples)] if tree.is_atom else []
    num_compared = sum(packed.num_pairs for packed in packs)
    if num_compared != num_pairs:
        yield f"{num_compared} pairs are compared in a step that has {num_pairs}"
    for packed in packs:
        if packed.num_samples == 1 or sorted(packed.sample_ids) in atoms:
            continue
        if packed.num_tokens > budget.tokens_per_microbatch or budget.one_sample:
            most = f"{budget.tokens_per_microbatch:,} tokens"
            allowed = "one sample" if budget.one_sample else most
            yield f"a micro-batch of {packed.num_samples} samples has {packed.num_tokens:,} tokens, of {allowed}"


def _wrong_in_pack(sample: Sample, packed: Packed, row: int) -> Iterator[str]:
    """One sample, read back from a micro-batch."""
    reads = packed.read_R[packed.row_R == row]
    last_read = reads[-1]
    # the tokens that the last read sees are the sample
    path = (packed.reach_T[: last_read + 1] > last_read).nonzero()[:, 0]
    is_own = packed.row_N == row
    at_R = [sample.num_tokens - 1] if sample.read_at_R is None else sample.read_at_R
    size = int(at_R[-1]) + 1  # nothing depends on tokens after the last read
    numbered = positions_of(sample.num_tokens, sample.media)
    positions = packed.position_ids[..., path]
    expected_positions = np.arange(size) if numbered is None else numbered[:, :size]
    parts = {
        "tokens": (packed.ids_T[path], sample.ids_T[:size]),
        "positions": (positions, np.broadcast_to(expected_positions, positions.shape)),
        "targets": (packed.target_N[is_own], sample.ids_T[sample.target_at_N]),
        "weights": (packed.weight_N[is_own], sample.weight_N),
    }
    for part, (actual, expected) in parts.items():
        if not np.array_equal(actual.numpy(), expected):
            yield f"{sample.id} has other {part} in its micro-batch"
            return
    # pictures
    digests = {media.start: media.picture.digest for media in packed.media}
    for media in sample.media:
        if media.start < size and digests.get(int(path[media.start])) != media.picture.digest:
            yield f"{sample.id} has another picture in its micro-batch"
            break
    # targets and reads at their places
    predictors = path.numpy()[sample.target_at_N - 1]
    if not np.array_equal(packed.predictor_N[is_own].numpy(), predictors):
        yield f"{sample.id}: a target is not predicted by the token before it"
    if not np.array_equal(reads.numpy(), path.numpy()[at_R]):
        where = "last token" if sample.read_at_R is None else "steps"
        yield f"{sample.id} is not read at its {where}"
    # values of the sample and of its reads
    for name, value in sample.values.items():
        packed_value = float(packed.values[name][row])
        if packed_value != value:
            yield f"{sample.id}: its {name} is {packed_value:g} in its micro-batch, {value:g} in the data"
    for name, value_R in sample.read_values.items():
        if not np.array_equal(packed.read_values[name][packed.row_R == row].numpy(), value_R):
            yield f"{sample.id}: its steps have another {name} in its micro-batch"
