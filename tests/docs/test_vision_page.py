"""docs/vision.md: its rows are read as it says, what it lists is all there is, and its template is consistent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from tests.docs.pages import ROOT
from tests.helpers.vision_models import vision_config, vision_tokenizer
from tests.helpers.vision_processors import save_processor
from tests.helpers.vision_templates import LLAVA_ONEVISION

from taut.config import describe
from taut.data.render.render import Renderer, render_any
from taut.data.rows.messages import Conversation
from taut.data.rows.schema import Columns, best_row, read_any
from taut.errors import RenderError
from taut.vision.content import FORMATS
from taut.vision.image_store import ImageStore
from taut.vision.processors import PROCESSORS, open_processor
from taut.vision.settings import ImagesConfig

PAGE = (ROOT / "docs/vision.md").read_text(encoding="utf-8")
ROWS = [json.loads(line) for line in re.findall(r"^    (\{.*\})$", PAGE, re.MULTILINE)]
TEMPLATE = ROOT / "examples/templates/llava_onevision.jinja"
PUBLISHED = LLAVA_ONEVISION.replace("(' ' if message['role'] != 'assistant' else '')", "' '")


def renderer(kind: str, place: Path, template: str | None = None) -> Renderer:
    """As a run has it; the pictures that rows of the page name are drawn beside it."""
    (place / "pics").mkdir()
    for name, size in enumerate([(33, 20), (16, 16), (24, 40)]):
        Image.new("RGB", size, "white").save(place / "pics" / f"{name}.png")
    save_processor(kind, place)
    tokenizer = vision_tokenizer(kind)
    processor = open_processor(str(place), vision_config(kind), tokenizer)
    assert processor is not None
    return Renderer(
        tokenizer, template, image_store=ImageStore(processor, ImagesConfig(), place / "kept")
    )


def test_every_row_of_the_page_is_read_with_all_its_pictures(tmp_path: Path) -> None:
    using = renderer("qwen2_5_vl", tmp_path)
    columns = Columns(folder=str(tmp_path))
    counts = []
    for row in ROWS:
        how = replace(columns, kind="preference") if "chosen" in row else columns
        ((sample, *_),) = render_any([read_any(row, "vision.md:1", how)], using)
        counts.append(len(sample.media))
    assert counts == [1, 2, 1, 1, 1, 1, 2]


def test_what_the_page_shows_is_what_is_read(tmp_path: Path) -> None:
    using = renderer("qwen2_5_vl", tmp_path)
    first = best_row(read_any(ROWS[0], "vision.md:1", Columns(folder=str(tmp_path))))
    (sample,) = using.render(first)
    (media,) = sample.media
    assert f"[0.png: {media.stop - media.start} tokens]" in PAGE
    film = best_row(read_any(ROWS[-1], "vision.md:7", Columns(folder=str(tmp_path))))
    assert isinstance(film, Conversation)
    said = [part.get("text") for part in film.messages[0]["content"]]
    assert [word for word in said if word] == ["<0.0 seconds>", "<0.5 seconds>", "What moves?"]


def test_the_page_names_every_family_setting_and_format() -> None:
    families = PAGE[PAGE.index("| `model_type` |") : PAGE.index("A model of another family")]
    assert set(re.findall(r"`(\w+)`", families)) == {"model_type", *PROCESSORS}
    settings = PAGE[PAGE.index("## Settings") : PAGE.index("## What is held")]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", settings, re.MULTILINE)
    named = {name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)}
    assert named == {row.key.rpartition(".")[2] for row in describe(ImagesConfig)}
    assert set(FORMATS) == set(re.findall(r"PNG|JPEG|WEBP|GIF|BMP|TIFF", PAGE.upper()))


def test_llava_asks_as_it_was_taught_with_the_template_and_as_published(tmp_path: Path) -> None:
    row = best_row(read_any(ROWS[0], "vision.md:1", Columns(folder=str(tmp_path))))
    assert isinstance(row, Conversation)
    given = renderer("llava_onevision", tmp_path, TEMPLATE.read_text(encoding="utf-8"))
    (sample,) = given.render(row)
    learned = sample.ids_T[sample.target_at_N]
    assert given.tokenizer.decode(learned) == "green<|im_end|>"
    published = Renderer(given.tokenizer, PUBLISHED, image_store=given.image_store)
    ids, media = published.prompt_media(row.messages[:1])
    ours, of_ours = given.prompt_media(row.messages[:1])
    assert ids.tolist() == ours.tolist()
    assert [one.start for one in media] == [one.start for one in of_ours]
    with pytest.raises(RenderError, match="not a token prefix"):
        published.render(row)
