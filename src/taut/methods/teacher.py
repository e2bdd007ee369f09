"""A teacher: the section ``[distill]`` of ``taut distill`` and ``taut gkd``, and the loading of its model.

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

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision
from taut.errors import ModelError
from taut.methods.settings import DistillConfig
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
    """Load the teacher of a run. Raises ModelError if it cannot teach this student. ``num_rows``: rows of the student's
    vocabulary; ``longest``: tokens of the longest sample; ``attention``: as configured.
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
    """Raise ModelError if a sample is longer than a model's context. ``named``: the key and its value."""
    if context is not None and longest > context:
        raise ModelError(
            f"{named} has a context of {context:,} tokens and the longest sample has {longest:,}; "
            f"expected samples it was made for; set data.max_length={context} and data.too_long, or name another"
        )
