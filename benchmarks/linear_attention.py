"""A model with linear attention: packed, one sample at a time, and as the library pads it:
``python benchmarks/linear_attention.py``.

    chat    32 samples of 30 to 400 tokens
    group   2 prompts of 512 tokens with 8 completions of 64 each: a tree, whose prompts are computed once

A random Qwen3.5 of 4 layers (3 with the gated delta rule, 1 with attention) of 256, heads of 32, a vocabulary of 8,192;
forward and backward of the loss of all targets, without the optimizer. In one process, in turns; processor
seconds, the median of the rounds, and the rate of matrix products before and after.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from taut.attention.recurrent import CHUNK
from taut.data.packing import ALONE, PackPolicy, pack
from taut.models.cpu import faster_layers
from taut.models.scorer import Scorer
from taut.types import Sample

VOCABULARY = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds: int = parser.parse_args().rounds
    ours, library = (make_model(attention) for attention in ("taut_reference", "sdpa"))
    faster_layers.install(ours)
    scorer = Scorer(ours)
    print(f"{torch.get_num_threads()} threads, {products():.0f} GFLOP/s, chunks of {CHUNK}")
    for name, samples in {"chat": chat(), "group": group()}.items():
        contenders: dict[str, Callable[[], float]] = {
            "packed": lambda samples=samples: packed(scorer, samples),  # type: ignore[misc]
            "one at a time": lambda samples=samples: one_at_a_time(scorer, samples),  # type: ignore[misc]
            "padded, library": lambda samples=samples: padded(library, samples),  # type: ignore[misc]
        }
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        losses = {contender: run() for contender, run in contenders.items()}  # warms up
        for _ in range(rounds):
            for contender, run in contenders.items():
                started = time.process_time()
                run()
                seconds[contender].append(time.process_time() - started)
        best = median(seconds["packed"])
        for contender, each in seconds.items():
            took = median(each)
            print(
                f"{name}, {contender}: {took:.3f} CPU s ({took / best:.2f} of packed), loss {losses[contender]:.5f}"
            )
    print(f"{products():.0f} GFLOP/s")


def make_model(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )


def sample(name: str, ids: np.ndarray, num_prompt: int) -> Sample:
    at = np.arange(num_prompt, ids.size)
    return Sample(name, ids, at, np.ones(at.size))


def chat() -> list[Sample]:
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.uniform(np.log(30), np.log(400), 32)).astype(int)
    return [
        sample(f"chat {number}", draw.integers(0, VOCABULARY, length), length // 2)
        for number, length in enumerate(lengths)
    ]


def group() -> list[Sample]:
    draw = np.random.default_rng(1)
    prompts = draw.integers(0, VOCABULARY, (2, 512))
    return [
        sample(f"{p}, {n}", np.concatenate([prompt, draw.integers(0, VOCABULARY, 64)]), 512)
        for p, prompt in enumerate(prompts)
        for n in range(8)
    ]


def packed(scorer: Scorer, samples: Sequence[Sample]) -> float:
    return _step(scorer, [pack(samples, PackPolicy(share_prefixes=True))])


def one_at_a_time(scorer: Scorer, samples: Sequence[Sample]) -> float:
    return _step(scorer, [pack([each], ALONE) for each in samples])


def _step(scorer: Scorer, microbatches: Sequence[object]) -> float:
    scorer.zero_grad()
    total, count = 0.0, 0
    for microbatch in microbatches:
        logp_N = scorer(microbatch).logp_N
        (-logp_N.sum()).backward()
        total, count = total - float(logp_N.detach().sum()), count + logp_N.numel()
    return total / count


def padded(model: PreTrainedModel, samples: Sequence[Sample], at_once: int = 8) -> float:
    """Batches of ``at_once`` samples of like length, padded on the right."""
    model.zero_grad()
    total, count = 0.0, 0
    by_length = sorted(samples, key=lambda it: it.num_tokens)
    for start in range(0, len(samples), at_once):
        batch = by_length[start : start + at_once]
        ids = torch.zeros(len(batch), batch[-1].num_tokens, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, each in enumerate(batch):
            ids[row, : each.num_tokens] = torch.from_numpy(each.ids_T)
            mask[row, : each.num_tokens] = 1
            labels[row, each.target_at_N] = torch.from_numpy(each.ids_T[each.target_at_N])
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        total, count = total + float(loss.detach()), count + int((labels >= 0).sum())
    return total / count


def products(size: int = 1024) -> float:
    """GFLOP/s of products of two square matrices."""
    left, right = torch.randn(2, size, size)
    _ = left @ right
    started = time.perf_counter()
    for _ in range(10):
        _ = left @ right
    return 10 * 2 * size**3 / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    main()
