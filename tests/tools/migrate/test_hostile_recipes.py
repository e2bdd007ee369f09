"""Recipes that expand to much, or are nested deeply: read or refused in one line, at once and in bounded memory."""

from __future__ import annotations

import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest

from taut.errors import ConfigError, TautError
from taut_tools.migrate.examine import examine
from taut_tools.migrate.recipe import MAX_BYTES
from taut_tools.migrate.run_file import run_file
from taut_tools.migrate.script import commands


def laughs(first: str, one: str) -> str:
    """Nine levels, each of which names the one before nine times, as ``one`` writes them."""
    levels = "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} {one.format(','.join(['*' + chr(97 + i)] * 9))}\n"
        for i in range(9)
    )
    return f"a: &a {first}\n{levels}"


RUN = "swift sft --model m --dataset d "
REFUSED_YAML = {
    "billion laughs": (laughs("[x]", "[{}]"), "values, with what references"),
    "in merged tables": (laughs("{x: 1}", "{{<<: [{}]}}"), "values, with what references"),
    "in tables": (
        "a: &a {x: 1}\n"
        + "".join(f"a{i + 1}: &a{i + 1} {{p: *a{i or ''}, q: *a{i or ''}}}\n" for i in range(40)),
        "values, with what references",
    ),
    "deep lists": ("a: " + "[" * 400 + "]" * 400, "nested"),
    "deep tables": ("a: " + "{a: " * 200 + "1" + "}" * 200, "nested deeper than 50"),
    "deep text": ("a: '" + "[" * 3000 + "]" * 3000 + "'", "nested"),
    "a circle": ("a: &a [*a]", "nested deeper"),
    "digits": ("learning_rate: " + "9" * 100_000, "a number of 100,000 characters"),
    "hexadecimal": ("max_steps: 0x" + "f" * 9999, "a number of"),
    "minutes": ("max_steps: 1" + ":59" * 2000, "a number of"),
    "no date": ("learning_rate: 2001-99-99", "month must be"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(6_000)), "values"),
    "large": ("# " + "x" * MAX_BYTES, "cannot be read"),
}
READ_YAML = {
    "not finite": "learning_rate: .inf\nmax_steps: .nan\nnum_train_epochs: 1e999",
    "large numbers": "max_steps: 1e300\nper_device_train_batch_size: " + "9" * 30,
    "keys that are no text": "? [a, b]\n: 1",
}
EXPANDS = "the variables of the script expand to more than"
REFUSED_SCRIPTS = {
    "doubled": "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + RUN + "--output_dir $A",
    "doubled in quotes": "A=xxxxxxxxxx\n" + 'A="$A $A"\n' * 60 + RUN + "--output_dir $A",
    "added": "A=xxxxxxxxxx\n" + "A+=$A\n" * 60 + RUN,
    "exported": "export A=xxxxxxxxxx\n" + "export A=$A$A\n" * 60 + RUN,
    "a list": "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + RUN + "${A[@]}",
    "by default": "A=xxxxxxxxxx\n" + "B=${B:-$A$A$A$A}\nA=$B\nB=\n" * 60 + RUN,
    "many commands": f"A={'x' * 100_000}\n" + (RUN + "--output_dir $A\n") * 500,
    "many words": RUN + "".join(f"--key{i} 1 " for i in range(20_000)),
}
READ_SCRIPTS = {
    "products": "A=9999999999\n" + "A=$((A*A))\n" * 60 + RUN + "--max_steps $A",
    "a power": RUN + "--max_steps $((9**9**9**9))",
    "a long product": RUN + f"--max_steps $(({'*'.join(['999999999'] * 20_000)}))",
    "parentheses": RUN + f"--max_steps $(({'(' * 3000}1{')' * 3000}))",
    "signs": RUN + f"--max_steps $(({'-' * 3000}1))",
    "defaults": RUN + "--max_steps " + "${A:-" * 300 + "1" + "}" * 300,
    "a shell in itself": 'A=\'bash -c "$A"\'\nbash -c "$A"\n' + RUN,
    "here-documents": "read -r -d '' A <<E\nE\n" * 2000 + RUN,
    "open braces": RUN + "--a " + "${" * 5000,
}


def outcome(path: Path, framework: str) -> str:
    """The refusal; empty: there is none. Neither takes long, nor much memory."""
    began, before, reason = time.process_time(), getrusage(RUSAGE_SELF).ru_maxrss, ""
    try:
        report = examine(f"{framework}:{path}")
        report.as_json()
        run_file(report.recipe, report.carried, [])
    except TautError as error:
        reason = str(error)
    took, more = time.process_time() - began, getrusage(RUSAGE_SELF).ru_maxrss - before
    assert took < 10 and more < 2**18, f"{took:.1f} s, {more:,} KiB: {reason}"
    assert "\n" not in reason and len(reason) < 500
    return reason


@pytest.mark.parametrize("name", [*REFUSED_YAML, *READ_YAML])
def test_settings(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED_YAML.get(name) or (READ_YAML[name], "")
    path = tmp_path / "run.yaml"
    path.write_text(f"model_name_or_path: m\n{text}\n")
    found = outcome(path, "trl.sft")
    assert (reason in found) if reason else not found


@pytest.mark.parametrize("name", [*REFUSED_SCRIPTS, *READ_SCRIPTS])
def test_scripts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text((REFUSED_SCRIPTS | READ_SCRIPTS)[name] + "\n")
    found = outcome(path, "swift")
    if name == "a shell in itself":
        assert not found or "nested too deeply" in found
    else:
        assert (EXPANDS in found) if name in REFUSED_SCRIPTS else not found


def test_arithmetic_has_the_shell_s_64_bits() -> None:
    text = "A=$((9223372036854775807+1))\nB=$((4611686018427387904*4))\nrun $A $B"
    ((_, first, second),) = (command.words for command in commands(text, "run.sh"))
    assert (first.text, second.text) == ("-9223372036854775808", "0")


def test_a_here_document_ends_at_its_own_line() -> None:
    text = "read -r -d '' A <<END\n--x 1 \\\n--y ENDS\n  END  \nrun $A --z 2\nEND"
    words = [[word.text for word in command.words] for command in commands(text, "run.sh")]
    assert words == [["run", "--x", "1", "--y", "ENDS", "--z", "2"], ["END"]]
    with pytest.raises(ConfigError, match="expected a line END that ends it"):
        commands("read A <<END\nx\n", "run.sh")
