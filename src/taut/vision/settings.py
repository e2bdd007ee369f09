"""Keys of pictures and videos."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from taut.config import configclass

MOST_PIXELS = 89_478_485
"""Number of pixels above which Pillow suspects a decompression bomb."""


@configclass
class ImagesConfig:
    """Reading of pictures and videos in the data, and their limits."""

    folder: str | None = None
    """Folder of relative paths of pictures; by default that of the data file, then the working directory."""
    max_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Maximum encoded size of a picture, in bytes."""
    limit_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] = 80_000_000
    """Maximum pixels of a picture; a larger one is refused by its header, before it is decoded."""
    limit_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Seconds in which a picture must be decoded; a slower one cannot be used."""
    limit_video_pixels: Annotated[int, Field(ge=1)] = 10**11
    """Largest number of pixels of all frames of a video together; one with more is refused before it is decoded. The
    default allows 26 minutes of 1920 x 1080 at 30 frames a second. GIF, WebP and APNG, which decode slowly, may have a
    tenth of it."""
    limit_video_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which a video must be decoded."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Larger pictures are scaled down to this number of pixels, aspect ratio kept, before the model's own processor."""
    min_pixels: Annotated[int, Field(ge=1)] | None = None
    """Smaller pictures, and frames of a video, are scaled up to this number of pixels by the model's own processor, in
    place of its own lower limit: for the Qwen family."""
    allow_urls: bool = False
    """Fetch pictures at http and https addresses, once, into the cache (also from hosts that only this machine can
    reach: trust the data)."""
    bad: Literal["error", "drop"] = "error"
    """Treatment of a row whose picture cannot be read or exceeds a limit: the run ends, or the row is left out and
    listed."""
    workers: Annotated[int, Field(ge=1)] = 4
    """Number of threads that decode pictures in advance."""
    memory_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Memory for pictures that are ready for the model, in bytes; the least recently used is removed first."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames taken per second of video."""
    max_frames: Annotated[int, Field(ge=1)] = 64
    """Maximum frames per video; longer videos are sampled evenly."""
    max_frame_pixels: Annotated[int, Field(ge=1)] | None = None
    """Larger frames of a video file are scaled down to this number of pixels. max_pixels holds for them as well."""


OF_ROWS = (
    "folder",
    "allow_urls",
    "bad",
    "workers",
    "fps",
    "max_frames",
    "max_frame_pixels",
    "limit_video_pixels",
    "limit_video_seconds",
)
"""Settings of images that apply to files of rows only."""
