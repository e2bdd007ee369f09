"""axolotl 0.13: the YAML file of `axolotl train`."""

from __future__ import annotations

from taut.migrate.frameworks import transformers
from taut.migrate.frameworks.swift import merged
from taut.migrate.frameworks.tables import Tables, by_option, lacking, words

PREFERENCES = {"beta": 0.1, "loss_type": "sigmoid", "disable_dropout": True}

AXOLOTL = Tables(
    title="axolotl",
    methods={
        "sft": "sft",
        "pt": "sft",
        "dpo": "dpo",
        "ipo": "dpo",
        "kto": "kto",
        "orpo": "orpo",
        "simpo": "simpo",
        "reward": "reward",
        "process_reward": "reward",
        "grpo": "grpo",
        "gdpo": "grpo",
        "ebft": "energy-based fine-tuning (EBFT)",
    },
    names={
        "*": {
            "base_model": "model",
            "adapter": "tuner_type",
            "sequence_len": "max_length",
            "micro_batch_size": "per_device_train_batch_size",
            "num_epochs": "num_train_epochs",
            "optimizer": "optim",
            "lr_scheduler": "lr_scheduler_type",
            "val_set_size": "split_dataset_ratio",
            "lora_target_modules": "target_modules",
            "lora_modules_to_save": "modules_to_save",
            "lora_model_dir": "adapters",
            "peft_use_dora": "use_dora",
            "peft_init_lora_weights": "init_weights",
            "peft_use_rslora": "use_rslora",
            "rl_beta": "beta",
            "dpo_loss_type": "loss_type",
            "dpo_loss_weights": "loss_weights",
            "dpo_label_smoothing": "label_smoothing",
            "dpo_use_weighting": "use_weighting",
            "kto_desirable_weight": "desirable_weight",
            "kto_undesirable_weight": "undesirable_weight",
            "default_system_message": "system",
            "excess_length_strategy": "truncation_strategy",
            "sample_packing": "packing",
            "adam_eps": "adam_epsilon",
            "tokens": "new_special_tokens",
            "revision_of_model": "model_revision",
            "cosine_min_lr_ratio": "min_lr_ratio",
            **{
                f"trl.{name}": name
                for name in words(
                    "beta max_completion_length use_vllm vllm_mode vllm_server_host vllm_server_port "
                    "reward_funcs reward_weights num_generations importance_sampling_level "
                    "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps scale_rewards "
                    "temperature top_p top_k min_p repetition_penalty num_iterations epsilon "
                    "epsilon_high loss_type mask_truncated_completions generation_batch_size "
                    "vllm_importance_sampling_correction vllm_importance_sampling_mode "
                    "log_completions num_completions_to_print vllm_server_timeout use_liger_loss "
                    "chat_template_kwargs multi_objective_aggregation off_policy_mask_threshold "
                    "use_bias_correction_kl"
                )
            },
        },
        "orpo": {"orpo_alpha": "beta"},
        "simpo": {"cpo_alpha": "cpo_alpha"},
    },
    defaults={
        "*": {
            **transformers.DEFAULTS,
            "num_train_epochs": 1,
            "lr_scheduler_type": "cosine",
            "per_device_train_batch_size": 1,
            "max_length": 512,
            "lora_dropout": 0.0,
            "split_dataset_ratio": 0.0,
            "truncation_strategy": "drop",
            "optim": "adamw_torch_fused",
            "train_on_inputs": False,
        },
        "dpo": PREFERENCES,
        "ipo": {**PREFERENCES, "loss_type": "ipo"},
        "kto": {**PREFERENCES, "loss_type": "kto"},
        "orpo": {"beta": 0.1, "disable_dropout": True},
        "simpo": {
            "beta": 0.1,
            "simpo_gamma": 0.5,
            "cpo_alpha": 1.0,
            "loss_type": "simpo",
            "disable_dropout": True,
        },
        "reward": {"disable_dropout": True},
        "process_reward": {"disable_dropout": True, "step_separator": "\n"},
        "grpo": {
            "loss_type": "dapo",
            "beta": 0.0,
            "num_generations": 8,
            "max_completion_length": 512,
            "temperature": 1.0,
            "num_iterations": 1,
            "epsilon": 0.2,
            "scale_rewards": True,
            "vllm_mode": "server",
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 3.0,
            "ref_model_mixup_alpha": 0.9,
            "ref_model_sync_steps": 64,
        },
        "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    },
    needless=by_option(
        merged(
            transformers.NEEDLESS,
            {
                "attention is chosen by what the hardware has": (
                    "flex_attention sage_attention eager_attention gemma4_hybrid_attn_impl large_head_attention "
                    "fused_attn_kernel flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_rms_norm "
                    "flash_attn_fuse_mlp flash_optimum sdpa_varlen flash_attn_d512"
                ),
                "the head is computed in chunks in any case": (
                    "chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy "
                    "liger_rope liger_rms_norm "
                    "liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_rms_norm_gated "
                    "liger_cross_entropy dpo_use_liger_kernel"
                ),
                "kernels: the numbers are the same": (
                    "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels use_scattermoe "
                    "use_sonicmoe tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp"
                ),
                "read from config.json": (
                    "tokenizer_type processor_type base_model_config cls_model_config is_llama_derived_model "
                    "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_config"
                ),
                "packing is always on and exact": (
                    "sample_packing_group_size sample_packing_bin_size sample_packing_eff_est "
                    "sample_packing_seq_len_multiplier multipack_real_batches batch_flattening dpo_padding_free "
                    "total_num_tokens pretrain_multipack_attn pretrain_multipack_buffer_size max_packed_sequence_len"
                ),
                "evaluation does not change what is learned: eval.*, eval.answers.*": (
                    "evals_per_epoch eval_batch_size eval_table_size eval_max_new_tokens eval_causal_lm_metrics "
                    "do_causal_lm_eval do_bench_eval bench_dataset bench_split eval_sequence_len"
                ),
                "derived from the chat template and the tokenizer": (
                    "eot_tokens fix_untrained_tokens special_tokens.pad_token special_tokens.eos_token "
                    "special_tokens.unk_token"
                ),
                "the order of rows follows from seed": "shuffle_merged_datasets shuffle_before_merging_datasets",
                "loss_monitor": "loss_watchdog_threshold loss_watchdog_patience",
            },
        )
    ),
    machine=by_option(
        merged(
            transformers.MACHINE,
            {
                "saving: checkpoint.every, checkpoint.keep": (
                    "saves_per_epoch save_first_step auto_resume_from_checkpoints lora_on_cpu merge_method merge_lora"
                ),
                "logging: log.*": (
                    "wandb_project use_wandb use_tensorboard use_mlflow mlflow_tracking_uri mlflow_experiment_name "
                    "use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode "
                    "swanlab_workspace swanlab_log_completions swanlab_completion_log_interval "
                    "swanlab_completion_max_buffer swanlab_log_model trackio_project_name trackio_run_name "
                    "use_otel_metrics otel_metrics_host otel_metrics_port include_tkps profiler_steps "
                    "profiler_steps_start"
                ),
                "reading and its workers": (
                    "dataset_prepared_path dataset_processes skip_prepare_dataset "
                    "dataset_keep_in_memory hf_use_auth_token "
                    "push_dataset_to_hub is_preprocess num_dataset_shards_to_save sample_packing_mp_start_method"
                ),
                "how processes and memory are organised": (
                    "strict torchdistx_path gc_steps gc_collect_steps gpu_memory_limit device world_size dp_shard_size "
                    "dp_replicate_size use_ray ray_num_workers resources_per_worker experimental_skip_move_to_device "
                    "fsdp_final_state_dict_type qlora_sharded_model_loading expert_parallel_num_nvl_bytes deepcompile "
                    "layer_offloading ray_run_name"
                ),
                "the engine that generates: its memory and its processes": "vllm",
            },
        )
    ),
    lacking={
        **transformers.LACKING,
        **lacking("code of the recipe's own", "plugins"),
        **lacking(
            "parameters next to adapters, and layers by their numbers: freeze, lora.targets",
            "unfrozen_parameters "
            "freeze_mm_modules lora_layers_to_transform peft_layers_to_transform peft_layers_pattern",
        ),
        **lacking(
            "adapters start as in the LoRA paper, or by lora.init: gaussian, PiSSA, OLoRA",
            "init_weights",
            init_weights=True,
        ),
        **lacking(
            "adapters of another kind",
            "peft lora_fan_in_fan_out "
            "loraplus_lr_embedding relora relora_prune_ratio relora_cpu_offload peft_trainable_token_indices "
            "lora_rank_pattern lora_alpha_pattern peft_layer_replication",
            loraplus_lr_embedding=1e-6,
        ),
        **lacking(
            "another optimizer",
            "lisa_n_layers lisa_step_interval lisa_layers_attribute lr_groups embedding_lr "
            "embedding_lr_scale adam_epsilon2 adam_beta3",
        ),
        **lacking(
            "another schedule",
            "lr_quadratic_warmup cosine_constant_lr_ratio jagged_restart_steps "
            "jagged_restart_warmup_steps jagged_restart_anneal_steps lr_div_factor eta_min",
            cosine_constant_lr_ratio=0,
        ),
        **lacking(
            "quantised training and compression",
            "qat quantization fp8 fp8_enable_fsdp_float8_all_gather "
            "llmcompressor gptq gptq_groupsize gptq_model_v1 gptq_disable_exllama quantize_moe_experts "
            "bnb_config_kwargs model_quantization_config model_quantization_config_kwargs",
        ),
        **lacking(
            "changes to the model",
            "model_config overrides_of_model_config resize_token_embeddings_to_32x "
            "reinit_weights llama4_linearized_experts scaling_softmax scaling_softmax_factor use_pose "
            "added_tokens_overrides shrink_embeddings",
        ),
        **lacking(
            "a rejected or a weighted part of the rows",
            "curriculum_sampling sample_packing_sequentially "
            "dataset_shard_num dataset_shard_idx dataset_exact_deduplication",
        ),
        **lacking(
            "a loss of its own",
            "use_eaft eaft_alpha eaft_k diffusion ebft",
            eaft_alpha=1.0,
            eaft_k=20,
        ),
        **lacking(
            "a template of the framework's own: name a file in data.template", "chat_template_jinja"
        ),
        **lacking(
            "layers or experts split over processes, which changes no number",
            "expert_parallel_size tensor_parallel_size",
            changes=False,
            expert_parallel_size=1,
            tensor_parallel_size=1,
        ),
        **lacking(
            "special tokens in the place of the tokenizer's",
            "special_tokens special_tokens.bos_token special_tokens.additional_special_tokens",
        ),
    },
    variables=transformers.VARIABLES,
    none_is_unset=True,
)
