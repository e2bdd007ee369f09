"""The stand-in computes, counts, and refuses what it should: small programs on it. Faults in runs: test_golden.py."""

from __future__ import annotations

import pytest
from tests.cuda_stand_in.processes import CaseFailed, Server


def test_operations_have_the_numbers_of_the_cpu_and_are_counted(stand_in: Server) -> None:
    found = stand_in.call("tests.cuda_stand_in.planted:arithmetic")
    assert found["product"] == found["product of the CPU"]
    assert found["gradient"] == found["gradient of the CPU"]
    assert found["device"] == "cuda:0"
    assert found["allocated"] == 0, "freed storages are not counted"
    assert found["peak"] >= 2 * 4 * 64 * 64
    assert found["kernels"]["mm"] == 2, "the second for the gradient of x"


def test_what_waits_is_told_from_what_does_not(stand_in: Server) -> None:
    assert stand_in.call("tests.cuda_stand_in.planted:transfers") == {
        "x.cuda(), not pinned": ["wait: copy to the device from memory that is not pinned"],
        "non_blocking, not pinned": ["wait: copy to the device from memory that is not pinned"],
        "non_blocking, pinned": ["copy: copy to the device"],
        "item": ["wait: item"],
        "tolist": ["wait: copy to the host"],
        "nonzero": ["wait: nonzero, whose size is read"],
        "x[mask]": ["wait: index, whose size is read"],
        "x[mask] = 0": ["wait: index_put_ by a mask"],
        "x[[0, 1]]": ["wait: copy to the device from memory that is not pinned"],
        "x[indices on the host]": ["wait: index by indices on the host"],
        "torch.tensor([x[0], x[1]])": ["wait: item", "wait: item"],
        "sum": [],
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mixed_devices", "Expected all tensors to be on the same device"),
        ("not_deterministic", "cumsum_cuda_kernel does not have a deterministic implementation"),
        ("numpy_of_the_device", "numpy"),
    ],
)
def test_what_cuda_refuses_is_refused(stand_in: Server, function: str, message: str) -> None:
    with pytest.raises(CaseFailed, match=message):
        stand_in.call(f"tests.cuda_stand_in.planted:{function}")
