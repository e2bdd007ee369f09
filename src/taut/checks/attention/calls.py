"""What every layer calls. A mask of the library's that says more than its layers ask for would be dropped."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.models import architecture


def ask(session: Session) -> Finding:
    """Does every attention layer call the attention that was chosen, once?"""
    seen, chosen = session.observed, session.loaded.attention
    expected = architecture.attention_layer_count(session.scorer.model)
    names = {module: name for name, module in session.scorer.named_modules()}
    called = [names.get(module, type(module).__name__) for module in seen.layers]
    if len(called) != expected or len(set(called)) != expected:
        twice = sorted({name for name in called if called.count(name) > 1})
        return failed(
            f"{len(set(called))} of {expected} attention layers called {chosen.name}, in {len(called)} calls",
            number=len(set(called)),
            unit=f"of {expected} layers",
            evidence=[
                f"called: {', '.join(called) or 'none'}",
                *(f"more than once: {name}" for name in twice),
            ],
            remedy="the model does not use the library's attention interface throughout; train another model, and "
            "please report this one",
        )
    unasked = {window for window in seen.windows_masked - seen.windows_called if window is not None}
    if expected and unasked:
        return failed(
            f"the model masks a sliding window of {max(unasked)} that no layer asks for by keyword",
            number=max(unasked),
            unit="tokens",
            evidence=[f"windows that layers ask for: {sorted(map(str, seen.windows_called))}"],
            remedy="the window would be dropped; train another model, and please report this one",
        )
    windows = sorted(window for window in seen.windows_called if window is not None)
    notes = [f"windows of {', '.join(map(str, windows))} tokens in some layers"] if windows else []
    return passed(f"all {expected} layers call {chosen.name}", expected, "layers", notes)
