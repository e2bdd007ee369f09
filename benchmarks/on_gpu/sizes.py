"""The models, with random weights made on the device, and an estimate of the memory that a training step of one takes.

    float32 weights with 16-bit copies of them (a base under LoRA: 16 bit alone, as taut stores it), gradients and
    AdamW's moments of what trains, a layer's activations of each token, and logits: of a chunk of targets (taut), or of
    every token (the plain loop)

The estimate decides what is run and how many tokens at a time; it is reported beside the measured peak. It leaves out
the kernels' own buffers and the allocator's fragments, so ``ROOM`` of the free memory is planned with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

ROOM = 0.9
RANK = 16
"""Of LoRA, on every matrix of the layers."""
CHUNK = 256
"""Targets whose logits exist at a time in taut's head."""
TOKENS = (16384, 8192, 4096, 2048)
"""Tokens at a time, the first that fits."""


@dataclass(frozen=True)
class Size:
    """A model of the Llama architecture, in the shape of a known one."""

    name: str
    like: str
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    is_tied: bool = True

    @property
    def kv(self) -> int:
        return self.num_kv_heads * self.hidden // self.num_heads

    @property
    def layers(self) -> int:
        """Parameters of the layers."""
        products = 2 * self.hidden**2 + 2 * self.hidden * self.kv + 3 * self.hidden * self.inner
        return self.num_layers * products

    @property
    def num_parameters(self) -> int:
        """With the embedding, and the head where it has weights of its own."""
        return self.layers + self.vocab * self.hidden * (1 if self.is_tied else 2)

    @property
    def adapters(self) -> int:
        """Parameters of LoRA."""
        widths = 6 * self.hidden + 2 * self.kv + 3 * (self.hidden + self.inner)
        return self.num_layers * RANK * widths

    @property
    def products(self) -> int:
        """N of 6N: the parameters that every token is multiplied with, those of the head among them."""
        return self.layers + self.vocab * self.hidden


SIZES = {
    size.name: size
    for size in (
        Size("0.1B", "SmolLM2-135M", 576, 1536, 30, 9, 3, 49152),
        Size("0.5B", "Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 151936),
        Size("1.5B", "Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 151936),
        Size("8B", "Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, is_tied=False),
        Size("tiny", "nothing: for the self-test", 64, 128, 2, 4, 2, 512),
    )
}


class Estimate(NamedTuple):
    """Memory of a training step, in bytes."""

    weights: int
    casts: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    def line(self) -> str:
        parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in self._asdict().items())
        return f"{sum(self) / 2**30:.1f} GiB ({parts})"


def estimate(size: Size, *, is_lora: bool, tokens: int, is_chunked: bool) -> Estimate:
    """Of ``tokens`` at a time. ``is_chunked``: logits of ``CHUNK`` targets, as in taut; else of every token."""
    trained = size.adapters if is_lora else size.num_parameters
    # bytes per token and layer, as counted with torch's saved_tensors_hooks on these shapes: norms keep more where they
    # train
    kept = 8 * size.inner + 4 * size.kv + (26 if is_lora else 36) * size.hidden
    rows = min(tokens, CHUNK) if is_chunked else tokens
    return Estimate(
        weights=4 * trained + (2 * size.num_parameters if is_lora else 0),
        casts=2 * trained,
        gradients=4 * trained,
        optimizer=8 * trained,
        activations=tokens * size.num_layers * kept,
        logits=rows * size.vocab * (2 + 4 + 4),
    )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Fits(NamedTuple):
    """How many tokens at a time fit, by the estimate."""

    tokens: int
    estimate: Estimate


class TooLarge(Exception):
    """The estimate is larger than what is free."""


def fit(size: Size, device: torch.device, *, is_lora: bool, is_chunked: bool) -> Fits:
    """The most tokens at a time that fit. Raises TooLarge."""
    room = ROOM * free_bytes(device)
    for tokens in TOKENS:
        needed = estimate(size, is_lora=is_lora, tokens=tokens, is_chunked=is_chunked)
        if sum(needed) <= room:
            return Fits(tokens, needed)
    raise TooLarge(
        f"{size.name} {'LoRA' if is_lora else 'full'} with {TOKENS[-1]:,} tokens at a time needs about "
        f"{needed.line()}; {ROOM:.0%} of what is free is {room / 2**30:.1f} GiB"
    )


def build(
    size: Size, device: torch.device, attention: str, dtype: torch.dtype = torch.float32
) -> Any:
    """The model in train mode, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        tie_word_embeddings=size.is_tied,
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.to(device).train()
