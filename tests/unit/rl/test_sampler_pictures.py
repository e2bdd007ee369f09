"""Pictures in conversations with an environment: in the prompt, and shown between turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.helpers.vision_models import vision_config, vision_tokenizer
from tests.helpers.vision_processors import save_processor
from tests.unit.rl.test_environment import Scripted

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.messages import named
from taut.data.rows.prompts import PromptRow
from taut.inference.settings import Sampling
from taut.rl.environment import EnvironmentPool, Step
from taut.rl.rollout import sample_of
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import EnvironmentConfig
from taut.rl.turns import Bridge
from taut.vision.content import ImageRef
from taut.vision.image_store import ImageStore
from taut.vision.processors import open_processor
from taut.vision.settings import ImagesConfig


def renderer_of(kind: str, directory: Path) -> Renderer:
    tokenizer = vision_tokenizer(kind)
    save_processor(kind, directory)
    processor = open_processor(str(directory), vision_config(kind), tokenizer)
    assert processor is not None
    return Renderer(
        tokenizer, image_store=ImageStore(processor, ImagesConfig(), directory / "cache")
    )


def shown(directory: Path, name: str, size: tuple[int, int], text: str) -> dict[str, Any]:
    path = directory / f"{name}.png"
    Image.new("RGB", size, name).save(path)
    picture = {"type": "image", "image": ImageRef("file", str(path))}
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}


def played(
    renderer: Renderer, asked: dict[str, Any], said: dict[str, Any], **own: Any
) -> Trajectory:
    """Two turns, with ``said`` between them."""
    bridge = Bridge(renderer, derive_stop_set(renderer).ids)

    def step(self: Any, text: str, calls: Any) -> Step:
        return Step(done=True) if text == "Seen." else Step([said])

    environment = type("Shows", (), {"step": step, **own})
    environments = EnvironmentPool(
        EnvironmentConfig(name="own.py:Shows"), environment, bridge, None, (), None, None
    )
    ids_T, media = renderer.prompt_media([asked])
    row = PromptRow("a", "a", ids_T, (asked,), ("5",), "answer", {}, media=media)
    engine = Scripted(renderer, lambda name, index, turn: "Seen." if turn else "Go on.")
    (found,) = sample_trajectories(engine, [row], Sampling(), environments)
    for (last,) in engine.asked[-1:]:
        assert [one.start for one in last.media] == [one.start for one in found.media]
    return found


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_pictures_between_turns_are_where_the_template_has_them(kind: str, tmp_path: Path) -> None:
    renderer = renderer_of(kind, tmp_path)
    asked = shown(tmp_path, "red", (20, 12), "What is it?")
    said = shown(tmp_path, "blue", (12, 24), "And this?")
    found = played(renderer, asked, said)
    turn = {"role": "assistant", "content": "Go on."}
    ids_T, media = renderer.prompt_media([asked, turn, said])
    spelled = found.ids_T[: -len(found.text) - 1].tolist()
    first = found.sampled_at_N[0]
    assert spelled[:first] == ids_T[:first].tolist()
    after = ids_T.size - media[1].start
    assert [one.picture.digest for one in found.media] == [one.picture.digest for one in media]
    assert found.media[1].start == len(spelled) - after
    assert spelled[-after:] == ids_T[-after:].tolist()
    assert sample_of(found).media == found.media


def test_an_environment_may_begin_with_a_picture(tmp_path: Path) -> None:
    renderer = renderer_of("qwen2_vl", tmp_path)
    first = shown(tmp_path, "green", (16, 16), "Which colour?")
    found = played(
        renderer,
        {"role": "user", "content": "What?"},
        {"role": "user", "content": "Look again."},
        reset=lambda self, row: [first],
    )
    ids_T, media = renderer.prompt_media([first])
    assert found.ids_T[: ids_T.size].tolist() == ids_T.tolist()
    assert found.media == media


def test_a_picture_that_changes_those_before_it_is_refused(tmp_path: Path) -> None:
    renderer = renderer_of("llava_onevision", tmp_path)
    asked = shown(tmp_path, "red", (20, 12), "What is it?")
    found = played(renderer, asked, shown(tmp_path, "blue", (12, 24), "And this?"))
    assert found.finish_reason == "error"
    assert found.error is not None
    assert "gets another picture" in found.error


@pytest.mark.parametrize("is_first", [True, False])
def test_a_picture_that_cannot_be_had_is_an_error_of_its_path(
    is_first: bool, tmp_path: Path
) -> None:
    renderer = renderer_of("qwen2_vl", tmp_path)
    asked = {"role": "user", "content": "What?"}
    gone = shown(tmp_path, "red", (20, 12), "And this?")
    (tmp_path / "red.png").unlink()
    own = {"reset": lambda self, row: [gone]} if is_first else {}
    found = played(renderer, asked, gone, **own)
    assert found.finish_reason == "error"
    assert found.error is not None
    assert "there is no file" in found.error


def test_what_was_shown_between_turns_is_told_by_name(tmp_path: Path) -> None:
    renderer = renderer_of("qwen2_vl", tmp_path)
    asked = {"role": "user", "content": "What?"}
    found = played(renderer, asked, shown(tmp_path, "red", (20, 12), "And this?"))
    told = named(found.messages)
    assert [it["content"] for it in told] == [
        "Go on.",
        f"[picture {tmp_path / 'red.png'}]And this?",
        "Seen.",
    ]
