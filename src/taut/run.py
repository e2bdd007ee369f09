"""``Run``, the root of the configuration, and ``build``: the only file that names everything.

``build`` reads in the order things happen: ranks, data, dtype, attention, model, adapters, proofs, sharding,
optimizer, job. Nothing is written before all of it has succeeded. What is chosen for the user is a ``Decision`` with
its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut import parallel
from taut.alarms import TOLERANCE, FirstStep, Spikes, Untouched, ids_to_compare
from taut.attention.select import Chosen, select
from taut.checkpoint import CheckpointConfig
from taut.config import configclass
from taut.data.dataset import DataConfig, Dataset, build_renderer, load_dataset
from taut.data.pack import PackPolicy
from taut.data.plan import START, BatchConfig, Budget, CostModel, Cursor, Order, prefix_groups
from taut.data.render import Renderer
from taut.data.stops import StopSet, derive_stop_set, described
from taut.errors import ConfigError, DataError
from taut.evals.during import AnswersConfig
from taut.evals.stopping import StopConfig
from taut.golden import ContractConfig
from taut.loop import Job
from taut.memory import build_fit
from taut.methods.sft import Sft
from taut.models import anatomy
from taut.models.load import (
    checkpoint_dtype,
    context_length,
    freeze,
    inherited_ends,
    load_config,
    load_model,
    load_tokenizer,
)
from taut.models.lora import LoraConfig, apply_lora, choose_rows
from taut.models.noise import NoiseConfig, install_noise
from taut.models.precision import (
    ChosenDtype,
    backward_context,
    compute_context,
    resolve_dtype,
)
from taut.models.prove import Proof, library_logps, prove
from taut.models.score import Scorer
from taut.models.tokens import TokensConfig, add_tokens, add_tokens_to_tokenizer
from taut.models.untrained import require_trained, untrained_rows
from taut.optim import OptimConfig, build_optimizer, learning_rate
from taut.parallel import Ranks
from taut.runlog import LogConfig

ALONE_TOKENS = 1024
"""How many tokens of the first step are also run one sample at a time."""


@configclass
class EvalConfig:
    """When held-out loss is measured (where data.eval is given): always at the end, and"""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only at the end."""
    best: str | None = None
    """Keep the best model so far in out/best, by this metric: loss, stopped, a reward's name, or NAME_pass_K."""
    answers: AnswersConfig = AnswersConfig()


@configclass
class Run:
    """A training run."""

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
    dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Compute dtype; bfloat16 keeps float32 weights. By default bfloat16 where the hardware has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """auto, reference, varlen or flex; asked for by name and not to be had is an error."""
    activation_checkpointing: bool = False
    """Compute each layer again in backward instead of keeping its activations."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    freeze: list[str] = field(default_factory=list)
    """Parameters not to train: globs over names, or /regular expressions/."""
    resume: bool = False
    """Go on from the newest checkpoint in out; from step 1 where there is none, not at all where the run
    is finished."""
    overwrite: bool = False
    """Replace the run that is in out."""
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    tokens: TokensConfig = TokensConfig()
    noise: NoiseConfig = NoiseConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    contract: ContractConfig = ContractConfig()
    log: LogConfig = LogConfig()


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

    def token(self, index: int) -> str:
        """How the tokenizer writes an id."""
        return str(self.tokenizer.convert_ids_to_tokens(index))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, held-out ones included."""
        return max(int(data.lengths.max()) for data in (self.train, self.eval) if data is not None)


@dataclass(frozen=True)
class Built:
    """A run that is ready to train; nothing has been written."""

    run: Run
    inputs: Inputs
    scorer: Scorer
    job: Job
    proof: Proof
    decisions: list[Decision]
    saved_dtype: torch.dtype
    """What the final weights are saved in: the dtype of the checkpoint they came from."""


def load_inputs(run: Run, ranks: Ranks, day: date | None = None) -> Inputs:
    """Tokenizer, template and tokenised data. The writer tokenises first; the others read its cache.

    ``day``: when the run began, for a template that asks for the day; None: today.
    """
    if run.steps is not None and run.epochs is not None:
        raise ConfigError(f"steps={run.steps} and epochs={run.epochs} are both set; keep one")
    config = load_config(run.model, run.trust_remote_code)
    tokenizer = load_tokenizer(run.model, run.trust_remote_code)
    new_ids = add_tokens_to_tokenizer(tokenizer, run.tokens)
    renderer = build_renderer(run.data, tokenizer)
    renderer.template.day = day = day or date.today()
    stops = derive_stop_set(renderer, inherited_ends(run.model, config))
    renderer = renderer.stopping_at(stops.ids)
    decisions = []
    max_length = run.data.max_length or context_length(config)
    if max_length is None:
        raise ConfigError(
            f"data.max_length is not set and {run.model} names no context; set data.max_length"
        )
    if run.data.max_length is None:
        decisions.append(Decision("data.max_length", str(max_length), "the model's context"))
    decisions.append(Decision("stop", *described(stops, renderer.template)))
    if renderer.template.asks_for_the_day:
        reason = "the chat template asks for the day; the one on which the run began"
        decisions.append(Decision("day", str(day), reason))
    if not ranks.is_writer:
        ranks.barrier()
    train = load_dataset(run.data, "train", renderer, max_length)
    held_out = load_dataset(run.data, "eval", renderer, max_length) if run.data.eval else None
    if ranks.is_writer:
        ranks.barrier()
    if len(set(ranks.gather(train.fingerprint))) > 1:
        raise DataError(
            "data.train: the ranks read different content; expected files that all of them see alike and that nobody "
            "changes now; begin again"
        )
    decisions.extend(_taught_ends(train, stops))
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


def build(run: Run, inputs: Inputs, plan: Plan, ranks: Ranks) -> Built:
    """Load, wrap, prove and shard the model; everything is in force or refused when this returns."""
    decisions = list(inputs.decisions)
    dtype, chosen, reasons = choose(run, inputs, ranks.device)
    decisions.extend(reasons)
    compute = partial(compute_context, dtype.dtype, ranks.device)
    model = load_model(
        run.model,
        dtype=dtype.dtype,
        device=ranks.device,
        attention=chosen.implementation,
        trust_remote_code=run.trust_remote_code,
    )
    adapted, reasons = adapt(run, inputs, model)
    decisions.extend(reasons)
    scorer = Scorer(adapted)
    proof = prove(scorer, compute(), dtype.dtype, inputs.longest)
    method, num_steps, cursor = plan
    noise = install_noise(adapted, run.noise, run.seed)
    is_comparable = noise is None and cursor == START
    alone = _alone(method, adapted, dtype.dtype, ranks.device) if is_comparable else {}
    policy, reasons = build_policy(run, proof.one_sample, has_noise=noise is not None)
    decisions.extend(reasons)
    if run.activation_checkpointing:
        anatomy.unwrap(adapted).activation_checkpointing_enable({"use_reentrant": False})
    budget = build_budget(run, adapted, ranks, one_sample=proof.one_sample is not None)
    fit = build_fit(
        run.batch, ranks, one_sample=proof.one_sample, recomputes=run.activation_checkpointing
    )
    parallel.shard(scorer, anatomy.layers(adapted), ranks)
    job = Job(
        scorer=scorer,
        method=method,
        optimizer=build_optimizer(scorer, run.optim),
        learning_rate=partial(learning_rate, total=num_steps, config=run.optim),
        num_steps=num_steps,
        budget=budget,
        policy=policy,
        ranks=ranks,
        compute=compute,
        compute_backward=partial(backward_context, dtype.dtype),
        noise=noise,
        fit=fit,
        clip_grad_norm=run.optim.clip_grad_norm,
        alarms=[
            FirstStep(alone, TOLERANCE[dtype.dtype]),
            Untouched.watching(scorer),
            Spikes(),
        ],
    )
    saved_dtype = checkpoint_dtype(inputs.config)
    return Built(run, inputs, scorer, job, proof, decisions, saved_dtype)


def adapt(run: Run, inputs: Inputs, model: PreTrainedModel) -> tuple[nn.Module, list[Decision]]:
    """The model with its added tokens, adapters and what is frozen; rows that have to train do, or it is refused."""
    add_tokens(model, inputs.new_ids)
    if not run.lora.is_on and not run.freeze:
        return model, []
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    needed = untrained_rows(model, ends)
    needed |= {index: f"{inputs.token(index)}: added by tokens.add" for index in inputs.new_ids}
    rows = choose_rows(model, run.lora, needed, ends)
    decisions = []
    if rows:
        ids = next(iter(rows.values()))
        why = "; ".join(needed.get(index, f"{inputs.token(index)}: ends a turn") for index in ids)
        names = " and ".join(rows)
        decisions.append(Decision("lora.train_rows", f"{len(ids)} of {names}", why))
    adapted = apply_lora(model, run.lora, run.seed, rows)
    if run.freeze:
        names_frozen = freeze(adapted, run.freeze)
        rest = f" and {len(names_frozen) - 1:,} more" if len(names_frozen) > 1 else ""
        value = f"{len(names_frozen)} tensors"
        decisions.append(Decision("freeze", value, f"{names_frozen[0]}{rest}"))
    require_trained(adapted, needed)
    return adapted, decisions


def choose(
    run: Run, inputs: Inputs, device: torch.device
) -> tuple[ChosenDtype, Chosen, list[Decision]]:
    """The compute dtype and the attention backend, and why these."""
    dtype = resolve_dtype(run.dtype, device)
    chosen = select(run.attention, device, dtype.dtype, inputs.config.get_text_config())
    name = str(dtype.dtype).removeprefix("torch.")
    decisions = [
        Decision("dtype", name, dtype.reason),
        Decision("attention", chosen.name, chosen.reason),
    ]
    return dtype, chosen, decisions


class Plan(NamedTuple):
    """Which samples each step has, and how many steps there are."""

    method: Sft
    num_steps: int
    cursor: Cursor
    """How far the run has come."""


def build_method(run: Run, train: Dataset, cursor: Cursor = START) -> Plan:
    """The method with its order of samples, and the number of steps. ``cursor``: how far a resumed run has come."""
    groups = prefix_groups(train, run.batch.group_min_tokens) if run.batch.group_prefixes else None
    order = Order(train.weights, run.seed, run.batch.samples_per_step, run.batch.shuffle, groups)
    epochs = None if run.steps is not None else (1.0 if run.epochs is None else run.epochs)
    order = order.going_on_from(cursor, epochs)
    num_steps = run.steps if epochs is None else order.num_steps(epochs)
    assert num_steps is not None
    return Plan(Sft(train, order, epochs), num_steps, cursor)


def _alone(
    method: Sft, model: nn.Module, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """log-probs of some of the first step's samples, run alone through the library's own path."""
    samples = {s.id: s for tree in method.prepare(1) for s in tree.samples}
    chosen = ids_to_compare([(s.id, s.num_tokens) for s in samples.values()], ALONE_TOKENS)
    with torch.no_grad(), compute_context(dtype, device):
        return {name: library_logps(model, samples[name], device) for name in chosen}


def build_policy(
    run: Run, one_sample: str | None, *, has_noise: bool
) -> tuple[PackPolicy, list[Decision]]:
    """How prefixes are shared, and why not where they were asked for. ``one_sample``: why nothing is packed."""
    decisions = [Decision("packing", "one sample at a time", one_sample)] if one_sample else []
    obstacle = (
        "noise belongs to one sample, a shared prefix to several" if has_noise else one_sample
    )
    if run.batch.share_prefixes and obstacle:
        decisions.insert(0, Decision("batch.share_prefixes", "false", obstacle))
    is_shared = run.batch.share_prefixes and not obstacle
    return PackPolicy(is_shared, run.batch.min_saved_tokens), decisions


def build_budget(run: Run, model: nn.Module, ranks: Ranks, *, one_sample: bool) -> Budget:
    """How a step is divided among ranks and micro-batches."""
    rates = anatomy.flops(model)
    return Budget(
        tokens_per_microbatch=run.batch.tokens_per_microbatch,
        num_ranks=ranks.size,
        cost=CostModel(rates.per_token, rates.per_pair + rates.per_window_pair, rates.per_target),
        min_saved_tokens=run.batch.min_saved_tokens,
        one_sample=one_sample,
    )
