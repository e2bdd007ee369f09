"""Values that are made once and kept while there is room; the longest unused goes first.

Threads that ask for one value at a time wait for the one that makes it. What is made ahead, and was not yet asked for,
takes at most half of the room, so that it does not drive out itself. Imports nothing of ours. Imported by album.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from taut.config import fields_of
from taut.errors import ConfigError, DataError, ModelError, OutputError, PictureError
from taut.io import files
from taut.io.temporary import TemporaryFolder
from taut.types import Picture
from taut.vision.content import (
    READER,
    ImageRef,
    ImagesConfig,
    decode,
    decoded_size,
    encoded,
    read_file,
)
from taut.vision.placeholders import Processor, Shape
from taut.vision.processors import open_processor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

V = TypeVar("V")


class Kept(Generic[V]):
    """Values by key, of at most so much weight; one that is too heavy alone is made and not kept."""

    def __init__(self, room: int, weigh: Callable[[V], int]) -> None:
        self._room, self._weigh = room, weigh
        self._lock = Lock()
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._under_way: dict[Hashable, Future[V]] = {}
        self._ahead: dict[Hashable, int] = {}
        """The weights of values that nobody has asked for."""
        self.weight = 0
        """Of what is kept."""

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value, made now where it is not kept. What ``make`` raises reaches all who wait for it."""
        with self._lock:
            self._ahead.pop(key, None)
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            others = self._under_way.get(key)
            mine = self._under_way.setdefault(key, Future())
        if others is None:
            return self._make(key, make, mine)
        value = others.result()
        with self._lock:
            self._ahead.pop(key, None)
        return value

    def make_ahead(self, key: Hashable, make: Callable[[], V]) -> None:
        """Make a value that will be asked for, unless it is there, or there is much already that waits to be."""
        with self._lock:
            is_there = key in self._values or key in self._under_way
            if is_there or sum(self._ahead.values()) >= self._room // 2:
                return
            mine = self._under_way[key] = Future()
        self._make(key, make, mine, is_ahead=True)

    def _make(
        self, key: Hashable, make: Callable[[], V], mine: Future[V], is_ahead: bool = False
    ) -> V:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            self._put(key, value, is_ahead)
        mine.set_result(value)
        return value

    def _put(self, key: Hashable, value: V, is_ahead: bool) -> None:
        weight = self._weigh(value)
        if weight > self._room:
            return
        self._values[key] = value, weight
        self.weight += weight
        if is_ahead:
            self._ahead[key] = weight
        while self.weight > self._room:
            oldest, (_, weight) = self._values.popitem(last=False)
            self.weight -= weight
            self._ahead.pop(oldest, None)


# --------------------------------------------------------------------------------------------------
# Threads for what may be done ahead of time. What they have not begun when the process ends is left undone, so that an
# error is not told only after a queue of pictures. Imports nothing of ours. Imported by album.

LONGEST = 10.0
"""Seconds that the end waits for what is under way."""

_Jobs: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Ahead:
    """So many threads, and a queue before them."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name="pictures", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._threads)

    def add(self, job: Callable[[], None]) -> None:
        """Do it some time. What it raises is for the console: whoever asks for its result will be told."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is under way, and leave the rest."""
        self._end()

    def abandon(self) -> None:
        """In a process that was forked: its threads are not here."""
        self._end.detach()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or a waiting thread would keep what it needed


def _end(jobs: _Jobs, threads: Sequence[threading.Thread]) -> None:
    try:
        while True:
            jobs.get_nowait()
    except Empty:
        pass
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(LONGEST)


# --------------------------------------------------------------------------------------------------
# The pictures of a run: looked at once while data are read, and made into tensors when a micro-batch wants them.
#
# ``see`` reads a reference whole and notes the SHA-256 of its bytes, where they are, and the size it has upright and
# scaled down to ``max_pixels``: all that tokenising asks for. What has no file (bytes, addresses) is kept as one,
# DIRECTORY/SHA-256, and an address is fetched once. ``picture`` is a handle that costs nothing. Its ``tensors`` reads
# the file again, holds it to the SHA-256, and hands the pixels to the model's processor; what came of it is kept
# while memory allows, and asked for by several threads it is made once. ``expect`` begins that in threads.
#
# Tensors follow from the file and the processor alone, never from what was kept or expected, so time has no part in
# them. Pixels are kept nowhere else. May import picture, processor, durable and errors. Imported by data, run and
# build.

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
            if path.is_file() and files.digest(path) == digest:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFolder(
                "picture", self._directory.parent
            ) as folder:  # others may write it, too
                files.write_bytes(folder / "new", content)
                (folder / "new").replace(path)
            files.sync(path.parent)
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


# --------------------------------------------------------------------------------------------------
# A model's album, if it takes pictures; else nothing, and no setting of pictures that would do nothing.
#
# May import the rest of vision, config and errors. Imported by run and by what opens an engine.

OF_ROWS = (
    "folder",
    "allow_urls",
    "bad",
    "workers",
    "fps",
    "max_frames",
    "limit_video_pixels",
    "limit_video_seconds",
)
"""Settings of pictures that are for files of rows."""


def open_album(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: ImagesConfig,
    directory: Path,
    trust_remote_code: bool = False,
    *,
    key: str = "data.images",
) -> Album | None:
    """The pictures of a run, as the model at ``path`` takes them; None: it takes none. ``directory``: the cache's;
    ``key``: where ``images`` are in the configuration.
    """
    processor = open_processor(path, config, tokenizer, trust_remote_code)
    if processor is not None:
        return Album(processor, images, directory / "pictures", key)
    reader = f"model={path}, which takes no pictures"
    require_unset(images, fields_of(ImagesConfig), reader, key)
    return None


def require_alike(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    album: Album,
    key: str,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError where the model at ``path`` takes pictures in another way than those of ``album`` are made
    ready.
    """
    theirs = open_processor(path, config, tokenizer, trust_remote_code)
    if theirs is None or theirs.identity() != album.processor.identity():
        found = "takes no pictures" if theirs is None else "scales or cuts pictures in another way"
        raise ModelError(
            f"{key}={path} {found}, and is given those of the model that trains; expected the same processor; name a "
            "model of the same family with equal processor files"
        )


def require_unset(
    images: ImagesConfig, names: Iterable[str], reader: str, key: str = "images"
) -> None:
    """Raise ConfigError where one of these settings would be ignored."""
    for name in names:
        if getattr(images, name) != getattr(ImagesConfig, name):
            raise ConfigError(
                f"{key}.{name} would be ignored by {reader}; expected it unset; remove it"
            )
