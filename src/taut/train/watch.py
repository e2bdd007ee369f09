"""Ranks watch each other: a rank that dies, or calls other collectives than the rest, ends the run within seconds.

Each rank has a card in the store in which the ranks met: where it runs, what it does, and a beat. A thread renews the
card twice a second and looks for

- a failure that another rank has reported; that rank prints the reason
- a process of this machine that is gone, and a rank whose beat has stopped for ``SILENCE``
- ranks that wait for each other in different collectives, by PyTorch's record of them (its flight recorder)
- a store that is gone, with the launcher or the rank that held it

and then gives this process time to end by itself (``NOTICE``, ``GRACE``): on a CPU its collectives fail when another
rank dies; on a GPU they wait, and no Python code of theirs runs. Nothing here is a collective, so it works beside a
group that is stuck.

``meet`` waits in the store for every rank, however long one of them works for all; a collective has ``TIMEOUT``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from taut.errors import RankFailed
from taut.io.console import print_line

TIMEOUT = timedelta(minutes=10)
"""Longest wait in a collective; for a rank that works for all the others wait in the store."""
BEAT = 0.5
"""Seconds between two beats."""
SILENCE = 120.0
"""Seconds without a beat after which a rank of another machine counts as dead."""
ASTRAY = 10.0
"""Seconds after which two ranks count as stuck, one of which waits in the store and the other in a collective."""
NOTICE, GRACE = 2.0, 10.0
"""Seconds in which a process may end by itself after it has found a failure, and after another rank's report."""
LINGER = 1.0
"""Seconds that rank 0 waits, if its process holds the store, for other failing ranks to read it."""
RECORDED, RECORD_EVERY = "32", 4
"""Collectives in PyTorch's record, unless TORCH_FR_BUFFER_SIZE is set; and beats between two readings of it, which
take milliseconds.
"""
PAUSE = 0.25
"""Longest interval in seconds at which a waiting rank asks the store."""
FAILED, EXIT_CODE, REASON = "taut/failed", "taut/exit_code", "taut/reason"
"""Keys in the store: number of failed ranks; exit code and message of the first one."""
COLLECTIVE = re.compile(r"gloo|NCCL|ProcessGroup|DistBackendError|collective", re.IGNORECASE)
"""Matches the messages of collectives that fail."""


class Collective(NamedTuple):
    """The last collective that a rank began."""

    number: int
    """Its number in the order of its group."""
    what: str
    """Its operation, with dtypes and shapes where these are the same on all ranks."""


@dataclass
class Card:
    """The state of a rank, as the other ranks see it."""

    host: str
    pid: int
    doing: str
    beat: int = 0
    last: dict[str, Collective] = field(default_factory=dict)
    """Group of ranks -> its last collective."""
    awaits_all: bool = False
    """Whether the rank waits in the store (``meet``)."""

    def encoded(self) -> str:
        return json.dumps([self.host, self.pid, self.doing, self.beat, self.last, self.awaits_all])

    @classmethod
    def decoded(cls, text: bytes) -> Card:
        host, pid, doing, beat, last, awaits_all = json.loads(text)
        collectives = {group: Collective(*some) for group, some in last.items()}
        return cls(host, pid, doing, beat, collectives, awaits_all)

    def __str__(self) -> str:
        where = [f"{some.what} as its {some.number}. collective" for some in self.last.values()]
        return f"{self.doing} ({'waits for all, after' if self.awaits_all else 'last'} {', '.join(where) or 'none'})"


class Watch:
    """This rank's card, and the thread that reads the others'."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.failure: RankFailed | None = None
        """Why this rank must end; None while all is well."""
        self._store = store.clone()
        self._mine = Card(this_machine(), os.getpid(), "starting")
        self._others: dict[int, Card] = {}
        self._heard: dict[int, float] = {}
        self._apart: tuple[Any, float] | None = None
        """Collectives in which this rank and the next differ, and since when."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._post()
        self.meet("start")
        self._thread.start()

    def doing(self, what: str) -> None:
        """Note what this rank does from now on."""
        self._mine.doing = what
        self._post()

    def stop(self) -> None:
        """End the watch, so that a rank may leave."""
        self._is_over.set()
        self._thread.join()

    def meet(self, name: str) -> None:
        """Wait until every rank has called this as often as this rank. Raises RankFailed if a rank has failed."""
        key, began = f"taut/meet/{name}", time.monotonic()
        arrived = int(self._store.add(key, 1))
        turn = (arrived - 1) // self.size
        if arrived % self.size == 0:
            self._store.set(f"{key}/{turn}", "all are here")
            self._store.delete_key(f"{key}/{turn - 1}")
            return
        is_main = threading.current_thread() is threading.main_thread()
        try:
            while not self._store.check([f"{key}/{turn}"]):
                if self.failure is not None:
                    raise self.failure
                self._mine.awaits_all = is_main  # other threads have groups of their own
                time.sleep(min(PAUSE, 0.0005 + 0.1 * (time.monotonic() - began)))
        finally:
            self._mine.awaits_all = False

    def report(self, exit_code: int, line: str) -> bool:
        """Report in the store that this rank has failed. Returns whether it is the first one, which prints the line."""
        is_first = int(self._store.add(FAILED, 1)) == 1
        if is_first:
            self._store.set(REASON, line)
            self._store.set(EXIT_CODE, str(exit_code))
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            end = time.monotonic() + LINGER  # the store lives in this process
            while int(self._store.add(FAILED, 0)) < self.size and time.monotonic() < end:
                time.sleep(0.02)
        return is_first

    def wait_for_failure(self) -> RankFailed | None:
        """Wait a moment for the failure of another rank; None if there is none."""
        deadline = time.monotonic() + 2 * BEAT
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failure

    def explain(self, error: Exception) -> RankFailed | None:
        """The failure that broke a collective, if ``error`` is that of a collective; else None."""
        if isinstance(error, torch.OutOfMemoryError) or not (
            isinstance(error, dist.DistError)
            or (isinstance(error, RuntimeError) and COLLECTIVE.search(str(error)))
        ):
            return None
        if self.wait_for_failure() is None:
            cards = sorted({**self._others, self.rank: self._mine}.items())
            places = "; ".join(f"rank {rank}: {card}" for rank, card in cards)
            self.failure = RankFailed(
                f"the ranks do not do the same: a collective of rank {self.rank} has failed ({_sentence(error)}), and "
                f"every rank lives ({places}); expected the same settings, versions and data on all; see to that, "
                "then go on with resume=true"
            )
        return self.failure

    # -- in the thread

    def _look_on(self) -> None:
        while self.failure is None and not self._is_over.wait(BEAT):
            # a beat, and a look at the others
            try:
                if self._mine.beat % RECORD_EVERY == 0:
                    self._mine.last = _last_collectives()
                self._post()
                self.failure = self._reported() or self._dead() or self._astray()
            except dist.DistError as error:
                self.failure = self._dead() or RankFailed(
                    f"the store of the ranks is gone ({_sentence(error)}), with the launcher or the rank that held it; "
                    "expected both to live as long as the run; see what ended them, then go on with resume=true"
                )
        # give this process time to end by itself, then end it
        if self.failure is None or self._is_over.wait(GRACE if self.failure.is_told else NOTICE):
            return
        if not self.failure.is_told:
            try:
                is_first = self.report(self.failure.exit_code, str(self.failure))
            except dist.DistError:  # gone with its store: nobody else can tell
                is_first = True
            if is_first:
                print_line(f"taut: error: {self.failure}")
        os._exit(self.failure.exit_code)

    def _post(self) -> None:
        self._mine.beat += 1
        self._store.set(f"taut/rank/{self.rank}", self._mine.encoded())

    def _reported(self) -> RankFailed | None:
        """A failure that another rank has reported and prints."""
        if not self._store.check([EXIT_CODE]):
            return None
        line, code = self._store.get(REASON).decode(), int(self._store.get(EXIT_CODE))
        return RankFailed(line, exit_code=code, is_told=True)

    def _dead(self) -> RankFailed | None:
        """A failure if the process of a rank on this machine is gone, or the next rank has been silent for too long."""
        now, after = time.monotonic(), (self.rank + 1) % self.size
        asked = (
            [after] if self._others else [rank for rank in range(self.size) if rank != self.rank]
        )
        try:
            found = self._store.multi_get([f"taut/rank/{rank}" for rank in asked])
        except dist.DistError:
            found = []
        for rank, text in zip(asked, found, strict=False):
            card = Card.decoded(text)
            if rank not in self._others or self._others[rank].beat != card.beat:
                self._heard[rank] = now
            self._others[rank] = card
        # by the process table on this machine, by silence on others
        for rank, card in self._others.items():
            if card.host == self._mine.host and not _is_alive(card.pid):
                return self._died(rank, card, "is gone")
        if now - self._heard.get(after, now) > SILENCE:
            return self._died(after, self._others[after], f"has been silent for {SILENCE:.0f} s")
        return None

    def _died(self, rank: int, card: Card, how: str) -> RankFailed:
        host = card.host.split("/")[0]
        return RankFailed(
            f"rank {rank} (process {card.pid} on {host}) {how}; it was last seen {card}; expected it to "
            "live as long as the others; its own output tells why, or dmesg where the system killed it for its memory; "
            "then go on with resume=true"
        )

    def _astray(self) -> RankFailed | None:
        """A failure if this rank and the next are in different collectives, or one waits in the store meanwhile."""
        after, mine = (self.rank + 1) % self.size, self._mine
        other, now = self._others[after], time.monotonic()
        apart: list[Any] = []
        for group in mine.last.keys() & other.last.keys():
            here, there = mine.last[group], other.last[group]
            if here.number == there.number and here.what != there.what:
                return self._differ(after)
            if (mine.awaits_all and there.number > here.number) or (
                other.awaits_all and here.number > there.number
            ):
                apart.append((group, here, there))
        if not apart:
            self._apart = None
        elif self._apart is None or self._apart[0] != apart:
            self._apart = apart, now
        elif now - self._apart[1] > ASTRAY:
            return self._differ(after)
        return None

    def _differ(self, other: int) -> RankFailed:
        return RankFailed(
            f"the ranks do not do the same: rank {self.rank}: {self._mine}; rank {other}: {self._others[other]}; "
            "expected the same collectives in the same order; see that settings, versions and data are the same on "
            "all, then go on with resume=true"
        )


def _last_collectives() -> dict[str, Collective]:
    """The last collective of each group that this process has begun, from the records of PyTorch and NCCL."""
    found: dict[str, Collective] = {}
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # the second: in builds with NCCL
        read = getattr(torch._C._distributed_c10d, dump, None)
        for entry in () if read is None else json.loads(read()).get("entries", ()):
            what = entry["profiling_name"].rpartition(":")[2]
            if entry["is_p2p"] or what in ("send", "recv"):
                continue  # between two ranks only
            if "reduce" in what or "gather" in what:
                given = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
                what = f"{what} of {' and '.join(f'{dtype} {size}' for dtype, size in given)}"
            group, number = entry["process_group"][0], int(entry["collective_seq_id"])
            if group not in found or number > found[group].number:
                found[group] = Collective(number, what)
    return found


def _sentence(error: Exception) -> str:
    """First sentence of a library's message, in one line and without its source location."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[^\]]*\] ", "", text).split(". ")[0][:200]


def this_machine() -> str:
    """Name of the host, with ids that distinguish machines of one name and containers with their own processes."""
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.is_file():
        parts += [boot.read_text().strip(), os.readlink("/proc/self/ns/pid")]  # noqa: PTH115
    return "/".join(parts)


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended without being waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
