"""``train``: the function behind every training command and ``taut.NAME``."""

from __future__ import annotations

from taut.checks.examine import before_launch, before_training, require_known
from taut.methods.method import RunConfig
from taut.plan.memory_options import decide_recomputation, suggest_settings
from taut.run import lifecycle
from taut.run.ending import Result
from taut.run.lifecycle import Advisers


def train(run: RunConfig) -> Result:
    """Train a model by the method of the run: ``lifecycle.train``, with the checks and the planner handed in."""
    require_known(run.checks.skip)
    advisers = Advisers(before_launch, before_training, suggest_settings, decide_recomputation)
    return lifecycle.train(run, advisers)
