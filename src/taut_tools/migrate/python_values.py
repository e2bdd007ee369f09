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

MAX_SIZE, MAX_SHOWN = 400_000, 60
"""Maximum entries and characters of all values of a script, and characters of it in a message."""
OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    **ARITHMETIC,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (int, float, str, max, min, len, list)},
    "os.path.join": posixpath.join,
}
PARSES = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
CHANGES = ("update", "append", "extend", "insert", "pop", "remove", "clear", "setdefault")
Names: TypeAlias = ChainMap[str, Any]


class Unknown(Exception):
    """A value that is not known without running the script, with the reason as a noun."""


@dataclass(eq=False)
class Object:
    """What a call returns, a class or a function of the script, or a name of another module."""

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
    def parts(self) -> tuple[str, str]:
        """The last two parts of the name, of which the first may be empty."""
        return tuple(["", *self.name.split(".")][-2:])  # type: ignore[return-value]


class Argument(NamedTuple):
    """A value with the line in which it is given."""

    value: Any
    line: int


class Script:
    """A script that was followed from its first to its last statement."""

    def __init__(self, text: str, path: Path) -> None:
        """Follow a script. Raises ConfigError where it is no Python."""
        self.path, self.lines = path, [line.encode() for line in text.split("\n")]
        self.calls: list[Object] = []
        self.assumed: list[str] = []
        self.size, self.is_loaded = 0, True
        self.later: list[tuple[list[ast.stmt], Names]] = []
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(text.removeprefix("\ufeff"))
        except (SyntaxError, ValueError, MemoryError) as error:  # a null byte; the parser's stack
            line, why = getattr(error, "lineno", 1), getattr(error, "msg", str(error))
            what = f"is not Python 3 ({why or 'it is nested too deeply'}); put the line right"
            raise ConfigError(f"{path}:{line or 1} {what}") from error
        self.follow(tree.body, ChainMap())
        self.is_loaded = False
        while self.later:
            self.follow(*self.later.pop(0))

    def count(self, number: int) -> None:
        """Count entries and characters of values, which can double with each statement. Raises ConfigError."""
        self.size += number
        if self.size > MAX_SIZE:
            what = f"the values of {self.path} have more than {MAX_SIZE:,} entries"
            raise ConfigError(f"{what}; expected constants; write them out")

    def text(self, node: ast.expr) -> str:
        """The beginning of an expression, as it is written."""
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        return self.lines[node.lineno - 1][node.col_offset : end].decode()[:MAX_SHOWN]

    def unknown(self, node: ast.expr) -> Unknown:
        """A value that the script computes."""
        return Unknown(f"computed by the script: {self.text(node)}")

    # -- statements

    def follow(self, body: list[ast.stmt], names: Names) -> None:
        """Follow statements, which assign ``names``."""
        for statement in body:
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    is_top = self.is_loaded and len(names.maps) == 1
                    made = Object(name, statement.lineno, function=statement, is_loaded=is_top)
                    names[name] = made
                    inner = names.new_child()
                    for node in ast.walk(statement):
                        if isinstance(node, ast.arg):
                            inner[node.arg] = Unknown(f"an argument of {name}")
                        elif isinstance(node, ast.Global):
                            known = dict.fromkeys(node.names, Unknown(f"assigned in {name}"))
                            names.maps[-1].update(known)
                    self.later.append((statement.body, inner))
                case ast.ClassDef(name=name, lineno=line):
                    inside = names.new_child()
                    self.follow(statement.body, inside)
                    fields = {key: Argument(one, line) for key, one in inside.maps[0].items()}
                    names[name] = Object(name, line, arguments=fields, is_name=True)
                case ast.Import(names=parts) | ast.ImportFrom(names=parts):
                    module = getattr(statement, "module", None)
                    for part in parts:
                        name = part.asname or part.name.partition(".")[0]
                        full = f"{module}.{part.name}" if module else part.name
                        full = full if module or part.asname else name
                        names[name] = Object(full, statement.lineno, is_name=True)
                case ast.Assign(targets=targets, value=value):
                    found = self.value(value, names)
                    for target in targets:
                        self.assign(target, found, names)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.assign(target, self.value(value, names), names)
                case ast.AugAssign(target=target, lineno=line):
                    self.assign(target, Unknown(f"changed in line {line}"), names)
                case _:
                    self.follow_block(statement, names)

    def follow_block(self, statement: ast.stmt, names: Names) -> None:
        """Follow the expressions of a statement and the statements within it, which may not run."""
        own = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt)]
        is_main = False
        for part in own:
            for node in ast.walk(part) if isinstance(part, ast.expr | ast.withitem) else ():
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names[node.id] = Unknown(f"{node.id}, a variable of line {node.lineno}")
                is_main |= isinstance(node, ast.Name) and node.id == "__name__"
            if isinstance(part, ast.expr):
                self.value(part, names)
        bodies = [getattr(one, "body", []) for one in (statement, *own)]
        bodies += [getattr(statement, name, []) for name in ("orelse", "finalbody")]
        was_loaded, self.is_loaded = self.is_loaded, self.is_loaded and not is_main
        for body in bodies:
            is_sure = isinstance(statement, ast.With) or (is_main and body is bodies[0])
            inside = names if is_sure else names.new_child()
            self.follow(body if isinstance(body, list) else [], inside)
            for name, value in inside.maps[0].items() if not is_sure else ():
                is_made = isinstance(value, Object) and (value.is_name or value.function)
                why = f"{name}, which is assigned under a condition in line {statement.lineno}"
                names[name] = value if is_made else Unknown(why)
        self.is_loaded = was_loaded

    def assign(self, target: ast.expr, value: Any, names: Names) -> None:
        """Assign a value to a name, to each of several, or to an attribute of an object."""
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                is_list = isinstance(value, list) and len(value) == len(parts)
                whole = value if isinstance(value, Object) else self.unknown(target)
                for number, part in enumerate(parts):
                    self.assign(part, value[number] if is_list else whole, names)
            case ast.Attribute(attr="requires_grad"):
                self.calls.append(
                    Object("requires_grad", target.lineno, self.text(target), of=names)
                )
            case ast.Attribute(value=ast.Name(id=of), attr=name) if isinstance(
                names.get(of), Object
            ):
                late = Unknown(f"assigned under a condition in line {target.lineno}")
                now = Argument(value if of in names.maps[0] else late, target.lineno)
                names[of].arguments[name] = now
            case ast.Subscript(value=ast.Name(id=name)):
                names[name] = Unknown(f"{name}, which line {target.lineno} changes")

    # -- values

    def value(self, node: ast.expr, names: Names) -> Any:
        """The value of an expression: a constant, a list or table of values, an Object or Unknown."""
        try:
            value = self.computed(node, names)
        except ConfigError:
            raise
        except (Unknown, TypeError, ValueError, ArithmeticError, LookupError):
            return self.unknown(node)
        if isinstance(value, int) and value.bit_length() > 3 * MAX_DIGITS:
            return Unknown(f"a number of more than {MAX_DIGITS} digits")
        self.count(len(value) if isinstance(value, list | dict | str) else 1)
        return value

    def constant(self, value: Any) -> Any:
        """A value as a constant, a list or a table. Raises Unknown."""
        self.count(1)
        if isinstance(value, Unknown):
            raise Unknown(*value.args)
        if isinstance(value, Object):
            if value.is_name and value.parts[0] in ("torch", "TaskType"):
                return value.parts[1]
            raise Unknown(f"computed by the script: {value.text or value.name}")
        if isinstance(value, dict):
            return {name: self.constant(one) for name, one in value.items()}
        return [self.constant(one) for one in value] if isinstance(value, list) else value

    def computed(self, node: ast.expr, names: Names) -> Any:
        """``value``, with errors as the operations raise them."""

        def constant(inner: ast.expr) -> Any:
            return self.constant(self.value(inner, names))

        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
            case ast.Name(id=name):
                return names.get(name) if name in names else Object(name, node.lineno, is_name=True)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [self.value(one, names) for one in parts]
            case ast.Dict(keys=keys, values=values):
                table: dict[str, Any] = {}
                for key, inner in zip(keys, values, strict=True):
                    value = self.value(inner, names)
                    table |= value if key is None else {str(constant(key)): value}
                return table
            case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
                value = constant(operand)
                return -value if isinstance(op, ast.USub) else not value
            case ast.BinOp(left=left, op=op, right=right):
                return operate(op, constant(left), constant(right))
            case ast.JoinedStr(values=parts):
                return "".join(str(constant(one)) for one in parts)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                return constant(inner)
            case ast.Subscript(value=inner, slice=key):
                of, at = self.value(inner, names), self.value(key, names)
                if not isinstance(of, Object):
                    return of[at]
                given = {"0": Argument(at, node.lineno)}
                is_parsed = of.parts[1] in PARSES
                return of if is_parsed else Object("[]", node.lineno, self.text(node), given, of)
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
        if not isinstance(of, Object) or not (of.is_name or name in of.arguments):
            return self.unknown(node)
        if name not in of.arguments:
            return Object(f"{of.name}.{name}", node.lineno, is_name=True)
        if of.parts[1] in PARSES:
            what = f"{name} is its default, which the command line may replace"
            self.assumed.append(f"{self.path.name}:{of.arguments[name].line}: {what}")
        return of.arguments[name].value

    def call(self, node: ast.Call, names: Names) -> Any:
        """What a call returns: a constant of a function that is known, else an object."""
        func, of = node.func, None
        if isinstance(func, ast.Attribute):
            of = self.value(func.value, names)
            callee = self.attribute(of, func.attr, func)
        else:
            callee = self.value(func, names)
        name = callee.name if isinstance(callee, Object) else getattr(func, "attr", "")
        given: dict[str, Argument] = {}
        named = [(one.arg, one.value) for one in node.keywords]
        for key, part in (*((str(at), one) for at, one in enumerate(node.args)), *named):
            value = self.value(part, names)
            table = value if key is None and isinstance(value, dict) else {key or "**": value}
            given |= {key: Argument(item, part.lineno) for key, item in table.items()}
        # Functions that are known, and those that change what they are called on.
        values = [one.value for one in given.values()]
        if name == "dict" and not given.keys() & {"0", "**"}:
            return {key: one.value for key, one in given.items()}
        if name in FUNCTIONS and not node.keywords:
            return FUNCTIONS[name](*map(self.constant, values))
        if name == "dataclasses.field" and "default" in given:
            return given["default"].value
        if name in CHANGES and isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            names[func.value.id] = Unknown(f"{func.value.id}, which line {node.lineno} changes")
        if name == "add_argument" and isinstance(of, Object):
            flags = (str(one.value) for key, one in given.items() if key.isdigit())
            option = max(flags, key=len, default="")
            if "action" in given:
                given.setdefault("default", Argument("store_false" in values, node.lineno))
            if "default" in given:
                of.arguments[option.lstrip("-").replace("-", "_")] = given["default"]
        # Fields of a class of the script, and of what a parser of the command line makes.
        owners = [callee]
        if name in PARSES and isinstance(of, Object):
            kinds = [
                of.arguments[key].value for key in ("0", "dataclass_types") if key in of.arguments
            ]
            owners = [of, *(kinds[0] if kinds and isinstance(kinds[0], list) else kinds)]
        for owner in owners:
            given = owner.arguments | given if isinstance(owner, Object) else given
        call = Object(name, node.lineno, self.text(node), given, of, is_loaded=self.is_loaded)
        self.calls.append(call)
        return call


def operate(op: ast.operator, left: Any, right: Any) -> Any:
    """Compute an operation whose result is not large. Raises TypeError or ValueError."""
    if isinstance(left, str | list) and not isinstance(op, ast.Add):
        raise TypeError
    if isinstance(op, ast.Pow) and not (abs(right) < 100 and abs(left) < 2**32):
        raise ValueError
    return OPERATIONS[type(op)](left, right)
