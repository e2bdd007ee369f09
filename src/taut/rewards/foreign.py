"""Reward functions of other frameworks, called as those call them. A parameter tells which one it is:

    completions    TRL, and ms-swift's ORM: completions, prompts and each column of the row -> a list
    queries        OpenRLHF's reward_func: queries (the prompt and the answer), prompts, labels -> a list, a tensor, or
                   a dictionary with one of these as "rewards"
    solution_str   verl's compute_score: data_source, solution_str, ground_truth, extra_info -> a number, or a
                   dictionary with it as "score"

The first two get lists of one. What a dictionary has beside the number is recorded as words. A return of another form
is a UserCodeError, which stops the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, Literal, TypeAlias

from taut.errors import UserCodeError
from taut.rewards.judge import prompt_text
from taut.rewards.verifier import Answered, Explained

Convention: TypeAlias = Literal["completions", "queries", "solution_str"]
KNOWN: dict[Convention, tuple[str, ...]] = {
    "completions": (),
    "queries": ("queries", "prompts", "labels"),
    "solution_str": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""The parameters that have a value. Of TRL's any column of a row may be one."""
NOT_HERE = ("completion_ids", "trainer_state", "environments", "log_extra", "log_metric")
"""What TRL gives as well, and taut does not."""


def convention_of(function: Callable[..., Any]) -> Convention | None:
    """How the function is called; None: as taut calls it."""
    parameters = inspect.signature(function).parameters
    return next((name for name in KNOWN if name in parameters), None)


def without_value(
    function: Callable[..., Any], convention: Convention, options: Collection[str]
) -> str | None:
    """A parameter that is required and cannot be given."""
    for one in inspect.signature(function).parameters.values():
        is_required = one.default is one.empty and one.kind not in (
            one.VAR_KEYWORD,
            one.VAR_POSITIONAL,
        )
        is_missing = (
            one.name in NOT_HERE
            if convention == "completions"
            else one.name not in KNOWN[convention]
        )
        if is_required and is_missing and one.name not in options:
            return one.name
    return None


def call(
    function: Callable[..., Any],
    convention: Convention,
    answered: Answered,
    options: Mapping[str, Any],
    *,
    is_class: bool,
) -> Any:
    """What the function says of one answer. ``is_class``: as ms-swift, it reads completions as texts."""
    values = _values(convention, answered, is_class)
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        values = {name: value for name, value in values.items() if name in parameters}
    returned = function(**{**values, **options})
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    rest: dict[str, Any] = {}
    key = {"completions": None, "queries": "rewards", "solution_str": "score"}[convention]
    if key is not None and isinstance(returned, Mapping):
        if key not in returned:
            raise UserCodeError(
                f"{_name(function)} returned {returned!r:.60}; expected the key {key!r} in it; add it"
            )
        rest = {name: value for name, value in returned.items() if name != key}
        returned = returned[key]
    value = _bare(returned)
    if convention != "solution_str":
        if not isinstance(value, list | tuple) or len(value) != 1:
            raise UserCodeError(
                f"{_name(function)} returned {returned!r:.60}; expected a list with one number, of the one answer "
                "that it was given; return as many as it is given"
            )
        value = _bare(value[0])
    return Explained(float(value), str(rest)) if rest and isinstance(value, Real) else value


def _values(convention: Convention, answered: Answered, is_class: bool) -> dict[str, Any]:
    """The arguments by name."""
    if convention == "queries":
        prompt = prompt_text(answered.prompt)
        return {
            "queries": [prompt + answered.text],
            "prompts": [prompt],
            "labels": [_right_answer(answered)],
        }
    if convention == "solution_str":
        judged_by = answered.row.get("reward_model")
        truth = judged_by.get("ground_truth") if isinstance(judged_by, Mapping) else None
        return {
            "data_source": answered.row.get("data_source"),
            "solution_str": answered.text,
            "ground_truth": _right_answer(answered) if truth is None else truth,
            "extra_info": answered.row.get("extra_info") or {},
        }
    answer: Any = answered.text
    asked: Any = answered.prompt
    if not isinstance(asked, str):
        asked = list(asked)
        if not is_class:
            answer = [{"role": "assistant", "content": answered.text}]
    columns = {name: [value] for name, value in answered.row.items()}
    return {**columns, "prompts": [asked], "completions": [answer]}


def _right_answer(answered: Answered) -> Any:
    """The row's right answer: a text, empty where there is none, or the list of several."""
    right = answered.references
    return list(right) if len(right) > 1 else "".join(right)


def _bare(value: Any) -> Any:
    """A tensor or an array as a number or a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
