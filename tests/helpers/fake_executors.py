"""Piston, E2B and Morph on loopback, for tests: what they are sent is executed by a Python of this machine.

``Fake.faults`` holds what goes wrong with the next requests that run a program (or with all of them: ``fault``).
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "sesame-4711"
NAMES = ("piston", "e2b", "morph")


@dataclass
class Fake:
    """A service. ``fault(job)`` names what goes wrong with a request that runs a job (or brings a part of it: ``job``
    is empty), or nothing."""

    url: str = ""
    faults: list[str] = field(default_factory=list)
    fault: Callable[[str], str | None] = lambda job: None
    output_max_size: int = 2**24
    """Piston's: more is not passed on."""
    run_timeout: int = 10**6
    """Piston's: the most milliseconds that may be asked for."""
    starts: list[str] = field(default_factory=list)
    """What goes wrong with the next machines that are started: statuses."""
    asked: list[tuple[str, str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Method, path, headers and body of each request."""
    running: set[str] = field(default_factory=set)
    """Machines that have been started and not ended."""
    ended: threading.Event = field(default_factory=threading.Event)
    at_a_time: int = 0
    most: int = 0

    def paths(self, method: str = "POST") -> list[str]:
        return [path for asked, path, *_ in self.asked if asked == method]


@contextmanager
def serving(name: str) -> Iterator[Fake]:
    """The service ``name`` of ``NAMES``."""
    fake, lock = Fake(), threading.Lock()
    folders: dict[str, Path] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answered("GET")

        def do_POST(self) -> None:
            self._answered("POST")

        def do_DELETE(self) -> None:
            self._answered("DELETE")

        def _answered(self, method: str) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size) or b"{}")
            with lock:
                fake.asked.append((method, self.path, dict(self.headers), body))
            runs = self.path.endswith(("/execute", "/exec"))
            if not runs:
                return self._send(*self._managed(method, body))
            with lock:
                fake.at_a_time += 1
                fake.most = max(fake.most, fake.at_a_time)
                fault = fake.faults.pop(0) if fake.faults else fake.fault(self._job(body))
            if name == "piston" and body["run_timeout"] > fake.run_timeout:
                fault = "400"
            try:
                if not (fault and self._went_wrong(fault)):
                    self._send(200, self._ran(body))
            finally:
                with lock:
                    fake.at_a_time -= 1

        def _managed(self, method: str, body: dict[str, Any]) -> tuple[int, Any]:
            """Machines are started and ended."""
            secret = self.headers.get("X-API-KEY") or self.headers.get("Authorization", "")
            if KEY not in secret:
                return 401, {"message": f"the key {secret} is unknown"}
            if method == "DELETE":
                fake.running.discard(self.path.rpartition("/")[2])
                return 204, None
            if method == "GET":
                return 200, {"id": self.path.rpartition("/")[2], "status": "ready"}
            if fake.starts:
                return int(fake.starts.pop(0)), {"message": "no machine"}
            number = f"machine-{len(fake.asked)}"
            fake.running.add(number)
            if name == "e2b":
                assert (
                    body["templateID"] == "code-interpreter-v1"
                    and not body["allow_internet_access"]
                )
                return 201, {"sandboxID": number, "envdAccessToken": "token", "domain": None}
            assert self.path == "/instance?snapshot_id=snapshot%2F1" and body["ttl_seconds"] > 0
            return 200, {"id": number, "status": "pending"}

        def _job(self, body: dict[str, Any]) -> str:
            """What the program that is run reads, as text."""
            if name == "piston":
                return str(body["stdin"])
            if name == "e2b":
                coded = re.search(r"b64decode\('([^']*)'", body["code"])
                assert coded is not None
                return base64.b64decode(coded[1]).decode()
            file = folders.get(self.path.split("/")[2], Path()) / "taut-job"
            runs = not body["command"][0].startswith("printf")
            return base64.b64decode(file.read_bytes()).decode() if runs and file.exists() else ""

        def _ran(self, body: dict[str, Any]) -> Any:
            if name == "piston":
                return piston(body, fake.output_max_size)
            if name == "e2b":
                assert self.headers["E2b-Sandbox-Id"] in fake.running
                assert self.headers["X-Access-Token"] == "token"
                text = executed([sys.executable, "-c", body["code"]]).stdout
                middle = len(text) // 2
                messages = [
                    {"type": "stdout", "text": it, "timestamp": 1}
                    for it in (text[:middle], text[middle:])
                ]
                lines = [*messages, {"type": "number_of_executions", "execution_count": 1}]
                return "".join(json.dumps(it) + "\n" for it in lines)
            number = self.path.split("/")[2]
            assert number in fake.running
            folder = folders.setdefault(number, Path(tempfile.mkdtemp()))
            command = body["command"][0].replace("python3", shlex.quote(sys.executable))
            ran = executed(["env", f"TMPDIR={folder}", "bash", "-c", command])
            return {"exit_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}

        def _went_wrong(self, fault: str) -> bool:
            """Whether that was the answer."""
            if fault.isdigit():
                headers = {"Location": "http://127.0.0.1:9/"} if fault == "302" else {}
                self._send(int(fault), {"message": f"no: {self.headers}"}, headers)
            elif fault == "garbage":
                self._send(200, "<html>\x1b[31m")
            elif fault == "deep":
                self._send(200, "[" * 100_000)
            elif fault == "other":
                self._send(200, {"run": 1, "stdout": 2})
            elif fault == "dropped":
                self.close_connection = True
            elif fault == "truncated":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"run": ')
                self.close_connection = True
            elif fault == "silent":
                fake.ended.wait(20)
                self.close_connection = True
            elif fault == "dripping":
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
                    while not fake.ended.wait(0.05):
                        self.wfile.write(b"a")
            elif fault == "huge":
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                    while not fake.ended.is_set():
                        self.wfile.write(b" " * 2**16)
            elif fault == "bomb":
                self._send(200, gzip.compress(b" " * 2**24), {"Content-Encoding": "gzip"})
            elif fault == "packed":
                self._send(200, b"", {"Content-Encoding": "br"})
            return True

        def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            data = (
                body
                if isinstance(body, bytes)
                else body.encode()
                if isinstance(body, str)
                else None
            )
            if data is None:
                data = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            for header, value in (headers or {}).items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    class Listening(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that has gone away is no news."""

    listening = Listening(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{listening.server_address[1]}"
    try:
        yield fake
    finally:
        fake.ended.set()
        listening.shutdown()
        thread.join()
        listening.server_close()
        for folder in folders.values():
            shutil.rmtree(folder)


def piston(body: dict[str, Any], most: int) -> dict[str, Any]:
    """A run as Piston has it: its own limits, and how it says that they ended the run."""
    with tempfile.TemporaryDirectory() as folder:
        (source,) = body["files"]
        Path(folder, source["name"]).write_text(source["content"], encoding="utf-8")
        line = [sys.executable, str(Path(folder, source["name"]))]
        status = None
        try:
            ran = executed(line, body["stdin"] + "\n", body["run_timeout"] / 1000)
            stdout, stderr, code = ran.stdout, ran.stderr, ran.returncode
        except subprocess.TimeoutExpired as error:
            stdout, stderr, code, status = (error.stdout or b"").decode(), "", -9, "TO"
    if len(stdout) > most:
        stdout, code, status = stdout[:most], -9, "OL"
    run = {
        "stdout": stdout,
        "stderr": stderr,
        "output": stdout + stderr,
        "code": None if code < 0 else code,
        "signal": "SIGKILL" if code < 0 else None,
        "message": None,
        "status": status,
    }
    return {"run": run, "language": "python", "version": "3.12.0"}


def executed(
    line: list[str], text: str = "", seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """A process that has ended, and what it printed."""
    return subprocess.run(
        line, input=text, capture_output=True, text=True, timeout=seconds, check=False
    )
