"""``RunConfig``, the base of all training methods: the keys of every run, and the members that define a method.

A method is a subclass in a separate file. It adds its sections to the configuration and refuses settings without a
meaning (``__post_init__``). Most methods set these members and no others:

    method              the name, as in METHODS
    learning_rates      the default learning rates
    row_kinds           the kinds of rows of data
    loss                the loss to minimise
    models              the auxiliary models: reference, teacher, critic
    allows_noise        whether dropout and NEFTune may be on

All members have defaults, those of supervised fine-tuning. The members below are grouped by topic; no other room asks
which method a run has. A method that generates its answers begins with ``OnlineMethod`` (methods/online.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field
from transformers import PreTrainedConfig
from typing_extensions import TypedDict

from taut.config import (
    ComputeDtype,
    Decision,
    Positive,
    configclass,
    read_settings,
    to_dict,
    user_path,
)
from taut.data.batching import BatchConfig, Good, Rows
from taut.data.dataset import DataConfig, Dataset, Split, input_paths, load_dataset
from taut.data.order import START, Cursor, Order
from taut.data.render import Renderer
from taut.data.schema import Kind
from taut.data.stream import Recording, Stream, StreamDataset, open_stream
from taut.data.top_logprobs import WithTeacher, read_top_logprobs
from taut.errors import ConfigError
from taut.evals.contract import ContractConfig
from taut.evals.during import AnswersConfig
from taut.evals.stopping import StopCheckConfig
from taut.inference.engine import Sampling
from taut.inference.local import LocalEngine
from taut.losses import Loss
from taut.losses.supervised import CrossEntropy
from taut.methods import METHODS, command_of, published
from taut.methods.aux_models import AuxModels
from taut.methods.inputs import Inputs, Language, MayChange, Models, Plan
from taut.models.frozen import FrozenDtype
from taut.models.load import context_length
from taut.models.lora import LoraConfig
from taut.models.noise import NoiseConfig
from taut.models.products import ProductsSetting
from taut.models.quantised import Quantise
from taut.models.recompute import ActivationCheckpointing
from taut.models.reward_model import NewHead
from taut.models.routers import RouterConfig
from taut.models.tokens import TokensConfig
from taut.rewards import files_of
from taut.rewards.registry import RewardSpec, files_read
from taut.train.checkpoint import CheckpointConfig
from taut.train.distributed import ParallelConfig, Ranks
from taut.train.log import LogConfig
from taut.train.log.own import sink_file
from taut.train.monitors import LossMonitorConfig
from taut.train.optim import DefaultRates, OptimConfig
from taut.train.run_dir import SaveConfig
from taut.train.trainer import Monitor, StepSource, Trainer
from taut.types import Prompt, Sample, Tree

if TYPE_CHECKING:
    MethodName: TypeAlias = str
else:
    MethodName = Literal[tuple(METHODS)]
"""The type of the key ``method``: one of the names in METHODS."""


TELL_AFTER = 10.0
"""Seconds without a new row after which a step that waits for one is logged."""


@configclass
class EvalConfig:
    """Evaluation while training. It always runs at the end as well."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only at the end."""
    best: str | None = None
    """Keep the best model so far in out/best, by this metric: loss, stopped, a reward's name, NAME_pass_K, or for data
    with judged answers rewards/accuracy, rewards/margin, accuracy, score/margin."""
    answers: AnswersConfig = AnswersConfig()


@configclass
class ChecksConfig:
    """Which checks run before training."""

    skip: list[str] = field(default_factory=list)
    """Names of checks (docs/check.md) to leave out, as ["rewards.gold"]; the report and the run's log say so."""


STEPS_AHEAD = 32
"""Steps whose samples are known to what fetches them (``Dataset.expect``)."""


class FromData:
    """A source of steps whose samples are rows of data: what such sources share."""

    loss: Loss
    mismatched_length: int | None
    """If set, the loss's statistics are computed on the step's prompts combined with each other's answers, of at most
    this many tokens (KTO); None: on the step's own trees."""

    def rows_at(self, step: int) -> tuple[Rows, list[int]]:
        """Rows, and the indices among them that the step has."""
        raise NotImplementedError

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1)."""
        rows, indices = self.rows_at(step)
        return rows.trees(indices)

    def observed(self, step: int) -> list[Tree] | None:
        """The trees on which the loss's statistics of this step are computed; None: the step's own trees."""
        return None if self.mismatched_length is None else self.observed_of(*self.rows_at(step))

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """Like ``observed``, for the given rows, which may be held-out ones."""
        if self.mismatched_length is None:
            return None
        return rows.mismatched(indices, self.mismatched_length)

    def open(self) -> Sequence[Decision]:
        """Nothing to open."""
        return ()

    def reject(self) -> None:
        """Nothing to discard: nothing is generated."""


@dataclass(frozen=True)
class Offline(FromData):
    """The source of steps of a method that trains on fixed data: the rows of each step, and the trees they make."""

    rows: Rows
    order: Order
    epochs: float | None
    """Number of epochs after which the run ends; None: the data are repeated as long as steps are left."""
    loss: Loss
    mismatched_length: int | None = None

    def rows_at(self, step: int) -> tuple[Rows, list[int]]:
        return self.rows, self.order.step(step, self.epochs)

    def prepare(self, step: int) -> list[Tree]:
        known = (self.order.step(step + ahead, self.epochs) for ahead in range(STEPS_AHEAD))
        self.rows.expect(known)
        return super().prepare(step)

    def is_known(self, step: int) -> bool:
        """True: the data are fixed."""
        return True

    def cursor(self, step: int) -> Cursor:
        """The position in the data after a step."""
        return self.order.cursor(step, self.epochs)

    @property
    def state(self) -> None:
        """None: a resumed run needs only the cursor."""

    def close(self) -> None:
        """Nothing to close."""


class LastWindow(TypedDict):
    """The window of a stream that a checkpoint's last sample is in."""

    number: int
    digest: str


@dataclass(frozen=True)
class Streamed(FromData):
    """The source of steps of a method that trains on a stream. Its state is the digest of all rows up to the window of
    the last sample that was trained on.
    """

    stream: Stream
    rows_of: Callable[[Dataset], Rows]
    samples_per_step: int
    seed: int | None
    """Of the shuffle of each window; None: rows are in the order in which they came."""
    loss: Loss
    mismatched_length: int | None = None
    get_trainer: Callable[[], Trainer] | None = None
    """None where nothing is trained."""

    def rows_at(self, step: int) -> tuple[Rows, list[int]]:
        start, stop = self.cursor(step - 1).samples, self.cursor(step).samples
        remedy = "expected more; add them, and resume=true goes on"
        if step > 1:
            remedy += f", or resume=true steps={step - 1} ends the run here"
        told = False

        def follow(seconds: float) -> None:
            nonlocal told
            if self.get_trainer is None:
                return
            trainer = self.get_trainer()
            if seconds > TELL_AFTER and not told:
                told = True
                path = self.stream.recipe.path
                detail = f"step {step} waits for rows of {path}; the last one came {seconds:.0f} seconds ago"
                trainer.emit("warning", name="stream", step=step, detail=detail)
            trainer.ranks.doing(f"waiting for rows of step {step}")
            trainer.interrupts.agree(trainer.ranks)

        self.stream.require(stop, f"step {step}", remedy, follow)
        data, indices = self.stream.at(start, stop, self.seed)
        return self.rows_of(data), indices

    def is_known(self, step: int) -> bool:
        """Whether all ranks know that the rows of a step are there."""
        return self.cursor(step).samples <= self.stream.stop

    def cursor(self, step: int) -> Cursor:
        """The position in the stream after a step."""
        return Cursor(step, step * self.samples_per_step)

    @property
    def state(self) -> Streamed:
        return self

    @property
    def remembered(self) -> type[LastWindow]:
        return LastWindow

    def remember(self) -> LastWindow:
        assert self.get_trainer is not None, "a checkpoint is of a run that trains"
        if self.stream.expected is not None:  # no step was taken since the last checkpoint
            number, digest = self.stream.expected
            return {"number": number, "digest": digest}
        last = self.stream.holding(self.cursor(self.get_trainer().done).samples - 1)
        return {"number": last["number"], "digest": last["digest"]}

    def recall(self, remembered: LastWindow) -> None:
        self.stream.expected = remembered["number"], remembered["digest"]

    def leave(self, step: int, oldest: int) -> None:
        """Steps up to ``step`` are taken; a resume may begin after ``oldest``."""
        self.stream.leave(self.cursor(step).samples, self.cursor(oldest).samples)

    def close(self) -> None:
        """Read no more."""
        self.stream.reader.close()


@configclass
class RunConfig:
    """A training run: the keys that all methods have, and the members that define a method."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "TRL; alignment-handbook: 2e-5 and, with QLoRA, 2e-4; Tulu 3 (8B): 5e-6"
    )
    """The defaults of ``optim.learning_rate``."""
    row_kinds: ClassVar[Mapping[Kind, str]] = {"sft": ""}
    """The kinds of rows that the method trains on; where it has several, each with the setting that selects it."""
    generates: ClassVar[bool] = False
    """Whether the run learns from completions that its model generates: then rows of data are prompts."""
    may_change: ClassVar[MayChange] = MayChange(
        freely=(
            "out",
            "resume",
            "overwrite",
            "steps",
            "epochs",
            "check",
            "checks",
            "log",
            "checkpoint",
            "contract",
            "save",
            "loss_monitor",
            "stop_check",
            "eval",
            "batch.halve_when_out_of_memory",  # its budgets are in events.jsonl, and used again
            "model",  # its files are hashed, wherever they are
            "data.cache",
            "data.workers",
            "data.streaming_settle",
            "data.streaming_timeout",
            "data.apply_chat_template",  # the tokenised data are compared
            "data.eval",
            "dtype",  # the resolved dtype is compared
            "frozen_dtype",  # the products are the same
            "products",  # what it resolves to is compared
            "reference.model",  # as model
            "distill.teacher",
            "distill.url",  # as rollout.urls: whether the same model answers there is not compared
            "distill.server",
            "distill.top_logprobs",
            "distill.eval_top_logprobs",
            "critic.model",
        ),
        rounding=(
            "device",
            "attention",
            "tf32",
            "deterministic",
            "compile",
            "parallel.replicas",
            "parallel.tensor",
            "parallel.cpu_offload",
            "activation_checkpointing",
            "batch.tokens_per_microbatch",
            "batch.share_prefixes",
            "batch.min_saved_tokens",
            "reference.file",
        ),
        schedule=(
            "optim.learning_rate",
            "optim.muon_learning_rate",
            "optim.group_learning_rates",
            "optim.schedule",
            "optim.warmup_steps",
            "optim.warmup_ratio",
            "optim.min_learning_rate_ratio",
            "critic.learning_rate",
        ),
    )
    """The keys that a resume may change, of all methods (taut/run/fingerprint.py)."""

    method: MethodName = "sft"
    """The training method: for ``taut check``, ``show`` and ``plan``, which take a run of any method."""
    model: str
    """Directory of the model to start from, or its hub name, as owner/name or owner/name@revision."""
    out: str | None = None
    """Directory of the run's output; refused if it is not empty, unless resume or overwrite is set. ``taut show`` needs
    none."""
    data: DataConfig
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; the data are repeated as often as needed. Exclusive with epochs."""
    epochs: Positive | None = None
    """Passes over the data; 1 if steps is not set."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed: of the order of samples, adapter initialisation and noise."""
    dtype: ComputeDtype | None = None
    """Compute dtype; bfloat16 keeps float32 weights. By default bfloat16 where the hardware has it, else float32. bf16,
    fp32 and fp64 are accepted as names of these."""
    frozen_dtype: FrozenDtype = "auto"
    """How weights that do not train are stored next to adapters; products are those of float32, to the bit. auto: in
    the checkpoint's dtype, but in float32 on a CPU that computes in float32 and has the memory, where it is faster.
    checkpoint: in the checkpoint's dtype, but linear layers in bfloat16 where that is the compute dtype; those of a
    wider checkpoint are then rounded in the saved model."""
    quantise: Quantise | None = None
    """Quantise the linear layers and experts of the base under adapters (QLoRA): nf4 (4.13 bits a weight, double
    quantisation) or int8 (8 bits). The products widen them to the compute dtype. A base that comes quantised is used as
    it is."""
    check: Literal["quick", "off"] = "quick"
    """Which part of ``taut check`` runs before training: quick (seconds), or off, which is logged. checks.skip leaves
    out single checks."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """Attention backend: auto, reference, varlen or flex. A backend that is named and not available is an error."""
    products: ProductsSetting = "auto"
    """Library of float32 matrix products on a CPU: auto (for each kind of product the faster one, measured), mkl or
    onednn."""
    tf32: bool = False
    """Compute float32 products in TF32, on a CUDA device that has it: faster, with 10 bits of their inputs. Refused on
    other devices."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time (torch.use_deterministic_algorithms); an operation without
    one is refused with its name. On a CPU a run repeats itself without it."""
    compile: bool = False
    """Compile each decoder layer with torch.compile, attention outside. Needs Triton on a GPU, a C++ compiler on a CPU;
    the first steps wait for it."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpointing: ActivationCheckpointing = False
    """What the backward pass computes again instead of keeping it. true: each layer, from its inputs; selective: each
    layer but its matrix products and attention, which are kept; offload: as true, with the inputs in the host's
    memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    freeze: list[str] = field(default_factory=list)
    """Parameters not to train: vision_tower, projector, language_model, globs over names, /regular expressions/, slices
    of the layers (layers[:-2]), or the first of all by a share of their numbers (90%); !PATTERN trains what patterns
    before it froze.
    """
    resume: bool = False
    """Continue from the newest checkpoint in out; from step 1 if there is none; a finished run is left as it is."""
    overwrite: bool = False
    """Replace the run that is in out."""
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    checks: ChecksConfig = ChecksConfig()
    lora: LoraConfig = LoraConfig()
    tokens: TokensConfig = TokensConfig()
    noise: NoiseConfig = NoiseConfig()
    router: RouterConfig = RouterConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loss_monitor: LossMonitorConfig = LossMonitorConfig()
    stop_check: StopCheckConfig = StopCheckConfig()
    save: SaveConfig = SaveConfig()
    contract: ContractConfig = ContractConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.method != type(self).method:
            raise ConfigError(
                f"found method={self.method} in a run of {self.command()}; expected {type(self).method}; give the "
                f"run to {command_of(self.method)}, or take the key out"
            )
        if not self.save.merged and not self.lora.is_on:
            raise ConfigError(
                "save.merged=false without adapters (lora.rank=0, no lora.adapter): there would be nothing to save; "
                "expected a LoRA run; set lora.rank, or remove save.merged"
            )
        if self.parallel.tensor > 1:
            self._require_divisible_layers()
        if self.frozen_dtype == "checkpoint" and not self.stores_frozen:
            why = (
                "lora.dora=true reads them" if self.lora.dora else "without adapters there are none"
            )
            raise ConfigError(
                f"frozen_dtype=checkpoint is for the weights next to adapters, and {why}; expected frozen_dtype=auto; "
                "take the key out"
            )
        if self.quantise is not None and not self.lora.is_on:
            raise ConfigError(
                f"quantise={self.quantise} without adapters: rounded weights cannot be updated; expected a LoRA run; "
                "set lora.rank, or take the key out"
            )
        for key, is_set in (
            ("lora.dora=true: DoRA", self.lora.dora),
            (f"lora.init={self.lora.init}: it", self.lora.starts_at_weights),
        ):
            if self.quantise is not None and is_set:
                raise ConfigError(
                    f"quantise={self.quantise} with {key} reads the weights themselves; expected one of the two; take "
                    "one out"
                )
        if self.parallel.cpu_offload and self.optim.name == "muon":
            raise ConfigError(
                "parallel.cpu_offload=true with optim.name=muon: its iteration would run on the host's processor, for "
                "minutes a step; expected optim.name=adamw; take one out"
            )
        if not self.has_rewards:
            self.eval.answers.require_rewards()
        noise = {
            "lora.dropout": self.lora.dropout,
            "noise.neftune_alpha": self.noise.neftune_alpha,
        }
        if self.data.is_stream:
            self._require_streamable()
        if self.data.token_weights and (self.generates or self.has_scalar_head):
            why = "generated" if self.generates else "given scores, not learned"
            raise ConfigError(
                f"data.token_weights in a run of {self.command()}, whose answers are {why}; expected a method that "
                "learns the answers of its data, such as sft; take the key out"
            )
        if self.batch.tokens_per_step is not None and self.generates:
            raise ConfigError(
                f"batch.tokens_per_step={self.batch.tokens_per_step} and method={self.method}, whose answers are yet "
                "to be generated; expected a number of prompts; set batch.samples_per_step"
            )
        for key, value in noise.items():
            if value and not self.allows_noise:
                raise ConfigError(
                    f"{key}={value:g} in a run of {self.command()}: what is compared must not be noisy; "
                    f"expected {key}=0; take the key out"
                )

    def _require_streamable(self) -> None:
        """Raise ConfigError for settings that a stream cannot have."""
        models = self.models()
        refused = (
            (self.generates, f"method={self.method} reads all its prompts before the first step"),
            (self.steps is None, "steps is not set: there is no epoch after which the run ends"),
            (
                self.batch.group_prefixes,
                "batch.group_prefixes=true compares all rows with each other",
            ),
            (
                self.batch.tokens_per_step is not None,
                "batch.tokens_per_step needs the lengths of all rows",
            ),
            (models.reference_file is not None, "reference.file has the logprobs of all rows"),
            (
                getattr(models.teacher, "top_logprobs", None) is not None,
                "distill.top_logprobs has a teacher's logprobs of all rows",
            ),
        )
        for is_found, found in refused:
            if is_found:
                raise ConfigError(
                    f"data.train is a stream, and {found}; expected a number of steps over rows that come one after "
                    "another; change that, or take data.streaming out"
                )

    def _require_divisible_layers(self) -> None:
        """Raise ConfigError for settings that need whole layers, or whole rows of their weights."""
        for is_set, key, why in (
            (self.quantise is not None, f"quantise={self.quantise}", "codes are divided by rows"),
            (
                self.frozen_dtype == "checkpoint",
                "frozen_dtype=checkpoint",
                "layers compute with what they store",
            ),
            (self.optim.name == "muon", "optim.name=muon", "its update needs whole matrices"),
            (
                self.optim.state != "float32",
                f"optim.state={self.optim.state}",
                "moments are scaled by rows",
            ),
            (
                self.parallel.cpu_offload,
                "parallel.cpu_offload=true",
                "parts of layers stay on their device",
            ),
            (self.compile, "compile=true", "layers wait for other ranks between their products"),
            (self.lora.dora, "lora.dora=true", "it reads whole weights"),
            (
                self.lora.starts_at_weights,
                f"lora.init={self.lora.init}",
                "it decomposes whole weights",
            ),
            (self.lora.dropout > 0, "lora.dropout", "its noise belongs to whole inputs"),
        ):
            if is_set:
                raise ConfigError(
                    f"parallel.tensor={self.parallel.tensor} with {key}: {why}; expected one of the two; take one out"
                )

    @classmethod
    def command(cls) -> str:
        """The command that trains such a run, as it is typed."""
        return command_of(cls.method)

    @property
    def allows_noise(self) -> bool:
        """Whether dropout and NEFTune may be on. Not where logprobs or scores are compared: noise would be compared."""
        return True

    @property
    def stores_frozen(self) -> bool:
        """Whether frozen weights may be stored in another dtype than those that train."""
        is_narrow = self.frozen_dtype != "float32" or self.quantise is not None
        is_whole = self.parallel.tensor == 1
        return self.lora.is_on and not self.lora.dora and is_narrow and is_whole

    # -- data and loss

    @property
    def row_kind(self) -> Kind:
        """The kind of a row of data."""
        return next(iter(self.row_kinds))

    def loss(self) -> Loss:
        """The loss to minimise."""
        return CrossEntropy()

    @property
    def compares_answers(self) -> bool:
        """Whether the answers of a row are compared with each other, and so stay in one micro-batch."""
        return self.row_kind == "preference"

    def longest_sample(self, config: PreTrainedConfig) -> int:
        """The largest number of tokens in a sample."""
        longest = self.data.max_length or context_length(config)
        if longest is None:
            raise ConfigError(
                f"data.max_length is not set and {self.model} names no context; set data.max_length"
            )
        return longest

    @property
    def grows(self) -> int:
        """Tokens that generation may add to a prompt; 0 where nothing is generated."""
        return 0

    def load_data(
        self,
        split: Split,
        renderer: Renderer,
        language: Language,
        *,
        looks_again: bool = True,
        ranks: Ranks | None = None,
    ) -> Dataset:
        """The samples of a split, with a teacher's logprobs where the configuration names a file of them.
        ``looks_again``: see ``load_dataset``. ``ranks``: of a run that is to train, which records a stream; None: the
        data are looked at.
        """
        longest, kind = self.longest_sample(language.config), self.row_kind
        if split == "train" and self.data.is_stream:
            recording = None
            if ranks is not None:
                assert self.out is not None, "a run that trains has a directory"
                out = user_path(self.out, "out")
                recording = Recording(out, self.resume, ranks.is_writer, ranks.gather)
            return open_stream(
                self.data,
                kind,
                renderer,
                longest,
                language.num_rows,
                compares=self.compares_answers,
                recording=recording,
            )
        data = load_dataset(self.data, split, renderer, longest, kind=kind, looks_again=looks_again)
        key = "top_logprobs" if split == "train" else "eval_top_logprobs"
        file = getattr(self.models().teacher, key, None)
        if file is None:
            return data
        path = user_path(file, f"distill.{key}")
        return WithTeacher(data, read_top_logprobs(path, data, language.num_rows))

    def rows_of(self, data: Dataset) -> Rows:
        """A data set as the trees that are compared or pooled."""
        return Rows(data, self.compares_answers, has_targets=not self.has_scalar_head)

    # -- models

    def models(self) -> AuxModels:
        """The auxiliary models: reference, teacher, critic."""
        return AuxModels()

    def new_head(self) -> NewHead | None:
        """The scalar head that trains in place of the language model's; None: the model's own head."""
        return None

    @property
    def has_scalar_head(self) -> bool:
        """Whether a scalar head trains: the run makes a reward model, which writes no text."""
        return self.new_head() is not None

    # -- settings whose defaults depend on the method

    @property
    def resolved_optim(self) -> OptimConfig:
        """``optim`` with the learning rate set."""
        if self.optim.learning_rate is not None:
            return self.optim
        rates = self.learning_rates
        return replace(self.optim, learning_rate=rates.lora if self.lora.is_on else rates.full)

    def resolved(self) -> dict[str, Any]:
        """The configuration as JSON-able values, with defaults that depend on other keys filled in."""
        return to_dict(self) | {"optim": to_dict(self.resolved_optim)}

    @classmethod
    def defaults_by_method(cls) -> dict[str, str]:
        """Key -> the method's default, for the help of its command."""
        rates = cls.learning_rates
        text = f"{cls.command()}: {rates.full:g}, with adapters {rates.lora:g}."
        return {"optim.learning_rate": text}

    @property
    def decisions(self) -> list[Decision]:
        """The settings that were chosen because the configuration leaves them open, with reasons."""
        if self.optim.learning_rate is not None:
            return []
        what = "adapters train" if self.lora.is_on else "all weights train"
        reason = f"the default of {self.command()} where {what} ({self.learning_rates.sources})"
        rate = f"{self.resolved_optim.learning_rate:g}"
        return [Decision("optim.learning_rate", rate, reason)]

    # -- steps

    def plan(self, train: Dataset, cursor: Cursor = START) -> Plan:
        """The source of steps with its order of samples, and the number of steps. ``cursor``: the position of a resumed
        run.
        """
        rows, batch, loss = self.rows_of(train), self.batch, self.loss()
        longest = train.longest if loss.mismatched else None
        if isinstance(train, StreamDataset):
            assert self.steps is not None, "a stream has no epochs"
            seed = self.seed if batch.shuffle else None
            streamed = Streamed(
                train.stream, self.rows_of, batch.samples_per_step, seed, loss, longest
            )
            return Plan(streamed, self.steps, cursor)
        order = rows.order(batch, self.seed, batch.samples_per_step)
        epochs = None if self.steps is not None else (1.0 if self.epochs is None else self.epochs)
        order = order.going_on_from(cursor, epochs)
        num_steps = self.steps if epochs is None else order.num_steps(epochs)
        assert num_steps is not None
        return Plan(Offline(rows, order, epochs, loss, longest), num_steps, cursor)

    def monitors(self, source: StepSource) -> Sequence[Monitor]:
        """Further monitors of each step."""
        return ()

    def connect(
        self,
        source: StepSource,
        inputs: Inputs,
        models: Models,
        make_engine: Callable[..., LocalEngine],
        ranks: Ranks,
        get_trainer: Callable[[], Trainer],
    ) -> StepSource:
        """The source of steps with what it needs besides data. ``get_trainer``: the trainer, which is made after it."""
        if isinstance(source, Streamed):
            return replace(source, get_trainer=get_trainer)
        return source

    @property
    def is_replayed(self) -> bool:
        """Whether a run that generates trains on what another run has generated."""
        return False

    def engine_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype that rollouts are computed in by an engine in this process; None: there are none. ``dtype``: the
        run's.
        """
        return None

    def describe_rollouts(self, num_steps: int) -> str | None:
        """The plan of a run that generates, in a sentence; None: its steps are laid out from data."""
        return None

    # -- files and code that the run reads

    def input_files(self) -> list[str]:
        """Every file and directory that the run reads: the output directory must hold none of them."""
        answers = self.eval.answers
        questions = replace(self.data, train=None, eval=answers.data, template=None, cache=None)
        return [
            self.model,
            *([self.lora.adapter] if self.lora.adapter else []),
            *self.models().paths,
            *input_paths(self.data),
            *input_paths(questions),
            *map(str, files_of(answers.rewards)),
            *(str(sink_file(spec)) for spec in self.log.sinks),
            *files_read(answers.rewards),
        ]

    @property
    def training_rewards(self) -> str | Sequence[str | RewardSpec]:
        """The rewards of completions in training; empty: there are none."""
        return ()

    def user_code(self) -> list[Path]:
        """Files of the user's code that training runs: rewards, an environment, its tools."""
        return []

    # -- evaluation and the stop check

    @property
    def has_rewards(self) -> bool:
        """Whether training has rewards that can judge held-out answers too."""
        return False

    @property
    def held_out_answers(self) -> AnswersConfig:
        """How held-out answers are judged."""
        return self.eval.answers

    def questions(self, data: Dataset) -> Sequence[Sample] | Sequence[Prompt]:
        """The prompts of the stop check."""
        return Good(self.rows_of(data))

    @property
    def teaches_ends(self) -> bool:
        """Whether good answers are imitated, with their end tokens, and not only compared or judged."""
        return not self.loss().units.keys().isdisjoint(("cross_entropy", "divergence", "sft"))

    @property
    def ends_remedy(self) -> str:
        """The remedy where the model ends fewer of its answers than before, in keys that the method has."""
        return ""

    # -- checks and the plan of memory

    def sampling(self, seed: int) -> Sampling:
        """How completions of the policy are sampled."""
        return Sampling(seed=seed)

    def extra_forwards(self) -> int:
        """Forwards of a step without gradient: of a reference, and for statistics."""
        has_reference, loss = self.models().has_live_reference, self.loss()
        observed = 1 + (has_reference and loss.mismatched)
        counted = self.router.aux_loss_coef > 0
        return int(has_reference) + (observed if loss.observes else 0) + counted

    def extra_head_passes(self) -> int:
        """Those of ``extra_forwards`` that compute the head: the one that counts what routers choose does not."""
        return self.extra_forwards() - (self.router.aux_loss_coef > 0)

    @property
    def loss_has_floor(self) -> bool:
        """Whether the loss may stay well above 0 on learned samples: log-ratios are bounded, a teacher is unsure."""
        return self.row_kind != "sft" or self.models().teacher is not None

    @property
    def loss_not_in_samples(self) -> str | None:
        """Why the loss cannot be computed from logprobs of the samples alone; None: it can."""
        models, wants = self.models(), self.loss().wants
        if models.teacher is not None:
            return "the loss is measured against a teacher, which is not asked here"
        if models.reference is not None and models.reference.model is not None:
            return "the loss is measured against reference.model, which is not asked here"
        if models.critic is not None:
            return "the loss is also that of a critic, which is not asked here"
        if wants.entropy:
            return "the loss reads entropies, which are not asked here"
        if wants.temperature != 1:
            return "the loss reads logprobs at another temperature than the library's"
        return None


def class_of(path: Path | None, overrides: Sequence[str] = ()) -> type[RunConfig]:
    """The class of the run that a file and the ``key=value`` settings on top describe, by its key ``method``."""
    name = read_settings(path).get("method", "sft")
    for text in overrides:
        key, _, value = text.partition("=")
        name = value.strip().strip("\"'") if key.strip() == "method" else name
    if name not in list(METHODS):  # the value in a file may be of any type
        meant = published(str(name))
        remedy = "correct it" if meant is None else f"it is {meant}: set method=grpo and these"
        raise ConfigError(f"found method={name}; expected one of {', '.join(METHODS)}; {remedy}")
    return METHODS[name]
