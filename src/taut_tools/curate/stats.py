"""Numbers of a data set: rows, forms, turns, lengths, exact duplicates, and the longest rows with their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taut.data.rows.messages import FORM_OF, Conversation
from taut.data.rows.schema import AnyRow, best_row
from taut_tools.curate.dedup import digest
from taut_tools.curate.rows import content, normalized

LONGEST = 5
"""Number of longest rows that are listed."""
PERCENTILES = (50, 90, 99, 100)


@dataclass
class Statistics:
    """Counts of rows, added one by one."""

    forms: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """Turns and characters of each row, and with a tokenizer its tokens and targets."""
    places: list[str] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    num_duplicates: int = 0

    def add(self, place: str, row: AnyRow, **lengths: int) -> None:
        """Count a row; ``lengths`` are its tokens and targets, if known."""
        each, best = content(row), best_row(row)
        self.places.append(place)
        self.forms[FORM_OF[type(best)]] += 1
        turns = best.messages if isinstance(best, Conversation) else ()
        self.roles.update(turn["role"] for turn in turns)
        texts = (each.prompt, *each.answers)
        counts = {"turns": len(turns), "characters": sum(map(len, texts)), **lengths}
        for name, count in counts.items():
            self.lengths.setdefault(name, []).append(count)
        key = digest(each.context, each.judgment, *map(normalized, texts))
        self.num_duplicates += key in self.seen
        self.seen.add(key)

    def as_dict(self) -> dict[str, Any]:
        """The numbers as the report has them."""
        by = "tokens" if "tokens" in self.lengths else "characters"
        longest = np.argsort(-np.array(self.lengths[by]), kind="stable")[:LONGEST]
        return {
            "rows": len(self.places),
            "forms": dict(self.forms),
            "roles": dict(self.roles),
            **{name: _summary(values) for name, values in self.lengths.items()},
            "exact_duplicates": self.num_duplicates,
            "longest": [{"id": self.places[i], by: self.lengths[by][i]} for i in longest],
        }


def _summary(values: Iterable[int]) -> dict[str, Any]:
    counts = np.fromiter(values, dtype=np.int64)
    found = np.percentile(counts, PERCENTILES, method="inverted_cdf").tolist()
    names = [f"p{p}" if p < 100 else "max" for p in PERCENTILES]
    return {"total": int(counts.sum()), **dict(zip(names, map(int, found), strict=True))}


def lines_of(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the report for the terminal."""
    forms = ", ".join(f"{count:,} {form}" for form, count in report["forms"].items())
    yield f"{report['rows']:,} rows ({forms}), {report['exact_duplicates']:,} exact duplicates"
    if report["roles"]:
        yield "messages: " + ", ".join(f"{n:,} {role}" for role, n in report["roles"].items())
    yield f"{'':<11}{'total':>15}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "max"))
    for name in ("turns", "characters", "tokens", "targets"):
        if name in report:
            row = report[name]
            yield f"{name:<11}{row['total']:>15,}" + "".join(
                f"{row[p]:>10,}" for p in ("p50", "p90", "p99", "max")
            )
    yield "longest: " + ", ".join(
        f"{row['id']} ({next(v for k, v in row.items() if k != 'id'):,})"
        for row in report["longest"]
    )
