"""Carry the samples of a step, the steps of a run, the learning rate and the optimizer."""

from __future__ import annotations

import math
from typing import Any

from taut_tools.migrate.draft import (
    ADAMW_8BIT,
    POLICY_METHODS,
    Draft,
    is_count,
    is_number,
)

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def carry_batch(draft: Draft) -> None:
    """Carry the samples per step: a product with the number of processes, unless an option states the whole batch."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "sequence_parallel_size")
    number, stated_by = draft.processes.number, draft.processes.stated_by
    if draft.value("global_batch_size") is not None or draft.is_unknown("global_batch_size"):
        rows = draft.value("global_batch_size")
        used: tuple[str, ...] = ("global_batch_size",)
        draft.needless("the whole batch is given", *(name for name in names[:2]))
        why = ""
    else:
        if draft.processes.is_assumed:
            draft.assumed.append(
                "1 process: the recipe does not say how many; --processes N says it"
            )
        each, times, shards = (draft.value(name) for name in names)
        shards = 1 if shards is None else shards
        for name, value in zip(names, (each, times, shards), strict=True):
            if name in draft.given and not draft.is_unknown(name) and not is_count(value):
                draft.lacking(name, "a whole number above 0 is expected")
        whole = draft.value("batch_size")
        if draft.framework == "axolotl" and is_count(whole) and names[1] not in draft.given:
            names = (names[0], "batch_size", names[2])
            times = max(1, whole // each) if is_count(each) else None
        elif draft.framework == "axolotl":
            draft.needless("gradient_accumulation_steps says it", "batch_size")
        if times is None and names[1] not in draft.given and is_count(each) and number:
            times = max(1, math.ceil(16 / each / number))
        used = (*names[:2], *sorted(stated_by))
        is_known = all(map(is_count, (each, times, shards, number))) and not draft.is_unknown(
            *names
        )
        if number is None:
            why = f"how many processes is not known ({draft.processes.reason}): --processes N"
            for name in stated_by:
                draft.lacking(name, why)
        if not is_known:
            draft.leave_open("batch.samples_per_step", "a factor of the batch is not known")
            draft.carried(names[:2], ["batch.samples_per_step"])
            _carry_packing(draft, None, used)
            return
        assert number is not None
        rows = each * times * max(1, number // shards)
        why = f"batch.samples_per_step: {each} x {times} x {number} processes"
    if not is_count(rows):
        draft.leave_open("batch.samples_per_step", "a factor of the batch is not known")
        return
    if draft.method in POLICY_METHODS:
        rows = _prompts_of(draft, rows)
    draft.set("batch.samples_per_step", rows, *used, why=why)
    _carry_packing(draft, rows, used)


def _prompts_of(draft: Draft, completions: int) -> int:
    """The prompts of a step, from the framework's number of completions; carry the steps of a rollout."""
    n, is_openrlhf = draft.value("num_generations") or 1, draft.framework == "openrlhf"
    if not is_count(n):
        draft.lacking("num_generations", "a whole number above 0 is expected")
        return completions
    minibatches: float = 1.0
    names: tuple[str, ...] = ()
    if draft.method == "ppo" and not is_openrlhf:
        minibatches = draft.value("num_mini_batches") or 1
        if not is_count(minibatches):
            draft.lacking("num_mini_batches", "a whole number above 0 is expected")
            return completions
        draft.set("rollout.minibatches", minibatches, "num_mini_batches")
        return max(1, completions // minibatches)
    if draft.method == "online_dpo" or (draft.method == "gkd" and n == 1):
        draft.needless("the batch says it", "steps_per_generation", "generation_batch_size")
        return completions
    if is_openrlhf:
        rollout = draft.value("rollout_batch_size") or 0
        minibatches, names = rollout * n / completions, ("rollout_batch_size",)
    elif is_count(size := draft.value("generation_batch_size")):
        minibatches, names = size / completions, ("generation_batch_size",)
    elif is_count(times := draft.value("steps_per_generation")):
        per_step = draft.value("gradient_accumulation_steps") or 1
        minibatches = times if draft.framework == "megatron" else times / per_step
        names = ("steps_per_generation",)
    else:
        draft.needless("the batch says it", "steps_per_generation", "generation_batch_size")
    if minibatches != int(minibatches) or minibatches < 1:
        name = names[0] if names else "num_generations"
        why = f"a rollout is {minibatches:g} steps: expected a whole number"
        draft.lacking(name, why)
        minibatches = max(1, math.ceil(minibatches))
    draft.set("rollout.minibatches", int(minibatches), *names)
    if completions % n:
        near = max(1, round(completions / n))
        why = (
            f"{completions} completions a step are no whole number of groups of {n}, which are cut across steps there: "
            f"{near} prompts a step here"
        )
        draft.lacking("num_generations", why)
        return near
    return completions // n


def _carry_packing(draft: Draft, rows: int | None, used: tuple[str, ...]) -> None:
    """Carry packing: a framework that packs counts packs in a step, for which taut has the number of their tokens."""
    extra = ("packing_length", "packing_strategy")
    if draft.framework == "llamafactory" and draft.recipe.method == "pt" and draft.is_on("packing"):
        why = "documents are joined and cut, and see each other, unless packing is false; taut cuts none"
        draft.lacking("packing", why)
        draft.off("neat_packing")
        return
    option, other = "packing", "neat_packing"
    if draft.is_on(other):
        option, other = other, option
    draft.needless("packing is always on and exact", other)
    if not draft.is_on(option) and not draft.is_unknown(option):
        draft.needless("packing is always on and exact", option, *extra)
        return
    if draft.method in POLICY_METHODS or (
        draft.framework == "llamafactory" and draft.method != "sft"
    ):
        draft.needless("what is generated is counted in samples", "packing", *extra)
        return
    name = "packing_length" if draft.is_on("packing_length") else "max_length"
    length = draft.value(name)
    if rows is not None and is_count(length) and not draft.is_unknown(name, option):
        draft.settings.pop("batch.samples_per_step")
        why = f"batch.tokens_per_step: {rows} packs of {length} tokens"
        draft.set("batch.tokens_per_step", rows * length, *used, option, name, why=why)
        draft.assumed.append(
            f"a step has {rows * length} tokens, or as many less as the next sample has: {rows} packs of {length} "
            "tokens, which are seldom quite full"
        )
    else:
        packs = "an unknown number of packs" if rows is None else f"{rows} packs"
        why = (
            f"a step is {packs} of {length or name} tokens: batch.tokens_per_step is their product"
        )
        draft.lacking(option, why)
        draft.leave_open("batch.samples_per_step", why)
    draft.needless("reported with packing", "packing_length")
    if draft.value("packing_strategy") == "wrapped":
        draft.lacking("packing_strategy", "samples are joined and cut; taut cuts none")
    elif draft.value("packing_strategy") in ("bfd_split", "bfd-requeue"):
        draft.set("data.too_long", "split", "packing_strategy")
    else:
        draft.needless("packing is exact", "packing_strategy")


def carry_duration(draft: Draft) -> None:
    """Carry epochs or steps."""
    steps, names = draft.value("max_steps", -1), ("max_epochs", "num_train_epochs")
    episodes = draft.value("total_episodes")
    if draft.recipe.framework == "trl" and draft.method == "ppo" and is_count(episodes):
        rows, times = (
            draft.settings.get(key, 0) for key in ("batch.samples_per_step", "rollout.minibatches")
        )
        epochs = draft.value("num_ppo_epochs") or 1
        if is_count(rows) and is_count(times) and is_count(epochs):
            why = "steps: those of all passes over all rollouts"
            steps = math.ceil(episodes / (rows * times)) * times * epochs
            draft.set("steps", steps, "total_episodes", why=why)
            draft.needless("total_episodes holds", "max_steps", *names)
            return
    if draft.is_unknown("max_steps") or is_count(steps):
        draft.set("steps", steps, "max_steps")
        if draft.is_on("max_epochs"):
            draft.lacking(
                "max_epochs", "training ends at max_steps or max_epochs, whichever is first"
            )
        draft.needless("max_steps holds", *names)
        return
    draft.needless("off", "max_steps")
    for name in names:
        if draft.is_unknown(name) or draft.value(name) is not None:
            draft.set("epochs", draft.value(name), name)
            draft.needless("max_epochs holds", "num_train_epochs")
            return
    draft.lacking("num_train_epochs", "neither epochs nor steps are set")


def carry_schedule(draft: Draft) -> None:
    """Carry the learning rate, its schedule and warm-up."""
    rate = draft.value("learning_rate")
    if rate is None and draft.framework in ("swift", "megatron"):
        is_full = draft.value("tuner_type") == "full"
        rate = 1e-5 if is_full else 1e-4
    if rate is None and not draft.is_unknown("learning_rate"):
        draft.leave_open("optim.learning_rate", "the recipe does not say it")
        draft.lacking("learning_rate", "not set")
    else:
        draft.set("optim.learning_rate", rate, "learning_rate")
    name = "lr_scheduler_type"
    schedule = str(draft.value(name)).lower()
    if draft.is_unknown(name) or schedule in SCHEDULES:
        draft.set("optim.schedule", SCHEDULES.get(schedule), name)
    else:
        kinds = ", ".join(sorted(set(SCHEDULES.values())))
        draft.lacking(name, f"schedules are {kinds}")
        draft.leave_open("optim.schedule", f"{schedule} is none of {kinds}")
    _carry_lowest_rate(draft, schedule, rate)
    _carry_warmup(draft, schedule)


def _carry_lowest_rate(draft: Draft, schedule: str, rate: Any) -> None:
    key, is_min = "optim.min_learning_rate_ratio", schedule == "cosine_with_min_lr"
    draft.settings[key], draft.sources[key] = (
        0.0,
        f"what {draft.framework} does where nothing is set",
    )
    if "min_lr_ratio" in draft.defaults or draft.is_on("min_lr_ratio"):  # OpenRLHF, axolotl
        if is_min or draft.framework == "axolotl":
            draft.set(key, draft.value("min_lr_ratio"), "min_lr_ratio")
        draft.needless("of cosine_with_min_lr only", "min_lr_ratio")
    if "min_lr" in draft.defaults:  # Megatron
        lowest = draft.value("min_lr")
        if is_number(lowest) and is_number(rate) and rate and schedule != "constant":
            draft.set(key, float(f"{lowest / rate:.6g}"), "min_lr")
        draft.needless("a constant rate has no lowest one", "min_lr")
    prefix = "lr_scheduler_kwargs."
    for name in [name for name in draft.given if name.startswith(prefix)]:
        value = draft.value(name)
        if is_min and name == f"{prefix}min_lr_rate":
            draft.set(key, value, name)
        elif is_min and name == f"{prefix}min_lr" and is_number(value) and is_number(rate):
            draft.set(key, float(f"{value / rate:.6g}"), name)
        else:
            draft.lacking(name, "schedules take no other arguments")
    draft.off("lr_scheduler_kwargs")


def _carry_warmup(draft: Draft, schedule: str) -> None:
    """Carry warm-up; ``warmup_steps`` below 1 is a share of all steps."""
    names = ("warmup_steps", "warmup_ratio")
    if draft.is_unknown(*names):
        draft.set("optim.warmup_ratio", None, *names)
        return
    steps, ratio = (draft.value(name) or 0 for name in names)
    if schedule == "constant" and draft.framework != "megatron":
        draft.set("optim.warmup_ratio", 0.0)
        draft.needless("a constant schedule has no warm-up there", *names)
        return
    if steps and ratio and all(name in draft.given for name in names):
        draft.lacking(
            "warmup_ratio", "set as well as warmup_steps: which holds depends on the release"
        )
        ratio = 0
    amount = steps or ratio
    if amount >= 1:
        draft.set("optim.warmup_steps", int(amount), *names)
    else:
        draft.set("optim.warmup_ratio", float(amount), *names)


def carry_optimizer(draft: Draft) -> None:
    """Carry AdamW with its moments, or Muon."""
    betas = draft.value("adam_betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.set("optim.beta1", betas[0], "adam_betas")
        draft.set("optim.beta2", betas[1], "adam_betas")
    for name in ("optim", "optimizer"):
        value = str(draft.value(name)).lower()
        if value in ADAMW_8BIT:
            draft.set("optim.state", "int8", name)
        elif value in ("muon", "dist_muon"):
            is_full = draft.value("tuner_type", "full") == "full"
            if draft.framework == "swift" and is_full:
                draft.set("optim.name", "muon", name)
            else:
                why = "taut's Muon is in AdamW's scale, and not with adapters: optim.muon_learning_rate"
                draft.lacking(name, why)
        else:
            draft.carried([name], ["optim.name"])
    if draft.value("use_muon"):
        draft.set("optim.name", "muon", "use_muon")
    draft.off("use_muon")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        value = draft.value(name)
        if value in ("bf16", "bfloat16"):
            draft.set("optim.state", "bf16", name)
        elif value in (None, "fp32", "float32"):
            draft.needless("float32", name)
        else:
            draft.lacking(name, "moments are float32, bf16 or int8: optim.state")
