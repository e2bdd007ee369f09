"""Rows of a data set as trees: alone or compared, with targets or without, and prompts with each other's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tests.helpers.picture_names import illustrated

from taut.data.batching import Rows
from taut.data.dataset import Dataset
from taut.types import Sample, Tree


def answer(name: str, prompt: list[int], reply: list[int], **values: float) -> Sample:
    at_N = np.arange(len(prompt), len(prompt) + len(reply))
    return Sample(name, np.array(prompt + reply), at_N, np.full(at_N.size, 0.5), values=values)


A = answer("a", [1, 2, 3], [10, 11], label=1.0)
B = answer("b", [4], [20, 21, 22], label=0.0)
C = answer("c", [5, 6], [30], label=1.0)


class Data(list[Sample]):
    """Samples, and which of them are one row: two, then one, then two."""

    num_groups = 3

    def row(self, index: int) -> range:
        return (range(2), range(2, 3), range(3, 5))[index]

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, slice) or index >= 0
        return super().__getitem__(index)


def rows_of(*samples: Sample, **options: bool) -> Rows:
    return Rows(cast(Dataset, Data(samples)), **options)


def shown(tree: Tree) -> tuple[str, list[int], list[int], dict[str, float]]:
    (sample,) = tree.samples
    return sample.id, sample.ids_T.tolist(), sample.target_at_N.tolist(), dict(sample.values)


def test_mismatched_by_hand() -> None:
    """1 2 3 | 10 11    4 | 20 21 22    5 6 | 30: each prompt with the next one's answer, the last with the first's."""
    trees = rows_of(A, B, C).mismatched([0, 1, 2], 100)
    assert [shown(tree) for tree in trees] == [
        ("a with the answer of b", [1, 2, 3, 20, 21, 22], [3, 4, 5], {"label": 1.0}),
        ("b with the answer of c", [4, 30], [1], {"label": 0.0}),
        ("c with the answer of a", [5, 6, 10, 11], [2, 3], {"label": 1.0}),
    ]
    assert not any(tree.is_atom for tree in trees)
    assert all((tree.samples[0].weight_N == 1.0).all() for tree in trees)


@pytest.mark.parametrize(("length", "left"), [(5, [20, 21]), (4, [20]), (3, [20]), (1, [20])])
def test_mismatched_is_cut_and_keeps_one_target(length: int, left: list[int]) -> None:
    first, _ = rows_of(A, B).mismatched([0, 1], length)
    assert first.samples[0].ids_T.tolist() == [1, 2, 3, *left]
    assert first.samples[0].num_targets == len(left)


def test_mismatched_has_the_pictures_of_both() -> None:
    """Prompt and answer bring theirs; those of a question in the midst of an answer are no targets, and never cut."""
    one = illustrated("one", [1, ("a", (1, 1, 2)), 2, 3, 4])
    one = replace(one, target_at_N=np.array([5]), weight_N=np.ones(1))
    asked = [("b", (1, 1, 2)), 5, 6, 7, ("c", (1, 1, 3)), 8]
    other = illustrated("other", asked)  # type: ignore[arg-type]
    other = replace(other, target_at_N=np.array([3, 8]), weight_N=np.ones(2))
    first, second = (tree.samples[0] for tree in rows_of(one, other).mismatched([0, 1], 99))
    assert first.ids_T.tolist() == [1, 9, 9, 2, 3, 6, 7, 9, 9, 9, 8]
    assert first.target_at_N.tolist() == [5, 6, 10]
    assert [(it.picture.source, it.start, it.stop) for it in first.media] == [
        ("a", 1, 3),
        ("c", 7, 10),
    ]
    assert second.ids_T.tolist() == [9, 9, 5, 4]
    assert [(it.picture.source, it.start, it.stop) for it in second.media] == [("b", 0, 2)]
    for most in (8, 9):
        cut = rows_of(one, other).mismatched([0, 1], most)[0].samples[0]
        assert cut.ids_T.tolist() == [1, 9, 9, 2, 3, 6, 7]
        assert [it.picture.source for it in cut.media] == ["a"]


def test_mismatched_follows_the_step_and_one_alone_takes_the_next_of_the_data() -> None:
    rows = rows_of(A, B, C)
    names = [tree.samples[0].id for tree in rows.mismatched([2, 0], 9)]
    assert names == ["c with the answer of a", "a with the answer of c"]
    assert rows.mismatched([1], 9)[0].samples[0].id == "b with the answer of c"
    assert rows.mismatched([2], 9)[0].samples[0].id == "c with the answer of a"


def test_a_sample_twice_in_a_step_is_never_given_its_own_answer() -> None:
    names = [tree.samples[0].id for tree in rows_of(A, B, C).mismatched([1, 0, 0, 1], 9)]
    assert names == [f"{one} with the answer of {other}" for one, other in ("ba", "ab", "ab", "bc")]


def test_answers_of_a_row_are_an_atom_and_groups_are_numbered_by_step() -> None:
    five = [answer(name, [7], [8, 9]) for name in "abcde"]
    rows = rows_of(*five, are_answers=True)
    assert len(rows) == 3
    trees = rows.trees([2, 0, 2])
    assert [[(s.id, s.group) for s in tree.samples] for tree in trees] == [
        [("d", 0), ("e", 0)],
        [("a", 1), ("b", 1)],
        [("d", 2), ("e", 2)],
    ]
    assert all(tree.is_atom for tree in trees)
    assert five[3].group == -1, "the data are as they were"


def test_samples_that_are_not_compared_are_trees_of_their_own() -> None:
    rows = rows_of(A, B, C, A, B)
    assert len(rows) == 5
    trees = rows.trees([4, 1])
    assert [tree.samples for tree in trees] == [(B,), (B,)]
    assert [tree.is_atom for tree in trees] == [False, False]


def test_without_targets_nothing_is_predicted() -> None:
    read = replace(A, streams={"ref_logp_N": np.zeros(2)})
    (tree,) = rows_of(read, has_targets=False).trees([0])
    sample = tree.samples[0]
    assert (sample.num_targets, sample.weight_N.size, dict(sample.streams)) == (0, 0, {})
    assert sample.ids_T is A.ids_T
    assert sample.values == {"label": 1.0}


def test_prefix_groups_are_those_of_the_first_answers() -> None:
    long = list(range(20))
    samples = [answer(name, [*long, index], [8]) for index, name in enumerate("abcde")]
    samples[2] = answer("c", [50], [8])
    groups = rows_of(*samples, are_answers=True).prefix_groups(10)
    assert groups[0] == groups[2] != groups[1]
