"""Turn tests that are code into trials of the sandbox, which count the assertions that they execute.

    as_trial("def test_add():\\n    assert add(2, 3) == 5\\n", "the column test")

The trial returns the number of assertions, or a text that says why the tests cannot be run. An assertion is an
``assert``, a call with a name of this kind (``self.assertEqual``, ``pytest.raises``), an ``if`` that may raise or exit,
or a ``try`` around one of these. An operand that is equal to everything fails its assertion. A script is run unchanged;
``run_tests`` calls the tests that pytest or unittest would collect. The text is changed at its assertions only. Nothing
is executed here.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from taut.errors import DataError
from taut_tools.sandbox.limits import Trial

_ASSERTS = re.compile(r"assert\w*|fail|raises|warns|expect", re.IGNORECASE)
_EXITS = re.compile(r"fail|_?exit|quit", re.IGNORECASE)
_COLLECTED = re.compile(r"^(async )?def test|^class |\b(import|pytest|__main__)\b", re.MULTILINE)
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Delete, ast.Pass)
_OPERANDS = (ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.Await)
"""Operands that may be an object of the program."""
_COUNTED = """__count__ = []
__asserts__ = lambda: __count__.append(1)
def __plain__(value):
    try: is_anything = (value == object()) is True
    except Exception: return value
    assert not is_anything, "an object is equal to everything"
    return value
"""
_RUN = f"""import sys as __taut__
[__taut__.modules.pop(it) for it in [*__taut__.modules] if it.partition(".")[0] == "unittest"]
__taut__ = {{"__name__": "run_tests"}}
exec(compile({Path(__file__).with_name("run_tests.py").read_text()!r}, "run_tests.py", "exec"), __taut__)
"""


@functools.lru_cache(maxsize=128)
def as_trial(text: str, place: str) -> Trial:
    """Turn a test into a trial. Raises DataError for a text that is no Python, or that asserts nothing."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"found a test in {place} that is no Python ({reason:.80}); expected code that asserts; correct the row"
        ) from None
    # Find the assertions, and what to insert at each.
    nodes: list[ast.AST] = [tree]
    inserted: list[tuple[int, int, bool, str]] = []

    def begin(node: ast.stmt) -> None:
        inserted.append((node.lineno, node.col_offset, False, "__asserts__(); "))

    def wrap(node: ast.expr, before: str, after: str = ")") -> None:
        inserted.append((node.lineno, node.col_offset, True, before))
        inserted.append((node.end_lineno or 0, node.end_col_offset or 0, True, after))

    for node in nodes:
        children = ast.iter_child_nodes(node)
        nodes += [it for it in children if not isinstance(it, ast.JoinedStr)]  # without positions
        operands: list[ast.expr] = []
        match node:
            case ast.Assert():
                begin(node)
                if isinstance(node.test, ast.Compare):
                    operands = [node.test.left, *node.test.comparators]
            case ast.Call() if _is_named(node, _ASSERTS):
                wrap(node.func, "(__asserts__() or ")
                operands = node.args
            case ast.If() if any(map(_ends, ast.walk(node))):
                wrap(node.test, "(__asserts__() or (", "))")
            case ast.Try(body=[first, *_]) if isinstance(first, _SIMPLE):
                if any(isinstance(it, ast.Assert) or _ends(it) for it in ast.walk(node)):
                    begin(first)
        for operand in operands:
            if isinstance(operand, _OPERANDS):
                wrap(operand, "__plain__(")
    if not inserted:
        raise DataError(
            f"found a test in {place} that asserts nothing; expected an assert, or a call such as self.assertEqual; "
            "correct the row"
        )
    # Insert it, from the end of the text.
    lines = text.encode().splitlines(keepends=True)
    for line, column, _, addition in sorted(inserted, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + addition.encode() + lines[line - 1][column:]
    code = b"".join(lines).decode()
    if _COLLECTED.search(text):
        report = f"__run__ = lambda: __taut__['run']({code!r})\n"
        return Trial(check=_COUNTED + report + _RUN, call="__run__")
    # A script with an assert that it cannot pass by needs no count: at its top, or at the top of a function that it
    # calls, and that has no return or yield. Any other returns how many assertions it executed.
    leaves = (ast.Return, ast.Yield, ast.YieldFrom)
    certain = [
        it
        for it in tree.body
        if isinstance(it, ast.FunctionDef) and not any(isinstance(n, leaves) for n in ast.walk(it))
    ]
    calls = [it.value for it in tree.body if isinstance(it, ast.Expr)]
    called = {
        it.func.id for it in calls if isinstance(it, ast.Call) and isinstance(it.func, ast.Name)
    }
    bodies = [tree.body, *(it.body for it in certain if it.name in called)]
    is_certain = any(isinstance(it, ast.Assert) for body in bodies for it in body)
    report = "__run__ = lambda: len(__count__)\n"
    return Trial(check=_COUNTED + report + code, call="" if is_certain else "__run__")


def _is_named(node: ast.Call, pattern: re.Pattern[str]) -> bool:
    name = str(getattr(node.func, "id", "") or getattr(node.func, "attr", ""))
    return pattern.fullmatch(name) is not None


def _ends(node: ast.AST) -> bool:
    """Whether a node raises or exits, and so ends a test that reaches it."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_named(node, _EXITS))
