"""LLaMA-Factory 0.9: the YAML file of `llamafactory-cli train`."""

from __future__ import annotations

from taut.migrate.frameworks import transformers
from taut.migrate.frameworks.swift import merged
from taut.migrate.frameworks.tables import Tables, by_option, lacking

PREFERENCES = {"beta": 0.1, "loss_type": "sigmoid"}

LLAMAFACTORY = Tables(
    title="LLaMA-Factory",
    methods={
        "pt": "sft",
        "sft": "sft",
        "reward": "reward",
        "dpo": "dpo",
        "orpo": "orpo",
        "simpo": "simpo",
        "kto": "kto",
        "ppo": "ppo",
    },
    names={
        "*": {
            "model_name_or_path": "model",
            "finetuning_type": "tuner_type",
            "cutoff_len": "max_length",
            "lora_rank": "lora_r",
            "lora_target": "target_modules",
            "additional_target": "modules_to_save",
            "adapter_name_or_path": "adapters",
            "val_size": "split_dataset_ratio",
            "pref_beta": "beta",
            "pref_loss": "loss_type",
            "pref_ftx": "rpo_alpha",
            "dpo_label_smoothing": "label_smoothing",
            "kto_chosen_weight": "desirable_weight",
            "kto_rejected_weight": "undesirable_weight",
            "default_system": "system",
            "freeze_language_model": "freeze_llm",
            "freeze_vision_tower": "freeze_vit",
            "freeze_multi_modal_projector": "freeze_aligner",
            "image_max_pixels": "max_pixels",
            "video_fps": "fps",
            "video_maxlen": "fps_max_frames",
            "add_tokens": "add_tokens",
            "add_special_tokens": "new_special_tokens",
            "quantization_bit": "quant_bits",
            "quantization_method": "quant_method",
            "quantization_type": "bnb_4bit_quant_type",
            "double_quantization": "bnb_4bit_use_double_quant",
            "disable_shuffling": "disable_shuffling",
            "ppo_epochs": "num_ppo_epochs",
            "ppo_target": "kl_target",
            "ppo_whiten_rewards": "whiten_rewards",
            "max_new_tokens": "max_completion_length",
            "moe_aux_loss_coef": "router_aux_loss_coef",
            "hf_hub_token": "hub_token",
        },
    },
    defaults={
        "*": {
            **transformers.DEFAULTS,
            "learning_rate": 5e-5,
            "tuner_type": "lora",
            "gradient_checkpointing": True,
            "max_length": 2048,
            "lora_r": 8,
            "lora_dropout": 0.0,
            "target_modules": "all",
            "split_dataset_ratio": 0.0,
            "freeze_trainable_layers": 2,
            "freeze_trainable_modules": "all",
            "freeze_llm": False,
            "freeze_vit": True,
            "freeze_aligner": True,
            "bnb_4bit_quant_type": "nf4",
            "quant_method": "bnb",
            "max_pixels": 768 * 768,
            "fps": 2.0,
            "fps_max_frames": 128,
        },
        "pt": {"packing": True},
        "dpo": PREFERENCES,
        "orpo": PREFERENCES,
        "simpo": {**PREFERENCES, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        "kto": {**PREFERENCES, "loss_type": "kto"},
        "ppo": {
            "num_ppo_epochs": 4,
            "num_mini_batches": 1,
            "max_completion_length": 1024,
            "temperature": 0.95,
            "top_p": 0.7,
            "top_k": 50,
            "kl_coef": 0.2,
            "kl_target": 6.0,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
        },
    },
    needless=by_option(
        merged(
            transformers.NEEDLESS,
            {
                "kernels: the numbers are the same": (
                    "use_unsloth use_unsloth_gc use_v1_kernels use_kv_cache infer_backend infer_dtype"
                ),
                "evaluation does not change what is learned: eval.*, eval.answers.*": (
                    "eval_on_each_dataset eval_num_beams compute_accuracy num_beams do_sample length_penalty "
                    "skip_special_tokens"
                ),
                "targets are exact": "ignore_pad_token_for_loss",
                "derived from the chat template and the tokenizer": "use_fast_tokenizer "
                "split_special_tokens resize_vocab",
                "the order of rows follows from seed": "buffer_size",
            },
        )
    ),
    machine=by_option(
        merged(
            transformers.MACHINE,
            {
                "saving: checkpoint.every, checkpoint.keep": "export_dir export_size export_device "
                "export_legacy_format",
                "logging: log.*": (
                    "plot_loss include_effective_tokens_per_second print_param_status use_swanlab swanlab_project "
                    "swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
                    "enable_torch_profiler profiler_output_dir"
                ),
                "reading and its workers": (
                    "overwrite_cache preprocessing_batch_size preprocessing_num_workers "
                    "data_shared_file_system cache_dir"
                ),
                "nothing is uploaded: taut push": "ms_hub_token om_hub_token",
                "how processes and memory are organised": (
                    "ray_num_workers ray_init_kwargs master_addr master_port offload_folder ray_run_name "
                    "ray_storage_path ray_storage_filesystem placement_strategy resources_per_worker "
                    "fsdp_transformer_layer_cls_to_wrap"
                ),
            },
        )
    ),
    lacking={
        **transformers.LACKING,
        **lacking(
            "the runs of Megatron, KTransformers and hyper-parallel",
            "use_mca use_megatron_bridge use_hyper_parallel use_kt",
            refuses=True,
        ),
        **lacking(
            "the template is the model's own: name a file in data.template if it differs",
            "",
            template="empty",
        ),
        **lacking(
            "new adapters beside old ones: merge those first (taut merge)", "create_new_adapter"
        ),
        **lacking(
            "another learning rate of matrices B",
            "loraplus_lr_embedding",
            loraplus_lr_embedding=1e-6,
        ),
        **lacking(
            "changes to the model",
            "mixture_of_depths upcast_layernorm upcast_lmhead_output shift_attn "
            "model_max_length block_diag_attn train_from_scratch",
        ),
        **lacking("a loss of its own", "asft_alpha eaft_alpha"),
        **lacking(
            "limits of a video's frames apart from those of pictures, and lower limits",
            "video_max_pixels video_min_pixels image_min_pixels image_do_pan_and_scan crop_to_patches",
            image_min_pixels=1024,
            video_min_pixels=256,
            video_max_pixels=65536,
        ),
        **lacking("sound", "use_audio_in_video audio_sampling_rate", audio_sampling_rate=16000),
        **lacking(
            "FP8 products", "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather", fp8_backend="auto"
        ),
        **lacking("data in a form of the framework's own", "tokenized_path"),
        **lacking(
            "a mixture by probabilities, ended by one source",
            "interleave_probs mix_strategy",
            mix_strategy="concat",
        ),
        **lacking(
            "an adapter as the reference or the reward model: merge it first (taut merge)",
            "ref_model_adapters ref_model_quantization_bit reward_model_adapters reward_model_quantization_bit",
        ),
        **lacking(
            "scores normalised over the buffer, and several batches in it",
            "ppo_score_norm ppo_buffer_size",
            ppo_buffer_size=1,
        ),
        **lacking("another share of BCO in the loss", "pref_bco_weight", pref_bco_weight=0),
    },
    variables=transformers.VARIABLES,
    none_is_unset=True,
)
