"""The same run in taut, where it can be said: the words of ``taut sft``, and what they leave out.

SFT only. A setting is carried over where taut has one of equal meaning; the others that would change the result are
listed with the reason; what concerns the machine (workers, logging, saving cadence, where it is pushed) is left aside.

Imports ``recipe.py``. ``examine.py`` imports it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut.compat.recipe import Framework, Recipe

LISTS = (".jsonl", ".json", ".parquet", ".csv")
_HF: dict[str, str] = {
    "learning_rate": "optim.learning_rate",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.clip_grad_norm",
    "warmup_ratio": "optim.warmup_ratio",
    "num_train_epochs": "epochs",
    "seed": "seed",
    "max_length": "data.max_length",
    "output_dir": "out",
    "gradient_checkpointing": "activation_checkpointing",
    "trust_remote_code": "trust_remote_code",
    "neftune_noise_alpha": "noise.neftune_alpha",
}
_TRL = _HF | {"lora_r": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout"}
KEYS: Mapping[Framework, Mapping[str, str]] = {
    "trl": _TRL,
    "open-r1": _TRL,
    "swift": _HF
    | {"lora_rank": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout"}
    | {"max_pixels": "data.images.max_pixels"},
    "openrlhf": {
        "adam.lr": "optim.learning_rate",
        "adam.weight_decay": "optim.weight_decay",
        "adam.eps": "optim.eps",
        "max_norm": "optim.clip_grad_norm",
        "lr_warmup_ratio": "optim.warmup_ratio",
        "min_lr_ratio": "optim.min_learning_rate_ratio",
        "train.max_epochs": "epochs",
        "train.seed": "seed",
        "train.batch_size": "batch.samples_per_step",
        "data.max_len": "data.max_length",
        "ckpt.output_dir": "out",
        "model.gradient_checkpointing_enable": "activation_checkpointing",
        "ds.lora.rank": "lora.rank",
        "ds.lora.alpha": "lora.alpha",
        "ds.lora.dropout": "lora.dropout",
    },
}
"""Options whose value means the same in taut."""
_TRL_DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "num_train_epochs": 3,
    "seed": 42,
    "max_length": 1024,
    "gradient_checkpointing": True,
}
DEFAULTS: Mapping[Framework, Mapping[str, Any]] = {
    "trl": _TRL_DEFAULTS,
    "open-r1": _TRL_DEFAULTS | {"gradient_checkpointing": False},
    "swift": {
        "num_train_epochs": 3,
        "seed": 42,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "gradient_checkpointing": True,
    },
    "openrlhf": {
        "adam.lr": 5e-6,
        "train.max_epochs": 2,
        "train.seed": 42,
        "train.batch_size": 128,
        "data.max_len": 2048,
        "min_lr_ratio": 0.1,
    },
}
"""What the frameworks take where a recipe is silent and taut would take something else."""
FREEZES = {
    "freeze_llm": ("language_model", False),
    "freeze_vit": ("vision_tower", True),
    "freeze_aligner": ("projector", True),
}
"""ms-swift's words for parts of a vision-language model, and whether they are frozen unless it is told."""
RATES = {"vit_lr": "vision_tower", "aligner_lr": "projector"}
TOO_LONG: Mapping[Framework, str] = {
    "trl": "truncate",
    "open-r1": "truncate",
    "swift": "drop",
    "openrlhf": "truncate",
}
SCHEDULES = {
    "linear": {"optim.schedule": "linear"},
    "cosine": {"optim.schedule": "cosine"},
    "constant": {"optim.schedule": "constant"},
    "constant_with_warmup": {"optim.schedule": "constant"},
    "cosine_with_min_lr": {"optim.schedule": "cosine"},
}
NEEDLESS = {
    "packing": "always so, exactly",
    "padding_free": "always so, exactly",
    "ds.packing_samples": "always so, exactly",
    "attn_implementation": "chosen by what is there",
    "attn_impl": "chosen by what is there",
    "ds.attn_implementation": "chosen by what is there",
    "eos_token": "derived from the template",
    "use_liger_kernel": "the head is computed in chunks in any case",
    "ds.use_liger_kernel": "the head is computed in chunks in any case",
    "bf16": "dtype=bfloat16 where the hardware has it",
    "assistant_only_loss": "the assistant's turns are what is learned",
}
"""Options that taut needs no setting for, and why."""
MATTERS = (
    *(
        "deepspeed",
        "fsdp",
        "ds.zero_stage",
        "chat_template",
        "chat_template_path",
        "loss_type",
        "loss_scale",
        "optim",
    ),
    *(
        "system",
        "system_prompt",
        "truncation_strategy",
        "truncation_mode",
        "label_smoothing_factor",
        "use_dora",
    ),
    *(
        "load_in_4bit",
        "load_in_8bit",
        "ds.load_in_4bit",
        "quant_method",
        "lora_target_modules",
        "target_modules",
    ),
    *(
        "lora_modules_to_save",
        "modules_to_save",
        "lr_scheduler_kwargs",
        "max_samples",
        "data.max_samples",
    ),
    *(
        "dataset_mixture",
        "split_dataset_ratio",
        "val_dataset",
        "eval.dataset",
        "data.input_template",
        "template",
    ),
    *(
        "dataset_config",
        "data.dataset_probs",
        "freeze_parameters",
        "model.pretrain_mode_enable",
        "use_rslora",
    ),
    *(
        "model_revision",
        "data.tokenizer_chat_template",
        "completion_only_loss",
        "dataset_text_field",
    ),
)
"""Options that change the result and that are not carried over."""


@dataclass(frozen=True)
class Carried:
    """A command of taut, and what it does not say."""

    settings: Mapping[str, Any]
    """Keys of ``taut.run.Run``."""
    left: tuple[str, ...]
    """What is not carried over, and why."""
    needless: tuple[str, ...]
    """What needs no setting in taut, and why."""

    @property
    def command(self) -> str:
        """``taut sft key=value ...``."""
        return " ".join(["taut sft", *map(shlex.quote, self.words)])

    @property
    def words(self) -> list[str]:
        """The settings as words."""
        return [f"{key}={_written(value)}" for key, value in self.settings.items()]


def carry(recipe: Recipe, is_vision: bool | None = None) -> Carried | None:
    """The run in taut; None for another method than sft, or without a model. ``is_vision``: whether the model takes
    pictures; None: not known.
    """
    if recipe.method != "sft" or recipe.model is None:
        return None
    left = list[str]()
    model = str(Path(recipe.model).expanduser()) if recipe.model[0] == "~" else recipe.model
    settings: dict[str, Any] = {"model": model, "data.train": _data(recipe, left)}
    for key, name in KEYS[recipe.framework].items():
        value = recipe.value(key, DEFAULTS[recipe.framework].get(key))
        if isinstance(value, float) and not math.isfinite(value):
            left.append(f"{recipe.settings[key].place}: {key} = {value}")
        elif value is not None and not isinstance(value, dict | list):
            settings[name] = value
    _unspoken(recipe, settings, left)
    _batch(recipe, settings, left)
    _schedule(recipe, settings, left)
    _adapters(recipe, settings)
    _parts(recipe, settings, left, is_vision)
    steps = recipe.value("max_steps")
    if isinstance(steps, int) and steps > 0:
        settings["steps"] = steps
        settings.pop("epochs", None)
    told = recipe.settings
    left += [f"{told[key].place}: {key}" for key in MATTERS if _counts(recipe, key)]
    left += [f"{one.place}: {one.key} is {one.obstacle}" for one in told.values() if one.obstacle]
    needless = [f"{key}: {why}" for key, why in NEEDLESS.items() if key in told]
    return Carried(settings, tuple(left), tuple(needless))


def _unspoken(recipe: Recipe, settings: dict[str, Any], left: list[str]) -> None:
    """What the framework does without being told."""
    if "data.max_length" in settings:
        settings["data.too_long"] = TOO_LONG[recipe.framework]
    if recipe.framework == "swift":
        is_full = recipe.value("tuner_type", "lora") == "full"
        settings.setdefault("optim.learning_rate", 1e-5 if is_full else 1e-4)
    if recipe.framework == "openrlhf":
        settings["optim.beta2"] = 0.95
    if recipe.library == "trl" and not recipe.value("assistant_only_loss"):
        left.append("of messages trl learns all tokens, taut the answers; data.targets=all for all")


def _counts(recipe: Recipe, key: str) -> bool:
    """Whether an option says something: it is set, and not to nothing."""
    return recipe.value(key) not in (None, False, "", "none", [], {})


def _data(recipe: Recipe, left: list[str]) -> str:
    """The data's file, or a name to be filled in."""
    if recipe.data is not None and Path(recipe.data.partition("#")[0]).suffix in LISTS:
        return recipe.data.partition("#")[0]
    left.append(f"the data {recipe.data or 'that are not known'}: write its rows to a JSONL file")
    return "ROWS.jsonl"


def _batch(recipe: Recipe, settings: dict[str, Any], left: list[str]) -> None:
    """Samples of a step on one process; how many processes there are, a recipe seldom says."""
    if recipe.framework == "openrlhf":
        return
    keys = {"per_device_train_batch_size": 1 if recipe.framework == "swift" else 8}
    keys["gradient_accumulation_steps"] = 1
    if any(key in recipe.settings and recipe.settings[key].obstacle for key in keys):
        return
    each, times = (recipe.value(key, default) for key, default in keys.items())
    if isinstance(each, int) and isinstance(times, int):
        settings["batch.samples_per_step"] = each * times
        left.append(f"the number of processes: samples_per_step={each * times} is of one")


def _schedule(recipe: Recipe, settings: dict[str, Any], left: list[str]) -> None:
    default = {"swift": "cosine", "openrlhf": "cosine_with_min_lr"}.get(recipe.framework, "linear")
    key = "lr_scheduler" if recipe.framework == "openrlhf" else "lr_scheduler_type"
    name = recipe.value(key, default)
    if name in SCHEDULES:
        settings.update(SCHEDULES[name])
    else:
        left.append(f"{recipe.settings[key].place}: {key} = {name}")
    steps = recipe.value("warmup_steps")
    if isinstance(steps, int) and steps > 0:
        settings["optim.warmup_steps"] = steps
        settings.pop("optim.warmup_ratio", None)
    elif "optim.warmup_ratio" not in settings:
        settings["optim.warmup_ratio"] = 0.03 if recipe.framework == "openrlhf" else 0.0


def _adapters(recipe: Recipe, settings: dict[str, Any]) -> None:
    """Adapters where the recipe has them: for TRL where use_peft says so, for swift unless it says full."""
    names = ("lora.rank", "lora.alpha", "lora.dropout")
    defaults: dict[str, tuple[Any, Any, Any]] = {"swift": (8, 32, 0.05), "openrlhf": (0, 16, 0.0)}
    has = {
        "swift": recipe.value("tuner_type", "lora") == "lora",
        "openrlhf": bool(recipe.value("ds.lora.rank", 0)),
    }.get(recipe.framework, recipe.value("use_peft") is True)
    for name, value in zip(names, defaults.get(recipe.framework, (16, 32, 0.05)), strict=True):
        if has:
            settings.setdefault(name, value)
        else:
            settings.pop(name, None)


def _parts(
    recipe: Recipe, settings: dict[str, Any], left: list[str], is_vision: bool | None
) -> None:
    """What of a vision-language model ms-swift trains, and how fast: of itself the language model alone."""
    if is_vision is False:
        settings.pop("data.images.max_pixels", None)
    if recipe.framework != "swift" or is_vision is False:
        return
    has_adapters = "lora.rank" in settings
    if is_vision is None and not any(key in recipe.settings for key in (*FREEZES, *RATES)):
        if not has_adapters:
            left.append(
                f"of a model that takes pictures swift freezes {' and '.join(RATES.values())}"
            )
        return
    frozen = [part for key, (part, default) in FREEZES.items() if recipe.value(key, default)]
    trained = [part for part, _ in FREEZES.values() if part not in frozen]
    if has_adapters and trained != ["language_model"]:
        settings["lora.targets"] = trained
    elif not has_adapters and frozen:
        settings["freeze"] = frozen
    rates = {part: recipe.value(key) for key, part in RATES.items() if part in trained}
    if rates := {part: rate for part, rate in rates.items() if rate is not None}:
        settings["optim.rates"] = rates


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_written(it)}' for key, it in value.items())}}}"
    return value if isinstance(value, str) else json.dumps(value)
