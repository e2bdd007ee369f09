"""The pictures and videos in the columns of a row, put where its messages have a place for them.

A place is a part ``{"type": "image"}`` without a picture (TRL), or ``<image>`` in a text (llava, LLaMA-Factory,
ms-swift); ``video`` likewise. The columns ``images``, ``image`` or ``image_url`` (``videos``, ``video``) fill them in
order, unless a part says which of the column's it is (``index``), and there must be as many as places. Where messages
have no place at all, the pictures stand before the first question (TRL); conversations of from and value have places or
are refused, since llava's always have. Of a text with marks nothing changes but that they are taken out, with the one
newline that sets off those it begins or ends with: ``<image>\\nWhat is this?`` is a picture and ``What is this?``.

A row without such a column is left as it is, ``<image>`` in its texts included. Values are not looked at
(``media.py``). Imported by ``columns.py`` and ``judged.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from taut.data.json_io import read_json
from taut.data.messages import (
    MEDIA,
    PICTURES,
    SOUNDS,
    VIDEOS,
    Message,
    Part,
    Tool,
    has_value,
    text_of,
)
from taut.errors import DataError, PictureError, RenderError
from taut.types import IntArray, Media, Picture, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.content import ImageRef
    from taut.vision.image_store import Album
    from taut.vision.placeholders import Shape

MARKS = {"<image>": "image", "<video>": "video"}
_MARK = "|".join(MARKS)
_LEADING = re.compile(rf"(?:(?:{_MARK})\n?)*")
_TRAILING = re.compile(rf"(?:\n?(?:{_MARK}))*\Z")


def usable(
    named: dict[str, Any], place: str, ignored: Collection[str], prefix: str
) -> dict[str, Any]:
    """The row without the columns of pictures that are to be left out. Sound is refused."""
    kept = {name: it for name, it in named.items() if name not in MEDIA or name not in ignored}
    for name in SOUNDS:
        if kept.get(name):
            raise DataError(
                f"{place}: the row has {name}; expected text and pictures: sound is not supported; remove it, or name "
                f"the column in {prefix}ignore_keys"
            )
    return kept


def refuse_beside_text(named: Mapping[str, Any], place: str, prefix: str) -> None:
    """A text without a chat template says nowhere where its pictures are."""
    for name in (*PICTURES, *VIDEOS):
        if named.get(name):
            raise DataError(
                f"{place}: the row has {name}; expected text only where there are no messages; give the prompt as "
                f"messages, or name the column in {prefix}ignore_keys"
            )


def placed(
    turns: object, named: Mapping[str, Any], place: str, *, needs_marks: bool = False
) -> object:
    """Messages with what the row's columns have for them. What is no message is left to be refused."""
    columns = {"image": _column(named, PICTURES, place), "video": _column(named, VIDEOS, place)}
    if not any(columns.values()) or not isinstance(turns, list):
        return turns
    turns = [_with_places(turn) for turn in turns]
    places = [part for turn in turns for part in _parts(turn) if _is_place(part)]
    if not places and not needs_marks and not any(map(_has_media, turns)):
        parts = [{"type": kind} for kind, found in columns.items() if found for _ in found[1]]
        turns = _before_first_question(turns, parts)
        places = [part for turn in turns for part in _parts(turn) if _is_place(part)]
    supply = {
        kind: iter(_in_order([it for it in places if it["type"] == kind], found, kind, place))
        for kind, found in columns.items()
    }
    return [_filled(turn, supply) for turn in turns]


def unmarked(text: str) -> str:
    """A text without the marks of pictures."""
    return text_of([part for part in _split(text) if part["type"] == "text"])


def _column(
    named: Mapping[str, Any], names: Sequence[str], place: str
) -> tuple[str, list[Any]] | None:
    """The name and the values of the column that is there; None: there is none."""
    found = {name: _listed(named[name], name, place) for name in names if name in named}
    used = [name for name, values in found.items() if values]
    if len(used) > 1:
        raise DataError(
            f"{place}: the row has {' and '.join(used)}; expected one of them; name the other in data.ignore_keys"
        )
    return next(((name, found[name]) for name in (*used, *found)), None)


def _listed(value: Any, name: str, place: str) -> list[Any]:
    """One or several; several as JSON where a CSV file has them. A list in ``video`` is the frames of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = read_json(value)
        except ValueError as error:
            raise DataError(
                f"{place}: {name} begins with [ but is not JSON ({error}); expected a path, or a list as JSON"
            ) from None
    if isinstance(value, list | tuple) and not (value and name == "video"):
        return list(value)
    return [] if value is None or value in ("", {}) else [value]


def _split(text: str) -> list[Part]:
    """The parts of a text with marks."""
    leading, rest = _cut(_LEADING.match(text), text)
    trailing, middle = _cut(_TRAILING.search(rest), rest)
    pieces = [*re.findall(_MARK, leading), *re.split(f"({_MARK})", middle)]
    return [
        {"type": MARKS[piece]} if piece in MARKS else {"type": "text", "text": piece}
        for piece in (*pieces, *re.findall(_MARK, trailing))
        if piece
    ]


def _cut(found: re.Match[str] | None, text: str) -> tuple[str, str]:
    """What was found, and the text without it."""
    assert found is not None, "the patterns match the empty text"
    return found.group(), text[: found.start()] + text[found.end() :]


def _parts(turn: Any) -> list[Any]:
    content = turn.get("content") if isinstance(turn, dict) else None
    return content if isinstance(content, list) else []


def _is_place(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in MARKS.values() and not has_value(part)


def _has_media(turn: Any) -> bool:
    """Whether a part of it says itself what its picture is."""
    return any(isinstance(part, dict) and part.get("type") in MEDIA for part in _parts(turn))


def _with_places(turn: Any) -> Any:
    """The turn with a part for each mark in its texts."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if isinstance(content, str):
        content = [content] if re.search(_MARK, content) else None
    if not isinstance(content, list):
        return turn
    parts: list[Any] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else part
        parts += _split(text) if isinstance(text, str) and re.search(_MARK, text) else [part]
    return {**turn, "content": parts}


def _before_first_question(turns: list[Any], parts: Sequence[Part]) -> list[Any]:
    """Where that is a text; else there remains no place."""
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role") == "user":
            said = turn.get("content")
            whole = [*parts, {"type": "text", "text": said}]
            changed = {**turn, "content": whole} if isinstance(said, str) else turn
            return [*turns[:index], changed, *turns[index + 1 :]]
    return turns


def _in_order(
    places: Sequence[Part], found: tuple[str, list[Any]] | None, kind: str, place: str
) -> list[Any]:
    """What comes into each place."""
    name, values = found or (f"{kind}s", [])
    wanted = [
        part["index"] if isinstance(part.get("index"), int) else number
        for number, part in enumerate(places)
    ]
    if sorted(set(wanted)) != list(range(len(values))):
        num = len(set(wanted))
        num = max(wanted) + 1 if num == len(values) else num
        raise DataError(
            f"{place}: {name} has {len(values)} and the messages have {num} places for them; expected as many: a "
            f'<{kind}>, or a part {{"type": "{kind}"}} without a value, for each; correct the row'
        )
    for index, value in enumerate(values):
        if value is None or value == {}:
            raise PictureError(
                f"{place}: {name}[{index}] is null; expected what is in its place; remove the row or fill it in"
            )
    return [values[index] for index in wanted]


def _filled(turn: Any, supply: Mapping[str, Iterator[Any]]) -> Any:
    if not any(_is_place(part) for part in _parts(turn)):
        return turn
    parts = [
        {**part, part["type"]: next(supply[part["type"]])} if _is_place(part) else part
        for part in _parts(turn)
    ]
    return {**turn, "content": parts}


# --------------------------------------------------------------------------------------------------
# Pictures in messages: looked at, written in words, and found again among the ids.
#
# A chat template writes one placeholder for each picture. It is replaced, before anything is tokenised, by the words
# that stand for a picture of that size (``vision/processor.py``), and the tokens that features take the place of are
# dealt out to the pictures in their order:
#
#     placeholders written = pictures of the messages        tokens found = sum of what the pictures have
#
# Both are required exactly, so features and tokens cannot slip against each other. No text may contain a word that
# stands for pictures, and no such token is learned: a model does not write pictures.
#
# How a picture is turned into tokens may depend on how many its row has: a prefix of a row counts those of the whole.
# Reads no file: the album does. Imported by the rest of ``taut.data``.

T = TypeVar("T")
BATCH_ROWS, BATCH_BYTES = 256, 2**28
"""Rows at a time, and bytes of pictures that are with them: frames of videos are large."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture of a text: where its features come from, and what stands for it."""

    picture: Picture
    shape: Shape


class Pictures:
    """Pictures on their way through a tokenizer; without an album there must be none."""

    def __init__(self, album: Album | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self.album = album
        self.tokenizer = tokenizer

    def look(self, rows: Iterable[tuple[str, Sequence[Message]]]) -> None:
        """Have the album see the pictures of these messages, several at a time: then ``place`` waits for none."""
        album = self.album
        if album is None:
            return
        first: dict[ImageRef, str] = {}
        for place, messages in rows:
            for ref, where in located(messages, place):
                first.setdefault(ref, where)

        def see(ref: ImageRef) -> None:
            with suppress(PictureError):  # told where the picture is placed
                album.see(ref, first[ref])

        if first:
            with ThreadPoolExecutor(album.images.workers) as pool:
                list(pool.map(see, first))

    def place(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: str
    ) -> tuple[Placed, ...]:
        """The pictures of a whole row. Raises PictureError for one that cannot be had, and RenderError for text that
        would be taken for one.
        """
        self._require_none_written(messages, tools, place)
        return self.place_each(messages, place)

    def place_each(self, messages: Sequence[Message], place: str) -> tuple[Placed, ...]:
        """The same, whatever the text."""
        found = list(located(messages, place))
        if found and self.album is None:
            raise RenderError(
                f"{found[0][1]} is a picture, and the model takes no pictures; expected text; take it out, or name a "
                "vision-language model"
            )
        return tuple(self._placed(ref, where, len(found)) for ref, where in found)

    def _placed(self, ref: ImageRef, where: str, num_pictures: int) -> Placed:
        assert self.album is not None
        seen = self.album.see(ref, where)
        try:
            shape = self.album.shape(seen, num_pictures)
        except DataError as error:
            raise PictureError(f"{where}: {error}") from None
        return Placed(self.album.picture(seen.source, seen.digest, num_pictures, where), shape)

    def write(self, text: str, placed: Sequence[Placed], place: str) -> str:
        """A template's text with what stands for each picture in the place of its placeholder."""
        if self.album is None:
            return text
        placeholder = self.album.processor.placeholder
        before, *rest = text.split(placeholder)
        if len(rest) != len(placed):
            raise RenderError(
                f"{place}: the chat template writes {len(rest)} placeholders ({placeholder}) for {len(placed)} "
                "pictures; expected one for each; give a template that writes it where a part is of type image, and "
                "nowhere else"
            )
        pairs = zip(placed, rest, strict=True)
        return before + "".join(one.shape.text + after for one, after in pairs)

    def find(
        self, ids: IntArray | Sequence[int], placed: Sequence[Placed], place: str
    ) -> tuple[Media, ...]:
        """Where the pictures of a text lie among its ids."""
        if self.album is None:
            return ()
        processor = self.album.processor
        at = np.flatnonzero(np.asarray(ids) == processor.image_id)
        stops = np.cumsum([one.shape.num_tokens for one in placed], dtype=np.int64)
        expected = int(stops[-1]) if placed else 0
        if at.size != expected:
            raise RenderError(
                f"{place}: the row has {at.size} placeholders and features for {expected}, of {len(placed)} pictures; "
                "expected equal numbers; use the tokenizer and the preprocessor_config.json that the model came with"
            )
        return tuple(
            Media(
                one.picture,
                int(at[stop - one.shape.num_tokens]),
                int(at[stop - 1]) + 1,
                one.shape.grid,
                processor.is_two_way,
            )
            for one, stop in zip(placed, stops.tolist(), strict=True)
        )

    def learnable(self, ids_T: IntArray, at: IntArray, media: Sequence[Media]) -> IntArray:
        """The positions among ``at`` that are no part of a picture."""
        if self.album is None:
            return at
        is_outside = ~np.isin(ids_T, self._ids)
        for one in media:
            is_outside[one.start : one.stop] = False
        return at[is_outside[at]]

    def require_plain(self, text: str, where: str) -> None:
        """That no word in a text stands for a picture."""
        found = self._reserved.search(text) if self._reserved else None
        if found is not None:
            raise RenderError(
                f"{where} has {found[0]!r}, which stands for pictures or sound in this model's prompts; expected text "
                'without it; write a picture as {"type": "image", "image": PATH}, or take the word out'
            )

    def _require_none_written(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: str
    ) -> None:
        if self._reserved is None:
            return
        for index, message in enumerate(messages):
            for key, value in message.items():
                where = f"{place}: messages[{index}].{key}"
                texts = [text_of(value or "")] if key == "content" else _strings(value)
                for text in texts:
                    self.require_plain(text, where)
        for text in _strings(tools):
            self.require_plain(text, f"{place}: tools")

    @cached_property
    def _reserved(self) -> re.Pattern[str] | None:
        if self.album is None:
            return None
        words = {*MARKS, *self.album.processor.reserved, self.album.processor.placeholder}
        return re.compile("|".join(re.escape(word) for word in sorted(words, key=len)[::-1]))

    @cached_property
    def _ids(self) -> IntArray:
        """The tokens that are such a word."""
        assert self.album is not None
        known = self.tokenizer.get_added_vocab()
        processor = self.album.processor
        own = [known[word] for word in processor.reserved if word in known]
        return np.array([processor.image_id, *own])


def in_batches(
    rows: Iterable[T], pictures_of: Callable[[T], Iterable[ImageRef]]
) -> Iterator[list[T]]:
    """Rows to be rendered together: many, or as many as hold ``BATCH_BYTES`` of pictures with them."""
    batch: list[T] = []
    held = 0
    for row in rows:
        batch.append(row)
        held += sum(len(it.value) for it in pictures_of(row) if it.kind == "bytes")
        if len(batch) == BATCH_ROWS or held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def located(messages: Sequence[Message], place: str) -> Iterator[tuple[ImageRef, str]]:
    """The pictures of messages, each with the place that errors call it by."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image":
                yield part["image"], f"{place}: messages[{index}].content[{number}]"


def within(media: Sequence[Media], start: int, stop: int) -> tuple[Media, ...]:
    """The pictures that lie wholly in [start, stop), as they lie in it."""
    return tuple(
        replace(one, start=one.start - start, stop=one.stop - start)
        for one in media
        if start <= one.start and one.stop <= stop
    )


def uncut(media: Sequence[Media], stop: int) -> int:
    """``stop``, or where the picture begins that it would cut."""
    return next((one.start for one in media if one.start < stop < one.stop), stop)


def is_same_input(left: Sample, right: Sample) -> bool:
    """Whether a model is given the same: ids and pictures."""
    pictures = [[(it.start, it.picture.digest) for it in one.media] for one in (left, right)]
    return pictures[0] == pictures[1] and np.array_equal(left.ids_T, right.ids_T)


def _strings(value: object) -> Iterator[str]:
    """Every text in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
