"""vLLM's own weight transfer: its routes and its reload layer by layer, with the host's memory in place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.fake_weight_sync import CPU, change
from tests.helpers.fake_weight_transfer import FileChannel, stand_in
from tests.real.test_push import LIMIT, loaded
from tests.real.vllm import needs_vllm, served

from taut.config import replace
from taut.data.render.render import Renderer
from taut.inference import worker
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine
from taut.inference.weight_sync import TrainingModel
from taut.inference.weight_transfer import CHANNELS, UNPICKLES
from taut.models.load import load_tokenizer
from taut.models.scorer import Scorer
from taut.train.distributed import Ranks
from taut.types import Prompt

pytestmark = [pytest.mark.real, pytest.mark.slow, needs_vllm]


def test_vllm_reloads_what_is_sent_by_its_routes(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is ``vllm_engine/shared_memory_engine.py``. Several chunks, some of which end amid a layer."""
    stand_in(monkeypatch, chunk_bytes=2**26)
    monkeypatch.setitem(CHANNELS, "shared_memory", FileChannel)
    folders = (Path(__file__).parent / "vllm_engine", Path(worker.__file__).parent)
    variables = {"VLLM_SERVER_DEV_MODE": "1", UNPICKLES: "1"}
    variables["PYTHONPATH"] = ":".join(map(str, folders))
    options = (
        "--worker-extension-cls=shared_memory_engine.Worker",
        '--weight-transfer-config={"backend": "shared_memory"}',
        "--served-model-name=smol",
        "--logprobs-mode=processed_logprobs",
    )
    model, tokenizer = loaded(real_model), load_tokenizer(str(real_model))
    renderer = Renderer(tokenizer)
    prompt = Prompt("a", renderer.prompt_ids([{"role": "user", "content": "Name a color."}]))
    asked = TrainingModel(Scorer(model), Ranks(0, 1, CPU), torch.float32)
    with served(real_model, tmp_path / "log", options, variables) as url:
        config = replace(ServerConfig(), {"retries": 0})
        engine = ServerEngine.open(url, config, tokenizer, renderer.stop_ids, 1024)
        try:
            engine = engine.follow(asked)
            assert engine.sync is not None
            (way,) = [it for it in engine.decisions if it.name == "weight transfer"]
            assert way.value == "shared_memory"
            for version in (0, 1, 2):
                engine.update(version)
                (proof,) = engine.sync.proofs
                assert proof.largest_error < LIMIT and (proof.num_equal, proof.unread) == (272, ())
                assert (proof.largest_change > 100 * LIMIT) == (version > 0)
                (completion,) = engine.generate([prompt], Sampling(max_new_tokens=8, seed=1))
                assert completion.version == version and completion.logp_N is not None
                ids_T = np.concatenate([prompt.ids_T, completion.ids_N])
                own_N = asked.log_probs(ids_T)[-completion.ids_N.size :]
                assert np.abs(own_N - completion.logp_N).max() < LIMIT
                change(model, seed=version, size=0.01)
        finally:
            engine.close()
