"""Run a row's tests in the sandbox after a program, collected and called as pytest and unittest do.

``python_tests`` sends this file's text. ``run`` returns the number of executed assertions, or a text if the tests
cannot be run with any program. A test that fails raises.

    test functions    ``test*``, also async, of the module and of classes ``Test*``, nested too; parametrized, with the
                      setup and teardown of each level around each test
    TestCase          run by unittest itself, imported anew, as the program may have changed it
    pytest            replaced by ``Pytest``; features that it lacks, such as fixtures, are a fault of the tests
    ``__main__``      a module without tests that asserts nothing is executed once more, as the main program
    imports           the modules ``PROGRAM`` are the program; others that are not installed are a fault of the tests

A skipped test executes nothing. Anything that the program raises, SystemExit and SkipTest too, is a failure.

Standard library only, Python 3.9 or later; imports nothing of ours.
"""

from __future__ import annotations

import math
import re
import sys
import traceback
import unittest
from functools import partial
from typing import Any

PROGRAM = ("solution", "solutions", "program", "submission", "main", "answer", "your_module")
"""Names by which tests import the program."""
OURS = 'File "program.py"'
FAULTS: list[str] = []
"""Reasons why the tests cannot be run."""


def run(tests: str) -> int | str:
    """Execute the tests; the number of assertions, or the reason why they cannot be run."""
    module: Any = sys.modules["program"]
    sys.modules.update({name: module for name in PROGRAM if name not in sys.modules})
    sys.modules["pytest"], unittest.main = Pytest("pytest"), lambda *_, **__: None  # type: ignore
    names = vars(module)
    before, execute = dict(names), partial(exec, compile(tests, "test.py", "exec"), names)
    try:
        _pass(unittest.FunctionTestCase(execute))
        new = [name for name in names if before.get(name, before) is not names[name]]
        found = [test for name in new for test in _tests(name, names[name], module)]
        for test in found:
            _pass(test)
        if not found and not module.__count__:
            names["__name__"] = "__main__"
            _pass(unittest.FunctionTestCase(execute))
    except AssertionError:
        if not FAULTS:
            raise
    return FAULTS[0] if FAULTS else len(module.__count__)


def _fault(reason: str) -> Exception:
    FAULTS.append(reason)
    return ValueError(reason)


class _Result(unittest.TestResult):
    def addSkip(self, test: Any, reason: str) -> None:
        if OURS in traceback.format_exc():
            self.addError(test, sys.exc_info())


def _pass(test: unittest.TestCase) -> None:
    """Run a test. Raises AssertionError where it fails."""
    result = _Result()
    unittest.TestSuite([test]).run(result)
    for _, trace in [*result.errors, *result.failures]:
        last = trace.strip().splitlines()[-1]
        if re.match("ModuleNotFoundError|ImportError: attempted", last) and OURS not in trace:
            _fault(f"{last}; it is neither in the sandbox nor the program")
        raise AssertionError(last)
    assert not result.unexpectedSuccesses, "a test that is expected to fail passes"


def _tests(name: str, item: Any, module: Any, owner: Any = None) -> list[unittest.TestCase]:
    """Collect the tests of a name."""
    if not isinstance(item, type):
        if not name.startswith("test") or type(item).__name__ != "function":
            return []
        marks = [mark for it in (module, owner, item) for mark in getattr(it, "pytestmark", ())]
        if any(mark.is_left_out for mark in marks):
            return []
        return [_case(module, owner, name, given) for given in _parameter_sets(marks)]
    if issubclass(item, unittest.TestCase):
        return [*map(item, unittest.defaultTestLoader.getTestCaseNames(item))]
    if not name.startswith("Test") or item.__init__ is not object.__init__:
        return []
    keys = {key: None for base in reversed(item.__mro__) for key in vars(base)}
    return [test for key in keys for test in _tests(key, getattr(item, key), module, item)]


def _case(module: Any, owner: Any, name: str, given: dict[str, Any]) -> unittest.TestCase:
    """Make a test case of a function of the module, or of a new instance of its class, with the arguments ``given``."""
    holder = owner() if owner else module
    test = getattr(holder, name)

    def call() -> None:
        for missing in [name for name in _asked(test) if name not in given]:
            raise _fault(f"a test has the argument {missing}; fixtures are not supported")
        value = test(**given)
        if hasattr(value, "__await__"):
            import asyncio

            asyncio.run(value)

    def hooks(stage: str) -> None:
        for level in ("module", "class", "method", "function"):
            place, given = (module, module) if level == "module" else (holder, test)
            if hook := getattr(place, f"{stage}_{level}", None):
                hook(*[given][: len(_asked(hook))])

    return unittest.FunctionTestCase(call, partial(hooks, "setup"), partial(hooks, "teardown"))


def _asked(function: Any) -> tuple[str, ...]:
    """Names of a function's arguments without defaults."""
    code = function.__code__
    num_asked = code.co_argcount - len(function.__defaults__ or ())
    return tuple(code.co_varnames[hasattr(function, "__self__") : num_asked])


class Mark:
    """``pytest.mark.NAME``: a decorator that keeps its arguments."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name, self.args = name, args

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            args[0].pytestmark = [*vars(args[0]).get("pytestmark", ()), self]
            return args[0]
        return Mark(self.name, *args, *kwargs.values())

    def __iter__(self) -> Any:
        """Iterate as a list of one mark, since ``pytestmark`` may be a mark or a list."""
        return iter([self])

    @property
    def is_left_out(self) -> bool:
        """Whether the mark skips its test, or expects it to fail."""
        return self.name in ("skip", "xfail") or (self.name == "skipif" and bool(self.args[0]))


class Param(tuple):  # type: ignore[type-arg]
    """``pytest.param(...)``."""


def _parameter_sets(marks: list[Mark]) -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = [{}]
    for names, values, *_ in [mark.args for mark in marks if mark.name == "parametrize"]:
        keys = names.replace(",", " ").split() if isinstance(names, str) else names
        rows = [it if isinstance(it, Param) or len(keys) > 1 else (it,) for it in values]
        sets = [
            {**one, **{key: row[k] for k, key in enumerate(keys)}} for row in rows for one in sets
        ]
    return sets


class Approx:
    """``pytest.approx(expected)`` for a number, or a list or dictionary of numbers."""

    def __init__(self, expected: Any, rel: Any = None, abs: Any = None, **_: Any) -> None:
        self.expected, self.options = expected, (rel, abs)
        self.rel = 1e-6 if rel is None and abs is None else rel or 0.0
        self.abs = abs or 1e-12

    def __eq__(self, actual: Any) -> bool:
        expected = self.expected
        if isinstance(expected, (list, tuple, dict)) and len(expected) == len(actual):
            keys = expected if isinstance(expected, dict) else range(len(expected))
            return all(actual[key] == Approx(expected[key], *self.options) for key in keys)
        if not hasattr(expected, "__float__"):
            return bool(expected == actual)
        return math.isclose(actual, expected, rel_tol=self.rel, abs_tol=self.abs)


class Pytest(type(sys)):  # type: ignore[misc]
    """A module with the parts of pytest that tests use."""

    approx = Approx
    mark = type("Marks", (), {"__getattr__": lambda self, name: Mark(name)})()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _fault(f"pytest.{name} is not known in the sandbox")

    def raises(self, expected_exception: Any, *args: Any, match: Any = "", **kwargs: Any) -> Any:
        context = unittest.TestCase().assertRaisesRegex(expected_exception, match or "")  # noqa: PT027
        type(context).value = property(lambda self: self.exception)  # type: ignore[attr-defined]
        if args:
            with context:
                args[0](*args[1:], **kwargs)
        return context

    def param(self, *values: Any, **_: Any) -> Param:
        return Param(values)

    def fail(self, reason: str = "", **_: Any) -> None:
        raise AssertionError(reason)

    def skip(self, reason: str = "", **_: Any) -> None:
        raise unittest.SkipTest(reason)
