"""Pictures are read once, kept while there is room, and are what they were; time and threads change nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from taut.errors import DataError, OutputError, PictureError
from taut.vision import image_store as image_store_file
from taut.vision.content import ImageRef
from taut.vision.image_store import Handle, ImageStore, LruCache, Workers
from taut.vision.placeholders import Shape
from taut.vision.settings import ImagesConfig


class Plain:
    """A processor: the pixels as they are."""

    placeholder, image_id, reserved, is_two_way = "<image>", 7, ("<image>",), False

    def __init__(self, depends_on_count: bool = False) -> None:
        self.depends_on_count = depends_on_count
        self.made: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        return Shape("<image>" * width, width)

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        with self.lock:
            self.made.append(image.size)
        return {"pixel_values": torch.from_numpy(np.array(image))}

    def identity(self) -> str:
        return "plain"


def store_of(directory: Path, depends_on_count: bool = False, **images: Any) -> ImageStore:
    return ImageStore(Plain(depends_on_count), ImagesConfig(**images), directory / "media")


def made(image_store: ImageStore) -> list[tuple[int, int]]:
    assert isinstance(image_store.processor, Plain)
    return image_store.processor.made


def paint(path: Path, color: str = "red", size: tuple[int, int] = (6, 4)) -> ImageRef:
    Image.new("RGB", size, color).save(path)
    return ImageRef("file", str(path))


def handle(image_store: ImageStore, ref: ImageRef, place: str = "a.jsonl:3") -> Handle:
    seen = image_store.see(ref, place)
    return image_store.picture(seen.source, seen.digest, 1, place)


def done_within(image_store: ImageStore, times: int) -> None:
    """Wait until nothing is left to be made ahead, and so many pictures were made."""
    assert image_store._workers is not None
    end = time.monotonic() + 60
    while (
        len(made(image_store)) < times or not image_store._workers._jobs.empty()
    ) and time.monotonic() < end:
        time.sleep(0.001)


class TestSeeing:
    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "cat.png"
        seen = store_of(tmp_path, max_pixels=6).see(paint(path), "a:1")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert seen == (digest, str(path), 3, 2)
        assert store_of(tmp_path).shape(seen, 1).num_tokens == 3

    def test_a_relative_path_is_made_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paint(tmp_path / "cat.png")
        monkeypatch.chdir(tmp_path)
        assert store_of(tmp_path).see(ImageRef("file", "cat.png"), "a:1").source == str(
            tmp_path / "cat.png"
        )

    def test_bytes_become_a_file(self, tmp_path: Path) -> None:
        content = Path(paint(tmp_path / "cat.png").value).read_bytes()  # type: ignore[arg-type]
        image_store = store_of(tmp_path)
        blob = Path(image_store.see(ImageRef("bytes", content), "a:1").source)
        assert blob.parent == tmp_path / "media" and blob.read_bytes() == content
        stamp = blob.stat().st_mtime_ns
        assert store_of(tmp_path).see(ImageRef("bytes", content), "a:1").source == str(blob)
        assert blob.stat().st_mtime_ns == stamp
        blob.write_bytes(content[:9])  # half of it: a disk that was full, once
        store_of(tmp_path).see(ImageRef("bytes", content), "a:1")
        assert blob.read_bytes() == content
        assert [path.name for path in blob.parent.iterdir()] == [blob.name]

    def test_an_address_is_fetched_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = Path(paint(tmp_path / "cat.png").value).read_bytes()  # type: ignore[arg-type]
        asked: list[str] = []

        def fetched(ref: ImageRef, _: ImagesConfig) -> bytes:
            asked.append(str(ref.value))
            return content

        monkeypatch.setattr(image_store_file, "encoded", fetched)
        ref = ImageRef("url", "https://example.org/cat.png")
        first, again = (store_of(tmp_path, allow_urls=True).see(ref, "a:1") for _ in range(2))
        assert first == again and Path(first.source).read_bytes() == content
        assert asked == [ref.value]
        Path(first.source).unlink()
        assert store_of(tmp_path, allow_urls=True).see(ref, "a:1") == first
        assert len(asked) == 2

    def test_what_was_fetched_is_refused_too_where_addresses_are(self, tmp_path: Path) -> None:
        with pytest.raises(
            PictureError, match=r"^a:1: the picture https://example.org/cat.png is at"
        ):
            store_of(tmp_path).see(ImageRef("url", "https://example.org/cat.png"), "a:1")

    def test_the_same_is_read_once_until_it_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        image_store, looked = store_of(tmp_path), []
        look = ImageStore._look
        monkeypatch.setattr(
            ImageStore, "_look", lambda me, ref: looked.append(ref) or look(me, ref)
        )
        ref = paint(tmp_path / "cat.png")
        first = image_store.see(ref, "a:1")
        assert image_store.see(ref, "a:2") == first and len(looked) == 1
        paint(tmp_path / "cat.png", size=(9, 9))
        assert image_store.see(ref, "a:3").width == 9 and len(looked) == 2

    def test_a_fault_names_each_row_and_is_found_once(self, tmp_path: Path) -> None:
        image_store = store_of(tmp_path)
        (tmp_path / "cat.png").write_bytes(b"\x89PNG but no more")
        for place in ("a:1", "a:2"):
            with pytest.raises(PictureError, match=f"^{place}: the picture .*cat.png is "):
                image_store.see(ImageRef("file", str(tmp_path / "cat.png")), place)
        with pytest.raises(PictureError, match=r"^a:3: there is no file .*dog\.png"):
            image_store.see(ImageRef("file", str(tmp_path / "dog.png")), "a:3")
        assert paint(tmp_path / "dog.png") and image_store.see(
            ImageRef("file", str(tmp_path / "dog.png")), "a:3"
        )

    def test_no_room_for_copies(self, tmp_path: Path) -> None:
        (tmp_path / "media").write_text("in the way")
        content = Path(paint(tmp_path / "cat.png").value).read_bytes()  # type: ignore[arg-type]
        with pytest.raises(OutputError, match=r"media/[0-9a-f]+ cannot be written: .* data\.cache"):
            store_of(tmp_path).see(ImageRef("bytes", content), "a:1")


class TestHandles:
    def test_they_are_equal_where_their_tensors_are(self, tmp_path: Path) -> None:
        image_store, ref = store_of(tmp_path), paint(tmp_path / "cat.png")
        copy = ImageRef("file", str(tmp_path / "copy.png"))
        (tmp_path / "copy.png").write_bytes((tmp_path / "cat.png").read_bytes())
        one, other = handle(image_store, ref, "a:1"), handle(image_store, copy, "b:2")
        assert one == other and hash(one) == hash(other) and one.digest == other.digest
        assert int(one.digest[:7], 16) >= 0
        assert one != handle(image_store, paint(tmp_path / "dog.png", "blue"))
        assert (one.source, one.content) == (ref.value, image_store.see(ref, "").digest)

    def test_what_a_digest_depends_on(self, tmp_path: Path) -> None:
        def digest(depends_on_count: bool, num_pictures: int, **images: Any) -> str:
            image_store = store_of(tmp_path, depends_on_count, **images)
            return image_store.picture("cat.png", "00" * 32, num_pictures, "a:1").digest

        assert digest(False, 1) == digest(False, 2) == digest(False, 1, workers=1, limit_pixels=9)
        assert digest(True, 1) != digest(True, 2)
        assert digest(False, 1) != digest(False, 1, max_pixels=9)

    def test_the_identity_follows_what_may_be_refused(self, tmp_path: Path) -> None:
        plain = store_of(tmp_path).identity()
        assert plain == store_of(tmp_path, workers=1, memory_bytes=0).identity()
        for images in (
            {"max_pixels": 9},
            {"limit_pixels": 9},
            {"allow_urls": True},
            {"max_bytes": 9},
        ):
            assert plain != store_of(tmp_path, **images).identity()

    def test_a_file_that_changed_or_went(self, tmp_path: Path) -> None:
        image_store = store_of(tmp_path)
        picture = handle(image_store, paint(tmp_path / "cat.png"))
        paint(tmp_path / "cat.png", "blue")
        with pytest.raises(
            PictureError, match=r"^a.jsonl:3: the picture .*cat.png was changed since"
        ):
            picture.tensors()
        (tmp_path / "cat.png").unlink()
        with pytest.raises(
            PictureError, match=r"^a.jsonl:3: there is no file .*cat.png; .*data\.cache"
        ):
            picture.tensors()
        paint(tmp_path / "cat.png")
        assert picture.tensors()["pixel_values"].shape == (4, 6, 3)

    def test_what_a_processor_refuses_names_the_sample(self, tmp_path: Path) -> None:
        class Choosy(Plain):
            def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
                raise DataError("too narrow")

        image_store = ImageStore(Choosy(), ImagesConfig(), tmp_path)
        with pytest.raises(PictureError, match=r"^a.jsonl:3: too narrow$"):
            handle(image_store, paint(tmp_path / "cat.png")).tensors()


class TestKeeping:
    def test_memory_is_bounded(self, tmp_path: Path) -> None:
        image_store = store_of(tmp_path, memory_bytes=2 * 72)
        pictures = [
            handle(image_store, paint(tmp_path / f"{it}.png", it))
            for it in ("red", "blue", "green")
        ]
        for index in (
            0,
            1,
            0,
            2,
            0,
            1,
        ):  # the blue one is the longest unused when the green one comes
            pictures[index].tensors()
            assert image_store._ready._values.currsize <= 2 * 72
        assert len(made(image_store)) == 4
        assert (
            store_of(tmp_path, memory_bytes=0)
            .picture(pictures[0].source, pictures[0].content, 1, "a:1")
            .tensors()
        )

    def test_it_is_the_same_however_it_came(self, tmp_path: Path) -> None:
        ref = paint(tmp_path / "cat.png", "green")
        with_memory, without = store_of(tmp_path), store_of(tmp_path, memory_bytes=0)
        ahead = handle(with_memory, ref)
        with_memory.expect([ahead])
        done_within(with_memory, 1)
        with_memory.close()
        assert torch.equal(
            ahead.tensors()["pixel_values"], handle(without, ref).tensors()["pixel_values"]
        )
        assert len(made(with_memory)) == 1

    def test_what_is_wrong_is_told_when_it_is_asked_for(self, tmp_path: Path) -> None:
        image_store = store_of(tmp_path)
        picture = handle(image_store, paint(tmp_path / "cat.png"))
        (tmp_path / "cat.png").unlink()
        image_store.expect([picture, picture])
        done_within(image_store, 0)
        image_store.close()
        with pytest.raises(PictureError, match=r"^a.jsonl:3: there is no file"):
            picture.tensors()
        image_store.close()

    def test_two_that_ask_at_once_do_it_once(self) -> None:
        kept: LruCache[str] = LruCache(9, len)
        entered, go, times, got = threading.Event(), threading.Event(), [], []

        def make() -> str:
            times.append(1)
            entered.set()
            assert go.wait(60)
            return "x"

        threads = [
            threading.Thread(target=lambda: got.append(kept.get("k", make))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert entered.wait(60)
        kept.make_ahead("k", make)
        go.set()
        for thread in threads:
            thread.join(60)
        assert (got, times) == (["x"] * 4, [1])

    def test_who_waits_is_told_what_went_wrong(self) -> None:
        kept: LruCache[str] = LruCache(9, len)
        entered, go, told = threading.Event(), threading.Event(), []

        def fail() -> str:
            entered.set()
            assert go.wait(60)
            raise DataError("broken")

        def ask() -> None:
            try:
                kept.get("k", fail)
            except DataError as error:
                told.append(str(error))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert entered.wait(60)
        threads[1].start()
        time.sleep(0.01)
        go.set()
        for thread in threads:
            thread.join(60)
        assert told == ["broken"] * 2
        assert kept.get("k", lambda: "well") == "well"

    def test_what_is_made_ahead_does_not_drive_out_itself(self) -> None:
        kept: LruCache[str] = LruCache(4, len)
        for key in "abcd":
            kept.make_ahead(key, lambda: "x")
        again: list[str] = []
        for key in "abcd":
            kept.get(key, lambda key=key: again.append(key) or "x")  # type: ignore[misc]
        assert again == ["c", "d"]
        kept.make_ahead("e", lambda: "x")
        assert kept.get("e", lambda: "y") == "x"

    def test_what_was_not_begun_is_left_at_the_end(self) -> None:
        ahead, begun, go, done = Workers(1), threading.Event(), threading.Event(), []

        def job() -> None:
            begun.set()
            assert go.wait(60)
            done.append(1)

        for _ in range(3):
            ahead.add(job)
        assert begun.wait(60)
        closing = threading.Thread(target=ahead.close)
        closing.start()
        while ahead._jobs.qsize() > 1:  # all that waits is the word to end
            time.sleep(0.001)
        go.set()
        closing.join(60)
        assert done == [1] and not ahead._threads[0].is_alive()

    def test_a_process_that_ends_waits_for_no_queue(self) -> None:
        program = (
            "import time; from taut.vision.image_store import Workers; ahead = Workers(1)\n"
            "for _ in range(1000): ahead.add(lambda: time.sleep(1))\n"
            "time.sleep(0.02)"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=300)

    def test_a_forked_process_waits_for_no_thread_of_its_parent(self, tmp_path: Path) -> None:
        image_store = store_of(tmp_path)
        picture = handle(image_store, paint(tmp_path / "cat.png"))
        image_store.expect([picture])
        done_within(image_store, 1)
        with (
            image_store._ready._lock,
            warnings.catch_warnings(),
        ):  # held by a thread the child has not
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                os._exit(0 if picture.tensors() else 1)
        assert os.waitpid(child, 0)[1] == 0
        image_store.close()
