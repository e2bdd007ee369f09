"""A mixture of experts in bfloat16, by ranks and by one process: gradients, and what exists while it runs.

python -m tests.helpers.sharded_bfloat16 DIRECTORY        one rank of two, under torchrun's variables
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.helpers.chat_runs import save_model
from tests.helpers.tiny_samples import sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from taut.data.packing import pack
from taut.models import architecture
from taut.models.load import load_model
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import Packed

CPU, NARROW = torch.device("cpu"), torch.bfloat16
NUM_LAYERS = 4
LENGTHS = (29, 23)
"""Tokens of the two micro-batches: prime, so that no activation has as many elements as a weight."""


class Seen(NamedTuple):
    """One forward and backward of each micro-batch."""

    gradients: dict[str, Tensor]
    """Summed over micro-batches."""
    inside: list[int]
    """How many weights of layers exist in bfloat16 inside the MLP of each layer, in order."""
    after: list[int]
    """The same after each layer."""
    products: Counter[tuple[str, torch.dtype]]
    """Matrix products of the forwards, by operator and dtype."""


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """Knows the tensors in bfloat16 that have as many elements as one of some weights, and counts matrix products."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.products: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.dtype == NARROW:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        name = func.overloadpacket.__name__
        if "mm" in name and isinstance(result, Tensor):
            self.products[name, result.dtype] += 1
        return result

    def count(self) -> int:
        """The tensors that exist: FSDP empties a storage, and keeps the tensor."""
        storages = (reference() for reference in self.storages.values())
        sizes = [0 if storage is None else storage.nbytes() // 2 for storage in storages]
        return sum(size in self.sizes for size in sizes)


def microbatches() -> list[Packed]:
    rows = [[(7 * at + 3 * seed) % 89 + 3 for at in range(n)] for seed, n in enumerate(LENGTHS)]
    return [pack([sample(str(seed), ids)]) for seed, ids in enumerate(rows)]


def prepare(place: Path) -> None:
    save_model(
        place / "model",
        "qwen3_moe",
        dtype=torch.float32,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=97,
    )


def load(place: Path, ranks: Ranks) -> Scorer:
    """Weights in float32, sharded over the ranks."""
    model = load_model(
        str(place / "model"),
        dtype=NARROW,
        device=CPU,
        attention="taut_reference",
        shard=distributed.layer_sharding(ranks, NARROW),
    )
    scorer = Scorer(model)
    distributed.shard(scorer, ranks, NARROW)
    return scorer


def weigh(scorer: Scorer) -> set[int]:
    """The sizes of the layers' matrices, none of which is that of a table."""
    layers = architecture.layers(scorer.model)
    return {parameter.numel() for parameter in layers.parameters() if parameter.ndim > 1}


def narrow(scorer: Scorer) -> None:
    """Round the weights to bfloat16 for good, but for those of routers."""
    layers = architecture.layers(scorer.model)
    routers = [router for layer in layers for router in architecture.routers(layer)]
    wide = {id(parameter) for router in routers for parameter in router.parameters()}
    for parameter in scorer.parameters():
        if id(parameter) not in wide:
            parameter.data = parameter.data.to(NARROW)


def run(scorer: Scorer, mine: Sequence[Packed], ranks: Ranks, *, by_weights: bool = True) -> Seen:
    names = {parameter: name for name, parameter in scorer.named_parameters()}
    alive = Alive(weigh(scorer))
    inside: list[int] = []
    after: list[int] = []
    for layer in architecture.layers(scorer.model):
        mlp: Any = layer.mlp
        mlp.register_forward_hook(lambda *_: inside.append(alive.count()))
        layer.register_forward_hook(lambda *_: after.append(alive.count()))
    context = partial(compute_context, NARROW, CPU, by_weights=by_weights)
    total: dict[str, Tensor] = {}
    with distributed.summing_gradients(list(names), ranks):
        for packed in mine:
            with alive, context():
                found = scorer(packed, packed.weight_N).linear_sum
            found.backward()
            if ranks.size == 1:  # in float32, as ranks sum
                for parameter, name in names.items():
                    assert parameter.grad is not None, name
                    total[name] = total.get(name, 0.0) + parameter.grad.float()
                    parameter.grad = None
    for parameter, name in names.items() if ranks.size > 1 else ():
        gradient: Any = parameter.grad
        total[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return Seen(total, inside, after, alive.products)


def main(place: Path) -> None:
    ranks = distributed.start("cpu")
    scorer = load(place, ranks)
    seen = run(scorer, microbatches()[ranks.rank :: ranks.size], ranks)
    if ranks.is_writer:
        torch.save(tuple(seen), place / "seen.pt")
    distributed.stop(ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
