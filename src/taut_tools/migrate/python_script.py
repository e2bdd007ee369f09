"""Read the training that a Python script starts, by its calls: a trainer of trl, or transformers' Trainer.

The arguments of the first trainer, of its configuration, of LoraConfig, BitsAndBytesConfig, ``from_pretrained`` and
``load_dataset`` become options of trl. ``table/python.toml`` has their names, and what these calls do where nothing is
given. A value that is no constant is an obstacle of its option (``python_values.py``); what the script does beside its
options is the option ``script``.

A reward function of the script is ``FILE.py:NAME`` if taut calls it as TRL does (``taut.rewards.trl_style``), and the
file can be loaded without starting the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from taut.errors import ConfigError
from taut_tools.migrate.python_values import Argument, Object, Script, Unknown
from taut_tools.migrate.recipe import Setting, flattened


class PythonRecipe:
    """What a script says, as options of trl."""

    def __init__(
        self, text: str, path: Path, table: Mapping[str, Any], methods: Iterable[str]
    ) -> None:
        """Read a script. ``table`` is ``table/python.toml``. Raises ConfigError where it starts no training."""
        self.path, self.table, self.script = path, table, Script(text, path)
        self.words: Mapping[str, list[str]] = table["words"]
        self.methods = {method.replace("_", ""): method for method in methods}
        self.settings: list[Setting] = []
        self.unread: list[str] = []
        # The first trainer, or a configuration without one.
        calls = sorted(self.script.calls, key=lambda call: call.line)
        trainers = [call for call in calls if self.method_of(call, "Trainer")]
        configs = [call for call in calls if self.method_of(call, "Config")]
        if not trainers and not configs:
            raise ConfigError(
                f"{path} starts no training that is known; expected a call of a trainer (SFTTrainer, DPOTrainer, "
                "GRPOTrainer and others of trl, transformers' Trainer) or of its configuration (SFTConfig, ..., "
                "TrainingArguments); name the script that has it"
            )
        self.call = (trainers or configs)[0]
        self.method = self.method_of(self.call, "Trainer") or self.method_of(self.call, "Config")
        self.script.assumed.insert(0, f"it is read as a script of TRL: it calls {self.call.name}")
        self.take(self.call)
        if not trainers:
            why = Unknown("not said: the script calls no trainer that is known")
            for key in ("model_name_or_path", "dataset_name"):
                self.read(key, Argument(why, self.call.line))
        for call in trainers[1:]:
            where = f"{path.name}:{call.line}"
            self.unread.append(f"{where}: {call.name}, another trainer, is not read")
        # Changes of the model, the tokenizer and the trainer.
        changes = [call for call in calls if call.of and call.parts[1] in self.words["changes"]]
        if changes:
            text = "; ".join(f"line {call.line}: {call.text}" for call in changes)
            self.set("script", text, changes[0].line)

    def method_of(self, call: Object, ending: str) -> str:
        """The method of a trainer or a configuration; empty for another call."""
        name = call.parts[1]
        if name in ("Trainer", "TrainingArguments"):
            is_theirs = call.name.split(".")[0] in ("transformers", name)
            return "sft" if is_theirs and (name == "Trainer") == (ending == "Trainer") else ""
        found = name.removesuffix(ending).lower() if name.endswith(ending) else ""
        return self.methods.get(found, "")

    def placed(self, call: Object) -> dict[str, Argument]:
        """The arguments of a call by the names of options."""
        names, kind = self.table["names"], call.parts[1]
        places = {str(at): name for at, name in enumerate(self.table["places"].get(kind, []))}
        given = {places.get(name, name): one for name, one in call.arguments.items()}
        return {names.get(name, name): one for name, one in given.items()}

    def take(self, call: Object) -> None:
        """Read the arguments of a call, after what it does where they are not given."""
        every = self.table["defaults"]
        defaults = every.get(".".join(call.parts), every.get(call.parts[1], {}))
        for name, value in defaults.items():
            self.set(name, None if value == "unset" else value, call.line)
        arguments = self.placed(call).items()
        for name, one in sorted(arguments, key=lambda item: item[0] != "model_name_or_path"):
            self.read(name, one)

    def set(self, key: str, value: Any, line: int, why: str = "") -> None:
        """Add an option."""
        key = "sft_model_path" if (key, self.method) == ("model_name_or_path", "ppo") else key
        self.settings += flattened(Setting(key, value, f"{self.path.name}:{line}", why))

    def read(self, key: str, one: Argument) -> None:
        """Read an argument as an option, with the reason where its value is not known."""
        value, line = one
        name = value.parts[1] if isinstance(value, Object) and not value.is_name else ""
        if name in self.words["needless"]:
            return
        if name in self.words["configurations"] or (name and self.method_of(value, "Config")):
            self.take(value)
            return
        try:
            if reader := getattr(self, f"read_{key}", None) if value is not None else None:
                reader(one)
            else:
                self.set(key, self.name_of(value), line)
        except Unknown as error:
            self.set(key, None, line, str(error))
            self.unread.append(f"{self.settings[-1].place}: {key} is {error}")

    # -- arguments that are objects, by the names of options

    def read_model_name_or_path(self, one: Argument) -> None:
        """Read a model: its name, or the calls that load it and give it adapters."""
        call = one.value
        owner, name = call.parts if isinstance(call, Object) else ("", "")
        if name in self.words["same_model"]:
            self.read("model_name_or_path", Argument(call.of, one.line))
        elif name in self.words["models"] and "Peft" not in owner:
            if owner in self.table["tasks"]:
                self.set("task_type", self.table["tasks"][owner], call.line)
            self.take(call)
        else:
            self.set("model_name_or_path", self.script.constant(call), one.line)

    def name_of(self, value: Any) -> Any:
        """A constant, or the name of a model or tokenizer that is loaded. Raises Unknown."""
        if isinstance(value, Object) and value.parts[1] == "from_pretrained":
            value = self.placed(value).get("model_name_or_path", Argument(None, 0)).value
        return self.script.constant(value)

    def read_processing_class(self, one: Argument) -> None:
        """Read the tokenizer, where it is not the model's own, and what the script sets of it."""
        name = self.name_of(one.value)
        if name not in (setting.value for setting in self.settings if "model" in setting.key):
            self.set("processing_class", name, one.line)
        for key in ("chat_template", "eos_token"):
            if isinstance(one.value, Object) and key in one.value.arguments:
                self.read(key, one.value.arguments[key])

    def read_dataset_name(self, one: Argument) -> None:
        """Read the rows that are trained on."""
        keys = self.table["rows"]
        for name, value in self.rows(one.value).items():
            self.set(keys.get(name, name), value, one.line)

    def read_eval_dataset(self, one: Argument) -> None:
        """Read held-out rows, of which those of train_test_split follow from the rows that are trained on."""
        rows = self.rows(one.value)
        if "test_size" not in rows:
            self.set("eval_dataset", [rows], one.line)

    def rows(self, value: Any) -> dict[str, Any]:
        """A data set: path, name, split, and test_size of one that is split. Raises Unknown."""
        constant = self.script.constant
        if not isinstance(value, Object) or value.is_name:
            raise Unknown(f"rows of the script's own: {constant(value)!s:.60}")
        given, name = self.placed(value), value.parts[1]
        if value.name == "[]":
            rows = self.rows(value.of)
            return rows if "test_size" in rows else rows | {"split": constant(given["0"].value)}
        if name == "load_dataset":
            rows = {key: constant(one.value) for key, one in given.items()}
            files, split = rows.get("data_files"), str(rows.get("split", "train"))
            files = files.get(split) if isinstance(files, dict) else files
            is_file = rows.get("path") in ("json", "csv", "parquet") and isinstance(files, str)
            rows = {"path": files} if is_file and "[" not in split else rows
            rows = {
                key: one for key, one in rows.items() if one and key not in self.words["loading"]
            }
            texts = {key for key, one in rows.items() if isinstance(one, str)}
            if others := (rows.keys() | {"path"}) - (texts & {"path", "name", "split"}):
                raise Unknown(f"{rows.get('path')}, loaded with {min(others)}")
            return rows
        if not isinstance(value.of, Object) or value.of.is_name:
            constant(value)
        rows = self.rows(value.of)
        if name == "train_test_split" and "train_size" not in given:
            return rows | {"test_size": constant(given.get("test_size", Argument(0.25, 0)).value)}
        if name not in self.words["same_rows"]:
            raise Unknown(f"{rows['path']}, of which .{name} in line {value.line} makes other rows")
        return rows

    def read_reward_funcs(self, one: Argument) -> None:
        """Read rewards: functions of the script and of modules, and models."""
        found: dict[str, list[str]] = {"reward_model_name_or_path": [], "reward_funcs": []}
        for value in one.value if isinstance(one.value, list) else [one.value]:
            if not isinstance(value, Object) or not (value.is_name or value.function):
                found["reward_model_name_or_path"].append(self.name_of(value))
                continue
            why = self.misfit(value)
            own = f"{self.path}:{value.name}" if value.function and not why else f"own.{value.name}"
            found["reward_funcs"].append(value.name if "." in value.name else own)
            if why:
                self.unread.append(f"{self.path.name}:{value.line}: {value.name} {why}")
            elif value.function:
                given = ", ".join(self.words["not_given"])
                what = (
                    f"{own} is loaded with its file and called as trl calls it, but without {given}"
                )
                self.script.assumed.append(what)
        if all(found.values()):
            raise Unknown("models and functions together")
        for key, names in found.items():
            if names:
                self.set(key, names, one.line)

    def misfit(self, value: Object) -> str:
        """Why taut cannot call a function of the script as TRL does; empty: it can."""
        if value.function is None:
            return ""
        given = value.function.args
        plain = [one.arg for one in (*given.posonlyargs, *given.args)]
        missing = {*plain[: len(plain) - len(given.defaults)]} & {*self.words["not_given"]}
        if "completions" not in (*plain, *(one.arg for one in given.kwonlyargs)):
            return "has no argument completions, by which taut knows a function of TRL's form"
        if missing:
            return f"takes {min(missing)}, which taut does not have"
        if self.call.is_loaded or not value.is_loaded:
            return "is not to be had without training: move it to a file that does not train when it is loaded"
        return ""
