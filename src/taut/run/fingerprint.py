"""What makes a run the one it is, and what a resume may change.

A checkpoint holds the identity of its run: the configuration, hashes of model, adapter, tokenizer, template and each
source of data, and what it runs on. On resume each difference is of one of five kinds:

- it changes what is learned (the data, the model, the loss, AdamW's betas): refused, by key, with both values;
- it changes the learning rate of the steps to come (``may_change.schedule``), which is a pure function of the step and
  keeps no state: done, from the next step on, and the log says so, with both values;
- it is the address of a server that a reward asks (``ADDRESS``): done, and the log says so, with both. Whether the same
  model answers there is the user's word, as it is of ``rollout.url``;
- it changes numbers by rounding only (threads, ranks, the token budget): the promise of equality bit for bit becomes
  ``TOLERANCE``, and the log says so;
- it has no part in the steps (``may_change.freely``), or says only how many there are (steps, epochs; a schedule
  follows them).

Which keys are of which kind is for the method to say (``RunConfig.may_change``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
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
from taut.io import files as durable
from taut.methods import METHODS
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.models.load import load_config
from taut.models.precision import resolve_dtype
from taut.rewards.judge import RewardModel
from taut.rewards.registry import REWARDS
from taut.train.distributed import Ranks

ADDRESS = ("url", "key")
"""Options of a reward that say where its server is, and its key: a resume may change them, and the log says so."""
OF_A_KIND = (
    "model",
    "adapter",
    "reference",
    "critic",
    "reward model",
    "code",
    "data",
    "environment",
)
"""Parts of an identity that name what they hold."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of a step's loss from the uninterrupted run's, by compute dtype, after such a change."""
RENDERING = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja")
"""Files of a tokenizer and its template."""
SHOWN = 5
"""Differences that one message names."""


class Differences(NamedTuple):
    """What is not as it was."""

    refused: list[str]
    rounding: list[str]
    schedule: list[str]


def identity_of(run: RunConfig, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """The identity of a run, as JSON-able values; every rank calls it."""
    adapter = [run.lora.adapter] if run.lora.adapter else []
    model = _hashes(run.model, "model", inputs.config, ranks, has_code=run.trust_remote_code)
    return {
        "config": _settings(run),
        "dtype": str(resolve_dtype(run.dtype, ranks.device).dtype).removeprefix("torch."),
        "model": model,
        "adapter": {name: _hashes(name, "lora.adapter", None, ranks) for name in adapter},
        "tokenizer": inputs.renderer.template.content(),
        "template": _digest([inputs.renderer.template.template or ""]),
        "data": {
            part.path: {"content": part.entry.digest, "weight": part.weight}
            for part in inputs.train.parts
        },
        "environment": environment(ranks),
        **_others(run, inputs, ranks),
    }


def _others(run: RunConfig, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """Other models that take part, where there are any."""
    found: dict[str, Any] = {}
    if run.generates:
        found["code"] = {str(path): _digest([_code(path)]) for path in run.user_code()}
    for label, judge in run.reward_models().items():
        found.setdefault("reward model", {})[label] = _judge(judge, run, ranks)
    for part, key, path in run.models().directories:
        found[part] = _hashes(path, key, _config_of(path, key, run), ranks)
    if isinstance(inputs.train, WithTeacher):
        found["top_logprobs"] = inputs.train.said.digest
    return found


def _judge(judge: RewardModel, run: RunConfig, ranks: Ranks) -> dict[str, str]:
    """What a reward model in this process says depends on its tokenizer and template, too."""
    key, has_code = "rewards.options.model", judge.trust_remote_code
    try:
        config = load_config(judge.model, has_code)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    found = _hashes(judge.model, key, config, ranks, has_code=has_code, more=RENDERING)
    if judge.template is not None:
        found["template"] = _digest([_code(home_path(judge.template))])
    return found


def _code(path: Path) -> str:
    """What is in a file of the user's own."""
    try:
        return durable.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"found {path} named as code of a reward, an environment or a tool, or as a template, which cannot be "
            f"read: {error}; expected a text file; correct the path"
        ) from error


def _config_of(path: str, key: str, run: RunConfig) -> PreTrainedConfig:
    """The configuration of another model, which knows the commit of a hub name."""
    try:
        return load_config(path, run.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error


def environment(ranks: Ranks) -> dict[str, Any]:
    """What the same numbers, to the last bit, depend on beside the run itself."""
    is_cuda = ranks.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
        "processor": torch.cuda.get_device_name(ranks.device)
        if is_cuda
        else torch.backends.cpu.get_cpu_capability(),
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Differences:
    """What differs between two identities, in words."""
    found, may_change = Differences([], [], []), _method(new).may_change
    for key, was, now in _leaves(old, new, ""):
        if was == now:
            continue
        is_content = _is_hash(was) and _is_hash(now)
        what = "other content, " if is_content else ""
        text = f"{_told(key)}: {what}{_shown(was)} then, {_shown(now)} now"
        setting = key.removeprefix("config.") if key.startswith("config.") else None
        if _is_among(key, ("environment",)) or _is_among(setting, may_change.rounding):
            found.rounding.append(text)
        elif _is_among(setting, may_change.schedule):
            found.schedule.append(text)
        else:
            found.refused.append(text)
    return found


def _method(identity: Mapping[str, Any]) -> type[RunConfig]:
    """The class of the run with this identity."""
    return METHODS[identity.get("config", {}).get("method", "sft")]


def _is_among(key: str | None, keys: Sequence[str]) -> bool:
    return key is not None and any(key == one or key.startswith(f"{one}.") for one in keys)


def require_same(old: Mapping[str, Any], new: Mapping[str, Any], where: Path) -> Differences:
    """Raise ConfigError where a run cannot go on from what is at ``where``; else what differs all the same."""
    defaults = _settings(RunConfig(model="", data=DataConfig())) | _sections(_method(new))
    was, now = _without_addresses(old["config"]), _without_addresses(new["config"])
    found = differences({**old, "config": _filled(was, now, defaults)}, {**new, "config": now})
    if found.refused:
        more = len(found.refused) - SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ConfigError(
            f"resume=true: {where} belongs to another run: {'; '.join(found.refused[:SHOWN])}{rest}; resume with "
            "what it was started with (docs/resume.md lists what may change), or start anew in another out"
        )
    return found


def moved_servers(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The servers of rewards that have another address than they had, in words."""
    was, now = _addresses(old["config"]), _addresses(new["config"])
    return [
        f"reward {label}: {was[label]} then, {url} now"
        for label, url in now.items()
        if was.get(label, url) != url
    ]


def _addresses(config: Mapping[str, Any]) -> dict[str, str]:
    """Where each reward that asks a server finds it, by label."""
    return {
        spec["label"] or spec["name"]: spec["options"]["url"]
        for spec in config.get("rewards", ())
        if _asks_a_server(spec)
    }


def _without_addresses(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the addresses and keys of the servers that rewards ask."""
    if not isinstance(config.get("rewards"), Sequence) or isinstance(config["rewards"], str):
        return dict(config)
    rewards = [
        {**spec, "options": {k: v for k, v in spec["options"].items() if k not in ADDRESS}}
        if _asks_a_server(spec)
        else spec
        for spec in config["rewards"]
    ]
    return {**config, "rewards": rewards}


def _asks_a_server(spec: Any) -> bool:
    if not isinstance(spec, Mapping) or spec["name"] not in REWARDS:
        return False
    return REWARDS[spec["name"]].runs == "remote"


def _sections(method: type[RunConfig]) -> dict[str, Any]:
    """The defaults of the tables that a method has for itself."""
    common = {field.name for field in fields(RunConfig)}
    own = [field for field in fields(method) if field.name not in common]
    return {field.name: to_dict(field.default) for field in own if is_dataclass(field.default)}


def _settings(run: RunConfig) -> dict[str, Any]:
    """The configuration but for what a resume may change."""
    config = run.resolved()
    for key in run.may_change.freely:
        table, _, name = key.rpartition(".")
        if not table or table in config:  # some tables are of one method
            (config[table] if table else config).pop(name, None)
    if "reference" in config:  # whether there is a file; what is in it has an identity of its own
        config["reference"]["file"] = config["reference"]["file"] is not None
    return config


def _filled(was: Any, now: Any, defaults: Any) -> Any:
    """``was``, and the defaults of what it lacks: of keys that there are now and were not then."""
    if not all(isinstance(one, Mapping) for one in (was, now, defaults)):
        return was
    new = {key: defaults[key] for key in now if key in defaults and key not in was}
    return new | {key: _filled(old, now.get(key), defaults.get(key)) for key, old in was.items()}


def _leaves(old: Any, new: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [(prefix, old, new)]
    found = []
    for key in dict.fromkeys([*old, *new]):
        found += _leaves(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    return found


def _told(key: str) -> str:
    """A key as the user knows it: a key of the configuration, or what was hashed."""
    part, _, name = key.partition(".")
    if part == "config":
        return name
    if part in OF_A_KIND and name:
        return f"{part} {name.removesuffix('.content')}"
    return key


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):  # a file that the other one has not, or all of a model
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
    config: Any,
    ranks: Ranks,
    *,
    has_code: bool = False,
    more: Sequence[str] = (),
) -> dict[str, str]:
    """File name -> SHA-256 of what a model or adapter is read from; a hub name's commit. The ranks share the work.

    ``has_code``: whether Python code that comes with the model is run. ``more``: other files that count.
    """
    directory = user_path(path, key)
    if not directory.is_dir():
        return {"commit": str(getattr(config, "_commit_hash", None))}
    kinds = ("*.safetensors", "*.bin", "*config.json", *(["*.py"] if has_code else []), *more)
    files = list(dict.fromkeys(file for kind in kinds for file in sorted(directory.glob(kind))))
    mine = files[ranks.rank :: ranks.size]
    try:
        with ThreadPoolExecutor(4) as threads:
            digests = list(threads.map(durable.digest, mine))
    except OSError as error:
        raise ModelError(
            f"{key}: {error.filename or path} cannot be read: {error.strerror or error}; expected the files of a "
            "model or adapter"
        ) from error
    found = dict(zip([f.name for f in mine], digests, strict=True))
    return {name: digest for some in ranks.gather(found) for name, digest in some.items()}


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
