"""The length policy, on a sample whose ids are their positions."""

from __future__ import annotations

import numpy as np
import pytest

from taut.data.render.render import Limits, fit
from taut.errors import DataError
from taut.types import Sample


def sample(length: int, target_at: list[int]) -> Sample:
    at = np.asarray(target_at, dtype=np.int64)
    return Sample("f:1", np.arange(length), at, np.ones(at.size))


def test_what_fits_stays() -> None:
    given = sample(5, [3, 4])
    assert fit(given, Limits(5), is_document=False) == ([given], None)


def test_error_names_the_row() -> None:
    with pytest.raises(DataError, match=r"^f:1: 6 tokens, max_length 5;"):
        fit(sample(6, [5]), Limits(5), is_document=False)


def test_drop() -> None:
    kept, incident = fit(sample(6, [5]), Limits(5, "drop"), is_document=False)
    assert kept == []
    assert incident is not None
    assert (incident.place, incident.kind) == ("f:1", "dropped")


def test_truncate_keeps_the_first_tokens_and_makes_up_none() -> None:
    kept, incident = fit(sample(9, [3, 4, 7, 8]), Limits(5, "truncate"), is_document=False)
    assert kept[0].ids_T.tolist() == [0, 1, 2, 3, 4]
    assert kept[0].target_at_N.tolist() == [3, 4]
    assert incident is not None
    assert incident.kind == "cut"


def test_truncate_leaves_no_sample_without_targets() -> None:
    kept, incident = fit(sample(9, [7, 8]), Limits(5, "truncate"), is_document=False)
    assert kept == []
    assert incident is not None
    assert incident.kind == "dropped"
    assert "no target left" in incident.reason


@pytest.mark.parametrize("length", range(6, 30))
@pytest.mark.parametrize("max_length", [2, 3, 5])
def test_split_learns_every_token_once(length: int, max_length: int) -> None:
    document = sample(length, list(range(1, length)))
    windows, incident = fit(document, Limits(max_length, "split"), is_document=True)
    learned = [int(part.ids_T[at]) for part in windows for at in part.target_at_N]
    assert learned == list(range(1, length))
    assert all(2 <= part.num_tokens <= max_length for part in windows)
    assert [part.id for part in windows] == [f"f:1#{i + 1}" for i in range(len(windows))]
    assert incident is not None
    assert incident.kind == "cut"


def test_split_refuses_conversations() -> None:
    with pytest.raises(DataError, match="split is for plain text"):
        fit(sample(6, [5]), Limits(5, "split"), is_document=False)


def test_min_length() -> None:
    kept, incident = fit(sample(3, [2]), Limits(5, min_length=4), is_document=False)
    assert kept == []
    assert incident is not None
    assert "min_length 4" in incident.reason


def test_without_targets() -> None:
    with pytest.raises(DataError, match=r"^f:1: the row has no targets"):
        fit(sample(3, []), Limits(5), is_document=False)
    kept, incident = fit(sample(3, []), Limits(5, without_targets="drop"), is_document=False)
    assert kept == []
    assert incident is not None
