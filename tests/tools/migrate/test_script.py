"""Shell scripts are read as far as they can be without being run: words, lines, variables, and what stays unknown."""

from __future__ import annotations

import pytest

from taut.errors import ConfigError
from taut_tools.migrate.script import Word, commands, pairs


def texts(script: str) -> list[list[str]]:
    """The words of each command."""
    return [[word.text for word in words] for words, _ in commands(script, "x.sh")]


def test_continued_lines_keep_their_numbers() -> None:
    ((words, _),) = commands("trl sft \\\n  --seed 1 \\\n  --bf16\n", "x.sh")
    assert words == [
        Word("trl", 1),
        Word("sft", 1),
        Word("--seed", 2),
        Word("1", 2),
        Word("--bf16", 3),
    ]


def test_quotes_comments_and_separators() -> None:
    script = "a 'b c' \"d e\" f#g # h\n# i\nj; k && l | m & n\n"
    assert texts(script) == [["a", "b c", "d e", "f#g"], ["j"], ["k"], ["l"], ["m"], ["n"]]


def test_redirections_are_no_words() -> None:
    assert texts("a b >log 2>&1\nc < in\n") == [["a", "b"], ["c"]]


def test_variables_are_put_in() -> None:
    script = 'export A=x B="y z"\na $A ${A}-1 "$B" $B ${C:-d} \'$A\' \\$A\n'
    assert texts(script) == [["a", "x", "x-1", "y z", "y", "z", "d", "$A", "$A"]]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("${E:-}", []),
        ('"${E:-}"', [""]),
        ("${E:-x y}", ["x", "y"]),
        ("${E:-'x y'}", ["x y"]),
        ('"${E:-x y}"', ["x y"]),
        ("${E-x}", []),
        ("${SET:-x}", ["1"]),
        ("${U:-${SET}}", ["1"]),
        ('"${U:-${V:-x}}/y"', ["x/y"]),
        ("${U:=8} $U", ["8", "8"]),
    ],
)
def test_defaults_are_words_as_in_bash(word: str, expected: list[str]) -> None:
    """By bash, in which E is set to nothing and U and V are not set."""
    assert texts(f"E=\nSET=1\na {word}\n") == [["a", *expected]]


def test_a_default_that_is_not_known_is_told() -> None:
    ((words, _),) = commands("a ${U:-$MISSING}\n", "x.sh")
    assert words[1].obstacle == "$MISSING"


def test_a_variable_made_of_another() -> None:
    assert texts("N=8\nBATCH=$N-$N\na $BATCH\n") == [["a", "8-8"]]


@pytest.mark.parametrize(
    ("word", "obstacle"),
    [
        ("$MISSING", "$MISSING"),
        ("$(nproc --all)", "$(nproc --all)"),
        ("$(expr 16 / $MISSING)", "$(expr 16 / $MISSING)"),
        ('"runs/$(date +%F)"', "$(date +%F)"),
        ("$((2 * MISSING))", "$((2 * MISSING))"),
        ("$((2 / 0))", "$((2 / 0))"),
        ("$((2 ** 4))", "$((2 ** 4))"),
        ("`pwd`", "`pwd`"),
        ("${MISSING}/x", "${MISSING}"),
    ],
)
def test_what_would_have_to_be_run_is_told(word: str, obstacle: str) -> None:
    ((words, _),) = commands(f"a --key {word}\n", "x.sh")
    assert [one.obstacle for one in words] == ["", "", obstacle]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("$(expr 16 / 2)", "8"),
        ("`expr $N \\* 3`", "12"),
        ("$(expr 17 / $N)", "4"),
        ('"$(expr 17 / $N)"', "4"),
        ("$((2 * (N + 4)))", "16"),
        ("$((-7 / 2))x$((7 % N))", "-3x3"),
        ('"runs/$((1 + 1))"', "runs/2"),
    ],
)
def test_arithmetic_over_known_integers_is_computed(word: str, text: str) -> None:
    *_, (words, _) = commands(f"N=4\na --key {word}\n", "x.sh")
    assert words[2] == Word(text, 2)


def test_a_variable_set_by_arithmetic() -> None:
    assert texts("N=2\nA=$(expr 16 / $N)\na $A\n") == [["a", "8"]]


def test_what_a_script_has_exported_to_a_command() -> None:
    script = "export A=1\nB=2\na\nA=3\nexport B\nB=$X b\n"
    first, second = [command.exported for command in commands(script, "x.sh")]
    assert first == {"A": Word("1", 1)}
    assert second == {"A": Word("3", 4), "B": Word("2", 5)}


def test_an_obstacle_travels_with_the_variable() -> None:
    ((words, _),) = commands("A=$(nproc)\na $A\n", "x.sh")
    assert words[1] == Word("$(nproc)", 1, "$(nproc)")


def test_lists_keep_lines_and_words() -> None:
    script = 'ARGS=(\n  --a 1  # one\n  --b "x y"\n)\ntrl sft "${ARGS[@]}"\n'
    ((words, _),) = commands(script, "x.sh")
    assert words[2:] == [Word("--a", 2), Word("1", 2), Word("--b", 3), Word("x y", 3)]


def test_a_here_document_read_into_a_variable() -> None:
    script = "read -r -d '' words <<EOF\nm.cli \\\n   --a 1\nEOF\nif true; then\n  run $words\nfi\n"
    found = [words for words, _ in commands(script, "x.sh")]
    assert [Word("run", 6), Word("m.cli", 2), Word("--a", 3), Word("1", 3)] in found


def test_a_command_kept_in_a_variable_and_given_to_bash() -> None:
    script = 'export CMD=" \\\n  x.py --a 1 \\\n  --b 2\n  "\nsrun bash -c "launch $CMD" 2>&1\n'
    assert ["launch", "x.py", "--a", "1", "--b", "2"] in texts(script)


def test_a_login_shell_runs_commands_too() -> None:
    assert texts("docker run i bash -lc 'trl sft'\n")[1:] == [["trl", "sft"]]


def test_ansi_quotes() -> None:
    assert texts(r"a $'User: {}\nB'") == [["a", "User: {}\nB"]]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("a\nb 'c\n", "x.sh:2 opens ' and never closes it"),
        ('a "b', 'x.sh:1 opens " and never closes it'),
        ("a <<EOF\nb\n", "a line EOF that ends it"),
    ],
)
def test_what_is_never_closed(script: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        commands(script, "x.sh")
    assert message in str(caught.value)


def test_options_and_what_follows_them() -> None:
    ((words, _),) = commands("x --a 1 -2 --b=c=d --flag --list p q", "x.sh")
    found = [(option.text, [one.text for one in values]) for option, values in pairs(words)]
    assert found == [
        ("", ["x"]),
        ("--a", ["1", "-2"]),
        ("--b", ["c=d"]),
        ("--flag", []),
        ("--list", ["p", "q"]),
    ]


def test_a_list_may_hold_what_separates_commands_elsewhere() -> None:
    ((words, _),) = commands('A=(--a 1; --b 2)\nx "${A[@]}"\n', "x.sh")
    assert [word.text for word in words] == ["x", "--a", "1", "--b", "2"]


def test_what_is_appended_is_added_to_what_there_was() -> None:
    text = """declare -a ARGS=(--model "m x")
ARGS+=(--rate 1)
OPTS="--a 1"
OPTS+=" --b 2"
run "${ARGS[@]}" $OPTS
"""
    (command,) = commands(text, "a.sh")
    words = ["run", "--model", "m x", "--rate", "1", "--a", "1", "--b", "2"]
    assert [word.text for word in command.words] == words
