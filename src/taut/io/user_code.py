"""Python objects that are named as text: user code, named as ``FILE.py:name`` or by a name that an installed package
adds (``plugins.py``), and taut's own, named as ``module:name``.

    code = read_user_code("own.py:reward", Path("own.py"), "the reward own.py:reward", "function")
    function = code.load()

``read_user_code`` reads the file and runs nothing. ``load`` runs it, in this process; a ``UserCode`` can be sent to
another process and loaded there, where it is the file that was read. Files next to it can be imported only if they are
on Python's path.

``named`` imports a module of taut with the garbage collector at rest. Torch and transformers make half a million
objects that live as long as the process. The collector looked through them seven times while they were imported, and
once more at the end of the process: 2.0 of the 5.4 s of CPU that a command took to import what training needs and end.
"""

from __future__ import annotations

import gc
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from taut.errors import ConfigError, UserCodeError
from taut.io import files, plugins


@dataclass(frozen=True)
class UserCode:
    """A function or class in a file that was read."""

    path: Path
    name: str
    source: str
    label: str
    """Beginning of messages: the purpose for which the configuration names it."""
    kind: str
    """Kind that is expected: function or class."""
    module: str | None = None
    """Module to import, for code of an installed package."""

    def load(self) -> Any:
        """Run the file, and return the function or class. Raises ConfigError."""
        try:
            module = self._run() if self.module is None else import_module(self.module)
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

    def _run(self) -> ModuleType:
        number = zlib.crc32(str(self.path.resolve()).encode())  # two files may have one name
        module = ModuleType(f"taut_user_{self.path.stem}_{number:08x}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses look their module up by name
        exec(compile(self.source, str(self.path), "exec"), vars(module))
        return module

    def call(self, expected: str, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call what was loaded, of which this is ``expected``. Raises UserCodeError for any exception."""
        try:
            return function(*values, **named)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserCodeError(
                f"{self.label} raised {reason}{self.line_of(error)}; expected {expected}; correct it"
            ) from error

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
    fault = ""
    if not path.is_file():
        fault = f"there is no file {file or spec}; expected FILE.py:{kind}; check the path"
    elif path.suffix != ".py":
        fault = f"expected a file that ends in .py; rename {path.name}"
    if fault:
        raise ConfigError(f"{label}: {fault}")
    try:
        return UserCode(path, name, files.read_text(path), label, kind)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{label}: {path} cannot be read: {error}; expected Python in UTF-8; correct it"
        ) from error


def find_code(spec: str, path: Path, group: str, label: str, kind: str) -> UserCode | None:
    """The code that a configuration names: ``FILE.py:name``, of which ``path`` is the file, or a name that an installed
    package adds to a group of entry points; None: neither. Raises ConfigError as those two do.
    """
    if ":" in spec:
        return read_user_code(spec, path, label, kind)
    return added_code(spec, group, label, kind)


def added_code(name: str, group: str, label: str, kind: str) -> UserCode | None:
    """The code that an installed package adds to a group of entry points under this name; None: there is none.

    Raises ConfigError for a module that cannot be found.
    """
    if name not in plugins.names(group):
        return None
    entry = plugins.entry_of(group, name)
    try:
        spec = find_spec(entry.module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{label}: a package adds {name!r} as {entry.value}, and there is no module {entry.module}; expected one; "
            "update or uninstall the package"
        )
    path = Path(spec.origin)
    return UserCode(path, entry.attr, files.read_text(path), label, kind, entry.module)


def added_files(names: Iterable[str], group: str, label: str) -> list[Path]:
    """The files of the code that packages add under these names, as far as they add them: what a resume compares.

    Code of taut's own tools is left out, as the core's is: its version stands for it.
    """
    added = [name for name in names if name in plugins.names(group)]
    others = [name for name in added if plugins.owner_of(plugins.entry_of(group, name)) != "taut"]
    codes = [added_code(name, group, f"{label} {name}", "class or function") for name in others]
    return [code.path for code in codes if code is not None]


# -- taut's own


def named(name: str) -> Any:
    """The object that ``module:name`` names; its module is imported where it is not yet. Objects that exist then are
    never collected (``gc.freeze``): for a process that is taut's own.
    """
    module, _, attribute = name.partition(":")
    if module not in sys.modules and gc.isenabled():
        gc.disable()
        try:
            import_module(module)
        finally:
            gc.freeze()
            gc.enable()
    return getattr(import_module(module), attribute)
