"""Build the models and the trainer of a run from its configuration and inputs.

    load            the model, with the attention, dtype and storage of the run
    adapt           added tokens, adapters, frozen parts
    join_models     teacher, critic and other models; shards
    build_trainer   optimizer, budget, monitors

``build`` calls them in this order; ``checks`` calls them one by one, to report which fails. Nothing is written. Each
choice that is made for the user is a ``Decision`` with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from taut.config import Decision
from taut.data.batching import Budget, CostModel
from taut.data.order import START
from taut.data.packing import PackPolicy
from taut.errors import ConfigError, ModelError
from taut.io import capabilities
from taut.methods.inputs import Inputs, Loaded, Models, Plan, engine_of
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.attention_backends import Chosen, activate_flash_attention, select
from taut.models.compiled_layers import compile_layers, require_compiler
from taut.models.cpu import cpu_matmul
from taut.models.experts import recorder_of
from taut.models.heads import OwnCritic
from taut.models.load import checkpoint_dtype, freeze, load_model, refuses_grouped_experts
from taut.models.lora.adapters import (
    adapter_settings,
    apply_lora,
    base_decisions,
    choose_rows,
    describe_targets,
    require_frozen_base,
)
from taut.models.noise import install_noise, remove_dropout
from taut.models.precision import (
    ChosenDtype,
    backward_context,
    compute_context,
    resolve_dtype,
    use_arithmetic,
)
from taut.models.quantized.frozen_storage import Storage, described, storage_of
from taut.models.quantized.quantized_layers import require_trainable
from taut.models.recompute import recompute_activations, require_possible
from taut.models.reward_model import load_reward_model
from taut.models.save import find_processor
from taut.models.scorer import Scorer
from taut.models.self_test import library_logps, one_sample_reasons
from taut.models.tokens import add_tokens, require_trained, untrained_rows
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.train.monitors import TOLERANCE, Divergence, FirstStep, Spikes, Untouched, ids_to_compare
from taut.train.oom import build_fit
from taut.train.optim import Rate, build_optimizer, learning_rate
from taut.train.recorder import Recorder
from taut.train.signals import Interrupts
from taut.train.trainer import Prefetch, Trainer, emit_nowhere
from taut.train.utilization import Meter

ALONE_TOKENS = 1024
"""Tokens of the first step that are also run one sample at a time."""
CHECKPOINT_EVERY, EVAL_EVERY = "15 minutes", "1 epoch"
"""Where the user says nothing."""


@dataclass(frozen=True)
class Built:
    """A run that is ready to train; nothing has been written."""

    run: RunConfig
    inputs: Inputs
    models: Models
    trainer: Trainer
    opened: list[Decision] = field(default_factory=list)
    """Decisions made when the run's engine, rewards and evaluations were opened."""

    @property
    def decisions(self) -> list[Decision]:
        """All decisions so far."""
        return [*self.inputs.decisions, *self.models.decisions, *self.opened]

    @property
    def scorer(self) -> Scorer:
        return self.models.scorer


def build(
    run: RunConfig,
    inputs: Inputs,
    plan: Plan,
    ranks: Ranks,
    emit: Callable[..., None] = emit_nowhere,
    interrupts: Interrupts | None = None,
) -> Built:
    """Build the models and the trainer of a run; every setting is applied or refused when this returns."""
    loaded = load(run, inputs, ranks)
    adapted = adapt(run, inputs, loaded.model)
    model, _ = adapted
    require_trained(model, rows_to_train(run, inputs, model))
    models = join_models(run, inputs, ranks, loaded, adapted, compared=plan)
    trainer = build_trainer(run, inputs, models, plan, ranks, emit, interrupts)
    return Built(run, inputs, models, trainer)


# -- models


def decide_cadences(run: RunConfig) -> tuple[RunConfig, list[Decision]]:
    """The run with ``eval.every`` and ``checkpoint.every`` set, where they are not, and the decisions."""
    decisions: list[Decision] = []
    if run.checkpoint.every is None:
        run = run.amended(checkpoint=replace(run.checkpoint, every=CHECKPOINT_EVERY))
        reason = "so much is lost at most where a machine dies"
        decisions.append(Decision("checkpoint.every", CHECKPOINT_EVERY, reason))
    if run.eval.every is None:
        is_measured = bool(run.data.eval) and not run.generates and not run.data.is_stream
        every = EVAL_EVERY if is_measured else 0
        run = run.amended(eval=replace(run.eval, every=every))
        if is_measured:
            decisions.append(Decision("eval.every", EVAL_EVERY, "there are held-out rows"))
    return run, decisions


def use_cpu_matmul(
    run: RunConfig, ranks: Ranks, stored: str | None = None, whose: str = "the checkpoint"
) -> None:
    """Choose the libraries of float32 matrix products for this process. Every rank calls it and takes the writer's
    choice.

    ``stored``: an earlier choice that this run has to repeat to reproduce its numbers. ``whose``: the checkpoint or the
    recorded run that made it.
    """
    dtype = resolve_dtype(run.dtype, ranks.device).dtype
    # the writer measures; a library that is named is refused by every rank that lacks it
    chooses = ranks.is_writer or run.cpu_matmul != "auto"
    first = None
    if chooses:
        engine = run.engine_dtype(dtype)
        first = cpu_matmul.select(run.cpu_matmul, ranks.device, dtype, stored, whose, engine=engine)
    chosen = ranks.gather(first)[0]
    assert chosen is not None
    cpu_matmul.use(chosen)


def load(run: RunConfig, inputs: Inputs, ranks: Ranks) -> Loaded:
    """Load the model with the attention, dtype and storage of the run."""
    dtype, chosen, decisions = choose(run, inputs, ranks.device)
    head = run.new_head()
    storage = storage_for(run, inputs.config, dtype.dtype, ranks.device, inputs.new_ids)
    read = load_model if head is None else partial(load_reward_model, head=head)
    model = read(
        run.model,
        dtype=dtype.dtype,
        device=ranks.weights_device,
        attention=chosen.implementation,
        trust_remote_code=run.trust_remote_code,
        storage=storage,
        shard=distributed.layer_sharding(ranks, dtype.dtype),
    )
    if storage is not None:
        decisions.append(Decision("frozen_dtype", *described(model, storage)))
    find_processor(model)  # while its files exist: it is saved at the end
    one_sample = "; ".join(one_sample_reasons(model, inputs.longest)) or None
    return Loaded(model, dtype, chosen, one_sample, decisions, storage)


def storage_for(
    run: RunConfig,
    config: PreTrainedConfig,
    compute: torch.dtype,
    device: torch.device,
    new_ids: Sequence[int] = (),
) -> Storage | None:
    """How the frozen weights of a run are stored; None: in the dtype of the trained weights. Raises ConfigError for a
    quantized base that the run cannot have.
    """
    comes_quantized = require_trainable(run.model, config, run.quantize, adapts=run.lora.is_on)
    is_quantized = comes_quantized or run.quantize is not None
    continued = {}  # the settings of an adapter to continue
    if run.lora.adapter is not None:
        continued = adapter_settings(Path(run.lora.adapter), "lora.adapter")
    is_dora = bool(continued.get("use_dora", run.lora.dora))
    # what cannot be with weights that are stored so
    problem = ""
    if compute == torch.float64 and is_quantized:
        problem = (
            "dtype=float64 with a quantized base: its numbers have few digits; expected dtype=float32 or bfloat16; set "
            "dtype, or take quantize out"
        )
    elif is_quantized and run.parallel.cpu_offload:
        problem = (
            "parallel.cpu_offload=true with a quantized base, whose rows of codes stay on the device; expected one of "
            "the two; take one out"
        )
    elif is_quantized and run.lora.starts_at_weights:
        problem = (
            f"lora.init={run.lora.init} with a base that comes quantized, whose weights are codes; expected a base in "
            "floating point; take lora.init out"
        )
    elif is_dora and (is_quantized or run.frozen_dtype == "checkpoint"):
        found = "lora.adapter is a DoRA adapter" if continued else "lora.dora=true"
        stored = "the base is quantized" if is_quantized else "frozen_dtype=checkpoint"
        problem = f"{found}, and {stored}: DoRA reads the weights themselves; expected one of the two; take one out"
    if problem:
        raise ConfigError(problem)
    # the checkpoint's dtype, or quantized
    if is_dora or compute == torch.float64 or not (run.stores_frozen or comes_quantized):
        return None
    storage = storage_of(checkpoint_dtype(config), compute, device, run.frozen_dtype)
    saved = continued.get("modules_to_save") or run.lora.modules_to_save
    widens_experts = capabilities.lack("an adapter of quantized experts") is not None
    storage = replace(storage, whole=tuple(saved), widens_experts=widens_experts)
    if run.quantize is not None:
        storage = replace(storage, quantize=run.quantize, host_share=None)
    # Rows that are added to a table start as the mean of its rows, in the dtype of the table.
    return replace(storage, tables=torch.float32) if new_ids else storage


def choose(
    run: RunConfig, inputs: Inputs, device: torch.device
) -> tuple[ChosenDtype, Chosen, list[Decision]]:
    """Choose the compute dtype and the attention backend, and set PyTorch's switches; with all reasons.
    ``use_cpu_matmul`` is called before.
    """
    dtype = resolve_dtype(run.dtype, device)
    chosen = select(run.attention, device, dtype.dtype, inputs.config)
    require_possible(run.activation_checkpointing, device, chosen.name, compiles=run.compile)
    if run.compile:
        require_compiler(device)
    name = str(dtype.dtype).removeprefix("torch.")
    switches = use_arithmetic(dtype.dtype, device, tf32=run.tf32, deterministic=run.deterministic)
    decisions = [
        Decision("dtype", name, dtype.reason),
        Decision("attention", chosen.name, chosen.reason),
        *activate_flash_attention(chosen.name, device, inputs.config),
        *switches,
        *cpu_matmul.active().decisions,
    ]
    if refuses_grouped_experts(device) and architecture.num_experts(
        inputs.config.get_text_config()
    ):
        reason = "deterministic=true: the product of all experts at once counts by torch.histc"
        decisions.append(Decision("experts", "one by one", reason))
    return dtype, chosen, decisions


def adapt(
    run: RunConfig, inputs: Inputs, model: PreTrainedModel
) -> tuple[nn.Module, list[Decision]]:
    """The model with its added tokens, adapters and frozen parts, and the decisions."""
    # added tokens
    add_tokens(model, inputs.new_ids)
    if not run.lora.is_on and not run.freeze and not architecture.has_parts(model):
        return model, []

    # adapters, and the rows of tokens that train beside them
    needed = rows_to_train(run, inputs, model)
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    rows = choose_rows(model, run.lora, needed, ends)
    decisions = base_decisions(run.lora, run.model, run.quantize)
    if rows:
        ids = next(iter(rows.values()))
        why = "; ".join(needed.get(index, f"{inputs.token(index)}: ends a turn") for index in ids)
        names = " and ".join(rows)
        decisions.append(Decision("lora.train_token_rows", f"{len(ids)} of {names}", why))
    adapted = apply_lora(model, run.lora, run.seed, rows)
    if run.lora.adapter is not None:
        require_frozen_base(adapted, run.lora.adapter)
    if run.lora.is_on and architecture.has_parts(model):
        decisions.append(Decision("lora.targets", *describe_targets(adapted, run.lora)))
    dropout = 0.0 if run.allows_noise else remove_dropout(adapted)
    if dropout:
        reason = f"the adapter has {dropout:g}; what is compared must not be noisy"
        decisions.append(Decision("lora.dropout", "0", reason))

    # frozen parts: those that the run names, and those that no output depends on
    if run.freeze:
        names_frozen = freeze(adapted, run.freeze)
        rest = f" and {len(names_frozen) - 1:,} more" if len(names_frozen) > 1 else ""
        value = f"{len(names_frozen)} tensors"
        decisions.append(Decision("freeze", value, f"{names_frozen[0]}{rest}"))
    idle = architecture.freeze_unused(adapted)
    if idle:
        reason = f"{idle[0]}{' and others' if len(idle) > 1 else ''}: no feature of a picture depends on it"
        decisions.append(Decision("frozen", f"{len(idle)} tensors", reason))
    return adapted, decisions


def rows_to_train(run: RunConfig, inputs: Inputs, model: nn.Module) -> dict[int, str]:
    """Token id -> why its rows of the embedding and the head must train; empty where the whole model trains."""
    if not run.lora.is_on and not run.freeze:
        return {}
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    added = {index: f"{inputs.token(index)}: added by tokens.add" for index in inputs.new_ids}
    return untrained_rows(model, ends) | added


def join_models(
    run: RunConfig,
    inputs: Inputs,
    ranks: Ranks,
    loaded: Loaded,
    adapted: tuple[nn.Module, list[Decision]],
    *,
    compared: Plan | None = None,
) -> Models:
    """Join the policy with the auxiliary models, and shard them. ``compared``: a plan of whose first step some samples
    are scored by the library alone, for the monitor ``FirstStep``.
    """
    model, reasons = adapted
    decisions = [*loaded.decisions, *reasons]
    dtype, one_sample = loaded.dtype.dtype, loaded.one_sample

    # the policy: noise, shared prefixes, recomputation, compiled layers
    noise = install_noise(model, run.noise, run.seed)
    # a run that generates is compared with its engine instead
    is_compared = noise is None and not run.has_scalar_head and not run.generates
    policy, reasons = build_policy(run, one_sample, has_noise=noise is not None)
    decisions.extend(reasons)
    recompute_activations(model, run.activation_checkpointing)
    if run.compile:
        decisions.extend(compile_layers(model, dtype))
    if one_sample and "pair" in run.loss().units.values():
        raise ModelError(
            f"model={run.model}: it runs one sample at a time ({one_sample}), and "
            f"{run.command()} compares samples; expected a model that packs"
        )

    # the models beside it in the forward
    others = run.models()
    teacher, reasons = others.load_teacher(run, inputs, loaded, model, ranks)
    decisions.extend(reasons)
    critic, reasons = others.load_critic(run, inputs, loaded, model, ranks)
    decisions.extend(reasons)
    scorer = Scorer(model, teacher, critic, recorder_of(model, run.router))
    budget = build_budget(run, model, ranks, one_sample=one_sample is not None)

    # shards: layers are sharded already; a vision tower goes with the root, since how often its blocks run depends on
    # a rank's images, and each run of a shard is a collective
    if isinstance(critic, OwnCritic):
        distributed.shard(critic, ranks, dtype)
    distributed.shard(scorer, ranks, dtype)
    compute = partial(compute_context, dtype, ranks.device, by_weights=ranks.is_sharded)

    # the library's logprobs of samples of the first step, each alone, before anything is trained
    logps: dict[str, Tensor] = {}
    if compared is not None and compared.cursor == START and is_compared:
        samples = {s.id: s for tree in compared.source.prepare(1) for s in tree.samples}
        sizes = [(sample.id, sample.num_tokens) for sample in samples.values()]
        with torch.no_grad(), compute():
            for name in ids_to_compare(sizes, ALONE_TOKENS):
                alone = partial(library_logps, sample=samples[name], device=ranks.device)
                logps[name] = scorer.inside(alone)
        distributed.reshard(scorer)  # the optimizer takes the shards

    # the models that are run by themselves
    roles, reasons = others.build_roles(run, inputs, loaded, scorer, ranks)
    decisions.extend(reasons)
    teachers, reasons = others.load_completion_teachers(run, inputs, loaded, ranks)
    decisions.extend(reasons)
    return Models(
        scorer=scorer,
        loaded=loaded,
        roles=roles,
        noise=noise,
        policy=policy,
        budget=budget,
        library_logps=logps,
        compute=compute,
        compute_backward=partial(backward_context, dtype),
        saved_dtype=checkpoint_dtype(inputs.config),
        decisions=decisions,
        teachers=teachers,
        self_teacher=others.build_self_teacher(scorer),
    )


def build_policy(
    run: RunConfig, one_sample: str | None, *, has_noise: bool
) -> tuple[PackPolicy, list[Decision]]:
    """How samples share prefixes; with the reason if batch.share_prefixes is overruled. ``one_sample``: why each
    micro-batch is one sample, if it is.
    """
    decisions = [Decision("packing", "one sample at a time", one_sample)] if one_sample else []
    obstacle = (
        "noise belongs to one sample, a shared prefix to several" if has_noise else one_sample
    )
    if run.batch.share_prefixes and obstacle:
        decisions.insert(0, Decision("batch.share_prefixes", "false", obstacle))
    is_shared = run.batch.share_prefixes and not obstacle
    return PackPolicy(is_shared, run.batch.min_saved_tokens), decisions


def build_budget(run: RunConfig, model: nn.Module, ranks: Ranks, *, one_sample: bool) -> Budget:
    """How a step is divided among ranks and micro-batches."""
    rates = architecture.flops(model)
    return Budget(
        tokens_per_microbatch=run.batch.tokens_per_microbatch,
        num_ranks=ranks.num_shares,
        cost=CostModel(rates.per_token, rates.per_pair + rates.per_window_pair, rates.per_target),
        min_saved_tokens=run.batch.min_saved_tokens,
        one_sample=one_sample,
    )


# -- the trainer


def build_trainer(
    run: RunConfig,
    inputs: Inputs,
    models: Models,
    plan: Plan,
    ranks: Ranks,
    emit: Callable[..., None] = emit_nowhere,
    interrupts: Interrupts | None = None,
) -> Trainer:
    """Build the trainer of a run, which only the loop changes from then on. ``emit`` is called once the log is open."""
    scorer, loaded, image_store = models.scorer, models.loaded, inputs.renderer.image_store
    source, num_steps, _ = plan
    optim = run.resolved_optim

    # learning rates of parts of the model
    keys = architecture.assign_patterns(
        scorer.model, optim.group_learning_rates, "optim.group_learning_rates"
    )
    rates = {
        f"model.{name}": Rate(key, optim.group_learning_rates[key]) for name, key in keys.items()
    }

    engine = engine_of(inputs, models, ranks)
    recorder = Recorder(run.log, run.seed, ranks, emit)
    trainer = Trainer(
        scorer=scorer,
        source=run.connect(source, inputs, models, engine, ranks, lambda: trainer),
        optimizer=build_optimizer(
            scorer, optim, run.models().critic_pace(run), rates, architecture.layers(scorer.model)
        ),
        learning_rate=partial(learning_rate, total=num_steps, config=optim),
        num_steps=num_steps,
        budget=models.budget,
        policy=models.policy,
        ranks=ranks,
        compute=models.compute,
        compute_backward=models.compute_backward,
        noise=models.noise,
        fit=build_fit(
            run.batch,
            ranks,
            one_sample=loaded.one_sample,
            recomputes=run.activation_checkpointing in (True, "offload"),
        ),
        roles=[*models.roles, *([models.self_teacher] if models.self_teacher else [])],
        clip_grad_norm=optim.clip_grad_norm,
        router=run.router,
        monitors=[
            FirstStep(models.library_logps, TOLERANCE[loaded.dtype.dtype]),
            Untouched.watching(scorer),
            Spikes(),
            Divergence(run.loss_monitor),
            *run.monitors(source),
        ],
        before_planning=[]
        if image_store is None or run.generates
        else [Prefetch(image_store.expect)],
        emit=emit,
        recorder=recorder,
        meter=Meter(run.log.utilization_seconds, ranks.device),
        interrupts=Interrupts() if interrupts is None else interrupts,
    )
    return trainer
