"""The divergence of a student's next-token distribution from its teacher's, at each target, inside the chunked head.

With logits z_s, z_t of student and teacher and a temperature T, over the rows both vocabularies have,

    s = log_softmax(z_s / T)     t = log_softmax(z_t / T)     p_s = exp s     p_t = exp t

    forward   KL(p_t || p_s) = sum p_t (t - s)                      (Hinton et al., arXiv 1503.02531, less a constant)
    reverse   KL(p_s || p_t) = sum p_s (s - t)                      (MiniLLM, arXiv 2306.08543)
    js        b KL(p_t || m) + (1 - b) KL(p_s || m),   m = b p_t + (1 - b) p_s,   0 < b < 1   (GKD, arXiv 2306.13649)

js / b tends to forward as b goes to 0, and js / (1 - b) to reverse as b goes to 1; js itself tends to 0 at both ends,
so these are kinds of their own. A term of probability 0 counts 0. ``divergence_N`` is this number; the factor T^2,
which keeps gradients alike whatever T is, belongs to the loss (losses/supervised.py).

A list of the teacher's k likeliest tokens and their log-probabilities can replace the teacher:

    bucket         all other tokens are one outcome: the divergence, of any kind, of two distributions over the k listed
                   tokens and the rest, whose probability is the remaining mass r_s or r_t. At most the whole
                   divergence, equal to it where all tokens are listed, and 0 only where the student gives every listed
                   token the teacher's probability. r_t is held above the rounding error of a sum, so that reverse is
                   finite. T = 1: a list does not determine the remaining mass at another T
    renormalize    forward only: the teacher has the listed tokens only, softmax(t / T) over them; the student keeps all
                   of its own, so it learns to give the others nothing

A row is [V] of student and teacher, and exists in chunks only. The gradient with respect to the student's logits is
formed in the forward (as in scorer.LinearHead), of the divergence and of log-probabilities at T = 1 together:

    d forward = p_s - p_t
    d reverse = p_s (s - t - reverse)
    d js      = (1 - b) p_s (s - log m - sum p_s (s - log m))                                              each over T

With a bucket these are the gradients of the listed tokens; each other token has the bucket's, in proportion to its
share of the student's bucket.

The teacher has its own backbone and head, of any width, and runs on the same micro-batch in the same layout, just
before the student: nothing of it is kept between micro-batches. It is no part of the student, and sharded by itself.
Where its vocabulary has more or fewer rows, both distributions are over the tokenizer's ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from taut.models.architecture import HeadSpec, head, run_backbone
from taut.models.scorer import Chunks, Scorer, TeacherScores, score_hidden
from taut.types import TEACHER_LOGP, TOP_IDS, TOP_LOGP, Divergence, Packed

ROUNDING = 8
"""Remaining mass below this many times the dtype's epsilon is the rounding error of a sum that should be 1."""


class ModelTeacher:
    """A frozen model. ``num_rows``: the rows that its vocabulary and the student's have in common; None: all.
    ``shard``: divides it among ranks, ``reshard``: drops what a forward has gathered of it.
    """

    def __init__(
        self,
        model: nn.Module,
        num_rows: int | None = None,
        shard: Callable[[nn.Module], None] = lambda _: None,
        reshard: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self.scorer = Scorer(model).eval().requires_grad_(requires_grad=False)
        self.num_rows = num_rows
        shard(self.scorer)
        self._reshard = partial(reshard, self.scorer)

    @torch.no_grad()
    def run(self, packed: Packed, how: Divergence) -> WholeDistribution:
        specs: list[HeadSpec] = []

        def hidden(model: nn.Module) -> Tensor:
            ready, hidden_TD = run_backbone(model, packed)
            specs.append(head(model))  # whole until the distribution is closed
            return hidden_TD.index_select(0, ready.predictor_N)

        hidden_ND = self.scorer.inside(hidden)
        (spec,) = specs
        chunks = Chunks(hidden_ND, spec.weight, spec.bias, None, spec)
        return WholeDistribution(how, chunks, self.num_rows, self._reshard)


class ListedTeacher:
    """A teacher's likeliest tokens at each target, stored with the data: streams of the micro-batch."""

    def run(self, packed: Packed, how: Divergence) -> LikeliestTokens:
        assert how.kind == "forward" or how.tail == "bucket", "renormalize is forward only"
        return LikeliestTokens(how, packed.streams[TOP_IDS].long(), packed.streams[TOP_LOGP])


@dataclass(frozen=True)
class WholeDistribution(TeacherScores):
    """The teacher's distribution over the whole vocabulary."""

    chunks: Chunks
    vocabulary: int | None = None
    """Rows of the vocabulary that the student's has too; None: all."""
    reshard: Callable[[], None] = lambda: None
    """Drops the gathered weights of the head."""

    @property
    def num_rows(self) -> int | None:
        return self.vocabulary

    @property
    def chunk_rows(self) -> int:
        return self.chunks.num_rows

    def close(self) -> None:
        self.reshard()

    def compare(self, rows: slice, s: Tensor) -> tuple[Tensor, Tensor]:
        z = self.chunks.logits(rows)
        if self.how.temperature != 1.0:
            z /= self.how.temperature
        t = self.chunks.log_probs(z)
        if self.num_rows not in (None, t.shape[1]):
            t = t[:, : self.num_rows].log_softmax(-1)
        t = t.to(s.dtype)
        assert t.shape == s.shape, "teacher and student are compared over the same rows"
        return _compared(self.how, s, t, t.exp())


@dataclass(frozen=True)
class LikeliestTokens(TeacherScores):
    """The teacher's likeliest tokens at each target."""

    ids_Nk: Tensor
    logp_Nk: Tensor

    def compare(self, rows: slice, s: Tensor) -> tuple[Tensor, Tensor]:
        ids, t = self.ids_Nk[rows].to(s.device), self.logp_Nk[rows].to(s)
        listed = s.gather(1, ids)
        if self.how.tail == "renormalize":
            t = (t / self.how.temperature).log_softmax(-1)
            p_t = t.exp()
            return _expected(p_t, t - listed)[0], s.exp().scatter_add_(1, ids, -p_t)
        # of the k listed tokens and the rest
        floor = ROUNDING * torch.finfo(s.dtype).eps
        left = -t.logsumexp(1, keepdim=True).expm1()
        t = torch.cat([t, left.clamp_min(floor).log()], dim=1)
        p_t = torch.cat([t[:, :-1].exp(), left.masked_fill(left < floor, 0.0)], dim=1)
        others = s.scatter(1, ids, -math.inf)
        left_s = others.logsumexp(1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)
        divergence, grad = _compared(self.how, torch.cat([listed, left_s], dim=1), t, p_t)
        others = others.sub_(left_s).exp_().mul_(grad[:, -1:])
        return divergence, others.scatter_(1, ids, grad[:, :-1])


def _compared(how: Divergence, s: Tensor, t: Tensor, p_t: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence of each row, and its gradient with respect to the student's logits. ``t`` is overwritten."""
    p_s = s.exp()
    if how.kind == "forward":
        return _expected(p_t, t.sub_(s))[0], p_s.sub_(p_t)
    if how.kind == "reverse":
        divergence, each = _expected(p_s, t.neg_().add_(s))
        return divergence, each.sub_(p_s.mul_(divergence[:, None]))
    beta = how.beta
    m = torch.lerp(p_s, p_t, beta).clamp_min_(torch.finfo(s.dtype).tiny).log_()
    teachers, _ = _expected(p_t, t.sub_(m))
    students, each = _expected(p_s, torch.sub(s, m, out=m))
    grad = each.sub_(p_s.mul_(students[:, None])).mul_(1 - beta)
    return beta * teachers + (1 - beta) * students, grad


def _expected(p: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of p times value over each row, and the products, in value's memory; 0 wherever p is 0."""
    each = value.mul_(p)
    total = each.sum(1)
    # A GPU is not asked: it would have to be waited for.
    if total.device.type != "cpu" or not torch.isfinite(total).all():
        total = each.masked_fill_(p == 0, 0.0).sum(1)
    return total, each


@torch.no_grad()
def teacher_streams(
    scorer: Scorer, packed: Packed, num: int, num_ids: int, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Score the targets of a micro-batch, as streams: the logprob of each at a temperature, and the ``num`` likeliest
    of the first ``num_ids`` tokens with their logprobs at temperature 1.
    """

    def read(model: nn.Module) -> Tensor:
        ready, hidden_TD = run_backbone(model, packed)
        hidden_ND, spec = hidden_TD.index_select(0, ready.predictor_N), head(model)
        warm = replace(spec, temperature=temperature)
        columns = [score_hidden(hidden_ND, ready.target_N, warm).logp_N[:, None]]
        if num:
            ids_Nk, logp_Nk = likeliest(hidden_ND, spec, num, num_ids)
            columns += [ids_Nk.to(logp_Nk), logp_Nk]  # float32 counts to 16 million
        return torch.cat(columns, dim=1)

    table = scorer.inside(read)
    streams = {TEACHER_LOGP: table[:, 0]}
    if num:
        streams |= {TOP_IDS: table[:, 1 : num + 1], TOP_LOGP: table[:, num + 1 :]}
    return streams


@torch.no_grad()
def likeliest(hidden_ND: Tensor, spec: HeadSpec, num: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """The ``num`` likeliest of the first ``num_ids`` tokens at each row of ``hidden_ND``, and their log-probabilities
    among all tokens: the streams of a ``ListedTeacher``.
    """
    rows = None if spec.rows is None else spec.rows.weight_RD
    chunks = Chunks(hidden_ND, spec.weight, spec.bias, rows, spec)
    ids_Nk = torch.empty(hidden_ND.shape[0], num, dtype=torch.int64, device=hidden_ND.device)
    logp_Nk = torch.empty_like(ids_Nk, dtype=chunks.wide)
    for some in chunks.slices:
        every = chunks.log_probs(chunks.logits(some))[:, :num_ids]
        logp_Nk[some], ids_Nk[some] = every.topk(num, dim=1)
    return ids_Nk, logp_Nk
