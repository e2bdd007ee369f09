"""Which samples each step has: the same whatever came before, each as often as its weight says, at any size."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from taut.data import large_epoch
from taut.data import order as order_module
from taut.data.batching import Rows
from taut.data.large_epoch import keyed_permutation
from taut.data.order import Cursor, Order
from taut.data.settings import BatchConfig
from taut.types import IntArray


def order(num_samples: int = 23, per_step: int = 5, **changes: object) -> Order:
    fields = {"counts": (num_samples,), "weights": (1.0,), "seed": 3, "samples_per_step": per_step}
    return Order(**fields | changes)  # type: ignore[arg-type]


class TestOrder:
    def test_every_step_is_full_and_epochs_follow_without_a_gap(self) -> None:
        one = order()
        steps = [one.step(step) for step in range(1, 24)]
        assert {len(step) for step in steps} == {5}
        flat = [index for step in steps for index in step]
        epochs = [flat[start : start + 23] for start in range(0, 5 * 23, 23)]
        assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 5, "reshuffled in each epoch"

    def test_a_step_larger_than_the_data_goes_round_them(self) -> None:
        assert Counter(order(3, 8).step(1)).most_common()[-1][1] >= 2
        assert len(order(3, 8).step(1)) == 8

    def test_only_the_last_step_of_an_epochs_run_is_smaller(self) -> None:
        one = order()
        assert one.num_steps(1.0) == 5
        sizes = [len(one.step(step, 1.0)) for step in range(1, 6)]
        assert sizes == [5, 5, 5, 5, 3]
        assert sorted(i for step in range(1, 6) for i in one.step(step, 1.0)) == list(range(23))
        assert [len(one.step(step, 2.0)) for step in range(1, one.num_steps(2.0) + 1)] == [
            5
        ] * 9 + [1]
        assert one.num_steps(0.5) == 3
        assert sum(len(one.step(step, 0.5)) for step in range(1, 4)) == round(0.5 * 23)

    @pytest.mark.parametrize("epochs", [0.01, 0.1, 0.405, 0.5, 1.0, 1.3, 2.5, 3.0])
    def test_no_step_of_an_epochs_run_is_empty(self, epochs: float) -> None:
        one = order(10, 4)
        sizes = [len(one.step(step, epochs)) for step in range(1, one.num_steps(epochs) + 1)]
        assert min(sizes) >= 1
        assert set(sizes[:-1]) <= {4}

    def test_access_at_random_equals_access_in_sequence(self) -> None:
        sequence = [order().step(step) for step in range(1, 30)]
        one = order()
        for step in np.random.default_rng(0).permutation(29):
            assert one.step(int(step) + 1) == sequence[step]
        assert order(seed=4).step(1) != sequence[0]

    def test_without_shuffling_it_is_the_order_of_the_file(self) -> None:
        one = order(7, 3, is_shuffled=False)
        assert [i for step in range(1, 6) for i in one.step(step)] == [*range(7), *range(7), 0]

    def test_fractions_of_a_source_are_chosen_anew(self) -> None:
        one = order(counts=(10, 6), weights=(0.5, 1.5))
        assert one.epoch_size == 5 + 9
        epochs = [Counter(one.epoch(epoch).tolist()) for epoch in range(6)]
        for epoch in epochs:
            assert sum(epoch[i] for i in range(10)) == 5
            assert max(epoch[i] for i in range(10)) == 1
            assert sorted(epoch[i] for i in range(10, 16)) == [1, 1, 1, 2, 2, 2]
        assert len({tuple(sorted(epoch.elements())) for epoch in epochs}) > 1

    def test_groups_stay_together_and_the_shuffle_moves_them(self) -> None:
        groups = np.repeat(np.arange(6), 4)
        one = order(24, 8, groups=groups)
        epochs = [one.epoch(epoch) for epoch in range(3)]
        for epoch in epochs:
            assert sorted(epoch.tolist()) == list(range(24))
            assert (np.diff(groups[epoch]) != 0).sum() == 5
        assert len({tuple(groups[epoch]) for epoch in epochs}) > 1
        assert len({tuple(epoch) for epoch in epochs}) > 1
        for step in range(1, 4):
            assert len(set(groups[one.step(step)])) == 2, "two whole documents a step"

    def test_a_document_is_cut_only_where_no_whole_one_fits_the_step(self) -> None:
        sizes = np.random.default_rng(0).integers(1, 12, 60)
        groups = np.repeat(np.arange(60), sizes)
        one = order(groups.size, 10, groups=groups)
        for epoch in range(3):
            flat = groups[one.epoch(epoch)]
            starts = np.flatnonzero(np.diff(flat, prepend=-1))
            assert starts.size == 60, "every document is one run"
            offset = epoch * groups.size
            for index, start in enumerate(starts.tolist()):
                room = 10 - (offset + start) % 10
                size = int(sizes[flat[start]])
                later = sizes[flat[starts[index + 1 :]]]
                assert size <= room or size > 10 or not (later <= room).any()

    def test_grouping_is_not_silently_dropped_in_the_order_of_the_file(self) -> None:
        with pytest.raises(
            ValueError, match=r"group_prefixes=true with shuffle=false: .*; expected one of the two"
        ):
            BatchConfig(group_prefixes=True, shuffle=False)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 5), st.integers(1, 12))
    def test_any_step_is_the_slice_of_the_endless_run(
        self, num_samples: int, per_step: int, seed: int, step: int
    ) -> None:
        one = order(num_samples, per_step, seed=seed)
        endless = np.concatenate([one.epoch(e) for e in range(step * per_step // num_samples + 1)])
        assert one.step(step) == endless[(step - 1) * per_step : step * per_step].tolist()


def test_a_run_that_is_made_longer_goes_on_where_its_samples_ended() -> None:
    """Ten samples, four a step: the first epoch ends on a step of two."""
    order = Order((10,), (1.0,), seed=3, samples_per_step=4)
    assert order.cursor(2, 1.0) == Cursor(2, 8)
    assert order.cursor(3, 1.0) == Cursor(3, 10)
    longer = order.continue_from(Cursor(3, 10), 2.0)
    assert longer.num_steps(2.0) == 3 + 3
    again = [index for step in range(4, 7) for index in longer.step(step, 2.0)]
    assert again == order.epoch(1).tolist()
    assert longer.cursor(4, 2.0) == Cursor(4, 14)
    resumed = order.continue_from(Cursor(4, 14), 2.0)
    assert [resumed.step(step, 2.0) for step in (5, 6)] == [longer.step(s, 2.0) for s in (5, 6)]
    end = longer.cursor(6, 2.0)
    assert end == Cursor(6, 20)
    assert order.continue_from(end, 2.0).num_steps(2.0) == 6, "at its end it is at its end"
    assert order.continue_from(Cursor(2, 8), 2.0) is order, "whole steps need no new origin"
    assert order.continue_from(Cursor(3, 12), None) is order


EPOCHS = {
    "one source": ((23,), (1.0,), 3, True, 0, "64157c7e62776e3f"),
    "fractions": ((10, 6), (0.5, 1.5), 3, True, 0, "6a850a264b5efb0e"),
    "several sources": ((7, 5, 11, 4), (1.0, 2.25, 1.0, 0.3), 11, True, 0, "35f5c9cfcf678edc"),
    "not shuffled": ((7, 5, 11, 4), (1.0, 2.25, 1.0, 0.3), 11, False, 0, "79bf2c355331618c"),
    "groups": ((12, 12), (1.0, 1.5), 5, True, 4, "84903802562459ac"),
}


@pytest.mark.parametrize("name", EPOCHS)
def test_the_order_of_data_of_ordinary_size_never_changes(name: str) -> None:
    """The digests of the first four epochs, written down when each sample had a weight of its own."""
    counts, weights, seed, is_shuffled, per_group, digest = EPOCHS[name]
    groups = np.arange(sum(counts)) // per_group if per_group else None
    one = Order(counts, weights, seed, 5, is_shuffled, groups)
    flat = np.concatenate([one.epoch(epoch) for epoch in range(4)])
    assert hashlib.sha256(flat.astype("<i8").tobytes()).hexdigest()[:16] == digest


# -- data of any size


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large, with blocks of 8 samples and windows of 4 blocks."""
    monkeypatch.setattr(order_module, "MOST_IN_ARRAYS", 0)
    monkeypatch.setattr(large_epoch, "BLOCK", 8)
    monkeypatch.setattr(large_epoch, "WINDOW", 4)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5_000), st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_a_keyed_permutation_has_each_number_once(size: int, key: list[int]) -> None:
    found = keyed_permutation(np.arange(size), size, key)
    assert sorted(found.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [12, 40, 200])
def test_every_number_is_as_likely_at_every_position(size: int) -> None:
    """Chi-square of position and number over many keys: its mean is the degrees of freedom, its variance twice that."""
    num_keys = 400
    found = np.stack(
        [keyed_permutation(np.arange(size), size, [7, key]) for key in range(num_keys)]
    )
    table = np.stack([np.bincount(found[:, at], minlength=size) for at in range(size)])
    expected = num_keys / size
    chi_square = float(((table - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_neighbors_are_as_far_apart_as_at_random() -> None:
    size = 20_000
    found = keyed_permutation(np.arange(size), size, [3])
    apart = np.abs(np.diff(found)) / size
    assert apart.mean() == pytest.approx(1 / 3, abs=0.01)
    assert (apart < 0.001).mean() == pytest.approx(0.002, abs=0.001)


@pytest.mark.usefixtures("_large")
class TestLarge:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 700), st.integers(0, 5), st.booleans())
    def test_an_epoch_has_each_sample_once(self, size: int, seed: int, is_shuffled: bool) -> None:
        one = order(size, seed=seed, is_shuffled=is_shuffled)
        assert one.is_large
        assert sorted(one.epoch(seed).tolist()) == list(range(size))

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 90), st.sampled_from([0.3, 0.5, 1.0, 1.7, 3.0])),
            min_size=1,
            max_size=6,
        ),
        st.booleans(),
    )
    def test_an_epoch_of_a_mixture_has_each_sample_as_its_weight_says(
        self,
        sources: list[tuple[int, float]],
        is_shuffled: bool,
    ) -> None:
        counts, weights = map(tuple, zip(*sources, strict=True))
        one = order(counts=counts, weights=weights, is_shuffled=is_shuffled)
        assume(one.epoch_size)  # data of which an epoch has nothing are refused when they are read
        per_sample = np.repeat(weights, counts)
        wanted = {w: round(float((per_sample == w).sum()) * w) for w in set(weights)}
        assert one.epoch_size == sum(wanted.values())
        for epoch in range(2):
            times = np.bincount(one.epoch(epoch), minlength=per_sample.size)
            assert {w: times[per_sample == w].sum() for w in wanted} == wanted
            least = np.floor(per_sample)
            assert ((times >= least) & (times <= np.ceil(per_sample))).all()

    def test_without_shuffling_it_is_the_order_of_the_files(self) -> None:
        one = order(7, 3, is_shuffled=False)
        assert [i for step in range(1, 6) for i in one.step(step)] == [*range(7), *range(7), 0]
        one = order(counts=(9, 20, 6), weights=(1.5, 0.3, 1.5), is_shuffled=False)
        epochs = [one.epoch(epoch) for epoch in range(3)]
        assert all((np.diff(epoch) >= 0).all() for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3, "fractions are drawn again"

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 30), st.booleans())
    def test_any_step_is_the_slice_of_the_endless_run(
        self,
        num_samples: int,
        per_step: int,
        step: int,
        is_shuffled: bool,
    ) -> None:
        counts = (num_samples, 40)
        one = order(0, per_step, counts=counts, weights=(1.0, 1.7), is_shuffled=is_shuffled)
        num_epochs = step * per_step // one.epoch_size + 1
        endless = np.concatenate([one.epoch(epoch) for epoch in range(num_epochs)])
        assert one.step(step) == endless[(step - 1) * per_step : step * per_step].tolist()

    def test_a_step_has_the_mixture_s_shares(self) -> None:
        one = order(0, 64, counts=(1_000, 3_000, 500), weights=(1.0, 0.5, 4.0))
        shares = np.array([1_000, 1_500, 2_000]) / one.epoch_size
        seen = np.zeros(3)
        for step in range(1, one.epoch_size // 64):
            source = np.searchsorted([1_000, 4_000], one.step(step), side="right")
            seen += np.bincount(source, minlength=3)
            assert np.abs(seen - shares * 64 * step).max() < 2

    def test_seeds_and_epochs_have_other_orders_and_neighbors_come_apart(self) -> None:
        one = order(2_000)
        epochs = [one.epoch(0), one.epoch(1), order(2_000, seed=4).epoch(0)]
        assert all((a == b).mean() < 0.01 for a, b in pairwise(epochs))
        assert all((np.diff(epoch) == 1).mean() < 0.1 for epoch in epochs)

    def test_a_stretch_of_steps_reads_few_blocks(self) -> None:
        one = order(20_000, 8)
        for first in range(1, 2_000, 200):
            stretch = np.concatenate([one.step(step) for step in range(first, first + 4)])
            assert len(set((stretch // 8).tolist())) <= 4 * 2 * 2, "two windows, turned blocks"

    def test_a_resumed_run_goes_on_where_it_ended(self) -> None:
        one = order(103, 10)
        end = one.cursor(one.num_steps(1.5), 1.5)
        assert end == Cursor(16, round(1.5 * 103))
        longer = one.continue_from(end, 3.0)
        seen = [i for step in range(1, 17) for i in one.step(step, 1.5)]
        seen += [i for step in range(17, longer.num_steps(3.0) + 1) for i in longer.step(step, 3.0)]
        assert Counter(seen) == dict.fromkeys(range(103), 3)

    def test_sizes_beyond_any_memory(self) -> None:
        one = order(0, 512, counts=(3 * 10**12, 10**11), weights=(1.0, 2.5))
        steps: list[IntArray] = [np.array(one.step(step)) for step in (1, 10**6, 6 * 10**9)]
        assert all(step.size == 512 and step.min() >= 0 for step in steps)
        assert max(step.max() for step in steps) < 31 * 10**11

    def test_groups_are_refused_by_name(self) -> None:
        part = SimpleNamespace(num_samples=12, weight=1.0)
        rows = Rows(SimpleNamespace(parts=(part,)))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"group_prefixes=true, and data.train has 12 samples"):
            rows.order(BatchConfig(group_prefixes=True), 0, 4)


class TestTokensPerStep:
    """Steps that end by tokens."""

    lengths = np.array([3, 1, 4, 1, 5, 9, 2, 6])

    def made(self, most: int, **changes: object) -> Order:
        limit = order_module.TokenLimit(most, self.lengths)
        return order(8, 1, tokens=limit, **changes)

    def test_a_step_takes_samples_as_long_as_they_fit(self) -> None:
        """3 1 4 1 | 5 | 9 | 2 6 within 9 tokens, as 6 + 3 > 9; 3 1 4 1 | 5 | 9 2 | 6 3 1 within 11."""
        one = self.made(9, is_shuffled=False)
        assert [one.step(step) for step in (1, 2, 3, 4)] == [[0, 1, 2, 3], [4], [5], [6, 7]]
        assert self.made(11, is_shuffled=False).step(4) == [7, 0, 1]
        assert one.num_steps(1.0) == 4

    def test_a_sample_beyond_the_limit_is_a_step_of_its_own(self) -> None:
        one = self.made(1, is_shuffled=False)
        assert [one.step(step) for step in (1, 2)] == [[0], [1]]
        assert one.num_steps(1.0) == 8

    @pytest.mark.parametrize("most", [1, 5, 9, 10, 31, 32, 100])
    @pytest.mark.parametrize("epochs", [0.5, 1.0, 2.6])
    def test_every_sample_is_in_one_step_and_a_resume_goes_on(
        self, most: int, epochs: float
    ) -> None:
        one = self.made(most)
        num_steps = one.num_steps(epochs)
        steps = [one.step(step, epochs) for step in range(1, num_steps + 1)]
        flat = [index for step in steps for index in step]
        endless = [index for number in range(4) for index in one.epoch(number).tolist()]
        assert flat == endless[: round(8 * epochs)]
        assert all(self.lengths[step].sum() <= most or len(step) == 1 for step in steps)
        tokens = [self.lengths[step].sum() for step in steps]
        firsts = [self.lengths[step[0]] for step in steps[1:]]
        assert all(own + first > most for own, first in zip(tokens, firsts, strict=False))
        for done in range(num_steps):
            again = self.made(most).continue_from(one.cursor(done, epochs), epochs)
            assert again.step(done + 1, epochs) == steps[done]

    def test_a_run_that_was_extended_begins_where_it_ended(self) -> None:
        one = self.made(9)
        cursor = one.cursor(one.num_steps(0.5), 0.5)
        more = self.made(9).continue_from(cursor, 1.0)
        last = more.num_steps(1.0)
        flat = [i for step in range(cursor.step + 1, last + 1) for i in more.step(step, 1.0)]
        assert flat == one.epoch(0).tolist()[cursor.samples :]
