"""Carry how often a run is evaluated and saved, which model is the best, and early stopping."""

from __future__ import annotations

import math
from typing import Any

from taut_tools.migrate.draft import Draft, is_count, is_number
from taut_tools.migrate.frameworks import words

OFFLINE_EVAL = ("sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "distill")
"""Methods with a held-out loss, ``eval.every``."""
PATIENCE = words("early_stopping_patience early_stopping_steps early_stop_interval")
"""Options with the number of evaluations after which training ends: transformers, LLaMA-Factory, ms-swift."""
PAIRS = {"rewards/accuracies": "rewards/accuracy", "rewards/margins": "rewards/margin"}
METRICS = {
    **dict.fromkeys(("dpo", "cpo", "simpo", "orpo"), PAIRS),
    "kto": {"rewards/accuracies": "rewards/accuracy"},
    "reward": {"accuracy": "accuracy", "margin": "score/margin"},
}
"""taut's metrics of held-out data beside the loss, by TRL's names without ``eval_``."""


def carry_evaluation(draft: Draft) -> None:
    """Carry ``eval.*`` and ``checkpoint.*``; the held-out data are carried already."""
    _carry_saving(draft)
    held_out = "data.eval" in draft.settings and draft.method in OFFLINE_EVAL
    if held_out:
        _carry_cadence(
            draft, "eval.every", "eval_steps", "evals_per_epoch", "eval_strategy", ("no", False)
        )
    asked = [name for name in (*PATIENCE, "load_best_model_at_end") if draft.is_on(name)]
    if not asked or draft.is_unknown(*asked):
        return
    # the best model
    name = str(draft.value("metric_for_best_model") or "loss").removeprefix("eval_")
    metric = {"loss": "loss", **METRICS.get(draft.method, {})}.get(name)
    lacks = ""
    if "eval.every" not in draft.settings:
        lacks = "nothing is measured before the end: eval.every, eval.answers.every"
    elif metric is None:
        lacks = f"{name} is no metric of taut's: a function of your own, eval.metrics and eval.best"
    elif draft.value("greater_is_better") not in (None, name != "loss"):
        lacks = f"of {name} the {'smallest' if name == 'loss' else 'largest'} value is the best"
    if lacks:
        for option in asked:
            draft.lacking(option, lacks)
        return
    draft.set("eval.best", metric, "load_best_model_at_end", "metric_for_best_model")
    if draft.is_on("load_best_model_at_end"):
        draft.assumed.append("the best model is in out/best, the last one in out/model")
    draft.carried(["greater_is_better"], ["eval.best"])
    # early stopping
    for option in PATIENCE:
        if is_count(patience := draft.value(option)):
            draft.set("eval.stop_after", patience, option)


def _carry_saving(draft: Draft) -> None:
    kept = draft.value("save_total_limit")
    _carry_cadence(
        draft, "checkpoint.every", "save_steps", "saves_per_epoch", "save_strategy", ("no", "best")
    )
    if is_count(kept):
        draft.set("checkpoint.keep", kept, "save_total_limit")


def _carry_cadence(
    draft: Draft, key: str, steps: str, per_epoch: str, strategy: str, off: tuple[Any, ...]
) -> None:
    """Carry a number of steps, a share of all of them, or a number of times an epoch."""
    how, number, times = draft.value(strategy), draft.value(steps), draft.value(per_epoch)
    if is_number(times) and times > 0:
        draft.set(key, _epochs(1 / times), per_epoch)
    elif how == "epoch":
        draft.set(key, _epochs(1), strategy)
    elif how in off and strategy in draft.given:
        return
    elif is_count(number):
        draft.set(key, number, steps, strategy)
    elif is_number(number) and 0 < number < 1:
        if (total := draft.settings.get("steps")) is not None:
            draft.set(key, math.ceil(number * total), steps, strategy)
        elif (epochs := draft.settings.get("epochs")) is not None:
            draft.set(key, _epochs(number * epochs), steps, strategy)


def _epochs(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".") + (" epoch" if number == 1 else " epochs")
