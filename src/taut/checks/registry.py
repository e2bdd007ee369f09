"""Checks: one function asks one question about a run, and a finding answers it.

    @check("attention.future", after=["attention.calls"])
    def later_tokens_change_nothing_before(session: Session) -> Finding:
        "Does a later token leave everything before it as it is?"

The first line of the docstring is the question. ``after`` names the direct causes of a failure: if one of them fails,
or was itself not asked for that reason, this check is not asked, because it would report the same fault again. Indirect
causes are derived here (``in_order``).

A check answers with a Finding:

    failed    the run would be wrong: it does not start
    warning   the run is probably not what the user means: it starts, and the finding is shown first
    passed    nothing is wrong, or taut corrects it by itself (with a note)
    skipped   the question does not apply to this run, or could not be asked
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

MAX_EXAMPLES = 6
"""Maximum lines of evidence: the first are kept."""

Outcome = Literal["passed", "warning", "failed", "skipped"]
Part: TypeAlias = Literal["quick", "full"]
"""quick: asked before each training, with forwards on at most 256 tokens and one backward. full: asked on request."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    outcome: Outcome
    says: str
    """Result in one line; for a skipped check, the reason."""
    number: float | None = None
    """The measured number."""
    unit: str = ""
    """The unit of the number: "nats", "tokens", "of 128 rows"."""
    evidence: tuple[str, ...] = ()
    """For a failure or a warning: the sample, the token or the layer, one per line."""
    remedy: str = ""
    """For a failure or a warning: what to do."""
    notes: tuple[str, ...] = ()
    """Details that ask nothing of the user, one per line."""
    code: str = ""
    """The code of the error that ended the check."""

    def __post_init__(self) -> None:
        assert (self.outcome in ("failed", "warning")) == bool(self.remedy), (
            "failures and warnings, and they alone, say what to do"
        )

    def as_fields(self) -> dict[str, Any]:
        """Fields for an event and for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def passed(
    says: str, number: float | None = None, unit: str = "", notes: Iterable[str] = ()
) -> Finding:
    """Make a finding that nothing is wrong."""
    return Finding("passed", says, number, unit, notes=tuple(notes))


def _fault(
    outcome: Outcome,
    says: str,
    *,
    remedy: str,
    measured: tuple[float | Sequence[str] | None, str] = (None, ""),
    evidence: str | Iterable[str] = (),
    notes: Iterable[str] = (),
    code: str = "",
) -> Finding:
    """Make a finding with a remedy. ``measured``: a number and its unit; or what is wrong, each in a line, and of how
    many: the number of lines is the number, and the first are the evidence. ``code``: the error's.
    """
    what, unit = measured
    lines = (
        what
        if isinstance(what, Sequence)
        else [evidence]
        if isinstance(evidence, str)
        else evidence
    )
    number = len(what) if isinstance(what, Sequence) else what
    shown = tuple(islice(lines, MAX_EXAMPLES))
    return Finding(outcome, says, number, unit, shown, remedy, tuple(notes), code)


failed = partial(_fault, "failed")
"""Make a finding that the run would be wrong."""
warned = partial(_fault, "warning")
"""Make a finding that the run may start, but is probably not what the user means."""


def skipped(reason: str) -> Finding:
    """Make a finding that the question could not be asked, or has no meaning for this run."""
    return Finding("skipped", reason)


class Skip(Exception):
    """Raised in a check if the question has no meaning for this run. The message is the reason."""


def skip_if(condition: object, reason: str = "") -> None:
    """End a check as skipped, for this reason; where none is given, the condition is the reason in words."""
    if condition:
        raise Skip(reason or condition)


def split_error(error: Exception) -> tuple[str, str]:
    """Split an error into its own words (found and expected) and the remedy after the last semicolon."""
    says, _, remedy = str(error).rpartition("; ")
    return says or remedy, remedy


Ask: TypeAlias = Callable[[Any], Finding]


class Check(NamedTuple):
    """A question, and its place in the order."""

    ask: Ask
    part: Part = "quick"
    after: tuple[str, ...] = ()
    """Checks whose failure would cause this one's: as declared the direct ones, in ``CHECKS`` all of them."""
    follows: str | None = None
    """A check that is asked earlier, for the order alone: its failure has no consequence here."""

    @property
    def question(self) -> str:
        return (self.ask.__doc__ or "").partition("\n")[0]


DECLARED: dict[str, Check] = {}


def check(
    name: str, *, part: Part = "quick", after: Sequence[str] = (), follows: str | None = None
) -> Callable[[Ask], Ask]:
    """Declare a function as the check ``name``. ``after`` lists only its direct causes."""

    def declare(ask: Ask) -> Ask:
        assert name not in DECLARED, f"two checks are named {name}"

        @wraps(ask)
        def answer(session: Any) -> Finding:
            try:
                return ask(session)
            except Skip as skip:
                return skipped(str(skip))

        DECLARED[name] = Check(answer, part, tuple(after), follows)
        return answer

    return declare


def in_order(topics: Sequence[ModuleType]) -> dict[str, Check]:
    """Sort the checks of these modules in the order in which they are asked, with all possible causes in ``after``."""
    declared = [
        {name: one for name, one in DECLARED.items() if one.ask.__module__ == topic.__name__}
        for topic in topics
    ]
    return merged(declared)


def merged(topics: Sequence[Mapping[str, Check]]) -> dict[str, Check]:
    """Merge several lists of checks. Each list keeps its order. The next check is the head of the first list whose head
    can be asked, because every check in its ``after`` and ``follows`` has been asked.
    """
    waiting = [list(topic.items()) for topic in topics]
    ordered: dict[str, Check] = {}
    while any(waiting):
        for topic in filter(None, waiting):
            name, check = topic[0]
            earlier = {*check.after, check.follows} - {None}
            if earlier <= ordered.keys():
                topic.pop(0)
                break
        else:
            stuck = ", ".join(topic[0][0] for topic in waiting if topic)
            raise AssertionError(
                f"no next check: each of {stuck} comes after one that is not asked"
            )
        causes = {cause for direct in check.after for cause in (direct, *ordered[direct].after)}
        ordered[name] = check._replace(after=tuple(other for other in ordered if other in causes))
    return ordered
