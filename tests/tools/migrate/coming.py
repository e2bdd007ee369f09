"""Tables "Coming from ...": options that people use most, and what the importer makes of each.

A line is one option with an example value, under the options that it needs (before ``;``). The importer reads it in a
recipe of its method; the row has the option as it is written there, the keys that follow from it with their values, and
a note where neither is the whole story.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from taut.config import toml
from taut_tools.migrate.draft import Option
from taut_tools.migrate.examine import RecipeReport, examine
from taut_tools.migrate.frameworks import tables_of

BASE = {
    "trl": "model_name_or_path: m\ndataset_name: owner/rows\n",
    "axolotl": "base_model: m\ndatasets: [{path: owner/rows, type: chat_template}]\n",
    "llamafactory": "model_name_or_path: m\ndataset: rows\ndataset_dir: .\ndo_train: true\ntemplate: qwen\n",
    "swift": "model: m\ndataset: owner/rows\nuse_hf: true\nper_device_train_batch_size: 8\n",
}
"""A recipe of each framework without the options of a row."""
COMING = {
    "trl": {
        "sft": """
            model_name_or_path: Qwen/Qwen3-0.6B
            dataset_name: trl-lib/Capybara
            output_dir: runs/a
            max_length: 2048
            packing: true
            assistant_only_loss: true
            per_device_train_batch_size: 4
            per_device_train_batch_size: 4; gradient_accumulation_steps: 8
            learning_rate: 2.0e-5
            lr_scheduler_type: cosine
            warmup_ratio: 0.03
            num_train_epochs: 2
            max_steps: 500
            optim: adamw_8bit
            max_grad_norm: 0.5
            bf16: true
            attn_implementation: flash_attention_2
            gradient_checkpointing: true
            neftune_noise_alpha: 5
            use_peft: true; lora_r: 16
            use_peft: true; lora_target_modules: all-linear
            use_peft: true; load_in_4bit: true
            eval_strategy: steps
            eval_strategy: steps; eval_steps: 50
            load_best_model_at_end: true
            save_steps: 200
            report_to: wandb
            push_to_hub: true""",
        "dpo": "beta: 0.1\nloss_type: ipo",
        "grpo": """
            reward_funcs: [accuracy_reward]
            num_generations: 8
            max_completion_length: 1024
            temperature: 0.9
            epsilon_high: 0.28
            loss_type: dr_grpo""",
    },
    "axolotl": {
        "sft": """
            base_model: Qwen/Qwen3-0.6B
            datasets: [{path: owner/rows, type: chat_template}]
            output_dir: runs/a
            val_set_size: 0.05
            sequence_len: 4096
            sequence_len: 4096; sample_packing: true
            train_on_inputs: false
            chat_template: chatml
            micro_batch_size: 2
            micro_batch_size: 2; gradient_accumulation_steps: 4
            num_epochs: 2
            max_steps: 500
            learning_rate: 2.0e-4
            lr_scheduler: cosine
            warmup_ratio: 0.1
            optimizer: adamw_bnb_8bit
            weight_decay: 0.1
            bf16: auto
            flash_attention: true
            gradient_checkpointing: true
            adapter: lora; lora_r: 16
            adapter: lora; lora_target_linear: true
            adapter: qlora; load_in_4bit: true
            evals_per_epoch: 4
            saves_per_epoch: 1
            wandb_project: mine
            special_tokens: {pad_token: <pad>}""",
        "dpo": "rl: dpo",
    },
    "llamafactory": {
        "sft": """
            model_name_or_path: Qwen/Qwen3-0.6B
            stage: sft
            dataset: rows
            template: qwen3
            cutoff_len: 2048
            packing: true
            max_samples: 1000
            val_size: 0.05
            output_dir: runs/a
            per_device_train_batch_size: 1
            per_device_train_batch_size: 1; gradient_accumulation_steps: 8
            learning_rate: 1.0e-4
            num_train_epochs: 3.0
            lr_scheduler_type: cosine
            warmup_ratio: 0.1
            bf16: true
            flash_attn: fa2
            finetuning_type: lora; lora_rank: 8
            finetuning_type: lora; lora_target: all
            finetuning_type: lora; quantization_bit: 4
            train_on_prompt: true
            mask_history: true
            neftune_noise_alpha: 5
            val_size: 0.05; eval_strategy: steps; eval_steps: 500
            save_steps: 500
            enable_thinking: false""",
        "dpo": "stage: dpo; pref_beta: 0.1\nstage: dpo; pref_loss: sigmoid",
    },
    "swift": {
        "sft": """
            model: Qwen/Qwen3-0.6B
            dataset: [owner/rows#500]
            output_dir: runs/a
            split_dataset_ratio: 0.01
            max_length: 2048
            max_length: 2048; packing: true
            system: You are helpful.
            loss_scale: last_round
            per_device_train_batch_size: 1
            per_device_train_batch_size: 1; gradient_accumulation_steps: 16
            num_train_epochs: 1
            learning_rate: 1.0e-4
            warmup_ratio: 0.05
            torch_dtype: bfloat16
            attn_impl: flash_attn
            lora_rank: 8
            lora_alpha: 32
            target_modules: all-linear
            quant_method: bnb; quant_bits: 4
            freeze_vit: true
            gradient_checkpointing: true
            split_dataset_ratio: 0.01; eval_steps: 50
            save_steps: 50
            save_total_limit: 2
            report_to: wandb
            agent_template: hermes""",
        "grpo": """
            rlhf_type: grpo; num_generations: 8
            rlhf_type: grpo; reward_funcs: [accuracy, format]""",
    },
}


def tables() -> str:
    """The sections of the page."""
    return "".join(_table(framework) for framework in COMING)


def _table(framework: str) -> str:
    head = f"\n### Coming from {tables_of(framework).title}\n\n| there | in taut | note |\n|---|---|---|\n"
    rows = []
    for method, text in COMING[framework].items():
        for line in text.strip().splitlines():
            *needed, option = line.strip().split("; ")
            found, one = read(framework, method, needed, option)
            rows.append(_row(line.strip(), found, one))
    return head + "".join(rows)


def read(
    framework: str, method: str, needed: list[str], option: str
) -> tuple[RecipeReport, Option]:
    """What the importer makes of an option in the smallest recipe that has it."""
    name = option.partition(":")[0]
    if method == "grpo" and name != "reward_funcs":
        needed = ["reward_funcs: [accuracy]", *needed]
    names = {line.partition(":")[0] for line in (*needed, option)}
    base = [line for line in BASE[framework].splitlines() if line.partition(":")[0] not in names]
    text = "\n".join([*base, *needed, option])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        info = '{"rows": {"hf_hub_url": "owner/rows"}}'
        (path.parent / "dataset_info.json").write_text(info, encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")
        kind = framework if framework in ("axolotl", "llamafactory") else f"{framework}.{method}"
        found = examine(f"{kind}:{path}")
    place = f"run.yaml:{text.count(chr(10)) + 1}"
    every = [one for one in found.carried.options if one.place == place]
    return found, max(every, key=lambda one: len(one.keys))


def _row(option: str, found: RecipeReport, one: Option) -> str:
    settings = found.carried.settings
    keys = [key for key in one.keys if key in settings]
    ours = "<br>".join(f"`{key} = {toml(settings[key])}`" for key in keys)
    if one.keys == ("method",):
        ours = f"`taut {found.carried.method}`"
    note = re.sub(r"^(taut \w+$|[\w.]+: (?=\d))", "", one.why)
    note = "" if set(re.split("[,;] ", note)) == set(one.keys) else note
    if one.outcome == "lacking":
        note = f"lacking: {note}"
    cells = (f"`{option}`", ours, note)
    return f"| {' | '.join(cells)} |\n"
