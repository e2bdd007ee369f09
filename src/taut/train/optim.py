"""The optimizer: parameter groups, learning-rate schedules, AdamW.

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
from dataclasses import field
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from taut.config import NotNegative, Positive, Share, configclass
from taut.errors import ConfigError
from taut.train import distributed


@configclass
class OptimConfig:
    """AdamW and its schedule."""

    learning_rate: Positive | None = None
    """Peak learning rate, reached at the end of the warm-up. None: the method's default for full fine-tuning or LoRA
    (docs/hyperparameters.md)."""
    group_learning_rates: dict[str, Positive] = field(default_factory=dict)
    """Peak learning rates of parts of the model, on the same schedule: vision_tower, projector, language_model, or a
    pattern as in ``freeze``. Other parameters use ``learning_rate``.
    """
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW beta1: decay rate of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW beta2: decay rate of the mean of squared gradients."""
    eps: Positive = 1e-8
    """AdamW epsilon."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Linear warm-up steps; excludes ``warmup_ratio``."""
    warmup_ratio: Share | None = None
    """Linear warm-up as a fraction of all steps, rounded up; 0.03 if neither is set."""
    min_learning_rate_ratio: Share = 0.0
    """Final learning rate as a fraction of ``learning_rate``."""
    clip_grad_norm: Positive | None = 1.0
    """Maximum gradient norm; a larger gradient is scaled down to it. PPO clips policy and critic separately. None: no
    clipping.
    """

    def __post_init__(self) -> None:
        if self.schedule == "constant" and self.min_learning_rate_ratio:
            raise ConfigError(
                f"optim.min_learning_rate_ratio={self.min_learning_rate_ratio:g} is where a decay ends, and "
                "optim.schedule=constant has none; expected linear or cosine; set that, or leave it out"
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps} and "
                f"optim.warmup_ratio={self.warmup_ratio} are both "
                "set; keep one"
            )


class DefaultRates(NamedTuple):
    """A method's default peak learning rates."""

    full: float
    """For full fine-tuning."""
    lora: float
    """For LoRA."""
    sources: str
    """Their origin, for the documentation."""


class Rate(NamedTuple):
    """A parameter's own learning rate."""

    name: str
    """The part or pattern it is set for, as the user wrote it."""
    highest: float


class Pace(NamedTuple):
    """The learning rate of a part of the model relative to the rest."""

    part: str
    """Its name, which its parameters' names begin with, before a dot."""
    ratio: float = 1.0
    """Its learning rate divided by the others'."""
    head_start: int = 0
    """Steps in which it trains alone."""


def highest(config: OptimConfig) -> float:
    """The peak learning rate of a configuration in which it is set (``RunConfig.resolved_optim``)."""
    assert config.learning_rate is not None, (
        "optim.learning_rate is unset: use RunConfig.resolved_optim"
    )
    return config.learning_rate


def learning_rate(step: int, total: int, config: OptimConfig) -> float:
    """The rate of ``step`` (from 1) of ``total``."""
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
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused where the device has a fused kernel.

    The parameters are in groups with and without weight decay; separate ones for the part with its own pace, for each
    of ``rates`` (parameter -> its rate), and for what is sharded. A tied parameter is listed once. The optimizer's
    state is created here, as AdamW itself would at the first step, so that every checkpoint has the same tensors.
    """
    usual, rates, pace = Rate("", highest(config)), rates or {}, pace or Pace("")
    listed: dict[tuple[bool, Rate, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_apart = bool(pace.part) and name.startswith(f"{pace.part}.")
            names = name.lower().split(".")
            # DoRA's magnitudes are vectors, and so exempt from weight decay.
            is_exempt = (
                parameter.ndim < 2 or "bias" in names[-1] or any("norm" in part for part in names)
            )
            is_sharded = hasattr(parameter, "full_tensor")
            key = (is_apart, rates.get(name, usual), is_exempt, is_sharded)
            listed.setdefault(key, []).append(parameter)
    if not listed:
        raise ConfigError("no parameter is left to train; freeze fewer, or set lora.rank")
    optimizer = torch.optim.AdamW(
        [
            {
                "params": params,
                "weight_decay": 0.0 if is_exempt else config.weight_decay,
                "part": pace.part if is_apart else "",
                "ratio": pace.ratio if is_apart else rate.highest / usual.highest,
                "rate": rate.name,
                "waits": 0 if is_apart else pace.head_start,
            }
            for (is_apart, rate, is_exempt, _), params in sorted(
                listed.items(), key=lambda item: item[0]
            )
        ],
        lr=highest(config),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused={p.device.type for params in listed.values() for p in params} <= {"cpu", "cuda"},
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
    return optimizer


def set_learning_rate(
    optimizer: torch.optim.Optimizer, rate: float, step: int | None = None
) -> None:
    """Set the rate of the next update in every group. ``step``: of that update; None: after any head start."""
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

    Returns ``grad_norm``, the norm of the whole before clipping, and ``grad_norm/critic``, that of the part; on the
    device.
    """
    norms = {
        part: distributed.clip_gradients(params, max_norm)
        for part, params in parts(optimizer).items()
    }
    of_parts = {f"grad_norm/{part}": norm for part, norm in norms.items() if part}
    whole = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms.values()]))
    return {"grad_norm": whole, **of_parts}


def parts(optimizer: torch.optim.Optimizer) -> dict[str, list[nn.Parameter]]:
    """The parameters whose gradients are clipped together, by part; the main part's name is empty."""
    params_by_part: dict[str, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        params_by_part.setdefault(group["part"], []).extend(group["params"])
    return params_by_part
