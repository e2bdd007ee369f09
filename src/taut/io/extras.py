"""The optional parts of an installation: what each adds, whether it is installed, and the command that adds it.

taut itself needs a few small packages: enough for ``taut --help``, ``taut runs``, ``taut schema`` and ``taut check
--recipe``. The extra ``train`` adds torch, transformers and what else the other commands need; each of the others
serves one setting or one command. Who uses a package of an extra asks ``require`` first, once, before work begins.

    require("train", "taut sft")        ConfigError: taut sft needs torch, not installed here; expected ...; run: ...
    install_command("train")            pip install 'taut[train]'
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from taut.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

SHOWN = 5
"""Missing packages in one message."""

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": (
        "torch",
        "transformers",
        "anyio",
        "cachetools",
        "cloudpickle",
        "datasets",
        "httpx2",
        "jinja2",
        "numpy",
        "peft",
        "PIL",
        "pyarrow",
        "safetensors",
        "starlette",
        "tenacity",
        "tokenizers",
        "uvicorn",
    ),
    "data": ("rensa",),
    "compressed": ("compressed_tensors",),
    "gguf": ("gguf",),
    "gym": ("gymnasium",),
    "gs": ("gcsfs",),
    "modelscope": ("modelscope",),
    "quant": ("bitsandbytes",),
    "ray": ("ray",),
    "lm-eval": ("lm_eval",),
    "mcp": ("mcp",),
    "s3": ("s3fs",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "verifiers": ("verifiers",),
    "wandb": ("wandb",),
}
"""Extra -> the modules of its packages, as pyproject.toml lists them. The libraries of the extras ``rl`` and ``video``
are asked for one by one, by the reward or the row that needs them."""


NEWEST = {"torch": "2.15", "transformers": "5.23", "peft": "0.21"}
"""The newest versions tested, as in the table of docs/install.md. Newer ones are not refused."""


def require(extra: str, needed_by: str) -> None:
    """Raise ConfigError where a package of the extra is not installed, or has a version outside the range of
    pyproject.toml, as where another program put it there. ``needed_by``: a command or a setting.
    """
    from importlib import metadata

    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ConfigError(
            f"{needed_by} needs {', '.join(missing[:SHOWN])}{more}, not installed here; expected the extra {extra}; "
            f"run: {install_command(extra)}"
        )
    try:
        packages = _requirements()
    except metadata.PackageNotFoundError:  # taut that runs from its source has no ranges
        return
    for package in packages:
        if package.marker is not None and not package.marker.evaluate({"extra": extra}):
            continue
        try:
            found = metadata.version(package.name)
        except metadata.PackageNotFoundError:  # put there without its metadata: no version
            continue
        if not package.specifier.contains(found, prereleases=True):
            raise ConfigError(
                f"{needed_by} found {package.name} {found}; expected {package.specifier}; "
                f"run: pip install '{package.name}{package.specifier}'"
            )


@cache
def _requirements() -> list[Requirement]:
    """The packages of pyproject.toml, with the extra of each as its marker."""
    from importlib import metadata

    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires("taut") or []]


@contextmanager
def explained_imports() -> Iterator[None]:
    """Raise ConfigError where a version newer than any tested no longer has a name that taut imports."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in NEWEST or find_spec(library) is None:
            raise
        raise ConfigError(
            f"{library} {_version(library)} lacks a name that taut uses ({error}); expected at most {NEWEST[library]}; "
            f"run: pip install '{library}=={NEWEST[library]}.*'"
        ) from error


def _version(library: str) -> str:
    """The version of a library, for a message; a package without metadata has none."""
    from importlib import metadata

    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "without a version"


def install_command(extra: str) -> str:
    """The pip command that adds an extra to this installation: from the index, file, directory or repository that taut
    came from (PEP 610).
    """
    from importlib import metadata

    try:
        text = metadata.distribution("taut").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from its source, which is on the path
        return f"pip install -e {shlex.quote(f'{Path(__file__).parents[3]}[{extra}]')}"
    if text is None:
        return f"pip install 'taut[{extra}]'"
    # where pip got taut from
    origin = json.loads(text)
    url = origin["url"]
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e {shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if repository := origin.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    if folder := origin.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f"pip install {shlex.quote(f'taut[{extra}] @ {url}')}"
