"""``taut serve-reward MODEL [port=5000]``: serve a reward model over HTTP.

    POST /score        {"prompts": [...], "completions": [...]}                  -> {"scores": [...]}
                       with "step_separator": "...", for a process model         -> {"scores": [[...], ...]}
                       a prompt is a text or messages, a completion the text or messages that answer it; pictures
                       are in messages, as data URLs or base64
    POST /get_reward   {"query": [...], "prompts": [...], "labels": [...]}       -> {"rewards", "scores", "extra_logs"}
                       OpenRLHF's remote reward: a query is prompt and answer with all special tokens, as generated
    GET  /schema       the JSON schemas of both requests
    GET  /health       {"status": "ok", "model", "waiting"}, or 503 with the reason

A score is the scalar head's output at the last token, or at the last token of each step. Waiting requests are scored
together (inference/reward_model.py). A refused request is answered with {"error": {"message", "field"}}: 400 for its
content, 413 for its size, 503 while nothing can be scored; http_server.py refuses others before their body is read.
Files and addresses that a client names are never opened. A thread parses JSON and reads rows, so that GET /health is
answered meanwhile.

The server listens on the loopback. With ``key`` or ``key_file`` every POST must have that token (Authorization:
Bearer); a host that others can reach requires a token, unless ``without_key`` is set. SIGTERM and SIGINT end the server
after the current requests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from taut.commands.reading import print_decisions
from taut.config import home_path, read_secret
from taut.data.read.json_io import shown
from taut.data.rows.messages import (
    PICTURES,
    Completion,
    Conversation,
    images_of,
    read_conversation,
    read_text,
    text_of,
)
from taut.data.rows.schema import AnyRow, Stepwise
from taut.errors import ConfigError, DataError, EngineError, OutOfMemory, TautError
from taut.inference.http_server import App, Guard, Refused, listen, serve
from taut.inference.reward_model import Rendered, as_steps, open_judge
from taut.io import files
from taut.io.temporary import TemporaryFolder
from taut.io.terminal import Terminal
from taut.rewards.process_rewards import split_steps
from taut.vision.content import claimed_pixels
from taut_tools.serve.batcher import Batcher
from taut_tools.serve.settings import ServeReward

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
"""A JSON string. Unterminated ones match too: a search from each of their quotes would take quadratic time."""


INLINE = "expected text, or pictures as data URLs or base64; send them so"


class PlainRequest(BaseModel):
    """The form of /score."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompts: Annotated[list[Any], Field(min_length=1)]
    completions: Annotated[list[Any], Field(min_length=1)]
    step_separator: Annotated[str, Field(min_length=1)] | None = None

    def rows(self) -> list[AnyRow | Rendered]:
        if len(self.prompts) != len(self.completions):
            raise DataError(
                f"completions: found {len(self.completions)} and {len(self.prompts)} prompts; expected as many of both"
            )
        pairs = zip(self.prompts, self.completions, strict=True)
        return [_answer(number, *pair, self.step_separator) for number, pair in enumerate(pairs)]


class RemoteRequest(BaseModel):
    """The form of OpenRLHF's remote reward; its other fields are for rule-based rewards."""

    model_config = ConfigDict(extra="ignore", strict=True)
    query: Annotated[list[str], Field(min_length=1), FailFast()]

    def rows(self) -> list[AnyRow | Rendered]:
        return [Rendered(f"query[{number}]", text) for number, text in enumerate(self.query)]


FORMS: dict[str, type[BaseModel]] = {"/score": PlainRequest, "/get_reward": RemoteRequest}
RequestT = TypeVar("RequestT", PlainRequest, RemoteRequest)


def run(config: ServeReward) -> int:
    """Serve until a signal ends it."""
    console = Terminal(soft_wrap=True)
    key = _read_key(config)
    with (
        closing(listen(config.host, config.port, backlog=512)) as listener,
        TemporaryFolder("serve") as folder,
    ):
        judge = open_judge(config, folder)
        image_store = judge.renderer.image_store
        print_decisions(console, judge.decisions)
        forget = None if image_store is None else image_store.forget
        batcher = Batcher(judge, config.max_waiting, forget)
        host, port = listener.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        where = f"{config.model} at http://{place}:{port}"
        console.lines([f"serving {where}: POST /score, POST /get_reward, GET /health"])
        try:
            serve(build_app(batcher, config, key), config, listener)
        finally:
            batcher.close()
    console.print("ended")
    return 0


def build_app(batcher: Batcher, config: ServeReward, key: bytes | None = None) -> App:
    """Build the application behind its limits. ``key`` is the token that requests must have, if any."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    reader = ThreadPoolExecutor(1, thread_name_prefix="requests")

    async def scores_of(request: Request, form: type[RequestT]) -> list[float] | list[list[float]]:
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(reader, _read, form, await request.body(), config)
        if isinstance(rows[0], Stepwise) and not batcher.judge.is_process:
            raise DataError(
                f"step_separator: {config.model} gives one number for a whole answer; expected a process model, read "
                "at each step; take it out"
            )
        scores = await asyncio.wrap_future(batcher.submit(rows))
        if isinstance(rows[0], Stepwise):
            return [score_R.tolist() for score_R in scores]
        return [float(score_R[-1]) for score_R in scores]

    async def score(request: Request) -> Response:
        return JSONResponse({"scores": await scores_of(request, PlainRequest)})

    async def get_reward(request: Request) -> Response:
        scores = await scores_of(request, RemoteRequest)
        return JSONResponse({"rewards": scores, "scores": scores, "extra_logs": {}})

    async def health(_: Request) -> Response:
        if batcher.failure is not None:
            return JSONResponse({"status": "failed", "reason": batcher.failure}, 503)
        waiting = batcher.num_waiting
        return JSONResponse({"status": "ok", "model": config.model, "waiting": waiting})

    async def schema(_: Request) -> Response:
        return JSONResponse({path: form.model_json_schema() for path, form in FORMS.items()})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return Response(error.body, error.status, error.headers)

    async def failed(request: Request, error: Exception) -> Response:
        field = re.match(r"\w+(\[\d+\])?", str(error)) if isinstance(error, DataError) else None
        is_unavailable = isinstance(error, EngineError | OutOfMemory)
        status = 400 if isinstance(error, DataError) else 503 if is_unavailable else 500
        return await refused(request, Refused(status, str(error), field and field[0]))

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        target = f"{request.method} {request.url.path}"
        message = f"{target}: expected POST /score, POST /get_reward, GET /schema or GET /health"
        return await refused(request, Refused(error.status_code, message))

    app = Starlette(
        routes=[
            Route("/score", score, methods=["POST"]),
            Route("/get_reward", get_reward, methods=["POST"]),
            Route("/schema", schema, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={Refused: refused, TautError: failed, HTTPException: unknown},
    )
    return Guard(app, config, config.host, key)


def _read(form: type[RequestT], body: bytes, config: ServeReward) -> Sequence[AnyRow | Rendered]:
    """Read the rows of a request within the limits. Cheap checks come before expensive steps."""
    # Count JSON values without parsing them.
    skeleton = _STRING.sub(b"", body)
    num_values = 1 + sum(skeleton.count(mark) for mark in (b",", b"[", b"{"))
    _require_at_most(num_values, config.max_json_values, "JSON values", "max_json_values")
    # Parse, and count answers and characters.
    try:
        parsed = form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{p}]" if isinstance(p, int) else str(p) for p in first["loc"]) or None
        fields = ", ".join(form.model_fields)
        message = f"{place or 'the body'}: {first['msg']}; expected a JSON object with {fields}"
        raise Refused(400, message, place) from error
    if isinstance(parsed, RemoteRequest):
        name, answers = "query", parsed.query
        texts: Any = answers
    else:
        name, answers = "completions", parsed.completions
        texts = [parsed.prompts, answers]
    _require_at_most(len(answers), config.max_answers, "answers", "max_answers", name)
    num_characters = _num_characters(texts)
    _require_at_most(num_characters, config.max_characters, "characters", "max_characters", name)
    # Read rows, and count pictures and pixels by their headers.
    rows = parsed.rows()
    pictures = [
        picture
        for row in (row.answer if isinstance(row, Stepwise) else row for row in rows)
        if isinstance(row, Conversation)
        for picture in images_of(row.messages)
    ]
    _require_at_most(len(pictures), config.max_pictures, "pictures", "max_pictures")
    num_pixels = sum(
        claimed_pixels(picture.value, config.images)
        for picture in pictures
        if isinstance(picture.value, bytes)
    )
    _require_at_most(num_pixels, config.max_request_pixels, "pixels", "max_request_pixels")
    return rows


def _require_at_most(
    count: int, maximum: int, what: str, limit: str, field: str | None = None
) -> None:
    if count > maximum:
        raise Refused(
            413,
            f"{field or 'the request'}: found {count:,} {what}; expected at most {maximum:,}; send fewer at a time, or "
            f"start the server with a larger {limit}",
            field,
        )


def _num_characters(value: Any) -> int:
    """Count the characters of all texts in a JSON value, without pictures."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_num_characters, value))
    if isinstance(value, dict) and value.get("type") not in PICTURES:
        return sum(len(name) + _num_characters(item) for name, item in value.items())
    return 0


def _answer(number: int, prompt: Any, completion: Any, separator: str | None) -> AnyRow:
    """Read a prompt and its completion as a row; with ``separator`` as a row that is scored after each step."""
    where = f"completions[{number}]"
    row = _as_row(where, f"prompts[{number}]", prompt, completion)
    if separator is None:
        return row
    answer = row.completion if isinstance(row, Completion) else text_of(row.messages[-1]["content"])
    stepwise = as_steps(row, split_steps(answer, separator))
    if not stepwise.steps:
        raise DataError(f"{where}: found no step; expected text")
    return stepwise


def _as_row(where: str, place: str, prompt: Any, completion: Any) -> Completion | Conversation:
    if isinstance(prompt, str):
        text = read_text(prompt, place)
        return Completion(where, text, read_text(completion, where))
    if not isinstance(prompt, list):
        raise DataError(f"{place}: found {shown(prompt)}; expected a text or a list of messages")
    if isinstance(completion, str):
        completion = {"role": "assistant", "content": completion}
    answer = completion if isinstance(completion, list) else [completion]
    for message in (*prompt, *answer):  # reading other parts, such as videos, would open files
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind not in ("text", *PICTURES):
                raise DataError(f"{where}: found a part of type {shown(kind)}; {INLINE}")
    row = read_conversation(
        [*prompt, *answer], where, first_learned=len(prompt), column="prompt+completion"
    )
    if any(picture.kind != "bytes" for picture in images_of(row.messages)):
        raise DataError(f"{where}: found a picture that is not in the request; {INLINE}")
    return row


def _read_key(config: ServeReward) -> bytes | None:
    """Read the token that requests must have; None without one."""
    token = read_secret(config.key, "key")
    if config.key_file is not None and token is None:
        place = f"key_file={config.key_file}: the file"
        try:
            token = files.read_text(home_path(config.key_file)).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(f"{place} cannot be read: {reason}; expected a token") from None
        if not token:
            raise ConfigError(f"{place} is empty; expected a token; put one there")
    return None if token is None else token.encode()
