"""What a trap needs to know beyond the recipe: of the model's files, of the data's first row, of how it is started.

A model is looked at where it is a directory here or lies in the Hugging Face cache; nothing is downloaded, no weight
is read. What cannot be looked at has no answer, and says why. Only facts that a trap asks for are found out.

May import ``data``, ``models``, errors and ``recipe.py``. ``conditions.py`` asks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from taut.config import home_path
from taut.errors import TautError
from taut.io import files
from taut.migrate.recipe import Recipe

if TYPE_CHECKING:
    from taut.data.render import Renderer

STATE_MODELS = re.compile(r"mamba|jamba|rwkv|zamba")
SPREAD = ("zero", "deepspeed", "fsdp")
"""What is in the name of a file that has accelerate keep float32 weights beside the bfloat16 ones."""
GENERATION = re.compile(r"\{%-?\s*generation\b")


class Answer(NamedTuple):
    """Whether a fact holds; None: it could not be looked at."""

    holds: bool | None
    says: str
    """What was found, or why nothing was."""


class Facts:
    """Answers by name, each found out once."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        """``directory``: where the recipe lies, which paths in it may be relative to."""
        self.recipe, self.directory = recipe, directory
        self._answers: dict[str, Answer] = {}

    def answer(self, name: str) -> Answer:
        """Raises KeyError for a fact there is none of."""
        if name not in self._answers:
            self._answers[name] = FACTS[name](self)
        return self._answers[name]

    @cached_property
    def model(self) -> Path | None:
        """The model's directory, where it is on this machine."""
        name = self.recipe.model
        if name is None:
            return None
        for base in (Path(), self.directory):
            if (base / home_path(name)).is_dir():
                return base / home_path(name)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
            return None
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None

    @property
    def missing(self) -> Answer:
        """The answer where there is no model to look at."""
        if self.recipe.model is None:
            return Answer(None, "the recipe names no model that is known")
        return Answer(None, f"could not look: the model {self.recipe.model} is not here")

    def file(self, name: str) -> Mapping[str, Any] | None:
        """A JSON file of the model; None where there is none."""
        path = None if self.model is None else self.model / name
        if path is None or not path.is_file():
            return None
        content = files.read_json(path)
        return content if isinstance(content, dict) else None

    @cached_property
    def renderer(self) -> Renderer | Answer:
        """The tokenizer with the template in use, or why there is none."""
        if self.model is None:
            return self.missing
        from taut.data.render import Renderer
        from taut.models.load import load_tokenizer

        try:
            template = self._template_of_recipe()
            renderer = Renderer(load_tokenizer(str(self.model)), template)
            if renderer.template.template is None:
                return Answer(None, f"{self.recipe.model} has no chat template")
            renderer.template.stop_ids  # noqa: B018 (it raises where there is no end)
        except TautError as error:
            return Answer(None, f"could not look: {error}")
        return renderer

    def _template_of_recipe(self) -> str | None:
        """A template that the recipe gives in place of the model's."""
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

    @cached_property
    def first_row(self) -> Mapping[str, Any] | Answer:
        """The first row of the data, where it is a JSON lines file here."""
        name = self.recipe.data
        if name is None:
            return Answer(None, "the recipe names no data that are known")
        for base in (Path(), self.directory):
            path = base / home_path(name.partition("#")[0])
            if path.is_file() and path.suffix in (".jsonl", ".json"):
                return self._row(path)
        return Answer(None, f"could not look: the data {name} are no JSON lines here")

    def _row(self, path: Path) -> Mapping[str, Any] | Answer:
        with files.open_text(path) as lines:
            line = next((one for one in lines if one.strip()), "")
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return Answer(None, f"could not look: {path.name} does not begin with a row of JSON")
        return row if isinstance(row, dict) else Answer(None, f"{path.name} has no rows of keys")


def _ends(facts: Facts) -> tuple[int | None, set[int], Renderer] | Answer:
    """The eos in force, the tokens that end a turn, and who names them."""
    renderer = facts.renderer
    if isinstance(renderer, Answer):
        return renderer
    tokenizer = renderer.tokenizer
    told = facts.recipe.value("eos_token")
    eos = tokenizer.eos_token_id
    if isinstance(told, str):
        eos = tokenizer.convert_tokens_to_ids(told)
    return (eos if isinstance(eos, int) else None), set(renderer.stop_ids), renderer


def _turn_end_is_not_eos(facts: Facts) -> Answer:
    ends = _ends(facts)
    if isinstance(ends, Answer):
        return ends
    eos, turns, renderer = ends
    said = renderer.template.quoted([] if eos is None else [eos])
    says = f"the template ends turns with {renderer.template.quoted(list(turns))}, eos is {said}"
    return Answer(eos not in turns, says)


def _turn_end_is_not_named(facts: Facts) -> Answer:
    ends = _ends(facts)
    if isinstance(ends, Answer):
        return ends
    eos, turns, renderer = ends
    told = (facts.file("generation_config.json") or {}).get("eos_token_id") or []
    named = {eos, *(told if isinstance(told, list) else [told])}
    says = f"the template ends turns with {renderer.template.quoted(list(turns))}"
    missing = not turns & named
    return Answer(missing, f"{says}, which {'nothing names' if missing else 'is named'} as an end")


def _turn_end_is_new(facts: Facts) -> Answer:
    """Whether the model, as it comes, does not stop at the template's end: a base model that has not met it."""
    renderer = facts.renderer
    if isinstance(renderer, Answer):
        return renderer
    told = (facts.file("generation_config.json") or {}).get("eos_token_id") or []
    own = {renderer.tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])}
    turns = set(renderer.stop_ids)
    says = f"the template ends turns with {renderer.template.quoted(list(turns))}"
    is_new = not turns & own
    return Answer(is_new, f"{says}, which the model {'does not stop' if is_new else 'stops'} at")


def _pad_is_eos(facts: Facts) -> Answer:
    renderer = facts.renderer
    if isinstance(renderer, Answer):
        return renderer
    tokenizer = renderer.tokenizer
    is_same = tokenizer.pad_token_id in (None, tokenizer.eos_token_id)
    return Answer(is_same, f"pad is {tokenizer.pad_token}, eos is {tokenizer.eos_token}")


def _template_has_no_generation(facts: Facts) -> Answer:
    renderer = facts.renderer
    if isinstance(renderer, Answer):
        return renderer
    has = GENERATION.search(str(renderer.template.template)) is not None
    return Answer(not has, f"the template has {'' if has else 'no '}{{% generation %}}")


def _template_thinks(facts: Facts) -> Answer:
    renderer = facts.renderer
    if isinstance(renderer, Answer):
        return renderer
    has = "enable_thinking" in str(renderer.template.template)
    return Answer(has, f"the template {'can' if has else 'cannot'} switch thinking off")


def _has_state_layers(facts: Facts) -> Answer:
    config = facts.file("config.json")
    if config is None:
        return facts.missing
    from taut.models.architecture import STATEFUL_TYPES

    text = config.get("text_config", config)
    types = sorted(STATEFUL_TYPES & set(text.get("layer_types") or ()))
    kind = str(text.get("model_type", ""))
    if STATE_MODELS.search(kind):
        types.append(kind)
    return Answer(bool(types), f"layers with state across tokens: {', '.join(types) or 'none'}")


def _is_adapter(facts: Facts) -> Answer:
    if facts.model is None:
        return facts.missing
    has = (facts.model / "adapter_config.json").is_file()
    return Answer(has, f"the model is {'an adapter' if has else 'no adapter'}")


def _is_vision(facts: Facts) -> Answer:
    config = facts.file("config.json")
    if config is None:
        return facts.missing
    return Answer("vision_config" in config, f"model_type {config.get('model_type')}")


def _is_qwen3_5(facts: Facts) -> Answer:
    config = facts.file("config.json")
    if config is None:
        return facts.missing
    kind = str(config.get("model_type", ""))
    return Answer(kind.startswith("qwen3_5"), f"model_type {kind}")


def _columns(name: str, wanted: set[str]) -> Callable[[Facts], Answer]:
    def ask(facts: Facts) -> Answer:
        row = facts.first_row
        if isinstance(row, Answer):
            return row
        return Answer(wanted <= row.keys(), f"the first row has {', '.join(row)}")

    ask.__name__ = name
    return ask


def _data_has_pictures(facts: Facts) -> Answer:
    row = facts.first_row
    if isinstance(row, Answer):
        return row
    return Answer(
        not row.keys().isdisjoint(("image", "images")), f"the first row has {', '.join(row)}"
    )


def _keeps_master_weights(facts: Facts) -> Answer:
    recipe = facts.recipe
    spread = [*recipe.launcher, *(str(recipe.value(key, "")) for key in ("deepspeed", "fsdp"))]
    spread += [str(recipe.value(key, "")) for key in ("accelerate_config", "config_file")]
    found = [word for word in spread if any(name in word.lower() for name in SPREAD)]
    if found:
        return Answer(True, f"started with {found[0]}")
    if not recipe.has_command:
        return Answer(None, "the recipe does not say how it is started")
    configs = [word for word in recipe.launcher if "config" in word]
    if configs:
        return Answer(None, f"{' '.join(configs)}: what is in it is not known")
    return Answer(False, "started without deepspeed or FSDP")


def _is_started_as_script(facts: Facts) -> Answer:
    if not facts.recipe.has_command:
        return Answer(None, "the recipe does not say how it is started")
    return Answer(facts.recipe.is_script, facts.recipe.place)


def _has_unknown_keys_in_file(facts: Facts) -> Answer:
    keys = [f"{one.key} ({one.place})" for one in facts.recipe.unknown if one.is_in_file]
    return Answer(bool(keys), ", ".join(keys) or "every key is known")


FACTS: Mapping[str, Callable[[Facts], Answer]] = {
    "turn_end_is_not_eos": _turn_end_is_not_eos,
    "turn_end_is_not_named": _turn_end_is_not_named,
    "turn_end_is_new": _turn_end_is_new,
    "pad_is_eos": _pad_is_eos,
    "template_has_no_generation": _template_has_no_generation,
    "template_thinks": _template_thinks,
    "has_state_layers": _has_state_layers,
    "is_adapter": _is_adapter,
    "is_vision": _is_vision,
    "is_qwen3_5": _is_qwen3_5,
    "data_is_prompt_completion": _columns("data_is_prompt_completion", {"prompt", "completion"}),
    "data_is_messages": _columns("data_is_messages", {"messages"}),
    "data_has_pictures": _data_has_pictures,
    "keeps_master_weights": _keeps_master_weights,
    "is_started_as_script": _is_started_as_script,
    "has_unknown_keys_in_file": _has_unknown_keys_in_file,
}
