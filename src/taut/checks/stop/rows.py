"""Rows of the embedding and the head: those of turn ends that were never trained must not stay as they are."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.errors import ModelError
from taut.models.tokens import require_trained, untrained_rows
from taut.run.setup import rows_to_train


def ask(session: Session) -> Finding:
    """Can the model learn its ends: do rows that were never trained train?"""
    if session.is_scalar:
        return skipped("a reward model generates nothing")
    if session.ranks.size > 1:
        return skipped("weights are sharded; it was asked before they were")
    run, inputs, model = session.run, session.inputs, session.scorer.model
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    untrained = untrained_rows(model, ends)
    try:
        require_trained(model, rows_to_train(run, inputs, model))
    except ModelError as error:
        says, _, remedy = str(error).partition("; ")
        return failed(
            "a row that was never trained is frozen, so the model could not learn its end",
            number=len(untrained),
            unit="untrained ends",
            evidence=[says],
            remedy=remedy,
        )
    said = "they train" if untrained else "every end has been trained before"
    return passed(said, len(untrained), "untrained ends", list(untrained.values()))
