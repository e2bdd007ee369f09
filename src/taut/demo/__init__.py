"""``taut demo``: a real small model learns reading comprehension offline, in minutes, and is
measured before and after.

SmolLM2-135M-Instruct answers questions about documents it never saw, is trained with ``taut.sft``
on other documents with sixteen questions each, and answers again. Every number printed comes from
the run; ``demo.json`` in the run directory keeps them with all answers.

``out=DIR`` and ``questions=N`` (held-out questions asked) are the demo's own; any other
``key=value`` goes to the training run, e.g. ``steps=10 optim.learning_rate=1e-4``.

Imports nothing heavy until ``main`` runs. May be imported by the command line only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(overrides: Sequence[str]) -> int:
    """Run the demo; the exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from taut.demo.story import parse, tell

    tell(parse(overrides))
    return 0
