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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from taut.commands import keys
from taut.commands.help import ALL, groups_of
from taut.config import Row, configclass, home_path
from taut.methods import METHODS

KINDS = {"string", "integer", "number", "table", "list", "of"}
"""Words of a type that are no values."""
MOST = 200
"""Files that are offered."""

BASH = r"""
_taut() {
    local line="${COMP_LINE:0:COMP_POINT}" words current found
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    mapfile -t found < <(taut --complete "${words[@]:1}" 2>/dev/null)
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


def complete(words: Sequence[str], commands: Mapping[str, Any]) -> list[str]:
    """What the last word may become. ``commands``: those of ``taut.cli``, by name."""
    *before, current = words or [""]
    if not before:
        names = [name.partition(" ")[0] for name in (*commands, "--help", "--version")]
        return [name for name in dict.fromkeys(names) if name.startswith(current)]
    tools = [name for name in commands if name.startswith(f"{before[0]} ")]
    if tools and len(before) == 1:
        return [
            tool
            for _, _, tool in (name.partition(" ") for name in tools)
            if tool.startswith(current)
        ]
    if tools:
        before = [" ".join(before[:2]), *before[2:]]
    command = commands.get(before[0])
    rows = keys.rows_of(command.config) if command is not None and command.config else None
    if command is None or rows is None:
        return list(_files(current, current))
    if before[-1] in ("-h", "--help"):
        return [name for name in (*groups_of(rows), ALL) if name.startswith(current)]
    by_key = {row.key: row for row in rows}
    dashes = "--" if current.startswith("--") else ""
    key, equals, value = current.removeprefix(dashes).partition("=")
    if equals:
        return list(_values(by_key.get(key.replace("-", "_")), f"{dashes}{key}=", value))
    if before[-1].startswith("--") and "=" not in before[-1]:
        row = by_key.get(before[-1][2:].replace("-", "_"))
        if row is not None and row.type != "true | false":
            return list(_values(row, "", current))
    found = [f"{dashes}{name}" for name in _next_parts(by_key, key)]
    if dashes:
        return [*found, *(["--help"] if "--help".startswith(current) else [])]
    alone = [row for row in rows if row.key in command.alone]
    values = [text for row in alone[:1] for text in _values(row, "", current)]
    takes_file = "RUN.toml" in command.words or bool(command.many)
    return list(dict.fromkeys([*values, *found, *(_files(current, current) if takes_file else ())]))


def _next_parts(by_key: Mapping[str, Row], begun: str) -> list[str]:
    """``key=`` and ``table.``, up to the next dot after what is begun."""
    found: dict[str, None] = {}
    for key in by_key:
        if key.startswith(begun):
            part, dot, _ = key[len(begun) :].partition(".")
            found[f"{begun}{part}{dot or '='}"] = None
    return list(found)


def _values(row: Row | None, head: str, begun: str) -> Iterator[str]:
    """The values of a key that begin so, after ``head``; files where it takes a text."""
    if row is None:
        return
    kinds = re.split(r"[\s()|]+", row.type)
    choices = (
        list(METHODS) if row.key == "method" else [kind for kind in kinds if kind not in KINDS]
    )
    yield from (f"{head}{choice}" for choice in choices if choice and choice.startswith(begun))
    if "string" in kinds and row.key != "method":
        yield from _files(begun, f"{head}{begun}")


def _files(begun: str, word: str) -> Iterator[str]:
    """The files and folders whose path begins so, in place of ``begun`` at the end of ``word``."""
    place, _, name = begun.rpartition("/")
    head = word[: len(word) - len(name)]
    folder = home_path(f"{place}/" if "/" in begun else ".")
    try:
        entries = sorted(folder.iterdir())[:MOST]
    except OSError:  # nothing to offer there
        return
    for entry in entries:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            yield f"{head}{entry.name}{'/' if entry.is_dir() else ''}"
