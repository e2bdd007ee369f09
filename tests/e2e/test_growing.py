"""Rows that are tokenized while a run trains give the steps, losses and weights of rows that were tokenized before."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import (
    PLAIN,
    QUIET,
    chats,
    column,
    decisions,
    events,
    largest_difference,
    save_model,
    sft,
    weights,
    write_rows,
)
from tests.helpers.forked_processes import fork, worlds

import taut
from taut.data import dataset, growing
from taut.data.growing import GrowingDataset

KEYS: dict[str, Any] = {**PLAIN, "epochs": 2, "checkpoint__every": 4, "seed": 4}
NOT_COUNTED = "its rows are no whole files of plain JSONL, whose lines are counted, or are not one sample each"
SAME = ("step", "loss", "grad_norm", "sample_ids", "learning_rate", "num_tokens", "sample_nll")


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dataset, "LARGE", 0)
    monkeypatch.setattr(growing, "LARGE", 0)
    monkeypatch.setattr(growing, "FIRST_ROWS", 5)
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))


expect = GrowingDataset.expect


def never(patch: pytest.MonkeyPatch) -> None:
    """There is no process beside the run: steps tokenize their rows to the end."""
    patch.setattr(GrowingDataset, "begin", lambda _: None)


def soon(patch: pytest.MonkeyPatch) -> None:
    """Step 2 is prepared once the process beside the run has come to its end."""
    calls: Counter[int] = Counter()

    def waiting(self: GrowingDataset, steps: Any, *, rows: bool) -> None:
        calls[id(self)] += 1  # step 1 is prepared twice: for what is compared, and to be taken
        if calls[id(self)] == 3 and self.helper.process is not None:
            self.helper.pipe.poll(None)
        expect(self, steps, rows=rows)

    patch.setattr(GrowingDataset, "expect", waiting)


def whenever(patch: pytest.MonkeyPatch) -> None:
    """As it comes."""


Look = Callable[[pytest.MonkeyPatch], None]


def before(model: Path, train: Path, out: Path, **keys: Any) -> taut.Result:
    """A run whose rows ``taut tokenize`` has read, in a cache of its own."""
    cache = str(out.with_name(f"{out.name}.cache"))
    keys = {**KEYS, "data__cache": cache, **keys}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "LARGE", 2**40)
        result = sft(model, train, out, **keys)
    assert "data.tokenized" not in decisions(out)
    return result


def require_equal(left: Path, right: Path) -> None:
    for name in SAME:
        assert column(left, name) == column(right, name), name
    assert largest_difference(weights(left / "model"), weights(right / "model")) == 0.0


@pytest.mark.parametrize("look", [never, soon, whenever], ids=lambda it: it.__name__)
def test_equal_to_rows_that_were_tokenized_before(
    look: Look,
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look(monkeypatch)
    out = sft(model, train, tmp_path / "out", **KEYS).out
    value, reason = decisions(out)["data.tokenized"]
    assert value == "while training"
    assert reason.endswith("each is one sample; a refused row ends the run")
    require_equal(out, before(model, train, tmp_path / "before").out)
    (told,) = [event["data"] for event in events(out, "end")]
    if look is never:
        expected = ", the last two of the first 5 rows: not all are tokenized"
        assert told == events(out, "start")[0]["data"]
        assert told.endswith(expected)
    if look is soon:
        assert told == events(tmp_path / "before", "start")[0]["data"]


def test_blank_lines_a_byte_order_mark_and_several_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines = [json.dumps(row) for row in chats(24)]
    (folder / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + "\n\n  \r\n".join(lines[:11]).encode() + b"\n \n"
    )
    (folder / "b.jsonl").write_bytes(b"\r\n" + "\r\n".join(lines[11:]).encode())
    never(monkeypatch)
    out = sft(model, folder, tmp_path / "out", **KEYS).out
    require_equal(out, before(model, folder, tmp_path / "before").out)
    named = {name for step in column(out, "sample_ids") for name in step}
    assert f"{folder}/a.jsonl:4" in named
    assert f"{folder}/b.jsonl:2" in named


@pytest.mark.parametrize("look", [never, soon], ids=lambda it: it.__name__)
def test_a_resume_is_exact(
    look: Look,
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint is of a time at which some rows, or all, were tokenized; the resumed run reads all rows first."""
    keys = {**PLAIN, "steps": 8, "seed": 3, "checkpoint__every": 4}
    look(monkeypatch)
    parts = sft(model, train, tmp_path / "parts", **{**keys, "steps": 4}).out
    if look is never:
        shutil.rmtree(tmp_path / "cache")
    sft(model, train, parts, **keys, resume=True)
    if look is never:
        reason = "a resume compares all rows with those of its checkpoint"
        assert decisions(parts)["data.tokenized"] == ("before the first step", f"{train}: {reason}")
    require_equal(parts, before(model, train, tmp_path / "before", **keys, epochs=None).out)


def test_a_resume_refuses_other_rows(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    shutil.copy(train, rows)
    never(monkeypatch)
    sft(model, rows, tmp_path / "out", **{**KEYS, "epochs": 1})
    write_rows(rows, chats(23, seed=8))
    with pytest.raises(taut.ConfigError, match="belongs to another run: data"):
        sft(model, rows, tmp_path / "out", **KEYS, resume=True)


def chat(answer: str) -> str:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


FAULTY = {
    "broken": (chat("ran")[:-4], r"rows.jsonl:24: broken JSON"),
    "empty": (chat(""), r"rows.jsonl:24: .* is empty"),
    "long": (chat("the cat " * 300), r"rows.jsonl:24: \d+ tokens, max_length 200"),
}


@pytest.mark.parametrize("look", [never, soon], ids=lambda it: it.__name__)
@pytest.mark.parametrize("fault", FAULTY)
def test_a_refused_row_ends_the_run(
    fault: str,
    look: Look,
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, expected = FAULTY[fault]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(f"{train.read_text()}{line}\n")
    look(monkeypatch)
    with pytest.raises(taut.TautError, match=expected):
        sft(model, rows, out, **KEYS)
    # With this seed step 4 has the row; the process beside the run finds it during the first step.
    assert column(out, "step") == ([1, 2, 3] if look is never else [1])
    (end,) = events(out, "end")
    assert end["outcome"] == "stopped"
    assert re.search(expected, end["reason"])


def test_a_row_that_is_two_samples_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that writes earlier turns anew makes a sample of each turn, which the first rows do not show."""
    model = save_model(tmp_path / "model")
    template = tmp_path / "last.jinja"
    template.write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ message['content'] if loop.last or message['role'] != 'assistant' else '...' }}{{ '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    rows = chats(23)
    rows[19]["messages"] += rows[3]["messages"][1:]
    train = write_rows(tmp_path / "rows.jsonl", rows)
    for name, look in {"never": never, "soon": soon}.items():
        expected = (
            "rows make .* samples, .*; tokenize the rows first: taut tokenize, with the same keys"
        )
        keys = {**KEYS, "data__template": str(template)}
        keys["data__cache"] = str(tmp_path / f"{name}.cache")
        with pytest.MonkeyPatch.context() as patch:
            look(patch)
            with pytest.raises(taut.DataError, match=expected):
                sft(model, train, tmp_path / name, **keys)
    # where the first rows have such a one, all are read first
    train = write_rows(tmp_path / "rows.jsonl", [rows[19], *rows])
    out = sft(model, train, tmp_path / "out", **KEYS, data__template=str(template)).out
    value, reason = decisions(out)["data.tokenized"]
    assert (value, reason) == (
        "before the first step",
        f"{train}: {NOT_COUNTED}",
    )


WAITING: dict[str, tuple[dict[str, Any], str]] = {
    "dropped": ({"data__too_long": "drop"}, "too_long: rows may be left out, or all are measured"),
    "length": ({"data__min_length": 2}, "min_length: rows may be left out, or all are measured"),
    "tokens": ({"batch__tokens_per_step": 400, "batch__samples_per_step": 32}, "tokens_per_step: "),
    "groups": ({"batch__group_prefixes": True}, "group_prefixes: rows may"),
}


@pytest.mark.parametrize("case", WAITING)
def test_the_reason_to_read_all_rows_first_is_recorded(
    case: str, model: Path, train: Path, tmp_path: Path
) -> None:
    keys, expected = WAITING[case]
    out = sft(model, train, tmp_path / "out", **{**PLAIN, "steps": 1, **keys}).out
    value, reason = decisions(out)["data.tokenized"]
    assert value == "before the first step"
    assert reason.startswith(f"{train}: {expected}")
    assert "data" not in events(out, "end")[0]


def test_parts_and_mixtures_are_read_first(model: Path, train: Path, tmp_path: Path) -> None:
    rows = {"path": str(train)}
    cases: dict[str, list[dict[str, Any]]] = {
        NOT_COUNTED: [{**rows, "share": [0, 0.9]}],
        "it is a mixture": [rows, {**rows, "weight": 2}],
    }
    for number, (expected, sources) in enumerate(cases.items()):
        keys = {**PLAIN, "steps": 1, "data.train": sources}
        out = sft(model, train, tmp_path / str(number), **keys).out
        assert expected in decisions(out)["data.tokenized"][1]


def test_checks_and_reports_are_of_the_first_rows(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never(monkeypatch)
    out = sft(model, train, tmp_path / "out", **{**KEYS, "check": "quick"}).out
    (start,) = events(out, "start")
    assert start["data"].startswith("23 rows, 23 samples, ")
    assert start["data"].endswith(", the last two of the first 5 rows: not all are tokenized")
    found = {event["name"]: event for event in events(out, "check") if event.get("part")}
    assert found["stop.targets"]["outcome"] == "passed"
    assert "5 of 23 samples looked at" in found["data.tokens"]["detail"]


def test_decisions_are_printed_when_they_are_known(
    model: Path, train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that do not depend on the data before these are read; each once."""
    keys = {**PLAIN, "log__console": True, "steps": 1, "optim__learning_rate": None}
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    with pytest.raises(taut.DataError, match="broken JSON"):
        sft(model, broken, tmp_path / "refused", **keys)
    known = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert known == ["optim.learning_rate", "stop"]
    out = sft(model, train, tmp_path / "out", **keys).out
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [name for name in names if name in decisions(out)] == list(decisions(out))
    assert names[:2] == known


def _two_ranks(keys: dict[str, Any], look: str, large: int, world: dict[str, str]) -> None:
    os.environ.update(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "LARGE", large)
        patch.setattr(growing, "LARGE", large)
        patch.setattr(growing, "FIRST_ROWS", 5)
        {"never": never, "soon": soon}[look](patch)
        taut.sft(**keys)


@pytest.mark.parametrize("look", ["never", "soon"])
def test_two_ranks_take_the_same_steps(look: str, model: Path, train: Path, tmp_path: Path) -> None:
    keys = {**QUIET, "model": str(model), "data.train": str(train), "check": "off", "epochs": 1}
    for name, large in (("growing", 0), ("before", 2**40)):
        keys |= {"out": str(tmp_path / name), "contract.prompts": 0}
        cache = {"TAUT_CACHE": str(tmp_path / f"{name}.cache")}
        given = [(keys, look, large, {**world, **cache}) for world in worlds(2)]
        assert fork(_two_ranks, given) == [0, 0]
    assert "data.tokenized" in decisions(tmp_path / "growing")
    (told,) = [event["data"] for event in events(tmp_path / "growing", "end")]
    assert told.endswith("tokenized") == (look == "never")
    assert "data.tokenized" not in decisions(tmp_path / "before")
    require_equal(tmp_path / "growing", tmp_path / "before")
