"""``RunConfig``, the base of all training methods: the keys of every run, and the members that define a method.

A method is a subclass in a separate file. It adds its sections to the configuration and refuses settings without a
meaning (``__post_init__``). Most methods set these members and no others:

    method              the name, as in METHODS
    learning_rates      the default learning rates
    row_kinds           the kinds of rows of data
    loss                the loss to minimize
    models              the auxiliary models: reference, teacher, critic
    allows_noise        whether dropout and NEFTune may be on

All members have defaults, those of supervised fine-tuning. The members below are grouped by topic; no other room asks
which method a run has. A method that generates its answers begins with ``OnlineMethod`` (methods/online.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field

from taut.config import (
    ComputeDtype,
    Decision,
    Positive,
    changed,
    configclass,
    read_settings,
    to_dict,
    user_path,
)
from taut.conflicts import conflict
from taut.data.settings import BatchConfig, DataConfig, Kind, Split, named_sources
from taut.errors import ConfigError
from taut.evals.settings import AnswersConfig, ContractConfig, StopCheckConfig
from taut.inference.settings import Sampling
from taut.io.user_code import named_files
from taut.methods import METHODS, command_of, published
from taut.methods.settings import ChecksConfig, EvalConfig, MayChange
from taut.models.settings import (
    ActivationCheckpointing,
    CpuMatmulSetting,
    FrozenDtype,
    LoraConfig,
    NewHead,
    NoiseConfig,
    Quantize,
    RouterConfig,
    TokensConfig,
)
from taut.rewards.settings import RewardSpec
from taut.rl.settings import OwnCode
from taut.train.log.custom_sink import sink_files
from taut.train.settings import (
    CheckpointConfig,
    DefaultRates,
    LogConfig,
    LossMonitorConfig,
    OptimConfig,
    ParallelConfig,
    SaveConfig,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from taut.data.batching import Rows
    from taut.data.dataset import Dataset
    from taut.data.order import Cursor
    from taut.data.render.render import Renderer
    from taut.inference.local import LocalEngine
    from taut.losses.loss import Loss
    from taut.methods.aux_models import AuxModels
    from taut.methods.inputs import Inputs, Language, Models, Plan
    from taut.train.distributed import Ranks
    from taut.train.trainer import Monitor, StepSource, Trainer
    from taut.types import Prompt, Sample

    MethodName: TypeAlias = str
else:
    MethodName = Literal[tuple(METHODS)]
"""The type of the key ``method``: one of the names in METHODS."""


@configclass
class RunConfig:
    """A training run: the keys that all methods have, and the members that define a method."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "TRL; alignment-handbook: 2e-5 and, with QLoRA, 2e-4; Tulu 3 (8B): 5e-6"
    )
    """The defaults of ``optim.learning_rate``."""
    row_kinds: ClassVar[Mapping[Kind, str]] = {"sft": ""}
    """The kinds of rows that the method trains on; if there are several, each with the setting that selects it."""
    generates: ClassVar[bool] = False
    """Whether the run learns from completions that its model generates; its rows of data are then prompts."""
    needs_weights: ClassVar[bool] = True
    """Whether the weights of the model must be there; a plan needs none."""
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
            "hooks",
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
            "data.apply_chat_template",  # the tokenized data are compared
            "data.eval",
            "dtype",  # the resolved dtype is compared
            "frozen_dtype",  # the products are the same
            "cpu_matmul",  # what it resolves to is compared
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
    """The training method, for ``taut check``, ``show`` and ``plan``, which take a run of any method."""
    model: str
    """Directory of the model to start from, or its hub name, as owner/name or owner/name@revision."""
    out: str | None = None
    """Directory of the run's output; refused if not empty, unless resume or overwrite is set. ``taut show`` does not
    need it."""
    data: DataConfig
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; the data are repeated as often as needed. Exclusive with epochs."""
    epochs: Positive | None = None
    """Passes over the data; 1 if steps is not set."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed of the order of samples, the initial adapters and noise."""
    dtype: ComputeDtype | None = None
    """Compute dtype; bfloat16 keeps float32 weights. Defaults to bfloat16 if the hardware has it, else float32. The
    names bf16, fp32 and fp64 are accepted."""
    frozen_dtype: FrozenDtype = "auto"
    """Storage dtype of weights that do not train, next to adapters; products equal the products of float32 storage, to
    the bit. auto: the checkpoint's dtype, or float32 on a CPU that computes in float32 and has the memory, where it is
    faster. checkpoint: the checkpoint's dtype, with linear layers and experts in bfloat16 if that is the compute
    dtype; those of a wider checkpoint are then rounded in the saved model."""
    quantize: Quantize | None = None
    """Quantize the linear layers and experts of the base under adapters (QLoRA): nf4 (4.13 bits a weight, double
    quantization) or int8 (8 bits). Products widen them to the compute dtype. A base that is already quantized is used
    unchanged."""
    check: Literal["quick", "off"] = "quick"
    """Part of ``taut check`` that runs before training: quick (seconds), or off, which is logged. checks.skip leaves
    out single checks."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """Attention backend: auto, reference, varlen or flex. A named backend that is not available is an error."""
    cpu_matmul: CpuMatmulSetting = "auto"
    """Library of float32 matrix products on a CPU: auto (the faster one for each kind of product, measured), mkl or
    onednn."""
    tf32: bool = False
    """Compute float32 products in TF32, on a CUDA device that has it: faster, with 10 bits of their inputs. Refused on
    other devices."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time (torch.use_deterministic_algorithms); an operation without
    one is refused by name. On a CPU a run is repeatable without it."""
    compile: bool = False
    """Compile each decoder layer with torch.compile, attention outside. Needs Triton on a GPU, a C++ compiler on a CPU;
    the first steps wait for it."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpointing: ActivationCheckpointing = None
    """Activations to recompute in the backward pass instead of storing them. true: each layer, from its inputs;
    selective: each layer except its matrix products and attention, which are stored; offload: as true, with the inputs
    in host memory. Default: true if by `taut plan` a step would take more than 90% of the GPU's memory, or half of the
    machine's on a CPU, else false."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    freeze: list[str] = field(default_factory=list)
    """Parameters not to train: vision_tower, projector, language_model, globs over names, /regular expressions/, slices
    of the layers (layers[:-2]), or the first share of all parameters by count (90%); !PATTERN trains parameters that an
    earlier pattern froze."""
    resume: bool = False
    """Continue from the newest checkpoint in out, or from step 1 if there is none; a finished run is left unchanged."""
    overwrite: bool = False
    """Replace the run in out."""
    hooks: list[OwnCode] = field(default_factory=list)
    """Objects of your own that get every event and may end the run, FILE.py:Class each (docs/runs.md)."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loss_monitor: LossMonitorConfig = field(default_factory=LossMonitorConfig)
    stop_check: StopCheckConfig = field(default_factory=StopCheckConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    contract: ContractConfig = field(default_factory=ContractConfig)
    log: LogConfig = field(default_factory=LogConfig)

    rules: ClassVar[str] = """
        at most one of steps epochs: each says how long the run is
        parallel.tensor>1 excludes quantize: codes are divided by rows
        parallel.tensor>1 excludes frozen_dtype=checkpoint: layers compute with what they store
        parallel.tensor>1 excludes optim.name=muon: its update needs whole matrices
        parallel.tensor>1 excludes optim.state!=float32: moments are scaled by rows
        parallel.tensor>1 excludes parallel.cpu_offload=true: parts of layers stay on their device
        parallel.tensor>1 excludes compile=true: layers wait for other ranks between their products
        parallel.tensor>1 excludes lora.dora=true: it reads whole weights
        parallel.tensor>1 excludes lora.init=pissa[starts_at_weights]: it decomposes whole weights
        parallel.tensor>1 excludes lora.dropout: its noise belongs to whole inputs
        parallel.cpu_offload=true excludes optim.name=muon: its iteration would take the host minutes a step
        save.merged=false needs lora.rank[is_on]: without adapters there is nothing else to save
        frozen_dtype=checkpoint needs lora.rank[is_on]: it is for the weights next to adapters
        frozen_dtype=checkpoint excludes lora.dora=true: it reads these weights
        quantize needs lora.rank[is_on]: rounded weights cannot be updated, adapters next to them can
        quantize excludes lora.dora=true lora.init=pissa[starts_at_weights]: it reads the weights themselves
        eval.answers.every[is_asked_for] needs eval.answers.rewards=exact_match[rewards] eval.metrics
            where method[!has_rewards]: nothing else judges the answers
        data.streaming=true[is_stream] needs steps: there is no epoch after which the run ends
        data.streaming=true[is_stream] excludes eval.every=1epoch[counts_epochs]
            eval.answers.every=1epoch[counts_epochs] checkpoint.every=1epoch[counts_epochs]: a stream has no epochs
        eval.stop_after needs data.eval eval.answers.data: there is nothing to measure it on
        eval.every=1epoch[is_repeated] needs data.eval: there is nothing to evaluate
        data.streaming=true[is_stream] excludes method[generates]: all prompts are read before the first step
        data.streaming=true[is_stream] excludes batch.group_prefixes=true: all rows are compared with each other
        data.streaming=true[is_stream] excludes batch.tokens_per_step: it needs the lengths of all rows
        data.token_weights excludes method[generates]: answers are generated, and not the data's
        data.token_weights excludes method[has_scalar_head]: answers are given scores, and not learned
        batch.tokens_per_step excludes method[generates]: the answers are yet to be generated; expected a number of
            prompts; set `batch.samples_per_step`
        lora.dropout noise.neftune_alpha excludes method[!allows_noise]: what is compared must not be noisy
    """

    def __post_init__(self) -> None:
        if self.method != type(self).method:
            why, remedy = f"this is {self.command()}", f"give the run to {command_of(self.method)}"
            remedy = f"expected {type(self).method}; {remedy}, or leave `method` out"
            raise conflict(self, "method", why, remedy)

    def amended(self, **changes: Any) -> Self:
        """The run with other values of keys; what was made of it already, such as what it has read, stays."""
        run = replace(self, **changes)
        vars(run).update({key: made for key, made in vars(self).items() if key not in vars(run)})
        return run

    @classmethod
    def command(cls) -> str:
        """The command that trains such a run, as typed."""
        return command_of(cls.method)

    @property
    def allows_noise(self) -> bool:
        """Whether dropout and NEFTune may be on. False if logprobs or scores are compared, because noise would be
        compared.
        """
        return True

    @property
    def stores_frozen(self) -> bool:
        """Whether frozen weights may be stored in another dtype than the weights that train."""
        is_narrow = self.frozen_dtype != "float32" or self.quantize is not None
        is_whole = self.parallel.tensor == 1
        return self.lora.is_on and not self.lora.dora and is_narrow and is_whole

    # -- data and loss

    @property
    def row_kind(self) -> Kind:
        """The kind of a row of data."""
        return next(iter(self.row_kinds))

    def loss(self) -> Loss:
        """The loss to minimize."""
        from taut.losses.supervised import CrossEntropy

        return CrossEntropy()

    @property
    def compares_answers(self) -> bool:
        """Whether the answers of a row are compared with each other, and so stay in one micro-batch."""
        return self.row_kind == "preference"

    def longest_sample(self, config: PreTrainedConfig) -> int:
        """The largest number of tokens in a sample."""
        from taut.models.load import context_length

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
        first_rows: int | None = None,
    ) -> Dataset:
        """Load the samples of a split, with a teacher's logprobs if the configuration names a file of them.
        ``looks_again``, ``first_rows``: see ``load_dataset``; prompts, and answers that a teacher has read, are read
        whole. ``ranks``: ranks of a run that is to train, which records a stream; None
        only looks at the data.
        """
        from taut.data.dataset import load_dataset
        from taut.data.growing import load_growing
        from taut.data.store.top_logprobs import WithTeacher, read_top_logprobs
        from taut.data.stream import Recording, open_stream

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
        key = "top_logprobs" if split == "train" else "eval_top_logprobs"
        file = getattr(self.models().teacher, key, None)
        options: dict[str, Any] = {"kind": kind, "looks_again": looks_again}
        if split == "train" and ranks is not None:
            wait = self.why_all_rows(language)
            data = load_growing(self.data, renderer, longest, wait, **options)
        else:
            options["first_rows"] = None if file else first_rows
            data = load_dataset(self.data, split, renderer, longest, **options)
        if file is None:
            return data
        path = user_path(file, f"distill.{key}")
        return WithTeacher(data, read_top_logprobs(path, data, language.num_rows))

    def why_all_rows(self, language: Language) -> str:
        """Why a run has to read all rows before its first step; empty if it need not (``data/growing.py``)."""
        data, tokenizer = self.data, language.tokenizer
        keys = changed(data, ["too_long", "without_targets", "empty", "min_length"])
        keys += changed(self.batch, ["tokens_per_step", "group_prefixes"])
        has_own_code = not type(tokenizer).__module__.startswith("transformers.")
        rope = str(getattr(language.config.get_text_config(), "rope_parameters", None))
        reasons = {
            "a resume compares all rows with those of its checkpoint": self.resume,
            f"rows are {self.row_kind} data": self.row_kind != "sft",
            "a teacher has read the rows": self.models().teacher is not None,
            "it is a mixture": len(named_sources(data, "train")) > 1,
            f"{', '.join(keys)}: rows may be left out, or all are measured": bool(keys),
            "the model takes pictures": language.renderer.image_store is not None,
            "the tokenizer's code comes with the model": has_own_code,
            "the tokenizer has ids that the model lacks": len(tokenizer) > language.num_rows,
            "RoPE depends on the longest row": "longrope" in rope or "dynamic" in rope,
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def rows_of(self, data: Dataset) -> Rows:
        """A data set as the trees that are compared or pooled."""
        from taut.data.batching import Rows

        return Rows(data, self.compares_answers, has_targets=not self.has_scalar_head)

    # -- models

    def models(self) -> AuxModels:
        """The auxiliary models: reference, teacher, critic."""
        from taut.methods.aux_models import AuxModels

        return AuxModels()

    def new_head(self) -> NewHead | None:
        """The scalar head that trains in place of the language model's head; None keeps that head."""
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

    def plan(self, train: Dataset, cursor: Cursor | None = None) -> Plan:
        """The source of steps with its order of samples, and the number of steps. ``cursor``: the position of a resumed
        run.
        """
        from taut.data.order import START
        from taut.data.stream import StreamDataset
        from taut.methods.inputs import Plan
        from taut.methods.sources import Offline, Streamed

        cursor = cursor or START
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
        order = order.continue_from(cursor, epochs)
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
        """Give the source of steps what it needs besides data. ``get_trainer``: returns the trainer, which is made
        later.
        """
        from taut.methods.sources import Streamed

        if isinstance(source, Streamed):
            return replace(source, get_trainer=get_trainer)
        return source

    @property
    def is_replayed(self) -> bool:
        """Whether a run that generates trains on the recorded rollouts of another run."""
        return False

    def engine_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which an engine in this process computes rollouts; None if there is no such engine. ``dtype``:
        dtype of the run.
        """
        return None

    def describe_rollouts(self, num_steps: int) -> str | None:
        """Describe the rollouts of a run that generates, in a sentence; None if its steps are laid out from data."""
        return None

    # -- files and code that the run reads

    def input_files(self) -> list[str]:
        """Every file and directory that the run reads; the output directory must hold none of them."""
        from taut.data.dataset import input_paths
        from taut.rewards.registry import files_of, files_read

        answers = self.eval.answers
        questions = replace(self.data, train=None, eval=answers.data, template=None, cache=None)
        return [
            self.model,
            *([self.lora.adapter] if self.lora.adapter else []),
            *self.models().paths,
            *input_paths(self.data),
            *input_paths(questions),
            *map(str, files_of(answers.rewards)),
            *map(str, sink_files(self.log.sinks)),
            *map(str, named_files([*self.hooks, *self.eval.metrics])),
            *files_read(answers.rewards),
        ]

    @property
    def training_rewards(self) -> str | Sequence[str | RewardSpec]:
        """The rewards of completions in training; empty if there are none."""
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
        """Settings by which held-out answers are judged."""
        return self.eval.answers

    def questions(self, data: Dataset) -> Sequence[Sample] | Sequence[Prompt]:
        """The prompts of the stop check."""
        from taut.data.batching import PreferredAnswers

        return PreferredAnswers(self.rows_of(data))

    @property
    def teaches_ends(self) -> bool:
        """Whether good answers are imitated with their end tokens, rather than only compared or judged."""
        return not self.loss().units.keys().isdisjoint(("cross_entropy", "divergence", "sft"))

    @property
    def ends_remedy(self) -> str:
        """The remedy if the model ends fewer of its answers than before, in keys that the method has."""
        return ""

    # -- checks and the plan of memory

    def sampling(self, seed: int) -> Sampling:
        """Settings by which completions of the policy are sampled."""
        return Sampling(seed=seed)

    def extra_forwards(self) -> int:
        """Number of forwards of a step without gradient: of a reference, and for statistics."""
        has_reference, loss = self.models().has_live_reference, self.loss()
        observed = 1 + (has_reference and loss.mismatched)
        counted = self.router.aux_loss_coef > 0
        return int(has_reference) + (observed if loss.observes else 0) + counted

    def extra_head_passes(self) -> int:
        """Number of ``extra_forwards`` that compute the head; the forward that counts the routers' choices does not."""
        return self.extra_forwards() - (self.router.aux_loss_coef > 0)

    @property
    def loss_has_floor(self) -> bool:
        """Whether the loss may stay well above 0 on learned samples: log-ratios are bounded, a teacher is unsure."""
        return self.row_kind != "sft" or self.models().teacher is not None

    @property
    def loss_not_in_samples(self) -> str | None:
        """Return why the loss cannot be computed from logprobs of the samples alone, or None if it can."""
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
    """The class of the run in a file with ``key=value`` settings on top, selected by the key ``method``."""
    name = read_settings(path).get("method", "sft")
    for text in overrides:
        key, _, value = text.partition("=")
        name = value.strip().strip("\"'") if key.strip() == "method" else name
    if name not in list(METHODS):  # the value in a file may be of any type
        meant = published(str(name))
        remedy = "correct it" if meant is None else f"it is {meant}: set method=grpo and these"
        raise ConfigError(f"found method={name}; expected one of {', '.join(METHODS)}; {remedy}")
    return METHODS[name]
