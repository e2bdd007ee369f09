"""Log-probabilities of the reference in a file, computed once before training.

    reference.file=ref.safetensors    tensors ``train`` and ``eval``, [N of the split]; float32, or as the run float64;
                                      in the header their SHA-256 and the identity of what they depend on

An existing file is used if that identity is this run's: model, adapter, tokenizer, template, data, pictures and compute
dtype, all by content. Otherwise it is refused, with the differences; it is never overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from taut.config import Decision, to_dict, user_path
from taut.data.dataset import Dataset
from taut.errors import ConfigError, OutputError
from taut.io import files
from taut.methods.reference import Recorded
from taut.methods.settings import STREAM
from taut.run.fingerprint import differences, identity_of
from taut.run.setup import Built
from taut.train.trainer import fill_streams, plan_trees

HEADER = "taut"
"""The one entry of the header, as JSON: the order of several entries would not be fixed."""
PARTS = ("dtype", "model", "reference", "tokenizer", "template")
"""Parts of a run's identity on which the logprobs depend."""
ROWS_AT_A_TIME = 512


def keep_reference(built: Built) -> None:
    """Replace the reference by the logprobs in ``reference.file``, which is written first if it does not exist.

    Raises ConfigError for a file of another model, data or setting. Every rank calls it.
    """
    file, trainer = built.run.models().reference_file, built.trainer
    if file is None:
        return
    path = user_path(file, "reference.file")
    inputs = built.inputs
    splits = {"train": inputs.train} | ({} if inputs.eval is None else {"eval": inputs.eval})

    # samples are found by their ids: train and eval may not read one file in two ways
    parts = [part for data in splits.values() for part in data.parts]
    digests = {part.path: part.shards.digest for part in parts}
    for part in parts:
        if digests[part.path] != part.shards.digest:
            raise ConfigError(
                f"reference.file is set, and data.train and data.eval read {part.path} in two ways; expected one; "
                "copy the file under another name, or take reference.file out"
            )

    # read or compute
    identity = _identity(built, splits)
    if trainer.ranks.gather(path.is_file())[0]:
        logps, reason = _read(path, identity), "it was there, of this model, data and setting"
    else:
        logps, reason = {name: _compute(built, data) for name, data in splits.items()}, "made now"
        if trainer.ranks.is_writer:
            _write(path, logps, identity)
    trainer.ranks.barrier()

    # one tensor for each sample
    table: dict[str, Tensor] = {}
    for name, data in splits.items():
        sizes = [int(size) for size_S in data.sizes("targets") for size in size_S]
        count = logps[name].numel() if name in logps else 0
        if count != sum(sizes):
            raise ConfigError(
                f"reference.file={path}: has {count:,} logprobs of data.{name}, which has {sum(sizes):,} targets; "
                "expected one each; name another file"
            )
        for index, logp_N in enumerate(torch.split(logps[name], sizes)):
            table.setdefault(data.sample_id(index), logp_N)

    # the reference gives these from now on, and frees its weights
    (role,) = built.models.roles
    assert isinstance(role, Recorded)
    role.record(table.__getitem__)
    reason += "; no reference is held while training"
    built.opened.append(Decision("reference.file", str(path), reason))


def _identity(built: Built, splits: Mapping[str, Dataset]) -> dict[str, Any]:
    """The identity of the logprobs, by content and without paths."""
    of_run = identity_of(built.run, built.inputs, built.trainer.ranks)
    identity = {name: of_run.get(name) for name in PARTS}
    identity["adapter"] = next(iter(of_run["adapter"].values()), None)
    identity["data"] = {
        name: hashlib.sha256(
            "".join(part.shards.digest for part in data.parts).encode()
        ).hexdigest()
        for name, data in splits.items()
    }
    identity["tokens"] = to_dict(built.run.tokens)
    if built.inputs.renderer.image_store is not None:
        identity["pictures"] = built.inputs.renderer.image_store.identity()
    return dict(json.loads(json.dumps(identity)))


def _compute(built: Built, data: Dataset) -> Tensor:
    """Compute the logprobs of every target of a split, in the order of its samples, for every rank."""
    trainer, rows = built.trainer, built.run.rows_of(data)
    trainer.scorer.eval()
    logps: dict[str, Tensor] = {}
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        trees = rows.trees(list(range(start, min(start + ROWS_AT_A_TIME, len(rows)))))
        plan = plan_trees(trainer, trees)
        for packed, is_real in fill_streams(trainer, plan, "logprobs of the reference"):
            logp_N = packed.streams[STREAM].cpu()
            for row, name in enumerate(packed.sample_ids if is_real else ()):
                logps[name] = logp_N[packed.row_N == row]
    for of_rank in trainer.ranks.gather(logps):
        logps |= of_rank
    return torch.cat([logps[data.sample_id(index)] for index in range(len(data))])


def _write(path: Path, logps: dict[str, Tensor], identity: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"identity": identity, "sha256": _digest(logps)})
        files.write_bytes(path, save(logps, {HEADER: header}))
    except OSError as error:
        raise OutputError(
            f"reference.file={path} cannot be written: {error.strerror or error}; expected a place with room; name "
            "another"
        ) from error


def _read(path: Path, identity: dict[str, Any]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(json.loads((file.metadata() or {}).get(HEADER, "{}")))
            logps = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        if header.get("sha256") != _digest(logps):
            raise ValueError("its numbers are not those that taut wrote")
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"reference.file={path} cannot be read: {error}; expected a file that taut wrote; remove it, or name "
            "another"
        ) from error
    if header["identity"] == identity:
        return logps
    differing = differences(header["identity"], identity).refused
    raise ConfigError(
        f"reference.file={path} is of another run: {'; '.join(differing)}; expected logprobs of this model, data and "
        "setting; name another file, and it is computed"
    )


def _digest(logps: Mapping[str, Tensor]) -> str:
    arrays = [logps[name].numpy() for name in sorted(logps)]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
