"""Test taut at both ends of its range of versions, and write down what was tested.

    python tests/versions/run.py --write              both ends on each Python; then the table of docs/install.md
    python tests/versions/run.py --end oldest --python 3.11       a part of that
    python tests/versions/run.py --quick              with few cases of what is slow, as .ci/run does

The oldest end has each package in the first version that pyproject.toml allows, the newest has what pip finds. Each end
has an environment of its own in .cache/versions, 6 GB of it CUDA's libraries where the index has no other build of
torch, so it is removed when its tests have run (``--keep`` leaves it). TORCH names a build, as for make; an end is
then its own version of it: ``TORCH='torch --index-url ADDRESS'``.

``CHOSEN`` is what a version can break: the numbers of each method against the recorded ones, to 1e-6; packing and
generation in float64; attention and adapters; sharded reading, compiled layers, four bits; checkpoints, resuming;
and that each capability is refused by name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".cache" / "versions"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- make test-versions writes this table -->\n", "<!-- its end -->\n"
PYTHONS = ("3.11", "3.12", "3.13")
ENDS = ("oldest", "newest")
UNUSED = ("rl", "video", "data", "compressed", "lm-eval", "s3", "gym", "mcp", "ray")
"""The extras in ``dev`` whose packages the tests below do not need."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis")
"""The packages of the extra ``dev`` that the tests below need."""
SHOWN = ("torch", "transformers", "peft", "datasets", "numpy")
CHOSEN = (
    "tests/golden/test_picture.py::test_a_run_is_as_in_the_picture",
    "tests/invariants/test_layout_invariance.py",
    "tests/invariants/test_generation.py",
    "tests/unit/attention/test_backends.py",
    "tests/invariants/test_vision.py",
    "tests/unit/models/lora/test_adapters.py::test_adapter_equals_merged_equals_reloaded",
    "tests/invariants/test_ranks.py::test_a_rank_reads_its_part_and_saves_a_layer_at_a_time",
    "tests/invariants/test_compiled_layers.py::test_compiled_layers_equal_eager_ones[llama-adapted]",
    "tests/unit/models/quantized/test_frozen_storage.py::test_the_library_reads_each_weight_in_its_dtype",
    "tests/unit/models/quantized/test_frozen_storage.py::test_a_module_trained_whole_goes_on_with_the_numbers_it_was_saved_with",
    "tests/unit/models/quantized/test_quantized_layers.py::test_two_steps_of_nf4_are_those_of_transformers_and_peft",
    "tests/unit/train/test_sharded.py",
    "tests/unit/train/test_updates.py::test_muon_equals_its_reference",
    "tests/unit/train/test_checkpoint.py",
    "tests/unit/io/test_capabilities.py",
    "tests/unit/io/test_extras.py::test_a_version_below_the_range_is_refused",
    "tests/unit/models/test_vision_models.py::test_a_scalar_head_sees_pictures_and_is_saved_for_the_library",
    "tests/tools/export/test_export.py::test_the_library_reads_back_the_same_logits_and_ids",
)
WHOLE = "tests/golden/test_picture.py::test_a_run_is_as_in_the_picture"
"""Of this function each case runs with ``--quick`` too; of others as many as in ``make test``, one at least."""
LEFT_OUT = "tests/unit/attention/test_backends.py::test_flex_forward_equals_dense"
"""torch 2.15 fails within its own wrapper of a flex_attention that is not compiled, at the second shape. Only tests run
one, on a CPU.
"""
NEEDING = {
    "a model with pictures": (
        "tests/golden/test_picture.py::test_a_run_is_as_in_the_picture[sft_pictures]",
        "tests/invariants/test_vision.py",
    ),
    "a scalar head on a model with pictures": (
        "tests/unit/models/test_vision_models.py::test_a_scalar_head_sees_pictures_and_is_saved_for_the_library",
    ),
    "a model read from GGUF": (
        "tests/tools/export/test_export.py::test_the_library_reads_back_the_same_logits_and_ids",
    ),
}
"""Capability -> those of them that are left out where it is lacking."""


MISSING = ("No matching distribution found", "Could not fetch URL", "Connection", "timed out")
"""Parts of what pip prints where the index, and not this project, is the reason."""
PATIENCE = 1200
"""Seconds that an installation may take."""


class Unavailable(Exception):
    """The package index does not have an end, or is not to be reached."""


class Tested(NamedTuple):
    """A row of the table."""

    python: str
    end: str
    versions: dict[str, str]
    passed: int
    lacking: list[str]
    """Capabilities."""
    is_green: bool


def main() -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--end", choices=ENDS, action="append", help="both, unless named")
    parser.add_argument("--python", choices=PYTHONS, action="append", help="all, unless named")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--quick", action="store_true", help="fewer cases of what takes long")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument(
        "--after",
        type=Path,
        metavar="FILE",
        help="install taut when FILE is there: no two builds of it write in src at once",
    )
    parser.add_argument(
        "--tests-after", type=Path, metavar="FILE", help="begin the tests when FILE is there"
    )
    parser.add_argument(
        "--as-available",
        action="store_true",
        help="skip an end that the package index does not have",
    )
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("the table is written of all that is chosen: leave out --quick or --write")
    tested, skipped = [], {}
    for name in options.python or PYTHONS:
        python = find_python(name)
        if python is None:
            skipped[name] = f"python{name} is not installed here"
            print(f"{name}: skipped: {skipped[name]}", flush=True)
            continue
        for end in options.end or ENDS:
            try:
                tested.append(test(python, name, end, options))
            except Unavailable as error:
                if not options.as_available:
                    raise
                skipped[f"{name} {end}"] = str(error)
                print(f"{name} {end}: skipped: {error}", flush=True)
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        old, after = rest.split(END)
        PAGE.write_text(before + BEGIN + table(tested, skipped, old) + END + after)
        print(f"wrote the table of {PAGE.relative_to(ROOT)}")
    is_complete = bool(tested) or options.as_available
    return 0 if is_complete and all(row.is_green for row in tested) else 1


def find_python(name: str) -> str | None:
    """An interpreter of this version; a shim of pyenv may be there and start none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(f"python{name}"), *sorted(pyenv.glob(f"{name}.*/bin/python"))):
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        if found is not None:
            ran = subprocess.run(
                [found, "-c", program], capture_output=True, text=True, check=False
            )
            if ran.stdout.strip() == name:
                return str(found)
    return None


def test(python: str, name: str, end: str, options: argparse.Namespace) -> Tested:
    """Make the environment of one end, and run what was chosen in it, two tests at a time."""
    place = PLACE / f"{name}-{end}"
    own = str(place / "bin" / "python")
    start = time.monotonic()
    install(python, own, place, end, options.after)
    ready = time.monotonic()
    wait_for(options.tests_after)
    began = time.monotonic()
    about = json.loads(output(own, "-c", ABOUT, *SHOWN))
    lacking: list[str] = about["lacking"]
    left_out = [name for capability in lacking for name in NEEDING.get(capability, ())]
    print(f"{name} {end}: {about['versions']}; lacking: {lacking or 'nothing'}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    words = ["-q", "-n", "2", "--tb=short", "-p", "no:cacheprovider", *CHOSEN]
    quick = ["-m", "not slow", "--min-cases=1", f"--all-cases-of={WHOLE}"]
    words += quick if options.quick else []
    words += [f"--deselect={name}" for name in [LEFT_OUT, *left_out]]
    ran = subprocess.run(
        [own, "-m", "pytest", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(ran.stdout[-6000:], flush=True)
    counted = re.search(r"(\d+) passed", ran.stdout)
    ended = time.monotonic()
    print(
        f"{name} {end}: {ready - start:.0f} s to install, {ended - began:.0f} s of tests",
        flush=True,
    )
    if not options.keep:
        shutil.rmtree(place)
    passed = int(counted[1]) if counted else 0
    return Tested(name, end, about["versions"], passed, lacking, ran.returncode == 0)


ABOUT = """
import json, sys
from importlib.metadata import version
from taut.io.capabilities import CAPABILITIES, lack
print(json.dumps({
    "versions": {name: version(name) for name in sys.argv[1:]},
    "lacking": [name for name in CAPABILITIES if lack(name)],
}))
"""


def install(python: str, own: str, place: Path, end: str, after: Path | None) -> None:
    """The environment with taut in it, editable; what is there already is left as it is. Few of the modules are ever
    imported, so that the bytecode is left to whoever imports one.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        output(python, "-m", "venv", str(place))
    ranges = dict(bounds())
    limits = place / "limits.txt"
    lines = [f"{name}=={oldest}" for name, oldest in ranges.items()] if end == "oldest" else []
    limits.write_text("".join(f"{line}\n" for line in lines))
    pip = [own, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
    pip += ["--no-compile"]
    build = os.environ.get("TORCH", "torch").split()
    newest = ["--upgrade"] if end == "newest" else []
    fetch(*pip, *newest, "--constraint", str(limits), *build)
    wait_for(after)
    tools = [name for name in ranges if name in TOOLS]
    taut = f".[{','.join(extras())}]"
    fetch(*pip, "--constraint", str(limits), "--editable", taut, *tools)


def wait_for(path: Path | None) -> None:
    """Until a file is there."""
    while path is not None and not path.exists():
        time.sleep(1)


def fetch(*words: str) -> None:
    """Run pip. Raises Unavailable where it does not get what it asks for."""
    try:
        ran = subprocess.run(
            words, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip was not done after {PATIENCE} s") from error
    print(ran.stderr, file=sys.stderr, end="", flush=True)
    if ran.returncode and any(part in ran.stderr for part in MISSING):
        raise Unavailable(f"pip: {ran.stderr.strip().splitlines()[-1]}")
    ran.check_returncode()


def bounds() -> Iterator[tuple[str, str]]:
    """The packages of the base, of ``extras`` and of ``TOOLS``, each with the first version that is allowed."""
    project = project_table()
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras() for line in optional[name])]
    lines += [line for line in optional["dev"] if line.startswith(TOOLS)]
    for line in lines:
        name, _, oldest = line.partition(";")[0].strip().partition(">=")
        yield name, oldest


def extras() -> list[str]:
    """What the extra ``dev`` takes in, but ``UNUSED``."""
    dev = project_table()["optional-dependencies"]["dev"]
    (own,) = (line for line in dev if line.startswith("taut["))
    return [name for name in own.removeprefix("taut[").rstrip("]").split(",") if name not in UNUSED]


def project_table() -> dict[str, Any]:
    """``[project]`` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def output(*words: str) -> str:
    """What a program prints. Its errors are shown; a program that fails ends this one."""
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def table(tested: list[Tested], skipped: dict[str, str], old: str) -> str:
    """The table in Markdown. What was not run now keeps its row; an end that is not green loses it."""
    heads = ["Python", "end", *SHOWN, "tests passed", "lacking"]
    rows = {tuple(row.split(" | ")[:2]): row for row in old.splitlines() if row[2:3].isdigit()}
    for row in tested:
        versions = [row.versions[name].partition("+")[0] for name in SHOWN]
        cells = [row.python, row.end, *versions, str(row.passed), "; ".join(row.lacking) or "-"]
        rows.pop((f"| {row.python}", row.end), None)
        if row.is_green:
            rows[f"| {row.python}", row.end] = f"| {' | '.join(cells)} |"
    order = sorted(rows, key=lambda key: (key[0], ENDS.index(key[1])))
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(rows[key] for key in order)]
    lines += [f"\nPython {name} was left out: {why}." for name, why in skipped.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
