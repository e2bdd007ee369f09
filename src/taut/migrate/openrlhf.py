"""OpenRLHF: ``openrlhf.cli.train_METHOD`` under deepspeed, python -m or ray job submit.

Option names are the dotted ones of 0.11.0 (``--ds.packing_samples``); the flat ones of 0.10.0 and before
(``--packing_samples``) are taken as the same, and tell the version. ``examine.py`` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taut.migrate.dialect import Dialect, Found, Release
from taut.migrate.recipe import Method, Setting

SCRIPTS: Mapping[str, Method] = {
    "train_sft": "sft",
    "train_dpo": "dpo",
    "train_rm": "reward",
    "train_ppo_ray": "ppo",
    "train_ppo": "ppo",
    "train_kto": "kto",
}
FLAT: Mapping[str, str] = {
    "pretrain": "model.model_name_or_path",
    "dataset": "data.dataset",
    "prompt_data": "data.prompt_dataset",
    "input_key": "data.input_key",
    "output_key": "data.output_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "tokenizer_chat_template": "data.tokenizer_chat_template",
    "multiturn": "data.multiturn",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "eval_dataset": "eval.dataset",
    "pretrain_mode": "model.pretrain_mode_enable",
    "packing_samples": "ds.packing_samples",
    "attn_implementation": "ds.attn_implementation",
    "zero_stage": "ds.zero_stage",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "use_liger_kernel": "ds.use_liger_kernel",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "seed": "train.seed",
    "learning_rate": "adam.lr",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "save_path": "ckpt.output_dir",
    "use_kl_loss": "algo.kl.use_loss",
    "aux_loss_coef": "model.aux_loss_coef",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant",
    "load_in_4bit": "ds.load_in_4bit",
    "lora_dropout": "ds.lora.dropout",
    "adam_offload": "ds.adam_offload",
    "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm",
    "param_dtype": "ds.param_dtype",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "zpg": "ds.zpg",
    "adam_betas": "adam.betas",
    "l2": "adam.weight_decay",
    "dataset_probs": "data.dataset_probs",
    "dataset_split": "data.dataset_split",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "ckpt_path": "ckpt.path",
    "load_checkpoint": "ckpt.load_enable",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "logging_steps": "logger.logging_steps",
    "use_tensorboard": "logger.tensorboard_dir",
    "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "full_determinism": "train.full_determinism_enable",
    "kl_estimator": "algo.kl.estimator",
    "init_kl_coef": "algo.kl.init_coef",
    "advantage_estimator": "algo.advantage.estimator",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "top_p": "rollout.top_p",
    "temperature": "rollout.temperature",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "async_train": "train.async_enable",
}


def find(words: Sequence[str]) -> Found | None:
    """``openrlhf.cli.train_sft``, as a module or a path."""
    for at, word in enumerate(words):
        for script, method in SCRIPTS.items():
            if word.endswith((f"openrlhf.cli.{script}", f"openrlhf/cli/{script}.py")):
                return Found(method, at + 1)
    return None


def release(settings: Mapping[str, Setting]) -> Release:
    """By the names it uses: 0.8 has --flash_attn, 0.9 and 0.10.0 are flat, later ones are dotted."""
    if "flash_attn" in settings:
        return Release("0.8.5", "--flash_attn is of 0.8 and before")
    flat = next((key for key in settings if key in FLAT and key != "seed"), None)
    if flat is not None:
        return Release("0.10.0", f"--{flat} is flat, as up to 0.10.0")
    return Release("0.11.0", "the newest known; say another as openrlhf==VERSION:FILE")


DIALECT = Dialect(
    name="openrlhf",
    library="openrlhf",
    find=find,
    methods=("sft", "dpo", "reward", "ppo", "kto"),
    release=release,
    options_of="openrlhf 0.11.0 and 0.10.0",
    model=("model.model_name_or_path", "actor.model_name_or_path"),
    data=("data.dataset", "data.prompt_dataset"),
    aliases=FLAT,
)
