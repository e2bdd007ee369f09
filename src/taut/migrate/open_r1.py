"""open-r1: recipes/MODEL/METHOD/config.yaml, and scripts that start src/open_r1/METHOD.py with one.

It trains with the trl that its setup.py pins (0.18.0), so that is the version its traps are those of.
``examine.py`` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taut.migrate.dialect import Dialect, Found, Release
from taut.migrate.recipe import Method, Setting
from taut.migrate.trl import ALIASES

METHODS: tuple[Method, ...] = ("sft", "grpo")


def find(words: Sequence[str]) -> Found | None:
    """``src/open_r1/sft.py`` under whatever launcher."""
    for at, word in enumerate(words):
        for method in METHODS:
            if word.endswith((f"open_r1/{method}.py", f"open_r1.{method}")):
                return Found(method, at + 1, is_script=True)
    return None


def release(settings: Mapping[str, Setting]) -> Release:
    """The trl that open-r1 asks for."""
    return Release("0.18.0", "what open-r1's setup.py pins")


DIALECT = Dialect(
    name="open-r1",
    library="trl",
    find=find,
    methods=METHODS,
    release=release,
    options_of="open-r1 with trl 0.18.0",
    model=("model_name_or_path",),
    data=("dataset_name", "dataset_mixture"),
    aliases=ALIASES,
    environment="env",
)
