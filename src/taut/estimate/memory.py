"""Bytes on one device, and on its host, from what a micro-batch was seen to hold on one that has the whole model.

With one rank that is all there is. FSDP over N ranks leaves each

    weights      W / N + R + 2 L       W all, R those outside the layers, L the largest layer: R stays whole from the
                                       forward to the end of the backward, a layer while it runs, the next one beside it
    gradients    G / N + r + 2 l       the same of what trains, until they are reduced and scattered
    optimizer    2 G / N
    reference    G / N, or another model's W / N: it is whole a layer at a time, while nothing else is there
    casts, activations, logits, temporary      as with one rank: they belong to the micro-batch

``casts`` too: what autocast keeps for the backward is a copy of the whole weights, which nobody shards; with
activation checkpointing it is one layer's. Before it is sharded each rank holds the whole model (``loading``).

Imports tracing and checkpoint. The package, its command and its checks import it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from taut.checkpoint import CheckpointConfig
from taut.estimate.ledger import Parts
from taut.estimate.tracing import Sizes, Traced


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank."""

    parts: Parts
    """On the device, at the fullest moment of a step."""
    loading: int
    """On the device, while the model is loaded."""
    staging: int
    """On the host: buffers for checkpoints that are written in the background. Among ``parts`` where host and device
    are one."""

    @property
    def peak(self) -> int:
        """On the device, at the fullest moment of all."""
        return max(sum(self.parts.values()), self.loading)

    @property
    def is_loading(self) -> bool:
        """Whether loading is the fullest moment."""
        return self.loading > sum(self.parts.values())


def footprint(
    traced: Traced, num_ranks: int, *, stages: bool = False, is_host: bool = False
) -> Footprint:
    """What each of ``num_ranks`` holds. ``stages``: whether checkpoints are written in the background; ``is_host``:
    whether the device is the host itself."""
    shares = dict.fromkeys(("weights", "gradients"), 1 / num_ranks)
    parts = traced.parts(shares)
    parts["optimizer"] = traced.optimizer // num_ranks
    parts["reference"] = traced.reference // num_ranks
    if num_ranks > 1:
        parts["weights"] = parts["weights"] // num_ranks + _whole(traced.weights)
        parts["gradients"] = parts["gradients"] // num_ranks + _whole(traced.trained)
    staging = (traced.trained.all + traced.optimizer) // num_ranks if stages else 0
    if is_host:
        parts["staging"] = staging
    return Footprint(parts, traced.weights.all, staging)


def stages(config: CheckpointConfig, num_steps: int | None) -> bool:
    """Whether a run has buffers for its checkpoints."""
    is_under_way = config.keep_best or (
        config.every > 0 and (num_steps is None or config.every < num_steps)
    )
    return config.background and is_under_way


def _whole(sizes: Sizes) -> int:
    """What of sharded parameters is whole at a time."""
    return min(sizes.rest + 2 * sizes.layer, sizes.all)


def device_memory(device: torch.device) -> int:
    """Bytes that a device has: a GPU's, or all of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
