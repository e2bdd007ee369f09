"""How a framework is asked: which words start it, what its options are called, and what they are called elsewhere.

A ``Dialect`` is one framework's answers; ``read`` makes a recipe of a file with them. A file of settings alone does not
say which method it is for: the options it has, then its name, then sft; where that leaves several, it is an error.

Imports errors, ``recipe.py``, ``files.py`` and ``script.py``. ``examine.py`` imports it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from taut.errors import ConfigError
from taut.migrate.files import SUFFIXES, read_settings, read_text
from taut.migrate.recipe import Framework, Method, Recipe, Setting, Unknown, flattened, parsed
from taut.migrate.script import Word, commands, pairs

PARENTS = 6
"""How many directories above a script a file it names is looked for."""


class Found(NamedTuple):
    """Where a command turns into the framework's own words."""

    method: Method | None
    at: int
    """Index of the first word that is an option."""
    is_script: bool = False


class Release(NamedTuple):
    """A version, and why it is taken to be this one."""

    version: str
    reason: str


@dataclass(frozen=True)
class Dialect:
    """One framework's way of being asked."""

    name: Framework
    library: str
    find: Callable[[Sequence[str]], Found | None]
    """The words of a command -> where this framework's begin; None: it is another command."""
    methods: tuple[Method, ...]
    release: Callable[[Mapping[str, Setting]], Release]
    """The settings -> the version, where the recipe's caller does not say it."""
    options_of: str
    """The release whose options are known."""
    model: tuple[str, ...]
    """Options that name the model, the one in use first."""
    data: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options -> the one that traps know. A later setting of either holds."""
    method_of: Callable[[Mapping[str, Setting]], Method | None] = lambda settings: None
    """Which method the settings themselves name."""
    prefers_alias: frozenset[str] = frozenset()
    """Aliases that win over the option itself, wherever they stand."""
    environment: str = ""
    """The key of a file under which it sets environment variables."""


class _Read(NamedTuple):
    """Settings in the order in which they take effect."""

    settings: list[Setting]
    unread: list[str]
    in_file: frozenset[str]


def read(dialect: Dialect, path: Path, method: str | None, version: str | None) -> Recipe:
    """The recipe in a file. Raises ConfigError where there is none."""
    if path.suffix in SUFFIXES:
        content = read_settings(path)
        keys = frozenset(one.key for one in content.settings)
        taken = _Read(content.settings, content.unread, keys)
        recipe = _recipe(dialect, taken, path, (method, version), place=path.name)
        _require_known(recipe, keys, path)
        return recipe
    return _read_script(dialect, path, (method, version))


def _require_known(recipe: Recipe, keys: frozenset[str], path: Path) -> None:
    """Refuse a file that is something else: accelerate's configuration, another framework's recipe."""
    unknown = [one.key for one in recipe.unknown]
    whole = [key for key in keys if "." not in key or recipe.framework == "openrlhf"]
    if len(unknown) > len(whole) / 2:
        raise ConfigError(
            f"{path}: {len(unknown)} of {len(whole)} keys are no options of {recipe.options_of} "
            f"({', '.join(unknown[:3])}); expected a recipe of {recipe.framework}"
        )


def _read_script(dialect: Dialect, path: Path, said: tuple[str | None, str | None]) -> Recipe:
    found = [
        (words, exported, anchor)
        for words, exported in commands(read_text(path), path.name)
        if (anchor := dialect.find([word.text for word in words])) is not None
    ]
    if not found:
        raise ConfigError(
            f"{path} has no command of {dialect.name}; expected a YAML or JSON file of settings, or a script with one"
        )
    words, exported, anchor = found[0]
    taken = _options(words[anchor.at :], path)
    others = [f"{path.name}:{more[0].line}: another command, not read" for more, *_ in found[1:]]
    environment = {
        name: Setting(name, word.text, f"{path.name}:{word.line}", word.obstacle)
        for name, word in exported.items()
    }
    for word in words[: anchor.at]:
        if _assigns(word):
            name, _, value = word.text.partition("=")
            environment[name] = Setting(name, value, f"{path.name}:{word.line}", word.obstacle)
    launcher = tuple(word.text for word in words[: anchor.at] if not _assigns(word))
    return _recipe(
        dialect,
        taken._replace(unread=[*taken.unread, *others]),
        path,
        (said[0] or anchor.method, said[1]),
        place=f"{path.name}:{words[max(anchor.at - 1, 0)].line}",
        launcher=launcher,
        is_script=anchor.is_script,
        has_command=True,
        environment=environment,
    )


def _assigns(word: Word) -> bool:
    name, equals, _ = word.text.partition("=")
    return bool(equals) and name.isidentifier()


def _options(words: list[Word], path: Path) -> _Read:
    """The options of a command, those of the files it names first."""
    from_files, own = list[Setting](), list[Setting]()
    unread = list[str]()
    for option, values in pairs(words):
        place = f"{path.name}:{(option if option.text else values[0]).line}"
        key = option.text.lstrip("-").replace("-", "_")
        if key == "config" or (not key and values[0].text.endswith(SUFFIXES)):
            _follow(values[0] if values else option, path, place, from_files, unread)
        elif key:
            own += flattened(_setting(key, values, place))
        else:
            unread += [f"{place}: {word.text!r} is no option" for word in values]
    unread += [f"{one.place}: {one.key} is {one.obstacle}" for one in own if one.obstacle]
    return _Read([*from_files, *own], unread, frozenset(one.key for one in from_files))


def _follow(word: Word, path: Path, place: str, settings: list[Setting], unread: list[str]) -> None:
    """The settings of a file that a command names."""
    inner = None if word.obstacle else find_near(path, word.text)
    if inner is None:
        unread.append(f"{place}: {word.text} is not here; its settings are not known")
        settings.append(Setting("config", word.text, place, "not here"))
        return
    content = read_settings(inner)
    settings += [Setting("config", word.text, place), *content.settings]
    unread += content.unread


def find_near(path: Path, name: str) -> Path | None:
    """A file that a script names: from here, from where it stands, or from a directory above."""
    above = [path.parent, *path.resolve().parents[1 : PARENTS + 1]]
    candidates = (Path(name), *(directory / name for directory in above))
    return next((one for one in candidates if one.is_file()), None)


def _setting(key: str, values: list[Word], place: str) -> Setting:
    """One option with what follows it; an option alone is true."""
    obstacle = ", ".join(dict.fromkeys(word.obstacle for word in values if word.obstacle))
    told = [parsed(word.text) for word in values]
    value = True if not told else told[0] if len(told) == 1 else told
    return Setting(key, value, place, obstacle)


def _recipe(
    dialect: Dialect,
    taken: _Read,
    path: Path,
    said: tuple[str | None, str | None],
    environment: Mapping[str, Setting] | None = None,
    **about: Any,
) -> Recipe:
    method, version = said
    variables = {
        name: one._replace(key=name)
        for one in taken.settings
        if dialect.environment
        and (name := one.key.removeprefix(f"{dialect.environment}.")) != one.key
    }
    settings = [one for one in taken.settings if one.key.partition(".")[0] != dialect.environment]
    taken = taken._replace(settings=settings)
    given = {one.key: one for one in taken.settings}
    named = {key: one for one in taken.settings for key, one in _named(dialect, one)}
    for alias in dialect.prefers_alias & given.keys():
        key = dialect.aliases[alias]
        named[key] = given[alias]._replace(key=key)
    release = Release(version, "as asked") if version else dialect.release(named | given)
    chosen, reason = _method(dialect, method, named, given, path)
    known = options(dialect.name, chosen)
    unknown = [
        Unknown(key, one.place, _nearest(key, known), key in taken.in_file)
        for key, one in given.items()
        if "." not in key or dialect.name == "openrlhf"
        if key not in known and key not in dialect.aliases
        if key.removeprefix("no_") not in known
    ]
    return Recipe(
        framework=dialect.name,
        library=dialect.library,
        options_of=dialect.options_of,
        version=release.version,
        version_reason=release.reason,
        method=chosen,
        method_reason=reason,
        settings=named,
        model=_first(named, dialect.model),
        data=_first(named, dialect.data),
        unread=tuple(taken.unread),
        unknown=tuple(unknown),
        environment=variables | dict(environment or {}),
        **about,
    )


def _named(dialect: Dialect, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """A setting under the name that traps know; ``no_KEY`` switches KEY off."""
    key = dialect.aliases.get(setting.key, setting.key)
    yield key, setting._replace(key=key)
    if setting.key.startswith("no_") and setting.value is True:
        yield key.removeprefix("no_"), Setting(key.removeprefix("no_"), False, setting.place)


def _first(settings: Mapping[str, Setting], keys: tuple[str, ...]) -> str | None:
    """The first of the keys that is set to something known, as text."""
    for key in keys:
        setting = settings.get(key)
        if setting is not None and not setting.obstacle and setting.value:
            value = setting.value
            return str(value[0] if isinstance(value, list) and len(value) == 1 else value)
    return None


def _method(
    dialect: Dialect,
    said: str | None,
    settings: Mapping[str, Setting],
    given: Mapping[str, Setting],
    path: Path,
) -> tuple[Method, str]:
    """The method and how it is known. Raises ConfigError where several are as likely."""
    named = dialect.method_of(settings)
    if named is not None or said is not None:
        told = named or said
        for method in dialect.methods:
            if method == told:
                return method, "the recipe names it"
        choices = ", ".join(dialect.methods)
        raise ConfigError(f"found method {told} for {dialect.name}; expected one of {choices}")
    counts = {
        method: len(given.keys() & options(dialect.name, method)) for method in dialect.methods
    }
    best = [method for method in dialect.methods if counts[method] == max(counts.values())]
    words = re.findall("[a-z]+", f"{path.parent.name} {path.name}".lower())
    hinted = [method for method in best if method in words and method != "other"]
    if len(best) == 1:
        return best[0], "the options it has"
    if len(hinted) == 1:
        return hinted[0], "the file's name"
    if "sft" in best:
        return "sft", "no option of it belongs to another method"
    raise ConfigError(
        f"{path} may be for {' or '.join(best)}; say which: --recipe {dialect.name}.{best[0]}:{path}"
    )


def _nearest(key: str, known: frozenset[str]) -> str | None:
    return next(iter(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)), None)


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    text = files("taut.migrate").joinpath("table/options.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, list[str]]] = json.loads(text)
    return table


@cache
def options(framework: str, method: str) -> frozenset[str]:
    """Every option a framework has for a method, as far as known."""
    table = _table()[framework]
    names = [name for part in ("*", method, "flat") for name in table.get(part, [])]
    return frozenset(" ".join(names).split())
