"""Keys of ``taut page``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from taut.config import configclass
from taut.inference.settings import HttpLimits


@configclass
class Page(HttpLimits):
    """Show runs in a browser: serve a page, or write it as one file."""

    runs: list[str] = Field(default_factory=list)
    """Runs, or directories in which to search for runs, three levels deep."""
    out: str | None = None
    """HTML file to write; default: serve the page until a signal ends it."""
    overwrite: bool = False
    """Replace an existing file."""
    max_mib: Annotated[float, Field(gt=0)] = 4.5
    """Maximum size of the file in MiB, about; answers that do not fit are left out."""
    host: str = "127.0.0.1"
    """Address to listen on. An address other than the loopback admits others, who need a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 6070
    """Port to listen on; 0 takes any free port."""
    max_url_bytes: Annotated[int, Field(ge=16)] = 8192
    """Maximum length of the request target (414)."""
