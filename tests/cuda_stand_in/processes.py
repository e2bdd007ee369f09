"""Runs functions where the stand-in is: in processes forked from one that has loaded the stub before torch.

    server = Server(); found = server.call("tests.cuda_stand_in.runs:run", case, log=path)

The server imports once; each call is a process of its own, so nothing that it replaces outlives it. What a function
returns comes back pickled, and what it raises as CaseFailed with the end of its output.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.cuda_stand_in.stub import TRITON

ROOT = Path(__file__).parents[2]


class CaseFailed(AssertionError):
    """A function raised where the stand-in is."""


class Server:
    """A process that forks. ``has_triton``: torch finds triton in it, which it looks for when it is imported."""

    def __init__(self, *, has_triton: bool = False) -> None:
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths += [str(TRITON)] if has_triton else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda_stand_in.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def call(self, function: str, *args: Any, **keywords: Any) -> Any:
        """``module:name`` of the arguments, in a process of its own."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with TemporaryDirectory() as folder:
            pickle.dump((function, args, keywords, dict(os.environ), folder), stdin)
            stdin.flush()
            status = stdout.readline().decode().strip()
            result, output = Path(folder, "result"), Path(folder, "output")
            said = output.read_text("utf-8", "replace") if output.exists() else ""
            if not result.exists():
                raise CaseFailed(
                    f"the process ended with status {status or 'unknown'}: {said[-3000:]}"
                )
            is_error, found = pickle.loads(result.read_bytes())
        if is_error:
            raise CaseFailed(f"{found}\n{said[-1500:]}")
        return found

    def close(self) -> None:
        self._process.communicate()  # closes its pipes; it ends with its input


def main() -> None:
    """The server: reads calls from stdin, says the status of each on stdout."""
    from tests.cuda_stand_in import stub

    stub.load()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.helpers.forked_processes import IMPORTED

    for name in (*IMPORTED, "tests.helpers.online_runs", "tests.helpers.vision_models"):
        importlib.import_module(name)  # each call has them
    while True:
        try:
            function, args, keywords, environment, folder = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            _answer(function, args, keywords, environment, Path(folder))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=said, flush=True)


def _answer(
    function: str, args: Any, keywords: Any, environment: dict[str, str], folder: Path
) -> None:
    """In the fork: call, write the result, end."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from tests.helpers.forked_processes import fork_bounded_process

    fork_bounded_process()
    module, _, name = function.partition(":")
    try:
        result = False, getattr(importlib.import_module(module), name)(*args, **keywords)
    except BaseException as error:  # noqa: BLE001 (told to whoever called)
        result = True, "".join(traceback.format_exception(error))[-6000:]
    partial = folder / "partial"
    partial.write_bytes(pickle.dumps(result))
    partial.replace(folder / "result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
