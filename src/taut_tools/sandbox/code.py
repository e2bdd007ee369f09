"""The reward ``code``: 1 if the program in an answer passes the row's tests in the sandbox.

The program is a fenced block of the answer (``last_program`` has the rule); an answer without one gets 0. The row names
its language (``language_column``, or ``language`` beside the tests), else the block's mark does, else it is the first
of ``languages``. C and C++ are compiled once for an answer, in a sandbox of their own (``compiled``), and read standard
input: calls and asserts are Python's. A program that does not compile is wrong.

The tests come from the row; the reward does not apply to a row without tests. A row has its tests in one of the forms
that data sets use, each possibly as JSON, or as Python, in a string:

    {"inputs": [...], "outputs": [...]}                   standard input and output (APPS, TACO: ``input_output``)
    {"inputs": [...], "outputs": [...], "fn_name": f}     a call of f, or ``Solution().f``: lists of arguments, values
    {"assert_case": [...]}                                code for each test (verl), in place of its input and output
    {"language": l, "test_cases": [...]}                  open-r1: ``verification_info``; the tests as below
    [{"type", "input", "output", "fn_name"}, ...]         DeepCoder: "stdin_stdout", or "function_call"
    [{"input", "output", "testtype"}, ...]                LiveCodeBench: "stdin", or "functional" with ``metadata``'s
                                                          ``func_name`` and one JSON value a line
    ["assert f(1) == 2", ...]                             MBPP: ``test_list``; test_imports and test_setup_code first
    "def check(candidate): ..."                           HumanEval: ``test``, called on ``entry_point``, or the last
                                                          function of ``prompt``, which goes before the program
    "def test_f(): ..."                                   pytest, unittest, a script: KodCode's ``test``

The output of scripts and the values of calls are compared outside the sandbox; code runs with the program
(``python_tests``). A program that fails, for whatever reason, has not passed, and ``judge`` gives the reason. A sandbox
that fails is an error, and so is a test that cannot be read, or that executes no assertion.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import Decision, configclass
from taut.errors import ConfigError, DataError, SandboxError
from taut.rewards.settings import Place
from taut.rewards.verifier import Explained, RewardInput, Verifier
from taut.rl.settings import Remote
from taut_tools.sandbox.box import MechanismName
from taut_tools.sandbox.compiled import (
    Compilation,
    CompiledLanguage,
    Uncompiled,
    compile_source,
    find_compiler,
    require_compiles,
)
from taut_tools.sandbox.limits import Limits, Ran, Trial
from taut_tools.sandbox.python_tests import as_trial
from taut_tools.sandbox.remote import open_remote
from taut_tools.sandbox.shared import shared

COLUMNS = (
    *("tests", "input_output", "test_cases", "public_test_cases", "verification_info"),
    *("test_list", "assert_case", "test", "test_code"),
)
"""Columns that may hold a row's tests. The first one counts, except for a row with entry_point: ``test`` does."""


@dataclass(frozen=True)
class Case:
    """One test."""

    trial: Trial
    expected: Any = None
    """Text that a script has to print, or value that a call has to return; None for a check."""
    text: str | None = None
    """JSON from which ``expected`` was read; a call may return this text as well."""


@dataclass(frozen=True)
class Cases:
    """All tests of a row."""

    cases: tuple[Case, ...]
    before: str = ""
    """Code that goes before the program."""
    words: frozenset[str] = frozenset()
    """Names in the tests that the program may define."""
    language: str | None = None
    """Language that the tests state."""

    @property
    def are_of_python(self) -> bool:
        """Whether a test calls a function, or is code itself."""
        return any(case.trial.call or case.trial.check for case in self.cases)


def read_cases(row: Mapping[str, Any], column: str | None) -> Cases | None:
    """Read the tests of a row, or None without any. Raises DataError if they cannot be read."""
    columns = [column] if column else [name for name in COLUMNS if row.get(name)]
    if not column and row.get("entry_point") and "test" in columns:
        columns = ["test"]
    value = row.get(columns[0]) if columns else None
    if not value:
        return None
    place = f"the column {columns[0]}"
    try:
        value = {"assert_case": value} if columns[0] == "assert_case" else _parsed(value)
        return _read(value, row, place)
    except _UNREAD as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"found tests in {place} that cannot be read ({type(error).__name__}: {error}); expected inputs and "
            "outputs, or asserts; see docs/rewards.md"
        ) from error


_IS_PYTHON = re.compile(r"\s*(from [\w.]+ import|import|def|class)\b|\s*@")
_UNREAD = (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError)


def _read(value: Any, row: Mapping[str, Any], place: str) -> Cases:
    if isinstance(value, Mapping):
        if inner := value.get("test_cases") or value.get("tests"):  # open-r1
            return replace(_read(_parsed(inner), row, place), language=value.get("language"))
        columns = {}
        for key in ("input", "output", "assert_case"):
            if (column := value.get(f"{key}s", value.get(key))) is not None:
                columns[key] = [column] if isinstance(column, str) else column
        if len({*map(len, columns.values())}) != 1:
            found = " and ".join(f"{len(it)} {key}s" for key, it in columns.items())
            raise DataError(
                f"found {found or sorted(value)} in {place}; expected inputs and as many outputs; correct the row"
            )
        rows = zip(*columns.values(), strict=True)
        value = [{**value, **dict(zip(columns, row, strict=True))} for row in rows]
    if isinstance(value, str):  # HumanEval, pytest, unittest, a script
        before = f"{prompt}\n" if _IS_PYTHON.match(prompt := str(row.get("prompt"))) else ""
        defined = re.findall(r"^def (\w+)\(", before, re.MULTILINE)
        name = row.get("entry_point") or (defined or [""])[-1]
        check = re.search(r"^def check\(\s*(\w*)", value, re.MULTILINE)
        if check and not re.search(r"^check\(", value, re.MULTILINE) and (name or not check[1]):
            value = f"{value}\n\ncheck({name if check[1] else ''})\n"
        case = Case(as_trial(value, place))
        return Cases((case,), before if name in defined else "", _words(f"{name} {value}"))
    is_code = all(isinstance(it, str) and not it.lstrip().startswith("{") for it in value)
    if value and is_code:
        setup = [*(row.get("test_imports") or ()), row.get("test_setup_code")]  # MBPP
        checks = ["\n".join([*filter(None, setup), test]) for test in value]
        trials = [as_trial(check, place) for check in checks]
        return Cases(tuple(map(Case, trials)), words=_words(" ".join(checks)))
    tests = [_parsed(test) for test in value]
    cases = tuple(_case(test, row, place) for test in tests)
    asserts = " ".join(test.get("assert_case") or "" for test in tests)
    return Cases(
        cases, words=_words(asserts).union(it.trial.call for it in cases) - {"", "__run__"}
    )


def _case(test: Mapping[str, Any], row: Mapping[str, Any], place: str) -> Case:
    """Read one test of a list, by its type."""
    if test.get("assert_case"):
        return Case(as_trial(test["assert_case"], place))
    name = test.get("fn_name")
    kind = test.get("testtype") or test.get("type") or ("function_call" if name else "stdin")
    given, wanted = test["input"], test["output"]
    if kind in ("stdin", "stdin_stdout"):
        return Case(Trial(stdin=_text(given)), _text(wanted))
    if kind not in ("functional", "function_call"):
        raise DataError(
            f"found a test of type {kind!r:.40} in {place}; expected stdin, stdin_stdout, functional or function_call; "
            "correct the row"
        )
    name = name or _parsed(row["metadata"])["func_name"]
    arguments = given if kind == "functional" else _parsed(given)
    if isinstance(arguments, str):  # a value on each line
        arguments = [_parsed(line, is_any=True) for line in arguments.split("\n") if line.strip()]
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments of {name} are {arguments!r:.60}, no list")
    expected, text = wanted, wanted if isinstance(wanted, str) else None
    with suppress(*_UNREAD):  # a text may only look like JSON
        expected = _parsed(wanted, is_any=isinstance(given, str))
    return Case(Trial(call=name, arguments=json.dumps(arguments)), expected, text)


def _parsed(value: Any, *, is_any: bool = False) -> Any:
    """Parse a JSON or Python text of a list or an object, with ``is_any`` of any value; return others unchanged."""
    if isinstance(value, str) and (is_any or value.lstrip()[:1] in ("{", "[")):
        try:
            return json.loads(value)
        except ValueError:
            return json.loads(json.dumps(ast.literal_eval(value.strip())))
    return value


def _words(tests: str) -> frozenset[str]:
    """Names that occur in tests and are not defined there."""
    own = re.findall(r"\b(?:def|class)\s+(\w+)", tests)
    return frozenset(re.findall(r"\w+", tests)).difference(own, ("main",))


def _text(value: Any) -> str:
    """A text, or the lines of a list joined."""
    return value if isinstance(value, str) else "\n".join(str(line) for line in value)


# -- the reward

TOLERANCE = 1e-6
"""Relative and absolute tolerance of numbers that are not whole."""
ProgramLanguage: TypeAlias = Literal["python"] | CompiledLanguage
_MARKS: dict[ProgramLanguage, str] = {
    "python": r"(python|py)[\d.]*",
    "c": r"c(\d\d)?",
    "cpp": r"(cpp|c\+\+|cc|cxx)(\d\d)?",
}
"""Names of languages in the mark of a block, or in a row."""
_OVERHEAD = 30.0
"""Seconds that a sandbox may take in addition to the programs."""


@configclass
class Code(Verifier):
    """The answer's program passes the row's tests. The first test that fails is recorded by its number."""

    runs: ClassVar[Place] = "process"
    full_marks: ClassVar[float | None] = 1.0
    unjudged: ClassVar[float | None] = 0.0
    trivial: ClassVar[str] = "```\n```"

    program: Literal["last_block", "text"] = "last_block"
    """Part of the answer that is the program. last_block: the last fenced block in an allowed language that defines the
    functions of the tests, or reads standard input. text: the whole answer."""
    languages: Annotated[tuple[ProgramLanguage, ...], Field(min_length=1)] = ("python",)
    """Allowed languages of answers: python, c, cpp. A program without a mark is in the first of them."""
    language_column: str | None = None
    """Column with the language of a row's answers, such as cpp, which precedes the mark of a block. A row without a
    value allows all languages."""
    column: str | None = None
    """Column with the tests; default: the first of tests, input_output, test_cases, public_test_cases,
    verification_info, test_list, assert_case, test, test_code that a row has, or test for a row with entry_point."""
    score: Literal["all", "share"] = "all"
    """all: 1 if all tests pass, else 0. share: the share of tests that pass."""
    compare: Literal["tokens", "lines"] = "tokens"
    """Comparison of output. tokens: word by word; numbers with a decimal point only have to be close. lines: line by
    line; white space at the end of a line or of the output does not count."""
    before: str = ""
    """Code to put before every Python program, such as ``from typing import *``."""
    max_tests: Annotated[int, Field(gt=0)] | None = None
    """Maximum tests of a row that are run, from the first."""
    limits: Limits = field(default_factory=Limits)
    """Limits on a program's resources."""
    compile: Compilation = field(default_factory=Compilation)
    mechanism: MechanismName | None = None
    """Mechanism of the sandbox; default: the first that works of gvisor, bubblewrap, landlock."""
    packages: tuple[str, ...] = ()
    """Folders of Python packages that programs may import, in addition to Python's own library."""
    remote: Remote = field(default_factory=Remote)
    """Service that runs programs instead of this machine."""

    def __post_init__(self) -> None:
        """Raise ConfigError for settings of this machine's sandbox next to a service."""
        if self.remote.service is None:
            return
        settings = {
            "packages": bool(self.packages),
            "mechanism": self.mechanism is not None,
            f"languages={list(self.languages)}": bool(self._compiled),
        }
        for name in (name for name, is_set in settings.items() if is_set):
            raise ConfigError(
                f"code has remote.service={self.remote.service} and {name}, which is of this machine's sandbox; "
                "expected one of the two; take one out"
            )

    @property
    def _compiled(self) -> list[CompiledLanguage]:
        return [language for language in self.languages if language != "python"]

    @property
    def seconds(self) -> float:  # type: ignore[override]  # of this verifier's options, so of the instance
        """Time limit of a judgment, longer than the program's own limits, which end it before."""
        waiting = 0.0 if self.remote.service is None else self.remote.wait_seconds
        compiling = self.compile.limits.total_seconds if self._compiled else 0.0
        return compiling + self.limits.total_seconds + waiting + _OVERHEAD

    def resolve_defaults(self) -> tuple[Verifier, Decision | None]:
        """Choose the mechanism that works here. Raises SandboxError if none does, if the service does not run a known
        program, or if a known program in one of the languages cannot be compiled and run.
        """
        with _by_name():
            if self.remote.service is not None:
                with closing(open_remote(self.remote, self.limits)) as proved:
                    where = proved.mechanism
                return self, Decision("sandbox", where.name, where.reason)
            sandbox = shared(self.mechanism, self.packages)
            name, reason = sandbox.mechanism
            if self._compiled and name == "landlock":
                raise SandboxError(
                    f"{self._compiled[0]} is among languages, and the sandbox here is landlock, which starts no "
                    "compiler; expected bubblewrap or gvisor; see taut sandbox"
                )
            for language in self._compiled:
                compiler = find_compiler(language, self.compile)
                box = shared(name, files=compiler.files)
                require_compiles(language, compiler, box, sandbox, self.compile.limits)
                reason += f"; {language} is compiled by {compiler.name}"
        return replace(self, mechanism=name), Decision("sandbox", name, reason)

    def prepare(self) -> None:
        """Open the sandbox. Raises SandboxError if there is none here."""
        with _by_name():
            shared(self.mechanism, self.packages, self.remote)

    def dress(self, reference: str) -> str:
        """Put a bare program into a fenced block, if programs are read from blocks."""
        is_bare = self.program == "last_block" and not list(blocks(reference))
        return f"```\n{reference}\n```" if is_bare else reference

    def __call__(self, answer: RewardInput) -> float | None:
        """Judge an answer; None if the row has no tests."""
        reasons = self.judge(answer)
        if reasons is None:
            return None
        share = reasons.count("") / len(reasons)
        value = share if self.score == "share" else float(share == 1)
        failed = next((number for number, why in enumerate(reasons) if why), None)
        if failed is None:
            return value
        return Explained(value, f"test {failed + 1} of {len(reasons)}: {reasons[failed]}")

    def judge(self, answer: RewardInput) -> list[str] | None:
        """The reason in words why each test failed, or an empty text for a test that passed."""
        # Find the tests, and the program in the answer.
        cases = read_cases(answer.row, self.column)
        if cases is None or not cases.cases:
            return None
        chosen = cases.cases[: self.max_tests]
        allowed = self._allowed(answer.row, cases)
        found = (
            (allowed[0], answer.text)
            if self.program == "text"
            else last_program(answer.text, allowed, cases.words)
        )
        if found is None:
            return [f"the answer has no closed block of {' or '.join(allowed)}"] * len(chosen)
        language, program = found
        # Compile it where needed, and run all tests in the sandbox.
        with _by_name():
            if language == "python":
                before = f"{self.before}\n{cases.before}" if self.before else cases.before
                runnable: str | Uncompiled = before + program
            else:
                compiler = find_compiler(language, self.compile)
                box = shared(self.mechanism, files=compiler.files)
                runnable = compile_source(compiler, box, program, self.compile.limits)
            if isinstance(runnable, Uncompiled):
                return [runnable.reason] * len(chosen)
            sandbox = shared(self.mechanism, self.packages, self.remote)
            trials = [case.trial for case in chosen]
            is_all = self.score == "all"
            results = sandbox.run(runnable, trials, self.limits, stop_early=is_all)
        pairs = zip(chosen, results, strict=True)
        return [self._reason(case, ran) for case, ran in pairs]

    def _allowed(self, row: Mapping[str, Any], cases: Cases) -> list[ProgramLanguage]:
        """The allowed languages of an answer to this row. Raises DataError where there is none."""
        column = self.language_column
        stated = row.get(column) if column else cases.language
        allowed = [it for it in self.languages if stated is None or is_marked(it, str(stated))]
        if not allowed:
            raise DataError(
                f"found {stated!r:.40} in the column {column or 'of the tests'}; expected one of "
                f"{', '.join(self.languages)}; correct the row, or add the language to languages"
            )
        if cases.are_of_python and "python" not in allowed:
            raise DataError(
                f"found tests that are calls or asserts, which are Python's, and answers in {' or '.join(allowed)}; "
                "expected inputs and outputs; correct the row, or add python to languages"
            )
        return ["python"] if cases.are_of_python else allowed

    def _reason(self, case: Case, ran: Ran) -> str:
        """The reason why a test failed; empty if it passed."""
        if ran.outcome != "ok":
            last = ran.stderr.strip().rpartition("\n")[2]
            return f"{ran.outcome}: {last}" if last else ran.outcome
        if case.trial.check:
            value = json.loads(ran.value or "1")
            if isinstance(value, str) or value < 1:
                found = value or "no assertion was executed"
                raise DataError(
                    f"the tests: {found}; expected asserts that are called; correct the row"
                )
            return ""
        if case.trial.call:
            is_text = case.text is not None and ran.value == json.dumps(case.text)
            return "" if is_text else _difference(case.expected, ran.value)
        expected, printed = case.expected, ran.stdout
        if self.compare == "tokens":
            words, printed_words = expected.split(), printed.split()
            is_same = len(words) == len(printed_words) and all(
                map(_same_token, words, printed_words)
            )
        else:
            lines, printed_lines = (
                [line.rstrip() for line in text.rstrip().split("\n")]
                for text in (expected, printed)
            )
            is_same = lines == printed_lines
        if is_same:
            return ""
        return f"printed {ran.stdout.strip()!r:.80}, expected {case.expected.strip()!r:.80}"


@contextmanager
def _by_name() -> Iterator[None]:
    """Name the reward in errors of the sandbox."""
    try:
        yield
    except SandboxError as error:
        raise SandboxError(f"the reward code: {error}") from error


def is_marked(language: ProgramLanguage, mark: str) -> bool:
    """Whether a mark names the language."""
    return re.fullmatch(_MARKS[language], mark.strip().lower()) is not None


_READS = r"(?s)(?=.*(\binput\s*\(|\bstdin\b|\bopen\(0|\bfileinput\b)).*(\bprint\s*\(|\bstdout\b)"
_DEFINES = re.compile(r"^\s*(?:(?:async\s+)?def|class)\s+(\w+)|^(\w+)\s*=\s*lambda\b", re.MULTILINE)


def last_program(
    text: str, allowed: Sequence[ProgramLanguage], words: Collection[str] = ()
) -> tuple[ProgramLanguage, str] | None:
    """Find the program among the closed fenced blocks. Its language is that of the last block whose mark is in
    ``allowed``; a block without a mark is in the first of these. Of the blocks in this language, the last counts that
    defines one of ``words``, or, without words, that reads and prints (in C and C++, that has ``main``). Without such a
    block, the last marked one counts, else the last one.
    """
    found: list[tuple[bool, bool, ProgramLanguage, str]] = []
    for mark, code in blocks(text):
        language = next((it for it in allowed if is_marked(it, mark)), None) if mark else allowed[0]
        if language is not None:
            is_whole = any(name in words for it in _DEFINES.findall(code) for name in it)
            if not words:
                pattern = _READS if language == "python" else r"\bmain\s*\("
                is_whole = re.search(pattern, code) is not None
            found.append((is_whole, bool(mark), language, code))
    language = next((it[2] for it in reversed(found) if it[1]), allowed[0])
    own = [it for it in reversed(found) if it[2] == language]  # of equal ones, the last
    best = max(own, key=lambda it: it[:2], default=None)
    return best and best[2:]


_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})(.*)")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The closed fenced blocks of CommonMark, at any indentation: the first word after the fence, and the content
    without the fence's indentation. Blocks inside a block of Markdown are found too.
    """
    block: list[str] | None = None
    indent, fence, mark = "", "", ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if block is None and (found := _FENCE.fullmatch(line.rstrip())):
            indent, fence, info = found.groups()
            block, mark = [], (info.strip(" {.}").split() or [""])[0]
        elif block is not None and re.fullmatch(f"{fence[0]}{{{len(fence)},}}", bare):
            code, block = "".join(block), None
            yield from blocks(code) if mark in ("markdown", "md") else [(mark, code)]
        elif block is not None:
            outside, inside = line[: len(indent)], line[len(indent) :]
            block.append(line.lstrip(" \t") if outside.strip() else inside)


def _difference(expected: Any, value: str | None) -> str:
    """The reason why a returned value is wrong, or an empty text. Some data sets put a value into a list of one."""
    reason = f"returned {value or '':.80}, expected {json.dumps(expected):.80}"
    try:
        values = json.loads(value or "")
    except (ValueError, RecursionError):  # too long a number, too deep a list
        return reason
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    is_same = _same_value(expected, values) or (is_wrapped and _same_value(expected[0], values))
    return "" if is_same else reason


def _same_value(expected: Any, actual: Any) -> bool:
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_same_value, expected, actual))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(
            _same_value(value, actual[key]) for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return expected == actual or _is_close(expected, actual)
    return bool(expected == actual)


def _same_token(expected: str, value: str) -> bool:
    """Whether tokens are equal, or close if the expected one has a decimal point or an exponent."""
    if expected == value:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _is_close(float(expected), float(value))
    except ValueError:
        return False


def _is_close(left: float, right: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer that no float can hold
        return False
