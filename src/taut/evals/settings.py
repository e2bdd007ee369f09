"""Keys of evaluation: answers, the stop check, the contract of a saved model. Imports no torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from taut.config import Code, Every, configclass
from taut.data.settings import Source
from taut.inference.settings import LocalConfig, Sampling
from taut.rewards.settings import RewardSpec
from taut.train.settings import Repeated


@configclass
class EvalSampling(Sampling):
    """Sampling of answers: greedy, unless a temperature is set."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits. 0, the default of evaluations, always takes the most likely token."""


@configclass
class AnswersConfig(Repeated):
    """Evaluation by generation: at the end of training, and every ``every`` steps."""

    every: Every = 0
    """Steps between evaluations by generation, or a text: 0.5 epochs, 30 minutes; 0: only at the end."""
    rewards: Code | list[Code | RewardSpec] = field(default_factory=list)
    """Rewards that score the answers: names of docs/rewards.md, FILE.py:function, or tables of them. Empty: nothing is
    generated."""
    data: str | list[str | Source] | None = None
    """Prompts with their references, as data.eval; by default data.eval."""
    reference: str | None = None
    """The column with the right answer; by default answers, answer, ..., or the last assistant message."""
    limit: Annotated[int, Field(ge=1)] = 128
    """Number of prompts: the first of the data, equally many of each source."""
    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Maximum share of errors among a reward's scores; above it there is a warning, and eval.best ignores the
    reward."""
    sampling: EvalSampling = field(default_factory=EvalSampling)
    local: LocalConfig = field(default_factory=LocalConfig)

    @property
    def is_asked_for(self) -> bool:
        """Whether any setting asks for answers, with or without rewards."""
        return bool(self.rewards or self.every or self.data or self.reference)


@configclass
class StopCheckConfig:
    """The check that the trained model ends its answers, before it is saved."""

    prompts: Annotated[int, Field(ge=0)] = 16
    """Number of held-out prompts (training prompts without data.eval). 0 disables the check."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens in which an answer must end."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Minimum share of answers that end; below it the run reports the share and the likely cause."""
    required: bool = False
    """Fail the run where fewer end, and write no model; the training state is kept."""


@configclass
class ContractConfig:
    """The golden prompts in model/contract.json."""

    prompts: Annotated[int, Field(ge=0)] = 4
    """Number of prompts (of data.eval, else of the training data) that are saved with the model's answers; 0: none."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 32
    """Maximum tokens of an answer."""
