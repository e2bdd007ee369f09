"""The vision tower and the projector of a model: images to the features that replace their placeholders.

``encode`` passes precomputed features to the library's multimodal backbone (``mm_encoder_outputs``): each distinct
image of a micro-batch is computed once, however often it occurs and however the samples are packed, images of one
shape in one call, and all features are laid out in the order of the placeholders. Their number is compared with that
of the placeholders, image by image. Nothing is kept from one micro-batch to the next, frozen or not: the rounding of
features depends on what they are computed with, and a resumed run would get other ones.

In a model whose tower or projector trains, a micro-batch without an image runs both on a small image of noise, which
affects nothing and whose gradient is 0: gradients are then zeros and never absent, whatever the split, and ranks that
shard the tower stay in step.

The models inside are the library's. Which weights train, and the dtype of the computation, are decided elsewhere.
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
from taut.vision.processors.family import sides

Tensors = Mapping[str, Tensor]
Arguments = dict[str, Any]


class Features(NamedTuple):
    """The features of one image."""

    main_ND: Tensor
    """The features that replace the placeholders, [N, D]."""
    deep: tuple[Tensor, ...] = ()
    """Features added to their hidden states after the first layers, each [N, D] (Qwen3-VL's deepstack)."""


def encode(backbone: nn.Module, media: Sequence[Media], ids_T: Tensor) -> Arguments:
    """Keyword arguments for the forward of the library's multimodal model; ``ids_T`` are its input ids.

    Raises ModelError where the tower has another number of features than a picture has placeholders.
    """
    if not media:
        return {}
    inner: Any = backbone
    kind, image_id = family(backbone), inner.config.image_token_id
    adapter = FAMILIES[kind]
    features = features_of(backbone, media)
    # The number of placeholders of each image; and of those before the first, between two, and after the last.
    before_T = nn.functional.pad((ids_T == image_id).cumsum(0), (1, 0))
    bounds = [0, *(bound for image in media for bound in (image.start, image.stop)), ids_T.numel()]
    counts: list[int] = before_T[torch.tensor(bounds, device=ids_T.device)].diff().tolist()
    for image, of_image, count in zip(media, features, counts[1::2], strict=True):
        if of_image.main_ND.shape[0] != count:
            raise ModelError(
                f"{kind}: the vision tower gives {of_image.main_ND.shape[0]} features for the picture "
                f"{image.picture.source}, which has {count} placeholders; expected as many; copy the processor's "
                "files"
            )
    # A stray placeholder, which a model can write, is a token like others: its feature is its embedding.
    every: list[Features] = []
    for num_strays, following in zip(counts[::2], [*features, None], strict=True):
        if num_strays:
            stray = inner.config.text_config.pad_token_id if adapter.pads_strays else image_id
            ids = torch.full((num_strays,), stray, device=features[0].main_ND.device)
            embedded: Tensor = inner.get_input_embeddings()(ids)
            deep = tuple(torch.zeros_like(embedded) for _ in features[0].deep)
            every.append(Features(embedded, deep))
        if following is not None:
            every.append(following)
    # The library's own form for what the tower would return.
    main: Any = [of_image.main_ND for of_image in every]
    output = BaseModelOutputWithPooling()
    output.pooler_output = torch.cat(main) if adapter.is_one_tensor else main
    if every[0].deep:
        levels = zip(*(of_image.deep for of_image in every), strict=True)
        output["deepstack_features"] = [list(level) for level in levels]
    return {"mm_encoder_outputs": {"image": output}}


def features_of(backbone: nn.Module, media: Sequence[Media]) -> list[Features]:
    """The features of each image. Every distinct image is computed once; images not read yet are read in threads."""
    adapter = FAMILIES[family(backbone)]
    pictures = {image.picture.digest: image.picture for image in media}
    for picture in pictures.values():
        picture.expect()
    read = {digest: picture.tensors() for digest, picture in pictures.items()}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for digest, tensors in read.items():
        groups.setdefault(adapter.group(tensors), []).append(digest)
    features: dict[str, Features] = {}
    for digests in groups.values():
        computed = _compute(backbone, [read[digest] for digest in digests])
        features |= dict(zip(digests, computed, strict=True))
    return [features[image.picture.digest] for image in media]


def library_arguments(backbone: nn.Module, media: Sequence[Media], ids_T: Tensor) -> Arguments:
    """The arguments of the library's own forward for one sample alone, as its own processor makes them: the library
    computes features, positions and masks from them.
    """
    if not media:
        return {}
    inner: Any = backbone
    adapter = FAMILIES[family(backbone)]
    pictures = [_on_device(backbone, image.picture.tensors()) for image in media]
    is_picture_T = (ids_T == inner.config.image_token_id).long()
    types = {adapter.types: is_picture_T[None]} if adapter.types else {}
    return {**adapter.arguments(pictures), **types}


def keep_step(backbone: nn.Module, hidden: Tensor, media: Sequence[Media] = ()) -> Tensor:
    """``hidden`` unchanged, with zero gradients for tower and projector where they train: for a micro-batch without an
    image, or whose images do not use a part of them.
    """
    if not takes_pictures(backbone) or not needs_step(backbone):
        return hidden
    if media:
        unused: Tensor | None = getattr(backbone, "image_newline", None)
        if unused is None or not unused.requires_grad:
            return hidden
        with_unused: Tensor = _Unseen.apply(hidden, unused)  # type: ignore[no-untyped-call]
        return with_unused
    noise = FAMILIES[family(backbone)].noise(backbone)
    ((main_ND, deep),) = _compute(backbone, [noise])
    with_noise: Tensor = _Unseen.apply(hidden, main_ND, *deep)  # type: ignore[no-untyped-call]
    return with_noise


def needs_step(backbone: nn.Module) -> bool:
    """Whether tower or projector take part in a forward without images, because they train. Without gradients, as in
    each step of an engine, this is known at once.
    """
    return torch.is_grad_enabled() and any(p.requires_grad for p in vision_parameters(backbone))


def unread(backbone: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of tower and projector that no feature depends on: layers after the one that is read, a
    pooling head.
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
    """The parameters of tower and projector: all of the backbone that are not its language model's."""
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
    """The reason for refusing a family."""
    return f"{kind} is no family of vision-language models that taut knows; expected one of {', '.join(FAMILIES)}"


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
    """The features of the images of one group."""
    inner: Any = backbone
    adapter = FAMILIES[family(backbone)]
    arguments = adapter.arguments([_on_device(backbone, tensors) for tensors in pictures])
    return adapter.features(inner.get_image_features(**arguments, return_dict=True), pictures)


def _on_device(backbone: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors on the model's device, floats in the dtype of its weights."""
    weight = next(backbone.parameters())
    return {
        name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
        for name, value in tensors.items()
    }


def _join(pictures: Sequence[Tensors], name: str) -> Tensor:
    return torch.cat([tensors[name] for tensors in pictures])


def _num_tiles(pictures: Sequence[Tensors]) -> list[int]:
    return [tensors["pixel_values"].shape[0] for tensors in pictures]


def _joined(*names: str) -> Callable[[Sequence[Tensors]], Arguments]:
    """A function that joins these tensors of images, of any sizes where the tower packs them."""
    return lambda pictures: {name: _join(pictures, name) for name in names}


def _batch_of_tiles(pictures: Sequence[Tensors]) -> Arguments:
    """Tiles as one row of a batch."""
    # The library leaves out tiles of zeros, as if they were padding of a batch: one value of such a tile becomes the
    # smallest positive number.
    pixels = _join(pictures, "pixel_values")
    first = torch.zeros_like(pixels[0])
    first[0, 0, 0] = torch.finfo(pixels.dtype).tiny
    is_blank = ~pixels.flatten(1).any(1)
    return {"pixel_values": torch.where(is_blank[:, None, None, None], first, pixels)[None]}


def _sized_tiles(pictures: Sequence[Tensors]) -> Arguments:
    """Tiles, with the sizes of their images."""
    # An image that is alone in its sample has tiles, one of several has none: the library decides by the number of
    # images in the sample.
    tiles = _num_tiles(pictures)
    return {
        "pixel_values": _join(pictures, "pixel_values"),
        "image_sizes": _join(pictures, "image_sizes"),
        "batch_num_images": [1] * len(tiles) if tiles[0] > 1 else [max(2, len(tiles))],
    }


def _each(output: Any, pictures: Sequence[Tensors]) -> list[Features]:
    """Features that the library returns as a list."""
    deep = getattr(output, "deepstack_features", None) or []
    return [
        Features(main_ND, tuple(level[index] for level in deep))
        for index, main_ND in enumerate(output.pooler_output)
    ]


def _by_tiles(output: Any, pictures: Sequence[Tensors]) -> list[Features]:
    """Features of tiles, equally many for each tile."""
    tiles = _num_tiles(pictures)
    pooled = output.pooler_output
    every = pooled[0] if isinstance(pooled, list) else pooled.flatten(0, 1)
    per_tile = every.shape[0] // sum(tiles)
    return [Features(main_ND) for main_ND in every.split([per_tile * count for count in tiles])]


def _patch_noise(backbone: Any) -> Tensors:
    """The patches of one token."""
    vision = backbone.config.vision_config
    merge = vision.spatial_merge_size
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge, merge]])
    return {"pixel_values": _noise(merge * merge, size), "image_grid_thw": grid}


def _placed_noise(backbone: Any) -> Tensors:
    """The patches of one token."""
    vision = backbone.config.vision_config
    side = vision.pooling_kernel_size
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1)
    return {
        "pixel_values": _noise(1, side * side, 3 * vision.patch_size**2),
        "image_position_ids": places.reshape(1, -1, 2),
    }


def _tile_noise(backbone: Any) -> Tensors:
    """One tile, of the size that the tower's position embeddings have."""
    vision = backbone.config.vision_config
    height, width = sides(vision.image_size)
    return {"pixel_values": _noise(1, vision.num_channels, height, width)}


def _rows_noise(backbone: Any) -> Tensors:
    """Tiles of an image that is alone in its sample, so that its rows have ends."""
    height, width = min(backbone.config.image_grid_pinpoints, key=math.prod)
    vision = backbone.config.vision_config
    side = vision.image_size
    num_tiles = 1 + (height // side) * (width // side)
    size = torch.tensor([[height, width]])
    return {"pixel_values": _noise(num_tiles, vision.num_channels, side, side), "image_sizes": size}


def _corner_noise(backbone: Any) -> Tensors:
    """The part of a tile that makes one token."""
    vision = backbone.config.vision_config
    side = backbone.config.scale_factor * vision.patch_size
    return {"pixel_values": _noise(1, vision.num_channels, side, side)}


def _noise(*shape: int) -> Tensor:
    """Fixed numbers; nothing is drawn."""
    return torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape).sin()


def _by_tile(tensors: Tensors) -> tuple[Any, ...]:
    """The size of the tiles, and whether there are several."""
    pixels = tensors["pixel_values"]
    return (*pixels.shape[1:], pixels.shape[0] > 1)


class Family(NamedTuple):
    """The calls by which the library's model of a family computes features."""

    arguments: Callable[[Sequence[Tensors]], Arguments]
    """Arguments of ``get_image_features``, and of the model's own forward, for images of one group."""
    features: Callable[[Any, Sequence[Tensors]], list[Features]]
    """Its output, split by image."""
    noise: Callable[[Any], Tensors]
    """A small image."""
    group: Callable[[Tensors], tuple[Any, ...]] = _by_tile
    """A key that is equal for images that can be computed together."""
    types: str | None = None
    """Argument of the library's forward for its own positions or masks: 1 at placeholders, else 0."""
    pads_strays: bool = False
    """Whether a placeholder without a picture has the embedding of the padding token; else that of its own."""
    is_one_tensor: bool = False
    """Whether the library takes the features of all images as one tensor; else as a list."""


_TILES = _joined("pixel_values")
_QWEN = Family(
    _joined("pixel_values", "image_grid_thw"),
    _each,
    _patch_noise,
    group=lambda _: (),
    types="mm_token_type_ids",
)
_IDEFICS = Family(_batch_of_tiles, _by_tiles, _corner_noise, is_one_tensor=True)
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "internvl": Family(_TILES, _by_tiles, _tile_noise, is_one_tensor=True),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llava_onevision": Family(_sized_tiles, _each, _rows_noise),
    "gemma3": Family(_TILES, _by_tiles, _tile_noise, types="token_type_ids", is_one_tensor=True),
    "gemma4": Family(
        _joined("pixel_values", "image_position_ids"),
        _each,
        _placed_noise,
        group=lambda tensors: (
            id(tensors),
        ),  # alone: it pools in float32, whose sums depend on company
        types="mm_token_type_ids",
        pads_strays=True,
    ),
}
"""model_type -> family. A model with a vision tower that is not listed is refused by name."""
