"""Metrics of the user on held-out data: ``eval.metrics=["FILE.py:function", ...]``.

    def accuracy(targets, predicted):                   of the tokens of data.eval
        right = sum((t == p).sum() for t, p in zip(targets, predicted))
        return right / sum(map(len, targets))

    def words(answers):                                 of the answers that the model generates (eval.answers)
        return sum(len(answer.text.split()) for answer in answers) / len(answers)

    words.smaller_is_better = True                      for eval.best and eval.stop_after

A function is called with those of these that it names, lists with an entry for each sample of ``data.eval``, in order:

    targets     ids of the tokens to be predicted, int [N]
    logp        the log-probability of each, in nats, float [N]
    predicted   the most likely id in the place of each, int [N]
    ids         all ids of the sample, int [T]

or with ``answers``, all finished answers, each with ``text``, ``references``, ``row`` and the like, as rewards get them
(``RewardInput``). It returns a number, which events and ``eval.best`` know by the
function's name; one that is not finite is never the best.

The first rank calls it, in the process that trains, with random generators that are set back. It is tried before the
run on a sample whose every target is predicted, or on right answers. An exception ends the run, with its line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from taut.config import home_path
from taut.errors import ConfigError, UserCodeError
from taut.io.user_code import UserCode, read_user_code
from taut.train import random_state
from taut.train.distributed import Ranks

TOKENS = ("targets", "logp", "predicted", "ids")
ANSWERS = "answers"
GIVEN = (*TOKENS, ANSWERS)
"""Parameters that a function may have."""


@dataclass(frozen=True)
class CustomMetric:
    """A function of the user's."""

    spec: str
    code: UserCode
    ranks: Ranks

    @property
    def name(self) -> str:
        return self.code.name

    @property
    def fingerprint(self) -> str:
        """What its values depend on."""
        return f"{Path(self.spec).name} {self.code.source}"

    @property
    def takes_answers(self) -> bool:
        return ANSWERS in self.parameters

    @property
    def smaller_is_better(self) -> bool:
        return bool(getattr(self._function, "smaller_is_better", False))

    @cached_property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self.code.load()
        return function

    @cached_property
    def parameters(self) -> list[str]:
        """Those of GIVEN that the function names. Raises ConfigError for others."""
        found = inspect.signature(self._function).parameters.values()
        names = [one.name for one in found if one.name in GIVEN]
        others = [one.name for one in found if one.default is one.empty and one.name not in GIVEN]
        if others or (ANSWERS in names) == bool({*names} & {*TOKENS}):
            raise ConfigError(
                f"{self.code.label}: it takes {', '.join(others or names) or 'nothing'}; expected {ANSWERS}, or some "
                f"of {', '.join(TOKENS)}; correct its parameters",
                code="eval.metrics",
            )
        return names

    def __call__(self, **values: Any) -> float:
        """The value for all of GIVEN. Raises UserCodeError."""
        named = {name: values[name] for name in self.parameters}
        with random_state.kept(self.ranks.device):
            value = self.code.call(self._function, **named)
        if not isinstance(value, Real | np.bool_):
            raise UserCodeError(
                f"{self.code.label} returned {value!r:.60}; expected a number; return float(...) of it"
            )
        return float(value)


def read_metrics(specs: Sequence[str], ranks: Ranks) -> list[CustomMetric]:
    """The metrics of ``eval.metrics``, their files executed. Raises ConfigError on all ranks."""

    metrics: list[CustomMetric] = []

    def read() -> None:
        for spec in specs:
            path = home_path(spec.rpartition(":")[0])
            code = read_user_code(spec, path, f"eval.metrics has {spec}", "function")
            metrics.append(CustomMetric(spec, code, ranks))
            metrics[-1].parameters  # noqa: B018 (computed at the first access)

    ranks.run_everywhere(read)
    return metrics


def values_of(metrics: Sequence[CustomMetric], ranks: Ranks, **values: Any) -> dict[str, float]:
    """name -> value, which the writer computes. Raises UserCodeError on all ranks."""
    if not metrics:
        return {}
    return ranks.run_on_writer(lambda: {metric.name: metric(**values) for metric in metrics})
