"""Between sampling and scoring nothing is lost: the ids, the weights, the reason a completion ended.

Experts chosen otherwise (class 20) are planted in tests/checks/faults/experts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny_trainers as jobs
from tests.helpers.tiny_models import logits_of, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import Tensor

from taut.data.packing import ALONE, pack
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.methods.inputs import engine_of
from taut.models import attention_backends
from taut.models.scorer import Scorer
from taut.train.trainer import Trainer, train_step
from taut.types import Completion, Prompt, Sample

PROMPT = Prompt("p", np.arange(20, 30))
SAMPLING = Sampling(n=8, max_new_tokens=8, seed=3)


def scored(scorer: Scorer, completion: Completion) -> Tensor:
    """logp_N of a completion of PROMPT, its ids as they are."""
    ids_T = np.concatenate([PROMPT.ids_T, completion.ids_N])
    at_N = np.arange(PROMPT.ids_T.size, ids_T.size)
    sample = Sample("scored", ids_T, at_N, np.ones(at_N.size))
    with torch.no_grad():
        return scorer(pack([sample], ALONE)).logp_N


def gap(scorer: Scorer, completions: list[Completion]) -> float:
    """The largest difference between what the engine says and what the scorer says."""
    return max(
        float((scored(scorer, one) - torch.from_numpy(one.logp_N)).abs().max())
        for one in completions
    )


def test_ids_that_text_would_not_give_back_are_scored_as_they_were_sampled(tmp_path: Path) -> None:
    """Class 18: decoding and tokenizing again changes most completions here, and none of what is scored."""
    built, _ = jobs.make(tmp_path, dtype="float32")
    found = engine_of(built.inputs, built.models, built.trainer.ranks)().generate(
        [PROMPT], SAMPLING
    )
    tokenizer = built.inputs.tokenizer
    drifted = [
        tokenizer(tokenizer.decode(one.ids_N), add_special_tokens=False)["input_ids"]
        != one.ids_N.tolist()
        for one in found
    ]
    assert sum(drifted) >= 4
    assert gap(built.trainer.scorer, found) < 1e-4


@pytest.mark.parametrize("keys", [{}, {"lora__rank": 4}], ids=["full", "lora"])
def test_the_engine_draws_from_the_weights_of_the_last_step(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """Class 19: after a large step the engine says something else of the same draw, and still what the scorer says."""
    built, _ = jobs.make(tmp_path, dtype="float32", optim__learning_rate=0.1, **keys)
    trainer: Trainer = built.trainer
    trainer.monitors = ()
    engine = engine_of(built.inputs, built.models, built.trainer.ranks)()
    before = engine.generate([PROMPT], SAMPLING)
    for step in (1, 2):
        train_step(trainer, step)
    after = engine.generate([PROMPT], SAMPLING)
    moved = scored(trainer.scorer, before[0]) - torch.from_numpy(before[0].logp_N)
    assert float(moved.abs().max()) > 0.1
    assert gap(trainer.scorer, after) < 1e-4


def test_the_last_token_that_fits_may_be_an_end() -> None:
    """Class 24: of completions as long as was allowed, one ended and another was cut; width does not say which."""
    model = tiny_model("qwen2")
    fond_of = logits_of(model, 64).softmax(-1).mean(0).argsort(descending=True)[:20].tolist()
    model.set_attn_implementation(attention_backends.PREFIX + "reference")
    engine = LocalEngine(Scorer(model), tiny_tokenizer(), fond_of, context=100)
    found = engine.generate([PROMPT], Sampling(n=64, max_new_tokens=3))
    full = [one for one in found if one.ids_N.size == 3]
    assert {one.finish_reason for one in full} == {"stop", "length"}
    for one in found:
        has_ended = int(one.ids_N[-1]) in fond_of
        assert one.finish_reason == ("stop" if has_ended else "length")
