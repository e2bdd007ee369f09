"""Continue the run in OUT with the configuration in its resolved.json and resume=true.

Further keys override the configuration, as in steps=200; keys and exit codes are the same as of the command that
started the run (taut sft --help). Relative paths, in the configuration and in these keys, are relative to the directory
in which the run was started, and the process works there until the run ends. Only OUT is relative to the current
directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path

from taut.commands import train
from taut.config import override, replace, restore, to_dict, user_path
from taut.errors import HIDDEN, ConfigError, DataError, ModelError, OutputError
from taut.methods import METHODS
from taut.methods.method import RunConfig
from taut.run.ending import Result
from taut.train.run_dir import MARK, dotted, read_resolved

# ``taut resume --help`` prints the docstring.


def run(words: Sequence[str]) -> Result:
    """The command: ``out=OUT`` among the words, and keys to override."""
    outs = [word for word in words if word.partition("=")[0].strip() == "out"]
    if len(outs) != 1:
        raise ConfigError(
            f"taut resume: found {len(outs)} directories; expected one run to continue, as in taut resume runs/a"
        )
    rest = [word for word in words if word not in outs]
    return resume(outs[0].partition("=")[2], lambda config: override(config, rest))


def resume(path: str | os.PathLike[str], set_keys: Callable[[RunConfig], RunConfig]) -> Result:
    """Continue the run in the directory with its configuration, as ``set_keys`` changes it. The working directory of
    the process is meanwhile the one in which the run was started.
    """
    path = os.fspath(path)
    out = user_path(path, "out")
    # what was started, and where
    resolved, place = read_resolved(out), out / MARK
    versions = (
        f"the run is of taut {resolved.get('taut')} and this is {version('taut')}: "
        "resume with a version that knows it"
    )
    method, config = resolved.get("method"), resolved.get("config")
    directory = resolved.get("directory")
    known = list(METHODS)
    if not (method in known and isinstance(config, dict) and isinstance(directory, str)):
        fault = f"found no 'config' and 'directory' at {place}; expected both"
        if method not in known:
            fault = f"found method={method!r} at {place}; expected one of {', '.join(METHODS)}"
        raise ConfigError(f"{fault}; {versions}")
    if not (Path(directory).is_dir() and os.access(directory, os.X_OK)):
        raise OutputError(
            f"{place}: the run was started in {directory}, which is not available; expected it, since relative paths "
            f"refer to it; make it, or give the run's own command with out={out} resume=true"
        )
    try:
        started = restore(METHODS[method], config, f"at {place}")
    except ConfigError as error:
        raise ConfigError(f"{error}; {versions}") from error
    # the same run, with the keys of this command
    is_here = Path(directory).samefile(Path.cwd())
    fixed = {"out": path if is_here else str(out.resolve()), "resume": True, "overwrite": False}
    with chdir(directory):
        run = set_keys(replace(started, fixed))
    again = dict(dotted(to_dict(run)))
    if hidden := [key for key in resolved.get("redacted", ()) if HIDDEN in json.dumps(again[key])]:
        raise ConfigError(
            f"{place} keeps no secrets, and {', '.join(hidden)} had one ({HIDDEN}); give the key with its value to "
            "taut resume, or name a variable that holds it, where the key can"
        )
    # relative paths refer to where it was started
    if is_here:
        return train.train(run)
    try:
        with chdir(directory):
            return train.train(run)
    except (ConfigError, DataError, ModelError) as error:
        where = f"relative paths refer to {directory}, where the run was started"
        raise type(error)(f"{error}; {where}") from error
