"""A reward of the user's own: ``FILE.py:function``.

    def function(text: str, references: list[str], row: dict) -> float | None

It is called by the names of its parameters and takes those it wants: ``text``, a completion without what ended it;
``references``, the row's right answers (empty where it has none); ``row``, the row as it stands in the data;
``num_tokens``, ``finish_reason``, ``prompt``, ``messages`` (``answered.py``); and the options of its configuration. It
returns a number, or None where it does not apply; what it raises is an error. It judges correctness unless its
attribute ``judges`` says otherwise: ``function.judges = "form"``.

The file is read once, when a panel opens, and run as Python in worker processes, never in the one that trains; files
beside it can be imported only if they are on Python's path. ``random`` (and ``numpy.random``, where the file imports
numpy) are seeded by the answer, so a function that draws from them gives the same answer the same number.

Imports errors and the verifiers' base.
"""

from __future__ import annotations

import inspect
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_args

from taut.config import home_path
from taut.errors import ConfigError
from taut.io import files
from taut.rewards.verifier import FIELDS, Answered, Judged, Place, Verifier


@dataclass(frozen=True)
class Own(Verifier):
    """A function of the user's."""

    runs: ClassVar[Place] = "process"

    spec: str
    """``FILE.py:function``."""
    code: str
    """What the file said when it was read."""
    options: Mapping[str, Any]
    """Handed to the function by name."""

    def prepare(self) -> None:
        """Run the file, and find the function."""
        self._call  # noqa: B018 (it is made when it is first asked for)
        if self.judges not in get_args(Judged):
            raise ConfigError(
                f"the reward {self.spec} has the attribute judges={self.judges!r}; expected one of "
                f"{', '.join(get_args(Judged))}; correct it"
            )

    @property
    def judges(self) -> Judged:  # type: ignore[override]  # of the function, so of the instance
        """What the function's attribute says. Reading it runs the file: for worker processes only."""
        return getattr(self._function, "judges", Verifier.judges)

    def __call__(self, answered: Answered) -> Any:
        """Whatever it returns; what it raises is told the line it came from."""
        seed = zlib.crc32(answered.text.encode("utf-8", "surrogatepass"))
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return self._call(answered)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return _function(self.spec, self.code)

    @cached_property
    def _call(self) -> Callable[[Answered], Any]:
        function = self._function
        names = _parameters(self.spec, function, self.options)

        def call(answered: Answered) -> Any:
            values = {name: getattr(answered, name) for name in names}
            if "references" in values:
                values["references"] = list(answered.references)
            return function(**values, **self.options)

        return call

    def line_of(self, error: BaseException) -> str:
        """`` (own.py:12)``, the last line of the file that an exception came through."""
        path = _path(self.spec)
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        return f" ({path.name}:{lines[-1]})" if lines else ""


def own(spec: str, options: Mapping[str, Any]) -> Own:
    """The verifier that ``FILE.py:function`` names; its file is read, not run."""
    path = _path(spec)
    if not path.is_file():
        raise ConfigError(
            f"found the reward {spec!r}, and there is no file {spec.rpartition(':')[0]}; expected FILE.py:function; "
            "check the path"
        )
    if path.suffix != ".py":
        raise ConfigError(f"found the reward {spec!r}; expected a file that ends in .py; rename it")
    try:
        code = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the reward file {path} cannot be read: {error}; expected Python in UTF-8; correct it"
        ) from error
    return Own(spec, code, options)


def _path(spec: str) -> Path:
    return home_path(spec.rpartition(":")[0])


def _function(spec: str, code: str) -> Callable[..., Any]:
    path, name = _path(spec), spec.rpartition(":")[2]
    module = ModuleType(f"taut_reward_{path.stem}_{zlib.crc32(str(path).encode()):x}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    try:
        exec(compile(code, str(path), "exec"), vars(module))
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the reward file {path} cannot be run: {reason}; expected Python that can; correct it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, item in vars(module).items() if callable(item) and key[0].isalpha()
        ]
        raise ConfigError(
            f"found no function {name!r} in {path}; expected one of {', '.join(functions) or 'none'}; name it"
        )
    return function  # type: ignore[no-any-return]  # callable() proves no signature


def _parameters(
    spec: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Which of FIELDS it takes. ConfigError for what nobody could give it, and for options it does not take."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(it.kind is it.VAR_KEYWORD for it in parameters)
    named = [it for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)]
    names = {it.name for it in named}
    wanted = [it.name for it in parameters if it.kind is it.POSITIONAL_ONLY]
    wanted += [it.name for it in named if it.default is it.empty]
    unknown = [name for name in wanted if name not in names or name not in {*FIELDS, *options}]
    if unknown:
        raise ConfigError(
            f"the reward {spec} takes {unknown[0]!r}; expected parameters by the names {', '.join(FIELDS)}, and its "
            "options; rename it, or give it a default"
        )
    strange = [name for name in options if name not in names and not takes_all]
    if strange or (shadowed := [name for name in options if name in FIELDS]):
        name = strange[0] if strange else shadowed[0]
        raise ConfigError(
            f"the reward {spec} is given the option {name!r}; expected names of its own parameters; take it out"
        )
    return FIELDS if takes_all else tuple(name for name in FIELDS if name in names)
