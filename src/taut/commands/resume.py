"""Go on with the run in OUT, with the configuration in its resolved.json and resume=true. Keys given here are set on
top, as in steps=200: they are those of the command the run was begun with (taut sft --help), as are the exit codes.

Relative paths, in the configuration and in what is set on top, are meant from the directory the run was started in,
wherever the command is given: the process works there until the run is over. OUT alone is meant from where it is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from taut.commands import train
from taut.commands.train import Result
from taut.config import override, replace, restore, user_path
from taut.errors import ConfigError, DataError, ModelError, OutputError
from taut.methods import METHODS
from taut.methods.method import RunConfig
from taut.train.run_dir import MARK, read_resolved

# The docstring is what ``taut resume --help`` prints. Imports api; the command line and taut itself import this.


class Begun(NamedTuple):
    """What ``resolved.json`` says of how a run was begun."""

    config: RunConfig
    directory: Path


def run(words: Sequence[str]) -> Result:
    """The command: ``out=OUT`` among the words, and keys to set on top."""
    outs = [word.partition("=")[2] for word in words if _is_out(word)]
    if len(outs) != 1:
        raise ConfigError(
            f"taut resume: found {len(outs)} directories; expected the one run to go on with, as in taut resume runs/a"
        )
    rest = [word for word in words if not _is_out(word)]
    return _go_on(outs[0], lambda config: override(config, rest))


def resume(out: str | os.PathLike[str], keys: Mapping[str, Any]) -> Result:
    """Go on with the run in ``out``, ``keys`` set on top. The working directory of the process is another meanwhile."""
    return _go_on(os.fspath(out), lambda config: replace(config, keys))


def _go_on(named: str, set_on_top: Callable[[Any], Any]) -> Result:
    out = user_path(named, "out")
    begun = _read(out)
    is_here = begun.directory.samefile(Path.cwd())
    fixed = {
        "out": named if is_here else str(out.resolve()),
        "resume": True,
        "overwrite": False,
    }
    config = set_on_top(replace(begun.config, fixed))
    with _working_in(begun.directory, is_here=is_here):
        return train.train(config)


def _read(out: Path) -> Begun:
    resolved, place = read_resolved(out), out / MARK
    method = resolved.get("method")
    if method not in list(METHODS):
        raise ConfigError(
            f"found method={method!r} at {place}; expected one of {', '.join(METHODS)}; "
            f"{_versions(resolved)}"
        )
    config, directory = resolved.get("config"), resolved.get("directory")
    if not isinstance(config, dict) or not isinstance(directory, str):
        raise ConfigError(
            f"found no 'config' and 'directory' at {place}; expected both; {_versions(resolved)}"
        )
    if not (Path(directory).is_dir() and os.access(directory, os.X_OK)):
        raise OutputError(
            f"{place} says that the run was started in {directory}, which is not to be had; expected that directory, "
            "since relative paths are meant from it; make it, or give the command that began the run, with "
            f"out={out} resume=true"
        )
    try:
        return Begun(restore(METHODS[method], config, f"at {place}"), Path(directory))
    except ConfigError as error:
        raise ConfigError(f"{error}; {_versions(resolved)}") from error


def _versions(resolved: Mapping[str, Any]) -> str:
    return (
        f"the run is of taut {resolved.get('taut')} and this is {version('taut')}: "
        "go on with a version that knows it"
    )


@contextmanager
def _working_in(directory: Path, *, is_here: bool) -> Iterator[None]:
    """Work in a directory; where it is another, errors that may be about a path say so."""
    if is_here:
        yield
        return
    try:
        with chdir(directory):
            yield
    except (ConfigError, DataError, ModelError) as error:
        where = f"relative paths are meant from {directory}, where the run was started"
        raise type(error)(f"{error}; {where}") from error


def _is_out(word: str) -> bool:
    return word.partition("=")[0].strip() == "out"
