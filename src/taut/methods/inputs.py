"""The values that a run consists of before there is a trainer: the tokenizer and data (``Inputs``), the models
(``Models``, of which ``Loaded`` is the first part), the order of its steps (``Plan``), and an engine on the models.

``run.inputs`` and ``run.setup`` make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision
from taut.data.batching import Budget
from taut.data.dataset import Dataset
from taut.data.order import Cursor
from taut.data.packing import PackPolicy
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import StopSet
from taut.inference.local import LocalEngine
from taut.models.attention_backends import Chosen
from taut.models.load import context_length
from taut.models.noise import Noise
from taut.models.precision import ChosenDtype
from taut.models.quantized.frozen_storage import Storage
from taut.models.scorer import Scorer
from taut.train.distributed import Ranks
from taut.train.trainer import Role, StepSource

if TYPE_CHECKING:
    from taut.methods.reference import Start


class Language(NamedTuple):
    """The conversion between text and ids."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    new_ids: list[int]
    """Ids of the tokens that were added."""
    renderer: Renderer

    @property
    def num_rows(self) -> int:
        """Rows of the embedding, including added tokens."""
        return _num_rows(self.config, self.new_ids)


def _num_rows(config: PreTrainedConfig, new_ids: Sequence[int]) -> int:
    return max([int(config.get_text_config().vocab_size), *(index + 1 for index in new_ids)])


@dataclass(frozen=True)
class Inputs:
    """Tokenizer and data: the first half of a run."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    train: Dataset
    eval: Dataset | None
    max_length: int
    new_ids: list[int]
    stops: StopSet
    """Tokens that end an answer. Derived here, so that a template without an end is refused before training."""
    decisions: list[Decision]
    grows: int = 0
    """Tokens that generation may add to a prompt; 0 where nothing is generated."""

    def token(self, index: int) -> str:
        """The token of an id."""
        return str(self.tokenizer.convert_ids_to_tokens(index))

    @property
    def num_rows(self) -> int:
        """Rows of the embedding, including added tokens."""
        return _num_rows(self.config, self.new_ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sample, including held-out samples."""
        each = [data.longest for data in (self.train, self.eval) if data is not None]
        most = max(each) + self.grows
        context = context_length(self.config) if self.grows else None
        return most if context is None else min(most, context)


class Loaded(NamedTuple):
    """The model from disk, with the attention and the compute dtype of the run."""

    model: PreTrainedModel
    dtype: ChosenDtype
    attention: Chosen
    one_sample: str | None
    """The reason why this model has to run one sample at a time; None if it packs."""
    decisions: list[Decision]
    storage: Storage | None = None
    """Storage of the weights that do not train; None if they are stored like the weights that train."""


@dataclass(frozen=True)
class Models:
    """The policy with its adapters and the auxiliary models, sharded: the second half of a run."""

    scorer: Scorer
    """The policy, with a teacher, a critic and a reference that is updated: the root of forwards and checkpoints."""
    loaded: Loaded
    """The policy as it was loaded, with the dtype and attention of all models."""
    roles: Sequence[Role]
    """Other models whose outputs the loss reads: a reference."""
    noise: Noise | None
    policy: PackPolicy
    """The rule by which samples share prefixes."""
    budget: Budget
    """The division of a step among ranks and micro-batches."""
    library_logps: Mapping[str, Tensor]
    """Sample id -> logprobs of the library's own forward; empty where the first step is not compared."""
    compute: Callable[[], AbstractContextManager[Any]]
    """The precision context of a forward."""
    compute_backward: Callable[[], AbstractContextManager[Any]]
    """The precision context of a backward."""
    saved_dtype: torch.dtype
    """The dtype in which the final weights are saved: the dtype of the checkpoint they came from."""
    decisions: list[Decision]
    teachers: Mapping[str, Scorer] = field(default_factory=dict)
    """Models that score completions before they are trained on, by name."""
    self_teacher: Start | None = None
    """The copy of the policy that is its own teacher."""


class Plan(NamedTuple):
    """The samples of each step, and the number of steps."""

    source: StepSource
    """The source of steps: fixed data, or rollouts."""
    num_steps: int
    cursor: Cursor
    """The position of a resumed run."""


def engine_of(inputs: Inputs, models: Models, ranks: Ranks) -> Callable[..., LocalEngine]:
    """A function that makes an engine on the weights in training."""
    return partial(
        LocalEngine,
        models.scorer,
        inputs.tokenizer,
        inputs.stops.ids,
        context=context_length(inputs.config),
        compute=models.compute,
        ranks=ranks,
    )
