"""ms-swift 4.6: `swift sft | pt | rlhf` with transformers, and `megatron sft | pt | rlhf` with Megatron-Core."""

from __future__ import annotations

from taut.migrate.frameworks import transformers
from taut.migrate.frameworks.tables import Lacking, Tables, by_option, lacking

METHODS = {
    "sft": "sft",
    "pt": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "cpo": "cpo",
    "simpo": "simpo",
    "reward": "reward",
    "ppo": "ppo",
    "grpo": "grpo",
    "gkd": "gkd",
}
COMMON = {
    "loss_scale": "default",
    "lora_r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": "all-linear",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "split_dataset_ratio": 0.0,
    "freeze_llm": False,
    "freeze_vit": True,
    "freeze_aligner": True,
    "truncation_strategy": "delete",
}
RLHF = {"loss_scale": "last_round", "beta": 0.1, "disable_dropout": True}
BY_METHOD = {
    "pt": {"loss_scale": "all", "use_chat_template": False},
    "dpo": {**RLHF, "loss_type": "sigmoid"},
    "kto": {**RLHF, "loss_type": "kto"},
    "orpo": {**RLHF, "loss_scale": "default"},
    "cpo": {**RLHF, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 1.0},
    "simpo": {**RLHF, "loss_type": "simpo", "beta": 2.0, "cpo_alpha": 1.0, "simpo_gamma": 1.0},
    "reward": RLHF,
    "ppo": {
        **RLHF,
        "max_completion_length": 512,
        "temperature": 0.9,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "kl_coef": 0.05,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "gamma": 1.0,
        "lam": 0.95,
    },
    "grpo": {
        "loss_type": "grpo",
        "loss_scale": "last_round",
        "beta": 0.04,
        "num_generations": 8,
        "max_completion_length": 512,
        "temperature": 0.9,
        "num_iterations": 1,
        "epsilon": 0.2,
        "gradient_accumulation_steps": 1,
        "advantage_estimator": "grpo",
        "importance_sampling_level": "token",
        "rollout_importance_sampling_threshold": 2.0,
        "max_resample_times": 3,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "teacher_kl_coef": 1.0,
        "truncation_strategy": "left",
    },
    "gkd": {
        **RLHF,
        "beta": 0.5,
        "lmbda": 0.5,
        "max_completion_length": 512,
        "temperature": 0.9,
    },
}
NAMES = {
    "lora_rank": "lora_r",
    "lorap_lr_ratio": "loraplus_lr_ratio",
    "sapo_temperature_pos": "tau_pos",
    "sapo_temperature_neg": "tau_neg",
    "overlong_filter": "mask_truncated_completions",
    "train_type": "tuner_type",
    "model_id_or_path": "model",
    "max_new_tokens": "max_completion_length",
    "response_length": "max_completion_length",
}
OTHER_KINDS: dict[str, Lacking] = {
    **lacking(
        "options of classifiers, embedding models and rerankers",
        "num_labels problem_type mrl_dims",
    ),
    **lacking(
        "adapters start as in the LoRA paper, or by lora.init: gaussian, PiSSA, OLoRA",
        "init_weights lora_ga_batch_size lora_ga_iters "
        "lora_ga_max_length lora_ga_direction lora_ga_scale lora_ga_stable_gamma",
        init_weights=(True, "lora"),
    ),
    **lacking(
        "the adapters of taut have no biases, and float32 weights",
        "lora_bias lora_dtype",
        lora_dtype="float32",
    ),
    **lacking(
        "taut has no backend of adapters besides peft", "tuner_backend", tuner_backend="peft"
    ),
    **lacking(
        "freeze takes the library's names of parameters, not Megatron's, nor those next to adapters",
        "freeze_parameters freeze_parameters_regex freeze_parameters_ratio "
        "trainable_parameters trainable_parameters_regex",
        freeze_parameters_ratio=0,
    ),
    **lacking(
        "rows go through the model's own chat template",
        "template use_chat_template template_backend norm_bbox",
        template_backend=("swift", "jinja"),
        use_chat_template=True,
    ),
    **lacking(
        "an empty thought is not put before answers",
        "add_non_thinking_prefix",
    ),
    **lacking("a mixture of streams: weight of each source", "interleave_prob stopping_strategy"),
    **lacking(
        "data in a form of the framework's own",
        "cached_dataset cached_val_dataset custom_dataset_info disable_auto_column_mapping load_data_args",
    ),
    **lacking(
        "other programs score the run",
        "eval_use_evalscope eval_dataset eval_dataset_args eval_limit "
        "extra_eval_args eval_generation_config",
        changes=False,
    ),
    **lacking("a part of the model in another state at the start", "init_strategy"),
    **lacking(
        "a checkpoint of the framework's cannot be read: name its weights as the model",
        "resume_from_checkpoint resume_only_model",
    ),
    **lacking(
        "losses of a class of their own: grpo.loss=FILE.py:Class",
        "chord_sft_dataset "
        "chord_sft_per_device_train_batch_size chord_enable_phi_function chord_mu_warmup_steps "
        "chord_mu_decay_steps chord_mu_peak chord_mu_valley real_tau fipo_decay_rate fipo_clip_range "
        "fipo_clip_high_only fipo_safety_threshold advantage_reweight rlsd_lambda rlsd_reweight_clip_range "
        "rlsd_lambda_warmup_steps rlsd_lambda_decay_steps rlsd_negative_only sdar_loss_coef sdar_gate_beta",
    ),
    **lacking(
        "a part of the rows has another teacher: distill.teachers",
        "teacher_tag_key",
        teacher_tag_key="dataset",
    ),
    **lacking(
        "the limit of an answer is that of a turn",
        "completion_length_limit_scope",
        completion_length_limit_scope="per_round",
    ),
    **lacking(
        "an adapter as the reference, or on a reward model or a teacher: merge it first (taut merge)",
        "ref_adapters reward_adapters teacher_adapters",
    ),
}

VARIABLES_ELSEWHERE = {
    name: why
    for why, names in {
        "lower limits of frames apart from those of pictures, and a limit of whole videos": (
            "VIDEO_MIN_PIXELS VIDEO_TOTAL_PIXELS FPS_MIN_FRAMES VIDEO_MIN_TOKEN_NUM NFRAMES"
        ),
        "sound, and pictures that are generated": "ENABLE_AUDIO_OUTPUT SPEAKER_NAME USE_AUDIO_IN_VIDEO image_area",
        "options of classifiers, embedding models and rerankers": (
            "INFONCE_TEMPERATURE INFONCE_MASK_FAKE_NEGATIVE INFONCE_INCLUDE_QQ INFONCE_INCLUDE_DD "
            "MAX_NEGATIVE_SAMPLES INFONCE_HARD_NEGATIVES GENERATIVE_RERANKER_POSITIVE_TOKEN "
            "GENERATIVE_RERANKER_NEGATIVE_TOKEN LISTWISE_RERANKER_TEMPERATURE"
        ),
        "changes to the model's configuration": "max_position_embeddings",
    }.items()
    for name in names.split()
}
NEEDLESS = {
    "read from config.json": "ref_model_type reward_model_type teacher_model_type",
    "a table of settings that the run itself fills": "load_args ignore_args_error check_model strict",
    "evaluation does not change what is learned: eval.*, eval.answers.*": (
        "val_dataset_shuffle acc_strategy num_beams stream logprobs top_logprobs eval_iters"
    ),
    "each micro-batch is as large as batch.tokens_per_microbatch allows": "micro_batch_size",
}
MACHINE = {
    "saving: checkpoint.every, checkpoint.keep": (
        "add_version create_checkpoint_symlink use_flash_ckpt no_save_optim no_save_rng async_save finetune "
        "no_load_optim no_load_rng merge_lora save_missing_weights use_persistent_ckpt_worker "
        "dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
        "exist_ok mcore_adapter_save"
    ),
    "logging: log.*": (
        "swanlab_token swanlab_project swanlab_workspace swanlab_exp_name swanlab_mode swanlab_notification_method "
        "swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email swanlab_smtp_server "
        "swanlab_smtp_port swanlab_email_language enable_channel_loss wandb_project wandb_exp_name tensorboard_dir "
        "tensorboard_queue_size log_entropy log_rollout_offpolicy_metrics"
    ),
    "reading and its workers": "lazy_tokenize download_mode local_repo_path use_hf data_sharding",
    "how processes and memory are organised": (
        "use_ray ray_exp_name device_groups zero_hpz_partition_size enable_npu_model_patch teacher_deepspeed gpus "
        "colocate_groups"
    ),
}


def merged(*tables: dict[str, str]) -> dict[str, str]:
    """Tables of reason -> options; the options of one reason are put together."""
    reasons: dict[str, str] = {}
    for table in tables:
        for reason, names in table.items():
            reasons[reason] = " ".join(dict.fromkeys(f"{reasons.get(reason, '')} {names}".split()))
    return reasons


SWIFT = Tables(
    title="ms-swift",
    methods=METHODS,
    names={"*": NAMES, "sft": {"max_new_tokens": "max_new_tokens"}},
    defaults={
        "*": {
            **transformers.DEFAULTS,
            **COMMON,
            "tuner_type": "lora",
            "lr_scheduler_type": "cosine",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": None,
            "gradient_checkpointing": True,
            "learning_rate": None,
        },
        **BY_METHOD,
    },
    needless=by_option(
        merged(
            transformers.NEEDLESS,
            NEEDLESS,
        )
    ),
    machine=by_option(merged(transformers.MACHINE, MACHINE)),
    lacking={
        **transformers.LACKING,
        **OTHER_KINDS,
        **lacking(
            "layers split over processes, which changes no number",
            "",
            changes=False,
            deepspeed_autotp_size=1,
        ),
        **lacking(
            "options of another optimizer",
            "galore_rank galore_scale galore_optim_per_parameter "
            "galore_quantization galore_target_modules galore_update_proj_gap galore_proj_type galore_with_embedding "
            "galore_proj_quant galore_proj_bits lisa_step_interval",
        ),
    },
    variables=transformers.VARIABLES,
    variables_elsewhere=VARIABLES_ELSEWHERE,
    none_is_unset=True,
)

MEGATRON = Tables(
    title="Megatron-SWIFT",
    methods=METHODS,
    names={
        "*": {
            **NAMES,
            "mcore_model": "model",
            "mcore_adapter": "adapters",
            "mcore_ref_model": "ref_model",
            "mcore_ref_adapter": "ref_adapters",
            "lr": "learning_rate",
            "lr_decay_style": "lr_scheduler_type",
            "lr_warmup_fraction": "warmup_ratio",
            "lr_warmup_iters": "warmup_steps",
            "train_iters": "max_steps",
            "clip_grad": "max_grad_norm",
            "adam_eps": "adam_epsilon",
            "moe_aux_loss_coeff": "router_aux_loss_coef",
            "optimizer_cpu_offload": "cpu_offload",
            "recompute_granularity": "gradient_checkpointing",
        },
        "sft": {"max_new_tokens": "max_new_tokens"},
    },
    defaults={
        "*": {
            **COMMON,
            "tuner_type": "full",
            "lr_scheduler_type": "cosine",
            "min_lr": 0.0,
            "global_batch_size": 16,
            "gradient_checkpointing": "selective",
            "learning_rate": None,
            "num_train_epochs": None,
        },
        **{
            method: {
                name: value
                for name, value in {**values, "disable_dropout": False}.items()
                if name != "gradient_accumulation_steps"
            }
            for method, values in BY_METHOD.items()
            if method != "pt"
        },
        "pt": BY_METHOD["pt"],
    },
    needless=by_option(
        merged(
            transformers.NEEDLESS,
            NEEDLESS,
            {
                "attention is chosen by what the hardware has": "attention_backend vit_attn_impl "
                "attention_softmax_in_fp32",
                "kernels: the numbers are the same": (
                    "masked_softmax_fusion bias_dropout_fusion bias_activation_fusion apply_rope_fusion "
                    "gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl moe_grouped_gemm "
                    "moe_permute_fusion moe_shared_expert_overlap moe_token_dispatcher_type moe_enable_deepep "
                    "apply_dsa_kernel_fusion use_fused_mhc apply_query_key_layer_scaling te_rng_tracker "
                    "linear_decoupled_in_proj mlp_padding_free"
                ),
                "layers are recomputed whole": (
                    "recompute_method recompute_num_layers recompute_modules moe_layer_recompute "
                    "mhc_recompute_layer_num "
                    "vit_gradient_checkpointing_kwargs"
                ),
                "gradients are added up in float32": (
                    "accumulate_allreduce_grads_in_fp32 main_grads_dtype main_params_dtype calculate_per_token_loss"
                ),
                "routers compute in float32": "moe_router_dtype",
            },
        )
    ),
    machine=by_option(
        merged(
            transformers.MACHINE,
            MACHINE,
            {
                "how processes and memory are organised": (
                    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel "
                    "expert_model_parallel_size expert_tensor_parallel_size virtual_pipeline_model_parallel_size "
                    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
                    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split overlap_p2p_comm "
                    "batch_p2p_comm align_param_gather cp_comm_type cp_partition_mode sequence_packing_scheduler "
                    "tp_comm_overlap overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step "
                    "align_grad_reduce nccl_comm_warmup microbatch_group_size_per_vp_stage use_distributed_optimizer "
                    "use_megatron_fsdp data_parallel_sharding_strategy optimizer_offload_fraction optimizer_cuda_graph "
                    "use_precision_aware_optimizer manual_gc manual_gc_steps manual_gc_eval data_parallel_random_init "
                    "perform_initialization use_cpu_initialization skip_megatron_init bridge_backend"
                ),
            },
        )
    ),
    lacking={
        **{
            name: entry
            for name, entry in transformers.LACKING.items()
            if name != "context_parallel_size"
        },
        **OTHER_KINDS,
        **lacking(
            "the router's auxiliary losses of mixtures of experts",
            "moe_z_loss_coeff "
            "moe_router_load_balancing_type dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
            moe_router_load_balancing_type=("aux_loss", "global_aux_loss"),
        ),
        **lacking(
            "experts with a limited number of tokens",
            "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy",
            moe_token_drop_policy="probs",
        ),
        **lacking(
            "heads that predict further tokens",
            "mtp_num_layers mtp_loss_scaling_factor mtp_decoder_input_detach mtp_shared_weights",
        ),
        **lacking(
            "FP8 and FP4 products",
            "fp8_format fp8_recipe fp8_param_gather fp8_amax_history_len "
            "fp8_amax_compute_algo fp4_format fp4_recipe fp4_param_gather",
        ),
        **lacking(
            "options of another optimizer",
            "sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov "
            "muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode "
            "muon_extra_scale_factor muon_scalar_optimizer",
        ),
        **lacking(
            "another schedule of the rate or of the weight decay",
            "lr_warmup_init lr_decay_iters "
            "lr_wsd_decay_style lr_wsd_decay_iters weight_decay_incr_style start_weight_decay end_weight_decay "
            "apply_wd_to_qk_layernorm",
            lr_warmup_init=0,
            weight_decay_incr_style="constant",
        ),
        **lacking(
            "changes to the model's configuration",
            "megatron_extra_kwargs language_model_only csa_dense_mode",
        ),
        **lacking(
            "routing replayed from the engine", "router_replay_mode", router_replay_mode="disabled"
        ),
    },
    variables=transformers.VARIABLES,
    variables_elsewhere=VARIABLES_ELSEWHERE,
    none_is_unset=True,
)
