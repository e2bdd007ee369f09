"""The stop set as it was derived, with what taut does about the tokenizer's eos and pad."""

from __future__ import annotations

from taut.checks.finding import Finding, passed
from taut.checks.session import Session
from taut.checks.stop.served import served
from taut.data.stop_tokens import described


def ask(session: Session) -> Finding:
    """Does the template end an answer with a token at which a server can stop?"""
    stops, template = session.stops, session.language.renderer.template
    tokens, reasons = described(stops, template)
    notes = reasons.split("; ")
    tokenizer, saved = session.tokenizer, served(session)
    if tokenizer.eos_token != saved.eos_token:
        notes.append(f"the tokenizer's eos is {tokenizer.eos_token}; saved as {saved.eos_token}")
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        said = f"pad is eos ({tokenizer.pad_token}): taut neither pads nor masks by id"
        notes.append(f"{said}; saved with pad {saved.pad_token}")
    return passed(f"an answer ends at {tokens}", len(stops.ids), "tokens", notes)
