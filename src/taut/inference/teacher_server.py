"""A teacher behind an OpenAI-compatible endpoint that takes token ids (vLLM): its logprobs of a student's completions.

A sample is one request to /v1/completions, with its ids as the prompt and ``prompt_logprobs`` = k. For each position
the answer has the logprob of the id that was sent and those of the k likeliest tokens, at temperature 1, among all of
the teacher's tokens. Of each target they become the streams

    teacher_logp_N       the logprob of the target
    top_ids, top_logp    the k likeliest tokens and their logprobs (``models.teacher.ListedTeacher``); none where k is 0

An answer is refused that is not about the ids sent, lists fewer tokens or other ids than the student has, or whose
probabilities sum to more than 1. ``open`` refuses a teacher with another vocabulary: the server has to make the
student's ids of texts and of every special token, give tokens from all over the vocabulary, the first and the last
among them, the student's texts, and have no token after the last.

vLLM limits k by ``--max-logprobs``, 20 by default. SGLang returns the same by other names, and is not asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision
from taut.data.store.top_logprobs import MOST_MASS
from taut.errors import EngineError, RequestRefused
from taut.inference.settings import EndpointConfig
from taut.inference.vllm_client import (
    ABOVE_ZERO,
    BELOW_ALL,
    Answer,
    Choice,
    Endpoint,
    no_ids,
    parsed,
    served,
)
from taut.types import TEACHER_LOGP, TOP_IDS, TOP_LOGP, FloatArray, Sample

TEXTS = ("The 3 cats aren't here:\n\tf(x) = 0x1F;", "Größe, 你好, здравствуй, 🙂", " ")
"""Texts that a server with the student's tokenizer gives the student's ids."""
SPREAD = 64
"""Tokens from all over the vocabulary whose texts are compared."""


@dataclass(frozen=True)
class TeacherServer:
    """A teacher at an endpoint. ``open`` makes one, ``close`` ends its connections."""

    endpoint: Endpoint
    config: EndpointConfig
    name: str
    """The model's name there."""
    top: int
    """Likeliest tokens of each target; 0: none."""
    num_rows: int
    """Rows of the student's vocabulary."""

    @classmethod
    def open(
        cls,
        url: str,
        config: EndpointConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        top: int,
        num_rows: int,
        longest: int,
        section: str,
    ) -> TeacherServer:
        """The teacher at ``url`` of a student with this tokenizer. Raises EngineError for one with another vocabulary,
        or a context below ``longest`` tokens. ``section``: of the configuration, as in ``distill.``.
        """
        endpoint = Endpoint.of(url, config, section)
        try:
            card = served(endpoint, config.name)
            if card.max_model_len is not None and card.max_model_len <= longest:
                raise EngineError(
                    f"{section}url={url}: max_model_len is {card.max_model_len:,} and the longest sample has "
                    f"{longest:,} tokens; expected room for one more; start it with --max-model-len {longest + 1}"
                )
            server = cls(endpoint, config, card.id, top, num_rows)
            server._require_same_vocabulary(tokenizer)
            return server
        except BaseException:
            endpoint.close()
            raise

    def close(self) -> None:
        self.endpoint.close()

    @property
    def decision(self) -> Decision:
        """The served model, and what it is asked for."""
        asked = f"its {self.top} likeliest tokens" if self.top else "its logprob"
        reason = f"{self.name}, asked for {asked} at each token of a completion"
        return Decision(f"{self.endpoint.section}url", self.endpoint.url, reason)

    def score(self, samples: Sequence[Sample]) -> dict[str, dict[str, FloatArray]]:
        """Sample id -> its streams; ``server.concurrency`` requests are under way at a time."""
        scores: dict[str, dict[str, FloatArray]] = {}
        under_way: deque[tuple[Sample, Future[Any]]] = deque()

        def take() -> None:
            sample, answer = under_way[0]
            try:
                choice = parsed(Answer, answer.result()).choices[0]
            except RequestRefused as error:
                raise self._refused(error, sample.id) from None
            scores[sample.id] = self._streams(sample, choice)
            under_way.popleft()

        try:
            for sample in samples:
                if len(under_way) == self.config.concurrency:
                    take()
                body = self._body(sample.ids_T.tolist())
                under_way.append((sample, self.endpoint.start("completions", body)))
            while under_way:
                take()
        finally:
            for _, answer in under_way:
                answer.cancel()
        return scores

    def _body(self, prompt: list[int] | str) -> dict[str, Any]:
        return {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.top,
            "return_token_ids": True,
            "add_special_tokens": False,
        }

    def _refused(self, error: RequestRefused, place: str) -> EngineError:
        key = f"{self.endpoint.section}top"
        return EngineError(
            f"{place}: {error}; expected prompt_logprobs={self.top} of the student's ids; start vLLM with "
            f"--max-logprobs {self.top}, lower {key}, or serve a model with its tokenizer"
        )

    def _streams(self, sample: Sample, choice: Choice) -> dict[str, FloatArray]:
        """Streams of a sample's targets from an answer."""
        # The logprob of each target, and the likeliest tokens in its place.
        sent, at_N = sample.ids_T.tolist(), sample.target_at_N.tolist()
        places = self._places(sample.id, sent, choice)
        rows = [_row(places[at], sent[at], self.top) for at in at_N]
        missing = next((at for at, row in zip(at_N, rows, strict=True) if row is None), None)
        if missing is not None:
            raise EngineError(
                f"{sample.id}: the server's prompt_logprobs of token {missing} lack the id {sent[missing]} or "
                f"{self.top} tokens with a logprob; expected both; serve the teacher with vLLM"
            )
        own_N, ids_Nk, logp_Nk = (
            np.array([row[part] for row in rows if row is not None], dtype=np.float64)
            for part in range(3)
        )
        # They have to be those of distributions over the student's vocabulary.
        mass_N, fault = np.exp(logp_Nk).sum(axis=1), ""
        if not ((own_N > BELOW_ALL) & (own_N <= ABOVE_ZERO)).all():
            fault = (
                f"returned {own_N[own_N.argmin()]:g} to {own_N.max():g} as logprobs, which rules a token out; expected "
                "finite ones of at most 0; serve it without a logits processor, with --logprobs-mode raw_logprobs"
            )
        elif self.top and (ids_Nk.min() < 0 or ids_Nk.max() >= self.num_rows):
            fault = (
                f"lists the token {ids_Nk.max():.0f}, and the student has {self.num_rows:,}; expected the student's "
                "vocabulary; serve a model with its tokenizer"
            )
        elif self.top and mass_N.max() > MOST_MASS:
            fault = (
                f"returned probabilities of a token that sum to {mass_N.max():.4g}; expected at most 1; start vLLM "
                "with --logprobs-mode raw_logprobs"
            )
        if fault:
            raise EngineError(f"{sample.id}: the server {fault}")
        if not self.top:
            return {TEACHER_LOGP: own_N}
        return {TEACHER_LOGP: own_N, TOP_IDS: ids_Nk, TOP_LOGP: logp_Nk}

    def _places(
        self, place: str, sent: list[int], choice: Choice
    ) -> list[Mapping[str, Mapping[str, Any]]]:
        """The tokens listed in the place of each id sent. Raises EngineError where other ids were read."""
        if choice.prompt_token_ids is None:
            raise no_ids("prompt_token_ids")
        places = choice.prompt_logprobs or []
        if choice.prompt_token_ids != sent or len(places) != len(sent):
            raise EngineError(
                f"{place}: the server answered {len(places)} prompt_logprobs of {len(choice.prompt_token_ids)} ids, "
                f"which are not the {len(sent)} sent; expected one of each; serve the teacher with vLLM"
            )
        return [place or {} for place in places]

    def _require_same_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise EngineError where ids stand for other tokens there than for the student."""
        # It makes the student's ids of texts and of special tokens,
        vocabulary = tokenizer.get_vocab()
        special = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
        for text in (*TEXTS, "".join(dict.fromkeys(special))):
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            theirs = self._probe(text).prompt_token_ids if ids else ids
            if theirs is None:
                raise no_ids("prompt_token_ids")
            if theirs != ids:
                raise self._other_vocabulary(f"makes {theirs} of {text!r}", f"{ids}")
        # reads the student's texts for ids from all over the vocabulary,
        every = sorted(vocabulary.values())
        spread = np.linspace(0, len(every) - 1, SPREAD).round().astype(int)
        # the first position has no logprobs
        sent = [every[0], *dict.fromkeys(every[at] for at in spread.tolist())]
        places = self._places("the probe", sent, self._probe(sent))
        for index, listed in zip(sent[1:], places[1:], strict=True):
            ours = str(tokenizer.decode([index], skip_special_tokens=False))
            theirs_text = str(listed.get(f"{index}", {}).get("decoded_token"))
            is_part = "\ufffd" in ours + theirs_text  # of a character
            if not is_part and ours.strip() != theirs_text.strip():
                found = f"reads {theirs_text!r} for the id {index}"
                raise self._other_vocabulary(found, f"{ours!r}")
        # and has no token after the last.
        beyond = every[-1] + 1
        try:
            _, listed = self._places("the probe", [beyond] * 2, self._ask([beyond] * 2))
        except RequestRefused:
            return
        text = str(listed.get(f"{beyond}", {}).get("decoded_token") or "")  # a row without a token
        if text.strip():
            raise self._other_vocabulary(f"has {text!r} for the id {beyond}", "no such id")

    def _ask(self, prompt: list[int] | str) -> Choice:
        return parsed(Answer, self.endpoint.ask("completions", self._body(prompt))).choices[0]

    def _probe(self, prompt: list[int] | str) -> Choice:
        try:
            return self._ask(prompt)
        except RequestRefused as error:
            raise self._refused(error, "the probe") from None

    def _other_vocabulary(self, found: str, ours: str) -> EngineError:
        return EngineError(
            f"{self.endpoint.section}url={self.endpoint.url}: the server {found}, and the student's tokenizer has "
            f"{ours}; expected the student's vocabulary; serve a model of the same family"
        )


def _row(
    listed: Mapping[str, Mapping[str, Any]], own: int, top: int
) -> tuple[float, list[int], list[float]] | None:
    """(logprob of the id ``own``, the ``top`` likeliest ids, their logprobs) of one position; None: one is missing."""
    try:
        logps = {int(index): float(entry["logprob"]) for index, entry in listed.items()}
    except (KeyError, TypeError, ValueError):
        return None
    if own not in logps or len(logps) < top:
        return None
    ids = sorted(logps, key=logps.__getitem__, reverse=True)[:top]
    return logps[own], ids, [logps[index] for index in ids]
