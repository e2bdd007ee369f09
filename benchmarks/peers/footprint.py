"""What a process takes at most, on the device of a job. Imported by the workers of ``benchmarks/memory.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from recorder import peak_mb as resident_mb

Job = dict[str, Any]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def begin(job: Job) -> None:
    """Threads, and the packages that only some interpreters have on their path."""
    torch.set_num_threads(job["threads"])
    sys.path += job["packages"]


def peak_mb(device: str) -> float:
    """Of the process; on a GPU what torch handed out there."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resident_mb()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def load(job: Job) -> Any:
    """The model as transformers has it: float32 weights, or under adapters the compute dtype or a quantized base."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    compute = getattr(torch, job["dtype"])
    chosen: Job = {}
    if job["quantize"] == "nf4":
        chosen["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    return AutoModelForCausalLM.from_pretrained(
        job["model"],
        dtype=compute if job["rank"] else torch.float32,
        attn_implementation="sdpa",
        device_map={"": job["device"]},
        **chosen,
    )


def adapters(job: Job) -> Any:
    """peft's settings, as taut's: every linear layer but the head; None: all weights train."""
    if not job["rank"]:
        return None
    import peft

    return peft.LoraConfig(
        r=job["rank"],
        lora_alpha=2 * job["rank"],
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
    )
