"""What was asked against what is found: on the modules, the parameters, the optimizer and the job as they were built.

Nothing is taken from a log or a configuration of the library's where the thing itself can be looked at. What was set
aside with a recorded decision is in force as decided, and is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from taut.checks.finding import Finding, failed, passed
from taut.checks.loss.step import trained as every_trained
from taut.checks.run.adapters import adapters
from taut.checks.run.setting import Setting, listed
from taut.checks.session import Session
from taut.models import architecture

SHOWN = 6
"""Settings shown of those that are not in force."""


def ask(session: Session) -> Finding:
    """Is everything the run asks for in force on what was built?"""
    settings = [setting for look in LOOKS for setting in look(session)]
    wrong = [setting for setting in settings if not setting.is_in_force]
    if wrong:
        return failed(
            f"{wrong[0].key} is not in force",
            number=len(wrong),
            unit=f"of {len(settings)} settings",
            evidence=[str(setting) for setting in wrong[:SHOWN]],
            remedy="the run would not be the one asked for; remove the setting, and please report this",
        )
    notes = [
        f"{name} is {value}: {reason}"
        for name, value, reason in session.built.decisions
        if name in SET_ASIDE
    ]
    return passed("found as asked", len(settings), "settings", notes)


IDLE = "frozen"
"""The decision to freeze what no feature of a picture depends on."""
SET_ASIDE = ("batch.share_prefixes", "packing", IDLE)
"""Decisions that set something aside."""


def precision(session: Session) -> Iterator[Setting]:
    """The dtype that a product of two parameters comes out in."""
    one = torch.ones(1, 1, dtype=session.loaded.dtype.parameters, device=session.ranks.device)
    with torch.no_grad(), session.job.compute():
        found = (one @ one).dtype
    asked = session.run.dtype or _name(session.dtype)
    yield Setting("dtype", asked, _name(found))


def attention(session: Session) -> Iterator[Setting]:
    """The name in the configuration of every module of the text model."""
    chosen = session.loaded.attention
    modules = architecture.language_model(session.scorer.model).modules()
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    names = [getattr(config, "_attn_implementation", None) for config in configs.values()]
    asked = chosen.name if session.run.attention == "auto" else session.run.attention
    yield Setting("attention", asked, listed(str(name).removeprefix("taut_") for name in names))


def recomputation(session: Session) -> Iterator[Setting]:
    """Activation checkpointing, layer by layer."""
    layers = architecture.layers(session.scorer.model)
    on = [layer for layer in layers if getattr(layer, "gradient_checkpointing", False)]
    asked = len(layers) if session.run.activation_checkpointing else 0
    yield Setting(
        "activation_checkpointing", f"in {asked} layers", f"in {len(on)} layers{_reentrant(on)}"
    )


def _reentrant(layers: list[nn.Module]) -> str:
    """Reentrant checkpointing loses the gradient of adapters behind inputs that need none."""
    calls = [getattr(layer, "_gradient_checkpointing_func", None) for layer in layers]
    found = [getattr(call, "keywords", {}).get("use_reentrant") for call in calls]
    return "" if all(one is False for one in found) else ", reentrant"


def trained(session: Session) -> Iterator[Setting]:
    """What is frozen is neither trained nor in the optimizer; what is not, is both."""
    in_optimizer = {id(parameter) for parameter in session.job.trained}
    named = dict(session.scorer.model.named_parameters())
    held = {name for name, p in named.items() if p.requires_grad or id(p) in in_optimizer}
    frozen: set[str] = set()
    for pattern in session.run.freeze:
        matches = architecture.matching(session.scorer.model, pattern, list(named), "freeze")
        frozen |= set(matches)
        moving = [name for name in matches if name in held]
        yield Setting(f"freeze {pattern}", "frozen", f"{moving[0]} trains" if moving else "frozen")
    if not session.run.lora.is_on:
        still = [name for name in named if name not in frozen and name not in held]
        decided = {name: value for name, value, _ in session.built.decisions}
        is_idle = decided.get(IDLE) == f"{len(still)} tensors"
        if is_idle and all(
            architecture.part_of(name) in ("vision_tower", "projector") for name in still
        ):
            still = []
        found = f"{still[0]} is frozen" if still else "trained"
        yield Setting("all that freeze does not name", "trained", found)
    wanted = len(every_trained(session))
    yield Setting("optimizer", f"{wanted} tensors, each once", _members(session))


def _members(session: Session) -> str:
    members = [id(parameter) for parameter in session.job.trained]
    each = "each once" if len(set(members)) == len(members) else "some twice"
    return f"{len(members)} tensors, {each}"


def optimizer(session: Session) -> Iterator[Setting]:
    """AdamW's own settings in each of its groups, and which tensors decay."""
    config, made = session.run.optim, session.job.optimizer
    groups = made.param_groups
    yield Setting("optim", "AdamW", type(made).__name__)
    yield Setting("optim.beta1", listed([config.beta1]), listed(g["betas"][0] for g in groups))
    yield Setting("optim.beta2", listed([config.beta2]), listed(g["betas"][1] for g in groups))
    yield Setting("optim.eps", listed([config.eps]), listed(g["eps"] for g in groups))
    decay_of = {id(p): float(g["weight_decay"]) for g in groups for p in g["params"]}
    asked, wrong = config.weight_decay, ""
    for name, parameter in session.scorer.named_parameters():
        wanted = asked if parameter.ndim > 1 and not _is_norm_or_bias(name) else 0.0
        found = decay_of.get(id(parameter), wanted)
        if found != wanted and not wrong:
            wrong = f"{found:g} on {name.removeprefix('model.')}"
    said = f"{asked:g} on matrices, 0 on norms, biases and vectors"
    yield Setting("optim.weight_decay", said, wrong or said)
    clip = session.job.clip_grad_norm
    yield Setting("optim.clip_grad_norm", str(config.clip_grad_norm), str(clip))


def _is_norm_or_bias(name: str) -> bool:
    parts = name.lower().split(".")
    return "bias" in parts[-1] or any("norm" in part for part in parts)


def layout(session: Session) -> Iterator[Setting]:
    """How samples are packed and shared, or the decision not to."""
    batch, job = session.run.batch, session.job
    decided = {decision.name for decision in session.built.decisions}
    may_share = batch.share_prefixes and "batch.share_prefixes" not in decided
    yield Setting("batch.share_prefixes", str(may_share), str(job.policy.share_prefixes))
    saved = (job.policy.min_saved_tokens, job.budget.min_saved_tokens)
    yield Setting("batch.min_saved_tokens", str(batch.min_saved_tokens), listed(saved))
    tokens = job.budget.tokens_per_microbatch
    yield Setting("batch.tokens_per_microbatch", str(batch.tokens_per_microbatch), str(tokens))
    packed = "one at a time" if "packing" in decided else "packed"
    yield Setting("samples", packed, "one at a time" if job.budget.one_sample else "packed")
    yield Setting("ranks", str(session.ranks.size), str(job.budget.num_ranks))


def noise(session: Session) -> Iterator[Setting]:
    """NEFTune's alpha; dropout is looked at with the adapters."""
    made = session.job.noise
    asked = session.run.noise.neftune_alpha
    found = made.alpha if made is not None and made.is_on else 0.0
    yield Setting("noise.neftune_alpha", listed([asked]), listed([found]))


LOOKS: tuple[Callable[[Session], Iterator[Setting]], ...] = (
    precision,
    attention,
    recomputation,
    trained,
    adapters,
    optimizer,
    layout,
    noise,
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
