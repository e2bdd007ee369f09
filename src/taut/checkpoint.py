"""Checkpoints: weights, optimizer and step, written beside and renamed, read back sharded or not.

    out/checkpoints/step-000200/   torch.distributed.checkpoint files and meta.json

The data cursor is the step itself, since the plan is a pure function of seed and step. ``meta.json`` holds the identity
of the run (configuration and data fingerprint); a run whose identity differs is refused with the keys that changed.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from taut.config import configclass
from taut.errors import ConfigError, OutputError
from taut.parallel import Ranks


@configclass
class CheckpointConfig:
    """When training state is saved."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: none but the final model."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints to keep."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run; callable after each step."""

    folder: Path
    config: CheckpointConfig
    scorer: nn.Module
    optimizer: torch.optim.Optimizer
    identity: Mapping[str, Any]
    ranks: Ranks
    emit: Any

    def __call__(self, step: int) -> None:
        """Save if a checkpoint is due after ``step``."""
        if self.config.every and step % self.config.every == 0:
            self.save(step)

    def save(self, step: int) -> Path:
        """Write the checkpoint of a finished step; it appears under its name only when complete."""
        final = self.folder / f"step-{step:06d}"
        beside = self.folder / f".step-{step:06d}.partial"
        try:
            if self.ranks.is_writer:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            self.ranks.barrier()
            with _quiet():
                save_sharded(self._state(), checkpoint_id=beside)
            if self.ranks.is_writer:
                meta = {"step": step, "identity": self.identity}
                (beside / "meta.json").write_text(json.dumps(meta, indent=1))
                shutil.rmtree(final, ignore_errors=True)
                beside.rename(final)
                self._forget()
        except OSError as error:
            raise OutputError(
                f"the checkpoint {final} cannot be written: {error}; free the place and resume"
            ) from error
        self.ranks.barrier()
        self.emit("checkpoint", step=step, path=str(final))
        return final

    def resume(self) -> int:
        """Load the newest complete checkpoint; its step. 0 where there is none."""
        found = complete(self.folder)
        if not found:
            return 0
        state = self._state()
        with _quiet():
            load_sharded(state, checkpoint_id=found[-1])
        set_state_dict(
            self.scorer,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(_meta(found[-1])["step"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.scorer, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _forget(self) -> None:
        for old in complete(self.folder)[: -self.config.keep]:
            shutil.rmtree(old)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [path.parent for path in folder.glob("step-*/meta.json")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def require_resumable(folder: Path, identity: Mapping[str, Any], num_steps: int) -> None:
    """Raise ConfigError where the newest checkpoint belongs to another run, or lies beyond this one's end."""
    for newest in complete(folder)[-1:]:
        meta = _meta(newest)
        changed = difference(meta["identity"], json.loads(json.dumps(identity)))
        if changed:
            raise ConfigError(
                f"resume=true: {newest} belongs to another run: {'; '.join(changed[:5])}; "
                "resume with what it was started with, or start anew in another out"
            )
        if meta["step"] > num_steps:
            raise ConfigError(
                f"resume=true: {newest} is beyond the end of this run, step {num_steps}; "
                f"expected steps={meta['step']} or more; raise steps or epochs"
            )


def _meta(checkpoint: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((checkpoint / "meta.json").read_text())
    return meta


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that one process saves and loads by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Readable differences between two nested mappings."""
    return [
        f"{key}: {was!r} then, {now!r} now" for key, was, now in _leaves(old, new, "") if was != now
    ]


def _leaves(old: Any, new: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [(prefix, old, new)]
    found = []
    for key in sorted({*old, *new}):
        found += _leaves(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    return found
