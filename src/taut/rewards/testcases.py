"""A row's test cases, in the forms that data sets have them.

    {"inputs": [...], "outputs": [...]}                   standard input and output (APPS, TACO: ``input_output``)
    {"inputs": [...], "outputs": [...], "fn_name": f}     a call of f, or ``Solution().f``: lists of arguments, values
    [{"input", "output", "testtype"}, ...]                LiveCodeBench: "stdin", or "functional" with ``metadata``'s
                                                          ``func_name`` and one JSON value a line
    ["assert f(1) == 2", ...]                             MBPP: ``test_list``; test_imports and test_setup_code first
    "def check(candidate): ..."                           HumanEval: ``test``, called on ``entry_point``; the row's
                                                          ``prompt`` goes before the program

Each may be JSON in a string. Imports errors and the sandbox's trials. ``code`` imports it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taut.errors import DataError
from taut.sandbox.limits import Trial

COLUMNS = ("tests", "input_output", "test_cases", "public_test_cases", "test_list", "test")
"""Where a row may have its tests; the first it has counts."""


@dataclass(frozen=True)
class Case:
    """One test."""

    trial: Trial
    expected: Any = None
    """What a script is to print, as text, or a call is to give; nothing for a check."""
    text: str | None = None
    """The JSON that ``expected`` was read from: a call may give that text as well."""


@dataclass(frozen=True)
class Cases:
    """All tests of a row."""

    cases: tuple[Case, ...]
    before: str = ""
    """Code that goes before the program."""


def read_cases(row: Mapping[str, Any], column: str | None) -> Cases | None:
    """The tests of a row; None where it has none. DataError: they cannot be read."""
    found = [column] if column else [name for name in COLUMNS if row.get(name)]
    value = row.get(found[0]) if found else None
    if not value:
        return None
    place = f"the column {found[0]}"
    try:
        return _read(_parsed(value), row, place)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"found tests in {place} that cannot be read ({type(error).__name__}: {error}); expected inputs and "
            "outputs, or asserts; see docs/sandbox.md"
        ) from error


def _parsed(value: Any) -> Any:
    """The value, out of the JSON text it may be."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return json.loads(value)
    return value


def _read(value: Any, row: Mapping[str, Any], place: str) -> Cases:
    if isinstance(value, Mapping):
        return Cases(tuple(_paired(value, place)))
    if isinstance(value, str):
        return _one_check(value, row)
    if all(isinstance(it, str) for it in value):
        setup = [*row.get("test_imports", ()), row.get("test_setup_code", "")]
        checks = ["\n".join([*filter(None, setup), it]) for it in value]
        return Cases(tuple(Case(Trial(check=it)) for it in checks))
    return Cases(tuple(_single(it, row) for it in value))


def _paired(value: Mapping[str, Any], place: str) -> list[Case]:
    inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
    if len(inputs) != len(outputs):
        raise DataError(
            f"found {len(inputs)} inputs and {len(outputs)} outputs in {place}; expected as many; correct the row"
        )
    if not name:
        return [
            Case(Trial(stdin=_text(given)), _text(wanted))
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
    return [
        _call(name, given, *_read_value(wanted))
        for given, wanted in zip(map(_parsed, inputs), outputs, strict=True)
    ]


def _read_value(wanted: Any) -> tuple[Any, str | None]:
    """What a call is to give, and the text it was read from: one that looks like JSON may be meant as it is."""
    try:
        value = _parsed(wanted)
    except ValueError:
        return wanted, None
    return value, None if value is wanted else wanted


def _single(value: Mapping[str, Any], row: Mapping[str, Any]) -> Case:
    if value.get("testtype", "stdin") == "stdin":
        return Case(Trial(stdin=_text(value["input"])), _text(value["output"]))
    name = value.get("fn_name") or _parsed(row["metadata"])["func_name"]
    given = [json.loads(line) for line in value["input"].split("\n") if line.strip()]
    return _call(name, given, json.loads(value["output"]))


def _call(name: str, arguments: Sequence[Any], expected: Any, text: str | None = None) -> Case:
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments of {name} are {arguments!r:.60}, no list")
    return Case(Trial(call=name, arguments=json.dumps(arguments)), expected, text)


def _one_check(text: str, row: Mapping[str, Any]) -> Cases:
    name, prompt = row.get("entry_point"), row.get("prompt")
    if name:
        text = f"{text}\n\ncheck({name})\n"
    is_start = isinstance(prompt, str) and f"def {name}(" in prompt
    return Cases((Case(Trial(check=text)),), f"{prompt}\n" if is_start else "")


def _text(value: Any) -> str:
    """Text, or its lines."""
    return value if isinstance(value, str) else "\n".join(str(line) for line in value)
