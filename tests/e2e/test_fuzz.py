"""2,000 malformed rows and configurations: each loads, or is refused in one line that names the place.

A loader is a line in LOADERS: how many cases, and a function that draws one (a file with one mistake, say), gives the
call that loads it, and the words that name where the mistake is. What every loader is held to is in ``refused`` and
``test_what_is_malformed_is_refused_by_place``: no other exception, no warning, no hang, nothing left on disk, and more
than half of the cases refused, so that nobody passes by being kind. A case is its loader and number, always the same.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from tests.helpers.all_commands import ALL
from tests.helpers.chat_runs import QUIET, chats, words_of, write_rows
from tests.helpers.malformed_inputs import (
    FLAT,
    JUDGED,
    ROWS,
    SIMPLE,
    TEXT,
    TOML,
    spoil_bytes,
    spoil_value,
)
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.cli import config_class, main
from taut.config import describe, load
from taut.data.dataset import load_dataset
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.prompts import load_prompts
from taut.data.rows.schema import Columns
from taut.data.settings import DataConfig, Kind
from taut.errors import TautError

SECONDS = 20
"""No case may take so long."""
TEMPLATES = ("chatml", "qwen2.5", "qwen3", "llama3", "gemma", "mistral", None)


class Case(NamedTuple):
    """Something to load, and how a refusal has to name the place."""

    load: Callable[[], object]
    where: str


class Hang(BaseException):
    """A case that takes too long."""


@cache
def renderer(template: str | None) -> Renderer:
    plain = Renderer(tiny_tokenizer(template))
    return plain.stopping_at(derive_stop_set(plain).ids)


def load_rows(path: Path, template: str | None, kind: Kind = "sft") -> None:
    """As a run does; then every sample is looked at."""
    config = DataConfig(train=str(path), cache=str(path.parent / "cache"))
    data = load_dataset(config, "train", renderer(template), 512, kind=kind)
    assert len(data) == len([sample.ids_T for sample in data]) > 0
    shutil.rmtree(path.parent / "cache")


def rows_with_one_bad(draw: Random, rows: list[dict[str, Any]]) -> tuple[list[Any], int, Any]:
    """Rows, the number of the one that is spoilt, and a template that takes the others."""
    template = draw.choice(TEMPLATES)
    good = TEXT if template is None else SIMPLE
    number = draw.randrange(1, 4)
    found: list[Any] = [good, good]
    found.insert(number - 1, spoil_value(draw, draw.choice(rows)))
    return found, number, template


def jsonl(draw: Random, place: Path) -> Case:
    rows, number, template = rows_with_one_bad(draw, ROWS)
    lines = [json.dumps(row).encode() for row in rows]
    if draw.random() < 0.5:
        line = json.dumps(draw.choice(ROWS), ensure_ascii=False).encode()
        lines[number - 1] = spoil_bytes(draw, line).replace(b"\n", b" ")
    path = place / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    return Case(partial(load_rows, path, template), rf"a\.jsonl:{number}\b")


def judged(draw: Random, place: Path, kind: Kind) -> Case:
    rows: list[Any] = [draw.choice(JUDGED[kind]) for _ in range(3)]
    number = draw.randrange(1, 4)
    rows[number - 1] = spoil_value(draw, rows[number - 1])
    path = write_rows(place / "a.jsonl", rows)
    template = draw.choice(["chatml", "qwen3", "llama3"])
    return Case(partial(load_rows, path, template, kind), rf"a\.jsonl:{number}\b")


def one_json(draw: Random, place: Path) -> Case:
    rows, number, template = rows_with_one_bad(draw, ROWS)
    path, where = place / "a.json", rf"a\.json:{number}\b"
    raw = json.dumps(rows, indent=draw.choice([None, 1])).encode()
    if draw.random() < 0.5:
        good = [TEXT if template is None else SIMPLE] * 2
        raw = spoil_bytes(draw, json.dumps(good, indent=1).encode())
        where = (
            r"a\.json(:\d+)?: (.*at (line \d+, )?column \d+|.*byte \d+|JSON that|the (file|row)|\w)"
        )
    path.write_bytes(raw)
    return Case(partial(load_rows, path, template), where)


def separated(draw: Random, place: Path, suffix: str) -> Case:
    row = draw.choice(FLAT)
    path, number = place / f"a.{suffix}", draw.randrange(1, 4)
    rows = [list(row), *[list(row.values()) for _ in range(3)]]
    where = rf"a\.{suffix}:{number}\b"
    if draw.random() < 0.5:
        cells = spoil_value(draw, rows[number])
        rows[number] = cells if isinstance(cells, list) else [cells]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="," if suffix == "csv" else "\t").writerows(rows)
    raw = text.getvalue().encode(errors="surrogatepass")
    if "\ud800" in text.getvalue() or json.dumps(rows[number]) == json.dumps(list(row.values())):
        raw, where = spoil_bytes(draw, raw), rf"a\.{suffix}(:\d+)?: "
    path.write_bytes(raw)
    template = None if "text" in row or "prompt" in row else draw.choice(["chatml", "llama3"])
    return Case(partial(load_rows, path, template), where)


def arrow_columns(draw: Random) -> pa.Table:
    """A column of a kind, or with values, that Python has no row for."""
    odd = draw.choice(
        [
            pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string()),
            pa.array([b"a", b"b"], pa.binary()),
            pa.array([0, 2**40], pa.timestamp("s")),
            pa.array([float("nan"), 1.0]),
            pa.array([[("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64())),
            pa.array([None, None], pa.null()),
            pa.array(["x", "x"]).dictionary_encode(),
            pa.array([{"role": "user"}, {"role": None}]),
        ]
    )
    columns = {"text": pa.array(["The cat sat.", "A dog."]), draw.choice(["messages", "b"]): odd}
    columns[draw.choice(["text", "prompt", "tools"])] = odd
    names = list(columns) if draw.random() < 0.8 else ["text"] * len(columns)
    return pa.Table.from_arrays(list(columns.values()), names=names)


def parquet(draw: Random, place: Path) -> Case:
    rows, number, template = rows_with_one_bad(draw, ROWS)
    path, where = place / "a.parquet", rf"a\.parquet:{number}\b"
    try:
        columns = sorted({key for row in rows for key in row})
        table = pa.Table.from_pylist([{key: row.get(key) for key in columns} for row in rows])
        pyarrow.parquet.write_table(table, path)
    except (pa.ArrowException, AttributeError, TypeError, UnicodeError, OverflowError):
        pyarrow.parquet.write_table(arrow_columns(draw), path)
        where = r"a\.parquet(:\d+)?: "
    if draw.random() < 0.3:
        path.write_bytes(spoil_bytes(draw, path.read_bytes()))
        where = r"a\.parquet(:\d+)?: "
    return Case(partial(load_rows, path, template), where)


@cache
def hugging_face_files() -> dict[str, bytes]:
    """The files of a small data set, by name."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        datasets.Dataset.from_list([SIMPLE] * 3).save_to_disk(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def hugging_face(draw: Random, place: Path) -> Case:
    path = place / "hf"
    path.mkdir()
    spoilt = draw.choice(sorted(hugging_face_files()))
    for name, raw in hugging_face_files().items():
        (path / name).write_bytes(spoil_bytes(draw, raw) if name == spoilt else raw)
    return Case(partial(load_rows, path, "chatml"), r"hf(:\d+)?\b")


def prompts(draw: Random, place: Path) -> Case:
    rows, number, template = rows_with_one_bad(draw, [*ROWS, {**SIMPLE, "answer": "5", "id": "a"}])
    path = write_rows(place / "p.jsonl", rows)
    reference = draw.choice([None, None, "answer", "output"])
    call = partial(
        load_prompts,
        str(path),
        renderer(template),
        Columns(prefix=""),
        reference=reference,
        needs_reference=template is not None and draw.random() < 0.5,
    )
    return Case(call, rf"p\.jsonl:{number if reference is None else '[123]'}\b")


@cache
def commands() -> dict[str, Any]:
    return {
        name: config_class(it)
        for name, it in ALL.items()
        if it.config is not None and "--" not in name
    }


def assignments(cls: Any) -> dict[str, str]:
    """Keys with a value that is right: every number and switch as it is by default, and what is required."""
    rows = {row.key: row for row in describe(cls)}
    plain = ("integer", "number", "true | false")
    found = {key: row.default for key, row in rows.items() if row.type in plain}
    required = {key: right_one(row.type) for key, row in rows.items() if row.default == "required"}
    needed = {key: '"y"' for key in ("distill.teacher",) if key in rows}
    if "rollout.n" in rows and not needed:
        needed["rewards"] = '"exact_match"'
    if "max_characters" in rows:
        needed["max_characters"] = "20000"
    return {**required, **needed, **found}


def right_one(kind: str) -> str:
    """A value of a key that is required, by its type."""
    if kind.startswith("list of "):
        return '["x"]'
    return '"x"' if kind == "string" else f'"{kind.split(" | ")[0]}"'


def spoil_keys(draw: Random, cls: Any) -> tuple[list[str], str]:
    """``key = value`` lines with one key or value that is wrong, and what has to be named."""
    lines = assignments(cls)
    key = draw.choice([row.key for row in describe(cls)])
    wrong = draw.choice(["value", "value", "value", "typo", "below", "above", "missing"])
    lines.pop(key, None)
    required = [row.key for row in describe(cls) if row.default == "required"]
    if wrong == "missing" and required:
        key = draw.choice(required)
        lines.pop(key, None)
    elif wrong == "above" and "." in key:
        key = key.rpartition(".")[0]
        lines = {name: value for name, value in lines.items() if not name.startswith(f"{key}.")}
        lines[key] = draw.choice(TOML)
    elif wrong == "below":
        lines[f"{key}.{draw.choice(['x', 'a.b', '.'.join('a' * 40)])}"] = draw.choice(TOML)
    elif wrong == "typo":
        at = draw.randrange(len(key))
        lines[key[:at] + draw.choice(["", "_", "é", "-"]) + key[at + 1 :]] = draw.choice(TOML)
        key = key[:at]  # the message may end where keys are unknown
    else:
        lines[key] = draw.choice(TOML)
        key = key.rpartition(".")[0] or key  # where keys contradict each other, their table
    return [f"{name}={value}" for name, value in lines.items()], re.escape(key)


def toml(draw: Random, place: Path, names: list[str]) -> Case:
    cls = commands()[draw.choice(names)]
    lines, key = spoil_keys(draw, cls)
    raw = "\n".join(lines).encode(errors="surrogatepass")
    if draw.random() < 0.4:
        good = [f"{key}={value}" for key, value in assignments(cls).items()]
        raw, key = spoil_bytes(draw, "\n".join(good).encode()), r"at run\.toml|is missing"
    path = place / "run.toml"
    path.write_bytes(raw)
    where = rf"{key}|run\.toml .*(line \d+|at end of document)"
    return Case(partial(load, cls, path), where)


def overrides(draw: Random, place: Path) -> Case:
    cls = commands()[draw.choice(sorted(commands()))]
    lines, key = spoil_keys(draw, cls)
    return Case(partial(load, cls, None, lines), key)


def command_line(draw: Random, place: Path) -> Case:
    """All of a run up to the model; what is right in rows and keys ends at an attention that is not to be had."""
    keys = {**QUIET, "model": str(MODEL[0]), "attention": "varlen", "out": str(place / "out")}
    rows, where = list(chats(3)), r"a\.jsonl:2\b"
    if draw.random() < 0.5:
        rows[1] = spoil_value(draw, rows[1])
        words = []
    else:
        lines, where = spoil_keys(draw, commands()["sft"])
        words = [line for line in lines if not line.startswith(tuple(keys))]
    keys["data.train"] = str(write_rows(place / "a.jsonl", rows))
    words = [*words_of(keys), *(word for word in words if word.split("=")[0] not in keys)]
    return Case(partial(run_command, words), rf"{where}|on the command line|attention=varlen")


def run_command(words: list[str]) -> None:
    """``taut sft``: its error, as it was printed."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        code = main(["sft", *words])
    assert code in (0, 2), told.getvalue()
    if code:
        raise TautError(told.getvalue().removesuffix("\n"))


MODEL: list[Path] = []
"""The tiny model of the session."""

LOADERS: dict[str, tuple[int, Callable[[Random, Path], Case]]] = {
    "jsonl": (380, jsonl),
    "preference": (60, partial(judged, kind="preference")),
    "unpaired": (20, partial(judged, kind="unpaired")),
    "scored": (20, partial(judged, kind="scored")),
    "stepwise": (20, partial(judged, kind="stepwise")),
    "json": (150, one_json),
    "csv": (150, partial(separated, suffix="csv")),
    "tsv": (50, partial(separated, suffix="tsv")),
    "parquet": (200, parquet),
    "Hugging Face": (80, hugging_face),
    "prompts": (250, prompts),
    "run.toml": (250, partial(toml, names=["sft"])),
    "TOML of the other commands": (80, lambda d, p: toml(d, p, sorted({*commands()} - {"sft"}))),
    "overrides": (250, overrides),
    "command line": (40, command_line),
}


def tree(place: Path) -> set[Path]:
    return set(place.rglob("*"))


@contextlib.contextmanager
def time_limit(name: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(name)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(loader: str, number: int, place: Path) -> bool:
    """Whether a case was refused, as it must be; False: it loaded."""
    case = LOADERS[loader][1](Random(f"{loader} {number}"), place)
    name, before = f"{loader}, case {number}", tree(place)
    with time_limit(name):
        try:
            case.load()
        except TautError as error:
            message = str(error)
        else:
            return False
    assert len(message.splitlines()) == 1, (name, message)
    assert re.search(case.where, message), (name, case.where, message)
    assert tree(place) == before, (name, message)
    return True


def count_refused(loader: str, numbers: range, place: Path) -> int:
    """How many of these cases are refused; each in an empty directory."""
    total = 0
    for number in numbers:
        folder = place / str(number)
        folder.mkdir()
        total += refused(loader, number, folder)
        shutil.rmtree(folder)
    return total


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_what_is_malformed_is_refused_by_place(
    loader: str, part: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be drawn, such as that of the cache
    MODEL[:] = [model]
    num_cases, _ = LOADERS[loader]
    numbers = range(0, num_cases, 5 if part == "some" and num_cases >= 150 else 1)
    assert count_refused(loader, numbers, tmp_path) > len(numbers) / 2


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_same_keys_unspoilt_load(name: str) -> None:
    """So that the cases above are refused for their own reason."""
    right = assignments(commands()[name])
    given = load(commands()[name], None, [f"{key}={value}" for key, value in right.items()])
    assert isinstance(given, commands()[name])


def test_there_are_two_thousand() -> None:
    assert sum(chain(num_cases for num_cases, _ in LOADERS.values())) == 2000
