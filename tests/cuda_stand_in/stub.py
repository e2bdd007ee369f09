"""Compiles stub.cpp with g++, once for a source and a version of torch, and loads it. Does not import torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import gettempdir

SOURCE = Path(__file__).with_name("stub.cpp")
TRITON = Path(sys.prefix) / "triton-for-tests"
"""Where make test-cuda puts triton."""


def why_not() -> str | None:
    """The reason why there can be no stand-in here, or None."""
    if sys.platform != "linux":
        return f"the stand-in for CUDA is for Linux; this is {sys.platform}"
    if find_spec("torch") is None:
        return "torch is not installed"
    if "+cpu" not in metadata.version("torch") and list(_torch().glob("lib/libtorch_cuda.so")):
        return "this torch has CUDA of its own; the stand-in for it needs a build without"
    if which("g++") is None and not _place().exists():
        return "found no g++, which compiles the stand-in for CUDA (Debian: apt-get install g++)"
    return None


def why_no_triton() -> str | None:
    """The reason why nothing can be compiled for a GPU here, or None."""
    if find_spec("triton") is None and not TRITON.is_dir():
        return f"found no triton in {TRITON.name}; make test-cuda installs it"
    return None


@cache
def library() -> Path:
    """The compiled stub. Raises RuntimeError with what g++ said."""
    place = _place()
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{os.getpid()}")  # workers compile at the same time
    lib = _torch() / "lib"
    made = subprocess.run(
        [
            *("g++", "-std=c++20", "-O0", "-shared", "-fPIC"),
            *(f"-I{_torch() / 'include'}", str(SOURCE), "-o", str(partial)),
            *(f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"g++ cannot compile {SOURCE.name}: {made.stderr[:2000]}")
    partial.replace(place)
    return place


def load() -> None:
    """Load the stub into this process, in which torch has not been imported."""
    assert "torch" not in sys.modules, "the stub has to be loaded before torch is imported"
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


def _place() -> Path:
    content = SOURCE.read_bytes() + metadata.version("torch").encode() + sys.version.encode()
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or gettempdir()) / f"taut-cuda-stand-in-{os.getuid()}"
    )
    return folder / f"{hashlib.sha256(content).hexdigest()[:20]}.so"


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
