"""``taut data filter IN ... out=FILE.jsonl|DIR/``: keep the rows that meet every condition.

Each row is measured, then judged (curate/conditions.py):

    characters          of prompt and answers
    tokens              of its longest sample, as model renders it
    loss                mean negative logprob of its targets under model
    reward              weighted sum of the rewards that judge its answer
    pass_rate           share of the completions of its prompt that reach pass_reward, from a file of ``taut generate
                        rewards=...`` or the scores of ``taut eval``
    language            the share of its prompt and answers in one of the languages

Losses and rewards take long. They are written to ``out`` + ``.measured.jsonl`` as soon as they are known, a line for
each row. After a kill the same command with ``resume=true`` goes on from there, also with other bounds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from taut.commands.reading import print_decisions, write_errors
from taut.config import fields_of, home_path, to_dict
from taut.data.packing import ALONE, pack
from taut.data.read.folder import beside
from taut.data.render.render import Renderer, render_any
from taut.data.rows.messages import Completion, Document, text_of
from taut.data.rows.prompts import reference_texts
from taut.data.rows.schema import AnyRow, best_row
from taut.errors import DataError, OutputError
from taut.inference.factory import open_engine, open_renderer
from taut.inference.local import LocalEngine
from taut.inference.reward_model import open_rater
from taut.inference.settings import ModelUse
from taut.io import files
from taut.io.terminal import Terminal
from taut.rewards.format import Language
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.rewards.verifier import RewardInput
from taut.types import Sample
from taut_tools.curate.commands import Curated, open_for, show, write
from taut_tools.curate.conditions import Bound, Conditions, read_pattern, read_where
from taut_tools.curate.rows import Line, RowSet, Verdict, chunks, content
from taut_tools.curate.settings import Filter

CHUNK_ROWS = 256
"""Rows measured at a time."""
MEASURED = "measured.jsonl"


def bounds_of(config: Filter) -> list[Bound]:
    """The bounds that are set."""
    bounds = [
        Bound(key, key[4:], getattr(config, key))
        for key in fields_of(Filter)
        if key[:4] in ("min_", "max_")
        and key != "min_language"
        and getattr(config, key) is not None
    ]
    if config.language is not None:
        bounds.append(Bound("min_language", "language", config.min_language, keeps_unknown=True))
    return bounds


def run(config: Filter) -> int:
    """Filter and print a summary."""
    return show(filter_rows(config, Terminal(soft_wrap=True)))


def filter_rows(config: Filter, console: Terminal | None = None) -> Curated:
    """Write the rows that meet every condition; decisions are printed on ``console``."""
    where = [config.where] if isinstance(config.where, str) else config.where
    conditions = Conditions(
        bounds_of(config),
        [read_where(text) for text in where],
        read_pattern(config.match, "match"),
        read_pattern(config.reject, "reject"),
    )
    rows = open_for(config)
    with ExitStack() as stack:
        measure = _Measure(config, {bound.name for bound in conditions.bounds}, stack, console)
        # Losses and rewards take long, and are kept in a file.
        record = None
        if measure.engine is not None or measure.reward_set is not None:
            record = stack.enter_context(_Measured(config, rows))

        def verdicts() -> Iterator[Verdict]:
            for chunk in chunks(rows.lines(), CHUNK_ROWS):
                found = [(line, *line.read()) for line in chunk]
                known = [] if record is None else record.take([line.place for line in chunk])
                values = [*known, *measure(found[len(known) :])]
                if record is not None:
                    record.add(values[len(known) :])
                for (line, read, row), value in zip(found, values, strict=True):
                    text = content(row).text
                    broken = conditions.broken(text, read, value, line.place)
                    errors = {"error": value["error"]} if broken and "error" in value else {}
                    yield Verdict(line, broken[0], broken[1] | errors) if broken else Verdict(line)

        return write(config, "filter", rows, verdicts(), dict)


Values = dict[str, Any]
"""Measured values of a row by name, with its id, and an error where one could not be measured."""


class _Measure:
    """Measures rows, with a model and rewards that ``stack`` closes."""

    def __init__(
        self, config: Filter, names: Collection[str], stack: ExitStack, console: Terminal | None
    ) -> None:
        self.config, self.names = config, names
        self.renderer: Renderer | None = None
        self.engine: LocalEngine | None = None
        self.reward_set: RewardSet | None = None
        self.language: Language | None = None
        self.rates: Mapping[str, float] = {}
        if config.model is not None:
            use = ModelUse(
                model=config.model,
                template=config.template,
                dtype=config.dtype,
                device=config.device,
                trust_remote_code=config.trust_remote_code,
            )
            rendering = open_renderer(use)
            self.renderer = rendering.renderer
            if "loss" in names:
                opened = stack.enter_context(open_engine(use, rendering))
                print_decisions(console, opened.decisions)
                assert isinstance(opened.engine, LocalEngine)
                self.engine = opened.engine
        if config.rewards is not None:
            self.reward_set = stack.enter_context(
                open_rewards(config.rewards, open_rater=open_rater)
            )
            print_decisions(console, self.reward_set.decisions)
        if config.language is not None:
            self.language = Language(language=config.language)
            self.language.prepare()
        if config.completions is not None:
            self.rates = read_pass_rates(config.completions, config.pass_reward)

    def __call__(self, rows: Sequence[tuple[Line, Any, AnyRow]]) -> list[Values]:
        if not rows:
            return []
        values: list[Values] = [{"id": line.place} for line, _, _ in rows]
        for value, (line, record, row) in zip(values, rows, strict=True):
            text = content(row).text
            value["characters"] = len(text)
            if self.language is not None:
                value["language"] = self.language(RewardInput(text=text))
            if self.config.completions is not None:
                own_id = record.get("id")
                value["pass_rate"] = self.rates.get(str(own_id), self.rates.get(line.place))
        if self.renderer is not None:
            self._render(self.renderer, rows, values)
        if self.reward_set is not None:
            answers = [self._answered(line.place, record, row) for line, record, row in rows]
            for value, result in zip(values, self.reward_set.grade(answers), strict=True):
                value["reward"] = result.total
                if result.error is not None:
                    value["error"] = result.error
        return values

    def _render(
        self, renderer: Renderer, rows: Sequence[tuple[Line, Any, AnyRow]], values: list[Values]
    ) -> None:
        """Measure tokens and losses."""
        if (line := rows[0][0]).part.columns.kind == "prompt":
            raise DataError(
                f"{line.place}: the row is a prompt, and tokens and losses are those of answers; expected rows with "
                "answers; leave model out"
            )
        groups = render_any([row for _, _, row in rows], renderer)
        for value, samples in zip(values, groups, strict=True):
            value["tokens"] = max((sample.num_tokens for sample in samples), default=0)
        if self.engine is None:
            return
        # Of rows with several answers the best one counts. Samples that fit are packed and scored.
        bests = [best_row(row) for _, _, row in rows]
        groups = render_any(bests, renderer)
        context = self.engine.context
        sums = [np.zeros(2) for _ in rows]
        work = [(number, sample) for number, group in enumerate(groups) for sample in group]
        fits = [
            (number, sample)
            for number, sample in work
            if sample.num_targets and (context is None or sample.num_tokens <= context)
        ]
        for batch in _batches(fits, self.config.tokens_per_batch):
            packed = pack([replace(s, id=str(k)) for k, (_, s) in enumerate(batch)], ALONE)
            with torch.no_grad(), self.engine.compute():
                logp_N = self.engine.scorer(packed).logp_N.double().cpu().numpy()
            for row, name in enumerate(packed.sample_ids):
                own_N = logp_N[packed.row_N.numpy() == row]
                sums[batch[int(name)][0]] += (own_N.sum(), own_N.size)
        # A row has a loss if all of its samples were scored.
        lost = {number for number, _ in work} - {number for number, _ in fits}
        for number, (value, (total, count)) in enumerate(zip(values, sums, strict=True)):
            value["loss"] = -total / count if count and number not in lost else None
            if number in lost:
                value["error"] = "longer than the model's context, or without targets"

    def _answered(self, place: str, record: Any, row: AnyRow) -> RewardInput:
        """The best answer of a row as rewards judge it."""
        best = best_row(row)
        references: tuple[str, ...] = ()
        if self.config.reference is not None:
            found = reference_texts(record.get(self.config.reference))
            if found is None:
                raise DataError(
                    f"{place}: the row has no right answer in the column reference={self.config.reference}; expected "
                    "a text, a number, or a list of them; correct the row, or name another column"
                )
            references = found
        if isinstance(best, Completion):
            return RewardInput(
                text=best.completion, references=references, row=record, prompt=best.prompt
            )
        if isinstance(best, Document) or best.messages[-1]["role"] != "assistant":
            raise DataError(
                f"{place}: the row does not end in an answer; expected one for rewards to judge; leave rewards out"
            )
        *prompt, answer = best.messages
        return RewardInput(
            text=text_of(answer["content"]), references=references, row=record, prompt=tuple(prompt)
        )


def _batches(
    work: Sequence[tuple[int, Sample]], max_tokens: int
) -> Iterator[list[tuple[int, Sample]]]:
    """Group samples of similar length into batches of at most ``max_tokens``; a longer sample is a batch alone."""
    batch: list[tuple[int, Sample]] = []
    for item in sorted(work, key=lambda each: each[1].num_tokens):
        if batch and sum(s.num_tokens for _, s in batch) + item[1].num_tokens > max_tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def read_pass_rates(path: str, pass_reward: float) -> dict[str, float]:
    """The share of each prompt's completions whose reward is at least ``pass_reward``, by the prompt's id."""
    passed: dict[str, list[bool]] = {}
    try:
        with files.open_text(home_path(path)) as file:
            for number, text in enumerate(file, start=1):
                name, reward = _reward_of(json.loads(text), f"{path}:{number}")
                if reward is not None:
                    passed.setdefault(name, []).append(reward >= pass_reward)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "strerror", None) or "a line is not JSON"
        raise DataError(
            f"completions={path} cannot be read: {reason}; expected the file of taut generate rewards=..., or "
            "scores.jsonl of taut eval; check the path"
        ) from None
    return {name: sum(each) / len(each) for name, each in passed.items()}


def _reward_of(line: Any, place: str) -> tuple[str, float | None]:
    """The prompt's id, and the completion's reward or None where it could not be judged."""
    is_line = isinstance(line, dict) and "id" in line
    if is_line and "reward" in line:
        return str(line["id"]), line["reward"]
    scores = line.get("scores") if is_line else None
    if isinstance(scores, dict) and len(scores) == 1:
        return str(line["id"]), next(iter(scores.values()))
    raise DataError(
        f"{place}: the line has no reward; expected id, and reward or scores with one score; make the file with taut "
        "generate rewards=..., or taut eval with one reward"
    )


class _Measured:
    """The file of measured values: a line with the settings they depend on, then a line for each row, in order."""

    def __init__(self, config: Filter, rows: RowSet) -> None:
        self.path = beside(config.out.rstrip("/"), MEASURED)
        settings = to_dict(config)
        names = ("model", "template", "dtype", "rewards", "reference", "columns", "format", "kind")
        self.identity = {
            **{name: settings[name] for name in (*names, "limit", "apply_chat_template")},
            "measures": sorted({bound.name for bound in bounds_of(config)}),
            "sources": [part.opened.digest for part in rows.parts],
        }
        if self.path.exists() and not config.resume:
            raise OutputError(
                f"{self.path} exists: another run began to measure; expected none; set resume=true to go on from "
                "it, or remove it"
            )
        self.known = self._read() if self.path.exists() else []
        self.num_taken = 0

    def _read(self) -> list[Values]:
        """The values of an earlier run, without a torn last line."""
        try:
            with files.open_regular(self.path) as file:
                head, *lines = [json.loads(text) for text in file.read().split(b"\n")[:-1]]
            earlier = head["measured_with"]
        except (OSError, ValueError, LookupError, TypeError):
            raise OutputError(
                f"{self.path} cannot be read; expected the values of an earlier run; remove it"
            ) from None
        changed = [name for name, value in self.identity.items() if earlier.get(name) != value]
        if changed:
            raise OutputError(
                f"{self.path} was measured with other settings ({', '.join(changed)}); expected the same to go on from "
                "it; restore them, or remove it"
            )
        return lines

    def __enter__(self) -> Self:
        with write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            texts = [
                json.dumps(line) + "\n" for line in ({"measured_with": self.identity}, *self.known)
            ]
            files.write_text(self.path, "".join(texts))
            self.file = self.path.open("ab")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def take(self, places: Sequence[str]) -> list[Values]:
        """Known values of the next rows, in order; fewer than the rows where the file ends before."""
        found = self.known[self.num_taken : self.num_taken + len(places)]
        self.num_taken += len(places)
        return found

    def add(self, values: Sequence[Values]) -> None:
        """Write the values of rows."""
        with write_errors(self.path, "; resume=true goes on from what is written"):
            self.file.writelines((json.dumps(value) + "\n").encode() for value in values)
            self.file.flush()
