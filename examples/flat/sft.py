"""Supervised fine-tuning, flat: the whole algorithm in one file, nothing imported from taut.

    python examples/flat/sft.py --model DIR --data a.jsonl --out DIR --steps 20

It is the plainest program that gives the numbers of ``taut sft`` (dtype=float32 or float64), and the oracle that the
package is tested against. Each line of the data is {"messages": [{"role": ..., "content": ...}, ...]}.

1. Render. For each assistant turn, the prompt (the messages before it and the generation prompt) and the row (the
   messages up to it) are tokenized whole. The prompt must be an exact prefix of the row; what follows it, up to and
   with the token that ends the turn, are the targets. Nothing else is learned.
2. Order. Each epoch is a fresh permutation, epochs follow each other without a gap, and each step takes the next
   ``samples_per_step`` samples.
3. Step. Each sample runs ALONE: no packing, no padding, no mask, no cache. The loss is the sum of -log p over all
   targets of the step, divided by their number: a constant that is known before the first forward, so the samples'
   gradients simply add up.
4. Update. Clip the gradient's norm, AdamW without weight decay, a linear warm-up and a cosine to zero.

Where taut does more: other formats and lengths, prefixes shared and samples packed, adapters, ranks, resuming, checks.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DTYPES = ("float32", "float64", "bfloat16")


def settings(arguments=None):
    parser = argparse.ArgumentParser(description="Supervised fine-tuning, flat.")
    option = parser.add_argument
    option("--model", required=True, help="model directory, tokenizer and template included")
    option("--data", required=True, help="JSONL of messages")
    option("--out", required=True, help="where the tuned model is written")
    option("--steps", type=int, help="optimizer steps; default: once round the data")
    option("--seed", type=int, default=0)
    option("--samples-per-step", type=int, default=32)
    option("--learning-rate", type=float, default=1e-5)
    option("--warmup-ratio", type=float, default=0.03)
    option("--clip-grad-norm", type=float, default=1.0)
    option("--dtype", choices=DTYPES, default="float32", help="bfloat16 keeps float32 weights")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


class Sample(NamedTuple):
    ids: list[int]
    targets: list[int]  # ascending positions p: ids[p] is to be predicted, by the token at p - 1


def read(path, tokenizer, max_length):
    with Path(path).open(encoding="utf-8") as lines:
        rows = {f"{path}:{i}": json.loads(line) for i, line in enumerate(lines, 1) if line.strip()}
    samples = [render(row["messages"], tokenizer, place) for place, row in rows.items()]
    for place, sample in zip(rows, samples, strict=True):
        assert len(sample.ids) <= max_length, f"{place}: more than {max_length} tokens"
    return samples


def render(messages, tokenizer, place):
    ids = tokenize(messages, tokenizer)
    targets = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("train", True):
            continue
        prompt = tokenize(messages[:i], tokenizer, add_generation_prompt=True)
        row = tokenize(messages[: i + 1], tokenizer)
        assert row[: len(prompt)] == prompt, f"{place}: the prompt is no prefix of messages[{i}]"
        stop = end_of_turn(row, len(prompt), tokenizer) + 1
        assert ids[:stop] == row[:stop], f"{place}: messages[{i}] is rewritten once it is history"
        targets.extend(range(len(prompt), stop))
    assert targets, f"{place}: nothing to learn"
    return Sample(ids, targets)


def tokenize(messages, tokenizer, **options):
    """The template writes the special tokens: the tokenizer must not add them a second time."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False).input_ids


def end_of_turn(ids, start, tokenizer):
    """The last special token of the turn that starts at ``start``; after it the template writes white space at most."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    end = max((p for p in range(start, len(ids)) if ids[p] in special), default=None)
    assert end is not None, "the template writes no token that ends the turn"
    assert not tokenizer.decode(ids[end + 1 :]).strip(), "the template writes text after the turn"
    return end


def order(num_samples, seed, epoch):
    """The samples of an epoch (from 0), shuffled."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples).tolist()


def steps_of(num_samples, seed, samples_per_step, num_steps):
    """The sample numbers of each step; without ``num_steps`` one epoch, whose last step may be smaller."""
    num_epochs = 1 if num_steps is None else math.ceil(num_steps * samples_per_step / num_samples)
    numbers = [number for epoch in range(num_epochs) for number in order(num_samples, seed, epoch)]
    chunks = [numbers[i : i + samples_per_step] for i in range(0, len(numbers), samples_per_step)]
    return chunks[:num_steps]


def load(path, dtype, device):
    """Weights in float32 (float64 for float64), in eval mode: no dropout, so the same sample has one loss."""
    config = AutoConfig.from_pretrained(path)
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    weights = torch.float64 if dtype == "float64" else torch.float32
    attention = "eager" if softcap else None  # sdpa has no softcap; None: sdpa where it is right
    model = AutoModelForCausalLM.from_pretrained(path, dtype=weights, attn_implementation=attention)
    return model.to(device, weights).eval()  # .to: the rotary frequencies too


def loss_sum(model, sample, dtype):
    """-log p summed over the targets of one sample, run alone."""
    device = model.device
    ids, at = torch.tensor(sample.ids, device=device), torch.tensor(sample.targets, device=device)
    is_bfloat16 = dtype == "bfloat16"
    with torch.autocast(device.type, torch.bfloat16) if is_bfloat16 else nullcontext():
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=at - 1).logits[0]
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), ids[at], reduction="sum")


def learning_rate(step, num_steps, peak, warmup_ratio):
    """Up in a line for W steps, then down a cosine; steps count from 1, and no step has a rate of 0."""
    warmup = math.ceil(warmup_ratio * num_steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup - 1) / (num_steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def train(model, samples, args):
    """Run every step; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    steps = steps_of(len(samples), args.seed, args.samples_per_step, args.steps)
    losses = []
    for step, numbers in enumerate(steps, start=1):
        batch = [samples[number] for number in numbers]
        num_targets = sum(len(sample.targets) for sample in batch)  # the one denominator
        total = 0.0
        for sample in batch:
            loss = loss_sum(model, sample, args.dtype) / num_targets
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), args.clip_grad_norm, error_if_nonfinite=True)
        rate = learning_rate(step, len(steps), args.learning_rate, args.warmup_ratio)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {step}/{len(steps)}  loss {total:.6f}  grad norm {norm:.4f}  rate {rate:.3e}")
    return losses


def save(model, tokenizer, sample, dtype, out):
    """The model as it was stored before, told to stop where it was taught to."""
    stop = sample.ids[sample.targets[-1]]
    model.config.eos_token_id = model.generation_config.eos_token_id = stop
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    model.to(dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments=None):
    args = settings(arguments)
    out = Path(args.out)
    assert not out.exists() or not any(out.iterdir()), f"{out} is not empty"
    config = AutoConfig.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    samples = read(args.data, tokenizer, config.get_text_config().max_position_embeddings)
    model = load(args.model, args.dtype, args.device)
    losses = train(model, samples, args)
    save(model, tokenizer, samples[0], config.dtype or torch.float32, out)
    return losses


if __name__ == "__main__":
    main()
