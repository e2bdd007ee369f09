"""A rich console whose texts cannot control the terminal.

    Terminal(soft_wrap=True).print(...)      to sys.stdout, as it is when something is printed

Rich writes escape sequences of its own, for colors and for the progress bar, between texts that may come from data. So
texts are escaped here, where the two are still apart, and ``Printer`` is told not to escape them again.

In a notebook it prints plain lines, as to a file: rich would show each as an HTML output of its own, and draw bars with
ipywidgets, which may not be there (``notebook.py`` has what is replaced in place).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from taut.errors import redacted
from taut.io.console import Printer, escaped


class Terminal(Console):
    """Console of rich that escapes control characters of texts, hides secrets in URLs, and prints no links."""

    def __init__(self, **options: Any) -> None:
        plain = {"force_jupyter": False, "force_terminal": False}
        super().__init__(
            **({"highlight": False} | (plain if Console().is_jupyter else {}) | options)
        )

    def lines(self, texts: Iterable[str]) -> None:
        """Print each text as a line, without markup."""
        for text in texts:
            self.print(text, markup=False)

    @property
    def file(self) -> IO[str]:
        return cast(IO[str], Printer.on(cast(TextIO, super().file)).escaped_already)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Secrets are hidden before a text is laid out: a column may break one in two."""
        if isinstance(renderable, str):
            renderable = self.render_str(renderable, highlight=False)
        if isinstance(renderable, Text) and redacted(renderable.plain) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = redacted(renderable.plain)
        return super().render(renderable, options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(_shown(segment) for segment in buffer)


def _shown(segment: Segment) -> Segment:
    text, style, control = segment
    if control:
        return segment
    if style is not None and style.link:  # of a library's own line, next to a progress bar
        style = style.update_link(None)
    return Segment(escaped(text), style)
