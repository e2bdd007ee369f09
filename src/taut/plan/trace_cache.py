"""What was traced, kept in the cache directory, so that a plan of the same shapes takes no second trace.

    with keeping(directory_of(run.data.cache)):
        traced = kept(Traced, run, [config, kernels, packed], make)

A trace depends on the code, the configurations of the models, the settings of the run that are not ``UNREAD``, and the
layout of a micro-batch; it is found by a digest of all of them. So a plan for a GPU with as much memory, with another
learning rate or another file of the same lengths reads what the plan before it has measured. Numbers are those of the
trace itself, to the byte. A file that cannot be read or written is as none: the trace is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from transformers import PreTrainedConfig

import taut
from taut.config import to_dict
from taut.io import files
from taut.methods.method import RunConfig
from taut.rewards.registry import models_of
from taut.types import Packed, Sample

UNREAD = (
    *("model", "out", "data", "steps", "epochs", "seed", "check", "checks", "device", "resume"),
    *("overwrite", "eval", "checkpoint", "loss_monitor", "stop_check", "save", "contract", "log"),
    *("grading", "rollout_monitor", "gpus", "gpu", "gpu_memory", "headroom", "measure"),
    "alternatives",
)
"""Keys that no trace depends on: of a model its configuration counts, of data the layout of a micro-batch."""
LAYOUT = (
    *("reach_T", "last_T", "predictor_N", "row_N", "read_R", "row_R", "end_S", "better_P"),
    "worse_P",
)
LIMIT = 2**26
"""Largest file, in bytes."""

_folder: ContextVar[Path | None] = ContextVar("traces", default=None)
T = TypeVar("T")


@contextmanager
def keeping(directory: Path) -> Iterator[None]:
    """Keep what is traced inside in this cache directory, and read it from there."""
    token = _folder.set(directory / "traces")
    try:
        yield
    finally:
        _folder.reset(token)


def kept(kind: type[T], run: RunConfig, about: Sequence[Any], make: Callable[[], T]) -> T:
    """What ``make`` returns, or returned before for the same run and all that it is ``about``: configurations, settings
    of the computation, micro-batches, samples.
    """
    folder = _folder.get()
    if folder is None or any(isinstance(one, Packed) and one.media for one in about):
        return make()
    settings = {key: value for key, value in to_dict(run).items() if key not in UNREAD}
    settings["optim"] = [run.optim.name, run.optim.state]
    others = [*run.models().paths, *(one.model for one in models_of(run.training_rewards).values())]
    places = [Path(path) for path in (*others, run.lora.adapter) if path is not None]
    shapes = [file for path in places for file in sorted(path.glob("*config.json"))]
    described = [kind.__name__, settings, *map(_described, about), *map(files.digest, shapes)]
    text = json.dumps([_code(), *described], sort_keys=True, default=str)
    adapter: pydantic.TypeAdapter[T] = pydantic.TypeAdapter(kind)
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):
        return adapter.validate_json(files.read_regular(file, LIMIT))
    made = make()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_bytes(file, adapter.dump_json(made))
    return made


def _described(one: Any) -> Any:
    """A value as JSON, with digests in place of arrays."""
    if isinstance(one, PreTrainedConfig):
        return one.to_dict()
    if isinstance(one, Packed):
        arrays = {name: getattr(one, name) for name in LAYOUT}
        digests = {
            name: hashlib.sha256(array.numpy().tobytes()).hexdigest()
            for name, array in arrays.items()
            if array is not None
        }
        shapes = {name: value.shape for name, value in one.streams.items()}
        return [digests, shapes, sorted(one.values), sorted(one.read_values)]
    if isinstance(one, Sample):
        return [one.num_tokens, one.target_at_N[:1].tolist()]
    return str(one)


@cache
def _code() -> list[str]:
    """The code that a trace runs: a digest of this package, and versions of others."""
    package = Path(taut.__file__).parent
    sources = (file.read_bytes() for file in sorted(package.rglob("*.py")))
    digest = hashlib.sha256(b"".join(sources)).hexdigest()
    return [digest, *(version(name) for name in ("torch", "transformers", "peft"))]
