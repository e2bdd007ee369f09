"""A teacher: the section ``[distill]`` of ``taut distill`` and ``taut gkd``, its loss, and the loading of its model.

The divergences and their papers are in models/teacher.py.

    teacher         a model that gives its full distribution: any architecture and width, the student's tokenizer.
                    It is in the compute dtype, sharded as the student is, and runs just before the student
    top_logprobs    a file of its likeliest tokens at each target, made with ``taut teach``: no teacher is held while
                    training
    url             of ``taut gkd``: a server that scores the student's completions before they are trained on, by its
                    likeliest tokens at each target
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, NotNegative, Positive, configclass, home_path
from taut.errors import ConfigError, ModelError
from taut.losses.loss import Loss
from taut.losses.supervised import Distill
from taut.models.architecture import head
from taut.models.attention_backends import select
from taut.models.load import (
    context_length,
    load_config,
    load_model,
    require_language_model,
)
from taut.models.scorer import Teacher
from taut.models.self_test import one_sample_reasons
from taut.models.teacher import ListedTeacher, ModelTeacher
from taut.models.tokens import require_same_tokenizer
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import Divergence


@configclass
class DistillConfig:
    """Distillation on fixed data."""

    teacher: str | None = None
    """Directory (or hub name) of the model to learn from; it has the student's tokenizer."""
    top_logprobs: str | None = None
    """Instead of a teacher: the file that ``taut teach`` wrote for data.train."""
    eval_top_logprobs: str | None = None
    """The same file for data.eval."""
    divergence: Literal["forward", "reverse", "js"] = "forward"
    """forward: KL(teacher || student), mode-covering; reverse: KL(student || teacher), mode-seeking; js: the
    generalised Jensen-Shannon divergence."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For divergence=js: the teacher's share of the mixture. Near 0 it acts as forward, near 1 as reverse; 0.5 if not
    set."""
    temperature: Positive = 1.0
    """Divides the logits of both models; the term is multiplied by its square, which keeps the scale of gradients."""
    tail: Literal["bucket", "renormalise"] | None = None
    """For a list of likeliest tokens: how tokens that are not listed count. bucket (if not set): all together as one
    more outcome; renormalise: not at all, the listed probabilities are normalised to 1."""
    sft_weight: NotNegative = 0.0
    """Weight of the cross-entropy on the data's own tokens, added to the divergence."""

    def __post_init__(self) -> None:
        if self.beta is not None and self.divergence != "js":
            raise ConfigError(
                f"distill.beta={self.beta:g} has no effect with distill.divergence={self.divergence}; expected "
                "divergence=js; set that, or leave beta out"
            )
        if self.eval_top_logprobs is not None and self.top_logprobs is None:
            raise ConfigError(
                f"distill.eval_top_logprobs={self.eval_top_logprobs} has no effect without distill.top_logprobs; "
                "expected both; set that, or leave eval_top_logprobs out"
            )
        if self.teacher is not None and self.top_logprobs is not None:
            raise ConfigError(
                "distill.teacher and distill.top_logprobs are both set; expected one: the file stands for the teacher; "
                "keep one"
            )
        if self.tail is not None and not self.is_listed:
            raise ConfigError(
                f"distill.tail={self.tail} has no effect without {self.list_key}; expected both; set that, or leave "
                "tail out"
            )
        if self.tail == "renormalise" and self.divergence != "forward":
            raise ConfigError(
                f"distill.tail=renormalise with distill.divergence={self.divergence}: where the teacher has nothing, "
                "that divergence is infinite; expected divergence=forward; set that, or tail=bucket"
            )
        if self.is_listed and self.temperature != 1 and self.tail != "renormalise":
            raise ConfigError(
                f"distill.temperature={self.temperature:g} with distill.tail=bucket: what the tokens that are not "
                "listed have at that temperature is not known; expected temperature=1; or set tail=renormalise"
            )

    list_key: ClassVar[str] = "distill.top_logprobs"
    """The key that makes the teacher a list of its likeliest tokens."""

    @property
    def is_listed(self) -> bool:
        """Whether the teacher is a list of its likeliest tokens at each target."""
        return self.top_logprobs is not None

    def make_loss(self) -> Loss:
        """The loss."""
        tail = self.tail or "bucket"
        beta = 0.5 if self.beta is None else self.beta
        how = Divergence(self.divergence, beta, self.temperature, tail)
        return Distill(how, self.sft_weight, is_listed=self.is_listed)

    def require_teacher(self, student: str, *, has_eval: bool) -> None:
        """Raise ConfigError where there is nothing to learn from. ``student``: the model that trains."""
        if self.teacher is None and self.top_logprobs is None:
            raise ConfigError(
                "distill.teacher is not set; expected a model directory; set distill.teacher=DIR, or "
                "distill.top_logprobs=FILE"
            )
        if has_eval and self.top_logprobs is not None and self.eval_top_logprobs is None:
            raise ConfigError(
                "data.eval is set and distill.eval_top_logprobs is not; expected the teacher's file of the held-out "
                "data too; make it with taut teach, or leave data.eval out"
            )
        if self.eval_top_logprobs is not None and not has_eval:
            raise ConfigError(
                "distill.eval_top_logprobs is set and data.eval is not; expected both; set data.eval, or leave it out"
            )
        if self.teacher is None or self.sft_weight:
            return
        paths = home_path(self.teacher), home_path(student)
        is_same = all(path.is_dir() for path in paths) and paths[0].samefile(paths[1])
        if is_same or self.teacher == student:
            raise ConfigError(
                f"distill.teacher={self.teacher} is the model that trains; expected another: it has nothing to teach; "
                "name one, or set distill.sft_weight to train with a tie to the start"
            )


def load_teacher(
    config: DistillConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int,
    longest: int,
    dtype: torch.dtype,
    ranks: Ranks,
    attention: str,
    trust_remote_code: bool = False,
) -> tuple[Teacher, list[Decision]]:
    """The teacher of a run. Raises ModelError where it cannot teach this student.

    ``num_rows``: rows of the student's vocabulary; ``longest``: tokens of the longest sample; ``attention``: as
    configured.
    """
    path = config.teacher
    if path is None:
        file, reason = config.top_logprobs, "what taut teach made of data.train; no teacher is held"
        return ListedTeacher(), [] if file is None else [Decision("distill.teacher", file, reason)]
    vocabulary = require_same_tokenizer(
        path, tokenizer, "distill.teacher", trust_remote_code, may_have_more=False
    )
    num_ids = 1 + max(vocabulary.values())
    settings = load_config(path, trust_remote_code)
    require_language_model(path, settings, "distill.teacher")
    require_context(f"distill.teacher={path}", context_length(settings), longest)
    chosen = select(attention, ranks.device, dtype, settings)
    model = load_model(
        path,
        dtype=dtype,
        device=ranks.weights_device,
        attention=chosen.implementation,
        trust_remote_code=trust_remote_code,
        is_narrow=True,
        shard=distributed.layer_sharding(ranks, dtype),
    )
    alone = one_sample_reasons(model, longest)
    if alone:
        raise ModelError(
            f"distill.teacher={path} runs one sample at a time ({'; '.join(alone)}); expected a model that packs; use "
            "it once with taut teach, and set distill.top_logprobs"
        )
    parts = f"sharded over {ranks.size} ranks, " if ranks.size > 1 else ""
    reason = f"frozen, {parts}{chosen.name} attention ({chosen.reason})"
    decisions = [Decision("distill.teacher", path, reason)]
    num_theirs = head(model).weight.shape[0]
    if min(num_theirs, num_rows) < num_ids:
        raise ModelError(
            f"distill.teacher={path} has {num_theirs:,} rows, the student {num_rows:,} and their tokenizer "
            f"{num_ids:,} ids; expected a row for each id; name another teacher"
        )
    shared = None
    if num_theirs != num_rows:
        shared = num_ids
        sizes = f"the teacher has {num_theirs:,} rows and the student {num_rows:,}"
        decisions.append(Decision("distill.rows", f"the tokenizer's {num_ids:,}", sizes))
    shard = partial(distributed.shard, ranks=ranks, dtype=dtype)
    return ModelTeacher(model, shared, shard, distributed.reshard), decisions


def require_context(named: str, context: int | None, longest: int) -> None:
    """Raise ModelError where a sample is longer than a model's context. ``named``: the key and its value."""
    if context is not None and longest > context:
        raise ModelError(
            f"{named} has a context of {context:,} tokens and the longest sample has {longest:,}; "
            f"expected samples it was made for; set data.max_length={context} and data.too_long, or name another"
        )
