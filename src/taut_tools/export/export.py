"""``taut export MODEL out=FILE.gguf``: write a model as one GGUF file for llama.cpp and programs built on it.

The file contains weights, tokenizer, chat template and stop set. A model that llama.cpp is known to run differently is
refused; differences that depend on the text are listed. The file appears verified or not at all. Merge a LoRA adapter
first (``taut merge``). With ``modelfile=true`` an Ollama Modelfile is written next to the file (modelfile.py).
"""

from __future__ import annotations

from pathlib import Path

import torch

from taut.config import home_path
from taut.data.rows.messages import Message
from taut.errors import OutputError
from taut.inference.factory import Rendering, open_renderer
from taut.inference.settings import ModelUse
from taut.io import files
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.models.load import checkpoint_dtype, load_model
from taut.train.run_dir import MARK, read_settings
from taut_tools.export.gguf import notes, require_convertible, vocabulary, write_gguf
from taut_tools.export.modelfile import Chat, modelfile, translate
from taut_tools.export.settings import Dtype, Export

_DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "f16"}


def export(config: Export) -> Path:
    """``taut.export``: export, print a summary, and return the file's path."""
    run(config)
    return home_path(config.out)


def run(config: Export) -> int:
    """Export and print a summary."""
    # Refuse what cannot be written or converted, before the weights are loaded.
    out = home_path(config.out)
    if out.suffix != ".gguf" or out.is_dir():
        raise OutputError(f"out={out}; expected a file's name that ends in .gguf; correct it")
    beside = out.with_suffix(".Modelfile")
    for path in (out, *([beside] if config.modelfile else [])):
        if path.exists() and not config.overwrite:
            raise OutputError(f"{path} exists; name another file, or say overwrite=true")
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
    text = _modelfile(
        config, out.name, rendering, has_bos=bool(keys["tokenizer.ggml.add_bos_token"])
    )
    # Write and verify the file.
    model = load_model(
        config.model,
        dtype=model_dtype,
        device=torch.device("cpu"),
        attention="eager",
        trust_remote_code=config.trust_remote_code,
        is_narrow=True,
    )
    num_tensors, largest_error = write_gguf(model, keys, dtype, out)
    if text is not None:
        files.write_text(beside, text)
    # Report what was written, and how llama.cpp differs.
    names = [str(tokenizer.convert_ids_to_tokens(index)) for index in stop_ids]
    size = f"{out.stat().st_size / 1e6:,.1f} MB"
    lines = [
        f"written {out}: {size}, {counted(num_tensors, 'tensors')}, {dtype}",
        f"passed  read back: every key and tensor; largest error {largest_error:.2g} of a tensor's largest",
        f"stops   {', '.join(names)}",
        *([f"written {beside}"] if text is not None else []),
        *(
            f"note    {line.removeprefix('# ')}"
            for line in (text or "").splitlines()[:1]
            if line[0] == "#"
        ),
        *(f"note    {note}" for note in notes(tokenizer, stop_ids)),
    ]
    Terminal(soft_wrap=True).lines(lines)
    return 0


def _modelfile(config: Export, name: str, rendering: Rendering, *, has_bos: bool) -> str | None:
    """The text of the Modelfile, if one is requested. ``has_bos``: llama.cpp adds the bos token by itself."""
    if not config.modelfile:
        return None
    tokenizer, stops = rendering.renderer.tokenizer, rendering.stops.ids
    template = rendering.renderer.template

    def render(chat: Chat) -> str:
        messages: list[Message] = [{"role": role, "content": content} for role, content in chat]
        return template.write(messages, [], is_prompt=True, place=config.model)

    bos = str(tokenizer.bos_token) if has_bos else None
    translation = translate(template.template, render, bos)
    system, run = config.system, home_path(config.model).parent
    if system is None and (run / MARK).is_file():
        system = read_settings(run).get("data.system")
    return modelfile(
        name, translation, [str(tokenizer.convert_ids_to_tokens(i)) for i in stops], system
    )
