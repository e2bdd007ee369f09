"""Keys of ``taut teach``. They import no torch, so that ``taut teach --help`` is quick."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from taut.config import ComputeDtype, configclass
from taut.data.settings import DataConfig
from taut.models.settings import CpuMatmulSetting


@configclass
class Teach:
    """A teacher's top logprobs of a data set."""

    model: str
    """Directory (or hub name) of the teacher."""
    data: DataConfig
    out: str
    """The JSONL file to write; it must not exist."""
    student: str | None = None
    """The student model, whose tokenizer and template render the samples. Defaults to the teacher."""
    top: Annotated[int, Field(ge=1)] = 32
    """Number of tokens listed per target."""
    tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Maximum tokens computed at a time; a longer sample is computed alone."""
    dtype: ComputeDtype | None = None
    """Compute dtype. Defaults to bfloat16 if the hardware has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """Attention backend: auto, reference, varlen or flex; a named backend that is not available is an error."""
    cpu_matmul: CpuMatmulSetting = "auto"
    """Library of float32 matrix products on a CPU: auto (the faster one for each kind of product, measured), mkl or
    onednn."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
