"""Keys of ``taut serve-reward``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.conflicts import conflict
from taut.inference.http_server import is_loopback
from taut.inference.settings import HttpLimits, JudgeUse
from taut.vision.settings import OF_ROWS


@configclass
class ServeReward(JudgeUse, HttpLimits):
    """Serve a reward model over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than the loopback admits others, and requires a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 5000
    """Port to listen on; 0 takes any free port."""
    key: str | None = None
    """Name of the environment variable with the token that requests must have."""
    key_file: str | None = None
    """File with the token that requests must have."""
    without_key: bool = False
    """Admit requests from other machines without a token."""
    max_answers: Annotated[int, Field(ge=1)] = 1024
    """Maximum answers per request."""
    max_characters: Annotated[int, Field(ge=1)] = 1_000_000
    """Maximum characters of prompts and completions per request."""
    max_json_values: Annotated[int, Field(ge=1)] = 50_000
    """Maximum JSON values per request: texts, numbers, lists and objects."""
    max_pictures: Annotated[int, Field(ge=0)] = 64
    """Maximum pictures per request."""
    max_request_pixels: Annotated[int, Field(ge=1)] = 2**26
    """Maximum pixels of all pictures per request, checked by their headers before any is decoded; the default is 64
    pictures of 1024 x 1024. images.limit_pixels is the limit of one picture."""
    max_waiting: Annotated[int, Field(ge=1)] = 256
    """Maximum waiting requests; further ones are refused (503)."""

    rules: ClassVar[str] = f"""
        {" ".join(f"images.{name}" for name in OF_ROWS)} unread: a server is sent its pictures
        at most one of key key_file: each names the place of the token
        without_key=true excludes key key_file: it admits others without one
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        has_key = self.key is not None or self.key_file is not None
        if not has_key and not self.without_key and not is_loopback(self.host):
            why = "the server can be reached from elsewhere"
            remedy = "expected a key; set `key` to the name of an environment variable with it, or `without_key`=true"
            raise conflict(self, "host key key_file", why, remedy)
