"""How far ``taut plan`` is from what is measured: ``python benchmarks/plan.py``.

Each configuration is predicted and then really run, in a process of its own, on one thread:

    memory    predicted: fake tensors; measured: all that torch's allocator handed out at the fullest moment of a whole
              training step (optimizer included), and beside it the process's largest resident set, less what it was
              before the model was loaded
    step      predicted: a few layers, the head and an update, timed apart; measured: ``train_step``, the fastest of
              a few; both in processor seconds, which other work on the machine disturbs less

*seen* are the configurations the code was written with, *held out* those it was not: different architectures, sizes,
dtypes, vocabularies, all weights or LoRA, with and without activation checkpointing. Nothing is fitted to either. Exit
status 1 if a held-out one is off by more than 15% in memory or 25% in time. Run ``make demo`` once before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: processor seconds of one thread

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data import Model, chat_rows, write_model, write_rows
from taut.config import from_mapping
from taut.data.store.cache import default_directory
from taut.methods.method import RunConfig
from taut.models.load import quiet_library
from taut.plan.memory import footprint, peak_bytes, predict_steps, tensors_of
from taut.plan.models import Kernels
from taut.plan.rates import calibrate
from taut.plan.workload import workload
from taut.run.inputs import load_inputs
from taut.run.setup import build
from taut.train import distributed
from taut.train.trainer import train_step
from taut_tools.demo.fetch import get_model

REAL = "SmolLM2-135M-Instruct"
MIB = 2**20
ROUNDS = 2
LIMITS = {"memory": 0.15, "step": 0.25}
AGAIN: dict[str, Any] = {"activation_checkpointing": True}
BF16, FP32 = {"dtype": "bfloat16"}, {"dtype": "float32"}

SEEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama 4x256, 8k, bf16": ("llama", {}, BF16),
    "llama 4x256, 100k, bf16, LoRA, checkpointing": (
        "llama",
        {"vocab_size": 100_000},
        {**BF16, "lora.rank": 8, **AGAIN},
    ),
    f"{REAL}, bf16": (REAL, {}, BF16),
}
HELD_OUT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmo2 8x384, 30k, float32": (
        "olmo2",
        {
            "num_hidden_layers": 8,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "vocab_size": 30_000,
        },
        FP32,
    ),
    "mistral 12x512, 16k, bf16, LoRA": (
        "mistral",
        {
            "num_hidden_layers": 12,
            "hidden_size": 512,
            "intermediate_size": 1792,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 16_000,
            "sliding_window": 128,
        },
        {**BF16, "lora.rank": 16},
    ),
    "granite 6x640, 50k, bf16, checkpointing": (
        "granite",
        {
            "num_hidden_layers": 6,
            "hidden_size": 640,
            "intermediate_size": 2560,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "vocab_size": 50_000,
            "tie_word_embeddings": True,
        },
        {**BF16, **AGAIN},
    ),
    f"{REAL}, float32, LoRA, checkpointing": (REAL, {}, {**FP32, "lora.rank": 32, **AGAIN}),
}
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def one(name: str, folder: Path) -> dict[str, Any]:
    """A configuration, predicted and measured."""
    warnings.simplefilter("ignore")
    architecture, shape, keys = (SEEN | HELD_OUT)[name]
    run = _run(architecture, shape, keys, folder)
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    work = workload(run, inputs, 1)
    began = time.perf_counter()
    kernels = Kernels(getattr(torch, keys["dtype"]), "taut_reference")
    predicted = predict_steps(run, inputs.config, kernels, work)
    planned = time.perf_counter() - began
    again = run.activation_checkpointing
    expected = min(
        calibrate(run, inputs.config, kernels, work.largest, ranks.device, time.process_time)
        .seconds(predicted.traced, work.steps[0], recomputes=again)
        .total
        for _ in range(ROUNDS)
    )

    before = _resident()
    built = build(run, inputs, run.plan(inputs.train), ranks)
    trainer = replace(built.trainer, monitors=(), emit=lambda kind, **fields: None)
    train_step(trainer, 1)
    taken = []
    for _ in range(ROUNDS + 1):
        clock = time.process_time()
        train_step(trainer, 1)
        taken.append(time.process_time() - clock)
    here = [*built.scorer.parameters(), *built.scorer.buffers(), *tensors_of(trainer.optimizer)]
    measured = max(
        peak_bytes(lambda s=step: train_step(trainer, s), here, ranks.device)
        for step in range(1, 1 + len(work.steps))
    )
    return {
        "name": name,
        "tokens": work.largest.num_tokens,
        "memory": (footprint(predicted.traced, 1).peak / MIB, measured / MIB),
        "resident": _resident() - before,
        "step": (expected, min(taken)),
        "planned": planned,
    }


def _run(architecture: str, shape: dict[str, Any], keys: dict[str, Any], folder: Path) -> RunConfig:
    model, train = folder / "model", folder / "messages.jsonl"
    write_rows(chat_rows(64, 8000), folder)
    if architecture == REAL:
        model = get_model(default_directory())
    else:
        fields = SMALL | shape
        config = AutoConfig.for_model(architecture, **fields)
        write_model(Model("", 1, 64, fields["vocab_size"], True), model)  # its tokenizer is kept
        with quiet_library():
            AutoModelForCausalLM.from_config(config).save_pretrained(model)
    fixed = {
        "model": str(model),
        "data.train": str(train),
        "device": "cpu",
        "steps": 2,
        "data.max_length": 400,
        "data.too_long": "drop",
        "batch.samples_per_step": 5,
        "batch.tokens_per_microbatch": 512,
        "data.cache": str(folder / "cache"),
    }
    return from_mapping(RunConfig, fixed | keys)


def _resident() -> float:
    """The largest resident set so far, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="configurations whose name has this")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    print(f"{'':46} {'memory, MiB':>27} {'step, CPU s':>23} {'resident':>9}")
    print(f"{'':46} {'predicted measured ratio':>27} {'pred. measured ratio':>23} {'MiB':>9}")
    results, missed = [], False
    for title, cases in (("seen", SEEN), ("held out", HELD_OUT)):
        print(title)
        for name in cases:
            if arguments.only not in name:
                continue
            spawn = multiprocessing.get_context("spawn")
            with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn) as pool:
                found = pool.submit(one, name, Path(folder)).result()
            results.append(found)
            missed |= cases is HELD_OUT and _is_off(found)
            print(_row(found), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    return int(missed)


def _row(found: dict[str, Any]) -> str:
    cells = [f"  {found['name']:44}"]
    for name, form in (("memory", "9,.0f"), ("step", "8.2f")):
        predicted, measured = found[name]
        cells.append(f"{predicted:{form}} {measured:{form}} {predicted / measured:6.3f}")
    return " ".join([*cells, f"{found['resident']:8,.0f}"])


def _is_off(found: dict[str, Any]) -> bool:
    ratios = {name: found[name][0] / found[name][1] for name in LIMITS}
    return any(abs(ratios[name] - 1) > limit for name, limit in LIMITS.items())


if __name__ == "__main__":
    sys.exit(main())
