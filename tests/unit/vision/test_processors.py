"""What becomes of a picture, held to the library's Processor classes, which run here without the parts for films."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.helpers.vision_models import FAMILIES, vision_config, vision_tokenizer
from tests.helpers.vision_processors import image_tokens, processor_files, save_processor
from transformers import AutoImageProcessor, ProcessorMixin, Qwen2Config
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.smolvlm import processing_smolvlm

from taut.errors import DataError, ModelError
from taut.vision.processors import PROCESSORS, open_processor

SIZES = [(1, 1), (3, 1), (1, 3), (2, 5), (33, 17), (17, 33), (40, 40), (400, 2), (7, 300)]
"""Width, height."""


def photo(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))


@cache
def tokenizer_of(kind: str) -> Any:
    return vision_tokenizer(kind)


@cache
def config_of(kind: str) -> Any:
    return vision_config(kind)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of each family in a folder of its name."""
    root = tmp_path_factory.mktemp("processors")
    for kind in FAMILIES:
        save_processor(kind, root / kind)
    return root


def open_at(path: Path, kind: str) -> Any:
    return open_processor(str(path), config_of(kind), tokenizer_of(kind))


def library_processor(path: Path, kind: str) -> Any:
    """The library's Processor as its own __init__ sets it up, without a processor of films."""

    def set_up(self: Any, images: Any = None, tokenizer: Any = None, *_: Any, **named: Any) -> None:
        self.image_processor = named.get("image_processor", images)
        self.tokenizer = named.get("tokenizer", tokenizer)

    own, _ = ProcessorMixin.get_processor_dict(str(path))
    own.pop("processor_class", None)
    load: Any = AutoImageProcessor.from_pretrained
    images = load(str(path), backend="pil", config=config_of(kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "__init__", set_up)
        patch.setattr(processing_smolvlm, "num2words", str)
        make = getattr(transformers, PROCESSORS[kind].processor)
        films: dict[str, None] = {}
        if kind in ("smolvlm", "gemma4"):
            films["video_processor"] = None
        if kind == "gemma4":
            films["feature_extractor"] = None
        return make(image_processor=images, tokenizer=tokenizer_of(kind), **films, **own)


def library_inputs(processor: Any, placeholder: str, images: list[Image.Image]) -> Any:
    text = "Look: " + " and ".join([placeholder] * len(images)) + " there"
    return text, processor(images=[images], text=[text], return_tensors="pt")


@pytest.mark.parametrize("kind", FAMILIES)
def test_ids_and_tensors_are_the_librarys(kind: str, directory: Path) -> None:
    ours, library = open_at(directory / kind, kind), library_processor(directory / kind, kind)
    for size in SIZES:
        if max(size) > 200 * min(size):
            continue
        image = photo(*size)
        text, inputs = library_inputs(library, ours.placeholder, [image])
        shape, tensors = ours.shape(*size, 1), ours.tensors(image, 1)
        ids = tokenizer_of(kind)(text.replace(ours.placeholder, shape.text, 1)).input_ids
        assert ids == inputs["input_ids"][0].tolist()
        assert ids.count(ours.image_id) == shape.num_tokens
        for name, value in tensors.items():
            expected = inputs[name]
            assert torch.equal(value, expected if value.ndim == expected.ndim else expected[0])


def test_a_picture_with_company_is_the_librarys(directory: Path) -> None:
    kind = "llava_onevision"
    ours, library = open_at(directory / kind, kind), library_processor(directory / kind, kind)
    images = [photo(33, 17), photo(5, 9)]
    text, inputs = library_inputs(library, ours.placeholder, images)
    for image, expected in zip(images, inputs["pixel_values"], strict=True):
        assert torch.equal(ours.tensors(image, 2)["pixel_values"], expected)
        assert len(ours.tensors(image, 1)["pixel_values"]) > 1
        text = text.replace(ours.placeholder, "<one>" * ours.shape(*image.size, 2).num_tokens, 1)
    ids = tokenizer_of(kind)(text.replace("<one>", ours.placeholder)).input_ids
    assert ids == inputs["input_ids"][0].tolist()
    assert [k for k in FAMILIES if open_at(directory / k, k).depends_on_count] == [kind]
    with pytest.raises(DataError, match="1x9000 pixels in a row of 2"):
        ours.shape(1, 9000, 2)


@pytest.mark.parametrize("aspect", ["anyres_max_1", "anyres_max_9"])
def test_tiles_lose_and_shrink_as_the_model_does_it(aspect: str, tmp_path: Path) -> None:
    """Features are counted as the model makes them, for shapes that lose all their lines too."""
    kind, points = "llava_onevision", [[8 * i, 8 * j] for i in range(1, 4) for j in range(1, 5)]
    config = vision_config(kind)
    config.image_grid_pinpoints, config.vision_aspect_ratio = points, aspect
    own = {**processor_files(kind)["processor_config.json"], "vision_aspect_ratio": aspect}
    write(tmp_path, kind, {"image_grid_pinpoints": points}, own)
    ours: Any = open_processor(str(tmp_path), config, tokenizer_of(kind))
    pack, model = LlavaOnevisionModel.pack_image_features, SimpleNamespace(config=config)
    for width, height in [*np.random.default_rng(0).integers(1, 60, (60, 2)).tolist(), [1, 9000]]:
        best = transformers.image_processing_utils.select_best_resolution((height, width), points)
        tiles = torch.zeros(1 + best[0] * best[1] // 64, 4, 2)
        features, _ = pack(model, [tiles], [(height, width)], torch.zeros(2), aspect)
        assert ours.shape(width, height, 1).num_tokens == len(features[0]), (width, height)


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_tiles_are_counted_from_the_size_alone(kind: str, is_cut: bool, tmp_path: Path) -> None:
    write(tmp_path, kind, {"do_image_splitting": is_cut})
    ours = open_at(tmp_path, kind)
    for width, height in np.random.default_rng(1).integers(1, 70, (40, 2)).tolist():
        tiles = ours.tensors(Image.new("RGB", (width, height)), 1)["pixel_values"]
        shape = ours.shape(width, height, 1)
        assert shape.num_tokens == shape.text.count("<image>") == 4 * len(tiles), (width, height)


def test_a_grid_is_of_tokens_and_of_a_bounded_shape(directory: Path) -> None:
    ours = open_at(directory / "qwen2_5_vl", "qwen2_5_vl")
    shape, tensors = ours.shape(40, 20, 1), ours.tensors(photo(40, 20), 1)
    assert shape.grid == (1, 2, 5)
    assert shape.num_tokens == 10
    assert tensors["image_grid_thw"].tolist() == [[1, 4, 10]]
    with pytest.raises(DataError, match="1x201 pixels; expected one side at most 200 times"):
        ours.shape(1, 201, 1)


def test_a_model_of_experts_sees_as_its_family(directory: Path) -> None:
    path, config = str(directory / "qwen3_vl"), config_of("qwen3_vl")
    moe = transformers.AutoConfig.for_model(
        "qwen3_vl_moe",
        vision_config={"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=config.image_token_id,
    )
    ours: Any = open_processor(path, moe, tokenizer_of("qwen3_vl"))
    assert ours.identity() == open_at(directory / "qwen3_vl", "qwen3_vl").identity()


def test_words_for_pictures_are_reserved(directory: Path) -> None:
    for kind in FAMILIES:
        ours = open_at(directory / kind, kind)
        assert set(ours.reserved) == set(image_tokens(kind))
        assert ours.placeholder in ours.reserved
        assert ours.is_two_way == (kind == "gemma3")


def test_pictures_of_the_larger_gemma_4_are_refused_and_texts_are_not(directory: Path) -> None:
    kind = "gemma4"
    config = vision_config(kind)
    config.text_config.use_bidirectional_attention = "vision"
    ours: Any = open_processor(str(directory / kind), config, tokenizer_of(kind))
    with pytest.raises(
        ModelError, match="see each other both ways; expected use_bidirectional_attention"
    ):
        ours.shape(8, 8, 1)


def test_padding_which_gemma_4_reads_at_pictures_has_to_be_the_tokenizers(directory: Path) -> None:
    config = vision_config("gemma4")
    config.text_config.pad_token_id = 1
    with pytest.raises(
        ModelError, match=r"pad_token_id is .* in config\.json; expected them to agree"
    ):
        open_processor(str(directory / "gemma4"), config, tokenizer_of("gemma4"))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("least", [16, 640])
def test_a_lower_limit_is_that_of_the_processor_called_alone(
    kind: str, least: int, directory: Path
) -> None:
    """Below the one in the model's files, and above it."""
    path, tokenizer, config = directory / kind, tokenizer_of(kind), config_of(kind)
    ours: Any = open_processor(str(path), config, tokenizer, min_pixels=least)
    load: Any = AutoImageProcessor.from_pretrained
    alone = load(str(path), backend="pil", config=config)
    most = alone.size.longest_edge
    assert ours.identity() != open_at(path, kind).identity()
    changed = 0
    for size in ((3, 5), (16, 16), (40, 20)):
        image = photo(*size)
        limits = {"shortest_edge": least, "longest_edge": most}
        expected = alone(image, size=limits, return_tensors="pt")
        found = ours.tensors(image, 1)
        assert torch.equal(found["pixel_values"], expected["pixel_values"])
        assert found["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
        cells = int(expected["image_grid_thw"].prod()) // 4
        assert ours.shape(*size, 1).num_tokens == cells
        changed += cells != open_at(path, kind).shape(*size, 1).num_tokens
    assert changed


def test_a_lower_limit_that_cannot_be_is_refused(directory: Path) -> None:
    for kind, least, says in (
        ("gemma3", 16, "have no lower limit; expected images.min_pixels unset"),
        ("qwen2_vl", 769, "lower limit of 769 pixels for pictures, and 768"),
    ):
        path = str(directory / kind)
        with pytest.raises(ModelError, match=says):
            open_processor(path, config_of(kind), tokenizer_of(kind), min_pixels=least)


def test_a_text_model_has_none(tmp_path: Path) -> None:
    assert open_processor(str(tmp_path), Qwen2Config(), tokenizer_of("qwen2_vl")) is None


def test_the_files_may_be_one(directory: Path, tmp_path: Path) -> None:
    """The newest form: all in processor_config.json; and a chat template beside it."""
    kind = "internvl"
    files = processor_files(kind)
    images = files["preprocessor_config.json"]
    both = {**files["processor_config.json"], "image_processor": images}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    ours, split = open_at(tmp_path, kind), open_at(directory / kind, kind)
    assert ours.shape(33, 17, 1) == split.shape(33, 17, 1)
    assert (ours.template, split.template) == ("{{ 1 }}", None)


def test_identity_follows_the_settings(directory: Path, tmp_path: Path) -> None:
    first = open_at(directory / "gemma3", "gemma3").identity()
    assert first == open_at(directory / "gemma3", "gemma3").identity()
    write(tmp_path, "gemma3", {"resample": 3})
    assert first != open_at(tmp_path, "gemma3").identity()


def write(path: Path, kind: str, images: dict[str, Any], own: dict[str, Any] | None = None) -> None:
    """A family's files with other settings."""
    save_processor(kind, path)
    settings = {**processor_files(kind)["preprocessor_config.json"], **images}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    if own is not None:
        (path / "processor_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("kind", "images", "own", "message"),
    [
        ("qwen2_vl", {"patch_size": 8}, None, "patch_size is 8 in .* and 4 in config.json"),
        ("qwen3_vl", {"merge_size": 4}, None, "merge_size is 4 in .* and 2"),
        ("qwen3_vl", {"size": {"height": 8, "width": 8}}, None, "expected shortest_edge and"),
        ("qwen2_vl", {"do_resize": False}, None, "do_resize=False in .*; expected True"),
        ("qwen2_vl", {"processor_class": "Qwen3VLProcessor"}, None, "for Qwen3VLProcessor; exp"),
        ("gemma3", {"image_processor_type": "SiglipImageProcessor"}, None, "SiglipImageProcessor"),
        ("gemma3", {"image_processor_type": "NoSuchThing"}, None, "for NoSuchThing; expected"),
        ("gemma3", {"do_pan_and_scan": True}, None, "do_pan_and_scan=True in .*; expected False"),
        ("gemma3", {}, {"image_seq_length": 16}, "image_seq_length is 16 in .* and 9"),
        ("internvl", {"size": {"height": 8, "width": 8}}, None, r"size is \(8, 8\) in .*\(16, 16"),
        ("internvl", {}, {}, "image_seq_length is 256 in .* and 4"),
        ("idefics3", {}, {"image_seq_len": "many"}, "image_seq_len=many in .*expected a number"),
        (
            "smolvlm",
            {"max_image_size": {"longest_edge": 8}},
            None,
            "image_seq_len is 4 in .* and 1",
        ),
        ("smolvlm", {"size": {"height": 8, "width": 8}}, None, "expected longest_edge"),
        ("llava_onevision", {"image_grid_pinpoints": [[8, 8]]}, None, "pinpoints is .* and"),
        ("llava_onevision", {}, {"num_image_tokens": 4}, "strategy is None in .* and full"),
    ],
)
def test_what_does_not_go_together_is_refused(
    kind: str, images: dict[str, Any], own: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path, kind, images, own)
    with pytest.raises(ModelError, match=message):
        open_at(tmp_path, kind)


def test_what_is_missing_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no preprocessor_config.json.*copy"):
        open_at(tmp_path, "qwen2_vl")
    path, config = str(directory / "gemma3"), config_of("gemma3")
    with pytest.raises(ModelError, match="the tokenizer has no boi_token"):
        open_processor(path, config, tokenizer_of("qwen2_vl"))
    with pytest.raises(ModelError, match=r"no token <\|image_pad\|>"):
        open_processor(str(directory / "qwen2_vl"), config_of("qwen2_vl"), tokenizer_of("internvl"))
    other = vision_config("qwen2_vl")
    other.image_token_id = 3
    with pytest.raises(ModelError, match=r"the id of <\|image_pad\|> is \d+ in .* and 3"):
        open_processor(str(directory / "qwen2_vl"), other, tokenizer_of("qwen2_vl"))
    save_processor("qwen2_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be made: .*JSON"):
        open_at(tmp_path, "qwen2_vl")
    unknown = transformers.AutoConfig.for_model("llava")
    with pytest.raises(ModelError, match="is a llava, whose pictures are not supported"):
        open_processor(path, unknown, tokenizer_of("gemma3"))
