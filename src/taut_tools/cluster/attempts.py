"""The attempts of a launched run: their ranks, the lines these print, how they end, and whether another one follows.

    how ranks end                                           then
    all with 0                                              the run is finished
    one says ``taut: error: ...``, and no rank has died     the launch ends with its exit code: it would do so again
    the launcher has passed a signal on                     the launch ends with the ranks' exit code
    a rank is killed, its node is gone, or it ends with a   another attempt, from the newest checkpoint, while
    traceback (a device that fails), or a signal of others  there are restarts

This file asks no rank and starts nothing: ``ray_cluster.py`` does.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from taut.errors import Interrupted
from taut_tools.cluster.rank_process import Stream

STATED = "taut: error: "
"""The beginning of the line with which taut ends (cli.py)."""


@dataclass
class Attempt:
    """One start of all ranks."""

    number: int
    """Number of attempts before this one."""
    size: int
    """Number of ranks."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Node of each rank that has begun."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code of each rank that has ended; negative for one that a signal killed."""
    error: str | None = None
    """Line ``taut: error: ...`` of the first rank that printed one."""

    @property
    def has_ended(self) -> bool:
        return len(self.codes) == self.size

    def hear(self, stream: Stream, line: str) -> None:
        """Keep the line of a rank's error, if this is one."""
        if stream == "stderr" and line.startswith(STATED):
            self.error = self.error or line.strip()

    def failure(self, signaled: int | None) -> str | None:
        """The reason for another attempt, or None where this one ends the launch. ``signaled`` is the signal that the
        launcher has passed on. It is asked once all ranks have ended or the others are given up.
        """
        killed = {rank: code for rank, code in self.codes.items() if code < 0}
        gone = sorted(set(range(self.size)) - set(self.codes))
        if killed and signaled is None:
            rank, code = min(killed.items())
            return f"rank {rank} on {self.nodes[rank]} was ended by {signal.Signals(-code).name}"
        if gone and signaled is None:
            return f"rank {gone[0]} on {self.nodes.get(gone[0], 'a node')} is gone, with its node or Ray's worker"
        if signaled is not None or self.error is not None or not any(self.codes.values()):
            return None
        rank, code = next(item for item in sorted(self.codes.items()) if item[1])
        how = "by a signal" if code == Interrupted.exit_code else f"with {code}"
        return f"rank {rank} on {self.nodes[rank]} ended {how}"

    @property
    def exit_code(self) -> int:
        """Exit code of a launch that ends with this attempt: the code of the first rank that failed."""
        codes = [code for _, code in sorted(self.codes.items()) if code]
        return next((code if code > 0 else 128 - code for code in codes), 0)
