"""Out of memory: report the micro-batch that does not fit; with batch.halve_when_out_of_memory halve the token budget.

    scores = fit.attempt(act, packed, trees, "step 7")      raises OutOfMemory; the attempt's memory is free again
    fit.halve(7, error)                                     True: repeat step 7 with half the tokens
    fit.begin(7)                                            set the budget of step 7; returns the new cuts

A cut is to half of the token budget or of the micro-batch that failed, whichever is less, for the rest of the run. It
changes a step's numbers by rounding only, and equal cuts give equal numbers to the last bit: each cut is an event
(``budget``), and a resumed run repeats the cuts in events.jsonl at their steps. A cut applies to the
``batch.tokens_per_microbatch`` that it was made with; another value starts without cuts.

Only an allocator's errors are caught. A process that the system kills for its memory gets no message.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pydantic
import torch

from taut.config import first_problem
from taut.data.settings import BatchConfig
from taut.errors import ConfigError, OutOfMemory, OutputError
from taut.train.distributed import Ranks
from taut.types import Packed, Tree

ALLOCATOR_ERRORS = re.compile(
    r"can't allocate memory|not enough memory|CUDA error: out of memory|bad_alloc|ALLOC_FAILED"
)
"""Messages of torch's CPU allocator and the CUDA libraries in a plain RuntimeError."""
REQUESTED = re.compile(r"tried to allocate ([\d.]+) (\w+)", re.IGNORECASE)
MAX_IDS = 8
"""Sample ids in a message."""

T = TypeVar("T")


class Halving(NamedTuple):
    """A cut of the token budget: the fields of a ``budget`` event."""

    step: int
    """The first step with this budget; the evaluations after it use it too."""
    tokens: int
    tokens_before: int
    configured: int
    """batch.tokens_per_microbatch at the time."""
    reason: str
    sample_ids: Sequence[str]
    """Samples of the micro-batch that did not fit."""


@dataclass
class Fit:
    """The current token budget, and the largest micro-batch that has fit."""

    configured: int
    """batch.tokens_per_microbatch."""
    may_halve: bool = False
    recomputes: bool = False
    """Whether layers are recomputed in the backward already."""
    tokens: int = field(init=False)
    """The current budget."""
    largest: int = field(init=False, default=0)
    """Tokens of the largest micro-batch whose forward and backward fit."""
    _ahead: list[Halving] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.configured

    def attempt(self, act: Callable[[], T], packed: Packed, trees: Sequence[Tree], where: str) -> T:
        """Run ``act`` on the micro-batch ``packed``, planned from ``trees``. Raises OutOfMemory; of the attempt only
        gradients stay allocated then. ``where``: for the message.
        """
        result = _try(act, partial(self._error, packed, trees, where))
        if torch.is_grad_enabled():  # an evaluation needs less
            self.largest = max(self.largest, packed.num_tokens)
        return result

    def halve(self, step: int, error: OutOfMemory) -> bool:
        """Halve the budget from ``step`` on; returns False where that is not allowed or does not help."""
        if not self.may_halve or error.half is None:
            return False
        self._ahead.append(
            Halving(step, error.half, self.tokens, self.configured, error.reason, error.sample_ids)
        )
        return True

    def begin(self, step: int) -> list[Halving]:
        """Set the budget of ``step``; returns the cuts that begin with it."""
        new = []
        for halving in self._ahead:
            if halving.step <= step and halving.tokens < self.tokens:
                self.tokens = halving.tokens
                new.append(halving)
        self._ahead = [halving for halving in self._ahead if halving.step > step]
        return new

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Schedule the cuts of earlier ``budget`` events, each at its step."""
        try:
            halvings = pydantic.TypeAdapter(list[Halving]).validate_python(
                [{name: event.get(name) for name in Halving._fields} for event in events]
            )
        except pydantic.ValidationError as error:
            raise OutputError(
                f"an event 'budget' in the run's events.jsonl is damaged: {first_problem(error)}; expected what the "
                "run wrote; bring the file back from a copy"
            ) from error
        mine = [halving for halving in halvings if halving.configured == self.configured]
        self._ahead = sorted(mine, key=lambda halving: (halving.step, -halving.tokens))

    def _error(
        self, packed: Packed, trees: Sequence[Tree], where: str, requested: str
    ) -> OutOfMemory:
        size, ids = packed.num_tokens, packed.sample_ids
        # No budget splits a single sample, or samples that must stay together.
        is_whole = packed.num_samples == 1 or any(
            tree.is_atom and set(ids) <= {sample.id for sample in tree.samples} for tree in trees
        )
        half = None if is_whole else min(self.tokens, size) // 2 or None
        recompute = [] if self.recomputes else ["activation_checkpointing=true"]
        if half is None:
            ways = [*recompute, f"data.max_length below {size} in a new run"]
            remedy = f"no token budget makes it smaller: set {', or '.join(ways)}"
        else:
            fits = self.largest if half <= self.largest < size else half
            ways = [f"batch.tokens_per_microbatch={fits}", *recompute]
            remedy = f"set {', or '.join(ways)}"
        reason = f"out of memory{requested} in a micro-batch of {size:,} tokens"
        more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
        known = f"; the largest that fit had {self.largest:,}" if self.largest else ""
        return OutOfMemory(
            f"{where}: {reason} (budget {self.tokens:,}{known}) of {'the sample' if len(ids) == 1 else 'samples'} "
            f"{', '.join(ids[:MAX_IDS])}{more}; expected it to fit; {remedy}",
            half=half,
            reason=reason,
            sample_ids=ids,
            num_tokens=size if torch.is_grad_enabled() else None,
        )


def build_fit(
    config: BatchConfig, ranks: Ranks, *, one_sample: str | None, recomputes: bool
) -> Fit:
    """The token budget of a run. Raises ConfigError where halving cannot work. ``one_sample``: why each micro-batch is
    one sample, if it is.
    """
    problem = ""
    if ranks.size > 1:
        problem = (
            f"{ranks.size} ranks: one that runs out of memory leaves the others in the middle of a collective; set it "
            "to false, and a smaller batch.tokens_per_microbatch"
        )
    elif one_sample is not None:
        problem = f"one sample at a time ({one_sample}): no budget makes a micro-batch smaller; set it to false"
    if config.halve_when_out_of_memory and problem:
        raise ConfigError(f"batch.halve_when_out_of_memory=true and {problem}")
    return Fit(config.tokens_per_microbatch, config.halve_when_out_of_memory, recomputes)


def require_room(act: Callable[[], T], where: str, remedy: str | Callable[[], str]) -> T:
    """Run ``act``, which is not about one micro-batch. Raises OutOfMemory, with the memory of ``act`` free again.
    ``remedy``: text, or a function that finds it once memory has run out.
    """

    def describe(requested: str) -> OutOfMemory:
        do = remedy if isinstance(remedy, str) else remedy()
        return OutOfMemory(f"{where}: out of memory{requested}; expected it to fit; {do}")

    return _try(act, describe)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error of torch, numpy or Python reports that no memory is left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATOR_ERRORS.search(str(error)) is not None


def _try(act: Callable[[], T], describe: Callable[[str], OutOfMemory]) -> T:
    """Run ``act``. Where memory runs out, free its memory and raise the error that ``describe`` makes of the requested
    amount, as text.
    """
    requested = ""
    try:
        return act()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if match := REQUESTED.search(str(error)):
            number, unit = match.groups()
            size = f"{int(number) / 1e9:,.3g} GB" if unit == "bytes" else f"{number} {unit}"
            requested = f" (wanting {size} more)"
    # Outside the handler the exception is gone, and with its traceback the frames that held the activations.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise describe(requested)
