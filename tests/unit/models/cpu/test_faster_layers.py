"""Faster forms of norms, rotations, the last layer and vision towers: which layers have them, and that numbers stay the
same.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from tests.helpers.tiny_models import CARRIED, tiny_model
from tests.helpers.tiny_samples import nested_family, sample
from tests.helpers.vision_models import EVERY, vision_model
from tests.helpers.vision_samples import Drawn, Seeing
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from taut.attention.layout import Layout
from taut.data.packing import PackPolicy, pack
from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.cpu import faster_layers
from taut.models.precision import Wide
from taut.models.recompute import recompute_activations
from taut.models.scorer import Scorer
from taut.types import Packed
from taut.vision import tower

PLAIN_NORMS = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "granite", "phi3", "qwen2_moe")
"""Their norms compute w * x / rms(x) and nothing else; Gemma's add one to w, for one."""


def faster(model: nn.Module, name: str) -> list[str]:
    """Modules whose class has this name's end and whose forward was replaced."""
    return [
        path
        for path, module in model.named_modules()
        if type(module).__name__.endswith(name) and "forward" in vars(module)
    ]


def packed_family() -> Packed:
    """Three answers to one prompt, and samples with targets in shared prefixes."""
    prompt = list(range(40))
    answers = [sample(f"answer {n}", [*prompt, n, 50 + n, 60 + n], 40) for n in range(3)]
    return pack([*answers, *nested_family(97)], PackPolicy(min_saved_tokens=1))


@pytest.mark.parametrize("name", PLAIN_NORMS)
def test_norms_and_rotations_of_common_families_are_replaced(name: str) -> None:
    model = tiny_model(name, attention=PREFIX + "reference")
    norms = [path for path, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]
    assert faster(model, "RMSNorm") == norms
    assert len(faster(model, "Attention")) == 2
    has_gates = name not in (
        "qwen3_moe",
        "phi3",
    )  # experts in one tensor; both halves in one product
    assert len(faster(model, "MLP")) == (2 if has_gates else 0)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_norm_that_computes_something_else_is_left_alone(name: str) -> None:
    assert faster(tiny_model(name, attention=PREFIX + "reference"), "RMSNorm") == []


def test_a_forward_that_somebody_has_replaced_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = modeling_llama.LlamaMLP.forward
    for kind in (
        modeling_llama.LlamaMLP,
        modeling_llama.LlamaRMSNorm,
        modeling_llama.LlamaAttention,
        nn.Linear,
    ):
        monkeypatch.setattr(kind, "forward", partial(kind.forward))
    assert faster(tiny_model("llama", attention=PREFIX + "reference"), "") == []
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 2 * before(self, x))
    assert faster(tiny_model("llama", attention=PREFIX + "reference"), "") == []


@pytest.mark.parametrize("name", CARRIED)
def test_logprobs_and_gradients_are_those_of_the_librarys_layers(name: str) -> None:
    model = tiny_model(name, attention=PREFIX + "reference")
    plain = copy.deepcopy(model)
    for module in plain.modules():
        vars(module).pop("forward", None)
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    numbers = []
    for each in (model, plain):
        with Wide():
            scores = Scorer(each)(packed_family())
            scores.logp_N.square().sum().backward()
        gradients = {path: p.grad for path, p in each.named_parameters() if p.grad is not None}
        numbers.append((scores.logp_N.detach(), gradients))
    (logp_N, gradients), (expected_N, expected) = numbers
    torch.testing.assert_close(logp_N, expected_N, rtol=1e-10, atol=1e-10)
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[path], rtol=1e-9, atol=1e-9, msg=path)


@pytest.mark.parametrize("weight_trains", [True, False])
def test_the_norms_gradient_is_right(*, weight_trains: bool) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=weight_trains)
    norm = faster_layers._RmsNorm.apply
    assert torch.autograd.gradcheck(lambda *both: norm(*both, 1e-5), (x, weight))


def test_the_rotations_gradient_is_right() -> None:
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: faster_layers.rotate(x, cos, sin), (x,))


def test_the_gates_gradient_is_right() -> None:
    both = [torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    share = torch.randn(2, 3, 5, dtype=torch.float64)
    ours = torch.autograd.grad(faster_layers._Gate.apply(*both), both, share)
    theirs = torch.autograd.grad(nn.functional.silu(both[0]) * both[1], both, share)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_gates_second_backward_is_refused() -> None:
    both = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    out = faster_layers._Gate.apply(*both).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_an_input_of_another_dtype_is_the_librarys() -> None:
    model = tiny_model("llama", attention=PREFIX + "reference", dtype=torch.float32)
    norm = architecture.layers(model)[0].input_layernorm
    x = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_a_norm_in_16_bit_is_the_librarys() -> None:
    model = tiny_model("llama", attention=PREFIX + "reference", dtype=torch.bfloat16)
    norm = architecture.layers(model)[0].input_layernorm
    x = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    assert torch.equal(norm(x), type(norm).forward(norm, x))


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_last_mlp_computes_the_rows_that_are_read(*, recomputes: bool) -> None:
    model = tiny_model("llama", attention=PREFIX + "reference")
    if recomputes:
        recompute_activations(model, how=True)
    packed = packed_family()
    counts: list[int] = []
    for layer in architecture.layers(model):
        layer.mlp.up_proj.register_forward_hook(lambda _, args, out: counts.append(out.shape[1]))
    Scorer(model)(packed).logp_N.sum().backward()
    num_read = torch.cat([packed.predictor_N, packed.read_R]).unique().numel()
    assert num_read < packed.num_tokens
    forward, recomputed = [packed.num_tokens, num_read], [num_read, packed.num_tokens]
    assert counts == (forward + recomputed if recomputes else forward)


def test_without_rows_every_row_is_computed() -> None:
    model = tiny_model("llama", attention=PREFIX + "reference")
    packed = packed_family()
    layouts = (
        Layout(packed.reach_T.numpy()),
        Layout(packed.reach_T.numpy(), rows_read=packed.predictor_N.unique().numpy()),
    )
    every, some = (
        architecture.hidden_states(model, packed.ids_T, packed.position_ids, layout)
        for layout in layouts
    )
    rows = packed.predictor_N.unique()
    others = torch.ones(packed.num_tokens, dtype=torch.bool).index_fill(0, rows, 0)
    torch.testing.assert_close(every[rows], some[rows], rtol=1e-12, atol=1e-12)
    assert (every[others] != some[others]).any()


def test_a_model_with_experts_computes_all_rows() -> None:
    last = architecture.layers(tiny_model("qwen3_moe", attention=PREFIX + "reference"))[-1]
    assert not last._forward_pre_hooks


# -- vision towers


def numbers_of(seeing: Seeing, model: nn.Module) -> dict[str, Tensor]:
    """The features of pictures of several sizes, and the gradients of tower and projector."""
    pictures = (Drawn(0, 28, 12), Drawn(1, 44, 36), Drawn(2, 9, 30), Drawn(3, 44, 36))
    media = [item for each in pictures for item in seeing.sample("a", ["It is ", each]).media]
    with Wide():
        features = tower.features_of(model.model, media)
        sum(each.square().sum() for main, deep in features for each in (main, *deep)).backward()
    numbers = {f"picture {n}": main.detach() for n, (main, _) in enumerate(features)}
    return numbers | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", EVERY)
def test_features_and_gradients_are_those_of_the_librarys_tower(kind: str, tmp_path: Path) -> None:
    seeing, plain = Seeing.of(kind, tmp_path), vision_model(kind)
    model = copy.deepcopy(plain)
    faster_layers.install(model)
    assert len(faster(model, "Conv2d") + faster(model, "Conv3d")) == (kind != "gemma4")
    assert len(faster(model, "VisionAttention")) == (2 if kind.startswith("qwen") else 0)
    of_tower = [path for path in faster(model, "") if "visual" in path]
    is_gated = any(path.endswith("mlp") for path in of_tower)
    assert is_gated == any("norm1" in path for path in of_tower) == (kind == "qwen2_5_vl")
    ours, theirs = numbers_of(seeing, model), numbers_of(seeing, plain)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("lengths", [(7,), (4, 4, 2), (2, 4, 1, 4, 2, 1, 4)])
def test_windows_of_a_length_are_one_call(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = vision_model("qwen2_5_vl").model.visual.blocks[0].attn
    plain.config._attn_implementation = "sdpa"
    attention = copy.deepcopy(plain)
    forward = faster_layers._with_batched_windows(plain)
    assert forward is not None
    attention.forward = MethodType(forward, attention)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(sum(lengths), 16, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, sum(lengths), 8, dtype=torch.float64)
    calls: list[torch.Size] = []
    sdpa = nn.functional.scaled_dot_product_attention

    def counted(q: Tensor, *others: Tensor, **options: float) -> Tensor:
        calls.append(q.shape)
        return sdpa(q, *others, **options)

    results = []
    for module in (plain, attention):
        calls.clear()
        with Wide(), monkeypatch.context() as patch:
            patch.setattr(nn.functional, "scaled_dot_product_attention", counted)
            out = module(x, bounds, position_embeddings=(cos, sin))
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    assert len(calls) == len(set(lengths))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("has_another", ["rotation", "attention"])
def test_a_towers_attention_that_computes_something_else_is_left_alone(
    has_another: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = vision_model("qwen2_5_vl").model.visual.blocks[0].attn
    if has_another == "rotation":
        rotate_both = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
        monkeypatch.setattr(
            modeling_qwen2_5_vl,
            "apply_rotary_pos_emb_vision",
            lambda q, k, cos, sin: rotate_both(k, q, cos, sin),
        )
    else:
        attention.attention_dropout = 0.1
    assert faster_layers._with_batched_windows(attention) is None


PATCHES = (
    (nn.Conv2d(3, 5, 4, 4), (2, 3, 9, 14)),
    (nn.Conv2d(3, 5, (4, 2), (4, 2), padding="valid", bias=False), (2, 3, 9, 14)),
    (nn.Conv3d(3, 5, (2, 4, 4), (2, 4, 4)), (6, 3, 2, 4, 4)),
    (nn.Conv3d(3, 5, (2, 4, 4), (2, 4, 4), bias=False), (2, 3, 5, 9, 13)),
)


@pytest.mark.parametrize(("convolution", "shape"), PATCHES)
def test_a_patch_embedding_is_a_product(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    theirs, pixels = copy.deepcopy(convolution).double(), torch.randn(shape, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    assert faster_layers._is_patch_embedding(ours)
    ours.forward = MethodType(faster_layers._patch_embedding_forward, ours)
    results = []
    for module in (ours, theirs):
        out = module(pixels)
        gradients = torch.autograd.grad(out.square().sum(), [*module.parameters()])
        results.append([out.flatten(2).transpose(1, 2), *gradients])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


OVERLAPPING, PADDED, GROUPED, DILATED = (
    nn.Conv2d(4, 4, 3, 2),
    nn.Conv2d(4, 4, 3, 3, padding=1),
    nn.Conv2d(4, 4, 3, 3, groups=2),
    nn.Conv2d(4, 4, 3, 3, dilation=2),
)


@pytest.mark.parametrize(
    "convolution", [OVERLAPPING, PADDED, GROUPED, DILATED, nn.Conv1d(4, 4, 3, 3)]
)
def test_another_convolution_is_left_alone(convolution: nn.Module) -> None:
    assert not faster_layers._is_patch_embedding(convolution)
