"""A reference to a picture, and the pixels it stands for: read within limits, whole, upright and in RGB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ImageRef:
    """Where a picture is."""

    kind: Literal["file", "url", "bytes"]
    value: str | bytes
    """A path, absolute or relative to the working directory; an address; or the encoded picture itself."""
