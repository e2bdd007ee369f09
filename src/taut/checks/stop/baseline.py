"""The model as it came: how many answers it ends by itself, and with which token it would end the rows' answers.

A model that was taught another end than the stop set's puts that token where the rows' answers end, and not inside
them: then no server would stop at it. Whether it ends at all is no fault: that is what training is for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from taut.attention.layout import Layout
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.packing import ALONE, pack
from taut.evals.stopping import Asked, StopConfig, prepare
from taut.inference.engine import Sampling
from taut.run.setup import engine_of
from taut.types import Sample

PROMPTS, TOKENS = 8, 32
LIKELY, UNLIKELY = 0.5, 0.05
"""Of another end: how likely it is where answers end (the mean), and at most inside them and of the stop set's own."""


class Other(NamedTuple):
    """A special token beside the stop set."""

    id: int
    at_ends: float
    """Its mean probability where answers end."""


def ask(session: Session) -> Finding:
    """Before training, does the model end with no other token than those of the stop set?"""
    if session.is_scalar:
        return skipped("a reward model generates nothing")
    data = session.train if session.eval is None else session.eval
    config = StopConfig(prompts=PROMPTS, tokens=TOKENS)
    check = prepare(
        config, data, session.stops.ids, engine_of(session.built), session.job, session.run.seed
    )
    if check.engine is None:
        return skipped(check.obstacle.partition(";")[0])
    sampling = Sampling(max_new_tokens=TOKENS, seed=session.run.seed)
    done = check.engine.generate([one.prompt for one in check.asked], sampling)
    number = sum(one.finish_reason == "stop" for one in done)
    other = _other_end(session, list(check.asked))
    if other is not None:
        token = session.inputs.token(other.id)
        return failed(
            f"the model ends answers with {token}, which is not in the stop set",
            number=number,
            unit=f"of {len(done)} end",
            evidence=[
                f"where answers end, {token} (id {other.id}) has a probability of {other.at_ends:.2g}; inside them, "
                f"and those of the stop set, at most {UNLIKELY:g}"
            ],
            remedy=f"add {other.id} to eos_token_id in the model's generation_config.json, or use the model's own "
            "chat template",
        )
    return passed("answers that end before training", number, f"of {len(done)}")


def _other_end(session: Session, asked: list[Asked]) -> Other | None:
    """The special token that the model puts where answers end, and only there; None: there is none."""
    tokenizer, stops = session.tokenizer, session.stops.ids
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    specials = sorted((added | set(tokenizer.all_special_ids)) - set(stops))
    if not specials:
        return None
    at_ends, inside = [], []
    for one in asked:
        if one.reference is None:  # of prompts no answer is known
            return None
        begun = int(one.prompt.ids_T.size)
        share_NS = _shares(session, one.reference, begun, [*specials, *stops])
        at_ends.append(share_NS[-1])
        inside.append(share_NS[:-1])
    end_S, inside_S = torch.stack(at_ends).mean(0), torch.cat(inside)
    if not inside_S.numel() or float(end_S[len(specials) :].sum()) > UNLIKELY:
        return None
    best = int(end_S[: len(specials)].argmax())
    if float(end_S[best]) < LIKELY or float(inside_S[:, best].mean()) > UNLIKELY:
        return None
    return Other(specials[best], float(end_S[best]))


@torch.no_grad()
def _shares(session: Session, sample: Sample, begun: int, ids: list[int]) -> Tensor:
    """Probabilities of ``ids`` at each token from ``begun`` on: [N, S]."""
    at = np.arange(max(1, begun), sample.num_tokens)
    packed = pack([replace(sample, target_at_N=at, weight_N=np.ones(at.size))], ALONE)
    scorer, device = session.scorer, session.ranks.device
    last_T = None if packed.last_T is None else packed.last_T.numpy()
    layout = Layout(packed.reach_T.numpy(), last_T, device)
    packed = packed.to(device)
    with session.quiet():
        logits = scorer.next_logits(
            packed.ids_T, packed.position_ids, layout, packed.predictor_N, packed.media
        ).float()
    return logits.softmax(-1)[:, ids].cpu()
