"""Keys of the commands that load a model. They import no torch, so that ``taut COMMAND --help`` is quick."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import Code, configclass
from taut.conflicts import conflict
from taut.data.read.folder import is_folder
from taut.data.settings import DataConfig, Format, Source
from taut.evals.settings import ContractConfig, EvalSampling
from taut.inference.settings import ModelUse, Sampling
from taut.methods.method import RunConfig
from taut.rewards.settings import RewardSpec


@configclass
class RowSettings:
    """Settings for reading the rows of a file or data set."""

    format: Format = "auto"
    """Format of the rows; auto recognizes it by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """taut's name of a column -> its name in the data."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns of pictures or sound, to ignore."""
    apply_chat_template: bool = False
    """Render plain-text prompts with the chat template, as a user message. By default they are used unchanged."""
    system: str | None = None
    """A system message put in front of conversations that have none; a row's own takes precedence."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of rows to read."""


@configclass
class CheckOptions:
    """Options of the check."""

    full: bool = False
    """Also run the checks that take minutes."""
    all: bool = False
    """Show every check, including passed and skipped ones, with numbers and notes."""
    json: bool = False
    """Print one JSON object (see docs/check.md) instead of the table."""


@configclass
class CheckRun(CheckOptions, RunConfig):
    """A run, and the options of the check: the keys of the command."""


@configclass
class CheckClusterOptions:
    """Options of the preflight."""

    cluster: bool = False
    """Examine the machines of the run instead of the run."""
    json: bool = False
    """Print one JSON object (see docs/check.md) instead of the table."""


@configclass
class CheckClusterRun(CheckClusterOptions, RunConfig):
    """A run, and the options of the preflight: the keys of the command."""


@configclass
class Evaluate(RowSettings, ModelUse):
    """A model's answers to questions with known answers."""

    data: str | Source
    """Questions with right answers: a file or data set of rows as for ``taut generate`` and training."""
    rewards: Code | list[Code | RewardSpec] = "exact_match"
    """Rewards that judge an answer: names of docs/rewards.md, or FILE.py:function, a function (text, references, row)
    that returns a number, or None if it does not apply; or tables of them, with options."""
    reference: str | None = None
    """Column with the right answer, or a list of them; by default answers, answer, ..., or the last assistant
    message."""
    out: str | None = None
    """Directory for completions.jsonl, scores.jsonl and report.json; it must be empty, unless resume."""
    resume: bool = False
    """Complete the output of an earlier run with the same settings."""
    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Maximum share of errors among a reward's scores; above it the exit code is 1."""
    samples: Annotated[int, Field(ge=0)] = 5
    """Number of answers to print, evenly spaced."""
    sampling: EvalSampling = field(default_factory=EvalSampling)

    rules: ClassVar[str] = """
        required rewards=exact_match[rewards]: nothing judges the answers
        resume=true needs out=DIR[out]: it is the directory to go on in
    """


@configclass
class Generate(RowSettings, ModelUse):
    """Completions of a file of prompts."""

    prompts: str | Source
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: rows with messages, conversations,
    prompt, instruction or text."""
    out: str
    """The JSONL file to write, or DIR/, a data set folder with a card; it must not exist, unless resume."""
    reference: str | None = None
    """Column with the right answer, copied next to each completion; by default one of the usual names, if present."""
    prompt_ids: bool = False
    """Also write each prompt's token ids."""
    resume: bool = False
    """Complete the output of an earlier run with the same settings; start new if there is none."""
    rewards: Code | list[Code | RewardSpec] | None = None
    """Rewards that judge each completion: names of docs/rewards.md, FILE.py:function, or tables of them, with
    options."""
    keep: Literal["all", "best"] = "all"
    """Rows of DIR/: all completions, or for each prompt the one with the highest reward."""
    license: str | None = None
    """License of the rows for the card of DIR/, as the Hugging Face hub names it: apache-2.0, cc-by-4.0, ..."""
    sampling: Sampling = field(default_factory=Sampling)

    rules: ClassVar[str] = """
        keep=best needs rewards: nothing judges the completions
        keep license needs out=DIR/[is_folder]: a single file has no card and no choice of rows
    """

    @property
    def is_folder(self) -> bool:
        """Whether the output is a data set folder."""
        return is_folder(self.out)


@configclass
class Merge:
    """Merge a base model and a LoRA adapter."""

    model: str
    """Directory (or hub name) of the base model."""
    adapter: str
    """Directory of the LoRA adapter."""
    out: str
    """The model directory to write; it must not exist."""
    data: str | None = None
    """Rows whose prompts become golden prompts of the contract; by default a few built-in ones."""
    template: str | None = None
    """A file with a chat template to use and save instead of the tokenizer's own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    contract: ContractConfig = field(default_factory=ContractConfig)


@configclass
class Planning:
    """The machine of a plan."""

    gpus: Annotated[int, Field(ge=1)] = 1
    """Number of GPUs (ranks)."""
    gpu_memory: str | None = None
    """Memory of each GPU, as 80GiB or 141GB. Defaults to the memory of the named or detected GPU, or of this
    machine."""
    gpu: str | None = None
    """A GPU of the table in docs/plan.md, or a part of its name (4090, A100-80GB, T4), to plan for it and to predict
    the seconds of a step."""
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the memory to leave free for the driver, collectives and the allocator's fragments."""
    measure: bool = True
    """Time a few layers if the plan is for this machine."""
    alternatives: bool = True
    """Plan other configurations of the run too."""


@configclass
class Plan(Planning, RunConfig):
    """A run to plan: all keys of ``taut sft`` (or of the command that ``method`` names), and"""

    data: DataConfig = field(default_factory=DataConfig)


@configclass
class Verify(ModelUse):
    """Comparison of a model's behavior with its contract."""

    tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference of a logprob, in nats, that counts as rounding; of a quantized model their mean. Default: see
    docs/contract.md."""
    contract: str | None = None
    """Directory of the model that a quantized one was made from, whose contract is asked."""
    rewrite_stops: bool = False
    """First write the stop set of the present template into tokenizer, config, generation_config and contract, for a
    model that was saved with a wrong one."""

    def __post_init__(self) -> None:
        if isinstance(self.urls, list) and len(self.urls) != 1:
            why = "each server answers for itself"
            raise conflict(self, "urls", why, "expected one; verify them one after another")
