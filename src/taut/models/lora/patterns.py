"""Whether peft can match the regular expressions of a saved adapter against a model's names in bounded time.

adapter_config.json comes from the adapter's author, and peft passes its patterns to ``re`` as they are: ``(a+)+$`` runs
practically forever. Each pattern is first matched here, in the form and on the names that peft uses, in the limited
process of ``taut.io.limited_call``. That process imports this file, which therefore imports neither torch nor peft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from taut.errors import ModelError
from taut.io import limited_call

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
"""Settings whose entries are plain names in a list, and a pattern in a string."""


def require_bounded_patterns(place: str, settings: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ModelError for an invalid pattern in ``settings``, or one whose matching on ``names`` takes too long."""
    for setting, form in FORMS.items():
        value = settings.get(setting)
        if isinstance(value, str):
            patterns = [value]
        elif setting in LITERAL_IN_LISTS:
            continue
        else:
            patterns = [pattern for pattern in value or () if isinstance(pattern, str)]
        if not patterns:
            continue
        try:
            limited_call.call("taut.models.lora.patterns:match_all", form, patterns, list(names))
        except (limited_call.LimitExceeded, limited_call.FunctionFailed) as error:
            is_slow = isinstance(error, limited_call.LimitExceeded)
            reason = f"matching it {error}" if is_slow else f"it is no regular expression ({error})"
            shown = repr(patterns[0][:80]) + (" and others" if patterns[1:] else "")
            raise ModelError(
                f"{place}: adapter_config.json has {setting} {shown}: {reason}; expected patterns that match "
                f"{len(names):,} module names at once; write the names out, or use another adapter"
            ) from None


def match_all(form: str, patterns: Sequence[str], names: Sequence[str]) -> int:
    """How many pairs of a pattern and a name match. Expressions come from ``re``'s cache, as in peft."""
    return sum(
        re.match(form.replace("{}", pattern), name) is not None
        for name in names
        for pattern in patterns
    )
