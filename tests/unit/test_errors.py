"""No password, token or signature of a URL is shown or recorded."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from taut.cli import main
from taut.errors import ModelError, OutOfMemory, redacted, redacted_in
from taut.io.console import Printer
from taut.train.log import RunLog, read_events
from taut.train.settings import LogConfig

SECRET = "hunter2"
SCHEMES = (
    "http",
    "https",
    "s3",
    "redis",
    "git+https",
    "git+ssh",
    "hf",
    "socks5h",
    "postgresql+psycopg2",
    "X-y.z",
)
URLS = [
    *(f"{scheme}://bob:{SECRET}@host:80/path" for scheme in SCHEMES),
    f"redis://:{SECRET}@host/0",
    f"https://{SECRET}@host/repository.git",
    f"s3://AKIA:{SECRET}/with/slashes+@bucket/rows.jsonl",
    f"https://bob:{SECRET}@{SECRET}@host",
    f"http:/bob:{SECRET}@host/what/a/path/makes/of/it",
    f"https://host/x?token={SECRET}",
    f"https://host/x?n=1&access_token={SECRET}&m=2",
    f"https://bucket/x?X-Amz-Algorithm=A&X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
    f"https://host/x?sig={SECRET}&api_key={SECRET}&apikey={SECRET}&password={SECRET};pwd={SECRET}",
    f"https://host/callback#access_token={SECRET}",
    f"https://host/x?accessToken={SECRET}&ApiKey={SECRET}&client_secret={SECRET}&AUTH={SECRET}&private-key={SECRET}",
    f"https://storage/x?X-Goog-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
]


@pytest.mark.parametrize("url", URLS)
def test_the_secret_is_hidden_wherever_the_url_stands(url: str) -> None:
    for text in (
        url,
        f"found '{url}', expected",
        f"a={url} b={url}",
        f"[{url}]",
        f'{{"u": "{url}"}}',
    ):
        assert SECRET not in redacted(text)
        assert "***" in redacted(text)
    assert redacted(f"{url} and more").endswith(" and more")


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1",
        "https://host/x?page=2&keyboard",
        "https://host/x?max_tokens=5&author=a&monkey=b&design=c&passage=d&keyboard=e&authority=f",
        "write to bob@host.org: today",
        "a:/b c@d",
        "decorators: @property",
        "data.token_budget=3",
        "https://host/@user/post",
        "model=org/name@main; expected key=value",
        "http://127.0.0.1:8000/v1/@x",
        "mcp:env GITHUB_TOKEN=$GITHUB_TOKEN server --token $TOKEN",
        "--max-tokens 5 --key-file a --keys 3 --token TOKEN",
        "TOKENIZERS_PARALLELISM=false KEY_FILE=/a rollout.server.api_key_env=OPENAI_API_KEY",
        "Authorization: found no token; expected Bearer and the server's token; send it",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


COMMANDS = [
    f"mcp:env GITHUB_TOKEN={SECRET} npx server",
    f"mcp:env AWS_SECRET_ACCESS_KEY='{SECRET} {SECRET}' DEBUG=1 server",
    f"agent:env MY_KEY={SECRET} python agent.py",
    f"serve --api-key {SECRET} --port 1",
    f"serve --token={SECRET} -v",
    f'curl -H "Authorization: Bearer {SECRET}" http://host',
    f"curl --header 'X-Api-Key: {SECRET}' http://host",
    f"{{'api_key': '{SECRET}', 'n': 1}}",
    f'{{"Authorization": "Basic {SECRET}"}}',
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_secret_of_a_command_is_hidden(command: str) -> None:
    for text in (command, f"found {command!r}; expected", f"a {command} b"):
        assert SECRET not in redacted(text), redacted(text)
        assert "***" in redacted(text)
    assert SECRET not in json.dumps(
        redacted_in({"tools": [command], "argv": command.split(" ")[:1]})
    )


def test_words_of_a_command_and_tokens_of_services_are_hidden() -> None:
    words = [
        "serve",
        "--hf-token",
        SECRET,
        "--key",
        SECRET,
        "--verbose",
        "--key",
        "$NAME",
        "-n",
        "1",
    ]
    hidden = [
        "serve",
        "--hf-token",
        "***",
        "--key",
        "***",
        "--verbose",
        "--key",
        "$NAME",
        "-n",
        "1",
    ]
    assert redacted_in(words) == hidden
    for token in ("ghp_" + "a1" * 18, "sk-proj-" + "b2" * 20, "hf_" + "cD" * 17, "AKIA" + "E" * 16):
        assert redacted(f"it says {token}.") == "it says ***."


def test_a_long_text_is_searched_in_no_time() -> None:
    for text in (
        "--" + "a-" * 100_000,
        "A_" * 100_000 + "KEY",
        "http://" + "a:" * 100_000,
        "key" * 100_000,
    ):
        began = time.process_time()
        redacted(text)
        assert time.process_time() - began < 2


def test_errors_printed_lines_and_events_have_none(tmp_path: Path) -> None:
    url = URLS[0]
    assert SECRET not in str(ModelError(f"model={url}"))
    assert SECRET not in str(OutOfMemory(f"model={url}"))
    stream = io.StringIO()
    Printer(stream).write(f"{url}\n")
    assert stream.getvalue() == "http://***@host:80/path\n"
    fields: dict[str, Any] = {"model": Path(url), "decisions": [("model", url, {"why": url})]}
    with RunLog().open(tmp_path, LogConfig(console=False)) as log:
        log.emit("start", **fields)
    assert SECRET not in (tmp_path / "events.jsonl").read_text()
    assert read_events(tmp_path / "events.jsonl")[0]["decisions"][0][0] == "model"
    assert redacted_in([1, None, 2.5, True]) == [1, None, 2.5, True]


@pytest.mark.parametrize(
    "words",
    [
        ["sft", "model=URL", "data.train=a", "out=o"],
        ["check", "--method", "sft", "model=URL", "data.train=URL"],
        ["check", "--json", "--method", "sft", "model=URL", "data.train=URL"],
        ["show", "URL"],
        ["runs", "URL"],
        ["URL"],
        ["sft", "URL.toml"],
        ["grpo", "model=/x", "data.train=a", "out=o", "rewards.functions=URL"],
    ],
)
def test_commands_print_none(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (URLS[0], URLS[4]):
        assert main([word.replace("URL", url) for word in words]) != 0
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err
        assert "***" in printed.out + printed.err
        if "--json" in words:
            json.loads(printed.out)
