"""Rows to samples to micro-batches.

read            records and their places: sources, file formats, rows in memory, streams
rows            a record as a validated row: schema, messages, prompts, tool calls
render          a row as token ids and targets, through the chat template; where turns end, the stop set
store           samples on disk: shards, the cache, pretokenized data, remote shards, a teacher's top logprobs

tokenize        these four for a whole source, in one process or several
dataset         the samples of a configuration by index
stream          the samples of rows that arrive while a run trains
order           the samples of each step; ``large_epoch`` without an array over them
batching        the micro-batches of a step
packing         the layout of a micro-batch, common prefixes once
label_noise     contradictions and flipped labels in preference data

``taut.data.stats(...)`` and the like are the commands ``taut data stats`` and the like.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import Any


def __getattr__(name: str) -> Any:
    is_file = name.startswith("_") or util.find_spec(f"{__name__}.{name}") is not None
    functions = None if is_file else import_module("taut.commands.functions")
    if functions and (function := functions.find(f"data.{name}")):
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
