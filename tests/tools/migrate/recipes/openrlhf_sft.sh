set -x

read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --data.max_len 4096 \
   --data.dataset questions.jsonl \
   --data.input_key question \
   --data.output_key response \
   --train.batch_size 64 \
   --train.micro_batch_size 2 \
   --model.model_name_or_path meta-llama/Llama-3.2-1B \
   --ckpt.output_dir ./checkpoint/sft \
   --ds.zero_stage 2 \
   --ds.attn_implementation sdpa \
   --ds.packing_samples \
   --adam.lr 5e-6
EOF
    # --logger.wandb.key

if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
