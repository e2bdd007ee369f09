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
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

from collections.abc import Generator, Sequence
from itertools import count

import pytest

NUMBERS = count()
MANY_MODULES = 100
num_known_modules = 0
"""How many were imported when ``leave_alone`` last looked."""


def pytest_configure() -> None:
    """taut ignores a signal that was ignored when it started (nohup). Tests of signals start from the defaults."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no CUDA device."""
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
    the first test.
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
        leave_alone()


def leave_alone() -> None:
    """The garbage collector looks no more at any object that is there now."""
    global num_known_modules
    num_known_modules = len(sys.modules)
    gc.collect()
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
        if request.module.__name__ != "tests.unit.models.test_products":
            place.mkdir(parents=True)
            (base / "taut-products").mkdir(exist_ok=True)
            (place / "products").symlink_to(base / "taut-products")
            if (products := sys.modules.get("taut.models.products")) is not None:
                monkeypatch.setattr(products, "SETTLED", math.inf)
