"""``taut push RUN NAME``: upload the model of a run, another model of taut's, or a data set to the Hugging Face hub.

    a run          runs/a uploads its model/, or its adapter/ if that is the result; runs/a/best and runs/a/adapter
                   upload these: every file, contract included, and a model card (card.py)
    a model        a directory of 'taut merge', or with GGUF files of 'taut export', and a card of the known facts
    a data set     a directory with a README.md and no run, unchanged

One commit holds all of it. A model that does not behave as its contract says is refused. A README.md at the hub that
taut did not write stays; ``card`` replaces the card that taut writes. With ``out`` the folder is written on this
machine, and nothing is sent. An adapter's files name the base model as the card does, and not by its path here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from taut.commands.reading import write_errors
from taut.commands.settings import Verify
from taut.commands.verify import verify
from taut.config import home_path
from taut.errors import CheckFailed, OutputError
from taut.evals.contract import FILE as CONTRACT
from taut.io import files
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.train.run_dir import ADAPTER, BEST, MODEL, require_no_links
from taut.train.run_dir import MARK as RUN_MARK
from taut_tools.export import hub_upload
from taut_tools.export.card import MARK, base_of_run, write_card, write_plain_card
from taut_tools.export.hub_upload import CARD, Kind
from taut_tools.export.settings import Push

RESULTS = (MODEL, ADAPTER, BEST)
NAMES_BASE = {"adapter_config.json": "base_model_name_or_path", "taut_base.json": "model"}
"""Files of an adapter that name its base, and the key of the name."""


@dataclass(frozen=True)
class Folder:
    """A folder to upload."""

    kind: Kind
    directory: Path
    content: Mapping[str, Path | bytes]
    """Files by their names at the hub."""
    told: list[str] = field(default_factory=list)
    """Lines to print: whether it is verified, and facts that the card leaves out."""


@dataclass(frozen=True)
class Pushed:
    """The result."""

    name: str
    """The repository."""
    commit: str | None
    """Address of the commit; None if the folder was written to ``out``."""
    out: Path | None
    lines: tuple[str, ...]
    """Lines of the summary."""

    def __repr__(self) -> str:
        return f"Pushed({self.name}: {self.commit or self.out})"


def run(config: Push) -> int:
    """Upload a folder, or write it, and print a summary."""
    Terminal(soft_wrap=True).lines(push(config).lines)
    return 0


def push(config: Push) -> Pushed:
    """Upload a folder, or write it."""
    # Find the model, and the place that it goes to.
    directory = home_path(config.run)
    run_out, model = _source(directory)
    kind: Kind = "dataset" if model is None else "model"
    out = None if config.out is None else home_path(config.out)
    if out is not None and out.exists():
        raise OutputError(f"out={out} exists; expected a new directory; name another, or remove it")
    place = None if out is not None else hub_upload.lookup(config.name, kind, config.revision)
    name = config.name if place is None else place.name
    # Verify it, and write its card.
    if model is None:
        folder = Folder(kind, directory, _files(directory))
    else:
        folder = _model(config, run_out, model, name)
    if out is not None:
        _write(folder, out)
        written = f"written  {out}: {_counted(folder)}; nothing was uploaded"
        return Pushed(name, None, out, (*folder.told, written))
    # Upload it in one commit.
    assert place is not None
    content, told = dict(folder.content), folder.told
    if place.card is not None and MARK not in place.card and not config.replace_card:
        del content[CARD]
        told.append(
            f"card     the {CARD} at the hub stays, since taut did not write it; replace_card=true replaces it"
        )
    message = config.message or f"taut push: {folder.directory.resolve().name}"
    address = hub_upload.commit(place, content, message, is_private=config.private)
    is_private = config.private if place.is_private is None else place.is_private
    how = "private" if is_private else "public"
    if place.is_private is not None:
        how += ", as it was"
    uploaded = f"uploaded {name} ({how}): {_counted(folder)}"
    return Pushed(name, address, None, (*told, uploaded, f"commit   {address}"))


def _source(directory: Path) -> tuple[Path | None, Path | None]:
    """The run or None, and the directory with the model or None for a data set."""
    if (directory / RUN_MARK).is_file():
        for name in (MODEL, ADAPTER):
            if (directory / name).is_dir():
                return directory, directory / name
        raise OutputError(
            f"{directory} has no model yet; expected a finished run; 'taut resume {directory}' finishes it"
        )
    whole = directory.resolve()
    if whole.name in RESULTS and (whole.parent / RUN_MARK).is_file():
        return whole.parent, whole
    if (directory / "config.json").is_file() and (directory / CONTRACT).is_file():
        return None, directory
    if any(directory.glob("*.gguf")) and not (directory / "config.json").is_file():
        return None, directory
    if (directory / CARD).is_file() and not (directory / "config.json").is_file():
        return None, None
    if not directory.is_dir():
        raise OutputError(
            f"run={directory} is no directory; expected a run, a model or a data set; correct it"
        )
    raise OutputError(
        f"{directory} is no run (no {RUN_MARK}), no model (no {CONTRACT}, no GGUF file) and no data set (no {CARD}, "
        "or a config.json next to it); expected one; 'taut runs DIR' lists runs"
    )


def _model(config: Push, out: Path | None, directory: Path, name: str) -> Folder:
    """Verify a model, and collect its files and card. ``out`` is the run that trained it, if there is one."""
    if out is not None:
        require_no_links(out)
    content = _files(directory)
    told = [f"verified {_verified(config, directory)}"]
    for file, key in NAMES_BASE.items() if out is not None else ():
        if file in content and out is not None:
            settings = files.read_json(directory / file)
            settings[key] = base_of_run(out, config.base)
            content[file] = (json.dumps(settings, indent=2) + "\n").encode()
    if config.card is not None:
        try:
            content[CARD] = files.read_text(home_path(config.card)).encode()
        except (OSError, UnicodeDecodeError) as error:
            raise OutputError(
                f"card={config.card} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}; expected a "
                "README.md; correct the path"
            ) from error
        return Folder("model", directory, content, told)
    if out is None:
        card = write_plain_card(directory, name, config.base)
    else:
        card = write_card(out, directory, name, config.base)
    told += [f"left out {line}" for line in card.untold]
    return Folder("model", directory, {**content, CARD: card.text.encode()}, told)


def _verified(config: Push, directory: Path) -> str:
    """Verify a model against its contract; the result in words. Raises CheckFailed where it differs."""
    if not (directory / CONTRACT).is_file():
        return f"nothing: {directory.name}/ has no contract"
    use = Verify(
        model=str(directory), device=config.device, trust_remote_code=config.trust_remote_code
    )
    findings = verify(use)
    failed = [found for found in findings if found.outcome == "failed"]
    if not failed:
        return f"{counted(len(findings), 'questions')} of its contract"
    wrong = (
        f"{directory} does not behave as its contract says: {failed[0].name}: {failed[0].detail}"
    )
    if not config.unverified:
        raise CheckFailed(
            f"{wrong}; expected the model that was trained; 'taut verify {directory}' says all of it; "
            "unverified=true uploads it all the same"
        )
    return f"and not as it was: {wrong}"


def _files(directory: Path) -> dict[str, Path | bytes]:
    """Files of a directory by their relative names, without hidden ones. Raises OutputError for a link to a file
    elsewhere, which may be a secret.
    """
    require_no_links(directory, [""])
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in paths}
    return {
        name: path
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def _write(folder: Folder, out: Path) -> None:
    """Write a folder whole, or not at all."""
    with write_errors(out, "; name another"), files.replacing_directory(out) as partial:
        for name, content in folder.content.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                shutil.copyfile(content, partial / name)


def _counted(folder: Folder) -> str:
    sizes = [
        len(content) if isinstance(content, bytes) else content.stat().st_size
        for content in folder.content.values()
    ]
    return f"{counted(len(sizes), 'files')}, {sum(sizes) / 1e6:,.1f} MB"
