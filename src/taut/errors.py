"""The exceptions taut raises for its users, and the redaction of secrets in what they say.

    TautError                 everything below; the command line prints it in one line, exit code 2
      ConfigError             an unknown key, a value of the wrong kind, keys that contradict each other
      DataError               a file, a row or a message that cannot be used; names file and line
        EmptyError            a row without a text that it needs
        RenderError           a row the chat template cannot render exactly
        PictureError          a picture that cannot be read whole, is over a limit, or is not what it was
        StreamError           a stream that ended or failed, or that has had no new row for too long
      ModelError              a model directory that cannot be used as asked
        AttentionError        an attention backend that was asked for and is not available, or a model whose
                              attention cannot be carried exactly
      EngineError             an endpoint that is dead, or does not answer as it must
        RequestRefused        one request it will not serve; others may go on
      UserCodeError           a reward or environment of the user's that returns something of the wrong type
      SandboxError            no way to contain a program of the model's, or a sandbox that failed
      ClusterError            machines that cannot be had, or on which a run cannot start
      OutputError             an output directory that cannot be written or must not be overwritten
      CheckFailed             a start-up check or a monitor that failed; exit code 1
        NonFiniteError        a loss, gradient or logit that is not finite; names the samples or the prompt
        DivergenceError       a loss that stays far above its first value, or a gradient that stays exactly zero
      OutOfMemory             a micro-batch that does not fit; names its samples and what would fit
      RankFailed              another rank died, failed or took another way; exit code 1, or that of the other
      Interrupted             a signal ended the run; its state is saved; exit code 75

A message says what was found and where, what was expected, and what to do. Programmers' mistakes are asserts.

``code`` tells an error apart for programs, whatever its message says: of keys that contradict each other the keys
(``rollout.lag/rollout.engine``; conflicts.py), of a configuration that cannot be read ``unknown-key``, ``missing-key``
or ``invalid-value``, of others the class in small letters, ``data-error``.

    redacted("redis://:pw@host/0")              redis://***@host/0
    redacted("https://host/x?token=abc&n=1")    https://host/x?token=***&n=1
    redacted("options.api_key=abc")             options.api_key=***
    redacted_in({"url": ...})                   every text in a value of JSON's types
    redacted_in({"api_key": "abc"})             {"api_key": "***"}
    redacted_in(["--hf-token", "abc"])          ["--hf-token", "***"]
    redacted("env GH_TOKEN=abc serve --key abc")    env GH_TOKEN=*** serve --key ***

``redacted`` hides the user and password of a URL of any scheme, what a query or fragment calls a token, key, signature,
password, secret or credential, the value of a setting, a variable, an option of a command or a header whose name says
that it is one, and what has the form of a known service's token. ``$NAME`` stays: it names a secret. It is applied to
messages of errors, to what is printed (``taut.io.console``), to events of the run log (``taut.train.log``) and to
resolved.json, meta.json and rollouts. So two runs that differ in a secret alone are the same run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
_USERINFO = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*:/+)"
    r"(?:[^/?#\s\"'<>`]*|[^/?#\s:\"'<>`]*:(?!\d+[/?#])[^?#\s\"'<>`]*)@"
)
"""One slash is enough: that is what a path makes of a URL. A secret key may have slashes, a port is none."""
_PARAMETER = re.compile(
    r"([?&;#](?:[\w.~%-]*[_.~%-])?(?:access|api|app|auth|client|id|private|refresh|secret|security|session|user)?"
    r"(?:token|key|keyid|signature|sig|password|passwd|pass|pwd|secret|credentials?|auth)(?:[_.~%-][\w.~%-]*)?=)"
    r"[^&;#\s\"'<>`]+",
    re.IGNORECASE,
)
"""Matches whole words of a name, so that ``max_tokens`` and ``author`` stay."""
_NAME = (
    r"(?:[\w.-]*[._-])?(?:(?:api|access|secret|private)[_-]?key|(?:access|api|auth|bearer|hf|hub|refresh|write)[_-]?token|"
    r"secret|password|passwd|credentials?|authorization)"
)
_SETTING = re.compile(rf"(?<![\w.?&;#-])((?:--)?{_NAME}=)[^\s\"'<>`,;&]+", re.IGNORECASE)
"""A word of a command. What names a variable (``api_key_env``) stays, and so does a bare ``key`` or ``token``."""
_SECRET = re.compile(_NAME, re.IGNORECASE)
"""The key of a mapping."""
_OPTION = re.compile(
    r"(?<![\w-])--?(?:[a-z0-9]+[-_])*(?:api-?key|token|key|secret|password|passwd|pass|credentials?|auth|authorization)",
    re.IGNORECASE,
)
"""The word of a command before its value."""
_VALUE = r"(?!\$|-|(?:KEY|TOKEN|NAME|VALUE|FILE|PASSWORD)\b)(?:\"[^\"]*\"|'[^']*'|[^\s\"'<>`,;&]+)"
_OF_OPTION = re.compile(rf"({_OPTION.pattern}(?:\s+|=)){_VALUE}", re.IGNORECASE)
_VARIABLE = re.compile(
    r"(?<![\w.])((?:[A-Z0-9]+_)*(?:TOKEN|APIKEY|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH|COOKIE|PAT|DSN)"
    rf"(?:_(?!(?:FILE|PATH|DIR|ENV|SOCK|FD)=)[A-Z0-9]+)*=){_VALUE}"
)
_ENTRY = re.compile(rf"([\"']{_NAME}[\"']\s*:\s*[\"'])[^\"']+", re.IGNORECASE)
_HEADER = re.compile(
    r"(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+|x-[\w-]*(?:key|token|secret):\s*)[^\s\"',;]+",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z]{20,}|xox[abprs]-[\w-]{10,}|"
    r"glpat-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{10,}\.eyJ[\w-]+\.[\w-]+)"
)
"""Tokens of OpenAI, GitHub, Hugging Face, Slack, GitLab, AWS and Google, and signed web tokens."""
_WORDS = (
    *(
        "token",
        "key",
        "secret",
        "pass",
        "credential",
        "auth",
        "sk-",
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
    ),
    *("ghr_", "github_pat_", "hf_", "xox", "glpat-", "kia", "aiza", "eyj"),
)
"""In small letters; without any of these a text has no option, header, entry or token."""


def redacted(text: str) -> str:
    """``text`` with the secrets of its URLs and settings replaced by ``***``."""
    if "@" in text and ":/" in text:
        text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    if "=" in text:
        for named in (_PARAMETER, _SETTING, _VARIABLE):
            text = named.sub(rf"\1{HIDDEN}", text)
    lower = text.lower()
    if any(word in lower for word in _WORDS):  # few texts have one
        for named in (_OF_OPTION, _HEADER, _ENTRY):
            text = named.sub(rf"\1{HIDDEN}", text)
        text = _TOKEN.sub(HIDDEN, text)
    return text


def redacted_in(value: Any) -> Any:
    """``value`` with its texts redacted, keys of mappings too."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {
            redacted_in(key): HIDDEN if _is_secret(key, item) else redacted_in(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        before = ["", *value]
        return [
            HIDDEN if _is_option(word, item) else redacted_in(item)
            for word, item in zip(before, value, strict=False)
        ]
    if isinstance(value, os.PathLike):
        return redacted(os.fspath(value))
    return value


def _is_secret(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, str) and bool(_SECRET.fullmatch(name))


def _is_option(word: Any, value: Any) -> bool:
    """Whether a value follows the word of a command that names a secret."""
    return (
        isinstance(word, str)
        and isinstance(value, str)
        and not value.startswith(("-", "$"))
        and bool(_OPTION.fullmatch(word))
    )


class TautError(ValueError):
    """An error the user can correct. ``str(error)`` is one line: found, expected, remedy; no secret of a URL. ``code``
    stays where the line is worded anew.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(redacted(message))
        kind = re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()
        self.code = kind if code is None else code


class ConfigError(TautError):
    """A configuration that cannot be used."""


class DataError(TautError):
    """Data that cannot be used; the message names file and line."""


class EmptyError(DataError):
    """A row in which a text that it needs, such as the answer, is empty or null."""


class RenderError(DataError):
    """A row whose ids and targets cannot be derived exactly from the chat template."""


class PictureError(DataError):
    """A picture that cannot be used; the message names the row and the picture."""


class StreamError(DataError):
    """A stream without a next row. All ranks raise it together, before the step that needs the row."""


class ModelError(TautError):
    """A model that cannot be used as asked."""


class AttentionError(ModelError):
    """Attention that cannot be computed exactly as the model and the layout require."""


class EngineError(TautError):
    """An endpoint that cannot be reached, or gives wrong answers."""


class RequestRefused(EngineError):
    """A request that an endpoint refuses (4xx), while others may succeed."""


class UserCodeError(TautError):
    """A reward or an environment that returned something of the wrong type.

    It stops the run at the first one: a wrong type is a bug that often hits one kind of answer only (say, the right
    ones), so tolerating a share of them biases what is learned.
    """


class SandboxError(TautError):
    """A sandbox that cannot be opened, or that failed; never an error of the program in it."""


class OutputError(TautError):
    """A file or directory that cannot be written, or must not be overwritten."""


class ClusterError(TautError):
    """Machines that cannot be had, or on which a run cannot start."""


class CheckFailed(TautError):
    """A check at start-up, or a monitor at run time, that failed."""

    exit_code = 1


class NonFiniteError(CheckFailed):
    """A loss, gradient or logit that is not finite."""


class DivergenceError(CheckFailed):
    """Training that has diverged: its latest weights are not worth keeping."""


class OutOfMemory(TautError):
    """A micro-batch the device has no memory for."""

    def __init__(
        self,
        message: str,
        *,
        half: int | None = None,
        reason: str = "",
        sample_ids: Sequence[str] = (),
        num_tokens: int | None = None,
    ) -> None:
        """``half``: the next smaller token budget; None: no budget divides it. ``reason``: the message in brief;
        ``num_tokens``: of the micro-batch of a step that does not fit.
        """
        super().__init__(message)
        self.half, self.reason, self.sample_ids = half, reason, sample_ids
        self.num_tokens = num_tokens


class RankFailed(TautError):
    """The end of a run that another rank brought about."""

    exit_code = 1

    def __init__(self, message: str, *, exit_code: int = 1, is_told: bool = False) -> None:
        """``is_told``: the other rank prints the reason; ``exit_code``: its own."""
        super().__init__(message)
        self.exit_code, self.is_told = exit_code, is_told


class Interrupted(TautError):
    """A signal that asked the run to end. Nothing is lost; the same command with resume=true goes on.

    75 is the exit code that schedulers read as: try again later (EX_TEMPFAIL).
    """

    exit_code = 75
