"""Python objects that are named as text: user code, named as ``FILE.py:name`` or by a name that an installed package
adds (``plugins.py``), and taut's own, named as ``module:name``.

    code = read_user_code("own.py:reward", Path("own.py"), "the reward own.py:reward", "function")
    function = code.load()

``read_user_code`` reads the file and runs nothing. ``load`` runs it, in this process; a ``UserCode`` can be sent to
another process and loaded there, where it is the file that was read. Files next to it can be imported only if they are
on Python's path.

``name_object`` is for objects that are given from Python: the text that stands for one in a configuration is
``FILE.py:name`` where a file has it by that name, or else ``python-DIGEST.py:name``, whose digest is of its source and
of the values that it closes over. In this process that text means the object itself. ``portable`` makes code that can
be sent to another process: the file, or the object as cloudpickle writes it. A process that was not given the object,
as one that resumes the run from the command line, refuses the text.

``named`` imports a module of taut with the garbage collector at rest. Torch and transformers make half a million
objects that live as long as the process. The collector looked through them seven times while they were imported, and
once more at the end of the process: 2.0 of the 5.4 s of CPU that a command took to import what training needs and end.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import pickle
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from taut.errors import ConfigError, UserCodeError
from taut.io import files, plugins

GIVEN = "python-"
"""How the text begins that stands for an object without a file."""
MOST_BYTES = 2**26
"""Largest object that is sent to another process."""
_given: dict[str, tuple[str, Any]] = {}
"""Text in a configuration -> the source of the file that it names, and the object that was given for it."""


@dataclass(frozen=True)
class UserCode:
    """A function or class in a file that was read, or an object that was given from Python."""

    path: Path
    name: str
    source: str
    label: str
    """Beginning of messages: the purpose for which the configuration names it."""
    kind: str
    """Kind that is expected: function or class."""
    module: str | None = None
    """Module to import, for code of an installed package."""
    spec: str = ""
    """The text in the configuration."""
    pickled: bytes | None = None
    """The object, in a process to which it was sent."""

    def load(self) -> Any:
        """The object that was given, or the function or class after its file has run. Raises ConfigError."""
        source, given = _given.get(self.spec, (None, None))
        if source == self.source:
            return given
        try:
            if self.pickled is not None:
                return pickle.loads(self.pickled)
            module = self._run() if self.module is None else import_module(self.module)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(
                f"{self.label}: {self.path} cannot be run: {reason}{self.line_of(error)}; expected Python that can; "
                "correct it"
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

    def portable(self) -> UserCode:
        """The code for another process. Raises ConfigError for an object that cannot be sent."""
        if not self.spec.startswith(GIVEN):
            return self
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(_given[self.spec][1])
            fault = f"it has {len(pickled) / 2**20:.0f} MiB" if len(pickled) > MOST_BYTES else ""
        except Exception as error:  # noqa: BLE001 - objects say by any exception that they cannot be copied
            fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if fault:
            raise ConfigError(
                f"{self.label}: it runs in a process of its own, and the object cannot be sent there: {fault}; "
                f"expected one without open files, locks or models; name FILE.py:{self.name}, which makes them itself"
            )
        return replace(self, pickled=pickled)

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
    if spec.startswith(GIVEN) and spec in _given:
        return UserCode(_file_of(_given[spec][1]), name, "", label, kind, spec=spec)
    fault = ""
    if spec.startswith(GIVEN):
        fault = (
            f"it was given from Python as an object, and this process has none; expected it again; resume from Python, "
            f"with the same {name} and resume=True, or write it to a file and start again with FILE.py:{name}"
        )
    elif not path.is_file():
        fault = f"there is no file {file or spec}; expected FILE.py:{kind}; check the path"
    elif path.suffix != ".py":
        fault = f"expected a file that ends in .py; rename {path.name}"
    if fault:
        raise ConfigError(f"{label}: {fault}")
    try:
        return UserCode(path, name, files.read_text(path), label, kind, spec=spec)
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


def named_files(names: Iterable[str]) -> list[Path]:
    """The files of the code that texts name as ``FILE.py:name``; an object that was given from Python has none."""
    specs = [name for name in names if ":" in name and not name.startswith(GIVEN)]
    return [files.home_path(spec.rpartition(":")[0]) for spec in specs]


# -- objects that are given from Python


def name_object(value: Any) -> str:
    """The text that stands for a function, class or object in a configuration of this process."""
    name = getattr(value, "__name__", None) or type(value).__name__
    module, path = sys.modules.get(getattr(value, "__module__", "")), _file_of(value)
    is_by_name = module is not None and getattr(module, name, None) is value
    if is_by_name and value.__module__ != "__main__" and path.suffix == ".py" and path.is_file():
        source = files.read_text(path)
        if not re.search(r"^\s*from \.", source, re.MULTILINE):  # that needs its package
            here = Path.cwd()
            spec = f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"
            _given[spec] = source, value
            return spec
    described = repr(_described(value, getattr(value, "__module__", None), set()))
    digest = hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()
    spec = f"{GIVEN}{digest[:16]}.py:{name.strip('<>')}"
    _given[spec] = "", value
    return spec


def _file_of(value: Any) -> Path:
    """The file in which an object, or its class, is written; ``.`` where that is not known."""
    value = inspect.unwrap(value)
    is_code = isinstance(value, type) or inspect.isroutine(value)
    try:
        return Path(inspect.getsourcefile(value if is_code else type(value)) or "")
    except (OSError, TypeError):
        return Path()


def _described(value: Any, home: str | None, seen: set[int]) -> Any:
    """Sources and values that decide what an object does, nested. What other modules than ``home`` define is its name
    alone, as it is where a file imports it.
    """

    def each(*values: Any) -> list[Any]:
        return [_described(it, home, seen) for it in values]

    # values, and what holds others
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, Mapping):
        return each(*value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return each(*(value if isinstance(value, list | tuple) else sorted(value, key=repr)))
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, *each(*value.co_consts)]
    if isinstance(value, partial):
        return each(value.func, value.args, value.keywords)
    if inspect.ismethod(value):
        return each(value.__func__, value.__self__)
    # code, and objects by their classes
    name = getattr(value, "__qualname__", type(value).__qualname__)
    module = getattr(value, "__module__", type(value).__module__)
    if id(value) in seen or module != home:
        return value.__name__ if isinstance(value, ModuleType) else f"{module}.{name}"
    seen.add(id(value))
    is_class = isinstance(value, type)
    if not is_class and not inspect.isfunction(value):
        return each(type(value), getattr(value, "__dict__", {}))
    try:
        source = "" if "<lambda>" in name else inspect.getsource(value)  # of a lambda: whole lines
    except (OSError, TypeError):
        source = ""
    if is_class:
        own = {k: it for k, it in vars(value).items() if inspect.isfunction(it) or k[:2] != "__"}
        return source or each(own)
    around = inspect.getclosurevars(value)
    code = source or value.__code__
    return each(code, value.__defaults__, value.__kwdefaults__, around.nonlocals, around.globals)


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
