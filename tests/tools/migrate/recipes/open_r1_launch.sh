#!/bin/bash
# One node of eight GPUs.
set -e
export WANDB_PROJECT=traces
CONFIG=open_r1_sft.yaml
ACCELERATOR=zero3

ACCELERATE_LOG_LEVEL=info accelerate launch \
    --config_file recipes/accelerate_configs/$ACCELERATOR.yaml \
    --num_processes $NUM_GPUS \
    src/open_r1/sft.py --config $CONFIG \
    --packing false \
    --eos_token '<|im_end|>' \
    --seed "${SEED:-42}" \
    --output_dir $RUN_DIR 2>&1 | tee train.log
