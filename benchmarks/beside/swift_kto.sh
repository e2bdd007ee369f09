nproc_per_node=1

swift rlhf \
    --rlhf_type kto \
    --model LLM-Research/Meta-Llama-3-8B-Instruct \
    --tuner_type full \
    --dataset data/labels.jsonl \
    --load_from_cache_file false \
    --torch_dtype float32 \
    --num_train_epochs 1 \
    --max_steps 3 \
    --per_device_train_batch_size 6 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 1 / $nproc_per_node) \
    --logging_steps 1 \
    --max_length 128 \
    --output_dir out \
    --warmup_ratio 0.05 \
    --dataset_num_proc 1
