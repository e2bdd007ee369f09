"""The table of known traps (``table/*.toml``), and the verdict on each for a recipe.

Each trap has a condition, the affected releases, the effect and its reason, the fix in that framework, taut's way, its
origin (classes of docs/failures.md, issue threads) and its evidence: the source of the release, a thread, or a run.
Severities:

    wrong   the training differs from the recipe, without any message
    late    it fails later: refused or broken during training, at evaluation or when served
    slow    correct, but it costs time, memory or learning

A trap carries a recipe that walks in (``walks_in``) and changes that make it clear (``clear``); tests check both.

Conditions compare settings and facts, with the answers yes, no and unknown:

    {on = "packing"}                         truthy; ``default = true`` is the value if it is not set
    {off = "use_cache"}                      set and false, or not set (unless ``default = true``)
    {key = "loss_type", is = "grpo"}         also ``in``, ``not_in``, ``has`` (one of these is in the list or text),
                                             ``lacks``, ``below``, ``above``; ``default`` as above
    {set = "eos_token"}   {absent = "eos_token"}   {version = "<0.22"}
    {fact = "pad_is_eos"}                    one of ``facts.FACTS``
    {all = [...]}   {any = [...]}   {not = {...}}

``all`` is no if a part is no, and ``any`` is yes if a part is yes, even if other parts are unknown.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple, Protocol

from packaging.specifiers import SpecifierSet

from taut_tools.migrate.facts import Answer
from taut_tools.migrate.recipe import Recipe

TABLE = ("trl_sft", "trl_rl", "swift", "openrlhf")
Severity = Literal["wrong", "late", "slow"]
State = Literal["walks_in", "clear", "undecided"]
Condition = Mapping[str, Any]
ORDER: tuple[Severity, ...] = ("wrong", "late", "slow")


@dataclass(frozen=True)
class Trap:
    """One known way in which a recipe goes wrong without an error."""

    id: str
    frameworks: tuple[str, ...]
    methods: tuple[str, ...]
    severity: Severity
    when: Condition
    what: str
    """Effect of the trap."""
    why: str
    fix: str
    """Setting that mends it in that framework."""
    taut: str
    """taut's way."""
    classes: tuple[str | int, ...]
    """Rows of docs/failures.md: F1 to F5, 1 to 40."""
    seen: tuple[str, ...]
    """Kinds of evidence: source, thread, run."""
    walks_in: dict[str, Any]
    clear: dict[str, Any]
    versions: str = ""
    """Affected releases of the library; empty for all that were read."""
    versions_note: str = ""
    """Open questions about the releases."""
    threads: tuple[str, ...] = ()
    """Issue threads, as project#number."""
    source: str = ""
    """Release and file in which the trap was found."""

    @property
    def affected(self) -> str:
        """Affected releases in words."""
        parts = [self.versions or "all that were read", self.versions_note]
        return "; ".join(part for part in parts if part)


class Judged(NamedTuple):
    """A trap, and the verdict on it for a recipe."""

    trap: Trap
    state: State
    because: tuple[str, ...]
    """Evidence for the verdict, or the reasons why it is undecided."""


class AnswersFacts(Protocol):
    """An object that answers facts by name, as ``Facts`` does."""

    def answer(self, name: str) -> Answer: ...


@cache
def all_traps() -> tuple[Trap, ...]:
    """Read all traps, in the order of the table."""
    lists = ("frameworks", "methods", "classes", "seen", "threads")
    traps = []
    for name in TABLE:
        text = (
            files("taut_tools.migrate").joinpath(f"table/{name}.toml").read_text(encoding="utf-8")
        )
        for entry in tomllib.loads(text)["trap"]:
            values: dict[str, Any] = {
                key: tuple(value) if key in lists else value for key, value in entry.items()
            }
            traps.append(Trap(**values))
    return tuple(traps)


def judge(recipe: Recipe, facts: AnswersFacts) -> list[Judged]:
    """Judge every trap of the recipe's framework and method; the most severe come first."""
    judged = []
    for trap in all_traps():
        if recipe.framework not in trap.frameworks or recipe.method not in trap.methods:
            continue
        if trap.versions and not is_release(recipe.version, trap.versions):
            why = f"{recipe.library} {recipe.version} is not one of {trap.versions}"
            judged.append(Judged(trap, "clear", (why,)))
            continue
        verdict = decide(trap.when, recipe, facts)
        if verdict.holds is None:
            judged.append(Judged(trap, "undecided", verdict.unknown))
        else:
            state: State = "walks_in" if verdict.holds else "clear"
            judged.append(Judged(trap, state, verdict.because))
    return sorted(judged, key=lambda verdict: ORDER.index(verdict.trap.severity))


# -- conditions


@dataclass(frozen=True)
class Verdict:
    """Whether a condition holds, with the evidence."""

    holds: bool | None
    because: tuple[str, ...] = ()
    """Settings with their places, and findings of facts."""
    unknown: tuple[str, ...] = ()
    """Reasons why it is unknown."""


def decide(condition: Condition, recipe: Recipe, facts: AnswersFacts) -> Verdict:
    """Decide whether a condition holds for a recipe."""
    # A condition on other conditions, on the release, or on a fact.
    for word, decisive in (("all", False), ("any", True)):
        if word not in condition:
            continue
        verdicts = []
        for part in condition[word]:
            verdict = decide(part, recipe, facts)
            if verdict.holds is decisive:
                return verdict
            verdicts.append(verdict)
        evidence = tuple(dict.fromkeys(line for part in verdicts for line in part.because))
        unknown = tuple(dict.fromkeys(line for part in verdicts for line in part.unknown))
        if any(part.holds is None for part in verdicts):
            return Verdict(None, evidence, unknown)
        return Verdict(not decisive, evidence)
    if "not" in condition:
        inner = decide(condition["not"], recipe, facts)
        holds = None if inner.holds is None else not inner.holds
        return Verdict(holds, inner.because, inner.unknown)
    if "version" in condition:
        is_affected = is_release(recipe.version, condition["version"])
        return Verdict(is_affected, (f"{recipe.library} {recipe.version}",))
    if "fact" in condition:
        answer = facts.answer(condition["fact"])
        if answer.holds is None:
            return Verdict(None, unknown=(answer.says,))
        return Verdict(answer.holds, (answer.says,))
    # A condition on one key.
    word = next(word for word in ("on", "off", "key", "set", "absent") if word in condition)
    key = condition[word]
    setting = recipe.settings.get(key)
    default = condition.get("default")
    if setting is None:
        is_silent = word in ("set", "absent")
        because = f"{key} is not set" + ("" if is_silent else f", so {_short(default)}")
        value = default
    else:
        because = f"{setting.place}: {key} = {setting.obstacle or _short(setting.value)}"
        value = setting.value
    if word == "absent":
        return Verdict(setting is None, (because,))
    if setting is not None and setting.obstacle:
        return Verdict(None, unknown=(f"{setting.place}: {key} is {setting.obstacle}",))
    if word == "set":
        return Verdict(setting is not None and value not in (None, "", []), (because,))
    if word in ("on", "off"):
        return Verdict(bool(value) == (word == "on"), (because,))
    name, wanted = next((name, condition[name]) for name in COMPARISONS if name in condition)
    return Verdict(COMPARISONS[name](value, wanted), (because,))


def is_release(version: str, wanted: str) -> bool:
    """Whether a version matches a specifier: ``>=0.17,<0.20``."""
    return SpecifierSet(wanted, prereleases=True).contains(version)


def _short(value: Any) -> str:
    text = "false" if value is None or value is False else "true" if value is True else str(value)
    return " ".join(text.split())[:60]


def _has(value: Any, wanted: Sequence[Any]) -> bool:
    if isinstance(value, list):
        return any(word in value for word in wanted)
    return isinstance(value, str) and any(str(word) in value for word in wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: bool(value == wanted),
    "in": lambda value, wanted: value in wanted,
    "not_in": lambda value, wanted: value not in wanted,
    "has": _has,
    "lacks": lambda value, wanted: not _has(value, wanted),
    "below": lambda value, wanted: _is_number(value) and value < wanted,
    "above": lambda value, wanted: _is_number(value) and value > wanted,
}
