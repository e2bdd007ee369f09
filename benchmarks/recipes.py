"""Counts what ``taut import`` makes of a corpus of recipes: ``python benchmarks/recipes.py KIND:DIR ... [--list]``.

A recipe is a shell script with a training command, a command in a page or in the docstring of a script, or a file of
settings. Equal ones count once. Each is

    exact      offered, and nothing is left out that changes what is learned
    offered    the configuration's classes accept it, and what is left out is named
    refused    there is no such run in taut, and the option that says so is named
    rejected   the configuration's classes refuse it

What was read is compared with another reader: bash itself, in an empty environment in which the launchers are stubs
that print their words and every other command is missing, and PyYAML for files of settings. Then the values that mean
the same in taut are compared with those words.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from taut.errors import TautError
from taut_tools.migrate.dialects import DIALECTS, Dialect
from taut_tools.migrate.examine import RecipeReport, examine
from taut_tools.migrate.import_recipe import problem_of
from taut_tools.migrate.recipe import SUFFIXES, parsed, plain
from taut_tools.migrate.run_file import option_line
from taut_tools.migrate.script import Word, pairs

LAUNCHERS = (
    *("swift", "megatron", "trl", "torchrun", "accelerate", "deepspeed", "python", "python3"),
    *("ray", "llamafactory-cli", "axolotl", "srun", "uv", "docker"),
)
SAME = {
    "optim.learning_rate": ("learning_rate", "lr", "adam.lr", "actor.adam.lr"),
    "optim.weight_decay": ("weight_decay", "adam.weight_decay"),
    "seed": ("seed", "train.seed"),
    "lora.rank": ("lora_rank", "lora_r", "ds.lora.rank"),
    "lora.alpha": ("lora_alpha", "ds.lora.alpha"),
    "rollout.n": ("num_generations", "rollout.n_samples_per_prompt"),
    "rollout.max_new_tokens": (
        "max_completion_length",
        "rollout.max_new_tokens",
        "response_length",
    ),
    "checkpoint.keep": ("save_total_limit", "ckpt.max_num"),
}
"""Keys of taut -> options with the same value."""


class Outcome(NamedTuple):
    """What became of one recipe."""

    name: str
    kind: str
    report: RecipeReport | None
    lines: tuple[str, ...]
    """Why it is refused, and values that differ from those of the other reader."""


def main(words: list[str]) -> int:
    """Print the counts; 1 where a recipe crashed or a value differs."""
    is_list = "--list" in words
    outcomes = [
        outcome
        for word in words
        if word != "--list"
        for outcome in examine_all(*word.split(":", 1))
    ]
    kinds = ("exact", "offered", "refused", "rejected", "unread")
    for framework in [*dict.fromkeys(one.name.partition(":")[0] for one in outcomes), ""]:
        counts = Counter(
            one.kind for one in outcomes if one.name.startswith(f"{framework}:") or not framework
        )
        total = sum(counts.values())
        print(
            f"{framework or 'all':14} {total:5} recipes",
            *(f"{kind} {counts[kind]}" for kind in kinds),
        )
    lacks: Counter[str] = Counter()
    for one in outcomes:
        if one.report is not None:
            changing = {
                option.key for option in one.report.carried.having("lacking") if option.changes
            }
            lacks.update(changing)
    print(
        "\nlacking, and changing what is learned:",
        ", ".join(f"{key} {number}" for key, number in lacks.most_common(60)),
    )
    for one in outcomes:
        if (
            is_list
            or (one.lines and one.kind in ("rejected", "unread"))
            or any("differs" in line for line in one.lines)
        ):
            print(f"\n{one.kind} {one.name}")
            for line in one.lines:
                print(f"    {line}")
    return int(any("differs" in line for one in outcomes for line in one.lines))


def examine_all(framework: str, directory: str) -> Iterator[Outcome]:
    """Every distinct recipe below a directory."""
    seen = set[str]()
    for path in sorted(Path(directory).rglob("*")):
        if not path.is_file() or path.suffix not in (".sh", ".md", ".mdx", ".py", *SUFFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, block in enumerate(blocks(path, text)):
            if " ".join(block.split()) in seen:
                continue
            name = f"{framework}:{path}" + (
                f" [{number}]" if path.suffix in (".md", ".mdx", ".py") else ""
            )
            outcome = examine_one(framework, name, path, block)
            if outcome is not None:
                seen.add(" ".join(block.split()))
                yield outcome


def blocks(path: Path, text: str) -> Iterator[str]:
    """The scripts in a file: the whole of it, or the fenced and indented commands of a page or a docstring."""
    if path.suffix in (".sh", *SUFFIXES):
        yield text
        return
    fenced: list[str] | None = None
    rest: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            if fenced:
                yield re.sub(r"(?m)^\$ ", "", textwrap.dedent("\n".join(fenced)))
            fenced = [] if fenced is None else None
        else:
            (rest if fenced is None else fenced).append(line)
    if path.suffix == ".py":
        start = (
            r"(?m)^(?:# )?[ \t]*(?:[A-Z_]+=\S+ )*(?:python|accelerate|torchrun|trl) (?:.*\\\n)*.*"
        )
        for match in re.finditer(start, "\n".join(rest)):
            yield re.sub(r"(?m)^# ?", "", match[0])


def examine_one(framework: str, name: str, path: Path, text: str) -> Outcome | None:
    """The outcome of one recipe; None: it is none."""
    spec_path, in_file = path, path.suffix in (".sh", *SUFFIXES)
    if not in_file:
        spec_path = path.parent / f".{path.stem}.taut-recipe.sh"
        spec_path.write_text(text, encoding="utf-8")
    try:
        report = examine(f"{framework}:{spec_path}")
    except TautError as error:
        is_none = any(
            words in str(error)
            for words in ("has no command of", "are no options of", "holds no settings")
        )
        if is_none or not in_file:
            return None
        return Outcome(name, "unread", None, (str(error),))
    finally:
        if not in_file:
            spec_path.unlink()
    recipe, carried = report.recipe, report.carried
    if path.suffix in SUFFIXES and recipe.model is None:
        return None
    lines = list(differences(report, path, text))
    if carried.refusals:
        return Outcome(
            name, "refused", report, (*(option_line(one) for one in carried.refusals), *lines)
        )
    problem = problem_of(carried)
    if problem is not None:
        return Outcome(name, "rejected", report, (problem, *lines))
    changing = [option_line(one) for one in carried.having("lacking") if one.changes]
    return Outcome(name, "offered" if changing else "exact", report, (*changing, *lines))


def differences(report: RecipeReport, path: Path, text: str) -> Iterator[str]:
    """Values that another reader reads otherwise."""
    recipe = report.recipe
    if path.suffix in SUFFIXES:
        content = yaml.safe_load(text)
        others = {
            key: plain(value) for key, value in content.items() if not isinstance(value, dict)
        }
    else:
        dialect = next(one for one in DIALECTS.values() if one.name == recipe.framework)
        read = bash_reads(dialect, text)
        if read is None:
            return
        others = read
    for key, value in others.items():
        setting = recipe.settings.get(key) or next(
            (one for one in recipe.settings.values() if one.key == key), None
        )
        if setting is None or setting.obstacle or str(setting.value).startswith("~"):
            continue
        if setting.value != value and not (
            str(setting.place).count(".yaml") and path.suffix == ".sh"
        ):
            yield f"{key} differs: read as {setting.value!r}, {value!r} by the other reader"
    for key, names in SAME.items():
        given = [others[name] for name in names if name in others]
        ours = report.carried.settings.get(key)
        if (
            len(given) == 1
            and ours is not None
            and given[0] is not None
            and float(given[0]) != float(ours)
        ):
            if key == "rollout.n" and report.carried.method == "ppo":
                continue
            yield f"{key} differs: {ours} here, {given[0]} there"


def bash_reads(dialect: Dialect, text: str) -> dict[str, Any] | None:
    """The options of the first training command, as bash expands them; None: bash does not come to it."""
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder) / "bin"
        stubs.mkdir()
        for name in LAUNCHERS:
            stub = stubs / name
            stub.write_text('#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" "\x01"\n')
            stub.chmod(0o755)
        for name in ("expr", "basename", "printf", "seq"):
            found = next(
                (one for one in (Path("/usr/bin") / name, Path("/bin") / name) if one.exists()),
                None,
            )
            if found is not None:
                (stubs / name).symlink_to(found)
        script = Path(folder) / "script.sh"
        script.write_text(text, encoding="utf-8")
        try:
            printed = (
                subprocess.run(  # restricted: no redirection, no path in a command, no other PATH
                    ["/bin/bash", "-r", "script.sh"],
                    cwd=folder,
                    env={"PATH": str(stubs), "HOME": folder},
                    capture_output=True,
                    stdin=subprocess.DEVNULL,
                    timeout=3,
                    check=False,
                ).stdout
            )
        except subprocess.TimeoutExpired as error:  # a loop that waits for a server
            printed = error.stdout or b""
    for part in printed.decode(errors="replace").split("\x01\0"):
        words = part.split("\0")[:-1]
        start = dialect.find_start(words) if words else None
        if start is None:
            continue
        options: dict[str, Any] = {}
        for option, values in pairs([Word(word, 1) for word in words[start.at :]]):
            key = option.text.lstrip("-").replace("-", "_")
            values_read = [parsed(word.text) for word in values]
            options[key] = (
                True
                if not values_read
                else values_read[0]
                if len(values_read) == 1
                else values_read
            )
        return {
            key: value
            for key, value in options.items()
            if key and key != "config" and not isinstance(value, dict)
        }
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
