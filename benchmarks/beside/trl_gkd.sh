# Distillation on the answers of the data.
python examples/scripts/gkd.py \
    --model_name_or_path tiny \
    --teacher_model_name_or_path teacher \
    --dataset_name data/messages \
    --lmbda 0.0 \
    --beta 0.5 \
    --learning_rate 2e-5 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 1 \
    --max_steps 3 \
    --logging_steps 1 \
    --bf16 false \
    --use_cpu true \
    --report_to none \
    --output_dir out
