"""An image store where the model takes pictures, and models that are to be given the same ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.helpers.tiny_models import save_tiny
from tests.helpers.vision_models import tiny_vlm

from taut.errors import ConfigError, ModelError
from taut.models.load import load_config, load_tokenizer
from taut.vision.image_store import ImageStore, open_image_store, require_same_processor
from taut.vision.settings import ImagesConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_vlm("qwen2_vl", tmp_path_factory.mktemp("opening") / "model"))


def opened(path: str, images: ImagesConfig) -> ImageStore | None:
    return open_image_store(path, load_config(path), load_tokenizer(path), images, Path("cache"))


def test_a_model_that_scales_pictures_in_another_way_is_refused(model: str) -> None:
    image_store, tokenizer = opened(model, ImagesConfig()), load_tokenizer(model)
    assert image_store is not None
    other = f"{model}-other"
    shutil.copytree(model, other)
    require_same_processor(other, load_config(other), tokenizer, image_store, "distill.teacher")
    settings = Path(other) / "preprocessor_config.json"
    changed = json.loads(settings.read_text())
    changed["image_mean"] = [0.1, 0.2, 0.3]
    settings.write_text(json.dumps(changed))
    with pytest.raises(
        ModelError, match=r"distill\.teacher=.*scales or cuts pictures in another way"
    ):
        require_same_processor(other, load_config(other), tokenizer, image_store, "distill.teacher")


def test_a_model_of_text_has_no_image_store_and_no_settings_of_one(
    model: str, tmp_path: Path
) -> None:
    text, tokenizer = tmp_path / "text", load_tokenizer(model)
    save_tiny("llama", text)
    config = load_config(str(text))
    assert open_image_store(str(text), config, tokenizer, ImagesConfig(), tmp_path) is None
    with pytest.raises(
        ConfigError, match=r"data\.images\.allow_urls would be ignored by model=.*no pictures"
    ):
        open_image_store(str(text), config, tokenizer, ImagesConfig(allow_urls=True), tmp_path)
    image_store = opened(model, ImagesConfig())
    assert image_store is not None
    with pytest.raises(ModelError, match=r"reference\.model=.* takes no pictures"):
        require_same_processor(str(text), config, tokenizer, image_store, "reference.model")
