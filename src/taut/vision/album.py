"""The pictures of a run: looked at once while data are read, and made into tensors when a micro-batch wants them.

``see`` reads a reference whole and notes the SHA-256 of its bytes, where they are, and the size it has upright and
scaled down to ``max_pixels``: all that tokenising asks for. What has no file (bytes, addresses) is kept as one,
DIRECTORY/SHA-256, and an address is fetched once. ``picture`` is a handle that costs nothing. Its ``tensors`` reads the
file again, holds it to the SHA-256, and hands the pixels to the model's processor; what came of it is kept while memory
allows, and asked for by several threads it is made once. ``expect`` begins that in threads.

Tensors follow from the file and the processor alone, never from what was kept or expected, so time has no part in them.
Pixels are kept nowhere else. May import picture, processor, durable and errors. Imported by data, run and build.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from taut import durable
from taut.errors import DataError, OutputError, PictureError
from taut.temporary import TemporaryFolder
from taut.types import Picture
from taut.vision.ahead import Ahead
from taut.vision.kept import Kept
from taut.vision.picture import (
    READER,
    ImageRef,
    ImagesConfig,
    decode,
    decoded_size,
    encoded,
    read_file,
)
from taut.vision.processor import Processor, Shape

MOST_SEEN = 2**16
"""Pictures whose size is remembered, so that one in many rows is read once."""

READ_AS = "data.images"
"""Where a run has the settings, as errors call them."""

Tensors = Mapping[str, Tensor]


class Seen(NamedTuple):
    """A picture that can be read."""

    digest: str
    """SHA-256 of its encoded bytes."""
    source: str
    """The file that holds them: an absolute path."""
    width: int
    height: int
    """As the model's processor is given it."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A picture of an album; equal to another where its tensors are."""

    digest: str
    source: str = field(compare=False)
    content: str = field(compare=False)
    """SHA-256 of the file as it was when the data were read."""
    num_pictures: int = field(compare=False)
    """How many the row has that it is in."""
    place: str = field(compare=False)
    """Of the sample, for messages."""
    album: Album = field(compare=False, repr=False)

    def expect(self) -> None:
        """Begin to make its tensors, in a thread."""
        self.album.expect([self])

    def tensors(self) -> Tensors:
        """What the vision tower is given; not to be written to. Raises PictureError where the file is not as it was."""
        return self.album.tensors(self)


class Album:
    """The pictures of a run."""

    def __init__(
        self, processor: Processor, images: ImagesConfig, directory: Path, key: str = READ_AS
    ) -> None:
        """``directory``: for copies of pictures that have no file of their own; ``key``: where ``images`` are in the
        configuration.
        """
        self.processor, self.images, self.key = processor, images, key
        self._directory = directory.absolute()
        looks = (READER, processor.identity(), images.max_pixels)
        self._looks = hashlib.sha256(repr(looks).encode()).hexdigest()
        self._begin()
        _begin_again_when_forked(weakref.ref(self))

    def _begin(self) -> None:
        """With nothing kept. A process that was forked has none of the threads that others waited for."""
        self._seen: Kept[Seen | str] = Kept(MOST_SEEN, lambda _: 1)
        self._ready: Kept[Tensors] = Kept(self.images.memory_bytes, _num_bytes)
        self._ahead: Ahead | None = None

    def _begin_forked(self) -> None:
        if self._ahead is not None:
            self._ahead.abandon()
        self._begin()

    # -- while data are read

    def see(self, ref: ImageRef, place: str) -> Seen:
        """Where a picture is and how large. Raises PictureError, which names ``place``."""
        key = _key(ref)
        seen = self._look(ref) if key is None else self._seen.get(key, lambda: self._look(ref))
        if isinstance(seen, str):
            raise PictureError(f"{place}: {seen}")
        return seen

    def shape(self, seen: Seen, num_pictures: int) -> Shape:
        """What becomes of a picture in a row that has ``num_pictures``."""
        try:
            return self.processor.shape(seen.width, seen.height, num_pictures)
        except DataError as error:
            raise PictureError(self._told(error)) from None

    def identity(self) -> str:
        """Changes whenever the shape of some picture could, or whether it is refused."""
        images = self.images
        limits = (images.max_bytes, images.limit_pixels, images.allow_urls)
        return hashlib.sha256(repr((self._looks, limits)).encode()).hexdigest()

    # -- while a model trains

    def picture(self, source: str, content: str, num_pictures: int, place: str) -> Handle:
        """A picture that was seen. ``content``: its digest then; ``place``: of the sample, for messages."""
        company = num_pictures if self.processor.minds_company else 0
        digest = hashlib.sha256(f"{self._looks} {content} {company}".encode()).hexdigest()
        return Handle(digest, source, content, num_pictures, place, self)

    def tensors(self, picture: Handle) -> Tensors:
        """A picture of this album as the vision tower is given it."""
        return self._ready.get(picture.digest, lambda: self._made(picture))

    def expect(self, pictures: Iterable[Picture]) -> None:
        """Begin to make what will be asked for, in threads. What is wrong with one is told when it is asked for."""
        if self._ahead is None:
            self._ahead = Ahead(self.images.workers)
        for picture in {picture.digest: picture for picture in pictures}.values():
            assert isinstance(picture, Handle), "an album's pictures are its own"
            self._ahead.add(partial(self._make_ahead, picture))

    def close(self) -> None:
        """End the threads; what they have not begun is left. Pictures can be asked for all the same."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def forget(self) -> None:
        """Begin again with nothing, not even copies of what has no file: the directory is to be nobody else's."""
        self.close()
        self._begin()
        for path in self._directory.glob("*"):
            path.unlink()

    def _make_ahead(self, picture: Handle) -> None:
        with suppress(DataError):
            self._ready.make_ahead(picture.digest, lambda: self._made(picture))

    def _made(self, picture: Handle) -> Tensors:
        try:
            content = self._again(picture)
            image = decode(content, _name(picture), self.images)
            return self.processor.tensors(image, picture.num_pictures)
        except DataError as error:
            raise PictureError(f"{picture.place}: {self._told(error)}") from None

    def _again(self, picture: Handle) -> bytes:
        """The bytes that were seen."""
        remedy = "put it back, or run again"
        if self.key == READ_AS:
            remedy = (
                "put it back, or remove the data's entry in the cache (data.cache) and run again"
            )
        try:
            content = read_file(picture.source, self.images.max_bytes)
        except PictureError as error:
            raise PictureError(f"{error}; when the data were read it could be: {remedy}") from None
        found = hashlib.sha256(content).hexdigest()
        if found != picture.content:
            raise PictureError(
                f"the picture {_name(picture)} was changed since the data were read: its SHA-256 is {found[:12]}...; "
                f"expected {picture.content[:12]}...; {remedy}"
            )
        return content

    # -- looking

    def _look(self, ref: ImageRef) -> Seen | str:
        """What is seen, or why it is not."""
        try:
            content = self._fetched(ref) if ref.kind == "url" else encoded(ref, self.images)
            size = decoded_size(content, ref.name, self.images)
        except PictureError as error:
            return self._told(error)
        digest = hashlib.sha256(content).hexdigest()
        if ref.kind == "file":
            source = Path(str(ref.value)).absolute()
        else:
            source = self._directory / digest
            self._keep(source, content, digest)
        return Seen(digest, str(source), *size)

    def _fetched(self, ref: ImageRef) -> bytes:
        """What is at an address, or was when it was first asked for, by this run or another."""
        note = self._directory / f"at-{hashlib.sha256(str(ref.value).encode()).hexdigest()}"
        with suppress(OSError, PictureError):
            digest = note.read_text(encoding="ascii")
            content = read_file(str(self._directory / digest), self.images.max_bytes)
            if self.images.allow_urls and hashlib.sha256(content).hexdigest() == digest:
                return content
        content = encoded(ref, self.images)
        digest = hashlib.sha256(content).hexdigest()
        self._keep(self._directory / digest, content, digest)
        self._keep(note, digest.encode(), hashlib.sha256(digest.encode()).hexdigest())
        return content

    def _told(self, error: DataError) -> str:
        """An error that calls settings what they are called here."""
        return str(error).replace(f"{READ_AS}.", f"{self.key}.")

    def _keep(self, path: Path, content: bytes, digest: str) -> None:
        """A file with this content, unless it is there."""
        try:
            if path.is_file() and durable.digest(path) == digest:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFolder(
                "picture", self._directory.parent
            ) as folder:  # others may write it, too
                durable.write_bytes(folder / "new", content)
                (folder / "new").replace(path)
            durable.sync(path.parent)
        except OSError as error:
            raise OutputError(
                f"the picture {path} cannot be written: {error.strerror}; expected a directory with room in it; set "
                "data.cache or TAUT_CACHE"
            ) from None


def _begin_again_when_forked(album: weakref.ref[Album]) -> None:
    def begin() -> None:
        if (found := album()) is not None:
            found._begin_forked()

    os.register_at_fork(after_in_child=begin)


def _key(ref: ImageRef) -> tuple[object, ...] | None:
    """What a picture is the same by, for as long as data are read; None: there is none."""
    if isinstance(ref.value, bytes):
        return (ref.kind, hashlib.sha256(ref.value).digest())
    if ref.kind == "url":
        return (ref.kind, ref.value)
    try:
        found = Path(ref.value).stat()
    except (OSError, ValueError):
        return None
    return (ref.kind, ref.value, found.st_ino, found.st_mtime_ns, found.st_size)


def _name(picture: Handle) -> str:
    return ImageRef("file", picture.source).name


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
