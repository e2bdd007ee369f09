"""An endpoint that samples from the weights it was given: what a run that trains against a server needs.

``WeightServer`` says the logprobs of its model and completes by a rule; this one completes by its model, at the
temperature and with the seed that it is asked for. As a process of its own it takes the place of ``vllm serve``:

    python -m tests.helpers.sampling_server MODEL HOST PORT FOLDER

It writes its process number into FOLDER/PORT once it samples, and does nothing more while there is a FOLDER/hold.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.helpers.fake_vllm import Body
from tests.helpers.fake_weight_sync import WeightServer
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass
class SamplingServer(WeightServer):
    """Processed logprobs, token by token, each by the weights it then has. Nothing is sampled while it is paused."""

    mode: str = "processed"
    max_model_len: int | None = 256
    before_token: Callable[[list[int]], None] = lambda ids: None
    """Called with the ids so far."""
    other: PreTrainedModel | None = None
    """What it samples from in place of what it was given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = tiny_tokenizer()

    def choice(self, body: Body) -> Body:
        if "prompt_logprobs" in body or body["logprobs"] == 1:  # a probe
            return super().choice(body)
        ids, logps, reason = list(body["prompt"]), [], "length"
        random = torch.Generator().manual_seed(body["seed"] % 2**63)
        with torch.no_grad():
            while reason == "length" and len(logps) < body["max_tokens"]:
                self.before_token(ids)
                self.runs.wait()
                with self.step:  # so that completions do not compete for the processor
                    if not self.runs.is_set():
                        continue
                    model = self.adapters.get(body["model"], self.other or self.worker.model)
                    logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
                logp = (logits / body["temperature"]).log_softmax(-1)
                index = int(torch.multinomial(logp.exp(), 1, generator=random))
                ids.append(index)
                logps.append(float(logp[index]))
                text = self.tokenizer.decode(ids[len(body["prompt"]) :])
                if index in body["stop_token_ids"] or any(stop in text for stop in body["stop"]):
                    reason = "stop"
        return {
            "index": 0,
            "text": "not to be read",
            "finish_reason": reason,
            "token_ids": ids[len(body["prompt"]) :],
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logps, "top_logprobs": None},
        }


def main(model: str, host: str, port: str, folder: str) -> None:
    place = Path(folder)

    def hold(ids: list[int]) -> None:
        (place / port).write_text(str(os.getpid()))
        while (place / "hold").exists():
            time.sleep(0.05)

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    has = ("full", "sleep")
    with SamplingServer(model=loaded, has=has, address=(host, int(port)), before_token=hold):
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
