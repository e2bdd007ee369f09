"""``eval`` of what a model wrote: values and arithmetic on them. Whatever else an expression asks for is refused.

Libraries read some answers by ``eval``, or by sympy's ``parse_expr``, which is made of it: there ``__import__('os')``
is an answer too, and would run outside of any sandbox. ``plain_eval`` takes the place of ``eval`` in their modules.

Imports nothing of ours. Verifiers that hand answers to such a library import it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NODES = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BinOp,
    ast.operator,
    ast.UnaryOp,
    ast.unaryop,
    ast.Name,
    ast.Load,
    ast.Call,
)
_KNOWN = (
    "Integer Float Rational Symbol Function Add Mul Pow pi E I oo Abs sqrt cbrt root exp log ln factorial binomial erf "
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh"
)
NAMES = frozenset(_KNOWN.split())
"""What sympy writes or knows for an expression's numbers, symbols and functions."""


def plain_eval(
    code: str,
    global_names: Mapping[str, Any] | None = None,
    local_names: Mapping[str, Any] | None = None,
) -> Any:
    """The value of an expression; ValueError for one that is more than arithmetic."""
    if not isinstance(code, str):
        raise ValueError(f"found {type(code).__name__} to evaluate; expected a text")
    tree = ast.parse(code.strip(), mode="eval")
    locals_ = dict(local_names or {})
    known = {name: value for name, value in (global_names or {}).items() if name in NAMES}
    for node in ast.walk(tree):
        is_strange = isinstance(node, ast.Name) and node.id not in {**known, **locals_}
        if is_strange or not isinstance(node, NODES):
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic")
        if isinstance(node, ast.BinOp) and (_has_length(node.left) or _has_length(node.right)):
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic of numbers")
        if isinstance(node, ast.Call) and (node.keywords or not _is_function(node.func)):
            raise ValueError(f"{ast.unparse(node)[:80]!r} calls what is no function of numbers")
    return eval(compile(tree, "answer", "eval"), {**known, "__builtins__": {}}, locals_)


def _has_length(node: ast.expr) -> bool:
    """A list or a text, of which a product or a format may be of any size."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict))


def _is_function(node: ast.expr) -> bool:
    """A name, or sympy's ``Function('f')``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "Function"
    return isinstance(node, ast.Name)


@contextmanager
def plainly(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Meanwhile these modules evaluate by ``plain_eval``."""
    for module in modules:
        vars(module)["eval"] = plain_eval
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("eval", None)
