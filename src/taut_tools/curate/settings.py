"""Keys of ``taut data``."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.commands.settings import RowSettings
from taut.config import Code, ComputeDtype, changed, configclass, fields_of
from taut.conflicts import conflict
from taut.data.settings import Source
from taut.rewards.settings import RewardSpec

Part: TypeAlias = Literal["row", "prompt"]
"""What of a row is compared."""


@configclass
class DataSettings(RowSettings):
    """The rows that a tool reads."""

    data: list[str | Source]
    """Files and data sets, as data.train takes them: a file, a pattern, a directory, an address or owner/name; or
    tables with path, share, limit and the other keys of an entry of data.train, without weight."""
    kind: Literal["auto", "sft", "preference", "unpaired", "scored", "stepwise", "prompt"] = "auto"
    """Kind of the rows, as the training commands name it. With auto the columns of the first row of each file tell:
    rows of SFT, else preferences or steps, else prompts."""

    rules: ClassVar[str] = """
        required data=FILE[data]: there are no rows to read
    """


@configclass
class WritesRows(DataSettings):
    """The place where a tool writes the rows that it keeps."""

    out: str
    """FILE.jsonl, with .removed.jsonl and .report.json next to it; or DIR/, a data set folder with a card. Nothing is
    overwritten."""
    license: str | None = None
    """License of the rows for the card of DIR/, as the Hugging Face hub names it: apache-2.0, cc-by-4.0, ..."""


@configclass
class Stats(DataSettings):
    """Numbers that describe data sets: rows, lengths, duplicates."""

    out: str | None = None
    """New JSON file for the numbers."""
    model: str | None = None
    """Directory or hub name of a model, whose tokenizer and template count tokens and targets."""
    template: str | None = None
    """File with a chat template that replaces the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    rules: ClassVar[str] = """
        template needs model
    """


@configclass
class Dedup(WritesRows):
    """Remove rows that repeat an earlier row, exactly or nearly."""

    on: Part = "row"
    """Part of a row that is compared: the whole row, or its prompt only, which keeps the first of several answers."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = 0.7
    """Jaccard similarity of word n-grams from which two rows are near duplicates; with threshold=none only exact
    duplicates are removed."""
    ngram: Annotated[int, Field(ge=1)] = 3
    """Words of an n-gram."""


@configclass
class Decontaminate(WritesRows):
    """Remove rows that hold a question of an evaluation."""

    against: list[str | Source]
    """Files and data sets with the questions, in the form of `data`."""
    against_columns: dict[str, str] = field(default_factory=dict)
    """Columns of the questions, in the form of `columns`: {prompt = "problem"}."""
    on: Part = "row"
    """Part of a row that is searched for questions: the whole row, or its prompt only."""
    ngram: Annotated[int, Field(ge=1)] = 8
    """Words of an n-gram that a row may not share with a question."""


@configclass
class Filter(WritesRows):
    """Keep the rows that meet every condition."""

    min_characters: int | None = None
    """Minimum characters of prompt and answers."""
    max_characters: int | None = None
    """Maximum characters of prompt and answers."""
    min_tokens: int | None = None
    """Minimum tokens of a row's longest sample; needs model."""
    max_tokens: int | None = None
    """Maximum tokens of a row's longest sample; needs model."""
    min_loss: float | None = None
    """Minimum mean loss of a row's targets under model, which knows an answer of lower loss already."""
    max_loss: float | None = None
    """Maximum mean loss of a row's targets under model."""
    min_reward: float | None = None
    """Minimum reward of a row's answer; needs rewards."""
    max_reward: float | None = None
    """Maximum reward of a row's answer; needs rewards."""
    min_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum share of the prompt's completions that pass; needs completions."""
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Maximum share of the prompt's completions that pass; needs completions."""
    language: str | None = None
    """ISO 639-1 code (en, de, zh, ...) of the language of a row's prompt and answers."""
    min_language: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Minimum share of a row's letters in the language. A row with too few letters to tell is kept."""
    match: str | None = None
    """Regular expression (Python's) that a row's text must contain."""
    reject: str | None = None
    """Regular expression (Python's) that a row's text must not contain."""
    where: str | list[str] = field(default_factory=list)
    """Condition on a column, or a list of them: COLUMN, one of == != >= <= > <, and a value, as in 'score >= 0.5'. A
    dot leads into an object: 'meta.lang == en'."""
    model: str | None = None
    """Directory or hub name of the model that counts tokens and computes losses."""
    template: str | None = None
    """File with a chat template that replaces the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """Compute dtype of losses; default: bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """Device on which losses are computed: auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 8192
    """Maximum tokens of one forward; a longer sample is computed alone."""
    rewards: Code | list[Code | RewardSpec] | None = None
    """Rewards that judge a row's answer: names of docs/rewards.md, FILE.py:function, or tables of them, with
    options."""
    reference: str | None = None
    """Column with the right answer, or a list of right answers, for rewards that compare."""
    completions: str | None = None
    """Completions with rewards: a file of taut generate rewards=..., or scores.jsonl of taut eval. They belong to the
    row with their id, else to the row at that place."""
    pass_reward: float = 1.0
    """Minimum reward of a completion that passes."""
    resume: bool = False
    """Go on from the values that an earlier run of this command has measured."""

    rules: ClassVar[str] = """
        min_tokens max_tokens min_loss max_loss needs model: a model counts tokens and computes losses
        min_reward max_reward needs rewards: rewards judge the answer of a row
        min_pass_rate max_pass_rate needs completions: a pass rate is of the completions of a row
        model needs max_tokens min_tokens max_loss min_loss
        rewards needs min_reward max_reward
        completions needs min_pass_rate max_pass_rate
    """

    def __post_init__(self) -> None:
        bounds = [key for key in fields_of(Filter) if key[:4] in ("min_", "max_")]
        bounds.remove("min_language")  # it is how sure the language has to be
        if not changed(self, [*bounds, "language", "where", "match", "reject"]):
            remedy = "expected one at least, as in max_characters=20000; name one"
            raise conflict(self, "where match reject", "no condition is set", remedy)
