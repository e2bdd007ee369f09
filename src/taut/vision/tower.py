"""Pictures -> what stands in the place of their placeholders: the vision tower and the projector of a model.

``encode`` gives the library's multimodal backbone its features ready made (``mm_encoder_outputs``): each distinct
picture of a micro-batch is computed once, however often it is seen and however the samples are packed, with those of
one shape in one call, and the features of all are laid out in the order of the placeholders. Their number is held to
that of the placeholders, picture by picture. Nothing is kept from one micro-batch to the next, frozen or not: how
features round depends on what they are computed with, and a resumed run would have other ones.

A micro-batch without a picture, in a model whose tower or projector trains, runs both on a small picture of noise, of
which nothing is seen and whose gradient is 0: gradients are then zeros and never absent, whatever the split, and ranks
that shard the tower keep step.

Models inside are the library's; what is trained, and in which dtype it computes, is decided elsewhere. May import types
and errors; models imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from taut.errors import ModelError
from taut.types import Media

Tensors = Mapping[str, Tensor]
Arguments = dict[str, Any]


class Features(NamedTuple):
    """Of one picture."""

    main_ND: Tensor
    """What takes the placeholders' place, [N, D]."""
    deep: tuple[Tensor, ...] = ()
    """What is added to their hidden states after the first layers, each [N, D] (Qwen3-VL's deepstack)."""


def encode(backbone: nn.Module, media: Sequence[Media], ids_T: Tensor) -> Arguments:
    """Keyword arguments for the forward of the library's multimodal model; ``ids_T`` are the ids it is given.

    Raises ModelError where the tower has another number of features than a picture has placeholders.
    """
    if not media:
        return {}
    kind = family(backbone)
    features = features_of(backbone, media)
    own, strays = placeholders(backbone, media, ids_T)
    for one, of_one, count in zip(media, features, own, strict=True):
        if of_one.main_ND.shape[0] != count:
            raise ModelError(
                f"{kind}: the vision tower gives {of_one.main_ND.shape[0]} features for the picture "
                f"{one.picture.source}, which has {count} placeholders; expected as many; copy the processor's files "
                "that belong to this model"
            )
    features = _with_strays(backbone, features, strays)
    main: Any = [of_one.main_ND for of_one in features]
    output = BaseModelOutputWithPooling()
    output.pooler_output = torch.cat(main) if FAMILIES[kind].is_one_tensor else main
    if features[0].deep:
        levels = zip(*(of_one.deep for of_one in features), strict=True)
        output["deepstack_features"] = [list(level) for level in levels]
    return {"mm_encoder_outputs": {"image": output}}


def features_of(backbone: nn.Module, media: Sequence[Media]) -> list[Features]:
    """The features of each, every distinct picture computed once, and those not read ahead read in threads."""
    way = FAMILIES[family(backbone)]
    pictures = {one.picture.digest: one.picture for one in media}
    for picture in pictures.values():
        picture.expect()
    read = {digest: picture.tensors() for digest, picture in pictures.items()}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for digest, tensors in read.items():
        groups.setdefault(way.group(tensors), []).append(digest)
    found: dict[str, Features] = {}
    for digests in groups.values():
        each = _compute(backbone, [read[digest] for digest in digests])
        found |= dict(zip(digests, each, strict=True))
    return [found[one.picture.digest] for one in media]


def library_arguments(backbone: nn.Module, media: Sequence[Media], ids_T: Tensor) -> Arguments:
    """What the library's own forward is given for one sample alone, as its own processor would: it computes features,
    positions and masks from it.
    """
    if not media:
        return {}
    inner: Any = backbone
    way = FAMILIES[family(backbone)]
    pictures = [_on_device(backbone, one.picture.tensors()) for one in media]
    is_picture_T = (ids_T == inner.config.image_token_id).long()
    types = {way.types: is_picture_T[None]} if way.types else {}
    return {**way.arguments(pictures), **types}


def keep_step(backbone: nn.Module, hidden: Tensor, media: Sequence[Media] = ()) -> Tensor:
    """``hidden`` as it is; the gradients of tower and projector are zeros where they train, for a micro-batch without a
    picture, or whose pictures pass a part over.
    """
    if not takes_pictures(backbone) or not needs_step(backbone):
        return hidden
    if media:
        passed_over: Tensor | None = getattr(backbone, "image_newline", None)
        if passed_over is None or not passed_over.requires_grad:
            return hidden
        counted: Tensor = _Unseen.apply(hidden, passed_over)  # type: ignore[no-untyped-call]
        return counted
    noise = FAMILIES[family(backbone)].noise(backbone)
    ((main_ND, deep),) = _compute(backbone, [noise])
    kept: Tensor = _Unseen.apply(hidden, main_ND, *deep)  # type: ignore[no-untyped-call]
    return kept


def needs_step(backbone: nn.Module) -> bool:
    """Whether tower or projector take part in this forward though there is no picture: they learn. Where nothing does,
    as in each step of an engine, nothing is looked for.
    """
    return torch.is_grad_enabled() and any(p.requires_grad for p in vision_parameters(backbone))


def unread(backbone: nn.Module) -> list[nn.Parameter]:
    """What of tower and projector would train, and no feature depends on it: layers after the one that is read, a head
    that pools.
    """
    trained = [p for p in vision_parameters(backbone) if p.requires_grad]
    if not trained:
        return []
    with torch.enable_grad():
        noise = FAMILIES[family(backbone)].noise(backbone)
        ((main_ND, deep),) = _compute(backbone, [noise])
        total = torch.stack([feature.sum() for feature in (main_ND, *deep)]).sum()
        slopes = torch.autograd.grad(total, trained, allow_unused=True)
    return [p for p, slope in zip(trained, slopes, strict=True) if slope is None]


def vision_parameters(backbone: nn.Module) -> list[nn.Parameter]:
    """Those of tower and projector: all of the backbone that are not its language model's."""
    inner: Any = backbone
    text = {id(parameter) for parameter in inner.get_decoder().parameters()}
    return [parameter for parameter in backbone.parameters() if id(parameter) not in text]


def takes_pictures(backbone: nn.Module) -> bool:
    """Whether this is the backbone of a vision-language model."""
    return hasattr(backbone, "get_image_features")


def family(backbone: nn.Module) -> str:
    """The model_type, one of FAMILIES."""
    inner: Any = backbone
    kind = str(inner.config.model_type)
    if kind not in FAMILIES:
        raise ModelError(unknown(kind))
    return kind


def unknown(kind: str) -> str:
    """Why a family is refused."""
    return f"{kind} is no family of vision-language models that taut knows; expected one of {', '.join(FAMILIES)}"


def placeholders(
    backbone: nn.Module, media: Sequence[Media], ids_T: Tensor
) -> tuple[list[int], list[int]]:
    """How many each picture has; and how many lie before the first, between two, and after the last."""
    inner: Any = backbone
    before_T = nn.functional.pad((ids_T == inner.config.image_token_id).cumsum(0), (1, 0))
    bounds = [0, *(bound for one in media for bound in (one.start, one.stop)), ids_T.numel()]
    counts: list[int] = before_T[torch.tensor(bounds, device=ids_T.device)].diff().tolist()
    return counts[1::2], counts[::2]


def _with_strays(
    backbone: nn.Module, features: Sequence[Features], strays: Sequence[int]
) -> list[Features]:
    """A placeholder of no picture, which a model can write, is a token like others: its feature is its embedding."""
    if not any(strays):
        return list(features)
    inner: Any = backbone
    found: list[Features] = []
    for count, of_one in zip(strays, [*features, None], strict=True):
        if count:
            ids = torch.full((count,), inner.config.image_token_id)
            embedded: Tensor = inner.get_input_embeddings()(ids.to(features[0].main_ND.device))
            found.append(
                Features(embedded, tuple(torch.zeros_like(embedded) for _ in features[0].deep))
            )
        if of_one is not None:
            found.append(of_one)
    return found


class _Unseen(torch.autograd.Function):
    """The first argument; the gradients of the others are 0, even where they are not finite."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *features: Tensor) -> Tensor:
        ctx.shapes = [(feature.shape, feature.dtype) for feature in features]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)
        return gradient, *zeros


def _compute(backbone: nn.Module, pictures: Sequence[Tensors]) -> list[Features]:
    """Of pictures of one group."""
    inner: Any = backbone
    way = FAMILIES[family(backbone)]
    arguments = way.arguments([_on_device(backbone, tensors) for tensors in pictures])
    return way.features(inner.get_image_features(**arguments, return_dict=True), pictures)


def _on_device(backbone: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """Numbers in the dtype of the model's weights."""
    weight = next(backbone.parameters())
    return {
        name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
        for name, value in tensors.items()
    }


def _join(pictures: Sequence[Tensors], name: str) -> Tensor:
    return torch.cat([tensors[name] for tensors in pictures])


def _num_tiles(pictures: Sequence[Tensors]) -> list[int]:
    return [tensors["pixel_values"].shape[0] for tensors in pictures]


def _patches(pictures: Sequence[Tensors]) -> Arguments:
    """Pictures of any sizes: the tower itself packs."""
    names = ("pixel_values", "image_grid_thw")
    return {name: _join(pictures, name) for name in names}


def _tiles(pictures: Sequence[Tensors]) -> Arguments:
    return {"pixel_values": _join(pictures, "pixel_values")}


def _batch_of_tiles(pictures: Sequence[Tensors]) -> Arguments:
    """The library leaves out tiles that are 0 throughout, as if they filled up a batch: one value of such a tile is
    made the smallest there is.
    """
    pixels = _join(pictures, "pixel_values")
    first = torch.zeros_like(pixels[0])
    first[0, 0, 0] = torch.finfo(pixels.dtype).tiny
    is_blank = ~pixels.flatten(1).any(1)
    return {"pixel_values": torch.where(is_blank[:, None, None, None], first, pixels)[None]}


def _sized_tiles(pictures: Sequence[Tensors]) -> Arguments:
    """A picture that is alone in its sample has tiles, one of several has none: that is said by how many the library is
    told were in the sample.
    """
    tiles = _num_tiles(pictures)
    return {
        "pixel_values": _join(pictures, "pixel_values"),
        "image_sizes": _join(pictures, "image_sizes"),
        "batch_num_images": [1] * len(tiles) if tiles[0] > 1 else [max(2, len(tiles))],
    }


def _each(output: Any, pictures: Sequence[Tensors]) -> list[Features]:
    """The library lists them."""
    deep = getattr(output, "deepstack_features", None) or []
    return [
        Features(main_ND, tuple(level[index] for level in deep))
        for index, main_ND in enumerate(output.pooler_output)
    ]


def _by_tiles(output: Any, pictures: Sequence[Tensors]) -> list[Features]:
    """As many features for each tile."""
    tiles = _num_tiles(pictures)
    found = output.pooler_output
    every = found[0] if isinstance(found, list) else found.flatten(0, 1)
    per_tile = every.shape[0] // sum(tiles)
    return [Features(main_ND) for main_ND in every.split([per_tile * count for count in tiles])]


def _patch_noise(backbone: Any) -> Tensors:
    """As many patches as make one token."""
    vision = backbone.config.vision_config
    merge, depth = vision.spatial_merge_size, vision.temporal_patch_size
    size = vision.in_channels * depth * vision.patch_size**2
    return {
        "pixel_values": _noise(merge * merge, size),
        "image_grid_thw": torch.tensor([[1, merge, merge]]),
    }


def _tile_noise(backbone: Any) -> Tensors:
    """One tile, of the size that the tower's positions are learned for."""
    size = backbone.config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    channels = backbone.config.vision_config.num_channels
    return {"pixel_values": _noise(1, channels, height, width)}


def _rows_noise(backbone: Any) -> Tensors:
    """Tiles of a picture that is alone in its sample, so that its rows have ends."""
    height, width = min(backbone.config.image_grid_pinpoints, key=math.prod)
    side, channels = (
        backbone.config.vision_config.image_size,
        backbone.config.vision_config.num_channels,
    )
    return {
        "pixel_values": _noise(1 + (height // side) * (width // side), channels, side, side),
        "image_sizes": torch.tensor([[height, width]]),
    }


def _corner_noise(backbone: Any) -> Tensors:
    """As much of a tile as makes one token."""
    side = backbone.config.scale_factor * backbone.config.vision_config.patch_size
    return {"pixel_values": _noise(1, backbone.config.vision_config.num_channels, side, side)}


def _noise(*shape: int) -> Tensor:
    """The same numbers wherever and whenever; nothing is drawn."""
    return torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape).sin()


def _any(tensors: Tensors) -> tuple[Any, ...]:
    return ()


def _by_tile(tensors: Tensors) -> tuple[Any, ...]:
    """Tiles of one size, and whether there are several."""
    pixels = tensors["pixel_values"]
    return (*pixels.shape[1:], pixels.shape[0] > 1)


class Family(NamedTuple):
    """How the library's model of a family is asked for features."""

    arguments: Callable[[Sequence[Tensors]], Arguments]
    """What ``get_image_features``, and the model's own forward, is given for pictures of one group."""
    features: Callable[[Any, Sequence[Tensors]], list[Features]]
    """What it returns, by picture."""
    noise: Callable[[Any], Tensors]
    """A small picture."""
    group: Callable[[Tensors], tuple[Any, ...]] = _by_tile
    """Pictures that can be computed together are equal in this."""
    types: str | None = None
    """What the library's forward is told beside, of its own positions or masks: 1 where a placeholder is, else 0."""
    is_one_tensor: bool = False
    """Whether the library wants the features of all pictures as one tensor; else listed."""


_QWEN = Family(_patches, _each, _patch_noise, _any, "mm_token_type_ids")
_IDEFICS = Family(_batch_of_tiles, _by_tiles, _corner_noise)
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "internvl": Family(_tiles, _by_tiles, _tile_noise, is_one_tensor=True),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llava_onevision": Family(_sized_tiles, _each, _rows_noise),
    "gemma3": Family(_tiles, _by_tiles, _tile_noise, types="token_type_ids", is_one_tensor=True),
}
"""model_type -> its way. A model with a vision tower that is not here is refused by name."""
