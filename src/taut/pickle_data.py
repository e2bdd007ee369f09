"""A pickle read as plain data: nothing it names is imported, called, or given attributes.

``read`` interprets the opcodes that torch's checkpoint index and ``torch.save`` are made of, and refuses all others. A
class or function becomes a ``Name``; what a pickle would construct or call becomes a ``Record`` of that name, its
arguments and its state (what BUILD would set). Who reads a pickle then takes from the records what it expects, and
nothing else. pickle.Unpickler with an allow-list does not suffice: BUILD sets attributes of the allowed classes
themselves, a memo index makes it allocate gigabytes, and hashing a deeply nested key overflows the stack.

Time and memory are proportional to the length of the pickle. Imports nothing of ours. Anyone may import it.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE"),
)
EMPTY: dict[str, type[Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotData(ValueError):
    """A pickle that does more than describe data, or is damaged."""


class Name(NamedTuple):
    """A class or function that a pickle names; it is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """What a pickle would construct (NEWOBJ), call (REDUCE) or load by an id (BINPERSID, without a name)."""

    name: Name | None
    arguments: Any
    state: Any = None


def read(content: bytes) -> Any:
    """The value that ``content`` describes. Raises NotData."""
    try:
        return _interpret(content)
    except NotData:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
    ) as error:  # pickletools; a stack or memo without what is taken
        raise NotData(f"it is damaged ({' '.join(str(error).split())[:200]})") from error


def _interpret(content: bytes) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []
    """The stacks under each open MARK."""
    memo: dict[int, Any] = {}
    argument: Any
    items: Any
    for opcode, argument, _ in pickletools.genops(content):
        operation = opcode.name
        if operation in ("PROTO", "FRAME"):
            continue
        if operation in LITERALS:
            stack.append(argument)
        elif operation in CONSTANTS:
            stack.append(CONSTANTS[operation])
        elif operation in EMPTY:
            stack.append(EMPTY[operation]())
        elif operation == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif operation in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif operation in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif operation == "MARK":
            below.append(stack)
            stack = []
        elif operation == "TUPLE":
            items = tuple(stack)
            stack = below.pop()
            stack.append(items)
        elif operation in TUPLE_SIZES:
            stack.append(tuple(_take(stack, TUPLE_SIZES[operation])))
        elif operation == "APPEND":
            (item,) = _take(stack, 1)
            _top(stack, list).append(item)
        elif operation == "APPENDS":
            items, stack = stack, below.pop()
            _top(stack, list).extend(items)
        elif operation == "SETITEM":
            items = _take(stack, 2)
            _set_items(_top(stack, dict), items)
        elif operation == "SETITEMS":
            items, stack = stack, below.pop()
            _set_items(_top(stack, dict), items)
        elif operation == "GLOBAL":
            module, _, name = argument.partition(" ")
            stack.append(Name(module, name))
        elif operation == "STACK_GLOBAL":
            module, name = _take(stack, 2)
            if not (type(module) is str and type(name) is str):
                raise NotData("it names a class by something other than text")
            stack.append(Name(module, name))
        elif operation in ("NEWOBJ", "REDUCE"):
            called, arguments = _take(stack, 2)
            if type(called) is not Name or type(arguments) is not tuple:
                raise NotData(
                    f"{operation} of a {type(called).__name__}; expected a name and a tuple"
                )
            stack.append(Record(called, arguments))
        elif operation == "BINPERSID":
            stack.append(Record(None, *_take(stack, 1)))
        elif operation == "BUILD":
            (state,) = _take(stack, 1)
            record = _top(stack, Record)
            if record.state is not None:
                raise NotData(f"it sets the state of a {record.name} twice")
            record.state = state
        elif operation == "STOP":
            (value,) = _take(stack, 1)
            return value
        else:
            raise NotData(f"it has the operation {operation}, which describes no data")
    raise NotData("it ends before its value")


def _take(stack: list[Any], count: int) -> list[Any]:
    """Remove the last ``count`` items of the stack."""
    if len(stack) < count:
        raise NotData("it takes more than there is")
    items = stack[-count:]
    del stack[-count:]
    return items


def _top(stack: list[Any], kind: type[Any]) -> Any:
    if not stack or type(stack[-1]) is not kind:
        found = type(stack[-1]).__name__ if stack else "nothing"
        raise NotData(f"it adds to a {found}; expected a {kind.__name__}")
    return stack[-1]


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    for key, value in zip(keys, values, strict=True):
        if type(key) not in (str, int, Record):  # hashing a tuple goes as deep as it is nested
            raise NotData(f"a key is a {type(key).__name__}; expected text or a record")
        target[key] = value
