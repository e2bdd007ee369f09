"""The parts that attention on the CPU is cut into: each visible pair once, the same numbers however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from taut.attention import reference
from taut.attention.layout import Call, Layout
from taut.attention.reference import Kind, Parts
from taut.types import IntArray

CALL = Call(0.3)
Tree = tuple[int, list["Tree"]]


def reach_of(trees: list[Tree], start: int = 0) -> list[int]:
    """Reach of each token of (length, branches), one tree after the other."""
    reach: list[int] = []
    for length, branches in trees:
        below = reach_of(branches, start + length)
        start += length + len(below)
        reach += [start] * length + below
    return reach


def answers(*lengths: int) -> list[Tree]:
    return [(length, []) for length in lengths]


LAYOUTS: dict[str, list[Tree]] = {
    "equal_trees": [(9, answers(4, 4)), (9, answers(4, 4)), (9, answers(4, 4))],
    "equal_answers": [(6, answers(3, 3, 3, 3))],
    "pack": answers(9, 4, 9, 4, 4, 9, 1, 40, 9),
    "one": answers(70),
    "mixture": [
        (9, answers(4, 4)),
        (5, [(3, answers(2, 5, 2)), (3, answers(2, 5, 2)), (1, [])]),
        (9, answers(4, 4)),
        (23, [(11, [(7, answers(1, 30))]), (1, []), (1, []), (8, answers(3, 3))]),
        *answers(1, 4, 4, 17),
    ],
}


@pytest.fixture(params=LAYOUTS)
def reach(request: pytest.FixtureRequest) -> IntArray:
    return np.array(reach_of(LAYOUTS[request.param]))


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and chunks so short that every kind of part occurs."""
    monkeypatch.setattr(reference, "RUN", 16)
    monkeypatch.setattr(reference, "CHUNK", 4)
    monkeypatch.setattr(reference, "LONG_CHUNK", 6)
    monkeypatch.setattr(reference, "ROWS", 2)


def ranges(part: Parts) -> list[tuple[range, range]]:
    """Queries and keys of each part."""
    starts = [
        (part.query + index * part.query_step, part.key + index * part.key_step)
        for index in range(part.num_parts)
    ]
    return [
        (range(query, query + part.num_queries), range(key, key + part.num_keys))
        for query, key in starts
    ]


@pytest.mark.usefixtures("small_cuts")
def test_each_visible_pair_is_in_one_part(reach: IntArray) -> None:
    layout = Layout(reach)
    seen = torch.zeros(reach.size, reach.size, dtype=torch.long)
    written_queries, written_keys = np.zeros(reach.size), np.zeros(reach.size)
    for part, mask in reference.kernel_calls(layout, torch.float64):
        for queries, keys in ranges(part):
            pairs = torch.ones(len(queries), len(keys), dtype=torch.bool)
            if mask is not None:
                pairs = mask == 0
            elif part.kind is not Kind.OTHER:
                pairs = pairs.tril()
            seen[queries.start : queries.stop, keys.start : keys.stop] += pairs
            if part.kind is not Kind.OTHER:
                written_queries[queries.start : queries.stop] += 1
            if part.kind is Kind.LAST:
                written_keys[keys.start : keys.stop] += 1
    assert torch.equal(seen, layout.dense_mask().long())
    assert (written_queries == 1).all() and (written_keys == 1).all()
    kinds = [part.kind.value for part in reference.parts(layout, is_cut=True)]
    assert kinds == sorted(kinds), "what is written comes before what is added to it"


def drawn(num_tokens: int, num_key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, num_tokens, heads, 8) for heads in (4, num_key_heads, num_key_heads)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).transpose(1, 2)
        for shape in shapes
    ]


def results(layout: Layout, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of weighted outputs."""
    leaves = [heads.detach().requires_grad_() for heads in inputs]
    query, key, value = leaves
    out = reference.attend(query, key, value, layout, CALL)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_equal_single_parts(
    reach: IntArray, num_key_heads: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, threads = drawn(reach.size, num_key_heads), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        batched = results(Layout(reach), inputs)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(reference, "NEAR", 1)  # a part has no neighbors: each is a call of its own
    assert {part.num_parts for part in reference.parts(Layout(reach), is_cut=True)} == {1}
    for ours, single in zip(batched, results(Layout(reach), inputs), strict=True):
        torch.testing.assert_close(ours, single, rtol=0, atol=1e-12)
    monkeypatch.undo()  # and uncut
    for ours, uncut in zip(batched, results(Layout(reach), inputs), strict=True):
        torch.testing.assert_close(ours, uncut, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("kind", ["last of each", "every fifth", "none"])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_last_layer_leaves_out_queries_that_nobody_reads(
    reach: IntArray, kind: str, *, is_narrow: bool
) -> None:
    """Outputs that are read, and every gradient, are those of the whole layer."""
    last = [segment.stop - 1 for segment in Layout(reach).segments if segment.stop == segment.reach]
    chosen = {"last of each": last, "every fifth": range(3, reach.size, 5), "none": []}[kind]
    read = torch.tensor(list(chosen), dtype=torch.long)
    whole = Layout(reach, rows_read=read.numpy())
    layouts = (whole, whole.of_last_layer)
    inputs = drawn(reach.size, 2)
    if is_narrow:
        inputs = [heads.bfloat16() for heads in inputs]
    found = []
    for layout in layouts:
        leaves = [heads.detach().requires_grad_() for heads in inputs]
        out = reference.attend(*leaves, layout, CALL)[:, :, read]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    tolerance = {"rtol": 0.05, "atol": 0.05} if is_narrow else {"rtol": 0, "atol": 1e-12}
    for every, some in zip(*found, strict=True):
        torch.testing.assert_close(every, some, **tolerance)
    counts = [
        sum(part.num_parts * part.num_queries for part in reference.parts(layout, is_cut=True))
        for layout in layouts
    ]
    assert counts[1] < counts[0] or kind == "every fifth"


def test_equal_trees_are_one_batch() -> None:
    counts = [
        part.num_parts
        for part in reference.parts(Layout(np.array(reach_of(LAYOUTS["equal_trees"]))), is_cut=True)
    ]
    assert counts == [
        3,
        3,
        3,
    ]  # prompt with its first answer; second answer; second answer on prompt


def test_calls_are_derived_once_for_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[Layout] = []
    parts = reference.parts

    def recorded(layout: Layout, *, is_cut: bool) -> list[Parts]:
        derived.append(layout)
        return parts(layout, is_cut=is_cut)

    monkeypatch.setattr(reference, "parts", recorded)
    layout = Layout(np.array(reach_of(LAYOUTS["mixture"])))
    for _ in range(3):
        results(layout, drawn(layout.num_tokens, 2))
    assert derived == [layout]


def test_heads_at_any_strides() -> None:
    layout = Layout(np.array(reach_of(LAYOUTS["mixture"])))
    inputs = drawn(layout.num_tokens, 2)
    strided = [heads.mT.contiguous().mT for heads in inputs]
    assert strided[0].stride(-1) != 1
    for ours, expected in zip(results(layout, strided), results(layout, inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("small_cuts")
def test_sixteen_bits_are_not_cut(reach: IntArray) -> None:
    layout = Layout(reach)
    whole, cut = (reference.parts(layout, is_cut=is_cut) for is_cut in (False, True))
    assert Kind.CHUNK not in {part.kind for part in whole}
    assert len(whole) <= len(cut)
    found = results(layout, [heads.bfloat16() for heads in drawn(layout.num_tokens, 2)])
    expected = results(layout, [heads.bfloat16().double() for heads in drawn(layout.num_tokens, 2)])
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05)
