"""Valid inputs, and ways to spoil them. A seeded ``Random`` draws the mistake, so a case is known by its number.

``spoil_value`` changes a JSON value where people go wrong (a key, a kind, a role, a shape); ``spoil_bytes`` changes a
file below that (cut, torn, another encoding, what JSON does not allow). Some of what comes out is valid all the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Path = tuple[str | int, ...]

SIMPLE = {
    "messages": [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "5"},
    ]
}
TEXT = {"text": "Once upon a time there was a small cat."}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2.5}},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}

ROWS: list[dict[str, Any]] = [
    SIMPLE,
    {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "a"},
            {"role": "assistant", "content": "Hello!", "train": False},
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": "I am fine.", "reasoning_content": "polite"},
        ],
        "id": 7,
    },
    {
        "messages": [
            {"role": "user", "content": "The weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "sun", "name": "weather"},
            {"role": "assistant", "content": "It is fine."},
        ],
        "tools": [TOOL],
    },
    {
        "conversations": [
            {"from": "human", "value": "Thank you!"},
            {"from": "gpt", "value": "You are welcome."},
        ],
        "system": "Answer the question.",
    },
    {"prompt": "2 plus 3 is", "completion": " 5."},
    {"prompt": SIMPLE["messages"][:1], "completion": SIMPLE["messages"][1:]},
    {"instruction": "Add.", "input": "2 3", "output": "5", "history": [["Hello", "Hi"]]},
    TEXT,
    {"prompt": "What is 2 plus 3?", "chosen": "5", "rejected": "6"},
]
"""One or more of each shape that a row may have, and one that SFT does not take."""

_CHOICE = {"chosen": SIMPLE["messages"][1:], "rejected": {"role": "assistant", "content": "6"}}
_STEPS = {"completions": ["Take 2.", "Add 3."], "labels": [True, 0.5]}
JUDGED: dict[str, list[dict[str, Any]]] = {
    "preference": [
        {"prompt": SIMPLE["messages"][:1], **_CHOICE, "margin": 0.5},
        {"prompt": "2 plus 3 is", "chosen": " 5.", "rejected": " 6.", "score_chosen": 2},
        {"chosen": "2 plus 3 is 5.", "rejected": "2 plus 3 is 6."},
        {"chosen": SIMPLE["messages"], "rejected": [SIMPLE["messages"][0], _CHOICE["rejected"]]},
        {"instruction": "Add.", "input": "2 3", "chosen": "5", "rejected": "6"},
        {
            "conversations": [{"from": "human", "value": "Thank you!"}],
            "chosen": {"from": "gpt", "value": "You are welcome."},
            "rejected": {"from": "gpt", "value": "Once."},
            "system": "Answer.",
        },
        {"prompt": SIMPLE["messages"][:1], "answers": ["5", "6", "7"], "scores": [1, 0.5, -2]},
        {"prompt": "2 plus 3 is", "responses": [" 5.", " 6."], "ranks": [1, 2]},
    ],
    "unpaired": [
        {**SIMPLE, "label": True},
        {"prompt": "2 plus 3 is", "completion": " 6.", "label": False},
        {"prompt": SIMPLE["messages"][:1], **_CHOICE},
    ],
    "scored": [
        {**SIMPLE, "score": 1},
        {"prompt": "2 plus 3 is", "completion": " 6.", "score": -0.5},
    ],
    "stepwise": [
        {"prompt": SIMPLE["messages"][:1], **_STEPS},
        {"prompt": "Add 2 and 3.", **_STEPS},
    ],
}
"""The shapes of rows whose answers are judged."""

FLAT: list[dict[str, str]] = [
    {"prompt": "2 plus 3 is", "completion": " 5."},
    {"instruction": "Add.", "input": "2, 3", "output": "5"},
    {"text": "The cat sat on the mat."},
    {"messages": json.dumps(SIMPLE["messages"])},
]
"""The same for files whose cells are text."""

HOSTILE: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, float("nan"), float("inf")),
    *("", " ", "\0", "\ud800", "a\u2028b", "<|im_end|>", "<|eot_id|>", "[", '{"a": 1, "a": 2}'),
    *([], {}, [[]], [None], {"": 1}, {"\n": {}}, [{"role": "user"}], "x" * 5000),
]
KEYS = [
    *("role", "content", "train", "tool_calls", "tools", "name", "images", "image", "weight"),
    *("mesages", "x\ny", "", "text", "prompt", "chosen", "from", "function", "arguments", "type"),
]
ROLES = ["assistant", "user", "system", "tool", "function", "USER", "human"]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Where everything in a value is, itself included."""
    yield at
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield from paths(item, (*at, key))


def spoil_value(draw: Random, value: Any) -> Any:
    """The value with a mistake or two in it."""
    box = [copy.deepcopy(value)]
    for _ in range(draw.choice([1, 1, 2])):
        *parents, last = draw.choice(list(paths(box[0], (0,))))
        holder: Any = box
        for key in parents:
            holder = holder[key]
        draw.choice(VALUE_MISTAKES)(draw, holder, last)
        box = box or [None]
    return box[0]


def _replace(draw: Random, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(draw.choice(HOSTILE))


def _remove(draw: Random, holder: Any, key: Any) -> None:
    del holder[key]


def _rename(draw: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[draw.choice(KEYS)] = holder.pop(key)
    else:
        holder[key] = {draw.choice(KEYS): holder[key]}


def _add(draw: Random, holder: Any, key: Any) -> None:
    target = holder[key] if isinstance(holder[key], dict) else holder
    new = copy.deepcopy(draw.choice(HOSTILE))
    if isinstance(target, dict):
        target[draw.choice(KEYS)] = new
    else:
        target.append(new)


def _wrap(draw: Random, holder: Any, key: Any) -> None:
    holder[key] = [holder[key]]


def _as_text(draw: Random, holder: Any, key: Any) -> None:
    text = json.dumps(holder[key])
    holder[key] = text[: draw.randrange(len(text) + 1)]


def _twice(draw: Random, holder: Any, key: Any) -> None:
    if isinstance(holder[key], list):
        holder[key] = holder[key] * 2
    else:
        holder[key] = {"role": draw.choice(ROLES), "content": holder[key]}


def _other_role(draw: Random, holder: Any, key: Any) -> None:
    target = holder if isinstance(holder, dict) else holder[key]
    if isinstance(target, dict):
        target["role"] = draw.choice(ROLES)
    else:
        holder[key] = draw.choice(ROLES)


VALUE_MISTAKES: list[Callable[[Random, Any, Any], None]] = [
    *(_replace, _replace, _replace, _remove, _rename, _add),
    *(_wrap, _as_text, _twice, _other_role),
]


def spoil_bytes(draw: Random, raw: bytes) -> bytes:
    """The bytes with one mistake in them."""
    at = draw.randrange(len(raw) + 1)
    end = min(len(raw), at + draw.randrange(1, 9))
    return draw.choice(BYTE_MISTAKES)(draw, raw, at, end)


JUNK = [
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"\\u00", b"\t", b"\x1b", b"'"),
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"=", b"#", b"-", b"\r", b"\n"),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"True", b"undefined", b"[" * 5000),
    *(b'"a": 1, "a": 2,', b"{}", b"//", b"\xe2\x80\xa8", b"<|im_end|>"),
]
BYTE_MISTAKES: list[Callable[[Random, bytes, int, int], bytes]] = [
    lambda draw, raw, at, end: raw[:at],
    lambda draw, raw, at, end: raw[at:],
    lambda draw, raw, at, end: raw[:at] + raw[end:],
    lambda draw, raw, at, end: raw[:at] + draw.choice(JUNK) + raw[at:],
    lambda draw, raw, at, end: raw[:at] + draw.choice(JUNK) + raw[end:],
    lambda draw, raw, at, end: raw[:at] + draw.randbytes(end - at) + raw[end:],
    lambda draw, raw, at, end: raw[:at] + bytes(end - at) + raw[end:],
    lambda draw, raw, at, end: raw[at:] + raw[:at],
    lambda draw, raw, at, end: raw.decode("latin-1").encode("utf-16"),
    lambda draw, raw, at, end: raw.replace(b'"', b"'"),
    lambda draw, raw, at, end: raw + raw,
    lambda draw, raw, at, end: b"\xef\xbb\xbf" + raw,
]

TOML = [
    *('"text"', '""', "1", "-1", "0", "1.5", "inf", "-nan", "1e400", "9" * 25, "9" * 5000),
    *("0x" + "f" * 40, "0x" + "f" * 5000, "true", "[]", "[[1]]", "[" * 40 + "]" * 40, "[" * 2000),
    *(
        "{}",
        "{a = 1}",
        "{a.b.c = [1, {d = inf}]}",
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
    ),
    *(
        '"\\u0000"',
        '"\\ud800"',
        '"a\\u2028b"',
        "'\u2028'",
        "none",
        "null",
        "text",
        "",
        '"',
        "]",
        "=",
    ),
    *('"~no-such-user/x"', '"' + "x" * 3000 + '"', "[1, 'a']", "{path = 'a', weight = nan}", "1_0"),
    *("[{path = 1}]", "[{path = 'a', wait = 1}]", "\0", "\ud800", "'''", '"""', "# nothing"),
]
"""Values of a configuration, most of them wrong for most keys."""
