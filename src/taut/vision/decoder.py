"""The program of a decoding process, which may crash or be killed: encoded images and videos to pixels.

A job is a JSON object and the encoded bytes; the answer is a sequence of JSON objects, each with bytes, of which the
last has ``end`` (``decoding.py`` has the other side):

    {"kind": "size" | "pixels", ...}     ->  {"size": [width, height]} with RGB bytes, or without
    {"kind": "claim", ...}               ->  {"size": [width, height]} as the header has them; nothing is decoded
    {"kind": "film", ...}                ->  {"seconds": when the frame begins to be shown} with PNG bytes, for each
    input that cannot be decoded         ->  {"error": reason, "why": "refused", "broken" or "import"}

Only the formats below are parsed, by content. Input that would take long or much memory is refused before it is
decoded, where the file shows it: pixels, the scans of a JPEG, the frames of a video times their pixels. The parent
kills a job that takes too long for another reason, and the system limits memory.

Imports errors, io/worker_process, PIL and the standard library; ``av`` where a video needs it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import struct
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, TypeAlias

from PIL import Image, ImageOps, UnidentifiedImageError

from taut.errors import PictureError
from taut.io.worker_process import begin
from taut.vision.settings import MOST_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are parsed, by content. Others run programs (EPS), or their parsers are little maintained."""
ANIMATED = ("GIF", "WEBP", "PNG")
"""Formats of videos that PIL reads; the others are read by PyAV."""
CONTAINERS = "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,m4v,h264,hevc,mjpeg"
"""Formats of videos that PyAV reads. Playlists, which name other files, are not among them."""
MOST_SCANS = 100
"""Largest number of scans of a JPEG; encoders make about ten. Each visits every pixel again, in a few bytes."""
SLOWER = 10
"""How many times as many pixels a second PyAV decodes as PIL does."""
THREADS = 4
"""Threads of a video's decoder."""
NO_DURATION = 0.1
"""Duration of a frame whose file says 0, in seconds, as in browsers."""
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
"""Errors of Pillow on bytes that are no image, or a truncated one."""
MAX_SHOWN = 160
"""Largest number of characters of a name or a reason in messages."""

Reply: TypeAlias = tuple[dict[str, Any], bytes]


def main(descriptor: int, leash: int) -> None:
    """Do jobs until the other end is closed."""
    warnings.simplefilter("ignore")
    pipe = begin(descriptor, leash)
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            job = json.loads(pipe.recv_bytes())
            content = pipe.recv_bytes()
            for reply, payload in _replies(job, content):
                pipe.send_bytes(json.dumps(reply).encode())
                pipe.send_bytes(payload)
            del content


def _replies(job: dict[str, Any], content: bytes) -> Iterator[Reply]:
    # Let the system limit the memory of the job.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = job["memory"] if hard == resource.RLIM_INFINITY else min(job["memory"], hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        if job["kind"] == "film":
            for seconds, image in _film(job, content):
                yield {"seconds": seconds}, png_bytes(_scaled(image, job["max_frame_pixels"]))
        else:
            image = _picture(job, content)
            pixels = image.tobytes() if job["kind"] == "pixels" else b""
            yield {"size": image.size}, pixels
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
    """All pixels of the first frame, upright, in RGB, at most ``max_pixels`` of them; none for a claim."""
    name, limit = job["name"], job["limit_pixels"]
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            # Refuse what would take long before it is decoded.
            (width, height), fault = image.size, ""
            if min(width, height) < 1:
                fault = f"is {width} x {height}; expected pixels; remove the row"
            elif width * height > limit:
                fault = (
                    f"claims {width:,} x {height:,} pixels; expected at most {limit:,}; make it smaller or raise "
                    "data.images.limit_pixels"
                )
            elif (scans := num_scans(content)) > MOST_SCANS:
                fault = f"is a JPEG of {scans:,} scans; expected at most {MOST_SCANS}; encode it again or remove it"
            if fault:
                raise PictureError(f"the picture {name} {fault}")
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
    """The number of scans of a JPEG up to its end; 0 for other formats."""
    if not content.startswith(b"\xff\xd8"):
        return 0
    count, place = 0, 2
    while marker := _MARKER.search(content, place):
        kind, place = content[marker.end() - 1], marker.end()
        if kind == 0xD9:
            break
        count += kind == 0xDA
        if kind not in _BARE:
            place += int.from_bytes(content[place : place + 2], "big")
    return count


_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
"""FF and the kind of a marker; in entropy-coded data 0 or a restart follows FF."""
_BARE = (0x01, 0xD8)
"""Markers without a length."""


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """The image upright, in three channels of 8 bits."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "F"):
        raise PictureError(
            f"the picture {name} has 32 bits a pixel (mode {image.mode}); expected 8, or 16 as integers; convert it"
        )
    if image.mode.startswith("I;16"):
        upper = 0 if image.mode == "I;16B" else 1
        image = Image.frombytes("L", image.size, image.tobytes()[upper::2])
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors, and no warning
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
    """The chosen frames, and the time at which each begins. ``path``: the file, where there are no bytes."""

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
    _require_few(job, *image.size, last - first, SLOWER)
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
            # The times of all frames, before any is decoded.
            unit = float(stream.time_base or 0)
            packets = [
                (packet.pts, packet.duration or 0)
                for packet in container.demux(stream)
                if packet.pts is not None
            ]
            if not packets or not unit:
                raise ValueError("its frames have no times")
            _require_few(job, stream.width, stream.height, len(packets))
            times, last = sorted(time for time, _ in packets), max(packets)
            starts = [(time - times[0]) * unit for time in times]
            end = starts[-1] + (last[1] * unit or NO_DURATION)
            chosen = _chosen(starts, end, job["fps"], job["max_frames"])
            wanted = [times[index] for index in chosen]
            # Decode from the start on, up to the last chosen frame.
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


def _require_few(
    job: dict[str, Any], width: int, height: int, num_frames: int, slower: int = 1
) -> None:
    """Raise PictureError for a video whose frames are too large, or too many for their size."""
    limit, total = job["limit_pixels"], job["limit_video_pixels"] // slower
    size, fault = f"frames of {width:,} x {height:,} pixels", ""
    if width * height > limit:
        fault = (
            f"{size}; expected at most {limit:,}; make it smaller or raise data.images.limit_pixels"
        )
    elif width * height * num_frames > total:
        fault = (
            f"{num_frames:,} {size}; expected at most {total:,} pixels in all; cut it, make it smaller or raise "
            "data.images.limit_video_pixels"
        )
    if fault:
        raise PictureError(f"has {fault}")


def _chosen(starts: Sequence[float], end: float, fps: float, max_frames: int) -> list[int]:
    """Indices of the frames to take, ascending. ``starts``: the start of each frame; ``end``: that of the last one."""
    count = max(1, math.ceil(end * fps - 1e-9))
    num = min(count, max_frames)
    step = (count - 1) / (num - 1) if num > 1 else 0.0
    times = [index * step / fps for index in range(num)]
    return sorted({max(0, bisect_right(starts, time + 1e-9) - 1) for time in times})


def line(text: str) -> str:
    """The text in one line, shortened to its end, which distinguishes files."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= MAX_SHOWN else f"...{shown[-MAX_SHOWN:]}"
