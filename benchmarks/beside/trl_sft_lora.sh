# Adapters, answers alone are learned.
trl sft \
    --model_name_or_path tiny \
    --dataset_name data/completions \
    --completion_only_loss true \
    --learning_rate 2.0e-4 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --max_steps 1 \
    --logging_steps 1 \
    --use_peft \
    --lora_r 32 \
    --lora_alpha 16 \
    --bf16 false \
    --use_cpu true \
    --report_to none \
    --output_dir out
