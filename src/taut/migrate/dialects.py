"""The frameworks whose recipes are read: TRL, open-r1, ms-swift, OpenRLHF, LLaMA-Factory and axolotl.

A ``Dialect`` says which commands start a framework, what its options are called and which names are aliases;
``read_recipe`` makes a ``Recipe`` of a settings file or a shell script. A settings file does not always name its
method: it follows from the options, then from the file's name, then is sft; where several remain, it is an error.

``table/options.json`` lists the options of each framework and method, ``table/aliases.toml`` other names of options.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from taut.errors import ConfigError
from taut.migrate.recipe import (
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
from taut.migrate.script import Word, commands, pairs

PARENTS = 6
"""How many directories above a script are searched for a file that it names."""


class Start(NamedTuple):
    """Words after which the framework's own options begin in a command."""

    words: str
    """A regular expression of one word, or of two with a space between them. Its group ``name`` is a method or
    a name in ``Dialect.method_names``."""
    is_script: bool = False


class Found(NamedTuple):
    """Where the framework's own options begin in a command."""

    method: Method | None
    at: int
    """Index of the first option."""
    is_script: bool
    name: str
    """Of the command or the script."""


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
    """The release assumed where neither the caller nor the settings say one."""
    options_of: str
    """The release whose options are known."""
    model: tuple[str, ...]
    """Options that name the model, the current name first."""
    data: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options -> the name that traps use. The later of the two settings holds."""
    method_of: Callable[[Mapping[str, Setting]], Method | None] = lambda settings: None
    """The method that the settings themselves name."""
    release_of: Callable[[Mapping[str, Setting]], Release | None] = lambda settings: None
    """The release that the names of the settings reveal."""
    prefers_alias: frozenset[str] = frozenset()
    """Aliases that win over the option itself, wherever they stand."""
    environment: str = ""
    """The key of a settings file under which it sets environment variables."""
    method_names: Mapping[str, Method | None] = field(default_factory=dict)
    """Names of commands that are not those of their methods -> the method; None: its options say it."""
    more_methods: tuple[Method, ...] = ()
    """Methods that no file of settings is taken for by its options alone."""
    scripts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Names of scripts -> what their code sets, where the command does not."""
    hoists: tuple[str, ...] = ()
    """Tables of a settings file whose entries are options of the run."""

    def find_start(self, words: Sequence[str]) -> Found | None:
        """Where this framework's options begin in a command; None: it is another command."""
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
    """The recipe in a settings file or a script. Raises ConfigError where there is none."""
    launch: dict[str, Any]
    environment: dict[str, Setting] = {}
    if path.suffix in SUFFIXES:
        settings, unread = read_settings(path)
        keys_in_file = {setting.key for setting in settings}
        launch = {"place": path.name}
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
    if version:
        release = Release(version, "as asked")
    else:
        release = dialect.release_of(by_key | by_given_key) or dialect.newest
    chosen, reason = _choose_method(dialect, method, by_key, by_given_key, path)
    known = options(dialect.name, chosen)
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
        # accelerate's configuration, another framework's recipe
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
    """The settings of a command, those of the files it names first; lines of what is not read; the files' keys."""
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
    """A file that a script names: relative to the working directory, the script, or a directory above it."""
    above = [path.parent, *path.resolve().parents[1 : PARENTS + 1]]
    candidates = (Path(name), *(directory / name for directory in above))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _first_text(settings: Mapping[str, Setting], keys: tuple[str, ...]) -> str | None:
    """The first of the keys that has a known value, as text."""
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
    """The method and the reason for it. Raises ConfigError where several are equally likely."""
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


@cache
def is_option(dialect_name: str, key: str) -> bool:
    """Whether a framework has an option of that name, for any method."""
    text = files("taut.migrate").joinpath("table/options.json").read_text(encoding="utf-8")
    return any(key in options(dialect_name, method) for method in json.loads(text)[dialect_name])


@cache
def options(framework: str, method: str) -> frozenset[str]:
    """Every known option of a framework for a method."""
    text = files("taut.migrate").joinpath("table/options.json").read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)[framework]
    names = [name for part in ("*", method, "flat") for name in table.get(part, [])]
    return frozenset(" ".join(names).split())


ALIASES: dict[str, dict[str, str]] = tomllib.loads(
    files("taut.migrate").joinpath("table/aliases.toml").read_text(encoding="utf-8")
)

# `trl METHOD`, its scripts under accelerate or torchrun, and YAML for `--config`
IN_PYTHON = "the rows and some settings are made by Python code of the script"
PICTURES = "lmms-lab/multimodal-open-r1-8k-verified"
REWARDS = ["think_format_reward", "accuracy_reward"]
TRL = Dialect(
    name="trl",
    library="trl",
    starts=(
        Start(r"(?:.*/)?trl (?P<name>\w+)"),
        Start(r"(?!.*open_r1)(?:.*/)?(?P<name>\w+?)(?:_trainer)?\.py", is_script=True),
        Start(r"trl\.scripts\.(?P<name>\w+)", is_script=True),
    ),
    methods=("sft", "dpo", "grpo", "kto", "rloo", "reward"),
    more_methods=(
        *("bco", "orpo", "cpo", "prm", "ppo", "online_dpo", "gkd", "gold", "distillation"),
        "async_grpo",
        *("nash_md", "xpo", "tpo", "sdft", "sdpo", "ssd", "minillm"),
    ),
    method_names={
        name: method
        for method, names in {
            "sft": (
                "sft_vlm sft_gemma3 sft_gpt_oss sft_nemotron_3 sft_vlm_gemma3 sft_video_llm "
                "sft_tiny_aya_tool_calling"
            ),
            "dpo": "dpo_vlm mpo_vlm",
            "grpo": "grpo_vlm gspo gspo_vlm grpo_agent grpo_2048 grpo_continuous_batching",
            "rloo": "rloo_vlm",
            "reward": "reward_modeling",
            "ppo": "ppo_tldr",
            "online_dpo": "online_dpo_vlm dpo_online",
            "gold": "gold_vlm",
        }.items()
        for name in names.split()
    },
    scripts={
        "sft_vlm": {"max_length": None},
        "sft_vlm_gemma3": {"max_length": None},
        "gspo": {
            "dataset_name": "AI-MO/NuminaMath-TIR",
            "reward_funcs": REWARDS,
            "script": IN_PYTHON,
        },
        "online_dpo_vlm": {"dataset_name": PICTURES, "script": IN_PYTHON},
        **{
            name: {"dataset_name": PICTURES, "reward_funcs": REWARDS, "script": IN_PYTHON}
            for name in ("grpo_vlm", "gspo_vlm", "rloo_vlm")
        },
        **{
            name: {"script": IN_PYTHON}
            for name in (
                *("grpo_agent", "grpo_2048", "grpo_continuous_batching", "async_grpo"),
                *("sft_gemma3", "rloo"),
            )
        },
    },
    newest=Release("1.16.0", "the newest known; say another as trl==VERSION:FILE"),
    options_of="trl 1.16.0",
    model=("model_name_or_path", "sft_model_path", "student_model_name"),
    data=("dataset_name", "datasets"),
    aliases=ALIASES["trl"],
    prefers_alias=frozenset({"model_init_kwargs.attn_implementation", "model_init_kwargs.dtype"}),
    environment="env",
)

# recipes/MODEL/METHOD/config.yaml, and scripts that start src/open_r1/METHOD.py with such a file
OPEN_R1 = Dialect(
    name="open-r1",
    library="trl",
    starts=(
        Start(r".*open_r1/(?P<name>\w+)\.py", is_script=True),
        Start(r".*open_r1\.(?P<name>\w+)", is_script=True),
    ),
    methods=("sft", "grpo"),
    newest=Release("0.18.0", "what open-r1's setup.py pins"),
    options_of="open-r1 with trl 0.18.0",
    model=("model_name_or_path",),
    data=("dataset_name", "dataset_mixture"),
    aliases=ALIASES["trl"],
    environment="env",
)


def swift_method(settings: Mapping[str, Setting]) -> Method | None:
    """The method that ``rlhf_type`` names; a file without it may be for any command."""
    setting = settings.get("rlhf_type")
    if setting is None or setting.obstacle:
        return None
    return {"rm": "reward"}.get(str(setting.value), str(setting.value))


# `swift sft`, `swift rlhf --rlhf_type METHOD`, `swift pt`, swift/cli/sft.py under torchrun, with YAML or JSON as the
# first word; without rlhf_type `swift rlhf` is dpo
SWIFT = Dialect(
    name="swift",
    library="ms-swift",
    starts=(
        Start(r"(?:.*/)?swift (?P<name>sft|pt|rlhf)"),
        Start(r"(?!.*_megatron).*cli/(?P<name>sft|pt|rlhf)\.py"),
        Start(r"(?!.*_megatron).*swift\.cli\.(?P<name>sft|pt|rlhf)"),
    ),
    methods=("sft", "dpo", "grpo", "kto", "ppo", "reward", "pt"),
    more_methods=("orpo", "cpo", "simpo", "gkd"),
    newest=Release("4.6.0", "the newest known; say another as swift==VERSION:FILE"),
    options_of="ms-swift 4.6",
    model=("model",),
    data=("dataset",),
    aliases=ALIASES["swift"],
    method_of=swift_method,
    environment="ENV",
    method_names={"rlhf": "dpo"},
)

# `megatron sft | pt | rlhf`; its files of settings may have tables for Ray
MEGATRON = replace(
    SWIFT,
    name="megatron",
    starts=(
        Start(r"(?:.*/)?megatron (?P<name>sft|pt|rlhf)"),
        Start(r".*cli/_megatron/(?P<name>sft|pt|rlhf)\.py"),
        Start(r".*swift\.cli\._megatron\.(?P<name>sft|pt|rlhf)"),
    ),
    options_of="Megatron-SWIFT 4.6",
    hoists=("train", "rollout"),
    model=("model", "mcore_model"),
)


def llamafactory_method(settings: Mapping[str, Setting]) -> Method | None:
    """``stage``, and of dpo the loss."""
    stage, loss = (
        setting.value if (setting := settings.get(name)) is not None else None
        for name in ("stage", "pref_loss")
    )
    if stage == "dpo" and loss in ("orpo", "simpo"):
        return str(loss)
    return {"rm": "reward"}.get(str(stage), str(stage)) if stage is not None else "sft"


LLAMAFACTORY = Dialect(
    name="llamafactory",
    library="llamafactory",
    starts=(
        Start(r"(?:.*/)?(?:llamafactory-cli|lmf) (?P<name>train)"),
        Start(r"(?:.*/)?(?P<name>train)\.py"),
    ),
    methods=("sft", "pt", "dpo", "kto", "reward", "ppo", "orpo", "simpo"),
    newest=Release("0.9.5", "the newest known; say another as llamafactory==VERSION:FILE"),
    options_of="LLaMA-Factory 0.9",
    model=("model_name_or_path",),
    data=("dataset",),
    method_of=llamafactory_method,
    method_names={"train": None},
)


def axolotl_method(settings: Mapping[str, Setting]) -> Method | None:
    """``rl``, or a reward model, else fine-tuning."""
    values = {name: setting.value for name, setting in settings.items()}
    if values.get("rl"):
        return str(values["rl"])
    if values.get("process_reward_model"):
        return "process_reward"
    if values.get("reward_model"):
        return "reward"
    return "pt" if values.get("pretraining_dataset") and not values.get("datasets") else "sft"


AXOLOTL = Dialect(
    name="axolotl",
    library="axolotl",
    starts=(Start(r"(?:.*/)?axolotl (?P<name>train)"), Start(r"axolotl\.cli\.(?P<name>train)")),
    methods=(
        "sft",
        "pt",
        "dpo",
        "ipo",
        "kto",
        "orpo",
        "simpo",
        "reward",
        "process_reward",
        "grpo",
        "gdpo",
    ),
    more_methods=("ebft",),
    newest=Release("0.13.0", "the newest known; say another as axolotl==VERSION:FILE"),
    options_of="axolotl 0.13",
    model=("base_model",),
    data=("datasets",),
    method_of=axolotl_method,
    method_names={"train": None},
)


def openrlhf_release(settings: Mapping[str, Setting]) -> Release | None:
    """0.8 has --flash_attn; the options of 0.9 and 0.10.0 are flat."""
    if "flash_attn" in settings:
        return Release("0.8.5", "--flash_attn is of 0.8 and before")
    flat = next((key for key in settings if key in ALIASES["openrlhf"] and key != "seed"), None)
    return None if flat is None else Release("0.10.0", f"--{flat} is flat, as up to 0.10.0")


# `openrlhf.cli.train_METHOD` as a module or a path, under deepspeed, python -m or ray job submit
OPENRLHF = Dialect(
    name="openrlhf",
    library="openrlhf",
    starts=(
        Start(r".*openrlhf\.cli\.train_(?P<name>\w+)"),
        Start(r".*openrlhf/cli/train_(?P<name>\w+)\.py"),
    ),
    methods=("sft", "dpo", "reward", "ppo", "kto"),
    newest=Release("0.11.0", "the newest known; say another as openrlhf==VERSION:FILE"),
    options_of="openrlhf 0.11.0 and 0.10.0",
    model=("model.model_name_or_path", "actor.model_name_or_path"),
    data=("data.dataset", "data.prompt_dataset"),
    aliases=ALIASES["openrlhf"],
    release_of=openrlhf_release,
    method_names={"rm": "reward", "ppo_ray": "ppo"},
)

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (TRL, OPEN_R1, SWIFT, MEGATRON, OPENRLHF, LLAMAFACTORY, AXOLOTL)
}


def dialect_of(name: str, path: Path) -> Dialect:
    """The dialect of that name; for swift that of Megatron-SWIFT where the file is a recipe for it."""
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
