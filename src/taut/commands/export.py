"""``taut export MODEL out=FILE.gguf``: a model directory -> one GGUF file for llama.cpp and programs built on it.

Contains weights, tokenizer, chat template and stop set. A model that llama.cpp is known to run differently is refused;
differences that depend on the text are listed. The file appears verified or not at all. A LoRA adapter must be merged
first (``taut merge``).
"""

from __future__ import annotations

import torch

from taut.config import configclass, home_path
from taut.errors import OutputError
from taut.inference.open import ModelUse, open_renderer
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.models.gguf import (
    Dtype,
    notes,
    require_convertible,
    vocabulary,
    write_gguf,
)
from taut.models.load import checkpoint_dtype, load_model

_DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "f16"}


@configclass
class Export:
    """A model as one GGUF file."""

    model: str
    """Directory (or hub name) of the model."""
    out: str
    """The .gguf file to write; it must not exist, unless overwrite."""
    dtype: Dtype | None = None
    """Dtype of the matrices: f32, f16, bf16 or q8_0; by default the model's own. Norms and biases are float32."""
    template: str | None = None
    """A file with a chat template to write instead of the tokenizer's own."""
    overwrite: bool = False
    """Replace an existing file."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


def run(config: Export) -> int:
    """Export and print a summary."""
    out = home_path(config.out)
    if out.suffix != ".gguf" or out.is_dir():
        raise OutputError(f"out={out}; expected a file's name that ends in .gguf; correct it")
    if out.exists() and not config.overwrite:
        raise OutputError(f"out={out} exists; name another file, or say overwrite=true")
    use = ModelUse(
        model=config.model, template=config.template, trust_remote_code=config.trust_remote_code
    )
    rendering = open_renderer(use)
    require_convertible(rendering.config)
    model_dtype = checkpoint_dtype(rendering.config)
    dtype = config.dtype or _DTYPES.get(model_dtype, "f32")
    tokenizer, stop_ids = rendering.renderer.tokenizer, rendering.stops.ids
    if config.template is not None:
        tokenizer.chat_template = rendering.renderer.template.template
    keys = vocabulary(tokenizer, rendering.config, stop_ids, rendering.config.vocab_size)
    model = load_model(
        config.model,
        dtype=model_dtype,
        device=torch.device("cpu"),
        attention="eager",
        trust_remote_code=config.trust_remote_code,
        is_narrow=True,
    )
    num_tensors, largest_error = write_gguf(model, keys, dtype, out)
    names = [str(tokenizer.convert_ids_to_tokens(index)) for index in stop_ids]
    size = f"{out.stat().st_size / 1e6:,.1f} MB"
    lines = [
        f"written {out}: {size}, {counted(num_tensors, 'tensors')}, {dtype}",
        f"passed  read back: every key and tensor; largest error {largest_error:.2g} of a tensor's largest",
        f"stops   {', '.join(names)}",
        *(f"note    {note}" for note in notes(tokenizer, stop_ids)),
    ]
    Terminal(soft_wrap=True).lines(lines)
    return 0
