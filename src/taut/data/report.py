"""What came of a data set's rows, for people and for a run's log. ``dataset.py`` and ``prompt_set.py`` fill it in."""

from __future__ import annotations

from dataclasses import dataclass

from taut.data.length import Incident
from taut.printing import counted


@dataclass(frozen=True)
class DataReport:
    """What came of the rows."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_targets: int
    dropped: tuple[Incident, ...]
    cut: tuple[Incident, ...]
    is_cached: bool
    """True where every source came from the cache."""
    decisions: tuple[str, ...]
    """Where each source came from, and why."""
    num_pictures: int = 0
    """Of each source; the same picture in many samples is one."""

    @property
    def sizes(self) -> str:
        sizes = (
            ("rows", self.num_rows),
            ("samples", self.num_samples),
            ("tokens", self.num_tokens),
            ("targets", self.num_targets),
        )
        return ", ".join(counted(number, nouns) for nouns, number in sizes) + self.pictures

    @property
    def pictures(self) -> str:
        """How many, where there are any."""
        return f", {counted(self.num_pictures, 'pictures')}" if self.num_pictures else ""

    def __str__(self) -> str:
        text = self.sizes
        for name, incidents in (("dropped", self.dropped), ("cut", self.cut)):
            if incidents:
                first = incidents[0]
                text += f", {len(incidents):,} {name} (first {first.place}: {first.reason})"
        return text + (", from the cache" if self.is_cached else "")
