"""The presets: conversations of from and value (sharegpt), and instructions (alpaca), as messages.

Messages are not validated here (``formats.py``). Imported by ``columns.py`` and ``judged.py``.
"""

from __future__ import annotations

from typing import Any

from taut.data.formats import Message, did_you_mean, parse_if_text, read_call, read_text, shown
from taut.errors import DataError

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def turns_of(value: object, where: str) -> object:
    """Messages as they are given, those of sharegpt renamed; not validated."""
    turns = parse_if_text(value, where)
    if isinstance(turns, list):
        first = turns[0] if turns else None
        if isinstance(first, dict) and "from" in first and "role" not in first:
            turns = [_from_sharegpt(turn, f"{where}[{i}]") for i, turn in enumerate(turns)]
            turns = [turn for turn in turns if turn != {"role": "system", "content": ""}]
    return turns


def after_system(named: dict[str, Any], place: str, turns: object) -> object:
    """The same with the system column before them."""
    if not isinstance(turns, list):
        return turns
    system = _system(named, place)
    if system and turns and isinstance(turns[0], dict) and turns[0].get("role") == "system":
        raise DataError(f"{place}: a system column and a system message; expected one of them")
    return [*system, *turns]


def _from_sharegpt(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where} is {shown(turn)}; expected an object with from and value")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        hint = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
        raise DataError(
            f"{where}.from is {shown(speaker)}; expected one of {', '.join(SHAREGPT_ROLES)}{hint}"
        )
    value = turn.get("value")
    if not isinstance(value, str):
        raise DataError(f"{where}.value is {shown(value)}; expected a string")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    message: Message = {"role": SHAREGPT_ROLES[speaker], "content": value, **rest}
    if speaker == "function_call":
        calls = parse_if_text(value, f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        message["content"] = ""
        message["tool_calls"] = [read_call(call, f"{where}.value") for call in calls]
    return message


def _system(named: dict[str, Any], place: str) -> list[Message]:
    """The system column as a message; empty means none, as these data sets mean it."""
    system = named.get("system", "")
    if not isinstance(system, str):
        raise DataError(f"{place}: system is {shown(system)}; expected a string")
    return [{"role": "system", "content": system}] if system.strip() else []


def alpaca_prompt(named: dict[str, Any], place: str) -> list[Message]:
    """One user message of instruction, newline, input; earlier exchanges from ``history``."""
    messages = _system(named, place)
    history = parse_if_text(named.get("history") or [], f"{place}: history")
    if not isinstance(history, list):
        raise DataError(
            f"{place}: history is {shown(history)}; expected a list of [question, answer]"
        )
    for index, exchange in enumerate(history):
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise DataError(
                f"{place}: history[{index}] is {shown(exchange)}; expected [question, answer]"
            )
        messages.append(
            {"role": "user", "content": read_text(exchange[0], f"{place}: history[{index}][0]")}
        )
        messages.append(
            {
                "role": "assistant",
                "content": read_text(exchange[1], f"{place}: history[{index}][1]"),
            }
        )
    question = read_text(named["instruction"], f"{place}: instruction")
    extra = named.get("input", "")
    if not isinstance(extra, str):
        raise DataError(f"{place}: input is {shown(extra)}; expected a string")
    question = f"{question}\n{extra}" if extra.strip() else question
    return [*messages, {"role": "user", "content": question}]
