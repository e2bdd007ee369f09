"""What ``taut plan`` foretells of a session's first steps: the part that the checks of memory share."""

from __future__ import annotations

from taut.checks.session import Session
from taut.errors import ModelError
from taut.plan import (
    FUSED,
    Footprint,
    Kernels,
    Prediction,
    Workload,
    footprint,
    predict_steps,
    stages,
    workload,
)

GIB = 2**30


def foretold(session: Session) -> tuple[Workload, Prediction] | str:
    """The first steps and what they need; or why that cannot be told."""
    run, ranks, inputs = session.run, session.ranks, session.inputs
    try:
        work = workload(run, inputs, ranks.size)
        kernels = kernels_of(session)
        found = predict_steps(run, inputs.config, kernels, work, num_ranks=ranks.size)
    except ModelError as error:
        return str(error)
    return work, found


def kernels_of(session: Session) -> Kernels:
    """What computes: the dtype, and the attention of this device."""
    is_cuda = session.ranks.device.type == "cuda"
    return Kernels(session.dtype, FUSED if is_cuda else session.loaded.attention.implementation)


def in_training(session: Session, prediction: Prediction) -> Footprint:
    """With checkpoints' buffers, where they are on the device."""
    return footprint(
        prediction.traced,
        session.ranks.size,
        stages=stages(session.run.checkpoint, session.job.num_steps),
        is_host=session.ranks.device.type == "cpu",
    )


def told(parts: dict[str, int]) -> str:
    """The parts that are something, in GiB."""
    return ", ".join(
        f"{name} {size / GIB:.2f}" for name, size in parts.items() if size / GIB > 5e-3
    )
