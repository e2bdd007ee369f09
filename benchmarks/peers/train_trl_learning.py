"""One run of TRL's GRPOTrainer for ``benchmarks/learning.py``, in TRL's environment, with a JOB.json.

Its defaults stay but for what must be equal for all (float32, prompts a step, group, temperature, length of a
completion, learning rate, its warm-up and its linear fall) and for what only costs time on a CPU (activation
checkpointing). The reward is 1 for the right answer. After some of the steps greedy answers to the held-out questions
are judged; that time is not counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Row = dict[str, Any]


def read(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def exact(
    completions: list[list[dict[str, str]]], answer: list[str], **columns: Any
) -> list[float]:
    """1 for the right answer."""
    said = [completion[0]["content"] for completion in completions]
    return [float(a.lower() == b.lower()) for a, b in zip(said, answer, strict=True)]


class Watch(TrainerCallback):
    """The curve: accuracy and stop rate after some of the steps, and seconds of training until then."""

    def __init__(self, job: Row) -> None:
        self.job, self.rows = job, read(job["eval"])
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
        self.seconds, self.cpu_seconds, self.curve = 0.0, 0.0, []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def begin(self) -> None:
        self.since, self.cpu_since = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.monotonic() - self.since
        self.cpu_seconds += time.process_time() - self.cpu_since
        if state.global_step in self.job["steps"]:
            self.curve.append(self.measure(kwargs["model"], state.global_step))
        self.begin()

    @torch.no_grad()
    def measure(self, model: Any, step: int) -> Row:
        """Greedy answers to all held-out questions."""
        was_training = model.training
        model.eval()
        prompts = [row["prompt"] for row in self.rows]
        asked = self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        end = self.tokenizer.eos_token_id
        done = model.generate(**asked, max_new_tokens=self.job["new_tokens"], do_sample=False)
        new = done[:, asked["input_ids"].shape[1] :]
        model.train(was_training)
        said = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        right = exact([[{"content": text}] for text in said], [row["answer"] for row in self.rows])
        return {
            "step": step,
            "samples": step * self.job["prompts"] * self.job["group"],
            "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2),
            "accuracy": sum(right) / len(right),
            "stopped": (new == end).any(dim=1).float().mean().item(),
        }


def main() -> None:
    job: Row = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    watch = Watch(job)
    size = job["prompts"] * job["group"]
    config = GRPOConfig(
        output_dir=job["out"],
        max_steps=job["steps"][-1],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="linear",
        warmup_steps=job["warmup_steps"],
        bf16=False,
        seed=job["seed"],
        num_generations=job["group"],
        max_completion_length=job["new_tokens"],
        temperature=job["temperature"],
        per_device_train_batch_size=size,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="sdpa"
        ),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(
            [{key: row[key] for key in ("prompt", "answer")} for row in read(job["train"])]
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[watch],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = {"curve": watch.curve, "rewards": [entry["reward"] for entry in logged]}
    (Path(job["out"]) / "result.json").write_text(json.dumps(result))


main()
