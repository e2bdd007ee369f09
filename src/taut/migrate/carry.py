"""The same run in taut: the ``taut sft`` command for an SFT recipe, and the outcome of each option.

Every option of the recipe, every environment variable it sets and every option of its launcher has exactly one outcome:
carried, needless, machine or lacking. ``table/sft.toml`` decides where a name and a value suffice; this file handles
what takes arithmetic or several options. The framework's default of an option that the recipe does not set is written
into the command, so that no default of taut's replaces it. A value that only the user knows (how many samples a pack
holds) is a word in capitals in the command, which taut refuses until it is filled in.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from taut.config import home_path
from taut.migrate.dialects import options as options_of
from taut.migrate.facts import Facts, Processes, count_processes, launcher_options
from taut.migrate.recipe import Recipe, Setting, parsed

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Data files that taut reads."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
DEFAULT_SCHEDULE = {"swift": "cosine", "openrlhf": "cosine_with_min_lr"}
EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit")
"""AdamW with eight-bit moments, in the names of transformers."""
FREEZES = {
    "freeze_llm": ("language_model", False),
    "freeze_vit": ("vision_tower", True),
    "freeze_aligner": ("projector", True),
}
"""ms-swift's options for parts of a vision-language model: taut's name of the part, whether it is frozen by default."""
PARTS = tuple(part for part, _ in FREEZES.values())
RATES = {"vit_lr": "vision_tower", "aligner_lr": "projector"}
OFFLOADING = {"offload", "zero2_offload", "zero3_offload"}
"""Words of ``deepspeed`` and ``fsdp`` for weights or optimizer states in the host's memory."""
UNKNOWN_TARGETS = (
    "not set: peft chooses by the model's type (q_proj and v_proj of llama, mistral, qwen2, qwen3, gemma), which is "
    "not known here"
)


REPORTS = {
    "tensorboard": (),
    "wandb": ("wandb_project", "$WANDB_PROJECT", "project"),
    "trackio": ("$TRACKIO_PROJECT", "project"),
}
"""Services of ``report_to`` with a key of taut -> the options that name their project."""

Outcome = Literal["carried", "needless", "machine", "lacking"]


class Option(NamedTuple):
    """An option of a recipe and its outcome."""

    key: str
    """Its name; ``$NAME`` of an environment variable, ``--NAME`` of the launcher."""
    place: str
    """``FILE:LINE``; empty: the recipe does not set it, and the outcome is that of the framework's default."""
    value: Any
    outcome: Outcome
    why: str
    keys: tuple[str, ...] = ()
    """The keys of taut that carry it."""
    refuses: bool = False
    """taut does not do such a run."""

    @property
    def line(self) -> str:
        """The option and its reason as one line of text."""
        value = "" if not self.place else f" = {' '.join(_written(self.value).split())[:60]}"
        return f"{self.place}{': ' if self.place else ''}{self.key}{value}: {self.why}"


@dataclass(frozen=True)
class Carried:
    """A command of taut, and every option of the recipe with its outcome."""

    settings: Mapping[str, Any]
    """Keys of ``RunConfig`` with their values."""
    unfilled: Mapping[str, str]
    """Keys whose value the user fills in -> the word that stands for it in the command."""
    options: tuple[Option, ...]
    assumed: tuple[str, ...]
    """Assumptions of the command about what the recipe does not say."""

    def having(self, outcome: Outcome) -> list[Option]:
        """The options with an outcome."""
        return [option for option in self.options if option.outcome == outcome]

    @property
    def command(self) -> str | None:
        """``taut sft key=value ...``; None for a run that taut does not do."""
        if any(option.refuses for option in self.options):
            return None
        return " ".join(["taut sft", *map(shlex.quote, self.words)])

    @property
    def words(self) -> list[str]:
        """The settings as words of the command, unfilled ones last."""
        words = [f"{key}={_written(value)}" for key, value in self.settings.items()]
        return words + [f"{key}={word}" for key, word in self.unfilled.items()]


def carry(recipe: Recipe, facts: Facts, requested_processes: int | None = None) -> Carried | None:
    """The run in taut; None for a method other than sft, or without a model."""
    if recipe.method != "sft" or recipe.model is None:
        return None
    draft = _Draft(recipe, facts, count_processes(recipe, facts.directory, requested_processes))
    draft.carry_names()
    draft.carry_model()
    draft.carry_data()
    draft.carry_targets()
    draft.carry_length()
    draft.carry_batch()
    draft.carry_duration()
    draft.carry_schedule()
    draft.carry_adapters()
    draft.carry_quantisation()
    draft.carry_tokens()
    draft.carry_parts()
    draft.carry_precision()
    draft.carry_distribution()
    draft.carry_reports()
    return draft.finish()


class _Draft:
    """A command under construction. Each ``carry_`` method reads the options of a topic and records their outcomes."""

    def __init__(self, recipe: Recipe, facts: Facts, processes: Processes) -> None:
        self.recipe, self.facts, self.processes = recipe, facts, processes
        self.is_hf = recipe.framework != "openrlhf"
        """Its options include those of transformers' TrainingArguments."""
        self.is_swift = recipe.framework == "swift"
        self.is_vision = facts.answer("is_vision").holds
        self.known_options = options_of(recipe.framework, recipe.method)
        self.given: dict[str, Setting] = {
            key: setting for key, setting in recipe.settings.items() if self._is_option(setting)
        }
        for name, setting in recipe.environment.items():
            self.given[f"${name}"] = setting._replace(key=f"${name}")
        self.given |= launcher_options(recipe)
        self.settings: dict[str, Any] = {
            "model": "",
            "data.train": "",
            **load_table().defaults[recipe.framework],
        }
        self.unfilled = dict[str, str]()
        self.assumed = list[str]()
        self.outcomes = dict[str, Option]()
        for key, option in self.given.items():
            value, is_number = option.value, type(option.value) in (int, float)
            if is_number and not math.isfinite(value):
                self.given[key] = option = option._replace(obstacle="not a finite number")
            elif (
                key in load_table().numbers
                and value is not None
                and not is_number
                and not option.obstacle
            ):
                self.given[key] = option = option._replace(obstacle="not a number")
            if not option.obstacle:
                continue
            if load_table().keys_of(recipe.framework).get(key) == "out":
                self._record(
                    key, "machine", f"where it is written is not known ({option.obstacle}): out"
                )
            elif key == "config" or judge_option(option, self.known_options).outcome == "lacking":
                self._lacking(key, f"the value is not known ({option.obstacle})")

    def _is_option(self, setting: Setting) -> bool:
        """False for a table, whose entries are settings themselves, and for ``no_KEY`` next to KEY."""
        if setting.key.startswith("columns."):
            return False
        if isinstance(setting.value, dict) and setting.value:
            return setting.key == "columns"
        switched_off = setting.key.removeprefix("no_")
        return switched_off == setting.key or switched_off not in self.recipe.settings

    def _record(
        self, key: str, outcome: Outcome, why: str, keys: Sequence[str] = (), refuses: bool = False
    ) -> None:
        """Set an option's outcome. An option that is not set is recorded only if it is lacking."""
        option = self.given.get(key)
        if option is None and outcome != "lacking":
            return
        place, value = ("", None) if option is None else (option.place, option.value)
        if key in self.outcomes:
            if option is not None and option.obstacle:
                return
            raise AssertionError(f"{key} has an outcome: {self.outcomes[key]}")
        self.outcomes[key] = Option(key, place, value, outcome, why, tuple(keys), refuses)

    def _carried(self, key: str, *keys: str, why: str = "") -> None:
        self._record(key, "carried", why or ", ".join(keys), keys)

    def _set(self, key: str, name: str, value: Any) -> None:
        """Carry an option as the value of taut's key ``name``."""
        self.settings[name] = value
        self._carried(key, name)

    def _lacking(self, key: str, why: str) -> None:
        self._record(key, "lacking", why)

    def _needless(self, why: str, *keys: str) -> None:
        for key in keys:
            self._record(key, "needless", why)

    def _value(self, key: str, default: Any = None) -> Any:
        """An option's value; ``default`` where it is not set or unknown."""
        option = self.given.get(key)
        return default if option is None or option.obstacle else option.value

    def _is_unknown(self, key: str) -> bool:
        """Whether it is set to an unknown value."""
        return key in self.given and bool(self.given[key].obstacle)

    def _fill_in(self, key: str, word: str) -> None:
        """Leave a value to the user."""
        self.settings.pop(key, None)
        self.unfilled[key] = word

    def carry_names(self) -> None:
        """Options whose value has the same meaning in taut."""
        for key, name in load_table().keys_of(self.recipe.framework).items():
            if key not in self.given:
                continue
            value = self._value(key)
            if self._is_unknown(key):
                self._fill_in(name, name.rpartition(".")[2].upper())
            elif value is not None and not isinstance(value, bool | int | float | str):
                self._lacking(key, f"one value is expected by {name}")
            else:
                if value is None or (name == "optim.clip_grad_norm" and value == 0):
                    value = "none" if name == "optim.clip_grad_norm" else None
                if value is not None:
                    self.settings[name] = value
                self._carried(key, name)

    def carry_model(self) -> None:
        """The model."""
        model = str(self.recipe.model)
        self.settings["model"] = str(home_path(model)) if model[0] == "~" else model
        names = ("model", "model_name_or_path", "model.model_name_or_path")
        key = next(name for name in names if name in self.recipe.settings)
        if isinstance(self.recipe.settings[key].value, list | dict):
            self._lacking(key, "several values in the place of one model")
            self._fill_in("model", "MODEL")
        elif self.facts.answer("is_adapter").holds:
            self._lacking(
                key, "an adapter in the model's place: name its base model, and it as lora.adapter"
            )
        else:
            self._carried(key, "model")
            self._carry_revision(model)
        if self.is_swift and self.facts.model is None and not self._uses_hugging_face():
            self.assumed.append(f"{model} is the same on the Hugging Face hub as on ModelScope")
        if self.recipe.framework == "trl" and "router_aux_loss_coef" not in self.given:
            config = self.facts.file("config.json")
            why = "of a mixture of experts trl adds 0.001 times the router's auxiliary loss"
            if config is None:
                self.assumed.append(f"{model} is no mixture of experts: {why}")
            elif "output_router_logits" in config or "num_experts_per_tok" in config:
                self._lacking("router_aux_loss_coef", f"not set: {why}")

    def _carry_revision(self, model: str) -> None:
        """A revision of the hub's is part of a model's name."""
        revision = self._value("model_revision")
        if revision is None:
            return
        if revision in ("main", "master"):
            self._needless("the hub's own default", "model_revision")
        elif any((base / home_path(model)).is_dir() for base in (Path(), self.facts.directory)):
            self._needless("a directory has no revisions", "model_revision")
        else:
            self._set("model_revision", "model", f"{model}@{revision}")

    def _uses_hugging_face(self) -> bool:
        variable = self.recipe.environment.get("USE_HF")
        return self._value("use_hf") in (True, 1) or (
            variable is not None and variable.value in ("1", 1, "true")
        )

    # -- data

    def carry_data(self) -> None:
        """Training data and evaluation data."""
        if self.is_swift:
            self._carry_swift_data()
        elif self.is_hf:
            self._carry_trl_data()
        else:
            self._carry_openrlhf_data()

    def _set_data(
        self, key: str, name: str, sources: list[dict[str, Any]], lacks: str = ""
    ) -> None:
        """Set ``name`` to the sources, or leave it to the user where taut cannot express them."""
        if lacks or not sources:
            self._lacking(key, lacks or "no data are named")
            self._fill_in(name, "ROWS.jsonl" if name == "data.train" else "EVAL.jsonl")
            return
        is_one_path = len(sources) == 1 and set(sources[0]) == {"path"}
        self._set(key, name, sources[0]["path"] if is_one_path else sources)

    def _carry_trl_data(self) -> None:
        mixtures = [key for key in ("datasets", "dataset_mixture.datasets") if key in self.given]
        if mixtures:
            self._carry_mixture(mixtures[0])
        else:
            self._carry_trl_name()
        text = self._value("dataset_text_field")
        if text in (None, "text"):
            self._needless("what taut reads in any case", "dataset_text_field")
        else:
            self._set("dataset_text_field", "data.columns", {"text": text})

    def _carry_trl_name(self) -> None:
        """``dataset_name`` with its configuration and splits."""
        path = self.recipe.data
        keys = ("dataset_config", "dataset_train_split")
        if path is None:
            self._set_data("dataset_name", "data.train", [])
            self._needless("part of dataset_name, which is not known", *keys, "dataset_test_split")
        elif Path(path).suffix in SUFFIXES:
            self._set_data("dataset_name", "data.train", [{"path": path}])
            self._needless("a file has no splits", *keys, "dataset_test_split")
        else:
            source = _hub(path) | _present("name", self._value("dataset_config"))
            train = source | {"split": self._value("dataset_train_split", "train")}
            self._set_data("dataset_name", "data.train", [train])
            for key in keys:
                self._carried(key, "data.train")
            self._carry_trl_evaluation(source)
            return
        self._carry_trl_evaluation(None)

    def _carry_trl_evaluation(self, source: dict[str, Any] | None) -> None:
        strategy = self._value("eval_strategy", "no")
        if strategy in ("no", False) or source is None:
            self._needless("nothing is evaluated", "eval_strategy", "eval_steps")
            if "dataset_test_split" not in self.outcomes:
                self._needless("nothing is evaluated", "dataset_test_split")
            return
        split = self._value("dataset_test_split", "test")
        self._set("eval_strategy", "data.eval", [source | {"split": split}])
        self._carried("dataset_test_split", "data.eval")
        self._carry_eval_steps("eval_steps")

    def _carry_eval_steps(self, key: str) -> None:
        steps = self._value(key)
        if type(steps) is int and steps > 0:
            self._set(key, "eval.every", steps)
        elif not self._is_unknown(key):
            self._needless("how often is evaluated does not change what is learned", key)

    def _carry_mixture(self, key: str) -> None:
        """trl's ``datasets``, open-r1's ``dataset_mixture``."""
        entries = self._value(key)
        sources, lacks = list[dict[str, Any]](), list[str]()
        for entry in entries if isinstance(entries, list) else []:
            if not isinstance(entry, dict):
                lacks.append(f"{entry} is no data set")
                continue
            path = entry.get("path", entry.get("id"))
            source = _hub(str(path)) | _present("name", entry.get("name", entry.get("config")))
            source["split"] = entry.get("split") or "train"
            formats = {
                ("messages",): "messages",
                ("prompt", "completion"): "completion",
                ("text",): "text",
            }
            columns = entry.get("columns")
            if columns is not None and tuple(columns) not in formats:
                lacks.append(f"columns {columns} of {path}")
            elif columns is not None:
                source["format"] = formats[tuple(columns)]
            if entry.get("weight") not in (None, 1, 1.0):
                lacks.append(f"{entry['weight']} of the rows of {path}, the same in each epoch")
            lacks += [f"{name} of {path}" for name in ("data_dir", "data_files") if entry.get(name)]
            sources.append(source)
        self._set_data(key, "data.train", sources, "; ".join(lacks))
        self._needless("the mixture is in its place", "dataset_name")
        self._needless("the order of rows follows from seed", "dataset_mixture.seed")
        self._needless("part of the mixture", "dataset_config", "dataset_train_split")
        self._carry_trl_evaluation(None)

    def _carry_swift_data(self) -> None:
        uses_hugging_face = self._uses_hugging_face()
        for key, name in (("dataset", "data.train"), ("val_dataset", "data.eval")):
            value = self._value(key)
            if name == "data.eval" and is_off(value):
                why = "nothing of the data is for evaluation, or split_dataset_ratio says it"
                self._needless(why, "eval_strategy", "eval_steps", key)
                continue
            words = value if isinstance(value, list) else [value]
            sources, reasons = list[dict[str, Any]](), list[str]()
            for word in words:
                source = None if word is None else _swift_source(str(word), uses_hugging_face)
                if isinstance(source, dict):
                    sources.append(source)
                elif source is not None:
                    reasons.append(source)
            self._set_data(key, name, sources, "; ".join(dict.fromkeys(reasons)))
            if name == "data.eval":
                self._carried("eval_strategy", "data.eval")
                self._carry_eval_steps("eval_steps")
        columns, names = self._value("columns"), load_table().columns
        if isinstance(columns, dict) and set(map(str, columns.values())) <= names.keys():
            self._set(
                "columns", "data.columns", {names[ours]: theirs for theirs, ours in columns.items()}
            )
        elif "columns" in self.given and not self._is_unknown("columns"):
            self._lacking("columns", "columns that taut has no name for")
        if "self-cognition" not in str(self._value("dataset", "")):
            self._needless(
                "fills in rows of swift/self-cognition only", "model_name", "model_author"
            )
        else:
            for key in ("model_name", "model_author"):
                if key in self.given:
                    self._lacking(
                        key, "fills in {{NAME}} and {{AUTHOR}} in rows of swift/self-cognition"
                    )

    def _carry_openrlhf_data(self) -> None:
        value = self._value
        kinds = (
            ("data.dataset", "data.dataset_split", "data.train"),
            ("eval.dataset", "eval.split", "data.eval"),
        )
        for key, split_key, name in kinds:
            paths = [path.strip() for path in str(value(key) or "").split(",") if path.strip()]
            if not paths and name == "data.eval":
                self._needless("nothing is evaluated", key, split_key, "eval.steps")
                continue
            lacks = "; ".join(
                f"a directory in a data set ({path})" for path in paths if "@" in path
            )
            split = value(split_key, "train")
            sources = [
                {"path": path} if Path(path).suffix in SUFFIXES else _hub(path) | {"split": split}
                for path in paths
            ]
            self._set_data(key, name, sources, lacks)
            self._carried(split_key, name)
            if name == "data.eval":
                self._carry_eval_steps("eval.steps")

    def carry_targets(self) -> None:
        """The columns that are read and the tokens that are trained on."""
        if self.is_swift:
            names = {"default": "assistant", "last_round": "last", "all": "all"}
            scale = self._value("loss_scale", "default")
            if isinstance(scale, str) and scale in names:
                self._set("loss_scale", "data.targets", names[scale])
            elif not self._is_unknown("loss_scale"):
                self._lacking("loss_scale", "weights of tokens by a pattern")
            self._needless("follows from loss_scale", "is_binary_loss_scale")
            self._carry_thoughts()
        elif self.is_hf:
            self._carry_trl_targets()
        else:
            self._carry_openrlhf_rows()

    def _carry_thoughts(self) -> None:
        """ms-swift puts an empty thought before answers without one, for models that can think."""
        key = "add_non_thinking_prefix"
        why = "swift puts an empty thought before answers without one"
        thinks = self.facts.answer("template_thinks").holds
        if self._is_unknown(key):
            return
        if self.recipe.value(key, True) is not False and thinks is not False:
            if thinks:
                self._lacking(key, f"{why}: put it into the rows")
                return
            self.assumed.append(
                f"the model's template has no switch for thinking: of one that has, {why}"
            )
        self._needless("nothing is put before answers", key)

    def _carry_trl_targets(self) -> None:
        keys = ("assistant_only_loss", "completion_only_loss")
        if any(self._is_unknown(key) for key in keys):
            self._fill_in("data.targets", "TARGETS")
            return
        row = self.facts.first_row
        if any(self._value(key) for key in keys):
            self.settings["data.targets"] = "assistant"
        elif self._value("completion_only_loss") is False or "data.columns" in self.settings:
            self.settings["data.targets"] = "all"
        elif isinstance(row, Mapping):
            is_completion = {"prompt", "completion"} <= row.keys()
            self.settings["data.targets"] = "assistant" if is_completion else "all"
        else:
            self._fill_in("data.targets", "TARGETS")
            self._needless("off", "completion_only_loss")
            self._lacking(
                keys[0],
                "off: trl learns all tokens of messages (data.targets=all), and of prompts with completions the "
                "completions (data.targets=assistant); the rows are not here",
            )
            return
        for key in keys:
            self._carried(key, "data.targets")

    def _carry_openrlhf_rows(self) -> None:
        """Columns, targets and template, which depend on each other."""
        value, keys = self._value, ("data.input_key", "data.output_key")
        question, answer = value(keys[0], "input"), value(keys[1])
        if value("model.pretrain_mode_enable"):
            self.settings |= {"data.format": "text", "data.columns": {"text": question}}
            self._carried("model.pretrain_mode_enable", "data.format")
            self._carried(keys[0], "data.columns")
            self._needless(
                "text alone is read", keys[1], "data.apply_chat_template", "data.input_template"
            )
            self._needless("text alone is read", "data.multiturn", "data.tokenizer_chat_template")
            return
        self._needless("off", "model.pretrain_mode_enable")
        if value("data.apply_chat_template"):
            if answer is None:
                self.settings["data.columns"] = {"messages": question}
            else:
                self.settings["data.columns"] = {"instruction": question, "output": answer}
                self.assumed.append(f"{question} and {answer} are texts, not lists of messages")
            self._needless(
                "rows go through the chat template",
                "data.apply_chat_template",
                "data.input_template",
            )
            if not is_off(value("data.tokenizer_chat_template")):
                self._lacking("data.tokenizer_chat_template", "write it to a file: data.template")
                self._fill_in("data.template", "TEMPLATE.jinja")
        else:
            self.settings["data.columns"] = {"prompt": question} | _present("completion", answer)
            if answer is None and not self._is_unknown(keys[1]):
                self._lacking(keys[1], "not set: which column holds the answers is not known")
            template = value("data.input_template", "User: {}\nAssistant: ")
            if template is None or "{}" not in str(template):
                self._needless("off", "data.input_template")
            else:
                why = f"the prompt is written as {json.dumps(template)}, not with a chat template: put it into the rows"
                self._lacking("data.input_template", why)
            self._needless("off", "data.apply_chat_template")
            self._needless("no chat template is used", "data.tokenizer_chat_template")
        for key in keys:
            if key not in self.outcomes:
                self._carried(key, "data.columns")
        self._set(
            "data.multiturn", "data.targets", "assistant" if value("data.multiturn") else "last"
        )

    def carry_length(self) -> None:
        """Long rows, and the recipe's chat template."""
        if "max_length" in self.given and self.is_hf and not self._is_unknown("max_length"):
            length = self._value("max_length")
            if length is None and not self.is_swift:
                del self.settings["data.max_length"]
                self.settings["data.too_long"] = "error"
                self.assumed.append(
                    "no row is longer than the model's context, which trl would train on"
                )
            elif length is not None:
                self.settings["data.max_length"] = length
            self._carried("max_length", "data.max_length")
        elif self._is_unknown("max_length"):
            self._fill_in("data.max_length", "MAX_LENGTH")
        strategy = self._value("truncation_strategy")
        if strategy in (None, "delete", "right"):
            self._set(
                "truncation_strategy",
                "data.too_long",
                "truncate" if strategy == "right" else self.settings["data.too_long"],
            )
        else:
            self._lacking("truncation_strategy", "data.too_long cuts at the end, drops, or refuses")
        if self._value("truncation_mode", "keep_start") == "keep_start":
            self._carried("truncation_mode", "data.too_long")
        else:
            self._lacking("truncation_mode", "data.too_long=truncate keeps the start")
        for key in ("chat_template", "chat_template_path"):
            template = self._value(key)
            if is_off(template):
                self._needless("off", key)
            elif key == "chat_template_path" and str(template).endswith(".jinja"):
                self._set(key, "data.template", template)
            else:
                self._lacking(key, "write the template to a file: data.template")
                self._fill_in("data.template", "TEMPLATE.jinja")
        if self.is_swift:
            self._carry_system_and_thinking()
            self._carry_limits_of_pictures()

    def _carry_system_and_thinking(self) -> None:
        system = self._value("system")
        if is_off(system):
            self._needless("off", "system")
        elif str(system).endswith(".txt"):
            self._lacking("system", "write the text of the file: data.system")
            self._fill_in("data.system", "TEXT")
        else:
            self._set("system", "data.system", system)
        if (thinking := self._value("enable_thinking")) is not None:
            values = {"enable_thinking": thinking}
            self._set("enable_thinking", "data.chat_template_kwargs", values)

    def _carry_limits_of_pictures(self) -> None:
        names = {
            "$MAX_PIXELS": "data.images.max_pixels",
            "max_pixels": "data.images.max_pixels",
            "$FPS": "data.images.fps",
            "$FPS_MAX_FRAMES": "data.images.max_frames",
        }
        for key, name in names.items():
            if key not in self.given or self._is_unknown(key):
                continue
            value = self.given[key].value
            value = parsed(value) if isinstance(value, str) else value
            if value is None or self.is_vision is False:
                self._needless("the model takes no pictures", key)
            elif not isinstance(value, int | float):
                self._lacking(key, f"a number is expected by {name}")
            else:
                self._set(key, name, min(value, self.settings.get(name, value)))

    # -- steps

    def carry_batch(self) -> None:
        """Samples per step: a product with the number of processes, unless the framework counts packs."""
        if not self.is_hf:
            return
        keys = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "sequence_parallel_size",
        )
        number, stated_by = self.processes.number, self.processes.stated_by
        if self.processes.is_assumed:
            self.assumed.append(
                "1 process: the recipe does not say how many; --processes N says it"
            )
        defaults = (1, None, 1) if self.is_swift else (8, 1, 1)
        each, times, shards = map(self._value, keys, defaults)
        for key, value in zip(keys, (each, times, shards), strict=True):
            if key in self.given and not self._is_unknown(key) and not _is_count(value):
                self._lacking(key, "a whole number above 0 is expected")
        if times is None and keys[1] not in self.given and _is_count(each) and number:
            times = max(1, math.ceil(16 / each / number))
        is_known = all(map(_is_count, (each, times, shards, number)))
        if number is None or not is_known or any(self._is_unknown(key) for key in keys):
            self._fill_in("batch.samples_per_step", "SAMPLES")
            self._carry_packing("an unknown number of packs")
            if number is None:
                why = f"how many processes is not known ({self.processes.reason}): --processes N"
                for key in stated_by - self.outcomes.keys():
                    self._lacking(key, why)
            why = "batch.samples_per_step: a factor of SAMPLES"
        else:
            rows = each * times * max(1, number // shards)
            self.settings["batch.samples_per_step"] = rows
            self._carry_packing(f"{rows} packs")
            why = f"batch.samples_per_step: {each} x {times} x {number} processes"
        for key in (*keys[:2], *sorted(stated_by)):
            if key not in self.outcomes:
                self._carried(key, "batch.samples_per_step", why=why)

    def _carry_packing(self, packs: str) -> None:
        """trl and ms-swift count packs where samples are packed."""
        if is_off(self._value("packing")) and not self._is_unknown("packing"):
            self._needless(
                "packing is always on and exact", "packing", "packing_length", "packing_strategy"
            )
            return
        self._fill_in("batch.samples_per_step", "SAMPLES")
        length = self._value("packing_length") or self.settings.get("data.max_length", "max_length")
        self._lacking(
            "packing",
            f"a step is {packs} of {length} tokens; batch.samples_per_step counts samples: multiply by those in a pack",
        )
        self._needless("reported with packing", "packing_length")
        if self._value("packing_strategy") == "wrapped":
            self._lacking("packing_strategy", "samples are joined and cut; taut cuts none")
        else:
            self._needless("packing is exact", "packing_strategy")

    def carry_duration(self) -> None:
        """Epochs or steps."""
        if not self.is_hf:
            return
        steps = self._value("max_steps", -1)
        keys = ("max_epochs", "num_train_epochs")
        if self._is_unknown("max_steps") or (isinstance(steps, int) and steps > 0):
            self.settings.pop("epochs")
            self.settings["steps"] = steps
            if self._is_unknown("max_steps"):
                self._fill_in("steps", "STEPS")
            self._carried("max_steps", "steps")
            if not is_off(self._value("max_epochs")):
                self._lacking(
                    "max_epochs", "training ends at max_steps or max_epochs, whichever is first"
                )
            self._needless("max_steps holds", *(key for key in keys if key not in self.outcomes))
            return
        self._needless("off", "max_steps")
        for key in keys:
            if self._is_unknown(key):
                self._fill_in("epochs", "EPOCHS")
                return
            if self._value(key) is not None:
                self._set(key, "epochs", self._value(key))
                break
        self._needless("max_epochs holds", *(key for key in keys if key not in self.outcomes))

    def carry_schedule(self) -> None:
        """The learning rate, its schedule and warm-up."""
        self._carry_rate()
        framework = self.recipe.framework
        key = "lr_scheduler_type" if self.is_hf else "lr_scheduler"
        schedule = str(self._value(key, DEFAULT_SCHEDULE.get(framework, "linear")))
        if self._is_unknown(key):
            self._fill_in("optim.schedule", "SCHEDULE")
        elif schedule in SCHEDULES:
            self._set(key, "optim.schedule", SCHEDULES[schedule])
        else:
            self._lacking(key, f"schedules are {', '.join(sorted(set(SCHEDULES.values())))}")
            self._fill_in("optim.schedule", "SCHEDULE")
        self._carry_lowest_rate(schedule)
        self._carry_warmup(schedule)
        if self.is_hf and self._value("optim") in EIGHT_BITS:
            self._set("optim", "optim.state", "int8")

    def _carry_rate(self) -> None:
        if not self.is_hf:
            betas = self._value("adam.betas")
            if isinstance(betas, list) and len(betas) == 2:
                self.settings["optim.beta1"], self.settings["optim.beta2"] = betas
                self._carried("adam.betas", "optim.beta1", "optim.beta2")
            return
        if self.is_swift:
            is_full = self._value("tuner_type", "lora") == "full"
            self.settings["optim.learning_rate"] = 1e-5 if is_full else 1e-4
        if self._is_unknown("learning_rate"):
            self._fill_in("optim.learning_rate", "LEARNING_RATE")
        elif self._value("learning_rate") is not None:
            self.settings["optim.learning_rate"] = self._value("learning_rate")
        self._carried("learning_rate", "optim.learning_rate")

    def _carry_lowest_rate(self, schedule: str) -> None:
        name, is_min = "optim.min_learning_rate_ratio", schedule == "cosine_with_min_lr"
        self.settings[name] = 0.0
        if not self.is_hf:
            if is_min:
                self._set("min_lr_ratio", name, self._value("min_lr_ratio", 0.1))
            self._needless("of cosine_with_min_lr only", *(() if is_min else ("min_lr_ratio",)))
            return
        prefix = "lr_scheduler_kwargs."
        rate = self.settings.get("optim.learning_rate")
        for key in [key for key in self.given if key.startswith(prefix)]:
            value = self._value(key)
            if is_min and key == f"{prefix}min_lr_rate":
                self.settings[name] = value
            elif (
                is_min
                and key == f"{prefix}min_lr"
                and isinstance(value, int | float)
                and isinstance(rate, float)
            ):
                self.settings[name] = float(f"{value / rate:.6g}")
            else:
                self._lacking(key, "schedules take no other arguments")
                continue
            self._carried(key, name)
        self._needless(
            "off",
            *(["lr_scheduler_kwargs"] if is_off(self._value("lr_scheduler_kwargs")) else []),
        )

    def _carry_warmup(self, schedule: str) -> None:
        """``warmup_steps`` below 1 is a share of all steps."""
        keys = ("warmup_steps", "warmup_ratio") if self.is_hf else ("lr_warmup_ratio",)
        default = 0.0 if self.is_hf else 0.03
        if any(self._is_unknown(key) for key in keys):
            self._fill_in("optim.warmup_ratio", "WARMUP_RATIO")
            return
        warmups = {key: self._value(key, default if len(keys) == 1 else None) or 0 for key in keys}
        if schedule == "constant":
            self.settings["optim.warmup_ratio"] = 0.0
            self._needless("a constant schedule has no warm-up there", *keys)
            return
        if all(warmups.values()) and len(keys) == 2:
            self._lacking(
                "warmup_ratio", "set as well as warmup_steps: which holds depends on the release"
            )
            warmups["warmup_ratio"] = 0
        value = max(warmups.values())
        if value >= 1:
            self.settings["optim.warmup_steps"] = int(value)
        else:
            self.settings["optim.warmup_ratio"] = float(value)
        name = "optim.warmup_steps" if value >= 1 else "optim.warmup_ratio"
        for key in keys:
            if key not in self.outcomes:
                self._carried(key, name)

    # -- the model's parts

    def carry_adapters(self) -> None:
        """LoRA: in trl with use_peft, in swift unless tuner_type differs, in OpenRLHF with a rank above 0."""
        if self.is_swift:
            tuner = self._value("tuner_type", "lora")
            if tuner in ("full", "lora"):
                self._carried("tuner_type", "lora.rank")
            has, defaults = bool(tuner != "full"), (8, 32, 0.05)
            names = ("lora_rank", "lora_alpha", "lora_dropout")
            targets, saved = "target_modules", "modules_to_save"
        elif self.is_hf:
            has, defaults = bool(self._value("use_peft")), (16, 32, 0.05)
            names = ("lora_r", "lora_alpha", "lora_dropout")
            targets, saved = "lora_target_modules", "lora_modules_to_save"
            self._carried("use_peft", "lora.rank")
        else:
            has, defaults = bool(self._value("ds.lora.rank", 0)), (0, 16, 0.0)
            names = ("ds.lora.rank", "ds.lora.alpha", "ds.lora.dropout")
            targets, saved = "ds.lora.target_modules", ""
        others = (targets, "target_regex", saved, "use_rslora", "use_dora")
        adapter = self._value("adapters")
        if is_off(adapter):
            self._needless("off", "adapters")
        elif not has:
            self._lacking(
                "adapters", "an adapter below a model that is trained whole: merge it first"
            )
        elif isinstance(adapter, list) and len(adapter) > 1:
            self._lacking("adapters", "several adapters")
        else:
            self._set(
                "adapters", "lora.adapter", adapter[0] if isinstance(adapter, list) else adapter
            )
            self._needless("the adapter's own settings hold", *names, *others)
            return
        if not has:
            self._needless("no adapters are trained", *names, *others)
            return
        taut_names = ("lora.rank", "lora.alpha", "lora.dropout")
        for key, name, default in zip(names, taut_names, defaults, strict=True):
            if self._is_unknown(key):
                self._fill_in(name, name.rpartition(".")[2].upper())
            else:
                self._set(key, name, self._value(key, default))
        for key in ("use_rslora", "use_dora"):
            if self._value(key):
                self._set(key, f"lora.{key.removeprefix('use_')}", True)
            else:
                self._needless("off", key)
        self._carry_modules(targets, saved)

    def carry_quantisation(self) -> None:
        """A base in 4 or 8 bits under adapters, by bitsandbytes; the table has why the rest is lacking."""
        has = any(
            key in self.settings or key in self.unfilled for key in ("lora.rank", "lora.adapter")
        )
        method, kind = self._value("quant_method"), self._value("bnb_4bit_quant_type")
        if not has or self.settings.get("lora.dora"):
            return
        if not is_off(method) and method not in ("bnb", "bitsandbytes"):
            return
        bits = self._value("quant_bits", 0)
        in_4bit = (
            "load_in_4bit",
            "ds.load_in_4bit",
            *(("quant_bits",) if str(bits) == "4" else ()),
        )
        in_8bit = ("load_in_8bit", *(("quant_bits",) if str(bits) == "8" else ()))
        chosen = [key for key in in_4bit if self._value(key)]
        if chosen and kind in (None, "nf4"):
            for key in chosen:
                self._set(key, "quantise", "nf4")
            text = "quantise=nf4 quantises the maxima of blocks too"
            self._needless(text, "bnb_4bit_use_double_quant", "use_bnb_nested_quant")
            self._needless("quantise=nf4", "bnb_4bit_quant_type", "quant_method")
            text = "products are in the run's dtype"
            self._needless(text, "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
        elif not chosen and (chosen := [key for key in in_8bit if self._value(key)]):
            for key in chosen:
                self._set(key, "quantise", "int8")
            self._needless("quantise=int8", "quant_method")

    def _carry_modules(self, targets: str, saved: str) -> None:
        """The modules with adapters, and those trained in full."""
        modules, regex = _names(self._value(targets)), self._value("target_regex")
        if regex:
            self._set("target_regex", "lora.targets", [f"/{regex}/"])
            self._needless("target_regex holds", targets)
        elif self._is_unknown(targets):
            self._fill_in("lora.targets", "MODULES")
        elif not modules and self.is_hf and not self.is_swift:
            config = self.facts.file("config.json") or {}
            model_type = str(config.get("model_type"))
            if chosen := load_table().peft_targets.get(model_type):
                self.settings["lora.targets"] = list(chosen)
                self.assumed.append(f"peft adapts {', '.join(chosen)} of {model_type} by itself")
                self._carried(targets, "lora.targets")
            else:
                self._lacking(targets, UNKNOWN_TARGETS)
                self._fill_in("lora.targets", "MODULES")
        elif modules in ([], ["all-linear"]):
            adapts_all = self.is_vision is True and not self.is_swift
            self._set(targets, "lora.targets", list(PARTS) if adapts_all else "all-linear")
            if self.is_vision is None and not self.is_swift:
                text = "of one that does peft's all-linear adapts the vision tower too"
                self.assumed.append(f"the model takes no pictures: {text}")
        elif {"all-linear", "all-embedding", "all-norm", "embed_tokens"} & set(modules):
            self._lacking(targets, "adapters on all linear modules and on others, or on embeddings")
            self._fill_in("lora.targets", "MODULES")
        else:
            self._set(targets, "lora.targets", modules)
        whole = _names(self._value(saved))
        if any(name.startswith("all-") for name in whole):
            self._lacking(saved, "lora.modules_to_save takes names of modules")
        elif whole:
            self._set(saved, "lora.modules_to_save", whole)
        else:
            self._needless("off", saved)

    def carry_tokens(self) -> None:
        """ms-swift's ``new_special_tokens``: words, or files of them."""
        words = self._value("new_special_tokens")
        words = words if isinstance(words, list) else [words]
        if any(str(word).endswith(".txt") for word in words):
            self._lacking("new_special_tokens", "name the words of the file: tokens.add")
        elif not is_off(words):
            self._set("new_special_tokens", "tokens.add", [str(word) for word in words])

    def carry_parts(self) -> None:
        """The parts of a vision-language model that ms-swift trains (by default the language model), with rates."""
        keys = (*FREEZES, *RATES)
        if not self.is_swift or self.is_vision is False:
            self._needless("the model takes no pictures", *keys)
            return
        has_adapters = "lora.rank" in self.settings or "lora.adapter" in self.settings
        if self.is_vision is None and not any(key in self.given for key in keys):
            if not has_adapters:
                parts = " and ".join(RATES.values())
                self.assumed.append(
                    f"the model takes no pictures: of one that does swift freezes {parts}"
                )
            return
        frozen = [part for key, (part, default) in FREEZES.items() if self._value(key, default)]
        trained = [part for part, _ in FREEZES.values() if part not in frozen]
        name = "lora.targets" if has_adapters else "freeze"
        if not has_adapters and frozen:
            self.settings["freeze"] = frozen
        elif has_adapters and trained != ["language_model"]:
            if self.settings.get("lora.targets") == "all-linear":
                self.settings["lora.targets"] = trained
            else:
                for key in FREEZES:
                    if key in self.given:
                        self._lacking(
                            key, "parts of the model as well as modules by name: lora.targets"
                        )
        for key in FREEZES:
            if key not in self.outcomes:
                self._carried(key, name)
        rates = {part: self._value(key) for key, part in RATES.items() if part in trained}
        if rates := {part: rate for part, rate in rates.items() if rate is not None}:
            self.settings["optim.group_learning_rates"] = rates
        for key, part in RATES.items():
            if part in trained:
                self._carried(key, "optim.group_learning_rates")
            else:
                self._needless(f"{part} is frozen", key)

    def carry_precision(self) -> None:
        """Training entirely in float32; 16 bits are taut's default."""
        weights = self._value("torch_dtype" if self.is_swift else "dtype", "float32")
        is_mixed = self._value("bf16") is not False or bool(self._value("fp16"))
        if self.is_swift and self._value("bf16") is None:
            is_mixed = "torch_dtype" not in self.given
        if weights == "float32" and not is_mixed:
            self.settings["dtype"] = "float32"
            for key in ("bf16", "torch_dtype", "dtype"):
                self._carried(key, "dtype")

    def carry_distribution(self) -> None:
        """deepspeed and fsdp: sharding is machine, offloading is carried, their files are not read."""
        known = {
            "deepspeed": {f"zero{stage}" for stage in range(4)},
            "fsdp": {"fsdp2", "full_shard", "shard_grad_op", "hybrid_shard", "auto_wrap", "true"},
        }
        for key, names in known.items():
            value = self._value(key)
            words = (
                set(str(value).lower().split())
                if not isinstance(value, list)
                else set(map(str, value))
            )
            if is_off(value) or words <= names:
                self._record(key, "machine", "taut shards over all processes (FSDP2)")
            elif words <= names | OFFLOADING:
                self._set(key, "parallel.cpu_offload", value=True)
            else:
                self._lacking(key, "the settings in its file are not read")
        for key in ("offload_params", "fsdp_offload_params", "cpu_offload"):
            if self._value(f"fsdp_config.{key}") is True:
                self._set(f"fsdp_config.{key}", "parallel.cpu_offload", value=True)
        if self._value("activation_offloading") is True:
            self._set("activation_offloading", "activation_checkpointing", "offload")

    def finish(self) -> Carried:
        """The outcomes of the remaining options, from the table."""
        for key, option in self.given.items():
            if key not in self.outcomes:
                judged = judge_option(option, self.known_options)
                self._record(key, judged.outcome, judged.why, refuses=judged.refuses)
        settings = {key: value for key, value in self.settings.items() if key not in self.unfilled}
        return Carried(settings, self.unfilled, tuple(self.outcomes.values()), tuple(self.assumed))

    # -- reports

    def carry_reports(self) -> None:
        """Where curves go: TensorBoard, Weights & Biases, trackio; other services take a class of the user's."""
        if not self.is_hf:
            if self._value("logger.wandb.key"):
                self._report("logger.wandb.key", "wandb", ("logger.wandb.project",))
            if self._value("logger.tensorboard_dir"):
                self._report("logger.tensorboard_dir", "tensorboard", ())
            return
        services = [name.lower() for name in _names(self._value("report_to"))]
        known = [name for name in dict.fromkeys(services) if name in REPORTS]
        for name in known:
            self._report("report_to", name, REPORTS[name])
        others = [name for name in services if name not in (*REPORTS, "none", "all")]
        if others:
            why = f"{', '.join(others)}: a class of your own, log.sinks (docs/reports.md)"
            keys = [f"log.{name}" for name in known]
            self.outcomes.pop("report_to", None)
            self._record("report_to", "machine", "; ".join([*keys, why]), keys)

    def _report(self, key: str, service: str, projects: Sequence[str]) -> None:
        """Report to a service, under the first of the projects that is named."""
        name = f"log.{service}"
        named = [option for option in projects if isinstance(self._value(option), str)]
        default = "huggingface" if self.is_hf else "openrlhf_train_sft"
        project = self._value(named[0]) if named else default
        self.settings[name] = True if service == "tensorboard" else project
        for option in (key, *named[:1]):
            before = self.outcomes.pop(option, None)
            keys = (*(before.keys if before else ()), name)
            self._carried(option, *keys)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _hub(path: str) -> dict[str, Any]:
    """A data set of the Hugging Face hub, or a directory."""
    return {"path": path if "/" in path else f"hf://{path}"}


def _present(key: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {key: value}


def _swift_source(word: str, uses_hugging_face: bool) -> dict[str, Any] | str:
    """The source of a ``dataset`` word of ms-swift (``HF::ID:SUBSET#COUNT``, a file), or why taut cannot express it."""
    name, has_count, count = word.partition("#")
    if has_count:
        return f"{count} rows of {name}: write them to a JSONL file"
    if Path(name).suffix in SUFFIXES:
        return {"path": name}
    if name.startswith(("HF::", "hf::")) or (uses_hugging_face and "::" not in name):
        path, _, subset = name.removeprefix("HF::").removeprefix("hf::").partition(":")
        return _hub(path) | _present("name", subset or None) | {"split": "train"}
    return f"{name} of ModelScope: write its rows to a JSONL file"


def _names(value: Any) -> list[str]:
    """Names of modules, without the commas between them in some published commands."""
    words = value if isinstance(value, list) else [] if is_off(value) else [value]
    return [name for word in words for name in str(word).replace(",", " ").split()]


def _written(value: Any) -> str:
    """A value as TOML; a string without quotes where TOML would not read it as something else."""
    if not isinstance(value, str):
        return _toml(value)
    with suppress(tomllib.TOMLDecodeError):
        tomllib.loads(f"value = {value}")
        return _toml(value)
    return value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        names = {
            key: key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml(key) for key in value
        }
        return f"{{{', '.join(f'{names[key]} = {_toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


# -- table/sft.toml


class Judgement(NamedTuple):
    """The outcome of one option."""

    outcome: Outcome
    why: str
    refuses: bool = False
    """taut does not do such a run, and no command is offered."""


@dataclass(frozen=True)
class Lacking:
    """An entry of ``[[lacking]]``."""

    why: str
    off: tuple[Any, ...]
    """Values that switch the option off, in addition to empty and false ones."""
    refuses: bool


@dataclass(frozen=True)
class Table:
    """``table/sft.toml``."""

    keys: Mapping[str, Mapping[str, str]]
    """By framework (``hf``: those with transformers' options): option -> the key of taut with the same meaning."""
    defaults: Mapping[str, Mapping[str, Any]]
    """By framework: key of taut -> the framework's default."""
    aside: Mapping[str, Judgement]
    """Options with the outcome needless or machine, by name."""
    lacking: Mapping[str, Lacking]
    variables: tuple[str, ...]
    """Prefixes of environment variables with the outcome machine."""
    numbers: frozenset[str]
    """Options that enter arithmetic; a value that is no number counts as unknown."""
    columns: Mapping[str, str]
    """ms-swift's name of a column -> taut's."""
    peft_targets: Mapping[str, tuple[str, ...]]
    """By model_type: the modules that peft adapts by default."""

    def keys_of(self, framework: str) -> Mapping[str, str]:
        """Options of a framework whose values have the same meaning in taut -> its keys."""
        return self.keys.get(framework, self.keys["hf"])


@cache
def load_table() -> Table:
    """Read the table. Raises ValueError where an option is in it twice."""
    text = files("taut.migrate").joinpath("table/sft.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    aside = dict[str, Judgement]()
    lacking = dict[str, Lacking]()
    kinds: tuple[Outcome, ...] = ("needless", "machine", "lacking")
    for kind in kinds:
        for entry in content[kind]:
            for name in entry["options"]:
                if name in aside or name in lacking:
                    raise ValueError(
                        f"table/sft.toml names {name} twice; an option has one outcome"
                    )
                if kind == "lacking":
                    off = tuple(entry["options"][name])
                    lacking[name] = Lacking(entry["why"], off, entry.get("refuses", False))
                else:
                    aside[name] = Judgement(kind, entry["why"])
    variables = tuple(name for entry in content["machine"] for name in entry.get("variables", ()))
    peft_targets = {
        model_type: tuple(entry["modules"])
        for entry in content["peft_targets"]
        for model_type in entry["model_types"]
    }
    return Table(
        keys=content["keys"],
        defaults=content["defaults"],
        aside=aside,
        lacking=lacking,
        variables=variables,
        numbers=frozenset(content["numbers"]),
        columns=content["columns"],
        peft_targets=peft_targets,
    )


def judge_option(option: Setting, known: frozenset[str]) -> Judgement:
    """The outcome of an option that ``_Draft`` does not read. ``known``: the framework's own options."""
    table, key = load_table(), option.key
    names = (key, key.partition(".")[0])
    for name in names:
        if name in table.aside:
            return table.aside[name]
    for name in names:
        if name in table.lacking:
            entry = table.lacking[name]
            if not option.obstacle and is_off(option.value, entry.off):
                return Judgement("needless", "off, or what taut does in any case")
            return Judgement("lacking", entry.why, entry.refuses)
    if key.startswith("$") and key[1:].startswith(table.variables):
        return Judgement("machine", "how processes and memory are organised")
    if key.startswith("--"):
        return Judgement("machine", "how the processes are started")
    if key.startswith("$"):
        return Judgement("lacking", "an environment variable that is not known here")
    if names[0] in known or names[1] in known:
        return Judgement("lacking", "nothing in taut is known to mean the same")
    return Judgement("lacking", "no known option of the framework")


def is_off(value: Any, off: tuple[Any, ...] = ()) -> bool:
    """Whether this value switches an option off."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value is None or value in (False, "", "none", [], {}, *off)
