"""The stop check: does the trained model end its answers? Run on a few held-out prompts before the model is saved.

Each answer is sampled at temperature 1 from a separate random stream, up to ``max_new_tokens`` tokens, and must end. An
answer whose reference is longer than half of that begins with the reference's own words, so that half remains: long
answers are no fault of a model that was taught them. Where too few end, the probability of the end token where the
references end says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from taut.data.packing import ALONE, pack
from taut.errors import ConfigError, ModelError
from taut.evals.settings import StopCheckConfig
from taut.inference.engine import Engine
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.models.scorer import evaluating
from taut.train.oom import require_room
from taut.train.trainer import Trainer
from taut.types import Prompt, Sample

SEARCHED = 64
"""Samples searched per prompt: some are cut before their end, some share a prompt."""
EXAMPLES = 3
TAIL = 120
"""Characters of an example's end."""
LIKELY = 0.5
"""From this mean probability of the end, where the references end, the end counts as learned."""
ROOMIER = "set a smaller stop_check.prompts or stop_check.max_new_tokens"
"""The remedy in an out-of-memory error."""


@dataclass(frozen=True, eq=False, slots=True)
class StopPrompt:
    """A prompt and its reference answer."""

    prompt: Prompt
    reference: Sample | None
    """Prompt and answer, whose only target is the token that ends it; None if no answer is known."""
    is_begun: bool
    """Whether the prompt holds a part of the answer."""


@dataclass(frozen=True)
class Stops:
    """The result of the stop check."""

    num_asked: int
    num_ended: int
    num_begun: int
    """Answers that were begun with the reference's words."""
    wanted: float
    """The share that must end."""
    end_probability: float | None
    """Geometric mean, over the references, of the probability of the token that ends them, where they end; None where
    there are none."""
    examples: tuple[tuple[str, str], ...]
    """(sample id, the last words) of answers that did not end."""
    is_taught: bool = True
    """Whether the run teaches ends: it learns good answers as such, and does not only compare."""
    remedy: str = ""
    """The method's own remedy, with its configuration keys."""

    @property
    def is_enough(self) -> bool:
        return self.num_ended / self.num_asked >= self.wanted

    @property
    def cause(self) -> str:
        """Why the model probably does not end."""
        if self.end_probability is None:
            remedies = [
                "look at its answers",
                "allow more with stop_check.max_new_tokens",
                self.remedy,
            ]
            return f"the model runs on; {'; or '.join(filter(None, remedies))}"
        where = f"where the reference answers end, the end has a probability of {self.end_probability:.2g}"
        if self.end_probability >= LIKELY:
            remedy = "train longer, or allow more" if self.is_taught else "allow more"
            return (
                f"{where}: the model knows the end of a good answer and does not arrive at one; "
                f"{remedy} with stop_check.max_new_tokens"
            )
        if not self.is_taught:
            return (
                f"{where} only: the model does not end its answers, or no longer; begin with one that does (`taut "
                "eval` says, `taut sft` teaches it), or lower optim.learning_rate"
            )
        return (
            f"{where} only: the model has not learned to end; train longer or with a higher optim.learning_rate, and "
            "see in `taut show` that ends are targets"
        )

    def __str__(self) -> str:
        text = f"{self.num_ended} of {self.num_asked} answers ended by themselves"
        if self.is_enough:
            return text
        shown = "; ".join(f"{name} ...{words!r}" for name, words in self.examples)
        return f"{text}, expected {self.wanted:.0%}; {self.cause}; such as: {shown}"

    def as_fields(self) -> dict[str, Any]:
        """Fields of an event."""
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
) -> list[StopPrompt]:
    """Prompts with different beginnings whose answers end with one of ``stop_ids``; a function of ``seed``."""
    # different prompts in a random order, of which not all end
    order = np.random.default_rng([seed, len(data)]).permutation(len(data))
    chosen: dict[tuple[bytes, ...], StopPrompt] = {}
    for index in order[: config.prompts * SEARCHED]:
        candidate = _stop_prompt(data[int(index)], stop_ids, config.max_new_tokens)
        if candidate is not None and (context is None or candidate.prompt.ids_T.size < context):
            prompt = candidate.prompt
            pictures = (medium.picture.digest.encode() for medium in prompt.media)
            chosen.setdefault((prompt.ids_T.tobytes(), *pictures), candidate)
        if len(chosen) == config.prompts:
            break
    return list(chosen.values())


def _stop_prompt(
    sample: Sample | Prompt, stop_ids: Sequence[int], tokens: int
) -> StopPrompt | None:
    """The prompt before a sample's last answer; None where the answer was cut before its end, or is labeled bad."""
    if isinstance(sample, Prompt):
        return StopPrompt(sample, None, is_begun=False)
    at_N = sample.target_at_N
    if sample.values.get("label", 1.0) < 0.5:
        return None
    if not at_N.size or sample.ids_T[at_N[-1]] not in stop_ids:
        return None
    # the last answer, from its own half of the tokens on
    end = int(at_N[-1])
    breaks = np.flatnonzero(np.diff(at_N) > 1)
    start = int(at_N[breaks[-1] + 1]) if breaks.size else int(at_N[0])
    first = max(start, end + 1 - tokens // 2)
    media = tuple(medium for medium in sample.media if medium.stop <= first)  # an answer has none
    reference = Sample(sample.id, sample.ids_T[: end + 1], np.array([end]), np.ones(1), media)
    prompt = Prompt(sample.id, sample.ids_T[:first], media=media)
    return StopPrompt(prompt, reference, first > start)


@dataclass(frozen=True)
class StopCheck:
    """The check of a run; a call runs it."""

    prompts: Sequence[StopPrompt]
    engine: Engine | None
    config: StopCheckConfig
    trainer: Trainer
    seed: int
    obstacle: str = ""
    """Why the check cannot run."""
    is_taught: bool = True
    remedy: str = ""
    """The method's own remedy, as in ``Stops``."""

    def __call__(self) -> Stops | None:
        """Sample the answers, count which end, and emit a ``check`` event; None where it cannot run. All ranks
        call this together and get the same result.
        """
        if self.engine is None:
            self.trainer.emit(
                "check", name="stop", outcome="skipped", value=None, detail=self.obstacle
            )
            return None
        # sample the answers
        sampling = Sampling(max_new_tokens=self.config.max_new_tokens, seed=self.seed)
        prompts = [chosen.prompt for chosen in self.prompts]
        generate = partial(self.engine.generate, prompts, sampling)
        completions = require_room(generate, "asked whether its answers end", ROOMIER)
        endless = [completion for completion in completions if completion.finish_reason != "stop"]
        # the probability of the end token where the data's answers end
        references = [c.reference for c in self.prompts if c.reference is not None]
        end_probability = None
        if references:
            scorer = self.trainer.scorer
            with evaluating(scorer), torch.no_grad(), self.trainer.compute():
                logps = [float(scorer(pack([sample], ALONE)).logp_N[0]) for sample in references]
            end_probability = math.exp(sum(logps) / len(logps))
        # judge and report
        stops = Stops(
            num_asked=len(completions),
            num_ended=len(completions) - len(endless),
            num_begun=sum(chosen.is_begun for chosen in self.prompts),
            wanted=self.config.min_share,
            end_probability=end_probability,
            examples=tuple((c.prompt_id, c.text[-TAIL:]) for c in endless[:EXAMPLES]),
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
    required and cannot run.
    """
    if not config.prompts:
        return unasked(config, trainer, seed, "stop_check.prompts=0")
    try:
        engine = make_engine()
    except ModelError as error:
        return unasked(config, trainer, seed, str(error))
    prompts = choose(data, stop_ids, config, engine.context, seed)
    if not prompts:
        return unasked(config, trainer, seed, "no answer looked at ends: all were cut")
    return StopCheck(prompts, engine, config, trainer, seed)


def unasked(config: StopCheckConfig, trainer: Trainer, seed: int, obstacle: str) -> StopCheck:
    """The check of a run in which it cannot run. Raises ConfigError if it is required."""
    if config.required:
        raise ConfigError(
            f"stop_check.required=true cannot be checked: {obstacle}; set stop_check.required=false, or remove the "
            "obstacle"
        )
    return StopCheck([], None, config, trainer, seed, obstacle)
