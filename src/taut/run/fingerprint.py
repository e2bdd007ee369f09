"""The identity of a run, and what a resume may change.

A checkpoint holds the identity of its run: the configuration, hashes of model, adapter, tokenizer, template and each
source of data, and the environment. On resume each difference is of one of six kinds:

    what is learned       data, model, loss, AdamW's betas: refused, by key, with both values
    learning rate         of the remaining steps (``may_change.schedule``): applied from the next step on, and logged
    place of data         (``follow_sources``): applied if the contents are the same, and logged
    address of a reward   (``ADDRESS``): applied and logged; which model answers there is not checked
    rounding              threads, ranks, libraries of products, token budget (``may_change.rounding``), the version of
                          the plan (``batching.PLAN``): equality bit for bit becomes equality within ``TOLERANCE``, and
                          the log says so
    nothing               that affects a step (``may_change.freely``), or only the number of steps: applied

A method defines which keys are of which kind (``RunConfig.may_change``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from taut.config import fields_of, home_path, to_dict, user_path
from taut.conflicts import default_of, is_table
from taut.data.batching import PLAN
from taut.data.growing import ROWS
from taut.data.settings import DataConfig, Source
from taut.data.store.top_logprobs import WithTeacher
from taut.errors import ConfigError, ModelError, redacted_in
from taut.io import files
from taut.methods import METHODS
from taut.methods.aux_models import load_config_of
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.models.cpu import cpu_matmul
from taut.models.precision import resolve_dtype
from taut.rewards.registry import class_of, models_of
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
    """Differences between two identities, as text, by their consequence."""

    refused: list[str]
    rounding: list[str]
    schedule: list[str]


def identity_of(run: RunConfig, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """The identity of a run as values for JSON, without secrets. Every rank calls it."""
    adapter = [run.lora.adapter] if run.lora.adapter else []
    # of files the contents, of names on the hub the commits
    is_cuda = ranks.device.type == "cuda"
    identity: dict[str, Any] = {
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
            "plan": PLAN,
            "cpu_matmul": cpu_matmul.active().name,
            "processor": torch.cuda.get_device_name(ranks.device)
            if is_cuda
            else torch.backends.cpu.get_cpu_capability(),
        },
        **_others(run, inputs, ranks),
    }
    return dict(redacted_in(identity))


def with_tokenized(identity: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    """An identity that was written while rows were tokenized, with the digests of their samples."""
    digests = {f"{ROWS}{part.key}": part.shards.digest for part in inputs.train.parts}
    data = {
        path: {**it, "content": digests.get(it["content"], it["content"])}
        for path, it in identity.get("data", {}).items()
    }
    return {**identity, "data": data}


def cpu_matmul_in(identity: Mapping[str, Any]) -> str | None:
    """The libraries of matrix products (cpu_matmul) in an identity; None in an older identity, or without a choice."""
    name = identity.get("environment", {}).get("cpu_matmul")
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
    """Read a text file that the user names."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}, named as code of the user's or as a template, cannot be read: {error}; expected a text file; "
            "correct the path"
        ) from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Differences:
    """Compare two identities."""
    result, may_change = Differences([], [], []), _method(new).may_change
    for key, before, now in _leaves(old, new, ""):
        if before == now:
            continue
        # text: the setting, or the part and its file, with both values
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
        # its consequence
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
    """Compare the identity of the run at ``where`` with that of the run that resumes it. Raises ConfigError for a
    difference that a resume may not have.
    """
    # what an earlier version wrote: without keys that did not exist, and with secrets
    method = _method(new)
    common = fields_of(RunConfig)
    defaults = _settings(RunConfig(model="", data=DataConfig())) | {
        name: to_dict(default_of(method, name))
        for name, field in fields_of(method).items()
        if name not in common and is_table(field.annotation)
    }
    old = redacted_in(dict(old))  # of a version that kept secrets
    # addresses of reward servers and places of data do not count
    before, now = _without_addresses(old["config"]), _without_addresses(new["config"])
    before = _with_defaults(before, now, defaults)
    if (sources := _known(now)) and sources == _known(before):
        before = {**before, "data": {**before["data"], "train": now["data"]["train"]}}
    result = differences({**old, "config": before}, {**new, "config": now})
    if result.refused:
        more = len(result.refused) - SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ConfigError(
            f"resume=true: {where} belongs to another run: {'; '.join(result.refused[:SHOWN])}{rest}; resume with "
            "what it was started with (docs/runs.md lists what may change), or start again in another out"
        )
    return result


def follow_sources(run: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """Give the sources of ``run`` the names of those in ``before``, resolved.json of the run that it resumes, if only
    their paths differ. That their contents are the same is checked with the identities.
    """
    old, new = _sources_in(before.get("config")), _sources_in(to_dict(run))
    names = [source["known_as"] or source["path"] for source in old]
    place = {"path": "", "known_as": None}
    is_alike = [source | place for source in old] == [source | place for source in new]
    if run.data.is_stream or old == new or not is_alike:
        return run
    train: list[str | Source] = [
        Source(**{**source, "known_as": None if source["path"] == name else name})
        for source, name in zip(new, names, strict=True)
    ]
    return replace(run, data=replace(run.data, train=train))


def moved_sources(run: RunConfig) -> list[str]:
    """Sources that are read from another path than at the start of the run, as text."""
    train = run.data.train if isinstance(run.data.train, list) else []
    return [
        f"data.train: {source.known_as} then, {source.path} now: the same contents; ids of samples stay as they were"
        for source in train
        if isinstance(source, Source) and source.known_as is not None
    ]


def _sources_in(config: Any) -> list[dict[str, Any]]:
    """data.train of a written configuration, as tables with all their keys."""
    data = config.get("data") if isinstance(config, Mapping) else None
    train = data.get("train") if isinstance(data, Mapping) else None
    items = train if isinstance(train, list) else [train] if train else []
    tables = ({"path": item} if isinstance(item, str) else item for item in items)
    return [{**to_dict(Source(path="")), **it} for it in tables if isinstance(it, Mapping)]


def _known(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """data.train of a written configuration, with the paths at the start of the run."""
    sources = _sources_in(config)
    return [{**it, "path": it["known_as"] or it["path"], "known_as": None} for it in sources]


def moved_servers(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Rewards whose server has another address than before, as text."""
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
    """A configuration without the addresses and keys of reward servers."""
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
    cls = class_of(spec["name"]) if isinstance(spec, Mapping) else None
    return cls is not None and cls.runs == "remote"


def _settings(run: RunConfig) -> dict[str, Any]:
    """The configuration without the keys that a resume may change freely."""
    config = run.resolved()
    for key in run.may_change.freely:
        table, _, name = key.rpartition(".")
        if not table or table in config:  # some tables belong to one method
            (config[table] if table else config).pop(name, None)
    for source in config.get("distill", {}).get("teachers", {}).values():
        source.clear()  # as for a single teacher, directories are hashed and addresses may change
    if "reference" in config:  # only whether there is a file; its content has its own identity
        config["reference"]["file"] = config["reference"]["file"] is not None
    return config


def _with_defaults(before: Any, now: Any, defaults: Any) -> Any:
    """``before`` with the defaults of keys that did not exist then."""
    if not all(isinstance(value, Mapping) for value in (before, now, defaults)):
        return before
    new = {key: defaults[key] for key in now if key in defaults and key not in before}
    return new | {
        key: _with_defaults(old, now.get(key), defaults.get(key)) for key, old in before.items()
    }


def _leaves(old: Any, new: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) for every leaf of either tree."""
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
    """File name -> SHA-256 for the files of a model or adapter; for a name on the hub its commit. The ranks share the
    files.

    ``has_code``: include the model's Python files, which the run executes. ``more``: patterns of further files.
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
