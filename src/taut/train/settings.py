"""Keys of training: optimizer, checkpoints, ranks, monitors, log, the saved model. Imports no torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from taut.config import Code, Every, NotNegative, Positive, Share, configclass, read_cadence
from taut.conflicts import conflict
from taut.io import plugins
from taut.io.extras import require
from taut.train.run_dir import ADAPTER, MODEL

SINK_ENTRY_POINTS = "taut.sinks"
"""Entry points of packages that add classes, each a sink by its name."""
StateFormat = Literal["float32", "bf16", "int8"]


@configclass
class OptimConfig:
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of the layers, AdamW for embeddings, head, norms, routers, fused experts
    and a critic. Not with LoRA."""
    learning_rate: Positive | None = None
    """Peak learning rate, reached at the end of the warm-up. None: the method's default for full fine-tuning or LoRA
    (docs/models.md)."""
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
    state: StateFormat = "float32"
    """Format of the optimizer's moments between steps: float32, or to save memory bf16 (stochastic rounding) or int8
    (blocks with a scale)."""
    muon_learning_rate: Positive | None = None
    """Muon's peak learning rate. None: ``learning_rate``; Muon's update is scaled to the size of AdamW's."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum (Nesterov)."""
    muon_ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz steps with which Muon orthogonalizes an update."""
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

    rules: ClassVar[str] = """
        at most one of warmup_steps warmup_ratio: each says how long the warm-up is
        muon_learning_rate muon_momentum muon_ns_steps needs name=muon
        min_learning_rate_ratio needs schedule=linear|cosine: the learning rate does not decay
    """


class DefaultRates(NamedTuple):
    """A method's default peak learning rates."""

    full: float
    """For full fine-tuning."""
    lora: float
    """For LoRA."""
    sources: str
    """Their origin, for the documentation."""


class Pace(NamedTuple):
    """The learning rate of a part of the model relative to the rest."""

    part: str
    """Name of the part: the names of its parameters begin with it and a dot."""
    ratio: float = 1.0
    """Learning rate of the part divided by that of the rest."""
    head_start: int = 0
    """Steps in which the part trains alone."""


class Repeated:
    """What sections with a key ``every`` say of it."""

    every: Every | None

    @property
    def is_repeated(self) -> bool:
        """Whether the user asks for more than what is done at the end."""
        return bool(self.every)

    @property
    def counts_epochs(self) -> bool:
        """Whether ``every`` is in epochs."""
        return read_cadence(self.every or 0)[1] == "epoch"

    @property
    def counts_minutes(self) -> bool:
        """Whether ``every`` is in minutes."""
        return read_cadence(self.every or 0)[1] == "minute"


@configclass
class CheckpointConfig(Repeated):
    """When training state is saved. An interrupted run saves it in any case."""

    every: Every | None = None
    """Steps between checkpoints, or a text: 30 minutes, 0.5 epochs. One more follows the last step. 0 disables both.
    Default: 15 minutes."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Also save and keep a checkpoint of the best model so far by eval.best."""
    background: bool = True
    """Write checkpoints in the background while training continues. Needs CPU memory for a second copy of the state."""
    skip_damaged: bool = False
    """On resume, skip damaged checkpoints and continue from the newest intact one."""

    def max_count(self, num_steps: int) -> int:
        """Most checkpoints at a time, including the one being written."""
        count = self.keep + self.keep_best + 1
        if not isinstance(self.every, int) or not self.every:
            return count
        return min(count, -(-num_steps // self.every))

    def saves_before(self, num_steps: int | None) -> bool:
        """Whether a checkpoint may be due before the last step. None: an unknown number of steps."""
        return not isinstance(self.every, int) or 0 < self.every < (num_steps or self.every + 1)


@configclass
class ParallelConfig:
    """How a model is divided among the ranks of torchrun."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Copies of the sharded weights: each is divided among ranks / replicas ranks, which exchange weights only with
    each other (hybrid sharding, HSDP): as many as nodes, where nodes are connected slowly. A divisor of the ranks."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Ranks that compute one micro-batch together (tensor parallelism): each has a part of the heads and of the MLP of
    every layer, by the library's plan for the architecture; the rest is sharded as usual. As many as fit on one node. A
    divisor of the ranks of a replica."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in the host's memory (FSDP's CPU offload), on one GPU too: a layer's weights
    go to the GPU where it runs, and the host's processor updates them."""


@configclass
class LossMonitorConfig:
    """When training counts as diverged and stops. Before that the run warns, and saves no checkpoint meanwhile."""

    loss_ratio: Annotated[float, Field(gt=1)] = 3.0
    """Loss limit as a multiple of the first loss. The higher of this limit and ``loss_margin`` applies."""
    loss_margin: Annotated[float, Field(ge=0)] = 2.0
    """Loss limit as a margin above the first loss (nats per token for a likelihood). The losses of grpo and ppo have no
    limit: they start near 0 and change sign."""
    loss_steps: Annotated[int, Field(ge=0)] = 20
    """Stop when the loss exceeds its limit in more than half of this many last steps. 0: warn only."""
    zero_gradient_steps: Annotated[int, Field(ge=0)] = 5
    """Stop after this many consecutive steps with a gradient norm of exactly zero. 0: warn only. Steps of grpo and ppo
    in which all advantages are zero do not count (see rollout_monitor.max_without_signal)."""
    nothing_learned: Literal["fail", "warn"] = "fail"
    """A run that has learned nothing, as no step had a gradient or no rollout rewards that differ, saves its model and
    says why. fail: its exit code is 1; warn: 0."""


@configclass
class SaveConfig:
    """The model that a run saves at its end."""

    merged: bool = True
    """Merge a LoRA adapter and save the full model in out/model, next to the adapter in out/adapter. false: save only
    the adapter, in out/adapter (and out/best); `taut merge` merges it later."""

    @property
    def result(self) -> str:
        """Directory of the result in ``out``."""
        return MODEL if self.merged else ADAPTER


@configclass
class TokenRecordConfig:
    """Which samples are recorded token by token, in out/tokens."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between two records; those of the first and the last step, and of steps in which a monitor warns or stops
    the run, come in addition. 0: only those."""
    samples: Annotated[int, Field(ge=0)] = 8
    """Samples of a recorded step: half of them those with the lowest mean logprob, the others drawn. 0: none."""
    max_mib: Annotated[int, Field(ge=1)] = 256
    """Space that they may take on each rank. As it fills, steps are recorded more seldom."""


@configclass
class RolloutRecordConfig:
    """The record of all rollouts, in out/rollouts: prompts, tokens, logprobs, advantages and rewards."""

    max_gib: Annotated[float, Field(ge=0)] = 16.0
    """Space that they may take; later rollouts are then not recorded, and a warning says so. 0: records none."""


@configclass
class LogConfig:
    """Reports in addition to ``events.jsonl``, which is always written."""

    console: bool = True
    """Report on the terminal: decisions, progress, warnings, a summary."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between progress lines where the output is no terminal."""
    tensorboard: bool = False
    """Write curves and samples for TensorBoard to out/tensorboard; needs the extra tensorboard."""
    wandb: str | None = None
    """Weights & Biases project to report to; needs the extra wandb."""
    utilization_seconds: Annotated[float, Field(ge=0, le=86_400)] = 15.0
    """Seconds between two readings of how busy processors, disk and GPU are (the event utilization). 0: none."""
    trackio: str | None = None
    """trackio project to report to; needs the extra trackio."""
    sinks: list[Code] = field(default_factory=list)
    """Reports of your own, FILE.py:Class each (docs/runs.md)."""
    tokens: TokenRecordConfig = field(default_factory=TokenRecordConfig)
    rollouts: RolloutRecordConfig = field(default_factory=RolloutRecordConfig)

    def __post_init__(self) -> None:
        if self.tensorboard:
            require("tensorboard", "log.tensorboard=true")
        if self.wandb is not None:
            require("wandb", "log.wandb")
        if self.trackio is not None:
            require("trackio", "log.trackio")
        added = plugins.names(SINK_ENTRY_POINTS)
        for spec in self.sinks:
            file, colon, name = spec.rpartition(":")
            if spec not in added and not (colon and file.endswith(".py") and name.isidentifier()):
                known = ", ".join([*added, "FILE.py:Class"])
                raise conflict(
                    self, "sinks", f"{spec!r} is no sink", f"expected {known}; correct it"
                )
