"""``taut export MODEL out=FILE.gguf``: a model directory -> one GGUF file for llama.cpp and what is built on it.

Carries weights, tokenizer, chat template and stop set; what llama.cpp would do otherwise is refused where that is known
beforehand, and told where it is a matter of certain texts. The file appears proven or not at all. A LoRA adapter has to
be merged first (``taut merge``).

The command line imports it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from taut.config import configclass, home_path
from taut.errors import OutputError
from taut.inference.open import ModelUse, open_renderer
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.models.gguf import (
    Dtype,
    Written,
    architecture_metadata,
    notes,
    require_convertible,
    vocabulary,
    write_gguf,
)
from taut.models.load import checkpoint_dtype, load_model

_OWN: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "f16"}


@configclass
class Export:
    """A model as one GGUF file."""

    model: str
    """Directory (or hub name) of the model."""
    out: str
    """The .gguf file that is written; refused if it exists, unless overwrite."""
    dtype: Dtype | None = None
    """Of the matrices: f32, f16, bf16 or q8_0; by default the model's own. Norms and biases are float32."""
    template: str | None = None
    """A file with a chat template to write in place of the tokenizer's own."""
    overwrite: bool = False
    """Replace the file if it exists."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


def run(config: Export) -> int:
    """Export, and say what was written."""
    out = _place(config)
    use = ModelUse(
        model=config.model, template=config.template, trust_remote_code=config.trust_remote_code
    )
    rendering = open_renderer(use)
    require_convertible(rendering.config)
    own = checkpoint_dtype(rendering.config)
    dtype = config.dtype or _OWN.get(own, "f32")
    tokenizer, stop_ids = rendering.renderer.tokenizer, rendering.stops.ids
    if config.template is not None:
        tokenizer.chat_template = rendering.renderer.template.template
    keys = vocabulary(tokenizer, rendering.config, stop_ids, rendering.config.vocab_size)
    model = load_model(
        config.model,
        dtype=own,
        device=torch.device("cpu"),
        attention="eager",
        trust_remote_code=config.trust_remote_code,
        is_narrow=True,
    )
    metadata = architecture_metadata(rendering.config, dtype, out.stem) | keys
    written = write_gguf(model, metadata, dtype, out)
    names = [str(tokenizer.convert_ids_to_tokens(index)) for index in stop_ids]
    _tell(written, dtype, names, notes(tokenizer, stop_ids))
    return 0


def _place(config: Export) -> Path:
    out = home_path(config.out)
    if out.suffix != ".gguf" or out.is_dir():
        raise OutputError(f"out={out}; expected a file's name that ends in .gguf; correct it")
    if out.exists() and not config.overwrite:
        raise OutputError(f"out={out} exists; name another file, or say overwrite=true")
    return out


def _tell(written: Written, dtype: Dtype, stops: list[str], remarks: list[str]) -> None:
    console = Terminal(soft_wrap=True)
    size = f"{written.num_bytes / 1e6:,.1f} MB"
    lines = [
        f"written {written.path}: {size}, {counted(written.num_tensors, 'tensors')}, {dtype}",
        f"passed  read back: every key and tensor; largest error {written.largest_error:.2g} of a tensor's largest",
        f"stops   {', '.join(stops)}",
        *(f"note    {remark}" for remark in remarks),
    ]
    for line in lines:
        console.print(line, markup=False)
