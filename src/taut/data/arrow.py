"""Rows of Arrow data: parquet files, and Hugging Face data sets by directory or name.

Arrow writes a null for each key that another row has; nulls inside objects are taken as absent. A row that Python
cannot hold (text that is not UTF-8, a year beyond 9999) is a DataError that names it.

Owns ``datasets`` and ``pyarrow``, imported when needed. Imported by ``sources.py``.
"""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from taut import durable, hub
from taut.data.formats import shown
from taut.errors import DataError

if TYPE_CHECKING:
    from taut.data.sources import Source

Records: TypeAlias = Iterator[tuple[int, Any]]
BATCH = 256
"""Rows of an Arrow file read at a time: with pictures in them they are large."""
ARROW_FAILURES = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)
"""What values that Python cannot hold raise: text that is not UTF-8, a year beyond 9999."""
LOAD_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    ArithmeticError,
    EOFError,
    yaml.YAMLError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)
"""What ``datasets``, and what it unpacks files with, raise on a directory they cannot make sense of."""
CARDS = ("README.md", ".huggingface.yaml")
"""Files of a data set that say which files are its data."""
CARD_LIMIT = 2**22
"""Largest card, in bytes."""


def read_parquet(path: Path, name: str) -> Records:
    """The rows of a parquet file."""
    return _read_arrow(_parquet_batches(path, name), name, "parquet")


def _parquet_batches(path: Path, name: str) -> Iterator[Any]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    counts = Counter(file.schema_arrow.names)
    column, times = counts.most_common(1)[0] if counts else ("", 1)
    if times > 1:
        raise DataError(f"{name}: a column is named twice: {shown(column)}; rename one")
    yield from file.iter_batches(batch_size=BATCH)


def load_table(source: Source, path: Path) -> Any:
    """A split of a Hugging Face data set, by directory or name; its rows are in Arrow files."""
    import datasets

    if path.is_dir():
        _require_local(path)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error too
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            where = str(path) if path.is_dir() else source.path.removeprefix("hf://")
            if not path.is_dir():
                hub.settle()
            loaded = datasets.load_dataset(
                where, source.name, revision=source.revision, keep_in_memory=False
            )
    except (*LOAD_FAILURES, datasets.exceptions.DatasetsError) as error:
        if not path.is_dir() and (reason := hub.explain(where, error, "dataset")):
            raise DataError(f"data: {source.path}: {reason}") from None
        cause = error.__cause__ or error  # datasets says only that something went wrong
        raise DataError(
            f"data: {source.path} cannot be loaded as a Hugging Face data set: {_first_line(cause)}; "
            "check the path or name, and the configuration if it has several"
        ) from None
    finally:
        datasets.logging.set_verbosity(verbosity)
    table = _choose_split(loaded, source)
    if not table.cache_files:
        raise DataError(
            f"data: {source.path} is held in memory by datasets; unset "
            "HF_DATASETS_IN_MEMORY_MAX_SIZE"
        )
    return table


def _require_local(directory: Path) -> None:
    """Raise DataError where a directory has what would be waited for, or a card that names data outside of it: the
    library would fetch what lies at an address.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    for folder, _, names in os.walk(directory):
        for name in names:
            if (file := Path(folder, name)).exists():  # a link to nothing is as good as no file
                _require_file(file)
    for card in filter(Path.exists, (directory / name for name in CARDS)):
        try:
            text = durable.read_regular(card, CARD_LIMIT).decode("utf-8")
            if card.suffix == ".md":
                block = REGEX_YAML_BLOCK.search(text)
                text = block[2] if block else ""
            for pattern in _patterns(text):
                is_inside = not re.search(r"://|::|^[/~]", pattern)
                if not is_inside or ".." in Path(pattern).parts:
                    raise DataError(
                        f"data: {card} names the data {pattern[:100]!r}; expected files in {directory}; get the data "
                        "first, and name the file or directory"
                    )
        except OSError as error:
            raise DataError(
                f"data: {card} cannot be read: {error.strerror}; correct it, or remove it"
            ) from None
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"data: {card} cannot be read: {_first_line(error)}; expected YAML; correct it, or remove it"
            ) from None


def _require_file(path: Path) -> None:
    try:
        durable.open_regular(path).close()
    except OSError as error:
        raise DataError(
            f"data: {path} cannot be read: {error.strerror}; expected a regular file; remove it from the data"
        ) from None


def _patterns(text: str) -> Iterator[str]:
    """Everything that the configurations of a card, in YAML, call data: a file's name, a pattern or a folder."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, yaml.SafeLoader)):
        raise ValueError(
            "it repeats parts by reference (*name), which may stand for any number of parts"
        )
    found = yaml.safe_load(text)
    configs = found.get("configs") if isinstance(found, dict) else None
    left: list[Any] = [
        config.get(key)
        for config in (configs if isinstance(configs, list) else [])
        if isinstance(config, dict)
        for key in ("data_files", "data_dir")
    ]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def read_table(table: Any, name: str) -> Records:
    """Its rows as they are in the files: pictures and sound are not decoded."""
    return _read_arrow(table.with_format("arrow").iter(BATCH), name, "Hugging Face")


def _choose_split(loaded: Any, source: Source) -> Any:
    if not isinstance(loaded, dict):
        if source.split is not None:
            raise DataError(f"data: {source.path} has no splits; expected no split; remove it")
        return loaded
    split = source.split or (next(iter(loaded)) if len(loaded) == 1 else None)
    if split not in loaded:
        found = "no split is named" if split is None else f"there is no split {split!r}"
        raise DataError(
            f"data: {source.path}: {found}; expected one of {', '.join(loaded)}; "
            f'set it, as in data.train=[{{ path = "{source.path}", split = "{next(iter(loaded))}" }}]'
        )
    return loaded[split]


def _read_arrow(batches: Iterable[Any], name: str, kind: str) -> Records:
    """The rows of Arrow's batches or tables."""
    import pyarrow

    number = 0
    try:
        for batch in batches:
            for row in _rows_of(batch, name, number):
                number += 1
                yield number, _without_nulls(row)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, *ARROW_FAILURES) as error:
        raise DataError(
            f"{name}: not a {kind} file that can be read after row {number} ({_first_line(error)}); write it anew"
        ) from None


def _rows_of(batch: Any, name: str, number: int) -> Iterable[Any]:
    """``number``: how many rows came before."""
    try:
        return _plain(batch)
    except ARROW_FAILURES:
        return _rows_alone(batch, name, number)


def _plain(batch: Any) -> list[Any]:
    """Validated first: Arrow trusts the offsets in a file, and a damaged one would read beyond its memory."""
    batch.validate(full=True)
    rows: list[Any] = batch.to_pylist()
    return rows


def _rows_alone(batch: Any, name: str, number: int) -> Iterator[Any]:
    """The rows one by one, to name the one that Python cannot hold."""
    for index in range(batch.num_rows):
        try:
            yield from _plain(batch.slice(index, 1))
        except ARROW_FAILURES as error:
            raise DataError(
                f"{name}:{number + index + 1}: the row cannot be read ({_first_line(error)}); correct it"
            ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
