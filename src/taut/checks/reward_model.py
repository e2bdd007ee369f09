"""Scores of a reward model: the same in every batch, and those of transformers' own class, with which people load the
model.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from taut.checks.attention import library_kernel
from taut.checks.measure import gap
from taut.checks.registry import Finding, check, failed, passed, skip_if, skipped
from taut.checks.session import Session, is_text, num_tokens
from taut.data.packing import ALONE, PackPolicy
from taut.models import architecture
from taut.models.self_test import library_attention
from taut.types import Sample
from taut.vision import tower


def _scored_samples(session: Session) -> list[Sample]:
    """A few samples of the batch, as they are scored: at the end, or at the end of each step."""
    chosen: list[Sample] = []
    for sample in session.tree_samples:
        fits = num_tokens([*chosen, sample]) <= 192 and len(chosen) < 4
        if fits or len(chosen) < 2:
            chosen.append(sample)
    return chosen


@check("reward.batch", after=["attention.shared"])
def a_score_does_not_depend_on_the_batch(session: Session) -> Finding:
    """Is a score the same whatever else is in the batch?

    Alone, with others in either order, with a longer sample, and with its beginning shared.
    """
    skip_if(not session.is_scalar, "the model gives no scores")
    if session.loaded.one_sample is not None:
        return skipped(f"nothing is packed: {session.loaded.one_sample}")
    samples = _scored_samples(session)
    longest = max(samples, key=lambda sample: sample.num_tokens)
    ids_T = np.concatenate([longest.ids_T, longest.ids_T[is_text(longest)]])
    longer = replace(longest, id=f"{longest.id} twice", ids_T=ids_T, group=-1)
    batches: list[tuple[str, list[Sample], PackPolicy]] = [
        ("with others", samples, ALONE),
        ("with the same in reverse order", samples[::-1], ALONE),
        ("with a longer one", [longer, *samples], ALONE),
    ]
    if session.trainer.policy.share_prefixes:
        sharing = PackPolicy(min_saved_tokens=1)
        batches.append(("with its beginning shared", [*samples, longer], sharing))
    worst, where = 0.0, ""
    with session.inference():  # once around all: autocast keeps its casts
        alone = {one.id: session.numbers([one])[one.id] for one in samples}
        for how, batch, policy in batches:
            scores = session.numbers(batch, policy)
            for name, score in alone.items():
                moved = gap(scores[name], score)
                if moved > worst:
                    worst = moved
                    where = (
                        f"{name}: {float(score[-1]):.4g} alone, {float(scores[name][-1]):.4g} {how}"
                    )
    if worst > session.tolerance:
        return failed(
            f"a score changes by {worst:.3g} with the rest of the batch",
            measured=(worst, "points"),
            evidence=[where, f"at most {session.tolerance:g} is rounding in {session.dtype}"],
            remedy="scores are read at another sample's token; set batch.share_prefixes=false, and please report this",
        )
    return passed(f"alone as in {len(batches)} other batches", worst, "points")


@check("reward.library", after=["reward.batch"])
def the_library_gives_the_same_score(session: Session) -> Finding:
    """Does transformers' own class give a sample the same score, at its last token?

    Given a sample alone, that class looks for the last token that is not the pad. The pad is the one that the tokenizer
    is saved with.
    """
    skip_if(not session.is_scalar, "the model gives no scores")
    skip_if(session.ranks.size > 1, "the library's own path runs on one rank")
    pad = session.served_tokenizer.pad_token_id
    worst, where, number = 0.0, "", 0
    for sample in _scored_samples(session):
        ours = session.numbers([sample])[sample.id]
        config = architecture.text_config(session.model)
        pad_before, config.pad_token_id = config.pad_token_id, pad
        ids_T = torch.from_numpy(sample.ids_T).to(session.ranks.device)
        decoder, library = architecture.decoder(session.model), library_attention(session.model)
        pictures = tower.library_arguments(decoder, sample.media, ids_T)
        try:
            with session.inference(), library_kernel(session, library):
                output = session.model(input_ids=ids_T[None], use_cache=False, **pictures)
                theirs: Tensor = output.logits.float().cpu()[0]
        finally:
            config.pad_token_id = pad_before
        if theirs.ndim == 2:  # a number for each token, not one for the sequence
            reads = sample.read_at_R
            theirs = theirs[[sample.num_tokens - 1] if reads is None else reads.tolist(), 0]
        number += len(ours)
        apart = gap(ours, theirs)
        if apart > worst or not where:
            token, worst = session.inputs.token(int(sample.ids_T[-1])), apart
            scores = f"{float(ours[-1]):.4g}, by the library {float(theirs[-1]):.4g}"
            where = f"{sample.id}, which ends with {token!r}: {scores}"
    name, limit = type(session.model).__name__, session.tolerance
    if not worst <= limit:
        pad_name = "none" if pad is None else session.inputs.token(pad)
        return failed(
            f"{name} gives another score: {worst:.3g} apart (at most {limit:g} is rounding)",
            measured=(worst, "points"),
            evidence=[where, f"the pad is {pad_name}"],
            remedy="what is served would not be what was trained: scores are read at another token; give the tokenizer "
            "a pad that ends no answer, or please report this",
        )
    return passed(f"as {name} gives {number} scores, pad {pad}", worst, "points")
