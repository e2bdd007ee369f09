"""A micro-batch that does not fit into memory: recognised, named, and where asked for, cut in half.

    scores = fit.attempt(act, packed, trees, "step 7")      raises OutOfMemory; what the attempt held is free again
    fit.halve(7, error)                                     True: begin step 7 again, with half the tokens
    fit.begin(7)                                            the budget in force from step 7 on; what of it is new

Half is half of the token budget or of the micro-batch that failed, whichever is less; it stays in force for the rest of
the run. How a step is cut changes its numbers by rounding only, so the same run with the same cuts has the same numbers
to the last bit: each cut is an event (``budget``), and a resumed run makes the cuts it finds in events.jsonl at their
steps. A cut belongs to the ``batch.tokens_per_microbatch`` it was found with; another value begins afresh.

Only what an allocator says is caught. A process that the system kills for its memory is told nothing.

May import data.plan, parallel, types and errors. loop and what is above it import it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pydantic
import torch

from taut.config import first_problem
from taut.data.batching import BatchConfig
from taut.errors import ConfigError, OutOfMemory, OutputError
from taut.train.distributed import Ranks
from taut.types import Packed, Tree

SAID = re.compile(
    r"can't allocate memory|not enough memory|CUDA error: out of memory|bad_alloc|ALLOC_FAILED"
)
"""How torch's CPU allocator and the CUDA libraries say it where they raise a plain RuntimeError."""
ASKED = re.compile(r"tried to allocate ([\d.]+) (\w+)", re.IGNORECASE)
SHOWN = 8
"""Samples that a message names."""

T = TypeVar("T")


class Halving(NamedTuple):
    """A cut of the token budget: the fields of a ``budget`` event."""

    step: int
    """From this one on, the evaluations after it included."""
    tokens: int
    tokens_before: int
    configured: int
    """batch.tokens_per_microbatch as it was."""
    reason: str
    sample_ids: Sequence[str]
    """Of the micro-batch that did not fit."""


class Refused(NamedTuple):
    """What came of an attempt that ran out of memory."""

    wanted: str
    """How much more was asked for, for the message."""


@dataclass
class Fit:
    """The token budget in force, and what is known of what fits."""

    configured: int
    """batch.tokens_per_microbatch."""
    may_halve: bool = False
    recomputes: bool = False
    """Whether activation checkpointing is on already."""
    tokens: int = field(init=False)
    """The budget in force."""
    largest: int = field(init=False, default=0)
    """Tokens of the largest micro-batch whose forward and backward did fit."""
    _ahead: list[Halving] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.configured

    def attempt(self, act: Callable[[], T], packed: Packed, trees: Sequence[Tree], where: str) -> T:
        """What ``act`` gives. Raises OutOfMemory, with nothing of the attempt kept alive but gradients.

        ``packed``: what it computes; ``trees``: those it was planned from; ``where``: for the message.
        """
        given = _try(act)
        if isinstance(given, Refused):
            raise self._error(packed, trees, where, given)
        if torch.is_grad_enabled():  # an evaluation needs less
            self.largest = max(self.largest, packed.num_tokens)
        return given

    def halve(self, step: int, error: OutOfMemory) -> bool:
        """Cut the budget from ``step`` on, where that is allowed and of use."""
        if not self.may_halve or error.half is None:
            return False
        self._ahead.append(
            Halving(step, error.half, self.tokens, self.configured, error.reason, error.sample_ids)
        )
        return True

    def begin(self, step: int) -> list[Halving]:
        """Put the budget of ``step`` into force; the cuts that are new with it."""
        new = []
        for halving in self._ahead:
            if halving.step <= step and halving.tokens < self.tokens:
                self.tokens = halving.tokens
                new.append(halving)
        self._ahead = [halving for halving in self._ahead if halving.step > step]
        return new

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Make the cuts again that the run has made before, each at its step."""
        try:
            found = pydantic.TypeAdapter(list[Halving]).validate_python(
                [{name: event.get(name) for name in Halving._fields} for event in events]
            )
        except pydantic.ValidationError as error:
            raise OutputError(
                f"an event 'budget' in the run's events.jsonl is damaged: {first_problem(error)}; expected what the "
                "run wrote; bring the file back from a copy"
            ) from error
        mine = [halving for halving in found if halving.configured == self.configured]
        self._ahead = sorted(mine, key=lambda halving: (halving.step, -halving.tokens))

    def _error(
        self, packed: Packed, trees: Sequence[Tree], where: str, refused: Refused
    ) -> OutOfMemory:
        size = packed.num_tokens
        half = None if _is_whole(packed, trees) else min(self.tokens, size) // 2 or None
        reason = f"out of memory{refused.wanted} in a micro-batch of {size:,} tokens"
        ids = packed.sample_ids
        named = (
            f"{', '.join(ids[:SHOWN])}{f' and {len(ids) - SHOWN} more' if len(ids) > SHOWN else ''}"
        )
        known = f"; the largest that fit had {self.largest:,}" if self.largest else ""
        return OutOfMemory(
            f"{where}: {reason} (budget {self.tokens:,}{known}) of {'the sample' if len(ids) == 1 else 'samples'} "
            f"{named}; expected it to fit; {self._remedy(size, half)}",
            half=half,
            reason=reason,
            sample_ids=ids,
        )

    def _remedy(self, size: int, half: int | None) -> str:
        recompute = [] if self.recomputes else ["activation_checkpointing=true"]
        if half is None:
            ways = [*recompute, f"data.max_length below {size} in a new run"]
            return f"no token budget makes it smaller: set {', or '.join(ways)}"
        fits = self.largest if half <= self.largest < size else half
        return f"set {', or '.join([f'batch.tokens_per_microbatch={fits}', *recompute])}"


def build_fit(
    config: BatchConfig, ranks: Ranks, *, one_sample: str | None, recomputes: bool
) -> Fit:
    """The budget of a run. Raises ConfigError where halving could not be honoured.

    ``one_sample``: why nothing is packed, if nothing is.
    """
    if config.halve_when_out_of_memory and ranks.size > 1:
        raise ConfigError(
            f"batch.halve_when_out_of_memory=true and {ranks.size} ranks: one that runs out of memory leaves the "
            "others in the middle of a collective; expected one rank; set it to false, and a smaller "
            "batch.tokens_per_microbatch where memory runs out"
        )
    if config.halve_when_out_of_memory and one_sample is not None:
        raise ConfigError(
            f"batch.halve_when_out_of_memory=true and one sample at a time ({one_sample}): no budget makes a "
            "micro-batch smaller; set it to false"
        )
    return Fit(config.tokens_per_microbatch, config.halve_when_out_of_memory, recomputes)


def require_room(act: Callable[[], T], where: str, remedy: str) -> T:
    """What ``act``, which is no micro-batch, gives. Raises OutOfMemory with nothing of it kept alive."""
    given = _try(act)
    if isinstance(given, Refused):
        raise OutOfMemory(f"{where}: out of memory{given.wanted}; expected it to fit; {remedy}")
    return given


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how torch, numpy or Python say that there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and SAID.search(str(error)) is not None


def _try(act: Callable[[], T]) -> T | Refused:
    """What ``act`` gives; where memory ran out, all that it held let go of."""
    try:
        return act()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        wanted = _wanted(str(error))
    # Out here the exception is gone, and with its traceback the frames that held the activations.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Refused(wanted)


def _wanted(text: str) -> str:
    """How much more memory was asked for, where the allocator tells."""
    found = ASKED.search(text)
    if found is None:
        return ""
    number, unit = found.groups()
    size = f"{int(number) / 1e9:,.3g} GB" if unit == "bytes" else f"{number} {unit}"
    return f" (wanting {size} more)"


def _is_whole(packed: Packed, trees: Sequence[Tree]) -> bool:
    """Whether no budget divides a micro-batch: it is one sample, or samples that belong together."""
    if packed.num_samples == 1:
        return True
    ids = set(packed.sample_ids)
    return any(tree.is_atom and ids <= {sample.id for sample in tree.samples} for tree in trees)
