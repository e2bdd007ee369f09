"""``make gpu`` itself, on a CPU with tiny models: the whole program, and each way in which it is cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.gpu.needs import MODELS, needs

needs(*MODELS)

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

# ruff: noqa: E402  # these are found on the path above
import torch

import gpu
from on_gpu import bench, measure, ours, report, sizes
from on_gpu import tests as on_gpu_tests
from taut.io.extras import EXTRAS

CPU = torch.device("cpu")


def make_gpu(out: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was printed, and the report."""
    command = [sys.executable, "benchmarks/gpu.py", *words, "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = out / "report.json"
    return done.returncode, done.stdout, json.loads(found.read_text()) if found.exists() else {}


@pytest.mark.slow
def test_every_case_of_the_benchmark(tmp_path: Path) -> None:
    status, printed, found = make_gpu(tmp_path, "bench", "report")
    results = found["cases"]["results"]
    failed = {name: entry["failed"] for name, entry in results.items() if "failed" in entry}
    assert (status, failed, found["cases"]["not_reached"]) == (0, {}, [])
    assert list(results) == [case.name for case in bench.cases(is_tiny=True)]
    for name, entry in results.items():
        if name.endswith(": taut") and name.startswith(("sft", "grpo")):
            assert {"six_n", "counted", "kernels", "peak_bytes", "estimate_bytes"} < entry.keys()
            assert f"| {name} |" in printed
    assert results["checkpoint tiny"]["is_right"]


@pytest.mark.slow
def test_a_part_of_each(tmp_path: Path) -> None:
    words = ("--tests", "refused", "--cases", "rates", "tiny full packed: taut")
    status, printed, found = make_gpu(tmp_path, "tests", "bench", "report", *words)
    assert status == 0, printed
    assert {entry["outcome"] for entry in found["tests"]["results"].values()} == {"passed"}
    case = "sft tiny full packed: taut"
    assert list(found["cases"]["results"]) == ["rates", case, f"{case} compile"]
    assert found["peak"]["source"] == "measured here: not in the table"
    assert "Tests: 2 passed, 0 failed" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_what_is_not_reached_in_time_is_named(tmp_path: Path) -> None:
    words = ("--cases", "tiny", "--seconds", str(gpu.GRACE + 1))
    status, printed, found = make_gpu(tmp_path, "bench", "report", *words)
    assert "grpo tiny full grpo: taut" in found["cases"]["not_reached"]
    assert "cases not reached: " in printed
    assert status == int("failed" in printed)


DYING = """
import os, sys, time
from pathlib import Path
from on_gpu import log

path = Path(sys.argv[1])
begun = {entry.get("begun") for entry in log.read(path)}
log.note(path, planned=["sound", "dies", "stands", "last"])
for name in ("sound", "dies", "stands", "last"):
    if name not in begun:
        log.note(path, begun=name)
        if name == "dies":
            os.abort()
        if name == "stands":
            time.sleep(60)
        log.note(path, case=name, seconds=1.0)
"""


@pytest.mark.slow
def test_what_dies_or_stands_still_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LONGEST", 3.0)
    (tmp_path / "dying.py").write_text(DYING)
    path = tmp_path / "bench.jsonl"
    path.touch()
    gpu.run_all([str(tmp_path / "dying.py"), str(path)], path, "case", 60)
    found = report.gather(tmp_path)["cases"]
    failed = {name: entry.get("failed") for name, entry in found["results"].items()}
    assert failed == {
        "sound": None,
        "dies": "its process ended with status -6",
        "stands": "it did not end within 3 s",
        "last": None,
    }
    assert found["not_reached"] == found["why"] == found["failed"] == []


def test_a_part_that_cannot_begin_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    path.touch()
    gpu.run_all(["-c", "raise SystemExit(7)"], path, "test", 60)
    assert report.write(tmp_path) == 1
    text = (tmp_path / "report.md").read_text()
    assert "tests could not begin: its process ended with status 7" in text


def test_a_broken_device_is_left_to_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case that broke it keeps its own reason, and the next one is not begun."""

    def fall(device: torch.device, is_tiny: bool = False) -> dict[str, Any]:
        monkeypatch.setattr(measure, "synchronize", fall)
        raise RuntimeError("an illegal memory access")

    both = [bench.Case(name, fall) for name in ("breaks", "next")]
    monkeypatch.setattr(bench, "cases", lambda is_tiny: both)
    monkeypatch.setattr(os, "_exit", sys.exit)
    path = tmp_path / "bench.jsonl"
    words = ["bench", str(path), "--device", "cpu", "--cases", "breaks", "next"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=str(measure.BROKEN)):
        bench.main()
    found = report.gather(tmp_path)["cases"]["results"]
    assert list(found) == ["breaks"]
    assert found["breaks"]["failed"].startswith("RuntimeError: an illegal memory access (at ")


def test_every_package_of_a_run_is_known_to_be_missing() -> None:
    """A run asks for all of them, so a machine without one has no test of a run."""
    assert set(EXTRAS["train"]) - {"torch"} <= gpu.LEAVES_OUT.keys()


def test_reasons_for_what_is_left_out() -> None:
    needs = bench.Case("some", bench.rates, ("no_such_package",))
    found = bench.run_case(needs, CPU, is_tiny=True)
    assert found == {"skipped": "not installed: no_such_package"}

    def fall(device: torch.device, is_tiny: bool) -> dict[str, Any]:
        raise RuntimeError("no kernel")

    found = bench.run_case(bench.Case("some", fall), CPU, is_tiny=True)
    assert found["failed"].startswith("RuntimeError: no kernel (at tests/gpu/test_make_gpu.py:")


def test_what_does_not_fit_is_told_with_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 80 * 10**9)
    large = sizes.SIZES["8B"]
    assert sizes.fit(large, CPU, is_lora=True, is_chunked=True).tokens == 4096
    with pytest.raises(sizes.TooLarge, match=r"8B full with 2,048 tokens .* (1[2-9]\d)\.\d GiB"):
        sizes.fit(large, CPU, is_lora=False, is_chunked=True)


def test_a_base_under_lora_is_stored_as_in_a_run() -> None:
    scorer, _ = ours.scorer_of(sizes.SIZES["tiny"], CPU, is_lora=True)
    dtypes = {
        name.rpartition(".")[0].rpartition(".")[2]: parameter.dtype
        for name, parameter in scorer.model.named_parameters()
    }
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        *("base_layer", "embed_tokens")  # the head is tied
    }
    assert {dtypes["default"], dtypes["norm"]} == {torch.float32}


def test_what_compiles_comes_last() -> None:
    names = ["a[flex-bfloat16]", "b[float32]", "c[bfloat16]", "d[flex-float32]", "e"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    ordered = [item.nodeid for item in sorted(items, key=on_gpu_tests.compiles)]
    assert ordered == [names[2], names[4], names[1], names[0], names[3]]


@pytest.mark.parametrize("name", [name for name in sizes.SIZES if name != "8B"])
def test_parameters_are_counted_right(name: str) -> None:
    size = sizes.SIZES[name]
    model = sizes.build(size, torch.device("meta"), "eager")
    num_norms = (2 * size.num_layers + 1) * size.hidden
    assert model.num_parameters() - num_norms == size.num_parameters


def test_the_page_takes_the_report_in(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    with pytest.raises(SystemExit, match="run make gpu first"):
        report.put_into(page, tmp_path)
    (tmp_path / "report.md").write_text("new\n")
    report.put_into(page, tmp_path)
    report.put_into(page, tmp_path)
    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    page.write_text("no place")
    with pytest.raises(SystemExit, match="found no markers"):
        report.put_into(page, tmp_path)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", None),
    ],
)
def test_peaks_by_the_device_s_name(device: str, name: str | None) -> None:
    found = report.peak_of({"device": device}, {"bfloat16": 1e12})
    assert found is not None
    assert found["source"] == (f"stated for {name}" if name else "measured here: not in the table")
