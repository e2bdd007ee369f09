"""TOML or YAML, and dotted overrides -> a frozen tree of dataclasses, or an error of one line. Knows no component.

A configuration is a class made with ``configclass``; classes nest. ``load`` reads a TOML or YAML file and sets
``a.b=value`` on top; ``from_mapping`` does the same with Python values. Both refuse unknown keys, values of another
kind than the field's, and keys that are set twice. Values are checked, never rewritten.

The value of an override is TOML (``1e-4``, ``true``, ``[1, 2]``); a value that is not TOML, or of no kind that the
field takes, is text (``out=1`` is a directory called 1). ``none`` unsets an optional field. The texts of a list need
no quotes, which a shell would remove (``lora.targets=[q_proj,v_proj]``).

``explain`` turns pydantic's errors into one line: unknown keys first, with the nearest known key (or the key with
the function of another framework's), then values of another kind, then missing keys. Keys and values are shortened.

Imports errors, io.files and, for YAML, io.yaml_tables only.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import fnmatch
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, dataclass_transform
from urllib.parse import urlsplit

import pydantic
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from taut.errors import ConfigError
from taut.io import files

T = TypeVar("T")
KeyPath = tuple[str | int, ...]

Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""Types of a field: a number above 0, of at least 0, and between 0 and 1."""

YAML = (".yaml", ".yml")
SUFFIXES = (".toml", *YAML)
"""How the names of files of settings end."""
LARGEST = 2**24
"""Largest file of settings, in bytes."""
DEEPEST = 32
"""Depth to which tables and lists may be nested."""
WIDEST = 2**63
"""TOML's integers are smaller in size."""
IS_TRAINING = "optim.learning_rate"
"""The key by which a command that trains is recognised."""

ERRORS_SHOWN = 3
"""Mistakes in one message."""
SHOWN = 80
"""Characters of a key or a value in a message."""

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "string_pattern_mismatch": "FILE.py:name",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""pydantic's error types in our words."""

ELSEWHERE = {
    name: tuple(keys.split())
    for keys, names in {
        "model": (
            "actor_model base_model model_id model_name model_name_or_path model_path policy_model pretrain "
            "pretrained_model pretrained_model_name_or_path"
        ),
        "out": "ckpt_path logging_dir output output_dir output_path run_name save_dir save_path",
        "data.train": (
            "data_files data_path dataset dataset_dir dataset_name dataset_path datasets prompt_data prompt_dataset "
            "train_data train_dataset train_file train_files"
        ),
        "data.eval": "eval_data eval_dataset eval_file val_dataset val_files validation_file",
        "data.max_length": (
            "block_size cutoff_len max_len max_prompt_length max_seq_len max_seq_length model_max_length "
            "prompt_max_len seq_len seq_length sequence_length"
        ),
        "data.too_long": "truncation truncation_strategy",
        "data.template": "apply_chat_template chat_template chat_template_path tokenizer_chat_template",
        "data.chat_template_kwargs": "apply_chat_template_kwargs enable_thinking template_kwargs",
        "data.system": "default_system system_message system_prompt",
        "data.columns": (
            "chosen_key dataset_prompt_column dataset_text_field input_key label_names output_key prompt_key "
            "rejected_key remove_unused_columns text_column"
        ),
        "data.targets": (
            "assistant_only_loss completion_only_loss loss_scale mask_history response_template train_on_inputs "
            "train_on_prompt"
        ),
        "data.images.max_pixels": "image_max_pixels",
        "data.workers": "dataset_num_proc dataset_processes num_proc preprocessing_num_workers",
        "data.cache": "load_from_cache_file overwrite_cache",
        "data.streaming": "dataset_streaming streaming",
        "data.streaming_window": "shuffle_buffer_size",
        "parallel.tensor": "tensor_model_parallel_size tensor_parallel_size tp_size",
        "steps": "max_steps num_steps num_training_steps total_steps total_training_steps train_iters",
        "epochs": "max_epochs n_epochs num_epochs num_train_epochs total_epochs",
        "seed": "data_seed random_seed",
        "dtype": "bf16 fp16 mixed_precision model_dtype param_dtype precision torch_dtype",
        "device": "device_map gpu_ids use_cpu",
        "attention": "attention_backend attn attn_impl attn_implementation flash_attn use_flash_attn",
        "activation_checkpointing": (
            "gradient_checkpointing gradient_checkpointing_enable recompute recompute_granularity"
        ),
        "freeze lora.targets": "freeze_aligner freeze_llm freeze_vision_tower freeze_vit",
        "resume": "auto_resume load_checkpoint resume_from resume_from_checkpoint",
        "overwrite": "overwrite_output_dir",
        "batch.samples_per_step": (
            "batch_size effective_batch_size global_batch_size gradient_accumulation_steps "
            "per_device_train_batch_size rollout_batch_size train_batch_size"
        ),
        "batch.tokens_per_microbatch": (
            "eval_batch_size max_tokens_per_gpu micro_batch_size micro_train_batch_size mini_batch_size "
            "per_device_eval_batch_size ppo_max_token_len_per_gpu"
        ),
        "optim.name": "optim_type optimizer optimizer_type",
        "optim.state": "use_8bit_adam",
        "optim.learning_rate": "actor_learning_rate actor_lr lr max_lr peak_lr",
        "optim.weight_decay": "wd",
        "optim.beta1": "adam_beta1",
        "optim.beta2": "adam_beta2",
        "optim.eps": "adam_epsilon adam_eps",
        "optim.schedule": "lr_decay_style lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "optim.warmup_steps": "lr_warmup_steps num_warmup_steps",
        "optim.warmup_ratio": "lr_warmup_fraction lr_warmup_ratio warmup warmup_fraction",
        "optim.min_learning_rate_ratio": "min_lr min_lr_rate min_lr_ratio",
        "optim.clip_grad_norm": "clip_grad grad_clip grad_norm gradient_clip_val max_grad_norm max_norm",
        "lora.rank": (
            "finetuning_type lora_r lora_rank peft peft_type r sft_type train_type tuner_type use_lora use_peft"
        ),
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.targets": "lora_target lora_target_modules target_modules",
        "lora.modules_to_save": "additional_target lora_modules_to_save",
        "lora.adapter": "adapter_name_or_path adapters",
        "lora.rslora": "use_rslora",
        "lora.dora": "use_dora",
        "noise.neftune_alpha": "neftune_noise_alpha",
        "eval.every": "do_eval eval_interval eval_steps eval_strategy evaluation_strategy test_freq",
        "eval.best": "load_best_model_at_end metric_for_best_model",
        "checkpoint.every": "save_freq save_interval save_steps save_strategy",
        "checkpoint.keep": "max_ckpt_num save_total_limit",
        "log.every": "log_interval logging_steps logging_strategy",
        "log.wandb": "use_wandb wandb_project",
        "log.wandb log.tensorboard log.trackio log.sinks": "logger report_to trackers",
        "reward.centering_coef": "center_rewards_coefficient",
        "*.loss": "importance_sampling_level loss_type policy_loss pref_loss",
        "*.beta": "pref_beta",
        "*.kl_coef": "beta init_kl_coef kl_beta kl_loss_coef kl_penalty_coef use_kl_loss",
        "*.sft_weight": "cpo_alpha pref_ftx rpo_alpha sft_alpha",
        "dpo.divergence": "f_divergence_type",
        "simpo.gamma": "simpo_gamma",
        "reference.model": "ref_model ref_model_name_or_path reference_model",
        "reference.file": "precompute_ref_log_probs",
        "reference.update_every": "ref_model_sync_steps sync_ref_model",
        "reference.update_mix": "ref_model_mixup_alpha",
        "distill.teacher": "teacher_model teacher_model_name_or_path",
        "rollout.n": "group_size n_samples_per_prompt num_generations num_return_sequences num_samples",
        "rollout.max_new_tokens": (
            "completion_length generate_max_len max_completion_length max_response_length response_length"
        ),
        "rollout.epochs": "num_iterations num_ppo_epochs ppo_epochs",
        "rollout.minibatches": "generation_batch_size num_mini_batches ppo_mini_batch_size steps_per_generation",
        "rollout.dynamic_sampling_rounds": "dynamic_sample dynamic_sampling",
        "rollout.engine": "use_vllm vllm_mode",
        "rollout.urls": "vllm_server_base_url vllm_server_host vllm_server_port",
        "rewards": (
            "remote_rm_url reward_fn reward_func reward_funcs reward_function reward_functions reward_model "
            "reward_model_path reward_weights"
        ),
        "shaping.missing_eos_penalty": "missing_eos_penalty non_stop_penalty",
        "shaping.overlong": "mask_truncated_completions overlong_filter",
        "*.clip_low *.clip_high": "clip_range clip_ratio cliprange eps_clip epsilon",
        "*.clip_low": "clip_ratio_low epsilon_low",
        "*.clip_high": "clip_ratio_high epsilon_high",
        "*.dual_clip": "clip_ratio_c delta",
        "*.loss_aggregation": "loss_agg_mode",
        "*.old_logprobs": "bypass_mode",
        "*.rollout_correction_veto": "rollout_token_veto_threshold",
        "grpo.advantage": "adv_estimator advantage_estimator scale_rewards",
        "*.entropy_coef": "entropy_coeff",
        "*.entropy_target": "target_ent target_entropy",
        "ppo.gae_lambda": "gae_lambda lambd",
        "ppo.value_clip": "cliprange_value value_clip_range",
        "ppo.value_coef": "vf_coef",
        "critic.learning_rate": "critic_learning_rate critic_lr",
        "critic.model": "critic_model value_model value_model_path",
    }.items()
    for name in names.split()
}
"""Names of other frameworks (TRL, transformers, LLaMA-Factory, ms-swift, OpenRLHF, verl, axolotl) -> the keys here;
``*`` stands for any table. A suggestion names the keys that the command has."""

RENAMED = {
    "guard": "rollout_monitor",
    "rollout_monitor.max_silent": "rollout_monitor.max_without_signal",
    "rollout_monitor.warn_difference": "rollout_monitor.warn_logprob_difference",
    "rollout_monitor.max_difference": "rollout_monitor.max_logprob_difference",
    "rollout_monitor.warn_effective": "rollout_monitor.warn_effective_size",
    "rollout_monitor.warn_stops": "rollout_monitor.warn_stop_drop",
    "divergence": "loss_monitor",
    "stop": "stop_check",
    "stop_check.tokens": "stop_check.max_new_tokens",
    "stop_check.share": "stop_check.min_share",
    "contract.tokens": "contract.max_new_tokens",
    "optim.rates": "optim.group_learning_rates",
    "lora.train_rows": "lora.train_token_rows",
    "reward.centring": "reward.centering_coef",
    "rollout.refills": "rollout.dynamic_sampling_rounds",
    "rollout.replay": "rollout.replay_groups",
    "rollout.ahead": "rollout.lag",
    "rollout.asynchronous": "rollout.lag",
    "url": "urls",
    "rollout.url": "rollout.urls",
    "key": "api_key_env",
    "server.key": "server.api_key_env",
    "remote.key": "remote.api_key_env",
    "rollout.server.key": "rollout.server.api_key_env",
    "rollout.environment.remote.key": "rollout.environment.remote.api_key_env",
    "shaping.missing_stop": "shaping.missing_eos_penalty",
    "shaping.length_cost": "shaping.length_penalty",
    "best_of_n.at_least": "best_of_n.min_reward",
    "ppo.lam": "ppo.gae_lambda",
    "ppo.bootstrap_cut": "ppo.bootstrap_truncated",
    "*.average": "*.loss_aggregation",
    "*.correction": "*.rollout_correction",
    "*.correction_level": "*.rollout_correction_level",
    "*.correction_cap": "*.rollout_correction_cap",
    "*.correction_floor": "*.rollout_correction_floor",
    "*.kl_value": "*.kl_estimator",
    "*.sapo_positive": "*.sapo_tau_positive",
    "*.sapo_negative": "*.sapo_tau_negative",
    "*.entropy": "*.log_entropy",
}
"""Keys and tables of earlier versions -> their names now; ``*`` stands for any table. They are refused; the error gives
the new name."""

REWARD_KEYS = (
    "a reward has name, weight, label, timeout, inside, after, judges and options; what one reward alone takes is in "
    "options: options.{}"
)
INSTEAD = {
    name: sentence
    for sentence, names in {
        (
            "batches are always packed, without padding, and samples do not see each other; "
            "batch.tokens_per_microbatch is the size of a micro-batch"
        ): (
            "group_by_length neat_packing pack_dataset packing packing_samples packing_strategy pad_to_max_length "
            "padding padding_free sample_packing use_dynamic_bsz use_remove_padding"
        ),
        "quantise=nf4 or int8 quantises the base under adapters (QLoRA: lora.rank and quantise)": (
            "bnb_4bit_compute_dtype bnb_4bit_quant_type load_in_4bit load_in_8bit quant_bits quant_method "
            "quantization quantization_bit quantization_config"
        ),
        (
            "start the command with torchrun --nproc-per-node N -m taut ...: weights, gradients and optimizer are "
            "sharded over the ranks"
        ): (
            "accelerate_config ddp_backend deepspeed fsdp fsdp_config nnodes nproc_per_node num_gpus num_processes "
            "zero_stage"
        ),
        "torchrun shards over all ranks; there is no pipeline, expert or sequence parallelism": (
            "context_parallel_size expert_model_parallel_size pipeline_model_parallel_size ring_attn_size "
            "sequence_parallel sequence_parallel_size ulysses_sequence_parallel_size"
        ),
        "rows are tokenised once and read ahead of training; there is nothing to set": (
            "dataloader_num_workers dataloader_pin_memory num_workers"
        ),
        "the command says what is trained: taut sft, taut dpo, taut grpo, ...": (
            "do_predict do_train rlhf_type stage task trainer trainer_type"
        ),
        "the output head runs in chunks over the targets only; there is nothing to switch on": (
            "cut_cross_entropy enable_liger_kernel liger_kernel use_liger use_liger_kernel"
        ),
        "vLLM runs as a server with settings of its own; rollout.engine=server rollout.urls=... uses it": (
            "gpu_memory_utilization vllm_gpu_memory_utilization vllm_max_model_len vllm_tensor_parallel_size"
        ),
        "taut launch ray servers=N gives ranks and servers GPUs of their own; where both are to compute on the same, "
        "rollout.engine=local generates with the weights that train": (
            "colocate colocate_all_models sleep_level vllm_enable_sleep vllm_enable_sleep_mode"
        ),
        "taut launch ray servers=N starts servers; gpus_per_server is the tensor parallelism of each": (
            "num_servers vllm_num_engines"
        ),
        "rewards are judged by processes on the first rank's machine; a reward model elsewhere has a URL": (
            "num_reward_workers reward_workers"
        ),
        "nothing is uploaded; upload the directory out/model when the run is finished": (
            "hub_model_id hub_strategy push_to_hub"
        ),
        "held-out rows are named by data.eval: a file of their own, or { path = ..., share = [0.95, 1] } of a source": (
            "split_dataset_ratio test_size val_size validation_split_percentage"
        ),
        "limit takes the first rows of a source: data.train=[{ path = ..., limit = 1000 }]": (
            "max_eval_samples max_samples max_train_samples"
        ),
        "a source's weight says how many times its rows are seen: data.train=[{ path = ..., weight = 2 }]": (
            "repeat repeats"
        ),
        "a revision of the hub's is part of a model's name: model=owner/name@revision": (
            "model_revision ref_model_revision revision teacher_model_revision"
        ),
        "the end tokens are derived from the chat template; 'taut show' prints them": "eos_token pad_token",
        "rollouts are drawn from the whole distribution (rollout.temperature); eval.answers.sampling has the keys of "
        "held-out answers": "min_p top_k top_p",
        "compile=true compiles the decoder layers": "torch_compile",
    }.items()
    for name in names.split()
}
"""Names of other frameworks without a key here -> the alternative."""


def explain(
    error: pydantic.ValidationError,
    tree: Mapping[str, Any],
    assigned: set[tuple[str, ...]],
    places: tuple[str, str],
    keys: Sequence[str],
) -> str:
    """The mistakes in ``tree``. ``places``: the origin of the keys in ``assigned``, and of the others; ``keys``: those
    of the configuration.
    """
    details_of: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        details_of.setdefault(_path_of(detail, tree), []).append(detail)
    deepest = {
        path: details
        for path, details in details_of.items()
        if not any(other[: len(path)] == path for other in details_of if len(other) > len(path))
        or details[0]["type"] == "value_error"
    }
    lines = []
    for path, details in deepest.items():
        is_assigned = any(path[: len(key)] == key for key in assigned)
        of_table = [key for key in sorted(assigned) if key[: len(path)] == path]
        if of_table and details[0]["type"] == "unexpected_keyword_argument":
            # The whole key, not the unknown table that it names.
            path, is_assigned = of_table[0], True
        lines.append(_explain_one(path, details, places[0 if is_assigned else 1], keys))
    lines.sort(key=lambda line: ("unknown" not in line, "is missing" in line))
    more = len(lines) - ERRORS_SHOWN
    return "; also: ".join(lines[:ERRORS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def first_problem(error: pydantic.ValidationError) -> str:
    """The first mistake in a file that a program wrote, as ``random[0].torch: found 5; expected a string``."""
    detail = error.errors(include_url=False)[0]
    where = f"{key_text(detail['loc'])}: " if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"{where}it is missing"
    if detail["type"] == "json_invalid":
        return _one_line(detail["msg"])
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{where}{_short(_one_line(str(detail['ctx']['error'])))}"
    expected = EXPECTED.get(detail["type"]) or _one_line(detail["msg"]).removeprefix(
        "Input should be "
    )
    return f"{where}found {shown(detail['input'])}; expected {expected}"


def key_text(path: Sequence[str | int]) -> str:
    """A key as people write it: ``data.train[0].path``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_one_line(part)}" for part in path)
    return _short("".join(parts).removeprefix("."))


def shown(value: Any) -> str:
    """A value as JSON writes it, which is nearly TOML."""
    text = json.dumps(value, ensure_ascii=False)
    return _short(text if text.isprintable() else json.dumps(value))


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _path_of(detail: Any, tree: Any) -> KeyPath:
    """The path of an error in ``tree``: pydantic's location without the names of union branches."""
    path: list[str | int] = []
    for part in detail["loc"]:
        is_index = isinstance(tree, list | tuple) and isinstance(part, int)
        if is_index or (isinstance(tree, Mapping) and part in tree):
            path.append(part)
            tree = tree[part]
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _explain_one(path: KeyPath, details: Sequence[Any], place: str, keys: Sequence[str]) -> str:
    key = key_text(path)
    kinds = {detail["type"] for detail in details}
    for detail in details:
        if detail["type"] == "value_error":
            return str(detail["ctx"]["error"])
    if "missing" in kinds:
        wanted = next((known for known in keys if known.startswith(f"{key}.")), key)
        return f"key '{key}' is missing; expected {wanted}=... on the command line or in the run's TOML file"
    if "unexpected_keyword_argument" in kinds:
        return f"unknown key '{key}' {place}; {_suggest(key, keys)}"
    kinds_wanted = [
        EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
        for detail in details
    ]
    expected = " or ".join(dict.fromkeys(kinds_wanted))
    return (
        f"found {key}={shown(details[0]['input'])} {place}; expected {expected}; correct the value"
    )


def _suggest(key: str, keys: Sequence[str]) -> str:
    """A hint for an unknown key: its name now, the key of the same function or name, or one spelt alike."""
    table, _, last = key.rpartition(".")
    if re.search(r"\brewards\[\d+\]$", table):
        return REWARD_KEYS.format(last)
    renamed = f"{RENAMED.get(table, table)}.{last}" if table else key
    renamed = RENAMED.get(renamed) or RENAMED.get(f"*.{last}", renamed).replace("*", table)
    if renamed != key and any(f"{known}.".startswith(f"{renamed}.") for known in keys):
        return f"it is now called '{renamed}'"
    elsewhere = ELSEWHERE.get(last, ())
    in_table = [f"{table}.{pattern.rpartition('.')[2]}" for pattern in elsewhere]  # critic.lr
    for patterns in (in_table, elsewhere):
        here = [f"'{known}'" for pattern in patterns for known in fnmatch.filter(keys, pattern)]
        if here:
            return f"did you mean {' or '.join(dict.fromkeys(here))}?"
    if last in INSTEAD and IS_TRAINING in keys:
        return INSTEAD[last]
    same = [known for known in keys if known == last or known.endswith(f".{last}")]
    if same:
        return f"did you mean '{same[0]}'?"
    if elsewhere and IS_TRAINING in keys:
        name = elsewhere[0].removeprefix("*.")
        return f"other commands have '{name}' for it, this one does not"
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "'taut COMMAND --help' lists every key"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose values are validated and whose unknown keys are refused.

    The string under a field is its documentation (``taut show`` prints it).
    """
    settings = pydantic.ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
    result: Any = pydantic_dataclass(frozen=True, kw_only=True, config=settings)(cls)
    # pydantic reads the documentation of the class's own fields alone.
    for base in filter(_is_table, result.__mro__[1:]):
        for name, info in fields_of(base).items():
            if fields_of(result)[name].description is None:
                fields_of(result)[name].description = info.description
    return result  # type: ignore[no-any-return]  # pydantic's own type for it is not type[T]


class Decision(NamedTuple):
    """A setting that taut chose because the configuration leaves it open, with the reason. Printed at the start, and in
    the run log.
    """

    name: str
    value: str
    reason: str


class Row(NamedTuple):
    """One key of a configuration, for documentation."""

    key: str
    type: str
    default: str
    doc: str


class Assignment(NamedTuple):
    """A value for a key, from the command line or from Python."""

    path: tuple[str, ...]
    value: Any


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """The configuration in a TOML or YAML file (or none) with ``a.b=value`` set on top."""
    assignments = [_parse_override(cls, text) for text in overrides]
    return _build(cls, read_settings(path), assignments, ("on the command line", _place(path)))


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: Path | None = None) -> T:
    """The same from Python values: nested mappings, dotted keys and configclass instances, in any mixture."""
    place = "in the arguments"
    assignments = list(_flatten(cls, mapping, ()))
    return _build(
        cls, read_settings(path), assignments, (place, place if path is None else _place(path))
    )


def replace(config: T, mapping: Mapping[str, Any]) -> T:
    """A configuration with other values for some keys, which are as in ``from_mapping``."""
    cls, place = type(config), "in the arguments"
    return _build(cls, to_dict(config), list(_flatten(cls, mapping, ())), (place, place))


def override(config: T, overrides: Sequence[str]) -> T:
    """A configuration with ``a.b=value`` set on top."""
    cls, place = type(config), "on the command line"
    return _build(
        cls, to_dict(config), [_parse_override(cls, text) for text in overrides], (place,) * 2
    )


def restore(cls: type[T], saved: Mapping[str, Any], place: str) -> T:
    """The configuration of a mapping from ``to_dict``. ``place``: its origin, for errors."""
    return _build(cls, dict(saved), [], (place, place))


def home_path(text: str | os.PathLike[str]) -> Path:
    """The path of a text; ``~`` is the user's home. ``~name`` is an ordinary file name, so that it does not reveal
    whether a user exists, or where their home is.
    """
    path = Path(text)
    return path.expanduser() if path.parts[:1] == ("~",) else path


def user_path(text: str, key: str) -> Path:
    """The path in a key, with ``~`` expanded, whether or not it exists."""
    try:
        path = home_path(text)
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or no home
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key}={shown(text)} cannot be looked up: {reason}; expected a path; correct it"
        ) from error
    return path


def read_url(text: str, key: str, secret_key: str) -> str:
    """The URL of an http server in ``key``: host and path, no slash at the end. ``secret_key``: the key that names the
    environment variable of its secret.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        is_plain = parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        parts, host, port, is_plain = urlsplit(""), None, None, False
    if parts.scheme not in ("http", "https") or not host or port == 0 or not is_plain:
        # What is not plain may hold a secret: then no more than the host is shown.
        rest = f": has more than host and path{f' ({host})' if host else ''}"
        problem = f"={text}: cannot be used" if is_plain else rest
        raise ConfigError(
            f"{key}{problem}; expected a URL of host and path, as in http://127.0.0.1:8000/v1; correct it; a key or "
            f"password goes into the environment variable that {secret_key} names"
        )
    return text.rstrip("/")


def read_secret(variable: str | None, key: str) -> str | None:
    """The secret in the environment variable named by ``key``; None where it names none. No message contains it."""
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ConfigError(
            f"{key}={variable}: no environment variable of this name is set; expected it to hold the server's key; "
            f"export it, correct the name, or remove {key}"
        )
    return secret


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON-able values."""
    plain = pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")
    assert isinstance(plain, dict)
    return plain


_described: dict[type[Any], tuple[Row, ...]] = {}


def describe(cls: type[Any]) -> tuple[Row, ...]:
    """Every key with its type, default and documentation, in the order of the fields."""
    if cls not in _described:
        _described[cls] = tuple(_rows(cls))
    return _described[cls]


def _rows(cls: type[Any]) -> Iterator[Row]:
    return (
        Row(
            key,
            type_name(info.annotation),
            "required"
            if info.is_required()
            else written(info.get_default(call_default_factory=True)),
            " ".join((info.description or "").replace("``", "`").split()),
        )
        for key, info in _leaves(cls, "")
    )


def type_name(annotation: Any) -> str:
    """A type in TOML's words: ``integer | none``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(type_name, arguments))
    if origin in (list, tuple):
        item = type_name(arguments[0])
        return f"list of ({item})" if "|" in item else f"list of {item}"
    if origin is dict or dataclasses.is_dataclass(annotation):
        return "table"
    names = {int: "integer", float: "number", str: "string", bool: "true | false"}
    return "none" if annotation is types.NoneType else names.get(annotation) or annotation.__name__


def _build(
    cls: type[T],
    tree: dict[str, Any],
    assignments: Sequence[Assignment],
    places: tuple[str, str],
) -> T:
    """``places``: the origins of the assignments, and of the tree."""
    _require_disjoint(cls, [assignment.path for assignment in assignments], places[0])
    tree = _plain(tree, (), places[1])
    for path, value in assignments:
        _assign(tree, Assignment(path, _plain(value, path, places[0])), places[0])
    assigned = {assignment.path for assignment in assignments}
    try:
        return pydantic.TypeAdapter(cls).validate_json(json.dumps(tree), strict=True)
    except pydantic.ValidationError as error:
        keys = [key for key, _ in _leaves(cls, "")]
        raise ConfigError(explain(error, tree, assigned, places, keys)) from error


def _place(path: Path | None) -> str:
    return "on the command line" if path is None else f"at {path.name}"


def read_settings(path: Path | None) -> dict[str, Any]:
    """The content of a TOML or YAML file, by its suffix, unchecked; empty without a path."""
    if path is None:
        return {}
    kind = "YAML" if path.suffix in YAML else "TOML"
    if path.is_dir():
        raise ConfigError(
            f"found the directory {path}; expected a TOML or YAML file of settings; give its path (of a run's "
            "directory, taut show --step N, taut resume, taut rollouts and taut page take the name)"
        )
    try:
        raw = files.read_regular(path, LARGEST)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; expected a {kind} file; give its path"
        ) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not UTF-8 at line {line}; expected UTF-8; convert it"
        ) from error
    settings = _read_yaml(path, text) if kind == "YAML" else _read_toml(path, text)
    if isinstance(method := settings.get("method"), str):
        settings["method"] = method.replace("-", "_")  # as the command is called
    return settings


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    from taut.io import yaml_tables

    try:
        return yaml_tables.read(text)
    except yaml_tables.NotRead as error:
        raise ConfigError(
            f"{path} cannot be read as YAML: {error}; correct it (lines of key: value)"
        ) from error


def _read_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; expected key = value lines") from error
    except (ValueError, RecursionError) as error:
        line = _line_not_held(text)
        raise ConfigError(
            f"{path} cannot be read at line {line}: {error}; expected key = value lines"
        ) from error


def _line_not_held(text: str) -> int:
    """The line with a value that Python cannot hold, such as an integer of 5,000 digits: tomllib does not report it."""
    lines = text.split("\n")

    def is_in_first(count: int) -> bool:
        try:
            tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:  # cut in the middle of a value
            return False
        except (ValueError, RecursionError):
            return True
        return False

    return bisect.bisect_left(range(len(lines)), True, key=is_in_first)


def _parse_override(cls: type[Any], text: str) -> Assignment:
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(
            f"found '{key_text([text])}' on the command line; expected key=value, as in seed=1"
        )
    return Assignment(path, _parse_value(annotation_of(cls, path), raw))


def _parse_value(annotation: Any, raw: str) -> Any:
    """``raw`` as TOML, unless only the text itself is of a kind the field takes."""
    if raw == "none" and _accepts(annotation, None):
        return None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        items = _bare_items(raw)
        return items if items and _accepts(annotation, items) else raw
    if set(parsed) != {"value"}:
        return raw
    value = parsed["value"]
    # Where the field also takes a list, a malformed list is reported as a list, not taken as text.
    may_be_text = annotation in (str, str | None) or not isinstance(value, list | dict)
    is_text = may_be_text and not _accepts(annotation, value) and _accepts(annotation, raw)
    return raw if is_text else value


def _bare_items(raw: str) -> list[str]:
    """The texts of ``[a,b]``; empty where a text has a character with another meaning in TOML."""
    inside = re.fullmatch(r"\s*\[([^][{}()\"'=\\]*)\]\s*", raw)
    items = [item.strip() for item in inside[1].split(",")] if inside else []
    if items and not items[-1]:
        items.pop()  # a comma at the end, as in TOML
    return items if all(items) else []


def _accepts(annotation: Any, value: Any) -> bool:
    if annotation is None:
        return False
    try:
        text = json.dumps(_plain(value, (), ""))
        pydantic.TypeAdapter(annotation).validate_json(text, strict=True)
    except (pydantic.ValidationError, ConfigError):
        return False
    return True


def _plain(value: Any, path: KeyPath, place: str) -> Any:
    """A value in JSON's types. Raises ConfigError, with the key, for a value that a configuration cannot hold."""
    if len(path) > DEEPEST:
        raise ConfigError(
            f"found '{key_text(path)}' {place}, nested deeper than {DEEPEST}; "
            "expected a key that 'taut COMMAND --help' lists"
        )
    if _is_table(type(value)):
        return to_dict(value)
    if isinstance(value, Mapping):
        for key in value:
            _require_text(key, (*path, str(key)), place)
        return {key: _plain(item, (*path, key), place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), place) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, date | time | datetime):
        return str(value)
    if isinstance(value, str):
        return _require_text(value, path, place)
    if isinstance(value, int) and not -WIDEST <= value < WIDEST:
        raise ConfigError(
            f"found an integer of {value.bit_length()} bits for '{key_text(path)}' {place}; expected at most 64"
        )
    if value is None or isinstance(value, int | float):
        return value
    raise ConfigError(
        f"found a value of type {type(value).__name__} {place} for '{key_text(path)}'; "
        "expected numbers, strings, booleans, lists and mappings"
    )


def _require_text(value: Any, path: KeyPath, place: str) -> str:
    """A string that can be written as UTF-8."""
    is_text = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    if not is_text:
        raise ConfigError(
            f"found '{key_text(path)}' {place}, which is not Unicode; expected Unicode text"
        )
    return str(value)


def _flatten(
    cls: type[Any], mapping: Mapping[str, Any], prefix: tuple[str, ...]
) -> Iterator[Assignment]:
    for key, value in mapping.items():
        path = (*prefix, *str(key).split("."))
        if _is_table(type(value)):
            value = to_dict(value)
        if isinstance(value, Mapping) and _is_table(annotation_of(cls, path)):
            yield from _flatten(cls, value, path)
        else:
            yield Assignment(path, value)


def _require_disjoint(cls: type[Any], paths: Sequence[tuple[str, ...]], place: str) -> None:
    """Raise ConfigError for a key that is set twice, a key next to its own table, and a table set as a whole."""
    seen: set[tuple[str, ...]] = set()
    for path in paths:
        if path in seen:
            raise ConfigError(f"key '{key_text(path)}' is set twice {place}; expected once")
        seen.add(path)
        annotation = annotation_of(cls, path)
        if _is_table(annotation):
            example = f"{'.'.join(path)}.{next(iter(fields_of(annotation)))}"
            raise ConfigError(
                f"'{'.'.join(path)}' {place} is a table; expected its keys one by one, as in {example}=..."
            )
    for path in seen:
        for length in range(1, len(path)):
            if path[:length] in seen:
                raise ConfigError(
                    f"'{key_text(path[:length])}' and '{key_text(path)}' are both set {place}; expected one of them"
                )


def _assign(tree: dict[str, Any], assignment: Assignment, place: str) -> None:
    *parents, last = assignment.path
    for depth, parent in enumerate(parents, start=1):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"'{key_text(assignment.path)}' {place} sets a key of '{key_text(parents[:depth])}', "
                f"which has the value {shown(tree)}; expected one of them"
            )
    tree[last] = assignment.value


def fields_of(cls: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a configclass, by name."""
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    return fields


def changed(config: Any, keys: Iterable[str] | None = None) -> list[str]:
    """Those of the keys (all by default) whose values are not the defaults."""
    fields = fields_of(type(config))
    return [
        key
        for key in (fields if keys is None else keys)
        if getattr(config, key) != fields[key].get_default(call_default_factory=True)
    ]


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def annotation_of(cls: type[Any], path: Sequence[str]) -> Any:
    """The type of the field a dotted key names; None where there is none."""
    annotation: Any = cls
    for name in path:
        if _is_table(annotation) and name in fields_of(annotation):
            annotation = fields_of(annotation)[name].annotation
        else:
            annotation = _value_type(annotation)
    return annotation


def _value_type(annotation: Any) -> Any:
    """The type of the values of ``dict[str, X] | None``; None for what is no such thing."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    types = [_value_type(branch) for branch in typing.get_args(annotation)]
    return next((value for value in types if value is not None), None)


def _leaves(cls: type[Any], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in fields_of(cls).items():
        annotation: Any = info.annotation
        if _is_table(annotation):
            yield from _leaves(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def written(value: Any) -> str:
    """A value as ``describe`` writes defaults: text as it is, but white space in quotes; else JSON."""
    if isinstance(value, str) and value.strip():
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=to_dict)


ALIASES_OF_DTYPES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
}
"""Names of compute dtypes elsewhere -> here."""
HALF_DTYPES = ("float16", "fp16", "f16", "half")


def read_dtype(name: object) -> object:
    """The name of a compute dtype here. Raises ValueError for float16, in which taut does not compute."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain in HALF_DTYPES:
        raise ValueError(
            f"found dtype={name}, and taut does not compute in float16, which needs its loss scaled; expected "
            "bfloat16, float32 or float64; set dtype=bfloat16, or float32 where the hardware has no bfloat16"
        )
    return ALIASES_OF_DTYPES.get(plain, plain) if isinstance(plain, str) else name


ComputeDtype: TypeAlias = Annotated[
    Literal["float64", "float32", "bfloat16"],
    BeforeValidator(
        read_dtype,
        json_schema_input_type=Literal["float64", "float32", "bfloat16", "fp64", "fp32", "bf16"],
    ),
]
"""A compute dtype in a configuration, where bf16 and the like are accepted too."""
