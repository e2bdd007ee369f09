"""taut's side: its own training step on a model that was made on the device, its engine, its checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from data import Row, write_tokenizer
from on_gpu import measure
from on_gpu.rows import GROUP, samples_of
from on_gpu.sizes import RANK, Size, build
from taut.data.batching import Budget
from taut.data.order import Cursor
from taut.data.packing import PackPolicy
from taut.data.settings import BatchConfig
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.losses.loss import Loss
from taut.losses.registry import LOSSES
from taut.losses.supervised import CrossEntropy
from taut.models.attention_backends import select
from taut.models.compiled_layers import compile_layers, require_compiler
from taut.models.cpu import faster_layers
from taut.models.lora.adapters import apply_lora
from taut.models.precision import backward_context, compute_context
from taut.models.quantized.frozen_storage import Storage, store
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.train.distributed import Ranks
from taut.train.monitors import Spikes, Untouched
from taut.train.oom import build_fit
from taut.train.optim import build_optimizer
from taut.train.settings import OptimConfig
from taut.train.trainer import Trainer, train_step
from taut.types import Prompt, Tree

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Fixed:
    """A source whose steps are given, and come again and again."""

    steps: Sequence[Sequence[Tree]]
    loss: Loss
    state: None = None

    def is_known(self, step: int) -> bool:
        return True

    def prepare(self, step: int) -> list[Tree]:
        return list(self.steps[step % len(self.steps)])

    def observed(self, step: int) -> None:
        return None

    def cursor(self, step: int) -> Cursor:
        return Cursor(step, step)


def scorer_of(
    size: Size,
    device: torch.device,
    *,
    is_lora: bool = False,
    is_compiled: bool = False,
    parameters: torch.dtype = torch.float32,
) -> tuple[Scorer, str]:
    """A model as taut loads it, with the name of its attention and why it was chosen."""
    from transformers import LlamaConfig

    heads = {"num_attention_heads": size.num_heads, "num_key_value_heads": size.num_kv_heads}
    config = LlamaConfig(hidden_size=size.hidden, **heads)
    chosen = select("auto", device, DTYPE, config)
    model = build(size, device, chosen.implementation, DTYPE if is_lora else parameters)
    faster_layers.install(model)
    if is_lora:  # as a run with dtype=bfloat16 does
        store(model, Storage(DTYPE, DTYPE))
    lora = LoraConfig(rank=RANK if is_lora else 0, train_token_rows="never" if is_lora else "auto")
    adapted = apply_lora(model, lora)
    if is_compiled:
        require_compiler(device)
        compile_layers(adapted, DTYPE)
    return Scorer(adapted), f"{chosen.name}: {chosen.reason}"


def trainer_of(
    scorer: Scorer, steps: Sequence[Sequence[Row]], device: torch.device, tokens: int, kind: str
) -> Trainer:
    """As taut.run.setup makes it. ``kind``: of the rows."""
    is_grpo = kind == "grpo"
    trees = []
    for rows in steps:
        samples = samples_of(rows, has_advantages=is_grpo)
        width = GROUP if is_grpo else 1
        trees.append([
            Tree(tuple(samples[start : start + width])) for start in range(0, len(samples), width)
        ])  # fmt: skip
    ranks, optim = Ranks(0, 1, device), OptimConfig(learning_rate=1e-5)
    batch = BatchConfig(tokens_per_microbatch=tokens)
    return Trainer(
        scorer=scorer,
        source=Fixed(trees, LOSSES["policy_fresh"] if is_grpo else CrossEntropy()),  # type: ignore[arg-type]
        optimizer=build_optimizer(scorer, optim),
        learning_rate=lambda step: 1e-5,
        num_steps=1000,
        budget=Budget(tokens),
        policy=PackPolicy(share_prefixes=True),
        ranks=ranks,
        compute=partial(compute_context, DTYPE, device),
        compute_backward=partial(backward_context, DTYPE),
        noise=None,
        fit=build_fit(batch, ranks, one_sample=None, recomputes=False),
        clip_grad_norm=1.0,
        monitors=[Untouched.watching(scorer), Spikes()],
    )


# -- generation


def generate(
    size: Size, device: torch.device, num_prompts: int, num_samples: int, length: int
) -> dict[str, Any]:
    """Tokens a second of the local engine, its model in 16 bit."""
    scorer, attention = scorer_of(size, device, parameters=DTYPE)
    with tempfile.TemporaryDirectory() as place:
        write_tokenizer(Path(place), size.vocab)
        tokenizer = AutoTokenizer.from_pretrained(place)
    compute = partial(compute_context, DTYPE, device)
    engine = LocalEngine(scorer, tokenizer, (), context=8192, compute=compute)
    rows = [sample.ids_T[:254] for sample in prompts(size, num_prompts)]
    asked = [Prompt(f"p{number}", ids_T) for number, ids_T in enumerate(rows)]
    sampling = Sampling(n=num_samples, max_new_tokens=length, temperature=1.0, seed=0)
    engine.generate(asked, Sampling(n=num_samples, max_new_tokens=4, temperature=1.0, seed=0))
    measure.synchronize(device)
    began = time.perf_counter()
    done = engine.generate(asked, sampling)
    measure.synchronize(device)
    seconds = time.perf_counter() - began
    few = Sampling(n=num_samples, max_new_tokens=8, temperature=1.0, seed=0)
    waits = measure.host_syncs(lambda: engine.generate(asked, few), device)
    if waits["host_syncs"] is not None:
        waits["host_syncs"] /= 8  # a token
    return {
        "tokens_per_second": sum(one.ids_N.size for one in done) / seconds,
        "seconds": seconds,
        "attention": attention,
        "peak_bytes": measure.peak_bytes(device),
        **waits,
        **measure.kernels(lambda: engine.generate(asked, few), device),
    }


def prompts(size: Size, number: int) -> list[Any]:
    from on_gpu.rows import steps_of

    rows = steps_of("grpo", number * GROUP, size.vocab)[0][::GROUP]
    return samples_of(rows, has_advantages=False)


# -- checkpoints


def checkpoints(trainer: Trainer, place: Path) -> dict[str, Any]:
    """What saving keeps training waiting, in the background and not, and whether what is saved is the state."""
    import checkpoint

    stepped = checkpoint.Stepped(trainer, place)
    for _ in range(2):
        stepped.take()
    usual = stepped.take().seconds
    synchronous, _ = stepped.checkpoints("synchronous", background=False)
    background, events = stepped.checkpoints("background", background=True)
    staging = checkpoint.prepare(stepped, background)
    whole = checkpoint.save_first(lambda: synchronous.save(stepped.step))
    save, is_right = checkpoint.save_beside(stepped, background, events)
    for some in (synchronous, background):
        some.close()
    return {
        "bytes": staging["bytes"],
        "staging_seconds": staging["seconds"],
        "step_seconds": usual,
        "background_waits": save.waits,
        "background_writes": save.writes,
        "synchronous_waits": whole.waits,
        "is_right": is_right,
        "peak_bytes": measure.peak_bytes(trainer.ranks.device),
    }


__all__ = ["checkpoints", "generate", "scorer_of", "train_step", "trainer_of"]
