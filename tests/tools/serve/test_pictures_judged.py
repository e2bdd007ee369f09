"""Pictures in what a reward model scores, from a file and over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from tests.helpers.chat_runs import write_rows
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_tokenizers import save_tokenizer
from tests.helpers.vision_models import tiny_vlm, vision_tokenizer
from tests.helpers.vision_processors import save_processor

from taut.config import from_mapping
from taut.errors import PictureError
from taut.inference.reward_model import Judge, open_judge, rater
from taut.inference.settings import JudgeUse
from taut.models.attention_backends import PREFIX
from taut.models.reward_model import load_reward_model
from taut.models.settings import NewHead
from taut.rewards import RewardInput
from taut.rewards.judge import sent
from taut.rewards.verifier import Score as Number
from taut.vision.content import ImageRef
from taut_tools.score.score import score
from taut_tools.score.settings import Score
from taut_tools.serve.batcher import Batcher
from taut_tools.serve.reward import build_app
from taut_tools.serve.settings import ServeReward

KIND = "qwen2_vl"
TEXT = {"type": "text", "text": "what?"}


def save_vision_reward(directory: Path) -> Path:
    """A tiny reward model that takes pictures and was never trained."""
    base = tiny_vlm(KIND, directory / "base")
    options: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    attention = PREFIX + "reference"
    model = load_reward_model(str(base), NewHead(seed=3), attention=attention, **options)
    model.save_pretrained(directory / "model")
    save_tokenizer(vision_tokenizer(KIND), directory / "model")
    save_processor(KIND, directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, and a few pictures."""
    made = tmp_path_factory.mktemp("judged")
    save_vision_reward(made)
    for name, size in (("red", (20, 12)), ("blue", (20, 12)), ("green", (9, 30))):
        Image.new("RGB", size, name).save(made / f"{name}.png")
    return made


def asked(*pictures: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, TEXT]}]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def scores_of(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> list[float]:
    data = write_rows(folder / "answers.jsonl", rows)
    given = {"model": folder / "model", "data": data, "dtype": "float64", **keys}
    return [row.scores[0] for row in score(from_mapping(Score, given)).rows]


def test_the_number_is_the_pictures_too(folder: Path) -> None:
    shown = ("red.png",), ("blue.png",), ("red.png", "green.png"), ("red.png",), ()
    rows = [{"messages": [*asked(*names), answer("red")]} for names in shown]
    found = scores_of(folder, rows)
    assert found[0] == pytest.approx(found[3], abs=1e-9)
    assert len({round(number, 6) for number in found}) == 4
    assert scores_of(folder, rows[2:3]) == pytest.approx(found[2:3], abs=1e-9)


def test_rows_whose_pictures_cannot_be_read(folder: Path) -> None:
    rows = [{"messages": [*asked(f"{name}.png"), answer("red")]} for name in ("gone", "red")]
    with pytest.raises(PictureError, match=r"answers\.jsonl:1"):
        scores_of(folder, rows)
    assert len(scores_of(folder, rows, **{"images.bad": "drop"})) == 1


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    use = from_mapping(JudgeUse, {"model": folder / "model", "dtype": "float64"})
    return open_judge(use, folder / "copies")


@pytest.fixture
def client(folder: Path, judge: Judge) -> Iterator[TestClient]:
    keys = {"model": folder / "model", "max_pictures": 2}
    image_store = judge.renderer.image_store
    assert image_store is not None
    batcher = Batcher(judge, afterwards=image_store.forget)
    yield TestClient(build_app(batcher, from_mapping(ServeReward, keys)))
    batcher.close()
    assert not any((folder / "copies" / "pictures").glob("*"))


def post(client: TestClient, *prompts: Any) -> tuple[int, Any]:
    body = {"prompts": prompts, "completions": ["red"] * len(prompts)}
    said = client.post("/score", json=body)
    return said.status_code, said.json()


def test_a_server_is_sent_pictures(folder: Path, client: TestClient) -> None:
    wanted = scores_of(folder, [{"messages": [*asked("red.png"), answer("red")]}])
    own = sent(asked(ImageRef("file", str(folder / "red.png"))))
    raw = [{"role": "user", "content": [{"type": "image", "base64": inline(folder)}, TEXT]}]
    status, found = post(client, asked(data_url(folder / "red.png")), own)
    assert status == 200
    assert found["scores"] == pytest.approx(wanted * 2, abs=1e-9)
    assert post(client, raw)[1]["scores"] == pytest.approx(wanted, abs=1e-9)


def inline(folder: Path) -> str:
    return base64.b64encode((folder / "red.png").read_bytes()).decode()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "red.png"}, "not in the request"),
        ({"type": "image", "image": "/etc/hostname"}, "not in the request"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, "not in the req"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "not in the request"),
        ({"type": "video", "video": "/etc/hostname"}, "a part of type 'video'"),
        ({"type": "image", "base64": "aGVsbG8="}, "picture"),
    ],
)
def test_a_server_opens_nothing_that_a_client_names(
    client: TestClient, part: dict[str, Any], message: str
) -> None:
    status, found = post(client, [{"role": "user", "content": [part, TEXT]}])
    assert status == 400
    assert message in found["error"]["message"]
    assert found["error"]["field"] == "completions[0]"


def test_a_text_shows_no_picture(client: TestClient) -> None:
    said = client.post("/get_reward", json={"query": ["<|vision_start|><|image_pad|> what? red"]})
    assert said.status_code == 400
    assert "stands for pictures" in said.json()["error"]["message"]


def test_a_server_has_limits(folder: Path, client: TestClient) -> None:
    url = data_url(folder / "red.png")
    status, found = post(client, asked(url, url, url))
    assert status == 413
    assert "found 3 pictures" in found["error"]["message"]
    with refused(ErrorCode("images.allow_urls")):
        from_mapping(ServeReward, {"model": "m", "images.allow_urls": True})


def test_a_reward_is_shown_the_prompt_s_pictures(folder: Path, judge: Judge) -> None:
    wanted = scores_of(folder, [{"messages": [*asked("blue.png"), answer("red")]}])
    blue, gone = (ImageRef("file", str(folder / f"{name}.png")) for name in ("blue", "gone"))
    answers = [RewardInput(text="red", prompt=tuple(asked(it))) for it in (blue, gone)]
    one, other = rater(judge)(answers)
    assert isinstance(one, Number)
    assert one.value == pytest.approx(wanted[0], abs=1e-9)
    assert other.error is not None
    assert "gone.png" in other.error
    assert json.dumps(sent(answers[0].prompt))  # type: ignore[arg-type]
