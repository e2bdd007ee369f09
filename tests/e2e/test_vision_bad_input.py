"""Pictures that are none, places without pictures and pictures without places: one line that names the row."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.helpers.chat_runs import events, save_model, write_rows
from tests.helpers.picture_runs import draw, keys_of, train
from tests.helpers.vision_models import tiny_vlm

from taut.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pictures, one without its processor's file, one of text; and pictures, good and bad."""
    made = tmp_path_factory.mktemp("bad")
    tiny_vlm("qwen2_5_vl", made / "model")
    shutil.copytree(made / "model", made / "half")
    (made / "half" / "preprocessor_config.json").unlink()
    save_model(made / "text")
    whole = (made / draw(made, 0)).read_bytes()
    (made / "torn.png").write_bytes(whole[: len(whole) // 2])
    (made / "bomb.png").write_bytes(_claiming(60_000, 60_000))
    (made / "words.png").write_text("no picture")
    Image.new("RGB", (1, 1), "red").save(made / "dot.png")
    Image.new("RGB", (900, 1), "red").save(made / "line.png")
    return made


def _claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checked

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(99_999)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def asked(content: Any, **row: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    return {"messages": messages, **row}


def seen(name: str) -> dict[str, Any]:
    return asked([{"type": "image", "image": name}, {"type": "text", "text": "what?"}])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no file": (seen("gone.png"), "there is no file"),
    "torn": (seen("torn.png"), "is damaged or cut short"),
    "no picture": (seen("words.png"), "it begins with b'no picture'"),
    "bomb": (seen("bomb.png"), "pixels; expected at most 80,000,000"),
    "line": (seen("line.png"), "at most 200 times the other"),
    "address": (seen("http://127.0.0.1/a.png"), "data.images.allow_urls=true"),
    "sound": (asked([{"type": "audio", "audio": "a.wav"}]), "sound is not supported"),
    "reserved": (asked("<|image_pad|>what?"), "has '<|image_pad|>', which stands for pictures"),
    "place without": (asked("<image>what?", images=[]), "images has 0 and the messages have 1"),
    "too many": (asked("<image>what?", images=["0.png", "0.png"]), "images has 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_is_named_with_what_is_wrong(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, said = WRONG[name]
    told = _shown(place / "model", write_rows(place / "rows.jsonl", [seen("0.png"), row]), capsys)
    assert told.startswith("taut: error: ") and "rows.jsonl:2: " in told and said in told
    assert len(told.splitlines()) == 1


def test_a_dot_is_a_picture(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(place / "rows.jsonl", [seen("dot.png")])
    assert main(["show", f"model={place / 'model'}", f"data.train={rows}", "steps=1"]) == 0
    assert "[dot.png: 4 tokens]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"),
    [("half", "preprocessor_config.json"), ("text", "rows.jsonl:1: messages[0].content[0] is a")],
)
def test_a_model_that_cannot_see_is_refused(
    model: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(place / "rows.jsonl", [seen("0.png")])
    assert said in _shown(place / model, rows, capsys)


def _shown(model: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["show", f"model={model}", f"data.train={rows}", "steps=1"]) == 2
    return capsys.readouterr().err


def test_a_run_goes_on_without_a_hundredth_of_its_pictures(place: Path, tmp_path: Path) -> None:
    """It says which; when they are mended they are learned from."""
    names = [f"{number}.png" for number in range(300)]
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    for name in names:
        shutil.copy(tmp_path / "one.png", tmp_path / name)
    (tmp_path / "100.png").unlink()
    (tmp_path / "150.png").write_bytes(b"")
    shutil.copy(place / "torn.png", tmp_path / "299.png")
    given = {"data.images.bad": "drop", "steps": 1, "batch.samples_per_step": 2}
    keys = keys_of("sft", place / "model", tmp_path / "made", **given, overwrite=True)
    keys["data.train"] = str(write_rows(tmp_path / "many.jsonl", [seen(name) for name in names]))

    def told() -> tuple[int, list[str]]:
        train(keys)
        (start,) = events(Path(keys["out"]), "start")
        return start["num_samples"], [
            item.rpartition("many.jsonl:")[2] for item in start["dropped"]
        ]

    num_samples, dropped = told()
    assert num_samples == 297
    assert [item.partition(":")[0] for item in dropped] == ["101", "151", "300"]
    for name in names:
        shutil.copy(tmp_path / "one.png", tmp_path / name)
    assert told() == (300, [])
