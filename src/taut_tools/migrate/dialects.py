"""Read recipes of TRL, open-r1, ms-swift, OpenRLHF, LLaMA-Factory and axolotl.

A ``Dialect`` has the commands that start a framework, the names of its options, and their aliases; ``read_recipe``
makes a ``Recipe`` of a settings file or a shell script. The method of a settings file that does not name it follows
from its options, else from the file's name, else it is sft; if several methods remain, that is an error.

``table/dialects.toml`` has the dialects, ``table/options.json`` the options of each framework and method,
``table/aliases.toml`` other names of options.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from taut.errors import ConfigError
from taut_tools.migrate.python_script import PythonRecipe
from taut_tools.migrate.recipe import (
    SUFFIXES,
    Framework,
    Method,
    Recipe,
    Setting,
    Unknown,
    flattened,
    parsed,
    read_settings,
    read_text,
)
from taut_tools.migrate.script import Word, commands, pairs

PARENTS = 6
"""Number of directories above a script that are searched for a file that it names."""


class Start(NamedTuple):
    """Words after which the framework's own options begin in a command."""

    words: str
    """Regular expression for one word, or for two with a space between them. Its group ``name`` is a method or a name
    in ``Dialect.method_names``."""
    is_script: bool = False


class Found(NamedTuple):
    """The place in a command at which the framework's own options begin."""

    method: Method | None
    at: int
    """Index of the first option."""
    is_script: bool
    name: str
    """Name of the command or the script."""


class Release(NamedTuple):
    """A version, and the reason for assuming it."""

    version: str
    reason: str


@dataclass(frozen=True)
class Dialect:
    """The commands and options of one framework."""

    name: Framework
    library: str
    starts: tuple[Start, ...]
    methods: tuple[Method, ...]
    newest: Release
    """Release that is assumed if neither the caller nor the settings state one."""
    options_of: str
    """Release whose options are known."""
    model: tuple[str, ...]
    """Options that name the model, the current name first."""
    data: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The name that traps use, by another name of the option. The later of the two settings holds."""
    method_of: Callable[[Mapping[str, Setting]], Method | None] = lambda settings: None
    """Finds the method that the settings themselves name."""
    release_of: Callable[[Mapping[str, Setting]], Release | None] = lambda settings: None
    """Finds the release that the names of the settings reveal."""
    prefers_alias: frozenset[str] = frozenset()
    """Aliases that win over the option itself in any order."""
    environment: str = ""
    """Key of a settings file under which it sets environment variables."""
    method_names: Mapping[str, Method | None] = field(default_factory=dict)
    """Methods of commands that have other names, or None if the options tell the method."""
    more_methods: tuple[Method, ...] = ()
    """Methods that are never guessed from the options of a settings file."""
    scripts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings in the code of scripts, by the script's name, which the command may replace."""
    hoists: tuple[str, ...] = ()
    """Tables of a settings file whose entries are options of the run."""

    def find_start(self, words: Sequence[str]) -> Found | None:
        """The place at which this framework's options begin in a command; None for another command."""
        for at, (word, after) in enumerate(zip(words, (*words[1:], ""), strict=True)):
            for start in self.starts:
                num_words = 1 + start.words.count(" ")
                text = word if num_words == 1 else f"{word} {after}"
                match = re.fullmatch(start.words, text, re.DOTALL)
                if match is None:
                    continue
                names: dict[str, Method | None] = {
                    method: method for method in (*self.methods, *self.more_methods)
                }
                names |= self.method_names
                name = match.groupdict().get("name") or ""
                if name in names:
                    return Found(names[name], at + num_words, start.is_script, name)
        return None


def read_recipe(
    dialect: Dialect, path: Path, method: str | None = None, version: str | None = None
) -> Recipe:
    """Read the recipe in a settings file or a script. Raises ConfigError where there is none."""
    # Read the settings of the file, or of the script's first command and the files that it names.
    launch: dict[str, Any]
    environment: dict[str, Setting] = {}
    if path.suffix in SUFFIXES:
        settings, unread = read_settings(path)
        keys_in_file = {setting.key for setting in settings}
        launch = {"place": path.name}
    elif path.suffix == ".py":
        if dialect.name != "trl":
            raise ConfigError(
                f"{path} is Python, which is read of trl and transformers alone; write trl:{path}"
            )
        methods = (*dialect.methods, *dialect.more_methods)
        trains = PythonRecipe(read_text(path), path, _read_table("python"), methods)
        settings, unread, keys_in_file = trains.settings, trains.unread, set()
        method = method or trains.method
        place = f"{path.name}:{trains.call.line}"
        launch = {"place": place, "assumed": tuple(trains.script.assumed)}
    else:
        own_commands = [
            (words, exported, start)
            for words, exported in commands(read_text(path), path.name)
            if (start := dialect.find_start([word.text for word in words])) is not None
        ]
        if not own_commands:
            raise ConfigError(
                f"{path} has no command of {dialect.name}; expected a YAML or JSON file of settings, or a script with "
                "one"
            )
        (words, exported, start), *others = own_commands
        settings, unread, keys_in_file = _read_options(words[start.at :], path)
        unread += [
            f"{path.name}:{other[0].line}: another command, not read" for other, *_ in others
        ]
        assignments = [word for word in words[: start.at] if _assigns(word)]
        variables = [*exported.items()]
        for word in assignments:
            name, _, value = word.text.partition("=")
            variables.append((name, word._replace(text=value)))
        for name, word in variables:
            environment[name] = Setting(name, word.text, f"{path.name}:{word.line}", word.obstacle)
        method = method or start.method
        in_code = dialect.scripts.get(start.name, {}) if start.is_script else {}
        script = f"{start.name}.py"
        settings = [Setting(key, value, script) for key, value in in_code.items()] + settings
        names = re.findall(r"\$\{?(\w+)", read_text(path))
        launch = {
            "expanded": frozenset(names),
            "place": f"{path.name}:{words[max(start.at - 1, 0)].line}",
            "launcher": tuple(word.text for word in words[: start.at] if not _assigns(word)),
            "is_script": start.is_script,
            "has_command": True,
        }
    # Take environment variables out of the settings, and entries out of their tables.
    if dialect.environment:
        prefix = f"{dialect.environment}."
        in_settings = {
            name: setting._replace(key=name)
            for setting in settings
            if (name := setting.key.removeprefix(prefix)) != setting.key
        }
        environment = in_settings | environment
        settings = [
            setting for setting in settings if setting.key.partition(".")[0] != dialect.environment
        ]
    if dialect.hoists:
        settings = [
            setting._replace(key=setting.key.partition(".")[2] or setting.key)
            if setting.key.partition(".")[0] in dialect.hoists
            else setting
            for setting in settings
            if setting.key not in dialect.hoists
        ]
    # Give options the names that traps use.
    by_given_key = {setting.key: setting for setting in settings}
    by_key: dict[str, Setting] = {}
    for setting in settings:
        key = dialect.aliases.get(setting.key, setting.key)
        if (
            setting.key.startswith("no_")
            and setting.value is True
            and not is_option(dialect.name, key)
        ):
            key = key.removeprefix("no_")
            setting = Setting(key, False, setting.place)
        by_key[key] = setting._replace(key=key)
    for alias in dialect.prefers_alias & by_given_key.keys():
        key = dialect.aliases[alias]
        by_key[key] = by_given_key[alias]._replace(key=key)
    # Find release and method, and the keys that are no options of them.
    if version:
        release = Release(version, "as asked")
    else:
        release = dialect.release_of(by_key | by_given_key) or dialect.newest
    chosen, reason = _choose_method(dialect, method, by_key, by_given_key, path)
    known = options(dialect.name, chosen, is_python=path.suffix == ".py")
    counted = [key for key in by_given_key if "." not in key or dialect.name == "openrlhf"]
    unknown = [
        Unknown(
            key,
            by_given_key[key].place,
            next(iter(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)), None),
            key in keys_in_file,
        )
        for key in counted
        if key not in known and key not in dialect.aliases and key.removeprefix("no_") not in known
    ]
    if path.suffix in SUFFIXES:
        # With mostly unknown keys it is accelerate's configuration, or another framework's recipe.
        own_keys = [key for key in keys_in_file if "." not in key or dialect.name == "openrlhf"]
        if len(unknown) > len(own_keys) / 2:
            raise ConfigError(
                f"{path}: {len(unknown)} of {len(own_keys)} keys are no options of {dialect.options_of} "
                f"({', '.join(option.key for option in unknown[:3])}); expected a recipe of {dialect.name}"
            )
    return Recipe(
        framework=dialect.name,
        library=dialect.library,
        options_of=dialect.options_of,
        version=release.version,
        version_reason=release.reason,
        method=chosen,
        method_reason=reason,
        settings=by_key,
        model=_first_text(by_key, dialect.model),
        data=_first_text(by_key, dialect.data),
        unread=tuple(unread),
        unknown=tuple(unknown),
        environment=environment,
        **launch,
    )


def _assigns(word: Word) -> bool:
    name, equals, _ = word.text.partition("=")
    return bool(equals) and name.isidentifier()


def _read_options(words: list[Word], path: Path) -> tuple[list[Setting], list[str], set[str]]:
    """Read the settings of a command after those of the files that it names. Returns the settings, a line for each
    word that is not read, and the keys of the files.
    """
    from_files, from_command = list[Setting](), list[Setting]()
    unread = list[str]()
    for option, values in pairs(words):
        place = f"{path.name}:{(option if option.text else values[0]).line}"
        key = option.text.lstrip("-").replace("-", "_")
        if key == "config" or (not key and values[0].text.endswith(SUFFIXES)):
            word = values[0] if values else option
            inner = None if word.obstacle else find_near(path, word.text)
            if inner is None:
                unread.append(f"{place}: {word.text} is not here; its settings are not known")
                from_files.append(Setting("config", word.text, place, "not here"))
            else:
                settings, unread_in_file = read_settings(inner)
                from_files += [Setting("config", word.text, place), *settings]
                unread += unread_in_file
        elif key:
            obstacle = ", ".join(dict.fromkeys(word.obstacle for word in values if word.obstacle))
            parts = [parsed(word.text) for word in values]
            value = True if not parts else parts[0] if len(parts) == 1 else parts
            from_command += flattened(Setting(key, value, place, obstacle))
        else:
            unread += [f"{place}: {word.text!r} is no option" for word in values]
    unread += [
        f"{setting.place}: {setting.key} is {setting.obstacle}"
        for setting in from_command
        if setting.obstacle
    ]
    return [*from_files, *from_command], unread, {setting.key for setting in from_files}


def find_near(path: Path, name: str) -> Path | None:
    """Find a file that a script names, relative to the working directory, the script, or a directory above it."""
    above = [path.parent, *path.resolve().parents[1 : PARENTS + 1]]
    candidates = (Path(name), *(directory / name for directory in above))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _first_text(settings: Mapping[str, Setting], keys: tuple[str, ...]) -> str | None:
    """The first known value of the keys, as text."""
    for key in keys:
        setting = settings.get(key)
        if setting is not None and not setting.obstacle and setting.value:
            value = setting.value
            return str(value[0] if isinstance(value, list) and len(value) == 1 else value)
    return None


def _choose_method(
    dialect: Dialect,
    requested: str | None,
    settings: Mapping[str, Setting],
    by_given_key: Mapping[str, Setting],
    path: Path,
) -> tuple[Method, str]:
    """Choose the method, with the reason. Raises ConfigError where several are equally likely."""
    named = dialect.method_of(settings) or requested
    if named is not None:
        for method in (*dialect.methods, *dialect.more_methods):
            if method == named:
                return method, "the recipe names it"
        choices = ", ".join((*dialect.methods, *dialect.more_methods))
        raise ConfigError(f"found method {named} for {dialect.name}; expected one of {choices}")
    counts = {
        method: len(by_given_key.keys() & options(dialect.name, method))
        for method in dialect.methods
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


def kinds_of(path: Path) -> list[str]:
    """The frameworks that have most of a file's keys, or one of its commands. Raises ConfigError without a file."""
    if path.suffix in SUFFIXES:
        keys = {setting.key for setting in read_settings(path)[0]}
        counts = {name: sum(is_option(name, key) for key in keys) for name in DIALECTS}
    else:
        words = [[word.text for word in one.words] for one in commands(read_text(path), path.name)]
        counts = {name: any(map(one.find_start, words)) for name, one in DIALECTS.items()}
    best = [name for name, count in counts.items() if count and count == max(counts.values())]
    return list(dict.fromkeys("swift" if name == "megatron" else name for name in best))


@cache
def is_option(dialect_name: str, key: str) -> bool:
    """Whether a framework has an option of that name for any method."""
    text = files("taut_tools.migrate").joinpath("table/options.json").read_text(encoding="utf-8")
    return any(key in options(dialect_name, method) for method in json.loads(text)[dialect_name])


@cache
def options(framework: str, method: str, *, is_python: bool = False) -> frozenset[str]:
    """All known options of a framework for a method, ``is_python``: with what only a script's calls say."""
    text = files("taut_tools.migrate").joinpath("table/options.json").read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)[framework]
    parts = ("*", method, "flat", "python" if is_python else "")
    names = [name for part in parts for name in table.get(part, [])]
    return frozenset(" ".join(names).split())


def swift_method(settings: Mapping[str, Setting]) -> Method | None:
    """The method in ``rlhf_type``; None for a file without it, which may be for any command."""
    setting = settings.get("rlhf_type")
    if setting is None or setting.obstacle:
        return None
    return {"rm": "reward"}.get(str(setting.value), str(setting.value))


def llamafactory_method(settings: Mapping[str, Setting]) -> Method | None:
    """The method in ``stage``, and for dpo in ``pref_loss``."""
    stage, loss = (
        setting.value if (setting := settings.get(name)) is not None else None
        for name in ("stage", "pref_loss")
    )
    if stage == "dpo" and loss in ("orpo", "simpo"):
        return str(loss)
    return {"rm": "reward"}.get(str(stage), str(stage)) if stage is not None else "sft"


def axolotl_method(settings: Mapping[str, Setting]) -> Method | None:
    """The method in ``rl``, else a reward model if one is set, else pre-training or fine-tuning."""
    values = {name: setting.value for name, setting in settings.items()}
    if values.get("rl"):
        return str(values["rl"])
    if values.get("process_reward_model"):
        return "process_reward"
    if values.get("reward_model"):
        return "reward"
    return "pt" if values.get("pretraining_dataset") and not values.get("datasets") else "sft"


def openrlhf_release(settings: Mapping[str, Setting]) -> Release | None:
    """The release that options reveal: 0.8 has --flash_attn; the options of 0.9 and 0.10.0 are flat."""
    if "flash_attn" in settings:
        return Release("0.8.5", "--flash_attn is of 0.8 and before")
    flat = next((key for key in settings if key in ALIASES["openrlhf"] and key != "seed"), None)
    return None if flat is None else Release("0.10.0", f"--{flat} is flat, as up to 0.10.0")


METHOD_OF: dict[str, Callable[[Mapping[str, Setting]], Method | None]] = {
    "swift": swift_method,
    "megatron": swift_method,
    "llamafactory": llamafactory_method,
    "axolotl": axolotl_method,
}


def _read_table(name: str) -> dict[str, Any]:
    return tomllib.loads(
        files("taut_tools.migrate").joinpath(f"table/{name}.toml").read_text(encoding="utf-8")
    )


ALIASES: dict[str, dict[str, str]] = _read_table("aliases")


def _dialect(name: str, table: Mapping[str, Any]) -> Dialect:
    """Read a dialect from its table in ``table/dialects.toml``."""
    scripts: dict[str, dict[str, Any]] = {}
    for entry in table.get("scripts", ()):
        sets = {key: value for key, value in entry.items() if key not in ("names", "unset")}
        for script in entry["names"].split():
            scripts[script] = scripts.get(script, {}) | sets
            scripts[script] |= dict.fromkeys(entry.get("unset", "").split())
    lists = ("methods", "more_methods", "model", "data", "hoists")
    return Dialect(
        name=cast(Framework, name),
        library=table["library"],
        starts=(
            *map(Start, table.get("starts", ())),
            *(Start(words, is_script=True) for words in table.get("starts_of_scripts", ())),
        ),
        newest=Release(*table["newest"]),
        options_of=table["options_of"],
        aliases=ALIASES.get(table.get("aliases", ""), {}),
        method_of=METHOD_OF.get(name, lambda settings: None),
        release_of=openrlhf_release if name == "openrlhf" else lambda settings: None,
        prefers_alias=frozenset(table.get("prefers_alias", "").split()),
        environment=table.get("environment", ""),
        method_names={
            script: method or None
            for method, names in table.get("method_names", {}).items()
            for script in names.split()
        },
        scripts=scripts,
        **{key: tuple(table.get(key, "").split()) for key in lists},
    )


DIALECTS: dict[str, Dialect] = {
    name: _dialect(name, table) for name, table in _read_table("dialects").items()
}
SWIFT, MEGATRON = DIALECTS["swift"], DIALECTS["megatron"]


def dialect_of(name: str, path: Path) -> Dialect:
    """The dialect of a framework, or Megatron-SWIFT's for a file of swift that is a recipe for it."""
    if name != "swift":
        return DIALECTS[name]
    if path.suffix in SUFFIXES:
        settings, _ = read_settings(path)
        keys = {setting.key for setting in settings}
        is_megatron = not keys.isdisjoint(
            ("global_batch_size", "micro_batch_size", "train_iters", "lr")
        )
        return MEGATRON if is_megatron else SWIFT
    words = [
        [word.text for word in command.words] for command in commands(read_text(path), path.name)
    ]
    has_swift = any(SWIFT.find_start(line) for line in words)
    return MEGATRON if not has_swift and any(map(MEGATRON.find_start, words)) else SWIFT
