"""Pictures in rows: written in words, found among the ids, never learned, cut or mistaken for one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import vision_templates as templates
from tests.chats import write_rows
from tests.tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.data.answers import fit_any, render_any, render_each
from taut.data.attempts import attempt_rows
from taut.data.columns import Columns
from taut.data.dataset import DataConfig
from taut.data.formats import Completion, Conversation, Document, Message
from taut.data.length import Limits
from taut.data.preferences import Answers, Stepwise
from taut.data.prompt_set import Asking, load_prompt_set
from taut.data.prompts import load_prompts
from taut.data.render import Renderer, Targets
from taut.data.sources import Source, open_source
from taut.errors import DataError, PictureError, RenderError
from taut.types import Media, Sample
from taut.vision.album import Album
from taut.vision.picture import ImageRef, ImagesConfig
from taut.vision.processor import Shape

WORDS = {
    "<image>": ("<image>", "<fake_token_around_image>", "<row>"),
    "<|image_pad|>": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
TEMPLATES = {
    "qwen2_vl": templates.QWEN2_VL,
    "idefics": "{{ bos_token }}" + templates.IDEFICS3.removeprefix("<|begin_of_text|>"),
    "llava": templates.LLAVA_ONEVISION.replace("message['role'] + ' '", "message['role']"),
    "internvl": templates.INTERNVL.replace("<IMG_CONTEXT>", "<image>"),
}


class Tiles:
    """A processor: a token for each 2x2 pixels, in rows; in company, one for the whole."""

    is_two_way, minds_company, template = False, True, None

    def __init__(self, placeholder: str, image_id: int) -> None:
        self.placeholder, self.image_id = placeholder, image_id
        self.reserved = WORDS[placeholder]

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        if width < 2:
            raise DataError(f"the picture is {width}x{height}; expected 2 pixels or more")
        if self.placeholder == "<|image_pad|>":
            grid = (1, height // 2, width // 2)
            return Shape(self.placeholder * (grid[1] * grid[2]), grid[1] * grid[2], grid)
        edge = "<fake_token_around_image>"
        if num_pictures > 2:
            return Shape(f"{edge}<image>{edge}", 1)
        rows = "".join("<row>" + "<image>" * (width // 2) for _ in range(height // 2))
        return Shape(edge + rows + edge, (width // 2) * (height // 2))

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, torch.Tensor]:
        return {"pixels": torch.from_numpy(np.array(image))}

    def identity(self) -> str:
        return f"tiles {self.placeholder}"


def renderer(
    directory: Path, template: str = "qwen2_vl", targets: Targets = "assistant", **keys: Any
) -> Renderer:
    placeholder = "<|image_pad|>" if template == "qwen2_vl" else "<image>"
    ends = ["<end_of_utterance>"] if template == "idefics" else []
    tokenizer = tiny_tokenizer("chatml", eos=ends[0] if ends else None)
    words = [*WORDS[placeholder], *ends]
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": words})
    tokenizer.chat_template = TEMPLATES[template]
    processor = Tiles(placeholder, tokenizer.convert_tokens_to_ids(placeholder))
    album = Album(processor, ImagesConfig(**keys), directory / "blobs")
    return Renderer(tokenizer, None, targets, album=album)


def picture(
    directory: Path, name: str, width: int = 4, height: int = 4, colour: int = 0
) -> Message:
    path = directory / f"{name}.png"
    Image.new("RGB", (width, height), (colour, 0, 0)).save(path)
    return {"type": "image", "image": ImageRef("file", str(path))}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def said(role: str, *parts: str | Message) -> Message:
    if all(isinstance(part, str) for part in parts):
        return {"role": role, "content": "".join(parts)}  # type: ignore[arg-type]
    return {"role": role, "content": [text(p) if isinstance(p, str) else p for p in parts]}


def chat(*messages: Message, place: str = "f.jsonl:1") -> Conversation:
    learned = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return Conversation(place, tuple(messages), tuple(learned))


def learned(using: Renderer, sample: Sample) -> str:
    return using.template.decode(sample.ids_T[sample.target_at_N].tolist())


def spans(media: Sequence[Media]) -> list[tuple[int, int]]:
    return [(one.start, one.stop) for one in media]


def dialogue(tmp_path: Path) -> Conversation:
    one, two = picture(tmp_path, "one"), picture(tmp_path, "two", 6, 2, 9)
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
    processor = using.album.processor  # type: ignore[union-attr]
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


def test_the_words_of_a_picture_are_written_before_the_text_is_tokenised(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    (sample,) = using.render(
        chat(said("user", picture(tmp_path, "one"), "cat"), said("assistant", "dog"))
    )
    words = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>cat"
    assert words in using.template.decode(sample.ids_T.tolist())


def test_a_prefix_counts_the_pictures_of_the_whole_row(tmp_path: Path) -> None:
    using = renderer(tmp_path, "internvl")
    asked = [said("user", picture(tmp_path, f"{n}", colour=n), f"cat {n}") for n in range(3)]
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
    using = Renderer(using.tokenizer, forgetful, album=using.album)
    one, two = picture(tmp_path, "one"), picture(tmp_path, "two", colour=5)
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


def test_a_text_that_becomes_a_picture_when_it_is_normalised_is_found(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    using.template.pictures.album.processor.image_id = using.tokenizer.encode("cat")[0]  # type: ignore[union-attr]
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
        other = Renderer(using.tokenizer, template, album=using.album)
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
    using.album.processor.template = TEMPLATES["qwen2_vl"].replace("a helpful", "no")  # type: ignore[union-attr]
    (sample,) = Renderer(using.tokenizer, album=using.album).render(
        chat(said("user", "cat"), said("assistant", "dog"))
    )
    assert "You are no assistant" in using.template.decode(sample.ids_T.tolist())


def test_a_picture_in_many_rows_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    using, part, read = renderer(tmp_path), picture(tmp_path, "one"), []
    look = Album._look
    monkeypatch.setattr(Album, "_look", lambda self, ref: (read.append(ref), look(self, ref))[1])
    rows = [
        chat(said("user", part, f"cat {n}"), said("assistant", "dog"), place=f"f:{n}")
        for n in range(5)
    ]
    samples = [sample for (sample,) in using.render_all(rows)]
    assert len(read) == 1
    assert len({sample.media[0].picture.digest for sample in samples}) == 1
    assert spans(samples[0].media) == spans(samples[4].media)


def test_rows_without_their_picture_are_told_from_the_others(tmp_path: Path) -> None:
    using, good = renderer(tmp_path), picture(tmp_path, "one")
    gone = {"type": "image", "image": ImageRef("file", str(tmp_path / "gone.png"))}
    thin = picture(tmp_path, "thin", 1, 1)
    rows = [
        chat(said("user", part, "cat"), said("assistant", "dog"), place=f"f.jsonl:{n}")
        for n, part in enumerate((good, gone, good, thin, gone))
    ]
    found = render_each(rows, using)
    assert [isinstance(one, PictureError) for one in found] == [False, True, False, True, True]
    assert [str(found[n]).partition(" ")[0] for n in (1, 3, 4)] == [
        f"f.jsonl:{n}:" for n in (1, 3, 4)
    ]
    assert "messages[0].content[0]: the picture is 1x1; expected 2 pixels" in str(found[3])
    with pytest.raises(PictureError, match=r"f\.jsonl:1: messages\[0\]\.content\[0\]: .*gone\.png"):
        render_any(rows, using)


def test_checks_go_on_past_pictures_that_are_gone(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    picture(tmp_path, "one")
    names = [str(tmp_path / name) for name in ("one.png", "gone.png", "one.png")]
    asked = [{"type": "image", "image": name} for name in names]
    rows = [{"messages": [said("user", it, "cat"), said("assistant", "dog")]} for it in asked]
    rows[2]["messages"][0]["content"][1]["text"] = "<|image_pad|>"  # type: ignore[index]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = open_source(Source(path=str(path)))
    attempts = attempt_rows(found, Columns(), using, Limits(100))
    errors = [attempt.error for attempt in attempts]
    assert errors[0] is None
    assert isinstance(errors[1], PictureError)
    assert isinstance(errors[2], RenderError)


@pytest.mark.parametrize(("most", "num_pictures"), [(-1, 2), (-2, 1)])
def test_a_cut_spares_pictures(tmp_path: Path, most: int, num_pictures: int) -> None:
    using = renderer(tmp_path)
    one, two = picture(tmp_path, "one"), picture(tmp_path, "two")
    (sample,) = using.render(
        chat(
            said("user", one),
            said("assistant", "dog"),
            said("user", two),
            said("assistant", "bird"),
        )
    )
    first, second = sample.media
    limits = Limits(second.stop if most == -1 else second.stop - 1, "truncate")
    (short,), (incident,) = fit_any(chat(), [sample], limits)
    assert short.num_tokens == (second.stop if most == -1 else second.start)
    assert short.media == sample.media[:num_pictures]
    assert learned(using, short) == "dog<|im_end|>"
    assert incident.targets_lost == sample.num_targets - short.num_targets > 0
    assert ("in a picture" in incident.reason) == (most == -2)
    (nothing, (dropped,)) = fit_any(chat(), [sample], Limits(first.stop - 1, "truncate"))
    assert not nothing
    assert dropped.reason.endswith("no target left")


def test_answers_end_at_their_end_and_differ_by_their_pictures(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    one, two = picture(tmp_path, "one"), picture(tmp_path, "two", colour=5)

    def answer(part: Message, number: int) -> Conversation:
        messages = (said("user", part, "cat"), said("assistant", "dog"), said("user", part))
        return replace(chat(*messages), place=f"f.jsonl:1#{number}")

    answers = Answers("f.jsonl:1", (answer(one, 1), answer(two, 2)), {"preference": (1.0, 0.0)})
    (samples,) = render_any([answers], using)
    assert [len(sample.media) for sample in samples] == [1, 1]
    assert np.array_equal(samples[0].ids_T, samples[1].ids_T)
    assert fit_any(answers, samples, Limits(100))[0] == samples
    same = replace(answers, answers=(answer(one, 1), answer(one, 2)))
    (samples,) = render_any([same], using)
    with pytest.raises(DataError, match="answers 1 and 2 are the same, token for token"):
        fit_any(same, samples, Limits(100))


def test_steps_are_read_after_a_picture(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    answer = chat(
        said("user", picture(tmp_path, "one"), "cat"), said("assistant", "the cat\nthe dog")
    )
    ((sample,),) = render_any([Stepwise("f.jsonl:1", answer, ((0, 7), (8, 15)), (1.0, 0.0))], using)
    assert sample.read_at_R is not None
    ends = [using.template.decode(sample.ids_T[: at + 1].tolist()) for at in sample.read_at_R]
    assert [end.rpartition("assistant\n")[2] for end in ends] == ["the cat", "the cat\nthe dog"]
    assert len(sample.media) == 1


def test_what_is_asked_has_its_pictures(tmp_path: Path) -> None:
    using = renderer(tmp_path, bad="drop")
    for name, colour in (("one", 0), ("two", 7)):
        picture(tmp_path, name, colour=colour)
    names = [str(tmp_path / name) for name in ("one.png", "gone.png", "two.png")]
    names.append("data:image/png;base64,no")
    asked = [
        {"messages": [said("user", {"type": "image", "image": name}, "cat")], "answer": "dog"}
        for name in names
    ]
    path = write_rows(tmp_path / "rows.jsonl", asked)
    with pytest.raises(PictureError, match=r"rows\.jsonl:2: messages\[0\]\.content\[0\]: .*gone"):
        load_prompts(str(path), using, limit=3)
    config = from_mapping(DataConfig, {"train": str(path)})
    found = load_prompt_set(config, "train", using, Asking(40))
    assert [incident.place for incident in found.report.dropped] == [f"{path}:2", f"{path}:4"]
    assert "content[0]: " in found.report.dropped[0].reason
    prompts = found.prompts()
    assert np.array_equal(prompts[0].ids_T, prompts[1].ids_T)
    assert prompts[0].media[0].picture.digest != prompts[1].media[0].picture.digest
    assert [sample.media for sample in found] == [prompt.media for prompt in prompts]
    (one,) = found[0].media
    assert not {*range(one.start, one.stop)} & {*found[0].target_at_N.tolist()}
    again = load_prompt_set(config, "train", using, Asking(40))
    assert again.parts[0].key == found.parts[0].key


def test_identity_follows_the_album(tmp_path: Path) -> None:
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
