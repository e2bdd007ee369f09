"""Whether the Python program in an answer passes the row's tests, run in the sandbox (``taut.sandbox``).

The program is the last fenced block of the answer that is marked as Python or not at all; an answer without one is 0.
The tests come from the row (``testcases.py`` has the forms); a row without tests: None. Scripts are compared by what
they print, calls by what they return, both outside the sandbox; checks are code that runs with the program.

A program that fails, for whatever reason, is the model's: it counts as not passed, and ``judge`` gives the reason.
A sandbox that fails is ours: an error. Python only.

Imports config, the sandbox, ``rewards.testcases`` and the verifiers' base.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError, SandboxError
from taut.rewards.answered import Answered
from taut.rewards.testcases import Case, read_cases
from taut.rewards.verifier import Decision, Place, Verifier
from taut.sandbox import Limits, MechanismName, Ran, Remote, open_remote, shared

TOLERANCE = 1e-6
"""Relative and absolute, of numbers that are not whole."""
_PYTHON = ("", "python", "python3", "py", "py3")
_OVERHEAD = 30.0
"""Seconds that a sandbox may take beside the programs."""


class Judged(NamedTuple):
    """What became of a program's tests: one entry for each; what passed is an empty text, else the reason."""

    reasons: tuple[str, ...]

    @property
    def share(self) -> float:
        return self.reasons.count("") / len(self.reasons)


@configclass
class Code(Verifier):
    """The answer's program passes the row's tests."""

    runs: ClassVar[Place] = "process"
    full_marks: ClassVar[float | None] = 1.0
    trivial: ClassVar[str] = "```python\npass\n```"

    program: Literal["last_block", "text"] = "last_block"
    """What of the answer is the program: its last fenced block of Python, or all of it."""
    column: str | None = None
    """The column of the row with the tests; by default the first there is of tests, input_output, test_cases,
    public_test_cases, test_list, test."""
    score: Literal["all", "share"] = "all"
    """1 where all tests pass, else 0; or the share that passes."""
    compare: Literal["tokens", "lines"] = "tokens"
    """How what is printed is compared: word by word, where numbers with a point need to be close only; or line by line,
    where white space at the end of a line or of all does not count."""
    before: str = ""
    """Code that goes before every program, such as ``from typing import *``."""
    max_tests: Annotated[int, Field(gt=0)] | None = None
    """So many of the row's tests, its first, are run."""
    limits: Limits = Limits()
    """What a program may use."""
    mechanism: MechanismName | None = None
    """What holds the programs; by default the first that does of gvisor, bubblewrap, landlock."""
    packages: tuple[str, ...] = ()
    """Folders of Python packages that programs may import, beside Python's own library."""
    remote: Remote = Remote()
    """A service that runs the programs in place of this machine."""

    def __post_init__(self) -> None:
        """ConfigError where settings of this machine's sandbox meet a service."""
        if self.remote.service is not None and (self.mechanism is not None or self.packages):
            name = "packages" if self.packages else "mechanism"
            raise ConfigError(
                f"code has remote.service={self.remote.service} and {name}, which is of this machine's sandbox; "
                "expected one of the two; take one out"
            )

    @property
    def seconds(self) -> float:  # type: ignore[override]  # of this verifier's options, so of the instance
        """A program's own limits end it before this."""
        waiting = 0.0 if self.remote.service is None else self.remote.wait_seconds
        return self.limits.total_seconds + waiting + _OVERHEAD

    def settled(self) -> tuple[Verifier, Decision | None]:
        """With the mechanism that holds programs here; SandboxError where none does, or where the service that is set
        does not run a known program.
        """
        with _by_name():
            if self.remote.service is not None:
                with closing(open_remote(self.remote, self.limits)) as proved:
                    where = proved.mechanism
                return self, ("sandbox", where.name, where.reason)
            found = shared(self.mechanism, self.packages).mechanism
        return replace(self, mechanism=found.name), ("sandbox", found.name, found.reason)

    def prepare(self) -> None:
        """SandboxError where programs cannot be held here."""
        with _by_name():
            shared(self.mechanism, self.packages, self.remote)

    def when_unjudged(self, answered: Answered) -> float:
        """0, as any wrong answer."""
        return 0.0

    def dress(self, reference: str) -> str:
        """A program alone, in the block it is looked for in."""
        is_bare = self.program == "last_block" and last_block(reference) is None
        return f"```python\n{reference}\n```" if is_bare else reference

    def __call__(self, answered: Answered) -> float | None:
        """None where the row has no tests."""
        judged = self.judge(answered)
        if judged is None:
            return None
        return judged.share if self.score == "share" else float(judged.share == 1)

    def judge(self, answered: Answered) -> Judged | None:
        """Why each test failed, for people."""
        cases = read_cases(answered.row, self.column)
        if cases is None or not cases.cases:
            return None
        chosen = cases.cases[: self.max_tests]
        program = answered.text if self.program == "text" else last_block(answered.text)
        if program is None:
            return Judged(("the answer has no closed block of Python",) * len(chosen))
        trials = [case.trial for case in chosen]
        is_all = self.score == "all"
        program = (
            f"{self.before}\n{cases.before}{program}" if self.before else cases.before + program
        )
        with _by_name():
            sandbox = shared(self.mechanism, self.packages, self.remote)
            results = sandbox.run(program, trials, self.limits, stop_early=is_all)
        pairs = zip(chosen, results, strict=True)
        return Judged(tuple(self._reason(case, ran) for case, ran in pairs))

    def _reason(self, case: Case, ran: Ran) -> str:
        """Empty: it passed."""
        if ran.outcome != "ok":
            last = ran.stderr.strip().rpartition("\n")[2]
            return f"{ran.outcome}: {last}" if last else ran.outcome
        if case.trial.check:
            return ""
        if case.trial.call:
            is_text = case.text is not None and ran.value == json.dumps(case.text)
            return "" if is_text else _difference(case.expected, ran.value)
        is_same = _same_tokens if self.compare == "tokens" else _same_lines
        if is_same(case.expected, ran.stdout):
            return ""
        return f"printed {ran.stdout.strip()!r:.80}, expected {case.expected.strip()!r:.80}"


@contextmanager
def _by_name() -> Iterator[None]:
    """What the sandbox lacks is told with the reward that needs it."""
    try:
        yield
    except SandboxError as error:
        raise SandboxError(f"the reward code: {error}") from error


def last_block(text: str) -> str | None:
    """The last closed fenced block that is Python, or not said to be anything else."""
    found: str | None = None
    block: list[str] | None = None
    language = ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if block is None and bare.startswith("```"):
            block, language = [], (bare[3:].split() or [""])[0].lower()
        elif block is not None and bare == "```":
            found = "".join(block) if language in _PYTHON else found
            block = None
        elif block is not None:
            block.append(line)
    return found


def _difference(expected: Any, value: str | None) -> str:
    """Some data sets have a call's value in a list of one."""
    reason = f"returned {value or '':.80}, expected {json.dumps(expected):.80}"
    try:
        found = json.loads(value or "")
    except (ValueError, RecursionError):  # too long a number, too deep a list
        return reason
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    is_same = _same_value(expected, found) or (is_wrapped and _same_value(expected[0], found))
    return "" if is_same else reason


def _same_value(expected: Any, found: Any) -> bool:
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_same_value, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(
            _same_value(value, found[key]) for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return expected == found or _is_close(expected, found)
    return bool(expected == found)


def _same_lines(expected: str, found: str) -> bool:
    sides = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, found))
    left, right = sides
    return left == right


def _same_tokens(expected: str, found: str) -> bool:
    left, right = expected.split(), found.split()
    return len(left) == len(right) and all(map(_same_token, left, right))


def _same_token(expected: str, found: str) -> bool:
    """Equal, or close where the expected one is a number with a point or a power."""
    if expected == found:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _is_close(float(expected), float(found))
    except ValueError:
        return False


def _is_close(left: float, right: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer that no float can hold
        return False
