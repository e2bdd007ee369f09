"""One micro-batch really run, against what was foretold of it. More than that is memory that something keeps which the
model's code does not: a hook, a patched layer, checkpointing that is asked for and not in force.
"""

from __future__ import annotations

from collections.abc import Sequence

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.memory.foretold import kernels_of, told
from taut.checks.samples import around, ending, num_tokens
from taut.checks.session import NUM_ROWS, Session
from taut.data.batching import samples_of
from taut.data.packing import pack
from taut.errors import ModelError
from taut.plan import measure, measured_parts, predict
from taut.run.config import rows_of
from taut.types import Packed, Sample

MIB = 2**20
TOLERANCE = 0.15
TOKENS = 1024
"""Of the micro-batch, if the first rows have so many: enough for what layers keep to be seen beside the weights."""
SMALL = 2 * MIB
"""Too little to matter, and as much as small tensors that are not foretold."""


def ask(session: Session) -> Finding:
    """Does a micro-batch take the memory that is foretold?"""
    if session.ranks.size > 1:
        return skipped("measured on one rank only")
    run = session.run
    if run.noise.neftune_alpha > 0 or (run.lora.is_on and run.lora.dropout > 0):
        return skipped("noise is on, and belongs to steps")
    packed, config = _some(session), session.inputs.config
    try:
        prediction = predict(run, config, kernels_of(session), packed, is_first=True)
    except ModelError as error:
        return skipped(str(error))
    measured = measure(session.built, packed, is_first=True)
    foreseen = prediction.peak
    said = (
        f"{measured.bytes / MIB:,.1f} MiB for {packed.num_tokens:,} tokens, {foreseen / MIB:,.1f} foretold; "
        f"{measured.seconds:.2g} s"
    )
    if measured.bytes <= foreseen * (1 + TOLERANCE) + SMALL:
        return passed(said, measured.bytes / foreseen, "of what is foretold")
    return failed(
        said,
        number=measured.bytes / foreseen,
        unit="of what is foretold",
        evidence=[
            f"foretold (GiB): {told(prediction.footprint.parts)}",
            f"live tensors (GiB): {told(measured_parts(session.built, packed, is_first=True))}",
        ],
        remedy="something keeps tensors that the model's own code does not: remove hooks and patches, and see that "
        "activation_checkpointing is in force",
    )


def _some(session: Session) -> Packed:
    """The first rows as one micro-batch, answers that are compared together; of a run that generates, the rehearsal."""
    if session.is_generated:
        return pack(samples_of(session.trees), session.job.policy)
    rows = rows_of(session.run, session.train)
    most = 1 if session.loaded.one_sample else min(len(rows), NUM_ROWS)
    chosen: list[Sequence[Sample]] = []
    left = TOKENS
    for index in range(most):
        samples = rows.samples(index)
        some = around(samples, TOKENS) if rows.are_answers else [ending(samples[0], TOKENS)]
        left -= num_tokens(some)
        if chosen and left < 0:
            break
        chosen.append(some)
    return pack(samples_of(rows.trees_of(chosen)), session.job.policy)
