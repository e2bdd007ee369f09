"""A run for checks: its parts, each made when a check first asks for it, and the samples that checks measure.

A part that cannot be made raises ``Unavailable``, which names the check that owns the part. That check fails with the
error's own words; every other check that needs the part is skipped. In a run that is about to train all parts exist
already (``Session.of``).

Nothing is trained and nothing is written (tokenized data goes to the cache). After each check weights, gradients and
random generators are as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, wraps
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.checks.registry import Part
from taut.config import Decision
from taut.data.batching import Rows
from taut.data.dataset import Dataset, read_rows
from taut.data.packing import ALONE, PackPolicy, pack
from taut.data.render.images import is_same_input
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import StopSet
from taut.data.rows.messages import Conversation, Row
from taut.data.rows.schema import best_row
from taut.data.stream import StreamDataset
from taut.errors import TautError
from taut.methods.inputs import Inputs, Language, Loaded
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.attention_backends import Observation, observe
from taut.models.save import serving_tokenizer
from taut.models.scorer import Scorer, evaluating
from taut.plan.memory_options import decide_recomputation
from taut.rl.online import Online, dry_run
from taut.run.inputs import inputs_of, load_language, load_stops
from taut.run.setup import Built, adapt, build_trainer, decide_cadences, join_models, load
from taut.train.distributed import Ranks
from taut.train.monitors import TOLERANCE
from taut.train.trainer import Trainer
from taut.types import IntArray, Media, Packed, Sample, Tree, Wants

NUM_ROWS = 64
"""Number of rows that checks of the template examine."""
PROBE_TOKENS = 64
"""Tokens of each of the two samples that are perturbed."""
BATCH_TOKENS = 192
"""Tokens of the samples in a forward and a backward."""
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest rounding difference of a logprob (nats), by compute dtype, between two micro-batches of one shape: a row of a
product does not depend on what other rows hold.
"""
GENERATED = "what is learned is generated"
"""Reason why a run that generates is not asked about the answers in its data."""

T = TypeVar("T")


class Quantity(NamedTuple):
    """The quantity that the model computes for a token, in words."""

    one: str
    many: str
    unit: str


LOGPS = Quantity("a logprob", "logprobs", "nats")
SCORES = Quantity("a score", "scores", "points")


class Unavailable(Exception):
    """A part of the session that cannot be made."""

    def __init__(self, part: str, owner: str, error: TautError) -> None:
        super().__init__(str(error))
        self.part, self.owner, self.error = part, owner, error


def owned_by(owner: str) -> Callable[[Callable[[Any], T]], Callable[[Any], T]]:
    """Mark a part of the session: an error while it is made is the failure of the check ``owner``."""

    def mark(make: Callable[[Any], T]) -> Callable[[Any], T]:
        @wraps(make)
        def made(session: Any) -> T:
            part = make.__name__
            if part in session.unavailable:
                raise session.unavailable[part]
            try:
                return make(session)
            except TautError as error:
                session.unavailable[part] = Unavailable(part, owner, error)
                raise session.unavailable[part] from error

        return made

    return mark


def once(measure: Callable[[Any], T]) -> Callable[[Any], T]:
    """Mark a measurement that several checks share: it is taken once a session."""

    @wraps(measure)
    def measured(session: Any) -> T:
        if measure not in session.measurements:
            session.measurements[measure] = measure(session)
        value: T = session.measurements[measure]
        return value

    return measured


class Session:
    """A run and all that checks ask of it."""

    def __init__(self, run: RunConfig, ranks: Ranks) -> None:
        self.run, self.ranks = run, ranks
        self.part: Part = "quick"
        self.unavailable: dict[str, Unavailable] = {}
        self.measurements: dict[Callable[[Session], Any], Any] = {}

    @classmethod
    def of(cls, built: Built) -> Session:
        """A run that is ready to train."""
        session, inputs = cls(built.run, built.trainer.ranks), built.inputs
        renderer, config = inputs.renderer, inputs.config
        vars(session).update(
            language=Language(config, inputs.tokenizer, inputs.new_ids, renderer),
            stops=inputs.stops,
            train=inputs.train,
            eval=inputs.eval,
            inputs=inputs,
            loaded=built.models.loaded,
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
        """The tokens that end an answer."""
        return load_stops(self.run, self.language)

    @cached_property
    def served_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer as it will be saved: with the template in use, eos the turn end, pad another token if there is
        one.

        Not to be changed.
        """
        template = self.language.renderer.template.template
        return serving_tokenizer(
            self.tokenizer, self.stops.ids, template, has_scalar=self.is_scalar
        )

    @property
    def renderer(self) -> Renderer:
        """Renderer with the run's template; it refuses what the stop set forbids."""
        return self.language.renderer.stopping_at(self.stops.ids)

    @cached_property
    @owned_by("data.rows")
    def rows(self) -> list[Row]:
        """The first rows of the training data, not rendered. Of answers that are compared, the best one; if the run
        generates its answers, prompts alone.
        """
        if self.run.data.is_stream:
            assert isinstance(self.train, StreamDataset)
            read = self.train.stream.first_rows()
        else:
            read = read_rows(self.run.data, "train", kind=self.run.row_kind)
        rows = [best_row(row) for row in islice(read, NUM_ROWS)]
        for index, row in enumerate(rows):
            if self.is_generated and isinstance(row, Conversation):
                is_answered = row.messages[-1]["role"] == "assistant"
                messages = row.messages[:-1] if is_answered else row.messages
                rows[index] = replace(row, messages=messages, learned=(), excluded=())
        return rows

    @cached_property
    @owned_by("rollout.opens")
    def environment_tools(self) -> object:
        """The function that puts the tools of environments into prompts."""
        return getattr(self.run, "tools_of", None)

    @cached_property
    @owned_by("data.rows")
    def train(self) -> Dataset:
        _ = self.environment_tools
        return self.run.load_data("train", self.renderer, self.language)

    @cached_property
    @owned_by("data.rows")
    def eval(self) -> Dataset | None:
        if not self.run.data.eval:
            return None
        return self.run.load_data("eval", self.renderer, self.language)

    @property
    def data(self) -> list[tuple[str, Dataset]]:
        """Name and samples of each split."""
        splits = [("train", self.train), ("eval", self.eval)]
        return [(name, data) for name, data in splits if data is not None]

    @cached_property
    def inputs(self) -> Inputs:
        inputs = inputs_of(self.run, self.language, self.stops, self.train, self.eval)
        self.run, decisions = decide_recomputation(self.run, inputs, self.ranks)
        self.run, cadences = decide_cadences(self.run)
        return replace(inputs, decisions=[*inputs.decisions, *decisions, *cadences])

    # -- model

    @cached_property
    @owned_by("model.loads")
    def loaded(self) -> Loaded:
        """The model with the attention and dtype asked for, before adapters."""
        return load(self.run, self.inputs, self.ranks)

    @cached_property
    @owned_by("model.trains")
    def adapted(self) -> tuple[nn.Module, list[Decision]]:
        """The model with adapters and added tokens, without what is frozen."""
        return adapt(self.run, self.inputs, self.loaded.model)

    @cached_property
    @owned_by("model.trains")
    def built(self) -> Built:
        """The whole run, ready to train."""
        run, inputs = self.run, self.inputs
        models = join_models(run, inputs, self.ranks, self.loaded, self.adapted)
        trainer = build_trainer(run, inputs, models, run.plan(self.train), self.ranks)
        return Built(run, inputs, models, trainer)

    @property
    def trainer(self) -> Trainer:
        return self.built.trainer

    @property
    def scorer(self) -> Scorer:
        scorer = self.trainer.scorer
        assert isinstance(scorer, Scorer)
        return scorer

    @property
    def model(self) -> PreTrainedModel:
        """The library's model, inside adapters if there are any."""
        return architecture.unwrap(self.scorer.model)

    @property
    def is_generated(self) -> bool:
        """Whether the run trains on answers that the model generates: then the data are prompts."""
        return self.run.generates

    @property
    def is_policy_gradient(self) -> bool:
        """Whether the loss does not measure what is learned, so that only its gradient has a meaning."""
        return not self.run.loss().is_cost

    @property
    def is_scalar(self) -> bool:
        """Whether a scalar head trains, and no other: the run makes a reward model."""
        return self.run.has_scalar_head

    @property
    def quantity(self) -> Quantity:
        """The quantity that ``numbers`` gives for a token."""
        return SCORES if self.is_scalar else LOGPS

    @property
    def unit_per_token(self) -> str:
        return f"{self.quantity.unit} a token"

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.loaded.dtype.dtype

    @property
    def tolerance(self) -> float:
        """Largest ``drift`` that is rounding."""
        return TOLERANCE[self.dtype]

    @property
    def exact(self) -> float:
        """Largest difference that is rounding, between two micro-batches of one shape."""
        return EXACT[self.dtype]

    # -- samples

    @cached_property
    def with_pictures(self) -> list[int]:
        """The first NUM_ROWS training samples that have pictures, the shortest first."""
        indices: list[int] = []
        for own, shard in self.train.local_shards():
            arrays = shard.arrays
            if "media.offsets" in arrays:
                has_picture = np.diff(arrays["media.offsets"]) > 0
                room = NUM_ROWS - len(indices)
                indices += (np.flatnonzero(has_picture)[:room] + own.start).tolist()
        return sorted(indices, key=self.train.length)

    @property
    def first_samples(self) -> list[int]:
        """Training samples that checks look at: two with pictures, if there are any, then the first of all."""
        first = range(min(len(self.train), NUM_ROWS))
        return list(dict.fromkeys([*self.with_pictures[:2], *first]))

    @cached_property
    def pair(self) -> tuple[Sample, Sample]:
        """Two real samples that differ, PROBE_TOKENS of each or a little more, every token but the first a target."""
        samples = (beginning(self.train[index], PROBE_TOKENS) for index in self.first_samples)
        first = next(samples)
        other = next((sample for sample in samples if not is_same_input(sample, first)), None)
        if other is None:  # one sample, or the same one many times: its words in reverse
            ids_T, is_text_T = first.ids_T.copy(), is_text(first)
            ids_T[is_text_T] = ids_T[is_text_T][::-1]
            other = replace(first, id=f"{first.id} backwards", ids_T=ids_T)
        return first, other

    @property
    def short_sample(self) -> Sample:
        """The first tokens of the pair's first sample."""
        return beginning(self.pair[0], 16)

    def answers(self, row: int) -> list[Sample]:
        """The samples of a training row; of answers that are compared the best one is last."""
        own = self.train.row(row)
        samples = self.train[own.start : own.stop]
        return sorted(samples, key=lambda sample: sample.values.get("preference", 0.0))

    @property
    def _rows(self) -> Rows:
        return self.run.rows_of(self.train)

    @cached_property
    def _batch_rows(self) -> list[tuple[Sample, ...]]:
        """The shortest of the first samples, or rows of compared answers, BATCH_TOKENS in all or a little more."""
        most = BATCH_TOKENS // 2
        if not self.run.compares_answers:
            endings = ((ending(self.train[index], most),) for index in self.first_samples)
            return shortest(endings, BATCH_TOKENS)
        rows = self._rows
        first = range(min(len(rows), NUM_ROWS))
        pictured = map(self.train.row_of, self.with_pictures[:2])
        chosen = [rows.samples(index) for index in dict.fromkeys([*pictured, *first])]
        return shortest([around_answers(row, most) for row in chosen], BATCH_TOKENS)

    @cached_property
    def batch(self) -> list[Sample]:
        """Real samples with their own targets: what the checks' forward and backward are made of."""
        return [sample for row in self._batch_rows for sample in row]

    @cached_property
    def trees(self) -> list[Tree]:
        """The batch as the method would prepare it."""
        source = self.trainer.source
        if isinstance(source, Online):
            return dry_run(source, self.trainer, self.batch)
        if self.run.compares_answers:
            return self._rows.trees_of(self._batch_rows)
        unique = {sample.id: sample for sample in self.batch}
        return self._rows.trees_of([(sample,) for sample in unique.values()])

    @property
    def tree_samples(self) -> list[Sample]:
        return [sample for tree in self.trees for sample in tree.samples]

    # -- what the model computes

    def numbers(
        self, samples: Sequence[Sample], policy: PackPolicy = ALONE, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Sample id -> logprobs of its targets (for a reward model: scores at its reads), from one packed forward,
        without gradient and noise.
        """
        packed = pack(list(samples), policy)
        with self.inference():
            values = self.forward(packed, temperature).cpu()
        row_of = packed.row_R if self.is_scalar else packed.row_N
        return {name: values[row_of == row] for row, name in enumerate(packed.sample_ids)}

    def forward(self, packed: Packed, temperature: float = 1.0) -> Tensor:
        """Run a micro-batch in the current mode and precision: [N] logprobs or [R] scores."""
        if not self.is_scalar:
            logp_N: Tensor = self.scorer(packed, wants=Wants(temperature=temperature)).logp_N
            return logp_N
        scalar_R: Tensor = self.scorer(packed, wants=Wants(logp=False, scalar=True)).scalar_R
        return scalar_R

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode, no gradient, the run's precision."""
        with evaluating(self.scorer), torch.no_grad(), self.trainer.compute():
            yield

    @cached_property
    def packed(self) -> dict[str, Tensor]:
        """The numbers of the pair, packed."""
        return self.numbers(self.pair)

    @property
    def alone(self) -> dict[str, Tensor]:
        """The numbers of the pair, each alone."""
        return self._alone[0]

    @property
    def observed(self) -> Observation:
        """Attention calls of the layers, and masks the library would have built, for the first sample of the pair."""
        return self._alone[1]

    @cached_property
    def _alone(self) -> tuple[dict[str, Tensor], Observation]:
        first, second = self.pair
        with observe() as observation:
            numbers = self.numbers([first])
        return {**numbers, **self.numbers([second])}, observation


# -- parts of samples, small enough for a check


def num_tokens(samples: Iterable[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


def is_text(sample: Sample) -> NDArray[np.bool_]:
    """[T] Which tokens are not part of a picture."""
    is_text_T = np.ones(sample.num_tokens, dtype=bool)
    for media in sample.media:
        is_text_T[media.start : media.stop] = False
    return is_text_T


def beginning(sample: Sample, most: int) -> Sample:
    """The first tokens of a sample, or those around its first picture, every one but the first a target.

    A scalar head is read where they are predicted, so that a check measures both kinds of model in the same way. A
    picture is kept whole or left out; its placeholders are no targets.
    """
    start, stop = 0, max(2, most)
    if sample.media:
        start = max(0, sample.media[0].start - stop // 2)
        stop = max(start + stop, sample.media[0].stop + 8)
    ids_T, media = cut_out(sample, start, stop)
    if ids_T.size == 1:
        ids_T = np.repeat(ids_T, 2)
    return all_targets(sample.id, ids_T, media)


def all_targets(name: str, ids_T: IntArray, media: tuple[Media, ...]) -> Sample:
    """A sample of which every token of text but the first is a target; a scalar head is read where it is predicted."""
    sample = Sample(name, ids_T, np.empty(0, dtype=np.int64), np.empty(0), media)
    at_N = np.flatnonzero(is_text(sample)[1:]) + 1
    return replace(sample, target_at_N=at_N, weight_N=np.ones(at_N.size), read_at_R=at_N - 1)


def cut_out(sample: Sample, start: int, stop: int) -> tuple[IntArray, tuple[Media, ...]]:
    """The ids from ``start`` to ``stop``, or a little more where that would cut a picture, and the pictures in them."""
    start, stop = _around_pictures(sample, max(0, start), stop)
    return sample.ids_T[start:stop], _media_between(sample, start, stop)


def ending(sample: Sample, most: int) -> Sample:
    """A sample's last tokens up to its last target, if it is longer than ``most``. Values and reads are kept; a sample
    whose reads all lie before the cut is left whole.
    """
    if sample.num_tokens <= most:
        return sample
    stop = max(int(sample.target_at_N[-1]) + 1, most)
    start, _ = _around_pictures(sample, from_picture(sample, stop - most, stop), stop)
    cut = _between(sample, start, stop, sample.target_at_N > start)
    if sample.read_at_R is None:
        return cut
    is_read = (sample.read_at_R >= start) & (sample.read_at_R < stop)
    if not is_read.any():
        return sample
    values = {name: value[is_read] for name, value in sample.read_values.items()}
    return replace(cut, read_at_R=sample.read_at_R[is_read] - start, read_values=values)


def around_answers(answers: Sequence[Sample], most: int) -> tuple[Sample, ...]:
    """Answers to one prompt, each cut to the end of the prompt and its own beginning, if they have more than ``most``
    tokens together. Left whole if too little of them would differ.
    """
    if num_tokens(answers) <= most:
        return tuple(answers)
    kept = max(2, most // (2 * len(answers)))
    cut = []
    for answer in answers:
        first = int(answer.target_at_N[0])
        start = from_picture(answer, max(0, first - kept), first)
        start, stop = _around_pictures(answer, start, first + kept)
        cut.append(_between(answer, start, stop, answer.target_at_N < stop))
    num_different = [len({sample.ids_T.tobytes() for sample in some}) for some in (cut, answers)]
    return tuple(cut if num_different[0] == num_different[1] else answers)


def shortest(rows: Iterable[tuple[Sample, ...]], most: int) -> list[tuple[Sample, ...]]:
    """The shortest rows, ``most`` tokens in all or a little more; two with pictures come before the others."""
    ordered = sorted(rows, key=num_tokens)
    pictured = [row for row in ordered if any(sample.media for sample in row)][:2]
    chosen: list[tuple[Sample, ...]] = []
    left = most
    for row in dict.fromkeys([*pictured, *ordered]):
        left -= num_tokens(row)
        if chosen and left < 0:
            break
        chosen.append(row)
    return chosen


def _between(sample: Sample, start: int, stop: int, is_kept: NDArray[np.bool_]) -> Sample:
    """A sample's tokens from ``start`` to ``stop`` with the targets that are kept."""
    return replace(
        sample,
        ids_T=sample.ids_T[start:stop],
        target_at_N=sample.target_at_N[is_kept] - start,
        weight_N=sample.weight_N[is_kept],
        media=_media_between(sample, start, stop),
        streams={name: value[is_kept] for name, value in sample.streams.items()},
    )


def _around_pictures(sample: Sample, start: int, stop: int) -> tuple[int, int]:
    """The bounds of a cut, moved out of the pictures they fall into; with a token after the last picture."""
    for media in sample.media:
        if media.start < start < media.stop:
            start = media.start
        if media.start < stop <= media.stop:
            stop = min(media.stop + 1, sample.num_tokens)
    return start, stop


def from_picture(sample: Sample, start: int, stop: int) -> int:
    """``start``, or the beginning of the last picture before ``stop`` if that is earlier: the answer is about it."""
    before = [media.start for media in sample.media if media.stop <= stop]
    return min(start, max(0, before[-1] - 1)) if before else start


def _media_between(sample: Sample, start: int, stop: int) -> tuple[Media, ...]:
    """The pictures of a cut; each is in it as a whole or not at all."""
    return tuple(
        replace(media, start=media.start - start, stop=media.stop - start)
        for media in sample.media
        if start <= media.start and media.stop <= stop
    )
