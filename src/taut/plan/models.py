"""The models of a run without their weights: on the meta device, and what each of them holds.

    policy      the model that trains, with adapters, freezing and stored as the run stores it
    critic      of PPO; an own one trains too, a shared one is a head on the policy
    teacher     frozen, in the compute dtype; one that scores completions before training as it is stored, and the model
                as its own teacher as a copy of what trains
    reference   a copy of what trains, or another model, sharded
    rewards     reward models in this process, whole on every rank

Not included: rows that train by themselves, added tokens, buffers created while loading.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from taut.inference.factory import inference_dtype
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.experts import narrow_experts, recorder_of, widen_routers
from taut.models.heads import Critic, OwnCritic, SharedCritic
from taut.models.load import freeze, is_reward_config, load_config, load_skeleton, set_attention
from taut.models.lora.adapters import apply_lora
from taut.models.quantized.frozen_storage import store
from taut.models.quantized.quantized_layers import pretend, pretended
from taut.models.recompute import recompute_activations
from taut.models.reward_model import compare_tokens, reward_skeleton
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.models.teacher import ListedTeacher, ModelTeacher
from taut.rewards.judge import RewardModel
from taut.rewards.registry import models_of
from taut.rl.critic import NEW_HEAD
from taut.run.setup import storage_for
from taut.train.optim import state_sizes

FUSED = PREFIX + "estimate"
"""The attention of a GPU that this machine lacks, by its name in the library."""
POLICY, CRITIC, TEACHER, REFERENCE, REWARDS = "weights", "critic", "teacher", "reference", "rewards"
"""The parts of memory that models are."""
Configs = Mapping[str, PreTrainedConfig]
"""part -> configuration, of the models that a micro-batch runs."""


class Kernels(NamedTuple):
    """Settings of the computation that its memory depends on."""

    dtype: torch.dtype
    attention: str
    """Its name in the library's registry."""
    gpu_memory: int | None = None
    """Memory of the GPU in bytes, of which the head's chunks take a part; None on a CPU."""
    is_sharded: bool = False
    """Whether there are several ranks, which gather the weights of a layer while it runs."""

    @property
    def by_weights(self) -> bool:
        """Whether weights are gathered in bfloat16, and not cast by autocast."""
        return self.is_sharded and self.dtype == torch.bfloat16

    @property
    def device(self) -> torch.device:
        """The kind of device that is planned for."""
        return torch.device("cuda" if self.attention == FUSED else "cpu")


class Sizes(NamedTuple):
    """Bytes of parameters: in all, in the largest layer, and outside the layers."""

    all: int
    layer: int
    rest: int


NOTHING = Sizes(0, 0, 0)


class Whole(NamedTuple):
    """Bytes of what is whole on every rank: adapters in layers, routers and scalar heads."""

    weights: int = 0
    trained: int = 0
    optimizer: int = 0


@dataclass(frozen=True)
class ModelFootprint:
    """A model that a rank holds; bytes are of the whole model."""

    part: str
    weights: Sizes
    """Weights in their stored dtype."""
    trained: Sizes = NOTHING
    """Part of the weights that trains, as large as its gradients."""
    optimizer: int = 0
    whole: Whole = Whole()  # noqa: RUF009 (a NamedTuple)
    gathered: Sizes = NOTHING
    """Part of the weights that the ranks divide, in the dtype in which it is gathered."""
    gradients: Sizes = NOTHING
    """Part of the gathered weights that trains, in that dtype."""
    group: int = 0
    """Numbers in its largest layer, or in a module outside of them: what is in memory at a time while it is saved."""
    is_divided: bool = True
    """Whether the ranks divide it."""
    num_parameters: int = 0
    num_outside: int = 0
    """Numbers outside the layers."""
    num_trained: int = 0
    num_hidden: int = 0
    """Numbers of a token that its layers pass on, all together."""
    flops: architecture.Flops | None = None
    """Operations for a token and a pair, forward and backward; None where the model runs in no micro-batch."""
    is_apart: bool = False
    """Whether it runs while no activations are kept: it adds what it holds, and is not traced."""

    @property
    def counted(self) -> int:
        """The bytes of its weights where a micro-batch is traced."""
        if self.is_apart:  # it is added
            return self.weights.all
        return self.gathered.all + self.whole.weights


def computed_together(model: ModelFootprint, tensor: int) -> ModelFootprint:
    """The model where so many ranks compute a layer together: of what is divided, that outside the layers is in as many
    more copies, and of a layer each gathers its part.
    """
    if tensor == 1 or not model.is_divided or not model.weights.all:
        return model

    def copied(sizes: Sizes) -> Sizes:
        return sizes._replace(all=sizes.all + (tensor - 1) * sizes.rest)

    def parted(sizes: Sizes) -> Sizes:
        inside = sizes.all - sizes.rest
        return Sizes(sizes.rest + inside // tensor, sizes.layer // tensor, sizes.rest)

    # moments of the further copies
    more = (tensor - 1) * model.trained.rest / max(1, model.trained.all)
    moments = model.optimizer - model.whole.optimizer
    return replace(
        model,
        weights=copied(model.weights),
        trained=copied(model.trained),
        optimizer=model.optimizer + int(more * moments),
        gathered=parted(model.gathered),
        gradients=parted(model.gradients),
    )


def rank_of(size: int, whole: int, num_shards: int | None) -> int:
    """The bytes of a rank: ``whole``, which every rank has, and its shard of the others, if ``num_shards`` is given."""
    return whole + (0 if num_shards is None else (size - whole) // num_shards)


# -- the models that a micro-batch runs


def configs_of(run: RunConfig, config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configurations of the policy, and of a critic and a teacher that are models of their own."""
    models, configs = run.models(), {POLICY: config}
    critic, teacher = models.critic, models.teacher
    if critic is not None and critic.kind == "own":
        own = critic.model
        configs[CRITIC] = config if own is None else model_config(own, run.trust_remote_code)
    if teacher is not None and teacher.teacher is not None:
        configs[TEACHER] = model_config(teacher.teacher, run.trust_remote_code)
    return configs


def model_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a model whose weights are not read."""
    return load_config(path, trust_remote_code, needs_weights=False)


def planned_scorer(run: RunConfig, configs: Configs, kernels: Kernels) -> Scorer:
    """The root of a run's forwards on the meta device: policy, critic and teacher; weights as they are stored."""
    policy = planned_model(run, configs[POLICY], kernels)
    settings, taught = run.models().critic, run.models().teacher
    # a critic of its own, or a head on the policy
    critic: Critic | None = None
    if settings is not None and CRITIC in configs:
        config = copy.deepcopy(configs[CRITIC])
        head = None if is_reward_config(config) else NEW_HEAD
        path = settings.model or run.model
        base = _as_read(reward_skeleton(path, config, head, run.trust_remote_code), kernels)
        model = apply_lora(base, LoraConfig(rank=settings.lora_rank), run.seed)
        recompute_activations(model, run.activation_checkpointing)
        critic = OwnCritic(model.train())
    elif settings is not None:
        critic = SharedCritic.__new__(SharedCritic)
        nn.Module.__init__(critic)
        dtype = torch.promote_types(kernels.dtype, torch.float32)
        size = architecture.text_config(policy).hidden_size
        critic.score = nn.Linear(size, 1, device="meta", dtype=dtype)
        critic.detach = settings.detach
    # a teacher in the compute dtype, or its logprobs from a file
    teacher: ModelTeacher | ListedTeacher | None = None
    if TEACHER in configs:
        assert taught is not None and taught.teacher is not None
        config = copy.deepcopy(configs[TEACHER])
        frozen = load_skeleton(taught.teacher, config, run.trust_remote_code)
        set_attention(frozen, kernels.attention)
        teacher = ModelTeacher(nn.Module.to(frozen, kernels.dtype))
        rows = [architecture.head(m).weight.shape[0] for m in (policy, teacher.scorer.model)]
        teacher.num_rows = None if rows[0] == rows[1] else min(rows)
    elif taught is not None:
        teacher = ListedTeacher()
    return Scorer(policy, teacher, critic, recorder_of(policy, run.router))


def deep(scorer: Scorer) -> dict[str, nn.Module]:
    """Part -> the models with layers that a micro-batch runs."""
    found = {POLICY: scorer.model}
    if isinstance(scorer.critic, OwnCritic):
        found[CRITIC] = scorer.critic.model
    if isinstance(scorer.teacher, ModelTeacher):
        found[TEACHER] = scorer.teacher.scorer.model
    return found


def gather(run: RunConfig, scorer: Scorer, kernels: Kernels) -> None:
    """Give the weights of a planned scorer the dtype in which ranks gather them."""
    if not kernels.by_weights:
        return
    for part, model in deep(scorer).items():
        whole = _whole(model, has_adapters=_has_adapters(run, part))
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter not in whole:
                parameter.data = parameter.data.to(kernels.dtype)


def _has_adapters(run: RunConfig, part: str) -> bool:
    critic = run.models().critic
    return run.lora.is_on if part == POLICY else bool(critic and critic.lora_rank)


def _whole(model: nn.Module, *, has_adapters: bool) -> set[nn.Parameter]:
    """Parameters that every rank has whole of a divided model: those that train in the layers next to adapters, routers
    and scalar heads.
    """
    layers = architecture.layers(model).parameters()
    trained = {parameter for parameter in layers if has_adapters and parameter.requires_grad}
    wide = architecture.wide_parameters(architecture.unwrap(model))
    return {*architecture.scalar_parameters(model), *wide, *trained}


def skeleton(run: RunConfig, config: PreTrainedConfig) -> PreTrainedModel:
    """The initial model on the meta device, with the language model's head or a scalar one."""
    head, config = run.new_head(), copy.deepcopy(config)
    if head is None:
        return load_skeleton(run.model, config, run.trust_remote_code)
    return reward_skeleton(run.model, config, head, run.trust_remote_code)


def planned_model(run: RunConfig, config: PreTrainedConfig, kernels: Kernels) -> nn.Module:
    """The policy on the meta device, with adapters and freezing."""
    base = _as_read(skeleton(run, config), kernels)
    storage = storage_for(run, config, kernels.dtype, kernels.device)
    if storage is not None:
        how = storage.quantize or pretended(config)
        if how is not None:
            pretend(base, how, storage.whole, has_experts=storage.quantize is not None)
        store(base, storage, widens_rows=not kernels.by_weights)
    return adapted(run, base)


def adapted(run: RunConfig, base: PreTrainedModel) -> nn.Module:
    """The model with the run's adapters and freezing, in train mode."""
    model = apply_lora(base, run.lora, run.seed)
    if run.freeze:
        freeze(model, run.freeze)
    recompute_activations(model, run.activation_checkpointing)
    return model.train()


def _as_read(base: PreTrainedModel, kernels: Kernels) -> PreTrainedModel:
    """Give a skeleton the dtype and the attention of a model that is read to train."""
    base.double() if kernels.dtype == torch.float64 else base.float()  # type: ignore[no-untyped-call]
    if kernels.dtype == torch.bfloat16:
        widen_routers(base)
        narrow_experts(base)
        text: Any = base.config.get_text_config()
        if getattr(text, "_experts_implementation", None) == "eager":
            text._experts_implementation = "grouped_mm"  # eager: its shapes are the router's choice
    set_attention(base, kernels.attention)
    return base


# -- what they hold


def held(run: RunConfig, scorer: Scorer, kernels: Kernels) -> tuple[ModelFootprint, ...]:
    """Footprint of each model of a run, from a planned scorer whose weights have their stored dtypes; the policy
    first.
    """
    # policy, critic and teacher run in a micro-batch; the others are apart
    layers = architecture.layers(scorer.model)
    states = state_sizes(scorer, run.resolved_optim, layers)
    models = deep(scorer)
    found = [_held(run, POLICY, models[POLICY], states, kernels)]
    if CRITIC in models:
        found.append(_held(run, CRITIC, models[CRITIC], states, kernels))
    elif scorer.critic is not None:  # a head
        own = list(scorer.critic.parameters())
        size, count = sum(p.nbytes for p in own), sum(p.numel() for p in own)
        sizes, whole = Sizes(size, 0, size), Whole(size, size, sum(states[p] for p in own))
        found.append(
            ModelFootprint(CRITIC, sizes, sizes, whole.optimizer, whole, num_parameters=count)
        )
    if TEACHER in models:
        found.append(_held(run, TEACHER, models[TEACHER], {}, kernels))
    found += [replace(model, is_apart=True) for model in _apart(run, found[0], kernels)]
    return tuple(found)


def _held(
    run: RunConfig, part: str, model: nn.Module, states: Mapping[Tensor, int], kernels: Kernels
) -> ModelFootprint:
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = _whole(model, has_adapters=_has_adapters(run, part))
    divided = [p for p in model.parameters() if p not in whole]
    narrow = kernels.dtype if kernels.by_weights else None
    # the largest layer or table is in memory at a time while it is saved
    layers = [architecture.num_weights(layer) for layer in architecture.layers(model)]
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return ModelFootprint(
        part=part,
        weights=sizes_of(model, model.parameters()),
        trained=sizes_of(model, trained),
        optimizer=sum(states[p] for p in trained),
        whole=Whole(
            sum(p.nbytes for p in whole),
            sum(p.nbytes for p in whole if p.requires_grad),
            sum(states[p] for p in whole if p.requires_grad),
        ),
        gathered=sizes_of(model, divided, narrow),
        gradients=sizes_of(model, [p for p in divided if p.requires_grad], narrow),
        group=max([*layers, *(table.numel() for table in tables)]),
        num_parameters=architecture.num_weights(model),
        num_outside=architecture.num_weights(model) - sum(layers),
        num_trained=sum(p.numel() for p in trained),
        num_hidden=len(layers) * architecture.text_config(model).hidden_size,
        flops=architecture.flops(model),
    )


def _apart(run: RunConfig, policy: ModelFootprint, kernels: Kernels) -> Iterator[ModelFootprint]:
    """Footprints of models beside a micro-batch: a reference, teachers that score completions, and reward models."""
    reference, teachers = run.models().reference, run.models().completions
    if reference is not None and reference.file is None:  # else its logprobs are in a file
        yield _frozen(run, REFERENCE, reference.model, policy, kernels)
    if teachers is not None:
        if teachers.has_copy:
            yield _frozen(run, TEACHER, None, policy, kernels)
        for _, _, path in teachers.directories:
            yield _frozen(run, TEACHER, path, policy, kernels)
    yield from _judges(run, kernels)


def _frozen(
    run: RunConfig, part: str, path: str | None, policy: ModelFootprint, kernels: Kernels
) -> ModelFootprint:
    """Footprint of the model at ``path``; without a path, of a copy of the policy's tensors that train."""
    if path is None:
        copied = policy.trained._replace(layer=0, rest=0)
        return ModelFootprint(part, copied, whole=Whole(policy.whole.trained))
    other = frozen_model(run, path, kernels, model_config(path, run.trust_remote_code))
    return _held(run, part, other, {}, kernels)


def frozen_model(
    run: RunConfig, path: str, kernels: Kernels, config: PreTrainedConfig
) -> PreTrainedModel:
    """Another model for the policy's micro-batches, on the meta device."""
    model = _as_read(load_skeleton(path, config, run.trust_remote_code), kernels)
    return model.requires_grad_(requires_grad=False)


def _judges(run: RunConfig, kernels: Kernels) -> Iterator[ModelFootprint]:
    for judge in judges_of(run, kernels):
        config = model_config(judge.model, judge.trust_remote_code)
        model = judge_model(judge, kernels, config)
        yield replace(_held(run, REWARDS, model, {}, kernels), is_divided=False)


def judges_of(run: RunConfig, kernels: Kernels) -> list[RewardModel]:
    """The reward models of training that are on the planned device."""
    is_cuda = kernels.device.type == "cuda"
    judges = models_of(run.training_rewards).values()
    return [judge for judge in judges if not (is_cuda and judge.device == "cpu")]


def judge_dtype(judge: RewardModel, kernels: Kernels) -> torch.dtype:
    """The dtype of a reward model's weights and products."""
    if kernels.device.type == "cuda":
        return torch.float32 if judge.dtype == "float32" else torch.bfloat16
    return inference_dtype(judge.dtype, kernels.device, "").dtype


def judge_model(judge: RewardModel, kernels: Kernels, config: PreTrainedConfig) -> nn.Module:
    """A reward model on the meta device."""
    if judge.steps.tokens:
        model = load_skeleton(judge.model, config, judge.trust_remote_code)
        compare_tokens(model, 0, 1)
    else:
        model = reward_skeleton(judge.model, config, None, judge.trust_remote_code)
    set_attention(model, kernels.attention)
    nn.Module.to(model, judge_dtype(judge, kernels))
    return model.requires_grad_(requires_grad=False)


def sizes_of(
    model: nn.Module, parameters: Iterable[Tensor], dtype: torch.dtype | None = None
) -> Sizes:
    """The sizes of some of a model's parameters; ``dtype``: of those that are no codes, if not their own."""
    sizes = {
        id(p): p.numel() * dtype.itemsize if dtype and p.is_floating_point() else p.nbytes
        for p in parameters
    }
    layers = [
        sum(sizes.get(id(p), 0) for p in layer.parameters()) for layer in architecture.layers(model)
    ]
    total = sum(sizes.values())
    return Sizes(total, max(layers), total - sum(layers))


# -- fewer layers


def with_layers(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """The configuration with only the first ``depth`` layers."""
    shallow = copy.deepcopy(config)
    text: Any = shallow.get_text_config()
    before = text.num_hidden_layers
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return shallow


def period(model: nn.Module) -> int:
    """The period after which layers repeat; the number of layers where they do not."""
    kinds = architecture.layer_types(model)
    alike = [
        (kind, [(name, tuple(p.shape)) for name, p in layer.named_parameters()])
        for kind, layer in zip(kinds, architecture.layers(model), strict=True)
    ]
    count = len(alike)
    return next(n for n in range(1, count + 1) if alike[n:] == alike[: count - n])
