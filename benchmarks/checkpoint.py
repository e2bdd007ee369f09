"""What saving costs a run: ``python benchmarks/checkpoint.py``.

SmolLM2-135M-Instruct trains, as ``taut sft`` builds it, and is saved by taut's own ``Checkpoints``, AdamW's state too:

    full    every weight trains: weights and two moments, 1.6 GB
    lora    adapters of rank 16 train

One process a case. The ways to save take turns, round after round, each after steps that nothing disturbs:

    synchronous    checkpoint.background=false
    background     as it comes; training goes on until it is written
    torch.save     the same tensors to one file, forced to the disk; no checksum
    async_save     torch.distributed.checkpoint's, as it comes; training goes on until it is written; no checksum

Reported, medians of rounds, where memory is taken the first save by itself:

    waits      seconds until training goes on
    writes     seconds until the checkpoint is complete: taut's forced to the disk, every file's SHA-256 noted, named
    costs      seconds it takes from training in all: what it waits, and what the steps beside the writing take longer
    CPU s      processor time it takes in all, which other work on the machine disturbs less

What is checked, in every round: the background checkpoint, read back, is bit for bit the state at the save, which the
steps beside have changed; in one more save the state is overwritten as soon as ``save`` returns.
Results go to a JSON file and a table. Exit status 1 if a background save, the first or a median later one, keeps
training waiting for a tenth of a synchronous one or more, or what is saved is not the state.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver

from saves import WAYS, Clock, Save, Took, print_case, summarize
from sft import matches
from taut.config import from_mapping
from taut.methods.method import RunConfig
from taut.run.inputs import load_inputs
from taut.run.setup import build
from taut.train import checkpoint, distributed, sharded
from taut.train.checkpoint import Checkpoints
from taut.train.run_dir import CHECKPOINTS, claim
from taut.train.settings import CheckpointConfig
from taut.train.trainer import Trainer, train_step
from taut_tools.demo.fetch import get_model

Result = dict[str, Any]

CASES: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora.rank": 16}}
NUM_STEPS = 100_000
"""Of the run, which is never finished."""
NUM_QUIET = 2
"""Steps before each save that nothing disturbs."""
NUM_CHATS = 64


@dataclass
class Stepped:
    """A run that is taken step by step, and its state."""

    trainer: Trainer
    out: Path
    step: int = 0
    quiet: list[Took] = field(default_factory=list)
    """Steps that nothing disturbed."""

    def take(self) -> Took:
        """One more step."""
        self.step += 1
        clock = Clock()
        train_step(self.trainer, self.step)
        return clock()

    def take_until(self, is_done: Callable[[], bool]) -> list[Took]:
        """Steps beside something else, one at least."""
        steps = [self.take()]
        while not is_done():
            steps.append(self.take())
        return steps

    def rest(self) -> None:
        """Steps that nothing disturbs."""
        self.quiet += [self.take() for _ in range(NUM_QUIET)]

    @property
    def state(self) -> sharded.State:
        return sharded.training_state(self.trainer.scorer, self.trainer.optimizer)

    def checkpoints(self, name: str, *, background: bool) -> tuple[Checkpoints, list[Result]]:
        """taut's own, in a directory of their own, and the events they will emit."""
        out, events = self.out / name, list[Result]()
        claim(out, {}, overwrite=False)
        made = Checkpoints(
            folder=out / CHECKPOINTS,
            config=CheckpointConfig(every=1, keep=1, background=background),
            is_due=lambda step: True,
            scorer=self.trainer.scorer,
            optimizer=self.trainer.optimizer,
            num_steps=NUM_STEPS,
            ranks=self.trainer.ranks,
            emit=lambda kind, **fields: events.append({"kind": kind, **fields}),
            notes=lambda step: {
                "cursor": self.trainer.source.cursor(step),
                "loss": 0.0,
                "identity": {"config": {}},
            },
        )
        return made, events


def make(model: Path, work: Path, keys: dict[str, Any], threads: int) -> Stepped:
    """The run as taut builds it, on chats of random words."""
    torch.set_num_threads(threads)
    rng = random.Random(0)
    text = [" ".join(str(rng.randrange(1000)) for _ in range(8)) for _ in range(2 * NUM_CHATS)]
    turns = [{"role": ("user", "assistant")[k % 2], "content": said} for k, said in enumerate(text)]
    chats = [turns[k : k + 2] for k in range(0, len(turns), 2)]
    train = work / "train.jsonl"
    train.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    fixed = {"model": str(model), "data.train": str(train), "steps": NUM_STEPS, "dtype": "float32"}
    run = from_mapping(RunConfig, {**fixed, "device": "cpu", "batch.samples_per_step": 2, **keys})
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    built = build(run, inputs, run.plan(inputs.train), ranks, emit=lambda kind, **fields: None)
    return Stepped(built.trainer, work)


def measure(stepped: Stepped, rounds: int) -> Result:
    """All ways to save, round after round."""
    for _ in range(2):
        stepped.take()
    synchronous, _ = stepped.checkpoints("synchronous", background=False)
    background, events = stepped.checkpoints("background", background=True)
    staging = prepare(stepped, background)
    turns: list[dict[str, Save]] = []
    is_right = True
    for number in range(rounds):
        turn = {}
        for label in WAYS:
            stepped.rest()
            if label == "background":
                turn[label], is_same = save_beside(stepped, background, events)
                is_right &= is_same
            elif label == "synchronous":
                turn[label] = save_first(lambda: synchronous.save(stepped.step))
            elif label == "torch.save":
                turn[label] = save_first(lambda: torch_save(stepped))
            else:
                turn[label] = async_save(stepped)
        turns.append(turn)
        said = ", ".join(f"{label} {save.waits:.3f}" for label, save in turn.items())
        print(f"  round {number + 1}, seconds waited: {said}", flush=True)
    is_right &= overwrite_at_once(stepped, background)
    found = {"staging": staging, "resume": resume(stepped, background), "is_right": is_right}
    for some in (synchronous, background):
        some.close()
    return found | summarize(turns, stepped.quiet)


def prepare(stepped: Stepped, background: Checkpoints) -> Result:
    """What room for the copy takes, once: alone, and beside the first steps as in a run."""
    num_bytes, clock = sharded.num_bytes(stepped.state), Clock()
    room = sharded.allocate(stepped.state)
    alone = clock()
    assert sharded.num_bytes(room) == num_bytes
    del room
    background.prepare()
    assert background._room is not None
    steps = stepped.take_until(background._room.done)
    return {"bytes": num_bytes, "seconds": alone.seconds, "steps": steps}


def save_first(save: Callable[[], object]) -> Save:
    """A save that is over before training goes on."""
    clock = Clock()
    save()
    took = clock()
    return Save(took.seconds, took.cpu, [], took.seconds)


def save_beside(
    stepped: Stepped, background: Checkpoints, events: list[Result]
) -> tuple[Save, bool]:
    """Save while training goes on, and whether what was saved is the state that has changed since."""
    expected = {name: tensor.clone() for name, tensor in stepped.state.items()}
    clock = Clock()
    background.save(stepped.step)
    waits = clock().seconds
    assert background._pending is not None
    steps = stepped.take_until(background._pending.done)
    background.settle()
    save = Save(waits, clock().cpu, steps, waits + events[-1]["seconds"])
    state = stepped.state
    is_changed = any(not torch.equal(state[name], tensor) for name, tensor in expected.items())
    return save, is_changed and is_saved(expected, background)


def overwrite_at_once(stepped: Stepped, background: Checkpoints) -> bool:
    """Whether what is saved is the state although this is overwritten as soon as ``save`` returns."""
    stepped.take()
    state = stepped.state
    expected = {name: tensor.clone() for name, tensor in state.items()}
    background.save(stepped.step)
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(7.0)
    background.settle()
    is_right = is_saved(expected, background)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(expected[name])
    return is_right


def is_saved(expected: sharded.State, checkpoints: Checkpoints) -> bool:
    """Whether the newest checkpoint, read back, is this bit for bit."""
    saved, _ = checkpoint.find_newest(checkpoints.folder, checkpoints.ranks, skip_damaged=False)
    assert saved is not None
    found = {name: torch.full_like(tensor, 3.0) for name, tensor in expected.items()}
    sharded.read(found, saved.path, checkpoints.ranks)
    return all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def resume(stepped: Stepped, background: Checkpoints) -> Result:
    """Checking and loading the newest checkpoint, its files read from the disk for the checking."""
    files = list(background.folder.glob("step-*/*"))
    for path in files:
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)
    began = time.perf_counter()
    saved, _ = checkpoint.find_newest(background.folder, background.ranks, skip_damaged=False)
    assert saved is not None
    verified = time.perf_counter()
    background.resume(saved)
    return {
        "verify": verified - began,
        "load": time.perf_counter() - verified,
        "bytes": sum(path.stat().st_size for path in files),
    }


def torch_save(stepped: Stepped) -> None:
    trainer, path = stepped.trainer, stepped.out / "peer.pt"
    with path.open("wb") as file:
        trained = {n: p for n, p in trainer.scorer.named_parameters() if p.requires_grad}
        torch.save({"model": trained, "optimizer": trainer.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def async_save(stepped: Stepped) -> Save:
    """torch's own, of the same tensors."""
    with tempfile.TemporaryDirectory(dir=stepped.out) as place:
        clock, ends = Clock(), list[float]()
        saving = state_dict_saver.async_save(stepped.state, checkpoint_id=place, no_dist=True)
        waits = clock().seconds
        assert isinstance(saving, Future)
        saving.add_done_callback(lambda _: ends.append(clock().seconds))
        steps = stepped.take_until(saving.done)
        saving.result()
        return Save(waits, clock().cpu, steps, ends[0])


def run_case(name: str, model: Path, work: Path, threads: int, rounds: int) -> Result:
    """One case, in a process of its own."""
    print(name, flush=True)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    with tempfile.TemporaryDirectory(dir=work) as place:
        return measure(make(model, Path(place), CASES[name], threads), rounds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases", nargs="*", default=[], help="words: cases whose name has one of them"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/taut"), help="where the demo keeps the model"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/benchmarks/checkpoint.json"),
        help="the checkpoints are written, and removed, beside it",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    model = get_model(arguments.cache.expanduser())
    work = arguments.out.parent
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    results: dict[str, Result] = {}
    spawn = multiprocessing.get_context("spawn")
    for name in CASES:
        if matches(name, arguments.cases):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                trainer = (name, model, work, arguments.threads, arguments.rounds)
                results[name] = process.submit(run_case, *trainer).result()
    for name, found in results.items():
        print_case(name, found)
    whole = {"threads": arguments.threads, "cases": results}
    arguments.out.write_text(json.dumps(whole, indent=1))
    print(f"\n{arguments.out}")
    return int(not all(found["is_met"] and found["is_right"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
