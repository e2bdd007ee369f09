"""Greedy answers to the questions of a document, one prompt at a time, and how they score.

The document is read once: its keys and values stay in the cache, each question is appended to
them and cut off again. An answer ends at the template's end of turn, or is cut after
``MAX_NEW_TOKENS`` and counted as unfinished.

Deliberately not here: sampling, batches of prompts, any engine; this goes when ``taut.evals`` can
generate. May be imported by ``taut.demo`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from taut.data.render import Renderer
from taut.demo.reading import (
    Document,
    Question,
    holds_reference,
    is_exact_match,
    prompt,
    wilson_interval,
)
from taut.models.load import load_tokenizer

MAX_NEW_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """What the model said to one question."""

    question: Question
    text: str
    has_ended: bool
    """Whether the model ended the turn by itself."""
    is_right: bool
    """Exact match with a reference."""
    holds_reference: bool
    """Whether a reference stands somewhere in the answer: right, if not brief."""


@dataclass(frozen=True)
class Report:
    """All answers of one model."""

    answers: tuple[Answer, ...]

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    @property
    def num_holding(self) -> int:
        return sum(answer.holds_reference for answer in self.answers)

    @property
    def num_ended(self) -> int:
        return sum(answer.has_ended for answer in self.answers)

    def as_dict(self) -> dict[str, float | int]:
        """The numbers, for ``demo.json``."""
        low, high = wilson_interval(self.num_right, len(self.answers))
        return {
            "questions": len(self.answers),
            "right": self.num_right,
            "holding": self.num_holding,
            "ended": self.num_ended,
            "exact_match": self.num_right / len(self.answers),
            "exact_match_low": low,
            "exact_match_high": high,
            "ended_share": self.num_ended / len(self.answers),
        }


def ask(model_dir: Path, documents: Sequence[Document], progress: Callable[[], None]) -> Report:
    """The model's greedy answer to every question; ``progress`` is called after each."""
    renderer = Renderer(load_tokenizer(str(model_dir)))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    stops = renderer.stop_ids
    answers: list[Answer] = []
    for document in documents:
        turns = [{"role": "user", "content": prompt(document, q)} for q in document.questions]
        prompts = [renderer.prompt_ids([turn]).tolist() for turn in turns]
        said = continuations(model, prompts, stops)
        for question, ids in zip(document.questions, said, strict=True):
            text = renderer.tokenizer.decode([token for token in ids if token not in stops])
            answers.append(judge(question, str(text).strip(), ids[-1] in stops))
            progress()
    return Report(tuple(answers))


@torch.inference_mode()
def continuations(
    model: Any, prompts: Sequence[list[int]], stops: Sequence[int]
) -> Iterator[list[int]]:
    """The greedy continuation of each prompt; what all have in common is computed once."""
    shared = num_shared(prompts)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompts[0][:shared]]), past_key_values=cache, logits_to_keep=1)
    for ids in prompts:
        yield _continue(model, cache, ids[shared:], stops)
        cache.crop(shared - cache.get_seq_length())


def num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all prompts have in common, each keeping at least one of its own."""
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    same = (all(ids[k] == first[k] for ids in prompts) for k in range(limit))
    return next((k for k, is_same in enumerate(same) if not is_same), limit)


def judge(question: Question, text: str, has_ended: bool) -> Answer:
    """How an answer scores."""
    is_right = is_exact_match(text, question.references)
    return Answer(question, text, has_ended, is_right, holds_reference(text, question.references))


def _continue(model: Any, cache: DynamicCache, ids: list[int], stops: Sequence[int]) -> list[int]:
    """The greedy continuation of ``cache`` and ``ids``: up to and with a stop, or cut."""
    said: list[int] = []
    while len(said) < MAX_NEW_TOKENS and (not said or said[-1] not in stops):
        logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
        ids = [int(logits[0, -1].argmax())]
        said += ids
    return said
