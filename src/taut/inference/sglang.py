"""A server that is SGLang, as the same endpoint as vLLM: its own /generate takes and returns token ids.

    /generate                       input_ids -> output_ids, each with its logprob; a prompt's logprobs
    /v1/tokenize                    the ids of a text or a chat
    /server_info, /model_info       the process, its settings, and the weights loaded last
    /pause_generation               mode=retract: requests under way go back to the queue
    /continue_generation            they compute their keys and values again, and go on
    /update_weights_from_disk       reads a folder's files, and empties the prefix cache

A logprob is the model's after temperature, before top-k, top-p and min-p: the policy's where every token can be drawn.
Two things differ from vLLM with taut's extension. Its checksums are of fused tensors, by a hash of its own, so a push
is proven by the name of the folder that was loaded and by the logprobs of the probe. And a request's seed counts with
``--enable-deterministic-inference`` only. Adapters are not pushed alone. Written from the source of SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
from pydantic import BaseModel

from taut.errors import EngineError, RequestRefused
from taut.inference.vllm_client import (
    Endpoint,
    Models,
    ParameterReport,
    VllmServer,
    WorkerState,
    parsed,
)

PUSHED = "taut-"
"""Before the version of weights that were pushed."""
DETERMINISTIC = "--enable-deterministic-inference"
"""The option with which a request's seed counts."""
DTYPES = ("float32", "float16", "bfloat16")


class Info(BaseModel):
    """Facts that a server reports at its start, as far as taut reads them."""

    served_model_name: str
    dtype: str
    startup_time: dict[str, Any]
    """Seconds of each stage: other numbers after a restart."""
    enable_deterministic_inference: bool


class _Weights(BaseModel):
    model_path: str
    weight_version: str


class _Tokens(BaseModel):
    tokens: list[int]


class _Finish(BaseModel):
    type: str


class _Meta(BaseModel):
    prompt_tokens: int
    finish_reason: _Finish | None
    output_token_logprobs: list[list[Any]]
    """Logprob, id and text of each token."""
    output_top_logprobs: list[list[list[Any]] | None] | None = None
    input_token_logprobs: list[list[Any]] | None = None


class _Generated(BaseModel):
    output_ids: list[int]
    meta_info: _Meta


def is_sglang(endpoint: Endpoint) -> bool:
    """Whether the server at an OpenAI-compatible endpoint says that it is SGLang."""
    cards = parsed(Models, endpoint.ask("models")).data
    return any(card.owned_by == "sglang" for card in cards)


class SglangEndpoint(Endpoint):
    """Its root, which answers requests for completions, chats and models as vLLM's /v1 does."""

    async def send(
        self,
        client: httpx2.AsyncClient,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        is_json: bool = True,
    ) -> Any:
        if path == "models":
            info = parsed(Info, await super().send(client, "server_info"))
            card = parsed(Models, await super().send(client, "v1/models")).data[0]
            # the name that it lists becomes the folder of the last push
            return {"data": [{"id": info.served_model_name, "max_model_len": card.max_model_len}]}
        if path == "chat/completions" and body is not None:
            asked = {"messages": body["messages"], "add_generation_prompt": True}
            tokens = parsed(_Tokens, await super().send(client, "v1/tokenize", asked)).tokens
            return {"prompt_token_ids": tokens}
        if path == "completions" and body is not None:
            if isinstance(body["prompt"], str):
                asked = {"prompt": body["prompt"], "add_special_tokens": False}
                tokens = parsed(_Tokens, await super().send(client, "v1/tokenize", asked)).tokens
                return {"choices": [{"prompt_token_ids": tokens}]}
            answer = await super().send(client, "generate", request_of(body))
            return {"choices": [choice_of(body, parsed(_Generated, answer))]}
        return await super().send(client, path, body, is_json=is_json)


def request_of(body: dict[str, Any]) -> dict[str, Any]:
    """The request to /generate for one to vLLM's /v1/completions."""
    same = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    sampling = {key: body[key] for key in (*same, "frequency_penalty") if key in body}
    sampling |= {
        "max_new_tokens": body["max_tokens"],
        "top_k": body.get("top_k") or -1,
        "stop": body.get("stop") or None,
        "stop_token_ids": body.get("stop_token_ids") or None,
        "sampling_seed": body.get("seed"),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    return {
        "input_ids": body["prompt"],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0 if "prompt_logprobs" in body else -1,
        "top_logprobs_num": body.get("logprobs", 0),
    }


def choice_of(body: dict[str, Any], answer: _Generated) -> dict[str, Any]:
    """The choice of vLLM's answer. Raises EngineError for an answer to another prompt, or for logprobs of other ids."""
    meta, ids = answer.meta_info, answer.output_ids
    if meta.prompt_tokens != len(body["prompt"]):
        raise EngineError(
            f"server: it read {meta.prompt_tokens} prompt ids, and {len(body['prompt'])} were sent; expected the same "
            "ids; serve the model without what changes its prompts"
        )
    if [index for _, index, _ in meta.output_token_logprobs] != ids:
        raise EngineError(
            f"server: it returned logprobs of {len(meta.output_token_logprobs)} ids that are not the {len(ids)} "
            "sampled; expected one of each; serve the model with SGLang 0.5.23"
        )
    choice: dict[str, Any] = {
        "finish_reason": None if meta.finish_reason is None else meta.finish_reason.type,
        "token_ids": ids,
        "logprobs": {
            "token_logprobs": [value for value, _, _ in meta.output_token_logprobs],
            "top_logprobs": [
                {f"{index}": value for value, index, _ in place or []}
                for place in meta.output_top_logprobs or []
            ],
        },
    }
    if "prompt_logprobs" in body:
        choice["prompt_logprobs"] = [
            None if value is None else {f"{index}": {"logprob": value}}
            for value, index, _ in meta.input_token_logprobs or []
        ]
    return choice


@dataclass(frozen=True)
class SglangServer(VllmServer):
    """An SGLang server, by its addresses. ``openai`` is a SglangEndpoint."""

    def worker(self) -> WorkerState:
        """Raises EngineError where it does not say in which dtype it computes."""
        return self.workers()[0]

    def workers(self) -> list[WorkerState]:
        return [_state(self.control.ask("server_info"), self.control.ask("model_info"))]

    async def held(self, client: httpx2.AsyncClient) -> list[WorkerState]:
        info = await self.control.send(client, "server_info")
        return [_state(info, await self.control.send(client, "model_info"))]

    def load(self, folder: Path, version: int) -> None:
        """Have it load a folder's weights, and empty its prefix cache."""
        body = {"model_path": str(folder), "weight_version": f"{PUSHED}{version}"}
        try:
            self.root.ask("update_weights_from_disk", {**body, "flush_cache": True})
        except RequestRefused as error:
            raise EngineError(
                f"{error}; expected to see {folder} under this name and be allowed to read it; set "
                "rollout.server.sync.folder to a folder that both see (docs/serving.md)"
            ) from None

    def empty_prefix_cache(self) -> None:
        """``load`` has."""

    def checksums(self, names: Sequence[str]) -> list[list[ParameterReport]] | None:
        """None: it has no checksums that could be computed here."""
        return None

    def takes_adapters(self) -> bool:
        return False

    @cached_property
    def pauses(self) -> bool:
        """Whether it can take requests under way back into its queue. An older one aborts them."""
        try:
            routes = self.control.ask("openapi.json")
        except EngineError:
            return False
        return "/pause_generation" in json.dumps(routes) and '"retract"' in json.dumps(routes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.control.ask("pause_generation", {"mode": "retract"})
        try:
            yield
        except BaseException:
            with suppress(EngineError):
                self.control.ask("continue_generation", {})
            raise
        self.control.ask("continue_generation", {})

    @property
    def keeps_seeds(self) -> bool:
        info = parsed(Info, self.control.ask("server_info"))
        return info.enable_deterministic_inference


def _state(info: Any, weights: Any) -> WorkerState:
    started, loaded = parsed(Info, info), parsed(_Weights, weights)
    if started.dtype not in DTYPES:
        raise EngineError(
            f"server: it says dtype {started.dtype}; expected the one that it computes in; start SGLang with --dtype "
            "bfloat16 (or float16, float32)"
        )
    number = loaded.weight_version.removeprefix(PUSHED)
    is_pushed = loaded.weight_version.startswith(PUSHED) and number.isdecimal()
    return WorkerState(
        start=json.dumps(started.startup_time, sort_keys=True),
        version=int(number) if is_pushed else -1,
        folder=loaded.model_path if is_pushed else "",
        dtype=started.dtype,
        is_probed_alone=False,
    )
