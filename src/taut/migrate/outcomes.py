"""What becomes of an option of another framework in taut, where its name and value alone decide: ``table/sft.toml``.

Imports ``recipe.py``. ``carry.py`` imports it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from taut.migrate.recipe import Setting

Outcome = Literal["carried", "needless", "machine", "lacking"]


class Judgement(NamedTuple):
    """What becomes of one option."""

    outcome: Outcome
    why: str
    refuses: bool = False
    """With it the run is none of taut's, and no command is offered."""


@dataclass(frozen=True)
class Lacking:
    """An entry of ``[[lacking]]``."""

    why: str
    off: tuple[Any, ...]
    """Values with which the option asks for nothing, beside those that are empty or false."""
    refuses: bool


@dataclass(frozen=True)
class Table:
    """``table/sft.toml``."""

    keys: Mapping[str, Mapping[str, str]]
    """By framework (``hf``: those that take transformers' options): option -> the key of taut that means the same."""
    defaults: Mapping[str, Mapping[str, Any]]
    """By framework: key of taut -> what the framework takes where the recipe is silent."""
    aside: Mapping[str, Judgement]
    """Options that are needless or of the machine, by name."""
    lacking: Mapping[str, Lacking]
    variables: tuple[str, ...]
    """How the names of environment variables of the machine begin."""

    numbers: frozenset[str]
    """Options that are computed with; another value is as good as none."""
    columns: Mapping[str, str]
    """ms-swift's name of a column -> taut's."""
    peft_targets: Mapping[str, tuple[str, ...]]
    """By model_type: the modules that peft adapts where none are named."""

    def keys_of(self, framework: str) -> Mapping[str, str]:
        """Options of a framework whose value means the same in taut."""
        return self.keys.get(framework, self.keys["hf"])


@cache
def load_table() -> Table:
    """Read the table. Raises ValueError where an option is in it twice."""
    text = files("taut.migrate").joinpath("table/sft.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    aside = dict[str, Judgement]()
    lacking = dict[str, Lacking]()
    kinds: tuple[Outcome, Outcome] = ("needless", "machine")
    for kind in kinds:
        for entry in content[kind]:
            for name in entry["options"]:
                _require_new(name, aside, lacking)
                aside[name] = Judgement(kind, entry["why"])
    for entry in content["lacking"]:
        for name, off in entry["options"].items():
            _require_new(name, aside, lacking)
            lacking[name] = Lacking(entry["why"], tuple(off), entry.get("refuses", False))
    variables = tuple(name for entry in content["machine"] for name in entry.get("variables", ()))
    peft_targets = {
        model_type: tuple(entry["modules"])
        for entry in content["peft_targets"]
        for model_type in entry["model_types"]
    }
    return Table(
        keys=content["keys"],
        defaults=content["defaults"],
        aside=aside,
        lacking=lacking,
        variables=variables,
        numbers=frozenset(content["numbers"]),
        columns=content["columns"],
        peft_targets=peft_targets,
    )


def _require_new(name: str, *tables: Mapping[str, Any]) -> None:
    if any(name in table for table in tables):
        raise ValueError(f"table/sft.toml names {name} twice; an option has one outcome")


def judge_option(option: Setting, known: frozenset[str]) -> Judgement:
    """The outcome of an option that ``carry.py`` does not read. ``known``: the framework's own options."""
    table, key = load_table(), option.key
    names = (key, key.partition(".")[0])
    for name in names:
        if name in table.aside:
            return table.aside[name]
    for name in names:
        if name in table.lacking:
            entry = table.lacking[name]
            if not option.obstacle and is_off(option.value, entry.off):
                return Judgement("needless", "off, or what taut does in any case")
            return Judgement("lacking", entry.why, entry.refuses)
    if key.startswith("$") and key[1:].startswith(table.variables):
        return Judgement("machine", "how processes and memory are organised")
    if key.startswith("--"):
        return Judgement("machine", "how the processes are started")
    if key.startswith("$"):
        return Judgement("lacking", "an environment variable that is not known here")
    if names[0] in known or names[1] in known:
        return Judgement("lacking", "nothing in taut is known to mean the same")
    return Judgement("lacking", "no known option of the framework")


def is_off(value: Any, off: tuple[Any, ...] = ()) -> bool:
    """Whether an option with this value asks for nothing."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value is None or value in (False, "", "none", [], {}, *off)
