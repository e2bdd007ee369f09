"""``build``: a configuration and its inputs -> a run that is ready to train.

It reads in the order things happen: dtype, attention, model, adapters, sharding, optimizer, job. Its parts can be had
one by one, so that ``checks`` can say which of them fails. Nothing is written. What is chosen for the user is a
``Decision`` with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut import parallel
from taut.alarms import TOLERANCE, FirstStep, Spikes, Untouched, ids_to_compare
from taut.attention.select import Chosen, select
from taut.data.dataset import Dataset
from taut.data.pack import PackPolicy
from taut.data.plan import START, Budget, CostModel, Cursor, Order
from taut.errors import ModelError
from taut.loop import Job, Role
from taut.memory import build_fit
from taut.methods.distill import Setting, load_teacher, require_context
from taut.methods.offline import Offline
from taut.methods.reference import Other, Start
from taut.models import anatomy
from taut.models.load import (
    checkpoint_dtype,
    context_length,
    freeze,
    load_config,
    load_model,
    load_tokenizer,
    require_language_model,
)
from taut.models.lora import apply_lora, choose_rows
from taut.models.noise import install_noise, silence
from taut.models.precision import (
    ChosenDtype,
    backward_context,
    compute_context,
    recompute_contexts,
    resolve_dtype,
)
from taut.models.prove import library_logps, one_sample_reasons
from taut.models.reward import load_reward_model
from taut.models.score import Scorer
from taut.models.tokens import add_tokens
from taut.models.untrained import require_trained, untrained_rows
from taut.optim import build_optimizer, learning_rate
from taut.parallel import Ranks
from taut.rollout.local import LocalEngine
from taut.run import Decision, Inputs, Run, rows_of

ALONE_TOKENS = 1024
"""How many tokens of the first step are also run one sample at a time."""


class Loaded(NamedTuple):
    """A model as it is on disk, with the attention and the dtype that will be in force."""

    model: PreTrainedModel
    dtype: ChosenDtype
    attention: Chosen
    one_sample: str | None
    """Why this model has to run one sample at a time; None: it packs."""
    decisions: list[Decision]


class Adapted(NamedTuple):
    """A loaded model with adapters and added tokens, without what is frozen."""

    model: nn.Module
    decisions: list[Decision]


@dataclass(frozen=True)
class Built:
    """A run that is ready to train; nothing has been written."""

    run: Run
    inputs: Inputs
    scorer: Scorer
    job: Job
    loaded: Loaded
    decisions: list[Decision]
    saved_dtype: torch.dtype
    """What the final weights are saved in: the dtype of the checkpoint they came from."""


def build(run: Run, inputs: Inputs, plan: Plan, ranks: Ranks) -> Built:
    """Load, wrap and shard the model; everything is in force or refused when this returns."""
    loaded = load(run, inputs, ranks)
    adapted = adapt(run, inputs, loaded.model)
    require_trained(adapted.model, rows_to_train(run, inputs, adapted.model))
    return assemble(run, inputs, plan, ranks, loaded, adapted, trains=True)


def load(run: Run, inputs: Inputs, ranks: Ranks) -> Loaded:
    """The model, with what was asked of attention and dtype in force."""
    dtype, chosen, decisions = choose(run, inputs, ranks.device)
    head = run.objective.head
    read = load_model if head is None else partial(load_reward_model, head=head)
    model = read(
        run.model,
        dtype=dtype.dtype,
        device=ranks.device,
        attention=chosen.implementation,
        trust_remote_code=run.trust_remote_code,
    )
    one_sample = "; ".join(one_sample_reasons(model, inputs.longest)) or None
    return Loaded(model, dtype, chosen, one_sample, decisions)


def assemble(
    run: Run,
    inputs: Inputs,
    plan: Plan,
    ranks: Ranks,
    loaded: Loaded,
    adapted: Adapted,
    *,
    trains: bool,
) -> Built:
    """A loaded and adapted model, sharded and made a job. What its first step is compared with is computed where it
    ``trains``.
    """
    model, reasons = adapted
    decisions = [*inputs.decisions, *loaded.decisions, *reasons]
    dtype, one_sample = loaded.dtype.dtype, loaded.one_sample
    scorer = Scorer(model)
    method, num_steps, cursor = plan
    noise = install_noise(model, run.noise, run.seed)
    is_compared = trains and noise is None and cursor == START and run.objective.head is None
    alone = _alone(method, model, dtype, ranks.device) if is_compared else {}
    policy, reasons = build_policy(run, one_sample, has_noise=noise is not None)
    decisions.extend(reasons)
    if run.activation_checkpointing:
        contexts = partial(recompute_contexts, dtype, ranks.device)
        anatomy.unwrap(model).activation_checkpointing_enable(
            {"use_reentrant": False, "context_fn": contexts}
        )
    if one_sample and run.objective.are_compared:
        raise ModelError(
            f"model={run.model}: it runs one sample at a time ({one_sample}), and taut {run.method} compares samples; "
            "expected a model that packs"
        )
    budget = build_budget(run, model, ranks, one_sample=one_sample is not None)
    fit = build_fit(
        run.batch, ranks, one_sample=one_sample, recomputes=run.activation_checkpointing
    )
    decisions.extend(give_teacher(run, inputs, loaded, scorer, ranks))
    parallel.shard(scorer, anatomy.layers(model), ranks)
    optimizer = build_optimizer(scorer, run.optim)
    roles, reasons = build_roles(run, inputs, loaded, scorer, ranks)
    decisions.extend(reasons)
    job = Job(
        scorer=scorer,
        method=method,
        optimizer=optimizer,
        learning_rate=partial(learning_rate, total=num_steps, config=run.optim),
        num_steps=num_steps,
        budget=budget,
        policy=policy,
        ranks=ranks,
        compute=partial(compute_context, dtype, ranks.device),
        compute_backward=partial(backward_context, dtype),
        noise=noise,
        fit=fit,
        roles=roles,
        clip_grad_norm=run.optim.clip_grad_norm,
        alarms=[FirstStep(alone, TOLERANCE[dtype]), Untouched.watching(scorer), Spikes()],
    )
    return Built(run, inputs, scorer, job, loaded, decisions, checkpoint_dtype(inputs.config))


def build_roles(
    run: Run, inputs: Inputs, loaded: Loaded, scorer: Scorer, ranks: Ranks
) -> tuple[list[Role], list[Decision]]:
    """The models beside the one that trains, and why these."""
    config = run.objective.reference
    if config is None:
        return [], []
    if config.model is not None:
        require_same_tokenizer(run, inputs, config.model, "reference.model")
        other = Scorer(load_beside(run, config.model, inputs, loaded, ranks))
        parallel.shard(other, anatomy.layers(other.model), ranks)
        return [Other(other)], [Decision("reference", config.model, "named by reference.model")]
    start = Start(scorer, [p for p in scorer.parameters() if p.requires_grad], config)
    if config.update_every:
        scorer.reference = start  # so that a checkpoint holds it
        value = f"the policy, every {config.update_every} steps"
        reason = f"moves {config.update_mix:g} of the way (reference.update_every, update_mix)"
        return [start], [Decision("reference", value, reason)]
    if run.lora.rank and not run.lora.adapter:
        value, reason = "the base model", "the policy without what LoRA adds: its adapters' start"
    elif run.lora.is_on:
        value, reason = "lora.adapter as it is", "the policy at the start, adapter included"
    else:
        value, reason = "a frozen copy", "the policy at the start"
    return [start], [Decision("reference", value, reason)]


def give_teacher(
    run: Run, inputs: Inputs, loaded: Loaded, scorer: Scorer, ranks: Ranks
) -> list[Decision]:
    """Give the scorer what it learns from, where there is a teacher, and say why this."""
    config = run.objective.teacher
    if config is None:
        return []
    setting = Setting(
        tokenizer=inputs.tokenizer,
        num_rows=anatomy.head(scorer.model).weight.shape[0],
        longest=inputs.longest,
        dtype=loaded.dtype.dtype,
        device=ranks.device,
        attention=run.attention,
        trust_remote_code=run.trust_remote_code,
    )
    scorer.teacher, reasons = load_teacher(config, setting)
    return [Decision(*reason) for reason in reasons]


def load_beside(
    run: Run, path: str, inputs: Inputs, loaded: Loaded, ranks: Ranks
) -> PreTrainedModel:
    """Another model, with the attention and dtype of the one that trains, for the same micro-batches."""
    context = context_length(load_config(path, run.trust_remote_code))
    require_context(f"reference.model={path}", context, inputs.longest)
    model = load_model(
        path,
        dtype=loaded.dtype.dtype,
        device=ranks.device,
        attention=loaded.attention.implementation,
        trust_remote_code=run.trust_remote_code,
    )
    alone = "; ".join(one_sample_reasons(model, inputs.longest))
    if alone and not loaded.one_sample:
        raise ModelError(
            f"reference.model={path} runs one sample at a time ({alone}), and model={run.model} does not; expected a "
            "reference that packs as it does; name another"
        )
    return model


def require_same_tokenizer(run: Run, inputs: Inputs, path: str, key: str) -> None:
    """Raise ModelError where another model's ids mean other tokens, or where there is none."""
    try:
        config = load_config(path, run.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    require_language_model(path, config, key)
    theirs = load_tokenizer(path, run.trust_remote_code).get_vocab()
    mine = inputs.tokenizer.get_vocab()
    differing = next((token for token, index in mine.items() if theirs.get(token) != index), None)
    if differing is not None:
        raise ModelError(
            f"{key}={path}: its tokenizer has {theirs.get(differing)} for {differing!r} and that of model={run.model} "
            f"has {mine[differing]}; expected the same tokenizer; name a model of the same family"
        )


def engine_of(built: Built) -> Callable[..., LocalEngine]:
    """Makes an engine on the weights that train."""
    return partial(
        LocalEngine,
        built.scorer,
        built.inputs.tokenizer,
        built.inputs.stops.ids,
        context=context_length(built.inputs.config),
        compute=built.job.compute,
        ranks=built.job.ranks,
    )


def rows_to_train(run: Run, inputs: Inputs, model: nn.Module) -> dict[int, str]:
    """Rows of the embedding and the head that have to train, and why; empty where all of the model trains."""
    if not run.lora.is_on and not run.freeze:
        return {}
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    added = {index: f"{inputs.token(index)}: added by tokens.add" for index in inputs.new_ids}
    return untrained_rows(model, ends) | added


def adapt(run: Run, inputs: Inputs, model: PreTrainedModel) -> Adapted:
    """The model with its added tokens and adapters, without what is frozen."""
    add_tokens(model, inputs.new_ids)
    if not run.lora.is_on and not run.freeze:
        return Adapted(model, [])
    needed = rows_to_train(run, inputs, model)
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    rows = choose_rows(model, run.lora, needed, ends)
    decisions = []
    if rows:
        ids = next(iter(rows.values()))
        why = "; ".join(needed.get(index, f"{inputs.token(index)}: ends a turn") for index in ids)
        names = " and ".join(rows)
        decisions.append(Decision("lora.train_rows", f"{len(ids)} of {names}", why))
    adapted = apply_lora(model, run.lora, run.seed, rows)
    dropout = 0.0 if run.MAY_BE_NOISY else silence(adapted)
    if dropout:
        reason = f"the adapter has {dropout:g}; what is compared must not be noisy"
        decisions.append(Decision("lora.dropout", "0", reason))
    if run.freeze:
        names_frozen = freeze(adapted, run.freeze)
        rest = f" and {len(names_frozen) - 1:,} more" if len(names_frozen) > 1 else ""
        value = f"{len(names_frozen)} tensors"
        decisions.append(Decision("freeze", value, f"{names_frozen[0]}{rest}"))
    return Adapted(adapted, decisions)


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

    method: Offline
    num_steps: int
    cursor: Cursor
    """How far the run has come."""


def build_method(run: Run, train: Dataset, cursor: Cursor = START) -> Plan:
    """The method with its order of samples, and the number of steps. ``cursor``: how far a resumed run has come."""
    objective, rows = run.objective, rows_of(run, train)
    groups = rows.prefix_groups(run.batch.group_min_tokens) if run.batch.group_prefixes else None
    order = Order(rows.weights, run.seed, run.batch.samples_per_step, run.batch.shuffle, groups)
    epochs = None if run.steps is not None else (1.0 if run.epochs is None else run.epochs)
    order = order.going_on_from(cursor, epochs)
    num_steps = run.steps if epochs is None else order.num_steps(epochs)
    assert num_steps is not None
    spliced = int(train.lengths.max()) if objective.is_mismatched else None
    method = Offline(rows, order, epochs, objective.loss, spliced)
    return Plan(method, num_steps, cursor)


def _alone(
    method: Offline, model: nn.Module, dtype: torch.dtype, device: torch.device
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
