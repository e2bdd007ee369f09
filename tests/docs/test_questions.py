"""Twenty questions of users: a search for their usual word finds a section that has the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.docs.pages import ROOT

QUESTIONS = {
    "early stopping": "eval.stop_after",
    "gradient accumulation": "batch.tokens_per_microbatch",
    "batch size": "batch.samples_per_step",
    "callbacks": "hooks",
    "sweep": "optim.learning_rate",
    "compute_metrics": "eval.metrics",
    "validation split": "share",
    "multi-GPU": "torchrun",
    "resume after a crash": "taut resume",
    "out of memory": "taut plan",
    "loss mask": "data.targets",
    "chat template": "data.template",
    "context length": "data.max_length",
    "LoRA rank": "lora.rank",
    "merging": "taut merge",
    "Ollama": "taut export",
    "several rewards": "weight",
    "function calling": "tools",
    "vLLM": "rollout.urls",
    "W&B": "log.wandb",
    "best model": "eval.best",
    "QLoRA": "quantize",
    "learning rate": "optim.schedule",
}
"""What is typed into a search -> the key or command of the answer."""


def sections() -> Iterator[tuple[str, str]]:
    """(page#heading, text) of the README and of all pages but the tables of keys, which have every key."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        if page.name == "config.md":
            continue
        for part in re.split(r"^(?=#+ )", page.read_text(encoding="utf-8"), flags=re.M):
            yield f"{page.name}: {part.splitlines()[0] if part else ''}", part


@pytest.mark.parametrize("words", QUESTIONS)
def test_a_search_for_the_usual_word_finds_the_answer(words: str) -> None:
    flat = [(place, " ".join(text.split())) for place, text in sections()]
    found = [(place, text) for place, text in flat if words.lower() in text.lower()]
    assert found, f"no page has the words {words!r}"
    answers = [place for place, text in found if QUESTIONS[words] in text]
    beside = [place for place in answers if not place.startswith("names.md")]
    assert beside, (
        f"{words!r} stands in {[place for place, _ in found]}, none with {QUESTIONS[words]}"
    )
