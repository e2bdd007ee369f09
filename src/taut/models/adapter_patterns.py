"""Whether peft can match the regular expressions of a saved adapter against a model's names in bounded time.

adapter_config.json comes from whoever made the adapter, and peft hands its patterns to ``re`` as they are: ``(a+)+$``
takes longer than anyone waits. Each is matched here first, in the form and on the names that peft matches it, in the
process of ``taut.io.processes``. May import errors and bounded; ``lora.py`` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from taut.errors import ModelError
from taut.io import processes

FORMS = {
    "target_modules": r"({})\Z",
    "exclude_modules": r"({})\Z",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
}
"""How peft completes the patterns of each setting."""
LITERAL_IN_LISTS = ("target_modules", "exclude_modules")
"""Settings whose entries are names when they are a list, and a pattern when they are a text."""


def require_bounded_patterns(place: str, settings: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ModelError for a pattern in ``settings`` that is none, or whose matching on ``names`` takes too long."""
    for setting, form in FORMS.items():
        given = settings.get(setting)
        if isinstance(given, str):
            patterns = [given]
        elif setting in LITERAL_IN_LISTS:
            continue
        else:
            patterns = [pattern for pattern in given or () if isinstance(pattern, str)]
        if not patterns:
            continue
        try:
            processes.call("taut.models.adapter_patterns:match_all", form, patterns, list(names))
        except (processes.LimitExceeded, processes.FunctionFailed) as error:
            is_slow = isinstance(error, processes.LimitExceeded)
            reason = f"matching it {error}" if is_slow else f"it is no regular expression ({error})"
            shown = repr(patterns[0][:80]) + (" and others" if patterns[1:] else "")
            raise ModelError(
                f"{place}: adapter_config.json has {setting} {shown}: {reason}; expected patterns that match the "
                f"{len(names):,} module names of the model at once; write the names out, or use another adapter"
            ) from None


def match_all(form: str, patterns: Sequence[str], names: Sequence[str]) -> int:
    """How many pairs of a pattern and a name match. Expressions are looked up in ``re``'s cache, as peft does."""
    return sum(
        re.match(form.replace("{}", pattern), name) is not None
        for name in names
        for pattern in patterns
    )
