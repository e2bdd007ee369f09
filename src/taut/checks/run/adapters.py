"""Adapters as they were asked for and as they sit on the modules; where none were asked for, that there are none.

Of an adapter that is gone on with, its own settings hold: what is asked is what its adapter_config.json says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from taut.checks.run.setting import Setting, listed
from taut.checks.session import Session
from taut.config import home_path
from taut.io import files
from taut.models import architecture
from taut.models.noise import KeyedDropout

INNER = {"base_layer", "lora_A", "lora_B", "lora_dropout", "original_module", "modules_to_save"}
"""Parts of names inside what peft wraps."""
OWN = ("lora_", "modules_to_save", "trainable_tokens")
"""What a parameter's name has in it where adapters brought it along."""


def adapters(session: Session) -> Iterator[Setting]:
    """Targets, rank, scale, dropout, and that nothing but the adapters trains."""
    config = session.run.lora
    modules = dict(session.model.named_modules())
    adapted: dict[str, Any] = {n: m for n, m in modules.items() if hasattr(m, "lora_A")}
    if not config.is_on:
        yield Setting("lora.rank", "no adapters", f"{len(adapted) or 'no'} adapters")
        return
    asked = _asked(session)
    wanted = _targets(session, modules, adapted, asked["targets"])
    yield Setting("lora.targets", f"{len(wanted)} modules", _reached(wanted, adapted))
    found = list(adapted.values())
    name = found[0].active_adapters[0] if found else ""
    ranks = listed(_rank(module, name) for module in found)
    yield Setting("lora.rank", listed([asked["rank"]]), ranks)
    scale = asked["alpha"] / (math.sqrt(asked["rank"]) if asked["rslora"] else asked["rank"])
    yield Setting(
        "lora.alpha",
        f"a scale of {listed([round(scale, 6)])}",
        f"a scale of {listed(round(float(m.scaling[name]), 6) for m in found)}",
    )
    yield Setting(
        "lora.dora", str(asked["dora"]), listed(name in m.lora_magnitude_vector for m in found)
    )
    yield Setting(
        "lora.dropout", listed([asked["dropout"]]), listed(_dropout(m, name) for m in found)
    )
    yield from _saved(session, asked["modules_to_save"])
    others = [n for n, p in session.scorer.model.named_parameters() if p.requires_grad]
    stray = [n for n in others if not any(own in n for own in OWN)]
    yield Setting(
        "the model below the adapters", "frozen", f"{stray[0]} trains" if stray else "frozen"
    )


def _asked(session: Session) -> dict[str, Any]:
    """What the run asks for, or the adapter that it goes on with."""
    config = session.run.lora
    if config.adapter is None:
        return {
            "rank": config.rank,
            "alpha": float(2 * config.rank if config.alpha is None else config.alpha),
            "rslora": config.rslora,
            "dora": config.dora,
            "dropout": config.dropout,
            "targets": config.targets,
            "modules_to_save": config.modules_to_save,
        }
    path = home_path(config.adapter) / "adapter_config.json"
    saved = files.read_json(path)
    return {
        "rank": saved["r"],
        "alpha": float(saved["lora_alpha"]),
        "rslora": saved.get("use_rslora", False),
        "dora": saved.get("use_dora", False),
        "dropout": float(saved.get("lora_dropout") or 0.0) if session.run.MAY_BE_NOISY else 0.0,
        "targets": saved["target_modules"],
        "modules_to_save": saved.get("modules_to_save") or [],
    }


def _targets(
    session: Session, modules: Mapping[str, nn.Module], adapted: Mapping[str, Any], asked: Any
) -> set[str]:
    """The names of the modules that were to be adapted."""
    if isinstance(asked, str) and asked != "all-linear":  # peft's regular expression
        return set(adapted)
    head: Any = session.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and not INNER & set(name.split("."))
    }
    every = {name for name in linear | set(adapted) if modules[name] is not head}
    if asked == "all-linear":
        named = ["language_model"] if architecture.has_parts(session.scorer.model) else ["*"]
        whole = {name for name in every if hasattr(modules[name], "modules_to_save")}
        return _meant(session, every - whole, named)
    if (
        session.run.lora.adapter is not None
    ):  # peft's list, whose entries are ends of names and never patterns
        return {name for name in every if any(_ends(name, target) for target in asked)}
    return _meant(session, every, asked)


def _meant(session: Session, names: set[str], targets: Sequence[str]) -> set[str]:
    """Those that a target means: a part or a pattern, else the end of a name."""
    found: set[str] = set()
    for target in targets:
        if target in architecture.WORDS or any(sign in target for sign in "*?[/"):
            found |= set(
                architecture.matching(session.scorer.model, target, sorted(names), "lora.targets")
            )
        else:
            found |= {name for name in names if _ends(name, target)}
    return found


def _reached(wanted: set[str], adapted: Mapping[str, Any]) -> str:
    missing, more = sorted(wanted - set(adapted)), sorted(set(adapted) - wanted)
    said = f"{len(adapted)} modules"
    if missing:
        said += f", not {missing[0]}"
    return f"{said}, also {more[0]}" if more else said


def _rank(module: Any, name: str) -> float:
    """Of one matrix's adapter: peft stacks those of all experts, and gives two fused matrices the rank of both."""
    matrices = getattr(module, "num_experts", 1)
    if getattr(module, "parameter_name", "") == "gate_up_proj":
        matrices *= 2
    return float(module.lora_A[name].weight.shape[0] / matrices)


def _dropout(module: Any, name: str) -> float | str:
    """What drops an adapter's input: keyed per sample, or nothing."""
    found = module.lora_dropout[name]
    if isinstance(found, nn.Dropout) and found.p:
        return f"{found.p:g}, drawn by place"
    return found.p if isinstance(found, KeyedDropout) else 0.0


def _saved(session: Session, names: list[str]) -> Iterator[Setting]:
    trained = [n for n, p in session.scorer.model.named_parameters() if p.requires_grad]
    for name in names:
        is_part = name == "projector" and architecture.has_parts(session.scorer.model)
        is_there = any(
            architecture.part_of(one) == name if is_part else f"{name}.modules_to_save" in one
            for one in trained
            if ".modules_to_save" in one
        )
        yield Setting(
            f"lora.modules_to_save {name}", "trained", "trained" if is_there else "frozen"
        )


def _ends(full_name: str, name: str) -> bool:
    return full_name == name or full_name.endswith(f".{name}")
