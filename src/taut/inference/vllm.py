"""The engine behind an OpenAI-compatible /v1/completions endpoint that takes and returns token ids: vLLM, or SGLang as
``sglang.py`` makes it one.

Ids are those the server sampled; text is decoded here and never tokenized again. A server that returns no ids, or that
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

There may be several servers, which have to agree in all this (``server_pool.py``). ``follow`` makes their weights those
of a model in training, after each ``update`` (``weight_sync.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision
from taut.errors import ConfigError, EngineError, RequestRefused
from taut.inference.engine import (
    OnDone,
    Texts,
    require_text,
    require_usable,
    room,
    stream_seed,
)
from taut.inference.server_pool import Homes, Pool, Server, Serving
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.sglang import DETERMINISTIC, SglangEndpoint, SglangServer, is_sglang
from taut.inference.vllm_client import (
    ABOVE_ZERO,
    Answer,
    Choice,
    Endpoint,
    LogProbs,
    Rendered,
    VllmServer,
    checked,
    no_ids,
    parsed,
    served,
)
from taut.inference.weight_sync import (
    PROBE,
    PROBE_TOKENS,
    TrainingModel,
    WeightSync,
    how_to_start,
)
from taut.io import http, progress
from taut.train.distributed import outcome_of, results_of
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
SPELLED = "Stop: 12 x 3.5 = 42!\n\n  naïve def f(x):\treturn x"
"""A text that two tokenizers are unlikely to split alike."""

Kind: TypeAlias = Literal["raw", "processed", "unknown", "none"]


@dataclass(frozen=True)
class ServerEngine:
    """Continues prompts at one or several endpoints. ``open`` makes one, ``close`` ends its connections."""

    pool: Pool
    texts: Texts
    config: ServerConfig
    section: str
    """The configuration's section with ``urls`` and ``config``."""
    kind: Kind
    """The kind of logprobs that the servers return."""
    model_context: int | None
    served_context: int | None
    """The smallest max_model_len of the servers that report one."""
    told: tuple[Decision, ...] = ()
    """Facts found about the servers."""
    sends_stops: bool = True
    sync: WeightSync | None = None
    """Set if the weights follow those in training."""

    @classmethod
    def open(
        cls,
        urls: str | Sequence[str],
        config: ServerConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        context: int | None,
        *,
        section: str = "rollout.",
    ) -> ServerEngine:
        """The engine at ``urls`` for the model with this tokenizer, stop set and context.

        ``section``: the configuration's section with ``urls`` and ``config``; by default that of a training run.
        Raises EngineError where one of the servers cannot be used.
        """
        urls = [urls] if isinstance(urls, str) else urls
        if len({url.rstrip("/") for url in urls}) < len(urls) or not urls:
            raise ConfigError(
                f"{section}urls={[*urls]} names {'a server twice' if urls else 'no server'}; expected each once; "
                "correct it"
            )
        # Ask each server what it is, and require servers that are alike.
        thread = http.ClientThread()
        texts = Texts(tokenizer, stop_ids)
        try:
            opened = [_opened(url, config, texts, section, thread) for url in urls]
        except BaseException:
            thread.close()
            raise
        for one in opened:
            if one.kind != opened[0].kind:
                thread.close()
                raise EngineError(
                    f"server: {one.url} gives {one.kind} logprobs and {opened[0].url} {opened[0].kind} ones; expected "
                    "servers alike; start all with --logprobs-mode processed_logprobs"
                )
        pool = Pool([one.server for one in opened], config.concurrency, thread)
        # What was found, as decisions.
        limits = [one.max_model_len for one in opened if one.max_model_len is not None]
        named = "as asked" if config.name is not None else "the only model it serves"
        names = dict.fromkeys(one.server.serving.model for one in opened)
        key = f"{section}server.name"
        told = [Decision(key, name, named) for name in names]
        reason = "what it answers at temperature 1 and at 2 with top_k=1"
        told.append(Decision("server logprobs", opened[0].kind, reason))
        told += [
            Decision("server tokenizer", "not compared", f"{one.url} {one.untold}")
            for one in opened
            if one.untold
        ]
        told += [
            Decision("server seeds", "not kept", f"{one.url} is SGLang without {DETERMINISTIC}")
            for one in opened
            if not one.server.vllm.keeps_seeds
        ]
        if len(opened) > 1:
            reason = (
                "the prompts of a group and the turns of a path go to one; else to the least busy"
            )
            told.append(Decision("servers", f"{len(opened)}", reason))

        def revive(server: Server) -> None:
            at = pool.servers.index(server)
            again = _opened(server.url, config, texts, section, thread)
            is_same = again.server.vllm.base == server.vllm.base
            if not is_same or replace(again, server=server) != opened[at]:
                raise EngineError(
                    f"server: {server.url} came back as another one ({again.server.vllm.base}, {again.kind} "
                    "logprobs); expected the one that it was; start it as before"
                )

        pool.revive = revive
        return cls(
            pool=pool,
            texts=texts,
            config=config,
            section=section,
            kind=opened[0].kind,
            model_context=context,
            served_context=min(limits, default=None),
            told=tuple(told),
        )

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
        self.pool.close()

    def follow(self, trained: TrainingModel) -> ServerEngine:
        """Return these servers, which get the weights of a model in training at each ``update``.

        ``update`` must precede the first ``generate``. Raises EngineError for a server whose weights cannot be changed.
        """
        ids = self.texts.tokenizer(PROBE, add_special_tokens=False)["input_ids"][:PROBE_TOKENS]
        most = None if self.context is None else self.context - 1
        probe_T = np.asarray(ids[:most], dtype=np.int64)
        sync = WeightSync(self.pool, trained, self.config.sync, probe_T)
        return replace(self, sync=sync, told=(*self.told, *sync.decisions))

    def update(self, version: int) -> None:
        """Push the weights in training to all servers and prove that they arrived (``sync.proofs``).

        Requests may be under way: they go on with the new weights, or are waited for (``weight_sync.py``). Any thread
        may call it; under several ranks the thread that calls ``shared``, on all of them.
        """
        if self.sync is None:
            raise EngineError(
                f"server: {self.pool.servers[0].url} keeps the weights it was started with; expected one that follows "
                f"a training; {how_to_start(self.pool.servers[0].serving.model)}"
            )
        self.sync.push(version)

    def rest(self) -> None:
        """Have the servers sleep until the next ``update`` or request, where ``sync.sleep`` asks for it. All ranks call
        it together.
        """
        if self.sync is not None:
            self.sync.rest()

    @property
    def places(self) -> int:
        """Requests that are sent at a time; more wait for one another."""
        return self.config.concurrency * max(1, len(self.pool.in_use))

    @property
    def context(self) -> int | None:
        """Tokens prompt and completion may have together."""
        limits = (self.model_context, self.served_context)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def decisions(self) -> list[Decision]:
        """The served models, the kind of their logprobs, how requests are divided, and how weights get there."""
        return [*self.told]

    def unaided(self) -> ServerEngine:
        """The endpoint without stop tokens in requests: it ends completions as for other clients."""
        return replace(self, sends_stops=False)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids the first server makes of a chat, up to where the assistant begins."""
        server = self.pool.servers[0]
        body = {
            "model": server.serving.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = server.vllm.openai.ask("chat/completions", body)
        ids = parsed(Rendered, answer).prompt_token_ids
        if ids is None:
            raise no_ids("prompt_token_ids for a chat")
        return ids

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        """See ``Engine``. Raises EngineError when no server is left, after ``on_done`` got all finished completions.

        Where the weights follow a training under several ranks, the prompts are divided and all ranks get the whole
        list; ``on_done`` gets this rank's completions only.
        """
        self.require_possible(prompts, sampling)
        ranks = None if self.sync is None else self.sync.trained.ranks
        mine = prompts if ranks is None else prompts[ranks.rank :: ranks.size]
        work = partial(self._generate, mine, sampling, on_done)
        shares = self.shared(lambda: [work()] if ranks is None else ranks.run_everywhere(work))
        done = {key: completion for share in shares for key, completion in share.items()}
        return [done[prompt.id, index] for prompt in prompts for index in range(sampling.n)]

    def shared(self, run: Callable[[], T]) -> T:
        """Run ``Ranks.run_everywhere`` or ``Ranks.run_on_writer`` of work with these servers, woken before it and put
        to rest after it. All ranks use the servers that have the last push.
        """
        if self.sync is not None:
            self.sync.wake()
            self.sync.hold()
        outcome = outcome_of(run)
        self.rest()
        result: T = results_of([outcome])[0]
        return result

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
                progress.count(len(done), len(jobs), "answers")
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
        key = f"{self.section or 'sampling.'}max_new_tokens"
        for prompt in prompts:
            needed = prompt.ids_T.size + room(prompt, sampling, self.model_context)
            if self.served_context is not None and needed > self.served_context:
                raise EngineError(
                    f"{prompt.id}: prompt and completion may take {needed:,} tokens and the max_model_len is "
                    f"{self.served_context:,}; expected room for both; start it with --max-model-len {needed}, or set "
                    f"{key}"
                )

    def start(
        self,
        prompt: Prompt,
        index: int,
        sampling: Sampling,
        affinity: str,
        homes: Homes,
        priority: int,
    ) -> Future[tuple[Choice, int]]:
        """Send the request of a completion. The result is its answer, with the version of the weights when it began."""
        body = _body(prompt, sampling, room(prompt, sampling, self.model_context))
        body["stop_token_ids"] = sorted(self.texts.stop_ids) if self.sends_stops else []
        if sampling.temperature > 0:
            body["seed"] = stream_seed(sampling.seed, prompt.id, index)
        return self.pool.start(affinity, homes, priority, body, partial(_read, prompt))

    def completion(
        self, prompt: Prompt, index: int, sampling: Sampling, answer: Future[tuple[Choice, int]]
    ) -> Completion:
        """The completion of an ``answer`` to ``start``. Raises EngineError where no server could answer."""
        try:
            choice, version = answer.result()
        except RequestRefused as refused:
            nothing = np.zeros(0, dtype=np.int64)
            return Completion(prompt.id, index, nothing, None, None, "error", error=f"{refused}")
        ids, values = checked(choice, prompt)
        reason, error = self._ending(choice.finish_reason, ids, prompt, sampling)
        # The logprobs by the table above.
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
            version=version,
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


@dataclass(frozen=True)
class _Opened:
    """A server, and what was found out about it."""

    server: Server
    max_model_len: int | None
    kind: Kind
    untold: str
    """Why its tokenizer could not be compared; empty where it is the model's."""

    @property
    def url(self) -> str:
        return self.server.url


def _opened(
    url: str, config: ServerConfig, texts: Texts, section: str, thread: http.ClientThread
) -> _Opened:
    """Ask a server for its models, its tokenizer and the kind of its logprobs. Raises EngineError for one that cannot
    be used.
    """
    openai = Endpoint.of(url, config, section, url_key="urls", thread=thread)
    at, kind_of_server = openai.url.removesuffix("/v1"), VllmServer
    if is_sglang(openai):
        openai = SglangEndpoint.of(at, config, section, url_key="urls", thread=thread)
        kind_of_server = SglangServer
    # Its addresses: for completions, for control, and for what takes longer.
    card = served(openai, config.name)
    control = Endpoint.of(at, config, section, url_key="urls", thread=thread)
    root = Endpoint(
        at,
        key=config.api_key_env,
        timeout=config.sync.timeout,
        retries=1,
        backoff=config.backoff,
        section=section,
        url_key="urls",
        thread=thread,
        patience=["server.sync.timeout"],
    )
    server = Server(kind_of_server(openai, control, root, card.id), Serving(card.id))
    if config.sync.sleep:
        server.vllm.require_sleep()
        server.vllm.wake()  # a run that was killed leaves it asleep
    kind = _kind(openai, card.id, texts)
    untold = _untold_tokenizer(openai, card.id, texts, card.max_model_len)
    return _Opened(server, card.max_model_len, kind, untold)


def _kind(endpoint: Endpoint, model: str, texts: Texts) -> Kind:
    """Find out the kind of logprobs that a server returns."""

    def one_token(prompt: Prompt, sampling: Sampling) -> LogProbs | None:
        """The logprobs of a one-token answer, the most likely token's among them."""
        body = _body(prompt, sampling, 1, num_logprobs=1)
        body |= {"model": model, "stop_token_ids": sorted(texts.stop_ids)}
        if sampling.temperature > 0:
            body["seed"] = stream_seed(sampling.seed, prompt.id, 0)
        return _read(prompt, endpoint.ask("completions", body)).logprobs

    # A text after which the model is in doubt tells the kinds apart.
    for text in PROBES:
        ids = texts.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = Prompt(f"probe {text}", np.asarray(ids, dtype=np.int64), max_new_tokens=1)
        plain = one_token(prompt, Sampling())
        forced = one_token(prompt, Sampling(temperature=2.0, top_k=1))
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


def _untold_tokenizer(
    endpoint: Endpoint, model: str, texts: Texts, max_model_len: int | None
) -> str:
    """Why a server's tokenizer cannot be compared with the model's; empty where they make the same ids of a text.
    Raises EngineError where they do not: stop strings and ends would be another model's.
    """
    text, expected = SPELLED, texts.tokenizer(SPELLED, add_special_tokens=False)["input_ids"]
    while max_model_len is not None and len(expected) >= max_model_len:
        text = text[: len(text) // 2]
        expected = texts.tokenizer(text, add_special_tokens=False)["input_ids"]
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    body |= {"add_special_tokens": False, "return_token_ids": True}
    try:
        found = parsed(Answer, endpoint.ask("completions", body)).choices[0].prompt_token_ids
    except RequestRefused:
        return "takes no text"
    if found is None:
        return "does not say which ids it reads"
    if found != [*expected]:
        raise EngineError(
            f"server: {endpoint.url} makes the ids {found[:8]} of {text[:8]!r}... and the model's tokenizer "
            f"{[*expected][:8]}; expected the same tokenizer; serve the model's directory, or correct "
            f"{endpoint.url_key}"
        )
    return ""


def _body(
    prompt: Prompt, sampling: Sampling, max_tokens: int, num_logprobs: int = 0
) -> dict[str, Any]:
    """A request without the model, the seed and the stop set. Every setting is sent: a missing one would be the
    server's default.
    """
    return {
        "prompt": prompt.ids_T.tolist(),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": sampling.stop,
        "ignore_eos": False,
        "skip_special_tokens": False,  # a stop string may be one
        "logprobs": num_logprobs,
        "return_token_ids": True,
    }


def _read(prompt: Prompt, answer: Any) -> Choice:
    """The only choice of an answer, if it is one to this prompt."""
    choice = parsed(Answer, answer).choices[0]
    checked(choice, prompt)
    return choice


OF_A_PATH = re.compile(r"#\d+@\d+$")
"""Suffix of a row's id in the id of a turn's prompt: sample and turn (``rl/sampler.py``)."""


class Stream:
    """Completions as they are asked for, one by one, at most ``server.concurrency`` of them under way at each server:
    those of the lowest priority number first, then those that were asked for first. Used by one thread; ``put`` is
    called from another with the key of a completion that may be taken.
    """

    def __init__(
        self, engine: ServerEngine, sampling: Sampling, put: Callable[[int], object]
    ) -> None:
        self._engine, self._sampling, self._put = engine, sampling, put
        self._asked: dict[int, tuple[Prompt, int, Future[tuple[Choice, int]]]] = {}
        self._homes: Homes = Homes()

    @property
    def is_busy(self) -> bool:
        """Whether a completion was asked for and not taken."""
        return bool(self._asked)

    @property
    def has_room(self) -> bool:
        """Whether a completion that is asked for now is begun at once."""
        return len(self._asked) < self._engine.places

    def ask(
        self,
        key: int,
        prompt: Prompt,
        index: int = 0,
        *,
        priority: int = 0,
        affinity: str | None = None,
    ) -> None:
        """Ask for the completion number ``index`` of a prompt. Raises DataError and EngineError for what cannot be
        asked.

        ``affinity``: requests with the same one go to the same server. By default the row's id: that of the prompt,
        without sample and turn.
        """
        self._engine.require_possible([prompt], self._sampling)
        affinity = OF_A_PATH.sub("", prompt.id) if affinity is None else affinity
        future = self._engine.start(prompt, index, self._sampling, affinity, self._homes, priority)
        self._asked[key] = prompt, index, future
        future.add_done_callback(lambda _: self._put(key))

    def take(self, key: int) -> Completion:
        """A completion that is there. Raises EngineError where no server could answer."""
        prompt, index, future = self._asked.pop(key)
        return self._engine.completion(prompt, index, self._sampling, future)

    def cancel(self, key: int) -> None:
        """Cancel a completion that was asked for and not taken, if there is one; the server stops working on it."""
        if key in self._asked:
            self._asked.pop(key)[2].cancel()

    def close(self) -> None:
        """Cancel what was not taken; the servers stop working on it."""
        for _, _, future in self._asked.values():
            future.cancel()
