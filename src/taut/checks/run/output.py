"""``out`` and the disk under it: what the run would be refused for at its beginning, and what it would fail of later.

Predicted are the checkpoints that will be there at a time, as ``checkpoint`` counts them, and the model (with
save.merged=false only the adapter): once, or twice with the best one. Logs are small and left out. Each
part is named, with what has to stay free, and their sum is what is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.config import user_path
from taut.errors import OutputError
from taut.models.lora import is_adapted
from taut.train import sharded
from taut.train.checkpoint import SPARE
from taut.train.run_dir import CHECKPOINTS, WRITTEN, complete, require_usable


def ask(session: Session) -> Finding:
    """Can the run be written to its out, and is there room for checkpoints and model?"""
    run = session.run
    if run.out is None:
        return skipped("out is not set")
    try:
        out = user_path(run.out, "out")
        require_usable(out, resume=run.resume, overwrite=run.overwrite)
    except OutputError as error:
        says, _, remedy = str(error).rpartition("; ")
        return failed(says, remedy=remedy)
    place = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free + sum(_sizes(session, out))
    sizes = {"checkpoints": _checkpoints(session), "model": _models(session), "kept free": SPARE}
    needed = sum(sizes.values())
    parts = [f"{name}: {_gb(size)}" for name, size in sizes.items()]
    if free < needed:
        return failed(
            f"{_gb(needed)} are needed at {out}, and {_gb(free)} are free",
            number=free / 1e9,
            unit="GB free",
            evidence=parts,
            remedy=f"free some, name an out on another disk, or set checkpoint.keep=1 (it is {run.checkpoint.keep}) or "
            f"checkpoint.every=0 (it is {run.checkpoint.every})",
        )
    return passed(f"there is room: {_gb(free)} are free", needed / 1e9, "GB needed", parts)


def _checkpoints(session: Session) -> int:
    """Bytes of the checkpoints that are there at a time."""
    job, config = session.job, session.run.checkpoint
    if not (config.every or config.keep_best):
        return 0
    one = sharded.num_bytes(sharded.training_state(session.scorer, job.optimizer))
    return config.most(job.num_steps) * int(session.ranks.sum([one])[0])


def _models(session: Session) -> int:
    """Bytes of the models that are there at a time, the one being written included."""
    size = session.built.saved_dtype.itemsize
    parameters = session.scorer.parameters()
    model = size * sum(
        p.numel() for p in parameters if not p.requires_grad or not _adapted(session)
    )
    adapter = 4 * sum(p.numel() for p in session.job.trained) if _adapted(session) else 0
    count = 1 if session.run.eval.best is None else 2
    return model * count + adapter if session.run.save.merged else adapter * count


def _adapted(session: Session) -> bool:
    return is_adapted(session.scorer.model)


def _sizes(session: Session, out: Path) -> Iterator[int]:
    """Of the files that go before, or as, new ones are written."""
    gone = [out / name for name in WRITTEN] if session.run.overwrite else []
    for path in gone or complete(out / CHECKPOINTS):
        files = path.rglob("*") if path.is_dir() else [path]
        yield from (file.stat().st_size for file in files if file.is_file())


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"
