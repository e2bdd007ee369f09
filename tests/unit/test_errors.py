"""No password, token or signature of a URL is shown or recorded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from taut.cli import main
from taut.errors import ModelError, OutOfMemory, redacted, redacted_in
from taut.io.console import Printer
from taut.train.log import LogConfig, RunLog, read_events

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
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_errors_printed_lines_and_events_have_none(tmp_path: Path) -> None:
    url = URLS[0]
    assert SECRET not in str(ModelError(f"model={url}"))
    assert SECRET not in str(OutOfMemory(f"model={url}"))
    stream = io.StringIO()
    Printer(stream).write(f"{url}\n")
    assert stream.getvalue() == "http://***@host:80/path\n"
    fields: dict[str, Any] = {"model": Path(url), "decisions": [("model", url, {"why": url})]}
    with RunLog.open(tmp_path, LogConfig(console=False)) as log:
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
