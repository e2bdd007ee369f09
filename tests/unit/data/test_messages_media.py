"""Pictures in messages, in every shape that data have them."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from taut.data.read.sources import open_source
from taut.data.rows.messages import (
    Conversation,
    Document,
    MediaOptions,
    images_of,
    read_content,
    text_of,
)
from taut.data.rows.schema import Answers, Columns, Stepwise, best_row, read_any, read_prompt
from taut.data.settings import Source
from taut.errors import DataError, PictureError
from taut.vision.content import ImageRef, png_of
from taut.vision.settings import ImagesConfig

RED = Image.new("RGB", (2, 3), "red")
PNG = png_of(RED).value
assert isinstance(PNG, bytes)
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
ANSWER = {"role": "assistant", "content": "Red."}
PLACE = {"type": "image"}


def ask(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def file(name: str) -> dict[str, Any]:
    return {"type": "image", "image": ImageRef("file", name)}


def read(record: dict[str, Any], **columns: Any) -> Conversation:
    row = best_row(read_any(record, "d.jsonl:7", Columns(**columns)))
    assert isinstance(row, Conversation)
    return row


def asked(record: dict[str, Any], **columns: Any) -> Any:
    """The content of the first message."""
    return read(record, **columns).messages[0]["content"]


BYTES: list[dict[str, Any]] = [
    {"type": "image", "image": PNG},
    {"type": "image", "bytes": PNG},
    {"type": "image", "bytes": TEXT},
    {"type": "image", "base64": TEXT},
    {"type": "image", "image": RED},
    {"type": "image", "image": URL},
    {"type": "image", "url": URL, "text": None, "index": None},
    {"type": "image", "image": {"bytes": PNG, "path": "a.png"}},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": URL},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
    {"type": "image", "image": ImageRef("bytes", PNG)},
]


@pytest.mark.parametrize("part", BYTES, ids=[str(number) for number in range(len(BYTES))])
def test_bytes(part: dict[str, Any]) -> None:
    content = asked({"messages": [ask(part, said("What?")), ANSWER]})
    assert content == [{"type": "image", "image": ImageRef("bytes", PNG)}, said("What?")]


FILES: list[dict[str, Any]] = [
    {"type": "image", "image": "p/a b.png"},
    {"type": "image", "path": "p/a b.png"},
    {"type": "image", "image": {"bytes": None, "path": "p/a b.png"}},
    {"type": "image", "image": Path("p/a b.png")},
    {"type": "image_url", "image_url": {"url": "file:p/a%20b.png"}},
]


@pytest.mark.parametrize("part", FILES, ids=[str(number) for number in range(len(FILES))])
def test_files_are_beside_the_data_then_here(
    part: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"messages": [ask(part, "What?"), ANSWER]}
    assert asked(record, folder="data")[0] == file("data/p/a b.png"), "in neither"
    for name in ("p/a b.png", "data/p/a b.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(PNG)
        assert asked(record, folder="data")[0] == file(name)
    absolute = {"type": "image", "image": f"file://{tmp_path}/p/a%20b.png"}
    assert asked({"messages": [ask(absolute), ANSWER]}) == [file(f"{tmp_path}/p/a b.png")]


def test_an_address_is_kept() -> None:
    shouted = asked({"messages": [ask({"type": "image", "image": "HTTPS://here.org/a.png"})]})
    assert shouted == [{"type": "image", "image": ImageRef("url", "HTTPS://here.org/a.png")}]
    part = {"type": "image_url", "image_url": {"url": "https://here.org/a%20b.png"}}
    expected = ImageRef("url", "https://here.org/a%20b.png")
    assert images_of(read({"messages": [ask(part), ANSWER]}).messages) == [expected]


def test_any_turn_but_an_answer() -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "see"}]}
    turns = [
        {**ask(said("Be brief."), {"type": "image", "path": "s"}), "role": "system"},
        ask({"type": "image", "path": "a"}, said(" or "), {"type": "image", "path": "b"}),
        call,
        {**ask({"type": "image", "path": "c"}), "role": "tool"},
        ANSWER,
    ]
    row = read({"messages": turns})
    assert [ref.value for ref in images_of(row.messages)] == ["s", "a", "b", "c"]
    assert text_of(row.messages[1]["content"]) == " or "
    assert row.messages[4]["content"] == "Red."
    assert row.learned == (2, 4)
    with pytest.raises(DataError, match=r"d.jsonl:7: messages\[1\] is an assistant message with a"):
        read({"messages": [ask("x"), {**ask({"type": "image", "path": "c"}), "role": "assistant"}]})


def test_content_without_a_picture_is_a_text() -> None:
    assert asked({"messages": [ask(said("a"), "b"), ANSWER], "images": []}) == "ab"
    assert asked({"messages": [{"role": "user", "content": "<image>?"}, ANSWER]}) == "<image>?"


A, B = file("a"), file("b")
COLUMNS: list[tuple[str, dict[str, Any], Any]] = [
    ("parts", {"messages": [ask(PLACE, said("x"), PLACE)], "images": ["a", "b"]}, [A, said("x"), B]),
    ("some", {"messages": [ask(PLACE, {**PLACE, "path": "b"})], "image": "a"}, [A, B]),
    ("empty", {"messages": [ask({**PLACE, "image": {}, "text": ""}, said("x"))], "image": "a"}, [A, said("x")]),
    ("index", {"messages": [ask({**PLACE, "index": 1}, {**PLACE, "index": 0})], "images": ["a", "b"]}, [B, A]),
    ("first", {"messages": [{"role": "user", "content": "x"}], "images": ["a", "b"]}, [A, B, said("x")]),
    ("objects", {"messages": [{"role": "user", "content": "x"}], "images": [{"path": "a"}]}, [A, said("x")]),
    ("swift", {"messages": [{"role": "user", "content": "x<image>y"}], "images": ["a"]}, [said("x"), A, said("y")]),
    ("llava", {"conversations": [{"from": "human", "value": "<image>\nx"}], "image": "a"}, [A, said("x")]),
    ("after", {"conversations": [{"from": "human", "value": "x\n<image>"}], "image": "a"}, [said("x"), A]),
    ("two", {"conversations": [{"from": "human", "value": "<image>\n<image>\n\nx"}], "images": ["a", "b"]},
     [A, B, said("\nx")]),
    ("within", {"conversations": [{"from": "human", "value": "1: <image>\n2: <image>\nx"}], "images": ["a", "b"]},
     [said("1: "), A, said("\n2: "), B, said("\nx")]),
    ("alpaca", {"instruction": "<image>\nx", "output": "y", "images": '["a"]'}, [A, said("x")]),
    ("lists", {"prompt": [{"role": "user", "content": "x"}], "completion": [ANSWER], "images": ["a"]}, [A, said("x")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "content"), [it[1:] for it in COLUMNS], ids=[it[0] for it in COLUMNS]
)
def test_columns_fill_the_places(record: dict[str, Any], content: Any) -> None:
    before = json.dumps(record)
    assert asked(record) == content
    assert json.dumps(record) == before, "the record is as it was"


def test_a_column_of_another_name() -> None:
    record = {"messages": [ask(PLACE), ANSWER], "pics": ["a"], "images": ["b"]}
    assert asked(record, mapping={"images": "pics"}) == [A]
    assert asked(record, mapping={"images": "pics"}, ignore_keys=("images",)) == [A]
    plain = {"messages": [{"role": "user", "content": "<image>x"}, ANSWER], "images": ["b"]}
    assert asked(plain, ignore_keys=("images",)) == "<image>x"


def test_turns_after_the_first() -> None:
    turns = [
        {"from": "human", "value": "<image>\nx"},
        {"from": "gpt", "value": "Red."},
        {"from": "human", "value": "and <image>"},
        {"from": "gpt", "value": "Blue."},
    ]
    row = read({"conversations": turns, "images": ["a", "b"]})
    assert [message["content"] for message in row.messages] == [
        [A, said("x")],
        "Red.",
        [said("and "), B],
        "Blue.",
    ]


NESTED: Any = "a"
for _ in range(1000):
    NESTED = {"image": NESTED}
HUMAN = {"from": "human", "value": "<image> or <image>?"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [ask(PLACE), ANSWER], "images": ["a", "b"]}, "images has 2 and the messages have 1 places"),
    ({"conversations": [HUMAN], "image": "a"}, "image has 1 and the messages have 2 places"),
    ({"conversations": [HUMAN], "images": []}, "images has 0 and the messages have 2 places"),
    ({"conversations": [{"from": "human", "value": "x"}], "image": "a"}, "image has 1 and .* 0 places"),
    ({"messages": [ask(said("x"))], "images": ["a"]}, "images has 1 and the messages have 0 places"),
    ({"messages": [ask({**PLACE, "index": 1})], "images": ["a"]}, "images has 1 and the messages have 2"),
    ({"messages": [ask(said("<video>"))], "images": ["a"]}, "images has 1 and the messages have 0"),
    ({"messages": [{"role": "user", "content": "x"}, ask({**PLACE, "image": "a"})], "images": ["a"]}, "has 1 and .* 0"),
    ({"messages": [ask({**PLACE, "image": NESTED})]}, "nested too deeply"),
    ({"messages": [ANSWER], "images": ["a"]}, "images has 1 and the messages have 0 places"),
    ({"messages": [ask(PLACE), ANSWER]}, r"messages\[0\].content\[0\] has no picture"),
    ({"messages": [ask(PLACE)], "images": ["a"], "image": "b"}, "has images and image; expected one"),
    ({"messages": [ask(PLACE)], "images": "[a"}, r"images begins with \[ but is not JSON"),
    ({"messages": [ask({"type": "image", "image": 3})]}, r"content\[0\] is 3; expected a picture"),
    ({"messages": [ask({"type": "image", "path": "a", "url": "b"})]}, "has path and url; expected one"),
    ({"messages": [ask({"type": "image", "image": "a", "max_pixels": 9})]}, "has max_pixels next to"),
    ({"messages": [ask({"type": "audio", "audio": "a"})]}, "of type audio; .* sound is not supported"),
    ({"messages": [ask("x"), ANSWER], "audios": ["a"]}, "the row has audios; .* sound is not supported"),
    ({"prompt": "<image>", "completion": "a", "images": ["a"]}, "has images; expected text only"),
    ({"text": "<video>", "videos": ["a"]}, "has videos; expected text only"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "message"), REFUSED, ids=[it[1][:40] for it in REFUSED])
def test_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(record)
    assert str(caught.value).startswith("d.jsonl:7: ")


QUESTION = [{"role": "user", "content": "<image>\nx"}]
JUDGED: list[dict[str, Any]] = [
    {"prompt": QUESTION, "chosen": "Red.", "rejected": "Blue."},
    {"prompt": [ask(PLACE, said("x"))], "chosen": [ANSWER], "rejected": [ANSWER]},
    {"chosen": [*QUESTION, ANSWER], "rejected": [*QUESTION, {**ANSWER, "content": "Blue."}]},
    {"prompt": "<image>\nx", "chosen": [*QUESTION, ANSWER], "rejected": [*QUESTION, ANSWER]},
    {"instruction": "x", "chosen": "Red.", "rejected": "Blue."},
    {"conversations": [{"from": "human", "value": "<image>x"}], "chosen": ANSWER, "rejected": ANSWER},
]  # fmt: skip


@pytest.mark.parametrize("record", JUDGED, ids=[str(number) for number in range(len(JUDGED))])
def test_pictures_of_a_preference_are_its_prompts(record: dict[str, Any]) -> None:
    row = read_any({**record, "images": ["a"]}, "d.jsonl:7", Columns(kind="preference"))
    assert isinstance(row, Answers)
    for answer in row.answers:
        assert isinstance(answer, Conversation)
        assert answer.messages[0]["content"] == [A, said("x")]
        assert answer.learned == (1,)


def test_other_kinds() -> None:
    turns = {"messages": [*QUESTION, ANSWER], "images": ["a"]}
    for kind, more in (("unpaired", {"label": True}), ("scored", {"score": 1})):
        row = read_any({**turns, **more}, "d:1", Columns(kind=kind))
        assert isinstance(row, Answers)
        assert isinstance(row.answers[0], Conversation)
        assert images_of(row.answers[0].messages) == [A["image"]]
    steps = {"prompt": QUESTION, "completions": ["x"], "labels": [1], "images": ["a"]}
    stepwise = read_any(steps, "d:1", Columns(kind="stepwise"))
    assert isinstance(stepwise, Stepwise)
    assert isinstance(stepwise.answer, Conversation)
    assert images_of(stepwise.answer.messages) == [A["image"]]
    pair = {"prompt": "x", "chosen": "y", "rejected": "z", "images": ["a"]}
    with pytest.raises(DataError, match="d:1: the row has images; expected text only"):
        read_any(pair, "d:1", Columns(kind="preference"))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": QUESTION, "answer": "Red."},
        {"messages": [*QUESTION, ANSWER]},
        {"instruction": "x", "output": "y"},
        {"conversations": [{"from": "human", "value": "<image>x"}]},
    ],
    ids=["completion", "messages", "alpaca", "sharegpt"],
)
def test_prompts(record: dict[str, Any]) -> None:
    row = read_prompt({**record, "images": ["a"]}, "d:1", Columns(kind="prompt"))
    assert not isinstance(row, Document)
    assert row.messages[0]["content"] == [A, said("x")]
    with pytest.raises(DataError, match="the row has images; expected text only"):
        read_prompt({"prompt": "x", "images": ["a"]}, "d:1", Columns(kind="prompt"))


def test_frames_have_their_times_before_them() -> None:
    listed = {"type": "video", "video": ["a", "b"], "fps": 4}
    timed = {"type": "video", "video": ["a", "b"], "timestamps": [0, 0.25]}
    expected = [said("<0.0 seconds>"), A, said("<0.2 seconds>"), B, said("x")]
    for part in (listed, timed):
        assert asked({"messages": [ask(part, said("x"))]}) == expected
    marked = {"messages": [{"role": "user", "content": "<video>\nx"}]}
    frames = {"video": ["a", "b"], "fps": 4}
    assert asked({**marked, "videos": [frames]}) == expected
    both = {"messages": [{"role": "user", "content": "<image><video>x"}], "image": "b"}
    assert asked({**both, "videos": [frames]}) == [B, *expected]


def test_a_video_over_a_limit_names_the_row_and_the_key(tmp_path: Path) -> None:
    held = BytesIO()
    pictures = [Image.new("RGB", (16, 16), (number * 20,) * 3) for number in range(9)]
    pictures[0].save(held, "GIF", save_all=True, append_images=pictures[1:])
    content = [{"type": "video", "video": held.getvalue()}]
    media = MediaOptions(prefix="", images=ImagesConfig(limit_video_pixels=99))
    found = r"^d:1\[0\]\.content\[0\]: the video .* 9 frames .*; cut it, .* raise images\.limit_video_pix"
    with pytest.raises(PictureError, match=found):
        read_content(content, "d:1[0]", "user", media, ())


def test_a_picture_in_memory_over_a_limit_names_the_row_and_the_key() -> None:
    content = [{"type": "image", "image": Image.new("L", (4, 5))}]
    media = MediaOptions(images=ImagesConfig(limit_pixels=19))
    found = r"^d:1\.content\[0\] is a picture of 4 x 5 pixels; expected at most 19; .*data\.images\.limit_"
    with pytest.raises(PictureError, match=found):
        read_content(content, "d:1", "user", media, ())


def test_frames_of_a_file(tmp_path: Path) -> None:
    blue = Image.new("RGB", (2, 3), "blue")
    RED.save(tmp_path / "a.gif", save_all=True, append_images=[blue], duration=500)
    turns = [{"role": "user", "content": "x"}]
    content = asked({"messages": turns, "video": "a.gif"}, folder=str(tmp_path))
    assert [part.get("text") for part in content] == ["<0.0 seconds>", None, "<0.5 seconds>", None, "x"]  # fmt: skip
    one_frame = ImagesConfig(max_frames=1)
    one = asked({"messages": turns, "video": "a.gif"}, folder=str(tmp_path), images=one_frame)
    assert one == [*content[:2], said("x")]
    part = {"type": "video_url", "video_url": {"url": str(tmp_path / "a.gif")}, "fps": 1}
    assert asked({"messages": [ask(part)]}) == content[:2]


FILMS: list[tuple[dict[str, Any], str]] = [
    ({"video": ["a"]}, "neither fps nor timestamps"),
    ({"video": ["a"], "fps": 1, "timestamps": [0]}, "fps and timestamps"),
    ({"video": ["a"], "fps": 0}, "fps is 0; expected a number"),
    ({"video": ["a"], "timestamps": [0, 1]}, "timestamps is a list of 2; expected .* 1 frames"),
    ({"video": ["a"] * 65, "fps": 1}, "has 65 frames; expected 1 to 64"),
    ({"video": ["a"], "fps": 1, "nframes": 3}, "has nframes next to"),
    ({"video": "a.gif", "timestamps": [0]}, "timestamps next to a file"),
]


@pytest.mark.parametrize(("part", "message"), FILMS, ids=[it[1][:20] for it in FILMS])
def test_videos_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"d.jsonl:7: messages\[0\].content\[0\].*{message}"):
        read({"messages": [ask({"type": "video", **part})]})


BAD: list[tuple[Any, str]] = [
    ({"base64": "?"}, "is no base64"),
    ({"bytes": b""}, "is empty"),
    ({"url": "data:image/png;base64,"}, "is empty"),
    ({"url": "data:image/svg,<a>"}, "expected one in base64"),
    ({"image": "s3://a/b"}, "is at s3://a/b; expected a path"),
    ({"image": "s3://user:secret@a/b?key=1"}, "is at s3://a/b; expected a path"),
    ({"image": TEXT * 99}, "can be no path; .* own key"),
]


@pytest.mark.parametrize(("part", "message"), BAD, ids=[it[1] for it in BAD])
def test_a_picture_that_is_none_can_be_left_out(part: dict[str, Any], message: str) -> None:
    with pytest.raises(PictureError, match=rf"^d.jsonl:7: messages\[0\].content\[0\].*{message}"):
        read({"messages": [ask({"type": "image", **part})]})


def test_a_broken_picture_in_memory() -> None:
    broken = Image.open(BytesIO(PNG[:45]))
    with pytest.raises(PictureError, match=r"content\[0\] is a picture that cannot be read"):
        read({"messages": [ask({"type": "image", "image": broken})]})


@pytest.mark.parametrize("value", [None, {}])
def test_a_null_in_the_column(value: object) -> None:
    with pytest.raises(PictureError, match=r"d.jsonl:7: images\[1\] is null"):
        read({"messages": [ask(PLACE, PLACE)], "images": ["a", value]})


def test_a_video_that_is_not_there_names_the_row() -> None:
    with pytest.raises(PictureError, match=r"d.jsonl:7: .*the video none.gif cannot be read \(No"):
        read({"messages": [ask({"type": "video", "video": "none.gif"})]})


def test_arrow_has_nulls_where_another_part_has_a_value(tmp_path: Path) -> None:
    """As datasets writes pictures to parquet files."""
    import pyarrow
    import pyarrow.parquet

    parts = [
        {"type": "image", "text": None, "index": 0},
        {"type": "text", "text": "x", "index": None},
    ]
    table = {"messages": [[ask(*parts)]], "images": [[{"bytes": PNG, "path": "a.png"}]]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "d.parquet")
    ((_, record),) = open_source(Source(path=str(tmp_path / "d.parquet"))).read_records()
    assert asked(record) == [{"type": "image", "image": ImageRef("bytes", PNG)}, said("x")]


@pytest.mark.parametrize("name", ["root", "nobody", "no-such-user"])
def test_a_row_does_not_learn_of_users(name: str) -> None:
    """``~name`` is a file's name, whether or not there is such a user; nothing is expanded."""
    (part,) = asked({"messages": [ask({"type": "image", "image": f"~{name}/.ssh/id"})]})
    assert part["image"].value == f"~{name}/.ssh/id"
