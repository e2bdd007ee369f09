"""The frames of a video, as pictures with their times.

Of the frame that is shown at 0, 1 / fps, 2 / fps, ... seconds each is taken once; where these are more than
``max_frames``, that many, evenly spread from the first to the last. The time of a frame is when it begins to be shown.
Frames become PNG bytes, so that they are pictures as any other from there on.

GIF, WebP and APNG are read with PIL; anything else with PyAV (the extra ``taut[video]``), upright as its rotation says.
Sound is not read. Owns ``av``. Imported by ``data/media.py``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from taut.errors import PictureError, install_extra
from taut.vision.picture import BROKEN, ImageRef, require_regular

FORMATS = ("GIF", "WEBP", "PNG")
"""What PIL reads."""
FAILURES = (*BROKEN, Image.DecompressionBombError)
"""What broken files raise in PIL; PyAV's errors become a ValueError."""
ALONE = {"protocol_whitelist": "file"}
"""What PyAV may open: a play list in a file must not lead to an address."""
NO_DURATION = 0.1
"""Seconds a frame is shown that is said to be shown for none: as browsers do."""


class Frame(NamedTuple):
    """A frame and when it begins to be shown."""

    seconds: float
    image: ImageRef


def frames_of(film: ImageRef, fps: float, max_frames: int, place: str) -> list[Frame]:
    """The frames of a file, or of its bytes. Raises PictureError, which names ``place``."""
    if film.kind == "url":
        raise PictureError(
            f"{place}: the video is at the address {film.name}; expected a file; fetch it first"
        )
    try:
        frames = _frames(film, fps, max_frames, _stamp(film, place))
        file = "" if isinstance(film.value, bytes) else str(Path(film.value).absolute())
        return [it._replace(image=replace(it.image, film=file)) for it in frames]
    except PictureError:
        raise
    except ImportError:
        raise PictureError(
            f"{place}: reading the video {film.name} needs PyAV, which is not installed; {install_extra('video')}; or "
            "give the video as GIF, WebP or a list of frames"
        ) from None
    except FAILURES as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise PictureError(
            f"{place}: the video {film.name} cannot be read ({reason.splitlines()[0]}); expected a whole file; mend it "
            "or remove the row"
        ) from None


def png_of(image: Image.Image) -> ImageRef:
    """A picture in memory as a reference: PNG bytes, its pixels unchanged where PNG can hold them. Raises OSError
    where it is of a file that is broken.
    """
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    held = BytesIO()
    image.save(held, "PNG", compress_level=1)
    return ImageRef("bytes", held.getvalue())


def _stamp(film: ImageRef, place: str) -> tuple[int, int]:
    """Changes when the file does."""
    if isinstance(film.value, bytes):
        return 0, 0
    found = Path(film.value).stat()
    require_regular(found, f"{place}: the video {film.name}")
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)
def _frames(
    film: ImageRef, fps: float, max_frames: int, stamp: tuple[int, int]
) -> tuple[Frame, ...]:
    """Kept for the rows that follow: they may ask of the same video, and the answers of one do."""
    source = BytesIO(film.value) if isinstance(film.value, bytes) else film.value
    try:
        image = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError:
        source = BytesIO(film.value) if isinstance(film.value, bytes) else film.value
        return tuple(_decoded(source, fps, max_frames))
    with image:
        return tuple(_animated(image, fps, max_frames))


def _animated(image: Image.Image, fps: float, max_frames: int) -> Iterator[Frame]:
    _refuse_bomb(*image.size)
    first = 1 if image.info.get("default_image") else 0  # of an APNG: shown where none can be
    starts, end = [], 0.0
    for number in range(first, getattr(image, "n_frames", 1)):
        image.seek(number)
        image.load()  # WebP says how long only then
        starts.append(end)
        end += image.info.get("duration", 0) / 1000 or NO_DURATION
    for index in _chosen(starts, end, fps, max_frames):
        image.seek(first + index)
        yield Frame(starts[index], png_of(image.convert("RGBA" if _is_clear(image) else "RGB")))


def _is_clear(image: Image.Image) -> bool:
    return image.has_transparency_data


def _decoded(source: str | BytesIO, fps: float, max_frames: int) -> Iterator[Frame]:
    import av

    try:
        with av.open(source, "r", options=ALONE) as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            stream = container.streams.video[0]
            _refuse_bomb(stream.width, stream.height)
            unit = float(stream.time_base or 0)
            found = [
                (it.pts, it.duration or 0) for it in container.demux(stream) if it.pts is not None
            ]
            if not found or not unit:
                raise ValueError("its frames have no times")
            times, last = sorted(time for time, _ in found), max(found)
            starts = [(time - times[0]) * unit for time in times]
            end = starts[-1] + (last[1] * unit or NO_DURATION)
            wanted = [times[index] for index in _chosen(starts, end, fps, max_frames)]
            container.seek(times[0], stream=stream)
            for frame in container.decode(stream):
                if wanted and frame.pts is not None and frame.pts >= wanted[0]:
                    wanted = wanted[bisect_right(wanted, frame.pts) :]
                    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                    upright = image.rotate(frame.rotation, expand=True)
                    yield Frame((frame.pts - times[0]) * unit, png_of(upright))
            if wanted:
                raise ValueError(f"{len(wanted)} of its frames are missing")
    except av.FFmpegError as error:
        raise ValueError(error.strerror or str(error)) from None


def _refuse_bomb(width: int, height: int) -> None:
    """PIL warns of the size of what it opens; frames of a movie come to it as pixels."""
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and width * height > most:
        raise ValueError(
            f"its frames have {width:,} x {height:,} pixels; expected at most {most:,}"
        )


def _chosen(starts: Sequence[float], end: float, fps: float, max_frames: int) -> list[int]:
    """Indices of the frames to be taken, ascending. ``starts``: when each begins; ``end``: when the last one ends."""
    count = max(1, math.ceil(end * fps - 1e-9))
    num = min(count, max_frames)
    step = (count - 1) / (num - 1) if num > 1 else 0.0
    times = [index * step / fps for index in range(num)]
    return sorted({max(0, bisect_right(starts, time + 1e-9) - 1) for time in times})
