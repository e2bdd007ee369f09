"""TRL's SFTTrainer on one file: ``python bad_files_trl.py MODEL FILE MAX_LENGTH``, in TRL's own environment.

Prints one line: how many rows it trained on, how many of them have an end among their targets, and line 41 as the
trainer has it, decoded.
"""

from __future__ import annotations

import sys
import tempfile

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    model, path, max_length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=2,
        max_length=max_length,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=load_dataset("json", data_files=path, split="train"),
        processing_class=tokenizer,
    )
    trainer.train()
    rows = [row["input_ids"][:max_length] for row in trainer.train_dataset]
    ended = sum(tokenizer.eos_token_id in ids[-2:] for ids in rows)
    text = tokenizer.decode(rows[40]).replace("\n", "\\n")
    shown = text if len(text) < 300 else f"{text[:40]} ... {text[-40:]}"
    print(f"trained on {len(rows)} rows, {ended} of them to their end; line 41: {shown}")


main()
