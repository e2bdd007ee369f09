"""What is wrong with a configuration, in one line: pydantic's errors in taut's words.

Unknown keys come first, with the nearest known one (or the one that does what it does elsewhere); then values of
another kind; then keys that are missing. Keys and values are shown short and on one line, whatever is in them.

Imports nothing of ours. Imported by ``config.py``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

KeyPath = tuple[str | int, ...]

ERRORS_SHOWN = 3
"""How many mistakes one message names."""
SHOWN = 80
"""Characters of a key or a value that a message has room for."""

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
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
        "data.columns": (
            "chosen_key dataset_prompt_column dataset_text_field input_key label_names output_key prompt_key "
            "rejected_key remove_unused_columns text_column"
        ),
        "data.targets": (
            "assistant_only_loss completion_only_loss loss_scale mask_history response_template train_on_inputs "
            "train_on_prompt"
        ),
        "data.images.max_pixels": "image_max_pixels",
        "data.cache": "load_from_cache_file overwrite_cache",
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
        "log.wandb log.tensorboard": "logger report_to trackers",
        "reward.centring": "center_rewards_coefficient",
        "dpo.loss kto.loss cpo.loss grpo.loss ppo.loss reward.loss": "loss_type pref_loss",
        "dpo.beta kto.beta orpo.beta simpo.beta cpo.beta": "pref_beta",
        "grpo.kl_coef ppo.kl_coef": "beta init_kl_coef kl_beta kl_loss_coef kl_penalty_coef use_kl_loss",
        "dpo.sft_weight cpo.sft_weight simpo.sft_weight": "cpo_alpha pref_ftx rpo_alpha",
        "distill.sft_weight": "sft_alpha",
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
        "rollout.refills": "dynamic_sample dynamic_sampling",
        "rollout.engine": "use_vllm vllm_mode",
        "rollout.url": "vllm_server_base_url vllm_server_host vllm_server_port",
        "rewards": (
            "remote_rm_url reward_fn reward_func reward_funcs reward_function reward_functions reward_model "
            "reward_model_path reward_weights"
        ),
        "shaping.missing_stop": "missing_eos_penalty non_stop_penalty",
        "shaping.overlong": "mask_truncated_completions overlong_filter",
        "grpo.clip_low grpo.clip_high ppo.clip_low ppo.clip_high": (
            "clip_range clip_ratio cliprange eps_clip epsilon"
        ),
        "grpo.clip_low ppo.clip_low": "clip_ratio_low epsilon_low",
        "grpo.clip_high ppo.clip_high": "clip_ratio_high epsilon_high",
        "grpo.dual_clip ppo.dual_clip": "clip_ratio_c delta",
        "grpo.loss ppo.loss": "importance_sampling_level policy_loss",
        "grpo.average ppo.average": "loss_agg_mode",
        "grpo.advantage": "adv_estimator advantage_estimator scale_rewards",
        "grpo.entropy_coef ppo.entropy_coef": "entropy_coeff",
        "ppo.lam": "gae_lambda lambd",
        "ppo.value_clip": "cliprange_value value_clip_range",
        "ppo.value_coef": "vf_coef",
        "critic.learning_rate": "critic_learning_rate critic_lr",
        "critic.model": "critic_model value_model value_model_path",
    }.items()
    for name in names.split()
}
"""Names of other frameworks (TRL, transformers, LLaMA-Factory, ms-swift, OpenRLHF, verl, axolotl) -> the keys here: a
suggestion names those that the method has."""

_PACKED = (
    "batches are always packed, without padding, and samples do not see each other; batch.tokens_per_microbatch is "
    "the size of a micro-batch"
)
_QUANTISED = "a quantised base model (QLoRA) cannot be trained; lora.rank trains an adapter over the model as it is"
_SHARDED = (
    "start the command with torchrun --nproc-per-node N -m taut ...: weights, gradients and optimizer are sharded "
    "over the ranks"
)
_UNSPLIT = (
    "torchrun shards over all ranks; there is no tensor, pipeline, expert or sequence parallelism"
)
_READ_AHEAD = "rows are tokenised once and read ahead of training; there is nothing to set"
_METHOD = "the command says what is trained: taut sft, taut dpo, taut grpo, ..."
_HEAD = "the output head runs in chunks over the targets only; there is nothing to switch on"
_SERVED = (
    "vLLM runs as a server with settings of its own; rollout.engine=server rollout.url=... uses it"
)
_UPLOAD = "nothing is uploaded; upload the directory out/model when the run is finished"

INSTEAD = {
    name: sentence
    for sentence, names in {
        _PACKED: (
            "group_by_length neat_packing pack_dataset packing packing_samples packing_strategy pad_to_max_length "
            "padding padding_free sample_packing use_dynamic_bsz use_remove_padding"
        ),
        _QUANTISED: (
            "bnb_4bit_compute_dtype bnb_4bit_quant_type load_in_4bit load_in_8bit quant_bits quant_method "
            "quantization quantization_bit quantization_config"
        ),
        _SHARDED: (
            "accelerate_config ddp_backend deepspeed fsdp fsdp_config nnodes nproc_per_node num_gpus num_processes "
            "zero_stage"
        ),
        _UNSPLIT: (
            "context_parallel_size expert_model_parallel_size pipeline_model_parallel_size ring_attn_size "
            "sequence_parallel sequence_parallel_size tensor_model_parallel_size tensor_parallel_size "
            "ulysses_sequence_parallel_size"
        ),
        _READ_AHEAD: (
            "dataloader_num_workers dataloader_pin_memory dataset_num_proc num_proc num_workers "
            "preprocessing_num_workers streaming"
        ),
        _METHOD: "do_predict do_train rlhf_type stage task trainer trainer_type",
        _HEAD: "cut_cross_entropy enable_liger_kernel liger_kernel use_liger use_liger_kernel",
        _SERVED: (
            "gpu_memory_utilization vllm_gpu_memory_utilization vllm_max_model_len vllm_tensor_parallel_size"
        ),
        _UPLOAD: "hub_model_id hub_strategy push_to_hub",
        "the optimizer is AdamW: optim.beta1, optim.beta2, optim.eps, optim.weight_decay": (
            "optim_type optimizer optimizer_type use_8bit_adam"
        ),
        "held-out rows are a file or data set of their own: data.eval": (
            "split_dataset_ratio test_size val_size validation_split_percentage"
        ),
        "a file is read whole; give data.train a file with fewer rows": (
            "max_eval_samples max_samples max_train_samples"
        ),
        "write the system message into the rows, or into the chat template (data.template)": (
            "default_system system system_message system_prompt"
        ),
        "write it into the chat template (data.template)": "chat_template_kwargs enable_thinking",
        "the end tokens are derived from the chat template; 'taut show' prints them": "eos_token pad_token",
        "roll-outs are drawn from the whole distribution (rollout.temperature); eval.answers.sampling has the keys of "
        "held-out answers": "min_p top_k top_p",
        "torch.compile is not used": "compile torch_compile",
    }.items()
    for name in names.split()
}
"""Names of other frameworks without a key here -> what there is instead."""


def explain(
    error: pydantic.ValidationError,
    tree: Mapping[str, Any],
    assigned: set[tuple[str, ...]],
    places: tuple[str, str],
    keys: Sequence[str],
) -> str:
    """The mistakes in ``tree``. ``places``: where the keys in ``assigned`` come from, and where the others do;
    ``keys``: those there are."""
    found: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path_of(detail, tree), []).append(detail)
    deepest = {
        path: details
        for path, details in found.items()
        if not any(other[: len(path)] == path for other in found if len(other) > len(path))
        or details[0]["type"] == "value_error"
    }
    lines = []
    for path, details in deepest.items():
        is_assigned = any(path[: len(given)] == given for given in assigned)
        of_table = [given for given in sorted(assigned) if given[: len(path)] == path]
        if of_table and details[0]["type"] == "unexpected_keyword_argument":
            path, is_assigned = (
                of_table[0],
                True,
            )  # the whole key, not the unknown table that it names
        lines.append(_explain_one(path, details, places[0 if is_assigned else 1], keys))
    lines.sort(key=lambda line: ("unknown" not in line, "is missing" in line))
    more = len(lines) - ERRORS_SHOWN
    return "; also: ".join(lines[:ERRORS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def first_problem(error: pydantic.ValidationError) -> str:
    """The first mistake in what a program wrote, as ``random[0].torch: found 5; expected a string``."""
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
    """Where an error is in ``tree``: pydantic's location without the names of union branches."""
    path: list[str | int] = []
    for part in detail["loc"]:
        is_index = isinstance(tree, list | tuple) and isinstance(part, int)
        if is_index or (isinstance(tree, Mapping) and part in tree):
            path.append(part)
            tree = tree[part]
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _first_key(key: str, keys: Sequence[str]) -> str:
    """``key``, or the first key of the table it names."""
    return next((known for known in keys if known.startswith(f"{key}.")), key)


def _explain_one(path: KeyPath, details: Sequence[Any], place: str, keys: Sequence[str]) -> str:
    key = key_text(path)
    kinds = {detail["type"] for detail in details}
    if "value_error" in kinds:
        return str(details[0]["ctx"]["error"])
    if "missing" in kinds:
        wanted = _first_key(key, keys)
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
    """Which key is meant: the one that does what a framework's does, one of the same name, or one spelt alike."""
    table, _, last = key.rpartition(".")
    elsewhere = ELSEWHERE.get(last, ())
    in_table = [f"{table}.{known.rpartition('.')[2]}" for known in elsewhere]  # critic.lr
    for meant in (in_table, elsewhere):
        here = dict.fromkeys(f"'{known}'" for known in meant if known in keys)
        if here:
            return f"did you mean {' or '.join(here)}?"
    if last in INSTEAD and IS_TRAINING in keys:
        return INSTEAD[last]
    same = [known for known in keys if known == last or known.endswith(f".{last}")]
    if same:
        return f"did you mean '{same[0]}'?"
    if elsewhere and IS_TRAINING in keys:
        return f"other commands have '{elsewhere[0]}' for it, this one does not"
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "'taut COMMAND --help' lists every key"


IS_TRAINING = "optim.learning_rate"
"""The key by which a command that trains is known."""
