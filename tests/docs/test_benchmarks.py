"""Which runs of a benchmark are compared, with made-up rates of the machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.docs.pages import ROOT

Run = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def machine(path: None) -> ModuleType:
    import machine

    return machine


def take_turns(
    machine: ModuleType, rates: list[float], *, rounds: int = 1, tries: int = 3, fails: str = ""
) -> Any:
    """Two contenders on a machine of these rates, one for each probe; the last one stays."""
    left = list(rates)

    def rate() -> Any:
        return machine.Rate(left.pop(0) if len(left) > 1 else left[0], None)

    def run(name: str) -> Any:
        def go(number: int) -> Run:
            if name == fails:
                raise RuntimeError("no memory")
            return {"name": name, "number": number}

        return go

    return machine.take_turns(
        "case",
        {name: run(name) for name in ("taut", "peer")},
        rate=rate,
        show=lambda run: run["name"],
        rounds=rounds,
        tries=tries,
    )


def numbers(turns: Any) -> dict[str, list[int]]:
    return {name: [run["number"] for run in turns.chosen(name)] for name in turns.runs}


def test_runs_of_one_state_are_compared_and_nothing_is_repeated(machine: ModuleType) -> None:
    turns = take_turns(machine, [290, 300, 280])
    assert turns.outside() == []
    assert numbers(turns) == {"taut": [0], "peer": [0]}


def test_a_run_in_another_state_is_repeated(machine: ModuleType) -> None:
    # taut from 160 to 160, peer from 160 to 290; then the machine stays as it is: peer again, and then taut.
    turns = take_turns(machine, [160, 160, 290])
    assert turns.outside() == []
    assert numbers(turns) == {"taut": [2], "peer": [1]}


def test_only_the_runs_of_the_common_state_count(machine: ModuleType) -> None:
    turns = take_turns(machine, [300, 300, 300, 160, 160, 160], rounds=2)
    assert numbers(turns) == {"taut": [0], "peer": [0]}
    assert len(turns.runs["taut"]) == 2, "the second round ran at 160, and was not repeated"


def test_the_repetitions_are_bounded(machine: ModuleType) -> None:
    # Every run sees the machine change.
    turns = take_turns(machine, [160, 290] * 20, tries=2)
    assert {len(some) for some in turns.runs.values()} == {3}
    assert turns.outside() == ["taut", "peer"]
    rows = [turns.state(name) for name in turns.runs]
    assert not any(row["is_in_state"] for row in rows)
    line = {"not_compared": machine.not_compared(rows), "is_met": True}
    assert machine.verdict(line).startswith("not compared: the machine ran at 160 and then 290")


def test_what_could_not_be_compared_is_told(machine: ModuleType) -> None:
    rows = [{"is_in_state": True, "gflops": "160"}, {"is_in_state": False, "gflops": "290"}]
    why = machine.not_compared(rows)
    assert machine.verdict({"not_compared": why}) == (
        "not compared: the machine ran at 160 and 290 GFLOP/s"
    )
    assert machine.not_compared(rows[:1]) == ""
    assert machine.verdict({"not_compared": "", "is_met": False}) == "MISSED"


def test_a_contender_that_fails_is_not_waited_for(machine: ModuleType) -> None:
    turns = take_turns(machine, [300], rounds=2, fails="peer")
    assert turns.errors == {"peer": "no memory"}
    assert numbers(turns) == {"taut": [0, 1], "peer": []}
    assert turns.state("peer") == {}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({"a": [(300, 300)], "b": [(250, 262)]}, {"a": [0], "b": []}),
        ({"a": [(300, 300)], "b": [(262, 264)]}, {"a": [0], "b": [0]}),
        ({"a": [(150, 300)], "b": [(300, 300)]}, {"a": [], "b": [0]}),
        # As many contenders: more runs; as many runs: the faster state.
        (
            {"a": [(150, 150), (300, 300), (151, 151)], "b": [(150, 150), (300, 300)]},
            {"a": [0, 2], "b": [0]},
        ),
        (
            {"a": [(150, 150), (300, 300)], "b": [(150, 150), (300, 300)]},
            {"a": [1], "b": [1]},
        ),
        ({"a": [], "b": []}, {"a": [], "b": []}),
    ],
)
def test_the_state_of_most_contenders_counts(
    machine: ModuleType,
    spans: dict[str, list[tuple[float, float]]],
    expected: dict[str, list[int]],
) -> None:
    made = {name: [machine.Span(*span) for span in some] for name, some in spans.items()}
    assert machine.in_one_state(made) == expected


def test_the_faster_library_says_what_the_machine_can_do(machine: ModuleType) -> None:
    assert machine.Rate(150, 300).gflops == 300
    assert machine.Rate(150, None).gflops == 150
    run = {
        "rates": {
            "before": {"torch": 150, "onednn": 300},
            "after": {"torch": 290, "onednn": None},
        }
    }
    assert machine.span_of(run).is_steady


def test_memory_has_a_target_whatever_the_state(machine: ModuleType) -> None:
    assert machine.memory_line({"peak_mb": 1040, "is_in_state": False}, 1000)["is_met"]
    assert not machine.memory_line({"peak_mb": 1060}, 1000)["is_met"]
    assert machine.memory_line({"peak_mb": 1060}, None) is None
    assert machine.memory_line({"error": "no memory"}, 1000) is None


def test_taut_takes_turns_with_each_library(path: None) -> None:
    import report

    some = (report.TAUT, report.TRL_DEFAULT)
    assert [one.label for one in report.with_cpu_matmul(some, "both")] == [
        "taut shared (mkl)",
        "taut shared (onednn)",
        "trl padded",
    ]
    assert report.with_cpu_matmul(some, "mkl") == list(some), "that is for all of taut's runs"
    assert report.with_cpu_matmul(some, "both")[0].job == {"mode": "shared", "cpu_matmul": "mkl"}


def test_a_ratio_without_a_common_state_is_neither_met_nor_missed(path: None) -> None:
    import report

    row = {"is_correct": True, "is_in_state": True, "gflops": "290", "peak_mb": 1.0}
    table = {
        "taut shared": row | {"tokens_per_second": 200.0},
        "trl padded": row | {"tokens_per_second": 100.0, "is_in_state": False, "gflops": "160"},
        "trl bfd": row | {"tokens_per_second": 150.0},
    }
    over_best, over_default, memory = report.ratios(table, report.Targets(6.5, 1.8))
    assert over_best["not_compared"], "the padded one could have been the best at 290"
    assert over_default["not_compared"] == "the machine ran at 290 and 160 GFLOP/s"
    assert over_default["is_met"]
    assert not memory["not_compared"]
    table["trl padded"]["is_in_state"] = True
    over_best, over_default, _ = report.ratios(table, report.Targets(6.5, 1.8))
    assert over_best["not_compared"] == "" == over_default["not_compared"]
    assert not over_best["is_met"]
    assert not over_default["is_met"]


def test_the_machine_is_named(machine: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    machine.print_machine(machine.describe(2))
    said = capsys.readouterr().out
    assert "2 threads on" in said
    assert "torch" in said
