"""The reward of reasoning-gym: the score that a task's own verifier gives an answer (arXiv:2505.24760).

Some tasks evaluate an answer by Python's ``eval``, or by sympy's ``parse_expr``, which is made of it:
``__import__('os')`` would be an answer too, and run outside of any sandbox. ``plain_eval`` takes the place of ``eval``
in those modules: it evaluates values and arithmetic, and refuses everything else. reasoning-gym is imported here only.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

from taut.config import configclass
from taut.errors import ConfigError, DataError
from taut.rewards.settings import Place
from taut.rewards.verifier import RewardInput, Verifier, import_library

NODES = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BinOp,
    ast.operator,
    ast.UnaryOp,
    ast.unaryop,
    ast.Name,
    ast.Load,
    ast.Call,
)
_KNOWN = (
    "Integer Float Rational Symbol Function Add Mul Pow pi E I oo Abs sqrt cbrt root exp log ln factorial binomial erf "
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh"
)
NAMES = frozenset(_KNOWN.split())
"""The names of numbers, symbols and functions that sympy writes or knows."""


def plain_eval(
    code: str,
    global_names: Mapping[str, Any] | None = None,
    local_names: Mapping[str, Any] | None = None,
) -> Any:
    """The value of an expression; ValueError for one that is more than arithmetic."""
    if not isinstance(code, str):
        raise ValueError(f"found {type(code).__name__} to evaluate; expected a text")
    tree = ast.parse(code.strip(), mode="eval")
    locals_ = dict(local_names or {})
    known = {name: value for name, value in (global_names or {}).items() if name in NAMES}
    for node in ast.walk(tree):
        fault = ""
        is_strange = isinstance(node, ast.Name) and node.id not in {**known, **locals_}
        if is_strange or not isinstance(node, NODES):
            fault = "is no arithmetic"
        elif isinstance(node, ast.BinOp) and (_has_length(node.left) or _has_length(node.right)):
            fault = "is no arithmetic of numbers"
        elif isinstance(node, ast.Call):
            called = node.func
            is_function = isinstance(called, ast.Name) or (  # or sympy's Function('f')
                isinstance(called, ast.Call)
                and isinstance(called.func, ast.Name)
                and called.func.id == "Function"
            )
            if node.keywords or not is_function:
                fault = "calls what is no function of numbers"
        if fault:
            raise ValueError(f"{ast.unparse(node)[:80]!r} {fault}")
    return eval(compile(tree, "answer", "eval"), {**known, "__builtins__": {}}, locals_)


def _has_length(node: ast.expr) -> bool:
    """Whether it is a list or a text: a product or a format of one may be of any size."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict))


@contextmanager
def plainly(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Make these modules evaluate by ``plain_eval`` inside the block."""
    for module in modules:
        vars(module)["eval"] = plain_eval
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("eval", None)


@configclass
class Gym(Verifier):
    """The score of a task's own verifier, 0 to 1.

    A row is an entry of a task as the library makes it, ``question``, ``answer`` and ``metadata``, and any other column
    (``rows`` makes such rows, with a prompt). Most verifiers want the bare answer: set ``inside="answer"`` if a model
    writes tags around it. An answer whose evaluation is refused is one that the task cannot read.
    """

    runs: ClassVar[Place] = "process"
    full_marks: ClassVar[float | None] = 1.0
    seconds: ClassVar[float] = 30.0
    max_memory: ClassVar[int | None] = 2**30
    unjudged: ClassVar[float | None] = 0.0
    trivial: ClassVar[str] = "0"

    task: str | None = None
    """Name of the task. By default source_dataset of each row's metadata."""
    entry: str | None = None
    """The column that holds the entry. By default the row is the entry."""

    def prepare(self) -> None:
        """Import the library."""
        if self.task is not None:
            self._judges(self.task)
        _library()

    def __call__(self, answer: RewardInput) -> float | None:
        """None if the row is no entry of a task."""
        entry: Any = answer.row if self.entry is None else answer.row.get(self.entry)
        if isinstance(entry, str):
            entry = json.loads(entry)
        if not isinstance(entry, Mapping) or not isinstance(entry.get("metadata"), Mapping):
            return None
        task = self.task or entry["metadata"].get("source_dataset")
        if not isinstance(task, str):
            raise DataError(
                "found an entry whose metadata name no source_dataset; expected the name of a task; set options.task"
            )
        judges = self._judges(task)
        with plainly(self._evaluating):
            return float(judges(answer.text, dict(entry)))

    @cached_property
    def _evaluating(self) -> list[ModuleType]:
        """The modules in which an answer may be evaluated."""
        _library()
        modules = [
            module for name, module in sys.modules.items() if name.startswith("reasoning_gym.")
        ]
        return [*modules, importlib.import_module("sympy.parsing.sympy_parser")]

    @cached_property
    def _known(self) -> dict[str, Callable[[str, dict[str, Any]], float]]:
        return {}

    def _judges(self, task: str) -> Callable[[str, dict[str, Any]], float]:
        if task not in self._known:
            try:
                self._known[task] = _library().get_score_answer_fn(task)
            except ValueError as error:
                raise ConfigError(
                    f"found the task {task!r} ({error}); expected one of reasoning-gym's; correct it"
                ) from error
        return self._known[task]


def rows(task: str, count: int, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Rows of a task for ``data.train``: ``prompt``, and the entry it is verified by. ``options``: the task's own."""
    try:
        made = _library().create_dataset(task, size=count, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"the task {task!r} cannot be made: {error}; expected a task of reasoning-gym and its options; correct them"
        ) from error
    for number in range(count):
        entry = json.loads(json.dumps(made[number], default=str))
        messages = [{"role": "user", "content": entry["question"]}]
        yield {"id": f"{task}-{seed}-{number}", "prompt": messages, **entry}


def _library() -> Any:
    return import_library("reasoning_gym", "reasoning-gym", "reasoning_gym")
