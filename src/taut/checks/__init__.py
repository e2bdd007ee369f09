"""The checks of ``taut check``: questions about a run, asked before it costs anything.

``quick`` checks are asked before each training. ``docs/check.md`` lists all checks; docs/cluster.md lists the checks of
several machines (cluster.py), which examine processes instead of a session.

A new check is one function with ``@check`` in the file of its topic, and in ``tests/checks/faults`` a planted fault
that it alone catches, with an innocent twin that it passes. A check about one method is skipped, with the reason, for
runs of other methods.
"""

from __future__ import annotations

from taut.checks import (
    attention,
    chat_template,
    cluster,
    data,
    data_quality,
    loss,
    measured,
    memory,
    micro_batches,
    model,
    optimizer,
    records,
    rollouts,
    run,
    stop_tokens,
    vision,
    weights,
)
from taut.checks.registry import Check, Part, in_order

__all__ = ["CHECKS", "OF_NODES", "Check", "Part"]

TOPICS = (
    chat_template,
    stop_tokens,
    records,
    data,
    micro_batches,
    data_quality,
    vision,
    model,
    weights,
    attention,
    loss,
    measured,
    memory,
    optimizer,
    run,
    rollouts,
)
"""Files of checks. If two checks could be asked next, the one in the earlier file is (``registry.merged``)."""
CHECKS: dict[str, Check] = in_order(TOPICS)
OF_NODES: dict[str, Check] = in_order((cluster,))
"""Checks of several machines together, asked before the checks of the run."""
