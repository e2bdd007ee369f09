"""Options of transformers' TrainingArguments, of accelerate and of vLLM, which most frameworks take."""

from __future__ import annotations

from taut.migrate.frameworks.tables import Lacking, lacking, words

DEFAULTS = {
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "seed": 42,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
}

NEEDLESS = {
    "nothing is padded, and lengths need no grouping": (
        "padding_free pad_to_multiple_of padding_side group_by_length length_column_name pad_to_sequence_len "
        "eval_packing eval_sample_packing packing_num_proc"
    ),
    "attention is chosen by what the hardware has": (
        "attn_implementation attn_impl use_cache flash_attn flash_attention sdp_attention xformers_attention"
    ),
    "dtype: bfloat16 compute over float32 weights where the hardware has it": (
        "dtype torch_dtype bf16 fp16 tf32 mixed_precision bf16_full_eval fp16_full_eval bfloat16 float16 pure_bf16"
    ),
    "the head is computed in chunks in any case": (
        "use_liger_kernel liger_kernel_config use_logits_to_keep use_liger_loss enable_liger_kernel use_liger"
    ),
    "derived from the chat template and the tokenizer": "eos_token pad_token stop_token stop_token_id stop_words",
    "read from config.json": "model_type lora_task_type experts_impl experts_implementation",
    "the columns that are read are named by data.columns": "remove_unused_columns label_names include_for_metrics",
    "layers are recomputed without reentrance, which has the same gradients": (
        "gradient_checkpointing_kwargs vit_gradient_checkpointing use_reentrant_gc activation_checkpointing_kwargs"
    ),
    "evaluation does not change what is learned: eval.*, eval.answers.*": (
        "per_device_eval_batch_size do_eval do_predict do_train eval_accumulation_steps eval_delay eval_on_start "
        "eval_do_concat_batches eval_use_gather_object eval_metric metric_for_best_model greater_is_better "
        "predict_with_generate prediction_loss_only batch_eval_metrics include_inputs_for_metrics eval_steps "
        "eval_strategy evaluation_strategy num_generations_eval generate_during_eval num_sample_generations"
    ),
    "rows are shuffled whole, where a stream is shuffled in a buffer": (
        "streaming dataset_streaming shuffle_buffer_size streaming_multipack_buffer_size"
    ),
    "every token of a step counts the same, on all processes": "average_tokens_across_devices",
    "the order of rows follows from seed": "shuffle_dataset dataset_shuffle data_seed train_dataloader_shuffle",
    "the group's rows are computed together, whatever the batch of a forward": (
        "precompute_ref_batch_size local_rollout_forward_batch_size token_budget prompt_sample_size"
    ),
}

MACHINE = {
    "saving: checkpoint.every, checkpoint.keep": (
        "save_steps save_strategy save_total_limit save_only_model save_on_each_node save_safetensors "
        "safe_serialization max_shard_size overwrite_output_dir enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint ignore_data_skip"
    ),
    "logging: log.*": (
        "report_to run_name project logging_steps logging_strategy logging_first_step logging_dir "
        "logging_nan_inf_filter log_level log_level_replica log_on_each_node disable_tqdm debug "
        "include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics trackio_space_id "
        "trackio_bucket_id trackio_static_space_id wandb_entity wandb_project wandb_run_group wandb_name "
        "wandb_log_unique_prompts log_completions num_completions_to_print log_unique_prompts log_multimodal "
        "log_completions_hub_repo log_completions_steps wandb_run_id wandb_watch wandb_log_model"
    ),
    "nothing is uploaded: taut push": (
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token"
    ),
    "reading and its workers": (
        "dataset_num_proc dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last "
        "accelerator_config load_from_cache_file split_batches dispatch_batches"
    ),
    "how processes and memory are organised": (
        "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "local_rank fsdp_config full_determinism use_cpu torch_empty_cache_steps num_machines num_processes "
        "accelerate_config config_file device_map max_memory ds3_gather_for_generation ddp auto_find_batch_size "
        "low_cpu_mem_usage fsdp_version"
    ),
    "the engine that generates: its memory and its processes": (
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_pipeline_parallel_size vllm_max_model_len "
        "vllm_max_model_length vllm_max_num_seqs vllm_enforce_eager vllm_enable_prefix_caching vllm_engine_kwargs "
        "vllm_disable_custom_all_reduce vllm_disable_cascade_attn vllm_enable_sleep_mode vllm_server_timeout "
        "vllm_group_port vllm_server_group_port vllm_data_parallel_size vllm_enable_lora vllm_max_lora_rank "
        "vllm_use_async_engine vllm_model_impl vllm_limit_mm_per_prompt vllm_mm_processor_cache_gb "
        "vllm_enable_expert_parallel vllm_reasoning_parser vllm_server_pass_dataset vllm_sync_frequency vllm_device "
        "vllm_dtype sleep_level move_model_batches offload_optimizer offload_model offload_teacher_model "
        "offload_bridge enable_flattened_weight_sync request_timeout max_inflight_tasks queue_maxsize "
        "weight_sync_steps heartbeat_stale_after_s use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config cache_implementation"
    ),
}

LACKING: dict[str, Lacking] = {
    **lacking(
        "layers are compiled by inductor, in its usual mode",
        "",
        changes=False,
        torch_compile_backend="inductor",
        torch_compile_mode="default",
    ),
    **lacking("options of another optimizer", "optim_args optim_target_modules"),
    **lacking(
        "a quantised model without adapters, or in another format than nf4 and int8 of bitsandbytes",
        "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        bnb_4bit_quant_type="nf4",
    ),
    **lacking(
        "the adapters of taut are on linear modules", "lora_target_parameters target_parameters"
    ),
    **lacking("a part of a data set's files", "data_dir data_files dataset_kwargs"),
    **lacking(
        "training does not stop early, and the last model is kept: eval.best keeps the best one too",
        "load_best_model_at_end early_stopping_patience early_stop_interval early_stopping_steps",
    ),
    **lacking(
        "sequence or context parallelism, which changes no number",
        "sequence_parallel_size context_parallel_size parallelism_config",
        changes=False,
        sequence_parallel_size=1,
        context_parallel_size=1,
    ),
    **lacking(
        "changes to the model's configuration",
        "model_init_kwargs rope_scaling max_model_len model_kwargs",
    ),
    **lacking(
        "a checkpoint of the framework's cannot be read: resume=true continues taut's own",
        "resume_from_checkpoint",
    ),
    **lacking("label smoothing", "label_smoothing_factor", label_smoothing_factor=0),
    **lacking(
        "tokens are sampled from the whole distribution: the ratios would be biased",
        "top_p top_k min_p repetition_penalty generation_kwargs structured_outputs_regex vllm_structured_outputs_regex",
        top_p=1,
        top_k=(0, -1),
        min_p=0,
        repetition_penalty=1,
    ),
    **lacking(
        "a part of the tokens, or of the answers, chosen by entropy or by divergence",
        "top_entropy_quantile off_policy_mask_threshold off_policy_sequence_mask_delta use_bias_correction_kl ld_alpha "
        "use_weighting",
        top_entropy_quantile=1,
    ),
    **lacking(
        "the prompt's beginning is not cut: longer ones are dropped by data.max_length",
        "max_prompt_length",
    ),
    **lacking(
        "code of the recipe's own: rewards, environments and losses are FILE.py:NAME in taut, of another signature",
        "external_plugins custom_register_path callbacks multi_turn_scheduler gym_env use_gym_env reward_model_plugin "
        "environment_factory rollout_func trainer_cls",
    ),
    **lacking(
        "turns of an environment: rollout.environment", "max_turns max_tool_calling_iterations"
    ),
    **lacking("the beginning of another template", "response_prefix preserve_thinking"),
    **lacking("a template of the framework's own", "agent_template tool_format template_backend"),
    **lacking(
        "teachers whose answers are learned, or with another tokenizer",
        "seq_kd use_uld_loss teacher_tokenizer_name_or_path",
    ),
    **lacking(
        "other programs score the run",
        "eval_use_evalscope eval_dataset_args benchmarks",
        changes=False,
    ),
}

VARIABLES = words(
    "*_API_KEY ACCELERATE_* CPU_AFFINITY_* CUDA_* GLOO_* HCCL_* HF_* HSA_* LD_* MKL_* MODELSCOPE_* NCCL_* NPU_* "
    "NPROC_PER_NODE NNODES NODE_RANK MASTER_* OMP_* PATH PYTHON* PYTORCH_* RAY_* SWANLAB_* "
    "TASK_QUEUE_* TENSORBOARD_* TOKENIZERS_* TORCH* TRANSFORMERS_* TRITON_* USE_HF WANDB_* "
    "TRACKIO_* ASCEND_* VLLM_* UCX_* FI_* IB_* GPUS_PER_NODE WORLD_SIZE RANK LOCAL_RANK LOGLEVEL "
    "HYDRA_* SLURM_* DS_* FSDP_* NVTE_* MULTI_STREAM_* COMBINED_ENABLE TE_* MEGATRON_LM_PATH "
    "LOCAL_WORLD_SIZE TMPDIR HOME LANG LC_* http_proxy https_proxy no_proxy TF_CPP_* TZ USE_MCORE_GDN "
    "CELOSS_PARALLEL_SIZE"
)
