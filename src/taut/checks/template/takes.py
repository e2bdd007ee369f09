"""Rendering the first rows' messages. One row that is refused is ``data.rows``' business, most of them are not."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import NO_CHATS, is_most, rendered, short


def ask(session: Session) -> Finding:
    """Does the chat template take the rows' messages?"""
    found = rendered(session)
    number = found.num_conversations
    if not number:
        return skipped(NO_CHATS)
    if is_most(found.refused, number):
        says, _, remedy = str(found.refused[0]).rpartition("; ")
        place, _, reason = says.partition(": ")
        return failed(
            f"the template refuses {len(found.refused)} of {number} conversations",
            number=len(found.refused),
            unit=f"of {number} rows",
            evidence=[f"{short(place)}: {reason}"],
            remedy=remedy,
        )
    return passed("the template takes them", len(found.chats), f"of {number} rows")
