"""Runs on pictures: the same numbers however they are laid out, dealt and interrupted, and what is made of them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import column, events, largest_difference, weights
from tests.helpers.kill_points import point
from tests.helpers.killed_runs import kill, resume, whole
from tests.helpers.picture_runs import QUESTIONS, keys_of, train
from tests.helpers.run_directories import differences, left, require_equal
from tests.helpers.slow_cases import slow_except
from tests.helpers.vision_models import tiny_vlm
from tests.helpers.vision_templates import LLAVA_ONEVISION
from tests.invariants.test_ranks import LIMIT, by_ranks

from taut.cli import main
from taut.errors import ConfigError, PictureError
from taut.models.architecture import part_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model") / "qwen2_5_vl")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def trained(model: Path, place: Path) -> Path:
    """The run that others are compared with."""
    keys = keys_of("sft", model, place, **{"checkpoint.every": 1, "out": str(place / "trained")})
    train(keys)
    return place / "trained"


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"batch.tokens_per_microbatch": 60}),
    ("sft", {"batch.share_prefixes": False}),
    ("dpo", {"batch.share_prefixes": False, "lora.rank": 2}),
    ("kto", {"batch.tokens_per_microbatch": 60}),
    ("reward", {"batch.share_prefixes": False, "batch.tokens_per_microbatch": 60}),
]


@pytest.mark.parametrize(("method", "keys"), slow_except(LAYOUTS[:3], LAYOUTS))
def test_the_layout_changes_nothing(
    method: str, keys: dict[str, Any], model: Path, place: Path, trained: Path, tmp_path: Path
) -> None:
    whole_run, other = trained, tmp_path / "other"
    if method != "sft":
        whole_run = tmp_path / "whole"
        lora = {"lora.rank": keys.get("lora.rank", 0)}
        train(keys_of(method, model, place, **lora, out=str(whole_run)))
    train(keys_of(method, model, place, **keys, out=str(other)))
    assert column(other, "loss") == pytest.approx(column(whole_run, "loss"), abs=1e-9)
    saved = [weights(out / "model") for out in (other, whole_run)]
    assert largest_difference(*saved) < 1e-9
    if method == "dpo":
        assert column(other, "loss")[0] == pytest.approx(math.log(2), abs=1e-12)


def test_parts_train_at_their_own_rates_or_not_at_all(
    model: Path, place: Path, tmp_path: Path
) -> None:
    given = {
        "freeze": ["vision_tower"],
        "optim.group_learning_rates": {"projector": 0.1},
        "steps": 1,
    }
    train(keys_of("sft", model, place, **given, out=str(tmp_path)))
    before, after = weights(model), weights(tmp_path / "model")
    moved: dict[str, float] = {}
    for name, tensor in after.items():
        part = str(part_of(name))
        step = float((tensor - before[name].to(tensor.dtype)).abs().max())
        moved[part] = max(moved.get(part, 0.0), step)
    assert moved["vision_tower"] == 0
    assert moved["projector"] == pytest.approx(0.1, rel=1e-3)
    assert moved["language_model"] == pytest.approx(1e-3, rel=1e-3)


STEPS = {"steps": 3, "checkpoint.every": 1, "checkpoint.background": False}
KILLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": (
        "sft",
        "forward",
        {
            "lora.rank": 2,
            "lora.targets": ["vision_tower", "q_proj"],
            "eval.answers.every": 1,
            "eval.answers.rewards": ["exact_match"],
            "eval.answers.sampling.max_new_tokens": 3,
            "contract.prompts": 1,
            "contract.max_new_tokens": 3,
        },
    ),
    "grpo": (
        "grpo",
        "update",
        {"rollout.minibatches": 2, "rollout.replay_groups": 2, "dtype": "float32"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_equals_uninterrupted(
    name: str, model: Path, place: Path, tmp_path: Path
) -> None:
    method, operation, given = KILLED[name]
    keys = keys_of(method, model, place, **given, **STEPS)
    if method == "sft":
        keys["data.eval"] = keys["data.train"]
    operations = whole(tmp_path / "whole", keys)
    wanted = left(tmp_path / "whole")
    kill(tmp_path / "out", keys, point(operations, operation, 0.6))
    resume(tmp_path / "out", keys)
    require_equal(tmp_path / "out", wanted)
    assert events(tmp_path / "out", "resume")[-1]["from_step"] > 0


@pytest.mark.slow
def test_recorded_rollouts_about_pictures_are_trained_on_again(model: Path, tmp_path: Path) -> None:
    """By one process to the bit, by two ranks to rounding, and not about pictures that were changed."""
    keys = keys_of("grpo", model, tmp_path / "data", out=str(tmp_path / "first"))
    train(keys)
    again = {**keys, "rollout.replay_from": keys["out"]}
    train({**again, "out": str(tmp_path / "again")})
    assert not differences(left(tmp_path / "again"), left(tmp_path / "first"))
    by_ranks(tmp_path, [{**again, "out": str(tmp_path / "two")}])
    folders = [tmp_path / name / "model" for name in ("two", "first")]
    assert largest_difference(*map(weights, folders)) < LIMIT
    shutil.copy(tmp_path / "data/2.png", tmp_path / "data/0.png")
    with pytest.raises(PictureError, match=r"0\.png was changed since the data were read"):
        train({**again, "out": str(tmp_path / "third")})


def test_no_run_goes_on_with_another_picture(
    model: Path, trained: Path, place: Path, tmp_path: Path
) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    keys = keys_of("sft", model, data, **{"checkpoint.every": 1, "out": str(out)})
    train(keys)
    first = (data / "1.png").read_bytes()
    shutil.copy(data / "2.png", data / "1.png")
    longer = {**keys, "steps": 3, "resume": True}
    with pytest.raises(ConfigError, match=r"another run: data .*other content"):
        train(longer)
    (data / "1.png").write_bytes(first)
    train(longer)
    assert column(out, "loss")[:2] == column(trained, "loss")


def test_a_checked_run_is_verified_until_its_pictures_are_cut_otherwise(
    model: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"check": "quick", "contract.prompts": 2, "contract.max_new_tokens": 3, "steps": 1}
    out = tmp_path / "out"
    train(keys_of("sft", model, place, **given, out=str(out)))
    told = {event["name"]: event["outcome"] for event in events(out, "check")}
    assert told["vision.swapped"] == told["vision.neighbor"] == "passed"
    words = ["verify", str(out / "model"), "--device", "cpu", "dtype=float64"]
    assert main(words) == 0
    described = out / "model" / "preprocessor_config.json"
    found = json.loads(described.read_text())
    described.write_text(json.dumps({**found, "image_mean": [0.1, 0.2, 0.3]}))
    capsys.readouterr()
    assert main(words) == 1
    assert "failed  processor" in capsys.readouterr().out


ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "templates" / "llava_onevision.jinja"


def test_llava_answers_where_it_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published template is refused; the one of the examples differs from it in that alone."""
    published = LLAVA_ONEVISION.replace("(' ' if message['role'] != 'assistant' else '')", "' '")
    assert published != LLAVA_ONEVISION
    (tmp_path / "published.jinja").write_text(published)
    keys = keys_of("sft", tiny_vlm("llava_onevision", tmp_path / "model"), tmp_path / "data")
    words = ["show", f"model={keys['model']}", f"data.train={keys['data.train']}", "steps=1"]
    assert main([*words, f"data.template={tmp_path / 'published.jinja'}"]) == 2
    assert "is not a token prefix of the row" in capsys.readouterr().err
    assert main([*words, f"data.template={TEMPLATE}"]) == 0
    assert "<|im_start|>assistant" in capsys.readouterr().out


def test_a_picture_in_rows_of_tiles_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of("sft", tiny_vlm("smolvlm", tmp_path / "model"), tmp_path / "data")
    words = ["show", f"model={keys['model']}", f"data.train={keys['data.train']}", "steps=1"]
    assert main(words) == 0
    assert capsys.readouterr().out.count("[0.png:") == len(QUESTIONS)
