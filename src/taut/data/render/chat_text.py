"""Messages to text through a Jinja chat template, by the library's own code.

Runs only in the process of ``taut.io.limited_call``, for ``chat_template.py``: a template comes with a model and may
need any time and memory. Compiling happens there too, since Jinja evaluates constant expressions as it compiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import meta
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from taut.io.limited_call import LimitExceeded

FREE = 200_000
FACTOR = 16
"""Largest text: ``FREE`` characters, and ``FACTOR`` more for each character of its messages and tools as JSON."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    is_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The text of one conversation. ``variables``: special tokens, and the template's own switches."""
    rendering: Any = render_jinja_template  # its types leave out that it returns a pair
    texts, _ = rendering(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=is_prompt,
        **variables,
    )
    text = str(texts[0])
    if len(text) > FREE:
        most = FREE + FACTOR * len(json.dumps([messages, tools, variables], default=str))
        if len(text) > most:
            raise LimitExceeded(
                f"makes {len(text):,} characters of messages for which at most {most:,} are allowed"
            )
    return text


def variables(template: str) -> list[str]:
    """The names that a template reads and does not set itself: functions of the library are not among them."""
    compiling: Any = _compile_jinja_template  # it knows the library's tags and functions
    environment = compiling(template).environment
    names = meta.find_undeclared_variables(environment.parse(template))
    return sorted(names - set(environment.globals))
