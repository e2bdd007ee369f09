"""SGLang's own routes as an engine: ids, logprobs, weights, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.fake_sglang import FakeSglang
from tests.helpers.fake_vllm import CONFIG, FakeServer, prompt
from tests.helpers.fake_weight_sync import change, tiny, trained
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import nn

from taut.config import replace
from taut.errors import EngineError
from taut.inference.engine import stream_seed
from taut.inference.settings import EndpointConfig, Sampling
from taut.inference.teacher_server import TeacherServer
from taut.inference.vllm import ServerEngine, Stream
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig
from taut.types import Completion, FloatArray

SAMPLING = Sampling(max_new_tokens=8, seed=3)
PROMPT = prompt("a", 1, 20)
PATIENCE = 20.0


@contextmanager
def opened(
    server: FakeServer, folder: Path | None = None, model: nn.Module | None = None, **config: Any
) -> Iterator[ServerEngine]:
    given = {"timeout": PATIENCE, "sync.folder": folder and str(folder), **config}
    with server:
        engine = ServerEngine.open(
            server.url, replace(CONFIG, given), tiny_tokenizer(), [7], 64, section=""
        )
        try:
            yield engine if model is None else engine.follow(trained(model))
        finally:
            engine.close()


def logps(model: nn.Module, completion: Completion) -> FloatArray:
    ids = torch.tensor([[*PROMPT.ids_T.tolist(), *completion.ids_N.tolist()]])
    with torch.no_grad():
        logp = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    found: FloatArray = logp[1:-1].gather(-1, ids[0, 2:, None])[:, 0].numpy()
    return found


def decided(engine: ServerEngine, name: str) -> list[tuple[str, str]]:
    return [(it.value, it.reason) for it in engine.decisions if it.name == name]


def test_ids_and_logprobs_are_the_server_s_and_all_that_shapes_the_policy_is_sent() -> None:
    with opened(server := FakeSglang()) as engine:
        sampling = replace(SAMPLING, {"top_k": 5, "stop": ["!"], "min_p": 0.1, "top_p": 0.9})
        (completion,) = engine.generate([PROMPT], sampling)
        (plain,) = engine.generate([PROMPT], SAMPLING)
    *_, asked, last = server.requests
    assert asked["input_ids"] == [1, 20] and asked["return_logprob"] is True
    assert asked["logprob_start_len"] == -1
    assert asked["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 0.9,
        "min_p": 0.1,
        "top_k": 5,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_new_tokens": 8,
        "stop": ["!"],
        "stop_token_ids": [7],
        "sampling_seed": stream_seed(3, "a", 0),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    assert last["sampling_params"]["top_k"] == -1
    assert completion.logp_N is None, "it is the model's after temperature, before top-k"
    assert plain.logp_N is not None and plain.error is None
    assert np.abs(plain.logp_N - logps(server.worker.model, plain)).max() < 1e-5
    assert decided(engine, "server logprobs")[0][0] == "unknown"
    assert decided(engine, "server.name") == [("model", "the only model it serves")]


def test_a_chat_is_rendered_by_its_own_tokenizer() -> None:
    with opened(FakeSglang(rendered=[3, 4])) as engine:
        assert engine.render([{"role": "user", "content": "Hello"}]) == [3, 4]


def test_a_request_under_way_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    """It is retracted, the folder is loaded, and the probe proves it; there are no checksums."""
    came, goes_on, done = threading.Event(), threading.Event(), SimpleQueue[int]()

    def wait(ids: list[int]) -> None:
        if len(ids) == PROMPT.ids_T.size + 4 and not came.is_set():
            came.set()
            assert goes_on.wait(PATIENCE)

    model, old = tiny(), tiny()
    server = FakeSglang(before_token=wait)
    with opened(server, tmp_path, model) as engine:
        engine.update(5)
        stream = Stream(engine, SAMPLING, done.put)
        stream.ask(0, PROMPT)
        assert came.wait(PATIENCE)
        change(model)
        server.told.clear()
        engine.update(6)
        loads = [path for path in server.told if "_generation" in path or "update" in path]
        assert loads == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        goes_on.set()
        completion = stream.take(done.get(timeout=PATIENCE))
        assert engine.sync is not None
        (proof,) = engine.sync.proofs
        assert (proof.version, proof.mode, proof.num_equal) == (6, "full", 0)
        assert len(proof.unread) == sum(1 for _ in model.parameters())
        assert proof.largest_error < 1e-5 < proof.largest_change
        assert decided(engine, "requests during a push")[0][0] == "go on with the new weights"
    assert completion.version == 5 and completion.logp_N is not None
    assert np.abs(completion.logp_N - logps(old, completion))[:4].max() < 1e-5
    assert np.abs(completion.logp_N - logps(server.worker.model, completion))[4:].max() < 1e-5


def test_one_that_keeps_old_weights_is_refused_by_the_probe(tmp_path: Path) -> None:
    server, model = FakeSglang(), tiny()
    with opened(server, tmp_path, model) as engine:
        engine.update(0)
        server.is_stale = True
        change(model)
        with pytest.raises(EngineError, match="it keeps the old weights"):
            engine.update(1)


def test_one_that_was_started_again_gets_its_weights_again(tmp_path: Path) -> None:
    model = tiny()
    change(model)
    server = FakeSglang()
    with opened(server, tmp_path, model) as engine:
        engine.update(5)
        server.restart()
        (completion,) = engine.generate([PROMPT], SAMPLING)
        assert engine.sync is not None and engine.sync.restarts == 1
        assert server.weight_version == "taut-5"
    assert completion.version == 5 and completion.logp_N is not None
    assert np.abs(completion.logp_N - logps(server.worker.model, completion)).max() < 1e-5
    assert np.abs(completion.logp_N - logps(tiny(), completion)).max() > 1e-3


def test_weights_of_another_client_are_not_used(tmp_path: Path) -> None:
    server = FakeSglang()
    with opened(server, tmp_path, tiny()) as engine:
        engine.update(5)
        server.model_path = "elsewhere"
        with pytest.raises(EngineError, match=r"holds weights of version 5 \(elsewhere\)"):
            engine.generate([PROMPT], SAMPLING)


def test_one_that_cannot_retract_has_its_requests_waited_for(tmp_path: Path) -> None:
    server = FakeSglang(modes=("abort",))
    with opened(server, tmp_path, tiny()) as engine:
        engine.update(5)
        assert decided(engine, "requests during a push")[0][0] == "are waited for"
    assert "/pause_generation" not in server.told


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_seeds_that_do_not_count_are_told(is_deterministic: bool) -> None:
    with opened(FakeSglang(is_deterministic=is_deterministic)) as engine:
        told = decided(engine, "server seeds")
    assert [value for value, _ in told] == ([] if is_deterministic else ["not kept"])


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"says dtype auto; .*start SGLang with --dtype bfloat16"),
        opened(FakeSglang(dtype="auto"), tmp_path, tiny()),
    ):
        pass
    adapted = apply_lora(tiny(), LoraConfig(rank=2, train_token_rows="never"))
    with (
        pytest.raises(EngineError, match="takes no adapters while it runs"),
        opened(FakeSglang(), tmp_path, adapted, **{"sync.mode": "adapter"}),
    ):
        pass
    server = FakeSglang()
    with opened(server, tmp_path, tiny()) as engine:
        (tmp_path / "elsewhere").mkdir()
        server.worker.taut_load = lambda folder, version: {"error": "sees no file"}  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"HTTP 400 .*sees no file; .*sync\.folder"):
            engine.update(0)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"prompt_tokens": 3}, "read 3 prompt ids, and 2 were sent"),
        ({"output_token_logprobs": [[-1.0, 5, None]]}, "logprobs of 1 ids that are not"),
        ({"output_token_logprobs": None}, "output_token_logprobs in an answer is not as it should"),
    ],
)
def test_an_answer_about_something_else_is_refused(answers: dict[str, Any], found: str) -> None:
    server = FakeSglang()
    with opened(server) as engine:
        server.answers = answers
        with pytest.raises(EngineError, match=found):
            engine.generate([PROMPT], SAMPLING)


def test_one_that_ends_by_itself_is_an_error() -> None:
    server = FakeSglang()
    with opened(server) as engine:
        server.answers = {"finish_reason": {"type": "abort", "message": "no room"}}
        (completion,) = engine.generate([PROMPT], SAMPLING)
    assert completion.finish_reason == "error" and "finish_reason=abort" in str(completion.error)


def test_it_is_no_teacher() -> None:
    config = EndpointConfig(timeout=5.0, retries=0)
    given = {"top": 3, "num_rows": 9, "longest": 60, "section": "distill."}
    with (
        FakeServer(owner="sglang") as server,
        pytest.raises(EngineError, match="is SGLang, which is asked for completions only"),
    ):
        TeacherServer.open(server.url, config, tiny_tokenizer(), **given)  # type: ignore[arg-type]
