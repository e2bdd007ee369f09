"""A teacher behind an endpoint on the loopback: a tiny model that says prompt_logprobs as vLLM does.

with TeacherModelServer(model=...) as server:
    ... distill.url=server.url
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.helpers.fake_vllm import Body, FakeServer, Fault
from tests.helpers.fake_weight_sync import tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.data.packing import ALONE, pack
from taut.models.attention_backends import PREFIX
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.types import Sample

PROBED = 6
"""Requests that opening makes: three texts, the special tokens, ids, and one beyond."""


@dataclass
class TeacherModelServer(FakeServer):
    """Text is tokenized by ``tokenizer``; ids are taken as they are, below the number of the model's rows."""

    model: PreTrainedModel = field(default_factory=tiny)
    tokenizer: PreTrainedTokenizerBase = field(default_factory=tiny_tokenizer)
    max_model_len: int | None = 256
    max_logprobs: int = 600

    def __post_init__(self) -> None:
        self.model.eval()
        self.extra_faults, self.faults = self.faults, self._refusal

    def _refusal(self, body: Body, count: int) -> Fault | None:
        """What vLLM answers to a request that it cannot serve."""
        ids = body["prompt"]
        if body["prompt_logprobs"] > self.max_logprobs:
            asked = f"Requested prompt logprobs of {body['prompt_logprobs']}"
            return refused(f"{asked}, which is greater than max allowed: {self.max_logprobs}")
        if isinstance(ids, list) and max(ids) >= self.model.config.vocab_size:
            return refused(f"Token id {max(ids)} is out of vocabulary")
        return self.extra_faults(body, count)

    def choice(self, body: Body) -> Body:
        ids = body["prompt"]
        if isinstance(ids, str):
            special = body["add_special_tokens"]
            ids = list(self.tokenizer(ids, add_special_tokens=special)["input_ids"])
        with torch.no_grad():
            logp = self.logits(ids).log_softmax(-1)
        places: list[Any] = [None]
        for own, row in zip(ids[1:], logp, strict=False):
            best = row.topk(body["prompt_logprobs"]).indices.tolist()
            places.append(
                {f"{index}": self._entry(row, index) for index in dict.fromkeys([own, *best])}
            )
        return {"prompt_token_ids": ids, "prompt_logprobs": places, "token_ids": [0]}

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V], by the library's own forward."""
        logits: Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    def _entry(self, row: Tensor, index: int) -> dict[str, Any]:
        rank = int((row > row[index]).sum()) + 1
        text = self.tokenizer.decode([index])
        return {"logprob": float(row[index]), "rank": rank, "decoded_token": text}


@dataclass
class ExactTeacherServer(TeacherModelServer):
    """By taut's forward in float64: the library's norms are in float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inner: Any = self.model
        inner.set_attn_implementation(PREFIX + "reference")
        self.scorer = Scorer(self.model)

    def logits(self, ids: list[int]) -> Tensor:
        size = len(ids)
        sample = Sample("a", np.array(ids), np.arange(1, size), np.ones(size - 1))
        with compute_context(torch.float64, torch.device("cpu")):
            return self.scorer.target_logits(pack([sample], ALONE))


def refused(message: str) -> Fault:
    return Fault(400, json.dumps({"error": {"message": message}}))
