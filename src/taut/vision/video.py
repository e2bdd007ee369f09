"""The frames of a video, as pictures with their times.

Of the frame that is shown at 0, 1 / fps, 2 / fps, ... seconds each is taken once; where these are more than
``max_frames``, that many, evenly spread from the first to the last. The time of a frame is when it begins to be shown.
Frames become PNG bytes, so that they are pictures as any other from there on.

GIF, WebP and APNG are read with PIL; anything else with PyAV (the extra ``taut[video]``), upright as its rotation says,
in a process of its own (``decoding.py``) with limits of pixels, time and memory. Sound is not read. Imported by
``data/media.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from taut.errors import PictureError, install_extra
from taut.vision import decoding
from taut.vision.decoder import png_bytes
from taut.vision.picture import BYTES_PER_PIXEL, MEMORY, ImageRef, ImagesConfig, require_regular

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
    return tuple(_decoded(film, fps, max_frames, *limits))


def _decoded(
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
