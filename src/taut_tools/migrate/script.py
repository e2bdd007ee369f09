"""Read the commands of a shell script without running it.

Supported: assignments (``NAME=value``, ``NAME+=value``, ``export``, ``declare``, lists), ``bash -c "..."``,
``read -r -d '' NAME <<EOF``, continued lines, quotes, comments, ``$NAME``, ``${NAME}``, ``${NAME:-default}`` (one
inside another too), ``${NAME:=default}``, ``"${NAME[@]}"``, and arithmetic over known integers: ``$((A / B))``,
``$(expr A / B)``.
Not supported: conditions and loops (all their commands count as run), other command substitutions, ``$1``. A word that
needs one of these has the reason in ``obstacle``; nothing is guessed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from taut.errors import ConfigError

LITERAL, QUOTED, CONTINUED = "\x01", "\x02", "\r"
"""Marks for a literal dollar sign, for a dollar sign inside double quotes, whose value is not split into words, and for
a continued line inside double quotes."""
OPEN, CLOSE = "\x03", "\x04"
"""Marks around a command substitution, whose dollar signs are ``LITERAL``."""
TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\r?\n)+) | (?P<newline>\n) | (?P<comment>\#[^\n]*) | (?P<operator>[;&|()<>]+)
    | (?P<ansi>\$'(?:\\.|[^'\\])*') | (?P<single>'[^']*') | (?P<double>"(?:\\.|[^"\\])*") | (?P<escape>\\.)
    | (?P<substitution>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\) | `[^`]*`)
    | (?P<variable>\$\{(?:[^{}]|\$\{[^{}]*\})*\})
    | (?P<text>[^\s;&|()<>'"\\`$#]+ | \$ | \#)""",
    re.VERBOSE | re.DOTALL,
)
EXPANSION = re.compile(
    rf"[{QUOTED}$](?:(?P<name>\w+)|\{{(?P<braced>\w+)(?:\[[@*]\])?"
    rf"(?:(?P<sign>:?[-=])(?P<default>(?:[^{{}}]|[{QUOTED}$]\{{[^{{}}]*\}})*))?\}}|(?P<other>[({{@*#?!-]))"
)
SUBSTITUTION = re.compile(r"(?<!\\)\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
"""A command substitution inside double quotes."""
MARKED = re.compile(rf"{OPEN}([^{CLOSE}]*){CLOSE}")
EXPRESSION = re.compile(
    r"\$\(\((?P<arithmetic>.*)\)\)|(?:\$\(|`)\s*expr\s(?P<expr>.*)[`)]", re.DOTALL
)
ASSIGNED = re.compile(r"(\w+)\+?=")
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
MAX_EXPANDED, MAX_EXPRESSION = 2**22, 1000
"""Maximum characters of all expansions of a script, where each word counts WORD more, and of an expression."""
WORD = 512
ANSI = {r"\n": "\n", r"\t": "\t", r"\'": "'", r"\"": '"', "\\\\": "\\"}


class Word(NamedTuple):
    """A word of a command."""

    text: str
    line: int
    obstacle: str = ""
    """Part of the word that would have to be run, for a text that is not known."""


class Command(NamedTuple):
    """A command that the script runs."""

    words: list[Word]
    exported: Mapping[str, Word]
    """Variables that the script exports to the command."""


class _Values(dict[str, list[Word]]):
    """The variables of a script. Characters of their expansions are counted, as ``A=$A$A`` doubles each time."""

    num_expanded = 0

    def count(self, number: int) -> None:
        self.num_expanded += number
        if self.num_expanded > MAX_EXPANDED:
            raise ConfigError(
                f"the variables of the script expand to more than {MAX_EXPANDED:,} characters; write their values out"
            )


@dataclass
class _Command:
    """Words between two separators, lists that they assign, and the ``body`` of a here-document."""

    words: list[Word] = field(default_factory=list)
    lists: dict[str, list[Word]] = field(default_factory=dict)
    body: list[Word] | None = None


def commands(text: str, place: str) -> list[Command]:
    """Read and expand every command of a script. Raises ConfigError where a quote is never closed."""
    return _expand_commands(_commands(text, place), _Values(), {}, place)


def _expand_commands(
    parsed: list[_Command], values: _Values, exported: dict[str, Word], place: str
) -> list[Command]:
    """Apply assignments in order, and expand the other commands."""
    commands = []
    for command in parsed:
        # Lists, and the body of a here-document that is read into a variable.
        for name, words in command.lists.items():
            plain = name.rstrip("+")
            before = values.get(plain, []) if plain != name else []
            values[plain] = before + _expanded(words, values)
        if command.body is not None and "read" in (word.text for word in command.words):
            values[command.words[-1].text] = _expanded(command.body, values)
            continue
        # Assignments and exports.
        words = command.words
        is_export = bool(words) and words[0].text == "export"
        if words and words[0].text in DECLARATIONS:
            words = [word for word in words[1:] if not word.text.startswith("-")]
        if is_export or all(ASSIGNED.match(word.text) for word in words):
            for word in words:
                name, equals, value = word.text.partition("=")
                if equals:
                    new = _substituted(word._replace(text=value), values)
                    if name.endswith("+"):
                        name = name[:-1]
                        (last,) = new
                        *first, end = values.get(name) or [Word("", word.line)]
                        new = [
                            *first,
                            _joined([end, last], word.line)._replace(text=end.text + last.text),
                        ]
                    values[name] = new
                if name in values and (is_export or name in exported):
                    exported[name] = _joined(values[name], word.line)
            continue
        # A command, and the commands that it gives to a shell with -c.
        expanded = _expanded(words, values)
        values.count(len(exported))
        commands.append(Command(expanded, dict(exported)))
        for shell, option, inner in zip(expanded, expanded[1:], expanded[2:], strict=False):
            if shell.text in ("bash", "sh") and re.fullmatch("-[a-z]*c", option.text):
                inner_commands = _commands(inner.text, place, inner.line)
                commands += _expand_commands(inner_commands, values, exported, place)
    return commands


def _expanded(words: list[Word], values: _Values) -> list[Word]:
    expanded = []
    for word in words:
        found = _expand(word, values)
        values.count(sum(len(one.text) + WORD for one in found))
        expanded += found
    return expanded


def _expand(word: Word, values: _Values) -> list[Word]:
    """Replace the variables of a word; an unquoted value is split at spaces."""
    match = EXPANSION.fullmatch(word.text)
    name = match and (match["name"] or match["braced"])
    if match and match["default"] is not None and not _has_value(match, values):
        return _substituted(word, values) if word.text[0] == QUOTED else _of_default(word, values)
    if not match or name not in values:
        return _substituted(word, values)
    if "[" in word.text:
        return values[str(name)]
    if word.text.startswith(QUOTED):
        return [_joined(values[str(name)], word.line)]
    return [
        Word(part[0], value.line + _num_lines(value.text[: part.start()]), value.obstacle)
        for value in values[str(name)]
        for part in re.finditer(r"(?s).+" if value.obstacle else r"\S+", value.text)
    ]


def _has_value(match: re.Match[str], values: _Values) -> bool:
    """Whether a variable has a value, so that its default does not count; for ``:-``, ``:=`` an empty one is none."""
    words = values.get(match["name"] or match["braced"])
    is_for_empty = (match["sign"] or "").startswith(":")
    return words is not None and not (
        is_for_empty and not any(it.text or it.obstacle for it in words)
    )


def _of_default(word: Word, values: _Values) -> list[Word]:
    """Words of an unquoted ``${NAME:-default}`` whose variable is not set; none for an empty default."""
    (whole,) = _substituted(word, values)
    quoted = re.fullmatch(r"""(["'])(.*)\1""", whole.text, re.DOTALL)
    if whole.obstacle or quoted:
        return [whole._replace(text=quoted[2] if quoted else whole.text)]
    return [whole._replace(text=part) for part in whole.text.split()]


def _num_lines(text: str) -> int:
    return text.count("\n") + text.count(CONTINUED)


def _joined(words: list[Word], line: int) -> Word:
    obstacle = ", ".join(dict.fromkeys(word.obstacle for word in words if word.obstacle))
    return Word(" ".join(word.text for word in words), line, obstacle)


def _substituted(word: Word, values: _Values) -> list[Word]:
    """Replace the variables of a word, as one word."""
    obstacles = [word.obstacle] if word.obstacle else []

    def put_in(match: re.Match[str]) -> str:
        name = match["name"] or match["braced"]
        if _has_value(match, values):
            whole = _joined(values[name], word.line)
            values.count(len(whole.text))
            obstacles.extend([whole.obstacle] if whole.obstacle else [])
            return whole.text
        if match["default"] is not None:
            (default,) = _substituted(word._replace(text=match["default"], obstacle=""), values)
            obstacles.extend([default.obstacle] if default.obstacle else [])
            if match["sign"].endswith("="):
                values[name] = [default]
            return default.text
        obstacles.append(match[0].replace(QUOTED, "$"))
        return match[0]

    def compute(match: re.Match[str]) -> str:
        substitution = match[1].replace(LITERAL, "$")
        number = _computed(substitution, word.line, values)
        if number is None:
            obstacles.append(" ".join(substitution.split()))
        return substitution if number is None else str(number)

    text = EXPANSION.sub(put_in, word.text).replace(QUOTED, "$")
    text = MARKED.sub(compute, text).replace(LITERAL, "$")
    return [Word(text, word.line, ", ".join(dict.fromkeys(obstacles)))]


def _computed(substitution: str, line: int, values: _Values) -> int | None:
    """Compute ``$((...))`` or ``$(expr ...)`` over known integers; None for anything else."""
    match = EXPRESSION.fullmatch(substitution)
    if match is None:
        return None
    (expression,) = _substituted(Word(match["arithmetic"] or match["expr"], line), values)
    if expression.obstacle or len(expression.text) > MAX_EXPRESSION:
        return None

    def evaluate(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and match["arithmetic"]:
            (value,) = values[node.id]
            return int(value.text)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -evaluate(node.operand)
        if isinstance(node, ast.BinOp):
            number = ARITHMETIC[type(node.op)](evaluate(node.left), evaluate(node.right))
            return (number + 2**63) % 2**64 - 2**63  # the shell's 64 bits
        raise ValueError

    # Not computed: an unset variable, one that is no integer, an operator outside ARITHMETIC, a division by 0.
    with suppress(SyntaxError, KeyError, ValueError, ZeroDivisionError):
        return evaluate(ast.parse(expression.text.replace("\\", "").strip(), mode="eval").body)
    return None


def _quotient(dividend: int, divisor: int) -> int:
    """Divide integers as the shell does, towards zero."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda dividend, divisor: dividend - divisor * _quotient(dividend, divisor),
}


def _marked(substitution: str) -> str:
    return f"{OPEN}{substitution.replace('$', LITERAL)}{CLOSE}"


def _commands(text: str, place: str, first_line: int = 1) -> list[_Command]:
    """Split a text into commands, without expanding them."""
    return _Lexer(text.replace("\r\n", "\n"), place, first_line).run()


class _Lexer:
    """Splits a text into commands of words, each with its line."""

    def __init__(self, text: str, place: str, first_line: int) -> None:
        self.text, self.place, self.line, self.at = text, place, first_line, 0
        self.done: list[_Command] = [_Command()]
        self.word: str | None = None
        self.word_line = first_line
        self.items: list[Word] | None = None
        """Words of the open list, or None outside a list."""
        self.end_of_body: str | None = None
        self.skips_word = self.awaits_body = False

    def run(self) -> list[_Command]:
        while self.at < len(self.text):
            match = TOKEN.match(self.text, self.at)
            if match is None:
                quote = self.text[self.at]
                raise ConfigError(
                    f"{self.place}:{self.line} opens {quote} and never closes it; expected a shell script"
                )
            if match.lastgroup == "comment" and self.word is not None:
                self._add("text", "#")
                self.at += 1
                continue
            self.at = match.end()
            self._take(str(match.lastgroup), match[0])
            self.line += _num_lines(match[0])
            if match.lastgroup == "newline" and self.end_of_body is not None:
                self._take_body()
        self._end_word()
        return [command for command in self.done if command.words or command.lists]

    def _take(self, kind: str, text: str) -> None:
        if kind == "comment":
            return
        if kind in ("space", "newline"):
            self._end_word()
            if kind == "newline" and self.items is None and self.end_of_body is None:
                self.done.append(_Command())
        elif kind == "operator":
            self._operator(text)
        else:
            self._add(kind, text)

    def _operator(self, text: str) -> None:
        if self.items is not None and text[0] == ")":
            self._end_word()
            self.items = None
        elif text == "(" and self.word is not None and self.word.endswith("="):
            self.items = self.done[-1].lists.setdefault(self.word[:-1], [])
            self.word = None
        elif "<" in text or ">" in text:
            if self.word is not None and self.word.isdigit():
                self.word = None  # the 2 of 2>&1
            self._end_word()
            self.awaits_body = text in ("<<", "<<-")
            self.skips_word = True
        else:
            self._end_word()
            self.done.append(_Command())

    def _add(self, kind: str, text: str) -> None:
        """Add a piece to the open word."""
        if self.word is None:
            self.word, self.word_line = "", self.line
        if kind == "single":
            text = text[1:-1].replace("$", LITERAL)
        elif kind == "ansi":
            text = re.sub(r"\\.", lambda match: ANSI.get(match[0], match[0]), text[2:-1])
            text = text.replace("$", LITERAL)
        elif kind == "double":
            text = SUBSTITUTION.sub(lambda match: _marked(match[0]), text[1:-1])
            text = re.sub(r"(?<!\\)\$", QUOTED, text)
            text = text.replace("\\\n", CONTINUED).replace(r"\$", LITERAL)
            text = re.sub(r'\\(["\\`])', r"\1", text)
        elif kind == "escape":
            text = text[1].replace("$", LITERAL)
        elif kind == "substitution":
            text = _marked(text)
        self.word += text

    def _end_word(self) -> None:
        if self.word is None:
            return
        word = Word(self.word, self.word_line)
        self.word = None
        if self.skips_word:
            self.skips_word = False
            if self.awaits_body:
                self.end_of_body = word.text
        elif self.items is not None:
            self.items.append(word)
        else:
            self.done[-1].words.append(word)

    def _take_body(self) -> None:
        """Take the lines of a here-document up to its end, as words of the command that reads it."""
        last = rf"(?m)^[^\S\n]*{re.escape(self.end_of_body or '')}[^\S\n]*(\n|\Z)"
        end = re.compile(last).search(self.text, self.at)
        if end is None:
            raise ConfigError(
                f"{self.place}:{self.line} opens a here-document; expected a line {self.end_of_body} that ends it"
            )
        body = self.text[self.at : end.start()]
        inner = _commands(body, self.place, self.line)
        self.done[-1].body = [word for command in inner for word in command.words]
        self.at = end.end()
        self.line += body.count("\n") + 1
        self.end_of_body = None
        self.done.append(_Command())


def pairs(words: list[Word]) -> Iterator[tuple[Word, list[Word]]]:
    """Split a command into options with the words that follow each: ``--key value``, ``--key=value``, ``--key``. Words
    before the first option have an empty option.
    """
    option, values = Word("", 0), list[Word]()
    for word in words:
        if not re.match(r"--?[A-Za-z]", word.text):
            values.append(word)
            continue
        if option.text or values:
            yield option, values
        name, equals, value = word.text.partition("=")
        option = word._replace(text=name, obstacle="" if equals else word.obstacle)
        values = [word._replace(text=value)] if equals else []
    if option.text or values:
        yield option, values
