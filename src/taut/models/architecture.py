"""The parts of a Hugging Face causal language model: backbone, layers, embedding, head, vision tower; and its FLOPs.

Parts are found by structure and configuration, at every call (wrapping by peft or FSDP moves them). The head is also
verified (``heads.check_head``), so an architecture whose head does something not listed here is refused, not guessed.
A reward model has a scalar head (``heads.py``) and no output head.

A vision-language model has three parts, found by the words of a parameter's name, which wrapping does not change:

    vision_tower     patches and blocks that see the picture
    projector        maps the tower's output to features of the language model: Qwen's mergers (deepstack's too), a
                     connector, a multi_modal_projector, LLaVA's image_newline
    language_model   the rest: decoder, embedding, output head; not a scalar head, which is new

A pattern names parameters or modules: one of these words, a glob over whole names, or a regular expression between
slashes.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from taut.attention.decode import Decoding
from taut.attention.extension import Extension
from taut.attention.layout import Layout
from taut.errors import ModelError
from taut.models import recurrent_layers
from taut.models.cpu import cpu_matmul
from taut.models.stateful_types import STATEFUL_TYPES
from taut.types import Media, Packed
from taut.vision import tower

_STATEFUL_CLASS = re.compile(
    r"Mamba|SSM|Ssm|DeltaNet|DeltaAttention|ShortConv|Recurrent|RgLru|R[wW][kK][vV]|[Ll]ightningAttention|LinearAttention"
    r"|xLSTM|[ms]LSTM|RetNet|Hyena"
)
MOST_ROWS = 0.9
"""Share of tokens that are read from which the last layer computes all of them."""
_ROUTERS = ("router", "gate")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MULTIPLIES = ("logit_scale", "lm_head_multiplier")
_DIVIDES = ("logits_scaling",)
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


# -- backbone, layers and tables -------------------------------------------------------------------


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The library's model inside a peft wrapper, or the model itself."""
    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"{type(inner).__name__} is not a transformers model; expected a PreTrainedModel"
        )
    return inner


def text_config(model: nn.Module) -> PreTrainedConfig:
    """The configuration of the language model (of a vision-language model too)."""
    return unwrap(model).config.get_text_config()


def decoder(model: nn.Module) -> nn.Module:
    """The backbone: its forward maps ``input_ids`` to ``last_hidden_state``, after the final norm. A vision-language
    model's includes tower and projector.
    """
    inner = unwrap(model)
    for name in (inner.base_model_prefix, "model", "transformer"):
        backbone = getattr(inner, name, None)
        if isinstance(backbone, nn.Module) and backbone is not inner:
            return backbone
    raise ModelError(
        f"{type(inner).__name__} has no backbone apart from its head; "
        "expected a ForCausalLM model of transformers"
    )


def takes_pictures(config: PreTrainedConfig) -> bool:
    """Whether it is the configuration of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def language_model(model: nn.Module) -> nn.Module:
    """The backbone without tower and projector."""
    backbone = decoder(model)
    if not isinstance(backbone, PreTrainedModel):
        return backbone
    text: nn.Module = backbone.get_decoder()  # type: ignore[no-untyped-call]
    return text


def layers(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks, in order."""
    text = language_model(model)
    depth = text_config(model).num_hidden_layers
    lists = [m for m in text.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    children = [m for m in lists if any(m is child for child in text.children())]
    for candidates in (children, lists):
        if len(candidates) == 1:
            return candidates[0]
    raise ModelError(
        f"{type(text).__name__} has {len(lists)} lists of {depth} layers; expected one"
    )


def embedding(model: nn.Module) -> nn.Module:
    """The module that turns token ids into vectors (the adapter's copy, where peft trains one)."""
    module = unwrap(model).get_input_embeddings()
    if not isinstance(module, nn.Module):
        raise ModelError(f"{type(unwrap(model)).__name__} has no input embedding")
    return module


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """The modules ``embedding`` and, if there is one, ``head``; both where they are tied, since rows of each can train
    on their own.
    """
    inner: Any = unwrap(model)
    output = inner.get_output_embeddings()
    return {"embedding": embedding(model)} | ({} if output is None else {"head": output})


def stored_table(module: Any) -> Tensor | None:
    """The whole table of an embedding or head; the frozen one, where some of its rows train on their own."""
    adapter = getattr(module, "token_adapter", None)
    weight = getattr(module if adapter is None else adapter.base_layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None


class Rows(NamedTuple):
    """Rows of a frozen table that train on their own, in place of the table's."""

    index_R: Tensor
    """int64 [R]: which rows (here R counts rows)."""
    weight_RD: nn.Parameter


def trained_rows(module: Any) -> Rows | None:
    """The rows of an embedding or head that train on their own, while they are active."""
    adapter = getattr(module, "token_adapter", None)
    if adapter is None or adapter.disable_adapters or adapter.merged:
        return None
    (name,) = adapter.active_adapters
    weight_RD = adapter.trainable_tokens_delta[name]
    return Rows(torch.tensor(adapter.token_indices[name], device=weight_RD.device), weight_RD)


def is_tied(model: nn.Module) -> bool:
    """Whether head and embedding are one parameter; False where there is no head."""
    return has_head(model) and stored_table(embedding(model)) is head(model).weight


def first_names(model: nn.Module) -> dict[str, str]:
    """Name of a parameter -> the first name that the same parameter has; not the same where tensors are tied."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in every}


def table_names(model: nn.Module) -> list[str]:
    """The names of the embedding's and the head's module; one name where they are tied or there is no head."""
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    modules = list(tables(model).values())
    return [names[id(module)] for module in (modules[:1] if is_tied(model) else modules)]


def routers(layer: nn.Module) -> list[nn.Module]:
    """The modules of a decoder layer that choose each token's experts."""
    found: dict[str, nn.Module] = {}
    modules = dict(layer.named_modules())
    if not any(name.split(".")[-1] == "experts" for name in modules):
        return []
    for name, module in modules.items():
        is_router = name.split(".")[-1] in _ROUTERS or type(module).__name__.endswith("Router")
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if is_router and not is_inside and any(True for _ in module.parameters()):
            found[name] = module
    return list(found.values())


def wide_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters in the layers that stay in float32 where a model computes in bfloat16: those of routers, and those
    that the library names.
    """
    routed = {
        p for layer in layers(model) for module in routers(layer) for p in module.parameters()
    }
    named = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return [
        parameter
        for name, parameter in layers(model).named_parameters()
        if parameter in routed or any(re.search(pattern, name) for pattern in named)
    ]


def scalar_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The parameters of scalar heads, the copies that adapters train included."""
    return [p for name, p in root.named_parameters() if _SCALAR in name.split(".")]


def device_of(parameter: Tensor) -> torch.device:
    """The device that computes with a parameter; a shard of one may be in the host's memory."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


# -- the output head -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class HeadSpec:
    """logits = softcap(scale * (hidden @ W^T + bias)) / temperature, softcap(x) = c * tanh(x / c); W is ``weight``
    with ``rows`` in place.
    """

    weight: nn.Parameter
    """[V, D]; its values at ``rows`` are not used."""
    bias: nn.Parameter | None = None
    softcap: float | None = None
    scale: float = 1.0
    rows: Rows | None = None
    temperature: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """The equation above: the reference for the chunked head. The product is in the dtype of ``hidden`` (or
        autocast's), the rest in at least float32.
        """
        logits = cpu_matmul.linear(hidden, self.weight, self.bias)
        if self.rows is not None:
            index_R, weight_RD = self.rows
            bias = None if self.bias is None else self.bias[index_R]
            logits = logits.index_copy(-1, index_R, nn.functional.linear(hidden, weight_RD, bias))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.scale == 1.0 else logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature


def has_head(model: nn.Module) -> bool:
    """Whether there is an output head; reward models have none."""
    return "head" in tables(model)


def head(model: nn.Module) -> HeadSpec:
    """The output head. It holds the parameters themselves, so call it again after wrapping or resizing."""
    module = tables(model).get("head")
    weight = stored_table(module)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise ModelError(
            f"{type(unwrap(model)).__name__} has no linear output head; expected an lm_head with a weight "
            "[V, D]"
        )
    config = text_config(model)
    scale = 1.0
    for name in (*_MULTIPLIES, *_DIVIDES):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            scale = scale * value if name in _MULTIPLIES else scale / value
    softcaps = [getattr(config, name) for name in _SOFTCAPS if getattr(config, name, None)]
    bias = getattr(getattr(module, "original_module", module), "bias", None)
    return HeadSpec(weight, bias, softcaps[0] if softcaps else None, scale, trained_rows(module))


# -- layers that limit packing ---------------------------------------------------------------------


def layer_types(model: nn.Module) -> list[str]:
    """Each decoder block's type, from the configuration; ``full_attention`` by default."""
    config = text_config(model)
    for name in ("layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if types:
            return [str(kind) for kind in types]
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """The size of a head in each layer of a language model; Gemma 4 has larger ones in layers with full attention."""
    per_layer = (
        config.per_layer_config if config.is_heterogeneous else [config] * config.num_hidden_layers
    )
    return [
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in per_layer
    ]


def attention_layer_count(model: nn.Module) -> int:
    """How many attention calls one forward makes: modules whose forward calls the library's attention interface."""
    codes = [
        getattr(inspect.unwrap(type(module).forward), "__code__", None)
        for module in layers(model).modules()
    ]
    return sum("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes if code is not None)


def stateful_layers(model: nn.Module) -> list[str]:
    """Names of decoder blocks (or modules in them) that carry state from token to token. They are found by layer type,
    by class name, and by any 1-D convolution.
    """
    return [name for name, _ in _stateful_blocks(model)]


def leaking_layers(model: nn.Module) -> list[str]:
    """Names of the ``stateful_layers`` whose state does not follow the layout: it leaks across the samples of a
    pack.
    """
    leaking = []
    for name, block in _stateful_blocks(model):
        # every module in the block that carries state has to let it follow the layout
        carrying = [
            module
            for module in block.modules()
            if module is not block
            and (
                _STATEFUL_CLASS.search(type(module).__name__)
                or any(isinstance(child, nn.Conv1d) for child in module.children())
            )
        ]
        if not carrying or not all(map(recurrent_layers.follows_layout, carrying)):
            leaking.append(name)
    return leaking


def _stateful_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    types = layer_types(model)
    for index, block in enumerate(layers(model)):
        if types[index] in STATEFUL_TYPES:
            yield f"layers.{index} ({types[index]})", block
            continue
        for name, module in block.named_modules():
            if isinstance(module, nn.Conv1d) or _STATEFUL_CLASS.search(type(module).__name__):
                yield f"layers.{index}.{name} ({type(module).__name__})", block
                break


def length_dependent_rope(model: nn.Module) -> tuple[str, int] | None:
    """(kind, longest length of the first regime) where RoPE depends on the longest position of the batch."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope":
            return kind, int(rope["original_max_position_embeddings"])
        if "dynamic" in kind:
            return kind, int(config.max_position_embeddings)
    return None


# -- training FLOPs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flops:
    """Training FLOPs (forward and backward, without recomputation): the least that a step needs."""

    per_token: float
    """Weights of the decoder blocks: 6 per active weight that trains, 4 per frozen one. A vision tower is not counted:
    its cost depends on how often a picture is shared."""
    per_pair: float
    """Per visible pair of query and key, over the layers with full attention."""
    per_window_pair: float
    """Per visible pair inside the window, over the layers with a sliding window."""
    per_target: float
    """The head for one target; 0 where there is no head."""
    window: int | None
    """The sliding window of those layers."""


def flops(model: nn.Module) -> Flops:
    """The cost of training ``model``, for balancing and for utilization. State-space scans are not counted."""
    config = text_config(model)
    experts = num_experts(config)
    used = (getattr(config, "num_experts_per_tok", None) or experts) / max(1, experts)
    # the blocks' weights, of which a token uses some experts
    per_token = 0.0
    blocks = layers(model)
    linear = linear_sizes(blocks)
    for name, p in blocks.named_parameters():
        if p.ndim >= 2 or name in linear:  # quantized weights may be a row of codes
            is_stacked = p.ndim == 3 and p.shape[0] == experts
            is_routed = "experts" in name and "shared" not in name
            is_expert = experts and is_routed and (is_stacked or ".experts." in name)
            share = used if is_expert else 1.0
            per_token += share * linear.get(name, p.numel()) * (6.0 if p.requires_grad else 4.0)
    # attention, and the head
    per_pair = {"full": 0.0, "sliding": 0.0}
    for kind, size in zip(layer_types(model), head_sizes(config), strict=True):
        if kind not in STATEFUL_TYPES:
            which = "sliding" if kind == "sliding_attention" else "full"
            per_pair[which] += 12.0 * config.num_attention_heads * size
    weight = head(model).weight if has_head(model) else None
    per_target = 0.0 if weight is None else (6.0 if weight.requires_grad else 4.0) * weight.numel()
    return Flops(
        per_token=per_token,
        per_pair=per_pair["full"],
        per_window_pair=per_pair["sliding"],
        per_target=per_target,
        window=getattr(config, "sliding_window", None) if per_pair["sliding"] else None,
    )


def linear_sizes(model: nn.Module) -> dict[str, int]:
    """Name of a weight of a linear layer, or of quantized experts -> how many numbers it stands for: what is quantized
    has other elements.
    """
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            sizes[f"{name}.weight"] = module.in_features * module.out_features
        for key, size in getattr(module, "wide_sizes", {}).items():
            sizes[f"{name}.{key}"] = size
    return sizes


def num_weights(model: nn.Module) -> int:
    """The numbers that the model's parameters stand for."""
    linear = linear_sizes(model)
    return sum(linear.get(name, p.numel()) for name, p in model.named_parameters())


def num_experts(config: PreTrainedConfig) -> int:
    """Experts of a layer, by the language model's configuration; 0 for a dense model."""
    return next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)


# -- patterns, and the parts of a vision-language model --------------------------------------------

Part: TypeAlias = Literal["vision_tower", "projector", "language_model"]
PARTS: tuple[Part, ...] = get_args(Part)
_WORDS: dict[Part, frozenset[str]] = {
    "language_model": frozenset({"language_model", "text_model"}),
    "projector": frozenset(
        {
            *("merger", "deepstack_merger_list", "multi_modal_projector", "connector"),
            *("image_newline", "embed_vision"),
        }
    ),
    "vision_tower": frozenset({"visual", "vision_tower", "vision_model"}),
}
"""Part -> the words of names of which one decides; the first part whose word a name has."""
_SOUND = frozenset({"audio_tower", "embed_audio"})
_SCALAR = "score"


def has_parts(model: nn.Module) -> bool:
    """Whether the model is a vision-language model."""
    return takes_pictures(unwrap(model).config)


def part_of(name: str) -> Part | None:
    """The part that a parameter or module of a vision-language model belongs to; None for a scalar head, and for
    what hears sound, which taut gives no model.
    """
    words = set(name.split("."))
    for part, decisive in _WORDS.items():
        if not words.isdisjoint(decisive):
            return part
    return None if _SCALAR in words or not words.isdisjoint(_SOUND) else "language_model"


_SLICE = re.compile(r"layers\[(-?\d+)?:(-?\d+)?(?::([1-9]\d*))?\](.*)")
"""Some of the decoder layers, as Python counts them, and a glob for the rest of a name."""


def match_pattern(model: nn.Module, pattern: str, names: Sequence[str], key: str) -> list[str]:
    """The ``names`` (of the model's parameters or modules) that a pattern matches: a part, a regular expression between
    slashes, a slice of the decoder layers (``layers[-2:]``, ``layers[:4].mlp.*``), or a glob. ``key``: the user's
    setting.
    """
    # a slice of the decoder layers
    if some := _SLICE.fullmatch(pattern):
        chosen = slice(*(None if it is None else int(it) for it in some.groups()[:3]))
        blocks = {id(block) for block in [*layers(model)][chosen]}
        inside = [f"{name}." for name, module in model.named_modules() if id(module) in blocks]
        rests = {
            name: name[len(block) - 1 :]
            for block in inside
            for name in names
            if name.startswith(block)
        }
        return [name for name in names if fnmatch.fnmatchcase(rests.get(name, ""), some[4] or ".*")]
    # a part, a regular expression, a glob
    if pattern in PARTS:
        if not has_parts(model):
            raise ModelError(
                f"{key}: {pattern!r} is a part of a vision-language model, and {type(unwrap(model)).__name__} is "
                "none; expected names of its parameters; leave it out"
            )
        return [name for name in names if part_of(name) == pattern]
    if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
        try:
            expression = re.compile(pattern[1:-1])
        except re.error as error:
            raise ModelError(
                f"{pattern} is not a regular expression: {error}; write it as in Python's re"
            ) from error
        return [name for name in names if expression.search(name)]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


MOST_ENDS = 12
"""Ends of names that are listed where nothing is near."""


def suggest(pattern: str, names: list[str]) -> str:
    """A suggestion for a user whose ``pattern`` matches nothing."""
    word = pattern.strip("*/.")
    around = [name for name in names if word and word in name]
    if around:
        return f"did you mean '*{word}*' ({len(around)} names, {around[0]} for one)?"
    short = (re.sub(r"^.*?(\w+(\.weight|\.bias)?)$", r"\1", name) for name in names)
    ends = list(dict.fromkeys(short))
    if close := difflib.get_close_matches(word, ends, n=1):
        return f"did you mean {close[0]}?"
    return f"they end in {', '.join(ends[:MOST_ENDS])}" if ends else "there are no names"


def assign_patterns(model: nn.Module, patterns: Iterable[str], key: str) -> dict[str, str]:
    """Trained parameter -> the one pattern that matches it. ``key``: the user's setting."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        matches = match_pattern(model, pattern, names, key)
        twice = next((name for name in matches if name in pattern_of), None)
        problem = ""
        if not matches:
            remedy = "leave it out" if pattern in PARTS else suggest(pattern, names)
            problem = (
                f"{pattern!r} matches no parameter that trains; expected one that does; {remedy}"
            )
        elif twice is not None:
            problem = (
                f"{twice} is matched by {pattern_of[twice]!r} and by {pattern!r}; expected one of them for each "
                "parameter; name fewer with one of the two"
            )
        if problem:
            raise ModelError(f"{key}: {problem}")
        pattern_of |= dict.fromkeys(matches, pattern)
    return pattern_of


def freeze_unused(model: nn.Module) -> list[str]:
    """Freeze the tower's parameters that no feature depends on, and so have no gradient; returns their names."""
    if not has_parts(model):
        return []
    unread = {id(parameter) for parameter in tower.unread(decoder(model))}
    frozen = {name: p for name, p in model.named_parameters() if id(p) in unread}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return list(frozen)


def parts_without_gradient(
    model: nn.Module, trained: Iterable[str], silent: Collection[str]
) -> list[Part]:
    """Tower or projector, where it has ``trained`` parameters and all of them are ``silent`` (no gradient)."""
    if not has_parts(model):
        return []
    names = set(trained)
    trains = {part_of(name) for name in names}
    moves = {part_of(name) for name in names if name not in silent}
    return [part for part in PARTS[:2] if part in trains and part not in moves]


def count_by_part(names: Iterable[str]) -> str:
    """How many of the names are in each part, as text."""
    counts = Counter(
        part_of(name) or (_SCALAR if _SCALAR in name.split(".") else "sound") for name in names
    )
    parts = (*PARTS, _SCALAR, "sound")
    return ", ".join(f"{counts[part]} in {part}" for part in parts if counts[part])


# -- running the backbone --------------------------------------------------------------------------


def ready(model: nn.Module, packed: Packed) -> Packed:
    """The micro-batch on the model's device with its layout: what a forward needs of the host."""
    device = device_of(next(model.parameters()))
    host = packed.on_host
    last_T = None if host.last_T is None else host.last_T.numpy()
    rows = np.union1d(host.predictor_N.numpy(), host.read_R.numpy())
    rows_read = rows if rows.size <= MOST_ROWS * packed.num_tokens else None
    layout = Layout(host.reach_T.numpy(), last_T, device, rows_read)
    return replace(packed.to(device), layout=layout, host=host)


def run_backbone(model: nn.Module, packed: Packed) -> tuple[Packed, Tensor]:
    """The micro-batch on the model's device, and the backbone's last hidden states [T, D]: right at the tokens that are
    read (``predictor_N``, ``read_R``); where few are, the last layer leaves the others unfinished.
    """
    if packed.layout is None:
        packed = ready(model, packed)
    layout = packed.layout
    assert isinstance(layout, Layout)
    return packed, hidden_states(model, packed.ids_T, packed.position_ids, layout, packed.media)


def hidden_states(
    model: nn.Module,
    ids_T: Tensor,
    position_ids: Tensor,
    layout: Layout | Decoding | Extension,
    media: Sequence[Media] = (),
) -> Tensor:
    """The backbone's last hidden states [T, D], after the final norm. The tokens are on the model's device; ``media``
    are the pictures among them.
    """
    backbone = decoder(model)
    states: Tensor = backbone(
        input_ids=ids_T.unsqueeze(0),
        position_ids=position_ids.unsqueeze(-2),
        use_cache=False,
        taut_layout=layout,
        **tower.encode(backbone, media, ids_T),
    ).last_hidden_state
    return tower.keep_step(backbone, states.squeeze(0), media)
