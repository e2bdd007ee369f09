"""The engine behind an OpenAI-compatible /v1/completions endpoint that takes and returns token ids (vLLM).

Ids are those the server sampled; text is decoded here and never tokenised again. A server that returns no ids, or that
reads another prompt than was sent, is refused. Each completion is a request of its own with a seed of its own, so
neither batch nor order changes its stream; greedy or not, batching may still change the last bits of a log-prob.

The stop set is sent with every request, and the server's own stops stay in force. A completion that the server ends
by a token outside the stop set, or does not end by one inside it, is an error: served to others, the model would stop
elsewhere. ``unaided`` tells the server no stop token, to see where it stops by itself.

A server reports one kind of log-probability. Opening asks which: with top_k=1 at temperature 2 the policy's is 0 and
the model's own is what it is at temperature 1. Filled is what follows from that:

    kind         logp_N (policy)                        logp_one_N (temperature 1)
    raw          the value if plain, 0 if greedy        the value
    processed    the value, 0 if greedy                 the value if plain
    unknown      the value if plain, 0 if greedy        the value if plain
    none         0 if greedy                            never

``follow`` makes the server's weights those of a model in training, after each ``update`` (``weight_sync.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, configclass
from taut.errors import ConfigError, EngineError, RequestRefused
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
    Asked,
    Endpoint,
    LogProbs,
    Rendered,
    checked,
    no_ids,
    parsed,
    served_card,
)
from taut.inference.weight_sync import PROBE, PROBE_TOKENS, Sync, SyncConfig, Trained, how_to_start
from taut.types import Completion, FinishReason, FloatArray, Prompt

COOLEST = 0.01
"""vLLM raises temperatures between 0 and this one to it without telling the client."""
PROBES = ("The", "In", "1")
"""Texts whose continuation shows the kind of log-probs; the first after which the model is in doubt decides."""
DOUBT = -0.1
"""A log-prob of the most likely token below this shows doubt."""
SAME = 0.02
"""Two log-probs of one token as close as this are the same, 16-bit rounding included."""

Outcome: TypeAlias = tuple[dict[tuple[str, int], Completion], EngineError | None]
Kind: TypeAlias = Literal["raw", "processed", "unknown", "none"]


@configclass
class ServerConfig:
    """An OpenAI-compatible endpoint that takes token ids (vLLM)."""

    name: str | None = None
    """The model's name there; by default the only one it serves."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; none is sent by default."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a request may take."""
    retries: Annotated[int, Field(ge=0)] = 5
    """How often a request that failed in transit, or that the server was too busy for, is sent again."""
    backoff: Annotated[float, Field(ge=0)] = 0.5
    """Seconds before it is sent again for the first time; they double each time."""
    concurrency: Annotated[int, Field(ge=1)] = 32
    """Requests under way at a time."""
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
    """Which log-probs the server returns."""
    model_context: int | None
    served_context: int | None
    """What the server allows, where it says so."""
    sends_stops: bool = True
    sync: Sync | None = None
    """Where its weights follow those in training."""

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
        """The engine at ``url`` for the model that tokenizer, stop set and context are those of.

        ``section``: of the configuration, where ``url`` and ``config`` come from; by default a training's.
        """
        endpoint = Endpoint(
            url,
            key=config.api_key_env,
            timeout=config.timeout,
            retries=config.retries,
            backoff=config.backoff,
            section=section,
        )
        try:
            card = served_card(endpoint, config.name)
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
        """The same endpoint, whose weights become those of a model in training at each ``update``.

        The first one is to come before anything is generated. Raises EngineError for a server that takes no weights.
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
        asked = Asked(self.endpoint, root, self.name)
        ids = self.texts.tokenizer(PROBE, add_special_tokens=False)["input_ids"][:PROBE_TOKENS]
        most = None if self.context is None else self.context - 1
        try:
            sync = Sync(asked, trained, self.config.sync, np.asarray(ids[:most], dtype=np.int64))
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
    def context(self) -> int | None:
        """Tokens prompt and completion may have together."""
        limits = [c for c in (self.model_context, self.served_context) if c is not None]
        return min(limits, default=None)

    @property
    def decisions(self) -> list[Decision]:
        """What the server settled."""
        named = "as asked" if self.config.name is not None else "the only model it serves"
        kind = "what it answers at temperature 1 and at 2 with top_k=1"
        key = f"{self.endpoint.section}server.name"
        return [Decision(key, self.name, named), Decision("server log-probs", self.kind, kind)]

    def unaided(self) -> ServerEngine:
        """The same endpoint, told no stop token: it ends a completion where it does so for everybody."""
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
        """See ``Engine``. Raises EngineError when the endpoint fails, once ``on_done`` has had all that is done.

        Where the weights follow a training under several ranks, prompts are dealt out and the list is whole on all;
        ``on_done`` hears of this rank's only.
        """
        self._require_possible(prompts, sampling)
        if self.sync is None:
            done, failure = self._generate(prompts, sampling, on_done)
        else:
            done, failure = self._generate_together(self.sync, prompts, sampling, on_done)
        if failure is not None:
            raise failure
        return [done[prompt.id, index] for prompt in prompts for index in range(sampling.n)]

    def _generate_together(
        self, sync: Sync, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None
    ) -> Outcome:
        """This rank's share, then everybody's; of weights that are known before and after."""
        ranks = sync.trained.ranks
        sync.hold()
        outcomes = ranks.gather(
            self._generate(prompts[ranks.rank :: ranks.size], sampling, on_done)
        )
        failure = next((failure for _, failure in outcomes if failure is not None), None)
        if failure is None:
            sync.require_kept()
        return {key: one for done, _ in outcomes for key, one in done.items()}, failure

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None
    ) -> Outcome:
        """The completions by prompt and index, and the failure that left some out."""
        jobs = iter([(prompt, index) for prompt in prompts for index in range(sampling.n)])
        under_way: dict[Future[Any], tuple[Prompt, int]] = {}
        done: dict[tuple[str, int], Completion] = {}
        failure: EngineError | None = None
        try:
            while failure is None:
                for prompt, index in islice(jobs, self.config.concurrency - len(under_way)):
                    body = self._body(prompt, index, sampling)
                    under_way[self.endpoint.start("completions", body)] = prompt, index
                if not under_way:
                    break
                wait(under_way, return_when=FIRST_COMPLETED)
                for future in [future for future in under_way if future.done()]:
                    prompt, index = under_way.pop(future)
                    try:
                        completion = self._completion(prompt, index, sampling, future)
                    except EngineError as error:
                        failure = failure or error
                        continue
                    done[prompt.id, index] = completion
                    if on_done is not None:
                        on_done(completion)
        finally:
            for future in under_way:
                future.cancel()
        return done, failure

    def _require_possible(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Refuse what the server would do otherwise than asked, without a word."""
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
        """A request. Everything is set: what is not would come from the server's own defaults."""
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

    def _completion(
        self, prompt: Prompt, index: int, sampling: Sampling, answer: Future[Any]
    ) -> Completion:
        try:
            choice = parsed(Answer, answer.result()).choices[0]
        except RequestRefused as refused:
            nothing = np.zeros(0, dtype=np.int64)
            return Completion(prompt.id, index, nothing, None, None, "error", error=f"{refused}")
        ids, values = checked(choice, prompt)
        reason, error = self._ending(choice.finish_reason, ids, prompt, sampling)
        logp, logp_one = self._log_probs(values, len(ids), sampling)
        text = self.texts.text(ids, sampling.stop)
        ids_N = np.asarray(ids, dtype=np.int64)
        done = Completion(prompt.id, index, ids_N, logp, logp_one, reason, text, error)
        return done if self.sync is None else replace(done, version=self.sync.version)

    def _ending(
        self, said: str | None, ids: list[int], prompt: Prompt, sampling: Sampling
    ) -> tuple[FinishReason, str | None]:
        """Why a completion ended, by its ids; what the server says must agree."""
        stop_ids, wanted = self.texts.stop_ids, room(prompt, sampling, self.model_context)
        if said not in ("stop", "length") or not ids:
            return "error", (
                f"the server ended it with finish_reason={said} after {len(ids)} tokens; expected stop or length"
            )
        passed = next((index for index in ids[:-1] if index in stop_ids), None)
        if passed is not None:
            return "error", (
                f"the server went on past {self._shown(passed)}, which ends an answer; expected it to stop there; "
                "name it in the eos_token_id of the served directory's generation_config.json"
            )
        if ids[-1] in stop_ids:
            return "stop", None
        if said == "stop":
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

    def _log_probs(
        self, values: FloatArray | None, length: int, sampling: Sampling
    ) -> tuple[FloatArray | None, FloatArray | None]:
        """(under the policy, under temperature 1), by the table above."""
        is_greedy = sampling.temperature == 0
        known = values if sampling.is_plain else None
        logp = np.zeros(length) if is_greedy else values if self.kind == "processed" else known
        return logp, values if self.kind == "raw" else known

    def _probe(self) -> Kind:
        """Which log-probs the server returns."""
        for text in PROBES:
            ids = self.texts.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = Prompt(f"probe {text}", np.asarray(ids, dtype=np.int64), max_new_tokens=1)
            plain = self._asked(prompt, Sampling())
            forced = self._asked(prompt, Sampling(temperature=2.0, top_k=1))
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

    def _asked(self, prompt: Prompt, sampling: Sampling) -> LogProbs | None:
        """The log-probs of a one-token answer, the most likely token's among them."""
        answer = self.endpoint.ask("completions", self._body(prompt, 0, sampling, num_logprobs=1))
        choice = parsed(Answer, answer).choices[0]
        checked(choice, prompt)
        return choice.logprobs
