"""Memory and time of a run, predicted from its model's shapes and from measurements of its parts. ``taut.plan(...)`` is
the command: this room can be called.

    prediction = memory.predict_steps(run, config, kernels, work)      bytes by part, of one rank
    measured = memory.measure(built, packed, is_first=...)             the same, measured on a real micro-batch

No weights are loaded. tracing.py traces a micro-batch, memory.py adds the effect of several ranks, rates.py predicts
seconds, workload.py makes the micro-batches. docs/plan.md has the equations and their errors against measurements.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A room of the name of a public function. Importing a file of the room sets ``taut.plan`` to the room, so that it
    has to be both.
    """

    def __call__(self, run: Any = None, /, **keys: Any) -> Any:
        return import_module("taut.commands.functions").find("plan")(run, **keys)


sys.modules[__name__].__class__ = _Room
