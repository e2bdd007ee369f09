"""What of a model's directory is executed: its own Python only where that is asked for, its pickles never."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from tests.helpers.tiny_models import save_tiny

from taut.errors import ModelError
from taut.models import load

OWN = """
from pathlib import Path
from transformers import LlamaConfig
Path({mark!r}).write_text("it ran")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_models_own_code_runs_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    directory, mark = save_tiny("llama", tmp_path / "m"), tmp_path / "mark"
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(OWN.format(mark=str(mark)))
    with pytest.raises(ModelError):
        load.load_config(str(directory))
    assert not mark.exists()
    load.load_config(str(directory), trust_remote_code=True)
    assert mark.read_text() == "it ran"


def test_pickled_weights_are_read_and_nothing_in_them_is_executed(tmp_path: Path) -> None:
    directory, mark = save_tiny("llama", tmp_path / "m"), tmp_path / "mark"
    (directory / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Touches(mark)}, directory / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load.load_model(
            str(directory), dtype=torch.float32, device=torch.device("cpu"), attention="eager"
        )
    assert not mark.exists()
    pickle.loads(pickle.dumps(Touches(mark)))
    assert mark.is_dir()  # it does what it is made for
