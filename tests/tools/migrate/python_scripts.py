"""Python scripts in the manner of the documentation of trl, peft and transformers, by name."""

from __future__ import annotations

SFT = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
training_args = SFTConfig(
    output_dir="Qwen2.5-0.5B-SFT",
    max_length=512 * 4,
    packing=True,
    assistant_only_loss=True,
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""

QLORA = '''\
"""Fine-tune Llama 3.1 8B in 4 bits."""
import os

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL_ID = "meta-llama/Llama-3.1-8B"
RUNS = "runs"
RANK = 16

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
)
model = AutoModelForCausalLM.from_pretrained(
    MODEL_ID,
    quantization_config=bnb_config,
    device_map="auto",
    torch_dtype=torch.bfloat16,
    attn_implementation="flash_attention_2",
)
model.config.use_cache = False
model = prepare_model_for_kbit_training(model)
tokenizer = AutoTokenizer.from_pretrained(MODEL_ID)
tokenizer.pad_token = tokenizer.eos_token
tokenizer.padding_side = "right"

splits = load_dataset("HuggingFaceH4/no_robots").shuffle(seed=42)
common = dict(bf16=True, gradient_checkpointing=True, report_to="none")
args = SFTConfig(
    output_dir=os.path.join(RUNS, f"llama-r{RANK}"),
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    warmup_ratio=0.03,
    eval_strategy="steps",
    eval_steps=50,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    **common,
)
peft_config = LoraConfig(
    r=RANK,
    lora_alpha=RANK * 2,
    lora_dropout=0.05,
    bias="none",
    task_type=TaskType.CAUSAL_LM,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=splits["train"],
    eval_dataset=splits["test"],
    processing_class=tokenizer,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model()
'''

DPO = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct", dtype="float32")
ref_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-1.5B-Instruct")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
dataset = load_dataset("trl-lib/ultrafeedback_binarized")
dataset = dataset["train"].train_test_split(test_size=0.1, seed=1)

training_args = DPOConfig(output_dir="Qwen2-0.5B-DPO", beta=0.05, loss_type="ipo", max_length=None)
training_args.learning_rate = 5e-7
trainer = DPOTrainer(
    model,
    ref_model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    processing_class=tokenizer,
)
trainer.train()
"""

GRPO = '''\
import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward


def accuracy(completions, answer, **kwargs):
    """1 where the answer stands in the completion."""
    return [float(one in c[0]["content"]) for c, one in zip(completions, answer)]


def main():
    args = GRPOConfig(
        output_dir="grpo",
        learning_rate=1e-6,
        num_generations=8,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_completion_length=1024,
        temperature=0.9,
        beta=0.01,
        reward_weights=[1.0, 0.2],
        use_vllm=False,
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-1.5B-Instruct",
        args=args,
        reward_funcs=[accuracy, think_format_reward],
        train_dataset=load_dataset("openai/gsm8k", "main", split="train[:1000]"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''

REWARD = """\
import trl
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

name = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id
trainer = trl.RewardTrainer(
    model=model,
    args=trl.RewardConfig(
        output_dir="reward", center_rewards_coefficient=1e-2, max_length=2048, learning_rate=1.0e-5
    ),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    processing_class=tokenizer,
)
trainer.train()
"""

TRAINER = """\
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

checkpoint = "distilbert/distilgpt2"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
tokenizer.pad_token = tokenizer.eos_token
eli5 = load_dataset("dany0407/eli5_category", split="train[:5000]")
eli5 = eli5.train_test_split(test_size=0.2)


def preprocess(examples):
    return tokenizer([" ".join(x) for x in examples["answers.text"]])


tokenized = eli5.map(preprocess, batched=True, num_proc=4)
data_collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
model = AutoModelForCausalLM.from_pretrained(checkpoint)
training_args = TrainingArguments(
    output_dir="my_awesome_eli5_clm-model",
    eval_strategy="epoch",
    learning_rate=2e-5,
    weight_decay=0.01,
    push_to_hub=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=tokenized["train"],
    eval_dataset=tokenized["test"],
    data_collator=data_collator,
    tokenizer=tokenizer,
)
trainer.train()
"""

ARGPARSE = """\
import argparse

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model_name", type=str, default="HuggingFaceTB/SmolLM2-135M")
parser.add_argument("--lr", "--learning-rate", type=float, default=3e-4)
parser.add_argument("--max_steps", type=int, default=-1, help="all")
parser.add_argument("--no-lora", action="store_true")
parser.add_argument("--out", required=True)


args = parser.parse_args()
config = SFTConfig(
    output_dir=args.out, learning_rate=args.learning_rate, max_steps=args.max_steps, dataset_text_field="text"
)
trainer = SFTTrainer(args.model_name, config, train_dataset=load_dataset("stanfordnlp/imdb", split="train"))
trainer.train()
"""

PARSER = """\
from dataclasses import dataclass, field
from typing import Optional

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import KTOConfig, KTOTrainer, ModelConfig, get_peft_config


@dataclass
class ScriptArguments:
    dataset_name: str = field(default="trl-lib/kto-mix-14k", metadata={"help": "rows"})
    beta: Optional[float] = 0.2


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, KTOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    training_args = KTOConfig(output_dir="kto", beta=script_args.beta, desirable_weight=1.5)
    trainer = KTOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name)["train"],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
"""

COMPUTED = """\
import os
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

world = int(os.environ.get("WORLD_SIZE", 1))
batch = 64
lr = 1e-5
if torch.cuda.is_available():
    batch = 128
else:
    lr = 1e-4
for seed in (1, 2):
    config = SFTConfig(
        output_dir=f"out-{seed}",
        seed=seed,
        learning_rate=lr,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=64 // world,
        max_grad_norm=float("0.5"),
        warmup_steps=sum([1, 2]),
        bf16=torch.cuda.is_bf16_supported(),
    )
    rows = load_dataset("trl-lib/Capybara", split="train").filter(lambda row: len(row["messages"]) > 2)
    SFTTrainer("Qwen/Qwen3-0.6B", args=config, train_dataset=rows).train()
"""

UNSLOTH = """\
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig

max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B-Instruct", max_seq_length=max_seq_length, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model, r=16, lora_alpha=32, lora_dropout=0, bias="none", use_gradient_checkpointing="unsloth"
)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=load_dataset("json", data_files={"train": "rows.jsonl"}, split="train"),
    args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=60),
)
trainer.train()
"""
