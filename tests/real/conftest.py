"""The small real model, for the tests of this folder, and a server that its weights are pushed to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.real.vllm import served

from taut.data.cache import default_directory
from taut.demo import fetch
from taut.inference import worker


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Its directory; the test is skipped where make demo has not put it in the cache."""
    wheel = default_directory() / "wheels" / fetch.MODEL_WHEEL.file
    if not wheel.exists():
        pytest.skip("the model is not in the cache; run make demo once")
    return fetch.get_model(default_directory())


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
