"""The memory that the largest micro-batch of the first steps is foretold to need, against what the device has."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.memory.foretold import GIB, foretold, in_training, told
from taut.checks.session import Session
from taut.estimate import device_memory


def ask(session: Session) -> Finding:
    """Do the first steps fit into memory?"""
    found = session.once(foretold)
    if isinstance(found, str):
        return skipped(found)
    work, prediction = found
    needed, there = in_training(session, prediction), device_memory(session.ranks.device)
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
