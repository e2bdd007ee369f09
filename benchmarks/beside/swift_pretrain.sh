# All weights, documents.
swift pt \
    --model LLM-Research/Meta-Llama-3-8B-Instruct \
    --tuner_type full \
    --dataset data/texts/train.jsonl \
    --torch_dtype float32 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 1 \
    --learning_rate 1e-5 \
    --max_steps 3 \
    --logging_steps 1 \
    --max_length 128 \
    --output_dir out \
    --warmup_ratio 0.05
