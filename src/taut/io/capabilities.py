"""Features of taut that need a new enough torch or transformers, each asked for by its name.

taut runs with a range of versions (pyproject.toml). What an older one of the range lacks is a capability: listed here
with the version that brought it, and asked for once, where a run first needs it.

    require("a model with pictures", "model=DIR")    ModelError: model=DIR: a model with pictures needs transformers ...
    lack("a model with pictures")                    the reason; None: it is there

A version below the range is refused before anything is imported (``taut.io.extras``).
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import NamedTuple

from packaging.version import Version

from taut.errors import ModelError


class Capability(NamedTuple):
    """A feature that a version of a library brought."""

    library: str
    since: str
    """The first version that has it."""
    brought: str
    """Change of that version which taut uses."""


CAPABILITIES = {
    "a model with pictures": Capability(
        "transformers",
        "5.18",
        "takes the features of pictures ready made and opens image processors without torchvision",
    ),
    "a scalar head on a model with pictures": Capability(
        "transformers", "5.19", "registers a class of one's own for one of its configurations"
    ),
    "a base that comes quantized": Capability(
        "transformers", "5.21", "hands over all stored tensors of a quantized weight together"
    ),
    "an adapter of quantized experts": Capability(
        "peft", "0.21", "gives the factors of an expert's adapter without its weights"
    ),
    "tensor parallelism": Capability(
        "transformers", "5.23", "divides a layer's weights before they are read"
    ),
    "a model read from GGUF": Capability(
        "transformers", "5.18", "reads the special tokens of its tokenizer as they are"
    ),
}
"""Name -> capability. tests/unit/io/test_capabilities.py takes each away."""


def lack(name: str) -> str | None:
    """The reason why the installed libraries cannot do it, or None."""
    library, since, brought = CAPABILITIES[name]
    found = installed(library)
    if Version(found) >= Version(since):
        return None
    return f"{name} needs {library} {since} or newer, which {brought}; found {library} {found}"


def require(name: str, place: str) -> None:
    """Raise ModelError where the installed libraries cannot do it. ``place``: the key that asks for it."""
    if (reason := lack(name)) is not None:
        library, since, _ = CAPABILITIES[name]
        raise ModelError(f"{place}: {reason}; run: pip install '{library}>={since}'")


@cache
def installed(library: str) -> str:
    """The installed version of a library."""
    return version(library)
