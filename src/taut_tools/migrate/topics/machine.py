"""Carry sharding and offloading, and reports."""

from __future__ import annotations

import json

from taut_tools.migrate.dialects import find_near
from taut_tools.migrate.draft import (
    Draft,
    is_off,
    words_of,
)
from taut_tools.migrate.recipe import read_text

OFFLOADING = {"offload", "zero2_offload", "zero3_offload"}
SHARDING = {f"zero{stage}" for stage in range(4)} | {
    "fsdp2", "full_shard", "shard_grad_op", "hybrid_shard", "auto_wrap", "true", "no_shard",
}  # fmt: skip
REPORTS = {
    "tensorboard": (),
    "wandb": ("wandb_project", "$WANDB_PROJECT", "project"),
    "trackio": ("$TRACKIO_PROJECT", "project"),
}
"""Options that name the project, for the services of ``report_to`` that have a key of taut."""


def carry_distribution(draft: Draft) -> None:
    """Carry offloading by deepspeed and fsdp; their sharding does not change what is learned."""
    for name in ("deepspeed", "fsdp", "teacher_deepspeed"):
        value = draft.value(name)
        words = set(map(str, value)) if isinstance(value, list) else set(str(value).lower().split())
        if is_off(value) or words <= SHARDING:
            draft.machine("taut shards over all processes (FSDP2)", name)
        elif words <= SHARDING | OFFLOADING and name != "teacher_deepspeed":
            draft.set("parallel.cpu_offload", True, name)
        elif isinstance(value, str) and value.endswith((".json", ".yaml", ".yml")):
            _carry_deepspeed_file(draft, name, value)
        else:
            draft.lacking(name, "its settings are not known", changes=False)
    for key in ("offload_params", "fsdp_offload_params", "cpu_offload"):
        if draft.value(f"fsdp_config.{key}") is True:
            draft.set("parallel.cpu_offload", True, f"fsdp_config.{key}")
    if draft.value("cpu_offload"):
        draft.set("parallel.cpu_offload", True, "cpu_offload")
    draft.off("cpu_offload")
    offload = draft.value("activation_offloading")
    if offload and str(offload).lower() not in ("false", "none"):
        draft.set("activation_checkpointing", "offload", "activation_offloading")
    draft.off("activation_offloading")
    if draft.settings.get("parallel.cpu_offload") and draft.settings.get("optim.name") == "muon":
        draft.settings.pop("parallel.cpu_offload")
        draft.assumed.append("Muon is not computed on the host's processor: no CPU offload")


def _carry_deepspeed_file(draft: Draft, name: str, value: str) -> None:
    """Carry the place of weights and moments in a file of deepspeed; its other settings change nothing."""
    path = find_near(draft.facts.directory / "recipe", value)
    try:
        content = json.loads(read_text(path)) if path is not None else None
    except json.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        draft.lacking(
            name,
            f"{value} is not here: whether it keeps weights in the host's memory",
            changes=False,
        )
        return
    stage = content.get("zero_optimization") or {}
    devices = [
        (stage.get(key) or {}).get("device", "none")
        for key in ("offload_optimizer", "offload_param")
    ]
    if any(device not in ("none", None) for device in devices):
        draft.set("parallel.cpu_offload", True, name)
    else:
        draft.machine("taut shards over all processes (FSDP2)", name)
    odd = [
        key
        for key in ("optimizer", "scheduler")
        if (content.get(key) or {}).get("params") and "auto" not in str(content[key])
    ]
    if odd:
        draft.lacking(name, f"{value} sets its own {' and '.join(odd)}")


def carry_reports(draft: Draft) -> None:
    """Carry TensorBoard, Weights & Biases and trackio; other services need a class of the user's."""
    if draft.framework == "openrlhf":
        project = draft.value("logger.wandb.project", f"openrlhf_train_{draft.recipe.method}")
        if draft.value("logger.wandb.key"):
            draft.set("log.wandb", str(project), "logger.wandb.key", "logger.wandb.project")
        if draft.value("logger.tensorboard_dir"):
            draft.set("log.tensorboard", True, "logger.tensorboard_dir")
        return
    services = [name.lower() for name in words_of(draft.value("report_to"))]
    if draft.framework == "axolotl":
        services += ["wandb"] if draft.is_on("wandb_project") else []
        services += ["tensorboard"] if draft.value("use_tensorboard") else []
    for service in dict.fromkeys(name for name in services if name in REPORTS):
        projects = [name for name in REPORTS[service] if isinstance(draft.value(name), str)]
        used = [name for name in ("report_to", *projects[:1]) if name in draft.given]
        default = "megatron-swift" if draft.framework == "megatron" else "huggingface"
        project = draft.value(projects[0]) if projects else default
        value = True if service == "tensorboard" else project
        draft.set(f"log.{service}", value, *used)
    others = [name for name in services if name not in (*REPORTS, "none", "all")]
    if others:
        key = draft.given["report_to"].key if "report_to" in draft.given else ""
        before = draft.outcomes.pop(key, None)
        why = f"{', '.join(others)}: a class of your own, log.sinks (docs/runs.md)"
        keys = before.keys if before is not None else ()
        draft.machine("; ".join([*keys, why]), "report_to")
