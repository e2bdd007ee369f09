"""HTTP to an OpenAI-compatible endpoint: requests and responses as JSON, as many at a time as the caller starts.

Requests that failed in transit or met a busy server are repeated by the policy of ``taut.io.http``; one that stays
without an answer is NoAnswer. Other failures are an EngineError, or RequestRefused if only this request is at fault.
Requests run on a separate thread (``ClientThread``); cancelling a future closes its connection, and the server stops
working on it. The API key comes from the environment variable named by the caller and appears in no message.

Responses are parsed strictly, as far as they are used, and compared with the request. The weights of a vLLM server are
controlled by these endpoints:

    /v1/completions          prompt_logprobs of a fixed text
    /v1/load_lora_adapter, /v1/unload_lora_adapter          with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    /collective_rpc, /reset_prefix_cache                    with VLLM_SERVER_DEV_MODE=1; the methods are those of
                                                            inference/worker/taut_worker.py
    /pause?mode=keep, /resume                               freeze requests under way while weights are loaded; used
                                                            where /openapi.json has them
    /sleep?level=1, /wake_up?tags=...                       give GPU memory back between rollouts; used where asked for,
                                                            and /server_info says that the server can
    /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update, /weight_info,
    /server_info                                            vLLM's own transfer (weight_transfer.py)
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import httpx2
import numpy as np
from pydantic import BaseModel, Field, ValidationError

from taut.config import read_secret, read_url
from taut.errors import EngineError, RequestRefused
from taut.inference.settings import EndpointConfig
from taut.io import http
from taut.types import FloatArray, IntArray, Prompt

MAX_BYTES = 2**27
"""Bytes an answer may have, decompressed: a token with its logprob takes about a hundred."""
MAX_MESSAGE = 300
"""Characters of a server's own message that are repeated."""


class NoAnswer(EngineError):
    """A server that did not answer, however often it was asked."""


class Endpoint:
    """An endpoint at ``url``. ``close`` ends its thread and connections."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout: float,
        retries: int,
        backoff: float,
        section: str,
        url_key: str = "url",
        thread: http.ClientThread | None = None,
        patience: Sequence[str] = ("server.timeout", "server.retries"),
    ) -> None:
        """``section``: of the configuration, as in ``rollout.``; ``url_key``: its key with the URL; ``patience``: its
        keys that say how long to wait. ``thread``: of several endpoints, whose owner closes it; None: one of its own.
        """
        self.section, self.url_key = section, f"{section}{url_key}"
        self._patience = " or ".join(f"{section}{key}" for key in patience)
        self.url = read_url(url, self.url_key, f"{section}server.api_key_env")
        self._secret = read_secret(key, f"{section}server.api_key_env")
        self._headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        self._limits = http.Limits(timeout, MAX_BYTES)
        self._retries = http.Retries(retries + 1, backoff, http.LONGEST_WAIT)
        self._thread = thread or http.ClientThread()
        self._own = None if thread is not None else self._thread

    @classmethod
    def of(
        cls,
        url: str,
        config: EndpointConfig,
        section: str,
        *,
        url_key: str = "url",
        thread: http.ClientThread | None = None,
    ) -> Endpoint:
        """The endpoint that a section of the configuration names."""
        return cls(
            url,
            key=config.api_key_env,
            timeout=config.timeout,
            retries=config.retries,
            backoff=config.backoff,
            section=section,
            url_key=url_key,
            thread=thread,
        )

    def once(self) -> Endpoint:
        """The endpoint without retries."""
        single = copy.copy(self)
        single._retries = replace(self._retries, attempts=1)
        return single

    def close(self) -> None:
        """End its own thread and all requests under way."""
        if self._own is not None:
            self._own.close()

    def start(self, path: str, body: dict[str, Any] | None = None) -> Future[Any]:
        """The future answer to a POST of ``body``, or to a GET without ``body``."""
        return self._thread.start(self.send, path, body)

    def ask(
        self, path: str, body: dict[str, Any] | None = None, within: float | None = None
    ) -> Any:
        """Send a request, and wait for its answer. Raises TimeoutError after ``within`` seconds."""
        return _awaited(self.start(path, body), within)

    def tell(self, path: str, body: dict[str, Any], within: float | None = None) -> None:
        """POST, and wait for success; the answer's body is not read. Raises TimeoutError after ``within`` seconds."""
        _awaited(self._thread.start(self.send, path, body, is_json=False), within)

    async def send(
        self,
        client: httpx2.AsyncClient,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        is_json: bool = True,
    ) -> Any:
        """The answer's JSON, or None unless ``is_json``; for coroutines of the thread."""
        place = f"{self.url}/{path}"
        endpoint = (
            f"set {self.url_key} to OpenAI-compatible endpoints, as in http://127.0.0.1:8000/v1"
        )
        try:
            answer = await http.request_again(
                client,
                "GET" if body is None else "POST",
                place,
                self._limits,
                self._retries,
                headers=self._headers,
                json=body,
            )
        except http.Unanswered as failure:
            reason = self._safe(str(failure))
            if failure.answer is not None:
                reason = f"{reason} ({self._message(failure.answer)})"
            raise NoAnswer(
                f"server: {reason} from {place} ({failure.num_attempts} attempts); expected an answer; start the "
                f"server or wait for it, set {self._patience}, then run the same command again"
            ) from None
        except http.Refused as error:
            raise EngineError(
                f"server: {place} answered {self._safe(str(error))}; expected an uncompressed answer of at most "
                f"{MAX_BYTES:,} bytes; {endpoint}"
            ) from None
        # A refusal: who may correct it.
        if not answer.is_success:
            refusal = f"server: HTTP {answer.status} from {place}: {self._message(answer)}"
            remedy = (
                f"expected an OpenAI-compatible endpoint; set {self.url_key} as in "
                "http://127.0.0.1:8000/v1"
            )
            if answer.status in (401, 403):
                remedy = (
                    f"expected to be let in; set {self.section}server.api_key_env to the name of the environment "
                    "variable with the key"
                )
            elif 400 <= answer.status < 500 and answer.status not in (404, 405):
                raise RequestRefused(refusal)
            raise EngineError(f"{refusal}; {remedy}")
        if not is_json:
            return None
        try:
            return answer.json()
        except ValueError:
            raise EngineError(
                f"server: {place} answered {self._shown(answer.text)!r}; expected JSON; {endpoint}"
            ) from None

    def _message(self, answer: http.Answer) -> str:
        """The server's own message in a refusal."""
        try:
            message = answer.json()
        except ValueError:
            message = answer.text
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and message.get(name):
                message = message[name]
        return self._shown(str(message))

    def _shown(self, text: str) -> str:
        line = " ".join(self._safe(text).split())
        return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."

    def _safe(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


def _awaited(future: Future[Any], within: float | None = None) -> Any:
    try:
        return future.result(within)
    finally:
        future.cancel()


ABOVE_ZERO = 1e-4
"""How far rounding may lift a logprob above 0."""
BELOW_ALL = -9999.0
"""Number that vLLM writes for minus infinity, which no sampled token has."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""A server's logprob further than this (nats) from taut's own in float32 is another model's, by the server's dtype.
Measured with vLLM 0.32 on a CPU, SmolLM2-135M-Instruct: 4.7e-5 and 0.33 at most (greedy: 0.17; docs/serving.md);
kernels differ elsewhere."""

T = TypeVar("T", bound=BaseModel)


class Card(BaseModel):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None


class Models(BaseModel):
    data: list[Card]


class LogProbs(BaseModel):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(BaseModel):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: LogProbs | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class Answer(BaseModel):
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


class Rendered(BaseModel):
    prompt_token_ids: list[int] | None = None


def parsed(kind: type[T], answer: Any) -> T:
    """A response as ``kind``. Raises EngineError for any other."""
    try:
        return kind.model_validate(answer, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise EngineError(
            f"server: {place} in an answer is not as it should be ({first['msg']}); expected an OpenAI-compatible "
            "endpoint; serve the model with vLLM"
        ) from None


def served(endpoint: Endpoint, name: str | None) -> Card:
    """The model of this name that an endpoint serves; None: the only one. Raises EngineError where there is none."""
    listed = parsed(Models, endpoint.ask("models")).data
    cards = [card for card in listed if card.id == name or PUSHED not in card.id]
    names, key = ", ".join(card.id for card in cards) or "none", f"{endpoint.section}server.name"
    fitting = [card for card in cards if name in (None, card.id)]
    if any(card.owned_by == "sglang" for card in cards):
        fault = (
            "is SGLang, which is asked for completions only; expected vLLM; serve the model with it, or correct "
            f"{endpoint.url_key}"
        )
    elif name is None and len(cards) != 1:
        fault = (
            f"serves {len(cards)} models ({names}); expected one, or to be told which; set {key}"
        )
    elif fitting:
        return fitting[0]
    else:
        fault = f"serves {names}; expected {key}={name}; set it to a name that is served"
    raise EngineError(f"server: {endpoint.url} {fault}")


def checked(choice: Choice, prompt: Prompt) -> tuple[list[int], FloatArray | None]:
    """The ids of a completion, and their logprobs or None."""
    if choice.token_ids is None:
        raise no_ids("token_ids")
    sent = prompt.ids_T.tolist()
    values, fault = None, ""
    if choice.logprobs is not None:
        values = np.array(choice.logprobs.token_logprobs, dtype=np.float64)
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != sent:
        fault = (
            f"read {len(choice.prompt_token_ids)} prompt ids that differ from the {len(sent)} sent; expected the same "
            "ids; serve it with an endpoint that takes token ids unchanged"
        )
    elif values is not None and values.size != len(choice.token_ids):
        fault = (
            f"returned {values.size} logprobs for {len(choice.token_ids)} tokens; expected one each; serve the model "
            "with vLLM"
        )
    elif values is not None and not ((values > BELOW_ALL) & (values <= ABOVE_ZERO)).all():
        fault = (
            f"returned {values.max():g} as a logprob; expected at most 0; start vLLM with "
            "--logprobs-mode raw_logprobs"
        )
    if fault:
        raise EngineError(f"{prompt.id}: the server {fault}")
    return choice.token_ids, values


def no_ids(what: str) -> EngineError:
    return EngineError(
        f"server: an answer without {what}; expected the ids as sampled, since text is never tokenized again; "
        "serve the model with vLLM 0.10.2 or newer (return_token_ids)"
    )


EMPTYING = 5
"""Attempts to empty the prefix cache: a request that has just ended may hold a block for a moment."""
PAUSE = 0.2
"""Seconds between the attempts."""
PUSHED = "-taut-"
"""Part of the names of adapters that were pushed; a killed run leaves its last adapter on the server."""
LEAVING = 5.0
"""Seconds that a server has to unload the last adapter, or to resume after a push that failed."""

R = TypeVar("R")


class WorkerState(BaseModel):
    """The process and the weights of a worker, as taut's extension reports them."""

    start: str
    """Identifies the process: another value after a restart."""
    version: int
    """Version of the weights loaded last; -1: none."""
    folder: str
    """Their folder, a name that no other push had."""
    dtype: str
    is_probed_alone: bool
    """Whether a probe has to be its only request: on a CPU with --enable-lora, vLLM's engine ends at prompt_logprobs
    in a batch with other requests (vllm-project/vllm#16668)."""
    gpu: str | None = None
    """UUID of the worker's GPU; None where it has none, or does not say."""

    @property
    def origin(self) -> str:
        return (
            f"of version {self.version} ({self.folder})" if self.folder else "it was started with"
        )


class ParameterReport(BaseModel):
    """A worker's checksum of one of its parameters."""

    name: str
    parts: list[str]
    """The pushed tensors it is made of."""
    columns: list[int] | None
    """The columns that were read; None: all."""
    checksum: str | None
    """None where it could not be read."""


class _LoadResult(BaseModel):
    error: str | None = None


class _Results(BaseModel, Generic[R]):
    """The result of a method of taut's extension on each worker."""

    results: list[R]


class _Emptied(BaseModel):
    success: bool


class _Parameter(BaseModel):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")


class _Operation(BaseModel):
    parameters: list[_Parameter] = []


class _Routes(BaseModel):
    """The routes of a server, as /openapi.json describes them."""

    paths: dict[str, dict[str, _Operation]]


_HELD = {"method": "taut_held", "kwargs": {}}


@dataclass(frozen=True)
class VllmServer:
    """A vLLM server, by its addresses."""

    openai: Endpoint
    """The OpenAI-compatible endpoint, /v1."""
    control: Endpoint
    """The root for vLLM's own requests."""
    root: Endpoint
    """The root with the time limit for loading weights."""
    base: str
    """The model's name there."""

    @property
    def keeps_seeds(self) -> bool:
        """Whether a request's seed decides what is sampled."""
        return True

    def workers(self) -> list[WorkerState]:
        """The state of each worker."""
        return parsed(_Results[WorkerState], self.control.ask("collective_rpc", {**_HELD})).results

    async def held(self, client: httpx2.AsyncClient) -> list[WorkerState]:
        """State of each worker, for coroutines of the thread."""
        answer = await self.control.send(client, "collective_rpc", {**_HELD})
        return parsed(_Results[WorkerState], answer).results

    def load(self, folder: Path, version: int) -> None:
        """Have every worker load a folder's weights."""
        answer = self._call("taut_load", folder=str(folder), version=version)
        for result in parsed(_Results[_LoadResult], answer).results:
            if result.error is not None:
                raise EngineError(
                    f"server: it {result.error}; expected to see and read what was written there; set "
                    "rollout.server.sync.folder to a folder that both see and it may read (docs/serving.md)"
                )

    def checksums(self, names: Sequence[str]) -> list[list[ParameterReport]] | None:
        """Each worker's reports on its parameters, made of pushed tensors of these names; None: the server has none."""
        answer = self._call("taut_checksums", names=[*names])
        return parsed(_Results[list[ParameterReport]], answer).results

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter under a unique name. vLLM refuses a name that is sent again because its response was lost."""
        try:
            self.root.tell("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except RequestRefused as error:
            if not self.serves(name):
                raise RequestRefused(
                    f"{error} (expected to see and read {folder} to load it; set rollout.server.sync.folder to a "
                    "folder that both see and it may read; docs/serving.md)"
                ) from None

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; no error where the server has no adapter of this name."""
        try:
            self.openai.tell("unload_lora_adapter", {"lora_name": name})
        except EngineError:
            if self.serves(name):
                raise

    def leave(self, name: str) -> None:
        """Unload an adapter if that takes less than ``LEAVING`` seconds."""
        with suppress(EngineError, TimeoutError):
            self.root.tell("v1/unload_lora_adapter", {"lora_name": name}, LEAVING)

    def worker(self) -> WorkerState | None:
        """The state of the first worker; None without taut's extension."""
        try:
            return self.workers()[0]
        except EngineError:
            return None

    def takes_adapters(self) -> bool:
        """Whether the server loads adapters while it runs. One that does refuses an empty request."""
        try:
            self.openai.tell("load_lora_adapter", {})
        except RequestRefused:
            return True
        except EngineError:
            return False
        return True

    @cached_property
    def routes(self) -> dict[str, dict[str, _Operation]]:
        """Its routes, as /openapi.json describes them; none where it does not."""
        try:
            return _Routes.model_validate(self.control.ask("openapi.json")).paths
        except (EngineError, ValidationError):
            return {}

    @cached_property
    def pauses(self) -> bool:
        """Whether it can freeze requests under way and go on with them. The /pause of an older one aborts them."""
        parameters = self.routes.get("/pause", {}).get("post", _Operation()).parameters
        return "/resume" in self.routes and any(
            parameter.name == "mode" and "keep" in json.dumps(parameter.schema_)
            for parameter in parameters
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, requests under way are frozen; they go on afterwards. Only where it ``pauses``."""
        self.control.ask("pause?mode=keep", {})
        try:
            yield
        except BaseException:
            with suppress(EngineError, TimeoutError):  # it may have no answer to anything any more
                self.control.once().ask("resume", {}, LEAVING)
            raise
        self.control.ask("resume", {})

    def require_sleep(self) -> None:
        """Raise EngineError unless it gives memory back when it sleeps. Without its option it has the routes, and keeps
        the memory.
        """
        try:
            info = self.control.ask("server_info?config_format=json")
            can_sleep = info["vllm_config"]["model_config"]["enable_sleep_mode"]
        except (EngineError, LookupError, TypeError):
            can_sleep = None
        if can_sleep is not True:
            raise EngineError(
                f"server: {self.openai.url} cannot sleep; expected it to; start it with VLLM_SERVER_DEV_MODE=1 and "
                "--enable-sleep-mode, or take rollout.server.sync.sleep out"
            )

    def sleep(self) -> None:
        """Have it move its weights to the host's memory and forget its keys and values. No request may be under way."""
        self.root.tell("sleep?level=1", {})

    def wake(self, *tags: Literal["weights", "kv_cache"]) -> None:
        """Have it take memory for the parts with these tags, by default all; it answers requests once it has all."""
        query = "&".join(f"tags={tag}" for tag in tags)
        self.root.tell(f"wake_up?{query}".rstrip("?"), {})

    def serves(self, name: str) -> bool:
        """Whether the server lists a model of this name."""
        return any(card.id == name for card in parsed(Models, self.openai.ask("models")).data)

    def empty_prefix_cache(self) -> None:
        """Empty the cache of keys and values of the old weights. Frozen requests compute theirs again, with the new
        weights.
        """
        path = "reset_prefix_cache" + ("?reset_running_requests=true" if self.pauses else "")
        for _ in range(EMPTYING):
            if parsed(_Emptied, self.root.ask(path, {})).success:
                return
            time.sleep(PAUSE)
        raise EngineError(
            "server: its prefix cache cannot be emptied while requests are under way; expected none while weights are "
            "pushed; let no other client send requests to this server"
        )

    def log_probs(self, name: str, ids_T: IntArray) -> FloatArray:
        """The server's logprob of every id but the first, [T - 1]."""
        body = {"model": name, "prompt": ids_T.tolist(), "max_tokens": 1, "temperature": 0}
        answer = self.openai.ask("completions", {**body, "prompt_logprobs": 0})
        places = parsed(Answer, answer).choices[0].prompt_logprobs or []
        try:
            values = [
                float((place or {})[f"{index}"]["logprob"])
                for place, index in zip(places[1:], ids_T[1:].tolist(), strict=True)
            ]
        except (KeyError, ValueError, TypeError):
            raise EngineError(
                "server: its prompt_logprobs are not those of the ids sent; expected one for each id; serve the model "
                "with vLLM"
            ) from None
        return np.array(values)

    def _call(self, method: str, **values: Any) -> Any:
        """The answer of all workers to a call of a method of taut's extension."""
        return self.root.ask("collective_rpc", {"method": method, "kwargs": values})
