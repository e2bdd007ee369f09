from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.tiny_models import tiny_model

from taut.errors import ModelError
from taut.models.tensor_parallel import divide_layers


class Mesh:
    """A mesh of which nothing but its size is asked before a model is refused."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(
    ("plan", "size", "said"),
    [
        ({}, 2, "the library's plan for llama divides none of its layers"),
        (
            {"model.layers.*.mlp.up_proj": "sequence_parallel"},
            2,
            "the library's plan for llama divides a module by sequence_parallel",
        ),
        (None, 3, "parallel.tensor=3, and config.json has num_attention_heads=4"),
        (None, 4, "parallel.tensor=4, and config.json has num_key_value_heads=2"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    plan: dict[str, str] | None, size: int, said: str
) -> None:
    model: Any = tiny_model("llama")
    if plan is not None:
        model._tp_plan = plan
    mesh: Any = Mesh(size)
    with pytest.raises(ModelError, match=said):
        divide_layers(model, mesh)
