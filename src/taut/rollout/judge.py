"""A reward model in this process: samples in, the numbers of its scalar head out.

Samples are laid out packed, without padding; what two of them begin with alike is computed once, within a row and
across rows. A forward takes about ``tokens_per_batch`` tokens. The number of a sample does not depend on what it is
scored with, to rounding; the model goes through the proofs that training goes through.

Answers are rendered as for training a reward model (``data/answers.py``): they end with the token at which a server
stops, and are read there.

May import what is below rollout. Commands import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from transformers import PreTrainedConfig

from taut.attention.select import select
from taut.config import ComputeDtype, configclass
from taut.data.answers import render_any
from taut.data.cache import default_directory
from taut.data.formats import Conversation
from taut.data.pack import ALONE, PackPolicy, common_prefix, pack, prefix_order
from taut.data.preferences import Answers, AnyRow, Stepwise
from taut.data.render import Renderer
from taut.data.template import checked
from taut.errors import DataError, NonFiniteError, OutOfMemory
from taut.models import anatomy
from taut.models.load import context_length, load_config, load_tokenizer
from taut.models.precision import ChosenDtype, resolve_dtype
from taut.models.prove import prove
from taut.models.reward import load_reward_model, reward_skeleton
from taut.models.score import Scorer
from taut.rollout.open import (
    PROVED,
    Decision,
    inference_context,
    one_device,
    read_template,
)
from taut.types import FloatArray, Sample, Wants
from taut.vision.opening import open_album
from taut.vision.picture import ImagesConfig

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
    album = open_album(
        use.model,
        config,
        tokenizer,
        use.images,
        directory or default_directory(),
        use.trust_remote_code,
        key="images",
    )
    renderer = Renderer(tokenizer, read_template(use.template), "last", key="template", album=album)
    context, decisions = _exact_context(config, skeleton)
    device = one_device(use.device)
    dtype = _dtype(use.dtype, device)
    chosen = select(use.attention, device, dtype.dtype, config)
    decisions += [
        ("dtype", str(dtype.dtype).removeprefix("torch."), dtype.reason),
        ("attention", chosen.name, chosen.reason),
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
    proof = prove(scorer, compute(), dtype.dtype, context or PROVED)
    if proof.one_sample is not None:
        decisions.append(("packing", "one sample at a time", proof.one_sample))
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
    context, rope = context_length(config), anatomy.length_dependent_rope(skeleton)
    if rope is not None and (context is None or context > rope[1]):
        reason = f"{rope[0]} RoPE depends on the batch's longest sample beyond it"
        return rope[1], [("context", str(rope[1]), reason)]
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
