"""Copies of tensors to a device and from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.meta_device import META, watched
from tests.helpers.tiny_samples import nested_family

from taut.data.packing import ALONE, pack
from taut.types import to_device, to_host

TENSORS = [
    torch.arange(5),
    torch.tensor([[1.5, -2.0, 3.25]]),
    torch.empty(0, dtype=torch.int64),
    torch.tensor([True, False, True]),
    torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3),
    torch.tensor(7.0),
]
"""Of several widths, one empty, one a number."""


def test_one_block_has_every_tensor_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is played by other memory of the host."""
    to, copies = torch.Tensor.to, list[bool]()

    def copied(tensor: torch.Tensor, target: Any, **keywords: Any) -> torch.Tensor:
        copies.append(keywords["non_blocking"])
        return to(tensor, "cpu", copy=True)

    monkeypatch.setattr(torch.Tensor, "to", copied)
    device: Any = SimpleNamespace(type="elsewhere")
    found = to_device(TENSORS, device)
    assert copies == [True]
    for value, expected in zip(found, TENSORS, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_each_tensor_of_a_block_is_where_a_compiled_kernel_reads_it() -> None:
    """torch's compiler copies what does not begin at a multiple of 16 bytes, at each call."""
    found = to_device([torch.zeros(n, dtype=torch.int32) for n in (1, 3, 5, 2)], META)
    assert {some.storage_offset() * some.itemsize % 16 for some in found} == {0}


def test_what_is_on_the_device_already_is_not_copied() -> None:
    with watched():
        (there,) = to_device([torch.arange(3)], META)
        first, second = to_device([there, torch.arange(2)], META)
    assert first is there
    assert second.device == META and second.dtype == torch.int64
    assert to_device(TENSORS, torch.device("cpu")) == TENSORS


def test_several_tensors_are_read_at_once_in_their_own_types() -> None:
    with watched() as watch:
        away = [value.to("meta") for value in TENSORS]
        found = to_host([*away, TENSORS[0]])
    assert sum(watch.reads.values()) == 1
    assert found[-1] is TENSORS[0]
    assert [(v.shape, v.dtype, v.device.type) for v in found[:-1]] == [
        (v.shape, v.dtype, "cpu") for v in TENSORS
    ]


def test_a_microbatch_keeps_what_the_layout_is_derived_from() -> None:
    packed = pack(nested_family(97), ALONE)
    moved = packed.to(META)
    assert moved.on_host is packed and packed.on_host is packed
    assert moved.reach_T is packed.reach_T
    assert moved.to(META) is moved and packed.to("cpu") is packed
    assert {moved.ids_T.device, moved.weight_N.device, moved.position_ids.device} == {META}
