# Pairs, all weights.
accelerate launch --num_processes 1 trl/scripts/dpo.py \
    --dataset_name data/pairs \
    --model_name_or_path tiny \
    --learning_rate 5.0e-7 \
    --beta 0.1 \
    --max_steps 3 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --max_length 128 \
    --logging_steps 1 \
    --bf16 false \
    --use_cpu true \
    --report_to none \
    --output_dir out
