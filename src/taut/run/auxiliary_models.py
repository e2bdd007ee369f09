"""The models beside the one that trains, and why these: reference, teacher, critic.

Each has the attention and dtype of the policy, for the same micro-batches, and its tokenizer. Those that checkpoints
have to hold are parts of the scorer.

May import run and what is below it. build imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from taut.attention.select import Chosen
from taut.errors import ModelError
from taut.methods.distill import Setting, load_teacher, require_context
from taut.methods.reference import Other, Start
from taut.models import architecture
from taut.models.load import (
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    require_language_model,
)
from taut.models.precision import ChosenDtype
from taut.models.scorer import Scorer
from taut.models.self_test import one_sample_reasons
from taut.rl.critic import Setting as CriticSetting
from taut.rl.critic import build_critic
from taut.run.config import Decision, Inputs, Run
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.train.optim import Pace, Rate, highest
from taut.train.trainer import Role
from taut.types import Wants
from taut.vision.image_store import require_alike


class Loaded(NamedTuple):
    """A model as it is on disk, with the attention and the dtype that will be in force."""

    model: PreTrainedModel
    dtype: ChosenDtype
    attention: Chosen
    one_sample: str | None
    """Why this model has to run one sample at a time; None: it packs."""
    decisions: list[Decision]


def build_roles(
    run: Run, inputs: Inputs, loaded: Loaded, scorer: Scorer, ranks: Ranks
) -> tuple[list[Role], list[Decision]]:
    """The models beside the one that trains, and why these."""
    config = run.objective.reference
    if config is None:
        return [], []
    wants = Wants(temperature=run.objective.loss.wants.temperature)
    if config.model is not None:
        require_same_tokenizer(run, inputs, config.model, "reference.model")
        other = Scorer(load_beside(run, config.model, inputs, loaded, ranks))
        distributed.shard(other, architecture.layers(other.model), ranks)
        return [Other(other, wants)], [
            Decision("reference", config.model, "named by reference.model")
        ]
    trained = [p for p in scorer.model.parameters() if p.requires_grad]
    start = Start(scorer, trained, config, wants)
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
    if config.teacher is not None:
        require_same_pictures(run, inputs, config.teacher, "distill.teacher")
    setting = Setting(
        tokenizer=inputs.tokenizer,
        num_rows=architecture.head(scorer.model).weight.shape[0],
        longest=inputs.longest,
        dtype=loaded.dtype.dtype,
        device=ranks.device,
        attention=run.attention,
        trust_remote_code=run.trust_remote_code,
    )
    scorer.teacher, reasons = load_teacher(config, setting)
    return [Decision(*reason) for reason in reasons]


def give_critic(
    run: Run, inputs: Inputs, loaded: Loaded, scorer: Scorer, ranks: Ranks
) -> list[Decision]:
    """Give the scorer its critic, where the method has one, and say why this."""
    online = run.objective.online
    config = None if online is None else online.critic
    if config is None:
        return []
    new_ids = inputs.new_ids
    if config.model is not None:
        theirs = same_vocabulary(run, inputs, config.model, "critic.model", new_ids)
        new_ids = [index for index in new_ids if inputs.token(index) not in theirs]
        context = context_length(load_config(config.model, run.trust_remote_code))
        require_context(f"critic.model={config.model}", context, inputs.longest)
    setting = CriticSetting(
        policy=scorer.model,
        path=run.model,
        dtype=loaded.dtype.dtype,
        device=ranks.device,
        attention=loaded.attention.implementation,
        longest=inputs.longest,
        new_ids=new_ids,
        one_sample=loaded.one_sample,
        recomputes=run.activation_checkpointing,
        seed=run.seed,
        trust_remote_code=run.trust_remote_code,
    )
    critic, reasons = build_critic(config, setting)
    scorer.critic = critic
    return [Decision(*reason) for reason in reasons]


def shards_of(scorer: Scorer) -> list[nn.Module]:
    """What is sharded by itself: the policy's layers, and a critic's. A vision tower goes with the root: how often its
    blocks run depends on a rank's pictures, and each run of a shard is a collective.
    """
    beside = [] if scorer.critic is None else scorer.critic.shards
    return [*beside, *architecture.layers(scorer.model)]


def pace_of(run: Run) -> Pace | None:
    """How fast the critic learns, where there is one."""
    online = run.objective.online
    if online is None or online.critic is None:
        return None
    return online.critic.pace(run.optim, highest(run.optim_in_force))


def rates_of(run: Run, scorer: Scorer) -> dict[str, Rate]:
    """The learning rates that parameters of the policy have of their own, by name in the scorer."""
    rates = run.optim.rates
    named = architecture.named_once(scorer.model, rates, "optim.rates")
    return {f"model.{name}": Rate(key, rates[key]) for name, key in named.items()}


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
    """Raise ModelError where another language model's ids mean other tokens, or where there is none."""
    try:
        config = load_config(path, run.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    require_language_model(path, config, key)
    same_vocabulary(run, inputs, path, key)


def require_same_pictures(run: Run, inputs: Inputs, path: str, key: str) -> None:
    """Raise ModelError where pictures of the data would not be made ready for another model in the same way."""
    album, trust = inputs.renderer.album, run.trust_remote_code
    data = [one for one in (inputs.train, inputs.eval) if one is not None]
    if album is None or not any(one.report.num_pictures for one in data):
        return
    try:
        config = load_config(path, trust)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    require_alike(path, config, inputs.tokenizer, album, key, trust)


def same_vocabulary(
    run: Run, inputs: Inputs, path: str, key: str, added: Sequence[int] = ()
) -> dict[str, int]:
    """Another model's vocabulary. Raises ModelError where its ids mean other tokens, or it takes other pictures.
    ``added``: those it may lack.
    """
    require_same_pictures(run, inputs, path, key)
    try:
        theirs: dict[str, int] = load_tokenizer(path, run.trust_remote_code).get_vocab()
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    mine = inputs.tokenizer.get_vocab()
    lacks = {index for index in added if inputs.token(index) not in theirs}
    differing = next((t for t, i in mine.items() if theirs.get(t) != i and i not in lacks), None)
    if differing is not None:
        raise ModelError(
            f"{key}={path}: its tokenizer has {theirs.get(differing)} for {differing!r} and that of model={run.model} "
            f"has {mine[differing]}; expected the same tokenizer; name a model of the same family"
        )
    return theirs
