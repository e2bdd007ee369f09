"""Read the training that a Python script starts, by its calls: a trainer of trl, or transformers' Trainer.

The arguments of the first trainer, of its configuration, of LoraConfig, BitsAndBytesConfig, ``from_pretrained`` and
``load_dataset`` become options of trl. ``table/python.toml`` has their names, and what these calls do where nothing is
given. A value that is no constant is an obstacle of its option (``python_values.py``); what the script does beside its
options is the option ``script``.

A reward function of the script is ``FILE.py:NAME`` if taut calls it as TRL does (``taut.rewards.trl_style``), and if the
file can be loaded without starting the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taut.errors import ConfigError
from taut.rewards.trl_style import NOT_HERE
from taut_tools.migrate.python_values import Argument, NotConstant, Object, Script
from taut_tools.migrate.recipe import Setting, flattened


class PythonRecipe:
    """What a script says, as options of trl."""

    def __init__(
        self, text: str, path: Path, table: Mapping[str, Any], methods: tuple[str, ...]
    ) -> None:
        """Read a script. ``table`` is ``table/python.toml``. Raises ConfigError where it starts no training."""
        self.path, self.table = path, table
        self.methods = {method.replace("_", ""): method for method in methods}
        self.script = Script(text, path)
        self.settings: list[Setting] = []
        self.unread: list[str] = []
        self.assumed = self.script.assumed
        self.readers: dict[str, Callable[[str, Argument], None]] = {
            "model_name_or_path": self.read_model,
            "ref_model": self.read_name,
            "reward_model_path": self.read_name,
            "teacher_model_name_or_path": self.read_name,
            "processing_class": self.read_name,
            "args": self.read_config,
            "peft_config": self.read_config,
            "quantization_config": self.read_config,
            "model_init_kwargs": self.read_table,
            "dataset_name": self.read_rows,
            "eval_dataset": self.read_rows,
            "reward_funcs": self.read_rewards,
            "callbacks": self.read_callbacks,
            "data_collator": self.read_collator,
        }
        # The first trainer, or a configuration without one.
        calls = sorted(self.script.calls, key=lambda call: call.line)
        trainers = [call for call in calls if self.method_of(call, "Trainer")]
        configs = [call for call in calls if self.method_of(call, "Config")]
        if not trainers and not configs:
            raise ConfigError(
                f"{path} starts no training that is known; expected a call of SFTTrainer, DPOTrainer, GRPOTrainer or "
                "another trainer of trl, of transformers' Trainer, or of their configurations (SFTConfig, "
                "TrainingArguments); name the script that has it"
            )
        self.call, ending = (trainers[0], "Trainer") if trainers else (configs[0], "Config")
        self.method, self.place = self.method_of(self.call, ending), self.at(self.call.line)
        if trainers:
            kind = "Trainer" if self.call.last == "Trainer" else "trainer"
            self.take(kind, self.call, self.method)
        else:
            self.read("args", Argument(self.call, self.call.line))
            why = "not said: the script calls no trainer that is known"
            self.settings.append(Setting("model_name_or_path", None, self.place, why))
            self.settings.append(Setting("dataset_name", None, self.place, why))
        self.unread += [
            f"{self.at(one.line)}: {one.last}, another trainer, is not read" for one in trainers[1:]
        ]
        self.finish(calls)

    def method_of(self, call: Object, ending: str) -> str:
        """The method of a trainer or a configuration; empty for another call."""
        is_theirs = call.name.split(".")[0] in ("transformers", call.last)
        if call.last in ("Trainer", "TrainingArguments"):
            is_asked = (call.last == "Trainer") == (ending == "Trainer")
            return "sft" if is_theirs and is_asked else ""
        found = call.last.removesuffix(ending).lower() if call.last.endswith(ending) else ""
        return self.methods.get(found, "")

    def at(self, line: int) -> str:
        """The place of a line."""
        return f"{self.path.name}:{line}"

    def placed(self, call: Object, kind: str) -> dict[str, Argument]:
        """The arguments of a call by their names, of which ``table`` has the places."""
        places = self.table["places"]
        order = places.get(kind, places["trainer"] if call is self.call else "").split()
        return {
            order[int(name)] if name.isdigit() and int(name) < len(order) else name: one
            for name, one in call.arguments.items()
        }

    def take(self, kind: str, call: Object, places: str = "") -> None:
        """Read the arguments of a call, after what it does where they are not given."""
        defaults = dict(self.table["defaults"].get(kind, {}))
        defaults |= dict.fromkeys(defaults.pop("unset", "").split())
        self.settings += [
            Setting(name, value, self.at(call.line)) for name, value in defaults.items()
        ]
        names = self.table["names"].get(kind.lower() if kind == "Trainer" else kind, {})
        for name, one in self.placed(call, places or kind).items():
            self.read(names.get(name, name), one)

    def read(self, key: str, one: Argument) -> None:
        """Read an argument as the option ``key``, with the reason where its value is not known."""
        place = self.at(one.line)
        try:
            if key in self.readers and one.value is not None:
                self.readers[key](key, one)
            else:
                self.settings += flattened(Setting(key, self.script.constant(one.value), place))
        except NotConstant as error:
            self.settings.append(Setting(key, None, place, str(error)))
            self.unread.append(f"{place}: {key} is {error}")

    # -- arguments that are objects

    def read_model(self, key: str, one: Argument) -> None:
        """Read a model: its name, or the calls that load it and give it adapters."""
        call = one.value
        if not isinstance(call, Object):
            self.settings.append(Setting(key, self.script.constant(call), self.at(one.line)))
            return
        owner = call.name.split(".")[-2:][0]
        if call.last in self.table["words"]["same_model"].split():
            first = call.arguments.get("0", Argument(call.of, one.line))
            is_method = isinstance(call.of, Object) and not call.of.is_name
            self.read_model(key, Argument(call.of, one.line) if is_method else first)
        elif call.last == "get_peft_model":
            self.take("unsloth" if owner.startswith("Fast") else "trainer", call, "get_peft_model")
        elif call.last == "from_pretrained" and "Peft" not in owner:
            task = self.table["tasks"].get(owner)
            self.settings += [Setting("task_type", task, self.at(call.line))] if task else []
            self.take("unsloth_model" if owner.startswith("Fast") else "from_pretrained", call)
        else:
            self.script.constant(call)

    def read_name(self, key: str, one: Argument) -> None:
        """Read the name of another model, or of a tokenizer and what is set on it."""
        call = one.value
        if isinstance(call, Object) and call.last == "from_pretrained":
            given = self.placed(call, "from_pretrained")
            names = self.table["names"]["from_pretrained"]
            call = next(
                (
                    given[name].value
                    for name in given
                    if names.get(name, name) == "model_name_or_path"
                ),
                None,
            )
            for name in ("chat_template", "eos_token"):
                if key == "processing_class" and name in given:
                    self.read(name, given[name])
        self.settings.append(Setting(key, self.script.constant(call), self.at(one.line)))

    def read_config(self, key: str, one: Argument) -> None:
        """Read the configuration of a trainer, of adapters, or of a quantization."""
        call = one.value
        kinds = {"peft_config": ("LoraConfig",), "quantization_config": ("BitsAndBytesConfig",)}
        is_known = isinstance(call, Object) and (
            call.last in kinds.get(key, ()) or self.method_of(call, "Config")
        )
        if not is_known:
            self.script.constant(call)
        self.take(call.last, call, "config" if key == "args" else key)

    def read_table(self, key: str, one: Argument) -> None:
        """Read a table of arguments of ``from_pretrained``."""
        table = one.value if isinstance(one.value, dict) else self.script.constant(one.value)
        names = self.table["names"]["from_pretrained"]
        for name, value in table.items():
            self.read(names.get(name, name), Argument(value, one.line))

    def read_rows(self, key: str, one: Argument) -> None:
        """Read a data set."""
        rows, place = self.rows(one.value), self.at(one.line)
        if key == "eval_dataset":
            is_test = rows.pop("part", None) == "test"  # of train_test_split
            self.settings += [] if is_test else [Setting(key, [rows], place)]
            return
        keys = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split",
                "test_size": "test_split_size"}  # fmt: skip
        self.settings += [
            Setting(keys[name], value, place) for name, value in rows.items() if name in keys
        ]

    def rows(self, value: Any) -> dict[str, Any]:
        """The arguments of a data set: path, name, split; of a part of it test_size and part. Raises NotConstant."""
        constant, words = self.script.constant, self.table["words"]
        if not isinstance(value, Object) or value.is_name or value.function:
            raise NotConstant(f"rows of the script's own: {constant(value)!s:.60}")
        if value.name == "[]":
            rows, key = self.rows(value.of), constant(value.arguments["0"].value)
            return rows | {"part" if "test_size" in rows else "split": key}
        if value.last == "load_dataset":
            given = {
                name: constant(one.value)
                for name, one in self.placed(value, "load_dataset").items()
            }
            files = given.get("data_files")
            files = files.get(given.get("split", "train")) if isinstance(files, dict) else files
            if isinstance(files, str) and given.get("path") in ("json", "csv", "parquet"):
                if "[" in given.get("split", ""):
                    raise NotConstant(f"a part of the file {files}")
                given = {"path": files}
            given = {
                name: one
                for name, one in given.items()
                if one and name not in words["loading"].split()
            }
            if others := given.keys() - {"path", "name", "split"}:
                raise NotConstant(f"{given.get('path')}, loaded with {min(others)}")
            return given
        if not isinstance(value.of, Object) or value.of.is_name:
            constant(value)
        rows, first = self.rows(value.of), value.arguments.get("0")
        if value.last in words["same_rows"].split():
            return rows
        if value.last == "train_test_split":
            size = value.arguments.get("test_size", first)
            return rows | {"test_size": constant(size.value) if size else 0.25}
        raise NotConstant(
            f"{rows['path']}, of which .{value.last} in line {value.line} makes other rows"
        )

    def read_rewards(self, key: str, one: Argument) -> None:
        """Read rewards: functions of the script and of modules, and models."""
        names = list[str]()
        models = list[str]()
        for value in one.value if isinstance(one.value, list) else [one.value]:
            is_object = isinstance(value, Object)
            if is_object and value.function:
                why = self.misfit(value)
                names.append(value.name if why else f"{self.path}:{value.name}")
                self.unread += [f"{self.at(value.line)}: {value.name} {why}"] if why else []
            elif is_object and value.is_name:
                names.append(value.name)
            elif is_object and value.last == "get_soft_overlong_punishment":
                self.take(value.last, value)
                names.append(value.last)
            else:
                self.read_name("reward_model_path", Argument(value, one.line))
                models.append(str(self.settings.pop().value))
        if models and names:
            raise NotConstant("functions and models, whose weights are in another order here")
        keys = {"reward_model_name_or_path": models, key: names}
        self.settings += [
            Setting(name, value, self.at(one.line)) for name, value in keys.items() if value
        ]

    def misfit(self, value: Object) -> str:
        """Why taut cannot call a function of the script as TRL does; empty: it can."""
        assert value.function is not None
        given = value.function.args
        every = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        required = every[: len(given.posonlyargs) + len(given.args) - len(given.defaults)]
        if "completions" not in every:
            return "has no argument completions, by which taut knows a function of TRL's form"
        if missing := set(required) & set(NOT_HERE):
            return f"takes {min(missing)}, which taut does not have"
        if not value.is_loaded:
            return "is not there when the file is loaded: define it at the top of a file"
        if self.call.is_loaded:
            return (
                "is in a file that starts the training when it is loaded: move it to a file of its own, or start the "
                'training under if __name__ == "__main__"'
            )
        return ""

    def read_callbacks(self, key: str, one: Argument) -> None:
        """Read EarlyStoppingCallback, and no other callback."""
        for value in one.value if isinstance(one.value, list) else [one.value]:
            if not isinstance(value, Object) or value.last != "EarlyStoppingCallback":
                self.script.constant(value)
            self.take(value.last, value)

    def read_collator(self, key: str, one: Argument) -> None:
        """Read which tokens a collator makes targets of."""
        call, place = one.value, self.at(one.line)
        name = call.last if isinstance(call, Object) else ""
        if name == "DataCollatorForCompletionOnlyLM":
            self.settings.append(Setting("completion_only_loss", True, place))
            self.assumed.append(
                f"{place}: a row has one answer, all that follows the response_template"
            )
        elif name == "DataCollatorForLanguageModeling":
            is_theirs = Argument(call.name.startswith("transformers"), one.line)
            if self.script.constant(call.arguments.get("mlm", is_theirs).value):
                self.settings.append(Setting("task_type", "masked_lm", place))
        elif name not in self.table["words"]["collators"].split():
            self.script.constant(call)

    def finish(self, calls: list[Object]) -> None:
        """Note the changes of models and tokenizers that are not read, and a tokenizer of another model."""
        changes = self.table["words"]["changes"].split()
        code = [
            f"line {call.line}: {call.text}" for call in calls if call.of and call.last in changes
        ]
        if code:
            self.settings.append(Setting("script", "; ".join(code), self.place))
        model = next((one.value for one in self.settings if one.key == "model_name_or_path"), None)
        self.settings = [
            one._replace(key="sft_model_path")
            if (one.key, self.method) == ("model_name_or_path", "ppo")
            else one
            for one in self.settings
            if (one.key, one.value) != ("processing_class", model) or one.obstacle
        ]
