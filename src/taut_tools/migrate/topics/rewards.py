"""Carry the rewards of a recipe: the frameworks' rewards by name, reward models, servers, and the user's functions."""

from __future__ import annotations

import re
from typing import Any

from taut_tools.migrate.dialects import find_near
from taut_tools.migrate.draft import Draft, is_number, is_off, words_of
from taut_tools.migrate.recipe import read_text

Spec = dict[str, Any]
MATH: Spec = {"name": "math"}
FORMAT: Spec = {"name": "format"}
NAMED: dict[str, Spec] = {
    "accuracy": MATH,
    "accuracy_reward": MATH,
    "reasoning_accuracy_reward": {"name": "math", "after": "</think>"},
    "format": FORMAT,
    "think_format_reward": {
        "name": "regex",
        "options": {"pattern": r"(?s)^(?!.*<think>.*<think>)<think>(?:(?!</think>).)*</think>.*$"},
        "label": "think_format_reward",
    },
    "tag_count": {"name": "format", "label": "tag_count", "options": {"partial": True}},
    "code": {"name": "code", "options": {"score": "share"}},
    "binary_code": {"name": "code"},
    "code_format": {
        "name": "regex",
        "label": "code_format",
        "options": {
            "pattern": r"(?s)^<think>\n.*?\n</think>\n<answer>\n.*?```.*?```.*?\n</answer>$"
        },
    },
}
"""Rewards of taut, by their names in TRL, open-r1 and ms-swift."""
COSINE = {
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
}
"""Options of ms-swift's cosine reward with their defaults."""
NEAR = {
    "tag_count": "the form with partial scores is counted by tags, not by lines",
    "accuracy": "answers are read by taut's math, which takes more notations than the framework's",
    "accuracy_reward": "answers are read by taut's math, which takes more notations than the framework's",
}


def carry_rewards(draft: Draft) -> None:
    """Carry rewards with their weights."""
    # Functions, by name, from plugins, or from files.
    value = draft.value("reward_funcs")
    names = value if isinstance(value, list) else [] if is_off(value) else [value]
    specs, own = list[Spec](), list[str]()
    plugins = _plugins(draft)
    for name in map(str, names):
        spec = _named(draft, name.rpartition(".")[2] if name.startswith("trl.") else name)
        if ".py:" in name:
            spec = {"name": name}
        if spec is None and name in plugins:
            spec = {"name": plugins[name], "label": name}
            draft.carried(["external_plugins"], ["rewards"], "rewards: FILE.py:CLASS")
            draft.assumed.append(
                f"{plugins[name]} judges each answer by itself; where its file imports ms-swift, that is installed"
            )
        if spec is None and (file := _file_of(draft, name)) is not None:
            spec = {"name": file}
            draft.assumed.append(
                f"{file} judges each answer by itself; what its file imports is on PYTHONPATH"
            )
        if spec is None:
            own.append(name)
            spec = {"name": f"own.py:{name.rpartition('.')[2]}"}
        specs.append(dict(spec))
    if own and not draft.is_unknown("reward_funcs"):
        draft.lacking(
            "reward_funcs",
            f"{', '.join(own)}: functions of the recipe's own; write them as taut calls them "
            "(docs/rewards.md), in own.py",
        )
    # Reward models and servers.
    sources = ["reward_funcs"]
    models, url = draft.value("reward_model"), draft.value("reward.remote_url")
    if not is_off(models) and not is_off(url):
        draft.needless("not loaded where reward.remote_url is set", "reward_model")
    elif not is_off(models):
        models = models if isinstance(models, list) else str(models).split(",")
        judges = [
            {"name": "reward_model", "options": {"model": str(model).strip()}} for model in models
        ]
        is_first = draft.framework in ("trl", "open-r1")
        specs = judges + specs if is_first else specs + judges
        sources.append("reward_model")
    if not is_off(url):
        url = url[0] if isinstance(url, list) and len(url) == 1 else url
        if isinstance(url, str) and url.startswith("http"):
            specs.append(
                {"name": "reward_server", "options": {"url": url.removesuffix("/get_reward")}}
            )
            draft.assumed.append(f"the reward model at {url} is served by `taut serve-reward`")
            sources.append("reward.remote_url")
        elif isinstance(url, str) and url.endswith(".py"):
            specs.append({"name": f"{url}:reward_func"})
            draft.assumed.append(
                f"reward_func of {url} gets the answer without the token that ends it, and of a prompt of messages "
                "their texts; where its file imports openrlhf, that is installed"
            )
            sources.append("reward.remote_url")
        else:
            draft.lacking(
                "reward.remote_url",
                "several servers, or no address; taut asks one server, and calls FILE.py:reward_func",
            )
            draft.leave_open("rewards", "reward.remote_url is neither one address nor a file")
    # Weights and labels.
    weights = draft.value("reward_weights")
    weights = weights if isinstance(weights, list) else [] if weights is None else [weights]
    if weights and len(weights) == len(specs):
        specs = [
            spec | ({} if weight == 1 else {"weight": weight})
            for spec, weight in zip(specs, weights, strict=True)
        ]
        sources.append("reward_weights")
    elif weights:
        draft.lacking("reward_weights", f"{len(weights)} weights of {len(specs)} rewards")
    penalty = draft.value("missing_eos_penalty")
    if draft.method == "online_dpo" and is_number(penalty):  # taken off where an answer has no end
        specs.append({"name": "stop", "weight": penalty})
        sources.append("missing_eos_penalty")
    if len({str(spec.get("label", spec["name"])) for spec in specs}) < len(specs):
        specs = [
            spec | {"label": f"{spec['name'].rpartition(':')[2]}_{at}"}
            for at, spec in enumerate(specs, 1)
        ]
    if specs:
        plain = [spec["name"] if set(spec) == {"name"} else spec for spec in specs]
        draft.set("rewards", plain, *sources)
    elif not draft.settings.get("distill.teacher") and not draft.settings.get("distill.url"):
        draft.leave_open("rewards", "the recipe names no reward")
        draft.lacking(
            "reward_funcs", "no reward is named: what an answer is worth is in the recipe's code"
        )


def _plugins(draft: Draft) -> dict[str, str]:
    """Rewards that plugins of ms-swift register by ``orms["NAME"] = CLASS``, as FILE.py:CLASS by name."""
    found = {}
    for file in words_of(draft.value("external_plugins")):
        path = find_near(draft.facts.directory / "recipe", file)
        if path is None or path.suffix != ".py":
            continue
        text = read_text(path)
        for variable in draft.recipe.environment:
            if re.search(
                rf"environ.*[\"']{re.escape(variable)}[\"']|getenv\([\"']{re.escape(variable)}",
                text,
            ):
                draft.needless(f"{file} reads it: set it for the run", f"${variable}")
        for name, kind in re.findall(r"""(?m)^orms\[["'](\w+)["']\] *= *(\w+)""", text):
            if re.search(rf"(?m)^class {kind}\b", text):
                found[name] = f"{file}:{kind}"
    return found


def _file_of(draft: Draft, name: str) -> str | None:
    """FILE.py:function for an import path ``package.module.function`` whose file is here, else None."""
    module, _, function = name.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    path = find_near(draft.facts.directory / "recipe", file) if module else None
    if path is None or not re.search(
        rf"(?m)^(async )?(def|class) {re.escape(function)}\b", read_text(path)
    ):
        return None
    return f"{file}:{function}"


def _named(draft: Draft, name: str) -> Spec | None:
    """taut's reward for a framework's name, or None for a function of the user's own."""
    value = draft.value
    length = value("max_completion_length")
    if name in NEAR:
        draft.assumed.append(f"reward {name}: {NEAR[name]}")
    if draft.framework in ("swift", "megatron"):
        if name == "cosine":
            draft.carried((*COSINE, "cosine_max_len"), ["rewards"])
            *wrong, shortest, longest = (value(key, default) for key, default in COSINE.items())
            right, most = [shortest, longest], value("cosine_max_len") or length
            options = {
                "max_tokens": most,
                "judge": "math",
                "right": right,
                "wrong": wrong,
                "exceed": wrong[1],
            }
            return {"name": "length_cosine", "options": options}
        if name == "repetition":
            draft.carried(("repetition_n_grams", "repetition_max_penalty"), ["rewards"])
            worst = value("repetition_max_penalty", -1.0)
            weight = {} if worst == -1 else {"weight": -worst}
            return {"name": "repetition", "options": {"n": value("repetition_n_grams", 3)}} | weight
        if name == "soft_overlong":
            draft.carried(("soft_max_length", "soft_cache_length"), ["rewards"])
            most = value("soft_max_length") or length
            return {
                "name": "length_overlong",
                "options": {"max_tokens": most, "buffer": value("soft_cache_length")},
            }
    if name == "get_soft_overlong_punishment":
        return {
            "name": "length_overlong",
            "options": {
                "max_tokens": value("max_completion_len", length),
                "buffer": value("soft_punish_cache", 1),
            },
        }
    return NAMED.get(name)
