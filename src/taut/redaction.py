"""Secrets in URLs, replaced before a text is shown or recorded.

    redacted("redis://:pw@host/0")              redis://***@host/0
    redacted("https://host/x?token=abc&n=1")    https://host/x?token=***&n=1
    redacted_in({"url": ...})                   every text in a value of JSON's types

User and password of a URL of any scheme, and what a query or fragment calls a token, key, signature, password, secret
or credential. ``printing`` applies it to what is printed, ``errors`` to messages, ``runlog`` to events. Imports nothing
of ours. Anyone may import it.
"""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
_USERINFO = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*:/+)[^/?#\s\"'<>`]*@")
"""One slash is enough: that is what a path makes of a URL."""
_PARAMETER = re.compile(
    r"([?&;#](?:[\w.~%-]*[_.~%-])?(?:access|api|app|auth|client|id|private|refresh|secret|security|session|user)?"
    r"(?:token|key|keyid|signature|sig|password|passwd|pass|pwd|secret|credentials?|auth)(?:[_.~%-][\w.~%-]*)?=)"
    r"[^&;#\s\"'<>`]+",
    re.IGNORECASE,
)
"""Whole words of a name, so that ``max_tokens`` and ``author`` stay."""


def redacted(text: str) -> str:
    """``text`` without what gives access in the URLs in it."""
    if "@" in text and ":/" in text:
        text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    return _PARAMETER.sub(rf"\1{HIDDEN}", text) if "=" in text else text


def redacted_in(value: Any) -> Any:
    """``value`` with its texts redacted, keys of mappings too."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted_in(key): redacted_in(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_in(item) for item in value]
    if isinstance(value, os.PathLike):
        return redacted(os.fspath(value))
    return value
