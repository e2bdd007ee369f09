# Answers with a label; two thirds of them good.
python trl/scripts/kto.py \
    --dataset_name data/labeled \
    --model_name_or_path tiny \
    --per_device_train_batch_size 6 \
    --learning_rate 5e-7 \
    --lr_scheduler_type cosine \
    --undesirable_weight 1.5 \
    --gradient_accumulation_steps 1 \
    --logging_steps 1 \
    --max_steps 3 \
    --warmup_steps 0.1 \
    --bf16 false \
    --use_cpu true \
    --report_to none \
    --output_dir out
