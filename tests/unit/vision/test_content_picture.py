"""A reference becomes pixels that are whole, upright and RGB, or an error in one line; nothing hangs or bursts."""

from __future__ import annotations

import gzip
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.helpers.broken_servers import answers, redirects, repeats, serving
from transformers.image_utils import load_image

from taut.errors import DataError, PictureError
from taut.io import http
from taut.vision import content as fetch
from taut.vision.content import FORMATS, ImageRef, decode, encoded, read_file
from taut.vision.settings import ImagesConfig

IMAGES = ImagesConfig()
NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def content_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    """An encoded picture."""
    stream = BytesIO()
    image.save(stream, kind, **more)
    return stream.getvalue()


def noise(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(NOISE).convert(mode)


def refused(content: bytes, images: ImagesConfig = IMAGES) -> str:
    """What is said of a picture that cannot be used: in one line."""
    with pytest.raises(PictureError) as error:
        decode(content, "cat.png", images)
    text = str(error.value)
    assert text.startswith("the picture cat.png ") and text.isprintable() and "; expected " in text
    return text


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header says how large it is."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(100))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


class TestPixels:
    @pytest.mark.parametrize(
        ("kind", "mode"),
        [
            ("PNG", "RGB"),
            ("PNG", "RGBA"),
            ("PNG", "LA"),
            ("PNG", "P"),
            ("PNG", "1"),
            ("JPEG", "CMYK"),
            ("JPEG", "L"),
            ("WEBP", "RGBA"),
            ("GIF", "P"),
            ("BMP", "RGB"),
            ("TIFF", "LAB"),
        ],
    )
    def test_they_are_those_of_the_library(self, kind: str, mode: str) -> None:
        content = content_of(noise(mode), kind)
        image = decode(content, "x", IMAGES)
        assert image.mode == "RGB"
        assert np.array_equal(image, load_image(Image.open(BytesIO(content))))

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG", "MPO"])
    def test_of_several_frames_the_first(self, kind: str) -> None:
        first, second = noise("RGB"), Image.new("RGB", (40, 24), "red")
        content = content_of(first, kind, save_all=True, append_images=[second])
        assert np.array_equal(
            decode(content, "x", IMAGES), load_image(Image.open(BytesIO(content)))
        )
        assert not np.array_equal(decode(content, "x", IMAGES), second)

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
    def test_the_cameras_orientation_is_applied(self, kind: str) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # turn it a quarter to the right
        content = content_of(noise(), kind, exif=exif)
        image = decode(content, "x", IMAGES)
        assert image.size == (24, 40)
        assert np.array_equal(image, load_image(Image.open(BytesIO(content))))

    def test_a_grey_picture_of_16_bits_keeps_its_upper_byte(self) -> None:
        grey = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
        for kind in ("PNG", "TIFF"):
            image = decode(content_of(Image.fromarray(grey), kind), "x", IMAGES)
            assert np.array_equal(np.asarray(image)[..., 1], grey >> 8)

    def test_a_palette_with_transparency(self) -> None:
        content = content_of(noise("P"), transparency=bytes(range(256)))
        assert np.array_equal(decode(content, "x", IMAGES), noise("P").convert("RGB"))

    def test_one_pixel(self) -> None:
        assert decode(content_of(Image.new("RGB", (1, 1), "red")), "x", IMAGES).size == (1, 1)

    @pytest.mark.parametrize(
        ("size", "most", "expected"),
        [
            ((40, 24), 240, (20, 12)),
            ((24, 40), 240, (12, 20)),
            ((40, 24), 960, (40, 24)),
            ((1000, 1), 100, (100, 1)),
            ((3, 3), 1, (1, 1)),
        ],
    )
    def test_a_large_picture_is_scaled_down(
        self, size: tuple[int, int], most: int, expected: tuple[int, int]
    ) -> None:
        content = content_of(Image.new("RGB", size))
        assert decode(content, "x", ImagesConfig(max_pixels=most)).size == expected


class TestRefused:
    @pytest.mark.parametrize("kind", FORMATS)
    def test_one_cut_short(self, kind: str) -> None:
        content = content_of(noise(), kind)
        assert "damaged or cut short" in refused(content[: len(content) * 2 // 3])

    def test_bytes_changed_inside(self) -> None:
        content = bytearray(content_of(noise()))
        content[len(content) // 2] ^= 0xFF
        assert "damaged or cut short" in refused(bytes(content))

    @pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (10_000, 9_000)])
    def test_a_decompression_bomb(self, width: int, height: int) -> None:
        assert "at most 80,000,000" in refused(png_that_claims(width, height))
        assert "limit_pixels" in refused(png_that_claims(5, 5), ImagesConfig(limit_pixels=24))

    def test_no_pixels(self) -> None:
        assert refused(png_that_claims(0, 5))

    def test_32_bits(self) -> None:
        assert "32 bits a pixel" in refused(content_of(noise("F"), "TIFF"))

    @pytest.mark.parametrize(
        "content",
        [
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
            b"<html>403 Forbidden</html>",
            b"P6 1 1 255 abc",
            b"",
        ],
    )
    def test_what_is_no_picture_of_a_known_format(self, content: bytes) -> None:
        text = refused(content)
        assert "of no format that is read" in text and "PNG, JPEG, WEBP" in text

    def test_a_message_is_short_and_one_line(self) -> None:
        with pytest.raises(PictureError) as error:
            decode(b"nonsense", ImageRef("file", "a\nb" + "x" * 5000 + ".png").name, IMAGES)
        assert str(error.value).isprintable() and len(str(error.value)) < 500
        assert ".png" in str(error.value)
        assert isinstance(error.value, DataError)
        assert ImageRef("bytes", bytes(10**4)).name == "of 10,000 bytes"


class TestFiles:
    def test_what_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "cat.png"
        path.write_bytes(content_of(noise()))
        link = tmp_path / "link.png"
        link.symlink_to(path)
        for one in (path, link):
            assert encoded(ImageRef("file", str(one)), IMAGES) == path.read_bytes()

    def test_what_is_not(self, tmp_path: Path) -> None:
        for path in (str(tmp_path / "dog.png"), str(tmp_path / "a" / "b")):
            with pytest.raises(PictureError, match=f"there is no file {re.escape(path)}; expected"):
                read_file(path, 10)

    @pytest.mark.parametrize("path", ["a\0b", "\ud800.png", "x" * 5000])
    def test_what_no_path_can_be(self, path: str) -> None:
        with pytest.raises(PictureError, match="cannot be read") as error:
            read_file(path, 10)
        assert str(error.value).isprintable()

    def test_a_pipe_does_not_hang(self, tmp_path: Path) -> None:
        pipe = tmp_path / "cat.png"
        os.mkfifo(pipe)
        for path, says in (
            (pipe, "a FIFO"),
            (Path("/dev/zero"), "a character device"),
            (tmp_path, "a directory"),
        ):
            with pytest.raises(PictureError, match=says):
                read_file(str(path), 10)

    def test_too_many_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "cat.png"
        path.write_bytes(bytes(11))
        assert read_file(str(path), 11) == bytes(11)
        for ref in (ImageRef("file", str(path)), ImageRef("bytes", bytes(11))):
            with pytest.raises(
                PictureError, match=r"11 bytes.*at most 10;.*data\.images\.max_bytes"
            ):
                encoded(ref, ImagesConfig(max_bytes=10))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Pictures at addresses."""
    picture = content_of(noise())
    times: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            times.append(self.path)
            if self.path == "/busy" and times.count("/busy") < 2:
                self.send_error(503)
            elif self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
            elif self.path == "/none":
                self.send_error(404)
            else:
                body = bytes(200_000) if self.path == "/large" else picture
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body[:-9] if self.path == "/cut" else body)

        def log_message(self, *_: Any) -> None:
            """Not to the console."""

    monkeypatch.setattr(fetch, "RETRIES", http.Retries(attempts=3, first_pause=0.0))
    monkeypatch.setattr(http, "trusted", lambda: False)  # read once a process, in half a second
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


class TestAddresses:
    ALLOWED = ImagesConfig(allow_urls=True, max_bytes=100_000)

    def test_not_unless_allowed(self) -> None:
        with pytest.raises(PictureError, match=r"at an address; .* data\.images\.allow_urls=true"):
            encoded(ImageRef("url", "https://example.org/cat.png"), IMAGES)

    @pytest.mark.parametrize("path", ["/cat.png", "/busy", "/to//cat.png"])
    def test_they_are_fetched(self, server: str, path: str) -> None:
        assert encoded(ImageRef("url", server + path), self.ALLOWED) == content_of(noise())

    @pytest.mark.parametrize(
        ("path", "says"),
        [
            ("/none", "HTTP 404"),
            ("/large", "more than 100,000 bytes"),
            ("/to/file:///etc/hostname", "cannot be fetched"),
            ("/to/to/to/to/to/to/to/to/x", "cannot be fetched|HTTP"),
        ],
    )
    def test_what_is_refused(self, server: str, path: str, says: str) -> None:
        with pytest.raises(PictureError, match=says):
            encoded(ImageRef("url", server + path), self.ALLOWED)

    @pytest.mark.parametrize(
        "url", ["file:///etc/hostname", "ftp://example.org/x", "http://[", "http://"]
    )
    def test_no_other_scheme(self, url: str) -> None:
        with pytest.raises(PictureError, match="cannot be fetched"):
            encoded(ImageRef("url", url), self.ALLOWED)

    def test_one_that_drips_or_inflates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A redirect's body, on the way to a picture; the picture itself."""
        monkeypatch.setattr(http, "trusted", lambda: False)
        monkeypatch.setattr(fetch, "SECONDS", 0.5)
        bomb = gzip.compress(bytes(10**8))
        with serving() as wire:
            wire.paths = {
                "/bomb": redirects("/cat.png", b"Content-Encoding: gzip", body=bomb),
                "/cat.png": answers(content_of(noise())),
                "/drips": repeats(b"HTTP/1.1 302 Found\r\nLocation: ", b"x", 0.02),
                "/large": answers(bomb, b"Content-Encoding: gzip"),
                "/loop": redirects("/loop"),
            }
            url = f"{wire.url}/bomb"
            assert encoded(ImageRef("url", url), self.ALLOWED) == content_of(noise())
            for path, says in (
                ("/drips", r"not whole after 0\.5 s"),
                ("/large", r"more than 100,000 bytes.*data\.images\.max_bytes"),
                ("/loop", "more than 5 redirects"),
            ):
                with pytest.raises(PictureError, match=says):
                    encoded(ImageRef("url", wire.url + path), self.ALLOWED)

    def test_nobody_there(self, server: str) -> None:
        with pytest.raises(
            PictureError, match=r"cannot be fetched: no answer .ConnectError: .*\(3 attempts\)"
        ):
            encoded(ImageRef("url", "http://127.0.0.1:9/cat.png"), self.ALLOWED)

    def test_secrets_are_not_told(self) -> None:
        name = ImageRef("url", "https://me:secret@example.org/cat.png?key=secret#secret").name
        assert name == "https://example.org/cat.png"
