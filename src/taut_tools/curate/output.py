"""Write the result of a tool: the kept rows, the removed rows with the reason, and a report.

    out=FILE.jsonl      FILE.jsonl, FILE.jsonl.removed.jsonl, FILE.jsonl.report.json
    out=DIR/            a data set folder (data/read/folder.py) with train.jsonl, removed.jsonl, report.json and a card

A kept row is its own line, byte for byte if it came from a JSONL file. A removed row is

    {"id": "a.jsonl:17", "reason": "near", "kept": "a.jsonl:3", "similarity": 0.93, "row": {...}}

Nothing is overwritten. ``out`` takes its final name last: where it exists, the other files do.
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
from taut.data.read.folder import (
    ROWS,
    Card,
    beside,
    is_folder,
    require_new,
    sources_listed,
    write_card,
    writing_folder,
)
from taut.errors import DataError, OutputError
from taut.io import files
from taut.io.console import counted
from taut_tools.curate.rows import RowSet, Verdict

REMOVED, REPORT = "removed.jsonl", "report.json"


class Places(NamedTuple):
    """Temporary paths of the files."""

    rows: Path
    removed: Path
    report: Path
    folder: Path | None
    """The data set folder under its temporary name, or None for out=FILE.jsonl."""


@dataclass
class Tally:
    """Numbers of kept and removed rows."""

    num_kept: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """Removed rows by reason."""

    @property
    def num_rows(self) -> int:
        return self.num_kept + self.removed.total()

    def as_dict(self) -> dict[str, Any]:
        """The numbers as the report has them."""
        return {"rows": self.num_rows, "kept": self.num_kept, "removed": dict(self.removed)}

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.removed.most_common())
        share = self.removed.total() / max(self.num_rows, 1)
        removed = (
            f"{self.removed.total():,} removed ({share:.2%}{': ' if reasons else ''}{reasons})"
        )
        return f"{counted(self.num_rows, 'rows')}: {self.num_kept:,} kept, {removed}"


def require_writable(out: str, inputs: Iterable[Path]) -> None:
    """Raise OutputError unless the files of ``out`` can be written, do not exist, and are no inputs."""
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
    """Raise OutputError where a file exists."""
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
    """Open the temporary paths; the files take their names when the block ends without an exception."""
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
    """Write kept and removed rows, a report with the fields of ``describe``, and the card of a folder. Returns the
    tally, and the reason why ``datasets`` cannot load the folder, if any. Raises DataError where no row is kept, and
    OutputError where the files cannot be written; neither leaves files.
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
