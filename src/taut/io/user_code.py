"""Python files of the user's: what a configuration names as ``FILE.py:name``.

    code = read_user_code("own.py:reward", Path("own.py"), "the reward own.py:reward", "function")
    function = code.load()

``read_user_code`` reads the file and runs nothing. ``load`` runs it, in this process; a ``UserCode`` can be sent to
another process and loaded there, where it is the file that was read. Files next to it can be imported only if they are
on Python's path.
"""

from __future__ import annotations

import sys
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from taut.errors import ConfigError
from taut.io import files


@dataclass(frozen=True)
class UserCode:
    """A function or class in a file that was read."""

    path: Path
    name: str
    source: str
    label: str
    """What the configuration names it for, as messages begin."""
    kind: str
    """What it has to be: function or class."""

    def load(self) -> Any:
        """Run the file, and return the function or class. Raises ConfigError."""
        number = zlib.crc32(str(self.path.resolve()).encode())  # two files may have one name
        module = ModuleType(f"taut_user_{self.path.stem}_{number:08x}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses look their module up by name
        try:
            exec(compile(self.source, str(self.path), "exec"), vars(module))
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(
                f"{self.label}: {self.path} cannot be run: {reason}; expected Python that can; correct it"
            ) from error
        loaded = getattr(module, self.name, None)
        if not callable(loaded):
            names = [
                key
                for key, value in vars(module).items()
                if callable(value)
                and getattr(value, "__module__", "") == module.__name__
                and key[0] != "_"
            ]
            raise ConfigError(
                f"{self.label}: {self.path} has no {self.kind} {self.name!r}; expected one of "
                f"{', '.join(names) or 'none'}; name it"
            )
        return loaded

    def line_of(self, error: BaseException) -> str:
        """`` (own.py:12)``, the last line of the file that an exception came through; empty if there is none."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self.path)
        ]
        return f" ({self.path.name}:{lines[-1]})" if lines else ""


def read_user_code(spec: str, path: Path, label: str, kind: str) -> UserCode:
    """Read the file of ``FILE.py:name``, which is at ``path``. Raises ConfigError."""
    file, _, name = spec.rpartition(":")
    if not path.is_file():
        raise ConfigError(
            f"{label}: there is no file {file or spec}; expected FILE.py:{kind}; check the path"
        )
    if path.suffix != ".py":
        raise ConfigError(f"{label}: expected a file that ends in .py; rename {path.name}")
    try:
        return UserCode(path, name, files.read_text(path), label, kind)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{label}: {path} cannot be read: {error}; expected Python in UTF-8; correct it"
        ) from error
