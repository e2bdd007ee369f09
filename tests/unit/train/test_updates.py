"""Muon against its reference, the formats of moments, and a resume bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from torch import Tensor, nn

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.models import architecture
from taut.train import optim, sharded, updates
from taut.train.distributed import Ranks
from taut.train.settings import OptimConfig

FORMATS = ("float32", "bf16", "int8")
ALONE = Ranks(0, 1, torch.device("cpu"))


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96)).to(dtype)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    noise = torch.Generator().manual_seed(1)
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(128, 96, generator=noise, dtype=torch.float64).to(dtype)
    targets = torch.randn(128, 96, generator=noise, dtype=torch.float64).to(dtype) * 0.3
    losses = []
    for _ in range(num_steps):
        loss = (net(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _reference_of_muon(
    weight: Tensor, gradient: Tensor, momentum: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """One update of https://kellerjordan.github.io/posts/muon/, with the factor of arXiv:2502.16982."""
    momentum = 0.95 * momentum + 0.05 * gradient
    update = (0.05 * gradient + 0.95 * momentum).bfloat16()
    is_tall = update.shape[0] > update.shape[1]
    update = update.T if is_tall else update
    update = update / update.norm()
    for _ in range(5):
        square = update @ update.T
        polynomial = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        update = torch.addmm(update, polynomial, update, beta=3.4445)
    update = update.T if is_tall else update
    size = rate * 0.2 * max(weight.shape) ** 0.5
    return weight * (1 - rate * 0.1) - size * update.double(), momentum


def test_muon_equals_its_reference() -> None:
    net = _net(torch.float64)
    config = OptimConfig(name="muon", learning_rate=0.01, weight_decay=0.1)
    optimizer = optim.build_optimizer(net, config, layers=net)
    weights = {0: net[0].weight.detach().clone(), 2: net[2].weight.detach().clone()}
    momenta = {index: torch.zeros_like(weight) for index, weight in weights.items()}
    for _ in range(4):
        _train(net, optimizer, 1)
        for index, weight in weights.items():
            gradient = net[index].weight.grad
            weights[index], momenta[index] = _reference_of_muon(
                weight, gradient, momenta[index], 0.01
            )
            assert torch.allclose(net[index].weight, weights[index], rtol=0, atol=1e-12)


def test_muon_updates_the_matrices_of_the_layers_only() -> None:
    model = tiny_model("qwen3_moe")
    config = OptimConfig(name="muon", learning_rate=0.01, muon_learning_rate=0.02)
    optimizer = optim.build_optimizer(model, config, layers=architecture.layers(model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {
        names[id(p)] for g in optimizer.param_groups if g["rule"] == "muon" for p in g["params"]
    }
    assert {name.split(".")[-2] for name in by_muon} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(by_muon) == 4 * len(architecture.layers(model))
    optim.set_learning_rate(optimizer, 0.005)
    assert optim.learning_rates(optimizer) == {"learning_rate": 0.005, "learning_rate/muon": 0.01}


def test_muon_without_a_matrix_and_its_keys_without_muon_are_refused() -> None:
    with pytest.raises(ConfigError, match="no matrix of a layer is trained"):
        optim.build_optimizer(_net(), OptimConfig(name="muon", learning_rate=0.01))
    with pytest.raises(
        ConfigError,
        match=r"muon_momentum=0\.9 with name=adamw: nothing reads it; expected name=muon",
    ):
        from_mapping(OptimConfig, {"muon_momentum": 0.9})


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("state", FORMATS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str, state: str) -> None:
    config = OptimConfig(name=name, state=state, learning_rate=1e-2)
    net = _net()
    optimizer = optim.build_optimizer(net, config, layers=net)
    before = {key: value.dtype for key, value in sharded.training_state(net, optimizer).items()}
    _train(net, optimizer, 3)
    saved = sharded.training_state(net, optimizer)
    assert {key: value.dtype for key, value in saved.items()} == before
    sharded.write(saved, tmp_path, ALONE)
    other = copy.deepcopy(net)
    twin = optim.build_optimizer(other, config, layers=other)
    sharded.read(sharded.training_state(other, twin), tmp_path, ALONE)
    assert _train(net, optimizer, 3) == _train(other, twin, 3)


@pytest.mark.parametrize(
    ("state", "bytes_of_weight"), [("float32", 8.0), ("bf16", 4.0), ("int8", 2.1)]
)
def test_the_bytes_of_the_state(state: str, bytes_of_weight: float) -> None:
    """int8 has a scale for 64 or 96 elements here, and biases in float32."""
    net = _net().to("meta")
    num_weights = sum(p.numel() for p in net.parameters())
    config = OptimConfig(state=state, learning_rate=1e-2)
    assert sum(optim.state_sizes(net, config, net).values()) <= bytes_of_weight * 1.04 * num_weights


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_learning_with_fewer_bits_is_learning(state: str) -> None:
    plain = _net()
    losses = _train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0), 60)
    net = _net()
    config = OptimConfig(state=state, learning_rate=1e-2)
    few = _train(net, optim.build_optimizer(net, config), 60)
    assert few[0] == losses[0] and few != losses
    assert few[-1] == pytest.approx(losses[-1], rel=0.05)


def test_eight_bits_are_the_nearest_values() -> None:
    signed, unsigned = (
        updates.values_of_codes(is_signed, torch.device("cpu")) for is_signed in (True, False)
    )
    assert len(signed) == len(unsigned) == 256 and {0.0, 1.0} <= {*signed.tolist()}
    parameter = nn.Parameter(torch.zeros(64, 512))
    group = {"rule": "adamw", "state": "int8"}
    state = updates.new_state(parameter, group)
    assert state["exp_avg"].dtype == torch.uint8 and state["exp_avg_scale"].shape == (64, 2)
    value = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 3
    rows, noise = slice(None), torch.Generator()
    updates._store(state, "exp_avg", rows, value, noise)
    largest = value.unflatten(-1, (2, 256)).abs().amax(-1, keepdim=True)
    exact = value.unflatten(-1, (2, 256)) / largest
    nearest = (exact.unsqueeze(-1) - signed).abs().amin(-1)
    found = updates._load(state, "exp_avg", rows, torch.float32).unflatten(-1, (2, 256)) / largest
    assert torch.all((found - exact).abs() <= nearest + exact.abs() / 2048 + 1e-7)
    assert torch.all((found - exact).abs() <= 0.0073)


def test_eight_bits_of_a_rank_without_rows() -> None:
    """Muon reads and writes its part of a matrix that has fewer rows than there are ranks."""
    state = {
        "momentum": torch.zeros(0, 1024, dtype=torch.uint8),
        "momentum_scale": torch.zeros(0, 4),
    }
    found = updates._load(state, "momentum", slice(None), torch.float32)
    assert found.shape == (0, 1024)
    updates._store(state, "momentum", slice(None), found, torch.Generator())


def test_a_small_mean_of_squares_is_not_lost_in_eight_bits() -> None:
    """Stored as zero, it would make the next update without a gradient mean / eps."""
    weight = nn.Parameter(torch.zeros(64, 256))
    config = OptimConfig(state="int8", learning_rate=1.0)
    optimizer = optim.build_optimizer(nn.ParameterDict({"weight": weight}), config)
    weight.grad = torch.full((64, 256), 1e-4)
    weight.grad[:, 0] = 1.0
    optimizer.step()
    weight.grad = torch.zeros(64, 256)
    before = weight.detach().clone()
    optimizer.step()
    assert (weight.detach() - before).abs().max() < 1.0


def test_stochastic_rounding_keeps_the_mean_and_repeats_itself() -> None:
    value = torch.full((100_000,), 1 + 1 / 1024)  # an eighth of the step to the next bf16 value
    first, again = (
        updates.rounded_stochastically(value, torch.Generator().manual_seed(5)) for _ in range(2)
    )
    assert torch.equal(first, again) and set(first.tolist()) == {1.0, 1 + 1 / 128}
    assert first.double().mean().item() == pytest.approx(1 + 1 / 1024, abs=1e-4)
    exact = torch.tensor([0.0, -1.5, 2.0**-130])
    assert torch.equal(updates.rounded_stochastically(exact, torch.Generator()).float(), exact)
