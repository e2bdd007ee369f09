"""The engine behind an OpenAI-compatible /v1/completions endpoint that takes and returns token ids (vLLM).

Ids are those the server sampled; text is decoded here and never tokenised again. A server that returns no ids, or that
reads another prompt than was sent, is refused. Each completion is a separate request with a separate seed, so neither
batch nor order changes its stream; greedy or not, batching may still change the last bits of a logprob.

The stop set is sent with every request, and the server's own stops stay active. A completion that the server ends with
a token outside the stop set, or continues past a token inside it, is an error: served to others, the model would stop
elsewhere. ``unaided`` sends no stop token, to see where the server stops by itself.

A server reports one kind of logprob. ``open`` finds out which: with top_k=1 at temperature 2 the policy's logprob is 0,
and the model's is that at temperature 1. The kind decides which fields of a completion have values:

    kind         logp_N (policy)                        logp_one_N (temperature 1)
    raw          the value if plain, 0 if greedy        the value
    processed    the value, 0 if greedy                 the value if plain
    unknown      the value if plain, 0 if greedy        the value if plain
    none         0 if greedy                            never

``follow`` makes the server's weights those of a model in training, after each ``update`` (``weight_sync.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, configclass
from taut.errors import ConfigError, EngineError, RequestRefused, TautError
from taut.inference.engine import (
    OnDone,
    Sampling,
    Texts,
    require_text,
    require_usable,
    room,
    stream_seed,
)
from taut.inference.vllm_client import (
    ABOVE_ZERO,
    Answer,
    Endpoint,
    EndpointConfig,
    LogProbs,
    Rendered,
    VllmServer,
    checked,
    no_ids,
    parsed,
    served,
)
from taut.inference.weight_sync import PROBE, PROBE_TOKENS, Sync, SyncConfig, Trained, how_to_start
from taut.train.distributed import Ranks
from taut.types import Completion, FinishReason, Prompt

T = TypeVar("T")

COOLEST = 0.01
"""vLLM raises temperatures between 0 and this one to it without telling the client."""
PROBES = ("The", "In", "1")
"""Texts whose continuation shows the kind of logprobs; the first after which the model is in doubt decides."""
DOUBT = -0.1
"""A logprob of the most likely token below this shows doubt."""
SAME = 0.02
"""Two logprobs of one token as close as this are the same, 16-bit rounding included."""

Kind: TypeAlias = Literal["raw", "processed", "unknown", "none"]


@configclass
class ServerConfig(EndpointConfig):
    """An OpenAI-compatible endpoint that takes token ids (vLLM)."""

    sync: SyncConfig = SyncConfig()


@dataclass(frozen=True)
class ServerEngine:
    """Continues prompts at an endpoint. ``open`` makes one, ``close`` ends its connections."""

    endpoint: Endpoint
    texts: Texts
    config: ServerConfig
    name: str
    """The model's name there."""
    kind: Kind
    """Which logprobs the server returns."""
    model_context: int | None
    served_context: int | None
    """The server's max_model_len, if it reports one."""
    sends_stops: bool = True
    sync: Sync | None = None
    """Set if its weights follow those in training."""

    @classmethod
    def open(
        cls,
        url: str,
        config: ServerConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        context: int | None,
        *,
        section: str = "rollout.",
    ) -> ServerEngine:
        """The engine at ``url`` for the model with this tokenizer, stop set and context.

        ``section``: the configuration's section with ``url`` and ``config``; by default that of a training run.
        """
        endpoint = Endpoint.of(url, config, section)
        try:
            card = served(endpoint, config.name)
            texts = Texts(tokenizer, stop_ids)
            engine = cls(endpoint, texts, config, card.id, "none", context, card.max_model_len)
            return replace(engine, kind=engine._probe())
        except BaseException:
            endpoint.close()
            raise

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
        self.endpoint.close()

    def follow(self, trained: Trained) -> ServerEngine:
        """The same endpoint, which gets the weights of a model in training at each ``update``.

        ``update`` must precede the first ``generate``. Raises EngineError for a server whose weights cannot be changed.
        """
        root = Endpoint(
            self.endpoint.url.removesuffix("/v1"),
            key=self.config.api_key_env,
            timeout=self.config.sync.timeout,
            retries=1,
            backoff=self.config.backoff,
            section=self.endpoint.section,
            patience=["server.sync.timeout"],
        )
        server = VllmServer(self.endpoint, root, self.name)
        ids = self.texts.tokenizer(PROBE, add_special_tokens=False)["input_ids"][:PROBE_TOKENS]
        most = None if self.context is None else self.context - 1
        try:
            sync = Sync(server, trained, self.config.sync, np.asarray(ids[:most], dtype=np.int64))
        except BaseException:
            root.close()
            raise
        return replace(self, sync=sync)

    def update(self, version: int) -> None:
        """Push the weights in training and prove that they arrived (``sync.proof``)."""
        if self.sync is None:
            raise EngineError(
                f"server: {self.endpoint.url} keeps the weights it was started with; expected one that follows a "
                f"training; {how_to_start(self.name)}"
            )
        self.sync.push(version)

    @property
    def places(self) -> int:
        """Requests that are sent at a time; more wait for one another."""
        return self.config.concurrency

    @property
    def context(self) -> int | None:
        """Tokens prompt and completion may have together."""
        limits = (self.model_context, self.served_context)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def decisions(self) -> list[Decision]:
        """The served model and the kind of its logprobs."""
        named = "as asked" if self.config.name is not None else "the only model it serves"
        kind = "what it answers at temperature 1 and at 2 with top_k=1"
        key = f"{self.endpoint.section}server.name"
        return [Decision(key, self.name, named), Decision("server logprobs", self.kind, kind)]

    def unaided(self) -> ServerEngine:
        """The same endpoint, which is sent no stop token and ends completions as it does for other clients."""
        return replace(self, sends_stops=False)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids the server makes of a chat, up to where the assistant begins."""
        body = {
            "model": self.name,
            "messages": [dict(message) for message in messages],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        ids = parsed(Rendered, self.endpoint.ask("chat/completions", body)).prompt_token_ids
        if ids is None:
            raise no_ids("prompt_token_ids for a chat")
        return ids

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        """See ``Engine``. Raises EngineError when the endpoint fails, after ``on_done`` got all finished completions.

        Where the weights follow a training under several ranks, the prompts are divided and all ranks get the whole
        list; ``on_done`` gets this rank's completions only.
        """
        self.require_possible(prompts, sampling)
        ranks = None if self.sync is None else self.sync.trained.ranks
        mine = prompts if ranks is None else prompts[ranks.rank :: ranks.size]
        shares = self.shared(partial(self._generate, mine, sampling, on_done), ranks)
        done = {key: completion for share in shares for key, completion in share.items()}
        return [done[prompt.id, index] for prompt in prompts for index in range(sampling.n)]

    def shared(self, work: Callable[[], T], ranks: Ranks | None) -> list[T]:
        """What each rank's ``work`` with this server returned, on all ranks. The weights that it answers with are those
        of the last push, before and after. Raises the error of the first rank that has one, on all ranks.
        """
        if self.sync is not None:
            self.sync.hold()
        try:
            outcome: T | TautError = work()
        except TautError as error:
            outcome = error
        outcomes = [outcome] if ranks is None else ranks.gather(outcome)
        results: list[T] = []
        for outcome in outcomes:
            if isinstance(outcome, TautError):
                raise outcome
            results.append(outcome)
        if self.sync is not None:
            self.sync.require_kept()
        return results

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None
    ) -> dict[tuple[str, int], Completion]:
        """The completions by prompt and index. Raises the first failure, once all that had come are told."""
        done: dict[tuple[str, int], Completion] = {}
        failure: EngineError | None = None
        ended: SimpleQueue[int] = SimpleQueue()
        with closing(Stream(self, sampling, ended.put)) as stream:
            jobs = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
            for number, (prompt, index) in enumerate(jobs):
                stream.ask(number, prompt, index)
            while stream.is_busy and (failure is None or not ended.empty()):
                try:
                    completion = stream.take(ended.get())
                except EngineError as error:
                    failure = failure or error
                    continue
                done[completion.prompt_id, completion.index] = completion
                if on_done is not None:
                    on_done(completion)
        if failure is not None:
            raise failure
        return done

    def require_possible(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Refuse what the server would silently do otherwise."""
        if 0 < sampling.temperature < COOLEST:
            raise ConfigError(
                f"sampling.temperature={sampling.temperature:g} is below {COOLEST:g}, which vLLM raises it to; "
                "expected 0 or more than that; set sampling.temperature=0 for the most likely token"
            )
        require_text(prompts)
        require_usable(prompts, self.model_context)
        key = f"{self.endpoint.section or 'sampling.'}max_new_tokens"
        for prompt in prompts:
            needed = prompt.ids_T.size + room(prompt, sampling, self.model_context)
            if self.served_context is not None and needed > self.served_context:
                raise EngineError(
                    f"{prompt.id}: prompt and completion may take {needed:,} tokens and the server's max_model_len is "
                    f"{self.served_context:,}; expected room for both; start it with --max-model-len {needed}, or set "
                    f"{key}"
                )

    def _body(
        self, prompt: Prompt, index: int, sampling: Sampling, num_logprobs: int = 0
    ) -> dict[str, Any]:
        """A request. Every setting is sent: a missing one would be the server's default."""
        body = {
            "model": self.name if self.sync is None else self.sync.name,
            "prompt": prompt.ids_T.tolist(),
            "max_tokens": room(prompt, sampling, self.model_context),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": sampling.stop,
            "stop_token_ids": sorted(self.texts.stop_ids) if self.sends_stops else [],
            "ignore_eos": False,
            "skip_special_tokens": False,  # a stop string may be one
            "logprobs": num_logprobs,
            "return_token_ids": True,
        }
        if sampling.temperature > 0:
            body["seed"] = stream_seed(sampling.seed, prompt.id, index)
        return body

    def start(self, prompt: Prompt, index: int, sampling: Sampling) -> Future[Any]:
        """Send the request of a completion."""
        return self.endpoint.start("completions", self._body(prompt, index, sampling))

    def completion(
        self, prompt: Prompt, index: int, sampling: Sampling, answer: Future[Any]
    ) -> Completion:
        """What the server answered to ``start``. Raises EngineError where it failed."""
        try:
            choice = parsed(Answer, answer.result()).choices[0]
        except RequestRefused as refused:
            nothing = np.zeros(0, dtype=np.int64)
            return Completion(prompt.id, index, nothing, None, None, "error", error=f"{refused}")
        ids, values = checked(choice, prompt)
        reason, error = self._ending(choice.finish_reason, ids, prompt, sampling)
        # by the table above
        plain = values if sampling.is_plain else None
        logp = values if self.kind == "processed" else plain
        return Completion(
            prompt_id=prompt.id,
            index=index,
            ids_N=np.asarray(ids, dtype=np.int64),
            logp_N=np.zeros(len(ids)) if sampling.temperature == 0 else logp,
            logp_one_N=values if self.kind == "raw" else plain,
            finish_reason=reason,
            text=self.texts.text(ids, sampling.stop),
            error=error,
        )

    def _ending(
        self, reported: str | None, ids: list[int], prompt: Prompt, sampling: Sampling
    ) -> tuple[FinishReason, str | None]:
        """Why a completion ended, by its ids, and an error where the server's, ``reported``, differs."""
        stop_ids, wanted = self.texts.stop_ids, room(prompt, sampling, self.model_context)
        if reported not in ("stop", "length") or not ids:
            return "error", (
                f"the server ended it with finish_reason={reported} after {len(ids)} tokens; expected stop or length"
            )
        passed = next((index for index in ids[:-1] if index in stop_ids), None)
        if passed is not None:
            return "error", (
                f"the server went on past {self._shown(passed)}, which ends an answer; expected it to stop there; "
                "name it in the eos_token_id of the served directory's generation_config.json"
            )
        if ids[-1] in stop_ids:
            return "stop", None
        if reported == "stop":
            text = self.texts.text(ids)
            if any(stop in text for stop in sampling.stop):
                return "stop", None
            return "error", (
                f"the server stopped at {self._shown(ids[-1])}, which is not in the stop set {sorted(stop_ids)}; "
                "expected both to be the same; serve the directory taut saved, or correct its generation_config.json"
            )
        if len(ids) < wanted:
            return "error", (
                f"the server cut it after {len(ids)} tokens; expected {wanted}; lift the server's own limit"
            )
        return "length", None

    def _shown(self, index: int) -> str:
        return f"token {index} ({self.texts.tokenizer.convert_ids_to_tokens(index)})"

    def _probe(self) -> Kind:
        """Which logprobs the server returns."""
        for text in PROBES:
            ids = self.texts.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = Prompt(f"probe {text}", np.asarray(ids, dtype=np.int64), max_new_tokens=1)
            plain = self._one_token(prompt, Sampling())
            forced = self._one_token(prompt, Sampling(temperature=2.0, top_k=1))
            if plain is None or forced is None or not plain.top_logprobs:
                return "none"
            best = max((plain.top_logprobs[0] or {}).values(), default=0.0)
            if best >= DOUBT or not forced.token_logprobs:
                continue
            value = forced.token_logprobs[0]
            if value is not None and abs(value - best) < SAME:
                return "raw"
            return "processed" if value is not None and abs(value) < ABOVE_ZERO else "unknown"
        return "unknown"

    def _one_token(self, prompt: Prompt, sampling: Sampling) -> LogProbs | None:
        """The logprobs of a one-token answer, the most likely token's among them."""
        answer = self.endpoint.ask("completions", self._body(prompt, 0, sampling, num_logprobs=1))
        choice = parsed(Answer, answer).choices[0]
        checked(choice, prompt)
        return choice.logprobs


class Stream:
    """Completions as they are asked for, one by one, at most ``server.concurrency`` of them under way: those of the
    lowest priority number first, then those that were asked for first. Used by one thread; ``put`` is called from
    another with the key of a completion that may be taken.
    """

    def __init__(
        self, engine: ServerEngine, sampling: Sampling, put: Callable[[int], object]
    ) -> None:
        self._engine, self._sampling, self._put = engine, sampling, put
        self._waiting: list[tuple[int, int, int, Prompt, int]] = []
        """A heap of (priority, how many were asked for before, key, prompt, index)."""
        self._num_asked = 0
        self._under_way: dict[int, tuple[Prompt, int, int, Future[Any]]] = {}
        """(prompt, index, version of the weights when it was begun, answer)"""

    @property
    def is_busy(self) -> bool:
        """Whether a completion was asked for and not taken."""
        return bool(self._waiting or self._under_way)

    @property
    def has_room(self) -> bool:
        """Whether a completion that is asked for now is begun at once."""
        return len(self._waiting) + len(self._under_way) < self._engine.places

    def ask(self, key: int, prompt: Prompt, index: int = 0, *, priority: int = 0) -> None:
        """Ask for the completion number ``index`` of a prompt. Raises DataError and EngineError for what cannot be
        asked.
        """
        self._engine.require_possible([prompt], self._sampling)
        heappush(self._waiting, (priority, self._num_asked, key, prompt, index))
        self._num_asked += 1
        self._fill()

    def take(self, key: int) -> Completion:
        """A completion that is there. Raises EngineError where the endpoint failed."""
        prompt, index, version, future = self._under_way.pop(key)
        try:
            completion = self._engine.completion(prompt, index, self._sampling, future)
            return replace(completion, version=version)
        finally:
            self._fill()

    def close(self) -> None:
        """Cancel what was not taken; the server stops working on it."""
        self._waiting.clear()
        for *_, future in self._under_way.values():
            future.cancel()

    def _fill(self) -> None:
        while self._waiting and len(self._under_way) < self._engine.places:
            _, _, key, prompt, index = heappop(self._waiting)
            sync = self._engine.sync
            version = 0 if sync is None else sync.version
            future = self._engine.start(prompt, index, self._sampling)
            self._under_way[key] = prompt, index, version, future
            future.add_done_callback(partial(self._say, key))

    def _say(self, key: int, _: Future[Any]) -> None:
        self._put(key)
