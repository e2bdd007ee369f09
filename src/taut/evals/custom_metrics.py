"""Metrics of the user on held-out data: ``eval.metrics=["FILE.py:function", ...]``.

    def accuracy(samples):                              of the tokens of data.eval
        right = sum((sample.predicted == sample.targets).sum() for sample in samples)
        return right / sum(len(sample.targets) for sample in samples)

    def words(answers):                                 of answers that the model generates (eval.answers)
        return sum(len(answer.text.split()) for answer in answers) / len(answers)

    words.smaller_is_better = True                      for eval.best and eval.stop_after

The name of its one parameter says what a function gets: all samples (``HeldOutSample``), sorted by their ids, or all
finished answers as rewards get them (``RewardInput``: text, references, row, ...). It returns a number, which events
and ``eval.best`` know by the function's name; one that is not finite is never the best.

The first rank calls it, in the process that trains, and sets the random generators back. It is tried before the run,
on a sample whose targets are all predicted, or on a right answer. An exception ends the run, with its line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from taut.config import home_path
from taut.errors import ConfigError
from taut.io.user_code import UserCode, read_user_code
from taut.train import random_state
from taut.train.distributed import Ranks
from taut.types import FloatArray, IntArray

TAKES = ("samples", "answers")
"""Names that the parameter may have."""


class HeldOutSample(NamedTuple):
    """A held-out sample, with what the model says of its N targets."""

    id: str
    ids: IntArray
    """All its ids."""
    targets: IntArray
    """[N]: the ids to be predicted."""
    logp: FloatArray
    """[N]: the log-probability of each, in nats."""
    predicted: IntArray
    """[N]: the likeliest id in the place of each."""


class CustomMetric(NamedTuple):
    """A function of the user's."""

    name: str
    takes: str
    """One of TAKES."""
    function: Callable[..., Any]
    code: UserCode


def read_metrics(specs: Sequence[str], ranks: Ranks) -> list[CustomMetric]:
    """The metrics of ``eval.metrics``, their files executed. Raises ConfigError on all ranks."""
    metrics: list[CustomMetric] = []

    def read() -> None:
        for spec in specs:
            path, label = home_path(spec.rpartition(":")[0]), f"eval.metrics has {spec}"
            code = read_user_code(spec, path, label, "function")
            function = code.load()
            parameters = inspect.signature(function).parameters.values()
            names = [one.name for one in parameters if one.default is one.empty]
            if len(names) != 1 or names[0] not in TAKES:
                raise ConfigError(
                    f"{label}: its parameters are {', '.join(names) or 'none'}; expected one, called "
                    f"{' or '.join(TAKES)}; rename it",
                    code="eval.metrics",
                )
            metrics.append(CustomMetric(code.name, names[0], function, code))

    ranks.run_everywhere(read)
    return metrics


def values_of(
    metrics: Sequence[CustomMetric], data: Sequence[Any], ranks: Ranks
) -> dict[str, float]:
    """name -> value, which the writer computes. Raises UserCodeError on all ranks."""

    def call(metric: CustomMetric) -> float:
        with random_state.kept(ranks.device):
            return float(metric.code.call("a number", lambda: float(metric.function(list(data)))))

    return ranks.run_on_writer(lambda: {metric.name: call(metric) for metric in metrics})
