"""``taut push RUN NAME``: the model of a run, another model of taut's, or a data set, to the Hugging Face hub.

    RUN            runs/a: its model/ (adapter/ where that is the result); or runs/a/best, runs/a/adapter by name
    what is sent   every file of that directory, contract included, and a model card (taut/run/card.py)
    a model        a directory of 'taut merge', or one with GGUF files of 'taut export': with a card of what is known
    a data set     a directory with a README.md and no run: its files as they are

One commit holds all of it. A model that does not behave as its contract says is refused. A README.md at the hub that
taut did not write stays; ``card`` uploads one in place of the written one. With ``out`` the folder is written here, and
nothing is sent. In an adapter's files the base model is named as on the card: a path of this
machine helps nobody there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from taut.commands.reading import write_errors
from taut.commands.verify import Verify, verify
from taut.config import configclass, home_path
from taut.errors import CheckFailed, OutputError
from taut.evals.contract import FILE as CONTRACT
from taut.io import files, hub_upload
from taut.io.console import counted
from taut.io.hub_upload import CARD, Kind
from taut.io.terminal import Terminal
from taut.run.card import MARK, base_of_run, write_card, write_plain_card
from taut.train.run_dir import ADAPTER, BEST, MODEL
from taut.train.run_dir import MARK as RUN_MARK

RESULTS = (MODEL, ADAPTER, BEST)
NAMES_BASE = {"adapter_config.json": "base_model_name_or_path", "taut_base.json": "model"}
"""An adapter's files that name its base, and under which key."""


@configclass
class Push:
    """Upload the model of a run, or a data set, to the Hugging Face hub."""

    run: str
    """Directory of the run, or its model, best or adapter directory; of a merged model, or of GGUF files; or of a data
    set with a README.md."""
    name: str
    """The repository: OWNER/NAME, or NAME for one of your own."""
    private: bool = True
    """Whether a new repository is private. One that exists stays as it is."""
    revision: str | None = None
    """The branch, made where it is missing; by default the main one."""
    message: str | None = None
    """The message of the commit."""
    base: str | None = None
    """The base model's name at the hub, where it is not known: the run read it from a directory, or there is no run."""
    out: str | None = None
    """Write the folder here, and upload nothing; it must not exist."""
    unverified: bool = False
    """Upload a model that does not behave as its contract says."""
    card: str | None = None
    """A file to upload as README.md, in place of the card that taut writes."""
    replace_card: bool = False
    """Replace a README.md at the hub that taut did not write."""
    device: str = "auto"
    """Device that verifies the model: auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


@dataclass(frozen=True)
class Folder:
    """What is uploaded."""

    kind: Kind
    directory: Path
    content: Mapping[str, Path | bytes]
    """By their names at the hub."""
    told: list[str] = field(default_factory=list)
    """Lines about what it is, and what the card leaves out."""


def run(config: Push) -> int:
    """Upload, or write the folder, and print what was done."""
    console = Terminal(soft_wrap=True)
    directory = home_path(config.run)
    run_out, model = _source(directory)
    kind: Kind = "dataset" if model is None else "model"
    out = None if config.out is None else home_path(config.out)
    if out is not None and out.exists():
        raise OutputError(f"out={out} exists; expected a new directory; name another, or remove it")
    place = None if out is not None else hub_upload.look(config.name, kind, config.revision)
    name = config.name if place is None else place.name
    if model is None:
        folder = Folder(kind, directory, _files(directory))
    else:
        folder = _model(config, run_out, model, name)
    if out is not None:
        _write(folder, out)
        console.lines([*folder.told, f"written  {out}: {_counted(folder)}; nothing was uploaded"])
        return 0
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
    console.lines([*told, f"uploaded {name} ({how}): {_counted(folder)}", f"commit   {address}"])
    return 0


def _source(directory: Path) -> tuple[Path | None, Path | None]:
    """The run, if there is one, and the directory with the model; None for a data set."""
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
        f"{directory} is neither a run (no {RUN_MARK}), nor the model, best or adapter directory of one, nor a "
        f"model that taut wrote (no {CONTRACT}, no GGUF file), nor a data set (no {CARD}, or a config.json next to "
        "it); expected one of them; 'taut runs DIR' lists runs"
    )


def _model(config: Push, out: Path | None, directory: Path, name: str) -> Folder:
    """The files of a model, verified, with its card. ``out``: the run that trained it, if that is here."""
    told = [f"verified {_verified(config, directory)}"]
    content = _files(directory)
    for file, key in NAMES_BASE.items() if out is not None else ():
        if file in content and out is not None:
            settings = files.read_json(directory / file)
            settings[key] = base_of_run(out, config.base)
            content[file] = (json.dumps(settings, indent=2) + "\n").encode()
    if config.card is not None:
        return Folder("model", directory, {**content, CARD: _own_card(config.card)}, told)
    if out is None:
        card = write_plain_card(directory, name, config.base)
    else:
        card = write_card(out, directory, name, config.base)
    told += [f"left out {line}" for line in card.untold]
    return Folder("model", directory, {**content, CARD: card.text.encode()}, told)


def _own_card(path: str) -> bytes:
    try:
        return files.read_text(home_path(path)).encode()
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(
            f"card={path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}; expected a README.md; "
            "correct the path"
        ) from error


def _verified(config: Push, directory: Path) -> str:
    """What ``taut verify`` finds, in a few words. Raises CheckFailed where the model differs from its contract."""
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
    """The files of a directory by their names there, without hidden ones."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in paths}
    return {
        name: path
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def _write(folder: Folder, out: Path) -> None:
    """Write the folder whole, or not at all."""
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
