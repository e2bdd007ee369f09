"""OpenRLHF 0.11, with dotted options; the flat ones of 0.10 and before are in table/aliases.toml."""

from __future__ import annotations

from taut.migrate.frameworks.tables import Lacking, Tables, by_option, lacking
from taut.migrate.frameworks.transformers import VARIABLES

REWARD_MODEL = {"learning_rate": 9e-6, "num_train_epochs": 1, "max_length": 512}

OPENRLHF = Tables(
    title="OpenRLHF",
    methods={"sft": "sft", "dpo": "dpo", "reward": "reward", "kto": "kto", "ppo": "ppo"},
    names={
        "*": {
            "model.model_name_or_path": "model",
            "actor.model_name_or_path": "model",
            "ref.model_name_or_path": "ref_model",
            "reward.model_name_or_path": "reward_model",
            "critic.model_name_or_path": "critic_model",
            "adam.lr": "learning_rate",
            "actor.adam.lr": "learning_rate",
            "critic.adam.lr": "critic_learning_rate",
            "adam.weight_decay": "weight_decay",
            "actor.adam.weight_decay": "weight_decay",
            "adam.eps": "adam_epsilon",
            "actor.adam.eps": "adam_epsilon",
            "adam.betas": "adam_betas",
            "actor.adam.betas": "adam_betas",
            "optim": "optim",
            "actor.optim": "optim",
            "lr_scheduler": "lr_scheduler_type",
            "actor.lr_scheduler": "lr_scheduler_type",
            "lr_warmup_ratio": "warmup_ratio",
            "actor.lr_warmup_ratio": "warmup_ratio",
            "min_lr_ratio": "min_lr_ratio",
            "actor.min_lr_ratio": "min_lr_ratio",
            "max_norm": "max_grad_norm",
            "actor.max_norm": "max_grad_norm",
            "train.max_epochs": "num_train_epochs",
            "train.seed": "seed",
            "train.batch_size": "global_batch_size",
            "data.max_len": "max_length",
            "ckpt.output_dir": "output_dir",
            "ckpt.save_steps": "save_steps",
            "ckpt.max_num": "save_total_limit",
            "model.gradient_checkpointing_enable": "gradient_checkpointing",
            "actor.gradient_checkpointing_enable": "gradient_checkpointing",
            "ds.deepcompile": "torch_compile",
            "ds.adam_offload": "cpu_offload",
            "ds.lora.rank": "lora_r",
            "ds.lora.alpha": "lora_alpha",
            "ds.lora.dropout": "lora_dropout",
            "ds.lora.target_modules": "target_modules",
            "ds.load_in_4bit": "load_in_4bit",
            "model.beta": "beta",
            "model.label_smoothing": "label_smoothing",
            "model.nll_loss_coef": "rpo_alpha",
            "model.loss_type": "loss_type",
            "eval.steps": "eval_steps",
            "model.aux_loss_coef": "router_aux_loss_coef",
            "actor.aux_loss_coef": "router_aux_loss_coef",
            "actor.entropy_coef": "entropy_coef",
            "actor.dual_clip": "delta",
            "rollout.n_samples_per_prompt": "num_generations",
            "rollout.temperature": "temperature",
            "rollout.top_p": "top_p",
            "rollout.max_new_tokens": "max_completion_length",
            "rollout.batch_size": "rollout_batch_size",
            "critic.value_clip": "cliprange_value",
            "algo.advantage.gamma": "gamma",
            "algo.advantage.lambd": "lam",
            "reward.overlong_buffer_len": "soft_overlong",
            "ds.tensor_parallel_size": "tensor_parallel_size",
            "ds.ring_attn_size": "sequence_parallel_size",
        },
        "ppo": {"train.max_epochs": "num_iterations", "train.num_episodes": "num_train_epochs"},
    },
    defaults={
        "*": {
            "lr_scheduler_type": "cosine_with_min_lr",
            "warmup_ratio": 0.03,
            "min_lr_ratio": 0.1,
            "weight_decay": 0.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "max_grad_norm": 1.0,
            "seed": 42,
            "global_batch_size": 128,
            "gradient_checkpointing": False,
            "lora_r": 0,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
            "num_train_epochs": 1,
            "target_modules": "all-linear",
            "data.dataset_split": "train",
            "data.prompt_split": "train",
        },
        "sft": {
            "learning_rate": 5e-6,
            "num_train_epochs": 2,
            "max_length": 2048,
            "data.input_key": "input",
            "data.input_template": "User: {}\nAssistant: ",
            "eval.split": "train",
        },
        "dpo": {
            "learning_rate": 1e-5,
            "loss_type": "sigmoid",
            "beta": 0.1,
            "max_length": 512,
            "data.chosen_key": "chosen",
            "data.rejected_key": "rejected",
            "eval.split": "test",
        },
        "reward": {
            **REWARD_MODEL,
            "loss_type": "sigmoid",
            "data.chosen_key": "chosen",
            "data.rejected_key": "rejected",
            "eval.split": "train",
        },
        "kto": {"learning_rate": 1e-5, "beta": 0.1, "loss_type": "kto", "max_length": 512},
        "ppo": {
            "learning_rate": 1e-6,
            "critic_learning_rate": 9e-6,
            "max_length": 2048,
            "rollout_batch_size": 1024,
            "num_generations": 1,
            "num_iterations": 1,
            "temperature": 1.0,
            "actor.eps_clip": 0.2,
            "cliprange_value": 0.5,
            "gamma": 1.0,
            "lam": 1.0,
            "algo.kl.init_coef": 0.01,
            "algo.kl.estimator": "k1",
            "algo.advantage.estimator": "gae",
            "actor.policy_loss_type": "ppo",
            "reward.clip_range": [-10, 10],
            "data.input_key": "input",
            "algo.advantage.is_correction_type": "tis",
            "algo.advantage.is_correction_threshold": [0.5, 5.0],
            "reward.overlong_penalty_factor": 1,
            "train.async_queue_size": 1,
        },
    },
    needless=by_option(
        {
            "packing is always on and exact; samples are counted": "ds.packing_samples",
            "attention is chosen by what the hardware has": "ds.attn_implementation flash_attn",
            "dtype: bfloat16 compute over float32 weights where the hardware has it": (
                "ds.param_dtype ds.grad_accum_dtype bf16"
            ),
            "the head is computed in chunks in any case": "ds.use_liger_kernel",
            "derived from the chat template and the tokenizer": "data.disable_fast_tokenizer",
            "read from config.json": "ds.experts_implementation ds.value_head_prefix",
            "layers are recomputed without reentrance, which has the same gradients": (
                "model.gradient_checkpointing_reentrant actor.gradient_checkpointing_reentrant"
            ),
            "batch.tokens_per_microbatch counts tokens": (
                "train.micro_batch_size rollout.micro_batch_size train.dynamic_batch_enable "
                "train.max_tokens_per_gpu rollout.max_tokens_per_gpu rollout.vllm_generate_batch_size "
                "micro_train_batch_size micro_rollout_batch_size"
            ),
            "evaluation does not change what is learned: eval.*, eval.answers.*": (
                "eval.temperature eval.n_samples_per_prompt ckpt.best_metric_key eval_steps"
            ),
            "the loss is computed in float32 in any case": "model.compute_fp32_loss_enable",
            "prompts have as many pictures as they name": "data.max_images_per_prompt",
        }
    ),
    machine=by_option(
        {
            "saving: checkpoint.every, checkpoint.keep": (
                "save_steps save_total_limit ckpt.save_hf ckpt.disable_ds ckpt.path ckpt.max_mem ckpt.load_enable "
                "ds.use_universal_ckpt critic.save_value_network"
            ),
            "logging: log.*": (
                "logger.logging_steps logger.tensorboard_dir logger.wandb.key logger.wandb.org logger.wandb.group "
                "logger.wandb.project logger.wandb.run_name perf"
            ),
            "reading and its workers": "data.dataloader_num_workers use_ms",
            "how processes and memory are organised": (
                "local_rank ds.zero_stage ds.zpg ds.overlap_comm ds.enable_sleep train.full_determinism_enable "
                "ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node actor.num_nodes "
                "actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node train.colocate_all "
                "train.colocate_actor_ref train.colocate_critic_reward ref.offload reward.offload"
            ),
            "the engine that generates: its memory and its processes": (
                "vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend vllm.sync_with_ray "
                "vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep vllm.gpu_memory_utilization"
            ),
        }
    ),
    lacking={
        **lacking(
            "options of another optimizer",
            "muon.lr muon.momentum muon.nesterov muon.no_nesterov muon.ns_steps",
        ),
        **lacking("a quantised model without adapters", "load_in_4bit"),
        **lacking("a weighted mixture of data", "data.dataset_probs data.prompt_probs"),
        **lacking(
            "sequence or context parallelism, which changes no number",
            "",
            changes=False,
            sequence_parallel_size=1,
        ),
        **lacking(
            "tokens are sampled from the whole distribution: the ratios would be biased",
            "",
            top_p=1,
        ),
        **lacking(
            "an average of the weights is kept beside them", "train.enable_ema train.ema_beta"
        ),
        **lacking(
            "an agent of the recipe's own: rollout.environment.name=agent:FILE.py:function",
            "train.agent_func_path",
        ),
        **lacking(
            "the critic's optimizer has its rate alone: critic.learning_rate",
            "critic.adam.betas critic.adam.eps "
            "critic.adam.weight_decay critic.optim critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio "
            "critic.max_norm",
        ),
        "algo.kl.horizon": Lacking("the time in which the KL coefficient adapts", (10000,)),
        "ds.ring_attn_head_stride": Lacking(
            "sequence or context parallelism, which changes no number", (1,), changes=False
        ),
    },
    variables=VARIABLES,
)
