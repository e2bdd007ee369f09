"""The tokenizer as it will be saved, made once: copying a large vocabulary takes a while."""

from __future__ import annotations

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.checks.session import Session
from taut.models.save import serving_tokenizer


def served(session: Session) -> PreTrainedTokenizerBase:
    """With the template in use, eos the turn end, pad another token where there is one. Not to be changed."""
    return session.once(_serve)


def _serve(session: Session) -> PreTrainedTokenizerBase:
    template = session.language.renderer.template.template
    return serving_tokenizer(
        session.tokenizer, session.stops.ids, template, has_scalar=session.is_scalar
    )
