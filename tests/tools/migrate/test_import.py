"""``taut import``: recipes of each framework and method, in short, and the file that becomes of them.

Each file is read by the class of its method, so that a key that does not exist, or a value that it refuses, fails here.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.slow_cases import slow_except

from taut.cli import main
from taut.config import from_mapping
from taut.methods import METHODS
from taut_tools.migrate.convert import convert
from taut_tools.migrate.dialects import options
from taut_tools.migrate.examine import RecipeReport, examine
from taut_tools.migrate.facts import Facts
from taut_tools.migrate.import_recipe import ImportRecipe, run
from taut_tools.migrate.recipe import Setting
from taut_tools.migrate.run_file import run_file

TRL = "--model_name_or_path some/model --dataset_name org/set --use_peft false "
SWIFT = "--model some/model --dataset rows.jsonl --tuner_type full "
RLHF = f"NPROC_PER_NODE=2 swift rlhf {SWIFT}--rlhf_type "
MEGATRON = f"megatron rlhf {SWIFT}--num_train_epochs 1 --rlhf_type "
OPENRLHF = "python3 -m openrlhf.cli.train_{} --data.apply_chat_template "
RAY = (
    f"{OPENRLHF.format('ppo_ray')}--actor.model_name_or_path m --data.prompt_dataset p.jsonl "
    "--reward.model_name_or_path r --train.batch_size 64 --rollout.batch_size 128 "
)
FACTORY = """\
model_name_or_path: some/model
dataset: chats
dataset_dir: data
template: qwen3
learning_rate: 1.0e-5
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
"""
AXOLOTL = """\
base_model: some/model
datasets:
  - {path: org/set, type: chat_template, field_messages: talk}
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
lr_scheduler: cosine
val_set_size: 0.1
bf16: auto
"""
RECIPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "trl sft": (
        "trl", "a.sh", f"trl sft {TRL}--assistant_only_loss --num_processes 4",
        {"method": "sft", "data.targets": "assistant", "batch.samples_per_step": 32, "optim.learning_rate": 2e-5},
    ),
    "trl dpo": (
        "trl", "a.sh", f"trl dpo {TRL}--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0 --beta 0.05",
        {"method": "dpo", "dpo.loss": ["sigmoid", "bco"], "dpo.loss_weights": [0.8, 0.2], "dpo.sft_weight": 1.0,
         "dpo.beta": 0.05, "optim.learning_rate": 1e-6},
    ),
    "trl alpha divergence": (
        "trl", "a.sh", f"trl dpo {TRL}--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.3",
        {"dpo.divergence": "alpha", "dpo.alpha": 0.7},
    ),
    "trl kto": (
        "trl", "a.sh", f"trl kto {TRL}--desirable_weight 1.2",
        {"method": "kto", "kto.desirable_weight": 1.2, "batch.shuffle": False},
    ),
    "trl bco": ("trl", "a.sh", f"python examples/scripts/bco.py {TRL}", {"method": "kto", "kto.loss": "bco"}),
    "trl orpo": ("trl", "a.sh", f"python examples/scripts/orpo.py {TRL}--beta 0.2", {"orpo.beta": 0.2}),
    "trl simpo": (
        "trl", "a.sh", f"python examples/scripts/cpo.py {TRL}--loss_type simpo --cpo_alpha 0.0",
        {"method": "simpo", "simpo.gamma": 0.5, "simpo.sft_weight": 0.0},
    ),
    "trl reward": (
        "trl", "a.sh", f"python examples/scripts/reward_modeling.py {TRL}--center_rewards_coefficient 0.01",
        {"method": "reward", "reward.centering_coef": 0.01, "optim.learning_rate": 1e-4},
    ),
    "trl prm": ("trl", "a.sh", f"python examples/scripts/prm.py {TRL}", {"reward.loss": "process"}),
    "trl grpo": (
        "trl", "a.sh",
        f"trl grpo {TRL}--reward_funcs accuracy_reward --num_generations 4 --per-device-train-batch-size=8 "
        "--use_vllm --vllm_mode server --vllm-server-port 8001 --delta 3.0 --no_gradient_checkpointing",
        {"method": "grpo", "batch.samples_per_step": 2, "rollout.n": 4, "grpo.loss": "clip",
         "grpo.loss_aggregation": "token", "grpo.clip_high": 0.2, "grpo.dual_clip": 3.0, "grpo.kl_coef": 0.0,
         "grpo.rollout_correction": "masked", "grpo.rollout_correction_level": "sequence",
         "rollout.urls": "http://127.0.0.1:8001/v1", "activation_checkpointing": False, "rewards": ["math"]},
    ),
    "trl gspo": (
        "trl", "a.sh", f"trl grpo {TRL}--reward_funcs accuracy_reward --importance_sampling_level sequence "
        "--loss_type grpo "
        "--epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 4 --beta 0.01",
        {"grpo.loss": "gspo", "grpo.clip_low": 3e-4, "grpo.clip_high": 4e-4, "rollout.minibatches": 4,
         "grpo.kl_gradient": "k3"},
    ),
    "trl cispo": (
        "trl", "a.sh", f"trl grpo {TRL}--reward_funcs accuracy_reward --loss_type cispo --epsilon_high 5.0",
        {"grpo.loss": "cispo", "grpo.clip_high": 4.0},
    ),
    "trl rloo": (
        "trl", "a.sh", f"trl rloo {TRL}--reward_model_name_or_path r",
        {"grpo.advantage": "rloo", "grpo.loss": "reinforce", "grpo.constant_length": 1, "grpo.kl_in": "reward",
         "grpo.kl_coef": 0.05, "rollout.n": 2, "rewards": [{"name": "reward_model", "options": {"model": "r"}}]},
    ),
    "trl ppo": (
        "trl", "a.sh", "python examples/scripts/ppo/ppo.py --dataset_name org/set --model_name_or_path t "
        "--sft_model_path some/model --reward_model_path r --total_episodes 1000 --num_mini_batches 2",
        {"method": "ppo", "model": "some/model", "steps": 1000, "rollout.minibatches": 2, "rollout.epochs": 4,
         "ppo.kl_in": "reward", "critic.model": "r", "rollout.max_new_tokens": 53},
    ),
    "trl online dpo": (
        "trl", "a.sh", f"python examples/scripts/online_dpo.py {TRL}--reward_model_path r",
        {"method": "online_dpo", "rollout.max_new_tokens": 64, "rollout.temperature": 0.9},
    ),
    "trl gkd": (
        "trl", "a.sh", f"python examples/scripts/gkd.py {TRL}--teacher_model_name_or_path t --lmbda 0.25 --beta 0.0",
        {"method": "gkd", "distill.lmbda": 0.25, "distill.divergence": "forward", "distill.temperature": 1.0,
         "rollout.temperature": 0.9},
    ),
    "trl distill": (
        "trl", "a.sh", f"python examples/scripts/gkd.py {TRL}--teacher_model_name_or_path t --lmbda 0",
        {"method": "distill", "distill.divergence": "js", "distill.beta": 0.5},
    ),
    "swift pt": (
        "swift", "a.sh", f"swift pt {SWIFT}--streaming false",
        {"method": "sft", "data.format": "text", "data.targets": "all", "batch.samples_per_step": 16},
    ),
    "swift dpo": (
        "swift", "a.sh", f"{RLHF}dpo --rpo_alpha 0.1 --split_dataset_ratio 0.05 --eval_steps 20",
        {"dpo.sft_weight": 0.1, "data.train": [{"path": "rows.jsonl", "share": [0.0, 0.95]}], "eval.every": 20},
    ),
    "swift kto": ("swift", "a.sh", f"{RLHF}kto --calculate_KL false", {"kto.loss": "apo_zero"}),
    "swift simpo": ("swift", "a.sh", f"{RLHF}simpo", {"simpo.beta": 2.0, "simpo.gamma": 1.0, "simpo.sft_weight": 1.0}),
    "swift orpo": ("swift", "a.sh", f"{RLHF}orpo", {"method": "orpo", "optim.beta2": 0.95}),
    "swift rm": ("swift", "a.sh", f"{RLHF}rm", {"method": "reward", "optim.learning_rate": 1e-5}),
    "swift ppo": ("swift", "a.sh", f"{RLHF}ppo --reward_model r", {"method": "ppo", "rollout.temperature": 0.9}),
    "swift grpo": (
        "swift", "a.sh",
        f"{RLHF}grpo --reward_funcs accuracy format cosine --reward_weights 1 0.5 1 --per_device_train_batch_size 8 "
        "--loss_type sapo --tau_pos 1.5 --dynamic_sample true --overlong_filter true",
        {"batch.samples_per_step": 2, "grpo.loss": "sapo", "grpo.sapo_tau_positive": 1.5, "grpo.kl_coef": 0.04,
         "rollout.dynamic_sampling_rounds": 3, "shaping.overlong": "drop", "grpo.rollout_correction": "none"},
    ),
    "swift reinforce": (
        "swift", "a.sh", f"{RLHF}grpo --reward_funcs accuracy --advantage_estimator reinforce_plus_plus "
        "--per_device_train_batch_size 4 --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.1 "
        "--vllm_server_port 8000 --async_generate true",
        {"grpo.advantage": "reinforce_pp_baseline", "grpo.kl_in": "reward", "rollout.lag": 1,
         "rollout.urls": "http://10.0.0.1:8000/v1"},
    ),
    "swift teacher in grpo": (
        "swift", "a.sh", f"{RLHF}grpo --reward_funcs accuracy --teacher_model t --beta 0 "
        "--per_device_train_batch_size 4",
        {"distill.teacher": "t", "distill.coef": 1.0},
    ),
    "swift gkd": (
        "swift", "a.sh", f"{RLHF}gkd --teacher_model t --lmbda 1 --beta 1",
        {"method": "gkd", "distill.divergence": "reverse", "distill.lmbda": 1},
    ),
    "swift lora of a thinking model": (
        "swift", "a.sh", "swift sft --model m --dataset 'org/set:a/b#500' --use_hf true --enable_thinking false "
        "--system 'Be brief.' --quant_bits 4 --quant_method bnb --optim paged_adamw_8bit",
        {"data.train": [{"path": "org/set", "split": "train", "name": name, "limit": 500} for name in "ab"],
         "quantize": "nf4", "optim.state": "int8", "lora.rank": 8, "data.system": "Be brief."},
    ),
    "megatron dpo": (
        "swift", "a.sh", f"{MEGATRON}dpo --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 --global_batch_size 32 "
        "--tensor_model_parallel_size 2 --no_save_optim true --recompute_granularity full --moe_aux_loss_coeff 1e-3 "
        "--moe_router_load_balancing_type global_aux_loss",
        {"optim.learning_rate": 1e-5, "optim.min_learning_rate_ratio": 0.1, "optim.warmup_ratio": 0.05,
         "batch.samples_per_step": 32, "activation_checkpointing": True, "router.aux_loss_coef": 1e-3,
         "router.aux_loss": "per_layer"},
    ),
    "megatron grpo": (
        "swift", "a.yaml", "rlhf_type: grpo\nmodel: m\ndataset: r.jsonl\nglobal_batch_size: 16\nmicro_batch_size: 2\n"
        "num_generations: 8\nsteps_per_generation: 4\nnum_train_epochs: 1\nlr: 1e-6\nreward_funcs: [accuracy]\n"
        "train: {gpus: 4, output_dir: out}\nrollout: {gpus: 4, vllm_tensor_parallel_size: 1}\n",
        {"batch.samples_per_step": 2, "rollout.minibatches": 4, "out": "out"},
    ),
    "openrlhf dpo": (
        "openrlhf", "a.sh", f"{OPENRLHF.format('dpo')}--model.model_name_or_path m --data.dataset p.jsonl "
        "--model.ipo_enable --model.beta 0.2 --adam.betas 0.8 0.9",
        {"dpo.loss": "ipo", "dpo.beta": 0.2, "optim.beta1": 0.8, "optim.min_learning_rate_ratio": 0.1},
    ),
    "openrlhf plain dpo": (
        "openrlhf", "a.sh", f"{OPENRLHF.format('dpo')}--pretrain m --dataset p.jsonl --beta 0.2",
        {"dpo.loss": "sigmoid", "dpo.beta": 0.2, "model": "m", "data.max_length": 512},
    ),
    "swift pictures": (
        "swift", "a.sh", "MAX_PIXELS=50176 IMAGE_MAX_TOKEN_NUM=100 swift sft --model Qwen/Qwen2.5-VL-3B-Instruct "
        "--dataset r.jsonl --tuner_type full",
        {"freeze": ["vision_tower", "projector"], "data.images.max_pixels": 50176},
    ),
    "openrlhf rm": (
        "openrlhf", "a.sh", f"{OPENRLHF.format('rm')}--model.model_name_or_path m --data.dataset p.jsonl "
        "--model.margin_loss_enable",
        {"method": "reward", "reward.margin": 1.0, "batch.samples_per_step": 128},
    ),
    "openrlhf ppo": (
        "openrlhf", "a.sh", f"{RAY}--reward.normalize_enable --critic.freezing_steps 5",
        {"method": "ppo", "batch.samples_per_step": 64, "rollout.minibatches": 2, "ppo.gae_lambda": 1.0,
         "ppo.value_clip": 0.5, "critic.learning_rate": 9e-6, "critic.warmup_steps": 5, "shaping.scale": "running"},
    ),
    "openrlhf grpo": (
        "openrlhf", "a.sh", f"{RAY}--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
        "--algo.kl.use_loss --algo.kl.estimator k3 --actor.eps_clip_low_high 0.2 0.27 --train.async_enable",
        {"method": "grpo", "batch.samples_per_step": 8, "rollout.minibatches": 16, "grpo.advantage": "group",
         "grpo.kl_in": "loss", "grpo.kl_gradient": "k3", "grpo.clip_high": 0.27, "rollout.lag": 16},
    ),
    "open-r1 grpo": (
        "open-r1", "grpo.yaml", "model_name_or_path: m\ndataset_name: org/set\nreward_funcs: [accuracy, tag_count]\n"
        "num_generations: 8\nsystem_prompt: Think.\ndataset_prompt_column: problem\nlearning_rate: 2.0e-05\n",
        {"grpo.kl_coef": 0.04, "data.system": "Think.", "data.columns": {"instruction": "problem"},
         "data.max_length": 512, "batch.samples_per_step": 1},
    ),
    "llamafactory sft": (
        "llamafactory", "a.yaml", f"{FACTORY}stage: sft\nfinetuning_type: lora\nlora_rank: 4\nlora_target: all\n"
        "max_samples: 100\nval_size: 0.1\n",
        {"method": "sft", "lora.rank": 4, "lora.alpha": 8, "lora.targets": "all-linear", "batch.samples_per_step": 8,
         "data.train": [
             {"path": "data/chats.json", "limit": 90, "columns": {"instruction": "q"}, "share": [0.0, 0.9]}]},
    ),
    "llamafactory dpo": (
        "llamafactory", "a.yaml", f"{FACTORY}stage: dpo\nfinetuning_type: full\npref_ftx: 0.5\npref_loss: ipo\n",
        {"method": "dpo", "dpo.loss": "ipo", "dpo.sft_weight": 0.5, "data.max_length": 2048},
    ),
    "llamafactory kto": (
        "llamafactory", "a.yaml", f"{FACTORY}stage: kto\nfinetuning_type: full\npref_beta: 0.2\n",
        {"method": "kto", "kto.loss": "kto", "kto.beta": 0.2},
    ),
    "llamafactory pt": (
        "llamafactory", "a.yaml", f"{FACTORY}stage: pt\nfinetuning_type: full\npacking: false\n",
        {"method": "sft", "data.format": "text", "data.targets": "all",
         "data.train": [{"path": "data/chats.json", "columns": {"text": "q"}}]},
    ),
    "llamafactory neat packing": (
        "llamafactory", "a.yaml", f"{FACTORY}stage: sft\nfinetuning_type: full\nneat_packing: true\ncutoff_len: 512\n",
        {"batch.tokens_per_step": 8 * 512, "batch.samples_per_step": None},
    ),
    "llamafactory simpo": (
        "llamafactory", "a.yaml", f"{FACTORY}stage: dpo\nfinetuning_type: full\npref_loss: simpo\nsimpo_gamma: 0.7\n",
        {"method": "simpo", "simpo.gamma": 0.7},
    ),
    "axolotl sft": (
        "axolotl", "a.yaml", f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_alpha: 16\n"
        "lora_target_linear: true\n",
        {"quantize": "nf4", "lora.targets": "all-linear", "optim.state": "int8", "batch.samples_per_step": 8,
         "data.train": [{"path": "org/set", "split": "train", "columns": {"messages": "talk"}, "share": [0.0, 0.9]}]},
    ),
    "axolotl dpo": (
        "axolotl", "a.yaml", f"{AXOLOTL}rl: dpo\nrl_beta: 0.3\n", {"method": "dpo", "dpo.beta": 0.3},
    ),
    "axolotl grpo": (
        "axolotl", "a.yaml", f"{AXOLOTL}rl: grpo\ntrl: {{num_generations: 4, beta: 0.001, reward_funcs: [r.length]}}\n",
        {"method": "grpo", "rollout.n": 4, "grpo.kl_coef": 0.001, "rewards": ["own.py:length"]},
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        '{"chats": {"file_name": "chats.json", "columns": {"prompt": "q", "response": "output"}}}'
    )
    return tmp_path


def imported(folder: Path, framework: str, name: str, text: str) -> RecipeReport:
    (folder / name).write_text(f"{text}\n")
    return examine(f"{framework}:{folder / name}")


@pytest.mark.parametrize("case", RECIPES)
def test_the_file_of_a_run_is_one_that_its_method_takes(case: str, folder: Path) -> None:
    framework, name, text, expected = RECIPES[case]
    report = imported(folder, framework, name, text)
    content = tomllib.loads(run_file(report.recipe, report.carried))
    ours = report.carried.settings | {"method": report.carried.method}
    assert {key: ours.get(key) for key in expected} == expected
    from_mapping(METHODS[report.carried.method], content)
    assert not report.carried.refusals


@pytest.mark.parametrize("case", RECIPES)
def test_no_option_is_silent(case: str, folder: Path) -> None:
    framework, name, text, _ = RECIPES[case]
    report = imported(folder, framework, name, text)
    given = {setting.key for setting in report.recipe.settings.values()}
    keys = [option.key for option in report.carried.options]
    tables = {key.rpartition(".")[0] for key in given} - {""}
    assert given - tables <= set(keys)
    assert len(keys) == len(set(keys))
    assert all(option.why for option in report.carried.options)


@pytest.mark.parametrize(
    ("framework", "text", "key"),
    [
        ("trl", f"trl grpo {TRL}--reward_funcs accuracy_reward --loss_type vespo", "loss_type"),
        ("trl", f"trl grpo {TRL}--reward_funcs accuracy_reward --top_p 0.9", "top_p"),
        ("trl", f"trl grpo {TRL}--reward_funcs accuracy_reward --per_device_train_batch_size 12", "num_generations"),
        ("trl", f"trl grpo {TRL}--reward_funcs my.own", "reward_funcs"),
        ("trl", f"trl dpo {TRL}--ld_alpha 0.5", "ld_alpha"),
        ("trl", f"trl dpo {TRL}--no_such_option 3", "no_such_option"),
        ("trl", f"trl dpo {TRL}--reward-funcs accuracy", "reward_funcs"),
        ("llamafactory", f"{FACTORY}stage: pt\nfinetuning_type: full", "packing"),
        ("swift", f"{RLHF}grpo --reward_funcs accuracy --tuner_type lora --num_iterations 2", "lora_dropout"),
        ("swift", f"{MEGATRON}dpo --moe_z_loss_coeff 1e-3", "moe_z_loss_coeff"),
        ("openrlhf", f"{RAY}--algo.advantage.estimator rloo --train.agent_func_path a.py", "train.agent_func_path"),
    ],
)  # fmt: skip
def test_what_changes_the_result_is_named(
    framework: str, text: str, key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a.yaml" if framework == "llamafactory" else "a.sh"
    report = imported(folder, framework, name, text)
    assert key in {option.key for option in report.carried.having("lacking") if option.changes}
    spec = f"{framework}:{folder / name}"
    assert run(ImportRecipe(recipe=spec)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{key}" in printed.err and "--force" in printed.err
    assert run(ImportRecipe(recipe=spec, force=True)) == 1
    assert key in capsys.readouterr().out


@pytest.mark.parametrize(
    ("framework", "name", "text", "what"),
    [
        ("trl", "a.sh", f"python examples/scripts/nash_md.py {TRL}", "taut has no Nash-MD"),
        (
            "swift",
            "a.sh",
            f"swift sft {SWIFT}--task_type embedding",
            "no classifiers, embedding models",
        ),
        (
            "swift",
            "a.sh",
            "swift sft --model m --dataset r.jsonl --tuner_type reft",
            "no other tuner",
        ),
        ("swift", "a.sh", f"swift sft {SWIFT}--use_galore true", "no other optimizer"),
        ("axolotl", "a.yaml", f"{AXOLOTL}rl: ebft\n", "energy-based"),
        (
            "llamafactory",
            "a.yaml",
            f"{FACTORY}stage: sft\nfinetuning_type: oft\n",
            "no other tuner",
        ),
        ("swift", "a.sh", "swift sft --dataset r.jsonl", "names no model"),
    ],
)
def test_what_is_no_method_is_refused_by_name(
    framework: str,
    name: str,
    text: str,
    what: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    imported(folder, framework, name, text)
    spec = f"{framework}:{folder / name}"
    assert run(ImportRecipe(recipe=spec, force=True)) == 1
    printed = capsys.readouterr()
    assert (printed.out, what in printed.err) == ("", True)


def test_a_file_says_where_each_value_is_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(folder, "swift", "a.sh", f"{RLHF}dpo \\\n  --learning_rate 3e-6 --hub_token hush")
    assert run(ImportRecipe(recipe=f"swift:{folder / 'a.sh'}")) == 0
    text = capsys.readouterr().out
    assert "learning_rate = 3e-06  # a.sh:2 learning_rate" in text
    assert "weight_decay = 0.1  # what swift does where nothing is set" in text
    assert "# torchrun --nproc-per-node 2 -m taut dpo run.toml" in text
    assert "checked by the configuration's classes" in text
    assert "hush" not in text


@pytest.mark.parametrize(
    ("command", "answer"), [(f"{RLHF}dpo", "chosen"), (f"swift sft {SWIFT}", "output")]
)
def test_columns_of_swift_are_named_as_the_method_reads_them(
    command: str, answer: str, folder: Path
) -> None:
    text = f"""{command} --columns '{{"q": "query", "a": "response", "b": "rejected_response"}}'"""
    columns = imported(folder, "swift", "a.sh", text).carried.settings["data.columns"]
    assert columns == {"instruction": "q", answer: "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("framework", "text", "line"),
    [
        ("trl", f"python examples/scripts/orpo.py {TRL}", "trl adds that of the prompts"),
        ("llamafactory", f"{FACTORY}stage: dpo\nfinetuning_type: full\npref_loss: orpo", "there each answer does"),
        ("llamafactory", f"{FACTORY}stage: dpo\nfinetuning_type: full\npref_ftx: 0.1", "there each answer does"),
    ],
)  # fmt: skip
def test_another_likelihood_term_is_said(
    framework: str, text: str, line: str, folder: Path
) -> None:
    name = "a.yaml" if framework == "llamafactory" else "a.sh"
    assert line in " ".join(imported(folder, framework, name, text).carried.assumed)


def test_a_packed_batch_is_the_tokens_of_its_packs(folder: Path) -> None:
    text = f"swift sft {SWIFT}--packing true --per_device_train_batch_size 2 --max_length 4096"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert carried.settings["batch.tokens_per_step"] == 16 * 4096
    assert "batch.samples_per_step" not in carried.settings
    assert carried.is_exact
    shorter = imported(folder, "swift", "a.sh", f"{text} --packing_length 1000").carried
    assert shorter.settings["batch.tokens_per_step"] == 16 * 1000


def test_without_a_length_the_batch_of_packs_is_left_to_the_user(folder: Path) -> None:
    text = f"swift sft {SWIFT}--packing true --per_device_train_batch_size 2"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert "batch.samples_per_step" in carried.unfilled
    assert {option.key for option in carried.having("lacking")} == {"packing"}


def test_questions_about_the_model_itself_are_filled_in_and_repeated(folder: Path) -> None:
    """swift/self-cognition has 108 rows: 500 of them are 4.62963 times each."""
    options = "--dataset swift/self-cognition#500 --model_name swift-robot --model_author swift"
    carried = imported(folder, "swift", "a.sh", f"swift sft --model m {options}").carried
    assert carried.settings["data.train"] == [
        {
            "path": "ms://swift/self-cognition",
            "split": "train",
            "columns": {"instruction": "query", "output": "response"},
            "weight": 4.62963,
            "replace": {"{{NAME}}": "swift-robot", "{{AUTHOR}}": "swift"},
        }
    ]
    assert carried.is_exact
    two = options.replace("swift-robot", "小黄 Robin").replace("cognition#500", "cognition:qwen3")
    lacks = imported(folder, "swift", "a.sh", f"swift sft --model m {two}").carried
    assert {option.key for option in lacks.having("lacking")} == {"model_name"}
    (source,) = lacks.settings["data.train"]
    thought = {"response": "<think>\n\n</think>\n\n"}
    assert (source["append"], source["prepend"]) == ({"query": " /no_think"}, thought)
    words = (
        "--model deepseek-ai/DeepSeek-R1-0528-Qwen3-8B --dataset swift/self-cognition:empty_think"
    )
    taken = imported(folder, "swift", "a.sh", f"swift sft {words}").carried
    assert {option.key for option in taken.having("lacking")} == {"dataset"}


@pytest.mark.parametrize("method", ["bco", "cpo", "orpo", "prm"])
def test_the_length_of_answers_is_that_of_decoders_behind_an_encoder(
    folder: Path, method: str
) -> None:
    """As in TRL's trainers but prm's, which cuts steps to it."""
    text = f"trl {method} --model_name_or_path m --dataset_name a/b --max_completion_length 64"
    carried = imported(folder, "trl", "a.sh", text).carried
    outcome = "lacking" if method == "prm" else "needless"
    assert "max_completion_length" in {option.key for option in carried.having(outcome)}


def test_a_key_of_a_service_and_how_a_gpu_is_driven_change_nothing(folder: Path) -> None:
    text = f"E2B_API_KEY=x HSA_NO_SCRATCH_RECLAIM=1 swift sft {SWIFT}"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert {"$E2B_API_KEY", "$HSA_NO_SCRATCH_RECLAIM"} <= {
        option.key for option in carried.having("machine")
    }
    assert carried.is_exact


def test_dropout_is_in_force_where_an_answer_is_trained_on_once(folder: Path) -> None:
    text = f"{RLHF}grpo --reward_funcs accuracy --tuner_type lora --per_device_train_batch_size 4"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert carried.settings["lora.dropout"] == 0.05
    assert not any("divergence in the reward" in text for text in carried.assumed)
    assert carried.is_exact
    rewarded = imported(folder, "swift", "a.sh", f"{text} --kl_in_reward true --beta 0.1").carried
    assert any("divergence in the reward" in text for text in rewarded.assumed)
    for more in ("--async_generate true", "--steps_per_generation 2"):
        carried = imported(folder, "swift", "a.sh", f"{text} {more}").carried
        assert "lora.dropout" not in carried.settings
        assert "lora_dropout" in {option.key for option in carried.having("lacking")}


def test_rewards_that_a_plugin_registers_are_its_classes(folder: Path) -> None:
    (folder / "plugin.py").write_text(
        "class Right(ORM):\n    pass\n\norms['right'] = Right\norms['elsewhere'] = Imported\n"
    )
    text = f"{RLHF}grpo --per_device_train_batch_size 4 --external_plugins plugin.py --reward_funcs right "
    carried = imported(folder, "swift", "a.sh", text).carried
    assert carried.settings["rewards"] == [{"name": "plugin.py:Right", "label": "right"}]
    assert carried.is_exact
    carried = imported(folder, "swift", "a.sh", f"{text} elsewhere").carried
    assert {option.key for option in carried.having("lacking")} == {"reward_funcs"}


def test_lower_limits_of_pictures(folder: Path) -> None:
    """4 tokens of 28 x 28 pixels in Qwen2.5-VL; frames have the limit of pictures."""
    text = "swift sft --model Qwen/Qwen2.5-VL-3B-Instruct --dataset rows.jsonl"
    carried = imported(folder, "swift", "a.sh", f"IMAGE_MIN_TOKEN_NUM=4 {text}").carried
    assert carried.settings["data.images.min_pixels"] == 4 * 28 * 28
    assert carried.is_exact
    carried = imported(folder, "swift", "a.sh", f"MIN_PIXELS=1024 {text}").carried
    assert carried.settings["data.images.min_pixels"] == 1024
    carried = imported(folder, "swift", "a.sh", f"VIDEO_MIN_PIXELS=1024 {text}").carried
    assert {option.key for option in carried.having("lacking")} == {"$VIDEO_MIN_PIXELS"}
    other = "MIN_PIXELS=1024 swift sft --model google/gemma-3-4b-it --dataset rows.jsonl"
    carried = imported(folder, "swift", "a.sh", other).carried
    assert {option.key for option in carried.having("lacking")} == {"$MIN_PIXELS"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("google/gemma-4-E2B-it", None),
        ("google/gemma-4-26B-A4B-it", None),
        ("google/gemma-4-12B-it", "a family that taut does not read"),
        ("google/diffusiongemma-26B-A4B-it", "one token after another"),
        ("OpenGVLab/InternVL3-8B", "ends in -hf"),
        ("OpenGVLab/InternVL3-8B-hf", None),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "a family that taut does not read"),
    ],
)
def test_models_whose_pictures_are_not_read(folder: Path, model: str, says: str | None) -> None:
    carried = imported(
        folder, "swift", "a.sh", f"swift sft --model {model} --dataset rows.jsonl"
    ).carried
    lacking = {option.key: option.why for option in carried.having("lacking")}
    assert ("model" in lacking) == (says is not None)
    assert (says or "") in lacking.get("model", "")
    is_large = "26B" in model and says is None
    assert any("the rows have no pictures" in text for text in carried.assumed) == is_large


def test_reward_functions_by_file_and_by_import_path(folder: Path) -> None:
    """OpenRLHF always calls ``reward_func`` of its file; TRL's path is a file where that is here."""
    text = f"{RAY}--reward.remote_url /data/judge.py --data.label_key answer"
    carried = imported(folder, "openrlhf", "a.sh", text).carried
    assert carried.settings["rewards"] == ["/data/judge.py:reward_func"]
    assert carried.settings["rollout.reference"] == "answer"
    assert "reward.remote_url" not in {option.key for option in carried.having("lacking")}
    assert "critic.model" not in carried.settings  # it begins as the policy
    assert "reward.model_name_or_path" in {option.key for option in carried.having("needless")}
    (folder / "mine").mkdir()
    (folder / "mine" / "judges.py").write_text(
        "def length(completions, **kwargs):\n    return []\n"
    )
    text = "trl grpo --model_name_or_path m --dataset_name org/set --reward_funcs mine.judges."
    carried = imported(folder, "trl", "a.sh", f"{text}length").carried
    assert carried.settings["rewards"] == ["mine/judges.py:length"]
    carried = imported(folder, "trl", "a.sh", f"{text}width").carried
    assert {option.key for option in carried.having("lacking")} >= {"reward_funcs"}


def test_the_matrices_b_have_the_rate_of_lora_plus(folder: Path) -> None:
    """16 times the learning rate, 1e-4 by default."""
    text = "swift sft --model m --dataset rows.jsonl --lorap_lr_ratio 16"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert carried.settings["optim.group_learning_rates"] == {"*.lora_B.*": 1.6e-3}
    assert carried.is_exact
    whole = imported(folder, "swift", "a.sh", f"{text} --tuner_type full").carried
    assert "optim.group_learning_rates" not in whole.settings
    unknown = imported(folder, "swift", "a.sh", f"{text} --learning_rate $RATE").carried
    assert "loraplus" in unknown.unfilled["optim.group_learning_rates"]
    assert not unknown.is_exact


def test_limits_of_a_videos_frames(folder: Path) -> None:
    """128 tokens of 32 x 32 pixels in Qwen3-VL."""
    text = "swift sft --model Qwen/Qwen3-VL-8B-Instruct --dataset rows.jsonl"
    carried = imported(folder, "swift", "a.sh", f"VIDEO_MAX_TOKEN_NUM=128 {text}").carried
    assert carried.settings["data.images.max_frame_pixels"] == 128 * 32 * 32
    assert carried.is_exact
    assert any("smaller ones are enlarged" in text for text in carried.assumed)
    larger = f"VIDEO_MAX_PIXELS=50176 MAX_PIXELS=1000 {text}"
    carried = imported(folder, "swift", "a.sh", larger).carried
    assert {option.key for option in carried.having("lacking")} == {"$VIDEO_MAX_PIXELS"}


def test_an_answer_without_an_end_is_worth_less_in_online_dpo(folder: Path) -> None:
    text = f"trl online_dpo {TRL}--reward_model_path org/judge --missing_eos_penalty 1.5"
    settings = imported(folder, "trl", "a.sh", text).carried.settings
    assert {"name": "stop", "weight": 1.5} in settings["rewards"]


def test_the_column_of_solutions_and_tokens_in_a_file(folder: Path) -> None:
    (folder / "tokens.txt").write_text("<a>\n<b>\n")
    text = f"{RLHF}grpo --per_device_train_batch_size 4 --reward_funcs accuracy --new_special_tokens tokens.txt "
    carried = imported(
        folder, "swift", "a.sh", text + """--columns '{"answer": "solution"}'"""
    ).carried
    assert carried.settings["rollout.reference"] == "answer"
    assert carried.settings["tokens.add"] == ["<a>", "<b>"]
    assert carried.is_exact


def test_parallel_layers_are_no_change_of_the_result(folder: Path) -> None:
    text = f"{MEGATRON}dpo --pipeline_model_parallel_size 4 --tensor_model_parallel_size 2"
    assert imported(folder, "swift", "a.sh", text).carried.is_exact


def test_offloading_is_read_from_a_file_of_deepspeed(folder: Path) -> None:
    (folder / "zero.json").write_text('{"zero_optimization": {"offload_param": {"device": "cpu"}}}')
    carried = imported(folder, "swift", "a.sh", f"swift sft {SWIFT}--deepspeed zero.json").carried
    assert carried.settings["parallel.cpu_offload"] is True


ODD: tuple[Any, ...] = ("odd", -1, 0, 2.5, True, None, [1, "a"], {"a": 1}, [], "", 10**20)


@pytest.mark.parametrize("case", RECIPES)
def test_no_value_makes_it_crash(case: str, folder: Path) -> None:
    """Every option of the recipe with values of other kinds: it is named, and never a traceback."""
    framework, name, text, _ = RECIPES[case]
    report = imported(folder, framework, name, text)
    facts = Facts(report.recipe, folder)
    for key, setting in report.recipe.settings.items():
        for value in ODD:
            settings = {**report.recipe.settings, key: setting._replace(value=value)}
            recipe = dataclasses.replace(report.recipe, settings=settings)
            carried = convert(recipe, facts)
            assert key in {option.key for option in carried.options} or isinstance(value, dict)
            run_file(recipe, carried)


@pytest.mark.parametrize(
    "case",
    slow_except(
        ["trl grpo", "swift gkd", "megatron dpo", "openrlhf grpo", "axolotl sft"],
        [
            *("trl grpo", "trl dpo", "trl ppo", "swift grpo", "swift gkd", "megatron dpo"),
            *("openrlhf grpo", "openrlhf dpo", "llamafactory sft", "axolotl sft"),
        ],
    ),
)
def test_options_that_are_not_set_may_be_of_any_kind_too(case: str, folder: Path) -> None:
    report = imported(folder, *RECIPES[case][:3])
    for key in options(report.recipe.framework, report.recipe.method):
        for value in ODD[::2]:
            settings = {**report.recipe.settings, key: Setting(key, value, "a.sh:1")}
            recipe = dataclasses.replace(report.recipe, settings=settings)
            carried = convert(recipe, Facts(recipe, folder))
            assert key in {option.key for option in carried.options} or isinstance(value, dict)


def test_no_clipping_is_no_default_of_tauts(folder: Path) -> None:
    report = imported(folder, "trl", "a.sh", f"trl dpo {TRL}--max_grad_norm 0")
    assert report.carried.settings["optim.clip_grad_norm"] >= 1e9


def test_a_loss_that_is_lacking_is_not_said_to_be_carried(folder: Path) -> None:
    text = f"{RLHF}gkd --teacher_model_server http://t:8000 --gkd_logits_topk 20 --lmbda 1"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert carried.settings["distill.url"] == "http://t:8000/v1"
    assert "beta" in {option.key for option in carried.having("lacking") if option.changes}


@pytest.mark.parametrize("kind", ["trl", "trl.dpo", "trl==1.0.0", "trl.dpo==1.0.0"])
def test_the_command_takes_a_file_of_another_framework(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dpo.yaml").write_text("model_name_or_path: m\ndataset_name: org/set\nbeta: 0.2\n")
    assert main(["import", f"{kind}:{folder / 'dpo.yaml'}"]) == 0
    content = tomllib.loads(capsys.readouterr().out)
    assert (content["method"], content["dpo"]["beta"]) == ("dpo", 0.2)


@pytest.mark.parametrize(
    ("word", "is_on"), [("yes", True), ("1", True), ("no", False), ("0", False)]
)
def test_words_for_true_and_false(word: str, is_on: bool, folder: Path) -> None:
    text = f"swift sft {SWIFT}--packing {word} --use_dora {word}"
    carried = imported(folder, "swift", "a.sh", text).carried
    assert ("packing" in {option.key for option in carried.having("lacking")}) == is_on
