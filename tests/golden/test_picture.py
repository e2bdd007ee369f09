"""What a user sees is what ``picture/`` has, but for the lines of ``picture/renames.toml``.

The picture was taken before the package was rearranged: the log and the files of a tiny run of each method, the reports
of ``taut check``, the options of every command, the keys of docs/config.md, the checks of docs/check.md and the public
API (``snapshot.py`` says what of it is pinned). Floats agree to 1e-6, for processors differ; all else is equal.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.golden.renames import Renames, load_renames
from tests.golden.snapshot import (
    EXAMINED,
    PICTURE,
    RUNS,
    keys_of_run,
    take_check,
    take_run,
    take_surface,
    working_in,
    write_inputs,
)
from tests.helpers.slow_cases import slow_except

RELATIVE, ABSOLUTE = 1e-6, 1e-9
ROUNDING = 2e-5
"""What a check measures may be rounding, which no two processors have alike."""
SHOWN = 25
"""Differences that a message lists."""


class Difference(NamedTuple):
    """One thing that is not as in the picture."""

    table: str
    """Of renames.toml, where a name is gone or new; else empty."""
    name: str
    """With its parent, as ``step.loss``."""
    what: str
    place: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models and rows."""
    place = tmp_path_factory.mktemp("picture")
    with working_in(place):
        write_inputs()
    return place


@pytest.fixture
def renames() -> Renames:
    return load_renames()


def load(name: str) -> Any:
    return json.loads((PICTURE / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS["runs"])
def test_a_run_is_as_in_the_picture(
    name: str, place: Path, renames: Renames, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What torch logs of a checkpoint would bury the message.
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    with working_in(place):
        seen = take_run(name, renames.run_keys(keys_of_run(name)), renames)
    pinned = renames.run(load(f"methods/{name}.json"))
    require_same(
        [
            *compare_resolved(pinned["resolved"], seen["resolved"], renames),
            *compare_events(pinned["events"], seen["events"], renames),
            *compare_names("files", "", "out", pinned["files"], seen["files"], renames),
        ]
    )


@pytest.mark.parametrize("name", slow_except(["sft", "grpo"], EXAMINED))
def test_a_report_of_checks_is_as_in_the_picture(name: str, place: Path, renames: Renames) -> None:
    with working_in(place):
        seen = take_check(name, renames.run_keys(keys_of_run(name)), renames)
    pinned = renames.event(load(f"methods/check_{name}.json"))
    checks = renames.field("report.checks")
    title = renames.field("report.checks.name")
    require_same(
        [
            *compare_fields("report", "taut check", *without(checks, pinned, seen), renames),
            *compare_sequence(
                *(
                    [(f"check {check[title]}", "report.checks", check) for check in tree[checks]]
                    for tree in (pinned, seen)
                ),
                renames,
            ),
        ]
    )


def test_commands_keys_checks_and_api_are_as_in_the_picture(renames: Renames) -> None:
    pinned, seen = renames.surface(load("surface.json")), take_surface()
    commands = list(pinned["commands"]), list(seen["commands"])
    checks = list(pinned["checks"]), list(seen["checks"])
    found = [
        *compare_names("commands", "", "taut --help", *commands, renames),
        *compare_order("commands", "taut --help", *commands),
        *compare_mapping("keys", "", "docs/config.md", pinned["keys"], seen["keys"], renames),
        *compare_mapping("checks", "", "docs/check.md", pinned["checks"], seen["checks"], renames),
        *compare_order("checks", "docs/check.md", *checks),
        *compare_mapping("api", "", "import taut", pinned["api"], seen["api"], renames),
    ]
    for name in pinned["commands"].keys() & seen["commands"].keys():
        here, there = pinned["commands"][name], seen["commands"][name]
        where = f"taut {name} --help"
        found += compare_values("usage", where, here["usage"], there["usage"])
        table = "keys" if "method" in here["options"] else "options"
        options = here["options"], there["options"]
        found += compare_mapping(table, "", where, *options, renames)
    require_same(found)


def test_every_line_of_the_table_is_about_something_in_the_picture(renames: Renames) -> None:
    for name in RUNS["runs"]:
        renames.run_keys(keys_of_run(name))
        renames.run(load(f"methods/{name}.json"))
    for name in EXAMINED:
        renames.event(load(f"methods/check_{name}.json"))
    renames.surface(load("surface.json"))
    idle = [f'[{table}] "{old}"' for table, old in sorted(renames.entries() - renames.used)]
    assert not idle, f"renames.toml has lines that match nothing in the picture: {', '.join(idle)}"


def compare_resolved(
    pinned: Mapping[str, Any], seen: Mapping[str, Any], renames: Renames
) -> Iterator[Difference]:
    """resolved.json as dotted names; those of the configuration are keys."""
    where = "resolved.json"
    decisions = renames.resolved("decisions")
    for prefix, table in {"config.": "keys", "identity.config.": "keys", "": "resolved"}.items():
        parent = f"{renames.dotted('resolved', prefix[:-1])}." if prefix else ""
        parts = [
            {
                name.removeprefix(parent): value
                for name, value in tree.items()
                if name != decisions and parent_of(name, renames) == parent
            }
            for tree in (pinned, seen)
        ]
        yield from compare_mapping(table, "", f"{where} {parent}".strip(" ."), *parts, renames)
    yield from compare_decisions(where, pinned[decisions], seen.get(decisions, []), renames)


def parent_of(name: str, renames: Renames) -> str:
    """``config.`` and ``identity.config.`` as they are called now, or nothing."""
    parents = (f"{renames.dotted('resolved', old)}." for old in ("identity.config", "config"))
    return next((parent for parent in parents if name.startswith(parent)), "")


def compare_decisions(
    where: str, pinned: Sequence[Any], seen: Sequence[Any], renames: Renames
) -> Iterator[Difference]:
    trees = [{name: [value, reason] for name, value, reason in rows} for rows in (pinned, seen)]
    yield from compare_mapping("decisions", "", f"{where} decisions", *trees, renames)


def compare_events(
    pinned: Sequence[Any], seen: Sequence[Any], renames: Renames
) -> Iterator[Difference]:
    """The events in their order; each check by its name."""
    check, title = renames.plain("events", "check"), renames.field("check.name")

    def labeled(events: Sequence[Any]) -> list[tuple[str, str, Any]]:
        return [
            (f"check {it.get(title)}" if it["kind"] == check else it["kind"], it["kind"], it)
            for it in events
        ]

    yield from compare_sequence(labeled(pinned), labeled(seen), renames)


def compare_sequence(
    pinned: Sequence[tuple[str, str, Any]], seen: Sequence[tuple[str, str, Any]], renames: Renames
) -> Iterator[Difference]:
    """(label, kind, fields) of each. First which are gone or new, then what those that are in both say."""
    labels = [[label for label, _, _ in rows] for rows in (pinned, seen)]
    for operation, i, j, k, m in SequenceMatcher(None, *labels, autojunk=False).get_opcodes():
        if operation == "equal":
            for (label, kind, here), (_, _, there) in zip(pinned[i:j], seen[k:m], strict=True):
                where = f"event {i}, {label}"
                yield from compare_fields(kind, where, here, there, renames)
                i += 1
            continue
        after = f"after {labels[0][i - 1]}" if i else "at the start"
        for what, rows in (("is gone", labels[0][i:j]), ("is new", labels[1][k:m])):
            for label in rows:
                table = "checks" if label.startswith("check ") else "events"
                name = label.removeprefix("check ")
                if what == "is gone" or name not in renames.added[table]:
                    yield Difference(table, name, what, f"events, {after}")


def compare_fields(
    kind: str, where: str, pinned: Mapping[str, Any], seen: Mapping[str, Any], renames: Renames
) -> Iterator[Difference]:
    """The fields of an event, their order and their values."""
    if decisions := pinned.get("decisions"):
        yield from compare_decisions(where, decisions, seen.get("decisions", []), renames)
        pinned, seen = without("decisions", pinned, seen)
    yield from compare_mapping("fields", f"{kind}.", where, pinned, seen, renames)
    yield from compare_order(f"fields of {kind}", where, list(pinned), list(seen))


def compare_mapping(
    table: str,
    parent: str,
    where: str,
    pinned: Mapping[str, Any],
    seen: Mapping[str, Any],
    renames: Renames,
) -> Iterator[Difference]:
    """Names that are gone or new, and the values of the others."""
    yield from compare_names(table, parent, where, list(pinned), list(seen), renames)
    for name, value in pinned.items():
        if name in seen:
            path = f"{parent}{name}"
            if isinstance(value, dict) and isinstance(seen[name], dict):
                yield from compare_mapping(table, f"{path}.", where, value, seen[name], renames)
            else:
                yield from compare_values(path, where, value, seen[name])


def compare_names(
    table: str,
    parent: str,
    where: str,
    pinned: Sequence[str],
    seen: Sequence[str],
    renames: Renames,
) -> Iterator[Difference]:
    for name in pinned:
        if name not in seen:
            yield Difference(table, parent + name, "is gone", where)
    for name in seen:
        if name not in pinned and parent + name not in renames.added[table]:
            yield Difference(table, parent + name, "is new", where)


def compare_order(
    of: str, where: str, pinned: Sequence[str], seen: Sequence[str]
) -> Iterator[Difference]:
    """Whether names that are in both come in one order."""
    here, there = [it for it in pinned if it in seen], [it for it in seen if it in pinned]
    moved = [f"{a} -> {b}" for a, b in zip(here, there, strict=True) if a != b]
    if moved:
        yield Difference("", of, f"come in another order: {', '.join(moved[:4])}", where)


def compare_values(path: str, where: str, pinned: Any, seen: Any) -> Iterator[Difference]:
    if isinstance(pinned, dict) and isinstance(seen, dict) and pinned.keys() == seen.keys():
        for name, value in pinned.items():
            yield from compare_values(f"{path}.{name}", where, value, seen[name])
    elif isinstance(pinned, list) and isinstance(seen, list) and len(pinned) == len(seen):
        for index, (here, there) in enumerate(zip(pinned, seen, strict=True)):
            yield from compare_values(f"{path}[{index}]", where, here, there)
    elif not is_same(
        pinned, seen, ROUNDING if path.startswith(("check.", "report.")) else ABSOLUTE
    ):
        yield Difference("", path, f"was {short(pinned)} and is {short(seen)}", where)


def is_same(pinned: Any, seen: Any, absolute: float) -> bool:
    if isinstance(pinned, float) and isinstance(seen, float):
        return math.isclose(pinned, seen, rel_tol=RELATIVE, abs_tol=absolute)
    return type(pinned) is type(seen) and bool(pinned == seen)


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."


def without(name: str, *trees: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in tree.items() if key != name} for tree in trees]


def last_part(name: str) -> str:
    """A field without the event that it is of."""
    return name.rpartition(".")[2]


def require_same(found: Sequence[Difference]) -> None:
    """Fail with one line for each name or value, and the lines that renames would be."""
    if not found:
        return
    count = Counter((it.table, it.name, it.what) for it in found)
    places = {(it.table, it.name, it.what): it.place for it in reversed(found)}
    lines = [
        f"  {f'[{table}] ' if table else ''}{name} {what}  ({places[table, name, what]}"
        f"{f', and {number - 1} more' if number > 1 else ''})"
        for (table, name, what), number in count.items()
    ]
    if len(lines) > SHOWN:
        lines = [*lines[:SHOWN], f"  ... and {len(lines) - SHOWN} more"]
    gone, new = (
        [(table, name) for table, name, what in count if what == wanted]
        for wanted in ("is gone", "is new")
    )
    pairs = [
        f'  [{table}] "{old}" = "{last_part(new_name) if table == "fields" else new_name}"'
        for table in dict.fromkeys(table for table, _ in gone)
        for old, new_name in zip(
            [name for it, name in gone if it == table],
            [name for it, name in new if it == table],
            strict=False,
        )
    ]
    hint = [
        "If these are new names for the same things, say so in tests/golden/picture/renames.toml "
        "(old names as the picture has them):",
        *pairs,
    ]
    pytest.fail(
        "\n".join(["not as in the picture:", *lines, *(hint if pairs else [])]), pytrace=False
    )
