"""When a trap closes: a condition over a recipe's settings and facts, answered yes, no or not known.

    {on = "packing"}                         truthy; ``default = true`` says what holds where it is not set
    {off = "use_cache"}                      set and false, or not set (unless ``default = true``)
    {key = "loss_type", is = "grpo"}         also ``in``, ``not_in``, ``has`` (one of these is in the list or text),
                                             ``lacks``, ``below``, ``above``; ``default`` as above
    {set = "eos_token"}   {absent = "eos_token"}   {version = "<0.22"}
    {fact = "pad_is_eos"}                    one of ``facts.FACTS``
    {all = [...]}   {any = [...]}   {not = {...}}

Not known is neither yes nor no: ``all`` is no where one is no, ``any`` yes where one is yes, whatever is not known.

Imports ``recipe.py`` and ``facts.py``. ``traps.py`` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet

from taut.migrate.facts import Answer
from taut.migrate.recipe import Recipe

Condition = Mapping[str, Any]


class Asks(Protocol):
    """Who answers facts."""

    def answer(self, name: str) -> Answer: ...


@dataclass(frozen=True)
class Verdict:
    """The answer, with what it rests on."""

    holds: bool | None
    because: tuple[str, ...] = ()
    """Settings with their places, and what facts found."""
    unknown: tuple[str, ...] = ()
    """Why it is not known."""


def decide(condition: Condition, recipe: Recipe, facts: Asks) -> Verdict:
    """Whether the condition holds of the recipe."""
    if "all" in condition:
        return _both(condition["all"], recipe, facts, False)
    if "any" in condition:
        return _both(condition["any"], recipe, facts, True)
    if "not" in condition:
        inner = decide(condition["not"], recipe, facts)
        return Verdict(
            None if inner.holds is None else not inner.holds, inner.because, inner.unknown
        )
    if "version" in condition:
        holds = is_release(recipe.version, condition["version"])
        return Verdict(holds, (f"{recipe.library} {recipe.version}",))
    if "fact" in condition:
        answer = facts.answer(condition["fact"])
        if answer.holds is None:
            return Verdict(None, unknown=(answer.says,))
        return Verdict(answer.holds, (answer.says,))
    return _setting(condition, recipe)


def is_release(version: str, wanted: str) -> bool:
    """Whether a version is one of those: ``>=0.17,<0.20``."""
    return SpecifierSet(wanted, prereleases=True).contains(version)


def _both(conditions: Sequence[Condition], recipe: Recipe, facts: Asks, decisive: bool) -> Verdict:
    """``all`` (one no decides) or ``any`` (one yes decides)."""
    verdicts = []
    for condition in conditions:
        verdict = decide(condition, recipe, facts)
        if verdict.holds is decisive:
            return verdict
        verdicts.append(verdict)
    because = tuple(dict.fromkeys(line for one in verdicts for line in one.because))
    unknown = tuple(dict.fromkeys(line for one in verdicts for line in one.unknown))
    if any(one.holds is None for one in verdicts):
        return Verdict(None, because, unknown)
    return Verdict(not decisive, because)


def _setting(condition: Condition, recipe: Recipe) -> Verdict:
    """One key, compared."""
    word = next(word for word in ("on", "off", "key", "set", "absent") if word in condition)
    key = condition[word]
    setting = recipe.settings.get(key)
    if word == "absent":
        return Verdict(setting is None, (_says(recipe, key, "not set"),))
    if setting is not None and setting.obstacle:
        return Verdict(None, unknown=(f"{setting.place}: {key} is {setting.obstacle}",))
    if word == "set":
        is_set = setting is not None and setting.value not in (None, "", [])
        return Verdict(is_set, (_says(recipe, key, "not set"),))
    default = condition.get("default")
    value = default if setting is None else setting.value
    because = (_says(recipe, key, f"not set, so {_shown(default)}"),)
    if word in ("on", "off"):
        return Verdict(bool(value) == (word == "on"), because)
    name, wanted = next((name, condition[name]) for name in COMPARISONS if name in condition)
    return Verdict(COMPARISONS[name](value, wanted), because)


def _says(recipe: Recipe, key: str, otherwise: str) -> str:
    setting = recipe.settings.get(key)
    if setting is None:
        return f"{key} is {otherwise}"
    return f"{setting.place}: {key} = {setting.obstacle or _shown(setting.value)}"


def _shown(value: Any) -> str:
    text = "false" if value is None or value is False else "true" if value is True else str(value)
    return " ".join(text.split())[:60]


def _has(value: Any, wanted: Sequence[Any]) -> bool:
    if isinstance(value, list):
        return any(one in value for one in wanted)
    return isinstance(value, str) and any(str(one) in value for one in wanted)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _below(value: Any, wanted: float) -> bool:
    number = _number(value)
    return number is not None and number < wanted


def _above(value: Any, wanted: float) -> bool:
    number = _number(value)
    return number is not None and number > wanted


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: bool(value == wanted),
    "in": lambda value, wanted: value in wanted,
    "not_in": lambda value, wanted: value not in wanted,
    "has": _has,
    "lacks": lambda value, wanted: not _has(value, wanted),
    "below": _below,
    "above": _above,
}
