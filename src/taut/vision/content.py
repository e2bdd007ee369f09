"""References to images and videos in the data, and what they stand for, read within limits.

    reference -> encoded bytes (``encoded``) -> pixels (``decode``)

Only regular files are opened, so a pipe cannot hang the run. Addresses are fetched over http and https alone,
redirects included; a request that failed in transit or met a busy or broken server is sent again a few times, under
one deadline for all attempts. Only six formats are parsed, by Pillow, in a separate process (``decoding.py``) with
limits of time and memory; bytes and pixels are bounded before they take memory; every pixel is decoded, so a truncated
file is found here.

As in ``transformers.image_utils.load_image``, and so in TRL, the orientation of the camera (EXIF) is applied, an alpha
channel is dropped, and of several frames the first is taken. Unlike there, grey images of 16 bits keep their upper
byte, as colors of 16 bits do (there all above 255 is white), and 32 bits a pixel are refused. An image larger than
``max_pixels`` is scaled down, its aspect ratio kept.

Of a video, the frames shown at 0, 1 / fps, 2 / fps, ... seconds are taken, each once; where these are more than
``max_frames``, that many, evenly spread from the first to the last. The time of a frame is when it begins to be shown.
Frames become PNG bytes and are images as any other from there on. GIF, WebP and APNG are read by PIL; other formats by
PyAV (the extra ``taut[video]``), upright as their rotation says. Sound is not read.

Raises PictureError, in one line that begins with the image: the caller adds the row. Does not know what a model takes
(``placeholders.py``), and keeps nothing that it fetched (``image_store.py``).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from PIL import Image

from taut.errors import PictureError
from taut.io import files, http
from taut.io.extras import install_command
from taut.vision import decoding
from taut.vision.decoder import FORMATS as FORMATS
from taut.vision.decoder import line, png_bytes
from taut.vision.settings import ImagesConfig

SECONDS = 60.0
"""Time limit of fetching one image, all attempts and redirects together."""
QUIET = 15.0
"""Seconds without any data after which another attempt is made."""
RETRIES = http.Retries(attempts=3)
REDIRECTS = 5
MEMORY, BYTES_PER_PIXEL = 2**29, 24
"""Memory limit of a decoder, in bytes: a constant, and for each pixel that an image may have."""
EXTRA_MEMORY = 3 * 2**29
"""Additional memory of a video's decoder, in bytes: it keeps frames that others refer to."""
MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"II*\0": "image/tiff",
    b"MM\0*": "image/tiff",
}
"""First bytes of the formats that are read."""
READER = 1
"""Raise it whenever the same bytes could give other pixels."""


@dataclass(frozen=True)
class ImageRef:
    """A reference to an image."""

    kind: Literal["file", "url", "bytes"]
    value: str | bytes
    """A path, absolute or relative to the working directory; an address; or the encoded image itself."""
    film: str = field(default="", compare=False)
    """The file of the video whose frame it is."""

    @property
    def name(self) -> str:
        """A short name for messages, in one line, without what may be secret in an address: user, password, query."""
        if isinstance(self.value, bytes):
            return f"of {len(self.value):,} bytes"
        if self.kind == "file":
            return line(self.value)
        try:
            parts = urlsplit(self.value)
            return line(f"{parts.scheme}://{parts.hostname or ''}{parts.path}")
        except ValueError:
            return "at an address that cannot be parsed"


# -- encoded bytes


def encoded(ref: ImageRef, images: ImagesConfig) -> bytes:
    """The encoded image."""
    if isinstance(ref.value, bytes):
        _require_bytes(len(ref.value), ref.name, images.max_bytes)
        return ref.value
    if ref.kind == "file":
        return read_file(ref.value, images.max_bytes)
    require_allowed(ref, images)
    return fetch(ref.value, ref.name, images.max_bytes)


def require_allowed(ref: ImageRef, images: ImagesConfig) -> None:
    """Refuse an address where addresses are not fetched."""
    if ref.kind == "url" and not images.allow_urls:
        raise PictureError(
            f"the picture {ref.name} is at an address; expected a file or bytes; download it, or set "
            "data.images.allow_urls=true"
        )


def _require_bytes(num_bytes: int, name: str, most: int) -> None:
    if num_bytes > most:
        raise PictureError(
            f"the picture {name} has {num_bytes:,} bytes or more; expected at most {most:,}; make it smaller or raise "
            "data.images.max_bytes"
        )


def read_file(path: str, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes."""
    name = line(path)
    try:
        path.encode()  # it will be kept with the data
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _require_bytes(size, name, most)
            content = file.read(min(most, size) + 1)
    except PictureError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        reason = getattr(error, "strerror", None) or error
        fault = f"the picture {name} cannot be read: {reason}; expected a file; correct the path or its permissions"
        if isinstance(error, FileNotFoundError):
            fault = f"there is no file {name}; expected a picture; correct the path or put the file there"
        raise PictureError(fault) from None
    _require_bytes(len(content), name, most)
    return content


def fetch(url: str, name: str, most: int) -> bytes:
    """The bytes at ``url``, at most ``most``. ``name``: the image's name in messages."""

    async def fetch_with_retries() -> bytes:
        limits = http.Limits(math.inf, max_bytes=most, redirects=REDIRECTS)  # ``wait_for`` ends it
        async with http.open_client(QUIET) as client:
            try:
                answer = await http.request_again(client, "GET", url, limits, RETRIES)
            except http.Unanswered as failure:
                attempts = f"{failure.num_attempts} attempts"
                raise _not_fetched(name, f"{failure} ({attempts})") from None
        if answer.status != HTTPStatus.OK:
            raise _not_fetched(name, f"HTTP {answer.status}")
        return answer.content

    try:
        return http.wait_for(SECONDS, fetch_with_retries)
    except TimeoutError:
        raise _not_fetched(name, f"not whole after {SECONDS:g} s") from None
    except http.TooLarge:
        raise PictureError(
            f"the picture {name} has more than {most:,} bytes; expected at most so many; make it smaller or raise "
            "data.images.max_bytes"
        ) from None
    except http.Refused as error:
        raise _not_fetched(name, str(error)) from None


def _not_fetched(name: str, failure: str) -> PictureError:
    return PictureError(
        f"the picture {name} cannot be fetched: {failure}; expected a picture over http or https; correct the address, "
        "or download it"
    )


def mime_type(content: bytes) -> str | None:
    """The type of an encoded image by its first bytes; None for types that are not in FORMATS."""
    for magic, mime in MAGIC.items():
        if content.startswith(magic) and (mime != "image/webp" or content[8:12] == b"WEBP"):
            return mime
    return None


def png_of(image: Image.Image) -> ImageRef:
    """An image in memory as a reference: PNG bytes, its pixels unchanged where PNG can hold them. Raises OSError for
    an image of a broken file.
    """
    return ImageRef("bytes", png_bytes(image))


# -- pixels


def decode(content: bytes, name: str, images: ImagesConfig) -> Image.Image:
    """The pixels of an encoded image: all present, upright, in RGB, at most ``max_pixels`` of them."""
    size, pixels = _decoded("pixels", content, name, images)
    return Image.frombytes("RGB", size, pixels)


def decoded_size(content: bytes, name: str, images: ImagesConfig) -> tuple[int, int]:
    """Width and height of the image that ``decode`` returns. It is decoded for this, and discarded."""
    return _decoded("size", content, name, images)[0]


def claimed_pixels(content: bytes, images: ImagesConfig) -> int:
    """Width times height in the header; nothing is decoded. 0 for an image that ``decode`` refuses."""
    try:
        width, height = _decoded("claim", content, "", images)[0]
    except PictureError:
        return 0
    return width * height


def _decoded(
    kind: str, content: bytes, name: str, images: ImagesConfig
) -> tuple[tuple[int, int], bytes]:
    limit = images.limit_pixels
    job = {
        "kind": kind,
        "name": name,
        "limit_pixels": limit,
        "max_pixels": images.max_pixels,
        "memory": MEMORY + BYTES_PER_PIXEL * limit + 4 * len(content),
    }
    try:
        ((reply, pixels),) = decoding.replies(job, content, images.limit_seconds)
    except TimeoutError:
        raise PictureError(
            f"the picture {name} takes longer than {images.limit_seconds:g} s to decode; expected at most so long; "
            "encode it again, remove the row, or raise data.images.limit_seconds"
        ) from None
    except decoding.Died as error:
        reply, pixels = {"error": f"its decoder {error}", "why": "broken"}, b""
    if fault := reply.get("error"):
        if reply["why"] != "refused":
            fault = (
                f"the picture {name} is damaged or cut short ({fault}); expected one that can be decoded whole; get "
                "the file again, or remove the row"
            )
        raise PictureError(fault)
    width, height = reply["size"]
    return (width, height), pixels


# -- frames of a video


class Frame(NamedTuple):
    """A frame, and the time at which it begins to be shown."""

    seconds: float
    image: ImageRef


class _Unreadable(Exception):
    def __init__(self, reason: str, why: str = "broken") -> None:
        super().__init__(reason)
        self.why = why


def frames_of(
    film: ImageRef, fps: float, max_frames: int, place: str, images: ImagesConfig
) -> list[Frame]:
    """The frames of a video, given as a file or its bytes, within the limits of ``images``; ``fps`` and ``max_frames``
    may be a row's own. Raises PictureError, which names ``place``.
    """
    if film.kind == "url":
        raise PictureError(
            f"{place}: the video is at the address {film.name}; expected a file; fetch it first"
        )
    limits = images.limit_pixels, images.limit_video_pixels, images.limit_video_seconds
    try:
        frames = _frames(film, fps, max_frames, images.max_frame_pixels, limits, _stamp(film))
    except (TimeoutError, _Unreadable) as error:
        fault = f"cannot be read ({error}); expected a whole file; mend it or remove the row"
        if isinstance(error, TimeoutError):
            fault = (
                f"takes longer than {images.limit_video_seconds:g} s to decode; expected at most so long; cut it, "
                "remove the row, or raise data.images.limit_video_seconds"
            )
        elif error.why == "refused":
            fault = str(error)
        elif error.why == "import":
            fault = (
                "needs PyAV, which is not installed; give it as GIF, WebP or a list of frames, or run: "
                f"{install_command('video')}"
            )
        raise PictureError(f"{place}: the video {film.name} {fault}") from None
    file = "" if isinstance(film.value, bytes) else str(Path(film.value).absolute())
    return [frame._replace(image=replace(frame.image, film=file)) for frame in frames]


def _stamp(film: ImageRef) -> tuple[int, int]:
    """Time of last change and size of the file, which has to be a regular one: to open a pipe may block for ever."""
    if isinstance(film.value, bytes):
        return 0, 0
    try:
        status = Path(film.value).stat()
        files.require_regular(status, film.value)
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        raise _Unreadable(getattr(error, "strerror", None) or str(error)) from None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _frames(
    film: ImageRef,
    fps: float,
    max_frames: int,
    max_frame_pixels: int | None,
    limits: tuple[int, int, float],
    stamp: tuple[int, int],
) -> tuple[Frame, ...]:
    """The frames of a video, kept for the rows that follow: the answers of one row have the same video. ``limits``:
    pixels of a frame, pixels of the video, seconds; ``stamp`` changes when the file does.
    """
    limit_pixels, limit_video_pixels, seconds = limits
    content = film.value if isinstance(film.value, bytes) else b""
    job = {
        "kind": "film",
        "path": None if isinstance(film.value, bytes) else str(Path(film.value).absolute()),
        "fps": fps,
        "max_frames": max_frames,
        "max_frame_pixels": max_frame_pixels,
        "limit_pixels": limit_pixels,
        "limit_video_pixels": limit_video_pixels,
        "memory": MEMORY + EXTRA_MEMORY + BYTES_PER_PIXEL * limit_pixels + 4 * len(content),
    }
    frames = []
    try:
        for reply, payload in decoding.replies(job, content, seconds):
            if "error" in reply:
                raise _Unreadable(reply["error"], reply["why"])
            frames.append(Frame(reply["seconds"], ImageRef("bytes", payload)))
    except decoding.Died as error:
        raise _Unreadable(f"its decoder {error}") from None
    return tuple(frames)
