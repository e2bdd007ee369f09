"""The plan: which samples a step has, and how they are divided; pure functions, always within the budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.tiny_samples import sample

from taut.data.batching import (
    Budget,
    CostModel,
    Line,
    Microbatch,
    assign,
    layouts,
    prefix_groups,
    samples_of,
)
from taut.data.packing import PackPolicy, num_distinct_tokens
from taut.types import Sample, Tree

COST = CostModel(per_token=6e6, per_pair=1e4, per_target=2e6)


def chats(num_samples: int, seed: int) -> list[Sample]:
    """Skewed lengths: log-normal, median 150, tail to 2,048; no common prefixes; the last third is learned."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(2048, np.exp(random.normal(np.log(150), 1.0, num_samples)).astype(int) + 4)
    return [
        sample(f"c{i}", random.integers(0, 8000, n).tolist(), n - n // 3)
        for i, n in enumerate(lengths)
    ]


def cost_of(trees: Microbatch, budget: Budget) -> float:
    """Predicted cost of trees that are laid out together."""
    line = Line([Tree(tuple(samples_of(trees)))], budget)
    return sum(tree.cost for tree in line.trees)


def imbalance(ranks: Sequence[Sequence[Microbatch]], budget: Budget) -> float:
    """Largest predicted cost of a rank, divided by the mean."""
    costs = [sum(cost_of(trees, budget) for trees in rank) for rank in ranks]
    return max(costs) / (sum(costs) / len(costs))


def trees_of(samples: Sequence[Sample]) -> list[Tree]:
    return [Tree((s,)) for s in samples]


def planned(trees: Sequence[Tree], budget: Budget) -> list[list[list[Sample]]]:
    """The samples of each rank's micro-batches."""
    return [[samples_of(microbatch) for microbatch in rank] for rank in assign(trees, budget)]


def ids_of(ranks: Sequence[Sequence[Sequence[Sample]]]) -> list[str]:
    return [s.id for rank in ranks for some in rank for s in some]


class TestGroups:
    def documents(self, system: int, document: int, questions: int = 4) -> list[Sample]:
        random = np.random.default_rng(0)
        head = random.integers(0, 90, system).tolist()
        samples = []
        for d in range(5):
            text = head + random.integers(0, 90, document).tolist()
            samples += [
                sample(f"{d}.{q}", text + random.integers(0, 90, 6).tolist(), len(text))
                for q in range(questions)
            ]
        return samples

    def test_documents_are_groups_below_a_common_system_prompt(self) -> None:
        for system in (0, 20, 200):
            groups = prefix_groups(self.documents(system, 100), 64)
            assert [len(set(groups[d * 4 : d * 4 + 4])) for d in range(5)] == [1] * 5
            assert len(set(groups)) == 5

    def test_short_prefixes_make_no_group(self) -> None:
        assert len(set(prefix_groups(self.documents(0, 30), 64))) == 20

    def test_groups_survive_shuffled_rows(self) -> None:
        samples = self.documents(50, 100)
        shuffled = np.random.default_rng(1).permutation(len(samples))
        groups = prefix_groups([samples[i] for i in shuffled], 64)
        for d in range(5):
            assert len(set(groups[shuffled // 4 == d])) == 1

    def test_one_sample_is_one_group(self) -> None:
        assert prefix_groups(self.documents(0, 100)[:1], 64).tolist() == [0]


class TestAssign:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=30), min_size=1, max_size=14),
        st.integers(4, 60),
        st.integers(1, 3),
    )
    def test_every_sample_once_within_the_budget(
        self, rows: list[list[int]], tokens: int, num_ranks: int
    ) -> None:
        samples = [sample(f"s{i}", row) for i, row in enumerate(rows)]
        budget = Budget(tokens, num_ranks, COST, min_saved_tokens=4)
        ranks = assign(trees_of(samples), budget)
        assert len(ranks) == num_ranks
        assert sorted(s.id for rank in ranks for some in rank for s in samples_of(some)) == sorted(
            s.id for s in samples
        )
        for planned_one in (some for rank in ranks for some in rank):
            some = samples_of(planned_one)
            size = num_distinct_tokens(some, PackPolicy(True, 4))
            assert size <= tokens or len(some) == 1
            (shared,) = layouts(planned_one, PackPolicy(True, 4), tokens)
            assert shared.num_tokens == size
            for packed in layouts(planned_one, PackPolicy(False), tokens):
                assert packed.num_tokens <= tokens or packed.num_samples == 1

    def test_it_is_a_pure_function(self) -> None:
        trees, budget = trees_of(chats(40, 0)), Budget(1024, 2, COST)
        assert [[[s.id for s in some] for some in rank] for rank in planned(trees, budget)] == [
            [[s.id for s in some] for some in rank] for rank in planned(trees, budget)
        ]

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_atoms_are_never_split(self, num_ranks: int) -> None:
        pairs = [
            Tree(
                (sample(f"{i}+", [i, 1, 2, 3, 4]), sample(f"{i}-", [i, 5, 6, 7, 8, 9])),
                is_atom=True,
            )
            for i in range(9)
        ]
        for budget in (Budget(3, num_ranks, COST, 1), Budget(25, num_ranks, COST, 1)):
            ranks = planned(pairs, budget)
            assert len(ids_of(ranks)) == 18
            for some in (some for rank in ranks for some in rank):
                names = Counter(s.id[:-1] for s in some)
                assert set(names.values()) == {2}
                assert len(names) == 1 or num_distinct_tokens(some, PackPolicy(True, 1)) <= 25
        assert min(len(rank) for rank in ranks) >= 1

    def test_atoms_and_a_pool_together(self) -> None:
        pair = Tree((sample("p+", [1, 2, 3]), sample("p-", [1, 2, 4])), is_atom=True)
        ranks = planned([pair, *trees_of(chats(8, 1))], Budget(512, 2, COST))
        home = [rank for rank in ranks if any(s.id == "p+" for some in rank for s in some)]
        assert any({"p+", "p-"} <= {s.id for s in some} for some in home[0])
        assert len(ids_of(ranks)) == 10

    def test_a_sample_over_the_budget_has_a_microbatch_of_its_own(self) -> None:
        samples = [sample("long", list(range(90)))] + [
            sample(str(i), [100 + i, 1, 2]) for i in range(5)
        ]
        (rank,) = planned(trees_of(samples), Budget(10, 1, COST))
        assert ("long",) in [tuple(s.id for s in some) for some in rank]

    def test_a_larger_group_is_cut_between_samples(self) -> None:
        document = list(range(50))
        samples = [sample(f"q{i}", [*document, 60 + i, *range(9)], 50) for i in range(8)]
        (rank,) = planned([Tree(tuple(samples))], Budget(85, 1, COST))
        assert sorted(ids_of([rank])) == [f"q{i}" for i in range(8)]
        assert [len(some) for some in rank] == [2, 2, 2, 2] or max(map(len, rank)) == 3
        for some in rank:
            assert num_distinct_tokens(some, PackPolicy()) <= 85
        assert num_distinct_tokens(samples, PackPolicy()) > 85

    def test_common_prefixes_of_different_trees_are_found(self) -> None:
        document = list(range(50))
        samples = [sample(f"q{i}", [*document, 60 + i, 1, 2], 50) for i in range(8)]
        noise = [sample(f"n{i}", [100 + i] * 40) for i in range(8)]
        mixed = [s for pair in zip(samples, noise, strict=True) for s in pair]
        (rank,) = planned(trees_of(mixed), Budget(80, 1, COST))
        assert {s.id for some in rank if any(s.id == "q0" for s in some) for s in some} >= {
            f"q{i}" for i in range(8)
        }

    @pytest.mark.parametrize("num_ranks", [2, 4])
    @pytest.mark.parametrize("seed", range(6))
    def test_ranks_are_balanced_on_skewed_chats(self, num_ranks: int, seed: int) -> None:
        budget = Budget(8192, num_ranks, COST)
        ranks = assign(trees_of(chats(64, seed)), budget)
        assert imbalance(ranks, budget) <= 1.1

    def test_ranks_are_balanced_on_documents_too(self) -> None:
        """One document's questions are cut where that is what balance takes."""
        document = list(range(300))
        samples = [sample(f"q{i}", [*document, 400 + i, *range(60)], 300) for i in range(16)]
        budget = Budget(8192, 2, COST)
        ranks = assign(trees_of(samples), budget)
        assert imbalance(ranks, budget) <= 1.1

    def test_one_sample_mode(self) -> None:
        samples = [sample(f"q{i}", [1] * 30 + [i]) for i in range(5)]
        ranks = planned(trees_of(samples), Budget(8192, 2, COST, one_sample=True))
        assert {len(some) for rank in ranks for some in rank} == {1}
        assert sorted(ids_of(ranks)) == [f"q{i}" for i in range(5)]

    def test_more_ranks_than_samples_leave_a_rank_without(self) -> None:
        ranks = planned(trees_of([sample("a", [1, 2, 3])]), Budget(10, 3, COST))
        assert sorted(map(len, ranks)) == [0, 0, 1]


def test_sharing_is_one_layout_and_off_stays_in_the_budget() -> None:
    document = list(range(50))
    samples = [sample(f"q{i}", [*document, 60 + i, 1], 50) for i in range(6)]
    shared = layouts((Tree(tuple(samples)),), PackPolicy(), 70)
    apart = layouts((Tree(tuple(samples)),), PackPolicy(False), 110)
    assert [packed.num_tokens for packed in shared] == [50 + 6 * 2]
    assert [packed.num_tokens for packed in apart] == [104, 104, 104]
    assert sorted(i for packed in apart for i in packed.sample_ids) == [s.id for s in samples]


def test_an_atom_stays_in_one_layout_with_sharing_off() -> None:
    pair = Tree((sample("p+", [1] * 30 + [2]), sample("p-", [1] * 30 + [3])), is_atom=True)
    others = Tree((sample("a", [4] * 30), sample("b", [5] * 30)))
    found = [packed.sample_ids for packed in layouts((others, pair), PackPolicy(False), 40)]
    assert sorted(found) == [("a",), ("b",), ("p+", "p-")]


class TestScale:
    """Time and quality of plans, with wide margins; ``benchmarks/scale.py`` measures them."""

    def measured(self, trees: Sequence[Tree], budget: Budget) -> tuple[float, float]:
        """The fullest rank and the lockstep of a plan (the sum over micro-batches of the slowest rank), over an even
        division without repeated prefixes, or over the largest sample where that is more.
        """
        samples = samples_of(trees)
        whole = cost_of(tuple(trees), budget) / budget.num_ranks
        ideal = max(whole, *(cost_of((Tree((s,)),), budget) for s in samples))
        costs = [[cost_of(some, budget) for some in rank] for rank in assign(trees, budget)]
        rounds = range(max(map(len, costs)))
        slowest = [max(rank[k] for rank in costs if k < len(rank)) for k in rounds]
        return max(map(sum, costs)) / ideal, sum(slowest) / ideal

    def trajectory(self, turns: int) -> list[Tree]:
        """Each turn repeats the history without what was thought in it."""
        random = np.random.default_rng(0)
        history, samples = random.integers(0, 8000, 100).tolist(), []
        for turn in range(turns):
            thought, answer = (random.integers(0, 8000, size).tolist() for size in (6, 30))
            ids = [*history, *thought, *answer]
            samples.append(sample(f"turn {turn}", ids, len(history)))
            history += answer
        return [Tree(tuple(samples))]

    @pytest.mark.parametrize("tokens", [7_000, 14_000])
    def test_a_rewritten_history_is_cut_in_few_places(self, tokens: int) -> None:
        _, lockstep = self.measured(self.trajectory(200), Budget(tokens, 8, COST))
        assert lockstep <= 1.3

    @pytest.mark.parametrize("num_ranks", [8, 32])
    def test_ranks_hardly_wait_for_each_other_in_groups_of_answers(self, num_ranks: int) -> None:
        random = np.random.default_rng(0)
        trees = []
        for group in range(64):
            prompt = random.integers(0, 8000, 64).tolist()
            lengths = np.clip(random.lognormal(5, 0.7, 16), 8, 1024).astype(int)
            answers = [prompt + random.integers(0, 8000, length).tolist() for length in lengths]
            some = [sample(f"{group}#{i}", answer, 64) for i, answer in enumerate(answers)]
            trees.append(Tree(tuple(some)))
        fullest, lockstep = self.measured(trees, Budget(2048, num_ranks, COST))
        assert lockstep <= 1.1 * fullest
        assert lockstep <= 1.2

    def test_eight_times_the_ranks_and_samples_take_about_eight_times_as_long(self) -> None:
        """A scan of all ranks for each sample takes 64 times as long."""

        def seconds(num_ranks: int) -> float:
            trees, budget = trees_of(chats(8 * num_ranks, 0)), Budget(4096, num_ranks, COST)
            taken = []
            for _ in range(3):
                begin = time.process_time()
                assign(trees, budget)
                taken.append(time.process_time() - begin)
            return min(taken)

        assert seconds(512) <= 24 * seconds(64)

    def test_twice_the_turns_take_about_twice_as_long(self) -> None:
        """Their tokens are four times as many. One cut at a time takes 8 times as many sorts of these."""

        def seconds(turns: int) -> float:
            trees, taken = self.trajectory(turns), []
            for _ in range(3):
                begin = time.process_time()
                assign(trees, Budget(turns * 35, 8, COST))
                taken.append(time.process_time() - begin)
            return min(taken)

        assert seconds(160) <= 8 * seconds(80)

    def test_without_trees_ranks_have_nothing(self) -> None:
        assert assign([], Budget(10, 3, COST)) == [[], [], []]
        assert assign([], Budget(10, 1, COST)) == [[]]
