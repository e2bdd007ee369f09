"""What was traced, kept in the cache directory (``traces/``), so that a plan of the same shapes takes no second trace.

    @kept
    def trace(run, config, kernels, packed): ...

A trace depends on the code, the configurations of the models, the settings of the run that are not ``UNREAD``, and the
layout of a micro-batch; it is found by a digest of all of them. So a plan for a GPU with as much memory, with another
learning rate or another file of the same lengths reads what the plan before it has measured. Numbers are those of the
trace itself, to the byte. A file that cannot be read or written is as none: the trace is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

import pydantic
from transformers import PreTrainedConfig

from taut.config import to_dict
from taut.data.store.cache import directory_of
from taut.io import files
from taut.methods.method import RunConfig
from taut.rewards.registry import models_of
from taut.types import Packed

UNREAD = """
    model out data steps epochs seed check checks device resume overwrite eval checkpoint loss_monitor stop_check save
    contract log grading rollout_monitor gpus gpu gpu_memory headroom measure alternatives
"""
"""Keys that no trace depends on: of a model its configuration counts, of data the layout of a micro-batch."""
LIMIT = 2**26
"""Largest file, in bytes."""

P = ParamSpec("P")
T = TypeVar("T")


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """The function ``make``, of a run and of configurations, settings of the computation, and micro-batches or samples;
    what it returned before for the same ones is read.
    """

    @wraps(make)
    def found(*given: P.args, **keywords: P.kwargs) -> T:
        arguments: Any = [*given, *keywords.values()]
        folder = directory_of(arguments[0].data.cache) / "traces"
        if any(getattr(one, "media", ()) for one in arguments):  # sizes of pictures are values
            return make(*given, **keywords)
        kind: pydantic.TypeAdapter[T] = pydantic.TypeAdapter(get_type_hints(make)["return"])
        text = json.dumps([_code(), make.__name__, *map(_described, arguments)], default=str)
        file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        with suppress(OSError, ValueError):
            return kind.validate_json(files.read_regular(file, LIMIT))
        made = make(*given, **keywords)
        if not made:  # there was nothing to trace
            return made
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            files.write_bytes(file, kind.dump_json(made))
        return made

    return found


def _described(one: Any) -> Any:
    """A value as JSON; of files and of the layout of a micro-batch a digest."""
    if isinstance(one, RunConfig):
        judges = [judge.model for judge in models_of(one.training_rewards).values()]
        places = [Path(path) for path in (*one.models().paths, *judges, one.lora.adapter) if path]
        shapes = [files.digest(file) for at in places for file in sorted(at.glob("*config.json"))]
        read = {key: value for key, value in to_dict(one).items() if key not in UNREAD.split()}
        return [{**read, "optim": [one.optim.name, one.optim.state]}, shapes]
    if isinstance(one, Packed):
        arrays = (one.reach_T, one.predictor_N, one.read_R)
        return hashlib.sha256(b"|".join(a.numpy().tobytes() for a in arrays)).hexdigest()
    if trees := getattr(one, "trees", ()):
        samples = [sample for tree in trees for sample in tree.samples]
        return [(sample.num_tokens, sample.target_at_N[:1].tolist()) for sample in samples]
    return one.to_dict() if isinstance(one, PreTrainedConfig) else str(one)


@cache
def _code() -> list[str]:
    """The code that a trace runs: a digest of this package, and versions of others."""
    return [files.source_digest(), *map(version, ("torch", "transformers", "peft"))]
