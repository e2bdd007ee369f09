"""The same run in taut: nothing that a recipe says is lost or changed without a word.

One recipe for each way in which a setting could vanish; every option of a recipe has one outcome.
"""

from __future__ import annotations

import json
import re
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from rich.console import Console
from tests.helpers.tiny_tokenizers import save_tokenizer, tiny_tokenizer

from taut.config import load
from taut.data.render.token_weights import TokenWeights
from taut.data.settings import TokenWeight
from taut.methods.method import RunConfig
from taut_tools.migrate.dialects import DIALECTS
from taut_tools.migrate.examine import examine
from taut_tools.migrate.frameworks import tables_of
from taut_tools.migrate.topics.weights import PEFT_TARGETS

SWIFT = "swift sft --model some/model --dataset rows.jsonl "
TRL = "trl sft --model_name_or_path some/model --dataset_name rows.jsonl --assistant_only_loss "
OPEN_R1 = "accelerate launch src/open_r1/sft.py --model_name_or_path m --dataset_name rows.jsonl "
OPENRLHF = (
    "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path some/model "
    "--data.dataset rows.jsonl --data.apply_chat_template --data.multiturn --data.input_key chat "
)
COMMANDS = {"swift": SWIFT, "trl": TRL, "open-r1": OPEN_R1, "openrlhf": OPENRLHF}
"""The frameworks that are started by a command with options; the others by a file."""


def read(folder: Path, framework: str, text: str, name: str = "a.sh") -> dict[str, Any]:
    """What ``taut check --recipe --json`` says of a recipe."""
    (folder / name).write_text(text, encoding="utf-8")
    report = examine(f"{framework}:{folder / name}")
    content: dict[str, Any] = json.loads(json.dumps(report.as_json(), allow_nan=False))
    return content | {"exit": report.exit_code}


def carried(folder: Path, framework: str, options: str, before: str = "") -> dict[str, Any]:
    """The offer for a framework's command with some options, after some lines and variables."""
    content = read(folder, framework, f"{before}{COMMANDS[framework]}{options}\n")
    offer: dict[str, Any] = content["carried"]
    return offer | {"exit": content["exit"]}


def lacking(offer: dict[str, Any]) -> dict[str, str]:
    """The options that taut lacks, with the reason."""
    return {one["key"]: one["why"] for one in offer["options"] if one["outcome"] == "lacking"}


@pytest.mark.parametrize("framework", COMMANDS)
def test_a_recipe_that_says_little_is_carried_whole(framework: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, framework, "")
    assert (lacking(offer), offer["unfilled"], offer["exit"]) == ({}, {}, 0)


EXPECTED = {
    "swift": (1e-4, "cosine", 0.0, 0.0, 0.1, 0.95, 3, 16, True, "drop", None, 8),
    "trl": (2e-5, "linear", 0.0, 0.0, 0.0, 0.999, 3, 8, True, "truncate", 1024, 0),
    "open-r1": (2e-5, "linear", 0.0, 0.0, 0.0, 0.999, 3, 8, False, "truncate", 1024, 0),
    "openrlhf": (5e-6, "cosine", 0.03, 0.1, 0.0, 0.95, 2, 128, False, "truncate", 2048, 0),
}


@pytest.mark.parametrize("framework", COMMANDS)
def test_what_a_framework_does_without_a_word_is_said(framework: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, framework, "")
    run = load(RunConfig, None, shlex.split(offer["command"])[2:])
    assert (
        run.optim.learning_rate,
        run.optim.schedule,
        run.optim.warmup_ratio,
        run.optim.min_learning_rate_ratio,
        run.optim.weight_decay,
        run.optim.beta2,
        run.epochs,
        run.batch.samples_per_step,
        run.activation_checkpointing,
        run.data.too_long,
        run.data.max_length,
        run.lora.rank,
    ) == EXPECTED[framework]
    assert run.seed == 42
    assert "optim.learning_rate" in offer["settings"]


EVERYTHING = """\
model: some/model
dataset: ["rows.jsonl"]
tuner_type: full
learning_rate: 1e-5
attn_impl: flash_attn
save_steps: 100
optim_args: qk_clip=1
no_such_option: 3
external_plugins: plugin.py
gradient_checkpointing_kwargs: {use_reentrant: false}
lr_scheduler_kwargs: {num_cycles: 2}
ENV: {MAX_PIXELS: 50176, NCCL_DEBUG: INFO, SOME_SETTING: 1}
"""
OUTCOMES = {
    "model": "carried",
    "dataset": "carried",
    "tuner_type": "carried",
    "learning_rate": "carried",
    "$MAX_PIXELS": "carried",
    "attn_impl": "needless",
    "gradient_checkpointing_kwargs.use_reentrant": "needless",
    "save_steps": "carried",
    "$NCCL_DEBUG": "machine",
    "optim_args": "lacking",
    "no_such_option": "lacking",
    "external_plugins": "lacking",
    "lr_scheduler_kwargs.num_cycles": "lacking",
    "$SOME_SETTING": "lacking",
}


def test_every_option_has_one_outcome(tmp_path: Path) -> None:
    content = read(tmp_path, "swift", EVERYTHING, "sft.yaml")
    options = content["carried"]["options"]
    assert {one["key"]: one["outcome"] for one in options} == OUTCOMES
    assert len(options) == len(OUTCOMES)
    assert all(one["why"] and one["place"].startswith("sft.yaml:") for one in options)
    assert content["exit"] == 1


@pytest.mark.parametrize("framework", DIALECTS)
def test_no_option_has_two_outcomes(framework: str) -> None:
    tables = tables_of(framework)
    assert not tables.needless.keys() & tables.machine.keys()
    assert not (tables.needless.keys() | tables.machine.keys()) & tables.lacking.keys()


# environment variables


@pytest.mark.parametrize(
    "before", ["MAX_PIXELS=50176 FPS_MAX_FRAMES=12 ", "export MAX_PIXELS=50176 FPS_MAX_FRAMES=12\n"]
)
def test_environment_variables_are_settings(before: str, tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "", before)
    assert offer["settings"]["data.images.max_pixels"] == 50176
    assert offer["settings"]["data.images.max_frames"] == 12
    assert offer["exit"] == 0


@pytest.mark.parametrize("name", ["VIDEO_MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "SOME_SETTING"])
def test_a_variable_that_taut_has_no_setting_for_is_lacking(name: str, tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "", f"{name}=7 ")
    assert (set(lacking(offer)), offer["exit"]) == ({f"${name}"}, 1)


def test_variables_of_the_machine_are_left_aside(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "", "CUDA_VISIBLE_DEVICES=0 NCCL_DEBUG=INFO HF_HOME=x ")
    assert offer["exit"] == 0


def test_a_secret_is_not_printed(tmp_path: Path) -> None:
    text = f"WANDB_API_KEY=hush {SWIFT}--hub_token hush\n"
    offer = read(tmp_path, "swift", text)["carried"]
    assert "hush" not in json.dumps(offer)
    assert offer["settings"]["model"] == "some/model"


# packing


@pytest.mark.parametrize("framework", ["swift", "trl", "open-r1"])
def test_a_packed_batch_counts_packs(framework: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    words = "--packing true --max_length 2048 --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
    offer = carried(tmp_path, framework, words)
    assert "batch.samples_per_step" not in offer["settings"]
    assert offer["settings"]["batch.tokens_per_step"] == 8 * 2048
    assert not lacking(offer)


def test_openrlhf_packs_within_a_batch_of_samples(tmp_path: Path) -> None:
    offer = carried(tmp_path, "openrlhf", "--ds.packing_samples --train.batch_size 64")
    assert (offer["settings"]["batch.samples_per_step"], offer["exit"]) == (64, 0)


@pytest.mark.parametrize(
    ("framework", "options", "key", "value"),
    [
        ("swift", "--deepspeed zero3_offload", "parallel.cpu_offload", True),
        ("trl", "--fsdp 'full_shard offload auto_wrap'", "parallel.cpu_offload", True),
        ("openrlhf", "--ds.adam_offload", "parallel.cpu_offload", True),
        ("trl", "--activation_offloading True", "activation_checkpointing", "offload"),
    ],
)
def test_offloading_is_carried(
    framework: str, options: str, key: str, value: object, tmp_path: Path
) -> None:
    offer = carried(tmp_path, framework, options)
    assert (offer["settings"][key], offer["exit"]) == (value, 0)


def test_eight_bit_moments_are_carried(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "--optim paged_adamw_8bit")
    assert "optim.state=int8" in offer["command"]
    assert "optim" not in lacking(offer)


# what is no SFT of taut's


@pytest.mark.parametrize(
    ("options", "key"),
    [
        *[
            (f"--task_type {task}", "task_type")
            for task in ("seq_cls", "embedding", "reranker", "generative_reranker")
        ],
        *[
            (f"--tuner_type {tuner}", "tuner_type")
            for tuner in ("adalora", "longlora", "llamapro", "reft", "boft", "lora_llm")
        ],
        ("--optim adafactor", "optim"),
        ("--use_galore true", "use_galore"),
        ("--lisa_activated_layers 2", "lisa_activated_layers"),
        ("--loss_type infonce", "loss_type"),
        ("--enable_dft_loss true", "enable_dft_loss"),
    ],
)
def test_another_task_tuner_optimizer_or_loss_has_no_command(
    options: str, key: str, tmp_path: Path
) -> None:
    offer = carried(tmp_path, "swift", options)
    assert (offer["command"], offer["exit"]) == (None, 1)
    assert key in lacking(offer)
    out = StringIO()
    examine(f"swift:{tmp_path / 'a.sh'}").print(Console(file=out, width=100))
    assert "In taut: no command" in out.getvalue()
    assert "taut sft model=" not in out.getvalue()
    assert f"a.sh:1: {key} = " in out.getvalue()


@pytest.mark.parametrize(
    "options",
    ["--task_type causal_lm", "--tuner_type full", "--optim adamw_torch", "--use_galore false"],
)
def test_the_same_options_where_they_ask_for_nothing_else(options: str, tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", options)
    assert offer["command"] is not None
    assert offer["exit"] == 0


def test_a_file_for_another_program_has_no_command(tmp_path: Path) -> None:
    text = "model: some/model\ndataset: rows.jsonl\nlearning_rate: 1e-5\nsampler_engine: vllm\n"
    assert read(tmp_path, "swift", text, "a.yaml")["carried"]["command"] is None


@pytest.mark.parametrize(
    ("framework", "options", "value"),
    [
        ("swift", "--quant_bits 4 --quant_method bnb --bnb_4bit_compute_dtype bfloat16", "nf4"),
        ("swift", "--quant_bits 8", "int8"),
        ("trl", "--use_peft --lora_target_modules all-linear --load_in_4bit", "nf4"),
        ("trl", "--use_peft --lora_target_modules all-linear --load_in_8bit", "int8"),
        ("openrlhf", "--ds.lora.rank 8 --ds.load_in_4bit", "nf4"),
    ],
)
def test_a_quantized_base_under_adapters(
    framework: str, options: str, value: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, framework, options)
    assert not lacking(offer)
    assert f"quantize={value}" in json.dumps(offer)


# what is lacking


@pytest.mark.parametrize(
    ("framework", "options", "key"),
    [
        ("swift", "--quant_bits 3", "quant_bits"),
        ("swift", "--quant_method hqq", "quant_method"),
        ("trl", "--load_in_4bit", "load_in_4bit"),
        ("openrlhf", "--ds.load_in_4bit", "ds.load_in_4bit"),
        ("swift", "--init_weights lora-ga", "init_weights"),
        ("swift", "--system prompt.txt", "system"),
        ("swift", "--loss_scale hermes", "loss_scale"),
        ("swift", "--truncation_strategy left", "truncation_strategy"),
        ("swift", "--streaming true --max_steps 10 --interleave_prob 0.5 0.5", "interleave_prob"),
        ("trl", "--lr_scheduler_type polynomial", "lr_scheduler_type"),
        ("trl", "--config nowhere.yaml", "config"),
    ],
)
def test_a_setting_that_taut_lacks_is_named(
    framework: str, options: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, framework, options)
    assert (set(lacking(offer)), offer["exit"]) == ({key}, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--freeze_parameters model.layers.0. model.embed",
            ["/^model\\.layers\\.0\\./", "/^model\\.embed/"],
        ),
        ("--freeze_parameters_regex 'layers\\.[01]\\.'", ["/layers\\.[01]\\./"]),
        (
            "--freeze_parameters model. --trainable_parameters model.layers.1.",
            ["/^model\\./", "!/^model\\.layers\\.1\\./"],
        ),
        (
            "--freeze_parameters_ratio 0.7 --trainable_parameters_regex 'embed|\\.10\\.'",
            ["70%", "!/embed|\\.10\\./"],
        ),
        ("--freeze_parameters_ratio 0 --trainable_parameters lm_head", None),
    ],
)
def test_ms_swift_freezes_by_prefixes_expressions_and_a_share(
    options: str, expected: list[str] | None, tmp_path: Path
) -> None:
    """A name that begins with a prefix, or in which the expression is found, is frozen; what trains comes last."""
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, "swift", f"--tuner_type full {options}")
    assert offer["settings"].get("freeze") == expected
    assert lacking(offer) == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ["*", "!layers[-2:]"]),
        ("freeze_trainable_layers: 3\nfreeze_trainable_modules: mlp,self_attn", None),
        (
            "freeze_trainable_layers: -1\nfreeze_extra_modules: norm",
            ["*", "!layers[:1]", "!*norm*"],
        ),
    ],
)
def test_llamafactory_trains_some_layers(
    options: str, expected: list[str] | None, tmp_path: Path
) -> None:
    text = "model_name_or_path: some/model\nstage: sft\nfinetuning_type: freeze\ndataset: rows\n"
    offer = read(tmp_path, "llamafactory", f"{text}{options}\n", "a.yaml")["carried"]
    modules = ["*", "!layers[-3:].mlp*", "!layers[-3:].self_attn*"]
    assert offer["settings"]["freeze"] == (expected or modules)
    assert "lora.rank" not in offer["settings"]
    assert not any("freeze" in key for key in lacking(offer))


@pytest.mark.parametrize(
    ("framework", "options", "expected"),
    [
        ("swift", "--init_weights true", {}),
        ("swift", "--init_weights olora", {"lora.init": "olora"}),
        ("swift", "--init_weights gaussian", {"lora.init": "gaussian"}),
        (
            "swift",
            "--init_weights pissa_niter_4",
            {"lora.init": "pissa", "lora.init_iterations": 4},
        ),
        (
            "llamafactory",
            "pissa_init: true\npissa_convert: true",
            {"lora.init": "pissa", "lora.init_iterations": 16},
        ),
        ("llamafactory", "pissa_init: true\npissa_iter: -1", {"lora.init": "pissa"}),
        ("axolotl", "peft_init_lora_weights: pissa", {"lora.init": "pissa"}),
    ],
)
def test_where_adapters_start(
    framework: str, options: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    if framework == "swift":
        text = f"swift sft --model some/model --dataset rows.jsonl --tuner_type lora {options}\n"
        offer = read(tmp_path, framework, text)["carried"]
    elif framework == "llamafactory":
        text = "model_name_or_path: some/model\nstage: sft\nfinetuning_type: lora\ndataset: rows\n"
        offer = read(tmp_path, framework, f"{text}{options}\n", "a.yaml")["carried"]
    else:
        text = "base_model: some/model\nadapter: lora\nlora_r: 8\n"
        offer = read(tmp_path, framework, f"{text}{options}\n", "a.yaml")["carried"]
    found = {k: value for k, value in offer["settings"].items() if k.startswith("lora.init")}
    assert found == expected
    assert not {"init_weights", "pissa_init", "pissa_iter", "pissa_convert"} & lacking(offer).keys()


def test_merged_keys_of_yaml_are_settings(tmp_path: Path) -> None:
    """A table's own keys hold over those that << merges into it."""
    text = "trainer: &t\n  learning_rate: 1e-5\n  seed: 3\n<<: *t\nseed: 4\n"
    text += "model_name_or_path: some/model\nstage: sft\ndo_train: true\ndataset: rows\n"
    content = read(tmp_path, "llamafactory", text, "a.yaml")
    settings = content["carried"]["settings"]
    assert (settings["optim.learning_rate"], settings["seed"]) == (1e-5, 4)
    assert not any("given again" in line for line in content["unread"])


def test_files_of_llamafactory_that_train_nothing_are_refused(tmp_path: Path) -> None:
    text = "model_name_or_path: some/model\ntemplate: qwen\n"
    for option in ("export_dir: out", "infer_backend: vllm"):
        offer = read(tmp_path, "llamafactory", f"{text}{option}\n", "a.yaml")["carried"]
        assert offer["command"] is None
        assert "nothing is trained" in lacking(offer)[option.partition(":")[0]]


@pytest.mark.parametrize(
    ("options", "samples"),
    [("batch_size: 8", 8), ("batch_size: 8\ngradient_accumulation_steps: 2", 4), ("", 2)],
)
def test_the_whole_batch_of_axolotl(options: str, samples: int, tmp_path: Path) -> None:
    """Its gradient_accumulation_steps are batch_size // micro_batch_size where they are not set."""
    text = "base_model: some/model\nmicro_batch_size: 2\ndatasets:\n  - path: rows.jsonl\n"
    text += f"    type: chat_template\n{options}\n"
    offer = read(tmp_path, "axolotl", text, "a.yaml")["carried"]
    assert offer["settings"]["batch.samples_per_step"] == samples
    assert "batch_size" not in lacking(offer)


def test_axolotl_names_what_trains(tmp_path: Path) -> None:
    """A dot is a dot there; rows of a parameter are refused."""
    text = "base_model: some/model\ndatasets:\n  - path: rows.jsonl\n    type: chat_template\n"
    text += "unfrozen_parameters:\n"
    offer = read(
        tmp_path, "axolotl", f"{text}  - ^lm_head.weight$\n  - model.layers.1.+\n", "a.yaml"
    )
    every, *kept = offer["carried"]["settings"]["freeze"]
    names = ["lm_head.weight", "lm_head_weight", "model.layers.1.a", "model.layers.2.a"]
    trains = [n for n in names for pattern in kept if re.search(pattern[2:-1], n)]
    assert (every, trains) == ("*", [names[0], names[2]])
    offer = read(tmp_path, "axolotl", f"{text}  - ^embed.weight$[:32000]\n", "a.yaml")["carried"]
    assert "unfrozen_parameters" in lacking(offer) and "freeze" not in offer["settings"]


def test_a_limit_of_prompts_is_not_that_of_whole_samples(tmp_path: Path) -> None:
    text = "trl dpo --model_name_or_path some/model --dataset_name rows.jsonl --max_length 64"
    (tmp_path / "rows.jsonl").write_text('{"chosen": [], "rejected": []}\n')
    path = f"{text} --max_prompt_length 32\n"
    (tmp_path / "b.sh").write_text(path)
    report = examine(f"trl==0.18.0:{tmp_path / 'b.sh'}")
    offer = json.loads(json.dumps(report.as_json(), allow_nan=False))["carried"]
    assert offer["settings"]["data.max_length"] == 64
    assert "are not cut or dropped" in lacking(offer)["max_prompt_length"]


def test_an_option_that_earlier_releases_had_is_carried(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": []}\n')
    (tmp_path / "c.sh").write_text(
        "trl grpo --model_name_or_path some/model --dataset_name rows.jsonl --max_prompt_length 32\n"
    )
    report = examine(f"trl==0.18.0:{tmp_path / 'c.sh'}")
    offer = json.loads(json.dumps(report.as_json(), allow_nan=False))["carried"]
    settings = offer["settings"]
    assert (settings["data.max_length"], settings["data.too_long"]) == (32, "drop")
    assert "max_prompt_length" not in lacking(offer)


def test_a_variable_that_taut_has_nothing_for_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, "swift", "", "export VIDEO_MIN_PIXELS=256\n")
    assert lacking(offer)["$VIDEO_MIN_PIXELS"].startswith("lower limits of frames")


def weighed(rules: list[dict[str, Any]], text: str) -> list[tuple[str, float]]:
    parts = TokenWeights([TokenWeight(**rule) for rule in rules]).parts(text)
    return [(text[part.start : part.stop], part.weight) for part in parts]


@pytest.mark.parametrize(
    ("scale", "text", "expected"),
    [
        ("ignore_empty_think", "<think>\n\n</think>\n\n5", [("<think>\n\n</think>\n\n", 0)]),
        ("default+ignore_empty_think", "<think>\na\n</think>\n\n5", []),
        ("last_round+ignore_think_prefix", "<think>\na\n</think>", [("<think>\n", 0)]),
        ("hermes", "a<tool_call>\nb</tool_call>", [("<tool_call>\nb</tool_call>", 2)]),
        (
            "react",
            "Thought: a\nAction: b\nAction Input: c\nObservation: d\nThought: e\nFinal Answer: f",
            [("Action: b\n", 2), ("Action Input: c\n", 2), ("Observation:", 2), (" d\n", 0)],
        ),
    ],
)
def test_patterns_of_ms_swift_weigh_parts_of_answers(
    scale: str, text: str, expected: list[tuple[str, float]], tmp_path: Path
) -> None:
    """By hand from ms-swift's tables: a pattern weighs what it matches; of react, a word and what follows it up to the
    next word have a weight each.
    """
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, "swift", f"--loss_scale {scale}")
    settings = offer["settings"]
    assert weighed(settings["data.token_weights"], text) == expected
    assert settings["data.targets"] == ("last" if scale.startswith("last") else "assistant")
    assert set(lacking(offer)) == ({"loss_scale"} if scale in ("hermes", "react") else set())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--loss_scale agentflan", "agentflan"),
        ("--loss_scale all+hermes", "those of answers in the data"),
        ("--loss_scale hermes+react", "one after another"),
    ],
)
def test_patterns_that_taut_does_not_have_are_named(options: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, "swift", options)
    assert why in lacking(offer)["loss_scale"] and "data.token_weights" not in offer["settings"]


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        ("swift", "--router_aux_loss_coef 0"),
        ("swift", "--init_weights true"),
        ("swift", "--split_dataset_ratio 0"),
        ("swift", "--deepspeed zero3"),
        ("swift", "--sequence_parallel_size 1"),
        ("trl", "--model_revision main --load_in_4bit false"),
    ],
)
def test_a_setting_that_asks_for_nothing_is_needless(
    framework: str, options: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    assert carried(tmp_path, framework, options)["exit"] == 0


def test_a_value_that_is_not_known_is_left_to_the_user(tmp_path: Path) -> None:
    offer = carried(
        tmp_path, "swift", "--learning_rate $RATE --output_dir $OUT --num_train_epochs $N"
    )
    assert set(lacking(offer)) == {"learning_rate", "num_train_epochs", "output_dir"}
    assert offer["unfilled"] == {
        "out": "a.sh:1: output_dir is $OUT",
        "optim.learning_rate": "a.sh:1: learning_rate is $RATE",
        "epochs": "a.sh:1: num_train_epochs is $N",
    }


@pytest.mark.parametrize(
    ("framework", "options", "key"),
    [
        ("swift", "--warmup_steps few", "warmup_steps"),
        ("swift", "--per_device_train_batch_size 0", "per_device_train_batch_size"),
        ("swift", "--gradient_accumulation_steps 1.5", "gradient_accumulation_steps"),
        ("swift", "--loss_scale all last_round", "loss_scale"),
        ("trl", "--learning_rate nan", "learning_rate"),
        ("trl", "--model_name_or_path a b", "model_name_or_path"),
    ],
)
def test_a_value_of_another_kind_is_lacking(
    framework: str, options: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, framework, options)
    assert (set(lacking(offer)), offer["exit"]) == ({key}, 1)


# adapters


def a_model(folder: Path, model_type: str) -> Path:
    """A directory with a configuration alone."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder / "model"


def test_trls_adapters_without_modules_are_pefts_choice(tmp_path: Path) -> None:
    offer = carried(tmp_path, "trl", "--use_peft")
    assert "peft chooses" in lacking(offer)["target_modules"]
    assert "peft's choice" in offer["unfilled"]["lora.targets"]
    offer = carried(tmp_path, "trl", "--use_peft --model_name_or_path Qwen/Qwen2.5-0.5B")
    assert offer["settings"]["lora.targets"] == ["q_proj", "v_proj"]
    assert "by its name Qwen/Qwen2.5-0.5B is of the type qwen2" in offer["assumed"]
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    model = a_model(tmp_path, "qwen2")
    offer = carried(tmp_path, "trl", f"--use_peft --model_name_or_path {model}")
    assert offer["settings"]["lora.targets"] == ["q_proj", "v_proj"]
    assert offer["exit"] == 0


def test_the_modules_that_peft_adapts_are_pefts() -> None:
    ours = {
        kind: modules.split() for modules, kinds in PEFT_TARGETS.items() for kind in kinds.split()
    }
    assert {kind: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[kind] for kind in ours} == ours


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ("q_proj v_proj", ["q_proj", "v_proj"]),
        ('"q_proj", "v_proj"', ["q_proj", "v_proj"]),
        ("all-linear", "all-linear"),
    ],
)
def test_trls_modules_by_name(words: str, targets: Any, tmp_path: Path) -> None:
    offer = carried(tmp_path, "trl", f"--use_peft --lora_r 32 --lora_target_modules {words}")
    assert offer["settings"]["lora.targets"] == targets
    assert offer["settings"]["lora.rank"] == 32


def test_swifts_modules_are_carried(tmp_path: Path) -> None:
    words = (
        "--target_modules q_proj k_proj --modules_to_save lm_head --use_dora true --lora_rank 16"
    )
    settings = carried(tmp_path, "swift", words)["settings"]
    assert settings["lora.targets"] == ["q_proj", "k_proj"]
    assert settings["lora.modules_to_save"] == ["lm_head"]
    assert settings["lora.dora"] is True
    assert settings["lora.rank"] == 16


def test_an_adapter_to_go_on_from(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "--adapters runs/a --lora_rank 16")
    assert offer["settings"]["lora.adapter"] == "runs/a"
    assert "lora.rank" not in offer["settings"]
    assert offer["exit"] == 0
    offer = carried(tmp_path, "swift", "--adapters runs/a --tuner_type full")
    assert "adapters" in lacking(offer)


@pytest.mark.parametrize(
    ("framework", "options", "coef"),
    [
        ("trl", "", 0.001),
        ("trl", "--router_aux_loss_coef 0.01", 0.01),
        ("trl", "--router_aux_loss_coef 0", None),
        ("swift", "", None),
        ("swift", "--router_aux_loss_coef 1e-3", 0.001),
        ("openrlhf", "--model.aux_loss_coef 0.002", 0.002),
    ],
)
def test_the_router_loss_of_a_mixture_of_experts_is_carried(
    framework: str, options: str, coef: float | None, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    model = a_model(tmp_path, "qwen3_moe")
    (model / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts_per_tok": 8}')
    name = {"trl": "model_name_or_path", "openrlhf": "model.model_name_or_path"}
    offer = carried(tmp_path, framework, f"--{name.get(framework, 'model')} {model} {options}")
    assert offer["settings"].get("router.aux_loss_coef") == coef
    assert not lacking(offer)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    offer = carried(tmp_path, framework, f"--{name.get(framework, 'model')} {model} {options}")
    assert "router.aux_loss_coef" not in offer["settings"], "a dense model has no routers"


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        ({}, "all-linear"),
        ({"vision_config": {}}, ["language_model", "vision_tower", "projector"]),
    ],
)
def test_pefts_all_linear_is_of_the_whole_model(
    config: dict[str, Any], targets: Any, tmp_path: Path
) -> None:
    model = a_model(tmp_path, "some")
    (model / "config.json").write_text(json.dumps({"model_type": "some"} | config))
    words = f"--use_peft --lora_target_modules all-linear --model_name_or_path {model}"
    assert carried(tmp_path, "trl", words)["settings"]["lora.targets"] == targets


def test_openrlhfs_flat_names_are_carried_too(tmp_path: Path) -> None:
    text = (
        "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset r.jsonl --input_key body "
        "--pretrain_mode --adam_betas 0.8 0.9 --l2 0.1 --lora_rank 8 --lora_dropout 0.1 --save_steps 5 "
        "--use_wandb KEY --aux_loss_coef 0.001\n"
    )
    offer = read(tmp_path, "openrlhf", text)["carried"]
    expected = {"optim.beta1": 0.8, "optim.beta2": 0.9, "optim.weight_decay": 0.1}
    expected |= {"lora.rank": 8, "lora.dropout": 0.1}
    assert expected.items() <= offer["settings"].items()
    assert offer["settings"]["router.aux_loss_coef"] == 0.001
    assert not lacking(offer)


@pytest.mark.parametrize(
    ("framework", "options", "dtype"),
    [
        ("trl", "--bf16 false", "float32"),
        ("trl", "--bf16 true", None),
        ("trl", "--bf16 false --fp16 true", None),
        ("trl", "--bf16 false --dtype bfloat16", None),
        ("swift", "--torch_dtype float32", "float32"),
        ("swift", "--torch_dtype bfloat16", None),
    ],
)
def test_training_in_float32(
    framework: str, options: str, dtype: str | None, tmp_path: Path
) -> None:
    offer = carried(tmp_path, framework, options)
    assert offer["settings"].get("dtype") == dtype
    assert not {"bf16", "fp16", "torch_dtype"} & set(lacking(offer))


@pytest.mark.parametrize("framework", ["trl", "swift"])
def test_a_revision_becomes_part_of_the_models_name(framework: str, tmp_path: Path) -> None:
    model = "Qwen/Qwen3-0.6B"
    key = "model" if framework == "swift" else "model_name_or_path"
    settings = carried(tmp_path, framework, f"--{key} {model} --model_revision v2")["settings"]
    assert settings["model"] == f"{model}@v2"


# data


def test_swifts_system_prompt_and_switch_of_thinking(tmp_path: Path) -> None:
    settings = carried(tmp_path, "swift", "--system 'Be brief.' --enable_thinking false")[
        "settings"
    ]
    assert settings["data.system"] == "Be brief."
    assert settings["data.chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("switch", "option", "keys"),
    [
        ("{% if enable_thinking %}{% endif %}", "", {"add_non_thinking_prefix"}),
        ("{% if enable_thinking %}{% endif %}", "--add_non_thinking_prefix false", set()),
        ("", "", set()),
    ],
)
def test_swifts_empty_thoughts_before_answers(
    switch: str, option: str, keys: set[str], tmp_path: Path
) -> None:
    model = a_model(tmp_path, "qwen3")
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = f"{switch}{tokenizer.chat_template}"
    save_tokenizer(tokenizer, model)
    offer = carried(tmp_path, "swift", f"--model {model} {option}")
    assert set(lacking(offer)) == keys


def test_so_many_rows_of_a_data_set_are_its_limit(tmp_path: Path) -> None:
    content = read(tmp_path, "swift", "swift sft --model m --dataset 'rows.jsonl#500' org/set\n")
    assert content["carried"]["settings"]["data.train"] == [
        {"path": "rows.jsonl", "limit": 500},
        {"path": "ms://org/set", "split": "train"},
    ]
    assert content["exit"] == 0


def test_a_share_of_the_rows_is_held_out(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "--split_dataset_ratio 0.01 --eval_steps 50")
    assert offer["settings"]["data.train"] == [{"path": "rows.jsonl", "share": [0.0, 0.99]}]
    assert offer["settings"]["data.eval"] == [{"path": "rows.jsonl", "share": [0.99, 1.0]}]
    assert (offer["settings"]["eval.every"], offer["exit"]) == (50, 0)


def test_what_is_lacking_without_a_change_of_the_result_is_no_failure(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "--deepspeed ds_config.json")
    assert (set(lacking(offer)), offer["exit"]) == ({"deepspeed"}, 0)


@pytest.mark.parametrize(
    ("options", "train"),
    [
        ("--dataset a.jsonl b.jsonl", [{"path": "a.jsonl"}, {"path": "b.jsonl"}]),
        ("--dataset HF::org/set:sub", [{"path": "org/set", "name": "sub", "split": "train"}]),
        ("--use_hf true --dataset org/set", [{"path": "org/set", "split": "train"}]),
    ],
)
def test_swifts_data_by_name(options: str, train: Any, tmp_path: Path) -> None:
    content = read(tmp_path, "swift", f"swift sft --model m {options}\n")
    assert content["carried"]["settings"]["data.train"] == train
    assert content["exit"] == 0


@pytest.mark.parametrize(
    ("columns", "ours"),
    [
        ('{"q": "query", "a": "response"}', {"instruction": "q", "output": "a"}),
        ('{"q": "objects"}', None),
    ],
)
def test_swifts_columns(columns: str, ours: Any, tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", f"--columns '{columns}'")
    assert offer["settings"].get("data.columns") == ours
    assert ("columns" in lacking(offer)) == (ours is None)


def test_trls_data_with_splits(tmp_path: Path) -> None:
    text = (
        "trl sft --model_name_or_path m --dataset_name org/set --dataset_config en "
        "--dataset_train_split tr --dataset_test_split te --eval_strategy steps --eval_steps 7 "
        "--completion_only_loss true\n"
    )
    content = read(tmp_path, "trl", text)
    offer = content["carried"]
    assert content["exit"] == 0
    run = load(RunConfig, None, shlex.split(offer["command"])[2:])
    (train,), (held_out,) = run.data.train, run.data.eval  # type: ignore[misc]
    assert (train.path, train.name, train.split) == ("org/set", "en", "tr")
    assert (held_out.path, held_out.name, held_out.split) == ("org/set", "en", "te")
    assert run.eval.every == 7


@pytest.mark.parametrize(("more", "is_lacking"), [("", False), ("\n      data_dir: here", True)])
def test_open_r1s_mixture(more: str, is_lacking: bool, tmp_path: Path) -> None:
    text = (
        "model_name_or_path: m\nbenchmarks: []\ndataset_mixture:\n  datasets:\n    - id: org/set\n"
        f"      config: all\n      columns:\n        - messages\n      weight: 0.5{more}\n  seed: 1\n"
    )
    offer = read(tmp_path, "open-r1", text, "sft.yaml")["carried"]
    assert ("dataset_mixture.datasets" in lacking(offer)) == is_lacking
    entry = {"path": "org/set", "name": "all", "split": "train", "format": "messages"}
    assert offer["settings"].get("data.train") == [entry | {"weight": 0.5}]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (
            "--data.apply_chat_template --data.input_key q --data.output_key a",
            {"data.columns": {"instruction": "q", "output": "a"}, "data.targets": "last"},
        ),
        (
            "--data.apply_chat_template --data.multiturn --data.input_key chat",
            {"data.columns": {"messages": "chat"}, "data.targets": "assistant"},
        ),
        (
            "--data.input_key q --data.output_key a --data.input_template none",
            {"data.columns": {"prompt": "q", "completion": "a"}, "data.targets": "last"},
        ),
        (
            "--model.pretrain_mode_enable --data.input_key body",
            {"data.columns": {"text": "body"}, "data.format": "text"},
        ),
    ],
)
def test_openrlhfs_columns(options: str, settings: dict[str, Any], tmp_path: Path) -> None:
    start = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset r.jsonl "
    content = read(tmp_path, "openrlhf", f"{start}{options}\n")
    assert settings.items() <= content["carried"]["settings"].items()
    assert content["exit"] == 0


def test_openrlhfs_prompt_without_a_chat_template_becomes_a_template(tmp_path: Path) -> None:
    start = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset r.jsonl "
    content = read(tmp_path, "openrlhf", f"{start}--data.input_key q --data.output_key a\n")
    settings = content["carried"]["settings"]
    assert (content["exit"], settings["data.apply_chat_template"]) == (0, True)
    template = Template(settings["data.template"])
    asked = {"role": "user", "content": "1 + 1"}
    said = {"role": "assistant", "content": "2\n"}
    assert template.render(messages=[asked]) == "User: 1 + 1\nAssistant: "
    whole = template.render(messages=[asked, said], eos_token="</s>")
    assert whole == "User: 1 + 1\nAssistant: 2 </s>"


def test_a_template_in_the_recipe_is_carried_whole(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    recipe = f"model_name_or_path: m\ndataset_name: rows.jsonl\nchat_template: {json.dumps(text)}\n"
    content = read(tmp_path, "open-r1", recipe, "sft.yaml")
    assert (content["exit"], content["carried"]["settings"]["data.template"]) == (0, text)


def test_variables_that_the_script_itself_reads_are_no_settings(tmp_path: Path) -> None:
    before = "export teacher=some/teacher\nexport OTHER=1\nR=$teacher\n"
    offer = carried(tmp_path, "swift", "--streaming true --max_steps 10", before)
    assert set(lacking(offer)) == {"$OTHER"}


@pytest.mark.parametrize(
    ("row", "targets"),
    [('{"messages": []}', "all"), ('{"prompt": "a", "completion": "b"}', "assistant"), ("", "all")],
)
def test_what_trl_learns_of_a_row_depends_on_the_row(
    row: str, targets: str | None, tmp_path: Path
) -> None:
    if row:
        (tmp_path / "rows.jsonl").write_text(f"{row}\n")
    start = "trl sft --model_name_or_path m --dataset_name rows.jsonl --seed 1\n"
    content = read(tmp_path, "trl", start)
    assert content["carried"]["settings"].get("data.targets") == targets
    assert content["exit"] == 0
    said = "of prompts with completions set data.targets=assistant"
    assert any(said in line for line in content["carried"]["assumed"]) == (not row)


# steps


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("--warmup_steps 0.1", "optim.warmup_ratio", 0.1),
        ("--warmup_steps 10", "optim.warmup_steps", 10),
        ("--warmup_ratio 0.2", "optim.warmup_ratio", 0.2),
        ("--warmup_steps 0.1 --lr_scheduler_type constant", "optim.warmup_ratio", 0.0),
    ],
)
def test_warm_up_in_steps_or_as_a_share(
    options: str, key: str, value: float, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    offer = carried(tmp_path, "trl", options)
    assert {name: it for name, it in offer["settings"].items() if "warmup" in name} == {key: value}
    assert offer["exit"] == 0


@pytest.mark.parametrize(
    ("argument", "ratio"), [('{"min_lr": 1e-6}', 0.05), ('{"min_lr_rate": 0.1}', 0.1)]
)
def test_the_lowest_rate(argument: str, ratio: float, tmp_path: Path) -> None:
    words = f"--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{argument}'"
    offer = carried(tmp_path, "swift", f"{words} --learning_rate 2e-5")
    assert offer["settings"]["optim.min_learning_rate_ratio"] == ratio
    assert offer["exit"] == 0


@pytest.mark.parametrize(
    ("framework", "options", "length", "too_long"),
    [
        ("trl", "--max_length none", None, "error"),
        ("trl", "--max_length 512", 512, "truncate"),
        ("swift", "--max_length none", None, "drop"),
        ("swift", "--max_length 512 --truncation_strategy right", 512, "truncate"),
    ],
)
def test_long_rows(
    framework: str, options: str, length: int | None, too_long: str, tmp_path: Path
) -> None:
    settings = carried(tmp_path, framework, options)["settings"]
    assert (settings.get("data.max_length"), settings["data.too_long"]) == (length, too_long)


BATCH = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
ACCELERATE = (
    "accelerate launch --config_file zero3.yaml swift/cli/sft.py --model m --dataset r.jsonl "
)


@pytest.mark.parametrize(
    ("framework", "text", "samples"),
    [
        ("swift", f"{SWIFT}{BATCH}", 8),
        ("swift", f"NPROC_PER_NODE=4 {SWIFT}{BATCH}", 32),
        ("swift", f"export NPROC_PER_NODE=4\n{SWIFT}{BATCH}", 32),
        ("swift", f"NPROC_PER_NODE=4 NNODES=2 {SWIFT}{BATCH}", 64),
        ("swift", f"CUDA_VISIBLE_DEVICES=0,1,2,3 {SWIFT}{BATCH}", 8),
        (
            "swift",
            f"n=4\nNPROC_PER_NODE=$n {SWIFT}--gradient_accumulation_steps $(expr 32 / $n)",
            32,
        ),
        ("swift", f"n=4\nNPROC_PER_NODE=$n {SWIFT}--gradient_accumulation_steps $((32 / n))", 32),
        ("swift", f"NPROC_PER_NODE=4 {SWIFT}--per_device_train_batch_size 3", 24),
        ("swift", f"NPROC_PER_NODE=8 {SWIFT}{BATCH}--sequence_parallel_size 4", 16),
        ("swift", f"torchrun --nproc_per_node=4 --nnodes 2 {ACCELERATE[38:]}{BATCH}", 64),
        ("swift", f"{ACCELERATE}{BATCH}", 48),
        ("swift", f"deepspeed --hostfile=hosts {ACCELERATE[38:]}{BATCH}", 32),
        ("swift", f"deepspeed --num_gpus 2 {ACCELERATE[38:]}{BATCH}", 16),
        ("swift", f"deepspeed --include localhost:0,1,5 {ACCELERATE[38:]}{BATCH}", 24),
        ("trl", f"{TRL}{BATCH}--num_processes 4", 32),
        ("trl", f"{TRL}{BATCH}--accelerate_config zero3", 64),
        ("trl", f"{TRL}{BATCH}--accelerate_config single_gpu", 8),
        ("trl", f"CUDA_VISIBLE_DEVICES=0,1 {TRL}{BATCH}", 16),
        ("trl", f"accelerate launch --num_processes=4 sft.py {TRL[8:]}{BATCH}", 32),
        ("trl", TRL, 8),
        ("openrlhf", f"{OPENRLHF} --train.batch_size 64", 64),
    ],
)
def test_the_batch_is_a_product_over_the_processes(
    framework: str, text: str, samples: int, tmp_path: Path
) -> None:
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 6\n")
    (tmp_path / "hosts").write_text("worker-0 slots=2\n# worker-1 slots=9\nworker-2 slots=2\n")
    offer = read(tmp_path, framework, f"{text}\n")["carried"]
    assert offer["settings"]["batch.samples_per_step"] == samples


def test_how_many_processes_is_said_by_the_option_that_says_it(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", BATCH, "NPROC_PER_NODE=4 ")
    why = "batch.samples_per_step: 2 x 4 x 4 processes"
    said = {
        one["key"]: one["why"]
        for one in offer["options"]
        if one["keys"] == ["batch.samples_per_step"]
    }
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "$NPROC_PER_NODE")
    assert said == dict.fromkeys(keys, why)


@pytest.mark.parametrize(
    ("before", "key"),
    [
        ("NPROC_PER_NODE=$GPUS ", "$NPROC_PER_NODE"),
        ("accelerate launch --config_file nowhere.yaml ", "--config_file"),
        ("deepspeed --hostfile nowhere ", "--hostfile"),
        ("torchrun --nproc_per_node gpu ", "--nproc_per_node"),
    ],
)
def test_processes_that_are_said_but_cannot_be_read(before: str, key: str, tmp_path: Path) -> None:
    start = SWIFT if before.startswith("NPROC") else SWIFT.replace("swift sft", "swift/cli/sft.py")
    offer = read(tmp_path, "swift", f"{before}{start}{BATCH}\n")["carried"]
    assert "how many processes is not known" in lacking(offer)[key]
    assert "batch.samples_per_step" in offer["unfilled"]


def test_processes_that_the_recipe_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{TRL}{BATCH}\n")
    spec = f"trl:{tmp_path / 'a.sh'}"
    alone, eight = examine(spec).carried, examine(spec, num_processes=8).carried
    assert alone.settings["batch.samples_per_step"] == 8
    assert any("--processes N" in text for text in alone.assumed)
    assert eight.settings["batch.samples_per_step"] == 64
    assert not any("--processes N" in text for text in eight.assumed)


# the command


def test_the_printed_command_is_one_that_a_shell_joins(tmp_path: Path) -> None:
    text = f"swift sft --model 'a model' --dataset HF::org/set:sub HF::org/another:sub {BATCH}"
    report_path = tmp_path / "a.sh"
    report_path.write_text(f"{text}\n")
    report = examine(f"swift:{report_path}")
    out = StringIO()
    report.print(Console(file=out, width=100))
    start = out.getvalue().index("taut sft")
    printed = out.getvalue()[start:].partition("\n\n")[0].replace("\\\n", "")
    printed = printed.partition("taut import")[0]
    assert report.command is not None
    assert shlex.split(printed) == shlex.split(report.command)
    assert load(RunConfig, None, shlex.split(printed)[2:]).model == "a model"


def test_a_text_that_reads_as_toml_stays_a_text(tmp_path: Path) -> None:
    offer = carried(tmp_path, "swift", "--output_dir 2026")
    assert load(RunConfig, None, shlex.split(offer["command"])[2:]).out == "2026"


# reports


@pytest.mark.parametrize(
    ("framework", "options", "before", "settings"),
    [
        ("trl", "--report_to none", "", {}),
        ("trl", "--report_to all", "", {}),
        ("trl", "--report_to tensorboard", "", {"log.tensorboard": True}),
        ("swift", "--report_to wandb", "WANDB_PROJECT=chat ", {"log.wandb": "chat"}),
        (
            "trl",
            "--report_to wandb trackio --project p",
            "",
            {"log.wandb": "p", "log.trackio": "p"},
        ),
        ("trl", "--report_to trackio swanlab", "", {"log.trackio": "huggingface"}),
        ("openrlhf", "--logger.wandb.key KEY", "", {"log.wandb": "openrlhf_train_sft"}),
        ("openrlhf", "--logger.tensorboard_dir runs", "", {"log.tensorboard": True}),
    ],
)
def test_reports_are_carried(
    framework: str, options: str, before: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    offer = carried(tmp_path, framework, options, before)
    found = {key: value for key, value in offer["settings"].items() if key.startswith("log.")}
    assert found == settings
    assert lacking(offer) == {}
    whys = {one["key"]: one["why"] for one in offer["options"]}
    if "swanlab" in options:
        assert "swanlab: a class of your own, log.sinks" in whys["report_to"]
        assert "log.trackio" in whys["report_to"]
