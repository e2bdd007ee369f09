"""Keys of a configuration that exclude or need each other, as a table of their class: one sentence and code for each.

    rules: ClassVar[str] = '''
        lag excludes engine=local: the engine in this process cannot generate while its weights train
        max_staleness needs replay_groups
        at most one of warmup_steps warmup_ratio
    '''

A rule is a line (a line that is indented further continues it):

    KEYS excludes OTHERS        each of KEYS with each of OTHERS
    KEYS needs WANTED           each of KEYS without all of WANTED
    required WANTED             none of WANTED
    KEYS unread                 any of KEYS
    at most one of KEYS         two of them; ``exactly one of KEYS``: none of them, too

is an error, with `` where CONDITIONS`` only while all of these hold. After a colon comes the reason ("nothing reads
it" where there is none), and after a semicolon what was expected and what to do, if the sentence made of the rule
does not say it. KEYS and the like are conditions with spaces between them, in keys of the class:

    key             differs from its default
    !key            has its default
    key=a|b key!=a  is one of the values, or is a list or a table with one of them; is not
    key>1 key<=2    is a number above 1; of at most 2
    key=a[name]     the property ``name`` of the table with the key holds; ``key=a`` is how a user makes it hold
    key=a[!name]    the property does not hold; ``key=a`` is a setting with which it does not

``<method>.key`` is a key of the method's own table. `key` in backticks, in a reason or a remedy, is printed with the
path of its table, which a class does not know: ``config.explain`` does. A text, not objects: a rule is one line that
reads as a sentence, and no class imports anything for its table. What it names is asserted where the class is made. The
rules of a class come before those of its bases.

The ``code`` of a broken rule is its keys with a slash between them: ``rollout.lag/rollout.engine``. Names that a user
gave to tables, and numbers of list items, are ``*`` in it.

Imports errors only.
"""

from __future__ import annotations

import json
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, reduce
from itertools import combinations, product
from typing import Any, Literal

from pydantic.fields import FieldInfo

from taut.errors import ConfigError

SHOWN = 80
"""Characters of a key or a value in a message."""
UNREAD = "nothing reads it"
FIXED = ("method",)
"""Keys that the command sets: no remedy changes them."""
BACKTICK = "\ue000"
"""Stands for a backtick in a value, which is no mark of a key."""
METHOD = "<method>"
"""Stands for the name of a run's method, which is also that of the table of its own keys."""

_CONDITION = re.compile(
    r"(?P<bang>!?)(?P<key>[\w.]+)(?:(?P<operator>!=|>=|<=|=|<|>)(?P<values>[^\s\[\]]+))?"
    r"(?:\[(?P<negated>!?)(?P<judge>\w+)\])?"
)
_RULE = re.compile(
    r"(?:(?P<keys>\S.*?) )?(?P<verb>excludes|needs|unread|required|at most one of|exactly one of)(?: (?P<others>.+))?"
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": lambda found, limit: bool(found > limit),
    ">=": lambda found, limit: bool(found >= limit),
    "<": lambda found, limit: bool(found < limit),
    "<=": lambda found, limit: bool(found <= limit),
}
_REQUIRED = object()
"""The default of a key that has none."""


class Conflict(ConfigError):
    """Settings that contradict each other. ``code``: their keys."""

    def __init__(self, text: str, *, keys: Sequence[str] = (), prefix: str = "") -> None:
        """``text``: has the keys in backticks; ``prefix``: the path of their table, with a dot at its end."""
        super().__init__(completed(text, prefix), code="/".join(keys))
        self.text, self.keys = text, tuple(keys)

    def at(self, prefix: str, pattern: str) -> Conflict:
        """The conflict in the table at ``prefix``; ``pattern``: the path as in a code."""
        return Conflict(self.text, keys=[f"{pattern}{key}" for key in self.keys], prefix=prefix)


def conflict(config: Any, keys: str, why: str, remedy: str) -> Conflict:
    """A conflict that needs arithmetic: the keys with their values, the reason, and what was expected and to do."""
    found = [_read_one(key).found(config) for key in keys.split()]
    text = f"{_listed(found)}: {why}; {remedy}"
    return Conflict(text, keys=keys.split())


@dataclass(frozen=True)
class Condition:
    """A condition on one key."""

    key: str
    operator: str = ""
    """Empty: whether the key is set."""
    values: tuple[Any, ...] = ()
    is_unset: bool = False
    judge: str = ""
    """The property that decides."""
    is_negated: bool = False
    """Whether the property may not hold."""

    def holds(self, config: Any) -> bool:
        """Whether a configuration meets the condition."""
        if self.judge:
            *tables, _ = self.key.split(".")
            return bool(getattr(reduce(getattr, tables, config), self.judge)) != self.is_negated
        value = value_of(config, self.key)
        if not self.operator:
            return bool(value != self.default(config)) != self.is_unset
        if self.operator in _COMPARE:
            return value is not None and _COMPARE[self.operator](value, self.values[0])
        values = value.values() if isinstance(value, dict) else value
        found = [*values] if isinstance(value, list | tuple | dict) else [value]
        return any(one in found for one in self.values) == (self.operator == "=")

    @property
    def setting(self) -> str:
        """The setting with which it holds, with its key in backticks."""
        if self.key in FIXED and not self.operator:
            return "some methods"
        values = " or ".join(_plain(value) for value in self.values)
        match self.operator:
            case "=":
                return f"`{self.key}`={values}"
            case "!=":
                return f"`{self.key}` other than {values}"
            case "":
                return f"no `{self.key}`" if self.is_unset else f"`{self.key}`"
        words = {">": "above", ">=": "of at least", "<": "below", "<=": "of at most"}
        return f"`{self.key}` {words[self.operator]} {values}"

    def found(self, config: Any) -> str:
        """The key with its value, as it was typed; empty where it is another key of the class that decides."""
        key = self.decisive(config)
        value = value_of(config, key)
        if self.is_unset or value is None or value == [] or value == {}:
            return "" if self.judge and not self.is_negated else f"no `{key}`"
        if is_table(type(value)):
            return f"`{key}`"
        text = f"{value:g}" if isinstance(value, float) else shortened(one_line(written(value)))
        return f"`{key}`={text.replace('`', BACKTICK)}"

    def decisive(self, config: Any) -> str:
        """The key to name: of a table, a key in it that is set; of a property, a key of the table that is set."""
        key, value = self.key, value_of(config, self.key)
        tables, _, _ = key.rpartition(".")
        is_open = self.judge and tables and value == self.default(config) and self.holds(config)
        if is_open and changed(value_of(config, tables)):
            key, value = tables, value_of(config, tables)
        while is_table(type(value)) and (names := changed(value)):
            key, value = f"{key}.{names[0]}", getattr(value, names[0])
        return key

    def default(self, config: Any) -> Any:
        """The key's default."""
        return default_of(type(config), self.key)

    def undo(self, config: Any) -> str:
        """How a user ends it; empty where the command decides."""
        if self.key in FIXED:
            return ""
        cls, default = type(config), self.default(config)
        if self.judge:
            is_default = self.is_negated  # what the key is set to decides a property
        elif not self.operator:
            is_default = self.is_unset
        elif self.operator in _COMPARE:
            is_default = isinstance(default, int | float) and _COMPARE[self.operator](
                default, self.values[0]
            )
        else:
            is_default = (default in self.values) == (self.operator == "=")
        if not is_default and default is not _REQUIRED:
            return f"leave `{self.decisive(config)}` out"
        if self.operator == "!=" and not self.judge:
            return f"set `{self.key}`={_plain(self.values[0])}"
        choices = [
            _plain(choice)
            for choice in choices_of(annotation_of(cls, self.key.split(".")))
            if self.operator == "=" and choice not in self.values
        ]
        if choices and len(choices) <= 3 and not self.judge:
            return f"set `{self.key}`={' or '.join(choices)}"
        return f"set {'' if self.is_unset else 'another '}`{self.key}`"


@dataclass(frozen=True)
class Rule:
    """One rule: broken where all of ``keys`` and ``when`` hold, and none of ``wanted``."""

    keys: tuple[Condition, ...]
    wanted: tuple[Condition, ...]
    when: tuple[Condition, ...]
    why: str
    remedy: str = ""

    @property
    def kind(self) -> Literal["excludes", "needs", "requires", "unread"]:
        if self.wanted:
            return "needs" if self.keys else "requires"
        return "excludes" if len(self.keys) > 1 else "unread"

    @property
    def code_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.key for one in (*self.keys, *self.wanted)))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return (*self.keys, *self.wanted, *self.when)

    def is_broken(self, config: Any) -> bool:
        return all(one.holds(config) for one in (*self.keys, *self.when)) and not any(
            one.holds(config) for one in self.wanted
        )

    def sentence(self, config: Any) -> str:
        """The message: values found, why they conflict, what was expected and what to do."""
        found = [one.found(config) for one in self.keys]
        if not found:
            found = [f"no {' or '.join(f'`{one.key}`' for one in self.wanted)}"]
        found += [one.found(config) for one in self.when if one.key not in FIXED]
        for one in self.wanted if self.keys else ():
            value = value_of(config, one.key)
            is_typed = value != one.default(config)
            if one.operator and value not in (None, [], {}) and (is_typed or not one.judge):
                found.append(one.found(config))
        why = f": {self.why}" if self.why else ""
        return f"{_listed(found)}{why}; {self.remedy or self._remedy(config)}"

    def _remedy(self, config: Any) -> str:
        ways = [way for one in (*self.keys, *self.when) if (way := one.undo(config))]
        if not self.wanted:
            expected = "expected one of the two; " if len(self.keys) == len(ways) == 2 else ""
            return f"{expected}{_either(ways)}"
        wanted = " or ".join(one.setting for one in self.wanted)
        if not self.keys:
            return f"expected {'one of them' if len(self.wanted) > 1 else 'it'}; set {wanted}"
        ways = [way for one in self.keys if (way := one.undo(config))]
        if not any(one.key in FIXED for one in self.wanted):
            ways.insert(0, "set one" if len(self.wanted) > 1 else "set it")
        return f"expected {wanted}; {_either(ways)}"


_rules: dict[type[Any], tuple[Rule, ...]] = {}
_defaults: dict[tuple[type[Any], str], Any] = {}


def rules_of(cls: type[Any]) -> tuple[Rule, ...]:
    """The rules of a configuration class, and then those of its bases. A class that does not ask for keys names them in
    ``unasked``: nothing that is required of them is.
    """
    if cls not in _rules:
        rules = [rule for line in lines_of(cls) for rule in parse(line)]
        unasked = getattr(cls, "unasked", ())
        _rules[cls] = tuple(one for one in rules if one.keys or one.wanted[0].key not in unasked)
    return _rules[cls]


def lines_of(cls: type[Any]) -> Iterator[str]:
    """The lines of the tables of a class and of its bases, with the name of its method."""
    method = getattr(cls, "method", "")
    for base in cls.__mro__:
        text = textwrap.dedent(vars(base).get("rules", "")).strip()
        for line in re.sub(r"\n[ \t]+", " ", text).splitlines():
            if METHOD not in line or method in fields_of(cls):
                yield line.replace(METHOD, method)


def parse(line: str) -> Iterator[Rule]:
    """The rules of a line, one for each pair of its settings."""
    head, _, rest = line.partition(": ")
    why, _, remedy = rest.partition("; ")
    head, _, conditions = head.partition(" where ")
    match = _RULE.fullmatch(head)
    assert match is not None, f"{head!r} is no rule"
    keys, others, when = _read(match["keys"]), _read(match["others"]), _read(conditions)
    match match["verb"]:
        case "excludes":
            pairs = product(keys, others)
            yield from (Rule(pair, (), when, why or UNREAD, remedy) for pair in pairs)
        case "needs":
            yield from (Rule((key,), others, when, why or UNREAD, remedy) for key in keys)
        case "unread":
            yield from (Rule((key,), (), when, why or UNREAD, remedy) for key in keys)
        case "required":
            yield Rule((), others, when, why, remedy)
        case "at most one of" | "exactly one of":
            yield from (Rule(pair, (), when, why, remedy) for pair in combinations(others, 2))
    if match["verb"] == "exactly one of":
        yield Rule((), others, when, why, remedy)


def install(cls: type[Any]) -> None:
    """Let a configuration class hold its rules to what it is made of, before ``__post_init__`` runs."""
    code = vars(cls).get("__post_init__")
    if code is None and not hasattr(cls, "rules"):
        return

    def __post_init__(self: Any) -> None:
        if type(self) is cls:
            require(self)
        inherited = getattr(super(cls, self), "__post_init__", lambda: None)
        inherited() if code is None else code(self)

    setattr(cls, "__post_init__", __post_init__)  # noqa: B010 (mypy has no such attribute of a type)


def require(config: Any) -> None:
    """Raise Conflict for the first rule that is broken."""
    for rule in rules_of(type(config)):
        if rule.is_broken(config):
            raise Conflict(rule.sentence(config), keys=rule.code_keys)


def verify(cls: type[Any]) -> None:
    """Assert that the rules of a class name keys, values and properties that there are."""
    for one in (one for rule in rules_of(cls) for one in rule.conditions):
        *tables, _ = names = one.key.split(".")
        where, annotation = f"{cls.__name__}.rules: {one.key}", annotation_of(cls, names)
        assert annotation is not None, f"{where} is no key"
        choices = choices_of(annotation)
        for value in one.values if choices and not one.judge else ():
            assert value in choices, f"{where} is never {value!r}"
        table = annotation_of(cls, tables)
        assert not one.judge or hasattr(table, one.judge) or one.judge in fields_of(table), (
            f"{where} is in no table with a property {one.judge}"
        )


def clauses_of(cls: type[Any]) -> dict[str, list[str]]:
    """Key -> the clauses of its class's rules about it, for documentation: ``lag`` -> ``excludes `engine`=local``."""
    said: dict[tuple[str, str], list[str]] = {}

    def add(one: Condition, verb: str, others: Sequence[Condition], link: str, rule: Rule) -> None:
        is_plain = one.setting == f"`{one.key}`" or rule.kind == "requires"
        own = "" if is_plain else f"{one.setting} "
        held = " and ".join(other.setting for other in rule.when)
        when = f"{'in' if held == 'some methods' else 'where'} {held}, " if held else ""
        text = link.join(other.setting for other in others)
        said.setdefault((one.key, f"{when}{own}{verb}"), []).append(text)

    for rule in rules_of(cls):
        for one in rule.keys:
            others = [other for other in rule.keys if other is not one]
            if rule.kind == "unread":
                add(one, "is refused", [], "", rule)
            elif rule.kind == "needs":
                add(one, "needs", rule.wanted, " or ", rule)
            elif one.key not in FIXED:
                add(one, "excludes", others, "", rule)
        for one in rule.wanted if rule.kind == "requires" else ():
            others = [other for other in rule.wanted if other is not one]
            add(one, "required, or" if others else "required", others, " or ", rule)
    clauses: dict[str, list[str]] = {}
    for (key, verb), settings in said.items():
        link = " and " if verb.endswith("needs") else ", "
        clause = f"{verb} {link.join(dict.fromkeys(settings))}"
        clauses.setdefault(key, []).append(clause.rstrip())
    return clauses


def clauses_by_key(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The clauses of a class and of the tables in it, each with its whole key."""
    for key, clauses in clauses_of(cls).items():
        yield from ((f"{prefix}{key}", completed(clause, prefix)) for clause in clauses)
    for name, info in fields_of(cls).items():
        if is_table(info.annotation):
            yield from clauses_by_key(typing.cast(type, info.annotation), f"{prefix}{name}.")


# -- keys and values of a configuration class


def fields_of(cls: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a configclass, by name."""
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    return fields


def is_table(annotation: Any) -> bool:
    """Whether a type is a table: a class of settings."""
    return isinstance(annotation, type) and is_dataclass(annotation)


def annotation_of(cls: type[Any], path: Sequence[str]) -> Any:
    """The type of the field a dotted key names; None where there is none."""
    annotation: Any = cls
    for name in path:
        if is_table(annotation) and name in fields_of(annotation):
            annotation = fields_of(annotation)[name].annotation
        else:
            annotation = annotation_of_values(annotation)
    return annotation


def annotation_of_values(annotation: Any) -> Any:
    """The type of the values of ``dict[str, X] | None``; None for what is no such thing."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    types = [annotation_of_values(branch) for branch in typing.get_args(annotation)]
    return next((value for value in types if value is not None), None)


def choices_of(annotation: Any) -> list[Any]:
    """The values that a field of literals, true or false, and none has; empty for any other."""
    if annotation is bool:
        return [True, False]
    if annotation is type(None):
        return [None]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return [*arguments]
    if typing.get_origin(annotation) is typing.Annotated:
        return choices_of(arguments[0])
    branches = [choices_of(branch) for branch in arguments]
    return [one for branch in branches for one in branch] if branches and all(branches) else []


def changed(config: Any, keys: Iterable[str] | None = None) -> list[str]:
    """The keys, of these or of all, whose values are not the defaults."""
    fields = fields_of(type(config))
    return [
        key
        for key in (fields if keys is None else keys)
        if getattr(config, key) != fields[key].get_default(call_default_factory=True)
    ]


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def default_of(cls: type[Any], key: str) -> Any:
    """The default of a dotted key; ``_REQUIRED`` where there is none."""
    if (cls, key) not in _defaults:
        _defaults[cls, key] = _default_of(cls, key)
    return _defaults[cls, key]


def _default_of(cls: type[Any], key: str) -> Any:
    first, *rest = key.split(".")
    info = fields_of(cls)[first]
    if not info.is_required():
        return reduce(getattr, rest, info.get_default(call_default_factory=True))
    return default_of(typing.cast(type, info.annotation), ".".join(rest)) if rest else _REQUIRED


def written(value: Any) -> str:
    """A value as ``describe`` writes defaults: text as it is, but white space in quotes; else JSON."""
    if isinstance(value, str) and value.strip():
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=_as_mapping)


def one_line(text: str) -> str:
    """A text with what is no printable character escaped."""
    return text if text.isprintable() else json.dumps(text)[1:-1]


def shortened(text: str) -> str:
    """A text of at most SHOWN characters."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _as_mapping(value: Any) -> Any:
    import pydantic

    return pydantic.TypeAdapter(type(value)).dump_python(value, mode="json")


def _read(text: str | None) -> tuple[Condition, ...]:
    return tuple(_read_one(word) for word in (text or "").split())


@cache
def _read_one(word: str) -> Condition:
    match = _CONDITION.fullmatch(word)
    assert match is not None, f"{word!r} is no condition"
    values = tuple(_value(one) for one in match["values"].split("|")) if match["values"] else ()
    return Condition(
        match["key"],
        match["operator"] or "",
        values,
        is_unset=bool(match["bang"]),
        judge=match["judge"] or "",
        is_negated=bool(match["negated"]),
    )


def _value(text: str) -> Any:
    words = {"true": True, "false": False}
    if text in words:
        return words[text]
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", text)
    return text if not is_number else float(text) if "." in text else int(text)


def _plain(value: Any) -> str:
    return written(value) if not isinstance(value, float) else f"{value:g}"


def _listed(found: Sequence[str]) -> str:
    """Settings as one phrase: ``a=1 with b=2 and no c``, ``a=1 without b or c``."""
    first, *others = dict.fromkeys(filter(None, found))
    missing = [one.removeprefix("no ") for one in others if one.startswith("no `")]
    if not others:
        return first
    if len(missing) == len(others):
        return f"{first} without {' or '.join(missing)}"
    return f"{first} with {' and '.join(others)}"


def _either(ways: Sequence[str]) -> str:
    """Join alternatives to one phrase: ``set a=1, or leave b or c out``."""
    left = [way.removeprefix("leave ").removesuffix(" out") for way in ways if way[:6] == "leave "]
    others = [way for way in ways if way[:6] != "leave "]
    return ", or ".join([*others, *([f"leave {' or '.join(left)} out"] if left else [])])


def completed(text: str, prefix: str) -> str:
    """``text`` with ``prefix`` before the keys that are in backticks, and without these."""
    whole = re.sub(r"`([a-z_][\w.]*)`", lambda match: f"{prefix}{match[1]}", text)
    return whole.replace(BACKTICK, "`")
