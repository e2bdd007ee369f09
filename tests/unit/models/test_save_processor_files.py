"""What describes a model's pictures goes with it, as it is, but for a template that would go before the one in use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.models import tiny_model
from tests.vision_models import vision_config
from tests.vision_processors import save_processor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from taut.errors import OutputError
from taut.models.save import copy_processor


def loaded_from(directory: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config("idefics3"))
    model.name_or_path = str(directory)
    assert isinstance(model, PreTrainedModel)
    return model


def test_files_are_copied_as_they_are(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    save_processor("idefics3", base)
    (base / "chat_template.json").write_text("{}")  # the library would take it for the one in use
    copy_processor(loaded_from(base), out, has_template=True)
    assert {file.name for file in out.iterdir()} == {
        "preprocessor_config.json",
        "processor_config.json",
    }
    for file in out.iterdir():
        assert file.read_bytes() == (base / file.name).read_bytes()


def test_a_template_among_the_settings_stays_behind(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    save_processor("idefics3", base)
    said = json.loads((base / "processor_config.json").read_text())
    (base / "processor_config.json").write_text(json.dumps({**said, "chat_template": "old"}))
    copy_processor(loaded_from(base), out, has_template=True)
    assert json.loads((out / "processor_config.json").read_text()) == said


def test_without_files_nothing_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(OutputError, match=r"base has no preprocessor_config.json any more"):
        copy_processor(loaded_from(tmp_path / "base"), tmp_path, has_template=True)


def test_a_model_that_takes_no_pictures_needs_none(tmp_path: Path) -> None:
    copy_processor(tiny_model("llama"), tmp_path, has_template=True)
    assert not list(tmp_path.iterdir())
