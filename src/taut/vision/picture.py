"""A reference to a picture, and the pixels it stands for: read within limits, whole, upright and in RGB.

    reference -> encoded bytes (``encoded``) -> pixels (``decode``)

Only regular files are opened, so a pipe cannot hang the run; only the formats below are parsed, by Pillow; bytes and
pixels are bounded before they take memory; every pixel is decoded, so what is cut short is found here. As
``transformers.image_utils.load_image`` does, and TRL with it: the orientation of the camera (EXIF) is applied, an alpha
channel is left off, and of several frames the first is taken. Other than there, grey pictures of 16 bits keep their
upper byte, as colours of 16 bits do (there all above 255 is white), and 32 bits a pixel are refused.

A picture larger than ``max_pixels`` is scaled down, its aspect kept. Raises PictureError, in one line that begins with
the picture: the caller says in which row it is. Does not know what a model takes (``processor.py``). Imported by album,
data and checks.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from typing import Annotated, Literal
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field

from taut.config import configclass
from taut.errors import PictureError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is parsed, by content. Others run programs (EPS) or are parsed by code that few look after."""
MOST_PIXELS = 89_478_485
"""Where Pillow begins to suspect a decompression bomb."""
READER = 1
"""Raise it whenever the same bytes could give other pixels."""
SHOWN = 160
"""Characters of a name that are shown."""
BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    struct.error,
    zlib.error,
)
"""What Pillow raises on bytes that are no picture, or no whole one."""


@configclass
class ImagesConfig:
    """Pictures in the data."""

    folder: str | None = None
    """Where relative paths of pictures begin; by default where the data file is, then the working directory."""
    max_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Encoded bytes a picture may have."""
    limit_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] = 80_000_000
    """Pixels a picture may have; one that claims more is refused before it is decoded."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Larger pictures are scaled down to so many pixels, aspect kept, before the model's own processor sees them."""
    allow_urls: bool = False
    """Whether pictures at http and https addresses are fetched, once, into the cache (also from hosts that only this
    machine can reach: trust the data)."""
    bad: Literal["error", "drop"] = "error"
    """What happens to a row whose picture cannot be read or is over a limit: the run ends, or the row is left out and
    listed."""
    workers: Annotated[int, Field(ge=1)] = 4
    """Threads that decode ahead."""
    memory_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Memory for pictures that are ready for the model; the longest unused goes first."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames taken of a second of video."""
    max_frames: Annotated[int, Field(ge=1)] = 64
    """Frames a video may have; of a longer one so many are taken, evenly."""


@dataclass(frozen=True)
class ImageRef:
    """Where a picture is."""

    kind: Literal["file", "url", "bytes"]
    value: str | bytes
    """A path, absolute or relative to the working directory; an address; or the encoded picture itself."""
    film: str = field(default="", compare=False)
    """The video's file that it is a frame of."""

    @property
    def name(self) -> str:
        """For messages: in one line, short, and without what may be secret in an address."""
        if isinstance(self.value, bytes):
            return f"of {len(self.value):,} bytes"
        return _plain(self.value) if self.kind == "url" else _line(self.value)


def encoded(ref: ImageRef, images: ImagesConfig) -> bytes:
    """The encoded picture."""
    if isinstance(ref.value, bytes):
        require_bytes(len(ref.value), ref.name, images.max_bytes)
        return ref.value
    if ref.kind == "file":
        return read_file(ref.value, images.max_bytes)
    require_allowed(ref, images)
    from taut.vision.fetch import fetch  # HTTP is loaded where it is wanted

    return fetch(ref.value, ref.name, images.max_bytes)


def require_allowed(ref: ImageRef, images: ImagesConfig) -> None:
    """Refuse an address where addresses are not fetched."""
    if ref.kind == "url" and not images.allow_urls:
        raise PictureError(
            f"the picture {ref.name} is at an address; expected a file or bytes; download it, or set "
            "data.images.allow_urls=true"
        )


def require_bytes(num_bytes: int, name: str, most: int) -> None:
    """Refuse what is too large."""
    if num_bytes > most:
        raise PictureError(
            f"the picture {name} has {num_bytes:,} bytes or more; expected at most {most:,}; make it smaller or raise "
            "data.images.max_bytes"
        )


def require_regular(found: os.stat_result, name: str) -> None:
    """Refuse what is no file: to open a pipe may take for ever. ``name``: for messages, with what it is of."""
    if not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise PictureError(f"{name} is {what}; expected a file; correct the path")


def read_file(path: str, most: int) -> bytes:
    """What a regular file holds, if that is at most so many bytes."""
    name = _line(path)
    try:
        path.encode()  # it will be kept with the data
        require_regular(os.stat(path), f"the picture {name}")  # noqa: PTH116  # to open a device may do something
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            found = os.fstat(number)
            require_regular(found, f"the picture {name}")
            require_bytes(found.st_size, name, most)
            content = file.read(min(most, found.st_size) + 1)
    except PictureError:
        raise
    except (OSError, ValueError) as error:  # ValueError: what no path can hold
        reason = getattr(error, "strerror", None) or error
        missing = isinstance(error, FileNotFoundError)
        raise PictureError(
            f"there is no file {name}; expected a picture; correct the path or put the file there"
            if missing
            else f"the picture {name} cannot be read: {reason}; expected a file; correct the path or its permissions"
        ) from None
    require_bytes(len(content), name, most)
    return content


def decode(content: bytes, name: str, images: ImagesConfig) -> Image.Image:
    """The pixels of an encoded picture: all there, upright, in RGB, at most ``max_pixels`` of them."""
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            _require_pixels(width, height, name, images.limit_pixels)
            image.load()
            return _scaled(_rgb(image, name), images.max_pixels)
    except PictureError:
        raise
    except UnidentifiedImageError:
        begins = repr(content[:16]) if content else "nothing"
        raise PictureError(
            f"the picture {name} is of no format that is read: it begins with {begins}; expected one of "
            f"{', '.join(FORMATS)}; convert it, or remove the row"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PictureError(_too_many(name, f"more than {MOST_PIXELS:,}", images)) from None
    except BROKEN as error:
        reason = _line(str(error).partition("\n")[0]) or type(error).__name__
        raise PictureError(
            f"the picture {name} is damaged or cut short ({reason}); expected one that can be decoded whole; get the "
            "file anew, or remove the row"
        ) from None


def claimed_pixels(ref: ImageRef) -> int:
    """The pixels that the header of an encoded picture claims, without decoding any; 0 where it has none to read."""
    assert isinstance(ref.value, bytes)
    try:
        with Image.open(BytesIO(ref.value), formats=FORMATS) as image:
            return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return MOST_PIXELS + 1
    except (UnidentifiedImageError, *BROKEN):
        return 0  # ``decode`` says what is wrong with it


def _require_pixels(width: int, height: int, name: str, most: int) -> None:
    if min(width, height) < 1:
        raise PictureError(
            f"the picture {name} is {width} x {height}; expected pixels; remove the row"
        )
    if width * height > most:
        raise PictureError(
            f"the picture {name} claims {width:,} x {height:,} pixels; expected at most {most:,}; make it smaller or "
            "raise data.images.limit_pixels"
        )


def _too_many(name: str, found: str, images: ImagesConfig) -> str:
    return f"the picture {name} claims {found} pixels; expected at most {images.limit_pixels:,}; make it smaller"


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Upright, and in three channels of 8 bits."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "F"):
        raise PictureError(
            f"the picture {name} has 32 bits a pixel (mode {image.mode}); expected 8, or 16 as integers; convert it"
        )
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, and no warning
    return image if image.mode == "RGB" else image.convert("RGB")


def _scaled(image: Image.Image, most: int | None) -> Image.Image:
    width, height = image.size
    if most is None or width * height <= most:
        return image
    scale = (most / (width * height)) ** 0.5
    short = max(1, int(min(width, height) * scale))
    long = min(max(1, int(max(width, height) * scale)), most // short)
    size = (long, short) if width >= height else (short, long)
    return image.resize(size, Image.Resampling.BICUBIC)


def _line(text: str) -> str:
    """In one line; of a long one the end, which tells files apart."""
    line = text if text.isprintable() else ascii(text)
    return line if len(line) <= SHOWN else f"...{line[-SHOWN:]}"


def _plain(url: str) -> str:
    """An address without user, password and query."""
    try:
        parts = urlsplit(url)
        return _line(f"{parts.scheme}://{parts.hostname or ''}{parts.path}")
    except ValueError:
        return "at an address that cannot be parsed"
