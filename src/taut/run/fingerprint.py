"""The identity of a run, and what a resume may change.

A checkpoint holds the identity of its run: the configuration, hashes of model, adapter, tokenizer, template and each
source of data, and the environment. On resume each difference is of one of five kinds:

- it changes what is learned (the data, the model, the loss, AdamW's betas): refused, by key, with both values;
- it changes the learning rate of the remaining steps (``may_change.schedule``), a pure function of the step without
  state: applied from the next step on, and logged with both values;
- it is the address of a reward's server (``ADDRESS``): applied, and logged with both values. Whether the same model
  answers there is not checked, as with ``rollout.urls``;
- it changes numbers by rounding only (threads, ranks, the libraries of products, the token budget): equality bit for
  bit becomes equality within ``TOLERANCE``, and the log says so;
- it does not affect the steps (``may_change.freely``), or only their number (steps, epochs; a schedule follows them).

A method defines which keys are of which kind (``RunConfig.may_change``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from taut.config import home_path, to_dict, user_path
from taut.data.dataset import DataConfig
from taut.data.top_logprobs import WithTeacher
from taut.errors import ConfigError, ModelError
from taut.io import files
from taut.methods import METHODS
from taut.methods.aux_models import load_config_of
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.models import products
from taut.models.precision import resolve_dtype
from taut.rewards.registry import REWARDS, models_of
from taut.train.distributed import Ranks

ADDRESS = ("url", "api_key_env")
"""Options of a reward that name its server and its key: a resume may change them, and the log says so."""
PARTS_WITH_NAMES = (
    "model",
    "adapter",
    "reference",
    "critic",
    "reward model",
    "code",
    "data",
    "environment",
)
"""Parts of an identity whose keys name files or settings."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of a step's loss from the uninterrupted run's, by compute dtype, after such a change."""
RENDERING = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja")
"""Files of a tokenizer and its template."""
SHOWN = 5
"""Differences in one message."""


class Differences(NamedTuple):
    """The differences between two identities, as text, by what follows from them."""

    refused: list[str]
    rounding: list[str]
    schedule: list[str]


def identity_of(run: RunConfig, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """The identity of a run, as JSON-able values; every rank calls it."""
    adapter = [run.lora.adapter] if run.lora.adapter else []
    is_cuda = ranks.device.type == "cuda"
    return {
        "config": _settings(run),
        "dtype": str(resolve_dtype(run.dtype, ranks.device).dtype).removeprefix("torch."),
        "model": _hashes(run.model, "model", inputs.config, ranks, has_code=run.trust_remote_code),
        "adapter": {path: _hashes(path, "lora.adapter", None, ranks) for path in adapter},
        "tokenizer": inputs.renderer.template.content(),
        "template": _digest(inputs.renderer.template.template or ""),
        "data": {
            part.path: {"content": part.shards.digest, "weight": part.weight}
            for part in inputs.train.parts
        },
        "environment": {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "ranks": ranks.size,
            "threads": torch.get_num_threads(),
            "products": products.active().name,
            "processor": torch.cuda.get_device_name(ranks.device)
            if is_cuda
            else torch.backends.cpu.get_cpu_capability(),
        },
        **_others(run, inputs, ranks),
    }


def products_in(identity: Mapping[str, Any]) -> str | None:
    """The libraries of products in an identity; None: it is of an older version, or there was nothing to choose."""
    name = identity.get("environment", {}).get("products")
    return name if isinstance(name, str) else None


def _others(run: RunConfig, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """The identities of the user's code, the reward models and the auxiliary models, where a run has them."""
    parts: dict[str, Any] = {}
    if run.generates:
        parts["code"] = {str(path): _digest(_read_text(path)) for path in run.user_code()}
    if isinstance(run, OnlineMethod) and (recording := run.recording) is not None:
        parts["rollouts"] = recording.digest
    for label, judge in models_of(run.training_rewards).items():
        # Its scores depend on its tokenizer and template as well.
        key, has_code = "rewards.options.model", judge.trust_remote_code
        config = load_config_of(judge.model, key, has_code)
        hashes = _hashes(judge.model, key, config, ranks, has_code=has_code, more=RENDERING)
        if judge.template is not None:
            hashes["template"] = _digest(_read_text(home_path(judge.template)))
        parts.setdefault("reward model", {})[label] = hashes
    for part, key, path in run.models().directories:
        config = load_config_of(path, key, run.trust_remote_code)
        parts[part] = _hashes(path, key, config, ranks)
    if isinstance(inputs.train, WithTeacher):
        parts["top_logprobs"] = inputs.train.top_logprobs.digest
    return parts


def _read_text(path: Path) -> str:
    """The content of a file of the user's."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"found {path} named as code of a reward, an advantage, a loss, an environment or a tool, or as a "
            f"template, which cannot be read: {error}; expected a text file; correct the path"
        ) from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Differences:
    """The differences between two identities."""
    result, may_change = Differences([], [], []), _method(new).may_change
    for key, before, now in _leaves(old, new, ""):
        if before == now:
            continue
        part, _, name = key.partition(".")
        title, setting = key, name if part == "config" else ""
        if part == "config":
            title = name
        elif part in PARTS_WITH_NAMES and name:
            title = f"{part} {name.removesuffix('.content')}"
        what = "other content, " if _is_hash(before) and _is_hash(now) else ""
        text = f"{title}: {what}{_shown(before)} then, {_shown(now)} now"
        if name == "commit":
            text += f" (NAME@{before} names that commit of the hub's)"
        if part == "environment" or _is_among(setting, may_change.rounding):
            result.rounding.append(text)
        elif _is_among(setting, may_change.schedule):
            result.schedule.append(text)
        else:
            result.refused.append(text)
    return result


def _method(identity: Mapping[str, Any]) -> type[RunConfig]:
    """The class of the run with this identity."""
    return METHODS[identity.get("config", {}).get("method", "sft")]


def _is_among(setting: str, keys: Sequence[str]) -> bool:
    """Whether a setting is one of the keys, or lies in one."""
    return any(setting == key or setting.startswith(f"{key}.") for key in keys)


def require_same(old: Mapping[str, Any], new: Mapping[str, Any], where: Path) -> Differences:
    """The differences that a resume may have. Raises ConfigError where the run at ``where`` is another one."""
    method = _method(new)
    common = {field.name for field in fields(RunConfig)}
    defaults = _settings(RunConfig(model="", data=DataConfig())) | {
        field.name: to_dict(field.default)
        for field in fields(method)
        if field.name not in common and is_dataclass(field.default)
    }
    before, now = _without_addresses(old["config"]), _without_addresses(new["config"])
    before = _with_defaults(before, now, defaults)
    result = differences({**old, "config": before}, {**new, "config": now})
    if result.refused:
        more = len(result.refused) - SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ConfigError(
            f"resume=true: {where} belongs to another run: {'; '.join(result.refused[:SHOWN])}{rest}; resume with "
            "what it was started with (docs/resume.md lists what may change), or start again in another out"
        )
    return result


def moved_servers(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The rewards whose server has another address than before, as text."""
    before, now = (
        {
            spec["label"] or spec["name"]: spec["options"]["url"]
            for spec in identity["config"].get("rewards", ())
            if _has_server(spec)
        }
        for identity in (old, new)
    )
    return [
        f"reward {label}: {before[label]} then, {url} now"
        for label, url in now.items()
        if before.get(label, url) != url
    ]


def _without_addresses(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the addresses and keys of the servers of rewards."""
    if not isinstance(config.get("rewards"), Sequence) or isinstance(config["rewards"], str):
        return dict(config)
    rewards = [
        {**spec, "options": {k: v for k, v in spec["options"].items() if k not in ADDRESS}}
        if _has_server(spec)
        else spec
        for spec in config["rewards"]
    ]
    return {**config, "rewards": rewards}


def _has_server(spec: Any) -> bool:
    """Whether a reward is computed by a server."""
    if not isinstance(spec, Mapping) or spec["name"] not in REWARDS:
        return False
    return REWARDS[spec["name"]].runs == "remote"


def _settings(run: RunConfig) -> dict[str, Any]:
    """The configuration without the keys that a resume may change freely."""
    config = run.resolved()
    for key in run.may_change.freely:
        table, _, name = key.rpartition(".")
        if not table or table in config:  # some tables belong to one method
            (config[table] if table else config).pop(name, None)
    for source in config.get("distill", {}).get("teachers", {}).values():
        source.clear()  # as of a single teacher: directories are hashed, addresses may change
    if "reference" in config:  # whether there is a file; its content has an identity of its own
        config["reference"]["file"] = config["reference"]["file"] is not None
    return config


def _with_defaults(before: Any, now: Any, defaults: Any) -> Any:
    """``before``, with the defaults of keys that did not exist then."""
    if not all(isinstance(value, Mapping) for value in (before, now, defaults)):
        return before
    new = {key: defaults[key] for key in now if key in defaults and key not in before}
    return new | {
        key: _with_defaults(old, now.get(key), defaults.get(key)) for key, old in before.items()
    }


def _leaves(old: Any, new: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every leaf of either tree."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [(prefix, old, new)]
    leaves = []
    for key in dict.fromkeys([*old, *new]):
        leaves += _leaves(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):  # a file that only one of the two has, or a whole model
        value = value.get("content", value)
    if isinstance(value, Mapping):
        return f"{len(value)} files"
    if _is_hash(value):
        return f"{value[:12]}..."
    return "none" if value is None else repr(value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _hashes(
    path: str,
    key: str,
    config: PreTrainedConfig | None,
    ranks: Ranks,
    *,
    has_code: bool = False,
    more: Sequence[str] = (),
) -> dict[str, str]:
    """File name -> SHA-256 of a model's or adapter's files; the commit of a hub name. The ranks share the work.

    ``has_code``: whether Python code that comes with the model is run. ``more``: patterns of further files.
    """
    directory = user_path(path, key)
    if not directory.is_dir():
        return {"commit": str(getattr(config, "_commit_hash", None))}
    patterns = ("*.safetensors", "*.bin", "*config.json", *(["*.py"] if has_code else []), *more)
    every = list(dict.fromkeys(file for kind in patterns for file in sorted(directory.glob(kind))))
    mine = every[ranks.rank :: ranks.size]
    try:
        with ThreadPoolExecutor(4) as threads:
            digests = list(threads.map(files.digest, mine))
    except OSError as error:
        raise ModelError(
            f"{key}: {error.filename or path} cannot be read: {error.strerror or error}; expected the files of a "
            "model or adapter"
        ) from error
    by_name = dict(zip([file.name for file in mine], digests, strict=True))
    return {name: digest for of_rank in ranks.gather(by_name) for name, digest in of_rank.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
