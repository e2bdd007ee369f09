"""The images of a run: read once for their size while data are tokenized, and made into tensors for a micro-batch.

``see`` reads a reference whole and notes the SHA-256 of its bytes, their file, and the size of the image, upright and
scaled down to ``max_pixels``: all that tokenizing needs. Images without a file (bytes, addresses) are stored as one,
DIRECTORY/SHA-256, and an address is fetched once. ``picture`` is a handle that costs nothing. Its ``tensors`` reads the
file again, compares it with the SHA-256, and passes the pixels to the model's processor. ``expect`` begins that in
threads.

Tensors are kept while memory allows (``LruCache``). They follow from the file and the processor alone, never from what
was kept or expected, so timing does not change them. Pixels are not kept.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import cachetools
from torch import Tensor

from taut.config import changed
from taut.errors import ConfigError, DataError, ModelError, OutputError, PictureError
from taut.io import files
from taut.io.temporary import TemporaryFolder
from taut.types import Picture
from taut.vision.content import READER, ImageRef, decode, decoded_size, encoded, read_file
from taut.vision.placeholders import Processor, Shape
from taut.vision.processors import open_processor
from taut.vision.settings import ImagesConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

V = TypeVar("V")
Tensors: TypeAlias = Mapping[str, Tensor]

MOST_SEEN = 2**16
"""Number of images whose size is remembered, so that an image of many rows is read once."""
READ_AS = "data.images"
"""Default name of the settings of images, in errors."""
END_SECONDS = 10.0
"""Longest wait for jobs that are running when the threads end."""


# -- opening a model's store


def open_image_store(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: ImagesConfig,
    directory: Path,
    trust_remote_code: bool = False,
    *,
    key: str = READ_AS,
) -> ImageStore | None:
    """The image store of the model at ``path``; None where it takes no images: then settings of images, which would do
    nothing, are refused. ``directory``: that of the cache; ``key``: the name of ``images`` in the configuration.
    """
    processor = open_processor(path, config, tokenizer, trust_remote_code, images.min_pixels)
    if processor is not None:
        return ImageStore(processor, images, directory / "pictures", key)
    for name in changed(images):
        raise ConfigError(
            f"{key}.{name} would be ignored by model={path}, which takes no pictures; expected it unset; remove it"
        )
    return None


def require_same_processor(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    image_store: ImageStore,
    key: str,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError where the model at ``path`` processes images otherwise than the model of ``image_store``."""
    least = image_store.images.min_pixels
    processor = open_processor(path, config, tokenizer, trust_remote_code, least)
    if processor is None or processor.identity() != image_store.processor.identity():
        fault = (
            "takes no pictures" if processor is None else "scales or cuts pictures in another way"
        )
        raise ModelError(
            f"{key}={path} {fault}, and is given those of the model that trains; expected the same processor; name a "
            "model of the same family with equal processor files"
        )


# -- the store


class Seen(NamedTuple):
    """An image that can be read."""

    digest: str
    """SHA-256 of its encoded bytes."""
    source: str
    """The file that holds them: an absolute path."""
    width: int
    height: int
    """Size as the model's processor gets it."""


@dataclass(frozen=True, slots=True)
class Handle:
    """An image of the store; equal to another where its tensors are."""

    digest: str
    source: str = field(compare=False)
    content: str = field(compare=False)
    """SHA-256 of the file when the data were read."""
    num_pictures: int = field(compare=False)
    """Number of images in its row."""
    place: str = field(compare=False)
    """The sample, for messages."""
    image_store: ImageStore = field(compare=False, repr=False)

    def expect(self) -> None:
        """Begin to make its tensors, in a thread."""
        self.image_store.expect([self])

    def tensors(self) -> Tensors:
        """The inputs of the vision tower, not to be written to. Raises PictureError where the file has changed."""
        return self.image_store.tensors(self)


class ImageStore:
    """The images of a run, as one model takes them."""

    def __init__(
        self, processor: Processor, images: ImagesConfig, directory: Path, key: str = READ_AS
    ) -> None:
        """``directory``: for copies of images without a file; ``key``: the name of ``images`` in the configuration."""
        self.processor, self.images, self.key = processor, images, key
        self._directory = directory.absolute()
        looks = (READER, processor.identity(), images.max_pixels)
        self._looks = hashlib.sha256(repr(looks).encode()).hexdigest()
        self._clear()
        store = weakref.ref(self)

        def clear_in_child() -> None:
            """A forked process has none of the threads that others wait for."""
            if (forked := store()) is not None:
                if forked._workers is not None:
                    forked._workers.abandon()
                forked._clear()

        os.register_at_fork(after_in_child=clear_in_child)

    def _clear(self) -> None:
        self._seen: LruCache[Seen | str] = LruCache(MOST_SEEN, lambda _: 1)
        self._ready: LruCache[Tensors] = LruCache(
            self.images.memory_bytes,
            lambda tensors: sum(tensor.nbytes for tensor in tensors.values()),
        )
        self._workers: Workers | None = None

    # -- while data are read

    def see(self, ref: ImageRef, place: str) -> Seen:
        """The file and the size of an image. Raises PictureError, which names ``place``."""
        key = _key(ref)
        seen = self._look(ref) if key is None else self._seen.get(key, lambda: self._look(ref))
        if isinstance(seen, str):
            raise PictureError(f"{place}: {seen}")
        return seen

    def shape(self, seen: Seen, num_pictures: int) -> Shape:
        """The text and tokens of an image in a row of ``num_pictures`` images."""
        try:
            return self.processor.shape(seen.width, seen.height, num_pictures)
        except DataError as error:
            raise PictureError(self._with_key(error)) from None

    def identity(self) -> str:
        """A digest that changes whenever the shape of some image could, or whether it is refused."""
        images = self.images
        limits = (images.max_bytes, images.limit_pixels, images.allow_urls)
        return hashlib.sha256(repr((self._looks, limits)).encode()).hexdigest()

    # -- while a model trains

    def picture(self, source: str, content: str, num_pictures: int, place: str) -> Handle:
        """The handle of an image that was seen. ``content``: its digest then; ``place``: the sample, for messages."""
        company = num_pictures if self.processor.depends_on_count else 0
        digest = hashlib.sha256(f"{self._looks} {content} {company}".encode()).hexdigest()
        return Handle(digest, source, content, num_pictures, place, self)

    def tensors(self, picture: Handle) -> Tensors:
        """The inputs of the vision tower for an image of this store."""
        return self._ready.get(picture.digest, lambda: self._make_tensors(picture))

    def expect(self, pictures: Iterable[Picture]) -> None:
        """Begin to make the tensors of these images, in threads. An error is raised when they are used."""
        if self._workers is None:
            self._workers = Workers(self.images.workers)

        def make_ahead(picture: Handle) -> None:
            with suppress(DataError):
                self._ready.make_ahead(picture.digest, lambda: self._make_tensors(picture))

        for picture in {picture.digest: picture for picture in pictures}.values():
            assert isinstance(picture, Handle), "the images of a store are its own"
            self._workers.add(partial(make_ahead, picture))

    def close(self) -> None:
        """End the threads; jobs that have not begun are discarded. Tensors can still be made."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def forget(self) -> None:
        """Discard everything, also the copies of images without a file: the directory must not be shared."""
        self.close()
        self._clear()
        for path in self._directory.glob("*"):
            path.unlink()

    def _make_tensors(self, picture: Handle) -> Tensors:
        try:
            content = self._read_again(picture)
            name = ImageRef("file", picture.source).name
            image = decode(content, name, self.images)
            return self.processor.tensors(image, picture.num_pictures)
        except DataError as error:
            raise PictureError(f"{picture.place}: {self._with_key(error)}") from None

    def _read_again(self, picture: Handle) -> bytes:
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
        digest = hashlib.sha256(content).hexdigest()
        if digest != picture.content:
            name = ImageRef("file", picture.source).name
            raise PictureError(
                f"the picture {name} was changed since the data were read: its SHA-256 is {digest[:12]}...; "
                f"expected {picture.content[:12]}...; {remedy}"
            )
        return content

    # -- looking

    def _look(self, ref: ImageRef) -> Seen | str:
        """The file and size of an image, or why it cannot be used."""
        try:
            content = self._fetched(ref) if ref.kind == "url" else encoded(ref, self.images)
            size = decoded_size(content, ref.name, self.images)
        except PictureError as error:
            return self._with_key(error)
        digest = hashlib.sha256(content).hexdigest()
        if ref.kind == "file":
            source = Path(str(ref.value)).absolute()
        else:
            source = self._directory / digest
            self._store(source, content, digest)
        return Seen(digest, str(source), *size)

    def _fetched(self, ref: ImageRef) -> bytes:
        """The content at an address, or its copy of the first time that this or another run fetched it."""
        note = self._directory / f"at-{hashlib.sha256(str(ref.value).encode()).hexdigest()}"
        with suppress(OSError, PictureError):
            digest = note.read_text(encoding="ascii")
            content = read_file(str(self._directory / digest), self.images.max_bytes)
            if self.images.allow_urls and hashlib.sha256(content).hexdigest() == digest:
                return content
        content = encoded(ref, self.images)
        digest = hashlib.sha256(content).hexdigest()
        self._store(self._directory / digest, content, digest)
        self._store(note, digest.encode(), hashlib.sha256(digest.encode()).hexdigest())
        return content

    def _with_key(self, error: DataError) -> str:
        """The error's text, with the names that the settings have here."""
        return str(error).replace(f"{READ_AS}.", f"{self.key}.")

    def _store(self, path: Path, content: bytes, digest: str) -> None:
        """Write a file with this content, unless it exists."""
        try:
            if path.is_file() and files.digest(path) == digest:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            # in a folder of its own: other processes may write the same file
            with TemporaryFolder("picture", self._directory.parent) as folder:
                files.write_bytes(folder / "new", content)
                (folder / "new").replace(path)
            files.sync(path.parent)
        except OSError as error:
            raise OutputError(
                f"the picture {path} cannot be written: {error.strerror}; expected a directory with room in it; set "
                "data.cache or TAUT_CACHE"
            ) from None


def _key(ref: ImageRef) -> tuple[object, ...] | None:
    """Identifies an image while data are read; None for a path that does not exist."""
    if isinstance(ref.value, bytes):
        return (ref.kind, hashlib.sha256(ref.value).digest())
    if ref.kind == "url":
        return (ref.kind, ref.value)
    try:
        status = Path(ref.value).stat()
    except (OSError, ValueError):
        return None
    return (ref.kind, ref.value, status.st_ino, status.st_mtime_ns, status.st_size)


# -- values kept while there is room


class LruCache(Generic[V]):
    """Values by key, up to a total weight; the least recently used is removed first. A value heavier than the
    whole room is made and not kept.

    Threads that ask for one value at the same time wait for the one that makes it. Values made ahead that were not used
    yet take at most half of the room, so that they do not remove each other.
    """

    def __init__(self, room: int, weigh: Callable[[V], int]) -> None:
        self._lock = Lock()
        self._values: cachetools.LRUCache[Hashable, V] = cachetools.LRUCache(room, weigh)
        self._in_progress: dict[Hashable, Future[V]] = {}
        self._unused: dict[Hashable, float] = {}
        """The weights of values that were made ahead and not used yet."""

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value, made now where it is not kept. An error of ``make`` is raised in all threads that wait for it."""
        with self._lock:
            self._unused.pop(key, None)
            if key in self._values:
                return self._values[key]
            waiting_for = self._in_progress.get(key)
            if waiting_for is None:
                result = self._in_progress[key] = Future()
        if waiting_for is None:
            return self._make(key, make, result)
        value = waiting_for.result()
        with self._lock:
            self._unused.pop(key, None)
        return value

    def make_ahead(self, key: Hashable, make: Callable[[], V]) -> None:
        """Make a value that will be used, unless it is kept, or the unused ones fill half of the room."""
        with self._lock:
            is_made = key in self._values or key in self._in_progress
            if is_made or sum(self._unused.values()) >= self._values.maxsize // 2:
                return
            result = self._in_progress[key] = Future()
        self._make(key, make, result, is_ahead=True)

    def _make(
        self, key: Hashable, make: Callable[[], V], result: Future[V], is_ahead: bool = False
    ) -> V:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._in_progress[key]
            result.set_exception(error)
            raise
        with self._lock:
            del self._in_progress[key]
            weight = self._values.getsizeof(value)
            if weight <= self._values.maxsize:
                self._values[key] = value
                if is_ahead:
                    self._unused[key] = weight
            self._unused = {k: size for k, size in self._unused.items() if k in self._values}
        result.set_result(value)
        return value


# -- threads


class Workers:
    """Threads that do jobs from a queue. Jobs that have not begun when the process ends are discarded, so that an error
    is not reported only after a queue of images.
    """

    def __init__(self, num_threads: int) -> None:
        jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

        # neither function holds this object, whose end ends the threads
        def work() -> None:
            while (job := jobs.get()) is not None:
                job()
                del job  # or a waiting thread would keep what it needed

        def end() -> None:
            with suppress(Empty):
                while True:
                    jobs.get_nowait()
            for _ in threads:
                jobs.put(None)
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join(END_SECONDS)

        threads = [
            threading.Thread(target=work, name="pictures", daemon=True) for _ in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        self._jobs, self._threads = jobs, threads
        self._end = weakref.finalize(self, end)

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job. An error that it raises ends up on the console only."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the running jobs and discard the others."""
        self._end()

    def abandon(self) -> None:
        """Forget the threads in a forked process, which does not have them."""
        self._end.detach()
