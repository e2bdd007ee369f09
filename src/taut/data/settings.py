"""Keys of data and of batches. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import changed, configclass
from taut.conflicts import conflict
from taut.errors import ConfigError
from taut.io import remote
from taut.vision.settings import ImagesConfig

Format: TypeAlias = Literal["auto", "messages", "sharegpt", "completion", "alpaca", "text"]
Targets: TypeAlias = Literal["assistant", "last", "all"]
TooLong: TypeAlias = Literal["error", "drop", "split", "truncate"]
ReadAs: TypeAlias = Literal["as_control", "as_text"]


@configclass
class TokenWeight:
    """The weight of a part of an answer."""

    pattern: str
    """Regular expression that finds the part in the text of an answer."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Weight of its tokens in the loss; 0: they are read and not learned."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            why = f"it is no regular expression ({error})"
            raise conflict(self, "pattern", why, "expected one of Python's; correct it") from None


ITERABLE = "iterable:"
"""The path of an iterable that was given as a Python object (in_memory.py)."""
IS_PATTERN = re.compile(r"[*?\[]")


@configclass
class Source:
    """One data set of a mixture."""

    path: str
    """A file (.jsonl, .json, .csv, .tsv, these with .gz or .zst, .parquet, .arrow), a pattern such as data/*.jsonl, or
    a directory of such files; the same at an address (https://, s3://, gs://, hf://datasets/); a Hugging Face data
    set: its directory, or its name as owner/name or hf://name; or a ModelScope data set, ms://owner/name."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Number of times that each row is seen per epoch; 0.5 is half of the rows, drawn again each epoch."""
    share: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Use the rows whose hash lies in this part of [0, 1), as [0, 0.95], with [0.95, 1] in data.eval. Equal rows have
    equal hashes, so they are all in one part."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use the first rows only, this many of those in share."""
    split: str | None = None
    """Hugging Face and ModelScope data sets: the split, or a part of it, as train[:5%]; required if there is more than
    one."""
    name: str | None = None
    """Hugging Face and ModelScope data sets: the configuration."""
    revision: str | None = None
    """Hugging Face and ModelScope data sets by name: a commit, tag or branch."""
    format: Format | None = None
    """As data.format, for this source."""
    columns: dict[str, str] | None = None
    """As data.columns, for this source."""
    replace: dict[str, str] | None = None
    """Text -> the text that replaces it in all values of the rows, as { "{{NAME}}" = "Robin" }."""
    prepend: dict[str, str] | None = None
    """Column -> the text that is put before its own in each row, as { response = "<think>\\n\\n</think>\\n\\n" }."""
    append: dict[str, str] | None = None
    """Column -> the text that is put after its own in each row, as { query = " /no_think" }."""
    system: str | None = None
    """As data.system, for this source; empty for none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values of the template's variables for the rows of this source alone; what is saved keeps those of
    data.chat_template_kwargs."""
    known_as: str | None = None
    """The path by which the run knows the source: ids of samples begin with it. A resume that names the same contents
    in another place sets it to where they were."""

    def __post_init__(self) -> None:
        if self.replace is not None and "" in self.replace:
            why, remedy = 'the text to be replaced is ""', "expected some text; correct it"
            raise conflict(self, "path replace", why, remedy)
        if self.share is not None and not 0 <= self.share[0] < self.share[1] <= 1:
            remedy = "expected two numbers, 0 <= first < second <= 1; correct it"
            raise conflict(self, "path share", "it is no part of [0, 1]", remedy)

    @property
    def identity(self) -> tuple[str | None, ...]:
        """Identity of the rows that share divides."""
        return self.path, self.name, self.split, self.revision


def require_apart(train: Iterable[Source], held_out: Iterable[Source]) -> None:
    """Raise ConfigError where a source is named for training and for evaluation, and the shares overlap."""
    for source in train:
        for other in held_out:
            if source.identity != other.identity or not (source.share or other.share):
                continue
            low, high = source.share or (0, 1)
            other_low, other_high = other.share or (0, 1)
            if max(low, other_low) < min(high, other_high):
                raise ConfigError(
                    f"data.train has the share {low:g} to {high:g} of {source.path}, and data.eval {other_low:g} to "
                    f"{other_high:g}; expected no common rows, as [0, 0.95] and [0.95, 1]; correct one"
                )


Split: TypeAlias = Literal["train", "eval"]


@configclass
class DataConfig:
    """Training data and held-out data, and how they become samples."""

    train: str | list[str | Source] | None = None
    """A path, a list of paths, or a mixture: a list of tables with path and weight."""
    eval: str | list[str | Source] | None = None
    """Held-out data, as train."""
    format: Format = "auto"
    """Format of the rows; auto recognizes it by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """taut's name of a column -> its name in the data."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns, that may be present and are not used."""
    targets: Targets = "assistant"
    """Which tokens of a conversation are learned: all assistant turns, the last one, or all tokens."""
    token_weights: tuple[TokenWeight, ...] = ()
    """Weights of parts of answers in the loss, as in [{ pattern = "<tool_call>.+?</tool_call>", weight = 2 }]."""
    template: str | None = None
    """A chat template to use in place of the tokenizer's own: a file, or the template itself; or hermes, which comes
    with taut: ChatML that writes tools and calls as Hermes does."""
    apply_chat_template: bool | None = None
    """Render prompts and completions that are plain text with the chat template, as a user message and an assistant
    message. By default they are used without it, and taut check warns if the tokenizer has a chat template. Documents
    (the column text) are never rendered."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values of the chat template's own variables, as in { enable_thinking = false }. They become the defaults of the
    template that is used, and saved: a server of the model needs no setting."""
    control_tokens: ReadAs = "as_control"
    """Encoding of control tokens that a row contains (as <|im_end|> in a question): as_control, as servers that render
    messages encode them; or as_text, so that the chat template alone writes control tokens."""
    system: str | None = None
    """A system message put in front of conversations that have none; a row's own takes precedence."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a sample; by default the model's context."""
    too_long: TooLong = "error"
    """Treatment of longer samples."""
    min_length: Annotated[int, Field(ge=0)] = 0
    """Minimum number of tokens of a sample; shorter samples are left out."""
    without_targets: Literal["error", "drop"] = "error"
    """Treatment of rows from which nothing can be learned: no target, or no answer better than another."""
    empty: Literal["error", "drop"] = "error"
    """Treatment of rows without a text that they need: an answer or a question that is empty, null or NaN."""
    step_separator: str = "\n"
    """Text that joins the steps of stepwise data."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Reading of pictures."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Number of processes that tokenize. By default one per processor core, at most 16, for a source of 16 MiB or more,
    else 1."""
    cache: str | None = None
    """Directory for tokenized data; by default $TAUT_CACHE or the user's cache directory."""
    streaming: bool = False
    """Train on files as they arrive in the directory data.train, for a number of steps (docs/data.md)."""
    streaming_window: Annotated[int, Field(ge=1)] = 8192
    """Number of rows of a stream that are shuffled among themselves, and read before the first step that uses one."""
    streaming_settle: Annotated[float, Field(ge=0)] = 10.0
    """Seconds without a change after which a file of a stream is read; 0 where files are renamed into place."""
    streaming_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that a step waits for new rows of a stream, after which the run stops, and can be resumed."""
    fetched_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum size in gigabytes (10^9 bytes) of the fetched shards in the cache directory; by default all are kept."""

    rules: ClassVar[str] = """
        token_weights excludes targets=all: the patterns are looked for in answers, and every token is learned
        streaming_window streaming_settle streaming_timeout needs streaming=true[is_stream] where train
        streaming=true[is_stream] excludes workers>1: a stream is tokenized next to training, in the order of its rows
    """

    def __post_init__(self) -> None:
        require_apart(named_sources(self, "train"), named_sources(self, "eval"))
        if self.is_stream:
            self._require_streamable()

    @property
    def is_stream(self) -> bool:
        """Whether data.train has no end: a directory that grows, or an iterable."""
        named = named_sources(self, "train")
        return bool(named) and (self.streaming or any(it.path == ITERABLE for it in named))

    def _require_streamable(self) -> None:
        """Raise ConfigError for settings that a stream does not have."""
        train = named_sources(self, "train")
        if len(train) != 1:
            remedy = "expected one directory; let one process write the mixture"
            raise conflict(self, "streaming train", f"{len(train)} sources are given", remedy)
        (source,) = train
        endless = "weight limit split name revision replace prepend append known_as"
        for key in changed(source, endless.split()):
            why = f"{key} is set and {source.path} is a stream, which has no epochs and no end"
            raise conflict(self, "train streaming", why, f"expected none; leave {key} out")
        if remote.scheme_of(source.path) or IS_PATTERN.search(source.path):
            why = f"{source.path} is no directory"
            remedy = "expected a directory of this machine; name one"
            raise conflict(self, "streaming train", why, remedy)

    @property
    def system_messages(self) -> set[str]:
        """The system messages that sources put in front of conversations without one."""
        named = [*named_sources(self, "train"), *named_sources(self, "eval")]
        texts = [self.system if source.system is None else source.system for source in named]
        return {text for text in texts if text}


def named_sources(config: DataConfig, split: str) -> list[Source]:
    value = (config.train if split == "train" else config.eval) or []
    items = [value] if isinstance(value, str) else value
    return [Source(path=item) if isinstance(item, str) else item for item in items]


@configclass
class BatchConfig:
    """The size of an optimizer step, and its division into micro-batches."""

    samples_per_step: Annotated[int, Field(ge=1)] = 32
    """Samples per optimizer step, over all ranks and micro-batches. A row whose answers are compared counts as one."""
    tokens_per_step: Annotated[int, Field(ge=1)] | None = None
    """Tokens per optimizer step in place of a number of samples: a step has the next samples as long as they have at
    most so many tokens together, and at least one. For fixed data of at most 10,000,000 samples."""
    tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Largest number of tokens computed at a time on one rank; a longer sample gets a micro-batch of its own."""
    halve_when_out_of_memory: bool = False
    """If a micro-batch does not fit into memory, repeat the step with half the tokens, for the rest of the run. Changes
    numbers by rounding only; each halving is recorded, and repeated on resume. One rank only."""
    share_prefixes: bool = True
    """Compute a prefix that samples of a micro-batch share only once. Never changes the plan or the numbers."""
    min_saved_tokens: Annotated[int, Field(ge=1)] = 16
    """Share a prefix where that saves at least this number of tokens."""
    group_prefixes: bool = False
    """Keep samples with a long common prefix (a document's questions) in one step: the shuffle moves whole groups. A
    group is cut only where no whole group fills a step. Needs shuffle, and at most 10,000,000 samples."""
    group_min_tokens: Annotated[int, Field(ge=1)] = 64
    """Shortest common prefix of a group of group_prefixes, in tokens; a picture counts as long enough."""
    shuffle: bool = True
    """Shuffle the samples again in each epoch; false: the order of the data files."""

    rules: ClassVar[str] = """
        tokens_per_step excludes samples_per_step: a step has a number of tokens, or of samples
        tokens_per_step excludes group_prefixes=true: a group is cut only where it does not fill a number of samples
        group_prefixes=true excludes shuffle=false: grouping moves samples, and the order of the files would not stay
    """


Kind: TypeAlias = Literal["sft", "preference", "unpaired", "scored", "stepwise", "prompt"]
"""How a row judges its answers. ``sft``: not at all; ``prompt``: the model answers, and a reward judges."""
