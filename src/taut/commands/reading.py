"""What the commands that read rows have in common: how rows and their pictures are found, and what is said of those
that are left out.

May import what commands may. Commands that read a file of rows import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console

from taut.data.render import Incident
from taut.data.schema import Columns, Format
from taut.data.sources import Source, folder_of
from taut.errors import DataError
from taut.io.console import counted
from taut.vision.content import ImagesConfig

SHOWN = 3
"""Rows left out that are told one by one."""


class Reads(Protocol):
    """The settings of a command that reads rows."""

    @property
    def format(self) -> Format: ...
    @property
    def columns(self) -> dict[str, str]: ...
    @property
    def ignore_keys(self) -> tuple[str, ...]: ...
    @property
    def apply_chat_template(self) -> bool: ...
    @property
    def images(self) -> ImagesConfig: ...


def source_of(given: str | Source) -> Source:
    """A file or data set, by its path or in full."""
    return Source(path=given) if isinstance(given, str) else given


def columns_of(config: Reads, source: Source, **more: Any) -> Columns:
    """How rows are read. ``more``: what else ``Columns`` is to be told."""
    images = config.images
    return Columns(
        config.format,
        config.columns,
        config.ignore_keys,
        prefix="",
        folder=folder_of(source, images.folder, "images.folder"),
        fps=images.fps,
        max_frames=images.max_frames,
        images=images,
        apply_chat_template=config.apply_chat_template,
        **more,
    )


def left_out(images: ImagesConfig) -> list[Incident] | None:
    """Where rows whose pictures cannot be read are listed; None: there must be none."""
    return [] if images.bad == "drop" else None


def tell_left_out(
    incidents: Sequence[Incident] | None, rows: Sequence[object], console: Console | None
) -> None:
    """Say which rows are left out; raise DataError where that is all of them."""
    if not incidents:
        return
    if not rows:
        raise DataError(
            f"{incidents[0].place}: {incidents[0].reason}; so all {len(incidents):,} rows are left out; expected some; "
            "correct images.folder, or the files"
        )
    if console is None:
        return
    console.print(
        f"left out: {counted(len(incidents), 'rows')} whose pictures cannot be read", markup=False
    )
    for one in incidents[:SHOWN]:
        console.print(f"  {one.place}: {one.reason}", markup=False)
    if len(incidents) > SHOWN:
        console.print(f"  and {len(incidents) - SHOWN:,} more", markup=False)
