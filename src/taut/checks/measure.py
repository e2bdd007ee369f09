"""Measurements that several checks share: differences between two forwards, the run's first step and its gradients,
and weights that are put back after a check trained them.

The first step is the loop's own function with the run's own budget, policy, precision and noise, on a small batch. Its
gradients are deleted again; only the norm of each tensor's stays. While the model runs, a hook on the backbone computes
each target's logprob in the plainest way, from all logits of its predictor, for ``model.head`` to compare.

Two gradients of the same loss are compared tensor by tensor:

    error of a tensor = |left - right| / (|left| + FLOOR * |whole gradient| / sqrt(number of tensors))

The floor keeps rounding from deciding about a tensor whose gradient is close to zero (a bias that softmax cancels).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from taut.checks.session import Session, is_text, once
from taut.models import architecture
from taut.models.scorer import score_hidden
from taut.train import distributed
from taut.train.monitors import STEADY_TARGETS
from taut.train.trainer import StepReport, add_gradients
from taut.types import Packed, Sample, Scores

LOGIT_ROWS = 64
"""Maximum rows of logits in memory at a time."""
FLOOR = 0.05
GRADIENT_ROUNDING = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.2}
"""Maximum error of a gradient due to rounding, by compute dtype."""

# -- differences


def gap(left: Tensor, right: Tensor) -> float:
    """The largest difference; infinite if one number is not finite."""
    return largest_gap(left, right)[0]


def largest_gap(left: Tensor, right: Tensor) -> tuple[float, int]:
    """The largest difference, and where it is."""
    if not left.numel():
        return 0.0, 0
    differences = (left - right).abs().nan_to_num(nan=torch.inf)
    at = int(differences.argmax())
    return float(differences.flatten()[at]), at


def drift(left: Tensor, right: Tensor) -> float:
    """The mean difference, as the first step's monitor takes it: rounding hardly moves it if tokens are many, and
    single logprobs differ by a quarter of a nat in bfloat16.
    """
    if not left.numel():
        return 0.0
    mean = (left - right).abs().double().mean().nan_to_num(nan=torch.inf)
    return float(mean) * math.sqrt(min(1.0, left.numel() / STEADY_TARGETS))


def most_different(
    left: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    difference: Callable[[Tensor, Tensor], float] = drift,
) -> tuple[str, float]:
    """The sample whose numbers differ most, and the difference."""
    differences = {name: difference(left[name], right[name]) for name in left}
    return max(differences.items(), key=lambda item: item[1])


def target_name(session: Session, packed: Packed, at: int) -> str:
    """A target of a micro-batch, for people."""
    token = session.inputs.token(int(packed.target_N[at]))
    return f"{packed.sample_ids[int(packed.row_N[at])]}, target {token!r}"


def replace_tokens(
    session: Session, sample: Sample, at: Iterable[int], name: str | None = None
) -> Sample:
    """Copy a sample with other tokens at some places: words of the other text, but no special token, which a template
    may interpret. Placeholders of pictures stay.
    """
    other = session.pair[1]
    special = set(session.tokenizer.all_special_ids)
    other_ids = dict.fromkeys(other.ids_T[is_text(other)].tolist())
    words = [index for index in other_ids if index not in special] or list(other_ids)
    ids_T, is_text_T = sample.ids_T.copy(), is_text(sample)
    for number, place in enumerate(at):
        if is_text_T[place]:
            choices = [index for index in words if index != ids_T[place]]
            choices = choices or [int(ids_T[place]) ^ 1]
            ids_T[place] = choices[number % len(choices)]
    return replace(sample, id=sample.id if name is None else name, ids_T=ids_T)


def first_text_token(sample: Sample, start: int) -> int:
    """The first place from ``start`` on that is not part of a picture; else the last such place of all."""
    places = np.flatnonzero(is_text(sample))
    after = places[places >= start]
    return int(after[0] if after.size else places[-1])


@contextmanager
def outputs_seen(
    modules: Iterable[nn.Module], look: Callable[[nn.Module, Any], object]
) -> Iterator[None]:
    """Within the block, call ``look`` with each of the modules that runs and its (first) output."""

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        look(module, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(hook))
        yield


def layer_outputs(session: Session, packed: Packed) -> dict[str, Tensor]:
    """The output of each decoder layer for a micro-batch, [T, D] in host memory, by its name and class."""
    names, outputs = {it: name for name, it in session.scorer.model.named_modules()}, {}

    def keep(layer: nn.Module, hidden: Any) -> None:
        name = f"{names[layer]} ({type(layer).__name__})"
        outputs[name] = hidden.detach().reshape(-1, hidden.shape[-1]).cpu()

    with session.inference(), outputs_seen(architecture.layers(session.scorer.model), keep):
        session.forward(packed)
    return outputs


def first_layer_that_moves(
    session: Session, left: Packed, right: Packed, tokens: Sequence[int]
) -> str:
    """The first layer whose output at these tokens differs between two micro-batches of one shape."""
    others, index = layer_outputs(session, right), torch.as_tensor(list(tokens))
    for name, hidden_TD in layer_outputs(session, left).items():
        if gap(hidden_TD[index], others[name][index]) > session.exact:
            return f"first seen after {name}"
    return "first seen after the last layer"


# -- weights and gradients, of one rank or of several


def trained(session: Session) -> dict[str, nn.Parameter]:
    """The tensors that train, by name; a critic's names begin with ``critic.``"""
    named = session.scorer.named_parameters()
    return {name.removeprefix("model."): p for name, p in named if p.requires_grad}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return distributed.local(tensor).detach()


def norm(tensor: Tensor) -> float:
    """Norm over all ranks. Not 0 if squares underflow and an entry is not 0."""
    for order in (2.0, torch.inf):
        norm_of_order: Any = torch.linalg.vector_norm(tensor.detach(), order)
        if hasattr(norm_of_order, "full_tensor"):
            norm_of_order = norm_of_order.full_tensor()
        if float(norm_of_order) != 0.0:
            break
    return float(norm_of_order)


def shard_weights(session: Session) -> None:
    """Shard the root's weights, as the optimizer has them and a backward leaves them."""
    root: Any = session.scorer
    if session.ranks.is_sharded:
        root.reshard()


@contextmanager
def gradients_deleted(session: Session) -> Iterator[None]:
    """On exit, delete gradients and restore the mode; gather the root's weights, as a forward without gradient leaves
    them.
    """
    root: Any = session.scorer
    was_training = root.training
    try:
        yield
    finally:
        session.trainer.optimizer.zero_grad(set_to_none=True)
        if session.ranks.is_sharded:
            root.unshard()
        root.train(was_training)


@contextmanager
def weights_put_back(session: Session) -> Iterator[dict[str, Tensor]]:
    """Yield name -> CPU copy of this rank's part of every trained tensor. On exit the weights are restored bit for bit,
    so that a check may train.
    """
    with gradients_deleted(session):
        shard_weights(session)
        copies = {name: local(p).to("cpu", copy=True) for name, p in trained(session).items()}
        try:
            yield copies
        finally:
            restore_weights(session, copies)


@contextmanager
def weights_moved(session: Session, move: float) -> Iterator[dict[str, Tensor]]:
    """The same, with noise on all that trains: ``move`` of a tensor's spread, or of 0.1 if its values are alike."""
    with weights_put_back(session) as copies:
        for number, parameter in enumerate(trained(session).values()):
            # one each: what is whole moves alike on every rank
            generator, part = (
                torch.Generator().manual_seed(session.run.seed + number),
                local(parameter),
            )
            spread = float(part.float().std()) if part.numel() > 1 else 0.0
            noise = torch.randn(part.shape, generator=generator) * move * (spread or 0.1)
            part.add_(noise.to(part.device, part.dtype))
        yield copies


@torch.no_grad()
def restore_weights(session: Session, copies: Mapping[str, Tensor]) -> None:
    """Restore the weights from ``copies``."""
    shard_weights(session)
    for name, parameter in trained(session).items():
        local(parameter).copy_(copies[name])


def gradients_of(session: Session, backward: Callable[[], object]) -> dict[str, Tensor]:
    """The gradient of every trained tensor that ``backward`` leaves; taken out of ``.grad``."""
    with gradients_deleted(session):
        backward()
        return {name: p.grad for name, p in trained(session).items() if p.grad is not None}


def most_different_gradient(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> tuple[str, float]:
    """The tensor whose gradients differ most, and its error. A tensor that only one side has differs infinitely."""
    norms = {name: norm(gradient) for name, gradient in left.items()}
    floor = FLOOR * math.hypot(*norms.values()) / math.sqrt(max(1, len(norms)))
    worst, worst_error = "no tensor", 0.0
    for name in dict.fromkeys([*left, *right]):
        error = math.inf
        if name in left and name in right:
            error = norm(left[name] - right[name]) / max(norms[name] + floor, 1e-300)
        if not error <= worst_error:
            worst, worst_error = name, error
    return worst, worst_error


# -- the first step


@dataclass
class HeadOutput:
    """The logprobs of a micro-batch's targets, [N], and the hidden states they were computed from."""

    packed: Packed
    hidden_ND: Tensor
    plain_N: Tensor
    """Computed from all logits by log_softmax."""
    recomputed_N: Tensor
    """Computed by the path that recomputes logits in backward."""
    logp_N: Tensor | None = None
    """Computed by the path that the run takes."""


@dataclass
class FirstStep:
    """One forward and backward of ``session.trees``."""

    report: StepReport | None = None
    """Report of the step; None if nothing that trains affects the loss."""
    norms: dict[str, float] = field(default_factory=dict)
    """Trained tensor -> norm of its gradient, over all ranks. Tensors without a gradient are absent."""
    absent: list[str] = field(default_factory=list)
    """Trained tensors without a gradient."""
    stray: list[str] = field(default_factory=list)
    """Tensors with a gradient that the optimizer does not have."""
    heads: list[HeadOutput] = field(default_factory=list)
    """Head outputs of this rank's micro-batches; empty with a scalar head."""


@once
def first_step(session: Session) -> FirstStep:
    """Measure the first step, once; gradients are deleted on return."""
    trainer, step = session.trainer, FirstStep()
    with gradients_deleted(session):
        try:
            with _watched_head(session, step.heads):
                step.report = add_gradients(trainer, session.trees, 1)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            step.absent = list(trained(session))
            return step
        for name, parameter in trained(session).items():
            if parameter.grad is None:
                step.absent.append(name)
            else:
                step.norms[name] = norm(parameter.grad)
        in_optimizer = {id(parameter) for parameter in trainer.trained}
        for name, parameter in session.scorer.named_parameters():
            if parameter.grad is not None and id(parameter) not in in_optimizer:
                step.stray.append(name.removeprefix("model."))
                parameter.grad = None  # the optimizer would not delete it
    return step


def head_of(session: Session) -> architecture.HeadSpec:
    """The head, at the temperature at which the loss reads it."""
    temperature = session.trainer.source.loss.wants.temperature
    return replace(architecture.head(session.scorer.model), temperature=temperature)


@contextmanager
def _watched_head(session: Session, heads: list[HeadOutput]) -> Iterator[None]:
    """Record the inputs and outputs of the head. A sharded head is whole only while the scorer runs."""
    scorer, batches = session.scorer, list[Packed]()
    if session.is_scalar:
        yield
        return

    def compute_plainly(_: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # a reference's forward, or a statistic's
            return
        packed, hidden = batches[-1], output.last_hidden_state
        with torch.no_grad():
            spec = head_of(session)
            hidden_ND = hidden.squeeze(0).index_select(0, packed.predictor_N.to(hidden.device))
            target_N = packed.target_N.to(hidden.device)
            chunks = (torch.split(whole, LOGIT_ROWS) for whole in (hidden_ND, target_N))
            plain = [
                torch.log_softmax(spec.logits(some_ND), -1).gather(1, some_N[:, None]).squeeze(1)
                for some_ND, some_N in zip(*chunks, strict=True)
            ]
            recomputed_N = score_hidden(hidden_ND, target_N, spec).logp_N
        heads.append(HeadOutput(packed, hidden_ND, torch.cat(plain), recomputed_N))

    def keep_scores(_: nn.Module, __: Any, scores: Scores) -> None:
        if torch.is_grad_enabled():
            heads[-1].logp_N = scores.logp_N.detach()

    with (
        scorer.register_forward_pre_hook(lambda _, args: batches.append(args[0])),
        architecture.decoder(scorer.model).register_forward_hook(compute_plainly),
        scorer.register_forward_hook(keep_scores),
    ):
        yield
