"""A run, looked at: its parts, each made when a check first asks for it, and a few measurements that checks share.

A part that cannot be made raises ``Unavailable``, which names the check whose question that is: there it is a failure,
with the error's own words; every other check that needs the part is skipped. In a run that is about to train all parts
are there already (``Session.of``).

Nothing is trained and nothing written (tokenised data goes to the cache). Weights, gradients and random generators are
as before when a check is over.

May import run, build and what is below them. Checks import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.attention.select import Observation, observe
from taut.checks.owned import Unavailable, owned_by
from taut.checks.samples import (
    LOGPS,
    SCORES,
    Words,
    around,
    as_question,
    backwards,
    by_sample,
    ending,
    pictured,
    shortest,
    whole,
)
from taut.data.batching import Rows
from taut.data.dataset import Dataset, read_rows
from taut.data.images import is_same_input
from taut.data.messages import Row
from taut.data.packing import ALONE, PackPolicy, pack
from taut.data.render import Renderer
from taut.data.schema import best_row
from taut.data.stop_tokens import StopSet
from taut.models import architecture
from taut.models.scorer import Scorer
from taut.rl.advantages import PolicyCredit
from taut.rl.dry_run import rehearsed
from taut.rl.online import Online
from taut.run.auxiliary_models import Loaded
from taut.run.config import (
    Decision,
    Inputs,
    Language,
    Run,
    inputs_of,
    load_language,
    load_split,
    load_stops,
    rows_of,
)
from taut.run.setup import Adapted, Built, adapt, assemble, build_method, load
from taut.train.distributed import Ranks
from taut.train.monitors import TOLERANCE
from taut.train.trainer import Job
from taut.types import Packed, Sample, Tree, Wants

NUM_ROWS = 64
"""Rows that checks of the template look at."""
PROBE_TOKENS = 64
"""Tokens of each of the two samples that are perturbed."""
SHORT_TOKENS = 16
"""Tokens of the sample that is looked at where a few are enough."""
BATCH_TOKENS = 192
"""Tokens of the samples that a forward and a backward are made of."""
LIMITS = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 0.5}
"""Largest difference of a log-prob (nats) that is rounding, by compute dtype, between two ways through the head."""
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The same between two micro-batches of one shape: a row of a product does not depend on what other rows hold."""

T = TypeVar("T")


class Session:
    """A run and all that checks ask of it."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.run, self.ranks = run, ranks
        self.broken: dict[str, Unavailable] = {}
        self._measured: dict[Callable[[Session], Any], Any] = {}

    @classmethod
    def of(cls, built: Built) -> Session:
        """A run that is ready to train."""
        session, inputs = cls(built.run, built.job.ranks), built.inputs
        renderer, config = inputs.renderer, inputs.config
        vars(session).update(
            language=Language(config, inputs.tokenizer, inputs.new_ids, renderer),
            stops=inputs.stops,
            train=inputs.train,
            eval=inputs.eval,
            inputs=inputs,
            loaded=built.loaded,
            built=built,
        )
        return session

    # -- tokenizer, template, data

    @cached_property
    @owned_by("model.loads")
    def language(self) -> Language:
        """Configuration, tokenizer and template."""
        return load_language(self.run)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.language.tokenizer

    @cached_property
    @owned_by("stop.set")
    def stops(self) -> StopSet:
        """What ends an answer."""
        return load_stops(self.run, self.language)

    @property
    def renderer(self) -> Renderer:
        """With the run's template; refuses what the stop set forbids."""
        return self.language.renderer.stopping_at(self.stops.ids)

    @cached_property
    @owned_by("data.rows")
    def rows(self) -> list[Row]:
        """The first rows of the training data, not rendered; where answers are judged, the best of each; where they are
        to be generated, without any.
        """
        kind = self.run.objective.kind
        rows = [
            best_row(it) for it in islice(read_rows(self.run.data, "train", kind=kind), NUM_ROWS)
        ]
        return [as_question(row) for row in rows] if self.is_generated else rows

    @cached_property
    @owned_by("data.rows")
    def train(self) -> Dataset:
        return self._dataset("train")

    @cached_property
    @owned_by("data.rows")
    def eval(self) -> Dataset | None:
        return self._dataset("eval") if self.run.data.eval else None

    def _dataset(self, split: Any) -> Dataset:
        return load_split(self.run, split, self.renderer, self.language)

    @property
    def data(self) -> list[tuple[str, Dataset]]:
        """Name and samples of each split there is."""
        return [
            (name, data)
            for name, data in (("train", self.train), ("eval", self.eval))
            if data is not None
        ]

    @cached_property
    def inputs(self) -> Inputs:
        return inputs_of(self.run, self.language, self.stops, self.train, self.eval)

    # -- model

    @cached_property
    @owned_by("model.loads")
    def loaded(self) -> Loaded:
        """The model with the attention and dtype asked for, before adapters."""
        return load(self.run, self.inputs, self.ranks)

    @cached_property
    @owned_by("model.trains")
    def adapted(self) -> Adapted:
        """The model with adapters and added tokens, without what is frozen."""
        return adapt(self.run, self.inputs, self.loaded.model)

    @cached_property
    @owned_by("model.trains")
    def built(self) -> Built:
        """All of it, ready to train."""
        adapted = self.adapted
        plan = build_method(self.run, self.train)
        return assemble(self.run, self.inputs, plan, self.ranks, self.loaded, adapted, trains=False)

    @property
    def adapted_decisions(self) -> list[Decision]:
        """What was decided about adapters, rows that train, freezing, packing and sharing."""
        before = {decision.name for decision in (*self.inputs.decisions, *self.loaded.decisions)}
        return [decision for decision in self.built.decisions if decision.name not in before]

    @property
    def job(self) -> Job:
        return self.built.job

    @property
    def scorer(self) -> Scorer:
        scorer = self.job.scorer
        assert isinstance(scorer, Scorer)
        return scorer

    @property
    def model(self) -> PreTrainedModel:
        """The library's model, inside adapters if there are any."""
        return architecture.unwrap(self.scorer.model)

    @property
    def is_generated(self) -> bool:
        """Whether the model generates what it learns: then data are prompts."""
        return self.run.objective.online is not None

    @property
    def is_policy_gradient(self) -> bool:
        """Whether the loss is no measure of what is learned, and only its gradient means something."""
        method = self.job.method
        return isinstance(method, Online) and isinstance(method.credit, PolicyCredit)

    @property
    def is_scalar(self) -> bool:
        """Whether a scalar head trains, and there is no other: the run makes a reward model."""
        return self.run.objective.head is not None

    @property
    def says(self) -> Words:
        """What the model says of a token: what ``numbers`` gives."""
        return SCORES if self.is_scalar else LOGPS

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.loaded.dtype.dtype

    @property
    def limit(self) -> float:
        """Largest difference of a log-prob (nats) that is rounding."""
        return LIMITS[self.dtype]

    @property
    def tolerance(self) -> float:
        """Largest ``drift`` that is rounding."""
        return TOLERANCE[self.dtype]

    @property
    def exact(self) -> float:
        """The same for two micro-batches of one shape, at tokens whose own path is equal."""
        return EXACT[self.dtype]

    # -- what checks share

    def once(self, measure: Callable[[Session], T]) -> T:
        """What ``measure`` gives for this session, measured when it is first asked for: a group's own shared part."""
        if measure not in self._measured:
            self._measured[measure] = measure(self)
        found: T = self._measured[measure]
        return found

    @cached_property
    def pictured(self) -> list[int]:
        """Which training samples have pictures: of the first of them the shortest first."""
        return pictured(self.train, NUM_ROWS)

    @property
    def looked_at(self) -> list[int]:
        """Which training samples are looked at: two with pictures, where there are such, before the first of all."""
        first = range(min(len(self.train), NUM_ROWS))
        return list(dict.fromkeys([*self.pictured[:2], *first]))

    @cached_property
    def pair(self) -> tuple[Sample, Sample]:
        """Two real samples that differ, PROBE_TOKENS of each or a little more, every token but the first a target."""
        found = (whole(self.train[index], PROBE_TOKENS) for index in self.looked_at)
        first = next(found)
        other = next((one for one in found if not is_same_input(one, first)), None)
        return first, other or backwards(first)  # one sample, or many times the same

    @property
    def short(self) -> Sample:
        """The first tokens of the pair's first sample, for what any few tokens show."""
        return whole(self.pair[0], SHORT_TOKENS)

    @cached_property
    def trees(self) -> list[Tree]:
        """The batch as the method would prepare it."""
        method = self.job.method
        if isinstance(method, Online):
            return rehearsed(self.job, method.credit, method.crew.roles, self.batch)
        if not self.run.objective.are_compared:
            unique = {sample.id: sample for sample in self.batch}
            return self._rows.trees_of([(sample,) for sample in unique.values()])
        return self._rows.trees_of(self._compared())

    @property
    def _rows(self) -> Rows:
        return rows_of(self.run, self.train)

    def _compared(self) -> list[tuple[Sample, ...]]:
        """The shortest of the first rows whose answers are compared, long ones cut around where the answers begin."""
        rows = self._rows
        first = range(min(len(rows), NUM_ROWS))
        pictured = np.searchsorted(self.train.rows, self.pictured[:2], side="right") - 1
        chosen = [rows.samples(index) for index in dict.fromkeys([*pictured.tolist(), *first])]
        return shortest([around(row, BATCH_TOKENS // 2) for row in chosen], BATCH_TOKENS)

    @cached_property
    def batch(self) -> list[Sample]:
        """Real samples with their own targets, the shortest of the first, BATCH_TOKENS in all or a little more."""
        chosen = self._compared() if self.run.objective.are_compared else self._apart()
        return [sample for some in chosen for sample in some]

    def _apart(self) -> list[tuple[Sample, ...]]:
        found = (self.train[index] for index in self.looked_at)
        return shortest([(ending(one, BATCH_TOKENS // 2),) for one in found], BATCH_TOKENS)

    def numbers(
        self, samples: Sequence[Sample], policy: PackPolicy = ALONE, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Sample id -> the log-probs of its targets, of a reward model its scores where it is read, in one packed
        forward, without gradient and without noise.
        """
        packed = pack(list(samples), policy)
        with self.quiet():
            values = self.said(packed, temperature).cpu()
        return by_sample(packed, values, packed.row_R if self.is_scalar else packed.row_N)

    def said(self, packed: Packed, temperature: float = 1.0) -> Tensor:
        """The same of a micro-batch, [N] or [R], in the mode and precision that are on."""
        if not self.is_scalar:
            logp_N: Tensor = self.scorer(packed, wants=Wants(temperature=temperature)).logp_N
            return logp_N
        scalar_R: Tensor = self.scorer(packed, wants=Wants(logp=False, scalar=True)).scalar_R
        return scalar_R

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Evaluation mode, no gradient, the run's precision."""
        was_training = self.scorer.training
        self.scorer.eval()
        try:
            with torch.no_grad(), self.job.compute():
                yield
        finally:
            self.scorer.train(was_training)

    @property
    def alone(self) -> dict[str, Tensor]:
        """The numbers of the pair, each alone."""
        return self._alone[0]

    @cached_property
    def packed(self) -> dict[str, Tensor]:
        """The same, packed."""
        return self.numbers(self.pair)

    @property
    def observed(self) -> Observation:
        """What the attention layers call, and the masks the library would have built, for the first of the pair."""
        return self._alone[1]

    @cached_property
    def _alone(self) -> tuple[dict[str, Tensor], Observation]:
        first, second = self.pair
        with observe() as seen:
            found = self.numbers([first])
        return {**found, **self.numbers([second])}, seen
