"""Common parts of commands: reading rows with their pictures, writing a JSON lines file of results, printing decisions.

``RowSettings`` are the settings of every command that reads rows. Rows whose pictures cannot be read are errors, or
with images.bad=drop are left out and listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from taut.commands.settings import RowSettings
from taut.config import Decision, home_path
from taut.data.read.sources import folder_of
from taut.data.render.render import Incident, Renderer
from taut.data.rows.prompts import PromptRow, load_prompts
from taut.data.rows.schema import Columns
from taut.data.settings import Source
from taut.errors import DataError, OutputError
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.vision.settings import ImagesConfig

MAX_INCIDENTS = 3
"""Rows left out that are listed one by one."""


def source_of(data: str | Source) -> Source:
    """A path or a full source as a source."""
    return Source(path=data) if isinstance(data, str) else data


def columns_of(
    settings: RowSettings, images: ImagesConfig, source: Source, **options: Any
) -> Columns:
    """Settings for reading the rows of ``source``, whose own settings take precedence. ``options``: further fields of
    ``Columns``.
    """
    return Columns(
        settings.format if source.format is None else source.format,
        settings.columns if source.columns is None else source.columns,
        settings.ignore_keys,
        prefix="",
        folder=folder_of(source, images.folder, "images.folder"),
        images=images,
        apply_chat_template=settings.apply_chat_template,
        system=settings.system if source.system is None else source.system,
        template_variables=source.chat_template_kwargs or {},
        **options,
    )


def read_prompts(
    settings: RowSettings,
    images: ImagesConfig,
    data: str | Source,
    renderer: Renderer,
    console: Terminal | None,
    *,
    reference: str | None,
    needs_reference: bool = False,
) -> list[PromptRow]:
    """Read the prompts of a file. ``console``: receives the list of rows that are left out."""
    source = source_of(data)
    incidents: list[Incident] | None = [] if images.bad == "drop" else None
    rows = load_prompts(
        source,
        renderer,
        columns_of(settings, images, source),
        reference=reference,
        needs_reference=needs_reference,
        limit=settings.limit,
        left_out=incidents,
    )
    report_left_out(incidents, rows, console)
    return rows


def report_left_out(
    incidents: Sequence[Incident] | None, rows: Sequence[object], console: Terminal | None
) -> None:
    """List the rows that are left out; raise DataError if none remain."""
    if not incidents:
        return
    if not rows:
        raise DataError(
            f"{incidents[0].place}: {incidents[0].reason}; so all {len(incidents):,} rows are left out; expected some; "
            "correct images.folder, or the files"
        )
    lines = [f"left out: {counted(len(incidents), 'rows')} whose pictures cannot be read"]
    lines += [f"  {incident.place}: {incident.reason}" for incident in incidents[:MAX_INCIDENTS]]
    if len(incidents) > MAX_INCIDENTS:
        lines.append(f"  and {len(incidents) - MAX_INCIDENTS:,} more")
    if console is not None:
        console.lines(lines)


def print_decisions(console: Terminal | None, decisions: Sequence[Decision]) -> None:
    """Print each decision with its reason."""
    if console is not None:
        console.lines(f"{name}: {value} ({reason})" for name, value, reason in decisions)


def require_free(out: Path, data: str | Source, content: str, *, may_exist: bool, do: str) -> None:
    """Raise OutputError unless the JSONL file ``out`` may be written. ``content``: contents of the file that is read;
    ``do``: remedy if ``out`` exists.
    """
    fault = ""
    if out.is_dir():
        fault = "is a directory; expected a JSONL file; name one in it"
    elif out.exists() and out.resolve() == home_path(source_of(data).path).resolve():
        fault = f"is the file of {content}; expected another; rename out"
    elif out.exists() and not may_exist:
        fault = f"exists; expected a new file; {do}"
    if fault:
        raise OutputError(f"out={out} {fault}")


@contextmanager
def write_errors(out: Path, do: str = "") -> Iterator[None]:
    """Turn OSErrors of the block into OutputErrors of ``out``. ``do``: the remedy."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror or error}; expected room and permission{do}"
        ) from error
