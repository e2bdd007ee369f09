"""The model directory: configuration, tokenizer, template file, every weight, the attention and dtype asked for."""

from __future__ import annotations

from taut.checks.finding import Finding, passed
from taut.checks.session import Session


def ask(session: Session) -> Finding:
    """Can the model be loaded as asked, all of its weights included?"""
    language = session.language
    loaded = session.loaded
    number = sum(parameter.numel() for parameter in loaded.model.parameters())
    said = (
        f"{type(loaded.model).__name__} and {type(language.tokenizer).__name__}, no weight missing"
    )
    return passed(said, number, "parameters", [_line(*it) for it in loaded.decisions])


def _line(name: str, value: str, reason: str) -> str:
    return f"{name} {value}: {reason}"
