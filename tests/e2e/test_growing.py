"""Rows that are tokenized while a run trains give the steps, losses and weights of rows that were tokenized before."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from taut.data.growing import Growing

KEYS: dict[str, Any] = {**PLAIN, "epochs": 2, "checkpoint__every": 4, "seed": 4}
SAME = ("step", "loss", "grad_norm", "sample_ids", "learning_rate", "num_tokens", "sample_nll")


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dataset, "LARGE", 0)
    monkeypatch.setattr(growing, "FIRST_ROWS", 5)
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))


def never(_: Growing) -> bool:
    """The process beside the run does not come to its end."""
    return False


def at_once(growing: Growing) -> bool:
    """A step waits until the process beside the run has come to its end."""
    while not growing._helper.pipe.poll(1):
        pass
    return is_done(growing)


is_done = Growing.is_done


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


@pytest.mark.parametrize("look", [never, at_once, is_done], ids=lambda it: it.__name__)
def test_equal_to_rows_that_were_tokenized_before(
    look: Callable[[Growing], bool],
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Growing, "is_done", look)
    out = sft(model, train, tmp_path / "out", **KEYS).out
    value, reason = decisions(out)["data.tokenized"]
    assert value == "while training"
    assert reason.endswith("each is one sample; a refused row ends the run")
    require_equal(out, before(model, train, tmp_path / "before").out)
    ended = [event["detail"] for event in events(out, "warning") if event["name"] == "data"]
    told = events(out, "data")
    if look is never:
        assert not told
        assert ended == [
            f"{train}: the run ended before all rows were tokenized; those that no step took were not looked at"
        ]
    if look is at_once:
        assert not ended
        assert told[0]["data"].startswith("23 rows, 23 samples, ")
        assert (
            told[0]["sets"][0]["num_tokens"]
            == events(tmp_path / "before", "start")[0]["sets"][0]["num_tokens"]
        )


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
    monkeypatch.setattr(Growing, "is_done", never)
    out = sft(model, folder, tmp_path / "out", **KEYS).out
    require_equal(out, before(model, folder, tmp_path / "before").out)
    named = {name for step in column(out, "sample_ids") for name in step}
    assert f"{folder}/a.jsonl:4" in named
    assert f"{folder}/b.jsonl:2" in named


@pytest.mark.parametrize("look", [never, at_once], ids=lambda it: it.__name__)
def test_a_resume_is_exact(
    look: Callable[[Growing], bool],
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint is of a time at which some rows, or all, were tokenized; the resumed run reads all rows first."""
    keys = {**PLAIN, "steps": 8, "seed": 3, "checkpoint__every": 4}
    monkeypatch.setattr(Growing, "is_done", look)
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
    monkeypatch.setattr(Growing, "is_done", never)
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


@pytest.mark.parametrize("look", [never, at_once], ids=lambda it: it.__name__)
@pytest.mark.parametrize("fault", FAULTY)
def test_a_refused_row_ends_the_run(
    fault: str,
    look: Callable[[Growing], bool],
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, expected = FAULTY[fault]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(f"{train.read_text()}{line}\n")
    monkeypatch.setattr(Growing, "is_done", look)
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
    for name, look in {"never": never, "at once": at_once}.items():
        monkeypatch.setattr(Growing, "is_done", look)
        expected = r"rows.jsonl:20: the row makes 2 samples, .*; tokenize the rows first: taut tokenize, with the same"
        keys = {**KEYS, "data__template": str(template)}
        keys["data__cache"] = str(tmp_path / f"{name}.cache")
        with pytest.raises(taut.DataError, match=expected):
            sft(model, train, tmp_path / name, **keys)
    # where the first rows have such a one, all are read first
    train = write_rows(tmp_path / "rows.jsonl", [rows[19], *rows])
    out = sft(model, train, tmp_path / "out", **KEYS, data__template=str(template)).out
    value, reason = decisions(out)["data.tokenized"]
    assert (value, reason) == (
        "before the first step",
        f"{train}: a row is not one sample: all rows are read to count them",
    )


WAITING: dict[str, tuple[dict[str, Any], str]] = {
    "dropped": ({"data__too_long": "drop"}, "data.too_long=drop may leave rows out"),
    "tokens": (
        {"batch__tokens_per_step": 400, "batch__samples_per_step": 32},
        "batch.tokens_per_step needs",
    ),
    "groups": ({"batch__group_prefixes": True}, "batch.group_prefixes compares all rows"),
    "length": ({"data__min_length": 2}, "data.min_length=2 may leave rows out"),
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
    assert not events(out, "data")


def test_parts_and_mixtures_are_read_first(model: Path, train: Path, tmp_path: Path) -> None:
    rows = {"path": str(train)}
    cases: dict[str, list[dict[str, Any]]] = {
        "share, limit, replace, prepend and append": [{**rows, "share": [0, 0.9]}],
        "a mixture counts the samples of each source": [rows, {**rows, "weight": 2}],
    }
    for number, (expected, sources) in enumerate(cases.items()):
        keys = {**PLAIN, "steps": 1, "data.train": sources}
        out = sft(model, train, tmp_path / str(number), **keys).out
        assert expected in decisions(out)["data.tokenized"][1]


def test_checks_and_reports_are_of_the_first_rows(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growing, "is_done", never)
    out = sft(model, train, tmp_path / "out", **{**KEYS, "check": "quick"}).out
    (start,) = events(out, "start")
    assert start["data"] == "23 rows, tokenized while training; 5 before the first step"
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
    dataset.LARGE, growing.FIRST_ROWS = large, 5
    Growing.is_done = {"never": never, "at_once": at_once}[look]  # type: ignore[method-assign]
    taut.sft(**keys)


@pytest.mark.parametrize("look", ["never", "at_once"])
def test_two_ranks_take_the_same_steps(look: str, model: Path, train: Path, tmp_path: Path) -> None:
    keys = {**QUIET, "model": str(model), "data.train": str(train), "check": "off", "epochs": 1}
    for name, large in (("growing", 0), ("before", 2**40)):
        keys |= {"out": str(tmp_path / name), "contract.prompts": 0}
        cache = {"TAUT_CACHE": str(tmp_path / f"{name}.cache")}
        given = [(keys, look, large, {**world, **cache}) for world in worlds(2)]
        assert fork(_two_ranks, given) == [0, 0]
    assert "data.tokenized" in decisions(tmp_path / "growing")
    assert bool(events(tmp_path / "growing", "data")) == (look == "at_once")
    assert "data.tokenized" not in decisions(tmp_path / "before")
    require_equal(tmp_path / "growing", tmp_path / "before")
