"""A LoRA adapter in peft's format, made by taut or elsewhere -> the model it was trained as.

Modules trained whole, trained rows and a vocabulary the adapter made larger come with it. Another kind of adapter is
refused, and so is one whose tensors are not those its settings call for (``lora.py``).

May import errors, anatomy, ``lora.py`` and ``tokens.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from taut import durable
from taut.errors import ModelError
from taut.models import anatomy
from taut.models.lora import WEIGHTS, LoraConfig, apply_lora
from taut.models.tokens import add_tokens

TABLES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "embed_in.weight",
    "embed_out.weight",
)
"""How adapters name the tables they train whole."""


class Adapted(NamedTuple):
    """A model that carries an adapter."""

    model: nn.Module
    new_ids: list[int]
    """The rows by which its vocabulary's tables grew."""
    num_tensors: int
    """Of the adapter."""


def adapter_settings(adapter: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter."""
    file = adapter / "adapter_config.json"
    try:
        settings = durable.read_json(file)
        kind = settings["peft_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"adapter={adapter} has no adapter_config.json that can be read ({error}); expected the directory of a "
            "saved LoRA adapter"
        ) from error
    if kind != "LORA":
        raise ModelError(
            f"adapter={adapter} is a {kind} adapter; expected LoRA, which can be merged"
        )
    if not (adapter / WEIGHTS).is_file():
        raise ModelError(
            f"adapter={adapter} has no {WEIGHTS}; expected an adapter saved as safetensors"
        )
    assert isinstance(settings, dict)
    return settings


def put_on(model: PreTrainedModel, adapter: Path, settings: dict[str, Any]) -> Adapted:
    """Put an adapter with these settings on a model loaded in full precision."""
    table = anatomy.stored_table(anatomy.embedding(model))
    assert table is not None, "an embedding has a weight"
    num_rows = int(table.shape[0])
    wanted = max([num_rows, *_rows_wanted(adapter, settings)])
    new_ids = list(range(num_rows, wanted))
    add_tokens(model, new_ids)
    adapted = apply_lora(model, LoraConfig(adapter=str(adapter)))
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        return Adapted(adapted, new_ids, len(file.keys()))


def _rows_wanted(adapter: Path, settings: dict[str, Any]) -> Iterator[int]:
    """How many rows the vocabulary's tables must have for this adapter."""
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dictionary)
            if name.endswith(TABLES):
                yield int(file.get_slice(name).get_shape()[0])
    indices = settings.get("trainable_token_indices") or {}
    for ids in indices.values() if isinstance(indices, dict) else [indices]:
        yield max(ids, default=-1) + 1
