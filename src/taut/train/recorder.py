"""The recorder: the tokens of some samples as they were trained on, and every rollout, in tables under ``out``.

    out/tokens/rank-00000/     samples of some steps, token by token: logprob, weight, advantage, ratio, entropy
    out/tokens/vocabulary.parquet   the bytes of every token id, so that nothing that reads them needs the tokenizer
    out/rollouts/              every trajectory (taut/rl/records.py)

Sinks that show samples get texts of some of these.

Tokens are recorded of the first step, every ``log.tokens.every`` steps, of the last step, and of every step in which a
monitor warns or stops the run: half of the samples are those with the highest mean -logprob, the others are drawn. They
are what the step computed anyway; nothing is run for them. Each rank records the samples that it scored.

As ``log.tokens.max_mib`` fills, steps are recorded more seldom: half of what is left of it holds twice as many steps as
the half before, so that a run of any length stays below it.

The tables survive a kill (taut/io/tables.py), and a resume drops what was recorded after the step that it goes on from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from taut.errors import OutputError
from taut.train.distributed import Ranks
from taut.train.log import LogConfig
from taut.train.log.events import Event
from taut.train.log.samples import ShownSample
from taut.train.run_dir import ROLLOUTS, TOKENS, VOCABULARY
from taut.types import Packed, Sample, Scores, to_host

if TYPE_CHECKING:  # pyarrow takes long to import
    import pyarrow

    from taut.io.tables import TableWriter
    from taut.train.trainer import Scored, StepReport, Trainer

LEVELS = 10
"""How often the steps between two records double before nothing more is recorded."""
SHARERS = 8
"""Samples that are named as having a prefix in common with one."""
MIB, GIB = 2**20, 2**30


class Chosen(NamedTuple):
    """A sample whose tokens are to be recorded."""

    sample_id: str
    why: str
    """worst, random, or what the warning is called."""


@dataclass
class Recorder:
    """Records tokens and rollouts. Until ``open`` is called, and where nothing is asked for, it does nothing.

    The loop shows it each step before the monitors see it (``look``), and as a sink it gets all events: warnings are
    among them. What it cannot write is reported once, and nothing more is recorded then.
    """

    config: LogConfig = field(default_factory=LogConfig)
    seed: int = 0
    ranks: Ranks = Ranks(0, 1, torch.device("cpu"))  # noqa: RUF009 (it is frozen)
    emit: Callable[..., None] = lambda *_, **__: None
    out: Path | None = field(default=None, init=False)
    """None: it is not open, or no longer."""
    _tables: dict[str, TableWriter] = field(default_factory=dict, init=False)
    """Those that this process has written to, by their place in ``out``."""
    _current: tuple[StepReport, Trainer] | None = field(default=None, init=False)
    """The step that has been looked at, until it is over."""
    _recorded: set[str] = field(default_factory=set, init=False)
    """Its samples that are recorded."""
    _is_full: bool = field(default=False, init=False)
    """Whether no more rollouts are recorded for want of space."""
    _show: Callable[[int, Iterable[ShownSample]], None] = field(default=lambda *_: None, init=False)
    _vocabulary: Sequence[bytes] = field(default=(), init=False)
    _warned: dict[int, str] = field(default_factory=dict, init=False)
    """Steps of which a warning came before they were looked at -> its name."""

    def open(
        self,
        out: Path,
        vocabulary: Callable[[], Sequence[bytes]],
        from_step: int | None,
        show: Callable[[int, Iterable[ShownSample]], None] = lambda *_: None,
    ) -> None:
        """Record in ``out``; every rank calls it. ``vocabulary``: gives the bytes of each token, and is asked
        by the rank that writes, where something is recorded. ``from_step``: the step from which a run goes on, after
        which nothing stands; None for one that begins. ``show``: gets texts of samples.
        """
        from taut.io import tables

        self.out, self._show = out, show
        if not self.ranks.is_writer:
            return
        if from_step is not None:
            for folder in sorted((out / TOKENS).glob("rank-*")):
                tables.drop_from(folder, from_step + 1)
            if (out / ROLLOUTS).is_dir():  # the next step's may have come with the checkpoint
                tables.drop_from(out / ROLLOUTS, from_step + 2)
        if self.records_tokens or self.records_rollouts:
            path, self._vocabulary = out / TOKENS / VOCABULARY, vocabulary()
            with tables.writing_to(path.parent):
                path.parent.mkdir(exist_ok=True)
                tables.write_column(path, "bytes", self._vocabulary)

    @property
    def records_tokens(self) -> bool:
        return self.out is not None and self.config.tokens.samples > 0

    @property
    def records_rollouts(self) -> bool:
        return self.out is not None and self.config.rollouts.max_gib > 0 and self.ranks.is_writer

    def sync(self) -> None:
        """Force what is recorded to the disk."""
        for table in self._tables.values():
            table.sync()

    def close(self) -> None:
        """Seal the tables."""
        for table in self._tables.values():
            table.close()

    # -- what it is told

    def look(self, report: StepReport, trainer: Trainer) -> None:
        """Keep a step until it is over, and record it if it is its turn."""
        self._current, self._recorded = (report, trainer), set()
        warning = self._warned.pop(report.step, None)
        if warning is not None or self._is_due(report.step, trainer.num_steps):
            self._record_step(warning)

    def __call__(self, event: Event) -> None:
        """A sink: a warning has the step recorded that it is about."""
        match event:
            case {"kind": "warning", "name": str(name), "step": int(step)}:
                if self._current is not None and self._current[0].step == step:
                    self._record_step(name, event.get("sample_ids", ()))
                else:
                    self._warned[step] = name
            case {"kind": "end", "outcome": "stopped"} if self._current is not None:
                self._record_step("stopped")
            case {"kind": "step"}:
                self._current = None

    def add_rollouts(
        self, step: int, schema: pyarrow.Schema, rows: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Record the rollouts of a step, in place of any that are recorded of it; called by every rank."""
        if not self.records_rollouts:
            return
        assert self.out is not None
        place, limit = self.out / ROLLOUTS, self.config.rollouts.max_gib
        if ROLLOUTS not in self._tables:
            from taut.io import tables

            tables.drop_from(place, step)
        elif self._tables[ROLLOUTS].num_bytes >= limit * GIB:
            if not self._is_full:
                self._is_full = True
                detail = f"{place} has {limit:g} GiB (log.rollouts.max_gib); later rollouts are not recorded"
                self.emit("warning", name="record", detail=detail)
            return
        table = rows()
        self._append(ROLLOUTS, schema, table)
        every = self.config.tokens.every
        if step == 1 or (every > 0 and step % every == 0):
            self._show(step, map(shown_rollout, table))

    # -- tokens

    def _is_due(self, step: int, num_steps: int) -> bool:
        if not self.records_tokens:
            return False
        every = self.config.tokens.every << self._level()
        return step in (1, num_steps) or (every > 0 and step % every == 0)

    def _level(self) -> int:
        """How often the steps between two records have doubled: each time half of the space that was left is used."""
        table = self._tables.get(self._place)
        free = 1 - (table.num_bytes if table else 0) / (self.config.tokens.max_mib * MIB)
        return LEVELS if free <= 0.5**LEVELS else int(-math.log2(free))

    @property
    def _place(self) -> str:
        return f"{TOKENS}/rank-{self.ranks.rank:05}"

    def _record_step(self, warning: str | None, named: Sequence[str] = ()) -> None:
        """Record samples of the current step that are not recorded yet. ``named``: those that a warning names."""
        if not self.records_tokens or self._current is None or self._level() == LEVELS:
            return
        report, trainer = self._current
        chosen = choose(report, self.config.tokens.samples, self.seed)
        if warning is not None:
            chosen = [Chosen(i, warning) for i in named][: self.config.tokens.samples] + chosen
        why = {
            sample_id: reason
            for sample_id, reason in reversed(chosen)
            if sample_id not in self._recorded
        }
        self._recorded |= why.keys()
        rows = token_rows(report, trainer, why)
        if rows:
            self._append(self._place, token_schema(), rows)
            if ROLLOUTS not in self._tables:  # those say more
                self._show(report.step, (shown_tokens(row, self._vocabulary) for row in rows))

    def _append(
        self, place: str, schema: pyarrow.Schema, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        from taut.io.tables import TableWriter

        assert self.out is not None
        try:
            if place not in self._tables:
                self._tables[place] = TableWriter(self.out / place, schema)
            self._tables[place].append(rows)
        except OutputError as error:
            self.out = None
            self.emit("warning", name="record", detail=f"nothing more is recorded: {error}")


def choose(report: StepReport, count: int, seed: int) -> list[Chosen]:
    """The samples of a step to record: half with the highest mean -logprob, others drawn; the same on every rank."""
    ids = list(dict.fromkeys(report.sample_ids))
    ranked = sorted(report.nll, key=lambda sample_id: -report.nll[sample_id])
    worst = ranked[: count - count // 2]
    others = [sample_id for sample_id in ids if sample_id not in set(worst)]
    random = np.random.default_rng([seed, report.step, 3])
    drawn = random.permutation(len(others))[: count - len(worst)].tolist()
    return [Chosen(i, "worst") for i in worst] + [
        Chosen(others[i], "random") for i in sorted(drawn)
    ]


def token_schema() -> pyarrow.Schema:
    """The columns of out/tokens: a row is a sample in a step."""
    import pyarrow as pa

    numbers, places = pa.list_(pa.float32()), pa.list_(pa.int32())
    return pa.schema(
        {
            "step": pa.int32(),
            "sample_id": pa.string(),
            "why": pa.string(),
            "ids_T": places,
            "target_at_N": places,
            "weight_N": numbers,
            "logp_N": numbers,
            "entropy_N": numbers,
            "streams": pa.map_(pa.string(), numbers),  # advantage_N, ratio_N, ..., by name
            "read_at_R": places,
            "scalar_R": numbers,
            "values": pa.map_(pa.string(), pa.float64()),
            "num_shared": pa.int32(),  # leading tokens that were computed for other samples too
            "shared_with": pa.list_(pa.string()),
            "pictures": pa.list_(
                pa.struct({"start": pa.int32(), "stop": pa.int32(), "file": pa.string()})
            ),
        }
    )


def token_rows(
    report: StepReport, trainer: Trainer, why: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A row for each of these samples (id -> why) that this rank has scored. Reads their scores from the device."""
    samples = {sample.id: sample for tree in report.trees for sample in tree.samples}
    rows = []
    for scored in report.scored:
        wanted = [row for row, i in enumerate(scored.packed.sample_ids) if i in why]
        if not wanted:
            continue
        packed, scores = _on_host(scored)
        streams = {
            name: value
            for name, value in packed.streams.items()
            if value.ndim == 1  # lists of a teacher's likeliest tokens stay out
        } | dict(trainer.source.loss.token_values(scores, packed))
        for row in wanted:
            sample = samples[packed.sample_ids[row]]
            is_its_N, is_its_R = packed.row_N == row, packed.row_R == row
            num_shared, shared_with = _shared(packed, row)
            rows.append(
                {
                    "step": report.step,
                    "sample_id": sample.id,
                    "why": why[sample.id],
                    "ids_T": sample.ids_T,
                    "target_at_N": sample.target_at_N,
                    "weight_N": _part(packed.weight_N, is_its_N),
                    "logp_N": _part(scores.logp_N, is_its_N),
                    "entropy_N": _part(scores.entropy_N, is_its_N),
                    "streams": [(name, _part(value, is_its_N)) for name, value in streams.items()],
                    "read_at_R": sample.read_at_R,
                    "scalar_R": _part(scores.scalar_R, is_its_R),
                    "values": list(sample.values.items()),
                    "num_shared": num_shared,
                    "shared_with": shared_with,
                    "pictures": _pictures(sample),
                }
            )
    return rows


def shown_tokens(row: Mapping[str, Any], vocabulary: Sequence[bytes]) -> ShownSample:
    """A row of out/tokens as texts: what stands before the first target, and the rest."""
    ids_T, first = row["ids_T"], min(row["target_at_N"], default=len(row["ids_T"]))
    prompt, answer = (
        b"".join(vocabulary[i] for i in part).decode("utf-8", "replace")
        for part in (ids_T[:first], ids_T[first:])
    )
    return ShownSample(
        row["sample_id"],
        prompt,
        answer,
        reward=dict(row["values"]).get("reward"),
        advantage=_mean(dict(row["streams"]).get("advantage_N")),
        logprob=_mean(row["logp_N"]),
    )


def shown_rollout(row: Mapping[str, Any]) -> ShownSample:
    """A row of out/rollouts as texts."""
    messages = json.loads(row["prompt"])
    if isinstance(messages, list):
        messages = "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in messages)
    return ShownSample(
        row["sample_id"],
        str(messages),
        row["text"],
        reward=row["reward"],
        advantage=_mean(row["advantage_N"]),
        logprob=_mean(row["logp_N"]),
    )


def _mean(numbers: Any) -> float | None:
    return None if numbers is None or not len(numbers) else float(np.mean(numbers))


def _part(value: Tensor | None, where: Tensor) -> Any:
    """A sample's part of a score, float32; None where there is no such score."""
    if value is None or value.numel() != where.numel():
        return None
    return value[where].float().numpy()


def _on_host(scored: Scored) -> tuple[Packed, Scores]:
    """A micro-batch and its scores in host memory, read from the device at once."""
    packed, scores = scored
    names = [name for name, value in scores._asdict().items() if isinstance(value, Tensor)]
    found = [getattr(scores, name) for name in names] + list(packed.streams.values())
    read = to_host(found)
    streams = dict(zip(packed.streams, read[len(names) :], strict=True))
    return replace(packed, streams=streams), scores._replace(**dict(zip(names, read, strict=False)))


def _shared(packed: Packed, row: int) -> tuple[int, list[str]]:
    """How many leading tokens of a sample lie in prefixes of other samples too, and the first of these samples."""
    if packed.spans or packed.num_samples == 1:
        return 0, []
    last_S = torch.zeros(packed.num_samples, dtype=torch.int64)
    last_S.scatter_reduce_(0, packed.row_R, packed.read_R, "amax")
    leaf = int(last_S[row])
    before = torch.arange(leaf + 1)
    path = before[packed.reach_T[: leaf + 1] > leaf]
    sees = (last_S[None, :] >= path[:, None]) & (last_S[None, :] < packed.reach_T[path][:, None])
    num_shared = int((sees.sum(1) > 1).sum())
    if not num_shared:
        return 0, []
    others = [index for index in sees[num_shared - 1].nonzero().flatten().tolist() if index != row]
    return num_shared, [packed.sample_ids[index] for index in others[:SHARERS]]


def _pictures(sample: Sample) -> list[dict[str, Any]]:
    return [
        {"start": media.start, "stop": media.stop, "file": media.picture.source}
        for media in sample.media
    ]
