"""The memory that the largest micro-batch of the first steps is foretold to need, against what the device has.

Where a coarse bound fits with room to spare it is not foretold any closer: every input and output of a linear layer
kept FACTOR times in float32, all weights with gradients and moments, a reference, and the head's chunk.
"""

from __future__ import annotations

from torch import nn

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.memory.foretold import GIB, foretold, in_training, told
from taut.checks.session import Session
from taut.models import architecture
from taut.models.scorer import CHUNK_ELEMENTS, MIN_CHUNK_ROWS
from taut.plan import device_memory, reference_bytes

ROOMY = 0.5
"""A bound below this part of the device's memory is enough."""
FACTOR = 2


def ask(session: Session) -> Finding:
    """Do the first steps fit into memory?"""
    there, bound = device_memory(session.ranks.device), _bound(session)
    if bound is not None and bound < ROOMY * there:
        said = f"at most {bound / GIB:.2g} of {there / GIB:.2f} GiB, by a coarse bound"
        return passed(said, bound / GIB, "GiB at most")
    found = session.once(foretold)
    if isinstance(found, str):
        return skipped(found)
    work, prediction = found
    needed = in_training(session, prediction)
    said = f"{needed.peak / GIB:.2f} of {there / GIB:.2f} GiB for a micro-batch of {work.largest.num_tokens:,} tokens"
    if needed.peak <= there:
        return passed(said, needed.peak / GIB, "GiB")
    if session.run.batch.halve_when_out_of_memory and not needed.is_loading:
        note = "batch.halve_when_out_of_memory=true: the token budget will be halved until it fits"
        return passed(said, needed.peak / GIB, "GiB", [note])
    ways = ["lora.rank=16"] if not session.run.lora.is_on else []
    if not session.run.activation_checkpointing:
        ways.insert(0, "activation_checkpointing=true")
    ways.insert(0, f"batch.tokens_per_microbatch below {work.largest.num_tokens}")
    return failed(
        f"does not fit: {said}",
        number=needed.peak / GIB,
        unit="GiB",
        evidence=[f"{told(needed.parts)} GiB"],
        remedy=f"set {', or '.join(ways)}; `taut plan` tells what fits",
    )


def _bound(session: Session) -> int | None:
    """Bytes that a step cannot exceed; None where much of the model is not in linear layers (stacked experts), or
    another one teaches it, a critic learns beside it, or a tower looks at pictures.
    """
    online = session.run.objective.online
    if session.inputs.renderer.album is not None:
        return None
    if session.run.objective.teacher is not None or (online is not None and online.critic):
        return None
    model = session.scorer.model
    table = architecture.stored_table(architecture.embedding(model))
    assert table is not None, "an embedding has a weight"
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_linear = sum(module.weight.numel() for module in linear)
    if num_linear < 0.5 * (num_parameters - table.numel()):
        return None
    tokens = max(session.run.batch.tokens_per_microbatch, session.inputs.longest)
    kept = FACTOR * tokens * sum(module.in_features + module.out_features for module in linear)
    weights = 5 * num_parameters  # as they are, gradients, two moments, autocast's copies
    has_chunks = architecture.has_head(model)
    head = 4 * max(CHUNK_ELEMENTS, MIN_CHUNK_ROWS * table.shape[0]) if has_chunks else 0
    beside = reference_bytes(session.run, session.job.trained)
    return session.loaded.dtype.parameters.itemsize * (kept + weights + head) + beside
