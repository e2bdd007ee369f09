deepspeed --module openrlhf.cli.train_sft \
   --pretrain meta-llama/Meta-Llama-3-8B \
   --dataset Open-Orca/OpenOrca \
   --input_key question --output_key response \
   --max_len 2048 --train_batch_size 256 --micro_train_batch_size 2 \
   --learning_rate 5e-6 --zero_stage 2 --bf16 --flash_attn --packing_samples
