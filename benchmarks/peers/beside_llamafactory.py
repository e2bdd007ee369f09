"""LLaMA-Factory beside taut: ``python beside_llamafactory.py JOBS.json``, in its own environment.

A job's words are those of ``llamafactory-cli``: train FILE.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
import yaml
from forks import run_all

# LLaMA-Factory imports torchaudio for audio inputs, and there is none beside CPU torch.
stub = types.ModuleType("torchaudio")
stub.__spec__ = ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = stub

from llamafactory.train.tuner import run_exp  # noqa: E402 - after the stub


def run(words: list[str]) -> None:
    assert words[0] == "train", words
    run_exp(yaml.safe_load(Path(words[1]).read_text()))


torch.set_num_threads(1)
run_all(run)
