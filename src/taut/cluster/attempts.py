"""The attempts of a launched run: which ranks there are, what they say, how they end, and whether another one follows.

    how ranks end                                           then
    all with 0                                              the run is finished
    one says ``taut: error: ...``, and no rank has died     the launch ends with its exit code: it would do so again
    the launcher has passed a signal on                     the launch ends with the ranks' exit code
    a rank is killed, its node is gone, or it ends with a   another attempt, from the newest checkpoint, while
    traceback (a device that fails), or a signal of others  there are restarts

No ranks are asked here and nothing is started: ``ray_cluster.py`` does so.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from taut.cluster.rank_process import Stream
from taut.errors import Interrupted

STATED = "taut: error: "
"""The beginning of the line with which taut ends (cli.py)."""


@dataclass
class Attempt:
    """One start of all ranks."""

    number: int
    """0: the first."""
    size: int
    """Ranks."""
    nodes: dict[int, str] = field(default_factory=dict)
    """The node of each rank that has begun."""
    codes: dict[int, int] = field(default_factory=dict)
    """The exit code of each rank that has ended; negative: it was killed by that signal."""
    error: str | None = None
    """The line with which taut ended."""

    @property
    def has_ended(self) -> bool:
        return len(self.codes) == self.size

    def hear(self, stream: Stream, line: str) -> None:
        """Look at a line that a rank printed."""
        if stream == "stderr" and line.startswith(STATED):
            self.error = self.error or line.strip()

    def failure(self, signalled: int | None) -> str | None:
        """Why another attempt has to follow; None: this one ends the launch. ``signalled``: what the launcher has
        passed on. Asked once all ranks have ended, or those that have not are given up.
        """
        killed = {rank: code for rank, code in self.codes.items() if code < 0}
        gone = sorted(set(range(self.size)) - set(self.codes))
        if killed and signalled is None:
            rank, code = min(killed.items())
            return f"rank {rank} on {self.nodes[rank]} was ended by {_signal(-code)}"
        if gone and signalled is None:
            return f"rank {gone[0]} on {self.nodes.get(gone[0], 'a node')} is gone, with its node or Ray's worker"
        if signalled is not None or self.error is not None or not any(self.codes.values()):
            return None
        rank, code = next(item for item in sorted(self.codes.items()) if item[1])
        how = "by a signal" if code == Interrupted.exit_code else f"with {code}"
        return f"rank {rank} on {self.nodes[rank]} ended {how}"

    @property
    def exit_code(self) -> int:
        """The exit code of the launch, once no attempt follows: that of the first rank that failed."""
        codes = [code for _, code in sorted(self.codes.items()) if code]
        return next((code if code > 0 else 128 - code for code in codes), 0)


def _signal(number: int) -> str:
    return signal.Signals(number).name
