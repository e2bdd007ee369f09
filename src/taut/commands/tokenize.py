"""``taut tokenize``: tokenize the data of a run ahead of it, without a GPU.

Reads, renders and fits the rows of ``data.train`` and ``data.eval`` like a run with the same settings, and keeps them
in ``data.cache``, where the run finds them. ``out=DIR`` on the command line writes them to DIR instead, which can be
the source of runs, here or copied elsewhere (``taut.data.store.pretokenized``); an ``out`` in the file is the run's.
Loads no weights. An interrupted command continues from its finished parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from taut.config import load, replace, user_path
from taut.data.dataset import Dataset, limits_of, open_sources
from taut.data.settings import Split
from taut.data.store import pretokenized as ahead
from taut.data.store.cache import directory_of
from taut.errors import ConfigError
from taut.io.terminal import Terminal
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig, class_of
from taut.run.inputs import load_inputs
from taut.train import distributed


def main(path: Path | None, overrides: Sequence[str]) -> None:
    """Run the command."""
    named = [word.partition("=")[2] for word in overrides if _key(word) == "out"]
    rest = [word for word in overrides if _key(word) != "out"]
    run = load(class_of(path, rest), path, rest)
    if run.generates:
        raise ConfigError(
            f"method={run.method} learns from completions that it generates, and reads its prompts each time; expected "
            "a method that learns from answers in the data; leave the command out"
        )
    if not named:
        tokenize(run)
        return
    directory = user_path(named[-1], "out").absolute()
    ahead.require_new(directory)
    tokenize(replace(run, {"data": {"cache": str(directory)}}), directory)


def _key(word: str) -> str:
    return word.partition("=")[0].strip()


def tokenize(run: RunConfig, directory: Path | None = None) -> None:
    """Tokenize the data of ``run`` into its cache, and print a description of them. ``directory``: the cache, if it is
    to be a source of runs.
    """
    if run.data.is_stream:
        raise ConfigError(
            "data.train is a stream, which a run tokenizes as its rows come; expected files that are complete; leave "
            "the command out, or take data.streaming out"
        )
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    if ranks.is_writer:
        # what a run would report of its data
        splits: dict[Split, Dataset] = {"train": inputs.train}
        if inputs.eval is not None:
            splits["eval"] = inputs.eval
        lines = []
        for split, data in splits.items():
            lines += [f"data.{split}: {decision}" for decision in data.report.decisions]
            lines.append(f"data.{split}: {data.report}")
        if directory is None:
            lines.append(f"kept in {directory_of(run.data.cache)}")
        else:
            _write(directory, run, inputs, splits)
            lines.append(f"written {directory}: train on it with data.train={directory}")
        Terminal(soft_wrap=True).lines(lines)
    distributed.stop(ranks)


def _write(
    directory: Path, run: RunConfig, inputs: Inputs, splits: Mapping[Split, Dataset]
) -> None:
    """Make the directory a source of runs."""
    limits = limits_of(run.data, inputs.max_length)
    settings = ahead.settings_of(run.data, run.row_kind, inputs.renderer, limits)
    ahead.write(
        directory,
        settings,
        {
            split: list(zip(data.parts, open_sources(run.data, split, run.row_kind), strict=True))
            for split, data in splits.items()
        },
    )
