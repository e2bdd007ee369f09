# CPO's script with SimPO's loss.
python examples/scripts/cpo.py \
    --dataset_name data/pairs \
    --model_name_or_path tiny \
    --loss_type simpo \
    --cpo_alpha 0.0 \
    --beta 2.0 \
    --simpo_gamma 0.5 \
    --per_device_train_batch_size 8 \
    --max_steps 3 \
    --learning_rate 8e-6 \
    --gradient_accumulation_steps 1 \
    --logging_steps 1 \
    --no_remove_unused_columns \
    --bf16 false \
    --use_cpu true \
    --report_to none \
    --output_dir out
