"""Output of taut in a Jupyter notebook: results as tables, and a line of progress that is replaced in place.

    def _repr_html_(self):
        return html_table("runs/a", ("check", "finding"), rows)

    line = ProgressLine.of_notebook()       None outside of a notebook
    line.show("step 3/9  loss 1.2", 3, 9)

Every text is escaped, its control characters are shown, and secrets are hidden, as on the terminal. IPython is imported
in a notebook alone, where it is. No ipywidgets: what is drawn stays in the saved notebook.
"""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from taut.errors import redacted
from taut.io.console import escaped

CUT = 400
"""Characters of a cell."""
PAUSE = 0.2
"""Seconds between two changes of a progress line; a notebook keeps every one of them until it is drawn."""
CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"


def html_text(value: object) -> str:
    """A value as text that HTML shows as it is."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    text = escaped(redacted(text))
    return html.escape(text if len(text) <= CUT else f"{text[: CUT - 1]}…")


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; ``columns`` may be empty."""
    head = "".join(f'<th style="{CELL}">{html_text(column)}</th>' for column in columns)
    cells = ([f'<td style="{CELL}">{html_text(cell)}</td>' for cell in row] for row in rows)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    title = f'<caption style="text-align:left">{html_text(caption)}</caption>'
    thead = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f"<table>{title}{thead}<tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class _Line:
    """Displayed line; frontends choose HTML or text."""

    text: str
    done: int
    total: int | None

    def _repr_html_(self) -> str:
        whole = f' max="{self.total}"' if self.total else ""
        bar = f'<progress value="{self.done}"{whole}></progress>'
        return f'{bar} <span style="font-family:monospace">{html_text(self.text)}</span>'

    def __repr__(self) -> str:
        return escaped(redacted(self.text))


class ProgressLine:
    """One line, in the output of the cell that runs. Threads may share it."""

    _of_process: ClassVar[ProgressLine | None] = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: Any = None
        self._line: _Line | None = None
        self._is_shown = True
        self._shown_at = -PAUSE

    @classmethod
    def of_notebook(cls) -> ProgressLine | None:
        """The line of this process, where rich finds a notebook."""
        if "IPython" not in sys.modules:
            return None
        from rich.console import Console

        if not Console().is_jupyter:
            return None
        cls._of_process = cls._of_process or cls()
        return cls._of_process

    def show(self, text: str, done: int, total: int | None) -> None:
        """Replace the line, at most once in PAUSE seconds."""
        with self._lock:
            self._line, self._is_shown = _Line(text, done, total), False
            if time.monotonic() - self._shown_at >= PAUSE:
                self._draw()

    def close(self) -> None:
        """Show the last line, and begin another with the next ``show``."""
        with self._lock:
            if not self._is_shown:
                self._draw()
            self._handle = None

    def _draw(self) -> None:
        from IPython.display import display

        self._is_shown, self._shown_at = True, time.monotonic()
        # the first time an output of its own, then the same one again
        if self._handle is None:
            self._handle = display(self._line, display_id=True)
        else:
            self._handle.update(self._line)
