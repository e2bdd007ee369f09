"""Completions are as if alone, whatever is attended in one call; those that end leave few places behind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers.kernel_emulation import flash_on_cpu
from torch import Tensor, nn

from taut.attention import decode as decoding
from taut.attention.decode import Decoding, Group, Own, Stretch, stack
from taut.attention.layout import Call

LAYER = nn.Identity()
CALL = Call(scale=0.5)
ENDS = (1, 9, 2, 9, 9, 9, 4, 9, 9, 3)
"""After which step each of ten completions ends: five of one prompt, five of another."""


def stretches(lengths: tuple[int, ...], random: torch.Generator) -> list[Stretch]:
    num_tokens = sum(lengths)
    key, value = torch.randn(2, 1, 2, num_tokens, 4, dtype=torch.float64, generator=random)
    spans = list(pairwise(accumulate(lengths, initial=0)))
    return stack({LAYER: (key, value)}, spans, [0] * len(lengths))


def decode(
    groups: list[Group], rows: list[int], tokens: list[Tensor], call: Call = CALL
) -> list[Tensor]:
    """What attention gives each completion ([steps, heads, K]), and the groups as they are left."""
    found: list[list[Tensor]] = [[] for _ in ENDS]
    for step, token in enumerate(tokens, start=1):
        if not rows:
            break
        query, key, value = (x[:, rows].unsqueeze(0) for x in token.split([4, 2, 2]))
        step_of_all = Decoding([group for group in groups if group.num_rows])
        out = step_of_all.attend(LAYER, query, key, value, call)
        for at, row in enumerate(rows):
            found[row].append(out[0, :, at])
        is_live = [ENDS[row] != step for row in rows]
        step_of_all.advance(is_live)
        rows = [row for row, stays in zip(rows, is_live, strict=True) if stays]
    return [torch.stack(some) if some else torch.empty(0) for some in found]


@pytest.fixture(params=["the CPU's kernel", "a GPU's kernel"])
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a step runs through where nothing is hidden."""
    if request.param == "a GPU's kernel":
        monkeypatch.setattr(decoding, "has_flash", lambda query: True)
    with flash_on_cpu():
        yield


@pytest.mark.usefixtures("flash")
def test_the_others_are_as_if_alone_and_few_places_are_kept_for_the_ended() -> None:
    random = torch.Generator().manual_seed(0)
    paths = [(stretch,) for stretch in stretches((6, 3), random)]
    tokens = [torch.randn(8, 10, 4, dtype=torch.float64, generator=random) for _ in range(9)]
    own = Own(9)
    for _ in paths:
        assert own.takes(9)
        own.join(5)
    groups = [Group(path, size, own, 5) for path, size in zip(paths, (6, 3), strict=True)]
    found = decode(groups, list(range(10)), tokens)
    assert [len(some) for some in found] == list(ENDS)
    assert (own.num_places, own.length) == (7, 9)
    assert not own.takes(9)
    for row, some in enumerate(found):
        alone = Own(9)
        alone.join(1)
        path, size = ((paths[0], 6), (paths[1], 3))[row // 5]
        expected = decode([Group(path, size, alone, 1)], [row], tokens)[row]
        torch.testing.assert_close(some, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("window", [None, 17, 6, 3])
def test_prompts_of_similar_lengths_are_attended_as_if_each_were_alone(window: int | None) -> None:
    """Three completions with a prompt each; then three prompts of three, three and one completions in one stack."""
    random = torch.Generator().manual_seed(1)
    tokens = [torch.randn(8, 10, 4, dtype=torch.float64, generator=random) for _ in range(9)]
    singles = [single for size in (21, 20, 19) for single in stretches((size,), random)]
    shared = stretches((12, 11, 13), random)
    prompts = [*singles, *[shared[0]] * 3, *[shared[1]] * 3, shared[2]]
    kept = [prompt.keys_values(LAYER) for prompt in prompts]
    with_prompts, others = Own(9), Own(9)
    for single in singles:
        assert not with_prompts.prompts or with_prompts.takes(9, single)
        with_prompts.join_alone(single, 9)
    assert not with_prompts.takes(9, stretches((11,), random)[0])
    groups = [Group((), single.length, with_prompts, 1) for single in singles]
    for stretch, num_rows in zip(shared, (3, 3, 1), strict=True):
        others.join(num_rows)
        groups.append(Group((stretch,), stretch.length, others, num_rows))
    found = decode(groups, list(range(10)), tokens, Call(scale=0.5, window=window))
    for row, ((key, value), some) in enumerate(zip(kept, found, strict=True)):
        for step, out in enumerate(some):
            query, new_key, new_value = torch.stack(tokens[: step + 1], 2)[:, row].split([4, 2, 2])
            seen = slice(-window if window else None, None)
            keys, values = torch.cat([key, new_key], 1)[:, seen], torch.cat([value, new_value], 1)
            scores = query[:, -1:] @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.5
            expected = scores.softmax(-1) @ values[:, seen].repeat_interleave(2, 0)
            torch.testing.assert_close(out, expected[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_hidden", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_part_is_exact_in_autocast(has_hidden: bool, softcap: float | None) -> None:
    """The scores and their log-sum-exp are in float32, whatever the context."""
    random = torch.Generator().manual_seed(3)
    shapes = [(2, 4, 3, 64), (2, 4, 200, 64), (2, 4, 200, 64)]
    query, key, value = (
        torch.randn(shape, generator=random).to(torch.bfloat16) for shape in shapes
    )
    hidden = torch.zeros(2, 1, 1, 200)
    if has_hidden:
        hidden[1, ..., :17] = -torch.inf
    call = Call(scale=0.4, softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = decoding._explicit(
            query, key, value, call, hidden.to(query.dtype) if has_hidden else None
        )
    scores = query.double() @ key.double().mT * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + hidden
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ value.double(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("has_hidden", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_device_gives_a_log_sum_exp_in_float32(
    monkeypatch: pytest.MonkeyPatch, has_hidden: bool, dtype: torch.dtype
) -> None:
    """On the meta device, through both ways: keys are not widened, and nothing leaves the device."""
    draw = partial(torch.empty, dtype=dtype, device="meta")
    query, kept = draw(3, 2, 4, 64), draw(5, 2, 90, 64)
    keys, hidden = kept[1:4, :, 7:80], draw(3, 1, 1, 73) if has_hidden else None
    for is_flash in (True, False):
        monkeypatch.setattr(decoding, "has_flash", lambda query, it=is_flash: it)
        out, lse = decoding._part(query, keys, keys, CALL, hidden)
        assert (out.shape, out.dtype, out.device.type) == ((3, 2, 4, 64), dtype, "meta")
        assert (lse.shape, lse.dtype, lse.device.type) == ((3, 2, 4), torch.float32, "meta")


def test_flash_is_for_16_bit_and_new_enough_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Query(NamedTuple):
        shape: tuple[int, ...]
        dtype: torch.dtype
        device: torch.device

    def takes(size: int, dtype: torch.dtype, device: str = "cuda") -> bool:
        query: Any = Query((1, 2, 3, size), dtype, torch.device(device))
        return decoding.has_flash(query)

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert takes(128, torch.bfloat16)
    assert takes(256, torch.float16)
    assert not takes(128, torch.float32)
    assert not takes(288, torch.bfloat16)
    assert not takes(100, torch.bfloat16)
    assert not takes(128, torch.bfloat16, "cpu")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert not takes(128, torch.bfloat16)


def test_a_stack_frees_what_nobody_sees_once_it_is_half() -> None:
    some = stretches((5, 4, 6, 6), torch.Generator().manual_seed(2))
    before = [[x.clone() for x in stretch.keys_values(LAYER)] for stretch in some]
    some[0].stack.keep(some[1:])
    assert some[0].stack.num_places == 4
    some[0].stack.keep([some[3], some[1]])
    assert some[0].stack.num_places == some[0].stack.kept[LAYER][0].shape[0] == 2
    for number in (1, 3):
        assert all(map(torch.equal, some[number].keys_values(LAYER), before[number]))
