"""Pictures of samples as flat arrays of a cache entry, and back.

    media.offsets     int64 [S+1]    where each sample's pictures begin
    media.at          int32 [M, 2]   first placeholder, and after the last, inside the sample
    media.grid        int32 [M, 3]   zeros: numbered as text
    media.picture     int32 [M]      which of the pictures below
    picture.content   uint8 [P, 32]  SHA-256 of what was encoded
    picture.company   int32 [P]      how many pictures the row has that it is in
    picture.offsets   int64 [P+1]    where each source begins
    picture.source    uint8          the sources, UTF-8, one after another
    picture.stamp     int64 [P, 2]   size of each source, and when it was last written; -1: it is not there
    film.offsets, film.source, film.stamp   the same of the videos that pictures are frames of

Here M counts places and P pictures: the same picture in many samples is kept once. An entry without pictures has none
of these. Imported by ``tokenise.py`` and ``prompt_set.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from taut.types import Media

if TYPE_CHECKING:
    from taut.vision.album import Album


def media_arrays(
    media_S: Iterable[tuple[Media, ...]], films: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """The arrays of samples with these pictures; none where no sample has one. ``films``: the files of videos."""
    counts, places = [], []
    table: dict[tuple[str, str, int], int] = {}
    for media in media_S:
        counts.append(len(media))
        for one in media:
            its = one.picture
            number = table.setdefault((its.source, its.content, its.num_pictures), len(table))
            places.append((one.start, one.stop, *(one.grid or (0, 0, 0)), number))
    if not places:
        return {}
    placed = np.array(places, dtype=np.int32)
    return {
        "media.offsets": np.cumsum([0, *counts]),
        "media.at": placed[:, :2],
        "media.grid": placed[:, 2:5],
        "media.picture": placed[:, 5],
        "picture.content": np.array([list(bytes.fromhex(content)) for _, content, _ in table], np.uint8),
        "picture.company": np.array([company for _, _, company in table], dtype=np.int32),
        **_files("picture", [source for source, _, _ in table]),
        **_files("film", films),
    }  # fmt: skip


def _files(kind: str, paths: Sequence[str]) -> dict[str, NDArray[Any]]:
    if not paths:
        return {}
    encoded = [path.encode(errors="surrogateescape") for path in paths]
    return {
        f"{kind}.offsets": np.cumsum([0, *map(len, encoded)]),
        f"{kind}.source": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        f"{kind}.stamp": np.array([_stamp(path) for path in paths], dtype=np.int64),
    }


def changed_source(arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """The first picture's or video's file that is not as it was when the arrays were made, by size and time; None: all
    are.
    """
    for kind in ("film", "picture"):
        stamps = arrays.get(f"{kind}.stamp", np.empty((0, 2)))
        for source, stamp in zip(_sources(arrays, kind), stamps.tolist(), strict=True):
            if _stamp(source) != tuple(stamp):
                return source
    return None


def _sources(arrays: Mapping[str, NDArray[Any]], kind: str) -> Iterator[str]:
    if f"{kind}.source" not in arrays:
        return
    every, offsets = arrays[f"{kind}.source"].tobytes(), arrays[f"{kind}.offsets"].tolist()
    for begin, end in pairwise(offsets):
        yield every[begin:end].decode(errors="surrogateescape")


def _stamp(source: str) -> tuple[int, int]:
    try:
        found = Path(source).stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def media_at(
    arrays: Mapping[str, NDArray[Any]], index: int, name: str, album: Album | None
) -> tuple[Media, ...]:
    """The pictures of the sample ``index``, which errors call ``name``."""
    if "media.offsets" not in arrays:
        return ()
    assert album is not None, "data with pictures were read with an album"
    first, last = arrays["media.offsets"][index : index + 2]
    found = []
    for place in range(first, last):
        number = int(arrays["media.picture"][place])
        begin, end = arrays["picture.offsets"][number : number + 2]
        picture = album.picture(
            arrays["picture.source"][begin:end].tobytes().decode(),
            arrays["picture.content"][number].tobytes().hex(),
            int(arrays["picture.company"][number]),
            name,
        )
        start, stop = arrays["media.at"][place].tolist()
        t, h, w = arrays["media.grid"][place].tolist()
        two_way = album.processor.is_two_way
        found.append(Media(picture, start, stop, (t, h, w) if t else None, two_way))
    return tuple(found)
