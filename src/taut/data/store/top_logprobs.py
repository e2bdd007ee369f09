"""A teacher's likeliest tokens at each target of a data set, computed once, in a JSONL file (of ``taut teach``).

A line is a sample, in the order of the data set, and identifies its sample:

    {"id": "train.jsonl:17",                        for readers
     "ids": [151, 20, 7, 9],                        all tokens of the sample
     "targets": [2, 3],                             positions in ids of the predicted tokens: 7 and 9
     "top_ids": [[7, 12], [9, 4]],                  k tokens for each target, alternatives to it
     "top_logprobs": [[-0.1, -3.2], [-0.7, -0.9]],  the teacher's log-probabilities, T = 1, among all tokens
     "pictures": ["9f86d0..."]}                     SHA-256 of its images' files, if it has any

It becomes the streams ``top_ids`` and ``top_logp`` [N, k] of each sample. Nothing is matched by text: ids and targets
have to be those of the data set, or the file is refused at the first line where they differ. The file is kept in
memory, 8 bytes for a token and its log-probability.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taut.data.dataset import Dataset
from taut.data.read.json_io import read_json
from taut.errors import DataError
from taut.io import files
from taut.types import TOP_IDS, TOP_LOGP, FloatArray, IntArray, Sample

KEYS = ("ids", "targets", "top_ids", "top_logprobs")
DECIMALS = 6
"""Decimals of the log-probabilities that are written: finer than float32."""
MOST_MASS = 1.001
"""Largest sum of the probabilities of one target: rounding included, also that of 16 bits."""
REMEDY = "make the file again with taut teach, from this data, tokenizer and template"


class Top(NamedTuple):
    """A teacher's likeliest tokens at some targets."""

    ids_Nk: NDArray[np.integer[Any]]
    logp_Nk: NDArray[np.floating[Any]]


class TopLogprobs(NamedTuple):
    """The content of a file, for a whole data set."""

    every: Top
    offsets: IntArray
    """Start of each sample's targets, and one more, the end."""
    digest: str
    """The file's SHA-256."""

    @property
    def num(self) -> int:
        """Number of tokens listed for each target."""
        return int(self.every.ids_Nk.shape[1])

    def of(self, index: int) -> Top:
        """The tokens of one sample."""
        targets = slice(*self.offsets[index : index + 2])
        return Top(self.every.ids_Nk[targets], self.every.logp_Nk[targets])


class WithTeacher(Dataset):
    """A data set whose samples have a teacher's likeliest tokens as streams."""

    def __init__(self, data: Dataset, top_logprobs: TopLogprobs) -> None:
        super().__init__(data.parts, data.report.decisions, data.report.is_cached)
        self.top_logprobs = top_logprobs

    def sample(self, index: int) -> Sample:
        top = self.top_logprobs.of(range(len(self))[index])
        streams = {TOP_IDS: top.ids_Nk.astype(float), TOP_LOGP: top.logp_Nk.astype(float)}
        return replace(super().sample(index), streams=streams)


def line_of(sample: Sample, top: Top) -> str:
    """A sample and its tokens, as a line of the file."""
    record = {
        "id": sample.id,
        "ids": sample.ids_T.tolist(),
        "targets": sample.target_at_N.tolist(),
        "top_ids": top.ids_Nk.tolist(),
        "top_logprobs": np.round(top.logp_Nk.astype(float), DECIMALS).tolist(),
        **_pictures(sample),
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"


def read_top_logprobs(path: Path, data: Dataset, num_rows: int) -> TopLogprobs:
    """Read the file of a data set. Ids are below ``num_rows``. Raises DataError that names the line."""
    ids: list[NDArray[np.int32]] = []
    logps: list[NDArray[np.float32]] = []
    expected = (data[index] for index in range(len(data)))
    for number, (text, sample) in enumerate(zip_longest(_lines(path), expected), start=1):
        if text is None or sample is None:
            has = "fewer" if text is None else "more"
            raise DataError(
                f"{path} has {has} lines than the data set has samples ({len(data):,}); expected one each; {REMEDY}"
            )
        top = _top_of(text, sample, num_rows, f"{path}:{number}")
        if ids and ids[0].shape[1] != top.ids_Nk.shape[1]:
            raise DataError(
                f"{path}:{number}: has {top.ids_Nk.shape[1]} tokens a target, and line 1 has {ids[0].shape[1]}; "
                f"expected equally many; {REMEDY}"
            )
        ids.append(top.ids_Nk.astype(np.int32))
        logps.append(top.logp_Nk.astype(np.float32))
    offsets = np.cumsum([0, *map(len, ids)])
    every = Top(np.concatenate(ids), np.concatenate(logps))
    return TopLogprobs(every, offsets, files.digest(path))


def _lines(path: Path) -> Iterator[str]:
    try:
        with files.open_text(path) as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; expected a JSONL file of taut teach"
        ) from error


def _top_of(text: str, sample: Sample, num_rows: int, place: str) -> Top:
    """The arrays of the line of ``sample``."""
    try:
        record = read_json(text)
    except ValueError as error:
        raise DataError(
            f"{place}: is no JSON ({error}); expected a line of taut teach; {REMEDY}"
        ) from error
    fault = ""
    if not isinstance(record, dict) or set(record) - {"id", "pictures"} != set(KEYS):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        fault = f"has {has[:80]}; expected {', '.join(KEYS)} and, for readers, id"
    elif record.get("pictures") != _pictures(sample).get("pictures"):
        fault = f"pictures are not those of {sample.id}; expected the data set's own"
    if fault:
        raise DataError(f"{place}: {fault}; {REMEDY}")
    # The sample is the one that the teacher saw.
    expected: Sequence[tuple[str, IntArray]] = (
        ("ids", sample.ids_T),
        ("targets", sample.target_at_N),
    )
    for key, wanted in expected:
        actual = _array(record[key], "i", (wanted.size,), f"{place}: {key}")
        if (actual != wanted).any():
            at = int((actual != wanted).argmax())
            raise DataError(
                f"{place}: {key}[{at}] is {actual[at]}, and {sample.id} has {wanted[at]} there; expected the data "
                f"set's own; {REMEDY}"
            )
    ids = _array(record["top_ids"], "i", (sample.num_targets, None), f"{place}: top_ids")
    logp = _array(record["top_logprobs"], "fi", ids.shape, f"{place}: top_logprobs")
    # Its tokens are the model's, and their probabilities may be those of one distribution.
    mass: FloatArray = np.exp(logp.astype(float)).sum(axis=1)
    if ids.min() < 0 or ids.max() >= num_rows:
        beyond = ids.min() if ids.min() < 0 else ids.max()
        fault = f"top_ids has {beyond}, and the model has {num_rows:,} rows; expected its ids"
    elif not np.diff(np.sort(ids, axis=1), axis=1).all():
        fault = "top_ids has a token twice for one target; expected each once"
    elif mass.max() > MOST_MASS:
        at = int(mass.argmax())
        fault = (
            f"the probabilities of top_logprobs[{at}] sum to {mass[at]:.4g}; expected natural logarithms that sum to "
            "at most 1"
        )
    if fault:
        raise DataError(f"{place}: {fault}; {REMEDY}")
    return Top(ids, logp)


def _pictures(sample: Sample) -> dict[str, list[str]]:
    contents = [image.picture.content for image in sample.media]
    return {"pictures": contents} if contents else {}


def _array(value: Any, kinds: str, shape: tuple[int | None, ...], place: str) -> NDArray[Any]:
    """An array of this shape, in which None is any size except 0."""
    try:
        array = np.array(value)
    except ValueError:
        array = np.empty(0, dtype=object)  # ragged
    is_shaped = len(array.shape) == len(shape) and all(
        size == wanted if wanted is not None else size
        for size, wanted in zip(array.shape, shape, strict=True)
    )
    if array.dtype.kind not in kinds or not is_shaped:
        sizes = " x ".join("k" if wanted is None else str(wanted) for wanted in shape)
        raise DataError(
            f"{place} is not {sizes} {'numbers' if 'f' in kinds else 'whole numbers'} (found "
            f"{' x '.join(map(str, array.shape)) or 'one'}); expected what the data set's sample has; {REMEDY}"
        )
    return array
