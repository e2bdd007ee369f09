"""``taut completion bash|zsh|fish``: a script with which a shell completes commands, keys, values and files.

    source <(taut completion bash)                                  in ~/.bashrc
    source <(taut completion zsh)                                   in ~/.zshrc, after compinit
    taut completion fish > ~/.config/fish/completions/taut.fish

The script asks ``taut --complete WORD ...`` for what the last word may become, one to a line. Keys come in steps, a
table at a time: ``opt`` -> ``optim.`` -> ``optim.learning_rate=``. Imports no torch, and reads no run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from taut.commands import registry
from taut.commands.help import ALL, groups_of, rows_of
from taut.config import Row, configclass, home_path
from taut.io.user_code import named
from taut.methods import METHODS

KINDS = {"string", "integer", "number", "table", "list", "of"}
"""Words of a type that are not values."""
MAX_FILES = 200
"""Maximum files offered."""

BASH = r"""
_taut() {
    local line="${COMP_LINE:0:COMP_POINT}" words current found i rest
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    mapfile -t found < <(taut --complete "${words[@]:1}" 2>/dev/null)
    for i in "${!found[@]}"; do  # what is added to the word is quoted: a name may hold ; or $( )
        [[ "${found[i]}" == "$current"?* ]] || continue
        printf -v rest %q "${found[i]#"$current"}"
        found[i]="$current$rest"
    done
    COMPREPLY=("${found[@]}")
    # where = and : end a word of bash, it completes what follows the last of them
    local breaks="${COMP_WORDBREAKS//[^=:]/}"
    if [[ -n $breaks && $current == *["$breaks"]* ]]; then
        local head="${current%"${current##*["$breaks"]}"}"
        COMPREPLY=("${found[@]#"$head"}")
    fi
    [[ "${found[0]}" == *[=./] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _taut taut
"""
ZSH = r"""
#compdef taut
_taut() {
    local -a found
    found=("${(@f)$(taut --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
if [[ "${zsh_eval_context[-1]}" == loadautofunc ]]; then
    _taut "$@"
else
    compdef _taut taut
fi
"""
FISH = r"""
function __taut_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    taut --complete $words[2..] "$current" 2>/dev/null
end
complete -c taut -f -a '(__taut_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@configclass
class Completion:
    """Print a completion script."""

    shell: Literal["bash", "zsh", "fish"]
    """The shell that the script is for."""


def run(config: Completion) -> int:
    """Print the script."""
    sys.stdout.write(SCRIPTS[config.shell].lstrip("\n"))
    return 0


def complete(words: Sequence[str]) -> list[str]:
    """Complete the last word in every possible way."""
    commands = registry.names()
    *before, current = words or [""]
    if not before:
        names = [name.partition(" ")[0] for name in (*commands, "--help", "--version")]
        return [name for name in dict.fromkeys(names) if name.startswith(current)]
    # commands of two words
    tools = [name for name in commands if name.startswith(f"{before[0]} ")]
    if tools and len(before) == 1:
        seconds = (name.partition(" ")[2] for name in tools)
        return [name for name in seconds if name.startswith(current)]
    if tools:
        before = [" ".join(before[:2]), *before[2:]]
    command = registry.find(before[0])
    if command is None or command.config is None:
        return list(_files(current, current))
    rows = rows_of(named(command.config))
    if before[-1] in ("-h", "--help"):
        return [name for name in (*groups_of(rows), ALL) if name.startswith(current)]
    # values, of key=value and of --key value
    by_key = {row.key: row for row in rows}
    dashes = "--" if current.startswith("--") else ""
    key, equals, value = current.removeprefix(dashes).partition("=")
    if equals:
        return list(_values(by_key.get(key.replace("-", "_")), f"{dashes}{key}=", value))
    if before[-1].startswith("--") and "=" not in before[-1]:
        row = by_key.get(before[-1][2:].replace("-", "_"))
        if row is not None and row.type != "true | false":
            return list(_values(row, "", current))
    # ``key=`` and ``table.``, up to the next dot after what is begun
    parts = (name[len(key) :].partition(".") for name in by_key if name.startswith(key))
    found = list(dict.fromkeys(f"{dashes}{key}{part}{dot or '='}" for part, dot, _ in parts))
    if dashes:
        return [*found, *(["--help"] if "--help".startswith(current) else [])]
    # words without a key, and files
    alone = [row for row in rows if row.key in command.alone]
    values = [text for row in alone[:1] for text in _values(row, "", current)]
    takes_file = "RUN.toml" in command.words or bool(command.many)
    return list(dict.fromkeys([*values, *found, *(_files(current, current) if takes_file else ())]))


def _values(row: Row | None, head: str, begun: str) -> Iterator[str]:
    """Values of a key that begin with this text, after ``head``; files if the key takes a text."""
    if row is None:
        return
    kinds = re.split(r"[\s()|]+", row.type)
    choices = [kind for kind in kinds if kind not in KINDS]
    if row.key == "method":
        choices = list(METHODS)
    yield from (f"{head}{choice}" for choice in choices if choice and choice.startswith(begun))
    if "string" in kinds and row.key != "method":
        yield from _files(begun, f"{head}{begun}")


def _files(begun: str, word: str) -> Iterator[str]:
    """Files and folders whose path begins with ``begun``, in its place at the end of ``word``."""
    place, _, name = begun.rpartition("/")
    head = word[: len(word) - len(name)]
    folder = home_path(f"{place}/" if "/" in begun else ".")
    try:
        entries = sorted(folder.iterdir())[:MAX_FILES]
    except OSError:  # nothing to offer there
        return
    for entry in entries:
        is_shown = entry.name.isprintable() and (name or not entry.name.startswith("."))
        if entry.name.startswith(name) and is_shown:
            yield f"{head}{entry.name}{'/' if entry.is_dir() else ''}"
