"""Every backend against attention written out with a dense mask, forward and backward, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.helpers.kernel_emulation import flash_on_cpu
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, PreTrainedConfig

from taut.attention import flex, reference, varlen
from taut.attention.layout import Call, Layout, read_call
from taut.errors import AttentionError
from taut.models.attention_backends import select

TREE = np.array([16] * 5 + [13] * 3 + [10] * 2 + [13] * 3 + [16] * 3 + [20] * 4)
FLAT = np.array([7] * 7 + [12] * 5 + [20] * 8)
SINKS = torch.linspace(-1, 1, 4, dtype=torch.float64)
CALLS = {
    "plain": Call(0.3),
    "window": Call(0.3, window=4),
    "window_of_one": Call(0.3, window=1),
    "softcap": Call(0.3, softcap=2.0),
    "sinks": Call(0.3, sinks=SINKS),
    "window_sinks": Call(0.3, window=3, sinks=SINKS),
}


def heads(num_tokens: int, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, num_tokens, 8), (1, 2, num_tokens, 8), (1, 2, num_tokens, 8)]
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [heads.requires_grad_(requires_grad) for heads in drawn]


def dense(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """softmax over a [T, T] matrix, written out."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.mT * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~layout.dense_mask(call.window), -torch.inf)
    total = scores.exp().sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + call.sinks.exp().view(1, -1, 1, 1)
    return scores.exp() / total @ value


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize("reach", [TREE, FLAT], ids=["tree", "flat"])
@pytest.mark.parametrize("call", list(CALLS))
def test_reference_equals_dense(reach: np.ndarray, call: str) -> None:
    layout, inputs = Layout(reach), heads(20)
    ours = reference.attend(*inputs, layout, CALLS[call])
    expected = dense(*inputs, layout, CALLS[call])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    for grad, wanted in zip(gradients(ours, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-13)


def test_long_segments_are_cut_into_query_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "QUERY_CHUNK", 3)
    for call in CALLS.values():
        inputs = heads(20)
        layout = Layout(TREE)
        ours = reference.path_attention(*inputs, layout, call)
        torch.testing.assert_close(ours, dense(*inputs, layout, call), rtol=0, atol=1e-13)


def test_values_of_another_head_size() -> None:
    query, key, value = heads(20)
    layout, inputs = Layout(TREE), [query, key, value[..., :5]]
    ours, expected = (f(*inputs, layout, CALLS["plain"]) for f in (reference.attend, dense))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    wanted = gradients(expected, inputs)
    for grad, other in zip(gradients(ours, inputs), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "config", "name"),
    [
        (torch.bfloat16, LlamaConfig(), "varlen"),
        (torch.float32, LlamaConfig(), "flex"),
        (torch.float64, LlamaConfig(), "reference"),
        (torch.bfloat16, Gemma2Config(), "flex"),
        (torch.bfloat16, DeepseekV3Config(), "flex"),
        (torch.bfloat16, LlamaConfig(hidden_size=48, num_attention_heads=2), "varlen"),
        (torch.bfloat16, LlamaConfig(hidden_size=40, num_attention_heads=2), "flex"),
        (torch.float32, LlamaConfig(hidden_size=32, num_attention_heads=4), "reference"),
    ],
)
def test_what_runs_on_a_gpu(
    dtype: torch.dtype, config: PreTrainedConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert select("auto", torch.device("cuda"), dtype, config).name == name


def test_two_way_blocks() -> None:
    last = np.arange(20)
    last[1:4] = 3
    last[14:16] = 15
    layout, inputs = Layout(TREE, last), heads(20)
    for call in (CALLS["plain"], CALLS["window"]):
        ours = reference.attend(*inputs, layout, call)
        torch.testing.assert_close(ours, dense(*inputs, layout, call), rtol=0, atol=1e-13)


@pytest.mark.parametrize("reach", [TREE, FLAT], ids=["tree", "flat"])
@pytest.mark.parametrize("call", ["plain", "window", "window_of_one"])
def test_varlen_calls_through_the_emulation(reach: np.ndarray, call: str) -> None:
    layout, inputs = Layout(reach), heads(20)
    with flash_on_cpu():
        ours = varlen.attend(*inputs, layout, CALLS[call])
        found = gradients(ours, inputs)
    expected = dense(*inputs, layout, CALLS[call])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    for grad, wanted in zip(found, gradients(expected, inputs), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("call", ["softcap", "sinks"])
def test_varlen_refuses_what_it_cannot_honor(call: str) -> None:
    with pytest.raises(AttentionError, match="set attention=flex"):
        varlen.attend(*heads(20), Layout(FLAT), CALLS[call])


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_forward_equals_dense(call: str) -> None:
    layout, inputs = Layout(TREE), heads(20, requires_grad=False)
    ours = flex.attend(*inputs, layout, CALLS[call])
    torch.testing.assert_close(ours, dense(*inputs, layout, CALLS[call]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_varlen_stays_on_the_device(window: int | None) -> None:
    """On the meta device: nothing is read back, and the gradients are the inputs' own shapes and dtypes."""
    meta = torch.device("meta")
    layout = Layout(TREE, device=meta)
    inputs = [
        torch.empty(x.shape, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for x in heads(20)
    ]
    out = varlen.attend(*inputs, layout, Call(0.3, window=window))
    assert (out.shape, out.dtype, out.device) == (inputs[0].shape, torch.bfloat16, meta)
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, meta)


def test_no_key_is_copied_per_branch() -> None:
    """Two prompts of 8 branches: each prompt's keys are in one entry of one call, which all its branches share."""
    prompt, branch, num_branches = 50, 7, 8
    size = prompt + num_branches * branch
    ends = prompt + branch * np.arange(1, num_branches + 1)
    one = np.concatenate([np.full(prompt, size), ends.repeat(branch)])
    own, below = varlen.kernel_calls(Layout(np.concatenate([one, one + size])), None)
    assert (own.keys, own.starts_k.tolist()[:2]) == (None, [0, prompt + branch])
    assert below.keys is not None
    assert below.keys.tolist() == [*range(prompt), *range(size, size + prompt)]
    assert below.starts_q.tolist() == [0, 7 * branch, 2 * 7 * branch]
    assert (below.max_q, below.max_k, below.is_causal) == (7 * branch, prompt, False)


def test_a_call_for_each_level_of_the_tree() -> None:
    """Every visible pair of a query and a key is in one entry, and no entry holds another pair."""
    levels = []
    for reach in (FLAT, TREE, np.array([30] * 4 + [20] * 3 + [12] * 5 + [20] * 8 + [30] * 10)):
        layout = Layout(reach)
        calls = varlen.entries(layout, None)
        levels.append(len(calls) - 1)
        seen = torch.zeros(reach.size, reach.size, dtype=torch.long)
        for call in calls:
            for queries, keys in zip(call.queries, call.keys, strict=True):
                some = torch.ones(queries.size, keys.size, dtype=torch.long)
                seen[queries[0] : queries[-1] + 1, keys[0] : keys[-1] + 1] += (
                    some.tril() if call.is_causal else some
                )
        assert torch.equal(seen, layout.dense_mask().long())
    assert levels == [0, 2, 2]


def tree_of(num_tokens: int) -> np.ndarray:
    """A prompt and two branches, the first of them cut short."""
    a, b = num_tokens // 3, 2 * num_tokens // 3
    return np.array([num_tokens] * a + [b] * (b - a) + [num_tokens] * (num_tokens - b))


@pytest.mark.parametrize("window", [None, 1, 5, 300])
@pytest.mark.parametrize("num_tokens", [1, 128, 300, 640, 771])
@pytest.mark.parametrize("is_two_way", [False, True])
def test_blocks_from_reach_hold_what_is_visible(
    window: int | None, num_tokens: int, is_two_way: bool
) -> None:
    last = np.arange(num_tokens)
    last[num_tokens // 8 : num_tokens // 4] = num_tokens // 4 - 1
    layout = Layout(tree_of(num_tokens), last if is_two_way else None)
    visible = (
        functional.pad(layout.dense_mask(window), [0, -num_tokens % flex.BLOCK] * 2)
        .unflatten(0, (-1, flex.BLOCK))
        .unflatten(2, (-1, flex.BLOCK))
        .transpose(1, 2)
    )
    found = [lists[0, 0] for lists in flex.blocks(layout, window)]
    for side, (part, full) in enumerate(((0, 2), (4, 6))):
        for row, (blocks, num_part, num_full) in enumerate(
            zip(visible.transpose(0, side), found[part], found[full], strict=True)
        ):
            in_part = set(found[part + 1][row, :num_part].tolist())
            in_full = set(found[full + 1][row, :num_full].tolist())
            assert not in_part & in_full
            assert in_full <= set(blocks.all((1, 2)).nonzero().flatten().tolist())
            assert set(blocks.any(2).any(1).nonzero().flatten().tolist()) <= in_part | in_full


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.slow
def test_flex_is_compiled_per_kind_of_layer_and_never_per_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = CompileCounterWithBackend("eager")
    kernel = flex.compiled(counter)
    monkeypatch.setattr(flex, "_kernel", lambda device_type: kernel)
    counts = []
    for num_tokens in (300, 520, 770, 1025, 400):
        layout, inputs = Layout(tree_of(num_tokens)), heads(num_tokens, requires_grad=False)
        for call in (Call(0.3), Call(0.3, window=50), Call(0.3, window=350), Call(0.3, softcap=2)):
            ours = flex.attend(*inputs, layout, call)
            torch.testing.assert_close(ours, dense(*inputs, layout, call), rtol=0, atol=1e-6)
        counts.append(counter.frame_count)
    assert counts == [3] * 5  # plain, windowed and capped


@pytest.mark.usefixtures("compiles_anew")
def test_a_kernel_that_would_be_compiled_too_often_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "MOST_KINDS", 1)
    kernel = flex.compiled("eager")
    monkeypatch.setattr(flex, "_kernel", lambda device_type: kernel)
    layout, inputs = Layout(TREE), heads(20, requires_grad=False)
    flex.attend(*inputs, layout, CALLS["plain"])
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        flex.attend(*inputs, layout, CALLS["window"])


def test_keywords_are_carried_or_refused() -> None:
    module = nn.Identity()
    call = read_call(
        module, 16, {"scaling": 0.5, "sliding_window": 3, "softcap": None, "position_ids": 1}
    )
    assert (call.scale, call.window, call.softcap) == (0.5, 3, None)
    assert read_call(module, 16, {}).scale == 0.25
    for keywords, named in (
        ({"dropout": 0.1}, "attention_dropout"),
        ({"is_causal": False}, "not causal"),
        ({"alibi_slopes": 1}, "alibi_slopes"),
    ):
        with pytest.raises(AttentionError, match=named):
            read_call(module, 16, keywords)
