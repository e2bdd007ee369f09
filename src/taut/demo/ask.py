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
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from taut.demo.reading import (
    Document,
    Question,
    holds_reference,
    is_exact_match,
    prompt,
    wilson_interval,
)

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
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    end = end_of_turn(tokenizer)
    answers: list[Answer] = []
    for document in documents:
        prompts = [_prompt_ids(tokenizer, document, question) for question in document.questions]
        said = continuations(model, prompts, end)
        for question, ids in zip(document.questions, said, strict=True):
            text = str(tokenizer.decode([i for i in ids if i != end]))
            answers.append(_judge(question, text.strip(), ids[-1] == end))
            progress()
    return Report(tuple(answers))


@torch.inference_mode()
def continuations(model: Any, prompts: Sequence[list[int]], end: int) -> Iterator[list[int]]:
    """The greedy continuation of each prompt; what all have in common is computed once."""
    shared = num_shared(prompts)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompts[0][:shared]]), past_key_values=cache, logits_to_keep=1)
    for ids in prompts:
        yield _continue(model, cache, ids[shared:], end)
        cache.crop(shared - cache.get_seq_length())


def end_of_turn(tokenizer: Any) -> int:
    """The token the chat template writes after an assistant's content."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked: str = tokenizer.apply_chat_template(
        turns[:1], tokenize=False, add_generation_prompt=True
    )
    whole: str = tokenizer.apply_chat_template(turns, tokenize=False)
    assert whole.startswith(asked + "b"), "the demo model's template writes the prompt as it was"
    ids: list[int] = tokenizer(whole[len(asked) + 1 :], add_special_tokens=False)["input_ids"]
    return ids[0]


def num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all prompts have in common, each keeping at least one of its own."""
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    same = (all(ids[k] == first[k] for ids in prompts) for k in range(limit))
    return next((k for k, is_same in enumerate(same) if not is_same), limit)


def _judge(question: Question, text: str, has_ended: bool) -> Answer:
    is_right = is_exact_match(text, question.references)
    return Answer(question, text, has_ended, is_right, holds_reference(text, question.references))


def _prompt_ids(tokenizer: Any, document: Document, question: Question) -> list[int]:
    turns = [{"role": "user", "content": prompt(document, question)}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _continue(model: Any, cache: DynamicCache, ids: list[int], end: int) -> list[int]:
    """The greedy continuation of ``cache`` and ``ids``: up to and with ``end``, or cut."""
    said: list[int] = []
    while len(said) < MAX_NEW_TOKENS and (not said or said[-1] != end):
        logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
        ids = [int(logits[0, -1].argmax())]
        said += ids
    return said
