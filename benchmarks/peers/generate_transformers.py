"""transformers' two ways to generate: ``python generate_transformers.py JOB.json``.

    padded       ``generate`` on one left-padded batch; a row is done at its own length, as it would be at an eos
    continuous   the manager behind ``generate_batch``: paged cache, prefixes in shared blocks, children forked off one
                 prefill

Both with sdpa. Sampling is from the model's own distribution. Settings of ``continuous`` that are not the library's
defaults are those that were fastest on a CPU; docs/benchmarks.md says what was tried.
"""

from __future__ import annotations

import time
from math import ceil
from typing import Any

import generation
import torch
from generation import Contender, Job, Made, Work
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

PAGE = 32
"""Tokens of a block: small ones share more of a prompt and waste less."""


def load(job: Job) -> Contender:
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    )
    model.eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    if job["mode"] == "padded":
        return Padded(model)
    return Continuous(model)


def settings(work: Work) -> dict[str, Any]:
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return {
        "max_new_tokens": max(work.new_tokens),
        "num_return_sequences": work.num_samples,
        "pad_token_id": 0,
        **({"do_sample": False} if work.is_greedy else sampling),
    }


class Padded:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, work: Work) -> Made:
        longest = max(map(len, work.prompts))
        ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        limits = torch.tensor(work.new_tokens).repeat_interleave(work.num_samples)
        lengths = Lengths(longest, limits)
        start = time.perf_counter()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(**settings(work)),
            stopping_criteria=StoppingCriteriaList([lengths]),
        )
        rows = [
            row[longest : longest + limit].tolist() for row, limit in zip(out, limits, strict=True)
        ]
        n = work.num_samples
        completions = [rows[at : at + n] for at in range(0, len(rows), n)]
        return Made(completions, lengths.first_token_at - start)


class Lengths(StoppingCriteria):
    """A row is done when it has as many new tokens as it should have."""

    def __init__(self, num_prompt: int, limits: Tensor) -> None:
        self.num_prompt, self.limits = num_prompt, limits
        self.first_token_at = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.first_token_at = self.first_token_at or time.perf_counter()
        return input_ids.shape[1] - self.num_prompt >= self.limits


class Continuous:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, work: Work) -> Made:
        lengths = [len(p) + n for p, n in zip(work.prompts, work.new_tokens, strict=True)]
        blocks = sum(ceil(length / PAGE) + 1 for length in lengths) * work.num_samples
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=ceil(1.3 * blocks),  # beyond the scheduler's margin: nobody is evicted
            max_batch_tokens=512,
            # One mask spans all that is read: more at a time costs more in masked scores than it saves.
            max_requests_per_batch=16,
            allow_block_sharing=True,
        )
        hints = WorkloadHints(
            max_prompt_length=max(map(len, work.prompts)),
            max_generated_length=max(work.new_tokens),
            num_requests=len(lengths) * work.num_samples,
        )
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=GenerationConfig(eos_token_id=-1, **settings(work)),
            continuous_batching_config=config,
            workload_hints=hints,
        ) as manager:
            for number, (ids, limit) in enumerate(zip(work.prompts, work.new_tokens, strict=True)):
                manager.add_request(list(ids), f"{number}", max_new_tokens=limit, eos_token_id=-1)
            while len(found) < hints.num_requests:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread has ended before its work")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    found[result.request_id] = list(result.generated_tokens)
        return Made([
            [found[name] for name in sorted(found) if name.split("__")[0] == f"{number}"]
            for number in range(len(lengths))
        ])  # fmt: skip


generation.run(load)
