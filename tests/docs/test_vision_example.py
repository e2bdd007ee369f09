"""The example with pictures and the benchmark with pictures: what they begin with, and what is made of numbers."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.test_learning import load
from transformers import AutoModelForImageTextToText, AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vision"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    module = load(EXAMPLE / "make.py")
    module.COUNTS = {"train": 12, "eval": 8}
    return module


@pytest.fixture(scope="module")
def made(make: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    make.main(directory)
    return directory


def test_pictures_have_four_questions_and_are_in_one_file_only(made: Path) -> None:
    seen = {}
    for name, count in (("train", 12), ("eval", 8)):
        rows = [json.loads(line) for line in (made / f"{name}.jsonl").read_text().splitlines()]
        places = Counter(row["messages"][0]["content"][0]["image"] for row in rows)
        assert list(places.values()) == [4] * count
        seen[name] = {(made / place).read_bytes() for place in places}
        assert len(seen[name]) == count
    assert not seen["train"] & seen["eval"]


def test_the_same_seed_gives_the_same_pictures(make: ModuleType) -> None:
    def drawn() -> list[object]:
        draw = random.Random(1)
        scenes = [make.make_scene(draw) for _ in range(3)]
        return [(make.paint(s, draw).tobytes(), make.questions(s, draw)) for s in scenes]

    assert drawn() == drawn()


def test_a_guess_is_right_as_often_as_is_said(make: ModuleType) -> None:
    expected = json.loads((EXAMPLE / "expected.json").read_text())
    draw = random.Random(2)
    kinds: list[Counter[str]] = [Counter() for _ in range(4)]
    for _ in range(2000):
        for kind, (_, answer) in zip(
            kinds, make.questions(make.make_scene(draw), draw), strict=True
        ):
            kind[answer] += 1
    share = [max(kind.values()) / 2000 for kind in kinds]
    assert share == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1 / 2], abs=0.04)
    assert sum(share) / 4 == pytest.approx(expected["chance"], abs=0.03)


def test_the_model_is_small_and_its_words_are_tokens(made: Path, make: ModuleType) -> None:
    model = AutoModelForImageTextToText.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert model.config.text_config.vocab_size == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids(make.IMAGE) == model.config.image_token_id
    line = (made / "train.jsonl").read_text().splitlines()[3]
    text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) < 20


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("vision")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_rows_of_the_benchmark_have_a_token_for_each_square_of_a_picture(
    vision: ModuleType,
) -> None:
    rows = vision.make_rows(3, (2, 4))
    assert rows == vision.make_rows(3, (2, 4))
    assert [row.picture for row in rows] == [
        f"{number}.jpg" for number in range(3) for _ in range(4)
    ]
    for row in rows:
        mark = sys.modules["pictures"].IMAGE
        assert row.ids.count(mark) == row.size[0] * row.size[1]
        assert row.ids[-row.num_targets :] == (*row.answer, 2)
    found = vision.describe(rows)
    assert (found["samples"], found["pictures"]) == (12, 3)


def test_the_target_is_the_fastest_mode_and_only_equal_losses_are_right(vision: ModuleType) -> None:
    def line(speed: float, *losses: float) -> dict[str, object]:
        cost = {"step_cpu_seconds": 1 / speed, "peak_mb": 100.0, "is_in_state": True}
        return {"samples_per_second": speed, "losses": list(losses), **cost}

    table = {
        "taut shared": line(10.4, 9.0, 0.5),
        "taut unshared": line(3.0, 9.0, 0.6),
        "trl batch": line(1.0, 9.0, 0.5),
        "trl accumulated": line(2.0, 9.1, 0.51),
    }
    vision.compare(table, 1e-4)
    assert not table["taut shared"]["is_wrong"]
    assert table["taut unshared"]["is_wrong"]
    assert not table["trl accumulated"]["is_wrong"]
    ratios = {one["to"]: one for one in vision.ratios(table)}
    assert ratios["trl accumulated"]["is_goal"]
    assert ratios["trl accumulated"]["speed"] == pytest.approx(5.2)
    assert ratios["trl accumulated"]["is_met"]
    lines = {"ratios": list(ratios.values()), "memory": None}
    assert vision.has_missed({"contenders": table, **lines})
