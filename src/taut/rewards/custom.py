"""Reward functions of the user: ``FILE.py:function``.

    def function(text: str, references: list[str], row: dict) -> float | None

A function is called with the parameters that it names: ``text``, a completion without its end token; ``references``,
the right answers of the row (empty if there are none); ``row``, the row of the data; ``num_tokens``,
``finish_reason``, ``prompt``, ``messages`` (``RewardInput`` in ``verifier.py``); and the options of its configuration.
It returns a number, or None where it does not apply; an exception is an error. It judges correctness unless it has the
attribute ``judges = "form"``.

Functions of TRL, OpenRLHF and verl and classes of ms-swift are called as those frameworks call them
(``trl_style.py``); a class is made without arguments. A function that takes lists gets all answers to a prompt at once.

The file is read once, when the rewards open, and runs as Python in worker processes, never in the process that trains.
``random`` (and ``numpy.random``, if the file imports numpy) is seeded by the answer, so that a function that draws
numbers gives equal answers equal rewards.
"""

from __future__ import annotations

import inspect
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

from taut.errors import ConfigError
from taut.io.user_code import UserCode
from taut.rewards import trl_style
from taut.rewards.settings import Judged, Place
from taut.rewards.verifier import FIELDS, RewardInput, Verifier


@dataclass(frozen=True)
class UserReward(Verifier):
    """A function of the user."""

    runs: ClassVar[Place] = "process"

    spec: str
    """``FILE.py:function``."""
    code: UserCode
    options: Mapping[str, Any]
    """Passed to the function by name."""

    def prepare(self) -> None:
        """Run the file, and check the function's parameters and its attribute ``judges``."""
        self._parameters  # noqa: B018 (computed at the first access)
        if self.judges not in get_args(Judged):
            raise ConfigError(
                f"the reward {self.spec} has the attribute judges={self.judges!r}; expected one of "
                f"{', '.join(get_args(Judged))}; correct it"
            )

    @property
    def judges(self) -> Judged:  # type: ignore[override]  # of the function, so of the instance
        """The attribute ``judges`` of the user's function. Reading it runs the user's file, so only workers read it."""
        return getattr(self._function, "judges", Verifier.judges)

    @property
    def takes_groups(self) -> bool:  # type: ignore[override]  # of the function, so of the instance
        """Whether the function takes lists. Reading it runs the file: for worker processes only."""
        return self._convention in ("completions", "queries")

    def __call__(self, answer: RewardInput) -> Any:
        """Return the function's value."""
        return self.judge_group([answer])[0]

    def judge_group(self, group: Sequence[RewardInput]) -> Sequence[Any]:
        """Return the function's value of each answer."""
        texts = "".join(answer.text for answer in group)
        seed = zlib.crc32(texts.encode("utf-8", "surrogatepass"))
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if self._convention is not None:
            return trl_style.call(
                self._function, self._convention, group, self.options, is_class=self._is_class
            )
        (answer,) = group
        values = {name: getattr(answer, name) for name in self._parameters}
        if "references" in values:
            values["references"] = list(answer.references)
        return [self._function(**values, **self.options)]

    @property
    def _is_class(self) -> bool:
        return isinstance(self._loaded, type)

    @cached_property
    def _convention(self) -> trl_style.Convention | None:
        return trl_style.convention_of(self._function)

    @cached_property
    def _loaded(self) -> Any:
        return self.code.load()

    @cached_property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self._loaded() if self._is_class else self._loaded
        return function

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        """Those of FIELDS that the function takes. Raises ConfigError for a parameter that has no value, and for an
        option that is no parameter.
        """
        # A function of another framework gets what that gives it.
        parameters = inspect.signature(self._function).parameters.values()
        if self._convention is not None:
            missing = trl_style.without_value(self._function, self._convention, self.options)
            if missing is not None:
                raise ConfigError(
                    f"the reward {self.spec} takes {missing!r}, which taut does not have; expected parameters that are "
                    "columns or options; give it a default"
                )
            return ()
        # A parameter that has no value, then an option that is no parameter.
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        names = {parameter.name for parameter in named}
        required = [
            parameter.name
            for parameter in parameters
            if parameter.kind is parameter.POSITIONAL_ONLY
        ]
        required += [parameter.name for parameter in named if parameter.default is parameter.empty]
        known = {*FIELDS, *self.options}
        unknown = [name for name in required if name not in names or name not in known]
        if unknown:
            raise ConfigError(
                f"the reward {self.spec} takes {unknown[0]!r}; expected parameters by the names {', '.join(FIELDS)}, "
                "and its options; rename it, or give it a default"
            )
        not_taken = [name for name in self.options if name not in names and not takes_all]
        for name in not_taken or [name for name in self.options if name in FIELDS]:
            raise ConfigError(
                f"the reward {self.spec} is given the option {name!r}; expected names of its own parameters; take it "
                "out"
            )
        return FIELDS if takes_all else tuple(name for name in FIELDS if name in names)
