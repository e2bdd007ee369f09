"""How often a recipe evaluates and saves, its best model, and early stopping become keys of taut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taut.config import from_mapping
from taut.methods import METHODS
from taut_tools.migrate.examine import examine

TRL = "model_name_or_path: m\ndataset_name: org/set\neval_strategy: steps\neval_steps: 50\n"
DPO = "trl dpo --model_name_or_path m --dataset_name org/set "
FACTORY = "model_name_or_path: m\nstage: sft\ndo_train: true\ndataset: rows\nval_size: 0.1\n"
AXOLOTL = (
    "base_model: m\ndatasets:\n  - path: rows.jsonl\n    type: chat_template\nval_set_size: 0.1\n"
    "num_epochs: 2\nmicro_batch_size: 1\ngradient_accumulation_steps: 8\n"
)
SWIFT = "swift sft --model m --dataset rows.jsonl --split_dataset_ratio 0.1 "
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "trl, the best by the loss": (
        "trl",
        "sft.yaml",
        f"{TRL}load_best_model_at_end: true\nsave_steps: 50\n",
        {"eval.every": 50, "eval.best": "loss", "checkpoint.every": 50},
    ),
    "trl, epochs": (
        "trl",
        "sft.yaml",
        TRL.replace("steps\neval_steps: 50", "epoch") + "save_strategy: epoch\n",
        {"eval.every": "1 epoch", "checkpoint.every": "1 epoch"},
    ),
    "trl, shares of a run in epochs": (
        "trl",
        "sft.yaml",
        TRL.replace("50", "0.25") + "save_steps: 0.5\nnum_train_epochs: 2\n",
        {"eval.every": "0.5 epochs", "checkpoint.every": "1 epoch"},
    ),
    "trl, shares of a run in steps": (
        "trl",
        "sft.yaml",
        TRL.replace("50", "0.25") + "save_steps: 0.5\nmax_steps: 90\n",
        {"eval.every": 23, "checkpoint.every": 45},
    ),
    "trl, by a margin": (
        "trl",
        "a.sh",
        f"{DPO}--eval_strategy epoch --load_best_model_at_end true --metric_for_best_model "
        "eval_rewards/margins --greater_is_better true\n",
        {"eval.every": "1 epoch", "eval.best": "rewards/margin"},
    ),
    "llama-factory": (
        "llamafactory",
        "sft.yaml",
        f"{FACTORY}eval_strategy: steps\neval_steps: 20\nsave_strategy: epoch\n"
        "load_best_model_at_end: true\nearly_stopping_steps: 4\nmetric_for_best_model: eval_loss\n",
        {
            "eval.every": 20,
            "eval.best": "loss",
            "eval.stop_after": 4,
            "checkpoint.every": "1 epoch",
        },
    ),
    "axolotl": (
        "axolotl",
        "sft.yaml",
        f"{AXOLOTL}evals_per_epoch: 4\nsaves_per_epoch: 1\nearly_stopping_patience: 3\n",
        {
            "eval.every": "0.25 epochs",
            "checkpoint.every": "1 epoch",
            "eval.best": "loss",
            "eval.stop_after": 3,
        },
    ),
    "axolotl, thirds": (
        "axolotl",
        "sft.yaml",
        f"{AXOLOTL}evals_per_epoch: 3\nsave_strategy: 'no'\n",
        {"eval.every": "0.333333 epochs", "checkpoint.every": None},
    ),
    "ms-swift": (
        "swift",
        "a.sh",
        f"{SWIFT}--eval_steps 30 --early_stop_interval 2 --save_strategy epoch\n",
        {
            "eval.every": 30,
            "eval.best": "loss",
            "eval.stop_after": 2,
            "checkpoint.every": "1 epoch",
        },
    ),
}


def read(folder: Path, framework: str, name: str, text: str) -> dict[str, Any]:
    """The offer for a recipe."""
    (folder / name).write_text(text, encoding="utf-8")
    (folder / "rows.jsonl").write_text('{"messages": []}\n')
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text('{"rows": {"file_name": "rows.jsonl"}}')
    content: dict[str, Any] = examine(f"{framework}:{folder / name}").as_json()["carried"]
    return content


def outcomes(offer: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["outcome"] for one in offer["options"]}


@pytest.mark.parametrize("case", CASES)
def test_the_options_become_keys(case: str, tmp_path: Path) -> None:
    framework, name, text, wanted = CASES[case]
    offer = read(tmp_path, framework, name, text)
    settings = offer["settings"]
    assert {key: settings.get(key) for key in wanted} == wanted
    said = outcomes(offer)
    names = ("load_best_model_at_end", "early_stopping_patience", "early_stopping_steps")
    names = (*names, "early_stop_interval", "evals_per_epoch", "saves_per_epoch")
    assert {said[name] for name in names if name in said} <= {"carried"}
    is_said = "the best model is in out/best, the last one in out/model" in offer["assumed"]
    assert is_said == ("load_best_model_at_end" in said)
    # the run takes them
    from_mapping(METHODS[offer["method"]], {"model": "m", **settings})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("eval_strategy: 'no'\nearly_stopping_patience: 3\n", "nothing is measured before the end"),
        ("early_stopping_patience: 3\nmetric_for_best_model: bleu\n", "bleu is no metric of taut"),
        ("load_best_model_at_end: true\ngreater_is_better: true\n", "of loss the smallest"),
    ],
)
def test_what_cannot_be_carried_is_named(more: str, why: str, tmp_path: Path) -> None:
    offer = read(tmp_path, "axolotl", "sft.yaml", f"{AXOLOTL}eval_steps: 10\n{more}")
    lacking = {one["key"]: one["why"] for one in offer["options"] if one["outcome"] == "lacking"}
    assert (
        why in lacking[more.split(":")[0] if "patience" not in more else "early_stopping_patience"]
    )
    assert not {"eval.best", "eval.stop_after"} & offer["settings"].keys()


def test_options_that_are_off_are_not_needed(tmp_path: Path) -> None:
    text = f"{TRL}load_best_model_at_end: false\n"
    offer = read(tmp_path, "trl", "sft.yaml", text)
    assert outcomes(offer)["load_best_model_at_end"] == "needless"
    assert "eval.best" not in offer["settings"]
