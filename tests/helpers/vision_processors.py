"""What describes pictures in the directories of tiny vision-language models: settings like those of published models,
with patches of 4x4 pixels and a few tokens a picture. They go with the configurations of
``tests.helpers.vision_models``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_STEPS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
_QWEN_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
_TILED = {
    **_HALF,
    "max_image_size": {"longest_edge": 16},
    "do_image_splitting": True,
    "do_pad": True,
    "resample": 1,
}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLProcessor",
        "Qwen2VLImageProcessor",
        {**_CLIP, **_QWEN_PATCHES, "min_pixels": 64, "max_pixels": 768},
        {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessor",
        {**_CLIP, **_QWEN_PATCHES, "min_pixels": 256, "max_pixels": 1024},
        {},
    ),
    "qwen3_vl": (
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorFast",
        {**_HALF, **_QWEN_PATCHES, "size": {"shortest_edge": 64, "longest_edge": 768}},
        {},
    ),
    "internvl": (
        "InternVLProcessor",
        "GotOcr2ImageProcessorFast",
        {
            **_CLIP,
            "size": {"height": 16, "width": 16},
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 4,
        },
        {"image_seq_length": 4},
    ),
    "idefics3": (
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {**_TILED, "size": {"longest_edge": 32}},
        {"image_seq_len": 4},
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        {**_TILED, "size": {"longest_edge": 48}},
        {"image_seq_len": 4},
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {
            **_HALF,
            "size": {"height": 8, "width": 8},
            "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16], [8, 24]],
            "do_pad": True,
            "resample": 3,
        },
        {
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<video>",
        },
    ),
    "gemma3": (
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {
            **_HALF,
            "size": {"height": 24, "width": 24},
            "do_pan_and_scan": None,
            "do_convert_rgb": None,
            "resample": 2,
        },
        {"image_seq_length": 9},
    ),
    "gemma4": (
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70, "do_normalize": False},
        {},
    ),
}
"""Family -> class of the processor, class of the image processor, its settings, the processor's own."""

_QWEN_WORDS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_IDEFICS_WORDS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
]
_WORDS = {
    "qwen2_vl": _QWEN_WORDS,
    "qwen2_5_vl": _QWEN_WORDS,
    "qwen3_vl": _QWEN_WORDS,
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "idefics3": _IDEFICS_WORDS,
    "smolvlm": _IDEFICS_WORDS,
    "llava_onevision": ["<image>", "<video>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "gemma4": [
        *("<|image|>", "<|image>", "<image|>", "<|video|>"),
        *("<|audio|>", "<|audio>", "<audio|>"),
    ],
}
_NAMES = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "gemma4": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
}


def processor_files(kind: str) -> dict[str, dict[str, Any]]:
    """File name -> content."""
    processor, image_processor, settings, own = _FAMILIES[kind]
    type_of = {"processor_class": processor, "image_processor_type": image_processor}
    files = {"preprocessor_config.json": {**_STEPS, **settings, **type_of}}
    if own:
        files["processor_config.json"] = {**own, "processor_class": processor}
    return files


def image_tokens(kind: str) -> list[str]:
    """The special tokens that the tokenizer needs."""
    return list(_WORDS[kind])


def named_tokens(kind: str) -> dict[str, str]:
    """Attribute of the tokenizer -> token: some processors ask for them by name (``extra_special_tokens``)."""
    return dict(_NAMES.get(kind, {}))


def save_processor(kind: str, directory: Path) -> None:
    """Write them beside the model."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in processor_files(kind).items():
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
