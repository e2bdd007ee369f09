"""TRL 1.x, and open-r1, which trains with trl 0.18."""

from __future__ import annotations

from dataclasses import replace

from taut.migrate.frameworks import transformers
from taut.migrate.frameworks.tables import Tables, by_option, lacking

PREFERENCES = {"beta": 0.1, "loss_type": "sigmoid", "disable_dropout": True}
POLICY = {
    "num_generations": 8,
    "max_completion_length": 512,
    "temperature": 1.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "vllm_mode": "colocate",
    "max_length": None,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
}
TEACHER = {
    "temperature": 0.9,
    "lmbda": 0.5,
    "beta": 0.5,
    "disable_dropout": True,
}
REFERENCE = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512}

TRL = Tables(
    title="TRL",
    methods={
        "sft": "sft",
        "dpo": "dpo",
        "kto": "kto",
        "bco": "kto",
        "orpo": "orpo",
        "cpo": "cpo",
        "reward": "reward",
        "prm": "reward",
        "grpo": "grpo",
        "rloo": "grpo",
        "async_grpo": "grpo",
        "ppo": "ppo",
        "online_dpo": "online_dpo",
        "gkd": "gkd",
        "gold": "gkd",
        "distillation": "gkd",
        "nash_md": "Nash-MD",
        "xpo": "XPO",
        "tpo": "triple preference optimisation (TPO)",
        "sdft": "SDFT: taut gkd with distill.privileged is near it",
        "sdpo": "SDPO: taut gkd with distill.privileged is near it",
        "ssd": "simple self-distillation (SSD)",
        "minillm": "MiniLLM: taut gkd with distill.divergence=reverse is near it",
    },
    names={
        "*": {
            "reward_model_name_or_path": "reward_model",
            "reward_model_path": "reward_model",
            "model_name_or_path": "model",
            "teacher_model_name_or_path": "teacher_model",
            "student_model_name": "model",
            "max_new_tokens": "max_completion_length",
            "activation_checkpointing": "gradient_checkpointing",
            "lora_target_modules": "target_modules",
            "lora_modules_to_save": "modules_to_save",
        },
        "ppo": {
            "model_name_or_path": "tokenizer",
            "sft_model_path": "model",
            "response_length": "max_completion_length",
            "reward_model_path": "reward_model",
        },
        "bco": {"max_completion_length": "decoder_length"},
        "cpo": {"max_completion_length": "decoder_length"},
        "orpo": {"max_completion_length": "decoder_length"},
        "prm": {"max_completion_length": "answer_length"},
    },
    defaults={
        "*": {
            **transformers.DEFAULTS,
            "gradient_checkpointing": True,
            "learning_rate": 1e-6,
            "max_length": 1024,
            "lora_r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
        },
        "sft": {"learning_rate": 2e-5},
        "dpo": {**PREFERENCES, **REFERENCE},
        "kto": {
            **PREFERENCES,
            **REFERENCE,
            "loss_type": "kto",
            "train_sampling_strategy": "sequential",
        },
        "bco": {**PREFERENCES, "learning_rate": 5e-7, "loss_type": "bco"},
        "orpo": {"beta": 0.1, "disable_dropout": True},
        "cpo": {**PREFERENCES, "cpo_alpha": 1.0, "simpo_gamma": 0.5},
        "reward": {"learning_rate": 1e-4, "disable_dropout": True},
        "prm": {"learning_rate": 1e-5, "step_separator": "\n", "disable_dropout": True},
        "grpo": {
            **POLICY,
            "loss_type": "dapo",
            "beta": 0.0,
            "scale_rewards": "group",
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 3.0,
        },
        "rloo": {
            **POLICY,
            "num_generations": 2,
            "beta": 0.05,
            "loss_type": "rloo",
            "advantage_estimator": "rloo",
            "kl_in_reward": True,
        },
        "async_grpo": {
            **POLICY,
            "max_completion_length": 2048,
            "loss_type": "grpo",
            "beta": 0.0,
            "scale_rewards": "group",
            "max_staleness": 4,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": "http://localhost:8000",
            "lr_scheduler_type": "constant",
        },
        "ppo": {
            "learning_rate": 3e-6,
            "model": "EleutherAI/pythia-160m",
            "reward_model": "EleutherAI/pythia-160m",
            "num_mini_batches": 1,
            "num_ppo_epochs": 4,
            "max_completion_length": 53,
            "temperature": 0.7,
            "kl_coef": 0.05,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "max_length": None,
            "disable_dropout": True,
        },
        "online_dpo": {
            **PREFERENCES,
            "learning_rate": 5e-7,
            "max_completion_length": 64,
            "temperature": 0.9,
            "max_length": 512,
            "vllm_mode": "colocate",
        },
        "gkd": {**TEACHER, "learning_rate": 2e-5, "max_completion_length": 128},
        "gold": {
            **TEACHER,
            "learning_rate": 1e-7,
            "max_completion_length": 128,
            "top_p": 0.95,
            "vllm_mode": "colocate",
        },
        "distillation": {
            **TEACHER,
            "learning_rate": 1e-6,
            "max_completion_length": 512,
            "temperature": 1.0,
            "beta": 1.0,
            "lmbda": 1.0,
            "top_p": 0.95,
            "vllm_mode": "colocate",
        },
    },
    needless=by_option(
        transformers.NEEDLESS,
        {
            "the reward model's scores need no head of another type": "is_encoder_decoder padding_value",
            "only the tokenizer is read of it, which is the policy's": "tokenizer",
            "for models with an encoder alone; data.max_length is that of prompt and answer": "decoder_length",
            "a weight of 0 or 1 of what is off": "ignore_bias_buffers cast_lm_head_to_fp32",
            "prefixes are shared where it saves anything": "fork_threshold_tokens",
        },
    ),
    machine=by_option(
        transformers.MACHINE,
        {
            "open-r1 pushes revisions: taut push": (
                "hub_model_revision push_to_hub_revision overwrite_hub_revision"
            ),
            "where programs run: options.remote of the reward code": (
                "code_provider parallel_code_exec_per_proc code_eval_test_batch_size e2b_router_url "
                "morph_router_url piston_endpoint ioi_provider"
            ),
        },
    ),
    lacking={
        **transformers.LACKING,
        **lacking("code of the recipe's own", "tools"),
        **lacking("learn only the last step's label", "train_on_last_step_only"),
        **lacking(
            "answers cut to a length of their own: data.max_length is that of both",
            "answer_length",
        ),
        **lacking("advantages normalised over the batch as well", "normalize_advantages"),
        **lacking("the split of the data that is held out", "test_split_size"),
    },
    variables=transformers.VARIABLES,
)

OPEN_R1 = replace(
    TRL,
    title="open-r1",
    defaults={
        **TRL.defaults,
        "*": {**TRL.defaults["*"], "gradient_checkpointing": False},
        "grpo": {
            **POLICY,
            "max_completion_length": 256,
            "loss_type": "bnpo",
            "beta": 0.04,
            "scale_rewards": True,
            "vllm_mode": "server",
            "max_prompt_length": 512,
            "temperature": 1.0,
            "reward_funcs": ["accuracy", "format", "tag_count"],
            "dataset_prompt_column": "prompt",
        },
    },
    lacking={
        **TRL.lacking,
        **lacking(
            "filtering data is another program of open-r1: taut data filter",
            "pass_rate_min pass_rate_max",
            refuses=True,
        ),
        **lacking(
            "the settings of code and length rewards of open-r1",
            "cosine_min_value_wrong cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct "
            "cosine_max_len repetition_n_grams repetition_max_penalty code_language "
            "code_eval_scoring_mode max_completion_len "
            "soft_punish_cache",
        ),
    },
)
