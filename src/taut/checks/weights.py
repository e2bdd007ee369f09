"""The weights: that each rank holds the numbers of the checkpoint's files, in its own part of each tensor."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from taut.checks.registry import Finding, check, failed, passed, skip_if
from taut.checks.session import Session
from taut.models import architecture
from taut.models.lora import plain_skeleton
from taut.models.weight_files import converted
from taut.train import distributed

SHOWN = 3
NUM_ROWS = 8
"""Rows that are compared of a rank's part of a tensor: the first, the last and others at random."""
SMALL = 2**14
"""Parts with at most this many numbers are compared whole."""
ADAPTER = (".base_layer", ".original_module", ".token_adapter")
"""What peft adds to the names of tensors that it leaves as they are."""


@check("model.weights", after=["model.trains"])
def each_rank_holds_the_checkpoints_numbers(session: Session) -> Finding:
    """Does each rank hold the numbers of the checkpoint, in its part of each tensor?

    Some rows of the part of each tensor, against the files, bit for bit; of tensors that the files hold in another
    shape (experts one by one) the first and the last of each shape. Older versions of the libraries cut tensors in the
    wrong place, without an error.
    """
    model = session.loaded.model
    place = cached_file(str(model.name_or_path), "config.json")
    assert place is not None, "the model was loaded"
    paths = sorted(Path(place).parent.glob("*.safetensors"))
    skip_if(not paths, "the checkpoint has no safetensors, of which a row can be read by itself")
    distributed.reshard(session.scorer)
    skeleton = plain_skeleton(session.scorer.model)
    compared, wrong = 0, list[str]()
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        elsewhere: dict[torch.Size, list[tuple[str, Tensor]]] = {}
        for name, parameter in _as_read(session, skeleton):
            stored = _renamed(skeleton, name, parameter.shape)
            if stored is None:
                elsewhere.setdefault(parameter.shape, []).append((name, parameter))
            elif stored in files:
                compared += 1
                made = session.inputs.new_ids if name in _tables(session) else []
                if not _is_stored(parameter, files[stored].get_slice(stored), name, made):
                    wrong.append(name)
        for alike in elsewhere.values():
            for name, parameter in dict([alike[0], alike[-1]]).items():
                for stored, part, own in _converted(skeleton, name, parameter):
                    source = files[stored].get_tensor(stored) if stored in files else None
                    if source is None or source.shape != part.shape or not own.any():
                        continue  # part of a tensor in the files
                    compared += 1
                    if not _is_equal(source.to(part.dtype)[own], part[own]):
                        wrong.append(f"{stored}, in {name}")
    skip_if(not compared, "the files have other names for all of its weights")
    if wrong:
        rank = f" on rank {session.ranks.rank}" if session.ranks.size > 1 else ""
        return failed(
            f"{len(wrong)} of {compared} tensors{rank} are not those of the checkpoint",
            measured=(len(wrong), f"of {compared} tensors"),
            evidence=sorted(wrong)[:SHOWN],
            remedy="install the tested versions of torch and transformers (constraints.txt), and please report the "
            "model",
        )
    return passed(f"rows of {compared} tensors are the bits in the files", compared, "tensors")


def _as_read(session: Session, skeleton: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the model was read with, by their names without adapters. Quantised ones are left to
    ``model.quantised``.
    """
    names = {name for name, _ in skeleton.named_parameters()}
    for name, parameter in session.loaded.model.named_parameters():
        for part in ADAPTER:
            name = name.replace(part, "")
        if name in names and parameter.is_floating_point():
            yield name, parameter


def _tables(session: Session) -> list[str]:
    return [f"{name}.weight" for name in architecture.table_names(session.loaded.model)]


def _renamed(skeleton: PreTrainedModel, name: str, shape: torch.Size) -> str | None:
    """The name of a tensor in the files; None where they hold it in another shape or order, or with others."""
    probe = torch.empty(shape, device="meta")
    found = list(converted(skeleton, [{name: probe}]))
    return found[0][0] if len(found) == 1 and found[0][1] is probe else None


def _is_stored(parameter: Tensor, stored: Any, name: str, made: Sequence[int]) -> bool:
    """Whether rows of this rank's part of a tensor are the bits in the file. ``made``: rows that are not from there."""
    part, first = distributed.local(parameter).detach(), distributed.first_row(parameter)
    rows, *rest = stored.get_shape()
    if rest != list(parameter.shape[1:]) or rows > parameter.shape[0]:
        return False
    last = min(first + part.shape[0], rows)
    if part.numel() <= SMALL:
        own = [row for row in range(first, last) if row not in made]
        if not own:
            return True
        offsets = torch.tensor(own) - first
        return _is_equal(stored[first:last].to(part.dtype)[offsets], part.cpu()[offsets])
    chosen = {first, last - 1, *random.Random(name).choices(range(first, last), k=NUM_ROWS)}
    return all(
        _is_equal(stored[row : row + 1].to(part.dtype), part[row - first : row - first + 1].cpu())
        for row in chosen.difference(made)
        if first <= row < last
    )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same; what is no number in the files is ``model.finite``'s to find."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _converted(
    skeleton: PreTrainedModel, name: str, parameter: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of the files that a tensor of the model is made of: name, numbers, which of these this rank has."""
    part, first = distributed.local(parameter).detach().cpu(), distributed.first_row(parameter)
    whole = torch.zeros(parameter.shape, dtype=part.dtype)  # no memory where nothing is written
    own = torch.zeros(parameter.shape, dtype=torch.bool)
    whole[first : first + part.shape[0]], own[first : first + part.shape[0]] = part, True
    masks = dict(converted(skeleton, [{name: own}]))
    for stored, numbers in converted(skeleton, [{name: whole}]):
        yield stored, numbers, masks[stored]
