"""One run of ``taut grpo``: ``python train_taut_grpo.py JOB.json``.

Modes: ``shared`` (the default), ``unshared`` (each completion is trained with the prompt to itself) and ``everything``
(groups without a signal are computed too). The checks
before a run, and the evaluation and the checkpoints after it, are off: what is timed is the steps. No token ends a
completion, so that all have the same length; each of several turns goes on as if a token had.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from phases import Phases, peak_mb

from taut.commands import train
from taut.config import from_mapping
from taut.inference.local import LocalEngine
from taut.losses.policy import PolicyGradient
from taut.methods.grpo import Grpo
from taut.models.cpu import cpu_matmul
from taut.rl import online
from taut.train import trainer

Job = dict[str, Any]
OFF = {"check": "off", "stop_check.prompts": 0, "contract.prompts": 0, "checkpoint.every": 0}
REWARD = Path(__file__).with_name("reward.py")
TURNS = Path(__file__).with_name("turns.py")


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    out = Path(job["scratch"], "run")
    phases = watch(is_agent=job["turns"] > 1)
    if job["mode"] == "everything":
        PolicyGradient.is_silent = lambda *_: False  # type: ignore[method-assign]
    import_mb = peak_mb()
    keys: dict[str, Any] = {
        "model": job["model"],
        "data": {"train": job["data"]},
        "out": str(out),
        "steps": job["num_steps"],
        "dtype": job["dtype"],
        "device": "cpu",
        "batch": {
            "samples_per_step": job["prompts_per_step"],
            "tokens_per_microbatch": job["tokens_at_a_time"],
            "share_prefixes": job["mode"] != "unshared",
            "shuffle": False,
        },
        "optim": {
            "learning_rate": job["learning_rate"],
            "schedule": "constant",
            "warmup_steps": 0,
        },
        "rollout": {"n": job["group"], "max_new_tokens": job["new_tokens"]},
        "rewards": f"{REWARD}:share_of_row",
        "grading": {"workers": 1},
        "grpo": job["taut"],
    }
    if job["turns"] > 1:
        own = {"name": f"{TURNS}:Turns", "max_turns": job["turns"]}
        keys["rollout"] |= {"environment": own}
    if "cpu_matmul" in job:
        keys["cpu_matmul"] = job["cpu_matmul"]
    train.train(from_mapping(Grpo, keys | OFF))
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["kind"] == "step"]
    rolled = [event for event in events if event["kind"] == "rollout"]
    steps = [
        timed
        | {
            "loss": step["loss"],
            "prompt_tokens": step["num_tokens_unshared"] - step["num_targets"],
            "completion_tokens": step["num_targets"],
            "distinct_tokens": step["num_tokens"],
            "reward": roll["reward"],
            "entropy": step["entropy_estimate"],
        }
        for timed, step, roll in zip(phases.steps, trained, rolled, strict=True)
    ]
    result = {
        "steps": steps,
        "peak_mb": phases.peak_mb + phases.helpers_mb,
        "helpers_mb": phases.helpers_mb,
        "import_mb": import_mb,
        "cpu_matmul": cpu_matmul.active().name,
    }
    Path(job["result"]).write_text(json.dumps(result))


def watch(*, is_agent: bool) -> Phases:
    """The phases of each step. ``is_agent``: a completion of full length is a turn like any other."""
    phases = Phases()
    phases.watch(online.Online, "_new_phase", "scoring")
    phases.watch(LocalEngine, "generate", "generation")
    phases.watch(trainer, "fill_streams", "scoring")
    if is_agent:
        generate = LocalEngine.generate

        def ended(*args: Any, **kwargs: Any) -> Any:
            return [replace(done, finish_reason="stop") for done in generate(*args, **kwargs)]

        LocalEngine.generate = ended  # type: ignore[method-assign]
    take_step, make = trainer._take_step, LocalEngine.__init__

    def timed(running: trainer.Trainer, step: int) -> None:
        if step == 1:
            phases.begin()
        take_step(running, step)
        phases.end_step()

    def without_stops(engine: LocalEngine, *args: Any, **kwargs: Any) -> None:
        make(engine, *args, **kwargs)
        engine.stop_ids = frozenset()

    trainer._take_step, LocalEngine.__init__ = timed, without_stops  # type: ignore[method-assign]
    return phases


main()
