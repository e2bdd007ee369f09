"""Reward functions of other frameworks, called as those call them. A parameter tells which one it is:

    completions    TRL, and ms-swift's ORM: completions, prompts and each column of the row -> a list
    queries        OpenRLHF's reward_func: queries (the prompt and the answer), prompts, labels -> a list, a tensor, or
                   a dictionary with one of these as "rewards"
    solution_str   verl's compute_score: data_source, solution_str, ground_truth, extra_info -> a number, or a
                   dictionary with it as "score"

The first two get lists over the answers to one prompt, so that they may compare them. What a dictionary has beside the
number is recorded as words. A return of another form is a UserCodeError, which stops the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias

from taut.errors import UserCodeError
from taut.rewards.judge import prompt_text
from taut.rewards.verifier import Explained, RewardInput

Convention: TypeAlias = Literal["completions", "queries", "solution_str"]
KNOWN: dict[Convention, tuple[str, ...]] = {
    "completions": (),
    "queries": ("queries", "prompts", "labels"),
    "solution_str": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""The parameters that have a value. Of TRL's any column of a row may be one."""
NOT_HERE = ("completion_ids", "trainer_state", "environments", "log_extra", "log_metric")
"""Parameters that TRL passes, and taut does not."""


def convention_of(function: Callable[..., Any]) -> Convention | None:
    """Return the convention by which the function is called; None: taut's."""
    parameters = inspect.signature(function).parameters
    return next((name for name in KNOWN if name in parameters), None)


def without_value(
    function: Callable[..., Any], convention: Convention, options: Collection[str]
) -> str | None:
    """Return a required parameter that has no value."""
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
    group: Sequence[RewardInput],
    options: Mapping[str, Any],
    *,
    is_class: bool,
) -> list[Any]:
    """Return the value of each answer of a group. ``is_class``: ms-swift's, which reads completions as texts."""
    values = _values(convention, group, is_class)
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        values = {name: value for name, value in values.items() if name in parameters}
    returned = function(**{**values, **options})
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    rest: dict[str, Any] = {}
    # Of a dictionary, the values under its key; the rest is kept as their explanation.
    key = {"completions": None, "queries": "rewards", "solution_str": "score"}[convention]
    if key is not None and isinstance(returned, Mapping):
        if key not in returned:
            raise UserCodeError(
                f"{_name(function)} returned {returned!r:.60}; expected the key {key!r} in it; add it"
            )
        rest = {name: value for name, value in returned.items() if name != key}
        returned = returned[key]
    said = _bare(returned)
    said = [said] if convention == "solution_str" else said
    if not isinstance(said, list | tuple) or len(said) != len(group):
        raise UserCodeError(
            f"{_name(function)} returned {returned!r:.60}; expected a list of {len(group)}, a number for each answer "
            "that it was given; return as many as it is given"
        )
    return [
        Explained(float(value), str(_of_answer(rest, n, len(said))))
        if rest and isinstance(value, Real)
        else value
        for n, value in enumerate(map(_bare, said))
    ]


def _of_answer(value: Any, number: int, size: int) -> Any:
    """Return the part of a dictionary's other values that is about one answer."""
    value = _bare(value)
    if isinstance(value, Mapping):
        return {name: _of_answer(each, number, size) for name, each in value.items()}
    return value[number] if isinstance(value, list | tuple) and len(value) == size else value


def _values(convention: Convention, group: Sequence[RewardInput], is_class: bool) -> dict[str, Any]:
    """Return the arguments by name."""
    first = group[0]
    if convention == "queries":
        prompts = [prompt_text(one.prompt) for one in group]
        return {
            "queries": [prompt + one.text for prompt, one in zip(prompts, group, strict=True)],
            "prompts": prompts,
            "labels": [_right_answer(one) for one in group],
        }
    if convention == "solution_str":
        judged_by = first.row.get("reward_model")
        truth = judged_by.get("ground_truth") if isinstance(judged_by, Mapping) else None
        return {
            "data_source": first.row.get("data_source"),
            "solution_str": first.text,
            "ground_truth": _right_answer(first) if truth is None else truth,
            "extra_info": first.row.get("extra_info") or {},
        }
    texts = [one.text for one in group]
    is_text = isinstance(first.prompt, str)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    return {
        **{name: [one.row.get(name) for one in group] for name in first.row},
        "prompts": [one.prompt if is_text else list(one.prompt) for one in group],
        "completions": texts if is_text or is_class else messages,
    }


def _right_answer(answer: RewardInput) -> Any:
    """The row's right answer: a text, empty where there is none, or the list of several."""
    right = answer.references
    return list(right) if len(right) > 1 else "".join(right)


def _bare(value: Any) -> Any:
    """A tensor or an array as a number or a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
