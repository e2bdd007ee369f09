"""Images in rendered text: sizes read, placeholders written as words, and found again among the token ids.

A chat template writes one placeholder for each image. Before anything is tokenized, it is replaced by the words that
stand for an image of that size (``vision/placeholders.py``); the tokens that features replace are then assigned to the
images in order:

    placeholders written = images of the messages        tokens found = sum of the images' tokens

Both are required exactly, so features and tokens cannot get out of step. No text may contain a word that stands for
images, and no such token is learned: a model does not write images.

How many tokens an image has may depend on the number of images in its row: a prefix of a row counts those of the whole
row. Reads no file: the image store does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from taut.data.rows.messages import MARKS, Message, Tool, text_of
from taut.errors import DataError, PictureError, RenderError
from taut.types import IntArray, Media, Picture, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.content import ImageRef
    from taut.vision.image_store import ImageStore
    from taut.vision.placeholders import Shape

T = TypeVar("T")
BATCH_ROWS, BATCH_BYTES = 256, 2**28
"""Limits of rows rendered together: their number, and the bytes of images held in them. Frames of videos are large."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An image of a text: where its features come from, and the words that stand for it."""

    picture: Picture
    shape: Shape


class Pictures:
    """Images on their way through a tokenizer. Without an image store there must be none."""

    def __init__(self, image_store: ImageStore | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self.image_store = image_store
        self.tokenizer = tokenizer

    def look(self, rows: Iterable[tuple[str, Sequence[Message]]]) -> None:
        """Let the image store read the images of these messages, several at a time, so that ``place`` does not wait."""
        image_store = self.image_store
        if image_store is None:
            return
        first: dict[ImageRef, str] = {}
        for place, messages in rows:
            for ref, where in located(messages, place):
                first.setdefault(ref, where)

        def see(ref: ImageRef) -> None:
            with suppress(PictureError):  # ``place`` raises it
                image_store.see(ref, first[ref])

        if first:
            with ThreadPoolExecutor(image_store.images.workers) as pool:
                list(pool.map(see, first))

    def place(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: str
    ) -> tuple[Placed, ...]:
        """The images of a whole row. Raises PictureError for one that cannot be used, and RenderError for text that
        would be taken for one.
        """
        if self._reserved is not None:
            for index, message in enumerate(messages):
                for key, value in message.items():
                    texts = [text_of(value or "")] if key == "content" else _strings(value)
                    for text in texts:
                        self.require_plain(text, f"{place}: messages[{index}].{key}")
            for text in _strings(tools):
                self.require_plain(text, f"{place}: tools")
        return self.place_each(messages, place)

    def place_each(self, messages: Sequence[Message], place: str) -> tuple[Placed, ...]:
        """``place`` without a check of the text."""
        refs = list(located(messages, place))
        placed = []
        for ref, where in refs:
            if self.image_store is None:
                raise RenderError(
                    f"{where} is a picture, and the model takes no pictures; expected text; take it out, or name a "
                    "vision-language model"
                )
            seen = self.image_store.see(ref, where)
            try:
                shape = self.image_store.shape(seen, len(refs))
            except DataError as error:
                raise PictureError(f"{where}: {error}") from None
            picture = self.image_store.picture(seen.source, seen.digest, len(refs), where)
            placed.append(Placed(picture, shape))
        return tuple(placed)

    def write(self, text: str, placed: Sequence[Placed], place: str) -> str:
        """A template's text with the words that stand for each image in place of its placeholder."""
        if self.image_store is None:
            return text
        placeholder = self.image_store.processor.placeholder
        before, *rest = text.split(placeholder)
        if len(rest) != len(placed):
            raise RenderError(
                f"{place}: the chat template writes {len(rest)} placeholders ({placeholder}) for {len(placed)} "
                "pictures; expected one for each; give a template that writes one for each image"
            )
        pairs = zip(placed, rest, strict=True)
        return before + "".join(image.shape.text + after for image, after in pairs)

    def find(
        self, ids: IntArray | Sequence[int], placed: Sequence[Placed], place: str
    ) -> tuple[Media, ...]:
        """The position of each image of a text among its ids."""
        if self.image_store is None:
            return ()
        processor = self.image_store.processor
        at = np.flatnonzero(np.asarray(ids) == processor.image_id)
        stops = np.cumsum([image.shape.num_tokens for image in placed], dtype=np.int64)
        expected = int(stops[-1]) if placed else 0
        if at.size != expected:
            raise RenderError(
                f"{place}: the row has {at.size} placeholders and features for {expected}, of {len(placed)} pictures; "
                "expected equal numbers; use the model's own tokenizer and preprocessor_config.json"
            )
        return tuple(
            Media(
                image.picture,
                int(at[stop - image.shape.num_tokens]),
                int(at[stop - 1]) + 1,
                image.shape.grid,
                processor.is_two_way,
            )
            for image, stop in zip(placed, stops.tolist(), strict=True)
        )

    def learnable(self, ids_T: IntArray, at: IntArray, media: Sequence[Media]) -> IntArray:
        """The positions among ``at`` that are not part of an image."""
        if self.image_store is None:
            return at
        is_learnable = outside(media, ids_T.size) & ~np.isin(ids_T, self._reserved_ids)
        return at[is_learnable[at]]

    def require_plain(self, text: str, where: str) -> None:
        """Raise RenderError for a text with a word that stands for an image."""
        word = self._reserved.search(text) if self._reserved else None
        if word is not None:
            raise RenderError(
                f"{where} has {word[0]!r}, which stands for pictures or sound; expected text without it; write a "
                'picture as {"type": "image", "image": PATH}, or take the word out'
            )

    @cached_property
    def _reserved(self) -> re.Pattern[str] | None:
        if self.image_store is None:
            return None
        words = {
            *MARKS,
            *self.image_store.processor.reserved,
            self.image_store.processor.placeholder,
        }
        return re.compile("|".join(re.escape(word) for word in sorted(words, key=len)[::-1]))

    @cached_property
    def _reserved_ids(self) -> IntArray:
        """The ids of the tokens that are reserved words."""
        assert self.image_store is not None
        vocabulary = self.tokenizer.get_added_vocab()
        processor = self.image_store.processor
        ids = [vocabulary[word] for word in processor.reserved if word in vocabulary]
        return np.array([processor.image_id, *ids])


def in_batches(
    rows: Iterable[T], pictures_of: Callable[[T], Iterable[ImageRef]]
) -> Iterator[list[T]]:
    """Batches of rows to be rendered together: ``BATCH_ROWS``, or fewer that hold ``BATCH_BYTES`` of images."""
    batch: list[T] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += sum(len(ref.value) for ref in pictures_of(row) if ref.kind == "bytes")
        if len(batch) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def located(messages: Sequence[Message], place: str) -> Iterator[tuple[ImageRef, str]]:
    """The images of messages, each with its place for errors."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image":
                yield part["image"], f"{place}: messages[{index}].content[{number}]"


def within(media: Sequence[Media], start: int, stop: int) -> tuple[Media, ...]:
    """The images wholly inside [start, stop), positions counted from ``start``."""
    return tuple(
        replace(image, start=image.start - start, stop=image.stop - start)
        for image in media
        if start <= image.start and image.stop <= stop
    )


def outside(media: Sequence[Media], num_tokens: int) -> NDArray[np.bool_]:
    """Whether each token is outside all images."""
    is_outside = np.ones(num_tokens, dtype=bool)
    for image in media:
        is_outside[image.start : image.stop] = False
    return is_outside


def uncut(media: Sequence[Media], stop: int) -> int:
    """``stop``, or the start of the image that it would cut."""
    return next((image.start for image in media if image.start < stop < image.stop), stop)


def is_same_input(left: Sample, right: Sample) -> bool:
    """Whether two samples have the same ids and images."""
    left_images, right_images = (
        [(image.start, image.picture.digest) for image in sample.media] for sample in (left, right)
    )
    return left_images == right_images and np.array_equal(left.ids_T, right.ids_T)


def _strings(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
