"""Which tests ``make test`` leaves to ``make test-slow``, besides those that are marked slow: those that take long.

quick_cases.json has, for each test function whose cases take more than LONG seconds together, how many of them stay in
``make test``: 0 where one alone is long. Written anew from what a run of all tests printed:

    make test ARGS="-v --all-cases --durations=0 --durations-min=0.02" > FILE; python -m tests.helpers.quick FILE

What a test waits for its fixtures counts, so that of a module with a long one some other tests may have to be marked by
hand. Of each file a test stays, if one of at most LONGEST seconds is there, and all of what is named in WHOLE.
``--min-cases`` and ``--all-cases-of`` keep more, as tests/versions/run.py does.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

SEEN = pytest.StashKey[Counter[str]]()
RECORD = Path(__file__).with_name("quick_cases.json")
LONG = 1.0
LONGEST = 5.0
SHORT = 0.15
"""Of functions whose cases take less each, they may take MUCH together: one loss or file more costs little."""
MUCH = 4.0
WHOLE = ("tests/docs/", "tests/failures/")
"""What is held by every ``make test``: pages that are true, and the failures that taut was founded on."""
TOOK = re.compile(r"^\s*([\d.]+)s (?:call|setup)\s+(\S.*?)\s*$")
PASSED = re.compile(r"^(?:\[gw\d+\] \[.*?\] )?PASSED (tests/\S.*?)\s*$")


def function_of(node: str) -> str:
    """The test function of a case: its id without the parameters."""
    return node.partition("[")[0]


@cache
def recorded() -> dict[str, int]:
    """How many cases of a function stay in ``make test``."""
    found: dict[str, int] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def num_quick(config: pytest.Config, function: str) -> int:
    """How many cases of a function stay, where it is asked for so (``--min-cases``, ``--all-cases-of``)."""
    if function not in recorded() or function in config.getoption("all_cases_of", []):
        return sys.maxsize
    return max(recorded()[function], config.getoption("min_cases", 0))


def mark_slow(item: pytest.Item) -> None:
    """Mark a case as slow, which comes after as many of its function as stay. Called for each case in order."""
    name = function_of(item.nodeid)
    if name in recorded() and not item.get_closest_marker("slow"):
        seen = item.session.stash.setdefault(SEEN, Counter())
        seen[name] += 1
        if seen[name] > num_quick(item.config, name):
            item.add_marker(pytest.mark.slow)


def quick_cases(lines: Iterable[str]) -> dict[str, int]:
    """How many cases of a function stay, for those that take long, from what pytest printed."""
    seconds, cases = defaultdict[str, float](float), defaultdict[str, set[str]](set)
    for line in lines:
        if found := TOOK.match(line):
            seconds[function_of(found[2])] += float(found[1])
        elif found := PASSED.match(line):
            cases[function_of(found[1])].add(found[1])
    of_file = defaultdict[str, list[str]](list)
    for name in cases:
        of_file[name.partition("::")[0]].append(name)
    record: dict[str, int] = {}
    for file, names in of_file.items():
        if not file.startswith(WHOLE):
            mean = {name: seconds[name] / len(cases[name]) for name in names}
            record |= _of_file({name: (mean[name], len(cases[name])) for name in names})
    return dict(sorted(record.items()))


def _of_file(cost: Mapping[str, tuple[float, int]]) -> dict[str, int]:
    """``cost``: the mean seconds of a function's cases, and their number."""
    found = {}
    for name, (mean, number) in cost.items():
        limit = LONG if mean > SHORT else MUCH
        if mean * number > limit:
            found[name] = 0 if mean > LONG else max(1, int(limit / 2 / mean))
    if len(found) == len(cost) and not any(found.values()):
        cheapest = min(cost, key=lambda name: cost[name][0])
        if cost[cheapest][0] < LONGEST:
            found[cheapest] = 1
    return {name: kept for name, kept in found.items() if kept < cost[name][1]}


def main(files: Sequence[str]) -> None:
    """Write the record from the outputs of runs."""
    lines = [
        line for file in files for line in Path(file).read_text("utf-8", "replace").split("\n")
    ]
    RECORD.write_text(json.dumps(quick_cases(lines), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
