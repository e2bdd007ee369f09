"""A server whose limit of open files is low, in a process of its own, under more connections than that."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

SERVER = """
import json, os, resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from taut.inference.http_server import Guard, HttpLimits, listen, serve_aside

async def app(scope, receive, send):
    if scope["path"] == "/fail":
        raise OSError(24, "Too many open files")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

limits = HttpLimits()
listener = listen("127.0.0.1", 0, backlog=512)
stop = serve_aside(Guard(app, limits, "127.0.0.1"), limits, listener)
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
stop()
"""
CLIENTS = """
import socket, sys, time
port, open_ones, end = int(sys.argv[1]), [], time.monotonic() + 3
while time.monotonic() < end:
    try:
        open_ones.append(socket.create_connection(("127.0.0.1", port), timeout=0.2))
    except OSError:
        pass
    if len(open_ones) > 200:
        open_ones.pop(0).close()
"""


@pytest.mark.slow
def test_it_serves_and_says_little_where_descriptors_are_short() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", CLIENTS, port]) as clients:
            time.sleep(1)
            for path in ("", "fail", "fail", ""):
                status = subprocess.run(
                    [sys.executable, "-c", ASK, port, path],
                    capture_output=True,
                    text=True,
                    timeout=30,
                ).stdout.strip()
                assert status == ("500" if path else "200")
            assert clients.wait(30) == 0
        _, errors = server.communicate("end\n", timeout=60)
    lines = errors.splitlines()
    assert 1 <= len(lines) <= 3, errors
    assert "Too many open files" in lines[0]
    assert "Traceback" not in errors


ASK = """
import http.client, sys
asking = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=20)
asking.request("GET", "/" + sys.argv[2])
print(asking.getresponse().status)
"""
