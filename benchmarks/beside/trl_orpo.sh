# No reference.
python examples/scripts/orpo.py \
    --dataset_name data/pairs \
    --model_name_or_path tiny \
    --per_device_train_batch_size 8 \
    --max_steps 3 \
    --learning_rate 8e-6 \
    --gradient_accumulation_steps 1 \
    --logging_steps 1 \
    --logging_first_step \
    --no_remove_unused_columns \
    --bf16 false \
    --use_cpu true \
    --report_to none \
    --output_dir out
