"""The names of compute dtypes in a configuration. Apart from ``types.py``, which loads torch: the processes that judge
answers read configurations too, and must not load it.

Imports nothing of ours. Anyone may import it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator

ALIASES_OF_DTYPES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
}
"""What a compute dtype is called elsewhere."""
HALF_DTYPES = ("float16", "fp16", "f16", "half")


def read_dtype(name: object) -> object:
    """A compute dtype by the name it has here. Raises ValueError for float16, in which taut does not compute."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain in HALF_DTYPES:
        raise ValueError(
            f"found dtype={name}, and taut does not compute in float16, which needs its loss scaled; expected "
            "bfloat16, float32 or float64; set dtype=bfloat16, or float32 where the hardware has no bfloat16"
        )
    return ALIASES_OF_DTYPES.get(plain, plain) if isinstance(plain, str) else name


ComputeDtype: TypeAlias = Annotated[
    Literal["float64", "float32", "bfloat16"], BeforeValidator(read_dtype)
]
"""A compute dtype in a configuration, where bf16 and the like are accepted too."""
