"""Pictures in what commands read, say and are sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.helpers.chat_runs import save_model, write_rows
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.scripted_engines import FakeEngine
from tests.helpers.vision_models import tiny_vlm

from taut.commands.evaluate import evaluate
from taut.commands.generate import generate
from taut.commands.settings import Evaluate, Generate
from taut.config import from_mapping
from taut.errors import ConfigError, DataError, EngineError, OutputError, PictureError, RenderError
from taut.inference.factory import OpenEngine, open_engine, open_renderer
from taut.rewards.judge import RewardModel, pictures_of, sent
from taut.vision.content import ImageRef
from taut_tools.chat.chat import chat
from taut_tools.chat.settings import Chat

GREEDY = {"sampling.max_new_tokens": 3, "sampling.temperature": 0, "dtype": "float64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pictures, one of text, and a few pictures."""
    made = tmp_path_factory.mktemp("pictures")
    tiny_vlm("qwen2_vl", made / "model")
    save_model(made / "text")
    for name, size in (("red", (20, 12)), ("blue", (20, 12)), ("green", (9, 30))):
        Image.new("RGB", size, name).save(made / f"{name}.png")
    return made


def shown(*pictures: str, text: str = "what?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {"id": "red", "messages": shown("red.png"), "answer": "red"},
        {"id": "inline", "messages": shown(data_url(folder / "blue.png"), "green.png")},
        {"id": "text", "messages": [{"role": "user", "content": "Hi"}], "answer": "hello"},
    ]


def asked(folder: Path, given: list[dict[str, Any]], name: str, **keys: Any) -> Generate:
    prompts = write_rows(folder / f"{name}.jsonl", given)
    out = folder / f"{name}-out.jsonl"
    model = {"model": folder / "model", "prompts": prompts, "out": out}
    return from_mapping(Generate, {**model, **GREEDY, **keys})


def lines(config: Generate) -> dict[str, dict[str, Any]]:
    found = map(json.loads, Path(config.out).read_text().splitlines())
    return {line["id"]: line for line in found}


def test_completions_tell_of_which_pictures_and_not_their_pixels(folder: Path) -> None:
    config = asked(folder, rows(folder), "told")
    generate(config)
    found = lines(config)
    (red,) = found["red"]["images"]
    assert red["path"] == str(folder / "red.png")
    assert len(red["sha256"]) == 64
    inline, green = found["inline"]["images"]
    assert Path(inline["path"]).parts[-2:] == ("pictures", inline["sha256"])
    assert green["path"] == str(folder / "green.png")
    assert "images" not in found["text"]
    assert max(map(len, Path(config.out).read_text().splitlines())) < 1000


def test_another_picture_is_another_prompt(folder: Path) -> None:
    given = [{"id": name, "messages": shown(f"{name}.png")} for name in ("red", "blue")]
    Image.new("RGB", (20, 12), "blue").save(folder / "mine.png")
    given.append({"id": "mine", "messages": shown("mine.png")})
    config = asked(folder, given, "changed")
    generate(config)
    found = lines(config)
    assert found["red"]["logp_one"] != found["blue"]["logp_one"] == found["mine"]["logp_one"]
    Image.new("RGB", (20, 12), "red").save(folder / "mine.png")
    again = asked(folder, given, "changed", resume=True)
    with pytest.raises(OutputError, match=r"drawn with other settings \(prompts\)"):
        generate(again)


def test_rows_whose_pictures_cannot_be_read(folder: Path) -> None:
    (folder / "cut.png").write_bytes((folder / "red.png").read_bytes()[:40])
    given = [{"id": name, "messages": shown(f"{name}.png")} for name in ("red", "cut", "gone")]
    with pytest.raises(
        PictureError,
        match=r"bad\.jsonl:2: messages\[0\]\.content\[0\].*rows out with images\.bad=drop",
    ):
        generate(asked(folder, given, "bad"))
    config = asked(folder, given, "bad", **{"images.bad": "drop"})
    assert generate(config).num_prompts == 1
    with pytest.raises(DataError, match="all 2 rows are left out"):
        generate(asked(folder, given[1:], "worse", **{"images.bad": "drop"}))


def test_an_evaluation_shows_pictures(folder: Path) -> None:
    given = [row for row in rows(folder) if "answer" in row]
    data = write_rows(folder / "questions.jsonl", given)
    keys = {"model": folder / "model", "data": data, "out": folder / "evaluated", **GREEDY}
    assert [it.row.id for it in evaluate(from_mapping(Evaluate, keys)).answers] == ["red", "text"]


def test_a_server_is_sent_no_picture(folder: Path) -> None:
    """Nothing answers there: it is said before anybody is asked."""
    served = {"engine": "server", "urls": "http://127.0.0.1:9/v1", "dtype": None}
    with pytest.raises(EngineError, match=r"red: the prompt has 1 picture\(s\)"):
        generate(asked(folder, rows(folder), "served", **served))


def test_a_model_of_text_takes_no_picture(folder: Path) -> None:
    text = {"model": folder / "text"}
    with pytest.raises(RenderError, match="the model takes no pictures"):
        generate(asked(folder, rows(folder), "text", **text))
    with pytest.raises(ConfigError, match=r"images\.max_pixels would be ignored by model="):
        generate(asked(folder, rows(folder), "text", **text, **{"images.max_pixels": 9}))


def test_settings_are_called_what_a_command_calls_them(folder: Path) -> None:
    for key, more in (
        ("limit_pixels", {}),
        ("max_bytes", {}),
        ("allow_urls", {"url": "http://x/a.png"}),
    ):
        given = [{"messages": shown(more.get("url", "red.png"))}]
        small = {f"images.{key}": 9} if not more else {}
        with pytest.raises(PictureError) as found:
            generate(asked(folder, given, key, **small))
        assert f" images.{key}" in str(found.value)


def talk(folder: Path, *said: str, model: str = "model") -> str:
    return heard(folder, iter(said), model)


def heard(folder: Path, said: Iterator[str], model: str = "model") -> str:
    config = from_mapping(Chat, {"model": folder / model, **GREEDY})
    written: list[str] = []
    with open_engine(config) as opened:
        chat(config, opened, said, written.append)
    return "".join(written[1:])


def test_a_chat_is_shown_pictures(folder: Path) -> None:
    red, green = folder / "red.png", folder / "green.png"
    one = talk(folder, f"/image {red}", "what?")
    other = talk(folder, f"/image {green}", "what?")
    assert one.startswith("[20x12 pixels, with the next message]\n")
    assert one.splitlines()[1] != other.splitlines()[1]
    both = talk(folder, f"/image {red}", f"/image {green}", "/image", "what?")
    assert "[9x30 pixels, 2 with the next message]\n[no picture]\n" in both
    assert both.endswith(talk(folder, "what?"))


def test_what_is_wrong_with_a_picture_does_not_end_a_chat(folder: Path) -> None:
    found = talk(folder, f"/image {folder / 'gone.png'}", f"/image {folder / 'red.png'}", "what?")
    assert found.startswith("[/image: ")
    assert "[20x12 pixels, with the next message]" in found
    assert "/image PATH" in talk(folder, "/help")
    unknown, known = (talk(folder, f"/image ~{name}/red.png") for name in ("no-such-user", "root"))
    assert unknown == known.replace("~root", "~no-such-user")
    text = talk(folder, f"/image {folder / 'red.png'}", "/exit", model="text")
    assert "this model takes no pictures" in text
    with refused(ErrorCode("images.folder")):
        from_mapping(Chat, {"model": "m", "images.folder": "x"})


def test_a_picture_is_what_it_was_when_it_was_shown(folder: Path, tmp_path: Path) -> None:
    """A screenshot that is written over."""
    shot = tmp_path / "shot.png"

    def over() -> Iterator[str]:
        for name in ("red", "green"):
            shot.write_bytes((folder / f"{name}.png").read_bytes())
            yield from (f"/image {shot}", "what?")

    apart = talk(
        folder,
        *(it for name in ("red", "green") for it in (f"/image {folder / name}.png", "what?")),
    )
    assert heard(folder, over()) == apart


def test_history_keeps_its_pictures(folder: Path) -> None:
    config = from_mapping(Chat, {"model": folder / "model"})
    rendering = open_renderer(config)
    engine = FakeEngine(lambda name, index: "Red.")
    opened = OpenEngine(engine, rendering.renderer, rendering.stops, 512, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taut_tools.chat.chat.LocalEngine", FakeEngine)
        patch.setattr("taut_tools.chat.chat.Session._stream", plain)
        chat(config, opened, iter([f"/image {folder / 'red.png'}", "what?", "sure?"]), print)
    first, second = engine.asked
    assert [one.picture.digest for one in first.media] == [
        one.picture.digest for one in second.media
    ]
    assert second.media[0].start == first.media[0].start


def plain(session: Any, engine: FakeEngine, prompt: Any) -> Any:
    from taut_tools.chat.chat import Answer

    return Answer(engine.generate([prompt], session.sampling)[0].text, "")


def test_what_servers_are_sent_has_its_pictures_inside(folder: Path) -> None:
    picture = ImageRef("file", str(folder / "red.png"))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Red."}]
    url = {"type": "image_url", "image_url": {"url": data_url(folder / "red.png")}}
    assert sent(messages) == [{"role": "user", "content": [url, content[1]]}, messages[1]]
    assert pictures_of(messages) == [url]
    assert json.dumps(sent(messages))
    with refused(ErrorCode("images.bad")):
        from_mapping(RewardModel, {"model": "m", "images.bad": "drop"})
