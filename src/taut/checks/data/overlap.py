"""Held-out samples against the training data: equal ones, and those most of whose 13-grams of tokens occur in it.

Equal is also what differs in case and white space only (``texts.py``). Equal tokens are sought in all of the training
data, 13-grams in a bounded part. Grams that many training samples have (a system prompt, what the template writes) say
nothing and are left out.

Some equal samples are a warning: what is measured on them is not what unseen data would give. Similar ones are counted:
questions about one passage are similar by nature.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from taut.checks.data.records import Flat, flat
from taut.checks.data.seen import HASH, Hashes, seen_of
from taut.checks.data.texts import texts
from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.session import Session
from taut.data.dataset import Dataset
from taut.run.config import Run
from taut.types import IntArray

GRAM = 13
EVAL_TOKENS = 200_000
EVAL_SAMPLES = 2_000
TRAIN_TOKENS = 1_000_000
COMPARED = 20_000
"""Training samples that are compared id by id, at most."""
COMMON = 0.05
"""A gram in a larger share of training samples, and in more than three, is what they all begin with."""
LEAKED = 0.01
"""A larger share of equal samples is a warning."""
SHOWN = 4


def ask(session: Session) -> Finding:
    """Is held-out data not what is trained on, where it chooses the model?"""
    if session.eval is None:
        return skipped("there is no data.eval")
    look = flat(session.eval, EVAL_TOKENS, EVAL_SAMPLES)
    num_samples = look.index_S.size
    is_equal = equal_samples(session.train, look) | equal_rows(session, look)
    num_equal, unit = int(is_equal.sum()), f"of {num_samples:,} eval samples"
    chosen_by = measured_on_eval(session.run)
    names = [look.name(int(number)) for number in np.flatnonzero(is_equal)[:SHOWN]]
    if chosen_by and 2 * num_equal > num_samples:
        return failed(
            f"{num_equal:,} of {num_samples:,} eval samples are in data.train, and {chosen_by} of them chooses the "
            "model to keep",
            number=num_equal,
            unit=unit,
            evidence=names,
            remedy="hold out rows that are not trained on, or unset eval.best",
        )
    similar = is_equal | similar_samples(flat(session.train, TRAIN_TOKENS), look)
    said = f"{num_equal:,} equal, {int(similar.sum()):,} mostly in data.train{look.looked_at}"
    if num_equal > LEAKED * num_samples:
        return warned(
            f"{num_equal:,} of {num_samples:,} eval samples are in data.train{look.looked_at}",
            number=num_equal,
            unit=unit,
            evidence=names,
            remedy="hold out rows that are not trained on: what is measured on these says nothing of new ones",
            notes=[said],
        )
    return passed(said, float(similar.sum()), unit)


def measured_on_eval(run: Run) -> str | None:
    """The metric on data.eval that chooses the model to keep; None: there is none, or it is measured elsewhere."""
    best = run.eval.best
    return best if best == "loss" or run.eval.answers.data is None else None


def equal_rows(session: Session, look: Flat) -> NDArray[np.bool_]:
    """Which samples are of rows that are in the training data but for case and white space."""
    looked = session.once(texts)
    is_known = np.isin(looked["eval"].normal_S, looked["train"].normal_S)
    known = {looked["eval"].places[number] for number in np.flatnonzero(is_known)}
    return np.array([look.data.row_place(int(index)) in known for index in look.index_S])


def equal_samples(train: Dataset, look: Flat) -> NDArray[np.bool_]:
    """Which samples are in ``train``, id for id, with the same pictures."""
    lengths_S = np.diff(look.start_S)
    keys_S = _probes(look.ids_T, look.start_S[:-1], lengths_S)
    wanted: dict[bytes, list[int]] = {}
    for number, (start, stop) in enumerate(zip(look.start_S, look.start_S[1:], strict=False)):
        wanted.setdefault(look.seen_T[start:stop].tobytes(), []).append(number)
    is_equal = np.zeros(lengths_S.size, dtype=bool)
    for index in _candidates(train, np.unique(lengths_S), np.unique(keys_S)):
        is_equal[wanted.pop(seen_of(train[index]).tobytes(), [])] = True
        if not wanted:
            break
    return is_equal


def _candidates(train: Dataset, lengths: IntArray, keys: Hashes) -> list[int]:
    """Training samples of one of these lengths that have the same tokens in a few places."""
    found: list[int] = []
    first = 0
    for part in train.parts:
        offsets = np.asarray(part.entry.arrays["offsets"])
        own = np.diff(offsets)
        of_length = np.flatnonzero(np.isin(own, lengths))
        probed = _probes(part.entry.arrays["ids"], offsets[:-1][of_length], own[of_length])
        found += (of_length[np.isin(probed, keys)] + first).tolist()
        first += own.size
    return found[:COMPARED]


def _probes(ids_T: NDArray[np.int32], starts: IntArray, lengths: IntArray) -> Hashes:
    """A number for each sample, from its length and eight of its tokens."""
    key = lengths.astype(np.uint64)
    for part in range(8):
        key = key * HASH + np.asarray(ids_T[starts + (lengths - 1) * part // 7]).astype(np.uint64)
    return key


def similar_samples(train: Flat, look: Flat) -> NDArray[np.bool_]:
    """Samples of whose grams at least half occur in ``train``."""
    (hash_G, sample_G), (theirs, their_sample) = _grams(look), _grams(train)
    known, inverse_G = np.unique(hash_G, return_inverse=True)
    if not known.size or not theirs.size:
        return np.zeros(look.index_S.size, dtype=bool)
    at = _places(theirs, known)
    hits = np.unique(np.stack([at, their_sample])[:, at >= 0], axis=1)
    times = np.bincount(hits[0], minlength=known.size)
    is_common = times > max(3, COMMON * train.index_S.size)
    own_G = ~is_common[inverse_G]
    own = np.bincount(sample_G[own_G], minlength=look.index_S.size)
    in_train = np.bincount(sample_G[own_G & (times[inverse_G] > 0)], minlength=look.index_S.size)
    return (own > 0) & (2 * in_train >= own)


def _places(hashes: Hashes, known: Hashes) -> IntArray:
    """Where each hash is in ``known`` (sorted); -1 where it is not."""
    low = np.uint64(2**20 - 1)
    may_be = np.zeros(2**20, dtype=bool)
    may_be[(known >> np.uint64(40)) & low] = True
    places = np.full(hashes.size, -1)
    maybe = np.flatnonzero(may_be[(hashes >> np.uint64(40)) & low])
    found = np.minimum(np.searchsorted(known, hashes[maybe]), known.size - 1)
    is_there = known[found] == hashes[maybe]
    places[maybe[is_there]] = found[is_there]
    return places


def _grams(look: Flat) -> tuple[Hashes, IntArray]:
    """A hash of every run of GRAM tokens inside a sample, and the sample's number."""
    size = max(0, look.ids_T.size - GRAM + 1)
    ids, hashes = look.seen_T, np.zeros(size, dtype=np.uint64)
    for offset in range(GRAM):
        hashes *= HASH
        hashes += ids[offset : offset + size]
    sample_T = look.sample_T
    is_inside = sample_T[:size] == sample_T[GRAM - 1 :]
    return hashes[is_inside] * HASH, sample_T[:size][is_inside]
