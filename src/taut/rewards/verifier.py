"""Verifiers: an answer and its row in, a number out, or None where they do not apply.

    verifier(answer) -> float | None

A verifier is a configclass; its fields are its options. A number may come with words, which are recorded beside it
(``Explained``). An exception is an error with its reason, and so is a number that is not finite. Neither errors nor
None become 0. An answer that cannot be judged, because it is too slow, too large or too deep (10**400, 9^9^9^9), is
wrong and no error (``when_unjudged``). A value of the wrong type (a text, a tensor) is a bug, not an error of one
answer: it stops the run (``read_number``, for rewards and environments).
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import httpx2
import numpy as np

from taut.config import Decision, read_secret
from taut.errors import ConfigError, DataError, EngineError, UserCodeError
from taut.io import http
from taut.io.extras import install_command
from taut.rewards.settings import Judged, Place

if TYPE_CHECKING:
    from taut.types import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """A completion, or the last one of a conversation, and the row it answers."""

    text: str
    """The completion without the token or string that ended it, with the beginning that its prompt gave it."""
    references: tuple[str, ...] = ()
    """The row's right answers, each of them right; empty if it has none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data, unchanged."""
    num_tokens: int | None = None
    """Tokens that the policy wrote, the end token included; None: the answer was not sampled."""
    finish_reason: FinishReason = "stop"
    prompt: tuple[Mapping[str, Any], ...] | str = ()
    """The prompt: messages, or a text; the environment's first messages if it has its own."""
    opened: str = ""
    """The tag at the end of the prompt, such as ``<think>``: the answer goes on inside it."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation after the prompt, up to the policy's last turn: its turns and the environment's between them.
    Empty: ``text`` is all."""


FIELDS = ("text", "references", "row", "num_tokens", "finish_reason", "prompt", "messages")
"""The names of parameters that a function of the user's may have."""


MAX_REPLY = 2000
"""Characters that are kept of what a reward says beside its number."""


class Explained(float):
    """A reward with the words that explain it: a judge's reply, or the test that failed. It is that number wherever a
    number is asked for.
    """

    reply: str
    steps: tuple[tuple[int, float], ...] = ()
    """``Score.steps``."""

    def __new__(cls, value: float, reply: str) -> Self:
        """``reply`` is shortened to MAX_REPLY characters: its beginning, and its end, where a judge's number is."""
        made = super().__new__(cls, value)
        half = MAX_REPLY // 2 - 2
        is_short = len(reply) <= MAX_REPLY
        made.reply = reply if is_short else f"{reply[:half]} .. {reply[-half:]}"
        return made


class Score(NamedTuple):
    """The result of a reward for one answer: a value, an error, or neither: it does not apply."""

    value: float | None = None
    error: str | None = None
    is_wrong_type: bool = False
    """Whether the error is a value of the wrong type, which stops the run."""
    is_ours: bool = False
    """Whether the error is a TautError: about the row, the configuration or this machine, never about the answer."""
    unjudged: str | None = None
    """Why the answer could not be judged. It counts as wrong, and ``value`` is what a wrong answer gets."""
    reply: str | None = None
    """The words that came with the value (``Explained``)."""
    steps: tuple[tuple[int, float], ...] = ()
    """(character of the answer at which a step ends, the part of the value that it is charged with), where steps are
    charged apart (``process_rewards.py``); the parts add up to the value."""


LIMITS = http.Limits(seconds=math.inf, max_bytes=2**24)
"""Limits of one attempt; the caller has a deadline for all of them (``reward_set.py``)."""
RETRIES = http.Retries()
TO_LISTEN = http.Limits(seconds=5.0, max_bytes=2**24)
"""Limits of the request before the run that only needs a connection."""
MAX_MESSAGE = 200
"""Characters of a server's own message that are repeated."""


class Client:
    """Sends JSON to servers that judge, and reads JSON. A request is repeated by the policy of ``taut.io.http`` for as
    long as its caller waits. No message contains the key."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def require_listening(self, url: str, key: str) -> None:
        """Raise ConfigError where no connection can be made. Any answer will do, and a server that is too busy for one.

        ``key``: where the URL is set.
        """
        try:
            await http.request(self._client, "GET", url, TO_LISTEN)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ConfigError(
                f"{key}={url} and nothing listens there ({reason(error)}); expected a server; start it, or correct "
                "the URL"
            ) from None
        except (httpx2.RequestError, http.Refused, TimeoutError):
            return  # it listens

    async def post(self, url: str, body: dict[str, Any], key: str | None) -> Any:
        """The answer to a POST. Raises EngineError for an answer that cannot be used, and TimeoutError, with the last
        failure, where there is none in time. ``key``: the environment variable that holds the token.
        """
        # Half a surrogate pair, which an answer may contain, is no UTF-8; servers are sent a question mark.
        body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
        secret = read_secret(key, "key")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        try:
            answer = await http.request_again(
                self._client, "POST", url, LIMITS, RETRIES, json=body, headers=headers
            )
        except http.Unanswered as failure:
            raise TimeoutError(str(failure)) from None
        except http.Refused as error:
            raise EngineError(
                f"{url} answered {error}; expected uncompressed JSON of at most "
                f"{LIMITS.max_bytes:,} bytes; correct the server"
            ) from None
        text = answer.text.replace(secret, "***") if secret else answer.text
        beginning = " ".join(text.split())[:MAX_MESSAGE]
        if not answer.is_success:
            raise EngineError(f"HTTP {answer.status} from {url}: {beginning}")
        try:
            return http.parse_json(text)  # with the key masked: errors quote what is made of it
        except ValueError:
            raise EngineError(f"{url} answered {beginning!r}; expected JSON") from None


class Verifier:
    """The base of all verifiers."""

    runs: ClassVar[Place] = "here"
    judges: ClassVar[Judged] = "correctness"
    full_marks: ClassVar[float | None] = None
    """The value of a right answer; None: the scale is the reward's own, or it judges form."""
    needs_reference: ClassVar[bool] = False
    """Whether it does not apply to rows without a right answer."""
    seconds: ClassVar[float] = 10.0
    """Time limit for an answer, unless the configuration sets one; not for verifiers that run here."""

    takes_groups: ClassVar[bool] = False
    """Whether it judges the answers to one prompt together."""
    max_memory: ClassVar[int | None] = None
    """Bytes that judging one answer may take in a worker process; None: no limit is set."""
    unjudged: ClassVar[float | None] = None
    """The value of ``when_unjudged``."""
    trivial: ClassVar[str] = ""
    """An answer that is judged at once. Another answer counts as one that cannot be judged only if this one, to the
    same row, can be."""

    def when_unjudged(self, answer: RewardInput) -> float | None:
        """Value of an answer that cannot be judged in its time; None: it is an error."""
        return self.unjudged

    def resolve_defaults(self) -> tuple[Verifier, Decision | None]:
        """The verifier with what taut chooses for the user, the same in all processes; and that decision."""
        return self, None

    def prepare(self) -> None:
        """Get ready, once in the process where it runs, before the first answer. Raises ConfigError where it cannot."""

    def dress(self, reference: str) -> str:
        """A reference written as an answer: before a run, a reference has to be judged right."""
        return reference

    async def reach(self, client: Client) -> None:
        """Raise ConfigError where the server that a verifier asks cannot be connected to. Called once, after
        ``prepare``.
        """

    def __call__(self, answer: RewardInput) -> float | None:
        """The value of one answer; None: it does not apply."""
        raise NotImplementedError

    def judge_group(self, group: Sequence[RewardInput]) -> Sequence[float | None]:
        """The values of answers to one prompt."""
        return [self(answer) for answer in group]

    async def ask(self, client: Client, answer: RewardInput) -> float | None:
        """Return the value, for a verifier that runs at a server."""
        raise NotImplementedError


def read_number(value: object, name: str) -> float:
    """A reward as a float: a number of Python or numpy, or True and False as 1 and 0.

    Raises UserCodeError for any other type, and DataError for a number that is not finite. ``name``: what returned it.
    """
    if not isinstance(value, Real | np.bool_):
        raise UserCodeError(
            f"{name} returned {value!r:.60} of type {type(value).__name__}; expected a number, True, False or None; "
            "return float(...) of it"
        )
    number = float(value)
    if not math.isfinite(number):
        raise DataError(f"{name} returned {number}; expected a finite number or None")
    return number


def scored(name: str, value: object) -> Score:
    """The score of what a verifier returned."""
    try:
        if isinstance(value, Explained):
            return Score(read_number(value, name), reply=value.reply, steps=value.steps)
        return Score() if value is None else Score(read_number(value, name))
    except UserCodeError as error:
        return Score(error=str(error), is_wrong_type=True)
    except DataError as error:
        return Score(error=str(error))


def reason(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def import_library(module: str, package: str, reward: str) -> Any:
    """A library that only one reward needs. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the reward {reward} needs {package} ({error}); expected it installed; run: {install_command('rl')}"
        ) from error


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression of the configuration. Raises ConfigError."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"pattern={pattern!r:.80} is no regular expression: {error}; expected one of Python's; correct it"
        ) from error
