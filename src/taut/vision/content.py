"""A picture at an address, fetched: http and https alone, redirects included, within limits of bytes and time.

A request that failed in transit or met a server that is busy or broken is sent again, a few times; one deadline holds
for all attempts together. What is fetched is kept by the caller (``album.py``). May import web and errors. Imported by
``picture.py``.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx2
from PIL import Image
from pydantic import Field

from taut.config import configclass
from taut.errors import PictureError, install_extra
from taut.io import http
from taut.vision import decoding
from taut.vision.decoder import FORMATS as FORMATS
from taut.vision.decoder import MOST_PIXELS, line, png_bytes

SECONDS = 60.0
"""For one picture, all attempts and redirects together, however slowly it comes."""
QUIET = 15.0
"""Seconds in which nothing comes; then another attempt is made."""
ATTEMPTS, PAUSE = 3, 0.5
"""And the seconds before the second; they double."""
REDIRECTS = 5
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that another attempt may change."""


def fetch(url: str, name: str, most: int) -> bytes:
    """The bytes at ``url``, at most so many. ``name``: of the picture, for messages."""
    try:
        return http.wait_for(SECONDS, partial(_attempts, url, name, most))
    except TimeoutError:
        raise _refused(name, f"not whole after {SECONDS:g} s") from None
    except http.TooLarge:
        raise PictureError(
            f"the picture {name} has more than {most:,} bytes; expected at most so many; make it smaller or raise "
            "data.images.max_bytes"
        ) from None
    except http.Refused as error:
        raise _refused(name, str(error)) from None


async def _attempts(url: str, name: str, most: int) -> bytes:
    limits = http.Limits(
        seconds=math.inf, max_bytes=most, redirects=REDIRECTS
    )  # fetch has a deadline
    async with http.open_client(QUIET) as client:
        for attempt in range(ATTEMPTS):
            if attempt:
                await anyio.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                answer = await http.ask(client, "GET", url, limits)
            except httpx2.RequestError as error:
                found = " ".join(f"{type(error).__name__} {error}".split())
                continue
            if answer.status == HTTPStatus.OK:
                return answer.content
            found = f"HTTP {answer.status}"
            if answer.status not in BUSY:
                raise _refused(name, found)
    raise _refused(name, f"{found} ({ATTEMPTS} attempts)")


def _refused(name: str, found: str) -> PictureError:
    return PictureError(
        f"the picture {name} cannot be fetched: {found}; expected a picture over http or https; correct the address, "
        "or download it"
    )


# --------------------------------------------------------------------------------------------------
# A reference to a picture, and the pixels it stands for: read within limits, whole, upright and in RGB.
#
#     reference -> encoded bytes (``encoded``) -> pixels (``decode``)
#
# Only regular files are opened, so a pipe cannot hang the run; only six formats are parsed, by Pillow, in a process
# of its own (``decoding.py``) with limits of time and memory; bytes and pixels are bounded before they take memory;
# every pixel is decoded, so what is cut short is found here. As ``transformers.image_utils.load_image`` does, and TRL
# with it: the orientation of the camera (EXIF) is applied, an alpha channel is left off, and of several frames the
# first is taken. Other than there, grey pictures of 16 bits keep their upper byte, as colours of 16 bits do (there
# all above 255 is white), and 32 bits a pixel are refused.
#
# A picture larger than ``max_pixels`` is scaled down, its aspect kept. Raises PictureError, in one line that begins
# with the picture: the caller says in which row it is. Does not know what a model takes (``processor.py``). Imported
# by album, data and checks.

MEMORY, BYTES_PER_PIXEL = 2**29, 24
"""Bytes a decoder may take: for itself, and for each pixel that a picture may have."""
MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"II*\0": "image/tiff",
    b"MM\0*": "image/tiff",
}
"""How the formats that are read begin."""
READER = 1
"""Raise it whenever the same bytes could give other pixels."""


@configclass
class ImagesConfig:
    """Pictures in the data."""

    folder: str | None = None
    """Where relative paths of pictures begin; by default where the data file is, then the working directory."""
    max_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Encoded bytes a picture may have."""
    limit_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] = 80_000_000
    """Pixels a picture may have; one that claims more is refused before it is decoded."""
    limit_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that decoding a picture may take; then its decoder is ended and the picture cannot be used."""
    limit_video_pixels: Annotated[int, Field(ge=1)] = 10**11
    """Pixels of all frames of a video together; one that has more is refused before it is decoded. The default allows
    26 minutes of 1920 x 1080 at 30 frames a second. GIF, WebP and APNG, which decode slowly, may have a tenth of it."""
    limit_video_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that decoding a video may take."""
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
        return _plain(self.value) if self.kind == "url" else line(self.value)


def encoded(ref: ImageRef, images: ImagesConfig) -> bytes:
    """The encoded picture."""
    if isinstance(ref.value, bytes):
        require_bytes(len(ref.value), ref.name, images.max_bytes)
        return ref.value
    if ref.kind == "file":
        return read_file(ref.value, images.max_bytes)
    require_allowed(ref, images)
    # HTTP is loaded where it is wanted

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
    name = line(path)
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
    size, pixels = _decoded("pixels", content, name, images)
    return Image.frombytes("RGB", size, pixels)


def decoded_size(content: bytes, name: str, images: ImagesConfig) -> tuple[int, int]:
    """Width and height of what ``decode`` returns, which is made for it and thrown away."""
    return _decoded("size", content, name, images)[0]


def claimed_pixels(content: bytes, images: ImagesConfig) -> int:
    """Width times height as the header has them; nothing is decoded. 0 for what ``decode`` refuses."""
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
        ((said, pixels),) = decoding.replies(job, content, images.limit_seconds)
    except TimeoutError:
        raise PictureError(
            f"the picture {name} takes longer than {images.limit_seconds:g} s to decode; expected at most so long; "
            "encode it anew, remove the row, or raise data.images.limit_seconds"
        ) from None
    except decoding.Died as error:
        said, pixels = {"error": f"its decoder {error}", "why": "broken"}, b""
    if said.get("why") == "refused":
        raise PictureError(said["error"])
    if "error" in said:
        raise PictureError(
            f"the picture {name} is damaged or cut short ({said['error']}); expected one that can be decoded whole; "
            "get the file anew, or remove the row"
        )
    width, height = said["size"]
    return (width, height), pixels


def mime_type(content: bytes) -> str | None:
    """What an encoded picture is, by its first bytes; None: none of FORMATS."""
    for begin, kind in MAGIC.items():
        if content.startswith(begin) and (kind != "image/webp" or content[8:12] == b"WEBP"):
            return kind
    return None


def _plain(url: str) -> str:
    """An address without user, password and query."""
    try:
        parts = urlsplit(url)
        return line(f"{parts.scheme}://{parts.hostname or ''}{parts.path}")
    except ValueError:
        return "at an address that cannot be parsed"


# --------------------------------------------------------------------------------------------------
# The frames of a video, as pictures with their times.
#
# Of the frame that is shown at 0, 1 / fps, 2 / fps, ... seconds each is taken once; where these are more than
# ``max_frames``, that many, evenly spread from the first to the last. The time of a frame is when it begins to be
# shown. Frames become PNG bytes, so that they are pictures as any other from there on.
#
# GIF, WebP and APNG are read with PIL; anything else with PyAV (the extra ``taut[video]``), upright as its rotation
# says, in a process of its own (``decoding.py``) with limits of pixels, time and memory. Sound is not read. Imported
# by ``data/media.py``.

EXTRA_MEMORY = 3 * 2**29
"""Bytes more than a picture's that the decoder of a video may take: it keeps frames that others refer to."""


class Frame(NamedTuple):
    """A frame and when it begins to be shown."""

    seconds: float
    image: ImageRef


def frames_of(
    film: ImageRef, fps: float, max_frames: int, place: str, images: ImagesConfig
) -> list[Frame]:
    """The frames of a file, or of its bytes. Raises PictureError, which names ``place``.

    Of ``images`` the limits hold; ``fps`` and ``max_frames`` may be a row's own.
    """
    if film.kind == "url":
        raise PictureError(
            f"{place}: the video is at the address {film.name}; expected a file; fetch it first"
        )
    limits = images.limit_pixels, images.limit_video_pixels, images.limit_video_seconds
    try:
        frames = _frames(film, fps, max_frames, limits, _stamp(film, place))
    except TimeoutError:
        raise PictureError(
            f"{place}: the video {film.name} takes longer than {images.limit_video_seconds:g} s to decode; expected at "
            "most so long; cut it, remove the row, or raise data.images.limit_video_seconds"
        ) from None
    except _Unreadable as error:
        if error.why == "refused":
            raise PictureError(f"{place}: the video {film.name} {error}") from None
        if error.why == "import":
            raise PictureError(
                f"{place}: reading the video {film.name} needs PyAV, which is not installed; {install_extra('video')}; "
                "or give the video as GIF, WebP or a list of frames"
            ) from None
        raise PictureError(
            f"{place}: the video {film.name} cannot be read ({error}); expected a whole file; mend it or remove the row"
        ) from None
    file = "" if isinstance(film.value, bytes) else str(Path(film.value).absolute())
    return [it._replace(image=replace(it.image, film=file)) for it in frames]


class _Unreadable(Exception):
    def __init__(self, reason: str, why: str = "broken") -> None:
        super().__init__(reason)
        self.why = why


def png_of(image: Image.Image) -> ImageRef:
    """A picture in memory as a reference: PNG bytes, its pixels unchanged where PNG can hold them. Raises OSError
    where it is of a file that is broken.
    """
    return ImageRef("bytes", png_bytes(image))


def _stamp(film: ImageRef, place: str) -> tuple[int, int]:
    """Changes when the file does."""
    if isinstance(film.value, bytes):
        return 0, 0
    try:
        found = Path(film.value).stat()
    except (OSError, ValueError) as error:  # ValueError: what no path can hold
        raise _Unreadable(getattr(error, "strerror", None) or str(error)) from None
    require_regular(found, f"{place}: the video {film.name}")
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)
def _frames(
    film: ImageRef,
    fps: float,
    max_frames: int,
    limits: tuple[int, int, float],
    stamp: tuple[int, int],
) -> tuple[Frame, ...]:
    """Kept for the rows that follow: they may ask of the same video, and the answers of one do."""
    return tuple(_decoded_frames(film, fps, max_frames, *limits))


def _decoded_frames(
    film: ImageRef, fps: float, max_frames: int, pixels: int, video_pixels: int, seconds: float
) -> Iterator[Frame]:
    content = film.value if isinstance(film.value, bytes) else b""
    job = {
        "kind": "film",
        "path": None if isinstance(film.value, bytes) else str(Path(film.value).absolute()),
        "fps": fps,
        "max_frames": max_frames,
        "limit_pixels": pixels,
        "limit_video_pixels": video_pixels,
        "memory": MEMORY + EXTRA_MEMORY + BYTES_PER_PIXEL * pixels + 4 * len(content),
    }
    try:
        for said, payload in decoding.replies(job, content, seconds):
            if "error" in said:
                raise _Unreadable(said["error"], said["why"])
            yield Frame(said["seconds"], ImageRef("bytes", payload))
    except decoding.Died as error:
        raise _Unreadable(f"its decoder {error}") from None
