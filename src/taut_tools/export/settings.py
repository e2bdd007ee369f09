"""Keys of ``taut export`` and ``taut push``."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from taut.config import configclass

Dtype: TypeAlias = Literal["f32", "f16", "bf16", "q8_0"]


@configclass
class Export:
    """Write a model as one GGUF file."""

    model: str
    """Directory or hub name of the model."""
    out: str
    """The .gguf file to write; it must not exist, unless overwrite=true."""
    dtype: Dtype | None = None
    """Dtype of the matrices: f32, f16, bf16 or q8_0; default: the model's own. Norms and biases are float32."""
    template: str | None = None
    """File with a chat template to write instead of the tokenizer's own."""
    modelfile: bool = False
    """Write an Ollama Modelfile next to the file, as FILE.Modelfile."""
    system: str | None = None
    """System prompt of the Modelfile; default: data.system of the run that trained the model."""
    overwrite: bool = False
    """Replace existing files."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    rules: ClassVar[str] = """
        system needs modelfile=true: only a Modelfile has one
    """


@configclass
class Push:
    """Upload the model of a run, or a data set, to the Hugging Face hub."""

    run: str
    """Directory of a run; its model, best or adapter directory; a directory of a merged model, of GGUF files, or of a
    data set with a README.md."""
    name: str
    """Repository: OWNER/NAME, or NAME for one of your own."""
    private: bool = True
    """Make a new repository private. An existing one does not change."""
    revision: str | None = None
    """Branch, made if it is missing; default: the main one."""
    message: str | None = None
    """Message of the commit."""
    base: str | None = None
    """Name of the base model at the hub, for a run that read it from a directory, or a model without a run."""
    out: str | None = None
    """New directory in which to write the folder, without an upload."""
    unverified: bool = False
    """Upload a model even if it does not behave as its contract says."""
    card: str | None = None
    """File to upload as README.md instead of the card that taut writes."""
    replace_card: bool = False
    """Replace a README.md at the hub that taut did not write."""
    device: str = "auto"
    """Device that verifies the model: auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
