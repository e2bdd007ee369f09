"""Python scripts of trl and transformers: the keys that follow from their calls, and what is not known, with places."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tools.migrate import python_scripts as scripts

from taut.cli import main
from taut.config import load
from taut.errors import ConfigError, TautError
from taut.methods import METHODS
from taut_tools.migrate.dialects import _read_table
from taut_tools.migrate.examine import RecipeReport, examine
from taut_tools.migrate.python_values import MAX_SIZE, Script, Unknown
from taut_tools.migrate.run_file import as_words, run_file

EXPECTED: dict[str, dict[str, Any]] = {
    "SFT": {
        "model": "Qwen/Qwen2.5-0.5B",
        "out": "Qwen2.5-0.5B-SFT",
        "data.train": [{"path": "trl-lib/Capybara", "split": "train"}],
        "data.targets": "assistant",
        "data.max_length": 2048,
        "batch.tokens_per_step": 8 * 2048,
        "optim.learning_rate": 2e-5,
        "activation_checkpointing": True,
    },
    "QLORA": {
        "model": "meta-llama/Llama-3.1-8B",
        "out": "runs/llama-r16",
        "data.train": [{"path": "HuggingFaceH4/no_robots", "split": "train"}],
        "data.eval": [{"path": "HuggingFaceH4/no_robots", "split": "test"}],
        "eval.every": 50,
        "quantize": "nf4",
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
        "lora.targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "batch.samples_per_step": 16,
        "epochs": 1,
        "optim.learning_rate": 2e-4,
        "optim.schedule": "cosine",
        "optim.warmup_ratio": 0.03,
    },
    "DPO": {
        "model": "Qwen/Qwen2-0.5B-Instruct",
        "reference.model": "Qwen/Qwen2-1.5B-Instruct",
        "data.train": [
            {"path": "trl-lib/ultrafeedback_binarized", "split": "train", "share": [0.0, 0.9]}
        ],
        "data.eval": [
            {"path": "trl-lib/ultrafeedback_binarized", "split": "train", "share": [0.9, 1.0]}
        ],
        "dpo.beta": 0.05,
        "dpo.loss": "ipo",
        "optim.learning_rate": 5e-7,
        "batch.samples_per_step": 8,
    },
    "GRPO": {
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.train": [{"path": "openai/gsm8k", "name": "main", "split": "train[:1000]"}],
        "rollout.n": 8,
        "rollout.max_new_tokens": 1024,
        "rollout.temperature": 0.9,
        "grpo.kl_coef": 0.01,
        "batch.samples_per_step": 4,
        "optim.learning_rate": 1e-6,
    },
    "REWARD": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "data.train": "pairs.jsonl",
        "data.max_length": 2048,
        "reward.centering_coef": 0.01,
        "optim.learning_rate": 1e-5,
    },
    "TRAINER": {
        "model": "distilbert/distilgpt2",
        "optim.learning_rate": 2e-5,
        "optim.weight_decay": 0.01,
        "activation_checkpointing": False,
        "batch.samples_per_step": 8,
    },
    "ARGPARSE": {
        "data.train": [{"path": "stanfordnlp/imdb", "split": "train"}],
        "model": "HuggingFaceTB/SmolLM2-135M",
        "optim.learning_rate": 3e-4,
        "epochs": 3,
    },
    "PARSER": {
        "data.train": [{"path": "trl-lib/kto-mix-14k", "split": "train"}],
        "kto.beta": 0.2,
        "kto.desirable_weight": 1.5,
        "out": "kto",
    },
    "COMPUTED": {"model": "Qwen/Qwen3-0.6B", "optim.clip_grad_norm": 0.5},
    "UNSLOTH": {
        "model": "unsloth/Llama-3.2-1B-Instruct",
        "data.train": "rows.jsonl",
        "data.max_length": 2048,
        "quantize": "nf4",
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0,
        "lora.targets": [
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
        ],
        "batch.samples_per_step": 8,
        "steps": 60,
        "activation_checkpointing": True,
    },
}  # fmt: skip
METHOD = {"DPO": "dpo", "GRPO": "grpo", "REWARD": "reward", "PARSER": "kto"}
UNKNOWN: dict[str, dict[str, int]] = {
    "TRAINER": {"dataset_name": 34, "eval_dataset": 35},
    "ARGPARSE": {"output_dir": 16},
    "PARSER": {"model_name_or_path": 20, "peft_config": 23},
    "COMPUTED": {
        "output_dir": 15,
        "seed": 16,
        "learning_rate": 17,
        "per_device_train_batch_size": 18,
        "gradient_accumulation_steps": 19,
        "warmup_steps": 21,
        "bf16": 22,
        "dataset_name": 25,
    },
}
"""Options whose values are not known, with their lines."""


def report(folder: Path, text: str, name: str = "train.py", kind: str = "") -> RecipeReport:
    (folder / name).write_text(text, encoding="utf-8")
    return examine(f"{kind}{folder / name}")


@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_calls_of_a_script_become(name: str, tmp_path: Path) -> None:
    found = report(tmp_path, getattr(scripts, name))
    carried = found.carried
    assert (found.recipe.framework, carried.method) == ("trl", METHOD.get(name, "sft"))
    assert {key: carried.settings.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    unknown = {
        key: int(one.place.rpartition(":")[2])
        for key, one in found.recipe.settings.items()
        if one.obstacle
    }
    assert unknown == UNKNOWN.get(name, {})
    assert [one.key for one in found.recipe.unknown] == []
    assert carried.is_exact == (name not in ("TRAINER", "PARSER", "COMPUTED"))
    lacking = {one.key for one in carried.having("lacking")}
    assert lacking == set(unknown) - {"bf16"}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_run_is_one_that_taut_takes(name: str, tmp_path: Path) -> None:
    carried = report(tmp_path, getattr(scripts, name)).carried
    missing = {"model": "m"} if "model" in carried.unfilled else {}
    run = load(METHODS[carried.method], None, as_words({**carried.settings, **missing}))
    assert run.model == carried.settings.get("model", "m")


def test_the_places_of_options_are_the_lines_of_their_arguments(tmp_path: Path) -> None:
    settings = report(tmp_path, scripts.QLORA).recipe.settings
    places = {"lora_r": 49, "learning_rate": 40, "bf16": 46, "model_name_or_path": 21, "dtype": 24}
    assert {key: settings[key].place for key in places} == {
        key: f"train.py:{line}" for key, line in places.items()
    }


def test_several_trainers_are_the_first_and_words_on_the_others(tmp_path: Path) -> None:
    dpo = scripts.DPO.replace("trainer.train()", "").replace("dataset", "pairs")
    found = report(tmp_path, scripts.SFT + dpo)
    assert (found.recipe.method, found.recipe.place) == ("sft", "train.py:11")
    (line,) = [line for line in found.recipe.unread if "another trainer" in line]
    assert line.startswith(f"train.py:{scripts.SFT.count(chr(10)) + 15}: trl.DPOTrainer")
    assert "train.py" in run_file(found.recipe, found.carried) and line in run_file(
        found.recipe, found.carried
    )


def test_a_configuration_without_a_trainer_says_what_it_can(tmp_path: Path) -> None:
    text = "from trl import GRPOConfig\nargs = GRPOConfig(output_dir='o', num_generations=4)\n"
    carried = report(tmp_path, text).carried
    assert (carried.method, carried.settings["rollout.n"]) == ("grpo", 4)
    assert {"model", "data.train"} <= carried.unfilled.keys()


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("packing=True", "report_to='none'", "batch.samples_per_step", 8),
        ("max_length=512 * 4", "max_length=2**10", "data.max_length", 1024),
        ("max_length=512 * 4", "max_seq_length=700", "data.max_length", 700),
        ("packing=True", "**{'seed': 7}", "seed", 7),
        ('model="Qwen/Qwen2.5-0.5B"', "model=MODELS['small']", "model", "a/b"),
        ('"Qwen2.5-0.5B-SFT"', "str(N) + '/x'", "out", "12/x"),
        ("trainer = SFT", "training_args.seed = N\ntrainer = SFT", "seed", 12),
        ("assistant_only_loss=True", "num_train_epochs=Config.epochs", "epochs", 5),
        ("assistant_only_loss=True", "num_train_epochs=Config().epochs", "epochs", 5),
        ("assistant_only_loss=True", "num_train_epochs=Config(epochs=6).epochs", "epochs", 6),
        ("trl import SFTConfig, SFT", "trl import SFTConfig as C, SFT", "data.max_length", 1024),
    ],
)
def test_constants(old: str, new: str, key: str, value: Any, tmp_path: Path) -> None:
    head = "MODELS = {'small': 'a/b'}\nN = 10\nN += 0\nN = 12\nclass Config:\n    epochs = 5\n"
    text = head + scripts.SFT.replace(old, new)
    if " as C" in new:
        text = text.replace("SFTConfig(", "C(").replace("512 * 4", "1024")
    found = report(tmp_path, text)
    assert found.carried.settings[key] == value
    assert found.carried.is_exact


@pytest.mark.parametrize(
    ("head", "value", "why"),
    [
        ("", "len(dataset)", "computed by the script: len(dataset)"),
        ("n = 1\nif n:\n    n = 2\n", "n", "n, which is assigned under a condition in line 2"),
        ("for n in range(3):\n    pass\n", "n", "n, a variable of line 1"),
        ("n = 1\nn += 1\n", "n", "changed in line 2"),
        ("with open('x') as n:\n    pass\n", "n", "n, a variable of line 1"),
        ("def f(n):\n    global m\n    m = n\n", "f(1)", "computed by the script: f(1)"),
        ("m = 1\ndef f(n):\n    global m\n    m = n\nf(2)\n", "m", "assigned in f"),
        ("a, n = 'xy'\n", "n", "computed by the script: a, n"),
        ("t = {'a': 1}\nt['a'] = 2\n", "t['a']", "computed by the script: t['a']"),
        ("t = [1]\nt.append(2)\n", "t", "t, which line 2 changes"),
        ("try:\n    n = 1\nexcept OSError:\n    n = 2\n", "n", "n, which is assigned under"),
        ("import os\n", "os.environ['N']", "computed by the script: os.environ['N']"),
        ("", "10 ** 10 ** 10", "computed by the script: 10 ** 10 ** 10"),
        ("", "0x" + "f" * 100, "a number of more than 40 digits"),
        ("", "'x' * 10 ** 9", "computed by the script: 'x' * 10 ** 9"),
        ("", "eval('1')", "computed by the script: eval('1')"),
        ("", "[n for n in (1, 2)][0]", "computed by the script"),
    ],
)
def test_what_is_no_constant_is_named(head: str, value: str, why: str, tmp_path: Path) -> None:
    found = report(tmp_path, head + scripts.SFT.replace("512 * 4", value))
    setting = found.recipe.settings["max_length"]
    assert setting.obstacle.startswith(why) and setting.value is None
    assert found.carried.unfilled["data.max_length"].endswith(setting.obstacle)
    assert not found.carried.is_exact


# rewards

GUARDED = 'if __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize(
    ("old", "new", "is_taken"),
    [
        ("", "", True),
        ("def accuracy", "async def accuracy", True),
        ("(completions, answer, **kwargs)", "(prompts, completions, **kwargs)", True),
        ("(completions, answer, **kwargs)", "(completions, log_extra=None, **kwargs)", True),
        ("(completions, answer, **kwargs)", "(completions, completion_ids, **kwargs)", False),
        ("(completions, answer, **kwargs)", "(prompts, answer)", False),
        (GUARDED, "main()\n", True),
        (GUARDED, "GRPOTrainer('m', think_format_reward).train()\n", True),
    ],
)
def test_a_reward_function_of_the_script(
    old: str, new: str, is_taken: bool, tmp_path: Path
) -> None:
    found = report(tmp_path, scripts.GRPO.replace(old, new))
    name = f"{tmp_path}/train.py:accuracy" if is_taken else "own.py:accuracy"
    first = found.carried.settings["rewards"][0]
    assert (first if isinstance(first, str) else first["name"]) == name
    assert found.carried.is_exact == is_taken
    assert any("train.py:8: accuracy" in line for line in found.recipe.unread) != is_taken


def test_a_script_that_trains_when_it_is_loaded_lends_no_function(tmp_path: Path) -> None:
    body = scripts.GRPO[scripts.GRPO.index("    args = GRPOConfig") : scripts.GRPO.index("\n\nif")]
    start = scripts.GRPO.index("def main")
    flat = scripts.GRPO[:start] + "\n".join(line[4:] for line in body.split("\n"))
    found = report(tmp_path, flat)
    assert found.carried.settings["rewards"][0] == "own.py:accuracy"
    (line,) = found.recipe.unread
    assert "move it to a file that does not train when it is loaded" in line
    assert found.exit_code == 1


def test_a_reward_function_is_called_as_trl_calls_it(tmp_path: Path) -> None:
    """What the file says is what taut calls: the function gets messages and the row's columns."""
    from taut.io.user_code import read_user_code
    from taut.rewards.custom import UserReward
    from taut.rewards.verifier import RewardInput

    text = scripts.GRPO.replace("from datasets", "try:\n    from datasets").replace(
        "\nfrom trl import", "\n    from trl import"
    )
    text = text.replace("\nfrom trl.rewards", "\n    from trl.rewards")
    text = text.replace("\n\n\ndef accuracy", "\nexcept ImportError:\n    pass\n\n\ndef accuracy")
    found = report(tmp_path, text)
    spec = found.carried.settings["rewards"][0]
    code = read_user_code(spec, Path(spec.rpartition(":")[0]), f"the reward {spec}", "function")
    reward = UserReward(spec, code, {})
    reward.prepare()
    rows = [
        RewardInput(
            text=text,
            references=(),
            row={"answer": "4"},
            num_tokens=1,
            finish_reason="stop",
            prompt=[{"role": "user", "content": "2+2"}],
            messages=[],
        )
        for text in ("it is 4", "it is 5")
    ]
    assert list(reward.judge_group(rows)) == [1.0, 0.0]


def test_arguments_that_a_reward_does_not_get_are_those_of_taut() -> None:
    from taut.rewards.trl_style import NOT_HERE

    assert tuple(_read_table("python")["words"]["not_given"]) == NOT_HERE


def test_reading_a_script_needs_the_base_installation_alone() -> None:
    code = "import sys, taut_tools.migrate.import_recipe; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_mode_of_vllm(tmp_path: Path) -> None:
    text = scripts.GRPO.replace("use_vllm=False", "use_vllm=True, vllm_mode=mode()")
    carried = report(tmp_path, text).carried
    assert "rollout.engine" in carried.unfilled and not carried.is_exact


def test_models_as_rewards(tmp_path: Path) -> None:
    text = scripts.GRPO.replace("[accuracy, think_format_reward]", "'org/reward-model'")
    settings = report(tmp_path, text.replace("reward_weights=[1.0, 0.2],", "")).carried.settings
    assert settings["rewards"] == [
        {"name": "reward_model", "options": {"model": "org/reward-model"}}
    ]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("load_in_4bit=True", None),
        ("load_in_8bit=True", "int8"),
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4'", "nf4"),
    ],
)
def test_a_base_in_fewer_bits(argument: str, value: str | None, tmp_path: Path) -> None:
    """BitsAndBytesConfig is fp4 where no type is given, which taut has not."""
    start = scripts.QLORA.index("    load_in_4bit")
    end = scripts.QLORA.index(")\nmodel = Auto")
    text = f"{scripts.QLORA[:start]}    {argument}\n{scripts.QLORA[end:]}"
    carried = report(tmp_path, text).carried
    assert carried.settings.get("quantize") == value
    assert carried.is_exact == (value is not None)


# what is not read


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("model.resize_token_embeddings(9)", "script"),
        ("tokenizer.add_special_tokens({})", "script"),
        ("tokenizer.chat_template = open('x').read()", "chat_template"),
        ("args.max_steps = int(input())", "max_steps"),
        ("args.max_steps += 1", "max_steps"),
        ("for p in model.parameters():\n    p.requires_grad = False", "script"),
        ("args.set_optimizer('adamw_torch')", "script"),
    ],
)
def test_what_changes_the_training_beside_its_options_is_lacking(
    line: str, key: str, tmp_path: Path
) -> None:
    text = scripts.QLORA.replace("trainer = SFT", f"{line}\ntrainer = SFT")
    carried = report(tmp_path, text).carried
    assert [one.key for one in carried.having("lacking")] == [key]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("packing=True", "warmup_step=3", "warmup_step"),
        ("train_dataset=dataset,", "train_dataset=dataset, callbacks=[Mine()],", "callbacks"),
        ("train_dataset=dataset,", "train_dataset=dataset, data_collator=f(),", "data_collator"),
        ("train_dataset=dataset,", "train_dataset=dataset, formatting_func=f,", "formatting_func"),
        ("train_dataset=dataset,", "train_dataset=dataset, **more,", "**"),
        ('split="train")', 'split="train", data_dir="x")', "dataset_name"),
        ('load_dataset("trl-lib/Capybara", split="train")', "load_dataset(None)", "dataset_name"),
        ('split="train")', 'split=["train", "test"])', "dataset_name"),
        (
            '"trl-lib/Capybara", split="train"',
            '"json", data_files="a.jsonl", split="train[:9]"',
            "dataset_name",
        ),
        (
            'split="train")',
            'split="train").train_test_split(train_size=0.5)["train"]',
            "dataset_name",
        ),
        (
            'load_dataset("trl-lib/Capybara", split="train")',
            "Dataset.from_list([])",
            "dataset_name",
        ),
    ],
)
def test_arguments_that_taut_has_not(old: str, new: str, key: str, tmp_path: Path) -> None:
    carried = report(tmp_path, scripts.SFT.replace(old, new)).carried
    assert [one.key for one in carried.having("lacking") if one.changes] == [key]


@pytest.mark.parametrize("kind", ["SequenceClassification", "MaskedLM", "Seq2SeqLM"])
def test_models_that_are_no_language_models_are_refused(kind: str, tmp_path: Path) -> None:
    name = f"AutoModelFor{kind}"
    carried = report(tmp_path, scripts.TRAINER.replace("AutoModelForCausalLM", name)).carried
    assert [one.key for one in carried.refusals] == ["task_type"]


# the command line


def test_a_script_needs_no_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(scripts.SFT)
    assert main(["import", str(tmp_path / "train.py")]) == 0
    without = capsys.readouterr().out
    assert main(["import", f"trl:{tmp_path / 'train.py'}"]) == 0
    assert capsys.readouterr().out == without
    assert without.startswith("# TRL 1.16.0 (sft), train.py:11\n")
    assert main(["check", f"recipe={tmp_path / 'train.py'}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["framework"], told["method"], told["carried"]["method"]) == ("trl", "sft", "sft")
    states = {one["id"]: one["state"] for one in told["traps"]}
    assert states["trl.assistant-mask-refused"] == "undecided"  # of a model that is not here
    assert states["trl.packing-wrapped"] == "clear"


KINDS = {
    "trl: run.yaml": "model_name_or_path: m\ndataset_name: d\nuse_peft: true\ndatasets: []\n",
    "axolotl: run.yaml": "base_model: m\ndatasets: []\nsequence_len: 9\nmicro_batch_size: 2\n",
    "llamafactory: run.yml": "stage: sft\ncutoff_len: 9\ntemplate: qwen\ndataset_dir: d\n",
    "swift: run.json": '{"model": "m", "rlhf_type": "dpo", "split_dataset_ratio": 0.1}',
    "openrlhf: run.sh": "python -m openrlhf.cli.train_sft --pretrain m\n",
    "swift: run.sh": "swift sft --model m\n",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["import", "check"])
def test_a_recipe_without_its_kind_is_told_which(
    kind: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    framework, _, name = kind.partition(": ")
    (tmp_path / name).write_text(KINDS[kind])
    words = [str(tmp_path / name)] if command == "import" else [f"recipe={tmp_path / name}"]
    assert main([command, *words]) == 2
    told = capsys.readouterr().err
    assert f"write {framework}:{tmp_path / name}" in told and told.count("\n") == 1


def test_a_file_that_fits_no_framework_is_told_the_form(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("nothing: 1\n")
    with pytest.raises(ConfigError, match=r"expected FRAMEWORK:FILE.*write FRAMEWORK:"):
        examine(str(tmp_path / "run.yaml"))
    with pytest.raises(ConfigError, match=r"expected FRAMEWORK:FILE.*write FRAMEWORK:"):
        examine(str(tmp_path / "other.yaml"))
    with pytest.raises(ConfigError, match="No such file"):
        examine(str(tmp_path / "other.py"))


def test_python_is_of_trl(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write trl:.*train\.py"):
        report(tmp_path, scripts.SFT, kind="axolotl:")


# hostile scripts

SFT = scripts.SFT
REFUSED = {
    "no trainer": (
        "print('x')\n",
        "starts no training that is known; expected a call of a trainer",
    ),
    "another Trainer": (
        "from lightning import Trainer\nTrainer(max_steps=1)\n",
        "starts no training that is known",
    ),
    "empty": ("", "starts no training that is known"),
    "syntax": (SFT + "def (:\n", "train.py:17 is not Python 3 (invalid syntax)"),
    "python 2": (SFT + 'print "done"\n', "train.py:17 is not Python 3 (Missing parentheses"),
    "a null byte": (SFT + "\0", "is not Python 3"),
    "parentheses": (SFT + "x = " + "(" * 5000 + ")" * 5000, "is not Python 3"),
    "brackets": (SFT + "x = " + "[" * 150 + "]" * 150 + "\n" + "-" * 100_000 + "1", ""),
    "a long sum": (SFT + "x = 1" + " + 1" * 50_000, "nested too deeply"),
    "a long chain": (SFT + "x" + ".a()" * 30_000, "nested too deeply"),
    "digits": (SFT + "x = " + "9" * 100_000, "is not Python 3 (Exceeds the limit"),
    "indented": (SFT + "".join(" " * i + "if x:\n" for i in range(200)), "is not Python 3"),
    "doubled lists": (
        "a = [1]\n" + "a = [a, a]\n" * 60 + SFT.replace("512 * 4", "a"),
        f"have more than {MAX_SIZE:,} entries",
    ),
    "a long list": (
        "a = [" + "1," * 90_000 + "]\n" + SFT.replace("512 * 4", "a, b=a, c=a, d=a, e=a"),
        f"have more than {MAX_SIZE:,} entries",
    ),
    "doubled texts": (
        "a = 'x' + 'xxxxxxxx'\n" + "a = f'{a}{a}'\n" * 60 + SFT,
        f"have more than {MAX_SIZE:,} entries",
    ),
    "large": ("# " + "x" * 2**18, "cannot be read"),
}
READ = {
    "doubled texts": "a = 'xxxxxxxx'\n" + "a = f'{a}{a}'\n" * 12 + SFT.replace("512 * 4", "a"),
    "hexadecimal": SFT.replace("512 * 4", "0x" + "f" * 9999),
    "not finite": SFT.replace("512 * 4", "1e999"),
    "a power": SFT.replace("512 * 4", "9 ** 9 ** 9 ** 9"),
    "a circle": "a = b\nb = a\n" + SFT.replace("512 * 4", "a"),
    "itself": "class A(A):\n    pass\nA = A()\n" + SFT.replace("512 * 4", "A.x"),
    "no target": SFT + "\nfor x.y in z: pass\nlambda: 0\nx[1:2]\ndel x\n",
    "a bom": "\ufeff" + SFT,
    "many names": "".join(f"a{i} = {i}\n" for i in range(15_000)) + SFT,
    "many conditions": "".join(f"if a:\n a{i} = 1\n" for i in range(8_000)) + SFT,
}


def outcome(folder: Path, content: bytes) -> str:
    """The refusal in one line, or nothing. Neither takes long."""
    (folder / "train.py").write_bytes(content)
    began, why = time.process_time(), ""
    try:
        found = examine(str(folder / "train.py"))
        found.as_json()
        run_file(found.recipe, found.carried)
    except TautError as error:
        why = str(error)
    assert time.process_time() - began < 20
    assert "\n" not in why and len(why) < 500 + len(str(folder))
    return why


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_scripts_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    text, why = REFUSED[name]
    assert why in outcome(tmp_path, text.encode())


@pytest.mark.parametrize("name", READ)
def test_hostile_scripts_that_are_read(name: str, tmp_path: Path) -> None:
    assert outcome(tmp_path, READ[name].encode()) == ""


def test_a_script_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "it is not text" in outcome(tmp_path, b"# \xe9t\xe9\n" + SFT.encode())


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    line = f"__import__('pathlib').Path({str(mark)!r}).touch()\n"
    default = f"def f(x={line.strip()}):\n    pass\n"
    report(tmp_path, line + default + SFT.replace("512 * 4", line.strip()))
    assert not mark.exists()


def test_values_have_no_more_than_their_limit(tmp_path: Path) -> None:
    script = Script("x = f(a=[1, 2])\n", tmp_path / "a.py")
    assert script.constant(script.calls[0].arguments["a"].value) == [1, 2]
    with pytest.raises(Unknown, match="computed by the script: f"):
        script.constant(script.calls[0])
