"""A Hugging Face hub on the loopback: it takes what is uploaded, and hands out README.md.

    with FakeHub() as hub:
        hub.repositories["me/tiny"].files          what was committed, by branch and name

It speaks what the library asks for an upload: who the token is of, whether a repository is there, create it, make a
branch, which files are large (weights and tokenizers here), the batch and the PUT of git-lfs, and the commit as lines
of JSON. ``refuses`` maps a request, as in "POST /api/repos/create", to a status and a message in place of an answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LARGE = (".safetensors", "tokenizer.json", ".parquet")
TOKEN = "hf_a-token-of-the-tests"
SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """``files``: branch -> name -> content."""

    is_private: bool
    kind: str = "model"
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)
    """Of each commit."""

    def write(self, directory: Path, branch: str = "main") -> Path:
        """The files of a branch, as a directory."""
        for name, content in self.files[branch].items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        return directory


@dataclass
class FakeHub:
    """See above."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content, as git-lfs holds it."""
    refuses: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def read(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def answer(self) -> None:
                body = self.read()
                line = f"{self.command} {self.path.partition('?')[0]}"
                hub.requests.append(line)
                refusal = next((v for k, v in hub.refuses.items() if line.startswith(k)), None)
                if refusal is None and TOKEN not in self.headers.get("Authorization", TOKEN):
                    refusal = 401, "Invalid credentials"
                if refusal is not None and refusal[0] == 404:
                    status, content, headers = _refused("RepoNotFound", refusal[1])
                elif refusal is not None:
                    status, content, headers = _json({"error": refusal[1]}, refusal[0])
                else:
                    status, content, headers = hub.reply(line, body)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def reply(self, line: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Status, content and headers of an answer."""
        if line == "GET /api/whoami-v2":
            return _json(
                {"type": "user", "name": "me", "orgs": [], "auth": {"type": "access_token"}}
            )
        if line == "POST /api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if line == "POST /api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.repositories:
                return _json({"error": "You already created this repo"}, 409)
            is_private = asked.get("visibility") == "private"
            self.repositories[name] = Repository(is_private, asked.get("type", "model"))
            return _json({"url": f"{self.url}/{name}"})
        if found := re.fullmatch(r"PUT /large/([0-9a-f]{64})", line):
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.large[found[1]] = body
            return 200, b"", {}
        if found := re.fullmatch(r"POST /(?:datasets/)?(.+)\.git/info/lfs/objects/batch", line):
            return _json(
                {
                    "transfer": "basic",
                    "objects": [self._object(o) for o in json.loads(body)["objects"]],
                }
            )
        found = re.fullmatch(
            r"\w+ /api/(?:models|datasets)/([\w.-]+/[\w.-]+)(?:/(\w+)/([^/]+))?", line
        )
        if found is None:
            found = re.fullmatch(
                r"\w+ /(?:datasets/)?([\w.-]+/[\w.-]+)/(resolve)/([^/]+)/README.md", line
            )
        if found is None:
            return _json({"error": f"nothing is made for {line}"}, 400)
        name, action, branch = found.groups()
        repository = self.repositories.get(name)
        if repository is None:
            return _refused("RepoNotFound", "Repository not found")
        if action == "branch":
            repository.files.setdefault(branch, dict(repository.files["main"]))
            return _json({})
        if branch is not None and branch not in repository.files:
            return _refused("RevisionNotFound", "Revision not found")
        if action is None:
            return _json({"id": name, "private": repository.is_private, "sha": SHA, "siblings": []})
        if action == "resolve":
            card = repository.files[branch].get("README.md")
            if card is None:
                return _refused("EntryNotFound", "Entry not found")
            return 200, card, {"ETag": f'"{hashlib.sha1(card).hexdigest()}"', "X-Repo-Commit": SHA}
        if action == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return _json({"files": files})
        assert action == "commit", line
        changed = dict(repository.files[branch])
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "header":
                repository.messages.append(value["summary"])
            elif entry["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            else:
                assert entry["key"] == "lfsFile", entry["key"]
                changed[value["path"]] = self.large[value["oid"]]
        repository.files[branch] = changed
        return _json(
            {"success": True, "commitOid": SHA, "commitUrl": f"{self.url}/{name}/commit/{SHA}"}
        )

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.url}/large/{asked['oid']}"}
        return {**asked, "actions": {"upload": upload}}


def _json(value: Any, status: int = 200) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _refused(code: str, message: str) -> tuple[int, bytes, dict[str, str]]:
    status, content, headers = _json({"error": message}, 404)
    return status, content, {**headers, "X-Error-Code": code, "X-Error-Message": message}
