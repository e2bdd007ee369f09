"""Rows with pictures on their way to samples: left out, cut, judged and asked."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import write_rows
from tests.helpers.counted_pictures import chat, learned, picture, renderer, said

from taut.config import from_mapping
from taut.data.read.sources import open_source
from taut.data.render import images
from taut.data.render.render import Limits, fit_any, render_any, render_each
from taut.data.rows.messages import Conversation, Message, images_of
from taut.data.rows.prompts import load_prompt_set, load_prompts
from taut.data.rows.schema import Answers, Columns, Stepwise
from taut.data.settings import DataConfig, Source
from taut.data.tokenize import attempt_rows
from taut.errors import DataError, PictureError, RenderError
from taut.vision.content import ImageRef


def test_rows_without_their_picture_are_told_from_the_others(tmp_path: Path) -> None:
    using, good = renderer(tmp_path), picture(tmp_path, "one")
    gone = {"type": "image", "image": ImageRef("file", str(tmp_path / "gone.png"))}
    thin = picture(tmp_path, "thin", 1, 1)
    rows = [
        chat(said("user", part, "cat"), said("assistant", "dog"), place=f"f.jsonl:{n}")
        for n, part in enumerate((good, gone, good, thin, gone))
    ]
    found = render_each(rows, using, (PictureError,))
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
    one, two = picture(tmp_path, "one"), picture(tmp_path, "two", color=5)

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
    for name, color in (("one", 0), ("two", 7)):
        picture(tmp_path, name, color=color)
    names = [str(tmp_path / name) for name in ("one.png", "gone.png", "two.png")]
    names.append("data:image/png;base64,no")
    asked = [
        {"messages": [said("user", {"type": "image", "image": name}, "cat")], "answer": "dog"}
        for name in names
    ]
    path = write_rows(tmp_path / "rows.jsonl", asked)
    with pytest.raises(
        PictureError,
        match=r"rows\.jsonl:2: messages\[0\]\.content\[0\]: .*gone.*data\.images\.bad=drop",
    ):
        load_prompts(str(path), using, limit=3)
    config = from_mapping(DataConfig, {"train": str(path)})
    found = load_prompt_set(config, "train", using, 40)
    assert [incident.place for incident in found.report.dropped] == [f"{path}:2", f"{path}:4"]
    assert "content[0]: " in found.report.dropped[0].reason
    prompts = found.prompts()
    assert np.array_equal(prompts[0].ids_T, prompts[1].ids_T)
    assert prompts[0].media[0].picture.digest != prompts[1].media[0].picture.digest
    assert [sample.media for sample in found] == [prompt.media for prompt in prompts]
    (one,) = found[0].media
    assert not {*range(one.start, one.stop)} & {*found[0].target_at_N.tolist()}
    again = load_prompt_set(config, "train", using, 40)
    assert again.parts[0].key == found.parts[0].key


def test_whoever_is_shown_a_prompt_has_the_files_that_were_read(tmp_path: Path) -> None:
    using = renderer(tmp_path)
    content = Path(picture(tmp_path, "one")["image"].value).read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    parts = ({"type": "image", "image": it} for it in (url, str(tmp_path / "one.png")))
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [said("user", *parts, "cat")]}])
    (found,) = load_prompts(str(rows), using)
    kept, own = images_of(found.prompt)  # type: ignore[arg-type]
    assert (kept.kind, own.kind, own.value) == ("file", "file", str(tmp_path / "one.png"))
    assert Path(str(kept.value)).read_bytes() == content
    ids_T, media = using.prompt_media(found.prompt)  # type: ignore[arg-type]
    assert (ids_T.tolist(), media) == (found.ids_T.tolist(), found.media)


def test_prompts_hold_few_pictures_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    using = renderer(tmp_path)
    content = Path(picture(tmp_path, "one")["image"].value).read_bytes()
    inline = {"type": "image", "base64": base64.b64encode(content).decode()}
    asked = [said("user", "cat"), said("user", inline, "cat"), said("user", "dog")]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [it]} for it in asked])
    sizes, look = [], using.template.pictures.look

    def counted(some: Any) -> None:
        seen = list(some)
        sizes.append(len(seen))
        look(seen)

    monkeypatch.setattr(images, "BATCH_BYTES", len(content))
    monkeypatch.setattr(using.template.pictures, "look", counted)
    found = load_prompts(str(rows), using)
    assert sizes == [2, 1]
    assert [len(row.media) for row in found] == [0, 1, 0]
