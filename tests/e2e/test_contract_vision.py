"""A model that takes pictures: what is saved is whole, loads with the library's own classes, and is asked about one by
``taut verify``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from tests.helpers.chat_runs import QUIET, events, weights, write_rows
from tests.helpers.vision_models import tiny_vlm
from transformers import AutoModelForImageTextToText, AutoProcessor

import taut
from taut.commands.settings import Verify
from taut.commands.verify import verify
from taut.errors import ModelError
from taut.evals.contract import read_contract
from taut.models.load import quiet_library
from taut_tools.export.export import run
from taut_tools.export.settings import Export


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters on the tower, computed again in backward; and the base it is of."""
    place = tmp_path_factory.mktemp("vision")
    tiny_vlm("idefics3", place / "base")  # the library makes its processor without torchvision
    rows = []
    for number, answer in enumerate(("red", "blue", "green")):
        Image.new("RGB", (20 + 8 * number, 12), answer).save(place / f"{number}.png")
        parts = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "Colour?"}]
        asked = {"role": "user", "content": parts if number else "Is that you?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": answer}]})
    keys = {
        **QUIET,
        "model": place / "base",
        "data.train": write_rows(place / "train.jsonl", rows),
        "out": place / "out",
        "steps": 2,
        "check": "off",
        "dtype": "float32",
        "lora.rank": 2,
        "lora.targets": ["vision_tower", "q_proj"],
        "lora.modules_to_save": ["projector"],
        "activation_checkpointing": True,
    }
    taut.sft(**{key: str(it) if isinstance(it, Path) else it for key, it in keys.items()})
    return place


def test_what_is_saved_is_the_model_and_loads_as_the_librarys(place: Path) -> None:
    model, base = place / "out" / "model", place / "base"
    assert weights(model).keys() == weights(base).keys()
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (model / name).read_bytes() == (base / name).read_bytes()
        assert (place / "out" / "adapter" / name).is_file()
    with quiet_library():
        _, report = AutoModelForImageTextToText.from_pretrained(model, output_loading_info=True)
        processor = AutoProcessor.from_pretrained(model)
    assert not any(report.values())
    assert processor.chat_template == processor.tokenizer.chat_template
    checks = {e["name"]: e["outcome"] for e in events(place / "out", "check")}
    assert {checks[name] for name in ("weights", "merge", "reload", "adapter")} == {"passed"}


def test_golden_prompts_have_drawn_pictures_and_are_asked_again(place: Path) -> None:
    contract = read_contract(place / "out" / "model")
    drawn = [golden.prompt.pictures for golden in contract.goldens]
    assert [len(pictures) for pictures in drawn] == [0, 1, 1]
    assert drawn[1][0] != drawn[2][0]  # the same question of two pictures
    assert all(url.startswith("data:image/png;base64,") for url in (drawn[1][0], drawn[2][0]))
    findings = verify(Verify(model=str(place / "out" / "model")))
    outcomes = {finding.name: finding.outcome for finding in findings}
    assert set(outcomes.values()) == {"passed"}
    assert {"processor", "prompts", "continuations"} <= outcomes.keys()


def test_pictures_that_are_made_otherwise_are_told(place: Path) -> None:
    file = place / "out" / "model" / "preprocessor_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "image_mean": [0.1, 0.1, 0.1]}))
    try:
        findings = verify(Verify(model=str(place / "out" / "model")))
    finally:
        file.write_text(before)
    failed = {finding.name for finding in findings if finding.outcome == "failed"}
    assert {"processor", "logprobs"} <= failed
    assert "prompts" not in failed


def test_gguf_is_refused_by_name(place: Path) -> None:
    with pytest.raises(ModelError, match=r"idefics3.* vision-language"):
        run(Export(model=str(place / "out" / "model"), out=str(place / "m.gguf")))
