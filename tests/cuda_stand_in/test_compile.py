"""What taut leaves to inductor compiles for an H100, within its shared memory. In float32 only where a run asks for it:
the proofs at the end of a run compile nothing (test_mended.py).
"""

from __future__ import annotations

import pytest
from tests.cuda_stand_in.cases import MOST_SHARED, Compiled
from tests.cuda_stand_in.processes import Server

pytestmark = pytest.mark.cuda_stand_in


@pytest.mark.parametrize(
    ("dtype", "size", "options"),
    [
        ("bfloat16", 64, {}),
        ("bfloat16", 128, {"softcap": 50.0}),
        ("bfloat16", 256, {"window": 200}),
        ("float32", 128, {}),
    ],
    ids=str,
)
def test_flex_attention_compiles(
    stand_in_with_triton: Server, dtype: str, size: int, options: dict[str, float]
) -> None:
    found: Compiled = stand_in_with_triton.call(
        "tests.cuda_stand_in.compiled_kernels:flex_kernels", dtype, size, **options
    )
    kernels = [name for name in found.shared if "flex_attention" in name]
    assert any("backward" in name for name in kernels)
    assert any("backward" not in name for name in kernels)
    assert max(found.shared.values()) <= MOST_SHARED, found.shared
