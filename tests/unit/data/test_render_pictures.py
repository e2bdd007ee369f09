"""Pictures in rows: written in words, found among the ids, never learned or mistaken for one another."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers.counted_pictures import (
    TEMPLATES,
    WORDS,
    chat,
    learned,
    picture,
    renderer,
    said,
    spans,
    text,
)
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.helpers.vision_models import FAMILIES, vision_config, vision_tokenizer
from tests.helpers.vision_processors import save_processor

from taut.data.render.render import Renderer
from taut.data.rows.messages import Completion, Conversation, Document, images_of
from taut.data.settings import Targets
from taut.errors import RenderError
from taut.vision.content import ImageRef
from taut.vision.image_store import ImageStore, open_image_store
from taut.vision.settings import ImagesConfig


def dialogue(tmp_path: Path, scale: int = 1) -> Conversation:
    one = picture(tmp_path, "one", 4 * scale, 4 * scale)
    two = picture(tmp_path, "two", 6 * scale, 2 * scale, 9)
    return chat(
        said("system", "you are a cat"),
        said("user", one, "what is this?", two),
        said("assistant", "a dog"),
        said("user", "and this?"),
        said("assistant", "a bird"),
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_picture_lies_where_its_placeholder_was(tmp_path: Path, name: str) -> None:
    using, row = renderer(tmp_path, name), dialogue(tmp_path)
    (sample,) = using.render(row)
    processor = using.image_store.processor  # type: ignore[union-attr]
    first, second = sample.media
    at = np.flatnonzero(sample.ids_T == processor.image_id)
    assert len(at) == 4 + 3
    assert (first.start, first.stop) == (at[0], at[3] + 1)
    assert (second.start, second.stop) == (at[4], at[6] + 1)
    assert first.picture.source.endswith("one.png")
    assert second.picture.source.endswith("two.png")
    assert first.picture.tensors()["pixels"].shape == (4, 4, 3)
    grid = (1, 1, 3) if name == "qwen2_vl" else None
    assert second.grid == grid
    end = "<end_of_utterance>" if name == "idefics" else "<|im_end|>"
    lead = " " if name == "idefics" else "\n" if name == "llava" else ""
    expected = f"{lead}a dog{end}{lead}a bird{end}"
    assert learned(using, sample).replace("\n\n", "\n") in (expected, expected.replace("\n", ""))
    assert "what is this?" in using.template.decode(sample.ids_T.tolist())


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_familys_words_are_found_among_its_ids(tmp_path: Path, kind: str) -> None:
    save_processor(kind, tmp_path)
    tokenizer = vision_tokenizer(kind)
    image_store = open_image_store(
        str(tmp_path), vision_config(kind), tokenizer, ImagesConfig(), tmp_path
    )
    assert image_store is not None
    using, row = (
        Renderer(tokenizer, None, "assistant", image_store=image_store),
        dialogue(tmp_path, scale=6),
    )
    (sample,) = using.render(row)
    at = np.flatnonzero(sample.ids_T == image_store.processor.image_id)
    first, second = sample.media
    seen = [image_store.see(ref, "here") for ref in images_of(row.messages)]
    shapes = [image_store.shape(one, 2) for one in seen]
    assert at.size == sum(shape.num_tokens for shape in shapes)
    assert (first.start, second.stop) == (at[0], at[-1] + 1)
    assert first.stop == at[shapes[0].num_tokens - 1] + 1 <= second.start
    assert sample.ids_T[sample.target_at_N[-1]] == tokenizer.eos_token_id
    _, media = using.prompt_media(row.messages[:2])
    assert media == sample.media


def test_the_words_of_a_picture_are_written_before_the_text_is_tokenized(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    (sample,) = using.render(
        chat(said("user", picture(tmp_path, "one"), "cat"), said("assistant", "dog"))
    )
    words = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>cat"
    assert words in using.template.decode(sample.ids_T.tolist())


def test_a_prefix_counts_the_pictures_of_the_whole_row(tmp_path: Path) -> None:
    using = renderer(tmp_path, "internvl")
    asked = [said("user", picture(tmp_path, f"{n}", color=n), f"cat {n}") for n in range(3)]
    answers = [said("assistant", "dog") for _ in asked]
    row = chat(*(message for pair in zip(asked, answers, strict=True) for message in pair))
    (sample,) = using.render(row)
    assert [one.stop - one.start for one in sample.media] == [1, 1, 1]
    assert [one.picture.num_pictures for one in sample.media] == [3, 3, 3]
    ids_T, media = using.prompt_media(row.messages[:1])
    assert [one.stop - one.start for one in media] == [5]  # two rows of two, and what divides them
    assert media[0].picture.digest != sample.media[0].picture.digest
    assert using.template.decode(ids_T.tolist()).count("<image>") == 4


def test_a_sample_for_each_turn_has_the_pictures_before_its_end(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    forgetful = TEMPLATES["qwen2_vl"].replace(
        "{{ message['content'] }}<|im_end|>",
        "{{ message['content'] if message['role'] == 'user' or loop.last else 'so' }}<|im_end|>",
    )
    using = Renderer(using.tokenizer, forgetful, image_store=using.image_store)
    one, two = picture(tmp_path, "one"), picture(tmp_path, "two", color=5)
    row = chat(
        said("user", one, "cat"),
        said("assistant", "dog"),
        said("user", two),
        said("assistant", "bird"),
    )
    first, second = using.render(row)
    assert [first.id, second.id] == ["f.jsonl:1#1", "f.jsonl:1#2"]
    assert [len(first.media), len(second.media)] == [1, 2]
    assert first.media == second.media[:1]


@pytest.mark.parametrize("targets", ["assistant", "all"])
def test_no_token_of_a_picture_is_learned(tmp_path: Path, targets: Targets) -> None:
    using = renderer(tmp_path, "internvl", targets)
    row = chat(
        said("user", picture(tmp_path, "one"), "cat"),
        said("assistant", "so", picture(tmp_path, "two")),
    )
    (sample,) = using.render(row)
    assert len(sample.media) == 2
    inside = {at for one in sample.media for at in range(one.start, one.stop)}
    assert not inside & set(sample.target_at_N.tolist())
    words = learned(using, sample)
    assert not any(word in words for word in WORDS["<image>"])
    assert ("cat" in words) == (targets == "all")
    assert words.replace("\n", "").endswith("so<|im_end|>")


@pytest.mark.parametrize(
    "row",
    [
        chat(said("user", "what is <|image_pad|>?"), said("assistant", "dog")),
        chat(said("user", "cat"), said("assistant", "<|vision_start|>")),
        chat(said("user", text("<|image"), text("_pad|>")), said("assistant", "dog")),
        chat(said("user", "cat"), {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": ["<|image_pad|>"]}}}
        ]}),
        Document("f.jsonl:1", "a <|image_pad|> b"),
        Completion("f.jsonl:1", "a", "<|vision_end|>"),
    ],
)  # fmt: skip
def test_no_text_may_stand_for_a_picture(
    tmp_path: Path, row: Conversation | Document | Completion
) -> None:
    with pytest.raises(RenderError, match=r"^f\.jsonl:1: .* has '<\|.*\|>', which stands for pict"):
        renderer(tmp_path).render(row)


def test_a_text_that_becomes_a_picture_when_it_is_normalized_is_found(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    using.template.pictures.image_store.processor.image_id = using.tokenizer.encode("cat")[0]  # type: ignore[union-attr]
    with pytest.raises(
        RenderError, match=r"f\.jsonl:1: the row has 1 placeholders and features for 0"
    ):
        using.render(chat(said("user", "cat"), said("assistant", "dog")))


def test_a_template_writes_one_placeholder_for_each_picture(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    row = chat(said("user", picture(tmp_path, "one"), "cat"), said("assistant", "dog"))
    for template, found in (
        (TEMPLATES["qwen2_vl"].replace("<|image_pad|>", ""), 0),
        (TEMPLATES["qwen2_vl"].replace("<|image_pad|>", "<|image_pad|>" * 2), 2),
    ):
        other = Renderer(using.tokenizer, template, image_store=using.image_store)
        with pytest.raises(
            RenderError, match=rf"f\.jsonl:1: .* writes {found} placeh.* for 1 pict"
        ):
            other.render(row)


def test_a_model_without_pictures_takes_none(tmp_path: Path) -> None:
    row = chat(said("user", "cat", picture(tmp_path, "one")), said("assistant", "dog"))
    with pytest.raises(
        RenderError, match=r"f\.jsonl:1: messages\[0\]\.content\[1\] is a picture, and"
    ):
        Renderer(tiny_tokenizer()).render(row)


def test_a_template_of_lists_is_given_lists() -> None:
    tokenizer = tiny_tokenizer()
    row = chat(said("user", "cat"), said("assistant", "dog"))
    plain = Renderer(tokenizer)
    assert plain.template.takes_strings
    lists = tokenizer.chat_template.replace("message['content']", "message['content'][0]['text']")
    other = Renderer(tokenizer, lists)
    assert not other.template.takes_strings
    assert other.render(row)[0].ids_T.tolist() == plain.render(row)[0].ids_T.tolist()


def test_the_processors_template_goes_before_the_tokenizers(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    using.image_store.processor.template = TEMPLATES["qwen2_vl"].replace("a helpful", "no")  # type: ignore[union-attr]
    (sample,) = Renderer(using.tokenizer, image_store=using.image_store).render(
        chat(said("user", "cat"), said("assistant", "dog"))
    )
    assert "You are no assistant" in using.template.decode(sample.ids_T.tolist())


def test_a_picture_in_many_rows_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    using, part, read = renderer(tmp_path), picture(tmp_path, "one"), []
    look = ImageStore._look
    monkeypatch.setattr(
        ImageStore, "_look", lambda self, ref: (read.append(ref), look(self, ref))[1]
    )
    rows = [
        chat(said("user", part, f"cat {n}"), said("assistant", "dog"), place=f"f:{n}")
        for n in range(5)
    ]
    samples = [sample for (sample,) in using.render_all(rows)]
    assert len(read) == 1
    assert len({sample.media[0].picture.digest for sample in samples}) == 1
    assert spans(samples[0].media) == spans(samples[4].media)


def test_identity_follows_the_image_store(tmp_path: Path) -> None:
    using, larger = renderer(tmp_path), renderer(tmp_path, max_pixels=9)
    assert using.identity() != larger.identity()
    assert using.identity() != Renderer(using.tokenizer).identity()


def test_bytes_are_a_picture_too(tmp_path: Path) -> None:
    using, buffer = renderer(tmp_path), BytesIO()
    Image.new("RGB", (4, 2)).save(buffer, "PNG")
    part = {"type": "image", "image": ImageRef("bytes", buffer.getvalue())}
    _, media = using.prompt_media([said("user", part, "cat")])
    assert media[0].grid == (1, 1, 2)
    assert Path(media[0].picture.source).read_bytes() == buffer.getvalue()
