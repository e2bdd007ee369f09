# Adapters.
CUDA_VISIBLE_DEVICES= \
swift sft \
    --model LLM-Research/Meta-Llama-3-8B-Instruct \
    --tuner_type lora \
    --dataset data/messages/train.jsonl \
    --torch_dtype float32 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --gradient_accumulation_steps 8 \
    --max_steps 1 \
    --logging_steps 1 \
    --max_length 128 \
    --output_dir out \
    --system 'You are a helpful assistant.' \
    --warmup_ratio 0.05 \
    --dataset_num_proc 1 \
    --dataloader_num_workers 0
