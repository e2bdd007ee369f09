"""Noise is keyed: the same alone, packed, in any order and when recomputed; another in another
step.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_samples import sample
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from taut.config import from_mapping
from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ConfigError, ModelError
from taut.models.lora.adapters import apply_lora
from taut.models.noise import KeyedDropout, Noise, install_noise
from taut.models.settings import LoraConfig, NoiseConfig
from taut.types import Packed

A, B, C = (sample(name, list(range(3, 3 + n))) for name, n in (("a", 9), ("b", 14), ("c", 5)))


def embedded(alpha: float, step: int, packed: Packed, seed: int = 0) -> Tensor:
    """The noise NEFTune adds to a micro-batch, [T, D]."""
    model = tiny_model("llama")
    table = model.get_input_embeddings()
    clean = table(packed.ids_T[None])[0].detach()
    noise = install_noise(model, NoiseConfig(neftune_alpha=alpha), seed)
    assert noise is not None
    noise.set(step, packed)
    return (table(packed.ids_T[None])[0] - clean).detach()


def of(name: str, values: Tensor, packed: Packed) -> Tensor:
    start, stop = packed.spans[packed.sample_ids.index(name)]
    return values[start:stop]


def test_neftune_is_the_same_alone_packed_and_reordered() -> None:
    alone = embedded(5.0, 1, pack([A], ALONE))
    for others in ([A, B], [B, A], [C, B, A]):
        packed = pack(others, ALONE)
        assert torch.equal(of("a", embedded(5.0, 1, packed), packed), alone)


def test_neftune_differs_by_step_seed_and_sample_and_has_the_papers_size() -> None:
    packed = pack([A], ALONE)
    one = embedded(5.0, 1, packed)
    assert not torch.equal(one, embedded(5.0, 2, packed))
    assert not torch.equal(one, embedded(5.0, 1, packed, seed=1))
    both = pack([A, sample("a2", list(range(3, 12)))], ALONE)
    noise = embedded(5.0, 1, both)
    assert not torch.equal(of("a", noise, both), of("a2", noise, both))
    bound = 5.0 / (9 * 32) ** 0.5
    assert 0.9 * bound < float(one.abs().max()) <= bound


def test_no_noise_without_gradients_in_eval_or_with_alpha_zero() -> None:
    model = tiny_model("llama")
    assert install_noise(model, NoiseConfig(), 0) is None
    table = model.get_input_embeddings()
    assert not table._forward_hooks
    noise = install_noise(model, NoiseConfig(neftune_alpha=5.0), 0)
    assert noise is not None
    noise.set(1, pack([A], ALONE))
    clean = nn.functional.embedding(torch.from_numpy(A.ids_T), table.weight)
    with torch.no_grad():
        assert torch.equal(table(torch.from_numpy(A.ids_T)), clean)
    model.eval()
    assert torch.equal(table(torch.from_numpy(A.ids_T)), clean)
    model.train()
    assert not torch.equal(table(torch.from_numpy(A.ids_T)), clean)
    noise.detach()
    assert not table._forward_hooks


@pytest.fixture
def adapted() -> tuple[nn.Module, Noise]:
    model = apply_lora(tiny_model("llama"), LoraConfig(rank=2, dropout=0.5, targets=["q_proj"]))
    noise = install_noise(model, NoiseConfig(), 0)
    assert noise is not None
    return model, noise


def test_adapter_dropout_is_keyed_by_sample_and_layer(adapted: tuple[nn.Module, Noise]) -> None:
    model, noise = adapted
    first, second = (m for m in model.modules() if isinstance(m, KeyedDropout))
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())
    x = torch.ones(1, 9, 32, dtype=torch.float64)
    noise.set(1, pack([A], ALONE))
    alone = first(x)
    assert set(alone.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < float(alone.eq(0).double().mean()) < 0.7
    assert not torch.equal(alone, second(x))
    packed = pack([B, A], ALONE)
    noise.set(1, packed)
    both = first(torch.ones(1, 23, 32, dtype=torch.float64))[0]
    assert torch.equal(of("a", both, packed), alone[0])
    noise.set(2, packed)
    assert not torch.equal(first(torch.ones(1, 23, 32, dtype=torch.float64))[0], both)


def test_a_recomputed_layer_draws_the_same(adapted: tuple[nn.Module, Noise]) -> None:
    model, noise = adapted
    dropout = next(m for m in model.modules() if isinstance(m, KeyedDropout))
    noise.set(1, pack([A], ALONE))
    x = torch.ones(1, 9, 32, dtype=torch.float64, requires_grad=True)
    checkpoint(lambda t: dropout(t).square(), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, 2 * dropout(torch.ones_like(x)) ** 2)


def test_experts_that_see_some_tokens_are_refused(adapted: tuple[nn.Module, Noise]) -> None:
    model, noise = adapted
    dropout = next(m for m in model.modules() if isinstance(m, KeyedDropout))
    noise.set(1, pack([A], ALONE))
    with pytest.raises(ModelError, match=r"set lora\.dropout=0"):
        dropout(torch.ones(4, 32))


def test_shared_prefixes_are_refused_and_a_forward_without_a_key_is_an_error() -> None:
    model = tiny_model("llama")
    noise = install_noise(model, NoiseConfig(neftune_alpha=1.0), 0)
    assert noise is not None
    with pytest.raises(AssertionError, match=r"before Noise\.set"):
        model.get_input_embeddings()(torch.tensor([[1, 2]]))
    shared = pack([A, sample("long", list(range(3, 20)))], PackPolicy(min_saved_tokens=1))
    assert not shared.spans
    with pytest.raises(ModelError, match=r"batch\.share_prefixes=false"):
        noise.set(1, shared)


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(ConfigError, match="neftune_alpha"):
        from_mapping(NoiseConfig, {"neftune_alpha": -1.0})
