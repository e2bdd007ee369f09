"""The model is saved as it would be at the end, into a temporary directory, loaded again and compared.

Compared is what ``reloaded`` compares at the end of each run: every weight bit for bit, log-probs merged and reloaded.
What describes pictures is read again too. Adapters begin as nothing at all, so that a merge that loses them would not
show: they are moved meanwhile, then put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.errors import OutputError, TautError
from taut.evals.reload import (
    Comparison,
    Trained,
    compare_saved,
    load_anew,
    room_for,
    samples_to_compare,
    score,
)
from taut.io.temporary import TemporaryFolder
from taut.models.load import load_config, load_tokenizer
from taut.models.lora import is_adapted
from taut.models.save import saving
from taut.vision.processors import open_processor

MOST = 2_000_000_000
"""Parameters up to which a model is saved for this."""
MOVED = 0.02
"""Deviation of what is added to adapters."""
REPORT = "the model would not be the one that was trained; please report it"


def ask(session: Session) -> Finding:
    """Is the model that is saved and loaded again the one in memory, adapters merged?"""
    number = sum(parameter.numel() for parameter in session.scorer.parameters())
    if number > MOST:
        return skipped(f"{number:,} parameters would take long to write; the run asks at its end")
    with TemporaryFolder("check") as place, _moved(session):
        try:
            found, other = _save_and_compare(session, place / "model")
        except OutputError as error:
            return skipped(str(error).partition(";")[0])
        except TautError as error:
            return failed(f"what was saved cannot be loaded: {error}", remedy=REPORT)
    if other:
        return failed(
            "what describes pictures is not saved as it was",
            evidence=[other],
            remedy="a server would show the model other pictures; please report it",
        )
    wrong = [one for one in found if not one.is_sound]
    if wrong:
        return failed(
            f"{wrong[0].name}: a difference of {wrong[0].value:.3g}, at most {wrong[0].tolerance:g} is rounding",
            number=wrong[0].value,
            unit="nats" if wrong[0].name != "weights" else "",
            evidence=[f"{one.name}: {one.value:.3g}: {one.detail}" for one in wrong],
            remedy=REPORT,
        )
    name, value = found[-1].name, found[-1].value
    what = "trained, merged and reloaded agree" if is_adapted(session.scorer.model) else "the same"
    return passed(f"{what} ({name})", value, "nats", [f"{found[0].detail}: the same bits"])


def _save_and_compare(session: Session, directory: Path) -> tuple[list[Comparison], str]:
    inputs, model = session.inputs, session.scorer.model
    data = inputs.train if inputs.eval is None else inputs.eval
    samples = samples_to_compare(data, [*inputs.new_ids, *inputs.stops.ids])
    logps = score(session.scorer, samples)
    trained = Trained(model, None, samples, logps, session.built.saved_dtype)
    with saving(
        model,
        inputs.tokenizer,
        directory,
        stop_ids=inputs.stops.ids,
        template=inputs.renderer.template.template,
        dtype=trained.dtype,
    ) as written:
        device = room_for(model, session.ranks.device)
        anew = load_anew(str(written), device, session.run.trust_remote_code)
        return compare_saved(trained, anew), _other_pictures(session, written)


def _other_pictures(session: Session, directory: Path) -> str:
    """What differs in how pictures are made ready, for whoever loads the model; empty: nothing, or it takes none."""
    album = session.inputs.renderer.album
    if album is None:
        return ""
    path, trust = str(directory), session.run.trust_remote_code
    saved = open_processor(path, load_config(path, trust), load_tokenizer(path, trust), trust)
    if saved is None or saved.identity() != album.processor.identity():
        return "preprocessor_config.json and processor_config.json make other tensors of a picture"
    words = [(one.placeholder, one.image_id, one.reserved) for one in (album.processor, saved)]
    return (
        "" if words[0] == words[1] else f"pictures are written {words[1]}, in training {words[0]}"
    )


@contextmanager
def _moved(session: Session) -> Iterator[None]:
    """Inside, adapters say something; at the end all is as it was. A model without adapters is left alone."""
    moved = session.job.trained if is_adapted(session.scorer.model) else []
    kept = [parameter.detach().clone() for parameter in moved]
    draw = torch.Generator(session.ranks.device).manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in moved:
                noise = torch.empty_like(parameter).normal_(0.0, MOVED, generator=draw)
                parameter.add_(noise)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(moved, kept, strict=True):
                parameter.copy_(before)
