"""The model: that it loads and trains as asked, and that its numbers are finite, repeatable, and its head's own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from taut.checks import measure
from taut.checks.loss import dtype_name
from taut.checks.registry import Finding, check, failed, passed, skip_if
from taut.checks.session import Session
from taut.checks.weights import experts_of_rank, open_files
from taut.data.packing import ALONE, pack
from taut.models import architecture
from taut.models.compiled_layers import compiled_layers, eagerly, graphs_made
from taut.models.heads import check_head
from taut.models.lora.merge import plain_skeleton
from taut.models.quantized.quantized_layers import format_of
from taut.models.quantized.quantized_storage import error_of, quantized_experts, quantized_layers
from taut.train import distributed

COMPARED = 16
"""Number of quantized layers to compare with the checkpoint."""


@check("model.loads", after=["data.tokens"])
def the_model_loads(session: Session) -> Finding:
    """Can the model be loaded as asked, all of its weights included?

    Configuration, tokenizer, template file, every weight, the attention and dtype asked for.
    """
    tokenizer, loaded = session.tokenizer, session.loaded
    number = architecture.num_weights(loaded.model)
    says = f"{type(loaded.model).__name__} and {type(tokenizer).__name__}, no weight missing"
    notes = [f"{name} {value}: {reason}" for name, value, reason in loaded.decisions]
    return passed(says, number, "parameters", notes)


@check("model.trains", after=["model.loads"])
def what_was_asked_trains(session: Session) -> Finding:
    """Can what was asked be trained: adapters, freezing, added tokens?"""
    trained = sum(parameter.numel() for parameter in session.trainer.trained)
    every = architecture.num_weights(session.scorer)
    # about adapters, rows that train, freezing, packing and sharing
    before = {decision.name for decision in (*session.inputs.decisions, *session.loaded.decisions)}
    notes = [
        f"{name} {value}: {reason}"
        for name, value, reason in session.built.decisions
        if name not in before
    ]
    return passed(f"{trained:,} of {every:,} parameters train", trained / every, "of all", notes)


@check("model.quantized", after=["model.trains"])
def quantized_weights_are_the_checkpoints(session: Session) -> Finding:
    """Do quantized weights stand for the checkpoint's, within the steps of their format?

    A few layers from the first to the last, and the first and the last expert of the first and the last layer that has
    some, are compared with the tensors in the files.
    """
    model = session.loaded.model
    layers: list[tuple[str, Any]] = list(quantized_layers(model))
    experts: list[tuple[str, Any]] = list(quantized_experts(model))
    skip_if(not layers and not experts, "no weight is quantized")
    skip_if(format_of(session.inputs.config) is not None, "the checkpoint holds them as they are")
    # layers at even distances
    chosen = [
        layers[index * (len(layers) - 1) // max(1, COMPARED - 1)]
        for index in range(COMPARED if layers else 0)
    ]
    chosen = list({name.replace(".base_layer", ""): layer for name, layer in chosen}.items())
    rows = {
        name: distributed.whole_of(layer.weight, distributed.local(layer.weight))
        for name, layer in chosen
    }
    # errors in multiples of the largest that the format makes
    errors: dict[str, float] = {}
    skeleton = plain_skeleton(session.scorer.model)
    with ExitStack() as stack:
        files = open_files(model, stack)
        for name, layer in chosen:
            if f"{name}.weight" in files:
                source = layer.in_checkpoint(files[f"{name}.weight"].get_tensor(f"{name}.weight"))
                errors[name] = error_of(layer.format, rows[name], source)
        for label, layout, row, source in experts_of_rank(session, skeleton, files):
            errors[label] = error_of(layout, row, source)
    skip_if(not errors, "the files have other names for these weights")
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= 1:
        return failed(
            f"the weights of {worst} are not those of the checkpoint",
            measured=(errors[worst], "times the largest error of the format"),
            evidence=[f"{name}: {error:.3g}" for name, error in errors.items() if error > 1],
            remedy="install the tested version of bitsandbytes (constraints.txt), and please report the model",
        )
    number = len(layers) + sum(len(module.formats) for _, module in experts)
    says = f"{len(errors)} weights of {number} tensors within the steps of their format"
    return passed(says, errors[worst], "of the largest error of the format")


@check("model.finite", after=["vision.placeholders"])
def all_numbers_are_finite(session: Session) -> Finding:
    """Are all weights, and the logprobs they give, finite numbers?

    An infinity or a NaN would look like a leak in later checks.
    """
    tensors, quantity = list(session.scorer.model.named_parameters()), session.quantity
    wrong = [name for name, tensor in tensors if not _is_finite(tensor)]
    if wrong:
        return failed(
            f"{len(wrong)} tensors have values that are not finite",
            measured=(wrong, "tensors"),
            remedy="the checkpoint is damaged; copy it again, or take the one before it",
        )
    # what the model computes
    numbers = session.alone if session.loaded.one_sample is not None else session.packed
    for name, values in numbers.items():
        if num_wrong := int((~torch.isfinite(values)).sum()):
            outputs = measure.layer_outputs(session, pack(list(session.pair[:1]), ALONE))
            layers = [layer for layer, output in outputs.items() if not _is_finite(output)]
            return failed(
                f"{num_wrong} of {len(values)} {quantity.many} of {name} are not finite",
                measured=(num_wrong, f"of {len(values)}"),
                evidence=f"first in the output of {layers[0]}"
                if layers
                else "not in any layer, but in the head",
                remedy=f"the model overflows in {dtype_name(session.dtype)}; set dtype=float32, or take another "
                "checkpoint",
            )
    return passed(f"weights and {quantity.many} are", len(tensors), "tensors")


def _is_finite(tensor: Tensor) -> bool:
    """A sum is finite unless a part is not, or it overflows: then each value is looked at."""
    local: Any = distributed.local(tensor)
    if not local.is_floating_point() or bool(torch.isfinite(local.detach().sum())):
        return True
    return bool(torch.isfinite(local).all())


@check("model.noise", after=["model.finite"])
def two_forwards_in_training_agree(session: Session) -> Finding:
    """Does the model give the same numbers twice when it trains?

    Noise that was asked for (noise.*, lora.dropout) is off without a gradient. What is left comes from the model
    itself: dropout that its config does not name, layers skipped at random.
    """
    with torch.no_grad(), session.trainer.compute():  # once around both: autocast keeps its casts
        moved = measure.gap(_forward_in_training(session, {}), _forward_in_training(session, {}))
    quantity = session.quantity
    if moved > session.exact:
        first, second = dict[str, Tensor](), dict[str, Tensor]()
        _forward_in_training(session, first, keeps_sums=True)
        _forward_in_training(session, second, keeps_sums=True)
        where = next((name for name in first if measure.gap(first[name], second[name]) > 0), None)
        return failed(
            f"the same sample's {quantity.many} differ by {moved:.3g} {quantity.unit} from one forward to the next",
            measured=(moved, quantity.unit),
            evidence=[f"first in {where or 'the model itself'}"],
            remedy="a layer draws random numbers in training that taut cannot key to samples; set its dropout or its "
            "like to 0 in the model's code or config, and please report the model",
        )
    return passed("two forwards in training mode agree", moved, quantity.unit)


def _forward_in_training(
    session: Session, sums: dict[str, Tensor], *, keeps_sums: bool = False
) -> Tensor:
    """The numbers of a sample in training mode. ``sums`` gets the sum of every module's output, innermost first."""
    scorer = session.scorer
    names = {module: name for name, module in scorer.model.named_modules()}

    def keep(module: nn.Module, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            sums[f"{names[module]} ({type(module).__name__})"] = value.double().sum()

    was_training, watched = scorer.training, names if keeps_sums else ()
    try:
        with measure.outputs_seen(watched, keep), torch.no_grad(), session.trainer.compute():
            scorer.train()
            return session.forward(pack([session.short_sample], ALONE))
    finally:
        scorer.train(was_training)


@check("model.head", after=["model.finite"])
def the_chunked_head_gives_plain_log_probs(session: Session) -> Finding:
    """Does the chunked head give the logprobs of the plain one?

    Both ways through it (in chunks, without keeping logits) against log_softmax of all logits, for the hidden states of
    the first batch. That these logits are the model's own was proven when it was loaded.

    A scalar head has no chunks: it is proven here again, on the model that trains, to give the model's own number.
    """
    if session.is_scalar:
        skip_if(session.ranks.is_sharded, "a sharded head is whole only inside the model")
        with session.inference():
            moved = check_head(session.scorer.model)
        return passed("the scalar head is the model's own", moved, "points")
    limit = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 0.5}[session.dtype]
    worst, where, number = 0.0, "", 0
    for head in measure.first_step(session).heads:
        number += len(head.plain_N)
        ways = {"computed again in backward": head.recomputed_N}
        if head.logp_N is not None:
            is_linear = session.trainer.source.loss.linear_weights(head.packed) is not None
            way = "gradient formed in the forward" if is_linear else "as the run takes it"
            ways[way] = head.logp_N
        for way, logp_N in ways.items():
            moved, at = measure.largest_gap(logp_N, head.plain_N)
            if moved > worst:
                target = measure.target_name(session, head.packed, at)
                plain = float(head.plain_N[at])
                worst = moved
                where = f"{target}: {float(logp_N[at]):.6g}, plainly {plain:.6g} ({way})"
    if worst > limit:
        return failed(
            f"a logprob of the chunked head differs by {worst:.3g} nats from log_softmax of all logits",
            measured=(worst, "nats"),
            evidence=[where],
            remedy="the head does more, or less, than taut computes; train another model, and please report this one",
        )
    return passed(f"both ways through the head, {number} targets", worst, "nats")


@check("model.compiled", after=["model.finite"])
def compiled_layers_compute_what_eager_ones_do(session: Session) -> Finding:
    """Do the compiled layers give the numbers and the gradients that they give without torch's compiler?

    The pair, packed, forward and backward in training mode, with the graphs and without.
    """
    skip_if(not session.run.compile, "nothing is compiled in this run")
    before = graphs_made()
    # with graphs, and without
    numbers, gradients = _of_the_pair(session)
    made = graphs_made().since(before)
    with eagerly():
        expected, expected_gradients = _of_the_pair(session)
    quantity, moved = session.quantity, measure.drift(numbers, expected)
    tensor, error = measure.most_different_gradient(expected_gradients, gradients)
    limit = measure.GRADIENT_ROUNDING[session.dtype]
    if moved > session.tolerance or error > limit:
        return failed(
            f"compiled layers differ from the same layers without torch's compiler by {moved:.3g} {quantity.unit}, and "
            f"by {error:.3g} of the gradient",
            measured=(moved, quantity.unit),
            evidence=[f"the gradient of {tensor} differs most"],
            remedy="torch's compiler makes a mistake with this model; leave compile out, and please report the model",
        )
    number = len(compiled_layers(session.scorer.model))
    notes = [
        f"{made.graphs} graphs for {number} layers, {made.breaks} breaks for attention and what else is eager",
        f"gradients differ by {error:.3g} at most, in {tensor}; {limit:g} is rounding",
    ]
    return passed(f"{number} compiled layers do", moved, quantity.unit, notes)


def _of_the_pair(session: Session) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbers of the pair, packed, in training mode, and the gradient of their sum, in host memory."""
    packed, trainer = pack(list(session.pair), ALONE), session.trainer
    values = list[Tensor]()

    def backward() -> None:
        session.scorer.train()
        if trainer.noise is not None:
            trainer.noise.set(0, packed)
        with trainer.compute():
            values.append(session.forward(packed))
        if values[0].requires_grad:
            with trainer.compute_backward():
                values[0].sum().backward()  # type: ignore[no-untyped-call]

    gradients = measure.gradients_of(session, backward)
    return values[0].detach().cpu(), {name: grad.cpu() for name, grad in gradients.items()}
