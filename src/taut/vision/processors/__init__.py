"""A model's directory -> its image processor, or one line why there is none.

The library's own Processor classes need torchvision. These use its PIL-backed image processors, and write the text
that each Processor class would write, which tests compare with the library's. A family that is not listed is refused
by name, and so is a directory whose files do not agree with each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoImageProcessor, PreTrainedConfig, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.errors import ModelError
from taut.io import capabilities, hub
from taut.vision.placeholders import Processor
from taut.vision.processors.family import ModelFiles
from taut.vision.processors.gemma3 import Gemma3
from taut.vision.processors.gemma4 import Gemma4
from taut.vision.processors.idefics3 import Idefics3
from taut.vision.processors.internvl import InternVL
from taut.vision.processors.llava_onevision import LlavaOnevision
from taut.vision.processors.qwen import Qwen


class Kind(NamedTuple):
    """The classes of a model_type."""

    family: Callable[[ModelFiles], Processor]
    processor: str
    """The library's classes, by name."""
    images: str


PROCESSORS = {
    "qwen2_vl": Kind(Qwen, "Qwen2VLProcessor", "Qwen2VLImageProcessor"),
    "qwen2_5_vl": Kind(Qwen, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
    "qwen3_vl": Kind(Qwen, "Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    "qwen3_vl_moe": Kind(Qwen, "Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    "qwen3_5": Kind(Qwen, "Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    "qwen3_5_moe": Kind(Qwen, "Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    "internvl": Kind(InternVL, "InternVLProcessor", "GotOcr2ImageProcessor"),
    "idefics3": Kind(Idefics3, "Idefics3Processor", "Idefics3ImageProcessor"),
    "smolvlm": Kind(Idefics3, "SmolVLMProcessor", "SmolVLMImageProcessor"),
    "llava_onevision": Kind(
        LlavaOnevision, "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor"
    ),
    "gemma3": Kind(Gemma3, "Gemma3Processor", "Gemma3ImageProcessor"),
    "gemma4": Kind(Gemma4, "Gemma4Processor", "Gemma4ImageProcessor"),
}
"""model_type -> family."""

_FILES = ("preprocessor_config.json", "processor_config.json")


def open_processor(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
    min_pixels: int | None = None,
) -> Processor | None:
    """Open the processor of the model at ``path``; None where the model takes no pictures. ``min_pixels``: the lower
    limit of a picture in place of its own; refused where the family has none.
    """
    if getattr(config, "vision_config", None) is None:
        return None
    # The family, and what it can do.
    kind, fault = PROCESSORS.get(config.model_type), ""
    if kind is None:
        fault = (
            f"are not supported; expected one of {', '.join(PROCESSORS)}; use a model of these families, or a text "
            "model"
        )
    elif min_pixels is not None and kind.family is not Qwen:
        fault = "have no lower limit; expected images.min_pixels unset; remove it"
    if kind is None or fault:
        raise ModelError(f"model={path} is a {config.model_type}, whose pictures {fault}")
    capabilities.require("a model with pictures", f"model={path}")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in _FILES):
        raise ModelError(
            f"model={path} has no preprocessor_config.json; expected it next to config.json; copy "
            f"{' and '.join(_FILES)}, as far as they exist, from the base model"
        )
    try:
        # The library's image processor, of the classes that the family expects.
        place, revision = hub.pinned(path)
        settings, _ = ImageProcessingMixin.get_image_processor_dict(place, **revision)
        own, _ = ProcessorMixin.get_processor_dict(place, **revision)
        load: Any = AutoImageProcessor.from_pretrained  # has no types
        limits = {} if min_pixels is None else {"min_pixels": min_pixels}
        images = load(
            place,
            config=config,
            backend="pil",
            trust_remote_code=trust_remote_code,
            **revision,
            **limits,
        )
    except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model={path}: its image processor cannot be made: {reason}; copy {' and '.join(_FILES)} from the base "
            "model"
        ) from error
    for name in (own.get("processor_class"), settings.get("processor_class")):
        _require_class(path, name, kind.processor)
    for name in (settings.get("image_processor_type"), type(images).__name__):
        _require_class(path, name, kind.images, kind.processor.replace("Proc", "ImageProc"))
    return kind.family(ModelFiles(path, config, tokenizer, images, own))


def _require_class(path: str, named: str | None, *expected: str) -> None:
    """Raise ModelError for a class that the files name and that is not the family's."""
    if named is not None and named.removesuffix("Fast").removesuffix("Pil") not in expected:
        raise ModelError(
            f"model={path}: its pictures are for {named}; expected {expected[0]}, which goes with its config.json; "
            f"copy {' and '.join(_FILES)} from the base model"
        )
