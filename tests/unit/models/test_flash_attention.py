"""FlashAttention 3 and 4 are activated where device, torch, model and an installed package allow; else the reason."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch
from torch.nn import attention
from transformers import LlamaConfig

from taut.models import attention_backends
from taut.models.attention_backends import activate_flash_attention

CUDA = torch.device("cuda")
SMALL = LlamaConfig(hidden_size=512, num_attention_heads=4)
LARGE = LlamaConfig(hidden_size=1024, num_attention_heads=4)

Patch = pytest.MonkeyPatch


@pytest.fixture
def activated(monkeypatch: Patch) -> list[str]:
    """What torch was asked to activate; both packages are installed."""
    names: list[str] = []
    monkeypatch.setattr(attention_backends, "_largest_head", 0)
    monkeypatch.setattr(attention_backends, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", names.append)
    monkeypatch.setattr(
        attention, "current_flash_attention_impl", lambda: names[-1] if names else None
    )
    monkeypatch.setattr(attention, "restore_flash_attention_impl", names.clear)
    return names


def on_device(monkeypatch: Patch, major: int) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))


@pytest.mark.parametrize(("major", "number"), [(8, "2"), (9, "3"), (10, "4"), (12, "2")])
def test_each_device_has_the_kernels_made_for_it(
    activated: list[str], monkeypatch: Patch, major: int, number: str
) -> None:
    on_device(monkeypatch, major)
    for _ in range(2):  # a second model finds them in place
        (decision,) = activate_flash_attention("varlen", CUDA, SMALL)
        assert decision[:2] == ("attention.flash", number)
    assert activated == ([] if number == "2" else [f"FA{number}"])


def test_another_backend_or_device_has_no_such_decision(
    activated: list[str], monkeypatch: Patch
) -> None:
    assert activate_flash_attention("reference", torch.device("cpu"), SMALL) == []
    for major in (8, 9):
        on_device(monkeypatch, major)
        assert activate_flash_attention("flex", CUDA, SMALL) == []
    assert activated == []


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_a_model_that_they_do_not_take_drives_them_out(
    backend: str, activated: list[str], monkeypatch: Patch
) -> None:
    """Its own decoding runs through the same operators, whatever it trains with."""
    on_device(monkeypatch, 10)
    assert activate_flash_attention("varlen", CUDA, SMALL)[0].value == "4"
    (decision,) = activate_flash_attention(backend, CUDA, LARGE)
    assert decision.value == "2" and activated == []
    assert (
        "for all models of this process; FlashAttention 4: heads have size 256" in decision.reason
    )
    (decision,) = activate_flash_attention("varlen", CUDA, SMALL)
    assert decision.value == "2" and "heads have size 256" in decision.reason


def test_what_stands_in_the_way_is_in_the_reason(activated: list[str], monkeypatch: Patch) -> None:
    on_device(monkeypatch, 10)
    with monkeypatch.context() as patch:
        patch.setattr(attention_backends, "find_spec", lambda name: None)
        assert (
            "flash_attn is not installed"
            in activate_flash_attention("varlen", CUDA, SMALL)[0].reason
        )
    with monkeypatch.context() as patch:
        patch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3"])
        assert "cannot activate it" in activate_flash_attention("varlen", CUDA, SMALL)[0].reason
    with monkeypatch.context() as patch:
        patch.delattr(attention, "list_flash_attention_impls")
        assert "cannot activate it" in activate_flash_attention("varlen", CUDA, SMALL)[0].reason
    assert "heads have size 256" in activate_flash_attention("varlen", CUDA, LARGE)[0].reason
    assert activated == []


def test_a_package_that_does_not_load_is_told(activated: list[str], monkeypatch: Patch) -> None:
    def broken(name: str) -> None:
        raise ImportError("undefined symbol: x")

    on_device(monkeypatch, 9)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", broken)
    (decision,) = activate_flash_attention("varlen", CUDA, SMALL)
    assert decision.value == "2"
    assert "flash_attn_interface cannot be used: undefined symbol: x" in decision.reason
