"""Schedules against hand values, parameter groups, and one AdamW update by hand."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from torch import nn

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.train import optim
from taut.train.optim import Rate
from taut.train.settings import OptimConfig, Pace


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 0}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_steps": 0}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5]),
        (
            {"schedule": "linear", "warmup_steps": 0, "min_learning_rate_ratio": 0.2},
            [1.0, 0.8, 0.6, 0.4],
        ),
        # cos(pi / 4) = 0.70711
        ({"schedule": "cosine", "warmup_steps": 0}, [1.0, 0.853553, 0.5, 0.146447]),
        (
            {"schedule": "cosine", "warmup_steps": 0, "min_learning_rate_ratio": 0.5},
            [1.0, 0.926777, 0.75, 0.573223],
        ),
        ({"schedule": "cosine", "warmup_ratio": 0.3}, [0.5, 1.0, 1.0, 0.5]),
    ],
)
def test_schedules_of_four_steps(settings: dict, expected: list[float]) -> None:
    config = OptimConfig(learning_rate=1.0, **settings)
    rates = [optim.learning_rate(step, 4, config) for step in range(1, 5)]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_no_step_has_rate_zero() -> None:
    for schedule in ("constant", "linear", "cosine"):
        for total in (1, 2, 7, 100):
            config = OptimConfig(learning_rate=1e-5, schedule=schedule)
            assert all(optim.learning_rate(s, total, config) > 0 for s in range(1, total + 1))


def test_the_default_warms_up_for_three_hundredths() -> None:
    def num_warmup_steps(total: int, **keys: float) -> int:
        config = OptimConfig(learning_rate=1.0, schedule="linear", **keys)
        rates = [optim.learning_rate(step, total, config) for step in range(1, total + 1)]
        return rates.index(max(rates)) + 1 if rates[0] < 1 else 0

    assert num_warmup_steps(100) == 3
    assert num_warmup_steps(101) == 4
    assert num_warmup_steps(100, warmup_ratio=0.0) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 3, "warmup_ratio": 0.1},
        {"learning_rate": 0.0},
        {"beta2": 1.0},
        {"warmup_steps": -1},
        {"min_learning_rate_ratio": 1.5},
        {"min_learning_rate_ratio": 0.5, "schedule": "constant"},
        {"clip_grad_norm": 0.0},
    ],
)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        from_mapping(OptimConfig, settings)


def test_norms_and_biases_do_not_decay() -> None:
    model = tiny_model("qwen2")
    config = OptimConfig(learning_rate=1e-5, weight_decay=0.1)
    groups = optim.build_optimizer(model, config).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all("norm" in name or name.endswith("bias") for name in others)
    assert not any("norm" in name or name.endswith("bias") for name in decayed)
    assert "model.embed_tokens.weight" in decayed
    assert decayed | others == set(names.values())


def test_frozen_parameters_are_left_out_and_nothing_to_train_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    listed = [
        p
        for group in optim.build_optimizer(model, OptimConfig(learning_rate=1e-5)).param_groups
        for p in group["params"]
    ]
    assert {id(p) for p in listed} == {id(p) for p in model[1].parameters()}
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter is left to train"):
        optim.build_optimizer(model, OptimConfig(learning_rate=1e-5))


def test_first_update_by_hand() -> None:
    """AdamW's first update is decay, then a step of the rate in the gradient's sign: m / sqrt(v) =
    sign(g).
    """
    layer = nn.Linear(1, 1, dtype=torch.float64)
    nn.init.constant_(layer.weight, 2.0)
    nn.init.constant_(layer.bias, 2.0)
    optimizer = optim.build_optimizer(
        layer, OptimConfig(learning_rate=1e-5, weight_decay=0.5, eps=1e-12)
    )
    optim.set_learning_rate(optimizer, 0.1)
    layer.weight.grad = torch.full_like(layer.weight, -3.0)
    layer.bias.grad = torch.full_like(layer.bias, 7.0)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) + 0.1)
    assert layer.bias.item() == pytest.approx(2.0 - 0.1)
    assert optimizer.defaults["fused"] is True


def _of_two_parts() -> nn.Module:
    model = nn.ModuleDict({"model": nn.Linear(1, 1), "critic": nn.Linear(1, 1)}).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 2.0)
    return model


def test_a_part_with_a_pace_of_its_own_learns_at_its_rate_and_first() -> None:
    model = _of_two_parts()
    config = OptimConfig(learning_rate=0.1, weight_decay=0.5, eps=1e-12)
    optimizer = optim.build_optimizer(model, config, Pace("critic", ratio=3.0, head_start=1))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 1]
    for step, moved in ((1, 0.0), (2, 0.1)):
        before = [p.item() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
        optim.set_learning_rate(optimizer, 0.1, step)
        optimizer.step()
        weight, bias, critic_weight, critic_bias = (p.item() for p in model.parameters())
        assert weight == pytest.approx(before[0] * (1 - moved * 0.5) - moved, abs=1e-9)
        assert bias == pytest.approx(before[1] - moved, abs=1e-9)
        assert critic_weight == pytest.approx(before[2] * (1 - 0.3 * 0.5) - 0.3, abs=1e-9)
        assert critic_bias == pytest.approx(before[3] - 0.3, abs=1e-9)
    optim.set_learning_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.3, 0.3])


def test_the_gradient_of_such_a_part_is_clipped_apart() -> None:
    """A norm of 3 and one of 4: together 5, each held to 2."""
    model = _of_two_parts()
    optimizer = optim.build_optimizer(model, OptimConfig(learning_rate=1e-5), Pace("critic"))
    for parameter, gradient in zip(model.parameters(), (3.0, 0.0, 0.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, gradient)
    found = optim.clip(optimizer, 2.0)
    assert found == pytest.approx({"grad_norm": 5.0, "grad_norm/critic": 4.0})
    left = [p.grad.item() for p in model.parameters() if p.grad is not None]
    assert left == pytest.approx([2.0, 0.0, 0.0, 2.0], rel=1e-5)
    together = optim.build_optimizer(model, OptimConfig(learning_rate=1e-5))
    assert optim.clip(together, None) == pytest.approx({"grad_norm": 8**0.5})
    optim.clip(together, 2.0)
    left = [p.grad.item() for p in model.parameters() if p.grad is not None]
    assert left == pytest.approx([2**0.5, 0.0, 0.0, 2**0.5], rel=1e-5)


def test_a_part_without_gradients_has_its_norm_on_the_device() -> None:
    model = nn.ModuleDict({"critic": nn.Linear(1, 1), "rest": nn.Linear(1, 1)}).to("meta")
    optimizer = optim.build_optimizer(model, OptimConfig(learning_rate=1e-5), Pace("critic"))
    for parameter in model["rest"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = optim.clip(optimizer, None)
    assert {name: norm.device.type for name, norm in found.items()} == {
        "grad_norm": "meta",
        "grad_norm/critic": "meta",
    }


def test_what_has_a_rate_of_its_own_keeps_its_part_of_the_schedule() -> None:
    model = nn.ModuleDict({"tower": nn.Linear(2, 2), "rest": nn.Linear(2, 2)})
    config = from_mapping(
        OptimConfig,
        {"learning_rate": 1e-2, "warmup_steps": 2, "group_learning_rates": {"tower": 1e-3}},
    )
    rates = {f"tower.{name}": Rate("tower", 1e-3) for name in ("weight", "bias")}
    optimizer = optim.build_optimizer(model, config, rates=rates)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 1]
    for step, part in ((1, 0.5), (2, 1.0), (3, 1.0)):
        optim.set_learning_rate(optimizer, optim.learning_rate(step, 10, config), step)
        assert optim.learning_rates(optimizer) == pytest.approx(
            {"learning_rate": part * 1e-2, "learning_rate/tower": part * 1e-3}
        )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norms = optim.clip(optimizer, None)
    assert norms == {"grad_norm": pytest.approx(12**0.5)}  # one norm of all
    optimizer.step()  # the first AdamW step moves each weight by its rate
    for name, parameter in model.named_parameters():
        rate = 1e-3 if name.startswith("tower") else 1e-2
        assert float((before[name] - parameter.detach()).abs().max()) == pytest.approx(
            rate, rel=1e-3
        )


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_learning_rates"):
        from_mapping(OptimConfig, {"group_learning_rates": {"vision_tower": 0.0}})
