# Preference tuning with adapters.
MODEL="Qwen/Qwen2.5-0.5B-Instruct"
LORA=(
    --use_peft
    --lora_r 32   # as in the SFT run
    --lora_alpha 64
)
CUDA_VISIBLE_DEVICES=0,1 trl dpo \
    --model_name_or_path $MODEL \
    --dataset_name pairs.jsonl \
    --learning_rate=5e-6 \
    --padding_free \
    --precompute_ref_log_probs \
    --gradient-checkpointing \
    --no_bf16 \
    "${LORA[@]}" \
    --output_dir "runs/$(date +%F)"
