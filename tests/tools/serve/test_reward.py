"""A reward model over HTTP: the numbers of ``taut score``, whoever else asks; what is wrong with a request, by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.testclient import TestClient
from tests.tools.score.test_score import END, chat, messages, save_reward, theirs

from taut.config import from_mapping
from taut.errors import ConfigError, EngineError, NonFiniteError, OutOfMemory
from taut.inference.http_server import listen
from taut.inference.reward_model import Judge, Rendered, open_judge
from taut.models.settings import NewHead
from taut.types import FloatArray, Sample
from taut_tools.serve import reward as command
from taut_tools.serve.batcher import Batcher, Busy
from taut_tools.serve.reward import build_app
from taut_tools.serve.settings import ServeReward

KEY = {"Authorization": "Bearer open sesame"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(tmp_path_factory.mktemp("sequence"), NewHead(seed=3))


def config(model: Path, **keys: Any) -> ServeReward:
    return from_mapping(ServeReward, {"model": model, "dtype": "float64", "port": 0, **keys})


@pytest.fixture(scope="module")
def judge(model: Path) -> Judge:
    return open_judge(config(model))


@pytest.fixture
def batcher(judge: Judge) -> Iterator[Batcher]:
    made = Batcher(judge)
    yield made
    made.close()


@pytest.fixture
def client(model: Path, batcher: Batcher) -> TestClient:
    limits = {"max_answers": 20, "max_request_bytes": 100_000}
    return TestClient(build_app(batcher, config(model, **limits)))


def post(client: Any, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    answer = client.post(path, json=body, **options)
    return answer.status_code, answer.json()


def test_texts_and_messages_get_the_library_s_numbers(model: Path, client: TestClient) -> None:
    question = messages("Who sat?", "")[:1]
    body = {
        "prompts": ["the cat", question, question, question],
        "completions": [
            " sat on the mat",
            "the cat",
            {"role": "assistant", "content": "a dog"},
            [{"role": "assistant", "content": "the cat"}],
        ],
    }
    status, found = post(client, "/score", body)
    texts = ["the cat sat on the mat", chat("Who sat?", "the cat"), chat("Who sat?", "a dog")]
    texts[0] += theirs_eos()
    wanted = [float(logits) for logits in theirs(model, texts)]
    assert status == 200
    assert found["scores"] == pytest.approx([*wanted, wanted[1]], abs=1e-9)


def theirs_eos() -> str:
    from tests.helpers.tiny_tokenizers import tiny_tokenizer

    return str(tiny_tokenizer().eos_token)


def test_openrlhf_s_remote_reward(model: Path, client: TestClient) -> None:
    """Its query is decoded ids, special tokens and all; prompts and labels come along. A cut answer has no end."""
    queries = [chat("Who sat?", "the cat"), chat("Who sat?", "the cat").removesuffix(END)]
    body = {"query": queries, "prompts": ["Who sat?"] * 2, "labels": [None, "the cat"]}
    status, found = post(client, "/get_reward", body)
    wanted = [float(logits) for logits in theirs(model, queries)]
    assert status == 200
    assert found["rewards"] == found["scores"] == pytest.approx(wanted, abs=1e-9)
    assert found["extra_logs"] == {}


def test_what_a_request_may_be_is_said_as_a_schema(client: TestClient) -> None:
    found = client.get("/schema").json()
    assert set(found["/score"]["required"]) == {"prompts", "completions"}
    assert found["/score"]["additionalProperties"] is False
    assert found["/get_reward"]["properties"]["query"]["type"] == "array"


def test_sixteen_at_a_time_get_what_each_gets_alone(model: Path, batcher: Batcher) -> None:
    """Through a real socket."""
    bodies = [
        {"prompts": [f"What is {n} plus 3?"] * 2, "completions": [" It is " + "5" * n, " Paris"]}
        for n in range(1, 17)
    ]
    server = uvicorn.Server(
        uvicorn.Config(build_app(batcher, config(model)), port=0, log_level="error", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            alone = [post(http, "/score", body)[1]["scores"] for body in bodies]
            with ThreadPoolExecutor(16) as pool:
                together = [
                    found["scores"]
                    for _, found in pool.map(lambda body: post(http, "/score", body), bodies)
                ]
            assert http.get("/health").json() == {"status": "ok", "model": str(model), "waiting": 0}
    finally:
        server.should_exit = True
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=1e-9)


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "message"),
    [
        ("/score", {"prompts": ["a"]}, 400, "completions", "Field required"),
        ("/score", {"prompts": [], "completions": []}, 400, "prompts", "at least 1 item"),
        (
            "/score",
            {"prompts": ["a"], "completions": ["b"], "more": 1},
            400,
            "more",
            "not permitted",
        ),
        ("/score", {"prompts": ["a"], "completions": ["b", "c"]}, 400, "completions", "as many"),
        ("/score", {"prompts": [3], "completions": ["b"]}, 400, "prompts[0]", "a list of messages"),
        ("/score", {"prompts": ["a", ""], "completions": ["b"] * 2}, 400, "prompts[1]", "empty"),
        (
            "/score",
            {"prompts": [[{"role": "wizard", "content": "a"}]], "completions": ["b"]},
            400,
            "completions[0]",
            "wizard",
        ),
        (
            "/score",
            {"prompts": [messages("a", "b")], "completions": [{"role": "user", "content": "c"}]},
            400,
            "completions[0]",
            "the last message is the user's",
        ),
        (
            "/score",
            {"prompts": ["a"] * 21, "completions": ["b"] * 21},
            413,
            "completions",
            "at most 20",
        ),
        (
            "/score",
            {"prompts": ["a"], "completions": ["b" * 100_000]},
            413,
            None,
            "at most 100,000",
        ),
        ("/score", {"prompts": ["a"], "completions": [" cat" * 300]}, 400, "completions[0]", "256"),
        ("/get_reward", {"query": "a"}, 400, "query", "valid array"),
        ("/get_reward", {"query": ["a", 7]}, 400, "query[1]", "valid string"),
        ("/get_reward", {"query": ["a", ""]}, 400, "query[1]", "no token"),
        ("/get_reward", [1], 400, None, "expected a JSON object with query"),
        ("/nowhere", {}, 404, None, "expected POST /score"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(
    client: TestClient, path: str, body: Any, status: int, field: str | None, message: str
) -> None:
    found, answer = post(client, path, body)
    assert (found, answer["error"]["field"]) == (status, field)
    assert message in answer["error"]["message"]
    assert post(client, "/get_reward", {"query": ["a"]})[0] == 200, "and the next one is served"


def test_what_is_no_json_is_told(client: TestClient) -> None:
    answer = client.post("/score", content=b"{]")
    assert answer.status_code == 400
    assert "Invalid JSON" in answer.json()["error"]["message"]
    assert client.get("/score").status_code == 405


def test_a_token_is_asked_for(
    model: Path, batcher: Batcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_KEY", "open sesame")
    (tmp_path / "key").write_text("open sesame\n")
    by_name, by_file = config(model, key="REWARD_KEY"), config(model, key_file=tmp_path / "key")
    assert command._read_key(by_name) == command._read_key(by_file) == b"open sesame"
    client = TestClient(build_app(batcher, by_name, b"open sesame"))
    body = {"query": ["a"]}
    assert post(client, "/get_reward", body, headers=KEY)[0] == 200
    for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "Basic open sesame"}):
        status, found = post(client, "/get_reward", body, headers=headers)
        assert (status, found["error"]["field"]) == (401, "Authorization")
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"host": "0.0.0.0"},
            "host=0.0.0.0 .*: the server can be reached from elsewhere; expected a key",
        ),
        ({"host": "reward.example"}, "can be reached from elsewhere"),
        ({"key": "A", "key_file": "b"}, "key=A with key_file=b: .*; leave"),
        ({"key": "A", "without_key": True}, "without_key=true with key=A: .*; leave"),
    ],
)
def test_others_are_let_in_knowingly(model: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(model, **keys)
    assert config(model, host="::1").key is None
    assert config(model, host="0.0.0.0", without_key=True).without_key


def test_a_key_that_is_not_there_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no environment variable of this name is set"):
        command.run(config(model, key="NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match="No such file"):
        command.run(config(model, key_file=tmp_path / "none"))


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    asked = config(tmp_path)
    with listen(asked.host, asked.port, backlog=512) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port} cannot be listened on"):
            command.run(config(tmp_path / "no model", port=port))


class Broken:
    """Scores what it is told to, and fails in the way it is told to."""

    tokens_per_batch = 64

    def __init__(self, judge: Judge, error: Exception, on: str) -> None:
        self.judge, self.error, self.on = judge, error, on

    def render(self, rows: list[Any]) -> list[list[Sample]]:
        return self.judge.render(rows)

    def scores(self, samples: list[Sample]) -> list[FloatArray]:
        bad = int(self.judge.render([Rendered("x", self.on)])[0][0].ids_T[0])
        if any(sample.ids_T[0] == bad for sample in samples):
            raise self.error
        return self.judge.scores(samples)


def test_a_dead_thread_is_told_and_nothing_hangs(model: Path, judge: Judge) -> None:
    batcher = Batcher(Broken(judge, RuntimeError("a kernel broke"), "!"))  # type: ignore[arg-type]
    client = TestClient(build_app(batcher, config(model)))
    assert post(client, "/get_reward", {"query": ["a"]})[0] == 200
    for query in ("!", "a"):
        status, found = post(client, "/get_reward", {"query": [query]})
        assert status == 503
        assert "ended by RuntimeError: a kernel broke" in found["error"]["message"]
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    batcher.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [(NonFiniteError("x: nan; expected a number"), 500), (OutOfMemory("too much"), 503)],
)
def test_what_fails_alone_fails_alone(
    model: Path, judge: Judge, error: Exception, status: int
) -> None:
    batcher = Batcher(Broken(judge, error, "!"))  # type: ignore[arg-type]
    client = TestClient(build_app(batcher, config(model)))
    alone = post(client, "/get_reward", {"query": ["the cat"]})[1]["scores"]
    good, bad = [Rendered("g", "the cat")], [Rendered("b", "!")]
    with batcher._changed:  # so that all wait before any is taken
        futures = [batcher.submit(rows) for rows in (good, bad, good)]
    assert futures[0].result(60) == futures[2].result(60) == pytest.approx(alone, abs=1e-9)
    with pytest.raises(type(error)):
        futures[1].result(60)
    assert post(client, "/get_reward", {"query": ["!"]})[0] == status
    batcher.close()


def test_more_than_may_wait_is_sent_away(judge: Judge) -> None:
    batcher = Batcher(judge, most_waiting=1)
    with batcher._changed:
        first = batcher.submit([Rendered("a", "a")])
        with pytest.raises(Busy, match="try again later"):
            batcher.submit([Rendered("b", "b")])
    assert len(first.result(60)) == 1
    batcher.close()
    with pytest.raises(EngineError, match="was closed"):
        batcher.submit([Rendered("a", "a")])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_it_after_what_is_being_served(
    model: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server runs here; another thread asks it, and then tells it to end."""
    said: list[str] = []
    found: list[int] = []

    def ask() -> None:
        while not said or "http://" not in said[-1]:
            time.sleep(0.01)
            said.append(capsys.readouterr().out)
        url = said[-1].partition("http://")[2].partition(": ")[0]
        found.append(httpx2.post(f"http://{url}/get_reward", json={"query": ["a"]}).status_code)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    thread.start()
    assert command.run(config(model)) == 0
    thread.join()
    assert found == [200]
    assert capsys.readouterr().out.endswith("ended\n")
