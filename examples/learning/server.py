"""A server on one CPU core for runs with ``rollout.lag``: vLLM's protocol, and weights that follow those in training.

    python examples/learning/server.py MODEL        prints its address, and serves until its input ends

Completions are of taut's engine, in waves: what has been asked for when one begins. A wave has one version of the
weights. Protocol and weight updates are those of the server that the tests use (tests/helpers/fake_weight_sync.py).
It is no teacher (``distill.url``), and says so.
GET /settled is answered when nobody asks for anything any more (settled.py).
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.fake_vllm import Body, _send
from tests.helpers.fake_weight_sync import WeightServer

from taut.inference.local import LocalEngine
from taut.inference.settings import LocalConfig, Sampling
from taut.models.attention_backends import PREFIX
from taut.models.scorer import Scorer
from taut.types import Completion, Prompt

AT_ONCE = 256
"""Completions of a wave."""
SETTLED = 0.3
"""Seconds without a request, after which nobody asks any more."""
Asked = tuple[Body, Future[Completion]]


class WaveServer(WeightServer):
    """Answers requests in waves, at their temperature and by their seeds, with the logprobs that it drew from."""

    def start(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Begin to answer."""
        twin: PreTrainedModel = copy.deepcopy(self.worker.model)
        for own, pushed in zip(twin.parameters(), self.worker.model.parameters(), strict=True):
            own.data = pushed.data  # what is pushed is copied into it
        twin.set_attn_implementation(f"{PREFIX}reference")
        self.engine = LocalEngine(
            Scorer(twin.eval()),
            tokenizer,
            (),  # a request says where its answer ends
            context=self.max_model_len,
            config=LocalConfig(sequences=AT_ONCE),
        )
        self.asked: SimpleQueue[Asked] = SimpleQueue()
        Thread(target=self._answer, daemon=True).start()

    def handle(self, handler: Any, body: Body | None) -> None:
        asked = body or {}
        if "prompt_logprobs" in asked and isinstance(asked["prompt"], str):  # as of a teacher
            message = "examples/learning/server.py samples and is no teacher: expected vLLM"
            return _send(handler, 400, json.dumps({"error": {"message": message}}))
        if handler.path != "/settled":
            return super().handle(handler, body)
        busy_at = time.monotonic()
        while time.monotonic() - busy_at < SETTLED:
            time.sleep(SETTLED / 10)
            if self.under_way:
                busy_at = time.monotonic()
        return _send(handler, 200, "{}")

    def choice(self, body: Body) -> Body:
        if "prompt_logprobs" in body or body["logprobs"] == 1:  # a probe
            return super().choice(body)
        future: Future[Completion] = Future()
        self.asked.put((body, future))
        completion = future.result()
        return {
            "index": 0,
            "text": "not to be read",
            "finish_reason": completion.finish_reason,
            "token_ids": completion.ids_N.tolist(),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": completion.logp_N.tolist(), "top_logprobs": None},
        }

    def _answer(self) -> None:
        while True:
            wave = [self.asked.get()]
            self.runs.wait()
            with self.step:
                if self.runs.is_set():
                    wave += self._waiting(AT_ONCE - 1)
                    self._run_wave(wave)
                    continue
            self.asked.put(wave[0])  # paused in between

    def _waiting(self, most: int) -> list[Asked]:
        """What has been asked for, or is within ten milliseconds of another."""
        found: list[Asked] = []
        while len(found) < most:
            try:
                found.append(self.asked.get(timeout=0.01))
            except Empty:
                break
        return found

    def _run_wave(self, wave: Sequence[Asked]) -> None:
        """A stream of random numbers for each request, keyed by its seed."""
        prompts = [
            Prompt(f"{number} {body['seed']}", np.array(body["prompt"]), body["max_tokens"])
            for number, (body, _) in enumerate(wave)
        ]
        keys = ("temperature", "stop_token_ids", "stop")
        asked = [wave[0][0][key] for key in keys]
        assert all([body[key] for key in keys] == asked for body, _ in wave), "of one run"
        temperature, ends, stop = asked
        self.engine.stop_ids = frozenset(ends)
        most = self.max_model_len or 1
        sampling = Sampling(temperature=temperature, max_new_tokens=most, stop=stop)
        for (_, future), completion in zip(
            wave, self.engine.generate(prompts, sampling), strict=True
        ):
            future.set_result(completion)


def main(directory: str) -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    server = WaveServer(
        model=model,
        mode="processed",
        max_model_len=model.config.max_position_embeddings,
        has=("full", "pause"),
        spell=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
    )
    server.start(tokenizer)
    with server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
