"""The reference's log-probabilities in a file: computed once, before training, by the reference a run was built with.

    reference.file=ref.safetensors    float32 (float64 in a float64 run) [N of a split] for ``train`` and ``eval``, and
                                      in its header the identity of all that they depend on, and their SHA-256

A file that is there is used if its identity is this run's: model, adapter, tokenizer, template, data, how
pictures are read and compute dtype, all by content. Else it is refused, with what differs; it is never overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
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
from taut.methods.reference import STREAM, Recorded
from taut.run.fingerprint import differences, identity_of
from taut.run.setup import Built
from taut.train.trainer import fill_streams

HEADER = "taut"
"""Where the identity and the digest are, as JSON, in one entry: the order of several is not fixed."""
PARTS = ("dtype", "model", "reference", "tokenizer", "template")
"""What of a run's identity the numbers depend on; the rest of it does not reach a reference."""
ROWS_AT_A_TIME = 512


def keep_reference(built: Built) -> None:
    """Put the log-probs of ``reference.file`` in the place of the reference, computing them where they are not there.

    Raises ConfigError where the file is of another model, data or setting. Every rank calls it.
    """
    file, trainer = built.run.models().reference_file, built.trainer
    if file is None:
        return
    path = user_path(file, "reference.file")
    splits = _splits(built)
    _require_distinct(splits)
    identity = _identity(built)
    if trainer.ranks.gather(path.is_file())[0]:
        kept, reason = _read(path, identity), "it was there, of this model, data and setting"
    else:
        kept, reason = {name: _compute(built, data) for name, data in splits.items()}, "made now"
        if trainer.ranks.is_writer:
            _write(path, kept, identity)
    trainer.ranks.barrier()
    table: dict[str, Tensor] = {}
    for name, data in splits.items():
        _require_size(path, name, kept, data)
        table = dict(_by_sample(data, kept[name])) | table
    (role,) = built.models.roles
    assert isinstance(role, Recorded)
    role.record(table.__getitem__)
    reason += "; no reference is held while training"
    built.opened.append(Decision("reference.file", str(path), reason))


def _splits(built: Built) -> dict[str, Dataset]:
    given = {"train": built.inputs.train, "eval": built.inputs.eval}
    return {name: data for name, data in given.items() if data is not None}


def _identity(built: Built) -> dict[str, Any]:
    """By content: paths play no part."""
    whole = identity_of(built.run, built.inputs, built.trainer.ranks)
    found = {name: whole.get(name) for name in PARTS}
    found["adapter"] = next(iter(whole["adapter"].values()), None)
    found["data"] = {
        name: hashlib.sha256("".join(part.entry.digest for part in data.parts).encode()).hexdigest()
        for name, data in _splits(built).items()
    }
    found["tokens"] = to_dict(built.run.tokens)
    if built.inputs.renderer.image_store is not None:
        found["pictures"] = built.inputs.renderer.image_store.identity()
    return dict(json.loads(json.dumps(found)))


def _compute(built: Built, data: Dataset) -> Tensor:
    """log-probs of every target of a split, in the order of its samples, the same on every rank."""
    trainer, rows = built.trainer, built.run.rows_of(data)
    trainer.scorer.eval()
    found: dict[str, Tensor] = {}
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        trees = rows.trees(list(range(start, min(start + ROWS_AT_A_TIME, len(rows)))))
        for packed, is_real in fill_streams(trainer, trees, "log-probs of the reference"):
            logp_N = packed.streams[STREAM]
            for row, name in enumerate(packed.sample_ids if is_real else ()):
                found[name] = logp_N[packed.row_N == row]
    for some in trainer.ranks.gather(found):
        found |= some
    return torch.cat([found[data.sample_id(index)] for index in range(len(data))])


def _by_sample(data: Dataset, logp_N: Tensor) -> Iterator[tuple[str, Tensor]]:
    sizes = [int(size) for size in data.num_targets]
    for index, own in enumerate(torch.split(logp_N, sizes)):
        yield data.sample_id(index), own


def _require_distinct(splits: Mapping[str, Dataset]) -> None:
    """Raise ConfigError where a sample's name stands for one thing in training and for another in evaluation."""
    parts = [part for data in splits.values() for part in data.parts]
    digests = {part.path: part.entry.digest for part in parts}
    both = next((part.path for part in parts if digests[part.path] != part.entry.digest), None)
    if both is not None:
        raise ConfigError(
            f"reference.file is set, and data.train and data.eval both read {both}, in two ways; expected each sample "
            "to be one thing; copy the file under another name, or take reference.file out"
        )


def _require_size(path: Path, name: str, kept: Mapping[str, Tensor], data: Dataset) -> None:
    wanted, found = int(data.num_targets.sum()), kept[name].numel() if name in kept else 0
    if wanted != found:
        raise ConfigError(
            f"reference.file={path}: has {found:,} log-probs of data.{name}, which has {wanted:,} targets; expected "
            "one each; name another file"
        )


def _write(path: Path, kept: dict[str, Tensor], identity: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"identity": identity, "sha256": _digest(kept)})
        files.write_bytes(path, save(kept, {HEADER: header}))
    except OSError as error:
        raise OutputError(
            f"reference.file={path} cannot be written: {error.strerror or error}; expected a place with room; name "
            "another"
        ) from error


def _read(path: Path, identity: dict[str, Any]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(json.loads((file.metadata() or {}).get(HEADER, "{}")))
            kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        if header.get("sha256") != _digest(kept):
            raise ValueError("its numbers are not those that taut wrote")
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"reference.file={path} cannot be read: {error}; expected a file that taut wrote; remove it, or name "
            "another"
        ) from error
    if header["identity"] == identity:
        return kept
    differing = differences(header["identity"], identity).refused
    raise ConfigError(
        f"reference.file={path} is of another run: {'; '.join(differing)}; expected log-probs of this model, data and "
        "setting; name another file, and it is computed"
    )


def _digest(kept: Mapping[str, Tensor]) -> str:
    arrays = [kept[name].numpy() for name in sorted(kept)]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
