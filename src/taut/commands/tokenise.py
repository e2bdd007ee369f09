"""``taut tokenise``: the tokenised data of a run, made before it, with processors alone.

Reads, renders and fits the rows of ``data.train`` and ``data.eval`` as a run of the same settings does, and keeps them
in ``data.cache``, where the run finds them. Loads no weights. What was interrupted goes on where it ended.
"""

from __future__ import annotations

from taut.data.cache import directory_of
from taut.errors import ConfigError
from taut.io.terminal import Terminal
from taut.methods.method import RunConfig
from taut.run.inputs import load_inputs
from taut.train import distributed


def tokenise(run: RunConfig) -> None:
    """Tokenise the data of ``run`` into its cache, and print what they are."""
    if run.generates:
        raise ConfigError(
            f"method={run.method} learns from completions that it generates, and its prompts are read again each "
            "time; expected a method that learns from answers in the data; leave the command out"
        )
    if run.data.is_stream:
        raise ConfigError(
            "data.train is a stream, which a run tokenises as its rows come; expected files that are complete; leave "
            "the command out, or take data.streaming out"
        )
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    if ranks.is_writer:
        lines = []
        for split, data in (("train", inputs.train), ("eval", inputs.eval)):
            if data is not None:
                lines += [f"data.{split}: {decision}" for decision in data.report.decisions]
                lines.append(f"data.{split}: {data.report}")
        Terminal(soft_wrap=True).lines([*lines, f"kept in {directory_of(run.data.cache)}"])
    distributed.stop(ranks)
