"""Adapters that start at a part of the weights: the start is the base, they train as peft's, and a LoRA on the base is
saved.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_models import logits_of, tiny_model
from torch import nn

from taut.config import from_mapping
from taut.errors import ModelError
from taut.models.lora import adapter_start
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import save_adapter
from taut.models.settings import LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
STARTS: list[dict[str, Any]] = [
    {"init": "pissa"},
    {"init": "pissa", "init_iterations": 4, "rslora": True},
    {"init": "olora", "alpha": 3.0},
]


def test_the_parts_of_a_diagonal_weight() -> None:
    """W = diag(3, 1), rank 1, scale 2. The largest singular value is 3 along the first axis, so A0 = B0 = sqrt(3/2) e1
    and s B0 A0 = diag(3, 0). The first column of Q is the first axis (up to its sign), the first row of R (3, 0): with
    s = 2 the product is diag(6, 0), as peft has it.
    """
    weight = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    for init, product in (("pissa", 3.0), ("olora", 6.0)):
        down, up = adapter_start._parts(weight, init, 1, 2.0, None, "w")
        expected = torch.diag(torch.tensor([product, 0.0], dtype=torch.float64))
        assert (2.0 * up @ down - expected).abs().max() < 1e-14
    down, up = adapter_start._parts(weight, "pissa", 1, 2.0, None, "w")
    assert float(down.abs().max()) == pytest.approx(1.5**0.5, abs=1e-14)
    assert float(up.abs().max()) == pytest.approx(1.5**0.5, abs=1e-14)


@pytest.mark.parametrize("settings", STARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_start_is_the_base_to_the_last_bit(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    before = logits_of(tiny_model("llama", dtype=dtype))
    model = apply_lora(tiny_model("llama", dtype=dtype), LoraConfig(rank=4, **settings))
    ups = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert min(float(up.detach().abs().max()) for up in ups) > 1e-2
    assert torch.equal(logits_of(model), before)


def _train(model: nn.Module, steps: int = 3) -> None:
    """Steps of gradient descent that move the logits."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(steps):
        loss = logits_of(model).log_softmax(-1)[:, 5].mean().neg()
        for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            parameter.data -= 0.05 * gradient


@pytest.mark.parametrize(
    ("settings", "init"), [({"init": "pissa"}, "pissa"), ({"init": "olora"}, "olora")]
)
def test_it_trains_as_in_peft(settings: dict[str, Any], init: str, tmp_path: Path) -> None:
    """peft trains on the residual, in float32: the same logits, and by its own conversion the same adapter."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs: Any = peft.get_peft_model(
        tiny_model("llama", dtype=torch.float32),
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=names,
            init_lora_weights=init,  # type: ignore[arg-type]
            task_type="CAUSAL_LM",
        ),
    )
    ours = apply_lora(tiny_model("llama", dtype=torch.float32), LoraConfig(rank=4, **settings))
    start = logits_of(ours).detach()
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "start")
    for model in (theirs, ours):
        _train(model)
    assert (logits_of(ours) - start).abs().max() > 1e-2
    assert (logits_of(ours) - logits_of(theirs)).abs().max() < 1e-4
    theirs.peft_config["default"].init_lora_weights = init
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that OLoRA changes the base
        theirs.save_pretrained(
            tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "start")
        )
    save_adapter(ours, tmp_path / "ours")
    converted, saved = (peft.load_peft_weights(str(tmp_path / one)) for one in ("theirs", "ours"))
    assert converted.keys() == saved.keys()
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    left, right = (it[f"{name}B.weight"] @ it[f"{name}A.weight"] for it in (converted, saved))
    assert (left - right).abs().max() < 1e-5


@pytest.mark.parametrize("settings", STARTS)
def test_plain_peft_loads_what_is_saved_on_the_base(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = apply_lora(tiny_model("qwen3"), LoraConfig(rank=4, **settings))
    _train(model)
    trained = logits_of(model.eval())
    config = model.peft_config["default"]  # type: ignore[index]
    save_adapter(model, tmp_path)
    assert config.r == 4, "the run goes on with its own settings"
    loaded: Any = peft.PeftModel.from_pretrained(tiny_model("qwen3"), str(tmp_path)).eval()
    assert loaded.peft_config["default"].r == 8
    assert (logits_of(loaded) - trained).abs().max() < 1e-12


def test_dropout_is_of_the_trained_part_alone() -> None:
    """W x - s B0 A0 x + s B A drop(x): with everything dropped the residual is left, as in peft."""
    model = apply_lora(tiny_model("llama"), LoraConfig(rank=4, init="pissa", dropout=0.5))
    layer: Any = next(module for module in model.modules() if hasattr(module, "lora_A"))
    x = torch.randn(3, layer.in_features, dtype=torch.float64)
    layer.lora_dropout["default"].p = 1.0
    residual = layer.base_layer.weight - layer.scaling["default"] * layer.start_B @ layer.start_A
    assert (layer.train()(x) - x @ residual.T).abs().max() < 1e-12
    assert torch.equal(layer.eval()(x), layer.base_layer(x))


def test_two_starts_of_one_seed_are_equal() -> None:
    config = LoraConfig(rank=4, init="pissa", init_iterations=1)
    one, again = (apply_lora(tiny_model("llama"), config, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in one.items())


def test_an_adapter_of_a_residual_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa", r=4)
    theirs: Any = peft.get_peft_model(tiny_model("llama", dtype=torch.float32), config)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"init_lora_weights=pissa.*on a base less its start.*convert"
    ):
        apply_lora(tiny_model("llama"), LoraConfig(adapter=str(tmp_path)))


def test_what_it_cannot_be_with_is_refused() -> None:
    for keys, reason in (
        ({"dora": True}, ErrorCode("dora/init")),
        (
            {"init": "olora", "init_iterations": 4},
            ErrorCode("init_iterations/init"),
        ),
        ({"rank": 0}, ErrorCode("init/rank")),
    ):
        with refused(reason):
            from_mapping(LoraConfig, {"rank": 4, "init": "pissa", **keys})
    with pytest.raises(ModelError, match=r"lora\.rank=64.*not as many singular values"):
        apply_lora(tiny_model("llama"), LoraConfig(rank=64, init="pissa"))
