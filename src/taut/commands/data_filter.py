"""``taut data filter IN ... out=FILE.jsonl|DIR/``: only the rows that keep every condition.

Each row is measured, then judged (curate/conditions.py):

    characters          of prompt and answers
    tokens              of its longest sample, as model renders it
    loss                mean negative logprob of its targets under model
    reward              weighted sum of the rewards that judge its answer
    pass_rate           share of the completions of its prompt that reach pass_reward, of a file of ``taut generate
                        rewards=...`` or of the scores of ``taut eval``
    language            the share of its prompt and answers in one of the languages

What takes long, loss and reward, is kept in ``out`` + ``.measured.jsonl``, a line for each row as soon as it is known.
After a kill the same command with ``resume=true`` goes on from there; with other bounds it starts from the same file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from types import TracebackType
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field

from taut.commands.data import Curated, WritesRows, open_for, show, write
from taut.commands.reading import print_decisions, write_errors
from taut.config import ComputeDtype, configclass, fields_of, home_path, to_dict
from taut.curate.conditions import Bound, Conditions, read_pattern, read_where
from taut.curate.output import beside
from taut.curate.rows import Line, RowSet, Verdict, chunks, content
from taut.data.messages import Completion, Document, text_of
from taut.data.packing import ALONE, pack
from taut.data.prompts import reference_texts
from taut.data.render import Renderer, render_any
from taut.data.schema import AnyRow, best_row
from taut.errors import ConfigError, DataError, OutputError
from taut.inference.local import LocalEngine
from taut.inference.open import ModelUse, open_engine, open_renderer
from taut.inference.reward_model import open_rater
from taut.io import files
from taut.io.terminal import Terminal
from taut.rewards import Answered, Panel, RewardSpec, open_panel
from taut.rewards.format import Language
from taut.types import Sample

CHUNK_ROWS = 256
"""Rows that are measured at a time."""
MEASURED = "measured.jsonl"


@configclass
class Filter(WritesRows):
    """Keep the rows that keep every condition."""

    min_characters: int | None = None
    """Fewest characters of prompt and answers."""
    max_characters: int | None = None
    """Most characters of prompt and answers."""
    min_tokens: int | None = None
    """Fewest tokens of a row's longest sample; needs model."""
    max_tokens: int | None = None
    """Most tokens of a row's longest sample; needs model."""
    min_loss: float | None = None
    """Smallest mean loss of a row's targets under model: below it, the model knows the answer already."""
    max_loss: float | None = None
    """Largest mean loss of a row's targets under model."""
    min_reward: float | None = None
    """Smallest reward of a row's answer; needs rewards."""
    max_reward: float | None = None
    """Largest reward of a row's answer; needs rewards."""
    min_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Smallest share of the prompt's completions that pass; needs completions."""
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of the prompt's completions that pass; needs completions."""
    language: str | None = None
    """ISO 639-1 code (en, de, zh, ...) of the language that a row's prompt and answers are in."""
    min_language: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Smallest share of a row's letters in the language. A row of too few letters to tell is kept."""
    match: str | None = None
    """Regular expression (Python's) that a row's text must contain."""
    reject: str | None = None
    """Regular expression (Python's) that a row's text must not contain."""
    where: str | list[str] = field(default_factory=list)
    """A condition on a column, or a list of them: COLUMN, one of == != >= <= > <, and a value, as in 'score >= 0.5'; a
    dot leads into an object: 'meta.lang == en'."""
    model: str | None = None
    """Directory or hub name of the model that counts tokens and computes losses."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """Compute dtype of losses; by default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N, for losses."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 8192
    """Most tokens of one forward; a longer sample is computed alone."""
    rewards: str | list[str | RewardSpec] | None = None
    """Rewards that judge a row's answer: names of docs/rewards.md, FILE.py:function, or tables of them, with
    options."""
    reference: str | None = None
    """Column with the right answer, or a list of them, for rewards that compare with one."""
    completions: str | None = None
    """Completions with rewards: a file of taut generate rewards=..., or scores.jsonl of taut eval. A row's are
    those with its id, else with its place."""
    pass_reward: float = 1.0
    """Reward from which a completion passes."""
    resume: bool = False
    """Use what an earlier run of the same command measured, and go on from there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = {bound.name for bound in bounds_of(self)}
        needs = {
            "model": ("tokens", "loss"),
            "rewards": ("reward",),
            "completions": ("pass_rate",),
        }
        for key, names in needs.items():
            wanted = [name for name in names if name in asked]
            if wanted and getattr(self, key) is None:
                raise ConfigError(
                    f"a bound on {wanted[0]} is set and {key} is not; expected {key}; set it, or remove the bound"
                )
            if getattr(self, key) is not None and not wanted:
                raise ConfigError(
                    f"{key} is set, and no bound on {' or '.join(names)}; expected one, as in min_{names[-1]}=...; set "
                    f"one, or remove {key}"
                )
        if not asked and not self.where and self.match is None and self.reject is None:
            raise ConfigError(
                "no condition is set; expected one at least, as in max_characters=20000; name one"
            )


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
    """Write the rows that keep every condition. ``console``: for decisions."""
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
        record = None
        if measure.is_long:
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
"""id, the measured values by name, and error where one could not be measured."""


class _Measure:
    """Measures rows. What it opens is closed by ``stack``."""

    def __init__(
        self, config: Filter, names: Collection[str], stack: ExitStack, console: Terminal | None
    ) -> None:
        self.config, self.names = config, names
        self.renderer: Renderer | None = None
        self.engine: LocalEngine | None = None
        self.panel: Panel | None = None
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
            self.panel = stack.enter_context(open_panel(config.rewards, open_rater=open_rater))
            print_decisions(console, self.panel.decisions)
        if config.language is not None:
            self.language = Language(language=config.language)
            self.language.prepare()
        if config.completions is not None:
            self.rates = read_pass_rates(config.completions, config.pass_reward)

    @property
    def is_long(self) -> bool:
        """Whether the values are worth keeping in a file."""
        return self.engine is not None or self.panel is not None

    def __call__(self, rows: Sequence[tuple[Line, Any, AnyRow]]) -> list[Values]:
        if not rows:
            return []
        values: list[Values] = [{"id": line.place} for line, _, _ in rows]
        for value, (line, record, row) in zip(values, rows, strict=True):
            text = content(row).text
            value["characters"] = len(text)
            if self.language is not None:
                value["language"] = self.language(Answered(text=text))
            if self.config.completions is not None:
                own_id = record.get("id")
                value["pass_rate"] = self.rates.get(str(own_id), self.rates.get(line.place))
        if self.renderer is not None:
            self._render(self.renderer, rows, values)
        if self.panel is not None:
            answers = [self._answered(line.place, record, row) for line, record, row in rows]
            for value, verdict in zip(values, self.panel.grade(answers), strict=True):
                value["reward"] = verdict.total
                if verdict.error is not None:
                    value["error"] = verdict.error
        return values

    def _render(
        self, renderer: Renderer, rows: Sequence[tuple[Line, Any, AnyRow]], values: list[Values]
    ) -> None:
        """Tokens and loss."""
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
        lost = {number for number, _ in work} - {number for number, _ in fits}
        for number, (value, (total, count)) in enumerate(zip(values, sums, strict=True)):
            value["loss"] = -total / count if count and number not in lost else None
            if number in lost:
                value["error"] = "longer than the model's context, or without targets"

    def _answered(self, place: str, record: Any, row: AnyRow) -> Answered:
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
            return Answered(
                text=best.completion, references=references, row=record, prompt=best.prompt
            )
        if isinstance(best, Document) or best.messages[-1]["role"] != "assistant":
            raise DataError(
                f"{place}: the row does not end in an answer; expected one for rewards to judge; leave rewards out"
            )
        *prompt, answer = best.messages
        return Answered(
            text=text_of(answer["content"]), references=references, row=record, prompt=tuple(prompt)
        )


def _batches(
    work: Sequence[tuple[int, Sample]], max_tokens: int
) -> Iterator[list[tuple[int, Sample]]]:
    """Samples of about the same length, up to so many tokens; a longer one by itself."""
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
    """The prompt's id and the completion's reward; None: it could not be judged."""
    is_line = isinstance(line, dict) and "id" in line
    if is_line and "reward" in line:
        return str(line["id"]), line["reward"]
    scores = line.get("scores") if is_line else None
    if isinstance(scores, dict) and len(scores) == 1:
        return str(line["id"]), next(iter(scores.values()))
    raise DataError(
        f"{place}: the line has no reward; expected id and reward, or id and scores with one score; make the file with "
        "taut generate rewards=..., or taut eval with one reward"
    )


class _Measured:
    """The file of measured values: a line with what they were measured with, then a line for each row, in order."""

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
        """The lines of an earlier run; a torn last line is measured again."""
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
        """What is known of the next rows, of all or of the first of them."""
        found = self.known[self.num_taken : self.num_taken + len(places)]
        self.num_taken += len(places)
        return found

    def add(self, values: Sequence[Values]) -> None:
        """Write the values of rows."""
        with write_errors(self.path, "; resume=true goes on from what is written"):
            self.file.writelines((json.dumps(value) + "\n").encode() for value in values)
            self.file.flush()
