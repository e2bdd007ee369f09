"""What a run consists of before there is a trainer, as methods see it: the tokenizer and data (``Inputs``), the models
(``Models``, of which ``Loaded`` is the first part), the order of its steps (``Plan``).

Types alone: ``run.inputs`` and ``run.setup`` make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision
from taut.data.batching import Budget, Cursor
from taut.data.dataset import Dataset
from taut.data.packing import PackPolicy
from taut.data.render import Renderer
from taut.data.stop_tokens import StopSet
from taut.models.attention_backends import Chosen
from taut.models.load import context_length
from taut.models.noise import Noise
from taut.models.precision import ChosenDtype
from taut.models.scorer import Scorer
from taut.train.trainer import Role, StepSource


class MayChange(NamedTuple):
    """The configuration keys that a resumed run may have another value of, and what follows. A key stands for all below
    it. Every other key makes it another run.
    """

    freely: tuple[str, ...] = ()
    """They have no part in the steps, or what they name is compared by content."""
    rounding: tuple[str, ...] = ()
    """Losses are equal up to rounding, no longer bit for bit."""
    schedule: tuple[str, ...] = ()
    """The steps to come have another learning rate."""

    def plus(self, other: MayChange) -> MayChange:
        """These keys and others."""
        return MayChange(*(own + more for own, more in zip(self, other, strict=True)))


class Language(NamedTuple):
    """What turns text into ids, and back."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    new_ids: list[int]
    """Ids of the tokens that were added."""
    renderer: Renderer

    @property
    def num_rows(self) -> int:
        """Rows of the embedding, those of added tokens included."""
        size = int(self.config.get_text_config().vocab_size)
        return max([size, *(index + 1 for index in self.new_ids)])


@dataclass(frozen=True)
class Inputs:
    """Tokenizer and data: all that ``taut show`` needs, and the first half of a run."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    train: Dataset
    eval: Dataset | None
    max_length: int
    new_ids: list[int]
    stops: StopSet
    """What ends an answer. Derived here, so that a template without an end is refused before training."""
    decisions: list[Decision]
    grows: int = 0
    """Tokens that generation may add to a prompt; 0 where nothing is generated."""

    def token(self, index: int) -> str:
        """How the tokenizer writes an id."""
        return str(self.tokenizer.convert_ids_to_tokens(index))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample there can be, held-out ones included."""
        each = [int(data.lengths.max()) for data in (self.train, self.eval) if data is not None]
        most = max(each) + self.grows
        context = context_length(self.config) if self.grows else None
        return most if context is None else min(most, context)


class Loaded(NamedTuple):
    """The model as it is on disk, with the attention and the compute dtype of the run."""

    model: PreTrainedModel
    dtype: ChosenDtype
    attention: Chosen
    one_sample: str | None
    """Why this model has to run one sample at a time; None: it packs."""
    decisions: list[Decision]


@dataclass(frozen=True)
class Models:
    """The policy with its adapters and the models next to it, sharded: the second half of a run."""

    scorer: Scorer
    """The policy, with a teacher, a critic and a reference that moves: what checkpoints hold, and what forwards run."""
    loaded: Loaded
    """The policy as it was loaded, with the dtype and attention that are in force for all models."""
    roles: Sequence[Role]
    """Models other than the policy whose outputs the loss reads: a reference."""
    noise: Noise | None
    policy: PackPolicy
    """How samples share prefixes."""
    budget: Budget
    """How a step is divided among ranks and micro-batches."""
    library_logps: Mapping[str, Tensor]
    """Sample id -> log-probs of the library's own forward; empty where the first step is not compared."""
    compute: Callable[[], AbstractContextManager[Any]]
    """The precision context of a forward."""
    compute_backward: Callable[[], AbstractContextManager[Any]]
    """The precision context of a backward."""
    saved_dtype: torch.dtype
    """The dtype that the final weights are saved in: that of the checkpoint they came from."""
    decisions: list[Decision]


class Plan(NamedTuple):
    """Which samples each step has, and how many steps there are."""

    source: StepSource
    """The source of steps: fixed data, or roll-outs."""
    num_steps: int
    cursor: Cursor
    """How far the run has come."""
