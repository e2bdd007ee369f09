"""Every trap of the table: the recipe it carries walks in, its twin does not; and the entries are whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from taut_tools.migrate.dialects import ALIASES, DIALECTS, options
from taut_tools.migrate.facts import FACTS, Answer
from taut_tools.migrate.recipe import Recipe, Setting
from taut_tools.migrate.traps import ORDER, Judged, Trap, all_traps, judge

TRAPS = all_traps()
WORDS = {"all", "any", "not", "fact", "version", "on", "off", "key", "set", "absent"}
OTHERS = {"flash_attn", "max_prompt_length", "attention_backend"}
"""Options of older releases, and of Megatron-SWIFT."""
CASES = [
    pytest.param(trap, framework, id=f"{trap.id}-{framework}")
    for trap in TRAPS
    for framework in trap.frameworks
]
CITED: Mapping[str | int, str] = {
    "F1": "OpenRLHF#351",
    "F2": "OpenRLHF#303 OpenRLHF#333",
    "F3": "ms-swift#3325 ms-swift#3047",
    "F4": "open-r1#603 open-r1#604 open-r1#494",
    "F5": "trl#2834",
    1: "trl#1230 trl#805 trl#3067 trl#2834 trl#3910 LF#2289 LF#4224 alignment-handbook#204 transformers#46634",
    4: "trl#2834 trl#5059 open-instruct#1823 slime#397",
    5: "transformers#37766 transformers#35438 transformers#38448 trl#3021 open-instruct#1161 verl#2857",
    7: "open-r1#494 open-r1#603 trl#1623 trl#3091 unsloth#416",
    8: "open-r1#604 ms-swift#3113 ms-swift#4498 ms-swift#6 trl#2059 Qwen3#927",
    9: "OpenRLHF#238",
    10: "marin#7237 transformers#34172 transformers#30650 trl#4201",
    11: "ms-swift#4939 ms-swift#9829 slime#330 trl#6363",
    12: "ms-swift#6267 ms-swift#5745 ms-swift#4009 ms-swift#5871 ms-swift#7459 ms-swift#2268",
    14: "trl#5826 trl#5662 trl#6548 UniVR#13 ms-swift#6961",
    15: "trl#5904 prime-rl#2013 LF#6559",
    16: "trl#3867 trl#4159 AReaL#1290",
    17: "trl#6789 trl#7269",
    19: "verl#7495 miles#1087",
    21: "trl#3025 trl#4967 trl#4638 trl#6503 open-instruct#534 slime#397",
    22: "Liger-Kernel#1082 trl#7270 trl#6808 trl#5731 trl#5597 trl#7084 trl#6814",
    23: "trl#3750 trl#5338 trl#6805 trl#6813 trl#2012",
    25: "trl#3138 trl#3256",
    28: "LF#8459 trl#1139 trl#5542 trl#7084",
    29: "transformers#45127 unsloth#1971 unsloth#1804 LF#6749 LF#6446",
    39: "open-instruct#1738 AReaL#1637",
    40: "unsloth#8330 trl#1565",
}
"""The threads that each class of failure was met in."""


class Told:
    """Facts as a test tells them; what it does not tell is not known."""

    def __init__(self, facts: Mapping[str, bool]) -> None:
        self.facts = facts

    def answer(self, name: str) -> Answer:
        assert name in FACTS
        return Answer(self.facts.get(name), name)


def a_recipe(trap: Trap, framework: str, case: Mapping[str, Any]) -> Recipe:
    """The smallest recipe with these settings."""
    dialect = DIALECTS[framework]
    given = {key: Setting(key, value, "case:1") for key, value in case["settings"].items()}
    version = case.get("version") or _a_version(
        trap, (dialect.release_of(given) or dialect.newest).version
    )
    return Recipe(
        framework=dialect.name,
        library=dialect.library,
        options_of=dialect.options_of,
        version=version,
        version_reason="told",
        method=next(method for method in dialect.methods if method in trap.methods),
        method_reason="told",
        settings=given,
        model=None,
        data=None,
        place="case:1",
    )


def _a_version(trap: Trap, default: str) -> str:
    """One that the trap is known in: the dialect's own where it is, else 0.18.0 as open-r1's trl."""
    wanted = SpecifierSet(trap.versions)
    return next(one for one in (default, "1.16.0", "0.18.0") if wanted.contains(one))


def cases(trap: Trap) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and facts of the recipe that walks in, and of its twin."""
    walks = {"settings": {}, "facts": {}, **trap.walks_in}
    twin = {
        **walks,
        "settings": {
            key: value
            for key, value in {**walks["settings"], **trap.clear.get("settings", {})}.items()
            if key not in trap.clear.get("without", ())
        },
        "facts": {**walks["facts"], **trap.clear.get("facts", {})},
    }
    return walks, twin


def judged(trap: Trap, framework: str, case: Mapping[str, Any]) -> Judged:
    """What becomes of this trap."""
    found = judge(a_recipe(trap, framework, case), Told(case["facts"]))
    return next(one for one in found if one.trap.id == trap.id)


@pytest.mark.parametrize(("trap", "framework"), CASES)
def test_the_recipe_walks_in_and_its_twin_does_not(trap: Trap, framework: str) -> None:
    walks, twin = cases(trap)
    assert judged(trap, framework, walks).state == "walks_in"
    assert judged(trap, framework, twin).state == "clear"


@pytest.mark.parametrize(
    "trap", [trap for trap in TRAPS if "facts" in trap.walks_in], ids=lambda t: t.id
)
def test_without_its_facts_a_trap_is_not_decided(trap: Trap) -> None:
    walks, _ = cases(trap)
    one = judged(trap, trap.frameworks[0], {**walks, "facts": {}})
    assert one.state == "undecided"
    assert one.because


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap.versions], ids=lambda t: t.id)
def test_another_release_is_clear(trap: Trap) -> None:
    walks, _ = cases(trap)
    outside = next(
        one
        for one in ("0.0.1", "0.23.0", "1.0.0", "99.0")
        if not SpecifierSet(trap.versions).contains(one)
    )
    one = judged(trap, trap.frameworks[0], {**walks, "version": outside})
    assert one.state == "clear"
    assert outside in one.because[0]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.id)
def test_every_entry_is_whole(trap: Trap) -> None:
    assert trap.id.partition(".")[0] in trap.frameworks
    assert set(trap.frameworks) <= DIALECTS.keys()
    for framework in trap.frameworks:
        assert set(trap.methods) & set(DIALECTS[framework].methods)
    assert trap.severity in ORDER
    assert all(text.strip() for text in (trap.what, trap.why, trap.fix, trap.taut))
    assert trap.seen and set(trap.seen) <= {"source", "thread", "run"}
    assert ("source" in trap.seen) <= bool(trap.source)
    assert trap.classes


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.id)
def test_every_citation_belongs_to_its_classes(trap: Trap) -> None:
    known = " ".join(CITED.get(name, "") for name in trap.classes).split()
    assert set(trap.threads) <= set(known)
    assert all(re.fullmatch(r"[\w-]+#\d+", thread) for thread in trap.threads)
    numbers = [name for name in trap.classes if isinstance(name, int)]
    assert all(1 <= number <= 40 for number in numbers)
    assert {str(name) for name in trap.classes if name not in numbers} <= {
        "F1",
        "F2",
        "F3",
        "F4",
        "F5",
    }


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.id)
def test_conditions_ask_for_options_that_exist(trap: Trap) -> None:
    """A key nobody has would make a trap that never closes."""
    keys = set(_keys(trap.when)) | trap.walks_in.get("settings", {}).keys()
    known = set[str](OTHERS)
    for framework in trap.frameworks:
        for method in DIALECTS[framework].methods:
            known |= options(framework, method)
        known |= set(DIALECTS[framework].aliases.values())
    assert keys <= known | set(ALIASES["openrlhf"])


def _keys(condition: Mapping[str, Any]) -> list[str]:
    """The options that a condition names."""
    assert WORDS & condition.keys(), condition
    inner = [*condition.get("all", []), *condition.get("any", [])]
    inner += [condition["not"]] if "not" in condition else []
    own = [condition[word] for word in ("on", "off", "key", "set", "absent") if word in condition]
    if "fact" in condition:
        assert condition["fact"] in FACTS
    return own + [key for one in inner for key in _keys(one)]


def test_the_table_is_large_enough_and_names_are_unique() -> None:
    assert len(TRAPS) >= 30
    assert len({trap.id for trap in TRAPS}) == len(TRAPS)
    assert {framework for trap in TRAPS for framework in trap.frameworks} <= DIALECTS.keys()


def test_the_traps_that_the_issue_names_are_there() -> None:
    named = {trap.id for trap in TRAPS}
    assert {
        "trl.flat-batch-without-flash",
        "openrlhf.attention-overridden",
        "trl.pad-is-eos",
        "trl.eos-is-not-turn-end",
        "open-r1.cache-and-right-padding",
        "trl.dpo-padding-free-off",
    } <= named
