"""Checkpoints: when training state is saved, which checkpoints are kept, and from which one a run resumes.

    out/checkpoints/step-000200/   the tensors (taut/train/sharded.py) and meta.json
    out/checkpoints/latest         "step-000200": always the name of a complete checkpoint

Saving copies the tensors into buffers allocated at the start and hands these to a thread, so training waits for the
copy only. The thread writes to a partial directory, forces every file to the disk, records its SHA-256 in
``meta.json``, renames the directory, and names it in ``latest``. One checkpoint is written at a time. A failure is
raised after the next step; with several ranks, which must raise it together, at the next save or at the end.

``meta.json`` also holds the step, the data cursor, every random generator's state, the identity of the run
(taut/run/fingerprint.py) and the state of each part in ``memories``, with its own digest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import pydantic
import torch
from pydantic import Field
from torch import nn

from taut.config import first_problem
from taut.errors import OutputError
from taut.io import files
from taut.train import random_state, sharded
from taut.train.distributed import Ranks
from taut.train.oom import require_room
from taut.train.run_dir import EVENTS, LATEST, MARK, META, complete, step_of
from taut.train.settings import CheckpointConfig

ROOMIER = "set checkpoint.background=false, which needs no second copy of what is saved"
"""Remedy in an out-of-memory error."""
SPARE = 64 * 2**20
"""Bytes of the disk that must stay free."""


META_LIMIT = 2**29
"""Largest meta.json that is read, in bytes; unused rollouts make it large."""


class Memory(Protocol):
    """A part of a run with state that checkpoints keep, the same on all ranks."""

    @property
    def remembered(self) -> Any:
        """Type of what ``remember`` returns; a checkpoint is validated against it before ``recall``."""

    def remember(self) -> Any:
        """The state as values for JSON."""

    def recall(self, remembered: Any) -> None:
        """Restore the state."""


class Identity(pydantic.BaseModel):
    """Fields of a run's identity (taut/run/fingerprint.py) that are read back."""

    model_config = pydantic.ConfigDict(extra="allow")
    config: dict[str, Any]


class Meta(pydantic.BaseModel):
    """``meta.json``."""

    model_config = pydantic.ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0, lt=2**63)]
    is_measured: bool
    random: Annotated[list[random_state.Saved], Field(min_length=1)]
    """State of the random generators of each rank that saved."""
    memories: dict[str, Any]
    cursor: tuple[Annotated[int, Field(ge=0, lt=2**63)], Annotated[int, Field(ge=0, lt=2**63)]]
    loss: float
    identity: Identity
    files: Annotated[dict[str, str], Field(min_length=1)]
    """Name -> SHA-256."""


class Saved(NamedTuple):
    """A checkpoint from which a run can resume."""

    path: Path
    meta: Meta

    @property
    def step(self) -> int:
        return self.meta.step


class Written(NamedTuple):
    """Result of the thread."""

    step: int
    path: Path
    seconds: float
    missing: list[str]
    """Checkpoints of this run that something else has removed."""


@dataclass
class Checkpoints:
    """The checkpoints of one run. Called after each step, on all ranks."""

    folder: Path
    config: CheckpointConfig
    is_due: Callable[[int], bool]
    """Whether a checkpoint is due after a step; called on all ranks (taut/train/cadence.py)."""
    scorer: nn.Module
    optimizer: torch.optim.Optimizer
    num_steps: int
    ranks: Ranks
    emit: Callable[..., None]
    notes: Callable[[int], Mapping[str, Any]]
    """The run's part of meta.json after a step: cursor, loss and identity."""
    memories: Mapping[str, Memory] = field(default_factory=dict)
    best_step: Callable[[], int | None] = lambda: None
    sync_records: Callable[[], None] = lambda: None
    """Called before a checkpoint is written: forces recorded tables to the disk."""
    is_over: Callable[[], bool] = lambda: False
    """Whether the run ends before its last step."""
    is_sound: Callable[[], bool] = lambda: True
    """Whether the state looks sound; if not, no checkpoint is due before the last step."""
    saved_step: int | None = None
    """The step of the newest checkpoint, complete or being written."""
    _side: Ranks = field(init=False)
    _thread: ThreadPoolExecutor = field(init=False)
    _room: Future[sharded.State] | None = field(init=False, default=None)
    _pending: Future[Written] | None = field(init=False, default=None)
    _written: set[str] = field(init=False, default_factory=set)
    _blocked: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._side = self.ranks.on_cpu()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def prepare(self) -> None:
        """Before training: remove leftovers of a killed run, check the free disk space, allocate the buffers.

        Raises OutputError where the disk cannot hold as many checkpoints as there will be at a time.
        """
        every, keep_best = self.config.every, self.config.keep_best
        if self.ranks.is_writer and self.folder.is_dir():
            files.clear_leftovers(self.folder)
        if not (every or keep_best):
            return
        state = sharded.training_state(self.scorer, self.optimizer)
        num_bytes = int(self.ranks.sum([sharded.num_bytes(state)])[0])
        if self.ranks.is_writer:
            needed = self.config.max_count(self.num_steps) * num_bytes + SPARE
            place = next(p for p in (self.folder, *self.folder.parents) if p.exists())
            held = sum(f.stat().st_size for path in complete(self.folder) for f in path.iterdir())
            free = shutil.disk_usage(place).free + held
            if free < needed:
                raise OutputError(
                    f"checkpoint.keep={self.config.keep} takes up to {needed / 1e9:.2f} GB in {self.folder} and "
                    f"{free / 1e9:.2f} GB are free; expected room for them; free some, or set checkpoint.keep or "
                    "checkpoint.every=0"
                )
        saves_while_training = keep_best or self.config.saves_before(self.num_steps)
        if self.config.background and saves_while_training and not self.config.counts_minutes:
            self._room = self._thread.submit(sharded.allocate, state)

    def __call__(self, step: int) -> None:
        """Save if a checkpoint is due after ``step``."""
        pending, is_alone = self._pending, self.ranks.size == 1
        if pending is not None and pending.done() and (is_alone or not pending.exception()):
            self.settle()
        is_due = self.is_due(step) and self.is_sound()
        if self.is_end(step):
            is_due = bool(self.config.every)
        if is_due or (self.config.keep_best and self.best_step() == step):
            self.save(step)

    def is_end(self, step: int) -> bool:
        """Whether the run ends with a step."""
        return step == self.num_steps or self.is_over()

    def save(
        self,
        step: int,
        *,
        wait: bool = False,
        is_measured: bool = True,
        random: random_state.State | None = None,
    ) -> Path:
        """Save the state after ``step`` unless it is saved already.

        ``wait``: until the checkpoint is complete. ``is_measured``: whether the evaluations after the step are done.
        ``random``: the generators' state after the step, if they have been used since.
        """
        # one checkpoint at a time
        began = time.perf_counter()
        self.settle()
        final = self.folder / f"step-{step:06d}"
        if self.saved_step == step:
            return final

        # copy the tensors into the buffers; without buffers the thread reads them where they are, and training waits
        self.ranks.doing(f"saving {final.name}")
        self.sync_records()
        state = sharded.training_state(self.scorer, self.optimizer)
        if self.config.background and self.config.counts_minutes and not self.is_end(step):
            # a run that is over before takes no memory for them
            self._room = self._room or self._thread.submit(sharded.allocate, state)
        if self._room is not None:
            ready, self._room = self._room, None
            room = require_room(ready.result, f"checkpoint of step {step}", ROOMIER)
            self._room = ready
            sharded.stage(state, room)
            state = room

        # everything else that a resume needs
        meta = {
            "step": step,
            "is_measured": is_measured,
            "random": self.ranks.gather(random or random_state.capture(self.ranks.device)),
            "memories": {name: memory.remember() for name, memory in self.memories.items()},
            **self.notes(step),
        }

        # write in the thread
        self._pending = self._thread.submit(self._write, step, state, meta)
        self.saved_step = step
        is_waited_for = wait or self._room is None
        if is_waited_for:
            self._pending.exception()  # returns when it is written
        self._blocked = time.perf_counter() - began
        if is_waited_for:
            self.settle()
        return final

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and emit its event. Raises OutputError if writing failed."""
        if self._pending is None:
            return
        try:
            written = self._pending.result()
        except OSError as error:
            self._pending, self.saved_step = None, None
            kept = [path.name for path in complete(self.folder)]
            raise OutputError(
                f"a checkpoint cannot be written in {self.folder}: {error.strerror or error}; complete there: "
                f"{', '.join(kept) or 'none'}; see to that, then resume=true goes on from the newest"
            ) from error
        self._pending = None
        self.emit(
            "checkpoint",
            step=written.step,
            path=str(written.path),
            seconds=written.seconds,
            seconds_blocked=self._blocked,
        )
        for name in written.missing:
            detail = f"{self.folder / name} is gone: something else than this run removed it"
            self.emit("warning", name="checkpoint", step=written.step, detail=detail)

    def settle_or_warn(self) -> None:
        """``settle`` while another error ends the run: a failure becomes a warning."""
        try:
            self.settle()
        except OutputError as error:
            self.emit("warning", name="checkpoint", detail=str(error))

    def rescue(self, step: int, random: random_state.State) -> str:
        """Save the state of a failing run. Returns for the error message where it is, or why it is not saved."""
        try:
            return f"training state: {self.save(step, wait=True, random=random)}"
        except OutputError as error:
            return f"its training state was not saved: {error}"

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the thread."""
        try:
            self.settle_or_warn()
        finally:
            self._thread.shutdown()

    def resume(self, saved: Saved) -> None:
        """Restore the state of ``saved``: tensors, memories, generators."""
        # validate the memories before anything is changed
        remembered = {}
        for name, value in saved.meta.memories.items():
            if name not in self.memories:
                continue
            adapter = pydantic.TypeAdapter(self.memories[name].remembered)
            try:
                remembered[name] = adapter.validate_python(value, strict=True)
            except pydantic.ValidationError as error:
                trouble = f"{saved.path / META}: memories.{name}: {first_problem(error)}"
                raise _unusable(saved, trouble) from error

        # tensors, memories, generators
        state = sharded.training_state(self.scorer, self.optimizer)
        try:
            sharded.read(state, saved.path, self.ranks)
        except (OSError, OutputError) as error:
            raise _unusable(saved, str(error)) from error
        for name, value in remembered.items():
            self.memories[name].recall(value)
        generators = saved.meta.random[self.ranks.rank % len(saved.meta.random)]
        random_state.restore(generators.model_dump(exclude_none=True), self.ranks.device)
        self.saved_step = saved.step
        if self.ranks.is_writer:
            self._remove_old()  # a killed run may not have done so

    def _write(self, step: int, state: sharded.State, meta: dict[str, Any]) -> Written:
        """Write one checkpoint. Runs in the thread, on all ranks: each writes its shards and digests its share of the
        files; then the writer completes the directory.
        """
        began, side = time.perf_counter(), self._side
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{final.name}.partial"

        def digests() -> dict[str, str]:
            """The SHA-256 of this rank's share of the files."""
            names = sorted(path.name for path in partial.iterdir())
            return {name: files.digest(partial / name) for name in names[side.rank :: side.size]}

        try:
            side.run_everywhere(
                lambda: self._make_place(partial, sharded.num_bytes(state)), OSError
            )
            sharded.write(state, partial, side)
            parts = side.run_everywhere(digests, OSError)
            body = {
                **meta,
                "files": {name: value for part in parts for name, value in part.items()},
            }
            missing = side.run_everywhere(
                lambda: self._complete(partial, final, body) if side.is_writer else [], OSError
            )
        except OSError:
            if side.is_writer:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return Written(step, final, time.perf_counter() - began, missing[0])

    def _make_place(self, partial: Path, num_bytes: int) -> None:
        needed = int(self._side.sum([num_bytes])[0]) + SPARE
        if not self._side.is_writer:
            return
        if not (self.folder.parent / MARK).is_file():
            raise OSError(f"{self.folder.parent} was removed or emptied while the run was writing")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")

    def _complete(self, partial: Path, final: Path, body: dict[str, Any]) -> list[str]:
        """Rename a written checkpoint, remove old ones, and return the names of those that something else removed."""
        text = json.dumps({"sha256": _digest_of(body), **body})
        if len(text) > META_LIMIT:
            raise OSError(
                f"{META} has {len(text):,} bytes, and at most {META_LIMIT:,} can be read back; lower "
                "batch.samples_per_step"
            )
        files.write_text(partial / META, text)
        if (events := self.folder.parent / EVENTS).is_file():
            files.sync(events)  # a resume does not repeat these steps
        files.replace_directory(partial, final)
        files.write_text(self.folder / LATEST, f"{final.name}\n")
        names = [path.name for path in complete(self.folder)]
        missing = sorted(self._written - set(names))
        self._written = {*names[-self.config.keep :]}
        self._remove_old()
        return missing

    def _remove_old(self) -> None:
        """Remove all checkpoints but the newest, and with keep_best that of the best model."""
        best = self.best_step()
        for path in complete(self.folder)[: -self.config.keep]:
            if not (self.config.keep_best and step_of(path) == best):
                files.remove_directory(path)


def find_newest(
    folder: Path, ranks: Ranks, *, skip_damaged: bool
) -> tuple[Saved | None, list[str]]:
    """Find the newest complete checkpoint with intact files, or None; also returns the damage of newer ones.

    Raises OutputError where the newest is damaged and ``skip_damaged`` is false, or where all are damaged.
    """
    damaged: list[str] = []
    for path in reversed(ranks.gather(complete(folder))[0]):  # a network may show them differently
        try:
            return _read(path, ranks), damaged
        except OutputError as trouble:
            damaged.append(str(trouble))
            if not skip_damaged:
                raise OutputError(
                    f"resume=true: {trouble}; expected the files as they were written; set "
                    "checkpoint.skip_damaged=true to go on from the one before, or bring the files back"
                ) from None
    if damaged:
        raise OutputError(
            f"resume=true: no checkpoint is left to go on from: {'; '.join(damaged)}; bring the files back, or start "
            "again with overwrite=true"
        )
    return None, []


def set_aside(folder: Path, after_step: int) -> None:
    """Rename the checkpoints after a step, which are damaged: the run will take these steps again. ``latest`` then
    names the newest of the others; after a kill it may be outdated.
    """
    checkpoints = complete(folder)
    kept = [path for path in checkpoints if step_of(path) <= after_step]
    if kept:
        files.write_text(folder / LATEST, f"{kept[-1].name}\n")
    else:
        (folder / LATEST).unlink(missing_ok=True)
    for path in checkpoints[len(kept) :]:
        path.rename(path.with_name(f"damaged-{path.name}-{int(time.time())}"))


def _unusable(saved: Saved, reason: str) -> OutputError:
    return OutputError(
        f"resume=true: {reason}; expected the files as they were written; bring them back, or remove {saved.path} "
        "to go on from the checkpoint before"
    )


def _read(path: Path, ranks: Ranks) -> Saved:
    """A checkpoint with all files intact; the ranks share the files. Raises OutputError on all ranks."""
    metas: list[Meta] = []

    def verify() -> None:
        try:
            # meta.json, by the digest in it
            body = files.read_json(path / META, META_LIMIT)
            wanted = body.pop("sha256", None) if isinstance(body, dict) else None
            if wanted is None or wanted != _digest_of(body):
                raise OutputError(
                    f"{path / META} is damaged: its SHA-256 is not the one noted when it was written"
                )
            meta = Meta.model_validate_json(json.dumps(body))
            step = step_of(path)
            if {step, meta.cursor[0]} != {meta.step}:
                raise OutputError(
                    f"{path / META} is of step {meta.step} and of cursor {meta.cursor[0]}; expected {step}"
                )

            # the files that it lists, by their digests
            odd = next((name for name in meta.files if Path(name).name != name), None)
            if odd is not None:
                raise OutputError(f"{path / META} names the file {odd!r}; expected files in {path}")
            mine = sorted(meta.files.items())[ranks.rank :: ranks.size]
            if damage := files.first_damaged(path, mine):
                raise OutputError(damage)
            sharded.read_index(path)
            metas.append(meta)
        except pydantic.ValidationError as error:
            raise OutputError(
                f"{path / META} is no checkpoint of taut's: {first_problem(error)}"
            ) from None
        except OutputError:
            raise
        except OSError as error:
            what = error.filename or path / META
            raise OutputError(f"{what} cannot be read ({error.strerror or error})") from None
        except ValueError as error:
            raise OutputError(f"{path / META} cannot be read ({error})") from None

    ranks.run_everywhere(verify)
    return Saved(path, metas[0])


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
