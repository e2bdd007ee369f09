"""``taut page``: one file, or a server that answers this machine's browser and nobody else."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient
from tests.helpers.page_runs import HOSTILE, lines, start, step, write_run

from taut.cli import main
from taut.config import from_mapping
from taut_tools.page import serve as command
from taut_tools.page.serve import build_app
from taut_tools.page.settings import Page

TOKEN = "open-sesame"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/a", [start(data=HOSTILE), step(1)])
    (tmp_path / "runs/secret.txt").write_text("nobody may read this")
    return tmp_path / "runs"


def client(place: Path, token: str | None = None, **keys: Any) -> TestClient:
    config = from_mapping(Page, {"runs": [str(place)], **keys})
    app = build_app(config, [place], token, threading.Event())
    return TestClient(app, base_url="http://127.0.0.1:6070", follow_redirects=False)


def test_one_file_is_written_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place.parent / "page.html"
    assert main(["page", str(place), f"out={out}"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 1 run, 0.")
    assert '<script type="application/json" id="answers">' in out.read_text(encoding="utf-8")
    assert main(["page", str(place / "a"), f"out={out}"]) == 2
    assert (
        f"out={out} exists; expected a new file; name another, or set overwrite=true"
        in capsys.readouterr().err
    )
    assert main(["page", str(place / "a"), f"out={out}", "--overwrite"]) == 0
    for words, said in {
        (str(place / "none"),): "which is no directory; expected a run, or a directory with runs",
        (str(place / "a/nothing"),): "which is no directory",
        (str(place.parent / "empty"),): "no runs in",
        (str(place), f"out={place}"): f"out={place} is a directory; expected a new file",
        (str(place), f"out={place}/none/x.html"): "cannot be written: No such file or directory",
    }.items():
        (place.parent / "empty").mkdir(exist_ok=True)
        capsys.readouterr()
        assert main(["page", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_a_port_in_use_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["page", str(place), f"port={port}"]) == 2
    error = capsys.readouterr().err
    assert (
        f"port={port} cannot be listened on: Address already in use" in error
        and error.count("\n") == 1
    )


def test_the_page_and_answers_with_a_strict_policy(place: Path) -> None:
    http = client(place)
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert http.get("/page.js").headers["content-type"] == "text/javascript; charset=utf-8"
    answer = http.get("/answers/run/a/overview")
    assert answer.json()["start"]["data"] == HOSTILE and "<" not in answer.text
    assert answer.headers["content-type"] == "application/json"
    unknown = http.get("/answers/run/b/overview")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].startswith(
        "found the run 'b'; expected one of 1, such as a"
    )
    for response in (page, answer, unknown, http.get("/none")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self';"
        )
    (place / "a/resolved.json").write_text("[]")
    broken = http.get("/answers/run/a/steps")
    assert broken.status_code == 500 and "is damaged" in broken.json()["error"]["message"]
    assert http.post("/answers/runs").status_code == 405


PATHS = """
/secret.txt /../secret.txt /%2e%2e/secret.txt /answers/../secret.txt /answers/run/..%2Fsecret.txt/overview
/answers/run/../overview /answers/run/%2Fetc/overview /static/page.js /page.html%00 /LICENSE.uplot
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_path_of_a_request_is_one_on_the_disk(place: Path, path: str) -> None:
    http = client(place)
    response = http.get(httpx2.URL("http://127.0.0.1:6070").copy_with(raw_path=path.encode()))
    assert response.status_code == 404 and "nobody may read this" not in response.text


def test_other_sites_and_names_are_refused(place: Path) -> None:
    http = client(place)
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert http.get("/answers/runs", headers=headers).status_code == 403, headers
    said = http.get("/answers/runs", headers={"Origin": "http://evil.example"}).text
    assert "http://evil.example" in said and "open a page of this server" in said
    own = {"Origin": "http://127.0.0.1:6070", "Sec-Fetch-Site": "same-origin"}
    assert http.get("/answers/runs", headers=own).status_code == 200


def test_other_addresses_need_the_token(place: Path) -> None:
    http = client(place, TOKEN)
    for path in (
        "/",
        "/page.js",
        "/answers/runs",
        "/answers/events",
        "/?token=wrong",
        "/answers/runs?token=open-sesame",
    ):
        assert http.get(path).status_code == 401, path
    assert (
        http.get("/answers/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    )
    assert http.get("/answers/runs", headers={"Authorization": TOKEN}).status_code == 401
    entered = http.get(f"/?token={TOKEN}")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert "HttpOnly; SameSite=Strict" in entered.headers["set-cookie"]
    assert http.get("/answers/runs").status_code == 200  # the cookie is kept
    http.cookies.clear()
    http.cookies.set("taut_page", "other")
    assert http.get("/").status_code == 401


def test_a_run_that_grows_is_told_and_the_server_ends_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LOOK_EVERY", 0.05)
    found: list[dict[str, Any]] = []
    grown = lines([step(2)])

    def watch() -> None:
        """Read the events, let the run grow, look again, and end the server while the stream is open."""
        try:
            address = ""
            while not address:
                time.sleep(0.05)
                address = capsys.readouterr().out.strip()
            with httpx2.stream("GET", f"{address}answers/events", timeout=20) as stream:
                received = stream.iter_lines()
                for line in received:
                    if line == ": here" and not found:
                        with (place / "a/events.jsonl").open("a") as file:
                            file.write(grown)
                    if line.startswith("data: "):
                        found.append(json.loads(line.removeprefix("data: ")))
                        found.append(httpx2.get(f"{address}answers/run/a/steps").json())
                        break
                os.kill(os.getpid(), signal.SIGINT)
                for _ in received:
                    pass
        except httpx2.HTTPError:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    begun = time.monotonic()
    assert main(["page", str(place), "port=0"]) == 0
    thread.join()
    assert found[0] == {"run": "a", "step": 2, "state": "died"} and found[1]["last"] == 2
    assert (
        time.monotonic() - begun < 25
    )  # an open stream does not hold it for the time of a request
