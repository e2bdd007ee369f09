"""The reward ``code``: whether the program in an answer passes the row's tests, run in ``taut.sandbox``.

The program is the last fenced block of the answer that is marked as a language the row allows, or not at all; an answer
without one gets 0. Its language is, in this order, the row's (``language_column``), the block's mark, the first of
``languages``. C and C++ are compiled once for an answer, in a sandbox apart (``taut.sandbox.compiled``), and read
standard input: calls and asserts are Python's. A program that does not compile is wrong.

The tests come from the row; the reward does not apply to a row without tests. A row has its tests in one of the forms
that data sets use, each possibly as JSON in a string:

    {"inputs": [...], "outputs": [...]}                   standard input and output (APPS, TACO: ``input_output``)
    {"inputs": [...], "outputs": [...], "fn_name": f}     a call of f, or ``Solution().f``: lists of arguments, values
    [{"input", "output", "testtype"}, ...]                LiveCodeBench: "stdin", or "functional" with ``metadata``'s
                                                          ``func_name`` and one JSON value a line
    ["assert f(1) == 2", ...]                             MBPP: ``test_list``; test_imports and test_setup_code first
    "def check(candidate): ..."                           HumanEval: ``test``, called on ``entry_point``; the row's
                                                          ``prompt`` goes before the program

Scripts are compared by what they print, calls by what they return, both outside the sandbox; checks are code that runs
with the program. A program that fails, for whatever reason, has not passed, and ``judge`` gives the reason. A sandbox
that fails is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import Decision, configclass
from taut.errors import ConfigError, DataError, SandboxError
from taut.rewards.verifier import Answered, Explained, Place, Verifier
from taut.sandbox import Limits, MechanismName, Ran, Remote, open_remote, shared
from taut.sandbox.compiled import (
    Compilation,
    CompiledLanguage,
    Uncompiled,
    compile_source,
    find_compiler,
    require_compiles,
)
from taut.sandbox.limits import Trial

COLUMNS = ("tests", "input_output", "test_cases", "public_test_cases", "test_list", "test")
"""Columns that may hold a row's tests; the first that is there counts."""


@dataclass(frozen=True)
class Case:
    """One test."""

    trial: Trial
    expected: Any = None
    """What a script has to print, as text, or a call has to return; None for a check."""
    text: str | None = None
    """The JSON that ``expected`` was read from: a call may return that text as well."""


@dataclass(frozen=True)
class Cases:
    """All tests of a row."""

    cases: tuple[Case, ...]
    before: str = ""
    """Code that goes before the program."""

    @property
    def are_of_python(self) -> bool:
        """Whether one of them calls a function, or is code itself."""
        return any(case.trial.call or case.trial.check for case in self.cases)


def read_cases(row: Mapping[str, Any], column: str | None) -> Cases | None:
    """The tests of a row; None if it has none. Raises DataError if they cannot be read."""
    columns = [column] if column else [name for name in COLUMNS if row.get(name)]
    value = row.get(columns[0]) if columns else None
    if not value:
        return None
    place = f"the column {columns[0]}"
    try:
        return _read(_parsed(value), row, place)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"found tests in {place} that cannot be read ({type(error).__name__}: {error}); expected inputs and "
            "outputs, or asserts; see docs/sandbox.md"
        ) from error


def _read(value: Any, row: Mapping[str, Any], place: str) -> Cases:
    if isinstance(value, Mapping):  # inputs and outputs
        inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
        if len(inputs) != len(outputs):
            raise DataError(
                f"found {len(inputs)} inputs and {len(outputs)} outputs in {place}; expected as many; correct the row"
            )
        cases = []
        for arguments, wanted in zip(inputs, outputs, strict=True):
            if not name:
                cases.append(Case(Trial(stdin=_text(arguments)), _text(wanted)))
                continue
            try:
                expected = _parsed(wanted)
            except ValueError:  # text that looks like JSON may be meant as it is
                cases.append(_call(name, _parsed(arguments), wanted))
            else:
                text = None if expected is wanted else wanted
                cases.append(_call(name, _parsed(arguments), expected, text))
        return Cases(tuple(cases))
    if isinstance(value, str):  # HumanEval
        name, prompt = row.get("entry_point"), row.get("prompt")
        if name:
            value = f"{value}\n\ncheck({name})\n"
        is_start = isinstance(prompt, str) and f"def {name}(" in prompt
        return Cases((Case(Trial(check=value)),), f"{prompt}\n" if is_start else "")
    if all(isinstance(test, str) for test in value):  # MBPP
        setup = [*row.get("test_imports", ()), row.get("test_setup_code", "")]
        checks = ["\n".join([*filter(None, setup), test]) for test in value]
        return Cases(tuple(Case(Trial(check=check)) for check in checks))
    cases = []
    for test in value:  # LiveCodeBench
        if test.get("testtype", "stdin") == "stdin":
            cases.append(Case(Trial(stdin=_text(test["input"])), _text(test["output"])))
            continue
        name = test.get("fn_name") or _parsed(row["metadata"])["func_name"]
        arguments = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
        cases.append(_call(name, arguments, json.loads(test["output"])))
    return Cases(tuple(cases))


def _parsed(value: Any) -> Any:
    """The value, parsed if it is JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return json.loads(value)
    return value


def _call(name: str, arguments: Sequence[Any], expected: Any, text: str | None = None) -> Case:
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments of {name} are {arguments!r:.60}, no list")
    return Case(Trial(call=name, arguments=json.dumps(arguments)), expected, text)


def _text(value: Any) -> str:
    """The text, or a list of its lines joined."""
    return value if isinstance(value, str) else "\n".join(str(line) for line in value)


# -- the reward

TOLERANCE = 1e-6
"""Relative and absolute, of numbers that are not whole."""
ProgramLanguage: TypeAlias = Literal["python"] | CompiledLanguage
_MARKS: dict[ProgramLanguage, str] = {
    "python": r"(python|py)\d*",
    "c": r"c(\d\d)?",
    "cpp": r"(cpp|c\+\+|cc|cxx)(\d\d)?",
}
"""How a block, or a row, says its language."""
_OVERHEAD = 30.0
"""Seconds that a sandbox may take in addition to the programs."""


@configclass
class Code(Verifier):
    """The answer's program passes the row's tests. The first that fails is recorded with the number."""

    runs: ClassVar[Place] = "process"
    full_marks: ClassVar[float | None] = 1.0
    unjudged: ClassVar[float | None] = 0.0
    trivial: ClassVar[str] = "```\n```"

    program: Literal["last_block", "text"] = "last_block"
    """The part of the answer that is the program: its last fenced block of an allowed language, or all of it."""
    languages: Annotated[tuple[ProgramLanguage, ...], Field(min_length=1)] = ("python",)
    """Languages in which answers may be: python, c, cpp. The first is that of a program that does not say its own."""
    language_column: str | None = None
    """The column with the language of a row's answers, such as cpp; it decides before the mark of a block. A row
    without it allows all of languages."""
    column: str | None = None
    """The column with the tests. By default the first there is of tests, input_output, test_cases,
    public_test_cases, test_list, test."""
    score: Literal["all", "share"] = "all"
    """all: 1 if all tests pass, else 0. share: the share of tests that pass."""
    compare: Literal["tokens", "lines"] = "tokens"
    """How output is compared. tokens: word by word; numbers with a decimal point only have to be close. lines: line by
    line; white space at the end of a line or of the output does not count."""
    before: str = ""
    """Code to put before every program in Python, such as ``from typing import *``."""
    max_tests: Annotated[int, Field(gt=0)] | None = None
    """Run at most this many of the row's tests, from the first."""
    limits: Limits = Limits()
    """Limits on a program's resources."""
    compile: Compilation = Compilation()
    mechanism: MechanismName | None = None
    """The sandbox's mechanism. By default the first that works of gvisor, bubblewrap, landlock."""
    packages: tuple[str, ...] = ()
    """Folders of Python packages that programs may import, in addition to Python's own library."""
    remote: Remote = Remote()
    """A service that runs the programs instead of this machine."""

    def __post_init__(self) -> None:
        """ConfigError where settings of this machine's sandbox meet a service."""
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
        """Longer than a program's own limits, which end it before."""
        waiting = 0.0 if self.remote.service is None else self.remote.wait_seconds
        compiling = self.compile.limits.total_seconds if self._compiled else 0.0
        return compiling + self.limits.total_seconds + waiting + _OVERHEAD

    def settled(self) -> tuple[Verifier, Decision | None]:
        """With the mechanism that works here. Raises SandboxError if none does, if the service does not run a known
        program, and for a language of which no known program can be compiled and run.
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
                    f"{self._compiled[0]} is among languages, and the sandbox here is landlock, where a program can "
                    "start no other, such as a compiler; expected bubblewrap or gvisor; see taut sandbox"
                )
            for language in self._compiled:
                compiler = find_compiler(language, self.compile)
                box = shared(name, files=compiler.files)
                require_compiles(language, compiler, box, sandbox, self.compile.limits)
                reason += f"; {language} is compiled by {compiler.name}"
        return replace(self, mechanism=name), Decision("sandbox", name, reason)

    def prepare(self) -> None:
        """Open the sandbox; SandboxError if there is none here."""
        with _by_name():
            shared(self.mechanism, self.packages, self.remote)

    def dress(self, reference: str) -> str:
        """A bare program in a fenced block, if programs are read from blocks."""
        is_bare = self.program == "last_block" and not list(blocks(reference))
        return f"```\n{reference}\n```" if is_bare else reference

    def __call__(self, answered: Answered) -> float | None:
        """None if the row has no tests."""
        reasons = self.judge(answered)
        if reasons is None:
            return None
        share = reasons.count("") / len(reasons)
        value = share if self.score == "share" else float(share == 1)
        failed = next((number for number, why in enumerate(reasons) if why), None)
        if failed is None:
            return value
        return Explained(value, f"test {failed + 1} of {len(reasons)}: {reasons[failed]}")

    def judge(self, answered: Answered) -> list[str] | None:
        """For each test why it failed, for people; empty if it passed."""
        cases = read_cases(answered.row, self.column)
        if cases is None or not cases.cases:
            return None
        chosen = cases.cases[: self.max_tests]
        allowed = self._allowed(answered.row, cases)
        found = (
            (allowed[0], answered.text)
            if self.program == "text"
            else last_program(answered.text, allowed)
        )
        if found is None:
            return [f"the answer has no closed block of {' or '.join(allowed)}"] * len(chosen)
        language, program = found
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
        """The languages that an answer to this row may be in. Raises DataError where there is none."""
        column = self.language_column
        stated = row.get(column) if column else None
        allowed = [it for it in self.languages if stated is None or is_marked(it, str(stated))]
        if not allowed:
            raise DataError(
                f"found {stated!r:.40} in the column {column}; expected one of {', '.join(self.languages)}; correct "
                "the row, or add the language to languages"
            )
        if cases.are_of_python and "python" not in allowed:
            raise DataError(
                f"found tests that are calls or asserts, which are Python's, and answers in {' or '.join(allowed)}; "
                "expected inputs and outputs; correct the row, or add python to languages"
            )
        return ["python"] if cases.are_of_python else allowed

    def _reason(self, case: Case, ran: Ran) -> str:
        """Why a test failed; empty if it passed."""
        if ran.outcome != "ok":
            last = ran.stderr.strip().rpartition("\n")[2]
            return f"{ran.outcome}: {last}" if last else ran.outcome
        if case.trial.check:
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
    """Whether this is a name of the language."""
    return re.fullmatch(_MARKS[language], mark.strip().lower()) is not None


def last_program(
    text: str, allowed: Sequence[ProgramLanguage]
) -> tuple[ProgramLanguage, str] | None:
    """The last closed fenced block that is marked as one of the languages or not at all, which is the first of them."""
    found: tuple[ProgramLanguage, str] | None = None
    for mark, code in blocks(text):
        language = next((it for it in allowed if is_marked(it, mark)), None) if mark else allowed[0]
        found = found if language is None else (language, code)
    return found


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The closed fenced blocks: the first word behind the fence, and what is inside."""
    block: list[str] | None = None
    mark = ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if block is None and bare.startswith("```"):
            block, mark = [], (bare[3:].split() or [""])[0]
        elif block is not None and bare == "```":
            yield mark, "".join(block)
            block = None
        elif block is not None:
            block.append(line)


def _difference(expected: Any, value: str | None) -> str:
    """Why a returned value is wrong; empty if it is right. Some data sets put a call's value into a list of one."""
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
    """Equal, or close if the expected one is a number with a decimal point or an exponent."""
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
