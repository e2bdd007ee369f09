"""Recipes as people write them: what is read, with its place; what is reported; the same run in taut."""

from __future__ import annotations

import json
import shlex
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from taut.config import load
from taut.errors import ConfigError
from taut.methods import METHODS
from taut.methods.method import RunConfig
from taut_tools.migrate.examine import SCHEMA, RecipeReport, examine, main
from taut_tools.migrate.run_file import as_words, option_line

RECIPES = Path(__file__).parent / "recipes"
SPECS = {
    "trl:trl_sft.yaml": {"trl.packing-wrapped"},
    "trl:trl_dpo.sh": {
        "trl.dpo-padding-free-off",
        "trl.dpo-cut-at-1024",
    },
    "open-r1:open_r1_sft.yaml": {"trl.packing-without-boundaries"},
    "open-r1:open_r1_launch.sh": set(),
    "open-r1:grpo/open_r1.yaml": {
        "trl.grpo-engine-mismatch-unseen",
        "trl.grpo-cut-completions-learned",
        "trl.grpo-mean-of-means",
        "trl.grpo-kl-gradient",
    },
    "swift:swift_sft.sh": {
        "swift.packing-needs-flash",
        "swift.system-prompt-not-saved",
        "swift.long-rows-dropped",
    },
    "swift:swift_grpo.yaml": {
        "swift.grpo-stale-rollouts",
        "swift.grpo-engine-mismatch",
        "swift.grpo-length-bias",
        "swift.grpo-cut-completions-learned",
        "swift.grpo-kl-gradient",
    },
    "openrlhf:openrlhf_sft.sh": {
        "openrlhf.attention-overridden",
        "openrlhf.forged-end",
        "openrlhf.template-of-its-own",
    },
    "openrlhf:openrlhf_ppo.sh": {
        "openrlhf.ppo-kl-without-gradient",
        "openrlhf.ppo-truncated-sampling",
        "openrlhf.ppo-lora-not-sent",
        "openrlhf.ppo-cut-completions-learned",
    },
    "openrlhf:openrlhf_flat.sh": {"openrlhf.forged-end", "openrlhf.template-of-its-own"},
}


def report(spec: str) -> RecipeReport:
    """The report on one of the recipes here."""
    framework, _, name = spec.partition(":")
    return examine(f"{framework}:{RECIPES / name}")


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("spec", SPECS)
def test_which_traps_a_recipe_walks_into(spec: str) -> None:
    assert {one.trap.id for one in report(spec).having("walks_in")} == SPECS[spec]


@pytest.mark.parametrize("spec", SPECS)
def test_the_report_fits_100_columns_and_names_every_trap_walked_into(spec: str) -> None:
    out = StringIO()
    found = report(spec)
    found.print(Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    words = [line for line in lines if "data.template=" not in line]  # no word is broken
    assert max(len(line.rstrip()) for line in words) <= 100
    assert all(name in out.getvalue() for name in SPECS[spec])
    assert f"{len(SPECS[spec])} walked into" in lines[-1]


@pytest.mark.parametrize("spec", SPECS)
def test_the_json_has_every_trap_with_its_state(spec: str) -> None:
    found = report(spec)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["schema"] == SCHEMA
    assert len(told["traps"]) == len(found.judged)
    assert {one["id"] for one in told["traps"] if one["state"] == "walks_in"} == SPECS[spec]
    assert told["outcome"] == ("failed" if found.exit_code else "passed")


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if "rewards" not in report(spec).carried.unfilled]
)
def test_the_command_carried_over_is_one_that_taut_takes(spec: str) -> None:
    found = report(spec)
    assert found.command is not None
    words = shlex.split(found.command)[2:]
    reports = ("log.wandb", "log.tensorboard", "log.trackio")
    run = load(
        METHODS[found.carried.method], None, [one for one in words if not one.startswith(reports)]
    )
    assert run.model == found.recipe.model
    assert (run.data.train is not None) == ("data.train" not in found.carried.unfilled)


def test_what_equals_what_in_taut() -> None:
    carried = examine(f"trl:{RECIPES / 'trl_sft.yaml'}").carried
    run = load(RunConfig, None, as_words(carried.settings))
    assert (run.optim.learning_rate, run.optim.schedule, run.optim.warmup_ratio) == (
        2e-5,
        "cosine",
        0.05,
    )
    assert (run.epochs, run.batch.tokens_per_step) == (2.0, 16 * 4096)
    assert (run.data.max_length, run.data.too_long) == (4096, "truncate")
    assert run.activation_checkpointing
    assert run.lora.rank == 0


SWIFT = "swift sft --model {model} --dataset rows.jsonl --learning_rate 1e-5 "
RATE = {"optim.group_learning_rates": {"vision_tower": 2e-6}}
TOWER_AND_TEXT = {"freeze": ["language_model", "vision_tower"]}
ADAPTED = ["language_model", "projector"]
PARTS = [
    ("--tuner_type full", True, {"freeze": ["vision_tower", "projector"]}),
    ("--tuner_type full", False, {}),
    ("--tuner_type full --freeze_vit false --freeze_aligner false --vit_lr 2e-6", True, RATE),
    ("--tuner_type full --freeze_llm true --freeze_aligner false", True, TOWER_AND_TEXT),
    ("--tuner_type lora", True, {"lora.targets": "all-linear"}),
    ("--tuner_type lora --freeze_aligner false", True, {"lora.targets": ADAPTED}),
    (
        "--tuner_type lora --max_pixels 50176",
        True,
        {"lora.targets": "all-linear", "data.images.max_pixels": 50176},
    ),
    ("--tuner_type lora --max_pixels 50176", False, {"lora.targets": "all-linear"}),
]


@pytest.mark.parametrize(("words", "takes_pictures", "expected"), PARTS)
def test_the_parts_that_swift_trains(
    words: str, takes_pictures: bool, expected: dict[str, object], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    vision = {"vision_config": {}} if takes_pictures else {}
    (model / "config.json").write_text(json.dumps({"model_type": "some"} | vision))
    carried = examine(
        f"swift:{written(tmp_path, 'a.sh', SWIFT.format(model=model) + words)}"
    ).carried
    keys = ("freeze", "optim.group_learning_rates", "lora.targets", "data.images.max_pixels")
    assert {key: carried.settings[key] for key in keys if key in carried.settings} == expected
    assert load(RunConfig, None, as_words(carried.settings)).model == str(model)


def test_what_swift_freezes_is_told_where_the_model_is_not_here(tmp_path: Path) -> None:
    path = written(tmp_path, "a.sh", SWIFT.format(model="some/model") + "--tuner_type full")
    carried = examine(f"swift:{path}").carried
    assert (
        "the model takes no pictures: of one that does swift freezes vision_tower and projector"
        in carried.assumed
    )
    assert "freeze" not in carried.settings


def test_a_number_that_is_none_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "model_name_or_path: m\nmax_grad_norm: .nan\n")
    found = examine(f"trl:{path}")
    assert "optim.clip_grad_norm" not in found.carried.settings
    assert "not a finite number" in found.carried.unfilled["optim.clip_grad_norm"]
    lacking = [option_line(option) for option in found.carried.having("lacking")]
    assert "a.yaml:2: max_grad_norm = nan: the value is not known (not a finite number)" in lacking
    json.dumps(found.as_json(), allow_nan=False)


def test_other_methods_than_sft_are_carried_over() -> None:
    out = StringIO()
    report("trl:trl_dpo.sh").print(Console(file=out, width=100))
    assert "taut dpo optim.weight_decay=0.0" in out.getvalue()
    assert "dpo.beta=0.1" in out.getvalue()


@pytest.mark.parametrize("spec", ["trl:trl_dpo.sh", "swift:swift_grpo.yaml"])
def test_what_taut_does_is_said_as_of_a_method_that_there_is(spec: str) -> None:
    traps = report(spec).as_json()["traps"]
    assert traps
    assert not [trap["id"] for trap in traps if "by design" in trap["taut"]]


def test_settings_know_their_lines() -> None:
    settings = report("trl:trl_sft.yaml").recipe.settings
    assert settings["packing_strategy"].place == "trl_sft.yaml:8"
    assert settings["learning_rate"].value == 2e-5
    assert settings["gradient_checkpointing_kwargs.use_reentrant"].value is False


def test_a_script_with_its_file_its_overrides_and_its_launcher() -> None:
    recipe = report("open-r1:open_r1_launch.sh").recipe
    assert recipe.method == "sft"
    assert recipe.is_script
    assert recipe.launcher[:2] == ("accelerate", "launch")
    assert recipe.environment["ACCELERATE_LOG_LEVEL"].value == "info"
    assert recipe.settings["packing"] == ("packing", False, "open_r1_launch.sh:12", "")
    assert recipe.settings["gradient_checkpointing"].place == "open_r1_sft.yaml:14"
    assert recipe.settings["dtype"].value == "bfloat16"
    assert recipe.value("seed") == 42
    assert recipe.unread == ("open_r1_launch.sh:15: output_dir is $RUN_DIR",)


def test_flags_dashes_lists_and_adapters_of_a_trl_script() -> None:
    recipe = report("trl:trl_dpo.sh").recipe
    assert recipe.model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert recipe.value("padding_free") is True
    assert recipe.value("gradient_checkpointing") is True
    assert recipe.value("bf16") is False
    assert recipe.value("learning_rate") == 5e-6
    assert recipe.settings["lora_r"] == ("lora_r", 32, "trl_dpo.sh:5", "")
    assert not recipe.unknown


def test_openrlhf_in_a_here_document_and_under_ray() -> None:
    sft, ppo = report("openrlhf:openrlhf_sft.sh").recipe, report("openrlhf:openrlhf_ppo.sh").recipe
    assert (sft.method, sft.version, sft.data) == ("sft", "0.11.0", "questions.jsonl")
    assert sft.settings["ds.packing_samples"].place == "openrlhf_sft.sh:15"
    assert (ppo.method, ppo.model) == ("ppo", "OpenRLHF/Llama-3-8b-sft-mixture")
    assert ppo.value("algo.kl.use_loss") is True
    assert not sft.unknown and not ppo.unknown


def test_openrlhfs_flat_names_tell_the_release() -> None:
    recipe = report("openrlhf:openrlhf_flat.sh").recipe
    assert recipe.version == "0.8.5"
    assert recipe.value("data.max_len") == 2048
    assert recipe.value("ds.packing_samples") is True
    assert not recipe.unknown


def test_unknown_keys_are_told_with_the_nearest() -> None:
    (unknown,) = report("trl:trl_sft.yaml").recipe.unknown
    assert unknown == ("learning_rte", "trl_sft.yaml:20", "learning_rate", True)


def test_unknown_keys_are_dropped_where_the_script_is_started_directly(tmp_path: Path) -> None:
    written(tmp_path, "a.yaml", "model_name_or_path: m\nmax_length: 9\npackin: true\n")
    script = "accelerate launch trl/scripts/sft.py --config a.yaml\n"
    found = examine(f"trl:{written(tmp_path, 'a.sh', script)}")
    assert "trl.unknown-keys-dropped" in {one.trap.id for one in found.having("walks_in")}
    found = examine(f"trl:{written(tmp_path, 'b.sh', 'trl sft --config a.yaml')}")
    assert "trl.unknown-keys-dropped" in {one.trap.id for one in found.having("clear")}


def test_the_release_can_be_said(tmp_path: Path) -> None:
    path = written(
        tmp_path, "sft.yaml", "packing: true\nattn_implementation: sdpa\nmax_length: 9\n"
    )
    new, old = examine(f"trl:{path}"), examine(f"trl==0.18.0:{path}")
    assert {one.trap.id for one in new.having("walks_in")} == {"trl.flat-batch-dense-mask"}
    assert "trl.packing-without-boundaries" in {one.trap.id for one in old.having("walks_in")}


def test_a_value_that_is_not_known_leaves_its_traps_open(tmp_path: Path) -> None:
    path = written(tmp_path, "a.sh", "trl sft --packing $PACK --packing_strategy wrapped\n")
    (one,) = [one for one in examine(f"trl:{path}").judged if one.trap.id == "trl.packing-wrapped"]
    assert one.state == "undecided"
    assert one.because == ("a.sh:1: packing is $PACK",)


def test_the_method_of_a_file_of_settings(tmp_path: Path) -> None:
    assert (
        examine(f"trl:{written(tmp_path, 'a.yaml', 'scale_rewards: true')}").recipe.method == "grpo"
    )
    assert examine(f"trl:{written(tmp_path, 'b.yaml', 'seed: 8')}").recipe.method == "sft"
    assert examine(f"trl:{written(tmp_path, 'dpo.yaml', 'seed: 8')}").recipe.method == "dpo"
    several = written(tmp_path, "c.yaml", "beta: 0.1\n")
    with pytest.raises(ConfigError, match=r"say which: --recipe trl\.dpo:"):
        examine(f"trl:{several}")
    assert examine(f"trl.kto:{several}").recipe.method == "kto"


@pytest.mark.parametrize("folder", ["another", "support"])
def test_a_method_is_a_word_of_the_files_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    path = written(tmp_path / folder, "a.yaml", "model: m\nlearning_rate: 1e-5\n")
    assert examine(f"swift:{path}").recipe.method == "sft"


def test_swift_reads_json_and_a_file_as_its_first_word(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", '{"model": "m", "dataset": ["x.jsonl"], "packing": true}')
    assert examine(f"swift:{path}").recipe.data == "x.jsonl"
    recipe = examine(f"swift:{written(tmp_path, 'a.sh', 'swift sft a.json --seed 1')}").recipe
    assert (recipe.model, recipe.value("seed"), recipe.unread) == ("m", 1, ())


def test_a_file_that_a_script_names_and_that_is_not_here(tmp_path: Path) -> None:
    path = written(tmp_path, "a.sh", "trl sft --config nowhere.yaml\ntrl dpo --beta 0.1\n")
    assert examine(f"trl:{path}").recipe.unread == (
        "a.sh:1: nowhere.yaml is not here; its settings are not known",
        "a.sh:2: another command, not read",
    )


def test_a_key_given_twice_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "seed: 1\nseed: 2\n")
    recipe = examine(f"trl:{path}").recipe
    assert recipe.value("seed") == 2
    assert recipe.unread == ("a.yaml:2: seed is given again; the value of line 2 holds",)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("trl", "expected FRAMEWORK:FILE"),
        ("trll:a.yaml", "did you mean trl"),
        ("nemo:a.yaml", "expected one of trl, open-r1, swift"),
        ("trl:nowhere.yaml", "nowhere.yaml cannot be read"),
        ("trl==new:a.yaml", "new is no version"),
        ("trl.pt:{a.yaml}", "expected one of sft, dpo"),
        ("trl:{bad.yaml}", "bad.yaml:2 is not YAML"),
        ("trl:{control.yaml}", "control.yaml:2 is not YAML (it has the character U+0080)"),
        ("trl:{accelerate.yaml}", "3 of 4 keys are no options of trl 1.16.0"),
        ("trl:{list.yaml}", "list.yaml:1 holds no settings"),
        ("trl:{empty.sh}", "empty.sh has no command of trl"),
        ("swift:{empty.sh}", "empty.sh has no command of swift"),
        ("trl:{binary.yaml}", "it is not text"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, spec: str, message: str) -> None:
    written(tmp_path, "a.yaml", "seed: 1\n")
    written(tmp_path, "bad.yaml", "a: 1\nb: c: d\n")
    written(
        tmp_path, "accelerate.yaml", "machine_rank: 0\ntpu_env: []\nsame_network: true\nfsdp: x\n"
    )
    written(tmp_path, "list.yaml", "- a\n")
    written(tmp_path, "empty.sh", "echo hello\n")
    written(tmp_path, "control.yaml", "a: 1\nb: \x80\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    framework, brace, name = spec.partition("{")
    with pytest.raises(ConfigError) as caught:
        examine(f"{framework}{tmp_path / name.rstrip('}')}" if brace else spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_prints_and_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"trl:{RECIPES / 'trl_sft.yaml'}") == 1
    assert "trl.packing-wrapped" in capsys.readouterr().out
    assert main(f"swift:{RECIPES / 'swift_grpo.yaml'}", as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["schema"] == SCHEMA
