"""Jobs of one framework, each in a process of its own that is forked from one with the libraries loaded.

A job is a folder and the words of a command. What it prints is in a file of the folder with the worker's name.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

Run = Callable[[list[str]], object]


def run_all(run: Run) -> None:
    """``run`` of the words of every job in the file that the command names, in the job's folder."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            _run_one(run, job["folder"], job["words"])
        os.waitpid(child, 0)


def _run_one(run: Run, folder: str, words: list[str]) -> None:
    """Never returns: the child must not go on with the parent's jobs."""
    os.chdir(folder)
    log = os.open(f"{Path(sys.argv[0]).stem}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        run(words)
        code = 0
    except BaseException:  # noqa: BLE001 - printed whole
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
