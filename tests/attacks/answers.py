"""Answers made to break the reward that judges them, and how each reward is set up to meet them."""

from __future__ import annotations

from typing import Any, NamedTuple

DIGITS = "7" * 100_000

ANSWERS: dict[str, str] = {
    "nothing": "",
    "a whole number that no float can hold": f"\\boxed{{1{'0' * 400}}}",
    "more digits than Python converts": f"\\boxed{{{DIGITS}}}",
    "a power tower": r"\boxed{9^{9^{9^{9}}}}",
    "a power tower in Python": "9**9**9**9",
    "a power of a power": r"$10^{10^{10}}$",
    "a factorial": r"\boxed{99999999!}",
    "factorials of factorials": r"\boxed{((9!)!)!}",
    "a sum without end": r"\boxed{\sum_{k=1}^{10^{12}} \sin(k)}",
    "an integral": r"\boxed{\int_0^1 e^{e^{x^{x}}} dx}",
    "nan": "\\boxed{nan}",
    "infinity": "\\boxed{-inf}",
    "infinity over infinity": "\\boxed{1e999/1e999}",
    "nothing over nothing": "\\boxed{0/0}",
    "an exponent": "1e999999999",
    "a small exponent": "1e-999999999",
    "brackets": "(" * 50_000 + "1" + ")" * 50_000,
    "open brackets": "[" * 100_000,
    "braces": "{" * 100_000 + "}" * 100_000,
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 2000 + "1" + "}" * 2000 + "}",
    "fractions": r"\frac" * 10_000,
    "fractions that are open": r"\frac{" * 10_000,
    "boxes that are open": r"\boxed{" * 10_000,
    "nested roots": "$" + r"\sqrt{" * 2000 + "2" + "}" * 2000 + "$",
    "a long sum": "$" + "+".join(["x"] * 5000) + "$",
    "a matrix": r"$\begin{pmatrix}" + r"1 & 2 \\ " * 2000 + r"\end{pmatrix}$",
    "dollars": "$" * 50_000,
    "hashes": "#### " * 20_000,
    "commas": "1," * 50_000,
    "groups of digits": ",".join(["111"] * 30_000) + "1",
    "spaces": " " * 200_000 + "x",
    "letters": "a" * 200_000,
    "what a pattern tries twice": "a" * 40 + "!",
    "words": "a b " * 50_000,
    "lines": "\n" * 100_000,
    "fences": "```\n" * 20_000,
    "a fence that is open": "```python\n" + "x = 1\n" * 10_000,
    "tags": "<think>" * 20_000 + "</answer>" * 20_000,
    "NUL": "\0" * 1000,
    "half a pair of characters": "\ud800 the answer is 5 \udfff",
    "right to left": "\u202e5\u202c \u200f\u05d0" * 1000,
    "accents": "e" + "\u0301" * 50_000,
    "digits of other scripts": "\u0665\uff15\u4e94\u2164" * 1000,
    "deep JSON": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a number of JSON": f'{{"n": {DIGITS}}}',
    "an infinite number of JSON": '{"n": 1e999}',
    "a constant that is not JSON": '{"n": NaN}',
    "a key twice": '{"n": 1, "n": "' + "a" * 10_000 + '"}',
    "many keys": "{" + ",".join(f'"k{number}": 1' for number in range(20_000)) + "}",
    "JSON for a pattern": '{"n": 1, "s": "' + "a" * 40 + '!"}',
    "a list times a number": "[0] * 10**10",
    "an import": "__import__('os').system('true')",
    "a program that returns a large number": "```python\ndef f(x):\n    return 10**400\n```",
    "a program that returns more digits": "```python\ndef f(x):\n    return 10**5000\n```",
    "a program that returns itself": "```python\ndef f(x):\n    a = []\n    a.append(a)\n    return a\n```",
    "a program that returns a deep list": (
        "```python\ndef f(x):\n    a = []\n    for _ in range(900):\n        a = [a]\n    return a\n```"
    ),
    "a program that returns nan": "```python\ndef f(x):\n    return float('nan')\n```",
    "a program of half a character": "```python\ndef f(x):\n    return '\ud800'\n```",
    "a program with NUL": "```python\nx = '\0'\n```",
    "a program of brackets": "```python\n" + "(" * 50_000 + "\n```",
    "a program that leaves": "```python\nimport os\nos._exit(0)\n```",
}
"""What it is -> the text. None is right, in form or in substance."""


class Setup(NamedTuple):
    """How a reward meets them."""

    options: dict[str, Any] = {}  # noqa: RUF012  # read only
    row: dict[str, Any] = {}  # noqa: RUF012  # read only
    is_wrong: bool = True
    """Whether each of ``ANSWERS`` has to get 0; a reward that judges form may like some."""


GYM = {"question": "2 + 3", "answer": "5", "metadata": {"source_dataset": "chain_sum"}}
ITEMS = {"n": {"type": "integer", "multipleOf": 3, "maximum": 9}, "s": {"pattern": "^(a+)+$"}}

SETUPS: dict[str, Setup] = {
    "exact_match": Setup(),
    "contains": Setup(),
    "numeric": Setup(),
    "math": Setup(),
    "code": Setup(row={"tests": {"inputs": [[1]], "outputs": [1.5], "fn_name": "f"}}),
    "reasoning_gym": Setup(row=GYM, is_wrong=False),
    "format": Setup({"partial": True}, is_wrong=False),
    "regex": Setup({"pattern": r"^(a+)+$"}, is_wrong=False),
    "json_schema": Setup(
        {"schema": {"type": "object", "properties": ITEMS, "required": ["n", "s"]}}
    ),
    "language": Setup({"language": "de"}, is_wrong=False),
    "length_target": Setup({"target": 10}, is_wrong=False),
    "length_overlong": Setup({"max_tokens": 10, "buffer": 5}, is_wrong=False),
    "length_cosine": Setup({"max_tokens": 100, "judge": "numeric", "wrong": [0, 0], "exceed": 0}),
    "repetition": Setup(is_wrong=False),
    "stop": Setup(is_wrong=False),
}
"""name of a reward -> how it is set up. Each reward that runs on this machine without a model is here."""
