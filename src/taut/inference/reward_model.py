"""A reward model in this process: samples in, the numbers of its scalar head out.

Samples are packed without padding; prefixes that samples share are computed once, within a row and across rows. A
forward takes about ``tokens_per_batch`` tokens. A sample's number does not depend on the samples it is scored with, to
rounding; the model passes the same start-up checks as in training (models/self_test.py).

Answers are rendered as for training a reward model (data/render.py): they end with the token at which a server stops,
and are read there. A truncated answer is therefore read as if it had ended; the reward ``stop`` tells them apart.

One thread owns the model, so that several callers can share it: waiting requests are rendered and scored together, up
to the token budget. A request that cannot be scored fails alone. If the thread itself fails, all waiting and later
requests fail with its error: nothing waits for ever.

``open_rater`` makes reward models members of a panel of rewards. Answers to one prompt share its computation. An answer
that cannot be rendered, or is too long for the model, is an error of that answer; a number that is not finite ends the
run, because the model itself is then broken.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from transformers import PreTrainedConfig

from taut.config import ComputeDtype, Decision, configclass, from_mapping, to_dict
from taut.data.cache import default_directory
from taut.data.chat_template import checked
from taut.data.messages import Completion, Conversation, images_of, read_conversation, text_of
from taut.data.packing import ALONE, PackPolicy, common_prefix, pack, prefix_order
from taut.data.render import Renderer, render_any
from taut.data.schema import Answers, AnyRow, Stepwise
from taut.errors import DataError, EngineError, NonFiniteError, OutOfMemory, TautError
from taut.inference.open import PROVED, inference_context, one_device, read_template
from taut.models import architecture
from taut.models.attention_backends import select
from taut.models.load import context_length, load_config, load_tokenizer
from taut.models.precision import ChosenDtype, resolve_dtype
from taut.models.reward_model import load_reward_model, reward_skeleton
from taut.models.scorer import Scorer
from taut.models.self_test import run_self_test
from taut.rewards import Answered, Score, Verifier
from taut.rewards.panel import Rater
from taut.rewards.verifier import reason
from taut.types import FloatArray, Sample, Wants
from taut.vision.content import ImagesConfig
from taut.vision.image_store import open_image_store

SCALAR = Wants(logp=False, scalar=True)
NONE_T, NONE_N = np.empty(0, dtype=np.int64), np.empty(0)


@configclass
class JudgeUse:
    """Which reward model, and how it is run."""

    model: str
    """Directory (or hub name) of the reward model."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """By default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """auto, reference, varlen or flex."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    images: ImagesConfig = ImagesConfig()
    """Pictures in what is scored."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Tokens computed at a time; a longer sample is computed alone."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Prompt and answer as one text with its special tokens, as it went through a model: tokenised as it is, nothing
    added, and read at its last token."""

    place: str
    text: str


@dataclass(frozen=True, eq=False)
class Judge:
    """A reward model that is ready."""

    scorer: Scorer
    renderer: Renderer
    context: int | None
    """Tokens a sample may have."""
    is_process: bool
    """Whether the head may be read at any token: the model is of the library's token class."""
    tokens_per_batch: int
    one_sample: str | None
    """Why samples are not packed."""
    compute: Callable[[], AbstractContextManager[Any]]
    decisions: tuple[Decision, ...]

    def render(self, rows: Sequence[AnyRow | Rendered]) -> list[list[Sample]]:
        """The samples of each row: of a row of SFT one, which ends with its last answer; of a rendered text one."""
        plain = [row for row in rows if not isinstance(row, Rendered)]
        others = iter(render_any([_answer(row) for row in plain], self.renderer))
        samples = [
            [self._rendered(row)] if isinstance(row, Rendered) else next(others) for row in rows
        ]
        for sample in chain.from_iterable(samples):
            self.require_fits(sample)
        return samples

    def _rendered(self, row: Rendered) -> Sample:
        self.renderer.template.pictures.require_plain(row.text, row.place)
        text = checked(row.text, row.place, is_rendering=True)
        ids = self.renderer.template.encode([text])[text]
        if not ids:
            raise DataError(f"{row.place}: the text has no token; expected at least one")
        return Sample(row.place, np.asarray(ids, dtype=np.int64), NONE_T, NONE_N)

    def require_fits(self, sample: Sample) -> None:
        """Raise DataError for a sample longer than the model was made for."""
        if self.context is not None and sample.num_tokens > self.context:
            raise DataError(
                f"{sample.id}: {sample.num_tokens} tokens; expected at most {self.context}, what the model was made "
                "for; shorten it"
            )

    def scores(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The head's number at each read of each sample (its last token, where it names none), [R] each."""
        found: list[FloatArray] = [NONE_N] * len(samples)
        for batch in self._batches(samples):
            for index, score_R in zip(
                batch, self._forward([samples[i] for i in batch]), strict=True
            ):
                found[index] = score_R
        return found

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Samples that begin alike are neighbours, and as many together as the budget allows."""
        batch: list[int] = []
        num_tokens = 0
        for index in prefix_order(samples):
            size = samples[index].num_tokens
            own = size - common_prefix(samples[batch[-1]], samples[index]) if batch else size
            if batch and (self.one_sample or num_tokens + own > self.tokens_per_batch):
                yield batch
                batch, num_tokens, own = [], 0, size
            batch.append(index)
            num_tokens += own
        if batch:
            yield batch

    def _forward(self, samples: Sequence[Sample]) -> list[FloatArray]:
        numbered = [_bare(sample, number) for number, sample in enumerate(samples)]
        packed = pack(numbered, ALONE if self.one_sample else PackPolicy())
        try:
            with torch.no_grad(), self.compute():
                scalar_R = self.scorer(packed, wants=SCALAR).scalar_R
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{packed.num_tokens} tokens do not fit in the memory of {self.scorer.device}; expected fewer at a "
                f"time; set tokens_per_batch below {min(self.tokens_per_batch, packed.num_tokens)}"
            ) from error
        values_R = scalar_R.double().cpu().numpy()
        row_R = packed.row_R.numpy()
        by_number = {
            int(name): values_R[row_R == row] for row, name in enumerate(packed.sample_ids)
        }
        for number, sample in enumerate(samples):
            if not np.isfinite(by_number[number]).all():
                raise NonFiniteError(
                    f"{sample.id}: the model's score is {_first_bad(by_number[number])}; expected a number; the model "
                    "is broken, or dtype is too narrow for it"
                )
        return [by_number[number] for number in range(len(samples))]


def open_judge(use: JudgeUse, directory: Path | None = None) -> Judge:
    """The reward model that ``use`` names, loaded and proved. ``directory``: for copies of pictures; by default the
    cache's. Raises TautError where it cannot be had as asked.
    """
    config = load_config(use.model, use.trust_remote_code)
    skeleton = reward_skeleton(use.model, config, None, use.trust_remote_code)
    tokenizer = load_tokenizer(use.model, use.trust_remote_code)
    image_store = open_image_store(
        use.model,
        config,
        tokenizer,
        use.images,
        directory or default_directory(),
        use.trust_remote_code,
        key="images",
    )
    renderer = Renderer(
        tokenizer, read_template(use.template), "last", key="template", image_store=image_store
    )
    context, decisions = _exact_context(config, skeleton)
    device = one_device(use.device)
    dtype = _dtype(use.dtype, device)
    chosen = select(use.attention, device, dtype.dtype, config)
    decisions += [
        Decision("dtype", str(dtype.dtype).removeprefix("torch."), dtype.reason),
        Decision("attention", chosen.name, chosen.reason),
    ]
    model = load_reward_model(
        use.model,
        None,
        dtype=dtype.dtype,
        device=device,
        attention=chosen.implementation,
        trust_remote_code=use.trust_remote_code,
        is_narrow=True,
    )
    scorer = Scorer(model.requires_grad_(False)).eval()
    compute = partial(inference_context, dtype.dtype)
    proof = run_self_test(scorer, compute(), dtype.dtype, context or PROVED)
    if proof.one_sample is not None:
        decisions.append(Decision("packing", "one sample at a time", proof.one_sample))
    return Judge(
        scorer=scorer,
        renderer=renderer,
        context=context,
        is_process=type(model).__name__.endswith("ForTokenClassification"),
        tokens_per_batch=use.tokens_per_batch,
        one_sample=proof.one_sample,
        compute=compute,
        decisions=tuple(decisions),
    )


def _dtype(requested: str | None, device: torch.device) -> ChosenDtype:
    if requested is None and device.type == "cpu":
        return ChosenDtype(torch.float32, "bfloat16 is quicker, and rounds the scores")
    return resolve_dtype(requested, device)


def _exact_context(
    config: PreTrainedConfig, skeleton: torch.nn.Module
) -> tuple[int | None, list[Decision]]:
    """The longest sample whose number does not depend on what it is packed with."""
    context, rope = context_length(config), architecture.length_dependent_rope(skeleton)
    if rope is not None and (context is None or context > rope[1]):
        reason = f"{rope[0]} RoPE depends on the batch's longest sample beyond it"
        return rope[1], [Decision("context", str(rope[1]), reason)]
    return context, []


def _answer(row: AnyRow) -> AnyRow:
    """A row of SFT as an answer to be scored: of a conversation the last message."""
    if isinstance(row, Answers | Stepwise):
        return row
    if isinstance(row, Conversation):
        role = row.messages[-1]["role"]
        if role != "assistant":
            raise DataError(
                f"{row.place}: the last message is the {role}'s; expected the assistant's, which is scored; add it"
            )
        row = replace(row, learned=(len(row.messages) - 1,), excluded=())
    return Answers(row.place, (row,), {})


def _bare(sample: Sample, number: int) -> Sample:
    """What of a sample the head needs, under a name of its own."""
    return replace(
        sample.without_targets(),
        id=str(number),
        values={},
        read_values={},
        group=-1,
    )


def _first_bad(values_R: FloatArray) -> float:
    return next(float(value) for value in values_R if not math.isfinite(value))


PICTURE = 256
"""About how many tokens one has."""


class Busy(EngineError):
    """More waits than is let in."""


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    rows: tuple[AnyRow | Rendered, ...]
    future: Future[list[float]] = field(default_factory=Future)


class Batcher:
    """Scores rows for many askers. ``close`` ends it, once what waits is scored."""

    def __init__(
        self,
        judge: Judge,
        most_waiting: int = 256,
        afterwards: Callable[[], None] | None = None,
    ) -> None:
        """``afterwards``: called after all that was scored together."""
        self.judge, self.most_waiting, self.afterwards = judge, most_waiting, afterwards
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._current: list[_Job] = []
        self._is_closing = False
        self._reason: str | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._executor.submit(self._run).add_done_callback(self._end)

    @property
    def failure(self) -> str | None:
        """Why nothing is scored any more; None while it is."""
        return self._reason

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, rows: Sequence[AnyRow | Rendered]) -> Future[list[float]]:
        """A number for each row, in their order, when it is its turn. The future fails with a TautError.

        Raises Busy, or EngineError where the thread has ended.
        """
        job = _Job(tuple(rows))
        with self._changed:
            if self._reason is not None:
                raise EngineError(self._reason)
            if len(self._waiting) >= self.most_waiting:
                raise Busy(
                    f"{len(self._waiting)} requests wait already; expected fewer; try again later"
                )
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Score what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._executor.shutdown()

    def _run(self) -> None:
        while self._take():
            self._score(self._current)
            if self.afterwards is not None:
                self.afterwards()

    def _take(self) -> bool:
        """Wait for work, and take as many requests as are there, the budget allowing; False: it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            self._current = []
            size = 0
            while self._waiting and (not self._current or size < self.judge.tokens_per_batch):
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    self._current.append(job)
                    size += sum(_guess(row) for row in job.rows)
            return bool(self._current or self._waiting or not self._is_closing)

    def _score(self, jobs: Sequence[_Job]) -> None:
        rendered = [(job, samples) for job in jobs if (samples := self._samples(job)) is not None]
        try:
            found = iter(self.judge.scores([s for _, samples in rendered for s in samples]))
        except TautError:
            for job, samples in rendered:
                self._score_alone(job, samples)
            return
        for job, samples in rendered:
            job.future.set_result([float(next(found)[-1]) for _ in samples])

    def _score_alone(self, job: _Job, samples: Sequence[Sample]) -> None:
        try:
            found = self.judge.scores(samples)
        except TautError as error:
            job.future.set_exception(error)
        else:
            job.future.set_result([float(score_R[-1]) for score_R in found])

    def _samples(self, job: _Job) -> list[Sample] | None:
        try:
            return [sample for (sample,) in self.judge.render(job.rows)]
        except TautError as error:
            job.future.set_exception(error)
            return None

    def _end(self, ended: Future[None]) -> None:
        """Whoever still waits is told that the thread has ended, and why."""
        error = ended.exception()
        why = "was closed" if error is None else f"ended by {type(error).__name__}: {_line(error)}"
        with self._changed:
            self._reason = f"the thread that owns the reward model {why}; start the server again"
            left = [*self._current, *self._waiting]
            self._waiting.clear()
        for job in left:
            if not job.future.done():
                job.future.set_exception(EngineError(self._reason))


def _guess(row: AnyRow | Rendered) -> int:
    """About how many tokens a row has, before it is tokenised: a third of its characters, and what pictures have."""
    if isinstance(row, Conversation):
        size = sum(len(text_of(message["content"])) for message in row.messages)
        return size // 3 + PICTURE * len(images_of(row.messages))
    return len(row.text if isinstance(row, Rendered) else repr(row)) // 3


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def open_rater(verifier: Verifier) -> Rater:
    """The model that a ``reward_model`` names, loaded and proved."""
    return rater(open_judge(from_mapping(JudgeUse, to_dict(verifier))))


def rater(judge: Judge) -> Rater:
    """The scores of a model that is ready."""

    def rate(answers: Sequence[Answered]) -> list[Score]:
        found = [_sample(judge, answered, number) for number, answered in enumerate(answers)]
        samples = [it for it in found if isinstance(it, Sample)]
        numbers = iter(judge.scores(samples) if samples else ())
        return [Score(float(next(numbers)[-1])) if isinstance(it, Sample) else it for it in found]

    return rate


def _sample(judge: Judge, answered: Answered, number: int) -> Sample | Score:
    """An answer as the model reads it, or why it cannot."""
    try:
        ((sample,),) = judge.render([_row(answered, f"answer {number}")])
    except DataError as error:
        return Score(error=reason(error))
    return sample


def _row(answered: Answered, place: str) -> AnyRow:
    prompt = answered.prompt
    if isinstance(prompt, str):
        return Completion(place, prompt, answered.text)
    turns = answered.messages or ({"role": "assistant", "content": answered.text},)
    return read_conversation(
        [dict(message) for message in (*prompt, *turns)],
        place,
        first_learned=len(prompt),
        column="prompt+completion",
    )
