"""The optimizer: parameter groups, learning-rate schedules, AdamW or Muon (taut/train/updates.py).

    warm-up    rate * t / W                        for t <= W
    constant   rate
    linear     rate * (m + (1 - m) (1 - x))
    cosine     rate * (m + (1 - m) (1 + cos(pi x)) / 2)

with t counted from 1, W warm-up steps, x = (t - W - 1) / (total - W) the completed part of the decay, and
m = ``min_learning_rate_ratio``. The rate of the first and of the last step is above 0. The rate is a pure function of
(step, total): a resumed run has no scheduler state. Weight decay (arXiv:1711.05101) skips norms, biases and every
parameter of fewer than two dimensions.

A part of the model (a critic) may have its own ``Pace``: its rate is the others' times a ratio, it may train alone for
some steps, in which the others' rate is 0, and its gradient is clipped separately, so that neither shrinks the other's.
Parameters may have their own rates (``optim.group_learning_rates``): the same schedule times a ratio, clipped with the
rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from taut.errors import ConfigError
from taut.train import distributed
from taut.train.settings import OptimConfig, Pace
from taut.train.updates import GroupedOptimizer, new_state


class Rate(NamedTuple):
    """Learning rate of some parameters."""

    name: str
    """The part or pattern as the user wrote it."""
    highest: float


def highest(config: OptimConfig) -> float:
    """Peak learning rate of a resolved configuration (``RunConfig.resolved_optim``)."""
    assert config.learning_rate is not None, (
        "optim.learning_rate is unset: use RunConfig.resolved_optim"
    )
    return config.learning_rate


def learning_rate(step: int, total: int, config: OptimConfig) -> float:
    """Learning rate of ``step``, counted from 1, of ``total``."""
    assert step >= 1, f"steps count from 1, got {step}"
    rate, warmup = highest(config), config.warmup_steps
    if warmup is None:
        ratio = 0.03 if config.warmup_ratio is None else config.warmup_ratio
        warmup = math.ceil(ratio * total)
    if step <= warmup:
        return rate * step / warmup
    if config.schedule == "constant":
        return rate
    done = min(1.0, (step - warmup - 1) / max(1, total - warmup))
    is_linear = config.schedule == "linear"
    shape = 1.0 - done if is_linear else 0.5 * (1.0 + math.cos(math.pi * done))
    floor = config.min_learning_rate_ratio
    return rate * (floor + (1.0 - floor) * shape)


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    pace: Pace | None = None,
    rates: Mapping[str, Rate] | None = None,
    layers: nn.Module | None = None,
) -> torch.optim.AdamW:
    """Build the optimizer of the trainable parameters, fused where the device has a fused kernel. ``layers``: the
    module whose matrices Muon updates.

    Parameters are grouped by weight decay, by part with its own pace, by rate (``rates``: parameter -> its rate), by
    update rule and by sharding. A tied parameter is listed once. The optimizer's state is created here, as AdamW itself
    would at the first step, so that every checkpoint has the same tensors.
    """
    # sort the parameters into groups
    usual, rates, pace = Rate("", highest(config)), rates or {}, pace or Pace("")
    # Muon updates weights of linear modules, but no norms, routers or adapters
    candidates = layers.named_parameters() if config.name == "muon" and layers is not None else ()
    matrices = {
        id(parameter)
        for name, parameter in candidates
        if parameter.ndim == 2
        and "lora_" not in name
        and not any(
            "norm" in part or "router" in part or part.endswith("gate")
            for part in name.lower().split(".")
        )
    }
    listed: dict[tuple[bool, Rate, bool, str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_apart = bool(pace.part) and name.startswith(f"{pace.part}.")
            names = name.lower().split(".")
            # DoRA's magnitudes are vectors, and so exempt from weight decay.
            is_exempt = (
                parameter.ndim < 2 or "bias" in names[-1] or any("norm" in part for part in names)
            )
            placement, is_muon = distributed.placement_of(parameter), id(parameter) in matrices
            key = (is_apart, rates.get(name, usual), is_exempt, placement, is_muon)
            listed.setdefault(key, []).append(parameter)
    problem = ""
    if not listed:
        problem = "no parameter is left to train; freeze fewer, or set lora.rank"
    elif config.name == "muon" and not any(is_muon for *_, is_muon in listed):
        problem = (
            "optim.name=muon, and no matrix of a layer is trained (adapters are not, for Muon); expected one; set "
            "optim.name=adamw"
        )
    if problem:
        raise ConfigError(problem)

    # the settings of each group
    groups = []
    for (is_apart, rate, is_exempt, _, is_muon), params in sorted(
        listed.items(), key=lambda item: item[0]
    ):
        ratio = pace.ratio if is_apart else rate.highest / usual.highest
        if is_muon:
            ratio *= (config.muon_learning_rate or usual.highest) / usual.highest
        groups.append(
            {
                "params": params,
                "weight_decay": 0.0 if is_exempt else config.weight_decay,
                "part": pace.part if is_apart else "",
                "ratio": ratio,
                "rate": rate.name or ("muon" if is_muon else ""),
                "waits": 0 if is_apart else pace.head_start,
                "rule": "muon" if is_muon else "adamw",
                "state": config.state,
                "momentum": config.muon_momentum,
                "ns_steps": config.muon_ns_steps,
            }
        )

    # the optimizer, with its state
    optimizer = optimizer_type(config)(
        groups,
        lr=highest(config),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused={p.device.type for params in listed.values() for p in params} <= {"cpu", "cuda"},
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = state = new_state(parameter, group)
            if type(optimizer) is torch.optim.AdamW and group["fused"]:
                state["step"] = state["step"].to(parameter.device)  # where its kernel reads it
    return optimizer


def optimizer_type(config: OptimConfig) -> type[torch.optim.AdamW]:
    """PyTorch's AdamW for float32 moments without Muon; else ours."""
    is_plain = config.name == "adamw" and config.state == "float32"
    return torch.optim.AdamW if is_plain else GroupedOptimizer


def state_sizes(
    model: nn.Module, config: OptimConfig, layers: nn.Module | None
) -> dict[Tensor, int]:
    """Trainable parameter -> bytes of its optimizer state. The model may be on the meta device."""
    optimizer = build_optimizer(model, config, layers=layers)
    return {
        parameter: sum(value.nbytes for key, value in state.items() if key != "step")
        for parameter, state in optimizer.state.items()
    }


def set_learning_rate(
    optimizer: torch.optim.Optimizer, rate: float, step: int | None = None
) -> None:
    """Set the learning rate of the next update in every group. ``step``: of that update; None: after a head start."""
    for group in optimizer.param_groups:
        is_waiting = step is not None and step <= group["waits"]
        group["lr"] = 0.0 if is_waiting else rate * group["ratio"]


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """``learning_rate`` of the last update, and ``learning_rate/NAME`` of parameters with their own rate."""
    first, *_ = groups = optimizer.param_groups
    rates = {f"learning_rate/{group['rate']}": group["lr"] for group in groups if group["rate"]}
    return {"learning_rate": first["lr"] / first["ratio"], **rates}


def clip(optimizer: torch.optim.Optimizer, max_norm: float | None) -> dict[str, Tensor]:
    """Scale the gradient down to ``max_norm``, separately for a part with its own pace.

    Returns norms before clipping, on the device: ``grad_norm`` of all parameters, ``grad_norm/critic`` of the part.
    """
    norms = {
        part: distributed.clip_gradients(params, max_norm)
        for part, params in parts(optimizer).items()
    }
    of_parts = {f"grad_norm/{part}": norm for part, norm in norms.items() if part}
    whole = torch.linalg.vector_norm(
        distributed.stacked([norm.double() for norm in norms.values()])
    )
    return {"grad_norm": whole, **of_parts}


def parts(optimizer: torch.optim.Optimizer) -> dict[str, list[nn.Parameter]]:
    """Part -> parameters whose gradients are clipped together; the main part's name is empty."""
    params_by_part: dict[str, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        params_by_part.setdefault(group["part"], []).extend(group["params"])
    return params_by_part
