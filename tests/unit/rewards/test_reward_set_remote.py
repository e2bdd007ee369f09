"""Verifiers that ask a server: what is sent, what comes back, and all that may come between."""

from __future__ import annotations

import gzip
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.helpers.broken_servers import OK, answers, repeats, serving

from taut.errors import ConfigError, UserCodeError
from taut.io.http import Retries
from taut.rewards import RewardInput, Score
from taut.rewards.judge import Judge
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import GradingConfig, RewardSpec
from taut.rewards.verifier import MAX_REPLY

Reply = tuple[int, Any] | None
"""Status and what is sent; None: the connection is dropped."""


@dataclass
class Server:
    """Replies as it is told to; ``asked`` has the path, the key and the body of every request."""

    url: str = ""
    reply: Callable[[dict[str, Any]], Reply] = lambda body: (200, {})
    asked: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)
    at_a_time: int = 0
    most: int = 0


@pytest.fixture
def server() -> Iterator[Server]:
    made, lock = Server(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                made.asked.append((self.path, self.headers["Authorization"], body))
                made.at_a_time += 1
                made.most = max(made.most, made.at_a_time)
            reply = made.reply(body)
            with lock:
                made.at_a_time -= 1
            if reply is None:
                self.close_connection = True
                return
            data = (reply[1] if isinstance(reply[1], str) else json.dumps(reply[1])).encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.url = f"http://127.0.0.1:{listening.server_address[1]}"
    yield made
    listening.shutdown()
    thread.join()
    listening.server_close()


def said(
    name: str, *answers: RewardInput, timeout: float = 10, concurrency: int = 16, **options: Any
) -> list[Score]:
    spec = RewardSpec(name=name, timeout=timeout, options=options)
    with open_rewards([spec], GradingConfig(concurrency=concurrency)) as reward_set:
        return [reward_result.parts[name] for reward_result in reward_set.grade(answers)]


def chat(text: object) -> Reply:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


ASKED = RewardInput(
    text="It is {reference}.",
    references=("4", "four"),
    prompt=({"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},),
)


def test_a_reward_server_is_sent_prompt_and_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPEN", "sesame")
    server.reply = lambda body: (200, {"scores": [len(body["completions"][0]) / 2]})
    turns = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    answers = [
        RewardInput(text="abc", prompt="Go on: "),
        ASKED,
        RewardInput(text="c", prompt=ASKED.prompt, messages=(*turns, turns[0])),
    ]
    scores = said(
        "reward_server", *answers, url=f"{server.url}/", api_key_env="OPEN", concurrency=1
    )
    assert [score.value for score in scores] == [1.5, len(ASKED.text) / 2, 1.5]
    assert {(path, key) for path, key, _ in server.asked} == {("/score", "Bearer sesame")}
    sent = [body for _, _, body in server.asked]
    assert sent[0] == {"prompts": ["Go on: "], "completions": ["abc"]}
    assert sent[1] == {"prompts": [[dict(ASKED.prompt[0])]], "completions": [ASKED.text]}  # type: ignore[arg-type]
    assert sent[2]["completions"] == [[*turns, turns[0]]]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((400, {"error": {"message": "too long"}}), "EngineError: HTTP 400 from .*too long"),
        ((401, "sesame is wrong"), r"HTTP 401 from .*: \*\*\* is wrong"),
        ((200, "<html>"), "answered '<html>'; expected JSON"),
        ((200, {"scores": []}), "expected one score"),
        ((200, {"you": "sesame"}), r"answered \{'you': '\*\*\*'\}; expected one score"),
        ((200, {"scores": [None]}), "expected one score"),
        ((200, [1.0]), "expected one score"),
        ((200, '{"scores": [NaN]}'), "reward_server returned nan; expected a finite number"),
    ],
)
def test_what_is_no_score_is_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, reply: Reply, error: str
) -> None:
    monkeypatch.setenv("OPEN", "sesame")
    server.reply = lambda body: reply
    (score,) = said("reward_server", ASKED, url=server.url, api_key_env="OPEN")
    assert score.value is None
    assert re.search(error, str(score.error))


def test_an_answer_that_inflates_drips_or_nests_is_an_error_of_that_answer() -> None:
    with serving() as server:
        bomb = gzip.compress(bytes(10**8))
        server.paths["/bomb/score"] = answers(bomb, b"Content-Encoding: gzip")
        server.paths["/drips/score"] = repeats(OK, b"X: y\r\n", 0.02)
        server.paths["/nests/score"] = answers(b"[" * 99_999)
        for path, found in (
            ("bomb", "answered more than 16,777,216 bytes; expected"),
            ("drips", "reward_server had no answer within 1 s"),
            ("nests", "expected JSON"),
        ):
            server.paths[f"/{path}"] = answers(b"{}")
            (score,) = said("reward_server", ASKED, url=f"{server.url}/{path}", timeout=1)
            assert score.value is None and found in str(score.error)


def test_a_score_that_is_no_number_stops_the_run(server: Server) -> None:
    server.reply = lambda body: (200, {"scores": ["high"]})
    with pytest.raises(UserCodeError, match="reward_server returned 'high' of type str; expected"):
        said("reward_server", ASKED, url=server.url)
    server.reply = lambda body: (200, {"scores": [True]})
    assert said("reward_server", ASKED, url=server.url) == [Score(1.0)]


def test_a_server_that_is_busy_or_hangs_up_is_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taut.rewards.verifier.RETRIES", Retries(first_pause=0.01))
    replies: list[Reply] = [(503, "wait"), None, (429, ""), (200, {"scores": [2]})]
    server.reply = lambda body: replies[min(len(server.asked), 4) - 1]
    assert said("reward_server", ASKED, url=server.url) == [Score(2.0)]
    assert len(server.asked) == 4


def test_an_answer_that_is_late_is_an_error_and_holds_nobody_up(server: Server) -> None:
    """Eight at a time, of which one is never answered in time, in a thread that is not the main one."""
    go = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if body["completions"] == ["late"]:
            go.wait(60)
        return 200, {"scores": [1]}

    server.reply = reply
    texts = ["late", *map(str, range(20))]
    found: list[Score] = []

    def ask() -> None:
        answers = [RewardInput(text=text, prompt="") for text in texts]
        found.extend(said("reward_server", *answers, url=server.url, timeout=2, concurrency=8))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    go.set()
    assert found[0] == Score(error="reward_server had no answer within 2 s")
    assert found[1:] == [Score(1.0)] * 20
    assert 1 < server.most <= 8


def test_a_server_that_goes_away_is_an_error_in_time() -> None:
    with serving() as server:
        server.paths["/"] = answers(b"{}", b"Connection: close")
        reward_set = open_rewards(
            [RewardSpec(name="reward_server", timeout=3, options={"url": server.url})]
        )
    with reward_set:
        score = reward_set.grade([ASKED])[0].parts["reward_server"]
    late = "reward_server had no answer within 3 s; the last: no answer (ConnectError: "
    assert str(score.error).startswith(late)


def test_a_server_that_stays_busy_is_told_with_its_status(server: Server) -> None:
    server.reply = lambda body: (503, "wait")
    (score,) = said("reward_server", ASKED, url=server.url, timeout=3)
    assert score == Score(error="reward_server had no answer within 3 s; the last: HTTP 503")


def test_a_judge_is_asked_about_the_answer_and_its_last_number_counts(server: Server) -> None:
    server.reply = lambda body: chat("A score: 3 would be too low. **Score: 8**")
    options = {"url": f"{server.url}/v1", "model": "m", "extra": {"top_p": 1}}
    (score,) = said("judge", ASKED, **options)
    assert score == Score(0.8, reply="A score: 3 would be too low. **Score: 8**")
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/chat/completions", None)
    assert (body["model"], body["temperature"], body["top_p"]) == ("m", 0.0, 1)
    (message,) = body["messages"]
    assert "<question>\n2 + 2?\n</question>\n<reference>\n4\nfour\n" in message["content"]
    assert "<answer>\nIt is {reference}.\n</answer>" in message["content"]


def test_a_long_reply_is_kept_with_its_beginning_and_its_end(server: Server) -> None:
    server.reply = lambda body: chat(f"First, {'hm ' * 9_000}. Score: 10")
    (score,) = said("judge", ASKED, url=server.url, model="m")
    assert score.reply is not None and len(score.reply) == MAX_REPLY
    assert score.reply.startswith("First, hm") and score.reply.endswith("Score: 10")


def test_an_answer_that_is_no_unicode_is_sent_as_what_is(server: Server) -> None:
    server.reply = lambda body: (200, {"choices": [{"message": {"content": "Score: 1"}}]})
    (score,) = said("judge", RewardInput(text="\ud800 five"), url=f"{server.url}/v1", model="m")
    assert score.value == 0.1
    assert "? five" in server.asked[0][2]["messages"][0]["content"]


def test_a_judge_may_see_the_whole_conversation(server: Server) -> None:
    """Every turn with its role, calls and results; the answer alone by default."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    asked = RewardInput(
        text="It is 5.",
        prompt=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 and 3?"},
        ),
        messages=(
            {"role": "assistant", "content": "I add.", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ),
    )
    server.reply = lambda body: (200, {"choices": [{"message": {"content": "Score: 7"}}]})
    options = {"url": f"{server.url}/v1", "model": "m"}
    assert said("judge", asked, **options, sees="conversation") == [Score(0.7, reply="Score: 7")]
    assert said("judge", asked, **options)[0].value == 0.7
    whole, last = (body["messages"][0]["content"] for _, _, body in server.asked)
    turns = (
        '[system]\nBe brief.\n\n[user]\n2 and 3?\n\n[assistant]\nI add.\n[call of add] {"a": 2}\n\n'
        "[tool add]\n5\n\n[assistant]\nIt is 5."
    )
    assert f"<conversation>\n{turns}\n</conversation>" in whole
    assert "I add." not in last and "<answer>\nIt is 5.\n</answer>" in last
    said("judge", asked, **options, template="Rate {conversation} {x}", sees="conversation")
    assert server.asked[-1][2]["messages"][0]["content"] == f"Rate {turns} {{x}}"
    said("judge", RewardInput(text="5", prompt="2 and 3? "), **options, sees="conversation")
    assert (
        "<conversation>\n2 and 3? \n\n[assistant]\n5\n"
        in server.asked[-1][2]["messages"][0]["content"]
    )


def test_a_judge_without_a_number_is_asked_again_and_then_an_error(server: Server) -> None:
    replies = ["Good!", "Score: 11", "Score: 10"]
    server.reply = lambda body: chat(replies[len(server.asked) - 1])
    asked = {"url": server.url, "model": "m"}
    assert said("judge", ASKED, **asked, tries=3) == [Score(1.0, reply="Score: 10")]
    assert [body["temperature"] for _, _, body in server.asked] == [0.0, 1.0, 1.0]
    server.asked.clear()
    assert said("judge", ASKED, **asked) == [
        Score(error="DataError: the judge replied 'Score: 11'; expected a number from 0 to 10")
    ]
    server.reply = lambda body: chat(None)
    (score,) = said("judge", ASKED, **asked)
    assert "expected a chat completion with a text" in str(score.error)


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("Score: -5", "-5"),
        ("Score - 5", "5"),
        ("Score (0-10): 7", "7"),
        ("**Score (0 to 10)**:\n**7**", "7"),
        ("Score (8)\n\n3 things are right.", "8"),
        ("Score: 6.5/10", "6.5"),
    ],
)
def test_the_number_that_a_judge_gives(said: str, number: str) -> None:
    assert re.findall(Judge(url="http://host", model="m").pattern, said) == [number]


def test_a_judge_has_a_scale_and_words_of_its_own(server: Server) -> None:
    server.reply = lambda body: chat("verdict=-1")
    options = {"template": '{"a": {answer}}', "pattern": "verdict=(-?[01])", "low": -1, "high": 1}
    assert said("judge", ASKED, url=server.url, model="m", **options)[0].value == 0.0
    assert server.asked[0][2]["messages"][0]["content"] == '{"a": It is {reference}.}'


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reward_server", {"url": "127.0.0.1:9"}, "expected a URL .* as in http://"),
        (
            "reward_server",
            {"url": "http://me:key@host"},
            "a key or password goes into the environment variable",
        ),
        (
            "reward_server",
            {"url": "http://host", "api_key_env": "NOT_SET"},
            "no environment variable",
        ),
        ("judge", {"url": "http://host"}, "model"),
        (
            "judge",
            {"url": "http://host", "model": "m", "low": 10},
            "low=10 with .*expected a lower judge.low",
        ),
        ("judge", {"url": "http://host", "model": "m", "template": "?"}, "without {answer}"),
        (
            "judge",
            {"url": "http://host", "model": "m", "template": "{answer}", "sees": "conversation"},
            "without {conversation}",
        ),
        ("judge", {"url": "http://host", "model": "m", "pattern": "5"}, "has no group"),
        ("reward_model", {"model": "dir"}, "a model in this process, where none can be"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_rewards([RewardSpec(name=name, options=options)])


FORGETFUL = """
import socket

from taut.rewards import RewardInput
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import RewardSpec

listening = socket.create_server(("127.0.0.1", 0))  # and never answers
url = {"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}
reward_set = open_rewards([RewardSpec(name="reward_server", timeout=0.1, options=url)])
reward_set.grade([RewardInput(text="a")])
"""


def test_a_program_ends_that_closes_no_panel() -> None:
    """Its thread would be waited for, and it would wait for the thread's loop, which no longer runs."""
    assert (
        subprocess.run([sys.executable, "-c", FORGETFUL], timeout=60, check=False).returncode == 0
    )


def test_a_closed_panel_asks_nobody(server: Server) -> None:
    spec = RewardSpec(name="reward_server", options={"url": server.url})
    with open_rewards([spec]) as reward_set:
        pass
    with pytest.raises(RuntimeError, match="the rewards are closed"):
        reward_set.grade([ASKED])
    assert server.asked == []


@pytest.mark.parametrize("name", ["judge", "reward_server"])
def test_a_server_that_is_not_there_is_refused_before_the_run_by_its_url(name: str) -> None:
    """And not after the time limit of each answer: 120 s with a judge."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        options = {"url": url} | ({"model": "m"} if name == "judge" else {})
        start = time.monotonic()
        with pytest.raises(ConfigError, match=f"{name}.url={url} and nothing listens there") as e:
            open_rewards([RewardSpec(name=name, options=options)])
    assert time.monotonic() - start < 60 and "\n" not in str(e.value)
