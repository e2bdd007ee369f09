"""Does the trained model end its answers by itself? Asked of a few held-out prompts before the model is saved.

Each answer is drawn at temperature 1 from a random stream of its own, up to ``tokens`` tokens, and is held to end. An
answer whose reference is longer than half of that is begun with the reference's own words, so that half remains: a
model that was taught to write long answers is not blamed for them. The probability of the end where the references end
says why, where too few do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from taut.config import configclass
from taut.data.packing import ALONE, pack
from taut.errors import ConfigError, ModelError
from taut.inference.engine import Engine, Sampling
from taut.inference.local import LocalEngine
from taut.train.oom import require_room
from taut.train.trainer import Trainer
from taut.types import Prompt, Sample

LOOKED_AT = 64
"""Samples looked at for each one wanted: some are cut before their end, some have one prompt."""
EXAMPLES = 3
TAIL = 120
"""Characters of an example's end."""
LIKELY = 0.5
"""A mean probability of the end, where the references end, that counts as learned."""
ROOMIER = "set a smaller stop_check.prompts or stop_check.max_new_tokens"
"""What to do where memory runs out."""


@configclass
class StopCheckConfig:
    """Whether the trained model ends its answers, asked before it is saved."""

    prompts: Annotated[int, Field(ge=0)] = 16
    """Held-out prompts that are asked (training prompts where there is no data.eval); 0: none."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens an answer may take to end."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Answers that have to end by themselves; with fewer the run says so, and the likely cause."""
    required: bool = False
    """Fail the run where fewer end, and write no model; its training state is kept."""


@dataclass(frozen=True, eq=False, slots=True)
class Asked:
    """A prompt, and the answer that it is known to have."""

    prompt: Prompt
    reference: Sample | None
    """The whole path; its only target is the token that ends the answer. None: no answer is known."""
    is_begun: bool
    """Whether the prompt holds a part of the answer."""


@dataclass(frozen=True)
class Stops:
    """What came of it."""

    num_asked: int
    num_ended: int
    num_begun: int
    """Answers that were begun with the reference's words."""
    wanted: float
    """The share that has to end."""
    end_probability: float | None
    """Geometric mean, over the references, of the probability of the token that ends them, where they end; None where
    there are none."""
    examples: tuple[tuple[str, str], ...]
    """(sample id, the last words) of answers that did not end."""
    is_taught: bool = True
    """Whether the run teaches ends: it learns good answers as such, and does not only compare."""
    remedy: str = ""
    """What the method itself can do about it, in keys that it has."""

    @property
    def is_enough(self) -> bool:
        return self.num_ended / self.num_asked >= self.wanted

    @property
    def cause(self) -> str:
        """What probably keeps the model from ending."""
        if self.end_probability is None:
            remedies = [
                "look at its answers",
                "allow more with stop_check.max_new_tokens",
                self.remedy,
            ]
            return f"the model runs on; {'; or '.join(filter(None, remedies))}"
        found = f"where the reference answers end, the end has a probability of {self.end_probability:.2g}"
        if self.end_probability >= LIKELY:
            remedy = "train longer, or allow more" if self.is_taught else "allow more"
            return (
                f"{found}: the model knows the end of a good answer and does not arrive at one; "
                f"{remedy} with stop_check.max_new_tokens"
            )
        if not self.is_taught:
            return (
                f"{found} only: the model does not end its answers, or no longer, and comparing them hardly teaches "
                "it; begin with one that does (`taut eval` says, `taut sft` teaches it), or lower optim.learning_rate"
            )
        return (
            f"{found} only: the model has not learned to end; train longer or with a higher optim.learning_rate, and "
            "look at `taut show`, which marks the end of each answer as a target"
        )

    def __str__(self) -> str:
        text = f"{self.num_ended} of {self.num_asked} answers ended by themselves"
        if self.is_enough:
            return text
        shown = "; ".join(f"{name} ...{words!r}" for name, words in self.examples)
        return f"{text}, expected {self.wanted:.0%}; {self.cause}; such as: {shown}"

    def as_fields(self) -> dict[str, Any]:
        """For an event."""
        return {
            "asked": self.num_asked,
            "ended": self.num_ended,
            "begun": self.num_begun,
            "wanted": self.wanted,
            "end_probability": self.end_probability,
            "cause": None if self.is_enough else self.cause,
            "examples": [{"id": name, "text": words} for name, words in self.examples],
        }


def choose(
    data: Sequence[Sample] | Sequence[Prompt],
    stop_ids: Sequence[int],
    config: StopCheckConfig,
    context: int | None,
    seed: int,
) -> list[Asked]:
    """Prompts with different beginnings whose answers end with one of ``stop_ids``; a function of ``seed``."""
    order = np.random.default_rng([seed, len(data)]).permutation(len(data))
    found: dict[tuple[bytes, ...], Asked] = {}
    for index in order[: config.prompts * LOOKED_AT]:
        asked = _ask(data[int(index)], stop_ids, config.max_new_tokens)
        if asked is not None and (context is None or asked.prompt.ids_T.size < context):
            found.setdefault(_beginning(asked.prompt), asked)
        if len(found) == config.prompts:
            break
    return list(found.values())


def _ask(sample: Sample | Prompt, stop_ids: Sequence[int], tokens: int) -> Asked | None:
    """The last answer of a sample as a question; None where it was cut before its end, or is labelled bad."""
    if isinstance(sample, Prompt):
        return Asked(sample, None, is_begun=False)
    at_N = sample.target_at_N
    if sample.values.get("label", 1.0) < 0.5:
        return None
    if not at_N.size or sample.ids_T[at_N[-1]] not in stop_ids:
        return None
    end = int(at_N[-1])
    breaks = np.flatnonzero(np.diff(at_N) > 1)
    start = int(at_N[breaks[-1] + 1]) if breaks.size else int(at_N[0])
    first = max(start, end + 1 - tokens // 2)
    media = tuple(one for one in sample.media if one.stop <= first)  # an answer has none
    reference = Sample(sample.id, sample.ids_T[: end + 1], np.array([end]), np.ones(1), media)
    prompt = Prompt(sample.id, sample.ids_T[:first], media=media)
    return Asked(prompt, reference, first > start)


def _beginning(prompt: Prompt) -> tuple[bytes, ...]:
    """Equal for equal ids and pictures."""
    return prompt.ids_T.tobytes(), *(one.picture.digest.encode() for one in prompt.media)


@dataclass(frozen=True)
class StopCheck:
    """The question, ready to be asked."""

    asked: Sequence[Asked]
    engine: Engine | None
    config: StopCheckConfig
    trainer: Trainer
    seed: int
    obstacle: str = ""
    """Why it cannot be asked."""
    is_taught: bool = True
    remedy: str = ""
    """As in ``Stops``."""

    def __call__(self) -> Stops | None:
        """Draw the answers, see which end, and emit a ``check`` event. Every rank makes the same calls and learns the
        same. None where it cannot be asked."""
        if self.engine is None:
            self.trainer.emit(
                "check", name="stop", outcome="skipped", value=None, detail=self.obstacle
            )
            return None
        sampling = Sampling(max_new_tokens=self.config.max_new_tokens, seed=self.seed)
        ask = partial(self.engine.generate, [one.prompt for one in self.asked], sampling)
        done = require_room(ask, "asked whether its answers end", ROOMIER)
        open_ended = [completion for completion in done if completion.finish_reason != "stop"]
        references = [one.reference for one in self.asked if one.reference is not None]
        stops = Stops(
            num_asked=len(done),
            num_ended=len(done) - len(open_ended),
            num_begun=sum(one.is_begun for one in self.asked),
            wanted=self.config.min_share,
            end_probability=_end_probability(references, self.trainer) if references else None,
            examples=tuple((one.prompt_id, one.text[-TAIL:]) for one in open_ended[:EXAMPLES]),
            is_taught=self.is_taught,
            remedy=self.remedy,
        )
        bad = "failed" if self.config.required else "warning"
        outcome = "passed" if stops.is_enough else bad
        self.trainer.emit(
            "check",
            name="stop",
            outcome=outcome,
            value=stops.num_ended / stops.num_asked,
            detail=str(stops),
        )
        return stops


def prepare(
    config: StopCheckConfig,
    data: Sequence[Sample] | Sequence[Prompt],
    stop_ids: Sequence[int],
    make_engine: Callable[[], LocalEngine],
    trainer: Trainer,
    seed: int,
) -> StopCheck:
    """The check of a run, before it trains, on samples with their answers or on prompts. Raises ConfigError where it is
    required and cannot be made.
    """
    engine, obstacle = None, "stop_check.prompts=0"
    asked: list[Asked] = []
    if config.prompts:
        try:
            engine = make_engine()
        except ModelError as error:
            obstacle = str(error)
    if engine is not None:
        asked = choose(data, stop_ids, config, engine.context, seed)
        if not asked:
            engine, obstacle = None, "no answer looked at ends: all were cut"
    if engine is None:
        return unasked(config, trainer, seed, obstacle)
    return StopCheck(asked, engine, config, trainer, seed)


def unasked(config: StopCheckConfig, trainer: Trainer, seed: int, obstacle: str) -> StopCheck:
    """The check of a run in which it cannot be made. Raises ConfigError if it is required."""
    if config.required:
        raise ConfigError(
            f"stop_check.required=true and it cannot be asked whether the model ends its answers: {obstacle}; set "
            "stop_check.required=false, or remove the obstacle"
        )
    return StopCheck([], None, config, trainer, seed, obstacle)


def _end_probability(references: Sequence[Sample], trainer: Trainer) -> float:
    was_training = trainer.scorer.training
    trainer.scorer.eval()
    with torch.no_grad(), trainer.compute():
        logps = [float(trainer.scorer(pack([sample], ALONE)).logp_N[0]) for sample in references]
    trainer.scorer.train(was_training)
    return math.exp(sum(logps) / len(logps))
