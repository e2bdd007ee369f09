"""The run: whether the settings are applied to what was built, its steps, its output directory, the saved model."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from taut.checks.loss import ProductCounter, dtype_name
from taut.checks.measure import first_step, trained, weights_moved
from taut.checks.registry import Finding, Skip, check, failed, passed, skip_if, split_error, warned
from taut.checks.session import Session
from taut.config import home_path, to_dict, user_path
from taut.data.packing import ALONE, pack
from taut.errors import OutputError, TautError
from taut.evals import round_trip
from taut.io.console import counted
from taut.io.files import free_space, read_json
from taut.io.temporary import TemporaryFolder
from taut.methods.sources import Offline, Streamed
from taut.models import architecture
from taut.models.compiled_layers import compiled_layers, layers_to_compile
from taut.models.load import frozen_names, load_config, load_tokenizer
from taut.models.lora.adapters import is_adapted
from taut.models.noise import KeyedDropout
from taut.models.recompute import applied
from taut.models.save import saving
from taut.train import distributed, sharded
from taut.train.checkpoint import SPARE
from taut.train.optim import highest, optimizer_type
from taut.train.run_dir import CHECKPOINTS, WRITTEN, complete, dotted, require_usable
from taut.types import Tree
from taut.vision.processors import open_processor

# -- settings


class Setting(NamedTuple):
    """A key with its requested and its actual value, in words; the setting is applied if both are equal."""

    key: str
    asked: str
    found: str

    def __str__(self) -> str:
        return f"{self.key}: asked {self.asked}, found {self.found}"


def _listed(values: Iterable[Any]) -> str:
    """Different values, in words; one value if all are equal."""
    words = {f"{value:.10g}" if isinstance(value, float) else str(value) for value in values}
    return " and ".join(sorted(words)) or "nothing"


FROZEN_DECISION = "frozen"
"""The decision to freeze parameters that no feature of a picture depends on."""


@check("run.in_force", after=["loss.reached", "loss.dtype"])
def what_was_asked_is_in_force(session: Session) -> Finding:
    """Are all settings of the run applied to what was built?

    Modules, parameters, optimizer and trainer are looked at, and no log or configuration of the library's if the thing
    itself can be looked at. What was set aside with a recorded decision is applied as decided, and is noted.
    """
    # each setting as asked and as found
    settings = [*_computation(session), *_trained(session), *_adapters(session)]
    wrong = [setting for setting in settings if setting.found != setting.asked]
    if wrong:
        return failed(
            f"{wrong[0].key} is not applied",
            measured=([str(setting) for setting in wrong], f"of {len(settings)} settings"),
            remedy="the run would not be the one asked for; remove the setting, and please report this",
        )
    set_aside = ("batch.share_prefixes", "packing", FROZEN_DECISION)
    notes = [
        f"{name} is {value}: {reason}"
        for name, value, reason in session.built.decisions
        if name in set_aside
    ]
    return passed("found as asked", len(settings), "settings", notes)


def _computation(session: Session) -> Iterator[Setting]:
    """The dtype of most matrix products, the attention of every module of the text model, recomputation; how
    samples are packed and shared, or the decision not to; NEFTune's alpha.
    """
    run, model, chosen = session.run, session.scorer.model, session.loaded.attention
    # the dtype of most products of a forward
    counter = ProductCounter()
    with session.inference(), counter:
        session.forward(pack([session.short_sample], ALONE))
    products: Counter[torch.dtype] = Counter()
    for (_, dtype), number in counter.products.items():
        products[dtype] += number
    ((most, _),) = products.most_common(1)
    yield Setting("dtype", run.dtype or dtype_name(session.dtype), dtype_name(most))
    if session.ranks.device.type == "cuda":
        precision = torch.get_float32_matmul_precision()
        yield Setting("tf32", str(run.tf32), str(precision != "highest"))
    if run.deterministic:
        is_set = torch.are_deterministic_algorithms_enabled()
        yield Setting("deterministic", "True", str(is_set))
    compiled = len(compiled_layers(model))
    if run.compile or compiled:
        wanted = len(layers_to_compile(model)) if run.compile else 0
        yield Setting("compile", f"in {wanted} layers", f"in {compiled} layers")
    # the attention of every module
    modules = architecture.language_model(model).modules()
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    names = [str(getattr(config, "_attn_implementation", None)) for config in configs.values()]
    requested = chosen.name if run.attention == "auto" else run.attention
    yield Setting("attention", requested, _listed(name.removeprefix("taut_") for name in names))
    # each layer is recomputed as set, and stored in a step what the setting stores beyond inputs
    how, layers = run.activation_checkpointing, architecture.layers(model)
    on = [function for function in map(applied, layers) if function is not None]
    if how in ("selective", "offload"):
        first_step(session)
        on = [function for function in on if function.num_kept]
    requested = f"{str(how or False).lower()} in {len(layers) if how else 0} layers"
    state = _listed(str(function.how).lower() for function in on) if on else "false"
    yield Setting("activation_checkpointing", requested, f"{state} in {len(on)} layers")
    # how samples are packed and shared
    batch, trainer = session.run.batch, session.trainer
    budget, policy = trainer.budget, trainer.policy
    decided = {decision.name for decision in session.built.decisions}
    may_share = batch.share_prefixes and "batch.share_prefixes" not in decided
    yield Setting("batch.share_prefixes", str(may_share), str(policy.share_prefixes))
    saved = _listed([policy.min_saved_tokens, budget.min_saved_tokens])
    yield Setting("batch.min_saved_tokens", str(batch.min_saved_tokens), saved)
    tokens = budget.tokens_per_microbatch
    yield Setting("batch.tokens_per_microbatch", str(batch.tokens_per_microbatch), str(tokens))
    packed = "one at a time" if "packing" in decided else "packed"
    yield Setting("samples", packed, "one at a time" if budget.one_sample else "packed")
    num_shares = session.ranks.size // session.run.parallel.tensor
    yield Setting("ranks", str(num_shares), str(budget.num_ranks))
    # noise and the router's loss
    noise = trainer.noise
    alpha = noise.alpha if noise is not None and noise.is_on else 0.0
    yield Setting(
        "noise.neftune_alpha", _listed([session.run.noise.neftune_alpha]), _listed([alpha])
    )
    if run.router.aux_loss_coef or session.scorer.routers is not None:
        report, found = first_step(session).report, trainer.router
        is_added = report is not None and report.router_loss > 0
        state = f"{found.aux_loss_coef:g}, {found.aux_loss}" if is_added else "not in the loss"
        requested = f"{run.router.aux_loss_coef:g}, {run.router.aux_loss}"
        yield Setting("router.aux_loss_coef", requested, state)


def _trained(session: Session) -> Iterator[Setting]:
    """Check that frozen parameters neither train nor are in the optimizer, and all others do both. AdamW's own settings
    in each of its groups, and the tensors that decay.
    """
    members = [id(parameter) for parameter in session.trainer.trained]
    named = dict(session.scorer.model.named_parameters())
    in_optimizer = set(members)
    held = {name for name, p in named.items() if p.requires_grad or id(p) in in_optimizer}
    # what freeze names does not train, and all else does
    frozen = frozen_names(session.scorer.model, session.run.freeze)
    if frozen:
        moving = [name for name in frozen if name in held]
        state = f"{moving[0]} trains" if moving else "frozen"
        yield Setting(f"freeze {' '.join(session.run.freeze)}", "frozen", state)
    if not session.run.lora.is_on:
        still = [name for name in named if name not in frozen and name not in held]
        decided = {name: value for name, value, _ in session.built.decisions}
        is_decided = decided.get(FROZEN_DECISION) == f"{len(still)} tensors"
        parts = {architecture.part_of(name) for name in still}
        if is_decided and parts <= {"vision_tower", "projector"}:
            still = []
        state = f"{still[0]} is frozen" if still else "trained"
        yield Setting("all that freeze does not name", "trained", state)
    # where parts of weights are
    if session.ranks.is_sharded:
        every = (*session.trainer.trained, *session.scorer.parameters())
        places = _listed(p.device.type for p in every if hasattr(p, "full_tensor"))
        yield Setting("parallel.cpu_offload", session.ranks.weights_device.type, places)
        divided = _listed({distributed.num_together(p) for p in session.scorer.parameters()})
        yield Setting("parallel.tensor", _listed({1, session.run.parallel.tensor}), divided)
    # the optimizer has what trains, with its settings
    each = "each once" if len(in_optimizer) == len(members) else "some twice"
    requested = f"{len(trained(session))} tensors, each once"
    yield Setting("optimizer", requested, f"{len(members)} tensors, {each}")
    config, optimizer = session.run.optim, session.trainer.optimizer
    groups = optimizer.param_groups
    yield Setting("optim", optimizer_type(config).__name__, type(optimizer).__name__)
    yield Setting("optim.beta1", _listed([config.beta1]), _listed(g["betas"][0] for g in groups))
    yield Setting("optim.beta2", _listed([config.beta2]), _listed(g["betas"][1] for g in groups))
    yield Setting("optim.eps", _listed([config.eps]), _listed(g["eps"] for g in groups))
    # weight decay of each tensor, by the rule for its name
    decay_of = {id(p): float(g["weight_decay"]) for g in groups for p in g["params"]}
    rule = f"{config.weight_decay:g} on matrices, 0 on norms, biases and vectors"
    state = rule
    for name, parameter in session.scorer.named_parameters():
        words = name.lower().split(".")
        is_norm_or_bias = "bias" in words[-1] or any("norm" in word for word in words)
        wanted = 0.0 if parameter.ndim <= 1 or is_norm_or_bias else config.weight_decay
        decay = decay_of.get(id(parameter), wanted)
        if decay != wanted:
            state = f"{decay:g} on {name.removeprefix('model.')}"
            break
    yield Setting("optim.weight_decay", rule, state)
    clip = session.trainer.clip_grad_norm
    yield Setting("optim.clip_grad_norm", str(config.clip_grad_norm), str(clip))


INNER = {"base_layer", "lora_A", "lora_B", "lora_dropout", "original_module", "modules_to_save"}
"""Parts of names inside modules that peft wraps."""
ADDED = ("lora_", "modules_to_save", "trainable_tokens")
"""Parts of names of parameters that adapters added."""


def _adapters(session: Session) -> Iterator[Setting]:
    """Check that adapters are on the modules as requested; if none were requested, that there are none."""
    modules = dict(session.model.named_modules())
    adapted: dict[str, Any] = {n: m for n, m in modules.items() if hasattr(m, "lora_A")}
    if not session.run.lora.is_on:
        yield Setting("lora.rank", "no adapters", f"{len(adapted) or 'no'} adapters")
        return
    # on which modules adapters are
    requested = _asked_of_adapters(session)
    by_parameter = requested.get("target_parameters") or []
    # of an adapter around a stacked parameter: the parameter's own name
    own = {
        name: f"{_outside(name)}.{layer.parameter_name}" if by_parameter else name
        for name, layer in adapted.items()
        if hasattr(layer, "parameter_name")
    }
    placed = {own.get(name, name) for name in adapted}
    linear = {name: layer for name, layer in adapted.items() if own.get(name, name) == name}
    wanted = adapter_targets(session, modules, linear, requested)
    every = (_outside(name) for name, _ in session.model.named_parameters())
    wanted |= {name for name in every if _ends_with(name, by_parameter)}
    missing, more = sorted(wanted - placed), sorted(placed - wanted)
    state = f"{len(placed)} modules"
    state += (f", not {missing[0]}" if missing else "") + (f", also {more[0]}" if more else "")
    yield Setting("lora.targets", f"{len(wanted)} modules", state)
    # ranks and scales
    layers = list(adapted.values())
    name = layers[0].active_adapters[0] if layers else ""
    ranks, scales = list[tuple[str, float, float]](), list[tuple[str, float, float]]()
    for place, layer in adapted.items():
        # peft stacks the matrices of all experts, and gives two fused matrices the rank of both
        num_matrices = getattr(layer, "num_experts", 1)
        if not by_parameter and getattr(layer, "parameter_name", "") == "gate_up_proj":
            num_matrices *= 2
        rank = _by_pattern(requested, "rank", own.get(place, place))
        ranks.append((place, rank, layer.lora_A[name].weight.shape[0] / num_matrices))
        scale = _by_pattern(requested, "alpha", own.get(place, place))
        scale /= math.sqrt(rank) if requested["rslora"] else rank
        scales.append((place, round(scale, 6), round(float(layer.scaling[name]), 6)))
    yield _of_each("lora.rank", "", ranks)
    yield _of_each("lora.alpha", "a scale of ", scales)
    # DoRA, the start, dropout
    dora = _listed(name in layer.lora_magnitude_vector for layer in layers)
    yield Setting("lora.dora", str(requested["dora"]), dora)
    wanted_start = "the weights" if session.run.lora.starts_at_weights else "0"
    starts = ["the weights" if hasattr(layer, "start_A") else "0" for layer in layers]
    yield Setting("lora.init", f"a start at {wanted_start}", f"a start at {_listed(starts)}")
    dropouts = []
    for layer in layers:
        dropout = layer.lora_dropout[name]
        if isinstance(dropout, nn.Dropout) and dropout.p:
            dropouts.append(f"{dropout.p:g}, drawn by place")
        else:
            dropouts.append(_listed([dropout.p if isinstance(dropout, KeyedDropout) else 0.0]))
    yield Setting("lora.dropout", _listed([requested["dropout"]]), _listed(dropouts))
    model = session.scorer.model
    # what trains besides: whole modules, and nothing below the adapters
    training = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = [name for name in training if ".modules_to_save" in name]
    for saved in requested["modules_to_save"]:
        if saved == "projector" and architecture.has_parts(model):
            is_trained = any(architecture.part_of(name) == saved for name in whole)
        else:
            is_trained = any(f"{saved}.modules_to_save" in name for name in whole)
        state = "trained" if is_trained else "frozen"
        yield Setting(f"lora.modules_to_save {saved}", "trained", state)
    stray = [name for name in training if not any(added in name for added in ADDED)]
    state = f"{stray[0]} trains" if stray else "frozen"
    yield Setting("the model below the adapters", "frozen", state)


def _asked_of_adapters(session: Session) -> dict[str, Any]:
    """The requested settings, or the settings of the adapter that the run continues."""
    config = session.run.lora
    if config.adapter is None:
        alpha = float(2 * config.rank if config.alpha is None else config.alpha)
        names = ("rank", "rslora", "dora", "dropout", "targets", "modules_to_save")
        return {"alpha": alpha, **{name: getattr(config, name) for name in names}}
    saved = read_json(home_path(config.adapter) / "adapter_config.json")
    return {
        **saved,
        "rank": saved["r"],
        "alpha": float(saved["lora_alpha"]),
        "rslora": saved.get("use_rslora", False),
        "dora": saved.get("use_dora", False),
        "dropout": float(saved.get("lora_dropout") or 0.0) if session.run.allows_noise else 0.0,
        "targets": saved.get("target_modules") or [],
        "modules_to_save": saved.get("modules_to_save") or [],
    }


def _by_pattern(requested: Mapping[str, Any], setting: str, name: str) -> float:
    """Rank or alpha of a module's adapter: the value of its first matching pattern, or the common value."""
    patterns = (requested.get(f"{setting}_pattern") or {}).items()
    found = (value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", name))
    return float(next(found, requested[setting]))


def _of_each(key: str, unit: str, values: Sequence[tuple[str, float, float]]) -> Setting:
    """A setting that each module may have its own value of: (module, asked, found)."""
    asked, found = (_listed(value[column] for value in values) for column in (1, 2))
    other = next((f" ({place}: {was:g} for {it:g})" for place, it, was in values if it != was), "")
    return Setting(key, f"{unit}{asked}", f"{unit}{found}{other}")


def _outside(name: str) -> str:
    """A name without the parts that peft put into it."""
    return ".".join(part for part in name.split(".") if part not in INNER)


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


def adapter_targets(
    session: Session,
    modules: Mapping[str, nn.Module],
    adapted: Mapping[str, Any],
    requested: Mapping[str, Any],
) -> set[str]:
    """Names of the modules to adapt. ``requested``: the run's request, or the value in peft's configuration."""
    asked = requested["targets"]
    head: Any = session.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and not INNER & set(name.split("."))
    }
    every = {name for name in linear | set(adapted) if modules[name] is not head}
    targets: Sequence[str] = asked
    if asked == "all-linear":
        targets = ["language_model"] if architecture.has_parts(session.scorer.model) else ["*"]
        every = {name for name in every if not hasattr(modules[name], "modules_to_save")}
    # of an adapter that is continued, peft's list has ends of names and no patterns
    has_patterns = session.run.lora.adapter is None or asked == "all-linear"
    wanted: set[str] = set()
    if isinstance(asked, str) and asked != "all-linear":  # peft's regular expression
        targets, wanted = [], {name for name in every if re.fullmatch(asked, name)}
    for target in targets:
        if has_patterns and (
            target in architecture.PARTS or any(sign in target for sign in "*?[/")
        ):
            model = session.scorer.model
            wanted |= set(architecture.match_pattern(model, target, sorted(every), "lora.targets"))
        else:
            wanted |= {name for name in every if _ends_with(name, [target])}
    # of an adapter that is continued: its layers, and what it leaves out
    numbers, patterns = (requested.get(f"layers_{end}") for end in ("to_transform", "pattern"))
    if numbers not in (None, []) and not isinstance(asked, str):
        layers = [patterns] if isinstance(patterns, str) else patterns or [r"[^.]*"]
        number = re.compile(rf"(?:.*?\.)?(?:{'|'.join(layers)})\.(\d+)\.")
        allowed = {numbers} if isinstance(numbers, int) else set(numbers)
        wanted = {it for it in wanted if (at := number.match(it)) and int(at[1]) in allowed}
    left_out = requested.get("exclude_modules") or []
    if isinstance(left_out, str):
        return {name for name in wanted if not re.fullmatch(left_out, name)}
    return {name for name in wanted if not _ends_with(name, left_out)}


# -- numbers that people mean

RATES = 1 / 300, 30.0
"""The lowest and the highest learning rate, in multiples of the method's default. The highest is for models of 4,096
dimensions, and in inverse proportion higher for narrower ones."""


def usual() -> dict[str, tuple[float, float, str]]:
    """Key or pattern -> lowest, highest, source."""
    return tomllib.loads((Path(__file__).parent / "usual.toml").read_text(encoding="utf-8"))


@check("run.usual", after=["model.trains"])
def numbers_are_those_people_mean(session: Session) -> Finding:
    """Are the run's numbers within what people use?

    The table of docs/models.md, and the learning rate against the method's default.
    """
    run, source = session.run, session.trainer.source
    numbers = {k: float(v) for k, v in dotted(to_dict(run)) if isinstance(v, int | float)}
    ranges = usual()
    if isinstance(source, Offline):  # however they are set
        seen = source.cursor(session.trainer.num_steps).samples
        numbers["epochs"] = round(seen / source.order.epoch_size, 2)
    rates, width = run.learning_rates, session.language.config.get_text_config().hidden_size
    default = rates.lora if run.lora.is_on else rates.full
    most = RATES[1] * default * max(1.0, 4096 / width)
    numbers["optim.learning_rate"] = highest(run.resolved_optim)
    ranges["optim.learning_rate"] = (RATES[0] * default, most, rates.sources)
    outside = [
        f"{key}={value:g}: usual is {low:g} to {high:g} ({origin})"
        for pattern, (low, high, origin) in ranges.items()
        for key, value in numbers.items()
        if fnmatch(key, pattern) and not low <= value <= high
    ]
    if not outside:
        return passed("within what people use", len(ranges), "ranges")
    says = f"{outside[0].partition(':')[0]} is outside of what people use"
    return warned(
        says, evidence=outside, remedy="correct it if it is a slip; if it is meant, go on"
    )


# -- steps


@check("run.steps", after=["model.trains"])
def each_step_has_its_samples(session: Session) -> Finding:
    """Does each step have the samples it should, in this run and in one that goes on from it?

    The order is a pure function of the seed and the step: a second object of it gives the same samples, whatever the
    first was asked before, and so does the one that a resumed run makes of a cursor. That an epoch has each sample as
    often as it should is ``data.packing``.
    """
    source, run, last = session.trainer.source, session.run, session.trainer.num_steps
    is_streamed = isinstance(source, Streamed)
    skip_if(is_streamed, "most rows are yet to come; a resume compares their digest")
    skip_if(not isinstance(source, Offline), "the method prepares its steps itself")
    assert isinstance(source, Offline)
    order = source.order
    # the number of steps
    wanted, most = run.steps, run.batch.tokens_per_step
    if wanted is None and most is None:
        samples = max(1, round((1.0 if run.epochs is None else run.epochs) * order.epoch_size))
        wanted = -(-samples // run.batch.samples_per_step)
    if wanted is not None and last != wanted and not order.origin.step:
        setting = f"steps={run.steps}" if run.steps is not None else f"epochs={run.epochs or 1}"
        return failed(
            f"the run has {last} steps where {setting} makes {wanted}",
            measured=(last, "steps"),
            evidence=[f"{order.epoch_size} samples an epoch, {run.batch.samples_per_step} a step"],
            remedy="set steps to the number that is wanted, and please report this",
        )

    def sample_ids(trees: list[Tree]) -> list[str]:
        return [sample.id for tree in trees for sample in tree.samples]

    # the first steps, one in the middle and the last: again, and after a resume
    first = order.origin.step + 1
    for step in sorted({first, first + 1, (first + last) // 2, last} & {*range(first, last + 1)}):
        trees = source.prepare(step)
        ids = sample_ids(trees)
        size = sum(sample.num_tokens for tree in trees for sample in tree.samples)
        if most is not None and size > most and len(trees) > 1:
            return failed(
                f"step {step} has {size} tokens where batch.tokens_per_step={most}",
                measured=(size, "tokens"),
                evidence=ids[:4],
                remedy="set batch.samples_per_step in its place, and please report this",
            )
        again = sample_ids(replace(source, order=replace(order)).prepare(step))
        continued = replace(order).continue_from(source.cursor(step - 1), source.epochs)
        resumed = sample_ids(replace(source, order=continued).prepare(step))
        if ids == again == resumed:
            continue
        says = f"after a resume step {step} has other samples"
        evidence = [f"uninterrupted {ids[:4]}", f"resumed {resumed[:4]}"]
        if ids != again:
            says = f"step {step} has other samples when it is prepared again"
            evidence = [f"first {ids[:4]}", f"then {again[:4]}"]
        return failed(
            says,
            measured=(step, "is the step"),
            evidence=evidence,
            remedy="the run could not be gone on with as it began; train without shuffle, and please report this",
        )
    # how large steps are, and how often a sample is in one
    size, full = len(order.step(last, source.epochs)), order.samples_per_step
    times = round(source.cursor(last).samples / order.epoch_size, 2)
    what = "rows" if run.compares_answers else "samples"
    says = f"{counted(last, 'steps')} of {counted(full, what)}, the same when run again"
    if most is not None:
        says = f"{counted(last, 'steps')} of at most {counted(most, 'tokens')}, the same when run again"
        return passed(says, times, "times round", [f"the last step has {counted(size, what)}"])
    notes = [f"the last step has {size} of {full} samples"] if size != full else []
    if order.epoch_size < full:
        most = -(-full // order.epoch_size)
        return warned(
            f"a step has {full} {what} and an epoch {order.epoch_size}, so one {what[:-1]} is up to {most} times in a "
            "step",
            measured=(times, "times round"),
            remedy=f"set batch.samples_per_step={order.epoch_size} or less, or add data",
            notes=[says, *notes],
        )
    return passed(says, times, "times round", notes)


# -- output


@check("run.output", after=["model.trains"])
def the_output_fits_on_its_disk(session: Session) -> Finding:
    """Can the run be written to its out, and is there room for checkpoints and model?

    What the run would be refused for at its beginning, and what it would fail of later. Predicted are the checkpoints
    that exist at a time, as ``checkpoint`` counts them, and the model (with save.merged=false only the adapter): once,
    or twice with the best one. Logs are small and left out. Some space has to stay free.
    """
    run = session.run
    skip_if(run.out is None, "out is not set")
    try:
        out = user_path(run.out or "", "out")
        require_usable(out, resume=run.resume, overwrite=run.overwrite)
    except OutputError as error:
        says, remedy = split_error(error)
        return failed(says, remedy=remedy)
    # free is also what the run will replace
    replaced = [out / name for name in WRITTEN] if run.overwrite else complete(out / CHECKPOINTS)
    files = [file for path in replaced for file in (path.rglob("*") if path.is_dir() else [path])]
    free = free_space(out)
    free += sum(file.stat().st_size for file in files if file.is_file())
    # what it will write
    checkpoints, config = 0, run.checkpoint
    if config.every or config.keep_best:
        size = sharded.num_bytes(sharded.training_state(session.scorer, session.trainer.optimizer))
        size_of_all = int(session.ranks.sum([size])[0])
        checkpoints = config.max_count(session.trainer.num_steps) * size_of_all
    sizes = {"checkpoints": checkpoints, "model": saved_model_bytes(session), "kept free": SPARE}
    needed = sum(sizes.values())
    evidence = [f"{name}: {_in_gb(size)}" for name, size in sizes.items()]
    if free < needed:
        return failed(
            f"{_in_gb(needed)} are needed at {out}, and {_in_gb(free)} are free",
            measured=(free / 1e9, "GB free"),
            evidence=evidence,
            remedy=f"free some, name an out on another disk, or set checkpoint.keep=1 (it is {config.keep}) or "
            f"checkpoint.every=0 (it is {config.every})",
        )
    return passed(f"there is room: {_in_gb(free)} are free", needed / 1e9, "GB needed", evidence)


def saved_model_bytes(session: Session) -> int:
    """Bytes of the models that exist at a time, including the one being written."""
    has_adapters = is_adapted(session.scorer.model)
    saved = [p for p in session.scorer.parameters() if not (has_adapters and p.requires_grad)]
    model = session.built.models.saved_dtype.itemsize * sum(p.numel() for p in saved)
    adapter = 4 * sum(p.numel() for p in session.trainer.trained) if has_adapters else 0
    count = 1 if session.run.eval.best is None else 2
    return model * count + adapter if session.run.save.merged else adapter * count


def _in_gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


@check(
    "run.saved",
    part="full",
    after=[
        "model.weights",
        "stop.saved",
        "stop.generation",
        "attention.shared",
        "loss.dtype",
        "loss.tied",
        "loss.adapter_start",
    ],
)
def the_saved_model_is_the_one_in_memory(session: Session) -> Finding:
    """Is the model that is saved and loaded again the one in memory, adapters merged?

    It is saved as it would be at the end, into a temporary directory, and compared as at the end of each run: every
    weight bit for bit, logprobs merged and reloaded. The description of how pictures are processed is read again too.
    Adapters begin as nothing at all, so that a merge that loses them would not show: they are moved meanwhile, then put
    back.
    """
    number = sum(parameter.numel() for parameter in session.scorer.parameters())
    skip_if(number > 2e9, f"{number:,} parameters take long to write; the run asks at its end")
    report = "the model would not be the one that was trained; please report it"
    has_adapters = is_adapted(session.scorer.model)
    moved = weights_moved(session, 0.2) if has_adapters else nullcontext()
    with TemporaryFolder("check") as place, moved:
        try:
            comparisons, other_pictures = _save_and_compare(session, place / "model")
        except OutputError as error:
            raise Skip(str(error).partition(";")[0]) from error
        except TautError as error:
            return failed(f"what was saved cannot be loaded: {error}", remedy=report)
    # first what no logprob would show
    if other_pictures:
        return failed(
            "what describes pictures is not saved as it was",
            evidence=[other_pictures],
            remedy="a server would show the model other pictures; please report it",
        )
    wrong = [comparison for comparison in comparisons if not comparison.is_sound]
    if wrong:
        name, value = wrong[0].name, wrong[0].value
        return failed(
            f"{name}: a difference of {value:.3g}, at most {wrong[0].tolerance:g} is rounding",
            measured=(value, "nats" if name != "weights" else ""),
            evidence=[f"{it.name}: {it.value:.3g}: {it.detail}" for it in wrong],
            remedy=report,
        )
    first, last = comparisons[0], comparisons[-1]
    what = "trained, merged and reloaded agree" if has_adapters else "the same"
    return passed(f"{what} ({last.name})", last.value, "nats", [f"{first.detail}: the same bits"])


def _save_and_compare(session: Session, directory: Path) -> tuple[list[round_trip.Comparison], str]:
    """The comparison; and the difference, for users of the model, in how pictures are processed, or "" if there is
    none.
    """
    run, inputs, model = session.run, session.inputs, session.scorer.model
    data = inputs.train if inputs.eval is None else inputs.eval
    samples = round_trip.samples_to_compare(data, [*inputs.new_ids, *inputs.stops.ids])
    logps, dtype = round_trip.score(session.scorer, samples), session.built.models.saved_dtype
    with distributed.whole_tensors(model, session.ranks) as whole:
        assert whole is not None, "the full part is asked on one rank"
        before = round_trip.Trained(model, whole, samples, logps, dtype)
        with saving(
            model,
            inputs.tokenizer,
            directory,
            stop_ids=inputs.stops.ids,
            template=inputs.renderer.template.template,
            dtype=dtype,
            whole=whole,
        ) as written:
            path, trust = str(written), run.trust_remote_code
            room = round_trip.room_for(model, session.ranks.device)
            reloaded = round_trip.load_anew(path, room, trust)
            comparisons = round_trip.compare_saved(before, reloaded)
            # how pictures are processed, read again as a server does
            store = inputs.renderer.image_store
            if store is None:
                return comparisons, ""
            used, files = store.processor, (load_config(path, trust), load_tokenizer(path, trust))
            saved = open_processor(path, *files, trust, store.images.min_pixels)
    if saved is None or saved.identity() != used.identity():
        says = "preprocessor_config.json and processor_config.json make other tensors of a picture"
        return comparisons, says
    words, saved_words = ((p.placeholder, p.image_id, p.reserved) for p in (used, saved))
    says = (
        f"pictures are written {saved_words}, in training {words}" if words != saved_words else ""
    )
    return comparisons, says
