"""``Run``, the root of the configuration, which names everything; and a run's inputs: tokenizer, template, data.

What is chosen for the user is a ``Decision`` with its reason. ``taut.run.setup`` makes a job of a run and its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import ComputeDtype, configclass
from taut.data.batching import BatchConfig, Rows
from taut.data.cache import directory_of
from taut.data.dataset import DataConfig, Dataset, Split, build_renderer, load_dataset
from taut.data.prompts import Asking, load_prompt_set
from taut.data.render import Renderer
from taut.data.schema import Kind
from taut.data.stop_tokens import StopSet, derive_stop_set, described
from taut.errors import ConfigError, DataError
from taut.evals.contract import ContractConfig
from taut.evals.during import AnswersConfig
from taut.evals.stopping import StopConfig
from taut.io import hub
from taut.io.console import counted
from taut.losses import Loss
from taut.losses.supervised import CrossEntropy
from taut.methods.distill import DistillConfig, with_lists
from taut.methods.reference import ReferenceConfig
from taut.models.load import (
    context_length,
    inherited_ends,
    load_config,
    load_tokenizer,
)
from taut.models.lora import LoraConfig
from taut.models.noise import NoiseConfig
from taut.models.reward_model import NewHead
from taut.models.tokens import TokensConfig, add_tokens_to_tokenizer
from taut.rl.recipe import Recipe
from taut.train.checkpoint import CheckpointConfig
from taut.train.distributed import Ranks
from taut.train.log import LogConfig
from taut.train.monitors import DivergenceConfig
from taut.train.optim import DefaultRates, OptimConfig
from taut.train.run_dir import SaveConfig
from taut.vision.image_store import open_album

Method: TypeAlias = Literal[
    "sft",
    "reward",
    "dpo",
    "kto",
    "orpo",
    "simpo",
    "cpo",
    "distill",
    "grpo",
    "ppo",
    "online_dpo",
    "best_of_n",
    "gkd",
]


def command_of(method: Method) -> str:
    """The command that trains it, as it is typed."""
    return f"taut {method.replace('_', '-')}"


class Objective(NamedTuple):
    """What a method minimises, and what it has to be given for that."""

    loss: Loss = CrossEntropy()
    kind: Kind = "sft"
    """What a row of data is."""
    are_compared: bool = False
    """Whether the answers of a row are compared with each other, and so never apart."""
    is_mismatched: bool = False
    """Whether the loss's statistics are taken over prompts with each other's answers."""
    head: NewHead | None = None
    """The scalar head that trains in the place of the language model's; None: the model's own head."""
    reference: ReferenceConfig | None = None
    """What the policy is measured against; None: nothing."""
    teacher: DistillConfig | None = None
    """What is learned from; None: the data."""
    online: Recipe | None = None
    """How what is learned is generated and judged; None: the data have it."""

    @property
    def are_coupled(self) -> bool:
        """Whether the loss compares samples of a step, which then have to share a forward."""
        return self.are_compared or (self.online is not None and self.online.is_coupled)

    @property
    def is_taught_ends(self) -> bool:
        """Whether good answers are learned as such, their ends with them, beside being compared or judged."""
        return not self.loss.units.keys().isdisjoint(("cross_entropy", "divergence", "sft"))


@configclass
class EvalConfig:
    """When held-out loss is measured (where data.eval is given): always at the end, and"""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only at the end."""
    best: str | None = None
    """Keep the best model so far in out/best, by this metric: loss, stopped, a reward's name, NAME_pass_K, or
    where answers are judged rewards/accuracy, rewards/margin, accuracy, score/margin."""
    answers: AnswersConfig = AnswersConfig()


@configclass
class ChecksConfig:
    """Which checks are asked."""

    skip: list[str] = field(default_factory=list)
    """Names of checks (docs/check.md) to leave out, as ["rewards.gold"]; the report and the run's log say so."""


@configclass
class Run:
    """A training run: of ``taut sft``, and what is common to all (taut/run/training.py has the others)."""

    METHOD: ClassVar[Method] = "sft"
    MAY_BE_NOISY: ClassVar[bool] = True
    """Whether dropout and other noise take part."""
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "TRL; alignment-handbook: 2e-5 and, with QLoRA, 2e-4; Tulu 3 (8B): 5e-6"
    )
    """Taken where ``optim.learning_rate`` is not set."""

    method: Method = "sft"
    """Which command trains it: for ``taut check``, ``show`` and ``plan``, which are given runs of any."""
    model: str
    """Directory (or hub name) of the model to start from."""
    out: str | None = None
    """Directory the run is written to; refused if it has anything in it, unless resume or overwrite.
    ``taut show`` needs none."""
    data: DataConfig
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; the data go round as often as needed. Exclusive with epochs."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Times round the data; 1 where steps is not given."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything drawn at random: order, adapter initialisation, noise."""
    dtype: ComputeDtype | None = None
    """Compute dtype; bfloat16 keeps float32 weights. By default bfloat16 where the hardware has it, else float32. bf16,
    fp32 and fp64 are accepted as names of these."""
    check: Literal["quick", "off"] = "quick"
    """What ``taut check`` asks before training: its quick part, seconds; or nothing, which the run's log records.
    checks.skip leaves out single checks."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """auto, reference, varlen or flex; asked for by name and not to be had is an error."""
    activation_checkpointing: bool = False
    """Compute each layer again in backward instead of keeping its activations."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    freeze: list[str] = field(default_factory=list)
    """Parameters not to train: vision_tower, projector, language_model, globs over names, or /regular expressions/."""
    resume: bool = False
    """Go on from the newest checkpoint in out; from step 1 where there is none, not at all where the run
    is finished."""
    overwrite: bool = False
    """Replace the run that is in out."""
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    checks: ChecksConfig = ChecksConfig()
    lora: LoraConfig = LoraConfig()
    tokens: TokensConfig = TokensConfig()
    noise: NoiseConfig = NoiseConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    stop: StopConfig = StopConfig()
    save: SaveConfig = SaveConfig()
    contract: ContractConfig = ContractConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.method != self.METHOD:
            raise ConfigError(
                f"found method={self.method} in a run of {command_of(self.METHOD)}; expected {self.METHOD}; give the "
                f"run to {command_of(self.method)}, or take the key out"
            )
        if not self.save.merged and not self.lora.is_on:
            raise ConfigError(
                "save.merged=false without adapters (lora.rank=0, no lora.adapter): there would be nothing to save; "
                "expected a LoRA run; set lora.rank, or remove save.merged"
            )
        if not self.has_rewards:
            self.eval.answers.require_rewards()

    @property
    def has_rewards(self) -> bool:
        """Whether answers are judged in training, by what can judge held-out ones too."""
        return False

    @property
    def optim_in_force(self) -> OptimConfig:
        """``optim`` with the learning rate that the run takes."""
        if self.optim.learning_rate is not None:
            return self.optim
        rates = self.LEARNING_RATES
        return replace(self.optim, learning_rate=rates.lora if self.lora.is_on else rates.full)

    @classmethod
    def defaults_by_method(cls) -> dict[str, str]:
        """Key -> what the command takes where it is not set, for its help."""
        rates = cls.LEARNING_RATES
        said = f"{command_of(cls.METHOD)}: {rates.full:g}, with adapters {rates.lora:g}."
        return {"optim.learning_rate": said}

    @property
    def decisions(self) -> list[Decision]:
        """What the configuration leaves to the method, and what that comes to."""
        if self.optim.learning_rate is not None:
            return []
        what = "adapters train" if self.lora.is_on else "all weights train"
        reason = (
            f"the default of {command_of(self.METHOD)} where {what} ({self.LEARNING_RATES.sources})"
        )
        rate = f"{self.optim_in_force.learning_rate:g}"
        return [Decision("optim.learning_rate", rate, reason)]

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        return Objective()


@configclass
class Comparing(Run):
    """What runs have in common that compare log-probs or scores: noise would be a part of what is compared."""

    MAY_BE_NOISY: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in {
            "lora.dropout": self.lora.dropout,
            "noise.neftune_alpha": self.noise.neftune_alpha,
        }.items():
            if value:
                raise ConfigError(
                    f"{key}={value:g} in a run of {command_of(self.METHOD)}: what is compared must not be noisy; "
                    f"expected {key}=0; take the key out"
                )


class Decision(NamedTuple):
    """Something settled for the user, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Inputs:
    """Tokenizer and data: all that ``taut show`` needs, and the first half of a run."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    train: Dataset
    eval: Dataset | None
    max_length: int
    new_ids: list[int]
    stops: StopSet
    """What ends an answer. Derived here, so that a template without an end is refused before training."""
    decisions: list[Decision]
    grows: int = 0
    """Tokens that a sample may have beyond its prompt, where it is generated."""

    def token(self, index: int) -> str:
        """How the tokenizer writes an id."""
        return str(self.tokenizer.convert_ids_to_tokens(index))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample there can be, held-out ones included."""
        each = [int(data.lengths.max()) for data in (self.train, self.eval) if data is not None]
        most = max(each) + self.grows
        context = context_length(self.config) if self.grows else None
        return most if context is None else min(most, context)


class Language(NamedTuple):
    """What turns text into ids, and back."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    new_ids: list[int]
    """Of tokens that were added."""
    renderer: Renderer


def load_language(run: Run, day: date | None = None) -> Language:
    """Configuration, tokenizer and template. ``day``: when the run began, for a template that asks; None: today."""
    path, trust, cached = run.model, run.trust_remote_code, directory_of(run.data.cache)
    config, tokenizer = load_config(path, trust), load_tokenizer(path, trust)
    new_ids = add_tokens_to_tokenizer(tokenizer, run.tokens)
    album = open_album(path, config, tokenizer, run.data.images, cached, trust)
    renderer = build_renderer(run.data, tokenizer, album)
    renderer.template.day = day or date.today()
    return Language(config, tokenizer, new_ids, renderer)


def load_stops(run: Run, language: Language) -> StopSet:
    """What ends an answer."""
    return derive_stop_set(language.renderer, inherited_ends(run.model, language.config))


def longest_sample(run: Run, config: PreTrainedConfig) -> int:
    """Tokens a sample may have."""
    found = run.data.max_length or context_length(config)
    if found is None:
        raise ConfigError(
            f"data.max_length is not set and {run.model} names no context; set data.max_length"
        )
    return found


def load_inputs(run: Run, ranks: Ranks, day: date | None = None) -> Inputs:
    """Tokenizer, template and tokenised data. The writer tokenises first; the others read its cache."""
    if run.steps is not None and run.epochs is not None:
        raise ConfigError(f"steps={run.steps} and epochs={run.epochs} are both set; keep one")
    language = load_language(run, day)
    stops = load_stops(run, language)
    renderer = language.renderer.stopping_at(stops.ids)
    if not ranks.is_writer:
        ranks.barrier()
    load = partial(load_split, run, renderer=renderer, language=language)
    train = load("train", looks_again=ranks.is_writer)
    held_out = load("eval", looks_again=ranks.is_writer) if run.data.eval else None
    if ranks.is_writer:
        ranks.barrier()
    if len(set(ranks.gather(train.fingerprint))) > 1:
        raise DataError(
            "data.train: the ranks read different content; expected files that all of them see alike and that nobody "
            "changes now; begin again"
        )
    inputs = inputs_of(run, language, stops, train, held_out)
    for data in (train, held_out):
        _require_rows(data, language)
    _require_margins(run, train)
    if run.objective.head is None and run.objective.online is None:
        inputs.decisions.extend(_taught_ends(train, stops))
    return inputs


def load_split(
    run: Run, split: Split, renderer: Renderer, language: Language, *, looks_again: bool = True
) -> Dataset:
    """The samples of a split, with what a teacher's file says of them where there is one. ``looks_again``: see
    ``load_dataset``.
    """
    longest, kind = longest_sample(run, language.config), run.objective.kind
    online = run.objective.online
    if online is not None:
        asking = Asking(longest, online.rollout.reference)
        return load_prompt_set(run.data, split, renderer, asking)
    data = load_dataset(run.data, split, renderer, longest, kind=kind, looks_again=looks_again)
    teacher = run.objective.teacher
    return data if teacher is None else with_lists(teacher, data, split, num_rows(language))


def rows_of(run: Run, data: Dataset) -> Rows:
    """A data set as the trees that the run's method compares or pools."""
    objective = run.objective
    return Rows(data, objective.are_compared, has_targets=objective.head is None)


def inputs_of(
    run: Run, language: Language, stops: StopSet, train: Dataset, held_out: Dataset | None
) -> Inputs:
    """What has been loaded, together, and what was decided on the way."""
    config, tokenizer, new_ids, renderer = language
    decisions = run.decisions
    if reason := hub.settled():
        decisions.append(Decision("hub", "cached files only", reason))
    max_length = longest_sample(run, config)
    if run.data.max_length is None:
        decisions.append(Decision("data.max_length", str(max_length), "the model's context"))
    decisions.append(Decision("stop", *described(stops, renderer.template)))
    if (plain := _plain_text(run, renderer, train, held_out)) is not None:
        decisions.append(plain)
    if renderer.template.asks_for_the_day:
        reason = "the chat template asks for the day; the one on which the run began"
        decisions.append(Decision("day", str(renderer.template.day), reason))
    renderer = renderer.stopping_at(stops.ids)
    online = run.objective.online
    return Inputs(
        config=config,
        tokenizer=tokenizer,
        renderer=renderer,
        train=train,
        eval=held_out,
        max_length=max_length,
        new_ids=new_ids,
        stops=stops,
        decisions=decisions,
        grows=0 if online is None else online.rollout.grows,
    )


def _plain_text(
    run: Run, renderer: Renderer, train: Dataset, held_out: Dataset | None
) -> Decision | None:
    """How prompts and completions that are plain text are rendered; None where it does not matter."""
    key, asked = "data.apply_chat_template", run.data.apply_chat_template
    num_plain = sum(data.forms["completion"] for data in (train, held_out) if data is not None)
    if asked:
        return Decision(key, "true", "set; plain text becomes a user and an assistant message")
    if not num_plain or renderer.template.template is None:
        return None
    rows = f"plain text in {counted(num_plain, 'rows')} is used as it is"
    way_out = "set" if asked is not None else f"{key}=true renders it as messages"
    return Decision(key, "false", f"{rows}, without the chat template; {way_out}")


def num_rows(language: Language) -> int:
    """Rows of the embedding, those of added tokens included."""
    own = int(language.config.get_text_config().vocab_size)
    return max([own, *(index + 1 for index in language.new_ids)])


def _require_rows(data: Dataset | None, language: Language) -> None:
    """Raise DataError where the data have an id that the model has no row for."""
    size = num_rows(language)
    beyond = None if data is None else data.first_beyond(size)
    if beyond is not None:
        place, index = beyond
        raise DataError(
            f"{place}: has token {index} ({language.tokenizer.convert_ids_to_tokens(index)}), and the model has "
            f"{size:,} rows; expected the model's own tokenizer; take added tokens out and name them in tokens.add"
        )


def _require_margins(run: Run, train: Dataset) -> None:
    """Raise DataError where the loss reads margins and the data have none: the key would do nothing."""
    key = f"{run.method}.margin"
    if "margin" in run.objective.loss.needs_values and not train.has_value("margin"):
        raise DataError(
            f"data.train: no answer has a margin, and {key} is set; expected a column margin, or scores; name it in "
            f"data.columns, or take {key} out"
        )


def _taught_ends(train: Dataset, stops: StopSet) -> list[Decision]:
    """How many samples teach the model to stop, where not all do. Raises DataError where none does."""
    num_ends, num_samples = train.num_with_target(stops.ids), len(train)
    cut = f"{len(train.report.cut):,} were cut before their end"
    if not num_ends:
        raise DataError(
            f"data.train: none of {num_samples:,} samples has a token that ends an answer among its targets ({cut}); "
            "expected the model to be taught to stop; raise data.max_length or set data.too_long=drop"
        )
    if num_ends == num_samples:
        return []
    return [Decision("stop.taught", f"{num_ends:,} of {num_samples:,} samples", cut)]
