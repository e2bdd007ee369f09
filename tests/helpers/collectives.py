"""How many collectives a training step makes, by what asked for them.

``python -m tests.helpers.collectives FILE`` runs what the JSON in FILE lists, ``{keys of a run, with its method}``, as
one of several ranks, and rank 0 writes the counts of the last step of each into FILE.counted: those of torch's sharding
by kind, which grow with layers and micro-batches, and the package's own by the function in which they are made. An
object that is gathered is two: its size, then itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import taut
from taut.train import distributed
from taut.train import trainer as loop

_SOURCE = str(Path(taut.__file__).parent)
_NAMESPACES = ("c10d::", "_c10d_functional::")
_NO_COLLECTIVE = ("wait_tensor",)


class Counted(TorchDispatchMode):
    """Counts collectives inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its own operations come here afterwards
        name = func.name()
        if name.startswith(_NAMESPACES) and not any(word in name for word in _NO_COLLECTIVE):
            self.found[_place(name)] += 1
        return func(*args, **(kwargs or {}))


def _place(name: str) -> str:
    """The function that asks for it, or that it is torch's sharding."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if "_fsdp" in str(path):
            return f"sharding {name.split('::')[1]}"
        is_ours = str(path).startswith(_SOURCE) and path.stem != "distributed"
        if is_ours and function != "__torch_dispatch__" and not function.startswith("<"):
            return f"{path.stem}.{function}"
        frame = frame.f_back
    return name


def main() -> None:
    file = Path(sys.argv[1])
    real, counts = loop.train_step, Counter[str]()

    def counted(trainer: loop.Trainer, step: int) -> loop.StepReport:
        with Counted() as watch:
            report = real(trainer, step)
        counts.clear()
        counts.update(watch.found)
        return report

    loop.train_step = counted
    leave, distributed.stop = distributed.stop, lambda ranks: None  # the group is joined once
    found = []
    for keys in json.loads(file.read_text()):
        getattr(taut, keys["method"])(**keys)
        found.append(dict(counts))
    leave(distributed.start("cpu"))
    if os.environ["RANK"] == "0":
        file.with_name(f"{file.name}.counted").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
