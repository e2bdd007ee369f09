"""Tools on offer and calls: names and arguments looked for in the rendering, and how arguments are spelled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import SHOWN, Chat, cut, rendered, short


def ask(session: Session) -> Finding:
    """Are tools and calls written, their arguments as JSON or in the template's own tags?"""
    chats = [chat for chat in rendered(session).chats if chat.row.tools or _calls(chat)]
    if not chats:
        return skipped("no row has tools")
    wrong = [(chat, found) for chat in chats if (found := next(_faults(chat), None))]
    if wrong:
        return failed(
            f"in {len(wrong)} of {len(chats)} rows the template {wrong[0][1][0]}",
            number=len(wrong),
            unit=f"of {len(chats)} rows",
            evidence=[f"{short(chat.place)}: {what}" for chat, (_, what) in wrong[:SHOWN]],
            remedy="give a template that writes tools, and calls as JSON (tojson), with data.template=FILE; or take "
            "them out of the rows",
        )
    number = sum(len(_calls(chat)) for chat in chats)
    return passed(f"tools and calls are written in {len(chats)} rows", number, "calls")


def _calls(chat: Chat) -> list[dict[str, Any]]:
    return [
        call["function"] for message in chat.row.messages for call in message.get("tool_calls", ())
    ]


def _faults(chat: Chat) -> Iterator[tuple[str, str]]:
    """What the template does wrong, and the words it is about."""
    text = chat.whole.text
    for tool in chat.row.tools:
        if tool["function"]["name"] not in text:
            yield "leaves out tools", f"the tool {cut(tool['function']['name'])}"
    for call in _calls(chat):
        arguments = call.get("arguments", {})
        if call["name"] not in text:
            yield "leaves out calls", f"the call of {cut(call['name'])}"
        if arguments and repr(arguments) in text and not _is_json(repr(arguments)):
            yield "writes arguments as Python, not as JSON", cut(repr(arguments))
        for key, value in arguments.items():
            if key not in text or not any(words in text for words in _spellings(value)):
                yield "leaves out arguments", f"{key} of {cut(call['name'])}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _spellings(value: Any) -> list[str]:
    """A number or text as it may be written; of what has parts, any."""
    if isinstance(value, str):
        return [value, *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))]
    return [str(value), json.dumps(value)] if isinstance(value, int | float) else [""]
