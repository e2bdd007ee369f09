"""An Ollama Modelfile for a GGUF file: where the weights are, the chat template, the stop tokens, the system prompt.

    FROM ./model.gguf
    TEMPLATE \"\"\"...\"\"\"           in Go's template language, which Ollama renders instead of Jinja
    PARAMETER stop "<|im_end|>"    one for each end token
    SYSTEM \"\"\"...\"\"\"

Ollama never renders the Jinja template in a GGUF file: without a TEMPLATE line it looks for one of its own that was
written for a similar text, and puts nothing around a prompt where it knows none. So a template is translated here where
it can be: one that puts a text before and after each message, by role, a default system message at most, and a prompt
for the answer. The texts are found by rendering; then conversations are rendered both ways, and must come out the same.
Where one does not (dates, messages that are trimmed or rewritten), there is no TEMPLATE line, and ``Translation`` says
why. Tools are not translated: Ollama refuses them by itself for a template that does not name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from taut.errors import ModelError
from taut.io.processes import FunctionFailed

Chat: TypeAlias = Sequence[tuple[str, str]]
"""Roles and contents."""
Render: TypeAlias = Callable[[Chat], str]
"""The text of a chat with the prompt for its answer; raises FunctionFailed for what a template does not take."""

ROLES = ("system", "user", "assistant")
PROBES: tuple[Chat, ...] = (
    (("user", "Q1"),),
    (("user", "Q1"), ("assistant", "A1"), ("user", "Q2")),
    (("system", "S1"), ("user", "Q1")),
    (("system", "S1"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2")),
    (("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"), ("user", "Q3")),
)
TEXTS = (
    "plain",
    'two\n\nlines {{ .Role }} """ {% x %}',
    "  spaces around\n",
    "<think>why</think>\n\nso",
)
"""Contents: templates trim some, and rewrite others."""
CHANGING = ("strftime", "date_string", "currentDate")
"""What a template that depends on the day has in its text."""


@dataclass(frozen=True)
class Affixes:
    """What a template writes around the messages."""

    around: Mapping[str, tuple[str, str]]
    """Role -> before and after its content."""
    default: str
    """In front of a chat without a system message."""
    answer: str
    """After the last message."""

    def render(self, chat: Chat) -> str:
        """As Ollama renders ``go``."""
        has_system = any(role == "system" for role, _ in chat)
        turns = [f"{self.around[role][0]}{content}{self.around[role][1]}" for role, content in chat]
        return "".join(["" if has_system else self.default, *turns, self.answer])

    @property
    def go(self) -> str:
        """In Go's template language; no action trims white space."""
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        turns = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in self.around.items()
        )
        return (
            f"{default}{{{{ range .Messages }}}}{{{{ {turns}{{{{ end }}}}{{{{ end }}}}{self.answer}"
        )


@dataclass(frozen=True)
class Translation:
    """A chat template for Ollama, or why there is none."""

    go: str | None
    why_not: str = ""


def translate(template: str | None, render: Render, bos: str | None) -> Translation:
    """``bos``: the text that llama.cpp puts in front by itself; None: it puts nothing there."""
    if template is None:
        return Translation(None, "the tokenizer has no chat template")
    if any(word in template for word in CHANGING):
        return Translation(None, "the chat template depends on the day")

    def rendered(chat: Chat) -> str:
        text = render(chat)
        return text.removeprefix(bos) if bos else text

    try:
        affixes = _affixes(rendered)
    except (FunctionFailed, ValueError) as error:
        return Translation(None, f"the chat template is no text around messages ({error})")
    parts = [
        affixes.default,
        affixes.answer,
        *(text for pair in affixes.around.values() for text in pair),
    ]
    if any("{{" in part or '"""' in part for part in parts):
        return Translation(None, 'the chat template writes "{{" or three quotes')
    if affixes.answer.endswith('"'):
        return Translation(None, "the prompt for an answer ends with a quote")
    for probe, text in product(PROBES, TEXTS):
        chat = [(role, f"{content} {text}" if text == "plain" else text) for role, content in probe]
        try:
            wanted = rendered(chat)
        except FunctionFailed as error:
            return Translation(None, f"the chat template refuses a conversation ({error})")
        if affixes.render(chat) != wanted:
            return Translation(None, f"the chat template changes a message such as {text!r}")
    return Translation(affixes.go)


def _affixes(render: Render) -> Affixes:
    """The texts around the messages. Raises ValueError where contents are not found in the rendered text."""

    def cut(text: str, *contents: str) -> list[str]:
        parts = []
        for content in contents:
            before, found, text = text.partition(content)
            if not found or content in text:
                raise ValueError(f"a message is written {'twice' if found else 'otherwise'}")
            parts.append(before)
        return [*parts, text]

    first, to_answer, to_user, end = cut(
        render([("user", "Q1Q"), ("assistant", "A1A"), ("user", "Q2Q")]), "Q1Q", "A1A", "Q2Q"
    )
    before_system, to_question, _ = cut(render([("system", "S1S"), ("user", "Q1Q")]), "S1S", "Q1Q")
    user = _common_end(first, to_user, to_question)
    if not user:
        raise ValueError("nothing marks the user's turn")
    try:  # what stands between two messages is the end of the one and the beginning of the other
        _, between, _ = cut(render([("user", "Q1Q"), ("user", "Q2Q")]), "Q1Q", "Q2Q")
        after_user = between.removesuffix(user)
    except FunctionFailed:  # turns have to alternate
        after_user = _common_start(to_answer, end)
    return Affixes(
        around={
            "system": (before_system, to_question.removesuffix(user)),
            "user": (user, after_user),
            "assistant": (to_answer.removeprefix(after_user), to_user.removesuffix(user)),
        },
        default=first.removesuffix(user),
        answer=end.removeprefix(after_user),
    )


def _common_start(one: str, other: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[:size] if size is not None else min(one, other, key=len)


def _common_end(*texts: str) -> str:
    shared = texts[0]
    for text in texts[1:]:
        shared = _common_start(shared[::-1], text[::-1])[::-1]
    return shared


def modelfile(name: str, translation: Translation, stops: Sequence[str], system: str | None) -> str:
    """The text. ``name``: of the GGUF file, next to it. Raises ModelError for what Ollama could not read."""
    lines = [f"FROM ./{name}"]
    if translation.go is None:
        lines.insert(0, f"# no TEMPLATE: {' '.join(translation.why_not.split())}")
    else:
        lines.append(f'TEMPLATE """{translation.go}"""')
    for stop in stops:
        if '"' in stop or "\n" in stop:
            raise ModelError(
                f"the end token {stop!r} has a quote or a line break, which PARAMETER stop cannot have; expected none; "
                "write the Modelfile by hand"
            )
        lines.append(f'PARAMETER stop "{stop}"')
    if system is not None:
        if '"""' in system or system.endswith('"'):
            raise ModelError(
                "the system prompt has three quotes, or one at its end, which SYSTEM cannot have; expected none; set "
                "system to a text without"
            )
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"
