"""Continue the run in OUT with the configuration in its resolved.json and resume=true. Further keys override it, as in
steps=200: they are those of the command that started the run (taut sft --help), as are the exit codes.

Relative paths, in the configuration and in these keys, are relative to the directory in which the run was started,
and the process works there until the run ends. Only OUT is relative to the current directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import Any

from taut.commands import train
from taut.commands.train import Result
from taut.config import override, replace, restore, user_path
from taut.errors import ConfigError, DataError, ModelError, OutputError
from taut.methods import METHODS
from taut.train.run_dir import MARK, read_resolved

# ``taut resume --help`` prints the docstring.


def run(words: Sequence[str]) -> Result:
    """The command: ``out=OUT`` among the words, and keys to override."""
    outs = [word for word in words if word.partition("=")[0].strip() == "out"]
    if len(outs) != 1:
        raise ConfigError(
            f"taut resume: found {len(outs)} directories; expected one run to continue, as in taut resume runs/a"
        )
    rest = [word for word in words if word not in outs]
    return _resume(outs[0].partition("=")[2], lambda config: override(config, rest))


def resume(out: str | os.PathLike[str], keys: Mapping[str, Any]) -> Result:
    """Continue the run in ``out`` with ``keys`` overridden. Changes the working directory of the process meanwhile."""
    return _resume(os.fspath(out), lambda config: replace(config, keys))


def _resume(path: str, set_keys: Callable[[Any], Any]) -> Result:
    out = user_path(path, "out")
    resolved, place = read_resolved(out), out / MARK
    versions = (
        f"the run is of taut {resolved.get('taut')} and this is {version('taut')}: "
        "resume with a version that knows it"
    )
    method = resolved.get("method")
    if method not in list(METHODS):
        raise ConfigError(
            f"found method={method!r} at {place}; expected one of {', '.join(METHODS)}; {versions}"
        )
    config, directory = resolved.get("config"), resolved.get("directory")
    if not isinstance(config, dict) or not isinstance(directory, str):
        raise ConfigError(
            f"found no 'config' and 'directory' at {place}; expected both; {versions}"
        )
    if not (Path(directory).is_dir() and os.access(directory, os.X_OK)):
        raise OutputError(
            f"{place} says that the run was started in {directory}, which is not available; expected that directory, "
            "since relative paths refer to it; make it, or give the command that started the run, with "
            f"out={out} resume=true"
        )
    try:
        started = restore(METHODS[method], config, f"at {place}")
    except ConfigError as error:
        raise ConfigError(f"{error}; {versions}") from error
    is_here = Path(directory).samefile(Path.cwd())
    fixed = {"out": path if is_here else str(out.resolve()), "resume": True, "overwrite": False}
    run = set_keys(replace(started, fixed))
    if is_here:
        return train.train(run)
    try:
        with chdir(directory):
            return train.train(run)
    except (ConfigError, DataError, ModelError) as error:
        where = f"relative paths refer to {directory}, where the run was started"
        raise type(error)(f"{error}; {where}") from error
