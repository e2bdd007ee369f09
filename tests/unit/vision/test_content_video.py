"""Frames of videos: which are taken, and when they are shown."""

from __future__ import annotations

import os
import time
from io import BytesIO
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import numpy as np
import pytest
from PIL import Image

from taut.errors import PictureError
from taut.vision import decoder, decoding
from taut.vision.content import Frame, ImageRef, frames_of, png_of
from taut.vision.settings import ImagesConfig

IMAGES = ImagesConfig()
GREYS = [Image.new("RGB", (16, 16), (20 * number,) * 3) for number in range(10)]


def opened(ref: ImageRef) -> Image.Image:
    assert isinstance(ref.value, bytes)
    return Image.open(BytesIO(ref.value)).convert("RGB")


def seen(frames: list[Frame]) -> list[tuple[float, int]]:
    """(time, which of GREYS)."""
    values = [np.asarray(opened(frame.image))[8, 8, 0] for frame in frames]
    return [
        (round(it.seconds, 2), round(value / 20)) for it, value in zip(frames, values, strict=True)
    ]


def animation(kind: str, duration: int | list[int] = 100) -> ImageRef:
    held = BytesIO()
    GREYS[0].save(
        held, kind, save_all=True, append_images=GREYS[1:], duration=duration, lossless=True
    )
    return ImageRef("bytes", held.getvalue())


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations(kind: str) -> None:
    film = animation(kind)
    assert seen(frames_of(film, 5, 64, "row", IMAGES)) == [
        (0, 0),
        (0.2, 2),
        (0.4, 4),
        (0.6, 6),
        (0.8, 8),
    ]
    assert seen(frames_of(film, 100, 3, "row", IMAGES)) == [(0, 0), (0.4, 4), (0.9, 9)]
    assert len(frames_of(film, 100, 64, "row", IMAGES)) == 10, "each once"


def test_large_frames_are_scaled_down() -> None:
    """16 x 16 within 100 pixels: 10 x 10."""
    frames = frames_of(animation("PNG"), 5, 2, "row", ImagesConfig(max_frame_pixels=100))
    assert [opened(frame.image).size for frame in frames] == [(10, 10)] * 2
    assert seen(frames) == [(0, 0), (0.8, 8)]


def test_a_frame_is_shown_until_the_next() -> None:
    film = animation("GIF", [1000, *[100] * 9])
    assert seen(frames_of(film, 1, 64, "row", IMAGES)) == [(0, 0), (1, 1)]
    assert seen(frames_of(film, 1, 1, "row", IMAGES)) == [(0, 0)]


def movie(path: Path) -> ImageRef:
    av = pytest.importorskip("av")
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for grey in GREYS:
            frame = av.VideoFrame.from_image(grey.resize((32, 16)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return ImageRef("file", str(path))


def test_a_movie(tmp_path: Path) -> None:
    film = movie(tmp_path / "a.mp4")
    frames = frames_of(film, 5, 64, "row", IMAGES)
    assert seen(frames) == [(0, 0), (0.2, 2), (0.4, 4), (0.6, 6), (0.8, 8)]
    assert opened(frames[0].image).size == (32, 16)
    held = ImageRef("bytes", (tmp_path / "a.mp4").read_bytes())
    assert frames_of(held, 5, 64, "row", IMAGES) == frames
    assert seen(frames_of(film, 50, 2, "row", IMAGES)) == [(0, 0), (0.9, 9)]


def test_a_file_that_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    for film, count in ((animation("GIF"), 10), (animation("GIF", 10), 10)):
        assert isinstance(film.value, bytes)
        path.write_bytes(film.value)
        frames = frames_of(ImageRef("file", str(path)), 100, 64, "row", IMAGES)
        assert len(frames) == count
    assert frames[1].seconds == pytest.approx(0.01)


def test_no_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"film")
    (tmp_path / "av.py").write_text("raise ModuleNotFoundError('No module named av')")
    monkeypatch.syspath_prepend(tmp_path)
    decoding.end_all()
    with pytest.raises(PictureError, match=r"d:1: .*a.mp4 needs PyAV.*pip install .*video"):
        frames_of(ImageRef("file", str(path)), 2, 64, "d:1", IMAGES)
    decoding.end_all()


def test_broken(tmp_path: Path) -> None:
    pytest.importorskip("av")
    whole = animation("PNG").value
    assert isinstance(whole, bytes)
    for broken in (b"film", b"", whole[: len(whole) // 2]):
        with pytest.raises(PictureError, match=r"^d:1: the video of .* bytes cannot be read \("):
            frames_of(ImageRef("bytes", broken), 2, 64, "d:1", IMAGES)
    with pytest.raises(PictureError, match=r"none.mp4 cannot be read \(No such file"):
        frames_of(ImageRef("file", str(tmp_path / "none.mp4")), 2, 64, "d:1", IMAGES)
    with pytest.raises(PictureError, match=r"cannot be read .*infinity"):
        frames_of(animation("GIF"), 1e308 * 10, 64, "d:1", IMAGES)
    with pytest.raises(PictureError, match="is at the address"):
        frames_of(ImageRef("url", "https://here.org/a.mp4"), 2, 64, "d:1", IMAGES)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for, for ever."""
    os.mkfifo(tmp_path / "a.mp4")
    with pytest.raises(
        PictureError, match=r"^d:1: the video .*a.mp4 cannot be read \(it is a FIFO"
    ):
        frames_of(ImageRef("file", str(tmp_path / "a.mp4")), 2, 64, "d:1", IMAGES)
    with pytest.raises(PictureError, match="it is a directory; expected a regular file"):
        frames_of(ImageRef("file", str(tmp_path)), 2, 64, "d:1", IMAGES)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "mp4"])
def test_a_bomb(tmp_path: Path, kind: str) -> None:
    film = movie(tmp_path / "a.mp4") if kind == "mp4" else animation(kind)
    size = "32 x 16" if kind == "mp4" else "16 x 16"
    images = ImagesConfig(limit_pixels=100)
    with pytest.raises(
        PictureError,
        match=rf"^d:1: the video .* has frames of {size} pixels; expected at most 100; .*\.limit_pixels$",
    ):
        frames_of(film, 3, 64, "d:1", images)
    slower = 1 if kind == "mp4" else 10
    images = ImagesConfig(limit_video_pixels=2000 * slower)
    with pytest.raises(
        PictureError,
        match=rf"has 10 frames of {size} pixels; expected at most 2,000 .*\.limit_video_pixels$",
    ):
        frames_of(film, 3, 64, "d:1", images)
    images = ImagesConfig(limit_video_pixels=10 * 16 * 32 * slower, limit_pixels=16 * 32)
    assert len(frames_of(film, 100, 64, "d:1", images)) == 10


def test_twenty_minutes_of_an_ordinary_video_are_within_the_limits() -> None:
    job = {"limit_pixels": IMAGES.limit_pixels, "limit_video_pixels": IMAGES.limit_video_pixels}
    decoder._require_few(job, 1920, 1080, num_frames=20 * 60 * 30)
    with pytest.raises(PictureError, match="has 90,000 frames of 1,920 x 1,080 pixels; expected"):
        decoder._require_few(job, 1920, 1080, num_frames=50 * 60 * 30)


def test_one_of_many_large_frames_is_refused_at_once() -> None:
    """A few kilobytes that would take minutes."""
    held = BytesIO()
    Image.new("P", (8000, 8000)).save(held, "GIF")
    whole = held.getvalue()
    begin = whole.index(b"\x2c")
    film = ImageRef("bytes", whole[:begin] + whole[begin:-1] * 200 + b";")
    began = time.monotonic()
    with pytest.raises(PictureError, match="has 200 frames of 8,000 x 8,000 pixels; expected"):
        frames_of(film, 2, 64, "d:1", IMAGES)
    assert time.monotonic() - began < 30


def test_one_that_takes_long_is_given_up() -> None:
    held = BytesIO()
    Image.new("P", (4000, 4000)).save(held, "GIF")
    whole = held.getvalue()
    begin = whole.index(b"\x2c")
    film = ImageRef("bytes", whole[:begin] + whole[begin:-1] * 100 + b";")
    began = sum(getrusage(RUSAGE_CHILDREN)[:2])
    found = r"^d:1: the video .* takes longer than 0.3 s .*data\.images\.limit_video_seconds"
    with pytest.raises(PictureError, match=found):
        frames_of(film, 2, 64, "d:1", ImagesConfig(limit_video_seconds=0.3))
    assert sum(getrusage(RUSAGE_CHILDREN)[:2]) - began < 2, "CPU time of what was ended"


def test_a_play_list_is_not_followed(tmp_path: Path) -> None:
    """It would be a way to any video of this machine."""
    movie(tmp_path / "a.mp4")
    lists = {
        "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\na.mp4\n#EXT-X-ENDLIST\n",
        "a.ffconcat": "ffconcat version 1.0\nfile a.mp4\n",
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(PictureError, match="cannot be read"):
            frames_of(ImageRef("file", str(tmp_path / name)), 2, 64, "d:1", IMAGES)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_a_picture_in_memory(mode: str) -> None:
    image = Image.linear_gradient("L").resize((8, 8)).convert(mode)
    assert np.array_equal(np.asarray(opened(png_of(image))), np.asarray(image.convert("RGB")))
