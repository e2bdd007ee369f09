"""report.json and report.md of what tests and benchmark have left in a directory, and the page that takes it in.

Shares (MFU) are of the peak that ``taut plan`` states for the device's name (taut/plan/rates.py). A device that this
table lacks is compared with its own measured rate of products, which is printed in any case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from on_gpu.log import read

Result = dict[str, Any]

BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"
NAMES = {
    "H100": "H100",
    "H200": "H200",
    "B200": "B200",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-PCIE-40GB": "A100-40GB",
    "A100": "A100-80GB",
    "L40S": "L40S",
    "L4": "L4",
    "RTX 4090": "RTX4090",
}
"""A part of the name that CUDA gives a device -> its name in the table; the first that is met. Variants of less power
(H100 PCIe) are compared with the same peak."""


def peak_of(machine: Result, rates: Result) -> Result | None:
    """FLOP/s in bfloat16 and where they are from: stated for the device's name, else the measured ``rates``."""
    why = "not in the table"
    try:
        from taut.plan.rates import GPUS
    except ImportError as error:
        GPUS, why = {}, f"the table of stated ones needs {error.name}"
    for part, name in NAMES.items():
        if part in machine.get("device", "") and name in GPUS:
            return {"flops": GPUS[name].tflops * 1e12, "source": f"stated for {name}"}
    if "bfloat16" not in rates:
        return None
    return {"flops": rates["bfloat16"], "source": f"measured here: {why}"}


def gather(out: Path) -> Result:
    """Everything that is known."""
    tests, bench = (read(out / f"{part}.jsonl") for part in ("tests", "bench"))
    machine = next((entry["machine"] for entry in [*bench, *tests] if "machine" in entry), {})
    missing = next((entry["missing"] for entry in [*bench, *tests] if "missing" in entry), {})
    found: Result = {"machine": machine, "missing": missing, "tests": {}, "cases": {}}
    for part, entries, key in (("tests", tests, "test"), ("cases", bench, "case")):
        known = {entry[key]: entry for entry in entries if key in entry}
        planned = next((entry["planned"] for entry in entries if "planned" in entry), [])
        found[part] = {
            "results": known,
            "not_reached": [name for name in planned if name not in known],
            "why": [entry["why"] for entry in entries if "why" in entry and key not in entry],
            "failed": [e["failed"] for e in entries if "failed" in e and key not in e],
            "was_run": bool(planned),
        }
    peak = peak_of(machine, found["cases"]["results"].get("rates", {}))
    return found if peak is None else found | {"peak": peak}


def write(out: Path) -> int:
    """Write both files and print the second; 1 where a test or a case failed, or a part could not begin."""
    found = gather(out)
    text = markdown(found)
    (out / "report.json").write_text(json.dumps(found, indent=1))
    (out / "report.md").write_text(text)
    print(f"\n{text}\n{out / 'report.json'}\n{out / 'report.md'}")
    outcomes = [entry.get("outcome") for entry in found["tests"]["results"].values()]
    fell = ["failed" in entry for entry in found["cases"]["results"].values()]
    fell += [bool(found[part]["failed"]) for part in ("tests", "cases")]
    return int("failed" in outcomes or any(fell))


def put_into(page: Path, out: Path) -> None:
    """Replace what is between the page's markers by the report."""
    text, report = page.read_text(), out / "report.md"
    if not report.exists():
        raise SystemExit(f"found no {report}; expected a report; run make gpu first")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"found no markers in {page}; expected one {BEGIN} and one {END}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{report.read_text()}\n{END}{after}")
    print(page)


# -- Markdown


def markdown(found: Result) -> str:
    parts = [
        machine_lines(found),
        test_lines(found["tests"]),
        training_table(found),
        kernel_lines(found),
        attention_table(found),
        generation_table(found),
        checkpoint_lines(found),
        left_out(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_lines(found: Result) -> str:
    machine = found["machine"]
    if not machine:
        return "Nothing was run."
    packages = ", ".join(
        f"{name} {number}" for name, number in machine["packages"].items() if number
    )
    memory = f", {machine['bytes'] / 2**30:.0f} GiB" if "bytes" in machine else ""
    cuda = f", CUDA {machine['cuda']}" if "cuda" in machine else ""
    lines = [f"**{machine['device']}**{memory}{cuda}; Python {machine['python']}; {packages}."]
    rates = found["cases"]["results"].get("rates", {})
    if "bfloat16" in rates:
        width = rates["width"]
        lines.append(
            f"Measured: products of {width}x{width} in bfloat16 {tera(rates['bfloat16'])}, in float32 "
            f"{tera(rates['float32'])}; a copy {rates['copy'] / 1e9:,.0f} GB/s (read and written)."
        )
    if "peak" in found:
        peak = found["peak"]
        lines.append(f"Shares are of {tera(peak['flops'])} ({peak['source']}).")
    return "\n".join(lines)


def tera(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s"


def test_lines(tests: Result) -> str:
    if not tests["was_run"]:
        return ""
    outcomes = [entry["outcome"] for entry in tests["results"].values()]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped"))
    lines = [f"Tests: {counts}, {len(tests['not_reached'])} not reached."]
    lines += [
        f"- failed: `{name}`: {entry['why']}"
        for name, entry in tests["results"].items()
        if entry["outcome"] == "failed"
    ]
    reasons: dict[str, int] = {}
    for entry in tests["results"].values():
        if entry["outcome"] == "skipped":
            reasons[entry["why"]] = reasons.get(entry["why"], 0) + 1
    lines += [f"- {count} skipped: {why}" for why, count in reasons.items()]
    return "\n".join(lines)


def measured(found: Result, kind: str) -> dict[str, Result]:
    """The cases of a kind that have numbers."""
    return {
        name: entry
        for name, entry in found["cases"]["results"].items()
        if name.split()[0] in kind.split() and not {"failed", "skipped"} & entry.keys()
    }


def training_table(found: Result) -> str:
    rows = measured(found, "sft grpo")
    if not rows:
        return ""
    peak = found.get("peak", {}).get("flops")
    lines = [
        "| training | tokens/s | against plain sdpa | 6N | counted | peak GiB (estimated) | host syncs a step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in rows.items():
        plain = rows.get(name.partition(":")[0] + ": plain sdpa")
        ratio = entry["tokens_per_second"] / plain["tokens_per_second"] if plain else None
        shares = [share(entry.get(key), peak) for key in ("six_n", "counted")]
        waits = entry.get("host_syncs")
        lines.append(
            f"| {name} | {entry['tokens_per_second']:,.0f} | {f'{ratio:.2f}' if ratio else ''} | {shares[0]} | "
            f"{shares[1]} | {gib(entry['peak_bytes'])} ({gib(entry['estimate_bytes'])}) | "
            f"{'' if waits is None else f'{waits:.0f}'} |"
        )
    return "\n".join(lines)


def share(flops: float | None, peak: float | None) -> str:
    return "" if flops is None or peak is None else f"{flops / peak:.1%}"


def gib(number: float) -> str:
    return f"{number / 2**30:.1f}"


def kernel_lines(found: Result) -> str:
    """Which attention ran, the largest kernels, and where the host waits."""
    lines = []
    for name, entry in measured(found, "sft grpo generate").items():
        if not entry.get("kernels"):
            continue
        lines.append(f"- {name}")
        if "attention" in entry:
            lines.append(f"  - attention: {entry['attention']}")
        for title, key in (("attention kernels", "attention_kernels"), ("kernels", "kernels")):
            named = "; ".join(f"`{kernel}` {part:.0%}" for kernel, part in entry[key].items())
            lines.append(f"  - {title}: {named or 'none'}")
        if entry.get("waits_at"):
            places = ", ".join(f"`{place}` {count}" for place, count in entry["waits_at"].items())
            lines.append(f"  - the host waits at: {places}")
    if not lines:
        return ""
    return "\n".join(
        ["<details><summary>Kernels and host syncs</summary>", "", *lines, "", "</details>"]
    )


def attention_table(found: Result) -> str:
    rows = measured(found, "attention")
    if not rows:
        return ""
    lines = [
        "| attention, forward and backward | ms | ms with a new layout | visible pairs' products | peak GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name.removeprefix('attention ')} | {1e3 * entry['seconds']:.2f} | "
        f"{1e3 * entry['new_layout_seconds']:.2f} | {tera(entry['flops'])} | {gib(entry['peak_bytes'])} |"
        for name, entry in rows.items()
    ]
    return "\n".join(lines)


def generation_table(found: Result) -> str:
    rows = measured(found, "generate")
    if not rows:
        return ""
    lines = [
        "| generation | tokens/s | peak GiB | host syncs a token |",
        "| --- | --- | --- | --- |",
    ]
    for name, entry in rows.items():
        waits = entry["host_syncs"]
        lines.append(
            f"| {name} | {entry['tokens_per_second']:,.0f} | {gib(entry['peak_bytes'])} | "
            f"{'' if waits is None else f'{waits:.1f}'} |"
        )
    return "\n".join(lines)


def checkpoint_lines(found: Result) -> str:
    return "\n".join(
        f"{name}: {entry['bytes'] / 1e9:.1f} GB; room for the copy {entry['staging_seconds']:.2f} s, once; a "
        f"background save keeps training waiting {entry['background_waits']:.2f} s and is written after "
        f"{entry['background_writes']:.2f} s; a synchronous one {entry['synchronous_waits']:.2f} s; a step takes "
        f"{entry['step_seconds']:.2f} s; what is saved is the state: {'yes' if entry['is_right'] else 'NO'}."
        for name, entry in measured(found, "checkpoint").items()
    )


def left_out(found: Result) -> str:
    """What was not run, and why."""
    lines = [f"- without {name}: {what}" for name, what in found["missing"].items()]
    results = found["cases"]["results"]
    lines += [f"- failed: {name}: {e['failed']}" for name, e in results.items() if "failed" in e]
    reasons: dict[str, list[str]] = {}
    for name, entry in results.items():
        if "skipped" in entry:
            reasons.setdefault(entry["skipped"], []).append(name)
    lines += [f"- {why}: {'; '.join(names)}" for why, names in reasons.items()]
    for part in ("tests", "cases"):
        lines += [f"- {part}: {why}" for why in found[part]["why"]]
        lines += [f"- {part} could not begin: {why}" for why in found[part]["failed"]]
        names = found[part]["not_reached"]
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            lines.append(f"- {part} not reached: {'; '.join(names[:6])}{more}")
    return "\n".join(["Left out:", "", *lines]) if lines else ""
