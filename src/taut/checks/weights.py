"""The weights: that each rank holds the numbers of the checkpoint's files, in its own part of each tensor."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from taut.models.lora.merge import plain_skeleton
from taut.models.quantized.quantized_layers import format_of
from taut.models.quantized.quantized_storage import quantized_experts
from taut.models.weight_files import converted
from taut.train import distributed

NUM_ROWS = 8
"""Rows to compare of a rank's part of a tensor: the first, the last and others at random."""
SMALL = 2**14
"""Parts with at most this many numbers are compared whole."""
ADAPTER = (".base_layer", ".original_module", ".token_adapter")
"""Parts that peft adds to the names of unchanged tensors."""


@check("model.weights", after=["model.quantized"])
def each_rank_holds_the_checkpoints_numbers(session: Session) -> Finding:
    """Does each rank hold the numbers of the checkpoint, in its part of each tensor?

    Some rows of the part of each tensor, against the files, bit for bit; of tensors that the files hold in another
    shape (experts one by one) the first and the last of each shape. Of quantized experts, the bytes of the first and
    the last that the rank has, against those that their tensors in the files give. Older versions of the libraries cut
    tensors in the wrong place, without an error.
    """
    distributed.reshard(session.scorer)
    skeleton = plain_skeleton(session.scorer.model)
    tables = [f"{name}.weight" for name in architecture.table_names(session.loaded.model)]
    compared, wrong = 0, list[str]()
    with ExitStack() as stack:
        files = open_files(session.loaded.model, stack)
        skip_if(
            not files, "the checkpoint has no safetensors, of which a row can be read by itself"
        )
        # tensors that the files hold as they are
        elsewhere: dict[torch.Size, list[tuple[str, Tensor]]] = {}
        for name, parameter in _as_read(session, skeleton):
            probe = torch.empty(parameter.shape, device="meta")
            found = list(converted(skeleton, [{name: probe}]))
            if len(found) != 1 or found[0][1] is not probe:
                # the files hold it in another shape or order, or together with others
                elsewhere.setdefault(parameter.shape, []).append((name, parameter))
            elif (stored := found[0][0]) in files:
                compared += 1
                parameter = distributed.whole_of_twice_divided(parameter)
                made = session.inputs.new_ids if name in tables else []
                if not _is_stored(parameter, files[stored].get_slice(stored), name, made):
                    wrong.append(name)
        # tensors that the files hold in parts: the first and the last of each shape
        for alike in elsewhere.values():
            for name, divided in dict([alike[0], alike[-1]]).items():
                parameter = distributed.whole_of_twice_divided(divided)
                for stored, part, own in _converted(skeleton, name, parameter):
                    source = files[stored].get_tensor(stored) if stored in files else None
                    if source is None or source.shape != part.shape or not own.any():
                        continue  # part of a tensor in the files
                    compared += 1
                    if not _is_equal(source.to(part.dtype)[own], part[own]):
                        wrong.append(f"{stored}, in {name}")
        # bytes of quantized experts
        for label, layout, row, source in experts_of_rank(session, skeleton, files):
            compared += 1
            if not torch.equal(layout.quantize(source.to(row.device)), row):
                wrong.append(label)
    skip_if(not compared, "the files have other names for all of its weights")
    if wrong:
        rank = f" on rank {session.ranks.rank}" if session.ranks.size > 1 else ""
        return failed(
            f"{len(wrong)} of {compared} tensors{rank} are not those of the checkpoint",
            measured=(sorted(wrong), f"of {compared} tensors"),
            remedy="install the tested versions of torch and transformers (constraints.txt), and please report the "
            "model",
        )
    return passed(f"rows of {compared} tensors are the bits in the files", compared, "tensors")


def open_files(model: PreTrainedModel, stack: ExitStack) -> dict[str, Any]:
    """The safetensors that a model was read from, by the names of their tensors; ``stack`` closes them."""
    place = cached_file(
        str(model.name_or_path),
        "config.json",
        revision=getattr(model.config, "_commit_hash", None),
    )
    assert place is not None, "the model was loaded"
    files: dict[str, Any] = {}
    for path in sorted(Path(place).parent.glob("*.safetensors")):
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
        files |= dict.fromkeys(file.keys(), file)
    return files


def _experts_in_files(
    skeleton: PreTrainedModel,
    name: str,
    shape: tuple[int, int, int],
    files: Mapping[str, Any],
    chosen: Collection[int],
) -> dict[int, Tensor]:
    """Some of the matrices of a tensor of all experts [E, rows, columns], put together from the files as the library
    does. Those of which the files lack a part are left out.
    """
    num_experts, rows, columns = shape
    # The library's own conversion, of numbers that say which expert and which of its weights each one is.
    inside = torch.arange(rows * columns).view(1, rows, columns).expand(shape)
    expert = torch.arange(num_experts).view(-1, 1, 1).expand(shape)
    places = dict(converted(skeleton, [{name: inside}]))
    found = {number: torch.zeros(rows * columns) for number in chosen}
    filled = dict.fromkeys(chosen, 0)
    for stored, owners in converted(skeleton, [{name: expert}]):
        numbers = {number for number in chosen if bool((owners == number).any())}
        if not numbers or stored not in files:
            continue
        source = files[stored].get_tensor(stored)
        if source.shape != owners.shape:
            continue
        for number in numbers:
            own = owners == number
            found[number][places[stored][own]] = source[own].float()
            filled[number] += int(own.sum())
    return {
        number: weights.view(rows, columns)
        for number, weights in found.items()
        if filled[number] == rows * columns
    }


def experts_of_rank(
    session: Session, skeleton: PreTrainedModel, files: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """The first and the last quantized expert that this rank has, of the first and the last layer with some: name,
    format, bytes, and its weights in the files.
    """
    if format_of(session.inputs.config) is not None:
        return
    experts: list[tuple[str, Any]] = list(quantized_experts(session.loaded.model))
    for name, module in dict([*experts[:1], *experts[-1:]]).items():
        for key, layout in module.formats.items():
            parameter = module._parameters[key]
            part, first = distributed.local(parameter), distributed.first_row(parameter)
            if not len(part):
                continue
            full = f"{name.replace('.base_layer', '')}.{key}"
            shape = (parameter.shape[0], *layout.shape)
            own = {first, first + len(part) - 1}
            for number, source in _experts_in_files(skeleton, full, shape, files, own).items():
                yield f"expert {number} of {full}", layout, part[number - first], source


def _as_read(session: Session, skeleton: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters that the model was read with, by their names without adapters and without quantized ones."""
    names = {name for name, _ in skeleton.named_parameters()}
    for name, parameter in session.loaded.model.named_parameters():
        for part in ADAPTER:
            name = name.replace(part, "")
        if name in names and parameter.is_floating_point():
            yield name, parameter


def _is_stored(parameter: Tensor, stored: Any, name: str, made: Sequence[int]) -> bool:
    """Whether rows of this rank's part of a tensor are the bits in the file. ``made``: rows that do not come from the
    file.
    """
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
    # of a large part a few rows
    chosen = {first, last - 1, *random.Random(name).choices(range(first, last), k=NUM_ROWS)}
    return all(
        _is_equal(stored[row : row + 1].to(part.dtype), part[row - first : row - first + 1].cpu())
        for row in chosen.difference(made)
        if first <= row < last
    )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal; a number in the files that is not finite is left to ``model.finite``."""
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
