"""The loss and its gradient, on the small batch of ``session.trees``: dtypes, what trains and gets a gradient, and the
step's sums against its samples one by one.

Samples alone go through the library's own attention, head and automatic differentiation. ``alone_loss`` is the loss's
own formula on such numbers, in one list in which nothing is shared or cut; a reference that is the policy's start gives
the policy's numbers before the first update.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from taut.checks import measure
from taut.checks.attention import library_numbers
from taut.checks.registry import Finding, check, failed, passed, skip_if, skipped
from taut.checks.session import Session, num_tokens
from taut.data.packing import ALONE, PackPolicy, pack
from taut.losses.loss import count_units
from taut.methods.settings import STREAM
from taut.models import architecture
from taut.models.heads import OwnCritic, scalar_head
from taut.models.lora.adapters import is_adapted
from taut.models.quantized.frozen_storage import stored_parameters
from taut.models.scorer import score_hidden
from taut.models.self_test import library_attention
from taut.models.settings import CRITIC, RouterConfig
from taut.train.monitors import STEADY_TARGETS, TOLERANCE
from taut.train.trainer import Scored, Trainer, add_gradients
from taut.types import Sample, Scores

# -- before the first step


@check("loss.dtype", after=["model.noise", "model.head"])
def every_tensor_is_in_its_dtype(session: Session) -> Finding:
    """Is every tensor in the intended dtype?

    What is updated, RoPE's frequencies, and every matrix product of a forward:

        float64, float32    parameters, products and logprobs are in it
        bfloat16            parameters, RoPE and logprobs in float32, products in bfloat16: under autocast, or by the
                            weights that are gathered on several ranks

    Weights that do not train may be stored otherwise (frozen_dtype); products with them are in the run's dtype.
    A product in a narrower dtype than was asked for is a silent cast; its layer is named.
    """
    parameters, wanted, many = session.loaded.dtype.parameters, session.dtype, session.quantity.many
    measure.shard_weights(session)  # they are narrow while they are gathered
    model, storage = session.scorer.model, session.loaded.storage
    stored = set() if storage is None else stored_parameters(session.loaded.model, storage)
    # what is stored
    narrow = [
        f"{name} is in {dtype_name(parameter.dtype)}"
        for name, parameter in model.named_parameters()
        if _is_narrower(parameter.dtype, parameters)
        and (parameter.requires_grad or parameter not in stored)
    ]
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):  # may have lost its digits, whatever dtype it is in now
            values = buffer.double()
            # bfloat16 holds every power of two, 1 above all: they say nothing
            values = values[(values > 0) & (torch.frexp(values).mantissa != 0.5)]
            if values.numel() > 1 and bool((values == values.to(torch.bfloat16)).all()):
                narrow.append(f"{name} has the digits of bfloat16")
    if narrow:
        return failed(
            f"{len(narrow)} tensors are narrower than {dtype_name(parameters)}",
            measured=(narrow, "tensors"),
            remedy="small updates and far positions would be rounded away; load the model in float32: remove what "
            "narrows these in its code or config, and please report the model",
        )
    # what is computed, in one forward
    counter = ProductCounter()
    with ExitStack() as hooks, session.inference(), counter:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(counter.entering(name)))
            leave = module.register_forward_hook(counter.leave, always_call=True)
            hooks.enter_context(leave)
        output_dtype = session.forward(pack([session.short_sample], ALONE)).dtype
    products, total = counter.products, counter.products.total()
    lines = {key: f"{key[0]} computes in {dtype_name(key[1])}" for key in products}
    narrow_products = [key for key in products if _is_narrower(key[1], wanted)]
    if narrow_products or _is_narrower(output_dtype, torch.float32):
        number = sum(products[key] for key in narrow_products)
        return failed(
            f"{number} of {total} products are narrower than {dtype_name(wanted)}",
            measured=(number, f"of {total} products"),
            evidence=[lines[key] for key in narrow_products]
            or f"{many} are in {dtype_name(output_dtype)}",
            remedy=f"dtype={dtype_name(wanted)} is not applied there; remove the cast in the model's code, or set "
            "dtype=bfloat16 if that is what you want",
        )
    # products of the dtype that was asked for, and of wider ones
    num_asked = sum(count for (_, dtype), count in products.items() if dtype == wanted)
    if not num_asked:
        return failed(
            f"no product of the model is in {dtype_name(wanted)}",
            measured=(0, f"of {total} products"),
            evidence=[*lines.values()][:3],
            remedy=f"dtype={dtype_name(wanted)} is not applied; set dtype=float32, and please report the model",
        )
    wider = Counter(where.rpartition(".")[2] for where, dtype in products if dtype != wanted)
    kinds = ", ".join(f"{count} {name}" for name, count in wider.most_common(3))
    return passed(
        f"parameters {dtype_name(parameters)}, {num_asked} of {total} products in {dtype_name(wanted)}, {many} "
        f"{dtype_name(output_dtype)}",
        total,
        "products",
        [f"in a wider dtype by the model's own choice: {kinds}"] if kinds else [],
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a float dtype has fewer digits."""
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(than).eps


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """Counts matrix products by the innermost module and the dtype they are computed in."""

    operators = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm"})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[tuple[str, torch.dtype]] = Counter()
        self.modules: list[str] = []

    def entering(self, name: str) -> Any:
        return lambda *_: self.modules.append(name)

    def leave(self, *_: Any) -> None:
        self.modules.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.operators and isinstance(output, Tensor):
            self.products[self.modules[-1] if self.modules else "the head", output.dtype] += 1
        return output


@check("loss.tied", after=["model.trains"])
def embedding_and_head_are_tied_as_configured(session: Session) -> Finding:
    """Are embedding and head one tensor or two, as the model's configuration says?"""
    skip_if(session.is_scalar, "a reward model has no output head")
    model = session.scorer.model
    is_tied, names = architecture.is_tied(model), architecture.table_names(model)
    text_config = session.language.config.get_text_config()
    is_parted = bool(getattr(text_config, "tie_word_embeddings", False)) and not is_tied
    adapters: dict[str, Any] = getattr(model, "peft_config", {}) if is_adapted(model) else {}
    saved_whole = {
        name
        for config in adapters.values()
        for name in getattr(config, "modules_to_save", None) or ()
    }
    if is_parted and not any(name.endswith(saved) for name in names for saved in saved_whole):
        return failed(
            "the configuration ties head and embedding, and they are two tensors",
            measured=(2, "tensors"),
            evidence=[f"{names[0]} and {names[-1]}"],
            remedy="they would train apart, and saving would lose one; set "
            f"lora.modules_to_save={names[:1]}, or tie_word_embeddings=false in the model's config.json",
        )
    # which of the two trains
    head, embedding = (
        architecture.head(model),
        architecture.stored_table(architecture.embedding(model)),
    )
    trains = []
    if embedding is not None and embedding.requires_grad:
        trains.append("the embedding trains")
    if head.weight.requires_grad and head.weight is not embedding:
        trains.append("the head trains")
    if head.rows is not None:
        trains.append(f"{len(head.rows.index_R)} rows train")
    says = "one tensor" if is_tied else "two tensors"
    notes = ["the adapter parts them; the merged model is saved untied"] if is_parted else []
    says = f"{says}, as configured ({', '.join(trains) or 'neither trains'})"
    return passed(says, 1 if is_tied else 2, "tensors", notes)


@check("loss.adapter_start", after=["model.noise", "model.head"])
def a_new_adapter_changes_nothing(session: Session) -> Finding:
    """Does a new adapter change nothing before it has learned?

    The pair's logprobs with it and with all of it switched off.
    """
    skip_if(not is_adapted(session.scorer.model), "there is no adapter")
    skip_if(session.run.lora.adapter, "lora.adapter goes on from an adapter that has learned")
    quantity = session.quantity
    samples = session.pair if session.loaded.one_sample is None else session.pair[:1]
    with_adapter = session.numbers(samples)
    model: Any = session.scorer.model
    required = {p: p.requires_grad for p in model.parameters()}
    try:
        with model.disable_adapter():
            without = session.numbers(samples)
    finally:  # peft has set again what requires a gradient, for frozen tensors too
        for parameter, is_required in required.items():
            parameter.requires_grad_(is_required)
    is_exact = not session.run.lora.dora  # DoRA divides by a norm and multiplies with it
    difference, limit = measure.drift, session.tolerance
    if is_exact:
        difference, limit = measure.gap, session.exact
    name, moved = measure.most_different(with_adapter, without, difference)
    if moved > limit:
        not_zero = [
            f"{parameter_name} is not zero"
            for parameter_name, parameter in model.named_parameters()
            if ".lora_B" in parameter_name and bool(torch.any(parameter.detach()))
        ]
        return failed(
            f"the {quantity.many} of {name} are {moved:.3g} {quantity.unit} from those of the model without its new "
            "adapter",
            measured=(moved, quantity.unit),
            evidence=not_zero
            or "no second matrix is: a row or a module trained whole differs from the model's own",
            remedy="training would begin from another model than asked for; check the version of peft, and please "
            "report this",
        )
    return passed(f"{quantity.many} with the adapter are those without", moved, quantity.unit)


# -- which tensors get a gradient

TENSORS_SHOWN = 4
SPARSE = re.compile(r"expert|router|\.gate\.|trainable_tokens|image_newline")
"""Names of tensors that a batch may leave without a gradient."""
FIRST_MATRIX = re.compile(r"\.lora_(embedding_)?A\b")


@check("loss.reached", after=["vision.swapped"])
def every_trained_tensor_gets_a_gradient(session: Session) -> Finding:
    """Does every tensor that trains get a gradient, and no other?

    A tensor outside the graph fails. One whose gradient is exactly zero does too, unless the batch or the start
    explains it:

    - the first matrix of an adapter whose second one is zero and has a gradient;
    - what is behind a critic's head that starts at zero;
    - a vision tower and its projector, if the batch has no picture and the data have some;
    - the ends of a picture's rows, if no picture has any;
    - experts and routers, which a token may not be routed to; single rows, whose token may not occur;
    - everything, if each target's predictor sees one token alone: attention has nothing to choose then.

    One that has a gradient and that the optimizer does not have fails too: something makes it train unasked.
    """
    step, model, batch = measure.first_step(session), session.scorer.model, session.batch
    number = len(step.norms) + len(step.absent)

    def shortened(names: Sequence[str]) -> list[str]:
        counts = [architecture.count_by_part(names)] if architecture.has_parts(model) else []
        rest = len(names) - TENSORS_SHOWN
        return [*counts, *names[:TENSORS_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]

    if step.stray:
        return failed(
            f"{len(step.stray)} tensors get a gradient that are not to train",
            measured=(len(step.stray), "tensors"),
            evidence=shortened(step.stray),
            remedy="something in the model's code sets requires_grad while it runs; take it out, or train these too "
            "(freeze), and please report the model",
        )
    # outside the graph
    outside = [name for name in step.absent if not SPARSE.search(name)]
    if outside:
        return failed(
            f"{len(outside)} of {number} trained tensors get no gradient",
            measured=(len(outside), f"of {number} tensors"),
            evidence=shortened(outside),
            remedy="leave out what takes no part in the loss with the key freeze; where adapters or layers are cut off "
            "from it, set activation_checkpointing=false, and please report the model",
        )
    if step.report is not None and step.report.loss == 0.0:
        says = "the batch is learned already: its loss is 0, and so are all gradients"
        return passed(says, number, "tensors")
    # zero, and by nothing that explains it
    zero = [name for name, value in step.norms.items() if value == 0.0]
    unexplained = [name for name in zero if not _is_zero_at_start(session, step, name)]
    blind = architecture.parts_without_gradient(model, step.norms, unexplained)
    num_pictures = session.train.report.num_pictures
    sees_picture = any(media.stop < sample.num_tokens for sample in batch for media in sample.media)
    if blind and num_pictures and not sees_picture:
        unexplained = [name for name in unexplained if architecture.part_of(name) not in blind]
    if session.is_scalar:
        sees_two_tokens = any(sample.num_tokens > 1 for sample in batch)
    else:
        sees_two_tokens = any(bool((sample.target_at_N > 1).any()) for sample in batch)
    if unexplained and sees_two_tokens:
        remedy = (
            f"the data have no picture: set freeze={json.dumps(blind)}"
            if blind and not num_pictures
            else "the loss does not depend on them: leave them out with the key freeze, or look for a weight or "
            "gate of zero behind them"
        )
        return failed(
            f"the gradient of {len(unexplained)} of {number} trained tensors is exactly zero",
            measured=(len(unexplained), f"of {number} tensors"),
            evidence=shortened(unexplained),
            remedy=remedy,
        )
    notes = []
    if zero:
        notes.append(f"{len(zero)} are zero in this batch, as expected: {', '.join(zero[:2])}")
    if architecture.has_parts(model):
        notes.append(architecture.count_by_part(measure.trained(session)))
    return passed("all trained tensors get a gradient", number, "tensors", notes)


def _is_zero_at_start(session: Session, step: measure.FirstStep, name: str) -> bool:
    """Whether this tensor's gradient may be zero: sparse, an adapter's first matrix, or of a critic that outputs 0."""
    if SPARSE.search(name):
        return True
    second = FIRST_MATRIX.sub(lambda match: match[0][:-1] + "B", name)
    matrix = measure.trained(session).get(second)
    has_gradient = second != name and step.norms.get(second, 0.0) != 0.0
    if has_gradient and matrix is not None and not bool(torch.any(measure.local(matrix))):
        return True
    critic = session.scorer.critic
    if not isinstance(critic, OwnCritic) or not name.startswith(f"{CRITIC}."):
        return False
    return measure.norm(scalar_head(critic.model).weight) == 0.0


@check("loss.gradient", after=["loss.reached"])
def every_gradient_is_finite(session: Session) -> Finding:
    """Is the gradient of every tensor finite?"""
    step = measure.first_step(session)
    assert step.report is not None, "asked after loss.reached"
    wrong = [name for name, value in step.norms.items() if not math.isfinite(value)]
    if wrong:
        return failed(
            f"the gradient of {len(wrong)} of {len(step.norms)} tensors is not finite",
            measured=(len(wrong), f"of {len(step.norms)} tensors"),
            evidence=[*wrong[:TENSORS_SHOWN], f"the loss is {step.report.loss:.4g}"],
            remedy="an operation's derivative overflows or divides by zero, nearest to the loss in the last tensor "
            "named; set dtype=float32, and please report the model",
        )
    model = session.scorer.model
    # norms by layer, for the notes
    names = {module: name for name, module in model.named_modules()}
    prefix = names[architecture.layers(model)] + "."
    # of each decoder layer, and of each other tensor
    squares: dict[str, float] = defaultdict(float)
    for name, value in step.norms.items():
        inside = name.removeprefix(prefix)
        owner = name if inside == name else f"layer {inside.partition('.')[0]}"
        squares[owner] += value * value
    ordered = sorted(squares, key=squares.__getitem__)
    notes = [
        f"{what} in {owner}: {math.sqrt(squares[owner]):.3g}"
        for what, owner in (("largest", ordered[-1]), ("smallest", ordered[0]))
    ]
    total, clip = math.hypot(*step.norms.values()), session.trainer.clip_grad_norm
    if clip is not None and total > clip:
        notes.append(f"clipped to {clip:g}")
    return passed(f"{len(step.norms)} tensors, loss {step.report.loss:.4g}", total, "norm", notes)


# -- the loss against its own formula


@check("loss.linear", after=["model.trains"])
def linear_weights_are_the_derivative(session: Session) -> Finding:
    """Is the gradient that is formed in the forward that of the reported loss?

    A loss that is linear in logprobs gives its weights beforehand, and the head forms the gradient from them alone.
    They must be the derivative of the loss that is reported.
    """
    loss = session.trainer.source.loss
    packed = pack(session.tree_samples)
    weights = loss.linear_weights(packed)
    if weights is None:
        return skipped("the loss needs more than weights known beforehand")
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(2, packed.num_targets, generator=generator, dtype=torch.float64)
    logp_N, divergence_N = (-random[0]).requires_grad_(), random[1].requires_grad_()
    inputs = [logp_N] if loss.wants.divergence is None else [logp_N, divergence_N]
    worst = 0.0
    terms = loss(Scores(logp_N, divergence_N=divergence_N), packed).terms
    for name, term in terms.items():
        gradients = torch.autograd.grad(term, inputs, materialize_grads=True)
        derivative, weight = torch.stack(gradients), weights[name].reshape(-1, packed.num_targets)
        if len(weight) < len(inputs):  # of the divergence alone
            weight = torch.cat([torch.zeros_like(weight), weight])
        differences = (derivative - weight).abs()
        worst = max(worst, float(differences.max() / derivative.abs().max()))
        if worst > 1e-9:
            row, at = divmod(int(differences.argmax()), packed.num_targets)
            return failed(
                f"the weights of {name} differ from its derivative by {100 * worst:.3g}%",
                measured=(worst, "relative"),
                evidence=f"{measure.target_name(session, packed, at)}: weight {float(weight[row, at]):.6g}, derivative "
                f"{float(derivative[row, at]):.6g}",
                remedy="make the loss's linear_weights the derivative of its terms, or have it return None",
            )
    return passed(f"weights of {packed.num_targets} targets are the derivative", worst, "relative")


THEORY: dict[str, tuple[str, Callable[[float], float]]] = {
    **dict.fromkeys(("sigmoid", "robust", "aot", "aot_unpaired"), ("ln 2", lambda _: math.log(2))),
    **dict.fromkeys(("bco", "nca"), ("2 ln 2", lambda _: 2 * math.log(2))),
    **dict.fromkeys(("hinge", "apo_zero", "apo_down"), ("1", lambda _: 1.0)),
    "ipo": ("1 / (2 beta)^2", lambda beta: 0.25 / beta**2),
    "sppo": ("2 / (2 beta)^2", lambda beta: 0.5 / beta**2),
}
"""Loss of a pair if policy and reference are one, for a single term without a margin: derived by hand."""


@check("reference.start", after=["attention.shared", "loss.gradient"])
def the_reference_is_the_policy_at_the_start(session: Session) -> Finding:
    """Is the reference the policy, before the first update?

    Then every log-ratio is 0 and the loss is what its formula gives there. Compared are both as the loop's own first
    step has them, the policy in training mode, in which anything random in it would show. The loss is compared with
    THEORY.
    """
    skip_if(session.run.models().unlike_the_start)
    report = measure.first_step(session).report
    assert report is not None, "asked after loss.reached"
    worst, where, number = 0.0, "", 0
    for packed, scores in report.scored:
        logp_N, reference_N = scores.logp_N.cpu(), packed.streams.get(STREAM)
        if reference_N is None:  # the divergence is part of the reward
            (role,) = (role for role in session.trainer.roles if role.gives == STREAM)
            with session.inference(), role.active():
                reference_N = role.streams(packed)[STREAM]
        number += packed.num_targets
        apart, at = measure.largest_gap(logp_N.double(), reference_N.cpu().double())
        if apart > worst:
            ours, theirs = float(logp_N[at]), float(reference_N[at])
            target, worst = measure.target_name(session, packed, at), apart
            where = f"{target}: {ours:.6g}, by the reference {theirs:.6g}"
    if worst > session.exact:
        return failed(
            f"policy and reference differ by {worst:.3g} nats before the first update",
            measured=(worst, "nats"),
            evidence=[where, f"at most {session.exact:g} is rounding in {session.dtype}"],
            remedy="the reference has other weights (an adapter left out?), precision or layout, or something random; "
            "name it with reference.model, or please report this",
        )
    # the loss of log-ratios of 0, where theory has a number
    says = f"the same on {number} targets; the loss is {report.method_loss:.6g}"
    loss: Any = session.trainer.source.loss
    (name, *others) = loss.units
    has_margin = getattr(loss, "margin", 0) or getattr(loss, "gamma", 0)
    if name not in THEORY or others or loss.units[name] != "pair" or has_margin:
        return passed(says, worst, "nats")
    weight = dict(getattr(loss, "terms", ())).get(name, 1.0)
    formula, value = THEORY[name][0], weight * THEORY[name][1](loss.beta)
    formula = formula if weight == 1.0 else f"{weight:g} * {formula}"
    if not abs(report.method_loss - value) <= 1e-3 * value:
        return failed(
            f"policy and reference agree, and the loss is {report.method_loss:.6g} instead of {value:.6g} = {formula}",
            measured=(report.method_loss - value, "off"),
            evidence=[f"{len(session.trees)} rows"],
            remedy="the loss is not the one it is named after, or it is divided by another count; please report this",
        )
    equals = "" if formula.isdigit() else f" = {formula}"
    return passed(f"{says}{equals}, as in theory", worst, "nats")


# -- the step against its samples alone

CROSS_ENTROPY = {"cross_entropy"}
"""Terms of the loss that this check sums again."""


def alone_loss(
    session: Session, samples: Sequence[Sample], numbers: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The loss of these samples for these numbers of the model, by the loss's own formula; and for each sample its
    derivative by each number.
    """
    loss, packed = session.trainer.source.loss, pack(list(samples), ALONE)
    # the numbers are leaves, so that the loss can be derived by them
    leaves = {name: numbers[name].detach().double().requires_grad_() for name in packed.sample_ids}
    joined = torch.cat(list(leaves.values()))
    if STREAM in loss.needs:
        packed = replace(packed, streams={**packed.streams, STREAM: joined.detach()})
    scores = Scores(joined, entropy_N=torch.zeros_like(joined) if loss.wants.entropy else None)
    if session.is_scalar:
        scores = Scores(joined.new_empty(0), scalar_R=joined)
    if loss.observes:
        observed = {name: value.detach() for name, value in loss.observe(scores, packed).items()}
        packed = replace(packed, stats=loss.statistics(observed))
    terms = loss(scores, packed).terms
    means = [value / count_units(loss.units[term], packed) for term, value in terms.items()]
    total = torch.stack(means).sum()
    slopes = torch.autograd.grad(total, list(leaves.values()))
    return float(total.detach()), dict(zip(leaves, slopes, strict=True))


@check("loss.first", after=["reward.library", "reference.start"])
def the_first_loss_is_that_of_its_samples(session: Session) -> Finding:
    """Is the first step's loss the one that its samples alone give?

    Three comparisons with the samples themselves: the targets and weights of the micro-batches; the loss from the
    step's own logprobs (a reward model's scores), to the last digits; those with the samples alone through the
    library's own attention and head.

    Cross entropy is summed here again. Another loss is taken at its word, on all samples in one list: the question is
    whether cutting, packing and dividing change it.
    """
    skip_if(session.run.loss_not_in_samples)
    report = measure.first_step(session).report
    assert report is not None, "asked after loss.reached"
    # targets and weights, as the samples have them
    samples = session.tree_samples
    listed, differ = _summed(session, samples, report.scored)
    unit = "nats a target" if set(session.trainer.source.loss.units) == CROSS_ENTROPY else ""
    if differ:
        return failed(
            f"{len(differ)} of {len(samples)} samples are not summed as they are",
            measured=(differ, f"of {len(samples)} samples"),
            remedy="packing loses or changes targets; set batch.share_prefixes=false, and please report this",
        )
    # the loss of the step's own numbers
    loss, _ = _loss_of(session, samples, listed)
    ours = report.method_loss
    if abs(ours - loss) > 1e-5 * max(1.0, abs(loss)):  # both sum the same float32 numbers
        return failed(
            f"the step's loss is {ours:.6g}, and {loss:.6g} from its own {session.quantity.many}",
            measured=(ours - loss, unit),
            evidence=[f"{len(samples)} samples, {sum(s.num_targets for s in samples)} targets"],
            remedy="the loss is divided by another count, or leaves targets out; please report this",
        )
    if session.trainer.noise is not None:
        says = "from what the step lists; samples alone would have other noise"
        return passed(says, loss, unit)
    with session.inference():
        numbers = {sample.id: _as_array(library_numbers(session, sample)) for sample in samples}
    # the loss of samples alone, up to rounding by the derivative of each number
    alone, slopes = _loss_of(session, samples, numbers)
    number = sum(len(values) for values in numbers.values())
    slope = sum(float(values.abs().sum()) for values in slopes.values())
    limit = TOLERANCE[session.dtype] * max(1.0, slope) / min(1.0, number / STEADY_TARGETS) ** 0.5
    if not abs(loss - alone) <= limit:
        return failed(
            f"the step's loss is {loss:.6g}, and {alone:.6g} from its samples alone (rounding: {limit:.2g})",
            measured=(loss - alone, unit),
            evidence=[f"{it.id}: {float(numbers[it.id].mean()):.6g} alone" for it in samples],
            remedy="the training forward does not compute this model; set batch.share_prefixes=false and "
            "attention=reference, and please report the model",
        )
    what = "reads" if session.is_scalar else "targets"
    says = f"{alone:.6g} from {len(samples)} samples alone, {number} {what}"
    return passed(says, loss, unit)


def _loss_of(
    session: Session, samples: list[Sample], numbers: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    if set(session.trainer.source.loss.units) != CROSS_ENTROPY:
        tensors = {name: torch.from_numpy(values) for name, values in numbers.items()}
        return alone_loss(session, samples, tensors)
    total = sum(float(-(sample.weight_N * numbers[sample.id]).sum()) for sample in samples)
    return total / sum(float(sample.weight_N.sum()) for sample in samples), {}


def _summed(
    session: Session, samples: Sequence[Sample], scored: list[Scored]
) -> tuple[dict[str, Any], list[str]]:
    """Sample id -> its logprobs (or scores) in the micro-batches of all ranks; and samples that are not there as they
    are.
    """
    by_id, differ = {sample.id: sample for sample in samples}, list[str]()
    mine: dict[str, Any] = {}
    for packed, scores in scored:
        values, row_of = scores.logp_N, packed.row_N
        if scores.scalar_R is not None:
            values, row_of = scores.scalar_R, packed.row_R
        for row, (name, sample) in enumerate((name, by_id[name]) for name in packed.sample_ids):
            is_own = packed.row_N == row
            targets, weights = _as_array(packed.target_N[is_own]), packed.weight_N[is_own]
            mine[name] = np.append(mine.get(name, []), _as_array(values.cpu()[row_of == row]))
            if len(targets) != sample.num_targets:
                differ.append(f"{name}: {len(targets)} targets summed of {sample.num_targets}")
            elif (targets != sample.ids_T[sample.target_at_N]).any():
                differ.append(f"{name}: other tokens are predicted than its targets")
            elif not np.allclose(weights, sample.weight_N):
                differ.append(f"{name}: other weights than its own")
    numbers, lines = dict[str, Any](), list[str]()
    for of_rank, wrong in session.ranks.gather((mine, differ)):
        numbers |= of_rank
        lines += wrong
    return numbers, [*lines, *(f"{name}: left out" for name in by_id if name not in numbers)]


def _as_array(values: Tensor) -> Any:
    return values.detach().to("cpu", torch.float64).numpy()


HEAD_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Maximum relative difference of the head's gradient due to rounding, by compute dtype."""


@check("loss.head_gradient", part="full", after=["loss.gradient"])
def the_chunked_head_gives_the_plain_gradient(session: Session) -> Finding:
    """Does the chunked head give the gradient of the plain one?

    Both ways through it against automatic differentiation of log_softmax of all logits, with respect to hidden states,
    weight, bias and rows that train by themselves.
    """
    skip_if(session.is_scalar, "a reward model has no output head")
    skip_if(session.ranks.is_sharded, "a sharded head is whole only inside the model")
    head = measure.first_step(session).heads[0]
    hidden_ND = head.hidden_ND[:48].detach()
    target_N = head.packed.target_N[:48].to(hidden_ND.device)
    generator = torch.Generator().manual_seed(0)
    share_N = (0.5 + torch.rand(len(target_N), generator=generator)).to(hidden_ND)
    plain = _head_gradients(session, hidden_ND, target_N, share_N, None)
    worst, where = 0.0, ""
    # both ways through the head against the plain one
    ways = {"gradient formed in the forward": True, "computed again in backward": False}
    for way, is_linear in ways.items():
        ours = _head_gradients(session, hidden_ND, target_N, share_N, is_linear)
        for name, expected in plain.items():
            error = float((ours[name] - expected).norm() / expected.norm().clamp_min(1e-300))
            if not error <= worst:
                worst, where = error, f"with respect to the {name} ({way})"
    if not worst <= HEAD_ROUNDING[session.dtype]:
        return failed(
            f"the head's gradient differs by {100 * worst:.3g}% from that of log_softmax",
            measured=(worst, "relative"),
            evidence=[where],
            remedy="the head's own backward does not know all that its forward does (a scale, a softcap, a bias); "
            "please report the model",
        )
    return passed(f"both ways through the head; {len(target_N)} targets", worst, "relative")


def _head_gradients(
    session: Session, hidden_ND: Tensor, target_N: Tensor, share_N: Tensor, is_linear: bool | None
) -> dict[str, Tensor]:
    """Gradients of the sum of share * logp. ``is_linear`` selects the path through the chunked head; None uses the
    plain head. The head's tensors are copies that share the weights' memory.
    """
    leaves = {"hidden states": hidden_ND.clone().requires_grad_(True)}

    def leaf(name: str, parameter: nn.Parameter) -> Any:
        copy = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if copy.requires_grad:
            leaves[name] = copy
        return copy

    # copies that share the weights' memory, so that the run's own get no gradient
    spec = measure.head_of(session)
    rows = spec.rows
    spec = replace(
        spec,
        weight=leaf("weight", spec.weight),
        bias=None if spec.bias is None else leaf("bias", spec.bias),
        rows=None if rows is None else rows._replace(weight_RD=leaf("rows", rows.weight_RD)),
    )
    hidden_ND = leaves["hidden states"]
    total: Tensor | None
    with session.trainer.compute():
        if is_linear is None:
            logps = torch.log_softmax(spec.logits(hidden_ND), -1)
            total = (share_N * logps.gather(1, target_N[:, None]).squeeze(1)).sum()
        elif is_linear:
            total = score_hidden(hidden_ND, target_N, spec, share_N).linear_sum
        else:
            total = (share_N * score_hidden(hidden_ND, target_N, spec).logp_N).sum()
    assert total is not None
    with session.trainer.compute_backward():
        gradients = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


@check("loss.packed", part="full", after=["loss.linear", "loss.first", "loss.head_gradient"])
def the_packed_gradient_is_that_of_its_samples(session: Session) -> Finding:
    """Is the gradient of packed samples the sum of theirs alone, by the library's own attention?

    The run's step (its attention, packing, shared prefixes, chunked head) against the sum over its samples, each alone
    through the library: its numbers times the derivative of the loss by them.
    """
    trainer = session.trainer
    skip_if(session.run.loss_not_in_samples)
    skip_if(trainer.noise is not None, "noise is on: samples alone would have other noise")
    skip_if(session.ranks.is_sharded, "the library's own path runs on one rank")
    samples = session.tree_samples

    def alone_backward() -> None:
        """Run backward in evaluation mode, in which no layer is computed again: the attention is ours again by then."""
        with session.inference():
            numbers = {sample.id: library_numbers(session, sample) for sample in samples}
        _, slopes = alone_loss(session, samples, numbers)
        session.scorer.eval()
        for sample in samples:
            with trainer.compute():
                values = library_numbers(session, sample)
                loss = (slopes[sample.id].to(values) * values).sum()
            with trainer.compute_backward():
                loss.backward()  # type: ignore[no-untyped-call]

    by_method = replace(trainer, router=RouterConfig())  # the loss whose slopes are known above
    ours = measure.gradients_of(session, lambda: add_gradients(by_method, session.trees, 1))
    name, error = measure.most_different_gradient(
        measure.gradients_of(session, alone_backward), ours
    )
    library, limit = library_attention(session.model), measure.GRADIENT_ROUNDING[session.dtype]
    if not error <= limit:
        return failed(
            f"the gradient of {name} differs by {100 * error:.3g}% from the same samples alone (at most "
            f"{100 * limit:g}% is rounding)",
            measured=(error, "relative"),
            evidence=[f"{len(samples)} samples, {num_tokens(samples)} tokens, library's {library}"],
            remedy="the backward of the packed forward is wrong; set attention=reference, and please report the model",
        )
    says = f"as {len(samples)} samples alone by the library's {library}; worst: {name}"
    return passed(says, error, "relative")


@check("loss.splits", part="full", after=["loss.packed"])
def micro_batches_do_not_change_the_step(session: Session) -> Finding:
    """Do loss and gradient not depend on how a step is cut into micro-batches?

    The same batch as the run would cut it, one sample at a time, and in halves with prefixes shared or not: loss and
    every gradient of the loop's own functions.
    """
    trees = session.trees
    skip_if(len(trees) < 2, "the first step has one tree of samples")
    ours, loss = _step_of(session, session.trainer)
    limit, worst, worst_name = measure.GRADIENT_ROUNDING[session.dtype], 0.0, ""
    trainer = session.trainer
    budget, policy = trainer.budget, trainer.policy
    # other cuts of the same step
    if trees[0].is_atom:
        smaller = budget._replace(tokens_per_microbatch=1)
        cuts = {"one row at a time": replace(trainer, budget=smaller)}
    else:
        smaller = budget._replace(one_sample=True)
        cuts = {"one sample at a time": replace(trainer, budget=smaller)}
    if session.loaded.one_sample is None:
        half = max(1, num_tokens(session.batch) // 2)
        is_shared = not policy.share_prefixes and trainer.noise is None
        cuts[f"in halves with prefixes {'shared' if is_shared else 'repeated'}"] = replace(
            trainer,
            budget=budget._replace(tokens_per_microbatch=half),
            policy=PackPolicy(is_shared, 1 if is_shared else policy.min_saved_tokens),
        )
    # each gives the loss and the gradients that the run's cut gives
    for how, other_trainer in cuts.items():
        theirs, other = _step_of(session, other_trainer)
        name, error = measure.most_different_gradient(ours, theirs)
        # advantages add up to 0, and a policy's loss begins there
        apart = abs(other - loss) / max(abs(loss), 0.1)
        if not (error <= limit and apart <= limit / 4):
            what = f"the gradient of {name} by {100 * error:.3g}%" if error > limit else "the loss"
            kind = "rows" if trees[0].is_atom else "samples"
            return failed(
                f"{how}, {what} differs: the loss is {other:.6g}, as the run cuts the step {loss:.6g}",
                measured=(max(error, apart), "relative"),
                evidence=[f"{len(trees)} {kind}; at most {100 * limit:g}% is rounding"],
                remedy="a mean is taken over micro-batches, or a layer looks at the whole of one, so the step depends "
                "on batch.tokens_per_microbatch and ranks; please report this",
            )
        if error >= worst:
            worst, worst_name = error, name
    return passed(f"cut in {1 + len(cuts)} ways; worst: {worst_name}", worst, "relative")


def _step_of(session: Session, trainer: Trainer) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the batch, cut as ``trainer`` cuts it."""
    losses_seen: list[float] = []

    def backward() -> None:
        losses_seen.append(add_gradients(trainer, session.trees, 1).loss)

    return measure.gradients_of(session, backward), losses_seen[0]
