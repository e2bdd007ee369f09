"""The run: whether the settings are applied to what was built, its steps, its output directory, the saved model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from taut.checks.loss import ProductCounter, dtype_name
from taut.checks.measure import first_step, trained
from taut.checks.registry import Finding, check, failed, passed, skipped, split_error, warned
from taut.checks.session import Session
from taut.config import home_path, user_path
from taut.data.packing import ALONE, pack
from taut.errors import OutputError, TautError
from taut.evals.reload import (
    Comparison,
    Trained,
    compare_saved,
    load_anew,
    room_for,
    samples_to_compare,
    score,
)
from taut.io.console import counted
from taut.io.files import free_space, read_json
from taut.io.temporary import TemporaryFolder
from taut.methods.method import Offline, Streamed
from taut.models import architecture
from taut.models.compiled_layers import compiled_layers, layers_to_compile
from taut.models.load import frozen_names, load_config, load_tokenizer
from taut.models.lora import is_adapted
from taut.models.noise import KeyedDropout
from taut.models.recompute import applied
from taut.models.save import saving
from taut.train import distributed, sharded
from taut.train.checkpoint import SPARE
from taut.train.optim import optimizer_type
from taut.train.run_dir import CHECKPOINTS, WRITTEN, complete, require_usable
from taut.types import Tree
from taut.vision.processors import open_processor

# -- settings


class Setting(NamedTuple):
    """A key, what was asked and what is found, in words: applied if both are the same."""

    key: str
    asked: str
    found: str

    def __str__(self) -> str:
        return f"{self.key}: asked {self.asked}, found {self.found}"


def _listed(values: Iterable[Any]) -> str:
    """Different values, in words: one, if all are equal."""
    words = {f"{value:.10g}" if isinstance(value, float) else str(value) for value in values}
    return " and ".join(sorted(words)) or "nothing"


FROZEN_DECISION = "frozen"
"""The decision to freeze what no feature of a picture depends on."""


@check("run.in_force", after=["loss.reached", "loss.dtype"])
def what_was_asked_is_in_force(session: Session) -> Finding:
    """Are all settings of the run applied to what was built?

    Modules, parameters, optimizer and trainer are looked at, and no log or configuration of the library's if the thing
    itself can be looked at. What was set aside with a recorded decision is applied as decided, and is noted.
    """
    settings = [*_computation(session), *_trained(session), *_adapters(session)]
    wrong = [setting for setting in settings if setting.found != setting.asked]
    if wrong:
        return failed(
            f"{wrong[0].key} is not applied",
            measured=(len(wrong), f"of {len(settings)} settings"),
            evidence=[str(setting) for setting in wrong[:6]],
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
    modules = architecture.language_model(model).modules()
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    names = [str(getattr(config, "_attn_implementation", None)) for config in configs.values()]
    requested = chosen.name if run.attention == "auto" else run.attention
    yield Setting("attention", requested, _listed(name.removeprefix("taut_") for name in names))
    yield _checkpointing(session)
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


def _checkpointing(session: Session) -> Setting:
    """What recomputes each layer; and that it kept something in a step, where it is to keep more than inputs, or
    elsewhere.
    """
    key, how = "activation_checkpointing", session.run.activation_checkpointing
    layers = architecture.layers(session.scorer.model)
    on = [function for function in map(applied, layers) if function is not None]
    if how in ("selective", "offload"):
        first_step(session)
        on = [function for function in on if function.num_kept]
    number = len(layers) if how else 0
    found = _listed(str(function.how).lower() for function in on) if on else "false"
    return Setting(key, f"{str(how).lower()} in {number} layers", f"{found} in {len(on)} layers")


def _trained(session: Session) -> Iterator[Setting]:
    """What is frozen is neither trained nor in the optimizer; what is not, is both. AdamW's own settings in each of its
    groups, and which tensors decay.
    """
    members = [id(parameter) for parameter in session.trainer.trained]
    named = dict(session.scorer.model.named_parameters())
    in_optimizer = set(members)
    held = {name for name, p in named.items() if p.requires_grad or id(p) in in_optimizer}
    frozen = frozen_names(session.scorer.model, session.run.freeze)
    if frozen:
        moving = [name for name in frozen if name in held]
        state = f"{moving[0]} trains" if moving else "frozen"
        yield Setting(f"freeze {' '.join(session.run.freeze)}", "frozen", state)
    if not session.run.lora.is_on:
        still = [name for name in named if name not in frozen and name not in held]
        decided = {name: value for name, value, _ in session.built.decisions}
        is_decided = decided.get(FROZEN_DECISION) == f"{len(still)} tensors"
        if is_decided and {architecture.part_of(name) for name in still} <= {
            "vision_tower",
            "projector",
        }:
            still = []
        state = f"{still[0]} is frozen" if still else "trained"
        yield Setting("all that freeze does not name", "trained", state)
    if session.ranks.is_sharded:
        every = (*session.trainer.trained, *session.scorer.parameters())
        places = _listed(p.device.type for p in every if hasattr(p, "full_tensor"))
        yield Setting("parallel.cpu_offload", session.ranks.weights_device.type, places)
        divided = _listed({distributed.num_together(p) for p in session.scorer.parameters()})
        yield Setting("parallel.tensor", _listed({1, session.run.parallel.tensor}), divided)
    each = "each once" if len(in_optimizer) == len(members) else "some twice"
    requested = f"{len(trained(session))} tensors, each once"
    yield Setting("optimizer", requested, f"{len(members)} tensors, {each}")
    config, optimizer = session.run.optim, session.trainer.optimizer
    groups = optimizer.param_groups
    yield Setting("optim", optimizer_type(config).__name__, type(optimizer).__name__)
    yield Setting("optim.beta1", _listed([config.beta1]), _listed(g["betas"][0] for g in groups))
    yield Setting("optim.beta2", _listed([config.beta2]), _listed(g["betas"][1] for g in groups))
    yield Setting("optim.eps", _listed([config.eps]), _listed(g["eps"] for g in groups))
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
"""Parts of names inside what peft wraps."""
ADDED = ("lora_", "modules_to_save", "trainable_tokens")
"""What the name of a parameter has that adapters added."""


def _adapters(session: Session) -> Iterator[Setting]:
    """Adapters as they were asked for and as they sit on the modules; if none were asked for, that there are none."""
    modules = dict(session.model.named_modules())
    adapted: dict[str, Any] = {n: m for n, m in modules.items() if hasattr(m, "lora_A")}
    if not session.run.lora.is_on:
        yield Setting("lora.rank", "no adapters", f"{len(adapted) or 'no'} adapters")
        return
    requested = _asked_of_adapters(session)
    wanted = adapter_targets(session, modules, adapted, requested["targets"])
    missing, more = sorted(wanted - set(adapted)), sorted(set(adapted) - wanted)
    state = f"{len(adapted)} modules"
    state += (f", not {missing[0]}" if missing else "") + (f", also {more[0]}" if more else "")
    yield Setting("lora.targets", f"{len(wanted)} modules", state)
    layers = list(adapted.values())
    name = layers[0].active_adapters[0] if layers else ""
    ranks = []
    for layer in layers:
        # peft stacks the matrices of all experts, and gives two fused matrices the rank of both
        num_matrices = getattr(layer, "num_experts", 1)
        if getattr(layer, "parameter_name", "") == "gate_up_proj":
            num_matrices *= 2
        ranks.append(float(layer.lora_A[name].weight.shape[0] / num_matrices))
    yield Setting("lora.rank", _listed([requested["rank"]]), _listed(ranks))
    scale = requested["alpha"] / (
        math.sqrt(requested["rank"]) if requested["rslora"] else requested["rank"]
    )
    scales = _listed(round(float(layer.scaling[name]), 6) for layer in layers)
    yield Setting("lora.alpha", f"a scale of {_listed([round(scale, 6)])}", f"a scale of {scales}")
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
    """What the run asks for, or the settings of the adapter that it continues."""
    config = session.run.lora
    if config.adapter is None:
        alpha = float(2 * config.rank if config.alpha is None else config.alpha)
        names = ("rank", "rslora", "dora", "dropout", "targets", "modules_to_save")
        return {"alpha": alpha, **{name: getattr(config, name) for name in names}}
    saved = read_json(home_path(config.adapter) / "adapter_config.json")
    return {
        "rank": saved["r"],
        "alpha": float(saved["lora_alpha"]),
        "rslora": saved.get("use_rslora", False),
        "dora": saved.get("use_dora", False),
        "dropout": float(saved.get("lora_dropout") or 0.0) if session.run.allows_noise else 0.0,
        "targets": saved["target_modules"],
        "modules_to_save": saved.get("modules_to_save") or [],
    }


def adapter_targets(
    session: Session, modules: Mapping[str, nn.Module], adapted: Mapping[str, Any], asked: Any
) -> set[str]:
    """The names of the modules that were to be adapted."""
    if isinstance(asked, str) and asked != "all-linear":  # peft's regular expression
        return set(adapted)
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
    for target in targets:
        if has_patterns and (
            target in architecture.PARTS or any(sign in target for sign in "*?[/")
        ):
            model = session.scorer.model
            wanted |= set(architecture.match_pattern(model, target, sorted(every), "lora.targets"))
        else:
            wanted |= {name for name in every if f".{name}".endswith(f".{target}")}
    return wanted


# -- steps


@check("run.steps", after=["model.trains"])
def each_step_has_its_samples(session: Session) -> Finding:
    """Does each step have the samples it should, in this run and in one that goes on from it?

    The order is a pure function of the seed and the step: a second object of it gives the same samples, whatever the
    first was asked before, and so does the one that a resumed run makes of a cursor. That an epoch has each sample as
    often as it should is ``data.packing``.
    """
    source, run, last = session.trainer.source, session.run, session.trainer.num_steps
    if isinstance(source, Streamed):
        return skipped(
            "most rows are yet to come; a resume compares them with the checkpoint's digest"
        )
    if not isinstance(source, Offline):
        return skipped("the method prepares its steps itself")
    order = source.order
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
        continued = replace(order).going_on_from(source.cursor(step - 1), source.epochs)
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
    if run.out is None:
        return skipped("out is not set")
    try:
        out = user_path(run.out, "out")
        require_usable(out, resume=run.resume, overwrite=run.overwrite)
    except OutputError as error:
        says, remedy = split_error(error)
        return failed(says, remedy=remedy)
    replaced = [out / name for name in WRITTEN] if run.overwrite else complete(out / CHECKPOINTS)
    files = [file for path in replaced for file in (path.rglob("*") if path.is_dir() else [path])]
    free = free_space(out)
    free += sum(file.stat().st_size for file in files if file.is_file())
    checkpoints, config = 0, run.checkpoint
    if config.every or config.keep_best:
        size = sharded.num_bytes(sharded.training_state(session.scorer, session.trainer.optimizer))
        checkpoints = config.max_count(session.trainer.num_steps) * int(
            session.ranks.sum([size])[0]
        )
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
    """Bytes of the models that exist at a time, the one being written included."""
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
    if number > 2_000_000_000:
        return skipped(f"{number:,} parameters would take long to write; the run asks at its end")
    report = "the model would not be the one that was trained; please report it"
    with TemporaryFolder("check") as place, _moved_adapters(session):
        try:
            comparisons, other_pictures = _save_and_compare(session, place / "model")
        except OutputError as error:
            return skipped(str(error).partition(";")[0])
        except TautError as error:
            return failed(f"what was saved cannot be loaded: {error}", remedy=report)
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
            evidence=[
                f"{comparison.name}: {comparison.value:.3g}: {comparison.detail}"
                for comparison in wrong
            ],
            remedy=report,
        )
    first, last = comparisons[0], comparisons[-1]
    what = "trained, merged and reloaded agree" if is_adapted(session.scorer.model) else "the same"
    return passed(f"{what} ({last.name})", last.value, "nats", [f"{first.detail}: the same bits"])


def _save_and_compare(session: Session, directory: Path) -> tuple[list[Comparison], str]:
    """What is compared; and what differs in how pictures are processed for those who load the model, or "" if nothing
    does or the model takes none.
    """
    inputs, scorer = session.inputs, session.scorer
    data = inputs.train if inputs.eval is None else inputs.eval
    samples = samples_to_compare(data, [*inputs.new_ids, *inputs.stops.ids])
    logps = score(scorer, samples)
    with distributed.whole_tensors(scorer.model, session.ranks) as whole:
        assert whole is not None, "the full part is asked on one rank"
        before = Trained(scorer.model, whole, samples, logps, session.built.models.saved_dtype)
        return _compare(session, before, directory)


def _compare(session: Session, before: Trained, directory: Path) -> tuple[list[Comparison], str]:
    run, inputs, model = session.run, session.inputs, before.model
    with saving(
        model,
        inputs.tokenizer,
        directory,
        stop_ids=inputs.stops.ids,
        template=inputs.renderer.template.template,
        dtype=before.dtype,
        whole=before.whole,
    ) as written:
        room = room_for(model, session.ranks.device)
        reloaded = load_anew(str(written), room, run.trust_remote_code)
        comparisons, path, trust = (
            compare_saved(before, reloaded),
            str(written),
            run.trust_remote_code,
        )
        if inputs.renderer.image_store is None:
            return comparisons, ""
        store = inputs.renderer.image_store
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


@contextmanager
def _moved_adapters(session: Session) -> Iterator[None]:
    """Inside, adapters have noise added; at the end all is as it was. A model without adapters is left alone."""
    moved = session.trainer.trained if is_adapted(session.scorer.model) else []
    copies = [parameter.detach().clone() for parameter in moved]
    generator = torch.Generator(session.ranks.device).manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in moved:
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.02, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter, copy in zip(moved, copies, strict=True):
                parameter.copy_(copy)
