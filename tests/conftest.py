"""What holds for every test: nothing is fetched, threads are few, and a GPU is not assumed."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys

# Before anything imports torch or transformers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TAUT_PROGRESS", "off")  # a slow machine has lines that a fast one has not
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

from collections.abc import Generator, Mapping
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from tests.helpers.collection import compile_share, excluded, forks, is_left_out, marks_of_file
from tests.helpers.quick import mark_slow

if find_spec("hypothesis"):  # make gpu takes the Python that is there
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")
NUMBERS = count()
MANY_MODULES = 100
num_known_modules = 0
"""How many were imported when ``leave_alone`` last looked."""


def pytest_configure() -> None:
    """taut ignores a signal that was ignored when it started (nohup). Tests of signals start from the defaults."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="do not leave cases to make test-slow because they take long (tests/helpers/quick.py)",
    )
    parser.addoption(
        "--min-cases", type=int, default=0, help="leave so many cases of each function all the same"
    )
    parser.addoption(
        "--all-cases-of", action="append", default=[], help="--all-cases for a function, by its id"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Workers share the work of compiling."""
    worker: Mapping[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is not None and not sys.dont_write_bytecode:
        compile_share(session.config, worker)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which no test is asked for is not imported."""
    is_test = collection_path.match("test_*.py")
    return (is_test and bool(excluded(config) & marks_of_file(collection_path))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """A function of which no case is asked for has none."""
    is_test = name.startswith(("test", "Test")) and isinstance(obj, FunctionType | type)
    return (
        []
        if is_test and is_left_out(collector.config, f"{collector.nodeid}::{name}", obj)
        else None
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cases that take long are slow."""
    if not item.config.getoption("--all-cases"):
        mark_slow(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the quick tests those come first that need the fork server: they are among the first that one worker gets, so
    that the others need none of their own, which takes ten seconds to import what it has. Tests marked gpu are skipped
    where there is no CUDA device.
    """
    if "slow" in excluded(config):
        items.sort(key=lambda item: not (isinstance(item, pytest.Function) and forks(item.module)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector rests while modules and thousands of tests are made, and leaves alone what is there before
    the first test, garbage included: to look for it would take seconds.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        leave_alone()
        gc.enable()


def pytest_runtest_teardown() -> None:
    """So it does with libraries that a test was the first to import: a full collection, as after each shortage of
    memory, would look through their 700,000 objects for a second.
    """
    if len(sys.modules) > num_known_modules + MANY_MODULES:
        gc.collect()
        leave_alone()


def leave_alone() -> None:
    """The garbage collector looks no more at any object that is there now."""
    global num_known_modules
    num_known_modules = len(sys.modules)
    gc.freeze()


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a test caches goes to a directory of its own; real models come from the user's cache. Only which library
    computes which products is measured once for all, and kept however disturbed: it takes half a second.
    """
    if request.node.get_closest_marker("real") is None:
        base = tmp_path_factory.getbasetemp()
        place = base / "taut-caches" / str(next(NUMBERS))
        monkeypatch.setenv("TAUT_CACHE", str(place))
        if request.module.__name__ != "tests.unit.models.cpu.test_cpu_matmul":
            place.mkdir(parents=True)
            (base / "taut-cpu-matmul").mkdir(exist_ok=True)
            (place / "cpu_matmul").symlink_to(base / "taut-cpu-matmul")
            if (cpu_matmul := sys.modules.get("taut.models.cpu.cpu_matmul")) is not None:
                monkeypatch.setattr(cpu_matmul, "SETTLED", math.inf)
