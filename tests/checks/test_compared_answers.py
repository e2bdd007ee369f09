"""Runs on answers that are judged: no false alarm for any method, and what is told of their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checks.faults.judged import compared, labeled
from tests.checks.planting import Place
from tests.checks.test_planted import told
from tests.helpers.chat_runs import chats
from tests.helpers.slow_cases import slow_except

from taut.checks.data_quality import length_bias
from taut.checks.examine import Examination, examine
from taut.checks.registry import Finding
from taut.data.label_noise import Lengths


def steps() -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completions": [" the cat.", row["chosen"]], "labels": [True, at % 2 == 0]}
        for at, row in enumerate(compared())
    ]  # fmt: skip


def scored() -> list[dict[str, Any]]:
    return [{"score": float(at % 5), **chat} for at, chat in enumerate(chats(9))]


def talks() -> list[dict[str, Any]]:
    """Pairs as messages."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"].strip()}],
            "rejected": [{"role": "assistant", "content": row["rejected"].strip()}],
        }
        for row in compared()
    ]


RUNS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "dpo": ("dpo", talks(), {}),
    "ipo in bfloat16": ("dpo", compared(), {"dpo__loss": "ipo", "dtype": "bfloat16"}),
    "bco beside sft": ("dpo", compared(), {"dpo__loss": ["bco", "sppo"], "dpo__sft_weight": 0.5}),
    "adapters": ("dpo", compared(), {"lora__rank": 2, "dpo__loss": "aot"}),
    "kto": ("kto", labeled(), {}),
    "orpo": ("orpo", compared(), {}),
    "simpo": ("simpo", compared(), {"dtype": "float32"}),
    "cpo": ("cpo", compared(1), {}),
    "comparisons": ("reward", talks(), {"dtype": "bfloat16"}),
    "comparisons, a bias": (
        "reward",
        compared(),
        {"reward__bias": True, "reward__centering_coef": 0.1},
    ),
    "comparisons, adapters": ("reward", compared(), {"lora__rank": 2}),
    "scores": ("reward", scored(), {"reward__loss": "regression"}),
    "steps": ("reward", steps(), {"reward__loss": "process"}),
}
FULL = {"dpo", "comparisons"}


def ask(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examination:
    method, rows, keys = RUNS[name]
    place = Place(tmp_path, monkeypatch)
    session = place.session(data=place.data(rows), method=method, **keys)
    return examine(session, "full" if name in FULL else "quick")


def answers(found: Examination) -> dict[str, Finding]:
    return {one.name: one.finding for one in found.results}


QUICK = ("adapters", "kto", "simpo", "comparisons", "steps")


@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_no_method_raises_a_false_alarm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examination = ask(name, tmp_path, monkeypatch)
    assert not examination.failures, told(examination)
    found = answers(examination)
    assert found["loss.first"].outcome == "passed"
    if RUNS[name][0] == "reward":
        assert found["reward.batch"].outcome == found["reward.library"].outcome == "passed"
        assert found["attention.neighbor"].unit == "points"
        assert found["loss.tied"].says == "a reward model has no output head"
    has_reference = RUNS[name][0] in ("dpo", "kto")
    assert found["reference.start"].outcome == ("passed" if has_reference else "skipped")


def test_the_loss_begins_at_what_its_formula_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers(ask("dpo", tmp_path, monkeypatch))["reference.start"]
    assert found.number == 0.0
    assert found.says.endswith("the loss is 0.693147 = ln 2, as in theory")


def test_another_model_as_the_reference_is_not_asked_to_be_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    other = place.model("llama")
    keys = {"reference__model": str(other)}
    session = place.session(data=place.data(compared()), method="dpo", **keys)
    found = examine(session)
    assert not found.failures, told(found)
    assert answers(found)["reference.start"].says == "reference.model names another model"


def test_pairs_that_are_too_long_are_counted_as_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    long = [{**row, "chosen": " the cat" * 60} for row in compared(9)]
    data = place.data([*long, *compared(3, seed=1)])
    keys = {"data__max_length": 60, "data__too_long": "drop"}
    session = place.session(data=data, method="dpo", **keys)
    found = answers(examine(session, only=["data.truncation"]))["data.truncation"]
    assert found.says == "9 of 12 rows were dropped for their length"
    assert (found.number, found.unit) == (9, "of 12 rows")


def test_weights_that_the_paper_does_not_advise_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    rows = [row for at, row in enumerate(labeled(12)) if row["label"] or at < 4]
    session = place.session(data=place.data(rows), method="kto")
    found = answers(examine(session, only=["data.labels"]))["data.labels"]
    assert found.outcome == "warning"
    assert found.says == "weight times number is 3.00 : 1, and KTO's paper advises 1 to 1.33"
    assert found.remedy == "set kto.undesirable_weight=3, unless one kind is to count more"


@pytest.mark.parametrize(
    ("longer", "shorter", "says"),
    [
        (95, 5, "chosen is the longer in 95% of pairs (89% to 98%): length alone tells 95% of labels"),
        (10, 90, "chosen is the longer in 10% of pairs (6% to 17%): length alone tells 90% of labels"),
        (52, 48, "chosen is the longer in 52% of pairs (42% to 62%)"),
    ],
)  # fmt: skip
def test_a_bias_of_length_is_told_with_its_interval(longer: int, shorter: int, says: str) -> None:
    line = length_bias(Lengths(longer, shorter, 0.0, 0.0))
    assert line.startswith(says)
    assert ("may be what is learned" in line) == (longer != 52)


def test_a_planted_bias_of_length_is_a_warning_and_none_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    fair = compared(40)
    biased = [{**row, "chosen": row["chosen"] + " and then some birds in the sky"} for row in fair]
    for rows, is_told in ((biased, True), (fair, False)):
        session = place.session(place.directory / "qwen2" if not is_told else None,
                                place.data(rows, f"{is_told}.jsonl"), method="simpo")  # fmt: skip
        found = answers(examine(session, only=["data.pairs"]))["data.pairs"]
        assert ("length alone tells" in found.says) == is_told
        assert found.outcome == ("warning" if is_told else "passed")
