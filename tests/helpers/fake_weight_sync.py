"""An endpoint that has weights: a tiny model behind ``FakeServer``, in the hands of taut's own worker extension.

    with WeightServer(model=tiny()) as server:
        engine = ServerEngine.open(server.url, ...).follow(TrainingModel(...))

What it says of a prompt (prompt_logprobs) is the model's own; completions stay those of the rule. ``restart`` puts the
weights it was started with back, in a process that calls itself another.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from tests.helpers.fake_vllm import Body, FakeServer, _send
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.inference.weight_sync import TrainingModel
from taut.inference.worker import taut_worker
from taut.models.attention_backends import PREFIX
from taut.models.scorer import Scorer
from taut.train.distributed import Ranks

CPU = torch.device("cpu")
_MODES = {"anyOf": [{"enum": ["abort", "wait", "keep"]}, {"type": "null"}]}
ROUTES = {
    "paths": {
        "/pause": {"post": {"parameters": [{"name": "mode", "in": "query", "schema": _MODES}]}},
        "/resume": {"post": {}},
        "/health": {"get": {"parameters": []}},
    }
}
"""What vLLM says of its routes, as far as it is read."""
SLEEPS = {"vllm_config": {"model_config": {"enable_sleep_mode": True}}}
"""What it says of a server that can sleep, as far as it is read."""
PARTS = frozenset({"weights", "kv_cache"})


def tiny(seed: int = 0, name: str = "llama") -> PreTrainedModel:
    return tiny_model(name, vocab_size=len(tiny_tokenizer()), dtype=torch.float32, seed=seed)


def trained(model: nn.Module, ranks: Ranks | None = None) -> TrainingModel:
    """A model in training."""
    inner: Any = model
    inner.set_attn_implementation(PREFIX + "reference")
    return TrainingModel(Scorer(model), ranks or Ranks(0, 1, CPU), torch.float32)


def change(model: nn.Module, seed: int = 1, size: float = 0.1) -> None:
    """What an update would do, only larger."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=random))


class Worker(taut_worker.TautWorker):
    """vLLM's worker, as far as the extension looks at it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.keeps: Callable[[str], bool] = lambda name: False
        """Which tensors stay as they are, whatever is loaded."""
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model,
            model_config=SimpleNamespace(dtype=torch.float32),
            lora_config=None,
        )

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        state = {name: value for name, value in weights_iterator if not self.keeps(name)}
        self.model.load_state_dict(state, strict=False)


@dataclass
class WeightServer(FakeServer):
    """Serves ``model`` under the first of ``names``. ``has``: which ways its weights can be changed, and pause."""

    model: PreTrainedModel = field(default_factory=tiny)
    has: tuple[str, ...] = ("full",)
    is_stale: bool = False
    """Whether it goes on saying what it said of the weights it was started with."""
    is_busy: bool = False
    """Whether its prefix cache cannot be emptied."""
    slow: float = 0.0
    """Seconds before it loads."""
    is_gone: bool = False
    """Whether it hangs up on everybody."""
    num_restarts: int = 0
    runs: threading.Event = field(default_factory=threading.Event)
    """Cleared while it is paused: then nothing is sampled."""
    step: threading.Lock = field(default_factory=threading.Lock)
    """Held while a token is sampled."""
    asleep: frozenset[str] = frozenset()
    """The parts that are asleep: what needs them is refused."""
    told: list[str] = field(default_factory=list)
    """The paths beside completions, in order."""

    def __post_init__(self) -> None:
        self.started_with = copy.deepcopy(self.model)
        self.runs.set()
        self.restart()

    def restart(self) -> None:
        self.worker = Worker(copy.deepcopy(self.started_with))
        self.adapters: dict[str, Any] = {}
        self.names = self.names[:1]
        self.num_restarts += 1

    def handle(self, handler: Any, body: Body | None) -> None:
        way = {"/collective_rpc": "full", "/v1/load_lora_adapter": "adapter"}
        way |= {"/v1/unload_lora_adapter": "adapter", "/reset_prefix_cache": "full"}
        way |= {"/pause": "pause", "/resume": "pause", "/openapi.json": "pause"}
        way |= {"/sleep": "sleep", "/wake_up": "sleep", "/server_info": "sleep"}
        path, _, query = handler.path.partition("?")
        if self.is_gone:
            handler.close_connection = True
            return None
        if path == "/v1/completions" and self.asleep:
            self.told.append("a request while it sleeps")
            return _send(handler, 400, json.dumps({"error": {"message": "it sleeps"}}))
        reads = {"/openapi.json": ROUTES, "/server_info": SLEEPS}
        if way.get(path) not in self.has or (body is None and path not in reads):
            return super().handle(handler, body)
        if path in reads:
            return _send(handler, 200, json.dumps(reads[path]))
        assert body is not None
        self.told.append(f"{handler.path} {body['method']}" if "method" in body else handler.path)
        if path == "/collective_rpc":
            status, text = self._call(body)
        elif path == "/pause":
            assert query == "mode=keep", "any other mode loses the requests under way"
            with self.step:
                self.runs.clear()
            status, text = 200, json.dumps({"status": "paused"})
        elif path == "/sleep":
            assert query == "level=1", "at another level the weights are lost, or stay"
            assert not self.under_way, "its requests would be aborted"
            self.asleep = PARTS
            status, text = 200, json.dumps({"status": "sleeping"})
        elif path == "/wake_up":
            tags = frozenset(tag.removeprefix("tags=") for tag in query.split("&") if tag)
            assert tags <= PARTS
            self.asleep -= tags or PARTS
            status, text = 200, json.dumps({"status": "sleeping" if self.asleep else "awake"})
        elif path == "/resume":
            self.runs.set()
            status, text = 200, json.dumps({"status": "resumed"})
        elif path == "/reset_prefix_cache":  # as vLLM: not while a frozen request has blocks
            is_used = not self.runs.is_set() and query != "reset_running_requests=true"
            status, text = 200, json.dumps({"success": not (self.is_busy or is_used)})
        else:
            status, text = self._adapter(handler.path, body)
        return _send(handler, status, text)

    def _call(self, body: Body) -> tuple[int, str]:
        if "weights" in self.asleep and body["method"] != "taut_held":
            return 500, json.dumps({"error": {"message": "its weights are not there"}})
        time.sleep(self.slow if body["method"] == "taut_load" else 0.0)
        result = getattr(self.worker, body["method"])(**body["kwargs"])
        if body["method"] == "taut_held":
            result["start"] += f"{self.num_restarts}"
        return 200, json.dumps({"results": [result]})

    def _adapter(self, path: str, body: Body) -> tuple[int, str]:
        if "lora_name" not in body:
            return 400, json.dumps({"error": {"message": "lora_name is missing"}})
        name = body["lora_name"]
        if path.endswith("unload_lora_adapter"):
            if self.adapters.pop(name, None) is None:
                return 404, json.dumps({"error": {"message": f"{name} is not loaded"}})
        else:
            base: Any = copy.deepcopy(self.worker.model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the library, for peft
                self.adapters[name] = PeftModel.from_pretrained(base, Path(body["lora_path"]))
        self.names = (self.names[0], *self.adapters)
        return 200, f"Success: {name}"

    def choice(self, body: Body) -> Body:
        if "prompt_logprobs" not in body:
            return super().choice(body)
        model = self.adapters.get(body["model"], self.worker.model)
        model = self.started_with if self.is_stale else model
        ids = torch.tensor(body["prompt"])
        with torch.no_grad():
            logp = model.eval()(ids[None], use_cache=False).logits[0].log_softmax(-1)
        said = [{f"{i}": {"logprob": float(row[i])}} for i, row in zip(ids[1:], logp, strict=False)]
        return {"prompt_logprobs": [None, *said]}
