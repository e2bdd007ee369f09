"""The Scorer: a micro-batch in, the log-probability of each listed target out.

One module owns the backbone and the head. The backbone runs once over the flat tokens with the
layout as a keyword; ``lm_head`` runs on predictors only, in chunks, and [N, V] never exists:

    z = softcap(scale * (h W^T + b)) / temperature
    logp = log_softmax(z)[target]        entropy = -sum p log p

log-softmax is taken in at least float32. Two ways through the head:

- with ``linear_N`` (the loss is sum of linear_N * logp_N, as in SFT) the gradient is formed in the forward, with three
  matrix products instead of four. ``Scores.linear_sum`` carries it; ``logp_N`` is a number without gradient.
- otherwise ``logp_N`` and ``entropy_N`` carry gradients. The log-probabilities of a micro-batch that is one chunk are
  kept for the backward pass, which needs this memory anyway; the logits of more chunks are computed again.

Where a loss wants the divergence from a teacher, the teacher scores the micro-batch before the backbone runs
(models/teacher.py), and the gradient is formed in the forward; ``linear_N`` is then [2, N], the coefficients of
``logp_N`` and of ``divergence_N``, or [1, N], those of ``divergence_N`` alone. Without ``linear_N`` both are numbers
without gradient.

Where a loss wants a scalar, it comes from the critic if there is one (models/heads.py), else from the model's own
scalar head; one forward computes it together with the log-probabilities.

The Scorer is the root of sharding: inner modules are not called from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from taut.attention.decode import Decoding
from taut.attention.extension import Extension
from taut.attention.layout import Layout
from taut.models.architecture import (
    HeadSpec,
    device_of,
    head,
    hidden_states,
    ready,
    run_backbone,
)
from taut.models.attention_backends import make_ahead
from taut.models.cpu.cpu_matmul import product_into
from taut.models.experts import RouterRecorder
from taut.models.heads import Critic, OwnCritic, scalar, scalar_head
from taut.types import Divergence, Media, Packed, Scores, Wants, to_device

MIN_CHUNK_ROWS = 256
"""Smaller chunks lose accuracy in 16-bit weight gradients and speed in every dtype."""
CHUNK_ELEMENTS = 2**24
"""Logits that exist at a time, unless MIN_CHUNK_ROWS makes it more."""
CHUNK_SHARE = 64
"""On a GPU, logits may take 1 / CHUNK_SHARE of its memory. Larger chunks are faster: each reads the head's weights, and
reads and writes their gradient. The share is of all memory: by the
memory that is free, rounding would depend on what else runs."""
_traced_memory: ContextVar[int | None] = ContextVar("traced_memory", default=None)


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's distributions at the targets of one micro-batch (models/teacher.py)."""

    how: Divergence

    @property
    def num_rows(self) -> int | None:
        """Rows of the vocabulary that are compared; None: all."""
        return None

    @property
    def chunk_rows(self) -> int | None:
        """Limit on the rows of a chunk; None: the student's."""
        return None

    def close(self) -> None:
        """Free what is needed for comparing only."""

    def compare(self, rows: slice, s: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence of each row from ``s`` [rows, V], and its gradient with respect to the logits over T."""
        raise NotImplementedError


class Teacher(Protocol):
    """The distribution that a student is compared with. It is no module, so it is neither trained nor saved."""

    def run(self, packed: Packed, how: Divergence) -> TeacherScores:
        """Score a micro-batch, without gradient."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block, e.g. without dropout; afterwards the mode from before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Scorer(nn.Module):
    """Scores micro-batches with a Hugging Face causal language model that has a taut attention."""

    def __init__(
        self,
        model: nn.Module,
        teacher: Teacher | None = None,
        critic: Critic | None = None,
        routers: RouterRecorder | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher
        self.critic = critic
        self.routers = routers

    @property
    def device(self) -> torch.device:
        return device_of(next(self.model.parameters()))

    def ready(self, packed: Packed) -> Packed:
        """The micro-batch after the host's part of a forward, which may be done while the previous micro-batch runs on
        the device.
        """
        packed = ready(self.model, packed)
        assert isinstance(packed.layout, Layout)
        make_ahead(self.model, packed.layout)
        return packed

    def forward(
        self,
        packed: Packed,
        linear_N: Tensor | None = None,
        wants: Wants = Wants(),  # noqa: B008 (a NamedTuple)
    ) -> Scores:
        """Scores of the N listed targets and the R reads; see the module docstring for ``linear_N``."""
        # the teacher runs first, so that its hidden states are not kept
        teacher_scores = None
        if wants.divergence is not None:
            assert self.teacher is not None, "a divergence is wanted, and there is no teacher"
            teacher_scores = self.teacher.run(packed, wants.divergence)
        # a critic with a model of its own
        scalar_R, critic = None, self.critic
        if wants.scalar and isinstance(critic, OwnCritic):
            scalar_R = critic(packed)
            if not (wants.logp or wants.routers):
                return Scores(scalar_R.new_empty(0), scalar_R=scalar_R)
        # the backbone, once
        recording: AbstractContextManager[None] = nullcontext()
        prob_LE = count_LE = None
        if wants.routers:
            assert self.routers is not None, "routers are wanted, and none are recorded"
            recording = self.routers.recording(*to_device([packed.num_samples_T], self.device))
        with recording:
            packed, hidden_TD = run_backbone(self.model, packed)
        if wants.routers and self.routers is not None:
            prob_LE, count_LE = self.routers.sums()
        # a scalar head on the same hidden states
        if wants.scalar and scalar_R is None:
            read_RD = hidden_TD.index_select(0, packed.read_R)
            read = partial(scalar, spec=scalar_head(self.model)) if critic is None else critic
            scalar_R = read(read_RD)
        if not wants.logp:
            nothing = hidden_TD.new_empty(0)
            return Scores(nothing, None, None, scalar_R, None, prob_LE, count_LE)
        # logprobs of the targets, in chunks
        hidden_ND = hidden_TD.index_select(0, packed.predictor_N)
        if linear_N is not None:
            (linear_N,) = to_device([linear_N], self.device)
        spec = replace(head(self.model), temperature=wants.temperature)
        target_N = packed.target_N
        scores = score_hidden(
            hidden_ND, target_N, spec, linear_N, wants.entropy, teacher_scores, wants.predicted
        )
        if teacher_scores is not None:
            teacher_scores.close()
        return scores._replace(scalar_R=scalar_R, router_prob_LE=prob_LE, router_count_LE=count_LE)

    def inside(self, function: Callable[[nn.Module], Tensor]) -> Tensor:
        """Call ``function(model)`` while the model's weights are gathered, for computations other than scoring."""
        return function(self.model)

    def next_logits(
        self,
        ids_T: Tensor,
        position_ids: Tensor,
        layout: Layout | Decoding | Extension,
        read_R: Tensor,
        media: Sequence[Media] = (),
    ) -> Tensor:
        """Logits [R, V] of the token after each in ``read_R``, in at least float32, for engines.

        ``media``: the pictures among the tokens.
        """
        device = self.device
        ids_T, position_ids, read_R = to_device([ids_T, position_ids, read_R], device)
        hidden_TD = hidden_states(self.model, ids_T, position_ids, layout, media)
        return head(self.model).logits(hidden_TD.index_select(0, read_R))

    def target_logits(self, packed: Packed) -> Tensor:
        """Logits [N, V] of each listed target's predictor, as ``next_logits``."""
        last_T = None if packed.last_T is None else packed.last_T.numpy()
        layout = Layout(packed.reach_T.numpy(), last_T, self.device)
        return self.next_logits(
            packed.ids_T, packed.position_ids, layout, packed.predictor_N, packed.media
        )


def score_hidden(
    hidden_ND: Tensor,
    target_N: Tensor,
    spec: HeadSpec,
    linear_N: Tensor | None = None,
    with_entropy: bool = False,
    teacher: TeacherScores | None = None,
    with_predicted: bool = False,
) -> Scores:
    """The head alone: predictors' hidden states -> scores of the targets. With a teacher ``linear_N`` is [2, N] or
    [1, N]; predicted tokens are for evaluation, without it.
    """
    rows = None if spec.rows is None else spec.rows.weight_RD
    inputs = (hidden_ND, spec.weight, spec.bias, rows)
    if linear_N is None and teacher is None and not with_predicted:
        logp_N, entropy_N = _Head.apply(*inputs, spec, target_N, with_entropy)  # type: ignore[no-untyped-call]
        return Scores(logp_N, entropy_N if with_entropy else None)
    assert not with_entropy, (
        "entropy is computed neither with a divergence nor where the gradient is formed in the forward"
    )
    if linear_N is None:
        predicted_N = torch.empty_like(target_N) if with_predicted else None
        with torch.no_grad():
            logp_N, divergence_N = _by_chunks(
                Chunks(*inputs, spec), target_N, teacher, predicted=predicted_N
            )
        return Scores(logp_N, divergence_N=divergence_N, predicted_N=predicted_N)
    total, logp_N, divergence_N = LinearHead.apply(*inputs, spec, target_N, linear_N, teacher)  # type: ignore[no-untyped-call]
    return Scores(logp_N, linear_sum=total, divergence_N=divergence_N)


def chunk_elements(device: torch.device, dtype: torch.dtype) -> int:
    """How many logits of a dtype may exist at a time."""
    memory = _traced_memory.get()
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return max(CHUNK_ELEMENTS, (memory or 0) // (CHUNK_SHARE * dtype.itemsize))


@contextmanager
def traced_for(gpu_memory: int | None) -> Iterator[None]:
    """Within the block, chunks have the size that they have on a GPU with this memory; None: on a CPU. For tensors
    without contents.
    """
    token = _traced_memory.set(gpu_memory)
    try:
        yield
    finally:
        _traced_memory.reset(token)


class Chunks:
    """The arithmetic of the head on a chunk of rows, shared by both ways through it."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Tensor | None,
        spec: HeadSpec,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype``: of the products; by default autocast's, else that of hidden states and weight, of which a frozen
        weight may be the narrower one.
        """
        device_type = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
        if dtype is None and is_autocast:
            dtype = torch.get_autocast_dtype(device_type)
        self.dtype = dtype or torch.promote_types(hidden.dtype, weight.dtype)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.hidden, self.weight = hidden.to(self.dtype), weight.to(self.dtype)
        self.bias, self.spec = bias, spec
        self.trained = None if trained is None else trained.to(self.dtype)
        self.index = None if spec.rows is None else spec.rows.index_R
        num_elements = chunk_elements(hidden.device, self.wide)
        self.num_rows = max(MIN_CHUNK_ROWS, num_elements // weight.shape[0])
        self._buffers: dict[str, Tensor] = {}
        """Reused by each chunk: fresh memory of this size costs more than the arithmetic in it."""
        self.slices = self.slices_of(self.num_rows)

    def slices_of(self, num_rows: int | None) -> list[slice]:
        """The chunks, of at most ``num_rows`` rows."""
        rows = min(self.num_rows, num_rows or self.num_rows)
        return [slice(at, at + rows) for at in range(0, max(1, self.hidden.shape[0]), rows)]

    def logits(self, rows: slice) -> Tensor:
        """[rows, V] after bias, scale and softcap; valid until the next chunk's, or until ``log_probs``."""
        hidden = self.hidden[rows]
        z = self._buffer("logits", hidden.shape[0])
        if self.dtype == self.wide:
            product_into(z, hidden, self.weight)
        else:
            z.copy_(hidden @ self.weight.T)
        if self.trained is not None:
            z[:, self.index] = (hidden @ self.trained.T).to(self.wide)
        if self.bias is not None:
            z += self.bias
        if self.spec.scale != 1.0:
            z *= self.spec.scale
        if self.spec.softcap is not None:
            z = torch.tanh_(z.div_(self.spec.softcap)).mul_(self.spec.softcap)
        if self.spec.temperature != 1.0:
            z /= self.spec.temperature
        return z

    def log_probs(self, z: Tensor) -> Tensor:
        """log_softmax of the logits, [rows, V]; valid until the next chunk's. It takes the place of the logits, except
        where the gradient of a softcap needs them.
        """
        out = z if self.spec.softcap is None else self._buffer("log_probs", z.shape[0])
        return torch.log_softmax(z, dim=-1, out=out)

    def _buffer(self, name: str, num_rows: int) -> Tensor:
        if name not in self._buffers:
            shape = (min(self.num_rows, self.hidden.shape[0]), self.weight.shape[0])
            self._buffers[name] = self.hidden.new_empty(shape, dtype=self.wide)
        return self._buffers[name][:num_rows]

    def to_raw(self, grad: Tensor, z: Tensor) -> Tensor:
        """The gradient with respect to ``h W^T + b`` from the one with respect to the logits ``z``; in place."""
        temperature = self.spec.temperature
        if self.spec.softcap is not None:
            grad.mul_(1 - (z * (temperature / self.spec.softcap)) ** 2)
        factor = self.spec.scale / temperature
        return grad.mul_(factor) if factor != 1.0 else grad


class Sums:
    """Gradients of hidden, weight, bias and the rows that train on their own, accumulated over chunks where needed."""

    def __init__(self, chunks: Chunks, needs: tuple[bool, ...], weight: Tensor) -> None:
        wide = chunks.wide
        self.chunks = chunks
        self.hidden = torch.empty_like(chunks.hidden) if needs[0] else None
        self.weight = torch.empty_like(weight, dtype=wide) if needs[1] else None
        self.is_first = True
        self.bias = None
        if chunks.bias is not None and needs[2]:
            self.bias = torch.zeros_like(chunks.bias, dtype=wide)
        self.trained = None
        if chunks.trained is not None:
            self.trained = torch.zeros_like(chunks.trained, dtype=wide)

    def like(
        self, hidden: Tensor, weight: Tensor, trained: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients, in the dtypes of their inputs."""
        return (
            _cast(self.hidden, hidden),
            _cast(self.weight, weight),
            self.bias,
            _cast(self.trained, trained),
        )

    def add(self, rows: slice, grad: Tensor) -> None:
        """``grad`` [rows, V]: gradient with respect to h W^T + b; its memory is reused."""
        if self.bias is not None:
            self.bias += grad.sum(0)
        narrow = grad.to(self.chunks.dtype)
        hidden, trained, index = self.chunks.hidden[rows], self.chunks.trained, self.chunks.index
        taken = None
        if self.trained is not None:  # the table has no gradient at rows that train on their own
            assert index is not None
            taken = narrow.index_select(1, index)
            self.trained += taken.T @ hidden
            narrow.index_fill_(1, index, 0.0)
        if self.hidden is not None:
            product_into(self.hidden[rows], narrow, self.chunks.weight.T)
            if taken is not None and trained is not None:
                self.hidden[rows] += taken @ trained
        if self.weight is not None:
            # += grad^T hidden; the first chunk writes, so nothing is zeroed before
            if narrow.dtype != self.weight.dtype:
                product = narrow.T @ hidden
                self.weight.copy_(product) if self.is_first else self.weight.add_(product)
            elif self.is_first:
                torch.mm(narrow.T, hidden, out=self.weight)
            else:
                self.weight.addmm_(narrow.T, hidden)
        self.is_first = False


class _Head(torch.autograd.Function):
    """logp and entropy of the targets; the logits of more than one chunk are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Tensor | None,
        spec: HeadSpec,
        target: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        chunks = Chunks(hidden, weight, bias, trained, spec)
        logp = hidden.new_empty(hidden.shape[0], dtype=chunks.wide)
        entropy = torch.zeros_like(logp)
        every = None
        for rows in chunks.slices:
            every = chunks.log_probs(chunks.logits(rows))
            logp[rows] = every.gather(1, target[rows, None]).squeeze(1)
            if with_entropy:
                entropy[rows] = -(every.exp() * every).sum(1)
        is_kept = len(chunks.slices) == 1 and any(ctx.needs_input_grad) and spec.softcap is None
        ctx.every = every if is_kept else None
        ctx.save_for_backward(hidden, weight, bias, trained, entropy)
        ctx.spec, ctx.target, ctx.dtype = spec, target, chunks.dtype
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, trained, entropy = ctx.saved_tensors
        target = ctx.target
        grad_logp, grad_entropy = grads
        if grad_logp is None:
            grad_logp = torch.zeros_like(entropy)
        chunks = Chunks(hidden, weight, bias, trained, ctx.spec, ctx.dtype)
        sums = Sums(chunks, ctx.needs_input_grad[:3], weight)
        kept, ctx.every = ctx.every, None  # overwritten here: a second backward computes them again
        for rows in chunks.slices:
            z = chunks.logits(rows) if kept is None else kept
            every = chunks.log_probs(z) if kept is None else kept
            share = grad_logp[rows, None].to(every.dtype)
            if grad_entropy is None:
                grad = every.exp_().mul_(-share)
            else:
                p = every.exp()
                grad = -share * p
                grad -= grad_entropy[rows, None] * p * (every + entropy[rows, None])
            grad.scatter_add_(1, target[rows, None], share)
            sums.add(rows, chunks.to_raw(grad, z))
        return (*sums.like(hidden, weight, trained), None, None, None)


class LinearHead(torch.autograd.Function):
    """sum of linear_N * logp_N, with its gradient formed in the forward; with a teacher, of both coefficients times
    logp_N and divergence_N.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Tensor | None,
        spec: HeadSpec,
        target: Tensor,
        linear: Tensor,
        teacher: TeacherScores | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        chunks = Chunks(hidden, weight, bias, trained, spec)
        linear = linear.to(chunks.wide)
        sums = Sums(chunks, ctx.needs_input_grad[:3], weight)
        logp, divergence = _by_chunks(chunks, target, teacher, linear, sums)
        ctx.save_for_backward(*sums.like(hidden, weight, trained))
        if divergence is None:
            ctx.mark_non_differentiable(logp)
            return (linear * logp).sum(), logp, None
        ctx.mark_non_differentiable(logp, divergence)
        total = (linear[-1] * divergence).sum()
        if linear.shape[0] == 2:
            total = (linear[0] * logp).sum() + total
        return total, logp, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0]
        # no pass over [V, D] for a factor of 1
        is_scaled = factor.device.type != "cpu" or float(factor) != 1.0
        saved = ctx.saved_tensors
        scaled = [grad.mul_(factor) if is_scaled and grad is not None else grad for grad in saved]
        return (*scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled)))


def _by_chunks(
    chunks: Chunks,
    target: Tensor,
    teacher: TeacherScores | None,
    linear: Tensor | None = None,
    sums: Sums | None = None,
    predicted: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """logp of every target, and its divergence from a teacher; with ``linear``, their gradient is added to ``sums``.
    The likeliest tokens are written to ``predicted``.
    """
    logp = chunks.hidden.new_empty(target.shape[0], dtype=chunks.wide)
    divergence = None if teacher is None else torch.empty_like(logp)
    for rows in chunks.slices_of(None if teacher is None else teacher.chunk_rows):
        z = chunks.logits(rows)
        every = chunks.log_probs(z)
        logp[rows] = every.gather(1, target[rows, None]).squeeze(1)
        if predicted is not None:
            predicted[rows] = every.argmax(1)
        grad = None  # of the divergence, on the rows of the vocabulary that are compared
        if teacher is not None and divergence is not None:
            temperature, num_rows, s = teacher.how.temperature, teacher.num_rows, every
            if temperature != 1.0 or num_rows not in (None, every.shape[1]):
                s = (every[:, :num_rows] / temperature).log_softmax(-1)
            divergence[rows], grad = teacher.compare(rows, s)
            if linear is not None:
                grad *= linear[-1, rows, None] / temperature
        if linear is None or sums is None:
            continue
        if grad is None or linear.shape[0] == 2:
            # the gradient of logp, on all rows of the vocabulary
            share = (linear if grad is None else linear[0])[rows, None]
            whole = every.exp_().mul_(-share)
            whole.scatter_add_(1, target[rows, None], share)
            if grad is not None:
                whole[:, : grad.shape[1]] += grad
            grad = whole
        elif missing := every.shape[1] - grad.shape[1]:
            grad = nn.functional.pad(grad, (0, missing))
        sums.add(rows, chunks.to_raw(grad, z))
    return logp, divergence


def _cast(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None or like is None else grad.to(like.dtype)
