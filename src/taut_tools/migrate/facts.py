"""Facts that are not in the recipe's text: about the model's files, the first row of data, and the launch.

A model is examined if it is a local directory or in the Hugging Face cache; nothing is downloaded and no weights are
read. A fact that cannot be determined has the answer None and a reason. A fact is computed only when a trap needs it.

``count_processes`` reads the number of training processes, by which most frameworks multiply their batch size, from the
launcher (torchrun, accelerate, deepspeed), the files that it names, and the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from taut.config import home_path
from taut.data.read.formats import read_records
from taut.errors import ConfigError, DataError, TautError
from taut.io import files
from taut.io.extras import install_command, require
from taut_tools.migrate.dialects import find_near
from taut_tools.migrate.recipe import SUFFIXES, Recipe, Setting, parsed, read_settings, read_text

if TYPE_CHECKING:
    from taut.data.render.render import Renderer

STATE_MODELS = re.compile(r"mamba|jamba|rwkv|zamba")
SHARDING_WORDS = ("zero", "deepspeed", "fsdp")
"""Words in the name of a launcher file by which accelerate keeps float32 weights next to the bfloat16 weights."""
HAS_HUB = find_spec("huggingface_hub") is not None
GENERATION = re.compile(r"\{%-?\s*generation\b")


class Answer(NamedTuple):
    """Whether a fact holds, with the evidence."""

    holds: bool | None
    """None for a fact that is unknown."""
    says: str
    """The finding, or the reason why there is none."""


class NotKnown(Exception):
    """The reason why a fact cannot be determined."""


class Facts:
    """Answers by name, each computed once."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        """Prepare answers about a recipe in ``directory``, to which its paths may be relative."""
        self.recipe, self.directory = recipe, directory
        self._answers: dict[str, Answer] = {}

    def answer(self, name: str) -> Answer:
        """Answer by the name of a fact. Raises KeyError for another name."""
        if name not in self._answers:
            try:
                self._answers[name] = FACTS[name](self)
            except NotKnown as error:
                self._answers[name] = Answer(None, str(error))
        return self._answers[name]

    @cached_property
    def model(self) -> Path | None:
        """The model's directory, if it is on this machine."""
        name = self.recipe.model
        if name is None:
            return None
        for base in (Path(), self.directory):
            if (base / home_path(name)).is_dir():
                return base / home_path(name)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
            return None
        if not HAS_HUB:
            return None
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None

    def file(self, name: str) -> Mapping[str, Any] | None:
        """Read a JSON file of the model; None without one."""
        path = None if self.model is None else self.model / name
        if path is None or not path.is_file():
            return None
        content = files.read_json(path)
        return content if isinstance(content, dict) else None

    @cached_property
    def first_row(self) -> Mapping[str, Any] | Answer:
        """The first row of data in a local file of JSON lines, or the reason why there is none."""
        name = self.recipe.data
        if name is None:
            return Answer(None, "the recipe names no data that are known")
        for base in (Path(), self.directory):
            path = base / home_path(name.partition("#")[0])
            if not path.is_file() or path.suffix not in (".jsonl", ".json"):
                continue
            try:
                row = next((row for _, row in read_records(path, path.name)), None)
            except DataError as error:
                row = error
            if isinstance(row, DataError):
                return Answer(
                    None, f"could not look: {path.name} does not begin with a row of JSON"
                )
            if isinstance(row, dict):
                return row
            return Answer(None, f"{path.name} has no rows of keys")
        return Answer(None, f"could not look: the data {name} are no JSON lines here")

    @cached_property
    def renderer(self) -> Renderer | Answer:
        """The tokenizer with the recipe's template, or the reason why there is none."""
        if self.model is None:
            return Answer(None, str(self.missing_model))
        try:
            require("train", "reading a tokenizer")
            from taut.data.render.render import Renderer
            from taut.models.load import load_tokenizer

            renderer = Renderer(load_tokenizer(str(self.model)), self._recipe_template())
            if renderer.template.template is None:
                return Answer(None, f"{self.recipe.model} has no chat template")
            renderer.template.stop_ids  # noqa: B018 (it raises if the template has no end)
        except TautError as error:
            return Answer(None, f"could not look: {error}")
        return renderer

    def _recipe_template(self) -> str | None:
        """The template that the recipe sets in place of the model's, or None."""
        for key in ("chat_template", "data.tokenizer_chat_template"):
            value = self.recipe.value(key)
            if isinstance(value, str) and "{" in value:
                return value
        path = self.recipe.value("chat_template_path")
        if not isinstance(path, str):
            return None
        file = self.directory / path
        if file.is_file():
            return files.read_text(file)
        raise TautError(f"the chat template {path} is not here")

    @property
    def missing_model(self) -> NotKnown:
        """The reason why the model's files are not available."""
        if self.recipe.model is None:
            return NotKnown("the recipe names no model that is known")
        if not HAS_HUB:
            return NotKnown(
                f"could not look: {self.recipe.model} is no directory here, and to look into the cache of Hugging Face "
                f"run: {install_command('train')}"
            )
        return NotKnown(f"could not look: the model {self.recipe.model} is not here")

    def require_config(self) -> Mapping[str, Any]:
        """The model's config.json. Raises NotKnown without it."""
        config = self.file("config.json")
        if config is None:
            raise self.missing_model
        return config

    def require_row(self) -> Mapping[str, Any]:
        """``first_row``. Raises NotKnown without it."""
        if isinstance(self.first_row, Answer):
            raise NotKnown(self.first_row.says)
        return self.first_row

    def require_renderer(self) -> Renderer:
        """``renderer``. Raises NotKnown without it."""
        if isinstance(self.renderer, Answer):
            raise NotKnown(self.renderer.says)
        return self.renderer

    def turn_ends(self) -> tuple[set[int], str]:
        """Tokens that end a turn, and a phrase that names them. Raises NotKnown without a tokenizer."""
        renderer = self.require_renderer()
        turn_ends = set(renderer.stop_ids)
        return (
            turn_ends,
            f"the template ends turns with {renderer.template.quoted(list(turn_ends))}",
        )

    def recipe_eos(self) -> int | None:
        """The eos token with which the recipe trains."""
        tokenizer, token = self.require_renderer().tokenizer, self.recipe.value("eos_token")
        is_set = isinstance(token, str)
        eos = tokenizer.convert_tokens_to_ids(token) if is_set else tokenizer.eos_token_id
        return eos if isinstance(eos, int) else None

    def generation_ends(self) -> set[int]:
        """Tokens at which generation_config.json stops."""
        ids = (self.file("generation_config.json") or {}).get("eos_token_id") or []
        return {*(ids if isinstance(ids, list) else [ids])}


FACTS: dict[str, Callable[[Facts], Answer]] = {}
"""Facts by name."""


def fact(function: Callable[[Facts], Answer]) -> Callable[[Facts], Answer]:
    """Add a fact to ``FACTS``."""
    FACTS[function.__name__] = function
    return function


@fact
def turn_end_is_not_eos(facts: Facts) -> Answer:
    (turn_ends, says), eos = facts.turn_ends(), facts.recipe_eos()
    quoted = facts.require_renderer().template.quoted([] if eos is None else [eos])
    return Answer(eos not in turn_ends, f"{says}, eos is {quoted}")


@fact
def turn_end_is_not_named(facts: Facts) -> Answer:
    (turn_ends, says), eos = facts.turn_ends(), facts.recipe_eos()
    missing = not turn_ends & {eos, *facts.generation_ends()}
    return Answer(missing, f"{says}, which {'nothing names' if missing else 'is named'} as an end")


@fact
def turn_end_is_new(facts: Facts) -> Answer:
    """Whether the model does not stop at the template's end, as a base model that was not trained on it."""
    turn_ends, says = facts.turn_ends()
    eos = facts.require_renderer().tokenizer.eos_token_id
    is_new = not turn_ends & {eos, *facts.generation_ends()}
    return Answer(is_new, f"{says}, which the model {'does not stop' if is_new else 'stops'} at")


@fact
def pad_is_eos(facts: Facts) -> Answer:
    tokenizer = facts.require_renderer().tokenizer
    is_same = tokenizer.pad_token_id in (None, tokenizer.eos_token_id)
    return Answer(is_same, f"pad is {tokenizer.pad_token}, eos is {tokenizer.eos_token}")


@fact
def template_has_no_generation(facts: Facts) -> Answer:
    template = str(facts.require_renderer().template.template)
    has = GENERATION.search(template) is not None
    return Answer(not has, f"the template has {'' if has else 'no '}{{% generation %}}")


@fact
def template_thinks(facts: Facts) -> Answer:
    has = "enable_thinking" in str(facts.require_renderer().template.template)
    return Answer(has, f"the template {'can' if has else 'cannot'} switch thinking off")


@fact
def has_state_layers(facts: Facts) -> Answer:
    config = facts.require_config()
    from taut.models.stateful_types import STATEFUL_TYPES

    text_config = config.get("text_config", config)
    types = sorted(STATEFUL_TYPES & set(text_config.get("layer_types") or ()))
    model_type = str(text_config.get("model_type", ""))
    if STATE_MODELS.search(model_type):
        types.append(model_type)
    return Answer(bool(types), f"layers with state across tokens: {', '.join(types) or 'none'}")


@fact
def is_adapter(facts: Facts) -> Answer:
    if facts.model is None:
        raise facts.missing_model
    has = (facts.model / "adapter_config.json").is_file()
    return Answer(has, f"the model is {'an adapter' if has else 'no adapter'}")


@fact
def is_vision(facts: Facts) -> Answer:
    config = facts.require_config()
    return Answer("vision_config" in config, f"model_type {config.get('model_type')}")


@fact
def is_qwen3_5(facts: Facts) -> Answer:
    model_type = str(facts.require_config().get("model_type", ""))
    return Answer(model_type.startswith("qwen3_5"), f"model_type {model_type}")


@fact
def data_is_prompt_completion(facts: Facts) -> Answer:
    row = facts.require_row()
    return Answer({"prompt", "completion"} <= row.keys(), f"the first row has {', '.join(row)}")


@fact
def data_is_messages(facts: Facts) -> Answer:
    row = facts.require_row()
    return Answer("messages" in row, f"the first row has {', '.join(row)}")


@fact
def data_has_pictures(facts: Facts) -> Answer:
    row = facts.require_row()
    has = not row.keys().isdisjoint(("image", "images"))
    return Answer(has, f"the first row has {', '.join(row)}")


@fact
def keeps_master_weights(facts: Facts) -> Answer:
    recipe = facts.recipe
    keys = ("deepspeed", "fsdp", "accelerate_config", "config_file")
    words = [*recipe.launcher, *(str(recipe.value(key, "")) for key in keys)]
    sharded = [word for word in words if any(name in word.lower() for name in SHARDING_WORDS)]
    if sharded:
        return Answer(True, f"started with {sharded[0]}")
    if not recipe.has_command:
        raise NotKnown("the recipe does not say how it is started")
    configs = [word for word in recipe.launcher if "config" in word]
    if configs:
        raise NotKnown(f"{' '.join(configs)}: what is in it is not known")
    return Answer(False, "started without deepspeed or FSDP")


@fact
def is_started_as_script(facts: Facts) -> Answer:
    if not facts.recipe.has_command:
        raise NotKnown("the recipe does not say how it is started")
    return Answer(facts.recipe.is_script, facts.recipe.place)


@fact
def has_unknown_keys_in_file(facts: Facts) -> Answer:
    keys = [
        f"{unknown.key} ({unknown.place})" for unknown in facts.recipe.unknown if unknown.is_in_file
    ]
    return Answer(bool(keys), ", ".join(keys) or "every key is known")


# -- processes

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
TRL_CONFIGS = {"single_gpu": 1} | dict.fromkeys(
    ("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8
)
"""Number of processes of the configurations that ship with trl, by their names for ``--accelerate_config``."""


class Processes(NamedTuple):
    """The number of processes, and the reason for it."""

    number: int | None
    """None if the recipe states it in a form that cannot be read."""
    reason: str
    stated_by: frozenset[str] = frozenset()
    """Keys of the options that state it: in ``Recipe.settings``, or ``$NAME``, or ``--NAME`` of the launcher."""
    is_assumed: bool = False
    """Whether the recipe does not state it."""


def launcher_options(recipe: Recipe) -> dict[str, Setting]:
    """Options of the launcher, among the words before the framework's own, by ``--NAME``."""
    options = dict[str, Setting]()
    for word, after in zip(recipe.launcher, (*recipe.launcher[1:], "--"), strict=False):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        key = "--" + name.strip("-").replace("-", "_")
        takes_next = not equals and not after.startswith("-") and not after.endswith(".py")
        text = value if equals else after if takes_next else "true"
        obstacle = text if "$" in text or "`" in text else ""
        options[key] = Setting(key, parsed(text), recipe.place, obstacle)
    return options


def count_processes(recipe: Recipe, directory: Path, requested: int | None = None) -> Processes:
    """Find the number of training processes; the user's number ``requested`` wins over the recipe."""
    if requested is not None:
        return Processes(requested, "as asked")
    # The launcher states it in its options, or in a file that they name.
    stated = {key.replace("--", ""): option for key, option in launcher_options(recipe).items()}
    if recipe.framework == "trl":
        keys = ("num_processes", "accelerate_config", "config_file")
        stated |= {key: recipe.settings[key] for key in keys if key in recipe.settings}
    variables = recipe.environment
    if "nproc_per_node" in stated or "nnodes" in stated:
        return _product(stated, ("nproc_per_node", "nnodes"))
    if "num_processes" in stated:
        return _product(stated, ("num_processes",))
    for key in ("config_file", "accelerate_config"):
        if key in stated:
            return _from_accelerate_config(stated[key], directory)
    if "num_gpus" in stated or "num_nodes" in stated:
        return _product(stated, ("num_gpus", "num_nodes"))
    if "include" in stated:
        value = str(stated["include"].value)
        number = len(value.rpartition(":")[2].split(","))
        return Processes(number, f"--include {value}", frozenset({"--include"}))
    if "hostfile" in stated:
        return _from_hostfile(stated["hostfile"], directory)
    # The framework's own options or environment variables state it.
    if recipe.framework == "openrlhf" and "actor.num_gpus_per_node" in recipe.settings:
        return _product(recipe.settings, ("actor.num_nodes", "actor.num_gpus_per_node"))
    if recipe.value("use_ray") is True:
        ranks = [
            str(setting.value)
            for key, setting in recipe.settings.items()
            if re.fullmatch(r"device_groups\.\w+\.ranks", key)
        ]
        span = (
            re.fullmatch(r"list\(range\((\d+), *(\d+)\)\)", ranks[0]) if len(ranks) == 1 else None
        )
        if span is not None:
            number = int(span[2]) - int(span[1])
            return Processes(number, f"ranks: {ranks[0]}", frozenset({"use_ray"}))
        return Processes(None, "the device groups of Ray", frozenset({"use_ray"}))
    if recipe.framework in ("swift", "megatron", "llamafactory"):
        if "NPROC_PER_NODE" in variables or "NNODES" in variables:
            return _product(variables, ("NPROC_PER_NODE", "NNODES"))
        if (
            recipe.framework == "swift"
            and recipe.launcher[-2:-1]
            and recipe.launcher[-2].endswith("swift")
        ):
            return Processes(1, "swift starts one process where NPROC_PER_NODE is not set")
    if recipe.framework != "swift":
        for name in VISIBLE_DEVICES:
            if name in variables and not variables[name].obstacle:
                devices = str(variables[name].value)
                number = len([device for device in devices.split(",") if device.strip()])
                return Processes(number, f"{name}={devices}", frozenset({f"${name}"}))
    return Processes(1, "the recipe does not say it", is_assumed=True)


def _product(options: Mapping[str, Setting], names: tuple[str, ...]) -> Processes:
    """Multiply the options that are set."""
    factors = [options[name] for name in names if name in options]
    reason = " x ".join(f"{factor.key}={factor.obstacle or factor.value}" for factor in factors)
    keys = frozenset(f"${factor.key}" if factor.key.isupper() else factor.key for factor in factors)
    number = 1
    for factor in factors:
        value = parsed(factor.value) if isinstance(factor.value, str) else factor.value
        if factor.obstacle or type(value) is not int:
            return Processes(None, reason, keys)
        number *= value
    return Processes(number, reason, keys)


def _from_accelerate_config(option: Setting, directory: Path) -> Processes:
    """Read the number in accelerate's configuration file."""
    name, keys = str(option.value), frozenset({option.key})
    if name in TRL_CONFIGS:
        return Processes(TRL_CONFIGS[name], f"{name} of trl", keys)
    path = None if option.obstacle else find_near(directory / "recipe", name)
    if path is None or path.suffix not in SUFFIXES:
        return Processes(None, f"{option.key.strip('-')} {name}, which is not here", keys)
    try:
        settings, _ = read_settings(path)
    except ConfigError as error:
        return Processes(None, str(error), keys)
    content: dict[str, Any] = {setting.key: setting.value for setting in settings}
    if content.get("distributed_type") in ("NO", False):
        return Processes(1, f"{name}: distributed_type NO", keys)
    number = content.get("num_processes")
    if type(number) is not int:
        return Processes(None, f"{name}, which has no num_processes", keys)
    return Processes(number, f"{name}: num_processes {number}", keys)


def _from_hostfile(option: Setting, directory: Path) -> Processes:
    """Count the slots in deepspeed's file of hosts."""
    name, keys = str(option.value), frozenset({option.key})
    path = None if option.obstacle else find_near(directory / "recipe", name)
    if path is None:
        return Processes(None, f"hostfile {name}, which is not here", keys)
    slots = [int(number) for number in re.findall(r"(?m)^[^#\n]*\bslots=(\d+)", read_text(path))]
    return Processes(sum(slots) or None, f"{name}: {sum(slots)} slots", keys)
