"""What a tool writes: the rows that stay, those that it removed with the reason, and a report.

    out=FILE.jsonl      FILE.jsonl, FILE.jsonl.removed.jsonl, FILE.jsonl.report.json
    out=DIR/            a data set folder (data/folder.py) with train.jsonl, removed.jsonl, report.json and a card

A row that stays is its own line, byte for byte where it came from a JSONL file. A removed one is

    {"id": "a.jsonl:17", "reason": "near", "kept": "a.jsonl:3", "similarity": 0.93, "row": {...}}

Nothing is overwritten. ``out`` takes its place last, so that where it is, the others are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from taut.config import home_path
from taut.curate.rows import RowSet, Verdict
from taut.data.folder import (
    ROWS,
    Card,
    is_folder,
    require_new,
    sources_listed,
    write_card,
    writing_folder,
)
from taut.errors import DataError, OutputError
from taut.io import files
from taut.io.console import counted

REMOVED, REPORT = "removed.jsonl", "report.json"


class Places(NamedTuple):
    """Where the files are written."""

    rows: Path
    removed: Path
    report: Path
    folder: Path | None
    """The data set folder, while it is not yet in its place."""


@dataclass
class Tally:
    """What became of the rows."""

    num_kept: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """Reason -> rows."""

    @property
    def num_rows(self) -> int:
        return self.num_kept + self.removed.total()

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {"rows": self.num_rows, "kept": self.num_kept, "removed": dict(self.removed)}

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.removed.most_common())
        share = self.removed.total() / max(self.num_rows, 1)
        removed = (
            f"{self.removed.total():,} removed ({share:.2%}{': ' if reasons else ''}{reasons})"
        )
        return f"{counted(self.num_rows, 'rows')}: {self.num_kept:,} kept, {removed}"


def beside(out: str, name: str) -> Path:
    """The path of a file that goes with ``out``."""
    path = home_path(out)
    return path.with_name(f"{path.name}.{name}")


def require_writable(out: str, inputs: Iterable[Path]) -> None:
    """Raise OutputError unless the files of ``out`` can be written, none of them is there, and none is an input."""
    path = home_path(out)
    if is_folder(out):
        require_new(path)
        return
    if path.suffix != ".jsonl":
        raise OutputError(
            f"out={out}; expected FILE.jsonl, or DIR/ for a data set folder with a card; rename it"
        )
    if path.resolve() in {source.resolve() for source in inputs}:
        raise OutputError(f"out={out} is a file that is read; expected another; rename out")
    for each in (path, beside(out, REMOVED), beside(out, REPORT)):
        require_new_file(each)


def require_new_file(path: Path) -> None:
    """Raise OutputError where there is one."""
    if path.exists():
        raise OutputError(f"{path} exists; expected a new file; name another out, or remove it")


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OutputError(
            f"out={path} cannot be written: {error.strerror or error}; expected room and permission"
        ) from error


@contextmanager
def _places(out: str) -> Iterator[Places]:
    """Where the files are written; they take their places when the block ends without an exception."""
    path = home_path(out)
    with ExitStack() as stack:
        if is_folder(out):
            folder = stack.enter_context(writing_folder(path))
            yield Places(folder / ROWS, folder / REMOVED, folder / REPORT, folder)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, removed, report = (
            stack.enter_context(files.replacing(each))  # the first takes its place last
            for each in (path, beside(out, REMOVED), beside(out, REPORT))
        )
        yield Places(rows, removed, report, None)


def write(
    out: str,
    verdicts: Iterable[Verdict],
    rows: RowSet,
    describe: Callable[[Tally], Mapping[str, Any]],
    card: Callable[[Tally], Card],
) -> tuple[Tally, str]:
    """Write each row where it belongs. Returns the tally, and why ``datasets`` cannot load the folder.

    ``describe``: the rest of the report; ``card``: of a folder. Raises DataError where no row stays, and OutputError
    where the files cannot be written; then none of them is there.
    """
    tally = Tally()
    fault = ""
    try:
        with _places(out) as places:
            with places.rows.open("xb") as kept, places.removed.open("xb") as removed:
                for line, reason, details in verdicts:
                    if reason:
                        tally.removed[reason] += 1
                        head = {"id": line.place, "reason": reason, **details}
                        text = json.dumps(head, ensure_ascii=False).encode("utf-8", "surrogatepass")
                        removed.write(text[:-1] + b', "row": ' + line.text + b"}\n")
                    else:
                        tally.num_kept += 1
                        kept.write(line.text + b"\n")
            if not tally.num_kept:
                raise DataError(
                    f"no row is left of {counted(tally.num_rows, 'rows')} ({tally}); expected some; nothing is "
                    "written; loosen the settings"
                )
            report = {**describe(tally), **tally.as_dict(), "sources": rows.described()}
            write_report(places.report, report)
            if places.folder is not None:
                fault = write_card(places.folder, card(tally))
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror or error}; expected room and permission; nothing is kept"
        ) from error
    return tally, fault


def about(command: str, tally: Tally, rows: RowSet) -> str:
    """The text of a card: the command, what it removed, and the sources."""
    return "\n".join(
        [
            "Made by taut:",
            "",
            f"    {command}",
            "",
            f"{tally}. `{REMOVED}` has the removed rows, each with its reason, and `{REPORT}` the settings.",
            "",
            "## Sources",
            "",
            sources_listed(rows.described()),
        ]
    )
