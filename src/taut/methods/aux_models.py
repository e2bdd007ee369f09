"""The auxiliary models of a method: a reference, a teacher, a critic. A method names them (``RunConfig.models``); here
they are loaded and described.

Each has the attention and dtype of the policy, for the same micro-batches, and its tokenizer. Those that checkpoints
have to hold are parts of the scorer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedConfig

from taut.config import Decision
from taut.errors import ModelError
from taut.methods.inputs import Inputs, Loaded, Models
from taut.methods.reference import Other, Recorded, Start
from taut.methods.settings import DistillConfig, ReferenceConfig, RolloutTeachersConfig
from taut.methods.teacher import load_teacher, require_context
from taut.models import architecture
from taut.models.heads import Critic
from taut.models.load import (
    context_length,
    load_config,
    load_model,
    require_language_model,
)
from taut.models.scorer import Scorer, Teacher
from taut.models.self_test import one_sample_reasons
from taut.models.tokens import require_same_tokenizer
from taut.rl import critic as critics
from taut.rl.settings import CriticConfig
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.train.optim import highest
from taut.train.settings import Pace
from taut.train.trainer import Role
from taut.types import TEACHER_LOGP, Wants
from taut.vision.image_store import require_same_processor

if TYPE_CHECKING:
    from taut.methods.method import RunConfig


@dataclass(frozen=True)
class AuxModels:
    """The auxiliary models of a method; None for a model that it does not have."""

    reference: ReferenceConfig | None = None
    """The model that the policy is compared with."""
    teacher: DistillConfig | None = None
    """The model that the policy learns from."""
    critic: CriticConfig | None = None
    """The model that predicts the reward of the remaining tokens."""
    completions: RolloutTeachersConfig | None = None
    """The models that score the policy's completions before it learns from them."""

    # -- before anything is loaded

    @property
    def directories(self) -> Iterator[tuple[str, str, str]]:
        """(part of the fingerprint, configuration key, path) of each model named by the configuration."""
        if self.critic is not None and self.critic.model is not None:
            yield "critic", "critic.model", self.critic.model
        if self.reference is not None and self.reference.model is not None:
            yield "reference", "reference.model", self.reference.model
        if self.teacher is not None and self.teacher.teacher is not None:
            yield "teacher", "distill.teacher", self.teacher.teacher
        if self.completions is not None:
            for name, key, path in self.completions.directories:
                yield f"teacher {name}".strip(), key, path

    @property
    def paths(self) -> list[str]:
        """Every directory and file of these models."""
        files = [self.reference_file]
        if self.teacher is not None:
            files += [self.teacher.top_logprobs, self.teacher.eval_top_logprobs]
        return [*(path for _, _, path in self.directories), *(path for path in files if path)]

    @property
    def reference_file(self) -> str | None:
        """The file of the reference's logprobs, if there is one: no reference is then held while training."""
        return None if self.reference is None else self.reference.file

    @property
    def has_live_reference(self) -> bool:
        """Whether a reference runs with each step."""
        return self.reference is not None and self.reference.file is None

    @property
    def unlike_the_start(self) -> str | None:
        """Return why the policy is not its own reference before the first update, or None if it is."""
        if self.reference is None:
            return "the loss has no reference"
        return "reference.model names another model" if self.reference.model is not None else None

    # -- loading

    def load_teacher(
        self, run: RunConfig, inputs: Inputs, loaded: Loaded, policy: nn.Module, ranks: Ranks
    ) -> tuple[Teacher | None, list[Decision]]:
        """The teacher of a policy with its adapters; None if the run has no teacher."""
        config = self.teacher
        if config is None:
            return None, []
        if config.teacher is not None:
            require_same_pictures(run, inputs, config.teacher, "distill.teacher")
        return load_teacher(
            config,
            tokenizer=inputs.tokenizer,
            num_rows=architecture.head(policy).weight.shape[0],
            longest=inputs.longest,
            dtype=loaded.dtype.dtype,
            ranks=ranks,
            attention=run.attention,
            trust_remote_code=run.trust_remote_code,
        )

    def load_completion_teachers(
        self, run: RunConfig, inputs: Inputs, loaded: Loaded, ranks: Ranks
    ) -> tuple[dict[str, Scorer], list[Decision]]:
        """The models in this process that score completions, frozen and sharded, by name."""
        models, decisions = {}, []
        for name, key, path in () if self.completions is None else self.completions.directories:
            models[name] = scorer = _load_frozen(run, path, inputs, loaded, ranks, key)
            scorer.eval().requires_grad_(requires_grad=False)
            decisions.append(Decision(key, path, "frozen; scores completions before training"))
        return models, decisions

    def build_self_teacher(self, scorer: Scorer) -> Start | None:
        """Copy the policy as its own teacher, once the scorer is sharded; None if the run has no such teacher."""
        config = self.completions
        if config is None or not config.has_copy:
            return None
        trained = [p for p in scorer.model.parameters() if p.requires_grad]
        moves = ReferenceConfig(update_every=config.update_every, update_mix=config.update_mix)
        start = SelfTeacher(scorer, trained, moves, Wants())
        if config.update_every:
            scorer.self_teacher = start  # so that a checkpoint holds it
        return start

    def load_critic(
        self, run: RunConfig, inputs: Inputs, loaded: Loaded, policy: nn.Module, ranks: Ranks
    ) -> tuple[Critic | None, list[Decision]]:
        """The critic of a policy with its adapters, not yet sharded; None if the run has no critic."""
        config = self.critic
        if config is None:
            return None, []
        new_ids = inputs.new_ids
        if config.model is not None:
            theirs = require_same_inputs(run, inputs, config.model, "critic.model", new_ids)
            new_ids = [index for index in new_ids if inputs.token(index) not in theirs]
            context = context_length(load_config(config.model, run.trust_remote_code))
            require_context(f"critic.model={config.model}", context, inputs.longest)
        return critics.build_critic(
            config,
            policy,
            run.model,
            dtype=loaded.dtype.dtype,
            device=ranks.weights_device,
            attention=loaded.attention.implementation,
            longest=inputs.longest,
            new_ids=new_ids,
            one_sample=loaded.one_sample,
            checkpointing=run.activation_checkpointing,
            seed=run.seed,
            trust_remote_code=run.trust_remote_code,
            shard=distributed.layer_sharding(ranks, loaded.dtype.dtype),
        )

    def critic_pace(self, run: RunConfig) -> Pace | None:
        """The learning rate of the critic relative to the policy's, if there is a critic."""
        if self.critic is None:
            return None
        return self.critic.pace(run.optim, highest(run.resolved_optim))

    def build_roles(
        self, run: RunConfig, inputs: Inputs, loaded: Loaded, scorer: Scorer, ranks: Ranks
    ) -> tuple[list[Role], list[Decision]]:
        """Make the reference, once the scorer is sharded, and give the reason for this one. With ``reference.file`` it
        computes its logprobs until they are read from the file.
        """
        config = self.reference
        if config is None:
            return [], []
        wants = Wants(temperature=run.loss().wants.temperature)
        role: Role
        if config.model is not None:
            model = _load_frozen(run, config.model, inputs, loaded, ranks, "reference.model")
            role = Other(model, wants)
            value, reason = config.model, "named by reference.model"
        else:
            trained = [p for p in scorer.model.parameters() if p.requires_grad]
            role = start = Start(scorer, trained, config, wants)
            if config.update_every:
                scorer.reference = start  # so that a checkpoint holds it
                value = f"the policy, every {config.update_every} steps"
                reason = (
                    f"moves {config.update_mix:g} of the way (reference.update_every, update_mix)"
                )
            elif run.lora.rank and not run.lora.adapter:
                value = "the base model"
                reason = "the policy without what LoRA adds: its adapters' start"
            elif run.lora.is_on:
                value, reason = "lora.adapter as it is", "the policy at the start, adapter included"
            else:
                value, reason = "a frozen copy", "the policy at the start"
        return [role if config.file is None else Recorded(role)], [
            Decision("reference", value, reason)
        ]


class SelfTeacher(Start):
    """The initial policy as its teacher; the teachers of rollouts decide which scores they read (rl/teachers.py)."""

    gives = TEACHER_LOGP


def _load_frozen(
    run: RunConfig, path: str, inputs: Inputs, loaded: Loaded, ranks: Ranks, key: str
) -> Scorer:
    """Another model, sharded, with the attention and dtype of the policy, for the same micro-batches."""
    config = load_config_of(path, key, run.trust_remote_code)
    require_language_model(path, config, key)
    require_same_inputs(run, inputs, path, key)
    require_context(f"{key}={path}", context_length(config), inputs.longest)
    model = load_model(
        path,
        dtype=loaded.dtype.dtype,
        device=ranks.weights_device,
        attention=loaded.attention.implementation,
        trust_remote_code=run.trust_remote_code,
        shard=distributed.layer_sharding(ranks, loaded.dtype.dtype),
    )
    alone = "; ".join(one_sample_reasons(model, inputs.longest))
    if alone and not loaded.one_sample:
        raise ModelError(
            f"{key}={path} runs one sample at a time ({alone}), and model={run.model} does not; expected a model that "
            "packs as it does; name another"
        )
    scorer = Scorer(model)
    distributed.shard(scorer, ranks, loaded.dtype.dtype)
    return scorer


def load_config_of(path: str, key: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of another model. An error begins with the ``key`` that names the model."""
    try:
        return load_config(path, trust_remote_code)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error


def save_critic(
    critic: Critic, directory: Path, inputs: Inputs, models: Models, ranks: Ranks
) -> None:
    """Save a critic with its own weights as a reward model. All ranks call it; raises OutputError on all."""
    critics.save_critic(
        critic,
        directory,
        inputs.tokenizer,
        ranks,
        stop_ids=inputs.stops.ids,
        template=inputs.renderer.template.template,
        dtype=models.saved_dtype,
    )


def require_same_pictures(run: RunConfig, inputs: Inputs, path: str, key: str) -> None:
    """Raise ModelError if another model would get other tensors from the data's pictures."""
    image_store, trust = inputs.renderer.image_store, run.trust_remote_code
    data = [split for split in (inputs.train, inputs.eval) if split is not None]
    if image_store is None or not any(split.report.num_pictures for split in data):
        return
    config = load_config_of(path, key, trust)
    require_same_processor(path, config, inputs.tokenizer, image_store, key, trust)


def require_same_inputs(
    run: RunConfig, inputs: Inputs, path: str, key: str, may_lack: Sequence[int] = ()
) -> dict[str, int]:
    """Return the vocabulary of another model. Raises ModelError if that model would get other ids or pictures from the
    data. ``may_lack``: added tokens that may be missing from it.
    """
    require_same_pictures(run, inputs, path, key)
    return require_same_tokenizer(
        path, inputs.tokenizer, key, run.trust_remote_code, may_lack=may_lack
    )
