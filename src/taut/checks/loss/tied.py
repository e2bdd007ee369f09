"""Whether embedding and head are one tensor, against the model's configuration and what adapters were asked for."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.models import architecture
from taut.models.lora import is_adapted


def ask(session: Session) -> Finding:
    """Are embedding and head one tensor, or two, as the model has it?"""
    if session.is_scalar:
        return skipped("a reward model has no output head")
    model = session.scorer.model
    is_tied = architecture.is_tied(model)
    was_tied = bool(
        getattr(session.language.config.get_text_config(), "tie_word_embeddings", False)
    )
    names = architecture.table_names(model)
    if was_tied and not is_tied and not _are_parted(session):
        return failed(
            "the configuration ties head and embedding, and they are two tensors",
            number=2,
            unit="tensors",
            evidence=[f"{names[0]} and {names[-1]}"],
            remedy="they would train apart and one of them be lost on saving; train the embedding whole with "
            f"lora.modules_to_save={names[:1]}, or set tie_word_embeddings to false in the model's config.json",
        )
    trains = ", ".join(_training(session)) or "neither trains"
    notes = (
        ["the adapter parts them; the merged model is saved untied"]
        if was_tied and not is_tied
        else []
    )
    said = (
        f"one tensor, as configured ({trains})"
        if is_tied
        else f"two tensors, as configured ({trains})"
    )
    return passed(said, 1 if is_tied else 2, "tensors", notes)


def _are_parted(session: Session) -> bool:
    """Whether an adapter knowingly trains one of them, or each, whole."""
    model = session.scorer.model
    if not is_adapted(model):
        return False
    wrapped: dict[str, object] = getattr(model, "peft_config", {})
    saved = {
        name
        for config in wrapped.values()
        for name in getattr(config, "modules_to_save", None) or ()
    }
    return any(name.endswith(kept) for name in architecture.table_names(model) for kept in saved)


def _training(session: Session) -> list[str]:
    """What of them trains."""
    model = session.scorer.model
    head = architecture.head(model)
    embedding = architecture.stored_table(architecture.embedding(model))
    parts = []
    if embedding is not None and embedding.requires_grad:
        parts.append("the embedding trains")
    if head.weight.requires_grad and head.weight is not embedding:
        parts.append("the head trains")
    if head.rows is not None:
        parts.append(f"{len(head.rows.index_R)} rows train")
    return parts
