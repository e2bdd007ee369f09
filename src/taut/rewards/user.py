"""A reward of the user's own: ``FILE.py:function``.

    def function(text: str, references: list[str], row: dict) -> float | None

``text`` is a completion without what ended it, ``references`` the row's right answers (empty where it has none),
``row`` the row as it stands in the data. It returns a number, or None where it does not apply; what it raises is an
error. The file is run as Python when it is loaded; files beside it can be imported only if they are on Python's path.

Imports errors only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taut.errors import ConfigError


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``FILE.py:function`` names."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"found the reward {spec!r}, and there is no file {file}; expected FILE.py:function; check the path"
        )
    made = importlib.util.spec_from_file_location(f"taut_reward_{path.stem}", path)
    if made is None or made.loader is None:
        raise ConfigError(f"found the reward {spec!r}; expected a file that ends in .py; rename it")
    module = importlib.util.module_from_spec(made)
    sys.modules[made.name] = module  # dataclasses look their module up by name
    try:
        made.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the reward file {file} cannot be run: {reason}; expected Python that can; correct it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, item in vars(module).items() if callable(item) and key[0].isalpha()
        ]
        raise ConfigError(
            f"found no function {name!r} in {file}; expected one of {', '.join(functions) or 'none'}; name it"
        )
    return function  # type: ignore[no-any-return]  # callable() proves no signature
