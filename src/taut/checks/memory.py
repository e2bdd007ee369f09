"""Memory: what ``taut plan`` predicts of the first steps against the device, and against a micro-batch that is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taut.checks.registry import Finding, check, failed, passed, skip_if, skipped
from taut.checks.session import NUM_ROWS, Session, around_answers, ending, num_tokens
from taut.data.batching import samples_of
from taut.data.packing import pack
from taut.errors import ModelError
from taut.plan.memory import (
    coarse_bound,
    device_memory,
    footprint_of,
    measure,
    measured_parts,
    predict,
    predict_steps,
)
from taut.plan.memory_options import SPARE, Memory, kernels_of, settings_that_help
from taut.plan.workload import workload
from taut.types import Sample

GIB, MIB = 2**30, 2**20
MEASURED_TOKENS = 1024
"""Tokens of the measured micro-batch, if the first rows have that many: with fewer, the weights hide the memory of
activations."""


def _in_gib(parts: Mapping[str, int]) -> str:
    """The parts large enough to matter, in GiB."""
    sizes = {name: size / GIB for name, size in parts.items()}
    return ", ".join(f"{name} {size:.2f}" for name, size in sizes.items() if size > 5e-3)


@check("memory.peak", after=["data.packing"])
def the_first_steps_fit_into_memory(session: Session) -> Finding:
    """Do the first steps fit into memory?

    The memory that their largest micro-batch is predicted to need, against what the device has. If a coarse bound fits
    with room to spare nothing closer is predicted.
    """
    run, ranks, inputs = session.run, session.ranks, session.inputs
    there, dtype = device_memory(ranks.device), session.loaded.dtype.parameters
    bound = coarse_bound(run, inputs, session.scorer.model, ranks.device, dtype)
    if bound is not None and bound < 0.5 * there:
        says = f"at most {bound / GIB:.2g} of {there / GIB:.2f} GiB, by a coarse bound"
        return passed(says, bound / GIB, "GiB at most")
    try:
        work = workload(run, inputs, ranks.num_shares)
        kernels = kernels_of(run, inputs.config, ranks.device)
        prediction = predict_steps(run, inputs.config, kernels, work, num_ranks=ranks.size)
    except ModelError as error:
        return skipped(str(error))
    # with what a run adds around its steps
    needed = footprint_of(
        run, prediction.traced, kernels, ranks.size, num_steps=session.trainer.num_steps
    )
    peak, tokens = needed.peak / GIB, work.largest.num_tokens
    says = f"{peak:.2f} of {there / GIB:.2f} GiB for a micro-batch of {tokens:,} tokens"
    if needed.peak <= there:
        return passed(says, peak, "GiB")
    if run.batch.halve_when_out_of_memory and needed.around <= there:
        note = "batch.halve_when_out_of_memory=true: the token budget will be halved until it fits"
        return passed(says, peak, "GiB", [note])
    # it does not fit: name the settings that would help
    limit = int(there * (1 - SPARE))
    memory = Memory(inputs.config, kernels, work.largest, work, there, ranks.size, limit)
    return failed(
        f"does not fit: {says}",
        measured=(peak, "GiB"),
        evidence=[f"{_in_gib(needed.parts)} GiB"],
        remedy=f"{settings_that_help(run, memory)}; `taut plan` tells more",
    )


@check("memory.measured", part="full", after=["loss.gradient", "memory.peak"])
def a_micro_batch_takes_the_memory_predicted(session: Session) -> Finding:
    """Does a micro-batch take the memory that is predicted?

    One is really run. What it takes beyond the prediction is kept by something other than the model's code: a hook, a
    patched layer, checkpointing that is set and not applied.
    """
    run = session.run
    skip_if(session.ranks.is_sharded, "measured where weights are whole only")
    is_noisy = run.noise.neftune_alpha > 0 or (run.lora.is_on and run.lora.dropout > 0)
    skip_if(is_noisy, "noise is on, and belongs to steps")
    if session.is_generated:
        trees = session.trees
    else:  # the first rows, compared answers together
        rows, left = run.rows_of(session.train), MEASURED_TOKENS
        chosen: list[Sequence[Sample]] = []
        for index in range(1 if session.loaded.one_sample else min(len(rows), NUM_ROWS)):
            samples = rows.samples(index)
            cut: Sequence[Sample] = [ending(samples[0], MEASURED_TOKENS)]
            if rows.are_answers:
                cut = around_answers(samples, MEASURED_TOKENS)
            left -= num_tokens(cut)
            if chosen and left < 0:
                break
            chosen.append(cut)
        trees = rows.trees_of(chosen)
    packed, config = pack(samples_of(trees), session.trainer.policy), session.inputs.config
    try:
        kernels = kernels_of(run, config, session.ranks.device)
        prediction = predict(run, config, kernels, packed, is_first=True)
    except ModelError as error:
        return skipped(str(error))
    # one micro-batch, really run
    measured = measure(session.built, packed, is_first=True)
    says = (
        f"{measured.bytes / MIB:,.1f} MiB for {packed.num_tokens:,} tokens, {prediction.peak / MIB:,.1f} predicted; "
        f"{measured.seconds:.2g} s"
    )
    number, unit = measured.bytes / prediction.peak, "of what is predicted"
    # 2 MiB are too little to matter, and as much as small tensors that are not predicted
    if measured.bytes <= prediction.peak * 1.15 + 2 * MIB:
        return passed(says, number, unit)
    live = measured_parts(session.built, packed, is_first=True)
    return failed(
        says,
        measured=(number, unit),
        evidence=[
            f"predicted (GiB): {_in_gib(prediction.footprint.parts)}",
            f"live tensors (GiB): {_in_gib(live)}",
        ],
        remedy="something keeps tensors that the model's own code does not: remove hooks and patches, and see that "
        "activation_checkpointing is applied",
    )
