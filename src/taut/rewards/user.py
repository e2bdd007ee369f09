"""A reward function of the user's own: ``FILE.py:function``.

    def function(text: str, references: list[str], row: dict) -> float | None

It is called with the parameters it names: ``text``, a completion without what ended it; ``references``, the row's right
answers (empty if there are none); ``row``, the row as it is in the data; ``num_tokens``, ``finish_reason``, ``prompt``,
``messages`` (``Answered`` in ``verifier.py``); and the options of its configuration. It returns a number, or None where
it does not apply; an exception is an error. It judges correctness unless its attribute ``judges`` says otherwise:
``function.judges = "form"``.

A function of TRL, OpenRLHF or verl and a class of ms-swift are called as those frameworks call them (``foreign.py``); a
class is made without arguments.

The file is read once, when a panel opens, and run as Python in worker processes, never in the process that trains.
``random`` (and ``numpy.random``, if the file imports numpy) is seeded by the answer, so that a function that draws from
it gives the same answer the same number.
"""

from __future__ import annotations

import inspect
import random
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

from taut.errors import ConfigError
from taut.io.user_code import UserCode
from taut.rewards import foreign
from taut.rewards.verifier import FIELDS, Answered, Judged, Place, Verifier


@dataclass(frozen=True)
class UserReward(Verifier):
    """A function of the user's."""

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
        """The function's attribute. Reading it runs the file: for worker processes only."""
        return getattr(self._function, "judges", Verifier.judges)

    def __call__(self, answered: Answered) -> Any:
        """Whatever the function returns."""
        seed = zlib.crc32(answered.text.encode("utf-8", "surrogatepass"))
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if self._convention is not None:
            return foreign.call(
                self._function, self._convention, answered, self.options, is_class=self._is_class
            )
        values = {name: getattr(answered, name) for name in self._parameters}
        if "references" in values:
            values["references"] = list(answered.references)
        return self._function(**values, **self.options)

    @property
    def _is_class(self) -> bool:
        return isinstance(self._loaded, type)

    @cached_property
    def _convention(self) -> foreign.Convention | None:
        return foreign.convention_of(self._function)

    @cached_property
    def _loaded(self) -> Any:
        return self.code.load()

    @cached_property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self._loaded() if self._is_class else self._loaded
        return function

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        """Which of FIELDS the function takes. ConfigError for a parameter that has no value, and for an option that is
        no parameter.
        """
        parameters = inspect.signature(self._function).parameters.values()
        if self._convention is not None:
            missing = foreign.without_value(self._function, self._convention, self.options)
            if missing is not None:
                raise ConfigError(
                    f"the reward {self.spec} takes {missing!r}, which taut does not have; expected parameters that are "
                    "columns or options; give it a default"
                )
            return ()
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
