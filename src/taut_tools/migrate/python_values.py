"""Read the calls of a Python script with the values of their arguments, by ``ast`` and without running any of it.

Statements are followed in their order; those of a function come after the module's. Values are: literals, names,
arithmetic, ``f"{name}"``, ``os.path.join`` and the like, ``torch.bfloat16``, items of lists and tables, ``**table``,
attributes of the script's own classes, and the defaults of argparse and HfArgumentParser, each of which is noted in
``assumed``. Not known (``Unknown``): what other functions return, arguments of functions, variables of loops, and names
that are assigned under a condition. Nothing is guessed.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from taut.errors import ConfigError
from taut_tools.migrate.recipe import MAX_DIGITS
from taut_tools.migrate.script import ARITHMETIC

MAX_SIZE, MAX_SHOWN = 500_000, 60
"""Maximum entries of all values of a script, and characters of it in a message."""
OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    **ARITHMETIC,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (int, float, str, max, min, len, list)},
    "pathlib.Path": str,
    "os.path.join": posixpath.join,
}
ENUMERATIONS = ("IntervalStrategy", "SaveStrategy", "SchedulerType", "OptimizerNames")
"""Enumerations of transformers, whose values are their names in small letters."""
PARSES = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
CHANGES = ("update", "append", "extend", "insert", "pop", "remove", "clear", "setdefault")
Names: TypeAlias = ChainMap[str, Any]


class NotConstant(Exception):
    """The reason why a value is not known without running the script, as a noun."""


class Unknown(NamedTuple):
    """A value that is not known."""

    why: str


@dataclass(eq=False)
class Object:
    """What a call returns, a class of the script, a function of it, or a name of another module."""

    name: str
    """The full name of the function that is called, of the class, or of what is imported."""
    line: int
    text: str = ""
    """The call as it is written."""
    arguments: dict[str, Argument] = field(default_factory=dict)
    """Arguments by name, or by number; fields of a class; attributes that are assigned."""
    of: Any = None
    """The value whose method is called, or whose item it is."""
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    is_name: bool = False
    """Whether it is a name, and nothing that the script makes."""
    is_loaded: bool = False
    """Whether a program that loads the file makes it: outside functions and ``if __name__ == "__main__"``."""

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


class Argument(NamedTuple):
    """A value with the line in which it is given."""

    value: Any
    line: int


class Script:
    """A script that was followed from its first to its last statement."""

    def __init__(self, text: str, path: Path) -> None:
        """Follow a script. Raises ConfigError where it is no Python."""
        self.path, self.lines = path, text.split("\n")
        self.calls: list[Object] = []
        self.assumed: list[str] = []
        self.size, self.is_loaded = 0, True
        self.later: list[tuple[list[ast.stmt], Names]] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text.removeprefix("\ufeff"))
        except SyntaxError as error:
            what = f"is not Python 3 ({error.msg}); put the line right"
            raise ConfigError(f"{path}:{error.lineno or 1} {what}") from error
        except (MemoryError, ValueError) as error:  # of the parser's stack; a null byte
            why = str(error) or "it is nested too deeply"
            raise ConfigError(f"{path} is not Python 3 ({why}); expected a script") from error
        self.follow(tree.body, ChainMap())
        self.is_loaded = False
        while self.later:
            self.follow(*self.later.pop(0))

    def count(self, number: int) -> None:
        """Count entries of values, which can double with each statement. Raises ConfigError."""
        self.size += number
        if self.size > MAX_SIZE:
            what = f"the values of {self.path} have more than {MAX_SIZE:,} entries"
            raise ConfigError(f"{what}; expected constants; write them out")

    def unknown(self, node: ast.expr) -> Unknown:
        """A value that the script computes."""
        return Unknown(f"computed by the script: {self.text(node)}")

    def text(self, node: ast.expr) -> str:
        """The first line of an expression, as it is written."""
        line = self.lines[node.lineno - 1].encode()[node.col_offset :]
        is_whole = node.end_lineno == node.lineno
        text = line[: (node.end_col_offset or 0) - node.col_offset if is_whole else None].decode()
        return text if is_whole and len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

    # -- statements

    def follow(self, body: list[ast.stmt], names: Names) -> None:
        """Follow statements, which assign ``names``."""
        for statement in body:
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    name, line = statement.name, statement.lineno
                    is_loaded = self.is_loaded and len(names.maps) == 1
                    function = Object(name, line, function=statement, is_loaded=is_loaded)
                    names[name] = function
                    every = [node for node in ast.walk(statement.args) if isinstance(node, ast.arg)]
                    why = Unknown(f"an argument of {name}")
                    inner = dict.fromkeys((one.arg for one in every), why)
                    self.later.append((statement.body, names.new_child(inner)))
                case ast.ClassDef(name=name):
                    inside = names.new_child()
                    self.follow(statement.body, inside)
                    fields = {
                        key: Argument(one, statement.lineno) for key, one in inside.maps[0].items()
                    }
                    names[name] = Object(name, statement.lineno, arguments=fields, is_name=True)
                case ast.Import(names=parts):
                    for part in parts:
                        name = part.asname or part.name.partition(".")[0]
                        full = part.name if part.asname else name
                        names[name] = Object(full, statement.lineno, is_name=True)
                case ast.ImportFrom(names=parts, module=module):
                    for part in parts:
                        full = f"{module}.{part.name}"
                        names[part.asname or part.name] = Object(full, part.lineno, is_name=True)
                case ast.Assign(targets=targets, value=value):
                    found = self.value(value, names)
                    for target in targets:
                        self.assign(target, found, names)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.assign(target, self.value(value, names), names)
                case ast.AugAssign(target=target, op=op, value=value):
                    whole = ast.copy_location(ast.BinOp(target, op, value), statement)
                    self.assign(target, self.value(whole, names), names)
                case ast.Global(names=words):
                    for word in words:
                        names.maps[-1][word] = Unknown("assigned in a function")
                case _:
                    self.follow_block(statement, names)

    def follow_block(self, statement: ast.stmt, names: Names) -> None:
        """Follow the expressions of a statement and the statements within it, which may not run."""
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.withitem):
                self.value(part.context_expr, names)
                if part.optional_vars is not None:
                    self.assign(part.optional_vars, self.unknown(part.context_expr), names)
            elif isinstance(part, ast.expr) and not isinstance(
                getattr(part, "ctx", None), ast.Store
            ):
                self.value(part, names)
        if isinstance(statement, ast.For | ast.AsyncFor):
            self.assign(statement.target, Unknown("a loop's variable"), names)
        tests = ast.walk(statement.test) if isinstance(statement, ast.If) else ()
        is_main = any(isinstance(node, ast.Name) and node.id == "__name__" for node in tests)
        bodies = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        bodies += [one.body for one in getattr(statement, "handlers", [])]
        bodies += [one.body for one in getattr(statement, "cases", [])]
        was_loaded = self.is_loaded
        self.is_loaded = was_loaded and not is_main
        for body in bodies:
            if isinstance(statement, ast.With | ast.AsyncWith) or (is_main and body is bodies[0]):
                self.follow(body, names)
                continue
            inside = names.new_child()
            self.follow(body, inside)
            for name, value in inside.maps[0].items():
                why = Unknown(
                    f"{name}, which is assigned under a condition in line {statement.lineno}"
                )
                is_made = isinstance(value, Object) and (value.is_name or value.function)
                names[name] = value if is_made else why
        self.is_loaded = was_loaded

    def assign(self, target: ast.expr, value: Any, names: Names) -> None:
        """Assign a value to a name, to each of several, or to an attribute of an object."""
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                items = (
                    value
                    if isinstance(value, list) and len(value) == len(parts)
                    else [value] * len(parts)
                )
                for part, item in zip(parts, items, strict=True):
                    self.assign(part, item, names)
            case ast.Attribute(value=of, attr=name):
                found = self.value(of, names)
                if isinstance(found, Object):
                    is_sure = (
                        len(names.maps) == 1 or isinstance(of, ast.Name) and of.id in names.maps[0]
                    )
                    why = Unknown(f"assigned under a condition in line {target.lineno}")
                    found.arguments[name] = Argument(value if is_sure else why, target.lineno)
            case ast.Subscript(value=ast.Name(id=name)):
                names[name] = Unknown(f"{name}, which line {target.lineno} changes")

    # -- values

    def value(self, node: ast.expr, names: Names) -> Any:
        """The value of an expression: a constant, a list or table of values, an Object or Unknown."""
        try:
            value = self.computed(node, names)
        except (NotConstant, TypeError, ValueError, ArithmeticError, LookupError):
            return self.unknown(node)
        if isinstance(value, int) and value.bit_length() > 3 * MAX_DIGITS:
            return Unknown(f"a number of more than {MAX_DIGITS} digits")
        self.count(len(value) if isinstance(value, list | dict) else 1)
        self.count(len(value) // 16 if isinstance(value, str) else 0)
        return value

    def constant(self, value: Any) -> Any:
        """A value as a constant, a list or a table. Raises NotConstant."""
        self.count(1)
        if isinstance(value, Unknown):
            raise NotConstant(value.why)
        if isinstance(value, Object):
            owner = value.name.split(".")[-2:][0]
            if value.is_name and owner in ENUMERATIONS:
                return value.last.lower()
            if value.is_name and owner in ("torch", "TaskType"):
                return value.last
            raise NotConstant(f"computed by the script: {value.text or value.name}")
        if isinstance(value, dict):
            return {name: self.constant(one) for name, one in value.items()}
        return [self.constant(one) for one in value] if isinstance(value, list) else value

    def computed(self, node: ast.expr, names: Names) -> Any:
        """``value``, with errors as the operations raise them."""
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
            case ast.Name(id=name):
                return names.get(name) if name in names else Object(name, node.lineno, is_name=True)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [self.value(one, names) for one in parts]
            case ast.Dict(keys=keys, values=values):
                table: dict[str, Any] = {}
                for key, value in zip(
                    keys, (self.value(one, names) for one in values), strict=True
                ):
                    table |= (
                        value
                        if key is None
                        else {str(self.constant(self.value(key, names))): value}
                    )
                return table
            case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
                value = self.constant(self.value(operand, names))
                return -value if isinstance(op, ast.USub) else not value
            case ast.BinOp(left=left, op=op, right=right):
                parts = [self.constant(self.value(one, names)) for one in (left, right)]
                return operate(op, *parts)
            case ast.JoinedStr(values=parts):
                return "".join(str(self.constant(self.value(one, names))) for one in parts)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                return self.constant(self.value(inner, names))
            case ast.Subscript(value=inner, slice=key):
                of, at = self.value(inner, names), self.value(key, names)
                if isinstance(of, Object):
                    return Object(
                        "[]", node.lineno, self.text(node), {"0": Argument(at, node.lineno)}, of
                    )
                return of[at]
            case ast.Attribute(value=inner, attr=name):
                return self.attribute(self.value(inner, names), name, node)
            case ast.Call():
                return self.call(node, names)
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.value(part, names)  # for the calls in it
        return self.unknown(node)

    def attribute(self, of: Any, name: str, node: ast.expr) -> Any:
        """An attribute of an object: what is assigned to it or given to its call, or an option with its default."""
        if not isinstance(of, Object):
            return self.unknown(node)
        if name in of.arguments:
            return of.arguments[name].value
        if of.is_name:
            return Object(f"{of.name}.{name}", node.lineno, is_name=True)
        call = of.of if of.name == "[]" else of
        if isinstance(call, Object) and call.last in PARSES and isinstance(call.of, Object):
            classes = call.of.arguments.get("0", call.of.arguments.get("dataclass_types"))
            kinds = (
                classes.value
                if classes and isinstance(classes.value, list)
                else [classes and classes.value]
            )
            for owner in (call.of, *kinds):
                if isinstance(owner, Object) and name in owner.arguments:
                    value, line = owner.arguments[name]
                    what = f"{name} is its default, which the command line may replace"
                    self.assumed.append(f"{self.path.name}:{line}: {what}")
                    return value
        return self.unknown(node)

    def call(self, node: ast.Call, names: Names) -> Any:
        """What a call returns: a constant of a function that is known, else an object."""
        func, of = node.func, None
        if isinstance(func, ast.Attribute):
            of = self.value(func.value, names)
            callee = self.attribute(of, func.attr, func)
        else:
            callee = self.value(func, names)
        name = callee.name if isinstance(callee, Object) else getattr(func, "attr", "")
        given = {
            str(n): Argument(self.value(one, names), one.lineno) for n, one in enumerate(node.args)
        }
        for one in node.keywords:
            value = self.value(one.value, names)
            table = (
                value if one.arg is None and isinstance(value, dict) else {one.arg or "**": value}
            )
            given |= {key: Argument(item, one.value.lineno) for key, item in table.items()}
        values = [one.value for one in given.values()]
        if name == "dict" and "0" not in given and "**" not in given:
            return {key: one.value for key, one in given.items()}
        if name in FUNCTIONS and not node.keywords:
            return FUNCTIONS[name](*map(self.constant, values))
        if name.rpartition(".")[2] == "field" and "default" in given:
            return given["default"].value
        if name in CHANGES and isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            names[func.value.id] = Unknown(f"{func.value.id}, which line {node.lineno} changes")
        if name == "add_argument" and isinstance(of, Object):
            option = max((str(one) for one in values if isinstance(one, str)), key=len, default="")
            switch = Argument("store_false" in values, node.lineno) if "action" in given else None
            default = given.get("default", switch)
            if default is not None:
                of.arguments[option.lstrip("-").replace("-", "_")] = default
        if isinstance(callee, Object) and callee.is_name:
            given = callee.arguments | given
        call = Object(name, node.lineno, self.text(node), given, of, is_loaded=self.is_loaded)
        self.calls.append(call)
        return call


def operate(op: ast.operator, left: Any, right: Any) -> Any:
    """Compute an operation whose result is not large. Raises TypeError or ValueError."""
    if isinstance(op, ast.Div) and isinstance(left, str):
        return posixpath.join(left, right)
    if isinstance(left, str | list) and not isinstance(op, ast.Add):
        raise TypeError
    if isinstance(op, ast.Pow) and not (abs(right) < 100 and abs(left) < 2**32):
        raise ValueError
    return OPERATIONS[type(op)](left, right)
