"""The recorder: tokens of some samples as they were trained on, and every rollout, in tables under ``out``.

    out/tokens/rank-00000/          samples of some steps, token by token: logprob, weight, advantage, ratio, entropy
    out/tokens/vocabulary.parquet   the bytes of every token id, so that readers need no tokenizer
    out/rollouts/                   every trajectory (taut/rl/records.py)

Sinks that show samples get the texts of some.

Tokens are recorded in the first step, every ``log.tokens.every`` steps, in the last step, and in every step in which a
monitor warns or stops the run. Half of the samples are those with the highest mean -logprob, the others are drawn.
Only numbers that the step has computed anyway are recorded. Each rank records the samples that it scored.

As ``log.tokens.max_mib`` fills, steps are recorded less often: whenever half of the space left is used, the interval
doubles, so that a run of any length stays below the limit.

The tables survive a kill (taut/io/tables.py). A resume drops what was recorded after the step from which it continues.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from taut.errors import OutputError
from taut.train.distributed import Ranks
from taut.train.log.events import Event
from taut.train.log.samples import ShownSample
from taut.train.run_dir import ROLLOUTS, TOKENS, VOCABULARY
from taut.train.settings import LogConfig
from taut.types import Packed, to_host

if TYPE_CHECKING:  # pyarrow takes long to import
    import pyarrow

    from taut.io.tables import TableWriter
    from taut.train.trainer import StepReport, Trainer

LEVELS = 10
"""Number of times that the interval doubles before nothing more is recorded."""
SHARERS = 8
"""Most samples that are named as sharing a prefix with one."""
MIB, GIB = 2**20, 2**30


class Chosen(NamedTuple):
    """A sample whose tokens are to be recorded."""

    sample_id: str
    why: str
    """worst, random, or the name of a warning."""


@dataclass
class Recorder:
    """Records tokens and rollouts, after ``open`` and where the configuration asks for it.

    The loop calls ``look`` with each step before the monitors see it. As a sink it gets all events, with the
    warnings. The first failure to write is reported and ends the recording.
    """

    config: LogConfig = field(default_factory=LogConfig)
    seed: int = 0
    ranks: Ranks = Ranks(0, 1, torch.device("cpu"))  # noqa: RUF009 (it is frozen)
    emit: Callable[..., None] = lambda *_, **__: None
    out: Path | None = field(default=None, init=False)
    """The directory while it is open; else None."""
    _tables: dict[str, TableWriter] = field(default_factory=dict, init=False)
    """Place in ``out`` -> table that this process writes."""
    _current: tuple[StepReport, Trainer] | None = field(default=None, init=False)
    """The step that is in progress."""
    _recorded: set[str] = field(default_factory=set, init=False)
    """Ids of the samples of the current step that are recorded."""
    _is_full: bool = field(default=False, init=False)
    """Whether rollouts have reached log.rollouts.max_gib."""
    _show: Callable[[int, Iterable[ShownSample]], None] = field(default=lambda *_: None, init=False)
    _vocabulary: Sequence[bytes] = field(default=(), init=False)
    _warned: dict[int, str] = field(default_factory=dict, init=False)
    """Step -> name of a warning that came before ``look``."""

    def open(
        self,
        out: Path,
        vocabulary: Callable[[], Sequence[bytes]],
        from_step: int | None,
        show: Callable[[int, Iterable[ShownSample]], None] = lambda *_: None,
    ) -> None:
        """Record in ``out``. Every rank calls it.

        ``vocabulary``: gives the bytes of each token; called on the writer, if anything is recorded. ``from_step``: the
        step from which a resumed run continues, after which records are dropped; None for a new run. ``show``: called
        with texts of samples.
        """
        from taut.io import tables

        self.out, self._show = out, show
        # the writer drops what a resume takes back, and writes the vocabulary
        if not self.ranks.is_writer:
            return
        if from_step is not None:
            for folder in sorted((out / TOKENS).glob("rank-*")):
                tables.drop_from(folder, from_step + 1)
            if (out / ROLLOUTS).is_dir():  # the next step's may have come with the checkpoint
                tables.drop_from(out / ROLLOUTS, from_step + 2)
        if self.records_tokens or self.records_rollouts:
            path, self._vocabulary = out / TOKENS / VOCABULARY, vocabulary()
            with self._recording(), tables.writing_to(path.parent):
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
        with self._recording():
            for table in self._tables.values():
                table.sync()

    def close(self) -> None:
        """Seal the tables."""
        for table in self._tables.values():
            with suppress(OutputError):  # the newest part stays a stream, which is read as well
                table.close()

    # -- called by the loop, the log and rollouts

    def look(self, report: StepReport, trainer: Trainer) -> None:
        """Begin a step, and record it if it is due."""
        self._current, self._recorded = (report, trainer), set()
        warning = self._warned.pop(report.step, None)
        if warning is not None or self._is_due(report.step, trainer.num_steps):
            self._record_step(warning)

    def __call__(self, event: Event) -> None:
        """Take an event, as a sink: record the step that a warning is about."""
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
        """Record the rollouts of a step, replacing earlier ones of the step. Every rank calls it."""
        if not self.records_rollouts:
            return
        assert self.out is not None
        place, limit = self.out / ROLLOUTS, self.config.rollouts.max_gib
        if ROLLOUTS not in self._tables:
            from taut.io import tables

            with self._recording():
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
        """How often the interval has doubled: once each time half of the space left was used."""
        table = self._tables.get(self._place)
        free = 1 - (table.num_bytes if table else 0) / (self.config.tokens.max_mib * MIB)
        return LEVELS if free <= 0.5**LEVELS else int(-math.log2(free))

    @property
    def _place(self) -> str:
        return f"{TOKENS}/rank-{self.ranks.rank:05}"

    def _record_step(self, warning: str | None, named: Sequence[str] = ()) -> None:
        """Record samples of the current step, unless they are recorded. ``named``: samples that a warning names."""
        if not self.records_tokens or self._current is None or self._level() == LEVELS:
            return
        # samples by loss and by chance, after those that a warning names
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

        if self.out is None:  # it could not be written just now
            return
        with self._recording():
            if place not in self._tables:
                self._tables[place] = TableWriter(self.out / place, schema)
            self._tables[place].append(rows)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Report a failure to write, e.g. on a full disk, as a warning, and end the recording."""
        try:
            yield
        except OutputError as error:
            self.out, self._tables = None, {}
            self.emit("warning", name="record", detail=f"nothing more is recorded: {error}")


def choose(report: StepReport, count: int, seed: int) -> list[Chosen]:
    """Choose the samples of a step to record, half by the highest mean -logprob, half drawn; the same on all ranks."""
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
    """Columns of out/tokens; a row is a sample in a step."""
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
    """A row for each of the samples ``why`` (id -> reason) that this rank has scored, read from the device."""
    samples = {sample.id: sample for tree in report.trees for sample in tree.samples}
    rows = []
    for scored in report.scored:
        wanted = [row for row, i in enumerate(scored.packed.sample_ids) if i in why]
        if not wanted:
            continue
        # the micro-batch and its scores, read from the device at once
        packed, scores = scored
        names = [name for name, value in scores._asdict().items() if isinstance(value, Tensor)]
        read = to_host([getattr(scores, name) for name in names] + list(packed.streams.values()))
        of_packed = dict(zip(packed.streams, read[len(names) :], strict=True))
        packed = replace(packed, streams=of_packed)
        scores = scores._replace(**dict(zip(names, read, strict=False)))
        # a row for each sample
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
                    "pictures": [
                        {"start": media.start, "stop": media.stop, "file": media.picture.source}
                        for media in sample.media
                    ],
                }
            )
    return rows


def shown_tokens(row: Mapping[str, Any], vocabulary: Sequence[bytes]) -> ShownSample:
    """A row of out/tokens as texts: the tokens before the first target, and the rest."""
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


def _shared(packed: Packed, row: int) -> tuple[int, list[str]]:
    """Number of leading tokens that a sample shares with others, and the first of these samples."""
    if packed.spans or packed.num_samples == 1:
        return 0, []
    # the path of the sample: the tokens that its last one sees
    last_S = torch.zeros(packed.num_samples, dtype=torch.int64)
    last_S.scatter_reduce_(0, packed.row_R, packed.read_R, "amax")
    leaf = int(last_S[row])
    before = torch.arange(leaf + 1)
    path = before[packed.reach_T[: leaf + 1] > leaf]
    # which samples see each token of the path
    sees = (last_S[None, :] >= path[:, None]) & (last_S[None, :] < packed.reach_T[path][:, None])
    num_shared = int((sees.sum(1) > 1).sum())
    if not num_shared:
        return 0, []
    others = [index for index in sees[num_shared - 1].nonzero().flatten().tolist() if index != row]
    return num_shared, [packed.sample_ids[index] for index in others[:SHARERS]]
