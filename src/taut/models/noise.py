"""Noise that does not depend on how samples are packed: NEFTune (arXiv:2310.05914) and adapter
dropout.

Every token's noise is a function of (seed, step, sample, depth, layer): a sample draws the same
noise alone, packed with others, on any rank and when activation checkpointing computes a layer
twice. Each (seed, step, sample, layer) seeds a generator of its own; depth is the row it draws.

    NEFTune          embedding += uniform(-1, 1) * alpha / sqrt(length * D)
    adapter dropout  x * keep / (1 - p), before an adapter's first matrix

A shared prefix would need the noise of several samples at once, so noise wants unshared layouts
(``Packed.spans``). It is off in eval mode and without gradients; a training forward before ``set``
is an error. Dropout inside the model itself is refused by ``models/load.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from taut.errors import ModelError
from taut.models import architecture
from taut.models.settings import NoiseConfig
from taut.types import Packed


def remove_dropout(model: nn.Module) -> float:
    """Remove the dropout of every adapter (a loaded one may have its own); returns the largest rate."""
    largest = 0.0
    for holder, adapter, _ in _dropouts_of(model):
        largest = max(largest, holder[adapter].p)
        holder[adapter] = nn.Identity()
    return largest


def _dropouts_of(model: nn.Module) -> list[tuple[Any, str, str]]:
    """Adapters' active dropouts: the module that holds each, its key there, and the module's name."""
    return [
        (module, adapter, name)
        for name, module in model.named_modules()
        if name.endswith("lora_dropout") and isinstance(module, nn.ModuleDict)
        for adapter, dropout in module.items()
        if isinstance(dropout, nn.Dropout) and dropout.p > 0
    ]


def install_noise(model: nn.Module, config: NoiseConfig, seed: int) -> Noise | None:
    """Attach the model's noise; None where it has none, and prefixes may be shared."""
    noise = Noise(model, config.neftune_alpha, seed)
    return noise if noise.is_on else None


class Noise:
    """All noise of one model: the hook on its embedding, and the key from which its dropouts draw."""

    def __init__(self, model: nn.Module, alpha: float, seed: int) -> None:
        """Hook the embedding (alpha > 0) and replace every adapter's dropout by keyed dropout."""
        self.alpha, self.seed = alpha, seed
        self._key: tuple[int, tuple[str, ...], tuple[tuple[int, int], ...]] | None = None
        """Step, samples and their places in the micro-batch that noise is drawn for."""
        self._hook: RemovableHandle | None = None
        if alpha > 0:
            self._hook = architecture.embedding(model).register_forward_hook(self._add_to_embedding)
        dropouts = _dropouts_of(model)
        self._num_dropouts = len(dropouts)
        for holder, adapter, name in dropouts:
            p = holder[adapter].p
            part = architecture.part_of(name) if architecture.has_parts(model) else "language_model"
            if part != "language_model":
                raise ModelError(
                    f"lora.dropout={p:g} with {name.removesuffix('.lora_dropout')} of the {part}: noise is drawn by "
                    "token, and it sees pictures; set lora.dropout=0, or lora.targets=[language_model]"
                )
            holder[adapter] = KeyedDropout(p, f"{name}.{adapter}", self)

    @property
    def is_on(self) -> bool:
        """Whether any noise is attached."""
        return self._hook is not None or self._num_dropouts > 0

    def detach(self) -> None:
        """Remove the embedding's hook. Keyed dropouts stay: without them an adapter's own would return."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def set(self, step: int, packed: Packed) -> None:
        """Set the micro-batch that the next forward draws for, and its backward (recomputed layers draw again)."""
        if len(packed.spans) != packed.num_samples:
            raise ModelError(
                "noise (noise.neftune_alpha, lora.dropout) needs a layout without shared prefixes; "
                "set batch.share_prefixes=false"
            )
        self._key = step, packed.sample_ids, packed.spans

    def generators(
        self, layer: str, device: torch.device
    ) -> Iterator[tuple[slice, torch.Generator]]:
        """Each sample's place in the micro-batch, with the generator of its noise in ``layer``."""
        assert self._key is not None, "a training forward ran before Noise.set"
        step, sample_ids, spans = self._key
        for sample_id, (start, stop) in zip(sample_ids, spans, strict=True):
            words = f"{self.seed}/{step}/{sample_id}/{layer}".encode()
            number = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
            yield slice(start, stop), torch.Generator(device).manual_seed(number)

    def _add_to_embedding(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Forward hook: output [1, T, D] or [T, D] plus NEFTune's noise."""
        if not module.training or not torch.is_grad_enabled():
            return output
        noise = torch.zeros_like(output, dtype=torch.float32, requires_grad=False)
        for span, generator in self.generators("embedding", output.device):
            rows = noise[..., span, :]
            rows.uniform_(-1.0, 1.0, generator=generator)
            rows.mul_(self.alpha / (rows.shape[-2] * rows.shape[-1]) ** 0.5)
        return output + noise.to(output.dtype)


class KeyedDropout(nn.Module):
    """Dropout of an adapter's input [1, T, D] or [T, D], drawn per sample."""

    def __init__(self, p: float, layer: str, noise: Noise) -> None:
        super().__init__()
        self.p, self.layer, self._noise = p, layer, noise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not torch.is_grad_enabled():
            return x
        keep = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        num_drawn = 0
        for span, generator in self._noise.generators(self.layer, x.device):
            keep[..., span, :].bernoulli_(1.0 - self.p, generator=generator)
            num_drawn = max(num_drawn, span.stop)
        if num_drawn != x.shape[-2]:
            raise ModelError(
                f"{self.layer} sees {x.shape[-2]} tokens of a micro-batch of {num_drawn} (experts "
                "see some of them): its dropout cannot be drawn per sample; set lora.dropout=0"
            )
        return x * (keep / (1.0 - self.p)).to(x.dtype)
