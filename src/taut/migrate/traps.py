"""The table of known traps: ``table/*.toml``, and which of them a recipe walks into.

Each trap says when it closes (``conditions.py``), in which releases, what happens and why, what to set in that
framework, how taut does it, where it is known from (classes of docs/failures.md, issue threads) and how far we saw
it: in the source of the release named, in a thread, or in a run. Severities:

    wrong   what is trained is not what the recipe says, and nothing tells
    late    it shows only later: refused or broken under way, at evaluation or when served
    slow    right, but it costs time, memory or learning

A trap carries a recipe that walks in (``walks_in``) and changes that make it clear (``clear``): tests hold both.

Imports ``conditions.py``, ``recipe.py`` and errors. ``examine.py`` imports it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from taut.migrate.conditions import Asks, Condition, decide, is_release
from taut.migrate.recipe import Recipe

TABLE = ("trl_sft", "trl_rl", "swift", "openrlhf")
Severity = Literal["wrong", "late", "slow"]
State = Literal["walks_in", "clear", "undecided"]
ORDER: tuple[Severity, ...] = ("wrong", "late", "slow")


@dataclass(frozen=True)
class Trap:
    """One known way to go wrong without being told."""

    id: str
    frameworks: tuple[str, ...]
    methods: tuple[str, ...]
    severity: Severity
    when: Condition
    what: str
    """What happens."""
    why: str
    fix: str
    """What to set in that framework."""
    taut: str
    """How taut does it."""
    classes: tuple[str | int, ...]
    """Rows of docs/failures.md: F1 to F5, 1 to 40."""
    seen: tuple[str, ...]
    """source, thread, run."""
    walks_in: dict[str, Any]
    clear: dict[str, Any]
    versions: str = ""
    """Releases of the library it is known in; empty: every one that was looked at."""
    versions_note: str = ""
    """What is not known of them."""
    threads: tuple[str, ...] = ()
    """project#number."""
    source: str = ""
    """Release and file in which it was read."""

    @property
    def affected(self) -> str:
        """The releases, for people."""
        parts = [self.versions or "all that were read", self.versions_note]
        return "; ".join(part for part in parts if part)


class Judged(NamedTuple):
    """A trap and whether the recipe walks into it."""

    trap: Trap
    state: State
    because: tuple[str, ...]
    """What the answer rests on; of an undecided one, why it is not known."""


@cache
def all_traps() -> tuple[Trap, ...]:
    """The table, in its order."""
    found = []
    for name in TABLE:
        text = files("taut.migrate").joinpath(f"table/{name}.toml").read_text(encoding="utf-8")
        found += [_trap(entry) for entry in tomllib.loads(text)["trap"]]
    return tuple(found)


def _trap(entry: dict[str, Any]) -> Trap:
    lists = ("frameworks", "methods", "classes", "seen", "threads")
    values: dict[str, Any] = {
        key: tuple(value) if key in lists else value for key, value in entry.items()
    }
    return Trap(**values)


def judge(recipe: Recipe, facts: Asks) -> list[Judged]:
    """Every trap of the recipe's framework and method; the gravest first."""
    concerned = [
        trap
        for trap in all_traps()
        if recipe.framework in trap.frameworks and recipe.method in trap.methods
    ]
    judged = [_judge(trap, recipe, facts) for trap in concerned]
    return sorted(judged, key=lambda one: ORDER.index(one.trap.severity))


def _judge(trap: Trap, recipe: Recipe, facts: Asks) -> Judged:
    if trap.versions and not is_release(recipe.version, trap.versions):
        why = f"{recipe.library} {recipe.version} is not one of {trap.versions}"
        return Judged(trap, "clear", (why,))
    verdict = decide(trap.when, recipe, facts)
    if verdict.holds is None:
        return Judged(trap, "undecided", verdict.unknown)
    return Judged(trap, "walks_in" if verdict.holds else "clear", verdict.because)
