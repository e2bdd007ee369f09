"""What is wrong with a configuration, in one line: pydantic's errors in taut's words.

Unknown keys come first, with the nearest known one (or the one that does what it does elsewhere); then values of
another kind; then keys that are missing. Keys and values are shown short and on one line, whatever is in them.

Imports nothing of ours. Imported by ``config.py``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

KeyPath = tuple[str | int, ...]

ERRORS_SHOWN = 3
"""How many mistakes one message names."""
SHOWN = 80
"""Characters of a key or a value that a message has room for."""

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""pydantic's error types in our words."""

ELSEWHERE = {
    "center_rewards_coefficient": "reward.centring",
    "cpo_alpha": "sft_weight",
    "f_divergence_type": "dpo.divergence",
    "gradient_accumulation_steps": "batch.samples_per_step",
    "gradient_checkpointing": "activation_checkpointing",
    "loss_type": "loss",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.clip_grad_norm",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_train_epochs": "epochs",
    "output_dir": "out",
    "per_device_train_batch_size": "batch.samples_per_step",
    "precompute_ref_log_probs": "reference.file",
    "ref_model": "reference.model",
    "ref_model_mixup_alpha": "reference.update_mix",
    "ref_model_sync_steps": "reference.update_every",
    "rpo_alpha": "sft_weight",
    "simpo_gamma": "simpo.gamma",
    "sync_ref_model": "reference.update_every",
    "teacher_model_name_or_path": "distill.teacher",
    "train_batch_size": "batch.samples_per_step",
}
"""Names of TRL and transformers -> the key here, or the last part of it."""


def explain(
    error: pydantic.ValidationError,
    tree: Mapping[str, Any],
    assigned: set[tuple[str, ...]],
    places: tuple[str, str],
    keys: Sequence[str],
) -> str:
    """The mistakes in ``tree``. ``places``: where the keys in ``assigned`` come from, and where the others do;
    ``keys``: those there are."""
    found: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path_of(detail, tree), []).append(detail)
    deepest = {
        path: details
        for path, details in found.items()
        if not any(other[: len(path)] == path for other in found if len(other) > len(path))
        or details[0]["type"] == "value_error"
    }
    lines = []
    for path, details in deepest.items():
        is_assigned = any(path[: len(given)] == given for given in assigned)
        lines.append(_explain_one(path, details, places[0 if is_assigned else 1], keys))
    lines.sort(key=lambda line: ("unknown" not in line, "is missing" in line))
    more = len(lines) - ERRORS_SHOWN
    return "; also: ".join(lines[:ERRORS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def key_text(path: Sequence[str | int]) -> str:
    """A key as people write it: ``data.train[0].path``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_one_line(part)}" for part in path)
    return _short("".join(parts).removeprefix("."))


def shown(value: Any) -> str:
    """A value as JSON writes it, which is nearly TOML."""
    text = json.dumps(value, ensure_ascii=False)
    return _short(text if text.isprintable() else json.dumps(value))


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _path_of(detail: Any, tree: Any) -> KeyPath:
    """Where an error is in ``tree``: pydantic's location without the names of union branches."""
    path: list[str | int] = []
    for part in detail["loc"]:
        is_index = isinstance(tree, list | tuple) and isinstance(part, int)
        if is_index or (isinstance(tree, Mapping) and part in tree):
            path.append(part)
            tree = tree[part]
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _first_key(key: str, keys: Sequence[str]) -> str:
    """``key``, or the first key of the table it names."""
    return next((known for known in keys if known.startswith(f"{key}.")), key)


def _explain_one(path: KeyPath, details: Sequence[Any], place: str, keys: Sequence[str]) -> str:
    key = key_text(path)
    kinds = {detail["type"] for detail in details}
    if "value_error" in kinds:
        return str(details[0]["ctx"]["error"])
    if "missing" in kinds:
        wanted = _first_key(key, keys)
        return f"key '{key}' is missing; expected {wanted}=... on the command line or in the run's TOML file"
    if "unexpected_keyword_argument" in kinds:
        return f"unknown key '{key}' {place}; {_suggest(key, keys)}"
    kinds_wanted = [
        EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
        for detail in details
    ]
    expected = " or ".join(dict.fromkeys(kinds_wanted))
    return (
        f"found {key}={shown(details[0]['input'])} {place}; expected {expected}; correct the value"
    )


def _suggest(key: str, keys: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    meant = ELSEWHERE.get(last, last)
    same = [known for known in keys if known == meant or known.rpartition(".")[2] == meant]
    if not same and last in ELSEWHERE:
        return "'taut COMMAND --help' lists every key"
    close = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "'taut COMMAND --help' lists every key"
