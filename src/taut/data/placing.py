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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from taut.data.media import MEDIA, PICTURES, SOUNDS, VIDEOS, Part, has_value, text_of
from taut.data.strict_json import read_json
from taut.errors import DataError, PictureError

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
