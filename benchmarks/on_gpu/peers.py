"""The others: the plain transformers loop (padded, with the library's attention), peft's LoRA on it, TRL's trainer, and
transformers' ``generate``.

The plain loop is what a page of code does: rows in the file's order are padded to the longest of their micro-batch, as
many as fit into the tokens at a time; autocast over float32 weights as in taut (a base under LoRA: bfloat16), fused
AdamW, gradients clipped at 1.
For completions it takes logits of the completion only, as TRL does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import PAD, Row, write_tokenizer
from on_gpu import measure
from on_gpu.sizes import RANK, Size, build

RATE = 1e-5


def model_of(size: Size, device: torch.device, attention: str, *, is_lora: bool) -> Any:
    if not is_lora:
        return build(size, device, attention)
    model = build(size, device, attention, torch.bfloat16)  # adapters are float32, by peft
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM"))


def microbatches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Rows in order, as many as their padded length allows."""
    batch: list[Row] = []
    for row in rows:
        longest = max(len(one.ids) for one in [*batch, row])
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def padded(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids, attention mask and labels [B, L]."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        length = len(row.ids)
        ids[number, :length] = torch.tensor(row.ids)
        mask[number, :length] = 1
        labels[number, row.num_prompt : length] = ids[number, row.num_prompt : length]
    return ids.to(device), mask.to(device), labels.to(device)


def loop(
    model: Any, steps: Sequence[Sequence[Row]], device: torch.device, tokens: int, kind: str
) -> Callable[[int], None]:
    """``take(step)`` of the plain loop."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    advantages = torch.randn(max(map(len, steps)), generator=torch.Generator().manual_seed(0))

    def take(step: int) -> None:
        rows = steps[step % len(steps)]
        num_targets = sum(row.num_targets for row in rows)
        start = 0
        for batch in microbatches(rows, tokens):
            ids, mask, labels = padded(batch, device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                if kind == "grpo":
                    share = advantages[start : start + len(batch)].to(device)
                    total = policy_loss(model, ids, mask, labels, share) / num_targets
                else:
                    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
                    total = model(**inputs, num_items_in_batch=num_targets, use_cache=False).loss
            total.backward()
            start += len(batch)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return take


def policy_loss(
    model: Any, ids: Tensor, mask: Tensor, labels: Tensor, advantage_B: Tensor
) -> Tensor:
    """The sum over targets of -ratio * advantage, where the ratio is 1."""
    first = int((labels >= 0).int().argmax(1).min())  # the completions begin together
    length = ids.shape[1] - first
    out = model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False)
    logits = out.logits[:, :-1].float()
    is_target = labels[:, first:] >= 0
    target = ids[:, first:].unsqueeze(-1)
    logp = logits.log_softmax(-1).gather(2, target).squeeze(-1)
    ratio = (logp - logp.detach()).exp()
    return -(ratio * advantage_B[:, None] * is_target).sum()


def trl_seconds(
    size: Size, device: torch.device, steps: Sequence[Sequence[Row]], tokens: int, *, is_lora: bool
) -> dict[str, Any]:
    """TRL's SFTTrainer with its defaults, but for what is equal for all: rows padded, in their order."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [row for step in steps for row in step]
    most = max(1, tokens // max(len(row.ids) for row in rows))
    per_batch = next(n for n in range(min(most, len(steps[0])), 0, -1) if len(steps[0]) % n == 0)
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            measure.synchronize(device)
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as place:
        write_tokenizer(Path(place), size.vocab)
        config = SFTConfig(
            output_dir=place,
            max_steps=2 * len(steps),
            per_device_train_batch_size=per_batch,
            gradient_accumulation_steps=len(steps[0]) // per_batch,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            bf16=True,
            gradient_checkpointing=False,
            completion_only_loss=True,
            max_length=None,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        masks = [[int(k >= row.num_prompt) for k in range(len(row.ids))] for row in rows]
        trainer = SFTTrainer(
            model=model_of(size, device, "sdpa", is_lora=is_lora),
            args=config,
            train_dataset=Dataset.from_dict(
                {"input_ids": [list(row.ids) for row in rows], "completion_mask": masks}
            ),
            processing_class=AutoTokenizer.from_pretrained(place),
            callbacks=[Clock()],
        )
        trainer.train()
    whole = len(steps)  # the first round warms up
    seconds = (ends[-1] - ends[whole - 1]) / (len(ends) - whole)
    return {"seconds": seconds, "num_steps": whole, "peak_bytes": measure.peak_bytes(device)}


def generate(
    size: Size, device: torch.device, num_prompts: int, num_samples: int, length: int
) -> dict[str, Any]:
    """Tokens a second of ``model.generate`` on prompts of one length, in 16 bit."""
    model = build(size, device, "sdpa", torch.bfloat16).eval()
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, size.vocab, (num_prompts, 254), generator=random).to(device)

    def run(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=num_samples,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=PAD,
            use_cache=True,
        )
        measure.synchronize(device)

    run(4)
    began = time.perf_counter()
    run(length)
    seconds = time.perf_counter() - began
    waits = measure.host_syncs(lambda: run(8), device)
    if waits["host_syncs"] is not None:
        waits["host_syncs"] /= 8  # a token
    return {
        "tokens_per_second": num_prompts * num_samples * length / seconds,
        "seconds": seconds,
        "peak_bytes": measure.peak_bytes(device),
        **waits,
        **measure.kernels(lambda: run(8), device),
    }
