"""What is refused before a run: a machine that cannot compile, a model of which nothing can be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import tiny_model

from taut.errors import ConfigError, ModelError
from taut.models import compiled_layers
from taut.models.compiled_layers import (
    compile_layers,
    require_compiler,
)
from taut.models.compiled_layers import (
    compiled_layers as layers_of,
)
from taut.models.lora.adapters import apply_lora
from taut.models.noise import install_noise
from taut.models.quantized.quantized_storage import QuantizedLinear
from taut.models.settings import LoraConfig, NoiseConfig

CPU = torch.device("cpu")


def test_a_machine_without_a_cpp_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(
        ConfigError, match=r"compile=true: .*no.* C\+\+|g\+\+ or clang\+\+.*install"
    ):
        require_compiler(CPU)


def test_a_machine_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match=r"compile=true: .*Triton.*pip install triton"):
        require_compiler(torch.device("cuda"))


def test_a_compiler_that_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("fatal error: Python.h: No such file or directory")

    monkeypatch.setattr(compiled_layers, "BACKEND", fail)
    monkeypatch.setattr(compiled_layers, "_probe", compiled_layers._probe.__wrapped__)
    with pytest.raises(ConfigError, match=r"compile=true: .*Python\.h"):
        require_compiler(CPU)


def test_the_dropout_of_adapters_is_refused() -> None:
    model = apply_lora(
        tiny_model("llama"), LoraConfig(rank=2, dropout=0.1, targets=["q_proj"]), 0, {}
    )
    install_noise(model, NoiseConfig(), 0)
    with pytest.raises(ModelError, match=r"lora.dropout=0\.1"):
        compile_layers(model, torch.float64)
    assert not layers_of(model)


def test_a_quantized_base_is_refused() -> None:
    model = tiny_model("llama")
    name = "model.layers.0.mlp.up_proj"
    projection: Any = model.get_submodule(name)
    model.set_submodule(name, QuantizedLinear(projection, "nf4"))
    with pytest.raises(ModelError, match=r"quantized base .*up_proj"):
        compile_layers(model, torch.float32)


def test_a_model_whose_layers_all_have_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["layers.0 (mamba)", "layers.1.mixer (MambaMixer)"]
    monkeypatch.setattr(compiled_layers.architecture, "stateful_layers", lambda model: every)
    with pytest.raises(ModelError, match="every layer carries state"):
        compile_layers(tiny_model("llama"), torch.float64)


def test_what_is_left_eager_is_named() -> None:
    (mixed,) = compile_layers(tiny_model("qwen3_moe"), torch.float64)
    assert mixed.value == "2 Qwen3MoeDecoderLayer"
    assert "experts (mlp)" in mixed.reason
    (some,) = compile_layers(tiny_model("lfm2"), torch.float64)
    assert "layers with state (layers.0" in some.reason
