"""Rewards: what an answer is worth. One verifier per file; a new one is a line in ``REWARDS`` (``registry.py``).

A configuration names rewards, a panel asks all of them about each answer (``panel.py``), and each gives a number, or
None: it does not apply, or an error with its reason. Errors are counted and shown; they never become 0.
"""

from __future__ import annotations

from taut.rewards.panel import Panel, PanelConfig, Tally, Verdict, open_panel, tally
from taut.rewards.registry import REWARDS, RewardSpec, files_of, listed
from taut.rewards.verifier import Answered, Explained, Score, Verifier

__all__ = [
    "REWARDS",
    "Answered",
    "Explained",
    "Panel",
    "PanelConfig",
    "RewardSpec",
    "Score",
    "Tally",
    "Verdict",
    "Verifier",
    "files_of",
    "listed",
    "open_panel",
    "tally",
]
