"""The program of a decoding process: encoded pictures and videos become pixels here, beside nothing worth losing.

A job is a JSON object and the encoded bytes; the answer is a sequence of JSON objects, each with bytes, of which the
last has ``end`` (``decoding.py`` has the other side):

    {"kind": "size" | "pixels", ...}     ->  {"size": [width, height]} with RGB bytes, or without
    {"kind": "claim", ...}               ->  {"size": [width, height]} as the header has them; nothing is decoded
    {"kind": "film", ...}                ->  {"seconds": when the frame begins to be shown} with PNG bytes, for each
    whatever cannot be decoded           ->  {"error": reason, "why": "refused", "broken" or "import"}

Only the formats below are parsed, by content. What would take long or much memory is refused before it is decoded,
where that can be told from the file: pixels, the scans of a JPEG, the frames of a video times their pixels. Whatever
else takes long is for the parent to kill, and memory is limited by the system.

Imports errors, PIL and the standard library; ``av`` where a video needs it. Nothing imports it: it is run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import resource
import struct
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image, ImageOps, UnidentifiedImageError

from taut.errors import PictureError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is parsed, by content. Others run programs (EPS) or are parsed by code that few look after."""
ANIMATED = ("GIF", "WEBP", "PNG")
"""Formats of videos that PIL reads; the others are read by PyAV."""
CONTAINERS = "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,m4v,h264,hevc,mjpeg"
"""Formats of videos that PyAV reads. Play lists and the like, which name other files, are not among them."""
MOST_SCANS = 100
"""Scans of a JPEG; encoders make about ten. Each one visits every pixel again, and may take a few bytes."""
MOST_PIXELS = 89_478_485
"""Where Pillow begins to suspect a decompression bomb."""
THREADS = 4
"""Of the decoder of a video."""
NO_DURATION = 0.1
"""Seconds a frame is shown that is said to be shown for none: as browsers do."""
BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
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
SHOWN = 160
"""Characters of a name or a reason that are shown."""

Reply: TypeAlias = tuple[dict[str, Any], bytes]


def main(descriptor: int, leash: int) -> None:
    """Do jobs until the other end is closed. ``leash``: a pipe that the parent holds; its end ends this process."""
    _end_with(leash)
    _be_killed_first()
    warnings.simplefilter("ignore")
    pipe = Connection(descriptor)
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            job = json.loads(pipe.recv_bytes())
            content = pipe.recv_bytes()
            for said, payload in _replies(job, content):
                pipe.send_bytes(json.dumps(said).encode())
                pipe.send_bytes(payload)
            del content


def _replies(job: dict[str, Any], content: bytes) -> Iterator[Reply]:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = job["memory"] if hard == resource.RLIM_INFINITY else min(job["memory"], hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        if job["kind"] == "film":
            for seconds, image in _film(job, content):
                yield {"seconds": seconds}, png_bytes(image)
        else:
            image = _picture(job, content)
            is_asked_for = job["kind"] == "pixels"
            yield {"size": image.size}, image.tobytes() if is_asked_for else b""
    except MemoryError:
        yield {"error": f"it takes more than {most >> 20:,} MiB", "why": "broken"}, b""
    except ImportError as error:
        yield {"error": str(error), "why": "import"}, b""
    except PictureError as error:
        yield {"error": str(error), "why": "refused"}, b""
    except (*BROKEN, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield {"error": line(reason.partition("\n")[0]), "why": "broken"}, b""
    yield {"end": True}, b""


# -- pictures


def _picture(job: dict[str, Any], content: bytes) -> Image.Image:
    """All pixels of the first frame, upright, in RGB, at most ``max_pixels`` of them; of a claim none."""
    name, limit = job["name"], job["limit_pixels"]
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if min(width, height) < 1:
                raise PictureError(
                    f"the picture {name} is {width} x {height}; expected pixels; remove the row"
                )
            if width * height > limit:
                raise PictureError(
                    f"the picture {name} claims {width:,} x {height:,} pixels; expected at most {limit:,}; make it "
                    "smaller or raise data.images.limit_pixels"
                )
            if (scans := num_scans(content)) > MOST_SCANS:
                raise PictureError(
                    f"the picture {name} is a JPEG of {scans:,} scans; expected at most {MOST_SCANS}; encode it anew, "
                    "or remove the row"
                )
            if job["kind"] == "claim":
                return image
            image.load()
            return _scaled(_rgb(image, name), job["max_pixels"])
    except UnidentifiedImageError:
        begins = repr(content[:16]) if content else "nothing"
        raise PictureError(
            f"the picture {name} is of no format that is read: it begins with {begins}; expected one of "
            f"{', '.join(FORMATS)}; convert it, or remove the row"
        ) from None
    except Image.DecompressionBombError:
        raise PictureError(
            f"the picture {name} claims more than {2 * MOST_PIXELS:,} pixels; expected at most {limit:,}; make it "
            "smaller"
        ) from None


def num_scans(content: bytes) -> int:
    """The scans of a JPEG up to its end; 0 for what is none."""
    if not content.startswith(b"\xff\xd8"):
        return 0
    count, place = 0, 2
    while found := _MARKER.search(content, place):
        kind, place = content[found.end() - 1], found.end()
        if kind == 0xD9:
            break
        count += kind == 0xDA
        if kind not in _BARE:
            place += int.from_bytes(content[place : place + 2], "big")
    return count


_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
"""In entropy-coded data 0 or a restart follows FF."""
_BARE = (0x01, 0xD8)
"""Markers without a length."""


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Upright, and in three channels of 8 bits."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "F"):
        raise PictureError(
            f"the picture {name} has 32 bits a pixel (mode {image.mode}); expected 8, or 16 as integers; convert it"
        )
    if image.mode.startswith("I;16"):
        upper = 0 if image.mode == "I;16B" else 1
        image = Image.frombytes("L", image.size, image.tobytes()[upper::2])
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


def png_bytes(image: Image.Image) -> bytes:
    """A picture as a PNG, its pixels unchanged where PNG can hold them."""
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    held = BytesIO()
    image.save(held, "PNG", compress_level=1)
    return held.getvalue()


# -- videos


def _film(job: dict[str, Any], content: bytes) -> Iterator[tuple[float, Image.Image]]:
    """The frames that are wanted, and when each begins to be shown. ``path``: the file, where there are no bytes."""

    def source() -> str | BytesIO:
        return BytesIO(content) if job["path"] is None else str(job["path"])

    try:
        image = Image.open(source(), formats=ANIMATED)
    except UnidentifiedImageError:
        yield from _decoded(job, source())
        return
    with image:
        yield from _animated(job, image)


def _animated(job: dict[str, Any], image: Image.Image) -> Iterator[tuple[float, Image.Image]]:
    first = 1 if image.info.get("default_image") else 0  # of an APNG: shown where none can be
    last = getattr(image, "n_frames", 1)
    _require_few(job, *image.size, last - first)
    starts, end = [], 0.0
    for number in range(first, last):
        image.seek(number)
        image.load()  # WebP says how long only then
        starts.append(end)
        end += image.info.get("duration", 0) / 1000 or NO_DURATION
    for index in _chosen(starts, end, job["fps"], job["max_frames"]):
        image.seek(first + index)
        yield starts[index], image.convert("RGBA" if image.has_transparency_data else "RGB")


def _decoded(job: dict[str, Any], source: str | BytesIO) -> Iterator[tuple[float, Image.Image]]:
    import av

    options = {"protocol_whitelist": "file", "format_whitelist": CONTAINERS}
    try:
        with av.open(source, "r", options=options) as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = THREADS
            _require_few(job, stream.width, stream.height, 1)
            unit = float(stream.time_base or 0)
            found = [
                (it.pts, it.duration or 0) for it in container.demux(stream) if it.pts is not None
            ]
            if not found or not unit:
                raise ValueError("its frames have no times")
            _require_few(job, stream.width, stream.height, len(found))
            times, last = sorted(time for time, _ in found), max(found)
            starts = [(time - times[0]) * unit for time in times]
            end = starts[-1] + (last[1] * unit or NO_DURATION)
            chosen = _chosen(starts, end, job["fps"], job["max_frames"])
            wanted = [times[index] for index in chosen]
            container.seek(times[0], stream=stream)
            for frame in container.decode(stream):
                _require_few(job, frame.width, frame.height, 1)  # the size may change on the way
                if wanted and frame.pts is not None and frame.pts >= wanted[0]:
                    wanted = wanted[bisect_right(wanted, frame.pts) :]
                    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                    upright = image.rotate(frame.rotation, expand=True)
                    yield (frame.pts - times[0]) * unit, upright
                    if not wanted:
                        return
            raise ValueError(f"{len(wanted)} of its frames are missing")
    except av.FFmpegError as error:
        raise ValueError(error.strerror or str(error)) from None


def _require_few(job: dict[str, Any], width: int, height: int, num_frames: int) -> None:
    limit, total = job["limit_pixels"], job["limit_video_pixels"]
    if width * height > limit:
        raise PictureError(
            f"has frames of {width:,} x {height:,} pixels; expected at most {limit:,}; make it smaller or raise "
            "data.images.limit_pixels"
        )
    if width * height * num_frames > total:
        raise PictureError(
            f"has {num_frames:,} frames of {width:,} x {height:,} pixels; expected at most {total:,} pixels in all; "
            "cut it, make it smaller or raise data.images.limit_video_pixels"
        )


def _chosen(starts: Sequence[float], end: float, fps: float, max_frames: int) -> list[int]:
    """Indices of the frames to be taken, ascending. ``starts``: when each begins; ``end``: when the last one ends."""
    count = max(1, math.ceil(end * fps - 1e-9))
    num = min(count, max_frames)
    step = (count - 1) / (num - 1) if num > 1 else 0.0
    times = [index * step / fps for index in range(num)]
    return sorted({max(0, bisect_right(starts, time + 1e-9) - 1) for time in times})


# -- the process


def _end_with(leash: int) -> None:
    """Be ended by the system when the parent ends, in the middle of whatever C code: SIGIO, of the pipe's other end."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def _be_killed_first() -> None:
    """By the kernel, when the machine runs out of memory: this process, not the one that trains."""
    with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")


def line(text: str) -> str:
    """In one line; of a long one the end, which tells files apart."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= SHOWN else f"...{shown[-SHOWN:]}"
