"""An endpoint on the loopback that speaks SGLang's protocol, by the source of 0.5.23, and samples from its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.fake_vllm import BEST, Body, _send
from tests.helpers.sampling_server import SamplingServer

START = "model-directory"


@dataclass
class FakeSglang(SamplingServer):
    """``requests`` has every body sent to /generate."""

    owner: str = "sglang"
    dtype: str = "float32"
    is_deterministic: bool = True
    modes: tuple[str, ...] = ("abort", "retract", "in_place")
    """How it can pause."""
    answers: Body = field(default_factory=dict)
    """What takes the place of parts of an answer to /generate."""

    def restart(self) -> None:
        super().restart()
        self.model_path, self.weight_version = START, "default"

    def handle(self, handler: Any, body: Body | None) -> None:
        if self.is_gone:
            handler.close_connection = True
            return
        self.told.append(handler.path)
        status, answer = 200, self._answer(handler.path, body)
        if handler.path == "/update_weights_from_disk" and not answer["success"]:
            status = 400
        if answer is None:
            status, answer = 404, {"detail": "Not Found"}
        _send(handler, status, json.dumps(answer))

    def _answer(self, path: str, body: Body | None) -> Any:
        if path == "/v1/models":
            name = self.names[0] if self.model_path == START else self.model_path
            card = {"id": name, "owned_by": self.owner, "max_model_len": self.max_model_len}
            return {"data": [card]}
        if path == "/server_info":
            return {
                "served_model_name": self.names[0],
                "dtype": self.dtype,
                "startup_time": {"load": 3.25 + self.num_restarts},
                "enable_deterministic_inference": self.is_deterministic,
            }
        if path == "/model_info":
            return {"model_path": self.model_path, "weight_version": self.weight_version}
        if path == "/openapi.json":
            mode = {"enum": list(self.modes)}
            schema = {"PauseGenerationReqInput": {"properties": {"mode": mode}}}
            return {"paths": {"/pause_generation": {}}, "components": {"schemas": schema}}
        if body is None:
            return None
        if path == "/pause_generation":
            assert body == {"mode": "retract"}, "any other mode loses requests, or keeps their keys"
            with self.step:
                self.runs.clear()
            return {"status": "ok"}
        if path == "/continue_generation":
            self.runs.set()
            return {"status": "ok"}
        if path == "/update_weights_from_disk":
            assert body["flush_cache"] is True
            error = self.worker.taut_load(body["model_path"], 0).get("error")
            if error is None:
                self.model_path = body["model_path"]
                self.weight_version = body["weight_version"]
            return {"success": error is None, "message": error or "Succeeded to update weights."}
        if path == "/v1/tokenize":
            if "messages" in body:
                assert body["add_generation_prompt"] is True
                return {"tokens": self.rendered, "count": len(self.rendered or [])}
            assert body["add_special_tokens"] is False
            return {"tokens": self.spell(body["prompt"]), "count": 0}
        return self._generate(body) if path == "/generate" else None

    def _generate(self, body: Body) -> Body:
        with self.lock:
            self.requests.append(body)
        params = body["sampling_params"]
        asked = {
            "model": self.names[0],
            "prompt": body["input_ids"],
            "max_tokens": params["max_new_tokens"],
            "temperature": params["temperature"],
            "top_k": max(params["top_k"], 0),
            "stop": params["stop"] or [],
            "stop_token_ids": params["stop_token_ids"] or [],
            "seed": params["sampling_seed"] or 0,
            "logprobs": body["top_logprobs_num"],
        }
        meta: Body = {"prompt_tokens": len(body["input_ids"]), "weight_version": "any"}
        if body["logprob_start_len"] == 0:
            places = self.choice({**asked, "prompt_logprobs": 0})["prompt_logprobs"]
            values = [None, *(next(iter(place.values()))["logprob"] for place in places[1:])]
            pairs = zip(values, body["input_ids"], strict=True)
            meta["input_token_logprobs"] = [[value, index, None] for value, index in pairs]
            ids, values, reason = [1], [-1.0], "length"
        else:
            choice = self.choice(asked)
            ids, reason = choice["token_ids"], choice["finish_reason"]
            values = choice["logprobs"]["token_logprobs"]
        meta["finish_reason"] = {"type": reason}
        meta["output_token_logprobs"] = [
            [value, index, None] for value, index in zip(values, ids, strict=True)
        ]
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [[[value, 5, None]] for value in values]
        return {"text": "not to be read", "output_ids": ids, "meta_info": {**meta, **self.answers}}

    def _value(self, body: Body) -> float:
        return BEST / (body["temperature"] or 1)
