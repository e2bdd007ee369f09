"""A data set folder: ``train.jsonl`` and a card, which ``datasets`` loads by the folder's name.

    README.md       YAML (configs, features, sizes, license), then how the rows were made
    train.jsonl     the rows
    ...             what else the maker of the rows puts there; the card keeps ``datasets`` from reading it as rows

The features are those that ``datasets`` itself infers when it loads the rows. Rows that it cannot give one type, as a
column that is a text here and a list there, are written all the same, and the card says that it cannot load them.

The folder appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from taut.config import home_path
from taut.errors import OutputError
from taut.io import files
from taut.io.temporary import TemporaryFolder

ROWS = "train.jsonl"
CARD = "README.md"


@dataclass(frozen=True)
class Card:
    """Contents of the card of a data set."""

    title: str
    about: str
    """Description of how the rows were made, in Markdown."""
    license: str | None = None
    """An SPDX name in lower case, as the Hugging Face hub lists them."""


def is_folder(out: str) -> bool:
    """Whether ``out`` names a data set folder: it ends in a slash."""
    return out.endswith(("/", os.sep))


def require_new(directory: Path) -> None:
    """Raise OutputError unless the folder can be made here."""
    if directory.exists():
        raise OutputError(
            f"out={directory}/ exists; expected a new directory; name another, or remove it"
        )


@contextmanager
def writing_folder(directory: Path) -> Iterator[Path]:
    """A directory for the files of the folder, which takes its place when the block ends without an exception."""
    with files.replacing_directory(directory) as partial:
        yield partial
        require_new(directory)  # another process may have made it


def write_card(folder: Path, card: Card) -> str:
    """Write the card of the rows in ``folder``. Returns the reason why ``datasets`` cannot load them, if any."""
    header: dict[str, Any] = {} if card.license is None else {"license": card.license}
    header["configs"] = [
        {"config_name": "default", "data_files": [{"split": "train", "path": ROWS}]}
    ]
    info, fault = _inferred(folder / ROWS)
    if info is not None:
        header["dataset_info"] = info
    lines = [f"# {card.title}", "", card.about]
    if fault:
        lines += ["", f"`datasets` cannot load these rows: {fault}. taut reads {ROWS}."]
    front = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    (folder / CARD).write_text("\n".join(["---", f"{front}---", "", *lines, ""]), encoding="utf-8")
    return fault


def _inferred(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The features and sizes of a file of rows for the card, or why there are none."""
    import datasets
    from huggingface_hub import DatasetCardData

    # Load the rows as the library does, without its lines and bars.
    before = datasets.is_progress_bar_enabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        with TemporaryFolder("data") as scratch:
            table: Any = datasets.load_dataset(
                "json", data_files=str(path), split="train", cache_dir=str(scratch)
            )
            features = datasets.Features(table.features)
            num_rows = len(table)
            del table
    except datasets.exceptions.DatasetsError as error:
        return None, str(error.__cause__ or error).splitlines()[0]
    finally:
        datasets.logging.set_verbosity(verbosity)
        if before:
            datasets.enable_progress_bars()
    # What it found, as a card has it.
    split = datasets.SplitInfo("train", num_bytes=path.stat().st_size, num_examples=num_rows)
    info = datasets.DatasetInfo(features=features, splits=datasets.SplitDict({"train": split}))
    data: Any = DatasetCardData()
    datasets.info.DatasetInfosDict({"default": info}).to_dataset_card_data(data)
    return data["dataset_info"], ""


def sources_listed(sources: Sequence[dict[str, Any]]) -> str:
    """The sources of rows for a card: path, rows and digest of each."""
    return "\n".join(
        f"- `{source['path']}`: {source['rows']:,} rows, `{source['digest']}`" for source in sources
    )


def beside(out: str, name: str) -> Path:
    """The path of a file beside ``out``."""
    path = home_path(out)
    return path.with_name(f"{path.name}.{name}")
