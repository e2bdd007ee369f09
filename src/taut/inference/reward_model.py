"""A reward model in this process: samples in, scores of its scalar head out.

Samples are packed without padding; prefixes that samples share are computed once, within a row and across rows. A
forward takes about ``tokens_per_batch`` tokens. A sample's score does not depend on the samples it is scored with, to
within rounding; the model passes the same start-up checks as in training (models/self_test.py).

Answers are rendered as for training a reward model (data/render/render.py): they end with the token at which a server
stops, and are scored there. A truncated answer is therefore scored as if it had ended; the reward ``stop`` tells them
apart.

``open_rater`` makes reward models part of a reward set. Answers to one prompt share its computation. An answer
that cannot be rendered, or is too long for the model, is an error of that answer; a number that is not finite ends the
run, because the model itself is then broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, from_mapping, to_dict
from taut.data.packing import ALONE, PackPolicy, common_prefix, pack, prefix_order
from taut.data.render.chat_template import checked
from taut.data.render.render import Renderer, render_any
from taut.data.rows.messages import (
    Completion,
    Conversation,
    Row,
    read_conversation,
)
from taut.data.rows.schema import Answers, AnyRow, Stepwise
from taut.errors import ConfigError, DataError, NonFiniteError, OutOfMemory
from taut.inference.factory import (
    PROVED,
    exact_context,
    inference_context,
    inference_dtype,
    one_device,
    renderer_of,
)
from taut.inference.settings import JudgeUse
from taut.models.attention_backends import activate_flash_attention, select
from taut.models.load import load_config, load_model, load_skeleton, load_tokenizer
from taut.models.reward_model import compare_tokens, load_reward_model, reward_skeleton
from taut.models.scorer import Scorer
from taut.models.self_test import run_self_test
from taut.rewards.judge import RewardModel, conversed
from taut.rewards.process_rewards import Stepped, marked, probability, split_steps
from taut.rewards.reward_set import Rater
from taut.rewards.settings import StepsConfig
from taut.rewards.verifier import RewardInput, Score, Verifier, reason, scored
from taut.types import FloatArray, Sample, Wants

SCALAR = Wants(logp=False, scalar=True)
WHOLE = StepsConfig()
NONE_T, NONE_N = np.empty(0, dtype=np.int64), np.empty(0)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Prompt and answer as one text with its special tokens, as a model saw it: tokenized unchanged and scored at its
    last token."""

    place: str
    text: str


@dataclass(frozen=True, eq=False)
class Judge:
    """A loaded reward model."""

    model: str
    """Its directory or hub name."""
    scorer: Scorer
    renderer: Renderer
    context: int | None
    """Tokens a sample may have."""
    is_process: bool
    """Whether the head may be read at any token, i.e. the library's class is for token classification."""
    tokens_per_batch: int
    one_sample: str | None
    """Why samples are not packed."""
    compute: Callable[[], AbstractContextManager[Any]]
    decisions: tuple[Decision, ...]

    def render(self, rows: Sequence[AnyRow | Rendered]) -> list[list[Sample]]:
        """The samples of each row: one of an SFT row, which ends with its last answer, or of a rendered text."""
        plain = [row for row in rows if not isinstance(row, Rendered)]
        others = iter(render_any([_answer(row) for row in plain], self.renderer))
        template = self.renderer.template
        samples = []
        for row in rows:
            if isinstance(row, Rendered):
                template.pictures.require_plain(row.text, row.place)
                text = checked(row.text, row.place, is_rendering=True)
                ids = template.encode([text])[text]
                if not ids:
                    raise DataError(f"{row.place}: the text has no token; expected at least one")
                ids_T = np.asarray(ids, dtype=np.int64)
                samples.append([Sample(row.place, ids_T, NONE_T, NONE_N)])
            else:
                samples.append(next(others))
        for sample in chain.from_iterable(samples):
            self.require_fits(sample)
        return samples

    def require_process(self, place: str) -> None:
        """Raise ConfigError for a model that is read once for a sequence."""
        if not self.is_process:
            raise ConfigError(
                f"{place} is set, and {self.model} gives one number for a whole answer; expected a process model; "
                f"train one (taut reward, reward.loss=process), or take {place} out"
            )

    def require_fits(self, sample: Sample) -> None:
        """Raise DataError for a sample longer than the model's context."""
        if self.context is not None and sample.num_tokens > self.context:
            raise DataError(
                f"{sample.id}: {sample.num_tokens} tokens; expected at most {self.context}, what the model was made "
                "for; shorten it"
            )

    def scores(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The head's score at each read of each sample (by default its last token), [R] each."""
        scores: list[FloatArray] = [NONE_N] * len(samples)
        for batch in self._batches(samples):
            for index, score_R in zip(
                batch, self._forward([samples[i] for i in batch]), strict=True
            ):
                scores[index] = score_R
        return scores

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Indices of the samples of each forward: those with a common prefix together, up to the token budget."""
        batch: list[int] = []
        num_tokens = 0
        for index in prefix_order(samples):
            size = samples[index].num_tokens
            added = size - common_prefix(samples[batch[-1]], samples[index]) if batch else size
            if batch and (self.one_sample or num_tokens + added > self.tokens_per_batch):
                yield batch
                batch, num_tokens, added = [], 0, size
            batch.append(index)
            num_tokens += added
        if batch:
            yield batch

    def _forward(self, samples: Sequence[Sample]) -> list[FloatArray]:
        numbered = [  # the head needs no targets, and unique names
            replace(sample.without_targets(), id=str(number), values={}, read_values={}, group=-1)
            for number, sample in enumerate(samples)
        ]
        packed = pack(numbered, ALONE if self.one_sample else PackPolicy())
        try:
            with torch.no_grad(), self.compute():
                scalar_R = self.scorer(packed, wants=SCALAR).scalar_R
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{packed.num_tokens} tokens do not fit in the memory of {self.scorer.device}; expected fewer at a "
                f"time; set tokens_per_batch below {min(self.tokens_per_batch, packed.num_tokens)}"
            ) from error
        # Its numbers, sample by sample.
        values_R = scalar_R.double().cpu().numpy()
        row_R = packed.row_R.numpy()
        by_number = {
            int(name): values_R[row_R == row] for row, name in enumerate(packed.sample_ids)
        }
        for number, sample in enumerate(samples):
            bad_R = by_number[number][~np.isfinite(by_number[number])]
            if bad_R.size:
                raise NonFiniteError(
                    f"{sample.id}: the model's score is {float(bad_R[0])}; expected a number; the model "
                    "is broken, or dtype is too narrow for it"
                )
        return [by_number[number] for number in range(len(samples))]


def open_judge(
    use: JudgeUse,
    directory: Path | None = None,
    device: torch.device | None = None,
    tokens: Sequence[str] = (),
) -> Judge:
    """Load and test the reward model that ``use`` names. ``directory``: for copies of pictures; by default the cache's.
    ``device``: in place of its own, where several processes have one each. ``tokens``: of a causal language model,
    those of right and wrong. Raises TautError where it cannot be loaded with these settings.
    """
    config = load_config(use.model, use.trust_remote_code)
    if tokens:
        skeleton = load_skeleton(use.model, config, use.trust_remote_code)
    else:
        skeleton = reward_skeleton(use.model, config, None, use.trust_remote_code)
    # How samples are rendered.
    tokenizer = load_tokenizer(use.model, use.trust_remote_code)
    renderer = renderer_of(use, config, tokenizer, directory, targets="last")
    # By which kernels it computes.
    context, decisions = exact_context(config, skeleton, "the batch's longest sample")
    device = one_device(use.device) if device is None else device
    dtype = inference_dtype(use.dtype, device, "bfloat16 is quicker, and rounds the scores")
    chosen = select(use.attention, device, dtype.dtype, config)
    decisions += [
        Decision("dtype", str(dtype.dtype).removeprefix("torch."), dtype.reason),
        Decision("attention", chosen.name, chosen.reason),
        *activate_flash_attention(chosen.name, device, config),
    ]
    # Load the model, and prove that packed and alone agree.
    model = (load_model if tokens else partial(load_reward_model, head=None))(
        use.model,
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
    if tokens:
        compare_tokens(model, *(_single_token(tokenizer, text) for text in tokens))
    return Judge(
        model=use.model,
        scorer=scorer,
        renderer=renderer,
        context=context,
        is_process=bool(tokens) or type(model).__name__.endswith("ForTokenClassification"),
        tokens_per_batch=use.tokens_per_batch,
        one_sample=proof.one_sample,
        compute=compute,
        decisions=tuple(decisions),
    )


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The id of a text that is one token: as a token's own name, or without the space that a tokenizer puts first."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) == 1:
        return int(ids[0])
    if (known := tokenizer.get_vocab().get(text)) is not None:
        return int(known)
    raise ConfigError(
        f"steps.tokens: {text!r} is {len(ids)} tokens of {tokenizer.name_or_path}; expected one; give a text that is"
    )


def _answer(row: AnyRow) -> AnyRow:
    """The answer to score in a row of SFT: of a conversation the last message."""
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


def open_rater(verifier: Verifier, device: torch.device | None = None) -> Rater:
    """Load and test the model of a ``reward_model``. ``device``: where it names none and several processes have one."""
    assert isinstance(verifier, RewardModel)
    settings = to_dict(verifier)
    del settings["steps"]
    if device is not None and verifier.device != "auto":
        device = torch.device(verifier.device)
    use, tokens = from_mapping(JudgeUse, settings), verifier.steps.tokens
    judge = open_judge(use, device=device, tokens=tokens)
    if verifier.steps.separator is not None:
        judge.require_process("steps.separator")
    return rater(judge, verifier.steps)


def rater(judge: Judge, steps: StepsConfig = WHOLE) -> Rater:
    """A function that scores answers with a loaded model, or with ``steps`` their steps."""

    def rate(answers: Sequence[RewardInput]) -> list[Score]:
        # Answers without steps, and those that cannot be rendered, need no forward.
        samples: list[Sample] = []
        found: dict[int, Score] = {}
        for number, answer in enumerate(answers):
            if steps.separator and not split_steps(answer.text, steps.separator):
                found[number] = scored("", Stepped.of(answer.text, [], steps))
                continue
            try:
                row = _row(answer, f"answer {number}", steps)
                ((sample,),) = judge.render([row])
            except DataError as error:
                found[number] = Score(error=reason(error))
            else:
                samples.append(sample)
        # The others are scored together.
        scores = iter(judge.scores(samples) if samples else ())
        for number, answer in enumerate(answers):
            if number in found:
                continue
            score_R = next(scores)
            if steps.separator is None:
                found[number] = Score(float(score_R[-1]))
            else:
                values = [probability(logit) for logit in score_R.tolist()]
                found[number] = scored("", Stepped.of(answer.text, values, steps))
        return [found[number] for number in range(len(answers))]

    return rate


def _row(answer: RewardInput, place: str, steps: StepsConfig) -> AnyRow:
    """An answer as a row to score; with ``steps.separator`` one that is read at the end of each step."""
    prompt, separator = answer.prompt, steps.separator
    spans: Sequence[tuple[int, int]] = ()
    if separator is not None:
        spans = split_steps(answer.text, separator)
        if steps.mark is not None:
            text, spans = marked(answer.text, separator, steps.mark)
            answer = replace(answer, text=text)
    row: Row
    if isinstance(prompt, str):
        row = Completion(place, prompt, answer.text)
    else:
        messages = [dict(message) for message in (*prompt, *conversed(answer, separator))]
        row = read_conversation(
            messages, place, first_learned=len(prompt), column="prompt+completion"
        )
    return row if separator is None else as_steps(row, spans)


def as_steps(row: Row, spans: Sequence[tuple[int, int]]) -> Stepwise:
    """A row whose answer is read at the end of each of these parts of its text."""
    return Stepwise(row.place, row, tuple(spans), (0.0,) * len(spans))
