"""``taut tokenise``: the tokenised data of a run, made before it, with processors alone.

Reads, renders and fits the rows of ``data.train`` and ``data.eval`` as a run of the same settings does, and keeps them
in ``data.cache``, where the run finds them. With ``out=DIR`` in the command they are written to DIR instead, which is a
source of runs then, here or copied elsewhere (``taut.data.ahead``); an ``out`` of the file is the run's. Loads no
weights. What was interrupted goes on where it ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from taut.config import load, replace, user_path
from taut.data import ahead
from taut.data.cache import directory_of
from taut.data.dataset import Dataset, Split, limits_of, open_sources
from taut.errors import ConfigError
from taut.io.terminal import Terminal
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig, class_of
from taut.run.inputs import load_inputs
from taut.train import distributed


def main(path: Path | None, overrides: Sequence[str]) -> None:
    """The command."""
    named = [word.partition("=")[2] for word in overrides if _key(word) == "out"]
    rest = [word for word in overrides if _key(word) != "out"]
    run = load(class_of(path, rest), path, rest)
    if run.generates:
        raise ConfigError(
            f"method={run.method} learns from completions that it generates, and its prompts are read again each "
            "time; expected a method that learns from answers in the data; leave the command out"
        )
    if not named:
        tokenise(run)
        return
    directory = user_path(named[-1], "out").absolute()
    ahead.require_new(directory)
    tokenise(replace(run, {"data": {"cache": str(directory)}}), directory)


def _key(word: str) -> str:
    return word.partition("=")[0].strip()


def tokenise(run: RunConfig, directory: Path | None = None) -> None:
    """Tokenise the data of ``run`` into its cache, and print what they are. ``directory``: the cache, where it is to be
    a source of runs.
    """
    if run.data.is_stream:
        raise ConfigError(
            "data.train is a stream, which a run tokenises as its rows come; expected files that are complete; leave "
            "the command out, or take data.streaming out"
        )
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    if ranks.is_writer:
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
