"""A real vLLM, started for a test.

TAUT_VLLM is the command that serves, without the model: ``vllm serve``, or ``PYTHON -m
vllm.entrypoints.openai.api_server --model`` where the build has no such program.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

COMMAND = shlex.split(os.environ.get("TAUT_VLLM", ""))
PATIENCE = 300
"""Seconds a server may take to start."""
OPTIONS = ("--host=127.0.0.1", "--dtype=float32", "--max-model-len=1024", "--enforce-eager")
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

needs_vllm = pytest.mark.skipif(
    not COMMAND, reason="TAUT_VLLM does not name the command that serves"
)


@contextmanager
def served(
    model: Path,
    log: Path,
    options: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The URL, /v1 included, of a float32 server of ``model`` on this machine."""
    with started(model, log, options, variables) as (url, _):
        yield url


@contextmanager
def started(
    model: Path,
    log: Path,
    options: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The same, and the server's process, which leads a group of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*COMMAND, str(model), f"--port={port}", *OPTIONS, *options],
            env={**os.environ, **VARIABLES, **(variables or {})},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1", server
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx2.get(url, timeout=5).is_success:
                return
        except httpx2.TransportError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")
