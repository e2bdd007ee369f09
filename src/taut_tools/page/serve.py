"""``taut page RUN|DIR ...``: show the records of runs in a browser.

    taut page runs                       serves the page of all runs in a directory, and follows them as they go on
    taut page runs/a runs/b out=ab.html  writes one file with a selection, which opens anywhere

The server answers a question at ``GET /answers/...`` (answers.py); ``GET /answers/events`` names the runs that have
grown (server-sent events). It has nothing else but the page's own files, in memory: no part of a request is a path on
the disk. It listens on the loopback. Other addresses need a token, which is in the printed address: the page keeps it
in a cookie, programs send ``Authorization: Bearer``. SIGTERM and SIGINT end the server.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from taut.config import user_path
from taut.errors import OutputError, TautError
from taut.inference.http_server import (
    App,
    Guard,
    Receive,
    Refused,
    Scope,
    Send,
    is_loopback,
    listen,
    serve,
)
from taut.io import files
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.run.states import state_of
from taut.train.run_dir import EVENTS, MARK, owner
from taut_tools.page.answers import Answers, Unknown, find_runs
from taut_tools.page.file import MIB, PAGE, html, safe_json, static_files
from taut_tools.page.settings import Page

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
"""Kinds of files that are served from the page's folder."""
LOOK_EVERY = 1.0
"""Seconds between two looks at the runs' files."""
SEARCH_EVERY = 10
"""Looks after which new runs are searched for."""
COOKIE = "taut_page"


def run(config: Page) -> int:
    """Write the file, or serve the page."""
    places = [user_path(place, "runs") for place in config.runs or ["."]]
    for place in places:
        if not place.is_dir():
            raise OutputError(
                f"found {str(place)!r}, which is no directory; expected a run, or a directory with runs; name another"
            )
    found = find_runs(places)
    if not found:
        looked = ", ".join(map(str, places))
        raise OutputError(
            f"no runs in {looked}: no directory with a {MARK}; expected at least one; name another directory"
        )
    return _serve(config, places) if config.out is None else _write(config, found)


def _write(config: Page, found: Mapping[str, Path]) -> int:
    assert config.out is not None
    path = user_path(config.out, "out")
    if path.is_dir() or (path.exists() and not config.overwrite):
        what = "is a directory" if path.is_dir() else "exists"
        raise OutputError(
            f"out={path} {what}; expected a new file; name another, or set overwrite=true"
        )
    text = html(Answers(found), int(config.max_mib * MIB))
    try:
        files.write_text(path, text)
    except OSError as error:
        raise OutputError(
            f"out={path} cannot be written: {error.strerror or error}; expected a place with room; name another"
        ) from error
    size = len(text.encode()) / MIB
    Terminal(soft_wrap=True).lines([f"{path}: {counted(len(found), 'runs')}, {size:.1f} MiB"])
    return 0


def _serve(config: Page, places: list[Path]) -> int:
    token = None if is_loopback(config.host) else secrets.token_urlsafe(24)
    ending = threading.Event()
    with closing(listen(config.host, config.port, backlog=128)) as listener:
        host, port = listener.getsockname()[:2]
        app = build_app(config, places, token, ending)
        place = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?{urlencode({'token': token})}"
        Terminal(soft_wrap=True).lines([f"http://{place}:{port}/{query}"])
        serve(app, config, listener, ending)
    return 0


def build_app(config: Page, places: list[Path], token: str | None, ending: threading.Event) -> App:
    """Build the application behind its limits. Requests must have ``token``, if any; ``ending`` is set at the end."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    answers = Answers(find_runs(places), is_live=True)
    threads = ThreadPoolExecutor(4, thread_name_prefix="answers")
    threads.submit(answers.read_ahead)
    static = {name: text for name, text in static_files().items() if Path(name).suffix in TYPES}

    async def static_file(request: Request) -> Response:
        name = request.path_params.get("name", PAGE)
        if name not in static:
            raise Unknown(f"found {name[:80]!r}; expected / or /answers/...")
        return Response(static[name], media_type=TYPES[Path(name).suffix], headers=HEADERS)

    async def answer(request: Request) -> Response:
        path, query = request.scope["raw_path"], request.scope["query_string"]
        question = path.decode("latin-1").removeprefix("/answers/")
        if query:
            question += f"?{query.decode('latin-1')}"
        found = await asyncio.get_running_loop().run_in_executor(
            threads, lambda: safe_json(answers.answer(question)).encode()
        )
        return Response(found, media_type="application/json", headers=HEADERS)

    async def events(_: Request) -> Response:
        changes = _changes(answers, places, threads, ending)
        return StreamingResponse(changes, media_type="text/event-stream", headers=HEADERS)

    async def health(_: Request) -> Response:
        return Response(b'{"status": "ok"}', media_type="application/json", headers=HEADERS)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return Response(error.body, error.status, {**error.headers, **HEADERS})

    async def failed(request: Request, error: Exception) -> Response:
        return await refused(
            request, Refused(404 if isinstance(error, Unknown) else 500, str(error))
        )

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        target = f"{request.method} {request.url.path[:80]}"
        return await refused(
            request, Refused(error.status_code, f"{target}: expected GET / or GET /answers/...")
        )

    app = Starlette(
        routes=[
            Route("/", static_file, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/answers/events", events, methods=["GET"]),
            Route("/answers/{question:path}", answer, methods=["GET"]),
            Route("/{name}", static_file, methods=["GET"]),
        ],
        exception_handlers={Refused: refused, TautError: failed, HTTPException: unknown},
    )
    return Guard(app if token is None else Gate(app, token), config, config.host)


async def _changes(
    answers: Answers, places: list[Path], threads: ThreadPoolExecutor, ending: threading.Event
) -> AsyncIterator[str]:
    """Send a message for each run that has grown or ended since the last look, and for each new run."""
    loop, seen, number = asyncio.get_running_loop(), _looks(answers), 0
    while True:
        if number % SEARCH_EVERY == 0:
            yield ": here\n\n"  # writing to a connection shows whether it is gone
            answers.use(await loop.run_in_executor(threads, find_runs, places))
        await asyncio.sleep(LOOK_EVERY)
        if ending.is_set():
            return
        number += 1
        now = await loop.run_in_executor(threads, _looks, answers)
        for name, look in now.items():
            if seen.get(name) != look:
                state = await loop.run_in_executor(threads, state_of, look[0])
                message = safe_json({"run": name, "step": state.step, "state": state.state})
                yield f"data: {message}\n\n"
        seen = now


def _looks(answers: Answers) -> dict[str, tuple[Path, int, int, bool]]:
    """The state that changes as runs go on: size and time of their events, and whether a process writes them."""
    found = {}
    for name, one in answers.runs.items():
        with suppress(OSError):
            status = (one.out / EVENTS).stat()
            is_written = owner(one.out) is not None
            found[name] = one.out, status.st_size, status.st_mtime_ns, is_written
    return found


class Gate:
    """Admits requests with the token, in a cookie, which ``/?token=...`` sets, or as Authorization: Bearer."""

    def __init__(self, app: App, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(given):
            cookie = f"{COOKIE}={given}; Path=/; HttpOnly; SameSite=Strict"
            await _send(send, 303, {**HEADERS, "location": "/", "set-cookie": cookie}, b"")
            return
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        is_known = scheme.lower() == "bearer" and self._is_token(bearer.strip())
        if not is_known and not self._is_token(_cookie(headers.get(b"cookie", ""))):
            refused = Refused(
                401,
                "found no token, or another; expected the server's; open the address that it printed",
                "Authorization",
            )
            await _send(send, 401, {**HEADERS, **refused.headers}, refused.body)
            return
        await self._app(scope, receive, send)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)


def _cookie(header: str) -> str:
    """The token in a Cookie header, or an empty text."""
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    listed = [
        (name.encode(), value.encode())
        for name, value in {**headers, "content-length": str(len(body))}.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})
