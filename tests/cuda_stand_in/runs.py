"""A run of taut on the stand-in, and the same on the CPU in float64 beside it.

``run(case)`` is called in a process with the stub (processes.py). Each step ends with a mark, so that what the steady
step waits for, copies and takes is known by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.cuda_stand_in import torch_cuda
from tests.cuda_stand_in.cases import Case, Found
from tests.cuda_stand_in.device import CUDA, Device, active
from tests.helpers import judged_runs, online_runs, picture_runs
from tests.helpers.chat_runs import QUIET, chats, column, save_model, write_rows
from tests.helpers.vision_models import EVERY, tiny_vlm

import taut
from taut.run import lifecycle
from taut.train import trainer

FIXED: dict[str, Any] = {"check": "off", "contract.prompts": 0, "steps": 3}
HELD_OUT = ("eval.every", "eval.best", "eval.answers.every")
"""Keys with which rows are held out."""
ON_CUDA: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
LIKE = {"llama": {"head_dim": 16}, "qwen3": {"head_dim": 16}}
"""Options of tests.helpers.tiny_models, for heads that the kernels take."""


class Saved(BaseException):
    """The run has reached its end."""


def run(case: Case) -> Found:
    """Run it. Raises what taut raises."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        keys = {**keys_of(case, place), **case.keys}
        if not case.is_saved:
            lifecycle.save_model = _saved
        expected = None
        if case.beside_cpu:
            own = {key for key in ("dtype", "attention", "device", "tf32") if key in case.keys}
            on_cpu = {key: value for key, value in keys.items() if key not in own} | {
                key: QUIET[key] for key in own if key in QUIET
            }
            expected = _losses({**on_cpu, "out": str(place / "cpu")})
        began = time.process_time()
        device = Device(has_numbers=case.has_numbers)
        torch_cuda.install(has_numbers=case.has_numbers)
        if case.before is not None:
            module, _, name = case.before.partition(":")
            getattr(__import__(module, fromlist=[name]), name)()
        trainer._take_step = _marking(trainer._take_step, device)
        with active(device):
            losses = _losses({**keys, **ON_CUDA, **case.keys, "out": str(place / "cuda")})
        device.mark()
        *steps, after = device.marks
        seconds = time.process_time() - began
        return Found(losses, expected, steps, after, device.peak, seconds)


def step_of(
    size: str, *, is_lora: bool, tokens: int, sample: int, recomputes: Any = False
) -> Found:
    """The second step of a model of ``benchmarks.on_gpu.sizes``, as shapes alone: one micro-batch of ``tokens`` in
    samples of ``sample``, half of each a prompt. The first makes the optimizer's moments.
    """
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import numpy as np

    from data import Row
    from on_gpu import ours
    from on_gpu.sizes import SIZES
    from taut.models.recompute import recompute_activations

    torch_cuda.install(has_numbers=False)
    device, model, draw = Device(has_numbers=False), SIZES[size], np.random.default_rng(0)
    rows = [
        Row(draw.integers(5, model.vocab, sample).tolist(), sample // 2)
        for _ in range(tokens // sample)
    ]
    began = time.process_time()
    with active(device):
        scorer, _ = ours.scorer_of(model, CUDA, is_lora=is_lora)
        if recomputes:
            recompute_activations(scorer.model, recomputes)
        train = ours.trainer_of(scorer, [rows], CUDA, tokens, "packed")
        for step in (1, 2):
            device.mark()
            ours.train_step(train, step)
        device.mark()
    steps = device.marks[1:]
    return Found([], None, steps, steps[-1], device.peak, time.process_time() - began)


def keys_of(case: Case, place: Path) -> dict[str, Any]:
    """The keys of a small run of the method on a model of the family, with rows and models in ``place``."""
    method, family = case.method, case.family
    if family in EVERY:
        model = tiny_vlm(family, place / "model")
        return picture_runs.keys_of(method, model, place / "rows") | {"steps": 3}
    like = LIKE.get(family, {})
    model = save_model(place / "model", family, **like)
    if method in online_runs.METHODS_KEYS:
        save_model(place / "beside", family, **like, seed=1)
        return online_runs.keys_of(method, model, place) | FIXED
    if method in judged_runs.METHODS:
        return judged_runs.keys_of(method, model, place / "rows") | FIXED
    train = str(write_rows(place / "train.jsonl", chats(24)))
    given = {"method": method, "model": str(model), "data.train": train, **QUIET, **FIXED}
    if any(key in case.keys for key in HELD_OUT):
        given["data.eval"] = str(write_rows(place / "eval.jsonl", chats(5, seed=5)))
    if method == "distill":
        given["distill.teacher"] = str(save_model(place / "teacher", family, **like, seed=1))
    return given


def _losses(keys: dict[str, Any]) -> list[float]:
    out = Path(keys["out"])
    with contextlib.suppress(Saved):
        getattr(taut, keys.pop("method"))(**keys)
    return column(out, "loss")


def _saved(*_: Any, **__: Any) -> None:
    raise Saved


def _marking(take_step: Callable[..., None], device: Device) -> Callable[..., None]:
    def take(*args: Any) -> None:
        take_step(*args)
        if device.notes or device.kernels:  # the CPU's run marks nothing
            device.mark()

    return take


os.environ.setdefault("HF_HUB_OFFLINE", "1")
